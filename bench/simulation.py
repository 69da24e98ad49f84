"""FedFac's simulation (§4.3): how well each way to split the hidden units does, and whether the split is found.

`python bench/simulation.py FILE [--clients 100 --rounds 20 --seeds 3]` runs the settings of Figures 6 and 7 and writes
FILE as JSON: test accuracy of the five decompositions, the share of units that dynamic FedFac leaves in their state
from round to round, and how much of the true split factor analysis finds in the true parameters (the oracle).
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

import fastfact as ff
from fastfact import data, experiment, models
from fastfact.federation.store import write_text
from fastfact.methods.fedfac import SPLIT, communalities, shared_mask

SETTINGS = [(0.25, 0.4), (0.5, 0.4), (0.75, 0.4), (0.5, 0.2), (0.5, 0.6)]
"""(p, α): Figure 6 varies p at α = .4 and α at p = .5; its values are in the picture only."""
LAYER = "fc1"


def oracle(made: data.Simulation, kappa: float) -> torch.Tensor:
    """The split of the true parameters by factor analysis, as many shared units as there are."""
    columns = made.weight.permute(0, 2, 1).flatten(0, 1)
    share = made.shared.double().mean().item()
    return shared_mask(communalities(columns, kappa), 1 - share)


def agreement(found: torch.Tensor, true: torch.Tensor) -> float:
    """The share of units that are on the right side."""
    return (found == true).double().mean().item()


def method(name: str, made: data.Simulation, split: torch.Tensor, kappa: float):
    tau = 1 - made.shared.double().mean().item()
    given = {"true": made.shared, "oracle": split}
    if name in given:
        return ff.methods.FedSplit(shared_channels={LAYER: given[name].nonzero().flatten().tolist()})
    if name == "random":
        return ff.methods.RandomSplit(tau=tau)
    kind = ff.methods.FedFacStatic if name == "static" else ff.methods.FedFacDynamic
    return kind(tau=tau, kappa=kappa)


def run(p: float, alpha: float, seed: int, options: argparse.Namespace) -> dict:
    made = data.fedfac_simulation(
        options.clients, seed, shared_units=p, shared_features=alpha, samples=options.samples, balanced=options.balanced
    )
    clients = [ff.Client(train=c.train, test=c.test) for c in made.clients]
    split = oracle(made, options.kappa)
    row = {"p": p, "alpha": alpha, "seed": seed, "oracle_agreement": agreement(split, made.shared), "accuracy": {}}
    row["majority"] = statistics.mean(max(m := c.test[1].double().mean().item(), 1 - m) for c in made.clients)
    for name in ("true", "oracle", "static", "dynamic", "random"):
        fed = ff.Federation(
            partial(models.build, "mlp1", [100], 2),
            clients,
            method(name, made, split, options.kappa),
            epochs=options.epochs,
            batch_size=32,
            lr=options.lr,
            momentum=0.9,
            seed=seed,
            cohort=options.clients,
        )
        masks = []
        for _ in range(options.rounds):
            fed.fit(1)
            masks += [mask.clone() for key, mask in fed.memory.items() if key.startswith(SPLIT)]
        rounds = [fed.history.of(r) for r in range(1, options.rounds + 1)]
        row["accuracy"][name] = [statistics.mean(r["accuracy"] for r in rows) for rows in rounds]
        if name == "dynamic":
            row["unchanged"] = [agreement(a, b) for a, b in pairwise(masks)]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for name, kind, default in (
        ("clients", int, 100),
        ("rounds", int, 20),
        ("seeds", int, 3),
        ("epochs", int, 2),
        ("samples", int, 200),
        ("lr", float, 0.02),
        ("kappa", float, 0.85),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--balanced", action="store_true", help="labels half and half, see data.fedfac_simulation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, began = [], time.time()
    for seed in range(options.seeds):
        for p, alpha in SETTINGS:
            rows.append(run(p, alpha, seed, options))
            last = {name: round(100 * curve[-1], 1) for name, curve in rows[-1]["accuracy"].items()}
            stable = rows[-1]["unchanged"][-1] if rows[-1]["unchanged"] else None
            print(
                f"{time.time() - began:6.0f} s", p, alpha, seed, last, stable, rows[-1]["oracle_agreement"], flush=True
            )
            content = {"command": shlex.join(["python", *sys.argv]), "settings": vars(options) | {"file": None}}
            content |= {"rows": rows} | experiment.provenance()
            options.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.file, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
