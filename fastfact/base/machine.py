"""This computer: processor, memory, versions and commit, as they stand beside every result; and what was measured on it
once and is remembered: a small JSON file for each question, processor, build and number of threads.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from fastfact.base import VERSION, files

log = logging.getLogger("fastfact")

VARIABLE = "FASTFACT_CHOICE"
FIXED = "fixed"
_OLD = "FASTFACT_COST"


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The name of the CPU, as far as the system tells."""
    return _told_of_processor("model name") or platform.processor() or platform.machine()


def _told_of_processor(name: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(name):
                return line.split(":", 1)[1].strip()
    return None


def hardware() -> dict[str, Any]:
    """What numbers are measured on."""
    import torch

    memory = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": processor(), "cores": cores(), "memory_gib": memory, "gpus": gpus, "system": platform.platform()}


def versions() -> dict[str, str | None]:
    """Versions of the package, Python and what the results depend on; None for what is not installed."""
    found: dict[str, str | None] = {"fastfact": VERSION, "python": platform.python_version()}
    for name in ("torch", "numpy", "scikit-learn", "safetensors", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of the checkout the package runs from, with "-dirty" where it differs in more than the results it
    wrote; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict[str, Any]:
    """What goes beside every result."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def facts(device: str = "cpu") -> dict[str, object]:
    """What times on a device ("cpu" or "cuda") depend on: processor, instruction set, threads, GPU, PyTorch, the
    compiled library and what calls it."""
    import torch

    return {**_lasting(device), "threads": torch.get_num_threads()}


@functools.cache
def _lasting(device: str) -> dict[str, object]:
    import torch

    package = Path(__file__).parents[1]
    library = max(package.glob(f"_{device}*.so"), default=None)
    places = ("ops", "nn", "kernels") if device == "cuda" else ("ops", "nn")
    calling = sorted(path for place in places for path in package.glob(f"{place}/*.py"))
    return {
        "cpu": processor(),
        # Guests of several generations have one name, with AMX and without.
        "flags": _digest(_told_of_processor("flags")),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "library": library and [library.stat().st_size, library.stat().st_mtime_ns],
        "calling": hashlib.blake2b(b"".join(path.read_bytes() for path in calling), digest_size=8).hexdigest(),
    }


def setting() -> str:
    """$FASTFACT_CHOICE; $FASTFACT_COST, as it was called, says the same with "builtin" for "fixed"."""
    asked = os.environ.get(VARIABLE)
    if asked is None and (old := os.environ.get(_OLD)):
        return FIXED if old == "builtin" else old
    return asked or ""


def directory() -> Path | None:
    """Where answers are remembered: the directory that $FASTFACT_CHOICE names, otherwise $XDG_CACHE_HOME/fastfact
    (~/.cache/fastfact). None where nothing is to be measured: $FASTFACT_CHOICE is "fixed" or a file of choices.

    Raises FileNotFoundError where there is no home directory.
    """
    asked = setting()
    if asked == FIXED or asked.endswith(".json"):
        return None
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification: a path that is not absolute is to be ignored.
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fastfact"
    except RuntimeError as error:  # neither $HOME nor an entry of the user in the system's list, as in containers
        raise FileNotFoundError(f"there is no home directory: {error}") from error


def remembered(question: object, measure: Callable[[], dict], device: str = "cpu") -> dict | None:
    """What `measure()` answered the first time `question` came up on this machine.

    Both as JSON holds them. Of several processes that ask at once, the first one to finish decides. None where nothing
    is to be measured, or an answer could not be kept: another run would then decide otherwise, better without it.
    """
    try:
        folder = directory()
    except FileNotFoundError as error:
        log.warning("cannot keep what was measured (%s)", error)
        return None
    if folder is None:
        return None
    path = folder / f"{_digest(facts(device))}-{_digest(question)}.json"
    for damaged in (False, True):
        try:
            if damaged or not path.exists():
                # Ask before the work whether the result can be kept.
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
                content = {"machine": facts(device), "question": question, "answer": measure()}
                files.write(path, json.dumps(content).encode(), keep=not damaged)
            return dict(json.loads(path.read_bytes())["answer"])
        except OSError as error:
            log.warning("%s: cannot keep what was measured (%s)", folder, error)
            return None
        except (ValueError, KeyError, TypeError) as error:
            if damaged:
                raise
            log.warning("%s: damaged (%s), measured again", path, error)
    return None


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
