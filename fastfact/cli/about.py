"""What `fastfact info` tells of the package: versions, hardware, backends and all that has a name."""

from pathlib import Path
from typing import Any

from fastfact import data, methods, models
from fastfact.base.machine import commit, hardware, versions
from fastfact.experiment import probes, report
from fastfact.experiment.compare import Comparison
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.ops.backends import backends


def package() -> dict[str, dict[str, Any]]:
    """Part → name → what it is."""
    serving = {name: f"{'serves' if b.available else 'does not serve'}: {b.detail}" for name, b in backends().items()}
    return {
        "versions": {**versions(), "commit": commit()},
        "hardware": hardware(),
        "backends": serving,
        "data sets": {name: _summary(load) for name, load in data.DATASETS.items()},
        "scenarios": {name: scenario.summary for name, scenario in data.SCENARIOS.items()},
        "models": {name: model.summary for name, model in models.MODELS.items()},
        "methods": {name: _summary(STRATEGIES[name]) for name in methods.names()},
        "recorders": {name: recorder.summary for name, recorder in probes.RECORDERS.items()},
    }


def comparison(directory: Path) -> dict[str, Any]:
    """What a comparison compares, and how far it is."""
    of = Comparison.read(directory)
    cells = [directory / report.CELLS / name for name in of.cells()]
    done = sum((cell / report.RESULT).is_file() for cell in cells)
    return {"comparison of": ", ".join(of.methods), "seeds": of.seeds, "finished": f"{done} of {len(cells)} runs"}


def _summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())
