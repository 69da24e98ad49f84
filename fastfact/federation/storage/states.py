"""The clients at rest: their states between rounds, in memory or in a file.

A client that has never trained has no record: it is in the initial state, so registering clients costs nothing. What a
round writes is visible after `commit`, all of it or nothing.

`Stacked` keeps tensors as they are; `PackedStates` keeps a client as one message of the wire format (μ as a bitmap and
its values, see `wire`), in a dict, `Database` in a file. The database is SQLite: it is in the standard library, its
transactions are what keeps a client from being half-written, readers on other threads see the last committed round
while one is being written, and a round larger than memory spills to its log. LMDB, twice as fast at reading 1 MB
records, is a dependency and wants the size of the file in advance; memory-mapped safetensors have neither transactions
nor records that change their length, as μ does.
"""

import contextlib
import copy
import json
import os
import sqlite3
import threading
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastfact.base import files
from fastfact.federation.state import State, like_rows
from fastfact.federation.storage.run_directory import DamagedError, RunDirectoryError
from fastfact.federation.tensors import TensorInfo
from fastfact.federation.wire.format import EXACT_BITMAP, Wire, count_of

MEMORY, DATABASE = "memory", "clients.sqlite"


class States(Protocol):
    """What holds the states of k clients. The only place where a client's state lives."""

    initial: State
    """The state of one client at the start, [1, …]."""

    @property
    def state(self) -> State:
        """All clients, [k, …]: a copy."""

    def __len__(self) -> int: ...

    def load(self, clients: Sequence[int], out: State | None = None, names: Sequence[str] | None = None) -> State:
        """A copy of the committed state of some clients, [len(clients), …], into `out` if given; only `names` if
        given."""

    def read(self, clients: Sequence[int], names: Sequence[str] | None = None) -> State:
        """The committed state of some clients as `load` gives it, not to be changed, and good until the next commit."""

    def work(self, clients: Sequence[int], but: Collection[str] = ()) -> State:
        """The committed state of some clients as `load` gives it, to be changed and handed to `store` before the next
        are asked for: in memory that is used again. but: tensors that will be overwritten, with anything in them."""

    def reserve(self, n: int) -> None:
        """Say how many clients will be stored until the next commit."""

    def ahead(self, clients: Sequence[int]) -> None:
        """Say which clients will be asked for next."""

    def store(self, clients: Sequence[int], state: State) -> None:
        """Write the whole states [len(clients), …] of some clients, for `commit`; each client once between commits."""

    def commit(self) -> None:
        """Make everything stored since the last commit the clients' state."""

    def rollback(self) -> None:
        """Forget everything stored since the last commit."""

    def close(self) -> None:
        """Let go of files, without what was not committed; the object is of no use after."""

    def touched(self) -> list[int]:
        """The clients that are not in the initial state, ascending."""

    def bytes(self) -> int:
        """What the states of these clients take."""


def follow(rows: Tensor) -> bool:
    """Whether the rows follow each other."""
    return len(rows) > 0 and bool((rows[1:] - rows[:-1] == 1).all())


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows: a view if they follow each other, else a copy."""
    if follow(rows):
        return tensor[int(rows[0]) : int(rows[-1]) + 1]
    return tensor[rows.to(tensor.device)]


def again(buffer: State | None, initial: State, k: int) -> State:
    """The buffer if it holds k clients, else a new one."""
    if buffer is None or len(next(iter(buffer.values()))) != k:
        buffer = {name: like_rows(tensor, k) for name, tensor in initial.items()}
    return buffer


class Stacked:
    """States in memory as they are, stacked: nothing is converted on the way to the trainer and back.

    Each client has a row of the stack, and gets another with each commit; the row it had is used for the next. Where
    the rows to come follow each other, clients work in them, and to store them is no copy.
    """

    def __init__(self, initial: State, k: int):
        self.initial, self.k = initial, k
        self.row = torch.full((k,), -1)
        self.stack = {name: like_rows(tensor, 0) for name, tensor in initial.items()}
        self.free = torch.empty(0, dtype=torch.long)
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.working: State | None = None
        """What `work` gave out and is not stored yet."""
        self.reserved = self.free
        """The rows it is to have."""
        self.buffer: State | None = None

    @classmethod
    def of(cls, state: State) -> "Stacked":
        """The clients whose states [k, …] these are."""
        k = len(next(iter(state.values())))
        states = cls({name: tensor[:1] for name, tensor in state.items()}, k)
        states.stack, states.row = state, torch.arange(k)
        return states

    def __len__(self) -> int:
        return self.k

    @property
    def state(self) -> State:
        """All clients, [k, …]: a copy."""
        return self.load(range(self.k))

    def load(self, clients: Sequence[int], out: State | None = None, names: Sequence[str] | None = None) -> State:
        rows = self.row[torch.as_tensor(list(clients), dtype=torch.long)]
        names = list(self.initial) if names is None else names
        out = out or {name: like_rows(self.initial[name], len(rows)) for name in names}
        there = rows >= 0
        for name in names:
            if there.all():
                out[name].copy_(rows_of(self.stack[name], rows))
            else:
                out[name].copy_(self.initial[name].expand_as(out[name]))
                mask = there.to(out[name].device)
                out[name][mask] = self.stack[name][rows[there].to(mask.device)]
        return out

    def read(self, clients: Sequence[int], names: Sequence[str] | None = None) -> State:
        rows = self.row[torch.as_tensor(list(clients), dtype=torch.long)]
        if not follow(rows) or rows[0] < 0:
            return self.load(clients, names=names)
        return {name: rows_of(self.stack[name], rows) for name in (self.initial if names is None else names)}

    def work(self, clients: Sequence[int], but: Collection[str] = ()) -> State:
        self._forget_work()
        self.reserved = rows = self._rows(len(clients))
        if follow(rows):
            self.working = {name: rows_of(tensor, rows) for name, tensor in self.stack.items()}
        else:
            self.working = self.buffer = again(self.buffer, self.initial, len(clients))
        return self.load(clients, self.working, [name for name in self.initial if name not in but])

    def _forget_work(self) -> None:
        self.free = torch.cat([self.free, self.reserved]).sort().values
        self.working, self.reserved = None, self.free[:0]

    def ahead(self, clients: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def store(self, clients: Sequence[int], state: State) -> None:
        if state is self.working:
            rows, self.working, self.reserved = self.reserved, None, self.reserved[:0]
        else:
            rows = self._rows(len(clients))
        together = follow(rows)
        for name, tensor in state.items():
            if not together:
                self.stack[name][rows.to(tensor.device)] = tensor
            elif (place := rows_of(self.stack[name], rows)).data_ptr() != tensor.data_ptr():
                place.copy_(tensor)
        self.pending.append((torch.as_tensor(list(clients), dtype=torch.long), rows))

    def reserve(self, n: int) -> None:
        self._forget_work()
        if len(self.free) < n:
            size = len(next(iter(self.stack.values())))
            # The next commit has clients in n rows, so another n are wanted then; k + n are always enough.
            more = max(n - len(self.free), min(max(size, 2 * n), self.k + n - size))
            for name, tensor in self.stack.items():
                self.stack[name] = like_rows(tensor, size + more)
                self.stack[name][:size] = tensor
            self.free = torch.cat([self.free, torch.arange(size, size + more)])

    def _rows(self, n: int) -> Tensor:
        """n rows that hold nobody's state."""
        self.reserve(n)
        rows, self.free = self.free[:n], self.free[n:]
        return rows

    def commit(self) -> None:
        row, free = self.row.clone(), [self.free]
        for clients, rows in self.pending:
            old = row[clients]
            row[clients] = rows
            free.append(old[old >= 0])
        # At once: an interrupt finds the state before, or the one after.
        self.row, self.free, self.pending = row, torch.cat(free).sort().values, []

    def rollback(self) -> None:
        self._forget_work()
        self.free = torch.cat([self.free, *(rows for _, rows in self.pending)]).sort().values
        self.pending = []

    def touched(self) -> list[int]:
        return (self.row >= 0).nonzero().flatten().tolist()

    def bytes(self) -> int:
        each = sum(tensor[0].numel() * tensor.element_size() for tensor in self.initial.values())
        return each * len(self.touched())


class Codec:
    """A client's state as bytes: a message of the wire format over all its tensors.

    values: of float tensors that train, "exact" or "bfloat16"; buffers are exact. Raises ValueError for others.
    """

    def __init__(self, initial: State, infos: Mapping[str, TensorInfo], sparse: Iterable[str], values: str = "exact"):
        if values not in ("exact", "bfloat16"):
            raise ValueError(f"Federation(store_values={values!r}): must be exact or bfloat16")
        kept = {
            name: infos.get(name) or TensorInfo(name, tuple(t.shape[1:]), t.dtype, role=name, layer=0, layers=0)
            for name, t in initial.items()
        }
        exact = [name for name, info in kept.items() if info.buffer or name not in infos]
        self.wire = Wire(kept, values, sparse, exact)
        self.sparse = list(sparse)
        self.table = [[name, str(info.dtype), list(info.shape)] for name, info in kept.items()]
        self.table = {"values": values, "sparse": self.sparse, "tensors": self.table}
        """What must be the same for a record to be readable, as JSON can hold it."""

    def packs(self) -> bool:
        """Whether a record is shorter than the tensors it is of."""
        return self.wire.values != "exact" or any(self.wire.infos[name].dtype in EXACT_BITMAP for name in self.sparse)

    def encode(self, state: State, row: int) -> tuple[bytes, int]:
        """The record of one row of `state`, and the number of nonzeros of its μ."""
        one = {name: tensor[row] for name, tensor in state.items()}
        return self.wire.encode(one), sum(int(one[name].count_nonzero()) for name in self.sparse)

    def decode(self, record: bytes, out: State, row: int, names: Sequence[str] | None) -> None:
        """Put a record's tensors into a row of `out`. Raises ValueError for a record that is not of all of them."""
        if count_of(record) != len(self.wire.names):
            raise ValueError(f"record: has {count_of(record)} tensors, the state of a client {len(self.wire.names)}")
        for name, tensor in self.wire.decode(record, names=names).items():
            out[name][row].copy_(tensor)


class Records(ABC):
    """States as records, see `Codec`."""

    initial: State
    k: int
    codec: Codec
    buffer: State | None = None

    @abstractmethod
    def _read(self, clients: Sequence[int]) -> dict[int, bytes]:
        """The records of those that have one."""

    def __len__(self) -> int:
        return self.k

    state = Stacked.state

    def read(self, clients: Sequence[int], names: Sequence[str] | None = None) -> State:
        return self.load(clients, names=names)

    def reserve(self, n: int) -> None:
        return

    def work(self, clients: Sequence[int], but: Collection[str] = ()) -> State:
        self.buffer = again(self.buffer, self.initial, len(clients))
        return self.load(clients, self.buffer, [name for name in self.initial if name not in but])

    def load(self, clients: Sequence[int], out: State | None = None, names: Sequence[str] | None = None) -> State:
        clients, names = list(clients), list(self.initial) if names is None else list(names)
        out = out or {name: like_rows(self.initial[name], len(clients)) for name in names}
        records = self._read(clients)
        for row, client in enumerate(clients):
            if client in records:
                try:
                    self.codec.decode(records.pop(client), out, row, names)
                except ValueError as error:
                    raise DamagedError(f"the record of client {client}: {error}") from error
            else:
                for name in names:
                    out[name][row].copy_(self.initial[name][0])
        return out


class PackedStates(Records):
    """Records in memory."""

    def __init__(self, initial: State, k: int, codec: Codec):
        self.initial, self.k, self.codec = initial, k, codec
        self.records: dict[int, tuple[bytes, int]] = {}
        self.pending: dict[int, tuple[bytes, int]] = {}

    def _read(self, clients: Sequence[int]) -> dict[int, bytes]:
        return {client: self.records[client][0] for client in clients if client in self.records}

    def ahead(self, clients: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass

    def store(self, clients: Sequence[int], state: State) -> None:
        for row, client in enumerate(clients):
            self.pending[client] = self.codec.encode(state, row)

    def commit(self) -> None:
        self.records |= self.pending
        self.pending = {}

    def rollback(self) -> None:
        self.pending = {}

    def touched(self) -> list[int]:
        return sorted(self.records)

    def bytes(self) -> int:
        return sum(len(record) for record, _ in self.records.values())

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything as tensors and what JSON can hold, for a checkpoint."""
        clients = self.touched()
        parts = [self.records[client] for client in clients]
        tensors = {
            "client": torch.tensor(clients, dtype=torch.int64),
            "length": torch.tensor([len(record) for record, _ in parts], dtype=torch.int64),
            "nonzeros": torch.tensor([nonzeros for _, nonzeros in parts], dtype=torch.int64),
            "records": torch.empty(0, dtype=torch.uint8),
        }
        if clients:
            tensors["records"] = torch.frombuffer(bytearray().join(record for record, _ in parts), dtype=torch.uint8)
        return tensors, self.codec.table

    def unpack(self, tensors: Mapping[str, Tensor], only: range) -> None:
        """The inverse of `packed`, for some of the clients. Raises ValueError for records that are none."""
        data, at = tensors["records"].numpy().tobytes(), 0
        clients, lengths, nonzeros = (tensors[name].tolist() for name in ("client", "length", "nonzeros"))
        check_clients(clients, self.k)
        if min(lengths, default=0) < 0 or sum(lengths) != len(data):
            raise ValueError(f"its records have {sum(lengths)} bytes, there are {len(data)}")
        records = {}
        for client, length, count in zip(clients, lengths, nonzeros, strict=True):
            if client in only:
                records[client] = data[at : at + length], count
            at += length
        self.records = records


def check_clients(clients: Sequence[int], k: int) -> None:
    """Raise ValueError unless these are some of k clients, each once, ascending."""
    for before, client in zip([-1, *clients], clients, strict=False):
        if not before < client < k:
            raise ValueError(f"client {client} after client {before}, must be some of {k}, each once, ascending")


_TABLES = {
    "client": "CREATE TABLE client (id INTEGER PRIMARY KEY, record BLOB NOT NULL, nonzeros INTEGER NOT NULL)",
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "digest": "CREATE TABLE digest (id INTEGER PRIMARY KEY, digest BLOB NOT NULL)",
}
"""Digests stand beside the records, not in their rows: to add them up no record is read."""
_MODULUS = 1 << 128


def _digest(client: int, record: bytes, nonzeros: int) -> bytes:
    """Of a record and of whose it is."""
    hasher = files.hasher(f"{client} {nonzeros} ".encode())
    hasher.update(record)
    return hasher.digest()


class Database(Records):
    """The records in a SQLite file of a directory, read ahead on a thread of its own.

    A record has a digest that holds its client too, and the sum of the digests is kept with what the server knows: a
    record that was changed, exchanged, taken from an earlier round or removed is found, the first three when it is
    read, the last when the file is opened. A store of before that has this from its first round on.

    Raises RunDirectoryError if the directory holds something else than the states of such clients.
    """

    def __init__(self, initial: State, k: int, codec: Codec, directory: Path):
        self.initial, self.k, self.codec = initial, k, codec
        self.path = directory / DATABASE
        leftover = (DATABASE + end for end in ("-journal", "-wal", "-shm"))
        if not self.path.exists() and not files.is_vacant(directory, *leftover):
            raise RunDirectoryError(f"{directory}: is not empty and no store of clients ({DATABASE} is missing)")
        files.make_folder(directory)
        about = {"clients": k, **codec.table}
        self.connection = _connect(self.path)
        with _errors(self.path):
            if not _tables(self.connection, self.path):
                self._create(about)
            found = _about(self.connection, self.path)
            if {name: found.get(name) for name in about} != json.loads(json.dumps(about)):
                raise RunDirectoryError(f"{self.path}: holds other clients, or those of another model")
            self.checked = found["format"] >= 2
            """Whether the records have digests."""
            self.total = self.committed = _total(self.connection) if self.checked else 0
            if self.checked:
                _check(self.connection, self.path, self.total)
        self.reader = _connect(self.path)
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self.coming: tuple[list[int], Future] | None = None

    def _create(self, about: dict[str, Any]) -> None:
        with files.locked(self.path.parent), self._transaction():
            if not _tables(self.connection, self.path):
                for statement in _TABLES.values():
                    self.connection.execute(statement)
                self._put("about", json.dumps({"format": 2, **about}))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def _put(self, key: str, value: bytes | str) -> None:
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store, to train its clients. Raises InUseError if another process has it."""
        with files.locked(self.path.parent):
            if not self.checked:
                self._add_digests()
            yield

    def _add_digests(self) -> None:
        with _errors(self.path), self._transaction():
            about = _about(self.connection, self.path) | {"format": 2}
            self.connection.execute(_TABLES["digest"])
            for client, record, nonzeros in self.connection.execute("SELECT id, record, nonzeros FROM client"):
                digest = _digest(client, _bytes(record), nonzeros)
                self.connection.execute("INSERT INTO digest VALUES (?, ?)", (client, digest))
            self._put("about", json.dumps(about))
            self.checked = True
            self.total = self.committed = _total(self.connection)
            self._seal()

    def _seal(self) -> None:
        values = dict(self.connection.execute("SELECT key, value FROM meta WHERE key != 'seal'"))
        self._put("seal", json.dumps({"sum": f"{self.total:032x}", "meta": _digest_of(values)}))

    def _read(self, clients: Sequence[int]) -> dict[int, bytes]:
        if self.coming is not None and self.coming[0] == list(clients):
            (_, future), self.coming = self.coming, None
            return future.result()
        return self._fetch(clients)

    def _fetch(self, clients: Sequence[int]) -> dict[int, bytes]:
        with self.lock, _errors(self.path):
            records = {client: _record(self.reader, self.path, client, self.checked) for client in clients}
        return {client: record for client, record in records.items() if record is not None}

    def ahead(self, clients: Sequence[int]) -> None:
        clients = list(clients)
        self.coming = clients, self.pool.submit(self._fetch, clients)

    def store(self, clients: Sequence[int], state: State) -> None:
        with _errors(self.path):
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            for row, client in enumerate(clients):
                record, nonzeros = self.codec.encode(state, row)
                self.connection.execute("INSERT OR REPLACE INTO client VALUES (?, ?, ?)", (client, record, nonzeros))
                if self.checked:
                    digest = _digest(client, record, nonzeros)
                    old = self.connection.execute("SELECT digest FROM digest WHERE id = ?", (client,)).fetchone()
                    self.connection.execute("INSERT OR REPLACE INTO digest VALUES (?, ?)", (client, digest))
                    gone = 0 if old is None else int.from_bytes(_bytes(old[0]), "little")
                    self.total = (self.total + int.from_bytes(digest, "little") - gone) % _MODULUS

    def commit(self, **values: bytes | str) -> None:
        """values: kept with the states, see `value`; they change together or not at all."""
        self._forget()
        with _errors(self.path):
            if not self.connection.in_transaction:
                self.connection.execute("BEGIN IMMEDIATE")
            for key, value in values.items():
                self._put(key, value)
            if self.checked:
                self._seal()
            self.connection.execute("COMMIT")
        self.committed = self.total

    def rollback(self) -> None:
        self._forget()
        self.total = self.committed
        if self.connection.in_transaction:
            with _errors(self.path):
                self.connection.execute("ROLLBACK")

    def _forget(self) -> None:
        """What was read ahead is not what the next round will find."""
        if self.coming is not None:
            self.coming[1].exception()
            self.coming = None

    def value(self, key: str) -> bytes | str | None:
        """What was committed under a key, or None."""
        with _errors(self.path):
            row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def sync(self) -> None:
        """Bring what is committed onto the disk, against a power cut."""
        with _errors(self.path):
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def touched(self) -> list[int]:
        with _errors(self.path):
            return [row[0] for row in self.connection.execute("SELECT id FROM client ORDER BY id")]

    def bytes(self) -> int:
        with _errors(self.path):
            return self.connection.execute("SELECT coalesce(sum(length(record)), 0) FROM client").fetchone()[0]

    def close(self) -> None:
        self.rollback()
        self.pool.shutdown()
        self.reader.close()
        self.connection.close()


def _record(connection: sqlite3.Connection, path: Path, client: int, checked: bool) -> bytes | None:
    """The record of a client, which must have the digest that was committed with it; None if it has none."""
    query = "SELECT record, nonzeros FROM client WHERE id = ?"
    if checked:
        query = "SELECT record, nonzeros, digest FROM digest LEFT JOIN client USING (id) WHERE digest.id = ?"
    row = connection.execute(query, (client,)).fetchone()
    if row is None:
        return None
    if checked and (not isinstance(row[0], bytes) or _digest(client, row[0], row[1]) != row[2]):
        raise DamagedError(f"{path}: the record of client {client} is damaged, or is another's")
    return _bytes(row[0])


def _total(connection: sqlite3.Connection) -> int:
    """The sum of all digests."""
    rows = connection.execute("SELECT digest FROM digest")
    return sum(int.from_bytes(_bytes(row[0]), "little") for row in rows) % _MODULUS


def _check(connection: sqlite3.Connection, path: Path, total: int) -> None:
    """Raise DamagedError unless the digests, whose sum is `total`, are those that were committed, one a client."""
    values = dict(connection.execute("SELECT key, value FROM meta"))
    counts = [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("client", "digest")]
    seal = values.pop("seal", None)
    if seal is None:
        # Nothing was committed yet.
        if counts != [0, 0] or set(values) != {"about"}:
            raise DamagedError(f"{path}: damaged: there are clients, and nothing that says which")
        return
    try:
        seal = json.loads(seal)
        committed, meta = int(seal["sum"], 16), seal["meta"]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path}: damaged: {error!r}") from error
    if meta != _digest_of(values):
        raise DamagedError(f"{path}: damaged: what the server knows has another digest than was committed")
    if committed != total or counts[0] != counts[1]:
        raise DamagedError(f"{path}: damaged: clients are missing, doubled, or of another round")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise DamagedError(f"damaged: a value of type {type(value).__name__} where bytes must be")
    return value


def _digest_of(values: Mapping[str, Any]) -> str:
    hasher = files.hasher()
    for key, value in sorted(values.items()):
        data = value.encode() if isinstance(value, str) else _bytes(value)
        hasher.update(f"{key} {len(data)} ".encode() + data)
    return hasher.hexdigest()


def totals(touched: int, size: int, nonzeros: int | None, table: Mapping[str, Any]) -> dict[str, Any]:
    """What `fastfact info` says of clients that take `size` bytes; `table` is that of their `Codec`."""
    shapes = {name: shape for name, _, shape in table.get("tensors", ())}
    numbers = sum(torch.Size(shapes[name]).numel() for name in table.get("sparse", ())) * touched
    return {
        "clients that have trained": touched,
        "bytes": size,
        "bytes a client": round(size / touched) if touched else None,
        "density of μ": round(nonzeros / numbers, 4) if numbers and nonzeros is not None else None,
    }


def about_database(directory: Path, verify: bool = False) -> dict[str, Any]:
    """What a store of clients holds; `id` is that of its run. verify: read everything.

    Raises RunDirectoryError if there is none, DamagedError for the first thing that is not what was committed.
    """
    path = directory / DATABASE
    if not path.is_file():
        raise RunDirectoryError(f"{directory}: no store of clients ({DATABASE} is missing)")
    with contextlib.closing(_connect(path, write=False)) as connection, _errors(path):
        if not _tables(connection, path):
            # Killed while it was made: whoever comes next makes it.
            return {"clients": 0, "rounds": 0, **totals(0, 0, None, {})}
        table = _about(connection, path)
        if verify:
            _verify(connection, path, table)
        rows = connection.execute("SELECT count(*), coalesce(sum(length(record)), 0), sum(nonzeros) FROM client")
        touched, size, nonzeros = rows.fetchone()
        server = connection.execute("SELECT value FROM meta WHERE key = 'server'").fetchone()
        server = json.loads(server[0]) if server else {"round": 0}
        about = {"clients": table["clients"], "rounds": int(server["round"]), **totals(touched, size, nonzeros, table)}
        return about | ({"id": server["id"]} if "id" in server else {})


def _verify(connection: sqlite3.Connection, path: Path, table: Mapping[str, Any]) -> None:
    problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise DamagedError(f"{path}: damaged: {' '.join(str(problem).split())}")
    checked = table["format"] >= 2
    if checked:
        _check(connection, path, _total(connection))
    clients = [row[0] for row in connection.execute("SELECT id FROM client ORDER BY id")]
    check_clients(clients, table["clients"])
    for client in clients:
        record = _record(connection, path, client, checked)
        if record is None or count_of(record) != len(table["tensors"]):
            raise DamagedError(f"{path}: the record of client {client} is not that of a state")


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Errors of SQLite, and of values in its file that are not of their kind, as errors of the store."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RunDirectoryError(f"{path}: {error}") from error
    except RunDirectoryError:
        raise
    except (sqlite3.Error, OverflowError, TypeError, KeyError, ValueError) as error:
        raise DamagedError(f"{path}: damaged: {error}") from error


def _connect(path: Path, write: bool = True) -> sqlite3.Connection:
    """Transactions are begun and ended by hand; a connection is used by one thread at a time."""
    with _errors(path):
        if not write:
            # SQLite lays files beside this one, and a connection that may write takes them away. Where none may be
            # laid, nobody writes unless they are there.
            mode = "rw" if os.access(path.parent, os.W_OK) else "ro"
            immutable = mode == "ro" and not path.with_name(f"{path.name}-wal").exists()
            uri = f"file:{urllib.parse.quote(str(path.resolve()))}?mode={mode}{'&immutable=1' * immutable}"
            connection = sqlite3.connect(uri, isolation_level=None, check_same_thread=False, uri=True)
            connection.execute("PRAGMA query_only = ON")
        else:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        # Whatever a file says, nothing but tables is read.
        connection.execute("PRAGMA trusted_schema = OFF")
        if write:
            # A record is around 1 MB: the largest page keeps its chain of pages short. Ignored where there are any.
            connection.execute("PRAGMA page_size = 65536")
            connection.execute("PRAGMA journal_mode = WAL")
            # In this mode a crash of the process loses nothing; a power cut at most the newest rounds, whole ones.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 256")
    return connection


def _tables(connection: sqlite3.Connection, path: Path) -> set[str]:
    """The tables of a store, none in a new one. Raises RunDirectoryError for a file with anything else in it."""
    found = set()
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchmany(9):
        if (kind, name, sql) == ("index", "sqlite_autoindex_meta_1", None):
            continue
        if kind != "table" or _TABLES.get(name) != sql:
            raise RunDirectoryError(f"{path}: no store of clients: it has a {kind} {name!r} that is none of a store")
        found.add(name)
    return found


def _about(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'about'").fetchone()
        about = json.loads(row[0])
        if about["format"] not in (1, 2) or (about["format"] == 2) != ("digest" in _tables(connection, path)):
            raise ValueError(f"format {about['format']}")
        return about
    except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path}: no store of clients: {error}") from error


class Models(Sequence):
    """The clients' models, each made when asked for (see `Federation.models`)."""

    def __init__(self, template: nn.Module, states: States):
        self._template, self._states = template, states

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, k):
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        if not -len(self) <= k < len(self):
            raise IndexError(f"models[{k}]: there are {len(self)} clients")
        model = copy.deepcopy(self._template)
        state = self._states.load([k % len(self)])
        # By the names of the state: what asks for a gradient changes while a client trains.
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in state:
                tensor.data = state[name][0]
        return model.eval()
