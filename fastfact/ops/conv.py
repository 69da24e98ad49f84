"""Convolution and linear layers computed from their factors, without making the weight."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact import reference
from fastfact.backends import implementation
from fastfact.ops.common import call, check, fold, must_be_plain, unfold, with_clients

OP = "factored_conv2d"


class _FactoredConv(torch.autograd.Function):
    @staticmethod
    def forward(clients, settings, x, u, v, values, index, bias):
        return call(implementation(OP), clients, (x, u, v, values, index, bias), *settings)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.clients, ctx.settings = inputs[:2]
        ctx.save_for_backward(*inputs[2:7])

    @staticmethod
    def backward(ctx, grad):
        needed = ctx.needs_input_grad[2:6]
        grads = (None,) * 4
        if any(needed):
            needs = sum(1 << bit for bit, need in enumerate(needed) if need)
            out = _FactoredConvBackward.apply(ctx.clients, ctx.settings, needs, grad, *ctx.saved_tensors)
            grads = [g if need else None for g, need in zip(out, needed, strict=True)]
        return None, None, *grads, None, grad.sum((-4, -2, -1)) if ctx.needs_input_grad[7] else None

    @staticmethod
    def vmap(info, in_dims, clients, settings, *tensors):
        out = _FactoredConv.apply(True, settings, *fold(info.batch_size, in_dims[2:], clients, tensors))
        return out.unflatten(0, (info.batch_size, -1)) if clients else out, 0


class _FactoredConvBackward(torch.autograd.Function):
    """(dx, du, dv, dvalues); bits 0–3 of `needs` ask for them."""

    @staticmethod
    def forward(clients, settings, needs, grad, x, u, v, values, index):
        dx = du = dv = dvalues = grad.new_empty(0)
        if needs & 1:
            one = x if clients else x.unsqueeze(0)
            image = tuple(one.shape[1:])
            extra = (image, reference.is_channels_last(one), *settings)
            dx = call(implementation(f"{OP}_dx"), clients, (grad, u, v, values, index), *extra)
        if needs >> 1:
            tensors = (grad, x, u, v, index)
            du, dv, dvalues = call(implementation(f"{OP}_dw"), clients, tensors, *settings, needs >> 1)
        return dx, du, dv, dvalues

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("the factored convolution can be differentiated once, not twice")

    @staticmethod
    def vmap(info, in_dims, clients, settings, needs, *tensors):
        out = _FactoredConvBackward.apply(True, settings, needs, *fold(info.batch_size, in_dims[3:], clients, tensors))
        return unfold(info.batch_size, clients, needs, out)


def _pair(op: str, name: str, value, least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < least:
        raise ValueError(f"{op}: {name}={value}, must be one or two integers of at least {least}")
    return pair


def _checked(op, x, u, v, values, index, bias, size, stride, padding, dilation, groups):
    """What the convolutions have in common, checked: (size, stride, padding, dilation, groups, clients, tensors)."""
    size = tuple(size)
    if len(size) != 4 or min(size) < 1 or groups < 1 or size[0] % groups:
        raise ValueError(f"{op}: size={size}, groups={groups}: must be (o, i, kh, kw), o a multiple of groups")
    if (u is None) != (v is None) or (values is None) != (index is None):
        raise ValueError(f"{op}: u and v go together, and so do values and index")
    pairs = [_pair(op, "stride", stride, 1), _pair(op, "padding", padding, 0), _pair(op, "dilation", dilation, 1)]
    named = {"x": (x, 4), "u": (u, 3), "v": (v, 3), "values": (values, 1), "index": (index, 1), "bias": (bias, 1)}
    clients, (x, u, v, values, index, bias) = with_clients(op, named)
    channels, h, w = x.shape[clients + 1 :]
    if channels != groups * size[1]:
        raise ValueError(f"{op}: x has {channels} channels, must have groups·i = {groups * size[1]}")
    for extent, kernel, padded, gap in zip((h, w), size[2:], *pairs[1:], strict=True):
        if extent + 2 * padded < gap * (kernel - 1) + 1:
            raise ValueError(f"{op}: x is {h}×{w}, too small for kernel {size[2:]}, padding and dilation")
    check(op, "bias", bias, (size[0],), clients, x)
    if values is not None:
        check(op, "values", values, index.shape[clients:], clients, x)
        if index.dtype not in (torch.int32, torch.int64) or index.device != x.device:
            raise ValueError(f"{op}: index is {index.dtype} on {index.device}, must be int32 or int64 on {x.device}")
        index = index.to(torch.int32)
    return size, *pairs, groups, clients, (x, u, v, values, index, bias)


def factored_conv2d(
    x: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    values: Tensor | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    size: tuple[int, int, int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """conv2d(x, Σ_r u_r ⊗ v_r + μ, bias), μ sparse, W [o, i, kh, kw] = `size` never made (Factorized-FL eq. 2–3).

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients):
    x [n, groups·i, h, w]; u [r, kh, kw] and v [r, o, i], or neither; values [nnz] and index [nnz], or neither: the
    nonzeros of μ and their flat positions in W, ascending, int32 (int64 is converted at each call); bias [o].
    The result [n, o, oh, ow] has the memory format of x; channels_last and contiguous are both served as they are.

    float32, float64, float16 and bfloat16, the last two computed in float32. Differentiable once, in x, u, v, values
    and bias; the gradient of `values` is computed on the support only. Raises ValueError for shapes or dtypes that do
    not fit, and for positions that are not ascending or not in W.
    """
    size, *how, clients, (x, u, v, values, index, bias) = _checked(
        OP, x, u, v, values, index, bias, size, stride, padding, dilation, groups
    )
    if u is not None:
        check(OP, "u", u, (u.shape[clients], *size[2:]), clients, x)
        check(OP, "v", v, (u.shape[clients], *size[:2]), clients, x)
    if values is not None:
        check(OP, "values", values, index.shape[clients:], clients, x)
        if index.dtype not in (torch.int32, torch.int64) or index.device != x.device:
            raise ValueError(f"{OP}: index is {index.dtype} on {index.device}, must be int32 or int64 on {x.device}")
        index = index.to(torch.int32)
    tensors, settings = (x, u, v, values, index, bias), (size, *how)
    if must_be_plain():
        return call(getattr(reference, OP), clients, tensors, *settings)
    return _FactoredConv.apply(clients, settings, *tensors)


def separable_conv2d(
    x: Tensor,
    u: Tensor,
    v: Tensor,
    values: Tensor | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    size: tuple[int, int, int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """conv2d(x, W + μ, bias) with W[o, i, ky, kx] = Σ_r u[r, i, ky] · v[r, o, kx] never made: a kh×1 convolution to r
    channels, then a 1×kw one (SimFed, `Rank1(layout="kernel")`; FedDecomp eq. 2–4, `LowRank(layout="separable")`, whose
    B [i·kh, r] is u as `B.T.unflatten(1, (i, kh))` and scaling · A [r, o·kw] is v as `.unflatten(1, (o, kw))`).

    u [r, i, kh], v [r, o, kw]; the rest, the client axis and what is raised as in `factored_conv2d`. μ is sparse; with
    a dense one (σ) this costs more than W does. Multiplications at stride 1, as a part of the dense layer's:
    r / (o·kw) + r / (i·kh). Made of PyTorch's convolutions, and differentiable as they are; clients run as groups.
    """
    op = "separable_conv2d"
    size, stride, padding, dilation, groups, clients, (x, u, v, values, index, bias) = _checked(
        op, x, u, v, values, index, bias, size, stride, padding, dilation, groups
    )
    if u is None:
        raise ValueError(f"{op}: u and v must be given")
    check(op, "u", u, (u.shape[clients], size[1], size[2]), clients, x)
    check(op, "v", v, (u.shape[clients], size[0], size[3]), clients, x)
    k = x.shape[0] if clients else 1
    u, v = (t if clients else t.unsqueeze(0) for t in (u, v))
    rank, parts = u.shape[1], k * groups
    down = u.unsqueeze(1).expand(-1, groups, -1, -1, -1).reshape(parts * rank, size[1], size[2], 1)
    across = v.transpose(1, 2).reshape(k * size[0], rank, 1, size[3])
    hidden = x.movedim(0, 1).flatten(1, 2) if clients else x
    (sy, sx), (py, px), (dy, dx) = stride, padding, dilation
    hidden = F.conv2d(hidden, down, None, (sy, 1), (py, 0), (dy, 1), parts)
    in_second = None if bias is None or values is not None else bias.flatten()
    out = F.conv2d(hidden, across, in_second, (1, sx), (0, px), (1, dx), parts)
    if clients:
        out = out.unflatten(1, (k, size[0])).movedim(1, 0)
    if values is None:
        return out
    how = {"size": size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return out + factored_conv2d(x, None, None, values, index, bias, **how)


def factored_linear(
    x: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    values: Tensor | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    size: tuple[int, int],
) -> Tensor:
    """x Wᵀ + bias = (x uᵀ) v + x μᵀ + bias, with W [o, i] = `size` never made.

    x [(k,) …, i], u [(k,) r, i], v [(k,) r, o], values, index [(k,) nnz] and bias [(k,) o] as in `factored_conv2d`;
    x has the client axis if any of the others has it. Returns […, o].
    """
    size = tuple(size)
    shared = ((u, 2), (v, 2), (values, 1), (index, 1), (bias, 1))
    clients = int(any(t is not None and t.dim() > dims for t, dims in shared))
    if x.shape[-1] != size[1]:
        raise ValueError(f"factored_linear: x has {x.shape[-1]} features, must have {size[1]}")
    rows = x.flatten(clients, -2) if x.dim() > clients + 1 else x.unsqueeze(clients)
    out = None
    if values is not None:
        n = rows.shape[clients]
        width = next(w for w in (8, 4, 2, 1) if n % w == 0)
        images = rows.reshape(*rows.shape[:clients], n // width, 1, width, size[1]).movedim(-1, -3)
        out = factored_conv2d(images, None, None, values, index, bias, size=(*size, 1, 1))
        out = out.movedim(-3, -1).reshape(*rows.shape[:-1], size[0])
    elif bias is not None:
        out = bias.unsqueeze(-2)
    if u is not None:
        product = rows @ u.mT @ v
        out = product if out is None else out + product
    if out is None:
        out = rows.new_zeros(*rows.shape[:-1], size[0])
    return out.reshape(*x.shape[:-1], size[0])
