"""What a federation is between two rounds, on the disk: `Progress` and the clients' states, written and read.

The clients' states are in a checkpoint of the run directory, or in a store of their own (`states.Database`), which also
keeps what the server knows. Nothing here knows the federation: it hands over what it is, and makes itself from it.
"""

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fastfact.base import files
from fastfact.federation.config import check_settings, taking_part
from fastfact.federation.history import History
from fastfact.federation.progress import Progress
from fastfact.federation.state import State
from fastfact.federation.storage import run_directory
from fastfact.federation.storage.run_directory import (
    CONFIG,
    LEDGER,
    METRICS,
    DamagedError,
    Rows,
    RunDirectoryError,
    checkpoint_path,
    checkpoints,
    read_config,
)
from fastfact.federation.storage.states import (
    DATABASE,
    MEMORY,
    Database,
    PackedStates,
    States,
    about_database,
    check_clients,
    rows_of,
    totals,
)
from fastfact.federation.wire.ledger import Ledger

log = logging.getLogger("fastfact")

CLIENT, SERVER, RECORDS = "client/", "server/memory/", "records/"

HERE = ("store", "memory_limit")
"""Settings of the machine: another value goes on with the same run."""


class RunDirectory:
    """A run directory that a federation writes while it trains."""

    def __init__(self, path: Path, config: Mapping[str, Any], progress: Progress):
        """Make the files in `path` those of a federation that is configured and knows so much.

        The folder must be held, see `files.locked`. Raises RunDirectoryError if it holds something else.
        """
        self.path, self.id = path, config["id"]
        config = json.loads(json.dumps(config))
        there = read_config(path) if (path / CONFIG).exists() else None
        if there is not None:
            self._check(there, config)
            damaged = _newer(path, there, progress.round)
        elif files.is_vacant(path, *RESERVED):
            damaged = []
        else:
            raise RunDirectoryError(f"{path}: is not empty and no run directory ({CONFIG} is missing)")
        for folder in (path, path / run_directory.CHECKPOINTS):
            files.remove_unfinished(folder)
        for file in damaged:
            file.rename(file.with_name(file.name + ".damaged"))
        if there != config:
            files.write_json(path / CONFIG, config, sealed=True, indent=2)
        self.rows, self.ledger = Rows(path / METRICS, progress.history), Rows(path / LEDGER, progress.ledger.rows())

    def _check(self, there: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        # Of where it comes from, what both know: a later version may know more, which whoever wrote it has compared.
        common = {"source": (there.get("source") or {}).keys() & (config.get("source") or {}).keys()}
        different = sorted(
            key
            for key in config
            if key not in ("executor", "graphs", "id")
            and _run(there, key, common.get(key)) != _run(config, key, common.get(key))
        )
        if different:
            raise RunDirectoryError(f"{self.path}: holds another run (its {different[0]} differs)")
        if there.get("id", self.id) != self.id and _finished(self.path, there):
            raise RunDirectoryError(
                f"{self.path}: holds another run of the same settings ({there['id'][:8]}, this one is {self.id[:8]});"
                " go on with Federation.load, or choose another directory"
            )

    def append(self, rows: list[dict], ledger: Ledger, sync: bool) -> None:
        """Add the rows and the ledger of a round."""
        self.rows.append(rows, sync)
        self.ledger.append(ledger.rows(), sync)

    def positions(self) -> dict[str, str]:
        """What a checkpoint says of the rows there are."""
        return {"rows": json.dumps({METRICS: self.rows.position(), LEDGER: self.ledger.position()})}

    def save(self, progress: Progress, clients: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write a checkpoint of the clients that `gathered` packed, and remove all but the newest two."""
        tensors = dict(clients) | {SERVER + name: tensor for name, tensor in progress.server_state.items()}
        metadata = {"id": self.id, **progress.metadata(), **self.positions(), **metadata}
        run_directory.save_tensors(checkpoint_path(self.path, progress.round), tensors, metadata)
        for path in list(checkpoints(self.path).values())[: -run_directory.KEPT]:
            path.unlink()


RESERVED = ("run.json",)
"""What may stand in a run directory before its configuration does."""


def _run(config: Mapping[str, Any], key: str, only: Collection[str] | None = None) -> Any:
    """What `config` has under `key`, without the settings that do not tell one run from another; of a mapping `only`
    these names."""
    value = config.get(key)
    if only is not None:
        return {name: value[name] for name in only}
    return {name: each for name, each in value.items() if name not in HERE} if key == "settings" else value


def _finished(directory: Path, config: Mapping[str, Any]) -> bool:
    """Whether there is a round to go on from."""
    place = config["settings"].get("store", MEMORY)
    if place == MEMORY or checkpoints(directory):
        return bool(checkpoints(directory))
    with contextlib.suppress(RunDirectoryError):
        about = about_database(Path(place))
        return about["rounds"] > 0 and about.get("id") == config.get("id")
    return False


def _newer(directory: Path, config: Mapping[str, Any], round: int) -> list[Path]:
    """The damaged checkpoints of later rounds. Raises RunDirectoryError if one of these is whole."""
    damaged = []
    for later, path in checkpoints(directory).items():
        if later > round:
            try:
                _read_checkpoint(directory, config, later, path)
            except DamagedError:
                damaged.append(path)
                continue
            raise RunDirectoryError(f"{directory}: has rounds this federation has not run; go on with Federation.load")
    return damaged


@contextlib.contextmanager
def writing(
    path: Path | None, config: Mapping[str, Any], progress: Progress, states: States
) -> Iterator[RunDirectory | None]:
    """Hold the run directory, if there is one, and the store, if there is one, while clients train.

    Raises InUseError if another process has one of them, RunDirectoryError if they are not of this federation, before
    anything is written.
    """
    with contextlib.ExitStack() as held:
        if path is not None:
            if not (path / CONFIG).exists() and not files.is_vacant(path, *RESERVED):
                raise RunDirectoryError(f"{path}: is not empty and no run directory ({CONFIG} is missing)")
            held.enter_context(files.locked(path))
        if isinstance(states, Database):
            held.enter_context(states.writing())
            known = _server_of(states)
            if int(known.get("round", 0)) != progress.round or known.get("id", config["id"]) != config["id"]:
                raise RunDirectoryError(
                    f"{states.path}: has gone on without this federation; go on with Federation.load"
                )
        yield None if path is None else RunDirectory(path, config, progress)


def _server_of(states: Database) -> dict[str, str]:
    """What the server knew when the store was last committed; empty if it never was."""
    value = states.value("server")
    try:
        server = json.loads(value or "{}")
        if not isinstance(server, dict) or not str(server.get("round", 0)).isdecimal():
            raise ValueError("what the server knows is nothing of the kind")
    except ValueError as error:
        raise DamagedError(f"{states.path}: damaged: {error}") from error
    return server


class Clock:
    """When a checkpoint is due by time: a crash costs minutes at most, and saving a twentieth of the run."""

    SECONDS = 120.0

    def __init__(self) -> None:
        self.ended, self.took = time.monotonic(), 0.0

    def due(self) -> bool:
        return time.monotonic() - self.ended > max(self.SECONDS, 20 * self.took)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.ended = time.monotonic()
        self.took = self.ended - begun


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM inside take effect when the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for arguments in came[:1]:
            handlers[arguments[0]](*arguments)


def commit(states: States, progress: Progress, directory: RunDirectory | None, id: str) -> None:
    """Make what a round stored the clients' state; a store of clients keeps what the server knows beside it."""
    if isinstance(states, Database):
        memory = save_bytes({name: tensor.cpu().contiguous() for name, tensor in progress.server_state.items()})
        metadata = {"id": id, **progress.metadata(), **({} if directory is None else directory.positions())}
        states.commit(server=json.dumps(metadata), memory=memory)
    else:
        states.commit()


def packed(states: States) -> tuple[State, dict[str, str]]:
    """The clients that have trained, as tensors whose first axes join those of other processes, and metadata."""
    if isinstance(states, PackedStates):
        tensors, table = states.packed()
        return {RECORDS + name: tensor for name, tensor in tensors.items()}, {"records": json.dumps(table)}
    clients = states.touched()
    tensors = {CLIENT + name: tensor for name, tensor in states.load(clients).items()}
    return tensors | {"clients": torch.tensor(clients, dtype=torch.int64)}, {}


@dataclass
class Recorded:
    """What config.json says of a run: enough to make its federation again, given model and clients."""

    directory: Path
    config: dict[str, Any]
    """As it is there, but for the settings of the machine."""

    @classmethod
    def read(cls, directory: Path, **here: Any) -> "Recorded":
        """here: settings of the machine that take the place of those there, unless None."""
        config = read_config(directory)
        try:
            config["settings"] |= {name: value for name, value in here.items() if value is not None}
            _check_config(config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunDirectoryError(f"{directory / CONFIG}: {error!r}") from error
        return cls(directory, config)

    @property
    def id(self) -> str | None:
        """None for a run of before there were any."""
        return self.config.get("id")

    def check_place(self) -> None:
        """Raise RunDirectoryError unless there is something to go on from."""
        place = self.config["settings"]["store"]
        if place == MEMORY:
            run_directory.last_checkpoint(self.directory)
        elif not (Path(place) / DATABASE).is_file():
            raise RunDirectoryError(f"{self.directory}: its clients were in {place}, they are not; pass store=")

    def restore(self, states: States, here: range) -> Progress:
        """Put the states of the clients `here` into `states`; what else is known, `reported` as its `report()`.

        Where the newest checkpoint is damaged, or the rows it was saved with, it is that of the checkpoint before, and
        the log says so. Raises RunDirectoryError.
        """
        if isinstance(states, Database):
            return self._from_database(states)
        found, problems = checkpoints(self.directory), []
        for round, path in reversed(found.items()):
            try:
                tensors, metadata, progress = _read_checkpoint(self.directory, self.config, round, path, states.initial)
                _put(tensors, metadata, states, here, path)
            except DamagedError as error:
                problems.append(error)
                continue
            for problem in problems:
                log.warning("%s; going on from round %d, the checkpoint before", problem, round)
            return progress
        if problems:
            raise problems[0]
        run_directory.last_checkpoint(self.directory)
        raise AssertionError

    def _from_database(self, states: Database) -> Progress:
        server = _server_of(states)
        if not server:
            raise RunDirectoryError(f"{states.path}: no finished round, start the run again")
        _check_id(states.path, server, self.config)
        try:
            memory = load_bytes(states.value("memory"))
        except (SafetensorError, TypeError) as error:
            raise DamagedError(f"{states.path}: damaged: {error}") from error
        return _progress(self.directory, self.config, states.path, server, memory)


def _check_config(config: Mapping[str, Any]) -> None:
    """Raise KeyError, TypeError or ValueError for a configuration that no federation wrote."""
    kinds = {"clients": int, "sample": list, "model": dict, "executor": dict, "method": dict, "augment": str | None}
    for key, kind in (kinds | {"samples": list | None, "source": dict}).items():
        if not isinstance(config[key] if key != "source" else config.get(key, {}), kind):
            raise TypeError(f"{key} is {config[key]!r}")
    if not isinstance(config["method"]["name"], str) or not isinstance(config["method"]["settings"], dict):
        raise TypeError(f"method is {config['method']!r}")
    if not 0 < config["clients"] < 1 << 31 or len(config["samples"] or range(config["clients"])) != config["clients"]:
        raise ValueError(f"clients is {config['clients']}")
    shape, dtype = config["sample"]
    if not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in shape) or not isinstance(
        getattr(torch, dtype), torch.dtype
    ):
        raise ValueError(f"sample is {config['sample']!r}")
    if not isinstance(config.get("graphs", True), bool):
        raise TypeError(f"graphs is {config['graphs']!r}")
    if not isinstance(config["settings"].get("store", MEMORY), str):
        raise TypeError(f"store is {config['settings']['store']!r}")
    # Functions are named there, and found by who knows them.
    settings = config["settings"].items()
    check_settings({n: v for n, v in settings if n not in ("loss", "metrics") or not isinstance(v, dict)})


def _check_id(path: Path, metadata: Mapping[str, str], config: Mapping[str, Any]) -> None:
    if "id" in metadata and metadata["id"] != config.get("id"):
        raise RunDirectoryError(
            f"{path}: belongs to another run ({metadata['id'][:8]!r}, {CONFIG} is of {str(config.get('id'))[:8]!r})"
        )


def _read_checkpoint(
    directory: Path, config: Mapping[str, Any], round: int, path: Path, initial: State | None = None
) -> tuple[State, dict[str, str], Progress]:
    """Everything of a checkpoint, verified; `initial` is the state of a client [1, …], None where that is not known."""
    metadata, shapes = run_directory.look_into(path)
    _check_id(path, metadata, config)
    expected, also = {}, ("clients", "server/", RECORDS, *((CLIENT,) if initial is None else ()))
    if initial is not None and not any(name.startswith(RECORDS) for name in shapes):
        m = (shapes.get("clients") or [config["clients"]])[0]
        expected = {CLIENT + name: tensor.expand(m, *tensor.shape[1:]) for name, tensor in initial.items()}
    tensors, metadata = run_directory.load_tensors(path, expected, also)
    if metadata.get("round") != str(round):
        raise DamagedError(f"{path}: it is of round {metadata.get('round')}")
    memory = {name.removeprefix(SERVER): tensor for name, tensor in tensors.items() if name.startswith(SERVER)}
    return tensors, metadata, _progress(directory, config, path, metadata, memory)


def _put(tensors: State, metadata: Mapping[str, str], states: States, here: range, path: Path) -> None:
    """Put those of a checkpoint's clients that are `here` into `states`."""
    try:
        if any(name.startswith(RECORDS) for name in tensors):
            if not isinstance(states, PackedStates) or json.loads(metadata["records"]) != states.codec.table:
                raise RunDirectoryError(f"{path}: its records are those of another model")
            names = ("client", "length", "nonzeros", "records")
            states.unpack({name: tensors[RECORDS + name] for name in names}, here)
            return
        m = len(next(tensor for name, tensor in tensors.items() if name.startswith(CLIENT)))
        clients = tensors.get("clients", torch.arange(m))
        check_clients(clients.tolist(), len(states))
    except RunDirectoryError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{path}: damaged: {error}") from error
    rows = ((clients >= here.start) & (clients < here.stop)).nonzero().flatten()
    states.store(clients[rows].tolist(), {name: rows_of(tensors[CLIENT + name], rows) for name in states.initial})
    states.commit()


def _progress(
    directory: Path, config: Mapping[str, Any], path: Path, metadata: Mapping[str, str], memory: State
) -> Progress:
    """What is known but for the clients' states, of `metadata` in the file `path`, and of the rows."""
    try:
        round = int(metadata["round"])
        positions = json.loads(metadata.get("rows", "{}"))
        history = History(run_directory.read_rows(directory / METRICS, round, positions.get(METRICS)))
        ledger = Ledger.from_rows(run_directory.read_rows(directory / LEDGER, round, positions.get(LEDGER)))
        if (str(ledger.up), str(ledger.down)) != (metadata["bytes_up"], metadata["bytes_down"]):
            raise ValueError(f"its byte totals are not those of {LEDGER}, the run directory is half-written")
        last = json.loads(metadata["last"]) if "last" in metadata else None
        if not isinstance(last, dict | None):
            raise TypeError(f"last is {last!r}")
        choices = json.loads(metadata.get("choices", "{}"))
        if not isinstance(choices, dict):
            raise TypeError(f"choices is {choices!r}")
        _check_history(directory, history, round, config)
    except RunDirectoryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise DamagedError(f"{path}: {error}") from error
    return Progress(round, history, ledger, memory, last, choices)


def _check_history(directory: Path, history: History, rounds: int, config: Mapping[str, Any]) -> None:
    """Raise DamagedError unless there is a row for each client that took part in each round; where rounds are
    asynchronous, for one."""
    where, k = directory / METRICS, config["clients"]
    for row in history:
        client = row.get("client")
        if not isinstance(client, int) or not 0 <= client < k:
            raise DamagedError(f"{where}: a row of round {row['round']} has client {client!r}, must be one of {k}")
    each = taking_part(k, config["settings"]["participation"])
    if config["settings"].get("buffer"):
        # As many begin as are needed for the buffer to fill.
        if missing := sorted(set(range(1, rounds + 1)) - set(history.rounds())):
            raise DamagedError(f"{where}: has no row of round {missing[0]}: the directory is half-written")
    elif len(history) != rounds * each:
        raise DamagedError(
            f"{where}: has {len(history)} rows of the first {rounds} rounds, must be {rounds * each}: the directory is"
            " half-written"
        )


def about(directory: Path, verify: bool = False) -> dict[str, Any]:
    """What a run directory or a store of clients holds: rounds, clients, bytes of a client, density of μ.

    verify: read everything there is, and raise DamagedError for what is not as it was written. No model is needed.
    Raises RunDirectoryError for a directory that is neither.
    """
    if (directory / DATABASE).is_file():
        return about_database(directory, verify)
    config = Recorded.read(directory).config
    place = config["settings"].get("store", MEMORY)
    found: dict[str, Any] = {"method": config["method"]["name"], "store": place, "clients": config["clients"]}
    if place != MEMORY:
        held = about_database(Path(place), verify)
        _check_id(Path(place) / DATABASE, held, config)
        return found | held
    round, path = run_directory.last_checkpoint(directory)
    metadata, shapes = run_directory.look_into(path)
    found |= {"rounds": round}
    for each, file in checkpoints(directory).items() if verify else ():
        _read_checkpoint(directory, config, each, file)
    if RECORDS + "records" in shapes:
        tensors, _ = run_directory.load_tensors(path, {}, also=("clients", "server/", RECORDS))
        try:
            lengths, nonzeros = tensors[RECORDS + "length"], tensors[RECORDS + "nonzeros"]
            table = json.loads(metadata["records"])
            return found | totals(len(lengths), int(lengths.sum()), int(nonzeros.sum()), table)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
            raise DamagedError(f"{path}: damaged: {error!r}") from error
    touched = shapes.get("clients", [config["clients"]])[0]
    with safe_open(path, framework="pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in shapes if name.startswith(CLIENT))
    return found | totals(touched, size, None, {})
