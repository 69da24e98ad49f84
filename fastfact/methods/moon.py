"""MOON: "Model-Contrastive Federated Learning" (Li, He, Song; CVPR 2021)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfact.base.kinds import setting
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, classifier_of

PREVIOUS = "previous/"


@register
@dataclass(kw_only=True)
class MOON(Strategy):
    """MOON (Algorithm 1): FedAvg whose clients minimise L_CE + μ L_con (eq. 4), where

    L_con = −log (exp(sim(z, z_glob) / τ) / (exp(sim(z, z_glob) / τ) + exp(sim(z, z_prev) / τ))) (eq. 3),

    z is the representation of a sample by the model in training, z_glob that by the downloaded model, z_prev that by
    the client's own model of the last time it took part; sim is the cosine. L_con is averaged over the batch.

    contrast: μ (tuned in {0.1, 1, 5, 10}). temperature: τ (0.5 in all experiments).

    The representation is what the classifier gets to see. The paper's networks have a projection head of two layers
    before the classifier and take its output: such a head is part of the model one builds. The first time a client
    takes part its previous model is the initial one. Both fixed models run in eval mode. Batch-norm, of which the paper
    says nothing, is shared as in FedAvg, learned part and statistics; what the caller does not share is, in the
    downloaded model too, the client's own at the start of the round. The previous model stays at the client, and costs
    no bytes.
    """

    contrast: float = setting(1.0, "Weight μ of the contrastive loss.", at_least=0)
    temperature: float = setting(0.5, "Temperature τ of the contrastive loss.", above=0)

    name: ClassVar[str] = "moon"
    paper: ClassVar[str] = "Li et al., CVPR 2021"

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        self._classifier = classifier_of(model, self.classifier)
        if self._classifier is None:
            raise ValueError(f"{self.name}: the model has no layer with a weight, so no classifier whose input to take")
        return model

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._names = list(infos)

    def extra(self, state: State) -> State:
        return {PREVIOUS + name: state[name].clone() for name in self._names}

    def receive(self, state: State, mixed: State) -> State:
        # In this order: the tensors are overwritten in place.
        return {PREVIOUS + name: state[name] for name in self._names} | mixed

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss)]

    def _seen(self, net: Any, x: Tensor, params: State | None = None) -> tuple[Tensor, Tensor]:
        """The logits of x and what the classifier gets to see [n, d]; in eval mode where `params` are given."""
        seen: list[Tensor] = []
        classifier = net.model.get_submodule(self._classifier)
        handle = classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(1)))
        try:
            logits = net(x, params, evaluate=params is not None)
        finally:
            handle.remove()
        return logits, torch.cat(seen)

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            downloaded = self._seen(net, x, {name: net.start[name] for name in self._names})[1]
            previous = self._seen(net, x, {name: net.start[PREVIOUS + name] for name in self._names})[1]
        logits, z = self._seen(net, x)
        near, far = F.cosine_similarity(z, downloaded), F.cosine_similarity(z, previous)
        return net.task.loss(logits, y) + self.contrast * F.softplus((far - near) / self.temperature).mean()
