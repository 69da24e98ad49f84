"""Convolution with a rank-1 weight that is never written: an implicit GEMM whose weight tile is made from u, v and μ.

Every tensor has the client axis in front, and any strides; channels_last inputs (NHWC) read and write in full lines.
The weight is that of `fastfact.reference.rank1_weight` in the spatial, kernel and view layouts, without groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.geometry import INT32_LIMIT, accumulator, slices
from fastfact.kernels.weights import TL_DTYPES, _gather, _precision, _weight_size, rank1_weight_backward
from fastfact.reference import KERNEL, VIEW, to_format


@triton.jit
def weight_tile(
    mu,
    u,
    v,
    o,
    i,
    o_inside,
    i_inside,
    mu_o,
    mu_i,
    mu_y,
    mu_x,
    ky: tl.constexpr,
    kx: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_MU: tl.constexpr,
    ACC: tl.constexpr,
):
    """W[o, i, ky, kx] for one tap; `o`, `i` and their masks are 2D, one along each axis of the tile."""
    inside = o_inside & i_inside
    tile = tl.zeros(inside.shape, ACC)
    for r in tl.static_range(RANK):
        if LAYOUT == 1:
            left = tl.load(u + ((r * KH + ky) * KW + kx)).to(ACC)
            right = tl.load(v + ((r * OUT + o) * IN + i), mask=inside, other=0.0).to(ACC)
        elif LAYOUT == 2:
            left = tl.load(u + ((r * IN + i) * KH + ky), mask=i_inside, other=0.0).to(ACC)
            right = tl.load(v + ((r * OUT + o) * KW + kx), mask=o_inside, other=0.0).to(ACC)
        else:
            flat = ((o * IN + i) * KH + ky) * KW + kx
            left = tl.load(u + (r * KH * KW + flat // (OUT * IN)), mask=inside, other=0.0).to(ACC)
            right = tl.load(v + (r * OUT * IN + flat % (OUT * IN)), mask=inside, other=0.0).to(ACC)
        tile += left * right
    if HAS_MU:
        at = o.to(tl.int64) * mu_o + i.to(tl.int64) * mu_i + ky * mu_y + kx * mu_x
        tile += tl.load(mu + at, mask=inside, other=0.0).to(ACC)
    return tile


@triton.jit
def conv_kernel(
    out,
    x,
    mu,
    u,
    v,
    bias,
    rows,
    height,
    width,
    out_height,
    out_width,
    m_blocks,
    o_blocks,
    out_client,
    out_n,
    out_c,
    out_y,
    out_x,
    x_client,
    x_n,
    x_c,
    x_y,
    x_x,
    mu_client,
    mu_o,
    mu_i,
    mu_y,
    mu_x,
    u_client,
    v_client,
    bias_client,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_MU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """out[client, (n, y, x), o] = Σ over i and taps of x · W, a tile [BLOCK_O, BLOCK_M] a program.

    The weight is the left operand, which Hopper's tensor cores take from registers, where it is made.
    """
    pid = tl.program_id(0)
    o = pid % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    m = pid // o_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    client = (pid // o_blocks // m_blocks).to(tl.int64)
    m_inside = m < rows
    o_inside = o < OUT
    ox = m % out_width
    oy = m // out_width % out_height
    n = (m // out_width // out_height).to(tl.int64)
    x_image = x + client * x_client + n * x_n
    acc = tl.zeros([BLOCK_O, BLOCK_M], ACC)
    # the channels are the inner loop: only that one is pipelined, and with the taps in it each would take its own
    # stages of shared memory
    for ky in tl.static_range(KH):
        iy = oy * stride_y - padding_y + ky * dilation_y
        for kx in tl.static_range(KW):
            ix = ox * stride_x - padding_x + kx * dilation_x
            there = m_inside & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
            pixel = x_image + iy.to(tl.int64) * x_y + ix.to(tl.int64) * x_x
            for start in range(0, IN, BLOCK_I):
                i = start + tl.arange(0, BLOCK_I)
                i_inside = i < IN
                pixels = tl.load(
                    pixel[None, :] + (i.to(tl.int64) * x_c)[:, None],
                    mask=there[None, :] & i_inside[:, None],
                    other=0.0,
                )
                weight = weight_tile(
                    mu + client * mu_client if HAS_MU else mu,
                    u + client * u_client,
                    v + client * v_client,
                    o[:, None],
                    i[None, :],
                    o_inside[:, None],
                    i_inside[None, :],
                    mu_o,
                    mu_i,
                    mu_y,
                    mu_x,
                    ky,
                    kx,
                    OUT,
                    IN,
                    KH,
                    KW,
                    RANK,
                    LAYOUT,
                    HAS_MU,
                    ACC,
                )
                acc = tl.dot(weight.to(x.dtype.element_ty), pixels, acc, input_precision=PRECISION, out_dtype=ACC)
    if HAS_BIAS:
        acc += tl.load(bias + client * bias_client + o, mask=o_inside, other=0.0).to(ACC)[:, None]
    at = client * out_client + n * out_n + oy.to(tl.int64) * out_y + ox.to(tl.int64) * out_x
    tl.store(
        out + (at[None, :] + (o.to(tl.int64) * out_c)[:, None]),
        acc.to(out.dtype.element_ty),
        mask=m_inside[None, :] & o_inside[:, None],
    )


@triton.jit
def conv_input_kernel(
    dx,
    grad,
    mu,
    u,
    v,
    rows,
    height,
    width,
    out_height,
    out_width,
    m_blocks,
    i_blocks,
    dx_client,
    dx_n,
    dx_c,
    dx_y,
    dx_x,
    grad_client,
    grad_n,
    grad_c,
    grad_y,
    grad_x,
    mu_client,
    mu_o,
    mu_i,
    mu_y,
    mu_x,
    u_client,
    v_client,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    HAS_MU: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """dx[client, (n, y, x), i] = Σ over o and taps of dy · W."""
    pid = tl.program_id(0)
    i = pid % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    m = pid // i_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    client = (pid // i_blocks // m_blocks).to(tl.int64)
    m_inside = m < rows
    i_inside = i < IN
    ix = m % width
    iy = m // width % height
    n = (m // width // height).to(tl.int64)
    grad_image = grad + client * grad_client + n * grad_n
    acc = tl.zeros([BLOCK_I, BLOCK_M], ACC)
    for ky in tl.static_range(KH):
        # the output rows that this tap takes from row iy
        ty = iy + padding_y - ky * dilation_y
        oy = ty // stride_y
        for kx in tl.static_range(KW):
            tx = ix + padding_x - kx * dilation_x
            ox = tx // stride_x
            there = m_inside & (ty >= 0) & (oy * stride_y == ty) & (oy < out_height)
            there = there & (tx >= 0) & (ox * stride_x == tx) & (ox < out_width)
            pixel = grad_image + oy.to(tl.int64) * grad_y + ox.to(tl.int64) * grad_x
            for start in range(0, OUT, BLOCK_O):
                o = start + tl.arange(0, BLOCK_O)
                o_inside = o < OUT
                pixels = tl.load(
                    pixel[None, :] + (o.to(tl.int64) * grad_c)[:, None],
                    mask=there[None, :] & o_inside[:, None],
                    other=0.0,
                )
                weight = weight_tile(
                    mu + client * mu_client if HAS_MU else mu,
                    u + client * u_client,
                    v + client * v_client,
                    o[None, :],
                    i[:, None],
                    o_inside[None, :],
                    i_inside[:, None],
                    mu_o,
                    mu_i,
                    mu_y,
                    mu_x,
                    ky,
                    kx,
                    OUT,
                    IN,
                    KH,
                    KW,
                    RANK,
                    LAYOUT,
                    HAS_MU,
                    ACC,
                )
                acc = tl.dot(weight.to(grad.dtype.element_ty), pixels, acc, input_precision=PRECISION, out_dtype=ACC)
    at = client * dx_client + n * dx_n + iy.to(tl.int64) * dx_y + ix.to(tl.int64) * dx_x
    tl.store(
        dx + (at[None, :] + (i.to(tl.int64) * dx_c)[:, None]),
        acc.to(dx.dtype.element_ty),
        mask=m_inside[None, :] & i_inside[:, None],
    )


@triton.jit
def conv_weight_kernel(
    dmu,
    du,
    dv,
    grad,
    x,
    u,
    v,
    rows,
    height,
    width,
    out_height,
    out_width,
    o_blocks,
    i_blocks,
    dmu_client,
    dmu_o,
    dmu_i,
    dmu_y,
    dmu_x,
    grad_client,
    grad_n,
    grad_c,
    grad_y,
    grad_x,
    x_client,
    x_n,
    x_c,
    x_y,
    x_x,
    u_client,
    v_client,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STEPS: tl.constexpr,
    NEED_MU: tl.constexpr,
    NEED_U: tl.constexpr,
    NEED_V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """A tile of dW, one tap after the other: written as dμ, and summed into parts of du and dv while in registers.

    spatial (rank 1): du parts [client, (o block, i block), ky, kx], dv [client, o, i];
    kernel: du parts [client, (o block, kx), r, i, ky], dv parts [client, (i block, ky), r, o, kx].
    """
    pid = tl.program_id(0)
    o_block = pid % o_blocks
    i_block = pid // o_blocks % i_blocks
    client = (pid // o_blocks // i_blocks).to(tl.int64)
    o = o_block * BLOCK_O + tl.arange(0, BLOCK_O)
    i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
    o_inside = o < OUT
    i_inside = i < IN
    inside = o_inside[:, None] & i_inside[None, :]
    u += client * u_client
    v += client * v_client
    dv_tile = tl.zeros([BLOCK_O, BLOCK_I], ACC)
    for ky in tl.static_range(KH):
        for kx in tl.static_range(KW):
            acc = tl.zeros([BLOCK_O, BLOCK_I], ACC)
            for step in range(STEPS):
                m = step * BLOCK_M + tl.arange(0, BLOCK_M)
                m_inside = m < rows
                ox = m % out_width
                oy = m // out_width % out_height
                n = (m // out_width // out_height).to(tl.int64)
                iy = oy * stride_y - padding_y + ky * dilation_y
                ix = ox * stride_x - padding_x + kx * dilation_x
                there = m_inside & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
                y_pixel = client * grad_client + n * grad_n + oy.to(tl.int64) * grad_y + ox.to(tl.int64) * grad_x
                x_pixel = client * x_client + n * x_n + iy.to(tl.int64) * x_y + ix.to(tl.int64) * x_x
                above = tl.load(
                    grad + (y_pixel[None, :] + (o.to(tl.int64) * grad_c)[:, None]),
                    mask=there[None, :] & o_inside[:, None],
                    other=0.0,
                )
                below = tl.load(
                    x + (x_pixel[:, None] + (i.to(tl.int64) * x_c)[None, :]),
                    mask=there[:, None] & i_inside[None, :],
                    other=0.0,
                )
                acc = tl.dot(above, below, acc, input_precision=PRECISION, out_dtype=ACC)
            if NEED_MU:
                at = client * dmu_client + ky * dmu_y + kx * dmu_x
                at_tile = (o.to(tl.int64) * dmu_o)[:, None] + (i.to(tl.int64) * dmu_i)[None, :]
                tl.store(dmu + (at + at_tile), acc.to(dmu.dtype.element_ty), mask=inside)
            if LAYOUT == 1:
                if NEED_U:
                    # loaded again for each tap: kept, it would push the sums out of the registers
                    v_tile = tl.load(v + (o[:, None] * IN + i[None, :]), mask=inside, other=0.0).to(ACC)
                    part = (client * i_blocks + i_block) * o_blocks + o_block
                    tl.store(du + ((part * KH + ky) * KW + kx), tl.sum(tl.sum(acc * v_tile, 1), 0))
                if NEED_V:
                    dv_tile += acc * tl.load(u + (ky * KW + kx)).to(ACC)
            if LAYOUT == 2:
                for r in tl.static_range(RANK):
                    if NEED_U:
                        factor = tl.load(v + ((r * OUT + o) * KW + kx), mask=o_inside, other=0.0).to(ACC)
                        part = ((client * o_blocks + o_block) * KW + kx) * RANK + r
                        tl.store(du + ((part * IN + i) * KH + ky), tl.sum(acc * factor[:, None], 0), mask=i_inside)
                    if NEED_V:
                        factor = tl.load(u + ((r * IN + i) * KH + ky), mask=i_inside, other=0.0).to(ACC)
                        part = ((client * i_blocks + i_block) * KH + ky) * RANK + r
                        tl.store(dv + ((part * OUT + o) * KW + kx), tl.sum(acc * factor[None, :], 1), mask=o_inside)
    if LAYOUT == 1 and NEED_V:
        at = client * OUT * IN + o[:, None] * IN + i[None, :]
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)


def _blocks(dtype: torch.dtype, m: int, n: int, inner: int) -> tuple[int, int, int, int]:
    """(rows, columns, depth, warps) of a tile of m × n with `inner` to sum over."""
    depth = 16 if inner <= 16 else 32
    if dtype == torch.float64:
        return 32, 32, 16, 4
    if dtype == torch.float32:
        return 64, 32 if n <= 32 else 64, 16, 4
    depth = 64 if inner > 32 else depth
    if m >= 8192 and n > 64:
        return 128, 128, depth, 8
    return (128 if m >= 8192 else 64), 32 if n <= 32 else 64, depth, 4


class _Problem:
    """Shapes and settings of one convolution, checked."""

    def __init__(self, x_shape, u, v, layout, stride, padding, dilation):
        self.k, self.n, self.channels, self.height, self.width = x_shape
        self.out, self.into, self.kh, self.kw = _weight_size(layout, u, v)
        if self.channels != self.into or self.k != u.shape[0]:
            raise ValueError(
                f"conv2d: x has {self.k} clients and {self.channels} channels, must have {u.shape[0]} and {self.into}"
            )
        spans = [
            size + 2 * pad - gap * (taps - 1) - 1
            for size, pad, gap, taps in zip(x_shape[3:], padding, dilation, (self.kh, self.kw), strict=True)
        ]
        if min(spans) < 0:
            raise ValueError(f"conv2d: the kernel does not fit into x of {self.height} × {self.width} with its padding")
        self.out_height, self.out_width = (span // step + 1 for span, step in zip(spans, stride, strict=True))
        self.settings = (*stride, *padding, *dilation)
        self.constants = {
            "OUT": self.out,
            "IN": self.into,
            "KH": self.kh,
            "KW": self.kw,
            "RANK": u.shape[1],
            "LAYOUT": layout,
            "ACC": TL_DTYPES[accumulator(u.dtype)],
            "PRECISION": _precision(u.dtype),
        }
        pixels = self.n * max(self.height * self.width, self.out_height * self.out_width)
        if max(pixels, u.shape[1] * self.out * self.into * self.kh * self.kw) > INT32_LIMIT:
            raise ValueError(f"conv2d: {pixels} pixels a client, must be at most {INT32_LIMIT}")

    @property
    def sizes(self):
        return self.height, self.width, self.out_height, self.out_width


def _images(like: Tensor, k: int, n: int, channels: int, height: int, width: int) -> Tensor:
    """Uninitialised [k, n, channels, height, width], channels_last."""
    return like.new_empty(k, n, height, width, channels).permute(0, 1, 4, 2, 3)


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0,) * 5 if tensor is None else tensor.stride()


def conv2d(
    x: Tensor,
    mu: Tensor | None,
    u: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: int,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """y [k, n, o, oh, ow] (channels_last) = conv2d(x [k, n, i, h, w], Σ_r u_r ⊗ v_r + μ) + bias [k, o].

    Raises ValueError where the shapes do not fit.
    """
    p = _Problem(x.shape, u, v, layout, stride, padding, dilation)
    out = _images(x, p.k, p.n, p.out, p.out_height, p.out_width)
    if not out.numel():
        return out
    (u, u_client), (v, v_client) = slices(u), slices(v)
    bias, bias_client = slices(bias) if bias is not None else (None, 0)
    rows = p.n * p.out_height * p.out_width
    block_m, block_o, block_i, warps = _blocks(x.dtype, rows, p.out, p.into)
    m_blocks, o_blocks = triton.cdiv(rows, block_m), triton.cdiv(p.out, block_o)
    with torch.cuda.device_of(x):
        conv_kernel[(p.k * m_blocks * o_blocks,)](
            out,
            x,
            mu,
            u,
            v,
            bias,
            rows,
            *p.sizes,
            m_blocks,
            o_blocks,
            *out.stride(),
            *x.stride(),
            *_strides(mu),
            u_client,
            v_client,
            bias_client,
            *p.settings,
            **p.constants,
            HAS_MU=mu is not None,
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            num_warps=warps,
        )
    return out


def conv2d_input_gradient(
    grad: Tensor,
    x_shape,
    mu: Tensor | None,
    u: Tensor,
    v: Tensor,
    layout: int,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """dx [k, n, i, h, w] (channels_last) from `grad` = dy of `conv2d`."""
    p = _Problem(x_shape, u, v, layout, stride, padding, dilation)
    dx = _images(grad, p.k, p.n, p.into, p.height, p.width)
    if not dx.numel():
        return dx
    (u, u_client), (v, v_client) = slices(u), slices(v)
    rows = p.n * p.height * p.width
    block_m, block_i, block_o, warps = _blocks(grad.dtype, rows, p.into, p.out)
    m_blocks, i_blocks = triton.cdiv(rows, block_m), triton.cdiv(p.into, block_i)
    with torch.cuda.device_of(grad):
        conv_input_kernel[(p.k * m_blocks * i_blocks,)](
            dx,
            grad,
            mu,
            u,
            v,
            rows,
            *p.sizes,
            m_blocks,
            i_blocks,
            *dx.stride(),
            *grad.stride(),
            *_strides(mu),
            u_client,
            v_client,
            *p.settings,
            **p.constants,
            HAS_MU=mu is not None,
            BLOCK_M=block_m,
            BLOCK_I=block_i,
            BLOCK_O=block_o,
            num_warps=warps,
        )
    return dx


def conv2d_weight_gradient(
    grad: Tensor,
    x: Tensor,
    u: Tensor,
    v: Tensor,
    layout: int,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    channels_last: bool = False,
    needs: int = 7,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dμ, du, dv) of `conv2d`; bits 0–2 of `needs` ask for them, one not asked for has no elements.

    dW is summed into du and dv while its tile is in registers (spatial of rank 1, and kernel of any rank); otherwise it
    is written and read once more. `channels_last` is the memory format of dμ.
    """
    p = _Problem(x.shape, u, v, layout, stride, padding, dilation)
    need_mu, need_u, need_v = (bool(needs >> bit & 1) for bit in range(3))
    fused = layout == KERNEL or (layout != VIEW and u.shape[1] == 1)
    write = need_mu or ((need_u or need_v) and not fused)
    size = (p.k, p.out, p.into, p.kh, p.kw)
    dmu = to_format(u.new_empty(size), channels_last) if write else u.new_empty(0)
    rows = p.n * p.out_height * p.out_width
    if not needs or not (rows and p.k * p.out * p.into):
        empty = (like.new_zeros(like.shape if need else 0) for like, need in ((u, need_u), (v, need_v)))
        return dmu.zero_(), *empty
    (shared_u, u_client), (shared_v, v_client) = slices(u), slices(v)
    block_o, block_i, block_m, _ = _blocks(x.dtype, p.out, p.into, rows)
    o_blocks, i_blocks = triton.cdiv(p.out, block_o), triton.cdiv(p.into, block_i)
    acc = accumulator(u.dtype)
    if layout == KERNEL:
        parts_u, parts_v = o_blocks * p.kw, i_blocks * p.kh
    else:
        parts_u, parts_v = o_blocks * i_blocks, 1
    du = u.new_empty(p.k, parts_u, *u.shape[1:], dtype=acc) if need_u and fused else None
    dv = v.new_empty(p.k, parts_v, *v.shape[1:], dtype=acc) if need_v and fused else None
    with torch.cuda.device_of(x):
        conv_weight_kernel[(p.k * o_blocks * i_blocks,)](
            dmu,
            du,
            dv,
            grad,
            x,
            shared_u,
            shared_v,
            rows,
            *p.sizes,
            o_blocks,
            i_blocks,
            *(dmu.stride() if write else (0,) * 5),
            *grad.stride(),
            *x.stride(),
            u_client,
            v_client,
            *p.settings,
            **p.constants,
            STEPS=triton.cdiv(rows, block_m),
            NEED_MU=write,
            NEED_U=du is not None,
            NEED_V=dv is not None,
            BLOCK_M=block_m,
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            num_warps=8,
        )
    if fused:
        return dmu, _gather(du, u).to(u.dtype), _gather(dv, v).to(v.dtype)
    du, dv = rank1_weight_backward(dmu, u, v, layout, needs >> 1)
    return dmu if need_mu else u.new_empty(0), du, dv
