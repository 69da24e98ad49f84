"""Running Triton kernels without a GPU: interpreted, in a process of its own, or compiled ahead of time."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu_resources import SHARED as SHARED_MEMORY
from bench.gpu_resources import Device


def interpret(cases: str) -> None:
    """Run a file of tests in Triton's interpreter: Triton decides when it is imported whether it interprets."""
    folder = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / cases)],
        env=dict(
            os.environ,
            TRITON_INTERPRET="1",
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=os.pathsep.join([str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        ),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


class Compiler:
    """Stands in for a kernel: a launch compiles it for `arch` as a launch there would, with the same error where it
    needs more shared memory than a block may have.
    """

    def __init__(self, kernel, arch):
        self.kernel, self.arch, self.compiled = kernel, arch, []

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, **constants):
        from triton.runtime.errors import OutOfResources

        compiled = self.kernel.warmup(*args, grid=(1,), **constants)
        if compiled.metadata.shared > SHARED_MEMORY[self.arch]:
            raise OutOfResources(compiled.metadata.shared, SHARED_MEMORY[self.arch], "shared memory")
        self.compiled.append(compiled)


def stack_bytes(compiled) -> int:
    """Local memory of a thread of a compiled kernel: what did not fit into its registers."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        run = subprocess.run([program, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", run.stdout)[1])


class Nothing:
    """Stands in for a kernel that is not compiled."""

    def __getitem__(self, grid):
        return lambda *args, **settings: None


def stand_in(monkeypatch, modules, name, arch) -> Compiler:
    """Replace every kernel of `modules` by `Nothing`, but `name` by a `Compiler`, which is returned."""
    from triton.runtime import driver

    from fastfact.kernels import launch

    chosen = None
    monkeypatch.setattr(driver, "_active", Device(arch))
    monkeypatch.setattr(launch, "_too_large", set())
    for module in modules:
        for kernel in [x for x in vars(module) if x.endswith("_kernel")]:
            replacement = Compiler(getattr(module, kernel), arch) if kernel == name else Nothing()
            chosen = replacement if kernel == name else chosen
            monkeypatch.setattr(module, kernel, replacement)
    # the stand-ins write nothing, and counts decide how much is allocated
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    return chosen


class Variants:
    """Stands in for a kernel: a launch asks Triton which variant would be compiled for it."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args, **constants: self.kernel.warmup(*args, grid=(1,), **constants)


def variants_of(monkeypatch, modules) -> dict[str, set]:
    """Replace every kernel of `modules` by one that does not run: its name → the variants that launches asked for."""
    from triton.runtime.jit import JITFunction

    found = {}
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_: found[self.__name__].add(key))
    for module in modules:
        for name in [x for x in vars(module) if x.endswith("_kernel")]:
            found[name] = set()
            monkeypatch.setattr(module, name, Variants(getattr(module, name)))
    return found
