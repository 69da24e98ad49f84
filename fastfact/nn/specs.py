"""Parameterizations of a weight: which factors, of which shapes, how initialised, and how they make W.

A spec is a small frozen description, without tensors. `size` is the shape of the weight it stands for, in PyTorch's
order: (o, i / groups, kh, kw) for a convolution, (o, i) for a linear layer.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fastfact import ops
from fastfact.base.formats import LAYOUTS, lowrank_shape, rank1_shapes
from fastfact.base.kinds import check_kinds
from fastfact.ops.weights import WeightOp, follows_channels_last, weight

Size = tuple[int, ...]
INITS = ("random", "svd")
_FULL, _MORE, _WIDTH = 64, 8, 16
"""Rows up to which the full singular value decomposition is taken; columns of a Krylov block beyond the rank, and what
their number is a multiple of: products with other numbers of columns take up to ten times as long."""


def _fan_in(size: Size) -> int:
    return math.prod(size[1:])


def default_std(size: Size) -> float:
    """Standard deviation of W[o, i, …] as `nn.Conv2d` and `nn.Linear` initialise it: 1 / sqrt(3 · fan_in)."""
    return 1 / math.sqrt(3 * _fan_in(size))


def _scaled_normal(shape: Size, rms: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """A normal draw scaled so that its root mean square is exactly `rms` (u may have only nine numbers)."""
    draw = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (draw * (rms / draw.square().mean().sqrt())).to(like)


def leading_vectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(left [m, r], values [r], right [r, n]): the r = min(`rank`, m, n) leading singular vectors of `matrix` [m, n].

    Where they are few of many, from a block Krylov space (Musco and Musco 2015) that grows until one more block lowers
    the squared error of the approximation by less than 1e-7 of it; the start is the same in every call. Else by
    the full decomposition. Computed in float32 and float64 for what is not float64 itself; returned in float64.
    """
    m, n = matrix.shape
    if m > n:
        left, values, right = leading_vectors(matrix.T, rank)
        return right.T, values, left.T
    exact = matrix.dtype == torch.float64
    if matrix.is_meta:
        r = min(rank, m)
        return tuple(matrix.new_empty(shape, dtype=torch.float64) for shape in ((m, r), (r,), (r, n)))
    if m <= _FULL or 4 * rank >= m:
        return _leading(matrix.double(), rank, exact)
    matrix = matrix if exact else matrix.float()
    columns = _WIDTH * -(-(rank + _MORE) // _WIDTH)
    start = torch.randn(n, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block = matrix @ start.to(matrix)
    all_energy, captured, noise = matrix.square().sum().double(), 0.0, torch.finfo(matrix.dtype).eps
    basis, images, gram = block[:, :0], matrix[:0], matrix.new_empty(0, 0, dtype=torch.float64)
    while True:
        for _ in range(2):  # once leaves parts of the basis where the block is nearly inside it
            block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
        image = block.T @ matrix
        basis, images = torch.cat([basis, block], 1), torch.cat([images, image])
        beside = (images @ image.T).double()
        gram = torch.cat([torch.cat([gram, beside[: len(gram)].T]), beside], 1)
        before, captured = captured, torch.linalg.eigvalsh(gram)[-rank:].sum()
        enough = captured - before <= 1e-7 * (all_energy - captured) + noise * captured
        if enough or basis.shape[1] + block.shape[1] > m:
            break
        block = matrix @ image.T
    left, values, right = _leading(images.double(), rank, exact)
    return basis.double() @ left, values, right


def _leading(matrix: Tensor, rank: int, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `leading_vectors`, of a `matrix` in float64 with few rows. exact: to the last digits of float64 too; else by
    the products of its rows, whose rounding is far below that of numbers that were float32."""
    if exact:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, :rank], values[:rank], right[:rank]
    squares, left = torch.linalg.eigh(matrix @ matrix.T)
    left, values = left.flip(1)[:, :rank], squares.flip(0)[:rank].clamp_min(0).sqrt()
    return left, values, left.T @ matrix / values.clamp_min(torch.finfo(torch.float64).tiny)[:, None]


def _check_choice(spec: str, name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{spec}({name}={value!r}): must be one of {', '.join(map(repr, allowed))}")


def _check_ratio(spec: str, name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"{spec}({name}={value}): must be above 0 and at most 1")


@dataclass(frozen=True)
class Spec:
    """Base of the parameterizations. Subclasses say `shapes`, `init` and `op`, or `weight` where no one op makes W."""

    dense: ClassVar[str | None] = None
    """Name of the factor that has the shape of W and is added to the product (μ or σ)."""
    sparse_factor: ClassVar[str | None] = None
    """Name of the factor that the L1 penalty and pruning are for."""

    def check(self, size: Size) -> None:
        """Raise ValueError if a weight of `size` cannot have this parameterization."""
        if len(size) not in (2, 4) or min(size) < 1:
            raise ValueError(f"{type(self).__name__}: weight of shape {size}, must be (o, i) or (o, i, kh, kw)")

    def for_size(self, size: Size) -> "Spec":
        """This, with what it leaves to the size of the weight decided: the `spec` of a layer."""
        return self

    def shapes(self, size: Size) -> dict[str, Size]:
        """Factor names → shapes, in the order in which they are stored."""
        raise NotImplementedError

    def init(
        self, size: Size, dense: Tensor, how: str = "random", generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Initial factors, of the dtype, device and memory format of `dense`, the weight of the layer they replace."""
        raise NotImplementedError

    def weight(self, factors: Mapping[str, Tensor | None], size: Size, channels_last: bool | None = None) -> Tensor:
        """W of `size` from factors of the `shapes` for it (not checked again). Differentiable."""
        return weight(*self.op(factors, size, channels_last))

    def op(self, factors: Mapping[str, Tensor | None], size: Size, channels_last: bool | None = None) -> tuple:
        """What `weight` asks of `ops.weights.weight`: its arguments."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, str | int | float | bool | None]:
        """The class by name and the settings, as JSON holds them."""
        return {"spec": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_dict(settings: Mapping) -> "Spec":
        """The inverse of `to_dict`. Raises ValueError for a class that is not there or settings that it has not."""
        settings = dict(settings)
        name, known = settings.pop("spec", None), {kind.__name__: kind for kind in _below(Spec)}
        if name not in known:
            raise ValueError(f"spec={name!r}: must be one of {', '.join(known)}")
        if unknown := set(settings) - {field.name for field in fields(known[name])}:
            raise ValueError(f"{name} has no setting {', '.join(sorted(unknown))}")
        return known[name](**settings)


def _below(kind: type) -> list[type]:
    return [one for child in kind.__subclasses__() for one in (child, *_below(child))]


@dataclass(frozen=True)
class Rank1(Spec):
    """W = Σ_r u_r ⊗ v_r + μ, r = 1 … `rank` (Factorized-FL eq. 1–3; SimFed for layout "kernel").

    layout: "spatial" u [r, kh, kw], v [r, o, i] (Factorized-FL: W[o, i, ky, kx] = u[ky, kx] v[o, i]);
    "kernel" u [r, i, kh], v [r, o, kw] (SimFed: u[i, ky] v[o, kx]); "view" shapes as "spatial", but the
    [kh·kw, o·i] matrix u vᵀ is read as [o, i, kh, kw] without a permutation, as the official Factorized-FL code does;
    "auto" is "spatial", but "kernel" for 1×1 convolutions, which are linear layers of pixels: their spatial v is as
    large as W. A linear layer has u [r, i], v [r, o] in every layout.
    sparse: with μ (shape of W), which starts at zero and carries the L1 penalty; False leaves it out.

    init "random": the papers draw u and v at random and start μ at zero. Here u and v are normal with equal norms
    ‖u_r‖ = ‖v_r‖ (as the Xavier draws of the official code have, and as "svd" gives), scaled so that the variance of W
    is 1 / (3 · fan_in), that of PyTorch's default for the layer; each draw is rescaled to have its root mean square
    exactly. With equal root mean squares instead, ‖v‖ is so large that u learns orders of magnitude faster than v.
    init "svd": u, v are the best rank-γ factors of the layer's weight and μ the residual: the same function. Without
    μ only the best approximation.
    """

    layout: str = "auto"
    rank: int = 1
    sparse: bool = True

    dense: ClassVar[str | None] = "mu"
    sparse_factor: ClassVar[str | None] = "mu"

    def __post_init__(self):
        check_kinds(self, "Rank1")
        _check_choice("Rank1", "layout", self.layout, ("auto", "spatial", "kernel", "view"))
        if self.rank < 1:
            raise ValueError(f"Rank1(rank={self.rank!r}): must be an integer of at least 1")

    def for_size(self, size: Size) -> "Rank1":
        if self.layout != "auto":
            return self
        o, i, *taps = size
        return replace(self, layout="kernel" if taps == [1, 1] and i + o < i * o else "spatial")

    def _op_layout(self, size: Size) -> str:
        return "linear" if len(size) == 2 else self.for_size(size).layout

    def shapes(self, size: Size) -> dict[str, Size]:
        self.check(size)
        u, v = rank1_shapes(LAYOUTS[self._op_layout(size)], size)
        return {"u": (self.rank, *u), "v": (self.rank, *v)} | ({"mu": size} if self.sparse else {})

    def init(self, size, dense, how="random", generator=None):
        _check_choice("Rank1", "init", how, INITS)
        shapes = self.shapes(size)
        product = default_std(size) / math.sqrt(self.rank)
        balance = math.sqrt(math.prod(shapes["v"]) / math.prod(shapes["u"]))
        rms = {"u": math.sqrt(product * balance), "v": math.sqrt(product / balance)}
        if how == "random":
            factors = {name: _scaled_normal(shapes[name], rms[name], dense, generator) for name in ("u", "v")}
            mu = torch.zeros_like(dense)
        else:
            if not dense.is_meta and not dense.isfinite().all():
                raise ValueError('init="svd": the weight has numbers that are not finite')
            left, values, right = leading_vectors(self._matrix(dense, size), self.rank)
            factors = {}
            for name, vectors in (("u", left.T), ("v", right)):
                factor = torch.zeros(self.rank, vectors.shape[1], dtype=torch.float64, device=dense.device)
                factor[: len(values)] = vectors * values.sqrt()[:, None]
                factors[name] = factor.reshape(shapes[name]).to(dense.dtype)
            # Of u and v that are both zero neither would ever train.
            unused = [r for r in range(self.rank) if r >= len(values) or not (values.is_meta or values[r])]
            if unused:
                drawn = _scaled_normal(shapes["u"], rms["u"], dense, generator)
                factors["u"][unused] = drawn[unused]
            product = ops.rank1_weight(factors["u"], factors["v"], layout=self._op_layout(size))
            mu = torch.empty_like(dense).copy_(dense - product)
        return factors | ({"mu": mu} if self.sparse else {})

    def _matrix(self, dense: Tensor, size: Size) -> Tensor:
        """W as the matrix whose best rank-γ approximation is Σ_r u_r v_rᵀ, flattened as u and v are."""
        if len(size) == 2:
            return dense.T
        o, i, kh, kw = size
        layout = self._op_layout(size)
        if layout == "kernel":
            return dense.permute(1, 2, 0, 3).reshape(i * kh, o * kw)
        if layout == "view":
            return dense.reshape(kh * kw, o * i)
        return dense.permute(2, 3, 0, 1).reshape(kh * kw, o * i)

    def op(self, factors, size, channels_last=None):
        mu, code = factors.get("mu"), LAYOUTS[self._op_layout(size)]
        if (index := factors.get("mu_index")) is not None:
            u, v = factors["u"], factors["v"]
            return WeightOp("compact_weight", False, (code,), bool(channels_last)), None, u, v, mu, index
        if channels_last is None:
            channels_last = follows_channels_last(mu)
        return WeightOp("rank1_weight", False, (code,), channels_last), mu, factors["u"], factors["v"]


@dataclass(frozen=True)
class LowRank(Spec):
    """W = σ + scaling · reshape(B A) (FedDecomp eq. 2–4), or an adapter of W = σ (LoRA, Hu et al. 2022, eq. 3).

    ratio: R_c of the paper for convolutions and R_l for linear layers, unless `linear_ratio` gives R_l.
    The rank of B A is max(1, round(R · min(o, i))) · F, F = min(kh, kw) (1 for a linear layer).
    rank: that of B A in every layer, in place of the ratios, as LoRA has it. Linear layers then have LoRA's factors
    in every layout: A [r, i], B [o, r], y = x σᵀ + scaling · (x Aᵀ) Bᵀ.
    layout: "separable" B [i·kh, r], A [r, o·kw], with the natural axis order (a kh×1 convolution followed by a 1×kw
    one); "view" B [o·kh, r], A [r, i·kw], the product `.view`ed as LoRA-convolution code has it.
    scaling: factor on B A (LoRA's α / r; the paper has 1).
    dropout: the probability with which each number of the adapter's input is zero in training (LoRA code), σ sees all;
    for convolutions in layout "separable" only. W is that of evaluation.

    σ starts as the layer's weight and B at zero, so that the layer starts as the same function with either init;
    A is normal ("random Gaussian values") with the standard deviation 1 / sqrt(3 · its number of columns), that of the
    uniform draw of LoRA code (Kaiming-uniform with a = sqrt(5)).
    """

    ratio: float = 0.6
    layout: str = "separable"
    linear_ratio: float | None = None
    scaling: float = 1.0
    rank: int | None = None
    dropout: float = 0.0

    dense: ClassVar[str | None] = "sigma"

    def __post_init__(self):
        check_kinds(self, "LowRank")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"LowRank(rank={self.rank!r}): must be an integer of at least 1, or None")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"LowRank(dropout={self.dropout!r}): must be at least 0 and below 1")
        _check_ratio("LowRank", "ratio", self.ratio)
        _check_ratio("LowRank", "linear_ratio", self.linear_ratio)
        _check_choice("LowRank", "layout", self.layout, ("separable", "view"))

    def rank_of(self, size: Size) -> int:
        """The inner dimension of B A for a weight of `size`."""
        if self.rank is not None:
            return self.rank
        linear = len(size) == 2
        ratio = self.linear_ratio if linear and self.linear_ratio is not None else self.ratio
        return max(1, round(ratio * min(size[:2]))) * (1 if linear else min(size[2:]))

    def layout_of(self, size: Size) -> str:
        """The layout of the factors for a weight of `size`."""
        return "view" if self.rank is not None and len(size) == 2 else self.layout

    def check(self, size: Size) -> None:
        super().check(size)
        if self.dropout and len(size) == 4 and self.layout == "view":
            raise ValueError(f'LowRank(dropout={self.dropout}): a convolution must have the layout "separable" for it')

    def parts(self, factors: Mapping[str, Tensor], size: Size) -> tuple[Tensor, Tensor]:
        """(a [r, i], b [o, r]) of a linear layer: W = σ + scaling · b a."""
        if self.layout_of(size) == "view":
            return factors["A"], factors["B"]
        return factors["B"].mT, factors["A"].mT

    def is_thin(self, size: Size, rows: float | None) -> bool:
        """Whether σ and B A apart cost less than W made of them, forward and backward, for a σ that takes no gradient.

        rows: of a linear layer, or pixels of a convolution; None for very many. In units of the product with σ, forward
        and backward: W made costs 3, and 3 r / rows to make it and to reduce its gradient; apart σ costs 2, as it has
        no gradient, and the factors 3 r (1 / m + 1 / n), for B of m rows and A of n columns.
        """
        shapes = self.shapes(size)
        few = 0 if rows is None else 1 / max(rows, 1)
        return shapes["A"][0] * (1 / shapes["A"][1] + 1 / shapes["B"][0] - few) < 1 / 3

    def shapes(self, size: Size) -> dict[str, Size]:
        self.check(size)
        rows, columns = lowrank_shape(LAYOUTS[self.layout_of(size)], size)
        rank = self.rank_of(size)
        return {"sigma": size, "A": (rank, columns), "B": (rows, rank)}

    def init(self, size, dense, how="random", generator=None):
        _check_choice("LowRank", "init", how, INITS)
        shapes = self.shapes(size)
        a = torch.randn(shapes["A"], generator=generator, dtype=torch.float64) / math.sqrt(3 * shapes["A"][1])
        return {"sigma": dense.clone(), "A": a.to(dense), "B": dense.new_zeros(shapes["B"])}

    def op(self, factors, size, channels_last=None):
        sigma, settings = factors["sigma"], (LAYOUTS[self.layout_of(size)], size, float(self.scaling))
        if channels_last is None:
            channels_last = follows_channels_last(sigma)
        return WeightOp("lowrank_weight", False, settings, channels_last), sigma, factors["A"], factors["B"]


@dataclass(frozen=True)
class Hadamard(Spec):
    """W = (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ) (FedPara, Proposition 1), or (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ + 1) if `personalized` (pFedPara, where
    x1, y1 are shared and x2, y2 personal).

    x1, x2 [o, r], y1, y2 [i·kh·kw, r]. ratio: γ of FedPara: r = round((1 − γ) r_min + γ r_max), r_min =
    ceil(sqrt(min(o, i·kh·kw))) lets W have full rank, r_max is the largest rank with no more numbers than W.

    tensor: convolutions by Proposition 3 instead, W = (T₁ ×₁ X₁ ×₂ Y₁) ⊙ (T₂ ×₁ X₂ ×₂ Y₂), W₁[o, i, ky, kx] =
    Σ_rs T₁[r, s, ky, kx] X₁[o, r] Y₁[i, s]: t1, t2 [r, r, kh, kw], x1, x2 [o, r], y1, y2 [i, r]; r_min is
    ceil(sqrt(min(o, i))). For 3×3 kernels at the same rank a third to a quarter of the numbers. W is made as by
    Proposition 1, from X and T ×₂ Y, which is [i·kh·kw, r].

    init "random": all factors normal with equal root mean square s so that the variance of W is that of PyTorch's
    default, 1 / (3 · fan_in): (r s⁴)², with tensor (r² s⁶)², if personalized v · (v + 1) with v the root of that. init
    "svd" cannot reproduce a given weight and raises ValueError.
    """

    ratio: float = 0.5
    personalized: bool = False
    tensor: bool = False

    def __post_init__(self):
        check_kinds(self, "Hadamard")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"Hadamard(ratio={self.ratio}): must be between 0 and 1")

    def _cores(self, size: Size) -> bool:
        return self.tensor and len(size) == 4

    def rank_of(self, size: Size) -> int:
        """The inner dimension of both products for a weight of `size`."""
        o, n = size[0], _fan_in(size)
        if self._cores(size):
            i, taps = size[1], math.prod(size[2:])
            smallest = math.ceil(math.sqrt(min(o, i)))
            # The positive root of 2 r (o + i) + 2 r² taps = o i taps.
            largest = (math.isqrt((o + i) ** 2 + 2 * taps**2 * o * i) - (o + i)) // (2 * taps)
        else:
            smallest = math.ceil(math.sqrt(min(o, n)))
            largest = (o * n) // (2 * (o + n))
        return round((1 - self.ratio) * smallest + self.ratio * max(smallest, largest))

    def shapes(self, size: Size) -> dict[str, Size]:
        self.check(size)
        r = self.rank_of(size)
        if self._cores(size):
            core = {"t1": (r, r, *size[2:]), "t2": (r, r, *size[2:])}
            return core | {"x1": (size[0], r), "y1": (size[1], r), "x2": (size[0], r), "y2": (size[1], r)}
        x, y = (size[0], r), (_fan_in(size), r)
        return {"x1": x, "y1": y, "x2": x, "y2": y}

    def init(self, size, dense, how="random", generator=None):
        _check_choice("Hadamard", "init", how, INITS)
        if how == "svd":
            raise ValueError('Hadamard: init="svd" cannot reproduce a given weight; use init="random"')
        variance, r = default_std(size) ** 2, self.rank_of(size)
        product_variance = (math.sqrt(1 + 4 * variance) - 1) / 2 if self.personalized else math.sqrt(variance)
        rms = (product_variance / r**2) ** (1 / 6) if self._cores(size) else (product_variance / r) ** 0.25
        return {name: _scaled_normal(shape, rms, dense, generator) for name, shape in self.shapes(size).items()}

    def op(self, factors, size, channels_last=None):
        x1, y1, x2, y2 = (factors[name] for name in ("x1", "y1", "x2", "y2"))
        if self._cores(size):
            # Autocast turns the result of einsum into half precision; the op wants one type.
            y1, y2 = (
                torch.einsum("rskl,is->iklr", factors[core], y).flatten(0, 2).to(y.dtype)
                for core, y in (("t1", y1), ("t2", y2))
            )
        how = WeightOp("hadamard_weight", False, (size, self.personalized), bool(channels_last))
        return how, None, x1, y1, x2, y2
