"""How the clients of a round are put on the machine: one after another, some at once on threads, or batched.

One at a time uses all cores for one client's kernels. Threads train one client each, with single-threaded kernels: no
core waits for another within a client, and PyTorch lets go of the interpreter inside its kernels; the clients that are
left over, fewer than cores, share all of these. Batched trains a cohort over the client axis of the ops: it saves the
cost of calls, so it pays while a step is small.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from fastfact.base import machine
from fastfact.data.client import Samples
from fastfact.federation.client.phase import Phase
from fastfact.federation.client.train import Trainer, memory_cohort
from fastfact.federation.state import State, evenly, generator_lock, stack
from fastfact.federation.tensors import copy_of, frozen, tensors_of

log = logging.getLogger("fastfact")

ONE, THREADS, BATCHED = "one", "threads", "batched"


@dataclass(frozen=True)
class ExecutionPlan:
    """how: one of `ONE`, `THREADS`, `BATCHED`. cohort: how many clients train together; 1 unless batched."""

    how: str
    cohort: int = 1

    def __str__(self) -> str:
        if self.how == BATCHED:
            return f"{self.cohort} clients at a time, batched"
        return "one client at a time on all cores" if self.how == ONE else "a client on each core"


def cores() -> int:
    """On how many cores threads train: as many as PyTorch would use for one client."""
    return torch.get_num_threads()


class Executor:
    """Trains and evaluates the rows of a block as its plan says."""

    def __init__(self, trainer: Trainer, plan: ExecutionPlan):
        self.trainer, self.plan = trainer, plan
        self.threads = cores() if plan.how == THREADS else 0
        if self.threads:
            self._free: queue.SimpleQueue[Trainer] = queue.SimpleQueue()
            for _ in range(self.threads):
                worker = trainer.copy()
                worker.shared_generator = False
                self._free.put(worker)
            self._pool = ThreadPoolExecutor(self.threads, "client")

    def train(
        self,
        work: State,
        data: Sequence[Samples],
        round: int,
        clients: Sequence[int],
        phases: Sequence[Phase],
        purpose: str,
        on_client: Callable[[int, int, int, int], None] | None = None,
    ) -> tuple[list[float], list[float]]:
        """Train all rows of `work` in place: the mean loss and the seconds of each client."""
        losses, seconds = [], []

        def finished(chunk: Sequence[int], loss: list[float], took: list[float]) -> None:
            losses.extend(loss)
            seconds.extend(took)
            for client in chunk if on_client else ():
                on_client(round, client, len(losses), len(clients))

        if self.threads:

            def one(worker: Trainer, row: int):
                return worker.train(
                    _row(work, row), data[row : row + 1], round, clients[row : row + 1], phases, purpose
                )

            self._spread(one, len(clients), lambda row, result: finished(clients[row : row + 1], *result))
            return losses, seconds
        size = evenly(len(clients), self.plan.cohort)
        for begin in range(0, len(clients), size):
            chunk, some = clients[begin : begin + size], slice(begin, begin + size)
            rows = {name: tensor[some] for name, tensor in work.items()}
            finished(chunk, *self.trainer.train(rows, data[some], round, chunk, phases, purpose))
        return losses, seconds

    def measure(self, work: State, data: Sequence[Samples]) -> list[dict[str, float | None]]:
        """The accuracy and metrics of each row of `work` on its own data, see `Trainer.measure`."""
        if not self.threads:
            return self.trainer.measure(work, data, self.plan.cohort)
        found: list[dict[str, float | None]] = []
        self._spread(
            lambda worker, row: worker.measure(_row(work, row), data[row : row + 1])[0],
            len(data),
            lambda row, measured: found.append(measured),
        )
        return found

    def _spread(self, call: Callable, n: int, finished: Callable) -> None:
        """call(trainer, row) for each row on the threads, finished(row, result) here, in order.

        A core to each row. What is left over has all cores, once the others are done: some libraries have one number of
        threads for the whole process, and on how many a client computes decides its last bits.
        """
        threads = torch.get_num_threads()
        with generator_lock:
            generator = torch.get_rng_state()
        rest = n % self.threads

        def run(row: int, own: int):
            worker = self._free.get()
            try:
                torch.set_num_threads(own)
                return call(worker, row)
            finally:
                self._free.put(worker)

        futures = []
        try:
            for rows, own in ((range(n - rest), 1), (range(n - rest, n), self.threads // max(1, rest))):
                futures = [self._pool.submit(run, row, own) for row in rows]
                for row, future in zip(rows, futures, strict=True):
                    finished(row, future.result())
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
            # Threads that set their own number also set that of threads still to come.
            torch.set_num_threads(threads)
            with generator_lock:
                if not torch.equal(generator, torch.get_rng_state()):
                    torch.set_rng_state(generator)
                    log.warning(
                        "a loss draws from PyTorch's generator, which threads share: cohort=1 would repeat its draws"
                    )


def _row(work: State, row: int) -> State:
    return {name: tensor[row : row + 1] for name, tensor in work.items()}


def rule(trainer: Trainer, data: Samples) -> ExecutionPlan:
    """What is likely to be fastest, without measuring.

    Measured on one thread, batching is 3–7 times faster for 650 to 13,000 parameters, 1.4–1.7 times for vectors
    at 30,000 (even for images), slower above 55,000, as soon as the tensors of the cohort leave the cache. Vectors
    whose products read the samples where they are gain 5–15 % by cohorts twice as large.
    """
    if trainer.device.type == "cuda":
        # There it always pays, as far as half of the device's memory goes.
        most = torch.cuda.get_device_properties(trainer.device).total_memory // 2
        return ExecutionPlan(BATCHED, _largest(trainer, data[0][0], most))
    parameters = sum(param.numel() for param in trainer.params.values())
    batch = data[0][0].numel() * min(trainer.settings.batch_size, len(data[1]))
    vectors = data[0][0].dim() == 1
    if parameters <= (40_000 if vectors else 20_000) and batch <= 1 << (18 if vectors else 16):
        return ExecutionPlan(BATCHED, min(64, max(2, (1 << (20 if vectors else 19)) // parameters)))
    if cores() > 1 and trainer.settings.draws != "globally":
        return ExecutionPlan(THREADS)
    return ExecutionPlan(ONE)


def _largest(trainer: Trainer, sample: Tensor, most: int) -> int:
    settings = trainer.settings
    slots = len(settings.update.slots) + (settings.accumulate > 1)
    return memory_cohort(trainer.model, sample, settings.batch_size, most, max(1, slots), settings.task)


SURE = 1.25
"""How many times faster than what the rule says another plan must be: near a tie, runs should not choose by noise."""
LONG_STEP = 0.05
"""Seconds of a step above which batching, which saves the cost of calls, is not tried, unless clients share a part of
the model that is frozen: they share its products, too."""


def choose(trainers: dict[str, Trainer], data: dict[str, Samples], clients: int) -> ExecutionPlan:
    """The fastest plan for this model, by a measurement of a few steps; what `rule` says where nothing is measured.

    It is made once on a machine (`machine.remembered`), so that a run that is repeated takes the same plan.

    trainers, data: for each of `ONE` and `BATCHED` (threads run as `ONE` does, but for the cores) the model and the
    samples of one client in the memory format that plan would have.
    """
    expected = rule(trainers[ONE], data[ONE])
    if clients == 1 or trainers[ONE].device.type != "cpu":
        together = clients > 1 and expected.cohort > 1
        chosen = _that_runs(trainers, data, expected) if together else ExecutionPlan(ONE)
        log.info("cohort=auto: %s", chosen)
        return chosen
    settings, (x, y) = trainers[ONE].settings, data[ONE]
    question = {
        "executor": cores(),
        "expected": asdict(expected),
        "tensors": [[name, list(t.shape), str(t.dtype)] for name, t in tensors_of(trainers[ONE].model).items()],
        "batch": [min(settings.batch_size, len(y)), *x.shape[1:]],
        "clients": min(clients, 64),
        "draws": settings.draws,
        "recorded": settings.graphs,
    }
    if (settings.optimizer, settings.precision) != ("sgd", "full"):
        question["optimizer"] = [settings.optimizer, settings.precision]
    found = machine.remembered(question, lambda: asdict(_fastest(trainers, data, clients, expected)))
    chosen = ExecutionPlan(**found) if found else _that_runs(trainers, data, expected)
    log.info("cohort=auto: %s", chosen)
    return chosen


def _that_runs(trainers, data, expected: ExecutionPlan) -> ExecutionPlan:
    """What is expected to be fastest, unmeasured, or one client at a time where the model cannot train over the client
    axis."""
    if expected.how == BATCHED:
        try:
            check_together(trainers[BATCHED], data[BATCHED], expected.cohort)
        except ValueError as error:
            log.info("cohort=auto: %s", error)
            return ExecutionPlan(ONE)
    return expected


def _fastest(trainers, data, clients: int, expected: ExecutionPlan) -> ExecutionPlan:
    plans = {ExecutionPlan(ONE), expected}
    if cores() > 1 and trainers[ONE].settings.draws != "globally":
        plans.add(ExecutionPlan(THREADS))
    times = {}
    for plan in sorted(plans, key=lambda plan: plan.how == BATCHED):
        times[plan] = _measure(trainers, data, plan, clients)
    short = times[ExecutionPlan(ONE)] < LONG_STEP or frozen(trainers[ONE].model)
    if short and not any(plan.how == BATCHED for plan in times):
        plan = ExecutionPlan(BATCHED, min(16, clients))
        times[plan] = _measure(trainers, data, plan, clients)
    log.info("a step of a client: %s", ", ".join(f"{plan} {1e3 * seconds:.1f} ms" for plan, seconds in times.items()))
    best = min(times, key=times.get)
    return best if times[best] * SURE < times[expected] else expected


def check_together(trainer: Trainer, data: Samples, cohort: int) -> None:
    """Raise ValueError for a model that does not train over the client axis, by a step of two clients on a copy."""
    settings = replace(trainer.settings, augment=None, graphs=False)
    one = Trainer(copy_of(trainer.model), trainer.infos, settings)
    work, n = stack(tensors_of(one.model), 2), min(2, settings.batch_size)
    try:
        one.train(work, [tuple(part[:n] for part in data)] * 2, 1, [0, 1], [Phase(1)], "measure")
    except RuntimeError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f'Federation(cohort={cohort}): must be 1, "threads" or "auto": the model does not train together:'
            f" {why:.300}"
        ) from error


def _measure(trainers, data, plan: ExecutionPlan, clients: int) -> float:
    """Seconds a client for a step, infinite where the model cannot train that way."""
    trainer = trainers[BATCHED if plan.how == BATCHED else ONE].copy()
    x, y = data[BATCHED if plan.how == BATCHED else ONE]
    trainer.steps.patience = 0
    n = min(trainer.settings.batch_size, len(y))
    together = plan.cohort if plan.how == BATCHED else cores()
    together = max(1, min(together, clients))
    executor = Executor(trainer, plan)
    work = stack(tensors_of(trainer.model), together)
    samples, phases = [(x[:n], y[:n])] * together, [Phase(1)]
    best = float("inf")
    try:
        for turn in range(4):
            began = time.perf_counter()
            executor.train(work, samples, 1, list(range(together)), phases, "measure")
            if turn:
                best = min(best, (time.perf_counter() - began) / together)
            if turn and best * together > 1:
                break
    except RuntimeError as error:
        log.info("cohort=auto: the model does not train %s: %s", plan, str(error).splitlines()[0])
    return best
