"""Convolution with a rank-1 weight of the spatial layout and no μ: depthwise with u, then 1×1 with v, in one kernel.

The depthwise result of a tile of pixels stays in registers and shared memory; kh · kw times fewer multiplications than
the dense weight takes. The gradients have the same two parts, so that each tensor is read as often as in the forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.taps import tap_position


@triton.jit
def depthwise_tile(
    source,
    u,
    y,
    x,
    pixel_inside,
    channel,
    channel_inside,
    height,
    width,
    source_c,
    source_y,
    source_x,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Σ over taps of u · source at pixels (y, x) for `channel`; all are 2D, pixels and channels along different axes.

    TRANSPOSED: the taps that the gradient takes, from pixels of the input to those of the output.
    """
    inside = pixel_inside & channel_inside
    tile = tl.zeros(inside.shape, ACC)
    column = channel.to(tl.int64) * source_c
    for ky in tl.static_range(KH):
        sy, row_inside = tap_position(y, ky, height, stride_y, padding_y, dilation_y, TRANSPOSED)
        for kx in tl.static_range(KW):
            sx, column_inside = tap_position(x, kx, width, stride_x, padding_x, dilation_x, TRANSPOSED)
            there = inside & row_inside & column_inside
            at = sy.to(tl.int64) * source_y + sx.to(tl.int64) * source_x
            tile += tl.load(u + (ky * KW + kx)).to(ACC) * tl.load(source + (at + column), mask=there, other=0.0).to(ACC)
    return tile


@triton.jit
def rank1_conv_kernel(
    out,
    source,
    u,
    v,
    bias,
    rows,
    height,
    width,
    out_height,
    out_width,
    m_blocks,
    c_blocks,
    out_client,
    out_n,
    out_c,
    out_y,
    out_x,
    source_client,
    source_n,
    source_c,
    source_y,
    source_x,
    u_client,
    v_client,
    bias_client,
    v_out,
    v_in,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
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

    OUT and IN are the channels of `out` and `source` in a group; v[c, j] lies at c · v_out + j · v_in of its group.
    """
    pid = tl.program_id(0)
    c = pid % c_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    m = pid // c_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    group = pid // c_blocks // m_blocks % GROUPS
    client = (pid // c_blocks // m_blocks // GROUPS).to(tl.int64)
    m_inside = m < rows
    c_inside = c < OUT
    x = m % out_width
    y = m // out_width % out_height
    n = (m // out_width // out_height).to(tl.int64)
    image = source + client * source_client + n * source_n
    u += client * u_client
    v += client * v_client + group * OUT * IN
    acc = tl.zeros([BLOCK_O, BLOCK_M], ACC)
    for start in range(0, IN, BLOCK_I):
        j = start + tl.arange(0, BLOCK_I)
        j_inside = j < IN
        for r in tl.static_range(RANK):
            tile = depthwise_tile(
                image[None, :],
                u + r * KH * KW,
                y[None, :],
                x[None, :],
                m_inside[None, :],
                (group * IN + j)[:, None],
                j_inside[:, None],
                height,
                width,
                source_c,
                source_y,
                source_x,
                stride_y,
                stride_x,
                padding_y,
                padding_x,
                dilation_y,
                dilation_x,
                KH,
                KW,
                TRANSPOSED,
                ACC,
            )
            factor = tl.load(
                v + r * GROUPS * OUT * IN + (c[:, None] * v_out + j[None, :] * v_in),
                mask=c_inside[:, None] & j_inside[None, :],
                other=0.0,
            )
            acc = tl.dot(factor, tile.to(factor.dtype), acc, input_precision=PRECISION, out_dtype=ACC)
    channel = group * OUT + c
    if HAS_BIAS:
        acc += tl.load(bias + client * bias_client + channel, mask=c_inside, other=0.0).to(ACC)[:, None]
    at = client * out_client + n * out_n + y.to(tl.int64) * out_y + x.to(tl.int64) * out_x
    tl.store(
        out + (at[None, :] + (channel.to(tl.int64) * out_c)[:, None]),
        acc.to(out.dtype.element_ty),
        mask=m_inside[None, :] & c_inside[:, None],
    )


@triton.jit
def rank1_conv_v_kernel(
    dv,
    grad,
    source,
    u,
    rows,
    height,
    width,
    out_height,
    out_width,
    o_blocks,
    i_blocks,
    splits,
    grad_client,
    grad_n,
    grad_c,
    grad_y,
    grad_x,
    source_client,
    source_n,
    source_c,
    source_y,
    source_x,
    u_client,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    STEPS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """dv[(client, split), r, o, i] = Σ over a stretch of the pixels of dy[o] · depthwise_{u_r}(x)[i]."""
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
    u += client * u_client + r * KH * KW
    o_all = group * OUT + o
    acc = tl.zeros([BLOCK_O, BLOCK_I], ACC)
    for step in range(STEPS):
        m = (split * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_inside = m < rows
        x = m % out_width
        y = m // out_width % out_height
        n = (m // out_width // out_height).to(tl.int64)
        tile = depthwise_tile(
            (source + client * source_client + n * source_n)[:, None],
            u,
            y[:, None],
            x[:, None],
            m_inside[:, None],
            (group * IN + i)[None, :],
            i_inside[None, :],
            height,
            width,
            source_c,
            source_y,
            source_x,
            stride_y,
            stride_x,
            padding_y,
            padding_x,
            dilation_y,
            dilation_x,
            KH,
            KW,
            False,
            ACC,
        )
        at = client * grad_client + n * grad_n + y.to(tl.int64) * grad_y + x.to(tl.int64) * grad_x
        above = tl.load(
            grad + (at[None, :] + (o_all.to(tl.int64) * grad_c)[:, None]),
            mask=m_inside[None, :] & o_inside[:, None],
            other=0.0,
        )
        acc = tl.dot(above, tile.to(above.dtype), acc, input_precision=PRECISION, out_dtype=ACC)
    at = ((client * splits + split) * RANK + r) * GROUPS * OUT * IN
    tl.store(dv + at + (o_all[:, None] * IN + i[None, :]), acc, mask=o_inside[:, None] & i_inside[None, :])


@triton.jit
def rank1_conv_u_kernel(
    du,
    grad,
    source,
    v,
    rows,
    height,
    width,
    out_height,
    out_width,
    m_blocks,
    i_blocks,
    grad_client,
    grad_n,
    grad_c,
    grad_y,
    grad_x,
    source_client,
    source_n,
    source_c,
    source_y,
    source_x,
    v_client,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
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
    """du[client, (group, m block, i block), r, ky, kx] = Σ over the tile of (v_rᵀ dy) · x at the tap."""
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
    x = m % out_width
    y = m // out_width % out_height
    n = (m // out_width // out_height).to(tl.int64)
    v += client * v_client + (r * GROUPS + group) * OUT * IN
    at = client * grad_client + n * grad_n + y.to(tl.int64) * grad_y + x.to(tl.int64) * grad_x
    back = tl.zeros([BLOCK_I, BLOCK_M], ACC)
    for start in range(0, OUT, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        o_inside = o < OUT
        factor = tl.load(v + (o[None, :] * IN + i[:, None]), mask=o_inside[None, :] & i_inside[:, None], other=0.0)
        above = tl.load(
            grad + (at[None, :] + ((group * OUT + o).to(tl.int64) * grad_c)[:, None]),
            mask=m_inside[None, :] & o_inside[:, None],
            other=0.0,
        )
        back = tl.dot(factor, above, back, input_precision=PRECISION, out_dtype=ACC)
    part = (((client * GROUPS + group) * m_blocks + m_block) * i_blocks + i_block) * RANK + r
    image = source + client * source_client + n * source_n
    column = (group * IN + i).to(tl.int64) * source_c
    inside = m_inside[None, :] & i_inside[:, None]
    for ky in tl.static_range(KH):
        sy, row_inside = tap_position(y, ky, height, stride_y, padding_y, dilation_y, False)
        for kx in tl.static_range(KW):
            sx, column_inside = tap_position(x, kx, width, stride_x, padding_x, dilation_x, False)
            there = row_inside & column_inside
            pixel = image + sy.to(tl.int64) * source_y + sx.to(tl.int64) * source_x
            tile = tl.load(pixel[None, :] + column[:, None], mask=inside & there[None, :], other=0.0).to(ACC)
            tl.store(du + (part * KH * KW + (ky * KW + kx)), tl.sum(tl.sum(back * tile, 1), 0))


def blocks(dtype: torch.dtype, out: int) -> dict[str, int]:
    """The tile: all output channels up to 256 in one, since each block of them makes the depthwise part again."""
    whole = max(16, triton.next_power_of_2(out))
    if dtype in (torch.float64, torch.float32):
        tile = 32 if dtype == torch.float64 else 64
        return {"BLOCK_M": 32, "BLOCK_O": min(whole, tile), "BLOCK_I": 16, "num_warps": 4}
    return {"BLOCK_M": 64, "BLOCK_O": min(whole, 256), "BLOCK_I": 32, "num_warps": 8 if whole > 64 else 4}


# Software pipelining would keep the loads of every tap in shared memory.
STAGES = 1


def launch(p, out: Tensor, source: Tensor, u, v, bias, clients_of, transposed: bool) -> Tensor:
    """`rank1_conv_kernel`: the forward from `source` = x, or (transposed) dx from `source` = dy.

    p: the `_Problem` of the convolution; clients_of: the client strides of u, v and bias.
    """
    o, i = p.out // p.groups, p.into
    channels, inner = (i, o) if transposed else (o, i)
    height, width = source.shape[3:]
    rows = p.n * out.shape[3] * out.shape[4]
    settings = blocks(source.dtype, channels)
    m_blocks = triton.cdiv(rows, settings["BLOCK_M"])
    c_blocks = triton.cdiv(channels, settings["BLOCK_O"])
    with torch.cuda.device_of(source):
        rank1_conv_kernel[(p.k * p.groups * m_blocks * c_blocks,)](
            out,
            source,
            u,
            v,
            bias,
            rows,
            height,
            width,
            out.shape[3],
            out.shape[4],
            m_blocks,
            c_blocks,
            *out.stride(),
            *source.stride(),
            *clients_of,
            *((1, i) if transposed else (i, 1)),
            *p.settings,
            OUT=channels,
            IN=inner,
            GROUPS=p.groups,
            KH=p.kh,
            KW=p.kw,
            RANK=p.rank,
            TRANSPOSED=transposed,
            HAS_BIAS=bias is not None,
            ACC=p.constants["ACC"],
            PRECISION=p.constants["PRECISION"],
            **settings,
            num_stages=STAGES,
        )
    return out


def weight_gradient(p, grad: Tensor, x: Tensor, u, v, clients_of, du_like, dv_like, acc) -> list[Tensor | None]:
    """Parts of (du, dv), [k, parts, r, …] in the dtype `acc`; None for one whose `like` is None."""
    o, i = p.out // p.groups, p.into
    constants = {name: p.constants[name] for name in ("GROUPS", "KH", "KW", "RANK", "ACC", "PRECISION")}
    half = x.dtype not in (torch.float64, torch.float32)
    common = constants | {"OUT": o, "IN": i, "num_warps": 4, "num_stages": STAGES}
    du = dv = None
    with torch.cuda.device_of(x):
        if dv_like is not None:
            tile = {"BLOCK_M": 32, "BLOCK_O": 64 if half else 32, "BLOCK_I": 64 if half else 32}
            o_blocks, i_blocks = triton.cdiv(o, tile["BLOCK_O"]), triton.cdiv(i, tile["BLOCK_I"])
            steps, programs = triton.cdiv(p.rows, 32), p.k * p.groups * p.rank * o_blocks * i_blocks
            splits = max(1, min(triton.cdiv(528, programs), steps // 4))
            dv = v.new_empty(p.k, splits, *v.shape[1:], dtype=acc)
            rank1_conv_v_kernel[(programs * splits,)](
                dv,
                grad,
                x,
                u,
                p.rows,
                *p.extents,
                o_blocks,
                i_blocks,
                splits,
                *grad.stride(),
                *x.stride(),
                clients_of[0],
                *p.settings,
                STEPS=triton.cdiv(steps, splits),
                **common,
                **tile,
            )
        if du_like is not None:
            tile = {"BLOCK_M": 64 if half else 32, "BLOCK_O": 32, "BLOCK_I": 64 if half else 32}
            m_blocks, i_blocks = triton.cdiv(p.rows, tile["BLOCK_M"]), triton.cdiv(i, tile["BLOCK_I"])
            du = u.new_empty(p.k, p.groups * m_blocks * i_blocks, *u.shape[1:], dtype=acc)
            rank1_conv_u_kernel[(p.k * p.groups * p.rank * m_blocks * i_blocks,)](
                du,
                grad,
                x,
                v,
                p.rows,
                *p.extents,
                m_blocks,
                i_blocks,
                *grad.stride(),
                *x.stride(),
                clients_of[1],
                *p.settings,
                **common,
                **tile,
            )
    return [du, dv]
