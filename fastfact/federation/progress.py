"""What a federation knows after a round, but for its clients' states."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastfact.federation.history import History
from fastfact.federation.state import State
from fastfact.federation.wire.ledger import Ledger


@dataclass
class Progress:
    """What is known after a round; of a round that runs, what it adds: its rows and bytes alone."""

    round: int = 0
    history: History = field(default_factory=History)
    ledger: Ledger = field(default_factory=Ledger)
    server_state: State = field(default_factory=dict)
    """The method's own tensors, see `Uploads.server_state`."""
    reported: Any = None
    """Who reported last, `Uploads` without tensors: what they uploaded is what they hold. None before anybody did."""
    choices: dict[str, str] = field(default_factory=dict)
    """The path of each kind of work that layers met (`nn.choice.choices`), so that a run goes on with the same
    arithmetic."""

    def next(self) -> "Progress":
        """The next round, which has added nothing."""
        return Progress(self.round + 1, server_state=dict(self.server_state), reported=self.reported)

    @contextlib.contextmanager
    def adding(self, done: "Progress") -> Iterator[None]:
        """This with what a round adds, if the block ends; as it was, if it raises."""
        before = self.round, self.server_state, self.reported
        rows, entries = len(self.history), len(self.ledger.entries)
        try:
            self.round, self.server_state, self.reported = done.round, done.server_state, done.reported
            self.history.extend(done.history)
            self.ledger.entries += done.ledger.entries
            yield
        except BaseException:
            self.round, self.server_state, self.reported = before
            del self.history[rows:], self.ledger.entries[entries:]
            raise

    def metadata(self) -> dict[str, str]:
        """All but tensors and rows, as a checkpoint and a store keep it."""
        metadata = {"round": str(self.round), "bytes_up": str(self.ledger.up), "bytes_down": str(self.ledger.down)}
        if self.choices:
            metadata["choices"] = json.dumps(self.choices, sort_keys=True)
        return metadata if self.reported is None else metadata | {"last": json.dumps(self.reported.report())}
