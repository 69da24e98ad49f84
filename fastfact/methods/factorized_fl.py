"""Factorized-FL α, β and Factorized-FedAvg (Jeong and Hwang, NeurIPS 2022)."""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo
from fastfact.methods.matching import MatchedByEpsilon
from fastfact.nn.specs import Rank1, Spec


@dataclass(kw_only=True)
class _Factorized(Strategy):
    """What the three share: W = u vᵀ + μ in every layer, the classifier included (eq. 1–3), λ ‖μ‖₁ in the loss (eq. 6).

    layout, rank (γ), sparse (with μ): see `ff.Rank1`. init: "svd", u, v and μ together start as the layer's own random
    weight; or "random", u and v random and μ zero, as §4.1 has it. At random, all kernels of a layer start with one
    spatial pattern, and what tells them apart must grow in μ, against λ: on the digits α is 12–21 points of accuracy
    behind after 120 local steps where labels are permuted and classes even.
    Nothing of the classifier is shared (eq. 5: l ≤ L − 1), nor is normalisation, of which the papers say nothing and
    which belongs to a client's own labels and domain; both can be switched on.
    """

    share_classifier: bool = False
    share_norm: bool = False
    share_norm_statistics: bool = False
    l1: float = 5e-4
    layout: str = "spatial"
    rank: int = 1
    sparse: bool = True
    init: str = "svd"

    paper: ClassVar[str] = "Factorized-FL, NeurIPS 2022"

    def check(self) -> None:
        super().check()
        self._require("init", self.init in ("random", "svd"), "must be random or svd")
        self.spec()

    def spec(self) -> Spec:
        return Rank1(layout=self.layout, rank=self.rank, sparse=self.sparse)


@dataclass(kw_only=True)
class _Matched(_Factorized, MatchedByEpsilon):
    """Similarity matching (§4.2): σ_ki is the cosine of v of layer L − 1 of clients k and i (eq. 4; `match_on` can be
    another key), the mixing weights are the softmax of ε σ_ki over the clients with σ_ki ≥ τ (eq. 5), σ_kk = 1.

    tau in [−1, 1], epsilon ≥ 0. min_matches ≥ 1: at least so many clients are mixed, the most similar ones (k counts).
    The papers' ranges are τ 0–0.75, ε 1–20 (C.3); the defaults here are the official presets for labels (τ 0, ε 1)
    without their minimum of 10 or 20 matches; for domains those are τ 0.95, ε 20, at least 4.
    matching="random" or "worst", of `matches` clients, are the ablations of Figure 7 (g) (see `Matched`); sparse=False
    is "w/o μ", layout="kernel" and rank γ those of Figure 7 (h) and (k).

    Eq. 5 as printed puts the weights outside the sum; they belong inside, as Algorithm 1's softmax over i shows.
    """


@register
@dataclass(kw_only=True)
class FactorizedFLAlpha(_Matched):
    """Factorized-FL α (eq. 5, Algorithm 1): u^l of layers l ≤ L − 1 is mixed over matched clients; v, μ are personal.

    Up: u of those layers and v^{L−1}, or its sketch (see `sketch`). Down: u.
    """

    name: ClassVar[str] = "factorized-fl-alpha"
    sketches_at_client: ClassVar[bool] = True

    def shares(self, info: TensorInfo) -> bool:
        if info.norm:
            return self.allowed(info)
        return info.role == "u" and self.allowed(info)


@register
@dataclass(kw_only=True)
class FactorizedFLBeta(_Matched):
    """Factorized-FL β (Algorithm 2): u, v and μ of the layers l ≤ L − 1 are mixed over matched clients.

    The paper speaks of "all parameters"; a bias that a layer has besides u, v and μ goes with them.
    Averaging μ leaves the union of the supports; `after_mix` says what is done about that. Nothing, by default: local
    training makes μ as sparse again within the round (density .84 with each choice at λ = 5e-4, .25 at 5e-3), and on
    the digits (permuted non-IID, 7 rounds, one seed) "support" and "threshold" lost 3–6 points of accuracy. They save
    downlink: 87 MB, 77 MB and 54 MB at 5e-4, 74, 31 and 13 MB at 5e-3.
    """

    after_mix: str = "none"

    name: ClassVar[str] = "factorized-fl-beta"

    def shares(self, info: TensorInfo) -> bool:
        return self.allowed(info)


@register
@dataclass(kw_only=True)
class FactorizedFedAvg(_Factorized):
    """Factorized-FedAvg (§5.2): β without matching, the weights of FedAvg in its place."""

    after_mix: str = "none"

    name: ClassVar[str] = "factorized-fedavg"

    def shares(self, info: TensorInfo) -> bool:
        return self.allowed(info)
