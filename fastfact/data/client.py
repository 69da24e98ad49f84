"""A client: its samples, brought into tensors once."""

import torch

from fastfact.data.samples import Collate, Samples, read


class Client:
    """One client: `train` and `test`, each (x [n, …], y [n, …]) as tensors or arrays, a map-style dataset
    (`torch.utils.data`, Hugging Face `datasets`) of samples (x, y) or of dicts, a DataLoader of either, or a dict of
    tensors [n, …].

    x may be float (cast to the model's dtype) or integer (tokens); y are what `Federation(loss=)` wants: labels from 0,
    numbers, or several of either. Sizes and label sets may differ from client to client; shapes may not.
    Of a dict y is the entry `label`, by default "labels", "label", "target", "targets" or "y"; the model is called with
    the others by their names, or with x where it is only one. collate: of a dataset, samples → batch, for those that
    are not alike: `fastfact.data.pad`.
    A dataset or DataLoader is read once, here, and stays in memory (as one tensor x, of which `entries` says what is
    where); `LazyClients` makes clients when a round asks for them, where that is too much. Augmentation belongs into
    `Federation(augment=)`.
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
        label: str | None = None,
        collate: Collate | None = None,
    ):
        said = "Client" if name is None else f"Client {name}"
        self.name, self.num_classes, self.vocabulary, self.group = name, num_classes, vocabulary, group
        (train, self.entries), (test, entries) = (
            read(f"{said}: {part}", samples, label, collate) for part, samples in (("train", train), ("test", test))
        )
        self.train, self.test = _checked(f"{said}: train", train), _checked(f"{said}: test", test)
        if str(self.entries) != str(entries):
            raise ValueError(f"{said}: train samples have {self.entries}, test samples {entries}: must be the same")
        if self.train[0].shape[1:] != self.test[0].shape[1:]:
            raise ValueError(
                f"{said}: train samples have shape {list(self.train[0].shape[1:])},"
                f" test samples {list(self.test[0].shape[1:])}: must be the same"
            )

    def __len__(self) -> int:
        """The number of training samples."""
        return len(self.train[1])

    def __repr__(self) -> str:
        return f"Client(train={len(self)} × {list(self.train[0].shape[1:])}, test={len(self.test[1])})"


def _checked(what: str, samples: Samples) -> Samples:
    x, y = samples
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
