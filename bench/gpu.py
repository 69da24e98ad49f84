"""The GPU kernels against their rivals: the rows of the goal table.

    python -m bench.gpu weights|layers|rank1|separable|clients|resident|adapters|mix|tune
                        [--jsonl FILE] [--seconds S] [--dry-run | --fake]

weights   the weight ops and the elementwise kernels for K clients: bytes of the floor (bench/NOTES.md) a second, over
          the copy bandwidth measured in the same run.
layers    one convolution of ResNet-9, forward + backward, bfloat16: reconstructed (ours) and fused, against the dense
          layer (cuDNN) and the same parameterization in plain PyTorch, eager and compiled.
rank1     rank-1 forward without μ, 256 → 256 channels, against the dense layer.
separable kernel factors without μ, forward and data gradient, in one kernel against two and the dense layer.
clients   a training step of ResNet-9 for K clients together, against one client after the other, and against vmap over
          plain layers (cuDNN's grouped convolution); with peak memory. Then FedDecomp's personal phase (σ frozen and
          shared), with one convolution for σ against each client's own W.
adapters  a step of many clients that fine-tune one transformer by low-rank factors, against one client after the other;
          then of one frozen linear layer with them, against the same products in plain PyTorch.
mix       similarity_mix of many clients by the CUDA and the Triton kernels, against its matrix products alone (cuBLAS)
          and the same step in plain PyTorch.
tune      the tiles of the fused convolution's kernels: what they choose against other choices.
resident  clients held on the device: bitmap and bfloat16 values of μ at 10 % density, bfloat16 factors.

Every side is checked against float64 first, then all run in turn, timed by CUDA events; rows hold medians in
milliseconds. Where nothing forbids it CUDA graphs are replayed, so that the time is the GPU's and not the launches'.
"cold": with the second cache emptied before. tera_flops: of the operations that must be done, a second; roofline: the
least time that these and the bytes that must be moved take at the rates measured first (a copy, a matrix product), as a
part of the time.
Each row is a process of its own with a time limit, and a line in FILE when it ends (see `gpu_rows`).
--dry-run takes tiny shapes and any device, to see that every line runs; its times mean nothing. --fake measures
nothing: one row dies, one hangs, one loses its device (see `gpu_check --rehearse`).
"""

import argparse
import contextlib
import copy
import functools
import importlib
import math
import os
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastfact as ff
from bench.gpu_rows import LEAST, Row, append, in_a_process
from fastfact import models
from fastfact.base.formats import KERNEL, SEPARABLE, SPATIAL, VALUE_TYPES
from fastfact.base.machine import provenance
from fastfact.bench import adapters as adapter_bench
from fastfact.bench.common import RESNET9, interleaved, name_of
from fastfact.federation import Client, Federation
from fastfact.federation.client.phase import Phase
from fastfact.federation.client.step import Settings
from fastfact.federation.client.train import Trainer
from fastfact.federation.state import State, stack
from fastfact.federation.tensors import describe, tensors_of
from fastfact.nn.convert import factorized_layers

RESNET9_OPERATIONS = 3 * sum(2 * i * o * kernel**2 * (side // stride) ** 2 for i, o, kernel, stride, side in RESNET9)
"""Of the convolutions of ResNet-9 for an image: forward, data gradient, weight gradient."""
TINY = [(3, 8, 3, 1, 6), (8, 8, 3, 2, 6)]
DENSE_CLIENT_BYTES = 2 * 4 * 2_571_338
"""Dense ResNet-9 with momentum, float32."""

Sides = dict[str, Callable[[], object]]
Rows = Iterator[Row]
row = Row


class Bench:
    """The device, the sizes, and how things are timed on it. The device is not touched before it is asked for."""

    def __init__(self, dry: bool):
        self.dry = dry
        self.shapes = TINY if dry else RESNET9
        self.rounds = 2 if dry else 21
        self.ceilings: dict[str, float] = {}
        """copy_gb_s and tera_flops of a type, as `ceilings` measures them; empty where that failed."""

    @functools.cached_property
    def cuda(self) -> bool:
        found = torch.cuda.is_available()
        if not self.dry and not found:
            raise RuntimeError("PyTorch sees no CUDA device (--dry-run checks that the lines run without one)")
        # rivals may look for their fastest algorithm
        torch.backends.cudnn.benchmark = True
        return found

    @property
    def device(self) -> str:
        return "cuda" if self.cuda else "cpu"

    def pick(self, full, tiny):
        return tiny if self.dry else full

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def medians(self, sides: Sides, rounds: int | None = None, warmup: int = 3, cold: bool = False) -> dict[str, float]:
        """Median milliseconds of each side, run in turn. cold: each with nothing of it in the second cache."""
        rounds = rounds or self.rounds
        if not self.cuda:
            times = interleaved(sides, rounds, warmup)
            return {name: statistics.median(t) for name, t in times.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        other = torch.empty(self.pick(1 << 28, 1), dtype=torch.uint8, device=self.device) if cold else None
        for turn in range(rounds + warmup):
            for name, side in sides.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if other is not None:
                    other.zero_()
                start.record()
                side()
                end.record()
                end.synchronize()
                if turn >= warmup:
                    times[name].append(start.elapsed_time(end))
        return {name: statistics.median(t) for name, t in times.items()}

    def against(self, times: dict[str, float], operations: float | dict, moved: float, dtype: torch.dtype) -> dict:
        """tera_flops and roofline of each time (ms). operations: of all sides, or of each; moved: bytes."""
        name = str(dtype).removeprefix("torch.")
        rate, copied = self.ceilings.get(f"tera_flops {name}"), self.ceilings.get("copy_gb_s")
        found: dict[str, dict] = {"tera_flops": {}, "roofline": {}}
        for side, t in times.items():
            count = operations.get(side, 0) if isinstance(operations, dict) else operations
            if count:
                found["tera_flops"][side] = count / t / 1e9
            if copied and (rate or not count):
                found["roofline"][side] = max(count / rate / 1e9 if count else 0.0, moved / copied / 1e6) / t
        return found

    def graphed(self, side: Callable[[], object], repeats: int) -> Callable[[], object]:
        """`repeats` runs of `side` as one CUDA graph; without CUDA they simply run."""
        if not self.cuda:
            return lambda: [side() for _ in range(repeats)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                side()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                side()
        return graph.replay

    def peak_bytes(self, side: Callable[[], object]) -> int:
        """The most memory allocated while `side` runs, beyond what is held before it."""
        if not self.cuda:
            side()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        side()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def copy_bandwidth(self) -> Callable[[], object]:
        """A copy of `self.copied` bytes read and as many written."""
        count = self.pick(1 << 30, 1 << 12)
        self.copied = count
        source = torch.randint(255, (count,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def relative_error(out: Tensor, truth: Tensor) -> float:
    return ((out.double() - truth).norm() / truth.norm()).item()


def check(name: str, outs: Iterable[Tensor], truths: Iterable[Tensor], plains: Iterable[Tensor]) -> None:
    """Raise AssertionError if `outs` is further from `truths` than 2 × plain PyTorch in the same precision."""
    for position, (out, truth, plain) in enumerate(zip(outs, truths, plains, strict=True)):
        # half a unit in the last place of bfloat16 is 2⁻⁹; where there are few elements, rounding differs by as much
        slack = 1e-6 if out.dtype in (torch.float32, torch.float64) else 2**-9
        error, allowed = relative_error(out, truth), 2 * relative_error(plain, truth) + slack
        assert error <= allowed, f"{name}: result {position} is off by {error:.2e}, allowed {allowed:.2e}"


def ceilings(bench: Bench) -> Rows:
    """What this device does at best: a large copy, and a large product in each type."""
    yield row({"op": "ceilings"}, functools.partial(ceilings_row, bench))


def ceilings_row(bench: Bench) -> dict:
    copied = bench.copy_bandwidth()
    found = {
        "backends": {name: state.detail for name, state in ff.backends().items()},
        **provenance(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "copy_gb_s": 2 * bench.copied / bench.medians({"copy": copied})["copy"] / 1e6,
    }
    n = bench.pick(8192, 16)
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=bench.device).to(dtype) for _ in range(2))
        took = bench.medians({"product": functools.partial(torch.matmul, a, b)}, rounds=bench.pick(11, 1))["product"]
        found[f"tera_flops {str(dtype).removeprefix('torch.')}"] = 2 * n**3 / took / 1e9
    return found


WEIGHT_OPS = (
    "rank1_weight spatial",
    "rank1_weight kernel",
    "rank1_weight_backward spatial",
    "rank1_weight_backward kernel",
    "compact_weight 10 %",
    "compact_weight_backward 10 %",
    "lowrank_weight",
    "lowrank_weight_backward",
    "lowrank_weight_backward rank 16",
    "hadamard_weight",
    "hadamard_weight_backward",
    "prox_sgd_step",
    "pack_bitmap 10 %",
    "unpack_bitmap 10 %",
)
"""In the order of their worth."""


def weight_ops(bench: Bench, dtype: torch.dtype, clients: int) -> dict[str, tuple[int, dict, list]]:
    """op → (bytes of the floor, implementations by name, a call (op, arguments) for each layer)."""

    def draw(*shape):
        return torch.randn(*shape, device=bench.device, dtype=torch.float32).to(dtype)

    implementations = {"cuda": torch.ops.fastfact}
    # compiling Triton's kernels for every shape takes longer than all the rest: once says enough
    if ff.backends()["triton"].available and dtype.itemsize == 2 and clients <= 32:
        implementations["triton"] = importlib.import_module("fastfact.kernels")
    size = torch.empty(0, dtype=dtype).element_size()
    calls: dict[str, list] = {}
    floors: dict[str, int] = {}

    def add(name, floor, op, *args):
        calls.setdefault(name, []).append((op, args))
        floors[name] = floors.get(name, 0) + floor

    for i, o, kernel, *_ in bench.shapes:
        shape = (o, i, kernel, kernel)
        n = clients * math.prod(shape)
        dense = draw(clients, o, kernel, kernel, i).permute(0, 1, 4, 2, 3)
        spatial = draw(clients, 1, kernel, kernel), draw(clients, 1, o, i)
        by_kernel = draw(clients, 1, i, kernel), draw(clients, 1, o, kernel)
        # one element of every ten is on the support of a compact μ
        tenths = torch.arange(0, n // clients - 9, 10, device=bench.device)
        index = tenths + torch.randint(10, (clients, len(tenths)), device=bench.device)
        compact = *spatial, draw(*index.shape), index.to(torch.int32), SPATIAL
        stored = index.numel() * (size + 4) + spatial[1].numel() * size
        add("compact_weight 10 %", n * size + stored, "compact_weight", *compact, True)
        floor = n * size + stored + spatial[1].numel() * size
        add("compact_weight_backward 10 %", floor, "compact_weight_backward", dense, *compact, 7)
        rank = max(1, round(0.3 * min(i, o))) * kernel
        b, a = draw(clients, i * kernel, rank), draw(clients, rank, o * kernel)
        inner = max(2, math.ceil(math.sqrt(min(o, i * kernel * kernel))))
        x1, y1 = draw(clients, o, inner), draw(clients, i * kernel * kernel, inner)
        for label, layout, factors in (("spatial", SPATIAL, spatial), ("kernel", KERNEL, by_kernel)):
            v_bytes = factors[1].numel() * size
            add(f"rank1_weight {label}", 2 * n * size + v_bytes, "rank1_weight", dense, *factors, layout, True)
            floor = n * size + 2 * v_bytes
            add(f"rank1_weight_backward {label}", floor, "rank1_weight_backward", dense, *factors, layout, 3)
        product = (b.numel() + a.numel()) * size
        more = (SEPARABLE, list(shape), 1.0)
        add("lowrank_weight", 2 * n * size + product, "lowrank_weight", dense, a, b, *more, True)
        add("lowrank_weight_backward", n * size + 2 * product, "lowrank_weight_backward", dense, a, b, *more, 3)
        thin = draw(clients, 16, o * kernel), draw(clients, i * kernel, 16), *more[:3]
        floor = n * size + 2 * (thin[0].numel() + thin[1].numel()) * size
        add("lowrank_weight_backward rank 16", floor, "lowrank_weight_backward", dense, *thin, 3)
        product = 2 * (x1.numel() + y1.numel()) * size
        pairs = (x1, y1, x1, y1, list(shape), False)
        add("hadamard_weight", n * size + product, "hadamard_weight", *pairs, True)
        add("hadamard_weight_backward", n * size + 2 * product, "hadamard_weight_backward", dense, *pairs, 15)
        flat = dense.permute(0, 1, 3, 4, 2).reshape(clients, 1, -1)
        state = [flat.clone()], [flat], [torch.zeros_like(flat)]
        add("prox_sgd_step", 5 * n * size, "prox_sgd_step", *state, [1e-3], 1e-4, 0.9, 0.0, True)
        sparse = torch.where(torch.rand(flat.shape, device=bench.device) < 0.1, flat, 0)
        packed = torch.ops.fastfact.pack_bitmap(sparse, VALUE_TYPES[torch.bfloat16])
        stored = sum(t.numel() * t.element_size() for t in packed)
        add("pack_bitmap 10 %", n * size + stored, "pack_bitmap", sparse, VALUE_TYPES[torch.bfloat16])
        add("unpack_bitmap 10 %", 4 * n + stored, "unpack_bitmap", *packed, flat.shape[-1], False)

    return {name: (floor, implementations, calls[name]) for name, floor in floors.items()}


def check_weight_op(name: str, implementations: dict, op: str, args: tuple) -> None:
    def double(x):
        if isinstance(x, list):
            return [double(y) for y in x]
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def tensors(out):
        return out if isinstance(out, tuple) else (out,)

    if op in ("prox_sgd_step", "pack_bitmap", "unpack_bitmap"):
        return  # in place or exact: tests/test_cuda_gpu.py
    args = tuple(a[:2] if isinstance(a, Tensor) else a for a in args)
    truth = tensors(getattr(ff.ops.reference, op)(*map(double, args)))
    plain = tensors(getattr(ff.ops.reference, op)(*args))
    for key, implementation in implementations.items():
        check(f"{name} ({key})", tensors(getattr(implementation, op)(*args)), truth, plain)


def weights(bench: Bench) -> Rows:
    # the interpreter has no bfloat16
    for dtype in bench.pick((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        for clients in bench.pick((32, 128), (2,)):
            for name in WEIGHT_OPS:
                common = {"op": name, "clients": clients, "dtype": str(dtype).removeprefix("torch.")}
                yield row(common, functools.partial(weights_row, bench, dtype, clients, name))


def weights_row(bench: Bench, dtype: torch.dtype, clients: int, name: str) -> dict:
    floor, implementations, calls = weight_ops(bench, dtype, clients)[name]
    for op, args in calls[:2]:
        check_weight_op(name, implementations, op, args)
    sides = {key: every_call(impl, calls) for key, impl in implementations.items()}
    # the number of nonzeros comes to the host, which a capture does not let it
    if not name.startswith("pack_bitmap"):
        sides = {key: bench.graphed(side, 1) for key, side in sides.items()}
    copied = bench.copy_bandwidth()
    times = bench.medians({**sides, "copy": copied}, rounds=bench.pick(21, 1), warmup=2, cold=True)
    copy_rate = 2 * bench.copied / times["copy"]
    rates = {key: floor / times[key] for key in sides}
    return {
        "floor_bytes": floor,
        **times,
        "copy_gb_s": copy_rate / 1e6,
        **{f"{key}_gb_s": rate / 1e6 for key, rate in rates.items()},
        **bench.against({key: times[key] for key in sides}, 0, floor, dtype),
        "ratio": rates["cuda"] / copy_rate,
        "goal": 0.85,
    }


def every_call(implementation, calls: list) -> Callable[[], object]:
    bound = [(getattr(implementation, op), args) for op, args in calls]
    return lambda: [function(*args) for function, args in bound]


class Plain(nn.Module):
    """The parameterization as one writes it in PyTorch."""

    def __init__(self, layer: ff.nn.FactorizedConv2d):
        super().__init__()
        self.u, self.v, self.mu = (nn.Parameter(factor.detach().clone()) for factor in layer.factors().values())
        self.stride, self.padding = layer.stride, layer.padding

    def forward(self, x):
        weight = (self.u.unsqueeze(1).unsqueeze(1) * self.v.unsqueeze(-1).unsqueeze(-1)).sum(0) + self.mu
        return F.conv2d(x, weight, None, self.stride, self.padding)


def layer_sides(bench: Bench, shape, batch: int, compiled: bool, dtype=torch.bfloat16) -> Sides:
    i, o, kernel, stride, side = shape
    torch.manual_seed(0)
    ours = ff.nn.FactorizedConv2d(i, o, kernel, stride, kernel // 2, bias=False, device=bench.device)
    nn.init.normal_(ours.mu, std=0.01)
    ours = ours.to(dtype=dtype, memory_format=torch.channels_last)
    ours.path = "reconstruct"
    dense, plain = ours.to_dense(), Plain(ours)
    fused = copy.deepcopy(ours)
    fused.path = "fused"
    built = {"ours": ours, "fused": fused, "dense": dense, "eager": plain}
    if compiled:
        torch._dynamo.reset()
        built["compiled"] = torch.compile(copy.deepcopy(plain), dynamic=False)
    x = torch.randn(batch, i, side, side, device=bench.device).to(dtype).to(memory_format=torch.channels_last)
    x.requires_grad_(i > 3)
    grad = torch.randn_like(dense(x.detach()))

    def step(model, x=x, grad=grad):
        leaves = [*([x] if x.requires_grad else []), *model.parameters()]
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    exact = copy.deepcopy(plain).double()
    truth = step(exact, x.detach().double().requires_grad_(x.requires_grad), grad.double())
    reference = step(plain)
    for name, model in built.items():
        if name != "dense":
            check(f"layer {name_of(shape)} {name}", step(model), truth, reference)
    return {name: lambda model=model: step(model) for name, model in built.items()}


def layers(bench: Bench) -> Rows:
    """Rows by batch and shape of a layer, with the numbers of the layers that have it."""
    for batch in bench.pick((32, 256, 64, 128), (2,)):
        # compiling takes longest: once says enough
        compiled = not bench.dry and batch == 256
        common = {"op": "convolution forward + backward", "batch": batch, "dtype": "bfloat16"}
        for shape in dict.fromkeys(bench.shapes):
            numbers = [number for number, other in enumerate(bench.shapes, 1) if other == shape]
            which = {"format": "channels_last", "layers": numbers, "shape": name_of(shape)}
            yield row(common | which, functools.partial(layers_row, bench, shape, batch, compiled))


def layers_row(bench: Bench, shape, batch: int, compiled: bool) -> dict:
    repeats = bench.pick(10, 1)
    sides = layer_sides(bench, shape, batch, compiled)
    graphs = {name: bench.graphed(side, repeats) for name, side in sides.items()}
    times = {name: t / repeats for name, t in bench.medians(graphs).items()}
    once = {f"cold {name}": bench.graphed(sides[name], 1) for name in ("ours", "fused", "dense")}
    i, o, kernel, stride, side = shape
    inputs, outputs = batch * i * side**2, batch * o * (side // stride) ** 2
    gradients = 3 if i > 3 else 2
    against = bench.against(
        times,
        gradients * 2 * outputs * i * kernel**2,
        2 * (gradients * (inputs + outputs) + 3 * i * o * kernel**2),
        torch.bfloat16,
    )
    return {**times, **bench.medians(once, cold=True), **against, **layer_ratios(times)}


def layers_summary(rows: list[dict]) -> Iterator[dict]:
    """The geometric mean of the ratios over the layers, for each batch of which all were measured."""
    for batch in dict.fromkeys(found["batch"] for found in rows):
        some = [found for found in rows if found["batch"] == batch for _ in found["layers"]]
        keys = [key for key in some[0] if "/" in key]
        if len(some) == len(RESNET9) and keys and not any("error" in found for found in some):
            means = {key: geometric_mean(found[key] for found in some) for key in keys}
            goal = {"dense": 0.97, "eager": 1.3, "compiled": 1.05}
            yield {"op": some[0]["op"], "batch": batch, "shape": "all", **means, "goal": goal}


def layer_ratios(times: dict[str, float]) -> dict[str, float]:
    """Each rival's time over ours."""
    rivals = [name for name in ("dense", "eager", "compiled") if name in times]
    return {f"{rival}/{side}": times[rival] / times[side] for side in ("ours", "fused") for rival in rivals}


def rank1(bench: Bench) -> Rows:
    channels = bench.pick(256, 16)
    for side in bench.pick((8, 16, 32), (5,)):
        for batch in bench.pick((32, 128, 256), (2,)):
            shape = (channels, channels, 3, 1, side)
            common = {"op": "rank-1 forward", "shape": name_of(shape), "batch": batch, "dtype": "bfloat16"}
            yield row(common, functools.partial(rank1_row, bench, shape, batch))


def rank1_row(bench: Bench, shape, batch: int) -> dict:
    channels, *_, side = shape
    repeats = bench.pick(10, 1)
    torch.manual_seed(0)
    spec = ff.Rank1(sparse=False)
    layer = ff.nn.FactorizedConv2d(channels, channels, 3, padding=1, bias=False, spec=spec, device=bench.device)
    layer = layer.bfloat16()
    dense = layer.to_dense().to(memory_format=torch.channels_last)
    layer.path = "fused"
    x = torch.randn(batch, channels, side, side, device=bench.device).bfloat16()
    x = x.to(memory_format=torch.channels_last)

    def split():
        # what the algebra gives in plain PyTorch: depthwise, then 1×1
        depthwise = layer.u.expand(channels, 1, 3, 3)
        return F.conv2d(F.conv2d(x, depthwise, None, 1, 1, 1, channels), layer.v[0, :, :, None, None])

    sides = {"ours": lambda: layer(x), "dense": lambda: dense(x), "split": split}
    with torch.no_grad():
        truth = F.conv2d(x.double(), copy.deepcopy(layer).double().weight, None, 1, 1)
        for name in ("ours", "split"):
            check(f"rank-1 {name}", [sides[name]()], [truth], [dense(x)])
        times = bench.medians({name: bench.graphed(one, repeats) for name, one in sides.items()})
        cold = {f"cold {name}": bench.graphed(one, 1) for name, one in sides.items()}
        cold = bench.medians(cold, cold=True)
    times = {name: t / repeats for name, t in times.items()}
    operations = 2 * batch * side**2 * channels * (channels + 9)
    operations = {"ours": operations, "split": operations, "dense": 2 * batch * side**2 * channels**2 * 9}
    against = bench.against(times, operations, 4 * x.numel(), torch.bfloat16)
    return times | cold | against | {"ratio": times["dense"] / times["ours"], "goal": 4}


def separable(bench: Bench) -> Rows:
    shapes = bench.pick([(256, 256, 3, 1, 8), (128, 128, 3, 1, 16), (64, 128, 5, 2, 32)], TINY[1:])
    for k, batch in bench.pick([(100, 32), (1, 256)], [(2, 2)]):
        for shape in shapes:
            for rank in bench.pick((1, 16, 64), (2,)):
                common = {"op": "kh×1 and 1×kw", "clients": k, "batch": batch, "shape": name_of(shape), "rank": rank}
                yield row(common, functools.partial(separable_row, bench, k, batch, shape, rank))


def separable_row(bench: Bench, k: int, batch: int, shape, rank: int) -> dict:
    i, o, kernel, stride, side = shape
    repeats = bench.pick(5, 1)
    torch.manual_seed(0)

    def images(channels, side):
        drawn = torch.randn(k, batch, side, side, channels, device=bench.device)
        return drawn.bfloat16().permute(0, 1, 4, 2, 3)

    x, grad = images(i, side), images(o, (side + 2 * (kernel // 2) - kernel) // stride + 1)
    u, v = ((torch.randn(k, rank, c, kernel, device=bench.device) * 0.1).bfloat16() for c in (i, o))
    settings = (KERNEL, (o, i, kernel, kernel), True, (stride, stride), (kernel // 2,) * 2, (1, 1), 1)
    dense = ff.ops.reference.rank1_weight(None, u, v, KERNEL, True)
    op = torch.ops.fastfact

    def both(x, grad, u, v, mu):
        y = op.fused_conv2d(x, u, v, mu, None, None, *settings)
        return y, op.fused_conv2d_dx(grad, u, v, mu, None, x.shape[1:], True, *settings)

    def in_two():
        with mock.patch("fastfact.kernels.separable_conv.MAX_RANK", 0):
            return both(x, grad, u, v, None)

    sides: Sides = {"one": lambda: both(x, grad, u, v, None), "two": in_two}
    sides["fused dense"] = lambda: both(x, grad, None, None, dense)
    some = [t[:1] for t in (x, grad, u, v)]
    truth = exact_separable(*some, settings)
    for name in ("one", "two"):
        found = [t[:1] for t in sides[name]()]
        check(f"separable {name_of(shape)} rank {rank}, {name}", found, truth, [t[:1] for t in sides["fused dense"]()])
    if k == 1:
        weight, how = dense[0].contiguous(memory_format=torch.channels_last), {"stride": stride, "padding": kernel // 2}
        sides["cudnn dense"] = lambda: (
            F.conv2d(x[0], weight, **how),
            torch.nn.grad.conv2d_input(x.shape[1:], weight, grad[0], **how),
        )
    times = bench.medians({name: bench.graphed(one, repeats) for name, one in sides.items()})
    times = {name: t / repeats for name, t in times.items()}
    moved = 2 * 2 * (x.numel() + grad.numel())
    positions = k * batch * grad.shape[-1] * (side * i + grad.shape[-1] * o)
    operations = dict.fromkeys(("one", "two"), 4 * positions * rank * kernel)
    operations |= dict.fromkeys(("fused dense", "cudnn dense"), 4 * grad.numel() * i * kernel**2)
    against = bench.against(times, operations, moved, torch.bfloat16)
    return times | against | {"two/one": times["two"] / times["one"], "gb_s": moved / times["one"] / 1e6, "goal": 1}


def exact_separable(x, grad, u, v, settings):
    """In float64, by the reference."""
    doubled = [t.double() for t in (u, v)]
    y = ff.ops.reference.fused_conv2d(x.double(), *doubled, None, None, None, *settings)
    return y, ff.ops.reference.fused_conv2d_dx(grad.double(), *doubled, None, None, x.shape[1:], True, *settings)


def trainer(bench: Bench, path: str, dtype: torch.dtype, graphs: bool, spec: ff.Spec | None = None) -> Trainer:
    torch.manual_seed(0)
    model = models.resnet9(3, 10, bench.pick(1.0, 0.1))
    model = ff.factorize(model, spec or ff.Rank1()).to(device=bench.device, dtype=dtype)
    model = model.to(memory_format=torch.channels_last)
    for layer in factorized_layers(model).values():
        if isinstance(layer, ff.nn.FactorizedConv2d):
            layer.path = path
    infos = describe(model)
    penalized = frozenset(name for name, info in infos.items() if info.role == "mu")
    settings = Settings(bench.pick(32, 2), 0.01, 0.9, 1e-6, l1=1e-4, penalized=penalized, graphs=graphs)
    return Trainer(model, infos, settings)


def run_together(trainer: Trainer, state: State, data, epochs: int) -> list[float]:
    """Every client at once: their mean losses."""
    return trainer.train(state, data, 0, range(len(data)), [Phase(epochs=epochs)])[0]


LOOPED = 10
"""Clients that the loop over them is timed with: each takes as long as any other."""


def run_loop(trainer: Trainer, state: State, data, epochs: int) -> list[float]:
    """The first `LOOPED` of them, one after the other."""
    losses = []
    for at in range(min(LOOPED, len(data))):
        mine = {name: tensor[at : at + 1] for name, tensor in state.items()}
        losses += trainer.train(mine, data[at : at + 1], 0, [at], [Phase(epochs=epochs)])[0]
    return losses


def clients(bench: Bench) -> Rows:
    for dtype in bench.pick((torch.bfloat16, torch.float32), (torch.float32,)):
        k, batch = bench.pick((100, 32), (3, 2))
        common = {"op": "training step, ResNet-9", "clients": k, "batch": batch}
        common["dtype"] = str(dtype).removeprefix("torch.")
        yield row(common, functools.partial(clients_row, bench, dtype, k, batch))
    dtype = bench.pick(torch.bfloat16, torch.float32)
    common = common | {"op": "step of FedDecomp's personal phase", "dtype": str(dtype).removeprefix("torch.")}
    for ratio in bench.pick((0.1, 0.6), (0.3,)):
        yield row(common | {"ratio": ratio}, functools.partial(personal_row, bench, dtype, ratio, k, batch))


def images_of_clients(bench: Bench, dtype: torch.dtype, k: int, batch: int) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """Batches an epoch, and each client's data for them."""
    side, steps = bench.pick((32, 4), (8, 2))
    data = []
    for _ in range(k):
        x = torch.randn(batch * steps, 3, side, side, device=bench.device).to(dtype)
        y = torch.randint(10, (batch * steps,), device=bench.device)
        data.append((x.to(memory_format=torch.channels_last), y))
    return steps, data


def agree(losses: dict[str, Tensor], rival: str, dtype: torch.dtype) -> None:
    """The same batches in the same order: the mean loss of the first epoch agrees with the rival's."""
    limit = 0.1 if dtype == torch.bfloat16 else 0.02
    for name, found in losses.items():
        found = found[: len(losses[rival])]
        assert (found - losses[rival]).abs().mean() <= limit * losses[rival].mean(), (name, dtype)


def personal_row(bench: Bench, dtype: torch.dtype, ratio: float, k: int, batch: int) -> dict:
    """Only A and B train: one convolution with σ for all clients where that costs less, against each client's own W,
    and against vmap.
    """
    steps, data = images_of_clients(bench, dtype, k, batch)
    epochs = bench.pick(2, 1)
    phase = Phase(epochs=epochs, trains=lambda info: info.role in ("A", "B"))
    never = mock.patch.object(ff.nn.FactorizedConv2d, "_shares_sigma", lambda *args: False)
    sides: Sides = {}
    losses, peaks = {}, {}
    for name, path, how in (
        ("ours", "fused", contextlib.nullcontext()),
        ("own W", "fused", never),
        ("vmap", "reconstruct", contextlib.nullcontext()),
    ):
        one = trainer(bench, path, dtype, path == "fused", ff.LowRank(ratio))
        state = stack(tensors_of(one.model), k)

        def run(one=one, state=state, how=how):
            with how:
                return one.train(state, data, 0, range(k), [phase])[0]

        losses[name] = torch.tensor(run())
        sides[name] = run
        peaks[name] = bench.peak_bytes(run)
    agree(losses, "vmap", dtype)
    times = bench.medians(sides, rounds=bench.pick(3, 1), warmup=1)
    times = {name: t / steps / epochs for name, t in times.items()}
    ratios = {f"{rival}/ours": times[rival] / times["ours"] for rival in ("own W", "vmap")}
    against = bench.against(times, RESNET9_OPERATIONS * k * batch, 0, dtype)
    return {**times, **against, **ratios, "peak_bytes": peaks}


def clients_row(bench: Bench, dtype: torch.dtype, k: int, batch: int) -> dict:
    # a recording serves the epochs of a phase; one client after the other takes long enough in one
    epochs = bench.pick(2, 1)
    kinds = {
        "ours": ("fused", True, run_together, epochs),
        "ours, no graph": ("fused", False, run_together, epochs),
        "vmap": ("reconstruct", False, run_together, 1),
        "loop": ("reconstruct", False, run_loop, 1),
    }
    steps, data = images_of_clients(bench, dtype, k, batch)
    sides: Sides = {}
    peaks, losses = {}, {}
    for name, (path, graphs, run, epochs) in kinds.items():
        one = trainer(bench, path, dtype, graphs)
        state = stack(tensors_of(one.model), k)
        losses[name] = torch.tensor(run(one, state, data, 1))
        sides[name] = functools.partial(run, one, state, data, epochs)
        began = time.perf_counter()
        peaks[name] = bench.peak_bytes(sides[name])
        print(f"{name}: {1e3 * (time.perf_counter() - began) / steps / epochs:.1f} ms a step, {peaks[name] >> 20} MiB")
    agree(losses, "loop", dtype)
    times = bench.medians(sides, rounds=bench.pick(3, 1), warmup=0)
    times = {name: t / steps / kinds[name][3] for name, t in times.items()}
    times["loop"] *= k / min(LOOPED, k)
    return {
        **times,
        "looped": min(LOOPED, k),
        **bench.against(times, RESNET9_OPERATIONS * k * batch, 0, dtype),
        "loop/ours": times["loop"] / times["ours"],
        "vmap/ours": times["vmap"] / times["ours"],
        "peak_bytes": peaks,
        "peak ours/vmap": peaks["ours"] / max(peaks["vmap"], 1),
        "goal": {"loop/ours": 12, "vmap/ours": 2, "peak ours/vmap": 0.6},
    }


class Added(nn.Module):
    """A frozen linear layer and what low-rank factors add to it, as one writes it in PyTorch (and PEFT does)."""

    def __init__(self, layer: ff.nn.FactorizedLinear):
        super().__init__()
        self.register_buffer("weight", layer.sigma.detach())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())
        self.A, self.B = (nn.Parameter(getattr(layer, name).detach().clone()) for name in ("A", "B"))
        self.scaling = layer.spec.scaling

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scaling * F.linear(F.linear(x, self.A), self.B)


def adapters(bench: Bench) -> Rows:
    for dtype in bench.pick((torch.bfloat16, torch.float32), (torch.float32,)):
        name = str(dtype).removeprefix("torch.")
        for work in bench.pick(adapter_bench.WORKS.values(), (adapter_bench.Work(3, 16, 1, 2, 2, 2, 3, 1.0),)):
            common = {"op": "adapters, training step", "clients": work.clients, "batch": work.batch, "dtype": name}
            common |= {"width": work.width, "depth": work.depth, "rank": work.rank}
            yield row(common, functools.partial(adapter_clients_row, bench, work, dtype))
            for i, o in bench.pick(((work.width, work.width), (work.width, 4 * work.width)), ((6, 5),)):
                common = {"op": "adapter layer of clients, forward + backward", "clients": work.cohort, "dtype": name}
                common |= {"shape": f"{i}→{o}", "rows": 17 * work.batch, "rank": work.rank}
                yield row(common, functools.partial(adapter_kernels_row, bench, work, i, o, dtype))
        for count in bench.pick((512, 16384), (4,)):
            for i, o in bench.pick(list(adapter_bench.LAYERS.values()), [(6, 5)]):
                common = {"op": "adapter layer, forward + backward", "shape": f"{i}→{o}", "rows": count, "dtype": name}
                yield row(common, functools.partial(adapter_row, bench, i, o, count, dtype))


def adapter_row(bench: Bench, i: int, o: int, count: int, dtype: torch.dtype) -> dict:
    torch.manual_seed(0)
    spec = ff.LowRank(rank=bench.pick(8, 2), scaling=2.0)
    ours = ff.factorize(nn.Sequential(nn.Linear(i, o)), spec, freeze=True)[0]
    nn.init.normal_(ours.B, std=0.01)
    ours = ours.to(bench.device, dtype)
    plain = Added(ours)
    x, grad = (torch.randn(count, n, device=bench.device).to(dtype) for n in (i, o))
    x.requires_grad_()

    def step(layer, x=x, grad=grad):
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, layer.A, layer.B], grad)]

    truth = step(copy.deepcopy(plain).double(), x.detach().double().requires_grad_(), grad.double())
    check(f"adapter {i}→{o}", step(ours), truth, step(plain))
    repeats = bench.pick(10, 1)
    sides = {"ours": functools.partial(step, ours), "plain": functools.partial(step, plain)}
    times = bench.medians({name: bench.graphed(side, repeats) for name, side in sides.items()})
    times = {name: t / repeats for name, t in times.items()}
    size = dtype.itemsize
    operations, moved = 2 * 2 * count * i * o, size * (2 * i * o + 2 * count * (i + o))
    against = bench.against(times, operations, moved, dtype)
    return {**times, **against, "plain/ours": times["plain"] / times["ours"], "goal": {"plain/ours": 1.1}}


def adapter_kernels_row(bench: Bench, work: adapter_bench.Work, i: int, o: int, dtype: torch.dtype) -> dict:
    """A cohort's layer with the thin products by Triton, as it is, against `bmm` for them."""
    k, n, r = work.cohort, 17 * work.batch, work.rank

    def draw(*shape):
        return torch.randn(*shape, device=bench.device).to(dtype)

    x, grad, a, b = (t.requires_grad_() for t in (draw(k, n, i), draw(k, n, o), draw(k, r, i), draw(k, o, r)))
    sigma, bias = draw(o, i) / i**0.5, draw(o)

    def step(backend, x=x, a=a, b=b, sigma=sigma, bias=bias, grad=grad):
        with ff.use_backend(backend):
            y = ff.ops.lowrank_linear(x, sigma, a, b, bias, scaling=2.0)
            return [y.detach(), *torch.autograd.grad(y, [x, a, b], grad)]

    backends = {"triton": "triton", "bmm": "reference"} if ff.backends()["triton"].available else {"bmm": "reference"}
    wide = [t.detach().double().requires_grad_() for t in (x, a, b)]
    truth, plain = step("reference", *wide, sigma.double(), bias.double(), grad.double()), step("reference")
    for backend in backends.values():
        check(f"adapters of clients {i}→{o}", step(backend), truth, plain)
    repeats = bench.pick(10, 1)
    sides = {name: bench.graphed(functools.partial(step, backend), repeats) for name, backend in backends.items()}
    times = {name: t / repeats for name, t in bench.medians(sides).items()}
    size = dtype.itemsize
    operations, moved = 2 * k * n * (2 * i * o + 3 * r * (i + o)), size * (2 * i * o + 2 * k * (n + 2 * r) * (i + o))
    found = {**times, **bench.against(times, operations, moved, dtype)}
    return found | ({"bmm/triton": times["bmm"] / times["triton"]} if "triton" in times else {})


def adapter_clients_row(bench: Bench, work: adapter_bench.Work, dtype: torch.dtype) -> dict:
    """All clients' step of SGD together, a cohort after the other, against a loop over their models."""
    clients = [
        Client((x.to(dtype), y), (test_x.to(dtype), test_y))
        for (x, y), (test_x, test_y) in ((one.train, one.test) for one in adapter_bench.clients_of(work))
    ]
    fed = Federation(
        lambda: work.ours().to(dtype),
        clients,
        "stand-alone",
        epochs=1,
        batch_size=work.batch,
        lr=adapter_bench.LR,
        momentum=0.0,
        weight_decay=0.0,
        cohort=work.cohort,
        device=bench.device,
    )
    everybody, cohort = range(work.clients), fed.cohort
    state = {
        name: t.expand(work.clients, *t.shape[1:]).contiguous().to(bench.device) for name, t in fed.initial.items()
    }
    data = [tuple(t.to(bench.device) for t in client.train) for client in clients]
    phases = fed.method.active_phases(1, adapts=False)

    def together() -> list[float]:
        losses: list[float] = []
        for begin in range(0, work.clients, cohort):
            some = everybody[begin : begin + cohort]
            rows = {name: t[begin : begin + cohort] for name, t in state.items()}
            losses += fed.trainer.train(rows, [data[k] for k in some], 1, some, phases)[0]
        return losses

    network = work.ours().to(bench.device, dtype)
    for path, layer in factorized_layers(network).items():
        network.set_submodule(path, Added(layer))
        for name in ("A", "B"):
            with torch.no_grad():
                getattr(network.get_submodule(path), name).copy_(fed.initial[f"{path}.{name}"][0])
    trained = {f"{path}.{name}" for path in factorized_layers(fed.models[0]) for name in ("A", "B")}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    shared = {id(t): t for t in (*network.parameters(), *network.buffers()) if not t.requires_grad}
    models = [copy.deepcopy(network, dict(shared)) for _ in everybody]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], adapter_bench.LR) for m in models]

    def loop() -> list[float]:
        losses = []
        for model, optimizer, (x, y) in zip(models, optimizers, data, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    sides: Sides = {"ours": together, "loop": loop}
    agree({name: torch.tensor(side()) for name, side in sides.items()}, "loop", dtype)
    peaks = {name: bench.peak_bytes(side) for name, side in sides.items()}
    times = bench.medians(sides, rounds=bench.pick(7, 1), warmup=1)
    # σ is applied to every token, forward and for the gradient of its input.
    numbers = sum(t.numel() for t in (*network.parameters(), *network.buffers()) if t.dim() == 2)
    operations = 4 * work.clients * work.batch * 17 * numbers
    return {
        **times,
        **bench.against(times, operations, 0, dtype),
        "loop/ours": times["loop"] / times["ours"],
        "peak_bytes": peaks,
        "goal": {"loop/ours": work.goal},
    }


def resident(bench: Bench) -> Rows:
    yield row({"op": "clients resident, ResNet-9 at 10 % density"}, functools.partial(resident_row, bench))


def resident_row(bench: Bench) -> dict:
    """Pack some clients, then hold as many as the goal says, and restore some of them."""
    goal = bench.pick(80_000, 12)
    chunk = bench.pick(500, 4)
    torch.manual_seed(0)
    model = ff.factorize(models.resnet9(3, 10, bench.pick(1.0, 0.1)), ff.Rank1())
    tensors = tensors_of(model)
    penalized = [name for name in tensors if name.rpartition(".")[2] == "mu"]
    others = sum(t.numel() for name, t in tensors.items() if name not in penalized)
    n = sum(tensors[name].numel() for name in penalized)

    def pack():
        x = torch.randn(chunk, 1, n, device=bench.device)
        threshold = x.abs().kthvalue(n - round(0.1 * n), dim=-1, keepdim=True).values
        x = torch.where(x.abs() > threshold, x, 0)
        return x, torch.ops.fastfact.pack_bitmap(x, VALUE_TYPES[torch.bfloat16])

    x, (bits, values, scale) = pack()
    restored = torch.ops.fastfact.unpack_bitmap(bits, values, scale, n)
    assert torch.equal(restored, x.bfloat16().float())
    del x, restored
    each = bits[0].numel() + 2 * values.numel() // chunk + 2 * others
    before = torch.cuda.memory_allocated() if bench.cuda else 0
    held = []
    for _ in range(goal // chunk):
        factors = torch.empty(chunk, others, dtype=torch.bfloat16, device=bench.device).normal_()
        held.append((bits.clone(), values.clone(), factors))
    bench.synchronize()
    used = torch.cuda.memory_allocated() - before if bench.cuda else each * goal
    last = torch.ops.fastfact.unpack_bitmap(held[-1][0], held[-1][1], scale, n)
    assert last.count_nonzero() == held[-1][1].count_nonzero()
    capacity = torch.cuda.get_device_properties(0).total_memory if bench.cuda else 0
    return {
        "clients": goal,
        "bytes_a_client": used / goal,
        "device_bytes": capacity,
        "clients_that_fit": capacity // max(used // goal, 1),
        "dense_clients_that_fit": capacity // DENSE_CLIENT_BYTES,
        "goal": 80_000,
    }


def mix(bench: Bench) -> Rows:
    """The server's step on keys of float32, as Factorized-FL α and β mix, and on int8 sketches."""
    shapes = bench.pick(
        [
            ("float32", 1000, 65536, 73),
            ("float32", 4000, 4096, 4096),
            ("int8", 4000, 1024, 73),
            ("int8", 32768, 1024, 73),
        ],
        [("float32", 40, 64, 9), ("int8", 40, 64, 9)],
    )
    for keys, k, d, n in shapes:
        common = {"op": "similarity and mix", "clients": k, "keys": keys, "numbers": d, "mixed": n}
        yield row(common, functools.partial(mix_row, bench, keys, k, d, n))


def mix_row(bench: Bench, keys: str, k: int, d: int, n: int) -> dict:
    g = torch.Generator().manual_seed(0)
    v = torch.randn(k, d, generator=g) + torch.randn(1, d, generator=g)
    v, x = (v if keys == "float32" else ff.ops.srht(v, d)[0]).to(bench.device), torch.randn(k, n, device=bench.device)
    # every pair is matched: no tile is skipped
    epsilon, tau, some = 5.0, -1.0, range(min(k, 512))
    panels = [range(at, min(at + 4096, k)) for at in range(0, k, 4096)]
    weights, others = torch.ones(min(k, 4096), k, device=bench.device), v.T

    def products():
        for rows in panels:
            mine = v[rows.start : rows.stop]
            torch._int_mm(mine, others) if keys == "int8" else mine @ others
            weights[: len(rows)] @ x

    def step(backend, rows=None, v=v, x=x):
        with ff.use_backend(backend):
            return ff.ops.similarity_mix(v, x, epsilon, tau, rows=rows)

    backends = {"cuda": "cuda" if bench.cuda else "cpu"}
    if ff.backends()["triton"].available:
        backends["triton"] = "triton"
    truth = step("reference", some, v if keys == "int8" else v.double(), x.double())
    plain = step("reference", some)
    for name, backend in backends.items():
        check(f"similarity_mix ({name})", [step(backend, some)], [truth], [plain])
    sides = {name: functools.partial(step, backend) for name, backend in backends.items()}
    sides |= {"torch": functools.partial(step, "reference"), "products": products}
    times = bench.medians(sides, rounds=bench.pick(7, 1), warmup=1)
    return {
        **times,
        **bench.against(times, 2 * k * k * (d + n), 4 * k * (d + n), torch.float32),
        "products/cuda": times["products"] / times["cuda"],
        "torch/cuda": times["torch"] / times["cuda"],
        "goal": {"products/cuda": 1 / 1.5},
    }


IMAGE_TILES = [
    (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 128, 32, 8, 4),
    (256, 128, 64, 8, 3),
    (256, 64, 64, 8, 3),
    (128, 64, 64, 8, 3),
    (128, 64, 64, 4, 3),
    (64, 128, 64, 4, 3),
    (64, 64, 64, 8, 3),
]
GRADIENT_TILES = [
    (64, 64, 64, 8, 3),
    (64, 64, 64, 4, 3),
    (128, 64, 64, 8, 3),
    (128, 64, 64, 4, 3),
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 8, 4),
    (64, 64, 128, 4, 3),
]
TUNED = [(128, 128, 3, 1, 16), (256, 256, 3, 1, 8), (64, 128, 5, 2, 32)]


def tune(bench: Bench) -> Rows:
    """Each kernel of the fused convolution with other tiles than it chooses, for many clients and for one."""
    for k, batch in bench.pick([(100, 32), (1, 256)], [(2, 2)]):
        for shape in bench.pick(TUNED, TINY[1:]):
            for part in ("forward", "dx", "dw"):
                common = {"op": f"fused convolution, {part}", "clients": k, "batch": batch, "shape": name_of(shape)}
                yield row(common, functools.partial(tune_row, bench, k, batch, shape, part))


def tune_row(bench: Bench, k: int, batch: int, shape, part: str) -> dict:
    i, o, kernel, stride, side = shape
    conv = importlib.import_module("fastfact.kernels.conv")

    def draw(*shape):
        return torch.randn(*shape, device=bench.device, dtype=torch.bfloat16)

    def images(channels, side):
        return draw(k, batch, side, side, channels).permute(0, 1, 4, 2, 3)

    x, grad = images(i, side), images(o, (side + 2 * (kernel // 2) - kernel) // stride + 1)
    u, v, mu = draw(k, 1, kernel, kernel), draw(k, 1, o, i), draw(k, o, kernel, kernel, i).permute(0, 1, 4, 2, 3)
    settings = (SPATIAL, (o, i, kernel, kernel), True, (stride, stride), (kernel // 2,) * 2, (1, 1), 1)
    op = torch.ops.fastfact
    runs = {
        "forward": lambda: op.fused_conv2d(x, u, v, mu, None, None, *settings),
        "dx": lambda: op.fused_conv2d_dx(grad, u, v, mu, None, x.shape[1:], True, *settings),
        "dw": lambda: op.fused_conv2d_dw(grad, x, u, v, None, *settings, 7),
    }
    tiles = [conv.Tile(*tile) for tile in (GRADIENT_TILES if part == "dw" else IMAGE_TILES)]
    expected, times = runs[part](), {}
    chosen = bench.medians({"chosen": bench.graphed(runs[part], 3)}, rounds=bench.pick(11, 1))["chosen"] / 3
    for tile in tiles:
        name = "×".join(map(str, tile))
        # this tile and no smaller one
        with mock.patch.object(conv, "first_that_fits", lambda _, __, ___, launch, tile=tile: not launch(tile)):
            try:
                outs = runs[part]()
                for out, same in zip(*((r if isinstance(r, tuple) else (r,)) for r in (outs, expected)), strict=True):
                    assert relative_error(out, same.double()) < 2e-2, name
                times[name] = bench.medians({name: bench.graphed(runs[part], 3)}, rounds=bench.pick(11, 1))[name] / 3
            except Exception as error:
                times[name] = f"{type(error).__name__}: {error}"[:80]
    best = min((name for name, t in times.items() if isinstance(t, float)), key=times.get)
    operations = 2 * k * math.prod(grad.shape[1:]) * i * kernel * kernel
    rate = operations / chosen / 1e9
    found = {"chosen": chosen, "tera_flops": rate, "best": best, "chosen/best": chosen / times[best], "tiles": times}
    return found | {"roofline": bench.against({"chosen": chosen}, operations, 0, torch.bfloat16)["roofline"]}


SECTIONS = {
    "clients": clients,
    "layers": layers,
    "weights": weights,
    "rank1": rank1,
    "separable": separable,
    "resident": resident,
    "adapters": adapters,
    "mix": mix,
    "tune": tune,
}
ROW_SECONDS = dict.fromkeys(SECTIONS, 25.0) | {
    "clients": 90.0,
    "layers": 45.0,
    "resident": 30.0,
    "adapters": 40.0,
    "tune": 60.0,
}


def fake(position: int) -> dict:
    """A row without a device: the third one dies, the fourth hangs, the fifth loses its device."""
    if position == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif position == 3:
        time.sleep(1e6)
    elif position == 4:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return {"ours": 1.0, "rival": 2.0, "ratio": 2.0}


def show(row: dict) -> str:
    def text(value):
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {text(one)}" for key, one in value.items()) + "}"
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return "  ".join(f"{key}={text(value)}" for key, value in row.items() if key not in ("op", "goal"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--jsonl", type=Path, help="append a line for each row to this file, when it ends")
    parser.add_argument("--seconds", type=float, default=3600.0, help="what does not fit into this time is left out")
    parser.add_argument("--row-seconds", type=float, help="the longest time of a row (default: by section)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, any device")
    parser.add_argument("--fake", action="store_true", help="measure nothing: see gpu_check --rehearse")
    args = parser.parse_args()
    bench = Bench(args.dry_run)
    ends = time.monotonic() + args.seconds
    limit, rows = args.row_seconds or ROW_SECONDS[args.section], []

    def tell(found: dict) -> None:
        print(f"{found['op']:38} {show(found)}", flush=True)
        if args.jsonl:
            append(args.jsonl, {"section": args.section, **found})

    if args.jsonl:
        append(
            args.jsonl, {"section": args.section, "command": shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]])}
        )
    for position, one in enumerate([*ceilings(bench), *SECTIONS[args.section](bench)]):
        left = ends - time.monotonic()
        if left < LEAST:
            found = one.common | {"error": "left out: no time"}
        else:
            one = one._replace(measure=functools.partial(fake, position)) if args.fake else one
            found = in_a_process(one, min(limit, left))
        tell(found)
        if position == 0:
            bench.ceilings = {name: rate for name, rate in found.items() if isinstance(rate, float)}
        else:
            rows.append(found)
    if args.section == "layers" and not args.fake:
        for found in layers_summary(rows):
            tell(found)
    return int(any("error" in found for found in rows))


if __name__ == "__main__":
    sys.exit(main())
