"""What the benchmarks share: the layers they measure, and interleaved timing."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# in, out, kernel, stride, image side: conv1 … conv8 of ResNet-9 on 32×32 images
RESNET9 = [
    (3, 64, 3, 1, 32),
    (64, 128, 5, 2, 32),
    (128, 128, 3, 1, 16),
    (128, 128, 3, 1, 16),
    (128, 256, 3, 1, 16),
    (256, 256, 3, 1, 8),
    (256, 256, 3, 1, 8),
    (256, 256, 3, 1, 8),
]
FORMATS = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}


def name_of(shape) -> str:
    i, o, kernel, stride, side = shape
    return f"{i}→{o} {kernel}×{kernel} s{stride} @{side}"


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def interleaved(
    sides: dict[str, Callable], rounds: int, warmup: int = 1, clock: str = "wall"
) -> dict[str, list[float]]:
    """Milliseconds of each turn of each side, run in turn, so that noise meets all of them alike.

    The order changes from turn to turn: one side always after the same other would find its caches.

    clock: "cpu" counts the processor time of all threads, for a machine that others use too (with several threads, set
    OMP_WAIT_POLICY=passive, or waiting counts).
    """
    times, now = {name: [] for name in sides}, CLOCKS[clock]
    for turn in range(rounds + warmup):
        for name in random.Random(turn).sample(list(sides), len(sides)):
            start = now()
            sides[name]()
            if turn >= warmup:
                times[name].append(1e3 * (now() - start))
    return times


def draw_growth(
    lines: Mapping[str, Sequence[Mapping[str, Any]]], panels: Mapping[str, str], across: str, path: Path
) -> None:
    """Rows of each line as a picture, over `clients` on logarithmic axes: a panel for each key of `panels`, which gives
    its title. A row without a key is left out there. across: what the number of clients counts.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained")
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for label, rows in lines.items():
            some = [row for row in rows if key in row]
            if not some:
                continue
            axis.plot([row["clients"] for row in some], [row[key] for row in some], marker="o", label=label)
        axis.set(xscale="log", xlabel=across, title=title)
        if any(row.get(key, 0) > 0 for rows in lines.values() for row in rows):
            axis.set_yscale("log", nonpositive="mask")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
