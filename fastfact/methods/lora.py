"""Clients that fine-tune one frozen network by low-rank adapters, W = σ + s · B A (LoRA, Hu et al., ICLR 2022).

FedIT: "Towards Building the Federated GPT: Federated Instruction Tuning" (Zhang, Vahidian, Kuo, Li, Zhang, Yu, Zhou,
Wang, Chen; ICASSP 2024).
FFA-LoRA: "Improving LoRA in Privacy-preserving Federated Learning" (Sun, Li, Li, Ding; ICLR 2024).
FedSA-LoRA: "Selective Aggregation for Low-Rank Adaptation in Federated Learning" (Guo, Zeng, Wang, Fan, Wang, Qu; ICLR
2025).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.convert import factorize, factorized_layers
from fastfact.nn.specs import LowRank, Spec

FACTORS = ("A", "B")


@dataclass(kw_only=True)
class Adapters(Strategy):
    """What these methods share: adapters in every layer they can be in, the rest of the model frozen, and all that
    trains averaged by n_k, where the sharing policy (classifier, norms) lets it leave the client.

    rank, scaling (α / r), dropout: see `ff.LowRank`. train: what trains as a whole besides ("head", "*norm*"), skip:
    layers without an adapter; see `ff.factorize`. A model that has factorized layers already is left as it is: made by
    `ff.factorize(…, freeze=True)`, it may have adapters where it likes.

    What is frozen is in no state and on no wire. All clients start from one A; B starts at zero. In a convolution,
    "A" is the factor that starts at random and "B" the one that starts at zero, whichever is applied first.
    """

    rank: int = 8
    scaling: float = 2.0
    dropout: float = 0.0
    train: Sequence[str] = field(default_factory=list)

    def check(self) -> None:
        super().check()
        paths = isinstance(self.train, list | tuple) and all(isinstance(path, str) for path in self.train)
        self._require("train", paths, "must be a list of patterns")
        self.train = list(self.train)
        self.spec()

    def spec(self) -> Spec:
        return LowRank(rank=self.rank, scaling=self.scaling, dropout=self.dropout)

    def prepare(self, model: nn.Module) -> nn.Module:
        if factorized_layers(model):
            return model
        return factorize(model, self.spec(), self.skip, unsupported="skip", freeze=True, train=self.train)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        if not any(info.role == "B" for info in infos.values()):
            raise ValueError(f"{self.name}: the model has no adapters (factors A and B); it needs ff.LowRank layers")


@register
@dataclass(kw_only=True)
class FedIT(Adapters):
    """FedIT (Zhang et al., 2024, Algorithm 1): A and B are averaged by n_k, each by itself.

    The mean of the products is not the product of the means: what is lost is the covariance of B and A over the
    clients, which the other methods here avoid in different ways.
    """

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "FedIT, ICASSP 2024"


@register
@dataclass(kw_only=True)
class FFALoRA(Adapters):
    """FFA-LoRA (Sun et al., 2024, §4): A stays as it was drawn, the same for all, and B trains and is averaged by n_k.

    So the product of the means is the mean of the products, and half as much travels. A is frozen with the network.
    """

    name: ClassVar[str] = "ffa-lora"
    paper: ClassVar[str] = "FFA-LoRA, ICLR 2024"

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        for layer in factorized_layers(model).values():
            if isinstance(layer.spec, LowRank):
                layer.A.requires_grad_(False)
        return model


@register
@dataclass(kw_only=True)
class FedSALoRA(Adapters):
    """FedSA-LoRA (Guo et al., 2025, Algorithm 1): A and B train, A is averaged by n_k, B stays with the client.

    A, the paper finds, learns what the clients have in common, B what is each one's own. What `train` names is shared
    as A is.
    """

    name: ClassVar[str] = "fedsa-lora"
    paper: ClassVar[str] = "FedSA-LoRA, ICLR 2025"

    def shares(self, info: TensorInfo) -> bool:
        return info.role != "B" and self.allowed(info)


@register
@dataclass(kw_only=True)
class StandAloneLoRA(Adapters):
    """Every client trains its own adapter by itself: what the others are to be compared with. Nothing travels."""

    name: ClassVar[str] = "stand-alone-lora"
    paper: ClassVar[str] = "LoRA, ICLR 2022"

    def shares(self, info: TensorInfo) -> bool:
        return False
