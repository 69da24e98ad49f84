"""Clients that are made when they are asked for, and samples as the model takes them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastfact.data.client import Client, Samples
from fastfact.kinds import type_error


class LazyClients(Sequence[Client]):
    """k clients, each made when it is asked for: make(client) → Client, always the same one for a number.

    For federations of so many that their data does not fit into memory.
    """

    def __init__(self, make: Callable[[int], Client], k: int):
        if not callable(make):
            raise ValueError(f"LazyClients(make={make!r}): must be a function client → Client")
        if type_error(k, int) or k < 1:
            raise ValueError(f"LazyClients(k={k!r}): must be an integer of at least 1")
        self.make, self.k = make, k

    def __len__(self) -> int:
        return self.k

    def __getitem__(self, client: int) -> Client:
        if not 0 <= client < self.k:
            raise IndexError(f"LazyClients[{client}]: there are {self.k}")
        return self.make(client)


def placed(data: Samples, device, dtype: torch.dtype) -> Samples:
    """`data` on the model's device, float x in the model's dtype."""
    x, y = data
    return x.to(device, dtype if x.is_floating_point() else x.dtype), y.to(device)


def channels_last(x: Tensor) -> Tensor:
    """The images x [n, c, h, w] in channels_last; a copy unless they are."""
    return x.contiguous(memory_format=torch.channels_last)


def batches(n: int, size: int) -> Sequence[tuple[int, int]]:
    """(start, stop) of the batches of one epoch over n samples.

    A last batch of a single sample joins the one before it: batch-norm cannot train on one value per channel.
    """
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))
