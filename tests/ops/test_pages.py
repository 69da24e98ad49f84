"""Memory that is freed in one step is there for the next."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
if sys.argv[1] == "fastfact":
    import fastfact

def step():
    tensors = [torch.empty(5 << 20) for _ in range(3)]
    for tensor in tensors:
        tensor.fill_(0)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(library):
    done = subprocess.run([sys.executable, "-c", CODE, library], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators decide by rules of their own")
def test_a_step_does_not_take_its_outputs_anew():
    """Three tensors of 20 MiB are 15,360 pages, which glibc gives back after one to five of five steps."""
    assert faults("torch") > 10_000
    assert faults("fastfact") < 1_000
