"""SimFed (ICLR 2022 submission, "Agnostic Personalized Federated Learning with Kernel Factorization")."""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import register
from fastfact.methods.matching import Matched
from fastfact.nn.specs import Rank1, Spec


@register
@dataclass(kw_only=True)
class SimFed(Matched):
    """p_k ← p_k + Σ_j softmax_j(α σ_kj) (p_j − p_k) for each shared tensor p (eq. 8), over the clients with σ_kj ≥ τ.

    σ_kj is the cosine of z_k and z_j (eq. 3), z_k = E_k(x_N) (eq. 2): what client k's classifier gets to see of one
    input x_N ~ N(0, I) that never changes (eq. 1 splits the network into encoder E and predictor P). The client sends
    z_k after its training (Algorithm 1); x_N comes from a constant seed, so that it need not travel.

    factorized: W = π(u × v) ⊕ μ in every layer (eq. 4–6, `ff.Rank1(layout="kernel")`), u, v and μ each by eq. 8 and
    λ₁ ‖μ‖₁ in the loss (eq. 7); False is the paper's "Similarity Matching" or "w/o Factorization" on the dense model.
    sparse=False is "w/o masks φ" (Table 4). rank, layout, init: see Factorized-FL. tau, alpha, l1: §5.1.
    inputs: how many criteria inputs. matching="random" or "worst" with matches=2 are the rows of Table 3.

    Read as follows. Eq. 3 lets i run over all K clients, k among them with σ_kk = 1: the weights sum to one, p_k
    cancels and eq. 8 is p_k ← Σ_j softmax_j(α σ_kj) p_j, p_k with the weight e^α / Σ. Without itself in the set a
    client would lose all it has learned. An encoding that is all zero (dead ReLUs) is similar to none. As printed, the
    weight stands before the sum over j; it belongs inside. The classifier is not shared ("for fairness", where labels
    or domains differ), nor is what batch-norm learns and keeps, which the text does not mention; all three can be
    switched on. The encoder runs in eval mode, as in evaluation: with its running statistics. λ₁'s step on a mixed μ:
    see `after_mix`.
    """

    share_classifier: bool = False
    share_norm: bool = False
    share_norm_statistics: bool = False
    l1: float = 1e-4
    tau: float = 0.9
    alpha: float = 30.0
    match_on: str = "encoding"
    matches: int = 2
    inputs: int = 1  # type: ignore[misc]
    factorized: bool = True
    layout: str = "kernel"
    rank: int = 1
    sparse: bool = True
    init: str = "svd"

    name: ClassVar[str] = "simfed"
    paper: ClassVar[str] = "SimFed, ICLR 2022 submission"

    @property
    def scale(self) -> float:
        return self.alpha

    def check(self) -> None:
        super().check()
        self._require("inputs", self.inputs >= 1, "must be an integer of at least 1")
        self._require("alpha", 0 <= self.alpha < float("inf"), "must be a number of at least 0")
        self._require("init", self.init in ("random", "svd"), "must be random or svd")
        self.spec()

    def spec(self) -> Spec | None:
        return Rank1(layout=self.layout, rank=self.rank, sparse=self.sparse) if self.factorized else None
