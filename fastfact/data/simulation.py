"""FedFac's simulated clients, whose split into shared and personal hidden units is known (§4.3.1)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastfact.data.client import Client


@dataclass(frozen=True, eq=False)
class Simulation:
    """clients, and the network their labels come from: y = 1 where Σ_q a_q relu(w_cq · x) + ε > 0 (eq. 8).

    weight: float32 [C, m, d], the rows of the hidden layer of each client; output: float32 [m], the vector a.
    shared: bool [m], True for the hidden units whose weights are those of every client. In a network with one hidden
    layer of m units (`mlp1`) nothing ties its units to these by number.
    """

    clients: list[Client]
    weight: Tensor
    output: Tensor
    shared: Tensor


def fedfac_simulation(
    clients: int = 100,
    seed: int = 0,
    *,
    features: int = 100,
    hidden: int = 200,
    shared_units: float = 0.5,
    shared_features: float = 0.4,
    samples: int = 200,
    noise: float = 1.0,
    balanced: bool = False,
    test_fraction: float = 0.2,
) -> Simulation:
    """C clients with d features and m hidden units in the true network.

    shared_units: p = m₂ / m; shared_features: α = d₂ / d (Figure 6 varies p at α = .4 and α at p = .5). The first
    d₁ = d − d₂ features are personal, x^p ~ N(μ_c, Σ), Σ_ij = .5^|i−j|, μ_c ~ N(0, I), the others x^s ~ N(0, I). The
    first m₁ units are personal: on x^p weights ~ N(μ_c, I), on x^s uniform in ±.1; the m₂ shared ones on x^p uniform in
    ±.1, on x^s in ±1. a ~ N(0, I). noise is the deviation of ε, samples the number of one client's; the paper gives
    neither (it writes N(0, c²)). The labels are 0 and 1, a fifth of each client's samples is for testing.

    As x^p and the personal weights share the mean μ_c, w · x is about |μ_c|² ≈ d₁ for every personal unit, and the sign
    of their Σ a_q decides most labels: often 95 % are the same. balanced: y = 1 above the client's median instead of
    above 0, so that there is something to learn.

    Raises ValueError for numbers below 1, shares or a test fraction out of range or a negative noise or seed.
    """
    for name, value, least in (
        ("clients", clients, 1),
        ("features", features, 1),
        ("hidden", hidden, 1),
        ("samples", samples, 2),
        ("seed", seed, 0),
        ("noise", noise, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name}={value}, must be at least {least}")
    for name, value in (("shared_units", shared_units), ("shared_features", shared_features)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}, must lie in 0 … 1")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction={test_fraction}, must lie between 0 and 1")
    d2, m2 = round(shared_features * features), round(shared_units * hidden)
    d1, m1 = features - d2, hidden - m2
    common = np.random.default_rng([seed, 0])
    shared = np.hstack([common.uniform(-0.1, 0.1, (m2, d1)), common.uniform(-1, 1, (m2, d2))])
    output = common.standard_normal(hidden)
    root = (
        np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(np.arange(d1), np.arange(d1)))) if d1 else np.zeros((0, 0))
    )
    test, made, weights = min(max(round(test_fraction * samples), 1), samples - 1), [], []
    for client in range(clients):
        rng = np.random.default_rng([seed, 1, client])
        mean = rng.standard_normal(d1)
        own = np.hstack([mean + rng.standard_normal((m1, d1)), rng.uniform(-0.1, 0.1, (m1, d2))])
        weight = np.vstack([own, shared])
        x = np.hstack([mean + rng.standard_normal((samples, d1)) @ root.T, rng.standard_normal((samples, d2))])
        score = np.maximum(x @ weight.T, 0) @ output + noise * rng.standard_normal(samples)
        y = score > (np.median(score) if balanced else 0)
        weights.append(weight)
        x, y = torch.from_numpy(x).float(), torch.from_numpy(y).long()
        made.append(Client((x[test:], y[test:]), (x[:test], y[:test]), num_classes=2))
    return Simulation(
        made,
        torch.from_numpy(np.stack(weights)).float(),
        torch.from_numpy(output).float(),
        torch.arange(hidden) >= m1,
    )
