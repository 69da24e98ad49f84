"""The settings of a federation, each said once: what it is, its default and its range.

`Federation` checks its arguments by them, the configuration of an experiment takes over what it shares with them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastfact.base.kinds import setting, type_error, value_error


def _cohort(value: int | str) -> str | None:
    right = value in ("auto", "threads") if isinstance(value, str) else value > 0
    return None if right else "auto, threads or a number of at least 1"


def _store(value: Any) -> str | None:
    return "memory or a directory" if type_error(value, str) or not value else None


def bound_of(value: float | str, norms: Sequence[float]) -> float:
    """The norm that `clip` or `max_norm` names: a number, or "2x", so many times the (lower) median of `norms`. Where
    most are 0 that says nothing, and there is no bound."""
    if not isinstance(value, str) or not value.endswith("x"):
        return float(value)
    median = sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
    return float(value.removesuffix("x")) * median or math.inf


def _bound(value: float | str | None) -> str | None:
    try:
        right = value is None or 0 < float(value.removesuffix("x") if isinstance(value, str) else value) < math.inf
    except ValueError:
        right = False
    return None if right else "above 0, as 2.5, or 2x for twice the median of the round"


OPTIMIZERS = ("sgd", "adam", "adamw")
PRECISIONS = ("full", "bfloat16")
WIRE = ("exact", "bfloat16", "int8")


def _rate(value: Any) -> str | None:
    """A number above 0, or a list of them."""
    each = value if isinstance(value, list | tuple) else [value]
    right = each and all(type_error(one, float) is None and 0 < one < math.inf for one in each)
    return None if right else "a number above 0, a list of one for each client, or None"


RULES = ("mean", "median", "trimmed-mean", "multi-krum")


LOSSES = ("cross_entropy", "mse", "bce", "next_token")
METRICS = ("test_loss", "mse", "mae", "top5")


def _loss(value: Any) -> str | None:
    right = value in LOSSES if isinstance(value, str) else callable(value)
    return None if right else f"one of {', '.join(LOSSES)}, or a function (output, target) → number"


def _metrics(value: Any) -> str | None:
    if isinstance(value, Mapping):
        names, right = list(value), all(callable(metric) for metric in value.values())
    else:
        right = isinstance(value, list | tuple) and all(name in METRICS for name in value)
        names = list(value) if right else []
    right &= all(isinstance(name, str) and name and name not in ROW for name in names)
    return (
        None if right else f"a list of {', '.join(METRICS)}, or functions (output, target) → number by names of yours"
    )


ROW = (
    "round",
    "client",
    "loss",
    "accuracy",
    "accuracy_before",
    "density",
    "bytes_up",
    "bytes_down",
    "seconds",
    "left_out",
    "epsilon",
    "duration",
    "time",
)
"""The keys of a row of `History` that are no metric."""


@dataclass(frozen=True)
class FederationSettings:
    """What `Federation` takes as numbers and words, with its defaults."""

    epochs: int = setting(5, "Local epochs in each round.", group="Method and training", at_least=1)
    batch_size: int = setting(50, "Samples in a local step.", group="Method and training", at_least=1)
    lr: float = setting(1e-3, "Learning rate of local training.", group="Method and training", above=0)
    momentum: float = setting(
        0.9, "Momentum of local SGD; β₁ of Adam.", group="Method and training", at_least=0, below=1
    )
    weight_decay: float = setting(1e-6, "Weight decay of local training.", group="Method and training", at_least=0)
    optimizer: str = setting("sgd", "Optimizer of local training.", group="Local training", choices=OPTIMIZERS)
    beta2: float = setting(0.999, "β₂ of Adam.", group="Local training", at_least=0, below=1)
    eps: float = setting(1e-8, "ε of Adam.", group="Local training", above=0)
    optimizer_states: str = setting(
        "dropped",
        "Optimizer state of a client between its rounds: dropped, or kept.",
        group="Local training",
        choices=("dropped", "kept"),
    )
    schedule: str = setting(
        "constant", "Learning rate after its warm-up.", group="Local training", choices=("constant", "linear", "cosine")
    )
    schedule_rounds: int = setting(
        0,
        "Rounds over which the learning rate goes from warm-up to its end; 0: anew in each round, over its steps.",
        group="Local training",
        at_least=0,
    )
    lr_warmup: float = setting(
        0.0, "Fraction of these rounds in which it rises.", group="Local training", at_least=0, below=1
    )
    max_grad_norm: float | None = setting(
        None,
        "Gradients of a local step are scaled down to this Euclidean norm [default: no limit].",
        group="Local training",
        above=0,
    )
    accumulate: int = setting(1, "Batches whose gradients make one local step.", group="Local training", at_least=1)
    loss: Any = setting(
        "cross_entropy",
        f"Loss of local training: {', '.join(LOSSES)}.",
        group="Local training",
        check=_loss,
    )
    metrics: Any = setting(
        (), "What else to measure on each client's test samples.", group="Evaluation", check=_metrics
    )
    precision: str = setting(
        "full",
        "Precision of local training: full, or bfloat16 by autocast.",
        group="Local training",
        choices=PRECISIONS,
    )
    wire: str = setting(
        "exact",
        "Numbers on the wire: exact, bfloat16, or int8 with a scale for each row; the server works with what arrives.",
        group="Method and training",
        choices=WIRE,
    )
    participation: float = setting(
        1.0, "Fraction of the clients that take part in a round.", group="Method and training", above=0, at_most=1
    )
    seed: int = setting(0, "Seed of every random draw.", group="Method and training")
    cohort: int | str = setting(
        "auto",
        "How many clients train together: a number, threads (one on each core), or auto, the fastest.",
        group="Machine",
        check=_cohort,
    )
    memory_limit: float | None = setting(
        None, "Memory the run may take [default: no limit].", unit="GiB", group="Machine", above=0
    )
    store: Any = setting(
        "memory",
        "Where clients are between rounds: memory, or a directory for very many.",
        group="Machine",
        check=_store,
    )
    store_values: str = setting(
        "exact", "The numbers of clients between rounds.", group="Machine", choices=("exact", "bfloat16")
    )
    rule: str = setting(
        "mean",
        "How the server mixes uploads; every rule but mean tolerates hostile clients.",
        group="Method and training",
        choices=RULES,
    )
    hostile: float = setting(
        0.2,
        "Fraction of hostile clients that trimmed-mean and multi-krum tolerate.",
        group="Method and training",
        at_least=0,
        below=0.5,
    )
    clip: float | str | None = setting(
        None,
        "Norm to which the server scales down what a round changed in an upload: a number, or 1x for the median of the"
        " round [default: no limit].",
        group="Method and training",
        check=_bound,
    )
    max_norm: float | str | None = setting(
        "1000x",
        "Clients whose upload a round changed by a larger norm are left out: a number, or 1000x for so many times the"
        " median of the round.",
        group="Method and training",
        check=_bound,
    )
    noise: float = setting(
        0.0,
        "Gaussian noise on the mean of the updates that everybody downloads: its standard deviation on their sum, in"
        " units of --clip, a number. User-level differential privacy; ε comes with the results. 0 is none.",
        group="Differential privacy",
        at_least=0,
    )
    delta: float | None = setting(
        None,
        "δ of the (ε, δ) that is reported [default: 1 / clients^1.1].",
        group="Differential privacy",
        above=0,
        below=1,
    )
    speed: Any = setting(
        None,
        "Simulated clock: samples that a client trains on in a second, the median where they differ [default: training"
        " takes no time].",
        unit="1/s",
        group="Simulated clock",
        check=_rate,
    )
    speed_spread: float = setting(
        0.0, "Standard deviation of the logarithm of the clients' speeds.", group="Simulated clock", at_least=0
    )
    bandwidth: Any = setting(
        None,
        "Simulated clock: bytes that a client's link takes in a second, either way, the median where they differ"
        " [default: messages take no time].",
        unit="B/s",
        group="Simulated clock",
        check=_rate,
    )
    bandwidth_spread: float = setting(
        0.0, "Standard deviation of the logarithm of the clients' bandwidths.", group="Simulated clock", at_least=0
    )
    deadline: float | None = setting(
        None,
        "Seconds of the simulated clock after which a round ends; late clients are left out [default: it waits for"
        " all].",
        unit="s",
        group="Simulated clock",
        above=0,
    )
    buffer: int = setting(
        0,
        "Asynchronous rounds, which end when so many uploads have arrived, while the others work on: method fedbuff."
        " --participation is how many clients work at a time. 0: rounds wait.",
        unit="uploads",
        group="Simulated clock",
        at_least=0,
    )


DEFAULTS = {item.name: item.default for item in fields(FederationSettings)}
CLOCK = ("speed", "speed_spread", "bandwidth", "bandwidth_spread", "deadline", "buffer")
"""The settings of the simulated clock."""
_LATER = (
    *("rule", "hostile", "clip", "noise", "delta", "loss", "metrics", *CLOCK),
    *("optimizer", "beta2", "eps", "optimizer_states", "schedule", "schedule_rounds", "lr_warmup", "max_grad_norm"),
    *("accumulate", "precision"),
)
LATER = {name: DEFAULTS[name] for name in _LATER}
"""What config.json of an older run does not say, and what it was: it is said only where it is something else."""


def check_federation(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, naming it, for a setting of `Federation` that is not what it must be."""
    settings = LATER | dict(settings)
    for item in fields(FederationSettings):
        value = settings[item.name]
        if rule := value_error(value, item):
            raise ValueError(f"Federation({item.name}={value!r}): must be {rule}")
    deadline, buffer = settings["deadline"], settings["buffer"]
    for name, value in (("deadline", deadline), ("buffer", buffer)):
        if value and settings["speed"] is None and settings["bandwidth"] is None:
            raise ValueError(f"Federation({name}={value!r}): needs a clock: speed, bandwidth or both")
    if deadline and buffer:
        raise ValueError(f"Federation(deadline={deadline!r}): asynchronous rounds (buffer={buffer}) wait for nobody")
