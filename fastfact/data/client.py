"""A client: its samples, brought into tensors once."""

import torch
from torch import Tensor

Samples = tuple[Tensor, Tensor]


class Client:
    """One client: `train` and `test`, each (x [n, …], y [n, …]) or a map-style dataset of (x, y) samples.

    x may be float (cast to the model's dtype) or integer (tokens); y are what `Federation(loss=)` wants: labels from 0,
    numbers, or several of either. Sizes and label sets may differ from client to client. A dataset is
    read once, here; augmentation belongs into `Federation(augment=)`.
    num_classes: how many labels the client's classifier tells apart; vocabulary: how many different tokens there are,
    where x are tokens. group: which of the groups of clients that a scenario makes. `make_clients` sets the three, for
    whoever builds the model or asks who belongs together; a federation is told none of them.

    Raises ValueError for an empty set, lengths that differ, and NaN or inf in x or y.
    """

    def __init__(
        self,
        train,
        test,
        name: str | None = None,
        *,
        num_classes: int | None = None,
        vocabulary: int | None = None,
        group: int | None = None,
    ):
        label = "Client" if name is None else f"Client {name}"
        self.name, self.num_classes, self.vocabulary, self.group = name, num_classes, vocabulary, group
        self.train = _samples(f"{label}: train", train)
        self.test = _samples(f"{label}: test", test)
        if self.train[0].shape[1:] != self.test[0].shape[1:]:
            raise ValueError(
                f"{label}: train samples have shape {list(self.train[0].shape[1:])},"
                f" test samples {list(self.test[0].shape[1:])}: must be the same"
            )

    def __len__(self) -> int:
        """The number of training samples."""
        return len(self.train[1])

    def __repr__(self) -> str:
        return f"Client(train={len(self)} × {list(self.train[0].shape[1:])}, test={len(self.test[1])})"


def _samples(what: str, data) -> Samples:
    if isinstance(data, tuple | list) and len(data) == 2 and not _is_sample(data[0]):
        x, y = (_tensor(f"{what}: {name}", part) for name, part in zip("xy", data, strict=True))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        if len(data) == 0:
            raise ValueError(f"{what} has no samples, must have at least one")
        pairs = [_pair(what, data, i) for i in range(len(data))]
        for i, (sample, _) in enumerate(pairs):
            if sample.shape != pairs[0][0].shape or sample.dtype != pairs[0][0].dtype:
                raise ValueError(
                    f"{what}: sample {i} is {sample.dtype} {list(sample.shape)}, sample 0 {pairs[0][0].dtype}"
                    f" {list(pairs[0][0].shape)}: must be alike"
                )
        x = torch.stack([sample for sample, _ in pairs])
        if odd := next((i for i, (_, y) in enumerate(pairs) if y.shape != pairs[0][1].shape), None):
            raise ValueError(
                f"{what}: y of sample {odd} is {list(pairs[odd][1].shape)}, of sample 0 {list(pairs[0][1].shape)}:"
                " must be alike"
            )
        y = torch.stack([label for _, label in pairs])
    else:
        raise ValueError(f"{what} is {type(data).__name__}, must be a pair of tensors (x, y) or a map-style dataset")
    if y.dim() < 1 or y.is_complex():
        raise ValueError(f"{what}: y is {y.dtype} {list(y.shape)}, must be labels or numbers [n, …]")
    if x.dim() < 1 or len(x) != len(y):
        raise ValueError(f"{what}: {len(x) if x.dim() else 0} samples x but {len(y)} labels y, must be as many")
    if len(y) == 0:
        raise ValueError(f"{what} has no samples, must have at least one")
    for name, part in (("x", x), ("y", y)):
        if part.is_floating_point() and not torch.isfinite(part).all():
            at = int((~torch.isfinite(part.flatten(1) if part.dim() > 1 else part[:, None])).any(1).nonzero()[0])
            raise ValueError(f"{what}: sample {at} of {name} has NaN or inf")
    return x, y if y.is_floating_point() or y.dtype == torch.bool else y.long()


def _tensor(what: str, value) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} is {type(value).__name__}, must be an array of numbers: {error}") from error


def _pair(what: str, dataset, i: int) -> tuple[Tensor, Tensor]:
    """Sample i of a dataset, whatever goes wrong in it."""
    try:
        pair = dataset[i]
    except Exception as error:
        raise ValueError(f"{what}: sample {i} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"{what}: sample {i} is {type(pair).__name__}, must be a pair (x, y)")
    return _tensor(f"{what}: x of sample {i}", pair[0]), _tensor(f"{what}: y of sample {i}", pair[1])


def _is_sample(first) -> bool:
    """Whether a list of two is a dataset of two (x, y) samples rather than the pair of tensors."""
    return isinstance(first, tuple)
