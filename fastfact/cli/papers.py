"""What the commands about the papers do: reproduce, methods."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from fastfact import data
from fastfact.cli.terminal import Display, console, jobs_of, write_json
from fastfact.experiment import report, traffic
from fastfact.experiment.config import digits
from fastfact.papers import recipes, reproduce
from fastfact.papers.figures import Grid
from fastfact.papers.measures import MEASURES
from fastfact.papers.recipes import ResolvedRecipe

ACROSS = 4
"""Columns of a paper's table side by side in the terminal."""


def list_results() -> None:
    """Print every table and figure there is a recipe of."""
    for paper, results in recipes.papers().items():
        table = Table(title=f"{paper}: {recipes.titles()[paper]}", title_justify="left")
        for column in ("result", "what", "where", "runs", "picture"):
            table.add_column(column, no_wrap=column != "what")
        for name, recipe in results.items():
            runs = len(recipe.resolve().cells())
            table.add_row(name, recipe.title.partition(": ")[2], recipe.where, str(runs), ", ".join(recipe.pictures))
        console.print(table)
    console.print("runs: of the stand-in; the same runs serve several results. fastfact reproduce PAPER RESULT")


def _shown(value: tuple[float, float] | None) -> str:
    """Mean and deviation, with three digits of the mean or more."""
    if value is None:
        return "–"
    mean, deviation = value
    if abs(mean) >= 1 or not mean:
        digits = 1 if abs(mean) >= 100 else 2
    else:
        digits = max(4, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation else "")


def _print(resolved: ResolvedRecipe, grid: Grid) -> None:
    recipe = resolved.recipe
    console.print(f"{recipe.paper}, {recipe.title}", markup=False)
    for start in range(0, len(grid.columns), ACROSS):
        some = grid.columns[start : start + ACROSS]
        table = Table()
        table.add_column("", no_wrap=True)
        for column in some:
            units = {MEASURES[recipe.places[row, column].measure].unit for row in grid.rows} - {""}
            unit = f" [{', '.join(sorted(units))}]" if units else ""
            table.add_column(f"{column}{unit}\nours", justify="right")
            table.add_column("\nthe paper", justify="right")
        for row in grid.rows:
            table.add_row(row, *(_shown(values.get((row, c))) for c in some for values in (grid.ours, grid.theirs)))
        console.print(table)
    for when, names in recipe.taken().items():
        console.print(f"Measured ({', '.join(names)}): {when}.", markup=False)
    if recipe.says:
        console.print(f"The paper says: {recipe.says}", markup=False)
    if recipe.note:
        console.print(f"Note: {recipe.note}", markup=False)


def _differences(resolved: ResolvedRecipe) -> None:
    if resolved.changes:
        console.print("Not as in the paper: " + "; ".join(resolved.changes) + ".", markup=False)
    else:
        console.print("With the paper's settings.")


def reproduce_result(
    paper: str,
    result: str | None,
    dataset: str | None,
    given: Mapping[str, Any],
    *,
    quick: bool,
    out: Path,
    jobs: str,
    json_file: Path | None,
) -> None:
    """Run a table or figure and show it. given: values of `Config`, and seeds, in place of the recipe's."""
    if result is None:
        known = recipes.papers()
        raise ValueError(f"result: name one of {', '.join(known[paper])}" if paper in known else _no_paper(paper))
    recipe = recipes.find(paper, result)
    data_dir = given.get("data_dir")
    if dataset is not None:
        data.load(dataset, data_dir)
    overrides: dict[str, Any] = {**(reproduce.QUICK if quick else {}), **given}
    if "init_from" in given:
        overrides["pretrain"] = 0
    resolved = recipe.resolve(overrides, dataset, lambda name: recipes.available(name, data_dir))
    workers, cells = jobs_of(jobs), resolved.cells()
    _differences(resolved)
    with Display({name: config.rounds for name, config in cells.items()}) as display:
        failed = reproduce.run(resolved, out, workers, display.event)
    if len(failed) < len(cells):
        grid = reproduce.grid(resolved, out)
        _print(resolved, grid)
        _differences(resolved)
        content = {
            "paper": paper,
            "result": result,
            "title": recipe.title,
            "says": recipe.says,
            "note": recipe.note,
            "measured": {name: when for when, names in recipe.taken().items() for name in names},
            "changes": resolved.changes,
            "rows": reproduce.rows(resolved, grid),
            "failed": failed,
        }
        folder = out / paper
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{result}.json", content)
        write_json(json_file, content)
        for path in reproduce.draw(recipe, grid, folder):
            console.print(f"picture: {path}", markup=False, soft_wrap=True)
    if failed:
        typer.echo(f"fastfact: {len(failed)} of {len(cells)} cells failed; the same command runs them again", err=True)
        raise typer.Exit(1)


def _no_paper(paper: str) -> str:
    return f"paper={paper!r}, must be one of {', '.join(recipes.papers())}"


def list_methods(
    model: str,
    width: float,
    shape: str | None,
    classes: int,
    clients: int,
    density: float,
    permuted: bool,
    rounds: str,
    json_file: Path | None,
) -> None:
    """Print what every method shares and sends."""
    counts = [int(part) for part in rounds.split(",") if digits(part.strip()) and int(part) >= 1]
    if len(counts) != len(rounds.split(",")):
        raise ValueError(f"rounds={rounds!r}, must be numbers of at least 1, separated by commas")
    network = traffic.Network(model, width, traffic.shape_of(model, shape), classes)
    rows = traffic.table(network, clients, density, permuted, counts)
    table = Table(title=f"{model}, {clients} clients; bytes of a client and round", title_justify="left")
    for column in ("method", "paper", "shared", "up", "down", *(f"all, {count} rounds" for count in counts)):
        table.add_column(column, justify="left" if column in ("method", "paper", "shared") else "right")
    for row in rows:
        costs = [report.size(row["formula"][str(count)]) for count in counts]
        table.add_row(
            row["method"], row["paper"], row["shared"], report.size(row["up"]), report.size(row["down"]), *costs
        )
    console.print(table)
    console.print("all: four bytes a number, both ways, all clients, the initial download counted (Factorized-FL, C.2)")
    write_json(json_file, {"network": network.describe(), "clients": clients, "density": density, "rows": rows})
