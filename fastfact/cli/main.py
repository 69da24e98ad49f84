"""The commands.

What needs PyTorch is imported by the command that runs, so that help and completion come at once.
"""

import inspect
import io
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fastfact.base import VERSION, plugins
from fastfact.base.kinds import type_error
from fastfact.cli.terminal import (
    Display,
    Json,
    Out,
    console,
    draw,
    jobs_of,
    outcome,
    show,
    table_of,
    tables_of,
    write_json,
)
from fastfact.experiment.config import Config, read_file, with_settings

app = typer.Typer(
    help="Factorized neural-network weights, and personalized federated learning with them.",
    epilog="Example: fastfact compare --methods factorized-fl-beta,fedavg --out runs/first",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
HELP = {item.name: escape(item.metadata["help"]) for item in fields(Config)}

TRAIN, RESULTS, PAPERS, MACHINE = "Train", "Results", "Methods and papers", "This machine"

OF_RUN = ("method", "store", "store_values", "memory_limit")
"""What a comparison is not configured by: its cells have methods of their own, and keep their clients in memory."""

bench = typer.Typer(
    help="Measure layers, networks and federations on this machine.",
    epilog="Example: fastfact bench layers --quick",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench", rich_help_panel=MACHINE)

Quick = Annotated[bool, typer.Option("--quick", help="A few rows and rounds, to see that it works.")]
Clock = Annotated[str, typer.Option(help="wall, or cpu: processor time, where others use the machine too.")]
Threads = Annotated[int | None, typer.Option(min=1, help=escape("Threads of PyTorch [default: its own choice]."))]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fastfact {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    use: Annotated[
        list[str] | None,
        typer.Option("--use", metavar="FILE.py", help="Import methods or callbacks of your own first; repeatable."),
    ] = None,
) -> None:
    for text in use or ():
        plugins.use(text)


def _option(item) -> Any:
    """The annotation that makes a field of `Config` an option; None for a field that only a file can set."""
    about = item.metadata
    if not about["help"]:
        return None
    unit = f" Unit: {about['unit']}." if about["unit"] else ""
    shown = "" if item.default in (None, "") else f" [default: {item.default}]"
    kind = float if item.type == (float | None) else item.type
    option = typer.Option(
        f"--{item.name.replace('_', '-')}",
        help=escape(about["help"] + unit + shown),
        rich_help_panel=about["group"],
        show_default=False,
    )
    return Annotated[kind | None, option]


def _with_config(*without: str) -> Callable:
    """Give a command an option for every field of `Config`, --set and --config; it gets them as `given`."""

    def decorate(command: Callable) -> Callable:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
        options = {item.name: _option(item) for item in fields(Config) if item.name not in without}
        set_help = "A setting of the method, for one method of several METHOD.KEY=VALUE; repeatable."
        options["set"] = Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help=set_help, rich_help_panel="Method and training"),
        ]
        file_help = "TOML file with the same names as the options; the command line wins."
        options["config"] = Annotated[Path | None, typer.Option("--config", metavar="FILE", help=file_help)]

        def wrapper(**given):
            return command(**{p.name: given.pop(p.name) for p in own}, given=given)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        parameters = own + [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in options.items()
            if annotation is not None
        ]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _merge(given: dict[str, Any], begun: Mapping[str, Any] | None = None) -> Config:
    """The configuration from defaults, what it was begun with, file and command line (the last wins)."""
    values, settings = _values(given)
    return with_settings(Config(**{**(begun or {}), **values}), settings)


def _merge_compared(given: dict[str, Any]) -> tuple[Config, tuple[str, ...], int]:
    """The same of a comparison, its methods and its number of seeds."""
    values, settings = _values(given, ("methods", "seeds"), OF_RUN)
    if "methods" not in values:
        raise ValueError("methods: name one or more, separated by commas")
    methods, seeds = _methods_of(values.pop("methods")), values.pop("seeds", 3)
    if rule := type_error(seeds, int):
        raise ValueError(f"seeds={seeds!r}, must be {rule}")
    return with_settings(Config(**values), settings, methods), methods, seeds


def _values(given: dict[str, Any], *keys: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """What file and command line say (the last wins), and the texts of --set; keys: see `read_file`."""
    file, settings = given.pop("config"), given.pop("set") or []
    values = read_file(file, *keys) if file else {}
    return values | {name: value for name, value in given.items() if value is not None}, settings


def _methods_of(value: Any) -> tuple[str, ...]:
    """The names of a list or of a string, whose commas part them; all are all there are."""
    from fastfact.methods import names as known

    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or any(type_error(part, str) for part in parts):
        raise ValueError(f"methods={value!r}, must be names of methods, as a list or separated by commas, or all")
    names = tuple(filter(None, (part.strip() for part in parts)))
    return tuple(known()) if names == ("all",) else names


@app.command(
    epilog="Example: fastfact run --method fedprox --set prox=0.1 --rounds 10 --out runs/fedprox", rich_help_panel=TRAIN
)
@_with_config()
def run(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="With --resume: the run to continue.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for the results.", show_default=False)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in DIR with its own options, but for those given here.")
    ] = False,
    json_file: Json = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train one method.

    Leaves configuration, metrics, checkpoints and pictures in --out. Ctrl-C keeps what is done; --resume DIR goes on.
    Under torchrun the clients are spread over its processes.
    """
    from fastfact.experiment import run as experiment

    if directory is not None and not resume:
        raise ValueError(f"{directory}: a new run is put into --out DIR, an old one is continued by --resume DIR")
    if directory is not None and out not in (None, directory):
        raise ValueError(f"out={str(out)!r}: --resume {directory} names another directory")
    if (where := directory or out) is None:
        raise ValueError("out: name the directory for the results, --out DIR")
    begun = experiment.options(where, any(value is not None for value in given.values())) if resume else {}
    _train(_merge(given, begun), where, resume, json_file)


def _train(config: Config, out: Path, resume: bool, json_file: Path | None) -> None:
    from fastfact.experiment import build, report
    from fastfact.experiment import run as experiment
    from fastfact.federation.client.memory import keep_freed
    from fastfact.federation.server.processes import Group, ProcessLost

    keep_freed()
    try:
        with Group.of_torchrun() as group:
            console.quiet = group.rank > 0
            build.check(config, group)
            group.root(lambda: experiment.check_directory(config, out, resume))
            for note in build.notes(config):
                console.print(note)
            name = f"{config.method}, seed {config.seed}"
            with Display({name: config.rounds}) as display:
                result = experiment.run(config, out, lambda *event: display.round(name, *event), resume, group)
                display.end(name, outcome(result))
    except ProcessLost as error:
        raise ProcessLost(f"{error}; what was saved in {out} is kept, --resume goes on from it") from error
    except KeyboardInterrupt:
        _stop.told = experiment.stopped(config, out)
        raise
    if group.rank == 0:
        rows = show(cells := report.read(out))
        write_json(json_file, {"config": result["config"], "table": rows})
        draw(out, cells)


@app.command(
    epilog="Example: fastfact compare --methods factorized-fl-beta,fedavg --seeds 3 --out runs/first",
    rich_help_panel=TRAIN,
)
@_with_config(*OF_RUN)
def compare(
    out: Out,
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas, or all.")] = None,
    seeds: Annotated[
        int | None, typer.Option(help=escape("Number of seeds, counted up from --seed. [default: 3]"))
    ] = None,
    jobs: Annotated[str, typer.Option(help="Cells trained at once; the numbers do not depend on it.")] = "auto",
    json_file: Json = None,
    *,
    given: dict[str, Any],
) -> None:
    """Train several methods on several seeds, and print one table.

    The same command again continues where it stopped.
    """
    from fastfact.experiment.compare import Comparison
    from fastfact.federation.server.processes import in_torchrun

    if in_torchrun():
        raise ValueError("compare: spreads its cells over processes itself (--jobs), run it without torchrun")
    comparison = Comparison(*_merge_compared(given | {"methods": methods, "seeds": seeds}))
    _compare(comparison, out, jobs, json_file)


def _compare(comparison: Any, out: Path, jobs: str, json_file: Path | None) -> None:
    from fastfact.experiment import build, report

    config, workers = comparison.config, jobs_of(jobs)
    comparison.check(out)
    for note in build.notes(config):
        console.print(note)
    cells = comparison.cells()
    with Display({name: cell.rounds for name, cell in cells.items()}) as display:
        failed = comparison.run(out, workers, display.event)
    if len(failed) < len(cells):
        rows = show(done := report.read(out))
        write_json(json_file, {"config": comparison.describe(), "table": rows, "failed": failed})
        draw(out, done)
    if failed:
        typer.echo(f"fastfact: {len(failed)} of {len(cells)} cells failed; the same command runs them again", err=True)
        raise typer.Exit(1)


@app.command(epilog="Example: fastfact resume runs/first", rich_help_panel=TRAIN)
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What run or compare left.")],
    rounds: Annotated[int | None, typer.Option(help="Of a run: so many in all, not as it was begun.")] = None,
    jobs: Annotated[str, typer.Option(help="Of a comparison: cells trained at once.")] = "auto",
    json_file: Json = None,
) -> None:
    """Continue a run or a comparison where it stopped."""
    from fastfact.experiment import report
    from fastfact.experiment.compare import Comparison
    from fastfact.experiment.run import options, started

    if (directory / report.COMPARISON).is_file():
        if rounds is not None:
            raise ValueError(f"rounds={rounds}: {directory} is a comparison, whose rounds cannot be changed")
        _compare(Comparison.read(directory), directory, jobs, json_file)
        return
    config = started(directory)
    options(directory)
    _train(config if rounds is None else replace(config, rounds=rounds), directory, True, json_file)


@app.command(epilog="Example: fastfact verify runs/first", rich_help_panel=RESULTS)
def verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run, a comparison or a store of clients.")],
    json_file: Json = None,
) -> None:
    """Check that every file is as it was written.

    Needs no model. Exit code 1 if a digest is not what was written.
    """
    from fastfact.experiment.verify import verify as check

    problems = check(directory)
    for path, problem in problems.items():
        console.print(f"{path}: {'right' if problem is None else 'WRONG'}", markup=False, soft_wrap=True)
    write_json(json_file, {"problems": problems})
    for problem in filter(None, problems.values()):
        typer.echo(f"fastfact: {problem}", err=True)
    if any(problems.values()):
        raise typer.Exit(1)


@app.command("report", rich_help_panel=RESULTS, epilog="Example: fastfact report runs/first --html runs/first.html")
def report_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What run or compare left, or a file of bench layers.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with tables and charts, for any browser.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table, comma-separated.")] = None,
    latex: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a LaTeX tabular.")] = None,
    json_file: Json = None,
) -> None:
    """Print the table of a run or comparison; as a page, CSV or LaTeX too.

    Draws its pictures again. Of a file of `fastfact bench layers`: ratios over density.
    """
    from fastfact.base import files
    from fastfact.experiment import page, plots, report

    if directory.is_file():
        if given := [name for name, path in (("html", html), ("csv", csv), ("latex", latex)) if path is not None]:
            raise ValueError(f"{directory}: is a file of a benchmark, --{given[0]} is for what run or compare left")
        rows = report.read_layers(directory)
        table_of([row for row in rows if row["shape"].startswith("all")], f"{directory}: geometric means")
        write_json(json_file, {"rows": rows})
        picture = plots.plot_ratio(rows, directory.with_suffix(".png"))
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
        return
    cells = report.read(directory)
    rows = show(cells)
    if html is not None:
        console.print(f"page: {page.write(cells, html)}", markup=False, soft_wrap=True)
    if csv is not None:
        report.write_csv(rows, csv)
    if latex is not None:
        latex.parent.mkdir(parents=True, exist_ok=True)
        files.write(latex, report.latex(rows).encode())
    write_json(json_file, {"table": rows})
    draw(directory, cells)


@app.command(epilog="Example: fastfact info --plan resnet18 --density 0.1", rich_help_panel=MACHINE)
def info(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A run, a comparison or a store of clients: what it holds.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Which compute path each layer of a network or run takes.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help=escape("Of μ, for --plan [default: 0.1, or the run's]."))
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help=escape("For --plan [default: 64, 8 or 16 for torchvision's]."))
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="CxHxW",
            help=escape("Of a sample, for --plan [default: 3x32x32, 80 tokens, 3x224x224 for torchvision's]."),
        ),
    ] = None,
    json_file: Json = None,
) -> None:
    """List data sets, scenarios, models, methods, versions; or say what a DIR holds.

    Backends with why they serve or not, too. --plan MODEL measures the dense layer and every compute path for each
    layer of a network (of ours, of torchvision, or of a run's first client), and marks the path that it takes.
    """
    import torch

    from fastfact.cli import about, paths
    from fastfact.experiment import report
    from fastfact.federation.storage import checkpoint

    for name, value in (("density", density), ("batch", batch), ("input", shape)):
        if plan is None and value is not None:
            raise ValueError(f"{name}={value!r}: is for --plan MODEL, which is missing")
    if plan is not None and directory is not None:
        raise ValueError(f"plan={plan!r}: not beside {directory}; --plan {directory} is the plan of a run")
    if plan is not None:
        model, sample, usual = paths.subject(plan, density, shape)
        rows = paths.plan(model, sample, batch or usual)
        found = paths.density(rows)
        of = "" if found is None else f"density {found:.2g}, "
        table_of(paths.shown(rows), f"{plan}: {of}milliseconds, {torch.get_num_threads()} threads; * the path taken")
        table_of(paths.totals(rows), "all layers: milliseconds; where a path is not there, W is made")
        write_json(json_file, {"threads": torch.get_num_threads(), "layers": rows})
        return
    if directory is None:
        parts = about.package()
    elif (directory / report.COMPARISON).is_file():
        parts = {str(directory): about.comparison(directory)}
    else:
        parts = {str(directory): checkpoint.about(directory)}
    tables_of(parts)
    write_json(json_file, parts)


@app.command(epilog="Example: fastfact doctor --json doctor.json", rich_help_panel=MACHINE)
def doctor(json_file: Json = None) -> None:
    """What is missing here, what that costs, and the line that mends it.

    Exit code 1 if something is not as it should be.
    """
    from fastfact.cli import doctor as examination

    findings = examination.examine()
    looks = {examination.RIGHT: "green", examination.ABSENT: "yellow", examination.WRONG: "bold red"}
    for finding in findings:
        state = f"[{looks[finding.state]}]{finding.state:<6}[/]"
        console.print(f"{state}  {finding.part}: {escape(finding.detail)}", soft_wrap=True)
        for what, line in (("costs", finding.cost), ("mend", finding.mend)):
            if line:
                console.print(f"        {what}: {line}", markup=False, soft_wrap=True)
    write_json(json_file, {"findings": examination.as_json(findings)})
    if any(finding.state == examination.WRONG for finding in findings):
        raise typer.Exit(1)


@bench.command("layers", epilog="Example: fastfact bench layers --only forward --quick")
def bench_layers(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[str | None, typer.Option(metavar="SECTIONS", help="Only these, separated by commas.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 11,
    rivals: Annotated[bool, typer.Option(help="All rivals, not the dense layer alone.")] = True,
    clock: Clock = "wall",
) -> None:
    """The factored layers against the dense layer and other rivals; milliseconds, ratio = dense / ours."""
    from fastfact.bench import layers
    from fastfact.federation.client.memory import keep_freed

    keep_freed()
    _use(threads)
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


@bench.command("networks", epilog="Example: fastfact bench networks --only resnet18,vit_b_16 --density 0.1 --no-rivals")
def bench_networks(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Networks of torchvision, or ours, separated by commas.")
    ] = None,
    sections: Annotated[str | None, typer.Option(help=escape("Of step,evaluation,memory [default: all]."))] = None,
    density: Annotated[
        str | None,
        typer.Option(help=escape("Of μ: 0 (none) to 1 (dense), separated by commas [default: 0,.05,.1,.3,.6,1].")),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help=escape("Images at once [default: each network's own]."))
    ] = None,
    side: Annotated[int, typer.Option(min=1, help="Pixels of a side of an image.")] = 112,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 5,
    rivals: Annotated[bool, typer.Option(help="torch.compile of both networks, too.")] = True,
    form: Annotated[str, typer.Option("--format", help="Memory format: channels_last or nchw.")] = "channels_last",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    clock: Clock = "wall",
) -> None:
    """Whole networks with factorized layers against dense ones; milliseconds, ratio = dense / ours."""
    from fastfact.bench import networks
    from fastfact.federation.client.memory import keep_freed

    keep_freed()
    _use(threads)
    _in_parts(
        networks.run(quick, only, sections, density, batch, side, clock, rounds, rivals, form, dtype, device),
        lambda name: f"{name}: milliseconds, MiB; ratio = dense / ours",
        json_file,
        lambda rows, path: None,
    )


@bench.command("clients", epilog="Example: fastfact bench clients --quick --json clients.json")
def bench_clients(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[str | None, typer.Option(metavar="WORK", help="Only the rows of this work.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients, where the machine is small.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds that are timed.")] = None,
) -> None:
    """Federated averaging of many clients, ours beside a plain loop, vmap, pfl and Flower; ratio = theirs / ours."""
    from fastfact.bench.clients import draw
    from fastfact.bench.clients import run as measure

    _use(threads)
    _in_parts(
        measure(quick, only, clients, rounds),
        lambda work: f"{work}: ratio = its time of a round / ours",
        json_file,
        draw,
    )


@bench.command("adapters", epilog="Example: fastfact bench adapters --only layer --json adapters.json")
def bench_adapters(
    json_file: Json = None,
    quick: Quick = False,
    threads: Threads = None,
    only: Annotated[
        str | None, typer.Option(help="The parts whose names begin so: layer, 32, 256.", show_default=False)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each side.", min=1, show_default=False)] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Number of clients, where the machine is small.")] = None,
    clock: Clock = "wall",
) -> None:
    """Adapters of frozen networks beside PEFT, a layer and many clients; milliseconds, ratio = PEFT / ours."""
    from fastfact.bench import adapters
    from fastfact.federation.client.memory import keep_freed

    keep_freed()
    _use(threads)
    _in_parts(
        adapters.run(quick, only, rounds, clock, clients),
        lambda name: f"{name}: milliseconds, bytes; ratio = PEFT / ours",
        json_file,
        lambda rows, path: None,
    )


@bench.command("store", epilog="Example: fastfact bench store --quick")
def bench_store(json_file: Json = None, quick: Quick = False, threads: Threads = None) -> None:
    """Very many clients at rest and at work: bytes of a client, seconds and memory of rounds out of core."""
    import torch

    from fastfact.bench import store
    from fastfact.federation.client.memory import keep_freed

    keep_freed()
    _use(threads)
    rows = store.run(quick)
    for name in dict.fromkeys(row["work"] for row in rows):
        table_of([row for row in rows if row["work"] == name], name)
    write_json(json_file, {"threads": torch.get_num_threads(), "rows": rows})


@bench.command("server", epilog="Example: fastfact bench server --quick")
def bench_server(json_file: Json = None, quick: Quick = False, threads: Threads = None) -> None:
    """Similarity matching and mixing: exact beside numpy, sketched beside its products alone, growth with clients."""
    from fastfact.bench.server import draw
    from fastfact.bench.server import run as measure

    _use(threads)
    _in_parts(measure(quick), lambda work: work, json_file, draw)


def _use(threads: int | None) -> None:
    import torch

    torch.set_num_threads(threads or torch.get_num_threads())


def _in_parts(parts, title: Callable[[str], str], json_file: Path | None, draw: Callable) -> None:
    """Print and write the rows of each work as they come: the whole takes long."""
    rows: list[dict[str, Any]] = []
    for work, some in parts:
        rows += some
        table_of(some, title(work))
        write_json(json_file, {"rows": rows})
        if json_file and work == "growth":
            draw(some, json_file.with_suffix(".png"))


@app.command(epilog="Example: fastfact reproduce fedfac table-2 --quick", rich_help_panel=PAPERS)
def reproduce(
    paper: Annotated[str | None, typer.Argument(metavar="PAPER", help="Of which paper; none for a list.")] = None,
    result: Annotated[str | None, typer.Argument(metavar="RESULT", help="Which table or figure, see the list.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help=escape("Data set in place of the paper's [default: the paper's if it is there, or digits].")),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help=HELP["data_dir"])] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds in place of the recipe's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Local epochs in place of the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds in place of the recipe's.")] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in place of the recipe's.")] = None,
    width: Annotated[float | None, typer.Option(help="Width multiplier in place of the recipe's.")] = None,
    init_from: Annotated[str | None, typer.Option(help=HELP["init_from"])] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rounds, a narrow network, 100 samples a client: to see it work.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory for runs and pictures.")] = Path("runs/reproduce"),
    jobs: Annotated[str, typer.Option(help="Cells trained at once; the numbers do not depend on it.")] = "auto",
    json_file: Json = None,
) -> None:
    """Run a table or figure of a paper: our numbers beside its own.

    Without arguments a list. The same command again continues where it stopped; results that share runs share them.
    """
    from fastfact.cli import papers

    if paper is None:
        papers.list_results()
        return
    values = {
        "rounds": rounds,
        "epochs": epochs,
        "seeds": seeds,
        "clients": clients,
        "width": width,
        "data_dir": data_dir,
        "init_from": init_from,
    }
    given = {name: value for name, value in values.items() if value is not None}
    papers.reproduce_result(paper, result, dataset, given, quick=quick, out=out, jobs=jobs, json_file=json_file)


@app.command("methods", rich_help_panel=PAPERS, epilog="Example: fastfact methods --model resnet18 --density 0.4")
def list_methods(
    model: Annotated[str, typer.Option(help="Network, see `fastfact info`.")] = "resnet9",
    width: Annotated[float, typer.Option(help="Width multiplier of the network.")] = 1.0,
    shape: Annotated[
        str | None, typer.Option(help=escape("Shape of one sample [default: 3,32,32, or 80 tokens]."))
    ] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 20,
    density: Annotated[float, typer.Option(help="Share of nonzero μ in factorized layers.")] = 1.0,
    permuted: Annotated[bool, typer.Option("--permuted", help="Keep classifier and norm local.")] = False,
    rounds: Annotated[str, typer.Option(help="Rounds to give the cost of all clients for.")] = "50,100",
    json_file: Json = None,
) -> None:
    """Every method: its paper, what is shared, and the bytes of a client and round."""
    from fastfact.cli import papers

    papers.list_methods(model, width, shape, classes, clients, density, permuted, rounds, json_file)


class _Stop:
    """How the command is being stopped, which typer makes exit code 130 of, and where its work can be gone on with."""

    terminated = False
    told = "what is done is kept, fastfact resume DIR continues"


_stop = _Stop()


def _terminate(*_) -> None:
    _stop.terminated = True
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: bad input is one line on stderr and exit code 2, Ctrl-C exit code 130, SIGTERM 143."""
    # Elsewhere than in the main thread nobody may; what else is there already has a reason.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A path may have bytes that are no text: shown as they are.
        sys.stdout.reconfigure(errors="surrogateescape")
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
        code = 143 if _stop.terminated else 130
        typer.echo(f"fastfact: stopped; {_stop.told}", err=True)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
