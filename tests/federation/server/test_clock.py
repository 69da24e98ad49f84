"""The simulated clock with speeds made by hand: what rounds take, who is late, and buffered asynchronous rounds."""

import heapq
import statistics

import pytest
import torch
from small import make_clients, mlp
from torch.func import functional_call
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.server.clock import Clock, arrivals
from fastfact.federation.state import generator_for

SIZES = (10, 7, 12, 8, 9)
SETTINGS = {"epochs": 2, "batch_size": 5, "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "seed": 3, "cohort": 1}


def federation(method="fedavg", **options) -> ff.Federation:
    return ff.Federation(mlp, make_clients(sizes=SIZES), method, **SETTINGS | options)


def rows(fed, *keys):
    return [tuple(row[key] for key in keys) for row in fed.history]


def test_what_a_round_takes():
    clock = Clock([2.0, 4.0], 100.0, 0.0, 0.0, seed=0)
    assert clock.seconds(0, 10, 300, 50) == 5 + 3.5
    assert clock.seconds(1, 10, 0, 0) == 2.5
    assert Clock(None, 100.0, 0.0, 0.0, 0).seconds(7, 10**9, 25, 25) == 0.5
    assert Clock(2.0, None, 0.0, 0.0, 0).seconds(7, 1, 10**9, 10**9) == 0.5


def test_speeds_that_are_drawn():
    """Log-normal around the median, a client's own whoever else there is; links apart from speeds."""
    clock = Clock(50.0, 1e6, 0.8, 0.0, seed=4)
    taken = [clock.seconds(client, 50, 0, 0) for client in range(400)]
    assert taken[7] == Clock(50.0, None, 0.8, 0.3, seed=4).seconds(7, 50, 0, 0)
    assert taken != [Clock(50.0, 1e6, 0.8, 0.0, seed=5).seconds(client, 50, 0, 0) for client in range(400)]
    logs = [torch.tensor(seconds).log().item() for seconds in taken]
    assert abs(statistics.median(logs)) < 0.1 and statistics.stdev(logs) == pytest.approx(0.8, rel=0.1)
    assert len({clock.seconds(client, 0, 1, 1) for client in range(5)}) == 1


def test_arrivals_by_hand():
    # Two at work: 0 until 5, and 1 from 0 to 3. Then 2 takes the place of 1, and so on.
    seconds = {1: 3.0, 2: 4.0, 3: 1.0}
    assert arrivals(0.0, {0: 5.0}, [1, 2, 3], seconds, (), 2, 1) == ([1], {0: 5.0}, 3.0)
    assert arrivals(0.0, {0: 5.0}, [1, 2, 3], seconds, (), 2, 2) == ([1, 0], {2: 7.0}, 5.0)
    assert arrivals(0.0, {0: 5.0}, [1, 2, 3], seconds, (), 2, 3) == ([1, 0, 3], {2: 7.0}, 6.0)
    assert arrivals(0.0, {0: 5.0}, [1, 2, 3], seconds, (), 2, 9) == ([1, 0, 3, 2], {}, 7.0)
    # Who is lost makes room and does not count.
    assert arrivals(0.0, {0: 5.0}, [1, 2, 3], seconds, (1,), 2, 1) == ([0], {2: 7.0}, 5.0)
    assert arrivals(2.0, {}, [1], seconds, (1,), 1, 1) == ([], {}, 5.0)


def test_rows_have_the_time_of_the_clock(make):
    fed = federation(speed=[10.0, 7.0, 6.0, 8.0, 3.0])
    fed.fit(3)
    # Two epochs: 2 n / speed seconds, and the last is waited for.
    assert rows(fed, "duration")[:5] == [(2.0,), (2.0,), (4.0,), (2.0,), (6.0,)]
    assert rows(fed, "round", "time")[::5] == [(1, 6.0), (2, 12.0), (3, 18.0)]
    assert [point[0] for point in fed.history.curve(over="time")] == [6.0, 12.0, 18.0]
    assert [p[1:] for p in fed.history.curve(over="time")] == [p[1:] for p in fed.history.curve()]
    linked = federation(bandwidth=[1e3, 2e3, 4e3, 5e3, 1e4])
    linked.fit(1)
    for row, bandwidth in zip(linked.history, (1e3, 2e3, 4e3, 5e3, 1e4), strict=True):
        assert row["duration"] == pytest.approx((row["bytes_up"] + row["bytes_down"]) / bandwidth)
    without = federation()
    without.fit(3)
    assert "time" not in without.history[0] and without.history.time() == 0
    for name, tensor in without.states.state.items():
        assert torch.equal(tensor, fed.states.state[name])
    with pytest.raises(ValueError, match=r"curve\(over='time'\)"):
        without.history.curve(over="time")


def test_phases_count_by_their_samples():
    # FedRep: two epochs of the head, one of the body.
    fed = federation("fedrep", speed=1.0)
    fed.fit(1)
    assert rows(fed, "duration") == [(3.0 * n,) for n in SIZES]


@pytest.mark.parametrize("cohort", [1, 5])
def test_late_clients_are_left_out(cohort):
    speeds = [10.0, 7.0, 6.0, 8.0, 3.0]
    fed = federation(speed=speeds, deadline=3.0, cohort=cohort)
    fed.fit(2)
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    late = [client for client, *_ in rows(fed, "client", "left_out")[:5] if fed.history[client]["left_out"]]
    assert late == [2, 4] and fed.history[2]["left_out"] == "late: its round takes 4 s, the deadline is 3 s"
    assert rows(fed, "round", "time")[::5] == [(1, 3.0), (2, 6.0)]
    assert fed.reported.clients == [0, 1, 3]
    initial = federation().states.state
    for name, tensor in fed.states.state.items():
        for client in late:
            assert torch.equal(tensor[client], initial[name][client])
    # They download, and what they would have sent does not arrive.
    up, down = fed.ledger.by_client("up"), fed.ledger.by_client("down")
    assert set(up) == {0, 1, 3} and set(down) == set(range(5))
    assert all(row["bytes_up"] == (0 if row["client"] in late else up[0] // 2) for row in fed.history)
    # The next download is the mean of the others.
    mixed = dict(fed.mixed()[4].named_parameters())
    for name, param in mixed.items():
        mean = sum(SIZES[k] * before[name][k] for k in (0, 1, 3)) / sum(SIZES[k] for k in (0, 1, 3))
        torch.testing.assert_close(param.detach(), mean)


def test_nobody_in_time():
    fed = federation(speed=1.0, deadline=1.0)
    fed.fit(2)
    assert fed.reported is None and fed.ledger.up == 0 and all(row["left_out"] for row in fed.history)
    assert fed.history.time() == 2.0


AT_WORK, BUFFER = 3, 2
SPEEDS = [20.0, 2.0, 9.0, 1.0, 13.0]


def train(start, x, y, round, client):
    """Plain SGD from `start`."""
    state, order, model = dict(start), generator_for(SETTINGS["seed"], round, client, "order"), mlp()
    for _ in range(SETTINGS["epochs"]):
        for some in torch.randperm(len(y), generator=order).split(SETTINGS["batch_size"]):
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
            loss = F.cross_entropy(functional_call(model, leaves, (x[some],)), y[some])
            grads = torch.autograd.grad(loss, leaves.values())
            state = {n: state[n] - SETTINGS["lr"] * g for n, g in zip(state, grads, strict=True)}
    return state


def fedbuff(x, rounds, server_lr, staleness):
    """Algorithm 1 as one stream of events. Returns x after each step of the server, and when that was.

    Which client begins next is drawn, of those that were not at work at the last step of the server.
    """
    data, now, step, total, count = [c.train for c in make_clients(sizes=SIZES)], 0.0, 0, None, 0
    at_work, models, begun, made = [], [x], [], []

    def available():
        order = torch.randperm(5, generator=generator_for(SETTINGS["seed"], step + 1, -1, "select")).tolist()
        there = {client for _, client, *_ in at_work}
        return [client for client in order if client not in there]

    def begin(client):
        y = train(models[-1], *data[client], step + 1, client)
        update = {name: y[name] - models[-1][name] for name in y}
        begun.append((step + 1, client))
        heapq.heappush(at_work, (now + 2 * SIZES[client] / SPEEDS[client], client, step, update))

    queue = available()
    while len(at_work) < AT_WORK:
        begin(queue.pop(0))
    while step < rounds:
        now, _, version, update = heapq.heappop(at_work)
        scale = 1 / (1 + step - version) ** staleness
        update = {name: scale * tensor for name, tensor in update.items()}
        total = update if total is None else {name: total[name] + update[name] for name in total}
        count += 1
        if count == BUFFER:
            models.append({name: models[-1][name] + server_lr * total[name] / BUFFER for name in total})
            made.append((now, list(begun)))
            step, total, count = step + 1, None, 0
            queue = available()
        begin(queue.pop(0))
    return models, made


@pytest.mark.parametrize(("server_lr", "staleness"), [(1.0, 0.5), (0.7, 0.0), (1.3, 2.0)])
def test_fedbuff(server_lr, staleness):
    method = ff.methods.FedBuff(server_lr=server_lr, staleness=staleness)
    fed = federation(method, speed=SPEEDS, buffer=BUFFER, participation=AT_WORK / 5)
    initial = {name: tensor[0].clone() for name, tensor in fed.states.state.items() if name in fed.infos}
    models, made = fedbuff(initial, 7, server_lr, staleness)
    stale = 0
    for step in range(1, 8):
        fed.fit(1)
        stale = max(stale, *fed.reported.staleness)
        for client in range(5):
            for name, param in fed.mixed()[client].named_parameters():
                torch.testing.assert_close(param.detach(), models[step][name], rtol=1e-9, atol=1e-12)
        now, begun = made[step - 1]
        assert fed.history.time() == pytest.approx(now)
        assert sorted(begun) == rows(fed, "round", "client")
        assert len(fed.reported.waiting) == AT_WORK - 1
    assert stale > 1


@pytest.mark.parametrize("method", ["fedbuff", "fedavg", "fedrep", "scaffold", "clustered-fl", "simfed"])
def test_asynchronous_rounds_resume_bit_for_bit(method, tmp_path, same):
    options = {"speed": 5.0, "speed_spread": 1.0, "bandwidth": 1e4, "buffer": 2, "participation": 0.6}
    straight, saved = federation(method, **options), federation(method, **options)
    straight.fit(6)
    saved.fit(3, out=tmp_path)
    resumed = ff.Federation.load(tmp_path, model=mlp, clients=make_clients(sizes=SIZES))
    assert resumed.select(4) == saved.select(4) and resumed.select(2) == saved.select(2)
    resumed.fit(3)
    assert same(straight, resumed)
    assert straight.reported.report() == resumed.reported.report()
    assert any(row["time"] != straight.history[0]["time"] for row in straight.history)


def test_who_waits_is_not_asked_again():
    """A client at work neither trains nor downloads; what it has is what it sends when it arrives."""
    fed = federation("fedbuff", speed=SPEEDS, buffer=2, participation=0.6)
    for _ in range(6):
        at_work = {client for client, *_ in fed.reported.waiting} if fed.reported else set()
        held = {k: {n: t[k].clone() for n, t in fed.states.state.items()} for k in at_work}
        assert not at_work & set(fed.select(fed.round + 1))
        fed.fit(1)
        assert all(torch.equal(fed.states.state[n][k], t) for k in at_work for n, t in held[k].items())
    with pytest.raises(ValueError, match=r"select\(round=9\): depends on the rounds before"):
        fed.select(9)


def test_a_client_that_diverged_makes_room():
    clients = make_clients(sizes=SIZES)
    x, y = clients[4].train
    clients[4] = ff.Client(train=(x * 1e200, y), test=clients[4].test)
    fed = ff.Federation(mlp, clients, "fedbuff", **SETTINGS, speed=SPEEDS, buffer=2, participation=0.6)
    fed.fit(6)
    assert any(row["left_out"] for row in fed.history if row["client"] == 4)
    assert not any(row["left_out"] for row in fed.history if row["client"] != 4)
    assert all(len(fed.reported.waiting) <= 2 for _ in [0]) and 4 not in fed.reported.clients


def test_without_a_buffer_fedbuff_is_fedavg_with_even_weights():
    fed = federation("fedbuff")
    fed.fit(2)
    for name, param in fed.mixed()[0].named_parameters():
        torch.testing.assert_close(param.detach(), fed.states.state[name].mean(0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speed": 0.0}, r"speed=0.0\): must be a number above 0, a list of one for each client, or None"),
        ({"speed": [1.0, -1.0]}, r"speed=\[1.0, -1.0\]"),
        ({"speed": "fast"}, r"speed='fast'"),
        ({"speed": [1.0, 2.0]}, r"speed=\): has 2 numbers, must have one for each of 5 clients"),
        ({"bandwidth": []}, r"bandwidth=\[\]"),
        ({"speed": 1.0, "speed_spread": -1.0}, r"speed_spread=-1.0"),
        ({"deadline": 1.0}, r"deadline=1.0\): needs a clock: speed, bandwidth or both"),
        ({"buffer": 2}, r"buffer=2\): needs a clock"),
        ({"speed": 1.0, "deadline": 0.0}, r"deadline=0.0"),
        ({"speed": 1.0, "buffer": -1}, r"buffer=-1"),
        ({"speed": 1.0, "buffer": 2, "deadline": 1.0}, r"asynchronous rounds \(buffer=2\) wait for nobody"),
        ({"speed": 1.0, "buffer": 2}, r"buffer=2\): participation=1 has 5 of 5 clients at work, and 1 more begin"),
        ({"speed": 1.0, "buffer": 1, "method": "stand-alone"}, r"stand-alone shares nothing that could arrive"),
        ({"speed": 1.0, "buffer": 1, "method": "fedfomo"}, r"fedfomo mixes at its clients"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        federation(**options)
