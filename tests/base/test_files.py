"""What `fastfact.base.files` promises: whole files or none, nobody else's files, one process at a time."""

import errno
import os
import stat
import threading
import time

import forked
import pytest

from fastfact.base import files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "a.json"
    files.write(path, "one")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o640)
    files.write(path, b"two")
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o640
    files.write(path, "three", keep=True)
    files.write(tmp_path / "new", "first", keep=True)
    assert path.read_text() == "two" and names(tmp_path) == ["a.json", "new"]


def test_nothing_of_the_users_is_removed(tmp_path):
    for name in ("a.json.tmp", "a.tmp", ".a.json.tmp", "notes.unfinished"):
        (tmp_path / name).write_text("mine")
    files.write(tmp_path / "a.json", "one")
    files.remove_unfinished(tmp_path)
    assert names(tmp_path) == [".a.json.tmp", "a.json", "a.json.tmp", "a.tmp", "notes.unfinished"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "real").write_text("old")
    (tmp_path / "link").symlink_to("there/real")
    (tmp_path / "dangling").symlink_to("there/later")
    files.write(tmp_path / "link", "new")
    files.write(tmp_path / "dangling", "made")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "there" / "real").read_text() == "new" and (tmp_path / "there" / "later").read_text() == "made"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    data = os.urandom(300_000)
    files.write(tmp_path / "pipe", data)
    reader.join(10)
    assert got == [data] and (tmp_path / "pipe").is_fifo() and names(tmp_path) == ["pipe"]


def test_devices_are_written_to(tmp_path):
    """/dev/null stays what it is; what was on a redirected standard output before stays too."""
    program = "import os, sys; from fastfact.base import files\n"
    program += "os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)\n"
    program += "print('before'); files.write('/dev/stdout', 'through')\n"
    program += "print('after'); files.write('/dev/null', 'gone')"
    done = forked.run("-c", program, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out").read_text() == "before\nthroughafter\n"
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_failed_write_names_the_file_and_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write(path, "old")

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*a.json'"):
        files.write(path, "new")
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]
    with pytest.raises(IsADirectoryError, match=r"directory: '.*'"):
        files.write(tmp_path, "new")


def test_what_a_kill_left_is_removed_by_the_next_that_writes(tmp_path):
    old, young, other = (tmp_path / f".{n}.0a1b2c3d.unfinished" for n in ("a.json", "a.json-2", "b.json"))
    for path in (old, young, other):
        path.write_text("half")
    hours_ago = time.time() - 2 * files.STALE
    for path in (old, other):
        os.utime(path, (hours_ago, hours_ago))
    files.write(tmp_path / "a.json", "whole")
    assert names(tmp_path) == sorted([".a.json-2.0a1b2c3d.unfinished", ".b.json.0a1b2c3d.unfinished", "a.json"])
    files.remove_unfinished(tmp_path)
    assert names(tmp_path) == ["a.json"]


def test_a_long_name_and_one_with_wildcards(tmp_path):
    for name in ("ä" * 127, "*[a]?.json"):
        (tmp_path / "innocent.unfinished").write_text("mine")
        files.write(tmp_path / name, "x")
        files.write(tmp_path / name, "y")
        assert (tmp_path / name).read_text() == "y" and len(names(tmp_path)) == 2
        (tmp_path / name).unlink()


def test_a_seal_is_verified(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"id": "x", "numbers": (1.5, float("inf")), "ä": {1: None}}, sealed=True)
    assert files.read_sealed(path, sealed="id") == {"id": "x", "numbers": [1.5, float("inf")], "ä": {"1": None}}
    path.write_text(path.read_text().replace("1.5", "2.5"))
    with pytest.raises(ValueError, match="damaged or changed by hand"):
        files.read_sealed(path)
    path.write_text('{"id": "x"}')
    assert files.read_sealed(path) == {"id": "x"}
    with pytest.raises(ValueError, match="damaged"):
        files.read_sealed(path, sealed="id")
    for text in ("[1]", "{", "[" * 100_000, "\udcff".encode(errors="surrogateescape").decode("latin-1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json: "):
            files.read_sealed(path)


HOLD = "import sys, time; from pathlib import Path; from fastfact.base import files\n"
HOLD += "with files.locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_one_process_at_a_time(tmp_path):
    folder = tmp_path / "a" / "b"
    other = forked.Forked("-c", HOLD, folder)
    try:
        other.wait_for("held\n")
        with (
            pytest.raises(files.InUseError, match=rf"a/b: in use by another process \({other.pid}\)"),
            files.locked(folder),
        ):
            pass
    finally:
        other.kill()
    # Killed: the lock is gone with it, its file is not.
    assert names(folder) == [files.LOCK] and files.is_vacant(folder)
    with files.locked(folder), files.locked(folder):
        assert names(folder) == [files.LOCK]
        seen = []

        def elsewhere():
            try:
                with files.locked(folder):
                    seen.append("in")
            except files.InUseError as error:
                seen.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [f"{folder}: in use by another thread of this process"]
    assert names(folder) == []


def test_a_forked_process_does_not_inherit_the_lock(tmp_path):
    with files.locked(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                with files.locked(tmp_path):
                    os._exit(3)
            except files.InUseError:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
        assert (tmp_path / files.LOCK).exists()


def test_vacant(tmp_path):
    assert files.is_vacant(tmp_path / "nowhere") and files.is_vacant(tmp_path)
    (tmp_path / ".config.json.0a1b2c3d.unfinished").touch()
    (tmp_path / files.LOCK).touch()
    assert files.is_vacant(tmp_path)
    (tmp_path / "thesis.txt").touch()
    assert not files.is_vacant(tmp_path) and files.is_vacant(tmp_path, "thesis.txt")
    assert not files.is_vacant(tmp_path / "thesis.txt")
