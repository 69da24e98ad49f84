"""One run: trained to its last round, resumed, and what it leaves in its directory."""

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastfact import data
from fastfact.base import files
from fastfact.experiment import build, probes, report
from fastfact.experiment.config import SIMULATION, Config
from fastfact.federation import Client, Federation, newcomers
from fastfact.federation.client import memory
from fastfact.federation.server.processes import Group
from fastfact.federation.storage import run_directory
from fastfact.federation.storage.states import DATABASE, MEMORY, about_database

STARTED = "run.json"
"""The whole configuration of a run, for `fastfact resume`."""


def check_directory(config: Config, directory: Path, resume: bool) -> None:
    """Raise ValueError unless `directory` is new (or empty), or holds this very run, with the rounds that it saved.

    resume: a finished run may have more rounds than it was begun with, unless its learning rate falls over these.
    """
    if files.is_vacant(directory, STARTED):
        _check_new_store(config, directory)
        return
    if not (directory / run_directory.CONFIG).is_file():
        raise ValueError(
            f"{directory} exists, is not empty and holds no run ({run_directory.CONFIG} is missing); choose another"
            " --out"
        )
    written = run_directory.read_config(directory)
    if different := differences(written["source"], config):
        raise ValueError(f"{directory} holds another run ({'; '.join(different)}); choose another --out, or delete it")
    over = written["settings"].get("schedule_rounds", 0)
    if config.schedule_rounds is None and config.schedule != "constant" and config.rounds > over:
        raise ValueError(
            f"rounds={config.rounds}: the learning rate of the run in {directory} falls to 0 over its {over} rounds"
            f" (schedule={config.schedule!r}, schedule_rounds was not given), nothing would be learned after them; must"
            f" be at most {over}, or begin another run with schedule_rounds={config.rounds} in another --out"
        )
    _check_store_of(config, directory, written)
    done = _rounds(config, directory)
    if not done and not finished(config, directory):
        _check_nothing_lost(config, directory, written["settings"].get("store", MEMORY))
    if done > config.rounds:
        raise ValueError(f"rounds={config.rounds}: {directory} has {done} already; choose another --out, or delete it")
    if not resume and (directory / report.RESULT).is_file() and not finished(config, directory):
        raise ValueError(
            f"{directory} exists and is not empty: it holds this run, finished after {done} rounds; choose another"
            " --out, or --resume it"
        )


def _check_new_store(config: Config, directory: Path) -> None:
    """Raise ValueError for a store that cannot be that of a new run in `directory`."""
    if config.store == MEMORY:
        return
    store, out = (Path(os.path.realpath(path)) for path in (config.store, directory))
    if store == out or out in store.parents or store in out.parents:
        raise ValueError(f"store={config.store!r}: must stand beside --out {directory}, neither inside the other")
    about = about_database(store) if (store / DATABASE).is_file() else {"rounds": 0}
    if about["rounds"] or "id" in about:
        raise ValueError(
            f"store={config.store!r}: holds the clients of a run, which goes on by run --resume DIR; choose another"
            " --store, or delete it"
        )


def _check_store_of(config: Config, directory: Path, written: Mapping[str, Any]) -> None:
    """Raise ValueError for a store that is not that of the run in `directory`, whose config.json is `written`."""
    if config.store != MEMORY and (Path(config.store) / DATABASE).is_file():
        here, there = written.get("id"), about_database(Path(config.store)).get("id")
        if here is not None and there is not None and here != there:
            raise ValueError(
                f"store={config.store!r}: holds the clients of another run ({there[:8]}, the one in {directory} is"
                f" {here[:8]}); say where its own are, run --resume {directory} --store DIR"
            )


def _rounds(config: Config, directory: Path) -> int:
    """How many rounds of a run directory can be gone on from; 0 for a new one."""
    if config.store == MEMORY:
        return max(run_directory.checkpoints(directory), default=0)
    if not (directory / run_directory.CONFIG).is_file() or not (Path(config.store) / DATABASE).is_file():
        return 0
    return about_database(Path(config.store))["rounds"]


def _check_nothing_lost(config: Config, directory: Path, store: str) -> None:
    """Raise ValueError if rounds of the run in `directory`, whose clients were in `store`, were saved: it cannot go on
    from them, and to begin again would overwrite what is left of it."""
    saved = (directory / report.RESULT).is_file() or bool(run_directory.checkpoints(directory))
    place = directory / run_directory.CHECKPOINTS if config.store == MEMORY else Path(config.store) / DATABASE
    if store != MEMORY:
        # Rows of a round are written before the store has it; without its file nobody knows how many it had.
        saved |= _last_row(directory / report.METRICS) > (1 if place.is_file() else 0)
    if saved:
        raise ValueError(
            f"{directory} holds this run and has saved rounds, but there are none in {place} (it was begun with"
            f" store={store!r}): put them back, or say where they are now, run --resume {directory} --store DIR; to"
            " train it anew choose another --out, or delete it"
        )


def _last_row(path: Path) -> int:
    """The round of the last whole row, 0 without any."""
    for line in reversed(path.read_bytes().splitlines() if path.is_file() else []):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["round"])
    return 0


def differences(there: Mapping[str, Any], config: Config) -> list[str]:
    """In what the identity of `config` differs from `there`, the same as it was read from a file."""
    # What a version did not know yet had its default.
    there = Config().identity() | dict(there)
    now = json.loads(json.dumps(config.identity()))
    if _same_file(there["init_from"], now["init_from"]):
        there["init_from"] = now["init_from"]
    return [f"{name} is {there.get(name)!r} there, {now[name]!r} now" for name in now if there.get(name) != now[name]]


def _same_file(there: str | None, now: str | None) -> bool:
    """Whether a file is that of a run: an earlier version wrote down relative names, and it may have been moved."""
    if there is None or now is None:
        return there == now
    moved = os.path.basename(there) == os.path.basename(now) and not os.path.exists(there)
    return moved or os.path.abspath(there) == now


def options(directory: Path, given: bool = False) -> dict[str, Any]:
    """What the run in `directory`, which is to go on, was begun with, by names of `Config`; empty for a run of a
    version that did not write it down. given: options come along, with which a run begins that was stopped before it
    had written anything.

    Raises ValueError where there is nothing to go on from.
    """
    if not directory.exists():
        raise ValueError(f"{directory}: nothing to resume, there is no such directory")
    if (directory / STARTED).is_file():
        return _written(directory)
    if not (directory / run_directory.CONFIG).is_file() and not (given and files.is_vacant(directory, STARTED)):
        raise ValueError(f"{directory}: nothing to resume, there is no run in it ({run_directory.CONFIG} is missing)")
    return {}


def stopped(config: Config, directory: Path) -> str:
    """Where a run that was stopped goes on, for people."""
    return f"{_rounds(config, directory)} of {config.rounds} rounds are kept, fastfact run --resume {directory} goes on"


def finished(config: Config, directory: Path) -> bool:
    """Whether `directory` holds this run with all its rounds."""
    if not (directory / report.RESULT).is_file():
        return False
    there = report.read_cell(directory).result["config"]
    return there["rounds"] == config.rounds and not differences(there, config)


def run(
    config: Config,
    directory: Path,
    on_round: Callable[[int, float], None] | None = None,
    resume: bool = False,
    group: Group | None = None,
) -> dict[str, Any]:
    """Train, leave a complete run directory, and return what its result.json says.

    A run that was stopped goes on, one that is finished is left as it is; with `resume` it gets the rounds it lacks.
    on_round(round, mean accuracy) after each round. Checkpoints ten times on the way, and when it is stopped.
    group: see `Federation`; its root alone writes.

    Raises ValueError for another run in `directory`, InUseError (one too) if another process has it.
    """
    group = group or Group()
    if config.recorders() and group.size > 1:
        raise ValueError(f"record={config.record!r}: needs all clients in one process; here are {group.size}")
    group.root(lambda: check_directory(config, directory, resume))
    if config.dataset != SIMULATION and not group.root(lambda: finished(config, directory)):
        # Data that are missing are an error before the directory is touched; what is read here is kept.
        data.load(config.dataset, config.data_dir)
    with contextlib.ExitStack() as held:
        group.root(lambda: _begin(config, directory, resume, held))
        result = group.root(lambda: report.read_cell(directory).result if finished(config, directory) else None)
        return result or _train(config, directory, on_round, group)


def _begin(config: Config, directory: Path, resume: bool, held: contextlib.ExitStack) -> None:
    """Hold the directory, and write down what is to be run."""
    held.enter_context(files.locked(directory))
    check_directory(config, directory, resume)
    for folder in (directory, directory / probes.FOLDER):
        files.remove_unfinished(folder)
    path, content = directory / STARTED, json.loads(json.dumps(asdict(config)))
    if not path.is_file() or files.read_sealed(path).get("config") != content:
        files.write_json(path, {"config": content}, sealed=True, indent=1)


def started(directory: Path) -> Config:
    """The configuration that the run in `directory` was begun with. Raises ValueError where there is none."""
    path = directory / STARTED
    if not path.is_file():
        config = directory / run_directory.CONFIG
        why = "it is of an earlier version; resume it with run --resume" if config.is_file() else "there is no run"
        raise ValueError(f"{directory}: nothing to resume without options: {why}")
    return Config(**_written(directory))


def _written(directory: Path) -> dict[str, Any]:
    """What run.json says, by names of `Config`; its values are not checked, as others may take their place."""
    path = directory / STARTED
    values = files.read_sealed(path).get("config")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: has no config")
    if unknown := sorted(values.keys() - {item.name for item in fields(Config)}):
        raise ValueError(f"{path}: has {unknown[0]!r}, which is not known here")
    return values


def _train(
    config: Config, directory: Path, on_round: Callable[[int, float], None] | None, group: Group
) -> dict[str, Any]:
    memory.forget_peak()
    recorders = config.recorders()
    parts = build.parts(config)
    if group.size == 1 and len(parts.clients) <= report.MOST_CLIENTS and parts.clients[0].group is not None:
        recorders = tuple(sorted({*recorders, "signal"}))
    if group.root(lambda: _rounds(config, directory) > 0):
        fed = Federation.load(
            directory,
            parts.model,
            parts.clients,
            parts.method,
            parts.augment,
            device=config.device,
            store=config.store,
            memory_limit=config.memory_limit,
            group=group,
        )
        group.root(lambda: probes.forget(directory, fed.round))
    else:
        fed = build.assemble(config, parts, group)
    with contextlib.closing(fed.states):
        return _finish(fed, config, parts, directory, on_round, recorders)


def _finish(
    fed: Federation,
    config: Config,
    parts: build.Parts,
    directory: Path,
    on_round: Callable[[int, float], None] | None,
    recorders: Sequence[str],
) -> dict[str, Any]:
    """The rounds that are left, and result.json."""

    def keep() -> None:
        probes.write(fed, recorders, config.rounds, directory)

    def after_round(number: int, rows: list[dict[str, Any]]) -> None:
        keep()
        if on_round:
            on_round(number, float(np.mean([row["accuracy"] for row in rows])))

    keep()
    fed.fit(
        config.rounds - fed.round,
        directory,
        checkpoint_every=-(-config.rounds // 10),
        on_round=after_round,
        callbacks=build.callbacks(config, directory) if fed.group.rank == 0 else (),
    )
    if fed.history and all(row["left_out"] for row in fed.history.last()):
        raise ValueError(
            f"no client could report when it last took part ({report.left_out_line(report.left_out(fed.history))}):"
            f" lr={config.lr:g} may be too high"
        )
    similarity = _similarity(fed)
    if similarity and fed.group.rank == 0:
        run_directory.save_tensors(directory / report.SIMILARITY, similarity)
    last = fed.history.last()

    def mean(key: str) -> float | None:
        values = [row[key] for row in last if row[key] is not None]
        return float(np.mean(values)) if values else None

    result = {
        "config": asdict(config),
        "summary": {
            **{key: mean(key) for key in ("accuracy", "accuracy_before", "density")},
            **({"epsilon": fed.epsilon()} if config.noise else {}),
            **({"time": fed.history.time()} if fed.clock else {}),
            "parameters": _parameters(fed),
            "client_std": float(np.std([row["accuracy"] for row in last])),
            "uplink": fed.ledger.up,
            "downlink": fed.ledger.down,
            "formula": fed.ledger.formula(),
            "seconds": fed.history.total("seconds"),
            "memory": memory.peak(),
            "left_out": report.left_out(fed.history),
        },
        "downloaded": fed.accuracies_as_downloaded() if len(fed) <= report.MOST_CLIENTS else None,
        "newcomers": _join(fed, parts.newcomers),
        "signal": {name: float(value) for name, value in probes.signal(fed).items()} if "signal" in recorders else {},
        "layers": {name: float(np.mean(values)) for name, values in fed.density().items()},
    }
    fed.group.root(lambda: files.write_json(directory / report.RESULT, result, sealed=True, indent=1))
    return result


def _join(fed: Federation, clients: Sequence[Client]) -> dict[str, float]:
    """Mean accuracy of clients that join after training, by how they do it; only what the method allows."""
    accuracy = {}
    for how in newcomers.HOW if clients else ():
        if how == "ensemble" and fed.group.size > 1:
            continue
        with contextlib.suppress(newcomers.NothingPersonal):
            accuracy[how] = float(np.mean(np.array(fed.join(clients, how).accuracy, float)))
    return accuracy


def _parameters(fed: Federation) -> float:
    """How many numbers a client's model has, of μ only the nonzeros; mean over clients."""
    dense = sum(info.numel for name, info in fed.infos.items() if not info.buffer and name not in fed.sparse)
    state = fed.states.load(fed.here, names=fed.sparse)
    return dense + sum(fed.group.each(sum(mu.count_nonzero().item() for mu in state.values()))) / len(fed)


def _similarity(fed: Federation) -> dict[str, torch.Tensor]:
    """Cosine of u and of v of the layer before the classifier, float32 [K, K]; nothing for a model without them."""
    layer = max(1, max(info.layers for info in fed.infos.values()) - 1)
    roles = {info.role for info in fed.infos.values() if info.layer == layer and not info.norm}
    if len(fed) > report.MOST_CLIENTS or not {"u", "v"} <= roles:
        return {}
    return {name: fed.similarity(name).float() for name in ("u", "v")}
