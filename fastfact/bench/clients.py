"""How many clients a second federated averaging trains, ours beside other ways of doing it, and how cost grows with K.

Every side runs in a process of its own (`fastfact.bench.sides`) and does one round in turn, so that noise meets all of
them alike. A row has the median seconds of a round, client-rounds per second, the median over the rounds of ratio =
its time / ours, the same ratio of processor time (cpu_ratio: what is left of it on a busy machine), the peak memory in
MiB (with child processes) and the loss of the global model on held-out samples after all rounds. A side that cannot run
has the reason in its row.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastfact.bench import sides
from fastfact.bench.common import draw_growth

ROUNDS = {"resnet9": 2, "resnet9, 10 % of μ": 2, "cnn2": 5, "linear": 5}
RIVALS = {"resnet9, 10 % of μ": ("loop", "loop, channels_last")}
GOALS = {
    "resnet9": {"loop": 1.15, "loop, channels_last": 1.0, "vmap": 1.0, "pfl": 1.0, "flower": 1.0},
    "resnet9, 10 % of μ": {"loop": 2.3},
    "cnn2": {"loop": 1.6, "pfl": 1.6, "flower": 1.6},
    "linear": {"loop": 4.0, "flower": 40.0},
}
REGISTERED = (10, 100, 1_000, 10_000, 100_000)


@dataclass
class Side:
    """A side at work, from the first line it says."""

    name: str
    work: str
    threads: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: float | None = None
    loss: float | None = None
    reason: str | None = None
    """Why it does not run."""

    def __post_init__(self):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        root = str(Path(sides.__file__).parents[2])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fastfact.bench.sides", self.name, self.work, str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
        )

    def _listen(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"reason": f"exit code {self._process.wait()}: {self._last_words()}"}
        self.reason = answer.get("reason", self.reason)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or [""])[-1]

    def ready(self) -> None:
        """Wait until it is set up."""
        self._listen()

    def round(self, counts: bool) -> None:
        """One round; only `counts` keeps its time."""
        if self.reason is None:
            print("round", file=self._process.stdin, flush=True)
            answer = self._listen()
            if counts and self.reason is None:
                self.seconds.append(answer["seconds"])
                self.cpu.append(answer["cpu"])
                self.memory = answer["memory"]

    def end(self) -> None:
        """Let the process finish."""
        if self.reason is None:
            print("end", file=self._process.stdin, flush=True)
            self.loss = self._listen().get("loss")
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def compare(work: sides.Workload, names: list[str], rounds: int, threads: int) -> list[dict[str, Any]]:
    """A row for each side, ours first, measured in turn after a round that does not count."""
    running = []
    try:
        for name in names:
            running.append(Side(name, work.name, threads))
        for side in running:
            side.ready()
        for turn in range(rounds + 1):
            for side in running:
                side.round(counts=turn > 0)
    finally:
        for side in running:
            side.end()
    ours = running[0]
    if ours.reason is not None:
        raise RuntimeError(f"bench clients: {work.name}: {ours.reason}")
    rows = []
    for side in running:
        row = {"work": work.name.partition("/")[0], "side": side.name, "clients": work.clients, "threads": threads}
        if side.reason is not None:
            rows.append(row | {"reason": side.reason})
            continue
        seconds = statistics.median(side.seconds)
        row |= {"seconds": seconds, "client_rounds_per_second": work.clients / seconds}
        if side is not ours:
            row |= {
                "ratio": _ratio(side.seconds, ours.seconds),
                "cpu_ratio": _ratio(side.cpu, ours.cpu),
                "goal": GOALS[row["work"]].get(side.name),
            }
        row |= {"memory_mib": side.memory, "loss": side.loss, "version": sides.version(side.name)}
        rows.append(row)
    return rows


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def grow(registered: int, share: float, rounds: int, threads: int) -> dict[str, Any]:
    """A row: `registered` clients of a small model, of which `share` takes part in each round."""
    side = Side("ours", f"growth/{registered}/{share}", threads)
    side.ready()
    for turn in range(rounds + 1):
        side.round(counts=turn > 0)
    side.end()
    taking_part = max(1, round(share * registered))
    row = {"work": "growth", "side": "ours", "clients": registered, "taking_part": taking_part, "threads": threads}
    if side.reason is not None:
        return row | {"reason": side.reason}
    seconds = statistics.median(side.seconds)
    return row | {
        "seconds": seconds,
        "client_rounds_per_second": taking_part / seconds,
        "memory_mib": side.memory,
    }


def run(
    quick: bool = False, only: str | None = None, clients: int | None = None, rounds: int | None = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each work and its rows.

    quick: a tenth of the clients, one round, and 10 clients for growth. only: that work alone. clients, rounds: in
    place of each work's own (of growth: the most clients).

    Raises ValueError for an unknown `only`, RuntimeError if our own side fails.
    """
    kind = "quick" if quick else clients
    works = {**sides.WORKS, "growth": None}
    if only is not None and only not in works:
        raise ValueError(f"only={only!r}, must be one of {', '.join(works)}")
    threads = torch.get_num_threads()
    for name, work in works.items():
        if only not in (None, name):
            continue
        if work is None:
            sizes = [k for k in REGISTERED[: 1 if quick else None] if clients is None or k <= clients]
            # In one of the rounds what is replayed later is recorded.
            turns = rounds or (1 if quick else 3)
            yield name, [grow(k, share, turns, threads) for share in (1.0, 0.01) for k in sizes]
            continue
        names = ["ours", *RIVALS.get(name, [side for side in sides.SIDES if side != "ours"])]
        if work.shape == (3072,):
            names.remove("loop, channels_last")
        found = sides.find(f"{name}/{kind}") if kind else work
        yield name, compare(found, names, 1 if quick else rounds or ROUNDS[name], threads)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The growth rows as a picture: client-rounds a second and peak memory over the number of clients."""
    lines = {
        label: [row for row in rows if "seconds" in row and (row["taking_part"] == row["clients"]) == share]
        for share, label in ((True, "all take part"), (False, "1 % take part"))
    }
    panels = {"client_rounds_per_second": "client-rounds per second", "memory_mib": "peak memory, MiB"}
    draw_growth(lines, panels, "registered clients", path)
