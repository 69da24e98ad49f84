"""A function of tensors as the list of operations it runs: what autograd and `vmap` decide anew in each call, once."""

import logging
import operator
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

log = logging.getLogger("fastfact")
aten, fastfact = torch.ops.aten, torch.ops.fastfact

Function = Callable[..., Sequence[Tensor]]
PATIENCE = 4
"""How many times as long as its captures took, or a first one will take, a function must have run before a capture."""
FIRST = 5
"""How many calls a first capture is taken to last."""
_CAN_BE_NOTHING = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Captured:
    """`function` of tensors, which may change them, as operations captured for each shape its tensors come in.

    A shape is captured when it comes again, but not before the function has run `patience` times as long as the
    captures took: one takes as long as many calls. Where the operations are not the whole of what the function does, it
    runs as it is: see `remembers`, and the first replay must give what the function gives, bit for bit.

    last: of how many tensors, the last ones, the shapes count. Those before are read by rows that others pick, however
    many they have.
    """

    def __init__(self, function: Function, model: nn.Module, patience: float, last: int | None = None):
        self.function, self.model, self.patience, self.last = function, model, patience, last
        self.calls, self.seen, self.replays = 0, set(), {}
        self.ran = self.spent = 0.0
        """Seconds in calls and in captures."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        free = 0 if self.last is None else len(tensors) - self.last
        shapes = free, *((tensor.shape, tensor.stride()) for tensor in tensors[free:])
        replay = self.replays.get(shapes)
        due = self.ran >= self.patience * (self.spent or FIRST * self.ran / max(1, self.calls))
        self.calls += 1
        began = time.perf_counter()
        if replay is None and due and shapes in self.seen and shapes not in self.replays:
            replay = self.replays[shapes] = capture(self.function, self.model, tensors, free)
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


def capture(function: Function, model: nn.Module, tensors: Sequence[Tensor], free: int = 0) -> Function | None:
    """The operations of `function` on such `tensors`, None where they are not all it does. The tensors stay as they
    are; the first `free` are known to be only read."""

    def copies() -> list[Tensor]:
        # An operand is told by its object, so none may stand for two.
        same = [t.detach() for t in tensors[:free]]
        return same + [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors[free:]
        ]

    try:
        one, other = copies(), copies()
        before = remembers(model)
        expected = function(*one)
        if before is None or before != remembers(model):
            log.info("not captured: the model's forward depends on more than tensors")
            return None
        # Shapes are noted as fake tensors: of one mode, for which each operation makes its own where none is told.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            graph = make_fx(function)(*other)
        simplify(graph)
        join(graph)
        with torch.no_grad():
            for copy, tensor in zip(other[free:], tensors[free:], strict=True):
                copy.copy_(tensor)
            found = graph.forward(*other)
    except Exception as error:
        # Whatever is wrong with a capture, the function itself will tell if it is at fault.
        log.info("not captured: %s", (str(error).strip().splitlines() or [type(error).__name__])[0])
        return None
    same = all(torch.equal(a, b) for a, b in zip([*expected, *one[free:]], [*found, *other[free:]], strict=True))
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
    """Leave out what changes nothing: aliases, views of the shape a tensor has, products with 1, axes exchanged and
    back or left in order; and what nobody reads."""
    for node in graph.graph.nodes:
        same, args = None, node.args
        if node.target in (aten.detach.default, aten.alias.default):
            same = args[0]
        elif node.target in _CAN_BE_NOTHING or (node.target == aten.mul.Scalar and args[1] == 1):
            same = args[0] if _shape(node) == _shape(args[0]) else None
        elif node.target == aten.mul.Tensor and any(map(_is_one, args)):
            same = next((arg for arg in args if _shape(arg) == _shape(node) and not _is_one(arg)), None)
        elif node.target == aten.permute.default and list(args[1]) == sorted(args[1]):
            same = args[0]
        elif node.target == aten.transpose.int == args[0].target and set(args[1:]) == set(args[0].args[1:]):
            same = args[0].args[0]
        if same is not None:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_one(node) -> bool:
    """Whether all its elements are 1."""
    while isinstance(node, Node) and node.target in _CAN_BE_NOTHING:
        node = node.args[0]
    return _calls(node, aten.ones_like.default)


def join(graph: GraphModule) -> None:
    """The products of a last layer that reads rows where they are, and the loss between them, as one operation."""
    for node in graph.graph.find_nodes(op="call_function", target=fastfact.rows_linear_backward.default):
        rows, grad = node.args[:2], node.args[2]
        loss = grad.args[0] if grad.target == operator.getitem else None
        if not _calls(loss, fastfact.softmax_loss.default):
            continue
        logits, bias = loss.args[0], None
        if _calls(logits, aten.add.Tensor) and len(logits.users) == 1 and not logits.kwargs:
            bias, logits = sorted(logits.args, key=_is_product)
        if not _is_product(logits) or logits.args[:2] != rows or len(logits.users) > 1:
            continue
        with graph.graph.inserting_before(loss):
            if bias is not None:
                shape, dtype = _shape(logits)
                if _shape(bias) != ((shape[0], 1, shape[2]), dtype):
                    continue
                bias = graph.graph.call_function(aten.squeeze.dim, (bias, 1))
            joint = graph.graph.call_function(
                fastfact.rows_softmax_loss.default, (*rows, logits.args[2], bias, loss.args[1])
            )
            dw = graph.graph.call_function(operator.getitem, (joint, 2))
        loss.replace_all_uses_with(joint)
        node.replace_all_uses_with(dw)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _calls(node, target) -> bool:
    return isinstance(node, Node) and node.target == target


def _is_product(node) -> bool:
    return _calls(node, fastfact.rows_linear.default)


def _shape(node) -> tuple | None:
    if not isinstance(node, Node):
        return None
    tensor = node.meta.get("val", node.meta.get("tensor_meta"))
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)
