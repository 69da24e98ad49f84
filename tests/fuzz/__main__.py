"""python -m tests.fuzz TARGET [--minutes N] [--seed S]: inputs until the time is over; the first failure ends it."""

import argparse
import importlib
import pkgutil
import time

import tests.fuzz

NAMES = [module.name for module in pkgutil.iter_modules(tests.fuzz.__path__)]
TARGETS = sorted(name for name in NAMES if not name.startswith(("_", "test_")))

parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
parser.add_argument("target", choices=TARGETS)
parser.add_argument("--minutes", type=float, default=1.0)
parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
arguments = parser.parse_args()
seed = time.time_ns() % 2**32 if arguments.seed is None else arguments.seed
print(f"{arguments.target}: seed {seed}", flush=True)
tried = importlib.import_module(f"tests.fuzz.{arguments.target}").run(60 * arguments.minutes, seed)
print(f"{arguments.target}: {tried} inputs, none failed")
