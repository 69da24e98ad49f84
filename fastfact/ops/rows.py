"""The batch of a cohort: rows of each client's samples, products that read them where they are, and the loss."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastfact.base.formats import FLOATING
from fastfact.ops.backends import implementation, library_serves
from fastfact.ops.common import check_range, check_size, check_tensor, must_be_plain, sequence, transforming

aten = torch.ops.aten
FEW = 32
"""Up to so many outputs a product with rows where they are is faster than a copy of them and a matrix product."""


class GatheredBatch(TorchDispatchMode):
    """x [k, b, …], `x[j, n] = samples[j][index[j, n]]`, gathered; while active, a matrix product of each client with x
    (flattened, or in any shape of that memory) of few outputs reads the samples themselves, on the CPU.

    samples: k tensors [any number, …] of one row shape; index: int64 [k, b]. Products with x are those a linear layer
    on the batch and its gradient are, under `vmap` with a weight for each client. What is traced meanwhile has the
    products in it, and x is left without a reader if there is no other.
    """

    def __init__(self, samples: Sequence[Tensor], index: Tensor):
        super().__init__()
        self.samples, self.index = list(samples), index
        self.x = implementation("gather_rows")(self.samples, index)
        self._unwritten = self.x._version

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while this is active, and what would make sure of it costs every operation a wrapper.
        return False

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
            and self.x._version == self._unwritten
        )


def gather_rows(samples: Sequence[Tensor], index: Tensor) -> Tensor:
    """x [k, b, …], `x[j, n] = samples[j][index[j, n]]`: k tensors [any number, …] of any dtype, index int64 [k, b].

    Raises ValueError for samples or an index that do not fit and, on the CPU, for an index out of range.
    """
    op = "gather_rows"
    samples = sequence(op, "samples", samples, "tensors")
    check_tensor(op, "index", index, (torch.int64,))
    if index.dim() != 2 or len(index) != len(samples) or not samples:
        raise ValueError(f"{op}: index has shape {list(index.shape)}, must be [{len(samples)}, b], one row a client")
    for j, some in enumerate(samples):
        check_tensor(op, f"samples[{j}]", some, None, index.device)
        if some.dim() == 0 or some.shape[1:] != samples[0].shape[1:] or some.dtype != samples[0].dtype:
            raise ValueError(
                f"{op}: samples[{j}] is {some.dtype} {list(some.shape)}, must have rows as samples[0],"
                f" {samples[0].dtype} {list(samples[0].shape)}"
            )
    check_size(op, (*index.shape, *samples[0].shape[1:]))
    if index.is_cpu and not library_serves(op, index) and not transforming():
        for j, (some, rows) in enumerate(zip(samples, index, strict=True)):
            check_range(op, f"index[{j}]", rows, len(some))
    return implementation(op)(samples, index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        losses, grad = implementation("softmax_loss")(logits[None], labels[None])
        return losses[0], grad[0]

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx, grad: Tensor | None, of_gradient: Tensor | None) -> tuple[Tensor | None, None]:
        labels, gradient = ctx.saved_tensors
        found = None if grad is None else grad * gradient
        if of_gradient is not None:  # where the gradient itself is differentiated
            n, ones = len(labels), torch.ones_like(gradient[:, :1])
            p = (n * gradient).scatter_add(1, labels[:, None], ones)
            second = p * (of_gradient - (p * of_gradient).sum(1, keepdim=True)) / n
            found = second if found is None else found + second
        return found, None

    @staticmethod
    def vmap(info, in_dims, logits: Tensor, labels: Tensor):
        each = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip((logits, labels), in_dims, strict=True)
        ]
        return implementation("softmax_loss")(*each), (0, 0)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of −log softmax(logits)[label] over logits [b, c] and labels int64 [b], all of them 0 … c − 1.

    `F.cross_entropy` under `vmap` is thirty operations, this one and its gradient two. Raises ValueError for shapes or
    dtypes that do not fit and, on the CPU, for a label out of range.
    """
    op = "cross_entropy"
    check_tensor(op, "logits", logits, FLOATING)
    check_tensor(op, "labels", labels, (torch.int64,), logits.device)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"{op}: logits has shape {list(logits.shape)}, labels {list(labels.shape)}, must be [b, c] and [b]"
        )
    if labels.is_cpu and not library_serves("softmax_loss", labels) and not transforming():
        check_range(op, "labels", labels, logits.shape[1])
    if must_be_plain():
        return F.cross_entropy(logits, labels)
    return _CrossEntropy.apply(logits, labels)[0]
