"""What each method sends: its real strategy, wire and ledger over a few rounds in which nobody trains.

How many numbers travel depends on shapes and on the method, not on what was learned, but for the zeros of μ: μ is
filled to a given density, on the same support for all clients, and adapters of unequal ranks are filled up to theirs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fastfact import methods, models
from fastfact.experiment.build import SHARING
from fastfact.experiment.config import digits
from fastfact.federation import Client, Federation, Strategy
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.federation.state import State, generator_for

ROUNDS = 3
"""Enough to see the first download, the first mix, and what every later round repeats."""


@dataclass(frozen=True)
class Network:
    """A model of `fastfact.models` and the samples it is for."""

    model: str
    width: float
    shape: tuple[int, ...]
    classes: int

    @property
    def vocabulary(self) -> int | None:
        """80 characters or 30,002 words for models of tokens."""
        if models.MODELS[self.model].input != "tokens":
            return None
        return 80 if self.model == "lstm" else 30_002

    def builder(self) -> Callable[[], nn.Module]:
        """What makes it."""
        words: dict[str, Any] = {} if self.vocabulary is None else {"vocabulary": self.vocabulary}
        return functools.partial(models.build, self.model, list(self.shape), self.classes, self.width, **words)

    def describe(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def shape_of(model: str, text: str | None) -> tuple[int, ...]:
    """The shape of a sample: "3,32,32", or what is usual for the model. Raises ValueError."""
    if model not in models.MODELS:
        raise ValueError(f"model={model!r}, must be one of {', '.join(models.MODELS)}")
    if text is None:
        return {"tokens": (80,)}.get(models.MODELS[model].input, (3, 32, 32))
    parts = text.split(",")
    if not all(digits(part.strip()) and int(part) >= 1 for part in parts):
        raise ValueError(f"shape={text!r}, must be numbers of at least 1, separated by commas")
    return tuple(int(part) for part in parts)


class _Unmeasured(Federation):
    """A federation whose rounds are run for their bytes alone: no model is evaluated."""

    def _evaluate(self, round: int, clients: list[int], work: State) -> list[dict[str, float | None]]:
        return [{"accuracy": 0.0} for _ in clients]


def _idle(method: Strategy) -> Strategy:
    """The same method with the same settings, whose clients have nothing to train."""
    kind = type(method)
    return type(kind.__name__, (kind,), {"phases": lambda self, epochs: []})(**method.settings())


def federation(network: Network, method: Strategy, clients: int, density: float, *, trains: bool = False) -> Federation:
    """A federation of the method whose clients have two random samples each and, unless `trains`, only send."""
    if not 0 <= density <= 1:
        raise ValueError(f"density={density}, must be between 0 and 1")
    for name, value in (("clients", clients), ("classes", network.classes)):
        if value < 1:
            raise ValueError(f"{name}={value}, must be at least 1")
    draw = generator_for(0, 0, -1, "traffic")
    if network.vocabulary is not None:
        x = torch.randint(0, network.vocabulary, (2, *network.shape), generator=draw)
    else:
        x = torch.randn((2, *network.shape), generator=draw)
    samples = (x, torch.arange(2) % network.classes)
    fed = (Federation if trains else _Unmeasured)(
        network.builder(),
        [Client(train=samples, test=samples) for _ in range(clients)],
        method if trains else _idle(method),
        epochs=1,
        batch_size=2,
        cohort=1,
    )
    state = fed.states.load(range(clients))
    for name in fed.sparse:
        support = torch.rand(state[name].shape[1:], generator=generator_for(0, 0, -1, name)) < density
        state[name].copy_(support.to(state[name]).expand_as(state[name]))
    padded = {name: torch.ones_like(state[name]) for name, info in fed.infos.items() if fed.method.pads(info)}
    if padded and not trains:
        state |= fed.method.first(range(clients), state | padded)
    fed.states.store(range(clients), state)
    fed.states.commit()
    return fed


def measure(network: Network, method: Strategy, clients: int, density: float = 1.0) -> dict[str, Any]:
    """What a client sends and receives in a round, mean over clients, once the method is under way.

    up, down: bytes on the wire; numbers_up, numbers_down: numbers; first_up, first_down: numbers of the first round and
    second_… of the second, all clients together, as is later_…
    """
    fed = federation(network, method, clients, density)
    fed.fit(ROUNDS)
    sizes: dict[str, Any] = {}
    for direction in ("up", "down"):
        sizes[direction] = fed.ledger.bytes(direction, ROUNDS) / clients
        sizes[f"numbers_{direction}"] = fed.ledger.numbers(direction, ROUNDS) / clients
        for number, name in enumerate(("first", "second", "later"), 1):
            sizes[f"{name}_{direction}"] = fed.ledger.numbers(direction, number)
    shared = [name for name in fed.shared if not fed.infos[name].buffer]
    sizes["share"] = sum(fed.infos[name].numel for name in shared) / sum(
        info.numel for info in fed.infos.values() if not info.buffer
    )
    sizes["shared"] = described(fed)
    return sizes


def total(measured: dict[str, Any], rounds: int) -> int:
    """The papers' cost in bytes of `rounds` rounds, all clients: four bytes for every number, both ways (C.2)."""
    parts = ["first", "second", *["later"] * max(0, rounds - 2)][:rounds]
    return 4 * sum(measured[f"{part}_up"] + measured[f"{part}_down"] for part in parts)


def described(fed: Federation) -> str:
    """What a method shares, in a few words: the roles of the tensors that are mixed, and what is compared."""
    if not fed.shared:
        return "nothing"
    weights = {i.role for i in fed.infos.values() if not i.norm and not i.buffer}
    roles = list(dict.fromkeys(fed.infos[n].role for n in fed.shared if not fed.infos[n].norm))
    layers = sorted({fed.infos[n].layer for n in fed.shared if not fed.infos[n].norm})
    last = max(info.layers for info in fed.infos.values())
    text = "all" if set(roles) >= weights else ", ".join(roles)
    if layers != list(range(1, last + 1)) and layers:
        text += f" of layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f" of layer {layers[0]}"
    norms = {i.statistic for i in fed.infos.values() if i.norm and i.name in fed.shared}
    if any(i.norm for i in fed.infos.values()):
        text += {0: "; no norm", 1: "; norm without statistics" if False in norms else "; norm statistics"}.get(
            len(norms), ""
        )
    if masks := fed.method.channel_masks("down", fed.server_state):
        text += (
            f"; {100 * sum(int(m.sum()) for m in masks.values()) // sum(map(len, masks.values()))} % of the channels"
        )
    if not fed.key_names:
        return text
    if set(fed.key_names) == set(fed.shared):
        return f"{text}; compared: the same"
    named = {
        f"{fed.infos[n].role} of layer {fed.infos[n].layer}" if n in fed.infos else n.split("/")[0]
        for n in fed.key_names
    }
    return f"{text}; compared: {', '.join(sorted(named)) if len(named) < 3 else f'{len(fed.key_names)} tensors'}"


def strategy(name: str, permuted: bool) -> Strategy:
    """A method with its defaults; permuted: classifier and normalisation are kept local."""
    settings: dict[str, Any] = dict.fromkeys(SHARING, False) if permuted else {}
    if "shared_channels" in STRATEGIES[name].__dataclass_fields__:
        settings["shared_channels"] = {}
    if "iterations" in STRATEGIES[name].__dataclass_fields__:
        settings["iterations"] = 1
    return methods.make(name, **settings)


def table(
    network: Network, clients: int, density: float, permuted: bool, rounds: Sequence[int]
) -> list[dict[str, Any]]:
    """A row for every method: paper, what is shared, bytes of a client and round, and the papers' cost of `rounds`."""
    rows: list[dict[str, Any]] = []
    for name in methods.names():
        try:
            made = measure(network, strategy(name, permuted), clients, density)
        except ValueError as error:
            if name not in str(error):
                raise
            rows.append({"method": name, "paper": STRATEGIES[name].paper, "shared": f"not for this model: {error}"})
            continue
        formula = {str(count): total(made, count) for count in rounds}
        rows.append({"method": name, "paper": STRATEGIES[name].paper, **made, "formula": formula})
    return rows
