"""What of a model is each client's own, and what each tensor is for: what strategies decide by."""

import copy
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastfact.base import files
from fastfact.federation.state import as_bytes

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""The normalisation layers of torch.nn."""
_NORM = re.compile(r"norm(?!al(?!i[sz]))")
"""Not the normal distribution."""


@dataclass(frozen=True)
class TensorInfo:
    """What one tensor of the model is: strategies decide by it what is shared, trained and compared.

    role: the name within its module ("u", "v", "mu", "sigma", "A", "B", "weight", "bias", "running_mean", …).
    layer: 1 … `layers` counts the layers that have a weight, in the order in which the model registers them; a tensor
    of another module belongs to the weight layer before it (0 if there is none). classifier: in the last one (L); so is
    a tensor that is tied to one of it, as an embedding may be. norm: in a normalisation layer; statistic: a buffer of
    one (running mean, variance, count). averages: whether there is a mean of it over clients, see `averages`.
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
    averages: bool = True

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
        # A copy: of memory that numpy has seen, layers would take no note of writes.
        hasher.update(as_bytes(param.detach().cpu().clone(memory_format=torch.contiguous_format)).numpy())
    return hasher.hexdigest() if shared else None


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of `model` with the same frozen parameters, whose memory is not taken again."""
    return copy.deepcopy(model, {id(param): param for param in frozen(model).values()})


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation layer: one of `NORMS`, or one that is written by hand (LlamaRMSNorm,
    FilterResponseNorm2d, …), which is told by a class name with "norm" in it and by its parameters. They are all its
    own, and none has more than one axis of several numbers; with two axes it is taken for that of a linear layer.
    """
    if isinstance(module, NORMS) or not _NORM.search(type(module).__name__.lower()):
        return isinstance(module, NORMS)
    params = dict(module.named_parameters())
    own = bool(params) and not any("." in name for name in params)
    return own and all(p.dim() != 2 and sum(size > 1 for size in p.shape) <= 1 for p in params.values())


def layer_of(path: str) -> str:
    """The path of the layer that a module is part of: of what parametrizes a tensor
    (`torch.nn.utils.parametrizations`), that of the layer which has the tensor."""
    before, found, _ = f".{path}.".partition(".parametrizations.")
    return before[1:] if found else path


def weight_layers(model: nn.Module) -> list[str]:
    """The paths of the layers that have a weight, in the order in which the model registers them: they own a parameter
    of two or more dimensions, or what parametrizes them does, and are no normalisation."""
    modules = dict(model.named_modules())
    weights = {
        layer_of(path) for path, module in modules.items() if any(p.dim() >= 2 for p in module.parameters(False))
    }
    return [path for path, module in modules.items() if path in weights and not is_norm(module)]


def classifier_of(model: nn.Module, classifier: str | None = None) -> str | None:
    """The path of the classifier, frozen or not: the last layer with a weight (None if there is none), or the one whose
    path is `classifier` (the last part of its path will do, of several the last). Raises ValueError for a path that is
    not a weight layer."""
    paths = weight_layers(model)
    if classifier is None:
        return paths[-1] if paths else None
    path = layer_of(classifier)
    found = [path] if path in paths else [other for other in paths if other.endswith(f".{path}")]
    if not found:
        raise ValueError(
            f"classifier={classifier!r}: not a layer with a weight; those are {', '.join(paths) or 'none'}"
        )
    return found[-1]


def describe(model: nn.Module, classifier: str | None = None) -> dict[str, TensorInfo]:
    """name → TensorInfo of what is each client's own, in the order of `tensors_of`.

    Layers are those of `weight_layers`, `classifier` is as in `classifier_of`. A tensor of several names is the
    classifier's if one of them is in it: an embedding that is tied to the classifier is shared, trained or kept with
    it. Raises ValueError for a path that is not a weight layer.
    """
    paths, last = weight_layers(model), classifier_of(model, classifier)
    # The classifier is layer L wherever it is registered; the layers after it move up by one.
    numbers = {path: n for n, path in enumerate([*(path for path in paths if path != last), last], 1)}
    where, number, head = {}, 0, set()
    for path, module in model.named_modules():
        number = numbers.get(path, number)
        where[path] = number, is_norm(module)
        if layer_of(path) == last:
            head |= {id(tensor) for tensor in [*module.parameters(False), *module.buffers(False)]}
    buffers = dict(model.named_buffers())
    infos = {}
    for name, tensor in tensors_of(model).items():
        path, _, role = name.rpartition(".")
        layer, norm = where[layer_of(path)]
        infos[name] = TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            role=role,
            layer=len(paths) if id(tensor) in head else layer,
            layers=len(paths),
            classifier=id(tensor) in head,
            norm=norm,
            statistic=norm and name in buffers,
            buffer=name in buffers,
            averages=name not in buffers or (norm or averages(tensor)),
        )
    return infos


def averages(buffer: Tensor) -> bool:
    """Whether there is a mean over clients of a buffer with such numbers: none of complex numbers, of a mask with −∞ or
    as good as that, nor of integers that are no float64. Each client keeps its own."""
    if buffer.is_complex() or buffer.is_meta:
        return not buffer.is_complex()
    if buffer.dtype == torch.bool:
        return True
    try:
        if not buffer.is_floating_point():
            return not buffer.numel() or -(2**53) <= int(buffer.min()) <= int(buffer.max()) <= 2**53
        return bool((buffer.abs() <= largest(buffer.dtype)).all())
    except NotImplementedError:  # of uint16, float8, …, with which PyTorch does not compute
        return False


def largest(dtype: torch.dtype) -> float:
    """The largest number whose square does not overflow; of half precision, which is narrow, any: a norm may well pass
    256 there."""
    most = torch.finfo(dtype).max
    return most if dtype == torch.float16 else math.sqrt(most)


def first_number(model: nn.Module) -> Tensor:
    """The first floating parameter of `model`: of its device and dtype are the samples that it takes."""
    return next(param for param in model.parameters() if param.is_floating_point())
