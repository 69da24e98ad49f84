"""The settings of a federation: their ranges, and how a configuration file names functions."""

import functools
import json
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fastfact.base.settings import check_federation
from fastfact.nn.schedule import Schedule

BEFORE = "_before"
"""After the name of a metric: what it was after the download, before the training of the round."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, naming it, for a setting of `Federation` out of range."""
    check_federation(settings)
    names = list(settings.get("metrics", ()))
    if any(name.endswith(BEFORE) for name in names):
        raise ValueError(
            f"Federation(metrics={names!r}): no name may end in {BEFORE}, by which rows have what a metric was before"
            " the training of the round"
        )
    sparse = settings.get("sparsity")
    if not isinstance(sparse, dict | None):
        raise ValueError(f"Federation(sparsity={sparse!r}): must be an ff.Schedule, or None")
    if sparse is not None:
        Schedule(**sparse)


BUILDERS = ("fastfact.models", "fastfact.data.augment")
"""The modules of the package whose functions a configuration file may name."""


def name_of(function) -> str | None:
    """ "module:qualname" of a function, None for None."""
    if function is None:
        return None
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__qualname__)}"


def record(factory) -> dict[str, Any]:
    """How config.json names a model factory: a function, or a functools.partial of one with arguments JSON can hold."""
    record: dict[str, Any] = {}
    if isinstance(factory, functools.partial):
        record = {"args": list(factory.args), "kwargs": dict(factory.keywords)}
        try:
            record = json.loads(json.dumps(record))
        except (TypeError, ValueError):
            record = {"args": None}
        factory = factory.func
    return {"factory": name_of(factory)} | record


def resolve(record: Mapping[str, Any]) -> Callable | None:
    """The function or model class a record names, or None.

    A file can be anybody's: nothing is imported for it, and only a function or a class under its own name is taken. Of
    this package that is a builder of `fastfact.models` or an augmentation of `fastfact.data`; of the standard library
    and what is installed (PyTorch, …) a model class, never a function; other functions are the user's own. Arguments
    only go to model classes and to the builders of `fastfact.models`.
    """
    module, _, qualname = str(record.get("factory")).partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    is_model = isinstance(found, type) and issubclass(found, nn.Module)
    if not (is_model or isinstance(found, types.FunctionType)) or name_of(found) != record["factory"]:
        return None
    if not (is_model or module in BUILDERS) and _is_installed(module):
        return None
    if "args" not in record:
        return found
    if record["args"] is None or not (is_model or module == "fastfact.models"):
        return None
    return functools.partial(found, *record["args"], **record["kwargs"])


def _is_installed(module: str) -> bool:
    """Whether a module is of this package, of the standard library or of a library installed beside PyTorch."""
    top = module.partition(".")[0]
    if top == __package__.partition(".")[0] or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(Path(nn.__file__).resolve().parents[2])


def taking_part(k: int, participation: float) -> int:
    """How many of k clients take part in a round."""
    return min(k, max(1, round_half_up(participation * k)))


def round_half_up(x: float) -> int:
    return math.floor(x + 0.5)
