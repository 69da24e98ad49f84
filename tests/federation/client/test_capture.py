"""A cohort's gradient on the CPU is captured once and replayed: same numbers, and only where nothing else is done."""

import functools
import math
import random

import pytest
import torch
from torch import nn
from torch.func import grad_and_value, vmap

from fastfact import ops
from fastfact.federation.client import capture
from fastfact.federation.server.exchange import not_finite
from fastfact.ops.backends import _dispatched, implementation


@pytest.fixture
def replays(monkeypatch):
    """How often each recording was replayed, None for one that failed; there is one in the second call of a shape."""
    counts, kept, begin = [], capture.capture, capture.Captured.__init__
    monkeypatch.setattr(
        capture.Captured, "__init__", lambda self, function, model, _, *rest: begin(self, function, model, 0, *rest)
    )

    def record(function, model, *tensors):
        replay = kept(function, model, *tensors)
        counts.append(0 if replay else None)
        at = len(counts) - 1

        def counted(*tensors):
            counts[at] += 1
            return replay(*tensors)

        return counted if replay else None

    monkeypatch.setattr(capture, "capture", record)
    return counts


@pytest.mark.parametrize("method, sizes", [("factorized-fl-beta", (16, 16, 16, 16)), ("feddecomp", (16, 13, 16, 16))])
def test_replays_train_and_evaluate_as_the_function_does(make, same, replays, method, sizes):
    """Batch-norm moves its statistics in the forward; cohorts share what was captured."""

    def run(graphs):
        fed = make(make.cnn, (1, 6, 6), method=method, sizes=sizes, cohort=2, epochs=4, graphs=graphs)
        fed.fit(2)
        return fed

    plain = run(graphs=False)
    assert not replays
    assert same(plain, run(graphs=True))
    assert None not in replays and len(replays) >= 2 and sum(replays) > 2 * len(replays)


def wide() -> nn.Module:
    """Its first layer is a product with the rows of a batch, and so is one more."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.skip = nn.Linear(36, 8), nn.Linear(36, 3, bias=False)
            self.second = nn.Linear(8, 3)

        def forward(self, x):
            x = x.flatten(1)
            return self.second(self.first(x).relu()) + self.skip(x)

    return Wide().double()


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (9, 7, 12, 16)])
def test_rows_are_read_where_they_are(make, same, replays, monkeypatch, sizes):
    """Replayed or not, a cohort does the same, and what its clients do alone, though two have the same samples."""
    calls = {name: [] for name in ("gather_rows", "rows_linear", "rows_linear_backward")}
    for name, seen in calls.items():
        kernel = implementation(name)
        monkeypatch.setitem(_dispatched, name, lambda *a, k=kernel, s=seen: (s.append(a[0][0].dim()), k(*a))[1])
    clients = make.clients((1, 6, 6), sizes)
    clients[1] = clients[0]

    def run(**options):
        fed = make(wide, clients=clients, epochs=4, **options)
        for seen in calls.values():
            seen.clear()
        fed.fit(2)
        return fed

    alone = run(cohort=1)
    assert not any(calls.values())
    plain = run(cohort=2, graphs=False)
    steps, batches = calls["gather_rows"].count(1), calls["gather_rows"].count(4)
    assert len(calls["rows_linear_backward"]) == 2 * steps > 0
    assert len(calls["rows_linear"]) == 2 * batches > 2 * steps, "they are evaluated so too"
    ran = len(calls["rows_linear"])
    assert same(plain, run(cohort=2))
    assert None not in replays and sum(replays) > 2 * len(replays)
    assert 0 < len(calls["rows_linear"]) < ran
    for name, tensor in alone.states.state.items():
        torch.testing.assert_close(plain.states.state[name], tensor, rtol=1e-10, atol=1e-10)


def test_what_nobody_reads_is_left_out(make):
    model, x = nn.Linear(6, 3).double(), [torch.randn(5, 6, dtype=torch.float64) for _ in range(2)]
    weight = torch.randn(2, 3, 6, dtype=torch.float64)

    def function(*tensors):
        with ops.GatheredBatch(tensors[:2], tensors[2]) as rows:
            return [rows.x @ tensors[3].transpose(1, 2)]

    replay = capture.capture(function, model, [*x, torch.tensor([[0, 4], [3, 3]]), weight], 2)
    targets = [str(node.target) for node in replay.__self__.graph.nodes]
    assert "fastfact.rows_linear.default" in targets and "fastfact.gather_rows.default" not in targets
    index, other = torch.tensor([[1, 2], [6, 0]]), torch.randn(7, 6, dtype=torch.float64)
    (found,) = replay(x[0], other, index, weight)
    torch.testing.assert_close(found, torch.stack([x[0][index[0]], other[index[1]]]) @ weight.transpose(1, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_a_classifier_on_the_samples_is_one_operation(bias):
    """Its products and the loss between them; a model in which something else reads the logits stays as it is."""
    samples, index = [torch.randn(n, 6, dtype=torch.float64) for n in (5, 4)], torch.tensor([[0, 4, 2], [3, 1, 3]])
    state = [torch.randn(2, 3, 6, dtype=torch.float64)] + [torch.randn(2, 3, dtype=torch.float64)] * bias

    def gradients(objective, *tensors):
        with ops.GatheredBatch(tensors[:2], tensors[2]) as rows:

            def loss(state, x, y):
                return objective(nn.functional.linear(x, *state), y)

            grads, losses = vmap(grad_and_value(loss))(tensors[3:], rows.x, tensors[2] % 3)
        return [losses, *grads]

    def penalized(logits, y):
        return ops.cross_entropy(logits, y) + logits.square().mean()

    for objective, joint in ((ops.cross_entropy, True), (penalized, False)):
        function = functools.partial(gradients, objective)
        replay = capture.capture(function, nn.Linear(6, 3), [*samples, index, *state], 2)
        targets = [node.target for node in replay.__self__.graph.nodes]
        assert (torch.ops.fastfact.rows_softmax_loss.default in targets) == joint
        assert (torch.ops.fastfact.rows_linear.default in targets) != joint
        others = [*samples[::-1], index.flip(1) % 4, *(tensor / 2 for tensor in state)]
        for found, wanted in zip(replay(*others), function(*others), strict=True):
            assert torch.equal(found, wanted)


class Counting(nn.Module):
    """Its forward depends on how often it ran."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3).double(), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * (1 + self.calls % 2)


class Drawing(Counting):
    """Draws from Python's generator."""

    def forward(self, x):
        return self.layer(x) * random.random()


class Keeping(Counting):
    """Holds on to what it saw last."""

    def __init__(self):
        super().__init__()
        self._last = []

    def forward(self, x):
        self._last = [*self._last[-1:], x.detach()]
        return self.layer(x)


class Branching(Counting):
    """Depends on the numbers."""

    def forward(self, x):
        return self.layer(x) * (2 if x.sum() > 0 else 1)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 3)).double()
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize("model", [Counting, Drawing, Keeping, Branching, hooked])
def test_what_is_more_than_tensors_is_not_captured(model):
    model, x = model(), torch.randn(2, 6, dtype=torch.float64)

    def function(x):
        return [model(x)]

    assert capture.capture(function, model, [x]) is None
    assert capture.capture(lambda x: [nn.functional.relu(x)], nn.ReLU(), [x]) is not None


def test_a_recording_leaves_its_tensors_alone_and_changes_those_of_a_replay():
    def function(x, y):
        y.add_(x)
        return [x * y.sum()]

    tensors = [torch.arange(3.0), torch.ones(3)]
    replay = capture.capture(function, nn.Identity(), tensors)
    assert tensors[1].tolist() == [1, 1, 1]
    (out,) = replay(torch.full((3,), 2.0), tensors[1])
    assert tensors[1].tolist() == [3, 3, 3] and out.tolist() == [18, 18, 18]


def test_a_shape_that_comes_again_is_recorded(replays):
    function = capture.Captured(lambda x: [x + 1], nn.Identity(), 0)
    for n in range(1, 9):
        for _ in range(2):
            assert function(torch.zeros(n))[0].shape == (n,)
    assert len(replays) == 8


def test_recordings_take_a_share_of_the_time(monkeypatch):
    now = 0.0

    def run(x):
        nonlocal now
        now += 1
        return [x + 1]

    def record(*arguments):
        nonlocal now
        now += 5
        replays.append(arguments)

    monkeypatch.setattr(capture.time, "perf_counter", lambda: now)
    monkeypatch.setattr(capture, "capture", record)
    monkeypatch.setattr(capture, "FIRST", 3)
    function, made, replays = capture.Captured(run, nn.Identity(), 4), [], []
    for call in range(60):
        function(torch.zeros(call % 8 + 1))
        made.append(len(replays))
    # The first is taken to last three calls, each lasts five: due after 12, 20 and 40 calls (in the 20th
    # the shape has one).
    assert [made.index(n) for n in (1, 2, 3)] == [12, 21, 40]


@pytest.mark.parametrize("tests", [(5, 5, 5), (5, 4, 5)])
def test_a_cohort_is_evaluated_as_its_clients_are(make, tests):
    import fastfact as ff

    g = torch.Generator().manual_seed(0)

    def samples(n):
        return torch.randn(n, 1, 6, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)

    clients = [ff.Client(samples(8), samples(n)) for n in tests]
    fed = make(make.cnn, clients=clients, cohort=3)
    fed.fit(1)
    state, data = fed.states.state, [client.test for client in clients]
    assert (
        fed.trainer.evaluate(state, data, 3)
        == fed.trainer.evaluate(state, data)
        == fed.trainer.evaluate(state, data, 2)
    )


def test_a_norm_that_overflows_is_no_reason_to_leave_a_client_out():
    big = torch.full((3, 4), 1e19)
    big[1, 2] = math.inf
    state = {"a": torch.zeros(3, 2), "b": big, "n": torch.zeros(3, dtype=torch.long)}
    state["a"][2, 0] = math.nan
    assert not_finite([7, 8, 9], state) == {8: "b has NaN or inf", 9: "a has NaN or inf"}
