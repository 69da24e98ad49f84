"""The state of many clients as one dict of stacked tensors, what each tensor is for, where randomness comes from."""

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fastfact.federation.storage.states import States

State = dict[str, Tensor]
"""name → tensor [k, …]: the parameters and buffers of k clients (and what a strategy adds). One client is k = 1."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class TensorInfo:
    """What one tensor of the model is: strategies decide by it what is shared, trained and compared.

    role: the name within its module ("u", "v", "mu", "sigma", "A", "B", "weight", "bias", "running_mean", …).
    layer: 1 … `layers` counts the layers that have a weight, in the order in which the model registers them; a tensor
    of another module belongs to the weight layer before it (0 if there is none). classifier: in the last one (L).
    norm: in a normalisation layer; statistic: a buffer of one (running mean, variance, count).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: str
    layer: int
    layers: int
    classifier: bool = False
    norm: bool = False
    statistic: bool = False
    buffer: bool = False

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of `model` by name; a tied one once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def describe(model: nn.Module, classifier: str | None = None) -> dict[str, TensorInfo]:
    """name → TensorInfo of every parameter and buffer, in the order of `tensors_of`.

    A layer has a weight if it owns a parameter of two or more dimensions and is no normalisation. `classifier` is the
    path of the module that is the classifier if it is not the last such layer (the last part of its path will do, of
    several the last). Raises ValueError for a path that is not a weight layer.
    """
    where = {}
    paths: list[str] = []
    for path, module in model.named_modules():
        owned = list(module._parameters.values())
        if not isinstance(module, _NORMS) and any(p is not None and p.dim() >= 2 for p in owned):
            paths.append(path)
        where[path] = (len(paths), isinstance(module, _NORMS))
    if classifier is not None and classifier not in paths:
        classifier = next((path for path in reversed(paths) if path.endswith(f".{classifier}")), classifier)
    last = paths[-1] if paths and classifier is None else classifier
    if classifier is not None and classifier not in paths:
        raise ValueError(
            f"classifier={classifier!r}: not a layer with a weight; those are {', '.join(paths) or 'none'}"
        )
    if classifier is not None:
        # The classifier is layer L wherever it is registered; the layers after it move up by one.
        at = paths.index(classifier) + 1
        move = {n: n - (n > at) for n in range(len(paths) + 1)} | {at: len(paths)}
        where = {path: (move[layer], norm) for path, (layer, norm) in where.items()}
    buffers = dict(model.named_buffers())
    infos = {}
    for name, tensor in tensors_of(model).items():
        path, _, role = name.rpartition(".")
        layer, norm = where[path]
        infos[name] = TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            role=role,
            layer=layer,
            layers=len(paths),
            classifier=bool(paths) and path == last,
            norm=norm,
            statistic=norm and name in buffers,
            buffer=name in buffers,
        )
    return infos


def stack(tensors: Mapping[str, Tensor], k: int) -> State:
    """k copies of each tensor, every copy in the memory format of the original."""
    state = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        state[name] = torch.empty_strided(
            (k, *tensor.shape), (max(tensor.numel(), 1), *tensor.stride()), dtype=tensor.dtype, device=tensor.device
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


def take(state: State, rows: Sequence[int], out: State | None = None) -> State:
    """A copy of some rows, into `out` (of that many rows) if given."""
    rows, some = list(rows), index_of(rows)
    out = out or {name: like_rows(tensor, len(rows)) for name, tensor in state.items()}
    for name, tensor in state.items():
        out[name].copy_(tensor[some])
    return out


def like_rows(tensor: Tensor, k: int) -> Tensor:
    """An empty [k, …] in the dtype, device and memory format of `tensor` [any number, …]."""
    return torch.empty_strided((k, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class Models(Sequence):
    """The clients' models, each made when asked for (see `Federation.models`)."""

    def __init__(self, template: nn.Module, states: "States"):
        self._template, self._states = template, states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, k):
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        if not -len(self) <= k < len(self):
            raise IndexError(f"models[{k}]: there are {len(self)} clients")
        model = copy.deepcopy(self._template)
        state = self._states.load([k % len(self)])
        for name, tensor in tensors_of(model).items():
            tensor.data = state[name][0]
        return model.eval()


def seed_for(seed: int, round: int, client: int, purpose: str) -> int:
    """The seed of one random stream. Depends on nothing else, so that clients can run in any order."""
    digest = hashlib.blake2b(f"{seed}/{round}/{client}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(seed: int, round: int, client: int, purpose: str, device="cpu") -> torch.Generator:
    """A fresh generator of the stream `seed_for` names."""
    return torch.Generator(device).manual_seed(seed_for(seed, round, client, purpose))


@contextlib.contextmanager
def seeded(seed: int, round: int, client: int, purpose: str, device="cpu") -> Iterator[None]:
    """PyTorch's global generators (dropout, module initialisation) set to one stream inside, put back after."""
    device, number = torch.device(device), seed_for(seed, round, client, purpose)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # torch.manual_seed would queue a call for every kind of device that is not in use, with a traceback each.
        torch.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)
        yield
