"""What a factorized layer consists of: the factors of its weight, and the forms of μ."""

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from fastfact.nn import sparsity, weight_cache
from fastfact.nn.specs import Spec
from fastfact.ops.common import address, transforming

INDEX = "mu_index"

__all__ = ["INDEX", "Factors"]


class Factors(nn.Module):
    """The parameters of a factorized layer: the factors of `spec`, by name, and `bias`.

    The parameter that carries the L1 penalty (μ) is marked for `ff.optim.ProxSGD`; the mark survives `deepcopy`,
    pickling and `load_state_dict(assign=True)`.

    μ has two forms: dense, of the shape of W, and compact (after `compact()`): the values [nnz] of the support, with
    their ascending flat positions in the buffer `mu_index` int32 [nnz]. It stays one and the same parameter.

    Factors are read as attributes, so that `torch.nn.utils.prune`, `parametrize` and `weight_norm` work on them. What
    changes the form of μ (`compact`, `prune_`, …) needs μ to be a parameter of the layer, and raises ValueError if not.
    The positions `mu_index` are no numbers that could be averaged: after an in-place write that changed them the layer
    raises RuntimeError (`set_support` and `load_state_dict` are the ways to change them).
    """

    spec: Spec
    size: tuple[int, ...]
    channels_last = False
    """Whether W is laid out channels_last where no dense factor says how; see `FactorizedConv2d`."""
    _noted: tuple[Tensor, int, int] | None = None
    _held: tuple[int, object] | None = None
    """Where the positions lie, and what keeps them there, so that no kernel reads them to see whether they changed."""

    def _build(self, size, spec: Spec, bias: int | None, dense: Tensor | None, device, dtype) -> None:
        if not isinstance(spec, Spec):
            raise TypeError(f"{type(self).__name__}(spec={spec!r}): must be ff.Rank1, ff.LowRank or ff.Hadamard")
        self.size = tuple(size)
        self.spec = spec.for_size(self.size)
        shapes = self.spec.shapes(self.size)
        self._names = tuple(shapes)
        if dense is None:
            dense = torch.empty(self.size, device=device, dtype=dtype)
        for name, shape in shapes.items():
            like = dense if shape == self.size and name == spec.dense else dense.new_empty(0)
            empty = torch.empty_like(like) if like is dense else like.new_empty(shape)
            self.register_parameter(name, nn.Parameter(empty))
        self.register_parameter("bias", nn.Parameter(dense.new_empty(bias)) if bias else None)

    @torch.no_grad()
    def reset_parameters(
        self, init: str = "random", dense: Tensor | None = None, generator: torch.Generator | None = None
    ) -> None:
        """Set the factors as `spec` says: from scratch, or from the weight `dense` of the layer this one replaces.

        Without `dense`, W (for `LowRank`: σ) and the bias are drawn as `nn.Conv2d` and `nn.Linear` draw theirs.
        """
        if dense is None:
            like = next(iter(self.factors().values()))
            bound = (1 / torch.Size(self.size[1:]).numel()) ** 0.5
            dense = torch.empty(self.size, dtype=like.dtype, device=like.device)
            dense.uniform_(-bound, bound, generator=generator)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound, generator=generator)
        for name, value in self.spec.init(self.size, dense, init, generator).items():
            getattr(self, name).copy_(value)

    @staticmethod
    def _weight_of(layer: nn.Module) -> Tensor:
        """The weight of the dense layer, of the shape `size`."""
        return layer.weight.detach()

    def factors(self) -> dict[str, nn.Parameter]:
        """The factors by name: u, v, mu | sigma, A, B | x1, y1, x2, y2 (shapes: see the spec)."""
        return {name: getattr(self, name) for name in self._names}

    def _factor(self, name: str) -> Tensor | None:
        """A factor, None for one that the spec has not. Not every attribute is a parameter: see the class."""
        found = self._parameters.get(name)
        return found if found is not None or name not in self._names else getattr(self, name)

    def _tensors(self) -> dict[str, Tensor]:
        """What W is made from: the factors, and the positions of compact μ as `mu_index`."""
        parameters, found = self._parameters, {}
        for name in self._names:
            factor = parameters.get(name)
            found[name] = getattr(self, name) if factor is None else factor
        mu = found.get("mu")
        if mu is not None and mu.dim() == 1:
            found[INDEX] = self._positions()
        return found

    @property
    def is_compact(self) -> bool:
        """Whether μ is in compact form."""
        mu = self._factor("mu")
        return mu is not None and mu.dim() == 1

    @property
    def density(self) -> float:
        """Fraction of nonzeros in the sparse factor (μ): 0 for `Rank1(sparse=False)`, 1 for specs without one. NaN for
        one without numbers (on the device "meta")."""
        if self.spec.sparse_factor not in self._names:
            return 0.0 if self.spec.sparse_factor else 1.0
        mu = self.mu
        return math.nan if mu.is_meta else sparsity.nonzeros(mu) / torch.Size(self.size).numel()

    def _require_mu(self, what: str) -> nn.Parameter:
        name = self.spec.sparse_factor
        if name not in self._names:
            raise ValueError(f"{what}: {self.spec} has no sparse factor")
        if name not in self._parameters:
            raise ValueError(
                f"{what}: {name} is no parameter of the layer but made from others (pruned, parametrized, normalised):"
                " remove that first (torch.nn.utils.prune.remove, parametrize.remove_parametrizations)"
            )
        return self._parameters[name]

    def _positions(self) -> Tensor:
        """The positions of compact μ. Raises RuntimeError where an in-place write changed them."""
        index = self._buffers[INDEX]
        noted = self._noted
        if noted is None or noted[0] is not index or torch.compiler.is_compiling() or index._version == noted[1]:
            return index
        if weight_cache.digest_of([index]) != noted[2]:
            raise RuntimeError(
                "mu_index was written to in place, and its positions are others now. They cannot be averaged"
                " (AveragedModel(use_buffers=True), ModelEmaV2): average parameters only, or the expanded layer"
                " (expand()); to change them, call set_support() or load_state_dict()"
            )
        self._noted = index, index._version, noted[2]
        return index

    def _note_positions(self) -> None:
        """Take the positions as they are now for those of the layer."""
        index = self._buffers.get(INDEX)
        plain = type(index) is Tensor and not index.is_meta and not index.is_inference()
        plain = plain and not transforming()
        self._hold_positions(index if plain else None)
        self._noted = (index, index._version, weight_cache.digest_of([index])) if plain else None

    def _hold_positions(self, index: Tensor | None) -> None:
        at = None if index is None else address(index)
        if at is None or self._held is None or self._held[0] != at:
            self._held = None if index is None else (at, weight_cache.hold(index))

    def prune_(self, density: float) -> Self:
        """Keep the round(density · numel) numbers of μ with the largest magnitude, set the others to zero, in place.

        Raises ValueError for a density outside [0, 1] or a spec without μ.
        """
        mu = self._require_mu("prune_")
        sparsity.prune_(mu, density, of=torch.Size(self.size).numel())
        return self

    @torch.no_grad()
    def compact(self, density: float | None = None) -> Self:
        """Bring μ into compact form: its nonzeros, after `prune_(density)` if a density is given.

        On a compact layer, positions whose value is zero leave the support. The gradient of μ is dropped, and `ProxSGD`
        starts its momentum anew. Raises ValueError as `prune_` does.
        """
        mu = self._require_mu("compact")
        if density is not None:
            self.prune_(density)
        if self.is_compact:
            nonzero = mu.nonzero().flatten()
            self.set_support(mu[nonzero], self._positions()[nonzero])
        else:
            self.set_support(*sparsity.gather(mu))
        return self

    @torch.no_grad()
    def expand(self) -> Self:
        """Bring μ back into dense form, the inverse of `compact`."""
        mu = self._require_mu("expand")
        if self.is_compact:
            dense = sparsity.scatter(mu, self._positions(), self.size)
            sparsity.put(mu, dense.to(memory_format=torch.channels_last) if self.channels_last else dense)
            del self._buffers[INDEX]
        return self

    @torch.no_grad()
    def regrow(self, gradient: Tensor, l1: float) -> int:
        """Let positions off the support join it, with value 0, where |gradient| > `l1`; returns how many did.

        gradient: of the loss without the penalty by the dense μ, of the shape of W. A weight at zero whose gradient is
        at most λ is where the L1 problem wants it (its KKT condition), any other is not. Raises ValueError for a layer
        that is not compact, a gradient of another shape, or a negative l1.
        """
        mu = self._require_support("regrow", gradient)
        if not l1 >= 0:
            raise ValueError(f"regrow(l1={l1}): must not be negative")
        join = gradient.reshape(-1).abs() > l1
        join[self.mu_index.long()] = False
        new = join.nonzero().flatten().to(torch.int32)
        index, order = torch.cat([self.mu_index, new]).sort()
        self.set_support(torch.cat([mu, mu.new_zeros(len(new))])[order], index)
        return len(new)

    @torch.no_grad()
    def replace(self, gradient: Tensor, count: int) -> Self:
        """Give `count` positions of the support to others, as `sparsity.replaced` says; it stays as large as it is.

        gradient: as for `regrow`. Raises ValueError as `regrow` does, and for a count that is negative.
        """
        mu = self._require_support("replace", gradient)
        if count < 0:
            raise ValueError(f"replace(count={count}): must not be negative")
        self.set_support(*sparsity.replaced(mu, self.mu_index, gradient, count))
        return self

    def _require_support(self, what: str, gradient: Tensor) -> nn.Parameter:
        mu = self._require_mu(what)
        if not self.is_compact:
            raise ValueError(f"{what}: μ is dense, call compact() first")
        if tuple(gradient.shape) != self.size:
            raise ValueError(f"{what}: gradient has shape {list(gradient.shape)}, must be {list(self.size)}")
        return mu

    @torch.no_grad()
    def set_support(self, values: Tensor, index: Tensor) -> None:
        """Make μ compact with these values [nnz] at these ascending flat positions int32 [nnz]."""
        mu = self._require_mu("set_support")
        sparsity.put(mu, values.contiguous())
        self.register_buffer(INDEX, index)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        factor, saved = self.spec.sparse_factor, state_dict.get(prefix + INDEX)
        if factor in self._names and prefix + factor in state_dict and (saved is not None or self.is_compact):
            if saved is None:
                self.expand()
            elif not self.is_compact or not _equal(saved, self.mu_index):
                self.set_support(self.mu.new_zeros(saved.shape), saved.to(self.mu.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._note_positions()

    def _save_to_state_dict(self, *args) -> None:
        if self.is_compact:
            self._positions()
        super()._save_to_state_dict(*args)

    def _mark(self) -> None:
        parameter = self._parameters.get(self.spec.sparse_factor)
        if parameter is not None:
            sparsity.mark_penalized(parameter)

    def register_parameter(self, name, param):
        if name == "weight":
            setattr(self, name, param)
        super().register_parameter(name, param)
        self._mark()

    def register_buffer(self, name, *args, **kwargs):
        super().register_buffer(name, *args, **kwargs)
        if name == INDEX:
            self._note_positions()

    def _apply(self, *args, **kwargs):
        result = super()._apply(*args, **kwargs)
        self._mark()
        self._note_positions()
        return result

    def __setattr__(self, name, value):
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__}.weight is made from the factors, it cannot be assigned: assign to the factors,"
                " set them from a weight by reset_parameters('svd', dense=W), or take to_dense(), whose weight is a"
                " parameter"
            )
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter):
            self._mark()
        if name == INDEX:
            self._note_positions()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark()
        self._note_positions()


def _equal(saved: Tensor, index: Tensor) -> bool:
    """Whether both are the same positions, as far as they have numbers."""
    return saved.shape == index.shape and not (saved.is_meta or index.is_meta) and torch.equal(saved.to(index), index)


def is_dense(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is a μ that is dense."""
    return "mu" in tensors and INDEX not in tensors


def rank1_parts(tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    """(u, v, μ, its positions) of `Rank1`."""
    return tensors.get("u"), tensors.get("v"), tensors.get("mu"), tensors.get(INDEX)
