"""A function of tensors as the list of operations it runs: what autograd and `vmap` decide anew in each call, once."""

import logging
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

log = logging.getLogger("fastfact")
aten = torch.ops.aten

Function = Callable[..., Sequence[Tensor]]
PATIENCE = 4
"""How many times as long as it has recorded a function must have run before it records another shape."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Recorded:
    """`function` of tensors, which may change them, as operations recorded for each shape its tensors come in.

    A shape is recorded when it comes again, but there is one recording in `interval` calls at most, and not before the
    function has run `PATIENCE` times as long as the recordings took: one takes as long as many calls. Where the
    operations are not the whole of what the function does, it runs as it is: see `remembers`, and the first replay must
    give what the function gives, bit for bit.
    """

    def __init__(self, function: Function, model: nn.Module, interval: int):
        self.function, self.model, self.interval = function, model, interval
        self.calls, self.seen, self.replays = 0, set(), {}
        self.ran = self.spent = 0.0
        """Seconds in calls and in recordings."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        shapes = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
        self.calls += 1
        replay = self.replays.get(shapes)
        due = self.calls >= self.interval * (len(self.replays) + 1) and self.ran >= PATIENCE * self.spent
        began = time.perf_counter()
        if replay is None and due and shapes in self.seen and shapes not in self.replays:
            replay = self.replays[shapes] = record(self.function, self.model, tensors)
            self.spent += time.perf_counter() - began
            began = time.perf_counter()
        self.seen.add(shapes)
        if replay is None:
            out = self.function(*tensors)
        else:
            with torch.no_grad():
                out = replay(*tensors)
        self.ran += time.perf_counter() - began
        return out


def record(function: Function, model: nn.Module, tensors: Sequence[Tensor]) -> Function | None:
    """The operations of `function` on such `tensors`, None where they are not all it does. The tensors stay as they
    are."""

    def copies() -> list[Tensor]:
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]

    try:
        one, other = copies(), copies()
        before = remembers(model)
        expected = function(*one)
        if before is None or before != remembers(model):
            log.info("not recorded: the model's forward depends on more than tensors")
            return None
        graph = make_fx(function)(*other)
        simplify(graph)
        with torch.no_grad():
            for copy, tensor in zip(other, tensors, strict=True):
                copy.copy_(tensor)
            found = graph.forward(*other)
    except Exception as error:
        # Whatever is wrong with a recording, the function itself will tell if it is at fault.
        log.info("not recorded: %s", (str(error).strip().splitlines() or [type(error).__name__])[0])
        return None
    same = all(torch.equal(a, b) for a, b in zip([*expected, *one], [*found, *other], strict=True))
    return graph.forward if same else None


def remembers(model: nn.Module) -> dict | None:
    """What a forward of `model` could read or change that is no tensor: Python's and numpy's generators, attributes of
    its modules; None where there are hooks, which may do anything.
    """
    state = {"random": random.getstate(), "numpy": repr(np.random.get_state())}
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None):
                state[path, name] = value
            elif isinstance(value, list | tuple | dict | set) and name not in _OF_EVERY_MODULE:
                state[path, name] = tuple(map(id, value.values() if isinstance(value, dict) else value))
            elif isinstance(value, Tensor):
                state[path, name] = id(value)
    return state


def simplify(graph: GraphModule) -> None:
    """Leave out what changes nothing: aliases, and views of the shape a tensor has."""
    for node in graph.graph.nodes:
        if node.target in (aten.detach.default, aten.alias.default) or (
            node.target in (aten.view.default, aten.expand.default) and _shape(node) == _shape(node.args[0])
        ):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()


def _shape(node) -> tuple | None:
    tensor = node.meta.get("val", node.meta.get("tensor_meta"))
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)
