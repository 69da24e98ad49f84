"""Several processes compute what one does; when one of them dies, the others end and the run can be gone on with."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forked import Forked
from group_program import METHODS, ROUNDS, SIZES, federation, summary

from fastfact.federation.server.processes import Group, Shard

HERE = Path(__file__).parent


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def torchrun(processes: int, *command) -> subprocess.CompletedProcess:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*start, *map(str, command)], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


def group(processes: int, *command) -> list[Forked]:
    """The processes that torchrun would start, without its own, which imports PyTorch and waits for what is stopped."""
    with socket.create_server(("localhost", 0)) as server:
        where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(server.getsockname()[1])}
    ranks = [
        {"WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)} | where for rank in range(processes)
    ]
    return [Forked(*command, env=ENVIRONMENT | own) for own in ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """size → what the program found with so many processes; two begin what three go on with."""
    out, found = tmp_path_factory.mktemp("runs"), {}
    for size in (2, 3):
        for process in group(size, HERE / "group_program.py", out):
            _, said = process.communicate()
            assert process.returncode == 0, said[-4000:]
        found[size] = torch.load(out / f"{size}.pt", weights_only=False)
        assert found[size]["size"] == size
    return found


@pytest.fixture(scope="module")
def alone():
    """method → what one process finds."""
    found = {}
    for method in METHODS[3]:
        fed = federation(method)
        fed.fit(ROUNDS)
        found[method] = summary(fed)
    return found


def assert_same(found, expected) -> None:
    for name in ("state", "memory"):
        assert found[name].keys() == expected[name].keys()
        for key, tensor in expected[name].items():
            # What a client has not measured yet is NaN.
            same = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True, "msg": key}
            torch.testing.assert_close(found[name][key], tensor, **same)
    torch.testing.assert_close(found["similarity"], expected["similarity"], rtol=1e-10, atol=1e-10)
    assert found["density"] == expected["density"]
    assert found["bytes"] == expected["bytes"]
    assert found["names"] == expected["names"]
    assert len(found["rows"]) == len(expected["rows"])
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        assert row.pop("loss") == pytest.approx(other["loss"], rel=1e-10)
        assert row == {name: value for name, value in other.items() if name != "loss"}


@pytest.mark.parametrize(("size", "method"), [(size, name) for size, names in METHODS.items() for name in names])
def test_equal_to_one_process(runs, alone, size, method):
    assert_same(runs[size]["found"][method], alone[method])


@pytest.mark.parametrize("method", ("factorized-fl-alpha", "fedavg"))
def test_resumed_with_another_number_of_processes(runs, alone, method):
    assert_same(runs[3]["found"][f"{method}, resumed"], alone[method])


def test_what_cannot_be_spread_is_said_before_any_work(runs):
    assert "must all be in one process; here are 2" in runs[2]["errors"]["fedfomo"]
    assert "must be memory in 2 processes" in runs[2]["errors"]["fedavg"]


def test_blocks_cover_all_clients_once():
    for k in (1, 2, 5, 7):
        for size in (1, 2, 3, 8):
            shards = []
            for rank in range(size):
                group = Group()
                group.rank, group.size = rank, size
                shards.append(Shard(group, k))
            assert [client for shard in shards for client in shard.block] == list(range(k))
            some = list(range(0, k, 2))
            for shard in shards:
                assert shard.counts(some) == [len(other.mine(some)) for other in shards]
                assert len(shard.block) in (k // size, k // size + 1)


KILLER = """
import os, signal, sys
from fastfact.cli.main import main
from fastfact.federation.server.processes import Processes
from fastfact.federation import Federation
select = Federation.select
def dying(self, round):
    if round == 3 and self.group.rank == 1:
        HOW
    return select(self, round)
Federation.select = dying
main()
"""
OPTIONS = ["run", "--clients", "5", "--rounds", "4", "--model", "mlp", "--scenario", "iid", "--method", "fedavg"]
OPTIONS += ["--samples", "20", "--participation", "0.6", "--epochs", "1", "--cohort", "1"]


def test_a_process_that_stops_answering_ends_the_run(tmp_path):
    how = "os.kill(os.getpid(), signal.SIGSTOP)"
    program = KILLER.replace("HOW", how).replace("def dying", "Processes.PATIENCE = 6\ndef dying")
    (tmp_path / "stopper.py").write_text(program)
    waiting, stopped = group(2, tmp_path / "stopper.py", *OPTIONS, "--out", tmp_path / "run")
    try:
        said = waiting.communicate(timeout=250)[1]
    finally:
        stopped.kill()
    assert waiting.returncode != 0
    assert "fastfact: process 1 of this run has not answered for 6 s; what was saved is kept" in said
    assert "Traceback" not in said.partition("fastfact: process 1")[0]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_process_that_is_told_to_stop_stops_them_all_between_two_rounds(tmp_path, number):
    """Told in round 3, they end that round and save it; nobody is lost or waited for. torchrun tells the others, once
    one has ended, by SIGTERM."""
    (tmp_path / "stopper.py").write_text(KILLER.replace("HOW", f"os.kill(os.getpid(), signal.{number})"))
    command = [tmp_path / "stopper.py", *OPTIONS, "--out", tmp_path / "run"]
    if number == "SIGTERM":
        stopped = torchrun(2, *command)
        code, said = stopped.returncode, stopped.stderr
    else:
        processes = group(2, *command)
        _, said = processes[0].communicate()
        code = processes[0].returncode
        processes[1].communicate()
    assert code != 0
    assert "fastfact: stopped; 3 of 4 rounds are kept, fastfact run --resume" in said
    assert "Traceback" not in said.partition("fastfact: stopped")[0]
    rounds = {json.loads(line)["round"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()}
    assert rounds == {1, 2, 3}
    assert (tmp_path / "run" / "checkpoints" / "round-000003.safetensors").is_file()


def test_a_process_dies_and_the_run_goes_on(tmp_path):
    sys.path.insert(0, str(HERE.parents[1] / "cli"))
    from calls import call

    options = OPTIONS
    (tmp_path / "killer.py").write_text(KILLER.replace("HOW", "os._exit(7)"))
    began = time.monotonic()
    died = torchrun(2, tmp_path / "killer.py", *options, "--out", tmp_path / "run")
    assert died.returncode != 0
    assert time.monotonic() - began < 200
    assert "another process of this run has ended" in died.stderr
    assert "--resume goes on from it" in " ".join(died.stderr.split())
    gone_on = group(2, "-m", "fastfact", *options, "--out", tmp_path / "run", "--resume")
    (root_out, root_err), (out, err) = (process.communicate() for process in gone_on)
    assert [process.returncode for process in gone_on] == [0, 0], (root_err + err)[-4000:]
    assert root_out.count("fedavg") == 2 and "process" not in root_err + err and "fedavg" not in out
    code, _, err = call(*options, "--out", tmp_path / "whole")
    assert code == 0, err

    def rows(name: str) -> list[dict]:
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [{key: row[key] for key in ("round", "client", "accuracy", "bytes_up", "bytes_down")} for row in lines]

    assert rows("run") == rows("whole")
    assert 1 <= len([row for row in rows("run") if row["round"] == 1]) < len(SIZES)
