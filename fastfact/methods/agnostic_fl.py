"""AFL: "Agnostic Federated Learning" (Mohri, Sivek, Suresh; ICML 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastfact.federation.client.phase import Phase
from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.state import State


def project_to_simplex(x: Tensor) -> Tensor:
    """The nearest point (Euclidean) of {λ ≥ 0, Σ λ = 1} to x [n]."""
    ordered = x.sort(descending=True).values
    excess = ordered.cumsum(0) - 1
    count = torch.arange(1, len(x) + 1, device=x.device)
    last = int((ordered - excess / count > 0).sum()) - 1
    return (x - excess[last] / (last + 1)).clamp(min=0)


@register
@dataclass(kw_only=True)
class AgnosticFL(Strategy):
    """AFL: min_w max_λ Σ_k λ_k L_k(w) over the simplex (the agnostic loss of §2), by the stochastic descent-ascent
    of the Stochastic-AFL algorithm: w ← w − γ_w ∇_w, λ ← Π(λ + γ_λ (L_1(w), …, L_K(w))), both at the same (w, λ).

    mixture_lr: γ_λ. λ starts even. Every client is a domain of the paper.

    The paper takes single gradient steps: with one local step per round Σ_k λ_k w_k is its update of w exactly, more
    local epochs make it FedAvg's with the weights λ. The gradient in λ is the loss of the *downloaded* model on all the
    training samples of a client (without dropout or batch statistics: in eval mode), a number that travels with the
    upload. Clients that do not take part in a round keep their λ before the projection; those that do are weighted by
    λ_k over their sum (evenly, if that is zero).

    The paper has one global model. Without the sharing of classifier or norms the rest is still weighted by λ.
    Batch-norm (not mentioned): learned part and statistics are averaged with the weights λ too.
    """

    mixture_lr: float = 0.1

    name: ClassVar[str] = "agnostic-fl"
    paper: ClassVar[str] = "Mohri et al., ICML 2019"
    newcomers_upload: ClassVar[bool] = False
    trains_head: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self._require("mixture_lr", 0 <= self.mixture_lr < float("inf"), "must be a number of at least 0")

    def extra(self, state: State) -> State:
        like = next(tensor for tensor in state.values() if tensor.is_floating_point())
        return {"loss": like.new_zeros(len(like), 1)}

    def key(self, state: State, encoder: Any) -> State:
        return {"loss": state["loss"]}

    def server_state(self, state: State) -> State:
        k = len(next(iter(state.values())))
        return {"mixture": torch.full((k,), 1 / k, dtype=torch.float64)}

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, update=self._measure)]

    def _measure(self, net: Any, x: Tensor, y: Tensor) -> State:
        return {"loss": net.loss(x, y, evaluate=True)[None]}

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        # Guests come after the mix, which has moved λ on.
        some = uploads.server_state["mixture" if guests is None else "mixed"].cpu()[uploads.clients]
        rows = len((guests or uploads).clients)
        return mixing.fedavg_matrix(some if some.sum() > 0 else torch.ones_like(some), rows)

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        mixed = super().mix(uploads, names, guests)
        if guests is not None:
            return mixed
        mixture = uploads.server_state["mixture"].cpu()
        ascended = mixture.clone()
        ascended[uploads.clients] += self.mixture_lr * uploads.state["loss"].flatten().double().cpu()
        uploads.server_state |= {"mixture": project_to_simplex(ascended), "mixed": mixture}
        return mixed
