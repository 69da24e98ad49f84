"""pFedSD: "Personalized Edge Intelligence via Federated Self-Knowledge Distillation" (Jin, Bai, Yao, Dun, Gu, Yu, Deng;
IEEE TPDS 2023).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo


@register
@dataclass(kw_only=True)
class PFedSD(Strategy):
    """pFedSD, self-knowledge distillation (Algorithm 1): FedAvg whose clients train the downloaded model with their own
    model of the last time they took part as teacher: L_CE + λ T² KL(softmax(z_teacher / T) ‖ softmax(z / T)).

    distillation: λ, temperature: T. The first time a client takes part it has no teacher and only L_CE. T² is the usual
    scale of distillation, which keeps the gradient's size apart from T; the text leaves it to λ. λ T² near 1 suits a
    few local epochs: far above it, a client holds on to what its first, weak model said. The teacher runs in eval mode,
    with its own normalisation statistics. The personal model, which is evaluated, is the one just trained; it is kept
    at the client and costs no bytes.

    Batch-norm, of which the paper says nothing, is shared as in FedAvg, learned part and statistics. What the caller
    does not share (the classifier) goes on from the client's own and is taught like the rest.
    """

    distillation: float = 0.1
    temperature: float = 3.0

    name: ClassVar[str] = "pfedsd"
    paper: ClassVar[str] = "Jin et al., TPDS 2023"
    classifies: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        self._require("distillation", 0 <= self.distillation < float("inf"), "must be a number of at least 0")
        self._require("temperature", 0 < self.temperature < float("inf"), "must be above 0")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._names = list(infos)

    def extra(self, state: State) -> State:
        like = next(tensor for tensor in state.values() if tensor.is_floating_point())
        teacher = {f"teacher/{name}": state[name].clone() for name in self._names}
        return teacher | {"taught": like.new_zeros(len(like), 1)}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss), Phase(0, update=self._keep)]

    def _keep(self, net: Any, x: Tensor, y: Tensor) -> State:
        tensors = {**net.rest, **net.params}
        return {f"teacher/{name}": tensors[name] for name in self._names} | {
            "taught": torch.ones_like(net.start["taught"])
        }

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = net(x, {name: net.start[f"teacher/{name}"] for name in self._names}, evaluate=True)
        logits, t = net(x), self.temperature
        divergence = F.kl_div(
            (logits / t).log_softmax(1), (teacher / t).log_softmax(1), reduction="batchmean", log_target=True
        )
        return F.cross_entropy(logits, y) + self.distillation * t**2 * net.start["taught"].sum() * divergence
