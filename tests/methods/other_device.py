"""Federations on a device that is not the CPU, without one: its tensors hold CPU tensors, and what PyTorch refuses of
tensors on two devices is refused.

    python other_device.py METHOD …

Trains each method here and there, one client at a time and in a cohort, with a checkpoint in between, and ends with
what is wrong. For a process of its own: PyTorch is told of the device once.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator

import baseline_loop
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fastfact as ff

DEVICE = "there"
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
"""What takes tensors of two devices."""
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""What takes positions on the CPU."""


class There(torch.Tensor):
    """A tensor on the device: `here` has its numbers."""

    @staticmethod
    def __new__(cls, here: Tensor):
        like = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, here.shape, device=f"{DEVICE}:0", **like)

    def __init__(self, here: Tensor):
        self.here = here

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    @property
    def data(self) -> "There":
        return There(self.here)

    @data.setter
    def data(self, value: "There") -> None:
        torch.Tensor.data.__set__(self, value)
        self.here = value.here

    def __deepcopy__(self, memo) -> "There":
        copy = There(self.here.detach().clone()).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        return memo.setdefault(id(self), copy)

    def tolist(self) -> list:
        return self.here.tolist()

    def __getitem__(self, at):
        return torch.Tensor.__getitem__(self, _positions(at))

    def __setitem__(self, at, value) -> None:
        torch.Tensor.__setitem__(self, _positions(at), value)


def _positions(at):
    if isinstance(at, list):
        return torch.tensor(at, dtype=torch.bool if at and isinstance(at[0], bool) else torch.long)
    return tuple(map(_positions, at)) if isinstance(at, tuple) else at


def here(value):
    return value.here if isinstance(value, There) else value


def _mapped(function, value):
    """function of each leaf of what an operation takes or gives, in a fifth of the time of `torch.utils._pytree`."""
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, one) for one in value])
    return {key: _mapped(function, one) for key, one in value.items()} if isinstance(value, dict) else function(value)


def run(func, args, kwargs):
    """An operation on the numbers, its result on the device where it would be. Raises RuntimeError as PyTorch does."""
    tensors: list[Tensor] = []

    def passed(value):
        if isinstance(value, Tensor):
            tensors.append(value)
        return here(value)

    given = _mapped(passed, (args, kwargs))
    any_there, device = any(isinstance(t, There) for t in tensors), kwargs.get("device")
    if any_there and func not in COPIES:
        may = set(map(id, args[1])) if func in INDEXED else set()
        least = 0 if str(func).startswith(("fastfact.", "aten.cat", "aten.stack")) else 1
        wrong = [t for t in tensors if not isinstance(t, There) and t.dim() >= least and id(t) not in may]
        if wrong:
            raise RuntimeError(f"{func}: a tensor {list(wrong[0].shape)} is on the cpu, another one is on {DEVICE}")
    if device is not None:
        given[1]["device"] = torch.device("cpu")
    out = func(*given[0], **given[1])
    if func is aten.copy_.default:
        return args[0]
    if not (any_there if device is None else torch.device(device).type == DEVICE):
        return out
    out = _mapped(lambda t: There(t) if isinstance(t, Tensor) else t, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


@contextlib.contextmanager
def the_device() -> Iterator[None]:
    """While active the device is there."""
    plain, generator = torch.tensor, torch.Generator

    def tensor(data, *, device=None, **others):
        made = plain(data, **others)
        return made if device is None else made.to(device)

    # these two make their tensors below what a mode sees
    torch.tensor, torch.Generator = tensor, _Generator
    try:
        with _Mode():
            yield
    finally:
        torch.tensor, torch.Generator = plain, generator


def clients() -> list[ff.Client]:
    return baseline_loop.clients((6, 3, 6, 4))


def federation(name: str, **options) -> ff.Federation:
    options |= {"epochs": 1, "participation": 0.5}
    return baseline_loop.federation(name, baseline_loop.normed, clients(), **options)


def compare(name: str) -> None:
    own = federation(name)
    own.fit(3)
    for cohort in (1, 4):
        with the_device(), tempfile.TemporaryDirectory() as folder:
            there = federation(name, device=DEVICE, cohort=cohort, graphs=False)
            there.fit(2, out=folder)
            loaded = ff.Federation.load(folder, model=baseline_loop.normed, clients=clients(), device=DEVICE)
            for fed in (there, loaded):
                fed.fit(1)
                assert next(fed.models[0].parameters()).device.type == DEVICE
                for tensor_name, tensor in own.states.state.items():
                    found = here(fed.states.state[tensor_name])
                    torch.testing.assert_close(found, tensor, rtol=1e-7, atol=1e-9, msg=f"{tensor_name} of {name}")


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(DEVICE)
    for asked in sys.argv[1:]:
        compare(asked)
