"""Pixels of an image and where the taps of a convolution read, in kernels."""

import triton
import triton.language as tl


@triton.jit
def tap_position(at, tap, extent, axis, TRANSPOSED: tl.constexpr):
    """(where the tap reads for position `at` of the result, whether that is inside); TRANSPOSED: as the gradient.

    axis: a `geometry.Axis`.
    """
    if TRANSPOSED:
        spread = at + axis.padding - tap * axis.dilation
        position = spread // axis.stride
        there = (spread >= 0) & (position * axis.stride == spread) & (position < extent)
    else:
        position = at * axis.stride - axis.padding + tap * axis.dilation
        there = (position >= 0) & (position < extent)
    return position, there


@triton.jit
def _divided(m, reciprocal):
    """m // d for 0 ≤ m < 2³¹, `reciprocal` = `geometry.reciprocal(d)`: a division takes twenty instructions."""
    multiplier, shift = reciprocal
    return (tl.umulhi((m * 2).to(tl.uint32), multiplier.to(tl.uint32)) >> (shift - 31)).to(tl.int32)


@triton.jit
def pixel(m, image):
    """(n, y, x) of pixel number m of images [n, height, width], `image` a `geometry.Image`."""
    line = _divided(m, image.by_width)
    n = _divided(line, image.by_height)
    return n.to(tl.int64), line - n * image.height, m - line * image.width


@triton.jit
def address(strides, client, n, y, x):
    """Where pixels begin in a tensor of these `geometry.ImageStrides`."""
    return client * strides.client + n * strides.n + (y * strides.y + x * strides.x).to(tl.int64)
