"""Small layers computed by the CPU library in one call forward and one backward, without PyTorch's dispatcher.

The ops of a small layer, called one by one through the dispatcher, take as long as it computes. These functions are
called through ctypes, with tensors as `Tensor._cdata` gives them (`csrc/bind_cpu_direct.cpp`). What stands between an
op and its kernel is passed by, so that nothing may transform, cast, record or dispatch elsewhere, and all tensors must
be plain ones on the CPU: `serves` asks for what may change from call to call, whoever calls for the rest. Where a
function returns None, nothing was computed, and the ops serve, which say what does not fit.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastfact.ops.backends import PLAIN, dispatches, library_file

LINEAR, PIXELS, CONVOLUTION = range(3)
"""Kinds of layers: x Wᵀ, a 1×1 convolution as one product of its pixels, any convolution."""

_take = getattr(getattr(torch._C, "_aoti", None), "alloc_tensors_by_stealing_from_void_ptrs", None)
"""What makes tensors of the handles in capsules, and deletes these: PyTorch's own, for code that its compiler wrote."""
_LAYER = ctypes.c_int64 * 14
_POINTER, _NUMBER, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Layer:
    """What a layer is asked for besides tensors: `kind`, layout of the factors (`formats.LAYOUTS`), whether W is laid
    out channels_last, its size, and the settings of a convolution: stride, padding, dilation, groups."""

    __slots__ = ("numbers",)

    def __init__(self, kind: int, layout: int, channels_last: bool, size: Sequence[int], how: Sequence = ()) -> None:
        stride, padding, dilation, groups = how or ((1, 1), (0, 0), (1, 1), 1)
        size = (*size, 1, 1)[:4]
        self.numbers = _LAYER(kind, layout, channels_last, *size, *stride, *padding, *dilation, groups)


def function(name: str, *types: type) -> Callable[..., int] | None:
    """A function of the CPU library that takes arguments of these types, None where the library has none of that name.

    PyTorch's threads may run meanwhile, as in its own ops.
    """
    file = library_file("cpu")
    found = getattr(ctypes.CDLL(str(file)), name, None) if file else None
    if found is not None:
        found.argtypes, found.restype = types, _FLAG
    return found


@functools.cache
def _functions() -> tuple[Callable[..., int], ...] | None:
    """(layer, its backward, factored layer, its backward)."""
    found = (
        function("fastfact_layer", *[_POINTER] * 8),
        function("fastfact_layer_backward", _POINTER, _POINTER, _NUMBER, *[_POINTER] * 6),
        function("fastfact_factored", _POINTER, _POINTER, _FLAG, *[_POINTER] * 6),
        function("fastfact_factored_backward", _POINTER, _POINTER, _NUMBER, *[_POINTER] * 6),
    )
    # A library older than this package, or a PyTorch that has another way.
    return None if None in found or _take is None else found


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [_POINTER] * 3, ctypes.py_object
_ONE, _TWO, _FIVE = (_POINTER * n for n in (1, 2, 5))


def serves(*tensors: Tensor) -> bool:
    """Whether these functions may be called now, with these tensors."""
    if torch._C._len_torch_dispatch_stack() or not dispatches() or _functions() is None:
        return False
    return all(type(tensor) in PLAIN and not tensor.is_neg() for tensor in tensors)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor._cdata


def _taken(handles: ctypes.Array) -> list[Tensor | None]:
    """The tensors that a function gave out."""
    tensors = iter(_take([_capsule(handle, None, None) for handle in handles if handle is not None]))
    return [None if handle is None else next(tensors) for handle in handles]


def layer(of: Layer, x: Tensor, bias, mu, index, u: Tensor, v: Tensor) -> list[Tensor] | None:
    """[y of the dense layer with the weight that u, v and μ make, that weight]; μ dense (`index` None), compact, or
    None."""
    out = _TWO()
    tensors = x._cdata, _at(bias), _at(mu), _at(index), u._cdata, v._cdata
    return _taken(out) if _functions()[0](out, of.numbers, *tensors) else None


def layer_backward(of: Layer, needs: int, grad: Tensor, x: Tensor, w: Tensor, index, u: Tensor, v: Tensor):
    """The gradients [x, bias, μ, u, v] of `layer`; bits 0–4 of `needs` ask for them, the others are None."""
    out = _FIVE()
    tensors = grad._cdata, x._cdata, w._cdata, _at(index), u._cdata, v._cdata
    return _taken(out) if _functions()[1](out, of.numbers, needs, *tensors) else None


def factored(of: Layer, repeated: bool, x: Tensor, u, v, values, index, bias) -> Tensor | None:
    """`factored_conv2d` or `factored_linear` (`repeated_factored_conv2d`)."""
    out = _ONE()
    tensors = x._cdata, _at(u), _at(v), _at(values), _at(index), _at(bias)
    return _taken(out)[0] if _functions()[2](out, of.numbers, repeated, *tensors) else None


def factored_backward(of: Layer, needs: int, grad: Tensor, x: Tensor, u, v, values, index):
    """The gradients [x, u, v, values, bias] of `factored`; bits 0–4 of `needs` ask for them, the others are None."""
    out = _FIVE()
    tensors = grad._cdata, x._cdata, _at(u), _at(v), _at(values), _at(index)
    return _taken(out) if _functions()[3](out, of.numbers, needs, *tensors) else None
