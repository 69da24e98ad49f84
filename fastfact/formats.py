"""What the reference and the kernels agree on: layouts of factors, memory formats, types and scales of values."""

import torch
from torch import Tensor

LAYOUTS = {"linear": 0, "spatial": 1, "kernel": 2, "view": 3, "separable": 4}
VALUE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

LINEAR, SPATIAL, KERNEL, VIEW, SEPARABLE = range(5)


def to_format(weight: Tensor, channels_last: bool) -> Tensor:
    """`weight` [k, o, i, ky, kx] (or [k, o, i]) with each client's slice contiguous in the format asked for."""
    if weight.dim() < 5 or not channels_last:
        return weight.contiguous()
    return weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def is_channels_last(x: Tensor) -> bool:
    """Whether the images of each client of `x` [k, n, c, h, w] are channels_last and not contiguous."""
    one = x[0] if x.shape[0] else x.new_empty(x.shape[1:])
    return one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous()


def unit(keys: Tensor) -> Tensor:
    """keys [m, d] divided by their norms; one of zeros stays, one that is not finite becomes NaN."""
    if keys.shape[1] == 0:
        return keys
    # Squares of what is divided by the largest neither overflow nor vanish.
    scaled = keys / keys.abs().amax(1, keepdim=True)
    scaled = scaled / torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return torch.where((keys == 0).all(1, keepdim=True), 0.0, scaled)


def quantized(y: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [k, m], float32 scale [k] = max|y| / 127): value · scale restores y [k, m]."""
    scale = y.abs().amax(1).float() / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (y * inverse[:, None]).round().clamp(-127, 127).to(torch.int8), scale
