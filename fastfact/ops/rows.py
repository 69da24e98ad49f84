"""The batch of a cohort: rows of each client's samples, products that read them where they are, and the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfact.ops.backends import implementation

aten = torch.ops.aten
FEW = 32
"""Up to so many outputs a product with rows where they are is faster than a copy of them and a matrix product."""


class Rows(TorchDispatchMode):
    """x [k, b, …], x[j, n] = samples[j][index[j, n]], gathered; while active, a matrix product of each client with x
    (flattened, or in any shape of that memory) of few outputs reads the samples themselves, on the CPU.

    samples: k tensors [any number, …] of one row shape; index: int64 [k, b]. Products with x are those a linear layer
    on the batch and its gradient are, under `vmap` with a weight for each client. What is traced meanwhile has the
    products in it, and x is left without a reader if there is no other.
    """

    def __init__(self, samples: Sequence[Tensor], index: Tensor):
        super().__init__()
        self.samples, self.index = list(samples), index
        self.x = implementation("gather_rows")(self.samples, index)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.bmm.default and self.x.device.type == "cpu":
            left, right = args
            if self._is_batch(left) and right.shape[2] <= FEW and right.transpose(1, 2).is_contiguous():
                return implementation("rows_linear")(self.samples, self.index, right.transpose(1, 2))
            if self._is_batch(right) and left.shape[1] <= FEW and left.shape[2] == self.index.shape[1]:
                return implementation("rows_linear_backward")(self.samples, self.index, left.transpose(1, 2))
        return func(*args, **(kwargs or {}))

    def _is_batch(self, tensor: Tensor) -> bool:
        return (
            tensor.data_ptr() == self.x.data_ptr()
            and tensor.shape[:2] == self.index.shape
            and tensor.numel() == self.x.numel() > 0
            and tensor.is_contiguous()
        )


def gather_rows(samples: Sequence[Tensor], index: Tensor) -> Tensor:
    """x [k, b, …], x[j, n] = samples[j][index[j, n]]: k tensors [any number, …] of any dtype, index int64 [k, b].

    Raises ValueError on the CPU for an index out of range or rows that differ in shape or dtype.
    """
    return implementation("gather_rows")(list(samples), index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses, grad = implementation("softmax_loss")(logits[None], labels[None])
        return losses[0], grad[0]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad: Tensor, _) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None

    @staticmethod
    def vmap(info, in_dims, logits: Tensor, labels: Tensor):
        each = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((logits, labels), in_dims, strict=True)
        ]
        return implementation("softmax_loss")(*each), (0, 0)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of −log softmax(logits)[label] over logits [b, c] and labels int64 [b], all of them 0 … c − 1.

    `F.cross_entropy` under `vmap` is thirty operations, this one and its gradient two. The second derivative is not
    there. Raises ValueError on the CPU for a label out of range.
    """
    return _CrossEntropy.apply(logits, labels)[0]
