"""What a method tells a client to train, and what a loss of its own sees of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo

EVALUATION_BATCH = 1024


class Net:
    """The model with one client's tensors, as a `Phase.loss` sees it (see there).

    settings, generator: for `Phase.update`, how the client trains (`step.Settings`), and its own stream of random
    numbers, which also orders its batches. A loss has neither.
    """

    def __init__(
        self,
        model: nn.Module,
        params: dict[str, Tensor],
        start: State,
        rest: State | None,
        settings: Any = None,
        generator: torch.Generator | None = None,
    ):
        self.model, self.params, self.start, self.rest = model, params, start, rest
        self.settings, self.generator = settings, generator

    def __call__(
        self, x: Tensor, params: dict[str, Tensor] | None = None, *, evaluate: bool = False, **options
    ) -> Tensor:
        """The logits of x, with `params` in place of the model's tensors of those names if given.

        evaluate: in eval mode, however the model stands. options: arguments of the model's forward.
        """
        if evaluate and self.model.training:
            self.model.eval()
            try:
                return torch.cat([self(some, params, **options) for some in x.split(EVALUATION_BATCH)])
            finally:
                self.model.train()
        if self.rest is None and params is None:
            return self.model(x, **options)
        return functional_call(self.model, {**(self.rest or {}), **self.params, **(params or {})}, (x,), options)

    def gradient(
        self,
        x: Tensor,
        y: Tensor,
        params: dict[str, Tensor] | None = None,
        *,
        evaluate: bool = False,
        differentiable: bool = False,
    ) -> dict[str, Tensor]:
        """The gradient of the cross-entropy of net(x) and y for each tensor in `params`, at these values: by default
        all that train, as they are. evaluate: in eval mode."""
        return self.gradient_and_loss(x, y, params, evaluate=evaluate, differentiable=differentiable)[0]

    def gradient_and_loss(
        self,
        x: Tensor,
        y: Tensor,
        params: dict[str, Tensor] | None = None,
        *,
        evaluate: bool = False,
        differentiable: bool = False,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """`gradient`, and the cross-entropy, without gradient."""
        at = self.params if params is None else params
        if self.rest is not None:

            def objective(at, rest):
                net = Net(self.model, {**self.params, **at}, self.start, rest)
                return F.cross_entropy(net(x, evaluate=evaluate), y)

            grads, loss = grad_and_value(objective)(at, self.rest)
        else:
            if params is not None:
                at = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            loss = F.cross_entropy(self(x, None if params is None else at, evaluate=evaluate), y)
            grads = torch.autograd.grad(
                loss, list(at.values()), create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
            grads = dict(zip(at, grads, strict=True))
        return grads if differentiable else {name: g.detach() for name, g in grads.items()}, loss.detach()


def cross_entropy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a phase that says nothing else."""
    return F.cross_entropy(net(x), y)


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training: which tensors train, for how many epochs, with which loss.

    loss(net, x, y) → scalar, by default the cross-entropy of net(x) and y. `net` is the model with the client's
    tensors (see `Net`): `net(x)` are the logits, `net.params` its trained tensors by name, `net.start` everything
    the client had at the start of the round (the download and what `Strategy.extra` added).
    update(net, x, y) → tensors by name: computed before the epochs, without gradient, from all training samples of the
    client at once; they take the place of its model's or extra tensors (those also in `net.start`).
    lr: in place of the federation's. steps: at most so many batches in each epoch.
    adapts: no part of training, but run before each evaluation on a copy that is evaluated and thrown away.
    """

    epochs: int
    trains: Callable[[TensorInfo], bool] = lambda info: True
    loss: Callable[[Net, Tensor, Tensor], Tensor] | None = None
    update: Callable[[Net, Tensor, Tensor], State] | None = None
    lr: float | None = None
    steps: int | None = None
    adapts: bool = False
