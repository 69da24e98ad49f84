"""Attention of many clients on the CPU in one call, for which `vmap` calls PyTorch's kernel client by client."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastfact.ops.common import is_mapped

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Together(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` under `vmap` on the CPU takes the clients as a part of the batch.

    Where PyTorch's kernel does not serve (dropout, a mask that trains, queries and values of other widths, no batch
    axis) all is as without."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(func, *args, **(kwargs or {}))


def _attention(func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    tensors = (query, key, value)
    fits = all(t.dim() == 4 and t.device.type == "cpu" and t.shape[-1] == query.shape[-1] for t in tensors)
    fits = fits and key.shape[:2] == query.shape[:2] == value.shape[:2] and not dropout_p and not any(others.values())
    fits = fits and query.dtype in (torch.float32, torch.float64) and any(map(is_mapped, tensors))
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return _Attention.apply(query, key, value, attn_mask, is_causal, scale)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(query, key, value, mask, causal, scale):
        return _forward(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, mask, ctx.causal, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, mask, *output)

    @staticmethod
    def backward(ctx, grad, _):
        return *_AttentionBackward.apply(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None

    @staticmethod
    def vmap(info, in_dims, query, key, value, mask, causal, scale):
        query, key, value, mask = _folded(info.batch_size, in_dims, query, key, value, mask)
        out = _Attention.apply(query, key, value, mask, causal, scale)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in out), (0, 0)


class _AttentionBackward(torch.autograd.Function):
    """The gradient, of which there is none."""

    @staticmethod
    def forward(grad, query, key, value, mask, out, sums, causal, scale):
        return _backward(grad, query, key, value, out, sums, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("the second derivative of attention is not there on the CPU")

    @staticmethod
    def vmap(info, in_dims, grad, query, key, value, mask, out, sums, causal, scale):
        tensors = _folded(info.batch_size, in_dims, grad, query, key, value, mask, out, sums)
        found = _AttentionBackward.apply(*tensors, causal, scale)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in found), (0, 0, 0)


def _folded(batch: int, in_dims, *tensors: Tensor | None) -> list[Tensor | None]:
    """Each with the clients in front of its own batch; a mask that serves all keeps one row."""
    folded = []
    for tensor, mapped in zip(tensors, in_dims, strict=False):
        if tensor is not None and not (mapped is None and tensor.shape[0] == 1):
            tensor = tensor.expand(batch, *tensor.shape) if mapped is None else tensor.movedim(mapped, 0)
            n = tensors[0].shape[0 if in_dims[0] is None else 1] if tensor.shape[1] == 1 else tensor.shape[1]
            tensor = tensor.expand(batch, n, *tensor.shape[2:]).flatten(0, 1)
        folded.append(tensor)
    return folded
