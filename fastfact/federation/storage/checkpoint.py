"""A federation in its run directory (`store` has the files): opening one, checkpoints, and going on from the newest."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from fastfact.federation.client.executor import ExecutionPlan
from fastfact.federation.config import check_settings, resolve
from fastfact.federation.history import History
from fastfact.federation.server import strategy
from fastfact.federation.server.exchange import Report
from fastfact.federation.server.processes import Group
from fastfact.federation.state import State
from fastfact.federation.storage import run_directory as store
from fastfact.federation.storage.run_directory import RunDirectoryError
from fastfact.federation.storage.states import DATABASE, Database, PackedStates, about_database, rows_of, totals
from fastfact.federation.storage.states import MEMORY as IN_MEMORY
from fastfact.federation.wire.ledger import Ledger

if TYPE_CHECKING:
    from fastfact.federation.federation import Federation

CLIENT, MEMORY, RECORDS = "client/", "server/memory/", "records/"

HERE = ("store", "memory_limit")
"""Settings of the machine: another value goes on with the same run."""


def open_directory(fed: "Federation", directory: Path) -> Path:
    """Make `directory` this federation's run directory: the rows in it are those of the rounds it has run."""
    config = json.loads(json.dumps(fed.config()))
    if (directory / store.CONFIG).exists():
        there = store.read_config(directory)
        if different := sorted(key for key in config if key != "executor" and _run(there, key) != _run(config, key)):
            raise RunDirectoryError(f"{directory}: holds another run (its {different[0]} differs)")
        if any(round > fed.round for round in store.checkpoints(directory)):
            raise RunDirectoryError(f"{directory}: has rounds this federation has not run; go on with Federation.load")
        if there != config:
            _write_config(directory, config)
    elif directory.exists() and any(directory.iterdir()):
        raise RunDirectoryError(f"{directory}: is not empty and no run directory ({store.CONFIG} is missing)")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        _write_config(directory, config)
    store.write_rows(directory / store.METRICS, fed.history)
    store.write_rows(directory / store.LEDGER, fed.ledger.rows())
    return directory


def _run(config: dict[str, Any], key: str) -> Any:
    """What `config` has under `key`, without the settings that do not tell one run from another."""
    value = config.get(key)
    return {name: each for name, each in value.items() if name not in HERE} if key == "settings" else value


def append(directory: Path, rows: list[dict], ledger: Ledger, sync: bool) -> None:
    """Add the rows and the ledger of a round."""
    store.append_rows(directory / store.METRICS, rows, sync=sync)
    store.append_rows(directory / store.LEDGER, ledger.rows(), sync=sync)


def _write_config(directory: Path, config: dict[str, Any]) -> None:
    store.write_text(directory / store.CONFIG, json.dumps(config, indent=2) + "\n")


def commit(fed: "Federation") -> None:
    """Make what the round stored the clients' state; a database keeps what the server knows beside it."""
    if isinstance(fed.states, Database):
        memory = save_bytes({name: tensor.cpu().contiguous() for name, tensor in fed.memory.items()})
        fed.states.commit(server=json.dumps(_metadata(fed)), memory=memory)
    else:
        fed.states.commit()


def _metadata(fed: "Federation") -> dict[str, str]:
    metadata = {"round": str(fed.round), "bytes_up": str(fed.ledger.up), "bytes_down": str(fed.ledger.down)}
    if fed.last is not None:
        metadata["last"] = json.dumps(dataclasses.asdict(fed.last))
    return metadata


def save(fed: "Federation", directory: Path | None) -> None:
    """Write a checkpoint of the round the federation is at. A database is one after every round: it is synced."""
    if isinstance(fed.states, Database):
        fed.states.sync()
        return
    if directory is None:
        return
    metadata = _metadata(fed)
    if isinstance(fed.states, PackedStates):
        packed, table = fed.states.packed()
        tensors = {RECORDS + name: tensor for name, tensor in packed.items()}
        metadata["records"] = json.dumps(table)
    else:
        clients = fed.states.touched()
        tensors = {CLIENT + name: tensor for name, tensor in fed.states.load(clients).items()}
        tensors["clients"] = torch.tensor(clients, dtype=torch.int64)
    lengths = fed.group.each({name: len(tensor) for name, tensor in tensors.items()})
    tensors = {name: fed.group.to_root(tensor, [n[name] for n in lengths]) for name, tensor in tensors.items()}

    def write() -> None:
        if len(tensors.get("clients", ())) == len(fed):
            del tensors["clients"]
        memory = {MEMORY + name: tensor for name, tensor in fed.memory.items()}
        store.save_checkpoint(store.checkpoint_path(directory, fed.round), tensors | memory, metadata)

    fed.group.root(write)


def load(
    cls: type["Federation"],
    directory: Path,
    model,
    clients,
    method,
    augment,
    device,
    place,
    memory_limit,
    group: Group,
) -> "Federation":
    """See `Federation.load`."""
    config = store.read_config(directory)
    try:
        settings, k, samples, sample = config["settings"], config["clients"], config["samples"], config["sample"]
        recorded, name, options = config["model"], config["method"]["name"], config["method"]["settings"]
        used, plan = config["augment"], ExecutionPlan(**config["executor"])
        if place is not None:
            settings["store"] = str(place)
        if memory_limit is not None:
            settings["memory_limit"] = memory_limit
        check_settings(settings)
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory / store.CONFIG}: {error!r}") from error
    round, path = (None, None) if settings["store"] != IN_MEMORY else store.last_checkpoint(directory)
    if path is None and not (Path(settings["store"]) / DATABASE).is_file():
        raise RunDirectoryError(f"{directory}: its clients were in {settings['store']}, they are not; pass store=")
    if method is None:
        if name not in strategy.STRATEGIES:
            raise RunDirectoryError(f"{directory}: method {name!r} is not known here, pass method=")
        method = strategy.make(name, **options)
    model = model or resolve(recorded)
    if model is None:
        raise RunDirectoryError(f"{directory}: the model {recorded!r} cannot be found again, pass model=")
    fed = cls.__new__(cls)
    fed.group = group
    fed.method, fed.settings, fed.source = copy.copy(method), settings, config.get("source", {})
    fed.identity = {"model": recorded, "augment": used, "samples": samples, "sample": sample}
    fed.augment = augment or (used and (resolve({"factory": used}) or used))
    fed.graphs, fed.plan = True, plan
    fed._setup_model(model, device)
    if clients is not None:
        fed._setup_clients(clients)
        if len(clients) != k or fed._samples() != samples:
            raise ValueError(
                f"{directory}: clients= are {len(fed.clients)} clients with other numbers of samples than the run"
                f" ({k} clients), must be the same clients in the same order"
            )
    fed._setup_exchange(k)
    if path is None:
        _restore_database(fed, directory)
    else:
        _restore_checkpoint(fed, directory, round, path)
    # Nobody writes into the directory before all have read it.
    group.each(None)
    return fed


def _restore_checkpoint(fed: "Federation", directory: Path, round: int, path: Path) -> None:
    about, shapes = store.look_into(path)
    m = shapes.get("clients", [len(fed)])[0]
    whole = {CLIENT + name: tensor.expand(m, *tensor.shape[1:]) for name, tensor in fed.states.initial.items()}
    packed = any(name.startswith(RECORDS) for name in shapes)
    tensors, metadata = store.load_checkpoint(path, {} if packed else whole, also=("clients", "server/", RECORDS))
    if metadata.get("round") != str(round):
        raise RunDirectoryError(f"{path}: it is of round {metadata.get('round')}")
    memory = {n.removeprefix(MEMORY): t for n, t in tensors.items() if n.startswith(MEMORY)}
    _restore_server(fed, directory, path, metadata, memory)
    here = fed._shard.block
    if not packed:
        clients = tensors["clients"] if "clients" in tensors else torch.arange(m)
        rows = ((clients >= here.start) & (clients < here.stop)).nonzero().flatten()
        own = {name: rows_of(tensors[CLIENT + name], rows) for name in fed.states.initial}
        fed.states.store(clients[rows].tolist(), own)
        fed.states.commit()
        return
    try:
        if not isinstance(fed.states, PackedStates) or json.loads(about["records"]) != fed.states.codec.table:
            raise ValueError("its records are those of another model")
        fed.states.unpack({name: tensors[RECORDS + name] for name in ("client", "length", "nonzeros", "records")}, here)
    except (KeyError, ValueError) as error:
        raise RunDirectoryError(f"{path}: {error}") from error


def _restore_database(fed: "Federation", directory: Path) -> None:
    path, server = fed.states.path, fed.states.value("server")
    if server is None:
        raise RunDirectoryError(f"{path}: no finished round, start the run again")
    _restore_server(fed, directory, path, json.loads(server), load_bytes(fed.states.value("memory")))


def _restore_server(fed: "Federation", directory: Path, path: Path, metadata, memory: State) -> None:
    """Everything but the clients' states; `path` is where `metadata` was."""
    try:
        round = int(metadata["round"])
        history = History(store.read_rows(directory / store.METRICS, round))
        ledger = Ledger.from_rows(store.read_rows(directory / store.LEDGER, round))
        if (str(ledger.up), str(ledger.down)) != (metadata["bytes_up"], metadata["bytes_down"]):
            raise ValueError(f"its byte totals are not those of {store.LEDGER}, the run directory is half-written")
        last = Report(**json.loads(metadata["last"])) if "last" in metadata else None
    except RunDirectoryError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{path}: {error}") from error
    if len(history) != (rows := round * fed._taking_part(len(fed))):
        raise RunDirectoryError(
            f"{directory / store.METRICS}: has {len(history)} rows of the first {round} rounds, must be {rows}: the"
            " directory is half-written"
        )
    fed.memory = {name: tensor.to(fed.device) for name, tensor in memory.items()}
    fed.last = last
    fed.round, fed.history, fed.ledger = round, history, ledger


def about(directory: Path) -> dict[str, Any]:
    """What a run directory or a store of clients holds: rounds, clients, bytes of a client, density of μ.

    Raises RunDirectoryError for a directory that is neither.
    """
    if (directory / DATABASE).is_file():
        return about_database(directory)
    config = store.read_config(directory)
    place = config["settings"].get("store", IN_MEMORY)
    found: dict[str, Any] = {"method": config["method"]["name"], "store": place, "clients": config["clients"]}
    if place != IN_MEMORY:
        return found | about_database(Path(place))
    round, path = store.last_checkpoint(directory)
    metadata, shapes = store.look_into(path)
    found |= {"rounds": round}
    if RECORDS + "records" in shapes:
        tensors, _ = store.load_checkpoint(path, {}, also=("clients", "server/", RECORDS))
        lengths, nonzeros = tensors[RECORDS + "length"], tensors[RECORDS + "nonzeros"]
        return found | totals(len(lengths), int(lengths.sum()), int(nonzeros.sum()), json.loads(metadata["records"]))
    touched = shapes.get("clients", [config["clients"]])[0]
    with safe_open(path, framework="pt") as file:
        size = sum(file.get_tensor(name).nbytes for name in shapes if name.startswith(CLIENT))
    return found | totals(touched, size, None, {})
