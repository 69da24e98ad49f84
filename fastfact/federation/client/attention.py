"""What PyTorch computes of many clients under `vmap` badly or not at all."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastfact.ops.attention import attention, serves
from fastfact.ops.common import is_mapped


class Together(TorchFunctionMode):
    """While active, under `vmap`:

    - `F.scaled_dot_product_attention` on the CPU takes all clients at once; else PyTorch's kernel is called client by
      client. Where `ops.attention` does not serve (dropout, a mask that trains, queries and values of other widths, no
      batch axis) all is as without.
    - `F.batch_norm` is PyTorch's own: the gradient of cuDNN's cannot be taken of images in channels_last.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.batch_norm:
            return _without_cudnn(func, *args, **(kwargs or {}))
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(func, *args, **(kwargs or {}))


def _without_cudnn(func, *args, **kwargs):
    before = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        return func(*args, **kwargs)
    finally:
        torch._C._set_cudnn_enabled(before)


def _attention(func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    mapped = any(map(is_mapped, (query, key, value)))
    if dropout_p or any(others.values()) or not mapped or not serves(query, key, value, attn_mask):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
    return attention(query, key, value, attn_mask, is_causal, scale)
