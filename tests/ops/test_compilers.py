"""The CPU kernels by compilers that did not build the library: clang, and g++ for aarch64, which an emulator runs; and
the bindings with the headers of a PyTorch that it was not built with."""

import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[2]
KERNELS = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))
BINDINGS = sorted((ROOT / "csrc").glob("bind_cpu*.cpp"))
DRIVER = ROOT / "tests" / "ops" / "kernels_driver.cpp"
FLAGS = ("-std=c++17", "-w")
HEADERS = [flag for path in (*include_paths(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
TORCH = [*HEADERS, "-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"]
MODULE = ROOT / "csrc" / "bind_torch.cpp", [*HEADERS, f"-std=c++{17 if torch.__version__ < '2.12' else 20}"]


def compile_all(compiler, jobs):
    def compile_one(job):
        source, flags = job
        command = [compiler, *FLAGS, *flags, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{source.name}: {done.stderr[:3000]}"

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, jobs))


def require(compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("compiler", "link", "runner"),
    [("clang++", [], []), ("aarch64-linux-gnu-g++", ["-static"], ["qemu-aarch64-static"])],
)
def test_builds_kernels_that_run(compiler, link, runner, tmp_path):
    for program in (compiler, *runner):
        require(program)
    # Without optimization, which takes minutes, and the convolutions for one element type.
    objects = [tmp_path / f"{source.stem}.o" for source in (*KERNELS, DRIVER)]
    jobs = [
        (source, ("-O0", "-DFF_CONV_TYPE=float", "-c", "-o", str(out)))
        for source, out in zip((*KERNELS, DRIVER), objects, strict=True)
    ]
    compile_all(compiler, jobs)
    program = str(tmp_path / "driver")
    subprocess.run([compiler, *link, *map(str, objects), "-pthread", "-o", program], check=True)
    done = subprocess.run([*runner, program, "1", "8"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith(" ok\n"), done.stdout[-500:] + done.stderr[-3000:]


@pytest.mark.kernels
def test_clang_compiles_the_bindings_and_the_kernels_of_every_element_type():
    require("clang++")
    jobs = [MODULE, *((source, TORCH) for source in BINDINGS), *((source, []) for source in KERNELS)]
    compile_all("clang++", [(source, ("-fsyntax-only", *flags)) for source, flags in jobs])


def test_the_bindings_compile_with_the_headers_of_this_pytorch():
    """`make test-oldest` builds none."""
    jobs = [MODULE, *((source, TORCH) for source in BINDINGS)]
    compile_all("c++", [(source, ("-fsyntax-only", *flags)) for source, flags in jobs])
