"""What crosses between clients and server in a round, and how uploads are mixed into the next downloads."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fastfact.federation.client.train import Encoder
from fastfact.federation.server.processes import Shard
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, index_of
from fastfact.federation.tensors import TensorInfo
from fastfact.federation.wire.format import Wire, reply
from fastfact.federation.wire.ledger import Ledger


@dataclasses.dataclass
class Report:
    """Who reported in a round, with how many samples and what training loss each."""

    round: int
    clients: list[int]
    samples: list[int]
    losses: list[float]

    @classmethod
    def of_parts(cls, parts: Sequence["Report"]) -> "Report":
        """The report of a round from those of several processes about their clients."""
        lists = ([item for part in parts for item in getattr(part, name)] for name in ("clients", "samples", "losses"))
        return cls(parts[0].round, *lists)


class Exchange:
    """What a method sends of a model's tensors, up and down, and what it does with them.

    shared: the names that are uploaded, mixed and downloaded. keys: those that similarity is measured on; `measured`
    are the ones among them that are computed (`Strategy.key`). uploaded: all that go up. sparse: the μ. initial: the
    state of one client at the start [1, …].
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
    ):
        self.method, self.infos, self.sparse, self.encoder, self.seed = method, infos, sparse, encoder, seed
        self.device = encoder.device
        self.shared = [name for name, info in infos.items() if method.shares(info)]
        self.keys = [name for name, info in infos.items() if method.compares(info)]
        self.uploaded = [name for name in infos if name in {*self.shared, *self.keys}]
        # What is uploaded besides tensors of the model is known once the shape of a sample is.
        keys = method.key(initial, encoder)
        self.measured = {
            name: TensorInfo(name, tuple(key.shape[1:]), key.dtype, role=name, layer=0, layers=0)
            for name, key in keys.items()
        }
        if clash := sorted(set(self.measured) & set(infos)):
            raise ValueError(f"{method.name}: key {clash[0]} has the name of a tensor of the model")
        self.keys += self.measured
        self.uploaded += self.measured
        self.wire = Wire(infos | self.measured, values, sparse)

    def rows(self, direction: str, memory: State) -> State:
        """`Strategy.rows` on the model's device."""
        return {name: mask.to(self.device) for name, mask in self.method.rows(direction, memory).items()}

    def keyed(self, state: State) -> State:
        """The clients' tensors [k, …] and the keys computed from them."""
        if self.measured and not len(next(iter(state.values()))):
            return state | {
                name: torch.empty(0, *info.shape, dtype=info.dtype, device=self.device)
                for name, info in self.measured.items()
            }
        return state | self.method.key(state, self.encoder) if self.measured else state

    def upload(self, round: int, clients: list[int], state: State, memory: State, ledger: Ledger) -> State:
        """What arrives of the clients' states [k, …] at the server, by name; its bytes go into `ledger`."""
        sent, sizes = self.wire.roundtrip(self.keyed(state), self.uploaded, self.rows("up", memory))
        ledger.add(round, "up", clients, sizes)
        return sent

    def uploads(self, report: Report, state: State, memory: State, shard: Shard) -> Uploads:
        """What the server has of a round: what its clients sent is what they hold, `state` of those in `shard`."""
        sent = shard.stacked(self.wire.roundtrip(self.keyed(state), self.uploaded)[0], report.clients)
        uploads = Uploads(
            report.round, report.clients, sent, report.samples, report.losses, self.keys, memory, self.seed
        )
        uploads.here = shard.places(report.clients)
        return uploads

    def mix(self, uploads: Uploads) -> State:
        """The downloads of the clients at `uploads.here`, with μ as the strategy's `after_mix` wants it."""
        some = slice(uploads.here.start, uploads.here.stop)
        mixed = {
            name: tensor if len(tensor) == len(uploads.here) else tensor[some]
            for name, tensor in self.method.mix(uploads, self.shared).items()
        }
        for name in self.sparse:
            if name in mixed and self.method.after_mix == "support":
                mixed[name] = mixed[name] * (uploads.state[name][some] != 0)
            elif name in mixed and self.method.after_mix == "threshold":
                mixed[name] = torch.where(mixed[name].abs() < self.method.l1, 0.0, mixed[name])
        return mixed

    def first_download(self, round: int, clients: list[int], work: State, ledger: Ledger) -> None:
        """Everybody has the initial model, as if sent: the papers count this download too."""
        ledger.add(round, "down", clients, self.wire.roundtrip(work, self.shared)[1])

    def unusable(
        self, clients: list[int], sent: State, limit: float | None, known: Mapping[int, str]
    ) -> dict[int, str]:
        """client → why what the server sees of it is left out: keys, norm of the upload. Not those `known`."""
        reasons = {
            k: f"{name} has NaN or inf"
            for name in self.measured
            for k, finite in zip(clients, sent[name].flatten(1).isfinite().all(1).tolist(), strict=True)
            if k not in known and not finite
        }
        if limit is None:
            return reasons
        # A sketch in integers has no norm of its own.
        floats = [t.flatten(1).double() for t in sent.values() if t.is_floating_point()]
        norms = torch.stack([torch.linalg.vector_norm(t, dim=1) for t in floats]).norm(dim=0)
        return reasons | {
            k: f"the norm of its upload is {norm:.6g}, above {limit:g}"
            for k, norm in zip(clients, norms.tolist(), strict=True)
            if k not in known and norm > limit
        }


class Downloads:
    """The downloads of one round: mixed once from the uploads of the last, then brought to some clients at a time.

    clients: all that take part. samples(client) → how many it trains on; evaluate: see `Uploads.evaluate`. The bytes go
    into `ledger`.
    """

    def __init__(
        self,
        exchange: Exchange,
        uploads: Uploads,
        round: int,
        clients: Sequence[int],
        ledger: Ledger,
        samples: Callable[[int], int],
        evaluate: Callable[[int, State], Tensor],
    ):
        self.exchange, self.uploads, self.round, self.ledger, self.samples = exchange, uploads, round, ledger, samples
        self.places = {client: place for place, client in enumerate(uploads.clients)}
        uploads.present = [self.places[client] for client in clients if client in self.places]
        uploads.fetch, uploads.tell, uploads.evaluate = self._fetch, self._tell, evaluate
        self.mixed = exchange.mix(uploads)

    def _fetch(self, client: int, places: list[int]) -> State:
        exchange = self.exchange
        state, sizes = exchange.wire.roundtrip(
            {name: self.uploads.state[name][places] for name in exchange.shared}, exchange.shared
        )
        self.ledger.add(self.round, "down", [client] * len(places), sizes)
        return state

    def _tell(self, client: int, count: int) -> None:
        self.ledger.add(self.round, "up", [client], reply(count))

    def overwritten(self, clients: Sequence[int]) -> list[str]:
        """The tensors that `deliver` replaces for all of the clients, whatever they hold."""
        exchange = self.exchange
        if type(exchange.method).receive is not Strategy.receive or any(k not in self.places for k in clients):
            return []
        return [name for name in self.mixed if name not in exchange.rows("down", self.uploads.memory)]

    def deliver(self, clients: Sequence[int], work: State) -> None:
        """Bring the states `work` [len(clients), …] of some of the clients up to date, in place.

        A client that was not among those that reported is asked for its key if there is matching, and gets what
        `Strategy.arrival` says.
        """
        exchange, uploads = self.exchange, self.uploads
        rows = [row for row, client in enumerate(clients) if client in self.places]
        places = [self.places[clients[row]] for row in rows]
        whole = places == list(uploads.here)
        at = [place - uploads.here.start for place in places]
        mixed = self.mixed if whole else {name: tensor[index_of(at)] for name, tensor in self.mixed.items()}
        self._receive([clients[row] for row in rows], rows, mixed, work)
        rows = [row for row, client in enumerate(clients) if client not in self.places]
        missed = [clients[row] for row in rows]
        if not missed:
            return
        sent, sizes = exchange.wire.roundtrip(
            exchange.keyed({name: tensor[rows] for name, tensor in work.items()}), exchange.uploaded
        )
        samples, losses = [self.samples(client) for client in missed], [math.nan] * len(missed)
        memory, seed = uploads.memory, exchange.seed
        own = Uploads(self.round, missed, sent, samples, losses, exchange.keys, memory, seed)
        mixed = exchange.method.arrival(own, uploads, exchange.shared)
        if mixed is not None:
            asked = missed if exchange.keys and exchange.method.newcomers_upload else []
            self.ledger.add(self.round, "up", asked, sizes)
            self._receive(missed, rows, mixed, work)

    def _receive(self, clients: list[int], rows: list[int], mixed: State, work: State) -> None:
        """Send `mixed` [len(clients), …] down and put it where the strategy says, into these rows of `work`."""
        if not clients:
            return
        exchange = self.exchange
        some = exchange.rows("down", self.uploads.memory)
        if exchange.method.clients_mix:
            received = dict(mixed)
        else:
            received, sizes = exchange.wire.roundtrip(mixed, exchange.shared, some)
            self.ledger.add(self.round, "down", clients, sizes)
        whole = rows == list(range(len(next(iter(work.values())))))
        state = work if whole else {name: tensor[rows] for name, tensor in work.items()}
        for name, mask in some.items():
            arrived = mask.view(-1, *[1] * (received[name].dim() - 2))
            received[name] = torch.where(arrived, received[name], state[name])
        for name, tensor in exchange.method.receive(state, received).items():
            if whole:
                work[name].copy_(tensor)
            else:
                work[name][rows] = tensor


def not_finite(clients: list[int], state: State) -> dict[int, str]:
    """client → which of its tensors in `state` [k, …] has NaN or inf, for those that have one."""
    names = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()]
    # A sum is finite only if all its numbers are, and takes one fast pass. One that is not may have overflowed.
    fine = torch.stack([state[name].flatten(1).sum(1).isfinite() for name in names]).all(0).tolist()
    reasons = {}
    for row in (row for row, is_fine in enumerate(fine) if not is_fine):
        bad = [name for name in names if not state[name][row].isfinite().all()]
        if bad:
            reasons[clients[row]] = f"{bad[0]} has NaN or inf"
    return reasons
