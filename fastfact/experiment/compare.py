"""Cells spread over processes, and comparisons: methods × seeds, a cell each.

A cell is one run: one method, one seed, everything else from the configuration. Cells know nothing of each other and
each computes on one thread, so the numbers are the same however many of them run at once.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fastfact.base import files
from fastfact.experiment import build, report
from fastfact.experiment.config import Config, cell_config
from fastfact.experiment.run import check_directory, differences, finished, run
from fastfact.federation.client.memory import keep_freed
from fastfact.federation.storage.run_directory import write_rows

_events: Connection
"""In a worker process: where its rounds are told."""


def _begin(events: Connection) -> None:
    """What a worker process does first: compute on one thread, and end when the process that started it does."""
    global _events
    _events = events
    torch.set_num_threads(1)
    keep_freed()
    # Ended in the middle of a cell, it leaves a checkpoint.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _cell(config: Config, directory: Path) -> dict[str, Any]:
    return run(config, directory, lambda number, accuracy: _events.send((number, accuracy)), resume=True)


class _Worker:
    """A process that runs one cell after another: an executor of its own, so that it takes no other down with it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.events, theirs = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(1, context, _begin, (theirs,))
        self.process: Any = None
        self.directory = Path()
        self.cell: Future[dict[str, Any]] = Future()

    def start(self, config: Config, directory: Path) -> None:
        before = set(multiprocessing.active_children())
        with _quiet_interrupts(), _one_thread():
            self.cell, self.directory = self.executor.submit(_cell, config, directory), directory
        if self.process is None:
            (self.process,) = set(multiprocessing.active_children()) - before

    def rounds(self) -> Iterator[tuple[int, float]]:
        """(round, accuracy) of the rounds that were told since the last call."""
        while self.events.poll():
            yield self.events.recv()

    def outcome(self) -> tuple[str, Any]:
        """("done", result) or ("failed", reason) of a cell that has ended."""
        error = self.cell.exception()
        if error is None:
            return "done", self.cell.result()
        if isinstance(error, BrokenProcessPool):
            self.process.join()
            return "failed", f"its process ended with exit code {self.process.exitcode}"
        return "failed", str(error) if isinstance(error, ValueError | OSError) else "".join(
            traceback.format_exception(error)
        )

    def stop(self) -> None:
        """End the process, in the middle of its cell if need be."""
        if self.process is not None and not self.cell.done():
            self.process.terminate()
        self.executor.shutdown(cancel_futures=True)
        self.events.close()


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C: the parent alone decides, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_cells(
    cells: Sequence[tuple[Config, Path]], jobs: int, on_event: Callable[[Path, str, Any, Any], None]
) -> dict[Path, str]:
    """Run cells in `jobs` worker processes; directory → reason for those that failed.

    on_event(directory, kind, …): ("round", number, accuracy), ("done", result, None) or ("failed", reason, None).
    A process that is killed fails its cell alone. Ends the processes when interrupted.
    """
    waiting: deque[tuple[Config, Path]] = deque(cells)
    failed: dict[Path, str] = {}
    free: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                busy.append(free.pop() if free else _Worker())
                busy[-1].start(*waiting.popleft())
            wait([worker.events for worker in busy], timeout=0.1)
            for worker in list(busy):
                ended = worker.cell.done()
                for number, accuracy in worker.rounds():
                    on_event(worker.directory, "round", number, accuracy)
                if not ended:
                    continue
                kind, detail = worker.outcome()
                if kind == "failed":
                    failed[worker.directory] = detail
                busy.remove(worker)
                if waiting and not isinstance(worker.cell.exception(), BrokenProcessPool):
                    free.append(worker)
                else:
                    worker.stop()
                on_event(worker.directory, kind, detail, None)
    finally:
        for worker in busy + free:
            worker.stop()
    return failed


def run_missing(
    cells: Mapping[str, Config], directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]
) -> dict[str, str]:
    """Run those of the cells, by directory name, that are not finished below `directory`; name → reason of failed ones.

    on_event(name, kind, …): what `run_cells` says, or ("found", result, None) for one that is finished.
    """
    waiting = []
    for name, config in cells.items():
        path = directory / report.CELLS / name
        if finished(config, path):
            on_event(name, "found", report.read_cell(path).result, None)
        else:
            waiting.append((config, path))
    failed = run_cells(waiting, jobs, lambda path, *event: on_event(path.name, *event))
    return {path.name: reason for path, reason in failed.items()}


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started inside compute on one thread from their first import on."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass(frozen=True)
class Comparison:
    """Methods × seeds, the rest of the configuration the same. Directory name → cell."""

    config: Config
    methods: tuple[str, ...]
    seeds: int

    def __post_init__(self):
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ValueError(f"methods={','.join(self.methods)!r}, must be one or more names, each once")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds}, must be at least 1")

    def cells(self) -> dict[str, Config]:
        seeds = range(self.config.seed, self.config.seed + self.seeds)
        return {f"{m}-seed{seed}": cell_config(self.config, m, seed) for m in self.methods for seed in seeds}

    def describe(self) -> dict[str, Any]:
        """What compare.json holds."""
        config = asdict(self.config)
        del config["method"]
        return {"methods": self.methods, "seeds": self.seeds, "cells": list(self.cells()), "config": config}

    def check(self, directory: Path) -> None:
        """Raise ValueError for anything wrong with a cell or with `directory`, before anything is written."""
        for method in self.methods:
            build.federation(cell_config(self.config, method, self.config.seed))
        self.check_directory(directory)

    def check_directory(self, directory: Path) -> None:
        """Raise ValueError unless `directory` is new (or empty), or holds this comparison."""
        if files.is_vacant(directory, report.CELLS) and files.is_vacant(directory / report.CELLS):
            return
        if not (directory / report.COMPARISON).is_file():
            raise ValueError(f"{directory} exists, is not empty and holds no comparison; choose another --out")
        held = Comparison.read(directory)
        if held.config.rounds != self.config.rounds:
            raise ValueError(
                f"rounds={self.config.rounds}: {directory} holds a comparison over {held.config.rounds} rounds, which"
                " cannot be changed; choose another --out, or delete it"
            )
        there, cells = held.cells(), self.cells()
        if lost := [name for name in there if name not in cells]:
            raise ValueError(
                f"methods={','.join(self.methods)!r}, seeds={self.seeds}, seed={self.config.seed}: {directory} holds a"
                f" comparison with {', '.join(lost)} too; methods and seeds can be added, not taken away; choose"
                " another --out"
            )
        for name, config in there.items():
            if different := differences(config.identity(), cells[name]):
                raise ValueError(
                    f"{directory} holds another comparison ({'; '.join(different)}); choose another --out, or delete it"
                )
        for name, config in cells.items():
            check_directory(config, directory / report.CELLS / name, resume=True)

    def run(self, directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]) -> dict[str, str]:
        """Run what is not finished, `jobs` cells at a time, then write metrics.jsonl; name → reason of failed cells."""
        with files.locked(directory):
            self.check_directory(directory)
            files.remove_unfinished(directory)
            files.make_folder(directory / report.CELLS)
            files.write_json(directory / report.COMPARISON, self.describe(), sealed=True, indent=1)
            return self._run(directory, jobs, on_event)

    @classmethod
    def read(cls, directory: Path) -> "Comparison":
        """The comparison that was begun in `directory`. Raises ValueError where there is none."""
        content = files.read_sealed(directory / report.COMPARISON)
        try:
            methods = tuple(content["methods"])
            return cls(Config(**content["config"], method=methods[0]), methods, content["seeds"])
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{directory / report.COMPARISON}: {error!r}") from error

    def _run(self, directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]) -> dict[str, str]:
        cells = self.cells()
        failed = run_missing(cells, directory, jobs, on_event)
        if len(failed) < len(cells):
            done = report.read(directory)
            rows = [{"method": cell.method, "seed": cell.seed, **row} for cell in done for row in cell.rows]
            write_rows(directory / report.METRICS, rows)
        return failed
