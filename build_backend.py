"""The build backend: that of setuptools, with PyTorch's headers at hand wherever there is a C++ compiler to use them.

The kernels are built against PyTorch's stable ABI, so that the headers of any PyTorch ≥ 2.11 do, and the library serves
every other; the module that calls them fastest serves the PyTorch whose headers these are. A front end that isolates
the build hides the one that is installed: it is looked for in the environment that asked for the build, and only where
there is none is PyTorch a requirement of the build. FASTFACT_BUILD=skip, or no compiler, needs neither.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

OLDEST = (2, 11)


def compiler() -> str | None:
    """The C++ compiler: CXX where it is set, else the first on PATH."""
    if given := os.environ.get("CXX"):
        return shutil.which(given.split()[0])
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _serves(path: list[str]) -> bool:
    """Whether these folders hold a PyTorch new enough to build against."""
    found = next(importlib.metadata.distributions(name="torch", path=path), None)
    return found is not None and tuple(int(n) for n in re.findall(r"\d+", found.version)[:2]) >= OLDEST


def _path_of(python: str) -> list[str]:
    """What an interpreter searches outside the isolated build; nothing where it is of another version."""
    hidden = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    code = "import json, sys; print(json.dumps([sys.version_info[:2], sys.path]))"
    try:
        done = subprocess.run([python, "-P", "-c", code], env=env, capture_output=True, text=True, check=True)
        version, path = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return []
    return path if tuple(version) == sys.version_info[:2] else []


def show_pytorch() -> bool:
    """Make a PyTorch importable that isolation hides; whether there is one, hidden or not."""
    if _serves(sys.path):
        return True
    environment = os.environ.get("VIRTUAL_ENV")
    active = environment and os.path.join(environment, "bin", "python")
    for python in filter(None, (sys.executable, active, getattr(sys, "_base_executable", None))):
        path = _path_of(python)
        if _serves(path):
            # Last, so that what the isolated build brings is taken first.
            sys.path += [folder for folder in path if folder not in sys.path]
            return True
    return False


def _requires() -> list[str]:
    if os.environ.get("FASTFACT_BUILD") == "skip" or not compiler():
        return []
    torch = [] if show_pytorch() else ["torch>=" + ".".join(map(str, OLDEST))]
    # Without ninja the files are compiled one after another.
    return torch if shutil.which("ninja") else [*torch, "ninja"]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _requires()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _requires()
