"""Batch-norm statistics computed anew before evaluation."""

import copy

import pytest
import torch
from torch import nn

import fastfact as ff


@pytest.mark.parametrize("cohort", [1, 3])
def test_evaluation_with_recalibrated_statistics(make, cohort):
    """As a pass of PyTorch's own cumulative batch-norm over the training samples; the federation keeps its own."""
    method = ff.methods.FedBN(recalibrate=True)
    shape = (1, 6, 6)
    fed = make(make.cnn, shape, clients=make.clients(shape, test=40), method=method, cohort=cohort)
    plain = make(make.cnn, shape, clients=make.clients(shape, test=40), method="fedbn", cohort=cohort)
    fed.fit(2)
    plain.fit(2)
    for name, tensor in fed.states.state.items():
        assert torch.equal(tensor, plain.states.state[name])
    accuracies = []
    for client, model in zip(fed.clients, fed.models, strict=True):
        model = copy.deepcopy(model)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        with torch.no_grad():
            model.train()(client.train[0])
            accuracies.append((model.eval()(client.test[0]).argmax(1) == client.test[1]).double().mean().item())
    assert [row["accuracy"] for row in fed.history.of(2)] == pytest.approx(accuracies)
    assert accuracies != pytest.approx([row["accuracy"] for row in plain.history.of(2)])


def test_the_statistics_of_several_batches_and_of_models_without_any(make, monkeypatch):
    from fastfact.federation.client import batchnorm as statistics
    from fastfact.federation.client.phase import Net

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().train()
    x = torch.randn(10, 3, dtype=torch.float64)
    net = Net(model, dict(model.named_parameters()), {}, None)
    monkeypatch.setattr(statistics, "BATCH", 6)
    with torch.no_grad():
        found = statistics.recalibrate(net, x, None)
        seen = model[0](x)
    torch.testing.assert_close(found["1.running_mean"], seen.mean(0))
    wanted = 0.6 * seen[:6].var(0) + 0.4 * seen[6:].var(0)
    torch.testing.assert_close(found["1.running_var"], wanted)
    assert set(found) == {"1.running_mean", "1.running_var"}
    without = make(method=ff.methods.FedAvg(recalibrate=True))
    without.fit(1)
    assert len(without.history) == 3


class Steps(nn.Module):
    """A batch-norm of the time steps of x [n, t, 3]: folded into the batch, or one call for each."""

    def __init__(self, folded):
        super().__init__()
        self.norm, self.folded = nn.BatchNorm1d(3), folded

    def forward(self, x):
        if self.folded:
            return self.norm(x.flatten(0, 1)).view_as(x)
        return torch.stack([self.norm(step) for step in x.unbind(1)], 1)


@pytest.mark.parametrize("folded", [True, False])
def test_a_layer_may_see_more_rows_than_there_are_samples(folded):
    """Folded, all of a batch at once; else the mean over the calls, which are normalised one by one."""
    from fastfact.federation.client import batchnorm as statistics
    from fastfact.federation.client.phase import Net

    model, x = Steps(folded).double().train(), 2 + torch.randn(10, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        found = statistics.recalibrate(Net(model, dict(model.named_parameters()), {}, None), x, None)
    torch.testing.assert_close(found["norm.running_mean"], x.mean((0, 1)))
    torch.testing.assert_close(found["norm.running_var"], x.flatten(0, 1).var(0) if folded else x.var(0).mean(0))


def test_a_last_batch_of_one_sample_joins_the_one_before_it(make, monkeypatch):
    from fastfact.federation.client import batchnorm as statistics

    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()

    accuracies = []
    for batch in (6, 7):
        monkeypatch.setattr(statistics, "BATCH", batch)
        fed = make(model, clients=make.clients(sizes=(7, 7), test=40), method=ff.methods.FedBN(recalibrate=True))
        accuracies.append([row["accuracy"] for row in fed.fit(1)])
    assert accuracies[0] == accuracies[1]


class EveryNorm(nn.Module):
    """Normalisation layers of all kinds, one of them twice, and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.group, self.instance = nn.Dropout(0.5), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4)
        self.layer, self.linear, self.rms = nn.LayerNorm(16), nn.Linear(16, 5), nn.RMSNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.drop(self.batch(self.conv(x)).relu())
        x = self.instance(self.group(x))
        x = self.layer(x.flatten(2)).relu()
        return self.head(self.rms(self.rms(self.linear(x)).cos()).mean(1))


def by_hand(x, axis):
    """Mean and deviation of each channel, number by number, in float64."""
    rows = x.double().transpose(0, axis).flatten(1).tolist()
    means = [sum(row) / len(row) for row in rows]
    squares = [sum((value - mean) ** 2 for value in row) / len(row) for row, mean in zip(rows, means, strict=True)]
    return means, [square**0.5 for square in squares]


def test_moments_of_what_every_normalisation_layer_gets_to_see(monkeypatch):
    """Against loops over the inputs of each layer, of a model that normalises each batch by itself."""
    from fastfact.federation.client import batchnorm as statistics
    from fastfact.federation.client.phase import Net

    torch.manual_seed(0)
    model, x = EveryNorm(), 3 * torch.randn(13, 1, 6, 6) + 1
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    net = Net(model, dict(model.named_parameters()), {}, buffers)
    monkeypatch.setattr(statistics, "BATCH", 6)
    with torch.no_grad():
        found = statistics.moments(net, x)
        assert not any(module.training or module._forward_pre_hooks for module in model.modules())
        assert model.batch.num_batches_tracked == 0
        inputs: list[list[torch.Tensor]] = [[] for _ in range(6)]
        for part in (x[:6], x[6:]):
            seen = model.conv(part)
            mean, variance = seen.mean((0, 2, 3), keepdim=True), seen.var((0, 2, 3), correction=0, keepdim=True)
            normed = ((seen - mean) / (variance + 1e-5).sqrt()).relu()
            grouped = model.group(normed)
            flat = model.instance(grouped).flatten(2)
            last = model.linear(model.layer(flat).relu())
            second = model.rms(last).cos()
            for place, tensor in enumerate((seen, normed, grouped, flat, last, second)):
                inputs[place].append(tensor)
    each = [torch.cat(parts) for parts in inputs]
    # The layer that is called twice has seen both.
    each[4:] = [torch.cat(each[4:])]
    rows = [by_hand(tensor, axis) for tensor, axis in zip(each, (1, 1, 1, 2, 2), strict=True)]
    wanted = torch.tensor([[value for row in rows for value in row[n]] for n in (0, 1)])
    assert found.shape == (2, 4 + 4 + 4 + 16 + 5) and found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def test_moments_of_a_model_without_a_normalisation_layer():
    from fastfact.federation.client import batchnorm as statistics
    from fastfact.federation.client.phase import Net

    model = nn.Linear(3, 2)
    assert statistics.moments(Net(model, dict(model.named_parameters()), {}, None), torch.ones(4, 3)).shape == (2, 0)
