"""Flower's apps of a federation: packets in Flower's records, nodes that come and go, and the rounds' clock."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from fastfact.base import VERSION
from fastfact.base.kinds import type_error
from fastfact.data.client import Client
from fastfact.federation.server.strategy import STRATEGIES, Strategy
from fastfact.flower.node import Folder, Node, Records
from fastfact.flower.packet import Packet, RefusedError, is_number
from fastfact.flower.server import SETTINGS, Server

log = logging.getLogger("fastfact")
say = logging.getLogger("flwr").info
"""What is no trouble goes where Flower's own lines go."""

RECORD, FACTS, BODY = "fastfact", "facts", "body"


def packed(packet: Packet) -> RecordDict:
    """A packet as the content of a Flower message: its facts in a ConfigRecord, its body, messages of the wire format
    end to end, as the bytes of one array."""
    content = RecordDict({RECORD: ConfigRecord({FACTS: packet.packed()})})
    if packet.body:
        array = Array("uint8", (len(packet.body),), "fastfact.wire", packet.body)
        content[BODY] = ArrayRecord({BODY: array})
    return content


def unpacked(content: RecordDict) -> Packet:
    """The packet in the content of a message. Raises RefusedError for a message that has none, or of another
    protocol."""
    try:
        facts = content.config_records[RECORD][FACTS]
        body = content.array_records[BODY][BODY].data if BODY in content.array_records else b""
    except KeyError as error:
        raise RefusedError(f"not a message of fastfact: it has no {error}") from error
    if not isinstance(facts, bytes):
        raise RefusedError("not a message of fastfact")
    return Packet.unpacked(facts, body)


class _InContext:
    """Records in `Context.state`, which Flower keeps for a node as long as its SuperNode runs."""

    def __init__(self, context: Context):
        self.state = context.state

    def get(self, name: str) -> bytes | None:
        record = self.state.config_records.get(RECORD)
        found = None if record is None else record.get(name)
        return found if isinstance(found, bytes) else None

    def put(self, name: str, record: bytes) -> None:
        if RECORD not in self.state:
            self.state[RECORD] = ConfigRecord()
        self.state.config_records[RECORD][name] = record


def numbers_of(node_config: Mapping[str, Any]) -> list[int]:
    """The clients of a node: `clients="0,3,6-9"` in its --node-config, or Flower's `partition-id`.

    Raises ValueError where neither says so.
    """
    text = node_config.get("clients", node_config.get("partition-id"))
    if text is None:
        raise ValueError(
            "which clients this node has is not said: start it with --node-config 'partition-id=3', or"
            " 'clients=\"0,3,6-9\"' for several"
        )
    numbers: list[int] = []
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or not (last if dash else first).isdecimal():
            raise ValueError(f"clients={text!r} of this node: must be numbers and ranges, as 0,3,6-9")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def client_app(
    model: Callable[[], nn.Module],
    data: Callable[[int], Client],
    *,
    state: str | Path | None = None,
    cohort: int | str = 1,
    device: str | torch.device | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    graphs: bool = True,
) -> ClientApp:
    """A Flower ClientApp for all methods: what it is to do comes from the server.

    model: () → nn.Module, the server's. data(client) → the samples of client 0 … clients − 1, always the same; asked
    for those of this node alone (see `numbers_of`).
    state: a directory for what the clients keep, which outlives their node; None keeps it in Flower's `Context.state`,
    which ends with the SuperNode. `state="DIR"` in a node's --node-config takes its place.
    cohort, device, augment, graphs: as of `Federation`, for this machine alone. Flower starts a process for each
    message: "auto" would measure in each node's first, and what a cohort records for its later steps rarely pays.
    """
    if isinstance(model, nn.Module) or not callable(model):
        raise ValueError(f"client_app(model={type(model).__name__}): must be a function () → nn.Module")
    if not callable(data):
        raise ValueError(f"client_app(data={type(data).__name__}): must be a function (client) → ff.Client")
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        arrived = time.time()
        try:
            packet = unpacked(message.content)
            folder = context.node_config.get("state", state)
            records: Records = _InContext(context) if folder is None else Folder(str(folder))
            numbers = numbers_of(context.node_config)
            own: dict[str, Any] = {"cohort": cohort, "device": device, "augment": augment, "graphs": graphs}
            node = Node(packet.facts["config"], model, data, numbers, records, **own)
            ready = time.time()
            reply = node.hello() if packet.facts["kind"] == "hello" else node.train(packet)
            began = _process_began() or arrived
            reply.facts["seconds"] = [
                round(b - a, 3) for a, b in ((began, arrived), (arrived, ready), (ready, time.time()))
            ]
        except RefusedError as error:
            reply = Packet.of({"kind": "refused", "reason": str(error)})
        return Message(packed(reply), reply_to=message)

    app.query()(answer)
    app.train()(answer)
    return app


def _process_began() -> float | None:
    """When this process was started; None where the system does not say."""
    try:
        return os.stat("/proc/self").st_ctime
    except OSError:
        return None


def server_app(
    method: str | Strategy,
    model: Callable[[], nn.Module],
    *,
    clients: int,
    rounds: int,
    settings: Mapping[str, Any] | None = None,
    l1: float | None = None,
    at_least: int | None = None,
    deadline: float = 3600.0,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    on_round: Callable[[int, list[dict]], None] | None = None,
    **training: Any,
) -> ServerApp:
    """A Flower ServerApp of a method. What has the name of an argument in the run's configuration
    (`flwr run --run-config "rounds=20 lr=0.01"`) takes its place; so do the method's own settings.

    method, model, settings, l1: as of `Federation`; training: its other settings that machines share (epochs,
    batch_size, lr, momentum, weight_decay, participation, seed, wire, rule, hostile, clip, max_norm, sparsity,
    store_values).
    clients: how many there are, numbered from 0; the nodes say which they have. at_least: how many must be there before
    the first round, all by default. deadline: seconds a round waits for its clients; what comes later is not mixed.
    out: a directory for the rows, the ledger and what the server must remember; a run that is started again goes on
    from it. on_round(round, rows) after each round.

    Raises ValueError for bad arguments.
    """
    given = {
        "method": method,
        "clients": clients,
        "rounds": rounds,
        "l1": l1,
        "at_least": at_least,
        "deadline": deadline,
        "out": out,
        **training,
    }
    _check(given)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        options, own = _options(given, dict(settings or {}), context.run_config)
        shared = {name: options[name] for name in SETTINGS if name in options}
        server = Server(
            model,
            options["clients"],
            None,
            options["method"],
            own,
            shared,
            l1=options["l1"],
            device=device,
            out=options["out"] or None,
        )
        try:
            _Rounds(grid, server, options["deadline"], options["at_least"]).run(options["rounds"], on_round)
        finally:
            server.close()

    return app


_KINDS = {"clients": int, "rounds": int, "at_least": int | None, "deadline": float, "l1": float | None}


def _check(options: Mapping[str, Any]) -> None:
    for name, kind in _KINDS.items():
        least = 0 if name in ("l1", "rounds") else 1 if name != "deadline" else 1e-9
        value = options[name]
        if type_error(value, kind) or (value is not None and value < least):
            raise ValueError(f"server_app({name}={value!r}): must be a number of at least {least:g}")
    if options["at_least"] is not None and options["at_least"] > options["clients"]:
        raise ValueError(f"server_app(at_least={options['at_least']}): there are {options['clients']} clients")
    if unknown := sorted(set(options) - set(SETTINGS) - set(_KINDS) - {"method", "out"}):
        raise ValueError(f"server_app({unknown[0]}=): unknown, must be one of {', '.join(SETTINGS)}")


def _options(given: dict, own: dict, run_config: Mapping[str, Any]) -> tuple[dict, dict]:
    """The arguments and the method's settings, with what the run's configuration says in their place."""
    options = given | {
        name: value for name, value in run_config.items() if name in {*_KINDS, *SETTINGS, "method", "out"}
    }
    # Numbers in a run's configuration are integers where they are written so.
    for name in ("deadline", "l1", "lr", "momentum", "weight_decay", "participation", "hostile"):
        if type(options.get(name)) is int:
            options[name] = float(options[name])
    _check(options)
    if isinstance(options["method"], str) and options["method"] in STRATEGIES:
        known = {f.name: f.type for f in fields(STRATEGIES[options["method"]])}
        for name, value in run_config.items():
            if name in known and name not in options:
                own[name] = float(value) if known[name] is float and type(value) is int else value
    return options, own


@dataclass
class _Sent:
    """A message that is not answered yet."""

    kind: str
    node: int
    round: int
    until: float
    clients: list[int]
    """Which of the node's it asks for."""


class _Rounds:
    """The nodes of a run and its clock. A round waits until all that it asked have answered, or to its deadline; for
    nodes that let the last deadline pass only as long as for the others."""

    PULL = 0.2, 2.0
    """Seconds between two looks for answers, at first and at most."""

    def __init__(self, grid: Grid, server: Server, deadline: float, at_least: int | None):
        self.grid, self.server, self.deadline = grid, server, deadline
        self.at_least = server.k if at_least is None else at_least
        self.nodes: dict[int, list[int]] = {}
        self.greeted: set[int] = set()
        self.refused: dict[int, str] = {}
        self.silent: set[int] = set()
        self.sent: dict[str, _Sent] = {}
        self.seconds: dict[int, list[float]] = {}

    def run(self, rounds: int, on_round: Callable[[int, list[dict]], None] | None) -> None:
        if self.server.round < rounds:
            self._gather()
        for round in range(self.server.round + 1, rounds + 1):
            rows = self._round(round)
            if on_round is not None:
                on_round(round, rows)

    def _known(self) -> set[int]:
        return {k for numbers in self.nodes.values() for k in numbers}

    def _gather(self) -> None:
        """Wait until enough clients are there."""
        told = time.monotonic() - 25
        while len(self._known()) < self.at_least:
            self._greet()
            self._pull()
            if len(self._known()) < self.at_least and time.monotonic() - told > 30:
                say("fastfact: %d clients are there, waiting for %d", len(self._known()), self.at_least)
                told = time.monotonic()
            if len(self._known()) < self.at_least:
                time.sleep(self.PULL[0])

    def _greet(self) -> set[int]:
        """Ask nodes that are new who they are; the nodes there are."""
        there = set(self.grid.get_node_ids())
        self.greeted &= there
        for node in sorted(there - self.greeted - set(self.nodes)):
            self.greeted.add(node)
            self._send("query", node, self.server.round, self.server.hello())
        return there

    def _send(self, kind: str, node: int, round: int, packet: Packet, clients: Sequence[int] = ()) -> str | None:
        # An answer after the deadline still says what the client holds.
        ttl = 2 * self.deadline
        message = Message(packed(packet), node, kind, ttl=ttl, group_id=str(round))
        # One at a time: which of several could not be sent is told differently by Flower's grids.
        ids = [id for id in self.grid.push_messages([message]) if id]
        if not ids:
            log.warning("round %d: %s cannot be reached", round, self._name(node))
            return None
        self.sent[ids[0]] = _Sent(kind, node, round, time.monotonic() + ttl, list(clients))
        return ids[0]

    def _name(self, node: int) -> str:
        numbers = self.nodes.get(node)
        return f"node {node}" if not numbers else f"node {node} (clients {', '.join(map(str, numbers))})"

    def _round(self, round: int) -> list[dict]:
        began = time.monotonic()
        there = self._greet()
        # Whoever was refused may have been mended.
        for node in sorted(set(self.refused) & there):
            self._send("query", node, round, self.server.hello())
        where = {k: node for node, numbers in self.nodes.items() for k in numbers if node in there}
        chosen = self.server.select(round)
        clients = [k for k in chosen if k in where]
        if missing := sorted(set(chosen) - set(clients)):
            log.warning("round %d: clients %s are not there, the round goes on without them", round, _list(missing))
        self.server.begin(round, clients)
        asked: dict[str, int] = {}
        for node in sorted({where[k] for k in clients}):
            own = [k for k in clients if where[k] == node]
            id = self._send("train", node, round, self.server.packet(round, own), own)
            if id is not None:
                asked[id] = node
        self._wait(round, asked, began + self.deadline)
        for id, node in asked.items():
            if id in self.sent:
                self.silent.add(node)
        rows = self.server.end(round)
        came = {row["client"] for row in rows}
        if late := sorted(set(clients) - came):
            log.warning("round %d: clients %s have not answered, the round goes on without them", round, _list(late))
        self._tell(round, rows, time.monotonic() - began)
        return rows

    def _wait(self, round: int, asked: Mapping[str, int], until: float) -> None:
        pause, looked = self.PULL[0], time.monotonic()
        while True:
            self._pull()
            waiting = [node for id, node in asked.items() if id in self.sent]
            prompt = [node for node in waiting if node not in self.silent]
            only_silent = all(node in self.silent for node in asked.values())
            if not waiting or (not prompt and not only_silent) or time.monotonic() > until:
                return
            if time.monotonic() - looked > 5:
                looked, there = time.monotonic(), self._greet()
                for id, node in asked.items():
                    if id in self.sent and node not in there:
                        log.warning("round %d: %s is gone", round, self._name(node))
                        del self.sent[id]
                        self.silent.discard(node)
            time.sleep(min(pause, max(0.0, until - time.monotonic())))
            pause = min(pause * 1.2, self.PULL[1])

    def _pull(self) -> None:
        """Take what has come."""
        if not self.sent:
            return
        for reply in self.grid.pull_messages(list(self.sent)):
            sent = self.sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                self._take(sent, reply)
        now = time.monotonic()
        self.sent = {id: sent for id, sent in self.sent.items() if now < sent.until}

    def _take(self, sent: _Sent, reply: Message) -> None:
        name = self._name(sent.node)
        if reply.has_error():
            log.warning(
                "round %d: %s: %s", sent.round, name, reply.error.reason or f"Flower's error {reply.error.code}"
            )
            self.greeted.discard(sent.node) if sent.kind == "query" else None
            return
        try:
            packet = unpacked(reply.content)
            if packet.facts.get("kind") == "refused":
                raise RefusedError(f"refuses: {packet.facts.get('reason')!s:.500}")
            if sent.kind == "query":
                self._welcome(sent.node, packet)
                return
            late = sent.round <= self.server.round
            seconds = packet.facts.get("seconds", [])
            if not isinstance(seconds, list) or len(seconds) not in (0, 3) or not all(map(is_number, seconds)):
                raise RefusedError(f"its seconds are {seconds!r:.80}, must be three numbers")
            clients = self.server.accept(packet, sent.clients)
            self.seconds[sent.node] = seconds
            self.silent.discard(sent.node)
            if late and clients:
                log.warning(
                    "round %d: the answer of clients %s came after the round: it is not mixed, they go on from it",
                    sent.round,
                    _list(clients),
                )
        except RefusedError as error:
            if self.refused.get(sent.node) != str(error):
                log.warning("round %d: %s is left out: %s", sent.round, name, error)
            self.refused[sent.node] = str(error)

    def _welcome(self, node: int, packet: Packet) -> None:
        clients = self.server.welcome(packet)
        if (version := packet.facts.get("version")) != VERSION:
            own = VERSION
            log.warning("node %d has fastfact %.40s, this side %s, which may compute otherwise", node, version, own)
        for other, numbers in list(self.nodes.items()):
            if other != node and (moved := sorted(set(numbers) & set(clients))):
                log.warning("clients %s were at node %d and are at node %d now", _list(moved), other, node)
                self.nodes[other] = [k for k in numbers if k not in moved]
                if not self.nodes[other]:
                    del self.nodes[other]
        self.nodes[node] = clients
        self.refused.pop(node, None)

    def _tell(self, round: int, rows: Iterable[Mapping[str, Any]], seconds: float) -> None:
        rows = list(rows)
        accuracies = [row["accuracy"] for row in rows if row["accuracy"] is not None]
        text = f"fastfact: round {round}: {len(rows)} clients"
        if accuracies:
            text += f", accuracy {fmean(accuracies):.4f}"
        up, down = (self.server.ledger.bytes(way, round=round) for way in ("up", "down"))
        text += f", {up:,} bytes up, {down:,} down, {seconds:.1f} s"
        if parts := [part for part in self.seconds.values() if len(part) == 3]:
            start, prepare, work = max(parts, key=sum)
            text += f" (of the slowest node {start:.1f} to start, {prepare:.1f} to prepare, {work:.1f} in the round)"
        self.seconds = {}
        say("%s", text)


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
