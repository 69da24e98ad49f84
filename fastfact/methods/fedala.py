"""FedALA: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning" (Zhang, Hua, Wang, Song, Xue, Ma,
Guan; AAAI 2023).
"""

import math
import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.base.kinds import setting
from fastfact.federation.client.data import batches
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo

OWN, WEIGHT = "own/", "ala/"
MOST, WINDOW = 100, 10


@register
@dataclass(kw_only=True)
class FedALA(Strategy):
    """FedALA (Algorithm 1): FedAvg whose clients do not start from the download θ but from
    θ̂_i = θ_i + (θ − θ_i) ⊙ W_i (eq. 4), θ_i their own model of the last time, in the `layers` highest layers; in those
    below W_i = 1, which is θ.

    W_i, a number for each parameter, is learned by W ← clip(W − η ∇_θ̂ L ⊙ (θ − θ_i), 0, 1) (eq. 5) on `sample` of the
    client's training samples, drawn anew each round, in batches. It starts from 1. The first time it takes as many
    epochs as it needs to converge (the losses of the last ten have a standard deviation below `threshold`; at most a
    hundred), later, going on from where it was, one.

    layers: p. sample: s (80 %). ala_lr: η. The defaults are those of the paper; its threshold is of its published code,
    the text has none. The gradient is taken in eval mode, so that learning W moves no statistics. What is evaluated
    before training is θ̂_i.

    Only what is downloaded is mixed: what the caller does not share stays the client's own. Batch-norm (not mentioned):
    its learned part belongs to the layer before it, its statistics are those downloaded. W_i and θ_i stay at the
    client, and cost no bytes.
    """

    layers: int = setting(1, "How many of the highest layers are mixed by learned weights.", unit="layers", at_least=1)
    sample: float = setting(0.8, "Fraction of a client's samples that the weights are learned on.", above=0, at_most=1)
    ala_lr: float = setting(1.0, "Learning rate of the weights.", above=0)
    threshold: float = setting(0.1, "Spread of the last ten losses below which the weights have converged.", above=0)

    name: ClassVar[str] = "fedala"
    paper: ClassVar[str] = "Zhang et al., AAAI 2023"
    trains_head: ClassVar[bool] = False

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._mixed = [
            name
            for name, info in infos.items()
            if self.shares(info) and not info.buffer and info.layer > info.layers - self.layers
        ]

    def extra(self, state: State) -> State:
        flag = next(tensor for tensor in state.values() if tensor.is_floating_point())
        flags = {"learned": flag.new_zeros(len(flag), 1), "downloaded": flag.new_zeros(len(flag), 1)}
        own = {OWN + name: state[name].clone() for name in self._mixed}
        return flags | own | {WEIGHT + name: torch.ones_like(state[name]) for name in self._mixed}

    def receive(self, state: State, mixed: State) -> State:
        # In this order: the tensors are overwritten in place.
        own = {OWN + name: state[name] for name in self._mixed}
        return own | mixed | {"downloaded": torch.ones_like(state["downloaded"])}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, update=self._aggregate), Phase(0, update=self._aggregate, adapts=True)]

    def _aggregate(self, net: Any, x: Tensor, y: Tensor) -> State:
        start = net.start
        if not start["downloaded"].any() or not self._mixed:
            return {}
        own = {name: start[OWN + name] for name in self._mixed}
        apart = {name: net.params[name] - own[name] for name in self._mixed}
        weights = {name: start[WEIGHT + name] for name in self._mixed}
        if any(part.any() for part in apart.values()):
            weights = self._learned(net, x, y, own, apart, weights)
        merged = {name: own[name] + apart[name] * weights[name] for name in self._mixed}
        flags = {"learned": torch.ones_like(start["learned"]), "downloaded": torch.zeros_like(start["downloaded"])}
        return merged | {WEIGHT + name: weight for name, weight in weights.items()} | flags

    def _learned(self, net: Any, x: Tensor, y: Tensor, own: State, apart: State, weights: State) -> State:
        some = torch.randperm(len(y), generator=net.generator)[: math.ceil(self.sample * len(y))].to(y.device)
        x, y, losses = x[some], y[some], []
        for _ in range(1 if net.start["learned"].any() else MOST):
            total = 0.0
            for begin, end in batches(len(y), net.settings.batch_size):
                merged = {name: own[name] + apart[name] * weights[name] for name in own}
                gradient, loss = net.gradient_and_loss(x[begin:end], y[begin:end], merged, evaluate=True)
                total += float(loss) * (end - begin) / len(y)
                weights = {
                    name: (weight - self.ala_lr * gradient[name] * apart[name]).clamp(0, 1)
                    for name, weight in weights.items()
                }
            losses.append(total)
            if len(losses) > WINDOW and statistics.stdev(losses[-WINDOW:]) < self.threshold:
                break
        return weights
