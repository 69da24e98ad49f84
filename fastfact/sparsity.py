"""Sparse μ: density, pruning, thresholding, and the bitmap form in which it is stored and sent."""

import torch
from torch import Tensor

from fastfact import ops

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
    return torch.count_nonzero(x).item() / x.numel() if x.numel() else 0.0


def support_version(parameter: Tensor) -> int:
    """A number that changes whenever the elements of `parameter` come to stand for other positions of μ."""
    return getattr(parameter, _SUPPORT, 0)


def change_support(parameter: Tensor) -> None:
    """Say that the elements of `parameter` now stand for other positions of μ."""
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
    order = rows.abs().argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order[:, :keep], True)
    return x.mul_(mask.reshape(x.shape))


def gather(mu: Tensor) -> tuple[Tensor, Tensor]:
    """The nonzeros of μ and their flat positions, ascending, int32: its compact form."""
    flat = mu.reshape(-1)
    index = flat.nonzero().flatten()
    return flat[index], index.to(torch.int32)


def scatter(values: Tensor, index: Tensor, size: tuple[int, ...]) -> Tensor:
    """The inverse of `gather`: μ of shape `size`, zero off the support. Differentiable in `values`."""
    return values.new_zeros(torch.Size(size).numel()).scatter(0, index.long(), values).reshape(size)


@torch.no_grad()
def scatter_add_(weight: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """Add μ, given in compact form, to a contiguous `weight`, in place."""
    weight.view(-1).index_add_(0, index, values)
    return weight


@torch.no_grad()
def threshold_(x: Tensor, value: float) -> Tensor:
    """Set numbers with |x| < `value` to zero, in place, as the official Factorized-FL code does to evaluate."""
    if value < 0:
        raise ValueError(f"threshold_(value={value}): must not be negative")
    return x.masked_fill_(x.abs() < value, 0)


def to_bitmap(x: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """μ [o, …] as {"bits", "values", "scale"} (`ops.pack_bitmap` over rows of x[o]); exact for float32."""
    rows = x.reshape(x.shape[0], torch.Size(x.shape[1:]).numel())
    return dict(zip(("bits", "values", "scale"), ops.pack_bitmap(rows, dtype), strict=True))


def from_bitmap(packed: dict[str, Tensor], size: tuple[int, ...]) -> Tensor:
    """μ float32 of shape `size` from what `to_bitmap` made. Raises ValueError if the parts do not fit `size`."""
    n = torch.Size(size[1:]).numel()
    if packed["bits"].shape[0] != size[0]:
        raise ValueError(f"from_bitmap: {packed['bits'].shape[0]} rows, must be {size[0]} for size={tuple(size)}")
    return ops.unpack_bitmap(packed["bits"], packed["values"], packed["scale"], n).reshape(size)
