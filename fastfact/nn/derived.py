"""A tensor made from others, to which nobody should write."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MAY_WRITE = {"requires_grad_", "retain_grad", "backward", "share_memory_", "detach"}
_TEXT = (
    "the weight of a factorized layer is made from its factors, a write to it has no effect on the layer: write to the "
    "factors (layer.factors()), set them from a weight by layer.reset_parameters('svd', dense=W), or take a copy by "
    "weight.clone()"
)


class Derived(Tensor):
    """A plain tensor in all but this: an in-place operation on it, its `.data` or a view of it raises RuntimeError.

    Results of operations are plain tensors, and so is `detach()`, which one takes to go on with a tensor of one's own.
    """

    multiply: Callable[[Tensor, Tensor | None], Tensor | None] | None = None
    """(x, bias) → `F.linear` of x, this and a bias without this tensor; None where that would not be the same."""
    _is_hf_initialized = True
    """The initializers of transformers pass such a tensor by, as `from_pretrained` would otherwise write to it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear and len(args) == 3 and not kwargs and type(args[1]) is Derived and args[1].multiply:
            y = args[1].multiply(args[0], args[2])
            if y is not None:
                return y
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__") and name not in _MAY_WRITE
        if name == "__set__":
            writes = func == Tensor.data.__set__
        # `torch.nn.init` passes the tensor by name, `torch._foreach` a list.
        written = [*args[:1], (kwargs or {}).get("tensor")] if writes or name in _OPERATORS else []
        written.append((kwargs or {}).get("out"))
        if any(isinstance(t, Derived) for one in written for t in (one if isinstance(one, (list, tuple)) else (one,))):
            raise RuntimeError(f"{name}: {_TEXT}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Derived):
            result = result.as_subclass(Tensor)
        if type(result) is Tensor and name != "detach" and _shares(result, args[0] if args else None):
            return result.as_subclass(Derived)
        return result

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return copy.deepcopy(self._plain(), memo)


_OPERATORS = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
}


def _shares(result: Tensor, of: object) -> bool:
    """Whether two tensors have the same memory."""
    if not isinstance(of, Derived) or result.layout != torch.strided:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return result.untyped_storage()._cdata == of.untyped_storage()._cdata
