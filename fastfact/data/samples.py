"""Samples in the forms that people have them in, brought into one tensor x and one y.

Samples of several entries, as dicts with input_ids and attention_mask, lie side by side in one x, so that all that
picks, stacks and moves samples sees a tensor; `Entries` takes them apart again where the model is called.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

Samples = tuple[Tensor, Tensor]
Collate = Callable[[list], Any]
"""Samples → their batch: (x, y), or entries by name."""

LABELS = ("labels", "label", "target", "targets", "y")
"""The entry that is y, the first of these that there is."""


@dataclass(frozen=True)
class Entries:
    """What lies side by side in x [n, numbers]: name, shape of a sample and dtype of each entry, in this order."""

    entries: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "Entries":
        """Those of tensors [n, …] by name."""
        return cls(tuple((name, tuple(column.shape[1:]), column.dtype) for name, column in columns.items()))

    def __str__(self) -> str:
        return ", ".join(f"{name} {list(shape)}" for name, shape, _ in self.entries)

    @property
    def mixed(self) -> bool:
        """Whether integers are held as floating numbers."""
        floats = {dtype.is_floating_point for *_, dtype in self.entries}
        return len(floats) > 1

    def packed(self, columns: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """x [n, numbers] of them, int64 if all are integers, else in `dtype` (by default their largest floating one).

        Raises ValueError for entries of other names or shapes, and integers that `dtype` does not hold exactly.
        """
        if missing := [name for name, *_ in self.entries if name not in columns]:
            raise ValueError(f"there is no {missing[0]}, must be {self}")
        floats = [kind for *_, kind in self.entries if kind.is_floating_point]
        if dtype is None or not floats:
            dtype = max(floats, key=lambda kind: kind.itemsize) if floats else torch.int64
        parts = []
        for name, shape, _ in self.entries:
            column = columns[name]
            if tuple(column.shape[1:]) != shape:
                raise ValueError(f"{name} is {list(column.shape[1:])}, must be {self}")
            part = column.to(dtype).flatten(1) if column.dim() > 1 else column.to(dtype)[:, None]
            if self.mixed:
                self.check(name, column, dtype)
            parts.append(part)
        return torch.cat(parts, 1)

    @staticmethod
    def check(name: str, column: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError for integers that `dtype` does not hold exactly."""
        if column.is_floating_point() or column.dtype == torch.bool or not column.numel():
            return
        if (largest := int(column.abs().max())) > round(2 / torch.finfo(dtype).eps):
            raise ValueError(f"{name} has {largest}, which {dtype} of the entries beside it does not hold exactly")

    def unpacked(self, x: Tensor) -> dict[str, Tensor]:
        """The entries [n, …] of x [n, numbers]; floating ones in the dtype of x."""
        found, begin = {}, 0
        for name, shape, dtype in self.entries:
            size = torch.Size(shape).numel()
            column = x[:, begin : begin + size].reshape(len(x), *shape)
            found[name] = column if dtype.is_floating_point else column.to(dtype)
            begin += size
        return found


def read(what: str, data: Any, label: str | None, collate: Collate | None) -> tuple[Samples, Entries | None]:
    """x and y of the samples of a client as a user has them, and the entries of x if it is of several.

    Raises ValueError, which says `what` it is of, for what cannot be read.
    """
    pair = isinstance(data, tuple | list) and len(data) == 2 and not _is_sample(data)
    if pair or isinstance(data, Mapping):
        batch = data
    elif isinstance(data, DataLoader):
        batches = [_columns(what, batch, label) for batch in data]
        if not batches:
            raise ValueError(f"{what} has no samples, must have at least one")
        joined = {name: [one[name] for one, _ in batches] for name in batches[0][0]}
        y = _joined(what, "y", [y for _, y in batches])
        return _packed(what, {name: _joined(what, name, columns) for name, columns in joined.items()}, y)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        if len(data) == 0:
            raise ValueError(f"{what} has no samples, must have at least one")
        samples = [_sample(what, data, i) for i in range(len(data))]
        batch = _collated(what, samples, collate or _stack)
    else:
        raise ValueError(
            f"{what} is {type(data).__name__}, must be a pair of tensors (x, y), a dict of tensors, a map-style dataset"
            " or a DataLoader"
        )
    return _packed(what, *_columns(what, batch, label))


def _is_sample(data: Sequence) -> bool:
    """Whether a list of two is a dataset of two samples rather than x and y."""
    return isinstance(data[0], tuple) or all(isinstance(one, Mapping) for one in data)


def _sample(what: str, dataset, i: int) -> Any:
    """Sample i of a dataset, whatever goes wrong in it."""
    try:
        sample = dataset[i]
    except Exception as error:
        raise ValueError(f"{what}: sample {i} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(sample, Mapping) and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise ValueError(f"{what}: sample {i} is {type(sample).__name__}, must be a pair (x, y) or a dict")
    return sample


def _collated(what: str, samples: list, collate: Collate) -> Any:
    if collate is _stack:
        return _stack(samples, what)
    try:
        return collate(samples)
    except Exception as error:
        raise ValueError(f"{what}: collate cannot put the samples together: {error}") from error


def _stack(samples: list, what: str = "samples") -> Any:
    """Samples that are alike."""
    if isinstance(samples[0], Mapping):
        if odd := next((i for i, sample in enumerate(samples) if set(sample) != set(samples[0])), None):
            raise ValueError(f"{what}: sample {odd} has {sorted(samples[odd])}, sample 0 {sorted(samples[0])}")
        return {name: _column(what, name, [sample[name] for sample in samples]) for name in samples[0]}
    x, y = ([sample[part] for sample in samples] for part in (0, 1))
    return (_stack(x, what) if isinstance(x[0], Mapping) else _column(what, "x", x)), _column(what, "y", y)


def _column(what: str, name: str, values: list) -> Tensor:
    tensors = [_tensor(f"{what}: {name} of sample {i}", value) for i, value in enumerate(values)]
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.shape != first.shape or (tensor.dtype != first.dtype and name != "y"):
            which = "" if name == "x" else f"{name} of "
            raise ValueError(
                f"{what}: {which}sample {i} is {tensor.dtype} {list(tensor.shape)}, {which}sample 0 {first.dtype}"
                f" {list(first.shape)}: must be alike"
                + (", or be made so by collate=fastfact.data.pad(…)" if tensor.dim() == first.dim() > 0 else "")
            )
    return torch.stack(_one_dtype(tensors))


def _one_dtype(tensors: list[Tensor]) -> list[Tensor]:
    dtype = tensors[0].dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _columns(what: str, batch: Any, label: str | None) -> tuple[dict[str, Tensor], Tensor]:
    """A batch as the entries of x by name ("" where x is a tensor) and y."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        x, y = batch
        named = x if isinstance(x, Mapping) else {"": x}
    elif isinstance(batch, Mapping):
        key = label or next((name for name in LABELS if name in batch), None)
        if key is None or key not in batch:
            raise ValueError(
                f"{what} has the entries {', '.join(map(str, batch))}, of which"
                f" {'none is' if key is None else f'{key!r} is none'} the labels: label= says which is"
            )
        y, named = batch[key], {name: column for name, column in batch.items() if name != key}
    else:
        raise ValueError(f"{what}: a batch is {type(batch).__name__}, must be (x, y) or a dict")
    columns = {name: _tensor(f"{what}: {name or 'x'}", column) for name, column in named.items()}
    if not columns:
        raise ValueError(f"{what} has labels only, must have an entry that the model takes")
    return columns, _tensor(f"{what}: y", y)


def _joined(what: str, name: str, parts: list[Tensor]) -> Tensor:
    try:
        return torch.cat(parts)
    except RuntimeError as error:
        shapes = sorted({tuple(part.shape[1:]) for part in parts})
        raise ValueError(
            f"{what}: {name or 'x'} has the shapes {shapes} in different batches: a collate_fn must pad to one length"
        ) from error


def _packed(what: str, columns: dict[str, Tensor], y: Tensor) -> tuple[Samples, Entries | None]:
    if len(columns) == 1:
        return (next(iter(columns.values())), y), None
    for name, column in columns.items():
        if column.dim() < 1 or len(column) != len(y):
            n = len(column) if column.dim() else 0
            raise ValueError(f"{what}: {n} samples {name} but {len(y) if y.dim() else 0} labels y, must be as many")
    entries = Entries.of(columns)
    try:
        return (entries.packed(columns), y), entries
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _tensor(what: str, value) -> Tensor:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is {type(value).__name__}, must be an array of numbers: {error}") from error


PADDING = {"x": 0, "y": -100, "input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "labels": -100}


def pad(length: int, **values: float) -> Collate:
    """collate(samples) that brings sequences to one length: entries of these names are filled up at the end of their
    first axis, and cut where they are longer. All clients of a federation need one length.

    values: what an entry is filled with; by default input_ids, attention_mask and token_type_ids with 0, labels with
    −100, which no loss counts; of samples (x, y), x with 0 and y with −100. Where there are input_ids and no
    attention_mask, that is made. Single numbers stay as they are. Raises ValueError for a length below 1.
    """
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"pad(length={length!r}): must be an integer of at least 1")
    filled = PADDING | values

    def one(name: str, value: Any) -> Tensor:
        tensor = torch.as_tensor(value)
        if name not in filled or not tensor.dim():
            return tensor
        padded = tensor.new_full((length, *tensor.shape[1:]), filled[name])
        padded[: len(tensor)] = tensor[:length]
        return padded

    def collate(samples: list) -> Any:
        rows = [
            dict(sample) if isinstance(sample, Mapping) else dict(zip("xy", sample, strict=True)) for sample in samples
        ]
        for row in rows:
            if "input_ids" in row and "attention_mask" not in row:
                row["attention_mask"] = torch.ones(len(row["input_ids"]), dtype=torch.long)
        batch = {name: torch.stack([one(name, row[name]) for row in rows]) for name in rows[0]}
        return batch if isinstance(samples[0], Mapping) else (batch["x"], batch["y"])

    return collate
