"""How long a layer takes on each compute path: a small model, measured once per machine.

The time of a path is a sum of terms (one call, elements read and written, multiplications of each kind) with a
coefficient each. The coefficients are fitted to some seventy short measurements, three seconds in all, when the first
layer asks, one set for each kind of layer, step, memory format and dtype, and kept in

    $XDG_CACHE_HOME/fastfact/cost/   (~/.cache/fastfact/cost/)

for this processor, this build of PyTorch and of fastfact and this number of threads. The paths agree up to rounding
only, so a run repeats bit for bit as long as the choice does: a measurement that cannot be kept is not used, the
built-in coefficients serve instead. `FASTFACT_COST` = "builtin" asks for those, for runs that take the same paths on
every machine; any other value is the directory to use.
"""

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from fastfact import files, ops
from fastfact.machine import processor
from fastfact.ops.backends import library_file, loaded
from fastfact.ops.common import transforming

log = logging.getLogger("fastfact")

PATHS = ("reconstruct", "factored")
MARGIN = 0.95
"""The factored path is taken where its predicted time is below this fraction of the other's: the model's error."""
NOMINAL_IMAGES, NOMINAL_SIDE = 32, 16
"""The input assumed under torch.compile and torch.export, where sizes may be symbols."""
_VARIABLE = "FASTFACT_COST"


class Work(NamedTuple):
    """What a layer is asked to do. A linear layer is a 1×1 convolution of images of one row.

    kind: "conv" (layout "spatial"), "separable" (layout "kernel") or "linear". size: (o, i, kh, kw) of W. images: n.
    image, out: (h, w) of input and output. nonzeros: of compact μ, 0 without μ.
    step: "forward" (evaluation, where W is kept from call to call), "training" (forward and backward) or "weights" (the
    same where the input wants no gradient, as in the first layer of a network).
    """

    kind: str
    size: tuple[int, int, int, int]
    groups: int
    images: int
    image: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    rank: int
    nonzeros: int
    channels_last: bool
    step: str
    dtype: torch.dtype

    @property
    def out(self) -> tuple[int, int]:
        """(h, w) of the output."""
        return tuple(
            (self.image[d] + 2 * self.padding[d] - self.dilation[d] * (self.size[2 + d] - 1) - 1) // self.stride[d] + 1
            for d in range(2)
        )

    @property
    def table(self) -> str:
        """Which set of coefficients is for it."""
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"{self.kind}-{self.step}-{layout}-{str(self.dtype).removeprefix('torch.')}"


def linear_work(size: tuple[int, int], n: int, rank: int, nonzeros: int, step: str, dtype: torch.dtype) -> Work:
    """The work of a linear layer of `size` (o, i) on n rows: images as `ops.factored_linear` makes them."""
    width = next(width for width in (8, 4, 2, 1) if n % width == 0)
    how = ((1, 1), (0, 0), (1, 1), rank, nonzeros, False, step, dtype)
    return Work("linear", (*size, 1, 1), 1, n // width, (1, width), *how)


def _register_bytes() -> int:
    return {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability(), 16)


def _lanes(work: Work) -> int:
    return _register_bytes() // (8 if work.dtype == torch.float64 else 4)


def _packed(work: Work) -> tuple[int, int, int]:
    """How the kernels hold a channel (csrc/cpu/packed.h, make_grid): pixels of the output and of the packed input, in
    whole registers, and pieces of rows that are moved to pack it."""
    lanes = _lanes(work)
    (h, w), images, best = work.out, max(1, work.images), None
    for segments in range(1, lanes + 1):
        strips = max(1, min(segments // images, h))
        rows, vectors = -(-h // strips), -(-segments * w // lanes)
        blocks, quads = -(-images * strips // segments), -(-rows * vectors // 4)
        effort = blocks * (quads + 0.25) * (1 + 0.05 * vectors) * (1.05 if strips > 1 else 1)
        if best is None or effort < best[0]:
            best = effort, blocks, rows, vectors, 4 * quads, segments * -(-w // lanes)
    _, blocks, rows, vectors, registers, pieces = best
    reached = [k * work.dilation[0] for k in range(work.size[2])]
    last = {at % work.stride[0]: at // work.stride[0] for at in reached}
    # A copy for each column of a tap; the rows of a phase of the stride together.
    read = blocks * work.size[3] * sum(rows + most for most in last.values())
    return blocks * registers * lanes, read * vectors * lanes, read * pieces


def _whole(n: int) -> int:
    return -(-n // 16) * 16


def _channels_in_lanes(work: Work) -> bool:
    """Whether the kernels without packing take it (csrc/cpu/factored_conv.h)."""
    channels = work.groups * work.size[1]
    return work.kind == "conv" and work.channels_last and not work.nonzeros and (work.stride[1] == 1 or channels >= 16)


def _planes_in_lanes(work: Work) -> bool:
    """Whether the kernels for planes that keep their size take it (csrc/cpu/factored_conv_planes.cpp)."""
    (h, w), lanes = work.image, _lanes(work)
    panel = lanes * (2 if _register_bytes() == 32 else 4)
    return (
        work.kind == "conv"
        and not (work.channels_last or work.nonzeros)
        and work.stride == (1, 1)
        and work.out == work.image
        and (w % lanes == 0 or lanes % w == 0)
        and h * w % panel == 0
    )


def terms(work: Work, path: str) -> list[float]:
    """What the coefficients of a path are multiplied with."""
    o, i, kh, kw = work.size
    taps, numel, pixels = kh * kw, math.prod(work.size), work.images * math.prod(work.out)
    read, written = work.images * math.prod(work.image) * i * work.groups, pixels * o
    if path == "reconstruct":
        whole = _whole(o // work.groups) * work.groups * _whole(i) * taps
        dense = pixels * numel
        call = [1, taps > 1]
        return [*call, numel, work.nonzeros, read, written, dense * (taps > 1), dense * (taps == 1), pixels * whole]
    channels = _channels_in_lanes(work)
    if channels or _planes_in_lanes(work):
        inputs, outputs = i * work.groups, o
        if channels:
            inputs, outputs = _whole(inputs), _whole(o // work.groups) * work.groups
        depthwise, product = work.rank * pixels * inputs * taps, work.rank * pixels * outputs * i
        return [0] * 11 + [1, work.rank * o * i, read, written, depthwise, product, pixels * work.groups]
    packed, packed_read, moved = _packed(work)
    if work.kind == "separable":
        ranks, sparse = _whole(work.rank), work.nonzeros > 0
        hidden = work.images * work.out[0] * work.image[1] * ranks
        two = [hidden * work.groups, hidden * i * kh * work.groups, pixels * o * kw * ranks]
        mu = [packed_read * i * work.groups * sparse, packed * o * sparse, packed * work.nonzeros]
        return [1, work.nonzeros, read, written, written * sparse, *two, *mu]
    return [
        1,
        work.rank * o * i,
        work.nonzeros,
        packed_read * _whole(i) * work.groups,
        moved * i * work.groups,
        moved * i * work.groups * (work.stride[1] > 1),
        written,
        work.rank * packed * i * work.groups * taps,
        work.rank * packed * o * i,
        packed * work.nonzeros,
        packed * o * (work.nonzeros > 0),
        *[0] * 7 * (work.kind == "conv"),
    ]


# (images, in, out, kernel, stride, groups, side): short, and as different from each other as layers are.
_CONVS = [
    (1, 3, 32, 3, 1, 1, 32),
    (1, 3, 48, 5, 2, 1, 32),
    (1, 32, 48, 5, 1, 1, 16),
    (1, 64, 64, 3, 1, 1, 16),
    (1, 96, 96, 3, 1, 4, 16),
    (1, 96, 192, 3, 2, 8, 16),
    (1, 128, 128, 3, 1, 1, 8),
    (1, 256, 256, 1, 1, 1, 8),
    (8, 48, 96, 5, 2, 1, 16),
    (8, 64, 64, 3, 1, 64, 16),
    (8, 96, 96, 3, 2, 8, 16),
    (8, 128, 192, 1, 1, 1, 8),
    (16, 3, 32, 7, 2, 1, 32),
    (16, 3, 64, 3, 1, 1, 32),
    (16, 32, 64, 5, 2, 1, 16),
    (16, 64, 64, 3, 1, 4, 16),
    (16, 128, 128, 3, 1, 1, 8),
    (32, 64, 64, 3, 2, 1, 16),
    (32, 128, 128, 1, 1, 1, 8),
    (64, 3, 48, 3, 1, 1, 32),
    (64, 16, 32, 3, 1, 1, 16),
    (64, 64, 64, 1, 1, 1, 16),
    (64, 64, 64, 3, 1, 1, 8),
    (64, 192, 256, 3, 1, 1, 4),
]
_LINEARS = [(1, 512, 512), (16, 256, 256), (64, 256, 256), (64, 1024, 128), (256, 512, 512), (512, 128, 64)]
_DENSITIES = (0.0, 0.05, 0.3)


def _flags(table: str) -> tuple[str, bool, str, torch.dtype]:
    """(kind, channels_last, step, dtype) of a table's name."""
    kind, step, layout, dtype = table.split("-")
    return kind, layout == "channels_last", step, getattr(torch, dtype)


def _probes(kind: str, channels_last: bool, step: str, dtype: torch.dtype) -> Iterator[Work]:
    for density in _DENSITIES:
        for n, i, o in _LINEARS if kind == "linear" else ():
            yield linear_work((o, i), n, 1, round(density * o * i), step, dtype)
        for n, i, o, kernel, stride, groups, side in _CONVS if kind != "linear" else ():
            rank = 8 if kind == "separable" and density == 0.05 else 1
            size = (o, i // groups, kernel, kernel)
            how = ((stride, stride), (kernel // 2, kernel // 2), (1, 1), rank, round(density * math.prod(size)))
            yield Work(kind, size, groups, n, (side, side), *how, channels_last, step, dtype)


def run(work: Work, seed: int = 0) -> dict[str, Callable[[], object]]:
    """path → a function that does the work on random numbers."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(work.dtype)

    o, i, kh, kw = work.size
    numel = math.prod(work.size)
    linear = work.kind == "linear"
    layout = {"conv": "spatial", "separable": "kernel", "linear": "linear"}[work.kind]
    shape = (work.images * work.image[1], i) if linear else (work.images, i * work.groups, *work.image)
    x = randn(*shape)
    if work.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    size = work.size[:2] if linear else work.size
    factors = {"spatial": ((kh, kw), (o, i)), "kernel": ((i, kh), (o, kw)), "linear": ((i,), (o,))}[layout]
    u, v = (randn(work.rank, *shape) for shape in factors)
    values = index = None
    training = work.step != "forward"
    leaves = [u, v] if work.step == "weights" else [x, u, v]
    if work.nonzeros:
        index = torch.randperm(numel, generator=generator)[: work.nonzeros].sort().values.int()
        values = randn(work.nonzeros)
        leaves.append(values)
    if training:
        for leaf in leaves:
            leaf.requires_grad_()
    how = (work.stride, work.padding, work.dilation, work.groups)

    def make() -> Tensor:
        return ops.rank1_weight(u, v, values, index, layout=layout, channels_last=work.channels_last)

    # As layers do in evaluation: W is kept, and so is the order of the nonzeros.
    kept = None if training else make()

    def reconstruct() -> Tensor:
        weight = make() if kept is None else kept
        return F.linear(x, weight) if linear else F.conv2d(x, weight, None, *how)

    settings = {"size": size}
    if not linear:
        settings |= dict(zip(("stride", "padding", "dilation", "groups"), how, strict=True))
    op = {"spatial": ops.factored_conv2d, "kernel": ops.separable_conv2d, "linear": ops.factored_linear}[layout]
    if work.kind == "conv" and work.nonzeros and not training:
        settings["repeated"] = True

    def factored() -> Tensor:
        return op(x, u, v, values, index, **settings)

    if not training:
        return {"reconstruct": torch.no_grad()(reconstruct), "factored": torch.no_grad()(factored)}
    with torch.no_grad():
        grad = reconstruct()
        grad.normal_(generator=generator)

    def step(forward: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, grad)

    return {"reconstruct": step(reconstruct), "factored": step(factored)}


def measure(table: str, budget: float = 0.03) -> dict[str, list[float]]:
    """path → its coefficients, in seconds a unit, fitted to the shortest of the runs of each probe.

    budget: seconds for one probe, after which no further runs are made (there are at least two, at most nine).
    """
    matrices = {path: [] for path in PATHS}
    for work in _probes(*_flags(table)):
        sides = run(work)
        shortest = dict.fromkeys(sides, math.inf)
        for side in sides.values():
            side()
        started = time.perf_counter()
        for turn in range(9):
            if turn > 1 and time.perf_counter() - started > budget:
                break
            for path, side in sides.items():
                began = time.perf_counter()
                side()
                shortest[path] = min(shortest[path], time.perf_counter() - began)
        for path, matrix in matrices.items():
            # Divided by the time: it is the relative error that a choice depends on.
            matrix.append([term / shortest[path] for term in terms(work, path)])
    return {path: _fit(numpy.array(matrix)) for path, matrix in matrices.items()}


def _fit(matrix: numpy.ndarray) -> list[float]:
    """x ≥ 0 that makes every row of `matrix` @ x about 1: nearly the least sum of absolute errors, so that a few probes
    another program disturbed, or no term describes, do not spoil the rest."""
    from scipy.optimize import nnls  # half a second, for what is measured once on a machine

    weights = numpy.ones(len(matrix))
    for _ in range(8):
        x = nnls(matrix * weights[:, None], weights)[0]
        weights = numpy.abs(matrix @ x - 1).clip(0.05) ** -0.5
    return x.tolist()


def directory() -> Path | None:
    """Where the coefficients are kept; None where the built-in ones are asked for."""
    asked = os.environ.get(_VARIABLE)
    if asked == "builtin":
        return None
    if asked:
        return Path(asked)
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fastfact" / "cost"


def _machine() -> dict[str, object]:
    """What the times depend on."""
    from fastfact import __version__

    library = library_file("cpu")
    return {
        "cpu": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fastfact": __version__,
        "library": library and [library.stat().st_size, library.stat().st_mtime_ns],
    }


def _path(folder: Path, table: str) -> Path:
    digest = hashlib.blake2b(json.dumps(_machine(), sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder / f"{table}-{digest}.json"


def _read(path: Path, table: str) -> dict[str, list[float]] | None:
    """The coefficients in a file; None, with a warning, for one that is damaged, or that is not there."""
    try:
        found = json.loads(path.read_text())["coefficients"]
        work = next(_probes(*_flags(table)))
        for name in PATHS:
            numbers = found[name]
            if len(numbers) != len(terms(work, name)) or not all(0 <= x < math.inf for x in numbers):
                raise ValueError(f"the coefficients of {name!r}")
        return {name: [float(x) for x in found[name]] for name in PATHS}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: damaged (%s), measured again", path, error)
        return None


# Seconds a unit on one thread of a Xeon with AVX-512 (Sapphire Rapids), as `measure` gives them.
_BUILTIN: dict[str, dict[str, list[float]]] = {
    "separable-forward-contiguous": {
        "reconstruct": [0.0, 1.76e-05, 4.23e-10, 6.79e-11, 7.34e-10, 3.66e-10, 9.86e-12, 4.77e-12, 0.0],
        "factored": [
            2.28e-05,
            9.07e-09,
            5.31e-10,
            0.0,
            1.28e-09,
            1.14e-11,
            2.78e-11,
            1.23e-11,
            6.05e-10,
            0.0,
            1.14e-11,
        ],
    },
    "separable-forward-channels_last": {
        "reconstruct": [1.41e-05, 3.6e-05, 2.5e-11, 3.56e-11, 2.68e-11, 1.18e-10, 1.04e-11, 1.14e-11, 0.0],
        "factored": [4.65e-05, 9.34e-09, 1.18e-10, 0.0, 1.11e-09, 0.0, 2.14e-11, 7.74e-12, 8.48e-10, 0.0, 1.07e-11],
    },
    "separable-training-contiguous": {
        "reconstruct": [0.0, 0.000297, 3.24e-09, 3.04e-09, 1.4e-09, 2.71e-09, 3.24e-11, 2.49e-11, 0.0],
        "factored": [
            8.82e-05,
            3.53e-08,
            3.02e-09,
            0.0,
            2.74e-09,
            1.77e-11,
            5.46e-11,
            5.73e-11,
            2.98e-09,
            0.0,
            2.95e-11,
        ],
    },
    "separable-training-channels_last": {
        "reconstruct": [0.000176, 0.000188, 7.05e-10, 2.42e-09, 0.0, 1.68e-09, 3.71e-11, 3.05e-11, 0.0],
        "factored": [0.000167, 3.75e-08, 7.36e-10, 0.0, 2.63e-09, 0.0, 5.92e-11, 3.29e-11, 3.29e-09, 0.0, 3.08e-11],
    },
    "separable-weights-contiguous": {
        "reconstruct": [0.0, 0.000267, 2.58e-09, 3.06e-09, 1.39e-09, 7.42e-10, 2.29e-11, 2.37e-11, 1.29e-13],
        "factored": [
            0.000101,
            3.13e-08,
            9.91e-10,
            0.0,
            2.39e-09,
            4.39e-11,
            7.47e-11,
            4.83e-11,
            1.65e-09,
            0.0,
            1.84e-11,
        ],
    },
    "separable-weights-channels_last": {
        "reconstruct": [0.000132, 0.000172, 1.04e-09, 2.29e-09, 5.07e-10, 2.08e-10, 2.44e-11, 2.43e-11, 2.49e-14],
        "factored": [0.000167, 3.22e-08, 4.12e-10, 0.0, 1.75e-09, 0.0, 5.44e-11, 3.29e-11, 2.01e-09, 0.0, 1.68e-11],
    },
    "conv-forward-contiguous": {
        "reconstruct": [0.0, 1.82e-05, 3.65e-10, 2.11e-10, 7.73e-10, 3.81e-10, 1.02e-11, 4.98e-12, 0.0],
        "factored": [
            4.75e-05,
            6.26e-10,
            6.42e-09,
            1.87e-11,
            1.71e-09,
            1.09e-09,
            2.77e-10,
            1.69e-11,
            1.23e-11,
            1.82e-11,
            1.12e-10,
            3.6e-05,
            6.6e-10,
            0.0,
            2.9e-10,
            5.2e-11,
            1.27e-11,
            2.1e-10,
        ],
    },
    "conv-forward-channels_last": {
        "reconstruct": [1.54e-05, 3.65e-05, 0.0, 6.56e-11, 1.95e-11, 1.25e-10, 1.05e-11, 1.19e-11, 0.0],
        "factored": [
            5.22e-05,
            6.73e-10,
            6.13e-09,
            9.28e-11,
            3.17e-09,
            1.51e-09,
            0.0,
            0.0,
            1.26e-11,
            1.5e-11,
            3.32e-10,
            3.96e-05,
            1.2e-10,
            1.46e-10,
            1.47e-10,
            2.71e-11,
            1.09e-11,
            3.17e-09,
        ],
    },
    "conv-training-contiguous": {
        "reconstruct": [7.6e-05, 0.000239, 2.24e-09, 5.08e-09, 1.67e-09, 2.72e-09, 3.36e-11, 2.41e-11, 0.0],
        "factored": [
            0.000178,
            5.46e-09,
            2.37e-08,
            1.8e-10,
            6.56e-09,
            1.76e-08,
            7.97e-10,
            6.77e-11,
            4.08e-11,
            5.66e-11,
            7.22e-10,
            0.000169,
            5.02e-09,
            1.93e-10,
            8.93e-10,
            1.0e-10,
            3.95e-11,
            6.3e-10,
        ],
    },
    "conv-training-channels_last": {
        "reconstruct": [0.000299, 4.93e-05, 1.95e-10, 3.79e-09, 0.0, 1.7e-09, 3.7e-11, 2.12e-11, 0.0],
        "factored": [
            0.000194,
            6.59e-09,
            2.15e-08,
            3.79e-10,
            1.1e-08,
            6.12e-09,
            0.0,
            0.0,
            3.36e-11,
            4.92e-11,
            1.62e-09,
            0.000142,
            1.81e-09,
            6.97e-10,
            5.53e-10,
            1.42e-10,
            3.29e-11,
            8.02e-09,
        ],
    },
    "conv-weights-contiguous": {
        "reconstruct": [5.62e-05, 0.0002, 2.12e-09, 3.67e-09, 1.44e-09, 7.53e-10, 2.19e-11, 2.03e-11, 1.74e-13],
        "factored": [
            0.000161,
            5.68e-09,
            1.56e-08,
            1.28e-10,
            2.1e-09,
            3.13e-09,
            6.04e-10,
            7.42e-11,
            3.95e-11,
            3.97e-11,
            2.16e-10,
            0.000161,
            5.2e-09,
            3.2e-10,
            4.3e-10,
            9.7e-11,
            4.1e-11,
            7.8e-10,
        ],
    },
    "conv-weights-channels_last": {
        "reconstruct": [0.000228, 7.29e-05, 3.49e-10, 4.09e-09, 6.66e-10, 2.33e-10, 2.44e-11, 1.97e-11, 0.0],
        "factored": [
            0.000174,
            5.99e-09,
            1.56e-08,
            2.68e-10,
            6.77e-09,
            2.79e-09,
            0.0,
            0.0,
            4.08e-11,
            3.27e-11,
            9.48e-10,
            0.000131,
            1.6e-09,
            3.71e-10,
            6.64e-10,
            7.42e-11,
            3.54e-11,
            8.31e-09,
        ],
    },
    "linear-forward-contiguous": {
        "reconstruct": [1.42e-05, 0.0, 2.49e-11, 0.0, 0.0, 0.0, 0.0, 1.15e-11, 0.0],
        "factored": [1.2e-05, 0.0, 7.19e-09, 0.0, 5.1e-10, 0.0, 1.08e-10, 0.0, 0.0, 1.17e-11, 3.8e-09],
    },
    "linear-training-contiguous": {
        "reconstruct": [9.9e-05, 0.0, 9.98e-10, 2.6e-09, 6.86e-10, 0.0, 0.0, 3.97e-11, 0.0],
        "factored": [6.16e-05, 0.0, 2.36e-08, 0.0, 1.3e-09, 0.0, 6.11e-10, 1.96e-10, 0.0, 4.39e-11, 1.55e-08],
    },
    "linear-weights-contiguous": {
        "reconstruct": [0.000107, 0.0, 6.9e-10, 3.56e-09, 3.18e-10, 0.0, 0.0, 2.74e-11, 0.0],
        "factored": [6.09e-05, 0.0, 1.84e-08, 0.0, 1.16e-09, 0.0, 4.09e-10, 9.71e-12, 2.34e-13, 2.9e-11, 1.15e-08],
    },
}


def _builtin(table: str) -> dict[str, list[float]]:
    """The built-in coefficients; all but the cost of a call is taken to shrink with the number of threads."""
    threads = torch.get_num_threads()
    found = _BUILTIN[table.rpartition("-")[0]]
    return {path: [numbers[0], *(x / threads for x in numbers[1:])] for path, numbers in found.items()}


_lock = threading.Lock()
_tables: dict[tuple[str, int, Path | None], dict[str, list[float]]] = {}
_generation = 0


def coefficients(table: str) -> dict[str, list[float]]:
    """path → coefficients of a table (see `Work.table`) for the present number of threads: read, or measured and kept,
    or, where they cannot be kept, the built-in ones."""
    key = table, torch.get_num_threads(), directory()
    with _lock:
        if key not in _tables:
            _tables[key] = _find(table, key[2])
        return _tables[key]


def _find(table: str, folder: Path | None) -> dict[str, list[float]]:
    if folder is None:
        return _builtin(table)
    path = _path(folder, table)
    found = _read(path, table)
    if found is None:
        try:
            damaged = path.exists()
            # Ask before the work whether the result can be kept.
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            measured = _aside(lambda: measure(table))
            files.write(path, json.dumps({"machine": _machine(), "coefficients": measured}), keep=not damaged)
            found = _read(path, table)
        except (OSError, RuntimeError) as error:
            log.warning("%s: cannot keep a measured cost model (%s), using the built-in one", folder, error)
    return found or _builtin(table)


def remembered(question: object, measure: Callable[[], dict]) -> dict | None:
    """What `measure()` answered the first time `question` came up on this machine, kept beside the coefficients.

    Both as JSON holds them. None where the built-in figures are asked for, or an answer cannot be kept: what is decided
    by a measurement is then decided anew each time, so better without one.
    """
    folder = directory()
    if folder is None:
        return None
    digest = hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=8).hexdigest()
    path = _path(folder, f"answer-{digest}")
    for replace in (False, True):
        try:
            if replace or not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
                answer = {"machine": _machine(), "question": question, "answer": measure()}
                files.write(path, json.dumps(answer), keep=not replace)
            return dict(json.loads(path.read_text())["answer"])
        except OSError as error:
            log.warning("%s: cannot keep what was measured (%s)", folder, error)
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s: damaged (%s), measured again", path, error)
    return None


def _aside(function: Callable[[], object]) -> object:
    """Call it where no transform, mode or grad setting of the caller is at work: here if there is none to escape, for
    a thread of its own has other threads help it, and is slower by up to a half."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    if not (modes or transforming()):
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            return function()
    result, errors = [], []

    def body() -> None:
        try:
            result.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return result[0]


def forget() -> None:
    """Forget what was read or measured, in this process; the files stay."""
    global _generation
    _tables.clear()
    _choose.cache_clear()
    _generation += 1


def setting() -> tuple[int, int]:
    """What an answer of `factored` depends on besides the work, in a process that does not change its environment."""
    return torch.get_num_threads(), _generation


def seconds(work: Work) -> dict[str, float]:
    """path → the predicted time of a layer."""
    found = coefficients(work.table)
    return {path: sum(map(float.__mul__, found[path], map(float, terms(work, path)))) for path in PATHS}


@functools.lru_cache(maxsize=4096)
def _choose(threads: int, asked: str | None, work: Work) -> bool:
    times = seconds(work)
    return times["factored"] < MARGIN * times["reconstruct"]


def factored(work: Work) -> bool:
    """Whether the factored path is the faster one on the CPU. Without the compiled library it never is."""
    if not loaded("cpu"):
        return False
    return _choose(torch.get_num_threads(), os.environ.get(_VARIABLE), work)


def factored_nominal(*work) -> bool:
    """`factored` for the fields of a `Work` whose input is not known, or symbols: for tracing."""
    return factored(Work(*work))


# What torch.compiler.assume_constant_result does, but for importing torch._dynamo, which takes longer than PyTorch.
factored_nominal._dynamo_marked_constant = True
