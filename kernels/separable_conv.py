"""Convolution with a weight Σ_r u[r, i, ky] · v[r, o, kx]: along one axis to r channels, along the other from them.

One kernel for both parts: a program makes the r channels of whole lines of the image, rounds them as a tensor between
two convolutions would be, and takes its neighbours in the line from the tile, so that they never go to memory and none
is made twice. Forward, the lines are rows; in the gradient the parts change places and the lines are columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.geometry import Slices
from fastfact.kernels.launch import Tile, first_that_fits
from fastfact.kernels.taps import tap_position

MAX_RANK, MAX_LINE = 64, 128


class LineStrides(NamedTuple):
    """Of images, across and along the lines."""

    client: int
    n: int
    c: int
    across: int
    along: int


@triton.jit(do_not_specialize=["lines", "tiles"])
def separable_conv_kernel(
    out,
    source,
    first,
    second,
    bias,
    lines,
    tiles,
    lines_an_image,
    lines_a_tile,
    extents,
    out_strides,
    source_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TAPS1: tl.constexpr,
    TAPS2: tl.constexpr,
    RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """out[client, line, q, o] = Σ_r Σ_t second[r, o, t] · h[line, q at tap t, r], some lines a program, with
    h[line, b, r] = Σ_i Σ_t first[r, i, t] · source[line at tap t, b, i].

    The axis across the lines has `extent` positions in `source`; along them are `middle` in it and `length` in `out`.
    window: of the two parts.
    """
    extent, middle, length = extents
    pid = tl.program_id(0)
    tile = pid % tiles
    client = (pid // tiles).to(tl.int64)
    source += client * source_strides.client
    of_first = first.data + client * first.client
    of_second = second.data + client * second.client
    r = tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_M)
    line = tile * lines_a_tile + j // middle
    inside = (j < lines_a_tile * middle) & (line < lines)
    image = (line // lines_an_image).to(tl.int64) * source_strides.n
    image += (j % middle).to(tl.int64) * source_strides.along
    hidden = tl.zeros([BLOCK_M, BLOCK_R], ACC)
    for tap in tl.static_range(TAPS1):
        across, there = tap_position(line % lines_an_image, tap, extent, window[0], TRANSPOSED)
        pixel = source + image + across.to(tl.int64) * source_strides.across
        for start in range(0, IN, BLOCK_I):
            i = start + tl.arange(0, BLOCK_I)
            pixels = tl.load(
                pixel[:, None] + (i.to(tl.int64) * source_strides.c)[None, :],
                mask=(inside & there)[:, None] & (i < IN)[None, :],
                other=0.0,
            )
            factor = tl.load(
                of_first + ((r[None, :] * IN + i[:, None]) * TAPS1 + tap),
                mask=(r < RANK)[None, :] & (i < IN)[:, None],
                other=0.0,
            )
            hidden = tl.dot(pixels, factor, hidden, input_precision=PRECISION, out_dtype=ACC)
    hidden = hidden.to(source.dtype.element_ty)
    q = tl.arange(0, BLOCK_Q)
    own = q // length
    target = tile * lines_a_tile + own
    written = (q < lines_a_tile * length) & (target < lines)
    n = (target // lines_an_image).to(tl.int64)
    at = client * out_strides.client + n * out_strides.n
    at += (target % lines_an_image).to(tl.int64) * out_strides.across + (q % length).to(tl.int64) * out_strides.along
    for start in range(0, OUT, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        acc = tl.zeros([BLOCK_Q, BLOCK_O], ACC)
        for tap in tl.static_range(TAPS2):
            along, beside = tap_position(q % length, tap, middle, window[1], TRANSPOSED)
            beside = written & beside
            place = tl.where(beside, own * middle + along, 0)
            neighbours = tl.gather(hidden, tl.broadcast_to(place[:, None], [BLOCK_Q, BLOCK_R]), 0)
            neighbours = tl.where(beside[:, None], neighbours, tl.zeros_like(neighbours))
            factor = tl.load(
                of_second + ((r[:, None] * OUT + o[None, :]) * TAPS2 + tap),
                mask=(r < RANK)[:, None] & (o < OUT)[None, :],
                other=0.0,
            )
            acc = tl.dot(neighbours, factor, acc, input_precision=PRECISION, out_dtype=ACC)
        if HAS_BIAS:
            acc += tl.load(bias.data + client * bias.client + o, mask=o < OUT, other=0.0).to(ACC)[None, :]
        tl.store(
            out + (at[:, None] + (o.to(tl.int64) * out_strides.c)[None, :]),
            acc.to(out.dtype.element_ty),
            mask=written[:, None] & (o < OUT)[None, :],
        )


def fits(dtype: torch.dtype, rank: int, *extents: int) -> bool:
    """Whether the r channels of a line of the image, so long before and after, are small enough for one program."""
    longest = triton.next_power_of_2(max(extents))
    if rank > MAX_RANK or longest > MAX_LINE:
        return False
    # they go through shared memory, as much of it as the largest tile of half precision takes
    return longest * max(16, triton.next_power_of_2(rank)) * dtype.itemsize <= 2 * MAX_LINE * MAX_RANK


def launch(p, out: Tensor, source: Tensor, u: Slices, v: Slices, bias: Slices | None, transposed: bool) -> bool:
    """The forward from `source` = x into `out`, or (transposed) the data gradient from dy; False where it does not fit.

    p: the `_Problem` of the convolution, in one group.
    """
    along = 0 if transposed else 1
    if not fits(source.dtype, p.rank, p.image[along], p.out_image[along]):
        return False
    parts, taps, window = (u, v), (p.kh, p.kw), p.window
    extent, lines_an_image, middle, length = p.image[0], p.out_image[0], p.image[1], p.out_image[1]
    strides = [LineStrides(*tensor.stride()) for tensor in (out, source)]
    channels, inner = p.out, p.into
    if transposed:
        # the second part first, along columns
        parts, taps, window = parts[::-1], taps[::-1], window[::-1]
        extent, lines_an_image, middle, length = p.out_image[1], p.image[1], p.out_image[0], p.image[0]
        strides = [one._replace(across=one.along, along=one.across) for one in strides]
        channels, inner = inner, channels
    half = source.dtype in (torch.float16, torch.bfloat16)
    lines_a_tile = max(1, (128 if half else 32) // max(middle, length))
    lines = p.n * lines_an_image
    tiles = triton.cdiv(lines, lines_a_tile)
    block_m, block_q = (max(16, triton.next_power_of_2(lines_a_tile * one)) for one in (middle, length))
    constants = p.constants | {"RANK": p.rank, "TRANSPOSED": transposed, "HAS_BIAS": bias is not None}
    constants = {name: value for name, value in constants.items() if name not in ("GROUPS", "KH", "KW")}
    constants |= {"OUT": channels, "IN": inner, "TAPS1": taps[0], "TAPS2": taps[1], "BLOCK_M": block_m}
    constants |= {"BLOCK_Q": block_q, "BLOCK_R": max(16, triton.next_power_of_2(p.rank))}

    def run(tile: Tile) -> None:
        separable_conv_kernel[(p.k * tiles,)](
            out,
            source,
            *parts,
            bias,
            lines,
            tiles,
            lines_an_image,
            lines_a_tile,
            (extent, middle, length),
            *strides,
            window,
            **constants,
            BLOCK_I=tile.depth,
            BLOCK_O=tile.columns,
            **tile.settings,
        )

    largest = Tile(
        rows=block_q,
        columns=min(max(16, triton.next_power_of_2(channels)), 64 if half else 32),
        depth=min(max(16, triton.next_power_of_2(inner)), 64 if half else 16),
        warps=8 if max(block_m, block_q) > 64 else 4,
    )
    smaller = [largest._replace(stages=stages) for stages in (2, 1)] + [
        largest._replace(columns=16, depth=16, stages=1)
    ]
    with torch.cuda.device_of(source):
        key = ("separable_conv", source.dtype, *constants.values())
        return first_that_fits([largest, *smaller], source.device, key, run)
