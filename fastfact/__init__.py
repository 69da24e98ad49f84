"""fastfact: fast factorized neural-network weights, and the personalized federated learning built on them.

`import fastfact` imports all of `fastfact.public`. The process of a command (`fastfact …`, `python -m fastfact …`) does
so when a name is first asked for: help and completion need no PyTorch.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfact.base import VERSION

__version__ = VERSION


def _is_command() -> bool:
    """Whether this process was started as the command line."""
    if Path(sys.argv[0] if sys.argv else "").name in ("fastfact", "fastfact.exe"):
        return True
    started = sys.orig_argv
    return "-m" in started and started[started.index("-m") + 1 :][:1] == ["fastfact"]


if TYPE_CHECKING or not _is_command():
    from fastfact.public import *  # noqa: F403
    from fastfact.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        if not name.startswith("__"):
            if importlib.util.find_spec(f"{__name__}.{name}"):
                return importlib.import_module(f"{__name__}.{name}")
            public = importlib.import_module("fastfact.public")
            if name in public.__all__:
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
