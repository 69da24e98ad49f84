"""FedAvg (McMahan et al., 2017, Algorithm 1)."""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import Strategy, register


@register
@dataclass(kw_only=True)
class FedAvg(Strategy):
    """w ← Σ_k (n_k / N) w_k over the clients of the round (Algorithm 1), n_k the number of training samples.

    Everything is shared by default: classifier, learned normalisation and its running statistics, so that all clients
    start a round from one model. Where labels are permuted the papers do not share the classifier ("to ensure fairness
    across all algorithms", Factorized-FL §5.2): `share_classifier=False`, and normalisation is best kept too:
    `share_norm=False, share_norm_statistics=False`. The paper predates batch-norm and says nothing of it. Counts
    (integer buffers) are averaged and rounded.

    With partial participation a client that missed a round starts its next from the last average.
    """

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "McMahan et al., 2017"
