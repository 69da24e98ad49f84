"""Convolution and linear layers computed from their factors, without writing the weight."""

import contextlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact.base import formats
from fastfact.base.formats import FLOATING, LAYOUTS, LINEAR, SPATIAL, LowRankForm, rank1_shapes
from fastfact.ops import direct, reference
from fastfact.ops.backends import implementation, takes_one
from fastfact.ops.common import (
    LARGEST,
    as_rows,
    autocast,
    call,
    check,
    check_factors,
    check_floating,
    check_index,
    check_size,
    check_tensor,
    choice,
    flag,
    fold,
    in_type,
    is_mapped,
    must_be_plain,
    no_view,
    pair,
    transforming,
    unfold,
    whole,
    wholes,
    with_clients,
)
from fastfact.ops.weights import follows_channels_last

OP, FUSED, LAYER = "factored_conv2d", "fused_conv2d", "factored_linear"


def _forward(op, clients, settings, x, u, v, mu, index, bias):
    return call(implementation(op), clients or _as_they_are(op, x), (x, u, v, mu, index, bias), *settings)


def _as_they_are(op: str, x: Tensor) -> bool:
    """Whether the op takes tensors without a client axis.

    So it does in a graph of torch.compile. With the axis put on, a view of an image would be kept for the backward
    pass, and beside it what the graph needs of the image itself: where a ReLU was zero, as booleans, with which its
    kernels are slow.
    """
    in_graph = torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    return (in_graph or not transforming()) and takes_one(op, x)


def _backward(op, clients, settings, needs, grad, x, u, v, mu, index):
    """(dx, du, dv, dμ); bits 0–3 of `needs` ask for them."""
    if op != FUSED:
        tensors = (grad, x, u, v, mu, index)
        return call(implementation(f"{op}_backward"), clients or _as_they_are(op, x), tensors, *settings, needs)
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


def _gradients(op, clients, settings, grad, saved, needed):
    """The gradients of x, u, v, μ, index and the bias, of those that are `needed`, from `saved`: x … index."""
    *of_parts, _, of_bias = needed
    grads = (None,) * 4
    if any(of_parts):
        needs = sum(1 << bit for bit, need in enumerate(of_parts) if need)
        transformed = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        backward = _ConvBackward.apply if transformed else _backward
        out = backward(op, clients, settings, needs, grad, *saved)
        grads = [g if need else None for g, need in zip(out, of_parts, strict=True)]
    return *grads, None, grad.sum(-2 if op == LAYER else (-4, -2, -1)) if of_bias else None


class _EagerConv(torch.autograd.Function):
    """`_Conv` where nothing transforms it: a Function without `setup_context` has a third of the overhead."""

    @staticmethod
    def forward(ctx, op, clients, settings, x, u, v, mu, index, bias):
        ctx.op, ctx.clients, ctx.settings = op, clients, settings
        ctx.save_for_backward(x, u, v, mu, index)
        out = _forward(op, clients, settings, x, u, v, mu, index, bias)
        # Where the client axis was taken off it is a view, which a Function may not return to in-place activations.
        return no_view(out)

    @staticmethod
    def backward(ctx, grad):
        own = ctx.op, ctx.clients, ctx.settings
        return None, None, None, *_gradients(*own, grad, ctx.saved_tensors, ctx.needs_input_grad[3:])


class _Apart:
    """A layer from its factors by the ops, for one client, for `direct.Plan`."""

    @staticmethod
    def forward(ctx, plan, x, u, v, mu, index, bias):
        ctx.plan = plan
        given = u, v, mu, index, bias
        x, u, v, mu, bias = autocast(x, u, v, mu, bias)
        ctx.save_for_backward(x, *given, *(() if mu is given[2] else (mu,)))
        op, settings, form = plan.own
        if form:
            u, v = form.factors(u, v, settings[0])
        y = _forward(op, False, settings, _rows(op, x), u, v, mu, index, bias)
        return no_view(y.view(*x.shape[:-1], -1)) if op == LAYER and x.dim() > 2 else y

    @staticmethod
    def backward(ctx, grad, saved):
        op, settings, form = ctx.plan.own
        x, u, v, *of_mu = in_type(grad.dtype, *saved[:5])
        nx, nu, nv, *needed = ctx.needs_input_grad[1:]
        if form:
            (u, v), nu, nv = form.factors(u, v, settings[0]), nu or nv, nu or nv
        given = _rows(op, x), u, v, *of_mu
        dx, du, dv, *rest = _gradients(op, False, settings, _rows(op, grad), given, (nx, nu, nv, *needed))
        if form:
            du, dv = form.gradients(du, dv)
        return None, dx if dx is None else dx.reshape(x.shape), du, dv, *rest


def _rows(op: str, t: Tensor) -> Tensor:
    """t as the op takes it: […, channels] of a linear layer as rows."""
    return as_rows(t) if op == LAYER and t.dim() > 2 else t


class _Conv(torch.autograd.Function):
    """A convolution or linear layer computed from the parts of its weight: `mu` dense, or values with `index`.

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
        own = ctx.op, ctx.clients, ctx.settings
        return None, None, None, *_gradients(*own, grad, ctx.saved_tensors, ctx.needs_input_grad[3:])

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


def _checked(op, layout, x, u, v, mu, index, bias, size, stride, padding, dilation, groups):
    """What the convolutions have in common, checked: (size, stride, padding, dilation, groups, clients, tensors).

    layout: that of u and v.
    """
    size, groups = wholes(op, "size", size, (4,), 1), whole(op, "groups", groups, 1)
    if size[0] % groups:
        raise ValueError(f"{op}: size={size}, groups={groups}: o must be a multiple of groups")
    if (u is None) != (v is None):
        raise ValueError(f"{op}: {'u' if u is None else 'v'} is None: u and v go together")
    name = "mu" if op == FUSED and index is None else "values"
    _check_parts_of_mu(op, mu, index, 4)
    stride, dilation = pair(op, "stride", stride, 1), pair(op, "dilation", dilation, 1)
    padding = pair(op, "padding", padding, 0)
    named = {"x": (x, 4), "u": (u, 3), "v": (v, 3), name: (mu, 4 if index is None else 1), "index": (index, 1)}
    named["bias"] = bias, 1
    clients, (x, u, v, mu, index, bias) = with_clients(op, named, ("u", "v", name, "index", "bias"))
    x, u, v, mu, bias = autocast(x, u, v, mu, bias)
    check_floating(op, "x", x)
    if clients and len(x) == 0:
        raise ValueError(f"{op}: x has shape {list(x.shape)}, must have at least one client")
    channels, h, w = x.shape[clients + 1 :]
    if channels != groups * size[1]:
        raise ValueError(f"{op}: x has {channels} channels, must have groups·i = {groups * size[1]}")
    padded_h, padded_w = h + 2 * padding[0], w + 2 * padding[1]
    steps_h, steps_w = padded_h - dilation[0] * (size[2] - 1) - 1, padded_w - dilation[1] * (size[3] - 1) - 1
    if h == 0 or w == 0 or steps_h < 0 or steps_w < 0:
        raise ValueError(f"{op}: x is {h}×{w}, too small for kernel {size[2:]}, {padding=} and {dilation=}")
    if padded_h * padded_w > LARGEST:
        raise ValueError(f"{op}: {padding=} makes x, {h}×{w}, larger than {LARGEST} pixels")
    check_size(op, (*x.shape[: clients + 1], size[0], steps_h // stride[0] + 1, steps_w // stride[1] + 1))
    check(op, "bias", bias, (size[0],), clients, x)
    check(op, name, mu, size if index is None else index.shape[clients:], clients, x)
    if u is not None:
        check_factors(op, u, v, rank1_shapes(LAYOUTS[layout], size), clients, x)
    if index is not None:
        index = check_index(op, index, x, size, FUSED if op == FUSED else OP)
    return size, stride, padding, dilation, groups, clients, (x, u, v, mu, index, bias)


def multiplies_tiles(dtype: torch.dtype) -> bool:
    """Whether the CPU library, where it is, multiplies tiles of a dense μ in this dtype here."""
    return dtype != torch.float64 and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _check_parts_of_mu(op: str, mu: Tensor | None, index: Tensor | None, dims: int) -> None:
    """μ is values with their index, dense, of so many dimensions or with clients one more, or nothing."""
    if (mu is None and index is not None) or (isinstance(mu, Tensor) and index is None and mu.dim() < dims):
        raise ValueError(
            f"{op}: {'values' if mu is None else 'index'} is None: values and index go together, but for a dense μ"
        )


def of_factors(
    size: tuple[int, ...],
    how: Sequence = (),
    cast: torch.dtype | None = None,
    form: LowRankForm | None = None,
) -> direct.Plan:
    """The plan of a layer that is computed from the factors of a weight of `size`; for a convolution `how` is its
    stride, padding, dilation and groups. cast: see `direct.settings`. form: given if u, v and μ are A, B and σ."""
    kind, op = (direct.CONVOLUTION, OP) if how else (direct.LINEAR, LAYER)
    layout = form.layout if form else SPATIAL if how else LINEAR
    low_rank = (direct.AS_RANK1, form.scaling) if form else direct.NO_LOW_RANK
    numbers = direct.settings(kind, layout, False, size, how, cast, low_rank)
    return direct.Plan(numbers, False, _Apart, (op, (size, *how), form))


def call_of_factors(plan: direct.Plan, u, v, values, index, bias, repeated: bool = False) -> direct.Call:
    """`factored_conv2d` or `factored_linear` (x [n, i]) without the checks of these functions, for layers: nothing may
    transform, nor cast but as the plan says, all tensors must be plain, and the CPU library must serve, which checks
    all it reads."""
    if torch.is_grad_enabled():
        return direct.call(plan, u, v, values, index, bias)
    return direct.Call(direct.factored, (plan.settings, repeated, None, u, v, values, index, bias), 2)


def apply_factors(plan: direct.Plan, x, u, v, values, index, bias, repeated: bool = False) -> Tensor | None:
    """`call_of_factors` for x. None where it is not the CPU library that serves."""
    op, settings, form = plan.own
    if not takes_one(op, x):
        return None
    if torch.is_grad_enabled():
        return direct.apply(plan, x, u, v, values, index, bias)
    y = direct.factored(plan.settings, repeated, x, u, v, values, index, bias) if direct.serves(x) else None
    if y is None:
        x, u, v, values, bias = autocast(x, u, v, values, bias)
        if form:
            u, v = form.factors(u, v, settings[0])
        return implementation(op)(x, u, v, values, index, bias, *settings, *((True,) if repeated else ()))
    return y


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
    """conv2d(x, Σ_r u_r ⊗ v_r + μ, bias), W [o, i, kh, kw] = `size` never made (Factorized-FL eq. 2–3).

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients):
    x [n, groups·i, h, w]; u [r, kh, kw] and v [r, o, i], or neither; values [nnz] and index [nnz], or neither: the
    nonzeros of μ and their flat positions in W, ascending, int32 (int64 is converted at each call), or a dense μ as
    values [o, i, kh, kw] without an index, which pays where few pixels meet W; bias [o]. The result [n, o, oh, ow]
    has the memory format of x; channels_last and contiguous are both served as they are.

    float32, float64, float16 and bfloat16, the last two computed in float32. Differentiable in x, u, v, values and
    bias; the gradient of `values` is computed on the support only. Under autocast the tensors are cast as those of
    PyTorch's convolutions are. Raises ValueError for shapes or dtypes that do not fit, and, on the CPU, for positions
    that are not ascending or not in W; a GPU does not look at them.

    repeated: whether the same v and μ come again, with inputs of this shape. Where no gradient is asked for, the CPU
    kernels then keep both in the order in which they read them: 8 bytes for each nonzero and 4 for each number of v,
    256 MiB in all, those used last. All numbers are read in each call to know that they are the same (a digest of
    64 bits).
    """
    size, *how, clients, (x, u, v, values, index, bias) = _checked(
        OP, "spatial", x, u, v, values, index, bias, size, stride, padding, dilation, groups
    )
    if flag(OP, "repeated", repeated) and values is not None and not transforming() and not torch.is_grad_enabled():
        return call(implementation(OP), clients, (x, u, v, values, index, bias), size, *how, True)
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
    choice(FUSED, "layout", layout, ("spatial", "kernel", "view"))
    if u is None and mu is None:
        raise ValueError(f"{FUSED}: u and v, or mu, must be given")
    size, *how, clients, (x, u, v, mu, index, bias) = _checked(
        FUSED, layout, x, u, v, mu, index, bias, size, stride, padding, dilation, groups
    )
    last = index is None and follows_channels_last(mu)
    return _apply(FUSED, clients, (LAYOUTS[layout], size, last, *how), x, u, v, mu, index, bias)


def _of_pixels(x, u, v, values, index, bias, size, stride, padding) -> Tensor:
    """A 1×1 convolution of x [(k,) n, i, h, w] as the `factored_linear` layer of its pixels: channels_last."""
    if values is not None and index is None:
        values = values.flatten(-3)
    if padding != (0, 0):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    if stride != (1, 1):
        x = x[..., :: stride[0], :: stride[1]]
    return factored_linear(x.movedim(-3, -1), u, v, values, index, bias, size=size).movedim(-1, -3)


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
    on a GPU in `fused_conv2d`. On the CPU float16 is computed in float32: the r channels may need its range.
    """
    op = "separable_conv2d"
    if u is None:
        raise ValueError(f"{op}: u and v must be given")
    size, stride, padding, dilation, groups, clients, (x, u, v, values, index, bias) = _checked(
        op, "kernel", x, u, v, values, index, bias, size, stride, padding, dilation, groups
    )
    if size[2:] == (1, 1) and groups == 1 and not x.is_cuda:
        if not clients and padding == (0, 0) and size[1] > 1 and not torch._C._are_functorch_transforms_active():
            # Images as they lie: in a graph, whose compiler would put them into another order for a linear layer.
            return _apply(OP, False, (size, stride, padding, dilation, groups), x, u, v, values, index, bias)
        last = not is_mapped(x) and formats.is_channels_last(x if clients else x.unsqueeze(0))
        y = _of_pixels(x, u.squeeze(-1), v.squeeze(-1), values, index, bias, size[:2], stride, padding)
        return y if last else y.contiguous()
    (sy, sx), (py, px), (dy, dx) = stride, padding, dilation
    if size[3] == 1:
        # The width's steps are taken first: PyTorch's gradient of a 1×1 convolution of a few channels that steps over
        # the width writes past its memory in channels_last.
        first, second = (stride, padding), ((1, 1), (0, 0))
    else:
        first, second = ((sy, 1), (py, 0)), ((1, sx), (0, px))
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
        mu = v.transpose(-3, -2).unsqueeze(-2)
        return fused_conv2d(hidden, mu=mu, bias=bias, dilation=(1, dx), **how)
    k, images = x.shape[0] if clients else 1, x
    u, v = (t if clients else t.unsqueeze(0) for t in (u, v))
    in_second = None if bias is None or values is not None else bias.flatten()
    wide = x.dtype == torch.float16 and x.is_cpu
    if wide:
        x, u, v, in_second = (t if t is None else t.float() for t in (x, u, v, in_second))
    rank, parts = u.shape[1], k * groups
    # Contiguous: in other formats PyTorch's gradients of a few channels may fail.
    down = u.unsqueeze(1).expand(-1, groups, -1, -1, -1).reshape(parts * rank, size[1], size[2], 1).contiguous()
    across = v.transpose(1, 2).reshape(k * size[0], rank, 1, size[3]).contiguous()
    hidden = x.movedim(0, 1).flatten(1, 2) if clients else x
    with torch.autocast("cpu", enabled=False) if wide else contextlib.nullcontext():
        hidden = F.conv2d(hidden, down, None, *first, (dy, 1), parts)
        out = F.conv2d(hidden, across, in_second, *second, (1, dx), parts)
    out = out.half() if wide else out
    if clients:
        out = out.unflatten(1, (k, size[0])).movedim(1, 0)
    if values is None:
        return out
    how = {"size": size, "stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return out + factored_conv2d(images, None, None, values, index, bias, **how)


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

    x [(k,) …, i], u [(k,) r, i], v [(k,) r, o], values, index [(k,) nnz] and bias [(k,) o] as in `factored_conv2d`
    (a dense μ: values [(k,) o, i]); x has the client axis if any of the others has it. Returns […, o].
    Autocast and what is raised as there.
    """
    op = LAYER
    size = wholes(op, "size", size, (2,), 1)
    if (u is None) != (v is None):
        raise ValueError(f"{op}: u and v go together")
    _check_parts_of_mu(op, values, index, 2)
    named = {"u": (u, 2), "v": (v, 2), "values": (values, 2 if index is None else 1), "index": (index, 1)}
    named["bias"] = bias, 1
    check_tensor(op, "x", x, FLOATING)
    clients = False
    if any(t is not None for t in (u, values, bias)):
        clients, (u, v, values, index, bias) = with_clients(op, named, tuple(named))
    x, u, v, values, bias = autocast(x, u, v, values, bias)
    present = next((t for t in (u, values, bias) if t is not None), None)
    if x.dim() < clients + 1 or x.shape[-1] != size[1] or (clients and len(x) != len(present)):
        wanted = [len(present), "…", size[1]] if clients else ["…", size[1]]
        raise ValueError(f"{op}: x has shape {list(x.shape)}, must be [{', '.join(map(str, wanted))}]")
    if clients and len(x) == 0:
        raise ValueError(f"{op}: x has shape {list(x.shape)}, must have at least one client")
    check_size(op, (*x.shape[:-1], size[0]))
    if u is not None:
        check_factors(op, u, v, rank1_shapes(LINEAR, size), clients, x)
    if values is not None:
        check(op, "values", values, size if index is None else index.shape[clients:], clients, x)
    if index is not None:
        index = check_index(op, index, x, size, LAYER)
    check(op, "bias", bias, (size[0],), clients, x)
    rows = x.flatten(int(clients), -2) if x.dim() > clients + 1 else x.unsqueeze(int(clients))
    out = _apply(LAYER, clients, (size,), rows, u, v, values, index, bias)
    return out.reshape(*x.shape[:-1], size[0])
