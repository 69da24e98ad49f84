"""What the ops share: the optional client axis, its fold under `vmap`, and the checks of shapes."""

import torch
from torch import Tensor


def call(function, clients: bool, tensors, *settings):
    """Call an op, adding the client axis (k = 1) when `tensors` come without it, and taking it off again."""
    if clients:
        return function(*tensors, *settings)
    out = function(*[t if t is None else t.unsqueeze(0) for t in tensors], *settings)
    if isinstance(out, Tensor):
        return out.squeeze(0)
    return tuple(t.squeeze(0) if t.dim() > 1 else t for t in out)


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
    """Whether torch.compile or a transform of torch.func is at work."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in autocast's dtype where it is on, as PyTorch's own convolutions take theirs (float64 stays)."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def is_mapped(tensor: Tensor) -> bool:
    """Whether `vmap` maps over `tensor`: inside, each client has its own."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def is_channels_last(x: Tensor) -> bool:
    """Whether a tensor of four dimensions lies channels_last in memory, and not contiguous as well.

    By its strides: under `vmap` PyTorch answers no question about memory formats.
    """
    if x.dim() != 4 or x.is_contiguous():
        return False
    expected = 1
    for d in (1, 3, 2, 0):
        if x.shape[d] != 1:
            if x.stride(d) != expected:
                return False
            expected *= x.shape[d]
    return True


def must_be_plain() -> bool:
    """Whether an op must be made of plain PyTorch: torch.compile loses the gradient of an autograd.Function inside
    torch.func.grad (and fuses plain PyTorch there).
    """
    return torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def with_clients(op: str, named: dict[str, tuple[Tensor | None, int]]) -> tuple[bool, list[Tensor | None]]:
    """Whether any tensor has the client axis, and all with it if so. `named`: name → (tensor, dims without it)."""
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
    if tensor is None:
        return
    if tuple(tensor.shape[clients:]) != tuple(shape):
        raise ValueError(f"{op}: {name} has shape {list(tensor.shape[clients:])}, must be {list(shape)}")
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{op}: {name} is {tensor.dtype} on {tensor.device}, must be {like.dtype} on {like.device} as the others"
        )


def check_index(op: str, index: Tensor, like: Tensor) -> Tensor:
    """The positions of a support in int32. Raises ValueError for another kind of tensor or device."""
    if index.dtype not in (torch.int32, torch.int64) or index.device != like.device:
        raise ValueError(f"{op}: index is {index.dtype} on {index.device}, must be int32 or int64 on {like.device}")
    return index.to(torch.int32)
