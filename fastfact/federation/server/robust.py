"""Aggregation that a few hostile clients cannot carry away: rules in place of the weighted mean of a mixing matrix.

A row w of the matrix says how much each of m uploads x_i counts. The rules below take it as the weights of a sample:
for equal weights they are those of their papers, clients of weight 0 do not exist for them.

`median`: coordinate-wise median (Yin, Chen, Ramchandran, Bartlett; ICML 2018, Definition 1).
`trimmed-mean`: coordinate-wise β-trimmed mean, the largest and the smallest β of the values left out (ibid., Definition
2), β = `hostile`.
`multi-krum`: the mean of the n − f clients whose n − f − 2 nearest others are nearest, f = ⌊`hostile` · n⌋ of the n in
the row (Blanchard, El Mhamdi, Guerraoui, Stainer; NeurIPS 2017, §3 and §5).

`clipped` bounds the norm of what one round changed in an upload: a client beyond is scaled down to it (Sun,
Kairouz, Suresh, McMahan; 2019, §3: Δ / max(1, ‖Δ‖ / M)), M fixed or a multiple of the median of the round's norms (as
FLAME; Nguyen et al., USENIX Security 2022, §4.3).
"""

import torch
from torch import Tensor

from fastfact.federation.server import mixing
from fastfact.federation.state import State, flattened

_COLUMNS = 1 << 14


def mix(matrix: Tensor, stacked: State, rule: str = "mean", hostile: float = 0.2) -> State:
    """Each row [m] of `matrix` [k, m], row-stochastic, applied to the uploads x [m, …] by `rule`: [k, …] each, in the
    dtype of x, integers rounded. hostile: the fraction of clients the rule is to bear, below one half.

    A matrix that is one row expanded (stride 0) is applied once.
    """
    if rule == "mean" or not stacked:
        return mixing.mix(matrix, stacked)
    once = len(matrix) > 1 and matrix.stride(0) == 0
    rows = matrix[:1] if once else matrix
    if rule == "multi-krum":
        mixed = mixing.mix(krum_weights(rows, stacked, hostile), stacked)
    else:
        mixed = {name: _by_coordinate(rows, x, rule, hostile) for name, x in stacked.items()}
    return {name: x.expand(len(matrix), *x.shape[1:]) for name, x in mixed.items()} if once else mixed


def _by_coordinate(matrix: Tensor, x: Tensor, rule: str, hostile: float) -> Tensor:
    flat = flattened(x)
    matrix = matrix.to(flat.device, torch.float64)
    out = torch.empty(len(matrix), flat.shape[1], dtype=torch.float64, device=flat.device)
    for begin in range(0, flat.shape[1], _COLUMNS):
        values, order = flat[:, begin : begin + _COLUMNS].double().sort(dim=0)
        for row, weights in enumerate(matrix):
            share = weights[order]
            upper = share.cumsum(0)
            if rule == "median":
                out[row, begin : begin + _COLUMNS] = _median(values, upper)
            else:
                # What of each value's share of the weight lies between the trimmed ends.
                kept = upper.clamp(hostile, 1 - hostile) - (upper - share).clamp(hostile, 1 - hostile)
                out[row, begin : begin + _COLUMNS] = torch.where(kept > 0, kept * values, 0).sum(0) / kept.sum(0)
    if not x.is_floating_point():
        out = out.round()
    return out.to(x.dtype).reshape(len(matrix), *x.shape[1:])


def _median(values: Tensor, upper: Tensor) -> Tensor:
    """values [m, n] ascending, upper [m, n] the weight up to each: the middle one, or the mean of the two around it."""
    half = upper[-1:] / 2
    slack = 1e-12
    low = (upper < half - slack).sum(0, keepdim=True)
    high = (upper <= half + slack).sum(0, keepdim=True)
    return ((values.gather(0, low) + values.gather(0, high)) / 2)[0]


def krum_weights(matrix: Tensor, stacked: State, hostile: float) -> Tensor:
    """The rows of `matrix` on the clients that multi-Krum selects in each, summing to 1, float64 [k, m].

    A row with fewer than 2 f + 3 clients bears fewer hostile ones: (n − 3) / 2.
    """
    squares = sum(_squared_distances(x) for x in stacked.values() if x.is_floating_point())
    chosen = torch.zeros(matrix.shape, dtype=torch.float64)
    for row, weights in enumerate(matrix.double().cpu()):
        there = (weights > 0).nonzero().flatten()
        n = len(there)
        f = min(int(hostile * n), max(0, (n - 3) // 2))
        if f:
            near = squares[there][:, there].sort(dim=1).values[:, 1 : n - f - 1]
            there = there[near.sum(1).sort(stable=True).indices[: n - f]]
        chosen[row, there] = weights[there]
    return (chosen / chosen.sum(1, keepdim=True)).to(matrix.device)


def _squared_distances(x: Tensor) -> Tensor:
    flat = flattened(x).double()
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").square().cpu()


def norms(sent: State, start: State) -> Tensor:
    """‖sent − start‖₂ of each client over the floating tensors in `start` [k, …], float64 [k]."""
    squares = [
        (flattened(sent[name]).double() - flattened(tensor).double()).square().sum(1).cpu()
        for name, tensor in start.items()
    ]
    return torch.stack(squares).sum(0).sqrt()


def clipped(sent: State, start: State, norms: Tensor, bound: float) -> State:
    """The uploads with what they changed of `start` scaled down to the norm `bound` where it is larger."""
    factor = torch.where(norms > bound, bound / norms, 1.0)
    rows = (factor < 1).nonzero().flatten()
    clipped = dict(sent)
    for name, tensor in start.items() if len(rows) else ():
        clipped[name] = sent[name].clone()
        scale = factor[rows].to(tensor.device, torch.float64).view(-1, *[1] * (tensor.dim() - 1))
        at = rows.to(tensor.device)
        change = (sent[name][at].double() - tensor[at].double()) * scale
        clipped[name][at] = (tensor[at].double() + change).to(tensor.dtype)
    return clipped
