"""Aggregation as a row-stochastic matrix [k, m] applied to stacked uploads [m, …], by the ops of `fastfact.ops.mixing`.

The matrix of a softmax over similar clients is made only where it is asked for: `similarity_mix` applies it without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastfact import ops
from fastfact.federation.state import State, flattened
from fastfact.ops.mixing import threshold


def fedavg_matrix(samples: Sequence[int] | Tensor, rows: int | None = None) -> Tensor:
    """w[k, i] = n_i / N for every k (FedAvg): float64 [rows or m, m], one row expanded: mixing it costs one row."""
    n = torch.as_tensor(samples, dtype=torch.float64)
    return (n / n.sum()).expand(len(n) if rows is None else rows, -1)


def identity(k: int) -> Tensor:
    """Every client keeps its own: float64 [k, k]."""
    return torch.eye(k, dtype=torch.float64)


def cosine(keys: Tensor, others: Tensor | None = None) -> Tensor:
    """cos(keys_k, others_i), float64 [k, m], clamped to [−1, 1]; `others` is `keys` by default.

    keys [k, d], others [m, d]. A key of norm 0 has cosine 0 with every other.
    """
    first = _unit(keys)
    second = first if others is None else _unit(others)
    return (first @ second.T).clamp(-1, 1)


def proximity(points: Tensor) -> Tensor:
    """How near points [m, d] are on the scale of their own neighbourhoods, float64 [m, m]: −d_ki² / (s_k s_i), where
    d_ki is the Euclidean distance and s_k that of k to its second nearest other point (the scaling of Zelnik-Manor and
    Perona, 2004, there to the seventh). 0: the same point; −1: as far as those; −4: twice as far.
    """
    points = points.double()
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    own = torch.eye(len(points), dtype=torch.bool, device=points.device)
    others = squares.masked_fill(own, torch.inf).sort(1).values[:, : len(points) - 1]
    scale = others[:, min(1, others.shape[1] - 1)].sqrt() if others.shape[1] else squares.new_zeros(len(points))
    # 0 / 0: the same point. What is infinitely far takes part in means.
    return -(squares / (scale[:, None] * scale)).nan_to_num(nan=0.0, posinf=1e6).clamp(max=1e6)


def groups(proximities: Tensor, farthest: float = 4.0) -> Tensor:
    """Which group each of m clients is in, int64 [m], from a matrix of `proximity`: average linkage joins groups as
    long as the mean of −proximity between them is at most `farthest`. Groups of three or more that lie apart are found
    however far apart they are; one cloud of points is one group.
    """
    if len(proximities) < 2:
        return torch.zeros(len(proximities), dtype=torch.int64)
    from sklearn.cluster import AgglomerativeClustering

    rule = AgglomerativeClustering(None, metric="precomputed", linkage="average", distance_threshold=farthest)
    return torch.from_numpy(rule.fit_predict(-proximities.cpu().numpy())).long()


def _unit(keys: Tensor) -> Tensor:
    keys = flattened(keys).double()
    norm = torch.linalg.vector_norm(keys, dim=1, keepdim=True)
    return torch.where(norm > 0, keys / norm, 0.0)


def choose(similarity: Tensor, how: str, count: int, generators: Sequence[torch.Generator] | None = None) -> Tensor:
    """bool [k, m]: each row's own column (its first k are the same clients) and `count` others, fewer if there are not.

    how: "best", the most similar; "worst", the least similar, ties by the lower index; "random", drawn from the row's
    of `generators`.
    """
    order = similarity.double().clone()
    if how == "random":
        m = order.shape[1]
        order = torch.stack([torch.rand(m, generator=g, dtype=torch.float64) for g in generators]).to(order)
    elif how == "worst":
        order = -order
    # A client is always its own first match, also where another has cosine 1 with it.
    order.diagonal().fill_(torch.inf)
    first = order.sort(dim=1, descending=True, stable=True).indices[:, : count + 1]
    return torch.zeros(order.shape, dtype=torch.bool, device=order.device).scatter_(1, first, True)


def softmax_matrix(similarity: Tensor, epsilon: float, tau: float = -1.0, min_matches: int = 1) -> Tensor:
    """w[k, i] = exp(ε σ_ki) / Σ_j exp(ε σ_kj) over the matched clients (Factorized-FL eq. 4 and 5), 0 for the others.

    similarity [k, m], m ≥ k, whose first k columns are the same clients as the rows; their σ_kk is taken as 1 whatever
    stands there. Matched: σ_ki ≥ τ (see `ops.mixing.threshold` for its ends), and k itself. Fewer than `min_matches`
    matched (k counts) are filled up with the most similar clients (the official code's `minimum_aggr`), ties by the
    lower index.

    Eq. 4 drops clients below τ from the set, the text below it says their score is "set to zero" (which would leave
    them a weight of exp(0)): the set is what is meant here. exp(ε (σ − 1)) cannot overflow: no running maximum.
    """
    sigma = similarity.double().clone()
    sigma.diagonal().fill_(1)
    matched = sigma >= threshold(tau, sigma.dtype)
    if min_matches > 1:
        matched |= choose(sigma, "best", min_matches - 1)
    weights = torch.where(matched, torch.exp(epsilon * (sigma - 1)), 0.0)
    return weights / weights.sum(1, keepdim=True)


def mix(matrix: Tensor, stacked: State) -> State:
    """Σ_i w[k, i] x_i for each tensor x [m, …]: [k, …], see `ops.mix`. The matrix may be on another device."""
    there = {device: _beside(matrix, device) for device in {tensor.device for tensor in stacked.values()}}
    return {name: ops.mix(there[tensor.device], tensor) for name, tensor in stacked.items()}


def _beside(matrix: Tensor, device: torch.device) -> Tensor:
    """The matrix on a device; one that is one row expanded stays that."""
    if len(matrix) > 1 and matrix.stride(0) == 0:
        return matrix[:1].to(device).expand(len(matrix), -1)
    return matrix.to(device)


def similarity_mix(
    keys: Tensor,
    stacked: State,
    epsilon: float,
    tau: float = -1.0,
    min_matches: int = 1,
    valid: Tensor | None = None,
    rows: range | None = None,
) -> State:
    """`mix` with the matrix `softmax_matrix(cosine(keys), …)`, which is never made, see `ops.similarity_mix`."""
    mixed = ops.similarity_mix(keys, list(stacked.values()), epsilon, tau, min_matches, valid, rows)
    return dict(zip(stacked, mixed, strict=True))
