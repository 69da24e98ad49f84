"""Convolution and linear layers computed from their factors, without writing the weight."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact import formats
from fastfact.formats import LAYOUTS, rank1_shapes
from fastfact.ops import reference
from fastfact.ops.backends import implementation
from fastfact.ops.common import (
    autocast,
    call,
    check,
    check_index,
    fold,
    is_mapped,
    must_be_plain,
    transforming,
    unfold,
    with_clients,
)
from fastfact.ops.weights import follows_channels_last

OP, FUSED = "factored_conv2d", "fused_conv2d"
_unsafe_view = torch.ops.aten._unsafe_view.default


def _forward(op, clients, settings, x, u, v, mu, index, bias):
    return call(implementation(op), clients, (x, u, v, mu, index, bias), *settings)


def _backward(op, clients, settings, needs, grad, x, u, v, mu, index):
    """(dx, du, dv, dμ); bits 0–3 of `needs` ask for them."""
    if op == OP:
        return call(implementation(f"{op}_backward"), clients, (grad, x, u, v, mu, index), *settings, needs)
    dx = du = dv = dmu = grad.new_empty(0)
    if needs & 1:
        one = x if clients else x.unsqueeze(0)
        image = tuple(one.shape[1:])
        extra = (image, formats.is_channels_last(one), *settings)
        dx = call(implementation(f"{op}_dx"), clients, (grad, u, v, mu, index), *extra)
    if needs >> 1:
        tensors = (grad, x, u, v, index)
        du, dv, dmu = call(implementation(f"{op}_dw"), clients, tensors, *settings, needs >> 1)
    return dx, du, dv, dmu


def _gradients(ctx, grad):
    """What `backward` of a convolution returns."""
    needed = ctx.needs_input_grad[3:7]
    grads = (None,) * 4
    if any(needed):
        needs = sum(1 << bit for bit, need in enumerate(needed) if need)
        transformed = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        backward = _ConvBackward.apply if transformed else _backward
        out = backward(ctx.op, ctx.clients, ctx.settings, needs, grad, *ctx.saved_tensors)
        grads = [g if need else None for g, need in zip(out, needed, strict=True)]
    return None, None, None, *grads, None, grad.sum((-4, -2, -1)) if ctx.needs_input_grad[8] else None


class _EagerConv(torch.autograd.Function):
    """`_Conv` where nothing transforms it: a Function without `setup_context` has a third of the overhead."""

    @staticmethod
    def forward(ctx, op, clients, settings, x, u, v, mu, index, bias):
        ctx.op, ctx.clients, ctx.settings = op, clients, settings
        ctx.save_for_backward(x, u, v, mu, index)
        out = _forward(op, clients, settings, x, u, v, mu, index, bias)
        # Without the client axis it is a view, which a Function may not return to in-place activations.
        return out if clients else _unsafe_view(out, out.shape)

    @staticmethod
    def backward(ctx, grad):
        return _gradients(ctx, grad)


class _Conv(torch.autograd.Function):
    """A convolution computed from the parts of its weight: `mu` dense, or values with `index`.

    `settings` are the last arguments of the op.
    """

    @staticmethod
    def forward(op, clients, settings, x, u, v, mu, index, bias):
        return _forward(op, clients, settings, x, u, v, mu, index, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op, ctx.clients, ctx.settings = inputs[:3]
        ctx.save_for_backward(*inputs[3:8])

    @staticmethod
    def backward(ctx, grad):
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(info, in_dims, op, clients, settings, *tensors):
        out = _Conv.apply(op, True, settings, *fold(info.batch_size, in_dims[3:], clients, tensors))
        return out.unflatten(0, (info.batch_size, -1)) if clients else out, 0


class _ConvBackward(torch.autograd.Function):
    """The backward op as a Function of its own, so that `vmap` folds it too. Its own gradient is that of the reference,
    in plain PyTorch, as in `weights`.
    """

    @staticmethod
    def forward(op, clients, settings, needs, grad, x, u, v, mu, index):
        return _backward(op, clients, settings, needs, grad, x, u, v, mu, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op, ctx.clients, ctx.settings, ctx.needs = inputs[:4]
        ctx.save_for_backward(*inputs[4:])

    @staticmethod
    def backward(ctx, *grads):
        grad, *factors, index = ctx.saved_tensors
        asked = [at for at, factor in enumerate(factors) if factor is not None and ctx.needs >> at & 1]
        present = [at for at, factor in enumerate(factors) if factor is not None]

        def gradients(grad, *floating):
            def forward(*trained):
                given = dict(zip(present, floating, strict=True)) | dict(zip(asked, trained, strict=True))
                tensors = (*(given.get(at) for at in range(4)), index, None)
                return call(getattr(reference, ctx.op), ctx.clients, tensors, *ctx.settings)

            own = dict(zip(present, floating, strict=True))
            return torch.func.vjp(forward, *(own[at] for at in asked))[1](grad)

        floating = [factors[at] for at in present]
        out = iter(torch.func.vjp(gradients, grad, *floating)[1](tuple(grads[at] for at in asked)))
        dgrad = next(out)
        found = [next(out) if factor is not None else None for factor in factors]
        return None, None, None, None, dgrad, *found, None

    @staticmethod
    def vmap(info, in_dims, op, clients, settings, needs, *tensors):
        tensors = fold(info.batch_size, in_dims[4:], clients, tensors)
        out = _ConvBackward.apply(op, True, settings, needs, *tensors)
        return unfold(info.batch_size, clients, needs, out)


def _apply(op: str, clients: bool, settings, *tensors) -> Tensor:
    if not transforming():
        apply = _EagerConv.apply if torch.is_grad_enabled() else _forward
        return apply(op, clients, settings, *tensors)
    if must_be_plain():
        return call(getattr(reference, op), clients, tensors, *settings)
    return _Conv.apply(op, clients, settings, *tensors)


def _pair(op: str, name: str, value, least: int) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < least:
        raise ValueError(f"{op}: {name}={value}, must be one or two integers of at least {least}")
    return pair


def _checked(op, x, u, v, mu, index, bias, size, stride, padding, dilation, groups, dense=False):
    """What the convolutions have in common, checked: (size, stride, padding, dilation, groups, clients, tensors).

    dense: whether μ may come without an index, of the shape of W.
    """
    size = tuple(size)
    if len(size) != 4 or min(size) < 1 or groups < 1 or size[0] % groups:
        raise ValueError(f"{op}: size={size}, groups={groups}: must be (o, i, kh, kw), o a multiple of groups")
    if (u is None) != (v is None) or ((mu is None) != (index is None) and not (dense and index is None)):
        raise ValueError(f"{op}: u and v go together, and so do values and index")
    x, u, v, mu, bias = autocast(x, u, v, mu, bias)
    pairs = [_pair(op, "stride", stride, 1), _pair(op, "padding", padding, 0), _pair(op, "dilation", dilation, 1)]
    name, dims = ("mu", 4) if index is None else ("values", 1)
    named = {"x": (x, 4), "u": (u, 3), "v": (v, 3), name: (mu, dims), "index": (index, 1), "bias": (bias, 1)}
    clients, (x, u, v, mu, index, bias) = with_clients(op, named)
    channels, h, w = x.shape[clients + 1 :]
    if channels != groups * size[1]:
        raise ValueError(f"{op}: x has {channels} channels, must have groups·i = {groups * size[1]}")
    for extent, kernel, padded, gap in zip((h, w), size[2:], *pairs[1:], strict=True):
        if extent + 2 * padded < gap * (kernel - 1) + 1:
            raise ValueError(f"{op}: x is {h}×{w}, too small for kernel {size[2:]}, padding and dilation")
    check(op, "bias", bias, (size[0],), clients, x)
    check(op, name, mu, size if index is None else index.shape[clients:], clients, x)
    if index is not None:
        index = check_index(op, index, x)
    return size, *pairs, groups, clients, (x, u, v, mu, index, bias)


def _check_factors(op, layout, u, v, size, clients, x) -> None:
    rank = u.shape[clients]
    for name, factor, shape in zip(("u", "v"), (u, v), rank1_shapes(LAYOUTS[layout], size), strict=True):
        check(op, name, factor, (rank, *shape), clients, x)


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
    repeated: bool = False,
) -> Tensor:
    """conv2d(x, Σ_r u_r ⊗ v_r + μ, bias), μ sparse, W [o, i, kh, kw] = `size` never made (Factorized-FL eq. 2–3).

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients):
    x [n, groups·i, h, w]; u [r, kh, kw] and v [r, o, i], or neither; values [nnz] and index [nnz], or neither: the
    nonzeros of μ and their flat positions in W, ascending, int32 (int64 is converted at each call); bias [o].
    The result [n, o, oh, ow] has the memory format of x; channels_last and contiguous are both served as they are.

    float32, float64, float16 and bfloat16, the last two computed in float32. Differentiable in x, u, v, values and
    bias; the gradient of `values` is computed on the support only. Under autocast the tensors are cast as those of
    PyTorch's convolutions are. Raises ValueError for shapes or dtypes that do not fit, and, on the CPU, for positions
    that are not ascending or not in W; a GPU does not look at them.

    repeated: whether the same μ comes again, with inputs of this shape. Where no gradient is asked for, the CPU kernels
    then remember in which order they take its nonzeros: 12 bytes for each, 256 MiB in all, those used last. An order
    serves only where the index is number by number the one that it was found for.
    """
    checked = _checked(OP, x, u, v, values, index, bias, size, stride, padding, dilation, groups)
    size, *how, clients, (x, u, v, values, index, bias) = checked
    if u is not None:
        _check_factors(OP, "spatial", u, v, size, clients, x)
    if repeated and values is not None and not transforming() and not torch.is_grad_enabled():
        return call(implementation(f"repeated_{OP}"), clients, (x, u, v, values, index, bias), size, *how)
    return _apply(OP, clients, (size, *how), x, u, v, values, index, bias)


def fused_conv2d(
    x: Tensor,
    u: Tensor | None = None,
    v: Tensor | None = None,
    mu: Tensor | None = None,
    index: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    layout: str = "spatial",
    size: tuple[int, int, int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """conv2d(x, Σ_r u_r ⊗ v_r + μ, bias), of which the backward pass keeps u, v and μ, not the weight.

    Where there are only u and v, spatial, of a rank below kh·kw, it is a depthwise and a 1×1 convolution in one kernel;
    in layout "kernel", where that costs less than W, a kh×1 and a 1×kw one, in one kernel up to rank 64.
    One call serves all clients, each with its own weight, which `vmap` over `conv2d` turns into a grouped convolution.
    On CUDA a Triton implicit GEMM on the tensor cores, which makes W for as long as it runs; elsewhere W is made and
    convolved, one client after the other.

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients):
    x [n, groups·i, h, w]; u and v as `rank1_weight` has them in `layout` "spatial", "kernel" or "view", or neither: the
    weight is μ alone; μ dense [o, i, kh, kw] = `size`, or values [nnz] with their flat positions in W in `index` [nnz],
    ascending, int32, or none; bias [o]. The result [n, o, oh, ow] has the memory format of x.

    float32 (rounded to TF32 where PyTorch's own convolutions are), float64, float16 and bfloat16, summed in float32.
    Differentiable in x, u, v, μ and bias. Raises ValueError for shapes or dtypes that do not fit.
    """
    if layout not in ("spatial", "kernel", "view"):
        raise ValueError(f"{FUSED}: layout={layout!r}, must be one of spatial, kernel, view")
    if u is None and mu is None:
        raise ValueError(f"{FUSED}: u and v, or mu, must be given")
    size, *how, clients, (x, u, v, mu, index, bias) = _checked(
        FUSED, x, u, v, mu, index, bias, size, stride, padding, dilation, groups, dense=True
    )
    if u is not None:
        _check_factors(FUSED, layout, u, v, size, clients, x)
    last = index is None and follows_channels_last(mu)
    return _apply(FUSED, clients, (LAYOUTS[layout], size, last, *how), x, u, v, mu, index, bias)


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
    r / (o·kw) + r / (i·kh). Made of PyTorch's convolutions, and differentiable as they are; clients run as groups, or
    on a GPU in `fused_conv2d`.
    """
    op = "separable_conv2d"
    size, stride, padding, dilation, groups, clients, (x, u, v, values, index, bias) = _checked(
        op, x, u, v, values, index, bias, size, stride, padding, dilation, groups
    )
    if u is None:
        raise ValueError(f"{op}: u and v must be given")
    _check_factors(op, "kernel", u, v, size, clients, x)
    (sy, sx), (py, px), (dy, dx) = stride, padding, dilation
    if groups == 1 and values is None and x.is_cuda and not must_be_plain() and (clients or is_mapped(u)):
        rank, (o, i, kh, kw) = u.shape[clients], size
        trained = torch.is_grad_enabled() and (u.requires_grad or v.requires_grad)
        if not trained and rank * (i * kh + o * kw) < i * o * kh * kw:
            # nothing needs the r channels afterwards: one kernel, from which they do not come out
            how = {"stride": stride, "padding": padding, "dilation": dilation}
            return fused_conv2d(x, u, v, bias=bias, layout="kernel", size=size, **how)
        how = {"size": (u.shape[clients], size[1], size[2], 1), "stride": (sy, 1), "padding": (py, 0)}
        hidden = fused_conv2d(x, mu=u.unsqueeze(-1), dilation=(dy, 1), **how)
        how = {"size": (size[0], u.shape[clients], 1, size[3]), "stride": (1, sx), "padding": (0, px)}
        mu = v.transpose(clients, clients + 1).unsqueeze(-2)
        return fused_conv2d(hidden, mu=mu, bias=bias, dilation=(1, dx), **how)
    k = x.shape[0] if clients else 1
    u, v = (t if clients else t.unsqueeze(0) for t in (u, v))
    rank, parts = u.shape[1], k * groups
    down = u.unsqueeze(1).expand(-1, groups, -1, -1, -1).reshape(parts * rank, size[1], size[2], 1)
    across = v.transpose(1, 2).reshape(k * size[0], rank, 1, size[3])
    hidden = x.movedim(0, 1).flatten(1, 2) if clients else x
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
    repeated: bool = False,
) -> Tensor:
    """x Wᵀ + bias = (x uᵀ) v + x μᵀ + bias, with W [o, i] = `size` never made.

    x [(k,) …, i], u [(k,) r, i], v [(k,) r, o], values, index [(k,) nnz] and bias [(k,) o] as in `factored_conv2d`;
    x has the client axis if any of the others has it. repeated: as there. Returns […, o].
    """
    size = tuple(size)
    x, u, v, values, bias = autocast(x, u, v, values, bias)
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
        out = factored_conv2d(images, None, None, values, index, bias, size=(*size, 1, 1), repeated=repeated)
        out = out.movedim(-3, -1).reshape(*rows.shape[:-1], size[0])
    elif bias is not None:
        out = bias.unsqueeze(-2)
    if u is not None:
        product = rows @ u.mT @ v
        out = product if out is None else out + product
    if out is None:
        out = rows.new_zeros(*rows.shape[:-1], size[0])
    return out.reshape(*x.shape[:-1], size[0])
