"""Python processes for tests, forked from one that has imported everything: an interpreter that imports PyTorch, and
what trains with it, takes four seconds, a fork of one a few hundredths.

The server of the forks has run no operation of PyTorch: it has one thread and no pool that a fork would lose.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ["pytest", "fastfact.cli.main", "fastfact.experiment.compare", "matplotlib.pyplot", "torch._dynamo"]


class _Context(multiprocessing.context.ForkServerContext):
    """Its processes have the environment of the process that starts them, not that of the server."""

    def Process(self, *, target, args=(), kwargs=None, **options):
        everything = (dict(os.environ), target, args, kwargs or {})
        return multiprocessing.context.ForkServerProcess(target=_in_environment, args=everything, **options)


def _in_environment(environment, target, args, kwargs) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


_context = _Context()


def context() -> multiprocessing.context.BaseContext:
    """The context of `multiprocessing` whose processes are forked."""
    before, here = dict(os.environ), Path.cwd()
    _context.set_forkserver_preload(PRELOADED)
    # The server imports what is tested here, wherever the first test that needs it is; it computes on one thread.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    os.chdir(ROOT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
    return _context


@contextlib.contextmanager
def workers() -> Iterator[None]:
    """Processes that `multiprocessing` would spawn inside are forked."""
    plain = multiprocessing.get_context
    chosen = {"spawn": context}
    with mock.patch.object(multiprocessing, "get_context", lambda name=None: chosen.get(name, lambda: plain(name))()):
        yield


class Forked:
    """`python ARGUMENTS` (-m MODULE …, -c CODE …, or FILE …) in a fork; as `subprocess.Popen` with pipes of text."""

    def __init__(self, *arguments, cwd: Path = ROOT, env: Mapping[str, str] = os.environ):
        self.said = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        self.process = _started(arguments, cwd, env, {file.name: n for n, file in enumerate(self.said, 1)})

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.process.kill()
        self.process.join()

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Until it has written `text` to stdout. Raises TimeoutError where it does not, or ends before."""
        end = time.monotonic() + timeout
        while text not in (said := Path(self.said[0].name).read_text()):
            if time.monotonic() > end or not self.process.is_alive():
                raise TimeoutError(f"{said!r} instead of {text!r}: {Path(self.said[1].name).read_text()}")
            time.sleep(0.005)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """(stdout, stderr) once it has ended; it is killed after `timeout` seconds."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.kill()
        out, err = (Path(file.name).read_text() for file in self.said)
        return out, err


def run(*arguments, **options) -> subprocess.CompletedProcess:
    """What `subprocess.run` gives of `python ARGUMENTS`; see `Forked`."""
    process = Forked(*arguments, **options)
    out, err = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class Talking:
    """`subprocess.Popen([python, …], stdin=PIPE, stdout=PIPE, stderr=FILE, text=True)` in a fork."""

    def __init__(self, command: list[str], *, stderr: IO, env: Mapping[str, str], **pipes):
        assert pipes == {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with tempfile.TemporaryDirectory() as folder:
            to, back = names = [os.path.join(folder, name) for name in ("stdin", "stdout")]
            for name in names:
                os.mkfifo(name)
            files = {to: 0, back: 1, f"/proc/{os.getpid()}/fd/{stderr.fileno()}": 2}
            self.process = _started(command[1:], ROOT, env, files)
            self.stdin, self.stdout = open(to, "w"), open(back)  # noqa: SIM115

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode


def _started(arguments, cwd: Path, env: Mapping[str, str], files: dict[str, int]) -> BaseProcess:
    given = ([*map(str, arguments)], str(cwd), dict(env), files)
    process = context().Process(target=_run, args=given, daemon=True)
    process.start()
    return process


def _run(arguments: list[str], cwd: str, env: dict[str, str], files: dict[str, int]) -> None:
    """Be that interpreter, to its end. files: what its stdin (0), stdout (1) and stderr (2) are."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for name, number in files.items():
        handle = os.open(name, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(handle, number)
        os.close(handle)
    if 0 in files.values():
        sys.stdin = os.fdopen(0, "r", closefd=False)
    # Those of a new interpreter, not of a forked child of another's tests.
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.current_process()._config["daemon"] = False
    kind, *rest = arguments
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        if kind == "-m":
            sys.argv = rest
            sys.path.insert(0, cwd)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, cwd)
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
