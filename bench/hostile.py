"""Hostile clients on the digits: what each attack costs the honest, under each rule, for each method.

`python bench/hostile.py run` trains all of it (some minutes of one core) and writes bench/results/hostile.json and the
tables of docs/hostile.md; `write` makes the tables from the JSON again.

A fifth of the clients trains as all do, then puts something else into its upload. Every figure is of the honest.
"""

import argparse
import functools
import json
import math
import statistics
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import fastfact as ff
from fastfact import data, models
from fastfact.base import files
from fastfact.base.machine import provenance
from fastfact.federation.state import State, take
from fastfact.federation.wire.format import ENTRY, HEADER, count_of

ROOT = Path(__file__).resolve().parent.parent
RESULT, PAGE = ROOT / "bench" / "results" / "hostile.json", ROOT / "docs" / "hostile.md"
CLIENTS, HOSTILE, ROUNDS = 10, (0, 1), 6
TRAINING = {"epochs": 2, "batch_size": 16, "lr": 0.07, "momentum": 0.9, "cohort": 1}
METHODS = {
    "fedavg": {},
    "factorized-fl-alpha": {},
    "factorized-fl-beta": {},
    "simfed": {},
    "feddecomp": {},
    "fedfac-dynamic": {},
}
RULES = {
    "no bound": {"max_norm": None},
    "default": {},
    "clip 1x": {"clip": "1x"},
    "median": {"rule": "median"},
    "trimmed-mean": {"rule": "trimmed-mean"},
    "multi-krum": {"rule": "multi-krum"},
    "max_weight .05": {"settings": {"max_weight": 0.05}},
}
"""What `Federation` gets besides `TRAINING`; the last is for the methods that match clients."""


def nothing(fed: "Attacked", k: int, now: State, start: State) -> State:
    return now


def not_a_number(fed: "Attacked", k: int, now: State, start: State) -> State:
    return {name: torch.full_like(tensor, math.nan) for name, tensor in now.items()}


def huge(fed: "Attacked", k: int, now: State, start: State) -> State:
    return {name: torch.full_like(tensor, 1e30) for name, tensor in now.items()}


def flipped(fed: "Attacked", k: int, now: State, start: State) -> State:
    """Ten times the update, the other way."""
    return {name: start[name] - 10 * (tensor - start[name]) for name, tensor in now.items()}


def replay(fed: "Attacked", k: int, now: State, start: State) -> State:
    """What it sent in the first round, for ever."""
    return fed.first.setdefault(k, now)


def of_another(fed: "Attacked", k: int, now: State, start: State) -> State:
    """The upload of an honest client as its own, keys included."""
    return fed.of_victim


def disguised(fed: "Attacked", k: int, now: State, start: State) -> State:
    """The key of an honest client, to be matched with its like, and ten times the update the other way for the rest."""
    keys = {name: fed.of_victim[name] for name in fed.key_names if name in now}
    return flipped(fed, k, now, start) | keys


def lies(fed: "Attacked", k: int, now: State, start: State) -> State:
    """A message whose count, bitmap, names or shapes are not true; another one each time."""
    message = bytearray(fed.wire.encode(now))
    kinds = [wrong_count, wrong_name, wrong_shape, wrong_bitmap]
    fed.told += 1
    return fed.wire.decode(bytes(kinds[fed.told % len(kinds)](message)))


def absent(fed: "Attacked", k: int, now: State, start: State) -> State:
    raise ValueError("was never there")


def wrong_count(message: bytearray) -> bytearray:
    message[4:8] = struct.pack("<I", count_of(message) + 1)
    return message


def wrong_name(message: bytearray) -> bytearray:
    message[HEADER.size : HEADER.size + 2] = struct.pack("<H", 65535)
    return message


def wrong_shape(message: bytearray) -> bytearray:
    """The first tensor is four bytes longer."""
    index, encoding, length = ENTRY.unpack_from(message, HEADER.size)
    ENTRY.pack_into(message, HEADER.size, index, encoding, length + 4)
    message[HEADER.size + ENTRY.size : HEADER.size + ENTRY.size] = bytes(4)
    return message


def wrong_bitmap(message: bytearray) -> bytearray:
    """One more nonzero than numbers follow; of a message without a bitmap, the last number is cut off."""
    at = HEADER.size
    while at < len(message):
        _, encoding, length = ENTRY.unpack_from(message, at)
        at += ENTRY.size
        if encoding >= 3:
            place = next(place for place in range(at, at + length) if message[place] != 255)
            message[place] |= message[place] + 1
            return message
        at += length
    return message[:-4]


ATTACKS = {
    "none": nothing,
    "1e30": huge,
    "flipped × 10": flipped,
    "replay": replay,
    "another's": of_another,
    "disguised": disguised,
}
"""What reaches the mix: for every rule. The rest is refused before any rule sees it."""
REFUSED = {"NaN": not_a_number, "lying messages": lies}


class Attacked(ff.Federation):
    """A federation some of whose clients are hostile: `attack` makes what they upload of what they trained."""

    def __init__(self, *arguments, attack=nothing, hostile: Sequence[int] = HOSTILE, **options):
        super().__init__(*arguments, **options)
        self.attack, self.hostile = attack, hostile
        self.first: dict[int, State] = {}
        self.of_victim: State = {}
        self.told, self.refused = 0, {}
        usable = self.exchange.unusable
        self.exchange.unusable = lambda *what: (
            usable(*what) | {k: why for k, why in self.refused.items() if k in what[0] and k not in what[3]}
        )

    def _train(self, round, clients, work, on_client, adapts=False):
        names = [name for name in self.uploaded if name in work and work[name].is_floating_point()]
        start = take({name: work[name] for name in names}, range(len(clients)))
        trained = super()._train(round, clients, work, on_client, adapts)
        self.refused = {}
        victim = next((row for row, k in enumerate(clients) if k not in self.hostile), None)
        if adapts or victim is None:
            return trained
        self.of_victim = {name: work[name][victim].clone() for name in names}
        for row, k in enumerate(clients):
            if k in self.hostile:
                now, before = ({name: state[name][row].clone() for name in names} for state in (work, start))
                try:
                    for name, tensor in self.attack(self, k, now, before).items():
                        work[name][row] = tensor
                except ValueError as error:
                    self.refused[k] = str(error)
        return trained


def federation(method: str, rule: str, attack, seed: int = 0, samples: int = 110) -> Attacked:
    options = dict(RULES[rule])
    settings = METHODS[method] | options.pop("settings", {})
    return Attacked(
        functools.partial(models.build, "cnn2", (1, 8, 8), 10, 0.25),
        data.make_clients("digits", "iid", CLIENTS, seed, samples=samples, test_fraction=0.42),
        method,
        settings=settings,
        seed=seed,
        attack=attack,
        **TRAINING,
        **options,
    )


def row(method: str, rule: str, name: str, attack) -> dict:
    """Accuracy of the honest after the last round, as the next download makes their models, and after training."""
    fed = federation(method, rule, attack)
    fed.fit(ROUNDS)
    honest = [k for k in range(CLIENTS) if k not in HOSTILE]
    last = {one["client"]: one for one in fed.history.of(ROUNDS)}
    downloaded = fed.accuracies_as_downloaded()
    rows = [one for one in fed.history if one["left_out"]]
    return {
        "method": method,
        "rule": rule,
        "attack": name,
        "downloaded": statistics.fmean(downloaded[k] for k in honest),
        "trained": statistics.fmean(last[k]["accuracy"] for k in honest),
        "worst": min(downloaded[k] for k in honest),
        "left_out": {"hostile": sum(one["client"] in HOSTILE for one in rows) / (ROUNDS * len(HOSTILE))}
        | {"honest": sum(one["client"] not in HOSTILE for one in rows) / (ROUNDS * len(honest))},
    }


def matches(method: str) -> bool:
    return hasattr(ff.methods.make(method), "max_weight")


def cells():
    """(method, rule, name of the attack, attack) of every cell of the tables."""
    for method in METHODS:
        for rule in RULES:
            if (rule.startswith("max_weight") and not matches(method)) or (rule == "no bound" and method != "fedavg"):
                continue
            for name, attack in ATTACKS.items():
                # The key of SimFed is computed from the model by the simulation: it cannot be another's.
                if name != "disguised" or (matches(method) and method != "simfed"):
                    yield method, rule, name, attack
        for name, attack in {**REFUSED, "absent": absent}.items():
            yield method, "default", name, attack


def run() -> None:
    rows, began, about = [], time.process_time(), provenance()
    for cell in cells():
        rows.append(row(*cell))
        one = rows[-1]
        print(f"{one['method']:20} {one['rule']:15} {one['attack']:15} {100 * one['downloaded']:5.1f}", flush=True)
    content = {"command": "python bench/hostile.py run", "seconds": time.process_time() - began, **about}
    content |= {"clients": CLIENTS, "hostile": len(HOSTILE), "rounds": ROUNDS, "training": TRAINING, "rows": rows}
    files.write_json(RESULT, content, indent=1, ensure_ascii=False)


def tables(rows: list[dict]) -> str:
    """Markdown: for each method a row a rule and a column an attack, downloaded / trained in per cent."""
    found = {(one["method"], one["rule"], one["attack"]): one for one in rows}
    lines = []
    for method in METHODS:
        names = [name for name in ATTACKS if (method, "default", name) in found]
        lines += [f"**{method}**", "", "| rule | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for rule in RULES:
            some = [found.get((method, rule, name)) for name in names]
            if any(some):
                texts = (f"{100 * one['downloaded']:.0f} / {100 * one['trained']:.0f}" for one in some)
                lines.append(f"| {rule} | " + " | ".join(texts) + " |")
        lines.append("")
    return "\n".join(lines)


def put(page: Path, name: str, text: str) -> None:
    """Put a table between its marks on a page."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    files.write(page, f"{before}{begin}\n{text}{end}{rest.split(end)[1]}")


def write() -> None:
    content = json.loads(RESULT.read_text())
    put(PAGE, "attacks", tables(content["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write"))
    torch.set_num_threads(1)
    if parser.parse_args().what == "run":
        run()
    write()


if __name__ == "__main__":
    main()
