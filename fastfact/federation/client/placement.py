"""The clients' samples as the model takes them, on its device."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastfact.data.client import Client, Samples
from fastfact.federation.config import round_half_up
from fastfact.federation.state import generator_for


class Placed(NamedTuple):
    """One client's samples, see `Placement`."""

    train: Samples
    held_out: Samples
    test: Samples


class Placement:
    """The clients' samples as the model takes them, on its device: `train`, `test` and `held_out` of each.

    clients: a list or tuple is checked and placed at once, any other sequence client by client as rounds ask for them
    (and forgotten again, see `keep`). validation: the fraction of the training samples that is held out of training,
    for a method that evaluates on it; without one `held_out` is `train`. first: the client whose samples say what a
    sample is.
    """

    def __init__(self, clients: Sequence[Client], like: Tensor, validation: float, seed: int, first: int = 0):
        if not isinstance(clients, Sequence):
            raise ValueError(f"Federation(clients={type(clients).__name__}): must be a sequence of ff.Client")
        if not len(clients):
            raise ValueError("Federation(clients=[]): must be at least one client")
        self.clients, self.validation, self.seed, self.first = clients, validation, seed, first
        self.device, self.dtype, self.last = like.device, like.dtype, False
        self.lazy = not isinstance(clients, list | tuple)
        self.classes: int | None = None
        self.labels: Callable[[Tensor], Tensor] = lambda y: y
        self.alone: Exception | None = None
        """Why the model cannot train on a single sample; of clients that are made when asked for."""
        self.placed: dict[int, Placed] = {}
        client = self._checked(first)
        (x, y), self.entries = client.train, client.entries
        self.targets = _kind(y)
        self.shape, self.floats = x.shape[1:], x.is_floating_point()
        for k in [first] if self.lazy else range(len(clients)):
            self.placed[k] = self._place(k)

    def __getitem__(self, client: int) -> Placed:
        if client not in self.placed:
            self.placed[client] = self._place(client)
        return self.placed[client]

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[Placed]:
        return (self[client] for client in range(len(self)))

    def keep(self, clients: Sequence[int]) -> None:
        """Of clients that are made when asked for, keep only these in memory."""
        if self.lazy:
            self.placed = {client: self.placed[client] for client in clients if client in self.placed}

    def _checked(self, k: int) -> Client:
        try:
            client = self.clients[k]
        except Exception as error:
            raise ValueError(f"Federation(clients=): client {k} cannot be made: {error}") from error
        if not isinstance(client, Client):
            raise ValueError(f"Federation(clients=): client {k} is {type(client).__name__}, must be ff.Client")
        return client

    def _place(self, k: int) -> Placed:
        client = self._checked(k)
        if str(client.entries) != str(self.entries):
            raise ValueError(
                f"Federation(clients=): samples of client {k} have {client.entries or 'one x'}, of client {self.first}"
                f" {self.entries or 'one x'}: must be the same"
            )
        for x, _ in (client.train, client.test) if client.entries is not None and client.entries.mixed else ():
            for name, column in client.entries.unpacked(x).items():
                client.entries.check(name, column, self.dtype)
        if client.train[0].shape[1:] != self.shape:
            raise ValueError(
                f"Federation(clients=): samples of client {k} have shape {list(client.train[0].shape[1:])}, of client"
                f" {self.first} {list(self.shape)}: must be the same"
            )
        for y in (client.train[1], client.test[1]):
            if (kind := _kind(y)) != self.targets:
                raise ValueError(
                    f"Federation(clients=): targets y of client {k} are {kind[0]} {kind[1]} each, of client"
                    f" {self.first} {self.targets[0]} {self.targets[1]}: must be alike"
                )
        if client.train[0].is_floating_point() != self.floats or client.test[0].is_floating_point() != self.floats:
            kinds = " and ".join(str(data[0].dtype) for data in (client.train, client.test))
            raise ValueError(
                f"Federation(clients=): samples of client {k} are {kinds}, of client {self.first}"
                f" {self.clients[self.first].train[0].dtype}: must be all floating or all integers"
            )
        if self.alone is not None and len(client.train[1]) == 1:
            raise ValueError(
                f"Federation: client {k} has a single training sample, and the model cannot train on one sample:"
                f" {self.alone}"
            )
        self._check_labels(k, client)
        train, test = (
            formatted(placed(data, self.device, self.dtype), self.last) for data in (client.train, client.test)
        )
        if not self.validation:
            return Placed(train, train, test)
        return Placed(*self._held_out(k, train), test)

    def _held_out(self, k: int, train: Samples) -> tuple[Samples, Samples]:
        """The training samples split into those the client trains on and those it evaluates others on."""
        x, y = train
        if len(y) < 2:
            raise ValueError(f"Federation(clients=): client {k} has a single training sample, the method holds out one")
        order = torch.randperm(len(y), generator=generator_for(self.seed, 0, k, "validation"))
        count = min(max(1, round_half_up(self.validation * len(y))), len(y) - 1)
        trained, held_out = order[count:].sort().values.to(self.device), order[:count].sort().values.to(self.device)
        return (x[trained], y[trained]), (x[held_out], y[held_out])

    def sample(self) -> Tensor:
        """x of one sample, without the batch axis."""
        return self[self.first].train[0][0]

    def to_channels_last(self) -> None:
        """Keep the images in channels_last from here on."""
        self.last = True
        self.placed = {k: Placed(*(formatted(part, True) for part in data)) for k, data in self.placed.items()}

    def set_classes(self, classes: int, labels: Callable[[Tensor], Tensor]) -> None:
        """Raise ValueError, now or when it comes, for a client with a label the model has no output for.

        labels(y) → those of its targets that are labels, see `Task.labels`.
        """
        self.classes, self.labels = classes, labels
        for k in self.placed:
            self._check_labels(k, self.clients[k])

    def _check_labels(self, k: int, client: Client) -> None:
        if self.classes is None:
            return
        labels = [some for some in (self.labels(client.train[1]), self.labels(client.test[1])) if some.numel()]
        low = min((int(some.min()) for some in labels), default=0)
        top = max((int(some.max()) for some in labels), default=0)
        if top >= self.classes or low < 0:
            label = top if low >= 0 else low
            raise ValueError(
                f"Federation(clients=): client {k} has label {label}, the model has {self.classes} outputs:"
                f" labels must be 0 … {self.classes - 1}"
            )


def _kind(y: Tensor) -> tuple[str, list[int]]:
    """What each of the targets y is, in words and by shape."""
    kind = "floating numbers" if y.is_floating_point() else "booleans" if y.dtype == torch.bool else "integers"
    return kind, list(y.shape[1:])


def placed(data: Samples, device, dtype: torch.dtype) -> Samples:
    """`data` on the model's device, floating numbers in the model's dtype."""
    x, y = (part.to(device, dtype if part.is_floating_point() else part.dtype) for part in data)
    return x, y


def channels_last(x: Tensor) -> Tensor:
    """The images x [n, c, h, w] in channels_last; a copy unless they are."""
    return x.contiguous(memory_format=torch.channels_last)


def formatted(data: Samples, last: bool) -> Samples:
    """The samples, images in channels_last if asked for."""
    return (channels_last(data[0]), data[1]) if last else data
