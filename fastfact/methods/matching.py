"""Similarity matching, as Factorized-FL and SimFed have it: a softmax over the clients that are similar enough."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastfact import ops
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, generator_for

MATCHING = ("best", "random", "worst")


@dataclass(kw_only=True)
class Matched(Strategy):
    """σ_ki is the cosine of the keys of clients k and i, σ_kk = 1; the mixing weights of k are the softmax of
    `scale` · σ_ki over the clients with σ_ki ≥ τ.

    tau in [−1, 1]. matching: "best" is this rule; "random" and "worst" are the ablations: each round `matches` other
    clients, drawn anew or those with the least σ_ki, in place of the matched ones. The papers do not say how these are
    weighted. Here they and the client itself count alike: exp(scale · σ) would give the dissimilar next to nothing, and
    the ablation would be one of not aggregating.

    max_weight: a bound on the weight of any one client in the mix of another; what is beyond stays with the client's
    own. A client that knows how to be similar to all (the keys are its own word) can move nobody further than that.

    sketch: m > 0 compares sketches of m int8 numbers (`ops.srht`) in place of the keys: σ_ki then has an rms error of
    (1 − σ_ki²) / √m. A key that is uploaded for nothing else is sketched at the client, and m bytes travel in its
    place; the server sketches what it has anyway.

    Where τ = −1 and the scale is 0 all clients count alike: no key is uploaded.

    A client that missed the last round is matched with those that were in it by the key it has (the algorithms match
    within F^(r), for which the server would have to keep every client's last upload).
    """

    tau: float = 0.0
    matching: str = "best"
    matches: int = 3
    sketch: int = 0
    max_weight: float = 1.0

    @property
    def scale(self) -> float:
        """The factor on σ in the softmax."""
        raise NotImplementedError

    @property
    def least(self) -> int:
        """How many clients are matched at least, the client itself counted."""
        return 1

    @property
    def constant_mixing(self) -> bool:
        """Where all match all and count alike, whatever their keys."""
        alike = self.matching == "best" and self.scale == 0 and self.tau == -1 and self.max_weight == 1
        return alike and self.after_mix != "support"

    def check(self) -> None:
        super().check()
        self._require("tau", -1 <= self.tau <= 1, "must be between -1 and 1")
        self._require("matching", self.matching in MATCHING, f"must be one of {', '.join(MATCHING)}")
        self._require("matches", self.matches >= 1, "must be an integer of at least 1")
        self._require("max_weight", 0 < self.max_weight <= 1, "must be above 0 and at most 1")
        self._require("sketch", self.sketch >= 0, "must be an integer of at least 0 (0: no sketch)")

    def matrix(self, similarity: Tensor, clients: list[int], uploads: Uploads) -> Tensor:
        """The mixing weights [k, m] of `clients`, which are also the first k columns of `similarity`."""
        if self.matching == "best":
            weights = mixing.softmax_matrix(similarity, self.scale, self.tau, self.least)
        else:
            draws = [generator_for(uploads.seed, uploads.round, k, "matching") for k in clients]
            chosen = mixing.choose(similarity, self.matching, self.matches, draws).double()
            weights = chosen / chosen.sum(1, keepdim=True)
        if self.max_weight < 1:
            weights = weights.clamp(max=self.max_weight)
            weights.diagonal().add_(1 - weights.sum(1))
        return weights

    def sketched(self, key: Tensor) -> Tensor:
        """What stands for keys [k, d]: their sketches int8 [k, m]; the keys themselves if sketches are not asked for or
        they are sketches already. Raises ValueError for a sketch that is no shorter than the key.
        """
        if not self.sketch or key.dtype == torch.int8:
            return key
        if self.sketch >= key.shape[1]:
            raise ValueError(f"{self.name}(sketch={self.sketch}): the key has {key.shape[1]} numbers, must be fewer")
        # One transform for all clients and rounds, known to everybody: its seed need not travel.
        return ops.srht(key, self.sketch)[0]

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        if self.constant_mixing:
            return mixing.fedavg_matrix([1] * len(uploads.clients), rows=len((guests or uploads).clients))
        if guests is None:
            return self.matrix(mixing.cosine(self.sketched(uploads.key())), uploads.clients, uploads)
        keys, own = self.sketched(uploads.key()), self.sketched(guests.key())
        # The guest itself first, as `matrix` wants it, then the clients of the last round.
        each = (mixing.cosine(key[None], torch.cat([key[None], keys])) for key in own)
        return torch.cat([self.matrix(row, [k], uploads) for row, k in zip(each, guests.clients, strict=True)])

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        if self.constant_mixing or self.matching != "best" or uploads.rule != "mean" or self.max_weight < 1:
            return super().mix(uploads, names, guests)
        keys, stacked = uploads.key(), {name: uploads.state[name] for name in names}
        valid, rows = None, uploads.here
        if guests is not None:
            # They are matched with the clients of the last round, and by nobody.
            n, m = len(guests.clients), len(keys)
            keys, rows = torch.cat([guests.key(), keys]), range(n)
            stacked = {name: torch.cat([guests.state[name], tensor]) for name, tensor in stacked.items()}
            valid = torch.arange(n + m, device=keys.device) >= n
        return mixing.similarity_mix(self.sketched(keys), stacked, self.scale, self.tau, self.least, valid, rows)
