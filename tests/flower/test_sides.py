"""The two sides of a federation over several machines, joined by packets alone, against `Federation`."""

import pytest
import torch
from small import cnn, make_clients

import fastfact as ff
from fastfact.flower import Node, Server
from fastfact.flower.packet import Packet

SHAPE, SIZES, ROUNDS = (1, 6, 6), (10, 7, 12, 9), 3
TRAINING = {"epochs": 1, "batch_size": 4, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "seed": 3}
SETTINGS = {
    "clustered-fl": {"eps1": 9.0, "eps2": 0.0},
    "factorized-fl-alpha": {"tau": -1.0, "sketch": 8},
    "fedfomo": {"models": 2, "validation": 0.3},
    "fedsplit": {"shared_channels": {"0": [0, 2], "3": [1, 4]}},
    "simfed": {"tau": -1.0},
}


class Memory(dict):
    """Records in memory."""

    put = dict.__setitem__


def settings_of(method: str) -> dict:
    return SETTINGS.get(method, {})


def across(packet: Packet) -> Packet:
    """What arrives of a packet."""
    return Packet.unpacked(packet.packed(), packet.body)


class Machines:
    """A server and nodes of some clients each; `absent` in a round are nodes that do not answer."""

    def __init__(self, method="fedavg", groups=((0, 2), (1,), (3,)), model=cnn, data=None, settings=None, **options):
        self.data = make_clients(SHAPE, SIZES) if data is None else data
        self.model, self.groups = model, groups
        self.options = options
        self.method, self.settings = method, settings_of(method) if settings is None else settings
        self.records = [Memory() for _ in groups]
        self.bytes = {"up": 0, "down": 0}
        self.start()

    def start(self, out=None):
        x = self.data[0].train[0]
        sample = [list(x.shape[1:]), "float64"]
        self.server = Server(
            self.model, len(self.data), sample, self.method, self.settings, TRAINING | self.options, out=out
        )
        self.nodes = [self.node(n) for n in range(len(self.groups))]
        for node in self.nodes:
            self.server.welcome(across(node.hello()))

    def node(self, n: int) -> Node:
        config = across(self.server.hello()).facts["config"]
        return Node(config, self.model, self.data.__getitem__, self.groups[n], self.records[n], cohort=1)

    def ask(self, round: int, n: int, clients) -> Packet:
        mine = [k for k in clients if k in self.groups[n]]
        packet = across(self.server.packet(round, mine))
        self.bytes["down"] += len(packet.body)
        answer = across(self.nodes[n].train(packet))
        self.bytes["up"] += len(answer.body)
        return answer

    def round(self, round: int, absent=()) -> list[dict]:
        clients = self.server.select(round)
        self.server.begin(round, clients)
        for n, group in enumerate(self.groups):
            if n not in absent and set(group) & set(clients):
                # Each round in a process of its own, as Flower has it.
                self.nodes[n] = self.node(n)
                self.server.accept(self.ask(round, n, clients))
        return self.server.end(round)

    def fit(self, rounds=ROUNDS):
        for round in range(1, rounds + 1):
            self.round(round)
        return self

    def state(self, k: int) -> dict:
        n = next(n for n, group in enumerate(self.groups) if k in group)
        return self.node(n)._read(self.server.run, k)[0]


def loop(method="fedavg", settings=None, model=cnn, data=None, **options) -> ff.Federation:
    data = make_clients(SHAPE, SIZES) if data is None else data
    method = ff.methods.make(method, **(settings_of(method) if settings is None else settings))
    return ff.Federation(model, data, method, cohort=1, **TRAINING | options)


def check_same(fed: ff.Federation, machines: Machines) -> None:
    for k in range(len(fed)):
        expected, got = fed.states.load([k]), machines.state(k)
        assert set(expected) == set(got)
        for name, tensor in expected.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-10, atol=1e-12, msg=lambda m, n=name, k=k: f"{n} of {k}: {m}"
            )
    for row, own in zip(machines.server.history, fed.history, strict=True):
        for key in ("round", "client", "accuracy", "accuracy_before", "left_out"):
            assert row[key] == own[key], key
        assert row["loss"] == pytest.approx(own["loss"], rel=1e-9)


@pytest.mark.parametrize("method", ff.methods.names())
def test_every_method_does_on_machines_what_it_does_in_the_loop(method):
    fed, machines = loop(method), Machines(method)
    fed.fit(ROUNDS)
    machines.fit()
    check_same(fed, machines)
    for name, tensor in fed.server_state.items():
        torch.testing.assert_close(machines.server.server_state[name], tensor)
    assert machines.server.ledger.by_name("up") == fed.ledger.by_name("up")
    assert machines.server.ledger.by_name("down") == fed.ledger.by_name("down")
    # What stands for numbers that are no tensor of the model is in the facts.
    replies = machines.server.ledger.by_name("up").get("(reply)", 0) + 8 * sum(
        "(reply)" in entry.sizes.bytes for entry in machines.server.ledger.entries
    )
    assert machines.bytes == {"up": fed.ledger.up - replies, "down": fed.ledger.down}
