import errno
import functools
import importlib
import json
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fastfact as ff
from fastfact import models
from fastfact.base import files
from fastfact.federation import RunDirectoryError
from fastfact.federation.storage import checkpoint
from fastfact.federation.storage import run_directory as store

# One for each kind of round; tests/methods has what holds for every method.
METHODS = ["clustered-fl", "factorized-fl-alpha", "factorized-fl-beta", "fedamp", "fedavg", "fedfac-dynamic", "simfed"]


def narrow_mlp(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3)).double()


@pytest.fixture
def run(make, tmp_path):
    """A finished run of 3 rounds in a directory, with checkpoints after rounds 2 and 3."""
    fed = make(method="factorized-fl-alpha")
    fed.fit(3, tmp_path / "run", checkpoint_every=2)
    return fed, tmp_path / "run"


@pytest.mark.parametrize("options", [{}, {"participation": 0.5}, {"wire": "int8"}, {"cohort": 3}])
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(make, same, tmp_path, method, options):
    sizes = (8, 4, 8, 5)
    options = {"epochs": 1, **options}
    straight = make(make.cnn, (1, 6, 6), sizes=sizes, method=method, **options)
    straight.fit(3, tmp_path / "straight")
    first = make(make.cnn, (1, 6, 6), sizes=sizes, method=method, **options)
    first.fit(2, tmp_path / "run")
    resumed = ff.Federation.load(tmp_path / "run", clients=make.clients((1, 6, 6), sizes))
    assert resumed.round == 2 and same(resumed, first)
    resumed.fit(1, tmp_path / "run")
    assert same(resumed, straight)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == (tmp_path / "straight" / "ledger.jsonl").read_bytes()
    configs = [store.read_config(tmp_path / name) for name in ("run", "straight")]
    assert configs[0].pop("id") != configs[1].pop("id") and configs[0] == configs[1]
    last = (load_file(store.last_checkpoint(tmp_path / d)[1]) for d in ("run", "straight"))
    one, other = last
    assert set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def noisy(x, generator):
    return x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("options", [{}, {"method": "factorized-fl-beta", "sparsity": ff.Schedule(1, 0.5)}])
def test_a_resumed_run_augments_as_before(make, same, tmp_path, options):
    straight, first = (make(augment=noisy, **options) for _ in range(2))
    straight.fit(3)
    first.fit(1, tmp_path / "run")
    for given in ({"augment": noisy}, {}):
        resumed = ff.Federation.load(tmp_path / "run", clients=make.clients(), **given)
        resumed.fit(2)
        assert same(resumed, straight)


def test_a_resumed_run_records_steps_or_does_not_as_before(make, tmp_path):
    directory = tmp_path / "run"
    make(cohort=3, graphs=False).fit(1, directory)
    resumed = ff.Federation.load(directory, clients=make.clients())
    assert not resumed.trainer.settings.graphs
    resumed.fit(1, directory)
    other = ff.Federation.load(directory, clients=make.clients(), graphs=True)
    assert other.trainer.settings.graphs
    other.fit(1, directory)
    assert ff.Federation.load(directory).graphs
    change_config(directory, graphs=1)
    with pytest.raises(RunDirectoryError, match="graphs is 1"):
        ff.Federation.load(directory)


def test_rows_after_the_last_checkpoint_are_run_again(make, same, run):
    fed, directory = run
    store.checkpoint_path(directory, 3).unlink()
    with open(directory / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "cli')
    resumed = ff.Federation.load(directory, clients=make.clients())
    assert resumed.round == 2 and resumed.history.rounds() == [1, 2]
    resumed.fit(1, directory)
    assert same(resumed, fed)
    rows = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["round"] for row in rows] == [1] * 3 + [2] * 3 + [3] * 3


def test_what_the_directory_holds(run):
    fed, directory = run
    assert sorted(path.name for path in directory.iterdir()) == [
        "checkpoints",
        "config.json",
        "ledger.jsonl",
        "metrics.jsonl",
    ]
    assert [path.name for path in store.checkpoints(directory).values()] == [
        "round-000002.safetensors",
        "round-000003.safetensors",
    ]
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(fed.history)
    tensors = load_file(store.checkpoint_path(directory, 3))
    assert {name.removeprefix("client/") for name in tensors} == set(fed.states.state)


def test_load_without_clients_serves_all_but_fit(make, run):
    fed, directory = run
    loaded = ff.Federation.load(directory)
    x = fed.clients[1].test[0]
    assert torch.equal(loaded.models[1](x), fed.models[1](x))
    assert torch.equal(loaded.similarity(), fed.similarity())
    assert loaded.ledger.rows() == fed.ledger.rows() and loaded.history == fed.history
    assert loaded.method == fed.method and loaded.settings == fed.settings
    with pytest.raises(ValueError, match=r"without clients, pass Federation.load\(DIR, clients=\)"):
        loaded.fit(1)
    assert torch.equal(loaded.mixed()[1](x), fed.mixed()[1](x))


def test_a_model_is_found_again_by_name_or_asked_for(make, tmp_path):
    fed = make(functools.partial(models.build, "mlp", (6,), 3, width=0.1), source={"dataset": "made up", "seed": 3})
    fed.fit(1)
    fed.save(tmp_path / "partial")
    loaded = ff.Federation.load(tmp_path / "partial")
    assert loaded.models[0].fc1.out_features == 16 and loaded.source == {"dataset": "made up", "seed": 3}
    fed = make(functools.partial(narrow_mlp, hidden=4))
    fed.fit(1)
    fed.save(tmp_path / "own")
    with pytest.raises(RunDirectoryError, match=r"narrow_mlp.*hidden.*pass model="):
        ff.Federation.load(tmp_path / "own")
    fed = make(lambda: narrow_mlp(5))
    fed.fit(1)
    fed.save(tmp_path / "lambda")
    with pytest.raises(RunDirectoryError, match=r"lambda.*cannot be found again, pass model="):
        ff.Federation.load(tmp_path / "lambda")
    loaded = ff.Federation.load(tmp_path / "lambda", model=lambda: narrow_mlp(5), clients=make.clients())
    loaded.fit(1, tmp_path / "lambda")
    with pytest.raises(RunDirectoryError, match=r"round-000002.safetensors: tensor client/0.weight is F64 \[3, 5, 6\]"):
        ff.Federation.load(tmp_path / "lambda", model=lambda: narrow_mlp(6))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("os:getcwd", None),
        ("os:_exit", [3]),
        ("subprocess:check_output", [["false"]]),
        ("subprocess:Popen", [["false"]]),
        ("shutil:which", ["x"]),
        ("this:s", None),
        ("fastfact.models:nn.Linear", [6, 3]),
        ("fastfact.models:_channels", [1, 1]),
        ("nothing", None),
        (None, None),
    ],
)
def test_nothing_is_imported_or_called_by_a_name_in_a_file(run, name, args):
    _, directory = run
    change_config(directory, model={"factory": name} | ({"args": args, "kwargs": {}} if args else {}))
    with pytest.raises(ValueError, match=r"pass model=|must return an nn.Module"):
        ff.Federation.load(directory)
    assert "this" not in sys.modules


@pytest.mark.parametrize("name", ["fastfact.base.machine:provenance", "fastfact.nn.choice:forget", "torch.random:seed"])
def test_functions_of_the_package_and_of_libraries_are_not_called(run, name):
    importlib.import_module(name.partition(":")[0])
    _, directory = run
    change_config(directory, model={"factory": name})
    with pytest.raises(ValueError, match="pass model="):
        ff.Federation.load(directory)


def test_an_augmentation_that_cannot_be_found_is_asked_for(make, tmp_path):
    fed = make(augment=lambda x, g: x)
    fed.fit(1, tmp_path / "run")
    loaded = ff.Federation.load(tmp_path / "run", clients=make.clients())
    with pytest.raises(ValueError, match=r"augment=.*lambda.*augment="):
        loaded.fit(1)
    with pytest.raises(ValueError, match=r"join\(how='fine-tune'\).*augment=.*lambda.*augment="):
        loaded.join(make.clients(), "fine-tune")
    assert len(loaded.join(make.clients(), "download").accuracy) == 3
    ff.Federation.load(tmp_path / "run", clients=make.clients(), augment=lambda x, g: x).fit(1)


def test_other_clients_are_refused(make, run):
    _, directory = run
    with pytest.raises(ValueError, match=r"other numbers of samples"):
        ff.Federation.load(directory, clients=make.clients(sizes=(10, 7, 11)))
    with pytest.raises(ValueError, match=r"2 clients.*3 clients"):
        ff.Federation.load(directory, clients=make.clients(sizes=(10, 7)))


def test_a_temporary_file_is_no_checkpoint(run):
    _, directory = run
    newest = store.checkpoint_path(directory, 3)
    newest.rename(newest.with_name(f".{newest.name}.0a1b2c3d.unfinished"))
    assert ff.Federation.load(directory).round == 2
    assert store.last_checkpoint(directory)[0] == 2


def test_a_failed_save_leaves_what_was_there(run, monkeypatch):
    fed, directory = run
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    def fail(tensor):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "_bytes", fail)
        with pytest.raises(OSError, match="disk full"):
            fed.save(directory)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert ff.Federation.load(directory).round == 3


def damage(directory, change):
    path = store.checkpoint_path(directory, 3)
    tensors = load_file(path)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    change(tensors, metadata)
    store.save_tensors(path, tensors, {name: text for name, text in metadata.items() if "digest" not in name})


def change_config(directory, **changes):
    """As somebody who knows the format could."""
    config = store.read_config(directory) | changes
    files.write_json(directory / "config.json", config, sealed=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("client/2.v"), r"round-000003.safetensors: tensor client/2.v is missing"),
        (
            lambda t, m: t.update({"client/2.v": t["client/2.v"][:2]}),
            r"tensor client/2.v is F64 \[2, 1, 5, 8\]|\[2, 1, 5\]",
        ),
        (lambda t, m: t.update({"client/0.mu": t["client/0.mu"].float()}), r"tensor client/0.mu is F32"),
        (lambda t, m: t.update({"client/9.v": torch.zeros(1)}), r"tensor client/9.v is not of this model"),
        (lambda t, m: m.update(id="0" * 32), r"round-000003.safetensors: belongs to another run"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(run, change, message):
    _, directory = run
    damage(directory, change)
    with pytest.raises(RunDirectoryError, match=message):
        ff.Federation.load(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: m.update(round="7"), r"round-000003.safetensors.*round 7"),
        (lambda t, m: m.pop("bytes_up"), r"round-000003.safetensors.*bytes_up"),
        (lambda t, m: m.update(bytes_down="3"), r"half-written"),
        (lambda t, m: m.update(last="[]"), r"round-000003.safetensors"),
        (lambda t, m: m.update(rows="[]"), r"round-000003.safetensors"),
        (lambda t, m: t.update(clients=torch.tensor([0, 1, 1])), r"client 1 after client 1"),
        (lambda t, m: t.update(clients=torch.tensor([0, 1, 3])), r"client 3 after client 1, must be some of 3"),
        (lambda t, m: t.update(clients=torch.tensor([-1, 1, 2])), r"client -1"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(run, caplog, change, message):
    _, directory = run
    damage(directory, change)
    assert ff.Federation.load(directory).round == 2
    assert re.search(message, caplog.text) and "going on from round 2, the checkpoint before" in caplog.text
    store.checkpoint_path(directory, 2).unlink()
    with pytest.raises(RunDirectoryError, match=message):
        ff.Federation.load(directory)


def test_half_written_directories(make, run, tmp_path):
    _, directory = run

    def broken(message):
        with pytest.raises(RunDirectoryError, match=message):
            ff.Federation.load(directory)

    newest, older = (store.checkpoint_path(directory, round) for round in (3, 2))
    content = newest.read_bytes()
    for cut in (0, 4, 100, len(content) // 2, len(content) - 1):
        newest.write_bytes(content[:cut])
        assert ff.Federation.load(directory).round == 2
        older.rename(directory / "older")
        broken("round-000003.safetensors: damaged or cut short")
        (directory / "older").rename(older)
    newest.write_bytes(content)
    metrics = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text(metrics[: len(metrics) // 2])
    broken("metrics.jsonl: is cut short")
    (directory / "metrics.jsonl").write_text("".join(metrics.splitlines(keepends=True)[:3]))
    broken("metrics.jsonl: is cut short")
    (directory / "metrics.jsonl").write_text(metrics.replace("1", "2", 1))
    broken("metrics.jsonl: damaged, or of another run")
    (directory / "metrics.jsonl").write_text(metrics[:-20])
    assert ff.Federation.load(directory).round == 2
    (directory / "metrics.jsonl").unlink()
    broken("metrics.jsonl: missing")
    (directory / "metrics.jsonl").write_text(metrics)
    ledger = (directory / "ledger.jsonl").read_text()
    (directory / "ledger.jsonl").write_text("".join(ledger.splitlines(keepends=True)[:-1]))
    assert ff.Federation.load(directory).round == 2
    (directory / "ledger.jsonl").write_text("")
    broken("ledger.jsonl: is cut short")
    (directory / "ledger.jsonl").write_text(ledger)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config[:-20])
    broken("config.json: damaged or half-written, not JSON")
    (directory / "config.json").write_text(config.replace("0.9", "0.8"))
    broken("config.json: damaged or changed by hand")
    (directory / "config.json").write_text(config)
    change_config(directory, format=2)
    broken("config.json: format 2")
    (directory / "config.json").write_text(json.dumps({"format": 1}))
    broken("config.json")
    (directory / "config.json").unlink()
    broken("config.json is missing")
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        ff.Federation.load(tmp_path / "nowhere")
    make().fit(1, tmp_path / "young")
    store.checkpoint_path(tmp_path / "young", 1).unlink()
    with pytest.raises(RunDirectoryError, match="no complete checkpoint"):
        ff.Federation.load(tmp_path / "young")


def test_another_runs_directory_is_refused(make, run, tmp_path):
    fed, directory = run
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(RunDirectoryError, match=r"holds another run .its method differs"):
        make(method="factorized-fl-beta").fit(1, directory)
    with pytest.raises(RunDirectoryError, match="holds another run of the same settings"):
        make(method="factorized-fl-alpha").fit(1, directory)
    copy = ff.Federation.load(directory, clients=make.clients())
    shutil.copytree(directory, tmp_path / "ahead")
    copy.fit(1, tmp_path / "ahead")
    with pytest.raises(RunDirectoryError, match="has rounds this federation has not run"):
        fed.fit(1, tmp_path / "ahead")
    assert all(path.read_bytes() == content for path, content in before.items())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match="not empty"):
        fed.save(tmp_path / "full")
    fed.save(directory)
    fed.save(tmp_path / "copy")
    assert ff.Federation.load(tmp_path / "copy").round == 3


def test_a_run_goes_on_with_its_clients_and_their_memory_elsewhere(make, same, tmp_path):
    straight = make()
    straight.fit(2)
    make(store=tmp_path / "clients").fit(1, tmp_path / "run")
    (tmp_path / "clients").rename(tmp_path / "moved")
    options = {"clients": make.clients(), "store": tmp_path / "moved"}
    resumed = ff.Federation.load(tmp_path / "run", make.mlp, **options, memory_limit=64)
    resumed.fit(1, tmp_path / "run")
    assert same(resumed, straight)
    settings = store.read_config(tmp_path / "run")["settings"]
    assert settings["store"] == str(tmp_path / "moved") and settings["memory_limit"] == 64
    assert ff.Federation.load(tmp_path / "run", make.mlp).settings["memory_limit"] == 64
    with pytest.raises(RunDirectoryError, match="memory_limit=-1"):
        ff.Federation.load(tmp_path / "run", make.mlp, memory_limit=-1)


def test_an_unregistered_strategy_is_asked_for(make, tmp_path):
    class Mine(ff.Strategy):
        name = "mine"

    make(method=Mine(share_norm=False)).fit(1, tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"method 'mine' is not known here, pass method="):
        ff.Federation.load(tmp_path / "run")
    assert ff.Federation.load(tmp_path / "run", method=Mine(share_norm=False)).round == 1


def test_a_checkpoint_is_due_when_the_last_one_is_minutes_old(make, tmp_path, monkeypatch):
    """What a crash, which leaves no time to save, can cost."""
    seen, now = [], [0.0]

    def look(number, rows):
        seen.append((number, max(store.checkpoints(tmp_path / "run"), default=0)))
        now[0] += 70

    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    make(method="fedavg").fit(5, tmp_path / "run", checkpoint_every=100, on_round=look)
    assert seen == [(1, 0), (2, 0), (3, 3), (4, 3), (5, 5)]


@pytest.mark.parametrize("how", ["interrupt", "terminated", "error", "callback"])
def test_what_is_done_is_saved_when_a_run_is_stopped(make, same, tmp_path, monkeypatch, how):
    """At any time, also while a round is committed: the checkpoint is that of a whole round."""

    class Terminated(BaseException):
        pass

    def handler(*_):
        raise Terminated

    straight = make(method="factorized-fl-alpha")
    straight.fit(6)
    fed = make(method="factorized-fl-alpha")

    def stop(round, *_):
        if round == 4:
            if how == "error":
                raise RuntimeError("of the user's")
            os.kill(os.getpid(), signal.SIGTERM if how == "terminated" else signal.SIGINT)

    if how == "callback":
        # As the round is committed: it is whole, or has not happened.
        commit = fed.states.commit
        monkeypatch.setattr(fed.states, "commit", lambda: (stop(fed.round), commit()))
    before = signal.signal(signal.SIGTERM, handler)
    # A shell in the background starts its programs with interrupts ignored.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, Terminated, RuntimeError)):
            fed.fit(6, tmp_path / "run", checkpoint_every=100, on_client=None if how == "callback" else stop)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    resumed = ff.Federation.load(tmp_path / "run", clients=make.clients())
    assert resumed.round == (4 if how == "callback" else 3)
    resumed.fit(6 - resumed.round, tmp_path / "run")
    assert same(resumed, straight)


def test_the_servers_memory_is_kept(make, same, tmp_path):
    class Counting(ff.Strategy):
        name = "counting"

        def mix(self, uploads, names):
            uploads.server_state["calls"] = uploads.server_state.get("calls", torch.zeros(1)) + 1
            return {n: t + uploads.server_state["calls"] for n, t in super().mix(uploads, names).items()}

    straight, first = make(method=Counting()), make(method=Counting())
    straight.fit(4)
    first.fit(2, tmp_path / "run")
    resumed = ff.Federation.load(tmp_path / "run", method=Counting(), clients=make.clients())
    resumed.fit(2)
    assert same(straight, resumed) and resumed.server_state["calls"].item() == 3


def test_methods_are_recorded_as_in_the_first_version(tmp_path):
    """What came later stands in config.json only where it is not the default: a run of the first version goes on."""
    first = "share_classifier share_norm share_norm_statistics l1 l1_method after_mix recalibrate classifier whole tau"
    first = {*first.split(), *["matching", "matches", "sketch", "layout", "rank", "sparse", "init"]}
    for method, own in (
        ("factorized-fl-alpha", {"epsilon", "min_matches"}),
        ("simfed", {"alpha", "inputs", "factorized"}),
    ):
        _as_recorded = ff.federation.federation._as_recorded
        assert set(_as_recorded(ff.methods.make(method))) == first | own
        assert _as_recorded(ff.methods.make(method, match_on="inputs"))["match_on"] == "inputs"
        assert _as_recorded(ff.methods.make(method, max_weight=0.5))["max_weight"] == 0.5


def test_a_later_version_may_record_more_of_the_source(make, tmp_path):
    make(source={"dataset": "digits", "seed": 1}).fit(1, tmp_path)
    more = ff.Federation.load(tmp_path, clients=make.clients())
    more.source["noise"] = 0.0
    more.fit(1, tmp_path)
    other = ff.Federation.load(tmp_path, clients=make.clients())
    other.source["dataset"] = "mnist"
    with pytest.raises(RunDirectoryError, match="its source differs"):
        other.fit(1, tmp_path)


def test_one_number_that_was_expanded_is_written(tmp_path):
    tensors = {"count": torch.tensor(7).expand(1), "mean": torch.tensor(0.5, dtype=torch.bfloat16).expand(1, 1)}
    store.save_tensors(tmp_path / "x", tensors)
    assert store.load_tensors(tmp_path / "x", tensors)[0] == tensors
