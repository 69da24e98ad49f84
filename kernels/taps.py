"""Where the taps of a convolution read, along one axis of the image."""

import triton
import triton.language as tl


@triton.jit
def tap_position(at, tap, extent, stride, padding, dilation, TRANSPOSED: tl.constexpr):
    """(where the tap reads for position `at` of the result, whether that is inside); TRANSPOSED: as the gradient."""
    if TRANSPOSED:
        spread = at + padding - tap * dilation
        position = spread // stride
        there = (spread >= 0) & (position * stride == spread) & (position < extent)
    else:
        position = at * stride - padding + tap * dilation
        there = (position >= 0) & (position < extent)
    return position, there
