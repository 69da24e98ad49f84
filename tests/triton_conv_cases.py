"""The fused convolution against PyTorch's, on a GPU or in Triton's interpreter; collected by test_kernels_conv.py."""

import os

import pytest
import torch
from op_cases import ATOL, rank1_factors, variants

from fastfact import reference
from fastfact.kernels import conv
from fastfact.reference import KERNEL, SPATIAL, VIEW

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.float64, torch.bfloat16] * GPU

# (k, n, i, o, h, w), (kh, kw), rank, stride, padding, dilation
CASES = [
    ((2, 2, 5, 7, 6, 5), (3, 3), 1, (1, 1), (1, 1), (1, 1)),
    ((1, 3, 3, 17, 5, 6), (3, 3), 1, (2, 2), (1, 1), (1, 1)),
    ((2, 1, 4, 3, 7, 8), (2, 3), 2, (2, 1), (0, 2), (1, 2)),
    ((3, 1, 18, 4, 3, 2), (1, 1), 3, (1, 1), (0, 0), (1, 1)),
]
BIG_CASES = [
    ((3, 8, 64, 65, 16, 15), (3, 3), 1, (1, 1), (1, 1), (1, 1)),
    ((2, 32, 32, 128, 32, 32), (5, 5), 1, (1, 1), (2, 2), (1, 1)),
]


def truth(x, mu, u, v, bias, grad, layout, settings):
    """y, dx, dμ, du, dv of PyTorch's own convolution with the reference's weight, one client after the other."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, mu, u, v)]
    stride, padding, dilation = settings
    weight = reference.rank1_weight(*leaves[1:], layout, False)
    images = [
        torch.nn.functional.conv2d(image, kernel, b, stride, padding, dilation)
        for image, kernel, b in zip(leaves[0], weight, bias, strict=True)
    ]
    y = torch.stack(images)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("how", ["plain", "channels_last", "shared"])
@pytest.mark.parametrize("layout", [SPATIAL, KERNEL, VIEW])
@pytest.mark.parametrize("case", CASES + BIG_CASES * GPU, ids=lambda case: "-".join(map(str, case[0])))
def test_conv2d(case, layout, how):
    (k, n, i, o, h, w), (kh, kw), rank, *settings = case
    torch.manual_seed(0)
    for dtype in DTYPES if GPU or how == "plain" else DTYPES[:1]:
        x = torch.randn(k, n, i, h, w, device=DEVICE).to(dtype)
        mu = variants(torch.randn(k, o, i, kh, kw, device=DEVICE).to(dtype), how)
        u, v = rank1_factors(layout, (o, i, kh, kw), k, rank, dtype, DEVICE)
        if how == "channels_last":
            x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
        if how == "shared":
            u, v = variants(u, "shared"), variants(v, "gaps")
        bias = torch.randn(k, o, device=DEVICE).to(dtype)
        y = conv.conv2d(x, mu, u, v, bias, layout, *settings)
        grad = torch.randn(y.shape, device=DEVICE).to(dtype)
        dx = conv.conv2d_input_gradient(grad, x.shape, mu, u, v, layout, *settings)
        grads = conv.conv2d_weight_gradient(grad, x, u, v, layout, *settings, channels_last=how == "channels_last")
        inputs = (x, mu, u, v, bias, grad)
        expected = truth(*(t.double() for t in inputs), layout, settings)
        plain = truth(*inputs, layout, settings)
        for out, true, same in zip((y, dx, *grads), expected, plain, strict=True):
            assert out.shape == true.shape and out.dtype == dtype
            scale = true.abs().max().item() + 1e-30
            allowed = 2 * (same.double() - true).abs().max().item() + ATOL[dtype] * scale
            assert (out.double() - true).abs().max().item() <= allowed


def test_only_what_is_needed():
    torch.manual_seed(0)
    x = torch.randn(2, 1, 3, 4, 4, device=DEVICE)
    for layout, rank in ((SPATIAL, 1), (SPATIAL, 2), (KERNEL, 2)):
        u, v = rank1_factors(layout, (5, 3, 1, 2), 2, rank, torch.float32, DEVICE)
        grad = torch.randn_like(conv.conv2d(x, None, u, v, None, layout))
        every = conv.conv2d_weight_gradient(grad, x, u, v, layout)
        for needs in range(8):
            some = conv.conv2d_weight_gradient(grad, x, u, v, layout, needs=needs)
            for bit, (one, full) in enumerate(zip(some, every, strict=True)):
                assert torch.equal(one, full) if needs >> bit & 1 else one.numel() == 0


def test_shapes_that_do_not_fit():
    u, v = rank1_factors(SPATIAL, (5, 3, 3, 3), 2, 1, torch.float32, DEVICE)
    with pytest.raises(ValueError, match="4 channels, must have 2 and 3"):
        conv.conv2d(torch.zeros(2, 1, 4, 8, 8, device=DEVICE), None, u, v, None, SPATIAL)
    with pytest.raises(ValueError, match="does not fit into x of 2 × 8"):
        conv.conv2d(torch.zeros(2, 1, 3, 2, 8, device=DEVICE), None, u, v, None, SPATIAL)
