"""Which compute path each layer of a model takes, and how long each of its paths takes on this machine."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastfact import models
from fastfact.federation import Federation
from fastfact.nn.convert import factorize, factorized_layers
from fastfact.nn.layers import FactorizedLayer
from fastfact.nn.specs import Rank1
from fastfact.ops.common import is_channels_last

STEPS = ("forward", "training")


def plan(model: nn.Module, x: Tensor, batch: int) -> list[dict[str, Any]]:
    """A row for each factorized layer of `model` and step ("forward": evaluation, "training"), in their order.

    x: an input of any batch size; the plan is for `batch` copies of its first sample. Each row has layer, shape of W,
    density of μ, input [batch, …], step, the path that the layer takes, and the milliseconds of each of its paths, as
    they are measured now on the layer's own input; None for one that it cannot take, or where there is one only.
    """
    layers, rows = factorized_layers(model), dict[FactorizedLayer, list[dict[str, Any]]]()

    def note(layer: FactorizedLayer, inputs: tuple[Tensor]) -> None:
        if layer not in rows:
            rows[layer] = []  # the layer is called in what follows
            own = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
            rows[layer] = [_row(names[layer], layer, own, step) for step in STEPS]

    names = {layer: path for path, layer in layers.items()}
    handles = [layer.register_forward_pre_hook(note) for layer in layers.values()]
    training = model.training
    try:
        with torch.enable_grad():  # an input that wants a gradient costs more in training
            model.eval()(x[:1].expand(batch, *x.shape[1:]).contiguous(memory_format=_format(x)))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return [row for layer in layers.values() for row in rows.get(layer, ())]


def _format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def _row(path: str, layer: FactorizedLayer, x: Tensor, step: str) -> dict[str, Any]:
    row = {"layer": path, "weight": "×".join(map(str, layer.size)), "density": round(layer.density, 4)}
    seconds, chosen = layer.times(x, step == "training")
    row |= {"input": "×".join(map(str, x.shape)), "step": step, "path": chosen}
    return row | {path: 1e3 * seconds[path] if path in seconds else None for path in ("reconstruct", "factored")}


def subject(name: str, density: float | None, shape: str) -> tuple[nn.Module, Tensor]:
    """The model to plan for, and one input of it: a network of `fastfact.models` with `Rank1` layers, for samples of
    `shape` ("3x32x32"), or the first client of a run directory. Its μ is made compact.

    density: of μ, drawn at random for a network (by default 0.1), 0 for one without μ; the largest magnitudes for a
    run (by default all nonzeros). Raises ValueError for what is neither, for a run without factorized layers, and
    for a bad density or shape.
    """
    if density is not None and not 0 <= density <= 1:
        raise ValueError(f"density={density}: must be between 0 and 1")
    if name in models.MODELS:
        try:
            sample = torch.zeros(1, *(int(extent) for extent in shape.split("x")))
        except (ValueError, RuntimeError):
            raise ValueError(f"input={shape!r}: must be the shape of a sample, as 3x32x32") from None
        density = 0.1 if density is None else density
        model = factorize(models.build(name, tuple(sample.shape[1:]), 10), Rank1(sparse=density > 0))
        for layer in factorized_layers(model).values() if density else ():
            nn.init.normal_(layer.mu)
    elif Path(name).is_dir():
        fed = Federation.load(name)
        extents, dtype = fed.identity["sample"]
        model, sample = fed.models[0], torch.zeros(1, *extents, dtype=getattr(torch, dtype))
        # The clients at rest are in the form that trains fastest on the CPU.
        if any(p.dim() == 4 and not p.is_contiguous() for p in model.parameters()):
            sample = sample.contiguous(memory_format=torch.channels_last)
    else:
        raise ValueError(f"plan={name!r}: must be a run directory or one of {', '.join(models.MODELS)}")
    if not factorized_layers(model):
        raise ValueError(f"plan={name!r}: the run's model has no factorized layer, there is nothing to choose")
    for layer in factorized_layers(model).values():
        if "mu" in layer.factors():
            layer.compact(density)
    return model, sample


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each step: the sum over the layers on the paths taken, and if all of them made their weights."""
    found = []
    for step in STEPS:
        own = [row for row in rows if row["step"] == step and row["reconstruct"] and row["factored"]]
        found.append({"step": step, "layers": len(own), "as planned": math.fsum(row[row["path"]] for row in own)})
        found[-1] |= {f"all {path}": math.fsum(row[path] for row in own) for path in ("reconstruct", "factored")}
    return found
