"""When μ becomes sparse while a model trains, and how its support then changes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fastfact.base.kinds import check_kinds
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.sparsity import scatter


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
        changes. optimizer: a `ProxSGD` or `ProxAdamW`, whose `l1` becomes that of the next period; momentum of a layer
        starts anew where its support changes. Raises ValueError where a loss is needed and not given, no layer has a μ,
        or the optimizer no `l1`.
        """
        layers = penalized_layers(model)
        if not layers:
            raise ValueError("Schedule.step: no layer of the model has a μ")
        if optimizer is not None and not all("l1" in group for group in optimizer.param_groups):
            kind = type(optimizer).__name__
            raise ValueError(f"Schedule.step(optimizer): is {kind}, must have an l1 (ff.optim.ProxSGD, ProxAdamW)")
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


def penalized_layers(model: nn.Module) -> list[FactorizedLayer]:
    """The layers of `model` that have a μ."""
    layers = (module for module in model.modules() if isinstance(module, FactorizedLayer))
    return [layer for layer in layers if layer.spec.sparse_factor in layer.factors()]


def dense_gradients(layers: Iterable[FactorizedLayer], loss: Callable[[], Tensor]) -> Sequence[Tensor]:
    """The gradient of loss() by the dense μ of each layer [of the shape of W], whatever form it is in.

    Inside `loss` the layers have their μ in dense form; nothing else about them changes. Raises ValueError for a μ that
    is no parameter of its layer (pruned, parametrized).
    """
    layers = list(layers)
    for layer in layers:
        layer._require_mu("dense_gradients")
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
