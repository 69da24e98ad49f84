"""Memory that is freed in one step is there for the next."""

import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource
import fastfact

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    blocks = [libc.malloc(20 << 20) for _ in range(24)]
    for block in blocks:
        ctypes.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide by rules of their own")
def test_a_step_does_not_take_its_outputs_anew():
    """24 blocks of 20 MiB, as tensors are, are 122,880 pages, which glibc gives back after each of five steps."""
    assert faults() < 1_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="they are glibc's")
@pytest.mark.parametrize(
    "setting",
    [("MALLOC_TRIM_THRESHOLD_", str(64 << 20)), ("GLIBC_TUNABLES", f"glibc.malloc.trim_threshold={64 << 20}")],
)
def test_settings_of_the_process_count(monkeypatch, setting):
    monkeypatch.setenv(*setting)
    assert faults() > 100_000
