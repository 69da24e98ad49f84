"""FedAMP: "Personalized Cross-Silo Federated Learning on Non-IID Data" (Huang, Chu, Zhou, Wang, Liu, Pei, Zhang; AAAI
2021).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.federation.client.phase import Phase
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo


@register
@dataclass(kw_only=True)
class FedAMP(Strategy):
    """FedAMP (Algorithm 1): attentive message passing between clients with similar weights.

    The server makes each client a cloud model u_i = ξ_ii w_i + Σ_{j≠i} ξ_ij w_j, ξ_ij = α A′(‖w_i − w_j‖²), rows
    summing to 1, with A(x) = 1 − e^{−x/σ}. The client minimises F_i(w) + λ/(2α) ‖w − u_i‖². It
    goes on from its own w_i: u_i is only the centre of the pull.

    alpha, sigma, lam: α, σ, λ. σ is the squared distance at which attention has fallen to 1/e; all three depend on the
    size of the network. Where Σ_{j≠i} ξ_ij would exceed 1, which the paper excludes by a small α, it is scaled to 1.
    heuristic: HeurFedAMP: ξ_ij ∝ e^{σ cos(w_i, w_j)} for j ≠ i, sharing 1 − self_weight.

    Up and down: the shared parameters. Batch-norm's learned part is among them (the paper does not speak of it), the
    statistics are always the client's own. A client that missed a round is matched by the weights it has.
    """

    alpha: float = 10.0
    sigma: float = 100.0
    lam: float = 1.0
    heuristic: bool = False
    self_weight: float = 0.5

    name: ClassVar[str] = "fedamp"
    paper: ClassVar[str] = "Huang et al., AAAI 2021"

    def check(self) -> None:
        super().check()
        for name in ("alpha", "sigma"):
            self._require(name, 0 < getattr(self, name) < float("inf"), "must be above 0")
        self._require("lam", 0 <= self.lam < float("inf"), "must be a number of at least 0")
        self._require("self_weight", 0 <= self.self_weight <= 1, "must be between 0 and 1")

    def shares(self, info: TensorInfo) -> bool:
        return not info.buffer and self.allowed(info)

    def compares(self, info: TensorInfo) -> bool:
        return self.shares(info)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._shared = [name for name, info in infos.items() if self.shares(info)]

    def extra(self, state: State) -> State:
        return {f"cloud/{name}": state[name].clone() for name in self._shared}

    def receive(self, state: State, mixed: State) -> State:
        return {f"cloud/{name}": tensor for name, tensor in mixed.items()}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss)]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        pulled = [name for name in self._shared if name in net.params]
        distance = sum((net.params[name] - net.start[f"cloud/{name}"]).square().sum() for name in pulled)
        return net.loss(x, y) + self.lam / (2 * self.alpha) * distance

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        if guests is None:
            return self._attention(uploads.key())
        return torch.cat([self._attention(torch.cat([key[None], uploads.key()]))[:1] for key in guests.key()])

    def _attention(self, keys: Tensor) -> Tensor:
        """ξ [m, m], float64."""
        if self.heuristic:
            xi = torch.exp(self.sigma * (mixing.cosine(keys) - 1)).fill_diagonal_(0)
            total = xi.sum(1, keepdim=True)
            xi = torch.where(total > 0, (1 - self.self_weight) * xi / total, 0.0)
        else:
            squares = torch.cdist(keys.double(), keys.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
            xi = (self.alpha / self.sigma * torch.exp(-squares / self.sigma)).fill_diagonal_(0)
            xi = xi / xi.sum(1, keepdim=True).clamp(min=1)
        return xi + torch.diag(1 - xi.sum(1))
