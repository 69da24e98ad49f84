"""What a deployment of Flower does when something goes wrong, on loopback: a row for each fault.

    python -m bench.flower_faults [--json FILE] [--only killed,silent]

Each fault is a run of its own of Factorized-FL α: ten clients on three SuperNodes (examples/flower), with TLS and node
keys. Of each: who took part in which round, what the server said, and whether the clients that went on went on from the
state they had. Needs the extra `flower`.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench.flower_deployment import Deployment, deployed
from fastfact.base import machine

ROOT = Path(__file__).resolve().parent.parent
NODES = {"north": "0-3", "east": "4-6", "south": "7-9"}

FAULTY = """
import os, time

fault = os.environ.get("FAULT")
if fault == "version":
    import fastfact.flower.packet
    fastfact.flower.packet.PROTOCOL = 2

import digits.right
from flwr.clientapp import ClientApp
from fastfact.flower.apps import unpacked

server = digits.right.server
client = digits.right.client
if fault in ("silent", "late"):
    right, client = client, ClientApp()

    def answer(message, context):
        facts = unpacked(message.content).facts
        if facts.get("round") == 2:
            time.sleep(1e6 if fault == "silent" else float(os.environ["FAULT_SECONDS"]))
        return right(message, context)

    client.query()(right)
    client.train()(answer)
"""


def project(folder: Path) -> Path:
    """The example with faults that the environment of a node asks for."""
    shutil.copytree(ROOT / "examples" / "flower", folder)
    apps = folder / "digits" / "apps.py"
    apps.rename(apps.with_name("right.py"))
    apps.write_text(FAULTY)
    return folder


def rounds_of(out: Path) -> dict[int, list[int]]:
    """round → the clients that took part, of a server's directory."""
    found: dict[int, list[int]] = {}
    path = out / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        found.setdefault(row["round"], []).append(row["client"])
    return found


def await_round(out: Path, round: int, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while round not in rounds_of(out):
        if time.monotonic() > until:
            raise RuntimeError(f"round {round} has not ended")
        time.sleep(0.5)


def restart(here: Deployment, name: str, **environment: str) -> None:
    here.processes[name].terminate()  # it says good-bye, so that the SuperLink takes it again at once
    with contextlib.suppress(subprocess.TimeoutExpired):
        here.processes[name].wait(30)
    here.kill(name)
    for _ in range(4):
        here.start_node(name, **environment)
        time.sleep(20)
        if here.processes[name].poll() is None:
            return


def scenario(here: Deployment, fault: str, app: Path, out: Path, deadline: float) -> dict:
    if fault == "version":
        restart(here, "east", FAULT="version")
    elif fault in ("silent", "late"):
        restart(here, "east", FAULT=fault, FAULT_SECONDS=str(deadline))
    elif fault == "certificate":
        # Neither a key that the SuperLink does not know nor a certificate that nobody vouches for.
        here.nodes |= {"stranger": "4-6"}
        here.make_key("stranger")
        here.processes["east"].terminate()
        here.start_node("stranger")
    at_least = 7 if fault in ("version", "certificate") else 10
    options = {"rounds": 4, "out": str(out), "deadline": deadline, "at_least": at_least}
    run = here.run(app, **options)
    if fault == "killed":
        await_round(out, 1)
        time.sleep(12)
        here.kill("east")
        await_round(out, 2)
        here.start_node("east")
    status = here.wait(run, 1800)
    log = here.server_log(run)
    said = [line for line in log.splitlines() if line.startswith(("round ", "clients ")) or "fastfact: round" in line]
    rounds = rounds_of(out)
    row = {
        "status": status,
        "rounds": {number: sorted(clients) for number, clients in rounds.items()},
        "said": [line for line in said if "fastfact: round" not in line],
        "clock": [line.partition("fastfact: ")[2] for line in said if "fastfact: round" in line],
        "states_lost": sum("lost its state" in here.log(name) for name in here.processes if name in here.logs),
    }
    if fault == "certificate":
        row["node_said"] = [line for line in here.log("stranger").splitlines() if "rror" in line or "ailed" in line][:3]
        here.kill("stranger")
        restart(here, "east")
    elif fault != "killed":
        restart(here, "east")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="killed,silent,late,version,certificate")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of a round")
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        app = project(Path(folder) / "project")
        with deployed(Path(folder) / "deployment", NODES) as here:
            for fault in options.only.split(","):
                rows[fault] = scenario(here, fault, app, Path(folder) / f"out-{fault}", options.deadline)
                print(fault, json.dumps(rows[fault], indent=1), flush=True)
    if options.json:
        result = {"measured": machine.provenance(), "deadline": options.deadline, "faults": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
