"""Disturbs every system call by which a small run writes, and checks that what is left goes on.

    python tests/federation/storage/crash.py                     every call, every kind of run, every fault (long)
    python tests/federation/storage/crash.py --kinds run,store --faults kill,torn --points 8

For each point the run is started, disturbed there, and the same command is given again, with and without --resume in
turn. It must end with the numbers of a run that nothing disturbed, bit for bit. The disturbed command itself either
ends well, or was killed, or says in one line what is wrong.

kinds: run (clients in memory), store (in a store), compare (two cells, two workers), torchrun (two processes).
faults: kill, torn (half of a write, then killed), eio, full (no space from there on), short (a write of half), power:
all that was not synced at that point is lost, the names of files with it or without.
"""

import argparse
import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path

HERE = Path(__file__).resolve()
KINDS, FAULTS = ("run", "store", "compare", "torchrun"), ("kill", "torn", "eio", "full", "short", "power")
LONGEST = 1800
"""Seconds that a command may take: it is to end, on a machine that is busy too."""
SMALL = "--dataset digits --model mlp1 --width 0.05 --clients 3 --samples 20 --epochs 1 --cohort 1 --participation 0.7"


def command(kind: str, work: Path) -> list[str]:
    options = [*SMALL.split(), "--rounds", "3"]
    if kind == "compare":
        return [
            "compare",
            *options,
            "--methods",
            "fedavg,stand-alone",
            "--seeds",
            "1",
            "--jobs",
            "2",
            "--out",
            f"{work}/out",
        ]
    place = ["--store", f"{work}/clients"] if kind == "store" else []
    return ["run", "--method", "factorized-fl-alpha", *options, *place, "--out", f"{work}/out"]


def in_child(arguments: list[str], out: Path) -> int:
    """Exit code of the command in a fork of this process, which has imported everything; minus the signal if killed."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, 1), os.dup2(handle, 2)
            from fastfact.cli import main

            sys.argv = ["fastfact", *arguments]
            try:
                main.main()
            except SystemExit as end:
                code = end.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def started(arguments: list[str], out: Path, torchrun: bool) -> int:
    """Exit code of the command as processes of its own."""
    module = ["-m", "fastfact"]
    if torchrun:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *module]
    with open(out, "wb") as file:
        command = [sys.executable, *module, *arguments]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST)
    return done.returncode


def numbers(work: Path) -> dict:
    """All that a finished run says, but for times, memory and identities."""
    from safetensors.torch import load_file

    found = {}
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work))
        if path.name in ("metrics.jsonl", "ledger.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
        elif path.name == "result.json":
            result = json.loads(path.read_text())
            for measured in ("seconds", "memory"):
                result["summary"].pop(measured)
            found[name] = {key: value for key, value in result.items() if key not in ("digest", "config")}
        elif path.name == "round-000003.safetensors":
            found[name] = {key: tensor.numpy().tobytes() for key, tensor in load_file(path).items()}
        elif path.name == "clients.sqlite":
            import sqlite3

            connection = sqlite3.connect(path)
            found[name] = list(connection.execute("SELECT id, record, nonzeros FROM client ORDER BY id"))
            connection.close()
    return found


def different(found, right, where: str = "") -> str:
    """Where the first difference is, and what stands there; empty where all is the same."""
    if isinstance(found, dict) and isinstance(right, dict) and found.keys() == right.keys():
        return next((text for name in right if (text := different(found[name], right[name], f"{where}/{name}"))), "")
    if isinstance(found, list) and isinstance(right, list) and len(found) == len(right):
        rows = enumerate(zip(found, right, strict=True))
        return next((text for at, (a, b) in rows if (text := different(a, b, f"{where}[{at}]"))), "")
    return "" if found == right else f"{where}: {str(found)[:300]} for {str(right)[:300]}"


def held(path: Path) -> bool:
    """Whether a lock is held. One whose file could not be removed is free all the same."""
    if path.name != ".lock":
        return False
    with open(path, "r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


class Disk:
    """What a power cut leaves of the calls that the shim logged."""

    def __init__(self, root: Path):
        self.root = str(root)
        self.names: dict[str, int | None] = {self.root: None}
        self.durable = dict(self.names)
        self.data: dict[int, bytearray] = {}
        self.synced: dict[int, bytes] = {}
        self.inodes = count()

    def apply(self, op: str, a: str, b: str, offset: int, data: bytes) -> None:
        if op == "create":
            self.names[a] = node = next(self.inodes)
            self.data[node], self.synced[node] = bytearray(), b""
        elif op == "mkdir":
            self.names[a] = None
        elif op == "write":
            content = self.data[self.names[a]] if a in self.names else bytearray()
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        elif op == "truncate" and a in self.names:
            content = self.data[self.names[a]]
            content.extend(bytes(max(0, offset - len(content))))
            del content[offset:]
        elif op == "rename":
            self.names[b] = self.names.pop(a)
        elif op == "link":
            self.names[b] = self.names[a]
        elif op in ("unlink", "rmdir"):
            self.names.pop(a, None)
        elif op == "sync" and a in self.names:
            if self.names[a] is not None:
                self.synced[self.names[a]] = bytes(self.data[self.names[a]])
            else:
                inside = {path for path in {*self.names, *self.durable} if os.path.dirname(path) == a}
                for path in inside:
                    if path in self.names:
                        self.durable[path] = self.names[path]
                    else:
                        del self.durable[path]

    def after_power_cut(self, work: Path, names_too: bool) -> None:
        """Put what is left into `work`."""
        names = self.durable if names_too else self.names
        for path in sorted(names):
            if path == self.root:
                work.mkdir(parents=True, exist_ok=True)
            elif os.path.dirname(path) in names and os.path.isdir(os.path.dirname(path)):
                if names[path] is None:
                    os.mkdir(path)
                else:
                    Path(path).write_bytes(self.synced[names[path]])


def logged(path: Path):
    data, at = path.read_bytes(), 0
    while at < len(data):
        end = data.index(b"\n", at)
        op, a, b, offset, size = data[at:end].decode().split("\t")
        at = end + 1 + int(size)
        yield op, a, b, int(offset), data[end + 1 : at]


class Crash:
    """Tries points of one kind of run in `scratch`; this process has the shim preloaded."""

    def __init__(self, kind: str, scratch: Path):
        self.kind, self.scratch, self.work = kind, scratch, Path(os.environ["CRASH_DIR"])
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self, arguments: list[str], fault: str = "", point: int = 0, log: Path | None = None) -> int:
        with open(os.environ["CRASH_COUNTER"], "rb+") as file:
            file.write(struct.pack("<qq", 0, point))
        if self.kind in ("compare", "torchrun"):
            os.environ["CRASH_MODE"] = fault
            return started(arguments, self.scratch / "said", self.kind == "torchrun")
        arm(fault, log)
        return in_child(arguments, self.scratch / "said")

    def calls(self) -> int:
        return struct.unpack("<qq", Path(os.environ["CRASH_COUNTER"]).read_bytes())[0]

    def fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def expected(self) -> int:
        """The numbers of an undisturbed run, and how many calls it makes."""
        self.fresh()
        log = self.scratch / "log"
        log.unlink(missing_ok=True)
        code = self.run(command(self.kind, self.work), "log", log=log)
        assert code == 0, (self.scratch / "said").read_text()
        calls, self.right = self.calls(), numbers(self.work)
        self.log = list(logged(log)) if log.exists() else []
        return calls

    def disturb(self, fault: str, point: int) -> None:
        where, arguments = f"{self.kind} {fault} {point}", command(self.kind, self.work)
        self.fresh()
        if fault == "power":
            disk = Disk(self.work)
            for call in self.log[:point]:
                disk.apply(*call)
            shutil.rmtree(self.work)
            disk.after_power_cut(self.work, names_too=bool(point % 2))
            code = -9
        else:
            code = self.run(arguments, fault, point)
        said = (self.scratch / "said").read_text() if fault != "power" else ""
        if self.kind == "torchrun" and "fastfact: " in said:
            said = ""  # torchrun adds a traceback of its own
        if "Traceback" in said or code not in (0, 1, 2, -9):
            self.fail(where, f"ended with {code}: {said[-1500:]}")
        elif code == 2 and len(lines := [line for line in said.splitlines() if line.startswith("fastfact: ")]) != 1:
            self.fail(where, f"{len(lines)} lines of error: {said[-1500:]}")
        again = [*arguments, "--resume"] if self.kind != "compare" and point % 3 == 0 and self.begun() else arguments
        code = self.run(again)
        if code != 0:
            self.fail(where, f"{again[0]} {again[-1]} ended with {code}: {(self.scratch / 'said').read_text()[-1500:]}")
        elif other := different(numbers(self.work), self.right):
            self.fail(where, f"other numbers: {other}")
        elif left := [path for path in self.work.rglob("*") if path.name.endswith(".unfinished") or held(path)]:
            self.fail(where, f"left {left[0].name}")
        else:
            self.outcomes[fault] += 1

    def begun(self) -> bool:
        return (self.work / "out").is_dir()

    def fail(self, where: str, why: str) -> None:
        self.failures.append(where)
        print(f"FAILED {where}: {why}", flush=True)


def arm(fault: str, log: Path | None) -> None:
    """The shim of this process, and of its forks, reads its environment anew."""
    import ctypes

    library = ctypes.CDLL(None)
    library.crash_arm(fault.encode(), str(log).encode() if log else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--points", type=int, help="so many of each, spread evenly [default: all]")
    parser.add_argument("--at", type=int, help="this point of each alone")
    options = parser.parse_args()
    if "CRASH_DIR" not in os.environ:
        with tempfile.TemporaryDirectory() as scratch:
            shim, counter = Path(scratch, "shim.so"), Path(scratch, "counter")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE.with_name("crash_shim.c"), "-ldl"], check=True
            )
            counter.write_bytes(bytes(16))
            environment = {
                **os.environ,
                "LD_PRELOAD": str(shim),
                "CRASH_DIR": f"{scratch}/work",
                "CRASH_COUNTER": str(counter),
                "OMP_NUM_THREADS": "1",
                "FASTFACT_CHOICE": "fixed",
            }
            sys.exit(subprocess.run([sys.executable, str(HERE), *sys.argv[1:]], env=environment).returncode)
    scratch = Path(os.environ["CRASH_DIR"]).parent
    from fastfact import data
    from fastfact.cli import main as _  # noqa: F401
    from fastfact.experiment import compare, plots, run  # noqa: F401

    data.load("digits", None)
    plots.pictures = lambda *arguments: []
    failures, tried, start = [], 0, time.monotonic()
    for kind in options.kinds.split(","):
        crash = Crash(kind, scratch)
        calls = crash.expected()
        for fault in options.faults.split(","):
            total = len(crash.log) if fault == "power" else calls
            step = 1 if options.points is None else max(1, -(-total // options.points))
            # Not the same places for each fault.
            points = range(1 + FAULTS.index(fault) * step // len(FAULTS), total + 1, step)
            points = points if options.at is None else range(options.at, options.at + 1)
            for point in points if kind in ("run", "store") or fault != "power" else ():
                crash.disturb(fault, point)
                tried += 1
        print(f"{kind}: {calls} calls; went on: {dict(crash.outcomes)}; failed: {len(crash.failures)}", flush=True)
        failures += crash.failures
    print(f"{tried} points tried, {len(failures)} failed, {time.monotonic() - start:.0f} s")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
