"""Clustered-FL: "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under Privacy
Constraints" (Sattler, Müller, Samek; 2019).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Offer, Strategy, Uploads, register
from fastfact.federation.state import State, flattened
from fastfact.federation.tensors import TensorInfo


def bipartition(similarity: Tensor) -> tuple[list[int], list[int], float]:
    """The two parts of 0 … m − 1 with the smallest largest similarity across, and that similarity.

    similarity [m, m] symmetric, m ≥ 2. Pairs are joined from the most similar down until two parts are left (single
    linkage), which is optimal: whatever is joined before has a larger similarity. The first part holds 0.
    """
    m = len(similarity)
    part = list(range(m))
    first, second = torch.triu_indices(m, m, offset=1)
    order = similarity[first, second].sort(descending=True, stable=True).indices.tolist()
    for pair in order:
        i, j = int(first[pair]), int(second[pair])
        if part[i] != part[j]:
            if len(set(part)) == 2:
                break
            part = [part[i] if p == part[j] else p for p in part]
    near = [i for i in range(m) if part[i] == part[0]]
    far = [i for i in range(m) if part[i] != part[0]]
    return near, far, float(similarity[near][:, far].max())


@register
@dataclass(kw_only=True)
class ClusteredFL(Strategy):
    """Clustered FL: FedAvg in clusters, which are split in two where their members disagree.

    With ΔW_i what client i's training changed in the round, a cluster c is split if it has come to rest while its
    members have not, ‖Σ_{i∈c} n_i/n_c ΔW_i‖ < eps1 and max_{i∈c} ‖ΔW_i‖ > eps2 (the paper's ε₁ and ε₂), along the
    bipartition with the smallest largest cosine of ΔW_i across (its Optimal Bipartition), and only if
    gamma_max < √((1 − α_cross) / 2), its condition for a correct split; 0 leaves that last check out. eps1 and eps2 are
    absolute lengths, to be chosen for the model and the learning rate; 0.4 and 1.6 are those of the authors' published
    example.

    ΔW is taken over the shared parameters, without batch-norm's statistics. The server keeps a model of each cluster
    (its memory): clients upload weights, not differences, and download their cluster's model. A cluster that is split
    is averaged in its new parts at once. Members that are not among the clients of the round stay with the larger part,
    and get the present model of their cluster when they return (the paper lets everybody take part). A client that
    joins after training is offered the clusters' models and takes the one that does best on its samples (the paper
    walks down the tree of splits by the newcomer's update).

    Batch-norm, learned part and statistics, is averaged within clusters. Where classifiers or norms are not shared,
    they are no part of ΔW.
    """

    eps1: float = 0.4
    eps2: float = 1.6
    gamma_max: float = 0.0

    name: ClassVar[str] = "clustered-fl"
    paper: ClassVar[str] = "Sattler et al., 2019"

    def check(self) -> None:
        super().check()
        for name in ("eps1", "eps2", "gamma_max"):
            self._require(name, getattr(self, name) >= 0, "must not be negative")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._shared = [name for name, info in infos.items() if self.shares(info)]
        self._compared = [name for name in self._shared if not infos[name].buffer]

    def server_state(self, state: State) -> State:
        k = len(next(iter(state.values())))
        models = {f"model/{name}": state[name][:1].clone() for name in self._shared}
        return models | {"cluster": torch.zeros(k, dtype=torch.long)}

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        if guests is not None:
            return self._models_of(guests.clients, uploads, names)
        cluster = uploads.server_state["cluster"].cpu().clone()
        models = {name: uploads.server_state[f"model/{name}"] for name in names}
        # What each client started from: where rounds are asynchronous, no longer its cluster's model.
        start = {name: model[cluster[uploads.clients].to(model.device)] for name, model in models.items()}
        start |= uploads.start
        updates = torch.cat(
            [flattened(uploads.state[name] - start[name]) for name in self._compared]
            or [torch.zeros(len(uploads.clients), 1)],
            dim=1,
        ).double()
        count = next(iter(models.values())).shape[0]
        for c in cluster[uploads.clients].unique().tolist():
            places = (cluster[uploads.clients] == c).nonzero().flatten()
            leaving = self._split(updates[places], [uploads.samples[place] for place in places])
            if leaving:
                cluster[[uploads.clients[places[i]] for i in leaving]] = count
                models = {name: torch.cat([tensor, tensor[c : c + 1]]) for name, tensor in models.items()}
                count += 1
        mine = cluster[uploads.clients]
        samples = torch.tensor(uploads.samples, dtype=torch.float64)
        # The mixing matrix is constant in each block: a row a cluster.
        present, place = mine.unique(return_inverse=True)
        matrix = (present[:, None] == mine) * samples
        mixed = uploads.mix(matrix / matrix.sum(1, keepdim=True), names)
        for name, tensor in models.items():
            models[name] = tensor.index_copy(0, present.to(tensor.device), mixed[name])
        uploads.server_state |= {"cluster": cluster} | {f"model/{name}": tensor for name, tensor in models.items()}
        return {name: tensor[place.to(tensor.device)] for name, tensor in mixed.items()}

    def _split(self, updates: Tensor, samples: list[int]) -> list[int]:
        """Which members [m, d] leave the cluster; empty if it stays."""
        if len(updates) < 2:
            return []
        n = torch.tensor(samples, dtype=torch.float64, device=updates.device)
        at_rest = float((n @ updates / n.sum()).norm()) < self.eps1
        if not (at_rest and float(updates.norm(dim=1).max()) > self.eps2):
            return []
        near, far, across = bipartition(mixing.cosine(updates).cpu())
        if ((1 - across) / 2) ** 0.5 <= self.gamma_max:
            return []
        return far if len(far) <= len(near) else near

    def _models_of(self, clients: list[int], uploads: Uploads, names: list[str]) -> State:
        """The models of the clusters of clients that were not in the round, [len(clients), …]."""
        models = {name: uploads.server_state[f"model/{name}"] for name in names}
        cluster = uploads.server_state["cluster"].cpu()[clients]
        return {name: tensor[cluster.to(tensor.device)] for name, tensor in models.items()}

    def offer(self, uploads: Uploads, client: int, names: list[str]) -> Offer | None:
        if client < len(uploads.server_state["cluster"]):
            return None
        models = {name: uploads.server_state[f"model/{name}"] for name in names}
        return Offer(list(range(len(models[names[0]]))), models)

    def merge(self, own: State, offered: State, losses: Tensor) -> tuple[State, Tensor | None]:
        best = int(losses[1:].argmin())
        return {name: tensor[best : best + 1] for name, tensor in offered.items()}, None
