"""What one side tells the other: a few facts as JSON, and messages of the wire format (`federation.wire.format`).

A packet to a node concerns all of its clients that take part in the round, and so does its answer.

Facts of a "hello": of the server `config` (see `Server.config`); of the node `clients`, `samples`, `sample`, `entries`,
`classes` and `table` (see `Node.hello`), and the `lengths` of the messages in the body, one of each client, if the
method has clients measure something before their first round.
Facts of "train": `run` and `round`; of the server `config`, `first` (nothing was mixed: what comes is the initial
model), `masks` (the channels that travel up) and of each client its number, the round it uploaded last in, the lengths
of its messages in the body, and whose models they are if it is to choose; of the node, of each client its row of the
history, the length of its message, and its answer to an offer.

All have `protocol`, which must be the same, and `version`, of the package.
"""

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastfact.base import VERSION
from fastfact.base.files import digest
from fastfact.federation.tensors import TensorInfo

PROTOCOL = 1
MOST_FACTS = 1 << 26
"""The longest JSON that is read, in bytes."""


class RefusedError(ValueError):
    """A packet that this side cannot take: of another protocol, or damaged."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise RefusedError for whatever goes wrong inside, where facts are read that may hold anything."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"its answer is incomplete ({error!r:.200})") from error


def is_number(value: Any) -> bool:
    """Whether a fact is a finite number that a float can hold."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:
        return False


@dataclass
class Packet:
    """facts: what JSON can hold. body: messages end to end."""

    facts: dict[str, Any]
    body: bytes = b""

    @classmethod
    def of(cls, facts: Mapping[str, Any], messages: Sequence[bytes] = ()) -> "Packet":
        return cls({"protocol": PROTOCOL, "version": VERSION, **facts}, b"".join(messages))

    def packed(self) -> bytes:
        """The facts as bytes."""
        return zlib.compress(json.dumps(self.facts, separators=(",", ":")).encode(), 9)

    @classmethod
    def unpacked(cls, facts: bytes, body: bytes = b"") -> "Packet":
        """Raises RefusedError, naming both versions, for a packet of another protocol, and for one that is none."""
        try:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(facts, MOST_FACTS)
            if not unpacker.eof:
                raise ValueError("cut short, or too long")
            found = json.loads(text)
            protocol, version = found["protocol"], found["version"]
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RefusedError(f"not a packet of fastfact ({error})") from error
        if protocol != PROTOCOL:
            raise RefusedError(
                f"speaks protocol {protocol!r:.40} (fastfact {version!s:.40}), this side {PROTOCOL} (fastfact"
                f" {VERSION}): install the same version on both"
            )
        return cls(found, body)

    def messages(self, lengths: Sequence[Sequence[int]]) -> list[list[bytes]]:
        """The body cut into messages of these lengths, in groups. Raises RefusedError if they do not fill it."""
        flat = [length for group in lengths for length in group]
        if wrong := [length for length in flat if type(length) is not int or length < 0]:
            raise RefusedError(f"a message of it has {wrong[0]!r:.80} bytes, must be an integer of at least 0")
        if sum(flat) != len(self.body):
            raise RefusedError(f"its messages have {sum(flat)} bytes, it brings {len(self.body)}")
        at, groups = 0, []
        for group in lengths:
            parts = []
            for length in group:
                parts.append(self.body[at : at + length])
                at += length
            groups.append(parts)
        return groups


def table_of(infos: Mapping[str, TensorInfo], sparse: Sequence[str], frozen: str | None = None) -> str:
    """A digest of the tensors' names, shapes and dtypes, and of what is `frozen`: the same where messages mean the
    same."""
    rows = [[info.name, list(info.shape), str(info.dtype), name in sparse] for name, info in infos.items()]
    return digest(json.dumps(rows if frozen is None else [rows, frozen]).encode())
