"""Tables and pictures from the directories that `fastfact run` and `fastfact compare` leave.

A finished run holds `metrics.jsonl` (a row a round and client), `result.json` (its configuration and what was measured
once, at the end) and, for a factorized model, `similarity.safetensors` (u and v, [K, K]); a comparison holds such runs
under `cells/`. Everything here is read from those files.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fastfact import files

CELLS, METRICS, RESULT, SIMILARITY, COMPARISON = (
    "cells",
    "metrics.jsonl",
    "result.json",
    "similarity.safetensors",
    "compare.json",
)
MOST_CLIENTS = 2000
"""Similarity is kept and drawn for at most so many clients."""

# Okabe and Ito's palette, told apart with every kind of colour vision; the line styles serve print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
STYLES = ("-", "--", "-.", ":")


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


def _by_method(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
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
    None where there is no μ; `seconds`: local training of all clients and rounds, mean over seeds.
    """
    rows = []
    for method, runs in _by_method(cells).items():
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
            }
        )
    return rows


def size(count: float) -> str:
    """Bytes for people, decimal as in the papers: 20.39 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 100 * scale else 0}f} {unit}"
    return f"{count:.0f} B" if count else "0"


def per_round(cell: Cell, name: str, reduce=np.mean) -> np.ndarray:
    """`name` of each round, reduced over clients [rounds]."""
    rounds: dict[int, list[float]] = {}
    for row in cell.rows:
        if row.get(name) is not None:
            rounds.setdefault(row["round"], []).append(row[name])
    return np.array([reduce(rounds[number]) for number in sorted(rounds)])


def new_axes(width: float, height: float, columns: int = 1, lines: int = 1):
    """A figure of so many inches and its axes, line by line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(lines, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes.ravel().tolist()


def save(figure, path: Path) -> Path:
    """Write a figure and close it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def line_look(index: int) -> dict[str, Any]:
    """Colour and style of the line number `index`: 32 different ones."""
    style = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style, "linewidth": 2}


def _curves(cells: Sequence[Cell]):
    """(method, look, accuracy in percent [seeds, rounds], cumulative bytes [rounds]) per method."""
    for index, (method, runs) in enumerate(_by_method(cells).items()):
        look = line_look(index)
        rounds = min(len(per_round(run, "accuracy")) for run in runs)
        accuracy = 100 * np.stack([per_round(run, "accuracy")[:rounds] for run in runs])
        moved = [
            (per_round(run, "bytes_up", np.sum)[:rounds] + per_round(run, "bytes_down", np.sum)[:rounds]).cumsum()
            for run in runs
        ]
        yield method, look, accuracy, np.mean(moved, axis=0)


def _label(cells: Sequence[Cell]) -> str:
    config, seeds = cells[0].result["config"], len({cell.seed for cell in cells})
    return f"{config['dataset']}, {config['scenario']}, {config['clients']} clients, {seeds} seed{'s' * (seeds > 1)}"


FEW = 8
"""More methods than that have their legend below, in small print."""


def _wide(cells: Sequence[Cell], height: float):
    """`new_axes` with room for the legend of all methods."""
    methods = len(_by_method(cells))
    return new_axes(7, height) if methods <= FEW else new_axes(9, height + 0.08 * methods)


def plot_accuracy_over_rounds(cells: Sequence[Cell], path: Path) -> Path:
    """Mean personalized test accuracy over rounds, a line a method, one standard deviation over seeds shaded."""
    figure, (ax,) = _wide(cells, 4.4)
    for method, look, accuracy, _ in _curves(cells):
        mean, rounds = accuracy.mean(0), np.arange(1, accuracy.shape[1] + 1)
        ax.plot(rounds, mean, label=method, **look)
        if len(accuracy) > 1:
            std = accuracy.std(0, ddof=1)
            ax.fill_between(rounds, mean - std, mean + std, color=look["color"], alpha=0.15, linewidth=0)
    ax.set(xlabel="Round", ylabel="Personalized test accuracy [%]", title=_label(cells))
    ax.grid(alpha=0.3)
    ax.xaxis.get_major_locator().set_params(integer=True)
    if len(_by_method(cells)) > FEW:
        figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    else:
        ax.legend(frameon=False, loc="lower right")
    return save(figure, path)


def plot_accuracy_over_bytes(cells: Sequence[Cell], path: Path) -> Path:
    """The same over all bytes sent so far, both ways and by all clients; a method that sends none is a level line."""
    figure, (ax,) = _wide(cells, 5)
    for method, look, accuracy, moved in _curves(cells):
        mean = accuracy.mean(0)
        if moved[-1] == 0:
            ax.axhline(mean[-1], label=f"{method} (sends nothing; last round)", **look)
            continue
        sent = moved > 0
        ax.plot(moved[sent], mean[sent], label=method, **look)
        ax.plot(moved[-1], mean[-1], "o", color=look["color"], markersize=5)
    ax.set(xlabel="Bytes sent, uplink + downlink, all clients", ylabel="Personalized test accuracy [%]")
    ax.set(title=_label(cells), xscale="log")
    ax.xaxis.set_major_formatter(lambda value, _: size(value).replace(".00", ""))
    ax.grid(alpha=0.3)
    many = len(_by_method(cells)) > FEW
    figure.legend(frameon=False, loc="outside lower center", ncols=3 if many else 2, fontsize=8 if many else None)
    return save(figure, path)


def plot_similarity(cell: Cell, path: Path) -> Path:
    """Cosine similarity of every pair of clients, of all u and of all v [K, K], at the end of one run."""
    figure, axes = new_axes(10, 4.6, columns=2)
    similarity = load_file(cell.directory / SIMILARITY)
    for ax, name in zip(axes, ("u", "v"), strict=True):
        matrix = similarity[name]
        clients = len(matrix)
        others = matrix[~np.eye(clients, dtype=bool)] if clients > 1 else matrix.ravel()
        high = float(others.max())
        low = min(float(others.min()), high - 0.05)  # rounding must not look like structure
        image = ax.imshow(matrix, cmap="cividis", vmin=low, vmax=high, interpolation="nearest")
        ticks = np.arange(0, clients, max(1, -(-clients // 10)))
        ax.set(xticks=ticks, yticks=ticks, xticklabels=ticks + 1, yticklabels=ticks + 1, xlabel="Client")
        ax.set(ylabel="Client", title=f"{name}: mean of other clients {others.mean():.2f}")
        ax.spines[:].set_visible(False)
        figure.colorbar(image, ax=ax, label="Cosine similarity", shrink=0.9, extend="max")
    figure.suptitle(f"Similarity of clients, {cell.method}, seed {cell.seed}, {_label([cell]).rsplit(',', 1)[0]}")
    return save(figure, path)


def plot_density(cells: Sequence[Cell], path: Path) -> Path:
    """Share of nonzero μ of each layer at the end, a bar a method, one standard deviation over seeds as whiskers."""
    factorized = {m: runs for m, runs in _by_method(cells).items() if runs[0].result["layers"]}
    figure, (ax,) = new_axes(8, 4.2)
    layers = list(dict.fromkeys(name for runs in factorized.values() for name in runs[0].result["layers"]))
    methods = list(_by_method(cells))
    width = 0.8 / len(factorized)
    for index, (method, runs) in enumerate(factorized.items()):
        values = 100 * np.array([[run.result["layers"].get(name, np.nan) for name in layers] for run in runs])
        at = np.arange(len(layers)) - 0.4 + width * (index + 0.5)
        error = values.std(0, ddof=1) if len(runs) > 1 else None
        colour = COLOURS[methods.index(method) % len(COLOURS)]
        ax.bar(at, values.mean(0), width * 0.92, yerr=error, capsize=2, color=colour, label=method, ecolor="#333333")
    ax.set(xticks=range(len(layers)), xticklabels=layers, ylim=(0, 105), ylabel="Nonzero μ [%]", title=_label(cells))
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower center", ncols=min(4, len(factorized)))
    return save(figure, path)


RATIO_OPS = {"forward": "Forward", "training": "Forward and backward"}


def read_layers(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of `fastfact bench layers`. Raises ValueError for one that has none over densities."""
    content = _read_json(path)
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not any(row.get("op") in RATIO_OPS for row in rows):
        raise ValueError(f"{path}: has no rows of bench layers, sections forward or training")
    return rows


def plot_ratio(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """How many times faster than the dense layer over the density of μ: the geometric mean over the convolutions of
    ResNet-9 as a line for each memory format, each convolution as a point."""
    ops = [op for op in RATIO_OPS if any(row["op"] == op for row in rows)]
    figure, axes = new_axes(5 * len(ops), 4, columns=len(ops))
    for ax, op in zip(axes, ops, strict=True):
        own = [row for row in rows if row["op"] == op]
        for index, fmt in enumerate(dict.fromkeys(row["format"] for row in own)):
            points = [(100 * r["density"], r["ratio"], r["shape"]) for r in own if r["format"] == fmt]
            means = sorted((d, ratio) for d, ratio, shape in points if shape.startswith("all"))
            each = [(d, ratio) for d, ratio, shape in points if not shape.startswith("all")]
            look = {"color": COLOURS[index], "linestyle": STYLES[index], "linewidth": 2}
            ax.plot(*zip(*means, strict=True), label=fmt, marker="o", markersize=4, **look)
            ax.plot(*zip(*each, strict=True), ".", color=COLOURS[index], alpha=0.35)
        ax.axhline(1, color="#333333", linewidth=0.8)
        ax.set(xlabel="Density of μ [%]", title=RATIO_OPS[op], yscale="log", ylabel="Times as fast as the dense layer")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if value in (2, 3, 5) else "")
        ax.grid(alpha=0.3, which="both")
        ax.legend(frameon=False)
    return save(figure, path)


def pictures(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """Write every picture the runs have data for into `directory`; their paths."""
    drawn = [
        plot_accuracy_over_rounds(cells, directory / "accuracy_over_rounds.png"),
        plot_accuracy_over_bytes(cells, directory / "accuracy_over_bytes.png"),
    ]
    similar = [cell for cell in cells if (cell.directory / SIMILARITY).is_file()]
    if similar:
        first = next((cell for cell in similar if cell.method == "factorized-fl-alpha"), similar[0])
        drawn.append(plot_similarity(first, directory / "similarity.png"))
    if any(cell.result["layers"] for cell in cells):
        drawn.append(plot_density(cells, directory / "density.png"))
    return drawn
