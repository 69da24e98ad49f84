"""Shared memory, registers and stack of every Triton kernel at every tile, compiled ahead of time; needs no GPU.

    python -m bench.gpu_resources [--arch 80 86 89 90] [--json FILE] [--fill-cache]

--fill-cache compiles what the benchmarks launch first, in the tiles they choose, into Triton's cache instead, and says
nothing of it (`gpu_bundle`).
"""

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bench import gpu
from fastfact import kernels
from fastfact.base.formats import KERNEL, SEPARABLE, SPATIAL
from fastfact.bench.common import RESNET9, name_of

MODULES = ("adapter", "bitmap", "conv", "norm", "rank1_conv", "separable_conv", "sgd", "similarity", "weights")
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""Bytes a block may have."""


class Device:
    """Stands in for Triton's driver: a GPU that compiles and never runs."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


class Launched:
    """Stands in for a kernel: a launch compiles it and notes what it takes."""

    def __init__(self, kernel, rows: list[dict], label: dict, measure: bool):
        self.kernel, self.rows, self.label, self.measure = kernel, rows, label, measure

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **constants):
        compiled = self.kernel.warmup(*args, grid=(1,), **constants)
        if not self.measure:
            return
        tile = {
            name: value for name, value in constants.items() if name.startswith("BLOCK") or name in ("WIDTH", "SIDE")
        }
        row = {"kernel": self.kernel.__name__, **self.label, "tile": tile}
        row |= {name: constants[name] for name in ("num_warps", "num_stages", "TRANSPOSED") if name in constants}
        shared = compiled.metadata.shared
        row |= {"shared": shared, **usage(compiled), "fits": shared <= SHARED[self.label["arch"]]}
        if row not in self.rows:
            self.rows.append(row)
            print(json.dumps(row), flush=True)


def usage(compiled) -> dict[str, int]:
    """registers and stack (bytes) of a thread."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [program, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{key}:(\d+)", text)[1]) for name, key in (("registers", "REG"), ("stack", "STACK"))}


def empty(*shape: int, dtype=torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def layer(k: int, n: int, shape, rank: int = 1, layout: int = SPATIAL):
    """(x, dy, u, v, μ, settings) of a convolution, channels_last."""
    i, o, kernel, stride, side = shape
    out = (side + 2 * (kernel // 2) - kernel) // stride + 1
    x, grad = (empty(k, n, s, s, c).permute(0, 1, 4, 2, 3) for s, c in ((side, i), (out, o)))
    mu = empty(k, o, kernel, kernel, i).permute(0, 1, 4, 2, 3)
    sides = ((i, kernel), (o, kernel)) if layout == KERNEL else ((kernel, kernel), (o, i))
    u, v = (empty(k, rank, *one) for one in sides)
    settings = (layout, (o, i, kernel, kernel), True, (stride,) * 2, (kernel // 2,) * 2, (1, 1), 1)
    return x, grad, u, v, mu, settings


def convolve(x, grad, u, v, mu, settings) -> None:
    kernels.fused_conv2d(x, u, v, mu, None, None, *settings)
    kernels.fused_conv2d_dx(grad, u, v, mu, None, tuple(x.shape[1:]), True, *settings)
    kernels.fused_conv2d_dw(grad, x, u, v, None, *settings, 7 if mu is not None else 3)


def convolve_in_every_tile(x, grad, u, v, mu, settings) -> None:
    """The three kernels of a convolution whose weight is at hand, in the tiles that `gpu tune` tries."""
    conv = importlib.import_module("fastfact.kernels.conv")
    for tile in map(conv.Tile._make, gpu.IMAGE_TILES):
        with mock.patch.object(conv, "image_tile", lambda *_, tile=tile: tile):
            kernels.fused_conv2d(x, None, None, mu, None, None, *settings)
            kernels.fused_conv2d_dx(grad, None, None, mu, None, tuple(x.shape[1:]), True, *settings)
    for tile in map(conv.Tile._make, gpu.GRADIENT_TILES):
        with mock.patch.object(conv, "gradient_tile", lambda *_, tile=tile: tile):
            kernels.fused_conv2d_dw(grad, x, u, v, None, *settings, 7)


def others(dtype: torch.dtype) -> None:
    """A launch of each kernel that is no convolution."""

    def t(*shape):
        return empty(*shape, dtype=dtype)

    size, index = [64, 32, 3, 3], torch.arange(0, 128, 2, dtype=torch.int32).expand(2, -1)
    kernels.rank1_weight(t(2, *size), t(2, 1, 3, 3), t(2, 1, 64, 32), SPATIAL, True)
    kernels.compact_weight(t(2, 1, 3, 3), t(2, 1, 64, 32), t(2, 64), index, SPATIAL, True)
    kernels.rank1_weight_backward(t(2, *size), t(2, 1, 3, 3), t(2, 1, 64, 32), SPATIAL, 3)
    kernels.compact_weight_backward(t(2, *size), t(2, 1, 3, 3), t(2, 1, 64, 32), t(2, 64), index, SPATIAL, 7)
    kernels.lowrank_weight(t(2, *size), t(2, 24, 192), t(2, 96, 24), SEPARABLE, size, 1.0, True)
    for rank in (16, 24, 48):
        factors = t(2, rank, 192), t(2, 96, rank)
        kernels.lowrank_weight_backward(t(2, *size), *factors, SEPARABLE, size, 1.0, 3)
        pairs = [t(2, extent, rank) for extent in (64, 288, 64, 288)]
        kernels.hadamard_weight(*pairs, size, True, False)
        kernels.hadamard_weight_backward(t(2, *size), *pairs, size, True, 15)
    for rank in (8, 64, 128):
        x, sigma, a, b = t(2, 136, 192), t(768, 192), t(2, rank, 192), t(2, 768, rank)
        y, hidden = kernels.lowrank_linear(x, None, sigma, a, b, t(768), 2.0)
        kernels.lowrank_linear_backward(y, x, sigma, a, b, hidden, 2.0, 13)
    mean = t(2, 64).float()
    y, *_ = kernels.batch_norm(t(2, 3, 64, 8, 8), mean, mean, 1e-5)
    kernels.batch_norm_backward(y, y, mean, mean, mean, 1e-5)
    kernels.prox_sgd_step([t(4096)], [t(4096)], [t(4096)], [0.1], 0.1, 0.9, 0.0, True)
    kernels.pack_bitmap(torch.zeros(2, 3, 4096, dtype=dtype), 2)
    kernels.unpack_bitmap(torch.zeros(2, 3, 512, dtype=torch.uint8), t(0), t(0), 4096)
    keys = torch.ones(90, 256, dtype=torch.promote_types(dtype, torch.float32))
    kernels.similarity_sums(keys, [keys], torch.ones(90, dtype=torch.bool), 0, 90, 1.0, 0.5, True)
    kernels.srht(t(2, 5000), torch.ones(5000, dtype=torch.int8), torch.arange(64), True)


def stood_in(rows: list[dict], label: dict, measure: bool = True) -> Iterator:
    for name in MODULES:
        module = importlib.import_module(f"fastfact.kernels.{name}")
        for kernel in [found for found in vars(module) if found.endswith("_kernel")]:
            yield mock.patch.object(module, kernel, Launched(getattr(module, kernel), rows, label, measure))


def table(arch: int) -> list[dict]:
    rows: list[dict] = []
    label = {"arch": arch, "dtype": "bfloat16"}
    # the stand-ins write nothing, and counts decide how much is allocated
    patches = [*stood_in(rows, label), mock.patch.object(Tensor, "new_empty", Tensor.new_zeros)]
    for patch in patches:
        patch.start()
    one = layer(2, 2, (256, 256, 3, 1, 8))
    convolve_in_every_tile(*one)
    x, grad, u, v, _, settings = one
    convolve(x, grad, u, v, None, settings)
    for rank in (1, 16, 64):
        x, grad, u, v, _, settings = layer(2, 2, (256, 256, 3, 1, 8), rank, KERNEL)
        kernels.fused_conv2d(x, u, v, None, None, None, *settings)
        kernels.fused_conv2d_dx(grad, u, v, None, None, tuple(x.shape[1:]), True, *settings)
    for dtype in (torch.bfloat16, torch.float32):
        label["dtype"] = str(dtype).removeprefix("torch.")
        others(dtype)
    for patch in reversed(patches):
        patch.stop()
    return rows


def fill_cache() -> None:
    for patch in stood_in([], {}, measure=False):
        patch.start()
    for shape in dict.fromkeys(RESNET9):
        print(name_of(shape), flush=True)
        for k, n in ((100, 32), (1, 32), (1, 256)):
            convolve(*layer(k, n, shape))
    for _, o, _, stride, side in dict.fromkeys(RESNET9):
        x = empty(100, 32, side // stride, side // stride, o).permute(0, 1, 4, 2, 3)
        mean = empty(100, o, dtype=torch.float32)
        kernels.batch_norm(x, mean, mean, 1e-5)
        kernels.batch_norm_backward(x, x, mean, mean, mean, 1e-5)
    for side in (8, 16, 32):
        x, grad, u, v, _, settings = layer(1, 128, (256, 256, 3, 1, side))
        convolve(x, grad, u, v, None, settings)
    for shape in gpu.TUNED:
        convolve_in_every_tile(*layer(100, 32, shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=list(SHARED))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fill-cache", action="store_true")
    args = parser.parse_args()
    rows: list[dict] = []
    for arch in args.arch:
        driver.set_active(Device(arch))
        if args.fill_cache:
            fill_cache()
            continue
        rows += table(arch)
        if args.json:
            content = {"triton": triton.__version__, "shared memory a block may have": SHARED, "rows": rows}
            args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
