"""What is told of a federation while it trains, for whoever keeps track of experiments."""

import contextlib
import io
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from fastfact.federation.analysis import Trained, similarity

log = logging.getLogger("fastfact")
NUMBERS = ("loss", "accuracy", "accuracy_before", "density", "bytes_up", "bytes_down", "seconds", "epsilon")
"""The keys of a row of `History` that are numbers."""

SUMS = ("bytes_up", "bytes_down", "seconds")
"""Those of which a round is the sum over its clients; of the others it is the mean."""

_FILES = count()


class Callback:
    """A receiver of results: `fed.fit(rounds, callbacks=[…])`. Of these methods override what you need.

    `fed` is the `Federation`, between two rounds, and not to be changed; rows are those of `History`. Of several
    processes only the first calls them: they must not call what all processes have to call, as `fed.similarity`.

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
        from torch.utils.tensorboard import summary

        super().__init__(directory)
        self.similarity_up_to = similarity_up_to
        self._summary, self._file = summary, None

    def on_round(self, fed: Trained, rows: Sequence[Mapping[str, Any]]) -> None:
        """See the class. What cannot be written is left out, with a warning."""
        round, found = rows[0]["round"], []
        for key, value in self.means(rows).items():
            found.append(self._summary.scalar(f"round/{key}", value))
        for key in ("accuracy", "loss"):
            if values := [row[key] for row in rows if row[key] is not None]:
                found.append(self._summary.histogram(f"clients/{key}", np.array(values), bins="auto"))
        if 1 < len(fed) <= self.similarity_up_to and fed.group.size == 1:
            # A model may have no tensor that could be compared.
            with contextlib.suppress(ValueError):
                image = (similarity(fed).float().nan_to_num() + 1) / 2
                found.append(self._summary.image("clients/similarity", image.clamp(0, 1), dataformats="HW"))
        try:
            self._append(round, found)
        except OSError as error:
            log.warning("round %d is not written for TensorBoard: %s", round, error)

    def _append(self, round: int, summaries: Sequence[Any]) -> None:
        # By a file of our own: SummaryWriter's thread would print what it fails by, and keep an interrupt waiting.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        events = [Event(summary=one) for one in summaries]
        if self._file is None:
            folder, host = self.directory / "tensorboard", socket.gethostname()
            self._file = folder / f"events.out.tfevents.{int(time.time()):010d}.{host}.{os.getpid()}.{next(_FILES)}"
            # Rounds that are run again take the place of what an earlier file has of them.
            start = Event(session_log=SessionLog(status=SessionLog.START))
            events = [Event(file_version="brain.Event:2"), start, *events]
            folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        for event in events:
            event.wall_time = time.time()
            if not event.HasField("file_version"):
                event.step = round
            RecordWriter(content).write(event.SerializeToString())
        with open(self._file, "ab") as file:
            file.write(content.getvalue())
