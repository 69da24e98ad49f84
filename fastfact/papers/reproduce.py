"""From a recipe to the numbers beside the paper's, and its pictures."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastfact.experiment import report
from fastfact.experiment.compare import run_missing
from fastfact.experiment.run import finished
from fastfact.papers.figures import PICTURES, Grid
from fastfact.papers.measures import MEASURES
from fastfact.papers.recipes import ResolvedRecipe, name_of

QUICK: dict[str, Any] = {"rounds": 3, "seeds": 1, "width": 0.1, "samples": 100}
"""What --quick changes: to see that a recipe works, not what it shows."""


def run(
    resolved: ResolvedRecipe, directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]
) -> dict[str, str]:
    """Run the cells of a recipe that are not finished in `directory`; name → reason of those that failed."""
    cells = resolved.cells()
    (directory / report.CELLS).mkdir(parents=True, exist_ok=True)
    return run_missing(cells, directory, jobs, on_event)


def grid(resolved: ResolvedRecipe, directory: Path) -> Grid:
    """What the finished cells of a recipe say: means and deviations over seeds in the paper's unit."""
    recipe, cells, ours = resolved.recipe, {}, {}
    found: dict[str, report.Cell] = {}
    for place, runs in resolved.grid.items():
        names = [name_of(config) for config in runs]
        for config, name in zip(runs, names, strict=True):
            path = directory / report.CELLS / name
            if name not in found and finished(config, path):
                found[name] = report.read_cell(path)
        cells[place] = [found[name] for name in names if name in found]
    for row, column in resolved.grid:
        ours[row, column] = _number(resolved, cells, row, column)
    theirs = {place: (value, spread or 0.0) for place, (value, spread) in recipe.numbers.items()}
    return Grid(recipe.title, list(recipe.rows), list(recipe.columns), cells, ours, theirs, recipe.moment)


def _number(resolved: ResolvedRecipe, cells, row: str, column: str) -> tuple[float, float] | None:
    recipe = resolved.recipe
    place = recipe.places[row, column]
    measure = MEASURES[place.measure]
    found = [measure.of(cell, place.clients, place.moment) for cell in cells[row, column]]
    values = [value for value in found if value is not None]
    if recipe.relative_to is not None:
        base = [measure.of(cell, place.clients, place.moment) for cell in cells.get((recipe.relative_to, column), ())]
        whole = [value for value in base if value is not None]
        scale = statistics.fmean(whole) if whole and len(whole) == len(base) else 0.0
        values = [value / scale for value in values] if scale else []
    elif measure.share and recipe.percent:
        values = [100 * value for value in values]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def draw(recipe, grid: Grid, directory: Path) -> list[Path]:
    """Write the recipe's pictures; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    return [PICTURES[name].draw(grid, directory / f"{recipe.name}-{name}.png") for name in recipe.pictures]


def rows(resolved: ResolvedRecipe, shown: Grid) -> list[dict[str, Any]]:
    """The numbers as JSON can hold them: a row a place of the table, ours and the paper's."""
    made = []
    for (row, column), runs in resolved.grid.items():
        place, ours, theirs = (
            resolved.recipe.places[row, column],
            shown.ours[row, column],
            shown.theirs.get((row, column)),
        )
        made.append(
            {
                "row": row,
                "column": column,
                "measure": place.measure,
                "measured": MEASURES[place.measure].taken(place.moment),
                "ours": None if ours is None else {"mean": ours[0], "std": ours[1]},
                "paper": None if theirs is None else {"mean": theirs[0], "std": theirs[1] or None},
                "cells": [name_of(config) for config in runs],
            }
        )
    return made
