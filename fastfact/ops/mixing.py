"""The server's step: mixing weights from the similarity of the clients' keys, weighted sums of their uploads, and the
sketches that stand for long keys. Not differentiable.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastfact.base.formats import FLOATING, unit
from fastfact.ops.backends import implementation
from fastfact.ops.common import check_size, check_tensor, number, sequence, whole

# Narrower uploads are multiplied together, as one matrix.
_WIDE = 1024
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@torch.no_grad()
def similarity_mix(
    v: Tensor,
    uploads: Tensor | Sequence[Tensor],
    epsilon: float,
    tau: float = -1.0,
    min_matches: int = 1,
    valid: Tensor | None = None,
    rows: range | None = None,
) -> Tensor | list[Tensor]:
    """Σ_i w_ki x_i, w_ki = exp(ε σ_ki) / Σ_j exp(ε σ_kj) over the clients that k matches (Factorized-FL eq. 4 and 5;
    SimFed eq. 8), for each x of `uploads`, without a matrix of all pairs: memory grows with the number of clients.

    v: the keys [m, …] of m clients, float or int8 (see `srht`); σ_ki is their cosine, σ_kk = 1 whatever the key.
    uploads: one tensor [m, …] or several, of any widths and dtypes. Matched: σ_ki ≥ τ, and k itself. Fewer than
    `min_matches` matched (k counts) are filled up with the most similar (the official code's `minimum_aggr`), ties by
    the lower index. At the ends of τ's interval rounding decides nothing, see `threshold`. valid: bool [m]; the others
    are matched by no client but themselves, and what stands in their uploads does not matter to anybody else. rows:
    the clients whose mix is wanted, by default all.

    Returns [len(rows), …] for each upload in its dtype, integers rounded to the nearest: one tensor, or a list if
    `uploads` is a list. A key of norm 0 has cosine 0 with all others, one that is not finite matches itself only. Keys
    of half precision are compared in float32. Computed in float64 if a key or an upload is float64 or integer (int8
    keys excepted: their products are exact), else in float32: the weights are then good to about 1e-6 ε.

    Raises ValueError where the first axes differ or a setting is out of range.
    """
    op = "similarity_mix"
    single = isinstance(uploads, Tensor)
    stacked = [uploads] if single else sequence(op, "uploads", uploads, "tensors")
    check_tensor(op, "v", v, (*FLOATING, torch.int8))
    if v.dim() == 0:
        raise ValueError(f"{op}: v has shape [], must be [m, …]")
    m = len(v)
    rows = range(m) if rows is None else rows
    epsilon, tau = number(op, "epsilon", epsilon, 0), number(op, "tau", tau, -1, 1)
    min_matches = whole(op, "min_matches", min_matches, 1)
    _check(op, v, stacked, valid, rows)
    compute = _compute(v, stacked)
    keys = _rows(v)
    if keys.dtype != torch.int8 or compute == torch.float64:
        keys = keys.to(compute)
    groups, matrices = _matrices(stacked, compute, valid, v.new_ones(m, 1, dtype=compute))
    sums, counts = implementation("similarity_sums")(
        keys,
        matrices,
        valid,
        rows.start,
        len(rows),
        epsilon,
        # Products of int8 are exact: what is rounded is their scale.
        threshold(tau, compute, 1 if keys.dtype == torch.int8 else keys.shape[1]),
        min_matches > 1,
    )
    if min_matches > 1 and not v.is_meta:
        short = (counts + 1 < min(min_matches, m)).nonzero().flatten()
        for some in short.split(512) if len(short) else ():
            _fill(sums, keys, matrices, some, rows.start, epsilon, min_matches, valid)
    total = 1 + sums[0][:, :1]
    mixed: list[Tensor] = [None] * len(stacked)
    for group, (names, out) in enumerate(zip(groups, sums, strict=True)):
        at = int(group == 0)
        for t in names:
            own = _rows(stacked[t])[rows.start : rows.stop]
            mixed[t] = (out[:, at : at + own.shape[1]] + own).div_(total)
            at += own.shape[1]
    mixed = [_as(out, x) for out, x in zip(mixed, stacked, strict=True)]
    return mixed[0] if single else mixed


def threshold(tau: float, dtype: torch.dtype, numbers: int = 1 << 20) -> float:
    """What a cosine of keys of so many `numbers` that was computed in `dtype` must reach to count as σ ≥ τ.

    That is τ but at the ends of its interval, which must hold for cosines with rounding errors: at τ = −1 every pair of
    finite keys matches, at τ = 1 every pair of equal ones. There the threshold lies below τ by more than the error of
    the cosine. Sums run in 16 lanes or more, so it is at most n/16 u or so, for numbers that are all alike; for others
    λ √n u is a bound whatever the order, but for a probability of 2 exp(−λ²/2) (Higham and Mary, 2019, Theorem 2.4),
    here with λ = 8.
    """
    slack = (4 * (math.sqrt(numbers) + 1) + numbers / 16) * torch.finfo(dtype).eps
    return -2.0 if tau - slack <= -1 else min(tau, 1 - slack)


def _check(op, v, stacked, valid, rows) -> None:
    m = len(v)
    for t, x in enumerate(stacked):
        _check_numbers(op, f"uploads[{t}]", x, v.device)
        if x.dim() == 0 or len(x) != m:
            raise ValueError(f"{op}: uploads[{t}] has shape {list(x.shape)}, v has {m} clients: must be as many")
    if valid is not None:
        check_tensor(op, "valid", valid, (torch.bool,), v.device)
        if valid.shape != (m,):
            raise ValueError(f"{op}: valid has shape {list(valid.shape)}, must be [{m}]")
    if not isinstance(rows, range):
        raise TypeError(f"{op}: rows={rows!r}, must be a range")
    if rows.step != 1 or not 0 <= rows.start <= max(rows.start, rows.stop) <= m:
        raise ValueError(f"{op}: rows={rows}, must be a range with step 1 within {m} clients")


def _check_numbers(op, name, x, device=None) -> None:
    """Any real dtype."""
    check_tensor(op, name, x, None, device)
    if x.is_floating_point():
        check_tensor(op, name, x, FLOATING)
    elif x.dtype not in _WHOLE:
        raise ValueError(f"{op}: {name} is {x.dtype}, must be floating or of integers")


def _compute(v: Tensor, stacked: list[Tensor]) -> torch.dtype:
    double = v.dtype == torch.float64 or any(x.dtype == torch.float64 or not x.is_floating_point() for x in stacked)
    return torch.float64 if double else torch.float32


def _rows(x: Tensor) -> Tensor:
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def _matrices(stacked, compute, valid, ones) -> tuple[list[list[int]], list[Tensor]]:
    """The uploads as matrices, and which of them each holds. The first, of the narrow ones, begins with a column of
    ones: where an upload becomes a weighted sum, this becomes the sum of the weights.
    """
    m = len(ones)
    if valid is not None:
        ones = valid[:, None].to(compute)
    groups, narrow, wide = [[]], [ones], []
    for t, x in enumerate(stacked):
        x = _rows(x).to(compute)
        if valid is not None:
            # Not a product: what stands there may be NaN.
            x = torch.where(valid[:, None], x, 0)
        if x.shape[1] < _WIDE:
            groups[0].append(t)
            narrow.append(x)
        else:
            groups.append([t])
            wide.append(x)
    # Matrix products like widths that are multiples of a register.
    narrow.append(ones.new_zeros(m, -sum(x.shape[1] for x in narrow) % 16))
    return groups, [torch.cat(narrow, 1), *wide]


def _fill(sums, keys, matrices, short, first, epsilon, min_matches, valid) -> None:
    """Give the rows `short` of matches the most similar clients: those they have matched are among these."""
    m, compute, own = len(keys), matrices[0].dtype, short + first
    sigma = keys.new_empty(len(short), m, dtype=compute)
    units = unit(keys[own].to(compute))
    for start in range(0, m, 1024):
        sigma[:, start : start + 1024] = units @ unit(keys[start : start + 1024].to(compute)).T
    sigma.nan_to_num_(nan=-torch.inf).clamp_(max=1)
    if valid is not None:
        sigma[:, ~valid] = -torch.inf
    sigma[torch.arange(len(own), device=own.device), own] = -torch.inf
    best, columns = top(sigma, min_matches - 1)
    weights = torch.where(best > -torch.inf, torch.exp(epsilon * (best - 1)), 0)
    if columns.shape[1] > 32:
        panel = torch.zeros_like(sigma).scatter_(1, columns, weights)
        for out, x in zip(sums, matrices, strict=True):
            out[short] = panel @ x
    else:
        for out, x in zip(sums, matrices, strict=True):
            out[short] = sum(weights[:, j : j + 1] * x[columns[:, j]] for j in range(columns.shape[1]))


def top(similarity: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row, and their columns, in any order; ties by the lower column. All if there are not
    more.
    """
    count = min(count, similarity.shape[1])
    best, columns = similarity.topk(count, dim=1)
    last = best[:, -1:]
    tied = ((similarity == last).sum(1) > (best == last).sum(1)) & (last[:, 0] > -torch.inf)
    if tied.any():
        order = similarity[tied].sort(dim=1, descending=True, stable=True)
        best[tied], columns[tied] = order.values[:, :count], order.indices[:, :count]
    return best, columns


def _as(mixed: Tensor, like: Tensor) -> Tensor:
    if not like.is_floating_point():
        mixed = mixed.round()
    return mixed.to(like.dtype).reshape(len(mixed), *like.shape[1:])


@torch.no_grad()
def mix(matrix: Tensor, x: Tensor) -> Tensor:
    """Σ_i w[k, i] x_i for x [m, …] and a matrix [k, m]: [k, …] in x's dtype, integers rounded to the nearest.

    matrix: floating point, on x's device. One that is one row expanded (stride 0: the constant mixing) is applied once
    and its result expanded. Raises ValueError or TypeError, naming the argument, for other shapes, dtypes and devices.
    """
    op = "mix"
    check_tensor(op, "matrix", matrix, FLOATING)
    _check_numbers(op, "x", x, matrix.device)
    if matrix.dim() != 2 or x.dim() == 0 or matrix.shape[1] != len(x):
        raise ValueError(f"{op}: x has shape {list(x.shape)}, matrix {list(matrix.shape)}, must be [m, …] and [k, m]")
    check_size(op, (len(matrix), *x.shape[1:]))
    once = len(matrix) > 1 and matrix.stride(0) == 0
    rows = matrix[:1] if once else matrix
    compute = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.float64
    flat = _rows(x).to(compute)
    out = _as(rows.to(flat) @ flat, x)
    return out.expand(len(matrix), *x.shape[1:]) if once else out


@torch.no_grad()
def srht(x: Tensor, m: int, seed: int = 0, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Sketches of the rows of x [k, d] (or of one x [d]): m numbers that keep cosines and inner products.

    The subsampled randomized Hadamard transform S = (1 / √m) P H D: random signs D, the Walsh–Hadamard transform H of
    the next power of two of points, m of its rows P, both drawn from `seed` (Ailon and Chazelle 2009; Tropp 2011).
    ⟨Sx, Sy⟩ has the mean ⟨x, y⟩; the cosine's rms error is (1 − cos²) / √m for m ≪ d.

    Returns (sketch, scale): int8 [k, m] with a float32 scale [k] that restores it, or `dtype`=float32 (float64 of
    float64 x) with a scale without elements. Cosines do not need the scale.
    Raises ValueError for m that is not between 1 and the number of points, the next power of two.
    """
    op = "srht"
    check_tensor(op, "x", x, FLOATING)
    if x.dim() not in (1, 2):
        raise ValueError(f"{op}: x is {x.dtype} {list(x.shape)}, must be floating, [d] or [k, d]")
    compute = torch.promote_types(x.dtype, torch.float32)
    if dtype not in (torch.int8, compute):
        raise ValueError(f"{op}: dtype={dtype}, must be torch.int8 or {compute}")
    d = x.shape[-1]
    points = 1 << max(d - 1, 0).bit_length()
    m, seed = whole(op, "m", m, 1, points), whole(op, "seed", seed, -(2**63), 2**64 - 1)
    check_size(op, (*x.shape[:-1], points))
    signs, rows = _draws(d, points, m, seed, x.device)
    out, scale = implementation(op)(x if x.dim() == 2 else x[None], signs, rows, dtype == torch.int8)
    return (out, scale) if x.dim() == 2 else (out[0], scale[0] if scale.numel() else scale)


@functools.lru_cache(maxsize=8)
def _draws(d: int, points: int, m: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    signs = 2 * torch.randint(2, (d,), generator=draw, dtype=torch.int8) - 1
    rows = torch.randperm(points, generator=draw)[:m].sort().values
    return signs.to(device), rows.to(device)
