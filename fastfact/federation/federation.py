"""The federation: a round is a pipe of stages, each a function of its inputs and the seed.

select → load states → key, mix → download → train → check → upload → evaluate → record

The mix stands where Algorithms 1 and 2 of Factorized-FL have it, before local training: what a client downloads in
round r is mixed from the uploads of round r − 1, so the first round downloads the initial model and matches nobody, and
the models that are evaluated, and stay at the end, are the clients' own, trained after their last download. A client's
state at rest is therefore what it uploaded last: all the server must remember is who reported in the last round. What a
method has clients measure of their samples (`Strategy.measure`) they do before their first download.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastfact.base.kinds import type_error
from fastfact.base.settings import DEFAULTS, LATER
from fastfact.data.client import Client
from fastfact.federation import analysis, newcomers, setup
from fastfact.federation.callbacks import Callback
from fastfact.federation.client import memory, train
from fastfact.federation.client.executor import ExecutionPlan
from fastfact.federation.config import name_of, record, resolve
from fastfact.federation.history import History
from fastfact.federation.local import Local
from fastfact.federation.newcomers import Newcomers
from fastfact.federation.progress import Progress
from fastfact.federation.server import clock, privacy, strategy
from fastfact.federation.server.exchange import (
    START,
    ClientRound,
    Downloads,
    is_relative,
    server_round,
    too_far,
)
from fastfact.federation.server.processes import Group, Shard, Stop
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State, generator_for
from fastfact.federation.storage import checkpoint
from fastfact.federation.storage.checkpoint import Recorded, RunDirectory
from fastfact.federation.storage.run_directory import RunDirectoryError
from fastfact.federation.storage.states import MEMORY, Codec, Database, Models, PackedStates, Stacked, States
from fastfact.federation.wire.format import reply
from fastfact.federation.wire.ledger import Ledger
from fastfact.nn.choice import choices, set_choices
from fastfact.nn.schedule import Schedule

log = logging.getLogger("fastfact")

MAX_NORM = DEFAULTS["max_norm"]
BLOCK_BYTES = 1 << 28
"""At most about so many bytes of a round's clients' states are in memory at once (the uploads come on top)."""


class Federation(Local):
    """Personalized federated learning of one model on many clients, simulated on this machine.

    model: () → nn.Module, called once, with PyTorch's generator seeded; every client starts from it. The method
        factorizes it if it needs to. The model maps x [n, …] to outputs [n, …], for class labels logits [n, classes];
        of outputs that have `logits`, as those of transformers, these are taken.
    clients: `Client` objects. Samples have one shape; sizes and label sets may differ. A list or tuple is checked and
        put in place at once, any other sequence (see `LazyClients`) as rounds ask for its clients.
    method: a name (see `ff.methods.names()`), or a `Strategy` object. settings: of the method, where it is a name, as
        `{"prox": 0.1}`.
    epochs, batch_size, lr, momentum, weight_decay: local training in each round. A last batch of a single sample joins
        the one before it.
    optimizer: "sgd", "adam" or "adamw", as those of PyTorch with β₁ = momentum, `beta2` and `eps`; μ takes its L1
        penalty by the proximal step of each (see `ff.optim`). What it keeps starts at zero in each round, or, with
        optimizer_states="kept", is a part of the client's state, from each of its rounds to the next. Copies of models
        that adapt before they are evaluated (`Phase.adapts`) do so from zero, and by SGD where the method has a
        learning rate for it.
    schedule, schedule_rounds, lr_warmup: the learning rate is "constant", or falls to 0 in a line ("linear") or half a
        cosine ("cosine") over `schedule_rounds` rounds, 0: anew over the steps of each round; in the fraction
        `lr_warmup` of them at the start it rises. Phases with a learning rate of their own keep it.
    max_grad_norm: the gradients of each client's step are scaled down to this Euclidean norm. accumulate: so many
        batches make a step, with the mean of their gradients by their samples; the last of an epoch may be fewer.
    loss: what local training minimises, the mean over a batch: "cross_entropy" of logits [n, classes, …] and labels
        [n, …] (more axes, as of pixels or tokens, may have −100 for labels that do not count), "mse", "bce" (of logits,
        for several labels a sample), "next_token" (logits [n, t, vocabulary] and the tokens [n, t]), or a function
        (output [n, …], y [n, …]) → number. Methods whose own loss is one of class labels (`Strategy.classifies`) take
        the first only, of one label a sample.
    metrics: what `History` has of each client's test samples besides the accuracy (None where y are no classes): names,
        "test_loss" (of `loss`), "mse", "mae", "top5", or functions as for `loss` by names of their own; of more than
        1,024 samples the mean over batches of as many.
    precision: "bfloat16" trains (and does not evaluate) under autocast; parameters and the loss stay as they are.
    participation: the fraction of the clients that takes part in a round, drawn anew each round, at least one.
    augment: (x, generator) → x on each training batch; draw from the generator alone.
    seed: every random draw derives from it, the round and the client: a run repeats bit for bit on one machine.
    cohort: how many clients train together over the client axis; 1 is one after another, each on all cores; "threads"
        one on each core; "auto" what is fastest for the model, measured before the first round. Results agree up to
        rounding, `F.dropout` and its modules included, for models that draw random numbers nowhere else (the dropout of
        `nn.MultiheadAttention` is its own). A run goes on as it began: the choice is in config.json; two runs made with
        "auto" may choose differently where it makes little difference.
    memory_limit: GiB of memory this process may take, by estimate; fewer clients are then loaded at once.
    store: where the clients' states are between rounds: "memory", or a directory for them. There each round is saved
        when it ends, whole or not at all, and memory holds only clients at work.
    store_values: the numbers of a state between rounds: "exact", or "bfloat16" for those that train. μ is stored as a
        bitmap and its nonzeros where the store is a directory, where the model is float32, and with "bfloat16".
    l1: λ, in place of the method's own.
    wire: the numbers on the wire: "exact", "bfloat16" or "int8"; the server computes with what arrives.
    sparsity: periods are rounds. After those of the warm-up, μ of every layer is pruned to the target density and
        trains on its support, without L1 penalty, by the sparse kernels. Each client has a support of its own, the
        largest magnitudes it has (or gets: a mixed μ is cut down again), which changes before the rounds that follow a
        change of the schedule; a client that is absent is pruned when it takes part next. A schedule with a λ has it
        in all rounds, in place of `l1`: then the support are the nonzeros, and clients train one after another.
    rule, hostile: how the server applies a mixing matrix: "mean", or so that some hostile clients do not decide,
        "median", "trimmed-mean", "multi-krum", the last two for that fraction of the clients; see `server.robust`.
    clip: the server scales what a round changed in a client's upload down to this Euclidean norm: a number, or "2x",
        twice the median of the round's norms. None for no limit.
    max_norm: clients whose upload a round changed by more are left out of it, a bound as `clip`. One that is relative
        is known at the end of the round: what is left out then stays with the client, but is not mixed.
    noise, delta: differential privacy of what is downloaded, for the clients: the mean of the updates, clipped to the
        number `clip` and counted alike, gets Gaussian noise, on their sum of standard deviation noise · clip. The rows
        have ε at δ (by default 1 / K^1.1), see `server.privacy`. Only for methods whose download is one such mean
        (`Strategy.constant_mixing`). The noise repeats with the seed: who knows it can take it off.
    device: where the model, the data and the states at work are, as "cpu" or "cuda"; by default where `model` puts
        itself.
    graphs: record the step of clients that train together and replay it, on a GPU as a CUDA graph, on the CPU as a list
        of operations; False runs it as it is, for a model whose forward depends on more than tensors.
    speed, bandwidth: a simulated clock: samples a second that a client trains on, bytes a second that its link takes,
        a list of one for each client, or the median of log-normal draws with `speed_spread` and `bandwidth_spread`, see
        `server.clock`. What is None takes no time; with either, rows have `time` and `duration`.
    deadline: the round ends after so many seconds. Who would take longer is left out: it gives up, keeps its previous
        state, and its upload is not counted.
    buffer: rounds are asynchronous (FedBuff): `participation` is how many clients work at a time, each begins with what
        the server has when another has ended, and a round ends when so many uploads have arrived. Rows are of the
        clients that begin in a round; who works on meanwhile reports in a later one. Method "fedbuff" weighs them by
        their staleness, those with an optimizer at the server take what each client changed, others mix them as they
        are.
    source: anything JSON can hold that says where the clients came from; kept in config.json as it is.
    group: the processes that share the clients, see `Group`. Each makes the federation with the same
        arguments and calls the same methods in the same order. `states`, `models`, `mixed` and `encode` know only the
        training of its own clients (`here`), all else is everybody's.

    A client whose new state has NaN or inf, whose training diverged or whose upload is too large, is left out of the
    round: it keeps its previous state, its row says why (`left_out`), the log warns.

    Raises ValueError, before any work, for settings out of range, clients that do not fit together or the model.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        clients: Sequence[Client],
        method: str | Strategy = "fedavg",
        *,
        settings: Mapping[str, Any] | None = None,
        epochs: int = 5,
        batch_size: int = 50,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        optimizer: str = "sgd",
        beta2: float = 0.999,
        eps: float = 1e-8,
        optimizer_states: str = "dropped",
        schedule: str = "constant",
        schedule_rounds: int = 0,
        lr_warmup: float = 0.0,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        precision: str = "full",
        loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy",
        metrics: Sequence[str] | Mapping[str, Callable[[Tensor, Tensor], Tensor]] = (),
        participation: float = 1.0,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        seed: int = 0,
        cohort: int | str = "auto",
        memory_limit: float | None = None,
        store: str | Path = MEMORY,
        store_values: str = "exact",
        l1: float | None = None,
        wire: str = "exact",
        rule: str = "mean",
        hostile: float = 0.2,
        clip: float | str | None = None,
        max_norm: float | str | None = MAX_NORM,
        noise: float = 0.0,
        delta: float | None = None,
        speed: float | Sequence[float] | None = None,
        speed_spread: float = 0.0,
        bandwidth: float | Sequence[float] | None = None,
        bandwidth_spread: float = 0.0,
        deadline: float | None = None,
        buffer: int = 0,
        sparsity: Schedule | None = None,
        device: str | torch.device | None = None,
        graphs: bool = True,
        source: Mapping[str, Any] | None = None,
        group: Group | None = None,
        _recorded: Recorded | None = None,
    ):
        if noise and max_norm == MAX_NORM:
            # A multiple of the median depends on everybody's data, and `clip` bounds what one client can do.
            max_norm = None
        given = locals()
        made = {name: given[name] for name in DEFAULTS} | {
            "metrics": tuple(metrics) if isinstance(metrics, list) else metrics,
            "store": str(store) if isinstance(store, Path) else store,
            "speed": list(speed) if isinstance(speed, tuple) else speed,
            "bandwidth": list(bandwidth) if isinstance(bandwidth, tuple) else bandwidth,
            "sparsity": dataclasses.asdict(sparsity) if isinstance(sparsity, Schedule) else sparsity,
        }
        super().__init__(method, settings, made, l1=l1, augment=augment, graphs=graphs, group=group)
        self.source = dict(source or {})
        if _recorded is not None:
            self._restore(_recorded, model, clients, device)
            return
        self.id = self.group.root(lambda: secrets.token_hex(16))
        """Tells this run from all others, in every file of it."""
        self._check_group()
        self._setup_model(model, device)
        self._setup_clients(clients)
        self.identity: dict[str, Any] = {
            "model": record(model),
            "augment": name_of(augment),
            "samples": self._samples(),
        }
        self.identity["sample"] = self._sample()
        self._setup_states(len(self.clients))
        if isinstance(self.states, Database) and self.states.value("server") is not None:
            self.states.close()
            raise RunDirectoryError(f"{store}: holds the clients of a run; go on with Federation.load")

    def _restore(self, recorded: Recorded, model, clients, device) -> None:
        """Make this the federation of a run directory, as its newest checkpoint has it."""
        config = recorded.config
        self.id = recorded.id or self.group.root(lambda: secrets.token_hex(16))
        self.identity = {name: config[name] for name in ("model", "augment", "samples", "sample")}
        try:
            self.plan = ExecutionPlan(**config["executor"])
        except TypeError as error:
            raise RunDirectoryError(f"{recorded.directory}: executor={config['executor']!r}: {error}") from error
        self._check_group()
        self._setup_model(model, device)
        if config.get("frozen", self.frozen) != self.frozen:
            raise RunDirectoryError(
                f"{recorded.directory}: the frozen parameters of the model are not those that the run's clients have"
                " adapters of, must be the same"
            )
        if clients is not None:
            self._setup_clients(clients)
            if len(clients) != config["clients"] or self._samples() != config["samples"]:
                raise ValueError(
                    f"{recorded.directory}: clients= are {len(self.clients)} clients with other numbers of samples than"
                    f" the run ({config['clients']} clients), must be the same clients in the same order"
                )
        self._setup_states(config["clients"])
        there = self.progress = recorded.restore(self.states, self.here)
        try:
            there.reported = None if there.reported is None else Uploads(**there.reported)
        except TypeError as error:
            raise RunDirectoryError(f"{recorded.directory}: who reported last: {error}") from error
        try:
            set_choices(there.choices)
        except ValueError as error:
            raise RunDirectoryError(f"{recorded.directory}: {error}") from error
        there.server_state = {name: tensor.to(self.device) for name, tensor in there.server_state.items()}
        # Nobody writes into the directory before all have read it.
        self.group.each(None)

    def _check_group(self) -> None:
        n = self.group.size
        if n > 1 and self.method.clients_mix:
            raise ValueError(
                f"Federation(method={self.method.name!r}): its clients try each other's models, which must all be in"
                f" one process; here are {n}"
            )
        if n > 1 and self.settings["store"] != MEMORY:
            raise ValueError(f"Federation(store={self.settings['store']!r}): must be memory in {n} processes")

    def _setup_states(self, k: int) -> None:
        """The state of everything before the first round of k clients."""
        self._setup_exchange(self.identity["sample"])
        self.exchange.expected = self._taking_part(k)
        setup.check_rule(self.exchange, self._taking_part(k))
        if self.clock:
            self.clock.check(k)
        setup.check_buffer(self.exchange, self.settings, k, self._taking_part(k))
        if self.exchange.noise:
            setup.check_noise(self.exchange, self.settings)
        self.states, self._shard = self._make_states(k), Shard(self.group, k)
        everybody = {name: tensor.expand(k, *tensor.shape[1:]) for name, tensor in self.initial.items()}
        self.progress = Progress(server_state=self.method.server_state(everybody))
        self.server_seconds = 0.0
        """What the server took to make the last round's downloads: mixing, and what the method finds out for it."""

    def _make_states(self, k: int) -> States:
        place, values, initial = self.settings["store"], self.settings["store_values"], self.initial
        codec = Codec(initial, self.infos, self.sparse, values)
        if place != MEMORY:
            return Database(initial, k, codec, Path(place))
        return PackedStates(initial, k, codec) if codec.packs() else Stacked(initial, k)

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.states)

    @property
    def here(self) -> range:
        """The clients of this process."""
        return self._shard.block

    def fit(
        self,
        rounds: int,
        out: str | Path | None = None,
        *,
        checkpoint_every: int = 10,
        on_client: Callable[[int, int, int, int], None] | None = None,
        on_row: Callable[[dict], None] | None = None,
        on_round: Callable[[int, list[dict]], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> History:
        """Run `rounds` more rounds and return the whole history.

        out: a run directory; gets a row per client and round, and a checkpoint every `checkpoint_every` rounds, in one
        process also where the last one is minutes old, and after the last round. It must be new, or the one this
        federation was saved to or loaded from.
        An interrupt or an error leaves a checkpoint of the last round that ended; several processes stop together after
        the round in which one of them was told to.
        on_client(round, client, done, total) is called as clients finish training, on_row(row) for each finished row,
        on_round(round, rows) after each round. callbacks: objects that are told of rows, rounds and the end, see
        `Callback`; where one raises, the round that it was told of is kept.

        Raises ValueError for bad arguments, a memory limit that is too small, or where the federation was loaded
        without its clients.
        """
        if type_error(rounds, int) or rounds < 0:
            raise ValueError(f"fit(rounds={rounds!r}): must be an integer of at least 0")
        if type_error(checkpoint_every, int) or checkpoint_every < 1:
            raise ValueError(f"fit(checkpoint_every={checkpoint_every!r}): must be an integer of at least 1")
        if self.clients is None:
            raise ValueError("fit: this federation was loaded without clients, pass Federation.load(DIR, clients=)")
        self.check_augment("fit")
        if rounds and self.settings["memory_limit"] is not None:
            # Raises where not even one cohort fits, before a file is touched.
            self._block(len(self._shard.mine(self.select(self.round + 1))))
        with self._writing(out) as directory, Stop(self.group) as stop:
            saved, clock = self.round, checkpoint.Clock()
            try:
                for step in range(rounds):
                    last = (self.round + 1) % checkpoint_every == 0 or step == rounds - 1
                    last |= self.group.size == 1 and clock.due()
                    try:
                        done = self._run_round(on_client)
                        if out is not None:
                            # What can be gone on from must not know more than the rows.
                            sync = last or self.settings["store"] != MEMORY
                            self.group.root(functools.partial(_append, directory, done, sync))
                    except BaseException:
                        self.states.rollback()
                        raise
                    with checkpoint.uninterrupted():
                        self._commit(done, directory)
                    stopped = stop.asked()
                    if last or stopped:
                        with clock.saving():
                            self._save(out, directory)
                        saved = self.round
                    for row in done.history if on_row else ():
                        on_row(row)
                    if on_round:
                        on_round(self.round, done.history)
                    for told in callbacks if self.group.rank == 0 else ():
                        for row in done.history:
                            told.on_client(self, row)
                        told.on_round(self, done.history)
                    if stopped:
                        raise KeyboardInterrupt
            except BaseException:
                if self.round > saved and self.group.size == 1:
                    # What ended the run is what is to be told.
                    with contextlib.suppress(OSError, RunDirectoryError), checkpoint.uninterrupted():
                        self._save(out, directory)
                raise
            finally:
                for told in callbacks if self.group.rank == 0 else ():
                    told.on_end(self)
        return self.history

    @contextlib.contextmanager
    def _writing(self, out: str | Path | None) -> Iterator[RunDirectory | None]:
        """Hold the run directory and the store; the root gets the directory to write."""
        with contextlib.ExitStack() as held:
            path = None if out is None else Path(out)
            opened: list[RunDirectory | None] = [None]

            def enter() -> None:
                config = self.config()
                opened[0] = held.enter_context(checkpoint.writing(path, config, self._known(), self.states))

            self.group.root(enter)
            yield opened[0]

    def _known(self) -> Progress:
        self.progress.choices = choices()
        return self.progress

    def _save(self, out: str | Path | None, directory: RunDirectory | None) -> None:
        """Write a checkpoint of the round the federation is at. A store is one after every round: it is synced."""
        if isinstance(self.states, Database):
            self.states.sync()
            return
        if out is None:
            return
        tensors, metadata = checkpoint.packed(self.states)
        lengths = self.group.each({name: len(tensor) for name, tensor in tensors.items()})
        tensors = {name: self.group.to_root(tensor, [n[name] for n in lengths]) for name, tensor in tensors.items()}

        def write() -> None:
            if len(tensors.get("clients", ())) == len(self):
                del tensors["clients"]
            directory.save(self._known(), tensors, metadata)

        self.group.root(write)

    def _commit(self, done: Progress, directory: RunDirectory | None) -> None:
        """Nothing before this changed the federation: a round that is interrupted has not happened."""
        try:
            with self.progress.adding(done):
                checkpoint.commit(self.states, self._known(), directory, self.id)
        except BaseException:
            self.states.rollback()
            raise

    def select(self, round: int) -> list[int]:
        """The clients that take part in a round, ascending. Where rounds are asynchronous, those that begin in it, and
        it must not be later than the next."""
        if not self.settings["buffer"]:
            return self._select(len(self), round)
        if round > self.round + 1:
            raise ValueError(f"select(round={round}): depends on the rounds before, must be at most {self.round + 1}")
        if round <= self.round:
            return sorted(row["client"] for row in self.history.of(round))
        return sorted(self._queue(round))

    def _queue(self, round: int) -> list[int]:
        """The clients that begin in the next round, in this order, where rounds are asynchronous: those that take the
        places free at its start, and one for each upload that arrives but the last."""
        at_work = {client for client, *_ in self.reported.waiting} if self.reported else set()
        count = self._taking_part(len(self)) - len(at_work) + self.settings["buffer"] - 1
        order = torch.randperm(len(self), generator=generator_for(self.settings["seed"], round, -1, "select"))
        return [client for client in order.tolist() if client not in at_work][:count]

    @functools.cached_property
    def clock(self) -> clock.Clock | None:
        """What rounds take, if there is one."""
        return clock.Clock.of(self.settings)

    def _seconds(self, clients: list[int], done: ClientRound, ledger: Ledger) -> dict[int, float]:
        """What a round takes the clients, whose downloads are in `ledger`, by the simulated clock."""
        down, up = ledger.by_client("down"), ledger.by_client("up")
        batch, phases = self.settings["batch_size"], self.method.active_phases(self.settings["epochs"], adapts=False)
        batch *= self.settings["accumulate"]
        found = {}
        for row, k in enumerate(clients):
            n = self._samples_of(k)
            trained = sum(p.epochs * (n if p.steps is None else min(n, p.steps * batch)) for p in phases)
            sent = done.sizes.total(row) if self.uploaded else 0
            found[k] = self.clock.seconds(k, trained, down.get(k, 0), up.get(k, 0) + sent)
        return found

    def _run_round(self, on_client) -> Progress:
        done = self.progress.next()
        round, clients = done.round, self._shard.mine(self.select(done.round))
        size = self._block(len(clients))
        blocks = [clients[begin : begin + size] for begin in range(0, len(clients), size)]
        # A process without a client in this round takes part in the mix.
        began = time.perf_counter()
        downloads, report = self._downloads(done), Uploads(round, [], [], [])
        self.server_seconds = time.perf_counter() - began
        self.states.reserve(len(clients))
        for number, block in enumerate(blocks):
            work = self.states.work(block, () if downloads is None else downloads.overwritten(block))
            if number + 1 < len(blocks):
                self.states.ahead(blocks[number + 1])
            self._data.keep(block)
            begin = number * size
            progress = on_client and (lambda r, k, n, _, begin=begin: on_client(r, k, begin + n, len(clients)))
            self._run_block(block, work, downloads, done, report, progress)
        up, down = done.ledger.by_client("up"), done.ledger.by_client("down")
        for row in done.history:
            row["bytes_up"], row["bytes_down"] = up.get(row["client"], 0), down.get(row["client"], 0)
        parts = self.group.each((done.history, done.ledger.entries, report))
        done.history = History(row for rows, *_ in parts for row in rows)
        done.ledger = Ledger(entry for _, entries, _ in parts for entry in entries)
        report = Uploads.joined([part for *_, part in parts])
        limit = self.exchange.max_norm
        if report.norms and limit is not None and is_relative(limit):
            left_out = too_far(dict(zip(report.clients, report.norms, strict=True)), limit)
            report = report.without(left_out)
            for row in done.history:
                if reason := left_out.get(row["client"]):
                    log.warning("round %d: client %d is left out and not mixed: %s", round, row["client"], reason)
                    row["left_out"] = reason
        if self.clock:
            report = self._timed(round, done.history, report)
        if self.exchange.noise:
            spent = self.epsilon(round)
            for row in done.history:
                row["epsilon"] = spent
        if report.clients:
            done.reported = report
        else:
            done.server_state = self.server_state
        return done

    def _run_block(
        self, clients: list[int], work: State, downloads: Downloads | None, done: Progress, report: Uploads, on_client
    ) -> None:
        """A round of some of its clients, whose states are in `work`."""
        round, exchange = done.round, self.exchange
        exchange.measure(round, clients, work, done.ledger, self._x_of)
        if downloads is None and self.shared:
            exchange.first_download(round, clients, work, done.ledger)
        seconds, too_late, deadline = {}, {}, self.settings["deadline"]

        def late(trained: ClientRound) -> dict[int, str]:
            if self.clock:
                seconds.update(self._seconds(clients, trained, done.ledger))
            for k, needed in seconds.items():
                if deadline is not None and needed > deadline:
                    too_late[k] = f"late: its round takes {needed:.6g} s, the deadline is {deadline:g} s"
            return too_late

        trained, rows = self.step(
            round,
            clients,
            work,
            None if downloads is None else downloads.to(clients, work),
            exchange.channel_masks("up", done.server_state),
            lambda k: self.states.load([k]),
            on_client,
            late,
        )
        if trained.answers:
            self.method.answered(trained.answers, done.server_state)
            for k, (_, answer) in trained.answers.items():
                done.ledger.add(round, "up", [k], reply(answer.numel()))
        in_time = [row for row, k in enumerate(clients) if k not in too_late]
        if self.uploaded:
            sizes = trained.sizes if not too_late else trained.sizes.of(in_time)
            done.ledger.add(round, "up", [clients[row] for row in in_time], sizes)
        for row, k in enumerate(clients):
            if self.clock:
                rows[row]["duration"] = seconds[k]
            if rows[row]["left_out"] is None:
                if trained.norms is not None:
                    report.norms.append(trained.norms[row])
                report.clients.append(k)
                report.samples.append(self._samples_of(k))
                report.losses.append(trained.losses[row])
        self.states.store(clients, work)
        done.history += rows

    def _timed(self, round: int, rows: list[dict], report: Uploads) -> Uploads:
        """Who has reported when a round ends, of those in `report` that trained in it; `rows` of all get its `time`."""
        now, buffer = self.history.time(), self.settings["buffer"]
        if not buffer:
            deadline = self.settings["deadline"] or math.inf
            now += max(min(row["duration"], deadline) for row in rows)
        else:
            known = {k: fields for k, *fields in (self.reported.waiting if self.reported else ())}
            new = zip(report.clients, report.samples, report.losses, strict=True)
            known |= {k: [None, round, samples, loss] for k, samples, loss in new}
            arrived, working, now = clock.arrivals(
                now,
                {k: finish for k, (finish, *_) in known.items() if finish is not None},
                self._queue(round),
                {row["client"]: row["duration"] for row in rows},
                {row["client"] for row in rows} - set(report.clients),
                self._taking_part(len(self)),
                buffer,
            )
            there = [(k, *known[k][1:]) for k in sorted(arrived)]
            clients, started, samples, losses = ([one[n] for one in there] for n in range(4))
            waiting = [[k, finish, *known[k][1:]] for k, finish in sorted(working.items()) if k in known]
            report = Uploads(round, clients, samples, losses, started=started, waiting=waiting)
        for row in rows:
            row["time"] = now
        return report

    def _block(self, n: int) -> int:
        """How many of the n clients of a round have their states in memory at once: whole cohorts."""
        together = max(1, min(n, max(self.cohort, self._executor.threads)))
        if self.settings["memory_limit"] is None:
            fits = BLOCK_BYTES // memory.bytes_of(self.initial)
        else:
            fits = self._need.clients(self.settings["memory_limit"], together)
        return max(1, min(n, max(1, fits // together) * together))

    @functools.cached_property
    def _need(self) -> memory.Need:
        n, each = self._taking_part(len(self)), memory.bytes_of(self.initial)
        uploads = sum(memory.bytes_of({name: self.initial[name]}) for name in self.uploaded if name in self.initial)
        # The uploads of the last round and the mix of them; states at rest, of all clients in the end.
        fixed = memory.resident() + 2 * n * uploads
        if self.settings["store"] == MEMORY:
            fixed += (len(self) + n) * each
        sample, batch = self._data.sample(), self.settings["batch_size"]
        activations = train.kept_by_a_step(self.template, sample, batch, self.task)
        # Counting nonzeros takes a byte a number. A database reads the records of the next clients ahead on a
        # thread, and the allocator keeps what that thread and this one let go of: measured, 4 blocks in all.
        loaded = each * (5 if self.settings["store"] == MEMORY else 20) // 4
        loaded += memory.bytes_of({name: self.initial[name] for name in self.exchange.bounded})
        # A gradient, the weights made from factors, and what the optimizer keeps.
        settings = self.trainer.settings
        own = 2 + max(1, len(settings.update.slots) + (settings.accumulate > 1))
        return memory.Need(fixed, loaded, own * each + memory.WORKSPACE * activations)

    def _downloads(self, done: Progress) -> Downloads | None:
        """The mix of the last round's uploads for the round `done`; None where there is nothing to mix."""
        if not self.shared or self.reported is None:
            return None
        uploads = self.uploads(done.server_state)
        return server_round(self.exchange, uploads, done.round, done.ledger, self._samples_of)

    def uploads(self, server_state: State | None = None) -> Uploads:
        """What the server has of the last round. server_state: in place of a copy of the server's own."""
        server_state = dict(self.server_state) if server_state is None else server_state
        exchange = self.exchange
        names = None if exchange.measured or exchange.keeps_start else [*self.uploaded, *exchange.once]
        state = self.states.read(self._shard.mine(self.reported.clients), names)
        start = None if not exchange.keeps_start else {name: state[START + name] for name in exchange.bounded}
        return exchange.uploads(self.reported, exchange.sent(state)[0], start, server_state, self._shard)

    def epsilon(self, rounds: int | None = None) -> float:
        """ε of so many rounds (by default those there were), at `delta`; infinite without noise."""
        if not self.exchange.noise:
            return math.inf
        k, delta = len(self), self.settings["delta"]
        rounds = self.round if rounds is None else rounds
        return privacy.epsilon(self.exchange.noise, delta or privacy.default_delta(k), rounds, k, self._taking_part(k))

    def of_all(self, state: State) -> State:
        """The tensors [K, …] of all clients, of which `state` has those of this process's."""
        return self._shard.stacked(state, range(len(self)))

    def _samples_of(self, client: int) -> int:
        """How many samples a client trains on; of a federation loaded without clients, how many it has."""
        if self.clients is not None:
            return len(self._data[client].train[1])
        if self.identity["samples"] is None:
            raise ValueError("this federation was loaded without clients, pass Federation.load(DIR, clients=)")
        return self.identity["samples"][client][0]

    @property
    def models(self) -> "Models":
        """`fed.models[k]`: client k's model, a new module in eval mode that shares nothing with the federation."""
        return Models(self.template, self.states)

    def mixed(self) -> "Models":
        """The models as the next round's download would make them: for FedAvg, the global model at every k."""
        state = self.states.load(range(len(self)))
        self._deliver_next({name: tensor[self.here.start : self.here.stop] for name, tensor in state.items()})
        return Models(self.template, Stacked.of(state))

    def _deliver_next(self, state: State) -> bool:
        """Put the next round's download into the states of the clients here; False where nothing is mixed."""
        clients = list(self.here)
        downloads = self._downloads(self.progress.next())
        if downloads is not None:
            if self.clients is not None:
                self.exchange.measure(self.round + 1, clients, state, Ledger(), self._x_of)
            downloads.deliver(clients, state, lambda row, models: self._loss_of(clients[row], models))
        return downloads is not None

    def accuracies_as_downloaded(self) -> list[float | None] | None:
        """The accuracy of each client's model as the next round's download makes it, on the client's own test samples.

        What the last aggregation is worth, whoever took part in it; None where nothing is mixed. Changes nothing here.
        """
        state = self.states.load(self.here)
        if not self._deliver_next(state):
            return None
        parts = self.group.each(self._evaluate(self.round + 1, list(self.here), state))
        return [measured["accuracy"] for part in parts for measured in part]

    def join(self, clients: Sequence[Client], how: str = "local-train", epochs: int | None = None) -> Newcomers:
        """What clients that come after training get out of it, on their own test samples. Changes nothing here.

        A newcomer starts from the initial model and gets what `Strategy.mix` has for guests, as if it came for the next
        round. how: "local-train" (FedFac, §3.2, LocalTrain; FedRep, FedEM alike), the shared part stays as downloaded
        (for FedFac, the shared channels) and the personal part trains for `epochs`, by default those of a round;
        "fine-tune", everything trains (FedAvg+), layers that the method leaves as they are in its rounds too (the head
        of FedBABU); "download", nothing does (FedAvg); "ensemble" (FedFac, §3.2, Ensemble; LG-FedAvg), nothing is
        trained either, the newcomer averages the probabilities of all clients' models, which it must download for that.
        Where labels mean different classes with different clients, the last two cannot work. The learning rate is
        constant, whatever `schedule` is.

        Raises ValueError for bad arguments, before the first round, for "local-train" where a method keeps nothing
        personal, and where a federation that was loaded lacks the augmentation that newcomers would train with.
        """
        return newcomers.join(self, clients, how, epochs)

    def density(self) -> dict[str, list[float]]:
        """Layer path → the fraction of nonzeros of its μ for each client; empty for a model without μ."""
        return analysis.density(self)

    def similarity(self, name: str | None = None, layer: int | None = None) -> Tensor:
        """Cosine of one tensor between all pairs of clients, float64 [K, K] (Factorized-FL eq. 4, Figure 7).

        name: "u", "v", "mu", "weight" …, by default "v" or "weight", or where there is neither the layer's first
        tensor. layer: 1 … L, by default L − 1, the layer before the classifier (L in a model of one layer), or where
        all of that is frozen the last one before it that is not, else L. Raises ValueError if that layer has no such
        tensor.
        """
        return analysis.similarity(self, name, layer)

    def key_vectors(self) -> Tensor:
        """What the method compares of each client as one vector, [K, d]; d is 0 for a method without similarity."""
        return analysis.key_vectors(self)

    def mixing_matrix(self) -> Tensor:
        """The weights `Strategy.weights` gives the next download, float64 [K, K]; a client that did not report last is
        a row and a column of zeros. Methods that mix by other means (see `Strategy.mix`) may not use it."""
        return analysis.mixing_matrix(self)

    def encode(self, x: Tensor | Mapping[str, Tensor], client: int | None = None) -> Tensor:
        """The input of each client's classifier (or of one client's) for x [n, …] (of samples of several entries, these
        by name), in eval mode: [K or 1, n, d]."""
        return analysis.encode(self, x, client)

    def accuracies(self, state: State) -> list[float | None]:
        """The accuracy of other tensors [K, …] in place of the clients' own, on the test samples of each."""
        return self.trainer.evaluate(state, [one.test for one in self._data])

    def save(self, directory: str | Path) -> None:
        """Write the run directory: configuration, rows, ledger and a checkpoint of this round.

        Raises RunDirectoryError if `directory` holds another run.
        """
        with self._writing(directory) as opened:
            self._save(directory, opened)

    def config(self) -> dict[str, Any]:
        """What config.json holds."""
        return {
            "format": 1,
            "id": self.id,
            "method": {"name": self.method.name, "settings": _as_recorded(self.method)},
            "settings": {name: _named(value) for name, value in self.settings.items() if LATER.get(name, ...) != value},
            "clients": len(self),
            "source": self.source,
            "executor": dataclasses.asdict(self.plan),
            **self.identity,
            **({} if self.frozen is None else {"frozen": self.frozen}),
            **({} if self.graphs else {"graphs": False}),
        }

    def _samples(self) -> list[list[int]] | None:
        """Numbers of samples for training and test; None for clients that are made when asked for."""
        if self._data.lazy:
            return None
        return [[len(client.train[1]), len(client.test[1])] for client in self.clients]

    @classmethod
    def load(
        cls,
        directory: str | Path,
        model: Callable[[], nn.Module] | None = None,
        clients: Sequence[Client] | None = None,
        method: Strategy | None = None,
        augment: Callable | None = None,
        device: str | torch.device | None = None,
        store: str | Path | None = None,
        memory_limit: float | None = None,
        group: Group | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        metrics: Mapping[str, Callable[[Tensor, Tensor], Tensor]] | None = None,
        graphs: bool | None = None,
    ) -> "Federation":
        """The federation as its newest checkpoint in `directory` has it; `fit` goes on from there, bit for bit.

        model: needed unless the one that was used is a model class or function of a module already imported, or a
        functools.partial of a model class or of `fastfact.models.build` (nothing is imported by a name in a file).
        clients: the same as before, in the same order; without them the federation has models, similarity, ledger and
        history, but `fit` raises. method: needed for a Strategy that is not registered. augment: as model.
        store: where the clients' states are now, if they were in a directory that has moved. memory_limit, graphs: in
        place of what there was. group: as in the constructor, whatever it was when the checkpoint was written; every
        process reads `directory`. loss, metrics: functions that were used, needed unless they are of a module already
        imported. `fed.source` is what was recorded when the federation was made.

        Raises RunDirectoryError (a ValueError) naming what is missing or does not fit.
        """
        directory = Path(directory)
        place = None if store is None else str(store)
        recorded = Recorded.read(directory, store=place, memory_limit=memory_limit)
        config, settings = recorded.config, dict(recorded.config["settings"])
        if unknown := sorted(set(settings) - set(inspect.signature(cls).parameters)):
            raise RunDirectoryError(f"{directory}: has a setting {unknown[0]!r} that is not known here")
        recorded.check_place()
        if method is None:
            name = config["method"]["name"]
            if name not in strategy.STRATEGIES:
                raise RunDirectoryError(f"{directory}: method {name!r} is not known here, pass method=")
            try:
                method = strategy.make(name, **config["method"]["settings"])
            except (TypeError, ValueError) as error:
                raise RunDirectoryError(f"{directory}: its method {name}: {error}") from error
        model = model or resolve(config["model"])
        if model is None:
            raise RunDirectoryError(f"{directory}: the model {config['model']!r} cannot be found again, pass model=")
        for name, given in (("loss", loss), ("metrics", metrics)):
            if name in settings:
                settings[name] = given or _found(directory, name, settings[name])
        used = config["augment"]
        augment = augment or (resolve({"factory": used}) if used else None)
        fed = cls(
            model,
            clients,
            method,
            **settings,
            augment=augment,
            device=device,
            graphs=config.get("graphs", True) if graphs is None else graphs,
            source=config.get("source"),
            group=group,
            _recorded=recorded,
        )
        # One that is known by its name only is asked for by what trains, see `check_augment`.
        fed.augment = augment or used
        return fed


def _append(directory: RunDirectory, done: Progress, sync: bool) -> None:
    directory.append(done.history, done.ledger, sync)


def _named(value: Any) -> Any:
    """A setting as JSON can hold it: functions by their names."""
    if isinstance(value, Mapping) and any(map(callable, value.values())):
        return {name: _named(function) for name, function in value.items()}
    return {"factory": name_of(value)} if callable(value) else list(value) if isinstance(value, tuple) else value


def _found(directory: Path, name: str, recorded: Any) -> Any:
    """The functions of a setting that `_named` recorded. Raises RunDirectoryError for one that is not known here."""
    if not isinstance(recorded, dict):
        return recorded
    if "factory" not in recorded:
        return {key: _found(directory, name, one) for key, one in recorded.items()}
    function = resolve(recorded)
    if function is None:
        raise RunDirectoryError(f"{directory}: {name} {recorded['factory']!r} cannot be found again, pass {name}=")
    return function


def _as_recorded(method: Strategy) -> dict[str, Any]:
    """The settings of a method as config.json has them since its first version, so that older runs are known again:
    `skip` under its old name, and what came later only where it is not the default."""
    names = ("max_weight", "match_on", "head_first")
    later = {field.name: field.default for field in dataclasses.fields(method) if field.name in names}
    return {
        "whole" if name == "skip" else name: value
        for name, value in method.settings().items()
        if name not in later or value != later[name]
    }
