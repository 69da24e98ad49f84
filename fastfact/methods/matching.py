"""Similarity matching, as Factorized-FL and SimFed have it: a softmax over the clients that are similar enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastfact import ops
from fastfact.federation.client import batchnorm as statistics
from fastfact.federation.client.phase import Net
from fastfact.federation.client.train import Encoder
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, flattened, generator_for
from fastfact.federation.tensors import TensorInfo

MATCHING = ("best", "random", "worst")
MOMENTS = "initial-statistics"
MATCH_ON = ("v", "encoding", "inputs", MOMENTS)
GROUPED = ("inputs", MOMENTS)
"""The keys by which clients form groups."""
SKETCH, KEY = "sketch", "encoding"


@dataclass(kw_only=True)
class Matched(Strategy):
    """σ_ki is the cosine of the keys of clients k and i, σ_kk = 1; the mixing weights of k are the softmax of
    `scale` · σ_ki over the clients with σ_ki ≥ τ.

    match_on: what clients are compared by.
    "v": v of layer L − 1 (Factorized-FL, eq. 4). Needs a factorized model.
    "encoding": what the classifier gets to see of `inputs` constant inputs x ~ N(0, I) (SimFed, eq. 2), their encodings
    end to end; of tokens, of which there is no Gaussian, they are drawn evenly from the vocabulary.
    "inputs": mean and standard deviation of each channel before the first batch-norm, as its running statistics have
    them. The package's own, no paper has it: clients form groups by them (`mixing.groups`), and a group downloads its
    FedAvg; τ and `scale` play no part. All of a group download the same: weighted by their own distances the clients
    of a group drift apart, and the right neighbours do not help (docs/claims.md). No threshold is fit to the data. The
    key sees what images look like and nothing of the labels, and is 2 C numbers (16 to 128 for usual networks) on the
    wire, which tell brightness and contrast of a client's images as the first layer sees them. Too short for a sketch;
    K² numbers at the server.
    "initial-statistics": mean and standard deviation of each channel that every normalisation layer of the *initial*
    network gets to see of a client's training samples (`statistics.moments`). All clients start from that network, so
    that nothing but their data tells these apart; groups and downloads are as with "inputs". Each client runs its
    samples through it once, before its first download, and uploads 2 Σ C numbers then (a few hundred to a few thousand)
    and never again; the server keeps them (`Uploads.server_state`), so that groups are of all clients that ever took
    part, and one that comes late or after training (`Federation.join`) downloads its group's FedAvg at once. No labels
    are used, but what the samples of a client are does show: these are averages of random features, from which one can
    tell which data it is like, how similar two clients are, and of few samples roughly their mean. The package's own.

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

    match_on: str = "v"
    tau: float = 0.0
    matching: str = "best"
    matches: int = 3
    sketch: int = 0
    max_weight: float = 1.0

    inputs: ClassVar[int] = 1
    sketches_at_client: ClassVar[bool] = False
    """Whether a sketch takes the place of v on the wire; not where v is shared and travels anyway."""

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
        alike = (
            self.matching == "best"
            and self.match_on not in GROUPED
            and self.scale == 0
            and self.tau == -1
            and self.max_weight == 1
        )
        return alike and self.after_mix != "support"

    def check(self) -> None:
        super().check()
        self._require("match_on", self.match_on in MATCH_ON, f"must be one of {', '.join(MATCH_ON)}")
        self._require("tau", -1 <= self.tau <= 1, "must be between -1 and 1")
        self._require("matching", self.matching in MATCHING, f"must be one of {', '.join(MATCHING)}")
        self._require("matches", self.matches >= 1, "must be an integer of at least 1")
        self._require("max_weight", 0 < self.max_weight <= 1, "must be above 0 and at most 1")
        self._require("sketch", self.sketch >= 0, "must be an integer of at least 0 (0: no sketch)")
        grouped = self.match_on in GROUPED
        self._require("sketch", not (self.sketch and grouped), f"must be 0 with match_on={self.match_on!r}")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        by, self._keys = self.match_on, list[str]()
        if by == MOMENTS:
            return
        if by == "encoding":
            if not any(info.layers for info in infos.values()):
                raise ValueError(f"{self.name}: the model has no layer with a weight that could be its classifier")
            return
        if by == "inputs":
            means = [name for name, info in infos.items() if info.statistic and info.role == "running_mean"]
            self._require("match_on", bool(means), "the model has no normalisation layer with running statistics")
            self._keys = [means[0], means[0].removesuffix("mean") + "var"]
            return
        keys = [info for info in infos.values() if info.role == "v" and info.layer == info.layers - 1 and not info.norm]
        self._keys = [info.name for info in keys]
        if not keys:
            layers = max((info.layers for info in infos.values()), default=0)
            raise ValueError(
                f"{self.name}: the layer before the classifier (layer {layers - 1} of {layers}) has no v;"
                " it must be a factorized convolution or linear layer"
            )
        numbers = sum(info.numel for info in keys)
        self._require("sketch", self.sketch < numbers, f"v of layer L − 1 has {numbers} numbers, must be fewer")

    @property
    def _sketches_v(self) -> bool:
        return self.match_on == "v" and bool(self.sketch) and self.sketches_at_client

    def compares(self, info: TensorInfo) -> bool:
        return not self._sketches_v and not self.constant_mixing and info.name in self._keys

    def key(self, state: State, encoder: Encoder) -> State:
        if self.constant_mixing:
            return {}
        if self.match_on == "encoding":
            return {KEY: self.sketched(encoder(state, self._criteria(encoder)).flatten(1))}
        if self._sketches_v:
            return {SKETCH: self.sketched(torch.cat([flattened(state[name]) for name in self._keys], dim=1))}
        return {}

    def measure(self, net: Net, x: Tensor) -> State:
        if self.match_on != MOMENTS:
            return {}
        found = statistics.moments(net, x)
        allowed = "must be v or encoding for a model without a normalisation layer of torch.nn"
        self._require("match_on", found.numel() > 0, allowed)
        return {MOMENTS: found}

    def server_state(self, state: State) -> State:
        known = super().server_state(state)
        return known | {MOMENTS: state[MOMENTS].clone()} if self.match_on == MOMENTS else known

    def _criteria(self, encoder: Encoder) -> Tensor:
        """The inputs [n, …] that encodings are of, the same for all clients and rounds."""
        draw, shape = generator_for(0, 0, -1, "criteria"), (self.inputs, *encoder.shape)
        if encoder.dtype.is_floating_point:
            x = torch.randn(shape, generator=draw, dtype=torch.float64)
        elif encoder.vocabulary is not None:
            x = torch.randint(encoder.vocabulary, shape, generator=draw)
        else:
            raise ValueError(
                f"{self.name}: x is {encoder.dtype} and the model has no embedding; there is no criteria input for it"
            )
        return x.to(encoder.device, encoder.dtype)

    def similarity(self, keys: Tensor, first: int | None = None) -> Tensor:
        """σ of the clients with these keys [m, d], float64 [m, m]; a cosine of the first ones only, [first, m]."""
        if self.match_on == MOMENTS:
            return mixing.proximity(keys)
        if self.match_on == "inputs":
            mean, variance = keys.chunk(2, dim=1)
            return mixing.proximity(torch.cat([mean, variance.clamp(min=0).sqrt()], dim=1))
        keys = self.sketched(keys)
        return mixing.cosine(keys[:first], None if first is None else keys)

    def matrix(self, similarity: Tensor, clients: list[int], samples: list[int], uploads: Uploads) -> Tensor:
        """The mixing weights [k, m] of `clients`, which are also the first k columns of `similarity` [k or m, m];
        samples: of all m."""
        if self.matching == "best" and self.match_on in GROUPED:
            group = mixing.groups(similarity)
            weights = (group[: len(clients), None] == group) * torch.tensor(samples, dtype=torch.float64)
            weights = (weights / weights.sum(1, keepdim=True)).to(similarity.device)
        elif self.matching == "best":
            weights = mixing.softmax_matrix(similarity, self.scale, self.tau, self.least)
        else:
            draws = [generator_for(uploads.seed, uploads.round, k, "matching") for k in clients]
            chosen = mixing.choose(similarity[: len(clients)], self.matching, self.matches, draws).double()
            weights = chosen / chosen.sum(1, keepdim=True)
        return self._bounded(weights)

    def _bounded(self, weights: Tensor) -> Tensor:
        """No more than `max_weight` of another; column k is client k's own."""
        if self.max_weight < 1:
            weights = weights.clamp(max=self.max_weight)
            weights.diagonal().add_(1 - weights.sum(1))
        return weights

    def _by_groups(self, uploads: Uploads, guests: Uploads | None) -> Tensor:
        """The mixing weights by groups of all clients whose moments are known. Of a guest its own model, which may be
        of long ago or the initial one, has a weight where nobody of its group has reported."""
        known, clients = uploads.server_state[MOMENTS].clone(), torch.tensor(uploads.clients)
        known[clients] = uploads.state[MOMENTS]
        samples = torch.tensor(uploads.samples, dtype=torch.float64)
        if guests is None:
            uploads.server_state[MOMENTS] = known
            group = _groups(known)[clients]
            weights = (group[:, None] == group) * samples
            return self._bounded(weights / weights.sum(1, keepdim=True)).to(known.device)
        rows, group = [], _groups(known)
        for client, own in zip(guests.clients, guests.state[MOMENTS], strict=True):
            if client < len(known) and not known[client].isnan().any():
                weights = (group[clients] == group[client]) * samples
            else:
                with_it = _groups(torch.cat([known, own[None]]))
                weights = (with_it[clients] == with_it[-1]) * samples
            alone = torch.tensor([0.0 if weights.any() else 1.0], dtype=torch.float64)
            weights = torch.cat([alone, weights])[None]
            rows.append(self._bounded(weights / weights.sum()))
        return torch.cat(rows).to(known.device)

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
        if self.match_on == MOMENTS and self.matching == "best":
            return self._by_groups(uploads, guests)
        keys, samples = uploads.key(), uploads.samples
        if guests is None:
            return self.matrix(self.similarity(keys), uploads.clients, samples, uploads)
        # The guest itself first, as `matrix` wants it, then the clients of the last round.
        rows = []
        for key, k, own in zip(guests.key(), guests.clients, guests.samples, strict=True):
            similarity = self.similarity(torch.cat([key[None], keys]), 1)
            rows.append(self.matrix(similarity, [k], [own, *samples], uploads))
        return torch.cat(rows)

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        streams = self.matching == "best" and self.match_on not in GROUPED and self.max_weight == 1
        if self.constant_mixing or uploads.rule != "mean" or not streams:
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


def _groups(known: Tensor) -> Tensor:
    """Which group each client is in, int64 [K], by its moments [K, 2, C]; clients of NaN, not known, are alone."""
    there = ~known.flatten(1).isnan().any(1).cpu()
    group = -1 - torch.arange(len(known))
    group[there] = mixing.groups(mixing.proximity(known[there.to(known.device)].flatten(1)))
    return group


@dataclass(kw_only=True)
class MatchedByEpsilon(Matched):
    """As Factorized-FL sets it: the scale is ε ≥ 0; min_matches ≥ 1: at least so many clients are mixed, the most
    similar ones (k counts)."""

    epsilon: float = 1.0
    min_matches: int = 1

    @property
    def scale(self) -> float:
        return self.epsilon

    @property
    def least(self) -> int:
        return self.min_matches

    def check(self) -> None:
        super().check()
        self._require("epsilon", 0 <= self.epsilon < float("inf"), "must be a number of at least 0")
        self._require("min_matches", self.min_matches >= 1, "must be at least 1")
