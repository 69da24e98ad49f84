"""PyTorch's operators for modules of several layers in evaluation, given the weights of those that are factorized."""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastfact.nn import choice, weight_cache
from fastfact.nn.factors import INDEX
from fastfact.nn.layer import ANSWERS, OFFLOADED, FactorizedLayer, side, with_answer
from fastfact.ops import direct
from fastfact.ops.backends import PLAIN
from fastfact.ops.common import transforming

Part = FactorizedLayer | Tensor
"""A layer of a module, or the weight of one that is dense."""


class _Served(NamedTuple):
    """What serves inputs while no hook sees what these modules compute."""

    nodes: direct.Nodes
    modules: tuple[nn.Module, ...]


class Operated(nn.Module):
    """A module for which PyTorch has an operator: the weights of its factorized layers are kept for it in evaluation,
    as long as their factors are what they were, where it is measured to be faster than layer after layer.

    `how` it is called: all settings of its own that what it computes depends on, and arguments besides x.
    """

    def _by_operator(self, how: Hashable, x: Tensor, *weights: Tensor) -> object:
        """What PyTorch's operator makes of x [n, length, e] and of a weight for each part."""
        raise NotImplementedError

    def _served(self, how: Hashable, x: Tensor) -> object | None:
        """What the operator makes of x, where it was chosen for inputs such as this one and nothing has changed."""
        if torch.compiler.is_compiling() or x.is_nested:
            return None
        served = self._of_process().served.get(how)
        if served is None or is_watched(*served.modules):
            return None
        return direct.serve(served.nodes, x, self.training, None)

    def _serve(
        self, how: Hashable, kind: str, x: Tensor, parts: Sequence[Part], by_layers: Callable[[Tensor], object]
    ) -> object:
        """by_layers(x), or what the operator makes of x and the weights of `parts`: the faster one.

        kind: of the module, with all that the times depend on but the sizes of x [n, length, e] and of the parts.
        """
        factors = _factors(parts)
        if not factors or not weight_cache.allowed():
            return by_layers(x)
        own, asked = self._of_process(), (kind, x.shape, x.dtype, x.device, *map(len, factors), *choice.generation())
        if (answer := own.answers.get(asked)) is None:
            answer = self._ask(how, kind, x, parts, sum(t.numel() for t in factors), by_layers)
            if choice.can_measure():
                own.answers = with_answer(own.answers, asked, answer)
        kept = own.cache.of(factors) if answer == "reconstruct" else None
        if kept is None:
            return by_layers(x)
        key = tuple((part.spec, part.size) for part in parts if isinstance(part, FactorizedLayer))
        made = kept.value(key, lambda: _made(parts))
        if watch := own.cache.watch(kept):
            self._let_serve(how, x, parts, made, watch)
        return self._by_operator(how, x, *_all(parts, made))

    def _let_serve(self, how, x: Tensor, parts: Sequence[Part], made: list[Tensor], watch: direct.Watch) -> None:
        """Let the operator serve inputs such as x in one call while nothing that it depends on changes."""
        asked, served = direct.key(x, self.training), self._of_process().served
        if asked is None or not direct.dispatches():
            return
        facts = [direct.serving(), choice.holds(), (vars(torch.backends.mha), "_is_fastpath_enabled", True, None)]
        for module in self.modules():
            for place in (module._parameters, module._buffers, module._modules):
                facts += [(place, name, value, None) for name, value in place.items()]
                # What is None may be registered there, and is an attribute no more.
                facts += [(place, name, None, None) for name, value in module.__dict__.items() if value is None]
        # A module that its own nodes hold would live until the garbage is collected.
        me, (_, *inside) = weakref.ref(self), self.modules()
        for module in inside:
            own = module.__dict__
            names = "forward", "path", OFFLOADED, *(name for name in own if not name.startswith("_"))
            facts += [(own, name, own.get(name), None) for name in names]
        nodes = direct.Nodes(served[how].nodes.of(watch) if how in served else ())
        if len(nodes) >= ANSWERS:
            del nodes[next(iter(nodes))]

        def call(x: Tensor) -> object:
            return me()._by_operator(how, x, *_all(parts, made))

        nodes[asked] = direct.Node(tuple(facts), None, watch, call, (None,), 0)
        served[how] = _Served(nodes, tuple(inside))

    def _ask(self, how, kind: str, x: Tensor, parts: Sequence[Part], numbers: int, by_layers) -> str:
        """The faster one: "factored" layer after layer, "reconstruct" by the operator. numbers: of the factors."""

        def sides() -> dict[str, choice.Side]:
            by_layers(x)  # which asks on its own
            weights = _all(parts, _made(parts))
            ways = {"reconstruct": lambda x: self._by_operator(how, x, *weights), "factored": by_layers}
            return {name: side(way, x, [], False) for name, way in ways.items()}

        size = sum(part.size[0] if isinstance(part, FactorizedLayer) else len(part) for part in parts), x.shape[2]
        work = choice.Work(
            *(kind, size, 1, x.shape[0], (x.shape[1], 1), (), (), (), 0, numbers),
            *(False, "module", x.dtype, x.device.type),
        )
        answer = choice.choose(work, sides)
        for part in parts if answer == "reconstruct" else ():
            if isinstance(part, FactorizedLayer):
                part._clear_caches()  # of what was measured
        return answer

    def _of_process(self) -> "_OfProcess":
        own = self.__dict__.get(OF_PROCESS)
        return self.__dict__.setdefault(OF_PROCESS, _OfProcess()) if own is None else own

    def train(self, mode: bool = True):
        """As for any module; kept weights are dropped where the mode changes, else the factors are read anew."""
        self._of_process().read_anew(mode != self.training)
        return super().train(mode)

    def _apply(self, *args, **kwargs):
        self._forget()
        return super()._apply(*args, **kwargs)

    def _forget(self) -> None:
        """Keep and know nothing."""
        self.__dict__.pop(OF_PROCESS, None)

    def __getstate__(self):
        return {name: value for name, value in super().__getstate__().items() if name != OF_PROCESS}


OF_PROCESS = "_of_operator"
"""Where a module has its `_OfProcess`."""


class _OfProcess:
    """What a module knows and keeps, and a copy of it does not."""

    def __init__(self) -> None:
        self.cache = weight_cache.WeightCache()
        self.answers: dict[tuple, str] = {}
        self.served: dict[Hashable, _Served] = {}

    def __reduce__(self):
        return _OfProcess, ()

    def read_anew(self, drop: bool) -> None:
        self.served = {}
        if drop:
            self.cache.clear()
        else:
            self.cache.read_anew()


def is_watched(*modules: nn.Module) -> bool:
    """Whether hooks see what these modules are given or compute, or its gradients."""
    if nn.modules.module._has_any_global_hook():
        return True
    for module in modules:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return True
    return False


def are_plain(x: Tensor, modules: Iterable[nn.Module]) -> bool:
    """Whether modules compute with x, a plain tensor, as their classes do, in evaluation, and nobody sees what on the
    way, so that PyTorch's operators, which are not switched off, may stand for them."""
    if transforming() or type(x) not in PLAIN or not torch.backends.mha.get_fastpath_enabled():
        return False
    modules = [module for module in modules if module is not None]
    return not (any(one.training or "forward" in one.__dict__ for one in modules) or is_watched(*modules))


def _factors(parts: Sequence[Part]) -> list[Tensor] | None:
    """The factors of all layers; None where one has none of its own now, or must not have its weight made."""
    found = []
    for part in parts:
        if isinstance(part, FactorizedLayer):
            own = [part._parameters.get(name) for name in part._names]
            if part.path not in ("auto", "reconstruct") or part._borrows() or any(type(t) not in PLAIN for t in own):
                return None
            index = part._buffers.get(INDEX)
            found += own if index is None else [*own, index]
    return found


def _made(parts: Sequence[Part]) -> list[Tensor]:
    """The weights of the layers that are factorized."""
    return [part._made(part._tensors(), False) for part in parts if isinstance(part, FactorizedLayer)]


def _all(parts: Sequence[Part], made: list[Tensor]) -> list[Tensor]:
    """The weights of all layers."""
    of = iter(made)
    return [next(of) if isinstance(part, FactorizedLayer) else part for part in parts]
