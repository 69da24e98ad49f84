"""A plain federation, one dict of tensors per client, in which the tests write the papers' algorithms.

Nothing of the package is used but the seeds of the batches' order and, where a method has a model of its own, that.
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.state import generator_for

SIZES = (9, 6, 12, 7)
K, TOTAL, ROUNDS = len(SIZES), sum(SIZES), 3
LR, MOMENTUM, DECAY, EPOCHS, BATCH, SEED = 0.1, 0.9, 1e-3, 2, 3, 5


def mlp() -> nn.Module:
    """Linear 6 → 8 → 5 → 3, the last is the classifier."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def normed() -> nn.Module:
    """Layers 1 (convolution and batch-norm), 2 (linear), 3 (classifier)."""
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(6, 4), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers, nn.Linear(4, 3)).double()


def clients(sizes=SIZES, shape=(6,), classes=3) -> list[ff.Client]:
    g = torch.Generator().manual_seed(1)
    made = []
    for n in sizes:
        x = torch.randn(n + 4, *shape, generator=g, dtype=torch.float64)
        y = torch.randint(classes, (n + 4,), generator=g)
        made.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return made


DATA = [client.train for client in clients()]


def federation(method, model=mlp, data=None, **options) -> ff.Federation:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return ff.Federation(model, data or clients(), method, **settings | options, seed=SEED)


def rows_of(fed) -> list[dict]:
    """The present state of each client, what a method adds included."""
    return [{name: t[k].clone() for name, t in fed.states.state.items()} for k in range(len(fed))]


def forward(model, state, x, train=True):
    """The model's output with the tensors of `state`; batch-norm moves the statistics in it."""
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    model.train(train)
    return functional_call(model, {name: state[name] for name in names}, (x,))


def batches(n, order):
    """One epoch: lists of indices; a last batch of one joins the one before it."""
    permutation = torch.randperm(n, generator=order).tolist()
    made = [permutation[i : i + BATCH] for i in range(0, n, BATCH)]
    if len(made) > 1 and len(made[-1]) == 1:
        made[-2:] = [made[-2] + made[-1]]
    return made


def train(model, state, data, round, k, phases=None, loss=None, gradient=None):
    """Heavy-ball SGD on `state` in place. phases: [(epochs, name → whether it trains)]; loss(state, x, y), or in its
    place gradient(state, x, y) → one for each parameter of `model`, in its order."""
    x, y = data
    loss = loss or (lambda state, x, y: F.cross_entropy(forward(model, state, x), y))
    order = generator_for(SEED, round, k, "order")
    params = [name for name, _ in model.named_parameters()]
    velocity = {name: torch.zeros_like(state[name]) for name in params}
    for epochs, trains in phases or [(EPOCHS, lambda name: True)]:
        names = [name for name in params if trains(name)]
        for _ in range(epochs):
            for batch in batches(len(y), order):
                leaves = {name: state[name].clone().requires_grad_() for name in names}
                if gradient is None:
                    value = loss({**state, **leaves}, x[batch], y[batch])
                    grads = torch.autograd.grad(value, leaves.values(), allow_unused=True)
                else:
                    grads = gradient({**state, **leaves}, x[batch], y[batch])
                for name, grad in zip(names, grads, strict=True):
                    grad = torch.zeros_like(state[name]) if grad is None else grad
                    velocity[name] = MOMENTUM * velocity[name] + grad + DECAY * state[name]
                    state[name] = state[name] - LR * velocity[name]


def average(states, name, weights=SIZES):
    """Σ_i w_i x_i / Σ_i w_i; counts are rounded."""
    mean = sum(w * s[name].double() for w, s in zip(weights, states, strict=True)) / sum(weights)
    return mean if states[0][name].is_floating_point() else mean.round().to(states[0][name].dtype)


def check(fed, expected, names=None):
    """Every tensor of every client is that of `expected`."""
    for name in names or fed.states.state:
        for k, state in enumerate(expected):
            torch.testing.assert_close(
                fed.states.state[name][k], state[name], rtol=1e-8, atol=1e-10, msg=f"{name} of client {k}"
            )


def give(states, tensors):
    """Every client its own copy."""
    for state in states:
        state.update({name: tensor.clone() for name, tensor in tensors.items()})


def accuracy(model, state, data):
    return float((forward(model, state, data[0], train=False).argmax(1) == data[1]).double().mean())


def sent(fed, direction) -> set[str]:
    return set(fed.ledger.by_name(direction)) - {"(frame)"}
