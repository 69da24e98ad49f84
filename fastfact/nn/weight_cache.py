"""What a layer makes once in evaluation, its weight or the order of μ's nonzeros, and keeps while its factors stay as
they are."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastfact.ops.common import is_channels_last

if TYPE_CHECKING:
    from fastfact.nn.layers import FactorizedLayer

SAMPLES = 128
"""How many numbers of a tensor are looked at: a write to a tenth of all goes unseen once in .9¹²⁸, a million times."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def allowed() -> bool:
    """Whether something may be kept, and serve: nothing traces, casts or asks for gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return not torch.is_autocast_enabled("cpu")


def keep(layer: "FactorizedLayer", weight: Tensor, x: Tensor) -> "Kept | None":
    """`weight` as made for input x, to be kept; None where its factors could change unseen or it is no plain tensor."""
    tensors = {**layer.factors(), **layer._buffers}
    if type(weight) is not Tensor or not _plain(tensors):
        return None
    last = is_channels_last(x) and weight.dim() == 4
    weight = weight.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return Kept(tensors, weight, None if layer.path == "reconstruct" or not layer.can_factor else x)


def keep_order(index: dict[str, Tensor], order: Tensor, x: Tensor) -> "Kept | None":
    """`order` as found for input x and the positions `index`, by their name, to be kept; None as `keep` says."""
    return Kept(index, order, x) if order.numel() and _plain(index) else None


def _plain(tensors: dict[str, Tensor]) -> bool:
    return all(t.is_cpu and not t.is_inference() for t in tensors.values())


class Kept:
    """value: W, in the memory format of the input it was first made for, or the order of μ's nonzeros.

    It serves as long as the layer has the same tensors, PyTorch has counted no write to them, and some of their numbers
    are what they were: this last finds writes that are not counted, those through `.data` and numpy, unless they change
    a few numbers only. What depends on the input, as the choice of the path may, serves inputs of one shape.
    """

    def __init__(self, tensors: dict[str, Tensor], value: Tensor, x: Tensor | None):
        self.value = value
        self._input = None if x is None else (x.shape, x.stride(), x.dtype)
        self._made_from = [
            (name, tensor, tensor._version, tensor.data_ptr(), sample := _sample(tensor), sample.tobytes())
            for name, tensor in tensors.items()
        ]

    def serves(self, layer: "FactorizedLayer", x: Tensor) -> bool:
        """Whether the value is still that of `layer`, and what its forward would take for x."""
        if self._input is not None and self._input != (x.shape, x.stride(), x.dtype):
            return False
        parameters, buffers = layer._parameters, layer._buffers
        for name, tensor, version, address, sample, seen in self._made_from:
            if (
                (parameters.get(name) is not tensor and buffers.get(name) is not tensor)
                or tensor._version != version
                or tensor.data_ptr() != address
                or sample.tobytes() != seen
            ):
                return False
        return True


def _sample(tensor: Tensor):
    """A view, as numpy array, of `SAMPLES` numbers spread over a tensor without gaps. As long as it lives the memory is
    given to no other tensor, so that the address tells it apart."""
    n = tensor.numel()
    some = tensor.detach().as_strided((min(SAMPLES, n),), (max(1, n // SAMPLES),), tensor.storage_offset())
    return some.view(_INTEGERS[tensor.element_size()]).numpy()
