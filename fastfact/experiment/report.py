"""Tables from the directories that `fastfact run` and `fastfact compare` leave.

A finished run holds `metrics.jsonl` (a row a round and client), `result.json` (its configuration and what was measured
once, at the end) and, for a factorized model, `similarity.safetensors` (u and v, [K, K]); a comparison holds such runs
under `cells/`. Everything here is read from those files.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastfact import files

CELLS, METRICS, RESULT, SIMILARITY, COMPARISON = (
    "cells",
    "metrics.jsonl",
    "result.json",
    "similarity.safetensors",
    "compare.json",
)
MOST_CLIENTS = 2000
"""The largest federation whose similarity matrix is kept and drawn."""


@dataclass(frozen=True)
class Cell:
    """One finished run: `rows` is its metrics, `result` the content of its result.json."""

    directory: Path
    rows: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def method(self) -> str:
        return self.result["config"]["method"]

    @property
    def seed(self) -> int:
        return self.result["config"]["seed"]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged or half-written: {error}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Raises ValueError, naming the line, for one that is no JSON object."""
    rows = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: damaged or half-written: {error}") from None
    return rows


def read_cell(directory: Path) -> Cell:
    """The finished run in `directory`. Raises ValueError where there is none, or an unfinished one."""
    missing = [name for name in (METRICS, RESULT) if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory} holds no finished run: no {' and no '.join(missing)}")
    result = files.read_sealed(directory / RESULT)
    return Cell(directory, read_metrics(directory / METRICS), result)


def read(directory: Path) -> list[Cell]:
    """The finished runs of a run or compare directory, in the order the comparison lists them."""
    if not (directory / COMPARISON).is_file():
        return [read_cell(directory)]
    plan = files.read_sealed(directory / COMPARISON)
    paths = [directory / CELLS / name for name in plan["cells"]]
    cells = [read_cell(path) for path in paths if (path / RESULT).is_file()]
    if not cells:
        raise ValueError(f"{directory} holds no finished run yet; the compare command continues it")
    return cells


def by_method(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.method, []).append(cell)
    return grouped


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation (0 for one value)."""
    return {"mean": float(np.mean(values)), "std": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0}


def table(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row per method: personalized test accuracy and what it cost.

    `accuracy`: mean over clients in the last round, then mean and standard deviation over seeds; `accuracy_before`: the
    same of what they had downloaded, before they trained it, None where nothing was;
    `client_std`: standard deviation over clients, mean over seeds; `uplink`, `downlink`: bytes of all clients and
    rounds, mean over seeds; `formula`: the papers' count, four bytes a number both ways; `density`: share of nonzero μ,
    None where there is no μ; `epsilon`: of all rounds, None without noise; `seconds`: local training of all clients and
    rounds, mean over seeds.
    """
    rows = []
    for method, runs in by_method(cells).items():
        summaries = [run.result["summary"] for run in runs]
        densities = [s["density"] for s in summaries if s["density"] is not None]
        before = [s["accuracy_before"] for s in summaries if s["accuracy_before"] is not None]
        rows.append(
            {
                "method": method,
                "seeds": [run.seed for run in runs],
                "accuracy": _spread([s["accuracy"] for s in summaries]),
                "accuracy_before": _spread(before) if before else None,
                "client_std": float(np.mean([s["client_std"] for s in summaries])),
                **{
                    name: float(np.mean([s[name] for s in summaries]))
                    for name in ("uplink", "downlink", "formula", "seconds")
                },
                "density": float(np.mean(densities)) if densities else None,
                "epsilon": max((s["epsilon"] for s in summaries if "epsilon" in s), default=None),
            }
        )
    return rows


def left_out(rows: Iterable[Mapping[str, Any]]) -> dict[str, list]:
    """client → in how many rounds it was left out, of how many, and why the last time; of those that ever were."""
    took, out = Counter(row["client"] for row in rows), dict[str, list]()
    for row in rows:
        if row["left_out"]:
            before = out.get(str(row["client"]), [0])[0]
            out[str(row["client"])] = [before + 1, took[row["client"]], row["left_out"]]
    return out


def left_out_line(found: Mapping[str, list], most: int = 3) -> str:
    """The same for people, the first few by name; empty if there are none."""
    named = [f"client {k} in {n} of {of} rounds: {why}" for k, (n, of, why) in list(found.items())[:most]]
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "; ".join(named + more)


def size(count: float) -> str:
    """Bytes for people, decimal as in the papers: 20.39 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 100 * scale else 0}f} {unit}"
    return f"{count:.0f} B" if count else "0"


def per_round(cell: Cell, name: str, reduce: Callable = np.mean) -> np.ndarray:
    """`name` of each round, reduced over clients [rounds]."""
    rounds: dict[int, list[float]] = {}
    for row in cell.rows:
        if row.get(name) is not None:
            rounds.setdefault(row["round"], []).append(row[name])
    return np.array([reduce(rounds[number]) for number in sorted(rounds)])


RATIO_OPS = {"forward": "Forward", "training": "Forward and backward"}


def read_layers(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of `fastfact bench layers`. Raises ValueError for one that has none over densities."""
    content = _read_json(path)
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not any(row.get("op") in RATIO_OPS for row in rows):
        raise ValueError(f"{path}: has no rows of bench layers, sections forward or training")
    return rows
