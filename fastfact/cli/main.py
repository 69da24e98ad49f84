"""The command line: run, compare, report, info, bench; reproduce and methods are in `cli_papers`."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from fastfact.cli import papers as cli_papers
from fastfact.cli.terminal import Display, Json, Out, console, jobs_of, outcome, show, write_json
from fastfact.experiment import report
from fastfact.experiment import run as experiment
from fastfact.experiment.run import Config
from fastfact.federation.client.memory import keep_freed
from fastfact.federation.server.processes import Group, ProcessLost, in_torchrun
from fastfact.federation.storage import checkpoint

app = typer.Typer(
    help="Factorized neural-network weights, and personalized federated learning with them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(bench, name="bench")

Quick = Annotated[bool, typer.Option("--quick", help="A few rows and rounds, to see that it works.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of PyTorch [default: its own choice].")]


def _with_config(*without: str) -> Callable:
    """Give a command an option for every field of `Config`, --set and --config; it gets them as `given`."""

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
        added = []
        for item in fields(Config):
            if item.name in without or item.name not in experiment.HELP:
                continue
            shown = "" if item.default is None else f" [default: {item.default}]"
            kind = float if item.type == (float | None) else item.type
            option = typer.Option(f"--{item.name.replace('_', '-')}", help=experiment.HELP[item.name] + shown)
            added.append((item.name, Annotated[kind | None, option], None))
        set_help = "A setting of the method, for one method of several METHOD.KEY=VALUE; repeatable."
        set_option = typer.Option("--set", metavar="KEY=VALUE", help=set_help)
        file_help = "TOML file with the same names as the options; the command line wins."
        file_option = typer.Option("--config", metavar="FILE", help=file_help)
        added.append(("set", Annotated[list[str] | None, set_option], None))
        added.append(("config", Annotated[Path | None, file_option], None))

        def wrapper(**given):
            return command(**{p.name: given.pop(p.name) for p in own}, given=given)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        parameters = own + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, annotation, default in added
        ]
        wrapper.__signature__ = inspect.Signature(parameters)
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _merge(given: dict[str, Any], *also: str) -> tuple[Config, dict[str, Any]]:
    """The configuration from defaults, file and command line (the last wins), and the values of the keys in `also`."""
    file, settings = given.pop("config"), given.pop("set") or []
    names = [*experiment.HELP, "settings", *also]
    values = experiment.read_file(file, names) if file else {}
    values |= {name: value for name, value in given.items() if value is not None}
    extra = {name: values.pop(name) for name in also if name in values}
    return experiment.with_settings(Config(**values), settings, extra.get("methods")), extra


@app.command()
@_with_config()
def run(
    out: Out,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    json_file: Json = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train one method; leaves configuration, metrics, checkpoint and pictures in --out. Under torchrun the clients are
    spread over its processes.
    """
    config, _ = _merge(given)
    keep_freed()
    try:
        with Group.of_torchrun() as group:
            console.quiet = group.rank > 0
            experiment.check(config, group)
            group.root(lambda: experiment.check_directory(config, out, resume))
            if note := experiment.sharing_note(config):
                console.print(note)
            name = f"{config.method}, seed {config.seed}"
            with Display({name: config.rounds}) as display:
                result = experiment.run(config, out, lambda *event: display.round(name, *event), resume, group)
                display.end(name, outcome(result))
    except ProcessLost as error:
        raise ProcessLost(f"{error}; what was saved in {out} is kept, --resume goes on from it") from error
    if group.rank == 0:
        rows = show(out, report.read(out))
        write_json(json_file, {"config": result["config"], "table": rows})


@app.command()
@_with_config("method", "store", "store_values", "memory_limit")
def compare(
    out: Out,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas, or all.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, counted up from --seed. [default: 3]")] = None,
    jobs: Annotated[str, typer.Option(help="Cells trained at once; the numbers do not depend on it.")] = "auto",
    json_file: Json = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train several methods on several seeds and print one table. The same command again continues where it stopped."""
    if in_torchrun():
        raise ValueError("compare: spreads its cells over processes itself (--jobs), run it without torchrun")
    given["methods"] = methods.split(",") if methods else None
    given["seeds"] = seeds
    config, extra = _merge(given, "methods", "seeds")
    if "methods" not in extra:
        raise ValueError("methods: name one or more, separated by commas")
    names = experiment.methods.names() if list(extra["methods"]) == ["all"] else extra["methods"]
    comparison = experiment.Comparison(config, tuple(names), extra.get("seeds", 3))
    workers = jobs_of(jobs)
    comparison.check(out)
    if note := experiment.sharing_note(config):
        console.print(note)
    cells = comparison.cells()
    with Display({name: cell.rounds for name, cell in cells.items()}) as display:
        failed = comparison.run(out, workers, display.event)
    if len(failed) < len(cells):
        rows = show(out, report.read(out))
        write_json(json_file, {"config": comparison.describe(), "table": rows, "failed": failed})
    if failed:
        typer.echo(f"fastfact: {len(failed)} of {len(cells)} cells failed; the same command runs them again", err=True)
        raise typer.Exit(1)


@app.command("report")
def report_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What run or compare left, or a file of bench layers.")
    ],
    json_file: Json = None,
) -> None:
    """Print the table of a run or comparison and draw its pictures anew; of a benchmark, ratios over density."""
    if directory.is_file():
        rows = report.read_layers(directory)
        table_of([row for row in rows if row["shape"].startswith("all")], f"{directory}: geometric means")
        picture = report.plot_ratio(rows, directory.with_suffix(".png"))
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
        return
    rows = show(directory, report.read(directory))
    write_json(json_file, {"table": rows})


@app.command()
def info(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run, or a store of clients: what it holds.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Which compute path each layer of a network or run takes.")
    ] = None,
    density: Annotated[float | None, typer.Option(help="Of μ, for --plan [default: 0.1, or the run's].")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size, for --plan.")] = 64,
    shape: Annotated[str, typer.Option("--input", metavar="CxHxW", help="Shape of a sample, for --plan.")] = "3x32x32",
    json_file: Json = None,
) -> None:
    """Backends and why they serve or not, versions, hardware, data sets, scenarios, models, methods; or a DIR."""
    if plan is not None:
        from fastfact.cli import paths as planning

        rows = planning.plan(*planning.subject(plan, density, shape), batch)
        table_of(rows, f"{plan}: predicted milliseconds, {torch.get_num_threads()} threads")
        table_of(planning.totals(rows), "all layers that have a choice: predicted milliseconds")
        write_json(json_file, {"threads": torch.get_num_threads(), "layers": rows})
        return
    about = experiment.about() if directory is None else {str(directory): checkpoint.about(directory)}
    for part, content in about.items():
        table = Table(title=part, title_justify="left", show_header=False)
        for name, value in content.items():
            table.add_row(name, str(value))
        console.print(table)
    write_json(json_file, about)


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


@bench.command("layers")
def bench_layers(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[str | None, typer.Option(metavar="SECTIONS", help="Only these, separated by commas.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 11,
    rivals: Annotated[bool, typer.Option(help="All rivals, not the dense layer alone.")] = True,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu: processor time, where others use the machine too.")
    ] = "wall",
) -> None:
    """The factored layers against the dense layer and other rivals; milliseconds, ratio = dense / ours."""
    from fastfact.bench import layers

    keep_freed()
    torch.set_num_threads(threads or torch.get_num_threads())
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        # Written as it comes: the whole takes long.
        if rows and row["op"] != rows[-1]["op"]:
            write_json(json_file, {"rows": rows})
        rows.append(row)

    layers.run(quick, only, clock, rounds, rivals, note)
    for op in dict.fromkeys(row["op"] for row in rows):
        unit = "megabytes" if op == "memory" else "milliseconds, medians"
        table_of([row for row in rows if row["op"] == op], f"{op}: {unit}; ratio = dense / ours")
    write_json(json_file, {"rows": rows})


@bench.command("clients")
def bench_clients(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[str | None, typer.Option(metavar="WORK", help="Only the rows of this work.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="So many clients, where the machine is small.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="So many rounds are timed.")] = None,
) -> None:
    """Federated averaging of many clients, ours beside a plain loop, vmap, pfl and Flower; ratio = theirs / ours."""
    from fastfact.bench.clients import draw, run

    torch.set_num_threads(threads or torch.get_num_threads())
    rows: list[dict[str, Any]] = []
    # Written as it comes: the whole takes long.
    for work, some in run(quick, only, clients, rounds):
        rows += some
        table_of(some, f"{work}: ratio = its time of a round / ours")
        write_json(json_file, {"rows": rows})
        if json_file and work == "growth":
            draw(some, json_file.with_suffix(".png"))


app.command("reproduce")(cli_papers.reproduce_command)
app.command("methods")(cli_papers.methods_command)


@bench.command("store")
def bench_store(json_file: Json = None, quick: Quick = False, threads: Threads = None) -> None:
    """Very many clients at rest and at work: bytes of a client, seconds and memory of rounds out of core."""
    from fastfact.bench import store

    keep_freed()
    torch.set_num_threads(threads or torch.get_num_threads())
    rows = store.run(quick)
    for name in dict.fromkeys(row["work"] for row in rows):
        table_of([row for row in rows if row["work"] == name], name)
    write_json(json_file, {"threads": torch.get_num_threads(), "rows": rows})


@bench.command("server")
def bench_server(json_file: Json = None, quick: Quick = False, threads: Threads = None) -> None:
    """Similarity matching and mixing: exact beside numpy, sketched beside its products alone, growth with clients."""
    from fastfact.bench.server import draw, run

    torch.set_num_threads(threads or torch.get_num_threads())
    rows: list[dict[str, Any]] = []
    for work, some in run(quick):
        rows += some
        table_of(some, work)
        write_json(json_file, {"rows": rows})
        if json_file and work == "growth":
            draw(some, json_file.with_suffix(".png"))


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        code = app(prog_name="fastfact", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        # Errors of the command line itself bring their own wording; anything else unexpected deserves its traceback.
        wording = getattr(error, "format_message", None)
        if wording is None and not isinstance(error, ValueError | OSError):
            raise
        typer.echo(f"fastfact: {' '.join((wording() if wording else str(error)).split())}", err=True)
        code = 2
    if code == 130:
        typer.echo("fastfact: stopped; what is done is kept, the same command continues (run: with --resume)", err=True)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
