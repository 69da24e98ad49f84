"""Batch norm of many clients, each by its own batch, that leaves images laid out as they are.

PyTorch's own under `vmap` makes the clients channels of one batch, so that images in channels_last are copied before
and after, and is not differentiable there with cuDNN's kernels.
"""

import torch
from torch import Tensor

from fastfact.ops import reference
from fastfact.ops.backends import implementation


class _BatchNorm(torch.autograd.Function):
    """(y, mean, var) of `reference.batch_norm`; `clients`: of tensors with the client axis, which `vmap` adds."""

    @staticmethod
    def forward(clients, x, weight, bias, eps):
        return _call("batch_norm", clients, (x, weight, bias), eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.clients, x, weight, bias, ctx.eps = inputs
        _, mean, var = output
        ctx.mark_non_differentiable(mean, var)
        ctx.dtypes = [None if t is None else t.dtype for t in (weight, bias)]
        ctx.save_for_backward(x, weight, mean, var)

    @staticmethod
    def backward(ctx, grad, *_):
        dx, *others = _BatchNormBackward.apply(ctx.clients, ctx.eps, grad, *ctx.saved_tensors)
        dweight, dbias = (None if to is None else d.to(to) for d, to in zip(others, ctx.dtypes, strict=True))
        return None, dx, dweight, dbias, None

    @staticmethod
    def vmap(info, in_dims, clients, x, weight, bias, eps):
        return _BatchNorm.apply(True, *_mapped(info, in_dims[1:4], clients, (x, weight, bias)), eps), (0, 0, 0)


class _BatchNormBackward(torch.autograd.Function):
    """The backward op as a Function of its own, so that `vmap` takes all clients at once here too."""

    @staticmethod
    def forward(clients, eps, *tensors):
        return _call("batch_norm_backward", clients, tensors, eps)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.clients, ctx.eps, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        grad, x, weight, _, _ = ctx.saved_tensors

        def again(grad, x, *weight):
            own = [t if ctx.clients else t[None] for t in (grad, x, *weight)] + [None] * (not weight)
            _, mean, var = reference.batch_norm(own[1], None, None, ctx.eps)
            found = reference.batch_norm_backward(*own, mean, var, ctx.eps)
            return found if ctx.clients else tuple(t[0] for t in found)

        given = (grad, x) if weight is None else (grad, x, weight)
        found = torch.func.vjp(again, *given)[1](grads)
        return None, None, *found, *[None] * (5 - len(found))

    @staticmethod
    def vmap(info, in_dims, clients, eps, *tensors):
        return _BatchNormBackward.apply(True, eps, *_mapped(info, in_dims[2:], clients, tensors)), (0, 0, 0)


def _call(op: str, clients: bool, tensors, eps: float) -> tuple[Tensor, ...]:
    if clients:
        return implementation(op)(*tensors, eps)
    return tuple(t[0] for t in implementation(op)(*(t if t is None else t[None] for t in tensors), eps))


def _mapped(info, in_dims, clients: bool, tensors) -> list[Tensor | None]:
    """Each with the mapped axis in front."""
    if clients:
        raise NotImplementedError("batch_norm: vmap of vmap")
    return [
        t if t is None else t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` of x [n, c, …] in training, to be used under `vmap`: y laid out as x; the running statistics [c],
    if given, move in place, `momentum` of the way.
    """
    y, mean, var = _BatchNorm.apply(False, x, weight, bias, eps)
    count = x.numel() // max(1, x.shape[1])
    with torch.no_grad():
        for running, seen in ((running_mean, mean), (running_var, var * (count / max(1, count - 1)))):
            if running is not None:
                running.mul_(1 - momentum).add_(seen.to(running.dtype), alpha=momentum)
    return y
