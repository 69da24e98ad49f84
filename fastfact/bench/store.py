"""What very many clients take at rest and at work: bytes of a client, seconds and peak memory of rounds out of core.

"resnet9": 10,000 clients of ResNet-9 with a tenth of μ, 100 a round in a directory (images are small: memory is what is
measured); "linear": 1,000,000 registered clients of a linear model, of which 1 % takes part. Every client has its
samples made when it takes part. Memory is that of the process after each round and the most until then, in MiB.
"""

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from fastfact import models
from fastfact import public as ff
from fastfact.federation import LazyClients
from fastfact.federation.client.memory import bytes_of, resident
from fastfact.federation.storage.states import Codec
from fastfact.nn import sparsity

MIB = 1 << 20


def resnet9() -> nn.Module:
    """Factorized, with a tenth of μ."""
    model = ff.factorize(models.resnet9(3, 10), ff.Rank1())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mu"):
                sparsity.prune_(parameter.normal_(std=1e-3), 0.1)
    return model


def client(shape: tuple[int, ...], k: int) -> ff.Client:
    """Four samples to train on and one to test with."""
    g = torch.Generator().manual_seed(k)
    x, y = torch.randn(5, *shape, generator=g), torch.randint(10, (5,), generator=g)
    return ff.Client((x[:4], y[:4]), (x[4:], y[4:]))


def sizes() -> list[dict]:
    """Bytes of a ResNet-9 client at rest."""
    fed = ff.Federation(resnet9, [client((3, 32, 32), 0)], "factorized-fl-alpha", cohort=1)
    rows = [{"work": "bytes of a client", "kept": "dense float32", "bytes": bytes_of(fed.initial)}]
    for values in ("exact", "bfloat16"):
        record, nonzeros = Codec(fed.initial, fed.infos, fed.sparse, values).encode(fed.initial, 0)
        rows.append({"work": "bytes of a client", "kept": values, "bytes": len(record), "nonzeros of μ": nonzeros})
    return rows


def rounds(
    name: str, model, shape: tuple[int, ...], k: int, part: int, count: int, method: str, **options
) -> list[dict]:
    """A row for each round."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        fed = ff.Federation(
            model,
            LazyClients(lambda number: client(shape, number), k),
            method,
            epochs=1,
            batch_size=4,
            lr=1e-3,
            cohort=1,
            participation=part / k,
            store=directory,
            **options,
        )
        started = time.perf_counter() - began
        for _ in range(count):
            began = time.perf_counter()
            fed.fit(1)
            peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
            rows.append(
                {
                    "work": name,
                    "clients": k,
                    "taking_part": part,
                    "round": fed.round,
                    "seconds": time.perf_counter() - began,
                    "start_seconds": started,
                    "memory_mib": resident() / MIB,
                    "peak_mib": peak,
                    "bytes_a_client": fed.states.bytes() / len(fed.states.touched()),
                }
            )
        fed.states.close()
    return rows


def run(quick: bool = False) -> list[dict]:
    """All rows. quick: fewer clients and rounds."""
    rows = sizes()
    k, part = (2_000, 20) if quick else (1_000_000, 10_000)
    rows += rounds("linear", lambda: nn.Linear(64, 10), (64,), k, part, 2, "fedavg")
    k, part = (100, 3) if quick else (10_000, 100)
    count, values = 2 if quick else 3, {"store_values": "bfloat16"}
    return rows + rounds("resnet9", resnet9, (3, 16, 16), k, part, count, "factorized-fl-alpha", **values)
