"""A plain float64 federation, one dict of tensors per client, for checking methods against the papers' pseudo-code.

It shares no code with the package but the seeds of the batches' order.
"""

import torch
from torch import nn
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.state import generator_for

SIZES = (9, 6, 12, 7)
LR, MOMENTUM, DECAY, EPOCHS, BATCH, SEED = 0.1, 0.9, 1e-3, 3, 3, 5


class Net(nn.Module):
    """6 → 8 → 5 → 3 with batch-norm after the first layer; the last is the classifier."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 5),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.second(F.relu(self.norm(self.first(x))))))


def net() -> nn.Module:
    return Net().double()


def clients(shape=(6,), classes=3) -> list[ff.Client]:
    g = torch.Generator().manual_seed(1)
    made = []
    for n in SIZES:
        x = torch.randn(n + 4, *shape, generator=g, dtype=torch.float64)
        y = torch.randint(classes, (n + 4,), generator=g)
        made.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return made


def federation(method, model=net, data=None, **options) -> ff.Federation:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return ff.Federation(model, data or clients(), method, **settings | options, seed=SEED)


def features(state, x, weight, training):
    """The input of the classifier of `Net`; `weight(state, layer)` is W [out, in]. Batch-norm moves its statistics."""
    x = x @ weight(state, "first").T + state["first.bias"]
    if training:
        mean, var = x.mean(0), x.var(0, correction=0)
        with torch.no_grad():
            unbiased = var * len(x) / (len(x) - 1)
            state["norm.running_mean"] = 0.9 * state["norm.running_mean"] + 0.1 * mean
            state["norm.running_var"] = 0.9 * state["norm.running_var"] + 0.1 * unbiased
            state["norm.num_batches_tracked"] = state["norm.num_batches_tracked"] + 1
    else:
        mean, var = state["norm.running_mean"], state["norm.running_var"]
    x = (x - mean) / (var + 1e-5).sqrt() * state["norm.weight"] + state["norm.bias"]
    return torch.tanh(F.relu(x) @ weight(state, "second").T + state["second.bias"])


def is_statistic(name):
    return name.startswith("norm.running") or name.endswith("tracked")


def train(state, data, round, k, weight, phases, threshold=0.0):
    """Heavy-ball SGD in phases [(epochs, name → whether it trains)]; "mu" is soft-thresholded after each step."""
    x, y = data
    order = generator_for(SEED, round, k, "order")
    velocity = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for epochs, trains in phases:
        names = [name for name in state if trains(name) and not is_statistic(name)]
        for _ in range(epochs):
            permutation = torch.randperm(len(y), generator=order).tolist()
            batches = [permutation[i : i + BATCH] for i in range(0, len(y), BATCH)]
            if len(batches[-1]) == 1:
                batches[-2:] = [batches[-2] + batches[-1]]
            for batch in batches:
                leaves = {n: state[n].clone().requires_grad_() for n in names}
                moving = {**state, **leaves}
                z = features(moving, x[batch], weight, True)
                loss = F.cross_entropy(z @ weight(moving, "head").T + moving["head.bias"], y[batch])
                grads = torch.autograd.grad(loss, leaves.values())
                state.update({n: moving[n] for n in state if is_statistic(n)})
                for name, grad in zip(names, grads, strict=True):
                    velocity[name] = MOMENTUM * velocity[name] + grad + DECAY * state[name]
                    state[name] = state[name] - LR * velocity[name]
                    if name.endswith("mu"):
                        state[name] = state[name].sign() * (state[name].abs() - threshold).clamp(min=0)


def rows_of(fed) -> list[dict]:
    return [{name: tensor[k].clone() for name, tensor in fed.states.state.items()} for k in range(len(fed))]


def check(fed, expected):
    for name, tensor in fed.states.state.items():
        for k, state in enumerate(expected):
            torch.testing.assert_close(tensor[k], state[name], rtol=1e-8, atol=1e-10, msg=f"{name} of client {k}")
