"""What makes a federated method: a handful of answers, which the loop asks for in a fixed order."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fastfact.base import plugins
from fastfact.base.kinds import check_kinds
from fastfact.federation.client import batchnorm as statistics
from fastfact.federation.client.phase import Net, Phase
from fastfact.federation.client.train import Encoder
from fastfact.federation.server import mixing, robust
from fastfact.federation.server.privacy import Noise
from fastfact.federation.state import State, flattened
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.convert import factorize, factorized_layers
from fastfact.nn.sparsity import hard_threshold
from fastfact.nn.specs import Spec

EACH = ("clients", "samples", "losses", "norms")
"""What `Uploads` knows of each that reported in the round."""
AFTER_MIX = ("none", "support", "threshold")


@dataclass
class Uploads:
    """What the server has of the clients that reported in a round: m clients, everything stacked in this order.

    Without `state` it says who reported; their uploads are then what the clients themselves hold.
    """

    round: int
    clients: list[int]
    samples: list[int]
    losses: list[float]
    """Mean local training loss of each."""
    state: State = field(default_factory=dict)
    """Shared and key tensors as decoded from the wire, [m, …]."""
    keys: list[str] = field(default_factory=list)
    """The names of the key tensors."""
    server_state: State = field(default_factory=dict)
    """The server's own tensors, kept from round to round and in checkpoints; a strategy may change them."""
    norms: list[float] = field(default_factory=list)
    """How far the round moved the upload of each, where that is bounded."""
    started: list[int] = field(default_factory=list)
    """The round in which each downloaded what it trained; empty if that was this one."""
    waiting: list[list] = field(default_factory=list)
    """Where rounds are asynchronous, who is still at work: [client, when it arrives, the round it downloaded in,
    samples, loss]."""
    start: State = field(default_factory=dict)
    """Where rounds are asynchronous, and where the method `needs_start`, the shared floating-point tensors as each
    client had downloaded them; empty where all had what the method made."""
    left_out: list[int] = field(default_factory=list)
    """Who trained in the round, and keeps what it made, but is not mixed."""
    rule: str = "mean"
    hostile: float = 0.0
    """How the server mixes, see `robust.mix`."""
    noise: Noise | None = None
    """What everybody gets in place of a weighted mean, where it is to be differentially private."""
    seed: int = 0
    """The federation's, for random draws: see `state.generator_for`."""
    here: range = range(0)
    """The places in `clients` of those that this process serves (see `Group`); one process serves all."""

    @classmethod
    def joined(cls, parts: Sequence["Uploads"]) -> "Uploads":
        """Who reported in a round, from those of several processes about their clients."""
        return cls(parts[0].round, **{name: [one for part in parts for one in getattr(part, name)] for name in EACH})

    def without(self, clients: Container[int]) -> "Uploads":
        """Who reported, but for some."""
        kept = [place for place, client in enumerate(self.clients) if client not in clients]
        lists = {name: getattr(self, name) for name in EACH}
        left_out = [client for client in self.clients if client in clients]
        lists = {name: [one[place] for place in kept if one] for name, one in lists.items()}
        return Uploads(self.round, **lists, left_out=left_out)

    def report(self) -> dict[str, Any]:
        """Who reported, as JSON can hold it: `Uploads(**report)` is this without tensors."""
        known = {name: getattr(self, name) for name in ("round", "clients", "samples", "losses")}
        later = {name: getattr(self, name) for name in ("started", "waiting", "left_out")}
        return known | {name: value for name, value in later.items() if value}

    @property
    def staleness(self) -> list[int]:
        """How many steps the server made between each client's download and its report."""
        return [self.round - started for started in self.started] or [0] * len(self.clients)

    def key(self) -> Tensor:
        """What similarity is measured on: the key tensors of each client as one vector, [m, d]."""
        keys = [flattened(self.state[name]) for name in self.keys]
        return keys[0] if len(keys) == 1 else torch.cat(keys, dim=1)

    def mix(self, matrix: Tensor, names: Sequence[str], guests: "Uploads | None" = None) -> State:
        """Σ_i w[k, i] x_i of the named tensors, [k, …], or what the robust `rule` makes of these weights.

        matrix [k, m], row-stochastic. With k guests also [k, 1 + m], whose first column is the weight of what the guest
        has itself.
        """
        stacked = {name: self.state[name] for name in names}
        if self.noise is not None:
            released = self.noise.released(stacked)
            return {name: tensor.expand(len(matrix), *tensor.shape[1:]) for name, tensor in released.items()}
        if guests is None or matrix.shape[1] == len(self.clients):
            return robust.mix(matrix, stacked, self.rule, self.hostile)
        each = [
            robust.mix(
                matrix[k : k + 1],
                {name: torch.cat([guests.state[name][k : k + 1], tensor]) for name, tensor in stacked.items()},
                self.rule,
                self.hostile,
            )
            for k in range(len(matrix))
        ]
        return {name: torch.cat([mixed[name] for mixed in each]) for name in names}


class Offer(NamedTuple):
    """Several downloads for one client, which makes its own of them, see `Strategy.offer`."""

    sources: list[int]
    """Whose each is: numbers that the strategy knows them by."""
    tensors: State
    """The shared tensors, [len(sources), …], each a message."""


@dataclass(kw_only=True)
class Strategy:
    """Base of the methods; as it stands it is FedAvg (McMahan et al., 2017, Algorithm 1).

    A method answers: `spec` (the parameterization) · `shares` (which tensors are uploaded, mixed and downloaded) ·
    `compares`, `key` and `measure` (what similarity is measured on; uploaded, not downloaded unless shared) ·
    `phases` (local training) · `weights` (the mixing matrix) · `mix`, `first`, `channel_masks`, `pads`, `stacks`,
    `receive`, `extra`, `server_state` for methods whose mixing, download, client or server state is not the usual ·
    `offer`, `merge`, `answered` where clients mix.

    Guests are clients that download without having reported in the last round: they missed it, or are new.

    newcomers_upload: whether the mix for guests looks at what they have (only if there are keys): it then travels.
    trains_compact: whether its local training makes sense of a μ that is compact (see `Federation(sparsity=)`): not
        where it compares or mixes tensors of different supports.
    clients_mix: whether the clients mix, each by `merge` from what it is offered, and `mix` is not asked.
    needs_start: whether what it makes of uploads depends on what each client started from (`Uploads.start`), which the
        wire may have rounded and `after_mix` changed.
    trains_head: whether the classifier alone can train before its phases, as `head_first` has it: not where these
        minimise something else than the federation's loss of the model (a term beside it does not matter), leave the
        classifier as it is, or begin with something that is of the download.
    validation: the fraction of each client's training samples kept out of training, for the losses `merge` sees.
    classifies: whether its phases have losses of their own that are of class labels, in place of the federation's;
    other methods take their loss from `Net.loss`.
    letters: other names of settings, as {"mu": "prox"}: what its paper calls them.

    share_classifier: the last layer with a weight, and an embedding that is tied to it (off where labels differ between
    clients).
    share_norm, share_norm_statistics: learned scale and shift of normalisation layers (those of torch.nn, and what
    `tensors.is_norm` takes for one); their running statistics.
    l1: λ on μ; l1_method: "proximal" (soft threshold) or "subgradient" (see `ff.optim.ProxSGD`), or "evaluation", λ has
    no part in training, but where models are evaluated and their density counted, entries with |μ| < λ are zeros: what
    the official Factorized-FL code does, whose penalty has no gradient. The threshold of "proximal" is
    lr · λ / (1 − momentum) from the first step on, which is right once the momentum has built up. Where that starts
    anew in each round (optimizer_states="dropped"), λ weighs more in short ones: at momentum .9 3.8 times as much in a
    round of 5 local steps, 2.4 times in one of 10, 1.2 times in one of 50.
    after_mix: what happens to μ after a mix, which leaves the union of supports: "none"; "support", each client keeps
    only the positions of its own upload, a guest those of what it has; "threshold", entries with |μ| < l1 are set to
    zero.
    recalibrate: before each evaluation, batch-norm's running statistics are computed anew from the client's training
    samples, on the copy that is evaluated (see `statistics.recalibrate`). Where weights are mixed and the statistics
    stay with the client, they lag behind the mixed weights unless a round has some fifty local steps.
    head_first: so many of a round's local epochs, the first ones, train the classifier alone, before the method's own
    training in the others. For a classifier that stays with the client: what is downloaded below it is a mean of what
    several clients made to suit classifiers of their own, and the gradients through one that does not fit yet undo it
    (FedRep's order, Collins et al., 2021, but the classifier goes on learning with the rest). 0 in the papers, and for
    methods to which it cannot be done (`trains_head`).
    classifier: path of the classifier if it is not the last layer with a weight.
    skip: paths of layers that `spec` leaves as they are (shell wildcards, see `ff.factorize`).
    """

    name: ClassVar[str] = "strategy"
    paper: ClassVar[str] = ""
    newcomers_upload: ClassVar[bool] = True
    trains_compact: ClassVar[bool] = True
    clients_mix: ClassVar[bool] = False
    needs_start: ClassVar[bool] = False
    trains_head: ClassVar[bool] = True
    classifies: ClassVar[bool] = False
    letters: ClassVar[Mapping[str, str]] = {}
    validation = 0.0

    share_classifier: bool = True
    share_norm: bool = True
    share_norm_statistics: bool = True
    l1: float = 0.0
    l1_method: str = "proximal"
    after_mix: str = "none"
    recalibrate: bool = False
    head_first: int = 0
    classifier: str | None = None
    skip: Sequence[str] = field(default_factory=list)

    def __post_init__(self):
        check_kinds(self, self.name)
        self.check()

    def check(self) -> None:
        """Raise ValueError for a setting out of range; that all are of their types is known."""
        self._require("l1", self.l1 >= 0, "must not be negative")
        methods = "proximal", "subgradient", "evaluation"
        self._require("l1_method", self.l1_method in methods, f"must be one of {', '.join(methods)}")
        self._require("after_mix", self.after_mix in AFTER_MIX, f"must be one of {', '.join(AFTER_MIX)}")
        self._require("head_first", self.head_first >= 0, "must be an integer of at least 0")
        fits = self.trains_head or self.head_first == 0
        self._require("head_first", fits, "must be 0, nothing can train before the method's own phases")
        paths = isinstance(self.skip, list | tuple) and all(isinstance(path, str) for path in self.skip)
        self._require("skip", paths, "must be a list of paths")
        self.skip = list(self.skip)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{self.name}({name}={getattr(self, name)!r}): {rule}")

    @property
    def constant_mixing(self) -> bool:
        """Whether all download one weighted mean of the uploads, with weights that are known before anybody trains.

        The server of such a method needs no upload, only their sum: this is what secure aggregation can give it, and
        what noise can be added to. By default of a method that answers neither `weights` nor `mix`.
        """
        cls = type(self)
        plain = cls.weights is Strategy.weights and cls.mix is Strategy.mix and cls.key is Strategy.key
        plain &= cls.offer is Strategy.offer and not self.clients_mix
        return plain and self.after_mix != "support"

    def settings(self) -> dict[str, Any]:
        """The fields by name, as JSON can hold them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def spec(self) -> Spec | None:
        """The parameterization of every convolution and linear layer; None leaves the model as it is."""
        return None

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model each client trains. A model that has factorized layers already is left as the user built it."""
        spec = self.spec()
        if spec is None or factorized_layers(model):
            return model
        paths = [path for path, _ in model.named_modules()]
        missing = [pattern for pattern in self.skip if not any(fnmatchcase(path, pattern) for path in paths)]
        self._require("skip", not missing, f"{', '.join(missing)} is the path of no module of the model")
        return factorize(model, spec, skip=self.skip, init=getattr(self, "init", "random"))

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        """Raise ValueError if the method cannot work on a model of these tensors. Called once, before anything runs."""

    def allowed(self, info: TensorInfo) -> bool:
        """Whether the sharing policy (classifier, norm, statistics) lets `info` leave the client. A buffer that has no
        mean stays."""
        if not info.averages:
            return False
        if info.norm:
            return self.share_norm_statistics if info.statistic else self.share_norm
        return self.share_classifier or not info.classifier

    def shares(self, info: TensorInfo) -> bool:
        """Whether the tensor is uploaded, mixed and downloaded."""
        return self.allowed(info)

    def compares(self, info: TensorInfo) -> bool:
        """Whether the tensor is part of the key that similarity is measured on."""
        return False

    def key(self, state: State, encoder: Encoder) -> State:
        """What clients compute to be compared by, besides the tensors of `compares`: named tensors [k, …], uploaded.

        state [k, …]: the clients' tensors after their training, with `extra`; nothing else may decide the result, for
        it is computed again when the server needs it. Called once with the initial model to learn names and shapes.
        """
        return {}

    def measure(self, net: Net, x: Tensor) -> State:
        """What a client finds out about its training samples x [n, …], once, before its first download, with the
        initial model `net` in eval mode: named tensors without client axis, finite floating-point numbers.

        They are uploaded at once and never again, a part of the key, and stay with the client's state, where they are
        NaN until then. Called once with two samples of zeros to learn names and shapes. Raises ValueError for a model
        it cannot be done with.
        """
        return {}

    def channel_masks(self, direction: str, server_state: State) -> State:
        """name → bool [n]: which rows (of the first axis: output channels) of a shared tensor travel "up" or "down".

        The others stay as they are at the client. By default, and for tensors without an entry, all rows.
        """
        return {}

    def phases(self, epochs: int) -> list[Phase]:
        """The local training of one round, in order; `epochs` is the federation's setting.

        Raises ValueError for a number of epochs the method's settings do not fit.
        """
        return [Phase(epochs)]

    def active_phases(self, epochs: int, adapts: bool) -> list[Phase]:
        """The phases of local training, or those that adapt the copies that are evaluated."""
        self._require("head_first", self.head_first <= epochs, f"must be at most the {epochs} local epochs")
        some = [phase for phase in self.phases(epochs - self.head_first) if phase.adapts == adapts]
        if adapts:
            some += [Phase(0, update=self._without_small, adapts=True)] * (self.counted_from > 0)
            return some + [Phase(0, update=statistics.recalibrate, adapts=True)] * self.recalibrate
        return [Phase(self.head_first, trains=lambda info: info.classifier)] * (self.head_first > 0) + some

    @property
    def counted_from(self) -> float:
        """The magnitude below which an entry of μ is a zero for evaluation and density."""
        return self.l1 if self.l1_method == "evaluation" else 0.0

    def _without_small(self, net: Net, x: Tensor, y: Tensor) -> State:
        """μ of each layer without what counts as zeros: a `Phase.update`."""
        names = [f"{path}.mu".lstrip(".") for path in factorized_layers(net.model)]
        found = {name: net.params[name] for name in names if name in net.params}
        return {name: hard_threshold(mu, self.counted_from) for name, mu in found.items()}

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        """The row-stochastic mixing matrix [m, m] over the clients that reported.

        guests: n clients that did not, their present state (and key) in the form of an upload: their rows instead,
        [n, m], or [n, 1 + m] where what they have counts too, see `Uploads.mix`.
        """
        return mixing.fedavg_matrix(uploads.samples, rows=len((guests or uploads).clients))

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        """The download of each client that reported: the named (shared) tensors, [len(here), …] of the clients at
        `uploads.here` (or [m, …] of all); or of the guests, [n, …], before they train.

        Called once for each round that had reports, then with guests as they come; may put new tensors into
        `uploads.server_state`.
        """
        matrix = self.weights(uploads, guests)
        return uploads.mix(matrix[uploads.here.start : uploads.here.stop] if guests is None else matrix, names, guests)

    def offer(self, uploads: Uploads, client: int, names: list[str]) -> Offer | None:
        """What a client is sent to choose from, of the named (shared) tensors. Asked for all clients where
        `clients_mix`, and None sends nothing; elsewhere for guests, and None sends what `mix` says."""
        return None

    def merge(self, own: State, offered: State, losses: Tensor) -> tuple[State, Tensor | None]:
        """At the client: what it makes of its own shared tensors [1, …] and those offered [n, …], [1, …], and the
        numbers [any] it answers the server with, or None.

        losses: float64 [1 + n], of its own model and of those offered on its held-out samples; what is not shared is
        its own in each.
        """
        raise NotImplementedError(f"{self.name} offers models and must say how clients merge them")

    def answered(self, answers: dict[int, tuple[list[int], Tensor]], server_state: State) -> None:
        """What the server does with answers, client → the sources of its offer and what it says: it may put new tensors
        into `server_state`. Called with some clients of a round at a time, in any order."""

    def extra(self, state: State) -> State:
        """Tensors [k, …] a client keeps besides its model, from the initial states; names must not be the model's."""
        return {}

    def server_state(self, state: State) -> State:
        """What the server keeps (`Uploads.server_state`) at the start, from the K clients' initial states."""
        return {}

    def first(self, clients: Sequence[int], state: State) -> State:
        """What these clients download before there is anything to mix, of the shared tensors [k, …] in `state`, where
        it is not what all have in the initial model."""
        return {}

    def pads(self, info: TensorInfo) -> bool:
        """Whether many numbers of a shared tensor are zeros, which cost a bit each on the wire."""
        return False

    def stacks(self, info: TensorInfo) -> bool:
        """Whether a download brings several of a shared tensor, [k, n, …], of which `receive` makes what the client
        has."""
        return False

    def receive(self, state: State, mixed: State) -> State:
        """What a download does to the client states [k, …]: the tensors to overwrite, by name."""
        return mixed


STRATEGIES: dict[str, type[Strategy]] = {}


def register(cls: type[Strategy]) -> type[Strategy]:
    """Class decorator: make a method known by its `name`. Raises ValueError for a name that another module's has."""
    there = STRATEGIES.get(cls.name)
    if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"method={cls.name!r}: is the name of {there.__module__}.{there.__qualname__} already")
    STRATEGIES[cls.name] = cls
    return cls


def make(name: str, **settings) -> Strategy:
    """The method called `name` with its defaults, but for `settings`.

    Raises ValueError for an unknown name, an unknown setting or a setting out of range.
    """
    if name not in STRATEGIES:
        plugins.load()
    if name not in STRATEGIES:
        raise ValueError(f"method={name!r}: unknown, must be one of {', '.join(sorted(STRATEGIES))}")
    cls = STRATEGIES[name]
    # What `skip` was called in configurations of before, and what the method's paper calls its settings.
    names = {"whole": "skip", **cls.letters}
    settings = {names.get(setting, setting): value for setting, value in settings.items()}
    known = [f.name for f in fields(cls)]
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"{name}({setting}={settings[setting]!r}): unknown setting, must be one of {', '.join(known)}"
            )
    return cls(**settings)
