"""Making the weight: rank1_weight, and the layer that makes it and convolves, against PyTorch, forward and backward.

    python -m bench.bench_weights --json FILE

Rows, for each convolution of ResNet-9 and both memory formats, batch 64, float32, medians in milliseconds:
layer   `ff.nn.FactorizedConv2d` (ours), `nn.Conv2d` (dense), the same parameterization in plain PyTorch, eager and
        compiled. ratio = ours / dense: what the parameterization costs.
weight  `ff.ops.rank1_weight` alone (ours), in plain PyTorch, eager and compiled. ratio = ours / compiled.
"""

import argparse
import copy
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fastfact as ff
from fastfact.bench.common import FORMATS, RESNET9, medians, name_of
from fastfact.experiment import provenance


def plain_weight(u, v, mu):
    return (u.unsqueeze(1).unsqueeze(1) * v.unsqueeze(-1).unsqueeze(-1)).sum(0) + mu


class Plain(nn.Module):
    """The parameterization as one writes it in PyTorch."""

    def __init__(self, layer: ff.nn.FactorizedConv2d):
        super().__init__()
        self.u, self.v, self.mu = (nn.Parameter(factor.detach().clone()) for factor in layer.factors().values())
        self.stride, self.padding = layer.stride, layer.padding

    def forward(self, x):
        return nn.functional.conv2d(x, plain_weight(self.u, self.v, self.mu), None, self.stride, self.padding)


def layer_sides(shape, fmt, batch):
    i, o, kernel, stride, side = shape
    torch.manual_seed(0)
    ours = ff.nn.FactorizedConv2d(i, o, kernel, stride, kernel // 2, bias=False)
    nn.init.normal_(ours.mu, std=0.01)
    dense, plain = ours.to_dense(), Plain(ours)
    models = {"ours": ours, "dense": dense, "eager": plain, "compiled": torch.compile(copy.deepcopy(plain))}
    x = torch.randn(batch, i, side, side).to(memory_format=FORMATS[fmt])
    x.requires_grad_(i > 3)
    for model in models.values():
        model.to(memory_format=FORMATS[fmt])
    grad = torch.randn_like(dense(x))

    def step(model):
        model(x).backward(grad)
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None

    truth = copy.deepcopy(dense).double()(x.double())
    bound = 2 * (dense(x) - truth).abs().max() + 1e-5 * truth.abs().max()
    for name, model in models.items():
        assert (model(x) - truth).abs().max() <= bound, (shape, fmt, name)
    return {name: lambda model=model: step(model) for name, model in models.items()}


def weight_sides(shape, fmt):
    i, o, kernel, *_ = shape
    torch.manual_seed(0)
    u, v = torch.randn(1, kernel, kernel, requires_grad=True), torch.randn(1, o, i, requires_grad=True)
    mu = torch.randn(o, i, kernel, kernel).to(memory_format=FORMATS[fmt]).requires_grad_()
    functions = {"ours": ff.ops.rank1_weight, "eager": plain_weight, "compiled": torch.compile(plain_weight)}
    grad = torch.randn_like(mu)
    leaves = (u, v, mu)
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


def run(rounds: int = 41, batch: int = 64) -> list[dict]:
    """The rows, then the geometric mean over the eight convolutions of each kind and format (shape "all")."""
    rows = []
    for kind, make, rival in (("layer", layer_sides, "dense"), ("weight", weight_sides, "compiled")):
        for fmt in FORMATS:
            common = {"op": f"{kind} forward + backward", "format": fmt, "dtype": "float32", "batch": batch}
            common |= {"threads": torch.get_num_threads()}
            found = []
            for number, shape in enumerate(RESNET9, 1):
                torch._dynamo.reset()
                sides = make(shape, fmt, batch) if kind == "layer" else make(shape, fmt)
                times = medians(sides, rounds if kind == "layer" else 10 * rounds, warmup=3)
                row = {"layer": number, "shape": name_of(shape), **times, "ratio": times["ours"] / times[rival]}
                found.append(common | row)
            mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in found))
            rows += [*found, common | {"shape": "all", "ratio": mean}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    rows = run(args.rounds)
    table = Table(title="milliseconds, medians; layer: ratio to dense, weight: ratio to compiled", title_justify="left")
    for column in ("op", "format", "shape", "ours", "dense", "eager", "compiled", "ratio"):
        table.add_column(column, justify="left" if column in ("op", "format", "shape") else "right")
    for row in rows:
        times = [f"{row[name]:.3f}" if name in row else "" for name in ("ours", "dense", "eager", "compiled")]
        table.add_row(row["op"], row["format"], row["shape"], *times, f"{row['ratio']:.3f}")
    Console(width=130).print(table)
    if args.json:
        command = shlex.join(["python", "-m", "bench.bench_weights", *sys.argv[1:]])
        content = {"command": command, **provenance(), "rows": rows}
        Path(args.json).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
