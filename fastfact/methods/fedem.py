"""FedEM: "Federated Multi-Task Learning under a Mixture of Distributions" (Marfoq, Neglia, Bellet, Kameni, Vidal;
NeurIPS 2021).
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, describe, first_number, frozen, is_norm


class Mixture(nn.Module):
    """M models and their weights `pi` [M] (a buffer): forward(x) is log Σ_m π_m softmax_m(x), [n, c]; with apart=True
    the log-probabilities of each, [n, M, c].

    The first component is the model as it was built, the others are drawn anew (`reset_parameters` of its layers). In a
    network that is frozen in part this is what trains, without the norms, in which nothing is random: the frozen
    parameters are the same for all components.
    """

    def __init__(self, model: nn.Module, count: int):
        super().__init__()
        self.components = nn.ModuleList([model, *(_drawn_anew(model) for _ in range(count - 1))])
        like = first_number(model)
        self.register_buffer("pi", torch.full((count,), 1 / count, dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor, apart: bool = False) -> Tensor:
        each = torch.stack([component(x).log_softmax(-1) for component in self.components], dim=1)
        return each if apart else (each + self.pi.log()[:, None]).logsumexp(1)


def _drawn_anew(model: nn.Module) -> nn.Module:
    """A copy of `model` with the same frozen parameters."""
    copied, fixed = copy.deepcopy(model), frozen(model)
    for module in copied.modules():
        trains = any(param.requires_grad for param in module.parameters()) and not is_norm(module)
        if callable(getattr(module, "reset_parameters", None)) and (trains or not fixed):
            module.reset_parameters()
    # What of a layer is frozen was drawn with the rest.
    same = {id(param): fixed[name] for name, param in frozen(copied).items()}
    return copy.deepcopy(copied, same) if same else copied


@register
@dataclass(kw_only=True)
class FedEM(Strategy):
    """FedEM (Algorithm 1): every client's data are a mixture of `components` distributions, whose models h_θm all
    clients share; the weights π_km are personal. A client's model is Σ_m π_km softmax(h_θm(x)).

    In a round, from the downloaded θ: E-step q_i(m) ∝ π_km exp(−ℓ(h_θm(x_i), y_i)); M-step π_km = mean of q_i(m), and
    θ_m minimises the mean of q_i(m) ℓ(h_θm(x_i), y_i) by the local epochs, q held fixed. The θ_m are averaged by n_k.

    Down and up: all M models. q is computed batch by batch from the θ and π of the start of the round, in eval mode and
    (with augmentation) from the augmented sample; π from the samples as they are. The components start apart from each
    other (the text: random initialisation), or they would stay equal.

    The sharing of classifiers and norms is that of all components alike; batch-norm (not mentioned) is shared as in
    FedAvg by default. With `share_classifier=False` a client's M classifiers are its own.
    """

    components: int = 3

    name: ClassVar[str] = "fedem"
    paper: ClassVar[str] = "Marfoq et al., NeurIPS 2021"
    classifies: ClassVar[bool] = True
    trains_head: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self._require("components", self.components >= 1, "must be an integer of at least 1")

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        self._classifiers = {name for name, info in describe(model, self.classifier).items() if info.classifier}
        return Mixture(model, self.components)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._names = list(infos)

    def allowed(self, info: TensorInfo) -> bool:
        # Layers are counted over all components: `info.classifier` is that of the last one only.
        if not self.share_classifier and info.name.split(".", 2)[-1] in self._classifiers:
            return False
        return super().allowed(info)

    def shares(self, info: TensorInfo) -> bool:
        return info.name != "pi" and self.allowed(info)

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, update=self._mix_weights, loss=self._loss)]

    def _posterior(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        """q [n, M] of the models and weights of the start of the round."""
        with torch.no_grad():
            start = {name: net.start[name] for name in self._names}
            return (_of_labels(net(x, start, evaluate=True, apart=True), y) + start["pi"].log()).softmax(1)

    def _mix_weights(self, net: Any, x: Tensor, y: Tensor) -> State:
        return {"pi": self._posterior(net, x, y).mean(0)}

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        return -(self._posterior(net, x, y) * _of_labels(net(x, apart=True), y)).sum(1).mean()


def _of_labels(each: Tensor, y: Tensor) -> Tensor:
    """[n, M, c] → [n, M], the entries of the labels y [n]."""
    return each.gather(2, y[:, None, None].expand(-1, each.shape[1], 1)).squeeze(2)
