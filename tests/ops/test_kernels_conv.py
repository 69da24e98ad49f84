"""The fused convolution: run (on a GPU or interpreted), and compiled ahead of time for sm_80, 86, 89 and 90."""

import importlib

import pytest
import torch
from triton_tools import SHARED_MEMORY, Compiler, interpret, stack_bytes, stand_in, variants_of

from fastfact.base.formats import KERNEL, SPATIAL

launch = pytest.importorskip("fastfact.kernels.launch", reason="needs triton, which PyTorch's CUDA builds bring")

if torch.cuda.is_available():
    from triton_conv_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu
else:
    pytestmark = pytest.mark.kernels


def test_in_the_interpreter():
    interpret("triton_conv_cases.py")


def convolution_for(part, arch, monkeypatch):
    """(the module, the kernel of `part`, which compiles for `arch`); no other kernel runs."""
    conv, weights = (importlib.import_module(f"fastfact.kernels.{name}") for name in ("conv", "weights"))
    name = "conv_weight_kernel" if part == "weight gradient" else "conv_kernel"
    return conv, stand_in(monkeypatch, [conv, weights], name, arch)


def run(conv, part, tensors, settings):
    x, u, v, mu, index, grad = tensors
    if part == "forward":
        return conv.fused_conv2d(x, u, v, mu, index, None, *settings)
    if part == "data gradient":
        return conv.fused_conv2d_dx(grad, u, v, mu, index, tuple(x.shape[1:]), True, *settings)
    return conv.fused_conv2d_dw(grad, x, u, v, index, *settings, 7)


def layer(k, n, channels, side, rank, dtype=torch.bfloat16):
    """Tensors and settings of a 3×3 layer in the spatial layout with dense μ, channels_last."""
    x = torch.zeros(k, n, side, side, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    mu = torch.zeros(k, channels, 3, 3, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    u, v = torch.zeros(k, rank, 3, 3, dtype=dtype), torch.zeros(k, rank, channels, channels, dtype=dtype)
    return (x, u, v, mu, None, x), (SPATIAL, (channels, channels, 3, 3), True, (1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize("arch", list(SHARED_MEMORY))
@pytest.mark.parametrize("part", ["forward", "data gradient", "weight gradient"])
def test_every_rank_fits_every_device(part, arch, monkeypatch):
    """256 channels at 8×8 for a cohort, in the tiles that many clients have, with dense μ and without."""
    conv, chosen = convolution_for(part, arch, monkeypatch)
    monkeypatch.setattr(conv, "image_tile", lambda *args: conv.Tile(128, 128, 64, 8))
    monkeypatch.setattr(conv.torch.nn.functional, "conv2d", None)
    monkeypatch.setattr(conv.torch.nn.grad, "conv2d_input", None)
    monkeypatch.setattr(conv.torch.nn.grad, "conv2d_weight", None)
    for rank in range(1, 17):
        (x, u, v, mu, index, grad), settings = layer(2, 2, 256, 8, rank)
        run(conv, part, (x, u, v, mu, index, grad), settings)
        if rank >= 9:
            # no cheaper than its weight: `Rank1(rank=9, sparse=False)`
            run(conv, part, (x, u, v, None, index, grad), settings)
    assert len(chosen.compiled) == 16 + 8


def test_without_room_for_a_tile_a_smaller_one_is_taken_and_at_last_cudnn(monkeypatch):
    """Once each: what was too large is not compiled for the next call."""
    conv, chosen = convolution_for("forward", 90, monkeypatch)
    tensors, settings = layer(1, 1, 256, 8, 9)
    monkeypatch.setattr(conv, "image_tile", lambda *args: conv.Tile(128, 128, 128, 8, 4))
    run(conv, "forward", tensors, settings)
    assert len(chosen.compiled) == 1
    tried = len(launch._too_large)
    assert tried > 0
    run(conv, "forward", tensors, settings)
    assert len(chosen.compiled) == 2 and len(launch._too_large) == tried

    asked = []

    def refuse(*args, **constants):
        asked.append(constants)
        raise launch.OutOfResources(10**9, 0, "shared memory")

    monkeypatch.setattr(Compiler, "__call__", refuse)
    monkeypatch.setattr(conv, "image_tile", lambda *args: conv.Tile(64, 64, 32, 4))
    small, settings = layer(2, 1, 4, 5, 1, torch.float32)
    small = [t if t is None else torch.randn(t.shape) for t in small]
    weight = torch.randn(2, 4, 4, 3, 3)
    monkeypatch.setattr(conv, "rank1_weight", lambda *args: weight)
    assert torch.equal(
        run(conv, "forward", small, settings),
        torch.stack([torch.nn.functional.conv2d(x, w, padding=1) for x, w in zip(small[0], weight, strict=True)]),
    )
    assert len(asked) > 2
    assert run(conv, "data gradient", small, settings).shape == small[0].shape


def test_a_ragged_epoch_compiles_few_variants(monkeypatch):
    """Batches of every size up to 32: what differs between them is no constant of a kernel, but the tile."""
    conv, rank1_conv, weights = (
        importlib.import_module(f"fastfact.kernels.{name}") for name in ("conv", "rank1_conv", "weights")
    )
    stand_in(monkeypatch, [weights], None, 90)
    variants = variants_of(monkeypatch, [conv, rank1_conv])
    for n in range(1, 33):
        (x, u, v, mu, _, grad), settings = layer(100, n, 16, 4, 1)
        for factors in ((u, v, mu), (u, v, None)):
            for part in ("forward", "data gradient", "weight gradient"):
                needs = 7 if factors[2] is not None else 3
                if part == "weight gradient":
                    conv.fused_conv2d_dw(grad, x, u, v, None, *settings, needs)
                else:
                    run(conv, part, (x, *factors, None, grad), settings)
    counts = {name: len(keys) for name, keys in variants.items()}
    # forward and data gradient in two tiles each; three depths, in the type of x or, as parts, in float32
    assert counts["conv_kernel"] <= 2 * 2 and counts["conv_weight_kernel"] <= 3 * 2
    assert counts["rank1_conv_kernel"] <= 2 and counts["rank1_conv_v_kernel"] == counts["rank1_conv_u_kernel"] == 1


@pytest.mark.parametrize(
    ("layout", "dtype", "arch", "mu"),
    [
        (SPATIAL, torch.bfloat16, 80, "dense"),
        (SPATIAL, torch.bfloat16, 90, "dense"),
        (SPATIAL, torch.float32, 80, "dense"),
        (KERNEL, torch.bfloat16, 90, "support"),
    ],
)
@pytest.mark.parametrize("part", ["forward", "data gradient", "weight gradient"])
def test_compiles_ahead_of_time(part, layout, dtype, arch, mu, monkeypatch):
    conv, chosen = convolution_for(part, arch, monkeypatch)
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
    run(conv, part, (x, u, v, weight, index, x), settings)
    (compiled,) = chosen.compiled
    assert compiled.asm["cubin"] and compiled.metadata.shared <= 160 * 1024
    if dtype == torch.bfloat16:
        assert ("wgmma" if arch == 90 else "mma.sync") in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]


@pytest.mark.parametrize("part", ["forward", "data gradient", "weight gradient"])
def test_25_taps_stay_in_the_registers(part, monkeypatch):
    """The second layer of ResNet-9 for a few clients, in the tiles that many have."""
    conv, chosen = convolution_for(part, 90, monkeypatch)
    x = torch.zeros(4, 32, 32, 32, 64, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    grad = torch.zeros(4, 32, 16, 16, 128, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    mu = torch.zeros(4, 128, 5, 5, 64, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
    u, v = torch.zeros(4, 1, 5, 5, dtype=torch.bfloat16), torch.zeros(4, 1, 128, 64, dtype=torch.bfloat16)
    settings = (SPATIAL, (128, 64, 5, 5), True, (2, 2), (2, 2), (1, 1), 1)
    run(conv, part, (x, u, v, mu, None, grad), settings)
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


@pytest.mark.parametrize("plane", [(1, 2), (2, 1), (1, 32)], ids=str)
def test_planes_of_any_size_compile_ahead_of_time(plane, monkeypatch):
    """Triton compiles a kernel anew for integers that are 1, of which those in a plane may be few or many."""
    for part in ("forward", "weight gradient"):
        with monkeypatch.context() as patch:
            conv, chosen = convolution_for(part, 90, patch)
            x = torch.zeros(2, 2, *plane, 4, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
            u, v = torch.zeros(2, 1, 2, 3, dtype=torch.bfloat16), torch.zeros(2, 1, 4, 4, dtype=torch.bfloat16)
            mu = torch.zeros(2, 4, 2, 3, 4, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
            taller = torch.zeros(2, 2, plane[0] + 1, plane[1], 4, dtype=torch.bfloat16).permute(0, 1, 4, 2, 3)
            # one row less, as many columns
            settings = (SPATIAL, (4, 4, 2, 3), True, (1, 1), (0, 1), (1, 1), 1)
            run(conv, part, (taller, u, v, mu, None, x), settings)
            assert chosen.compiled


def test_a_reciprocal_divides():
    geometry = importlib.import_module("fastfact.kernels.geometry")
    g = torch.Generator().manual_seed(0)
    most = 2**31 - 1
    for divisor in [*range(1, 300), 2**30, 2**30 + 1, most, *torch.randint(1, most, (300,), generator=g).tolist()]:
        multiplier, shift = geometry.reciprocal(divisor)
        numbers = [0, 1, divisor - 1, divisor, 2 * divisor - 1, most - 1, most]
        numbers += torch.randint(most, (30,), generator=g).tolist()
        assert 2**31 <= multiplier < 2**32
        assert 1 < shift < 64 and all(n * multiplier >> shift == n // divisor for n in numbers if n <= most)
