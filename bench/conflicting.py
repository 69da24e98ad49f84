"""What matching gives where groups of clients conflict, and costs where nobody does: the tables of docs/claims.md.

`python -m bench.conflicting run CONFIG DIR` trains the rows below with the settings of CONFIG (examples/demo.toml, or
conflicting.toml) that are not finished in DIR, a seed after the other; it can be stopped and called again, and goes on
from what `fastfact compare --config CONFIG --out DIR` left. `… write CONFIG DIR FILE` writes FILE, as JSON, and prints
the table. `… signal CONFIG` trains nothing: it prints how well statistics of the images tell the groups apart, taken
before the first 1, 2 or all batch-norms of the initial network, which is the same for all clients.
"""

import argparse
import json
import statistics
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastfact import models
from fastfact.base import files
from fastfact.base.machine import provenance
from fastfact.experiment import build, report
from fastfact.experiment.compare import run_cells
from fastfact.experiment.config import Config
from fastfact.experiment.run import finished
from fastfact.federation import analysis
from fastfact.federation.server import mixing

PROVENANCE = "provenance.json"
ALPHA, BETA, MEAN, FEDAVG, ALONE = (
    "factorized-fl-alpha",
    "factorized-fl-beta",
    "factorized-fedavg",
    "fedavg",
    "stand-alone",
)
HEAD, IID, STATISTICS = {"head_first": 1}, "permuted-iid", {"match_on": "initial-statistics"}
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    BETA: (BETA, {}, ""),
    ALONE: (ALONE, {}, ""),
    FEDAVG: (FEDAVG, {}, ""),
    f"{FEDAVG}, true groups": (FEDAVG, {}, "groups"),
    f"{FEDAVG}, true groups, classifier first": (FEDAVG, HEAD, "groups"),
    f"{FEDAVG}, classifier first": (FEDAVG, HEAD, ""),
    MEAN: (MEAN, {}, ""),
    f"{MEAN}, classifier first": (MEAN, HEAD, ""),
    ALPHA: (ALPHA, {}, ""),
    f"{BETA}, by v": (BETA, {"match_on": "v"}, ""),
    f"{BETA}, by initial statistics": (BETA, STATISTICS, ""),
    f"{BETA}, classifier with the rest": (BETA, {"head_first": 0}, ""),
    f"{BETA}, permuted IID": (BETA, {}, IID),
    f"{BETA}, by initial statistics, permuted IID": (BETA, STATISTICS, IID),
    f"{FEDAVG}, permuted IID": (FEDAVG, {}, IID),
    f"{FEDAVG}, permuted IID, classifier first": (FEDAVG, HEAD, IID),
    f"{ALONE}, permuted IID": (ALONE, {}, IID),
}
"""Name → method, settings on top of those of the file, and how it is run: "groups", each group by itself (what a
federation would give that is told the groups); or another scenario."""
UNSAID = {ALPHA: {"match_on": "inputs", "recalibrate": True}}
"""Settings of methods that a file says nothing of."""
GROUPS = 5


def read(path: Path) -> tuple[Config, int]:
    content = tomllib.loads(path.read_text())
    del content["methods"]
    return Config(**{key: value for key, value in content.items() if key != "seeds"}), content["seeds"]


def cells(base: Config, name: str, seed: int) -> dict[str, Config]:
    """Place below DIR/cells → run, of one row and seed."""
    method, more, how = ROWS[name]
    own = {method: base.settings.get(method, UNSAID.get(method, {})) | more}
    config = replace(base, method=method, seed=seed, settings=own)
    where = f"{name}-seed{seed}".replace(", ", "+").replace(" ", "-")
    if how != "groups":
        return {where: replace(config, scenario=how or base.scenario)}
    each = base.clients // GROUPS
    groups = [",".join(str(group * each + k + 1) for k in range(each)) for group in range(GROUPS)]
    return {f"{where}-group{number}": replace(config, only=only) for number, only in enumerate(groups, 1)}


def run(base: Config, seeds: int, directory: Path, rows: list[str], jobs: int) -> None:
    todo = {place: config for seed in range(seeds) for row in rows for place, config in cells(base, row, seed).items()}
    paths = {directory / report.CELLS / place: config for place, config in todo.items()}
    waiting = [(config, path) for path, config in paths.items() if not finished(config, path)]
    about = provenance()

    def event(path: Path, kind: str, first: Any, second: Any) -> None:
        if kind == "done":
            files.write_json(path / PROVENANCE, about, indent=1)
            print(f"{path.name}: {100 * first['summary']['accuracy']:.1f} %", flush=True)
        elif kind == "failed":
            print(f"{path.name} failed: {first}", flush=True)

    if run_cells(waiting, jobs, event):
        raise SystemExit(1)


def signal(base: Config, seeds: int) -> None:
    seen: list[Tensor] = []
    for seed in range(seeds):
        clients = build.parts(replace(base, seed=seed, method=BETA)).clients
        shape = clients[0].train[0].shape[1:]
        torch.manual_seed(seed)
        model = models.build(base.model, shape, clients[0].num_classes, base.width).train()
        norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
        for norm in norms:
            norm.register_forward_pre_hook(lambda _, inputs: seen.append(_statistics(inputs[0])))
        keys: list[list[Tensor]] = []
        for client in clients:
            seen.clear()
            with torch.no_grad():
                model(client.train[0])
            keys.append(list(seen))
        for count in (1, 2, len(norms)):
            near = mixing.proximity(torch.stack([torch.cat(key[:count]) for key in keys]))
            found = analysis.separation(near, [client.group for client in clients])
            sizes = torch.bincount(mixing.groups(near)).tolist()
            print(f"seed {seed}, norms 1 … {count}: {found}, groups of {sizes}")


def _statistics(x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel of x [n, c, h, w], [2 c]."""
    return torch.cat([x.mean((0, 2, 3)), x.std((0, 2, 3))])


def summary(values: list[float]) -> dict[str, Any]:
    return {"mean": statistics.mean(values), "std": statistics.stdev(values) if len(values) > 1 else None}


def write(config: Path, base: Config, seeds: int, directory: Path, to: Path) -> None:
    rows: list[dict[str, Any]] = []
    abouts: dict[str, dict[str, Any]] = {}
    for name in ROWS:
        found: dict[int, list[dict[str, Any]]] = {}
        for seed in range(seeds):
            runs = {place: directory / report.CELLS / place for place in cells(base, name, seed)}
            if all(finished(of, runs[place]) for place, of in cells(base, name, seed).items()):
                found[seed] = [report.read_cell(path).result["summary"] for path in runs.values()]
                for path in runs.values():
                    own = path / PROVENANCE
                    about = json.loads(own.read_text()) if own.is_file() else provenance()
                    abouts[about["commit"]] = about
        if not found:
            continue
        row: dict[str, Any] = {"row": name, "seeds": sorted(found)}
        for key in ("accuracy", "accuracy_before"):
            values = [[one[key] for one in each] for each in found.values()]
            if all(value is not None for each in values for value in each):
                row[key] = summary([statistics.mean(each) for each in values])
        rows.append(row)
    command = f"python -m bench.conflicting run {config} DIR; python -m bench.conflicting write {config} DIR {to}"
    text = tomllib.loads(config.read_text())
    files.write_json(
        to,
        {"command": command, "trained": list(abouts.values()), "settings": text, "rows": rows},
        indent=1,
        ensure_ascii=False,
    )
    print("| | after local training | as downloaded | seeds |\n|---|---|---|---|")
    for row in rows:
        figures = (
            f"{100 * row[key]['mean']:.1f}" + _spread(row[key]) if key in row else "–"
            for key in ("accuracy", "accuracy_before")
        )
        print(f"| {row['row']} | " + " | ".join(figures) + f" | {len(row['seeds'])} |")


def _spread(figure: dict[str, Any]) -> str:
    return "" if figure["std"] is None else f" ± {100 * figure['std']:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for what in ("run", "write", "signal"):
        command = commands.add_parser(what)
        command.add_argument("config", type=Path)
        if what == "signal":
            command.add_argument("--samples", type=int, help="samples of a client, in place of the file's")
            continue
        command.add_argument("directory", type=Path)
        if what == "write":
            command.add_argument("file", type=Path)
        else:
            command.add_argument("--rows", type=lambda text: text.split(";"), default=list(ROWS), help="separated by ;")
            command.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base, seeds = read(options.config)
    if options.what == "signal":
        signal(base if options.samples is None else replace(base, samples=options.samples), seeds)
    elif options.what == "run":
        run(base, seeds, options.directory, options.rows, options.jobs)
    else:
        write(options.config, base, seeds, options.directory, options.file)


if __name__ == "__main__":
    main()
