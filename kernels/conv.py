"""Convolution with a rank-1 weight that is never written: an implicit GEMM whose weight tile is made from u, v and μ.

Every tensor has the client axis in front, and any strides; channels_last inputs (NHWC) read and write in full lines.
The weight is that of `ops.reference.rank1_weight` in the spatial, kernel and view layouts. μ is dense, or compact:
values on a support given as one bit for each element of W and the number of values before every 32. Without u and v
the weight is μ alone: a convolution with weights of each client's own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.formats import KERNEL, SPATIAL, VIEW, is_channels_last, to_format
from fastfact.kernels import rank1_conv, separable_conv
from fastfact.kernels.geometry import INT32_LIMIT, accumulator, empty_weight, slices
from fastfact.kernels.support import support_bits, support_tile
from fastfact.kernels.taps import tap_position
from fastfact.kernels.weights import TL_DTYPES, _gather, rank1_weight_backward


@triton.jit
def weight_tile(
    mu,
    bits,
    starts,
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
    ky,
    kx,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    MU: tl.constexpr,
    ACC: tl.constexpr,
):
    """W[o, i, ky, kx] for one tap; `o`, `i` and their masks are 2D, one along each axis of the tile.

    MU: 0 none, 1 dense, 2 on a support.
    """
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
    if MU == 1:
        at = o.to(tl.int64) * mu_o + i.to(tl.int64) * mu_i + ky * mu_y + kx * mu_x
        tile += tl.load(mu + at, mask=inside, other=0.0).to(ACC)
    if MU == 2:
        on_support, place = support_tile(bits, starts, ((o * IN + i) * KH + ky) * KW + kx, inside)
        tile += tl.load(mu + place, mask=on_support, other=0.0).to(ACC)
    return tile


@triton.jit
def conv_kernel(
    out,
    x,
    mu,
    bits,
    starts,
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
    bits_client,
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
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    MU: tl.constexpr,
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
    group = pid // o_blocks // m_blocks % GROUPS
    in_group = pid % o_blocks * BLOCK_O + tl.arange(0, BLOCK_O)
    o = group * (OUT // GROUPS) + in_group
    m = pid // o_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    client = (pid // o_blocks // m_blocks // GROUPS).to(tl.int64)
    m_inside = m < rows
    o_inside = in_group < OUT // GROUPS
    ox = m % out_width
    oy = m // out_width % out_height
    n = (m // out_width // out_height).to(tl.int64)
    x_image = x + client * x_client + n * x_n + group.to(tl.int64) * IN * x_c
    acc = tl.zeros([BLOCK_O, BLOCK_M], ACC)
    # the channels are the inner loop: only that one is pipelined, and with the taps in it each would take its own
    # stages of shared memory. The taps of a row are a loop at run time: unrolled, the addresses of 25 taps spilled.
    for ky in tl.static_range(KH):
        iy, row_inside = tap_position(oy, ky, height, stride_y, padding_y, dilation_y, False)
        for kx in range(KW):
            ix, column_inside = tap_position(ox, kx, width, stride_x, padding_x, dilation_x, False)
            there = m_inside & row_inside & column_inside
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
                    mu + client * mu_client if MU else mu,
                    bits + client * bits_client if MU == 2 else bits,
                    starts + client * bits_client if MU == 2 else starts,
                    u + client * u_client if RANK else u,
                    v + client * v_client if RANK else v,
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
                    MU,
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
    bits,
    starts,
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
    bits_client,
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
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    MU: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """dx[client, (n, y, x), i] = Σ over o and taps of dy · W."""
    pid = tl.program_id(0)
    group = pid // i_blocks // m_blocks % GROUPS
    i = pid % i_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    m = pid // i_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    client = (pid // i_blocks // m_blocks // GROUPS).to(tl.int64)
    m_inside = m < rows
    i_inside = i < IN
    ix = m % width
    iy = m // width % height
    n = (m // width // height).to(tl.int64)
    grad_image = grad + client * grad_client + n * grad_n
    acc = tl.zeros([BLOCK_I, BLOCK_M], ACC)
    for ky in tl.static_range(KH):
        # the output rows that this tap takes from row iy
        oy, row_inside = tap_position(iy, ky, out_height, stride_y, padding_y, dilation_y, True)
        for kx in range(KW):
            ox, column_inside = tap_position(ix, kx, out_width, stride_x, padding_x, dilation_x, True)
            there = m_inside & row_inside & column_inside
            pixel = grad_image + oy.to(tl.int64) * grad_y + ox.to(tl.int64) * grad_x
            for start in range(0, OUT // GROUPS, BLOCK_O):
                in_group = start + tl.arange(0, BLOCK_O)
                o = group * (OUT // GROUPS) + in_group
                o_inside = in_group < OUT // GROUPS
                pixels = tl.load(
                    pixel[None, :] + (o.to(tl.int64) * grad_c)[:, None],
                    mask=there[None, :] & o_inside[:, None],
                    other=0.0,
                )
                weight = weight_tile(
                    mu + client * mu_client if MU else mu,
                    bits + client * bits_client if MU == 2 else bits,
                    starts + client * bits_client if MU == 2 else starts,
                    u + client * u_client if RANK else u,
                    v + client * v_client if RANK else v,
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
                    MU,
                    ACC,
                )
                acc = tl.dot(weight.to(grad.dtype.element_ty), pixels, acc, input_precision=PRECISION, out_dtype=ACC)
    at = client * dx_client + n * dx_n + iy.to(tl.int64) * dx_y + ix.to(tl.int64) * dx_x
    channel = (group * IN + i).to(tl.int64)
    tl.store(
        dx + (at[None, :] + (channel * dx_c)[:, None]),
        acc.to(dx.dtype.element_ty),
        mask=m_inside[None, :] & i_inside[:, None],
    )


@triton.jit
def conv_weight_kernel(
    dmu,
    bits,
    starts,
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
    splits,
    dmu_part,
    dmu_o,
    dmu_i,
    dmu_y,
    dmu_x,
    bits_client,
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
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
    STEPS: tl.constexpr,
    MU: tl.constexpr,
    NEED_U: tl.constexpr,
    NEED_V: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """A tile of dW, one tap after the other: written as dμ, and summed into parts of du and dv while in registers.

    Each program takes one of `splits` stretches of the pixels; with p = (client, split), parts are
    dμ [p, …] (MU as in `weight_tile`: 0 not asked for, 1 all of dW, 2 on the support);
    spatial (rank 1): du [p, (group, i block, o block), ky, kx], dv [p, o, i];
    kernel: du [p, (group, o block, kx), r, i, ky], dv [p, (i block, ky), r, o, kx].
    """
    pid = tl.program_id(0)
    o_block = pid % o_blocks
    i_block = pid // o_blocks % i_blocks
    group = pid // o_blocks // i_blocks % GROUPS
    split = pid // o_blocks // i_blocks // GROUPS % splits
    client = (pid // o_blocks // i_blocks // GROUPS // splits).to(tl.int64)
    p = client * splits + split
    in_group = o_block * BLOCK_O + tl.arange(0, BLOCK_O)
    o = group * (OUT // GROUPS) + in_group
    i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
    o_inside = in_group < OUT // GROUPS
    i_inside = i < IN
    inside = o_inside[:, None] & i_inside[None, :]
    channel = (group * IN + i).to(tl.int64)
    if NEED_U or NEED_V:
        u += client * u_client
        v += client * v_client
    dv_tile = tl.zeros([BLOCK_O, BLOCK_I], ACC)
    for ky in tl.static_range(KH):
        for kx in range(KW):
            acc = tl.zeros([BLOCK_O, BLOCK_I], ACC)
            for step in range(STEPS):
                m = (split * STEPS + step) * BLOCK_M + tl.arange(0, BLOCK_M)
                m_inside = m < rows
                ox = m % out_width
                oy = m // out_width % out_height
                n = (m // out_width // out_height).to(tl.int64)
                iy, row_inside = tap_position(oy, ky, height, stride_y, padding_y, dilation_y, False)
                ix, column_inside = tap_position(ox, kx, width, stride_x, padding_x, dilation_x, False)
                there = m_inside & row_inside & column_inside
                y_pixel = client * grad_client + n * grad_n + oy.to(tl.int64) * grad_y + ox.to(tl.int64) * grad_x
                x_pixel = client * x_client + n * x_n + iy.to(tl.int64) * x_y + ix.to(tl.int64) * x_x
                above = tl.load(
                    grad + (y_pixel[None, :] + (o.to(tl.int64) * grad_c)[:, None]),
                    mask=there[None, :] & o_inside[:, None],
                    other=0.0,
                )
                below = tl.load(
                    x + (x_pixel[:, None] + (channel * x_c)[None, :]),
                    mask=there[:, None] & i_inside[None, :],
                    other=0.0,
                )
                acc = tl.dot(above, below, acc, input_precision=PRECISION, out_dtype=ACC)
            if MU == 1:
                at = p * dmu_part + ky * dmu_y + kx * dmu_x
                at_tile = (o.to(tl.int64) * dmu_o)[:, None] + (i.to(tl.int64) * dmu_i)[None, :]
                tl.store(dmu + (at + at_tile), acc.to(dmu.dtype.element_ty), mask=inside)
            if MU == 2:
                flat = ((o[:, None] * IN + i[None, :]) * KH + ky) * KW + kx
                of_client = client * bits_client
                on_support, place = support_tile(bits + of_client, starts + of_client, flat, inside)
                tl.store(dmu + p * dmu_part + place, acc.to(dmu.dtype.element_ty), mask=on_support)
            if LAYOUT == 1:
                if NEED_U:
                    # loaded again for each tap: kept, it would push the sums out of the registers
                    v_tile = tl.load(v + (o[:, None] * IN + i[None, :]), mask=inside, other=0.0).to(ACC)
                    part = ((p * GROUPS + group) * i_blocks + i_block) * o_blocks + o_block
                    tl.store(du + ((part * KH + ky) * KW + kx), tl.sum(tl.sum(acc * v_tile, 1), 0))
                if NEED_V:
                    dv_tile += acc * tl.load(u + (ky * KW + kx)).to(ACC)
            if LAYOUT == 2:
                for r in tl.static_range(RANK):
                    if NEED_U:
                        factor = tl.load(v + ((r * OUT + o) * KW + kx), mask=o_inside, other=0.0).to(ACC)
                        part = (((p * GROUPS + group) * o_blocks + o_block) * KW + kx) * RANK + r
                        tl.store(du + ((part * IN + i) * KH + ky), tl.sum(acc * factor[:, None], 0), mask=i_inside)
                    if NEED_V:
                        factor = tl.load(u + ((r * IN + i) * KH + ky), mask=i_inside, other=0.0).to(ACC)
                        part = ((p * i_blocks + i_block) * KH + ky) * RANK + r
                        tl.store(dv + ((part * OUT + o) * KW + kx), tl.sum(acc * factor[None, :], 1), mask=o_inside)
    if LAYOUT == 1 and NEED_V:
        at = p * OUT * IN + o[:, None] * IN + i[None, :]
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """A program's part of a product: rows × columns of the result, `depth` at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int = 3

    @property
    def settings(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


def image_tile(dtype: torch.dtype, k: int, m: int, n: int, inner: int) -> Tile:
    """For k clients of m pixels × n channels, with `inner` channels to sum over: forward and data gradient."""
    if dtype == torch.float64:
        return Tile(32, 32, 16, 4)
    if dtype == torch.float32:
        return Tile(64, 32 if n <= 32 else 64, 16, 4)
    depth = 16 if inner <= 16 else 32 if inner <= 32 else 64
    # a program for each of an H100's 132 multiprocessors, at least
    if m >= 128 and n > 64 and k * m * n >= 132 * 128 * 128:
        return Tile(128, 128, depth, 8)
    columns = 32 if n <= 32 else 64
    if depth == 16:
        # a first layer: the addresses of all taps are kept, in fewer registers where more threads share them
        return Tile(64, columns, depth, 8)
    wide = m >= 128 and k * m * columns >= 132 * 128 * 64
    return Tile(128, columns, depth, 8) if wide else Tile(64, columns, depth, 4)


def gradient_tile(dtype: torch.dtype, out: int, into: int, rows: int) -> Tile:
    """For dW [out, into], summed over `rows` pixels."""
    if dtype == torch.float64:
        return Tile(32, 32, 16, 8)
    depth = 16 if dtype == torch.float32 or rows <= 16 else 32 if rows <= 32 else 64
    return Tile(64, 32 if into <= 32 else 64, depth, 8)


def _conv_precision(dtype: torch.dtype) -> str:
    """float32 products as PyTorch's own convolutions take them, which round to TF32 unless told otherwise."""
    return "tf32" if dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


class _Problem:
    """Shapes and settings of one convolution."""

    def __init__(self, dtype, x_shape, u, layout, size, stride, padding, dilation, groups):
        self.k, self.n, self.channels, self.height, self.width = x_shape
        self.out, self.into, self.kh, self.kw = size
        self.groups, self.size = groups, tuple(size)
        if self.channels != self.into * groups or self.out % groups:
            raise ValueError(
                f"fused_conv2d: x has {self.channels} channels, a weight of {list(size)} in {groups} groups needs "
                f"{self.into * groups}, and its {self.out} outputs must be a multiple of the groups"
            )
        spans = [
            extent + 2 * pad - gap * (taps - 1) - 1
            for extent, pad, gap, taps in zip(x_shape[3:], padding, dilation, (self.kh, self.kw), strict=True)
        ]
        if min(spans) < 0:
            raise ValueError(
                f"fused_conv2d: the kernel does not fit into x of {self.height} × {self.width} with its padding"
            )
        self.out_height, self.out_width = (span // step + 1 for span, step in zip(spans, stride, strict=True))
        self.rows = self.n * self.out_height * self.out_width
        self.rank = 0 if u is None else u.shape[1]
        self.settings = (*stride, *padding, *dilation)
        self.constants = {
            "OUT": self.out,
            "IN": self.into,
            "GROUPS": groups,
            "KH": self.kh,
            "KW": self.kw,
            "RANK": self.rank,
            "LAYOUT": layout,
            "ACC": TL_DTYPES[accumulator(dtype)],
            "PRECISION": _conv_precision(dtype),
        }
        pixels = self.n * max(self.height * self.width, self.out_height * self.out_width)
        if max(pixels, max(self.rank, 1) * self.out * self.into * self.kh * self.kw) > INT32_LIMIT:
            raise ValueError(f"fused_conv2d: {pixels} pixels a client, must be at most {INT32_LIMIT}")

    @property
    def splits_in_two(self) -> bool:
        """Whether the product of u and v is a depthwise and a 1×1 convolution that cost less than their weight."""
        return self.rank > 0 and self.constants["LAYOUT"] == SPATIAL and self.rank < self.kh * self.kw

    @property
    def separates(self) -> bool:
        """Whether the product of u and v is a kh×1 and a 1×kw convolution that cost less than their weight."""
        cost = self.rank * (self.into * self.kh + self.out * self.kw)
        return (
            self.rank > 0
            and self.groups == 1
            and self.constants["LAYOUT"] == KERNEL
            and cost < self.into * self.out * self.kh * self.kw
        )

    def halves(self, u: Tensor, v: Tensor) -> tuple[tuple[Tensor, tuple], tuple[Tensor, tuple]]:
        """The weights of the kh×1 and the 1×kw convolution, and their settings as the ops take them."""
        sy, sx, py, px, dy, dx = self.settings
        down = (SPATIAL, (self.rank, self.into, self.kh, 1), False, (sy, 1), (py, 0), (dy, 1), 1)
        across = (SPATIAL, (self.out, self.rank, 1, self.kw), False, (1, sx), (0, px), (1, dx), 1)
        return (u.unsqueeze(-1), down), (v.transpose(1, 2).unsqueeze(-2), across)

    @property
    def extents(self):
        return self.height, self.width, self.out_height, self.out_width


class _Mu:
    """μ as the kernels take it: none, dense [k, o, i, kh, kw], or values [k, nnz] on the support `index` [k, nnz]."""

    def __init__(self, mu: Tensor | None, index: Tensor | None, size):
        self.data, self.bits, self.starts, self.bits_client = mu, None, None, 0
        self.code = 0 if mu is None else 1 if index is None else 2
        self.strides = (0,) * 5 if mu is None else mu.stride()
        if index is not None:
            self.bits, self.starts, self.bits_client = support_bits(index, size)
            if mu is not None:
                self.data, client = slices(mu)
                self.strides = (client, 0, 0, 0, 0)


def _factors(u: Tensor | None, v: Tensor | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(u, v) with contiguous slices, and their client strides."""
    if u is None:
        return None, None, 0, 0
    (u, u_client), (v, v_client) = slices(u), slices(v)
    return u, v, u_client, v_client


def fused_conv2d(
    x: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    mu: Tensor | None,
    index: Tensor | None,
    bias: Tensor | None,
    layout: int,
    size: list[int],
    channels_last: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    p = _Problem(x.dtype, x.shape, u, layout, size, stride, padding, dilation, groups)
    out = empty_weight(x, (p.n, p.out, p.out_height, p.out_width), is_channels_last(x))
    if not out.numel():
        return out
    u, v, u_client, v_client = _factors(u, v)
    bias, bias_client = slices(bias) if bias is not None else (None, 0)
    if mu is None and p.splits_in_two:
        return rank1_conv.launch(p, out, x, u, v, bias, (u_client, v_client, bias_client), False)
    if mu is None and p.separates:
        if separable_conv.fits(x.dtype, p.rank, p.width, p.out_width):
            return separable_conv.launch(p, out, x, u, v, bias, (u_client, v_client, bias_client), False)
        (down, first), (across, second) = p.halves(u, v)
        hidden = fused_conv2d(x, None, None, down, None, None, *first)
        return to_format(fused_conv2d(hidden, None, None, across, None, bias, *second), is_channels_last(x))
    mu = _Mu(mu, index, size)
    tile = image_tile(x.dtype, p.k, p.rows, p.out // groups, p.into)
    block_m, block_o, block_i, *_ = tile
    m_blocks, o_blocks = triton.cdiv(p.rows, block_m), triton.cdiv(p.out // groups, block_o)
    with torch.cuda.device_of(x):
        conv_kernel[(p.k * groups * m_blocks * o_blocks,)](
            out,
            x,
            mu.data,
            mu.bits,
            mu.starts,
            u,
            v,
            bias,
            p.rows,
            *p.extents,
            m_blocks,
            o_blocks,
            *out.stride(),
            *x.stride(),
            *mu.strides,
            mu.bits_client,
            u_client,
            v_client,
            bias_client,
            *p.settings,
            **p.constants,
            MU=mu.code,
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            **tile.settings,
        )
    return out


def fused_conv2d_dx(
    grad: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    mu: Tensor | None,
    index: Tensor | None,
    image: list[int],
    image_channels_last: bool,
    layout: int,
    size: list[int],
    channels_last: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    k = grad.shape[0]
    p = _Problem(grad.dtype, (k, *image), u, layout, size, stride, padding, dilation, groups)
    dx = empty_weight(grad, image, image_channels_last)
    if not dx.numel():
        return dx
    u, v, u_client, v_client = _factors(u, v)
    if mu is None and p.splits_in_two:
        return rank1_conv.launch(p, dx, grad, u, v, None, (u_client, v_client, 0), True)
    if mu is None and p.separates:
        if separable_conv.fits(grad.dtype, p.rank, p.height, p.out_height):
            return separable_conv.launch(p, dx, grad, u, v, None, (u_client, v_client, 0), True)
        (down, first), (across, second) = p.halves(u, v)
        hidden = (p.n, p.rank, p.out_height, p.width)
        above = fused_conv2d_dx(grad, None, None, across, None, hidden, is_channels_last(grad), *second)
        return fused_conv2d_dx(above, None, None, down, None, image, image_channels_last, *first)
    mu = _Mu(mu, index, size)
    rows = p.n * p.height * p.width
    tile = image_tile(grad.dtype, k, rows, p.into, p.out // groups)
    block_m, block_i, block_o, *_ = tile
    m_blocks, i_blocks = triton.cdiv(rows, block_m), triton.cdiv(p.into, block_i)
    with torch.cuda.device_of(grad):
        conv_input_kernel[(k * groups * m_blocks * i_blocks,)](
            dx,
            grad,
            mu.data,
            mu.bits,
            mu.starts,
            u,
            v,
            rows,
            *p.extents,
            m_blocks,
            i_blocks,
            *dx.stride(),
            *grad.stride(),
            *mu.strides,
            mu.bits_client,
            u_client,
            v_client,
            *p.settings,
            **p.constants,
            MU=mu.code,
            BLOCK_M=block_m,
            BLOCK_I=block_i,
            BLOCK_O=block_o,
            **tile.settings,
        )
    return dx


def fused_conv2d_dw(
    grad: Tensor,
    x: Tensor,
    u: Tensor | None,
    v: Tensor | None,
    index: Tensor | None,
    layout: int,
    size: list[int],
    channels_last: bool,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dW is summed into du and dv while its tile is in registers (spatial of rank 1, and kernel of any rank); otherwise
    it is written and read once more. Where dμ is not asked for, dW is not computed at all if its two parts cost less.
    """
    p = _Problem(x.dtype, x.shape, u, layout, size, stride, padding, dilation, groups)
    need_u, need_v, need_mu = (bool(needs >> bit & 1) for bit in range(3))
    need_u, need_v = need_u and u is not None, need_v and v is not None
    reduced = layout == KERNEL or (layout != VIEW and p.rank == 1)
    whole = (need_u or need_v) and not reduced
    nothing = x.new_empty(0)
    if not (p.rows and p.k * p.out * p.into and (need_u or need_v or need_mu)):
        dmu = nothing
        if need_mu:
            dmu = _zero_weight(x, size, channels_last) if index is None else x.new_zeros(index.shape)
        return u.new_zeros(u.shape) if need_u else nothing, v.new_zeros(v.shape) if need_v else nothing, dmu
    acc = accumulator(x.dtype)
    left, right, u_client, v_client = _factors(u, v)
    if not need_mu and p.splits_in_two:
        wanted = (u if need_u else None, v if need_v else None)
        found = rank1_conv.weight_gradient(p, grad, x, left, right, (u_client, v_client), *wanted, acc)
        du, dv = (_gather(one, x).to(x.dtype) for one in found)
        return du, dv, nothing
    if not need_mu and p.separates:
        (down, first), (across, second) = p.halves(left, right)
        du = dv = nothing
        if need_u:
            hidden = (p.n, p.rank, p.out_height, p.width)
            above = fused_conv2d_dx(grad, None, None, across, None, hidden, is_channels_last(x), *second)
            du = fused_conv2d_dw(above, x, None, None, None, *first, 4)[2].squeeze(-1)
        if need_v:
            hidden = fused_conv2d(x, None, None, down, None, None, *first)
            dv = fused_conv2d_dw(grad, hidden, None, None, None, *second, 4)[2].squeeze(-2).transpose(1, 2).contiguous()
        return du, dv, nothing
    tile = gradient_tile(x.dtype, p.out // groups, p.into, p.rows)
    block_o, block_i, block_m, *_ = tile
    o_blocks, i_blocks = triton.cdiv(p.out // groups, block_o), triton.cdiv(p.into, block_i)
    steps, programs = triton.cdiv(p.rows, block_m), p.k * groups * o_blocks * i_blocks
    # enough programs to fill a large GPU even for one model, without going below four steps each
    splits = max(1, min(triton.cdiv(264, programs), steps // 4))
    part_dtype = x.dtype if splits == 1 else acc
    parts = p.k * splits
    mu = _Mu(None, index if need_mu and not whole else None, size)
    dmu, dmu_strides = None, (0,) * 5
    if whole or (need_mu and index is None):
        dmu, mu.code = empty_weight(x.new_empty(parts, 0, dtype=part_dtype), tuple(size), channels_last), 1
        dmu_strides = dmu.stride()
    elif need_mu:
        dmu, mu.code = x.new_empty(parts, index.shape[1], dtype=part_dtype), 2
        dmu_strides = (index.shape[1], 0, 0, 0, 0)
    else:
        mu.code = 0
    if layout == KERNEL:
        parts_u, parts_v = groups * o_blocks * p.kw, i_blocks * p.kh
    else:
        parts_u, parts_v = groups * o_blocks * i_blocks, 1
    du = u.new_empty(p.k, splits * parts_u, *u.shape[1:], dtype=acc) if need_u and reduced else None
    dv = v.new_empty(p.k, splits * parts_v, *v.shape[1:], dtype=acc) if need_v and reduced else None
    with torch.cuda.device_of(x):
        conv_weight_kernel[(programs * splits,)](
            dmu,
            mu.bits,
            mu.starts,
            du,
            dv,
            grad,
            x,
            left,
            right,
            p.rows,
            *p.extents,
            o_blocks,
            i_blocks,
            splits,
            *dmu_strides,
            mu.bits_client,
            *grad.stride(),
            *x.stride(),
            u_client,
            v_client,
            *p.settings,
            **p.constants,
            STEPS=triton.cdiv(steps, splits),
            MU=mu.code,
            NEED_U=du is not None,
            NEED_V=dv is not None,
            BLOCK_M=block_m,
            BLOCK_O=block_o,
            BLOCK_I=block_i,
            **tile.settings,
        )
    if dmu is not None and splits > 1:
        dmu = to_format(dmu.unflatten(0, (p.k, splits)).sum(1).to(x.dtype), channels_last)
    if not whole:
        grads = (
            _gather(parts, like).to(x.dtype) if parts is not None else nothing for parts, like in ((du, u), (dv, v))
        )
        return *grads, dmu if need_mu else nothing
    du, dv = rank1_weight_backward(dmu, u, v, layout, need_u | need_v << 1)
    if not need_mu:
        return du, dv, nothing
    return du, dv, dmu if index is None else dmu.contiguous().flatten(1).gather(1, index.long())


def _zero_weight(like: Tensor, size, channels_last: bool) -> Tensor:
    return empty_weight(like, tuple(size), channels_last).zero_()


def factored_conv2d(x, u, v, values, index, bias, size, *settings) -> Tensor:
    return fused_conv2d(x, u, v, values, index, bias, SPATIAL, size, False, *settings)


def factored_conv2d_backward(
    grad, x, u, v, values, index, size, *settings_and_needs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *settings, needs = settings_and_needs
    settings = (SPATIAL, size, False, *settings)
    dx = du = dv = dvalues = x.new_empty(0)
    if needs & 1:
        dx = fused_conv2d_dx(grad, u, v, values, index, x.shape[1:], is_channels_last(x), *settings)
    if weights := needs >> 1 & (3 if index is None else 7):
        du, dv, dvalues = fused_conv2d_dw(grad, x, u, v, index, *settings, weights)
    return dx, du, dv, dvalues
