"""Sparse μ: density, pruning, thresholding, the bitmap form it is stored and sent in, and when to make it sparse."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfact import ops
from fastfact.kinds import check_kinds

if TYPE_CHECKING:
    from fastfact.nn.layers import FactorizedLayer

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
def largest(mu: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The `keep` numbers of largest magnitude of each row of μ [k, n] as (values [k, keep], ascending positions int32
    [k, keep]): compact μ of equal size for every client. Ties are broken by position."""
    order = mu.abs().argsort(dim=1, descending=True, stable=True)[:, :keep]
    index = order.sort(dim=1).values
    return mu.gather(1, index), index.to(torch.int32)


@torch.no_grad()
def replaced(values: Tensor, index: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compact μ (values, index) [nnz] with `count` positions given to others: the smallest magnitudes leave, the
    positions off the support where |gradient| [of the shape of W] is largest join with value 0 (RigL, Evci et al.
    2020). Fewer change places where there are fewer off the support."""
    slope = gradient.reshape(-1).abs().index_fill(0, index.long(), -1)
    count = min(count, len(index), len(slope) - len(index))
    stay = values.abs().argsort(descending=True, stable=True)[: len(index) - count]
    join = slope.argsort(descending=True, stable=True)[:count].to(index.dtype)
    index, order = torch.cat([index[stay], join]).sort()
    return torch.cat([values[stay], values.new_zeros(count)])[order], index


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


@dataclass(frozen=True)
class Schedule:
    """When μ becomes sparse while a model trains, and when its support may change.

    Periods are the user's (epochs; in a federation rounds) and count from 1. μ is dense up to and including period
    `warmup`; then it is compact and trains on its support. After every `regrow_every` periods from there (0: never) the
    support changes by one gradient of the loss by the dense μ. One of two rules:

    target_density: each layer keeps the round(target_density · numel) largest magnitudes, and trains them without the
        L1 penalty, so that they are not shrunk. At a change of the support, the fraction `replace` of them gives way to
        the positions with the largest gradients.
    l1: λ decides. Zeros leave the support, and positions with |gradient| > λ join it, until none is left: then the
        optimum on the support is that of the dense problem loss + λ ‖μ‖₁ (its KKT conditions).

    Raises ValueError for numbers out of range.
    """

    warmup: int
    target_density: float | None = None
    l1: float | None = None
    regrow_every: int = 0
    replace: float = 0.1

    def __post_init__(self):
        check_kinds(self, "Schedule")

        def require(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ValueError(f"Schedule({name}={getattr(self, name)!r}): {rule}")

        for name in ("warmup", "regrow_every"):
            require(name, getattr(self, name) >= 0, "must be an integer of at least 0")
        if (self.target_density is None) == (self.l1 is None):
            raise ValueError("Schedule: must have either target_density or l1")
        if self.l1 is None:
            require("target_density", 0 <= self.target_density <= 1, "must be between 0 and 1")
        else:
            require("l1", self.l1 >= 0, "must not be negative")
        require("replace", 0 < self.replace <= 1, "must be above 0 and at most 1")

    def is_sparse(self, period: int) -> bool:
        """Whether a period trains compact μ."""
        return period > self.warmup

    def regrows(self, period: int) -> bool:
        """Whether the support changes after a period."""
        since = period - self.warmup
        return self.regrow_every > 0 and since > 0 and since % self.regrow_every == 0

    def penalty(self, period: int, l1: float) -> float:
        """λ of a period; `l1` is that of the warm-up where the schedule has none of its own."""
        if self.l1 is not None:
            return self.l1
        return 0.0 if self.is_sparse(period) else l1

    def kept(self, numel: int) -> int:
        """How many numbers of a μ of so many elements a target density keeps."""
        return round(self.target_density * numel)

    def step(
        self,
        model: nn.Module,
        period: int,
        loss: Callable[[], Tensor] | None = None,
        optimizer: Optimizer | None = None,
    ) -> nn.Module:
        """What is due after `period`, in place; returns `model`.

        loss: () → the loss of the model (without penalty) on samples that stand for all, called where the support
        changes. optimizer: a `ProxSGD`, whose `l1` becomes that of the next period; momentum of a layer starts anew
        where its support changes. Raises ValueError where a loss is needed and not given, or no layer has a μ.
        """
        layers = penalized_layers(model)
        if not layers:
            raise ValueError("Schedule.step: no layer of the model has a μ")
        if self.regrows(period) and loss is None:
            raise ValueError(f"Schedule.step(period={period}): the support changes, which needs loss=")
        if self.is_sparse(period + 1):
            for layer in layers:
                if not layer.is_compact:
                    layer.compact(self.target_density)
        if self.regrows(period):
            for layer, gradient in zip(layers, dense_gradients(layers, loss), strict=True):
                if self.l1 is None:
                    layer.replace(gradient, round(self.replace * len(layer.mu)))
                else:
                    layer.compact().regrow(gradient, self.l1)
        for group in optimizer.param_groups if optimizer is not None else ():
            group["l1"] = self.penalty(period + 1, group["l1"])
        return model


def penalized_layers(model: nn.Module) -> list["FactorizedLayer"]:
    """The layers of `model` that have a μ."""
    return [
        module
        for module in model.modules()
        if any(penalized(parameter) for parameter in module._parameters.values() if parameter is not None)
    ]


def dense_gradients(layers: Iterable["FactorizedLayer"], loss: Callable[[], Tensor]) -> Sequence[Tensor]:
    """The gradient of loss() by the dense μ of each layer [of the shape of W], whatever form it is in.

    Inside `loss` the layers have their μ in dense form; nothing else about them changes.
    """
    layers = list(layers)
    before = [layer.mu for layer in layers]
    try:
        for layer, mu in zip(layers, before, strict=True):
            dense = scatter(mu.detach(), layer.mu_index, layer.size) if layer.is_compact else mu.detach().clone()
            layer._parameters["mu"] = nn.Parameter(dense)
        leaves = [layer.mu for layer in layers]
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(), leaves, allow_unused=True, materialize_grads=True)
    finally:
        for layer, mu in zip(layers, before, strict=True):
            layer._parameters["mu"] = mu
    return gradients
