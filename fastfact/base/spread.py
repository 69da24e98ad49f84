"""How evenly clients do: what is said of them besides mean and standard deviation."""

import math
import statistics
from collections.abc import Collection


def worst_tenth(values: Collection[float]) -> float:
    """The mean of the lowest tenth of the values, rounded up: of at least one."""
    return statistics.fmean(sorted(values)[: math.ceil(len(values) / 10)])


def best_tenth(values: Collection[float]) -> float:
    """The same of the highest."""
    return -worst_tenth([-value for value in values])


def fairness(values: Collection[float]) -> float:
    """Jain's index (Σa)² / (K Σa²): 1 where all have the same, 1 / K where one has everything."""
    squares = math.fsum(value**2 for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0
