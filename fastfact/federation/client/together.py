"""What PyTorch computes of many clients under `vmap` badly or not at all."""

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastfact.ops.attention import attention, serves
from fastfact.ops.common import is_mapped
from fastfact.ops.norm import batch_norm


class Together(TorchFunctionMode):
    """While active, under `vmap`:

    - `F.scaled_dot_product_attention` on the CPU takes all clients at once; else PyTorch's kernel is called client by
      client. Where `ops.attention` does not serve (dropout, a mask that trains, queries and values of other widths, no
      batch axis) all is as without.
    - `F.batch_norm` by the statistics of the batch is `ops.norm.batch_norm` on a GPU.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.batch_norm:
            return _batch_norm(func, *args, **(kwargs or {}))
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attention(func, *args, **(kwargs or {}))


def _batch_norm(func, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    if not (training and x.is_cuda and is_mapped(x)):
        return func(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}")
    return batch_norm(x, running_mean, running_var, weight, bias, momentum, eps)


def _attention(func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    mapped = any(map(is_mapped, (query, key, value)))
    if dropout_p or any(others.values()) or not mapped or not serves(query, key, value, attn_mask):
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
    return attention(query, key, value, attn_mask, is_causal, scale)
