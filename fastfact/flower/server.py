"""The server's side: who takes part, what each downloads, and what comes of the uploads."""

import contextlib
import json
import logging
import math
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastfact.base import files
from fastfact.base.kinds import type_error
from fastfact.base.settings import CLOCK, DEFAULTS
from fastfact.data.samples import Entries
from fastfact.federation import setup
from fastfact.federation.history import History
from fastfact.federation.local import Local
from fastfact.federation.progress import Progress
from fastfact.federation.server import robust
from fastfact.federation.server.exchange import not_finite, server_round, too_far
from fastfact.federation.server.processes import Group, Shard
from fastfact.federation.server.strategy import Strategy, Uploads
from fastfact.federation.state import State
from fastfact.federation.storage import run_directory
from fastfact.federation.storage.run_directory import LEDGER, METRICS, Rows, RunDirectoryError
from fastfact.federation.wire.format import Wire, reply
from fastfact.federation.wire.ledger import Ledger, Sizes
from fastfact.flower.packet import Packet, RefusedError, is_number, refusing, table_of

log = logging.getLogger("fastfact")

FIXED: dict[str, Any] = {"cohort": 1, "memory_limit": None, "store": "memory", "noise": 0.0, "delta": None}
FIXED |= {name: DEFAULTS[name] for name in CLOCK}
"""What each machine says for itself; noise, which repeats with the seed, that all clients are told here; and the
simulated clock, where there are real ones."""
SETTINGS = {name: default for name, default in DEFAULTS.items() if name not in FIXED} | {"sparsity": None}
"""The settings of `Federation` that all machines share, with its defaults."""
SAVED = "server.safetensors"
MOST_SAMPLES = 1 << 53
"""The most samples a client may say it has: floats count so far."""
MOST_NUMBERS = 1 << 26
"""The most numbers a sample may have: the server runs the model on one."""


@dataclass
class _Asked:
    """What the server must know of a client until it answers."""

    start: State
    """What it had of what it uploads, after the download."""
    messages: list[bytes] = field(default_factory=list)
    sources: list[int] | None = None


@dataclass
class _Upload:
    """What a client answered."""

    row: dict[str, Any]
    sent: State
    """Empty where it was left out."""
    answer: Tensor | None = None
    sizes: Sizes = field(default_factory=Sizes)
    """Of the message, as it came."""


@dataclass
class _Round:
    """A round that is under way, or was."""

    first: bool
    masks: State
    """Which channels travel up."""
    adds: Progress
    asked: dict[int, _Asked] = field(default_factory=dict)
    uploads: dict[int, _Upload] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    """How far the round moved each upload, where that is bounded."""


KEPT = 3
"""Rounds of which late answers are understood."""


@dataclass
class _Disk:
    """What a server writes."""

    out: Path
    rows: Rows
    ledger: Rows


class Server(Local):
    """A federation of `clients` clients as its server knows it: what they uploaded, never what they keep.

    method, model, settings: of `Federation`, but for those that are a machine's own. sample: shape and dtype of one
    sample, as `Node.hello` says; None takes that of the first node. out: a directory that a server which is started
    again goes on from; without one, nothing is written. run: what the clients keep their states under; drawn, or that
    of `out`.
    Raises ValueError as `Federation` does, RunDirectoryError for an `out` of something else.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        clients: int,
        sample: Sequence | None = None,
        method: str | Strategy = "fedavg",
        method_settings: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        l1: float | None = None,
        device: str | torch.device | None = None,
        out: str | Path | None = None,
        run: str | None = None,
    ):
        if type_error(clients, int) or clients < 1:
            raise ValueError(f"Server(clients={clients!r}): must be an integer of at least 1")
        settings = dict(settings or {})
        if unknown := sorted(set(settings) - set(SETTINGS)):
            raise ValueError(f"Server({unknown[0]}=): unknown setting, must be one of {', '.join(SETTINGS)}")
        all_of_them = {**SETTINGS, **settings, **FIXED}
        if callable(all_of_them["loss"]) or isinstance(all_of_them["metrics"], Mapping):
            raise ValueError("loss and metrics of a deployment must be names: functions do not travel")
        super().__init__(method, method_settings, all_of_them, l1=l1)
        self.k, self.run = clients, run or secrets.token_hex(8)
        self._setup_model(model, device)
        self.held: dict[int, State] = {}
        """client → what it uploaded last."""
        self.once: dict[int, State] = {}
        """client → what it measured before its first round, if the method asks for it."""
        self.trained: dict[int, int] = {}
        """client → the round of that."""
        self.samples: dict[int, int] = {}
        self.started: dict[int, State] = {}
        """client → what it started that round from, where the server must know."""
        self._rounds: dict[int, _Round] = {}
        self._holding = contextlib.ExitStack()
        self._disk: _Disk | None = None
        self.sample: list | None = None
        if out is not None:
            self._disk = self._open(Path(out), run)
        if sample is not None:
            self._prepare(sample)

    def _prepare(self, sample: Sequence) -> None:
        """What depends on what a sample is."""
        sample = [list(sample[0]), sample[1]]
        if self.sample is not None:
            return
        self._setup_exchange(sample)
        setup.check_rule(self.exchange, self._taking_part(self.k))
        self.exchange.expected = self._taking_part(self.k)
        keyed = self.exchange.keyed(self.initial)
        self.at_start = {name: keyed[name][0] for name in [*self.uploaded, *self.exchange.once]}
        """What every client has of what it uploads, before its first round."""
        if not self.round:
            everybody = {name: tensor.expand(self.k, *tensor.shape[1:]) for name, tensor in self.initial.items()}
            self.progress.server_state = self.method.server_state(everybody)
        self.sample = sample

    def __len__(self) -> int:
        """The number of clients."""
        return self.k

    def config(self) -> dict[str, Any]:
        """What a node must know, as JSON can hold it."""
        return {
            "method": {"name": self.method.name, "settings": self.method.settings()},
            "settings": {name: self.settings[name] for name in SETTINGS},
            "clients": self.k,
        }

    def hello(self) -> Packet:
        """What asks a node who is there."""
        return Packet.of({"kind": "hello", "config": self.config()})

    def welcome(self, packet: Packet) -> list[int]:
        """The clients of a node that answered `hello`. Raises RefusedError for a node that does not fit."""
        facts = packet.facts
        with refusing():
            clients, samples = list(facts["clients"]), list(facts["samples"])
            fits = all(type(n) is int and 0 <= n < self.k for n in clients) and len(clients) == len(samples)
            fits = fits and all(type(n) is int and 0 < n <= MOST_SAMPLES for n in samples)
            if not clients or not fits or len(set(clients)) < len(clients):
                raise RefusedError(
                    f"has clients {clients!s:.200} with {samples!s:.200} samples, must be of 0 … {self.k - 1}, each"
                    f" with 1 … {MOST_SAMPLES}"
                )
            sample = [list(facts["sample"][0]), facts["sample"][1]]
            if facts.get("table") != table_of(self.infos, self.sparse, self.frozen):
                raise RefusedError("has another model: names, shapes or dtypes of its tensors differ")
            if self.sample not in (None, sample):
                raise RefusedError(f"has samples {sample!s:.200}, other clients {self.sample}")
            if self.sample is None:
                self._try(sample, facts.get("entries"))
        self._prepare(sample)
        once = self._measured(packet, clients) if self.exchange.once else {}
        self.once |= once
        self.samples |= dict(zip(clients, samples, strict=True))
        return clients

    def _try(self, sample: list, entries: Sequence | None) -> None:
        """Raise RefusedError for samples that the model does not take: those of the first node are everybody's."""
        shape, dtype = sample
        sizes = all(type(n) is int and n > 0 for n in shape) and math.prod(shape) <= MOST_NUMBERS
        if not sizes or not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise RefusedError(
                f"has samples {sample!s:.200}, must be a shape of at most {MOST_NUMBERS} numbers, a dtype"
            )
        task = self.task
        if entries is not None:
            known = [(str(name), tuple(shape), getattr(torch, dtype)) for name, shape, dtype in entries]
            task = replace(task, entries=Entries(tuple(known)))
        # Ones, of which a mask leaves something; zeros, where a model knows one token alone.
        for made in (torch.ones, torch.zeros):
            try:
                setup.output_of(task, self.template, made(1, *shape, dtype=getattr(torch, dtype), device=self.device))
            except Exception as error:
                why = f"{error!s:.200}"
            else:
                self.task = task
                return
        what = f"{dtype} {shape}" if entries is None else f"of {task.entries!s:.200}"
        raise RefusedError(f"has samples {what}, which the model does not take: {why}")

    def _measured(self, packet: Packet, clients: list[int]) -> dict[int, State]:
        """What the clients of a node have measured. Raises RefusedError for what does not fit."""
        names = set(self.exchange.once)
        try:
            lengths = [[length] for length in packet.facts["lengths"]]
            found = [self.wire.decode(message) for (message,) in packet.messages(lengths)]
        except Exception as error:
            raise RefusedError(f"its answer is incomplete: {', '.join(sorted(names))} ({error!r:.200})") from error
        if len(found) != len(clients) or any(set(tensors) != names for tensors in found):
            raise RefusedError(f"does not say {', '.join(sorted(names))} of each of its clients")
        for k, reason in not_finite(clients, {n: torch.stack([each[n] for each in found]) for n in names}).items():
            raise RefusedError(f"client {k}: {reason}")
        return {
            k: {name: tensor.to(self.device) for name, tensor in tensors.items()}
            for k, tensors in zip(clients, found, strict=True)
        }

    def select(self, round: int) -> list[int]:
        """The clients that take part in a round, ascending; the same as in a simulation."""
        return self._select(self.k, round)

    @torch.no_grad()
    def begin(self, round: int, clients: Sequence[int]) -> None:
        """Make the downloads of a round for some clients, whose numbers of samples are known; see `packet`."""
        adds = replace(self.progress.next(), round=round)
        made = self._rounds[round] = _Round(not self.shared or self.reported is None, {}, adds)
        self._rounds = {number: known for number, known in self._rounds.items() if number > round - KEPT}
        if self.reported is None or not self.shared:
            self._first_downloads(round, clients, made)
        else:
            self._downloads(round, clients, made, self.reported)
        made.masks = self.exchange.channel_masks("up", adds.server_state)

    def _first_downloads(self, round: int, clients: Sequence[int], made: _Round) -> None:
        # The initial model, which simulations have as it is whatever the wire does to numbers.
        wire = Wire(self.wire.infos, "exact", self.sparse)
        tensors = {name: self.at_start[name] for name in self.shared}
        together = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in tensors.items()}
        own = self.method.first(list(clients), together)
        message = [wire.encode(tensors)] if tensors and not own else []
        together |= own
        for row, k in enumerate(clients):
            if own:
                message = [wire.encode({name: tensor[row] for name, tensor in together.items()})]
            made.asked[k] = _Asked(self._held(k) | {name: together[name][row] for name in own}, message)
        if tensors:
            made.adds.ledger.add(round, "down", clients, wire.roundtrip(together, self.shared)[1])

    def _downloads(self, round: int, clients: Sequence[int], made: _Round, reported: Uploads) -> None:
        sent, start = self._stacked(reported.clients, self._held), None
        if self.exchange.keeps_start:
            start = self._stacked(reported.clients, self.started.__getitem__)
        uploads = self.exchange.uploads(reported, sent, start, made.adds.server_state, Shard(Group(), self.k))
        downloads = server_round(self.exchange, uploads, round, made.adds.ledger, self.samples.__getitem__)

        def of_guests(rows: list[int]) -> tuple[State, Sizes]:
            # What they hold is what they uploaded last: nothing travels.
            return self._stacked([clients[row] for row in rows], self._held), Sizes()

        for k in clients:
            made.asked[k] = _Asked(self._held(k))
        for download in downloads.of(clients, of_guests):
            for at, row in enumerate(download.rows):
                asked = made.asked[clients[row]]
                asked.sources = download.sources
                each = range(len(download.sources)) if download.sources is not None else [at]
                for one in each:
                    tensors = {name: tensor[one] for name, tensor in download.tensors.items()}
                    asked.messages.append(self.wire.encode(tensors, download.masks))
                if download.sources is None:
                    asked.start = self._received(asked.start, tensors, download.masks)

    def _received(self, held: State, tensors: State, masks: State) -> State:
        """What a client has of what it uploads after a download."""
        arrived = dict(tensors)
        for name, mask in masks.items():
            arrived[name] = torch.where(mask.view(-1, *[1] * (arrived[name].dim() - 1)), arrived[name], held[name])
        state = self.initial | {name: tensor[None] for name, tensor in held.items() if name in self.infos}
        changed = self.method.receive(state, {name: tensor[None] for name, tensor in arrived.items()})
        return held | {name: tensor[0] for name, tensor in changed.items() if name in held}

    def _held(self, client: int) -> State:
        return self.at_start | self.held.get(client, {}) | self.once.get(client, {})

    def _stacked(self, clients: Sequence[int], of: Callable[[int], State]) -> State:
        states = [of(k) for k in clients]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def packet(self, round: int, clients: Sequence[int]) -> Packet:
        """What a node with these clients is sent in a round that has begun."""
        made = self._rounds[round]
        masks = {
            name: [np.packbits(mask.cpu().numpy()).tobytes().hex(), len(mask)] for name, mask in made.masks.items()
        }
        told, messages = [], []
        for k in clients:
            asked = made.asked[k]
            messages += asked.messages
            lengths = [len(message) for message in asked.messages]
            told.append({"client": k, "held": self.trained.get(k, 0), "lengths": lengths, "sources": asked.sources})
        facts = {"kind": "train", "config": self.config(), "run": self.run, "round": round, "first": made.first}
        return Packet.of({**facts, "masks": masks, "clients": told}, messages)

    @torch.no_grad()
    def accept(self, packet: Packet, asked: Collection[int]) -> list[int]:
        """Take what a node, which was `asked` for these clients, sends of a round; the clients it is of. What comes of
        a round that has ended is kept as what the clients hold, and not mixed.

        Raises RefusedError for what does not fit; nothing of it is kept.
        """
        facts = packet.facts
        with refusing():
            round, clients = facts["round"], facts["clients"]
            if facts["run"] != self.run:
                raise RefusedError(f"answers in run {facts['run']!r:.80}, this is {self.run!r}")
            made = self._rounds.get(round) if type(round) is int else None
            if made is None:
                raise RefusedError(f"answers in round {round!r:.80}, which is not under way")
            groups = packet.messages([client["lengths"] for client in clients])
            uploads = {}
            for client, group in zip(clients, groups, strict=True):
                k = client["row"]["client"]
                if type(k) is not int or k not in asked or k not in made.asked or k in uploads:
                    raise RefusedError(f"answers for client {k!r:.80}, which was not asked of it")
                uploads[k] = self._upload(round, client, group, made)
        if round > self.round:
            made.uploads |= uploads
            return sorted(uploads)
        late = {k: up.sent for k, up in uploads.items() if up.sent and self.trained.get(k, 0) < round}
        left_out = self._too_far(late, made)
        for k, sent in late.items():
            if k in left_out:
                log.warning("round %d: what client %d sent after the round is left out: %s", round, k, left_out[k])
            else:
                self.held[k], self.trained[k] = sent, round
        return sorted(uploads.keys() - left_out.keys())

    def _upload(self, round: int, client: Mapping[str, Any], group: list[bytes], made: _Round) -> _Upload:
        k = client["row"]["client"]
        asked, row = made.asked[k], {"round": round, "client": k}
        own = [name for metric in self.settings["metrics"] for name in (metric, f"{metric}_before")]
        for name in ("loss", "accuracy", "accuracy_before", "density", "seconds", *own):
            value = client["row"][name]
            share = name in ("accuracy", "accuracy_before", "density")
            if value is not None and not (is_number(value) and (not share or 0 <= value <= 1)):
                must = "between 0 and 1" if share else "a finite number"
                raise RefusedError(f"client {k}: {name} is {value!r:.80}, must be {must} or None")
            row[name] = value
        row |= {"bytes_up": 0, "bytes_down": 0, "left_out": None}
        if client["row"]["left_out"] is not None:
            return _Upload(row | {"left_out": str(client["row"]["left_out"])[:200]}, {})
        if len(group) != bool(self.uploaded):
            raise RefusedError(f"client {k}: {len(group)} messages, must be {int(bool(self.uploaded))}")
        sent: State = {}
        sizes = Sizes()
        for message in group:
            try:
                decoded = self.wire.decode(message, onto=asked.start, sizes=sizes)
                sent = {name: tensor.to(self.device) for name, tensor in decoded.items()}
            except ValueError as error:
                raise RefusedError(f"client {k}: {error}") from error
            if set(sent) != set(self.uploaded):
                raise RefusedError(f"client {k}: uploads {sorted(sent)}, must be {sorted(self.uploaded)}")
        answer = None
        if asked.sources is not None and client.get("answer") is not None:
            answer = torch.tensor(client["answer"], dtype=torch.float64).flatten()
            if not answer.isfinite().all() or len(answer) != len(asked.sources):
                raise RefusedError(f"client {k}: answers {len(answer)} numbers to an offer of {len(asked.sources)}")
        if broken := not_finite([k], {name: tensor[None] for name, tensor in sent.items()}):
            return _Upload(row | {"left_out": broken[k]}, {})
        return _Upload(row, sent, answer, sizes)

    @torch.no_grad()
    def end(self, round: int) -> list[dict]:
        """End a round with what has been accepted: the rows of its clients. With `out` it is on the disk."""
        made = self._rounds[round]
        uploads = dict(sorted(made.uploads.items()))
        sent = {k: upload.sent for k, upload in uploads.items() if upload.sent}
        left_out = self._too_far(sent, made)
        for k, reason in left_out.items():
            uploads[k].row["left_out"] = reason
        answers = {k: (made.asked[k].sources or [], up.answer) for k, up in uploads.items() if up.answer is not None}
        if answers:
            self.method.answered(answers, made.adds.server_state)
            for k, (_, answer) in answers.items():
                made.adds.ledger.add(round, "up", [k], reply(answer.numel()))
        before = {row["client"] for row in self.history} if self.exchange.once else set()
        if new := [k for k in uploads if k in self.once and k not in before]:
            once = self._stacked(new, self.once.__getitem__)
            made.adds.ledger.add(round, "up", new, self.wire.roundtrip(once, list(once))[1])
        if sent:
            made.adds.ledger.add(round, "up", list(sent), Sizes.joined([uploads[k].sizes for k in sent]))
        rows = [upload.row for upload in uploads.values()]
        there = [row["client"] for row in rows if row["left_out"] is None]
        losses = [uploads[k].row["loss"] for k in there]
        losses = [math.nan if loss is None else loss for loss in losses]
        up, down = made.adds.ledger.by_client("up"), made.adds.ledger.by_client("down")
        for row in rows:
            row["bytes_up"], row["bytes_down"] = up.get(row["client"], 0), down.get(row["client"], 0)
        if there:
            samples = [self.samples[k] for k in there]
            made.adds.reported = Uploads(round, there, samples, losses, left_out=sorted(left_out))
        else:
            made.adds.server_state = self.server_state
        for k, state in sent.items():
            if k in left_out and not there:
                # The last round that counts is mixed again: of nobody in it what was left out.
                continue
            self.held[k], self.trained[k] = state, round
            if self.exchange.keeps_start:
                self.started[k] = {name: made.asked[k].start[name] for name in self.exchange.bounded}
        for k in uploads:
            if not self.uploaded:
                self.trained[k] = round
        made.adds.history = History(rows)
        with self.progress.adding(made.adds):
            made.uploads = {}
            if self._disk is not None:
                self._save(self._disk, made.adds)
        return rows

    def _too_far(self, sent: Mapping[int, State], made: _Round) -> dict[int, str]:
        limit, names = self.exchange.max_norm, self.exchange.bounded
        if limit is None or not names or not sent:
            return {}
        for k, state in sent.items():
            start = {name: made.asked[k].start[name][None] for name in names}
            made.norms[k] = float(robust.norms({name: state[name][None] for name in names}, start))
        return {k: reason for k, reason in too_far(made.norms, limit).items() if k in sent}

    def _open(self, out: Path, run: str | None) -> _Disk:
        """Hold `out`, and go on from what is there."""
        self._holding.enter_context(files.locked(out))
        if (out / SAVED).exists():
            self._load(out, run)
        elif not files.is_vacant(out):
            raise RunDirectoryError(f"{out}: is not empty and holds no server ({SAVED} is missing)")
        return _Disk(out, Rows(out / METRICS, self.history), Rows(out / LEDGER, self.ledger.rows()))

    def _save(self, disk: _Disk, done: Progress) -> None:
        disk.rows.append(done.history, sync=True)
        disk.ledger.append(done.ledger.rows(), sync=True)
        tensors = {f"memory/{name}": tensor for name, tensor in self.server_state.items()}
        for kind, states in (("held", self.held), ("started", self.started), ("once", self.once)):
            tensors |= {f"{kind}/{k}/{name}": x for k, state in states.items() for name, x in state.items()}
        about = {
            "run": self.run,
            "round": self.round,
            "config": self.config(),
            "reported": None if self.reported is None else self.reported.report(),
            "trained": self.trained,
            "samples": self.samples,
            "rows": [disk.rows.position(), disk.ledger.position()],
        }
        run_directory.save_tensors(disk.out / SAVED, tensors, {"server": json.dumps(about)})

    def _load(self, out: Path, run: str | None) -> None:
        path = out / SAVED
        tensors, metadata = run_directory.load_tensors(path, {}, also=("memory/", "held/", "started/", "once/"))
        try:
            about = json.loads(metadata["server"])
            there, here = about["config"], json.loads(json.dumps(self.config()))
            if there != here:
                raise RunDirectoryError(f"{out}: holds another run (its {_difference(there, here)} differs)")
            if run not in (None, about["run"]):
                raise RunDirectoryError(f"{out}: holds run {about['run']!r}, not {run!r}")
            self.run = about["run"]
            rows, entries = (
                run_directory.read_rows(out / name, about["round"], position)
                for name, position in zip((METRICS, LEDGER), about["rows"], strict=True)
            )
            self.progress = Progress(about["round"], History(rows), Ledger.from_rows(entries))
            self.progress.reported = None if about["reported"] is None else Uploads(**about["reported"])
            self.trained = {int(k): round for k, round in about["trained"].items()}
            self.samples = {int(k): n for k, n in about["samples"].items()}
            for name, tensor in tensors.items():
                kind, _, rest = name.partition("/")
                if kind == "memory":
                    self.server_state[rest] = tensor.to(self.device)
                else:
                    k, _, rest = rest.partition("/")
                    kinds = {"held": self.held, "started": self.started, "once": self.once}
                    kinds[kind].setdefault(int(k), {})[rest] = tensor.to(self.device)
        except RunDirectoryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunDirectoryError(f"{path}: {error!r}") from error

    def close(self) -> None:
        """Let go of `out`."""
        self._holding.close()


def _difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The first setting in which two configurations differ."""
    for part in ("clients", "method", "settings"):
        if a.get(part) != b.get(part):
            if not isinstance(b[part], Mapping) or not isinstance(a.get(part), Mapping):
                return part
            names = {**a[part], **b[part]}
            inner = next(name for name in names if a[part].get(name, ...) != b[part].get(name, ...))
            return _difference_in(inner, a[part].get(inner), b[part].get(inner))
    return "configuration"


def _difference_in(name: str, a: Any, b: Any) -> str:
    return f"{name}, {a!r} there and {b!r} now,"
