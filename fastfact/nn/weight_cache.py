"""The weight that a layer makes once in evaluation and keeps while its factors are what they were.

PyTorch does not count every write to a tensor: those through `.data`, numpy or a pointer go unseen. So a kept weight
serves only if the digest of all numbers of all factors (`torch.ops.fastfact.digest`) is what it was when the weight was
made. To read the factors takes a fraction of the time in which a weight is made and written.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.ops.backends import loaded

_PLAIN = (Tensor, torch.nn.Parameter)


def allowed() -> bool:
    """Whether a weight may be kept, and serve: nothing traces, casts, dispatches elsewhere or asks for gradients."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._len_torch_dispatch_stack():
        return False
    return loaded("cpu") and not torch.jit.is_tracing()


class _Kept(NamedTuple):
    key: Hashable
    digest: int
    weight: Tensor


class WeightCache:
    """The weight made last, for one layer. Threads may share it: what is kept is read once and swapped in whole.

    A copy of it, by `copy` or `pickle`, is empty.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def clear(self) -> None:
        """Forget the weight."""
        self._kept = None

    def __len__(self) -> int:
        return self._kept is not None

    def __reduce__(self):
        return WeightCache, ()

    def weight(self, key: Hashable, factors: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        """The kept weight, if it was made for this key from factors with these numbers; otherwise make(), kept.

        key: everything besides the factors that the weight depends on. make() must depend on nothing else. A weight
        during whose making a factor changed is not kept, nor one of factors that are no plain tensors on the CPU.
        """
        if not all(type(factor) in _PLAIN and factor.is_cpu for factor in factors):
            return make()
        kept, digest = self._kept, torch.ops.fastfact.digest(factors)
        if kept is not None and kept.digest == digest and kept.key == key:
            return kept.weight
        versions = _versions(factors)
        weight = make()
        if type(weight) is Tensor and _versions(factors) == versions and torch.ops.fastfact.digest(factors) == digest:
            self._kept = _Kept(key, digest, weight)
        return weight


def _versions(factors: Sequence[Tensor]) -> list[int]:
    return [0 if factor.is_inference() else factor._version for factor in factors]
