"""User-level differential privacy of what everybody downloads: DP-FedAvg (McMahan, Ramage, Talwar, Zhang; ICLR 2018).

Each client's update is clipped to the norm S (`clip`); the mean of the updates has a fixed denominator m, the number of
clients a round is to have (their f̃_f, every client counting alike), and Gaussian noise of standard deviation z S / m in
each number (`noise` = z). What the clients download is then (ε, δ)-differentially private towards each other, and so is
all they make of it with their own data.

Two federations are neighbours if one client's data are replaced by others: the sum of the updates then moves by at most
2 S. (With a client added or left out, as in the paper, it would be S, and ε about half at the same z.) m of K clients
are drawn without replacement in each round.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfact.federation.state import State, generator_for


@dataclass(frozen=True)
class Noise:
    """What makes the mean of a round's updates private."""

    deviation: float
    """Of each number of the mean: z S / m."""
    expected: int
    """m."""
    start: State
    """What all clients of the round had downloaded, [1, …]."""
    seed: int
    round: int
    """Of the uploads: asked again, they give the same noise, and no more is known of them."""

    def released(self, stacked: State) -> State:
        """start + Σ_k (x_k − start) / m + noise, [1, …], for the uploads x [n, …], n ≤ m, clipped."""
        return {name: self._released(name, tensor) for name, tensor in stacked.items()}

    def _released(self, name: str, x: Tensor) -> Tensor:
        start = self.start[name].double()
        draw = generator_for(self.seed, self.round, -1, f"privacy/{name}")
        noise = torch.randn(start.shape, generator=draw, dtype=torch.float64).to(start.device)
        moved = (x.double() - start).sum(0, keepdim=True) / self.expected
        return (start + moved + self.deviation * noise).to(x.dtype)


def default_delta(clients: int) -> float:
    """1 / K^1.1, as in the paper (§3)."""
    return clients**-1.1


def accountant() -> None:
    """Raise ValueError if there is nothing to account with."""
    try:
        import dp_accounting.rdp  # noqa: F401
    except ImportError as error:
        raise ValueError(f"noise: ε is computed by dp-accounting: pip install 'fastfact[privacy]' ({error})") from error


@functools.lru_cache
def epsilon(noise: float, delta: float, rounds: int, clients: int, taking_part: int) -> float:
    """ε at δ after so many rounds in each of which `taking_part` of the `clients` upload."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    # The noise is in units of S, neighbouring sums differ by 2 S.
    event = GaussianDpEvent(noise / 2)
    if taking_part < clients:
        event = SampledWithoutReplacementDpEvent(clients, taking_part, event)
    spent = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    return float(spent.compose(event, rounds).get_epsilon(delta)) if rounds else 0.0
