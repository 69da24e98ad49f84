"""One machine's part of a federation: the model as the method wants it, its clients' samples, and how they train."""

import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastfact.base.settings import DEFAULTS, LATER
from fastfact.data.client import Client
from fastfact.federation import analysis, setup
from fastfact.federation.client import compact as sparse
from fastfact.federation.client import train
from fastfact.federation.client.executor import BATCHED, ONE, THREADS, ExecutionPlan, Executor, check_together, choose
from fastfact.federation.client.optimizer import KEPT
from fastfact.federation.client.placement import Placement, formatted
from fastfact.federation.client.step import Settings
from fastfact.federation.client.task import CLASSES
from fastfact.federation.config import BEFORE, check_settings, taking_part
from fastfact.federation.history import History
from fastfact.federation.progress import Progress
from fastfact.federation.server import strategy
from fastfact.federation.server.exchange import (
    START,
    ClientRound,
    Download,
    Exchange,
    bounded,
    client_round,
    diverged,
    gives_start,
)
from fastfact.federation.server.processes import Group
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, generator_for, stack, take
from fastfact.federation.tensors import classifier_of, describe, first_number, frozen_digest, tensors_of
from fastfact.federation.wire.format import Wire
from fastfact.federation.wire.ledger import Ledger
from fastfact.nn.schedule import Schedule
from fastfact.nn.sparsity import penalized

log = logging.getLogger("fastfact")

MIXED = ("rule", "hostile", "clip", "max_norm", "noise", "buffer")
"""The settings that say how the server mixes."""
TRAINING = {item.name for item in dataclasses.fields(Settings)} & set(DEFAULTS)
"""Those that say how clients train."""


class Local:
    """What `Federation` is of on one machine, and what each machine has of a federation over several: made from the
    same model, method and settings it is the same everywhere. The arguments are those of `Federation`.

    settings: of the federation, by name; those of `LATER` may be missing.
    """

    def __init__(
        self,
        method: str | Strategy,
        method_settings: Mapping[str, Any] | None,
        settings: dict[str, Any],
        *,
        l1: float | None = None,
        augment: Callable[[Tensor, torch.Generator], Tensor] | str | None = None,
        graphs: bool = True,
        group: Group | None = None,
    ):
        if isinstance(method, str):
            method = strategy.make(method, **(method_settings or {}))
        elif not isinstance(method, Strategy):
            raise ValueError(f"Federation(method={method!r}): must be a name or a Strategy object")
        elif method_settings:
            raise ValueError(
                f"Federation(settings={method_settings!r}): {method.name} is an object and has its settings"
            )
        settings = {"sparsity": None} | LATER | settings
        check_settings(settings)
        if augment is not None and not callable(augment):
            raise ValueError(f"Federation(augment={augment!r}): must be a function (x, generator) → x, or None")
        # Its own copy: a method may keep what `bind` told it about the model.
        self.method = copy.copy(method) if l1 is None else dataclasses.replace(method, l1=l1)
        self.settings, self.augment = settings, augment
        self.graphs, self.group = graphs, group or Group()
        self.plan: ExecutionPlan | None = None
        self.progress = Progress()

    @property
    def round(self) -> int:
        """The last round that has ended."""
        return self.progress.round

    @property
    def history(self) -> History:
        """A row for each round and client."""
        return self.progress.history

    @property
    def ledger(self) -> Ledger:
        """The bytes of every tensor that crossed the wire."""
        return self.progress.ledger

    @property
    def server_state(self) -> State:
        """The method's own tensors, see `Uploads.server_state`."""
        return self.progress.server_state

    @property
    def reported(self) -> Uploads | None:
        """Who reported last; what they uploaded is what they hold."""
        return self.progress.reported

    def _setup_model(self, factory, device) -> None:
        device = self.group.device if device is None else device
        self.template = setup.template_of(factory, self.method, self.settings["seed"], device)
        self.infos = describe(self.template, self.method.classifier)
        self.frozen = frozen_digest(self.template)
        """A digest of what all clients share and nobody trains, None if there is none of it."""
        self.method.bind(self.infos)
        setup.check_phases(self.method, self.infos, self.settings["epochs"])
        # A frozen μ is in no state.
        params = self.template.named_parameters()
        self.sparse = [name for name, param in params if name in self.infos and penalized(param)]
        self.device = next(self.template.parameters()).device
        self.clients: Sequence[Client] | None = None
        self._draws = "globally"
        self.task = CLASSES

    def _setup_clients(self, clients, first: int = 0, together: int | None = None) -> None:
        """together: how many train here in a round, if not what `participation` gives."""
        self.clients = list(clients) if isinstance(clients, list | tuple) else clients
        like = first_number(self.template)
        self._data = Placement(self.clients, like, self.method.validation, self.settings["seed"], first)
        if self.augment is not None and self._data.entries is not None:
            raise ValueError(f"Federation(augment=): takes an x, the samples are of {self._data.entries}")
        self.task, self.classes = setup.task_for(self.template, self._data, self.settings)
        setup.check_task(self.task, self.method)
        if self.classes is not None:
            self._data.set_classes(self.classes, self.task.labels)
        self._draws, self.task = setup.tried(self.template, self._data, self.task)
        self._setup_plan(together or self._taking_part(len(self.clients)))

    def _setup_plan(self, together: int) -> None:
        """How clients are put on the machine, and the memory format that goes with it."""
        cohort, last = self.settings["cohort"], setup.channels_last_of(self.template, self._data)
        if isinstance(cohort, int):
            self.plan = ExecutionPlan(ONE) if cohort == 1 else ExecutionPlan(BATCHED, cohort)
            if cohort > 1:
                check_together(self._make_trainer(self.template), self._data[self._data.first].train, cohort)
        elif cohort == THREADS:
            if self._draws == "globally" or self.device.type != "cpu":
                raise ValueError(
                    'Federation(cohort="threads"): the model must run on the CPU, and draw from no generator of PyTorch'
                    " but in nn.Dropout or F.dropout (nn.MultiheadAttention draws its dropout itself)"
                )
            self.plan = ExecutionPlan(THREADS)
        elif self.plan is None:
            sample = self._data[self._data.first].train
            sides = {
                ONE: (self._make_trainer(last or self.template), formatted(sample, last is not None)),
                BATCHED: (self._make_trainer(self.template), sample),
            }
            trainers, data = ({how: side[n] for how, side in sides.items()} for n in range(2))
            self.plan = self.group.root(lambda: choose(trainers, data, together))
        if self.plan.how != BATCHED and last is not None:
            self.template = last
            self._data.to_channels_last()

    def _setup_exchange(self, sample: Sequence) -> None:
        """What is sent, and the state of a client before its first round. sample: shape and dtype of x."""
        shape, dtype = sample
        self.initial = self._initial()
        """The state [1, …] every client starts from."""
        path = classifier_of(self.template, self.method.classifier)
        encoder = train.Encoder(self.trainer, path, shape, getattr(torch, dtype))
        once: State = {}
        if type(self.method).measure is not Strategy.measure:
            zeros = torch.zeros(2, *shape, dtype=encoder.dtype, device=self.device)
            once = self.trainer.found(self.initial, zeros, self.method.measure)
        if clash := sorted(set(once) & set(self.initial)):
            raise ValueError(f"{self.method.name}: key {clash[0]} has the name of a tensor of the client's state")
        self.initial |= {name: torch.full_like(tensor, math.nan)[None] for name, tensor in once.items()}
        if self.schedule is not None:
            setup.check_sparsity(self.schedule, self.method, self.template, self.initial)
        self.exchange = Exchange(
            self.method,
            self.infos,
            self.sparse,
            self.initial,
            encoder,
            self.settings["wire"],
            self.settings["seed"],
            **{name: self.settings[name] for name in MIXED},
            once=list(once),
        )

    def _initial(self) -> State:
        """The state of one client before its first round, [1, …]."""
        state = stack(tensors_of(self.template), 1)
        extra = self.method.extra(state)
        if clash := sorted(set(extra) & set(self.infos)):
            raise ValueError(f"{self.method.name}: extra tensor {clash[0]} has the name of a tensor of the model")
        given = gives_start(self.method, self.settings["wire"], self.settings["buffer"])
        if self.settings["clip"] is not None or given:
            extra |= {START + name: state[name].clone() for name in bounded(self.method, self.infos)}
        if self.settings["optimizer_states"] == "kept":
            params = {name: state[name] for name, info in self.infos.items() if not info.buffer}
            kept = self.trainer.settings.update.start(params)
            extra |= {KEPT + name: tensor for name, tensor in kept.items()}
        return state | extra

    @property
    def shared(self) -> list[str]:
        """The names of the tensors that are uploaded, mixed and downloaded."""
        return self.exchange.shared

    @property
    def uploaded(self) -> list[str]:
        """The names of the tensors that go up, keys included."""
        return self.exchange.uploaded

    @property
    def key_names(self) -> list[str]:
        """The names of what similarity is measured on."""
        return self.exchange.keys

    @property
    def wire(self) -> Wire:
        """How tensors are encoded between clients and server."""
        return self.exchange.wire

    @functools.cached_property
    def trainer(self) -> train.Trainer:
        return self._make_trainer(self.template)

    def _make_trainer(self, template: nn.Module) -> train.Trainer:
        l1 = 0.0 if self.method.l1_method == "evaluation" else self.method.l1
        return train.Trainer(
            template,
            self.infos,
            Settings(
                l1=l1 if self.schedule is None else self.schedule.penalty(1, l1),
                proximal=self.method.l1_method == "proximal",
                penalized=frozenset(self.sparse),
                augment=self.augment,
                draws=self._draws,
                graphs=self.graphs,
                task=self.task,
                **{name: self.settings[name] for name in TRAINING},
            ),
        )

    @functools.cached_property
    def schedule(self) -> Schedule | None:
        """When μ becomes sparse, see `sparsity`."""
        recorded = self.settings["sparsity"]
        return None if recorded is None else Schedule(**recorded)

    def _executor_of(self, round: int) -> Executor:
        """What trains in a round."""
        return self._compact_executor if self.schedule and self.schedule.is_sparse(round) else self._executor

    @functools.cached_property
    def _executor(self) -> Executor:
        return Executor(self.trainer, self.plan)

    @functools.cached_property
    def _compact_executor(self) -> Executor:
        settings = self.trainer.settings
        return Executor(
            sparse.CompactTrainer(self.template, self.method.classifier, settings, self.schedule), self.plan
        )

    @property
    def cohort(self) -> int:
        """How many clients train together over the client axis; 1 is one after another, or one on each core."""
        return self.plan.cohort

    def _loss_of(self, client: int, state: State) -> Tensor:
        """The mean loss of the models `state` [n, …] on what is held out of a client's samples, float64 [n]."""
        if self.clients is None:
            raise ValueError(f"{self.method.name} mixes by samples, pass Federation.load(DIR, clients=)")
        return self.trainer.loss(state, self._data[client].held_out)

    def _x_of(self, client: int) -> Tensor:
        """The samples x [n, …] that a client trains on."""
        return self._data[client].train[0]

    def _evaluate(self, round: int, clients: list[int], work: State) -> list[dict[str, float | None]]:
        """The accuracy and metrics of each client on its own test set, after the adaptation the strategy asks for (on a
        copy)."""
        if self.method.active_phases(self.settings["epochs"], adapts=True):
            work = take(work, range(len(clients)))
            self._train(round, clients, work, None, adapts=True)
        return self._executor_of(round).measure(work, [self._data[k].test for k in clients])

    def _train(
        self, round: int, clients: list[int], work: State, on_client, adapts: bool = False
    ) -> tuple[list[float], list[float]]:
        self.check_augment("adapting" if adapts else "training")
        phases = self.method.active_phases(self.settings["epochs"], adapts)
        data, purpose = [self._data[k].train for k in clients], "adapt" if adapts else "order"
        return self._executor_of(round).train(work, data, round, clients, phases, purpose, on_client)

    def check_augment(self, what: str) -> None:
        """Raise ValueError where all that is known of the augmentation is its name. what: trains by it."""
        if isinstance(self.augment, str):
            raise ValueError(f"{what}: the run used augment={self.augment}, pass Federation.load(DIR, augment=)")

    def _taking_part(self, k: int) -> int:
        return taking_part(k, self.settings["participation"])

    def _select(self, k: int, round: int) -> list[int]:
        """Those of k clients that take part in a round, ascending."""
        count = self._taking_part(k)
        if count >= k:
            return list(range(k))
        order = torch.randperm(k, generator=generator_for(self.settings["seed"], round, -1, "select"))
        return sorted(order[:count].tolist())

    def _sample(self) -> list:
        """Shape and dtype of one sample as the model takes it, as JSON can hold them."""
        x = self._data.sample()
        return [list(x.shape), str(x.dtype).removeprefix("torch.")]

    def step(
        self,
        round: int,
        clients: list[int],
        work: State,
        downloads: Iterable[Download] | None,
        masks: State,
        kept: Callable[[int], State],
        on_client: Callable[[int, int, int, int], None] | None = None,
        late: Callable[[ClientRound], Mapping[int, str]] = lambda done: {},
    ) -> tuple[ClientRound, list[dict]]:
        """The clients' part of a round, in `work` [len(clients), …]: download, training, upload, evaluation.

        downloads: None where there was nothing to mix. masks: the channels that travel up. kept(client) → the state
        [1, …] it had: it keeps that if what came of the round cannot be used. late(done) → client → why, of those that
        were too slow. Returns what they upload, and rows as
        `History` has them, without the bytes.
        """

        def train(state: State) -> tuple[list[float], list[float]]:
            result = self._train(round, clients, state, on_client)
            if self.schedule and round == self.schedule.warmup:
                sparse.prune_(state, self.sparse, self.schedule)
            return result

        done = client_round(
            self.exchange,
            clients,
            work,
            downloads or (),
            masks,
            train,
            lambda row, models: self._loss_of(clients[row], models),
            None if downloads is None else functools.partial(self._evaluate, round, clients),
        )
        left_out = done.broken
        left_out |= diverged(clients, done.losses, left_out, self.task.largest_loss)
        slow = {k: why for k, why in late(done).items() if k not in left_out}
        left_out |= slow
        if self.uploaded:
            left_out |= self.exchange.unusable(clients, done.sent, done.norms, left_out)
        for row, k in enumerate(clients):
            if k in left_out:
                # A deadline is there to leave clients out.
                level = logging.INFO if k in slow else logging.WARNING
                log.log(
                    level, "round %d: client %d is left out and keeps its previous state: %s", round, k, left_out[k]
                )
                for name, tensor in kept(k).items():
                    # The server has what was uploaded once.
                    if name not in self.exchange.once:
                        work[name][row].copy_(tensor[0])
        measured = self._evaluate(round, clients, work)
        densities = analysis.densities(work, self.infos, self.sparse, self.method.counted_from)
        before = [dict.fromkeys(one) for one in measured] if done.before is None else done.before
        return done, [
            {
                "round": round,
                "client": k,
                "loss": done.losses[row] if math.isfinite(done.losses[row]) else None,
                "accuracy": measured[row]["accuracy"],
                "accuracy_before": before[row]["accuracy"],
                "density": densities[row],
                "bytes_up": 0,
                "bytes_down": 0,
                "seconds": done.seconds[row],
                "left_out": left_out.get(k),
                **measured[row],
                **{name + BEFORE: value for name, value in before[row].items()},
            }
            for row, k in enumerate(clients)
        ]
