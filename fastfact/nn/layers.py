"""Factorized layers: drop-in for `nn.Conv2d` and `nn.Linear`, with the weight made from factors in each forward."""

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact import ops
from fastfact.nn import choice, compiled, sparsity, weight_cache
from fastfact.nn.derived import Derived
from fastfact.nn.specs import LowRank, Rank1, Spec
from fastfact.ops import direct
from fastfact.ops.backends import PLAIN, dispatches, loaded
from fastfact.ops.common import address, autocast, autocasts, is_channels_last, is_mapped, recording, transforming
from fastfact.ops.weights import PIXELS, Convolution, applied, apply_weight, are_rows, call_of, pixels

PATHS = ("auto", "reconstruct", "factored")
INDEX = "mu_index"
NOMINAL_IMAGES, NOMINAL_SIDE = 32, 16
"""The input assumed where sizes may be symbols."""
PACKED = 0.5
"""The density of a dense μ below which its nonzeros are packed for evaluation, so that it can be factored."""
DEPTHWISE = 4
"""Channels from which on the kernel of depthwise layers serves."""
FEW_PIXELS = 500
"""Of the output, up to which a convolution of dense μ may be done without W."""
FEW_ROWS = 16
"""Rows up to which a product with a small W is no more than a loop (`multiply_few` in csrc/bind_cpu_direct.cpp)."""
ANSWERS = 32
"""Inputs of so many kinds a layer remembers its path for."""
OF_WEIGHT = ("reconstruct", "product")
"""The paths that make W."""
SETTINGS = {"path", "spec", "size", "stride", "padding", "dilation", "groups", "padding_mode"}
"""What the path, or a kept weight, depends on besides tensors, and one may assign to."""

OF_PROCESS = {"_answers", "_nodes", "_noted", "_held", "_how"}
"""What a layer knows of this process, and a copy does not."""

__all__ = ["FactorizedConv1d", "FactorizedConv2d", "FactorizedLayer", "FactorizedLinear"]


class FactorizedLayer(nn.Module):
    """What the factorized layers share. Parameters are the factors of `spec`, by name, and `bias`.

    The parameter that carries the L1 penalty (μ) is marked for `ff.optim.ProxSGD`; the mark survives `deepcopy`,
    pickling and `load_state_dict(assign=True)`.

    μ has two forms: dense, of the shape of W, and compact (after `compact()`): the values [nnz] of the support, with
    their ascending flat positions in the buffer `mu_index` int32 [nnz]. It stays one and the same parameter.

    path: "reconstruct" makes W and calls the dense layer; "factored" computes from u, v and compact μ without W
    (`Rank1` with layout "spatial" or "kernel", or of a linear layer; padding other than by zeros, alike on both
    sides of an axis, is added to the input first); "auto" takes the one that was faster for inputs such as the one at
    hand when it was measured (`nn.choice`). The factored one can be where μ is compact or the spec has none, and in
    evaluation on the CPU where μ is mostly zeros: these are left out.
    Of a dense μ "auto" may take it on the CPU, for linear layers and convolutions that are depthwise, 1×1 (layout
    "kernel") or of few pixels.
    "factored" of `LowRank` (linear layers, and convolutions in layout "separable") takes σ and B A apart: "auto" takes
    it where σ takes no gradient and that costs less (`LowRank.is_thin`), of a σ that does in training on the CPU where
    it was measured to be faster, always where the adapter has dropout, and not in evaluation on the CPU, where W is
    kept.

    "fused", of a convolution, makes the weight of `Rank1` inside the convolution
    (`ops.fused_conv2d`) and serves all clients of `vmap` in one call, where "reconstruct" becomes a grouped
    convolution. Of `LowRank` (layout "separable", no groups) with clients that share σ, one ungrouped convolution with
    σ serves them all where the rank is low enough, and only A and B take part in each client's own. `Rank1` without μ
    is two smaller convolutions, where they cost less. "auto" takes it on a GPU: for clients of `vmap`, and of `Rank1`
    where it was faster.

    "auto" has another one on the CPU: "product", for 1×1 convolutions of images whose pixels are rows in memory
    (channels_last), without stride or padding: W is made and multiplied with all pixels as one matrix. (Not where W is
    kept as oneDNN has it, see below.)

    In evaluation mode on the CPU, where no gradient is asked for, "reconstruct" makes W once and keeps it as long as
    every number of the factors is what it was, however they are written to (`nn.weight_cache`), or until `train()` or
    `eval()` is called; for float32 images in channels_last it is kept in the form that oneDNN's convolution computes
    with, into which PyTorch brings it in each call. "factored" has the kernels remember the order in which they take
    the nonzeros of μ.

    Factors are read as attributes, so that `torch.nn.utils.prune`, `parametrize` and `weight_norm` work on them. What
    changes the form of μ (`compact`, `prune_`, …) needs μ to be a parameter of the layer, and raises ValueError if not.
    The positions `mu_index` are no numbers that could be averaged: after an in-place write that changed them the layer
    raises RuntimeError (`set_support` and `load_state_dict` are the ways to change them).
    """

    spec: Spec
    size: tuple[int, ...]
    origin: tuple[nn.Module, ...] = ()
    """The module this layer stands for, without its parameters, where that is no plain dense layer (see convert)."""
    path: str = "auto"
    paths = PATHS
    _pads = False
    """Whether `_padded` makes of an input what the layer computes with."""
    channels_last = False
    """Whether W is laid out channels_last where no dense factor says how; see `FactorizedConv2d`."""
    _noted: tuple[Tensor, int, int] | None = None
    _held: tuple[int, object] | None = None
    """Where the positions lie, and what keeps them there, so that no kernel reads them to see whether they changed."""
    _how: str | None = None
    """What the layer is for torch.compile, in evaluation; None where a graph of it has to do."""

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
        self._cache, self._answers, self._nodes = weight_cache.WeightCache(), {}, direct.Nodes()

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
    def weight(self) -> Tensor:
        """W in PyTorch's order, made from the factors at each access; differentiable. Where evaluation keeps W, it is
        that one, copied on a write, from the second access on.

        It is no place to write to: an assignment raises AttributeError, an in-place operation on it RuntimeError.
        """
        weight = self._kept_weight()
        if weight is None:
            weight = self._weight(self.channels_last or None)
        return weight if type(weight) is not Tensor or transforming() else weight.as_subclass(Derived)

    def _kept_weight(self) -> Tensor | None:
        """W as evaluation keeps it, to be copied by who writes to it. None the first time, and where none is kept."""
        lazy = getattr(torch, "_lazy_clone", None)
        if self.training or lazy is None or not weight_cache.allowed():
            return None
        tensors, channels_last = self._tensors(), bool(self.channels_last)
        if not channels_last and len(self.size) == 4 and _is_dense(tensors):
            return None  # its format is that of μ
        key, make = (self.spec, self.size, channels_last), functools.partial(self._made, tensors, channels_last)
        weight = self._cache.value(list(tensors.values()), key, make, again=True)
        return weight if weight is None else lazy(weight)

    def _weight(self, channels_last: bool | None) -> Tensor:
        return self.spec.weight(self._tensors(), self.size, channels_last)

    @property
    def is_compact(self) -> bool:
        """Whether μ is in compact form."""
        mu = self._factor("mu")
        return mu is not None and mu.dim() == 1

    @property
    def density(self) -> float:
        """Fraction of nonzeros in the sparse factor (μ): 0 for `Rank1(sparse=False)`, 1 for specs without one."""
        if self.spec.sparse_factor not in self._names:
            return 0.0 if self.spec.sparse_factor else 1.0
        return torch.count_nonzero(self.mu).item() / torch.Size(self.size).numel()

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
        if _digest(index) != noted[2]:
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
        self._noted = (index, index._version, _digest(index)) if plain else None

    def _hold_positions(self, index: Tensor | None) -> None:
        at = None if index is None else address(index)
        if at is None or self._held is None or self._held[0] != at:
            self._held = None if index is None else (at, weight_cache.hold(index))

    def prune_(self, density: float) -> "FactorizedLayer":
        """Keep the round(density · numel) numbers of μ with the largest magnitude, set the others to zero, in place.

        Raises ValueError for a density outside [0, 1] or a spec without μ.
        """
        mu = self._require_mu("prune_")
        sparsity.prune_(mu, density, of=torch.Size(self.size).numel())
        return self

    @torch.no_grad()
    def compact(self, density: float | None = None) -> "FactorizedLayer":
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
    def expand(self) -> "FactorizedLayer":
        """Bring μ back into dense form, the inverse of `compact`."""
        mu = self._require_mu("expand")
        if self.is_compact:
            mu.grad = None
            dense = sparsity.scatter(mu, self._positions(), self.size)
            mu.data = dense.to(memory_format=torch.channels_last) if self.channels_last else dense
            sparsity.change_support(mu)
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
    def replace(self, gradient: Tensor, count: int) -> "FactorizedLayer":
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
        mu.grad = None
        mu.data = values.contiguous()
        sparsity.change_support(mu)
        self.register_buffer(INDEX, index)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        saved = state_dict.get(prefix + INDEX)
        if self.spec.sparse_factor in self._names and (saved is not None or self.is_compact):
            if saved is None:
                self.expand()
            elif not self.is_compact or saved.shape != self.mu_index.shape:
                self.set_support(self.mu.new_zeros(saved.shape), saved.to(self.mu.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._note_positions()

    def _save_to_state_dict(self, *args) -> None:
        if self.is_compact:
            self._positions()
        super()._save_to_state_dict(*args)

    @property
    def can_factor(self) -> bool:
        """Whether there is a factored path for the layer as it is: compact μ or none, and a spec that has one."""
        return self._why_not("factored", self._tensors()) is None

    def forward(self, x: Tensor) -> Tensor:
        """The layer, on the path that is asked for, or chosen."""
        return self._of_padded(self._padded(x) if self._pads else x)

    def _of_padded(self, x: Tensor) -> Tensor:
        """The forward of an input that is padded."""
        if not torch.compiler.is_compiling():
            y = direct.serve(self._nodes, x, self.training, self._noted)
            if y is not None:
                return y
        elif self._how is not None and self._is_served(x):
            return torch.ops.fastfact_nn.layer(self._how, x, list(self._tensors().values()), self.bias)
        return self._forward(x)

    def _is_served(self, x: Tensor) -> bool:
        """Whether the layer is one op in a graph: in evaluation, of numbers that it has itself."""
        if torch.is_grad_enabled() or recording() or torch._C._are_functorch_transforms_active():
            return False
        tensors, bias = self._tensors(), self.bias
        own = self._parameters.keys()
        if any(name not in own and name != INDEX for name in tensors):
            return False
        floating = [t for name, t in tensors.items() if name != INDEX] + ([] if bias is None else [bias])
        return not autocasts("cpu") and x.is_cpu and all(t.is_cpu and t.dtype == x.dtype for t in floating)

    def _describe(self) -> str | None:
        """What the layer is, see `compiled`."""
        return None

    @torch.inference_mode(False)
    def holding(self, factors: Sequence[Tensor], bias: Tensor | None) -> "FactorizedLayer":
        """A layer such as this with factors, in the order of `factors()`, and where there are more the positions of
        compact μ, that share memory with these."""
        other = copy.copy(self)
        own = [nn.Parameter(t.detach(), requires_grad=False) for t in factors[: len(self._names)]]
        shared = bias if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        other.__dict__["_parameters"] = dict(zip(self._names, own, strict=True)) | {"bias": shared}
        positions = [t.detach() for t in factors[len(self._names) :]]
        other.__dict__["_buffers"] = {INDEX: positions[0]} if positions else {}
        other._note_positions()
        return other

    def _forward(self, x: Tensor) -> Tensor:
        """The forward where no node serves."""
        if not self.training and weight_cache.allowed():
            return self._evaluate(x)
        if (y := self._by_twin(x, FactorizedLayer.forward)) is not None:
            return y
        tensors, bias = self._tensors(), self.bias
        path = self._path(x, tensors, None)
        if torch.is_grad_enabled():
            self._note_node(path, x, tensors, bias)
        return self._compute(path, x, tensors, bias, None)

    def _by_twin(self, x: Tensor, of: Callable[["FactorizedLayer", Tensor], Any]) -> Any:
        """of(twin, x), in evaluation under autocast: the twin is the layer in autocast's dtype, kept while the numbers
        of this one are what they were. So nothing is cast in each call but x, and what is kept and chosen for a layer
        of that dtype serves. None where there is no twin."""
        if self.training or not weight_cache.allowed(casting=True) or not torch.is_autocast_enabled("cpu"):
            return None
        if type(x) not in PLAIN or not x.is_cpu or not x.is_floating_point() or x.dtype == torch.float64:
            return None
        own = [t for t in (*self._parameters.values(), self._buffers.get(INDEX)) if t is not None]
        dtype = torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", False)
        try:
            twin = self._cache.value(own, ("twin", dtype), lambda: self._twin(dtype)) if own else None
            return None if twin is None else of(twin, x.to(dtype))
        finally:
            torch.set_autocast_enabled("cpu", True)

    @torch.inference_mode(False)
    def _twin(self, dtype: torch.dtype) -> "FactorizedLayer | None":
        """The layer in another dtype, of the same positions of μ; None where its factors are not its parameters, or
        float64, which autocast leaves as it is."""
        own, parameters = self._tensors(), self._parameters
        floats = [t for name, t in (*own.items(), ("bias", self.bias)) if name != INDEX and t is not None]
        if not parameters.keys() >= {*self._names, "bias"} or any(t.dtype == torch.float64 for t in floats):
            return None

        def cast(p: nn.Parameter | None) -> nn.Parameter | None:
            return p if p is None else nn.Parameter(p.detach().to(dtype), requires_grad=False)

        twin = copy.copy(self)
        twin.__dict__["_parameters"] = {name: cast(p) for name, p in parameters.items()}
        twin.__dict__["_buffers"] = dict(self._buffers)
        twin._cache = weight_cache.WeightCache()
        twin.__dict__["_pads"] = False  # what it is given is padded
        return twin

    def _note_node(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> bool:
        """Let one call serve inputs such as x from now on, if the layer on this path can be one; whether it can."""
        if transforming() or not choice.can_measure():
            return False
        call = self._call(path, x, tensors, bias)
        # What is no leaf would keep the graph it comes from.
        if call is None or not all(t is None or t.is_leaf for t in (*tensors.values(), bias)):
            return False
        return self._note(x, tensors, bias, None, call)

    def _note(
        self,
        x: Tensor,
        tensors: dict[str, Tensor],
        bias: Tensor | None,
        watch: direct.Watch | None,
        call: direct.Call,
    ) -> bool:
        """Let a call serve inputs such as x while the layer has these tensors, and nothing that is watched changes;
        whether it does."""
        asked = direct.key(x, self.training)
        if asked is None or not dispatches():
            return False
        trained = torch.is_grad_enabled()
        facts = [direct.serving(), choice.holds()]
        for name, tensor in (*tensors.items(), ("bias", bias)):
            place = self._buffers if name == INDEX else self._parameters
            if name not in place or place[name] is not tensor:
                return False
            floating = trained and tensor is not None and name != INDEX
            facts.append((place, name, tensor, tensor.requires_grad if floating else None))
        if INDEX not in tensors:
            facts.append((self._buffers, INDEX, None, None))
        shape = None if watch else direct.form(tensors.get("mu"))
        # Those that watch other numbers will not serve again.
        nodes = direct.Nodes(self._nodes if watch is None else self._nodes.of(watch))
        if len(nodes) >= ANSWERS:
            nodes.clear()
        nodes[asked] = direct.Node(tuple(facts), shape, watch, *call)
        self._nodes = nodes
        return True

    def _call(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> direct.Call | None:
        """The layer on this path for all inputs such as x, where that is one call."""
        if path not in OF_WEIGHT or not self._is_one_node(x, tensors, bias):
            return None
        how, *parts = self.spec.op(tensors, self.size, self._format_of(is_channels_last(x), tensors))
        if any(part is not None and all(part is not t for t in tensors.values()) for part in parts):
            return None
        of = applied(self._convolution() if path == "reconstruct" else PIXELS, how, self.size)
        return call_of(of, bias, *parts)

    def _evaluate(self, x: Tensor) -> Tensor:
        """The forward where what is made from the factors may be kept, and no node serves."""
        tensors, bias = self._tensors(), self.bias
        form = INDEX in tensors, x.shape, x.stride(), x.dtype, x.device, type(x), *choice.generation()
        if form in self._answers:
            return self._compute(self._answers[form], x, tensors, bias, None)
        kept = self._cache.of(list(tensors.values()))
        of_layer, (tensors, packed) = tensors, self._packed(tensors, kept)
        path = self._path(x, tensors, packed)
        if not choice.can_measure():
            return self._compute(path, x, tensors, bias, kept)
        if path not in OF_WEIGHT and packed is None:
            if not self._note_node(path, x, tensors, bias):
                self._remember(form, path)  # whatever the numbers are
        elif kept is not None and (call := self._kept_call(path, x, tensors, bias, kept)):
            if watch := self._cache.watch(kept):
                self._note(x, of_layer, bias, watch, call)
            if (y := call(x)) is not None:
                return y
        return self._compute(path, x, tensors, bias, kept)

    def _kept_call(
        self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept: weight_cache.Kept
    ) -> direct.Call | None:
        """What serves inputs such as x on this path from what is kept for the factors; None where nothing does."""
        if path == "reconstruct":
            return self._dense_call(x, self._weight_for(is_channels_last(x), tensors, kept), bias)
        return self._call(path, x, tensors, bias)

    def _dense_call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> direct.Call:
        """What the dense layer computes with this weight."""
        # A layer that its own nodes hold would live until the garbage is collected.
        layer = weakref.ref(self)
        return direct.Call(lambda x: layer()._dense_forward(x, weight, bias), (None,), 0)

    def _kept_form(
        self, form: Hashable, tensors: dict[str, Tensor], kept: weight_cache.Kept, of: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """W in another form, of(W), which alone is kept."""
        made = functools.partial(self._made, tensors, len(self.size) == 4)
        return kept.value((form, self.spec, self.size), lambda: of(made()))

    def _remember(self, asked: tuple, answer: str) -> None:
        answers = self._answers if len(self._answers) < ANSWERS else {}
        answers[asked] = answer
        self._answers = answers

    def _forget(self) -> None:
        """Forget what was made and chosen for other settings."""
        if "_cache" in self.__dict__:
            self._cache.clear()
            self._answers, self._nodes = {}, direct.Nodes()
            self._note_kind()

    def _operands(self) -> tuple[dict[str, Tensor], weight_cache.Kept | None]:
        """What a forward computes from now, and what is kept for it."""
        tensors = self._tensors()
        if self.training or not weight_cache.allowed():
            return tensors, None
        return self._packed(tensors, self._cache.of(list(tensors.values())))

    def _path(self, x: Tensor, tensors: dict[str, Tensor], kept: weight_cache.Kept | None) -> str:
        path = self.path
        if path == "auto":
            return self._choose(x, tensors, kept)
        if path != "factored" and self._drops():
            raise ValueError(f"path={path!r}: in training {self.spec} has dropout, which only the factored path has")
        if path != "reconstruct" and (why_not := self._why_not(path, tensors)):
            raise ValueError(f"path={path!r}: {why_not}")
        return path

    def path_for(self, x: Tensor) -> str:
        """The path that the forward takes for x: "reconstruct", "factored", "fused" or "product"."""
        x = self._padded(x)
        found = self._by_twin(x, FactorizedLayer.path_for)
        return found or self._path(self._brought(x), *self._operands())

    def _padded(self, x: Tensor) -> Tensor:
        """x, with what the layer pads it with where it `_pads`."""
        return x

    def _brought(self, x: Tensor) -> Tensor:
        """x in the form in which the layer computes with it."""
        return x

    def _packed(
        self, tensors: dict[str, Tensor], kept: weight_cache.Kept | None
    ) -> tuple[dict[str, Tensor], weight_cache.Kept | None]:
        """The factors for evaluation, with compact μ where it is dense but mostly zeros, and what is kept for them if
        that depends on their numbers."""
        mu = tensors.get("mu")
        if self.path != "auto" or mu is None or mu.dim() == 1 or not self._has_factored_form():
            return tensors, None
        packed = kept and kept.value("packed", lambda: _pack(mu))
        return ({**tensors, "mu": packed[0], INDEX: packed[1]} if packed else tensors), kept

    def _weight_for(
        self,
        channels_last: bool,
        tensors: dict[str, Tensor] | None = None,
        kept: weight_cache.Kept | None = None,
    ) -> Tensor:
        """W for inputs of a memory format, from `tensors` (by default the layer's): in evaluation the one that is kept,
        otherwise made."""
        tensors = self._tensors() if tensors is None else tensors
        if self.training or not weight_cache.allowed():
            return self.spec.weight(_cast(tensors), self.size, self._format_of(channels_last, tensors))
        channels_last = channels_last and len(self.size) == 4
        make = functools.partial(self._made, tensors, channels_last)
        kept = kept or self._cache.of(list(tensors.values()))
        return make() if kept is None else kept.value((self.spec, self.size, channels_last), make)

    def _made(self, tensors: dict[str, Tensor], channels_last: bool) -> Tensor:
        """W in a memory format, to be kept."""
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return self.spec.weight(tensors, self.size, channels_last).contiguous(memory_format=layout)

    def _choose(self, x: Tensor, tensors: dict[str, Tensor], kept: weight_cache.Kept | None) -> str:
        """The path that "auto" takes."""
        bias = self.bias
        trained = torch.is_grad_enabled() and (
            x.requires_grad or any(t is not None and t.requires_grad for t in (*tensors.values(), bias))
        )
        if isinstance(self.spec, LowRank) and self._takes_apart(x, tensors, trained):
            return "factored"
        if transforming():
            return self._choose_nominal(x, tensors, trained)
        mu = tensors.get("mu")
        asked = (x.shape, x.stride(), _dtype(x), x.device, x.requires_grad, trained, self.training)
        asked += (mu is not None and mu.shape, *choice.generation())
        # To put the question takes longer than an answer that was given a call ago is worth.
        path = self._answers.get(asked)
        if path is None:
            path = self._ask(x, tensors, bias, kept, trained)
            if choice.can_measure():
                self._remember(asked, path)
        return path

    def _drops(self) -> bool:
        """Whether the input of the adapter loses numbers now."""
        return self.training and getattr(self.spec, "dropout", 0) > 0

    def _takes_apart(self, x: Tensor, tensors: dict[str, Tensor], trained: bool) -> bool:
        """Whether "auto" takes σ and B A of `LowRank` apart."""
        if self._why_not("factored", tensors) is not None:
            return False
        if self._drops():
            return True
        sigma, traced = tensors["sigma"], torch.compiler.is_compiling() or recording()
        if sigma.requires_grad or (not traced and is_mapped(sigma)):
            return False
        if not (trained or self.training) and x.device.type == "cpu" and weight_cache.allowed():
            return False
        return self.spec.is_thin(self.size, None if traced else self._rows(x))

    def _seen(self, x: Tensor) -> Tensor | None:
        """What the adapter sees of x, None for x itself."""
        return F.dropout(x, self.spec.dropout) if self._drops() else None

    def _rows(self, x: Tensor) -> float:
        """How many vectors the weight is multiplied with for x: rows, or pixels of the output."""
        raise NotImplementedError

    def _ask(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept, trained: bool) -> str:
        paths = self._candidates(x, tensors)
        if len(paths) == 1:
            return paths[0]
        path = choice.choose(
            self.work(x, tensors, trained), lambda: self._sides(paths, x, tensors, bias, kept, trained)
        )
        # The rule, and a table given by hand, know the work and not which paths there are for it.
        return path if path in paths else paths[0]

    def _candidates(self, x: Tensor, tensors: dict[str, Tensor]) -> list[str]:
        """The paths that there are for x, "reconstruct" first."""
        if any(type(t) not in PLAIN for t in (x, *tensors.values())):
            return ["reconstruct"]
        if isinstance(self.spec, LowRank):
            plain = self.training and choice.can_measure() and self._is_plain(x, tensors, self.bias, casts=True)
            return ["reconstruct", "factored"] if plain and not self._why_not("factored", tensors) else ["reconstruct"]
        factored = x.is_cpu and loaded("cpu") and self._has_factored_form() and not self._factors_are_weights(tensors)
        if factored and _is_dense(tensors):
            plain = choice.can_measure() and self._is_plain(x, tensors, self.bias, casts=True)
            factored = plain and self._takes_dense(x, tensors)
        elif factored:
            factored = not self._why_not("factored", tensors)
        return ["reconstruct", "factored"] if factored else ["reconstruct"]

    def _takes_dense(self, x: Tensor, tensors: dict[str, Tensor]) -> bool:
        """Whether a kernel of the factored path takes dense μ as it is."""
        raise NotImplementedError

    def _factors_are_weights(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the factored path computes as much as the dense layer, because v has the size of W."""
        return False

    def _sides(self, paths, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept, trained: bool):
        """path → a function that runs it, for `choice`: with a gradient of its own where one is asked for."""

        def alone(t: Tensor | None) -> Tensor | None:
            return t if t is None else t.detach().requires_grad_(trained and t.requires_grad)

        inputs, own, own_bias = alone(x), {name: alone(t) for name, t in tensors.items()}, alone(bias)
        leaves = [t for t in (inputs, *own.values(), own_bias) if t is not None and t.requires_grad]
        watched = None
        if not (trained or self.training) and weight_cache.allowed():
            watched = weight_cache.watch(tensors.values(), others=1)

        @functools.cache
        def call(path: str) -> Callable[[Tensor], Tensor | None]:
            if watched and path in OF_WEIGHT:
                # What is made for a measurement is not kept.
                return self._kept_call(path, inputs, own, own_bias, weight_cache.Kept(list(own.values()), 0, {}))
            one = self._call(path, inputs, own, own_bias)
            return one or (lambda x: self._compute(path, x, own, own_bias, kept))

        def forward(path: str, x: Tensor) -> Tensor:
            # As in evaluation once W is kept: the factors are looked at, and it serves.
            if watched and path in OF_WEIGHT:
                direct.still(watched)
            return call(path)(x)

        return {path: _side(functools.partial(forward, path), inputs, leaves, trained) for path in paths}

    def times(self, x: Tensor, training: bool) -> tuple[dict[str, float], str]:
        """(path → seconds, the path that "auto" takes) for x, as it is in evaluation, or for a training step; the
        seconds of the dense layer beside them as those of "dense".

        They are timed now, whatever is remembered.
        """
        mode, dense_side = self.training, self._dense_side(x, training)
        x = self._brought(self._padded(x.detach())).requires_grad_(x.requires_grad)
        try:
            self.train(training)
            with torch.set_grad_enabled(training):
                tensors, kept = self._operands()
                paths, chosen = self._candidates(x, tensors), self._path(x, tensors, kept)
                sides = self._sides(paths, x, tensors, self.bias, kept, training)
                return choice.times({"dense": dense_side, **sides}), chosen
        finally:
            self.train(mode)

    def _dense_side(self, x: Tensor, trained: bool) -> choice.Side:
        """The same of the dense layer of the same function."""
        dense, inputs = self.to_dense(), x.detach().requires_grad_(trained and x.requires_grad)
        if is_channels_last(x):
            dense.to(memory_format=torch.channels_last)
        return _side(dense.forward, inputs, [t for t in (inputs, *dense.parameters()) if t.requires_grad], trained)

    def work(self, x: Tensor, tensors: dict[str, Tensor], trained: bool) -> choice.Work:
        """What the choice is asked about for an input x."""
        if trained:
            step = "training" if x.requires_grad else "weights"
        else:
            step = "evaluation" if not self.training and weight_cache.allowed() else "forward"
        return self._work(tuple(x.shape), tensors, is_channels_last(x), step, _dtype(x), x.device.type)

    def _kind(self, layout: str) -> str:
        """The kind of `choice.Work`, for `Rank1` the layout."""
        if isinstance(self.spec, Rank1):
            return layout
        frozen = isinstance(self.spec, LowRank) and not self._factor("A").requires_grad
        return f"{type(self.spec).__name__} {layout}" + (" of a trained σ alone" if frozen else "")

    def _choose_nominal(self, x: Tensor, tensors: dict[str, Tensor], trained: bool) -> str:
        """The path where something traces or transforms: by the rule, for an input of a nominal size."""
        if x.device.type != "cpu" or recording() or not self._has_factored_form() or self._why_not("factored", tensors):
            return "reconstruct"
        step = "training" if trained else "forward"
        return choice.nominal(*self._work(None, tensors, False, step, x.dtype, "cpu"))

    def _work(self, shape: tuple[int, ...] | None, tensors, channels_last: bool, step: str, dtype, device: str):
        """What the choice is asked about, for an input of `shape` (None: a nominal one)."""
        raise NotImplementedError

    def _compute(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept) -> Tensor:
        """The layer on one path, from these factors."""
        if path not in OF_WEIGHT:
            return self._without_weight(path, x, tensors, bias)
        channels_last = is_channels_last(x)
        if self._is_one_node(x, tensors, bias):
            how, *parts = self.spec.op(tensors, self.size, self._format_of(channels_last, tensors))
            of = applied(self._convolution() if path == "reconstruct" else PIXELS, how, self.size)
            return apply_weight(of, x, bias, *parts)
        weight = self._weight_for(channels_last, tensors, kept)
        return pixels(x, weight, bias) if path == "product" else self._dense_forward(x, weight, bias)

    def _without_weight(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """The layer on a path other than "reconstruct"."""
        raise NotImplementedError

    def _dense_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the dense layer computes with this weight."""
        raise NotImplementedError

    def _convolution(self) -> Convolution | None:
        """The settings of the convolution; None for a linear layer."""
        return None

    def _is_one_node(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> bool:
        """Whether W and the layer can be one node of the graph: in eager training on the CPU."""
        if not torch.is_grad_enabled() or type(self.spec).weight is not Spec.weight:
            return False
        return self._is_plain(x, tensors, bias)

    @staticmethod
    def _is_plain(x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, casts: bool = False) -> bool:
        """Whether nothing transforms or, unless `casts`, casts, and all tensors are plain, on the CPU."""
        if not x.is_cpu or (torch.is_autocast_enabled("cpu") and not casts) or transforming():
            return False
        own = (x, *tensors.values()) if bias is None else (x, *tensors.values(), bias)
        return all(type(t) in PLAIN and not t.is_neg() for t in own)

    def _format_of(self, channels_last: bool, tensors: dict[str, Tensor]) -> bool | None:
        """The format of W: x's; with a dense factor that of it (None), which its gradient goes back to."""
        return channels_last if self.spec.dense not in self._names or INDEX in tensors else None

    def _has_factored_form(self) -> bool:
        """Whether the path "factored" is that of u, v and compact μ, which "auto" measures."""
        return isinstance(self.spec, Rank1)

    def _why_not(self, path: str, tensors: dict[str, Tensor]) -> str | None:
        """Why there is no path "factored" (or "fused") for the layer with these factors."""
        if isinstance(self.spec, LowRank):
            return None
        if not isinstance(self.spec, Rank1):
            return f"{type(self.spec).__name__} has no factored form"
        if self.spec.sparse and INDEX not in tensors:
            return "μ is dense, call compact() first"
        return None

    def __prepare_scriptable__(self):
        """Called by torch.jit.script, which would put what this returns into the model itself."""
        raise TypeError(
            "torch.jit.script takes dense layers only: script ff.densify(copy.deepcopy(model)), or trace it"
        )

    def train(self, mode: bool = True) -> "FactorizedLayer":
        """As for any module; a kept weight is dropped."""
        self._drop()
        if self._noted is not None:
            # What asks for memory to write to, as `torch.save` does, has them moved.
            self._hold_positions(self._noted[0])
        super().train(mode)
        self._note_kind()
        return self

    def _note_kind(self) -> None:
        """Take what the layer is now for what torch.compile is told."""
        how = None if self.training or not loaded("cpu") else self._describe()
        if how != self._how:
            self._how = how

    def _drop(self) -> None:
        """Drop what is kept of the factors."""
        self._cache.clear()
        self._nodes = self._nodes.of(None)

    def _apply(self, *args, **kwargs):
        self._drop()
        result = super()._apply(*args, **kwargs)
        self._mark()
        self._note_positions()
        return result

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name not in OF_PROCESS}

    def _mark(self) -> None:
        parameter = self._parameters.get(self.spec.sparse_factor)
        if parameter is not None:
            sparsity.mark_penalized(parameter)

    def __setattr__(self, name, value):
        if name == "path" and value not in self.paths:
            raise ValueError(f"path={value!r}: must be one of {', '.join(map(repr, self.paths))}")
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__}.weight is made from the factors, it cannot be assigned: assign to the factors,"
                " set them from a weight by reset_parameters('svd', dense=W), or take to_dense(), whose weight is a"
                " parameter"
            )
        super().__setattr__(name, value)
        if name in SETTINGS:
            self._forget()
        if isinstance(value, nn.Parameter):
            self._mark()
        if name == INDEX:
            self._note_positions()

    def register_parameter(self, name, param):
        if name == "weight":
            setattr(self, name, param)
        super().register_parameter(name, param)
        self._mark()

    def register_buffer(self, name, *args, **kwargs):
        super().register_buffer(name, *args, **kwargs)
        if name == INDEX:
            self._note_positions()

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__.setdefault("_cache", weight_cache.WeightCache())
        self._answers, self._nodes = {}, direct.Nodes()
        self._mark()
        self._note_positions()
        self._note_kind()


class FactorizedConv2d(FactorizedLayer):
    """`nn.Conv2d` whose weight [out, in / groups, kh, kw] is made from the factors of `spec`.

    Arguments as for `nn.Conv2d`, plus `spec` (default `ff.Rank1()`). Input [n, in, h, w] or [in, h, w], output as
    `nn.Conv2d` gives it. Raises ValueError as `nn.Conv2d` does, and for a spec that does not fit.

    `to(memory_format=torch.channels_last)`, or a dense layer whose weight is channels_last, sets `channels_last`: all
    images [n, in, h, w] are then brought into that format, and the output has it, as with such a weight of `nn.Conv2d`.
    """

    paths = (*PATHS, "fused")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
        *,
        spec: Spec | None = None,
    ):
        conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        self._setup(conv, Rank1() if spec is None else spec, None, device, dtype)
        self.reset_parameters()

    def _setup(self, conv: nn.Conv2d, spec: Spec, dense: Tensor | None, device=None, dtype=None) -> None:
        super().__init__()
        for name in (*nn.Conv2d.__constants__, "_reversed_padding_repeated_twice"):
            if hasattr(conv, name):
                setattr(self, name, getattr(conv, name))
        size = tuple(self._weight_of(conv).shape)
        self._build(size, spec, conv.out_channels if conv.bias is not None else None, dense, device, dtype)
        if dense is not None:
            self._take_format(dense)
        self._note_kind()

    def _note_kind(self) -> None:
        mode, padding = self.padding_mode, self._padding()
        self.__dict__["_pads"] = padding is None or (mode != "zeros" and any(padding))
        super()._note_kind()

    _dense = nn.Conv2d

    def _take_format(self, like: Tensor) -> None:
        self.channels_last = _is_laid_out_last(like)
        self._note_kind()

    def _describe(self):
        if type(self) is not FactorizedConv2d or self._pads:
            return None
        names = "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"
        own = {name: getattr(self, name) for name in names}
        return compiled.describe("conv2d", self.spec, self.path, self.channels_last, **own, bias=self.bias is not None)

    def _apply(self, fn, *args, **kwargs):
        # The factors may have no tensor of four dimensions, which memory formats are for.
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        self._take_format(fn(torch.empty(1, 2, 2, 2, memory_format=form)))
        return super()._apply(fn, *args, **kwargs)

    @classmethod
    def from_dense(
        cls, layer: nn.Conv2d, spec: Spec, init: str = "random", generator: torch.Generator | None = None
    ) -> "FactorizedConv2d":
        """The factorized form of `layer`: its settings, bias, dtype, device, memory format and mode."""
        return _from_dense(cls.__new__(cls), layer, spec, init, generator)

    def to_dense(self) -> nn.Conv2d:
        """An `nn.Conv2d` of the same function, with W as its weight and this layer's bias."""
        dense = self._dense(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device="meta",
        )
        return _fill_dense(dense, self)

    def _takes_dense(self, x, tensors):
        o, i, *kernel = self.size
        if x.dim() != 4 or not self._is_one_op():
            return False
        if i == 1 and o == self.groups:
            return o >= DEPTHWISE
        if self.groups > 1 or not ops.conv.multiplies_tiles(_dtype(x)):
            return False
        if kernel == [1, 1]:
            return True
        return len(x) * math.prod(self._output(x)) <= FEW_PIXELS

    def _factors_are_weights(self, tensors):
        return "u" in tensors and tensors["u"][0].numel() == 1 and self.size[1] > 1

    def _has_factored_form(self):
        return super()._has_factored_form() and self.spec.layout != "view"

    def _padding(self) -> tuple[int, ...] | None:
        """The padding of each axis, None where "same" means more at the end of an axis."""
        if not isinstance(self.padding, str):
            return self.padding
        same = self.padding == "same"
        reach = [same * gap * (k - 1) for gap, k in zip(self.dilation, self.kernel_size, strict=True)]
        return None if any(r % 2 for r in reach) else tuple(r // 2 for r in reach)

    def _why_not(self, path, tensors):
        if path == "fused":
            return None
        if isinstance(self.spec, LowRank):
            return (
                None if self.spec.layout == "separable" else 'layout "view" has no factored form, "separable" has one'
            )
        if isinstance(self.spec, Rank1) and self.spec.layout == "view":
            return 'layout "view" has no factored form, only "spatial" and "kernel" have one'
        return super()._why_not(path, tensors)

    def _work(self, shape, tensors, channels_last, step, dtype, device):
        if shape is None:
            reach = [gap * (extent - 1) + 1 for gap, extent in zip(self._pair("dilation"), self.size[2:], strict=True)]
            shape = (NOMINAL_IMAGES, self.in_channels, *(max(NOMINAL_SIDE, least) for least in reach))
        rows, image = shape[0] if len(shape) == 4 else 1, shape[-2:]
        how = (*map(self._pair, ("stride", "padding", "dilation")), *_rank_and_nonzeros(tensors))
        kind = self._kind(getattr(self.spec, "layout", ""))
        own = channels_last, step, dtype, device, _is_dense(tensors)
        return choice.Work(kind, self.size, self.groups, rows, image, *how, *own)

    def _pair(self, setting: str) -> tuple[int, int]:
        """A setting (stride, padding, dilation) for both axes of an image."""
        if setting == "padding":
            padding = self._padding()
            return padding if padding and self.padding_mode == "zeros" else (0,) * len(self.dilation)
        return getattr(self, setting)

    def _in_two_parts(self) -> bool:
        """Whether the fused path makes no weight: two smaller convolutions cost less.

        Not of a 1×1 kernel, whose dense product waits for memory just the same.
        """
        o, i, kh, kw = self.size
        if not isinstance(self.spec, Rank1) or self.spec.sparse or kh * kw == 1:
            return False
        if self.spec.layout == "kernel":
            return self.groups == 1 and self.spec.rank * (i * kh + o * kw) < o * i * kh * kw
        return self.spec.layout == "spatial" and self.spec.rank < kh * kw

    def _candidates(self, x, tensors):
        paths = super()._candidates(x, tensors)
        if x.is_cuda and self._in_two_parts():
            paths.append("fused")
        if self._multiplies_pixels(x, tensors) and not self._can_reorder(x, tensors):
            paths.append("product")
        return paths

    def _can_reorder(self, x, tensors):
        """Whether W may be kept in oneDNN's form for x."""
        if self.training or not weight_cache.allowed() or not is_channels_last(x) or not x.numel() or _onednn() is None:
            return False
        if type(self)._conv_forward is not FactorizedConv2d._conv_forward:
            return False
        # What PyTorch's convolution refuses is left to it.
        if x.shape[1] != self.size[1] * self.groups or min(self._output(x)) < 1:
            return False
        own = [t for t in (x, *tensors.values(), self.bias) if t is not None and t.is_floating_point()]
        return self._is_plain(x, tensors, self.bias) and all(t.dtype == torch.float32 for t in own)

    def _output(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the output for x [n, i, h, w], below 1 where x is too small."""
        how = map(self._pair, ("padding", "dilation", "stride"))
        return tuple(
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, padding, dilation, stride in zip(x.shape[2:], self.size[2:], *how, strict=True)
        )

    def _kept_call(self, path, x, tensors, bias, kept):
        few = path == "reconstruct" and self._multiplies_pixels(x, tensors)
        if path == "product" or (few and _is_few(x, x.numel() // max(1, x.shape[1]), self.size)):
            weight = self._kept_form("columns", tensors, kept, lambda w: _by_columns(w.flatten(1)))
            return self._kept_weight_call(direct.PIXELS, weight, bias)
        if path == "reconstruct" and self._can_reorder(x, tensors):
            reorder, _ = _onednn()
            how = [list(self._pair(name)) for name in ("padding", "stride", "dilation")]
            # For the first size that comes; another form would serve others better, but would have to be kept too.
            form = "reordered", *map(tuple, how), self.groups
            weight = self._kept_form(form, tensors, kept, lambda w: reorder(w, *how, self.groups, list(x.shape)))
            return self._kept_weight_call(direct.REORDERED, weight, bias)
        return super()._kept_call(path, x, tensors, bias, kept)

    def _multiplies_pixels(self, x, tensors):
        """Whether there is a path "product" for x."""
        if self.size[2:] != (1, 1) or self.groups > 1 or self._pair("stride") != (1, 1):
            return False
        if self._pair("padding") != (0, 0) or x.dim() != 4 or not self._is_plain(x, tensors, self.bias):
            return False
        return are_rows(x) and (not torch.is_grad_enabled() or self._is_one_node(x, tensors, self.bias))

    def _choose_nominal(self, x, tensors, trained):
        own = next(iter(tensors.values()))
        if own.is_cuda and not (torch.compiler.is_compiling() or recording()):
            mapped = any(t is not None and is_mapped(t) for t in (*tensors.values(), self.bias))
            return "fused" if mapped or self._in_two_parts() else "reconstruct"
        return super()._choose_nominal(x, tensors, trained)

    def _is_one_op(self) -> bool:
        """Whether the factored path of images is one op, `factored_conv2d`."""
        if not isinstance(self.spec, Rank1):
            return False
        if self.spec.layout == "spatial":
            return True
        of_pixels = self.size[2:] == (1, 1) and self.size[1] > 1 and self.groups == 1
        return self.spec.layout == "kernel" and of_pixels and self._pair("padding") == (0, 0)

    def _call(self, path, x, tensors, bias):
        if path != "factored" or not self._is_one_op() or x.dim() != 4:
            return super()._call(path, x, tensors, bias)
        if not self._is_plain(x, tensors, bias):
            return None
        of, repeated = ops.conv.of_factors(self.size, self._convolution()), not self.training and INDEX in tensors
        return ops.conv.call_of_factors(of, *_parts(tensors), bias, repeated)

    def _without_weight(self, path, x, tensors, bias):
        if path == "factored" and isinstance(self.spec, LowRank):
            return self._apart(x, tensors, bias)
        if path == "factored" and self._is_one_op() and x.dim() == 4 and self._is_plain(x, tensors, bias):
            # What does not fit is told by the checked function.
            with contextlib.suppress(RuntimeError, ValueError):
                of = ops.conv.of_factors(self.size, self._convolution())
                y = ops.conv.apply_factors(of, x, *_parts(tensors), bias, not self.training and INDEX in tensors)
                if y is not None:
                    return y
        y = self._convolve(x if x.dim() == 4 else x.unsqueeze(0), path == "fused", tensors, bias)
        return y if x.dim() == 4 else y.squeeze(0)

    def _dense_forward(self, x, weight, bias):
        return self._conv_forward(x, weight, bias)

    def _dense_call(self, x, weight, bias):
        if type(self)._conv_forward is not FactorizedConv2d._conv_forward or x.dim() != 4:
            return super()._dense_call(x, weight, bias)
        return self._kept_weight_call(direct.CONVOLUTION, weight, bias)

    def _kept_weight_call(self, kind: int, weight: Tensor, bias: Tensor | None) -> direct.Call:
        return direct.Call(
            direct.dense, (direct.settings(kind, 0, False, self.size, self._convolution()), None, weight, bias), 1
        )

    def _convolution(self):
        return Convolution(self._pair("stride"), self._pair("padding"), self._pair("dilation"), self.groups)

    def _is_one_node(self, x, tensors, bias):
        return x.dim() == 4 and super()._is_one_node(x, tensors, bias)

    def _convolve(self, x: Tensor, fused: bool, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """The factored or the fused path, on x with its batch axis."""
        how = {name: self._pair(name) for name in ("stride", "padding", "dilation")} | {"groups": self.groups}
        spec, parts = self.spec, _parts(tensors)
        if not fused:
            if spec.layout == "kernel":
                return ops.separable_conv2d(x, *parts, bias, size=self.size, **how)
            return ops.factored_conv2d(x, *parts, bias, size=self.size, repeated=not self.training, **how)
        if isinstance(spec, Rank1) and spec.layout == "kernel" and not spec.sparse:
            return ops.separable_conv2d(x, *parts, bias, size=self.size, **how)
        if isinstance(spec, Rank1):
            return ops.fused_conv2d(x, *parts, bias, layout=spec.layout, size=self.size, **how)
        if self._shares_sigma(x):
            return self._apart(x, tensors, bias)
        weight = spec.weight(_cast(tensors), self.size, is_channels_last(x))
        return ops.fused_conv2d(x, mu=weight, bias=bias, size=self.size, **how)

    def _shares_sigma(self, x: Tensor) -> bool:
        """Whether clients of `vmap` share σ, and σ and BA apart cost less than each client's own W."""
        if not isinstance(self.spec, LowRank) or self.spec.layout != "separable" or self.groups > 1:
            return False
        return is_mapped(self.A) and not is_mapped(self.sigma) and self.spec.is_thin(self.size, self._rows(x))

    def _rows(self, x):
        stride = self._pair("stride")
        images = x.shape[0] if x.dim() == 4 else 1
        return images * x.shape[-2] * x.shape[-1] / (stride[0] * stride[1])

    def _apart(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Tensor:
        """A convolution with σ, and the two of B and A: a kh×1 and a 1×kw one, through r channels."""
        spec, (o, i, kh, kw) = self.spec, self.size
        image = x if x.dim() == 4 else x.unsqueeze(0)
        how = {name: self._pair(name) for name in ("stride", "padding", "dilation")}
        how["groups"] = self.groups
        seen = self._seen(image)
        down, across = tensors["B"].mT.unflatten(-1, (i, kh)), (spec.scaling * tensors["A"]).unflatten(-1, (o, kw))
        adapter = ops.separable_conv2d(image if seen is None else seen, down, across, size=self.size, **how)
        y = F.conv2d(image, tensors["sigma"], bias, **how) + adapter
        return y if x.dim() == 4 else y.squeeze(0)

    def _padded(self, x: Tensor) -> Tensor:
        """x, with its padding where that is not by zeros, alike on both sides of an axis."""
        if not self._pads:
            return x
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(x, self._reversed_padding_repeated_twice, mode=mode)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, *self._convolution())

    def _brought(self, x):
        if not self.channels_last or x.dim() != 4 or torch._C._are_functorch_transforms_active():
            return x
        last = x.contiguous(memory_format=torch.channels_last)
        if last is x and x.shape[1] == 1 < x.shape[2] * x.shape[3] and not is_channels_last(x):
            return x.view(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
        return last

    def _forward(self, x):
        last = self._brought(x)
        return super()._forward(x) if last is x else self._of_padded(last)

    def extra_repr(self) -> str:
        return f"{nn.Conv2d.extra_repr(self)}, spec={self.spec}"


class FactorizedConv1d(FactorizedConv2d):
    """`nn.Conv1d` whose weight [out, in / groups, k] is made from the factors of `spec`, those of a convolution with
    1×k kernels: `size` is (out, in / groups, 1, k).

    Arguments as for `nn.Conv1d`, plus `spec` (default `ff.Rank1()`). Input [n, in, length] or [in, length].
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device=None,
        dtype=None,
        *,
        spec: Spec | None = None,
    ):
        conv = nn.Conv1d(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        self._setup(conv, Rank1() if spec is None else spec, None, device, dtype)
        self.reset_parameters()

    _dense = nn.Conv1d

    def _take_format(self, like):
        """Memory formats are for images."""

    @staticmethod
    def _weight_of(layer: nn.Conv1d) -> Tensor:
        return layer.weight.detach().unsqueeze(2)

    @property
    def weight(self) -> Tensor:
        """W in PyTorch's order [out, in / groups, k], as `FactorizedLayer.weight`."""
        return super().weight.squeeze(2)

    def _pair(self, setting: str) -> tuple[int, int]:
        return (0 if setting == "padding" else 1), *super()._pair(setting)

    def path_for(self, x: Tensor) -> str:
        return super().path_for(x.unsqueeze(-2))

    def times(self, x: Tensor, training: bool) -> tuple[dict[str, float], str]:
        return super().times(x.unsqueeze(-2), training)

    def _dense_side(self, x, trained):
        return super()._dense_side(x.squeeze(-2), trained)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(-2)).squeeze(-2)

    def _padded(self, x):
        return super()._padded(x.squeeze(-2)).unsqueeze(-2)


class FactorizedLinear(FactorizedLayer):
    """`nn.Linear` whose weight [out, in] is made from the factors of `spec`.

    Arguments as for `nn.Linear`, plus `spec` (default `ff.Rank1()`). Input […, in], output […, out].
    """

    is_only_multiplied = False
    """Whether the module that the layer is in takes its weight for nothing but `F.linear`, see `weight`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        spec: Spec | None = None,
    ):
        linear = nn.Linear(in_features, out_features, bias, device="meta")
        self._setup(linear, Rank1() if spec is None else spec, None, device, dtype)
        self.reset_parameters()

    def _setup(self, linear: nn.Linear, spec: Spec, dense: Tensor | None, device=None, dtype=None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        size = (self.out_features, self.in_features)
        self._build(size, spec, self.out_features if linear.bias is not None else None, dense, device, dtype)

    @classmethod
    def from_dense(
        cls, layer: nn.Linear, spec: Spec, init: str = "random", generator: torch.Generator | None = None
    ) -> "FactorizedLinear":
        """The factorized form of `layer`: its settings, bias, dtype, device and mode."""
        return _from_dense(cls.__new__(cls), layer, spec, init, generator)

    def to_dense(self) -> nn.Linear:
        """An `nn.Linear` of the same function, with W as its weight and this layer's bias."""
        return _fill_dense(nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta"), self)

    def _work(self, shape, tensors, channels_last, step, dtype, device):
        rows = NOMINAL_IMAGES if shape is None else torch.Size(shape[:-1]).numel()
        ones = ((1, 1),) * 4  # image, stride, padding, dilation
        own = *_rank_and_nonzeros(tensors), False, step, dtype, device, _is_dense(tensors)
        return choice.Work(self._kind("linear"), self.size, 1, rows, *ones, *own)

    def _describe(self):
        if type(self) is not FactorizedLinear:
            return None
        own = {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}
        return compiled.describe("linear", self.spec, self.path, False, **own)

    def _dense_forward(self, x, weight, bias):
        return F.linear(x, weight, bias)

    def _dense_call(self, x, weight, bias):
        return direct.Call(direct.dense, (direct.settings(direct.LINEAR, 0, False, self.size), None, weight, bias), 1)

    def _kept_call(self, path, x, tensors, bias, kept):
        # More rows, and half precision, took up to 10 times as long so.
        turned = x.dim() and _is_few(x, x.numel() // max(1, x.shape[-1]), self.size)
        if path != "reconstruct" or not turned:
            return super()._kept_call(path, x, tensors, bias, kept)
        return self._dense_call(x, self._kept_form("columns", tensors, kept, _by_columns), bias)

    def _call(self, path, x, tensors, bias):
        if path != "factored" or isinstance(self.spec, LowRank) or x.dim() < 2:
            return super()._call(path, x, tensors, bias)
        if not self._is_plain(x, tensors, bias):
            return None
        return ops.conv.call_of_factors(ops.conv.of_factors(self.size), *_parts(tensors), bias)

    def _without_weight(self, path, x, tensors, bias):
        if isinstance(self.spec, LowRank):
            return self._apart(x, tensors, bias)
        parts = _parts(tensors)
        if x.dim() and self._is_plain(x, tensors, bias):
            with contextlib.suppress(RuntimeError, ValueError):
                rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
                y = ops.conv.apply_factors(ops.conv.of_factors(self.size), rows, *parts, bias)
                if y is not None:
                    return y if x.dim() == 2 else y.view(*x.shape[:-1], self.size[0])
        return ops.factored_linear(x, *parts, bias, size=self.size)

    @property
    def weight(self) -> Tensor:
        """W in PyTorch's order, as `FactorizedLayer.weight`. Where the layer `is_only_multiplied`, `F.linear(x,
        layer.weight, layer.bias)` is the layer, on the path that it takes."""
        weight = super().weight
        if self.is_only_multiplied and type(weight) is Derived and isinstance(self.spec, Rank1):
            weight.multiply = functools.partial(_multiply, weakref.ref(self), self._state())
        return weight

    def _state(self) -> tuple | None:
        """What W made now depends on, as far as PyTorch tells; None where it does not."""
        tensors = self._tensors()
        if any(type(t) not in PLAIN or t.is_inference() for t in tensors.values()):
            return None
        factors = ((id(t), t._version, address(t), t.requires_grad) for t in tensors.values())
        return self.training, torch.is_grad_enabled(), *factors

    def _rows(self, x):
        return x.numel() / x.shape[-1]

    def _takes_dense(self, x, tensors):
        return x.dim() > 0 and ops.conv.multiplies_tiles(_dtype(x))

    def _apart(
        self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, outputs: slice | None = None
    ) -> Tensor:
        """x σᵀ + scaling · (x Aᵀ) Bᵀ + bias, or some of its columns."""
        (a, b), sigma = self.spec.parts(tensors, self.size), tensors["sigma"]
        if outputs is not None:
            sigma, b = sigma[outputs], b[outputs]
        return ops.lowrank.layer(x, sigma, a, b, bias, scaling=self.spec.scaling, seen=self._seen(x))

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, spec={self.spec}"


compiled.kind("conv2d", FactorizedConv2d)
compiled.kind("linear", FactorizedLinear)


def _multiply(
    layer: Callable[[], FactorizedLinear | None], state: tuple | None, x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """The layer for x, where W with this bias is still what it was when it was made."""
    own = layer()
    if own is None or bias is not own.bias or type(x) not in PLAIN or not x.is_cpu or transforming():
        return None
    return None if state is None or own._state() != state else own.forward(x)


def _is_few(x: Tensor, rows: int, size: Sequence[int]) -> bool:
    """Whether rows are so few that W by columns serves, in evaluation."""
    small = size[0] * size[1] <= (1 << 16 if rows == 1 else 1 << 18)
    return x.dtype in (torch.float32, torch.float64) and (1 if small else 2) <= rows <= (FEW_ROWS if small else 3)


def _by_columns(weight: Tensor) -> Tensor:
    """W [o, i] with its columns one after the other in memory: products of few rows read it along the outputs."""
    return weight.t().contiguous().t()


def _side(forward: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor], trained: bool) -> choice.Side:
    """A run of forward(x), with the gradients of `leaves` where `trained`, for `choice`."""
    others = choice.between(x) if trained else None

    def run(timed: choice.Timed) -> None:
        with torch.set_grad_enabled(trained), timed(x, others):
            y = forward(x)
        if trained:
            # `torch.autograd.grad` without its checks, which import for .4 s the first time.
            engine, gradient = torch.autograd.Variable._execution_engine, y.detach()
            with timed(gradient, others):
                engine.run_backward((y,), (gradient,), False, False, tuple(leaves), True, False)

    return run


@functools.cache
def _onednn() -> tuple[Callable[..., Tensor], Callable[..., Tensor]] | None:
    """PyTorch's (reordering of a convolution's weight, convolution with such a weight), where it has them."""
    names = "_reorder_convolution_weight", "_convolution_pointwise"
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return None
    return torch.ops.mkldnn._reorder_convolution_weight.default, torch.ops.mkldnn._convolution_pointwise.default


def _parts(tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
    return tensors.get("u"), tensors.get("v"), tensors.get("mu"), tensors.get(INDEX)


def _cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under autocast, factors in its dtype, to which the dense layer would cast W: so it is written once, by half."""
    if not autocasts(next(iter(tensors.values())).device.type):
        return tensors
    return dict(zip(tensors, autocast(*tensors.values()), strict=True))


def _dtype(x: Tensor) -> torch.dtype:
    """In which x is computed with, under autocast or not."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else x.dtype


def _rank_and_nonzeros(tensors: dict[str, Tensor]) -> tuple[int, int]:
    factor = tensors.get("u", tensors.get("A"))
    return (0 if factor is None else len(factor)), (tensors["mu"].numel() if "mu" in tensors else 0)


def _pack(mu: Tensor) -> tuple[Tensor, Tensor] | None:
    """μ in compact form; None where it is not mostly zeros."""
    return sparsity.gather(mu) if torch.count_nonzero(mu).item() <= PACKED * mu.numel() else None


def _digest(index: Tensor) -> int:
    return torch.ops.fastfact.digest([index])


def _is_dense(tensors: Mapping[str, Tensor]) -> bool:
    """Whether there is a μ that is dense."""
    return "mu" in tensors and INDEX not in tensors


def _is_laid_out_last(weight: Tensor) -> bool:
    """Whether PyTorch takes a weight [o, i, kh, kw] for channels_last, by its strides, also where one channel or one
    tap leaves several formats the same in memory."""
    if weight.dim() != 4:
        return False
    expected = 0
    for d in (1, 3, 2, 0):
        if weight.stride(d) < max(expected, 1) or (d == 0 and expected == weight.stride(1)):
            return False
        expected = weight.stride(d) * max(weight.shape[d], 1)
    return True


HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


def _hooks(module: nn.Module) -> Mapping:
    return {name: getattr(module, name) for name in HOOKS}


def _from_dense(new, layer: nn.Module, spec: Spec, init: str | None, generator):
    """The factorized form of a dense layer; its factors are left as they are where `init` is None."""
    weight = new._weight_of(layer)
    new._setup(layer, spec, weight)
    if init is not None:
        new.reset_parameters(init, weight, generator)
    for parameter in new.factors().values():
        parameter.requires_grad_(layer.weight.requires_grad)
    new.bias = layer.bias
    for name, hooks in _hooks(layer).items():
        getattr(new, name).update(hooks)
    return new.train(layer.training)


def _fill_dense(dense: nn.Module, layer: FactorizedLayer):
    trainable = any(parameter.requires_grad for parameter in layer.factors().values())
    dense.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=trainable)
    dense.bias = layer.bias
    for name, hooks in _hooks(layer).items():
        getattr(dense, name).update(hooks)
    return dense.train(layer.training)
