"""From a trained dense network to a small factorized one: rank and density by layer, and training on what is left."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact.nn.convert import Patterns, counted, factorize, factorized_layers, targets
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.specs import Rank1

Batches = Iterable[tuple[Tensor, Tensor]]
RANKS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Compressed:
    """What `compress` did. specs and densities of μ by path; `parameters` and `dense`: the numbers of the model after
    and before; accuracies, None where they were not measured: of the dense model, after the cut, and after training."""

    specs: dict[str, Rank1]
    densities: dict[str, float]
    parameters: int
    dense: int
    accuracy_dense: float | None
    accuracy_cut: float | None
    accuracy: float | None

    def __str__(self) -> str:
        def percent(value: float | None) -> str:
            return "–" if value is None else f"{value:.1%}"

        width = max(map(len, self.specs), default=5)
        lines = [f"{'layer':{width}}  {'layout':8}  rank  density of μ"]
        for path, spec in self.specs.items():
            lines.append(f"{path:{width}}  {spec.layout:8}  {spec.rank:4}  {percent(self.densities[path]):>12}")
        lines.append(f"parameters: {self.dense:,} → {self.parameters:,} ({self.parameters / self.dense:.1%})")
        steps = (self.accuracy_dense, self.accuracy_cut, self.accuracy)
        lines.append("accuracy: dense {}, cut {}, trained {}".format(*map(percent, steps)))
        return "\n".join(lines)


def compress(
    model: nn.Module,
    data: Batches,
    *,
    target_density: float | None = None,
    target_params: int | None = None,
    epochs: int = 5,
    lr: float = 1e-3,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    evaluate: Callable[[nn.Module], float] | Batches | None = None,
    skip: Patterns = (),
) -> Compressed:
    """Make a trained dense `model` small, in place: W ≈ u⊗v + μ with a sparse μ in every layer that has such a form.

    data: batches (input, target), a list or loader that can be gone through again. target_density: of μ, over all
    converted layers together, each of rank 1 in the spatial layout. target_params: numbers that the whole model may
    hold (biases, norms and layers left alone included; the positions of μ, 4 bytes each, are not counted); rank and
    layout of each layer are chosen too. One of the two. epochs, lr: of the training on the support that follows, by
    Adam with a cosine schedule; 0 epochs leave it out. evaluate: model → accuracy, or batches to measure it on. skip:
    as for `ff.factorize`; what cannot be converted is left alone.

    What is kept minimises Σ E[g²] δ² over the numbers given up, δ the change of a weight and g its gradient by the
    loss (the diagonal of the empirical Fisher information, as in Optimal Brain Damage): at a price t a number, a layer
    takes the rank with the least Σ min(E[g²] δ², t) + t · numbers in u and v, and each weight of μ that is worth more
    than t is kept; t is where the target is met.

    Raises ValueError for targets out of range or below what the factors alone take, for data without batches, and for a
    model that has factorized layers or is itself a layer.
    """
    if (target_density is None) == (target_params is None):
        raise ValueError("compress: must have either target_density or target_params")
    if target_density is not None and not 0 <= target_density <= 1:
        raise ValueError(f"compress(target_density={target_density}): must be between 0 and 1")
    if not isinstance(epochs, int) or epochs < 0 or not lr > 0:
        raise ValueError(f"compress(epochs={epochs}, lr={lr}): must be an integer of at least 0, and above 0")
    if isinstance(data, Iterator):
        raise ValueError(
            f"compress(data): is a {type(data).__name__}, which ends after one pass; must be a list or loader"
        )
    if any(not target.path for target in targets(model)):
        raise ValueError("compress: the model is itself a layer; put it into nn.Sequential")
    if already := list(factorized_layers(model)):
        raise ValueError(f"compress: {already[0]} is factorized already; see ff.densify")
    dense, modes = counted(model)[0], {path: module.training for path, module in model.named_modules()}
    probe = factorize(copy.deepcopy(model), Rank1(), skip, init="svd", unsupported="skip")
    layers = factorized_layers(probe)
    if not layers:
        raise ValueError("compress: the model has no layer that can be factorized; see skip=")
    weights = {path: layer._weight(None).detach() for path, layer in layers.items()}
    fisher = _fisher(probe, layers, data, loss)
    if target_params is None:
        specs = {path: layer.spec for path, layer in layers.items()}
    else:
        specs = _choose(weights, fisher, target_params - dense + sum(weight.numel() for weight in weights.values()))
    accuracy_dense = _accuracy(model, evaluate)
    del probe, layers, weights
    factorize(model, lambda path, module: specs.get(path), skip, init="svd", unsupported="skip")
    layers = factorized_layers(model)
    own = sum(layer.mu.numel() for layer in layers.values())
    kept = round(target_density * own) if target_params is None else target_params - counted(model)[0] + own
    _cut(layers, fisher, kept)
    accuracy_cut = _accuracy(model, evaluate)
    if epochs:
        # A model that is training may have parts that are not.
        _train(model if modes[""] else model.train(), data, epochs, lr, loss)
    for path, module in model.named_modules():
        module.training = modes.get(path, module.training)
    accuracy = _accuracy(model, evaluate) if epochs else accuracy_cut
    densities = {path: layer.density for path, layer in layers.items()}
    return Compressed(specs, densities, counted(model)[0], dense, accuracy_dense, accuracy_cut, accuracy)


def _fisher(model: nn.Module, layers: dict[str, FactorizedLayer], data: Batches, loss: Callable) -> dict[str, Tensor]:
    """E[g²] of every weight over the batches, in evaluation mode. Half of it is the layer's own mean: of single numbers
    the estimate is noisy."""
    model.eval()
    mus = [layer.mu.requires_grad_() for layer in layers.values()]
    squares, batches = [torch.zeros_like(mu) for mu in mus], 0
    for x, y in data:
        gradients = torch.autograd.grad(loss(model(x), y), mus, allow_unused=True, materialize_grads=True)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient)
        batches += 1
    if not batches:
        raise ValueError("compress(data): has no batches; a list or loader of (input, target)")
    return {path: (s + s.mean()) / (2 * batches) for path, s in zip(layers, squares, strict=True)}


def _candidates(size: tuple[int, ...]) -> list[Rank1]:
    """Those whose factors hold at most half the numbers of the weight, or the least there is."""
    layouts = ("spatial", "kernel") if len(size) == 4 else ("spatial",)
    specs = [Rank1(layout, rank) for layout in layouts for rank in RANKS]
    cost = {spec: _cost(spec, size) for spec in specs}
    return [s for s in specs if 2 * cost[s] <= math.prod(size)] or [min(specs, key=cost.__getitem__)]


def _cost(spec: Rank1, size: tuple[int, ...]) -> int:
    shapes = spec.shapes(size)
    return math.prod(shapes["u"]) + math.prod(shapes["v"])


def _choose(weights: dict[str, Tensor], fisher: dict[str, Tensor], budget: int) -> dict[str, Rank1]:
    """The spec of each layer, for `budget` numbers in all of them together."""
    # What a price keeps and gives up is read from histograms: a worth of 2ⁿ counts at n, in steps of a sixteenth.
    bins = torch.linspace(-160, 40, 3201, dtype=torch.float64)
    options: list[tuple[str, Rank1, int, Tensor, Tensor]] = []
    for path, weight in weights.items():
        for spec in _candidates(tuple(weight.shape)):
            rest = spec.init(tuple(weight.shape), weight, "svd")["mu"]
            worth = (fisher[path].double() * rest.double().square()).flatten().cpu()
            place = torch.bucketize(worth.log2().clamp(-160, 39.9), bins) - 1
            place = place.clamp_min(0)
            counts = torch.zeros(len(bins), dtype=torch.float64).index_add(0, place, torch.ones_like(worth))
            sums = torch.zeros(len(bins), dtype=torch.float64).index_add(0, place, worth)
            options.append(
                (path, spec, _cost(spec, tuple(weight.shape)), counts.flip(0).cumsum(0).flip(0), sums.cumsum(0))
            )
    low, high = 0, len(bins) - 1
    while low < high:
        middle = (low + high) // 2
        numbers, chosen = _at(options, middle, 2.0 ** float(bins[middle]))
        low, high = (low, middle) if numbers <= budget else (middle + 1, high)
    numbers, chosen = _at(options, low, 2.0 ** float(bins[low]))
    least = sum(min(cost for name, _, cost, *_ in options if name == path) for path in weights)
    if numbers > budget:
        others = "the factors, biases, norms and layers left alone"
        raise ValueError(f"compress(target_params): {others} take {least - budget:,} numbers more")
    return chosen


def _at(options, place: int, price: float) -> tuple[int, dict[str, Rank1]]:
    """The numbers, and the spec by path, at a price that keeps what is worth the bin `place` or more."""
    best: dict[str, tuple[float, int, Rank1]] = {}
    for path, spec, cost, at_least, up_to in options:
        kept, lost = int(at_least[place]), float(up_to[place - 1]) if place else 0.0
        total = lost + price * (kept + cost)
        if path not in best or total < best[path][0]:
            best[path] = total, kept + cost, spec
    return sum(numbers for _, numbers, _ in best.values()), {path: spec for path, (_, _, spec) in best.items()}


@torch.no_grad()
def _cut(layers: dict[str, FactorizedLayer], fisher: dict[str, Tensor], kept: int) -> None:
    """Keep the `kept` numbers of μ of all layers that are worth most, and make every μ compact."""
    if kept < 0:
        raise ValueError(f"compress(target_params): the factors and what stays dense take {-kept:,} numbers more")
    worth = torch.cat([(fisher[path] * layer.mu.square()).flatten().cpu() for path, layer in layers.items()])
    keep = torch.zeros_like(worth, dtype=torch.bool)
    keep[worth.topk(min(kept, len(worth))).indices] = True
    for layer, own in zip(layers.values(), keep.split([layer.mu.numel() for layer in layers.values()]), strict=True):
        layer.mu.mul_(own.reshape(layer.mu.shape).to(layer.mu.device))
        layer.compact()


def _train(model: nn.Module, data: Batches, epochs: int, lr: float, loss: Callable) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad(set_to_none=True)
            loss(model(x), y).backward()
            optimizer.step()
        schedule.step()


def _accuracy(model: nn.Module, evaluate: Callable[[nn.Module], float] | Batches | None) -> float | None:
    if evaluate is None or callable(evaluate):
        return evaluate and float(evaluate(model))
    was_training, right, seen = model.training, 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in evaluate:
            right, seen = right + (model(x).argmax(1) == y).sum().item(), seen + len(y)
    model.train(was_training)
    return right / max(seen, 1)
