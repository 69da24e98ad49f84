"""From a configuration to a federation: data, clients, method and model."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastfact import data, methods, models
from fastfact.base.settings import FederationSettings
from fastfact.experiment.config import AUGMENT, AUTO, NONE, SIMULATION, Config, digits
from fastfact.federation import Callback, Client, Federation, Strategy
from fastfact.federation.server.processes import Group
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.federation.storage.states import MEMORY
from fastfact.methods.fedfac import communalities, shared_mask
from fastfact.nn.schedule import Schedule
from fastfact.nn.specs import Hadamard

SHARING = ("share_classifier", "share_norm", "share_norm_statistics")
"""What methods do not share where labels are permuted."""


def permuted(config: Config) -> bool:
    """Whether a label means another class on another client. The simulation has labels of its own, in any scenario."""
    return config.dataset != SIMULATION and data.SCENARIOS[config.scenario].permuted


def strategy(config: Config) -> Strategy:
    """The method of a configuration, with its settings.

    Where labels are permuted, classifiers and batch-norm stay with the client for every method, as in the papers'
    comparison, unless the method's own settings say otherwise. FedDecomp leaves those layers of the built-in models
    whole that its paper does; with pretrained weights, u, v and μ start as these ("svd"), not at random.
    """
    own: dict[str, Any] = {} if config.l1 is None else {"l1": config.l1}
    if config.method == methods.FedDecomp.name:
        own["skip"] = models.MODELS[config.model].whole
    if config.init_from is not None and "init" in {f.name for f in fields(STRATEGIES[config.method])}:
        own["init"] = "svd"
    if config.sketch is not None and hasattr(STRATEGIES[config.method], "sketch"):
        own["sketch"] = config.sketch
    if permuted(config):
        own |= dict.fromkeys(SHARING, False)
    made = methods.make(config.method, **own | config.settings.get(config.method, {}))
    if config.init_from is not None and isinstance(made.spec(), Hadamard):
        raise ValueError(
            f"init_from={config.init_from!r}: the factors of {config.method} cannot start as given weights"
        )
    return made


def callbacks(config: Config, directory: Path) -> list[Callback]:
    """Who is told of the rounds of a run. Raises ValueError for one whose package is missing."""
    name = config.track
    if name == AUTO:
        name = "tensorboard" if importlib.util.find_spec("tensorboard") else NONE
    if name == NONE:
        return []
    try:
        return [Callback.BY_NAME[name](directory)]
    except ImportError as error:
        raise ValueError(f"track={name!r}: {error}; install it, or --track none") from error


def notes(config: Config) -> list[str]:
    """What one may not expect of a run, a line each."""
    found = [note] if (note := sharing_note(config)) else []
    if config.warmup is not None and config.warmup > config.rounds:
        found.append(f"warmup={config.warmup}: μ stays dense, as there are {config.rounds} rounds")
    return found


def sharing_note(config: Config) -> str | None:
    """What `strategy` switched off, for people."""
    if not permuted(config):
        return None
    note = "labels are permuted: classifier and batch-norm are not shared, by any method"
    asked = {f"{m}.{key}" for m, own in config.settings.items() for key in SHARING if own.get(key)}
    return f"{note}, but for {', '.join(sorted(asked))}" if asked else note


@dataclass(frozen=True)
class Parts:
    """What a federation is made of; `newcomers` are the clients that join at its end."""

    model: Callable[[], nn.Module]
    clients: list[Client]
    newcomers: list[Client]
    method: Strategy
    augment: Callable | None


def parts(config: Config) -> Parts:
    """Raises ValueError for what does not fit together."""
    method = strategy(config)
    if config.pretrain and config.noise:
        raise ValueError(f"pretrain={config.pretrain}: the model it makes of all clients' samples has no noise in it")
    if config.dataset == SIMULATION:
        clients, method = _simulated(config, method)
        augment = None
    else:
        dataset = data.load(config.dataset, config.data_dir)
        # The default may be more than a small data set has: it is then one batch.
        if config.batch_size > max(len(dataset), Config.batch_size):
            raise ValueError(
                f"batch_size={config.batch_size}, must be at most {len(dataset)}: the size of {dataset.name}"
            )
        clients = data.make_clients(
            dataset,
            config.scenario,
            config.clients,
            config.seed,
            alpha=config.alpha,
            test_fraction=config.test_fraction,
            classes_per_client=config.classes_per_client,
            samples=config.samples or None,
            test_set=config.test_set,
        )
        augment = _augment(config, dataset)
    words: dict[str, Any] = {} if clients[0].vocabulary is None else {"vocabulary": clients[0].vocabulary}
    if config.init_from is not None:
        words["weights"] = config.init_from
    shape, classes = list(clients[0].train[0].shape[1:]), clients[0].num_classes or 0
    model = functools.partial(models.build, config.model, shape, classes, config.width, **words)
    here = config.client_subset() or list(range(len(clients)))
    order = np.random.default_rng([config.seed, 3]).permutation(here)
    late = sorted(order[: round(config.newcomers * len(here))].tolist())
    trained = [clients[k] for k in here if k not in late]
    if not trained:
        raise ValueError(f"newcomers={config.newcomers}: leaves none of {len(here)} clients to train")
    if config.pretrain:
        model = functools.partial(_pretrained, model, trained, config)
    return Parts(model, trained, [clients[k] for k in late], method, augment)


def _pretrained(build: Callable[[], nn.Module], clients: Sequence[Client], config: Config) -> nn.Module:
    """The model after `config.pretrain` epochs of plain training on the training samples of all clients."""
    model = build()
    x, y = (torch.cat([client.train[part] for client in clients]) for part in (0, 1))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    draw = torch.Generator().manual_seed(config.seed)
    for _ in range(config.pretrain):
        for batch in torch.randperm(len(y), generator=draw).split(config.batch_size):
            if len(batch) > 1:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model


def _simulated(config: Config, method: Strategy) -> tuple[list[Client], Strategy]:
    """FedFac's clients, and the method: shared_channels "true" of FedSplit are those of the network that made the
    labels, "oracle" those that factor analysis finds in its weights (§4.3.1), units of the hidden layer of mlp1."""
    units = models.build("mlp1", (1,), 2, config.width).fc1.out_features
    try:
        made = data.fedfac_simulation(
            config.clients, config.seed, test_fraction=config.test_fraction, **{"hidden": units} | config.simulation
        )
    except TypeError as error:
        raise ValueError(f"simulation={config.simulation!r}: {error}") from None
    asked = getattr(method, "shared_channels", None)
    if asked in ("true", "oracle"):
        shared = made.shared
        if asked == "oracle":
            columns = made.weight.permute(0, 2, 1).flatten(0, 1)
            shared = shared_mask(communalities(columns, 0.85), 1 - float(shared.double().mean()))
        method = methods.make(
            method.name, **method.settings() | {"shared_channels": {"fc1": shared.nonzero().flatten().tolist()}}
        )
    return made.clients, method


def _augment(config: Config, dataset: data.Dataset) -> Callable | None:
    if config.augment == "none" and not config.shift:
        return None
    if dataset.vocabulary is not None:
        name = "shift" if config.shift else "augment"
        raise ValueError(f"{name}={getattr(config, name)!r}: the samples of {dataset.name} are no images")
    if config.shift >= (side := min(dataset.x.shape[2:])):
        raise ValueError(f"shift={config.shift}, must be below {side}, the smaller side of {dataset.name}'s images")
    if config.augment == "none":
        return functools.partial(data.random_shift, pixels=config.shift)
    if config.augment == "full" and dataset.scale is None:
        raise ValueError(f"augment='full': changes colours, {dataset.name} has none; there is flip, or shift")
    return data.Augment(shift=config.shift, scale=dataset.scale, **AUGMENT[config.augment])


def schedule(config: Config) -> Schedule | None:
    """When μ becomes sparse, if the configuration says so."""
    if config.warmup is None:
        return None
    l1 = config.l1 if config.target_density is None else None
    return Schedule(config.warmup, config.target_density, l1, config.regrow_every or 0)


def federation(config: Config, group: Group | None = None) -> Federation:
    """The federation of a configuration, before its first round. Raises ValueError for anything out of range."""
    return assemble(config, parts(config), group)


def check(config: Config, group: Group | None = None) -> None:
    """Raise ValueError for anything out of range; nothing is measured, and no file touched."""
    federation(replace(config, store=MEMORY, cohort="1" if config.cohort == "auto" else config.cohort), group)


def assemble(config: Config, parts: Parts, group: Group | None = None) -> Federation:
    """The federation of these parts, before its first round."""
    names = [item.name for item in fields(FederationSettings) if hasattr(config, item.name)]
    settings = {name: getattr(config, name) for name in names}
    settings["metrics"] = [name for name in config.metrics.split(",") if name]
    if config.schedule_rounds is None:
        scheduled = config.schedule != "constant" or config.lr_warmup
        settings["schedule_rounds"] = config.rounds if scheduled else 0
    if digits(config.cohort):
        settings["cohort"] = int(config.cohort)
    return Federation(
        parts.model,
        parts.clients,
        parts.method,
        **settings,
        augment=parts.augment,
        sparsity=schedule(config),
        device=config.device,
        source=config.identity(),
        group=group,
    )
