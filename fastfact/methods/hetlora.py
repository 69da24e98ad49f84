"""HetLoRA: "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models" (Cho, Liu, Xu, Fahrezi, Joshi;
EMNLP 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.base.kinds import setting
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo
from fastfact.methods.lora import FACTORS, Adapters
from fastfact.nn.specs import LowRank, Spec

GLOBAL = "global/"


@register
@dataclass(kw_only=True)
class HetLoRA(Adapters):
    """HetLoRA (Cho et al., 2024, Algorithm 1): client k has adapters of rank r_k = `ranks`[k mod their number].

    Down: the first r_k rows of the global A and columns of the global B (Truncation). Up: the client's own, which the
    server pads with zeros to the largest rank and averages with the weights ‖B_k A_k‖_F / Σ_j ‖B_j A_j‖_F over all
    layers (Sparsity-Weighted Aggregation), by which a client of a large rank that has learned little does not wash the
    others out. What `train` names is averaged by n_k.

    A rank that no client of a round has stays as the server had it, at first as in the initial model: zeros in A and B
    alike would never train again. For the same reason a robust rule takes each rank from the clients that have it, and
    makes it smaller by the share of their weights, as padding makes the mean.

    Everybody's tensors have the largest rank here, zeros where r_k ends: these stay zero in training, as neither factor
    has a gradient there. On the wire they cost a bit each. The setting `rank` is not used. Ranks are of what travels:
    the adapter of a classifier that is not shared has the largest rank at every client, and is not pruned.

    pruning: λ of rank self-pruning, 0 for ranks that stay. The local loss gets λ ‖B_k[:, γr_k:r_k]‖ ‖A_k[γr_k:r_k]‖,
    summed over the layers; where this is smaller after a round's training than it was after the download, what it is of
    is dropped, r_k ← ⌊γ r_k⌋, and the client downloads, trains and uploads that rank from then on. decay: γ, of which
    the last rank at least is in question, and one always stays. In the first round, B being zero, nothing is dropped.
    """

    ranks: Sequence[int] = field(default_factory=lambda: [2, 4, 8])
    pruning: float = setting(0.0, "Strength λ of rank self-pruning, 0 for none.", at_least=0)
    decay: float = setting(0.99, "Share of its ranks that a client keeps where it prunes, γ.", above=0, below=1)

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
        shared = {name: info for name, info in infos.items() if self.shares(info)}
        self._roles = {name: info.role for name, info in shared.items() if info.role in FACTORS}
        self._require("pruning", not self.pruning or bool(self._roles), "must be 0 where no adapter is shared")

    def server_state(self, state: State) -> State:
        kept = super().server_state(state) | {GLOBAL + name: state[name][:1].clone() for name in self._roles}
        if self.pruning:
            kept["ranks"] = self._ranks(range(len(next(iter(state.values())))))
        return kept

    def phases(self, epochs: int) -> list[Phase]:
        if not self.pruning:
            return super().phases(epochs)
        return [Phase(epochs, loss=self._loss), Phase(0, update=self._prune)]

    def _last(self, start: State) -> dict[str, Tensor]:
        """A factor's name → which of its ranks are in question, bool [r], of the client that downloaded `start`."""
        rank, lasts = _rank_of({name: start[name] for name in self._roles}), {}
        kept = (self.decay * rank).floor().clamp(min=1)
        for name, role in self._roles.items():
            at = torch.arange(start[name].shape[0 if role == "A" else 1], device=rank.device)
            last = (at >= kept) & (at < rank)
            lasts[name] = last[:, None] if role == "A" else last
        return lasts

    def _weight(self, tensors: State, lasts: dict[str, Tensor]) -> Tensor:
        """Σ ‖B‖ ‖A‖ over the layers, of the ranks in question."""
        norms = {name: torch.linalg.vector_norm(tensors[name] * last) for name, last in lasts.items()}
        return sum(norms[name] * norms[name.removesuffix("A") + "B"] for name in norms if self._roles[name] == "A")

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return net.loss(x, y) + self.pruning * self._weight({**net.start, **net.params}, self._last(net.start))

    def _prune(self, net: Any, x: Tensor, y: Tensor) -> State:
        lasts = self._last(net.start)
        drops = self._weight(net.params, lasts) < self._weight(net.start, lasts)
        return {name: torch.where(last & drops, 0, net.params[name]) for name, last in lasts.items()}

    def pads(self, info: TensorInfo) -> bool:
        return info.role in FACTORS

    def first(self, clients: Sequence[int], state: State) -> State:
        return self._truncated(self._ranks(clients), {name: state[name] for name in self._roles})

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        mixed = super().mix(uploads, [name for name in names if name not in self._roles], guests)
        served = uploads.clients[uploads.here.start : uploads.here.stop] if guests is None else guests.clients
        kept = uploads.server_state
        if guests is None:
            if self.pruning:
                kept["ranks"] = kept["ranks"].clone()
                own = {name: uploads.state[name] for name in self._roles}
                kept["ranks"][uploads.clients] = _rank_of(own).to(kept["ranks"])
            kept |= {GLOBAL + name: tensor for name, tensor in self._averaged(uploads).items()}
        factors = {name: kept[GLOBAL + name] for name in self._roles}
        return mixed | self._truncated(self._ranks(served, kept.get("ranks")), factors)

    def _averaged(self, uploads: Uploads) -> State:
        """The global factors after a round, [1, …]."""
        weights = self._norms(uploads.state)
        total = weights.sum()
        weights = weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))
        ranks = self._ranks(uploads.clients, uploads.server_state.get("ranks"))
        # A row for each rank where clients end: the weights of those that have it, all of them in the first.
        levels = ranks[weights > 0].unique()
        matrix = weights * (ranks >= levels[:, None])
        share = matrix.sum(1)
        share = share / share[0]
        plain = uploads.rule == "mean"
        made = uploads.mix(weights[None] if plain else matrix / share[:, None], list(self._roles))
        for name, tensor in made.items():
            rows, before = (self._rows(name, t) for t in (tensor, uploads.server_state.get(GLOBAL + name, tensor[:1])))
            at = torch.arange(rows.shape[1], device=rows.device)
            if not plain:
                level = torch.searchsorted(levels.to(at), at, right=True).clamp(max=len(levels) - 1)
                rows = rows[level, at][None] * share.to(rows)[level, None]
            made[name] = self._rows(name, torch.where((at < levels[-1])[:, None], rows, before)).contiguous()
        return made

    def _rows(self, name: str, factor: Tensor) -> Tensor:
        """A factor with its ranks before its other axis, and back."""
        return factor if self._roles[name] == "A" else factor.mT

    def _norms(self, state: State) -> Tensor:
        """‖B A‖_F over all layers of each client, float64 [m]: ‖B A‖² = ⟨BᵀB, A Aᵀ⟩."""
        squares = torch.zeros(())
        for name, role in self._roles.items():
            if role == "A" and name in state:
                a, b = state[name].double(), state[name.removesuffix("A") + "B"].double()
                squares = squares.to(a.device) + ((b.mT @ b) * (a @ a.mT)).sum((1, 2))
        return squares.double().clamp(min=0).sqrt().cpu()

    def _ranks(self, clients: Sequence[int], known: Tensor | None = None) -> Tensor:
        """The rank of each of these clients: that in `known`, for newcomers theirs."""
        given = [] if known is None else known.tolist()
        return torch.tensor([given[k] if k < len(given) else self.ranks[k % len(self.ranks)] for k in clients])

    def _truncated(self, ranks: Tensor, factors: State) -> State:
        """The factors [k or 1, …] for clients of these ranks [k], zero beyond the rank of each."""
        cut = {}
        for name, tensor in factors.items():
            axis = 1 if self._roles[name] == "A" else 2
            kept = torch.arange(tensor.shape[axis], device=tensor.device) < ranks.to(tensor.device)[:, None]
            cut[name] = torch.where(kept.unsqueeze(3 - axis), tensor, 0)
        return cut


def _rank_of(factors: State) -> Tensor:
    """The largest rank of which an A [(k,) r, …] is not zero, [(k)]."""
    ranks = []
    for name, tensor in factors.items():
        if name.endswith("A"):
            alive = (tensor != 0).any(-1)
            ranks.append((alive * torch.arange(1, alive.shape[-1] + 1, device=tensor.device)).amax(-1))
    return torch.stack(ranks).amax(0)
