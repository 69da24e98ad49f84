"""What is damaged, exchanged or of another run is found and named; older runs load without the promise."""

import contextlib
import json
import os
import random
import shutil
import sqlite3
import struct
import threading

import pytest
import torch
from forked import Forked
from torch import nn

import fastfact as ff
from fastfact.base import files
from fastfact.federation import RunDirectoryError
from fastfact.federation.storage import checkpoint, run_directory
from fastfact.federation.storage.states import Codec, PackedStates


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def clients_of(n=4):
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, 9, 6, generator=g), torch.randint(3, (n, 9), generator=g)
    return [ff.Client(train=(x[k, :6], y[k, :6]), test=(x[k, 6:], y[k, 6:])) for k in range(n)]


def federation(method="factorized-fl-alpha", **options):
    return ff.Federation(linear, clients_of(), method, **{"epochs": 1, "batch_size": 3, "cohort": 1} | options)


def load(directory, **options):
    return ff.Federation.load(directory, clients=clients_of(), **options)


@pytest.fixture(params=["memory", "store"])
def run(request, tmp_path):
    """A directory with a run of three rounds in "run" and, if not in memory, its clients in "clients"."""
    place = "memory" if request.param == "memory" else tmp_path / "clients"
    fed = federation(store=place)
    fed.fit(3, tmp_path / "run", checkpoint_every=1)
    close(fed)
    return tmp_path


def close(fed):
    fed.states.close()


def bits(fed):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in fed.history]
    states = {name: tensor.numpy().tobytes() for name, tensor in fed.states.state.items()}
    return json.dumps([rows, fed.ledger.rows()]), states


def test_any_flipped_bit_is_found_or_changes_nothing(run, tmp_path):
    """Loading and one more round either have the bits they must have, or fail with a RunDirectoryError."""
    draw, straight = random.Random(5), federation()
    straight.fit(4)
    expected, outcomes = bits(straight), []
    paths = sorted(path for path in run.rglob("*") if path.is_file())
    for path in paths:
        for _ in range(6):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns("copy"))
            data = bytearray((copy / path.relative_to(run)).read_bytes())
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            (copy / path.relative_to(run)).write_bytes(data)
            fed = None
            try:
                fed = load(copy / "run", **({"store": copy / "clients"} if (copy / "clients").exists() else {}))
                fed.fit(4 - fed.round)
                assert bits(fed) == expected, path
                outcomes.append("right")
            except RunDirectoryError as error:
                outcomes.append("refused")
                assert "\n" not in str(error)
            finally:
                fed and close(fed)
    assert len(outcomes) == 6 * len(paths) and {"right", "refused"} == set(outcomes)


def test_a_store_of_another_run_is_refused_before_anything_is_written(tmp_path):
    for name in ("a", "b"):
        fed = federation(store=tmp_path / f"{name}-clients", seed=3)
        fed.fit(2, tmp_path / name)
        close(fed)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "-shm" not in path.name}
    with pytest.raises(RunDirectoryError, match=r"b-clients/clients.sqlite: belongs to another run"):
        load(tmp_path / "a", store=tmp_path / "b-clients")
    with pytest.raises(RunDirectoryError, match=r"b-clients/clients.sqlite: belongs to another run"):
        config = run_directory.read_config(tmp_path / "a")
        config["settings"]["store"] = str(tmp_path / "b-clients")
        files.write_json(tmp_path / "a" / "config.json", config, sealed=True)
        checkpoint.about(tmp_path / "a")
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != "config.json")


def test_a_checkpoint_of_another_seed_is_refused(tmp_path):
    for seed in (1, 2):
        federation(seed=seed).fit(2, tmp_path / str(seed))
    one, other = (run_directory.checkpoint_path(tmp_path / str(seed), 2) for seed in (1, 2))
    shutil.copy(other, one)
    with pytest.raises(RunDirectoryError, match=r"1/checkpoints/round-000002.safetensors: belongs to another run"):
        load(tmp_path / "1")


def test_rows_of_another_run_are_refused(tmp_path):
    for name in ("a", "b"):
        federation().fit(2, tmp_path / name)
    shutil.copy(tmp_path / "b" / "metrics.jsonl", tmp_path / "a" / "metrics.jsonl")
    with pytest.raises(RunDirectoryError, match=r"damaged, or of another run|is cut short"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE client SET record = (SELECT record FROM client WHERE id = 2) WHERE id = 1", "client 1 is damaged"),
        ("UPDATE client SET id = 9 - id", "client 6 after client -1|client . is damaged|missing"),
        ("DELETE FROM client", "clients are missing, doubled"),
        ("DELETE FROM client WHERE id = 0; DELETE FROM digest WHERE id = 0", "clients are missing, doubled"),
        ("UPDATE client SET nonzeros = 3 WHERE id = 3", "client 3 is damaged"),
        ("UPDATE client SET record = 'text' WHERE id = 3", "client 3 is damaged"),
        ("UPDATE client SET record = zeroblob(length(record)) WHERE id = 3", "client 3 is damaged"),
        ("UPDATE digest SET digest = 7", "a value of type int where bytes must be"),
        ('UPDATE meta SET value = replace(value, \'"round": "3"\', \'"round": "2"\') WHERE key = \'server\'', "server"),
        ("DELETE FROM meta WHERE key = 'server'", "server"),
        ("DELETE FROM meta WHERE key = 'seal'", "nothing that says which"),
        ("DELETE FROM meta", "no store of clients"),
        ("DROP TABLE digest", "no store of clients"),
        (
            "CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
            "a view 'v'",
        ),
        (
            "DROP TABLE client; CREATE VIEW client AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT i AS id, x'' AS record, 0 AS nonzeros FROM n",
            "a view 'client'",
        ),
        ("CREATE TRIGGER t AFTER INSERT ON client BEGIN DELETE FROM client; END", "a trigger 't'"),
        ("DROP TABLE client; CREATE TABLE client (id, record, nonzeros)", "a table 'client'"),
    ],
)
def test_a_changed_store_is_refused(tmp_path, statement, message):
    fed = federation(store=tmp_path / "clients")
    fed.fit(3, tmp_path / "run")
    close(fed)
    with contextlib.closing(sqlite3.connect(tmp_path / "clients" / "clients.sqlite")) as connection:
        connection.executescript(statement)
    with pytest.raises(RunDirectoryError, match=message):
        checkpoint.about(tmp_path / "clients", verify=True)
    with pytest.raises(RunDirectoryError, match=message):
        fed = load(tmp_path / "run")
        fed.states.load(range(4))


@pytest.mark.parametrize("writable", [True, False])
def test_whoever_looks_at_a_store_leaves_nothing(tmp_path, writable, monkeypatch):
    fed = federation(store=tmp_path / "clients")
    fed.fit(1, tmp_path / "run")
    close(fed)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert checkpoint.about(tmp_path / "clients", verify=True)["rounds"] == 1
    assert [path.name for path in (tmp_path / "clients").iterdir() if "sqlite" in path.name] == ["clients.sqlite"]


@pytest.mark.parametrize("writable", [True, False])
def test_whoever_looks_at_a_store_in_use_sees_its_newest_round(tmp_path, writable, monkeypatch):
    fed = federation(store=tmp_path / "clients")
    fed.fit(1)
    fed.states.commit(server=json.dumps(json.loads(fed.states.value("server")) | {"round": 2}))
    assert (tmp_path / "clients" / "clients.sqlite-wal").stat().st_size
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    assert checkpoint.about(tmp_path / "clients", verify=True)["rounds"] == 2


def test_an_old_record_of_the_same_client_is_found(tmp_path):
    fed = federation(store=tmp_path / "clients")
    fed.fit(1, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(tmp_path / "clients" / "clients.sqlite")) as connection:
        old = connection.execute(
            "SELECT client.id, record, nonzeros, digest FROM client JOIN digest USING (id)"
        ).fetchone()
    fed.fit(1, tmp_path / "run")
    close(fed)
    with contextlib.closing(sqlite3.connect(tmp_path / "clients" / "clients.sqlite")) as connection, connection:
        connection.execute("UPDATE client SET record = ?, nonzeros = ? WHERE id = ?", (old[1], old[2], old[0]))
        connection.execute("UPDATE digest SET digest = ? WHERE id = ?", (old[3], old[0]))
    with pytest.raises(RunDirectoryError, match="of another round"):
        load(tmp_path / "run")


def test_a_record_without_tensors_is_refused():
    """It would leave memory as it was allocated where a client's weights should be."""
    fed = federation(store_values="bfloat16")
    states = fed.states
    assert isinstance(states, PackedStates)
    states.records[2] = b"FF\x01" + bytes(5), 0
    with pytest.raises(RunDirectoryError, match=r"record of client 2.*has 0 tensors"):
        states.load([1, 2])


def test_records_that_do_not_fit_together_are_refused():
    fed = federation(store_values="bfloat16")
    fed.fit(1)
    tensors, _ = fed.states.packed()
    for change, message in (
        ({"client": torch.tensor([0, 1, 1, 3])}, "client 1 after client 1"),
        ({"client": torch.tensor([0, 2, 1, 3])}, "client 1 after client 2"),
        ({"client": torch.tensor([1, 2, 3, 4])}, "must be some of 4"),
        ({"length": tensors["length"] - 1}, "its records have"),
        ({"length": tensors["length"] * torch.tensor([1, 1, -1, 1])}, "its records have"),
        ({"records": tensors["records"][:-1]}, "its records have"),
        ({"nonzeros": tensors["nonzeros"][:-1]}, "argument"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedStates(fed.initial, 4, fed.states.codec).unpack(tensors | change, range(4))


def test_the_two_newest_checkpoints_are_kept_and_a_fallback_goes_on(tmp_path, caplog):
    straight = federation()
    straight.fit(5)
    federation().fit(4, tmp_path / "run", checkpoint_every=1)
    assert list(run_directory.checkpoints(tmp_path / "run")) == [3, 4]
    path = run_directory.checkpoint_path(tmp_path / "run", 4)
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)
    with pytest.raises(RunDirectoryError, match=r"round-000004.safetensors: tensor .* is damaged"):
        checkpoint.about(tmp_path / "run", verify=True)
    resumed = load(tmp_path / "run")
    assert resumed.round == 3 and "round-000004.safetensors: tensor " in caplog.text
    resumed.fit(2, tmp_path / "run")
    assert bits(resumed) == bits(straight)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["round-000003.safetensors", "round-000004.safetensors.damaged", "round-000005.safetensors"]
    assert checkpoint.about(tmp_path / "run", verify=True)["rounds"] == 5


def test_a_metrics_row_without_client_is_one_line(tmp_path):
    federation().fit(2, tmp_path / "run")
    path = run_directory.checkpoint_path(tmp_path / "run", 2)
    tensors, metadata = run_directory.load_tensors(path, {}, also=("",))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for change in ({"client": None}, {"client": 4}, {"client": "0"}, {"round": None}, {"round": "1"}):
        run_directory.write_rows(tmp_path / "run" / "metrics.jsonl", [rows[0] | change, *rows[1:]])
        metadata.pop("rows", None)
        run_directory.save_tensors(path, tensors, {k: v for k, v in metadata.items() if "digest" not in k})
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
            load(tmp_path / "run")


KNOWN = ("round", "bytes_up", "bytes_down", "last", "records")


def older(directory):
    """The run directory as a version without ids and digests would have written it."""
    config = run_directory.read_config(directory)
    del config["id"]
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    from safetensors.torch import save_file

    for path in run_directory.checkpoints(directory).values():
        tensors, metadata = run_directory.load_tensors(path, {}, also=("",))
        save_file(tensors, path, {k: v for k, v in metadata.items() if k in KNOWN})


def test_an_older_run_loads_and_gets_the_promise(run):
    straight = federation()
    straight.fit(5)
    older(run / "run")
    if (run / "clients").exists():
        with contextlib.closing(sqlite3.connect(run / "clients" / "clients.sqlite")) as connection, connection:
            about, server = (
                json.loads(connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])
                for key in ("about", "server")
            )
            server = {k: v for k, v in server.items() if k in KNOWN}
            for key, value in (("about", about | {"format": 1}), ("server", server)):
                connection.execute("UPDATE meta SET value = ? WHERE key = ?", (json.dumps(value), key))
            connection.execute("DELETE FROM meta WHERE key = 'seal'")
            connection.execute("DROP TABLE digest")
        assert "id" not in checkpoint.about(run / "clients", verify=True)
    fed = load(run / "run")
    fed.fit(2, run / "run")
    assert bits(fed) == bits(straight)
    close(fed)
    about = checkpoint.about(run / "run", verify=True)
    assert about["rounds"] == 5 and run_directory.read_config(run / "run")["id"]
    if (run / "clients").exists():
        assert about["id"] == run_directory.read_config(run / "run")["id"]


def test_two_at_once_on_a_directory_or_a_store(run):
    place = {"store": run / "clients"} if (run / "clients").exists() else {}
    entered, leave = threading.Event(), threading.Event()

    def first():
        fed = load(run / "run")
        fed.fit(1, run / "run", on_client=lambda *a: (entered.set(), leave.wait(30)))
        close(fed)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(30)
    second = load(run / "run", **place)
    try:
        with pytest.raises(files.InUseError, match="in use by another thread of this process"):
            second.fit(1, run / "run")
        if place:
            with pytest.raises(files.InUseError, match="clients: in use"):
                second.fit(1)
    finally:
        leave.set()
        thread.join()
    with pytest.raises(RunDirectoryError, match=r"has rounds this federation has not run|has gone on without"):
        second.fit(1, run / "run")
    close(second)
    last = load(run / "run")
    assert last.round == 4 and len(last.history) == 16
    close(last)


def test_a_store_that_was_never_finished_is_begun_again(tmp_path):
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "clients.sqlite").touch()
    (tmp_path / "clients" / "clients.sqlite-journal").touch()
    fed = federation(store=tmp_path / "clients")
    fed.fit(1, tmp_path / "run")
    close(fed)
    assert load(tmp_path / "run").round == 1


def test_codec_of_a_message_with_a_tensor_twice():
    fed = federation(store_values="bfloat16")
    record, _ = fed.states.codec.encode(fed.initial, 0)
    entry = struct.Struct("<HBI")
    length = entry.unpack(record[8:15])[2]
    doubled = record[:15] + record[15 : 15 + length] + record[8 : 15 + length] + record[15 + length :]
    assert isinstance(fed.states.codec, Codec)
    for message, expected in (
        (doubled, "comes twice"),
        (record + b"\0", "1 bytes follow"),
        (record[:3] + b"\1" + record[4:], "not a message"),
    ):
        with pytest.raises(ValueError, match=expected):
            fed.states.codec.wire.decode(message)


def test_info_of_a_store_does_not_write(tmp_path):
    fed = federation(store=tmp_path / "clients")
    fed.fit(1, tmp_path / "run")
    close(fed)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert checkpoint.about(tmp_path / "run", verify=True)["rounds"] == 1
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert before == {path: data for path, data in after.items() if path in before}


def test_a_second_process_is_refused_while_the_first_lives(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from fastfact.base import files\n"
        "with files.locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    federation().fit(1, tmp_path / "run")
    other = Forked("-c", program, tmp_path / "run")
    try:
        other.wait_for("held\n")
        fed = load(tmp_path / "run")
        with pytest.raises(files.InUseError, match=f"in use by another process .{other.pid}"):
            fed.fit(1, tmp_path / "run")
    finally:
        other.kill()
    fed.fit(1, tmp_path / "run")


@pytest.mark.parametrize(
    "change",
    [
        lambda config, row: config["settings"].update(wire=None),
        lambda config, row: config["settings"].update(store=None),
        lambda config, row: config["method"]["settings"].update({"\n": None}),
        lambda config, row: config.update(id="\n"),
        lambda config, row: row["bytes"].update({"": float("inf")}),
    ],
    ids=["wire", "store", "setting", "id", "infinite"],
)
def test_what_a_right_digest_does_not_vouch_for(tmp_path, change):
    fed = federation()
    fed.fit(1, tmp_path)
    config = run_directory.read_config(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    change(config, rows[0])
    files.write_json(tmp_path / "config.json", config, sealed=True)
    run_directory.write_rows(tmp_path / "ledger.jsonl", rows)
    path = run_directory.checkpoint_path(tmp_path, 1)
    tensors, metadata = run_directory.load_tensors(path, {}, also=("",))
    metadata = {key: value for key, value in metadata.items() if "digest" not in key and key != "rows"}
    run_directory.save_tensors(path, tensors, metadata)
    with pytest.raises(RunDirectoryError) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    with contextlib.suppress(RunDirectoryError):  # the method's settings are not its concern
        checkpoint.about(tmp_path, verify=True)
