"""The clients' side: the clients of one machine, what they hold between rounds, and their part of a round."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fastfact.base import files
from fastfact.data.client import Client
from fastfact.federation.local import Local
from fastfact.federation.server.exchange import Download
from fastfact.federation.state import State, like_rows
from fastfact.federation.storage.states import Codec
from fastfact.federation.wire.ledger import Ledger
from fastfact.flower.packet import Packet, RefusedError, table_of

log = logging.getLogger("fastfact")


class Records(Protocol):
    """Where a node keeps what it must know again after a restart: bytes by name."""

    def get(self, name: str) -> bytes | None: ...

    def put(self, name: str, record: bytes) -> None: ...


class Folder:
    """Records as files of a directory, each written whole or not at all."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def put(self, name: str, record: bytes) -> None:
        files.make_folder((self.path / name).parent)
        files.write(self.path / name, record)


class _Own(Sequence[Client]):
    """The clients of this node by their numbers among the k of the federation."""

    def __init__(self, data: Callable[[int], Client], numbers: Sequence[int], k: int):
        self.data, self.numbers, self.k = data, frozenset(numbers), k

    def __len__(self) -> int:
        return self.k

    def __getitem__(self, client: Any) -> Any:
        if client not in self.numbers:
            raise IndexError(f"client {client} is not on this node")
        return self.data(client)

    def __iter__(self) -> Iterator[Client]:
        return (self.data(client) for client in sorted(self.numbers))


class Node(Local):
    """The clients `numbers` of a federation on this machine.

    config: what the server says of the federation, see `Server.config`. model: the server's. data(number) → the samples
    of a client, always the same. records: where the clients' states are between rounds. cohort, device, augment,
    graphs: as of `Federation`; they are this machine's own.
    Raises ValueError where model, data and configuration do not fit.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        model: Callable[[], nn.Module],
        data: Callable[[int], Client],
        numbers: Sequence[int],
        records: Records,
        *,
        cohort: int | str = 1,
        device: str | torch.device | None = None,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        graphs: bool = True,
    ):
        k, self.numbers, self.records = config["clients"], sorted(numbers), records
        wrong = [number for number in self.numbers if not 0 <= number < k]
        if not self.numbers or wrong or len(set(self.numbers)) < len(self.numbers):
            raise ValueError(f"clients {self.numbers} of this node: must be one or more different numbers 0 … {k - 1}")
        settings = {**config["settings"], "cohort": cohort, "memory_limit": None, "store": "memory", "noise": 0.0}
        method = config["method"]
        super().__init__(method["name"], method["settings"], settings, augment=augment, graphs=graphs)
        self.config = dict(config)
        self._setup_model(model, device)
        self._setup_clients(_Own(data, self.numbers, k), self.numbers[0], len(self.numbers))
        self._setup_exchange(self._sample())
        self.codec = Codec(self.initial, self.infos, self.sparse)

    def hello(self) -> Packet:
        """Who is here: the clients' numbers, how many samples each trains on, what a sample is, of which entries if it
        has several, how many classes the model has, and a digest of its tensors; and what clients measure before their
        first round, if the method asks for it."""
        samples = [len(self._data[k].train[1]) for k in self.numbers]
        facts = {"clients": self.numbers, "samples": samples, "sample": self._sample(), "classes": self.classes}
        if self._data.entries is not None:
            of = self._data.entries.entries
            facts["entries"] = [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in of]
        messages = []
        if self.exchange.once:
            measured = (self.exchange.measurement(self._x_of(k)) for k in self.numbers)
            messages = [self.wire.encode(tensors) for tensors in measured]
            facts["lengths"] = [len(message) for message in messages]
        return Packet.of({"kind": "hello", "table": table_of(self.infos, self.sparse, self.frozen), **facts}, messages)

    def train(self, packet: Packet) -> Packet:
        """A round of the clients that the packet names. Their new states are in `records` when it returns.

        A client that has trained in this round already uploads again what it has. Raises RefusedError for a packet that
        does not fit.
        """
        facts = packet.facts
        run, round = str(facts["run"]), int(facts["round"])
        groups = packet.messages([client["lengths"] for client in facts["clients"]])
        asked = {int(client["client"]): (client, group) for client, group in zip(facts["clients"], groups, strict=True)}
        if unknown := sorted(set(asked) - set(self.numbers)):
            raise RefusedError(f"client {unknown[0]} is not on this node, which has {self.numbers}")
        held = {k: self.state_of(run, k) for k in asked}
        again = [k for k, (_, known) in held.items() if known.get("round") == round]
        parts = {k: self._again(round, k, *held[k], facts) for k in again}
        new = sorted(set(asked) - set(again))
        if new:
            parts |= self._round(run, round, {k: asked[k] for k in new}, {k: held[k] for k in new}, facts)
        answer = {"kind": "train", "run": run, "round": round, "clients": [parts[k][0] for k in sorted(parts)]}
        return Packet.of(answer, [message for k in sorted(parts) for message in parts[k][1]])

    def _round(self, run: str, round: int, asked: dict, held: dict, facts: Mapping[str, Any]) -> dict:
        """client → (facts, messages) of those that train."""
        clients = list(asked)
        work = {
            name: torch.cat([held[k][0][name] for k in clients], out=like_rows(tensor, len(clients)))
            for name, tensor in self.initial.items()
        }
        self.exchange.measure(round, clients, work, Ledger(), self._x_of)
        for k in clients:
            self._warn_of_loss(round, k, held[k][1].get("round", 0), asked[k][0]["held"])
        masks = self._masks(facts)
        downloads = None
        if facts["first"]:
            # The initial model: nothing was mixed, and nothing is evaluated after it.
            for download in self._downloads(clients, asked, work):
                for name, tensor in download.tensors.items():
                    work[name][download.rows] = tensor
        else:
            stacks = [name for name in self.shared if self.method.stacks(self.infos[name])]
            downloads = self._downloads(clients, asked, work, stacks)
        done, rows = self.step(
            round,
            clients,
            work,
            downloads,
            masks,
            lambda k: held[k][0],
        )
        parts = {}
        for row, k in enumerate(clients):
            told = {"row": rows[row], "lengths": []}
            if k in done.answers:
                told["answer"] = done.answers[k][1].tolist()
            messages = []
            if rows[row]["left_out"] is None:
                messages = self._upload(work, row, masks)
                told["lengths"] = [len(message) for message in messages]
                self._write(run, round, k, work, row, told)
            parts[k] = (told, messages)
        return parts

    def _downloads(
        self, clients: list[int], asked: dict, work: State, several: Collection[str] = ()
    ) -> Iterator[Download]:
        for row, k in enumerate(clients):
            client, group = asked[k]
            own = {name: work[name][row] for name in self.shared}
            try:
                arrived = [self.wire.decode(message, onto=own, several=several) for message in group]
            except ValueError as error:
                raise RefusedError(f"the download of client {k}: {error}") from error
            if any(set(tensors) != set(self.shared) for tensors in arrived):
                raise RefusedError(
                    f"the download of client {k}: brings other tensors than the {len(self.shared)} shared"
                )
            if arrived:
                tensors = {name: torch.stack([one[name] for one in arrived]).to(self.device) for name in self.shared}
                # Channels that did not travel are the client's own already.
                yield Download([row], tensors, {}, client["sources"])

    def _masks(self, facts: Mapping[str, Any]) -> State:
        """The channels that travel up."""
        return {
            name: torch.from_numpy(
                np.unpackbits(np.frombuffer(bytes.fromhex(bits), np.uint8), count=n).astype(bool)
            ).to(self.device)
            for name, (bits, n) in facts["masks"].items()
        }

    def _upload(self, work: State, row: int, masks: State) -> list[bytes]:
        if not self.uploaded:
            return []
        keyed = self.exchange.keyed({name: tensor[row : row + 1] for name, tensor in work.items()})
        return [self.wire.encode({name: keyed[name][0] for name in self.uploaded}, masks)]

    def _again(
        self, round: int, k: int, state: State, known: dict, facts: Mapping[str, Any]
    ) -> tuple[dict, list[bytes]]:
        """What a client uploaded in this round: a state at rest is what was uploaded last."""
        log.warning("round %d: client %d is asked again, and sends what it has of that round", round, k)
        return known["told"], self._upload(state, 0, self._masks(facts))

    def _warn_of_loss(self, round: int, k: int, own: int, expected: int) -> None:
        if own < expected:
            what = f"has that of round {own}" if own else "begins anew"
            log.warning("round %d: client %d has lost its state of round %d, and %s", round, k, expected, what)

    def _name(self, run: str, k: int) -> str:
        return f"{run}/client-{k}"

    def _write(self, run: str, round: int, k: int, state: State, row: int, told: dict) -> None:
        record = self.codec.encode(state, row)[0]
        known = {"round": round, "told": told, "table": self.codec.table}
        head = json.dumps({**known, "digest": files.digest(record)}).encode()
        self.records.put(self._name(run, k), head + b"\n" + record)

    def state_of(self, run: str, k: int) -> tuple[State, dict]:
        """The state [1, …] of a client and what it knows of it; the initial one and nothing, if it has none. Raises
        ValueError for a record that is damaged or of another model."""
        name = self._name(run, k)
        record = self.records.get(name)
        if record is None:
            return self.initial, {}
        head, _, body = record.partition(b"\n")
        state = {name: like_rows(tensor, 1) for name, tensor in self.initial.items()}
        try:
            known = json.loads(head)
            if known["table"] != json.loads(json.dumps(self.codec.table)):
                raise ValueError("is of another model")
            if known["digest"] != files.digest(body):
                raise ValueError("is damaged: its digest is that of another")
            self.codec.decode(body, state, 0, None)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the state of client {k} ({name}): {error}") from error
        return state, known
