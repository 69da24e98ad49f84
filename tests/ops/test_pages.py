"""Memory that is freed in one step is there for the next."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, torch
import fastfact

def step():
    tensors = [torch.empty(5 << 20) for _ in range(24)]
    for tensor in tensors:
        tensor.fill_(0)

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
    """24 tensors of 20 MiB are 122,880 pages, which glibc gives back after each of five steps where nothing small
    happens to lie behind the last of them."""
    assert faults() < 1_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="they are glibc's")
@pytest.mark.parametrize(
    "setting",
    [("MALLOC_TRIM_THRESHOLD_", str(64 << 20)), ("GLIBC_TUNABLES", f"glibc.malloc.trim_threshold={64 << 20}")],
)
def test_settings_of_the_process_count(monkeypatch, setting):
    monkeypatch.setenv(*setting)
    assert faults() > 100_000
