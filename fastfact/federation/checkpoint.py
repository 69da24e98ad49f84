"""A federation in its run directory (`store` has the files): opening one, checkpoints, and going on from the newest."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fastfact.federation import store, strategy
from fastfact.federation.config import check_settings, resolve
from fastfact.federation.exchange import Report
from fastfact.federation.history import History
from fastfact.federation.store import RunDirectoryError
from fastfact.federation.wire import Ledger

if TYPE_CHECKING:
    from fastfact.federation.loop import Federation

CLIENT, MEMORY = "client/", "server/memory/"


def open_directory(fed: "Federation", directory: Path) -> Path:
    """Make `directory` this federation's run directory: the rows in it are those of the rounds it has run."""
    config = json.loads(json.dumps(fed.config()))
    if (directory / store.CONFIG).exists():
        there = store.read_config(directory)
        if different := sorted(key for key in config if there.get(key) != config[key]):
            raise RunDirectoryError(f"{directory}: holds another run (its {different[0]} differs)")
        if any(round > fed.round for round in store.checkpoints(directory)):
            raise RunDirectoryError(f"{directory}: has rounds this federation has not run; go on with Federation.load")
    elif directory.exists() and any(directory.iterdir()):
        raise RunDirectoryError(f"{directory}: is not empty and no run directory ({store.CONFIG} is missing)")
    else:
        directory.mkdir(parents=True, exist_ok=True)
        store.write_text(directory / store.CONFIG, json.dumps(config, indent=2) + "\n")
    store.write_rows(directory / store.METRICS, fed.history)
    store.write_rows(directory / store.LEDGER, fed.ledger.rows())
    return directory


def save(fed: "Federation", directory: Path) -> None:
    """Write a checkpoint of the round the federation is at."""
    tensors = {CLIENT + name: tensor for name, tensor in fed.states.state.items()}
    tensors |= {MEMORY + name: tensor for name, tensor in fed.memory.items()}
    metadata = {"round": str(fed.round), "bytes_up": str(fed.ledger.up), "bytes_down": str(fed.ledger.down)}
    if fed.last is not None:
        metadata["last"] = json.dumps(dataclasses.asdict(fed.last))
    store.save_checkpoint(store.checkpoint_path(directory, fed.round), tensors, metadata)


def load(cls: type["Federation"], directory: Path, model, clients, method, augment, device) -> "Federation":
    """See `Federation.load`."""
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
    model = model or resolve(recorded)
    if model is None:
        raise RunDirectoryError(f"{directory}: the model {recorded!r} cannot be found again, pass model=")
    fed = cls.__new__(cls)
    fed.method, fed.settings, fed.source = copy.copy(method), settings, config.get("source", {})
    fed.identity = {"model": recorded, "augment": used, "samples": samples, "sample": sample}
    fed.augment = augment or (used and (resolve({"factory": used}) or used))
    fed._setup_model(model, device)
    if clients is not None:
        fed._setup_clients(clients)
        if fed._samples() != samples:
            raise ValueError(
                f"{directory}: clients= are {len(fed.clients)} clients with other numbers of samples than the run"
                f" ({k} clients), must be the same clients in the same order"
            )
    fed._setup_exchange(k)
    _restore(fed, directory, round, path)
    return fed


def _restore(fed: "Federation", directory: Path, round: int, path: Path) -> None:
    expected = {CLIENT + name: tensor for name, tensor in fed.states.state.items()}
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
    for name, tensor in fed.states.state.items():
        tensor.copy_(tensors[CLIENT + name])
    fed.memory = {n.removeprefix(MEMORY): t.to(fed.device) for n, t in tensors.items() if n.startswith(MEMORY)}
    fed.last = last
    fed.round, fed.history, fed.ledger = round, history, ledger
