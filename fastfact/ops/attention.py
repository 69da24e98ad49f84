"""Attention by the kernel for short sequences, alone and under `vmap`, which takes all clients in one call."""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact.ops.backends import PRODUCTS_ARE_SLOW, implementation, kernel_serves
from fastfact.ops.common import has_amx, has_tangents, recording, transforming

OP, WEIGHTS, BACKWARD = "attention", "attention_weights", "attention_backward"
SHORT = 1 << (17 if PRODUCTS_ARE_SLOW else 14)
"""Up to so many numbers of a head's keys the kernel is no slower than PyTorch's, as measured."""
LEAST = 1 << 21
"""Multiplications of a product of all heads from which on a step is no slower with the kernel: the function around it
takes longer than PyTorch's own by 60–90 µs."""
_VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Alias", "AsStrided", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze"),
        *("T", "Transpose", "Unbind", "Unflatten", "UnsafeView", "Unsqueeze", "View"),
    )
)
"""The nodes of autograd's graph that only look at a tensor otherwise."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` takes these: [n, h, l, d] and [n, h, m, d] on the CPU, float32 or float64, not empty, and a
    mask, if any, that is boolean or of their dtype and takes no gradient."""
    tensors = (query, key, value)
    if not all(t.dim() == 4 and t.device.type == "cpu" and t.dtype == query.dtype and t.numel() for t in tensors):
        return False
    fits = key.shape == value.shape and key.shape[:2] == query.shape[:2] and key.shape[-1] == query.shape[-1]
    if mask is not None:
        fits = fits and mask.dtype in (torch.bool, query.dtype) and not mask.requires_grad and mask.dim() <= 4
    return fits and query.dtype in (torch.float32, torch.float64)


def pays(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel serves such tensors, and is no slower than PyTorch's."""
    return kernel_serves(OP, query) and key.shape[-2] * key.shape[-1] <= SHORT


def pays_in_a_step(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel, where it `pays`, is no slower with a backward pass either, or none is to come."""
    return not query.requires_grad or transforming() or query.numel() * key.shape[-2] >= LEAST


def by_products(query: Tensor, key: Tensor) -> bool:
    """Whether two products, with all scores in memory, take half to all of the time of PyTorch's attention: bfloat16 on
    a CPU without AMX, which that multiplies by, without gradients, [n, h, l, d] and [n, h, m, d] of up to 1024 keys."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or recording() or transforming():
        return False
    fits = query.dim() == 4 and query.is_cpu and query.dtype == torch.bfloat16 and query.numel() > 0
    return fits and 0 < key.shape[-2] <= 1024 and not has_amx()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · query keyᵀ + mask) value, as `F.scaled_dot_product_attention` without dropout, for what `serves`.

    query [n, h, l, d], key and value [n, h, m, d]; mask: True where a query sees a key, or numbers that are added, of a
    shape that expands to [n, h, l, m]; causal: the query at l sees the keys up to place l; scale: 1/√d if not given. A
    query that sees nothing has zeros. Returns [n, h, l, d], in memory [n, l, h, d]. Differentiable, also twice, but for
    the mask; kept for the backward pass are the arguments, what is returned and [n, h, l] numbers. Where queries, keys
    and values are together all of one tensor, it is that which is differentiated, and its gradient is written at once.
    """
    if torch.compiler.is_compiling() or recording() or has_tangents():
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
        mask = mask[(None,) * (4 - mask.dim())]
    how = _How(False, causal, 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale), pays(query, key), None)
    transforms = torch._C._are_functorch_transforms_active()
    if not torch.is_grad_enabled() and not transforms:
        return _forward(how, mask, query, key, value)[0]
    whole, packed = _whole(query, key, value) if how.kernel else (None, None)
    function = _Attention if transforms else _EagerAttention
    if whole is None:
        out = function.apply(how, mask, query, key, value)
    else:
        out = function.apply(how._replace(packed=packed), mask, whole)
    return out[0] if transforms else out


def with_weights(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`attention` and its weights [n, h, l, m], for what `serves` outside of graphs and transforms; no gradients."""
    return implementation(WEIGHTS)(query, key, value, None, False, 1 / math.sqrt(query.shape[-1]))


class _Packed(NamedTuple):
    """How queries, keys and values lie in one contiguous tensor: the sizes of its axes, the places among these of the
    three parts and of n, h, l and d, and which of the three parts is which."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    which: tuple[int, ...]

    def parts(self, whole: Tensor, clients: int) -> list[Tensor]:
        """Queries, keys and values [(k,) n, h, …] in a tensor, which has the client axis if `clients` is 1."""
        axes = whole.reshape(*whole.shape[:clients], *self.sizes)
        parts = axes.permute(*range(clients), *(clients + place for place in self.order)).unbind(clients)
        return [parts[place] for place in self.which]


class _How(NamedTuple):
    """Whether the tensors have the client axis, the settings, whether the kernel serves, and how the tensors lie in the
    one that is given in their place, if it is."""

    clients: bool
    causal: bool
    scale: float
    kernel: bool
    packed: _Packed | None

    def parts(self, tensors) -> list[Tensor]:
        """Queries, keys and values."""
        return list(tensors) if self.packed is None else self.packed.parts(tensors[0], int(self.clients))


def _whole(*tensors: Tensor) -> tuple[Tensor | None, _Packed | None]:
    """The tensor of which these are views and, together, all, and how; None where there is none, or autograd has more
    than views between."""
    base = tensors[0]._base
    if base is None or not base.requires_grad or not base.is_contiguous():
        return None, None
    for tensor in tensors:
        plain = tensor._base is base and tensor.requires_grad and not (tensor._backward_hooks or tensor.retains_grad)
        if not plain or not _is_view(tensor.grad_fn, base):
            return None, None
    first, shape, strides = base.storage_offset(), tensors[0].shape, tensors[0].stride()
    if any(t.shape != shape or t.stride() != strides for t in tensors):
        return None, None
    packed = _packed(tuple(shape), strides, tuple(t.storage_offset() - first for t in tensors), base.numel())
    return (None, None) if packed is None else (base, packed)


def _is_view(node, base: Tensor) -> bool:
    """Whether autograd's graph has nothing but views between a node and a tensor."""
    made = base.grad_fn
    while node is not None and node is not made:
        if made is None and getattr(node, "variable", None) is base:
            return True
        if node.name() not in _VIEWS:
            return False
        node = node.next_functions[0][0]
    return node is not None


@functools.lru_cache
def _packed(shape: tuple[int, ...], strides: tuple[int, ...], places: tuple[int, ...], numel: int) -> _Packed | None:
    """How three parts of one shape at these places are all of a contiguous tensor, None if they are not."""
    begins = sorted(places)
    step = begins[1]
    if begins != [0, step, 2 * step] or not step or (strides[-1] != 1 and shape[-1] > 1):
        return None
    axes = sorted(zip((step, *strides), (3, *shape), range(5), strict=True), reverse=True)
    expected = 1
    for stride, size, _ in reversed(axes):
        if size > 1 and stride != expected:
            return None
        expected *= size
    if expected != numel:
        return None
    order = sorted(range(5), key=lambda place: axes[place][2])
    return _Packed(tuple(size for _, size, _ in axes), tuple(order), tuple(map(begins.index, places)))


def _forward(how: _How, mask: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    tensors = (query, key, value, mask)
    if how.kernel:
        return implementation(OP)(*tensors, how.causal, how.scale)
    query, key, value, mask = _without_clients(how, *tensors)
    out = _flash(query, key, value, 0.0, how.causal, attn_mask=mask, scale=how.scale)
    return tuple(_with_clients(how, tensors[0], *out))


def _backward(how: _How, grad, mask, out, sums, *tensors) -> tuple[Tensor, ...]:
    query, key, value = parts = how.parts(tensors)
    if not how.kernel:
        grad, mask, out, sums, *given = _without_clients(how, grad, mask, out, sums, *parts)
        found = _flash_backward(grad, *given, out, sums, 0.0, how.causal, attn_mask=mask, scale=how.scale)
        return tuple(_with_clients(how, query, *found))
    if how.packed is None:
        found = tuple(map(_with_dense_rows, parts))
        gradients = list(found)
    else:
        found = (torch.empty_like(tensors[0], memory_format=torch.contiguous_format),)
        gradients = how.parts(found)
    implementation(BACKWARD)(grad, query, key, value, mask, out, sums, *gradients, how.causal, how.scale)
    return found


def _with_dense_rows(like: Tensor) -> Tensor:
    """An empty tensor in the memory format of another, if that has the last axis dense."""
    made = torch.empty_like(like)  # rows that overlap are laid out in another order
    return made if made.stride(-1) == 1 else torch.empty_like(like, memory_format=torch.contiguous_format)


def _without_clients(how: _How, *tensors: Tensor | None) -> list[Tensor | None]:
    """Each with the clients in front of its own batch; a mask that serves all keeps one row."""
    if not how.clients:
        return list(tensors)
    k, n = next(t.shape[:2] for t in tensors if t is not None)
    folded = []
    for tensor in tensors:
        if tensor is not None:
            shared = tensor.shape[:2] == (1, 1)
            tensor = tensor[0] if shared else tensor.expand(k, n, *tensor.shape[2:]).flatten(0, 1)
        folded.append(tensor)
    return folded


def _with_clients(how: _How, like: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [t.unflatten(0, like.shape[:2]) for t in tensors] if how.clients else list(tensors)


def _plain(how: _How, mask: Tensor | None, *tensors: Tensor) -> Tensor:
    """The layer in plain PyTorch, differentiable as often as one likes."""
    query, key, value = how.parts(tensors)
    scores = how.scale * (query @ key.mT)
    if mask is not None:
        scores = scores + mask
    if how.causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return torch.ops.aten._safe_softmax(scores, -1) @ value


class _EagerAttention(torch.autograd.Function):
    """`_Attention` where nothing transforms it: a Function without `setup_context` has a third of the overhead."""

    @staticmethod
    def forward(ctx, how, mask, *tensors):
        out, sums = _forward(how, mask, *how.parts(tensors))
        ctx.how = how
        ctx.save_for_backward(mask, out, sums, *tensors)
        return out

    @staticmethod
    def backward(ctx, grad):
        transformed = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        backward = _AttentionBackward.apply if transformed else _backward
        return None, None, *backward(ctx.how, grad, *ctx.saved_tensors)


class _Attention(torch.autograd.Function):
    """Of `how`, a mask, and queries, keys and values or the tensor that holds all three."""

    @staticmethod
    def forward(how, mask, *tensors):
        return _forward(how, mask, *how.parts(tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how, mask, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(mask, *output, *tensors)

    @staticmethod
    def backward(ctx, grad, _):
        return None, None, *_AttentionBackward.apply(ctx.how, grad, *ctx.saved_tensors)

    @staticmethod
    def vmap(info, in_dims, how, *tensors):
        out = _Attention.apply(how._replace(clients=True), *_folded(info.batch_size, in_dims[1:], how, tensors, (0,)))
        return tuple(_unfolded(info.batch_size, how, out)), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    """The backward pass as a Function of its own, so that `vmap` folds it too. What is returned and the sums are
    functions of the others, and their gradients are in theirs."""

    @staticmethod
    def forward(how, grad, mask, out, sums, *tensors):
        return _backward(how, grad, mask, out, sums, *tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how, grad, mask, _, _, *tensors = inputs
        ctx.save_for_backward(mask, grad, *tensors)

    @staticmethod
    def backward(ctx, *grads):
        mask, grad, *tensors = ctx.saved_tensors

        def again(grad, *tensors):
            return torch.func.vjp(functools.partial(_plain, ctx.how, mask), *tensors)[1](grad)

        dgrad, *found = torch.func.vjp(again, grad, *tensors)[1](grads)
        return None, dgrad, None, None, None, *found

    @staticmethod
    def vmap(info, in_dims, how, *tensors):
        folded = _folded(info.batch_size, in_dims[1:], how, tensors, (1,))
        out = _AttentionBackward.apply(how._replace(clients=True), *folded)
        return tuple(_unfolded(info.batch_size, how, out)), (0,) * len(out)


def _folded(batch: int, in_dims, how: _How, tensors, shared) -> list[Tensor | None]:
    """Each with the mapped axis as its client axis, or in it; what is at the places `shared` may keep one client for
    all."""
    folded = []
    for place, (tensor, mapped) in enumerate(zip(tensors, in_dims, strict=True)):
        if tensor is not None:
            one = mapped is None and place in shared and not (how.clients and len(tensor) > 1)
            tensor = tensor.expand(1 if one else batch, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
            if how.clients:
                k = tensors[-1].shape[1 if in_dims[-1] == 0 else 0]
                tensor = (tensor if one else tensor.expand(-1, k, *tensor.shape[2:])).flatten(0, 1)
        folded.append(tensor)
    return folded


def _unfolded(batch: int, how: _How, tensors) -> list[Tensor]:
    return [t.unflatten(0, (batch, -1)) for t in tensors] if how.clients else list(tensors)
