"""Experiments by configuration: what `fastfact run` and `fastfact compare` do, without the terminal.

A cell is one run: one method, one seed, everything else from the configuration. Cells know nothing of each other, so a
comparison gives the same numbers however many of them run at once.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tomllib
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fastfact
from fastfact import data, files, methods, models
from fastfact.experiment import probes as record
from fastfact.experiment import report
from fastfact.federation import Client, Federation, Strategy
from fastfact.federation.client.memory import keep_freed
from fastfact.federation.newcomers import HOW as JOIN
from fastfact.federation.server.processes import Group
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.federation.storage import run_directory
from fastfact.federation.storage.states import DATABASE, MEMORY, about_database
from fastfact.kinds import type_error
from fastfact.methods.fedfac import communalities, shared_mask
from fastfact.nn.choice import processor
from fastfact.nn.schedule import Schedule
from fastfact.nn.specs import Hadamard
from fastfact.ops.backends import backends

HELP = {
    "method": "Method, see `fastfact info`.",
    "dataset": "Data set, see `fastfact info`.",
    "data_dir": "Folder of the data sets that are not built in [default: $FASTFACT_DATA, or data].",
    "scenario": "How labels and samples are spread over clients.",
    "clients": "Number of clients.",
    "rounds": "Number of rounds.",
    "epochs": "Local epochs a round.",
    "batch_size": "Samples a local step.",
    "lr": "Learning rate.",
    "momentum": "Momentum.",
    "weight_decay": "Weight decay.",
    "l1": "λ, the L1 penalty on μ of factorized layers [default: the method's].",
    "warmup": "Rounds with dense μ; after them it is pruned and trains on its support [default: all rounds].",
    "target_density": "Fraction of μ of each layer that is kept after --warmup [default: what --l1 leaves].",
    "regrow_every": "Rounds between changes of the support after --warmup [default: never].",
    "sketch": "Factorized-FL and SimFed match clients by sketches of so many bytes, 0 for v itself; others ignore it"
    " [default: the method's].",
    "participation": "Fraction of the clients that take part in a round.",
    "model": "Network, see `fastfact info`.",
    "width": "Width multiplier of the network.",
    "init_from": "Pretrained weights to start from, a safetensors file [default: random weights].",
    "alpha": "Concentration of the Dirichlet partition (non-IID scenarios).",
    "classes_per_client": "Classes of a client in the pathological scenario.",
    "samples": "At most so many samples a client, train and test together; 0 for all.",
    "test_fraction": "Fraction of a client's samples held out for testing.",
    "shift": "Augmentation: random shift by up to so many pixels.",
    "augment": "More augmentation: none, flip (mirrored), or full (cropped, mirrored, colours changed).",
    "cohort": "How many clients train together: a number, threads (one on each core), or auto, the fastest.",
    "device": "Where to train: cpu, cuda, or cuda:1 [default: cpu; under torchrun each process its own GPU, if any].",
    "store": "Where clients are between rounds: memory, or a directory for very many.",
    "store_values": "Their numbers there: exact or bfloat16.",
    "memory_limit": "GiB of memory the run may take [default: no limit].",
    "seed": "Seed of the partition, the initial weights and the training; compare counts up from it.",
    "newcomers": "Fraction of the clients that are kept out of training and join at the end.",
    "pretrain": "Epochs on the pooled training samples that make the initial model; 0 for a random one.",
    "only": "Of the clients the scenario makes only these, counted from 1: 1,3.",
    "record": "More to keep of every round, see `fastfact info`: similarity,matching.",
}
"""The options of the command line, with their help; in a file there is also `settings`, a table for each method."""


SIMULATION = "simulation"
"""FedFac's simulated clients as a data set, whatever the scenario; `Config.simulation` are its settings."""

AUGMENT = {"none": {}, "flip": {"flip": True}, "full": {"crop": True, "flip": True, "jitter": True}}


@dataclass(frozen=True)
class Config:
    """One run. The same names serve as keys of a TOML file and, with hyphens, as options of the command line."""

    method: str = "factorized-fl-alpha"
    dataset: str = "digits"
    data_dir: str | None = None
    scenario: str = "permuted-non-iid"
    clients: int = 20
    rounds: int = 20
    epochs: int = 2
    batch_size: int = 32
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-6
    l1: float | None = None
    warmup: int | None = None
    target_density: float | None = None
    regrow_every: int | None = None
    sketch: int | None = None
    participation: float = 1.0
    model: str = "resnet9"
    width: float = 0.25
    init_from: str | None = None
    alpha: float = 0.5
    classes_per_client: int = 2
    samples: int = 0
    test_fraction: float = 0.2
    shift: int = 0
    augment: str = "none"
    cohort: str = "auto"
    device: str | None = None
    store: str = "memory"
    store_values: str = "exact"
    memory_limit: float | None = None
    seed: int = 0
    newcomers: float = 0.0
    pretrain: int = 0
    only: str = ""
    record: str = ""
    simulation: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and item.type in (float, float | None):
                object.__setattr__(self, item.name, float(value))
            elif item.name == "cohort" and type(value) is int:
                object.__setattr__(self, item.name, str(value))
            elif rule := type_error(value, item.type):
                raise ValueError(f"{item.name}={value!r}, must be {rule.removesuffix(' or None')}")
        for name, known in (
            ("dataset", (*data.DATASETS, SIMULATION)),
            ("scenario", data.SCENARIOS),
            ("model", models.MODELS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}, must be one of {', '.join(known)}")
        for method in (self.method, *self.settings):
            if method not in methods.names():
                raise ValueError(f"method={method!r}, must be one of {', '.join(methods.names())}")
        if self.cohort not in ("auto", "threads") and not (self.cohort.isdigit() and int(self.cohort) > 0):
            raise ValueError(f"cohort={self.cohort!r}, must be auto, threads or a number of at least 1")
        for name in ("target_density", "regrow_every") if self.warmup is None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)}: needs warmup")
        if self.warmup is not None and self.target_density is None and self.l1 is None:
            raise ValueError(f"warmup={self.warmup}: needs target_density, or l1 if λ is to decide what stays")
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds}, must be at least 1")
        if not 0 <= self.newcomers < 1:
            raise ValueError(f"newcomers={self.newcomers}, must be at least 0 and below 1")
        for name in ("shift", "samples", "pretrain"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}, must not be negative")
        if self.augment not in AUGMENT:
            raise ValueError(f"augment={self.augment!r}, must be one of {', '.join(AUGMENT)}")
        self.kept()
        record.names_of(self.record)
        for method, settings in self.settings.items():
            if not isinstance(settings, dict):
                raise ValueError(f"settings.{method}={settings!r}, must be a table: settings.METHOD.KEY = VALUE")

    def kept(self) -> list[int]:
        """The places of the clients of `only`, from 0; empty for all."""
        numbers = [part.strip() for part in self.only.split(",") if part.strip()]
        if not all(part.isdigit() and 1 <= int(part) <= self.clients for part in numbers):
            raise ValueError(f"only={self.only!r}, must be numbers of clients, 1 … {self.clients}, separated by commas")
        return [int(part) - 1 for part in numbers]


def parse_setting(text: str) -> tuple[str, str, Any]:
    """ "[METHOD.]KEY=VALUE" → (method or "", key, value); VALUE as in TOML, anything else is a string."""
    name, equals, value = text.partition("=")
    method, _, key = name.strip().rpartition(".")
    if not equals or not key:
        raise ValueError(f"--set {text!r}, must be KEY=VALUE or METHOD.KEY=VALUE")
    try:
        return method, key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return method, key, value.strip()


def read_file(path: Path, allowed: Sequence[str]) -> dict[str, Any]:
    """The TOML configuration in `path`, keys with underscores. Raises ValueError for keys that are not `allowed`."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"config={str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None
    content = {key.replace("-", "_"): value for key, value in content.items()}
    unknown = [key for key in content if key not in allowed]
    if unknown:
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(allowed)}")
    return content


def with_settings(config: Config, texts: Sequence[str], names: Sequence[str] | None = None) -> Config:
    """`config` with the --set texts added; KEY without METHOD is for every method in `names`, or the one configured."""
    settings = {method: dict(own) for method, own in config.settings.items()}
    for text in texts:
        method, key, value = parse_setting(text)
        for target in (method,) if method else names or (config.method,):
            settings.setdefault(target, {})[key] = value
    return replace(config, settings=settings)


def cell_config(config: Config, method: str, seed: int) -> Config:
    """The configuration of one cell of a comparison: only its own method's settings."""
    own = {method: config.settings[method]} if config.settings.get(method) else {}
    return replace(config, method=method, seed=seed, settings=own)


KEPT = ("share_classifier", "share_norm", "share_norm_statistics")


def strategy(config: Config) -> Strategy:
    """The method of a configuration, with its settings.

    Where labels are permuted, classifiers and batch-norm stay with the client for every method, as in the papers'
    comparison, unless the method's own settings say otherwise. FedDecomp leaves those layers of the built-in models
    whole that its paper does; with pretrained weights, u, v and μ start as these ("svd"), not at random.
    """
    own = {} if config.l1 is None else {"l1": config.l1}
    if config.method == methods.FedDecomp.name:
        own["whole"] = models.MODELS[config.model].whole
    if config.init_from is not None and "init" in {f.name for f in fields(STRATEGIES[config.method])}:
        own["init"] = "svd"
    if config.sketch is not None and hasattr(STRATEGIES[config.method], "sketch"):
        own["sketch"] = config.sketch
    if data.SCENARIOS[config.scenario].permuted:
        own |= dict.fromkeys(KEPT, False)
    made = methods.make(config.method, **own | config.settings.get(config.method, {}))
    if config.init_from is not None and isinstance(made.spec(), Hadamard):
        raise ValueError(
            f"init_from={config.init_from!r}: the factors of {config.method} cannot start as given weights"
        )
    return made


def sharing_note(config: Config) -> str | None:
    """What `strategy` switched off, for people."""
    if not data.SCENARIOS[config.scenario].permuted:
        return None
    note = "labels are permuted: classifier and batch-norm are not shared, by any method"
    asked = {f"{m}.{key}" for m, own in config.settings.items() for key in KEPT if own.get(key)}
    return f"{note}, but for {', '.join(sorted(asked))}" if asked else note


def _parts(config: Config) -> dict[str, Any]:
    """What a federation is made of; `newcomers` are the clients that join at its end."""
    method = strategy(config)
    if config.dataset == SIMULATION:
        made, method = _simulated(config, method)
        augment, words = None, {}
    else:
        dataset = data.load(config.dataset, config.data_dir)
        made = data.make_clients(
            dataset,
            config.scenario,
            config.clients,
            config.seed,
            alpha=config.alpha,
            test_fraction=config.test_fraction,
            classes_per_client=config.classes_per_client,
            samples=config.samples or None,
        )
        augment = _augment(config, dataset)
        words = {} if dataset.vocabulary is None else {"vocabulary": dataset.vocabulary}
    shape, classes = list(made[0].train[0].shape[1:]), made[0].num_classes
    if config.init_from is not None:
        words["weights"] = config.init_from
    here = config.kept() or list(range(len(made)))
    order = np.random.default_rng([config.seed, 3]).permutation(here)
    late = sorted(order[: round(config.newcomers * len(here))].tolist())
    clients = {k: made[k] for k in here}
    model = functools.partial(models.build, config.model, shape, classes, config.width, **words)
    trained = [clients[k] for k in here if k not in late]
    if not trained:
        raise ValueError(f"newcomers={config.newcomers}: leaves none of {len(here)} clients to train")
    return {
        "model": functools.partial(_pretrained, model, trained, config) if config.pretrain else model,
        "clients": trained,
        "newcomers": [clients[k] for k in late],
        "method": method,
        "augment": augment,
    }


def _pretrained(build: Callable[[], nn.Module], clients: Sequence[Client], config: Config) -> nn.Module:
    """The model after `config.pretrain` epochs of plain training on the training samples of all clients."""
    model = build()
    x, y = (torch.cat([client.train[part] for client in clients]) for part in (0, 1))
    momentum = {"momentum": config.momentum, "weight_decay": config.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, **momentum)
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
        method = replace(method, shared_channels={"fc1": shared.nonzero().flatten().tolist()})
    return made.clients, method


def _augment(config: Config, dataset: data.Dataset) -> Callable | None:
    if config.augment == "none" and not config.shift:
        return None
    if dataset.vocabulary is not None:
        name = "shift" if config.shift else "augment"
        raise ValueError(f"{name}={getattr(config, name)!r}: the samples of {dataset.name} are no images")
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
    return _federation(config, _parts(config), group)


def check(config: Config, group: Group | None = None) -> None:
    """Raise ValueError for anything out of range; nothing is measured, and no file touched."""
    federation(replace(config, store=MEMORY, cohort="1" if config.cohort == "auto" else config.cohort), group)


def _federation(config: Config, parts: Mapping[str, Any], group: Group | None) -> Federation:
    return Federation(
        **{name: part for name, part in parts.items() if name != "newcomers"},
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        participation=config.participation,
        sparsity=schedule(config),
        cohort=int(config.cohort) if config.cohort.isdigit() else config.cohort,
        device=config.device,
        store=config.store,
        store_values=config.store_values,
        memory_limit=config.memory_limit,
        seed=config.seed,
        source=_identity(config),
        group=group,
    )


def _identity(config: Config) -> dict[str, Any]:
    """All that decides the numbers of a run but its length; where data and clients lie and train, and how many fit, do
    not, but for rounding."""
    without = ("rounds", "data_dir", "device", "store", "memory_limit")
    return {name: value for name, value in asdict(config).items() if name not in without}


def check_directory(config: Config, directory: Path, resume: bool) -> None:
    """Raise ValueError unless `directory` is new (or empty), or with `resume` holds this very run."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not resume or not directory.is_dir():
        raise ValueError(f"{directory} exists and is not empty; choose another --out, or --resume the run in it")
    # A run of a version that did not know a field has its default.
    there = _identity(Config()) | run_directory.read_config(directory)["source"]
    different = [
        f"{name} is {there.get(name)!r} there, {value!r} now"
        for name, value in _identity(config).items()
        if there.get(name) != value
    ]
    if different:
        raise ValueError(f"{directory} holds another run ({'; '.join(different)}); choose another --out, or delete it")
    done = _rounds(config, directory)
    if done > config.rounds:
        raise ValueError(f"rounds={config.rounds}: {directory} has {done} already; choose another --out, or delete it")


def _rounds(config: Config, directory: Path) -> int:
    """How many rounds of a run directory can be gone on from; 0 for a new one."""
    if config.store == MEMORY:
        return max(run_directory.checkpoints(directory), default=0)
    if not (directory / run_directory.CONFIG).is_file() or not (Path(config.store) / DATABASE).is_file():
        return 0
    return about_database(Path(config.store))["rounds"]


def finished(config: Config, directory: Path) -> bool:
    """Whether `directory` holds this run with all its rounds."""
    if not (directory / report.RESULT).is_file():
        return False
    there = asdict(Config()) | report.read_cell(directory).result["config"]
    return json.loads(json.dumps(there)) == json.loads(json.dumps(asdict(config)))


def run(
    config: Config,
    directory: Path,
    on_round: Callable[[int, float], None] | None = None,
    resume: bool = False,
    group: Group | None = None,
) -> dict[str, Any]:
    """Train, leave a complete run directory, and return what its result.json says. Continues one if `resume`.

    on_round(round, mean accuracy) after each round. Checkpoints ten times on the way.
    group: see `Federation`; its root alone writes.
    """
    group = group or Group()
    recorders = record.names_of(config.record)
    if recorders and group.size > 1:
        raise ValueError(f"record={config.record!r}: needs all clients in one process; here are {group.size}")
    group.root(lambda: check_directory(config, directory, resume))
    parts = _parts(config)
    newcomers = parts.pop("newcomers")
    if group.root(lambda: _rounds(config, directory) > 0):
        elsewhere = {"device": config.device, "store": config.store, "memory_limit": config.memory_limit}
        fed = Federation.load(directory, **parts, **elsewhere, group=group)
        group.root(lambda: record.forget(directory, fed.round))
    else:
        fed = _federation(config, parts, group)

    def keep() -> None:
        record.write(fed, recorders, config.rounds, directory)

    def after_round(number: int, rows: list[dict[str, Any]]) -> None:
        keep()
        if on_round:
            on_round(number, float(np.mean([row["accuracy"] for row in rows])))

    keep()
    fed.fit(config.rounds - fed.round, directory, checkpoint_every=-(-config.rounds // 10), on_round=after_round)
    similarity = _similarity(fed)
    if similarity and group.rank == 0:
        run_directory.save_tensors(directory / report.SIMILARITY, similarity)
    last = fed.history.last()

    def mean(key: str) -> float | None:
        values = [row[key] for row in last if row[key] is not None]
        return float(np.mean(values)) if values else None

    result = {
        "config": asdict(config),
        "summary": {
            **{key: mean(key) for key in ("accuracy", "accuracy_before", "density")},
            "parameters": _parameters(fed),
            "client_std": float(np.std([row["accuracy"] for row in last])),
            "uplink": fed.ledger.up,
            "downlink": fed.ledger.down,
            "formula": fed.ledger.formula(),
            "seconds": fed.history.total("seconds"),
        },
        "newcomers": _join(fed, newcomers),
        "layers": {name: float(np.mean(values)) for name, values in fed.density().items()},
    }
    group.root(lambda: files.write_json(directory / report.RESULT, result, sealed=True, indent=1))
    return result


def _join(fed: Federation, newcomers: Sequence[Client]) -> dict[str, float]:
    """Mean accuracy of clients that join now, by how they do it; only what the method allows."""
    found = {}
    for how in JOIN if newcomers else ():
        with contextlib.suppress(ValueError):
            found[how] = float(np.mean(fed.join(newcomers, how).accuracy))
    return found


def _parameters(fed: Federation) -> float:
    """How many numbers a client's model has, of μ only the nonzeros; mean over clients."""
    dense = sum(info.numel for name, info in fed.infos.items() if not info.buffer and name not in fed.sparse)
    state = fed.states.load(fed.here, names=fed.sparse)
    return dense + sum(fed.group.each(sum(mu.count_nonzero().item() for mu in state.values()))) / len(fed)


def _similarity(fed: Federation) -> dict[str, torch.Tensor]:
    """Cosine of u and of v of the layer before the classifier, float32 [K, K]; nothing for a model without them."""
    if len(fed) > report.MOST_CLIENTS:
        return {}
    with contextlib.suppress(ValueError):
        return {name: fed.similarity(name).float() for name in ("u", "v")}
    return {}


def jobs_here() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    memory = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": processor(), "cores": jobs_here(), "memory_gib": memory, "gpus": gpus, "system": platform.platform()}


def versions() -> dict[str, str | None]:
    """Versions of the package, Python and what the results depend on."""
    found: dict[str, str | None] = {"fastfact": fastfact.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "scikit-learn", "safetensors", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit of the checkout the package runs from, with "-dirty" where it differs in more than the results it
    wrote; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict[str, Any]:
    """What goes beside every result."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def _worker(connection: Connection) -> None:
    """Run the cells that arrive, one torch thread, until None arrives or the parent is gone."""
    torch.set_num_threads(1)
    keep_freed()
    parent = multiprocessing.parent_process()
    while (task := connection.recv()) is not None:
        config, directory = task

        def on_round(number: int, accuracy: float) -> None:
            if not parent.is_alive():
                sys.exit(1)
            connection.send(("round", number, accuracy))

        try:
            connection.send(("done", run(config, directory, on_round, resume=True), None))
        except ValueError as error:
            connection.send(("failed", str(error), None))
        except Exception:
            connection.send(("failed", traceback.format_exc(), None))


@contextlib.contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C: the parent alone decides, and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_cells(
    cells: Sequence[tuple[Config, Path]], jobs: int, on_event: Callable[[Path, str, Any, Any], None]
) -> dict[Path, str]:
    """Run cells in `jobs` worker processes; directory → reason for those that failed.

    on_event(directory, kind, …): ("round", number, accuracy), ("done", result, None) or ("failed", reason, None).
    Every worker computes on one thread, so that results do not depend on `jobs`. Ends the workers when interrupted.
    """
    context = multiprocessing.get_context("spawn")
    waiting, failed = deque(cells), {}
    busy: dict[Connection, tuple[Any, Path]] = {}
    workers = []

    def start() -> None:
        here, there = context.Pipe()
        with _quiet_interrupts(), _one_thread():
            process = context.Process(target=_worker, args=(there,), daemon=True)
            process.start()
        there.close()
        workers.append(process)
        give(here, process)

    def give(connection: Connection, process) -> None:
        config, directory = waiting.popleft()
        busy[connection] = process, directory
        connection.send((config, directory))

    try:
        while waiting or busy:
            while waiting and len(busy) < jobs:
                start()
            for connection in wait(list(busy)):
                process, directory = busy[connection]
                try:
                    kind, *details = connection.recv()
                except (EOFError, OSError):
                    process.join()
                    kind, details = "failed", [f"its process ended with exit code {process.exitcode}", None]
                on_event(directory, kind, *details)
                if kind == "round":
                    continue
                del busy[connection]
                if kind == "failed":
                    failed[directory] = details[0]
                if process.is_alive() and waiting:
                    give(connection, process)
                elif process.is_alive():
                    connection.send(None)
    finally:
        for process in workers:
            if busy:
                process.terminate()
            process.join()
    return failed


def run_missing(
    cells: Mapping[str, Config], directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]
) -> dict[str, str]:
    """Run those of the cells, by directory name, that are not finished below `directory`; name → reason of failed ones.

    on_event(name, kind, …): what `run_cells` says, or ("found", result, None) for one that is finished.
    """
    waiting = []
    for name, config in cells.items():
        path = directory / report.CELLS / name
        if finished(config, path):
            on_event(name, "found", report.read_cell(path).result, None)
        else:
            waiting.append((config, path))
    failed = run_cells(waiting, jobs, lambda path, *event: on_event(path.name, *event))
    return {path.name: reason for path, reason in failed.items()}


def about() -> dict[str, dict[str, Any]]:
    """What `fastfact info` shows, part by part."""
    served = {name: f"{'serves' if b.available else 'does not serve'}: {b.detail}" for name, b in backends().items()}
    return {
        "versions": {**versions(), "commit": commit()},
        "hardware": hardware(),
        "backends": served,
        "data sets": {name: _summary(load) for name, load in data.DATASETS.items()},
        "scenarios": {name: scenario.summary for name, scenario in data.SCENARIOS.items()},
        "models": {name: model.summary for name, model in models.MODELS.items()},
        "methods": {name: _summary(STRATEGIES[name]) for name in methods.names()},
        "recorders": {name: recorder.summary for name, recorder in record.RECORDERS.items()},
    }


def _summary(thing: Any) -> str:
    """The first sentence of a docstring."""
    return " ".join((thing.__doc__ or "").split("\n\n")[0].split())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes started inside compute on one thread from their first import on."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass(frozen=True)
class Comparison:
    """Methods × seeds, the rest of the configuration the same. Directory name → cell."""

    config: Config
    methods: tuple[str, ...]
    seeds: int

    def __post_init__(self):
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ValueError(f"methods={','.join(self.methods)!r}, must be one or more names, each once")
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds}, must be at least 1")

    def cells(self) -> dict[str, Config]:
        seeds = range(self.config.seed, self.config.seed + self.seeds)
        return {f"{m}-seed{seed}": cell_config(self.config, m, seed) for m in self.methods for seed in seeds}

    def describe(self) -> dict[str, Any]:
        """What compare.json holds."""
        config = asdict(self.config)
        del config["method"]
        return {"methods": self.methods, "seeds": self.seeds, "cells": list(self.cells()), "config": config}

    def check(self, directory: Path) -> None:
        """Raise ValueError for anything wrong with a cell or with `directory`, before anything is written."""
        for method in self.methods:
            federation(cell_config(self.config, method, self.config.seed))
        if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
            return
        if not (directory / report.COMPARISON).is_file():
            raise ValueError(f"{directory} exists, is not empty and holds no comparison; choose another --out")
        for name, config in self.cells().items():
            check_directory(config, directory / report.CELLS / name, resume=True)

    def run(self, directory: Path, jobs: int, on_event: Callable[[str, str, Any, Any], None]) -> dict[str, str]:
        """Run what is not finished, `jobs` cells at a time, then write metrics.jsonl; name → reason of failed cells."""
        cells = self.cells()
        (directory / report.CELLS).mkdir(parents=True, exist_ok=True)
        files.write_json(directory / report.COMPARISON, self.describe(), sealed=True, indent=1)
        failed = run_missing(cells, directory, jobs, on_event)
        if len(failed) < len(cells):
            done = report.read(directory)
            rows = [{"method": cell.method, "seed": cell.seed, **row} for cell in done for row in cell.rows]
            run_directory.write_rows(directory / report.METRICS, rows)
        return failed
