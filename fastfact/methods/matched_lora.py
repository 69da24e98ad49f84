"""Adapters mixed over clients that are similar: Factorized-FL's matching (Jeong and Hwang, NeurIPS 2022) on A."""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.federation.server.strategy import register
from fastfact.federation.tensors import TensorInfo
from fastfact.methods.lora import FACTORS, Adapters
from fastfact.methods.matching import MatchedByEpsilon

MIXED = ("A", "both")


@register
@dataclass(kw_only=True)
class MatchedLoRA(MatchedByEpsilon, Adapters):
    """A is mixed over the clients with a similar A: softmax of ε σ_ki over σ_ki ≥ τ (Factorized-FL eq. 4 and 5), σ_ki
    the cosine of A of the last layer before the classifier that has an adapter. B stays with the client.

    mixed: "A", or "both" factors. match_on ("v": A, as above), tau, matching, matches, sketch, max_weight:
    see `Matched`; epsilon is ε, min_matches the least number of clients that are mixed (k counts). As all clients start
    from one A, their cosines stay near 1 for many rounds: ε must be large to tell them apart, 20 is the official preset
    for domains.
    As in Factorized-FL, nothing of the classifier is shared, nor is normalisation; both can be switched on. Other
    tensors that `train` names stay with the client.
    """

    share_classifier: bool = False
    share_norm: bool = False
    share_norm_statistics: bool = False
    epsilon: float = 20.0
    mixed: str = "A"

    name: ClassVar[str] = "matched-lora"
    paper: ClassVar[str] = "Factorized-FL, NeurIPS 2022, on LoRA"

    def check(self) -> None:
        super().check()
        self._require("mixed", self.mixed in MIXED, f"must be one of {', '.join(MIXED)}")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        Adapters.bind(self, infos)
        if self.match_on != "v":
            MatchedByEpsilon.bind(self, infos)
            return
        before = [info for info in infos.values() if info.role == "A" and not info.classifier]
        if not before:
            raise ValueError(f"{self.name}: no layer before the classifier has an A that trains, to compare clients by")
        key = max(before, key=lambda info: info.layer)
        self._keys = [key.name]
        self._require("sketch", self.sketch < key.numel, f"A has {key.numel} numbers, must be fewer")

    def shares(self, info: TensorInfo) -> bool:
        if info.norm:
            return self.allowed(info)
        return info.role in FACTORS[: MIXED.index(self.mixed) + 1] and self.allowed(info)
