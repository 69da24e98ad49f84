"""Which of its compute paths a layer takes: each is timed once, on the tensors at hand, and the answer remembered.

As `torch.backends.cudnn.benchmark` does. The first time that a layer meets a kind of work (`Work`), its paths are run a
few times each, in turn, and a path leaves once it is too far behind for the number of runs so far. Those that stay are
compared by what they take in the same turn, and run 16 times, for 0.03 s at least and 0.1 s at most (0.2 s where fewer
than three runs of each fit into that); a ResNet-50 spends about three seconds so. In evaluation two that are close are
run again in other surroundings. Neither gradients nor random numbers are touched.
The answer is remembered for this processor, build and number of threads (`machine.remembered`), so that the next
process need not measure. On a GPU, where kernels are compiled to be measured, a process does so for three seconds.

The paths agree up to rounding only: a run repeats bit for bit if its choices do. `choices()` are those of this process,
to be written beside a run, and `set_choices` takes them again. $FASTFACT_CHOICE: "fixed" takes the paths that a rule of
thumb says (`rule`) and measures nothing; FILE.json takes those of a file (what `choices()` gives), and the rule for all
others; any other value is the directory to remember answers in. In graphs of torch.compile (but for evaluation, see
`compiled`) and torch.export, under the transforms of torch.func and dispatch modes the rule decides.
"""

import contextlib
import functools
import itertools
import json
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fastfact.base import machine
from fastfact.ops import direct
from fastfact.ops.backends import loaded
from fastfact.ops.common import capturing, transforming

log = logging.getLogger("fastfact")

PATHS = ("reconstruct", "factored", "fused", "product")
ANSWERS = (*PATHS, "panels")
"""Paths, and of a W that is kept the order in which rows are multiplied with it: PyTorch's ("reconstruct"), oneDNN's
("product") or this package's."""
KINDS = ("spatial", "kernel", "linear")
"""Of work, those that `rule` knows."""
FORMER = {"reordered": "reconstruct"}
"""What paths are now that tables written before may name."""
BUDGET, LONG, FEW = 0.1, 0.2, 3
"""Seconds for a question, and for one of fewer runs of each path."""
ENOUGH, SHORT = 16, 0.03
"""Runs of each path, and seconds, after which those that are left are equally fast."""
TELLING_RUNS = 5
"""From how many on the median tells more than the shortest."""
BEHIND = {2: 1.3, 3: 1.2, 5: 1.12, 8: 1.08, 12: 1.05}
"""After how many runs of each a path is left out that takes how many times what another takes."""
TELLING, LATE = 0.01, 1.6
"""Seconds of a run that tells something by itself, and how many times those of another make a path leave after it."""
COMPILING = 3.0
"""Seconds of a process after which no more questions are measured on a GPU, where kernels are compiled first: the rule
answers what is not yet known, and the next process goes on."""
NEAR, FAR = 1 << 21, 1 << 23
"""Bytes of other memory that are written before a forward pass, and at most before each part of a training step."""
CACHES, HEAVY, SURE, FIRM = 1 << 25, 1 << 18, 0.75, 1.1
"""Bytes of other memory after which the caches hold no weights; bytes of W in layers of networks whose weights may not
be there; what share of the other's time a path takes that is faster in any case; how much faster it must be else."""
MARGIN, MARGIN_OF_IMAGES = 1.03, 1.08
"""How much faster than "reconstruct" a path must be, which is never far behind the dense layer if a time misleads; and
in the training of convolutions on several threads, where it is in networks, as `APART` says."""
COLD = 4e-6
"""Seconds that PyTorch's convolution takes longer in evaluation, among other layers, than the measurement shows: more
of its code has to be fetched again."""
APART = 1.15
"""How much longer, in evaluation, the path "factored" takes of contiguous images among PyTorch's layers on several
threads: these cut images into other parts, so that much of what a layer reads is in another core's caches."""


class Work(NamedTuple):
    """What a layer is asked to do.

    kind: "spatial", "kernel" (the layouts of a convolution), "linear", or another spec than `Rank1`. size: of W. rows:
    images of an input, or rows of a linear layer's. image: (h, w) of the input, (1, 1) of a linear layer. nonzeros:
    numbers of μ, 0 without μ. step: "evaluation" (what is made once is kept), "forward", "training" (forward and
    backward), "weights" (the same where the input wants no gradient, as in the first layer of a network), "kept" (the
    product with a W that is kept, in one of several orders, see `ANSWERS`) or "module" (several layers in evaluation:
    "reconstruct" by PyTorch's operator for all of them, "factored" one after the other). dense: whether μ is.
    """

    kind: str
    size: tuple[int, ...]
    groups: int
    rows: int
    image: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    rank: int
    nonzeros: int
    channels_last: bool
    step: str
    dtype: torch.dtype
    device: str
    dense: bool = False

    @property
    def density(self) -> float:
        """Of μ."""
        return self.nonzeros / max(1, math.prod(self.size))

    def question(self) -> str:
        """What is remembered it for: rows, image and nonzeros in coarse steps, the rest as it is."""
        how = (self.stride, self.padding, self.dilation, self.groups) if len(self.size) == 4 else ()
        layout = "channels_last" if self.channels_last else "contiguous"
        nonzeros = "dense" if self.dense else f"nonzeros {_coarse(self.nonzeros, 4)}"
        parts = (
            *(self.kind, self.step, str(self.dtype).removeprefix("torch."), layout, _by(self.size)),
            *(_by(one) if isinstance(one, tuple) else one for one in how),
            *(f"rank {self.rank}", nonzeros, f"rows {_coarse(self.rows, 2)}"),
            *(_by(_coarse(side, 2) for side in self.image), self.device, f"{torch.get_num_threads()} threads"),
        )
        return " ".join(map(str, parts))


def _by(numbers) -> str:
    return "x".join(map(str, numbers))


def _coarse(n: int, steps: int) -> int:
    """n, rounded to one of so many steps in each octave."""
    return 0 if n < 1 else round(2 ** (round(steps * math.log2(n)) / steps))


def rule(work: Work) -> str:
    """The path that is likely to be faster, without a measurement: by the multiplications of each, and what a nonzero
    of μ costs beside one of a dense product."""
    if work.step == "module":
        return "factored"
    if work.device != "cpu" or not loaded("cpu") or work.kind not in KINDS:
        return "reconstruct"
    if work.step == "kept":
        if work.dtype != torch.float32 and work.kind == "linear":
            return "product"
        return "panels" if work.rows * math.prod(work.image) > 1 else "reconstruct"
    o, i, kh, kw = (*work.size, 1, 1)[:4]
    o, taps = o / work.groups, kh * kw
    if work.kind == "linear":
        product = work.rank * (1 / o + 1 / i)
    elif work.kind == "kernel":
        product = work.rank * (1 / (o * kw) + 1 / (i * kh))
    else:
        product = work.rank * (1 / o + 1 / taps)
    if o == i == 1 < work.groups and work.step in ("training", "weights"):
        return "factored"  # PyTorch's gradients of depthwise convolutions take twice as long and more
    of_rows = taps == 1 and work.groups == 1
    if of_rows and work.step != "evaluation" and work.dtype != torch.float64:
        # Where μ is dense, tiles of W are multiplied in cache: no slower than a dense product.
        return "factored" if product + min(3.5 * work.density, 0.6) < 0.75 else "reconstruct"
    in_order = of_rows and (work.kind == "linear" or work.channels_last) and work.dtype == torch.float32
    sparse = work.density * (2.2 if taps > 1 else 4 if in_order else 8)
    # Of few pixels, what each nonzero costs outside the product counts.
    few = work.step != "evaluation" and work.rows * math.prod(work.image) < 512
    return "factored" if product + sparse * (2 if few else 1) < 0.75 else "reconstruct"


def nominal(*work) -> str:
    """`rule` for the fields of a `Work`, as a constant of what traces it."""
    return rule(Work(*work))


# What torch.compiler.assume_constant_result does, but for importing torch._dynamo, which takes longer than PyTorch.
nominal._dynamo_marked_constant = True


_lock = threading.RLock()


def _begin_fork() -> None:
    """Whoever held it in the parent is not there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_fork)

_answers: dict[str, str] = {}
_generation = 0
_measured_elsewhere = 0.0
"""Seconds that questions took on another device than the CPU."""
_prepared = False
"""Whether a path was run, and with it what a process prepares once."""


class _NotNow(Exception):
    """There is no time left to measure."""


def generation() -> tuple[int, int]:
    """What an answer depends on besides the work, in a process that does not change its environment."""
    return torch.get_num_threads(), _generation


def holds() -> direct.Fact:
    """What holds until the choices of this process are others."""
    return globals(), "_generation", _generation, None


def choices() -> dict[str, str]:
    """The choices of this process so far: question → path, as JSON holds it."""
    return dict(_answers)


def set_choices(table: Mapping[str, str]) -> None:
    """Take these choices (of `choices()`, perhaps of another process) from here on, without a measurement.

    Raises ValueError for a path that there is not.
    """
    global _generation
    for question, path in table.items():
        if not isinstance(question, str) or path not in (*ANSWERS, *FORMER):
            raise ValueError(f"set_choices({question!r}: {path!r}): the path must be one of {', '.join(ANSWERS)}")
    with _lock:
        _answers.update(_as_named_now(table))
        _generation += 1


def forget() -> None:
    """Forget the choices of this process; what the machine remembers stays."""
    global _generation
    with _lock:
        _answers.clear()
        _generation += 1


def choose(work: Work, sides: Callable[[], Mapping[str, "Side"]]) -> str:
    """The path for `work`. sides: () → path → a function that does the work on that path, called where it has to be
    measured; what it raises (RuntimeError, ValueError) rules a path out."""
    question = work.question()
    if (path := _answers.get(question)) is not None:
        return path
    if not can_measure():
        return rule(work)
    with _lock:
        if question not in _answers:
            _answers[question] = _find(question, work, sides)
        return _answers[question]


def _find(question: str, work: Work, sides) -> str:
    asked = machine.setting()
    if asked.endswith(".json"):
        return _table(asked).get(question) or rule(work)

    def measure() -> dict[str, object]:
        global _measured_elsewhere
        elsewhere, began = work.device != "cpu", time.perf_counter()
        if elsewhere and _measured_elsewhere > COMPILING:
            raise _NotNow
        runs = sides()
        seconds = times(runs)
        _measured_elsewhere += elsewhere * (time.perf_counter() - began)
        counted = {path: _counted(work, path, took) for path, took in seconds.items()}
        path = min(counted, key=counted.get, default=None)
        made = seconds.get("reconstruct")
        if path not in (None, "reconstruct") and made and (doubt := _doubt(work, seconds[path] / made)):
            others, least = doubt
            again = repeated({one: runs[one] for one in ("reconstruct", path)}, others)
            if _counted(work, "reconstruct", again["reconstruct"]) < least * _counted(work, path, again[path]):
                path = "reconstruct"
        return {"path": path, "seconds": seconds}

    found = None
    with contextlib.suppress(_NotNow):
        found = machine.remembered(question, measure, work.device)
    if found is None or found.get("path") not in ANSWERS:
        return rule(work)
    log.debug("%s: %s", question, found)
    return found["path"]


def _doubt(work: Work, share: float) -> tuple[int, float] | None:
    """Where a path that takes this share of the time of "reconstruct" has to be faster, too: after how many bytes of
    other memory, and how many times."""
    if work.step != "evaluation":
        return None
    if work.kind == "linear":
        # Among other layers the one that reads less wins, in a loop the one whose W is in the caches.
        return 0, 1.0
    if math.prod(work.size) * work.dtype.itemsize < HEAVY or share <= SURE:
        return None
    # Where it is the least to read, a kept W leaves the caches to other layers.
    return CACHES, FIRM if work.density > 0.5 else 1.0


def _counted(work: Work, path: str, seconds: float) -> float:
    """What a time is taken for."""
    if work.step == "evaluation" and work.kind != "linear":
        if path == "factored" and not work.channels_last and work.device == "cpu" and torch.get_num_threads() > 1:
            return seconds * APART
        return seconds + COLD if path == "reconstruct" else seconds
    if path == "reconstruct":
        return seconds
    of_images = len(work.size) == 4 and work.step in ("training", "weights") and work.device == "cpu"
    return seconds * (MARGIN_OF_IMAGES if of_images and torch.get_num_threads() > 1 else MARGIN)


@functools.cache
def _table(file: str) -> dict[str, str]:
    table = json.loads(Path(file).read_text())
    if not isinstance(table, dict) or not set(table.values()) <= {*ANSWERS, *FORMER}:
        raise ValueError(f"{machine.VARIABLE}={file}: must hold question → {' | '.join(ANSWERS)}")
    return _as_named_now(table)


def _as_named_now(table: Mapping[str, str]) -> dict[str, str]:
    return {question: FORMER.get(path, path) for question, path in table.items()}


def can_measure() -> bool:
    """Whether this thread computes as usual, so that a measurement would tell something and disturb nothing."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    return not (modes or capturing() or transforming() or torch.jit.is_tracing())


def between(x: torch.Tensor) -> int:
    """Bytes of other memory before each part of a training step: what a network with such images has between them."""
    return min(max(4 * x.numel() * x.element_size(), NEAR), FAR)


class Timed:
    """What a path calls to be timed: `with timed(x): …`, for each part of its work; the seconds add up.

    Before each part something takes the place in the caches that the other layers of a network take, and what the layer
    before has just written, x, is read anew: `others` bytes; where none are given, Timed(others) and the code of some
    operators of PyTorch. Nothing does with Timed(0). Of one thread on the CPU those seconds count that it had the
    processor, whatever else the machine does.
    """

    def __init__(self, others: int = NEAR) -> None:
        self.seconds, self._usual = 0.0, others
        self._others = torch.ones(max(FAR, others), dtype=torch.uint8, device="cpu")
        self._image = torch.ones(1, 1, 64, 64, dtype=torch.float32, device="cpu")
        self.clock = time.perf_counter if torch.get_num_threads() > 1 else time.thread_time

    def of(self, side: "Side") -> float:
        """Seconds of a run."""
        self.seconds = 0.0
        side(self)
        return self.seconds

    @contextlib.contextmanager
    def __call__(self, just_written: torch.Tensor, others: int | None = None) -> Iterator[None]:
        if self._usual:
            memory = self._others[: self._usual if others is None else others]
            if len(memory) > FAR:
                memory.view(torch.int64).sum()  # in half of the time that writing takes
            else:
                memory.add_(1)
            if others is None:
                self._operate()
            just_written.detach().sum()
        began = self._now(just_written.device)
        yield
        self.seconds += self._now(just_written.device) - began

    @torch.no_grad()
    def _operate(self) -> None:
        """What other layers compute, on so little that no other thread is asked to help."""
        x, one = self._image, self._image.flatten()[:1]
        row = x.view(1, -1)
        for _ in range(2):
            y = F.hardswish(F.relu6(F.batch_norm(x, one, one)) + x)
            F.adaptive_avg_pool2d(y, 1)
            z = F.gelu(F.layer_norm(row, row.shape[1:]))
            torch.cat([z.softmax(1), z])

    def _now(self, device: torch.device) -> float:
        if device.type != "cuda":
            return self.clock()
        torch.cuda.synchronize(device)
        return time.perf_counter()


Side = Callable[[Timed], object]
"""A run of a path."""


def times(sides: Mapping[str, Side]) -> dict[str, float]:
    """path → the time of a run in seconds, as `_typical` has it, within the budget; a path that fails is left out.

    Where hooks of the caller would see what autograd saves (activation checkpoints), it runs in a thread of its own.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return _times(sides)
    found, threads = [], torch.get_num_threads()

    def body() -> None:
        torch.set_num_threads(threads)
        found.append(_times(sides))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return found[0]


def repeated(sides: Mapping[str, Side], others: int) -> dict[str, float]:
    """path → the shortest time of runs with so many bytes of other memory between them, in seconds."""
    timed, shortest = Timed(others), dict.fromkeys(sides, math.inf)
    for _ in range(2):
        for path, side in sides.items():
            began = timed.clock()
            for done in itertools.count(1):
                shortest[path] = min(shortest[path], timed.of(side))
                if done >= FEW and timed.clock() - began > SHORT / 10:
                    break
    return shortest


def _times(sides: Mapping[str, Side]) -> dict[str, float]:
    global _prepared
    first, timed = {}, Timed()
    began = timed.clock()
    for path, side in sides.items():
        try:
            first[path] = timed.of(side)
        except Exception as error:
            # On a GPU a path may fail as it is compiled, with errors of the compiler.
            if path == "reconstruct" and not isinstance(error, RuntimeError | ValueError):
                raise
            log.debug("%s cannot be taken: %s", path, error)
    # The first run of a path also prepares, and another program may be in the way: it counts only where it was long.
    least = min(first.values(), default=0)
    far = LATE * least if least > TELLING else max(8 * least, SHORT)
    path = next(iter(first), None)
    if path and first[path] >= far and (least <= TELLING or not _prepared):
        # What the process prepares once, such as a library, falls to the first run of all.
        first[path] = min(first[path], timed.of(sides[path]))
    _prepared = True
    alive = [path for path in first if first[path] < far]
    runs, behind = {path: [] for path in alive}, math.inf
    for done in itertools.count(1):
        for path in alive:
            runs[path].append(timed.of(sides[path]))
        behind, took = BEHIND.get(done, behind), timed.clock() - began
        least = min((min(runs[path]) for path in alive), default=0)
        alive = [path for path in alive if min(runs[path]) <= behind * least]
        enough = done >= ENOUGH and took > SHORT
        if len(alive) < 2 or enough or took > (BUDGET if done >= FEW else LONG):
            return first | _typical(runs)


def _typical(runs: Mapping[str, list[float]]) -> dict[str, float]:
    """path → seconds, from the runs of each, made in turn: the shortest one of the fastest path, and of the others how
    many times what that took in the same turn, the median: so it matters less when the machine was fast, or busy. Of
    few runs it is the shortest: a second run may still prepare, as the first does."""
    if not runs:
        return {}
    fastest = min(runs, key=lambda path: min(runs[path]))
    seconds = min(runs[fastest])

    def of(own: list[float]) -> float:
        ratios = [mine / max(its, 1e-9) for mine, its in zip(own, runs[fastest], strict=False)]
        return min(own) if len(own) < TELLING_RUNS else seconds * statistics.median(ratios)

    return {path: of(own) for path, own in runs.items()}
