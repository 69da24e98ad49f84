"""Differential privacy on the digits: what noise does to a method that shares u alone, and to one that shares all.

`python bench/private.py` (a minute of one core) writes bench/results/private.json and the table of docs/hostile.md.
"""

import functools
import statistics

import torch
from hostile import PAGE, ROOT, TRAINING, put

import fastfact as ff
from fastfact import data, models
from fastfact.base import files
from fastfact.base.machine import provenance
from fastfact.federation.server import robust
from fastfact.federation.server.exchange import START
from fastfact.federation.tensors import describe

CLIENTS, ROUNDS, NOISE = 20, 6, (0.0, 2.0, 8.0)
METHODS = {"factorized-fl-alpha": {"tau": -1.0, "epsilon": 0.0}, "fedavg": {}}


def shared(method: str) -> int:
    """Numbers that a client of ResNet-9 at full width shares, classifier and batch-norm kept."""
    keep = dict.fromkeys(("share_classifier", "share_norm", "share_norm_statistics"), False)
    made = ff.methods.make(method, **METHODS[method] | keep)
    model = made.prepare(models.build("resnet9", (3, 32, 32), 10))
    return sum(info.numel for info in describe(model, made.classifier).values() if made.shares(info))


def federation(method: str, clip: float, noise: float) -> ff.Federation:
    return ff.Federation(
        functools.partial(models.build, "cnn2", (1, 8, 8), 10, 0.25),
        data.make_clients("digits", "iid", CLIENTS, 0, samples=80, test_fraction=0.4),
        method,
        settings=METHODS[method],
        clip=clip,
        noise=noise,
        **TRAINING,
    )


def median_norm(method: str) -> float:
    """Of the first round's updates."""
    fed = federation(method, 1e6, 0.0)
    fed.fit(1)
    state = fed.states.load(range(CLIENTS))
    return robust.norms(state, {name: state[START + name] for name in fed.exchange.bounded}).median().item()


def rows() -> list[dict]:
    found = []
    for method in METHODS:
        clip, numbers = median_norm(method), shared(method)
        for noise in NOISE:
            fed = federation(method, clip, noise)
            fed.fit(ROUNDS)
            found.append(
                {
                    "method": method,
                    "shared": numbers,
                    "clip": clip,
                    "noise": noise,
                    "epsilon": fed.epsilon() if noise else None,
                    # Of all numbers of the mean, in units of the norm that one client's update may have.
                    "noise_norm": noise * numbers**0.5 / CLIENTS,
                    "noise_norm_here": noise * sum(fed.infos[n].numel for n in fed.shared) ** 0.5 / CLIENTS,
                    "downloaded": statistics.fmean(fed.accuracies_as_downloaded()),
                    "trained": statistics.fmean(row["accuracy"] for row in fed.history.of(ROUNDS)),
                }
            )
            print(found[-1], flush=True)
    return found


def table(found: list[dict]) -> str:
    lines = ["| | numbers shared (ResNet-9) | z | ε | noise / S, ResNet-9 | here | accuracy |", "|---" * 7 + "|"]
    for one in found:
        epsilon = "–" if one["epsilon"] is None else f"{one['epsilon']:.1f}"
        lines.append(
            f"| {one['method']} | {one['shared']:,} | {one['noise']:g} | {epsilon} | {one['noise_norm']:.2g} |"
            f" {one['noise_norm_here']:.2g} | {100 * one['downloaded']:.0f} / {100 * one['trained']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    torch.set_num_threads(1)
    about = {"command": "python bench/private.py", **provenance(), "clients": CLIENTS, "rounds": ROUNDS}
    found = rows()
    content = about | {"training": TRAINING, "rows": found}
    files.write_json(ROOT / "bench" / "results" / "private.json", content, indent=1, ensure_ascii=False)
    put(PAGE, "private", table(found))


if __name__ == "__main__":
    main()
