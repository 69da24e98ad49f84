"""Clients that are made when they are asked for, and the batches of their samples."""

from collections.abc import Callable, Sequence

from fastfact.base.kinds import type_error
from fastfact.data.client import Client


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


def batches(n: int, size: int) -> Sequence[tuple[int, int]]:
    """(start, stop) of the batches of one epoch over n samples.

    A last batch of a single sample joins the one before it: batch-norm cannot train on one value per channel.
    """
    starts = list(range(0, n, size))
    if len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True))
