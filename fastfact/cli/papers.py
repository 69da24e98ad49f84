"""The commands about the papers: reproduce, methods."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastfact import data
from fastfact.cli.terminal import Display, Json, console, jobs_of, write_json
from fastfact.experiment import report, traffic
from fastfact.experiment import run as experiment
from fastfact.papers import recipes, reproduce
from fastfact.papers.figures import Grid
from fastfact.papers.measures import MEASURES
from fastfact.papers.recipes import Plan

ACROSS = 4
"""Columns of a paper's table side by side in the terminal."""


def _listing() -> None:
    for paper, found in recipes.papers().items():
        table = Table(title=f"{paper}: {recipes.titles()[paper]}", title_justify="left")
        for column in ("result", "what", "where", "runs", "picture"):
            table.add_column(column, no_wrap=column != "what")
        for name, recipe in found.items():
            runs = len(recipe.plan().cells())
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


def _print(plan: Plan, grid: Grid) -> None:
    recipe = plan.recipe
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
    if recipe.says:
        console.print(f"The paper says: {recipe.says}", markup=False)
    if recipe.note:
        console.print(f"Note: {recipe.note}", markup=False)


def _differences(plan: Plan) -> None:
    if plan.changes:
        console.print("Not as in the paper: " + "; ".join(plan.changes) + ".", markup=False)
    else:
        console.print("With the paper's settings.")


def reproduce_command(
    paper: Annotated[str | None, typer.Argument(metavar="PAPER", help="Of which paper; none for a list.")] = None,
    result: Annotated[str | None, typer.Argument(metavar="RESULT", help="Which table or figure, see the list.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Data set in place of the paper's [default: the paper's if it is there, or digits]."),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help=experiment.HELP["data_dir"])] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds in place of the recipe's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs in place of the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds in place of the recipe's.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in place of the recipe's.")] = None,
    width: Annotated[float | None, typer.Option(help="Width multiplier in place of the recipe's.")] = None,
    init_from: Annotated[str | None, typer.Option(help=experiment.HELP["init_from"])] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rounds, a narrow network, 100 samples a client: to see it work.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for runs and pictures.")] = Path("runs/reproduce"),
    jobs: Annotated[str, typer.Option(help="Cells trained at once; the numbers do not depend on it.")] = "auto",
    json_file: Json = None,
) -> None:
    """Run a table or figure of a paper: our numbers beside the paper's, and its picture. Without arguments a list.

    The same command again continues where it stopped; results that share runs share them.
    """
    if paper is None:
        _listing()
        return
    if result is None:
        known = recipes.papers()
        raise ValueError(f"result: name one of {', '.join(known[paper])}" if paper in known else _no_paper(paper))
    recipe = recipes.find(paper, result)
    if dataset is not None:
        data.load(dataset, data_dir)
    values = {"rounds": rounds, "epochs": epochs, "seeds": seeds, "clients": clients, "width": width}
    overrides: dict[str, Any] = dict(reproduce.QUICK) if quick else {}
    overrides |= {name: value for name, value in values.items() if value is not None}
    if data_dir is not None:
        overrides["data_dir"] = data_dir
    if init_from is not None:
        overrides |= {"init_from": init_from, "pretrain": 0}
    plan = recipe.plan(overrides, dataset, lambda name: recipes.available(name, data_dir))
    workers, cells = jobs_of(jobs), plan.cells()
    _differences(plan)
    with Display({name: config.rounds for name, config in cells.items()}) as display:
        failed = reproduce.run(plan, out, workers, display.event)
    if len(failed) < len(cells):
        grid = reproduce.grid(plan, out)
        _print(plan, grid)
        _differences(plan)
        content = {
            "paper": paper,
            "result": result,
            "title": recipe.title,
            "says": recipe.says,
            "note": recipe.note,
            "changes": plan.changes,
            "rows": reproduce.rows(plan, grid),
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


def methods_command(
    model: Annotated[str, typer.Option(help="Network, see `fastfact info`.")] = "resnet9",
    width: Annotated[float, typer.Option(help="Width multiplier of the network.")] = 1.0,
    shape: Annotated[str | None, typer.Option(help="Of one sample [default: 3,32,32, or 80 tokens].")] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 20,
    density: Annotated[float, typer.Option(help="Share of nonzero μ in factorized layers.")] = 1.0,
    permuted: Annotated[bool, typer.Option("--permuted", help="Keep classifier and norm local.")] = False,
    rounds: Annotated[str, typer.Option(help="Rounds to give the cost of all clients for.")] = "50,100",
    json_file: Json = None,
) -> None:
    """Every method: paper, what is shared, and the bytes of one client and round, from the tensors that travel."""
    counts = [int(part) for part in rounds.split(",") if part.strip().isdigit() and int(part) >= 1]
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
