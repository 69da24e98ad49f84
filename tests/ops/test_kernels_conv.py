"""The fused convolution: run (on a GPU or interpreted), and compiled ahead of time for sm_80 and sm_90."""

import importlib

import pytest
import torch
from triton_tools import interpret, stack_bytes, stand_in

from fastfact.formats import KERNEL, SPATIAL

pytest.importorskip("triton", reason="needs triton, which PyTorch's CUDA builds bring")

if torch.cuda.is_available():
    from triton_conv_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu


def test_in_the_interpreter():
    interpret("triton_conv_cases.py")


@pytest.mark.parametrize(
    ("layout", "dtype", "arch", "mu"),
    [
        (SPATIAL, torch.bfloat16, 80, "dense"),
        (SPATIAL, torch.bfloat16, 90, "dense"),
        (SPATIAL, torch.float32, 80, "dense"),
        (KERNEL, torch.bfloat16, 90, "support"),
    ],
)
@pytest.mark.parametrize("name", ["conv_kernel", "conv_input_kernel", "conv_weight_kernel"])
def test_compiles_ahead_of_time(name, layout, dtype, arch, mu, monkeypatch):
    conv = importlib.import_module("fastfact.kernels.conv")
    chosen = stand_in(monkeypatch, [conv], name, arch)
    k, n, channels, side = 3, 8, 128, 32
    # fewer taps compile faster; the largest kernel once
    taps = 3 if (layout, dtype, arch) == (SPATIAL, torch.bfloat16, 90) else 2
    x = torch.zeros(k, n, side, side, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    index = torch.arange(0, 4096, 3, dtype=torch.int32).expand(k, -1) if mu == "support" else None
    weight = torch.zeros(k, channels, taps, taps, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    weight = weight if mu == "dense" else torch.zeros(k, 1366, dtype=dtype)
    if layout == SPATIAL:
        u, v = torch.zeros(k, 1, taps, taps, dtype=dtype), torch.zeros(k, 1, channels, channels, dtype=dtype)
    else:
        u = v = torch.zeros(k, 1, channels, taps, dtype=dtype)
    size = (channels, channels, taps, taps)
    settings = (layout, size, True, (1, 1), (taps // 2,) * 2, (1, 1), 1)
    if name == "conv_kernel":
        conv.fused_conv2d(x, u, v, weight, index, None, *settings)
    elif name == "conv_input_kernel":
        conv.fused_conv2d_dx(x, u, v, weight, index, (n, channels, side, side), True, *settings)
    else:
        conv.fused_conv2d_dw(x, x, u, v, index, *settings, 7)
    (compiled,) = chosen.compiled
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 160 * 1024
    if dtype == torch.bfloat16:
        assert ("wgmma" if arch == 90 else "mma.sync") in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ["conv_kernel", "conv_input_kernel", "conv_weight_kernel"])
def test_25_taps_stay_in_the_registers(name, monkeypatch):
    """The second layer of ResNet-9 for a few clients, in the tiles that many have."""
    conv = importlib.import_module("fastfact.kernels.conv")
    chosen = stand_in(monkeypatch, [conv], name, 90)
    x = torch.zeros(4, 32, 32, 32, 64, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    grad = torch.zeros(4, 32, 16, 16, 128, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    mu = torch.zeros(4, 128, 5, 5, 64, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    u, v = torch.zeros(4, 1, 5, 5, dtype=torch.bfloat16), torch.zeros(4, 1, 128, 64, dtype=torch.bfloat16)
    settings = (SPATIAL, (128, 64, 5, 5), True, (2, 2), (2, 2), (1, 1), 1)
    if name == "conv_kernel":
        conv.fused_conv2d(x, u, v, mu, None, None, *settings)
    elif name == "conv_input_kernel":
        conv.fused_conv2d_dx(grad, u, v, mu, None, x.shape[1:], True, *settings)
    else:
        conv.fused_conv2d_dw(grad, x, u, v, None, *settings, 7)
    (compiled,) = chosen.compiled
    assert "wgmma" in compiled.asm["ptx"] and stack_bytes(compiled) == 0


@pytest.mark.parametrize(("rank", "arch"), [(16, 80), (16, 90), (64, 90)])
def test_the_separable_path_compiles_ahead_of_time(rank, arch, monkeypatch):
    conv, separable_conv = (importlib.import_module(f"fastfact.kernels.{name}") for name in ("conv", "separable_conv"))
    chosen = stand_in(monkeypatch, [separable_conv], "separable_conv_kernel", arch)
    x = torch.zeros(2, 8, 8, 8, 256, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    factors = torch.zeros(2, 2, rank, 256, 3, dtype=torch.bfloat16)
    settings = (KERNEL, (256, 256, 3, 3), False, (1, 1), (1, 1), (1, 1), 1)
    conv.fused_conv2d(x, *factors, None, None, None, *settings)
    conv.fused_conv2d_dx(x, *factors, None, None, x.shape[1:], True, *settings)
    assert len(chosen.compiled) == 2
    for compiled in chosen.compiled:
        assert compiled.metadata.shared <= 100 * 1024 and stack_bytes(compiled) == 0
        assert ("wgmma" if arch == 90 else "mma.sync") in compiled.asm["ptx"]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", ["rank1_conv_kernel", "rank1_conv_v_kernel", "rank1_conv_u_kernel"])
def test_the_rank1_path_compiles_ahead_of_time(name, arch, monkeypatch):
    conv, rank1_conv = (importlib.import_module(f"fastfact.kernels.{module}") for module in ("conv", "rank1_conv"))
    chosen = stand_in(monkeypatch, [rank1_conv], name, arch)
    dtype = torch.bfloat16
    x = torch.zeros(2, 8, 16, 16, 256, dtype=dtype).permute(0, 1, 4, 2, 3)
    u, v = torch.zeros(2, 1, 3, 3, dtype=dtype), torch.zeros(2, 1, 256, 256, dtype=dtype)
    settings = (SPATIAL, (256, 256, 3, 3), False, (1, 1), (1, 1), (1, 1), 1)
    if name == "rank1_conv_kernel":
        conv.fused_conv2d(x, u, v, None, None, None, *settings)
        conv.fused_conv2d_dx(x, u, v, None, None, x.shape[1:], True, *settings)
    else:
        conv.fused_conv2d_dw(x, x, u, v, None, *settings, 3)
    assert chosen.compiled
    for compiled in chosen.compiled:
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 100 * 1024
        assert ("wgmma" if arch == 90 else "mma.sync") in compiled.asm["ptx"]
