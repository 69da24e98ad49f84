"""What the benchmarks share: the layers they measure, interleaved timing, and the JSON they leave."""

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fastfact.experiment import provenance

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


def medians(sides: dict[str, Callable], rounds: int, warmup: int = 1) -> dict[str, float]:
    """Median milliseconds of each side, run in turn, so that noise meets all of them alike."""
    times = {name: [] for name in sides}
    for turn in range(rounds + warmup):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn >= warmup:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def write(path: str | None, module: str, rows: list[dict]) -> None:
    """The rows with hardware, versions, commit and command, as JSON."""
    if path:
        capability = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
        content = {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), **capability, **provenance()}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({**content, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
