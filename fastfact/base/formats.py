"""What the reference and the kernels agree on: layouts of factors, memory formats, types and scales of values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LAYOUTS = {"linear": 0, "spatial": 1, "kernel": 2, "view": 3, "separable": 4}
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
VALUE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}

LINEAR, SPATIAL, KERNEL, VIEW, SEPARABLE = range(5)

_RANK1_AXES = {LINEAR: ((1,), (0,)), SPATIAL: ((2, 3), (0, 1)), KERNEL: ((1, 2), (0, 3)), VIEW: ((2, 3), (0, 1))}
"""The axes of W (o, i, kh, kw) or (o, i) that u and v of a rank-1 weight have in each layout, after their rank."""
_RANK1_PLACES = {
    layout: tuple(sorted(range(len(u) + len(v)), key=(*u, *v).__getitem__)) for layout, (u, v) in _RANK1_AXES.items()
}
_LOWRANK_AXES = {SEPARABLE: ((1, 2), (0, 3)), VIEW: ((0, 2), (1, 3))}
"""The axes of W that are the rows of B and the columns of A."""


def rank1_shapes(layout: int, size: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of u and v, without their rank, of a weight of `size`."""
    u, v = _RANK1_AXES[layout]
    return tuple(size[axis] for axis in u), tuple(size[axis] for axis in v)


def rank1_size(layout: int, u: Sequence[int], v: Sequence[int]) -> tuple[int, ...]:
    """The size of the weight whose factors have these shapes, without their rank: the inverse of `rank1_shapes`."""
    extents = (*u, *v)
    return tuple(extents[place] for place in _RANK1_PLACES[layout])


def rank1_equation(layout: int) -> str:
    """The einsum equation of W [k, o, i, kh, kw] from u and v, which for `VIEW` is that of W before it is read anew."""
    u, v = ("".join("oihw"[axis] for axis in axes) for axes in _RANK1_AXES[layout])
    return f"kr{u},kr{v}->k{u + v if layout == VIEW else ''.join(sorted(u + v, key='oihw'.index))}"


def lowrank_shape(layout: int, size: Sequence[int]) -> tuple[int, int]:
    """(rows of B, columns of A): the shape of the product B A for a low-rank weight of `size`."""
    size = (*size, 1, 1)[:4]
    (a, b), (c, d) = _LOWRANK_AXES[layout]
    return size[a] * size[b], size[c] * size[d]


class LowRankForm(NamedTuple):
    """How σ + scaling · BA, for one client, is Σ u ⊗ v + σ in the layout "linear" or "kernel": of layers without
    kernels, and in `SEPARABLE`."""

    layout: int
    scaling: float

    def matrices(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """(a [r, i], b [o, r]) of a linear layer, W = σ + scaling · b a, from A and B; and the other way round."""
        return (b.mT, a.mT) if self.layout == SEPARABLE else (a, b)

    def factors(self, a: Tensor, b: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(u, v) from A [r, columns] and B [rows, r]."""
        u, v = (b.mT, self.scaling * a) if self.layout == SEPARABLE else (a, self.scaling * b.mT)
        if len(size) == 2:
            return u, v
        o, i, kh, kw = size
        return u.unflatten(-1, (i, kh)), v.unflatten(-1, (o, kw))

    def gradients(self, du: Tensor | None, dv: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Those of A and B from those of u and v."""
        du, dv = (None if d is None else d.reshape(len(d), d.shape[1:].numel()) for d in (du, dv))
        dv = None if dv is None else self.scaling * dv
        da, db = (dv, du) if self.layout == SEPARABLE else (du, dv)
        return da, None if db is None else db.mT


def empty_weight(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    """An uninitialised weight [k, *size] in the memory format asked for, k the clients of `like`, of its dtype."""
    k = like.shape[0]
    if channels_last and len(size) == 4:
        o, i, kh, kw = size
        return like.new_empty(k, o, kh, kw, i).permute(0, 1, 4, 2, 3)
    return like.new_empty(k, *size)


def to_format(weight: Tensor, channels_last: bool) -> Tensor:
    """`weight` [k, o, i, ky, kx] (or [k, o, i]) with each client's slice contiguous in the format asked for."""
    if weight.dim() < 5 or not channels_last:
        return weight.contiguous()
    last = weight.permute(0, 1, 3, 4, 2).contiguous()
    # PyTorch's batch-norm goes by the strides of axes of one element, too.
    return last.flatten().view(last.shape).permute(0, 1, 4, 2, 3)


def is_channels_last(x: Tensor) -> bool:
    """Whether the images of each client of `x` [k, n, c, h, w] are channels_last and not contiguous, or one of both by
    `one_channel_last`."""
    one = x[0] if x.shape[0] else x.new_empty(x.shape[1:])
    return one.is_contiguous(memory_format=torch.channels_last) and (not one.is_contiguous() or one_channel_last(one))


def weight_last(values: Tensor | None) -> bool:
    """Whether these are no values of a support but a weight [(k,) o, i, kh, kw] that is channels_last."""
    if values is None or values.dim() < 4:
        return False
    return is_channels_last(values if values.dim() == 5 else values.unsqueeze(0))


def one_channel_last(x: Tensor) -> bool:
    """Whether `x` [n, c, h, w] has one channel, which leaves both formats the same in memory, and is channels_last by
    its strides, as PyTorch tells."""
    return x.shape[1] == 1 and x.stride(1) == 1 and x.shape[2] * x.shape[3] > 1


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
