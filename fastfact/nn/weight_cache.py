"""The weight that a layer makes once in evaluation and keeps while its factors are what they were.

PyTorch does not count every write to a tensor: those through `.data`, numpy or a pointer go unseen. So a kept weight
serves only if the digest of all numbers of all factors (`torch.ops.fastfact.digest`) is what it was when the weight was
made. To read the factors takes a fraction of the time in which a weight is made and written. What is asked in every
forward of a small layer is a `Watch`, which reads as much, and has less before it.
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.ops import direct
from fastfact.ops.backends import PLAIN, loaded

MOST = 32
"""Kinds of input that a layer is ready for."""
TENSORS, AXES = 16, 8
"""The most tensors, and axes of one, that a `Watch` is of."""


def allowed() -> bool:
    """Whether a weight may be kept, and serve: nothing traces, casts, dispatches elsewhere or asks for gradients."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    # Asked before every layer of a network: these take a third of the time of their public forms.
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack() or torch._C._is_tracing():
        return False
    return loaded("cpu")


class Watch:
    """Tensors of a layer as they lie in memory. To ask whether they are what they were costs little besides reading
    their numbers: `torch.ops.fastfact.digest` of a small layer takes longer than the layer itself.

    What could change without the numbers at these addresses is looked at too: which tensors the layer has, and where
    and how each lies. `_held` keeps that memory from being given to another tensor.
    """

    __slots__ = ("_held", "_places", "_what")

    def __init__(self, places: Sequence[tuple[Mapping[str, Tensor | None], str]]) -> None:
        """places: the dict that each tensor is in, and its name there. Raises ValueError for a tensor with gaps."""
        tensors = [place[name] for place, name in places]
        if not all(_is_dense(tensor) for tensor in tensors):
            raise ValueError("Watch(places): every tensor must fill one stretch of memory")
        # What PyTorch computes with may be taken out of a tensor and put into another (`torch.utils.swap_tensors`).
        self._places = [(*place, tensor, tensor._cdata) for place, tensor in zip(places, tensors, strict=True)]
        self._held = [tensor.detach() for tensor in tensors]
        inner = (ctypes.c_void_p * len(tensors))(*[tensor._cdata for tensor in tensors])
        self._what = inner, len(tensors), (ctypes.c_uint64 * 2)()
        _watch()(*self._what, 1)

    def still(self) -> bool:
        """Whether the tensors, their numbers included, are those they were."""
        for place, name, tensor, inner in self._places:
            if place.get(name) is not tensor or tensor._cdata != inner:
                return False
        return _watch()(*self._what, 0) == 1


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def can_watch(tensors: Iterable[Tensor]) -> bool:
    """Whether there can be a `Watch` of these tensors."""
    tensors = list(tensors)
    if _watch() is None or len(tensors) > TENSORS:
        return False
    return all(tensor.is_cpu and tensor.dim() <= AXES and _is_dense(tensor) for tensor in tensors)


@functools.cache
def _watch() -> Callable[..., int] | None:
    return direct.function("fastfact_watch", ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)


Run = Callable[[torch.nn.Module, Tensor, Tensor | None], Tensor]
"""A layer in evaluation from what is kept for it: (the layer, x, bias) → y."""


class Ready(NamedTuple):
    """What serves inputs at once while `watch` finds the factors as they were: a function for each kind of input."""

    watch: Watch
    runs: dict[Hashable, Run]


class Kept(NamedTuple):
    """What was made from `factors` while their numbers had this digest: a value for each key that was asked for."""

    factors: Sequence[Tensor]
    digest: int
    values: dict[Hashable, object]

    def value(self, key: Hashable, make: Callable[[], object]) -> object:
        """The value for `key`: kept, or make(), which is then kept. make() must depend on nothing but the factors and
        what is in the key. What is made while a factor changes is not kept."""
        if key in self.values:
            return self.values[key]
        versions = _versions(self.factors)
        value = make()
        if _versions(self.factors) == versions and _digest(self.factors) == self.digest:
            self.values[key] = value
        return value


class WeightCache:
    """What was made from the factors of one layer as they were last. Threads may share it: it is read once and swapped
    in whole. A copy of it, by `copy` or `pickle`, is empty.
    """

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self.ready: Ready | None = None

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept = self.ready = None

    def __len__(self) -> int:
        return self._kept is not None and len(self._kept.values)

    def __reduce__(self):
        return WeightCache, ()

    def of(self, factors: Sequence[Tensor]) -> Kept | None:
        """What is kept for factors with these numbers, empty if they are others than before. None where some are no
        plain tensors on the CPU."""
        for factor in factors:
            if type(factor) not in PLAIN or not factor.is_cpu:
                return None
        kept, digest = self._kept, _digest(factors)
        if kept is not None and kept.digest == digest and all(map(operator.is_, kept.factors, factors)):
            return kept
        values = kept.values if kept is not None and kept.digest == digest else {}
        self._kept = kept = Kept(factors, digest, values)
        return kept

    def serve(self, asked: Hashable, run: Run, kept: Kept, places: Sequence[tuple[Mapping, str]]) -> None:
        """Let `run`, made from what is kept, serve inputs that are `asked` for, `ready` from now on.

        places: where the layer has the factors that `kept` is of, as `Watch` takes them.
        """
        ready = self.ready
        if ready is None or len(ready.runs) >= MOST or not ready.watch.still():
            if any(place.get(name) is not factor for (place, name), factor in zip(places, kept.factors, strict=True)):
                return
            if not can_watch(kept.factors):
                return
            ready = Ready(Watch(places), {})
        # The watch must be of the numbers that `run` was made from, and these may change meanwhile.
        if _digest(kept.factors) == kept.digest and ready.watch.still():
            ready.runs[asked] = run
            self.ready = ready


def _digest(factors: Sequence[Tensor]) -> int:
    return torch.ops.fastfact.digest.default(factors)


def _versions(factors: Sequence[Tensor]) -> list[int]:
    return [0 if factor.is_inference() else factor._version for factor in factors]
