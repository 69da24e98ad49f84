"""HetLoRA: "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models" (Cho, Liu, Xu, Fahrezi, Joshi;
EMNLP 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo
from fastfact.methods.lora import FACTORS, Adapters
from fastfact.nn.specs import LowRank, Spec


@register
@dataclass(kw_only=True)
class HetLoRA(Adapters):
    """HetLoRA (Cho et al., 2024, Algorithm 1): client k has adapters of rank r_k = `ranks`[k mod their number].

    Down: the first r_k rows of the global A and columns of the global B (Truncation). Up: the client's own, which the
    server pads with zeros to the largest rank and averages with the weights ‖B_k A_k‖_F / Σ_j ‖B_j A_j‖_F over all
    layers (Sparsity-Weighted Aggregation), by which a client of a large rank that has learned little does not wash the
    others out. What `train` names is averaged by n_k.

    Everybody's tensors have the largest rank here, zeros where r_k ends: these stay zero in training, as neither factor
    has a gradient there. On the wire they cost a bit each. The setting `rank` is not used.
    The paper's rank self-pruning, by which a client may lower its r_k, is left out.
    """

    ranks: Sequence[int] = field(default_factory=lambda: [2, 4, 8])

    name: ClassVar[str] = "hetlora"
    paper: ClassVar[str] = "HetLoRA, EMNLP 2024"

    def check(self) -> None:
        right = isinstance(self.ranks, list | tuple) and all(type(rank) is int and rank > 0 for rank in self.ranks)
        self._require("ranks", right and len(self.ranks) > 0, "must be a list of integers of at least 1")
        self.ranks = list(self.ranks)
        super().check()

    def spec(self) -> Spec:
        return LowRank(rank=max(self.ranks), scaling=self.scaling, dropout=self.dropout)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        super().bind(infos)
        self._roles = {name: info.role for name, info in infos.items() if info.role in FACTORS}

    def pads(self, info: TensorInfo) -> bool:
        return info.role in FACTORS

    def first(self, clients: Sequence[int], state: State) -> State:
        return self._truncated(clients, {name: state[name] for name in self._roles})

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        mixed = super().mix(uploads, [name for name in names if name not in self._roles], guests)
        served = uploads.clients[uploads.here.start : uploads.here.stop] if guests is None else guests.clients
        weights = self._norms(uploads.state)
        total = weights.sum()
        weights = weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))
        factors = uploads.mix(weights.expand(len(served), -1), [name for name in names if name in self._roles])
        return mixed | self._truncated(served, factors)

    def _norms(self, state: State) -> Tensor:
        """‖B A‖_F over all layers of each client, float64 [m]: ‖B A‖² = ⟨BᵀB, A Aᵀ⟩."""
        squares = torch.zeros(())
        for name, role in self._roles.items():
            if role == "A" and name in state:
                a, b = state[name].double(), state[name.removesuffix("A") + "B"].double()
                squares = squares.to(a.device) + ((b.mT @ b) * (a @ a.mT)).sum((1, 2))
        return squares.double().clamp(min=0).sqrt().cpu()

    def _truncated(self, clients: Sequence[int], factors: State) -> State:
        """The factors [k, …] of these clients, zero beyond the rank of each."""
        cut = {}
        for name, tensor in factors.items():
            axis = 1 if self._roles[name] == "A" else 2
            rank = torch.tensor([self.ranks[client % len(self.ranks)] for client in clients], device=tensor.device)
            kept = torch.arange(tensor.shape[axis], device=tensor.device) < rank[:, None]
            cut[name] = torch.where(kept.unsqueeze(3 - axis), tensor, 0)
        return cut
