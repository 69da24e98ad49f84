"""Proximal SGD and AdamW: the step of PyTorch's optimizer on every parameter, and a soft threshold on μ."""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastfact import ops
from fastfact.nn import sparsity
from fastfact.ops import direct
from fastfact.ops.backends import PLAIN

__all__ = ["ProxAdamW", "ProxSGD"]

METHODS = ("proximal", "subgradient")


class _OfSupports(Optimizer):
    """What it keeps of a compact μ is of the positions at that time, and starts anew for others. What is loaded or
    copied is taken for that of the present positions. What the state of another optimizer has no word of, as `l1` in
    that of `torch.optim.SGD`, stays as it is."""

    def _forget_others(self) -> None:
        """Drop what is kept of positions that a μ no longer has."""
        for param, state in self.state.items():
            if "support" in state and state["support"] != sparsity.support_version(param):
                state.clear()

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, without what is kept of positions that a μ no longer has."""
        self._forget_others()
        return super().state_dict()

    def __getstate__(self):
        self._forget_others()
        return super().__getstate__()

    def __setstate__(self, state):
        before = self.__dict__.get("param_groups", ())
        super().__setstate__(state)
        for group, own in zip(self.param_groups, before, strict=False):
            for name, value in own.items():
                group.setdefault(name, value)
        # The count of changes is a parameter's own: that of a copy begins anew.
        for param, kept in self.state.items():
            if "support" in kept:
                kept["support"] = sparsity.support_version(param)


class ProxSGD(_OfSupports):
    """SGD with momentum and weight decay; μ of factorized layers also takes the L1 penalty `l1` (λ, eq. 6 of
    Factorized-FL): by the proximal step (a soft threshold by lr · l1 / (1 − momentum), so that zeros are exact), or
    with method="subgradient" as l1 · sign(μ) in the gradient.

    params: as for any optimizer, named parameters included; lr > 0, 0 ≤ momentum < 1, weight_decay and l1 ≥ 0, also per
    group.
    A model without factorized layers is trained as by `torch.optim.SGD`. Raises ValueError for values out of range.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        l1: float = 0.0,
        method: str = "proximal",
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "l1": l1, "method": method}
        super().__init__(params, defaults)

    def add_param_group(self, param_group) -> None:
        """As for any optimizer."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """One step. `closure` re-evaluates the model and returns the loss, as in `torch.optim`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._forget_others()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not torch.compiler.is_compiling() and self._step_at_once(group, params):
                continue
            alike = defaultdict(list)
            for param in params:
                alike[param.device, param.dtype].append(param)
            for params in alike.values():
                self._step(group, params)
        return loss

    def _step_at_once(self, group, params) -> bool:
        """The step on all parameters, whatever their types, where they are plain tensors on one device; whether they
        are.

        A small network's takes no longer than the checks of `ops.prox_sgd_step`.
        """
        how = group["lr"], group["momentum"], group["weight_decay"]
        if not params or not all(map(math.isfinite, how)):
            return False
        device = params[0].device
        if device.type not in ("cpu", direct.OTHER) or not all(param.device == device for param in params):
            return False
        momenta = self._momenta(group, params)
        done = direct.prox_sgd_step(
            params, [p.grad for p in params], momenta, self._penalties(group, params), *how, _is_proximal(group)
        )
        if done:
            torch.autograd.graph.increment_version(params + momenta)
        return done

    def _step(self, group, params) -> None:
        ops.prox_sgd_step(
            _local(params),
            _local([param.grad for param in params]),
            _local(self._momenta(group, params)),
            self._penalties(group, params),
            lr=group["lr"],
            momentum=group["momentum"],
            weight_decay=group["weight_decay"],
            proximal=_is_proximal(group),
        )

    def _momenta(self, group, params) -> list[Tensor]:
        momenta = []
        for param in params if group["momentum"] else ():
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["support"] = sparsity.support_version(param)
                state["momentum_buffer"] = torch.zeros_like(param)
            momenta.append(state["momentum_buffer"])
        return momenta

    @staticmethod
    def _penalties(group, params) -> list[float]:
        l1 = step_l1(group["l1"], group["momentum"], _is_proximal(group))
        return [l1 if sparsity.penalized(param) else 0.0 for param in params]


def _is_proximal(group) -> bool:
    return group["method"] == "proximal"


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """What of sharded tensors (of FSDP) lies here: the step is one of each number by itself."""
    return [t.to_local() if type(t) not in PLAIN and hasattr(t, "to_local") else t for t in tensors]


class ProxAdamW(_OfSupports, torch.optim.AdamW):
    """`torch.optim.AdamW` (Adam with decoupled weight decay, Loshchilov & Hutter 2019); μ of factorized layers also
    takes the L1 penalty `l1` (λ), by the proximal step in Adam's metric (Yun, Lozano & Yang 2021): a soft threshold by
    lr · l1 / (√v̂ + eps), element by element, so that zeros are exact and training minimises loss + l1 · ‖μ‖₁ (weight
    decay, being decoupled, apart).

    Arguments as for AdamW, and l1 ≥ 0, also per group. On the CPU a step is one pass over all parameters; PyTorch's own
    step serves `amsgrad`, `maximize`, `capturable` and foreach=True. Schedulers of PyTorch change `lr` as usual. The
    moments of a μ start anew where its support changes. Raises ValueError for values out of range, and for
    `differentiable`.
    """

    def __init__(self, params, lr: float | Tensor = 1e-3, *args, l1: float = 0.0, **settings):
        super().__init__(params, lr, *args, **settings)
        if self.defaults["differentiable"]:
            raise ValueError("ProxAdamW(differentiable=True): the step is not differentiable, must be False")
        self.defaults["l1"] = l1
        for group in self.param_groups:
            _check_l1("ProxAdamW", group.setdefault("l1", l1))

    def add_param_group(self, param_group) -> None:
        """As for any optimizer."""
        _check_l1("ProxAdamW", param_group.get("l1", 0.0))
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """One step. `closure` re-evaluates the model and returns the loss, as in `torch.optim`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._forget_others()
        if not torch.compiler.is_compiling() and self._step_at_once():
            return loss
        sparse = [
            (group, param)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None and sparsity.penalized(param)
        ]
        _ADAMW_STEP(self)
        for _, param in sparse:
            self.state[param]["support"] = sparsity.support_version(param)
        self._shrink([(group, param) for group, param in sparse if group["l1"]])
        return loss

    def _step_at_once(self) -> bool:
        """The step and the threshold in one pass, where all parameters are plain tensors on the CPU and no setting asks
        for PyTorch's; whether it was made."""
        if getattr(self, "found_inf", None) is not None or not all(map(_is_plain, self.param_groups)):
            return False
        params, grads, firsts, seconds, steps, how = lists = [], [], [], [], [], []
        for group in self.param_groups:
            before = len(params)
            if self._init_group(group, params, grads, firsts, seconds, [], steps):
                return False
            settings = (float(group["lr"]), *map(float, group["betas"]), group["eps"], group["weight_decay"])
            for param in params[before:]:
                penalized = sparsity.penalized(param)
                if penalized:
                    self.state[param]["support"] = sparsity.support_version(param)
                how += (*settings, float(group["l1"]) if penalized else 0.0)
        done = direct.adamw_step(*lists)
        if done:
            torch.autograd.graph.increment_version(params + firsts + seconds + steps)
        return done

    def _shrink(self, sparse) -> None:
        """The soft threshold on these parameters, each with its group; none after a step that was left out for a scaled
        gradient that is not finite (`GradScaler`, which says so to a fused step alone)."""
        left_out = getattr(self, "found_inf", None)
        for group, param in sparse:
            threshold = group["lr"] * group["l1"] / self._metric(group, self.state[param])
            if left_out is not None:
                threshold = threshold.masked_fill(left_out.to(param.device) != 0, 0.0)
            param.sub_(torch.clamp(param, -threshold, threshold))

    @staticmethod
    def _metric(group, state) -> Tensor:
        """√v̂ + eps, what the step of each element is divided by."""
        second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
        # A number on the CPU divides without being waited for on its way to a GPU.
        correction = 1 - group["betas"][1] ** state["step"].double()
        return (second / correction).sqrt_().add_(group["eps"])


def _is_plain(group) -> bool:
    """Whether this group takes the step of AdamW's paper, however computed, on plain tensors on the CPU."""
    asked = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")
    return not any(group[name] for name in asked) and all(
        param.grad is None or (type(param) in PLAIN and type(param.grad) in PLAIN and param.is_cpu)
        for param in group["params"]
    )


def _without_hooks(step):
    """`step` of an optimizer's class without what PyTorch puts around it, the hooks: they are called around the step of
    the optimizer's own class."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


_ADAMW_STEP = _without_hooks(torch.optim.AdamW.step)


def step_l1(l1: float, momentum: float, proximal: bool) -> float:
    """The l1 to give `ops.prox_sgd_step` so that training minimises loss + `l1` · ‖μ‖₁.

    Momentum makes a step 1 / (1 − momentum) times as long as lr in the long run. The subgradient passes through it; the
    threshold does not and must grow with it: with lr · l1 the fixed point is that of (1 − momentum) · l1.
    """
    return l1 / (1 - momentum) if proximal else l1


def _check_l1(optimizer: str, l1: float) -> None:
    if not l1 >= 0:
        raise ValueError(f"{optimizer}(l1={l1}): must not be negative")


def _check(group) -> None:
    if not group["lr"] > 0:
        raise ValueError(f"ProxSGD(lr={group['lr']}): must be above 0")
    for name in ("weight_decay", "l1"):
        if not group[name] >= 0:
            raise ValueError(f"ProxSGD({name}={group[name]}): must not be negative")
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"ProxSGD(momentum={group['momentum']}): must be at least 0 and below 1")
    if group["method"] not in METHODS:
        raise ValueError(f"ProxSGD(method={group['method']!r}): must be one of {', '.join(map(repr, METHODS))}")
