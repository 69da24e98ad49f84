"""Convolution with a rank-1 weight of the spatial layout and no μ: depthwise with u, then 1×1 with v, in one kernel.

The depthwise result of a tile of pixels stays in registers and shared memory; kh · kw times fewer multiplications than
the dense weight takes. The gradients have the same two parts, so that each tensor is read as often as in the forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.geometry import Image, ImageStrides, Slices, accumulator
from fastfact.kernels.launch import Tile, first_that_fits
from fastfact.kernels.taps import address, pixel, tap_position


@triton.jit
def depthwise_tile(
    source,
    strides,
    image,
    u,
    n,
    y,
    x,
    pixel_inside,
    channel,
    channel_inside,
    window,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Σ over taps of u · source at pixels (n, y, x) for `channel`, 2D tensors with pixels and channels along two axes.

    image: (height, width) of `source`. TRANSPOSED: the taps that the gradient takes, from pixels of the input to those
    of the output.
    """
    inside = pixel_inside & channel_inside
    tile = tl.zeros(inside.shape, ACC)
    column = source + channel.to(tl.int64) * strides.c
    for ky in tl.static_range(KH):
        sy, row_inside = tap_position(y, ky, image[0], window[0], TRANSPOSED)
        for kx in tl.static_range(KW):
            sx, column_inside = tap_position(x, kx, image[1], window[1], TRANSPOSED)
            there = inside & row_inside & column_inside
            value = tl.load(column + address(strides, 0, n, sy, sx), mask=there, other=0.0)
            tile += tl.load(u + (ky * KW + kx)).to(ACC) * value.to(ACC)
    return tile


@triton.jit(do_not_specialize=["rows", "m_blocks"])
def rank1_conv_kernel(
    out,
    source,
    u,
    v,
    bias,
    rows,
    m_blocks,
    c_blocks,
    image,
    source_image,
    out_strides,
    source_strides,
    v_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """out[client, (n, y, x), c] = Σ_r Σ_j v_r[c, j] · depthwise_{u_r}(source)[(n, y, x), j], a tile a program.

    OUT and IN are the channels of `out` and `source` in a group; v[c, j] lies at (c, j) · v_strides of its group.
    rows: pixels of a client.
    """
    pid = tl.program_id(0)
    c = pid % c_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    m = pid // c_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    group = pid // c_blocks // m_blocks % GROUPS
    client = (pid // c_blocks // m_blocks // GROUPS).to(tl.int64)
    m_inside = m < rows
    c_inside = c < OUT
    n, y, x = pixel(m, image)
    source += client * source_strides.client
    of_u = u.data + client * u.client
    of_v = v.data + client * v.client + group * OUT * IN
    acc = tl.zeros([BLOCK_O, BLOCK_M], ACC)
    for start in range(0, IN, BLOCK_I):
        j = start + tl.arange(0, BLOCK_I)
        j_inside = j < IN
        for r in tl.static_range(RANK):
            tile = depthwise_tile(
                source,
                source_strides,
                source_image,
                of_u + r * KH * KW,
                n[None, :],
                y[None, :],
                x[None, :],
                m_inside[None, :],
                (group * IN + j)[:, None],
                j_inside[:, None],
                window,
                KH,
                KW,
                TRANSPOSED,
                ACC,
            )
            factor = tl.load(
                of_v + r * GROUPS * OUT * IN + (c[:, None] * v_strides[0] + j[None, :] * v_strides[1]),
                mask=c_inside[:, None] & j_inside[None, :],
                other=0.0,
            )
            acc = tl.dot(factor, tile.to(factor.dtype), acc, input_precision=PRECISION, out_dtype=ACC)
    channel = group * OUT + c
    if HAS_BIAS:
        acc += tl.load(bias.data + client * bias.client + channel, mask=c_inside, other=0.0).to(ACC)[:, None]
    tl.store(
        out + (address(out_strides, client, n, y, x)[None, :] + (channel.to(tl.int64) * out_strides.c)[:, None]),
        acc.to(out.dtype.element_ty),
        mask=m_inside[None, :] & c_inside[:, None],
    )


@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def rank1_conv_v_kernel(
    dv,
    grad,
    source,
    u,
    rows,
    steps,
    splits,
    o_blocks,
    i_blocks,
    image,
    source_image,
    grad_strides,
    source_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """dv[(client, split), r, o, i] = Σ over a stretch of the pixels of dy[o] · depthwise_{u_r}(x)[i].

    rows: pixels of a client, of which a program takes `steps` tiles.
    """
    pid = tl.program_id(0)
    o = pid % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    pid = pid // o_blocks
    i = pid % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    pid = pid // i_blocks
    r = pid % RANK
    group = pid // RANK % GROUPS
    split = pid // RANK // GROUPS % splits
    client = (pid // RANK // GROUPS // splits).to(tl.int64)
    o_inside = o < OUT
    i_inside = i < IN
    of_u = u.data + client * u.client + r * KH * KW
    o_all = group * OUT + o
    grad_row = grad + client * grad_strides.client + o_all.to(tl.int64) * grad_strides.c
    source += client * source_strides.client
    acc = tl.zeros([BLOCK_O, BLOCK_I], ACC)
    for step in range(steps):
        m = (split * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_inside = m < rows
        n, y, x = pixel(m, image)
        tile = depthwise_tile(
            source,
            source_strides,
            source_image,
            of_u,
            n[:, None],
            y[:, None],
            x[:, None],
            m_inside[:, None],
            (group * IN + i)[None, :],
            i_inside[None, :],
            window,
            KH,
            KW,
            False,
            ACC,
        )
        above = tl.load(
            grad_row[:, None] + address(grad_strides, 0, n, y, x)[None, :],
            mask=m_inside[None, :] & o_inside[:, None],
            other=0.0,
        )
        acc = tl.dot(above, tile.to(above.dtype), acc, input_precision=PRECISION, out_dtype=ACC)
    at = ((client * splits + split) * RANK + r) * GROUPS * OUT * IN
    tl.store(dv + at + (o_all[:, None] * IN + i[None, :]), acc, mask=o_inside[:, None] & i_inside[None, :])


@triton.jit(do_not_specialize=["rows", "m_blocks"])
def rank1_conv_u_kernel(
    du,
    grad,
    source,
    v,
    rows,
    m_blocks,
    i_blocks,
    image,
    source_image,
    grad_strides,
    source_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """du[client, (group, m block, i block), r, ky, kx] = Σ over the tile of (v_rᵀ dy) · x at the tap.

    rows: pixels of a client.
    """
    pid = tl.program_id(0)
    i_block = pid % i_blocks
    m_block = pid // i_blocks % m_blocks
    r = pid // i_blocks // m_blocks % RANK
    group = pid // i_blocks // m_blocks // RANK % GROUPS
    client = (pid // i_blocks // m_blocks // RANK // GROUPS).to(tl.int64)
    i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
    m = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_inside = m < rows
    i_inside = i < IN
    n, y, x = pixel(m, image)
    of_v = v.data + client * v.client + (r * GROUPS + group) * OUT * IN
    grad_column = grad + address(grad_strides, client, n, y, x)
    back = tl.zeros([BLOCK_I, BLOCK_M], ACC)
    for start in range(0, OUT, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        o_inside = o < OUT
        factor = tl.load(of_v + (o[None, :] * IN + i[:, None]), mask=o_inside[None, :] & i_inside[:, None], other=0.0)
        above = tl.load(
            grad_column[None, :] + ((group * OUT + o).to(tl.int64) * grad_strides.c)[:, None],
            mask=m_inside[None, :] & o_inside[:, None],
            other=0.0,
        )
        back = tl.dot(factor, above, back, input_precision=PRECISION, out_dtype=ACC)
    part = (((client * GROUPS + group) * m_blocks + m_block) * i_blocks + i_block) * RANK + r
    source_row = source + client * source_strides.client + (group * IN + i).to(tl.int64) * source_strides.c
    inside = m_inside[None, :] & i_inside[:, None]
    for ky in tl.static_range(KH):
        sy, row_inside = tap_position(y, ky, source_image[0], window[0], False)
        for kx in tl.static_range(KW):
            sx, column_inside = tap_position(x, kx, source_image[1], window[1], False)
            there = row_inside & column_inside
            at = source_row[:, None] + address(source_strides, 0, n, sy, sx)[None, :]
            tile = tl.load(at, mask=inside & there[None, :], other=0.0).to(ACC)
            tl.store(du + (part * KH * KW + (ky * KW + kx)), tl.sum(tl.sum(back * tile, 1), 0))


def forward_tile(dtype: torch.dtype, out: int) -> Tile:
    """All output channels up to 256 in one tile, since each block of them makes the depthwise part again. One stage:
    pipelining would keep the loads of every tap in shared memory."""
    whole = max(16, triton.next_power_of_2(out))
    if dtype in (torch.float64, torch.float32):
        return Tile(32, min(whole, 32 if dtype == torch.float64 else 64), 16, 4, 1)
    return Tile(64, min(whole, 256), 32, 8 if whole > 64 else 4, 1)


def launch(p, out: Tensor, source: Tensor, u: Slices, v: Slices, bias: Slices | None, transposed: bool) -> bool:
    """`rank1_conv_kernel`: the forward from `source` = x into `out`, or (transposed) the data gradient from dy.

    p: the `_Problem` of the convolution. False where no tile fits the device.
    """
    o, i = p.out // p.groups, p.into
    channels, inner = (i, o) if transposed else (o, i)
    rows = p.n * out.shape[3] * out.shape[4]
    constants = p.constants | {
        "OUT": channels,
        "IN": inner,
        "RANK": p.rank,
        "TRANSPOSED": transposed,
        "HAS_BIAS": bias is not None,
    }

    def run(tile: Tile) -> None:
        blocks = triton.cdiv(rows, tile.rows), triton.cdiv(channels, tile.columns)
        rank1_conv_kernel[(p.k * p.groups * blocks[0] * blocks[1],)](
            out,
            source,
            u,
            v,
            bias,
            rows,
            *blocks,
            Image.of(*out.shape[3:]),
            tuple(source.shape[3:]),
            ImageStrides.of(out),
            ImageStrides.of(source),
            (1, i) if transposed else (i, 1),
            p.window,
            **constants,
            BLOCK_M=tile.rows,
            BLOCK_O=tile.columns,
            BLOCK_I=tile.depth,
            **tile.settings,
        )

    tiles = forward_tile(source.dtype, channels).and_smaller()
    with torch.cuda.device_of(source):
        return first_that_fits(tiles, source.device, ("rank1_conv", source.dtype, *constants.values()), run)


def weight_gradient(
    p, grad: Tensor, x: Tensor, u: Slices, v: Slices, need_u: bool, need_v: bool
) -> list[Tensor | None] | None:
    """Parts of (du, dv), [k, parts, r, …] in the accumulator's dtype; None for one not needed. None where no tile fits
    the device.
    """
    o, i, acc = p.out // p.groups, p.into, accumulator(x.dtype)
    constants = p.constants | {"OUT": o, "IN": i, "RANK": p.rank}
    side = 32 if x.dtype in (torch.float64, torch.float32) else 64
    images = Image.of(*p.out_image), tuple(p.image), ImageStrides.of(grad), ImageStrides.of(x)
    results: list[Tensor | None] = [None, None]

    def run_v(tile: Tile) -> None:
        o_blocks, i_blocks = triton.cdiv(o, tile.rows), triton.cdiv(i, tile.columns)
        tiles, programs = triton.cdiv(p.rows, tile.depth), p.k * p.groups * p.rank * o_blocks * i_blocks
        splits = max(1, min(triton.cdiv(528, programs), tiles // 4))
        dv = v.data.new_empty(p.k, splits, *v.data.shape[1:], dtype=acc)
        rank1_conv_v_kernel[(programs * splits,)](
            dv,
            grad,
            x,
            u,
            p.rows,
            triton.cdiv(tiles, splits),
            splits,
            o_blocks,
            i_blocks,
            *images,
            p.window,
            **constants,
            BLOCK_M=tile.depth,
            BLOCK_O=tile.rows,
            BLOCK_I=tile.columns,
            **tile.settings,
        )
        results[1] = dv

    def run_u(tile: Tile) -> None:
        m_blocks, i_blocks = triton.cdiv(p.rows, tile.rows), triton.cdiv(i, tile.columns)
        du = u.data.new_empty(p.k, p.groups * m_blocks * i_blocks, *u.data.shape[1:], dtype=acc)
        rank1_conv_u_kernel[(p.k * p.groups * p.rank * m_blocks * i_blocks,)](
            du,
            grad,
            x,
            v,
            p.rows,
            m_blocks,
            i_blocks,
            *images,
            p.window,
            **constants,
            BLOCK_M=tile.rows,
            BLOCK_O=tile.depth,
            BLOCK_I=tile.columns,
            **tile.settings,
        )
        results[0] = du

    key = (x.dtype, *constants.values())
    tiles = Tile(side, side, 32, 4, 1).and_smaller()
    with torch.cuda.device_of(x):
        for name, needed, run in (("rank1_conv_v", need_v, run_v), ("rank1_conv_u", need_u, run_u)):
            if needed and not first_that_fits(tiles, x.device, (name, *key), run):
                return None
    return results
