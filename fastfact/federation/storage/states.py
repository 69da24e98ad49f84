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

import copy
import json
import sqlite3
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fastfact.federation.state import State, like_rows
from fastfact.federation.storage.run_directory import RunDirectoryError
from fastfact.federation.tensors import TensorInfo, tensors_of
from fastfact.federation.wire.format import EXACT_BITMAP, Wire

MEMORY, DATABASE = "memory", "clients.sqlite"


class States(Protocol):
    """What holds the states of k clients. The only place where a client's state lives."""

    initial: State
    """The state of one client at the start, [1, …]."""

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
        for clients, rows in self.pending:
            old = self.row[clients]
            self.row[clients] = rows
            self.free = torch.cat([self.free, old[old >= 0]])
        self.free, self.pending = self.free.sort().values, []

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
        """Put a record's tensors into a row of `out`."""
        for name, tensor in self.wire.decode(record, names=names).items():
            out[name][row].copy_(tensor)


class PackedStates:
    """States as records, see `Codec`, in memory; `Database` has them in a file."""

    def __init__(self, initial: State, k: int, codec: Codec):
        self.initial, self.k, self.codec = initial, k, codec
        self.records: dict[int, tuple[bytes, int]] = {}
        self.pending: dict[int, tuple[bytes, int]] = {}
        self.buffer: State | None = None

    def __len__(self) -> int:
        return self.k

    state = Stacked.state

    def read(self, clients: Sequence[int], names: Sequence[str] | None = None) -> State:
        return self.load(clients, names=names)

    def reserve(self, n: int) -> None:
        pass

    def work(self, clients: Sequence[int], but: Collection[str] = ()) -> State:
        self.buffer = again(self.buffer, self.initial, len(clients))
        return self.load(clients, self.buffer, [name for name in self.initial if name not in but])

    def load(self, clients: Sequence[int], out: State | None = None, names: Sequence[str] | None = None) -> State:
        clients, names = list(clients), list(self.initial) if names is None else list(names)
        out = out or {name: like_rows(self.initial[name], len(clients)) for name in names}
        records = self._read(clients)
        for row, client in enumerate(clients):
            if client in records:
                self.codec.decode(records.pop(client), out, row, names)
            else:
                for name in names:
                    out[name][row].copy_(self.initial[name][0])
        return out

    def _read(self, clients: Sequence[int]) -> dict[int, bytes]:
        return {client: self.records[client][0] for client in clients if client in self.records}

    def ahead(self, clients: Sequence[int]) -> None:
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
        parts = (tensors[name].tolist() for name in ("client", "length", "nonzeros"))
        for client, length, nonzeros in zip(*parts, strict=True):
            if not 0 <= client < self.k or at + length > len(data):
                raise ValueError(f"record of client {client} of {self.k} is cut short")
            if client in only:
                self.records[client] = data[at : at + length], nonzeros
            at += length


class Database:
    """The records in a SQLite file of a directory, read ahead on a thread of its own.

    Raises RunDirectoryError if the directory holds something else than the states of such clients.
    """

    def __init__(self, initial: State, k: int, codec: Codec, directory: Path):
        self.initial, self.k, self.codec = initial, k, codec
        self.path = directory / DATABASE
        new = not self.path.exists()
        if new and directory.exists() and any(directory.iterdir()):
            raise RunDirectoryError(f"{directory}: is not empty and no store of clients ({DATABASE} is missing)")
        directory.mkdir(parents=True, exist_ok=True)
        about = json.dumps({"format": 1, "clients": k, **codec.table})
        self.connection = _connect(self.path, new)
        if new:
            with self.connection:
                self.connection.execute("BEGIN")
                self.connection.execute(
                    "CREATE TABLE client (id INTEGER PRIMARY KEY, record BLOB NOT NULL, nonzeros INTEGER NOT NULL)"
                )
                self.connection.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL)")
                self.connection.execute("INSERT INTO meta VALUES ('about', ?)", (about,))
        elif _about(self.connection, self.path) != json.loads(about):
            raise RunDirectoryError(f"{self.path}: holds other clients, or those of another model")
        self.reader = _connect(self.path, False)
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self.coming: tuple[list[int], Future] | None = None
        self.buffer: State | None = None

    def __len__(self) -> int:
        return self.k

    state, load, read, work, reserve = (
        PackedStates.state,
        PackedStates.load,
        PackedStates.read,
        PackedStates.work,
        PackedStates.reserve,
    )

    def _read(self, clients: Sequence[int]) -> dict[int, bytes]:
        if self.coming is not None and self.coming[0] == list(clients):
            (_, future), self.coming = self.coming, None
            return future.result()
        return self._fetch(clients)

    def _fetch(self, clients: Sequence[int]) -> dict[int, bytes]:
        found = {}
        with self.lock:
            for client in clients:
                row = self.reader.execute("SELECT record FROM client WHERE id = ?", (client,)).fetchone()
                if row is not None:
                    found[client] = row[0]
        return found

    def ahead(self, clients: Sequence[int]) -> None:
        clients = list(clients)
        self.coming = clients, self.pool.submit(self._fetch, clients)

    def store(self, clients: Sequence[int], state: State) -> None:
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")
        for row, client in enumerate(clients):
            record, nonzeros = self.codec.encode(state, row)
            self.connection.execute("INSERT OR REPLACE INTO client VALUES (?, ?, ?)", (client, record, nonzeros))

    def commit(self, **values: bytes | str) -> None:
        """values: kept with the states, see `value`; they change together or not at all."""
        self._forget()
        if not self.connection.in_transaction:
            self.connection.execute("BEGIN IMMEDIATE")
        for key, value in values.items():
            self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        self._forget()
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def _forget(self) -> None:
        """What was read ahead is not what the next round will find."""
        if self.coming is not None:
            self.coming[1].result()
            self.coming = None

    def value(self, key: str) -> bytes | str | None:
        """What was committed under a key, or None."""
        row = self.connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def sync(self) -> None:
        """Bring what is committed onto the disk, against a power cut."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def touched(self) -> list[int]:
        return [row[0] for row in self.connection.execute("SELECT id FROM client ORDER BY id")]

    def bytes(self) -> int:
        return self.connection.execute("SELECT coalesce(sum(length(record)), 0) FROM client").fetchone()[0]

    def close(self) -> None:
        """Close the file; the object is of no use after."""
        self.rollback()
        self.pool.shutdown()
        self.reader.close()
        self.connection.close()


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


def about_database(directory: Path) -> dict[str, Any]:
    """What a store of clients holds. Raises RunDirectoryError if there is none."""
    path = directory / DATABASE
    if not path.is_file():
        raise RunDirectoryError(f"{directory}: no store of clients ({DATABASE} is missing)")
    connection = _connect(path, False)
    try:
        table = _about(connection, path)
        rows = connection.execute("SELECT count(*), coalesce(sum(length(record)), 0), sum(nonzeros) FROM client")
        touched, size, nonzeros = rows.fetchone()
        server = connection.execute("SELECT value FROM meta WHERE key = 'server'").fetchone()
        rounds = int(json.loads(server[0])["round"]) if server else 0
        return {"clients": table["clients"], "rounds": rounds, **totals(touched, size, nonzeros, table)}
    finally:
        connection.close()


def _connect(path: Path, new: bool) -> sqlite3.Connection:
    try:
        # Transactions are begun and ended by hand; the reader is used by one thread at a time.
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        if new:
            # A record is around 1 MB: the largest page keeps its chain of pages short.
            connection.execute("PRAGMA page_size = 65536")
        connection.execute("PRAGMA journal_mode = WAL")
        # In this mode a crash of the process loses nothing; a power cut at most the newest rounds, whole ones.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 256")
    except sqlite3.Error as error:
        raise RunDirectoryError(f"{path}: {error}") from error
    return connection


def _about(connection: sqlite3.Connection, path: Path) -> dict[str, Any]:
    try:
        row = connection.execute("SELECT value FROM meta WHERE key = 'about'").fetchone()
        about = json.loads(row[0])
        if about["format"] != 1:
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
        for name, tensor in tensors_of(model).items():
            tensor.data = state[name][0]
        return model.eval()
