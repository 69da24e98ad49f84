"""What the factorized layers share: the paths on which a forward may compute, and the choice of one."""

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fastfact.base.formats import LAYOUTS, LowRankForm
from fastfact.nn import choice, compiled, sparsity, weight_cache
from fastfact.nn.derived import Derived
from fastfact.nn.factors import INDEX, Factors, is_dense
from fastfact.nn.specs import LowRank, Rank1, Spec
from fastfact.ops import direct
from fastfact.ops.backends import PLAIN, dispatches, loaded
from fastfact.ops.common import (
    address,
    autocast,
    autocasts,
    capturing,
    exporting,
    is_channels_last,
    is_mapped,
    recording,
    transforming,
)
from fastfact.ops.lowrank import is_plan
from fastfact.ops.weights import PIXELS, Convolution, LayerPlan, WeightOp, apply_weight, call_of, pixels, plan_layer

PATHS = ("auto", "reconstruct", "factored")
PACKED = 0.5
"""The density of a dense μ below which its nonzeros are packed for evaluation, so that it can be factored."""
ANSWERS = 256
"""Inputs of so many kinds a layer remembers its path for."""
OF_WEIGHT = ("reconstruct", "product")
"""The paths that make W."""
OFFLOADED = "_hf_hook"
"""Where accelerate puts what brings a layer's factors for a call."""
SETTINGS = {"path", "spec", "size", "stride", "padding", "dilation", "groups", "padding_mode", OFFLOADED}
"""What the path, or a kept weight, depends on besides tensors, and one may assign to."""

OF_PROCESS = {"_answers", "_nodes", "_noted", "_held", "_how", "_words"}
"""What a layer knows of this process, and a copy does not."""


class Form(NamedTuple):
    """How W may be kept: under this key as of(W), None: as it is made. call: what is kept → what serves inputs."""

    key: Hashable
    of: Callable[[Tensor], Tensor] | None
    call: Callable[[Tensor], direct.Call]


class FactorizedLayer(Factors):
    """What the factorized layers share: factors, the paths on which a forward may compute, and the choice of one.

    path: "reconstruct" makes W and calls the dense layer; "factored" computes from u, v and compact μ without W
    (`Rank1` with layout "spatial" or "kernel", or of a linear layer; padding other than by zeros, alike on both
    sides of an axis, is added to the input first); "auto" takes the one that was faster for inputs such as the one at
    hand when it was measured (`nn.choice`). "factored" is there where μ is compact or the spec has none, and in
    evaluation on the CPU also where a dense μ is mostly zeros, which are then skipped. With any other dense μ "auto"
    may take it on the CPU, for linear layers and convolutions that are depthwise, 1×1 (layout "kernel") or of few
    pixels.
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
    every number of the factors is what it was, however they are written to (`nn.weight_cache`), or until `train()`
    is called; for images in channels_last in the form that oneDNN computes with, into which PyTorch brings it in each
    call, and of a linear layer, or a 1×1 convolution of few pixels, in the order of oneDNN (half precision) or of this
    package's own products where these were measured to be faster. "factored" has the kernels remember the order in
    which they take the nonzeros of μ. On a GPU W is kept, too, for as long as PyTorch knows of no write to a factor.
    """

    origin: tuple[nn.Module, ...] = ()
    """The module this layer stands for, without its parameters, where that is no plain dense layer (see convert)."""
    path: str = "auto"
    paths = PATHS
    _axes_served: int
    """Of a class whose `forward` begins with `direct.serve`: see `direct.serve_calls`. Not of those derived from it."""
    _pads = False
    """Whether `_padded` makes of an input what the layer computes with."""
    _words: tuple[Tensor, tuple[int, int, int], Tensor] | None = None
    """The positions of compact μ on a GPU, their version, and what `sparsity.words` made of them."""
    _how: str | None = None
    """What the layer is for torch.compile, in evaluation; None where a graph of it has to do."""

    def _build(self, *args) -> None:
        super()._build(*args)
        self._cache, self._answers, self._nodes = weight_cache.WeightCache(), {}, direct.Nodes()

    @property
    def weight(self) -> Tensor:
        """W in PyTorch's order, made from the factors at each access; differentiable. Where evaluation keeps W, the
        second access and all later ones share its memory, and a write to the result copies it first.

        It is no place to write to: an assignment raises AttributeError, an in-place operation on it RuntimeError.
        """
        return self._derived_weight()

    def _derived_weight(self) -> Tensor:
        weight = self._kept_weight()
        if weight is None:
            weight = self._weight(self.channels_last or None)
        return weight if type(weight) is not Tensor or transforming() else weight.as_subclass(Derived)

    def _kept_weight(self) -> Tensor | None:
        """W as evaluation keeps it, to be copied by who writes to it. None the first time, and where none is kept."""
        lazy = getattr(torch, "_lazy_clone", None)
        if self.training or lazy is None or not weight_cache.allowed() or self._borrows():
            return None
        tensors, channels_last = self._tensors(), bool(self.channels_last)
        if not channels_last and len(self.size) == 4 and is_dense(tensors):
            return None  # its format is that of μ
        key, make = (self.spec, self.size, channels_last), functools.partial(self._made, tensors, channels_last)
        weight = self._cache.value(list(tensors.values()), key, make, again=True)
        return weight if weight is None else lazy(weight)

    def _weight(self, channels_last: bool | None) -> Tensor:
        return self.spec.weight(self._tensors(), self.size, channels_last)

    @property
    def can_factor(self) -> bool:
        """Whether there is a factored path for the layer as it is: compact μ or none, and a spec that has one."""
        return self._why_not("factored", self._tensors()) is None

    def forward(self, x: Tensor) -> Tensor:
        """The layer, on the path that is asked for, or chosen."""
        if type(x) is Proxy:
            return as_leaf(self, x)
        return self._of_padded(self._padded(x) if self._pads else x)

    def _of_padded(self, x: Tensor) -> Tensor:
        """The forward of an input that is padded."""
        if not torch.compiler.is_compiling():
            y = direct.serve(self._nodes, x, self.training, self._noted)
            return self._said(x) if y is None else y
        if self._how is not None and self._is_served(x):
            return torch.ops.fastfact_nn.layer(self._how, x, list(self._tensors().values()), self.bias)
        return self._forward(x)

    def _said(self, x: Tensor) -> Tensor:
        """`_forward`, where an input of another dtype is told as one."""
        try:
            return self._forward(x)
        except (RuntimeError, ValueError) as error:
            own = self._factor(self._names[0]).dtype
            if x.dtype == own or autocasts(x.device.type):
                raise
            raise type(error)(f"{type(self).__name__}: x is {x.dtype}, must be {own} as the factors") from error

    def _is_served(self, x: Tensor) -> bool:
        """Whether the layer is one op in a graph: in evaluation, of numbers that it has itself."""
        if torch.is_grad_enabled() or exporting() or torch._C._are_functorch_transforms_active():
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
        if not torch.compiler.is_compiling() and capturing(x):
            self._clear_caches()
            self._cache.note_recording()
            self._hold_positions(None)
        if not self.training and weight_cache.allowed():
            return self._evaluate(x)
        if (y := self._by_twin(x, FactorizedLayer.forward)) is not None:
            return y
        tensors, bias = self._tensors(), self.bias
        path = self._path(x, tensors, None)
        if torch.is_grad_enabled() and self._let_node_serve(path, x, tensors, bias):
            # An activation checkpoint asks that the next call save what this one does.
            y = self._serve(x)
            if y is not None:
                return y
        return self._compute(path, x, tensors, bias, None)

    def _by_twin(self, x: Tensor, of: Callable[["FactorizedLayer", Tensor], Any]) -> Any:
        """of(twin, x), in evaluation under autocast: the twin is the layer in autocast's dtype, kept while the numbers
        of this one are what they were. So nothing is cast in each call but x, and what is kept and chosen for a layer
        of that dtype serves. None where there is no twin."""
        kind = x.device.type
        if self.training or kind not in ("cpu", direct.OTHER) or not weight_cache.allowed(casting=True):
            return None
        if self._borrows():
            return None
        if not torch.is_autocast_enabled(kind):
            return None
        if type(x) not in PLAIN or not x.is_floating_point() or x.dtype == torch.float64:
            return None
        own = [t for t in (*self._parameters.values(), self._buffers.get(INDEX)) if t is not None]
        dtype = torch.get_autocast_dtype(kind)
        torch.set_autocast_enabled(kind, False)
        try:
            twin = self._cache.value(own, ("twin", dtype), lambda: self._twin(dtype)) if own else None
            cast = x.to(dtype)
            found = None if twin is None else of(twin, cast)
            call = None if found is None else twin._call_for(cast, dtype)
        finally:
            torch.set_autocast_enabled(kind, True)
        if call and (kept := self._cache.of(own)) and (watch := self._cache.watch(kept)):
            self._let_serve(x, self._tensors(), self.bias, watch, call)
        return found

    def _call_for(self, x: Tensor, dtype: torch.dtype) -> direct.Call | None:
        """What serves in place of this twin, of inputs that are cast by the call; None where no call does."""
        tensors = self._tensors()
        kept = self._kept_for(tensors)
        if kept is None or not choice.can_measure():
            return None
        tensors, packed = self._sparse_for_evaluation(tensors, kept)
        path = self._path(x, tensors, packed)
        return direct.casting(self._kept_call(path, x, tensors, self.bias, kept), dtype)

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

    def _let_node_serve(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> bool:
        """Let one call serve inputs such as x from now on, if the layer on this path can be one; whether it can."""
        if transforming() or not choice.can_measure():
            return False
        call = self._call(path, x, tensors, bias)
        # What is no leaf would keep the graph it comes from.
        if call is None or not all(t is None or t.is_leaf for t in (*tensors.values(), bias)):
            return False
        return self._let_serve(x, tensors, bias, None, call)

    def _serve(self, x: Tensor) -> Tensor | None:
        """What a node that was let serve inputs such as x makes of it."""
        return direct.serve(self._nodes, x, self.training, self._noted)

    def _let_serve(
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
        if asked is None or not dispatches() or self._borrows():
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
            del nodes[next(iter(nodes))]
        nodes[asked] = direct.Node(tuple(facts), shape, watch, *call)
        self._nodes = nodes
        axes = vars(type(self)).get("_axes_served")
        if axes is not None:
            direct.serve_calls(type(self), axes)
        return True

    def _call(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> direct.Call | None:
        """The layer on this path for all inputs such as x, where that is one call."""
        if path not in OF_WEIGHT or not self._is_one_node(x, tensors, bias):
            return None
        how, *parts = self.spec.op(tensors, self.size, self._format_of(is_channels_last(x), tensors))
        if any(part is not None and all(part is not t for t in tensors.values()) for part in parts):
            return None
        call = call_of(self._plan(path, how, x, tensors), bias, *parts)
        return direct.with_input(call, x, self._cast(x), len(self.size) == 2)

    def _plan(self, path: str, how: WeightOp, x: Tensor, tensors: dict[str, Tensor]) -> LayerPlan:
        """The layer on this path as one node."""
        settings = self._convolution() if path == "reconstruct" else PIXELS
        return plan_layer(settings, how, self.size, self._cast(x), self._support(tensors), x.is_cpu)

    @staticmethod
    def _cast(x: Tensor) -> torch.dtype | None:
        """What autocast has a layer computed in, where that is one node."""
        kind = x.device.type
        casts = kind in ("cpu", direct.OTHER) and autocasts(kind)
        return torch.get_autocast_dtype(kind) if casts else None

    def _support(self, tensors: dict[str, Tensor]) -> Tensor | None:
        """Where compact μ is, as the CUDA kernels read it, made once for its positions. None where they serve not."""
        index = tensors.get(INDEX)
        if index is None or index.device.type != direct.OTHER or index.is_inference():
            return None
        made, now = self._words, (index._version, address(index), len(index))
        if made is None or made[0] is not index or made[1] != now:
            if not choice.can_measure():
                return None  # what is recorded now has no numbers yet
            words = sparsity.words(index, torch.Size(self.size).numel())
            if made is not None and self._cache.recorded and words.device == made[2].device:
                words = made[2].copy_(words)  # which the CUDA graph reads where they are
            if words.is_cuda:
                # they may serve on another stream next
                torch.cuda.current_stream(words.device).synchronize()
            self._words = made = index, now, words
        return made[2]

    def forget_words(self) -> None:
        """Have what the CUDA kernels read made anew, after `mu_index.data` was set, which leaves no trace."""
        if self._words is not None:
            self._words, self._nodes = None, direct.Nodes()

    def _hold_positions(self, index):
        cache = self.__dict__.get("_cache")
        super()._hold_positions(None if cache is not None and cache.recorded else index)

    def _evaluate(self, x: Tensor) -> Tensor:
        """The forward where what is made from the factors may be kept, and no node serves."""
        tensors, bias = self._tensors(), self.bias
        form = INDEX in tensors, x.shape, x.stride(), x.dtype, x.device, type(x), *choice.generation()
        if form in self._answers:
            return self._compute(self._answers[form], x, tensors, bias, None)
        kept = self._kept_for(tensors)
        of_layer, (tensors, packed) = tensors, self._sparse_for_evaluation(tensors, kept)
        path = self._path(x, tensors, packed)
        if not choice.can_measure():
            return self._compute(path, x, tensors, bias, kept)
        if path not in OF_WEIGHT and packed is None:
            if not self._let_node_serve(path, x, tensors, bias):
                self._remember(form, path)  # whatever the numbers are
        elif kept is not None and (call := self._kept_call(path, x, tensors, bias, kept)):
            if watch := self._cache.watch(kept):
                self._let_serve(x, of_layer, bias, watch, call)
            if direct.serves(x) and (y := call(x)) is not None:
                return y
        return self._compute(path, x, tensors, bias, kept)

    def _kept_call(
        self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept: weight_cache.Kept
    ) -> direct.Call | None:
        """What serves inputs such as x on this path from what is kept for the factors; None where nothing does."""
        if path not in OF_WEIGHT:
            return self._call(path, x, tensors, bias)
        form = self._form(path, x, tensors, bias)
        if form.of is None:
            return form.call(self._weight_for(is_channels_last(x), tensors, kept))
        # In this form alone is it kept.
        made = functools.partial(self._made, tensors, len(self.size) == 4)
        return form.call(kept.value((form.key, self.spec, self.size), lambda: form.of(made())))

    def _form(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> Form:
        """How W is kept for inputs such as x on a path that makes it: the fastest where there are several."""
        forms = self._forms(path, x, tensors, bias)

        def sides() -> dict[str, choice.Side]:
            weight = self._made(tensors, len(self.size) == 4)
            calls = {name: form.call(form.of(weight) if form.of else weight) for name, form in forms.items()}
            return {name: side(one, x, [], False) for name, one in calls.items()}

        if len(forms) == 1:
            return forms["reconstruct"]
        work = self._work(x.shape, {}, is_channels_last(x), "kept", x.dtype, x.device.type)
        kind = "linear" if len(self.size) == 2 else "kernel"
        return forms.get(choice.choose(work._replace(kind=kind), sides), forms["reconstruct"])

    def _forms(self, path: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> dict[str, Form]:
        """The forms there are, by what `choice` calls them, "reconstruct" among them."""
        return {"reconstruct": Form(None, None, lambda weight: self._dense_call(x, weight, bias))}

    def _dense_call(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> direct.Call:
        """What the dense layer computes with this weight."""
        # A layer that its own nodes hold would live until the garbage is collected.
        layer = weakref.ref(self)
        return direct.Call(lambda x: layer()._dense_forward(x, weight, bias), (None,), 0)

    def _remember(self, asked: tuple, answer: str) -> None:
        self._answers = with_answer(self._answers, asked, answer)

    def _forget(self) -> None:
        """Forget what was made and chosen for other settings."""
        if "_cache" in self.__dict__:
            self._cache.clear()
            self._answers, self._nodes = {}, direct.Nodes()
            self._note_kind()

    def _borrows(self) -> bool:
        """Whether the factors are there for one call alone, as accelerate brings those that it has offloaded: what is
        kept would hold them."""
        hook = self.__dict__.get(OFFLOADED)
        return hook is not None and any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))

    def _kept_for(self, tensors: dict[str, Tensor]) -> weight_cache.Kept | None:
        """What is kept for these factors, None where nothing may be."""
        return None if self._borrows() else self._cache.of(list(tensors.values()))

    def _operands(self) -> tuple[dict[str, Tensor], weight_cache.Kept | None]:
        """What a forward computes from now, and what is kept for it."""
        tensors = self._tensors()
        if self.training or not weight_cache.allowed():
            return tensors, None
        return self._sparse_for_evaluation(tensors, self._kept_for(tensors))

    def _path(self, x: Tensor, tensors: dict[str, Tensor], kept: weight_cache.Kept | None) -> str:
        path = self.path
        if path == "auto":
            return self._choose(x, tensors, kept)
        if path != "factored" and self._dropout_active():
            raise ValueError(f"path={path!r}: in training {self.spec} has dropout, which only the factored path has")
        if path != "reconstruct" and (why_not := self._why_not(path, tensors)):
            raise ValueError(f"path={path!r}: {why_not}")
        return path

    def path_for(self, x: Tensor) -> str:
        """The path that the forward takes for x: "reconstruct", "factored", "fused" or "product"."""
        x = self._padded(x)
        found = self._by_twin(x, FactorizedLayer.path_for)
        return found or self._path(self._in_format(x), *self._operands())

    def _padded(self, x: Tensor) -> Tensor:
        """x, with what the layer pads it with where it `_pads`."""
        return x

    def _in_format(self, x: Tensor) -> Tensor:
        """x in the form in which the layer computes with it."""
        return x

    def _sparse_for_evaluation(
        self, tensors: dict[str, Tensor], kept: weight_cache.Kept | None
    ) -> tuple[dict[str, Tensor], weight_cache.Kept | None]:
        """The factors for evaluation, with compact μ where it is dense but mostly zeros, and what is kept for them if
        that depends on their numbers."""
        mu = tensors.get("mu")
        if self.path != "auto" or mu is None or mu.dim() == 1 or not mu.is_cpu or not self._has_factored_form():
            return tensors, None
        packed = kept and kept.value("packed", lambda: _nonzeros(mu))
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
            return self.spec.weight(cast(tensors), self.size, self._format_of(channels_last, tensors))
        channels_last = channels_last and len(self.size) == 4
        make = functools.partial(self._made, tensors, channels_last)
        kept = kept or self._kept_for(tensors)
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
        asked = (x.shape, x.stride(), dtype_of(x), x.device, x.requires_grad, trained, self.training)
        asked += (mu is not None and mu.shape, *choice.generation())
        # To put the question takes longer than an answer that was given a call ago is worth.
        path = self._answers.get(asked)
        if path is None:
            path = self._ask(x, tensors, bias, kept, trained)
            if choice.can_measure():
                self._remember(asked, path)
        return path

    def _dropout_active(self) -> bool:
        """Whether the input of the adapter loses numbers now."""
        return self.training and getattr(self.spec, "dropout", 0) > 0

    def _takes_apart(self, x: Tensor, tensors: dict[str, Tensor], trained: bool) -> bool:
        """Whether "auto" takes σ and B A of `LowRank` apart."""
        if self._why_not("factored", tensors) is not None:
            return False
        if self._dropout_active():
            return True
        sigma, traced = tensors["sigma"], torch.compiler.is_compiling() or recording()
        if sigma.requires_grad or (not traced and is_mapped(sigma)):
            return False
        if not (trained or self.training) and x.device.type == "cpu" and weight_cache.allowed():
            return False
        return self.spec.is_thin(self.size, None if traced else self._rows(x))

    def _adapter_input(self, x: Tensor) -> Tensor | None:
        """What the adapter sees of x, None for x itself."""
        return F.dropout(x, self.spec.dropout) if self._dropout_active() else None

    def _rows(self, x: Tensor) -> float:
        """How many vectors the weight is multiplied with for x: rows, or pixels of the output."""
        raise NotImplementedError

    def _ask(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept, trained: bool) -> str:
        paths = self._candidates(x, tensors)
        if len(paths) == 1:
            return paths[0]
        path = choice.choose(
            self.work(x, tensors, trained), lambda: self._timed_paths(paths, x, tensors, bias, kept, trained)
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
        if factored and is_dense(tensors):
            plain = choice.can_measure() and self._is_plain(x, tensors, self.bias, casts=True)
            factored = plain and self._takes_dense(x, tensors)
        elif factored:
            factored = not self._why_not("factored", tensors)
        return ["reconstruct", "factored"] if factored else ["reconstruct"]

    def _is_one_factored(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None) -> bool:
        """Whether the factored path of x, on the CPU, is one node: of `LowRank` in training, where σ is the dense μ of
        a `Rank1` or, of a linear layer, frozen."""
        if not self._can_cast(x, tensors, bias):
            return False
        if not isinstance(self.spec, LowRank):
            return True
        sigma = tensors["sigma"]
        if not torch.is_grad_enabled():
            return False
        if sigma.requires_grad:
            return not self._dropout_active() and self._takes_dense(x, tensors)
        return len(self.size) == 2 and is_plan(x, sigma)

    def _plan_of_factors(self, x: Tensor, tensors: dict[str, Tensor]) -> direct.Plan:
        """The factored path of x, where that is one node."""
        raise NotImplementedError

    def _form_of_factors(self) -> LowRankForm | None:
        """How those of `LowRank` are factors of `Rank1`."""
        spec = self.spec
        return LowRankForm(LAYOUTS[spec.layout_of(self.size)], spec.scaling) if isinstance(spec, LowRank) else None

    def _takes_dense(self, x: Tensor, tensors: dict[str, Tensor]) -> bool:
        """Whether a kernel of the factored path takes dense μ as it is."""
        raise NotImplementedError

    def _factors_are_weights(self, tensors: dict[str, Tensor]) -> bool:
        """Whether the factored path computes as much as the dense layer, because v has the size of W."""
        return False

    def _timed_paths(self, paths, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, kept, trained: bool):
        """path → a function that runs it, for `choice`: with a gradient of its own where one is asked for."""

        def alone(t: Tensor | None) -> Tensor | None:
            return t if t is None else t.detach().requires_grad_(trained and t.requires_grad)

        inputs, own, own_bias = alone(x), {name: alone(t) for name, t in tensors.items()}, alone(bias)
        leaves = [t for t in (inputs, *own.values(), own_bias) if t is not None and t.requires_grad]
        watched = None
        if not (trained or self.training) and weight_cache.allowed():
            watched = weight_cache.watch(list(tensors.values()), others=1)

        @functools.cache
        def call(path: str) -> Callable[[Tensor], Tensor | None]:
            if watched and path in OF_WEIGHT:
                # What is made for a measurement is not kept.
                of = weight_cache.Kept(list(own.values()), watched if x.is_cuda else 0, {})
                return self._kept_call(path, inputs, own, own_bias, of)
            one = self._call(path, inputs, own, own_bias)
            return one or (lambda x: self._compute(path, x, own, own_bias, kept))

        def forward(path: str, x: Tensor) -> Tensor:
            # As in evaluation once W is kept: the factors are looked at, and it serves.
            if watched and path in OF_WEIGHT:
                direct.still(watched)
            return call(path)(x)

        if watched:
            # It may put a question of its own, which must not wait for this one where that is timed in another thread.
            with contextlib.suppress(RuntimeError, ValueError):
                call("reconstruct")
        return {path: side(functools.partial(forward, path), inputs, leaves, trained) for path in paths}

    def times(self, x: Tensor, training: bool) -> tuple[dict[str, float], str]:
        """(path → seconds, the path that "auto" takes) for x, as it is in evaluation, or for a training step; the
        seconds of the dense layer beside them as those of "dense".

        They are timed now, whatever is remembered.
        """
        mode, dense_side = self.training, self._dense_side(x, training)
        x = self._in_format(self._padded(x.detach())).requires_grad_(x.requires_grad)
        try:
            self.train(training)
            with torch.set_grad_enabled(training):
                tensors, kept = self._operands()
                paths, chosen = self._candidates(x, tensors), self._path(x, tensors, kept)
                sides = self._timed_paths(paths, x, tensors, self.bias, kept, training)
                return choice.times({"dense": dense_side, **sides}), chosen
        finally:
            self.train(mode)

    def _dense_side(self, x: Tensor, trained: bool) -> choice.Side:
        """The same of the dense layer of the same function."""
        dense, inputs = self.to_dense(), x.detach().requires_grad_(trained and x.requires_grad)
        if is_channels_last(x):
            dense.to(memory_format=torch.channels_last)
        return side(dense.forward, inputs, [t for t in (inputs, *dense.parameters()) if t.requires_grad], trained)

    def work(self, x: Tensor, tensors: dict[str, Tensor], trained: bool) -> choice.Work:
        """What the choice is asked about for an input x."""
        if trained:
            step = "training" if x.requires_grad else "weights"
        else:
            step = "evaluation" if not self.training and weight_cache.allowed() else "forward"
        return self._work(tuple(x.shape), tensors, is_channels_last(x), step, dtype_of(x), x.device.type)

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
            return apply_weight(self._plan(path, how, x, tensors), x, bias, *parts)
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
        """Whether W and the layer can be one node of the graph: in eager training."""
        if not torch.is_grad_enabled() or type(self.spec).weight is not Spec.weight:
            return False
        return self._can_cast(x, tensors, bias, direct.OTHER if x.device.type == direct.OTHER else "cpu")

    def _can_cast(self, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, device: str = "cpu") -> bool:
        """Whether nothing transforms, all tensors are plain, x on this device, and autocast casts what a node can."""
        if transforming():
            return False
        cast = self._cast(x)
        by_library = isinstance(self.spec, Rank1) or (isinstance(self.spec, LowRank) and x.is_cpu)
        casts = by_library and cast in direct.CASTS
        if casts and cast and any(t.dtype == torch.float64 for t in (x, *tensors.values())):
            return False  # which autocast leaves as it is
        return self._is_plain(x, tensors, bias, casts, device)

    @staticmethod
    def _is_plain(
        x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None, casts: bool = False, device: str = "cpu"
    ) -> bool:
        """Whether nothing transforms or, unless `casts`, casts, and all tensors are plain, x on this device."""
        if x.device.type != device or (torch.is_autocast_enabled(device) and not casts) or transforming():
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
        """As for any module; a kept weight is dropped where the mode changes, else its factors are read anew."""
        if mode != self.training:
            self._clear_caches()
        else:
            self._cache.read_anew()
            self._nodes = self._nodes.of(None)
        for tensor in (*self._parameters.values(), self._buffers.get(INDEX)):
            if tensor is not None:
                weight_cache.settle(tensor)
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

    def _clear_caches(self) -> None:
        """Drop what is kept of the factors."""
        self._cache.clear()
        self._nodes = self._nodes.of(None)

    def _apply(self, *args, **kwargs):
        self._forget()
        self._forget_compiled()
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        self._forget_compiled()
        mark = f"{prefix}weight"
        if isinstance(found := state_dict.get(mark), Tensor) and not found.numel():
            # Of `pretrained`, where a file of transformers has a factorized layer.
            state_dict = {name: tensor for name, tensor in state_dict.items() if name != mark}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _forget_compiled(self) -> None:
        """Leave no weak reference to a factor, with which PyTorch swaps no tensors."""
        compiled.forget(self._parameters.values())

    def __deepcopy__(self, memo):
        # As by `__getstate__`, which `torch.nn.utils.parametrize` takes away.
        other = memo[id(self)] = self.__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in OF_PROCESS}
        other.__setstate__(copy.deepcopy(state, memo))
        return other

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name not in OF_PROCESS}

    def __setattr__(self, name, value):
        if name == "path" and value not in self.paths:
            raise ValueError(f"path={value!r}: must be one of {', '.join(map(repr, self.paths))}")
        super().__setattr__(name, value)
        if name in SETTINGS:
            self._forget()
        elif isinstance(value, Tensor) and type(value) not in PLAIN and "_cache" in self.__dict__:
            # A factor that is sharded again, as FSDP2 does after the forward: so goes what was made of the whole one.
            self._clear_caches()

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__.setdefault("_cache", weight_cache.WeightCache())
        self._answers, self._nodes = {}, direct.Nodes()
        self._note_kind()


def with_answer(answers: dict[tuple, str], asked: tuple, answer: str) -> dict[tuple, str]:
    """Answers with one more, without the oldest where there are too many."""
    answers = answers | {asked: answer}
    if len(answers) > ANSWERS:
        del answers[next(iter(answers))]
    return answers


def side(forward: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor], trained: bool) -> choice.Side:
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


def cast(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under autocast, factors in its dtype, to which the dense layer would cast W: so it is written once, by half."""
    if not autocasts(next(iter(tensors.values())).device.type):
        return tensors
    return dict(zip(tensors, autocast(*tensors.values()), strict=True))


def dtype_of(x: Tensor) -> torch.dtype:
    """In which x is computed with, under autocast or not."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else x.dtype


def as_leaf(module: nn.Module, x: Proxy, *others) -> Proxy:
    """The call of `module` in a graph that `torch.fx` traces, which has modules of `torch.nn` as they are, and looks
    into all others."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x, *others), {})


def _nonzeros(mu: Tensor) -> tuple[Tensor, Tensor] | None:
    """μ in compact form; None where it is not mostly zeros."""
    return sparsity.gather(mu) if sparsity.nonzeros(mu) <= PACKED * mu.numel() else None


MAKERS = (BasePruningMethod, WeightNorm, SpectralNorm)
"""Hooks that make a parameter of a module before its forward."""
HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)
"""Where a module has its hooks."""


def hooked(new: nn.Module, module: nn.Module, shared: bool = False) -> nn.Module:
    """`new` with the hooks and the mode of `module`. shared: it takes that one's place, where a handle of a hook of
    before removes it."""
    for name in HOOKS:
        value = module.__dict__[name]
        new.__dict__[name] = value if shared or not isinstance(value, dict) else value.copy()
    if isinstance(new, FactorizedLayer):
        return new.train(module.training)
    if isinstance(module, FactorizedLayer):
        # A dense layer has no factors to be made.
        for key in [key for key, hook in new._forward_pre_hooks.items() if isinstance(hook, MAKERS)]:
            del new._forward_pre_hooks[key]
    new.training = module.training  # its modules keep their own
    return new


def converted(new, layer: nn.Module, spec: Spec, init: str | None, generator):
    """The factorized form of a dense layer; its factors are left as they are where `init` is None."""
    weight = new._weight_of(layer)
    new._setup(layer, spec, weight)
    if init is not None:
        new.reset_parameters(init, weight, generator)
    for parameter in new.factors().values():
        parameter.requires_grad_(layer.weight.requires_grad)
    new.bias = layer.bias
    return hooked(new, layer)


def densified(dense: nn.Module, layer: FactorizedLayer):
    trainable = any(parameter.requires_grad for parameter in layer.factors().values())
    dense.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=trainable)
    bias = layer.bias
    made = bias is not None and not isinstance(bias, nn.Parameter)
    dense.bias = nn.Parameter(bias.detach().clone()) if made else bias
    return hooked(dense, layer)
