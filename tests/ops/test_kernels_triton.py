"""The Triton kernels: run (on a GPU or interpreted), and compiled ahead of time for sm_80 and sm_90."""

import importlib

import pytest
import torch
from triton_tools import interpret, stack_bytes, stand_in, variants_of

from fastfact.base.formats import KERNEL, SEPARABLE, SPATIAL

pytest.importorskip("triton", reason="needs triton, which PyTorch's CUDA builds bring")

if torch.cuda.is_available():
    from triton_cases import *  # noqa: F403

    pytestmark = pytest.mark.gpu
else:
    pytestmark = pytest.mark.kernels


def test_in_the_interpreter():
    interpret("triton_cases.py")


SIZE = [64, 32, 3, 3]
INDEX = torch.arange(0, 128, 2, dtype=torch.int32).expand(2, -1)


def at_least_float(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def adapter(k, t, rank):
    x, sigma, a, b = t(2, 40, 96), t(64, 96), t(2, rank, 96), t(2, 64, rank)
    y, hidden = k.lowrank_linear(x, None, sigma, a, b, t(64), 2.0)
    return k.lowrank_linear_backward(y, x, sigma, a, b, hidden, 2.0, 13)


KERNELS = {
    "rank1_kernel": lambda k, t: (
        k.rank1_weight(t(2, *SIZE), t(2, 1, 3, 3), t(2, 1, 64, 32), SPATIAL, False),
        k.compact_weight(t(2, 1, 3, 3), t(2, 1, 64, 32), t(2, 64), INDEX, SPATIAL, True),
    ),
    "rank1_backward_kernel": lambda k, t: (
        k.rank1_weight_backward(t(2, *SIZE), t(2, 1, 32, 3), t(2, 1, 64, 3), KERNEL, 3),
        k.compact_weight_backward(t(2, *SIZE), t(2, 1, 32, 3), t(2, 1, 64, 3), t(2, 64), INDEX, KERNEL, 7),
    ),
    "product_kernel": lambda k, t: (
        k.lowrank_weight(t(2, *SIZE), t(2, 24, 192), t(2, 96, 24), SEPARABLE, SIZE, 1.0, True),
        k.hadamard_weight(t(2, 64, 16), t(2, 288, 16), t(2, 64, 16), t(2, 288, 16), SIZE, True, False),
    ),
    "thin_kernel": lambda k, t: [
        call
        for rank in (16, 24)
        for call in (
            k.lowrank_weight_backward(t(2, *SIZE), t(2, rank, 192), t(2, 96, rank), SEPARABLE, SIZE, 1.0, 3),
            k.hadamard_weight_backward(
                t(2, *SIZE), *(t(2, extent, rank) for extent in (64, 288, 64, 288)), SIZE, True, 15
            ),
        )
    ],
    "contract_kernel": lambda k, t: (
        k.lowrank_weight_backward(t(2, *SIZE), t(2, 24, 192), t(2, 96, 24), SEPARABLE, SIZE, 1.0, 1),
        k.hadamard_weight_backward(
            t(2, *SIZE), t(2, 64, 16), t(2, 288, 16), t(2, 64, 16), t(2, 288, 16), SIZE, True, 1
        ),
    ),
    "adapter_kernel": lambda k, t: [adapter(k, t, rank) for rank in (8, 128)],
    "factor_kernel": lambda k, t: [adapter(k, t, rank) for rank in (8, 128)],
    "prox_sgd_kernel": lambda k, t: k.prox_sgd_step([t(4096)], [t(4096)], [t(4096)], [0.1], 0.1, 0.9, 0.0, True),
    "count_kernel": lambda k, t: k.pack_bitmap(t(2, 3, 4096), 2),
    "write_kernel": lambda k, t: [k.pack_bitmap(t(2, 3, 4096), code) for code in (1, 2)],
    "popcount_kernel": lambda k, t: k.unpack_bitmap(t(2, 3, 512).to(torch.uint8), t(0), t(0), 4096),
    "similarity_kernel": lambda k, t: [
        k.similarity_sums(keys, uploads, torch.ones(90, dtype=torch.bool), 0, 90, 1.0, 0.5, True)
        for keys, dtype in ((at_least_float(t(90, 256)), None), (t(90, 256).to(torch.int8), torch.float32))
        for uploads in (
            [torch.zeros(90, width, dtype=dtype or keys.dtype) for width in widths] for widths in ((96,), (96, 2000))
        )
    ],
    "srht_chunk_kernel": lambda k, t: k.srht(t(2, 5000), torch.ones(5000, dtype=torch.int8), torch.arange(64), True),
    "srht_keep_kernel": lambda k, t: k.srht(t(2, 5000), torch.ones(5000, dtype=torch.int8), torch.arange(64), True),
    "read_kernel": lambda k, t: k.unpack_bitmap(t(2, 3, 512).to(torch.uint8), t(0), t(0), 4096),
}


PRODUCTS = ("product_kernel", "contract_kernel", "thin_kernel", "adapter_kernel", "factor_kernel")


def compiled_for(name, dtype, arch, monkeypatch):
    kernels = importlib.import_module("fastfact.kernels")
    modules = [
        importlib.import_module(f"fastfact.kernels.{module}")
        for module in ("adapter", "weights", "sgd", "bitmap", "similarity")
    ]
    chosen = stand_in(monkeypatch, modules, name, arch)
    KERNELS[name](kernels, lambda *shape: torch.zeros(*shape, dtype=dtype))
    assert chosen.compiled
    return chosen.compiled


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles_ahead_of_time(name, dtype, arch, monkeypatch):
    for compiled in compiled_for(name, dtype, arch, monkeypatch):
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 160 * 1024
        ptx = compiled.asm["ptx"]
        if name in ("rank1_kernel", "prox_sgd_kernel"):
            assert ".v4.b32" in ptx, "16-byte accesses"
        if name in PRODUCTS and dtype == torch.bfloat16:
            assert "mma" in ptx, "tensor cores"
        if name in ("adapter_kernel", "factor_kernel") or (name == "thin_kernel" and dtype == torch.bfloat16):
            assert stack_bytes(compiled) == 0


@pytest.mark.parametrize(
    "name",
    ["product_kernel", "contract_kernel", "adapter_kernel", "factor_kernel", "similarity_kernel", "srht_chunk_kernel"],
)
def test_float64_compiles_ahead_of_time(name, monkeypatch):
    """The kernels with matrix products, of which Triton lowers fewer in float64."""
    assert all(compiled.asm["cubin"] for compiled in compiled_for(name, torch.float64, 90, monkeypatch))


def test_the_step_writes_its_table_by_one_variant_whatever_its_addresses(monkeypatch):
    """Nothing of it is copied from the host or kept, so that a CUDA graph can capture it."""
    sgd = importlib.import_module("fastfact.kernels.sgd")
    stand_in(monkeypatch, [], None, 90)
    variants = variants_of(monkeypatch, [sgd])
    monkeypatch.setattr(torch, "tensor", None)
    memory = torch.zeros(4096)
    for count in (1, 3, 40):
        params = [memory[at : at + 5 + at] for at in range(count)]
        for l1 in (0.0, 1e-3, 1.75):
            sgd.prox_sgd_step(params, params, params, [l1] * count, 0.1, 0.9, 0.0, True)
    assert len(variants["table_kernel"]) == 1
    assert not [name for name, value in vars(sgd).items() if isinstance(value, dict) and "table" in name]
