"""What a federation checks before its first round: that the model, the method and the clients' data fit together."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastfact.federation.client.data import Client, Samples, channels_last, placed
from fastfact.federation.client.dropout import Streams
from fastfact.federation.config import round_half_up
from fastfact.federation.server.strategy import Strategy
from fastfact.federation.state import generator_for, seed_for, seeded

log = logging.getLogger("fastfact")


def template_of(factory: Callable[[], nn.Module], method: Strategy, seed: int, device) -> nn.Module:
    """The model every client starts from, as the method wants it. Raises ValueError for a factory that makes none."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError(
            f"Federation(model={type(factory).__name__}): must be a function () → nn.Module"
            + (", for example lambda: copy.deepcopy(model)" if isinstance(factory, nn.Module) else "")
        )
    with seeded(seed, 0, 0, "model"):
        torch.manual_seed(seed_for(seed, 0, 0, "model"))
        template = factory()
        if not isinstance(template, nn.Module):
            raise ValueError(f"Federation(model=): returned {type(template).__name__}, must return an nn.Module")
        template = method.prepare(template)
    if device is not None:
        template = template.to(_device_of(device))
    if not any(p.requires_grad for p in template.parameters()):
        raise ValueError("Federation(model=): the model has no parameter that can train")
    return template


def _device_of(device: str | torch.device) -> torch.device:
    """Raises ValueError for a device that does not exist, or not here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: must be cpu, cuda or cuda:1 ({error})") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return found


class Data:
    """The clients' samples as the model takes them, on its device: `train`, `test` and `held_out` of each.

    clients: a list or tuple is checked and placed at once, any other sequence client by client as rounds ask for them
    (and forgotten again, see `keep`). validation: the fraction of the training samples that is held out of training,
    for a method that evaluates on it; without one `held_out` is `train`.
    """

    def __init__(self, clients: Sequence[Client], like: Tensor, method: Strategy, seed: int):
        if not isinstance(clients, Sequence):
            raise ValueError(f"Federation(clients={type(clients).__name__}): must be a sequence of ff.Client")
        if not len(clients):
            raise ValueError("Federation(clients=[]): must be at least one client")
        self.clients, self.method, self.seed = clients, method, seed
        self.device, self.dtype, self.last = like.device, like.dtype, False
        self.lazy = not isinstance(clients, list | tuple)
        self.classes: int | None = None
        self.placed: dict[int, Placed] = {}
        self.shape = self._checked(0).train[0].shape[1:]
        for k in range(1 if self.lazy else len(clients)):
            self.placed[k] = self._place(k)

    def __getitem__(self, client: int) -> "Placed":
        if client not in self.placed:
            self.placed[client] = self._place(client)
        return self.placed[client]

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator["Placed"]:
        return (self[client] for client in range(len(self)))

    def keep(self, clients: Sequence[int]) -> None:
        """Of clients that are made when asked for, keep only these in memory."""
        if self.lazy:
            self.placed = {client: self.placed[client] for client in clients if client in self.placed}

    def _checked(self, k: int) -> Client:
        client = self.clients[k]
        if not isinstance(client, Client):
            raise ValueError(f"Federation(clients=): client {k} is {type(client).__name__}, must be ff.Client")
        return client

    def _place(self, k: int) -> "Placed":
        client = self._checked(k)
        if client.train[0].shape[1:] != self.shape:
            raise ValueError(
                f"Federation(clients=): samples of client {k} have shape {list(client.train[0].shape[1:])}, of client 0"
                f" {list(self.shape)}: must be the same"
            )
        self._check_labels(k, client)
        train, test = (
            formatted(placed(data, self.device, self.dtype), self.last) for data in (client.train, client.test)
        )
        if not self.method.validation:
            return Placed(train, train, test)
        return Placed(*self._held_out(k, train), test)

    def _held_out(self, k: int, train: Samples) -> tuple[Samples, Samples]:
        """The training samples split into those the client trains on and those it evaluates others on."""
        x, y = train
        if len(y) < 2:
            raise ValueError(f"{self.method.name}: client {k} has a single training sample and must hold out one")
        order = torch.randperm(len(y), generator=generator_for(self.seed, 0, k, "validation"))
        count = min(max(1, round_half_up(self.method.validation * len(y))), len(y) - 1)
        trained, held_out = order[count:].sort().values.to(self.device), order[:count].sort().values.to(self.device)
        return (x[trained], y[trained]), (x[held_out], y[held_out])

    def sample(self) -> Tensor:
        """x of one sample, without the batch axis."""
        return self[0].train[0][0]

    def to_channels_last(self) -> None:
        """Keep the images in channels_last from here on."""
        self.last = True
        self.placed = {k: Placed(*(formatted(part, True) for part in data)) for k, data in self.placed.items()}

    def set_classes(self, classes: int) -> None:
        """Raise ValueError, now or when it comes, for a client with a label the model has no output for."""
        self.classes = classes
        for k in self.placed:
            self._check_labels(k, self.clients[k])

    def _check_labels(self, k: int, client: Client) -> None:
        if self.classes is None:
            return
        top = max(int(client.train[1].max()), int(client.test[1].max()))
        if top >= self.classes:
            raise ValueError(
                f"Federation(clients=): client {k} has label {top}, the model has {self.classes} outputs:"
                f" labels must be 0 … {self.classes - 1}"
            )


class Placed(NamedTuple):
    """One client's samples, see `Data`."""

    train: Samples
    held_out: Samples
    test: Samples


def channels_last_of(template: nn.Module, data: Data) -> nn.Module | None:
    """The model in channels_last, if it has images on the CPU to convolve and runs that way (one that flattens with
    `view` does not): one client at a time, convolutions are faster in it."""
    x = data[0].train[0][:2]
    if x.device.type != "cpu" or x.dim() != 4 or not any(p.dim() == 4 for p in template.parameters()):
        return None
    model = copy.deepcopy(template).to(memory_format=torch.channels_last)
    try:
        logits_of(model, channels_last(x))
    except RuntimeError:
        log.info("the model does not run in channels_last")
        return None
    return model


def formatted(data: Samples, last: bool) -> Samples:
    """The samples, images in channels_last if asked for."""
    return (channels_last(data[0]), data[1]) if last else data


def classes_of(template: nn.Module, data: Data, batch_size: int) -> int:
    """Run the model on a sample: it must take the clients' x and give logits. Returns the number of classes."""
    x = data[0].train[0][:2]
    try:
        logits = logits_of(template, x)
    except Exception as error:
        raise ValueError(f"Federation(model=): does not take samples {x.dtype} {list(x.shape[1:])}: {error}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"Federation(model=): gives {got} for {len(x)} samples, must give logits [n, classes]")
    alone = [k for k, client in data.placed.items() if batch_size == 1 or len(client.train[1]) == 1]
    if alone:
        try:
            logits_of(template, data[alone[0]].train[0][:1], train=True)
        except ValueError as error:
            one = f"batch_size={batch_size}" if batch_size == 1 else f"client {alone[0]} has a single training sample"
            raise ValueError(f"Federation: {one}, and the model cannot train on one sample: {error}") from error
    return logits.shape[1]


def logits_of(model: nn.Module, x: Tensor, train: bool = False) -> Tensor:
    """What a copy of `model` makes of x; neither the model nor the global generator notices."""
    with torch.no_grad(), seeded(0, 0, 0, "probe", x.device):
        return copy.deepcopy(model).train(train)(x)


def draws_of(template: nn.Module, data: Data) -> str:
    """Where a training forward draws random numbers from, see `train.Settings.draws`."""
    x, model = data[0].train[0][:2], copy.deepcopy(template).train()
    if len(x) < 2:
        x = x.repeat_interleave(2, 0)
    with torch.no_grad(), seeded(0, 0, 0, "probe", x.device), Streams([torch.Generator()]) as streams:
        before = torch.get_rng_state()
        model(x)
        globally = not torch.equal(before, torch.get_rng_state())
    if x.device.type != "cpu" or globally:
        return "globally"
    return "own" if streams.used else "no"
