"""The CPU kernels without PyTorch, under AddressSanitizer and UBSan, compiled for one instruction set at a time."""

import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parents[2]
# The largest first: they take longest to compile.
KERNELS = sorted((ROOT / "csrc" / "cpu").glob("*.cpp"), key=lambda source: -source.stat().st_size)
SOURCES = [ROOT / "tests" / "ops" / "kernels_driver.cpp", *KERNELS]
FLAGS = [
    "-std=c++17",  # what PyTorch 2.11 builds with
    "-O1",
    "-w",
    "-DFF_NO_DISPATCH",
    "-DFF_EMULATE_PAIRS",
    "-DFF_EXACT_SCRATCH",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,alignment,object-size",  # they double the time to compile, and loads go through memcpy
    "-fno-sanitize-recover=all",
    *("--param", "asan-instrumentation-with-call-threshold=0"),  # a quarter of the time to compile
]
if platform.machine() in ("x86_64", "AMD64"):
    LEVELS = {"x86-64": "baseline", "x86-64-v3": "x86-64-v3", "x86-64-v4": "x86-64-v4"}
else:
    LEVELS = {"native": "baseline"}


def supported(level):
    """Whether this machine can run what is compiled for `level`."""
    needed = {"x86-64-v3": {"avx2", "fma", "bmi2"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return needed.get(level, set()) <= flags


# The convolutions take long to compile: for one element type each; bfloat16 with products in pairs, which few machines
# have an instruction for.
CONV_TYPE = {"x86-64": "double", "x86-64-v3": "fastfact::BFloat16"}


@pytest.mark.parametrize("march", [*filter(supported, LEVELS)])
def test_kernels_on_buffers_of_exactly_the_right_size(march, tmp_path):
    def compile_one(source):
        flags = [*FLAGS, f"-march={march}", f"-DFF_CONV_TYPE={CONV_TYPE.get(march, 'float')}"]
        command = ["c++", *flags, "-c", str(source), "-o", str(tmp_path / f"{source.stem}.o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, SOURCES))
    program = str(tmp_path / "driver")
    subprocess.run(["c++", *FLAGS, *map(str, tmp_path.glob("*.o")), "-pthread", "-o", program], check=True)
    for seed in ("1", "2"):
        done = subprocess.run([program, seed, "60"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
        assert done.stdout == f"{LEVELS[march]} ok\n"
