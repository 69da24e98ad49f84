"""Which implementations serve the ops, and why the others do not.

Compiled libraries register themselves with PyTorch's dispatcher when they are loaded, so the dispatcher is
the table of backends: CPU tensors go to the CPU library, CUDA tensors to the CUDA library or, where that is
missing or has no kernel, to the Triton kernels, and the reference takes what is left. `use_backend` overrides that
for tests and benchmarks.
"""

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastfact.base import machine
from fastfact.ops.registry import BACKENDS, OPS, with_kernels

log = logging.getLogger("fastfact")

NAMES = ("reference", *BACKENDS)
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that nothing stands behind."""


@dataclass(frozen=True)
class Backend:
    """`available` says whether the backend can serve an op here; `detail` says with what, or why not."""

    available: bool
    detail: str


def library_file(name: str) -> Path | None:
    """The compiled library of a backend, None where it was not built."""
    return max(Path(__file__).parents[1].glob(f"_{name}*.so"), default=None)


def module_file() -> Path | None:
    """The compiled module for this PyTorch and this Python, None where it was not built for them."""
    file = Path(__file__).parents[1] / f"_torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}.so"
    return file if file.exists() else None


def _load_library(name: str) -> Backend:
    file, why_not = library_file(name), None
    if file is None:
        why_not = f"not built: no fastfact/_{name}*.so beside the package"
    else:
        try:
            torch.ops.load_library(str(file))
        except OSError as error:
            why_not = f"{file.name} does not load: {error}"
    if why_not:
        if name == "cpu":
            why_not += f"; with a C++ compiler (g++ or clang++) this builds it, or says why not: {mend()}"
            log.warning("fastfact runs without its compiled kernels, slower by far: %s", why_not)
        return Backend(False, why_not)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    lacking = [op for op in with_kernels(name) if not has_kernel(f"fastfact::{op}", name.upper())]
    if not lacking:
        return Backend(True, file.name)
    detail = f"{file.name} is older than this package and has no {', '.join(lacking)}: build it again"
    if name == "cpu":
        # That of a device that may not be here is told when asked for.
        log.warning("%s", detail)
    return Backend(True, detail)


def mend() -> str:
    """The command that builds the library of this installation, or says why it cannot."""
    from importlib import metadata

    root, must = Path(__file__).parents[2], f"FASTFACT_BUILD=must {shlex.quote(sys.executable)}"
    if (root / "csrc").is_dir():
        return f"cd {shlex.quote(str(root))} && {must} setup.py build_ext --inplace"
    source = "--no-binary fastfact fastfact"
    with contextlib.suppress(metadata.PackageNotFoundError):
        if origin := metadata.distribution("fastfact").read_text("direct_url.json"):
            told = json.loads(origin)
            scheme = told["vcs_info"]["vcs"] + "+" if "vcs_info" in told else ""
            source = "THE_SOURCES" if told["url"].endswith(".whl") else shlex.quote(scheme + told["url"])
    return f"{must} -m pip install --force-reinstall --no-deps --no-cache-dir {source}"


_LIBRARIES: dict[str, Backend] = {}
_dispatched: dict[str, Callable] = {}
_serving = _dispatched
_one_client: frozenset[str] = frozenset()
_with_kernel: dict[str, frozenset[str]] = {}
"""Device → the ops that the dispatcher has a kernel of."""
_library = torch.library.Library("fastfact", "IMPL")


def tell(dispatched: bool) -> None:
    """Told whether the dispatcher chooses what serves, when that has changed: set by `direct`."""


def loaded(name: str) -> bool:
    """Whether the compiled library of a backend is there and loads."""
    return _LIBRARIES[name].available


def load() -> None:
    """Load the compiled libraries; called once, after the ops are declared."""
    global _one_client
    _dispatched.update({op: getattr(torch.ops.fastfact, op).default for op in OPS})
    _LIBRARIES["cpu"] = _load_library("cpu")
    if loaded("cpu"):
        _one_client = frozenset(op for op, declared in OPS.items() if declared.one_client)
    _LIBRARIES["cuda"] = (
        _load_library("cuda") if torch.version.cuda else Backend(False, "this build of PyTorch has no CUDA")
    )
    if torch.version.cuda and _triton_can_compile():
        for op in with_kernels("triton"):
            if not (loaded("cuda") and "cuda" in OPS[op].kernels):
                _library.impl(op, _triton_op(op), "CUDA")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for device in ("cpu", "cuda"):
        _with_kernel[device] = frozenset(op for op in OPS if has_kernel(f"fastfact::{op}", device.upper()))


def _triton_can_compile() -> bool:
    """Whether triton is here, and the C compiler with which it builds its launchers; does not import triton."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and importlib.util.find_spec("triton") is not None


def _triton_op(op: str) -> Callable:
    return lambda *args: getattr(importlib.import_module("fastfact.kernels"), op)(*args)


def _cuda() -> Backend:
    library = _LIBRARIES["cuda"]
    if library.available and not torch.cuda.is_available():
        return Backend(False, f"{library.detail} is built, but PyTorch sees no CUDA device")
    return library


def _triton() -> Backend:
    try:
        kernels = importlib.import_module("fastfact.kernels")
    except ImportError as error:
        return Backend(False, str(error))
    if kernels.INTERPRETED:
        return Backend(True, f"triton {kernels.VERSION}, interpreted")
    if not torch.cuda.is_available():
        return Backend(False, "no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU)")
    return Backend(True, f"triton {kernels.VERSION}")


def backends() -> dict[str, Backend]:
    """The state of each backend (`reference`, `cpu`, `cuda`, `triton`) on this machine."""
    return {
        "reference": Backend(True, f"PyTorch {torch.__version__}"),
        "cpu": _LIBRARIES["cpu"],
        "cuda": _cuda(),
        "triton": _triton(),
    }


def implementation(op: str) -> Callable:
    """What serves `op` now: the dispatcher's choice, or the backend `use_backend` asked for."""
    return _serving[op]


def dispatches() -> bool:
    """Whether the dispatcher chooses what serves, so that on the CPU its library does, where it loads."""
    return _serving is _dispatched and loaded("cpu")


def library_serves(op: str, tensor: Tensor) -> bool:
    """Whether the CPU library, which looks at every index it reads, serves `op` for tensors such as this one now."""
    return tensor.is_cpu and dispatches() and "cpu" in OPS[op].kernels


def kernel_serves(op: str, tensor: Tensor) -> bool:
    """Whether a kernel, and not the reference, serves `op` for tensors such as this one now."""
    if _serving is not _dispatched:
        return _serving[op] is not OPS[op].reference
    return op in _with_kernel.get(tensor.device.type, ())


def takes_one(op: str, tensor: Tensor) -> bool:
    """Whether what serves `op` now takes tensors such as this one without the client axis, for one client."""
    plain = op in _one_client and tensor.is_cpu and type(tensor) in PLAIN and _serving is _dispatched
    # With a fake input the op's own fake serves, which takes the axis.
    return plain and (torch.compiler.is_compiling() or not _is_fake_mode())


def _is_fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Serve every op with one backend inside the `with` block.

    Raises ValueError for an unknown name and RuntimeError, with the reason, for one that cannot serve here.
    The choice is process-wide, not per thread.
    """
    global _serving
    if name not in NAMES:
        raise ValueError(f"use_backend(name={name!r}): name must be one of {', '.join(NAMES)}")
    state = backends()[name]
    if not state.available:
        raise RuntimeError(f"use_backend({name!r}): {state.detail}")
    table = _dispatched
    if name in ("reference", "triton"):
        table = {op: declared.reference for op, declared in OPS.items()}
    if name == "triton":
        kernels = importlib.import_module("fastfact.kernels")
        table |= {op: getattr(kernels, op) for op in with_kernels("triton")}
    before, _serving = _serving, table
    tell(dispatches())
    try:
        yield
    finally:
        _serving = before
        tell(dispatches())


def has_slow_products(capability: str, processor: str) -> bool:
    """Whether PyTorch's products of float32 and float64 reach half of what the processor can: on those of AMD MKL has
    no AVX-512."""
    return capability == "AVX512" and "AMD" in processor


PRODUCTS_ARE_SLOW = has_slow_products(torch.backends.cpu.get_cpu_capability(), machine.processor())
