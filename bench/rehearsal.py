"""Tests that end as tests on a device can, for `gpu_check --rehearse`; no part of the suite."""

import os
import signal
import time

import pytest


@pytest.mark.parametrize("number", range(8))
def test_passes(number):
    time.sleep(0.01)


def test_dies():
    os.kill(os.getpid(), signal.SIGSEGV)


def test_hangs():
    time.sleep(1e6)


def test_loses_its_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
