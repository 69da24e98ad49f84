"""FedPara and pFedPara: "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning" (Hyeon-Woo,
Ye-Bin, Oh; ICLR 2022).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.convert import factorized_layers
from fastfact.nn.specs import Hadamard, Spec


@dataclass(kw_only=True)
class _Para(Strategy):
    """ratio: γ of the paper, between the smallest rank that allows a full-rank W (0) and the size of W (1).

    A convolution is parameterized as the matrix [o, i·kh·kw] (Proposition 1), or with tensor=True by Proposition 3, in
    fewer numbers (see `ff.Hadamard`). The classifier is factorized like every layer. A model that has factorized layers
    already must have those of the method: `ff.Hadamard()` for FedPara, `ff.Hadamard(personalized=True)` for pFedPara.
    """

    ratio: float = 0.5
    tensor: bool = False

    paper: ClassVar[str] = "Hyeon-Woo et al., ICLR 2022"
    personalized: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self.spec()

    def spec(self) -> Spec:
        return Hadamard(ratio=self.ratio, personalized=self.personalized, tensor=self.tensor)

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        specs = [layer.spec for layer in factorized_layers(model).values() if isinstance(layer.spec, Hadamard)]
        if not specs or any(spec.personalized != self.personalized for spec in specs):
            raise ValueError(
                f"{self.name}: the model has other factors than the method; it needs"
                f" ff.Hadamard(personalized={self.personalized}) layers"
            )
        return model


@register
@dataclass(kw_only=True)
class FedPara(_Para):
    """FedPara: FedAvg of W = (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ) (Proposition 1): the four factors are averaged, not W, and travel.

    Biases and batch-norm, learned part and statistics, are averaged as in FedAvg; the paper says nothing of them.
    """

    name: ClassVar[str] = "fedpara"


@register
@dataclass(kw_only=True)
class PFedPara(_Para):
    """pFedPara (§2.3): W = W₁ ⊙ (W₂ + 1), W₁ = X₁Y₁ᵀ is averaged, W₂ = X₂Y₂ᵀ stays (with tensor=True
    their cores likewise): W₁ ⊙ W₂ personal, W₁ global.

    Half of the numbers of FedPara travel. What is in no W₂ (biases, batch-norm: the paper does not say) is averaged as
    in FedAvg. Without the classifier's sharing its W₁ and bias stay too.
    """

    name: ClassVar[str] = "pfedpara"
    personalized: ClassVar[bool] = True

    def shares(self, info: TensorInfo) -> bool:
        return info.role not in ("t2", "x2", "y2") and self.allowed(info)
