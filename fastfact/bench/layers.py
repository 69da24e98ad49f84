"""The factored layers against the dense convolution and other rivals, on the eight convolutions of ResNet-9.

Every side of a row runs in turn, so that noise meets all of them alike; a row holds medians in milliseconds and
ratio = dense / ours. Correctness is asserted before anything is timed.
"""

import math
import statistics

import torch
import torch.nn.functional as F

from fastfact import ops
from fastfact.bench.common import FORMATS, RESNET9, medians, name_of


def layer(shape, density: float, fmt: str, batch: int = 64, seed: int = 0):
    """Inputs of one row: x, u, v, values, index and the dense weight of the same function."""
    i, o, kernel, _, side = shape
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, i, side, side, generator=g).to(memory_format=FORMATS[fmt])
    u, v = torch.randn(1, kernel, kernel, generator=g), torch.randn(1, o, i, generator=g) / (i * kernel) ** 0.5
    count = o * i * kernel * kernel
    index = torch.randperm(count, generator=g)[: round(density * count)].sort().values.int()
    values = torch.randn(len(index), generator=g) / (i * kernel) ** 0.5
    mu = torch.zeros(count)
    mu[index.long()] = values
    weight = torch.einsum("rhw,roi->oihw", u, v) + mu.reshape(o, i, kernel, kernel)
    return x, u, v, values, index, weight.to(memory_format=FORMATS[fmt])


def forward_sides(shape, density: float, fmt: str, rivals: bool) -> dict:
    kernel, stride = shape[2:4]
    x, u, v, values, index, weight = layer(shape, density, fmt)
    how = {"stride": stride, "padding": kernel // 2}
    mu = (values, index) if density else (None, None)

    def ours():
        return ops.factored_conv2d(x, u, v, *mu, size=weight.shape, **how)

    def eager():
        return F.conv2d(x, torch.einsum("rhw,roi->oihw", u, v) + mu_dense, **how)

    mu_dense = (weight - torch.einsum("rhw,roi->oihw", u, v)).contiguous()
    truth = F.conv2d(x.double(), weight.double(), **how)
    plain_error = (F.conv2d(x, weight, **how) - truth).abs().max()
    assert (ours() - truth).abs().max() <= 2 * plain_error + 1e-5 * truth.abs().max(), (shape, density, fmt)
    sides = {"ours": ours, "dense": lambda: F.conv2d(x, weight, **how)}
    if rivals:
        sides["eager"] = eager
        sides["compile"] = torch.compile(eager)
        half, half_weight = x.bfloat16(), weight.bfloat16()
        sides["dense_bf16"] = lambda: F.conv2d(half, half_weight, **how)
        csr = weight.flatten(1).to_sparse_csr()
        sides["csr"] = lambda: csr @ F.unfold(x, kernel, **how).transpose(0, 1).flatten(1)
    return sides


def training_sides(shape, density: float, fmt: str, rivals: bool) -> dict:
    i, _, kernel, stride, _ = shape
    x, u, v, values, index, weight = layer(shape, density, fmt)
    how = {"stride": stride, "padding": kernel // 2}
    leaves = [t.requires_grad_() for t in ((u, v, values) if density else (u, v))]
    mu = (values, index) if density else (None, None)
    x.requires_grad_(i > 3)
    weight.requires_grad_()
    grad = torch.randn_like(F.conv2d(x.detach(), weight.detach(), **how))
    inputs = [x] if i > 3 else []

    def ours():
        return torch.autograd.grad(ops.factored_conv2d(x, u, v, *mu, size=weight.shape, **how), inputs + leaves, grad)

    def dense():
        return torch.autograd.grad(F.conv2d(x, weight, **how), [*inputs, weight], grad)

    *dx, dw = dense()
    got = ours()
    expected = [*dx, torch.einsum("oihw,roi->rhw", dw, v), torch.einsum("oihw,rhw->roi", dw, u)]
    if density:
        expected.append(dw.flatten()[index.long()] if dw.is_contiguous() else dw.contiguous().flatten()[index.long()])
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max(), (shape, density, fmt)
    sides = {"ours": ours, "dense": dense}
    if rivals:
        mu_dense = (weight - torch.einsum("rhw,roi->oihw", u, v)).detach().requires_grad_()

        def eager():
            w = torch.einsum("rhw,roi->oihw", u, v) + mu_dense
            return torch.autograd.grad(F.conv2d(x, w, **how), [*inputs, u, v, mu_dense], grad)

        sides["eager"] = eager
    return sides


def run(quick: bool = False) -> list[dict]:
    """The rows: op, shape, density, dtype, memory format, threads, batch, ours, each rival (ms), ratio; and one row for
    each geometric mean over the eight shapes (shape "all"). quick: two shapes, ours and the dense layer only."""
    shapes, densities = (RESNET9[:2], (0.1,)) if quick else (RESNET9, (0.0, 0.05, 0.1, 0.2, 0.3))
    rows = []
    for step in ("forward", "training"):
        for fmt in FORMATS:
            for density in densities:
                common = {"op": f"factored_conv2d {step}", "density": density, "dtype": "float32", "format": fmt}
                common |= {"threads": torch.get_num_threads(), "batch": 64}
                found, measured = [], {}
                for shape in shapes:
                    if shape not in measured:
                        make = forward_sides if step == "forward" else training_sides
                        with torch.no_grad() if step == "forward" else torch.enable_grad():
                            measured[shape] = medians(make(shape, density, fmt, not quick), 3 if quick else 11)
                    times = measured[shape]
                    found.append(common | {"shape": name_of(shape), **times, "ratio": times["dense"] / times["ours"]})
                mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in found))
                rows += [*found, common | {"shape": "all", "ratio": mean}]
    return rows
