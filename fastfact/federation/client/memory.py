"""How many clients fit into memory at once: an estimate from what one client's step keeps."""

import contextlib
import ctypes
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from fastfact.federation.state import State

GIB = 1 << 30
WORKSPACE = 2
"""A step needs about so many times what its forward keeps: gradients of activations, workspaces of convolutions."""


@dataclass(frozen=True)
class Need:
    """Bytes: `fixed` by the process, the uploads of a round and states that stay in memory; for each client whose state
    is loaded; and more for each of those that train at the same time."""

    fixed: int
    loaded: int
    training: int

    def clients(self, limit: float, together: int) -> int:
        """How many clients can be loaded while `together` of them train. Raises ValueError if not even those."""
        rest = limit * GIB - self.fixed - together * self.training
        if rest < together * self.loaded:
            least = (self.fixed + together * (self.training + self.loaded)) / GIB
            raise ValueError(
                f"Federation(memory_limit={limit:g}): {together} client{'s' * (together > 1)} at work need about"
                f" {least:.2f} GiB; a larger limit, fewer clients a round, a smaller cohort or store=DIR would do"
            )
        return int(rest // self.loaded)


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_freed() -> bool:
    """Let this process keep the memory it frees for what it allocates next. Whether it does: glibc can be told to.

    By default glibc gives large blocks back to the kernel, and the next tensor of that size takes its pages anew, each
    by a page fault: for the output of a convolution that can last longer than the convolution. `import fastfact` has it
    keep blocks of up to 32 MB; once told here, it keeps larger ones too, and returns memory to the system only when the
    process ends. For a process of its own that trains on the CPU, at its start; a program that does other things
    besides should decide for itself.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
    return False


def resident() -> int:
    """The memory of this process now, in bytes; where that is not told, the most it had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def forget_peak() -> None:
    """Let `peak` count from here on, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """The most memory this process had, in bytes, since `forget_peak`."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def bytes_of(state: State) -> int:
    """Of one client in `state` [k, …]."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in state.values())
