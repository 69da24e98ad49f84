"""What of a model is each client's own, and what each tensor is for: what strategies decide by."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastfact.base import files
from fastfact.federation.state import as_bytes

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Normalisation layers."""


@dataclass(frozen=True)
class TensorInfo:
    """What one tensor of the model is: strategies decide by it what is shared, trained and compared.

    role: the name within its module ("u", "v", "mu", "sigma", "A", "B", "weight", "bias", "running_mean", …).
    layer: 1 … `layers` counts the layers that have a weight, in the order in which the model registers them; a tensor
    of another module belongs to the weight layer before it (0 if there is none). classifier: in the last one (L).
    norm: in a normalisation layer; statistic: a buffer of one (running mean, variance, count).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    layer: int
    layers: int
    classifier: bool = False
    norm: bool = False
    statistic: bool = False
    buffer: bool = False

    @property
    def numel(self) -> int:
        """How many numbers one client has of it."""
        return torch.Size(self.shape).numel()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What of `model` is each client's own, by name: parameters that ask for a gradient, and the buffers of its state;
    a tied one once. The rest, as σ under adapters, stays with the model, which all clients share: it is in no state,
    in no store and on no wire."""
    passing = set()
    for path, module in model.named_modules():
        passing |= {f"{path}.{name}" if path else name for name in module._non_persistent_buffers_set}
    own = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return own | {name: buffer for name, buffer in model.named_buffers() if name not in passing}


def frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model` that all clients share, by name."""
    return {name: param for name, param in model.named_parameters() if not param.requires_grad}


def frozen_digest(model: nn.Module) -> str | None:
    """Of the numbers of the frozen parameters; None where there are none."""
    shared = frozen(model)
    hasher = files.hasher()
    for name, param in shared.items():
        hasher.update(f"{name} {param.dtype} {list(param.shape)} ".encode())
        hasher.update(as_bytes(param.detach().cpu().contiguous()).numpy())
    return hasher.hexdigest() if shared else None


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of `model` with the same frozen parameters, whose memory is not taken again."""
    return copy.deepcopy(model, {id(param): param for param in frozen(model).values()})


def describe(model: nn.Module, classifier: str | None = None) -> dict[str, TensorInfo]:
    """name → TensorInfo of what is each client's own, in the order of `tensors_of`.

    A layer has a weight if it owns a parameter of two or more dimensions and is no normalisation. `classifier` is the
    path of the module that is the classifier if it is not the last such layer (the last part of its path will do, of
    several the last). Raises ValueError for a path that is not a weight layer.
    """
    where = {}
    paths: list[str] = []
    for path, module in model.named_modules():
        owned = list(module._parameters.values())
        if not isinstance(module, NORMS) and any(p is not None and p.dim() >= 2 for p in owned):
            paths.append(path)
        where[path] = (len(paths), isinstance(module, NORMS))
    if classifier is not None and classifier not in paths:
        classifier = next((path for path in reversed(paths) if path.endswith(f".{classifier}")), classifier)
    last = paths[-1] if paths and classifier is None else classifier
    if classifier is not None and classifier not in paths:
        raise ValueError(
            f"classifier={classifier!r}: not a layer with a weight; those are {', '.join(paths) or 'none'}"
        )
    if classifier is not None:
        # The classifier is layer L wherever it is registered; the layers after it move up by one.
        at = paths.index(classifier) + 1
        move = {n: n - (n > at) for n in range(len(paths) + 1)} | {at: len(paths)}
        where = {path: (move[layer], norm) for path, (layer, norm) in where.items()}
    buffers = dict(model.named_buffers())
    infos = {}
    for name, tensor in tensors_of(model).items():
        path, _, role = name.rpartition(".")
        layer, norm = where[path]
        infos[name] = TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            role=role,
            layer=layer,
            layers=len(paths),
            classifier=bool(paths) and path == last,
            norm=norm,
            statistic=norm and name in buffers,
            buffer=name in buffers,
        )
    return infos
