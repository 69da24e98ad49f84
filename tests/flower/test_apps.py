"""Flower's apps on Flower's own messages: a grid in this process that calls the ClientApp, and has faults."""

import copy
import logging
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from small import cnn, make_clients
from test_sides import SHAPE, SIZES, TRAINING, loop, settings_of

import fastfact as ff
from fastfact.flower import apps, client_app, packet, server_app
from fastfact.flower.apps import numbers_of


class Node:
    """A SuperNode: its context, and what is wrong with it: fault(round) → None, "silent", "gone", "crash" or "late"."""

    def __init__(self, clients: str, fault=lambda round: None, **config):
        self.context = Context(1, 0, {"clients": clients, **config}, RecordDict(), {})
        self.fault = fault


class Here(Grid):
    """A grid whose nodes are called when they are asked; late answers come with those of the next round."""

    def __init__(self, app, nodes: dict[int, Node]):
        self.app, self.nodes, self.ids = app, nodes, count(1)
        self.replies: dict[str, Message] = {}
        self.late: list[tuple[str, Message]] = []
        self.round, self.asked = 0, []

    set_run = create_message = send_and_receive = None
    run = property(lambda self: None)

    def get_node_ids(self):
        return [id for id, node in self.nodes.items() if node.fault(self.round) != "gone"]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            id, node = str(next(self.ids)), self.nodes[message.metadata.dst_node_id]
            message.metadata.__dict__["_message_id"] = id
            if int(message.metadata.group_id) > self.round:
                self.replies |= dict(self.late)
                self.late = []
            self.round = int(message.metadata.group_id)
            fault = node.fault(self.round) if message.metadata.message_type == "train" else None
            ids.append(id)
            self.asked.append((self.round, message.metadata.dst_node_id, message.metadata.message_type))
            if fault == "crash":
                self.replies[id] = Message(Error(3, "ClientApp stopped responding."), reply_to=message)
            elif fault != "silent":
                node.context.node_id = message.metadata.dst_node_id
                try:
                    reply = self.app(copy.deepcopy(message), node.context)
                except ValueError as error:
                    reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
                if fault == "late":
                    self.late.append((id, reply))
                else:
                    self.replies[id] = reply
        return ids

    def pull_messages(self, message_ids):
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]


GROUPS = {11: "0,2", 12: "1", 13: "3"}


@pytest.fixture
def run(monkeypatch, caplog):
    """run(method, nodes, rounds, …) → (grid, rows)."""
    monkeypatch.setattr(apps._Rounds, "PULL", (0.01, 0.02))
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    caplog.set_level(logging.INFO)
    data = make_clients(SHAPE, SIZES)

    def go(method="factorized-fl-alpha", nodes=None, rounds=3, run_config=None, state=None, **options):
        nodes = nodes or {id: Node(text) for id, text in GROUPS.items()}
        grid, rows = Here(client_app(cnn, data.__getitem__, state=state), nodes), []
        options = {"settings": settings_of(method), **TRAINING, "deadline": 0.5, **options}
        app = server_app(
            method, cnn, clients=len(data), rounds=rounds, on_round=lambda _, new: rows.extend(new), **options
        )
        app(grid, Context(1, 0, {}, RecordDict(), run_config or {}))
        return grid, rows

    return go


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("method", ["factorized-fl-beta", "fedfac-dynamic", "fedfomo"])
def test_the_apps_do_what_the_loop_does(run, method, caplog):
    fed = loop(method)
    fed.fit(3)
    _, rows = run(method)
    keys = ("round", "client", "loss", "accuracy", "accuracy_before", "left_out")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in fed.history]
    assert not warnings(caplog)
    assert sum("fastfact: round" in record.getMessage() for record in caplog.records) == 3


def test_the_runs_configuration_takes_the_place_of_arguments(run):
    fed = loop("factorized-fl-alpha", {"tau": 0.5, "epsilon": 2.0}, lr=1.0)
    fed.fit(2)
    _, rows = run(
        "fedavg", run_config={"method": "factorized-fl-alpha", "rounds": 2, "lr": 1, "tau": 0.5, "epsilon": 2}
    )
    assert [row["loss"] for row in rows] == [row["loss"] for row in fed.history]


def test_the_state_is_in_a_directory_if_one_is_named(run, tmp_path):
    nodes = {id: Node(text, state=str(tmp_path / str(id))) for id, text in GROUPS.items()}
    run(nodes=nodes, rounds=1)
    found = sorted(path.relative_to(tmp_path).parts[::2] for path in tmp_path.rglob("client-*"))
    assert found == [("11", "client-0"), ("11", "client-2"), ("12", "client-1"), ("13", "client-3")]
    assert not any(node.context.state for node in nodes.values())


def test_a_client_that_is_silent_costs_one_deadline(run, caplog):
    nodes = {id: Node(text) for id, text in GROUPS.items()} | {12: Node("1", lambda round: round >= 2 and "silent")}
    _, rows = run(nodes=nodes, rounds=4)
    assert [sorted(row["client"] for row in rows if row["round"] == r) for r in range(1, 5)] == [
        [0, 1, 2, 3],
        *[[0, 2, 3]] * 3,
    ]
    assert warnings(caplog) == [
        f"round {r}: clients 1 have not answered, the round goes on without them" for r in (2, 3, 4)
    ]


def test_a_late_answer_is_not_mixed_but_kept(run, caplog):
    """The client goes on from what it trained, and is a guest of the next round."""
    nodes = {id: Node(text) for id, text in GROUPS.items()} | {12: Node("1", lambda round: round == 2 and "late")}
    _, rows = run(nodes=nodes, rounds=4)
    assert sorted(row["client"] for row in rows if row["round"] == 2) == [0, 2, 3]
    assert sorted(row["client"] for row in rows if row["round"] == 3) == [0, 1, 2, 3]
    assert warnings(caplog) == [
        "round 2: clients 1 have not answered, the round goes on without them",
        "round 2: the answer of clients 1 came after the round: it is not mixed, they go on from it",
    ]


def test_a_node_that_ends_in_a_round_and_comes_back(run, caplog, tmp_path):
    nodes = {id: Node(text, state=str(tmp_path)) for id, text in GROUPS.items()}
    nodes[12].fault = lambda round: round == 2 and "crash"
    _, rows = run(nodes=nodes, rounds=3)
    assert sorted(row["client"] for row in rows if row["round"] == 3) == [0, 1, 2, 3]
    assert warnings(caplog) == [
        "round 2: node 12 (clients 1): ClientApp stopped responding.",
        "round 2: clients 1 have not answered, the round goes on without them",
    ], "and none of a lost state"


def test_a_state_that_was_lost_is_said(run, caplog):
    node = Node("1")

    def forgets(round):
        if round == 3:
            node.context.state = RecordDict()

    node.fault = forgets
    _, rows = run(nodes={id: Node(text) for id, text in GROUPS.items()} | {12: node}, rounds=3)
    assert len(rows) == 12
    assert warnings(caplog) == ["round 3: client 1 has lost its state of round 2, and begins anew"]


def test_a_node_of_another_version_is_left_out(run, caplog, monkeypatch):
    answer = apps.packed

    def other(reply):
        if reply.facts.get("clients") == [1]:
            reply.facts |= {"protocol": 7, "version": "9.9"}
        return answer(reply)

    monkeypatch.setattr(apps, "packed", other)
    _, rows = run(rounds=2, at_least=3)
    assert {row["client"] for row in rows} == {0, 2, 3}
    said = [text for text in warnings(caplog) if "left out" in text]
    assert len(said) == 1 and re.search(
        r"node 12 is left out: speaks protocol 7 \(fastfact 9.9\), this side 1", said[0]
    )


def test_a_node_of_another_package_takes_part_and_is_named(run, caplog, monkeypatch):
    answer = apps.packed

    def other(reply):
        if reply.facts.get("clients") == [1]:
            reply.facts["version"] = "9.9"
        return answer(reply)

    monkeypatch.setattr(apps, "packed", other)
    _, rows = run(rounds=1)
    assert {row["client"] for row in rows} == {0, 1, 2, 3}
    said = f"node 12 has fastfact 9.9, this side {ff.__version__}, which may compute otherwise"
    assert warnings(caplog) == [said]


def test_a_server_of_another_version_is_refused(run, monkeypatch):
    app = client_app(cnn, make_clients(SHAPE, SIZES).__getitem__)
    monkeypatch.setattr(packet, "PROTOCOL", 2)
    asked = packet.Packet.of({"kind": "hello", "config": {}})
    message = Message(apps.packed(asked), 1, "query")
    monkeypatch.setattr(packet, "PROTOCOL", 1)
    reply = app(message, Node("0").context)
    facts = apps.unpacked(reply.content).facts
    assert facts["kind"] == "refused" and "speaks protocol 2" in facts["reason"]


def test_a_node_with_another_model_is_left_out(run, caplog):  # `run` prepares Flower for this process
    data = make_clients(SHAPE, SIZES)
    plain = client_app(cnn, data.__getitem__)

    def wide():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 7), torch.nn.Linear(7, 3)).double()

    other = client_app(wide, data.__getitem__)

    class Mixed(Here):
        def __init__(self, app, nodes):
            super().__init__(lambda m, c: (other if c.node_config["clients"] == "1" else plain)(m, c), nodes)

    grid, rows = Mixed(plain, {id: Node(text) for id, text in GROUPS.items()}), []
    server = server_app(
        "fedavg", cnn, clients=4, rounds=1, at_least=3, on_round=lambda _, r: rows.extend(r), **TRAINING
    )
    server(grid, Context(1, 0, {}, RecordDict(), {}))
    assert {row["client"] for row in rows} == {0, 2, 3}
    assert any("has another model" in text for text in warnings(caplog))


def test_a_server_that_is_started_again_goes_on(run, tmp_path):
    fed = loop("simfed", participation=0.5)
    fed.fit(4)
    nodes = {id: Node(text) for id, text in GROUPS.items()}
    rows = []
    for rounds in (2, 4):
        rows += run("simfed", nodes, rounds=rounds, out=tmp_path / "server", participation=0.5)[1]
    assert [row["loss"] for row in rows] == [row["loss"] for row in fed.history]
    with pytest.raises(ff.federation.RunDirectoryError, match=r"its lr, 0.1 there and 0.2 now, differs"):
        run("simfed", nodes, rounds=5, out=tmp_path / "server", participation=0.5, lr=0.2)


def test_clients_that_move_to_another_node(run, caplog, tmp_path):
    nodes = {id: Node(text, state=str(tmp_path)) for id, text in GROUPS.items()}
    nodes[12].fault = lambda round: round >= 2 and "gone"
    nodes[14] = Node("1", lambda round: round < 2 and "gone", state=str(tmp_path))
    _, rows = run(nodes=nodes, rounds=4)
    assert sorted(row["client"] for row in rows if row["round"] == 4) == [0, 1, 2, 3]
    assert any(text == "clients 1 were at node 12 and are at node 14 now" for text in warnings(caplog))
    assert not any("lost" in text for text in warnings(caplog))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("train", {"seconds": 5}, "its seconds are 5, must be three numbers"),
        ("train", {"seconds": ["a", "b", "c"]}, "its seconds are .*, must be three numbers"),
        ("train", {"seconds": [1, 2, float("nan")]}, "its seconds are .*, must be three numbers"),
        ("train", {"lengths": ["abc"]}, "a message of it has 'abc' bytes"),
        ("train", {"row": {"accuracy": 10**400}}, "client 1: accuracy is 1000"),
        ("train", {"row": {"client": 3}}, "answers for client 3, which was not asked of it"),
        ("hello", {"samples": [10**400]}, "has clients .1. with .1000"),
        ("hello", {"sample": [[float("inf")], "float64"]}, "has samples .*inf"),
    ],
)
def test_a_node_whose_facts_are_none_is_left_out(run, caplog, monkeypatch, kind, change, said):
    """With one line, and the others' rounds go on."""
    answer = apps.packed

    def other(reply):
        facts = reply.facts
        theirs = (
            facts.get("clients") == [1] if kind == "hello" else facts.get("kind") == "train" and "config" not in facts
        )
        if theirs and kind == "train":
            theirs = [client["row"]["client"] for client in facts["clients"]] == [1]
        if theirs:
            facts = copy.deepcopy(facts)
            for name, value in change.items():
                if name == "row":
                    facts["clients"][0]["row"] |= value
                elif name == "lengths":
                    facts["clients"][0]["lengths"] = value
                else:
                    facts[name] = value
            reply = packet.Packet(facts, reply.body)
        return answer(reply)

    monkeypatch.setattr(apps, "packed", other)
    _, rows = run(rounds=2, at_least=3)
    assert [row["client"] for row in rows] == [0, 2, 3] * 2
    (told,) = {text.partition(": ")[2] for text in warnings(caplog) if "left out" in text}
    assert re.search(rf"node 12( \(clients 1\))? is left out: {said}", told)


def test_nodes_whose_clients_overlap(run, caplog):
    """What two nodes say they have is the later one's; the other keeps the rest."""
    nodes = {11: Node("0-2"), 12: Node("1"), 13: Node("2,3")}
    _, rows = run(nodes=nodes, rounds=2)
    assert [row["client"] for row in rows] == [0, 1, 2, 3] * 2
    assert warnings(caplog) == [
        "clients 1 were at node 11 and are at node 12 now",
        "clients 2 were at node 11 and are at node 13 now",
    ]


def test_numbers_of_clients():
    assert numbers_of({"clients": "0,3, 6-8"}) == [0, 3, 6, 7, 8] and numbers_of({"partition-id": 4}) == [4]
    for wrong in ("", "a", "1-", "-2"):
        with pytest.raises(ValueError, match=r"of this node: must be numbers and ranges"):
            numbers_of({"clients": wrong})
    with pytest.raises(ValueError, match=r"which clients this node has is not said"):
        numbers_of({})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"clients": 0}, r"server_app\(clients=0\): must be a number of at least 1"),
        ({"deadline": -1.0}, r"server_app\(deadline=-1.0\)"),
        ({"at_least": 9}, r"server_app\(at_least=9\): there are 4 clients"),
        ({"learning_rate": 0.1}, r"server_app\(learning_rate=\): unknown"),
    ],
)
def test_arguments(options, error):
    with pytest.raises(ValueError, match=error):
        server_app("fedavg", cnn, **{"clients": 4, "rounds": 1} | options)


def test_messages_that_are_none():
    content = RecordDict({"other": ConfigRecord({"a": 1})})
    with pytest.raises(packet.RefusedError, match="not a message of fastfact"):
        apps.unpacked(content)


def test_the_page(run, caplog):  # `run` prepares Flower for this process
    page = Path(__file__).parents[2] / "docs" / "flower.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names: dict = {}
    exec(compile(code, str(page), "exec"), names)
    names["server"](Here(names["client"], {k: Node(str(k)) for k in range(4)}), Context(1, 0, {}, RecordDict(), {}))
    assert [text for text in caplog.messages if text.startswith("fastfact: round 2: 4 clients, accuracy")]
