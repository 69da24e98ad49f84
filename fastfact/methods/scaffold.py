"""SCAFFOLD: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (Karimireddy, Kale, Mohri, Reddi, Stich,
Suresh; ICML 2020).
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastfact.base.kinds import setting
from fastfact.federation.client.data import batches
from fastfact.federation.client.phase import EVALUATION_BATCH, Net, Phase
from fastfact.federation.client.train import parts, steps_of
from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, describe
from fastfact.methods.server_step import ServerStep

CONTROL = "control."


def _control(name: str) -> str:
    """The buffer of `Controlled` that belongs to a tensor of it."""
    return CONTROL + name.replace(".", "/")


class Controlled(nn.Module):
    """`model`, and the control variate of the server that travels with it: a buffer of `control` for each of the named
    parameters. forward(x) is the model's."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.model, self.control = model, nn.Module()
        for name in names:
            zero = torch.zeros_like(model.get_parameter(name).detach())
            self.control.register_buffer(_control(f"model.{name}").removeprefix(CONTROL), zero)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@register
@dataclass(kw_only=True)
class Scaffold(ServerStep):
    """SCAFFOLD (Algorithm 1): clients step by g_i(y_i) − c_i + c, a gradient corrected for how client i differs from
    all, and the server by x ← x + η_g/|S| Σ_i (y_i − x), c ← c + 1/N Σ_i (c_i⁺ − c_i), sums over the clients S of the
    round, of N.

    server_lr: η_g, 1 in the paper's experiments. option: of line 12, what c_i⁺ is.
    "II", as in its experiments: c_i − c + (x − y_i) / (K η_l) after K local steps, the mean of the gradients that the
    client took. With momentum β, of which the paper says nothing, a step moves y_i further than by its gradient:
    K η_l is then what a constant gradient of 1 makes of K steps, η_l Σ_{j=1}^K (1 − β^j) / (1 − β), so that c_i stays
    a (weighted) mean of gradients. Weight decay and L1 are part of these gradients.
    "I": the gradient of client i's loss at x, in eval mode, which takes another pass over its samples. It also stands
    in for II where no gradient can be read off the distance: with Adam, schedules, clipped gradients, and momentum that
    is kept from round to round. `head_first` is for a classifier that is not shared: its steps are not corrected; where
    they are all there are, option II leaves c_i as it is.

    Down: x and c. Up: y_i and c + c_i⁺ − c_i, which is (x − y_i) / (K η_l), so that the server reads off the change of
    either as it does that of a model, and clipping, robust rules and left-out clients mean the same for both. c_i stays
    at the client, and costs no bytes. Averages are plain, as the text has them.

    Controlled are the trained tensors that are shared. What the caller does not share trains by its own gradient, does
    not drift, and has no control variate. Batch-norm, of which the paper says nothing, is FedAvg's: its learned part is
    controlled, its statistics are averaged. A client that missed rounds starts from the present x and c with the c_i it
    had. `fed.models[k].model` is a client's model as it was built; beside it stand the control variates.
    """

    server_lr: float = setting(1.0, "Step of the server towards the mean of the clients' models, η_g.", above=0)
    option: str = setting(
        "II", "What a client's control variate is: option I or II of the algorithm.", choices=("I", "II")
    )

    name: ClassVar[str] = "scaffold"
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        infos = describe(model, self.classifier).values()
        return Controlled(model, [info.name for info in infos if self.allowed(info) and not info.buffer])

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        super().bind(infos)
        self._controlled = [name for name in infos if _control(name) in infos]
        fits = self.head_first == 0 or not any(infos[name].classifier for name in self._controlled)
        self._require("head_first", fits, "must be 0 where the classifier is shared, all of whose steps are corrected")

    def shares(self, info: TensorInfo) -> bool:
        return info.name.startswith(CONTROL) or self.allowed(info)

    def moves(self, info: TensorInfo) -> bool:
        return info.name.startswith(CONTROL) or super().moves(info)

    def extra(self, state: State) -> State:
        return {f"own/{name}": torch.zeros_like(state[name]) for name in self._controlled}

    def server_state(self, state: State) -> State:
        clients = torch.tensor(len(next(iter(state.values()))))
        return super().server_state(state) | {"clients": clients}

    def phases(self, epochs: int) -> list[Phase]:
        training = Phase(epochs, loss=self._loss)
        return [training, Phase(0, update=functools.partial(self._renew, training))]

    def _loss(self, net: Any, x: Tensor, y: Tensor) -> Tensor:
        # Linear in y_i, with the correction as its gradient; its value says nothing and is taken off.
        correction = sum(
            ((net.start[_control(name)] - net.start[f"own/{name}"]) * net.params[name]).sum()
            for name in self._controlled
            if name in net.params
        )
        loss = net.loss(x, y)
        return loss + (correction - correction.detach()) if isinstance(correction, Tensor) else loss

    def _renew(self, training: Phase, net: Any, x: Tensor, y: Tensor) -> State:
        how, start = net.settings, net.start
        plain = how.optimizer == "sgd" and not how.scheduled and how.max_grad_norm is None
        if self.option == "II" and plain and (how.optimizer_states == "dropped" or how.momentum == 0):
            steps = steps_of([training], parts(batches(len(y), how.batch_size), how.accumulate))
            if not steps:
                return {}
            length = how.lr * sum((1 - how.momentum**j) / (1 - how.momentum) for j in range(1, steps + 1))
            mean = {name: (start[name] - net.params[name]) / length for name in self._controlled}
            own = {name: start[f"own/{name}"] - start[_control(name)] + mean[name] for name in self._controlled}
        else:
            own = self._gradient(net, x, y)
            mean = {name: start[_control(name)] + own[name] - start[f"own/{name}"] for name in self._controlled}
        return {f"own/{name}": own[name] for name in own} | {_control(name): mean[name] for name in mean}

    def _gradient(self, net: Any, x: Tensor, y: Tensor) -> State:
        """Of the mean loss of the client's samples, at x."""
        params, rest = ({name: net.start[name] for name in some} for some in (net.params, net.rest))
        at = Net(net.model, params, net.start, rest, net.task)
        sums: State = {}
        for some, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
            for name, part in at.gradient(some, labels, evaluate=True).items():
                sums[name] = sums.get(name, 0) + part * (len(labels) / len(y))
        return {name: sums[name] for name in self._controlled}

    def step(self, x: State, mean: State, uploads: Uploads) -> State:
        part = len(uploads.clients) / int(uploads.server_state["clients"])
        return {
            name: start + (part if name.startswith(CONTROL) else self.server_lr) * (mean[name] - start)
            for name, start in x.items()
        }
