"""What crosses between clients and server in a round, and the server's step: uploads are mixed into downloads."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.base.settings import bound_of
from fastfact.federation.client.train import Encoder
from fastfact.federation.server import robust
from fastfact.federation.server.privacy import Noise
from fastfact.federation.server.processes import Shard
from fastfact.federation.server.strategy import Offer, Strategy, Uploads
from fastfact.federation.state import State, flattened, index_of
from fastfact.federation.tensors import TensorInfo, largest
from fastfact.federation.wire.format import Sizes, Wire
from fastfact.federation.wire.ledger import Ledger
from fastfact.nn.sparsity import hard_threshold


class Exchange:
    """What a method sends of a model's tensors, up and down. Both sides have one, made from the same arguments.

    shared: the names that are uploaded, mixed and downloaded. keys: those that similarity is measured on; `measured`
    are the ones among them that are computed (`Strategy.key`), `once` those that a client measures and uploads before
    its first round (`Strategy.measure`). uploaded: all else that goes up. sparse: the μ. initial: the state of one
    client at the start [1, …].
    """

    def __init__(
        self,
        method: Strategy,
        infos: dict[str, TensorInfo],
        sparse: list[str],
        initial: State,
        encoder: Encoder,
        values: str,
        seed: int,
        rule: str = "mean",
        hostile: float = 0.0,
        clip: float | str | None = None,
        max_norm: float | str | None = None,
        noise: float = 0.0,
        buffer: int = 0,
        once: Sequence[str] = (),
    ):
        self.method, self.infos, self.sparse, self.encoder, self.seed = method, infos, sparse, encoder, seed
        self.rule, self.hostile, self.clip, self.max_norm, self.noise = rule, hostile, clip, max_norm, noise
        self.gives_start = gives_start(method, values, buffer)
        """Whether the server mixes by what clients started from."""
        self.keeps_start = clip is not None or self.gives_start
        """Whether clients' states have, as START and the name, what they started their last round from."""
        self.expected = 0
        """How many clients take part in a round."""
        self.bounded = [] if not self.keeps_start and max_norm is None else bounded(method, infos)
        """The tensors of which it counts how far a round moves them."""
        self.device = encoder.device
        self.shared = [name for name, info in infos.items() if method.shares(info)]
        self.stacks = any(method.stacks(infos[name]) for name in self.shared)
        """Whether downloads have several of a shared tensor."""
        self.keys = [name for name, info in infos.items() if method.compares(info)]
        self.uploaded = [name for name in infos if name in {*self.shared, *self.keys}]
        # What is uploaded besides tensors of the model is known once the shape of a sample is.
        keys = method.key(initial, encoder)
        self.measured = {
            name: TensorInfo(name, tuple(key.shape[1:]), key.dtype, role=name, layer=0, layers=0)
            for name, key in keys.items()
        }
        if clash := sorted({*self.measured, *once} & set(infos)):
            raise ValueError(f"{method.name}: key {clash[0]} has the name of a tensor of the model")
        self.once = {
            name: TensorInfo(name, tuple(initial[name].shape[1:]), initial[name].dtype, role=name, layer=0, layers=0)
            for name in once
        }
        self.initial = initial
        self.keys += [*self.measured, *self.once]
        self.uploaded += self.measured
        padded = [name for name in self.shared if method.pads(infos[name])]
        self.wire = Wire(infos | self.measured | self.once, values, [*sparse, *padded])

    def channel_masks(self, direction: str, server_state: State) -> State:
        """`Strategy.channel_masks` on the model's device."""
        masks = self.method.channel_masks(direction, server_state)
        return {name: mask.to(self.device) for name, mask in masks.items()}

    def measure(
        self, round: int, clients: Sequence[int], work: State, ledger: Ledger, samples: Callable[[int], Tensor]
    ) -> None:
        """Those of the clients, whose states are `work` [len(clients), …], that come for the first time measure what
        `Strategy.measure` asks of their `samples` and upload it, before they download."""
        new = self.unmeasured(work)
        for row in new:
            for name, tensor in self.measurement(samples(clients[row])).items():
                work[name][row] = tensor
        if new:
            sizes = self.wire.roundtrip({name: work[name][new] for name in self.once}, list(self.once))[1]
            ledger.add(round, "up", [clients[row] for row in new], sizes)

    def measurement(self, x: Tensor) -> State:
        """What a client measures of its samples x [n, …], without client axis."""
        return self.encoder.trainer.found(self.initial, x, self.method.measure)

    def unmeasured(self, state: State) -> list[int]:
        """The rows of `state` whose clients have not measured yet."""
        missing = [flattened(state[name]).isnan().any(1) for name in self.once]
        return torch.stack(missing).any(0).nonzero().flatten().tolist() if missing else []

    def keyed(self, state: State) -> State:
        """The clients' tensors [k, …] and the keys computed from them."""
        if self.measured and not len(next(iter(state.values()))):
            return state | {
                name: torch.empty(0, *info.shape, dtype=info.dtype, device=self.device)
                for name, info in self.measured.items()
            }
        return state | self.method.key(state, self.encoder) if self.measured else state

    def uploads(
        self, reported: Uploads, sent: State, start: State | None, server_state: State, shard: Shard
    ) -> Uploads:
        """What the server has of a round. sent: what came of the clients in `shard`; start: what they started the round
        from, where that is kept."""
        if self.clip is not None:
            # In one order, wherever `start` comes from: of sums it decides the last bits.
            start = {name: start[name] for name in self.bounded}
            norms = robust.norms(sent, start)
            of_all = shard.stacked({"norm": norms}, reported.clients)["norm"].tolist()
            sent = robust.clipped(sent, start, norms, bound_of(self.clip, of_all))
        sent, noise = shard.stacked(sent, reported.clients), None
        if self.noise or self.gives_start:
            start = shard.stacked(start, reported.clients)
        if self.noise:
            # All had the same download: of which client it is read does not matter.
            first = {name: tensor[:1] for name, tensor in start.items()}
            deviation = self.noise * bound_of(self.clip, []) / self.expected
            noise = Noise(deviation, self.expected, first, self.seed, reported.round)
        return Uploads(
            **reported.report(),
            state=sent,
            keys=self.keys,
            server_state=server_state,
            # As it was sent: the initial model, which clients have as it is, too.
            start=self.wire.roundtrip(start, self.bounded)[0] if self.gives_start else {},
            rule=self.rule,
            hostile=self.hostile,
            noise=noise,
            seed=self.seed,
            here=shard.places(reported.clients),
        )

    def first_download(self, round: int, clients: list[int], work: State, ledger: Ledger) -> None:
        """Everybody has the initial model, or what `Strategy.first` makes of it, as if sent: the papers count this
        download too."""
        for name, tensor in self.method.first(clients, work).items():
            work[name].copy_(tensor)
        ledger.add(round, "down", clients, self.wire.roundtrip(work, self.shared)[1])

    def sent(self, state: State) -> tuple[State, Sizes]:
        """What the server has of the clients' states [k, …], if they upload all of it, and the sizes of that without
        what is uploaded once."""
        sent, sizes = self.wire.roundtrip(self.keyed(state), self.uploaded)
        return sent | self.wire.roundtrip(state, list(self.once))[0], sizes

    def receive(self, download: "Download", work: State, loss: "Loss") -> Tensor | None:
        """Put a download into its rows of `work` [k, …] where the strategy says, in place. Returns what the client
        answers to an offer."""
        if download.sources is not None:
            return self._merge(download, work, loss)
        rows, arrived = download.rows, dict(download.tensors)
        everybody = rows == list(range(len(next(iter(work.values())))))
        state = work if everybody else {name: tensor[rows] for name, tensor in work.items()}
        for name, mask in download.masks.items():
            arrived[name] = torch.where(mask.view(-1, *[1] * (arrived[name].dim() - 2)), arrived[name], state[name])
        for name, tensor in self.method.receive(state, arrived).items():
            if everybody:
                work[name].copy_(tensor)
            else:
                work[name][rows] = tensor
        return None

    def _merge(self, download: "Download", work: State, loss: "Loss") -> Tensor | None:
        (row,), offered = download.rows, download.tensors
        held = {name: tensor[row : row + 1] for name, tensor in work.items()}
        own, n = {name: held[name] for name in offered}, 1 + len(download.sources)
        models = {name: held[name].expand(n, *held[name].shape[1:]) for name in self.infos}
        models |= {name: torch.cat([own[name], tensor]) for name, tensor in offered.items()}
        merged, answer = self.method.merge(own, offered, loss(row, models))
        for name, tensor in merged.items():
            work[name][row] = tensor[0]
        return answer

    def unusable(
        self, clients: list[int], sent: State, norms: list[float] | None, known: Mapping[int, str]
    ) -> dict[int, str]:
        """client → why what the server sees of it is left out: keys, or how far it moved. Not those `known`."""
        reasons = {
            k: f"{name} has NaN or inf"
            for name in self.measured
            for k, finite in zip(clients, flattened(sent[name]).isfinite().all(1).tolist(), strict=True)
            if k not in known and not finite
        }
        if norms is None or self.max_norm is None or is_relative(self.max_norm):
            return reasons
        return reasons | too_far(dict(zip(clients, norms, strict=True)), self.max_norm, known)


START = "start/"
"""Before the name of a shared tensor: what it was at the start of the client's last round."""


def gives_start(method: Strategy, wire: str, buffer: int) -> bool:
    """Whether what clients started from is part of what is mixed: where they had it at different times, or the method
    needs it and it is not what the server has."""
    return buffer > 0 or (method.needs_start and (wire != "exact" or method.after_mix != "none"))


def bounded(method: Strategy, infos: Mapping[str, TensorInfo]) -> list[str]:
    """The shared tensors whose changes have a norm."""
    return [name for name, info in infos.items() if method.shares(info) and info.dtype.is_floating_point]


def is_relative(limit: float | str) -> bool:
    """Whether `max_norm` is a multiple of the round's median."""
    return isinstance(limit, str) and limit.endswith("x")


def too_far(norms: Mapping[int, float], limit: float | str, known: Mapping[int, str] = MappingProxyType({})):
    """client → why it is left out, of those whose norm is beyond `limit`; those `known` do not count."""
    norms = {k: norm for k, norm in norms.items() if k not in known}
    bound = bound_of(limit, list(norms.values()))
    return {
        k: f"the round changed its upload by {norm:.6g} (Euclidean norm), above max_norm={limit}"
        for k, norm in norms.items()
        if not norm <= bound
    }


class Download(NamedTuple):
    """What is sent down to some clients."""

    rows: list[int]
    """Their rows in the states [k, …] of those that download together."""
    tensors: State
    """The shared tensors, [len(rows), …]."""
    masks: State
    """name → bool: the channels of a tensor that travel; the others stay as they are at the client."""
    sources: list[int] | None = None
    """Of an offer to one client (see `Strategy.offer`): whose each of `tensors` [len(sources), …] is."""


Loss = Callable[[int, State], Tensor]
"""loss(row, state [n, …]) → the mean loss of n models on the held-out samples of that row's client, float64 [n]."""


class ClientRound(NamedTuple):
    """What a round gives of k clients, besides their new states."""

    sent: State
    """What they upload as it arrives at the server, by name, [k, …]."""
    sizes: Sizes
    losses: list[float]
    """The mean loss of each over its local steps."""
    seconds: list[float]
    before: list[dict[str, float | None]] | None
    """What `evaluate` says after the download."""
    broken: dict[int, str]
    """client → which of its tensors has NaN or inf."""
    norms: list[float] | None
    """How far the round moved what each uploads, where that is bounded."""
    answers: dict[int, tuple[list[int], Tensor]]
    """client → what it was offered, and what it answers, see `Strategy.answered`."""


def client_round(
    exchange: Exchange,
    clients: list[int],
    state: State,
    downloads: Iterable[Download],
    masks: State,
    train: Callable[[State], tuple[list[float], list[float]]],
    loss: Loss,
    evaluate: Callable[[State], list[dict[str, float | None]]] | None = None,
) -> ClientRound:
    """The clients' step: `state` [k, …] takes the downloads, trains, all in place, and is uploaded.

    masks: the channels that travel up, see `Strategy.channel_masks`. train(state) → loss and seconds of each client.
    """
    answers = {}
    for download in downloads:
        answer = exchange.receive(download, state, loss)
        if answer is not None:
            answers[clients[download.rows[0]]] = (download.sources, answer)
    before = None if evaluate is None else evaluate(state)
    start = {name: state[name].clone() for name in exchange.bounded}
    for name, tensor in start.items() if exchange.keeps_start else ():
        state[START + name].copy_(tensor)
    losses, seconds = train(state)
    # What stays with the client may hold what it will, as a mask of −∞ does.
    kept = {name for name, info in exchange.infos.items() if not info.averages}
    checked = {name: tensor for name, tensor in state.items() if name.rpartition("/")[2] not in kept}
    broken = not_finite(clients, checked)
    sent, sizes = exchange.wire.roundtrip(exchange.keyed(state), exchange.uploaded, masks)
    norms = robust.norms(sent, start).tolist() if start else None
    return ClientRound(sent, sizes, losses, seconds, before, broken, norms, answers)


def server_round(
    exchange: Exchange,
    uploads: Uploads,
    round: int,
    ledger: Ledger,
    samples: Callable[[int], int],
) -> "Downloads":
    """The server's step: the uploads of the last round, mixed once into the downloads of this one.

    samples(client) → how many it trains on. The bytes of what is sent go into `ledger`. `uploads.server_state` has what
    the server keeps.
    """
    return Downloads(exchange, uploads, round, ledger, samples)


class Downloads:
    """What `server_round` makes: the downloads of one round, for some clients at a time."""

    def __init__(self, exchange: Exchange, uploads: Uploads, round: int, ledger: Ledger, samples: Callable[[int], int]):
        self.exchange, self.uploads, self.round, self.ledger, self.samples = exchange, uploads, round, ledger, samples
        self.places = {client: place for place, client in enumerate(uploads.clients)}
        self.mixed = {} if exchange.method.clients_mix else self._mix()

    def _mix(self) -> State:
        """The downloads of the clients at `uploads.here`."""
        uploads, method = self.uploads, self.exchange.method
        some = slice(uploads.here.start, uploads.here.stop)
        mixed = {
            name: tensor if len(tensor) == len(uploads.here) else tensor[some]
            for name, tensor in method.mix(uploads, self.exchange.shared).items()
        }
        return self._after_mix(mixed, {name: uploads.state[name][some] for name in mixed if name in uploads.state})

    def _after_mix(self, mixed: State, held: State) -> State:
        """`mixed` [k, …] with μ as `Strategy.after_mix` wants it; held: what the server has of those k clients."""
        method, made = self.exchange.method, dict(mixed)
        for name in self.exchange.sparse:
            if name in mixed and method.after_mix == "support":
                made[name] = mixed[name] * (held[name] != 0)
            elif name in mixed and method.after_mix == "threshold":
                made[name] = hard_threshold(mixed[name], method.l1)
        return made

    @property
    def masks(self) -> State:
        """Which channels of a tensor travel down."""
        return self.exchange.channel_masks("down", self.uploads.server_state)

    def overwritten(self, clients: Sequence[int]) -> list[str]:
        """The tensors that a download replaces for all of the clients, whatever they hold."""
        if type(self.exchange.method).receive is not Strategy.receive or any(k not in self.places for k in clients):
            return []
        return [name for name in self.mixed if name not in self.masks]

    def of(self, clients: Sequence[int], held: Callable[[list[int]], tuple[State, Sizes]]) -> Iterator[Download]:
        """What arrives at some of the clients: those that reported, then guests.

        held(rows) → what the server is sent of those of `clients` that are guests, see `Exchange.sent`.
        """
        uploads, left = self.uploads, []
        for row, client in enumerate(clients):
            offer = None
            if self.exchange.method.clients_mix or client not in self.places:
                offer = self.exchange.method.offer(uploads, client, self.exchange.shared)
            if offer is not None:
                yield self._offered(row, client, offer)
            elif not self.exchange.method.clients_mix:
                left.append(row)
        yield from self._mixed(clients, left, held)

    def _offered(self, row: int, client: int, offer: Offer) -> Download:
        received, sizes = self.exchange.wire.roundtrip(offer.tensors, self.exchange.shared)
        self.ledger.add(self.round, "down", [client] * len(offer.sources), sizes)
        return Download([row], received, {}, offer.sources)

    def _mixed(self, clients: Sequence[int], left: list[int], held) -> Iterator[Download]:
        """What arrives at those of the clients that are `left`, rows."""
        uploads = self.uploads
        rows = [row for row in left if clients[row] in self.places]
        places = [self.places[clients[row]] for row in rows]
        everybody = places == list(uploads.here)
        at = [place - uploads.here.start for place in places]
        mixed = self.mixed if everybody else {name: tensor[index_of(at)] for name, tensor in self.mixed.items()}
        if rows:
            yield Download(rows, self._sent([clients[row] for row in rows], mixed), self.masks)
        rows = [row for row in left if clients[row] not in self.places]
        # Stacks are as long as what a guest missed: one by one, so that nobody's has the length of another's.
        for some in [[row] for row in rows] if self.exchange.stacks else [rows] if rows else []:
            yield Download(some, self._for_guests([clients[row] for row in some], *held(some)), self.masks)

    def _for_guests(self, clients: list[int], sent: State, sizes: Sizes) -> State:
        exchange, uploads = self.exchange, self.uploads
        guests = Uploads(
            self.round,
            clients,
            [self.samples(client) for client in clients],
            [math.nan] * len(clients),
            sent,
            exchange.keys,
            uploads.server_state,
            seed=exchange.seed,
        )
        mixed = exchange.method.mix(uploads, exchange.shared, guests)
        if set(exchange.keys) - set(exchange.once) and exchange.method.newcomers_upload:
            self.ledger.add(self.round, "up", clients, sizes)
        return self._sent(clients, self._after_mix(mixed, sent))

    def _sent(self, clients: list[int], mixed: State) -> State:
        """What arrives of `mixed` [len(clients), …]."""
        received, sizes = self.exchange.wire.roundtrip(mixed, self.exchange.shared, self.masks)
        self.ledger.add(self.round, "down", clients, sizes)
        return received

    def to(self, clients: Sequence[int], work: State) -> Iterator[Download]:
        """`of` the clients whose states are `work` [len(clients), …]."""
        return self.of(clients, lambda rows: self.exchange.sent({name: x[rows] for name, x in work.items()}))

    def deliver(self, clients: Sequence[int], work: State, loss: Loss) -> None:
        """Bring the states `work` [len(clients), …] of some of the clients up to date, in place."""
        for download in self.to(clients, work):
            self.exchange.receive(download, work, loss)


def not_finite(clients: list[int], state: State) -> dict[int, str]:
    """client → which of its tensors in `state` [k, …] has numbers that are not finite, or nearly so: nothing can be
    computed any more where the square of a number overflows."""
    names = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()]
    # A norm is finite only if all its numbers are, and takes one fast pass. One that is not may have overflowed.
    fine = [torch.linalg.vector_norm(flattened(state[name]), dim=1).isfinite() for name in names]
    reasons = {}
    for row in (row for row, is_fine in enumerate(torch.stack(fine).all(0).tolist()) if not is_fine):
        for name in names:
            limit = largest(state[name].dtype)
            # What is not finite first: NaN is not above anything.
            if not state[name][row].isfinite().all():
                reasons[clients[row]] = f"{name} has NaN or inf"
            elif (most := state[name][row].abs().max().item()) > limit:
                reasons[clients[row]] = f"{name} has {most:.3g}, above {limit:.3g}, whose square overflows"
            else:
                continue
            break
    return reasons


def diverged(clients: Sequence[int], losses: Sequence[float], known: Mapping[int, str], most: float) -> dict[int, str]:
    """client → what its loss says, of those not `known` whose training went nowhere: it is not finite, or above
    `most`."""
    return {
        k: f"its training diverged: the mean loss was {loss:.3g}"
        for k, loss in zip(clients, losses, strict=True)
        if k not in known and not (math.isfinite(loss) and loss <= most)
    }
