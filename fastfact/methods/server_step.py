"""A server that moves one global model by what its clients made of it, in place of taking their mean."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastfact.federation.server import mixing
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo


@dataclass(kw_only=True)
class ServerStep(Strategy):
    """x ← `step` of x and of the mean x̄ of the uploads: everybody downloads x, which the server keeps.

    Of a client that started from something else, as an older x where rounds are asynchronous, x̄ has what it changed,
    added to x. It moves the shared tensors that train; the others (batch-norm's statistics, counts) are their mean.
    """

    def moves(self, info: TensorInfo) -> bool:
        """Whether `step` decides what becomes of a shared tensor."""
        return not info.buffer

    def step(self, x: State, mean: State, uploads: Uploads) -> State:
        """The new global tensors, from those that the clients started from and the mean of what they made of them, all
        [1, …]. May put new tensors into `uploads.server_state`."""
        raise NotImplementedError

    def counts(self, uploads: Uploads) -> Sequence[float]:
        """By how much each client's change counts where they started from something else than x."""
        return [1.0] * len(uploads.clients)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._moved = [name for name, info in infos.items() if self.shares(info) and self.moves(info)]

    def server_state(self, state: State) -> State:
        return {f"global/{name}": state[name][:1].clone() for name in self._moved}

    @property
    def constant_mixing(self) -> bool:
        return self.after_mix != "support"

    def weights(self, uploads: Uploads, guests: Uploads | None = None) -> Tensor:
        return mixing.fedavg_matrix([1] * len(uploads.clients), rows=len((guests or uploads).clients))

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        row, known = self.weights(uploads)[:1], uploads.server_state
        if guests is not None:
            # The mix has moved x on.
            made = uploads.mix(row, [name for name in names if name not in self._moved])
            made |= {name: known[f"global/{name}"] for name in self._moved}
        else:
            x = {name: known[f"global/{name}"] for name in self._moved}
            made = self._changed(x, uploads).mix(row, names)
            moved = self.step(x, {name: made[name] for name in self._moved}, uploads)
            known |= {f"global/{name}": tensor for name, tensor in moved.items()}
            made |= moved
        rows = len(uploads.here if guests is None else guests.clients)
        return {name: made[name].expand(rows, *made[name].shape[1:]) for name in names}

    def _changed(self, x: State, uploads: Uploads) -> Uploads:
        """The uploads as if each client had made its change of x."""
        if not uploads.start:
            return uploads
        counts, state = torch.tensor(self.counts(uploads), dtype=torch.float64), dict(uploads.state)
        for name in self._moved:
            change = state[name] - uploads.start[name]
            state[name] = x[name] + counts.to(change).view(-1, *[1] * (change.dim() - 1)) * change
        noise = uploads.noise and dataclasses.replace(uploads.noise, start=uploads.noise.start | x)
        return dataclasses.replace(uploads, state=state, noise=noise)
