"""The pictures of the papers' figures, drawn from finished runs.

Each takes a `Grid`: (row, column) → the runs of one place of a table. Columns of the same runs share a panel.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fastfact.experiment import probes
from fastfact.experiment.plots import COLOURS, line_look, new_axes, over_bytes, over_rounds, save, whole_numbers
from fastfact.experiment.report import Cell, per_round
from fastfact.papers import measures

Values = Mapping[tuple[str, str], tuple[float, float] | None]


@dataclass(frozen=True)
class Grid:
    """cells: (row, column) → runs, one a seed. ours, theirs: (row, column) → mean and deviation of the number there.

    moment: when the accuracies of curves, bars and boxes are taken, see `measures.MOMENTS`.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Mapping[tuple[str, str], Sequence[Cell]]
    ours: Values
    theirs: Values
    moment: str = "trained"

    def panels(self) -> list[tuple[str, dict[str, Sequence[Cell]]]]:
        """(name, row → runs) for each set of columns with the same runs, named by what their labels begin with."""
        found: dict[tuple, tuple[list[str], dict[str, Sequence[Cell]]]] = {}
        for column in self.columns:
            runs = {row: self.cells[row, column] for row in self.rows if self.cells.get((row, column))}
            key = tuple(cell.directory for cells in runs.values() for cell in cells)
            if runs:
                found.setdefault(key, ([], runs))[0].append(column)
        return [(_common(labels), runs) for labels, runs in found.values()]


def _common(labels: Sequence[str]) -> str:
    if len(labels) == 1:
        return labels[0]
    words = [label.split(", ") for label in labels]
    shared = [parts[0] for parts in zip(*words, strict=False) if len(set(parts)) == 1]
    return ", ".join(shared) or (" / ".join(labels) if len(labels) < 4 else f"{labels[0]} … {labels[-1]}")


def _panels(grid: Grid, height: float = 3.6):
    panels = grid.panels()
    columns = min(4, len(panels))
    figure, axes = new_axes(
        max(4.6 * columns, 6), height * -(-len(panels) // columns), columns, -(-len(panels) // columns)
    )
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax, (name, _) in zip(axes, panels, strict=False):
        ax.set_title(name if len(panels) > 1 else "", fontsize=10)
        ax.grid(alpha=0.3)
    _title(figure, grid.title)
    return figure, list(zip(axes, (runs for _, runs in panels), strict=False))


def _title(figure, text: str) -> None:
    """The title over the whole figure, in as many lines as its width asks for."""
    figure.suptitle(textwrap.fill(text, max(40, int(11 * figure.get_figwidth()))), fontsize=11)


def _legend(figure, axes) -> None:
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside lower center", ncols=4, fontsize=8)


def _over_rounds(grid: Grid, path: Path, of: Callable[[Cell], np.ndarray], label: str) -> Path:
    figure, panels = _panels(grid)
    for ax, rows in panels:
        curves = {row: [curve for cell in cells if len(curve := of(cell))] for row, cells in rows.items()}
        over_rounds(ax, {row: some for row, some in curves.items() if some}, grid.rows)
        ax.set(ylabel=label)
    _legend(figure, [ax for ax, _ in panels])
    return save(figure, path)


def _accuracy(grid: Grid) -> str:
    return "Test accuracy [%]" if grid.moment == "trained" else "Test accuracy as downloaded [%]"


def curves(grid: Grid, path: Path) -> Path:
    """Mean test accuracy over rounds, a line a row, one standard deviation over seeds shaded."""
    return _over_rounds(grid, path, lambda cell: 100 * measures.curve(cell, grid.moment), _accuracy(grid))


def losses(grid: Grid, path: Path) -> Path:
    """Mean training loss over rounds."""
    return _over_rounds(grid, path, lambda cell: per_round(cell, "loss"), "Training loss")


def drift(grid: Grid, path: Path) -> Path:
    """Distance of the shared tensors from their mean over rounds."""
    return _over_rounds(grid, path, lambda cell: _numbers(cell, "drift/distance"), "Mean ‖σᵢ − σ̄‖₂")


def stability(grid: Grid, path: Path) -> Path:
    """Share of channels that stay on their side, over rounds."""
    return _over_rounds(
        grid, path, lambda cell: 100 * measures.stability(cell), "Channels that do not change sides [%]"
    )


def _numbers(cell: Cell, name: str) -> np.ndarray:
    rounds = probes.read(cell.directory).get(name, {})
    return np.array([rounds[number] for number in sorted(rounds)])


def _latest(cell: Cell, name: str) -> np.ndarray:
    """What was recorded under `name` after the last round that has it."""
    rounds = probes.read(cell.directory)[name]
    return rounds[max(rounds)]


def costs(grid: Grid, path: Path) -> Path:
    """Test accuracy over the bytes sent so far, both ways; a row that sends none is a level line."""
    figure, panels = _panels(grid)
    for ax, rows in panels:
        over_bytes(ax, rows, grid.rows, lambda cell: measures.curve(cell, grid.moment))
        ax.set(ylabel=_accuracy(grid))
    _legend(figure, [ax for ax, _ in panels])
    return save(figure, path)


def _bar_look(index: int) -> dict[str, str | None]:
    return {"color": COLOURS[index % len(COLOURS)], "hatch": "//" if index >= len(COLOURS) else None}


def clients(grid: Grid, path: Path) -> Path:
    """Test accuracy of each client after the last round, a bar a row."""
    figure, panels = _panels(grid)
    for ax, rows in panels:
        width = 0.84 / max(1, len(rows))
        for index, (row, cells) in enumerate(rows.items()):
            values = 100 * np.mean([measures.last_accuracies(cell, grid.moment) for cell in cells], axis=0)
            at = np.arange(1, len(values) + 1) - 0.42 + width * (index + 0.5)
            ax.bar(at, values, width, label=row, **_bar_look(grid.rows.index(row)))
        ax.set(xlabel="Client", ylabel=_accuracy(grid))
        whole_numbers(ax.xaxis)
    _legend(figure, [ax for ax, _ in panels])
    return save(figure, path)


def boxes(grid: Grid, path: Path) -> Path:
    """Test accuracy over clients after the last round, a box a row, ordered by median."""
    figure, panels = _panels(grid)
    for ax, rows in panels:
        values = {
            row: 100 * np.concatenate([measures.last_accuracies(cell, grid.moment) for cell in cells])
            for row, cells in rows.items()
        }
        values = {row: of[np.isfinite(of)] for row, of in values.items()}
        order = sorted(values, key=lambda row: np.median(values[row]))
        ax.boxplot([values[row] for row in order], tick_labels=order, showfliers=False)
        ax.tick_params(axis="x", rotation=60, labelsize=8)
        ax.set(ylabel=_accuracy(grid))
    return save(figure, path)


def _bars(grid: Grid, path: Path, across: Sequence[str], groups: Sequence[str], place: Callable) -> Path:
    figure, (ax,) = new_axes(max(7, 0.5 * len(across) * max(1, len(groups)) + 2), 4.4)
    width = 0.84 / max(1, len(groups))
    for index, group in enumerate(groups):
        at = np.arange(len(across)) - 0.42 + width * (index + 0.5)
        ours = [grid.ours.get(place(label, group)) or (np.nan, 0) for label in across]
        theirs = [grid.theirs.get(place(label, group)) or (np.nan, 0) for label in across]
        error = [deviation or np.nan for _, deviation in ours]
        ax.bar(at, [mean for mean, _ in ours], width, yerr=error, capsize=2, label=group, **_bar_look(index))
        label = "the paper's" if not index else None
        ax.plot(
            at, [mean for mean, _ in theirs], "D", color="white", markeredgecolor="black", markersize=5, label=label
        )
    ax.set(xticks=range(len(across)), xticklabels=across)
    _title(figure, grid.title)
    ax.tick_params(axis="x", rotation=30 if max(map(len, across)) > 8 else 0)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, path)


def rows(grid: Grid, path: Path) -> Path:
    """The numbers of the table as bars, a group a row; the paper's as marks."""
    return _bars(grid, path, grid.rows, grid.columns, lambda row, column: (row, column))


def columns(grid: Grid, path: Path) -> Path:
    """The numbers of the table as bars, a group a column; the paper's as marks."""
    return _bars(grid, path, grid.columns, grid.rows, lambda column, row: (row, column))


def tuning(grid: Grid, path: Path) -> Path:
    """The numbers of a table over its columns, a line a row; the paper's dashed."""
    figure, (ax,) = new_axes(7, 4.4)
    x = np.arange(len(grid.columns))
    for index, row in enumerate(grid.rows):
        colour = COLOURS[index % len(COLOURS)]
        for values, look in ((grid.ours, "-o"), (grid.theirs, "--D")):
            line = [(values.get((row, column)) or (np.nan, 0))[0] for column in grid.columns]
            if np.isfinite(line).any():
                ax.plot(x, line, look, color=colour, label=row + (", the paper" if look == "--D" else ""), markersize=4)
    ax.set(xticks=x, xticklabels=grid.columns)
    _title(figure, grid.title)
    ax.grid(alpha=0.3)
    figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=8)
    return save(figure, path)


def _some(rounds: Mapping[int, np.ndarray], count: int = 5) -> list[int]:
    numbers = sorted(rounds)
    return sorted({numbers[round(i * (len(numbers) - 1) / (count - 1))] for i in range(count)})


def similarity(grid: Grid, path: Path, of: Sequence[str] = ("u", "v")) -> Path:
    """Cosine between clients at five rounds of the first row's first run: of u and v, or of "key", what is compared."""
    cell = next(iter(grid.cells.values()))[0]
    found = probes.read(cell.directory)
    names = [name for name in of if f"similarity/{name}" in found]
    numbers = _some(found[f"similarity/{names[0]}"]) if names else [0]
    figure, axes = new_axes(max(6, 2.6 * len(numbers) + 1), 2.8 * max(1, len(names)), len(numbers), max(1, len(names)))
    for index, name in enumerate(names):
        matrices = found[f"similarity/{name}"]
        off = ~np.eye(len(matrices[numbers[0]]), dtype=bool)
        low = min(float(matrices[n][off].min()) if off.any() else 0.0 for n in numbers)
        for place, number in enumerate(numbers):
            ax = axes[index * len(numbers) + place]
            image = ax.imshow(matrices[number], cmap="Greys", vmin=min(low, 0.95), vmax=1, interpolation="nearest")
            ax.set(xticks=[], yticks=[], title=f"{name}, round {number}")
        figure.colorbar(image, ax=axes[index * len(numbers) : (index + 1) * len(numbers)], shrink=0.8)
    _title(figure, f"{grid.title}: {cell.method}")
    return save(figure, path)


def frequency(grid: Grid, path: Path) -> Path:
    """How often each client mixed in each other one, as a share of the rounds, in the first row's first run."""
    cell = next(iter(grid.cells.values()))[0]
    matrix = measures.frequency(cell)
    figure, (ax,) = new_axes(5.4, 4.6)
    if matrix is not None:
        image = ax.imshow(100 * matrix, cmap="Greys", vmin=0, vmax=100, interpolation="nearest")
        figure.colorbar(image, ax=ax, label="Rounds with a match [%]")
    ax.set(xlabel="Client mixed in", ylabel="Client")
    whole_numbers(ax.xaxis, ax.yaxis)
    _title(figure, f"{grid.title}: {cell.method}")
    return save(figure, path)


def distances(grid: Grid, path: Path) -> Path:
    """Normalized L2 distance of the clients' updates from those of client 1 over rounds, of each tensor recorded."""
    cell = next(iter(grid.cells.values()))[0]
    found = probes.read(cell.directory)
    names = [name for name in ("weight", "u", "v") if f"updates/{name}" in found]
    figure, axes = new_axes(4.6 * max(1, len(names)), 3.6, max(1, len(names)))
    who = ("", "partition 2", "partition 2, labels permuted", "the other domain")
    for ax, name in zip(axes, names, strict=False):
        values = np.stack([found[f"updates/{name}"][n] for n in sorted(found[f"updates/{name}"])])
        for client in range(1, values.shape[1]):
            label = who[client] if values.shape[1] == 4 else f"client {client + 1}"
            ax.plot(range(1, len(values) + 1), values[:, client], label=label, **line_look(client - 1))
        ax.set(xlabel="Round", ylabel="Distance from partition 1", title=name)
        whole_numbers(ax.xaxis)
        ax.grid(alpha=0.3)
    _legend(figure, axes)
    return save(figure, path)


def embeddings(grid: Grid, path: Path) -> Path:
    """t-SNE of what the clients' classifiers see of the same Gaussian inputs, a colour a client."""
    from sklearn.manifold import TSNE

    cell = next(iter(grid.cells.values()))[0]
    codes = _latest(cell, "embeddings/encoding")
    flat = codes.reshape(-1, codes.shape[-1])
    points = TSNE(init="pca", perplexity=min(30, len(flat) // 4), random_state=0).fit_transform(flat)
    figure, (ax,) = new_axes(6, 5)
    for client, of in enumerate(points.reshape(*codes.shape[:2], 2)):
        ax.scatter(*of.T, s=6, color=COLOURS[client % len(COLOURS)], alpha=0.6)
        ax.annotate(str(client + 1), of.mean(0), weight="bold", ha="center", va="center")
    ax.set(xticks=[], yticks=[])
    _title(figure, f"{grid.title}: {cell.method}")
    return save(figure, path)


def neurons(grid: Grid, path: Path) -> Path:
    """Mean output of each unit on each client, units sorted by their mean; a panel a column."""
    panels = grid.panels()
    figure, axes = new_axes(4.6 * len(panels) + 1, 4.6, len(panels))
    for ax, (name, runs) in zip(axes, panels, strict=True):
        outputs = _latest(next(iter(runs.values()))[0], "neurons/output")
        image = ax.imshow(outputs[:, np.argsort(-outputs.mean(0))].T, cmap="cividis", aspect="auto")
        ax.set(xlabel="Client", ylabel="Unit, by its mean output", title=name)
        whole_numbers(ax.xaxis, ax.yaxis)
        figure.colorbar(image, ax=ax, label="Mean output")
    _title(figure, grid.title)
    return save(figure, path)


def entropies(grid: Grid, path: Path) -> Path:
    """Histogram of the entropy of each unit's output over clients, a panel a column."""
    panels = grid.panels()
    figure, axes = new_axes(4.6 * len(panels), 3.6, len(panels))
    for ax, (name, runs) in zip(axes, panels, strict=True):
        outputs = _latest(next(iter(runs.values()))[0], "neurons/output")
        values = measures.entropy(outputs / max(float(outputs.std()), 1e-12))
        ax.hist(values[np.isfinite(values)], bins=30, color=COLOURS[0])
        ax.set(xlabel="Entropy over clients [nat]", ylabel="Units", title=name)
    _title(figure, grid.title)
    return save(figure, path)


def features(grid: Grid, path: Path) -> Path:
    """An image and its feature maps by eight shared and eight personal channels, a line of panels a row."""
    shown = [(row, runs[row][0]) for _, runs in grid.panels()[:1] for row in grid.rows if row in runs]
    figure, axes = new_axes(16, 1.4 * 2 * len(shown), 9, 2 * len(shown))
    for ax in axes:
        ax.set_axis_off()
    for index, (row, cell) in enumerate(shown):
        found = {name: rounds[max(rounds)] for name, rounds in probes.read(cell.directory).items()}
        if "features/map" not in found:
            continue
        image, maps, shared = (found[f"features/{name}"] for name in ("image", "map", "shared"))
        for line, (what, mask) in enumerate((("shared", shared), ("personal", ~shared))):
            first = 9 * (2 * index + line)
            axes[first].imshow(image.mean(0), cmap="Greys_r")
            axes[first].set_title(f"{row}: {what}", fontsize=8)
            for ax, one in zip(axes[first + 1 : first + 9], maps[mask], strict=False):
                ax.imshow(one, cmap="cividis")
    _title(figure, grid.title)
    return save(figure, path)


def partition(grid: Grid, path: Path) -> Path:
    """How many samples of each label every client has, as dots; a panel a column."""
    panels = grid.panels()
    figure, axes = new_axes(4.4 * len(panels), 4.2, len(panels))
    for ax, (name, runs) in zip(axes, panels, strict=True):
        count = _latest(next(iter(runs.values()))[0], "labels/count")
        at, client = np.meshgrid(np.arange(count.shape[1]), np.arange(1, len(count) + 1))
        ax.scatter(at, client, s=120 * count / count.max(), color=COLOURS[1])
        ax.set(xlabel="Label", ylabel="Client", title=name)
        whole_numbers(ax.xaxis, ax.yaxis)
    _title(figure, grid.title)
    return save(figure, path)


@dataclass(frozen=True)
class Picture:
    """draw(grid, path) → path; record: what the runs have to keep for it."""

    draw: Callable[[Grid, Path], Path]
    record: str = ""


PICTURES = {
    "curves": Picture(curves),
    "costs": Picture(costs),
    "losses": Picture(losses),
    "clients": Picture(clients),
    "boxes": Picture(boxes),
    "rows": Picture(rows),
    "columns": Picture(columns),
    "tuning": Picture(tuning),
    "similarity": Picture(similarity, "similarity"),
    "encodings": Picture(partial(similarity, of=("key",)), "similarity"),
    "frequency": Picture(frequency, "matching"),
    "drift": Picture(drift, "drift"),
    "stability": Picture(stability, "split"),
    "distances": Picture(distances, "updates"),
    "embeddings": Picture(embeddings, "embeddings"),
    "neurons": Picture(neurons, "neurons"),
    "entropies": Picture(entropies, "neurons"),
    "features": Picture(features, "features"),
    "partition": Picture(partition, "labels"),
}
