"""Files: written whole or not at all, held by one process at a time, checked by digests.

A temporary file stands beside the file it becomes, `.NAME.<random>.unfinished`, and only such files are ever removed.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|(?:/dev/fd|/proc/self/fd)/(\d+)")
_STREAMS = {"stdout": 1, "stderr": 2}
UNFINISHED, LOCK = ".unfinished", ".lock"
STALE = 3600
"""Seconds after which a temporary file in a folder that nobody holds is one that a killed process left."""


class InUseError(ValueError):
    """A folder that another process, or another thread of this one, is writing."""


def write(path: str | Path, content: str | bytes, keep: bool = False) -> None:
    """Write a whole file: it is there complete, or as it was before. A link is followed.

    A pipe or a device is written to, never replaced. keep: a regular file that is there already stays.
    Raises OSError, with the path.
    """
    path, data = Path(path), content.encode() if isinstance(content, str) else content
    with _named(path):
        if _streams(path):
            sys.stdout.flush()
            number = _DESCRIPTOR.fullmatch(os.path.abspath(path))
            # The descriptor itself, whose place in a file the rest of the output has too.
            to = path if number is None else os.dup(_STREAMS.get(number[1]) or int(number[2]))
            with open(to, "wb", buffering=0) as file:
                view = memoryview(data)
                while len(view):
                    view = view[file.write(view) :]
            return
        with replacing(path, keep) as temporary:
            temporary.write_bytes(data)


def write_json(path: str | Path, content: Mapping[str, Any], sealed: bool = False, **options) -> None:
    """Write JSON as `write` does. sealed: with a digest of its content beside it, which `read_sealed` verifies."""
    content = {**content, "digest": _seal(content)} if sealed else content
    # A path may have bytes that are no text: what stands for them is written as JSON escapes it.
    write(path, (json.dumps(content, **options) + "\n").encode(errors="backslashreplace"))


def read_sealed(path: Path, sealed: str | None = None) -> dict[str, Any]:
    """The content of a JSON file, without the digest, which must be right if there is one, and be there if the content
    has the key `sealed`.

    Raises ValueError for a file that is no JSON object, or whose content was changed; OSError as `open` does.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged or half-written, not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    digest = content.pop("digest", None)
    if digest != _seal(content) if digest is not None else sealed in content:
        raise ValueError(f"{path}: damaged or changed by hand: its digest is that of another content")
    return content


def _seal(content: Mapping[str, Any]) -> str:
    # As it will be read again: JSON has no tuples, and its keys are strings.
    return digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def hasher(data: bytes = b"") -> "hashlib.blake2b":
    """What makes the digests of files, of as many parts as there are."""
    return hashlib.blake2b(data, digest_size=16)


def digest(data: bytes) -> str:
    """128 bits of BLAKE2b: found where damage is chance, not where somebody writes data and digest."""
    return hasher(data).hexdigest()


@contextlib.contextmanager
def replacing(path: Path, keep: bool = False) -> Iterator[Path]:
    """The name of an empty file beside `path`, which becomes `path` when the block ends, on the disk before it has the
    name; if the block raises it is removed. keep: see `write`."""
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _named(path):
        # A name may be as long as the file system takes.
        start = f".{path.name[:40]}."
        remove_unfinished(path.parent, start, STALE)
        temporary = path.with_name(f"{start}{secrets.token_hex(4)}{UNFINISHED}")
        # Not by tempfile, whose files only their owner may read.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        try:
            yield temporary
            # Who wrote it may have put a file of his own in its place.
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode if path.exists() else mode))
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
            if keep:
                _link(temporary, path)
            else:
                os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(temporary, path)


def remove_unfinished(folder: Path, start: str = ".", older: float = 0) -> None:
    """Remove temporary files whose names begin with `start`, untouched for `older` seconds. At 0 the caller must be the
    only one that writes in `folder`."""
    for name in glob.glob(f"{glob.escape(start)}*{UNFINISHED}", root_dir=folder):
        with contextlib.suppress(OSError):
            if older == 0 or time.time() - (folder / name).stat().st_mtime > older:
                (folder / name).unlink()


def is_vacant(folder: Path, *but: str) -> bool:
    """Whether there is nothing at `folder` but what a process that was killed before its first file may have left, and
    files of the names in `but`."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    names = (path.name for path in folder.iterdir())
    return all(n in (LOCK, *but) or (n.startswith(".") and n.endswith(UNFINISHED)) for n in names)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a power cut leaves them there."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with _named(folder):
            folder.mkdir(exist_ok=True)
            sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Not every file system can sync a folder.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)


def _streams(path: Path) -> bool:
    """Whether `path` is something that is written to, not replaced."""
    return bool(_DESCRIPTOR.fullmatch(os.path.abspath(path))) or (
        path.exists() and not path.is_file() and not path.is_dir()
    )


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the system say of which file they are."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


_held: dict[str, list[int]] = {}
"""Folder → process, thread, file descriptor, how often: the system's locks are those of a process."""
_guard = threading.Lock()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there: nobody else can. It is free again when the process has ended.

    The thread that holds it may hold it once more. Raises InUseError if somebody else has it.
    """
    make_folder(folder)
    key = os.path.realpath(folder)
    with _guard:
        held = _held.get(key)
        if held is not None and held[0] != os.getpid():
            held = None  # that of the process this one was forked from
        if held is None:
            held = _held[key] = [os.getpid(), threading.get_ident(), _take(folder / LOCK), 0]
        elif held[1] != threading.get_ident():
            raise InUseError(f"{folder}: in use by another thread of this process")
        held[3] += 1
    try:
        yield
    finally:
        with _guard:
            held[3] -= 1
            if held[3] == 0 and held[0] == os.getpid():
                del _held[key]
                with contextlib.suppress(OSError):
                    (folder / LOCK).unlink()
                with contextlib.suppress(OSError):
                    os.close(held[2])


def _take(path: Path) -> int:
    with _named(path):
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                if fcntl is not None:
                    fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(path, handle):
                    with contextlib.suppress(OSError):
                        os.ftruncate(handle, 0)
                        os.write(handle, f"{os.getpid()}\n".encode())
                    return handle
                os.close(handle)  # its holder removed it in between
            except OSError as error:
                by = os.read(handle, 20).decode(errors="replace").strip()
                os.close(handle)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                raise InUseError(f"{path.parent}: in use by another process ({by or 'unknown'})") from None


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
