"""Where the elements of a weight lie: every weight op sees W as a matrix of rows × columns, whatever its layout.

Rows are the index of one factor (u, or the rows of B or X), columns of the other (v, A, Y). Each side has at most two
digits, so that the address of W[row, column] is `rows.offset(row) + columns.offset(column)` in any memory format.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fastfact.base.formats import KERNEL, LINEAR, SEPARABLE, SPATIAL, to_format

INT32_LIMIT = 2**31 - 2**16


class Side(NamedTuple):
    """Positions 0 … size − 1 along one side of W, in the order in which they lie closest together in memory.

    Position e has digits (e // radix, e % radix); its address is digits · (stride1, stride0), and it belongs to
    element digits · (factor1, factor0) of the factor.
    """

    size: int
    radix: int
    stride1: int
    stride0: int
    factor1: int
    factor0: int

    @property
    def strides(self) -> tuple[int, int]:
        return self.stride1, self.stride0

    @property
    def digits(self) -> tuple[int, int, int]:
        """What a kernel is compiled for, for the same reason as the strides of a `Factor`."""
        return self.radix, self.factor1, self.factor0


def side(major: int, minor: int, stride1: int, stride0: int) -> Side:
    """The side whose factor index is `major_digit · minor + minor_digit`."""
    size = major * minor
    if major == 1 or stride1 == minor * stride0:
        return Side(size, max(size, 1), 0, stride0, size, 1)
    if minor == 1:
        return Side(size, max(size, 1), 0, stride1, size, 1)
    if stride1 < stride0:
        return Side(size, major, stride0, stride1, 1, minor)
    return Side(size, minor, stride1, stride0, minor, 1)


def rank1_sides(layout: int, shape, strides) -> tuple[Side, Side]:
    """(u side, v side) of a weight of `shape` (o, i, kh, kw) or (o, i) laid out with `strides`."""
    o, i, kh, kw = (*shape, 1, 1)[:4]
    so, si, sh, sw = (*strides, 0, 0)[:4]
    if layout == LINEAR:
        return side(1, i, 0, si), side(1, o, 0, so)
    if layout == SPATIAL:
        return side(kh, kw, sh, sw), side(o, i, so, si)
    if layout == KERNEL:
        return side(i, kh, si, sh), side(o, kw, so, sw)
    return side(1, kh * kw, 0, o * i), side(1, o * i, 0, 1)


def lowrank_sides(layout: int, shape, strides) -> tuple[Side, Side]:
    """(row side of B, column side of A)."""
    o, i, kh, kw = (*shape, 1, 1)[:4]
    so, si, sh, sw = (*strides, 0, 0)[:4]
    if layout == SEPARABLE:
        return side(i, kh, si, sh), side(o, kw, so, sw)
    return side(1, o * kh, 0, i * kw), side(1, i * kw, 0, 1)


def hadamard_sides(shape, strides) -> tuple[Side, Side]:
    """(row side of X, row side of Y); the two kernel axes must lie as one in memory."""
    o, i, kh, kw = (*shape, 1, 1)[:4]
    so, si, sh, sw = (*strides, 0, 0)[:4]
    return side(1, o, 0, so), side(i, kh * kw, si, sw if kw > 1 else sh)


class ImageStrides(NamedTuple):
    """Of a tensor [k, n, c, h, w]."""

    client: int
    n: int
    c: int
    y: int
    x: int

    @classmethod
    def of(cls, images: Tensor) -> "ImageStrides":
        """Raises ValueError for pixels of one image so far apart that kernels cannot count to them."""
        found = cls(*images.stride())
        if (reach := images.shape[3] * abs(found.y) + images.shape[4] * abs(found.x)) > INT32_LIMIT:
            raise ValueError(f"fused_conv2d: an image reaches over {reach} numbers, must be at most {INT32_LIMIT}")
        return found


def reciprocal(divisor: int) -> tuple[int, int]:
    """(multiplier, shift): m // divisor = m · multiplier >> shift for 0 ≤ m < 2³¹.

    shift = 31 + s with 2ˢ ≥ divisor, and multiplier = ⌈2³¹⁺ˢ / divisor⌉ < 2³², which is off by less than 2ˢ / divisor:
    what that adds to the quotient is below 1 / divisor (Granlund and Montgomery, 1994). Neither is ever 1, which Triton
    makes a constant: triton 3.6 takes the functions of a kernel for one whose tuples differ in that alone.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


class Image(NamedTuple):
    """height and width as kernels divide by them."""

    height: int
    width: int
    by_height: tuple[int, int]
    by_width: tuple[int, int]

    @classmethod
    def of(cls, height: int, width: int) -> "Image":
        return cls(height, width, reciprocal(height), reciprocal(width))


class Axis(NamedTuple):
    """How the taps of a convolution lie along one axis of the image."""

    stride: int
    padding: int
    dilation: int


class Slices(NamedTuple):
    """A tensor as kernels read it, and its client stride (0 where the clients share it)."""

    data: Tensor | None
    client: int


class Factor(NamedTuple):
    """A factor as kernels read it: element (row, r) of a client is at row · `row` + r · `rank` of its slice.

    A kernel is compiled for strides that are `tl.constexpr`: it then knows which addresses follow one another.
    """

    data: Tensor
    client: int
    row: int | tl.constexpr
    rank: int | tl.constexpr

    @classmethod
    def of(cls, tensor: Tensor, row: int | tl.constexpr, rank: int | tl.constexpr) -> "Factor":
        return cls(*slices(tensor), row, rank)


def slices(tensor: Tensor) -> Slices:
    """`tensor` with each client's slice contiguous."""
    if not tensor[:1].is_contiguous():
        tensor = tensor.contiguous() if tensor.stride(0) else tensor[:1].contiguous().expand_as(tensor)
    return Slices(tensor, tensor.stride(0))


def in_format(tensor: Tensor | None, like: Tensor) -> Slices:
    """`tensor` with each client's slice laid out as that of `like`."""
    if tensor is None:
        return Slices(None, 0)
    if any(n > 1 and a != b for n, a, b in zip(like.shape[1:], tensor.stride()[1:], like.stride()[1:], strict=True)):
        shared = tensor.stride(0) == 0
        laid = to_format((tensor[:1] if shared else tensor), not like[0].is_contiguous())
        tensor = laid.expand_as(tensor) if shared else laid
    return Slices(tensor, tensor.stride(0))


def gradient(grad: Tensor, contiguous: bool) -> Slices:
    """`grad`, contiguous if asked for or if its two kernel axes do not lie as one in memory."""
    split = grad.dim() == 5 and min(grad.shape[3:]) > 1 and grad.stride(3) != grad.shape[4] * grad.stride(4)
    return slices(grad) if contiguous or split else Slices(grad, grad.stride(0))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
