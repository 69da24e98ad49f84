"""Data of clients that a federation cannot train on: a line that names client and value, before anything is trained."""

import numpy as np
import pytest
import torch
from torch import nn

import fastfact as ff


class Samples:
    """A dataset of n samples of which one is not as the others."""

    def __init__(self, change=None, n=4):
        self.change, self.n = change or {}, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        sample = self.change.get(i, (torch.zeros(3), i % 2))
        if isinstance(sample, Exception):
            raise sample
        return sample


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (Samples({2: OSError("disk gone")}), "Client bad: train: sample 2 cannot be read: OSError: disk gone"),
        (Samples({1: torch.zeros(3)}), "train: sample 1 is Tensor, must be a pair"),
        (Samples({3: (torch.zeros(4), 0)}), r"train: sample 3 is torch.float32 \[4\], sample 0 torch.float32 \[3\]"),
        (Samples({3: (torch.zeros(3).long(), 0)}), r"train: sample 3 is torch.int64 \[3\]"),
        (Samples({0: ("a cat", 0)}), "train: x of sample 0 is str, must be an array"),
        (Samples(n=0), "train has no samples"),
        (
            Samples({2: (torch.zeros(3), [0, 1])}),
            r"train: y of sample 2 is torch.int64 \[2\], y of sample 0 torch.int64 \[\]",
        ),
        ((torch.zeros(2, 3), torch.tensor([0.0, torch.inf])), "sample 1 of y has NaN or inf"),
        ((torch.zeros(2, 3), torch.tensor([0j, 0j])), "y is torch.complex64"),
        ((["a", "b"], [0, 1]), "train: x is list, must be an array of numbers"),
        ((torch.tensor([[0.0, torch.nan]]), [0]), "sample 0 of x has NaN or inf"),
    ],
)
def test_samples_that_are_none(train, message):
    with pytest.raises(ValueError, match=message):
        ff.Client(train=train, test=(torch.zeros(1, 3), [0]), name="bad")


def test_labels_of_any_integer_type():
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64, np.int8):
        client = ff.Client(train=(np.zeros((2, 3)), np.array([0, 1], dtype=dtype)), test=Samples())
        assert client.train[1].tolist() == [0, 1] and client.train[1].dtype == torch.int64


def client(n=6, x=None):
    x = torch.randn(n, 3) if x is None else x
    return ff.Client(train=(x, torch.arange(n) % 2), test=(x[:2], torch.arange(len(x[:2])) % 2))


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def federation(clients, **options):
    return ff.Federation(net, clients, batch_size=4, epochs=1, cohort=1, **options)


def test_clients_that_do_not_fit_together():
    with pytest.raises(ValueError, match=r"samples of client 1 are torch.int64 and torch.int64, of client 0 torch.f"):
        federation([client(), client(x=torch.zeros(6, 3, dtype=torch.long))])
    with pytest.raises(ValueError, match=r"samples of client 1 have shape \[5\], of client 0 \[3\]"):
        federation([client(), client(x=torch.zeros(6, 5))])


def test_clients_that_are_made_when_asked_for():
    def make(k):
        if k == 3:
            raise OSError("disk gone")
        return client(1 if k == 2 else 6)

    fed = federation(ff.federation.LazyClients(make, 3))
    with pytest.raises(ValueError, match="client 2 has a single training sample, and the model cannot train on one"):
        fed.fit(1)
    fed = federation(ff.federation.LazyClients(lambda k: make(k + 2 * (k == 1)), 2))
    with pytest.raises(ValueError, match="client 1 cannot be made: disk gone"):
        fed.fit(1)


def test_a_learning_rate_that_is_too_high_leaves_clients_out_with_the_reason():
    torch.manual_seed(0)
    fed = ff.Federation(lambda: nn.Linear(3, 2), [client(), client()], epochs=30, lr=1e30, batch_size=2, cohort=1)
    fed.fit(1)
    assert all("NaN or inf" in row["left_out"] for row in fed.history) and fed.reported is None
