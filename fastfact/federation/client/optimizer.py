"""How local training moves tensors: optimizers as functions of stacked tensors, learning rates, clipped gradients.

What an optimizer keeps is a `State` beside the clients' own: "slot/tensor" → [k, …]. So it has the client axis, clients
that train together may have taken different numbers of steps, and where it is kept from round to round it is a part of
the client's state as any other, in stores and checkpoints too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fastfact import ops
from fastfact.federation.state import State, flattened
from fastfact.nn.optim import step_l1

KEPT = "optimizer/"
"""Before the name of what an optimizer keeps, in the state of a client."""


class Options(Protocol):
    """What optimizers ask of `step.Settings`."""

    momentum: float
    beta2: float
    eps: float
    weight_decay: float
    l1: float
    proximal: bool
    penalized: frozenset[str]
    schedule: str
    schedule_rounds: int
    lr_warmup: float


class Optimizer:
    """Base of the optimizers.

    slots: the names of what it keeps like each parameter, all zeros at the start; counts: whether it also keeps how
    many steps each parameter took ("count/tensor", int64 [k]).
    """

    counts: ClassVar[bool] = False

    def __init__(self, options: Options):
        self.options = options

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def start(self, params: State) -> State:
        """What it keeps of `params` [k, …] before their first step."""
        kept = {f"{slot}/{name}": torch.zeros_like(param) for slot in self.slots for name, param in params.items()}
        if self.counts:
            counts = {name: torch.zeros(len(p), dtype=torch.long, device=p.device) for name, p in params.items()}
            kept |= {f"count/{name}": count for name, count in counts.items()}
        return kept

    def step_(self, params: State, grads: Sequence[Tensor], kept: State, lr: float | Tensor) -> None:
        """Step `params` [k, …] by their gradients and move what is kept of them, in place. lr: a number, or one for
        each client [k]."""
        raise NotImplementedError

    def _penalty(self, name: str) -> float:
        return self.options.l1 if name in self.options.penalized else 0.0


class SGD(Optimizer):
    """SGD with momentum; with `ProxSGD`'s soft threshold, or the subgradient, on what has an L1 penalty."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.options.momentum else ()

    def step_(self, params: State, grads: Sequence[Tensor], kept: State, lr: float | Tensor) -> None:
        o = self.options
        momenta = [kept[f"momentum/{name}"] for name in params] if o.momentum else []
        l1 = [step_l1(self._penalty(name), o.momentum, o.proximal) for name in params]
        if not isinstance(lr, Tensor):
            settings = {"momentum": o.momentum, "weight_decay": o.weight_decay, "proximal": o.proximal}
            ops.prox_sgd_step(list(params.values()), grads, momenta, l1, lr=lr, **settings)
            return
        for j, (param, grad) in enumerate(zip(params.values(), grads, strict=True)):
            rate, moved = _each(lr, param), grad + o.weight_decay * param if o.weight_decay else grad
            if l1[j] and not o.proximal:
                moved = moved + l1[j] * param.sign()
            if momenta:
                moved = momenta[j].mul_(o.momentum).add_(moved)
            param.sub_(rate * moved)
            if l1[j] and o.proximal:
                _threshold_(param, rate * l1[j])


class Adam(Optimizer):
    """Adam (Kingma & Ba, 2015) with β₁ = momentum; weight decay in the gradient, as in `torch.optim.Adam`. The L1
    penalty is a soft threshold in Adam's metric, see `ff.optim.ProxAdamW`, or its subgradient."""

    counts = True
    decoupled: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step_(self, params: State, grads: Sequence[Tensor], kept: State, lr: float | Tensor) -> None:
        o, names, tensors, grads = self.options, list(params), list(params.values()), list(grads)
        if not names:
            return
        first, second, counts = ([kept[f"{slot}/{name}"] for name in names] for slot in (*self.slots, "count"))
        if o.weight_decay and not self.decoupled:
            grads = torch._foreach_add(grads, tensors, alpha=o.weight_decay)
        for j, name in enumerate(names):
            if self._penalty(name) and not o.proximal:
                grads[j] = grads[j] + o.l1 * tensors[j].sign()
        torch._foreach_add_(counts, 1)
        steps = torch.stack(counts).double()
        rates = (lr / (1 - o.momentum**steps)).unbind()
        scales = (1 - o.beta2**steps).rsqrt_().unbind()
        torch._foreach_lerp_(first, grads, 1 - o.momentum)
        torch._foreach_mul_(second, o.beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - o.beta2)
        for name, param, m, v, rate, scale in zip(names, tensors, first, second, rates, scales, strict=True):
            metric = v.sqrt().mul_(_each(scale, v)).add_(o.eps)
            if o.weight_decay and self.decoupled:
                param.mul_(1 - o.weight_decay * (_each(lr, param) if isinstance(lr, Tensor) else lr))
            param.sub_((m / metric).mul_(_each(rate, m)))
            if self._penalty(name) and o.proximal:
                _threshold_(param, o.l1 * (_each(lr, param) if isinstance(lr, Tensor) else lr) / metric)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019), as `torch.optim.AdamW`."""

    decoupled = True


OPTIMIZERS: Mapping[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def _each(numbers: Tensor, like: Tensor) -> Tensor:
    """numbers [k] as factors of `like` [k, …]."""
    return numbers.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def _threshold_(param: Tensor, threshold: Tensor) -> None:
    param.sub_(torch.clamp(param, -threshold, threshold))


def clipped(grads: Sequence[Tensor], most: float) -> list[Tensor]:
    """Each client's gradients [k, …] scaled to a Euclidean norm, over all of them, of at most `most`, as
    `torch.nn.utils.clip_grad_norm_` does."""
    norms = torch.stack([torch.linalg.vector_norm(flattened(grad), dim=1) for grad in grads]).norm(dim=0)
    scale = (most / (norms + 1e-6)).clamp(max=1)
    return [grad * _each(scale, grad) for grad in grads]


def rate(options: Options, round: int, step: int, steps: int) -> float:
    """The factor of the learning rate at `step`, from 0, of a client's `steps` in a round, from 1.

    Of `schedule_rounds` rounds, or (0) of each round by itself, the first part, `lr_warmup`, rises in a line to 1,
    which the last step of it has. What is left is constant or falls to 0, in a line or a half cosine, from the first
    step after the warm-up, which has 1. Past the last of these rounds it stays at the end.
    """
    rounds = options.schedule_rounds or 1
    done = min(1.0, ((round - 1 if options.schedule_rounds else 0) + step / steps) / rounds)
    warmup = options.lr_warmup
    if done < warmup:
        return min(1.0, (done + 1 / (steps * rounds)) / warmup)
    left = (done - warmup) / (1 - warmup)
    if options.schedule == "constant":
        return 1.0
    return 1 - left if options.schedule == "linear" else (1 + math.cos(math.pi * left)) / 2
