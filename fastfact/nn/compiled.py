"""Layers under torch.compile in evaluation: each is one op, `torch.ops.fastfact_nn.layer`, which is the layer outside.

So W is made once and kept, and the path is the one that was measured, where a graph can do neither. The op is told what
the layer is in a string, the same in every process and for all layers that are alike, so that graphs are shared and
cached, and which one by its factors: a layer of its own that has them is kept for as long as the first of them lives.
"""

import functools
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastfact.nn.specs import Spec
from fastfact.ops import direct
from fastfact.ops.common import is_channels_last

_library = torch.library.Library("fastfact_nn", "DEF")
_kinds: dict[str, Callable[..., Any]] = {}
_layers: dict[tuple[str, int], tuple[weakref.ref, list[Tensor], Any]] = {}


def kind(name: str, make: Callable[..., Any]) -> None:
    """Declare that make(**settings, spec=Spec) is a layer of this kind."""
    _kinds[name] = make


def describe(name: str, spec: Spec, path: str, channels_last: bool, **settings: Any) -> str:
    """What a layer is, but for its factors."""
    return json.dumps([name, spec.to_dict(), path, channels_last, settings])


@functools.lru_cache(512)
def _like(how: str) -> Any:
    """A layer without numbers that is what `describe` said."""
    name, spec, path, channels_last, settings = json.loads(how)
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    with _disable_current_modes():
        layer = _kinds[name](**settings, spec=Spec.from_dict(spec), device="meta").eval()
    layer.path, layer.channels_last = path, channels_last
    return layer


def _layer(how: str, factors: Sequence[Tensor], bias: Tensor | None) -> Any:
    """The layer with these tensors."""
    first, given = factors[0], factors if bias is None else [*factors, bias]
    of, held, layer = _layers.get((how, id(first)), (None, (), None))
    same = of is not None and of() is first and len(held) == len(given)
    if not same or not all(map(Tensor.is_set_to, held, given)):
        layer = _like(how).holding(factors, bias)
        key = how, id(first)
        # What shares the memory, not the tensors themselves, which would live on.
        _layers[key] = weakref.ref(first, lambda _: _layers.pop(key, None)), [t.detach() for t in given], layer
    return layer


def forget(factors: Iterable[Tensor | None]) -> None:
    """Keep no layer whose first factor is one of these."""
    forgotten = set(map(id, factors))
    for key in [key for key in _layers if key[1] in forgotten]:
        del _layers[key]


def _forward(how: str, x: Tensor, factors: list[Tensor], bias: Tensor | None) -> Tensor:
    if torch.is_grad_enabled():
        with torch.no_grad():
            return _forward(how, x, factors, bias)
    layer = _layer(how, factors, bias)
    return layer(x).contiguous(memory_format=_format(layer, x))


def _format(layer: Any, x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and (layer.channels_last or is_channels_last(x))
    return torch.channels_last if last else torch.contiguous_format


def _fake(how: str, x: Tensor, factors: list[Tensor], bias: Tensor | None) -> Tensor:
    layer = _like(how)
    if len(layer.size) == 2:
        return x.new_empty(*x.shape[:-1], layer.size[0])
    y = F.conv2d(x, x.new_empty(layer.size), None, layer.stride, layer.padding, layer.dilation, layer.groups)
    return torch.empty_like(y, memory_format=_format(layer, x))


_library.define(
    "layer(str how, Tensor x, Tensor[] factors, Tensor? bias) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
)
if not direct.serve_graphs(_layers, _forward):
    _library.impl("layer", _forward, "CPU")
_library.impl("layer", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("fastfact_nn::layer", _fake, lib=_library)
