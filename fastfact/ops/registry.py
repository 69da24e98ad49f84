"""The declaration of an op: what stands above its reference function is all that PyTorch and the backends are told.

The registered ops always take the client axis (but see `Op.one_client`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

BACKENDS = ("cpu", "cuda", "triton")
"""What may have kernels for an op besides its reference: two compiled libraries, and Triton."""


@dataclass(frozen=True)
class Op:
    """`kernels`: the backends that have a kernel; `schema` as PyTorch has it, without the name. `one_client`: the CPU
    library also takes tensors without the client axis, as the views that add it and take it off would take longer than
    a small weight.
    """

    reference: Callable
    schema: str
    kernels: tuple[str, ...]
    one_client: bool


OPS: dict[str, Op] = {}
_library = torch.library.Library("fastfact", "DEF")


def op(
    fake: Callable, *, kernels: Iterable[str] = (), mutates: Iterable[str] = (), one_client: bool = False
) -> Callable[[Callable], Callable]:
    """Declare the op `torch.ops.fastfact.NAME`, NAME that of the decorated function: its reference, in plain PyTorch.

    The schema comes from the function's annotations, all of which must be there (`torch.library.infer_schema`). The
    function serves every device for which nothing else is registered. `fake` has its arguments and gives outputs of the
    same shapes, dtypes and strides without computing them (`torch.library.register_fake`). `mutates`: the arguments
    written to. `kernels`, `one_client`: see `Op`. Raises ValueError for a backend that is not one of `BACKENDS`.
    """
    if unknown := set(kernels) - set(BACKENDS):
        raise ValueError(f"op(kernels={tuple(kernels)}): {', '.join(unknown)} must be of {', '.join(BACKENDS)}")

    def declare(function: Callable) -> Callable:
        name = function.__name__
        # Compiled kernels take sizes as int64, never symbolic.
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates)).replace("SymInt", "int")
        _library.define(name + schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"fastfact::{name}", fake, lib=_library)
        OPS[name] = Op(function, schema, tuple(kernels), one_client)
        return function

    return declare


def with_kernels(backend: str) -> list[str]:
    """The ops of which `backend` has kernels."""
    return [name for name, declared in OPS.items() if backend in declared.kernels]
