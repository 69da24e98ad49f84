"""Sparse μ as a tensor: density, pruning, its compact form, and the marks that the optimizers look for."""

import torch
from torch import Tensor

__all__ = ["density", "gather", "hard_threshold", "largest", "prune_", "replaced", "scatter"]

_PENALIZED = "_fastfact_l1"
_SUPPORT = "_fastfact_support"


def mark_penalized(parameter: Tensor) -> None:
    """Say that the L1 penalty is for this parameter (it is the μ of a factorized layer)."""
    setattr(parameter, _PENALIZED, True)


def penalized(parameter: Tensor) -> bool:
    """Whether the L1 penalty is for this parameter."""
    return getattr(parameter, _PENALIZED, False)


def _check_density(density: float) -> None:
    if not 0 <= density <= 1:
        raise ValueError(f"density={density}: must be between 0 and 1")


def density(x: Tensor) -> float:
    """Fraction of nonzeros in `x` (0 for a tensor without elements)."""
    return nonzeros(x) / x.numel() if x.numel() else 0.0


def nonzeros(x: Tensor) -> int:
    """How many there are in `x`, on all ranks where it is sharded."""
    count = torch.count_nonzero(x)
    return int((count.full_tensor() if hasattr(count, "full_tensor") else count).item())


@torch.no_grad()
def words(index: Tensor, numel: int) -> Tensor:
    """Where a compact μ of these ascending positions [nnz] in a W of `numel` elements is, as the CUDA kernels read it:
    int64 [⌈numel / 32⌉], the bits of 32 neighbours below, above them how many positions lie before these."""
    first = torch.arange(0, numel, 32, device=index.device, dtype=index.dtype)
    bits = torch.zeros_like(first, dtype=torch.int64)
    bits.index_add_(0, index // 32, 1 << (index % 32).long())
    return bits | torch.searchsorted(index, first) << 32


def support_version(parameter: Tensor) -> int:
    """A number that changes whenever the elements of `parameter` come to stand for other positions of μ."""
    return getattr(parameter, _SUPPORT, 0)


def put(parameter: Tensor, values: Tensor) -> None:
    """Give `parameter` these values, of any shape, which stand for other positions of μ; its gradient is dropped.

    A graph of before, which a loss that is kept holds, has PyTorch expect gradients of the old shape, unless the type
    changes on the way.
    """
    values = values.detach()  # they may be the parameter
    other = torch.float64 if values.dtype == torch.float32 else torch.float32
    parameter.grad = None
    parameter.data = values.new_empty(0, dtype=other)
    parameter.data = values
    setattr(parameter, _SUPPORT, support_version(parameter) + 1)


@torch.no_grad()
def prune_(x: Tensor, density: float, clients: bool = False, of: int | None = None) -> Tensor:
    """Keep the round(density · numel) largest magnitudes of `x` and set the others to zero, in place.

    of: the number that `density` is a fraction of, by default that of the elements of `x` (of one client).
    With `clients` the first axis is the client axis and each client keeps that many of its own. Ties are broken by
    position, so exactly that many are kept (fewer are nonzero only if `x` had fewer). Raises ValueError for a density
    outside [0, 1].
    """
    _check_density(density)
    rows = x.reshape(x.shape[0] if clients else 1, -1)
    keep = round(density * (rows.shape[1] if of is None else of))
    return x.mul_(_among_largest(rows.abs(), keep).reshape(x.shape))


def _among_largest(x: Tensor, keep: int) -> Tensor:
    """Which are the `keep` largest numbers of each row of x [k, n], the first of equals: bool [k, n]. Without order
    among them, which a sort would take six times as long for; NaN is larger than all."""
    if keep <= 0 or keep >= x.shape[1]:
        return torch.full_like(x, keep > 0, dtype=torch.bool)
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    least = x.topk(keep, dim=1, sorted=False).values.amin(1, keepdim=True)
    larger, equal = x > least, x == least
    return larger | (equal & (equal.cumsum(1) <= keep - larger.sum(1, keepdim=True)))


def hard_threshold(mu: Tensor, least: float) -> Tensor:
    """μ of any shape, with every magnitude below `least` set to zero."""
    return torch.where(mu.abs() < least, 0.0, mu) if least else mu


def gather(mu: Tensor) -> tuple[Tensor, Tensor]:
    """The nonzeros of μ, of any shape, and their flat positions, ascending: its compact form ([nnz], int32 [nnz])."""
    flat = mu.reshape(-1)
    index = flat.nonzero().flatten()
    return flat[index], index.to(torch.int32)


def scatter(values: Tensor, index: Tensor, size: tuple[int, ...]) -> Tensor:
    """The inverse of `gather`: from values [nnz] and index [nnz] μ of shape `size`, zero off the support.
    Differentiable in `values`."""
    return values.new_zeros(torch.Size(size).numel()).scatter(0, index.long(), values).reshape(size)


@torch.no_grad()
def largest(mu: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The `keep` numbers of largest magnitude of each row of μ [k, n] as (values [k, keep], ascending positions int32
    [k, keep]): compact μ of equal size for every client. Ties are broken by position."""
    index = _among_largest(mu.abs(), keep).nonzero()[:, 1].reshape(len(mu), -1)
    return mu.gather(1, index), index.to(torch.int32)


@torch.no_grad()
def replaced(values: Tensor, index: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compact μ (values, index) [nnz] with `count` positions given to others: the smallest magnitudes leave, the
    positions off the support where |gradient| [of the shape of W] is largest join with value 0 (RigL, Evci et al.
    2020). Fewer change places where there are fewer off the support."""
    slope = gradient.reshape(-1).abs().index_fill(0, index.long(), -1)
    count = min(count, len(index), len(slope) - len(index))
    stay = _among_largest(values.abs()[None], len(index) - count)[0]
    join = _among_largest(slope[None], count)[0].nonzero().flatten().to(index.dtype)
    index, order = torch.cat([index[stay], join]).sort()
    return torch.cat([values[stay], values.new_zeros(count)])[order], index


def __getattr__(name: str):
    if name == "Schedule":
        raise AttributeError("ff.sparsity.Schedule is ff.Schedule")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
