"""Methods whose clients train two models: one that all share, and one of their own beside it.

Ditto: "Ditto: Fair and Robust Federated Learning Through Personalization" (Li, Hu, Beirami, Smith; ICML 2021).
APFL: "Adaptive Personalized Federated Learning" (Deng, Kamani, Mahdavi; 2020).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fastfact.base.kinds import setting
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, copy_of, describe, first_number

SHARED, PERSONAL = "shared.", "personal."


class TwoModels(nn.Module):
    """`shared`, and `personal`, a copy to start with. forward(x) is that of the personal one, with part="shared" of the
    other."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.shared, self.personal = model, copy_of(model)

    def forward(self, x: Tensor, part: str = "personal") -> Tensor:
        return self.shared(x) if part == "shared" else self.personal(x)


class Interpolated(TwoModels):
    """forward(x) is that of the model whose every parameter is α v + (1 − α) w, v of `personal` and w of `shared`, with
    the buffers of `personal`. It has a gradient for v alone. `alpha` is a buffer, [1]."""

    def __init__(self, model: nn.Module, alpha: float):
        super().__init__(model)
        like = first_number(model)
        self.register_buffer("alpha", torch.full((1,), alpha, dtype=like.dtype, device=like.device))
        # Where these are swapped for a client's own, they may be tensors that take no gradient.
        self.mixed = [name for name, param in model.named_parameters() if param.requires_grad]

    def forward(self, x: Tensor, part: str = "personal") -> Tensor:
        if part == "shared":
            return self.shared(x)
        v, w = dict(self.personal.named_parameters()), dict(self.shared.named_parameters())
        mixed = {name: w[name].detach() + self.alpha * (v[name] - w[name].detach()) for name in self.mixed}
        return functional_call(self.personal, mixed, (x,))


@dataclass(kw_only=True)
class _TwoModels(Strategy):
    trains_compact: ClassVar[bool] = False
    trains_head: ClassVar[bool] = False

    def pair(self, model: nn.Module) -> TwoModels:
        """The model that clients train."""
        return TwoModels(model)

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        self._classifiers = {name for name, info in describe(model, self.classifier).items() if info.classifier}
        return self.pair(model)

    def allowed(self, info: TensorInfo) -> bool:
        # Layers are counted over both models: `info.classifier` is that of the personal one.
        if not self.share_classifier and info.name.removeprefix(SHARED) in self._classifiers:
            return False
        return super().allowed(info)

    def shares(self, info: TensorInfo) -> bool:
        return info.name.startswith(SHARED) and self.allowed(info)


@register
@dataclass(kw_only=True)
class Ditto(_TwoModels):
    """Ditto (Algorithm 1): FedAvg trains the shared w; beside it, at each client, v_k ← v_k − η (∇F_k(v_k) +
    λ (v_k − w^t)), w^t the download. The personal v_k is evaluated.

    prox: λ, which the paper tunes for each data set: 0 is training alone, a large one FedAvg. personal_epochs: s, the
    local epochs of v_k; None for as many as those of w.

    The solver of w is FedAvg's: local SGD from w^t and the mean by n_k (the general form is Algorithm 2, the weighting
    is left open). w trains first, then v_k, on further draws of the client's batches; neither sees what the other has
    made of the round. v_k starts from the initial model; a client that misses rounds keeps its v_k.

    The pull is on the parameters that were downloaded: for what the caller does not share (the classifier) there is no
    w^t, and v_k is free. Batch-norm, of which the paper says nothing: w's is shared, statistics included, v_k has
    statistics of its own, and its learned part is pulled. `fed.models[k]` evaluates v_k, which is its `personal`.
    """

    prox: float = setting(0.1, "Strength λ of the pull of the personal model to the shared one.", at_least=0)
    personal_epochs: int | None = setting(
        None, "Local epochs of the personal model [default: those of the shared one].", unit="epochs", at_least=0
    )

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "Li et al., ICML 2021"

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._pulled = [n.removeprefix(SHARED) for n, info in infos.items() if self.shares(info) and not info.buffer]

    def phases(self, epochs: int) -> list[Phase]:
        own = epochs if self.personal_epochs is None else self.personal_epochs
        return [
            Phase(epochs, trains=lambda info: info.name.startswith(SHARED), loss=_loss_of_shared),
            Phase(own, trains=lambda info: info.name.startswith(PERSONAL), loss=self._loss),
        ]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        apart = [net.params[PERSONAL + name] - net.start[SHARED + name] for name in self._pulled]
        return net.loss(x, y) + self.prox / 2 * sum(part.square().sum() for part in apart)


@register
@dataclass(kw_only=True)
class APFL(_TwoModels):
    """APFL (Algorithm 1): a client's model is v̄ = α v + (1 − α) w, of a shared w that FedAvg trains and a personal v.
    In each local step w ← w − η ∇f(w) and v ← v − η ∇_v f(v̄), both on the same batch.

    alpha: the α all clients start from. adaptive: each client's α moves by α ← α − η ⟨v − w, ∇f(v̄)⟩ (eq. 10), kept
    within 0 and 1; once in a round, from the download, on one batch, as in the authors' published code (the text has an
    α for each step and does not say how it stays in its range).

    ∇_v f(v̄) = α ∇f(v̄): the factor is there, as the derivative by v says. w is not moved by the loss of v̄. Clients
    are averaged by n_k (the paper: evenly, over clients of equal size). v and w start from the same model; a client
    that misses rounds keeps its v and α.

    Interpolated are the parameters, factor by factor where layers are factorized. Batch-norm, of which the paper says
    nothing: its learned part is interpolated like every weight, v̄ has statistics of its own, those of w are shared.
    With a classifier that is not shared, w's is the client's own too. `fed.models[k]` evaluates v̄.
    """

    alpha: float = setting(0.5, "Share of the personal model that a client starts with, α.", at_least=0, at_most=1)
    adaptive: bool = setting(True, "Whether each client learns its own α.")

    name: ClassVar[str] = "apfl"
    paper: ClassVar[str] = "Deng et al., 2020"

    def pair(self, model: nn.Module) -> TwoModels:
        return Interpolated(model, self.alpha)

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, update=self._adapt if self.adaptive else None, loss=self._loss)]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return _loss_of_shared(net, x, y) + net.loss(x, y)

    def _adapt(self, net: Any, x: Tensor, y: Tensor) -> State:
        batch = torch.randperm(len(y), generator=net.generator)[: net.settings.batch_size].to(y.device)
        alpha = net.rest["alpha"]
        gradient = net.gradient(x[batch], y[batch], {"alpha": alpha}, evaluate=True)["alpha"]
        return {"alpha": (alpha - net.lr * gradient).clamp(0, 1)}


def _loss_of_shared(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return net.loss(x, y, part="shared")
