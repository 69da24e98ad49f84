"""Attention of many clients on the CPU in one call, for which `vmap` calls PyTorch's kernel client by client."""

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastfact.ops.attention import attention, serves
from fastfact.ops.common import is_mapped


class Together(TorchFunctionMode):
    """While active, `F.scaled_dot_product_attention` under `vmap` on the CPU takes all clients at once.

    Where `ops.attention` does not serve (dropout, a mask that trains, queries and values of other widths, no batch
    axis) all is as without."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(func, *args, **(kwargs or {}))


def _attention(func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    mapped = any(map(is_mapped, (query, key, value)))
    if dropout_p or any(others.values()) or not mapped or not serves(query, key, value, attn_mask):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
    return attention(query, key, value, attn_mask, is_causal, scale)
