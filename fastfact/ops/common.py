"""What the ops share: the optional client axis, its fold under `vmap`, and the checks of arguments."""

import functools
import math
import operator

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from fastfact.base.formats import FLOATING, one_channel_last
from fastfact.ops.backends import library_serves

LARGEST = 2**31 - 1
"""The largest integer argument: sizes of tensors beyond it are out of reach of memory and of kernels."""


_unsafe_view = torch.ops.aten._unsafe_view.default


def call(function, clients: bool, tensors, *settings):
    """Call an op, adding the client axis (k = 1) when `tensors` come without it, and taking it off again."""
    if clients:
        return function(*tensors, *settings)
    out = function(*[t if t is None else t.unsqueeze(0) for t in tensors], *settings)
    if isinstance(out, Tensor):
        return out.squeeze(0)
    return tuple(t.squeeze(0) if t.dim() > 1 else t for t in out)


def no_view(y: Tensor) -> Tensor:
    """y, of which nobody has another part, as no view, so that what a node of the graph gives may be written to."""
    if not y._is_view():
        return y
    # `_unsafe_view` gives axes of one element other strides, by which PyTorch's batch-norm goes.
    return _unsafe_view(y, y.shape) if y.requires_grad else y.data


def fold(batch: int, in_dims, clients: bool, tensors) -> list[Tensor | None]:
    """Move each tensor's mapped axis into the client axis: [k, …] mapped over n becomes [n·k, …]."""
    folded = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        if tensor is not None:
            tensor = tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            tensor = tensor.flatten(0, 1) if clients else tensor
        folded.append(tensor)
    return folded


def unfold(batch: int, clients: bool, needs: int, out: tuple[Tensor, ...]) -> tuple[tuple, tuple]:
    """Undo `fold` on gradients, of which only those asked for in the bits of `needs` have elements: (out, out_dims)."""
    asked = [needs >> bit & 1 for bit in range(len(out))]
    if clients:
        out = tuple(t.unflatten(0, (batch, -1)) if need else t for t, need in zip(out, asked, strict=True))
    return out, tuple(0 if need else None for need in asked)


def transforming() -> bool:
    """Whether torch.compile, torch.jit.trace, a transform of torch.func or forward-mode AD is at work."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return True
    return has_tangents()


def has_tangents() -> bool:
    """Whether tensors may have tangents: of `torch.autograd.forward_ad`, or of `torch.func.jvp` and what is made of
    it."""
    return forward_ad._current_level >= 0


@functools.cache
def has_amx() -> bool:
    """Whether the CPU multiplies matrices of bfloat16, and with them float32 in pieces, by AMX."""
    return torch.cpu._is_amx_tile_supported()


def exporting() -> bool:
    """Whether torch.export is at work: of PyTorch 2.11, `torch.compiler.is_exporting()` is True in torch.compile as
    well."""
    return torch.compiler._is_exporting_flag


def recording() -> bool:
    """Whether a graph is recorded that is to run without this package: by torch.export, ONNX or torch.jit.trace; of
    PyTorch 2.11 also by torch.compile, whose graphs lose gradients of `lowrank_linear` there if this is False."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a kind of device; PyTorch 2.11 compiles no question whether it has one."""
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype where it is on, as PyTorch's own convolutions take theirs (float64 stays)."""
    kind = tensors[0].device.type
    if not autocasts(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def as_rows(x: Tensor, at: int = 0) -> Tensor:
    """x with one axis between the first `at` and the last."""
    # No `flatten`, which gradients in batches (`is_grads_batched`) have not; no `numel`, which a trace takes for fixed.
    return x.reshape(*x.shape[:at], math.prod(x.shape[at:-1]), x.shape[-1])


def in_type(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What a layer was computed from, in the type of its gradient, where autocast had cast it; autograd casts what this
    gives rise to."""
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def is_mapped(tensor: Tensor) -> bool:
    """Whether `vmap` maps over `tensor`: inside, each client has its own. Under torch.compile, which cannot trace the
    question, False."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def is_channels_last(x: Tensor) -> bool:
    """Whether images [n, c, h, w] lie channels_last in memory, and not contiguous as well, or one of both by
    `formats.one_channel_last`.

    By their strides: under `vmap` PyTorch answers no question about memory formats.
    """
    if x.dim() != 4 or x.is_contiguous():
        return x.dim() == 4 and one_channel_last(x)
    if not torch._C._are_functorch_transforms_active():
        return x.is_contiguous(memory_format=torch.channels_last)
    expected = 1
    for d in (1, 3, 2, 0):
        if x.shape[d] != 1:
            if x.stride(d) != expected:
                return False
            expected *= x.shape[d]
    return True


def must_be_plain() -> bool:
    """Whether an op must be made of plain PyTorch: torch.compile loses the gradient of an autograd.Function inside
    torch.func.grad (and fuses plain PyTorch there), a recorded graph has to run without this package, and only plain
    PyTorch carries tangents along.
    """
    if torch.compiler.is_compiling():
        return recording() or torch._C._are_functorch_transforms_active()
    return recording() or has_tangents()


def whole(op: str, name: str, value, least: int, most: int = LARGEST) -> int:
    """An integer argument. Raises TypeError or ValueError for what is none from `least` to `most`."""
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(f"{op}: {name}={value!r}, must be an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{op}: {name}={value!r}, must be an integer from {least} to {most}")
    return number


_KINDS = {
    (1, 2): "one or two integers",
    (2,): "(o, i)",
    (4,): "(o, i, kh, kw)",
    (2, 4): "(o, i) or (o, i, kh, kw)",
}


def wholes(op: str, name: str, value, counts: tuple[int, ...], least: int) -> tuple[int, ...]:
    """An argument of several integers, as many as one of `counts`; where 1 is among these, one integer means two."""
    kind = _KINDS[counts]
    numbers = (value, value) if 1 in counts and not isinstance(value, tuple | list) else value
    if not isinstance(numbers, tuple | list):
        raise TypeError(f"{op}: {name}={value!r}, must be {kind}")
    for number in numbers:
        if not isinstance(number, int) and not hasattr(number, "__index__"):
            raise TypeError(f"{op}: {name}={value!r}, must be {kind}, integers")
    if len(numbers) not in counts or min(numbers) < least or max(numbers) > LARGEST:
        raise ValueError(f"{op}: {name}={value!r}, must be {kind}, each from {least} to {LARGEST}")
    if len(numbers) == 1:
        numbers = 2 * tuple(numbers)
    # True is an int too, which PyTorch refuses for one.
    return tuple(number if type(number) is int else int(number) for number in numbers)


def pair(op: str, name: str, value, least: int) -> tuple[int, int]:
    """An argument of one or two integers."""
    if type(value) is int and least <= value <= LARGEST:
        return value, value
    if type(value) is tuple and len(value) == 2:
        a, b = value
        if type(a) is int and type(b) is int and least <= a <= LARGEST and least <= b <= LARGEST:
            return value
    return wholes(op, name, value, (1, 2), least)


def number(op: str, name: str, value, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite float argument. Raises TypeError or ValueError for what is none from `least` to `most`."""
    try:
        real = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{op}: {name}={value!r}, must be a number") from None
    if not (least <= real <= most and math.isfinite(real)):
        limits = "" if least == -math.inf else f" of at least {least}" if most == math.inf else f", {least} to {most}"
        raise ValueError(f"{op}: {name}={value!r}, must be a finite number{limits}")
    return real


def flag(op: str, name: str, value) -> bool:
    """A boolean argument. Raises TypeError for what is none."""
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r}, must be True or False")
    return value


def sequence(op: str, name: str, value, what: str) -> list:
    """An argument of several. Raises TypeError for what is no list or tuple."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{op}: {name} is {type(value).__name__}, must be a list of {what}")
    return list(value)


def choice(op: str, name: str, value, allowed) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{op}: {name}={value!r}, must be one of {', '.join(allowed)}")


def check_size(op: str, shape) -> None:
    """Raise ValueError for a result that no memory holds, the number of whose bytes need not fit 64 bits. Of sizes that
    stand for any, none: a graph would be one up to there alone."""
    if torch.compiler.is_compiling() or recording():
        return
    if math.prod(shape) >= 1 << 47:
        raise ValueError(f"{op}: the result would have the shape {list(shape)}, more elements than memory holds")


def check_tensor(op: str, name: str, tensor, dtypes=None, device: torch.device | None = None) -> None:
    """Raise TypeError for what is not a strided tensor, ValueError for another dtype or device."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} is {type(tensor).__name__}, must be a tensor")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{op}: {name} is {tensor.layout}, must be dense (torch.strided)")
    if dtypes is not None and tensor.dtype not in dtypes:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, must be {_listed(dtypes)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, must be on {device} as the others")


def _listed(names) -> str:
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


def with_clients(
    op: str, named: dict[str, tuple[Tensor | None, int]], optional: tuple[str, ...] = ()
) -> tuple[bool, list[Tensor | None]]:
    """Whether any tensor has the client axis, and all with it if so. `named`: name → (tensor, dims without it); those
    that are `optional` may be None.
    """
    for name, (tensor, _) in named.items():
        if tensor is None and name in optional:
            continue
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            check_tensor(op, name, tensor)
    if all(tensor is None or tensor.dim() == dims for tensor, dims in named.values()):
        return False, [tensor for tensor, _ in named.values()]
    sizes = {}
    for name, (tensor, dims) in named.items():
        if tensor is None:
            continue
        if tensor.dim() == dims + 1:
            sizes[name] = tensor.shape[0]
        elif tensor.dim() != dims:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, must have {dims} dimensions, or {dims + 1} with clients"
            )
    k = max(sizes.values())
    if min(sizes.values()) != k:
        raise ValueError(f"{op}: the client axes differ: {', '.join(f'{n} has {s}' for n, s in sizes.items())}")
    return True, [
        tensor if tensor is None or tensor.dim() > dims else tensor.expand(k, *tensor.shape)
        for tensor, dims in named.values()
    ]


def check(op: str, name: str, tensor: Tensor | None, shape, clients: bool, like: Tensor) -> None:
    """Raise ValueError unless a tensor has this shape, and the dtype and device of `like`."""
    if tensor is None:
        return
    if tuple(tensor.shape[clients:]) != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape[clients:])}, must be {list(shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{op}: {name} is {tensor.dtype} on {tensor.device}, must be {like.dtype} on {like.device} as the others"
        )


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATING:
        raise ValueError(f"{op}: {name} is {tensor.dtype}, must be {_listed(FLOATING)}")


def check_factors(op: str, u: Tensor, v: Tensor, shapes, clients: bool, like: Tensor) -> None:
    """Raise ValueError unless u and v are of these shapes, after the same rank of at least 1."""
    rank = u.shape[clients]
    for name, factor, shape in zip(("u", "v"), (u, v), shapes, strict=True):
        check(op, name, factor, (rank, *shape), clients, like)
    if rank == 0:
        raise ValueError(f"{op}: u has shape {list(u.shape[clients:])}, its rank must be at least 1")


_checked_supports = WeakTensorKeyDictionary()


def check_index(op: str, index: Tensor, like: Tensor, size, serves: str) -> Tensor:
    """The positions of a support in a weight of `size`, in int32, for the registered op `serves`.

    Raises ValueError for another dtype or device, and for what is not ascending positions in W: compiled kernels look
    while they read, for the others it is looked at here, on a GPU once for a tensor that nobody has written to since.
    What a transform or torch.compile works with, whose numbers cannot be seen, is looked at by compiled kernels only.
    """
    if index.dtype not in (torch.int32, torch.int64) or index.device != like.device:
        raise ValueError(
            f"{op}: index is {index.dtype} on {index.device}, must be torch.int32 or torch.int64 on {like.device}"
        )
    numel = math.prod(size)
    if numel > LARGEST:
        raise ValueError(f"{op}: a weight of size {list(size)} with an index must have at most {LARGEST} elements")
    positions = index
    if index.dtype == torch.int64:
        # What is out of range stays so.
        positions = index.clamp(-1, numel).to(torch.int32)
    if not (library_serves(serves, index) or transforming() or index.is_meta or capturing(index)):
        _check_ascending(op, index, positions, numel)
    return positions


def address(tensor: Tensor) -> int:
    """Where a tensor lies. `data_ptr` asks for memory to write to, for which what is copied on a write is copied."""
    return torch._C._data_address(tensor) + tensor.storage_offset() * tensor.element_size()


def _check_ascending(op: str, index: Tensor, positions: Tensor, numel: int) -> None:
    state = None if index.is_inference() else (index._version, address(index), numel)
    if state is not None and _checked_supports.get(index) == state:
        return
    if positions.numel():
        inside = (positions[..., 0] >= 0) & (positions[..., -1] < numel)
        if not bool(inside.all() & (positions[..., 1:] > positions[..., :-1]).all()):
            raise ValueError(f"{op}: index must be ascending positions in the weight, 0 to {numel - 1}")
    if state is not None:
        _checked_supports[index] = state


def check_range(op: str, name: str, index: Tensor, count: int) -> None:
    """Raise ValueError for an index below 0 or from `count` on."""
    outside = index[(index < 0) | (index >= count)]
    if outside.numel():
        raise ValueError(f"{op}: {name} has {int(outside[0])}, must be 0 to {count - 1}")


def capturing(tensor: Tensor | None = None) -> bool:
    """Whether a CUDA graph is being recorded (of what is computed with this tensor), when no number may be read, and
    what is computed runs again without this process's knowledge."""
    there = torch.cuda.is_initialized() if tensor is None else tensor.is_cuda
    return there and torch.cuda.is_current_stream_capturing()
