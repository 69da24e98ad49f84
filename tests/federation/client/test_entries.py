"""Models that are called by keywords, on samples that are dicts, like those of transformers."""

from types import SimpleNamespace

import pytest
import torch
from small import mlp
from torch import nn

import fastfact as ff
from fastfact import data

DRAW = torch.Generator().manual_seed(2)
LENGTH = 6


class Classifier(nn.Module):
    """Takes its inputs by name only."""

    def __init__(self):
        super().__init__()
        self.embedding, self.weighted, self.out = nn.Embedding(13, 5), nn.Linear(2, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, *, input_ids, attention_mask, extra):
        mask = attention_mask[..., None].to(extra.dtype)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.out(torch.tanh(mean + self.weighted(extra))))


def rows(n):
    made = []
    for _ in range(n):
        tokens = torch.randint(1, 13, (int(torch.randint(2, LENGTH + 1, (), generator=DRAW)),), generator=DRAW)
        label = int(tokens.sum() % 3)
        made.append({"input_ids": tokens.tolist(), "labels": label, "extra": torch.randn(2, generator=DRAW).tolist()})
    return made


@pytest.fixture(scope="module")
def clients():
    collate = data.pad(LENGTH)
    return [ff.Client(train=rows(n), test=rows(5), collate=collate) for n in (10, 7, 12)]


class OnePiece(nn.Module):
    """The same network on x as it lies, [n, 2 · LENGTH + 2]."""

    def __init__(self, entries):
        super().__init__()
        self.inner, self.entries = Classifier(), entries

    def forward(self, x):
        return self.inner(**self.entries.unpacked(x)).logits


@pytest.mark.parametrize("cohort", [1, 3, "threads"])
@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-alpha", "per-fedavg"])
def test_the_model_gets_what_it_asks_for(make, clients, cohort, method):
    fed = make(Classifier, clients=clients, cohort=cohort, method=method)
    plain = [ff.Client(train=client.train, test=client.test) for client in clients]
    other = make(lambda: OnePiece(clients[0].entries), clients=plain, cohort=cohort, method=method)
    fed.fit(2), other.fit(2)
    # The same path, and the same numbers: what makes them is the same.
    for name, tensor in fed.states.state.items():
        assert torch.equal(tensor, other.states.state[f"inner.{name}"]), name
    assert [row["accuracy"] for row in fed.history] == [row["accuracy"] for row in other.history]
    assert isinstance(fed.models[0], Classifier)


def test_a_run_of_them_goes_on(make, same, clients, tmp_path):
    whole = make(Classifier, clients=clients)
    whole.fit(3)
    make(Classifier, clients=clients, store=tmp_path / "store").fit(1, out=tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", Classifier, clients)
    again.fit(2)
    state = again.states.load(range(3))
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.states.state.items())


def test_what_the_classifier_sees_of_samples_by_name(make, clients):
    fed = make(Classifier, clients=clients)
    fed.fit(1)
    batch = clients[0].entries.unpacked(clients[0].test[0])
    assert fed.encode(batch).shape == (3, 5, 5)
    with pytest.raises(ValueError, match="by one x that is drawn: samples are of input_ids"):
        fed.encode(torch.randn(2, 14))


def test_what_does_not_fit_is_refused(make, clients):
    with pytest.raises(ValueError, match=r"samples of client 1 have one x, of client 0 input_ids \[6\]"):
        make(Classifier, clients=[clients[0], ff.Client(train=clients[1].train, test=clients[1].test)])
    with pytest.raises(ValueError, match=r"does not take samples of input_ids \[6\].* unexpected keyword"):
        make(mlp, clients=clients)
    with pytest.raises(ValueError, match=r"augment=\): takes an x, the samples are of input_ids"):
        make(Classifier, clients=clients, augment=lambda x, generator: x)
    with pytest.raises(ValueError, match="by one x that is drawn"):
        make(Classifier, clients=clients, method="simfed")
    half = [ff.Client(train=rows(4), test=rows(4), collate=data.pad(LENGTH)) for _ in range(2)]
    half[1].train[0][0, 0] = 300
    with pytest.raises(ValueError, match=r"input_ids has 300, which torch.bfloat16"):
        make(lambda: Classifier().bfloat16(), clients=half)
