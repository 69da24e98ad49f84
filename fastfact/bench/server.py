"""What the server's step costs, similarity matching and mixing, exact and on sketches, and how it grows with clients.

Rows of one kind have the same `work`. "exact" compares with the loop the official code runs, client by client and pair
by pair in numpy: a client of it costs as much as any other, so that a few stand for all. "growth" has a process of its
own for each number of clients, in which the matrix products alone (of the keys and of the weights with the uploads)
take turns with the whole step: slowdown = step / products, and the peak memory beyond what the interpreter with PyTorch
takes is that of keys, uploads, results and all work. cpu columns are processor time, which other programs on the
machine disturb less. "sketch" has the rms error of the cosine, beside (1 − cos²) / √m, and "uplink" the bytes of
Factorized-FL α.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfact import models, ops
from fastfact import public as ff
from fastfact.bench.common import RESNET9, draw_growth
from fastfact.federation.server import mixing

GOALS = {"exact": 300.0, "growth": 1.5, "uplink": 1700}
U = [kernel * kernel for _, _, kernel, _, _ in RESNET9]
"""Numbers of u in each layer: what α mixes."""
CLIENTS = (1_000, 3_000, 10_000, 30_000, 100_000)
SKETCH = 1024


def numpy_step(v: np.ndarray, uploads: list[np.ndarray], client: int, epsilon: float, tau: float) -> list[np.ndarray]:
    """One client's aggregate as the official code makes it: a cosine from two vectors each, sums over the matched."""
    own, scores = v[client], {}
    for other in range(len(v)):
        cosine = np.dot(own, v[other]) / (np.linalg.norm(own) * np.linalg.norm(v[other]))
        if other == client or cosine >= tau:
            scores[other] = np.exp(epsilon * (1.0 if other == client else cosine))
    total = sum(scores.values())
    return [np.sum([x[i] * (e / total) for i, e in scores.items()], axis=0) for x in uploads]


def _timed(function: Callable) -> tuple[float, float, Any]:
    """(seconds, processor seconds, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def exact(clients: int, numbers: int, mixes_v: bool, rounds: int, sample: int = 2) -> dict[str, Any]:
    """A row for keys of this length; mixed are u of ResNet-9 (α) and, if `mixes_v`, the key itself (as in β)."""
    g = torch.Generator().manual_seed(0)
    v = torch.randn(clients, numbers, generator=g) + 0.5 * torch.randn(1, numbers, generator=g)
    uploads = [torch.randn(clients, n, generator=g) for n in U] + [v] * mixes_v
    arrays = [x.numpy() for x in uploads]
    epsilon, tau = 20.0, 0.0
    mixed = ops.similarity_mix(v, uploads, epsilon, tau)
    for got, want in zip(mixed, numpy_step(v.numpy(), arrays, 1, epsilon, tau), strict=True):
        np.testing.assert_allclose(got[1].numpy(), want, atol=1e-3)
    ours, theirs = [], []
    for turn in range(rounds):
        ours.append(_timed(lambda: ops.similarity_mix(v, uploads, epsilon, tau))[:2])
        some = [(7 * turn + j) % clients for j in range(sample)]
        took = _timed(lambda some=some: [numpy_step(v.numpy(), arrays, k, epsilon, tau) for k in some])
        theirs.append([t * clients / sample for t in took[:2]])
    ratio, cpu_ratio = (statistics.median(b[j] / a[j] for a, b in zip(ours, theirs, strict=True)) for j in (0, 1))
    return {
        "work": "exact",
        "mixed": "u, v" if mixes_v else "u",
        "clients": clients,
        "numbers": numbers,
        "seconds": statistics.median(a[0] for a in ours),
        "numpy_seconds": statistics.median(b[0] for b in theirs),
        "ratio": ratio,
        "cpu_ratio": cpu_ratio,
        "goal": None if mixes_v else GOALS["exact"],
        "threads": torch.get_num_threads(),
    }


def products(keys: Tensor, matrix: Tensor) -> None:
    """The matrix products of the symmetric step alone, in the blocks the CPU library takes."""
    m, height, width = len(keys), 512, 1024
    square, weights = torch.empty(height * width, dtype=torch.int32), torch.rand(height * width)
    out = torch.zeros_like(matrix)
    for b in range(0, m, height):
        rows = slice(b, min(b + height, m))
        edges = [rows.start, *range(rows.stop, m, width), m]
        for begin, end in itertools.pairwise(edges):
            shape = (rows.stop - rows.start, end - begin)
            n = shape[0] * shape[1]
            if n == 0:
                continue
            torch._int_mm(keys[rows], keys[begin:end].T, out=square[:n].view(shape))
            tile = weights[:n].view(shape)
            out[rows].addmm_(tile, matrix[begin:end])
            if begin >= rows.stop:
                out[begin:end].addmm_(tile.T, matrix[rows])


def _peak() -> int:
    """KiB. Not ru_maxrss, which a process inherits from the one that started it."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def growth(clients: int, rounds: int) -> dict[str, Any]:
    """A row: int8 sketches, all clients matched with all, which is the most the step can have to do."""
    g = torch.Generator().manual_seed(0)

    def draw(m: int) -> tuple[Tensor, list[Tensor]]:
        keys = torch.randint(-127, 128, (m, SKETCH), generator=g, dtype=torch.int8)
        return keys, [torch.randn(m, n, generator=g) for n in U]

    ops.similarity_mix(*draw(1500), 1.0)
    before = _peak()
    keys, uploads = draw(clients)
    took, alone = [_timed(lambda: ops.similarity_mix(keys, uploads, 1.0))[:2]], []
    memory = _peak() - before
    matrix = torch.cat(uploads, 1)
    matrix = torch.nn.functional.pad(matrix, (1, -(matrix.shape[1] + 1) % 16))
    for turn in range(rounds):
        alone.append(_timed(lambda: products(keys, matrix))[:2])
        if turn + 1 < rounds:
            took.append(_timed(lambda: ops.similarity_mix(keys, uploads, 1.0))[:2])
    slowdown, cpu = (statistics.median(a[j] / b[j] for a, b in zip(took, alone, strict=True)) for j in (0, 1))
    seconds = statistics.median(a[0] for a in took)
    return {
        "work": "growth",
        "mixed": "u",
        "clients": clients,
        "numbers": SKETCH,
        "seconds": seconds,
        "cpu_seconds": statistics.median(a[1] for a in took),
        "ns_per_pair": 1e9 * seconds / clients**2,
        "memory_mib": memory / 1024,
        "slowdown": slowdown,
        "cpu_slowdown": cpu,
        "goal": GOALS["growth"],
        "threads": torch.get_num_threads(),
    }


def _growth_alone(clients: int, rounds: int) -> dict[str, Any]:
    root = str(Path(ff.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "fastfact.bench.server", str(clients), str(rounds), str(torch.get_num_threads())],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
    )
    if done.returncode:
        raise RuntimeError(f"bench server: {clients} clients: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return json.loads(done.stdout)


def sketch(numbers: int, m: int, clients: int = 64) -> dict[str, Any]:
    """A row: how far the cosines of sketches are off, and what a sketch costs its client."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, numbers, generator=g) + 0.5 * torch.randn(1, numbers, generator=g)
    sketches = ops.srht(x, m)[0]
    off = ~torch.eye(clients, dtype=torch.bool)
    sigma = mixing.cosine(x)[off]
    error = mixing.cosine(sketches)[off] - sigma
    return {
        "work": "sketch",
        "numbers": numbers,
        "m": m,
        "rms_error": error.square().mean().sqrt().item(),
        "predicted": ((1 - sigma**2) / m**0.5).square().mean().sqrt().item(),
        "ms_per_client": 1e3 * statistics.median(_timed(lambda: ops.srht(x, m))[0] for _ in range(5)) / clients,
        "threads": torch.get_num_threads(),
    }


def uplink(m: int) -> dict[str, Any]:
    """A row: the bytes of the message a client of Factorized-FL α sends in a round, ResNet-9 on 32×32 images."""
    x, y = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
    clients = [ff.Client((x, y), (x, y))]
    fed = ff.Federation(lambda: models.resnet9(3, 10), clients, ff.methods.FactorizedFLAlpha(sketch=m), epochs=1)
    fed.fit(1)
    return {"work": "uplink", "m": m, "bytes": fed.ledger.up, "goal": GOALS["uplink"] if m else None}


def run(quick: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(work, its rows) as they come; few and small ones if `quick`."""
    if quick:
        yield "exact", [exact(30, 4096, False, 1)]
        yield "growth", [growth(600, 1)]
        yield "sketch", [sketch(5000, 256, 8)]
    else:
        yield "exact", [exact(1000, 65_536, mixes_v, 5) for mixes_v in (False, True)]
        yield "sketch", [sketch(65_536, m) for m in (256, 1024, 4096)]
        yield "growth", [_growth_alone(clients, 5 if clients <= 10_000 else 1) for clients in CLIENTS]
    yield "uplink", [uplink(m) for m in (0, SKETCH)]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The growth rows as a picture: seconds of a step beside its products alone, and memory, over the clients."""
    alone = [{"clients": row["clients"], "seconds": row["seconds"] / row["slowdown"]} for row in rows]
    lines = {"similarity_mix": rows, "its matrix products alone": alone}
    draw_growth(lines, {"seconds": "seconds of a step", "memory_mib": "peak memory, MiB"}, "clients", path)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    print(json.dumps(growth(int(sys.argv[1]), int(sys.argv[2]))))
