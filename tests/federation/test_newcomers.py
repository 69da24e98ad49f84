"""Clients that join after training, against loops written out here."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastfact as ff
from fastfact.federation import newcomers
from fastfact.federation.state import generator_for

SHARED_ROWS = [0, 2, 3, 7]


def trained(make, method, rounds=2, **options):
    fed = make(method=method, momentum=0.0, **options)
    fed.fit(rounds)
    return fed


def batches(fed, data, k):
    """The batches a newcomer's local training takes: two epochs of 4, in the order of its stream."""
    order = generator_for(fed.settings["seed"], fed.round + 1, k, "order")
    for _ in range(fed.settings["epochs"]):
        permutation = torch.randperm(len(data[1]), generator=order)
        for begin in range(0, len(permutation), 4):
            batch = permutation[begin : begin + 4]
            yield data[0][batch], data[1][batch]


def step(model, x, y, decay=1e-3, lr=0.1):
    """Plain SGD: name → new value."""
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(named.values()))
    return {n: (p - lr * (g + decay * p)).detach() for (n, p), g in zip(named.items(), grads, strict=True)}


def average(fed):
    """FedAvg's download: by the number of samples."""
    n = torch.tensor(fed.reported.samples, dtype=torch.float64)
    return {
        name: (tensor * (n / n.sum()).view(-1, *[1] * (tensor.dim() - 1))).sum(0)
        for name, tensor in fed.states.state.items()
        if tensor.is_floating_point()
    }


def test_download_is_the_global_model(make):
    fed = trained(make, "fedavg")
    new = make.clients(sizes=(6, 9), seed=4)
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    found = fed.join(new, "download")
    wanted = average(fed)
    for model, client, accuracy in zip(found.models, new, found.accuracy, strict=True):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=1e-14)
        x, y = client.test
        assert accuracy == pytest.approx((model(x).argmax(1) == y).double().mean().item())
    assert found.bytes_down == [fed.ledger.by_client("down")[0] // 2] * 2 and found.bytes_up == [0, 0]
    assert all(torch.equal(before[name], tensor) for name, tensor in fed.states.state.items())


@pytest.mark.parametrize("options", [{}, {"schedule": "linear", "schedule_rounds": 2, "lr_warmup": 0.2}])
def test_fine_tune_trains_everything(make, options):
    """By the learning rate itself, also where a schedule has ended."""
    fed = trained(make, "fedavg", **options)
    new = make.clients(sizes=(6, 8), seed=4)
    found = fed.join(new, "fine-tune")
    model = make.mlp()
    model.load_state_dict(average(fed))
    for x, y in batches(fed, new[1].train, 4):
        model.load_state_dict(step(model, x, y))
    for name, tensor in found.models[1].state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("epochs", [0, 1])
def test_fine_tune_trains_a_head_that_rounds_leave_alone(make, epochs):
    """FedBABU: body and head, whatever is done before an evaluation."""
    fed = trained(make, ff.methods.FedBABU(finetune_epochs=epochs))
    new = make.clients(sizes=(8,), seed=4)
    model = make.mlp()
    initial = {name: tensor[0] for name, tensor in fed.initial.items()}
    model.load_state_dict({**initial, **{n: t for n, t in average(fed).items() if n in fed.shared}})
    for x, y in batches(fed, new[0].train, 3):
        model.load_state_dict(step(model, x, y))
    found = fed.join(new, "fine-tune").models[0].state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    assert not torch.equal(found["4.weight"], initial["4.weight"])


def dropping():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("how", newcomers.HOW[:3])
def test_a_federation_loaded_without_clients_knows_its_loss(make, tmp_path, how):
    def several(sizes):
        return [
            ff.Client(**{part: (x, x[:, :3] > 0) for part, (x, _) in (("train", one.train), ("test", one.test))})
            for one in make.clients(sizes=sizes)
        ]

    fed = trained(make, "fedper", model=dropping, clients=several((10, 7, 12)), loss="bce")
    fed.save(tmp_path / "run")
    loaded = ff.Federation.load(tmp_path / "run", model=dropping)
    one, other = (each.join(several((8,)), how) for each in (fed, loaded))
    assert one.accuracy == other.accuracy
    for name, tensor in one.models[0].state_dict().items():
        assert torch.equal(tensor, other.models[0].state_dict()[name])


def test_local_train_of_a_personal_head(make):
    """FedPer: the base is the average and stays, the head starts from the initial model and trains."""
    fed = trained(make, "fedper")
    new = make.clients(sizes=(8,), seed=4)
    found = fed.join(new)
    model = make.mlp()
    initial = {name: tensor[0] for name, tensor in fed.initial.items()}
    model.load_state_dict({**initial, **{n: t for n, t in average(fed).items() if n in fed.shared}})
    for x, y in batches(fed, new[0].train, 3):
        moved = step(model, x, y)
        model.load_state_dict({**model.state_dict(), **{n: t for n, t in moved.items() if n.startswith("4.")}})
    for name, tensor in found.models[0].state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-10, atol=1e-12)
    assert not torch.equal(found.models[0].state_dict()["4.weight"], initial["4.weight"])


def test_local_train_holds_the_shared_channels(make):
    """FedSplit: of the first layer four rows are shared and stay; the other four, and nothing else, train."""
    fed = trained(make, ff.methods.FedSplit(shared_channels={"0": SHARED_ROWS}))
    new = make.clients(sizes=(8,), seed=4)
    found = fed.join(new)
    model = make.mlp()
    initial = {name: tensor[0] for name, tensor in fed.initial.items()}
    rows = torch.zeros(8, dtype=torch.bool)
    rows[SHARED_ROWS] = True
    got = average(fed)
    for name in ("0.weight", "0.bias"):
        got[name] = torch.where(rows.view(-1, *[1] * (got[name].dim() - 1)), got[name], initial[name])
    model.load_state_dict(got)
    for x, y in batches(fed, new[0].train, 3):
        moved = step(model, x, y)
        for name in ("0.weight", "0.bias"):
            got[name] = torch.where(rows.view(-1, *[1] * (got[name].dim() - 1)), got[name], moved[name])
        model.load_state_dict(got)
    for name, tensor in found.models[0].state_dict().items():
        torch.testing.assert_close(tensor, got[name], rtol=1e-10, atol=1e-12)


def test_ensemble_is_the_mean_of_the_probabilities(make):
    fed = trained(make, "fedfac-dynamic", model=make.cnn, shape=(1, 6, 6))
    new = make.clients(shape=(1, 6, 6), sizes=(3, 5), test=20, seed=4)
    found = fed.join(new, "ensemble")
    for client, accuracy in zip(new, found.accuracy, strict=True):
        x, y = client.test
        mean = torch.stack([copy.deepcopy(model)(x).softmax(1) for model in fed.models]).mean(0)
        assert accuracy == pytest.approx((mean.argmax(1) == y).double().mean().item())
    numbers = sum(tensor[0].numel() * tensor.element_size() for tensor in fed.states.state.values())
    assert found.models is None and 3 * numbers < found.bytes_down[0] < 3 * numbers + 3 * 400


@pytest.mark.parametrize("method", ff.methods.names())
def test_every_method_takes_newcomers(make, method):
    fed = trained(make, method, rounds=1, model=make.cnn, shape=(1, 6, 6))
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    memory = {name: tensor.clone() for name, tensor in fed.server_state.items()}
    new = make.clients(shape=(1, 6, 6), sizes=(8, 9), seed=4)
    for how in newcomers.HOW:
        try:
            found = fed.join(new, how)
        except ValueError as error:
            assert "nothing to learn of its own" in str(error) and how == "local-train"
        else:
            assert len(found.accuracy) == len(found.bytes_down) == 2
    assert all(torch.equal(before[name], tensor) for name, tensor in fed.states.state.items())
    assert all(torch.equal(memory[name], tensor) for name, tensor in fed.server_state.items())


def test_bad_input(make):
    fed = make()
    new = make.clients(sizes=(4,))
    with pytest.raises(ValueError, match="not run a round"):
        fed.join(new)
    fed.fit(1)
    with pytest.raises(ValueError, match="how='x'"):
        fed.join(new, "x")
    with pytest.raises(ValueError, match="epochs=0"):
        fed.join(new, "fine-tune", 0)
    with pytest.raises(ValueError, match="samples of shape"):
        fed.join(make.clients(shape=(5,)), "download")
    with pytest.raises(ValueError, match="shares everything that trains"):
        fed.join(new)
