"""Which compute path each layer of a model takes, and how long each of its paths takes on this machine."""

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastfact import models
from fastfact.bench import networks
from fastfact.experiment import traffic
from fastfact.federation import Federation
from fastfact.nn.choice import PATHS
from fastfact.nn.convert import factorize, factorized_layers
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.specs import Rank1
from fastfact.ops.common import is_channels_last

STEPS = ("forward", "training")


class Subject(NamedTuple):
    """A model, one input of it, and how many of these are a batch where nobody says."""

    model: nn.Module
    sample: Tensor
    batch: int = 64


def plan(model: nn.Module, x: Tensor, batch: int) -> list[dict[str, Any]]:
    """A row for each factorized layer of `model` and step ("forward": evaluation, "training"), in their order.

    x: an input of any batch size; the plan is for `batch` copies of its first sample. Each row has layer, shape of W,
    density of μ, input [batch, …], step, the path that the layer takes, and the milliseconds of the dense layer and of
    each path, as they are measured now on the layer's own input; None for a path that it cannot take.
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
    return row | {side: 1e3 * seconds[side] if side in seconds else None for side in ("dense", *PATHS)}


def _sides(rows: list[dict[str, Any]]) -> list[str]:
    """The dense layer, and the paths that any layer has."""
    return [side for side in ("dense", *PATHS) if any(row[side] is not None for row in rows)]


def density(rows: list[dict[str, Any]]) -> float | None:
    """The density of all layers, None where they have several."""
    found = {round(row["density"], 2) for row in rows}
    return found.pop() if len(found) == 1 else None


def shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `plan` for people: two lines a layer, with its name, W and input in one column, and the path that it
    takes marked."""
    alike = density(rows) is not None
    found = []
    for name, row in itertools.groupby(rows, key=lambda row: row["layer"]):
        own = list(row)
        what = own[0]["weight"] + ("" if alike else f" {100 * own[0]['density']:.2g} %") + f" of {own[0]['input']}"
        for line, one in zip((name, what), own, strict=True):
            marked = {side: _time(one[side], side == one["path"]) for side in _sides(rows)}
            found.append({"layer": line, "step": one["step"]} | marked)
    return found


def _time(milliseconds: float | None, taken: bool) -> str:
    return "" if milliseconds is None else f"{milliseconds:.3g}" + ("*" if taken else " ")


def subject(name: str, density: float | None, shape: str | None) -> Subject:
    """What to plan for: a network of `fastfact.models` or of torchvision with `Rank1` layers, for samples of `shape`
    (by default "3x32x32", "80" tokens for those that read text, "3x224x224" for those of torchvision, which are in
    channels_last), or the first client of a run directory. Its μ is made compact.

    density: of μ, drawn at random for a network (by default 0.1), 0 for one without μ; the largest magnitudes for a
    run (by default all nonzeros). Raises ValueError for what is neither, for a run without factorized layers, and
    for a bad density or shape.
    """
    if density is not None and not 0 <= density <= 1:
        raise ValueError(f"density={density}: must be between 0 and 1")
    batch = 64
    if name in models.MODELS or networks.of_torchvision(name):
        own = name in models.MODELS
        usual = traffic.shape_of(name, None) if own else (3, 224, 224)
        sample = _sample(shape or "x".join(map(str, usual)))
        density = 0.1 if density is None else density
        if own:
            network = traffic.Network(name, 1.0, tuple(sample.shape[1:]), 10)
            model = factorize(network.builder()(), Rank1(sparse=density > 0))
            sample = sample if network.vocabulary is None else sample.long()
        else:
            if sample.shape != (1, 3, sample.shape[-1], sample.shape[-1]):
                raise ValueError(f"input={shape!r}: must be the shape of a square image, as 3x224x224")
            model = factorize(networks.network(name, sample.shape[-1]), networks.specs(name, density > 0))
            model, sample = (it.to(memory_format=torch.channels_last) for it in (model, sample))
            batch = networks.about(name).batch
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
        raise ValueError(
            f"plan={name!r}: must be a run directory, a network of torchvision or one of {', '.join(models.MODELS)}"
        )
    if not factorized_layers(model):
        raise ValueError(f"plan={name!r}: the run's model has no factorized layer, there is nothing to choose")
    for layer in factorized_layers(model).values():
        if "mu" in layer.factors():
            layer.compact(density)
    return Subject(model, sample, batch)


def _sample(shape: str) -> Tensor:
    try:
        return torch.zeros(1, *(int(extent) for extent in shape.split("x")))
    except (ValueError, RuntimeError):
        raise ValueError(f"input={shape!r}: must be the shape of a sample, as 3x32x32") from None


def totals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each step: the sums over the layers of the dense ones, the paths taken, the fastest of each, and
    each path, W made where a layer does not have it."""
    found = []
    for step in STEPS:
        own = [row for row in rows if row["step"] == step and row["reconstruct"] is not None]
        row = {"step": step, "layers": len(own), "dense": math.fsum(row["dense"] for row in own)}
        row["as planned"] = math.fsum(row[row["path"]] for row in own)
        row["fastest"] = math.fsum(min(row[path] for path in PATHS if row[path] is not None) for row in own)
        for path in PATHS:
            if any(row[path] is not None for row in own):
                row[path] = math.fsum(row["reconstruct" if row[path] is None else path] for row in own)
        found.append(row)
    return found
