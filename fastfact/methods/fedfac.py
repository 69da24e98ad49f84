"""FedSplit and FedFac (Wang et al., 2023): some channels of each layer are shared, the others personal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fastfact.federation.server.strategy import Strategy, Uploads, register
from fastfact.federation.state import State, generator_for
from fastfact.federation.tensors import TensorInfo

SPLIT = "split/"
ROLES = ("weight", "in_proj_weight")


def number_of_factors(eigenvalues: Tensor, kappa: float) -> int:
    """G = min {m : Σ_{j ≤ m} γ_j / Σ_j γ_j ≥ κ} (§4.1), γ in any order; at least 1, negative ones count as 0."""
    gamma = eigenvalues.clamp(min=0).sort(descending=True).values
    share = gamma.cumsum(0) / gamma.sum()
    return min(int((share < kappa - 1e-12).sum()) + 1, len(gamma))


def communalities(z: Tensor, kappa: float, iterations: int = 300, tolerance: float = 1e-4) -> Tensor:
    """ν_j = Σ_m a_jm² of each column j of z [n, d] (§4.1), float64 [d] in 0 … 1.

    R is the correlation matrix of the columns, G the number of factors by the κ-rule, and the loadings A [d, G] those
    of iterated principal axes: A = U* diag(γ*)^½ from the G largest eigenvalues of R − Σ_ε that are positive (eq. 7),
    then Σ_ε = diag(R − A Aᵀ), from Σ_ε = 0 until no entry moves by more than `tolerance`, at most `iterations` times
    (with more factors than there are, as a large κ gives, the axes creep for long, and which half of the channels has
    the larger ν still changes: after 50 steps an eighth to a quarter of the split was another one than after 300).

    Σ_ε is diagonal, as in the classic model ("special factors"); with all of R − A Aᵀ, as printed, the first step
    would already be the fixed point. A uniqueness below 0 (a Heywood case) is set to 0. A column without variance
    correlates with nothing and has ν = 0.
    """
    z = z.double()
    z = z - z.mean(0)
    norm = torch.linalg.vector_norm(z, dim=0)
    alive = norm > 1e-12 * norm.max().clamp(min=1e-300)
    nu = torch.zeros(z.shape[1], dtype=torch.float64, device=z.device)
    z = z[:, alive] / norm[alive]
    if not z.shape[1]:
        return nu
    correlation = z.T @ z
    unique = torch.zeros(len(correlation), dtype=torch.float64, device=z.device)
    factors = None
    for _ in range(iterations):
        values, vectors = torch.linalg.eigh(correlation - unique.diag())
        if factors is None:
            factors = number_of_factors(values, kappa)
        loadings = vectors[:, -factors:] * values[-factors:].clamp(min=0).sqrt()
        before, unique = unique, (1 - loadings.square().sum(1)).clamp(min=0)
        if (unique - before).abs().max() <= tolerance:
            break
    nu[alive] = 1 - unique
    return nu


def shared_mask(nu: Tensor, tau: float) -> Tensor:
    """ζ_j = 1 where ν_j ≥ τ_l, τ_l the `tau` quantile of ν (linear between its values); above 1 nothing is shared.

    Equal up to rounding counts as equal: ν of several channels is 1 where all variance is common.
    """
    return nu >= torch.quantile(nu, tau) - 1e-9 if tau <= 1 else torch.zeros_like(nu, dtype=torch.bool)


@dataclass(frozen=True)
class Elements:
    """The hidden elements of a layer: channels of a convolution, neurons of a dense layer, units of a recurrent one.

    units: how many; weights: their weights, whose first axis is `gates` blocks of `units` (1 but for LSTM and GRU);
    others: tensors that go with them (bias, and scale, shift and statistics of the batch-norm behind the layer).
    """

    name: str
    path: str
    units: int
    gates: int
    weights: tuple[str, ...]
    others: tuple[str, ...]

    def columns(self, state: State) -> Tensor:
        """Z of the layer: the weights of each element, those of one client under those of another, [n, units]."""
        parts = [
            state[name].reshape(len(state[name]), self.gates, self.units, -1).permute(0, 1, 3, 2).flatten(1, 2)
            for name in self.weights
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)


def elements(infos: Mapping[str, TensorInfo], skip: Sequence[str] = ()) -> list[Elements]:
    """The hidden elements of each layer but the classifier; `skip` are paths of modules that have none.

    Factorized layers have none either: no axis of their factors is that of the output channels alone.
    """
    found = []
    for layer in sorted({info.layer for info in infos.values() if not info.classifier} - {0}):
        inside = [info for info in infos.values() if info.layer == layer]
        plain = [info for info in inside if len(info.shape) >= 2 and info.role.startswith(ROLES) and not info.norm]
        plain = [info for info in plain if info.name.rpartition(".")[0] not in skip]
        recurrent = {i.role.removeprefix("weight_hh"): i for i in plain if i.role.startswith("weight_hh")}
        for info in plain:
            suffix = info.role.removeprefix("weight_ih")
            if suffix in recurrent:
                units = recurrent[suffix].shape[1]
                weights: tuple[str, ...] = (info.name, recurrent[suffix].name)
            elif info.role.removeprefix("weight_hh") in recurrent:
                continue
            else:
                units, weights, suffix = info.shape[0], (info.name,), ""
            path = info.name.rpartition(".")[0]
            others = [
                other.name
                for other in inside
                if other.shape == info.shape[:1] and (not suffix or other.role.endswith(suffix))
            ]
            found.append(Elements(info.name, path, units, info.shape[0] // units, weights, tuple(others)))
    return found


def inputs_first(module: nn.Module) -> bool:
    """Whether the first axis of a module's weight is that of its inputs: in transposed convolutions, and in `Conv1D` of
    transformers."""
    transformers = type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return transformers or isinstance(module, nn.modules.conv._ConvTransposeNd)


@dataclass(kw_only=True)
class _Split(Strategy):
    """Output channels of the split layers are shared or personal: a shared one is averaged with the weights n_k / N
    (Algorithm 1), a personal one stays. The mixing matrix is constant on the first and the identity on the others.

    With a channel go its bias and its learned scale, shift and running statistics in the batch-norm behind it, about
    which the text says nothing. Layers that are not split are shared as in FedAvg; the classifier never is split
    (Λ ⊂ {1, …, L − 1}), nor are embeddings, transposed convolutions and `Conv1D` of transformers, whose rows are no
    output channels. The units of an LSTM or GRU are split with all their gates.

    The server's step η_g is 1: the average replaces the shared channels (§3.2 averages plainly, the Algorithms by n_k;
    the latter is done). Only what is shared travels, and one bit a channel that says so.
    """

    paper: ClassVar[str] = "FedSplit/FedFac, 2023"

    def prepare(self, model: nn.Module) -> nn.Module:
        self._whole = tuple(
            path
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) or inputs_first(module)
        )
        return super().prepare(model)

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        self._elements = [e for e in elements(infos, self._whole) if all(self.shares(infos[n]) for n in e.weights)]
        self._infos = infos

    def channel_masks(self, direction: str, server_state: State) -> State:
        masks = {}
        for e in self._elements:
            mask = server_state.get(SPLIT + e.name)
            if mask is None:
                continue
            for name in (*e.weights, *e.others):
                if self.shares(self._infos[name]):
                    masks[name] = mask.repeat(e.gates)
        return masks


@register
@dataclass(kw_only=True)
class FedSplit(_Split):
    """FedSplit (§3) with a split that is given.

    shared_channels: path of a layer (or name of its weight, where it has several) → the indices of its channels that
    are shared. Layers it does not name are shared whole: without any this is FedAvg.
    """

    shared_channels: Mapping[str, Sequence[int]] = field(default_factory=dict)

    name: ClassVar[str] = "fedsplit"

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        super().bind(infos)
        self._masks = {}
        for key, channels in self.shared_channels.items():
            of_key = [e for e in self._elements if key in (e.path, e.name)]
            if not of_key:
                raise ValueError(
                    f"{self.name}(shared_channels={key!r}): must be a layer that can be split,"
                    f" {', '.join(e.path for e in self._elements) or 'none'}"
                )
            for e in of_key:
                if any(not 0 <= channel < e.units for channel in channels):
                    raise ValueError(
                        f"{self.name}(shared_channels[{key!r}]={list(channels)}): must be 0 … {e.units - 1}"
                    )
                self._masks[e.name] = torch.zeros(e.units, dtype=torch.bool)
                self._masks[e.name][list(channels)] = True

    def channel_masks(self, direction: str, server_state: State) -> State:
        return super().channel_masks(direction, {SPLIT + name: mask for name, mask in self._masks.items()})


@dataclass(kw_only=True)
class _FedFac(_Split):
    """The split by factor analysis (§4.1, see `communalities`) of the weights that the clients of a round uploaded:
    ν_j ≥ τ_l is shared, the others are personal.

    layers: Λ, numbers of layers in 1 … L − 1; None is all of them. tau: τ_l as a quantile of ν_l, in 0 … 1 (0 is
    FedAvg); above 1 every channel is personal (the +∞ of the paper's tuning set, with .25, .5, .75). kappa: κ, the
    share of variance that fixes the number of factors (tuned in .5, .75, .85, .9, .95). iterations: of the principal
    axes at most; each costs the server an eigendecomposition [d_l, d_l] (0.1 s at 512 channels on one core). random:
    channels drawn at random, as many, in place of the analysis.

    "Weights or gradients" may be analysed: weights are. The algorithms' initialisation, where clients have trained
    locally, is the first round, whose uploads make the first split; nobody trains it again.
    """

    layers: Sequence[int] | None = None
    tau: float = 0.5
    kappa: float = 0.85
    iterations: int = 300
    random: bool = False

    dynamic: ClassVar[bool]

    def check(self) -> None:
        super().check()
        self._require("tau", self.tau >= 0, "must be a quantile 0 … 1, or above 1 for no shared channel")
        self._require("kappa", 0 < self.kappa <= 1, "must be above 0 and at most 1")
        self._require("iterations", self.iterations >= 1, "must be an integer of at least 1")

    def bind(self, infos: dict[str, TensorInfo]) -> None:
        super().bind(infos)
        if not self._elements:
            raise ValueError(f"{self.name}: no layer before the classifier can be split, it takes dense ones")
        if self.layers is not None:
            there = {infos[e.name].layer for e in self._elements}
            rule = f"must be among the layers that can be split, {', '.join(map(str, sorted(there))) or 'none'}"
            self._require("layers", set(self.layers) <= there, rule)
            self._elements = [e for e in self._elements if infos[e.name].layer in self.layers]

    def channel_masks(self, direction: str, server_state: State) -> State:
        # The analysis needs all channels of the upload; once the split is fixed, the shared ones do.
        return {} if direction == "up" and self.dynamic else super().channel_masks(direction, server_state)

    @property
    def constant_mixing(self) -> bool:
        # The analysis looks at every client's weights, a draw at none.
        return self.random and self.after_mix != "support"

    def mix(self, uploads: Uploads, names: list[str], guests: Uploads | None = None) -> State:
        for e in self._elements if guests is None else ():
            if self.dynamic or SPLIT + e.name not in uploads.server_state:
                uploads.server_state[SPLIT + e.name] = shared_mask(self.scores(e, uploads), self.tau)
        return super().mix(uploads, names, guests)

    def scores(self, e: Elements, uploads: Uploads) -> Tensor:
        """ν of one layer, [units]."""
        if self.random:
            turn = uploads.round if self.dynamic else 0
            draw = generator_for(uploads.seed, turn, -1, SPLIT + e.name)
            return torch.rand(e.units, generator=draw, dtype=torch.float64).to(uploads.state[e.name].device)
        return communalities(e.columns(uploads.state), self.kappa, self.iterations)


@register
@dataclass(kw_only=True)
class FedFacStatic(_FedFac):
    """FedFac with one factor analysis, after the first round (Algorithm 1)."""

    name: ClassVar[str] = "fedfac-static"
    dynamic: ClassVar[bool] = False


@register
@dataclass(kw_only=True)
class FedFacDynamic(_FedFac):
    """FedFac with a factor analysis in every round (Algorithm 2): the paper's recommendation.

    A channel that becomes shared is averaged from what each client had made of it.
    """

    name: ClassVar[str] = "fedfac-dynamic"
    dynamic: ClassVar[bool] = True


@register
@dataclass(kw_only=True)
class RandomSplit(FedFacDynamic):
    """Dynamic FedFac with as many channels, drawn at random in every round ("random split", Table 8, and §4.3.1).

    "Keeping the other experiment settings consistent with FedFac" is read as: drawn as often as it analyses. That is
    what hurts; `FedFacStatic(random=True)`, drawn once, is a given split and as good as the true one in the simulation
    of §4.3.1, for the units of a network with random initial weights have no number.
    """

    random: bool = True

    name: ClassVar[str] = "fedsplit-random"
