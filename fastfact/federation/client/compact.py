"""Sparse training of clients (`Schedule`): μ is dense at rest and on the wire, zeros included, and compact
where it trains.

With a target density, a client's support are its largest magnitudes, so a state says all there is to know: after a mix,
which leaves the union of the supports, each client trains on the largest of what it got. Every client keeps as many
numbers of a layer, so that compact μ stacks over a cohort: `…mu` [k, nnz] and `…mu_index` int32 [k, nnz]. Where λ
decides, the support are the nonzeros, as many as there are, and clients train one after another.
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fastfact.data.client import Samples
from fastfact.federation.client.optimizer import KEPT
from fastfact.federation.client.phase import EVALUATION_BATCH, Phase
from fastfact.federation.client.step import Settings
from fastfact.federation.client.train import Trainer
from fastfact.federation.state import State, flattened
from fastfact.federation.tensors import describe
from fastfact.nn import sparsity
from fastfact.nn.convert import factorized_layers
from fastfact.nn.factors import INDEX
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.schedule import Schedule, dense_gradients


def mu_layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    """The name of each μ that trains → its layer."""
    layers = {f"{path}.mu" if path else "mu": layer for path, layer in factorized_layers(model).items()}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    return {name: layer for name, layer in layers.items() if name in trained}


def prune_(state: State, names: Sequence[str], schedule: Schedule) -> None:
    """Set to zero what each dense μ [k, …] will not keep, in place; where λ decides, the zeros are there."""
    for name in names if schedule.target_density is not None else ():
        sparsity.prune_(state[name], schedule.target_density, clients=True)


class CompactTrainer:
    """`train.Trainer` on states with dense μ, of which it trains and evaluates the compact form."""

    def __init__(self, template: nn.Module, classifier: str | None, settings: Settings, schedule: Schedule):
        model = copy.deepcopy(template)
        for layer in mu_layers(model).values():
            keep = 0 if schedule.target_density is None else schedule.kept(torch.Size(layer.size).numel())
            layer.set_support(layer.mu.new_zeros(keep), torch.arange(keep, dtype=torch.int32, device=layer.mu.device))
        l1 = schedule.penalty(schedule.warmup + 1, settings.l1)
        settings = dataclasses.replace(settings, l1=l1, graphs=False)
        self.inner, self.schedule = Trainer(model, describe(model, classifier), settings), schedule
        self.layers = mu_layers(model)

    def copy(self) -> "CompactTrainer":
        """See `Trainer.copy`."""
        other = copy.copy(self)
        other.inner = self.inner.copy()
        other.layers = mu_layers(other.inner.model)
        return other

    @property
    def shared_generator(self) -> bool:
        """See `Trainer`."""
        return self.inner.shared_generator

    @shared_generator.setter
    def shared_generator(self, value: bool) -> None:
        self.inner.shared_generator = value

    def _compact(self, state: State, gradients: Mapping[str, Tensor] | None = None) -> State:
        """The same states with compact μ; all other tensors are the same objects. gradients: where λ decides, by the
        dense μ of the one row; positions where they are beyond λ join."""
        small = dict(state)
        for name in self.layers:
            mu = flattened(state[name])
            if self.schedule.target_density is not None:
                small[name], small[_index(name)] = sparsity.largest(mu, self.schedule.kept(mu.shape[1]))
                continue
            wanted = mu[0] != 0
            if gradients is not None:
                wanted |= gradients[name].reshape(-1).abs() > self.schedule.l1
            index = wanted.nonzero().flatten()
            small[name], small[_index(name)] = mu[:, index], index.to(torch.int32)[None]
        return small

    def _together(self, k: int) -> list[slice]:
        """Which of k rows are taken together: supports of different sizes do not stack."""
        return [slice(0, k)] if self.schedule.target_density is not None else [slice(row, row + 1) for row in range(k)]

    def train(
        self,
        state: State,
        data: Sequence[Samples],
        round: int,
        clients: Sequence[int],
        phases: Sequence[Phase],
        purpose: str = "order",
    ) -> tuple[list[float], list[float]]:
        """`Trainer.train`; the support changes first in the rounds after those the schedule says."""
        losses, seconds = [], []
        for rows in self._together(len(clients)):
            some = {name: tensor[rows] for name, tensor in state.items()}
            result = self._train(some, data[rows], round, clients[rows], phases, purpose)
            losses += result[0]
            seconds += result[1]
        return losses, seconds

    def _train(self, state: State, data, round: int, clients, phases, purpose: str) -> tuple[list[float], list[float]]:
        small = self._compact(state)
        if self.schedule.regrows(round - 1) and purpose == "order":
            for row, samples in enumerate(data):
                gradients = self._dense_gradients(small, row, samples)
                if self.schedule.target_density is None:
                    small = self._compact(state, gradients)
                else:
                    self._regrow(small, row, gradients)
        # What the optimizer keeps of μ follows it; what joins the support starts at zero.
        on_support = {name: name for name in self.layers}
        for key in state:
            slot, _, name = key.removeprefix(KEPT).partition("/")
            if key.startswith(KEPT) and name in self.layers and slot != "count":
                on_support[key] = name
                small[key] = flattened(state[key]).gather(1, small[_index(name)].long())
        result = self.inner.train(small, data, round, clients, phases, purpose)
        for key, name in on_support.items():
            rows = torch.zeros_like(flattened(state[key]))
            state[key].copy_(rows.scatter_(1, small[_index(name)].long(), small[key]).reshape(state[key].shape))
        return result

    def measure(self, state: State, data: Sequence[Samples], together: int = 1) -> list[dict[str, float | None]]:
        """`Trainer.measure`."""
        found = []
        for rows in self._together(len(data)):
            some = {name: tensor[rows] for name, tensor in state.items()}
            found += self.inner.measure(self._compact(some), data[rows], together)
        return found

    def _dense_gradients(self, small: State, row: int, data: Samples) -> dict[str, Tensor]:
        """The gradient of one row's mean loss on `data` by the dense form of each μ, in eval mode."""
        model, task = self.inner.model.eval(), self.inner.settings.task
        self.inner.bind(small, row)
        (x, y), sums = data, None
        for some, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):

            def loss(some=some, labels=labels) -> Tensor:
                return task.total(task.output(model, some), labels) / len(y)

            parts = dense_gradients(self.layers.values(), loss)
            sums = parts if sums is None else [a + b for a, b in zip(sums, parts, strict=True)]
        return dict(zip(self.layers, sums, strict=True))

    def _regrow(self, small: State, row: int, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            values, index = small[name][row], small[_index(name)][row]
            new = sparsity.replaced(values, index, gradient, round(self.schedule.replace * len(values)))
            for tensor, changed in zip((values, index), new, strict=True):
                tensor.copy_(changed)


def _index(name: str) -> str:
    return name.removesuffix("mu") + INDEX
