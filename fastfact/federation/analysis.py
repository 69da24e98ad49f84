"""What can be said of a federation between two rounds: similarity, density, keys, mixing weights, encodings.

Functions of what a federation tells everybody, see `Trained`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastfact.federation.progress import Progress
from fastfact.federation.server import mixing
from fastfact.federation.server.exchange import Exchange
from fastfact.federation.server.processes import Group
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, flattened
from fastfact.federation.storage.states import States
from fastfact.federation.tensors import TensorInfo
from fastfact.nn.sparsity import hard_threshold


class Trained(Protocol):
    """What the functions here ask of a `Federation`, where each of these is described."""

    method: Strategy
    infos: dict[str, TensorInfo]
    sparse: list[str]
    states: States
    exchange: Exchange
    progress: Progress
    device: torch.device
    group: Group

    @property
    def here(self) -> range: ...

    @property
    def shared(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def of_all(self, state: State) -> State: ...

    def uploads(self) -> Uploads: ...


def density(fed: Trained) -> dict[str, list[float]]:
    """See `Federation.density`."""
    here, counts = fed.here, {name: [] for name in fed.sparse}
    for begin in range(here.start, here.stop, 64):
        state = fed.states.load(range(begin, min(begin + 64, here.stop)), names=fed.sparse)
        for name, tensor in state.items():
            nonzeros = flattened(hard_threshold(tensor, fed.method.counted_from)).count_nonzero(1)
            counts[name] += (nonzeros / fed.infos[name].numel).tolist()
    parts = fed.group.each(counts)
    return {name.rpartition(".")[0]: [density for part in parts for density in part[name]] for name in fed.sparse}


def densities(
    state: State, infos: dict[str, TensorInfo], sparse: Sequence[str], least: float = 0.0
) -> list[float | None]:
    """The fraction of nonzeros of μ over all layers, for each row of `state`; None for a model without μ. What is
    smaller than `least` is zero."""
    if not sparse:
        return [None] * len(next(iter(state.values())))
    nonzeros = sum(flattened(hard_threshold(state[name], least)).count_nonzero(1) for name in sparse)
    return (nonzeros / sum(infos[name].numel for name in sparse)).tolist()


def similarity(fed: Trained, name: str | None = None, layer: int | None = None) -> Tensor:
    """See `Federation.similarity`."""
    layers = max(info.layers for info in fed.infos.values())
    if layer is None:
        own = {info.layer for info in fed.infos.values() if not info.norm}
        layer = max(own & set(range(1, layers)), default=max(1, layers))
    roles = {info.role: info.name for info in fed.infos.values() if info.layer == layer and not info.norm}
    name = name or next((role for role in ("v", "weight", *roles) if role in roles), "weight")
    if name not in roles:
        raise ValueError(
            f"similarity(name={name!r}, layer={layer}): must be one of {', '.join(roles) or 'none'} in that layer"
            f" (layers 1 … {layers})"
        )
    return mixing.cosine(fed.of_all(fed.states.load(fed.here, names=[roles[name]]))[roles[name]])


def separation(similarity: Tensor, groups: Sequence[int]) -> dict[str, float]:
    """How well a similarity [K, K] tells the clients of one group from the others; groups: which each is in.

    "auc": the probability that two of one group are more similar than two of different groups, ties half (.5 says
    nothing, 1 tells them apart by a threshold). "nearest": the share of clients whose most similar other one is of
    their group, among those who have another in it; by chance about (size − 1) / (K − 1). NaN where no pair, or no
    client, is to be judged.
    """
    at = torch.as_tensor(list(groups), device=similarity.device)
    others = ~torch.eye(len(at), dtype=torch.bool, device=at.device)
    same = (at[:, None] == at) & others
    within, between = (similarity[pairs].double() for pairs in (same, others & ~same))
    ordered = between.sort().values
    below = torch.searchsorted(ordered, within) + torch.searchsorted(ordered, within, right=True)
    auc = float(below.double().mean() / 2 / len(between)) if len(within) and len(between) else math.nan
    nearest = similarity.masked_fill(~others, -torch.inf).argmax(1)
    judged = same.any(1)
    return {"auc": auc, "nearest": float((at[nearest] == at)[judged].double().mean()) if judged.any() else math.nan}


def key_vectors(fed: Trained) -> Tensor:
    """See `Federation.key_vectors`."""
    exchange = fed.exchange
    held = exchange.keyed(fed.states.load(fed.here, names=None if exchange.measured else exchange.keys))
    state = fed.of_all({name: held[name] for name in exchange.keys})
    return torch.cat([torch.empty(len(fed), 0), *(flattened(state[name]).cpu() for name in exchange.keys)], dim=1)


def mixing_matrix(fed: Trained) -> Tensor:
    """See `Federation.mixing_matrix`."""
    matrix = torch.zeros(len(fed), len(fed), dtype=torch.float64)
    if fed.shared and fed.progress.reported is not None:
        at = torch.tensor(fed.progress.reported.clients)
        matrix[at[:, None], at] = fed.method.weights(fed.uploads()).double().cpu()
    return matrix


def encode(fed: Trained, x: Tensor | Mapping[str, Tensor], client: int | None = None) -> Tensor:
    """See `Federation.encode`."""
    rows = range(len(fed)) if client is None else [client]
    return fed.exchange.encoder(fed.states.load(rows), x.to(fed.device) if isinstance(x, Tensor) else x)
