"""The state of many clients as one dict of stacked tensors, and where randomness comes from."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

State = dict[str, Tensor]
"""name → tensor [k, …]: the parameters and buffers of k clients (and what a strategy adds). One client is k = 1."""


def flattened(tensor: Tensor) -> Tensor:
    """[k, …] as [k, numbers]: a scalar of each client is one number."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a contiguous tensor as uint8 [bytes], in the same memory."""
    flat = tensor.view(-1)
    # But one number that was expanded: it is contiguous, of stride 0, and no bytes to PyTorch.
    flat = flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def stack(tensors: Mapping[str, Tensor], k: int) -> State:
    """k copies of each tensor, every copy in the memory format of the original, without its gaps or overlaps."""
    state = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        strides = torch.empty_like(tensor, device="meta").stride()
        state[name] = torch.empty_strided(
            (k, *tensor.shape), (max(tensor.numel(), 1), *strides), dtype=tensor.dtype, device=tensor.device
        )
        state[name].copy_(tensor.expand(k, *tensor.shape))
    return state


def evenly(n: int, most: int) -> int:
    """The size of the groups, `most` or up to half of that less, in which n clients go without a smaller one left over
    (what is recorded serves one size); `most` if there is none."""
    return next((size for size in range(min(n, most), most // 2, -1) if n % size == 0), most)


def index_of(rows: Sequence[int]) -> slice | list[int]:
    """Some rows as an index of a tensor: a slice, which makes no copy, if they follow each other."""
    rows = list(rows)
    together = rows and rows == list(range(rows[0], rows[-1] + 1))
    return slice(rows[0], rows[-1] + 1) if together else rows


def take(state: State, rows: Sequence[int]) -> State:
    """A copy of some rows."""
    rows, some = list(rows), index_of(rows)
    out = {name: like_rows(tensor, len(rows)) for name, tensor in state.items()}
    for name, tensor in state.items():
        out[name].copy_(tensor[some])
    return out


def like_rows(tensor: Tensor, k: int) -> Tensor:
    """An empty [k, …] in the dtype, device and memory format of `tensor` [any number, …]."""
    return torch.empty_strided((k, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def seed_for(seed: int, round: int, client: int, purpose: str) -> int:
    """The seed of one random stream. Depends on nothing else, so that clients can run in any order."""
    digest = hashlib.blake2b(f"{seed}/{round}/{client}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(seed: int, round: int, client: int, purpose: str, device="cpu") -> torch.Generator:
    """A fresh generator of the stream `seed_for` names."""
    return torch.Generator(device).manual_seed(seed_for(seed, round, client, purpose))


generator_lock = threading.RLock()
"""Held by the thread that uses PyTorch's global generators, of which a process has one set."""


@contextlib.contextmanager
def seeded(seed: int, round: int, client: int, purpose: str, device="cpu") -> Iterator[None]:
    """PyTorch's global generators (dropout, module initialisation) set to one stream inside, put back after. Other
    threads that want the same wait."""
    device, number = torch.device(device), seed_for(seed, round, client, purpose)
    with generator_lock, torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would queue a call for every kind of device that is not in use, with a traceback each.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
        yield
