"""FedAdam, FedYogi and FedAdagrad: "Adaptive Federated Optimization" (Reddi, Charles, Zaheer, Garrett, Rush, Konečný,
Kumar, McMahan; ICLR 2021).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fastfact.base.kinds import setting
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.state import State
from fastfact.methods.server_step import ServerStep


@register
@dataclass(kw_only=True)
class FedAdam(ServerStep):
    """FedOpt with an adaptive server (Algorithm 2): the mean change Δ_t of the clients' models is the gradient of an
    optimizer at the server,

    m_t = β₁ m_{t−1} + (1 − β₁) Δ_t, x_{t+1} = x_t + η m_t / (√v_t + τ), and by `server_optimizer`
    "adam": v_t = β₂ v_{t−1} + (1 − β₂) Δ_t²;
    "yogi": v_t = v_{t−1} − (1 − β₂) Δ_t² sign(v_{t−1} − Δ_t²);
    "adagrad": v_t = v_{t−1} + Δ_t².

    server_lr: η. beta1, beta2: β₁, β₂, .9 and .99 in its experiments; None for the β₁ it has there: Adagrad has no
    momentum, 0. tau: τ, the degree of adaptivity (10⁻³ in most). v starts at τ², the least the algorithm allows
    (v_{−1} ≥ τ²), m at 0; neither is corrected for its start. A number of x moves by about η in a round, however little
    the clients did, so that η must suit the model.

    The algorithm averages Δ evenly and leaves weights to the reader; here they are n_k, as in FedAvg, which this is
    compared with. Batch-norm (not mentioned): its learned part moves like every weight, its statistics are averaged.
    Tensors that the caller does not share stay with the client. What a client changed is the download subtracted from
    its upload: a wire that rounds, or `after_mix`, changes both sides alike and is no part of x; nor is what the server
    did while a client was at work, where rounds are asynchronous.
    """

    server_lr: float = setting(0.01, "Learning rate of the server, η.", above=0)
    server_optimizer: str = setting("adam", "The server's optimizer.", choices=("adam", "yogi", "adagrad"))
    beta1: float | None = setting(
        None, "Decay of the mean of the changes, β₁ [default: 0 for adagrad, else 0.9].", at_least=0, below=1
    )
    beta2: float = setting(0.99, "Decay of the mean of their squares, β₂.", at_least=0, below=1)
    tau: float = setting(1e-3, "Degree of adaptivity τ: the smaller, the more.", above=0)

    name: ClassVar[str] = "fedadam"
    paper: ClassVar[str] = "Reddi et al., ICLR 2021"
    needs_start: ClassVar[bool] = True

    def server_state(self, state: State) -> State:
        x = super().server_state(state)
        moments = {name.replace("global/", "m/", 1): torch.zeros_like(tensor) for name, tensor in x.items()}
        squares = {name.replace("global/", "v/", 1): torch.full_like(tensor, self.tau**2) for name, tensor in x.items()}
        return x | moments | squares

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        return Strategy.weights(self, uploads, guests)

    def step(self, x: State, mean: State, uploads: Uploads) -> State:
        known, new, beta1 = uploads.server_state, {}, self.beta1
        if beta1 is None:
            beta1 = 0.0 if self.server_optimizer == "adagrad" else 0.9
        for name, start in x.items():
            change = mean[name] - start
            square, v = change.square(), known[f"v/{name}"]
            m = beta1 * known[f"m/{name}"] + (1 - beta1) * change
            if self.server_optimizer == "adam":
                v = self.beta2 * v + (1 - self.beta2) * square
            elif self.server_optimizer == "yogi":
                v = v - (1 - self.beta2) * square * (v - square).sign()
            else:
                v = v + square
            known |= {f"m/{name}": m, f"v/{name}": v}
            new[name] = start + self.server_lr * m / (v.sqrt() + self.tau)
        return new
