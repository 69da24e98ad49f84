"""What the benchmarks share: the layers they measure, and interleaved timing."""

import time
from collections.abc import Callable

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

    clock: "cpu" counts the processor time of all threads, for a machine that others use too (with several threads, set
    OMP_WAIT_POLICY=passive, or waiting counts).
    """
    times, now = {name: [] for name in sides}, CLOCKS[clock]
    for turn in range(rounds + warmup):
        for name, side in sides.items():
            start = now()
            side()
            if turn >= warmup:
                times[name].append(1e3 * (now() - start))
    return times
