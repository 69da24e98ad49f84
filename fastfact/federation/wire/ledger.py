"""The ledger: bytes and numbers of every tensor that crossed the wire, by round, client, direction and name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FRAME = "(frame)"
"""The name under which the headers of messages are counted."""


@dataclass
class Sizes:
    """For some tensors of m messages: bytes (payload and entry) and how many numbers travel, by name, lists [m]."""

    bytes: dict[str, list[int]] = field(default_factory=dict)
    numbers: dict[str, list[int]] = field(default_factory=dict)

    def total(self, row: int) -> int:
        """The length of one message."""
        return sum(sizes[row] for sizes in self.bytes.values())

    @classmethod
    def joined(cls, parts: Sequence["Sizes"]) -> "Sizes":
        """Those of the messages of `parts`, which are of the same tensors."""
        made = cls()
        for part in parts:
            for into, each in ((made.bytes, part.bytes), (made.numbers, part.numbers)):
                for name, sizes in each.items():
                    into.setdefault(name, []).extend(sizes)
        return made

    def of(self, rows: Sequence[int]) -> "Sizes":
        """Those of some of the messages."""
        both = self.bytes, self.numbers
        return Sizes(*({name: [sizes[row] for row in rows] for name, sizes in each.items()} for each in both))


@dataclass
class Entry:
    """The messages of one round and direction ("up" to the server, "down" from it) to or from some clients."""

    round: int
    direction: str
    clients: list[int]
    sizes: Sizes


class Ledger:
    """The bytes of every tensor that crossed the wire, by round, client, direction and name."""

    def __init__(self, entries: Iterable[Entry] = ()):
        self.entries = list(entries)

    def add(self, round: int, direction: str, clients: Sequence[int], sizes: Sizes) -> None:
        """Record the messages of `clients`, in the order of the lists in `sizes`."""
        if len(clients):
            self.entries.append(Entry(round, direction, list(clients), sizes))

    def bytes(
        self,
        direction: str | None = None,
        round: int | None = None,
        client: int | None = None,
        name: str | None = None,
    ) -> int:
        """Bytes summed over everything not asked for. `name` "(frame)" are the headers of the messages."""
        return self._sum("bytes", direction, round, client, name)

    def numbers(self, direction: str | None = None, round: int | None = None, client: int | None = None) -> int:
        """How many numbers travelled: all of a dense tensor, the nonzeros of μ."""
        return self._sum("numbers", direction, round, client, None)

    def _sum(self, what, direction, round, client, name) -> int:
        total = 0
        for entry in self.entries:
            if direction not in (None, entry.direction) or round not in (None, entry.round):
                continue
            for key, sizes in getattr(entry.sizes, what).items():
                if name in (None, key):
                    if client is None:
                        total += sum(sizes)
                    else:
                        total += sum(s for c, s in zip(entry.clients, sizes, strict=True) if c == client)
        return total

    def by_client(self, direction: str | None = None) -> dict[int, int]:
        """Bytes by client, over all rounds and names."""
        totals: dict[int, int] = {}
        for entry in self.entries:
            if direction in (None, entry.direction):
                sizes = entry.sizes.bytes.values()
                lengths = list(map(sum, zip(*sizes, strict=True))) if sizes else [0] * len(entry.clients)
                for client, length in zip(entry.clients, lengths, strict=True):
                    totals[client] = totals.get(client, 0) + length
        return totals

    @property
    def up(self) -> int:
        """Bytes from the clients to the server."""
        return self.bytes("up")

    @property
    def down(self) -> int:
        """Bytes from the server to the clients."""
        return self.bytes("down")

    def by_name(self, direction: str | None = None) -> dict[str, int]:
        """Bytes by tensor name, over all rounds and clients."""
        totals: dict[str, int] = {}
        for entry in self.entries:
            if direction in (None, entry.direction):
                for name, sizes in entry.sizes.bytes.items():
                    totals[name] = totals.get(name, 0) + sum(sizes)
        return totals

    def formula(self) -> int:
        """The papers' cost in bytes, {(P_S2C + P_C2S) × 4} × K × R (Factorized-FL, C.2): four bytes for every number
        that travelled (of μ only the nonzeros), no headers and no positions, summed over the clients and rounds there
        were instead of multiplied by K and R.
        """
        return 4 * self.numbers()

    def rows(self) -> list[dict]:
        """The ledger as JSON rows, one for each round and direction; sizes equal for all clients are written once."""

        def short(sizes: list[int]):
            return sizes[0] if len(set(sizes)) == 1 else sizes

        return [
            {
                "round": e.round,
                "direction": e.direction,
                "clients": e.clients,
                "bytes": {name: short(sizes) for name, sizes in e.sizes.bytes.items()},
                "numbers": {name: short(sizes) for name, sizes in e.sizes.numbers.items()},
            }
            for e in self.entries
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[dict]) -> "Ledger":
        """The inverse of `rows`. Raises KeyError, TypeError or ValueError for rows that are no ledger."""
        ledger = cls()
        for row in rows:
            m = len(row["clients"])
            sizes = Sizes()
            for what, into in (("bytes", sizes.bytes), ("numbers", sizes.numbers)):
                for name, value in row[what].items():
                    into[name] = list(value) if isinstance(value, list) else [int(value)] * m
                    if len(into[name]) != m:
                        raise ValueError(f"{name} has {len(into[name])} sizes for {m} clients")
            ledger.add(row["round"], row["direction"], row["clients"], sizes)
        return ledger
