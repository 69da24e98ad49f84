"""The factored layers against the dense convolution and other rivals, on the eight convolutions of ResNet-9.

    python -m bench.bench_layers --json FILE [--quick]

Every side of a row runs in turn, so that noise meets all of them alike; a row holds medians in milliseconds and
ratio = dense / ours. Correctness is asserted before anything is timed.
"""

import argparse
import json
import math
import platform
import statistics
import time

import torch
import torch.nn.functional as F

from fastfact import ops

# in, out, kernel, stride, image side: conv1 … conv8 at batch 64
SHAPES = [
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


def medians(sides: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each side, run in turn."""
    times = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


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


def run(
    densities=(0.0, 0.05, 0.1, 0.2, 0.3),
    formats=tuple(FORMATS),
    steps=("forward", "training"),
    rounds: int = 11,
    rivals: bool = True,
) -> list[dict]:
    """The rows: op, shape, density, dtype, memory format, threads, batch, ours, each rival (ms), ratio; and one row for
    each geometric mean over the eight shapes (shape "all")."""
    rows = []
    for step in steps:
        for fmt in formats:
            for density in densities:
                common = {"op": f"factored_conv2d {step}", "density": density, "dtype": "float32", "format": fmt}
                common |= {"threads": torch.get_num_threads(), "batch": 64}
                found, measured = [], {}
                for shape in SHAPES:
                    if shape not in measured:
                        make = forward_sides if step == "forward" else training_sides
                        with torch.no_grad() if step == "forward" else torch.enable_grad():
                            measured[shape] = medians(make(shape, density, fmt, rivals), rounds)
                    times = measured[shape]
                    found.append(common | {"shape": shape, **times, "ratio": times["dense"] / times["ours"]})
                mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in found))
                rows += [*found, common | {"shape": "all", "ratio": mean}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="ours and the dense layer only, fewer rounds")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = run(rounds=5, rivals=False) if args.quick else run()
    for row in rows:
        shape = (
            "geometric mean"
            if row["shape"] == "all"
            else "{}→{} {}×{} s{} @{}".format(*row["shape"][:2], row["shape"][2], *row["shape"][2:])
        )
        times = "  ".join(
            f"{k} {row[k]:.2f}" for k in ("ours", "dense", "eager", "compile", "dense_bf16", "csr") if k in row
        )
        print(f"{row['op']:26} {row['format']:13} {row['density']:.2f}  {shape:22} ×{row['ratio']:.2f}  {times}")
    if args.json:
        machine = {
            "cpu": platform.processor(),
            "torch": torch.__version__,
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
        with open(args.json, "w") as file:
            json.dump({"machine": machine, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
