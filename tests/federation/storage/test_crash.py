"""A sample of what `crash.py` beside this file tries in full: faults at system calls, and the run that goes on."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("kind", ["run", "store"])
def test_a_run_goes_on_after_a_fault_at_any_call(kind):
    program = Path(__file__).with_name("crash.py")
    done = subprocess.run(
        [sys.executable, str(program), "--kinds", kind, "--points", "1"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "points tried, 0 failed" in done.stdout
