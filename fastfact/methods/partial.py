"""Methods that share a fixed part of the model.

FedPer: "Federated Learning with Personalization Layers" (Arivazhagan, Aggarwal, Singh, Choudhary; 2019).
LG-FedAvg: "Think Locally, Act Globally: Federated Learning with Local and Global Representations" (Liang, Liu, Ziyin,
Allen, Auerbach, Brent, Salakhutdinov, Morency; 2020).
FedRep: "Exploiting Shared Representations for Personalized Federated Learning" (Collins, Hassani, Mokhtari,
Shakkottai; ICML 2021).
FedBABU: "FedBABU: Toward Enhanced Representation for Federated Image Classification" (Oh, Kim, Yun; ICLR 2022).
FedBN: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (Li, Jiang, Zhang, Kamp, Dou; ICLR
2021).
"""

from dataclasses import dataclass
from typing import ClassVar

from fastfact.base.kinds import setting
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo


@dataclass(kw_only=True)
class _Layers(Strategy):
    """Layers are counted by their weights; a normalisation belongs to the layer before it (`TensorInfo.layer`)."""

    def _fits(self, infos: dict[str, TensorInfo], name: str) -> None:
        layers = max((info.layers for info in infos.values()), default=0)
        self._require(name, getattr(self, name) < max(layers, 2), f"must be below the model's {layers} layers")


@register
@dataclass(kw_only=True)
class FedPer(_Layers):
    """FedPer (Arivazhagan et al., 2019): the base layers W_B are averaged by n_k (FedPer-Server), the last
    `personal_layers` layers W_P stay with the client; both train together for all local epochs (FedPer-Client).

    Down and up: W_B. Batch-norm in the base is part of it, statistics included, as the text, which has nothing on
    normalisation, implies by averaging whole base layers. W_P is personal by definition: `share_classifier` changes
    nothing. (The paper counts residual blocks from the end, here it is layers with a weight.)
    """

    personal_layers: int = 1

    name: ClassVar[str] = "fedper"
    paper: ClassVar[str] = "Arivazhagan et al., 2019"

    def check(self) -> None:
        super().check()
        self._require("personal_layers", self.personal_layers >= 1, "must be an integer of at least 1")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._fits(infos, "personal_layers")

    def shares(self, info: TensorInfo) -> bool:
        return info.layer <= info.layers - self.personal_layers and self.allowed(info)


@register
@dataclass(kw_only=True)
class LGFedAvg(_Layers):
    """LG-FedAvg (Liang et al., 2020, Algorithm 1): the reverse of FedPer. The lower layers are each client's own
    representation ℓ_m(x; θ_ℓ), the last `global_layers` layers θ_g are averaged by n_m; both train together.

    The paper starts from a few rounds of FedAvg in its experiments; here every client starts from the same initial
    model, as for the other methods. Two global layers, as its networks for images have. Batch-norm of the local layers
    is local; of the global layers (there is none between two linear layers) it would be averaged with them.

    Sharing the classifier is what defines the method: with `share_classifier=False`, where labels are permuted, only
    the other `global_layers − 1` layers are shared; with `global_layers=1` nothing is, which is Stand-Alone.
    """

    global_layers: int = 2

    name: ClassVar[str] = "lg-fedavg"
    paper: ClassVar[str] = "Liang et al., 2020"

    def check(self) -> None:
        super().check()
        self._require("global_layers", self.global_layers >= 1, "must be an integer of at least 1")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._fits(infos, "global_layers")

    def shares(self, info: TensorInfo) -> bool:
        return info.layer > info.layers - self.global_layers and self.allowed(info)


@register
@dataclass(kw_only=True)
class FedRep(Strategy):
    """FedRep (Collins et al., ICML 2021, Algorithm 1): in a round a client trains its head h_i with the downloaded
    representation φ fixed (τ local updates), then φ with the new head fixed; φ is uploaded and averaged.

    head_epochs: None for the federation's `epochs`; body_epochs: 1 as in the paper's experiments (10 and 1 or 5).
    Algorithm 1 makes a single gradient step on φ, the experiments train an epoch: the latter here. Its average over
    clients is plain, which is that by n_i for the equal sizes it assumes; here it is by n_i. The head is the
    classifier and personal by definition: `share_classifier` changes nothing. Batch-norm, not mentioned, belongs to φ:
    learned part and statistics are shared; statistics move with every forward pass, in the head's epochs too.
    """

    head_epochs: int | None = None
    body_epochs: int = 1

    name: ClassVar[str] = "fedrep"
    paper: ClassVar[str] = "Collins et al., ICML 2021"

    def check(self) -> None:
        super().check()
        for name in ("head_epochs", "body_epochs"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 0, "must be an integer of at least 0")

    def shares(self, info: TensorInfo) -> bool:
        return not info.classifier and self.allowed(info)

    def phases(self, epochs: int) -> list[Phase]:
        head = epochs if self.head_epochs is None else self.head_epochs
        return [
            Phase(head, trains=lambda info: info.classifier),
            Phase(self.body_epochs, trains=lambda info: not info.classifier),
        ]


@register
@dataclass(kw_only=True)
class FedBABU(Strategy):
    """FedBABU (Oh et al., ICLR 2022, Algorithm 1): clients train the body and FedAvg averages it; the head, as it was
    drawn at the start, is the same for all and is never trained. To be evaluated, a client's model is fine-tuned.

    finetune_epochs: τ_f, on the client's training samples with the federation's learning rate, before each evaluation,
    on a copy. The paper fine-tunes once, after the last round: what the last row of a client says. 0 leaves it out.
    finetune: what trains then: "all" (the paper's choice), "body" or "head" (its comparisons).

    The head is the classifier; it does not travel, and `share_classifier` changes nothing. `fed.models` are the models
    before fine-tuning; `Federation.join(how="fine-tune")` is the paper's for clients that are new. Batch-norm (of which
    its MobileNet has plenty, and the text says nothing) belongs to the body, statistics included.
    """

    finetune: str = setting("all", "What fine-tuning trains.", choices=("all", "body", "head"))
    finetune_epochs: int = setting(1, "Epochs of fine-tuning before an evaluation.", unit="epochs", at_least=0)

    name: ClassVar[str] = "fedbabu"
    paper: ClassVar[str] = "Oh et al., ICLR 2022"
    trains_head: ClassVar[bool] = False

    def shares(self, info: TensorInfo) -> bool:
        return not info.classifier and self.allowed(info)

    def phases(self, epochs: int) -> list[Phase]:
        def tuned(info: TensorInfo) -> bool:
            return self.finetune == "all" or info.classifier == (self.finetune == "head")

        training = [Phase(epochs, trains=lambda info: not info.classifier)]
        return training + [Phase(self.finetune_epochs, trains=tuned, adapts=True)] * (self.finetune_epochs > 0)


@register
@dataclass(kw_only=True)
class FedBN(Strategy):
    """FedBN (Li et al., ICLR 2021, Algorithm 1): FedAvg of every layer that is not batch-norm.

    Learned scale and shift and the running statistics stay with the client, by definition: `share_norm` and
    `share_norm_statistics` change nothing. The other normalisation layers (layer, group, RMS) are treated alike. The
    algorithm averages clients evenly; here by n_k, which is the same for the equal sizes of its experiments. On a model
    without normalisation it is FedAvg.
    """

    share_norm: bool = False
    share_norm_statistics: bool = False

    name: ClassVar[str] = "fedbn"
    paper: ClassVar[str] = "Li et al., ICLR 2021"

    def shares(self, info: TensorInfo) -> bool:
        return not info.norm and self.allowed(info)
