"""FedDecomp (Wu et al., ACM MM 2024): shared full-rank plus personal low-rank weights."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from fastfact.federation.client.phase import Phase
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.convert import factorized_layers
from fastfact.nn.specs import LowRank, Spec

LOW_RANK = ("A", "B")
SHARED = ("full-rank", "low-rank", "both", "none")


def _low_rank(info: TensorInfo) -> bool:
    return info.role in LOW_RANK


def _full_rank(info: TensorInfo) -> bool:
    return info.role not in LOW_RANK


@register
@dataclass(kw_only=True)
class FedDecomp(Strategy):
    """W = σ + reshape(B A) in every layer, the classifier included (eq. 2–4); σ ← (1/N) Σ_i σ_i (eq. 7), A and B stay.

    Each round trains A and B for `lora_epochs` epochs with σ frozen (eq. 5), then σ for the other E − `lora_epochs`
    with A and B frozen (eq. 6, Algorithm 1). E is the federation's `epochs`; `lora_epochs` may be 0 (FedAvg with plain
    means) to E (local training of A and B).

    ratio: R_c, of convolutions; linear_ratio: R_l, of linear layers (Table 2: .6, .6 is best on CIFAR-10; .8, .4 on
    CIFAR-100 and Tiny-ImageNet). layout: see `ff.LowRank`; "view" is what the official code computes.
    lora_alpha: B A counts `lora_alpha` / R of each layer, R = max(1, round(ratio · min(o, i))), as LoRA code scales it
    (by default with α = 1); None, as eq. 2 has it, once. A small scale makes A and B learn slowly beside σ.
    lora_epochs: the text leaves the E_lora of its tables open; the authors' published runs used 2 of 5, so None is two
    fifths of E, rounded, and at least one of two or more.
    training: "alternating", or "simultaneous", everything for all E epochs (Table 3).
    shared: "full-rank"; "low-rank" is FedDecomp_Reverse (Table 5), whose training stays in the same order; "both" and
    "none" are the "w/ Low-Rank" rows of FedAvg and Local in Table 4, where training is to be "simultaneous".

    Layers in `skip` are not decomposed, and count as full-rank (of its Transformer the paper decomposes attention and
    classifier only). σ starts as the model's weights: a pretrained σ (§4.5) is a pretrained model.

    What is no weight (biases, learned normalisation) is not decomposed: it counts as full-rank, so that without the
    low-rank phase this is FedAvg, as §3.4 says. Normalisation statistics are shared with σ and move in both phases:
    the text has nothing on batch-norm. Where labels differ between clients, switch `share_classifier` (and the norms)
    off. The mean of eq. 7 is over all N clients, here over those that reported: with a fraction of the clients only
    these have sent a σ. All clients start from one A.
    """

    ratio: float = 0.6
    linear_ratio: float = 0.6
    layout: str = "separable"
    lora_alpha: float | None = None
    lora_epochs: int | None = None
    training: str = "alternating"
    shared: str = "full-rank"

    name: ClassVar[str] = "feddecomp"
    paper: ClassVar[str] = "FedDecomp, ACM MM 2024"

    def check(self) -> None:
        super().check()
        holds = self.lora_epochs is None or self.lora_epochs >= 0
        self._require("lora_epochs", holds, "must be an integer of at least 0, or None")
        holds = self.lora_alpha is None or 0 < self.lora_alpha < float("inf")
        self._require("lora_alpha", holds, "must be a number above 0, or None")
        self._require("training", self.training in ("alternating", "simultaneous"), "must be alternating, simultaneous")
        self._require("shared", self.shared in SHARED, f"must be one of {', '.join(SHARED)}")
        self.spec()

    def spec(self) -> Spec:
        return LowRank(ratio=self.ratio, linear_ratio=self.linear_ratio, layout=self.layout)

    def prepare(self, model: nn.Module) -> nn.Module:
        built = bool(factorized_layers(model))
        model = super().prepare(model)
        if built or self.lora_alpha is None:
            return model
        for layer in factorized_layers(model).values():
            if isinstance(spec := layer.spec, LowRank):
                rank = spec.rank_of(layer.size) // (1 if len(layer.size) == 2 else min(layer.size[2:]))
                layer.spec = replace(spec, scaling=self.lora_alpha / rank)
        return model

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        if not any(map(_low_rank, infos.values())):
            raise ValueError(f"{self.name}: the model has no factors A and B; it needs ff.LowRank layers")

    def shares(self, info: TensorInfo) -> bool:
        wanted = {"both": True, "none": False, "low-rank": _low_rank(info), "full-rank": _full_rank(info)}
        return wanted[self.shared] and self.allowed(info)

    def phases(self, epochs: int) -> list[Phase]:
        if self.training == "simultaneous":
            return [Phase(epochs)]
        first = self.lora_epochs
        if first is None:
            first = max(round(0.4 * epochs), min(1, epochs - 1))
        self._require("lora_epochs", first <= epochs, f"must be at most the {epochs} local epochs")
        return [Phase(first, trains=_low_rank), Phase(epochs - first, trains=_full_rank)]

    @property
    def constant_mixing(self) -> bool:
        return self.after_mix != "support"

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        return mixing.fedavg_matrix([1] * len(uploads.clients), rows=len((guests or uploads).clients))
