"""Which implementations serve the ops, and why the others do not.

Compiled libraries register themselves with PyTorch's dispatcher when they are loaded, so the dispatcher is
the table of backends: CPU tensors go to the CPU library, CUDA tensors to the CUDA library or, where that is
missing or has no kernel, to the Triton kernels, and the reference takes what is left. `use_backend` overrides that
for tests and benchmarks.
"""

import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fastfact import formats
from fastfact.ops import reference

log = logging.getLogger("fastfact")

OPS = (
    "rank1_weight",
    "rank1_weight_backward",
    "compact_weight",
    "compact_weight_backward",
    "lowrank_weight",
    "lowrank_weight_backward",
    "hadamard_weight",
    "hadamard_weight_backward",
    "prox_sgd_step",
    "pack_bitmap",
    "unpack_bitmap",
    "similarity_sums",
    "srht",
)
# Ops of cohorts that train on the CPU and of layers that are evaluated there, without kernels for other devices.
CPU_OPS = (
    "gather_rows",
    "rows_linear",
    "rows_linear_backward",
    "softmax_loss",
    "rows_softmax_loss",
    "ordered_factored_conv2d",
    "factored_conv2d_order",
)
# Ops without CUDA C++ kernels: Triton serves CUDA tensors, and the reference where neither it nor the CPU library does.
TRITON_OPS = (
    "factored_conv2d",
    "factored_conv2d_backward",
    "fused_conv2d",
    "fused_conv2d_dx",
    "fused_conv2d_dw",
)
NAMES = ("reference", "cpu", "cuda", "triton")
# Ops, and their backward ones, of which the CPU library takes tensors without the client axis too: the views that add
# it and take it off take longer than a small weight.
_ONE_CLIENT_OPS = ("rank1_weight", "compact_weight")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Backend:
    """`available` says whether the backend can serve an op here; `detail` says with what, or why not."""

    available: bool
    detail: str


def library_file(name: str) -> Path | None:
    """The compiled library of a backend, None where it was not built."""
    return max(Path(__file__).parents[1].glob(f"_{name}*.so"), default=None)


def _load_library(name: str) -> Backend:
    found = library_file(name)
    if found is None:
        return Backend(False, f"not built: no fastfact/_{name}*.so beside the package")
    try:
        torch.ops.load_library(str(found))
    except OSError as error:
        return Backend(False, f"{found.name} does not load: {error}")
    lacking = _without_kernel(name.upper(), OPS + (CPU_OPS if name == "cpu" else ()))
    if not lacking:
        return Backend(True, found.name)
    detail = f"{found.name}, older than this package: without {', '.join(lacking)}, build it anew"
    if name == "cpu":
        # That of a device that may not be here is told when asked for.
        log.warning("%s", detail)
    return Backend(True, detail)


def _without_kernel(key: str, ops: tuple[str, ...]) -> list[str]:
    """Those of `ops`, which a compiled library should have registered under a dispatch key, that have no kernel."""
    return [op for op in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastfact::{op}", key)]


_LIBRARIES: dict[str, Backend] = {}
_dispatched: dict[str, Callable] = {}
_serving = _dispatched
_one_client: tuple[str, ...] = ()
_library = torch.library.Library("fastfact", "IMPL")


def loaded(name: str) -> bool:
    """Whether the compiled library of a backend is there and loads."""
    return _LIBRARIES[name].available


def load() -> None:
    """Load the compiled libraries; called once, after the op schemas are defined."""
    _dispatched.update({op: getattr(torch.ops.fastfact, op).default for op in OPS + CPU_OPS + TRITON_OPS})
    global _one_client
    _LIBRARIES["cpu"] = _load_library("cpu")
    _one_client = _ONE_CLIENT_OPS if _LIBRARIES["cpu"].available and _library_takes_one() else ()
    _LIBRARIES["cuda"] = (
        _load_library("cuda") if torch.version.cuda else Backend(False, "this build of PyTorch has no CUDA")
    )
    if torch.version.cuda and _triton_can_compile():
        for op in TRITON_OPS if _LIBRARIES["cuda"].available else OPS + TRITON_OPS:
            _library.impl(op, _triton_op(op), "CUDA")


def _library_takes_one() -> bool:
    """Whether the CPU library takes tensors without the client axis; an older one refuses them."""
    with contextlib.suppress(RuntimeError, ValueError):
        factor = torch.ones(1, 1, 1, device="cpu")
        _dispatched["rank1_weight"](None, factor, factor, formats.SPATIAL, False)
        return True
    return False


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


def takes_one(op: str, tensor: torch.Tensor) -> bool:
    """Whether what serves `op` now takes tensors such as this one without the client axis, for one client."""
    return op in _one_client and tensor.is_cpu and type(tensor) in _PLAIN and _serving is _dispatched


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
    if name in ("cpu", "cuda"):
        table = _dispatched
    else:
        module = reference if name == "reference" else importlib.import_module("fastfact.kernels")
        table = {op: getattr(module, op) for op in OPS + TRITON_OPS}
        table |= {op: getattr(reference, op) for op in CPU_OPS}
    before, _serving = _serving, table
    try:
        yield
    finally:
        _serving = before
