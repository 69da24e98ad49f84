"""Small federations for the tests, of what `small` makes."""

import pytest
import torch
from small import cnn, make_clients, mlp

import fastfact as ff

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
