"""Small federations for the tests: float64, a few samples, models of a few hundred numbers."""

import pytest
import torch
from torch import nn

import fastfact as ff


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def cnn() -> nn.Module:
    """Batch-norm, a convolution, and a classifier that is not the first to run out of samples."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1, stride=2),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 3),
    ).double()


def make_clients(shape=(6,), sizes=(10, 7, 12), classes=3, test=5, seed=0) -> list[ff.Client]:
    g = torch.Generator().manual_seed(seed)
    clients = []
    for n in sizes:
        x = torch.randn(n + test, *shape, generator=g, dtype=torch.float64)
        y = torch.randint(classes, (n + test,), generator=g)
        clients.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return clients


OPTIONS = {"epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "seed": 3, "cohort": 1}


@pytest.fixture
def make():
    """make(model=mlp, shape=(6,), sizes=…, **Federation options) → Federation."""

    def build(model=mlp, shape=(6,), sizes=(10, 7, 12), method="fedavg", clients=None, **options) -> ff.Federation:
        clients = make_clients(shape, sizes) if clients is None else clients
        return ff.Federation(model=model, clients=clients, method=method, **OPTIONS | options)

    build.mlp, build.cnn, build.clients, build.options = mlp, cnn, make_clients, OPTIONS
    return build


def same_state(a: ff.Federation, b: ff.Federation) -> bool:
    return all(torch.equal(t, b.states.state[name]) for name, t in a.states.state.items())


def without_seconds(history) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in history]


@pytest.fixture
def same():
    """same(fed, other): the same bits everywhere, timing aside."""

    def compare(a: ff.Federation, b: ff.Federation) -> bool:
        return (
            same_state(a, b)
            and without_seconds(a.history) == without_seconds(b.history)
            and a.ledger.rows() == b.ledger.rows()
        )

    return compare
