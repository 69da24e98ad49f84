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
def pixel(m, image):
    """(n, y, x) of pixel number m of images [n, height, width], `image` = (height, width)."""
    height, width = image
    return (m // width // height).to(tl.int64), m // width % height, m % width


@triton.jit
def address(strides, client, n, y, x):
    """Where pixels begin in a tensor of these `geometry.ImageStrides`."""
    return client * strides.client + n * strides.n + y.to(tl.int64) * strides.y + x.to(tl.int64) * strides.x
