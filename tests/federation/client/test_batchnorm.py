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
