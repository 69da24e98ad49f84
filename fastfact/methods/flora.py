"""FLoRA: "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations" (Wang, Shen, He,
Sun, Wang, Lyu, Li; NeurIPS 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fastfact import ops
from fastfact.base.formats import LAYOUTS, lowrank_shape
from fastfact.federation.client.phase import Phase
from fastfact.federation.server.strategy import Uploads, register
from fastfact.federation.state import State, generator_for
from fastfact.federation.tensors import TensorInfo
from fastfact.methods.lora import FACTORS, Adapters
from fastfact.nn.convert import factorized_layers
from fastfact.nn.specs import LowRank

REPORTED, TOTAL, STACK = "reported", "total/", "stack/"


@register
@dataclass(kw_only=True)
class FLoRA(Adapters):
    """FLoRA (Wang et al., 2024, Algorithm 1): the server stacks the clients' adapters, A = [p_1 A_1; …; p_m A_m] and
    B = [B_1, …, B_m], p_k = n_k / N, so that B A = Σ p_k B_k A_k, nothing lost (eq. 4–6). Every client merges the stack
    into its σ, σ ← σ + s · B A, and begins the round with a new A and B = 0.

    Down is as large as all uploads together. The new A is one draw for all, and comes with the stack. As σ changes at
    the clients it is part of their states, though it does not train nor travel.

    A client that missed rounds is sent the stacks it missed; the server keeps those that somebody who has downloaded
    still lacks. A newcomer is sent their sum, as a pair of factors of full rank. There are no asynchronous rounds
    (`buffer`), whose clients would each lack others, and no mean that a `rule` could replace.
    """

    name: ClassVar[str] = "flora"
    paper: ClassVar[str] = "FLoRA, NeurIPS 2024"
    trains_head: ClassVar[bool] = False

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        self._layers = {}
        for path, layer in factorized_layers(model).items():
            if isinstance(layer.spec, LowRank):
                layer.sigma.requires_grad_(True)
                start = f"{path}." if path else ""
                self._layers[start] = layer.size, layer.spec.layout_of(layer.size), float(layer.spec.scaling)
        return model

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        super().bind(infos)
        # A layer whose factors the policy keeps at the client is none that is stacked.
        self._layers = {start: how for start, how in self._layers.items() if self.shares(infos[f"{start}A"])}

    def shares(self, info: TensorInfo) -> bool:
        return info.role != "sigma" and self.allowed(info)

    def stacks(self, info: TensorInfo) -> bool:
        return info.name.removesuffix(info.role) in self._layers and info.role in FACTORS

    def phases(self, epochs: int) -> list[Phase]:
        return [Phase(epochs, trains=lambda info: info.role != "sigma")]

    def server_state(self, state: State) -> State:
        totals = {f"{TOTAL}{start}": torch.zeros_like(state[f"{start}sigma"][0]) for start in self._layers}
        return totals | {REPORTED: torch.zeros(len(next(iter(state.values()))), dtype=torch.long)}

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        factors = {f"{start}{factor}" for start in self._layers for factor in FACTORS}
        mixed = super().mix(uploads, [name for name in names if name not in factors], guests)
        if guests is None:
            self._stack(uploads)
            rounds = [[uploads.round]] * len(uploads.here)
        else:
            rounds = [self._missed(client, uploads.server_state) for client in guests.clients]
        for start in self._layers:
            mixed |= self._sent(start, rounds, uploads)
        return mixed

    def _stack(self, uploads: Uploads) -> None:
        """Stack the uploads of a round, and forget the stacks that nobody lacks."""
        kept = uploads.server_state
        share = torch.tensor(uploads.samples, dtype=torch.float64) / sum(uploads.samples)
        for start in self._layers:
            a, b = uploads.state[f"{start}A"], uploads.state[f"{start}B"]
            a = a * share.to(a).view(-1, 1, 1)
            # Uploads are where clients hold them, until they train again.
            kept |= {f"{STACK}{uploads.round}/{start}A": a, f"{STACK}{uploads.round}/{start}B": b.clone()}
            kept[f"{TOTAL}{start}"] = self._merged(start, kept[f"{TOTAL}{start}"][None], a[None], b[None])[0]
        # What a client trained in the round had the stacks of all rounds before.
        reported = kept[REPORTED].cpu().clone()
        trained = [*uploads.clients, *uploads.left_out]
        reported[[client for client in trained if client < len(reported)]] = uploads.round
        kept[REPORTED] = reported
        least = int(reported[reported > 0].min())
        for name in [name for name in kept if name.startswith(STACK) and _round_of(name) < least]:
            del kept[name]

    def _missed(self, client: int, kept: State) -> list[int]:
        """The rounds whose stacks a client lacks; empty for one that has the initial σ."""
        reported = kept[REPORTED]
        last = int(reported[client]) if client < len(reported) else 0
        return sorted({_round_of(name) for name in kept if name.startswith(STACK) and _round_of(name) >= last > 0})

    def _sent(self, start: str, rounds: Sequence[Sequence[int]], uploads: Uploads) -> State:
        """The stacks of these rounds for each client [m, n, …], at their end the new A, and zeros for B."""
        kept, names = uploads.server_state, [f"{start}{factor}" for factor in FACTORS]
        rank, columns = uploads.state[names[0]].shape[1:]
        generator = generator_for(uploads.seed, uploads.round, -1, f"{self.name}/{start}")
        # As `LowRank.init` draws it.
        new = torch.randn(1, rank, columns, generator=generator, dtype=torch.float64) / (3 * columns) ** 0.5
        pairs = {}
        # Where none of the clients that reported is: of this round, for nobody.
        for some in map(tuple, rounds or [[uploads.round]]):
            if some and some not in pairs:
                a, b = (torch.cat([kept[f"{STACK}{round}/{name}"] for round in some]) for name in names)
            elif some not in pairs:
                a, b = self._parts(start, kept[f"{TOTAL}{start}"], rank)
            else:
                continue
            pairs[some] = torch.cat([a, new.to(a)]), torch.cat([b, torch.zeros_like(b[:1])])
        # All that are served at a time lack the same: those that reported the last round, or one guest.
        (stacks,) = pairs.values()
        return {name: t.expand(len(rounds), *t.shape) for name, t in zip(names, stacks, strict=True)}

    def _parts(self, start: str, total: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """A stack that makes a weight without loss: its rows or columns, `rank` at a time, and the identity's."""
        size, layout, scaling = self._layers[start]
        rows, columns = lowrank_shape(LAYOUTS[layout], size)
        if layout != "view":
            total = total.T if len(size) == 2 else total.permute(1, 2, 0, 3)
        matrix = total.reshape(rows, columns) / scaling
        least = min(rows, columns)
        one = torch.eye(least).to(matrix)
        a, b = (matrix, one) if rows <= columns else (one, matrix)
        more = -least % rank
        a, b = nn.functional.pad(a, (0, 0, 0, more)), nn.functional.pad(b, (0, more))
        return a.unflatten(0, (-1, rank)), b.unflatten(1, (-1, rank)).transpose(0, 1)

    def _merged(self, start: str, sigma: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """σ [k, …] and the product of stacks a [k, n, r, …], b [k, n, …, r]."""
        size, layout, scaling = self._layers[start]
        if a.stride(0) == b.stride(0) == 0:
            a, b = a[:1], b[:1]
        a, b = a.flatten(1, 2), b.transpose(1, 2).flatten(2)
        return sigma + ops.lowrank_weight(None, a.contiguous(), b.contiguous(), size, layout=layout, scaling=scaling)

    def receive(self, state: State, mixed: State) -> State:
        mixed = dict(mixed)
        for start in self._layers:
            a, b = mixed[f"{start}A"], mixed[f"{start}B"]
            mixed[f"{start}sigma"] = self._merged(start, state[f"{start}sigma"], a, b)
            mixed |= {f"{start}A": a[:, -1], f"{start}B": b[:, -1]}
        return mixed


def _round_of(name: str) -> int:
    """Of a stack."""
    return int(name.split("/")[1])
