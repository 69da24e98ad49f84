"""Clients that join after training: what they get, what they learn, how well it serves them (FedFac, §3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastfact.base.kinds import type_error
from fastfact.data.client import Client
from fastfact.federation import analysis, setup
from fastfact.federation.client.phase import EVALUATION_BATCH, Net, Phase, usual
from fastfact.federation.client.placement import Placement
from fastfact.federation.client.train import Trainer
from fastfact.federation.server.exchange import server_round
from fastfact.federation.state import State, take
from fastfact.federation.storage.states import Models, Stacked
from fastfact.federation.tensors import first_number
from fastfact.federation.wire.ledger import Ledger

HOW = ("local-train", "fine-tune", "download", "ensemble")


class NothingPersonal(ValueError):
    """Newcomers were to train what is personal, with a method that shares all that trains."""


class Trained(analysis.Trained, Protocol):
    """What `join` asks of a `Federation`, where each of these is described."""

    template: nn.Module
    initial: State
    settings: dict[str, Any]
    identity: dict[str, Any]

    @property
    def trainer(self) -> Trainer: ...

    def check_augment(self, what: str) -> None: ...


@dataclass(frozen=True)
class Newcomers:
    """What `Federation.join` found, in the order of its clients. models: None for an ensemble, which has none."""

    how: str
    accuracy: list[float | None]
    bytes_up: list[int]
    bytes_down: list[int]
    models: Models | None = None


def join(fed: Trained, clients: Sequence[Client], how: str, epochs: int | None) -> Newcomers:
    """See `Federation.join`."""
    if how not in HOW:
        raise ValueError(f"join(how={how!r}): must be one of {', '.join(HOW)}")
    if type_error(epochs, int | None) or (epochs is not None and epochs < 1):
        raise ValueError(f"join(epochs={epochs!r}): must be an integer of at least 1, or None")
    if how == "ensemble" and fed.group.size > 1:
        raise ValueError(f"join(how='ensemble'): needs all clients' models in one process; here are {fed.group.size}")
    if fed.progress.reported is None:
        raise ValueError("join: the federation has not run a round yet, there is nothing to get from it")
    clients = list(clients)
    data = Placement(clients, first_number(fed.template), fed.method.validation, fed.settings["seed"])
    if list(data.sample().shape) != fed.identity["sample"][0]:
        raise ValueError(
            f"join(clients=): samples of shape {list(data.sample().shape)}, those of the federation have"
            f" {fed.identity['sample'][0]}"
        )
    task, classes = setup.task_for(fed.template, data, fed.settings)
    if classes is not None:
        data.set_classes(classes, task.labels)
    # A federation that was loaded without clients does not know these, and the rounds of a schedule are over.
    draws, task = setup.tried(fed.template, data, task)
    trainer = Trainer(fed.template, fed.infos, replace(fed.trainer.settings.adapting, task=task, draws=draws))
    if how == "ensemble":
        if not task.plain:
            raise ValueError("join(how='ensemble'): averages probabilities of classes, the loss must be cross_entropy")
        return _ensemble(fed, data, trainer)
    ledger, first, round = Ledger(), len(fed), fed.progress.round + 1
    places = range(first, first + len(clients))
    work = take(fed.initial, [0] * len(clients))
    epochs = epochs or fed.settings["epochs"]
    phases, adapting = (fed.method.active_phases(epochs, adapts) for adapts in (False, True))
    if how != "download" or adapting:
        fed.check_augment(f"join(how={how!r})")
    server_state = _download(fed, trainer, round, list(places), work, ledger, data)
    got = take(work, range(len(clients)))
    if how == "local-train":
        masks = fed.method.channel_masks("down", server_state)
        _train(trainer, work, data, round, places, _personal(fed, trainer, phases, masks))
        for name in fed.shared:
            stays = masks[name].view(-1, *[1] * (work[name].dim() - 2)) if name in masks else torch.tensor(True)
            work[name] = torch.where(stays.to(fed.device), got[name], work[name])
    elif how == "fine-tune":
        _train(trainer, work, data, round, places, _everything(trainer, phases))
    evaluated = take(work, range(len(clients)))
    if adapting:
        _train(trainer, evaluated, data, round, places, adapting, "adapt")
    up, down = ledger.by_client("up"), ledger.by_client("down")
    return Newcomers(
        how,
        trainer.evaluate(evaluated, [client.test for client in data]),
        [up.get(k, 0) for k in places],
        [down.get(k, 0) for k in places],
        Models(fed.template, Stacked.of(work)),
    )


def _download(
    fed: Trained, trainer: Trainer, round: int, places: list[int], work: State, ledger: Ledger, data: Placement
) -> State:
    """Give the newcomers what `Strategy.mix` says. Returns the state of the server after it, which is thrown away."""
    if not fed.shared:
        return dict(fed.progress.server_state)
    fed.exchange.measure(round, places, work, ledger, lambda k: data[k - places[0]].train[0])
    uploads = fed.uploads()
    samples = [len(client.train[1]) for client in data]
    downloads = server_round(fed.exchange, uploads, round, ledger, lambda k: samples[k - places[0]])
    downloads.deliver(places, work, lambda row, models: trainer.loss(models, data[row].held_out))
    return uploads.server_state


def _train(
    trainer: Trainer,
    work: State,
    data: Placement,
    round: int,
    places: Sequence[int],
    phases: list[Phase],
    purpose: str = "order",
) -> None:
    for row, k in enumerate(places):
        one = {name: tensor[row : row + 1] for name, tensor in work.items()}
        trainer.train(one, [data[row].train], round, [k], phases, purpose)


def _everything(trainer: Trainer, phases: Sequence[Phase]) -> list[Phase]:
    """The phases, in which the layers of which nothing trains in any of them train too."""
    trained = {trainer.infos[name].layer for phase in phases for name in trainer.trained(phase)}

    def with_the_rest(phase: Phase) -> Phase:
        return replace(phase, trains=lambda info: phase.trains(info) or info.layer not in trained)

    return [with_the_rest(phase) for phase in phases]


def _personal(fed: Trained, trainer: Trainer, phases: Sequence[Phase], masks: Mapping[str, Tensor]) -> list[Phase]:
    """The phases with what is shared held fixed: whole tensors, or the rows of `masks`."""
    shared, kept = set(fed.shared), []
    masks = {name: mask.to(fed.device) for name, mask in masks.items()}
    for phase in phases:

        def trains(info, phase=phase):
            return phase.trains(info) and (info.name not in shared or info.name in masks)

        def loss(net, x, y, objective=phase.loss or usual):
            fixed = {
                name: torch.where(mask.view(-1, *[1] * (net.params[name].dim() - 1)), net.start[name], net.params[name])
                for name, mask in masks.items()
                if name in net.params
            }
            return objective(Net(net.model, net.params | fixed, net.start, net.rest or {}, net.task), x, y)

        if any(trains(fed.infos[name]) for name in trainer.trainable):
            kept.append(replace(phase, trains=trains, loss=loss if masks else phase.loss))
        elif phase.update is not None:
            kept.append(replace(phase, epochs=0))
    if not kept:
        raise NothingPersonal(
            f"join(how='local-train'): {fed.method.name} shares everything that trains, a newcomer has nothing to learn"
            " of its own; must be download or fine-tune"
        )
    return kept


@torch.no_grad()
def _ensemble(fed: Trained, data: Placement, trainer: Trainer) -> Newcomers:
    """The mean of the probabilities that all clients' models give."""
    tests = [client.test for client in data]
    sums: list = [0.0] * len(tests)
    size, task, model = 0, trainer.settings.task, trainer.model.eval()
    for k in range(len(fed)):
        state = fed.states.load([k], names=list(fed.infos))
        size += sum(one[0] for one in fed.exchange.wire.roundtrip(state, list(fed.infos))[1].bytes.values())
        trainer.bind(state, 0)
        for row, (x, _) in enumerate(tests):
            sums[row] += torch.cat([task.output(model, some).softmax(1) for some in x.split(EVALUATION_BATCH)])
    accuracy = [(p.argmax(1) == y).double().mean().item() for p, (_, y) in zip(sums, tests, strict=True)]
    return Newcomers("ensemble", accuracy, [0] * len(sums), [size] * len(sums))
