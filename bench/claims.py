"""The claims of the papers on the digits: every method and ablation, three scenarios, three seeds.

`python bench/claims.py run DIR` trains the cells that are not finished in DIR, the most important ones first; it can be
stopped and called again. `python bench/claims.py write DIR` puts the table of what is finished into
bench/results/claims.json and docs/claims.md.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from fastfact.base import files
from fastfact.base.machine import provenance
from fastfact.experiment import build, report
from fastfact.experiment.compare import run_cells
from fastfact.experiment.config import Config
from fastfact.experiment.run import finished
from fastfact.federation import Federation

ROOT = Path(__file__).resolve().parent.parent
PROVENANCE, RECALIBRATED = "provenance.json", "recalibrated.json"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
BASE = Config(
    dataset="digits",
    clients=20,
    rounds=12,
    epochs=2,
    batch_size=16,
    lr=0.02,
    momentum=0.9,
    weight_decay=1e-6,
    model="resnet9",
    width=0.125,
    alpha=0.5,
    cohort="20",
)
"""About 120 local steps. Small, so that several hundred runs take an hour of two cores; `LONG` has 400."""
SCENARIOS = ("permuted-iid", "permuted-non-iid", "domains")
STANDARD = ("iid", "non-iid")
LABELS = {"tau": 0.0, "epsilon": 1.0}
DOMAINS = {"tau": 0.95, "epsilon": 20.0, "min_matches": 4}
BEST3 = {"tau": 1.0, "epsilon": 0.0, "min_matches": 4}
"""The three most similar, weighted as "random" and "worst" are: evenly."""

A, B, F, SIM, DEC = "factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg", "simfed", "feddecomp"
RANDOM, SVD = {"init": "random"}, {"init": "svd"}
MATCH = {"match": True}
CORE = {
    "stand-alone": ("stand-alone", {}),
    "fedavg": ("fedavg", {}),
    A: (A, MATCH | RANDOM),
    B: (B, MATCH | RANDOM),
    F: (F, RANDOM),
    f"{F}, no mu": (F, RANDOM | {"sparse": False}),
    f"{F}, kernel layout": (F, RANDOM | {"layout": "kernel"}),
    f"{B}, random matching": (B, MATCH | RANDOM | {"matching": "random"}),
    f"{B}, worst matching": (B, MATCH | RANDOM | {"matching": "worst"}),
    DEC: (DEC, {}),
    f"{DEC}, simultaneous": (DEC, {"training": "simultaneous"}),
    f"{DEC}, reverse": (DEC, {"shared": "low-rank"}),
    "fedfac-static": ("fedfac-static", {}),
    "fedfac-dynamic": ("fedfac-dynamic", {}),
    "fedsplit-random": ("fedsplit-random", {}),
    SIM: (SIM, RANDOM),
    f"{SIM}, no factorization": (SIM, {"factorized": False}),
}
START = {
    f"{A}, svd": (A, MATCH | SVD),
    f"{B}, svd": (B, MATCH | SVD),
    f"{F}, svd": (F, SVD),
    f"{B}, svd, best three": (B, SVD | BEST3),
    f"{B}, svd, random matching": (B, SVD | {"matching": "random"}),
    f"{B}, svd, worst matching": (B, SVD | {"matching": "worst"}),
    f"{SIM}, svd": (SIM, SVD),
}
ABLATIONS = {
    f"{A}, svd, l1 0": (A, MATCH | SVD | {"l1": 0.0}),
    f"{A}, l1 0": (A, MATCH | RANDOM | {"l1": 0.0}),
    f"{A}, nothing mixed": (A, RANDOM | {"tau": 1.0}),
    f"{B}, best three": (B, RANDOM | BEST3),
}
OTHERS = {
    name: (name, {})
    for name in (
        "pfedpara",
        "fedfomo",
        "clustered-fl",
        "per-fedavg",
        "fedprox",
        "lg-fedavg",
        "fedrep",
        "fedamp",
        "fedrod",
        "pfedsd",
        "fedcac",
        "fedpara",
        "agnostic-fl",
        "fedper",
        "fedbn",
        "pfedgate",
        "fedem",
    )
}
OWN = {"fedfac-static, random": ("fedfac-static", {"random": True})}
DIRICHLET = replace(BASE, scenario="client-dirichlet", alpha=0.1, epochs=5, cohort="20")
"""FedDecomp's own setting: class shares by Dirichlet(.1), labels unpermuted, five epochs a round, two low-rank."""
DECOMP = {
    DEC: (DEC, {"lora_epochs": 2}),
    f"{DEC}, simultaneous": (DEC, {"training": "simultaneous"}),
    f"{DEC}, reverse": (DEC, {"shared": "low-rank", "lora_epochs": 2}),
    "fedavg": ("fedavg", {}),
    "stand-alone": ("stand-alone", {}),
}
AFTER = {f"{B}, svd, l1 0": (B, MATCH | SVD | {"l1": 0.0}), f"{F}, svd, l1 0": (F, SVD | {"l1": 0.0})}
LONG = ("stand-alone", "fedavg", f"{A}, svd, l1 0", f"{B}, svd, l1 0", f"{F}, svd, l1 0")
LONG_L1 = (f"{A}, svd", f"{B}, svd", f"{F}, svd")
"""40 rounds, about 400 local steps, seed 0: `LONG` in all scenarios, `LONG_L1` with the default λ in permuted IID."""
NAMES = CORE | START | ABLATIONS | OTHERS | OWN | AFTER


def cell(name: str, scenario: str, seed: int) -> tuple[Config, str]:
    """The configuration, and the place in the results' directory; scenario "…, long" has 40 rounds."""
    where, base = f"{scenario}/{name}-seed{seed}".replace(", ", "+").replace(" ", "-"), BASE
    if scenario == "client-dirichlet":
        base, (method, settings) = DIRICHLET, DECOMP[name]
    else:
        method, settings = NAMES[name]
        scenario, _, long = scenario.partition(", ")
        base = replace(base, scenario=scenario, rounds=40 if long else base.rounds)
    settings = dict(settings)
    if settings.pop("match", False):
        settings = (DOMAINS if scenario == "domains" else LABELS) | settings
    # Clients of different sizes gain nothing by a step together.
    base = replace(base, cohort="1") if "non-iid" in scenario else base
    return replace(base, method=method, seed=seed, settings={method: settings} if settings else {}), where


def cells() -> list[tuple[str, str, int]]:
    """(name, scenario, seed) of all, the most important first."""
    main = ("stand-alone", "fedavg", A, f"{A}, svd", B, f"{B}, svd", F, f"{F}, svd", f"{F}, no mu")
    standard = [(n, s) for n in ("stand-alone", "fedavg", A, B, f"{A}, svd", f"{B}, svd") for s in STANDARD]
    order = [(n, s, 0) for n in CORE | START | ABLATIONS | OTHERS for s in SCENARIOS]
    order += [(n, s, 0) for n, s in standard]
    order += [(n, s, 1) for n in main for s in SCENARIOS]
    order += [(n, "client-dirichlet", 0) for n in DECOMP]
    order += [(n, f"{s}, long", 0) for s in SCENARIOS for n in LONG]
    order += [(n, "permuted-iid, long", 0) for n in LONG_L1]
    order += [(n, s, 2) for n in main for s in SCENARIOS]
    order += [(n, s, seed) for seed in range(3) for n in OWN for s in SCENARIOS]
    order += [(n, "client-dirichlet", seed) for seed in (1, 2) for n in DECOMP]
    order += [(n, s, seed) for n in CORE | START for seed in (1, 2) for s in SCENARIOS]
    order += [(n, s, seed) for n, s in standard for seed in (1, 2)]
    order += [(n, s, seed) for n in ABLATIONS | OTHERS for seed in (1, 2) for s in SCENARIOS]
    return list(dict.fromkeys(order))


def run(directory: Path, part: int, parts: int) -> None:
    todo = [cell(*one) for one in cells()[part::parts]]
    waiting = [(config, directory / where) for config, where in todo if not finished(config, directory / where)]
    configs, about, began = {path: config for config, path in waiting}, provenance(), time.time()

    def event(path: Path, kind: str, first, second) -> None:
        if kind == "done":
            files.write_json(path / PROVENANCE, about, indent=1)
            recalibrated(path, configs[path])
            accuracy = 100 * first["summary"]["accuracy"]
            print(f"{time.time() - began:7.0f} s  {path.parent.name}/{path.name}  {accuracy:.1f} %", flush=True)
        elif kind == "failed":
            print(f"failed: {path.parent.name}/{path.name}: {first}", flush=True)

    if run_cells(waiting, 1, event):
        sys.exit(1)


def recalibrated(directory: Path, config: Config) -> float | None:
    """The mean accuracy of the final models with the batch-norm statistics of each client's training samples, as
    `Strategy.recalibrate` has it, kept in the cell. None for Per-FedAvg, which adapts its models before evaluation.
    """
    if config.method == "per-fedavg":
        return None
    if (directory / RECALIBRATED).is_file():
        return json.loads((directory / RECALIBRATED).read_text())
    parts = build.parts(config)
    fed = Federation.load(directory, parts.model, parts.clients, parts.method, parts.augment)
    accuracies = []
    for client, model in zip(fed.clients, fed.models, strict=True):
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        with torch.no_grad():
            model.train()(client.train[0])
            accuracies.append((model.eval()(client.test[0]).argmax(1) == client.test[1]).double().mean().item())
    mean = statistics.mean(accuracies)
    files.write(directory / RECALIBRATED, json.dumps(mean))
    return mean


def similarity(directory: Path) -> dict | None:
    """Cosine of u and v of the layer before the classifier, within and between the five domains of four clients."""
    if not (directory / report.SIMILARITY).is_file() or directory.parent.name != "domains":
        return None
    domain = torch.arange(20) // 4
    same, own = domain[:, None] == domain, torch.eye(20, dtype=torch.bool)
    found = {}
    for name, cosine in load_file(directory / report.SIMILARITY).items():
        nearest = cosine.masked_fill(own, -2).argmax(1)
        found[name] = {
            "within": cosine[same & ~own].mean().item(),
            "between": cosine[~same].mean().item(),
            "nearest_in_domain": (domain[nearest] == domain).double().mean().item(),
        }
    return found


def summary(values: list[float]) -> dict:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "std": spread, "seeds": len(values)}


def write(directory: Path) -> None:
    """bench/results/claims.json and the table in docs/claims.md.

    A cell says the commit it was trained with: bit for bit the present one's result, except that a factorized layer's
    kernels may add up in another order, after which two runs differ by about as much as two seeds.
    """
    rows, abouts = [], {}
    for name, scenario, seed in cells():
        config, where = cell(name, scenario, seed)
        if not finished(config, directory / where):
            continue
        result = report.read_cell(directory / where).result["summary"]
        about = json.loads((directory / where / PROVENANCE).read_text())
        abouts.setdefault(about["commit"], about | {"cells": 0})["cells"] += 1
        row = {"name": name, "scenario": scenario, "seed": seed, "method": config.method}
        row |= {"settings": config.settings.get(config.method, {})}
        row |= {key: result[key] for key in ("accuracy", "accuracy_before", "density", "uplink", "downlink")}
        row["recalibrated"] = recalibrated(directory / where, config)
        rows.append(row | {"similarity": similarity(directory / where), "commit": about["commit"]})
    table = {}
    for row in rows:
        at = table.setdefault(row["name"], {}).setdefault(row["scenario"], {"accuracy": [], "recalibrated": []})
        for key, values in at.items():
            values += [row[key]] if row[key] is not None else []
    table = {
        name: {s: {key: summary(v) for key, v in at.items() if v} for s, at in by.items()} for name, by in table.items()
    }
    content = {"command": "python bench/claims.py run DIR; python bench/claims.py write DIR"}
    content |= {"trained": list(abouts.values()), "base": asdict(BASE), "table": table, "cells": rows}
    files.write_json(ROOT / "bench" / "results" / "claims.json", content, indent=1, ensure_ascii=False)
    page = ROOT / "docs" / "claims.md"
    before, after = page.read_text().split(BEGIN)[0], page.read_text().split(END)[1]
    files.write(page, before + BEGIN + "\n" + markdown(table) + END + after)


def markdown(table: dict) -> str:
    lines = ["| | " + " | ".join(SCENARIOS) + " |", "|---" * (len(SCENARIOS) + 1) + "|"]

    def number(found: dict) -> str:
        spread = "" if found["std"] is None else f" ± {100 * found['std']:.1f}"
        return f"{100 * found['mean']:.1f}{spread}"

    for name, by in table.items():
        if not set(SCENARIOS) & set(by):
            continue
        texts = []
        for scenario in SCENARIOS:
            at = by.get(scenario)
            if at is None:
                texts.append("–")
                continue
            few = "" if at["accuracy"]["seeds"] == 3 else f" ({at['accuracy']['seeds']})"
            texts.append(" / ".join(number(at[key]) for key in ("accuracy", "recalibrated") if key in at) + few)
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "write"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part", default="1/1", help="i/n: every n-th cell from the i-th, for n processes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "write":
        return write(options.directory)
    part, parts = map(int, options.part.split("/"))
    run(options.directory, part - 1, parts)


if __name__ == "__main__":
    main()
