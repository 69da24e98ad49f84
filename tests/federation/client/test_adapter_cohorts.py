"""Clients that fine-tune one frozen network: σ is shared in memory and in the product, a client is its adapter."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastfact as ff
from fastfact.federation.client.executor import THREADS
from fastfact.federation.tensors import frozen, tensors_of

WIDTH = 24


class Encoder(nn.Module):
    """A transformer in small: a linear embedding, packed attention, two linear layers, norms, a classifier."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("places", torch.randn(6, WIDTH), persistent=False)

    def forward(self, x):
        x = self.embed(x.unflatten(1, (6, 4))) + self.places
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return self.head(x.mean(1))


def encoder(dropout=0.0):
    model = Encoder().double()
    spec = ff.LowRank(rank=1, scaling=2.0, dropout=dropout)
    return ff.factorize(model, spec, skip="embed", freeze=True, train=("head", "norm"))


def dropping():
    return encoder(dropout=0.3)


OPTIONS = {"shape": (24,), "sizes": (8, 11, 9), "epochs": 2, "batch_size": 4}
SHARED = {"head.weight", "head.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("model", [encoder, dropping])
@pytest.mark.parametrize("cohort", [3, 2, THREADS])
def test_clients_train_together_as_each_alone(make, model, cohort):
    alone, together = (make(model, cohort=c, **OPTIONS) for c in (1, cohort))
    for fed in (alone, together):
        fed.fit(rounds=3)
    for name, tensor in alone.states.state.items():
        torch.testing.assert_close(together.states.state[name], tensor, rtol=1e-8, atol=1e-9, msg=name)
    assert [row["accuracy"] for row in alone.history] == [row["accuracy"] for row in together.history]


def test_a_client_is_its_adapter(make):
    fed = make(encoder, cohort=3, **OPTIONS)
    names = {name for name, p in fed.template.named_parameters() if p.requires_grad}
    assert set(fed.initial) == set(fed.infos) == names and names > SHARED
    before = {name: p.clone() for name, p in frozen(fed.template).items()}
    fed.fit(rounds=2)
    assert all(torch.equal(p, before[name]) for name, p in frozen(fed.template).items())
    assert set(fed.ledger.by_name()) - {"(frame)"} == names
    assert fed.states.bytes() == 3 * sum(8 * fed.infos[name].numel for name in names)
    # The models are whole, and their own.
    model, x = fed.models[1], torch.randn(2, 24, dtype=torch.float64)
    torch.testing.assert_close(ff.densify(copy.deepcopy(model))(x), model(x))
    model.up.sigma.data.zero_()
    assert torch.equal(fed.template.up.sigma, before["up.sigma"])


def test_the_products_with_sigma_take_the_rows_of_all_clients_and_no_weight_is_made(make):
    fed = make(encoder, cohort=3, **OPTIONS | {"sizes": (8, 8, 8)}, graphs=False)
    sigma, rows = tuple(fed.template.up.sigma.shape), 3 * 4 * 6
    products, made, kernels = set(), set(), torch.ops.fastfact

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            shapes = tuple(tuple(t.shape) for t in args if isinstance(t, torch.Tensor))
            if func in (torch.ops.aten.addmm_.default, torch.ops.aten.mm.default):
                products.add(shapes)
            elif func in (kernels.lowrank_linear.default, kernels.lowrank_linear_backward.default):
                products.add((shapes[0], sigma if sigma in shapes else None))
            elif "lowrank_weight" in str(func):
                made.add(str(func))
            return out

    with Watch():
        fed.trainer.train(
            {name: tensor.expand(3, *tensor.shape[1:]).clone() for name, tensor in fed.initial.items()},
            [fed.clients[k].train for k in range(3)],
            1,
            [0, 1, 2],
            fed.method.active_phases(1, adapts=False),
        )
    assert not made
    o, i = sigma
    # Forward, and the gradient of what comes in: by PyTorch or by a kernel that takes σ without the client axis.
    plain = {((rows, o), (rows, i), (i, o)), ((rows, o), sigma)}
    assert plain <= products or {((3, rows // 3, i), sigma), ((3, rows // 3, o), sigma)} <= products


def test_captured_steps_are_the_same(make):
    one, other = (make(encoder, cohort=3, **OPTIONS | {"epochs": 30}, graphs=graphs) for graphs in (False, True))
    for fed in (one, other):
        fed.trainer.steps.patience = 0
        fed.fit(rounds=1)
    for name, tensor in one.states.state.items():
        assert torch.equal(other.states.state[name], tensor), name


def test_threads_share_what_is_frozen(make):
    trainer = make(encoder, **OPTIONS).trainer
    worker = trainer.copy()
    assert worker.model.up.sigma is trainer.model.up.sigma and worker.model.up.A is not trainer.model.up.A
    assert not {name for name in tensors_of(worker.model)} & set(frozen(worker.model))


@pytest.mark.parametrize("store", ["memory", "store"])
def test_stored_saved_and_gone_on_with(make, same, tmp_path, store):
    place = {"store": store if store == "memory" else str(tmp_path / store)}
    straight = make(encoder, **OPTIONS)
    straight.fit(rounds=4)
    fed = make(encoder, **OPTIONS, **place)
    fed.fit(rounds=2, out=tmp_path / "run")
    if store != "memory":
        fed.states.close()
    again = ff.Federation.load(tmp_path / "run", model=encoder, clients=make.clients((24,), OPTIONS["sizes"]))
    again.fit(rounds=2)
    for name, tensor in straight.states.state.items():
        torch.testing.assert_close(again.states.state[name], tensor, rtol=1e-10, atol=1e-12, msg=name)
    bytes_of = sum(8 * info.numel for info in fed.infos.values())
    assert again.states.bytes() <= 3 * (bytes_of + 16 * len(fed.infos) + 8)


def other():
    model = encoder()
    model.up.sigma.data[0, 0] += 1
    return model


def test_another_network_is_refused(make, tmp_path):
    fed = make(encoder, **OPTIONS)
    fed.fit(rounds=1, out=tmp_path)
    with pytest.raises(ValueError, match="the frozen parameters of the model are not those"):
        ff.Federation.load(tmp_path, model=other)


def test_a_newcomer_and_the_models_as_downloaded(make):
    fed = make(encoder, **OPTIONS)
    fed.fit(rounds=1)
    assert len(fed.accuracies_as_downloaded()) == 3
    assert len(fed.join(make.clients((24,), (8,)), how="fine-tune", epochs=1).accuracy) == 1
