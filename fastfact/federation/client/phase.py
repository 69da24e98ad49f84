"""What a method tells a client to train, and what a loss of its own sees of the model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils._pytree import tree_map

from fastfact.federation.client.task import CLASSES, Task
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo

EVALUATION_BATCH = 1024


class Net:
    """The model with one client's tensors, as a `Phase.loss` sees it (see there).

    settings, generator, lr: for `Phase.update`, how the client trains (`step.Settings`), its own stream of random
    numbers, which also orders its batches, and the learning rate of its next step. A loss has none of them.
    """

    def __init__(
        self,
        model: nn.Module,
        params: dict[str, Tensor],
        start: State,
        rest: State | None,
        task: Task = CLASSES,
        settings: Any = None,
        generator: torch.Generator | None = None,
        lr: float = 0.0,
    ):
        self.model, self.params, self.start, self.rest, self.task = model, params, start, rest, task
        self.settings, self.generator, self.lr = settings, generator, lr

    def __call__(
        self, x: Tensor, params: dict[str, Tensor] | None = None, *, evaluate: bool = False, **options
    ) -> Tensor:
        """What the model gives for x, as logits [n, classes], with `params` in place of its tensors of those names if
        given.

        evaluate: in eval mode, however the model stands. options: arguments of the model's forward.
        """
        if evaluate and self.model.training:
            self.model.eval()
            try:
                return torch.cat([self(some, params, **options) for some in x.split(EVALUATION_BATCH)])
            finally:
                self.model.train()
        tensors = None
        if self.rest is not None or params is not None:
            tensors = {**(self.rest or {}), **self.params, **(params or {})}
        return self._of(x, tensors, options)

    def _of(self, x: Tensor, tensors: State | None, options: dict | None = None) -> Tensor:
        output = self.task.output(self.model, x, tensors, options)
        # Autocast leaves some losses in half precision.
        return tree_map(Tensor.float, output) if torch.is_autocast_enabled(x.device.type) else output

    def loss(self, x: Tensor, y: Tensor, params: dict[str, Tensor] | None = None, **options) -> Tensor:
        """The loss of the federation (`Federation(loss=)`) of net(x, params, …) and y, a mean over the batch."""
        return self.task.loss(self(x, params, **options), y)

    def gradient(
        self,
        x: Tensor,
        y: Tensor,
        params: dict[str, Tensor] | None = None,
        *,
        evaluate: bool = False,
        differentiable: bool = False,
    ) -> dict[str, Tensor]:
        """The gradient of `loss` of x and y for each tensor in `params`, at these values: by default
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
        """`gradient`, and the loss, without gradient."""
        at = self.params if params is None else params
        if self.rest is not None:

            def objective(at, rest):
                net = Net(self.model, {**self.params, **at}, self.start, rest, self.task)
                return net.loss(x, y, evaluate=evaluate)

            grads, loss = grad_and_value(objective)(at, self.rest)
        else:
            if params is not None:
                at = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
            loss = self.loss(x, y, None if params is None else at, evaluate=evaluate)
            grads = torch.autograd.grad(
                loss, list(at.values()), create_graph=differentiable, allow_unused=True, materialize_grads=True
            )
            grads = dict(zip(at, grads, strict=True))
        return grads if differentiable else {name: g.detach() for name, g in grads.items()}, loss.detach()


def usual(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a phase that says nothing else."""
    return net.loss(x, y)


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training: which tensors train, for how many epochs, with which loss.

    loss(net, x, y) → scalar, by default `net.loss(x, y)`: that of the federation, of net(x) and y. `net` is the model
    with the client's tensors (see `Net`): `net(x)` is what it gives, as logits, `net.params` its trained tensors by
    name, `net.start` everything the client had at the start of the round (the download and what `Strategy.extra`
    added).
    update(net, x, y) → tensors by name: computed before the epochs, without gradient, from all training samples of the
    client at once; they take the place of its model's or extra tensors (those also in `net.start`).
    lr: in place of the federation's, and constant. steps: at most so many local steps in each epoch.
    adapts: no part of training, but run before each evaluation on a copy that is evaluated and thrown away.
    """

    epochs: int
    trains: Callable[[TensorInfo], bool] = lambda info: True
    loss: Callable[[Net, Tensor, Tensor], Tensor] | None = None
    update: Callable[[Net, Tensor, Tensor], State] | None = None
    lr: float | None = None
    steps: int | None = None
    adapts: bool = False
