"""A row of a benchmark in a process of its own: one that fails, dies, hangs or loses the device ends alone."""

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LEAST = 5.0
"""Seconds under which a row is not begun."""


class Row(NamedTuple):
    """What a row says of itself, and what it finds."""

    common: dict
    measure: Callable[[], dict]


def append(path: Path, content: dict) -> None:
    """A line of JSON, on the disk when this returns: what a run that is ended leaves can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(content, ensure_ascii=False, default=str) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def in_a_process(row: Row, limit: float) -> dict:
    """`row.common` with what it finds, or with the `error` that it ends in, and its seconds. The process is a fork of
    this one, which must not have touched the device: what it has imported is there at once.
    """
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _measure(row, reading, writing)
    os.close(writing)
    answer, timed_out = _read(reading, began + limit)
    os.close(reading)
    if timed_out:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if timed_out:
        found = {"error": f"time limit of {limit:.0f} s"}
    elif answer:
        found = json.loads(answer)
    else:
        found = {"error": f"died by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"}
    return row.common | found | {"seconds": round(time.monotonic() - began, 2)}


def _measure(row: Row, reading: int, writing: int) -> None:
    """In the child; does not return."""
    os.close(reading)
    try:
        found = row.measure()
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()[-4000:]}
    with os.fdopen(writing, "w") as pipe:
        json.dump(found, pipe, ensure_ascii=False, default=str)
    # without the handlers of a device that may be lost
    os._exit(0)


def _read(pipe: int, ends: float) -> tuple[bytes, bool]:
    """(what was written until the pipe was closed, whether the time ended first)."""
    parts = []
    while (left := ends - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            part = os.read(pipe, 1 << 16)
            if not part:
                return b"".join(parts), False
            parts.append(part)
    return b"".join(parts), True
