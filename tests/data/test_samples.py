"""Samples in the forms that people have them in."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fastfact as ff
from fastfact import data

X, Y = torch.arange(12.0).reshape(4, 3), torch.tensor([0, 1, 1, 0])
TEST = (X[:1], Y[:1])


class Table:
    """As Hugging Face's `datasets.Dataset`: rows by number as dicts of Python values, columns by name."""

    def __init__(self, **columns):
        self.columns = columns
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


@pytest.mark.parametrize(
    "train",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        (X.tolist(), Y.tolist()),
        (X.numpy(), Y.numpy().astype(np.uint8)),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), batch_size=3),
        [(x, int(y)) for x, y in zip(X, Y, strict=True)],
        {"pixels": X, "label": Y},
        Table(label=Y.tolist(), pixels=X.tolist()),
        DataLoader(Table(label=Y.tolist(), pixels=X.numpy()), batch_size=3),
        ({"pixels": X}, Y),
    ],
)
def test_the_same_samples(train):
    client = ff.Client(train=train, test=TEST)
    assert torch.equal(client.train[0], X) and torch.equal(client.train[1], Y)
    assert client.train[1].dtype == torch.int64 and client.entries is None


TOKENS = [[5, 6, 7], [8], [9, 10, 11, 12]]


def test_entries_lie_side_by_side_and_come_apart_again():
    table = Table(input_ids=[[1, 2], [3, 4]], labels=[0, 1], attention_mask=[[1, 1], [1, 0]], weight=[0.5, 2.5])
    client = ff.Client(train=table, test=table)
    x, y = client.train
    assert x.dtype == torch.float32 and y.tolist() == [0, 1]
    found = client.entries.unpacked(x)
    assert {name: (t.tolist(), t.dtype) for name, t in found.items()} == {
        "input_ids": ([[1, 2], [3, 4]], torch.int64),
        "attention_mask": ([[1, 1], [1, 0]], torch.int64),
        "weight": ([0.5, 2.5], torch.float32),
    }
    assert torch.equal(client.entries.packed(found), x)


def test_a_mask_of_booleans_beside_numbers():
    mask = torch.tensor([[True, False], [False, False]])
    samples = {"x": torch.rand(2, 3), "mask": mask, "label": [0, 1]}
    client = ff.Client(train=samples, test=samples)
    assert torch.equal(client.entries.unpacked(client.train[0])["mask"], mask)


def test_sequences_are_brought_to_one_length():
    table = Table(input_ids=TOKENS, labels=TOKENS, kind=[1, 2, 3])
    client = ff.Client(train=table, test=table, collate=data.pad(3, input_ids=1))
    found = client.entries.unpacked(client.train[0])
    assert found["input_ids"].tolist() == [[5, 6, 7], [8, 1, 1], [9, 10, 11]]
    assert found["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]
    assert found["kind"].tolist() == [1, 2, 3]
    assert client.train[1].tolist() == [[5, 6, 7], [8, -100, -100], [9, 10, 11]]
    pairs = [(torch.tensor(tokens), len(tokens) % 2) for tokens in TOKENS]
    client = ff.Client(train=pairs, test=pairs, collate=data.pad(2))
    assert client.train[0].tolist() == [[5, 6], [8, 0], [9, 10]] and client.train[1].tolist() == [1, 1, 0]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(X, Y))


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (
            Table(input_ids=TOKENS, labels=[0, 1, 2]),
            {},
            r"input_ids of sample 1 is .*\[1\].*made so by collate=fastfact",
        ),
        (Table(text=["a", "b"], labels=[0, 1]), {}, "train: text of sample 0 is str, must be an array of numbers"),
        (Table(ids=[1, 2], answer=[0, 1]), {}, "entries ids, answer, of which none is the labels: label= says which"),
        (Table(ids=[1, 2], label=[0, 1]), {"label": "answer"}, "of which 'answer' is none the labels"),
        (Table(label=[0, 1]), {}, "has labels only"),
        ({"a": X, "b": X[:3], "label": Y}, {}, "3 samples b but 4 labels y"),
        ({"a": X, "id": torch.tensor([1, 2, 3, 2**24 + 1]), "label": Y}, {}, "id has 16777217, which torch.float32"),
        (Stream(), {}, "train is Stream, must be a pair of tensors"),
        (DataLoader(TensorDataset(X[:0], Y[:0])), {}, "train has no samples"),
        (Table(input_ids=TOKENS, labels=[0, 1, 2]), {"collate": lambda rows: 1 / 0}, "collate cannot put the samples"),
        ([{"a": 1, "label": 0}, {"b": 1, "label": 0}], {}, r"sample 1 has \['b', 'label'\], sample 0 \['a', 'label'\]"),
    ],
)
def test_samples_that_do_not_go(train, options, message):
    with pytest.raises(ValueError, match=message):
        ff.Client(train=train, test=TEST, **options)


def test_train_and_test_of_one_kind():
    pair = {"a": X, "b": X, "label": Y}
    with pytest.raises(ValueError, match=r"train samples have a \[3\], b \[3\], test samples None: must be the same"):
        ff.Client(train=pair, test=TEST)


def test_a_label_by_another_name():
    client = ff.Client(train=Table(x=[[1.0], [2.0]], answer=[1, 0]), test=([[1.0]], [1]), label="answer")
    assert client.train[1].tolist() == [1, 0]


def test_lengths_that_are_none():
    with pytest.raises(ValueError, match=r"pad\(length=0\): must be an integer of at least 1"):
        data.pad(0)
