"""The run directory: configuration, rows, ledger and checkpoints, written so that a crash loses nothing saved.

    DIR/config.json                        what was run: model, method, settings, source of the data
    DIR/metrics.jsonl                      a row for each round and client
    DIR/ledger.jsonl                       a row for each round and direction
    DIR/checkpoints/round-000010.safetensors   the clients' states after that round, stacked ("client/<name>" [m, …]) or
                                           packed ("records/…", see `states.PackedStates`), of those that have trained
                                           (`clients` names them if not all), and what the server keeps ("server/…")

Clients in a store of their own (`Federation(store=DIR)`) are not copied into checkpoints: the store is one after each
round.

Whole files are written beside their place, synced and renamed. Rows are appended and synced before a checkpoint is
written, so a checkpoint never knows more than the rows. Nothing here unpickles or imports anything named in a file.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

CONFIG, METRICS, LEDGER, CHECKPOINTS = "config.json", "metrics.jsonl", "ledger.jsonl", "checkpoints"
_NAME = re.compile(r"round-(\d{6,})\.safetensors")
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
    torch.bool: "BOOL",
}


class RunDirectoryError(ValueError):
    """A run directory that is missing something, half-written, or not of this federation."""


def _sync_directory(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(temporary: Path, path: Path) -> None:
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole file: it is there complete, or as it was before."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _replace(temporary, path)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file of JSON rows."""
    write_text(path, "".join(_row(row) for row in rows))


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]], sync: bool = False) -> None:
    """Add JSON rows to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(_row(row) for row in rows))
        if sync:
            file.flush()
            os.fsync(file.fileno())


def _row(row: Mapping[str, Any]) -> str:
    return json.dumps(row, separators=(", ", ": "), allow_nan=True) + "\n"


def read_rows(path: Path, until: int) -> list[dict]:
    """The rows of rounds up to `until`. What follows was not yet in a checkpoint, a cut last line included.

    Raises RunDirectoryError if the file is missing or damaged before that.
    """
    if not path.is_file():
        raise RunDirectoryError(f"{path}: missing, the run directory is half-written")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            late = row["round"] > until
        except (ValueError, TypeError, KeyError) as error:
            if rows and rows[-1]["round"] >= until:
                break
            raise RunDirectoryError(f"{path}: line {number} is not a row: {error}") from error
        if late:
            break
        rows.append(row)
    return rows


def read_config(directory: Path) -> dict:
    """The configuration of a run directory. Raises RunDirectoryError if there is none, or it is damaged."""
    path = directory / CONFIG
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: no such run directory")
    if not path.is_file():
        raise RunDirectoryError(f"{directory}: no run directory, or a half-written one: {CONFIG} is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("format") != 1:
        raise RunDirectoryError(f"{path}: format {config.get('format')!r}" if isinstance(config, dict) else f"{path}")
    return config


def checkpoint_path(directory: Path, round: int) -> Path:
    return directory / CHECKPOINTS / f"round-{round:06d}.safetensors"


def checkpoints(directory: Path) -> dict[int, Path]:
    """round → file of the complete checkpoints, oldest first. What an interrupted save left behind is none."""
    found = {}
    folder = directory / CHECKPOINTS
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def last_checkpoint(directory: Path) -> tuple[int, Path]:
    """The newest complete checkpoint. Raises RunDirectoryError if there is none."""
    found = checkpoints(directory)
    if not found:
        raise RunDirectoryError(f"{directory / CHECKPOINTS}: no complete checkpoint, start the run again")
    round = max(found)
    return round, found[round]


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a checkpoint: complete under its name, or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # safetensors wants row-major tensors that share no memory.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, temporary, dict(metadata))
    _replace(temporary, path)


def look_into(path: Path) -> tuple[dict[str, str], dict[str, list[int]]]:
    """(metadata, name → shape) of a checkpoint, whose tensors are not read. Raises RunDirectoryError if damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in list(file.keys())}
            return dict(file.metadata() or {}), shapes
    except (SafetensorError, OSError) as error:
        raise RunDirectoryError(f"{path}: damaged or cut short: {error}") from error


def load_checkpoint(
    path: Path, expected: Mapping[str, Tensor], also: tuple[str, ...] = ("server/",)
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a checkpoint. Every tensor in `expected` must be there, of its shape and dtype; others are
    allowed only with names that begin with one in `also`.

    Raises RunDirectoryError, naming the file and the tensor, before anything is returned.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
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
            return {name: file.get_tensor(name) for name in names}, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise RunDirectoryError(f"{path}: damaged or cut short: {error}") from error
