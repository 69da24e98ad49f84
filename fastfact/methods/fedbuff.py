"""FedBuff: "Federated Learning with Buffered Asynchronous Aggregation" (Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek,
Huba; AISTATS 2022).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fastfact.base.kinds import setting
from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State
from fastfact.methods.server_step import ServerStep


@register
@dataclass(kw_only=True)
class FedBuff(ServerStep):
    """FedBuff (Algorithm 1): when K updates Δ_i = y_i − x^{t − τ_i} have arrived, x ← x + η_g / K Σ_i s(τ_i) Δ_i, τ_i
    the steps that the server made while client i was at work; s(τ) = 1 / (1 + τ)^a scales down what is stale.

    K is the federation's `buffer`, how many clients work at a time its `participation`; without a buffer rounds wait
    for all of their clients, nothing is stale, and this is FedAvg with even weights and a step of the server.

    server_lr: η_g (tuned with the local learning rate). staleness: a; 1/2 in the paper's experiments, 0 for none.

    Clients upload y_i; the server knows what it sent them. The sum is over K, not over the weights: stale updates move
    x less. Differential privacy and the aggregation in trusted hardware are the paper's besides, not the algorithm's.
    Batch-norm, of which the text says nothing: its learned part moves like every weight, its statistics are the mean of
    those that arrived. What the caller does not share stays at the client.
    """

    server_lr: float = setting(1.0, "Step of the server by the mean of the updates, η_g.", above=0)
    staleness: float = setting(0.5, "Exponent a in 1 / (1 + τ)^a, the weight of an update τ steps old.", at_least=0)

    name: ClassVar[str] = "fedbuff"
    paper: ClassVar[str] = "Nguyen et al., AISTATS 2022"

    def counts(self, uploads: Uploads) -> Sequence[float]:
        return [(1 + late) ** -self.staleness for late in uploads.staleness]

    def step(self, x: State, mean: State, uploads: Uploads) -> State:
        return {name: start + self.server_lr * (mean[name] - start) for name, start in x.items()}
