"""The rows a federation leaves: one for each round and client that took part."""

import statistics
from typing import Any


class History(list[dict[str, Any]]):
    """A list of rows with the keys round, client, loss (mean over the round's local steps; None if not finite),
    accuracy (of the client's model on its own test set, after local training; None where there are no classes),
    accuracy_before (the same after the download, before training; None where nothing was mixed, as in the first round),
    density (of μ; None without one), bytes_up, bytes_down, seconds (of local training), left_out (None, or why the
    client was left out of the round); with noise also epsilon (of all rounds up to this one); for each metric of
    `Federation(metrics=)` its name and NAME_before, as the accuracy.
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

    def curve(self, key: str = "accuracy") -> list[tuple[int, float, float]]:
        """(round, mean, standard deviation over its clients) of a numeric key; rows without a value are left out."""
        points = []
        for round in self.rounds():
            values = [row[key] for row in self.of(round) if row[key] is not None]
            if values:
                points.append((round, statistics.fmean(values), statistics.pstdev(values)))
        return points

    def total(self, key: str) -> float:
        """The sum of a numeric key over all rows."""
        return sum(row[key] for row in self if row[key] is not None)

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`, a column a key; needs pandas, which fastfact does not install."""
        import pandas

        return pandas.DataFrame(list(self))
