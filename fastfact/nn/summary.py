"""What a model holds: numbers and bytes, layer by layer, and how much of it is factorized."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from fastfact.nn.convert import counted, targets, tied_parameters, why_not
from fastfact.nn.layer import FactorizedLayer


@dataclass(frozen=True)
class Row:
    """The parameters of one module: its `path` and class, how its weight is made (`form`: a spec, "dense", or, where
    `ff.factorize` cannot convert it, why), how many numbers it holds, how many of them train, their bytes with those of
    the positions of compact μ, the numbers of the dense layer, and the density of μ (None without one)."""

    path: str
    kind: str
    form: str
    parameters: int
    trained: int
    bytes: int
    dense: int
    density: float | None


@dataclass(frozen=True)
class Summary:
    """What `summary` gives. `print` shows it as a table."""

    rows: tuple[Row, ...]
    parameters: int
    """Numbers in all parameters, each counted once."""
    trained: int
    bytes: int

    @property
    def dense(self) -> int:
        """Numbers of the model with every factorized layer made dense."""
        return self.parameters + sum(row.dense - row.parameters for row in self.rows)

    def __str__(self) -> str:
        head = ("layer", "class", "parameters", "trained", "of dense", "bytes", "density of μ", "form")
        table = [head]
        for row in self.rows:
            share = f"{row.parameters / row.dense:.1%}" if row.dense else "–"
            density = "–" if row.density is None or math.isnan(row.density) else f"{row.density:.1%}"
            numbers = (f"{row.parameters:,}", f"{row.trained:,}", share, f"{row.bytes:,}", density)
            table.append((row.path or "(the model itself)", row.kind, *numbers, row.form))
        share = f"{self.parameters / self.dense:.1%}" if self.dense else "–"
        table.append(("in all", "", f"{self.parameters:,}", f"{self.trained:,}", share, f"{self.bytes:,}", "", ""))
        widths = [max(len(line[n]) for line in table) for n in range(len(head))]
        numeric = range(2, 7)
        lines = []
        for line in table:
            cells = zip(line, widths, strict=True)
            lines.append(
                "  ".join(c.rjust(w) if n in numeric else c.ljust(w) for n, (c, w) in enumerate(cells)).rstrip()
            )
        return "\n".join(lines)


def summary(model: nn.Module) -> Summary:
    """Parameters of `model` in all and by layer: how many, how many train, bytes, against the dense layer.

    A module that stands in several places, or a parameter that several modules hold, is counted once, where it comes
    first.
    """
    tied, seen, rows = tied_parameters(model), set(), []
    reasons = {}
    for target in targets(model):
        why = why_not(target, tied)
        reasons[id(target.module)] = f"dense ({why})" if why else "dense"
    for path, module in model.named_modules():
        own = {p for p in module._parameters.values() if p is not None and id(p) not in seen}
        own = {p for p in own if not isinstance(p, nn.UninitializedParameter)}
        if not own:
            continue
        seen |= {id(p) for p in own}
        numbers, stored = sum(p.numel() for p in own), sum(p.numel() * p.element_size() for p in own)
        dense, density, form = numbers, None, reasons.get(id(module), "–")
        if isinstance(module, FactorizedLayer):
            form = str(module.spec)
            dense = torch.Size(module.size).numel() + (0 if module.bias is None else module.bias.numel())
            if module.spec.sparse_factor in module._names:
                density = module.density
            if module.is_compact:
                stored += module.mu_index.numel() * module.mu_index.element_size()
        trained = sum(p.numel() for p in own if p.requires_grad)
        rows.append(Row(path, type(module).__name__, form, numbers, trained, stored, dense, density))
    numbers, stored = counted(model)
    return Summary(tuple(rows), numbers, sum(row.trained for row in rows), stored)
