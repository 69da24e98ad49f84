"""What the commands share: the console, progress, the table of a comparison, results as JSON."""

import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fastfact.base import files, machine
from fastfact.experiment.config import digits

if TYPE_CHECKING:
    from fastfact.experiment.report import Cell

# What holds the kernels of a process to fewer instructions, which its figures must tell.
HELD = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

# A table must not be folded to 80 columns in a file.
console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write what is shown to FILE, as JSON.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory for the results.")]


class Display:
    """Live bars in a terminal; elsewhere a line when a cell ends and, in between, one every ten seconds."""

    def __init__(self, rounds: Mapping[str, int]):
        """rounds: of each cell, by name."""
        self.rounds, self.total, self.done, self.ended = dict(rounds), sum(rounds.values()), 0, 0
        self.last = time.monotonic()
        self.tasks: dict[str, Any] = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.overall = self.progress.add_task("all rounds", total=self.total, accuracy="")

    def __enter__(self) -> "Display":
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def skip(self, rounds: int) -> None:
        """Count rounds that an earlier call finished."""
        self.done += rounds
        self.progress.advance(self.overall, rounds)

    def round(self, name: str, number: int, accuracy: float) -> None:
        if name not in self.tasks:
            self.tasks[name] = self.progress.add_task(name, total=self.rounds[name], accuracy="", completed=number - 1)
            self.skip(number - 1)
        self.skip(1)
        self.progress.update(self.tasks[name], completed=number, accuracy=f"{100 * accuracy:5.1f} %")
        if not console.is_terminal and time.monotonic() - self.last > 10:
            self.last = time.monotonic()
            console.print(f"{self.done}/{self.total} rounds; {name}: round {number}, accuracy {100 * accuracy:.1f} %")

    def end(self, name: str, line: str) -> None:
        self.ended += 1
        if name in self.tasks:
            self.progress.remove_task(self.tasks.pop(name))
        console.print(f"[{self.ended}/{len(self.rounds)}] {name}: {line}", markup=False)

    def event(self, name: str, kind: str, first: Any, second: Any) -> None:
        """What `compare.run_missing` tells of a cell."""
        if kind == "round":
            self.round(name, first, second)
        elif kind == "found":
            self.skip(self.rounds[name])
            self.end(name, f"{outcome(first)}, finished earlier")
        else:
            self.end(name, outcome(first) if kind == "done" else f"failed: {first}")


def comparison_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows of `report.table`, for people."""
    from fastfact.experiment.report import size

    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    private = ["ε"] if any(row["epsilon"] is not None for row in rows) else []
    for column in (
        "accuracy [%]",
        "as downloaded [%]",
        "std over clients",
        "uplink",
        "downlink",
        "density of μ",
        *private,
        "seconds",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    most = max(len(row["seeds"]) for row in rows)
    for row in rows:
        several = len(row["seeds"]) > 1
        accuracy, before = (_percent(row[name], several) for name in ("accuracy", "accuracy_before"))
        if len(row["seeds"]) < most:
            accuracy += f" ({len(row['seeds'])} of {most} seeds)"
        table.add_row(
            row["method"],
            accuracy,
            before,
            f"{100 * row['client_std']:.1f}",
            size(row["uplink"]),
            size(row["downlink"]),
            "–" if row["density"] is None else f"{row['density']:.2f}",
            *("–" if row["epsilon"] is None else f"{row['epsilon']:.3g}" for _ in private),
            f"{row['seconds']:.1f}",
        )
    return table


def table_of(rows: list[dict[str, Any]], title: str) -> None:
    """Print rows, a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right" if isinstance(rows[0].get(name, 0.0), float) else "left")
    for row in rows:
        cells = ["" if row.get(name) is None else row[name] for name in names]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def tables_of(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of names and values for each part."""
    for part, content in parts.items():
        table = Table(title=part, title_justify="left", show_header=False)
        for name, value in content.items():
            table.add_row(name, str(value))
        console.print(table)


def _percent(value: dict[str, float] | None, several: bool) -> str:
    if value is None:
        return "–"
    return f"{100 * value['mean']:.1f}" + (f" ± {100 * value['std']:.1f}" if several else "")


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write what a command showed, with the command and its circumstances; nothing without a path."""
    if path is None:
        return
    held = [f"{name}={os.environ[name]}" for name in HELD if name in os.environ]
    content = {"command": shlex.join([*held, "fastfact", *sys.argv[1:]]), **content, **machine.provenance()}
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, content, indent=1, ensure_ascii=False)


def outcome(result: dict[str, Any]) -> str:
    """What a finished cell says in a line."""
    from fastfact.experiment.report import left_out_line

    summary = result["summary"]
    found = summary.get("left_out")
    line = f"accuracy {100 * summary['accuracy']:.1f} %, {summary['seconds']:.1f} s of training"
    return f"{line}; left out: {left_out_line(found)}" if found else line


def show(cells: "list[Cell]") -> list[dict[str, Any]]:
    """Print the table of the cells; its rows."""
    from fastfact.experiment import report

    rows, config = report.table(cells), cells[0].result["config"]
    seeds = len({cell.seed for cell in cells})
    title = [*report.facts(config), f"{config['rounds']} rounds", f"{seeds} seed{'s' * (seeds > 1)}"]
    console.print(comparison_table(rows, ", ".join(title)))
    return rows


def draw(directory: Path, cells: "list[Cell]") -> None:
    """Draw the pictures of the cells into `directory`. All else is written before: where nobody may write there, as in
    an archive, they are left out with a warning."""
    from fastfact.experiment import plots

    try:
        for path in plots.pictures(cells, directory):
            console.print(f"picture: {path}", markup=False, soft_wrap=True)
    except OSError as error:
        typer.echo(f"fastfact: the pictures are left out: {error}", err=True)


def jobs_of(text: str) -> int:
    """How many cells at once: a number, or auto. Raises ValueError."""
    if text == "auto":
        return machine.cores()
    if not digits(text) or int(text) < 1:
        raise ValueError(f"jobs={text!r}, must be auto or a number of at least 1")
    return int(text)
