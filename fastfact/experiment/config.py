"""The configuration of a run: what a command line and a TOML file say, checked. Imports PyTorch only to check names."""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fastfact.base.kinds import like, setting, value_error
from fastfact.base.settings import LOSSES, METRICS, FederationSettings

SIMULATION = "simulation"
"""FedFac's simulated clients as a data set, whatever the scenario; `Config.simulation` are its settings."""

AUGMENT = {"none": {}, "flip": {"flip": True}, "full": {"crop": True, "flip": True, "jitter": True}}
WHERE = ("data_dir", "device", "store", "memory_limit", "track")
"""Where data and clients lie and train, and who is told: nothing that decides numbers, but for rounding."""
PATHS = ("data_dir", "init_from", "store")
"""Absolute in a `Config`: a run may go on in another working directory."""


def _methods() -> tuple[str, ...]:
    from fastfact import methods

    return tuple(methods.names())


def _datasets() -> tuple[str, ...]:
    from fastfact import data

    return (*data.DATASETS, SIMULATION)


def _scenarios() -> tuple[str, ...]:
    from fastfact import data

    return tuple(data.SCENARIOS)


def _models() -> tuple[str, ...]:
    from fastfact import models

    return tuple(models.MODELS)


AUTO, NONE = "auto", "none"


def _trackers() -> tuple[str, ...]:
    from fastfact.base import plugins
    from fastfact.federation import Callback

    plugins.load()
    return (AUTO, NONE, *Callback.BY_NAME)


def digits(text: str) -> bool:
    """Whether `int` can read it: `str.isdigit` is true of "²" too."""
    return text.isascii() and text.isdecimal()


def _cohort(value: str) -> str | None:
    right = value in ("auto", "threads") or (digits(value) and int(value) > 0)
    return None if right else "auto, threads or a number of at least 1"


def _metrics(value: str) -> str | None:
    names = [name for name in value.split(",") if name]
    return None if all(name in METRICS for name in names) else f"of {', '.join(METRICS)}, separated by commas"


def _folder(value: str) -> str | None:
    return None if Path(value).is_dir() else "a folder, and there is none"


def _device(value: str) -> str | None:
    right = value in ("cpu", "cuda") or (value.startswith("cuda:") and digits(value.removeprefix("cuda:")))
    return None if right else "cpu, cuda or cuda:1"


def _file(value: str) -> str | None:
    return None if Path(value).is_file() else "a file, and there is none"


@dataclass(frozen=True)
class Config:
    """One run. The same names serve as keys of a TOML file and, with hyphens, as options of the command line."""

    method: str = setting(
        "factorized-fl-alpha", "Method, see `fastfact info`.", group="Method and training", choices=_methods
    )
    dataset: str = setting("digits", "Data set, see `fastfact info`.", group="Data and clients", choices=_datasets)
    data_dir: str | None = setting(
        None,
        "Folder of the data sets that are not built in [default: $FASTFACT_DATA, or data].",
        group="Data and clients",
        check=_folder,
    )
    scenario: str = setting(
        "permuted-non-iid",
        "How labels and samples are spread over clients, see `fastfact info`.",
        group="Data and clients",
        choices=_scenarios,
    )
    clients: int = setting(20, "Number of clients.", group="Data and clients", at_least=1)
    rounds: int = setting(20, "Number of rounds.", group="Method and training", at_least=1)
    epochs: int = like(FederationSettings, "epochs", 2)
    batch_size: int = like(FederationSettings, "batch_size", 32)
    lr: float = like(FederationSettings, "lr", 0.01)
    momentum: float = like(FederationSettings, "momentum")
    weight_decay: float = like(FederationSettings, "weight_decay")
    optimizer: str = like(FederationSettings, "optimizer")
    beta2: float = like(FederationSettings, "beta2")
    eps: float = like(FederationSettings, "eps")
    optimizer_states: str = like(FederationSettings, "optimizer_states")
    schedule: str = like(FederationSettings, "schedule")
    schedule_rounds: int | None = setting(
        None,
        "Rounds over which the learning rate goes from its warm-up to its end; 0: anew in each round, over its steps"
        " [default: --rounds].",
        group="Local training",
        at_least=0,
    )
    lr_warmup: float = like(FederationSettings, "lr_warmup")
    max_grad_norm: float | None = like(FederationSettings, "max_grad_norm")
    accumulate: int = like(FederationSettings, "accumulate")
    precision: str = like(FederationSettings, "precision")
    l1: float | None = setting(
        None,
        "λ, the L1 penalty on μ of factorized layers [default: the method's].",
        group="Sparse factors",
        at_least=0,
    )
    warmup: int | None = setting(
        None,
        "Rounds with dense μ; after them it is pruned and trains on its support [default: all rounds].",
        group="Sparse factors",
        at_least=0,
    )
    target_density: float | None = setting(
        None,
        "Fraction of μ of each layer that is kept after --warmup [default: what --l1 leaves].",
        group="Sparse factors",
        at_least=0,
        at_most=1,
    )
    regrow_every: int | None = setting(
        None,
        "Rounds between changes of the support after --warmup [default: never].",
        group="Sparse factors",
        at_least=0,
    )
    sketch: int | None = setting(
        None,
        "Factorized-FL and SimFed match clients by sketches of this size, 0 for v itself; others ignore it"
        " [default: the method's].",
        unit="bytes",
        group="Method and training",
        at_least=0,
    )
    wire: str = like(FederationSettings, "wire")
    participation: float = like(FederationSettings, "participation")
    rule: str = like(FederationSettings, "rule")
    hostile: float = like(FederationSettings, "hostile")
    clip: str | None = like(FederationSettings, "clip")
    max_norm: str = like(FederationSettings, "max_norm")
    noise: float = like(FederationSettings, "noise")
    delta: float | None = like(FederationSettings, "delta")
    speed: float | None = like(FederationSettings, "speed")
    speed_spread: float = like(FederationSettings, "speed_spread")
    bandwidth: float | None = like(FederationSettings, "bandwidth")
    bandwidth_spread: float = like(FederationSettings, "bandwidth_spread")
    deadline: float | None = like(FederationSettings, "deadline")
    buffer: int = like(FederationSettings, "buffer")
    model: str = setting("resnet9", "Network, see `fastfact info`.", group="Network", choices=_models)
    width: float = setting(0.25, "Width multiplier of the network.", group="Network", above=0)
    init_from: str | None = setting(
        None,
        "Pretrained weights to start from, a safetensors file [default: random weights].",
        group="Network",
        check=_file,
    )
    alpha: float = setting(
        0.5, "Concentration of the Dirichlet partition (non-IID scenarios).", group="Data and clients", above=0
    )
    classes_per_client: int = setting(
        2, "Classes of a client in the pathological scenario.", group="Data and clients", at_least=1
    )
    samples: int = setting(
        0, "Most samples of a client, train and test together; 0 for all.", group="Data and clients", at_least=0
    )
    test_fraction: float = setting(
        0.2,
        "Fraction held out for testing, of each client's samples or of the data set.",
        group="Data and clients",
        above=0,
        below=1,
    )
    test_set: str = setting(
        "own",
        "What clients are tested on: own, a part of what each holds; or global, one test set for all, split off before"
        " the data are dealt out and labelled as the client's own.",
        group="Data and clients",
        choices=("own", "global"),
    )
    shift: int = setting(
        0, "Augmentation: random shift by up to this much.", unit="pixels", group="Data and clients", at_least=0
    )
    augment: str = setting(
        "none",
        "More augmentation: none, flip (mirrored), or full (cropped, mirrored, colours changed).",
        group="Data and clients",
        choices=tuple(AUGMENT),
    )
    cohort: str = like(FederationSettings, "cohort", check=_cohort)
    device: str | None = setting(
        None,
        "Where to train: cpu, cuda, or cuda:1 [default: cpu; under torchrun each process its own GPU, if any].",
        group="Machine",
        check=_device,
    )
    store: str = like(FederationSettings, "store")
    store_values: str = like(FederationSettings, "store_values")
    memory_limit: float | None = like(FederationSettings, "memory_limit")
    seed: int = setting(
        0,
        "Seed of the partition, the initial weights and the training; compare counts up from it.",
        group="Method and training",
        at_least=0,
    )
    newcomers: float = setting(
        0.0,
        "Fraction of the clients that are kept out of training and join at the end.",
        group="Data and clients",
        at_least=0,
        below=1,
    )
    pretrain: int = setting(
        0,
        "Epochs on the pooled training samples that make the initial model; 0 for a random one.",
        group="Network",
        at_least=0,
    )
    only: str = setting("", "Of the clients of the scenario only these, counted from 1: 1,3.", group="Data and clients")
    loss: str = like(FederationSettings, "loss", choices=LOSSES)
    metrics: str = like(
        FederationSettings,
        "metrics",
        "",
        help=f"What else to measure on each client's test samples, separated by commas: {', '.join(METRICS)}.",
        check=_metrics,
    )
    record: str = setting(
        "", "More to keep of every round, see `fastfact info`: similarity,matching.", group="Evaluation"
    )
    track: str = setting(
        AUTO,
        "Who is told of each round: tensorboard, none, a Callback of your own by its name (see fastfact --help, --use),"
        " or auto, TensorBoard where it is installed.",
        group="Evaluation",
        choices=_trackers,
    )
    simulation: dict = setting({}, "")
    settings: dict = setting({}, "")

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and not isinstance(value, bool) and item.type in (float, float | None):
                object.__setattr__(self, item.name, value := float(value))
            elif item.name in ("cohort", "clip", "max_norm") and type(value) in (int, float):
                object.__setattr__(self, item.name, value := str(value))
            if rule := value_error(value, item):
                raise ValueError(f"{item.name}={value!r}, must be {rule.removesuffix(' or None')}")
            if item.name in PATHS and value != item.default:
                object.__setattr__(self, item.name, os.path.abspath(value))
        for name in ("target_density", "regrow_every") if self.warmup is None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)}: needs warmup")
        if self.warmup is not None and self.target_density is None and self.l1 is None:
            raise ValueError(f"warmup={self.warmup}: needs target_density, or l1 if λ is to decide what stays")
        if self.samples == 1:
            raise ValueError("samples=1, must be at least 2: one to train and one to test, or 0 for all")
        self.client_subset()
        self.recorders()
        known = _methods()
        for method, settings in self.settings.items():
            if method not in known:
                raise ValueError(f"method={method!r}, must be one of {', '.join(known)}")
            if not isinstance(settings, dict):
                raise ValueError(f"settings.{method}={settings!r}, must be a table: settings.METHOD.KEY = VALUE")

    def client_subset(self) -> list[int]:
        """The places of the clients of `only`, from 0; empty for all."""
        numbers = [part.strip() for part in self.only.split(",") if part.strip()]
        if not all(digits(part) and 1 <= int(part) <= self.clients for part in numbers):
            raise ValueError(f"only={self.only!r}, must be numbers of clients, 1 … {self.clients}, separated by commas")
        chosen = [int(part) - 1 for part in numbers]
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"only={self.only!r}, must name each client once")
        return chosen

    def recorders(self) -> tuple[str, ...]:
        """The names in `record`."""
        from fastfact.experiment.probes import RECORDERS

        names = tuple(sorted({part.strip() for part in self.record.split(",") if part.strip()}))
        for name in names:
            if name not in RECORDERS:
                raise ValueError(f"record={name!r}, must be one of {', '.join(RECORDERS)}")
        return names

    def identity(self) -> dict[str, Any]:
        """All that decides the numbers of a run but its length."""
        return {name: value for name, value in asdict(self).items() if name != "rounds" and name not in WHERE}


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


def read_file(path: Path, also: Sequence[str] = (), but: Sequence[str] = ()) -> dict[str, Any]:
    """The TOML configuration in `path`, keys with underscores.

    Raises ValueError for keys that are neither fields of `Config` nor in `also`, and for those in `but`.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"config={str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None
    names = [key.replace("-", "_") for key in content]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{path}: {twice} stands there twice, once with hyphens; must stand there once")
    content = dict(zip(names, content.values(), strict=True))
    if refused := [name for name in names if name in but]:
        raise ValueError(f"{path}: {refused[0]}={content[refused[0]]!r} is for fastfact run, a comparison has none")
    known = [*(item.name for item in fields(Config) if item.name not in but), *also]
    if unknown := [key for key in content if key not in known]:
        raise ValueError(f"{path}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    return content


def with_settings(config: Config, texts: Sequence[str], names: Sequence[str] | None = None) -> Config:
    """`config` with the --set texts added; KEY without METHOD is for every method in `names`, or the one configured.

    Raises ValueError for another METHOD than these: a file of several commands may have it, a command line means it.
    """
    settings = {method: dict(values) for method, values in config.settings.items()}
    names = names or (config.method,)
    for text in texts:
        method, key, value = parse_setting(text)
        if method and method not in names:
            raise ValueError(f"--set {text!r}: {method} is not trained here, must be one of {', '.join(names)}")
        for target in (method,) if method else names:
            settings.setdefault(target, {})[key] = value
    return replace(config, settings=settings)


def cell_config(config: Config, method: str, seed: int) -> Config:
    """The configuration of one cell of a comparison: only its own method's settings."""
    own = {method: config.settings[method]} if config.settings.get(method) else {}
    return replace(config, method=method, seed=seed, settings=own)
