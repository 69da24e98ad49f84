"""Whole networks with factorized layers against the dense ones of the same function, and both under torch.compile.

Networks are those of torchvision, by name, or of `fastfact.models` where it alone has the name; images of random
numbers, 1,000 classes. Every convolution and linear layer is factorized (`ff.Rank1`, init "svd", so that
"dense" computes the same), linear layers of transformers with the rank of `NETWORKS`. μ: none, the largest 5, 10, 30 or
60 % in compact form, or dense. Every side of a row runs in turn, so that noise meets all of them alike: sides are
medians in milliseconds, `ratio` is the median over the turns of dense / ours. Outputs are compared before anything is
timed. `paths` counts the layers by the path they take; choices are measured before the first turn.

step        training mode: forward, cross-entropy, backward, SGD with momentum (ours: `ff.optim.ProxSGD`)
evaluation  forward in evaluation mode
memory      the most that a process of its own holds in such steps, in MiB beyond what it held before the model; on a
            GPU the most that PyTorch has allocated there
"""

import contextlib
import copy
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact import models
from fastfact import public as ff
from fastfact.bench.common import CLOCKS, FORMATS, interleaved
from fastfact.bench.layers import check, evaluation, mean_of
from fastfact.nn import FactorizedLayer


class Network(NamedTuple):
    """batch: images at once. linear_rank: of linear layers; convolutions have rank 1."""

    batch: int = 8
    linear_rank: int = 1


NETWORKS = {
    "resnet18": Network(16),
    "resnet50": Network(8),
    "vgg11_bn": Network(8),
    "mobilenet_v3_small": Network(16),
    "vit_b_16": Network(8, 16),
    "convnext_tiny": Network(8),
}
OTHERS = {"swin_t": Network(8, 8), "vit_b_32": Network(8, 16), "vit_l_16": Network(8, 16)}
DENSITIES = (0.0, 0.05, 0.1, 0.3, 0.6, 1.0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda")
SECTIONS = ("step", "evaluation", "memory")
CLASSES, SIDE = 1000, 112


def about(name: str) -> Network:
    """How a network is measured: as `NETWORKS` says, or as any other. Raises ValueError for a name nobody knows."""
    if name not in NETWORKS and name not in models.MODELS and name not in _torchvision().list_models(_torchvision()):
        raise ValueError(f"only={name!r}: must be a network of torchvision.models or one of {', '.join(models.MODELS)}")
    return (NETWORKS | OTHERS).get(name, Network())


def _torchvision():
    try:
        import torchvision.models
    except ImportError as error:
        raise ValueError(f"bench networks: needs torchvision, which cannot be imported ({error})") from None
    return torchvision.models


def of_torchvision(name: str) -> bool:
    """Whether torchvision is there and has a network of that name."""
    with contextlib.suppress(ValueError):
        return name in _torchvision().list_models(_torchvision())
    return False


def network(name: str, side: int) -> nn.Module:
    """The dense network, as it is made."""
    torch.manual_seed(0)
    if name in models.MODELS and not of_torchvision(name):
        return models.build(name, (3, side, side), CLASSES)
    sized = {"image_size": side} if name.startswith("vit") else {}
    own = {"aux_logits": False, "init_weights": True} if name in ("inception_v3", "googlenet") else {}
    return _torchvision().get_model(name, weights=None, num_classes=CLASSES, **sized, **own)


def specs(name: str, sparse: bool) -> Callable[[str, nn.Module], ff.Rank1]:
    """The spec of each layer of a network."""
    rank = about(name).linear_rank

    def spec(path: str, module: nn.Module) -> ff.Rank1:
        return ff.Rank1(rank=1 if isinstance(module, nn.modules.conv._ConvNd) else rank, sparse=sparse)

    return spec


@functools.lru_cache(1)
def pair(name: str, density: float, side: int, form: str = "channels_last") -> dict[str, nn.Module]:
    """Ours and the dense network of the same function, batch norms with the statistics of a batch: with those of a new
    network activations may vanish or overflow in evaluation. Not to be changed: the next row may ask for them again."""
    ours = ff.factorize(network(name, side), specs(name, density > 0), init="svd").train()
    layers = ff.factorized_layers(ours).values() if 0 < density < 1 else ()
    for layer in layers:
        layer.prune_(density)
    dense = ff.densify(copy.deepcopy(ours)).to(memory_format=FORMATS[form])
    norms = [(module, module.momentum) for module in dense.modules() if hasattr(module, "running_mean")]
    for norm, _ in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        dense(images(8, side, form))
    for norm, momentum in norms:
        norm.momentum = momentum
    there = dict(ours.named_buffers())
    for name, buffer in dense.named_buffers():
        there[name].copy_(buffer)
    ours.to(memory_format=FORMATS[form])
    for layer in layers:
        layer.compact()
    return {"ours": ours, "dense": dense}


def images(batch: int, side: int, form: str = "channels_last", dtype: str = "float32", device: str = "cpu") -> Tensor:
    return torch.randn(batch, 3, side, side).to(device, DTYPES[dtype], memory_format=FORMATS[form])


def waiting(run: Callable[[], object], device: str) -> Callable[[], object]:
    """`run` until the device has done it."""
    if device == "cpu":
        return run

    def wait() -> None:
        run()
        torch.cuda.synchronize()

    return wait


def step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A training step, the one that a user of PyTorch writes."""
    settings = {"lr": 1e-6, "momentum": 0.9}
    ours = any(isinstance(module, FactorizedLayer) for module in model.modules())
    parameters = list(model.parameters())
    optimizer = ff.optim.ProxSGD(parameters, **settings, l1=1e-6) if ours else torch.optim.SGD(parameters, **settings)
    model.train()

    def run() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def paths(model: nn.Module, x: Tensor) -> dict[str, int]:
    """How many layers take each path for x."""
    found: Counter[str] = Counter()

    def note(layer: FactorizedLayer, inputs: tuple[Tensor]) -> None:
        found[layer.path_for(inputs[0])] += 1

    handles = [layer.register_forward_pre_hook(note) for layer in ff.factorized_layers(model).values()]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return dict(found)


def timed(row: dict[str, Any], rounds: int, rivals: bool) -> dict:
    """Milliseconds of each side, dense / ours, and the paths."""
    name, op, density, side, form, dtype = (row[key] for key in ("shape", "op", "density", "side", "format", "dtype"))
    device = row["device"]
    sides, x = copy.deepcopy(pair(name, density, side, form)), images(row["batch"], side, form, dtype, device)
    exact = copy.deepcopy(sides["dense"]).to(device).eval()
    check({key: model.to(device, DTYPES[dtype]).eval() for key, model in sides.items()}, x[:2], (name, density), exact)
    if rivals:
        torch._dynamo.reset()
        sides |= {f"{key}_compiled": torch.compile(copy.deepcopy(model)) for key, model in sides.items()}
    y = torch.randint(CLASSES, (len(x),), device=device)
    training = op == "step"
    runs = {key: step(model, x, y) if training else evaluation(model, x) for key, model in sides.items()}
    runs = {key: waiting(run, device) for key, run in runs.items()}
    times = interleaved(runs, rounds, warmup=2, clock=row["clock"])
    with torch.set_grad_enabled(training):
        taken = paths(sides["ours"].train(training), x)
    ratio = statistics.median(a / b for a, b in zip(times["dense"], times["ours"], strict=True))
    return {key: statistics.median(t) for key, t in times.items()} | {"ratio": ratio, "paths": taken}


def memory(row: dict[str, Any]) -> dict[str, float]:
    """Peak memory of training steps of each side."""
    found = {}
    for which in ("ours", "dense"):
        asked = json.dumps([row, which])
        command = [sys.executable, "-m", __name__, asked]
        # What is freed goes back, so that what was made before the steps is not counted.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found[which] = float(json.loads(done.stdout.splitlines()[-1]))
    return found | {"ratio": found["dense"] / found["ours"]}


def _peak(row: dict[str, Any], which: str) -> float:
    torch.set_num_threads(row["threads"])
    before = _status("VmRSS")
    side, form, dtype, device = row["side"], row["format"], row["dtype"], row["device"]
    model = pair(row["shape"], row["density"], side, form)[which].to(device, DTYPES[dtype])
    x = images(row["batch"], side, form, dtype, device)
    run = step(model, x, torch.randint(CLASSES, (len(x),), device=device))
    run()
    run()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / (1 << 20)
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def run(
    quick: bool = False,
    only: str | None = None,
    sections: str | None = None,
    density: str | None = None,
    batch: int | None = None,
    side: int = SIDE,
    clock: str = "wall",
    rounds: int = 5,
    rivals: bool = True,
    form: str = "channels_last",
    dtype: str = "float32",
    device: str = "cpu",
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(network, its rows), and last ("all", the geometric means over the networks where there are several).

    only: names of networks, sections: of `SECTIONS`, density: fractions of μ from 0 (none) to 1 (dense); each separated
    by commas. batch: in place of each network's own. side: pixels. rivals: torch.compile of both sides, too. form: of
    `FORMATS`, dtype: of `DTYPES`, of networks and images. A row whose network cannot be measured so has a `reason`.
    Raises ValueError for what there is not.
    """
    for what, asked_for, known in (
        ("clock", clock, CLOCKS),
        ("format", form, FORMATS),
        ("dtype", dtype, DTYPES),
        ("device", device, DEVICES),
    ):
        if asked_for not in known:
            raise ValueError(f"{what}={asked_for!r}: must be one of {', '.join(known)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': PyTorch sees no CUDA device here")
    names = ("mobilenet_v3_small",) if quick else tuple(NETWORKS)
    names = names if only is None else tuple(only.split(","))
    asked = {name: about(name) for name in names}
    ops = SECTIONS if sections is None else tuple(sections.split(","))
    if unknown := sorted(set(ops) - set(SECTIONS)):
        raise ValueError(f"sections={unknown[0]!r}: must be of {', '.join(SECTIONS)}")
    densities = ((0.1,) if quick else DENSITIES) if density is None else _fractions(density)
    side, rounds, rivals = (min(side, 64), 2, False) if quick else (side, rounds, rivals)
    found: list[dict] = []
    for name, how in asked.items():
        images_at_once = batch or (2 if quick else how.batch)
        common = {"shape": name, "batch": images_at_once, "side": side, "rank": how.linear_rank, "dtype": dtype}
        common |= {"format": form, "threads": torch.get_num_threads(), "clock": clock, "device": device}
        rows = []
        for fraction, op in itertools.product(densities, ops):
            row = common | {"op": op, "density": fraction}
            try:
                row |= memory(row) if op == "memory" else timed(row, rounds, rivals)
            except (RuntimeError, ValueError, AssertionError, subprocess.CalledProcessError) as error:
                row["reason"] = f"{type(error).__name__}: {error}"
            rows.append(row)
        found += rows
        yield name, rows
    if len(asked) > 1:
        alike = {"threads": torch.get_num_threads(), "clock": clock, "side": side, "format": form, "dtype": dtype}
        alike["device"] = device
        cells = {(op, fraction): [] for op, fraction in itertools.product(ops, densities)}
        for row in found:
            if "ratio" in row:
                cells[row["op"], row["density"]].append(row)
        yield "all", [mean_of(rows, alike | {"op": op, "density": d}) for (op, d), rows in cells.items() if rows]


def _fractions(text: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= fraction <= 1 for fraction in found):
        raise ValueError(f"density={text!r}: must be numbers from 0 (no μ) to 1 (dense), separated by commas")
    return found


if __name__ == "__main__":
    print(json.dumps(_peak(*json.loads(sys.argv[1]))))
