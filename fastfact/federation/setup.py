"""What a federation checks before its first round: that the model, the method and the clients' data fit together."""

import copy
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fastfact.federation.client import Client, channels_last, placed
from fastfact.federation.cohort import generator_for, seeded
from fastfact.federation.config import round_half_up
from fastfact.federation.strategy import Strategy

log = logging.getLogger("fastfact")


def template_of(factory: Callable[[], nn.Module], method: Strategy, seed: int, device) -> nn.Module:
    """The model every client starts from, as the method wants it. Raises ValueError for a factory that makes none."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError(
            f"Federation(model={type(factory).__name__}): must be a function () → nn.Module"
            + (", for example lambda: copy.deepcopy(model)" if isinstance(factory, nn.Module) else "")
        )
    with seeded(seed, 0, 0, "model"):
        template = factory()
        if not isinstance(template, nn.Module):
            raise ValueError(f"Federation(model=): returned {type(template).__name__}, must return an nn.Module")
        template = method.prepare(template)
    if device is not None:
        template = template.to(device)
    if not any(p.requires_grad for p in template.parameters()):
        raise ValueError("Federation(model=): the model has no parameter that can train")
    return template


class Data:
    """The clients' samples as the model takes them, on its device: `train`, `test` and `held_out`, each by client.

    validation: the fraction of the training samples that is held out of training, for a method that evaluates on it;
    without one `held_out` is `train`.
    """

    def __init__(self, clients: Sequence[Client], like: Tensor, method: Strategy, seed: int):
        check_clients(clients)
        self.device = like.device
        self.train = [placed(client.train, like.device, like.dtype) for client in clients]
        self.test = [placed(client.test, like.device, like.dtype) for client in clients]
        self.held_out = self.train
        if method.validation:
            self._hold_out(method, seed)

    def _hold_out(self, method: Strategy, seed: int) -> None:
        """Split the training samples of each client into those it trains on and those it evaluates others on."""
        trained, held_out = [], []
        for k, (x, y) in enumerate(self.train):
            if len(y) < 2:
                raise ValueError(f"{method.name}: client {k} has a single training sample and must hold out one")
            order = torch.randperm(len(y), generator=generator_for(seed, 0, k, "validation"))
            count = min(max(1, round_half_up(method.validation * len(y))), len(y) - 1)
            parts = order[count:].sort().values.to(self.device), order[:count].sort().values.to(self.device)
            trained.append((x[parts[0]], y[parts[0]]))
            held_out.append((x[parts[1]], y[parts[1]]))
        self.train, self.held_out = trained, held_out

    def sample(self) -> Tensor:
        """x of one sample, without the batch axis."""
        return self.train[0][0][0]

    def to_channels_last(self) -> None:
        """Keep the images in channels_last from here on."""
        for data in (self.train, self.test, self.held_out):
            data[:] = [(channels_last(x), y) for x, y in data]

    def samples(self, client: int) -> int:
        """The number of samples a client trains on."""
        return len(self.train[client][1])


def check_clients(clients: Sequence[Client]) -> None:
    """Raise ValueError for clients whose samples have different shapes, or that are no clients."""
    if not clients:
        raise ValueError("Federation(clients=[]): must be at least one client")
    for k, client in enumerate(clients):
        if not isinstance(client, Client):
            raise ValueError(f"Federation(clients=): client {k} is {type(client).__name__}, must be ff.Client")
        shape, first = client.train[0].shape[1:], clients[0].train[0].shape[1:]
        if shape != first:
            raise ValueError(
                f"Federation(clients=): samples of client {k} have shape {list(shape)}, of client 0"
                f" {list(first)}: must be the same"
            )


def check_labels(clients: Sequence[Client], classes: int) -> None:
    """Raise ValueError for a label the model has no output for."""
    for k, client in enumerate(clients):
        top = max(int(client.train[1].max()), int(client.test[1].max()))
        if top >= classes:
            raise ValueError(
                f"Federation(clients=): client {k} has label {top}, the model has {classes} outputs:"
                f" labels must be 0 … {classes - 1}"
            )


def in_channels_last(template: nn.Module, data: Data) -> nn.Module:
    """The model, and `data` with it, in channels_last if the model runs that way (one that flattens with `view` does
    not): one client at a time, convolutions on the CPU are faster in it."""
    x = data.train[0][0][:2]
    if x.device.type != "cpu" or x.dim() != 4 or not any(p.dim() == 4 for p in template.parameters()):
        return template
    model = copy.deepcopy(template).to(memory_format=torch.channels_last)
    try:
        logits_of(model, channels_last(x))
    except RuntimeError:
        log.info("the model does not run in channels_last")
        return template
    data.to_channels_last()
    return model


def classes_of(template: nn.Module, data: Data, batch_size: int) -> int:
    """Run the model on a sample: it must take the clients' x and give logits. Returns the number of classes."""
    x = data.train[0][0][:2]
    try:
        logits = logits_of(template, x)
    except Exception as error:
        raise ValueError(f"Federation(model=): does not take samples {x.dtype} {list(x.shape[1:])}: {error}") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"Federation(model=): gives {got} for {len(x)} samples, must give logits [n, classes]")
    alone = [k for k, (_, y) in enumerate(data.train) if batch_size == 1 or len(y) == 1]
    if alone:
        try:
            logits_of(template, data.train[alone[0]][0][:1], train=True)
        except ValueError as error:
            one = f"batch_size={batch_size}" if batch_size == 1 else f"client {alone[0]} has a single training sample"
            raise ValueError(f"Federation: {one}, and the model cannot train on one sample: {error}") from error
    return logits.shape[1]


def logits_of(model: nn.Module, x: Tensor, train: bool = False) -> Tensor:
    """What a copy of `model` makes of x; neither the model nor the global generator notices."""
    with torch.no_grad(), seeded(0, 0, 0, "probe", x.device):
        return copy.deepcopy(model).train(train)(x)
