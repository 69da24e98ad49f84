"""A simulated clock: how long each client's round takes, who is late, and who arrives when nobody waits for all."""

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fastfact.federation.state import generator_for


@dataclass(frozen=True)
class Clock:
    """A client's round takes bytes_down / bandwidth + samples / speed + bytes_up / bandwidth seconds.

    speed: samples a second that a client trains on, bandwidth: bytes a second, of each client, or the median of
    log-normal draws whose logarithms have the standard deviation `…_spread`: a client's own from the seed. What is None
    takes no time. The server takes none.
    """

    speed: float | Sequence[float] | None
    bandwidth: float | Sequence[float] | None
    speed_spread: float
    bandwidth_spread: float
    seed: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Clock | None":
        """That of a federation's settings, None where it has none."""
        if settings["speed"] is None and settings["bandwidth"] is None:
            return None
        return cls(**{item.name: settings[item.name] for item in fields(cls)})

    def check(self, clients: int) -> None:
        """Raise ValueError for lists that are not of so many clients."""
        for name in ("speed", "bandwidth"):
            value = getattr(self, name)
            if isinstance(value, list | tuple) and len(value) != clients:
                raise ValueError(
                    f"Federation({name}=): has {len(value)} numbers, must have one for each of {clients} clients"
                )

    def _own(self, name: str, client: int) -> float:
        value = getattr(self, name)
        if value is None:
            return math.inf
        if isinstance(value, list | tuple):
            return value[client]
        draw = torch.randn((), generator=generator_for(self.seed, 0, client, name), dtype=torch.float64).item()
        return value * math.exp(getattr(self, f"{name}_spread") * draw)

    def seconds(self, client: int, samples: int, bytes_down: int, bytes_up: int) -> float:
        """How long a client takes to download, train on so many samples (an epoch counts each again), and upload."""
        return samples / self._own("speed", client) + (bytes_down + bytes_up) / self._own("bandwidth", client)


def arrivals(
    now: float,
    waiting: Mapping[int, float],
    queue: Sequence[int],
    seconds: Mapping[int, float],
    lost: Collection[int],
    at_work: int,
    buffer: int,
) -> tuple[list[int], dict[int, float], float]:
    """(who arrives, client → when those arrive that are still at work, when the last of the former did).

    waiting: client → when, of those at work. queue: clients that begin as soon as less than `at_work` work, in this
    order, and take so many `seconds`; those `lost` never arrive. It ends when `buffer` have arrived, or all have.
    """
    events = [(finish, client) for client, finish in waiting.items()]
    heapq.heapify(events)
    left, arrived = list(queue), []
    while len(arrived) < buffer:
        while left and len(events) < at_work:
            client = left.pop(0)
            heapq.heappush(events, (now + seconds[client], client))
        if not events:
            break
        now, client = heapq.heappop(events)
        if client not in lost:
            arrived.append(client)
    return arrived, {client: finish for finish, client in events}, now
