"""The CUDA library without a GPU: its kernels run on the CPU, nvcc compiles them, and the library loads."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest
import torch
from torch.utils import cpp_extension

from fastfact import ops
from fastfact.formats import VALUE_TYPES

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
MACROS = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"]
ARCHITECTURES = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90a,code=sm_90a"]
NVCC = shutil.which("nvcc")


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def compile_all(commands):
    """Run the compilers side by side."""
    running = [subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0, error[-8000:]
    return errors


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The whole CUDA library, binding and kernels, built for the CPU (see cuda_emulation.h) as ops of its own."""
    folder = tmp_path_factory.mktemp("emulated")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-O1", "-c"]
    emulation = ["-include", ROOT / "tests" / "ops" / "cuda_emulation.h", "-x", "c++"]
    torch_headers = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    names = ["-DFASTFACT_EMULATED", "-DFASTFACT_NAMESPACE=fastfact_emulated", "-DFASTFACT_DEVICE=CPU"]
    binding = [*MACROS, *names, *torch_headers, ROOT / "csrc" / "bind_cuda.cpp", "-o", folder / "bind.o"]
    commands = [[*compiler, *emulation, s, "-o", folder / f"{s.stem}.o"] for s in SOURCES]
    compile_all([*commands, [*compiler, *binding]])
    library = folder / "library.so"
    paths = [f"-L{path}" for path in cpp_extension.library_paths()]
    run(compiler[0], "-shared", "-o", library, *folder.glob("*.o"), *paths, "-ltorch_cpu", "-lc10")
    emulated.definitions = torch.library.Library("fastfact_emulated", "DEF")
    for name, op in ops.registry.OPS.items():
        emulated.definitions.define(name + op.schema)
    torch.ops.load_library(str(library))
    return torch.ops.fastfact_emulated


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.CONVS))
def test_weight_emulated(emulated, case):
    for dtype in DTYPES:
        case(emulated, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.BIG_CONVS)[::3])
def test_larger_weight_emulated(emulated, case):
    for dtype in (torch.float32, torch.bfloat16):
        case(emulated, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.COMPACT, ids=str)
def test_compact_weight_emulated(emulated, case):
    for dtype in DTYPES:
        op_cases.compact(emulated, case, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.THIN, ids=str)
def test_thin_factors_emulated(emulated, case):
    for dtype in DTYPES[1:]:
        op_cases.thin(emulated, case, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.THIN_PAIRS, ids=str)
def test_thin_pairs_emulated(emulated, case):
    for dtype in DTYPES[1:]:
        op_cases.thin_pair(emulated, case, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prox_sgd_step_emulated(emulated, momentum, proximal, dtype):
    for numel in (1001, 1008):
        op_cases.prox(emulated, dtype, "cpu", momentum, proximal, numel)


def test_prox_sgd_step_of_many_tensors_emulated(emulated):
    params = [torch.ones(3 + j % 5) for j in range(100)]
    grads = [torch.full_like(p, j) for j, p in enumerate(params)]
    emulated.prox_sgd_step(params, grads, [], [0.0] * 100, 0.5, 0.0, 0.0, True)
    assert all((p == 1 - j / 2).all() for j, p in enumerate(params))


@pytest.mark.parametrize("value_type", list(VALUE_TYPES), ids=str)
@pytest.mark.parametrize(("n", "density"), [(1, 0.5), (9, 0.3), (1024, 0.0), (2051, 0.4), (40, 1.0)])
def test_bitmap_emulated(emulated, n, density, value_type):
    for dtype in DTYPES:
        op_cases.bitmap(emulated, dtype, "cpu", value_type, n, density)


def test_bitmap_of_many_rows_emulated(emulated):
    op_cases.bitmap_of_many_rows(emulated, "cpu")


def test_a_damaged_bitmap_is_an_error_emulated(emulated):
    op_cases.damaged_bitmap(emulated, "cpu")


def test_bitmap_without_elements_emulated(emulated):
    bits, values, scale = emulated.pack_bitmap(torch.zeros(2, 0, 5), 2)
    assert bits.shape == (2, 0, 1) and values.numel() == 0 and scale.shape == (2, 0)
    assert emulated.unpack_bitmap(bits, values, scale, 5).shape == (2, 0, 5)


@pytest.mark.parametrize("case", op_cases.SIMILARITIES, ids=str)
def test_similarity_sums_emulated(emulated, case):
    for dtype in (torch.float64, torch.float32):
        op_cases.similarity(emulated, dtype, "cpu", *case)
    op_cases.similarity(emulated, torch.float32, "cpu", *case, integers=True)


@pytest.mark.parametrize("case", op_cases.SKETCHES, ids=str)
def test_srht_emulated(emulated, case):
    for dtype in DTYPES:
        op_cases.sketch(emulated, dtype, "cpu", *case)


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """Every .cu file compiled by nvcc alone, with what ptxas reports."""
    if NVCC is None:
        pytest.skip("needs nvcc")
    folder = tmp_path_factory.mktemp("objects")
    flags = [NVCC, "-std=c++17", "-O3", "-Werror", "all-warnings", "-Xcompiler", "-fPIC,-Wall", "-Xptxas", "-v"]
    reports = compile_all([[*flags, *ARCHITECTURES, "-c", s, "-o", folder / f"{s.stem}.o"] for s in SOURCES])
    return folder, dict(zip((s.stem for s in SOURCES), reports, strict=True))


def test_nvcc_compiles_every_kernel_for_both_architectures(objects):
    folder, reports = objects
    for source in SOURCES:
        assert (folder / f"{source.stem}.o").stat().st_size
        for arch in ("sm_80", "sm_90a"):
            assert f"for '{arch}'" in reports[source.stem]
        # registers that do not fit go to memory; the double kernels may lose one or two
        assert all(int(n) <= 16 for n in re.findall(r"(\d+) bytes spill stores", reports[source.stem]))


def test_the_library_loads_without_a_gpu(objects, tmp_path):
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of PyTorch")
    folder, _ = objects
    headers = [f"-I{path}" for path in cpp_extension.include_paths()]
    compiler = os.environ.get("CXX", "c++")
    binding, library = tmp_path / "bind.o", tmp_path / "_cuda.so"
    source = ROOT / "csrc" / "bind_cuda.cpp"
    run(compiler, "-std=c++20", "-fPIC", "-c", "-DUSE_CUDA", *MACROS, *headers, source, "-o", binding)
    paths = [f"-L{path}" for path in cpp_extension.library_paths(device_type="cuda")]
    # nvcc links against the toolkit's own runtime
    needed = ["-Xlinker", "--no-as-needed", "-ltorch_cuda", "-ltorch_cpu", "-lc10"]
    run(NVCC, "-shared", "-o", library, binding, *folder.glob("*.o"), *paths, *needed)
    load = """
import sys, torch
import fastfact.ops
from fastfact.ops.registry import with_kernels
library = torch.library.Library("fastfact_loaded", "DEF")
torch.ops.load_library(sys.argv[1])
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert all(has(f"fastfact::{op}", "CUDA") for op in with_kernels("cuda"))
"""
    run(sys.executable, "-W", "error", "-c", load, library)
    if readelf := shutil.which("readelf"):
        assert "[libtorch_cuda.so]" in run(readelf, "-d", library)
