"""Layers computed by the compiled libraries in one call forward and one backward, without PyTorch's dispatcher.

The ops of a small layer, called one by one through the dispatcher, take as long as it computes, on a GPU longer than
those of most networks, and so do the questions that a layer asks before it. Both are answered by a compiled module of
Python (`csrc/bind_module.h`): `serve` looks for a `Node` that says what to compute for an input, asks whether all it
depends on is as it was, and computes. There are two such modules. `fastfact._torch`, built for one PyTorch and Python,
asks tensors as PyTorch's own code does, has a layer in training as a node of PyTorch's graph, and serves calls of
layers without running their `forward` (`serve_calls`). `fastfact._cpu` stands in for it with any other: a layer is a
Function of Python. What stands between an op and its kernel is passed by, so that nothing may transform, record or
dispatch elsewhere, and all tensors must be plain ones on the CPU or, for layers whose weight is made or at hand, on one
device of the CUDA library (`csrc/bind_cuda_direct.cpp`). A layer casts as autocast does if it is asked to. `serve` asks
for that; whoever calls the rest asks `serves`. Where a function returns None nothing was computed, and the ops serve,
which say what does not fit.
"""

import contextlib
import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastfact.ops import backends
from fastfact.ops.backends import PLAIN, dispatches
from fastfact.ops.common import has_tangents, no_view

LINEAR, PIXELS, CONVOLUTION, REORDERED, PACKED, PANELS = range(6)
"""Kinds of layers: x Wᵀ, a 1×1 convolution as one product of pixels, any convolution, one with W in oneDNN's form, x Wᵀ
with W in oneDNN's form, and x Wᵀ or, in channels_last, a convolution, with W as `panels` has it."""

SEQUENCES = 8
"""Beside the kind of a convolution: x [n, c, l] stands for images [n, c, 1, l], and so does y."""

CASTS = {None: 0, torch.float16: 1, torch.bfloat16: 2}
"""What autocast may have a layer computed in."""

AS_RANK1, ADAPTER = 1, 2
"""How u, v and μ are A, B and σ of a low-rank weight: as those of a rank-1 weight, or of a linear layer whose σ takes
no gradient."""
NO_LOW_RANK = 0, 0.0
"""They are not, and there is no scaling."""


def settings(
    kind: int,
    layout: int,
    channels_last: bool,
    size: Sequence[int],
    how: Sequence = (),
    cast: torch.dtype | None = None,
    low_rank: tuple[int, float] = NO_LOW_RANK,
) -> bytes:
    """What a layer is asked for besides tensors: layout of the factors (`formats.LAYOUTS`), whether W is laid out
    channels_last, its size, the settings of a convolution (stride, padding, dilation, groups), one of `CASTS`, and
    whether u, v and μ are A, B and σ of a low-rank weight, with its scaling."""
    stride, padding, dilation, groups = how or ((1, 1), (0, 0), (1, 1), 1)
    of_convolution = *(*size, 1, 1)[:4], *stride, *padding, *dilation, groups
    return struct.pack("=15qdq", kind, layout, channels_last, *of_convolution, *low_rank, CASTS[cast])


def casting(call: "Call | None", dtype: torch.dtype) -> "Call | None":
    """A call of `dense` or `factored` that casts its input to this type of `CASTS`; None for any other call."""
    if call is None or call.function not in (dense, factored) or dtype not in CASTS:
        return None
    settings, *rest = call.args
    return call._replace(args=(settings[:-8] + struct.pack("=q", CASTS[dtype]), *rest))


def of_sequences(call: "Call") -> "Call | None":
    """The call of a convolution of images [n, c, 1, l] for sequences [n, c, l]; None where it has none."""
    function, args = call.function, call.args
    if function is _of_copy:
        inner = of_sequences(Call(args[0], args[4:], args[1]))
        return inner and Call(_of_copy, (inner.function, *args[1:4], *inner.args), call.at)
    if function in (dense, factored):
        return call._replace(args=(_of_images_of_one_row(args[0]), *args[1:]))
    if function is not _apply:
        return None
    plan, *rest = args
    plan = plan._replace(settings=_of_images_of_one_row(plan.settings), function=_Sequences(plan.function))
    return call._replace(args=(plan, *rest))


def _of_images_of_one_row(settings: bytes) -> bytes:
    (kind,) = struct.unpack_from("=q", settings)
    return struct.pack("=q", kind | SEQUENCES) + settings[8:]


class _Sequences:
    """The function of a plan for images [n, c, 1, l], of sequences [n, c, l]."""

    def __init__(self, function: type) -> None:
        self._of = function

    def forward(self, ctx, plan, x, *others):
        image = x.unsqueeze(-2)
        y = self._of.forward(ctx, plan, image, *others)
        seen, *rest = ctx.to_save
        ctx.save_for_backward(x if seen is image else seen.squeeze(-2), *rest)
        return no_view(y.squeeze(-2))

    def backward(self, ctx, grad, saved):
        seen, *rest = saved
        none, dx, *others = self._of.backward(ctx, grad.unsqueeze(-2), (seen.unsqueeze(-2), *rest))
        return none, dx if dx is None else dx.squeeze(-2), *others


class Plan(NamedTuple):
    """A layer as one node of the graph. makes: W, or y from the factors apart. function: has `forward` (ctx, plan, x,
    u, v, μ, index, bias) and `backward` (ctx, grad, what was saved), which serve where the library does not: they save
    what `forward` is given and after it W, if that is made, or μ as it was cast, if it was, and put the plan on the
    context. own: for these. index: of `ADAPTER` what the adapter sees in place of x, and saved in place of x, if given.
    support: where compact μ is, as the CUDA kernels read it (`sparsity.words`), if that is made."""

    settings: bytes
    makes: bool
    function: type
    own: Any
    support: Tensor | None = None


class Watch(NamedTuple):
    """Tensors as they lie in memory. To ask whether they are what they were (`still`) costs little besides reading the
    numbers: `torch.ops.fastfact.digest` of a small layer takes longer than the layer itself.

    What could change without the numbers at these addresses is looked at too: where and how each tensor lies. `held`
    keeps that memory from being given to another tensor.
    """

    noted: bytes
    tensors: tuple[Tensor, ...]
    held: tuple[object, ...]


class Call(NamedTuple):
    """function(*args) with x in the place `at`."""

    function: Callable[..., Tensor | None]
    args: tuple
    at: int

    def __call__(self, x: Tensor) -> Tensor | None:
        """The call, for x."""
        return self.function(*self.args[: self.at], x, *self.args[self.at + 1 :])


def with_input(call: Call, x: Tensor, cast: torch.dtype | None, rows: bool) -> Call:
    """The call for inputs such as x, which are copied once where the forward and the backward would each do so: to the
    type of `CASTS` that they are cast to, and, the `rows` of a linear layer in training, to where a matrix has them."""
    dtype = cast or x.dtype
    rows = rows and x.is_cpu and x.dim() > 2 and torch.is_grad_enabled() and not _is_matrix(x)
    if dtype == x.dtype and not rows:
        return call
    return Call(_of_copy, (call.function, call.at, dtype, rows, *call.args), call.at + 4)


def _is_matrix(x: Tensor) -> bool:
    """Whether x […, channels] is a matrix of its rows where it lies."""
    with contextlib.suppress(RuntimeError):
        x.detach().view(-1, x.shape[-1] if x.numel() else 1)
        return True
    return False


def _of_copy(function: Callable[..., Tensor | None], at: int, dtype: torch.dtype, rows: bool, *args) -> Tensor | None:
    x = args[at].to(dtype, memory_format=torch.contiguous_format if rows else torch.preserve_format)
    return function(*args[:at], x.contiguous() if rows else x, *args[at + 1 :])


Fact = tuple[Mapping[str, Any], str, Any, bool | None]
"""(A dict, a name, what is there under this name, None for nothing; whether that is trained, where it matters)."""


class Node(NamedTuple):
    """What serves inputs of one kind: a `Call`, while the facts hold, μ has this shape and the watched tensors are what
    they were."""

    facts: tuple[Fact, ...]
    form: tuple[Tensor, bytes] | None
    watch: Watch | None
    function: Callable[..., Tensor | None]
    args: tuple
    at: int


class Nodes(dict[bytes, Node]):
    """Key → node, of one layer. No mere dict: those that a module holds are copied by torch.export with all in them,
    and a node would be of copies of the layer's dicts."""

    def of(self, watch: Watch | None) -> "Nodes":
        """Those that watch nothing, or this."""
        return Nodes((key, node) for key, node in self.items() if node.watch is None or node.watch is watch)


def form(mu: Tensor | None) -> tuple[Tensor, bytes] | None:
    """A tensor with its shape, as `Node` has them."""
    return None if mu is None else (mu, struct.pack(f"={mu.dim()}q", *mu.shape))


class ByOps(torch.autograd.Function):
    """A plan as one node of the graph, computed by its own functions."""

    @staticmethod
    def forward(ctx, plan, x, u, v, mu, index, bias):
        return plan.function.forward(ctx, plan, x, u, v, mu, index, bias)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:  # compiled autograd has no other gradient of nothing
            given = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=False)
            return None, *(torch.zeros_like(one) if needed else None for one, needed in given)
        return ctx.plan.function.backward(ctx, grad, ctx.saved_tensors)


class Direct(ByOps):
    """The same, computed by `fastfact._cpu`: its forward and what PyTorch calls for the backward are set by `load`."""


def serve(nodes: Nodes, x: Tensor, training: bool, noted: tuple | None) -> Tensor | None:
    """The layer with these nodes for x. noted: None, or the positions of μ and the version that they must have."""


def key(x: Tensor, training: bool) -> bytes | None:
    """The key of the node that serves x now. None where nothing may."""


def layer(of: bytes, x: Tensor, bias, mu, index, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """(y of the dense layer with the weight that u, v and μ make, that weight); μ dense (`index` None), compact, or
    None."""


def factored(of: bytes, repeated: bool, x: Tensor, u, v, values, index, bias) -> Tensor | None:
    """`factored_conv2d` or `factored_linear`; repeated: of the former."""


def dense(of: bytes, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The layer with this weight."""


def panels(weight: Tensor) -> Tensor | None:
    """W [o, i], or [o, i, kh, kw] of a convolution, in the order in which this library's products of rows read it, for
    layers of the kind `PANELS`; None where it has no such form."""


def convolves(of: bytes, x: Tensor) -> bool:
    """Whether a convolution of several taps with these settings can be computed for x from its weight in panels."""
    return False


def serve_calls(kind: type, axes: int) -> None:
    """Have calls of modules of this class, whose forward gives what `serve` gives, served without what Python does
    around it, where that would do nothing. axes: how many x has when a node serves it, 0 for any number. Who replaces
    `nn.Module.__call__` ends that, until this is called again."""


def serve_graphs(layers: dict, forward: Callable[..., Tensor]) -> bool:
    """Have the op of a layer in a graph (`fastfact.nn.compiled`) computed by a node of the layer that is kept, else by
    `forward`; whether that is done."""
    return False


def prox_sgd_step(params, grads, momenta, l1, lr: float, momentum: float, weight_decay: float, proximal: bool) -> bool:
    """`ops.prox_sgd_step` of plain tensors that lie alike in memory; whether they do, and it was made."""
    return False


def adamw_step(
    params: list[Tensor],
    grads: list[Tensor],
    firsts: list[Tensor],
    seconds: list[Tensor],
    steps: list[Tensor],
    how: list[float],
) -> bool:
    """A step of AdamW on plain tensors on the CPU that lie alike in memory, and the soft threshold by lr · l1 in Adam's
    metric. steps: how many each has made, counted on. how: (lr, β₁, β₂, eps, weight decay, l1) of each. Whether it was
    made."""
    return False


def watch(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> bytes | None:
    """What a `Watch` notes of tensors without gaps, None where it cannot. versions: those that they must have, −1 for
    any."""


def still(watch: Watch) -> bool:
    """Whether the tensors, their numbers included, are those they were."""
    return False


def hold(tensor: Tensor) -> object | None:
    """What keeps the memory of a tensor, to which nothing writes while this lives: its digest is computed once. None
    where that does not pay, or cannot be."""
    return None


OTHER = "cuda"
"""The device that has a library of its own."""
_apply = ByOps.apply
_there = False
"""Whether there is the library, of this package."""
_FUNCTIONS = (
    *("serve", "key", "layer", "factored", "dense", "panels", "convolves"),
    *("prox_sgd_step", "adamw_step", "watch", "still", "hold"),
)


def load() -> None:
    """Take these functions from the library, where it is; called once, after it was loaded."""
    global _apply, _there, serve_calls, serve_graphs
    if not backends.loaded("cpu"):
        return
    for name, file in (("_torch", backends.module_file()), ("_cpu", backends.library_file("cpu"))):
        if file is None:
            continue
        try:
            library = _module(name, file)
            found = {name: getattr(library, name) for name in _FUNCTIONS}
            library.begin(serving(), _given_out(backends.library_file("cpu")), ByOps.apply, _differentiate)
        except (ImportError, AttributeError) as error:
            # Older than this package, or a PyTorch that has another way.
            backends.log.warning("fastfact computes small layers slower, without %s: %s", file.name, error)
            continue
        break
    else:
        return
    globals().update(found)
    if backends.loaded("cuda"):
        with contextlib.suppress(AttributeError, ImportError):  # it is older than this package
            library.take_library(_given_out(backends.library_file("cuda")))
    if name == "_torch":
        backends.tell = library.tell
        _apply, serve_calls, serve_graphs = library.apply, library.serve_calls, library.serve_graphs
    else:
        Direct.forward = staticmethod(library.forward)
        library.compute_backward(Direct._backward_cls)
        # Without what stands before it in Python, up to PyTorch 2.13, for transforms.
        _apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, Direct)
    _there = True


def _module(name: str, file: Path) -> ModuleType:
    """A compiled module of Python."""
    loader = ExtensionFileLoader(name, str(file))
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(module)
    return module


def _given_out(file: Path | None) -> int:
    """The address of what the library of a device gives out."""
    given_out = ctypes.CDLL(str(file)).fastfact_direct
    given_out.restype = ctypes.c_void_p
    return given_out()


class _Context(NamedTuple):
    plan: Plan
    needs_input_grad: tuple[bool, ...]


def _differentiate(plan: Plan, needs: tuple[bool, ...], grad: Tensor, saved: tuple) -> tuple[Tensor | None, ...]:
    """The gradients of what a plan was given, None for the plan itself, by its own function."""
    ctx = _Context(plan, needs)
    if not has_tangents():
        return plan.function.backward(ctx, grad, saved)
    # The ops have none. What was saved has none either, for then no plan would have served, and gradients are linear.
    grad, tangent = forward_ad.unpack_dual(grad)
    found = plan.function.backward(ctx, grad, saved)
    if tangent is None:
        return found
    pairs = zip(found, plan.function.backward(ctx, tangent, saved), strict=True)
    return tuple(one if one is None else forward_ad.make_dual(one, of_one) for one, of_one in pairs)


def serving() -> Fact:
    """What holds while the dispatcher chooses what serves."""
    return vars(backends), "_serving", backends._dispatched, None


def serves(*tensors: Tensor) -> bool:
    """Whether these functions may be called now, with these tensors."""
    if not _there or torch._C._len_torch_dispatch_stack() or has_tangents() or not dispatches():
        return False
    return all(type(tensor) in PLAIN and not tensor.is_neg() for tensor in tensors)


def call(plan: Plan, u, v, mu, index, bias) -> Call:
    """The plan with these tensors, for any x where `serves`."""
    return Call(_apply, (plan, None, u, v, mu, index, bias), 1)


def apply(plan: Plan, x: Tensor, u, v, mu, index, bias) -> Tensor:
    """The plan as one node of the graph. Nothing may transform or cast."""
    return (_apply if serves(x) else ByOps.apply)(plan, x, u, v, mu, index, bias)
