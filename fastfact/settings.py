"""The settings of a federation, each said once: what it is, its default and its range.

`Federation` checks its arguments by them, the configuration of an experiment takes over what it shares with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from fastfact.kinds import setting, type_error, value_error


def _cohort(value: int | str) -> str | None:
    right = value in ("auto", "threads") if isinstance(value, str) else value > 0
    return None if right else "auto, threads or a number of at least 1"


def _store(value: Any) -> str | None:
    return "memory or a directory" if type_error(value, str) or not value else None


@dataclass(frozen=True)
class FederationSettings:
    """What `Federation` takes as numbers and words, with its defaults."""

    epochs: int = setting(5, "Local epochs in each round.", group="Method and training", at_least=1)
    batch_size: int = setting(50, "Samples in a local step.", group="Method and training", at_least=1)
    lr: float = setting(1e-3, "Learning rate of local SGD.", group="Method and training", above=0)
    momentum: float = setting(0.9, "Momentum of local SGD.", group="Method and training", at_least=0, below=1)
    weight_decay: float = setting(1e-6, "Weight decay of local SGD.", group="Method and training", at_least=0)
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
    max_norm: float | None = setting(
        None,
        "Clients whose upload has a larger Euclidean norm are left out of the round [default: no limit].",
        group="Method and training",
        above=0,
    )


def check_federation(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, naming it, for a setting of `Federation` that is not what it must be."""
    for item in fields(FederationSettings):
        if rule := value_error(settings[item.name], item):
            raise ValueError(f"Federation({item.name}={settings[item.name]!r}): must be {rule}")
