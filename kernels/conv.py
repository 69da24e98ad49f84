"""Convolution of many clients at once, each with a weight of its own, as one implicit GEMM.

Every tensor has the client axis in front, and any strides; channels_last inputs (NHWC) read and write in full lines.
The weight is that of `ops.reference.factored_weight`: made from u, v and μ once, in the dtype of x, for the forward and
for the data gradient. The weight gradient is summed into du, dv and dμ while its tile is in registers. Where u and v
alone are the weight and their parts cost less, no weight is made (`rank1_conv`, `separable_conv`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fastfact.base.formats import KERNEL, SPATIAL, VIEW, empty_weight, is_channels_last, to_format, weight_last
from fastfact.kernels import rank1_conv, separable_conv
from fastfact.kernels.geometry import INT32_LIMIT, Axis, Image, ImageStrides, Slices, accumulator, slices
from fastfact.kernels.launch import Tile, first_that_fits
from fastfact.kernels.support import support_bits, support_tile
from fastfact.kernels.taps import address, pixel, tap_position
from fastfact.kernels.weights import TL_DTYPES, _gather, compact_weight, rank1_weight, rank1_weight_backward


class WeightStrides(NamedTuple):
    """Of a weight as `conv_kernel` reads it: `c` and `j` go along the channels of the result and of the source."""

    client: int
    group: int
    c: int
    j: int
    y: int
    x: int


class GradientStrides(NamedTuple):
    """Of dμ [part, o, i, kh, kw], or of its values on a support, [part, nnz]."""

    part: int
    o: int = 0
    i: int = 0
    y: int = 0
    x: int = 0


@triton.jit(do_not_specialize=["rows", "m_blocks"])
def conv_kernel(
    out,
    source,
    weight,
    bias,
    rows,
    m_blocks,
    c_blocks,
    image,
    source_image,
    out_strides,
    source_strides,
    weight_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """out[client, (n, y, x), c] = Σ over taps and j of source[client, (n, y, x) at the tap, j] · W[client, c, j, tap].

    OUT and IN are the channels of `out` and `source` in a group. TRANSPOSED: the data gradient, dy to dx. A program
    makes a tile [BLOCK_C, BLOCK_M]. rows: pixels (n, y, x) of a client.
    """
    pid = tl.program_id(0)
    group = pid // c_blocks // m_blocks % GROUPS
    c = pid % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m = pid // c_blocks % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    client = (pid // c_blocks // m_blocks // GROUPS).to(tl.int64)
    m_inside = m < rows
    c_inside = c < OUT
    n, y, x = pixel(m, image)
    source += client * source_strides.client + group.to(tl.int64) * IN * source_strides.c
    weight += client * weight_strides.client + group.to(tl.int64) * weight_strides.group
    weight_row = weight + c.to(tl.int64) * weight_strides.c
    acc = tl.zeros([BLOCK_C, BLOCK_M], ACC)
    # The channels are the inner loop: only that one is pipelined, and with the taps in it each would take stages of
    # shared memory of its own. The taps of a row are a loop at run time: unrolled, the addresses of 25 taps spilled.
    for ky in tl.static_range(KH):
        source_y, row_inside = tap_position(y, ky, source_image[0], window[0], TRANSPOSED)
        for kx in range(KW):
            source_x, column_inside = tap_position(x, kx, source_image[1], window[1], TRANSPOSED)
            there = m_inside & row_inside & column_inside
            at = source + address(source_strides, 0, n, source_y, source_x)
            tap = weight_row + ky * weight_strides.y + kx * weight_strides.x
            for start in range(0, IN, BLOCK_J):
                j = start + tl.arange(0, BLOCK_J)
                j_inside = j < IN
                pixels = tl.load(
                    at[None, :] + (j.to(tl.int64) * source_strides.c)[:, None],
                    mask=there[None, :] & j_inside[:, None],
                    other=0.0,
                )
                factor = tl.load(
                    tap[:, None] + (j.to(tl.int64) * weight_strides.j)[None, :],
                    mask=c_inside[:, None] & j_inside[None, :],
                    other=0.0,
                )
                acc = tl.dot(factor, pixels, acc, input_precision=PRECISION, out_dtype=ACC)
    channel = group * OUT + c
    if HAS_BIAS:
        acc += tl.load(bias.data + client * bias.client + channel, mask=c_inside, other=0.0).to(ACC)[:, None]
    tl.store(
        out + (address(out_strides, client, n, y, x)[None, :] + (channel.to(tl.int64) * out_strides.c)[:, None]),
        acc.to(out.dtype.element_ty),
        mask=m_inside[None, :] & c_inside[:, None],
    )


@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def conv_weight_kernel(
    dmu,
    support,
    du,
    dv,
    grad,
    x,
    u,
    v,
    rows,
    steps,
    splits,
    o_blocks,
    i_blocks,
    image,
    x_image,
    dmu_strides,
    grad_strides,
    x_strides,
    window,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    RANK: tl.constexpr,
    LAYOUT: tl.constexpr,
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

    Each program takes one of the splits of the pixels, `steps` tiles of them; with p = (client, split), parts are
    dμ [p, …] (MU: 0 not asked for, 1 all of dW, 2 on the support);
    spatial (rank 1): du [p, (group, i block, o block), ky, kx], dv [p, o, i];
    kernel: du [p, (group, o block, kx), r, i, ky], dv [p, (i block, ky), r, o, kx].
    OUT and IN are the channels in a group, rows the pixels of a client.
    """
    pid = tl.program_id(0)
    o_block = pid % o_blocks
    i_block = pid // o_blocks % i_blocks
    group = pid // o_blocks // i_blocks % GROUPS
    split = pid // o_blocks // i_blocks // GROUPS % splits
    client = (pid // o_blocks // i_blocks // GROUPS // splits).to(tl.int64)
    p = client * splits + split
    in_group = o_block * BLOCK_O + tl.arange(0, BLOCK_O)
    o = group * OUT + in_group
    i = i_block * BLOCK_I + tl.arange(0, BLOCK_I)
    o_inside = in_group < OUT
    i_inside = i < IN
    inside = o_inside[:, None] & i_inside[None, :]
    grad_row = grad + client * grad_strides.client + o.to(tl.int64) * grad_strides.c
    x_column = x + client * x_strides.client + (group * IN + i).to(tl.int64) * x_strides.c
    if NEED_U or NEED_V:
        u_row = u.data + client * u.client
        v_row = v.data + client * v.client
    dv_tile = tl.zeros([BLOCK_O, BLOCK_I], ACC)
    for ky in tl.static_range(KH):
        for kx in range(KW):
            acc = tl.zeros([BLOCK_O, BLOCK_I], ACC)
            for step in range(steps):
                m = (split * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
                n, oy, ox = pixel(m, image)
                iy, row_inside = tap_position(oy, ky, x_image[0], window[0], False)
                ix, column_inside = tap_position(ox, kx, x_image[1], window[1], False)
                there = (m < rows) & row_inside & column_inside
                above = tl.load(
                    grad_row[:, None] + address(grad_strides, 0, n, oy, ox)[None, :],
                    mask=there[None, :] & o_inside[:, None],
                    other=0.0,
                )
                below = tl.load(
                    x_column[None, :] + address(x_strides, 0, n, iy, ix)[:, None],
                    mask=there[:, None] & i_inside[None, :],
                    other=0.0,
                )
                acc = tl.dot(above, below, acc, input_precision=PRECISION, out_dtype=ACC)
            if MU == 1:
                at = p * dmu_strides.part + ky * dmu_strides.y + kx * dmu_strides.x
                at_tile = (o.to(tl.int64) * dmu_strides.o)[:, None] + (i.to(tl.int64) * dmu_strides.i)[None, :]
                tl.store(dmu + (at + at_tile), acc.to(dmu.dtype.element_ty), mask=inside)
            if MU == 2:
                flat = ((o[:, None] * IN + i[None, :]) * KH + ky) * KW + kx
                on_support, place = support_tile(support, client, flat, inside)
                tl.store(dmu + p * dmu_strides.part + place, acc.to(dmu.dtype.element_ty), mask=on_support)
            if LAYOUT == 1:
                if NEED_U:
                    # loaded again for each tap: kept, it would push the sums out of the registers
                    v_tile = tl.load(v_row + (o[:, None] * IN + i[None, :]), mask=inside, other=0.0).to(ACC)
                    part = ((p * GROUPS + group) * i_blocks + i_block) * o_blocks + o_block
                    tl.store(du + ((part * KH + ky) * KW + kx), tl.sum(tl.sum(acc * v_tile, 1), 0))
                if NEED_V:
                    dv_tile += acc * tl.load(u_row + (ky * KW + kx)).to(ACC)
            if LAYOUT == 2:
                for r in tl.static_range(RANK):
                    if NEED_U:
                        factor = tl.load(v_row + ((r * GROUPS * OUT + o) * KW + kx), mask=o_inside, other=0.0).to(ACC)
                        part = (((p * GROUPS + group) * o_blocks + o_block) * KW + kx) * RANK + r
                        tl.store(du + ((part * IN + i) * KH + ky), tl.sum(acc * factor[:, None], 0), mask=i_inside)
                    if NEED_V:
                        factor = tl.load(u_row + ((r * IN + i) * KH + ky), mask=i_inside, other=0.0).to(ACC)
                        part = ((p * i_blocks + i_block) * KH + ky) * RANK + r
                        at = dv + ((part * GROUPS * OUT + o) * KW + kx)
                        tl.store(at, tl.sum(acc * factor[None, :], 1), mask=o_inside)
    if LAYOUT == 1 and NEED_V:
        at = p * GROUPS * OUT * IN + o[:, None] * IN + i[None, :]
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)


def has_wgmma(device: torch.device) -> bool:
    """Whether the device has Hopper's products of matrices in shared memory: larger tiles pay there though they spill,
    as measured on an H200 (bench/NOTES.md)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def image_tile(dtype: torch.dtype, k: int, m: int, n: int, inner: int, wgmma: bool = False) -> Tile:
    """For k clients of m pixels × n channels, with `inner` channels to sum over: forward and data gradient."""
    if dtype == torch.float64:
        return Tile(32, 32, 16, 4)
    if dtype == torch.float32:
        return Tile(64, 32 if n <= 32 else 64, 16, 4)
    depth = 16 if inner <= 16 else 32 if inner <= 32 else 64
    if wgmma and m >= 256 and n > 64 and depth == 64 and k * m * n >= 132 * 256 * 128:
        return Tile(256, 128, depth, 8)
    # a program for each of an H100's 132 multiprocessors, at least
    if m >= 128 and n > 64 and k * m * n >= 132 * 128 * 128:
        return Tile(128, 128, depth, 8)
    columns = 32 if n <= 32 else 64
    # by 4 warps the smaller tile spills on sm_80, 86 and 89
    wide = depth > 16 and m >= 128 and k * m * columns >= 132 * 128 * 64
    return Tile(128 if wide else 64, columns, depth, 8)


def gradient_tile(dtype: torch.dtype, out: int, into: int, rows: int, wgmma: bool = False) -> Tile:
    """For dW [out, into], summed over `rows` pixels."""
    if dtype == torch.float64:
        return Tile(32, 32, 16, 8)
    depth = 16 if dtype == torch.float32 or rows <= 16 else 32 if rows <= 32 else 64
    if wgmma and depth == 64 and min(out, into) > 64:
        return Tile(128, 128, depth, 8)
    return Tile(64, 32 if into <= 32 else 64, depth, 4 if wgmma and depth == 64 else 8)


def _conv_precision(dtype: torch.dtype) -> str:
    """float32 products as PyTorch's own convolutions take them, which round to TF32 unless told otherwise."""
    return "tf32" if dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32" else "ieee"


class _Problem:
    """Shapes and settings of one convolution."""

    def __init__(self, dtype, x_shape, u, layout, size, stride, padding, dilation, groups):
        self.k, self.n, self.channels, *self.image = x_shape
        self.out, self.into, self.kh, self.kw = size
        self.groups, self.size, self.layout = groups, tuple(size), layout
        if self.channels != self.into * groups or self.out % groups:
            raise ValueError(
                f"fused_conv2d: x has {self.channels} channels, a weight of {list(size)} in {groups} groups needs "
                f"{self.into * groups}, and its {self.out} outputs must be a multiple of the groups"
            )
        self.window = tuple(Axis(*one) for one in zip(stride, padding, dilation, strict=True))
        spans = [
            extent + 2 * axis.padding - axis.dilation * (taps - 1) - 1
            for extent, axis, taps in zip(self.image, self.window, size[2:], strict=True)
        ]
        if min(spans) < 0:
            raise ValueError(
                f"fused_conv2d: the kernel does not fit into x of {' × '.join(map(str, self.image))} with its padding"
            )
        self.out_image = [span // axis.stride + 1 for span, axis in zip(spans, self.window, strict=True)]
        self.rank = 0 if u is None else u.shape[1]
        self.constants = {
            "GROUPS": groups,
            "KH": self.kh,
            "KW": self.kw,
            "ACC": TL_DTYPES[accumulator(dtype)],
            "PRECISION": _conv_precision(dtype),
        }
        pixels = self.n * max(torch.Size(image).numel() for image in (self.image, self.out_image))
        if max(pixels, max(self.rank, 1) * torch.Size(size).numel()) > INT32_LIMIT:
            raise ValueError(f"fused_conv2d: {pixels} pixels a client, must be at most {INT32_LIMIT}")

    @property
    def rows(self) -> int:
        """Pixels of the output of a client."""
        return self.n * torch.Size(self.out_image).numel()

    @property
    def splits_in_two(self) -> bool:
        """Whether the product of u and v is a depthwise and a 1×1 convolution that cost less than their weight."""
        return self.rank > 0 and self.layout == SPATIAL and self.rank < self.kh * self.kw

    @property
    def separates(self) -> bool:
        """Whether the product of u and v is a kh×1 and a 1×kw convolution that cost less than their weight."""
        cost = self.rank * (self.into * self.kh + self.out * self.kw)
        return (
            self.rank > 0
            and self.groups == 1
            and self.layout == KERNEL
            and cost < self.into * self.out * self.kh * self.kw
        )

    def halves(self, u: Tensor, v: Tensor) -> tuple[tuple[Tensor, tuple], tuple[Tensor, tuple]]:
        """The weights of the kh×1 and the 1×kw convolution, and their settings as the ops take them."""
        (sy, py, dy), (sx, px, dx) = self.window
        down = (SPATIAL, (self.rank, self.into, self.kh, 1), False, (sy, 1), (py, 0), (dy, 1), 1)
        across = (SPATIAL, (self.out, self.rank, 1, self.kw), False, (1, sx), (0, px), (1, dx), 1)
        return (u.unsqueeze(-1), down), (v.transpose(1, 2).unsqueeze(-2), across)


LINES = 8
"""Channels from which on images are brought into channels_last, so that neighbours are read together."""


def _as_read(x: Tensor) -> Tensor:
    """x [k, n, c, h, w] in the format in which kernels read it fastest."""
    return to_format(x, True) if x.shape[2] >= LINES else x


def _slices(*tensors: Tensor | None) -> tuple[Slices | None, ...]:
    return tuple(None if tensor is None else slices(tensor) for tensor in tensors)


def _weight(p: _Problem, u: Tensor | None, v: Tensor | None, mu: Tensor | None, index: Tensor | None) -> Tensor:
    """W [k, o, i, kh, kw]. One that is made has the input channels side by side, so that its tiles are read in lines.

    To make a tile of W inside the convolution, as often as there are tiles of pixels, reads and multiplies more than W
    written once and read again (bench/NOTES.md).
    """
    if index is None:
        return mu if u is None else rank1_weight(mu, u, v, p.layout, True)
    if u is None:
        u, v = (mu.new_zeros(1, 1, *sides).expand(p.k, -1, -1, -1) for sides in (p.size[2:], p.size[:2]))
        return compact_weight(u, v, mu, index, SPATIAL, True)
    return compact_weight(u, v, mu, index, p.layout, True)


def _by_cudnn(p: _Problem) -> dict:
    (sy, py, dy), (sx, px, dx) = p.window
    return {"stride": (sy, sx), "padding": (py, px), "dilation": (dy, dx), "groups": p.groups}


def _convolve(p: _Problem, out: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> None:
    """The forward from `source` = x into `out`, or (transposed) the data gradient from dy."""
    channels, inner = p.out // p.groups, p.into
    client, o, i, y, x = weight.stride()
    strides = WeightStrides(client, channels * o, o, i, y, x)
    if transposed:
        channels, inner, strides = inner, channels, WeightStrides(client, channels * o, i, o, y, x)
    image, source_image = Image.of(*out.shape[3:]), tuple(source.shape[3:])
    rows = p.n * image.height * image.width
    constants = p.constants | {"OUT": channels, "IN": inner, "TRANSPOSED": transposed, "HAS_BIAS": bias is not None}

    def launch(tile: Tile) -> None:
        blocks = triton.cdiv(rows, tile.rows), triton.cdiv(channels, tile.columns)
        conv_kernel[(p.k * p.groups * blocks[0] * blocks[1],)](
            out,
            source,
            weight,
            *_slices(bias),
            rows,
            *blocks,
            image,
            source_image,
            ImageStrides.of(out),
            ImageStrides.of(source),
            strides,
            p.window,
            **constants,
            BLOCK_M=tile.rows,
            BLOCK_C=tile.columns,
            BLOCK_J=tile.depth,
            **tile.settings,
        )

    tiles = image_tile(source.dtype, p.k, rows, channels, inner, has_wgmma(source.device)).and_smaller()
    with torch.cuda.device_of(source):
        if first_that_fits(tiles, source.device, ("conv", source.dtype, *constants.values()), launch):
            return
    for j in range(p.k):
        if transposed:
            out[j] = torch.nn.grad.conv2d_input(out.shape[1:], weight[j], source[j], **_by_cudnn(p))
        else:
            out[j] = F.conv2d(source[j], weight[j], None if bias is None else bias[j], **_by_cudnn(p))


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
    last = is_channels_last(x)
    out = empty_weight(x, (p.n, p.out, *p.out_image), last)
    if not out.numel():
        return out
    x = _as_read(x)
    if mu is None and p.splits_in_two and rank1_conv.launch(p, out, x, *_slices(u, v, bias), False):
        return out
    if mu is None and p.separates:
        if separable_conv.launch(p, out, x, *_slices(u, v, bias), False):
            return out
        (down, first), (across, second) = p.halves(u, v)
        hidden = fused_conv2d(x, None, None, down, None, None, *first)
        return to_format(fused_conv2d(hidden, None, None, across, None, bias, *second), last)
    _convolve(p, out, x, _weight(p, u, v, mu, index), bias, False)
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
    p = _Problem(grad.dtype, (grad.shape[0], *image), u, layout, size, stride, padding, dilation, groups)
    dx = empty_weight(grad, image, image_channels_last)
    if not dx.numel():
        return dx
    grad = _as_read(grad)
    if mu is None and p.splits_in_two and rank1_conv.launch(p, dx, grad, *_slices(u, v, None), True):
        return dx
    if mu is None and p.separates:
        if separable_conv.launch(p, dx, grad, *_slices(u, v, None), True):
            return dx
        (down, first), (across, second) = p.halves(u, v)
        hidden = (p.n, p.rank, p.out_image[0], p.image[1])
        above = fused_conv2d_dx(grad, None, None, across, None, hidden, is_channels_last(grad), *second)
        return fused_conv2d_dx(above, None, None, down, None, image, image_channels_last, *first)
    _convolve(p, dx, grad, _weight(p, u, v, mu, index), None, True)
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
    nothing = x.new_empty(0)
    if not (p.rows and p.k * p.out * p.into and (need_u or need_v or need_mu)):
        dmu = nothing
        if need_mu:
            dmu = _zero_weight(x, size, channels_last) if index is None else x.new_zeros(index.shape)
        return u.new_zeros(u.shape) if need_u else nothing, v.new_zeros(v.shape) if need_v else nothing, dmu
    grad, x = _as_read(grad), _as_read(x)
    if not need_mu and p.splits_in_two:
        found = rank1_conv.weight_gradient(p, grad, x, *_slices(u, v), need_u, need_v)
        if found is not None:
            du, dv = (_gather(one, x).to(x.dtype) for one in found)
            return du, dv, nothing
    if not need_mu and p.separates:
        (down, first), (across, second) = p.halves(u, v)
        du = dv = nothing
        if need_u:
            hidden = (p.n, p.rank, p.out_image[0], p.image[1])
            above = fused_conv2d_dx(grad, None, None, across, None, hidden, is_channels_last(x), *second)
            du = fused_conv2d_dw(above, x, None, None, None, *first, 4)[2].squeeze(-1)
        if need_v:
            hidden = fused_conv2d(x, None, None, down, None, None, *first)
            dv = fused_conv2d_dw(grad, hidden, None, None, None, *second, 4)[2].squeeze(-2).transpose(1, 2).contiguous()
        return du, dv, nothing
    reduced = layout == KERNEL or (layout != VIEW and p.rank == 1)
    whole = (need_u or need_v) and not reduced
    wanted = (u if need_u and reduced else None, v if need_v and reduced else None)
    support = index if need_mu and not whole else None
    parts = _weight_gradient(p, grad, x, u, v, wanted, need_mu or whole, support, channels_last)
    if parts is None:
        # W and cuDNN, one client after the other
        dw = [torch.nn.grad.conv2d_weight(x[j], size, grad[j], **_by_cudnn(p)) for j in range(p.k)]
        dmu, whole = to_format(torch.stack(dw), channels_last), True
    else:
        du, dv, dmu = parts
    if not whole:
        du, dv = (_gather(one, like).to(x.dtype) if one is not None else nothing for one, like in ((du, u), (dv, v)))
        return du, dv, dmu if need_mu else nothing
    du, dv = rank1_weight_backward(dmu, u, v, layout, need_u | need_v << 1) if need_u or need_v else (nothing, nothing)
    if not need_mu:
        return du, dv, nothing
    return du, dv, dmu if index is None else dmu.contiguous().flatten(1).gather(1, index.long())


def _weight_gradient(
    p: _Problem, grad: Tensor, x: Tensor, u, v, wanted, need_mu: bool, index: Tensor | None, channels_last: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """Parts of du and dv for the factors that are `wanted`, [k, parts, …] in the accumulator's dtype, and dμ: all of dW
    [k, o, i, kh, kw], or [k, nnz] on the support `index`; None for what is not asked for. None where no tile fits.
    """
    acc, out = accumulator(x.dtype), p.out // p.groups
    mu_code = 0 if not need_mu else 1 if index is None else 2
    support = support_bits(index, p.size) if mu_code == 2 else None
    constants = p.constants | {
        "OUT": out,
        "IN": p.into,
        "RANK": 0 if wanted == (None, None) else p.rank,
        "LAYOUT": p.layout,
        "MU": mu_code,
        "NEED_U": wanted[0] is not None,
        "NEED_V": wanted[1] is not None,
    }
    results = []

    def launch(tile: Tile) -> None:
        o_blocks, i_blocks = triton.cdiv(out, tile.rows), triton.cdiv(p.into, tile.columns)
        tiles, programs = triton.cdiv(p.rows, tile.depth), p.k * p.groups * o_blocks * i_blocks
        # enough programs to fill a large GPU even for one model, without going below four steps each
        splits = max(1, min(triton.cdiv(264, programs), tiles // 4))
        part_dtype = x.dtype if splits == 1 else acc
        dmu, strides = None, GradientStrides(0)
        if mu_code == 1:
            dmu = empty_weight(x.new_empty(p.k * splits, 0, dtype=part_dtype), p.size, channels_last)
            strides = GradientStrides(*dmu.stride())
        elif mu_code == 2:
            dmu = x.new_empty(p.k * splits, index.shape[1], dtype=part_dtype)
            strides = GradientStrides(index.shape[1])
        parts_u, parts_v = p.groups * o_blocks * i_blocks, 1
        if p.layout == KERNEL:
            parts_u, parts_v = p.groups * o_blocks * p.kw, i_blocks * p.kh
        du, dv = (
            None if like is None else x.new_empty(p.k, splits * count, *like.shape[1:], dtype=acc)
            for like, count in zip(wanted, (parts_u, parts_v), strict=True)
        )
        conv_weight_kernel[(programs * splits,)](
            dmu,
            support,
            du,
            dv,
            grad,
            x,
            *_slices(u, v),
            p.rows,
            triton.cdiv(tiles, splits),
            splits,
            o_blocks,
            i_blocks,
            Image.of(*p.out_image),
            tuple(p.image),
            strides,
            ImageStrides.of(grad),
            ImageStrides.of(x),
            p.window,
            **constants,
            BLOCK_M=tile.depth,
            BLOCK_O=tile.rows,
            BLOCK_I=tile.columns,
            **tile.settings,
        )
        if dmu is not None and splits > 1:
            dmu = dmu.unflatten(0, (p.k, splits)).sum(1).to(x.dtype)
            dmu = to_format(dmu, channels_last) if mu_code == 1 else dmu
        results.append((du, dv, dmu))

    tiles = gradient_tile(x.dtype, out, p.into, p.rows, has_wgmma(x.device)).and_smaller()
    with torch.cuda.device_of(x):
        fits = first_that_fits(tiles, x.device, ("conv_weight", x.dtype, *constants.values()), launch)
    return results[0] if fits else None


def _zero_weight(like: Tensor, size, channels_last: bool) -> Tensor:
    return empty_weight(like, tuple(size), channels_last).zero_()


def factored_conv2d(x, u, v, values, index, bias, size, stride, padding, dilation, groups, repeated=False) -> Tensor:
    return fused_conv2d(x, u, v, values, index, bias, SPATIAL, size, False, stride, padding, dilation, groups)


def factored_conv2d_backward(
    grad, x, u, v, values, index, size, *settings_and_needs
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *settings, needs = settings_and_needs
    settings = (SPATIAL, size, weight_last(values), *settings)
    dx = du = dv = dvalues = x.new_empty(0)
    if needs & 1:
        dx = fused_conv2d_dx(grad, u, v, values, index, x.shape[1:], is_channels_last(x), *settings)
    if weights := needs >> 1 & (3 if values is None else 7):
        du, dv, dvalues = fused_conv2d_dw(grad, x, u, v, index, *settings, weights)
    return dx, du, dv, dvalues
