"""The same federation three times: our loop, Flower's simulation, and a deployment of Flower on loopback.

    python -m bench.flower_equal [--json FILE] [--methods fedavg,simfed] [--rounds 5]

Ten clients on the digits (examples/flower). Prints a row a method: how far the clients' states are apart at the end,
and what travelled: by the ledger, and all bytes of the nodes' connections, with TLS, HTTP and Flower's own messages.
Needs the extra `flower` and flwr[simulation].
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import fastfact as ff
from fastfact.base import machine
from fastfact.flower import Node, Server
from fastfact.flower.node import Folder

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "flower"))
from digits.apps import CLIENTS, everybody, model, samples  # noqa: E402

METHODS = ("factorized-fl-alpha", "factorized-fl-beta", "simfed", "feddecomp", "fedfac-dynamic", "fedavg")
TRAINING = {"epochs": 1, "batch_size": 16, "lr": 0.05}
NODES = {"north": "0-3", "east": "4-6", "south": "7-9"}


def loop(method: str, rounds: int) -> ff.Federation:
    fed = ff.Federation(model, everybody(), method, cohort=1, **TRAINING)
    fed.fit(rounds)
    return fed


SIMULATION = """
import sys
from digits.apps import CLIENTS, model, samples
from fastfact.flower import client_app, server_app
from flwr.simulation import run_simulation

method, rounds, out, training = sys.argv[1], int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
server = server_app(method, model, clients=CLIENTS, rounds=rounds, out=out + "/server", **training)
client = client_app(model, samples, state=out + "/state")
resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
run_simulation(server, client, num_supernodes=CLIENTS, backend_config=resources)
"""


def simulation(method: str, rounds: int, out: Path) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples' / 'flower'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SIMULATION, method, str(rounds), str(out), repr(TRAINING)]
    subprocess.run(command, check=True, env=os.environ | environment | {"FLWR_TELEMETRY_ENABLED": "0"}, cwd=out.parent)


def compare(fed: ff.Federation, method: str, server_folder: Path, state: Path) -> dict:
    """How far the clients' states and rows are from the loop's. Distances are of float tensors, relative to the largest
    number of the tensor."""
    server = Server(model, CLIENTS, None, method, None, TRAINING, out=server_folder)
    config, worst, same = server.config(), 0.0, True
    node = Node(config, model, samples, range(CLIENTS), Folder(state))
    for k in range(CLIENTS):
        held, known = node.state_of(server.run, k)
        assert known["round"] == fed.round, (k, known["round"])
        for name, tensor in fed.states.load([k]).items():
            same &= torch.equal(tensor, held[name])
            if tensor.is_floating_point():
                scale = tensor.abs().max().clamp(min=1e-30)
                worst = max(worst, float((tensor - held[name]).abs().max() / scale))
    rows = list(zip(server.history, fed.history, strict=True))
    found = {
        "same_bits": bool(same),
        "largest_difference": worst,
        "accuracies_equal": all(a["accuracy"] == b["accuracy"] for a, b in rows),
        "ledger_up": server.ledger.up,
        "ledger_down": server.ledger.down,
    }
    server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("simulation", "deployment"))
    options = parser.parse_args()
    from bench.flower_deployment import deployed

    torch.set_num_threads(1)
    methods, rows = options.methods.split(","), {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for method in methods:
            fed = loop(method, options.rounds)
            accuracy = [row["accuracy"] for row in fed.history.of(fed.round)]
            rows[method] = {
                "accuracy": sum(accuracy) / len(accuracy),
                "ledger_up": fed.ledger.up,
                "ledger_down": fed.ledger.down,
            }
            if options.only != "deployment":
                out = base / f"simulation-{method}"
                out.mkdir()
                simulation(method, options.rounds, out)
                rows[method]["simulation"] = compare(fed, method, out / "server", out / "state")
                print(method, json.dumps(rows[method]), flush=True)
        if options.only != "simulation":
            with deployed(base / "deployment", NODES) as here:
                for method in methods:
                    fed, out = loop(method, options.rounds), base / f"deployed-{method}"
                    before = here.counter.up, here.counter.down
                    run = here.run(ROOT / "examples" / "flower", method=method, rounds=options.rounds, out=str(out))
                    if (status := here.wait(run, 1500)) != "finished:completed":
                        raise SystemExit(f"{method}: {status}\n{here.server_log(run)[-4000:]}")
                    after = here.counter.up, here.counter.down
                    found = compare(fed, method, out, here.folder / "state")
                    found |= {"connections_up": after[0] - before[0], "connections_down": after[1] - before[1]}
                    found["log"] = [line for line in here.server_log(run).splitlines() if "fastfact: round" in line]
                    rows[method]["deployment"] = found
                    print(method, json.dumps(rows[method]), flush=True)
                    shutil.rmtree(out)
    result = {"measured": machine.provenance(), "rounds": options.rounds, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
