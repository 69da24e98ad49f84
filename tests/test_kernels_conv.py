"""The fused convolution: run (on a GPU or interpreted), and compiled ahead of time for sm_80 and sm_90."""

import importlib

import pytest
import torch
from triton_tools import interpret, stand_in

from fastfact.reference import KERNEL, SPATIAL

pytest.importorskip("triton", reason="needs triton, which PyTorch's CUDA builds bring")

if torch.cuda.is_available():
    from triton_conv_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu


def test_in_the_interpreter():
    interpret("triton_conv_cases.py")


@pytest.mark.parametrize(
    ("layout", "dtype", "arch"),
    [
        (SPATIAL, torch.bfloat16, 80),
        (SPATIAL, torch.bfloat16, 90),
        (SPATIAL, torch.float32, 80),
        (KERNEL, torch.bfloat16, 90),
    ],
)
@pytest.mark.parametrize("name", ["conv_kernel", "conv_input_kernel", "conv_weight_kernel"])
def test_compiles_ahead_of_time(name, layout, dtype, arch, monkeypatch):
    conv = importlib.import_module("fastfact.kernels.conv")
    chosen = stand_in(monkeypatch, [conv], name, arch)
    k, n, channels, side = 2, 8, 128, 32
    # fewer taps compile faster; the largest kernel once
    taps = 3 if (layout, dtype, arch) == (SPATIAL, torch.bfloat16, 90) else 2

    def images(c):
        return torch.zeros(k, n, side, side, c, dtype=dtype).permute(0, 1, 4, 2, 3)

    mu = torch.zeros(k, channels, taps, taps, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    if layout == SPATIAL:
        u, v = torch.zeros(k, 1, taps, taps, dtype=dtype), torch.zeros(k, 1, channels, channels, dtype=dtype)
    else:
        u = v = torch.zeros(k, 1, channels, taps, dtype=dtype)
    x = images(channels)
    if name == "conv_kernel":
        conv.conv2d(x, mu, u, v, None, layout, padding=(1, 1))
    elif name == "conv_input_kernel":
        conv.conv2d_input_gradient(x, x.shape, mu, u, v, layout, padding=(1, 1))
    else:
        conv.conv2d_weight_gradient(x, x, u, v, layout, padding=(1, 1), channels_last=True)
    (compiled,) = chosen.compiled
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 160 * 1024
    if dtype == torch.bfloat16:
        assert ("wgmma" if arch == 90 else "mma.sync") in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]
