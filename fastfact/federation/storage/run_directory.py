"""The run directory: configuration, rows, ledger and checkpoints, written so that a crash loses nothing saved.

    DIR/config.json                        what was run: its id, model, method, settings, source of the data
    DIR/metrics.jsonl                      a row for each round and client
    DIR/ledger.jsonl                       a row for each round and direction
    DIR/checkpoints/round-000010.safetensors   the clients' states after that round, stacked ("client/<name>" [m, …]) or
                                           packed ("records/…", see `states.PackedStates`), of those that have trained
                                           (`clients` names them if not all), and what the server keeps ("server/…")

Clients in a store of their own (`Federation(store=DIR)`) are not copied into checkpoints: the store is one after each
round.

Whole files are written by `fastfact.base.files`. Rows are appended and synced before a checkpoint is written, so a
checkpoint never knows more than the rows. The newest two checkpoints are kept. Nothing here unpickles or imports
anything named in a file.

What belongs together carries the id that the run drew when it began. config.json has a digest of itself, a checkpoint
one of each tensor and of all else in its header, and of the rows there were when it was written: length and digest of
the beginning of both files. The files of versions before that load without these promises.
"""

import json
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastfact.base import files
from fastfact.federation.state import as_bytes

CONFIG, METRICS, LEDGER, CHECKPOINTS = "config.json", "metrics.jsonl", "ledger.jsonl", "checkpoints"
KEPT = 2
"""How many checkpoints are kept: where the newest is damaged, there is the one before."""
_NAME = re.compile(r"round-(\d{6,12})\.safetensors")
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}


class RunDirectoryError(ValueError):
    """A run directory that is missing something, half-written, or not of this federation. One line, whatever a file
    has in its names."""

    def __init__(self, message: str = ""):
        super().__init__(message.replace("\r", "\\r").replace("\n", "\\n"))


class DamagedError(RunDirectoryError):
    """A file of a run directory that is not what was written."""


class Rows:
    """A file of JSON rows that is appended to, and the digest of what it holds."""

    def __init__(self, path: Path, rows: Iterable[Mapping[str, Any]]):
        """Write the file anew."""
        self.path = path
        data = _text(rows)
        files.write(path, data)
        self._hash, self._length = files.hasher(data), len(data)

    def append(self, rows: Iterable[Mapping[str, Any]], sync: bool) -> None:
        """Add rows. sync: they are on the disk when this returns."""
        data = _text(rows)
        try:
            with open(self.path, "ab") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(self.path)
            raise
        self._hash.update(data)
        self._length += len(data)

    def position(self) -> list:
        """Length in bytes and digest of the file, as `read_rows` verifies them."""
        return [self._length, self._hash.hexdigest()]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file of JSON rows."""
    files.write(path, _text(rows))


def _text(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row, separators=(", ", ": "), allow_nan=True) + "\n" for row in rows).encode()


def read_rows(path: Path, until: int, position: list | None = None) -> list[dict]:
    """The rows of rounds up to `until`. What follows was not yet in a checkpoint, a cut last line included.

    position: what `Rows.position` was when the checkpoint was written; verified if given.
    Raises DamagedError if the file is missing or damaged before that.
    """
    if not path.is_file():
        raise DamagedError(f"{path}: missing, the run directory is half-written")
    data = path.read_bytes()
    if position is not None:
        length, digest = position
        if len(data) < length:
            raise DamagedError(f"{path}: is cut short, it had {length} bytes when round {until} was saved")
        data = data[:length]
        if files.digest(data) != digest:
            raise DamagedError(f"{path}: damaged, or of another run: not the rows that round {until} was saved with")
    return list(_parsed(path, data.decode(errors="replace").splitlines(), until))


def _parsed(path: Path, lines: list[str], until: int) -> Iterator[dict]:
    last = 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            round = row["round"]
            late = round > until
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if last >= until:
                return
            raise DamagedError(f"{path}: line {number} is not a row: {error}") from error
        if late:
            return
        last = round
        yield row


def read_config(directory: Path) -> dict:
    """The configuration of a run directory. Raises RunDirectoryError if there is none, or it is damaged."""
    path = directory / CONFIG
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such run directory")
    if not path.is_file():
        raise RunDirectoryError(f"{directory}: no run directory, or a half-written one: {CONFIG} is missing")
    try:
        config = files.read_sealed(path, sealed="id")
    except ValueError as error:
        raise DamagedError(str(error)) from error
    if config.get("format") != 1:
        raise RunDirectoryError(f"{path}: format {config.get('format')!r}")
    return config


def checkpoint_path(directory: Path, round: int) -> Path:
    return directory / CHECKPOINTS / f"round-{round:06d}.safetensors"


def checkpoints(directory: Path) -> dict[int, Path]:
    """round → file of the complete checkpoints, oldest first. What an interrupted save left behind is none."""
    found = {}
    folder = directory / CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def last_checkpoint(directory: Path) -> tuple[int, Path]:
    """The newest complete checkpoint. Raises RunDirectoryError if there is none."""
    found = checkpoints(directory)
    if not found:
        raise RunDirectoryError(f"{directory / CHECKPOINTS}: no complete checkpoint, start the run again")
    round = max(found)
    return round, found[round]


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with digests: complete under its name, or not there."""
    files.make_folder(path.parent)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    metadata = {**(metadata or {}), "digests": json.dumps(digests)}
    metadata["digest"] = _seal(metadata)
    header, at = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        offsets = [at, at := at + tensor.nbytes]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    # The library's own writer would hold all tensors once more, and a kill would leave a file of a name of its own.
    with files.replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(as_bytes(tensor).numpy())


def _digest(tensor: Tensor) -> str:
    # What the numbers are is part of what they say.
    hasher = files.hasher(f"{tensor.dtype} {list(tensor.shape)}".encode())
    hasher.update(_bytes(tensor))
    return hasher.hexdigest()


def _seal(metadata: Mapping[str, str]) -> str:
    return files.digest(json.dumps({k: v for k, v in metadata.items() if k != "digest"}, sort_keys=True).encode())


def look_into(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """(metadata, name → shape) of a checkpoint, whose tensors are not read. Raises DamagedError if damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in list(file.keys())}
            return _verified(path, dict(file.metadata() or {}), set(shapes)), shapes
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path}: damaged or cut short: {error}") from error


def _verified(path: Path, metadata: dict[str, str], names: set[str]) -> dict[str, str]:
    """The metadata of a file, whose own digest is right, if it has any."""
    if "digest" in metadata or "digests" in metadata:
        if metadata.get("digest") != _seal(metadata):
            raise DamagedError(f"{path}: damaged: the digest of its header is that of another")
        if different := sorted(names ^ set(json.loads(metadata["digests"]))):
            raise DamagedError(f"{path}: damaged: tensor {different[0]} is missing, or was not written")
    return metadata


def load_tensors(
    path: Path, expected: Mapping[str, Tensor], also: tuple[str, ...] = ("server/",)
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a checkpoint. Every tensor in `expected` must be there, of its shape and dtype; others are
    allowed only with names that begin with one in `also`.

    Raises RunDirectoryError, naming the file and the tensor, before anything is returned; DamagedError if it is not as
    it was written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            metadata = _verified(path, dict(file.metadata() or {}), names)
            for name, tensor in expected.items():
                if name not in names:
                    raise RunDirectoryError(f"{path}: tensor {name} is missing")
                part = file.get_slice(name)
                shape, dtype = list(part.get_shape()), part.get_dtype()
                if shape != list(tensor.shape) or dtype != _TYPES.get(tensor.dtype):
                    raise RunDirectoryError(
                        f"{path}: tensor {name} is {dtype} {shape},"
                        f" must be {_TYPES.get(tensor.dtype)} {list(tensor.shape)}"
                    )
            unknown = sorted(name for name in names - set(expected) if not name.startswith(also))
            if unknown:
                raise RunDirectoryError(f"{path}: tensor {unknown[0]} is not of this model")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise DamagedError(f"{path}: damaged or cut short: {error}") from error
    for name, digest in json.loads(metadata.get("digests", "{}")).items():
        if _digest(tensors[name]) != digest:
            raise DamagedError(f"{path}: tensor {name} is damaged: its digest is that of other numbers")
    return tensors, metadata
