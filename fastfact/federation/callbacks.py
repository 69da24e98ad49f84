"""What is told of a federation while it trains, for whoever keeps track of experiments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch

from fastfact.federation.analysis import Trained, similarity
from fastfact.federation.storage.checkpoint import uninterrupted

NUMBERS = ("loss", "accuracy", "accuracy_before", "density", "bytes_up", "bytes_down", "seconds", "epsilon")
"""The keys of a row of `History` that are numbers."""

SUMS = ("bytes_up", "bytes_down", "seconds")
"""Those of which a round is the sum over its clients; of the others it is the mean."""


class Callback:
    """A receiver of results: `fed.fit(rounds, callbacks=[…])`. Of these methods override what you need.

    `fed` is the `Federation`, between two rounds, and not to be changed; rows are those of `History`. Of several
    processes the first alone calls them: there they must not ask `fed` for what all processes answer together.

    A subclass with a name, `class Mine(Callback, name="mine")`, is what `fastfact run --track mine` makes, of the run's
    directory: `Mine(DIR)`.
    """

    BY_NAME: ClassVar[dict[str, type["Callback"]]] = {}

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            Callback.BY_NAME[name] = cls

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)

    def on_client(self, fed: Trained, row: Mapping[str, Any]) -> None:
        """A client's row of a round that has ended."""

    def on_round(self, fed: Trained, rows: Sequence[Mapping[str, Any]]) -> None:
        """A round has ended, after its `on_client`; rows: of its clients, at least one."""

    def on_end(self, fed: Trained) -> None:
        """`fit` returns or is interrupted: what was received is to be written."""

    @staticmethod
    def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The numbers of a round: accuracy, loss … as means over its clients, bytes and seconds as sums, "clients", how
        many they are, and "left_out", how many of them were left out. What no client has is not there.
        """
        found: dict[str, float] = {}
        for key in NUMBERS:
            if values := [row[key] for row in rows if row.get(key) is not None]:
                found[key] = sum(values) if key in SUMS else fmean(values)
        return found | {"clients": len(rows), "left_out": sum(row["left_out"] is not None for row in rows)}


class TensorBoard(Callback, name="tensorboard"):
    """Event files of TensorBoard in `directory`/tensorboard: the numbers of each round (see `means`) as scalars, the
    clients' accuracies and losses as histograms, and the cosine between them (`fed.similarity()`) as an image [K, K],
    black for −1 and white for 1.

    similarity_up_to: no image in federations of more clients. Needs the package tensorboard (`fastfact[track]`), else
    ImportError.
    """

    def __init__(self, directory: str | Path, similarity_up_to: int = 200):
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(directory)
        self.similarity_up_to = similarity_up_to
        self._open, self._writer = SummaryWriter, None

    def on_round(self, fed: Trained, rows: Sequence[Mapping[str, Any]]) -> None:
        """See the class."""
        # Interrupted inside the queue of its writer, TensorBoard would wait for ever when it is closed.
        with uninterrupted():
            self._write(fed, rows)

    def _write(self, fed: Trained, rows: Sequence[Mapping[str, Any]]) -> None:
        round = rows[0]["round"]
        if self._writer is None:
            # Rounds that are run again take the place of what an earlier file has of them.
            self._writer = self._open(str(self.directory / "tensorboard"), purge_step=round)
        for key, value in self.means(rows).items():
            self._writer.add_scalar(f"round/{key}", value, round)
        for key in ("accuracy", "loss"):
            if values := [row[key] for row in rows if row[key] is not None]:
                self._writer.add_histogram(f"clients/{key}", torch.tensor(values), round)
        if 1 < len(fed) <= self.similarity_up_to and fed.group.size == 1:
            image = (similarity(fed).float().nan_to_num() + 1) / 2
            self._writer.add_image("clients/similarity", image.clamp(0, 1), round, dataformats="HW")

    def on_end(self, fed: Trained) -> None:
        """See the class."""
        if self._writer is not None:
            with uninterrupted():
                self._writer.close()
            self._writer = None
