"""Sparse training in a federation: pruned after the warm-up, compact from then on, the same bits after a resume."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn.schedule import Schedule

SCHEDULE = Schedule(warmup=2, target_density=0.25, regrow_every=2, replace=0.5)
FIXED = dataclasses.replace(SCHEDULE, regrow_every=0)


def start(make, method="factorized-fl-alpha", schedule=SCHEDULE, **options):
    return make(make.cnn, (1, 6, 6), method=method, sparsity=schedule, **options)


def train_under(masks, net, optimizer, samples, round, client):
    """The client's training of that round, dense, where the gradient of each μ passes its mask only."""
    order, (x, y) = ff.federation.state.generator_for(3, round, client, "order"), samples
    for _ in range(2):
        for batch in torch.randperm(len(y), generator=order).split(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            for layer, mask in zip(ff.factorized_layers(net).values(), masks, strict=True):
                layer.mu.grad *= mask
            optimizer.step()


def test_every_client_keeps_as_many_numbers_of_its_own_and_the_support_changes_when_it_should(make):
    fed = start(make)
    fed.fit(2)
    assert {path: [round(d * 36) for d in fed.density()[path]] for path in ("0",)} == {"0": [9, 9, 9]}
    support = fed.states.state["3.mu"] != 0
    assert (support.flatten(1).sum(1) == round(0.25 * support[0].numel())).all()
    assert not torch.equal(support[0], support[1])
    fed.fit(2)
    assert torch.equal(fed.states.state["3.mu"] != 0, support)
    fed.fit(1)  # Round 5 begins with another support, of the same size.
    changed = fed.states.state["3.mu"] != 0
    assert not torch.equal(changed, support) and torch.equal(changed.sum(), support.sum())
    assert all(row["density"] < 0.3 for row in fed.history if row["round"] >= 2)
    assert any(row["density"] > 0.5 for row in fed.history if row["round"] == 1)


def test_pruning_is_what_prune_does(make):
    plain, fed = start(make, schedule=None), start(make)
    plain.fit(2), fed.fit(2)
    for expected, got in zip(plain.models, fed.models, strict=True):
        for a, b in zip(ff.factorized_layers(expected).values(), ff.factorized_layers(got).values(), strict=True):
            assert torch.equal(b.weight, a.prune_(0.25).weight)


def test_a_round_on_the_support_is_dense_training_under_a_mask_without_penalty(make):
    def model():
        return ff.factorize(make.cnn(), ff.Rank1(), init="svd")

    fed = make(model, (1, 6, 6), method="stand-alone", sparsity=dataclasses.replace(FIXED, warmup=1), l1=0.01)
    fed.fit(1)
    k, net = 2, fed.models[2].train()
    fed.fit(1)
    masks = [layer.mu != 0 for layer in ff.factorized_layers(net).values()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    train_under(masks, net, optimizer, fed.clients[k].train, round=2, client=k)
    for a, b in zip(ff.factorized_layers(net).values(), ff.factorized_layers(fed.models[k]).values(), strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-9, atol=1e-11)


def test_the_same_bits_in_two_runs_and_after_a_resume(make, same, tmp_path):
    whole = start(make)
    whole.fit(6)
    for stop in (1, 2, 3, 5):
        directory = tmp_path / str(stop)
        start(make).fit(stop, directory)
        part = ff.Federation.load(directory, model=make.cnn, clients=whole.clients)
        part.fit(6 - stop, directory)
        assert same(whole, part), stop
        assert json.loads((directory / "config.json").read_text())["settings"]["sparsity"]["warmup"] == 2


def test_one_after_another_and_together_agree(make):
    one, many = start(make, cohort=1), start(make, cohort=3)
    one.fit(5), many.fit(5)
    for name, tensor in one.states.state.items():
        torch.testing.assert_close(tensor, many.states.state[name], rtol=1e-6, atol=1e-9, msg=name)


def test_a_mixed_mu_is_the_mean_of_the_weights_and_trains_on_its_largest_numbers(make):
    fed = start(make, "factorized-fedavg", FIXED)
    fed.fit(2)
    before = fed.states.state["3.mu"]
    weights = fed.method.weights(fed.uploads()).to(before)
    mixed = torch.einsum("kj,j...->k...", weights, before)
    assert (mixed != 0).sum() > (before != 0).sum()
    torch.testing.assert_close(torch.stack([m[3].mu.detach() for m in fed.mixed()]), mixed)
    fed.fit(1)
    kept = ff.sparsity.prune_(mixed, 0.25, clients=True) != 0
    assert torch.equal(fed.states.state["3.mu"] != 0, kept)
    # All got the same mean, so all have the same support from here on: another mix does not widen it.
    fed.fit(2)
    assert torch.equal(fed.states.state["3.mu"] != 0, kept)


def test_the_ledger_counts_the_numbers_of_the_support_and_a_bitmap(make):
    fed = start(make, "factorized-fedavg", FIXED, l1=0.0)
    fed.fit(3)
    name = "3.mu"
    (rows, *rest), numel = fed.infos[name].shape, fed.infos[name].numel
    kept, bitmap = round(0.25 * numel), rows * ((torch.Size(rest).numel() + 7) // 8)
    assert fed.infos[name].dtype == torch.float64  # which goes as it is, zeros included
    up = {e.round: e.sizes for e in fed.ledger.entries if e.direction == "up"}
    assert up[1].numbers[name] > up[2].numbers[name] == up[3].numbers[name] == [kept] * 3
    half = make(lambda: make.cnn().float(), (1, 6, 6), method="factorized-fedavg", sparsity=FIXED)
    half.fit(3)
    up = {e.round: e.sizes for e in half.ledger.entries if e.direction == "up"}
    assert up[2].bytes[name] == up[3].bytes[name] == [7 + bitmap + 4 * kept] * 3
    state = half.states.load([0])
    message = half.wire.encode({n: state[n][0] for n in half.shared})
    assert len(message) == up[3].total(0)


def test_absent_clients_are_pruned_when_they_take_part(make):
    fed = start(make, participation=0.3)
    fed.fit(6)
    for row in fed.history:
        if row["round"] >= 2:
            assert row["density"] < 0.3


@pytest.mark.parametrize("cohort", [1, 3])
@pytest.mark.parametrize("method", ["factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg", "simfed"])
def test_a_frozen_mu_stays_as_it_is(make, method, cohort):
    def model():
        net = make.cnn()
        net[0].requires_grad_(False)
        return net

    fed = make(model, (1, 6, 6), method=method, sparsity=SCHEDULE, cohort=cohort)
    before = fed.template[0].weight.clone()
    fed.fit(5)
    assert torch.equal(fed.models[1][0].weight, before)
    # Of what trains alone.
    assert list(fed.density()) == ["3", "8"] and fed.history.of(5)[0]["density"] == pytest.approx(0.25, abs=0.02)


def test_clients_can_join_later(make):
    fed = start(make)
    fed.fit(3)
    assert len(fed.join(fed.clients[:1], how="fine-tune").accuracy) == 1


@pytest.mark.parametrize(
    "method, schedule, message",
    [
        ("factorized-fl-alpha", Schedule(warmup=0, target_density=0.1), "warmup of at least 1"),
        ("fedavg", FIXED, "no layer of the model has a μ that trains"),
        ("factorized-fl-alpha", "often", "sparsity='often'"),
    ],
)
def test_schedules_a_federation_cannot_follow(make, method, schedule, message):
    with pytest.raises(ValueError, match=message):
        start(make, method, schedule)


LAMBDA = Schedule(warmup=1, l1=0.03, regrow_every=2)


def test_lambda_decides_what_stays(make):
    fed = start(make, schedule=LAMBDA, l1=9.0)  # the schedule's λ, not the method's
    supports = []
    for _ in range(4):
        fed.fit(1)
        supports.append(fed.states.state["3.mu"] != 0)
    assert 0.1 < supports[0].double().mean() < 1 and len(set(supports[0].flatten(1).sum(1).tolist())) > 1
    # Zeros leave and do not come back, until round 4 begins with those whose gradient is beyond λ.
    assert not (supports[1] & ~supports[0]).any() and not (supports[2] & ~supports[1]).any()
    assert (supports[3] & ~supports[2]).any()


def test_a_round_where_lambda_decides_is_proximal_training_under_a_mask(make):
    def model():
        return ff.factorize(make.cnn(), ff.Rank1(), init="svd")

    schedule = dataclasses.replace(LAMBDA, regrow_every=1)
    fed = make(model, (1, 6, 6), method="stand-alone", sparsity=schedule)
    fed.fit(2)
    k, net, (x, y) = 2, fed.models[2], fed.clients[2].train
    fed.fit(1)
    layers = list(ff.factorized_layers(net).values())
    gradients = torch.autograd.grad(nn.functional.cross_entropy(net.eval()(x), y), [layer.mu for layer in layers])
    masks = [(a.mu != 0) | (g.abs() > 0.03) for a, g in zip(layers, gradients, strict=True)]
    assert any((mask & (layer.mu == 0)).any() for mask, layer in zip(masks, layers, strict=True))
    optimizer = ff.optim.ProxSGD(net.train().parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, l1=0.03)
    train_under(masks, net, optimizer, (x, y), round=3, client=k)
    for a, b in zip(layers, ff.factorized_layers(fed.models[k]).values(), strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=1e-9, atol=1e-11)


def test_where_lambda_decides_together_is_one_after_another(make, same, tmp_path):
    one, many = start(make, schedule=LAMBDA, cohort=1), start(make, schedule=LAMBDA, cohort=3)
    one.fit(5), many.fit(5)
    for name, tensor in one.states.state.items():
        torch.testing.assert_close(tensor, many.states.state[name], rtol=1e-6, atol=1e-9, msg=name)
    start(make, schedule=LAMBDA, cohort=1).fit(3, tmp_path)
    part = ff.Federation.load(tmp_path, model=make.cnn, clients=one.clients)
    part.fit(2, tmp_path)
    assert same(one, part)


def test_lambda_may_leave_nothing(make):
    fed = start(make, schedule=Schedule(warmup=1, l1=1e3))
    fed.fit(3)
    assert all(density == 0 for row in fed.density().values() for density in row)


def test_methods_with_tensors_of_their_own_are_refused(make):
    def model():
        return ff.factorize(make.cnn(), ff.Rank1())

    with pytest.raises(ValueError, match="keeps tensors of its own"):
        make(model, (1, 6, 6), method="fedamp", sparsity=FIXED)
