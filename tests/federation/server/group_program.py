"""What test_group starts in several processes: `torchrun group_program.py MODE OUT`."""

import os
import sys
from pathlib import Path

import torch
from small import cnn, make_clients, mlp

import fastfact as ff
from fastfact.federation.server.processes import Group

SIZES = (10, 7, 12, 9, 6)
METHODS = {
    # Constant, block-constant, matched and per-channel mixing; server memory; keys that are computed.
    2: ["agnostic-fl", "clustered-fl", "factorized-fl-alpha", "factorized-fl-beta", "fedfac-dynamic", "simfed"],
    3: [*(name for name in ff.methods.names() if name != "fedfomo"), "asynchronous", "deadline", "kept", "statistics"],
}
CLOCK = {"speed": 50.0, "speed_spread": 1.0, "bandwidth": 1e4, "bandwidth_spread": 1.0}
KEPT = {"optimizer": "adamw", "optimizer_states": "kept", "eps": 1e-3, "lr": 0.02, "schedule": "cosine"}
OTHERS = {
    "asynchronous": ("fedbuff", CLOCK | {"buffer": 2}),
    "deadline": ("fedavg", CLOCK | {"deadline": 0.7}),
    "kept": ("fedavg", KEPT | {"schedule_rounds": 4}),
    "statistics": ("factorized-fl-beta", {"settings": {"match_on": "initial-statistics"}}),
}
ROUNDS = 4


def federation(method: str, group: Group | None = None, **options) -> ff.Federation:
    """Five clients of which two take part in a round: three processes often have none of them."""
    if method in OTHERS:
        method, own = OTHERS[method]
        options = own | options
    options = {"epochs": 1, "batch_size": 4, "lr": 0.1, "seed": 3, "cohort": 1, "participation": 0.4} | options
    model, shape = (cnn, (1, 6, 6)) if method in ("fedavg", "fedfac-dynamic", "factorized-fl-beta") else (mlp, (6,))
    return ff.Federation(model, make_clients(shape, SIZES), method, **options, group=group)


def summary(fed: ff.Federation) -> dict:
    """All that must be the same in one process."""
    block = fed._shard.block
    own = fed.states.load(list(block))
    return {
        "state": fed._shard.stacked(own, range(len(fed))),
        "memory": dict(fed.server_state),
        "rows": [{name: value for name, value in row.items() if name != "seconds"} for row in fed.history],
        "bytes": {direction: fed.ledger.by_client(direction) for direction in ("up", "down")},
        "names": fed.ledger.by_name(),
        "density": fed.density(),
        "similarity": fed.similarity(),
    }


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    with Group.of_torchrun() as group:
        found = {}
        for method in METHODS[group.size]:
            fed = federation(method, group)
            fed.fit(ROUNDS)
            found[method] = summary(fed)
        for method in ("factorized-fl-alpha", "fedavg"):
            # One number of processes begins, another goes on.
            directory = out / method
            if not directory.exists() or group.size == 2:
                federation(method, group).fit(2, directory)
            else:
                clients = make_clients((1, 6, 6) if method == "fedavg" else (6,), SIZES)
                fed = ff.Federation.load(directory, cnn if method == "fedavg" else mlp, clients, group=group)
                fed.fit(ROUNDS - 2, directory)
                found[f"{method}, resumed"] = summary(fed)
        errors = {}
        for name, options in {"fedfomo": {}, "fedavg": {"store": str(out / "store")}}.items():
            try:
                federation(name, group, **options)
            except ValueError as error:
                errors[name] = str(error)
        if group.rank == 0:
            torch.save({"found": found, "errors": errors, "size": group.size}, out / f"{group.size}.pt")
    assert not os.path.exists(out / "store")


if __name__ == "__main__":
    main()
