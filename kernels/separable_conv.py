"""Convolution with a weight Σ_r u[r, i, ky] · v[r, o, kx]: along one axis to r channels, along the other from them.

One kernel for both parts: a program makes the r channels of whole lines of the image, rounds them as a tensor between
two convolutions would be, and takes its neighbours in the line from the tile, so that they never go to memory and none
is made twice. Forward, the lines are rows; in the gradient the parts change places and the lines are columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.taps import tap_position

MAX_RANK, MAX_LINE = 64, 128


@triton.jit
def separable_conv_kernel(
    out,
    source,
    first,
    second,
    bias,
    lines,
    lines_an_image,
    lines_a_tile,
    tiles,
    extent,
    middle,
    length,
    out_client,
    out_n,
    out_c,
    out_across,
    out_along,
    source_client,
    source_n,
    source_c,
    source_across,
    source_along,
    first_client,
    second_client,
    bias_client,
    stride1,
    padding1,
    dilation1,
    stride2,
    padding2,
    dilation2,
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
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    client = (pid // tiles).to(tl.int64)
    source += client * source_client
    first += client * first_client
    second += client * second_client
    r = tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_M)
    line = tile * lines_a_tile + j // middle
    inside = (j < lines_a_tile * middle) & (line < lines)
    image = (line // lines_an_image).to(tl.int64) * source_n + (j % middle).to(tl.int64) * source_along
    hidden = tl.zeros([BLOCK_M, BLOCK_R], ACC)
    for tap in tl.static_range(TAPS1):
        across, there = tap_position(line % lines_an_image, tap, extent, stride1, padding1, dilation1, TRANSPOSED)
        pixel = source + image + across.to(tl.int64) * source_across
        for start in range(0, IN, BLOCK_I):
            i = start + tl.arange(0, BLOCK_I)
            pixels = tl.load(
                pixel[:, None] + (i.to(tl.int64) * source_c)[None, :],
                mask=(inside & there)[:, None] & (i < IN)[None, :],
                other=0.0,
            )
            factor = tl.load(
                first + ((r[None, :] * IN + i[:, None]) * TAPS1 + tap),
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
    at = client * out_client + n * out_n + (target % lines_an_image).to(tl.int64) * out_across
    at += (q % length).to(tl.int64) * out_along
    for start in range(0, OUT, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        acc = tl.zeros([BLOCK_Q, BLOCK_O], ACC)
        for tap in tl.static_range(TAPS2):
            along, beside = tap_position(q % length, tap, middle, stride2, padding2, dilation2, TRANSPOSED)
            beside = written & beside
            place = tl.where(beside, own * middle + along, 0)
            neighbours = tl.gather(hidden, tl.broadcast_to(place[:, None], [BLOCK_Q, BLOCK_R]), 0)
            neighbours = tl.where(beside[:, None], neighbours, tl.zeros_like(neighbours))
            factor = tl.load(
                second + ((r[:, None] * OUT + o[None, :]) * TAPS2 + tap),
                mask=(r < RANK)[:, None] & (o < OUT)[None, :],
                other=0.0,
            )
            acc = tl.dot(neighbours, factor, acc, input_precision=PRECISION, out_dtype=ACC)
        if HAS_BIAS:
            acc += tl.load(bias + client * bias_client + o, mask=o < OUT, other=0.0).to(ACC)[None, :]
        tl.store(
            out + (at[:, None] + (o.to(tl.int64) * out_c)[None, :]),
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


def launch(p, out: Tensor, source: Tensor, u, v, bias, clients_of, transposed: bool) -> Tensor:
    """The forward from `source` = x, or (transposed) dx from `source` = dy.

    p: the `_Problem` of the convolution, in one group; clients_of: the client strides of u, v and bias.
    """
    y, x = p.settings[0::2], p.settings[1::2]
    out_client, out_n, out_c, out_y, out_x = out.stride()
    source_client, source_n, source_c, source_y, source_x = source.stride()
    if transposed:
        first, second, taps, settings = v, u, (p.kw, p.kh), (*x, *y)
        first_client, second_client, bias_client = clients_of[1], clients_of[0], 0
        lines_an_image, extent, middle, length = p.width, p.out_width, p.out_height, p.height
        out_axes, source_axes, channels, inner = (out_x, out_y), (source_x, source_y), p.into, p.out
    else:
        first, second, taps, settings = u, v, (p.kh, p.kw), (*y, *x)
        first_client, second_client, bias_client = clients_of
        lines_an_image, extent, middle, length = p.out_height, p.height, p.width, p.out_width
        out_axes, source_axes, channels, inner = (out_y, out_x), (source_y, source_x), p.out, p.into
    half = source.dtype in (torch.float16, torch.bfloat16)
    longest = max(middle, length)
    lines_a_tile = max(1, (128 if half else 32) // longest)
    lines = p.n * lines_an_image
    tiles = triton.cdiv(lines, lines_a_tile)
    rank = max(16, triton.next_power_of_2(p.rank))
    block_m, block_q = (max(16, triton.next_power_of_2(lines_a_tile * one)) for one in (middle, length))
    with torch.cuda.device_of(source):
        separable_conv_kernel[(p.k * tiles,)](
            out,
            source,
            first,
            second,
            bias,
            lines,
            lines_an_image,
            lines_a_tile,
            tiles,
            extent,
            middle,
            length,
            out_client,
            out_n,
            out_c,
            *out_axes,
            source_client,
            source_n,
            source_c,
            *source_axes,
            first_client,
            second_client,
            bias_client,
            *settings,
            OUT=channels,
            IN=inner,
            TAPS1=taps[0],
            TAPS2=taps[1],
            RANK=p.rank,
            TRANSPOSED=transposed,
            HAS_BIAS=bias is not None,
            ACC=p.constants["ACC"],
            PRECISION=p.constants["PRECISION"],
            BLOCK_M=block_m,
            BLOCK_Q=block_q,
            BLOCK_R=rank,
            BLOCK_I=min(max(16, triton.next_power_of_2(inner)), 64 if half else 16),
            BLOCK_O=min(max(16, triton.next_power_of_2(channels)), 64 if half else 32),
            num_warps=8 if max(block_m, block_q) > 64 else 4,
            num_stages=3,
        )
    return out
