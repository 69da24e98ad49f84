"""The rows a federation leaves: one for each round and client that took part."""

import statistics
from typing import Any

from fastfact.base.spread import best_tenth, fairness, worst_tenth


class History(list[dict[str, Any]]):
    """A list of rows with the keys round, client, loss (mean over the round's local steps; None if not finite),
    accuracy (of the client's model on its own test set, after local training; None where there are no classes),
    accuracy_before (the same after the download, before training; None where nothing was mixed, as in the first round),
    density (of μ; None without one), bytes_up, bytes_down, seconds (of local training), left_out (None, or why the
    client was left out of the round); with noise also epsilon (of all rounds up to this one); for each metric of
    `Federation(metrics=)` its name and NAME_before, as the accuracy; with a simulated clock also duration (of
    the client's round, in its seconds) and time (when the round ended, since the first began).
    """

    def rounds(self) -> list[int]:
        """The rounds there are rows of."""
        return sorted({row["round"] for row in self})

    def of(self, round: int) -> list[dict[str, Any]]:
        """The rows of one round."""
        return [row for row in self if row["round"] == round]

    def last(self) -> list[dict[str, Any]]:
        """The newest row of each client, by client."""
        newest = {row["client"]: row for row in self}
        return [newest[client] for client in sorted(newest)]

    def curve(self, key: str = "accuracy", over: str = "round") -> list[tuple[float, float, float]]:
        """(round, mean, standard deviation over its clients) of a numeric key; rows without a value are left out.

        over: "time" for the end of the round by the simulated clock in place of its number.
        """
        if over not in ("round", "time") or (over == "time" and self and "time" not in self[0]):
            raise ValueError(f"curve(over={over!r}): must be round, or, of rows with a simulated clock, time")
        points = []
        for round in self.rounds():
            rows = [row for row in self.of(round) if row[key] is not None]
            if rows:
                values = [row[key] for row in rows]
                points.append((rows[0][over], statistics.fmean(values), statistics.pstdev(values)))
        return points

    def time(self) -> float:
        """When the last round ended, in seconds of the simulated clock; 0 without one."""
        return self[-1].get("time", 0.0) if self else 0.0

    def spread(self, key: str = "accuracy") -> dict[str, float]:
        """How evenly a key of all clients' newest rows is spread: `mean`, `std`, the means of the `worst_tenth` and the
        `best_tenth`, and Jain's index (`fairness`). Empty where no row has a value."""
        values = [row[key] for row in self.last() if row[key] is not None]
        if not values:
            return {}
        spread = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
        return spread | {f.__name__: f(values) for f in (worst_tenth, best_tenth, fairness)}

    def total(self, key: str) -> float:
        """The sum of a numeric key over all rows."""
        return sum(row[key] for row in self if row[key] is not None)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, a column a key; needs pandas, which fastfact does not install."""
        import pandas

        return pandas.DataFrame(list(self))
