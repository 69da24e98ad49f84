"""The processes that share the clients of one federation: this one alone, or those that torchrun started.

Every process runs the same program on its own clients, a block of neighbours. What the server computes from the uploads
it computes in each of them, from the same numbers, so that the results are those of one process. Only the first, the
root, reads and writes files.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastfact.federation.state import State, as_bytes

T = TypeVar("T")


class ProcessLost(ConnectionError):
    """Another process of the group has ended, or does not answer."""


class Group:
    """This process alone: every operation is the identity."""

    rank, size = 0, 1
    device: torch.device | None = None
    """Where this process computes; None: where the model puts itself."""

    @staticmethod
    def of_torchrun(timeout: timedelta = timedelta(hours=1)) -> "Group":
        """The group that torchrun describes in the environment; without one, this process alone.

        timeout: how long a process waits for the others, which may have more to do, before it gives up.
        """
        return Processes(timeout) if in_torchrun() else Group()

    def root(self, compute: Callable[[], T]) -> T:
        """What `compute` returns, or raises, in the root; the others do not call it."""
        return compute()

    def each(self, value: T) -> list[T]:
        """`value` of every process, in their order."""
        return [value]

    def stacked(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all processes in their order; `tensor` [counts[rank], …] are this one's."""
        return tensor

    def to_root(self, tensor: Tensor, counts: Sequence[int]) -> Tensor | None:
        """As `stacked`, in the root; None in the others."""
        return tensor

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave the group."""


def in_torchrun() -> bool:
    """Whether torchrun started this process and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


class Processes(Group):
    """The processes of torchrun, by torch.distributed: gloo between CPUs, NCCL between GPUs.

    Raises ProcessLost from any operation if another process ends, also when torchrun ends this one for that reason.
    Where another neither ends nor answers (stopped, or its machine is gone), this one ends after `PATIENCE` seconds.
    """

    PATIENCE = 120

    def __init__(self, timeout: timedelta):
        cuda = torch.cuda.is_available()
        if cuda:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        signal.signal(signal.SIGTERM, _ended)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        self._ended = threading.Event()
        threading.Thread(target=self._pulse, args=(store,), name="pulse", daemon=True).start()

    def _pulse(self, store: dist.Store) -> None:
        """Tell the others that this process lives, and watch for their telling. What waits for them is inside PyTorch,
        where no exception of Python's reaches it."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        every, count, slept = self.PATIENCE / 12, 0, time.monotonic()
        heard: dict[int, tuple[bytes, float]] = {}
        while not self._ended.wait(every):
            count, now = count + 1, time.monotonic()
            if now - slept > 3 * every:
                heard.clear()  # this one was stopped itself
            slept = now
            try:
                store.set(f"pulse/{self.rank}", str(count))
                for rank in others:
                    told = store.get(f"pulse/{rank}") if store.check([f"pulse/{rank}"]) else b""
                    if rank not in heard or heard[rank][0] != told:
                        heard[rank] = told, now
            except RuntimeError:
                return  # torchrun is gone, and ends its processes
            silent = [rank for rank, (_, since) in heard.items() if now - since > self.PATIENCE]
            if silent and not self._ended.is_set():
                which = f"process {silent[0]} of this run has not answered for {self.PATIENCE} s"
                print(
                    f"fastfact: {which}; what was saved is kept, --resume goes on from it", file=sys.stderr, flush=True
                )
                os._exit(1)

    def root(self, compute: Callable[[], T]) -> T:
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = compute()
            except Exception as error:
                outcome[1] = error
        with _others():
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def each(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        with _others():
            dist.all_gather_object(values, value)
        return values

    def stacked(self, tensor: Tensor, counts: Sequence[int]) -> Tensor:
        out = tensor.new_empty(sum(counts), *tensor.shape[1:])
        parts = out.split(list(counts))
        parts[self.rank].copy_(tensor)
        # A broadcast from each: counts differ, and no process holds a second copy. As bytes: no backend knows every
        # dtype.
        with _others():
            works = [
                dist.broadcast(as_bytes(part), src=rank, async_op=True)
                for rank, part in enumerate(parts)
                if part.numel()
            ]
            for work in works:
                work.wait()
        return out

    def to_root(self, tensor: Tensor, counts: Sequence[int]) -> Tensor | None:
        if self.rank:
            if tensor.numel():
                with _others():
                    dist.send(as_bytes(tensor.contiguous()), dst=0)
            return None
        out = tensor.new_empty(sum(counts), *tensor.shape[1:])
        parts = out.split(list(counts))
        parts[0].copy_(tensor)
        with _others():
            for rank, part in enumerate(parts[1:], 1):
                if part.numel():
                    dist.recv(as_bytes(part), src=rank)
        return out

    def __exit__(self, kind, error, trace) -> None:
        self._ended.set()
        # After an error the others need not answer any more.
        if kind is None:
            dist.destroy_process_group()


class Stop:
    """Ctrl-C and SIGTERM while several processes train: noted, and obeyed by all of them between two rounds.

    A process whose round takes longer ends after `GRACE` seconds, with ProcessLost: then torchrun would kill it. One
    process alone is interrupted at once.
    """

    GRACE = 20

    def __init__(self, group: Group):
        self.group, self.noted = group, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if self.group.size > 1 and threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _ended)
        return self

    def __exit__(self, *_) -> None:
        if self._before:
            signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        if not self.noted:
            signal.alarm(self.GRACE)
        self.noted = True

    def asked(self) -> bool:
        """Whether any process was told to stop; each must ask."""
        return self.group.size > 1 and any(self.group.each(self.noted))


class Shard:
    """Which of `k` clients are this process's: a block of neighbours, as many in each process up to one."""

    def __init__(self, group: Group, k: int):
        self.group, self.k = group, k
        self._bounds = [rank * k // group.size for rank in range(group.size + 1)]
        self.block = range(self._bounds[group.rank], self._bounds[group.rank + 1])

    def mine(self, clients: Sequence[int]) -> list[int]:
        """Those of `clients` that are this process's."""
        return [k for k in clients if k in self.block]

    def counts(self, clients: Sequence[int]) -> list[int]:
        """How many of `clients` (ascending) each process has."""
        at = [bisect_left(clients, bound) for bound in self._bounds]
        return [stop - start for start, stop in pairwise(at)]

    def places(self, clients: Sequence[int]) -> range:
        """Where this process's are among `clients` (ascending)."""
        return range(bisect_left(clients, self.block.start), bisect_left(clients, self.block.stop))

    def stacked(self, state: State, clients: Sequence[int]) -> State:
        """The tensors [len(clients), …] of `clients` (ascending), of which `state` has this process's rows."""
        counts = self.counts(clients)
        return {name: self.group.stacked(tensor, counts) for name, tensor in state.items()}


@contextlib.contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(f"another process of this run has ended or does not answer ({error})") from error


def _ended(signum, frame) -> None:
    raise ProcessLost("another process of this run has ended, or torchrun was told to end it")
