"""Which compute path each layer of a model takes, and how long the cost model of this machine says it takes."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastfact import models
from fastfact.federation import Federation
from fastfact.nn import choice
from fastfact.nn.convert import factorize, factorized_layers
from fastfact.nn.layers import FactorizedLayer
from fastfact.nn.specs import Rank1

STEPS = ("forward", "training")


@torch.no_grad()
def plan(model: nn.Module, x: Tensor, batch: int) -> list[dict[str, Any]]:
    """A row for each factorized layer of `model` and step ("forward", "training"), in the order of the layers.

    x: an input of any batch size, for the shapes; batch: the one to plan for. Each row has layer, shape of W, density
    of μ, input [batch, …], step, path, and the predicted milliseconds of a path, None for one the layer cannot take.
    """
    layers, shapes = factorized_layers(model), {}

    def note(layer: FactorizedLayer, inputs: tuple[Tensor]) -> None:
        shapes[layer] = (batch, *inputs[0].shape[1:]), inputs[0]

    handles = [layer.register_forward_pre_hook(note) for layer in layers.values()]
    training = model.training
    try:
        with torch.enable_grad():  # an input that wants a gradient costs more in training
            model.eval()(x)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    met = {path: layer for path, layer in layers.items() if layer in shapes}
    return [_row(path, layer, *shapes[layer], step) for path, layer in met.items() for step in STEPS]


def _row(path: str, layer: FactorizedLayer, shape: tuple[int, ...], x: Tensor, step: str) -> dict[str, Any]:
    row = {"layer": path, "weight": "×".join(map(str, layer.size)), "density": round(layer.density, 4)}
    row |= {"input": "×".join(map(str, shape)), "step": step}
    if not layer.can_factor:
        return row | {"path": "reconstruct", "reconstruct": None, "factored": None}
    work = layer.work(shape, x, step == "training")
    path = layer.path if layer.path != "auto" else choice.PATHS[choice.factored(work)]
    return row | {"path": path} | {name: 1e3 * seconds for name, seconds in choice.seconds(work).items()}


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
        own = [row for row in rows if row["step"] == step and row["reconstruct"] is not None]
        taken = math.fsum(row[row["path"]] for row in own)
        found.append({"step": step, "layers": len(own), "as planned": taken})
        found[-1]["all reconstruct"] = math.fsum(row["reconstruct"] for row in own)
    return found
