"""The factored layers against the dense layer and other rivals.

Every side of a row runs in turn, so that noise meets all of them alike: `ours` and the rivals are medians in
milliseconds, `ratio` is the median over the turns of rival / ours, the rival being the dense layer unless the row says
`against`. Correctness is asserted before anything is timed. `path` is the one the layer took. The command keeps freed
memory in the process, as training does: page faults would be most of some rows.

reconstruct  the layer with dense μ, forward and backward, over the eight convolutions of ResNet-9
weight       `ff.ops.rank1_weight` alone, forward and backward, against torch.compile of the same formula
forward, training   the layer with compact μ (density 0: without μ), over the same eight; forward in evaluation mode
bfloat16     forward again, ours and the dense layer in bfloat16
grid         the same over convolutions of every kind, and batches of 1, 8 and 64, against the dense layer alone
memory       what a layer and its training state hold, in megabytes
model        ResNet-9 on 32×32 images, evaluation and training step
"""

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact import public as ff
from fastfact.bench.common import CLOCKS, FORMATS, RESNET9, interleaved, name_of
from fastfact.models import build

Sides = dict[str, Callable[[], object]]
DENSITIES = (0.0, 0.05, 0.1, 0.2, 0.3)

# in, out, kernel, stride, groups, image side
GRID = [
    (3, 64, 3, 1, 1, 32),
    (3, 32, 5, 1, 1, 32),
    (3, 64, 5, 2, 1, 32),
    (32, 32, 3, 1, 1, 32),
    (64, 64, 3, 1, 1, 16),
    (128, 128, 3, 1, 1, 16),
    (256, 256, 3, 1, 1, 8),
    (512, 512, 3, 1, 1, 4),
    (32, 64, 3, 2, 1, 32),
    (64, 128, 3, 2, 1, 16),
    (64, 128, 5, 2, 1, 16),
    (64, 64, 5, 1, 1, 16),
    (32, 32, 5, 1, 1, 16),
    (64, 64, 1, 1, 1, 16),
    (128, 256, 1, 1, 1, 8),
    (256, 64, 1, 1, 1, 8),
    (64, 128, 1, 2, 1, 16),
    (64, 64, 3, 1, 4, 16),
    (128, 128, 3, 2, 8, 16),
    (64, 64, 3, 1, 64, 16),
    (64, 65, 3, 1, 1, 15),
]
GRID_DENSITIES = (0.0, 0.1, 0.3, 1.0)
BATCHES = (1, 8, 64)


def plain_weight(u: Tensor, v: Tensor, mu: Tensor | None) -> Tensor:
    """u ⊗ v + μ as one writes it in PyTorch."""
    product = (u.unsqueeze(1).unsqueeze(1) * v.unsqueeze(-1).unsqueeze(-1)).sum(0)
    return product if mu is None else product + mu


class Plain(nn.Module):
    """The parameterization as one writes it in PyTorch."""

    def __init__(self, layer: ff.nn.FactorizedConv2d):
        super().__init__()
        self.u, self.v = (nn.Parameter(factor.detach().clone()) for factor in (layer.u, layer.v))
        self.mu = nn.Parameter(layer.mu.detach().clone()) if "mu" in layer.factors() else None
        self.how = (layer.stride, layer.padding, layer.dilation, layer.groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, plain_weight(self.u, self.v, self.mu), None, *self.how)


class Csr(nn.Module):
    """The convolution as torch's sparse matrix times the unfolded input."""

    def __init__(self, dense: nn.Conv2d):
        super().__init__()
        self.weight = dense.weight.detach().flatten(1).to_sparse_csr()
        self.kernel, self.how = dense.kernel_size, {"stride": dense.stride, "padding": dense.padding}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ F.unfold(x, self.kernel, **self.how).transpose(0, 1).flatten(1)


def layers(geometry, density: float, fmt: str) -> tuple[ff.nn.FactorizedConv2d, nn.Conv2d, Plain]:
    """Ours, the dense layer of the same function, and the same parameterization in PyTorch.

    density: 0 is a layer without μ, 1 one with dense μ, anything between one with compact μ.
    """
    i, o, kernel, stride, groups, _ = geometry
    torch.manual_seed(0)
    spec = ff.Rank1(sparse=density > 0)
    ours = ff.nn.FactorizedConv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False, spec=spec)
    if density:
        nn.init.normal_(ours.mu, std=0.5 * ours.v.std().item())
        ours.prune_(density)
    dense, plain = ours.to_dense(), Plain(ours)
    for layer in (ours, dense, plain):
        layer.to(memory_format=FORMATS[fmt])
    if 0 < density < 1:
        ours.compact()
    return ours, dense, plain


def images(geometry, batch: int, fmt: str) -> Tensor:
    i, *_, side = geometry
    return torch.randn(batch, i, side, side).to(memory_format=FORMATS[fmt])


def check(sides: dict[str, nn.Module], x: Tensor, what: object, exact: nn.Module | None = None) -> None:
    """Raise AssertionError where a side's error is more than twice that of the dense layer in the same precision.

    exact: what all sides were rounded from; the dense layer, if it is not given.
    """
    dense = sides["dense"]
    with torch.no_grad():
        truth = copy.deepcopy(dense if exact is None else exact).double()(x.double())
        bound = 2 * (dense(x) - truth).abs().max() + 1e-5 * truth.abs().max()
        for name, side in sides.items():
            assert (side(x) - truth).abs().max() <= bound, (what, name)


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward; the gradients are dropped."""
    parameters = list(model.parameters())

    def run() -> None:
        model(x).backward(grad)
        for parameter in parameters:
            parameter.grad = None
        x.grad = None

    return run


def evaluation(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward in evaluation mode."""
    model.eval()
    return torch.no_grad()(lambda: model(x))


def convolution(
    geometry,
    density: float,
    fmt: str,
    batch: int,
    training: bool,
    rivals: bool,
    path: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> tuple[Sides, dict[str, str]]:
    """The sides of a row, and which path ours takes."""
    ours, exact, plain = layers(geometry, density, fmt)
    dense = copy.deepcopy(exact).to(dtype)
    ours.to(dtype).path = path
    x = images(geometry, batch, fmt).to(dtype)
    models: dict[str, nn.Module] = {"ours": ours, "dense": dense}
    if rivals:
        torch._dynamo.reset()
        models |= {"eager": plain, "compile": torch.compile(copy.deepcopy(plain))}
    check(models, x[:4], (geometry, density, fmt, batch), exact)
    if training:
        x.requires_grad_(geometry[0] > 3)
        grad = torch.randn_like(dense(x.detach()))
        taken = ours.path_for(x)
        return {name: step(model, x, grad) for name, model in models.items()}, {"path": taken}
    sides = {name: evaluation(model, x) for name, model in models.items()}
    if rivals:
        sides["dense_bf16"] = evaluation(copy.deepcopy(dense).bfloat16(), x.bfloat16())
        sides["csr"] = evaluation(Csr(dense), x)
    with torch.no_grad():
        return sides, {"path": ours.path_for(x)}


def weight(shape, fmt: str, rivals: bool) -> Sides:
    """`rank1_weight` alone, forward and backward."""
    i, o, kernel, *_ = shape
    torch.manual_seed(0)
    torch._dynamo.reset()
    u, v = torch.randn(1, kernel, kernel, requires_grad=True), torch.randn(1, o, i, requires_grad=True)
    mu = torch.randn(o, i, kernel, kernel).to(memory_format=FORMATS[fmt]).requires_grad_()
    functions = {"ours": ff.ops.rank1_weight, "eager": plain_weight}
    if rivals:
        functions["compile"] = torch.compile(plain_weight)
    grad, leaves = torch.randn_like(mu), (u, v, mu)
    truth = torch.autograd.grad(plain_weight(*(t.double() for t in leaves)), leaves, grad.double())
    plain = torch.autograd.grad(plain_weight(*leaves), leaves, grad)
    for name, function in functions.items():
        got = torch.autograd.grad(function(*leaves), leaves, grad)
        for a, b, c in zip(got, truth, plain, strict=True):
            assert (a - b).abs().max() <= 2 * (c - b).abs().max() + 1e-5 * b.abs().max(), (shape, fmt, name)
    return {
        name: lambda function=function: torch.autograd.grad(function(*leaves), leaves, grad)
        for name, function in functions.items()
    }


def held(layer: nn.Module, x: Tensor) -> int:
    """Bytes of a layer's tensors, their gradients and the state of its optimizer, after a training step."""
    optimizer = ff.optim.ProxSGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(x).sum().backward()
    optimizer.step()
    tensors = [*layer.parameters(), *layer.buffers(), *(p.grad for p in layer.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def models(density: float, fmt: str) -> dict[str, nn.Module]:
    """ResNet-9 with factorized layers, the dense one of the same function, and that one compiled."""
    torch.manual_seed(0)
    ours = ff.factorize(build("resnet9", (3, 32, 32), 10), ff.Rank1(sparse=density > 0))
    for layer in ff.factorized_layers(ours).values():
        if density:
            nn.init.normal_(layer.mu, std=0.5 * layer.v.std().item())
            layer.prune_(density)
    dense = ff.densify(copy.deepcopy(ours))
    for model in (ours, dense):
        model.to(memory_format=FORMATS[fmt])
    if 0 < density < 1:
        for layer in ff.factorized_layers(ours).values():
            layer.compact()
    return {"ours": ours, "dense": dense}


def whole_model(density: float, fmt: str, batch: int, training: bool, rivals: bool) -> Sides:
    """ResNet-9: evaluation in eval mode, or a training step of ProxSGD."""
    sides, x = models(density, fmt), torch.randn(batch, 3, 32, 32).to(memory_format=FORMATS[fmt])
    if rivals:
        torch._dynamo.reset()
        sides["compile"] = torch.compile(copy.deepcopy(sides["dense"]))
    if not training:
        if rivals:
            sides["dense_bf16"] = copy.deepcopy(sides["dense"]).bfloat16()
        inputs = {name: x.bfloat16() if name == "dense_bf16" else x for name in sides}
        return {name: evaluation(model, inputs[name]) for name, model in sides.items()}
    y = torch.randint(10, (batch,))

    def training_step(model: nn.Module) -> Callable[[], None]:
        optimizer = ff.optim.ProxSGD(model.parameters(), lr=1e-3, momentum=0.9, l1=1e-5)

        def run() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        return run

    return {name: training_step(model.train()) for name, model in sides.items()}


def row(common: dict, sides: Sides, rounds: int, against: str = "dense", **more) -> dict:
    times = interleaved(sides, rounds, clock=common["clock"])
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times[against], times["ours"], strict=True))
    return common | medians | ({} if against == "dense" else {"against": against}) | {"ratio": ratio} | more


def mean_of(rows: list[dict], common: dict) -> dict:
    """The geometric mean of the ratios, as a row of shape "all"."""
    ratio = math.exp(statistics.fmean(math.log(found["ratio"]) for found in rows))
    return common | {"shape": f"all {len(rows)}", "ratio": ratio}


def measure(quick: bool, sections: tuple[str, ...], clock: str, rounds: int, rivals: bool) -> Iterator[dict]:
    rounds, shapes = (2, RESNET9[5:7]) if quick else (rounds, RESNET9)
    rivals = rivals and not quick
    batch, formats = (4, ("channels_last",)) if quick else (64, tuple(FORMATS))
    densities, rival = (0.1,) if quick else DENSITIES, "compile" if rivals else "eager"
    base = {"dtype": "float32", "threads": torch.get_num_threads(), "clock": clock}

    def over_shapes(op: str, fmt: str, density: float, make: Callable, dtype="float32", **settings) -> Iterator[dict]:
        common = base | {"dtype": dtype, "op": op, "format": fmt, "density": density, "batch": batch}
        found: list[dict] = []
        for shape in shapes:
            same = next((r for r in found if r["shape"] == name_of(shape)), None)
            if same is None:
                sides, more = make(shape, fmt, density)
                same = row(common | {"shape": name_of(shape)}, sides, rounds, **settings, **more)
            found.append(same)
        yield from found
        yield mean_of(found, common)

    def layer(shape, fmt, density, training=False, path="auto", dtype=torch.float32):
        i, o, kernel, stride, side = shape
        others = rivals and dtype == torch.float32
        return convolution((i, o, kernel, stride, 1, side), density, fmt, batch, training, others, path, dtype)

    for fmt in formats:
        if "reconstruct" in sections:
            yield from over_shapes(
                "reconstruct", fmt, 1.0, lambda *args: layer(*args, training=True, path="reconstruct")
            )
        if "weight" in sections:
            yield from over_shapes("weight", fmt, 1.0, lambda s, f, d: (weight(s, f, rivals), {}), against=rival)
        for density in densities if "forward" in sections else ():
            yield from over_shapes("forward", fmt, density, layer)
        for density in densities if "training" in sections else ():
            yield from over_shapes("training", fmt, density, lambda *args: layer(*args, training=True))
        for density in densities if "bfloat16" in sections else ():
            made = functools.partial(layer, dtype=torch.bfloat16)
            yield from over_shapes("bfloat16", fmt, density, made, dtype="bfloat16")
    if "grid" in sections:
        yield from grid(base, quick, rounds)
    if "memory" in sections:
        yield from memory(base, quick)
    for fmt in formats if "model" in sections else ():
        for density in (0.1,) if quick else (0.0, 0.1, 0.2, 1.0):
            for training in (False, True):
                common = base | {"op": "model training" if training else "model evaluation", "shape": "ResNet-9"}
                sides = whole_model(density, fmt, batch, training, rivals)
                yield row(common | {"format": fmt, "density": density, "batch": batch}, sides, rounds)


def grid(base: dict, quick: bool, rounds: int) -> Iterator[dict]:
    geometries, batches = (GRID[-1:], (8,)) if quick else (GRID, BATCHES)
    for training in (False,) if quick else (False, True):
        for fmt in ("channels_last",) if quick else FORMATS:
            for batch in batches:
                for geometry in geometries:
                    i, o, kernel, stride, groups, side = geometry
                    shape = name_of((i, o, kernel, stride, side)) + (f" g{groups}" if groups > 1 else "")
                    for density in (0.1,) if quick else GRID_DENSITIES:
                        common = base | {"op": "grid training" if training else "grid forward", "shape": shape}
                        common |= {"format": fmt, "density": density, "batch": batch}
                        sides, more = convolution(geometry, density, fmt, batch, training, rivals=False)
                        yield row(common, sides, rounds, **more)


def memory(base: dict, quick: bool) -> Iterator[dict]:
    for shape in RESNET9[5:6] if quick else dict.fromkeys(RESNET9):
        i, o, kernel, stride, side = shape
        for density in (0.1,) if quick else DENSITIES:
            ours, dense, _ = layers((i, o, kernel, stride, 1, side), density, "nchw")
            x = images((i, side), 2, "nchw")
            sizes = {"ours": held(ours, x) / 1e6, "dense": held(dense, x) / 1e6}
            common = base | {"op": "memory", "shape": name_of(shape), "density": density, "batch": 2}
            yield common | sizes | {"ratio": sizes["dense"] / sizes["ours"]}


SECTIONS = ("reconstruct", "weight", "forward", "training", "bfloat16", "grid", "memory", "model")


def run(
    quick: bool = False,
    only: str | None = None,
    clock: str = "wall",
    rounds: int = 11,
    rivals: bool = True,
    on_row: Callable[[dict], None] | None = None,
) -> list[dict]:
    """The rows, each a flat dict: op, shape, density, dtype, format, threads, clock, batch, ours, each rival, ratio,
    path; and one of shape "all n" for each geometric mean over the convolutions of ResNet-9.

    rivals: those but the dense layer, too. only: sections, separated by commas. clock: see `common.interleaved`.
    on_row is called with each row as it is measured. Raises ValueError for an unknown section or clock.
    """
    if clock not in CLOCKS:
        raise ValueError(f"clock={clock!r}: must be one of {', '.join(CLOCKS)}")
    sections = SECTIONS if only is None else tuple(only.split(","))
    if unknown := sorted(set(sections) - set(SECTIONS)):
        raise ValueError(f"only={unknown[0]!r}: must be of {', '.join(SECTIONS)}")
    rows = []
    for found in measure(quick, sections, clock, rounds, rivals):
        rows.append(found)
        if on_row:
            on_row(found)
    return rows
