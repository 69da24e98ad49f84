"""The linear layer of a low-rank weight from its parts: σ serves all clients in one product, BA is never made."""

from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.base.formats import FLOATING, LowRankForm
from fastfact.ops import conv, direct, reference
from fastfact.ops.backends import PRODUCTS_ARE_SLOW, implementation, kernel_serves, library_serves
from fastfact.ops.common import (
    as_rows,
    autocast,
    call,
    check,
    check_size,
    check_tensor,
    in_type,
    must_be_plain,
    no_view,
    number,
    transforming,
    unfold,
    with_clients,
)
from fastfact.ops.reference import OWN

OP, BACKWARD = "lowrank_linear", "lowrank_linear_backward"
WIDE = 1 << 24
"""Of how many numbers σ may be for the kernel, which makes a copy of it that beyond takes too much memory."""


class _Measured(NamedTuple):
    """Where the kernel is no slower than PyTorch's products, as measured: where σ has up to `narrow` numbers, up to
    WIDE where `enough` rows repay the copy, and in half precision or not."""

    narrow: int
    enough: int
    half: bool


_OF_AVX2, _OF_SLOW_PRODUCTS = _Measured(1 << 18, 128, True), _Measured(0, 16, False)
_HERE = _OF_SLOW_PRODUCTS if PRODUCTS_ARE_SLOW else None
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    _HERE = _OF_AVX2


def _kernel_pays(op: str, x: Tensor, sigma: Tensor) -> bool:
    """Whether a kernel serves, and is not slower than the reference."""
    if not kernel_serves(op, x) or not library_serves(op, x):
        return kernel_serves(op, x)
    if _HERE is None or sigma.dim() != (2 if x.dim() == 3 else x.dim()):
        return False
    if x.element_size() == 2:
        return _HERE.half
    most = WIDE if x.shape[:-1].numel() >= _HERE.enough else _HERE.narrow
    return sigma.shape[-1] * sigma.shape[-2] <= most


def _plain(x: Tensor, seen: Tensor, sigma: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, scaling: float) -> Tensor:
    """The layer in plain PyTorch, differentiable in everything."""
    # No .mT, which ONNX's older exporter does not know.
    sigma, a, b = (t.transpose(-1, -2) for t in (sigma, a, b))
    y = x @ sigma + scaling * ((seen @ a) @ b)
    return y if bias is None else y + bias.unsqueeze(-2)


def _forward(scaling, x, seen, sigma, a, b, bias):
    """(y, hidden), hidden = scaling · seen aᵀ."""
    tensors = x, seen, sigma, a, b, bias
    if _kernel_pays(OP, x, sigma):
        return call(implementation(OP), x.dim() == 3, tensors, scaling)
    return reference.lowrank_linear(*tensors, scaling)


def _backward(scaling, needs, grad, *tensors):
    """(dx, dseen, da, db) from grad = dy and seen, σ, a, b, hidden."""
    if _kernel_pays(BACKWARD, grad, tensors[1]):
        return call(implementation(BACKWARD), grad.dim() == 3, (grad, *tensors), scaling, needs)
    return reference.lowrank_linear_backward(grad, *tensors, scaling, needs)


def _plain_backward(scaling, needs, grad, seen, sigma, a, b):
    """`_backward` without writing to what it made, differentiable."""
    dhidden = scaling * (grad @ b)
    adapter, none = dhidden @ a, grad.new_zeros(0)
    dx = grad @ sigma if needs & OWN else grad @ sigma + adapter
    da, db = dhidden.mT @ seen, scaling * (grad.mT @ (seen @ a.mT))
    return tuple(t if needs >> bit & 1 else none for bit, t in enumerate((dx, adapter, da, db)))


def _gradients(ctx, grad):
    """What `backward` returns."""
    _, x, own, _, a, b, bias = ctx.needs_input_grad
    needs = x | own << 1 | a << 2 | b << 3 | (OWN if ctx.own else 0)
    found = [None] * 4
    if x or own or a or b:
        transformed = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        backward = _LowRankBackward.apply if transformed else _backward
        out = backward(ctx.scaling, needs, grad, *ctx.saved_tensors)
        found = [g if needs >> bit & 1 else None for bit, g in enumerate(out)]
    dx, dseen, da, db = found
    return None, dx, dseen, None, da, db, grad.sum(-2) if bias else None


class _EagerLowRank(torch.autograd.Function):
    """`_LowRank` where nothing transforms it: a Function without `setup_context` has a third of the overhead."""

    @staticmethod
    def forward(ctx, scaling, x, seen, sigma, a, b, bias):
        y, hidden = _forward(scaling, x, seen, sigma, a, b, bias)
        ctx.scaling, ctx.own = scaling, seen is not None
        ctx.save_for_backward(seen if ctx.own else x, sigma, a, b, hidden)
        return y

    @staticmethod
    def backward(ctx, grad):
        return _gradients(ctx, grad)


class _LowRank(torch.autograd.Function):
    """The layer with σ frozen. Of activations it keeps what the adapter sees, and hidden [(k,) n, r]."""

    @staticmethod
    def forward(scaling, x, seen, sigma, a, b, bias):
        return _forward(scaling, x, seen, sigma, a, b, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scaling, x, seen, sigma, a, b, _ = inputs
        ctx.own = seen is not None
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(seen if ctx.own else x, sigma, a, b, output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(info, in_dims, scaling, *tensors):
        clients = _dims(tensors[0], in_dims[1]) == 3
        out = _LowRank.apply(
            scaling, *_folded(info.batch_size, in_dims[1:], clients, tensors, (2, 2, 2, 2, 2, 1), (2, 5))
        )
        return tuple(t.unflatten(0, (info.batch_size, -1)) if clients else t for t in out), (0, 0)


class _LowRankBackward(torch.autograd.Function):
    """The backward pass as a Function of its own, so that `vmap` folds it too. hidden is a function of the others, and
    its gradient is in theirs."""

    @staticmethod
    def forward(scaling, needs, grad, seen, sigma, a, b, hidden):
        return _backward(scaling, needs, grad, seen, sigma, a, b, hidden)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scaling, ctx.needs, grad, seen, sigma, a, b, _ = inputs
        ctx.save_for_backward(grad, seen, sigma, a, b)

    @staticmethod
    def backward(ctx, *grads):
        grad, seen, sigma, a, b = ctx.saved_tensors

        def again(grad, seen, a, b):
            return _plain_backward(ctx.scaling, ctx.needs, grad, seen, sigma, a, b)

        dgrad, dseen, da, db = torch.func.vjp(again, grad, seen, a, b)[1](grads)
        return None, None, dgrad, dseen, None, da, db, None

    @staticmethod
    def vmap(info, in_dims, scaling, needs, *tensors):
        clients = _dims(tensors[0], in_dims[2]) == 3
        folded = _folded(info.batch_size, in_dims[2:], clients, tensors, (2, 2, 2, 2, 2, 2), common=(2,))
        return unfold(info.batch_size, clients, needs, _LowRankBackward.apply(scaling, needs, *folded))


class _Adapter:
    """The layer with σ frozen by the ops, for one client, for `direct.Plan`. index: what the adapter sees in place of
    x, or None; backward it is what was saved for x, too."""

    @staticmethod
    def forward(ctx, plan, x, u, v, mu, index, bias):
        ctx.plan, given = plan, (u, v, mu, index, bias)
        x, u, v, sigma, seen, bias = autocast(x, u, v, mu, index, bias)
        ctx.save_for_backward(x if seen is None else seen, *given, *(() if sigma is mu else (sigma,)))
        _, _, form = plan.own
        seen = seen if seen is None else as_rows(seen, 0)
        y, _ = _forward(form.scaling, as_rows(x, 0), seen, sigma, *form.matrices(u, v), bias)
        return no_view(y.view(*x.shape[:-1], -1))

    @staticmethod
    def backward(ctx, grad, saved):
        seen, u, v, sigma = in_type(grad.dtype, *saved[:4])
        _, _, form = ctx.plan.own
        rows, of_y, own = as_rows(seen, 0), as_rows(grad, 0), saved[4] is not None
        needs = 15 | (OWN if own else 0)
        dx, dseen, da, db = _plain_backward(form.scaling, needs, of_y, rows, sigma, *form.matrices(u, v))
        dx, dseen = (d.view(seen.shape) for d in (dx, dseen))
        found = dx, *form.matrices(da, db), None, dseen if own else None, of_y.sum(0)
        return None, *(one if need else None for one, need in zip(found, ctx.needs_input_grad[1:], strict=True))


def _dims(tensor: Tensor, mapped: int | None) -> int:
    return tensor.dim() - (mapped is not None)


def _folded(batch: int, in_dims, clients: bool, tensors, dims, common) -> list[Tensor | None]:
    """As `fold`, but what stands at the places `common` stays without the client axis where nobody has his own.

    dims: of each tensor without the client axis."""
    folded, k = [], None
    for place, (tensor, mapped, plain) in enumerate(zip(tensors, in_dims, dims, strict=True)):
        if tensor is not None and (mapped is not None or place not in common or tensor.dim() > plain):
            shared = _dims(tensor, mapped) == plain
            tensor = tensor.expand(batch, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
            if clients:
                k = tensor.shape[1] if k is None else k  # the first is x or a gradient, which has the client axis
                tensor = (tensor.unsqueeze(1).expand(-1, k, *tensor.shape[1:]) if shared else tensor).flatten(0, 1)
        folded.append(tensor)
    return folded


def lowrank_linear(
    x: Tensor,
    sigma: Tensor,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scaling: float = 1.0,
    seen: Tensor | None = None,
) -> Tensor:
    """x σᵀ + scaling · (seen aᵀ) bᵀ + bias: a linear layer with the weight σ + scaling · b a, which is never made
    (LoRA, Hu et al. 2022, eq. 3; FedDecomp eq. 2–4).

    Shapes, each with an optional leading client axis k (a tensor without it is shared by all clients): x [(k,) …, i],
    σ [o, i], a [r, i], b [o, r], bias [o]; x has the client axis if any of the others has it. seen: what the adapter
    sees in place of x, of its shape (x after dropout). Returns […, o].

    A σ that all clients share takes all their rows in one product. Where σ takes no gradient, what is kept for the
    backward pass is `seen` (or x), the thin product with a, and the parameters; dσ is not computed.

    float32, float64, float16 and bfloat16. Differentiable, also twice, in all tensors. Under autocast they are cast as
    those of `F.linear` are. Raises ValueError for shapes or dtypes that do not fit.
    """
    scaling = number(OP, "scaling", scaling)
    check_tensor(OP, "x", x, FLOATING)
    named = {"sigma": (sigma, 2), "a": (a, 2), "b": (b, 2), "bias": (bias, 1)}
    clients, (_, a, b, own_bias) = with_clients(OP, named, ("bias",))
    shared = clients and sigma.dim() == 2
    if bias is None or bias.dim() > 1 or bias.requires_grad:
        bias = own_bias
    x, sigma, a, b, bias, seen = autocast(x, sigma, a, b, bias, seen)
    (o, i), r = sigma.shape[-2:], a.shape[-2]
    check(OP, "sigma", sigma, (o, i), clients and not shared, x)
    check(OP, "a", a, (r, i), clients, x)
    check(OP, "b", b, (o, r), clients, x)
    check(OP, "bias", bias, (o,), bias is not None and bias.dim() > 1, x)
    if x.dim() < clients + 1 or x.shape[-1] != i or (clients and len(x) != len(a)):
        wanted = [len(a), "…", i] if clients else ["…", i]
        raise ValueError(f"{OP}: x has shape {list(x.shape)}, must be [{', '.join(map(str, wanted))}]")
    if seen is not None:
        check_tensor(OP, "seen", seen)
        check(OP, "seen", seen, x.shape, False, x)
    check_size(OP, (*x.shape[:-1], o))
    rows, seen = (t if t is None else as_rows(t, int(clients)) for t in (x, seen))
    y = _linear(rows, seen, sigma, a, b, bias, scaling)
    return y.reshape(*x.shape[:-1], o)


def layer(x, sigma, a, b, bias=None, *, scaling: float = 1.0, seen=None) -> Tensor:
    """`lowrank_linear` of one client without its checks, for layers, whose tensors fit by construction."""
    x, sigma, a, b, bias, seen = autocast(x, sigma, a, b, bias, seen)
    rows, seen = (t if t is None else as_rows(t, 0) for t in (x, seen))
    y = _linear(rows, seen, sigma, a, b, bias, scaling)
    y = y.view(*x.shape[:-1], y.shape[-1])
    return y if transforming() or must_be_plain() else no_view(y)


def is_plan(x: Tensor, sigma: Tensor) -> bool:
    """Whether `plan` serves x no slower than this module's other ways."""
    return library_serves(conv.LAYER, x) and not _kernel_pays(OP, x, sigma)


def plan(size: tuple[int, ...], form: LowRankForm, cast: torch.dtype | None) -> direct.Plan:
    """The plan of a linear layer of A, B and a σ that takes no gradient, for `conv.call_of_factors` and
    `conv.apply_factors`; their index is what the adapter sees in place of x, or None."""
    numbers = direct.settings(direct.LINEAR, form.layout, False, size, (), cast, (direct.ADAPTER, form.scaling))
    return direct.Plan(numbers, False, _Adapter, (conv.LAYER, (size,), form))


def _takes_sigma(x: Tensor, sigma: Tensor, a: Tensor) -> bool:
    """Whether σ can be the dense μ of a factored layer that the CPU library computes."""
    if x.dim() != 2 or sigma.dim() != 2 or transforming() or must_be_plain() or not (sigma.numel() and len(a)):
        return False
    return conv.multiplies_tiles(x.dtype) and library_serves(conv.LAYER, x)


def _linear(x, seen, sigma, a, b, bias, scaling: float) -> Tensor:
    """The layer for x and seen [(k,) n, i]."""
    if sigma.requires_grad and seen is None and _takes_sigma(x, sigma, a):
        return conv.factored_linear(x, a, scaling * b.mT, sigma, None, bias, size=tuple(sigma.shape))
    if sigma.requires_grad or must_be_plain():
        return _plain(x, x if seen is None else seen, sigma, a, b, bias, scaling)
    if transforming():
        return _LowRank.apply(scaling, x, seen, sigma, a, b, bias)[0]
    if torch.is_grad_enabled():
        return _EagerLowRank.apply(scaling, x, seen, sigma, a, b, bias)
    return _forward(scaling, x, seen, sigma, a, b, bias)[0]
