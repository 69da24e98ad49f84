"""What `import fastfact` costs beside `import torch`."""

import subprocess
import sys

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "scipy",
    "sklearn",
    "matplotlib",
    "torchvision",
    "triton",
    "sympy",
    "typer",
)
CODE = f"""
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import fastfact
took = time.process_time() - start
heavy = [name for name in {HEAVY!r} if name in sys.modules and name not in before]
print(took, *heavy)
"""


def test_the_import_is_light():
    """Processor time, so that a busy machine does not count, and far above what it takes: .5 s on a quiet machine."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    took, *heavy = done.stdout.split()
    assert not heavy, f"import fastfact imports {', '.join(heavy)}"
    assert float(took) < 3, f"import fastfact takes {took} s of processor time beside torch"
