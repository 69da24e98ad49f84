"""`fastfact bench` in its quick form: the rows and the file it writes."""

import json
import subprocess
import sys
from types import SimpleNamespace

import forked
import pytest
import torch
from calls import call

from fastfact.bench import clients, layers, networks
from fastfact.bench.common import interleaved


def test_every_side_comes_after_others_in_turn():
    order = []
    times = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, rounds=11)
    assert {name: len(ms) for name, ms in times.items()} == dict.fromkeys("abc", 11)
    for name in "abc":
        before = {order[at - 1] for at in range(1, len(order)) if order[at] == name}
        assert before >= set("abc") - {name}


def test_layers_quick(tmp_path):
    threads = torch.get_num_threads()
    try:
        code, out, error = call("bench", "layers", "--quick", "--threads", "1", "--json", tmp_path / "layers.json")
    finally:
        torch.set_num_threads(threads)
    assert code == 0, error
    written = json.loads((tmp_path / "layers.json").read_text())
    assert {"command", "hardware", "versions", "commit"} <= set(written)
    ops = {row["op"] for row in written["rows"]}
    grid = {"grid forward", "memory", "model evaluation", "model training"}
    assert ops == {"reconstruct", "weight", "forward", "training", "bfloat16"} | grid
    assert {row["dtype"] for row in written["rows"]} == {"float32", "bfloat16"}
    for row in written["rows"]:
        assert row["ratio"] > 0 and row["threads"] == 1
        if not row["shape"].startswith("all"):
            assert row["ours"] > 0 and row[row.get("against", "dense")] > 0
    (memory,) = (row for row in written["rows"] if row["op"] == "memory")
    assert memory["ours"] / memory["dense"] < 0.35  # the goal of a layer at 10 % with its training state
    assert "forward: milliseconds, medians; ratio" in out and "memory: megabytes; ratio" in out


@pytest.mark.usefixtures("threads")
def test_networks_quick(tmp_path, monkeypatch):
    def run(command, env, stdout, check):
        assert stdout == subprocess.PIPE and check
        done = forked.run(*command[1:], env=env)
        done.check_returncode()
        return done

    fork = {"run": run, "PIPE": subprocess.PIPE, "CalledProcessError": subprocess.CalledProcessError}
    monkeypatch.setattr(networks, "subprocess", SimpleNamespace(**fork))
    file, options = tmp_path / "networks.json", ("--quick", "--threads", "1", "--side", "32")
    found = []
    for more in (
        ("--only", "squeezenet1_1,resnet9", "--sections", "step,evaluation"),
        ("--only", "resnet9", "--sections", "step,memory", "--density", "1"),  # memory takes a process a side
        ("--only", "resnet9", "--format", "nchw", "--dtype", "bfloat16"),
    ):
        code, out, error = call("bench", "networks", *options, *more, "--json", file)
        assert code == 0, error
        assert "resnet9: milliseconds, MiB; ratio = dense / ours" in out
        found.append(json.loads(file.read_text())["rows"])
    (*measured, first, second), dense_mu, half = found
    assert [row["op"] for row in half] == ["step", "evaluation", "memory"]
    assert {(row["format"], row["dtype"]) for row in half} == {("nchw", "bfloat16")}
    assert {(row["format"], row["dtype"]) for row in (*measured, first)} == {("channels_last", "float32")}
    assert len({(row["shape"], row["op"]) for row in measured}) == 4
    assert [(row["op"], row["density"]) for row in dense_mu] == [("step", 1), ("memory", 1)]
    for row in (*measured, *dense_mu, *half):
        assert row["ours"] > 0 and row["dense"] > 0 and row["ratio"] > 0, row
        if row["op"] != "memory":
            assert sum(row["paths"].values()) == {"squeezenet1_1": 26, "resnet9": 9}[row["shape"]]
    assert first["shape"] == second["shape"] == "all 2"


def test_networks_that_there_are_not():
    for options, message in (
        (("--only", "resnet19"), "only='resnet19'"),
        (("--sections", "steps"), "sections='steps'"),
        (("--density", "2"), "density='2'"),
        (("--format", "rows"), "format='rows': must be one of nchw, channels_last"),
        (("--dtype", "int8"), "dtype='int8': must be one of float32, bfloat16"),
    ):
        code, _, error = call("bench", "networks", *options)
        assert code == 2 and message in error


def test_a_wrong_side_is_found_before_it_is_timed():
    sides, x = layers.models(0.1, "nchw"), torch.randn(2, 3, 32, 32)
    sides = {name: model.eval() for name, model in sides.items()}
    layers.check(sides, x, "ResNet-9")
    next(sides["ours"].parameters()).data.mul_(1.01)
    with pytest.raises(AssertionError, match="ours"):
        layers.check(sides, x, "ResNet-9")


@pytest.mark.parametrize("options, message", [(["--only", "all"], "only='all'"), (["--clock", "sun"], "clock='sun'")])
def test_bad_options(options, message):
    code, _, error = call("bench", "layers", *options)
    assert code == 2 and message in error


def test_server_quick(tmp_path):
    file, threads = tmp_path / "server.json", torch.get_num_threads()
    try:
        code, out, err = call("bench", "server", "--quick", "--threads", "1", "--json", file)
    finally:
        torch.set_num_threads(threads)
    assert code == 0, err
    rows = {row["work"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["exact"]["cpu_ratio"] > 1 and rows["exact"]["ratio"] > 0
    # So few clients may need no more than the interpreter and the warm-up held at their peak.
    assert 0 <= rows["growth"]["memory_mib"] < 100 and rows["growth"]["cpu_slowdown"] > 0
    assert abs(rows["sketch"]["rms_error"] / rows["sketch"]["predicted"] - 1) < 0.5
    assert (tmp_path / "server.png").stat().st_size > 0
    assert rows["uplink"]["m"] == 1024 and rows["uplink"]["bytes"] <= rows["uplink"]["goal"]
    assert "numpy_seconds" in out


@pytest.fixture
def threads():
    """Puts back how many threads PyTorch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forks(monkeypatch):
    """The sides of `bench clients` are forks of an interpreter."""
    monkeypatch.setattr(clients, "subprocess", SimpleNamespace(Popen=forked.Talking, PIPE=subprocess.PIPE))


@pytest.mark.usefixtures("threads", "forks")
def test_clients_quick(tmp_path):
    """Every rival has a row: its ratio, or why it did not run."""
    file = tmp_path / "clients.json"
    code, out, err = call("bench", "clients", "--quick", "--threads", "1", "--only", "linear", "--json", file)
    assert code == 0, err
    rows = {row["side"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"ours", "loop", "vmap", "pfl", "flower"}
    for side, row in rows.items():
        if side in ("pfl", "flower") and "reason" in row:
            assert "pip install" in row["reason"]
            continue
        # The round that is not timed and one that is, from the same initial model: as good as each other, and learnt.
        assert row["loss"] < 0.5
        assert row["client_rounds_per_second"] == row["clients"] / row["seconds"]
        if side != "ours":
            assert abs(row["ratio"] - row["seconds"] / rows["ours"]["seconds"]) < 1e-9
    assert "ratio" in out


@pytest.mark.usefixtures("threads", "forks")
def test_growth_quick(tmp_path):
    file = tmp_path / "growth.json"
    code, _, err = call("bench", "clients", "--quick", "--threads", "1", "--only", "growth", "--json", file)
    assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert [(row["clients"], row["taking_part"]) for row in rows] == [(10, 10), (10, 1)]
    assert (tmp_path / "growth.png").stat().st_size > 0


def test_report_draws_ratios_over_density(tmp_path):
    rows = [
        {"op": op, "format": fmt, "density": d, "shape": shape, "ratio": 1 / (0.2 + d)}
        for op in ("forward", "training")
        for fmt in ("nchw", "channels_last")
        for d in (0.0, 0.1, 0.3)
        for shape in ("3→64", "64→128", "all 2")
    ]
    file = tmp_path / "layers.json"
    file.write_text(json.dumps({"rows": rows}))
    code, out, error = call("report", file)
    assert code == 0 and "all 2" in out, error
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    for content in ("{", "[]", '{"rows": [{"op": "memory"}]}'):
        file.write_text(content)
        code, _, error = call("report", file)
        assert code == 2 and "layers.json" in error


def test_adapters_say_what_they_are_compared_with(monkeypatch):
    """The rows themselves: tests/surroundings/test_bench_adapters.py."""
    code, _, err = call("bench", "adapters", "--only", "nothing")
    assert code == 2 and "only='nothing', must begin one of layer 768→768" in err
    monkeypatch.setitem(sys.modules, "peft", None)
    code, _, err = call("bench", "adapters", "--quick")
    assert code == 2 and "bench adapters compares with PEFT: pip install" in err
