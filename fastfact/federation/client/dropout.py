"""Dropout from each client's own random stream, however many clients train together and on whatever thread."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastfact.ops.common import is_mapped

_SPATIAL = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}


class Streams(TorchFunctionMode):
    """While active, `F.dropout`, `F.dropout1d`, `2d` and `3d` (and the modules of these names) draw their masks from
    `generators`: one for each client of a cohort under `vmap`, in its order, or the one of the client that trains.

    PyTorch's own draw comes from one generator of the process, which threads share, and under `vmap` in an order that
    depends on the size of the cohort. used: whether anything was drawn.
    """

    def __init__(self, generators: Sequence[torch.Generator]):
        super().__init__()
        self.generators, self.used = list(generators), False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.dropout and func not in _SPATIAL:
            return func(*args, **(kwargs or {}))
        return self._dropout(func, *args, **(kwargs or {}))

    def _dropout(self, func, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return func(input, p, training, inplace)
        with torch._C.DisableTorchFunction():
            self.used = True
            shape = input.shape
            if func in _SPATIAL:
                # One draw a channel; without a batch axis the channels come first.
                axes = input.dim() - _SPATIAL[func]
                shape = (*shape[:axes], *[1] * _SPATIAL[func])
            like = input
            if len(self.generators) > 1 and not is_mapped(input):
                like, inplace = _mapped(input, len(self.generators)), False
            mask = _Mask.apply(like, tuple(shape), p, self.generators)
            return input.mul_(mask) if inplace else input * mask


def _mapped(tensor: Tensor, clients: int) -> Tensor:
    """What all clients share, as each one's under the `vmap` over them; itself where there is none."""
    functorch = torch._C._functorch
    for interpreter in functorch.get_interpreter_stack() or ():
        if interpreter.key() == functorch.TransformType.Vmap:
            return functorch._add_batch_dim(tensor.expand(clients, *tensor.shape), 0, interpreter.level())
    return tensor


def _draw(like: Tensor, shape: Sequence[int], p: float, generator: torch.Generator) -> Tensor:
    if p == 1:
        return like.new_zeros(shape)
    return torch.empty(shape, dtype=like.dtype).bernoulli_(1 - p, generator=generator).div_(1 - p)


class _Mask(torch.autograd.Function):
    """0 with probability p and 1 / (1 − p) else."""

    @staticmethod
    def forward(input: Tensor, shape: Sequence[int], p: float, generators: Sequence[torch.Generator]) -> Tensor:
        return _draw(input, shape, p, generators[0])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, grad):
        return None, None, None, None

    @staticmethod
    def vmap(info, in_dims, input, shape, p, generators):
        return torch.stack([_draw(input, shape, p, generator) for generator in generators]), 0
