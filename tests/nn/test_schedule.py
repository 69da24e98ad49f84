"""The schedule of sparse training: when μ becomes compact, how its support changes, and where that leads."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastfact as ff
from fastfact.nn import schedule
from fastfact.nn.schedule import Schedule


def lasso(i=24, o=6, n=48):
    """min_μ ½/n ‖x μᵀ − y‖² + λ ‖μ‖₁: a linear layer whose u and v are zero and do not train. Convex."""
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(i, o, bias=False, dtype=torch.float64)
    for factor in (layer.u, layer.v):
        nn.init.zeros_(factor).requires_grad_(False)
    truth = torch.randn(o, i, dtype=torch.float64) * (torch.rand(o, i) < 0.15)
    x = torch.randn(n, i, dtype=torch.float64)
    y = x @ truth.T + 0.1 * torch.randn(n, o, dtype=torch.float64)
    return layer, lambda: 0.5 * F.mse_loss(layer(x), y, reduction="sum") / n


def descend(layer, loss, l1, periods, schedule=None, steps=40):
    optimizer = ff.optim.ProxSGD(layer.parameters(), lr=0.15, l1=l1)
    for period in range(1, periods + 1):
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        if schedule:
            schedule.step(layer, period, loss, optimizer)
    with torch.no_grad():
        return (loss() + l1 * layer.mu.abs().sum()).item()


@pytest.mark.parametrize("warmup, density", [(1, None), (0, 0.02)])
def test_active_set_training_reaches_the_objective_of_dense_proximal_training(warmup, density):
    l1 = 0.05
    dense, loss = lasso()
    expected = descend(dense, loss, l1, 40)
    sparse, loss = lasso()
    if density is not None:  # a support that lacks nearly everything
        nn.init.normal_(sparse.mu)
        sparse.compact(density)
    reached = descend(sparse, loss, l1, 40, Schedule(warmup=warmup, l1=l1, regrow_every=1))
    assert reached == pytest.approx(expected, rel=1e-8)
    torch.testing.assert_close(sparse.weight, dense.weight, rtol=0, atol=1e-5)
    assert len(sparse.mu) < 0.5 * dense.mu.numel()


def test_without_regrowing_the_support_stays_wrong():
    l1 = 0.05
    dense, loss = lasso()
    expected = descend(dense, loss, l1, 40)
    sparse, loss = lasso()
    nn.init.normal_(sparse.mu)
    sparse.compact(0.02)
    assert descend(sparse, loss, l1, 40, Schedule(warmup=0, l1=l1)) > 1.5 * expected


def test_target_density_prunes_once_trains_unshrunk_and_keeps_the_size():
    layer, loss = lasso()
    optimizer = ff.optim.ProxSGD(layer.parameters(), lr=0.1, l1=0.05)
    schedule, seen = Schedule(warmup=2, target_density=0.25, regrow_every=2, replace=0.5), []
    for period in range(1, 7):
        for _ in range(10):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        before = layer.mu_index.clone() if layer.is_compact else None
        schedule.step(layer, period, loss, optimizer)
        changed = None if before is None else not torch.equal(before, layer.mu_index)
        seen.append((layer.is_compact, changed, optimizer.param_groups[0]["l1"]))
    # Dense; pruned after period 2, unshrunk from then on; another support after periods 4 and 6.
    assert seen == [
        (False, None, 0.05),
        (True, None, 0.0),
        (True, False, 0.0),
        (True, True, 0.0),
        (True, False, 0.0),
        (True, True, 0.0),
    ]
    assert len(layer.mu) <= 36 and (layer.mu_index.diff() > 0).all()


def test_replaced_drops_the_smallest_and_takes_the_largest_gradients():
    values, index = torch.tensor([3.0, -0.1, 2.0]), torch.tensor([0, 2, 5], dtype=torch.int32)
    gradient = torch.tensor([9.0, 0.5, 9.0, -4.0, 1.0, 9.0])
    got = ff.sparsity.replaced(values, index, gradient, 1)
    assert got[0].tolist() == [3.0, 0.0, 2.0] and got[1].tolist() == [0, 3, 5]
    assert got[1].dtype == torch.int32
    got = ff.sparsity.replaced(values, index, gradient, 99)
    assert got[1].tolist() == [1, 3, 4]
    full = torch.arange(6, dtype=torch.int32)
    assert torch.equal(ff.sparsity.replaced(gradient, full, gradient, 3)[0], gradient)


def test_largest_is_as_large_for_every_row_and_breaks_ties_by_position():
    mu = torch.tensor([[0.0, 3.0, -4.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    values, index = ff.sparsity.largest(mu, 2)
    assert values.tolist() == [[3.0, -4.0], [0.0, 0.0]] and index.tolist() == [[1, 2], [0, 1]]


def test_dense_gradients_are_those_of_the_dense_form_and_leave_the_layers_alone():
    torch.manual_seed(0)
    model = nn.Sequential(ff.nn.FactorizedConv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), ff.nn.FactorizedLinear(12, 4))
    layers = schedule.penalized_layers(model)
    for layer in layers:
        nn.init.normal_(layer.mu)
        layer.prune_(0.3)
    dense = copy.deepcopy(model)
    layers[0].compact()
    x = torch.randn(5, 2, 4, 4)
    dense(x).square().sum().backward()
    mus, support = [layer.mu for layer in layers], layers[0].mu_index
    got = schedule.dense_gradients(layers, lambda: model(x).square().sum())
    for gradient, layer in zip(got, schedule.penalized_layers(dense), strict=True):
        torch.testing.assert_close(gradient, layer.mu.grad)
    assert all(a is b for a, b in zip(mus, (layer.mu for layer in layers), strict=True))
    assert layers[0].is_compact and layers[0].mu_index is support and layers[0].mu.grad is None
    with pytest.raises(RuntimeError, match="on purpose"):
        schedule.dense_gradients(layers, lambda: (_ for _ in ()).throw(RuntimeError("on purpose")))
    assert layers[0].is_compact and layers[0].mu is mus[0]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(warmup=-1, l1=0.1), "warmup=-1"),
        (dict(warmup=1.5, l1=0.1), "warmup=1.5"),
        (dict(warmup=1), "either target_density or l1"),
        (dict(warmup=1, l1=0.1, target_density=0.1), "either target_density or l1"),
        (dict(warmup=1, target_density=1.1), "target_density=1.1"),
        (dict(warmup=1, l1=-1.0), "l1=-1.0"),
        (dict(warmup=1, l1=0.1, regrow_every=-2), "regrow_every=-2"),
        (dict(warmup=1, target_density=0.1, replace=0.0), "replace=0.0"),
    ],
)
def test_bad_schedules(settings, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**settings)


def test_step_says_what_it_needs():
    with pytest.raises(ValueError, match="no layer of the model has a μ"):
        Schedule(warmup=0, l1=0.1).step(nn.Linear(2, 2), 1)
    layer, _ = lasso()
    with pytest.raises(ValueError, match="needs loss="):
        Schedule(warmup=0, l1=0.1, regrow_every=1).step(layer, 1)
    assert not layer.is_compact


def test_the_command_line_trains_on_the_support(tmp_path):
    from calls import SMALL, call

    options = ["--model", "mlp", "--clients", "3", "--rounds", "3", "--epochs", "1", "--width", "0.1"]
    options += ["--warmup", "1", "--target-density", "0.2", "--regrow-every", "1", "--batch-size", "64"]
    assert set(SMALL[::2]) <= set(options)
    code, _, error = call("run", *options, "--out", tmp_path / "run")
    assert code == 0, error
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    densities = {(row := json.loads(line))["round"]: row["density"] for line in rows}
    assert 0.15 < densities[3] <= densities[1] and densities[3] < 0.21
    code, _, error = call("run", *options, "--out", tmp_path / "run", "--resume")
    assert code == 0, error
    code, _, error = call("run", "--warmup", "2", "--out", tmp_path / "other")
    assert code == 2 and "warmup=2: needs target_density, or l1" in error and not (tmp_path / "other").exists()
    code, _, error = call("run", "--regrow-every", "2", "--out", tmp_path / "other")
    assert code == 2 and "regrow_every=2: needs warmup" in error


def test_on_the_digits_a_fifth_of_mu_is_as_accurate_as_all_of_it():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

    def accuracy(seed, schedule=None):
        torch.manual_seed(seed)
        order = torch.randperm(len(y))
        train, test = order[:1400], order[1400:]
        model = nn.Sequential(ff.nn.FactorizedLinear(64, 64), nn.ReLU(), ff.nn.FactorizedLinear(64, 10))
        optimizer = ff.optim.ProxSGD(model.parameters(), lr=0.1, momentum=0.9, l1=1e-5)
        for epoch in range(1, 13):
            for batch in train[torch.randperm(len(train))].split(70):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            if schedule:
                schedule.step(model, epoch, lambda: F.cross_entropy(model(x[train]), y[train]), optimizer)
        density = [layer.density for layer in ff.factorized_layers(model).values()]
        with torch.no_grad():
            return (model(x[test]).argmax(1) == y[test]).float().mean().item(), max(density)

    dense, sparse = [], []
    for seed in range(3):
        dense.append(accuracy(seed)[0])
        reached, density = accuracy(seed, Schedule(warmup=4, target_density=0.2, regrow_every=3))
        assert density <= 0.2
        sparse.append(reached)
    assert min(dense) > 0.9
    assert sum(sparse) / 3 >= sum(dense) / 3 - (max(dense) - min(dense)), (dense, sparse)
