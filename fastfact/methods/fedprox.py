"""FedProx: "Federated Optimization in Heterogeneous Networks" (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys
2020).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo


@register
@dataclass(kw_only=True)
class FedProx(Strategy):
    """FedAvg whose clients minimise F_k(w) + prox / 2 · ‖w − w^t‖² (eq. 2, Algorithm 2), w^t the download.

    prox: μ of the paper, which tunes it in {0.001, 0.01, 0.1, 1}. The γ-inexact solution of line 5 is the federation's
    number of local epochs; nobody works less than that (no stragglers are simulated).

    Algorithm 2 draws clients with probability p_k = n_k / N and averages them evenly; here they are drawn evenly and
    averaged by n_k (FedAvg's form, which the paper compares with). The pull is on what was downloaded: personal
    tensors (the classifier or the norms if the caller switches their sharing off) have no w^t and are left free.
    Batch-norm, of which the paper says nothing, is FedAvg's: learned part and statistics are shared, only the learned
    part is pulled.
    """

    prox: float = 0.01

    name: ClassVar[str] = "fedprox"
    letters: ClassVar[dict[str, str]] = {"mu": "prox"}
    paper: ClassVar[str] = "Li et al., MLSys 2020"

    def check(self) -> None:
        super().check()
        self._require("prox", 0 <= self.prox < float("inf"), "must be a number of at least 0")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._downloaded = [name for name, info in infos.items() if self.shares(info) and not info.buffer]

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss)]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        pulled = [name for name in self._downloaded if name in net.params]
        distance = sum((net.params[name] - net.start[name]).square().sum() for name in pulled)
        return net.loss(x, y) + self.prox / 2 * distance
