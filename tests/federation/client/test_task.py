"""Losses other than the cross-entropy of one label a sample, and metrics beside the accuracy: against plain loops."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.client.data import batches
from fastfact.federation.client.task import Task
from fastfact.federation.server.exchange import diverged
from fastfact.federation.state import generator_for

SIZES = (10, 7, 12)
DRAW = torch.Generator().manual_seed(5)


def clients_of(target, shape=(6,), tokens=None, sizes=SIZES) -> list[ff.Client]:
    """target(x) → y."""
    made = []
    for n in sizes:
        x = torch.randn(n + 5, *shape, generator=DRAW, dtype=torch.float64)
        x = x if tokens is None else torch.randint(tokens, (n + 5, *shape), generator=DRAW)
        y = target(x)
        made.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return made


def head(outputs):
    return lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def pixels():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()


class Language(nn.Module):
    """Logits of each place, as the models of transformers give them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.double()

    def forward(self, tokens):
        return SimpleNamespace(logits=self.out(torch.tanh(self.embedding(tokens).cumsum(1))))


def some_ignored(y):
    return torch.where(torch.rand(y.shape, generator=DRAW) < 0.3, -100, y)


def numbers(x):
    return x.sum(1) + 1


def classes_of_pixels(x):
    return some_ignored((x[:, 0] > 0).long() + (x[:, 0] > 1))


TASKS = {
    "mse": (head(1), lambda: clients_of(numbers), lambda out, y: F.mse_loss(out[:, 0], y)),
    "bce": (
        head(3),
        lambda: clients_of(lambda x: x[:, :3] > 0),
        lambda out, y: F.binary_cross_entropy_with_logits(out, y.double()),
    ),
    "cross_entropy": (pixels, lambda: clients_of(classes_of_pixels, (1, 4, 4)), F.cross_entropy),
    "next_token": (
        Language,
        lambda: clients_of(some_ignored, (7,), tokens=11),
        lambda out, y: F.cross_entropy(out[:, :-1].reshape(-1, 11), y[:, 1:].reshape(-1)),
    ),
}


def output_of(model, x):
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("cohort", [1, 3, "threads"])
@pytest.mark.parametrize("name", TASKS)
def test_each_loss_trains_as_in_a_loop(make, name, cohort):
    build, made, loss = TASKS[name]
    clients = made()
    fed = make(build, clients=clients, method="stand-alone", loss=name, metrics=["test_loss"], cohort=cohort)
    models = [fed.models[k].train() for k in range(3)]
    fed.fit(2)
    for k, model in enumerate(models):
        s, (x, y) = fed.settings, clients[k].train
        for round in (1, 2):
            options = {"momentum": s["momentum"], "weight_decay": s["weight_decay"]}
            optimizer = torch.optim.SGD(model.parameters(), s["lr"], **options)
            order, losses = generator_for(s["seed"], round, k, "order"), 0.0
            for _ in range(s["epochs"]):
                permutation = torch.randperm(len(y), generator=order)
                for begin, end in batches(len(y), s["batch_size"]):
                    some = permutation[begin:end]
                    optimizer.zero_grad()
                    value = loss(output_of(model, x[some]), y[some])
                    losses += value.item() * (end - begin) / len(y) / s["epochs"]
                    value.backward()
                    optimizer.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(fed.models[k].get_parameter(name), param, rtol=0, atol=1e-13)
        row = fed.history.last()[k]
        assert row["loss"] == pytest.approx(losses, abs=1e-12)
        with torch.no_grad():
            expected = loss(output_of(model, clients[k].test[0]), clients[k].test[1])
        assert row["test_loss"] == pytest.approx(expected.item(), abs=1e-12)


def test_accuracy_is_of_what_has_classes(make):
    found = {}
    for name, (build, made, _) in TASKS.items():
        fed = make(build, clients=made(), loss=name)
        fed.fit(1)
        found[name] = fed.history[0]["accuracy"]
        x, y = fed.clients[0].test
        out = output_of(fed.models[0], x).detach()
        if name == "bce":
            assert found[name] == pytest.approx(((out > 0) == y).double().mean().item())
        elif name != "mse":
            out, y = (out.argmax(1), y) if name == "cross_entropy" else (out.argmax(2)[:, :-1], y[:, 1:])
            assert found[name] == pytest.approx((out == y)[y != -100].double().mean().item())
    assert found["mse"] is None


@pytest.mark.parametrize("loss", ["mse", lambda out, y: F.l1_loss(out[:, 0], y) * 1e6])
def test_a_loss_in_the_unit_of_its_targets_may_be_large(make, loss):
    fed = make(head(1), clients=clients_of(lambda x: 1e4 * numbers(x)), loss=loss, lr=1e-9, weight_decay=0.0)
    fed.fit(1)
    assert all(row["left_out"] is None and row["loss"] > 1e6 for row in fed.history)


def test_a_cross_entropy_may_not():
    for name, limit in (
        ("cross_entropy", 1e6),
        ("next_token", 1e6),
        ("bce", 1e6),
        ("mse", torch.inf),
        (None, torch.inf),
    ):
        losses = [1e6, 1e7, torch.inf, torch.nan, torch.nan]
        found = diverged(range(5), losses, {4: "known"}, Task(name=name, plain=False).largest_loss)
        assert sorted(found) == ([1, 2, 3] if limit == 1e6 else [2, 3])


def test_a_batch_of_which_nothing_counts_is_no_loss(make):
    y = torch.full((10, 4, 4), -100)
    y[0] = 1
    x = torch.randn(10, 1, 4, 4, generator=DRAW, dtype=torch.float64)
    fed = make(pixels, clients=[ff.Client(train=(x, y), test=(x, y))] * 2, batch_size=2)
    fed.fit(1)
    assert [row["left_out"] for row in fed.history] == [None, None]


def pinball(output, target):
    error = target - output[:, 0]
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def spread(output, target):
    return output.std()


@pytest.mark.parametrize("cohort", [1, 3])
def test_functions_of_ones_own_and_what_is_recorded_of_them(make, same, tmp_path, cohort):
    options = {"loss": pinball, "metrics": {"spread": spread, "above": lambda out, y: (out[:, 0] > y).double().mean()}}
    clients = clients_of(numbers)
    whole = make(head(1), clients=clients, cohort=cohort, **options)
    whole.fit(3)
    with torch.no_grad():
        output = whole.models[1](clients[1].test[0])
    row = whole.history.last()[1]
    assert row["spread"] == pytest.approx(output.std().item()) and row["spread_before"] is not None
    assert row["above"] == pytest.approx((output[:, 0] > clients[1].test[1]).double().mean().item())
    assert whole.history[0]["spread_before"] is None

    make(head(1), clients=clients, cohort=cohort, **options).fit(1, out=tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["spread"] == whole.history[1]["spread"]
    with pytest.raises(ValueError, match=r"metrics '.*lambda.*' cannot be found again, pass metrics="):
        ff.Federation.load(tmp_path / "run", head(1), clients)
    again = ff.Federation.load(tmp_path / "run", head(1), clients, metrics=options["metrics"])
    assert again.settings["loss"] is pinball
    again.fit(2)
    assert same(whole, again)


@pytest.mark.parametrize(
    "method",
    [
        "fedprox",
        "fedamp",
        "agnostic-fl",
        "per-fedavg",
        "fedfomo",
        "factorized-fl-alpha",
        "moon",
        "ditto",
        "apfl",
        "scaffold",
        "pfedme",
        "fedbabu",
    ],
)
def test_methods_take_the_loss_of_the_federation(make, method):
    clients = clients_of(numbers)
    lost = {}
    for scale in (1.0, 4.0):

        def loss(output, target, scale=scale):
            return scale * F.mse_loss(output[:, 0], target)

        settings = {"per-fedavg": {"alpha": 1e-9}, "moon": {"contrast": 1e-12}, "pfedme": {"inner_lr": 1e-12}}
        fed = make(head(1), clients=clients, method=method, settings=settings.get(method), loss=loss, lr=1e-9, epochs=1)
        fed.fit(2)
        lost[scale] = fed.history[0]["loss"]
    # Nothing moves, and what methods add to the loss is zero there.
    assert lost[4.0] == pytest.approx(4 * lost[1.0], rel=1e-5)


@pytest.mark.parametrize("method", ["fedem", "fedrod", "pfedsd"])
def test_methods_of_class_labels_refuse_others(make, method):
    with pytest.raises(ValueError, match=rf"method='{method}'\): its loss is a cross-entropy of one label a sample"):
        make(head(1), clients=clients_of(numbers), method=method, loss="mse")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (numbers, {}, r"loss='cross_entropy'\): the model gives \[2, 3\] for targets y torch.float64 \[2\]"),
        (numbers, {"loss": "mse"}, r"loss='mse'\): .* outputs are \[3\] each, targets \[\]: must be the same"),
        (
            numbers,
            {"loss": "huber"},
            "loss='huber'.: must be one of cross_entropy, mse, bce, next_token, or a function",
        ),
        (numbers, {"loss": lambda out, y: out.mean(1)}, r"gives \[2\] for a batch, must give a number"),
        (numbers, {"metrics": ["f1"]}, "must be a list of test_loss, mse, mae, top5, or functions"),
        (numbers, {"metrics": {"loss": spread}}, "by names of yours"),
        (
            numbers,
            {"metrics": {"a": spread, "a_before": spread}},
            r"metrics=\['a', 'a_before'\].: no name may end in _bef",
        ),
        (numbers, {"loss": lambda out, y: out[:, 7].mean()}, "index 7 is out of bounds"),
    ],
)
def test_what_does_not_go_together_is_refused(make, target, options, message):
    with pytest.raises(ValueError, match=message):
        make(head(3), clients=clients_of(target), **options)


class WithAuxiliary(nn.Module):
    """Two outputs in training."""

    def __init__(self):
        super().__init__()
        self.main, self.other = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x):
        return (self.main(x), self.other(x)) if self.training else self.main(x)


@pytest.mark.parametrize(("cohort", "precision"), [(1, "full"), (3, "full"), (1, "bfloat16")])
def test_a_loss_may_take_what_training_alone_gives(make, cohort, precision):
    def loss(output, y):
        return sum(F.cross_entropy(one, y) for one in (output if isinstance(output, tuple) else (output,)))

    options = {"loss": loss, "cohort": cohort, "precision": precision}
    fed = make(WithAuxiliary, clients=clients_of(lambda x: x[:, :3].argmax(1)), **options)
    before = fed.initial["other.weight"].clone()
    fed.fit(1)
    assert not any(row["left_out"] for row in fed.history) and not torch.equal(
        fed.states.state["other.weight"][:1], before
    )


@pytest.mark.parametrize("name", ["cross_entropy", "next_token"])
def test_labels_of_several_places_are_those_of_the_model(make, name):
    """Where they count."""
    model, clients, _ = TASKS[name]
    good = clients()
    x, y = good[1].test
    y[0].flatten()[0], outside = -100, y.clone()
    outside.view(len(y), -1)[2, 3] = 40
    bad = ff.Client(train=good[1].train, test=(x, outside))
    classes = 3 if name == "cross_entropy" else 11
    message = rf"client 1 has label 40, the model has {classes} outputs: labels must be 0 … {classes - 1}"
    with pytest.raises(ValueError, match=message):
        make(model, clients=[good[0], bad], loss=name)
    fed = make(model, clients=good, loss=name)
    fed.fit(1)
    with pytest.raises(ValueError, match=message.replace("client 1", "client 0")):
        fed.join([bad], "download")
    # The first token follows nothing: it is no label.
    outside.view(len(y), -1)[2, 3], outside.view(len(y), -1)[2, 0] = 0, -100
    make(model, clients=[good[0], bad], loss=name)


def test_metrics_of_a_sparse_round_too(make):
    fed = make(
        head(1),
        clients=clients_of(numbers),
        method="factorized-fl-alpha",
        loss="mse",
        metrics=["mae"],
        sparsity=ff.Schedule(warmup=1, target_density=0.5, regrow_every=1),
    )
    fed.fit(3)
    assert all(row["mae"] > 0 for row in fed.history)
