"""Tests on several workers, each test with a time limit: one that hangs, dies or loses the device ends alone.

    python -m bench.gpu_tests --jsonl FILE [--seconds S] [--each S] [--workers N] -- PYTEST ARGUMENTS

A worker is a pytest of its own with a share of the tests. It is started again with what is left of them after a test
that ran too long, that took the process with it, or whose error may have broken the device for those after it. Each
test that does not pass, and the sum, is a line in FILE when it ends. Also the pytest plugin (`-p bench.gpu_tests`) by
which a worker tells what it does.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from bench.gpu_rows import append, read_lines

STREAM = "FASTFACT_TEST_STREAM"
LOST = ("CUDA error", "device-side assert", "illegal memory access", "unspecified launch failure")
"""In errors after which nothing in the process can use the device."""


def pytest_runtest_logstart(nodeid, location):
    append(Path(os.environ[STREAM]), {"begun": nodeid})


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    text = "" if report.outcome == "passed" else str(report.longrepr)[-3000:]
    append(
        Path(os.environ[STREAM]),
        {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "text": text},
    )
    if any(error in text for error in LOST):
        os._exit(3)


def collected(arguments: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout.splitlines()
    return [line for line in lines if "::" in line and not line.startswith(("ERROR", "FAILED"))]


class Worker(threading.Thread):
    """Runs `tests`, one process after another until none is left."""

    def __init__(self, tests: list[str], told, each: float, ends: float):
        super().__init__(daemon=True)
        self.tests, self.told, self.each, self.ends = tests, told, each, ends

    def run(self) -> None:
        while self.tests and self.ends - time.monotonic() > 1:
            before = len(self.tests)
            with tempfile.TemporaryDirectory() as folder:
                self._run_process(Path(folder) / "stream.jsonl")
            if len(self.tests) == before:
                self._tell(self.tests[0], "failed", 0.0, "the worker ended before it began the test")
        for test in list(self.tests):
            self._tell(test, "left out", 0.0, "no time")

    def _tell(self, test: str, outcome: str, seconds: float, text: str) -> None:
        if test in self.tests:
            self.tests.remove(test)
        self.told({"test": test, "outcome": outcome, "seconds": seconds, "text": text})

    def _run_process(self, stream: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "bench.gpu_tests",
            "--tb=short",
        ]
        process = subprocess.Popen(
            [*command, *self.tests],
            # each worker with a thread of its own: with as many as there are cores each, they wait for one another
            env=os.environ | {STREAM: str(stream), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        seen, current, since = 0, None, time.monotonic()
        while True:
            ended = process.poll() is not None
            for line in read_lines(stream)[seen:]:
                seen += 1
                if "begun" in line:
                    current, since = line["begun"], time.monotonic()
                else:
                    self._tell(line["test"], line["outcome"], line["seconds"], line["text"])
                    current = None if line["test"] == current else current
            if ended:
                if current is not None and process.returncode not in (0, 1):
                    code = process.returncode
                    how = f"died by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                    self._tell(current, "failed", round(time.monotonic() - since, 2), how)
                return
            late = current is not None and time.monotonic() - since > self.each
            if late or time.monotonic() > self.ends:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if current is not None:
                    text = f"time limit of {self.each:.0f} s" if late else "no time"
                    self._tell(current, "failed" if late else "left out", round(time.monotonic() - since, 2), text)
                return
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jsonl", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all; what does not fit is left out")
    parser.add_argument("--each", type=float, default=60.0, help="for one test")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("pytest", nargs="*")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    tests = collected(args.pytest)
    outcomes, lock = Counter(), threading.Lock()

    def told(line: dict) -> None:
        with lock:
            outcomes[line["outcome"]] += 1
            if line["outcome"] != "passed":
                print(f"{line['outcome']}: {line['test']}\n{line['text']}", flush=True)
                append(args.jsonl, {"section": "tests", **line})

    workers = [Worker(tests[first :: args.workers], told, args.each, ends) for first in range(args.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    append(args.jsonl, {"section": "tests", "collected": len(tests), **outcomes})
    print(f"{len(tests)} tests: {dict(outcomes)}", flush=True)
    return int(not tests or set(outcomes) - {"passed", "skipped"} != set())


if __name__ == "__main__":
    sys.exit(main())
