"""Tables from the directories that `fastfact run` and `fastfact compare` leave.

A finished run holds `metrics.jsonl` (a row a round and client), `result.json` (its configuration and what was measured
once, at the end) and, for a factorized model, `similarity.safetensors` (u and v, [K, K]); a comparison holds such runs
under `cells/`. Everything here is read from those files.
"""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastfact.base import files
from fastfact.base.spread import best_tenth, fairness, worst_tenth
from fastfact.experiment.config import SIMULATION

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
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged or half-written: {error}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl. Raises ValueError, naming the line, for one that is no JSON object."""
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: damaged or half-written: {error}") from None
    return rows


def read_cell(directory: Path) -> Cell:
    """The finished run in `directory`. Raises ValueError where there is none, or an unfinished one."""
    missing = [name for name in (METRICS, RESULT) if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory} holds no finished run: no {' and no '.join(missing)}")
    result = files.read_sealed(directory / RESULT)
    # A run that was given more rounds has rows of these before it is finished again.
    rounds = result["config"].get("rounds", math.inf)
    return Cell(directory, [row for row in read_metrics(directory / METRICS) if row["round"] <= rounds], result)


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


def facts(config: Mapping[str, Any]) -> list[str]:
    """Data set, scenario and how many clients a run has, for people. The simulation has no scenario."""
    only = [part for part in config.get("only", "").split(",") if part.strip()]
    count = len(only) or config["clients"]
    scenario = [] if config["dataset"] == SIMULATION else [config["scenario"]]
    return [config["dataset"], *scenario, f"{count} client{'s' * (count > 1)}"]


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
    `client_std`: standard deviation over clients, `worst_tenth`, `best_tenth` and `fairness` of the clients' accuracies
    (see there), means over seeds; `uplink`, `downlink`: bytes of all clients and
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
                    name: float(np.mean([of(final_accuracies(run)) for run in runs]))
                    for name, of in (("worst_tenth", worst_tenth), ("best_tenth", best_tenth), ("fairness", fairness))
                },
                **{
                    name: float(np.mean([s[name] for s in summaries]))
                    for name in ("uplink", "downlink", "formula", "seconds")
                },
                "density": float(np.mean(densities)) if densities else None,
                "epsilon": max((s["epsilon"] for s in summaries if "epsilon" in s), default=None),
            }
        )
    return rows


def final_accuracies(cell: Cell) -> list[float]:
    """The accuracy of each client's own model when it last took part, by client."""
    newest = {row["client"]: row["accuracy"] for row in cell.rows}
    return [newest[client] for client in sorted(newest)]


def t_probability(t: float, degrees: int) -> float:
    """P(|T| > t) of Student's t with a whole number of degrees of freedom: the finite series in θ = atan(t / √ν)."""
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cosine, total, term = math.cos(angle), 0.0, 1.0
    first = 1 + degrees % 2
    for k in range(first, degrees, 2):
        if k > first:
            term *= (k - 2) / (k - 1) * cosine**2
        total += term
    odd = 2 / math.pi * (angle + math.sin(angle) * cosine * total)
    inside = odd if degrees % 2 else math.sin(angle) * total
    return min(1.0, max(0.0, 1 - inside))


def _t_bound(degrees: int, probability: float = 0.05) -> float:
    """The t that |T| exceeds with this probability, by bisection."""
    low, high = 0.0, 1e3
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) > probability else (low, middle)
    return high


def compare_methods(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The method of the highest mean accuracy against every other, paired by seed: a seed is the same clients, data and
    initial model for both. Empty for one method, or where two have less than two seeds in common.

    `difference` of accuracy, its 95 % interval `low`, `high`, and `p`, two-sided, by the t distribution over the pairs;
    `adjusted`: p by Holm's correction for all comparisons; `seeds`: how many pairs.
    """
    accuracy = {
        m: {run.seed: run.result["summary"]["accuracy"] for run in runs} for m, runs in by_method(cells).items()
    }
    best = max(accuracy, key=lambda method: float(np.mean(list(accuracy[method].values()))))
    found: list[dict[str, Any]] = []
    for other, of in accuracy.items():
        both = sorted(accuracy[best].keys() & of.keys())
        if other == best or len(both) < 2:
            continue
        pairs = np.array([accuracy[best][seed] - of[seed] for seed in both])
        mean, error = float(pairs.mean()), float(pairs.std(ddof=1) / math.sqrt(len(pairs)))
        # Rounding leaves a deviation where all differences are the same.
        t = mean / error if error > 1e-12 else (math.inf if abs(mean) > 1e-12 else 0.0)
        p, width = t_probability(t, len(pairs) - 1), _t_bound(len(pairs) - 1) * error
        found.append({"method": best, "other": other, "seeds": len(both), "difference": mean, "p": p})
        found[-1] |= {"low": mean - width, "high": mean + width}
    reached = 0.0
    for place, row in enumerate(sorted(found, key=lambda row: row["p"])):
        reached = row["adjusted"] = max(reached, min(1.0, (len(found) - place) * row["p"]))
    return found


FLAT = (
    *("method", "seeds", "accuracy", "accuracy_std", "accuracy_before", "accuracy_before_std", "client_std"),
    *("worst_tenth", "best_tenth", "fairness", "uplink", "downlink", "formula", "density", "epsilon", "seconds"),
)


def flat(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `table` with one value a column, `FLAT`: means, and deviations over seeds as columns of their own."""
    found = []
    for row in rows:
        values = dict(row) | {"seeds": len(row["seeds"])}
        for name in ("accuracy", "accuracy_before"):
            of = row[name] or {"mean": None, "std": None}
            values |= {name: of["mean"], f"{name}_std": of["std"]}
        found.append({name: values[name] for name in FLAT})
    return found


def write_csv(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the rows of `table` as comma-separated values: fractions of 1, bytes, seconds; empty for what is not."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FLAT, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text.getvalue().encode())


def latex(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `table` as a LaTeX tabular (booktabs): the best accuracy of each column bold."""
    several = any(len(row["seeds"]) > 1 for row in rows)
    best = {
        name: max((round(100 * row[name]["mean"], 1) for row in rows if row[name]), default=None)
        for name in ("accuracy", "accuracy_before")
    }

    def percent(row: Mapping[str, Any], name: str) -> str:
        if row[name] is None:
            return "--"
        mean = f"{100 * row[name]['mean']:.1f}"
        if len(rows) > 1 and float(mean) == best[name]:
            mean = f"\\textbf{{{mean}}}"
        return mean + (f" $\\pm$ {100 * row[name]['std']:.1f}" if several else "")

    lines = [
        r"\begin{tabular}{lrrrrrr}",
        r"\toprule",
        r"Method & Accuracy [\%] & As downloaded [\%] & Worst tenth [\%] & Uplink & Downlink & Density \\",
        r"\midrule",
    ]
    for row in rows:
        name = row["method"].replace("_", r"\_")
        density = "--" if row["density"] is None else f"{row['density']:.2f}"
        cells = [name, percent(row, "accuracy"), percent(row, "accuracy_before"), f"{100 * row['worst_tenth']:.1f}"]
        lines.append(" & ".join([*cells, size(row["uplink"]), size(row["downlink"]), density]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


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
