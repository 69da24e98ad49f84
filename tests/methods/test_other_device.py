"""What holds for every method where the clients' states are not on the CPU; on a GPU see test_every_method.py."""

from pathlib import Path

import forked
import pytest

import fastfact as ff


@pytest.mark.parametrize("name", ff.methods.names())
def test_computes_what_it_does_on_the_cpu(name):
    done = forked.run(Path(__file__).parent / "other_device.py", name)
    assert done.returncode == 0, done.stderr


def test_tensors_on_two_devices_are_refused():
    code = """
import other_device, torch
other_device._setup_privateuseone_for_python_backend(other_device.DEVICE)
with other_device.the_device():
    x = torch.ones(3, device="there")
    assert (2 * x).sum().item() == 6 and x[torch.tensor([0, 1])].shape == (2,) and x.device.type == "there"
    x + torch.ones(3)
"""
    folder = str(Path(__file__).parent)
    done = forked.run("-c", f"import sys; sys.path.insert(0, {folder!r})\n{code}")
    assert done.returncode == 1 and "a tensor [3] is on the cpu, another one is on there" in done.stderr
