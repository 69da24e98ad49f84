"""Per-FedAvg: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach"
(Fallah, Mokhtari, Ozdaglar; NeurIPS 2020).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register


@register
@dataclass(kw_only=True)
class PerFedAvg(Strategy):
    """Per-FedAvg (Algorithm 1): FedAvg on F_i(w) = f_i(w − α ∇f_i(w)) (eq. 3), the loss after one step of adaptation.

    A local step takes w̃ = w − α ∇f(w; D), then w ← w − β (I − α ∇²f(w; D″)) ∇f(w̃; D′); β is the
    federation's `lr`, alpha is α. D is the first half of the batch, D′ the second, and D″ = D, so that the step is that
    of one differentiable loss (the text draws three independent batches). Batches of fewer than four samples serve
    as D and D′ both. first_order: leave the Hessian out, Per-FedAvg (FO), the cheaper of the paper's two
    approximations; False is the exact step (the other, HF, approximates the product by a difference).

    Clients are evaluated after one step of length α on a batch of their training samples (with the federation's weight
    decay); `fed.models` are the models before that step.

    Everything is shared as in FedAvg, and averaged by n_k (the paper: evenly, over clients of equal size). Batch-norm
    is not mentioned: its learned part is adapted like every weight, its statistics move with both forward passes of a
    step and in the adaptation. Tensors that the caller does not share adapt and train all the same.
    """

    alpha: float = 0.01
    first_order: bool = True

    name: ClassVar[str] = "per-fedavg"
    paper: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    trains_head: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self._require("alpha", 0 < self.alpha < float("inf"), "must be above 0")

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss), Phase(1, steps=1, lr=self.alpha, adapts=True)]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        half = len(y) // 2 if len(y) >= 4 else 0
        first = slice(0, half or None)
        gradient = net.gradient(x[first], y[first], differentiable=not self.first_order)
        adapted = {name: tensor - self.alpha * gradient[name] for name, tensor in net.params.items()}
        return net.loss(x[half:], y[half:], adapted)
