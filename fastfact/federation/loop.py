"""The federation: a round is a pipe of stages, each a function of its inputs and the seed.

select → load states → key, mix → download → train → check → upload → evaluate → record

The mix stands where Algorithms 1 and 2 of Factorized-FL have it, before local training: what a client downloads in
round r is mixed from the uploads of round r − 1, so the first round downloads the initial model and matches nobody, and
the models that are evaluated, and stay at the end, are the clients' own, trained after their last download. A client's
state at rest is therefore what it uploaded last: all the server must remember is who reported in the last round.
"""

import copy
import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastfact import sparsity
from fastfact.federation import mixing, store, strategy, train
from fastfact.federation.client import Client, channels_last, placed
from fastfact.federation.cohort import (
    Clients,
    Models,
    State,
    TensorInfo,
    describe,
    generator_for,
    seeded,
    stack,
    take,
    tensors_of,
)
from fastfact.federation.config import check_settings, name_of, record, resolve
from fastfact.federation.history import History
from fastfact.federation.store import RunDirectoryError
from fastfact.federation.strategy import Strategy, Uploads
from fastfact.federation.wire import Ledger, Wire

log = logging.getLogger("fastfact")


class Federation:
    """Personalized federated learning of one model on many clients, simulated on this machine.

    model: () → nn.Module, called once, with PyTorch's generator seeded; every client starts from it. The method
        factorizes it if it needs to. The model maps x [n, …] to logits [n, classes].
    clients: `Client` objects. Samples have one shape; sizes and label sets may differ.
    method: a name (see `ff.methods.names()`) or a `Strategy` object with its own settings.
    epochs, batch_size, lr, momentum, weight_decay: local SGD in each round; the momentum starts at zero. A last batch
        of a single sample joins the one before it.
    participation: the fraction of the clients that takes part in a round, drawn anew each round, at least one.
    augment: (x, generator) → x on each training batch; draw from the generator alone.
    seed: every random draw derives from it, the round and the client: a run repeats bit for bit on one machine.
    cohort: how many clients train together over the client axis; 1 is one after another, "auto" decides by the model.
        The results agree up to rounding (and draws of dropout).
    l1: λ, in place of the method's own.
    wire: the numbers on the wire: "exact", "bfloat16" or "int8"; the server computes with what arrives.
    max_norm: clients whose upload has a larger Euclidean norm are left out of the round; None for no limit.
    device: where the model and the data are; by default where `model` puts itself.
    source: anything JSON can hold that says where the clients came from; kept in config.json as it is.

    A client whose new state has NaN or inf, or whose upload is too large, is left out of the round: it keeps its
    previous state, its row says why (`left_out`), the log warns.

    Raises ValueError, before any work, for settings out of range, clients that do not fit together or the model.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        clients: Sequence[Client],
        method: str | Strategy = "fedavg",
        *,
        epochs: int = 5,
        batch_size: int = 50,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        participation: float = 1.0,
        augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
        seed: int = 0,
        cohort: int | str = "auto",
        l1: float | None = None,
        wire: str = "exact",
        max_norm: float | None = None,
        device: str | torch.device | None = None,
        source: Mapping[str, Any] | None = None,
    ):
        settings = {
            "epochs": epochs,
            "batch_size": batch_size,
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "participation": participation,
            "seed": seed,
            "cohort": cohort,
            "wire": wire,
            "max_norm": max_norm,
        }
        check_settings(settings)
        if augment is not None and not callable(augment):
            raise ValueError(f"Federation(augment={augment!r}): must be a function (x, generator) → x, or None")
        method = strategy.make(method) if isinstance(method, str) else method
        if not isinstance(method, Strategy):
            raise ValueError(f"Federation(method={method!r}): must be a name or a Strategy object")
        # Its own copy: a method may keep what `bind` told it about the model.
        self.method = copy.copy(method) if l1 is None else dataclasses.replace(method, l1=l1)
        self.settings, self.augment, self.source = settings, augment, dict(source or {})
        self._setup_model(model, device)
        self._setup_clients(clients)
        self._identity = {"model": record(model), "augment": name_of(augment), "samples": self._samples()}
        self._identity["sample"] = self._sample()
        self._setup_wire()
        self._reset(len(self.clients))

    def _setup_model(self, factory, device) -> None:
        if isinstance(factory, nn.Module) or not callable(factory):
            raise ValueError(
                f"Federation(model={type(factory).__name__}): must be a function () → nn.Module"
                + (", for example lambda: copy.deepcopy(model)" if isinstance(factory, nn.Module) else "")
            )
        with seeded(self.settings["seed"], 0, 0, "model"):
            template = factory()
            if not isinstance(template, nn.Module):
                raise ValueError(f"Federation(model=): returned {type(template).__name__}, must return an nn.Module")
            template = self.method.prepare(template)
        if device is not None:
            template = template.to(device)
        self.template = template
        if not any(p.requires_grad for p in template.parameters()):
            raise ValueError("Federation(model=): the model has no parameter that can train")
        self.infos = describe(template, self.method.classifier)
        self.method.bind(self.infos)
        self.method.phases(self.settings["epochs"])
        self.shared = [name for name, info in self.infos.items() if self.method.shares(info)]
        self.keys = [name for name, info in self.infos.items() if self.method.compares(info)]
        self.uploaded = [name for name in self.infos if name in {*self.shared, *self.keys}]
        self.sparse = [name for name, param in template.named_parameters() if sparsity.penalized(param)]
        first = next(template.parameters())
        self.device, self.dtype = first.device, first.dtype

    def _setup_clients(self, clients) -> None:
        clients = list(clients)
        if not clients:
            raise ValueError("Federation(clients=[]): must be at least one client")
        for k, client in enumerate(clients):
            if not isinstance(client, Client):
                raise ValueError(f"Federation(clients=): client {k} is {type(client).__name__}, must be ff.Client")
            shape, first = client.train[0].shape[1:], clients[0].train[0].shape[1:]
            if shape != first:
                raise ValueError(
                    f"Federation(clients=): samples of client {k} have shape {list(shape)}, of client 0"
                    f" {list(first)}: must be the same"
                )
        self.clients = clients
        self._train_data = [placed(client.train, self.device, self.dtype) for client in clients]
        self._test_data = [placed(client.test, self.device, self.dtype) for client in clients]
        self._held_out = self._train_data
        if self.method.validation:
            self._hold_out()
        self.classes = self._probe()
        for k, client in enumerate(clients):
            top = max(int(client.train[1].max()), int(client.test[1].max()))
            if top >= self.classes:
                raise ValueError(
                    f"Federation(clients=): client {k} has label {top}, the model has {self.classes} outputs:"
                    f" labels must be 0 … {self.classes - 1}"
                )

    def _hold_out(self) -> None:
        """Split the training samples of each client into those it trains on and those it evaluates others on."""
        trained, held_out = [], []
        for k, (x, y) in enumerate(self._train_data):
            if len(y) < 2:
                raise ValueError(f"{self.method.name}: client {k} has a single training sample and must hold out one")
            order = torch.randperm(len(y), generator=generator_for(self.settings["seed"], 0, k, "validation"))
            count = min(max(1, round_half_up(self.method.validation * len(y))), len(y) - 1)
            parts = order[count:].sort().values.to(self.device), order[:count].sort().values.to(self.device)
            trained.append((x[parts[0]], y[parts[0]]))
            held_out.append((x[parts[1]], y[parts[1]]))
        self._train_data, self._held_out = trained, held_out

    def _probe(self) -> int:
        """Run the model on a sample: it must take the clients' x and give logits. Returns the number of classes.

        On the CPU, one client at a time, convolutions are faster in channels_last: the model and the images are kept
        in it if the model runs that way (one that flattens with `view` does not).
        """
        x = self._train_data[0][0][:2]
        images = x.dim() == 4 and any(p.dim() == 4 for p in self.template.parameters())
        if images and self.device.type == "cpu" and self.cohort == 1:
            model = copy.deepcopy(self.template).to(memory_format=torch.channels_last)
            try:
                self._logits(model, channels_last(x))
            except RuntimeError:
                log.info("the model does not run in channels_last")
            else:
                self.template = model
                for data in (self._train_data, self._test_data, self._held_out):
                    data[:] = [(channels_last(x), y) for x, y in data]
                x = channels_last(x)
        try:
            logits = self._logits(self.template, x)
        except Exception as error:
            raise ValueError(
                f"Federation(model=): does not take samples {x.dtype} {list(x.shape[1:])}: {error}"
            ) from error
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"Federation(model=): gives {got} for {len(x)} samples, must give logits [n, classes]")
        size = self.settings["batch_size"]
        alone = [k for k, (x, y) in enumerate(self._train_data) if size == 1 or len(y) == 1]
        if alone:
            try:
                self._logits(self.template, self._train_data[alone[0]][0][:1], train=True)
            except ValueError as error:
                what = f"batch_size={size}" if size == 1 else f"client {alone[0]} has a single training sample"
                raise ValueError(f"Federation: {what}, and the model cannot train on one sample: {error}") from error
        return logits.shape[1]

    def _logits(self, model: nn.Module, x: Tensor, train: bool = False) -> Tensor:
        """What a copy of `model` makes of x; neither the model nor the global generator notices."""
        with torch.no_grad(), seeded(0, 0, 0, "probe", self.device):
            return copy.deepcopy(model).train(train)(x)

    def _setup_wire(self) -> None:
        """What is uploaded besides tensors of the model is known once the shape of a sample is."""
        shape, dtype = self._identity["sample"]
        self._encoder = train.Encoder(self._trainer, shape, getattr(torch, dtype))
        initial = stack(tensors_of(self.template), 1)
        keys = self.method.key(initial | self.method.extra(initial), self._encoder)
        self.measured = {
            name: TensorInfo(name, tuple(key.shape[1:]), key.dtype, role=name, layer=0, layers=0)
            for name, key in keys.items()
        }
        if clash := sorted(set(self.measured) & set(self.infos)):
            raise ValueError(f"{self.method.name}: key {clash[0]} has the name of a tensor of the model")
        self.keys += self.measured
        self.uploaded += self.measured
        self.wire = Wire(self.infos | self.measured, self.settings["wire"], self.sparse)

    def _reset(self, k: int) -> None:
        self.states = Clients(stack(tensors_of(self.template), k))
        extra = self.method.extra(self.states.state)
        if clash := sorted(set(extra) & set(self.infos)):
            raise ValueError(f"{self.method.name}: extra tensor {clash[0]} has the name of a tensor of the model")
        self.states.state.update(extra)
        self.round = 0
        self.history, self.ledger = History(), Ledger()
        self._memory: State = self.method.memory(self.states.state)
        self._last: Report | None = None
        self._work: State | None = None

    @functools.cached_property
    def _trainer(self) -> train.Trainer:
        s = self.settings
        return train.Trainer(
            self.template,
            self.infos,
            train.Settings(
                batch_size=s["batch_size"],
                lr=s["lr"],
                momentum=s["momentum"],
                weight_decay=s["weight_decay"],
                l1=self.method.l1,
                proximal=self.method.l1_method == "proximal",
                penalized=frozenset(self.sparse),
                augment=self.augment,
                seed=s["seed"],
            ),
        )

    @functools.cached_property
    def cohort(self) -> int:
        """How many clients train together, decided for this model if the setting is "auto"."""
        if self.settings["cohort"] != "auto":
            return self.settings["cohort"]
        chosen = train.cohort_for(self.template, self._train_data[0][0][0], self.settings["batch_size"])
        log.info("cohort=auto: %d client%s at a time", chosen, "s" * (chosen > 1))
        return chosen

    def __len__(self) -> int:
        """The number of clients."""
        return len(self.states)

    def fit(
        self,
        rounds: int,
        out: str | Path | None = None,
        *,
        checkpoint_every: int = 10,
        on_client: Callable[[int, int, int, int], None] | None = None,
        on_row: Callable[[dict], None] | None = None,
        on_round: Callable[[int, list[dict]], None] | None = None,
    ) -> History:
        """Run `rounds` more rounds and return the whole history.

        out: a run directory; gets a row per client and round, and a checkpoint every `checkpoint_every` rounds and
        after the last one. It must be new, or the one this federation was saved to or loaded from.
        on_client(round, client, done, total) is called as clients finish training, on_row(row) for each finished row,
        on_round(round, rows) after each round.

        Raises ValueError for bad arguments, or where the federation was loaded without its clients.
        """
        if not isinstance(rounds, int) or rounds < 0:
            raise ValueError(f"fit(rounds={rounds!r}): must be an integer of at least 0")
        if not isinstance(checkpoint_every, int) or checkpoint_every < 1:
            raise ValueError(f"fit(checkpoint_every={checkpoint_every!r}): must be an integer of at least 1")
        if self.clients is None:
            raise ValueError("fit: this federation was loaded without clients, pass Federation.load(DIR, clients=)")
        if isinstance(self.augment, str):
            raise ValueError(f"fit: the run used augment={self.augment}, pass Federation.load(DIR, augment=)")
        directory = None if out is None else self._open(Path(out))
        for step in range(rounds):
            before = len(self.ledger.entries)
            rows = self._run_round(self.round + 1, on_client)
            self.round += 1
            self.history.extend(rows)
            if directory is not None:
                last = self.round % checkpoint_every == 0 or step == rounds - 1
                store.append_rows(directory / store.METRICS, rows, sync=last)
                store.append_rows(directory / store.LEDGER, Ledger(self.ledger.entries[before:]).rows(), sync=last)
                if last:
                    self._checkpoint(directory)
            for row in rows if on_row else ():
                on_row(row)
            if on_round:
                on_round(self.round, rows)
        return self.history

    def select(self, round: int) -> list[int]:
        """The clients that take part in a round, ascending."""
        k = len(self)
        count = max(1, round_half_up(self.settings["participation"] * k))
        if count >= k:
            return list(range(k))
        order = torch.randperm(k, generator=generator_for(self.settings["seed"], round, -1, "select"))
        return sorted(order[:count].tolist())

    def _run_round(self, round: int, on_client) -> list[dict]:
        clients = self.select(round)
        ledger, memory = Ledger(), dict(self._memory)
        work = self._work if self._work is not None and _length(self._work) == len(clients) else None
        work = self._work = self.states.load(clients, work)
        downloaded = self._download(round, clients, work, memory, ledger)
        before = self._evaluate(round, clients, work) if downloaded else [None] * len(clients)
        losses, seconds = self._train(round, clients, work, on_client)
        left_out = self._check(clients, work)
        if self.uploaded:
            sent, sizes = self.wire.send(self._keyed(work), self.uploaded, self._rows("up", memory))
            ledger.add(round, "up", clients, sizes)
            left_out |= self._check_uploads(clients, sent, left_out)
        for row, k in enumerate(clients):
            if k in left_out:
                log.warning("round %d: client %d is left out and keeps its previous state: %s", round, k, left_out[k])
                for name, tensor in self.states.load([k]).items():
                    work[name][row].copy_(tensor[0])
        accuracies, densities = self._evaluate(round, clients, work), self._densities(work)
        reported = [row for row, k in enumerate(clients) if k not in left_out]
        # Nothing above changed the federation: a round that is interrupted has not happened.
        self.states.store(clients, work)
        if reported:
            self._memory = memory
            self._last = Report(
                round=round,
                clients=[clients[row] for row in reported],
                samples=[len(self._train_data[clients[row]][1]) for row in reported],
                losses=[losses[row] for row in reported],
            )
        self.ledger.entries += ledger.entries
        up, down = ledger.by_client("up"), ledger.by_client("down")
        return [
            {
                "round": round,
                "client": k,
                "loss": losses[row] if math.isfinite(losses[row]) else None,
                "accuracy": accuracies[row],
                "accuracy_before": before[row],
                "density": densities[row],
                "bytes_up": up.get(k, 0),
                "bytes_down": down.get(k, 0),
                "seconds": seconds[row],
                "left_out": left_out.get(k),
            }
            for row, k in enumerate(clients)
        ]

    def _download(self, round: int, clients: list[int], work: State, memory: State, ledger: Ledger) -> bool:
        """Mix the uploads of the last round and bring the clients' rows of `work` up to date. False: nothing to mix.

        A client that was not among those that reported is asked for its key if there is matching, and gets what
        `Strategy.arrival` says.
        """
        if not self.shared:
            return False
        last = self._last
        if last is None:
            # Everybody has the initial model, as if sent: the papers count this download too.
            ledger.add(round, "down", clients, self.wire.send(work, self.shared)[1])
            return False
        rows = {k: row for row, k in enumerate(clients)}
        uploads = self._uploads(last, work if last.clients == clients else None, memory)
        uploads.present = present = [place for place, k in enumerate(last.clients) if k in rows]

        def fetch(client: int, places: list[int]) -> State:
            state, sizes = self.wire.send({n: uploads.state[n][places] for n in self.shared}, self.shared)
            ledger.add(round, "down", [client] * len(places), sizes)
            return state

        def evaluate(client: int, state: State) -> Tensor:
            if self.clients is None:
                raise ValueError(f"{self.method.name} mixes by samples, pass Federation.load(DIR, clients=)")
            own = {
                name: tensor.expand(len(state[self.shared[0]]), *tensor.shape[1:])
                for name, tensor in self.states.load([client], names=list(self.infos)).items()
            }
            return self._trainer.loss(own | state, self._held_out[client])

        uploads.fetch, uploads.evaluate = fetch, evaluate
        mixed = self._mix(uploads)
        whole = len(present) == len(last.clients)
        some = mixed if whole else {name: tensor[present] for name, tensor in mixed.items()}
        self._receive(round, [last.clients[place] for place in present], rows, some, work, memory, ledger)
        missed = [k for k in clients if k not in set(last.clients)]
        if missed:
            own_state = {name: tensor[[rows[k] for k in missed]] for name, tensor in work.items()}
            sent, sizes = self.wire.send(self._keyed(own_state), self.uploaded)
            samples = [len(self._train_data[k][1]) for k in missed]
            losses = [math.nan] * len(missed)
            own = Uploads(round, missed, sent, samples, losses, self.keys, memory, self.settings["seed"])
            mixed = self.method.arrival(own, uploads, self.shared)
            if mixed is not None:
                ledger.add(round, "up", missed if self.keys and self.method.newcomers_upload else [], sizes)
                self._receive(round, missed, rows, mixed, work, memory, ledger)
        return True

    def _uploads(self, last: "Report", state: State | None, memory: State) -> Uploads:
        """What the server has of a round: what its clients sent is what they hold (`state` if already loaded)."""
        if state is None:
            state = self.states.load(last.clients, names=None if self.measured else self.uploaded)
        sent, _ = self.wire.send(self._keyed(state), self.uploaded)
        return Uploads(
            last.round, last.clients, sent, last.samples, last.losses, self.keys, memory, self.settings["seed"]
        )

    def _rows(self, direction: str, memory: State) -> State:
        return {name: mask.to(self.device) for name, mask in self.method.rows(direction, memory).items()}

    def _keyed(self, state: State) -> State:
        """The clients' tensors [k, …] and the keys computed from them."""
        return state | self.method.key(state, self._encoder) if self.measured else state

    def _mix(self, uploads: Uploads) -> State:
        mixed = dict(self.method.mix(uploads, self.shared))
        for name in self.sparse:
            if name in mixed and self.method.after_mix == "support":
                mixed[name] = mixed[name] * (uploads.state[name] != 0)
            elif name in mixed and self.method.after_mix == "threshold":
                mixed[name] = torch.where(mixed[name].abs() < self.method.l1, 0.0, mixed[name])
        return mixed

    def _receive(
        self,
        round: int,
        clients: list[int],
        places: Mapping[int, int],
        mixed: State,
        work: State,
        memory: State,
        ledger: Ledger,
    ) -> None:
        """Send `mixed` [len(clients), …] down and put it where the strategy says, into the clients' rows of `work`."""
        if not clients:
            return
        some = self._rows("down", memory)
        if self.method.clients_mix:
            received = dict(mixed)
        else:
            received, sizes = self.wire.send(mixed, self.shared, some)
            ledger.add(round, "down", clients, sizes)
        rows = [places[k] for k in clients]
        whole = rows == list(range(_length(work)))
        state = work if whole else {name: tensor[rows] for name, tensor in work.items()}
        for name, mask in some.items():
            arrived = mask.view(-1, *[1] * (received[name].dim() - 2))
            received[name] = torch.where(arrived, received[name], state[name])
        for name, tensor in self.method.receive(state, received).items():
            if whole:
                work[name].copy_(tensor)
            else:
                work[name][rows] = tensor

    def _evaluate(self, round: int, clients: list[int], work: State) -> list[float]:
        """The accuracy of each client on its own test set, after the adaptation the strategy asks for (on a copy)."""
        if any(phase.adapts for phase in self.method.phases(self.settings["epochs"])):
            work = take(work, range(len(clients)))
            self._train(round, clients, work, None, adapts=True)
        return self._trainer.evaluate(work, [self._test_data[k] for k in clients])

    def _train(
        self, round: int, clients: list[int], work: State, on_client, adapts: bool = False
    ) -> tuple[list[float], list[float]]:
        losses, seconds = [], []
        phases = [phase for phase in self.method.phases(self.settings["epochs"]) if phase.adapts == adapts]
        purpose = "adapt" if adapts else "order"
        for begin in range(0, len(clients), self.cohort):
            chunk = clients[begin : begin + self.cohort]
            rows = {name: tensor[begin : begin + len(chunk)] for name, tensor in work.items()}
            data = [self._train_data[k] for k in chunk]
            loss, took = self._trainer.train(rows, data, round, chunk, phases, purpose)
            losses += loss
            seconds += took
            if on_client:
                for k in chunk:
                    on_client(round, k, begin + len(chunk), len(clients))
        return losses, seconds

    def _check(self, clients: list[int], work: State) -> dict[int, str]:
        """client → why it is left out: its new state must be finite."""
        names = [name for name, tensor in work.items() if tensor.is_floating_point()]
        finite = torch.stack([work[name].flatten(1).abs().amax(1).isfinite() for name in names]).cpu()
        reasons = {}
        for row in (~finite.all(0)).nonzero().flatten().tolist():
            bad = names[int((~finite[:, row]).nonzero()[0])]
            reasons[clients[row]] = f"{bad} has NaN or inf"
        return reasons

    def _check_uploads(self, clients: list[int], sent: State, reasons: Mapping[int, str]) -> dict[int, str]:
        """The same for what the server sees of a client: its keys and the norm of its upload."""
        limit = self.settings["max_norm"]
        unusable = {
            k: f"{name} has NaN or inf"
            for name in self.measured
            for k, finite in zip(clients, sent[name].flatten(1).isfinite().all(1).tolist(), strict=True)
            if k not in reasons and not finite
        }
        if limit is None:
            return unusable
        norms = torch.stack([torch.linalg.vector_norm(t.flatten(1).double(), dim=1) for t in sent.values()]).norm(dim=0)
        return unusable | {
            k: f"the norm of its upload is {norm:.6g}, above {limit:g}"
            for k, norm in zip(clients, norms.tolist(), strict=True)
            if k not in reasons and norm > limit
        }

    def _densities(self, state: State) -> list[float | None]:
        """The fraction of nonzeros of μ over all layers, for each row; None for a model without μ."""
        if not self.sparse:
            return [None] * len(next(iter(state.values())))
        nonzeros = sum(state[name].flatten(1).count_nonzero(1) for name in self.sparse)
        return (nonzeros / sum(self.infos[name].numel for name in self.sparse)).tolist()

    @property
    def models(self) -> "Models":
        """`fed.models[k]`: client k's model, a new module in eval mode that shares nothing with the federation."""
        return Models(self.template, self.states)

    def mixed(self) -> "Models":
        """The models as the next round's download would make them: for FedAvg, the global model at every k."""
        state = self.states.load(range(len(self)))
        self._download(self.round + 1, list(range(len(self))), state, dict(self._memory), Ledger())
        return Models(self.template, Clients(state))

    def density(self) -> dict[str, list[float]]:
        """Layer path → the fraction of nonzeros of its μ for each client; empty for a model without μ."""
        return {
            name.rpartition(".")[0]: (
                self.states.state[name].flatten(1).count_nonzero(1) / self.infos[name].numel
            ).tolist()
            for name in self.sparse
        }

    def similarity(self, name: str | None = None, layer: int | None = None) -> Tensor:
        """Cosine of one tensor between all pairs of clients, float64 [K, K] (Factorized-FL eq. 4, Figure 7).

        name: "u", "v", "mu", "weight" …, by default "v" or, without one, "weight". layer: 1 … L, by default L − 1, the
        layer before the classifier (L in a model of one layer). Raises ValueError if that layer has no such tensor.
        """
        layers = max(info.layers for info in self.infos.values())
        layer = max(1, layers - 1) if layer is None else layer
        roles = {info.role: info.name for info in self.infos.values() if info.layer == layer and not info.norm}
        name = name or ("v" if "v" in roles else "weight")
        if name not in roles:
            raise ValueError(
                f"similarity(name={name!r}, layer={layer}): must be one of {', '.join(roles) or 'none'} in that layer"
                f" (layers 1 … {layers})"
            )
        return mixing.cosine(self.states.state[roles[name]])

    def save(self, directory: str | Path) -> None:
        """Write the run directory: configuration, rows, ledger and a checkpoint of this round.

        Raises RunDirectoryError if `directory` holds another run.
        """
        self._checkpoint(self._open(Path(directory)))

    def config(self) -> dict[str, Any]:
        """What config.json holds."""
        return {
            "format": 1,
            "method": {"name": self.method.name, "settings": self.method.settings()},
            "settings": self.settings,
            "clients": len(self),
            "source": self.source,
            **self._identity,
        }

    def _sample(self) -> list:
        """Shape and dtype of one sample as the model takes it, as JSON can hold them."""
        x = self._train_data[0][0]
        return [list(x.shape[1:]), str(x.dtype).removeprefix("torch.")]

    def _samples(self) -> list[list[int]]:
        return [[len(client.train[1]), len(client.test[1])] for client in self.clients]

    def _open(self, directory: Path) -> Path:
        """Make `directory` this federation's run directory: the rows in it are those of the rounds it has run."""
        config = json.loads(json.dumps(self.config()))
        if (directory / store.CONFIG).exists():
            there = store.read_config(directory)
            if different := sorted(key for key in config if there.get(key) != config[key]):
                raise RunDirectoryError(f"{directory}: holds another run (its {different[0]} differs)")
            if any(round > self.round for round in store.checkpoints(directory)):
                raise RunDirectoryError(
                    f"{directory}: has rounds this federation has not run; go on with Federation.load"
                )
        elif directory.exists() and any(directory.iterdir()):
            raise RunDirectoryError(f"{directory}: is not empty and no run directory ({store.CONFIG} is missing)")
        else:
            directory.mkdir(parents=True, exist_ok=True)
            store.write_text(directory / store.CONFIG, json.dumps(config, indent=2) + "\n")
        store.write_rows(directory / store.METRICS, self.history)
        store.write_rows(directory / store.LEDGER, self.ledger.rows())
        return directory

    def _checkpoint(self, directory: Path) -> None:
        tensors = {f"client/{name}": tensor for name, tensor in self.states.state.items()}
        tensors |= {f"server/memory/{name}": tensor for name, tensor in self._memory.items()}
        metadata = {"round": str(self.round), "bytes_up": str(self.ledger.up), "bytes_down": str(self.ledger.down)}
        if self._last is not None:
            metadata["last"] = json.dumps(dataclasses.asdict(self._last))
        store.save_checkpoint(store.checkpoint_path(directory, self.round), tensors, metadata)

    @classmethod
    def load(
        cls,
        directory: str | Path,
        model: Callable[[], nn.Module] | None = None,
        clients: Sequence[Client] | None = None,
        method: Strategy | None = None,
        augment: Callable | None = None,
        device: str | torch.device | None = None,
    ) -> "Federation":
        """The federation as its newest checkpoint in `directory` has it; `fit` goes on from there, bit for bit.

        model: needed unless the one that was used is a model class or function of a module already imported, or a
        functools.partial of a model class or of `fastfact.models.build` (nothing is imported by a name in a file).
        clients: the same as before, in the same order; without them the federation has models, similarity, ledger and
        history, but `fit` raises. method: needed for a Strategy that is not registered. augment: as model.
        `fed.source` is what was recorded when the federation was made.

        Raises RunDirectoryError (a ValueError) naming what is missing or does not fit.
        """
        directory = Path(directory)
        config = store.read_config(directory)
        round, path = store.last_checkpoint(directory)
        try:
            settings, k, samples, sample = config["settings"], config["clients"], config["samples"], config["sample"]
            recorded, name, options = config["model"], config["method"]["name"], config["method"]["settings"]
            used = config["augment"]
            check_settings(settings)
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{directory / store.CONFIG}: {error!r}") from error
        if method is None:
            if name not in strategy.STRATEGIES:
                raise RunDirectoryError(f"{directory}: method {name!r} is not known here, pass method=")
            method = strategy.make(name, **options)
        fed = cls.__new__(cls)
        fed.method, fed.settings, fed.source = copy.copy(method), settings, config.get("source", {})
        fed._identity = {"model": recorded, "augment": used, "samples": samples, "sample": sample}
        model = model or resolve(recorded)
        if model is None:
            raise RunDirectoryError(f"{directory}: the model {recorded!r} cannot be found again, pass model=")
        fed.augment = augment or (used and (resolve({"factory": used}) or used))
        fed._setup_model(model, device)
        fed.clients = None
        if clients is not None:
            fed._setup_clients(clients)
            if fed._samples() != samples:
                raise ValueError(
                    f"{directory}: clients= are {len(fed.clients)} clients with other numbers of samples than the run"
                    f" ({k} clients), must be the same clients in the same order"
                )
        fed._setup_wire()
        fed._reset(k)
        fed._restore(directory, round, path)
        return fed

    def _restore(self, directory: Path, round: int, path: Path) -> None:
        expected = {f"client/{name}": tensor for name, tensor in self.states.state.items()}
        tensors, metadata = store.load_checkpoint(path, expected)
        history = History(store.read_rows(directory / store.METRICS, round))
        rows = store.read_rows(directory / store.LEDGER, round)
        try:
            if metadata["round"] != str(round):
                raise ValueError(f"it is of round {metadata['round']}")
            ledger = Ledger.from_rows(rows)
            if (str(ledger.up), str(ledger.down)) != (metadata["bytes_up"], metadata["bytes_down"]):
                raise ValueError(f"its byte totals are not those of {store.LEDGER}, the run directory is half-written")
            last = Report(**json.loads(metadata["last"])) if "last" in metadata else None
        except (KeyError, TypeError, ValueError) as error:
            raise RunDirectoryError(f"{path}: {error}") from error
        if round and (not history or history[-1]["round"] != round):
            raise RunDirectoryError(
                f"{directory / store.METRICS}: ends before round {round}, the directory is half-written"
            )
        for name, tensor in self.states.state.items():
            tensor.copy_(tensors[f"client/{name}"])
        prefix = "server/memory/"
        self._memory = {n.removeprefix(prefix): t.to(self.device) for n, t in tensors.items() if n.startswith(prefix)}
        self._last = last
        self.round, self.history, self.ledger = round, history, ledger


@dataclasses.dataclass
class Report:
    """Who reported in a round, with how many samples and what training loss each."""

    round: int
    clients: list[int]
    samples: list[int]
    losses: list[float]


def _length(state: State) -> int:
    return len(next(iter(state.values())))


def round_half_up(x: float) -> int:
    return math.floor(x + 0.5)
