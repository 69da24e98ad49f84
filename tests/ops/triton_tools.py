"""Running Triton kernels without a GPU: interpreted, in a process of its own, or compiled ahead of time."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch


def interpret(cases: str) -> None:
    """Run a file of tests in Triton's interpreter: Triton decides when it is imported whether it interprets."""
    folder = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / cases)],
        env=dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


class Compiler:
    """Stands in for a kernel: a launch compiles it for `arch` with the types and alignments of its arguments."""

    def __init__(self, kernel, arch):
        self.kernel, self.arch, self.compiled = kernel, arch, []

    def __getitem__(self, grid):
        return self

    def __call__(self, *args, num_warps=4, num_stages=3, **constants):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        signature, fixed, attributes = {}, {}, {}
        for position, param in enumerate(self.kernel.params):
            value = arguments[param.name]
            if param.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[param.name], fixed[(position,)] = "constexpr", value
            elif isinstance(value, float):
                signature[param.name] = param.annotation_type or "fp32"
            else:
                signature[param.name] = triton.runtime.jit.mangle_type(value)
                number = value.data_ptr() if torch.is_tensor(value) else value
                if number % 16 == 0:
                    attributes[(position,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.compiled.append(triton.compile(source, target=GPUTarget("cuda", self.arch, 32), options=options))


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
    chosen = None
    for module in modules:
        for kernel in [x for x in vars(module) if x.endswith("_kernel")]:
            replacement = Compiler(getattr(module, kernel), arch) if kernel == name else Nothing()
            chosen = replacement if kernel == name else chosen
            monkeypatch.setattr(module, kernel, replacement)
    # the stand-ins write nothing, and counts decide how much is allocated
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    return chosen
