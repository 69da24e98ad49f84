"""Bytes from anybody: messages, checkpoints, rows, configurations and stores are read, or refused in one line.

The suite takes a few of each, `FASTFACT_FUZZ=10000 python -m pytest tests/federation/storage/test_fuzz_storage.py` that
many.
"""

import contextlib
import json
import os
import sqlite3
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fastfact as ff
from fastfact.base import files
from fastfact.federation import RunDirectoryError
from fastfact.federation.state import stack
from fastfact.federation.storage import checkpoint, run_directory
from fastfact.federation.storage.states import DATABASE, Codec
from fastfact.federation.tensors import describe, tensors_of
from fastfact.federation.wire.format import Wire
from tests.fuzz._common import JSON, mutations

COUNT = int(os.environ.get("FASTFACT_FUZZ", "60"))
fuzz = settings(
    max_examples=COUNT,
    deadline=None,
    derandomize=COUNT == 60,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def network() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))
    return ff.factorize(net, ff.Rank1())


TEMPLATE = network()
INFOS, STATE = describe(TEMPLATE), stack(tensors_of(TEMPLATE), 1)
SPARSE = [name for name in INFOS if name.endswith("mu")]
for sparse_name in SPARSE:
    STATE[sparse_name].mul_(torch.arange(STATE[sparse_name].numel()).view(STATE[sparse_name].shape) % 5 == 0)
MASKS = {"3.v": torch.tensor([True, False, True, False])}


def wires():
    for values in ("exact", "bfloat16", "int8"):
        wire = Wire(INFOS, values, SPARSE)
        one = {name: tensor[0] for name, tensor in STATE.items()}
        yield wire, wire.encode(one)
        rows = {name: mask for name, mask in MASKS.items() if name in one and len(one[name]) == len(mask)}
        yield wire, wire.encode(one, rows)


CASES = list(wires())


def limit(message: bytes) -> int:
    """Bytes that decoding may take: the tensors of the model, and a few copies of the message."""
    return 8 * sum(tensor.nbytes for tensor in STATE.values()) + 8 * len(message) + 200_000


@fuzz
@given(data=st.data(), case=st.integers(0, len(CASES) - 1), whole=st.booleans())
def test_messages(data, case, whole):
    wire, message = CASES[case]
    message = data.draw(mutations(message) if whole else st.binary(max_size=200).map(lambda b: b"FF\x01\x00" + b))
    tracemalloc.start()
    try:
        tensors = wire.decode(message)
    except ValueError as error:
        assert "\n" not in str(error) and str(error)
    else:
        for name, tensor in tensors.items():
            assert tuple(tensor.shape) == INFOS[name].shape and tensor.dtype == INFOS[name].dtype
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < limit(message)


@fuzz
@given(data=st.data())
def test_records(data):
    """Whatever is in a record, no number of a client is left as memory happened to be."""
    codec = Codec(STATE, INFOS, SPARSE, "bfloat16")
    message = data.draw(mutations(codec.encode(STATE, 0)[0]))
    out = {name: torch.full_like(tensor, 77) for name, tensor in STATE.items()}
    try:
        codec.decode(message, out, 0, list(STATE))
    except ValueError as error:
        assert "\n" not in str(error)
        return
    expected = codec.wire.decode(message)
    assert all(torch.equal(out[name][0].nan_to_num(1), expected[name].nan_to_num(1)) for name in STATE)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def clients():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(3, 6, 6, generator=g), torch.randint(3, (3, 6), generator=g)
    return [ff.Client(train=(x[k, :4], y[k, :4]), test=(x[k, 4:], y[k, 4:])) for k in range(3)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run in memory, one with packed clients, one in a store: directory → the bytes of its files."""
    root = tmp_path_factory.mktemp("runs")
    for name, options in (
        ("memory", {"method": "fedavg"}),
        ("packed", {"method": "factorized-fl-alpha"}),
        ("store", {"method": "factorized-fl-alpha", "store": root / "store" / "clients"}),
    ):
        fed = ff.Federation(linear, clients(), epochs=1, batch_size=4, cohort=1, **options)
        fed.fit(2, root / name / "run")
        if name == "store":
            fed.states.close()
    return {
        root / name: {path: path.read_bytes() for path in (root / name).rglob("*") if path.is_file()}
        for name in ("memory", "packed", "store")
    }


def read_all(directory):
    """Load it and look at every client. RunDirectoryError is the only way out but success."""
    try:
        checkpoint.about(directory / "run", verify=True)
    except RunDirectoryError as error:
        assert "\n" not in str(error)
    try:
        fed = ff.Federation.load(directory / "run")
        try:
            assert fed.states.state and isinstance(fed.history.last(), list)
        finally:
            fed.states.close()
    except RunDirectoryError as error:
        assert "\n" not in str(error)


@fuzz
@given(data=st.data(), place=st.sampled_from(["memory", "packed", "store"]))
def test_files_of_a_run(runs, data, place):
    directory = next(path for path in runs if path.name == place)
    held = runs[directory]
    path = data.draw(st.sampled_from(sorted(held)))
    try:
        path.write_bytes(data.draw(mutations(held[path])))
        read_all(directory)
    finally:
        for extra in directory.rglob("*"):
            if extra.is_file() and extra not in held:
                extra.unlink()
        for each, content in held.items():
            each.write_bytes(content)


@fuzz
@given(data=st.data(), place=st.sampled_from(["memory", "packed"]))
def test_what_knows_the_format_writes(runs, data, place):
    """Digests that are right say nothing of what somebody else wrote: types and ranges are checked too."""
    directory = next(path for path in runs if path.name == place)
    held = runs[directory]
    try:
        which = data.draw(st.sampled_from(["config", "metadata", "row", "ledger", "clients"]))
        path = run_directory.checkpoint_path(directory / "run", 2)
        tensors, metadata = run_directory.load_tensors(path, {}, also=("",))
        if which == "config":
            config = run_directory.read_config(directory / "run")
            part = data.draw(st.sampled_from([config, config["settings"], config["method"], config["executor"]]))
            part[data.draw(st.sampled_from(sorted(part)))] = data.draw(JSON)
            files.write_json(directory / "run" / "config.json", config, sealed=True)
        elif which in ("row", "ledger"):
            file = directory / "run" / ("metrics.jsonl" if which == "row" else "ledger.jsonl")
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            row = data.draw(st.sampled_from(rows))
            row[data.draw(st.sampled_from(sorted(row)))] = data.draw(JSON)
            run_directory.write_rows(file, rows)
            metadata.pop("rows")
        elif which == "metadata":
            key = data.draw(st.sampled_from(sorted(metadata)))
            metadata[key] = data.draw(st.text(max_size=20) | JSON.map(json.dumps))
        else:
            names = [name for name in tensors if name != "records/records"]
            name = data.draw(st.sampled_from(names))
            tensor = tensors[name]
            if tensor.dtype == torch.int64 and tensor.dim() == 1 and len(tensor):
                tensor[0] = data.draw(st.sampled_from([-1, 0, 1, 3, 2**62, -(2**63)]))
            else:
                tensors[name] = tensor[:1]
        metadata = {key: value for key, value in metadata.items() if "digest" not in key}
        run_directory.save_tensors(path, tensors, metadata)
        read_all(directory)
    finally:
        for each, content in held.items():
            each.write_bytes(content)


@fuzz
@given(data=st.data())
def test_values_in_a_store(runs, data):
    directory = next(path for path in runs if path.name == "store")
    held, path = runs[directory], directory / "clients" / DATABASE
    table, column = data.draw(
        st.sampled_from(
            [("client", "record"), ("client", "nonzeros"), ("client", "id"), ("digest", "digest"), ("meta", "value")]
        )
    )
    value = data.draw(
        st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.binary(max_size=9) | st.text(max_size=9)
    )
    try:
        with (
            contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection,
            contextlib.suppress(sqlite3.Error),
        ):
            connection.execute(f"UPDATE OR REPLACE {table} SET {column} = ?", (value,))
        read_all(directory)
    finally:
        for extra in directory.rglob("*"):
            if extra.is_file() and extra not in held:
                extra.unlink()
        for each, content in held.items():
            each.write_bytes(content)
