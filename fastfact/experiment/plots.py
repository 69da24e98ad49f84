"""Pictures of runs and comparisons, and the parts that the papers' figures are drawn with too."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fastfact.experiment import probes
from fastfact.experiment.report import RATIO_OPS, SIMILARITY, Cell, by_method, facts, per_round, size

# Okabe and Ito's palette, told apart with every kind of colour vision; the line styles serve print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
STYLES = ("-", "--", "-.", ":")


def new_axes(width: float, height: float, columns: int = 1, lines: int = 1):
    """A figure of width × height inches and its axes, line by line."""
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


def whole_numbers(*axes) -> None:
    """Ticks at whole numbers only: rounds, clients, labels."""
    for axis in axes:
        axis.get_major_locator().set_params(integer=True)


def over_rounds(ax, curves: Mapping[str, Sequence[np.ndarray]], order: Sequence[str]) -> None:
    """Draw the mean of each label's curves [rounds] over rounds, one standard deviation over them shaded.

    order: all labels there are, which gives each the same look in every panel.
    """
    for label, some in curves.items():
        look = line_look(order.index(label))
        values = np.stack([curve[: min(map(len, some))] for curve in some])
        rounds, mean = np.arange(1, values.shape[1] + 1), values.mean(0)
        ax.plot(rounds, mean, label=label, marker="o" if len(rounds) == 1 else None, **look)
        if len(values) > 1:
            std = values.std(0, ddof=1)
            ax.fill_between(rounds, mean - std, mean + std, color=look["color"], alpha=0.15, linewidth=0)
    ax.set(xlabel="Round")
    ax.grid(alpha=0.3)
    whole_numbers(ax.xaxis)


def over_bytes(
    ax,
    runs: Mapping[str, Sequence[Cell]],
    order: Sequence[str],
    of: Callable[[Cell], np.ndarray] = lambda cell: per_round(cell, "accuracy"),
) -> None:
    """Draw the mean accuracy of each label's runs over the bytes sent so far, both ways and by all clients; a label
    that sends none is a level line. of(run) → accuracy [rounds]."""
    for label, cells in runs.items():
        look = line_look(order.index(label))
        rounds = min(len(of(cell)) for cell in cells)
        accuracy = np.mean([100 * of(cell)[:rounds] for cell in cells], axis=0)
        traffic = [per_round(cell, "bytes_up", np.sum) + per_round(cell, "bytes_down", np.sum) for cell in cells]
        sent = np.mean([each[:rounds].cumsum() for each in traffic], axis=0)
        if sent[-1] == 0:
            ax.axhline(accuracy[-1], label=f"{label} (sends nothing; last round)", **look)
            continue
        ax.plot(sent[sent > 0], accuracy[sent > 0], label=label, **look)
        ax.plot(sent[-1], accuracy[-1], "o", color=look["color"], markersize=5)
    ax.set(xlabel="Bytes sent, uplink + downlink, all clients", xscale="log")
    ax.xaxis.set_major_formatter(lambda value, _: size(value).replace(".00", ""))
    ax.grid(alpha=0.3)


def _label(cells: Sequence[Cell]) -> str:
    config, seeds = cells[0].result["config"], len({cell.seed for cell in cells})
    return ", ".join([*facts(config), f"{seeds} seed{'s' * (seeds > 1)}"])


NEAREST = "signal/key/nearest"

FEW = 8
"""Up to this many methods have their legend inside the picture, more of them below it in small print."""


def _wide(cells: Sequence[Cell], height: float):
    """`new_axes` with room for the legend of all methods."""
    methods = len(by_method(cells))
    return new_axes(7, height) if methods <= FEW else new_axes(9, height + 0.08 * methods)


def plot_accuracy_over_rounds(cells: Sequence[Cell], path: Path) -> Path:
    """Mean personalized test accuracy over rounds, a line a method."""
    figure, (ax,) = _wide(cells, 4.4)
    runs = by_method(cells)
    over_rounds(ax, {m: [100 * per_round(cell, "accuracy") for cell in some] for m, some in runs.items()}, list(runs))
    ax.set(ylabel="Personalized test accuracy [%]", title=_label(cells))
    if len(runs) > FEW:
        figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    else:
        ax.legend(frameon=False, loc="lower right")
    return save(figure, path)


def plot_accuracy_over_bytes(cells: Sequence[Cell], path: Path) -> Path:
    """The same over all bytes sent so far."""
    figure, (ax,) = _wide(cells, 5)
    runs = by_method(cells)
    over_bytes(ax, runs, list(runs))
    ax.set(ylabel="Personalized test accuracy [%]", title=_label(cells))
    many = len(runs) > FEW
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
    factorized = {m: runs for m, runs in by_method(cells).items() if runs[0].result["layers"]}
    figure, (ax,) = new_axes(8, 4.2)
    layers = list(dict.fromkeys(name for runs in factorized.values() for name in runs[0].result["layers"]))
    methods = list(by_method(cells))
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


def plot_signal(cells: Sequence[Cell], path: Path) -> Path:
    """Of what methods compare clients by: the share of clients whose most similar other one is of their own group, over
    rounds, where the scenario makes groups."""
    figure, (ax,) = _wide(cells, 4.4)
    runs, lines = by_method(cells), {}
    for method, some in runs.items():
        nearest = [probes.read(cell.directory).get(NEAREST, {}) for cell in some]
        if all(nearest):
            lines[method] = [100 * np.array([of[round] for round in sorted(of)]) for of in nearest]
    over_rounds(ax, lines, list(runs))
    ax.set(ylabel="Nearest client is of the own group [%]", ylim=(-3, 103), title=_label(cells))
    ax.legend(frameon=False, loc="lower right")
    return save(figure, path)


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
    told = [cell for cell in cells if "key" in {name.partition("/")[0] for name in cell.result.get("signal", {})}]
    if told:
        drawn.append(plot_signal(told, directory / "signal.png"))
    if any(cell.result["layers"] for cell in cells):
        drawn.append(plot_density(cells, directory / "density.png"))
    return drawn
