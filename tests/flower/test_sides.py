"""The two sides of a federation over several machines, joined by packets alone, against `Federation`."""

import copy

import pytest
import torch
from small import cnn, make_clients

import fastfact as ff
from fastfact.flower import Node, Server
from fastfact.flower.packet import Packet, RefusedError

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
        self.l1, self.options = options.pop("l1", None), options
        self.method, self.settings = method, settings_of(method) if settings is None else settings
        self.records = [Memory() for _ in groups]
        self.bytes = {"up": 0, "down": 0}
        self.start()

    def start(self, out=None):
        x = self.data[0].train[0]
        sample = [list(x.shape[1:]), "float64"]
        self.server = Server(
            self.model, len(self.data), sample, self.method, self.settings, TRAINING | self.options, l1=self.l1, out=out
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
                if round == 2:
                    # As if the node had been started again; Flower starts a process for each round.
                    self.nodes[n] = self.node(n)
                self.server.accept(self.ask(round, n, clients), group)
        return self.server.end(round)

    def fit(self, rounds=ROUNDS):
        for round in range(1, rounds + 1):
            self.round(round)
        return self

    def state(self, k: int) -> dict:
        n = next(n for n, group in enumerate(self.groups) if k in group)
        return self.node(n).state_of(self.server.run, k)[0]


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


SAMPLE = ("clustered-fl", "factorized-fl-alpha", "fedfac-static", "fedfomo")
EVERY = [pytest.param(n, marks=() if n in SAMPLE else pytest.mark.slow) for n in ff.methods.names()]


@pytest.mark.parametrize("method", EVERY)
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


def same_as_loop(method: str, rounds=ROUNDS, **options) -> tuple[ff.Federation, Machines]:
    fed, machines = loop(method, **options), Machines(method, **options)
    fed.fit(rounds)
    machines.fit(rounds)
    for k in machines.server.trained:
        for name, tensor in fed.states.load([k]).items():
            torch.testing.assert_close(machines.state(k)[name], tensor, rtol=1e-6, atol=1e-9)
    assert [row["loss"] for row in machines.server.history] == pytest.approx([row["loss"] for row in fed.history])
    return fed, machines


@pytest.mark.parametrize("method", ["clustered-fl", "fedfac-static", "fedfomo", "simfed"])
def test_clients_that_miss_rounds_get_what_guests_get(method):
    fed, machines = same_as_loop(method, rounds=4, participation=0.5)
    assert len(machines.server.history) == len(fed.history) == 8


@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_what_clients_measure_before_their_first_round_comes_when_they_are_greeted(tmp_path, wire):
    """As in the loop, where it is uploaded in a client's first round, those that come late included."""
    data = make_clients(SHAPE, SIZES)
    data[1:3] = [ff.Client(*((3 - 2 * x, y) for x, y in (one.train, one.test))) for one in data[1:3]]
    settings = {"match_on": "initial-statistics", "init": "svd"}
    options = {"settings": settings, "data": data, "participation": 0.75, "wire": wire}
    fed, machines = loop("factorized-fl-beta", **options), Machines("factorized-fl-beta", **options)
    (key,) = fed.exchange.once
    greeting = sum(len(node.hello().body) for node in machines.nodes)
    machines.start(tmp_path)
    fed.fit(4)
    machines.fit(2)
    machines.server.close()
    machines.groups, everybody = (), machines.groups
    machines.start(tmp_path)
    assert machines.server.round == 2 and set(machines.server.once) == {0, 1, 2, 3}, "before anybody is greeted"
    machines.groups = everybody
    machines.nodes = [machines.node(n) for n in range(len(everybody))]
    for r in (3, 4):
        machines.round(r)
    check_same(fed, machines)
    torch.testing.assert_close(machines.server.server_state[key], fed.server_state[key], equal_nan=True)
    assert {len(row["clients"]) for row in fed.ledger.rows() if key in row["bytes"]} == {3, 1}
    assert machines.server.ledger.by_name("up") == fed.ledger.by_name("up")
    assert machines.bytes["up"] + greeting == fed.ledger.up


def test_what_clients_measure_is_looked_at():
    machines = Machines("factorized-fl-beta", settings={"match_on": "initial-statistics"})
    node, server = machines.nodes[0], machines.server
    good = node.hello()
    bad = server.wire.encode({"initial-statistics": torch.full((2, 9), torch.nan)})
    size = good.facts["lengths"][0]
    for error, packet in {
        "its answer is incomplete: initial-statistics": Packet({**good.facts, "lengths": None}, good.body),
        "does not say initial-statistics of each": Packet({**good.facts, "lengths": [size]}, good.body[:size]),
        "its messages have": Packet(good.facts, good.body[:-1]),
        "client 2: initial-statistics has NaN or inf": Packet(good.facts, good.body[:size] + bad),
    }.items():
        with pytest.raises(RefusedError, match=error):
            server.welcome(packet)


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "int8"},
        {"wire": "bfloat16", "clip": "1x"},
        {"rule": "median"},
        {"sparsity": {"warmup": 1, "target_density": 0.3, "regrow_every": 1}},
        {"l1": 0.01},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_of_the_wire_the_server_and_mu(options):
    fed, machines = same_as_loop("factorized-fl-beta", **options)
    if "l1" in options:
        density = [row["density"] for row in machines.server.history.of(ROUNDS)]
        assert density == [row["density"] for row in fed.history.of(ROUNDS)] and max(density) < 0.9


def test_a_client_that_is_asked_again_sends_the_same_and_does_not_train_again():
    machines = Machines("factorized-fl-beta")
    machines.round(1)
    machines.server.begin(2, [0, 1, 2, 3])
    first = machines.ask(2, 0, [0, 2])
    before = machines.state(0)
    machines.nodes[0] = machines.node(0)
    again = machines.ask(2, 0, [0, 2])
    assert again.body == first.body and again.facts["clients"] == first.facts["clients"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in machines.state(0).items())


def test_a_client_that_cannot_be_used_keeps_its_state(caplog):
    data = make_clients(SHAPE, SIZES)
    x, y = data[1].train
    bad = [*data[:1], ff.Client(train=(1e300 * x, y), test=data[1].test), *data[2:]]
    machines = Machines("fedavg", data=bad)
    rows = machines.round(1)
    assert [row["client"] for row in rows if row["left_out"]] == [1] and machines.server.reported.clients == [0, 2, 3]
    assert machines.records[1] == {}
    assert "client 1 is left out and keeps its previous state" in caplog.text


def test_the_server_looks_at_what_it_is_sent():
    machines = Machines("fedavg")
    machines.server.begin(1, [0, 1, 2, 3])
    node, server = machines.nodes[1], machines.server
    good = node.train(across(server.packet(1, [1])))

    def changed(body=None, **facts) -> Packet:
        client = copy.deepcopy(good.facts["clients"][0])
        client["row"] |= facts.pop("row", {})
        client |= facts.pop("client", {})
        return Packet(good.facts | {"clients": [client]} | facts, good.body if body is None else body)

    cases = {
        r"in run 'other'": changed(run="other"),
        r"round 5, which is not under way": changed(round=5),
        r"client 7, which was not asked": changed(row={"client": 7}),
        r"have \d+ bytes, it brings 3": changed(body=b"FF\1"),
        r"client 1: message: not a message": changed(body=b"xyz", client={"lengths": [3]}),
        r"0 messages, must be 1": changed(body=b"", client={"lengths": []}),
        r"loss is 'low'": changed(row={"loss": "low"}),
        r"incomplete \(KeyError\('lengths'\)\)": Packet(good.facts | {"clients": [{"row": {"client": 1}}]}, b""),
        r"client 3, which was not asked of it": changed(row={"client": 3}),
        r"client 1.0, which was not asked of it": changed(row={"client": 1.0}),
        r"client True, which was not asked of it": changed(row={"client": True}),
        r"round 1.0, which is not under way": changed(round=1.0),
        r"round \[1\], which is not under way": changed(round=[1]),
        r"a message of it has 'abc' bytes": changed(client={"lengths": ["abc"]}),
        r"a message of it has inf bytes": changed(client={"lengths": [torch.inf]}),
        r"a message of it has nan bytes": changed(client={"lengths": [torch.nan]}),
        r"incomplete \(TypeError": changed(client={"lengths": 5}),
        r"client 1: loss is nan, must be a finite number": changed(row={"loss": torch.nan}),
        r"client 1: seconds is 1000": changed(row={"seconds": 10**400}),
        r"client 1: accuracy is 1e\+308, must be between 0 and 1": changed(row={"accuracy": 1e308}),
        r"client 1: density is True": changed(row={"density": True}),
    }
    for error, packet in cases.items():
        with pytest.raises(RefusedError, match=error):
            server.accept(across(packet), [1])
    assert server.end(1) == []
    server.begin(2, [1])
    assert server.accept(good, [1]) == [1] and server.held[1], "a late answer is what the client holds"


def filled(server: Server, good: Packet, number: float) -> Packet:
    """The answer of client 1 with one number everywhere."""
    tensors = {
        name: torch.full_like(tensor, number) if tensor.is_floating_point() else tensor
        for name, tensor in server.at_start.items()
    }
    body = server.wire.encode({name: tensors[name] for name in server.uploaded})
    return Packet(good.facts | {"clients": [good.facts["clients"][0] | {"lengths": [len(body)]}]}, body)


@pytest.mark.parametrize(("number", "said"), [(torch.inf, "has NaN or inf"), (1e200, "whose square overflows")])
@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-alpha"])
def test_numbers_that_are_none_or_nearly_so_are_not_mixed(method, number, said):
    machines = Machines(method, settings={"tau": -1.0} if "alpha" in method else None, max_norm=None)
    server = machines.server
    server.begin(1, [1])
    good = machines.nodes[1].train(across(server.packet(1, [1])))
    server.accept(filled(server, good, number), [1])
    (row,) = server.end(1)
    assert said in row["left_out"] and server.reported is None and not server.held


def test_a_late_answer_that_is_too_far_is_not_kept(caplog):
    machines = Machines("fedavg", max_norm="20x")
    server = machines.server
    server.begin(1, [0, 1, 2, 3])
    late = filled(server, machines.ask(1, 1, [1]), 1e9)
    server.accept(machines.ask(1, 0, [0, 2]), [0, 2])
    server.end(1)
    assert server.accept(late, [1]) == [] and 1 not in server.held and 1 not in server.trained
    assert "round 1: what client 1 sent after the round is left out: the round changed its upload by" in caplog.text


def test_what_is_left_out_does_not_take_the_place_of_what_was_mixed():
    machines = Machines("fedavg", max_norm=100.0)
    machines.round(1)
    server, before = machines.server, machines.server.held[1]
    server.begin(2, [1])
    server.accept(filled(server, machines.ask(2, 1, [1]), 1e9), [1])
    (row,) = server.end(2)
    assert "above max_norm" in row["left_out"] and server.held[1] is before
    assert server.reported.clients == [0, 1, 2, 3], "those of round 1 are mixed again"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"samples": [10**400]}, "has clients .1. with .1000"),
        ({"samples": [2**53 + 1]}, "each with 1 … 9007199254740992"),
        ({"samples": [True]}, "with .True. samples"),
        ({"sample": [[torch.inf], "float64"]}, "has samples .*inf.*, must be a shape of at most"),
        ({"sample": [[-1], "float64"]}, "must be a shape of at most"),
        ({"sample": [[1, 10**7, 10**7], "float64"]}, "must be a shape of at most"),
        ({"sample": [[1, 6, 6], "nn"]}, "must be a shape of at most .* numbers, a dtype"),
        ({"sample": [[1, 6, 6], ["float64"]]}, "must be a shape of at most .* numbers, a dtype"),
        ({"sample": [[3, 2], "float64"]}, r"has samples float64 \[3, 2\], which the model does not take: "),
        ({"sample": [[1, 6, 6], "int64"]}, r"has samples int64 \[1, 6, 6\], which the model does not take: "),
        ({"sample": 5}, r"incomplete \(TypeError"),
        ({"clients": 5}, r"incomplete \(TypeError"),
        ({"clients": [[1]]}, r"has clients \[\[1\]\]"),
    ],
)
@pytest.mark.parametrize("method", ["fedavg", "simfed"])
def test_what_the_first_node_says_is_looked_at(method, facts, said):
    """A server that was told nothing of the samples has them of it."""
    machines = Machines(method)
    server = Server(cnn, 4, None, method, settings_of(method), TRAINING)
    hello = machines.nodes[1].hello()
    with pytest.raises(RefusedError, match=said):
        server.welcome(across(Packet(hello.facts | facts, hello.body)))
    assert server.sample is None and [server.welcome(across(node.hello())) for node in machines.nodes] == [
        [0, 2],
        [1],
        [3],
    ]


def test_samples_of_several_entries_are_tried_too():
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3)

        def forward(self, ids, mask):
            return self.head((self.table(ids) * mask[..., None]).mean(1))

    def of(n):
        return {"ids": torch.arange(3 * n).view(n, 3) % 5, "mask": torch.ones(n, 3).double()}, torch.arange(n) % 3

    machines = Machines(
        "fedavg", model=lambda: Both().double(), data=[ff.Client(train=of(6), test=of(3)) for _ in SIZES]
    )
    server = Server(machines.model, 4, None, "fedavg", {}, TRAINING)
    hello = machines.nodes[1].hello()
    wrong = [[name, shape, "float32"] for name, shape, _ in hello.facts["entries"]]
    with pytest.raises(RefusedError, match=r"samples of ids \[3\], mask \[3\], which the model does not take"):
        server.welcome(across(Packet(hello.facts | {"entries": wrong}, b"")))
    assert server.welcome(across(hello)) == [1] and server.task.entries is not None


@pytest.mark.parametrize("answer", [[[1], [1, 2]], ["a", "b"], [10**400, 1], {"a": 1}, [1.0], [torch.nan, 1]])
def test_answers_to_an_offer_that_are_none_are_refused(answer):
    machines = Machines("fedfomo").fit(1)
    machines.server.begin(2, [1])
    good = machines.ask(2, 1, [1])
    assert len(good.facts["clients"][0]["answer"]) == 2
    good.facts["clients"][0]["answer"] = answer
    with pytest.raises(RefusedError):
        machines.server.accept(across(good), [1])


def test_clipping_begins_at_what_a_method_gave_first():
    """As in the loop: HetLoRA's clients begin with a part of the initial model each."""
    same_as_loop("hetlora", clip=0.1)


def test_the_ledger_counts_numbers_that_int8_made_zero():
    options = {"wire": "int8", "l1": 5e-3}
    fed, machines = same_as_loop("factorized-fl-beta", **options)
    assert machines.server.ledger.up == fed.ledger.up == machines.bytes["up"]


def test_a_server_that_is_started_again_clips_to_the_same_bits(tmp_path):
    options = {"clip": "1x", "epochs": 2}
    straight, stopped = (Machines("factorized-fedavg", **options) for _ in range(2))
    stopped.start(tmp_path)
    for r in range(1, 6):
        straight.round(r)
        stopped.round(r)
        stopped.server.close()
        stopped.start(tmp_path)
    for k in range(4):
        for name, tensor in straight.state(k).items():
            assert torch.equal(tensor, stopped.state(k)[name]), name


def test_a_record_of_another_model_or_damaged_is_not_read():
    machines = Machines("fedavg").fit(1)
    ((name, record),) = machines.records[1].items()
    machines.records[1][name] = record[:-1] + bytes([record[-1] ^ 1])
    with pytest.raises(ValueError, match=r"the state of client 1 \(.*/client-1\): is damaged"):
        machines.state(1)
    machines.records[1][name] = b"?"
    with pytest.raises(ValueError, match=r"the state of client 1"):
        machines.state(1)


def test_packets_of_another_protocol_and_none():
    packet = Packet.of({"kind": "hello"})
    assert Packet.unpacked(packet.packed()).facts["kind"] == "hello"
    packet.facts["protocol"] = 99
    with pytest.raises(RefusedError, match=r"speaks protocol 99 .*, this side 1"):
        Packet.unpacked(packet.packed())
    for damaged in (b"", b"abc", Packet.of({}).packed()[:-4]):
        with pytest.raises(RefusedError, match="not a packet of fastfact"):
            Packet.unpacked(damaged)


def test_nodes_and_servers_say_what_does_not_fit(tmp_path):
    machines = Machines("fedavg")
    config = machines.server.config()
    with pytest.raises(ValueError, match=r"clients \[4\] of this node: must be one or more different numbers 0 … 3"):
        Node(config, cnn, machines.data.__getitem__, [4], Memory())
    with pytest.raises(RefusedError, match=r"client 3 is not on this node"):
        machines.server.begin(1, [3])
        machines.nodes[0].train(across(machines.server.packet(1, [3])))
    with pytest.raises(ValueError, match=r"Server\(cohort=\): unknown setting"):
        Server(cnn, 4, settings={"cohort": 3})
    (tmp_path / "note").touch()
    with pytest.raises(ff.federation.RunDirectoryError, match="is not empty and holds no server"):
        Server(cnn, 4, settings=TRAINING, out=tmp_path)
