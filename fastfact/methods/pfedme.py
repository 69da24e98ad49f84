"""pFedMe: "Personalized Federated Learning with Moreau Envelopes" (Dinh, Tran, Nguyen; NeurIPS 2020)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.base.kinds import setting
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State
from fastfact.methods.server_step import ServerStep


@register
@dataclass(kw_only=True)
class PFedMe(ServerStep):
    """pFedMe (Algorithm 1): clients minimise F_i(w) = min_θ f_i(θ) + λ/2 ‖θ − w‖² (eq. 3). On each batch a client makes
    its personal model θ̃ of w, by `inner_steps` steps θ ← θ − inner_lr (∇f̃_i(θ) + λ (θ − w)) from w (eq. 7), then
    w ← w − η λ (w − θ̃) (line 8). The server takes w ← (1 − β) w + β Σ_i w_i / |S| (line 11).

    prox: λ (15 in most of its experiments). inner_steps: K (5). inner_lr: the paper solves for θ̃ to an accuracy ν by a
    first-order method of the reader's choice, here gradient descent. server_lr: β, 1 or 2 in its experiments. η is the
    federation's `lr`, whose momentum and weight decay are those of w; η λ is to stay below 1 (below 1 − momentum).

    What is evaluated is θ, made of the trained w (or, before training, the download) on a batch of training samples;
    `fed.models` and the upload are w. Clients are averaged evenly, as the text has it. The loss in the history is
    F_i(w), f_i in eval mode. Batch-norm, of which the paper says nothing, is shared as in FedAvg: its learned part is
    in w and θ, its statistics move with every inner step. What the caller does not share is personal in w already, and
    gets the same two steps.
    """

    prox: float = setting(15.0, "Strength λ of the pull of the personal model to w.", above=0)
    inner_steps: int = setting(5, "Steps to the personal model on a batch, K.", unit="steps", at_least=1)
    inner_lr: float = setting(0.01, "Learning rate of these steps.", above=0)
    server_lr: float = setting(1.0, "Step of the server towards the mean of the clients' models, β.", above=0)

    name: ClassVar[str] = "pfedme"
    paper: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    trains_head: ClassVar[bool] = False

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, loss=self._loss), Phase(0, update=self._personalize, adapts=True)]

    def _personal(self, net: Any, x: Tensor, y: Tensor) -> State:
        w = {name: tensor.detach() for name, tensor in net.params.items()}
        theta = dict(w)
        for _ in range(self.inner_steps):
            gradient = net.gradient(x, y, theta)
            theta = {
                name: tensor - self.inner_lr * (gradient[name] + self.prox * (tensor - w[name]))
                for name, tensor in theta.items()
            }
        return theta

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        theta = self._personal(net, x, y)
        with torch.no_grad():
            loss = net.loss(x, y, theta, evaluate=True)
        return loss + self.prox / 2 * sum((net.params[name] - theta[name]).square().sum() for name in theta)

    def _personalize(self, net: Any, x: Tensor, y: Tensor) -> State:
        batch = torch.randperm(len(y), generator=net.generator)[: net.settings.batch_size].to(y.device)
        return self._personal(net, x[batch], y[batch])

    def step(self, x: State, mean: State, uploads: Uploads) -> State:
        return {name: start + self.server_lr * (mean[name] - start) for name, start in x.items()}
