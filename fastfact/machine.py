"""This computer: processor, memory, versions and commit, as they stand beside every result."""

import contextlib
import importlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The name of the CPU, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
    package = importlib.import_module(__package__)
    found: dict[str, str | None] = {"fastfact": package.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "scikit-learn", "safetensors", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of the checkout the package runs from, with "-dirty" where it differs in more than the results it
    wrote; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]

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
