"""pFedGate: "Efficient Personalized Federated Learning via Sparse Model-Adaptation" (Chen, Yao, Gao, Ding, Li; ICML
2023).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fastfact.federation.server.strategy import Strategy, register
from fastfact.federation.tensors import TensorInfo, describe, first_number, layer_of
from fastfact.methods.fedfac import inputs_first


class Gate(nn.Module):
    """x [n, …] → two vectors [blocks] in (0, 1), means over the batch: weights of the gates, importance of blocks."""

    def __init__(self, features: int, blocks: int):
        super().__init__()
        self.features = features
        self.weight = nn.Linear(features, blocks)
        self.importance = nn.Linear(features, blocks)
        # The model starts at nearly full strength: sigmoid(3) = 0.95.
        nn.init.zeros_(self.weight.weight)
        nn.init.constant_(self.weight.bias, 3.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.adaptive_avg_pool1d(x.flatten(1).to(self.weight.weight.dtype)[:, None], self.features).squeeze(1)
        x = F.layer_norm(x, x.shape[1:])
        return self.weight(x).sigmoid().mean(0), self.importance(x).sigmoid().mean(0)


class Gated(nn.Module):
    """A model whose weight layers are cut into blocks of output channels, each scaled by its gate or left out.

    density: at most this fraction of the gated numbers is active. blocks: how many to a layer. features: see `Gate`.
    """

    def __init__(self, model: nn.Module, density: float, blocks: int, features: int, classifier: str | None):
        super().__init__()
        self.groups: list[tuple[int, int]] = []
        self.where: dict[str, Tensor] = {}
        sizes: list[int] = []
        begin: dict[tuple[str, int], int] = {}
        for name, info in describe(model, classifier).items():
            path = name.rpartition(".")[0]
            if info.buffer or info.norm or not info.shape:
                continue
            if (layer := layer_of(path)) != path:
                raise ValueError(f"pfedgate: {layer or 'the model'} has a weight that is made of others (parametrized)")
            channels = _channels(model.get_submodule(path), info.shape)
            rows = int(channels.max()) + 1
            parts = torch.arange(rows) * min(blocks, rows) // rows
            if (path, rows) not in begin:
                begin[path, rows] = len(sizes)
                self.groups.append((len(sizes), len(sizes) + min(blocks, rows)))
                sizes += [0] * min(blocks, rows)
            index = parts + begin[path, rows]
            for part in index.tolist():
                sizes[part] += info.numel // rows
            self.where[name] = index[channels]
        like = first_number(model)
        self.where = {name: index.to(like.device) for name, index in self.where.items()}
        self.sizes, self.budget = torch.tensor(sizes, device=like.device), int(density * sum(sizes))
        # The model comes last: its classifier is the last layer with a weight.
        self.gate = Gate(features, len(sizes)).to(like)
        self.model = model

    def _apply(self, fn, recurse=True):
        self.sizes = fn(self.sizes)
        self.where = {name: fn(index) for name, index in self.where.items()}
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        weight, importance = self.gate(x)
        mask = self.select(importance.detach())
        gates = weight * (mask + importance - importance.detach())
        params = dict(self.model.named_parameters())
        gated = {name: params[name] * gates[index] for name, index in self.where.items()}
        return functional_call(self.model, gated, (x,))

    def select(self, importance: Tensor) -> Tensor:
        """Which blocks are active, 1 or 0 [blocks]: greedily by importance for each number, within the budget."""
        sizes = self.sizes.to(importance)
        worth = importance / sizes
        # Without any block of a layer nothing would pass: the best of each goes first, whatever the budget.
        best = torch.cat([torch.arange(b - a, device=worth.device) == worth[a:b].argmax() for a, b in self.groups])
        order = torch.where(best, worth + worth.max(), worth).argsort(descending=True, stable=True)
        active = (sizes[order].cumsum(0) <= self.budget) | best[order]
        return torch.zeros_like(worth).scatter(0, order, active.to(worth))


def _channels(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The output channel of each number of a module's parameter of this shape, [shape[0], 1, …], [in, out, 1, …] where
    the inputs come first."""
    if len(shape) < 2 or not inputs_first(module):
        return torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1))
    groups = getattr(module, "groups", 1)
    channels = torch.arange(groups * shape[1]).view(groups, 1, shape[1])
    return channels.expand(-1, shape[0] // groups, -1).reshape(*shape[:2], *[1] * (len(shape) - 2))


@register
@dataclass(kw_only=True)
class PFedGate(Strategy):
    """pFedGate (Algorithm 1): a client's model is the shared one θ, its blocks scaled and switched by a personal gating
    layer g_φ for each batch of samples: θ′ = θ ⊙ M ⊙ G(x), Σ of the active blocks' sizes ≤ density · |θ| (a knapsack).
    φ and θ train together; θ is averaged by n_k, φ stays.

    density: s of the paper, its "sparse factor". blocks: a layer is cut into that many groups of output channels (5 in
    the authors' runs), biases with their channels; normalisation is not gated. Weights must be parameters: parametrized
    ones (`weight_norm`) are refused. features: the gate sees a sample averaged to so many numbers and normalised, then
    one linear map each for G and for the blocks' importance, sigmoids, mean over the batch.

    Chosen where the text leaves it open, or for simplicity: the knapsack is solved greedily (importance for each
    number, until the budget is used up), but the best block of a layer is always kept, within the budget or not; its
    gradient passes straight through to the importance; one learning rate for φ and θ, in the same step (the authors'
    runs, without bi-level optimization, do so too). Gates depend on the batch, in evaluation too (1,024 samples).
    Nothing makes up for the size of what is left out: a half-dense model takes more rounds to start than a dense one.

    Down and up: θ whole. The paper sends sparse updates; over the batches of local epochs nearly all blocks are active
    at some time. Batch-norm (not mentioned): learned part and statistics are shared as in FedAvg; the gate has none.
    """

    density: float = 0.5
    blocks: int = 5
    features: int = 64

    name: ClassVar[str] = "pfedgate"
    paper: ClassVar[str] = "Chen et al., ICML 2023"

    def check(self) -> None:
        super().check()
        self._require("density", 0 < self.density <= 1, "must be above 0 and at most 1")
        for name in ("blocks", "features"):
            self._require(name, getattr(self, name) >= 1, "must be an integer of at least 1")

    def prepare(self, model: nn.Module) -> nn.Module:
        return Gated(super().prepare(model), self.density, self.blocks, self.features, self.classifier)

    def shares(self, info: TensorInfo) -> bool:
        return not info.name.startswith("gate.") and self.allowed(info)
