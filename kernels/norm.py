"""Batch norm of each client by its own batch: a pass that sums, and one that applies what the sums say.

Images are read as rows of channels (channels_last); others are brought into that order first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.base.formats import is_channels_last
from fastfact.kernels.geometry import accumulator
from fastfact.kernels.weights import TL_DTYPES

PROGRAMS = 1056
"""Enough to fill a large GPU several times."""
ROWS = 32
"""Rows of a tile."""


@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def norm_sums_kernel(
    sums,
    x,
    other,
    shift,
    rows,
    steps,
    splits,
    c_blocks,
    C: tl.constexpr,
    PRODUCT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """sums[client, split, 0, c] = Σ a and sums[client, split, 1, c] = Σ a · (x − shift[client, c]) over a split of the
    rows, `steps` tiles of them. a: `other` (PRODUCT), or x − shift itself."""
    pid = tl.program_id(0)
    c = pid % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    split = pid // c_blocks % splits
    client = (pid // c_blocks // splits).to(tl.int64)
    c_inside = c < C
    centre = tl.load(shift + client * C + c, mask=c_inside, other=0.0)
    first = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    second = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    for step in range(steps):
        row = (split * steps + step) * BLOCK_R + tl.arange(0, BLOCK_R)
        inside = (row < rows)[:, None] & c_inside[None, :]
        at = (client * rows + row)[:, None] * C + c[None, :]
        value = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(ACC) - centre[None, :], 0.0)
        a = tl.load(other + at, mask=inside, other=0.0).to(ACC) if PRODUCT else value
        first += a
        second += a * value
    place = sums + (client * splits + split) * 2 * C + c
    tl.store(place, tl.sum(first, 0), mask=c_inside)
    tl.store(place + C, tl.sum(second, 0), mask=c_inside)


@triton.jit(do_not_specialize=["rows", "r_blocks"])
def norm_apply_kernel(
    out,
    x,
    other,
    shift,
    scale,
    plus,
    others_scale,
    rows,
    r_blocks,
    c_blocks,
    C: tl.constexpr,
    ADD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """out = (x − shift) · scale + plus (+ other · others_scale), where shift, scale, … are of a client's channel."""
    pid = tl.program_id(0)
    c = pid % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    row = pid // c_blocks % r_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    client = (pid // c_blocks // r_blocks).to(tl.int64)
    c_inside = c < C
    inside = (row < rows)[:, None] & c_inside[None, :]
    at = (client * rows + row)[:, None] * C + c[None, :]
    channel = client * C + c
    value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
    value -= tl.load(shift + channel, mask=c_inside, other=0.0)[None, :]
    value *= tl.load(scale + channel, mask=c_inside, other=0.0)[None, :]
    value += tl.load(plus + channel, mask=c_inside, other=0.0)[None, :]
    if ADD:
        factor = tl.load(others_scale + channel, mask=c_inside, other=0.0)
        value += tl.load(other + at, mask=inside, other=0.0).to(ACC) * factor[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def _in_lines(x: Tensor) -> Tensor:
    """x [k, n, c, …] as rows of channels, [k, rows, c]; of images in channels_last that is the same memory."""
    return x.movedim(2, -1).reshape(x.shape[0], -1, x.shape[2]).contiguous()


def _as_before(lines: Tensor, like: Tensor) -> Tensor:
    """Rows of channels in the shape and the format of `like`."""
    out = lines.view(*like.shape[:2], *like.shape[3:], like.shape[2]).movedim(-1, 2)
    return out if like.dim() == 5 and is_channels_last(like) else out.contiguous()


def _tile(c: int) -> dict[str, int]:
    return {"BLOCK_R": ROWS, "BLOCK_C": min(128, max(16, triton.next_power_of_2(c)))}


def _sums(lines: Tensor, other: Tensor | None, shift: Tensor) -> Tensor:
    """[k, 2, c], see `norm_sums_kernel`."""
    (k, rows, c), tile = lines.shape, _tile(lines.shape[2])
    c_blocks, tiles = triton.cdiv(c, tile["BLOCK_C"]), triton.cdiv(rows, ROWS)
    splits = max(1, min(triton.cdiv(PROGRAMS, k * c_blocks), tiles))
    sums = shift.new_empty(k, splits, 2, c)
    settings = {"C": c, "PRODUCT": other is not None, "ACC": TL_DTYPES[shift.dtype], **tile}
    with torch.cuda.device_of(lines):
        norm_sums_kernel[(k * splits * c_blocks,)](
            sums, lines, other, shift, rows, triton.cdiv(tiles, splits), splits, c_blocks, **settings
        )
    return sums.sum(1)


def _applied(lines: Tensor, other: Tensor | None, shift, scale, plus, others_scale=None) -> Tensor:
    """See `norm_apply_kernel`."""
    (k, rows, c), tile = lines.shape, _tile(lines.shape[2])
    c_blocks, r_blocks, out = triton.cdiv(c, tile["BLOCK_C"]), triton.cdiv(rows, ROWS), torch.empty_like(lines)
    settings = {"C": c, "ADD": other is not None, "ACC": TL_DTYPES[shift.dtype], **tile}
    with torch.cuda.device_of(lines):
        norm_apply_kernel[(k * r_blocks * c_blocks,)](
            out, lines, other, shift, scale, plus, others_scale, rows, r_blocks, c_blocks, **settings
        )
    return out


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    k, c, acc = x.shape[0], x.shape[2], accumulator(x.dtype)
    if not x.numel():
        unknown = x.new_full((k, c), torch.nan, dtype=acc)
        return torch.empty_like(x), unknown, unknown.clone()
    lines = _in_lines(x)
    # sums of squares around what some rows have as a mean keep the variance of what is far from zero
    shift = lines[:, :ROWS].mean(1, dtype=acc)
    first, second = (_sums(lines, None, shift) / (x[0].numel() // c)).unbind(1)
    mean, var = shift + first, (second - first.square()).clamp_min(0)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    plus = torch.zeros_like(mean) if bias is None else bias.to(acc).contiguous()
    return _as_before(_applied(lines, None, mean, scale.contiguous(), plus), x), mean, var


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel():
        return torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    lines, above, mean = _in_lines(x), _in_lines(grad), mean.contiguous()
    dbias, moment = _sums(lines, above, mean).unbind(1)
    inverse, count = (var + eps).rsqrt(), x[0].numel() // x.shape[2]
    scale = inverse if weight is None else inverse * weight
    slope, plus = -scale * inverse.square() * moment / count, -scale * dbias / count
    dx = _applied(lines, above, mean, slope.contiguous(), plus.contiguous(), scale.to(mean.dtype).contiguous())
    return _as_before(dx, x), moment * inverse, dbias
