"""FedFOMO: "Personalized Federated Learning with First Order Model Optimization" (Zhang, Sapra, Fidler, Yeung, Alvarez;
ICLR 2021).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastfact.federation.server.strategy import Offer, Strategy, Uploads, register
from fastfact.federation.state import State, flattened, generator_for
from fastfact.federation.tensors import TensorInfo


@register
@dataclass(kw_only=True)
class FedFOMO(Strategy):
    """FedFOMO, first-order model optimization (Algorithm 1): a client downloads some of the others' models, evaluates
    them on its own held-out samples, and moves towards those that do better than its own:
    θ_i ← θ_i + Σ_j w_ij (θ_j − θ_i), w_ij = max(0, (L_i(θ_i) − L_i(θ_j)) / ‖θ_j − θ_i‖), normalised to Σ_j w_ij = 1
    (all zero if nobody does better).

    models: M, how many are downloaded: the ones of the highest affinity P_i = Σ of all w_i so far, or with probability
    `epsilon` each a random one; ties (at first all) are random. Ten as in Factorized-FL's comparison ("10 as default"),
    whose 122.33 GB are six times FedAvg's, which are eleven models down and one up; all the others, if there are fewer.
    validation: the fraction of the training samples held out for L_i; they are never trained on.

    θ_i is the client's model of its last upload: the text's θ_i^{l−1}; its own new model is not another candidate. The
    distance is over the shared parameters. θ_j brings what is shared; to be evaluated it is completed by the client's
    own tensors. Batch-norm (not mentioned): learned part and statistics are shared and move likewise; counts stay.
    Every candidate is a message down; the weights w_i, with which the server keeps P, are one of M numbers up.
    """

    models: int = 10
    epsilon: float = 0.3
    validation: float = 0.2

    name: ClassVar[str] = "fedfomo"
    paper: ClassVar[str] = "Zhang et al., ICLR 2021"
    clients_mix: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        self._require("models", self.models >= 1, "must be an integer of at least 1")
        self._require("epsilon", 0 <= self.epsilon <= 1, "must be between 0 and 1")
        self._require("validation", 0 < self.validation < 1, "must be above 0 and below 1")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._measured = [name for name, info in infos.items() if self.shares(info) and not info.buffer]

    def server_state(self, state: State) -> State:
        k = len(next(iter(state.values())))
        return {"affinity": torch.zeros(k, k, dtype=torch.float64)}

    def offer(self, uploads: Uploads, client: int, names: list[str]) -> Offer | None:
        affinity = uploads.server_state["affinity"].cpu()
        known = client < len(affinity)
        places = self._candidates(affinity[client] if known else affinity.new_zeros(len(affinity)), client, uploads)
        if not places:
            return None
        return Offer([uploads.clients[p] for p in places], {name: uploads.state[name][places] for name in names})

    def merge(self, own: State, offered: State, losses: Tensor) -> tuple[State, Tensor | None]:
        weights = self._weights(losses, self._distances(own, offered))
        merged = dict(own)
        for name, mine in own.items():
            if mine.is_floating_point():
                step = weights.to(mine) @ flattened(offered[name] - mine)
                merged[name] = mine + step.reshape(mine.shape)
        return merged, weights

    def answered(self, answers: dict[int, tuple[list[int], Tensor]], server_state: State) -> None:
        affinity = server_state["affinity"].cpu().clone()
        for client, (sources, weights) in answers.items():
            if client < len(affinity):
                affinity[client, sources] += weights.to(affinity)
        server_state["affinity"] = affinity

    def _candidates(self, affinity: Tensor, client: int, uploads: Uploads) -> list[int]:
        """The places in `uploads` of the models the client downloads."""
        generator = generator_for(uploads.seed, uploads.round, client, "candidates")
        order = torch.randperm(len(uploads.clients), generator=generator).tolist()
        left = [place for place in order if uploads.clients[place] != client]
        left.sort(key=lambda place: -float(affinity[uploads.clients[place]]))
        chosen: list[int] = []
        while left and len(chosen) < self.models:
            explore = float(torch.rand((), generator=generator)) < self.epsilon
            at = int(torch.randint(len(left), (), generator=generator)) if explore else 0
            chosen.append(left.pop(at))
        return chosen

    def _distances(self, mine: State, others: State) -> Tensor:
        squares = [flattened(others[name] - mine[name]).double().square().sum(1) for name in self._measured]
        return torch.stack(squares).sum(0).sqrt().cpu()

    def _weights(self, losses: Tensor, distances: Tensor) -> Tensor:
        """losses [1 + n], the client's own first; distances [n] → weights [n]."""
        gains = torch.where(distances > 0, (losses[0] - losses[1:]) / distances, 0.0).clamp(min=0)
        return gains / gains.sum() if gains.sum() > 0 else gains
