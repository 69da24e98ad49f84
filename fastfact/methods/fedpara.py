"""FedPara and pFedPara: "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning" (Hyeon-Woo,
Ye-Bin, Oh; ICLR 2022).
"""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.specs import Hadamard, Spec


@dataclass(kw_only=True)
class _Para(Strategy):
    """ratio: γ of the paper, between the smallest rank that allows a full-rank W (0) and the size of W (1).

    A convolution is parameterized as the matrix [o, i·kh·kw] (Proposition 1), or with tensor=True by Proposition 3, in
    fewer numbers (see `ff.Hadamard`). The classifier is factorized like every layer.
    """

    ratio: float = 0.5
    tensor: bool = False

    paper: ClassVar[str] = "Hyeon-Woo et al., ICLR 2022"

    def check(self) -> None:
        super().check()
        self.spec()


@register
@dataclass(kw_only=True)
class FedPara(_Para):
    """FedPara: FedAvg of W = (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ) (Proposition 1): the four factors are averaged, not W, and travel.

    Biases and batch-norm, learned part and statistics, are averaged as in FedAvg; the paper says nothing of them.
    """

    name: ClassVar[str] = "fedpara"

    def spec(self) -> Spec:
        return Hadamard(ratio=self.ratio, tensor=self.tensor)


@register
@dataclass(kw_only=True)
class PFedPara(_Para):
    """pFedPara (§2.3): W = W₁ ⊙ (W₂ + 1), W₁ = X₁Y₁ᵀ is averaged, W₂ = X₂Y₂ᵀ stays (with tensor=True
    their cores likewise): W₁ ⊙ W₂ personal, W₁ global.

    Half of the numbers of FedPara travel. What is in no W₂ (biases, batch-norm: the paper does not say) is averaged as
    in FedAvg. Without the classifier's sharing its W₁ and bias stay too.
    """

    name: ClassVar[str] = "pfedpara"

    def spec(self) -> Spec:
        return Hadamard(ratio=self.ratio, personalized=True, tensor=self.tensor)

    def shares(self, info: TensorInfo) -> bool:
        return info.role not in ("t2", "x2", "y2") and self.allowed(info)
