"""The weight ops: W from its factors, differentiable.

One `autograd.Function` serves them all; its `vmap` rule folds a mapped axis into the client axis.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact.base.formats import LAYOUTS, LINEAR, lowrank_shape, rank1_size
from fastfact.ops import direct, reference
from fastfact.ops.backends import implementation, takes_one
from fastfact.ops.common import (
    autocast,
    call,
    check,
    check_factors,
    check_floating,
    check_index,
    check_size,
    choice,
    flag,
    fold,
    in_type,
    is_channels_last,
    must_be_plain,
    no_view,
    number,
    transforming,
    unfold,
    wholes,
    with_clients,
)


class WeightOp(NamedTuple):
    """A weight op and what it is asked for besides tensors; `clients`: whether these have the client axis."""

    op: str
    clients: bool
    settings: tuple
    channels_last: bool


def _as_they_are(op: str, factor: Tensor) -> bool:
    return not transforming() and takes_one(op, factor)


def _forward(how, dense, f1, f2, f3, f4):
    op, clients, settings, channels_last = how
    tensors = (dense, f1, f2) if f3 is None else (f1, f2, f3, f4)
    return call(implementation(op), clients or _as_they_are(op, f1), tensors, *settings, channels_last)


def _backward(how, needs, grad, f1, f2, f3, f4):
    op, clients, settings, _ = how
    tensors = (grad, f1, f2) if f3 is None else (grad, f1, f2, f3, f4)
    return call(implementation(op + "_backward"), clients or _as_they_are(op, f1), tensors, *settings, needs)


def _gradients(how, needed, grad, factors):
    """The gradients of `dense`, which is dW, and of the four factors, of those that are `needed`."""
    dense, n1, n2, n3, n4 = needed
    g1 = g2 = g3 = g4 = None
    if n1 or n2 or n3 or n4:
        needs = n1 | n2 << 1 | n3 << 2 | n4 << 3
        transformed = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        backward = _WeightBackward.apply if transformed else _backward
        g1, g2, g3, g4 = (*backward(how, needs, grad, *factors), None, None)[:4]
    return grad if dense else None, g1 if n1 else None, g2 if n2 else None, g3 if n3 else None, g4 if n4 else None


class _EagerWeight(torch.autograd.Function):
    """`_Weight` where nothing transforms it: a Function without `setup_context` has a third of the overhead."""

    @staticmethod
    def forward(ctx, how, dense, f1, f2, f3, f4):
        ctx.how = how
        ctx.save_for_backward(f1, f2, f3, f4)
        return _forward(how, dense, f1, f2, f3, f4)

    @staticmethod
    def backward(ctx, grad):
        return None, *_gradients(ctx.how, ctx.needs_input_grad[1:], grad, ctx.saved_tensors)


class _Weight(torch.autograd.Function):
    """A weight op: `dense` (μ or σ, or None) plus a product of two or four factors; of `compact_weight` the four are
    u, v, and μ as values with their index.

    The signatures are fixed (no `*factors`) because torch.compile counts the parameters of `forward`.
    """

    @staticmethod
    def forward(how, dense, f1, f2, f3, f4):
        return _forward(how, dense, f1, f2, f3, f4)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how = inputs[0]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx, grad):
        return None, *_gradients(ctx.how, ctx.needs_input_grad[1:], grad, ctx.saved_tensors)

    @staticmethod
    def vmap(info, in_dims, how, *tensors):
        tensors = fold(info.batch_size, in_dims[1:], how.clients, tensors)
        out = _Weight.apply(how._replace(clients=True), *tensors)
        return out.unflatten(0, (info.batch_size, -1)) if how.clients else out, 0


class _WeightBackward(torch.autograd.Function):
    """The backward op as a Function of its own, so that `vmap` folds it too. Its own gradient is that of the reference,
    in plain PyTorch: it is asked for by attacks on gradients and by second-order methods, not in training.
    """

    @staticmethod
    def forward(how, needs, grad, f1, f2, f3, f4):
        return _backward(how, needs, grad, f1, f2, f3, f4)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how, ctx.needs = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx, *grads):
        op, clients, settings, _ = ctx.how
        function = getattr(reference, op + "_backward")
        tensors = [t for t in ctx.saved_tensors if t is not None]
        floating = [t for t in tensors if t.is_floating_point()]
        constant = tensors[len(floating) :]

        def again(*floating):
            return call(function, clients, (*floating, *constant), *settings, ctx.needs)

        out = torch.func.vjp(again, *floating)[1](grads[: len(floating) - 1])
        return (None, None, *out, *[None] * (5 - len(floating)))

    @staticmethod
    def vmap(info, in_dims, how, needs, *tensors):
        tensors = fold(info.batch_size, in_dims[2:], how.clients, tensors)
        out = _WeightBackward.apply(how._replace(clients=True), needs, *tensors)
        return unfold(info.batch_size, how.clients, needs, out)


def weight(how: WeightOp, dense, f1, f2, f3=None, f4=None) -> Tensor:
    """A weight op without the checks of its public function, for layers, whose factors fit by construction."""
    if not transforming():
        if not torch.is_grad_enabled():
            return _forward(how, dense, f1, f2, f3, f4)
        return _EagerWeight.apply(how, dense, f1, f2, f3, f4)
    if must_be_plain():
        tensors = (dense, f1, f2) if f3 is None else (f1, f2, f3, f4)
        return call(getattr(reference, how.op), how.clients, tensors, *how.settings, how.channels_last)
    return _Weight.apply(how, dense, f1, f2, f3, f4)


class Convolution(NamedTuple):
    """The settings of a 2-d convolution."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


PIXELS = "pixels"
"""In place of settings: a 1×1 convolution as one product of its pixels, see `pixels`."""


def are_rows(x: Tensor) -> bool:
    """Whether each pixel of x [n, c, h, w] is a row of c numbers in memory, one after the other, in no other format."""
    if x.is_contiguous() and x.shape[2:] != (1, 1):
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> Tensor:
    x = x.contiguous(memory_format=torch.channels_last)
    n, c, h, w = x.shape
    return x.as_strided((n * h * w, c), (c, 1))


def _of_rows(x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The images whose pixels are the rows of a b + bias, of the size and format of x [n, c, h, w]."""
    y = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    (n, _, h, w), c = x.shape, b.shape[1]
    gap = 1 if h == w == x.stride(3) == 1 else c
    # In place, as no view: that is not for everybody to write to.
    return y.as_strided_((n, c, h, w), (h * w * c, 1, w * gap, gap))


def pixels(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """conv2d(x, weight, bias) with weight [o, i, 1, 1] and neither stride nor padding, as one matrix product, without a
    graph. x [n, i, h, w] on the CPU, its pixels rows in memory (`are_rows`). PyTorch's convolutions take up to seven
    times as long for small images, and are seldom faster."""
    return _of_rows(x, _rows(x), weight.flatten(1).t(), bias)


def _dense_layer(x, weight, bias, settings: Convolution | str | None):
    if settings is None:
        return F.linear(x, weight, bias)
    if settings == PIXELS:
        return F.conv2d(x, weight, bias) if torch.is_grad_enabled() else pixels(x, weight, bias)
    return F.conv2d(x, weight, bias, *settings)


class LayerPlan(NamedTuple):
    """A convolution (`PIXELS`: as `pixels`) or, without settings, linear layer with the weight that `how` makes."""

    settings: Convolution | str | None
    how: WeightOp
    plan: direct.Plan | None


def plan_layer(
    settings: Convolution | str | None,
    how: WeightOp,
    size: tuple[int, ...],
    cast: torch.dtype | None = None,
    support: Tensor | None = None,
    on_cpu: bool = False,
) -> LayerPlan:
    """The plan for a weight of `size`. cast: see `direct.settings`, support: `direct.Plan`; of the ops of `Rank1`
    and, on the CPU, of `LowRank`."""
    plan, (layout, *rest) = None, how.settings
    low_rank = how.op == "lowrank_weight" and on_cpu
    if (low_rank or how.op in ("rank1_weight", "compact_weight")) and not how.clients:
        kind = direct.LINEAR if settings is None else direct.PIXELS if settings == PIXELS else direct.CONVOLUTION
        own = settings if isinstance(settings, Convolution) else ()
        of = (direct.AS_RANK1, rest[-1]) if low_rank else direct.NO_LOW_RANK
        numbers = direct.settings(kind, layout, how.channels_last, size, own, cast, of)
        plan = direct.Plan(numbers, True, _Made, (settings, how), support)
    return LayerPlan(settings, how, plan)


def _layer_gradients(settings, grad, x, made, bias, needed):
    """The gradients of x, W and the bias, of those that are `needed`, of `_dense_layer`."""
    nx, nw, nb = needed
    if settings is None:
        dx = grad.matmul(made) if nx else None
        rows, inputs = (grad, x) if x.dim() == 2 else (grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1]))
        return dx, rows.t().mm(inputs) if nw else None, rows.sum(0) if nb else None
    if settings == PIXELS:
        rows = _rows(grad)
        dx = _of_rows(x, rows, made.flatten(1)) if nx else None
        return dx, rows.t().mm(_rows(x)).view(made.shape) if nw else None, rows.sum(0) if nb else None
    stride, padding, dilation, groups = settings
    sizes = None if bias is None else bias.shape
    how = (sizes, stride, padding, dilation, False, (0, 0), groups, needed)
    return torch.ops.aten.convolution_backward.default(grad, x, made, *how)


def _differentiable(y, inputs, needed, grad):
    """The gradients of `inputs`, of those that are `needed`, with a graph of their own."""
    asked = [t for t, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(y, asked, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


class _PlannedLayer(torch.autograd.Function):
    """`LayerPlan` as one node: a second one, of PyTorch's own, takes as long as a small layer computes."""

    @staticmethod
    def forward(ctx, of, x, bias, dense, f1, f2, f3, f4):
        made = _forward(of.how, dense, f1, f2, f3, f4)
        ctx.of = of
        ctx.save_for_backward(x, made, bias, dense, f1, f2, f3, f4)
        return no_view(_dense_layer(x, made, bias, of.settings))

    @staticmethod
    def backward(ctx, grad):
        x, made, bias, dense, *factors = ctx.saved_tensors
        of, (_, nx, nb, *of_weight) = ctx.of, ctx.needs_input_grad
        if torch.is_grad_enabled():
            y = _dense_layer(x, _EagerWeight.apply(of.how, dense, *factors), bias, of.settings)
            return None, *_differentiable(y, (x, bias, dense, *factors), ctx.needs_input_grad[1:], grad)
        dx, dw, db = _layer_gradients(of.settings, grad, x, made, bias, (nx, any(of_weight), nb))
        return None, dx, db, *_gradients(of.how, of_weight, dw, factors)


def _parts(u, v, mu, index):
    """Factors as the weight ops take them."""
    return (mu, u, v, None, None) if index is None else (None, u, v, mu, index)


class _Made:
    """`LayerPlan` of u, v and μ, or A, B and σ, by the ops, for `direct.Plan`."""

    @staticmethod
    def forward(ctx, plan, x, u, v, mu, index, bias):
        settings, how = plan.own
        ctx.plan, given = plan, (x, u, v, mu, index, bias)
        x, u, v, mu, bias = autocast(x, u, v, mu, bias)
        made = _forward(how, *_parts(u, v, mu, index))
        ctx.save_for_backward(*given, made)
        return no_view(_dense_layer(x, made, bias, settings))

    @staticmethod
    def backward(ctx, grad, saved):
        x, u, v, mu, index, bias, made = in_type(grad.dtype, *saved)
        (settings, how), (dense, *factors) = ctx.plan.own, _parts(u, v, mu, index)
        _, nx, nu, nv, nmu, _, nb = ctx.needs_input_grad
        if torch.is_grad_enabled():
            y = _dense_layer(x, _EagerWeight.apply(how, dense, *factors), bias, settings)
            return None, *_differentiable(y, saved[:6], ctx.needs_input_grad[1:], grad)
        dx, dw, db = _layer_gradients(settings, grad, x, made, bias, (nx, nu or nv or nmu, nb))
        if index is None:
            dmu, du, dv, *_ = _gradients(how, (nmu, nu, nv, False, False), dw, factors)
        else:
            _, du, dv, dmu, _ = _gradients(how, (False, nu, nv, nmu, False), dw, factors)
        return None, dx, du, dv, dmu, None, db


def call_of(of: LayerPlan, bias, dense, f1, f2, f3=None, f4=None) -> direct.Call:
    """A layer with the weight that a weight op makes of these tensors, and this bias, as one node of the graph. Nothing
    may transform, nor cast but as `of` says, all tensors must be plain, of one type, on one device."""
    if of.plan is None:
        return direct.Call(_PlannedLayer.apply, (of, None, bias, dense, f1, f2, f3, f4), 1)
    return direct.call(of.plan, f1, f2, dense if f4 is None else f3, f4, bias)


def apply_weight(of: LayerPlan, x, bias, dense, f1, f2, f3=None, f4=None) -> Tensor:
    """`call_of` for x, for layers in training that no node serves."""
    if of.plan is None:
        return _PlannedLayer.apply(of, x, bias, dense, f1, f2, f3, f4)
    return direct.apply(of.plan, x, f1, f2, dense if f4 is None else f3, f4, bias)


def _layout(op: str, layout: str, allowed: tuple[str, ...]) -> int:
    choice(op, "layout", layout, allowed)
    return LAYOUTS[layout]


def follows_channels_last(dense: Tensor | None) -> bool:
    """Whether `dense` [(k,) o, i, kh, kw] is laid out channels_last (and not contiguous as well)."""
    if dense is None or dense.dim() < 4:
        return False
    if dense.dim() == 5:
        return len(dense) > 0 and follows_channels_last(dense[0])
    return not dense.is_contiguous() and is_channels_last(dense)


def rank1_weight(
    u: Tensor,
    v: Tensor,
    mu: Tensor | None = None,
    index: Tensor | None = None,
    *,
    layout: str = "spatial",
    channels_last: bool | None = None,
) -> Tensor:
    """W = Σ_r u_r ⊗ v_r + μ (Factorized-FL eq. 2–3; SimFed for `kernel`).

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients):

    | layout | u | v | W and μ |
    |---|---|---|---|
    | `linear` | r, i | r, o | o, i — W[o, i] = u[i] v[o] |
    | `spatial` | r, kh, kw | r, o, i | o, i, kh, kw — W[o, i, ky, kx] = u[ky, kx] v[o, i] |
    | `kernel` | r, i, kh | r, o, kw | o, i, kh, kw — W[o, i, ky, kx] = u[i, ky] v[o, kx] |
    | `view` | r, kh, kw | r, o, i | the [kh·kw, o·i] matrix u vᵀ read as o, i, kh, kw (the official code's order) |

    μ is of the shape of W or, with an `index`, its values [nnz] at these flat positions [nnz] in W, ascending, int32
    (int64 is converted at each call); a GPU does not look at them, and a dense μ is never made there.

    `channels_last` chooses the memory format of W; by default that of a dense μ. All tensors but the index share one
    floating dtype (float16 and bfloat16 accumulate in float32) and device. Raises ValueError for shapes or dtypes that
    do not fit.
    """
    op = "rank1_weight"
    channels_last = channels_last if channels_last is None else flag(op, "channels_last", channels_last)
    if index is not None and mu is None:
        raise ValueError(f"{op}: index goes together with the values of mu, which are None")
    code = _layout(op, layout, ("linear", "spatial", "kernel", "view"))
    dims, weight_dims = (2, 2) if code == LINEAR else (3, 4)
    mu_dims = weight_dims if index is None else 1
    named = {"mu": (mu, mu_dims), "index": (index, 1), "u": (u, dims), "v": (v, dims)}
    clients, (mu, index, u, v) = with_clients(op, named, ("mu", "index"))
    us, vs = u.shape[clients + 1 :], v.shape[clients + 1 :]
    check_floating(op, "u", u)
    check_factors(op, u, v, (us, vs), clients, u)
    size = rank1_size(code, us, vs)
    check_size(op, (*u.shape[:clients], *size))
    check(op, "mu", mu, size if index is None else index.shape[clients:], clients, u)
    if index is not None:
        how = WeightOp("compact_weight", clients, (code,), bool(channels_last))
        return weight(how, None, u, v, mu, check_index(op, index, u, size, how.op))
    if channels_last is None:
        channels_last = follows_channels_last(mu)
    return weight(WeightOp(op, clients, (code,), channels_last), mu, u, v)


def lowrank_weight(
    sigma: Tensor | None,
    a: Tensor,
    b: Tensor,
    size: tuple[int, ...],
    *,
    layout: str = "separable",
    scaling: float = 1.0,
    channels_last: bool | None = None,
) -> Tensor:
    """W = σ + scaling · reshape(B A) (FedDecomp eq. 2–4), `size` = (o, i, kh, kw) or (o, i).

    Shapes, each with an optional leading client axis: σ and W `size`;
    `separable` b [i·kh, r], a [r, o·kw], W[o, i, ky, kx] = σ + (BA)[i·kh + ky, o·kw + kx] (linear: W = σ + (BA)ᵀ);
    `view` b [o·kh, r], a [r, i·kw], W = σ + (BA).view(size) as LoRA code has it (linear: W = σ + BA).
    Memory format, dtypes and errors as for `rank1_weight`, with σ in μ's place.
    """
    op = "lowrank_weight"
    channels_last = channels_last if channels_last is None else flag(op, "channels_last", channels_last)
    code = _layout(op, layout, ("separable", "view"))
    size = wholes(op, "size", size, (2, 4), 0)
    scaling = number(op, "scaling", scaling)
    clients, (sigma, a, b) = with_clients(op, {"sigma": (sigma, len(size)), "a": (a, 2), "b": (b, 2)}, ("sigma",))
    check_floating(op, "a", a)
    check_size(op, (*a.shape[:clients], *size))
    rows, columns = lowrank_shape(code, size)
    rank = a.shape[-2]
    check(op, "a", a, (rank, columns), clients, a)
    check(op, "b", b, (rows, rank), clients, a)
    check(op, "sigma", sigma, size, clients, a)
    if channels_last is None:
        channels_last = follows_channels_last(sigma)
    return weight(WeightOp(op, clients, (code, size, scaling), channels_last), sigma, a, b)


def hadamard_weight(
    x1: Tensor,
    y1: Tensor,
    x2: Tensor,
    y2: Tensor,
    size: tuple[int, ...],
    *,
    personalized: bool = False,
    channels_last: bool = False,
) -> Tensor:
    """W = (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ) (FedPara, Proposition 1), or (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ + 1) if `personalized` (pFedPara).

    x1, x2 [o, r] and y1, y2 [n, r] with n = i·kh·kw or i, each with an optional leading client axis;
    the ranks of the two products may differ. `size`, memory format, dtypes and errors as for `lowrank_weight`.
    """
    op = "hadamard_weight"
    size = wholes(op, "size", size, (2, 4), 0)
    named = {"x1": (x1, 2), "y1": (y1, 2), "x2": (x2, 2), "y2": (y2, 2)}
    clients, (x1, y1, x2, y2) = with_clients(op, named)
    check_floating(op, "x1", x1)
    check_size(op, (*x1.shape[:clients], *size))
    columns = math.prod(size[1:])
    check(op, "x1", x1, (size[0], x1.shape[-1]), clients, x1)
    check(op, "y1", y1, (columns, x1.shape[-1]), clients, x1)
    check(op, "x2", x2, (size[0], x2.shape[-1]), clients, x1)
    check(op, "y2", y2, (columns, x2.shape[-1]), clients, x1)
    settings = size, flag(op, "personalized", personalized)
    return weight(WeightOp(op, clients, settings, flag(op, "channels_last", channels_last)), None, x1, y1, x2, y2)
