"""The command line as a user meets it: in a process of its own where that matters, else through typer's runner."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import forked
import pytest
from calls import SMALL, call
from safetensors.torch import load_file

import fastfact
from fastfact.base import files
from fastfact.cli import main as cli
from fastfact.cli import terminal
from fastfact.experiment import build, page, plots, report
from fastfact.experiment.compare import Comparison
from fastfact.experiment.config import Config, cell_config
from fastfact.nn import choice

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "fastfact", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )


def content(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def rows_without_time(directory):
    rows = report.read_metrics(directory / report.METRICS)
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def last_state(directory):
    return load_file(sorted((directory / "checkpoints").iterdir())[-1])


@pytest.fixture
def no_pictures(monkeypatch):
    """They take a second each, and one run of a kind draws them."""
    monkeypatch.setattr(plots, "pictures", lambda cells, directory: [])


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A finished run of two rounds, and what was printed."""
    directory = tmp_path_factory.mktemp("run")
    code, out, err = call("run", *SMALL, "--out", directory / "a", "--json", directory / "a.json")
    assert code == 0, err
    return directory, out


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Two methods on two seeds, two workers."""
    directory = tmp_path_factory.mktemp("compare")
    arguments = ["compare", *SMALL, "--methods", "factorized-fl-beta,fedavg", "--seeds", "2", "--jobs", "2"]
    code, out, err = call(*arguments, "--out", directory / "c", "--json", directory / "c.json")
    assert code == 0, err
    return directory, arguments, out


def test_run_leaves_a_complete_directory(one_run):
    directory, out = one_run
    names = set(content(directory / "a"))
    assert {"config.json", "metrics.jsonl", "result.json", "checkpoints/round-000002.safetensors"} <= names
    assert {"accuracy_over_rounds.png", "accuracy_over_bytes.png", "similarity.png", "density.png"} <= names
    assert "factorized-fl-alpha" in out and "not shared, by any method" in out and "density of μ" in out
    rows = report.read_metrics(directory / "a" / report.METRICS)
    assert [(row["round"], row["client"]) for row in rows] == [(r, k) for r in (1, 2) for k in range(3)]


def test_run_json_is_the_table_with_its_circumstances(one_run):
    directory, _ = one_run
    written = json.loads((directory / "a.json").read_text())
    rows = report.read_metrics(directory / "a" / report.METRICS)
    last = [row["accuracy"] for row in rows if row["round"] == 2]
    (line,) = written["table"]
    assert line["accuracy"]["mean"] == pytest.approx(sum(last) / 3)
    assert line["uplink"] == sum(row["bytes_up"] for row in rows) > 0
    assert line["downlink"] == sum(row["bytes_down"] for row in rows) > 0
    assert written["config"]["width"] == 0.1 and written["config"]["clients"] == 3
    assert {"hardware", "versions", "commit"} <= set(written) and written["versions"]["torch"]
    assert written["command"].startswith("fastfact run --clients 3")


def test_json_says_which_instructions_were_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fastfact", "bench", "layers"])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    terminal.write_json(tmp_path / "a.json", {})
    assert json.loads((tmp_path / "a.json").read_text())["command"] == "ONEDNN_MAX_CPU_ISA=AVX2 fastfact bench layers"


def test_resume_goes_on_bit_for_bit(one_run, no_pictures):
    directory, _ = one_run
    assert call("run", *SMALL, "--rounds", "4", "--out", directory / "straight")[0] == 0
    assert call("run", *SMALL, "--out", directory / "broken")[0] == 0
    code, _, err = call("run", *SMALL, "--rounds", "4", "--out", directory / "broken", "--resume")
    assert code == 0, err
    assert rows_without_time(directory / "straight") == rows_without_time(directory / "broken")
    a, b = last_state(directory / "straight"), last_state(directory / "broken")
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def test_a_directory_in_use_is_left_alone(one_run):
    directory, _ = one_run
    before = content(directory / "a")
    for arguments, message in (
        (["--rounds", "5"], "not empty"),
        (["--resume", "--lr", "0.5"], "lr is 0.01 there, 0.5 now"),
        (["--resume", "--rounds", "1"], "rounds=1"),
        (["--resume", "--set", "tau=0.5"], "settings is {} there"),
    ):
        code, _, err = call("run", *SMALL, *arguments, "--out", directory / "a")
        assert code == 2 and message in err and err.count("\n") == 1
    assert content(directory / "a") == before


def test_verify_and_resume_without_options(one_run, tmp_path, no_pictures):
    directory, _ = one_run
    shutil.copytree(directory / "a", tmp_path / "a")
    code, out, err = call("verify", tmp_path / "a")
    assert code == 0 and "run.json: right" in out and "result.json: right" in out, err
    before = content(tmp_path / "a")
    assert call("resume", tmp_path / "a")[0] == 0
    assert content(tmp_path / "a") == before, "a finished run is left as it is"
    code, out, err = call("resume", tmp_path / "a", "--rounds", "3")
    assert code == 0, err
    assert call("verify", tmp_path / "a")[0] == 0
    path = tmp_path / "a" / "checkpoints" / "round-000003.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    code, out, err = call("verify", tmp_path / "a", "--json", tmp_path / "v.json")
    assert code == 1 and "WRONG" in out and err.count("\n") == 1
    assert "round-000003.safetensors: tensor" in err and "is damaged" in err
    assert "is damaged" in json.loads((tmp_path / "v.json").read_text())["problems"][str(tmp_path / "a")]
    (tmp_path / "a" / "run.json").unlink()
    code, _, err = call("resume", tmp_path / "a")
    assert code == 2 and "run --resume" in err


def test_resume_needs_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = call("run", *SMALL, "--resume", "--out", tmp_path)
    assert code == 2 and "config.json is missing" in err
    assert content(tmp_path) == {"notes.txt": b"mine"}
    for command in (["run", *SMALL, "--resume", "--out"], ["resume"]):
        code, _, err = call(*command, tmp_path / "nowhere")
        assert code == 2 and "nothing to resume" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "fedsgd"], "method='fedsgd'"),
        (["--dataset", "mnits"], "dataset='mnits', must be one of digits"),
        (["--scenario", "odd"], "scenario='odd', must be one of iid"),
        (["--model", "resnet7"], "model='resnet7', must be one of resnet9"),
        (["--clients", "0"], "clients=0, must be at least 1"),
        (["--clients", "5000"], "clients=5000, must be at most 898"),
        (["--rounds", "0"], "rounds=0"),
        (["--alpha", "0"], "alpha=0.0"),
        (["--lr", "-1"], "lr"),
        (["--participation", "1.5"], "participation"),
        (["--width", "0"], "width=0.0"),
        (["--shift", "-1"], "shift=-1"),
        (["--shift", "100"], "shift=100, must be below 8"),
        (["--classes-per-client", "0"], "classes_per_client=0, must be at least 1"),
        (["--batch-size", "1000000"], "batch_size=1000000, must be at most 1797"),
        (["--data-dir", "no-such-folder"], "data_dir='no-such-folder', must be a folder"),
        (["--lr", "nan"], "lr=nan, must be a finite number"),
        (["--newcomers", "0.9"], "newcomers=0.9: leaves none of 3 clients to train"),
        (["--cohort", "none"], "cohort='none'"),
        (["--cohort", "²"], "cohort='²', must be auto"),
        (["--only", "²"], "only='²', must be numbers of clients"),
        (["--only", "1,1,2"], "only='1,1,2', must name each client once"),
        (["--device", "mps"], "device='mps', must be cpu, cuda or cuda:1"),
        (["--device", "cpu:7"], "device='cpu:7', must be cpu, cuda or cuda:1"),
        (["--init-from", "/nope"], "init_from='/nope', must be a file"),
        (["--device", "cuda:99"], "device='cuda:99': PyTorch sees"),
        (["--seed", "-3"], "seed=-3"),
        (["--set", "tau=2"], "tau"),
        (["--set", "tau=high"], "tau='high'): must be a number"),
        (["--set", "tua=0.5"], "tua"),
        (["--set", "tau"], "--set 'tau'"),
        (["--set", "fedsgd.tau=1"], "fedsgd"),
        (["--config", "no-such.toml"], "No such file"),
    ],
)
def test_bad_input_is_one_line_before_any_file(tmp_path, arguments, message):
    code, _, err = call("run", *SMALL, *arguments, "--out", tmp_path / "new")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("arguments", [["run", "--rounds", "many"], ["run", "--nonsense"], ["fly"]])
def test_unparsable_command_lines(tmp_path, arguments):
    code, _, err = call(*arguments, "--out", tmp_path / "new")
    assert code == 2 and err.count("\n") == 1 and arguments[min(1, len(arguments) - 1)] in err


def test_file_and_command_line(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text("rounds = 7\nbatch-size = 16\nlr = 1\n[settings.factorized-fl-beta]\ntau = 0.25\nepsilon = 20\n")
    given = {"config": file, "set": ["factorized-fl-beta.tau=0.5", "fedavg.l1=0.1"], "rounds": 3}
    given["methods"] = "factorized-fl-beta, fedavg,"
    config, methods, seeds = cli._merge_compared({**given, "method": "factorized-fl-beta", "lr": None})
    assert (methods, seeds) == (("factorized-fl-beta", "fedavg"), 3)
    assert (config.rounds, config.batch_size, config.lr) == (3, 16, 1.0)
    assert config.settings == {"factorized-fl-beta": {"tau": 0.5, "epsilon": 20}, "fedavg": {"l1": 0.1}}
    chosen = build.strategy(config)
    assert (chosen.tau, chosen.epsilon) == (0.5, 20)
    only = cell_config(config, "fedavg", 5)
    assert (only.method, only.seed, only.settings) == ("fedavg", 5, {"fedavg": {"l1": 0.1}})


def test_files_are_utf8_wherever_they_are_read(tmp_path):
    """With a byte-order mark too, and whatever the locale says."""
    (tmp_path / "x.toml").write_bytes('\ufeffclients = 3\ndata-dir = "μ"\n'.encode())
    (tmp_path / "rows.json").write_bytes('{"rows": [{"op": "forward", "shape": "μ"}]}'.encode())
    (tmp_path / report.METRICS).write_bytes('{"left_out": "μ"}\n'.encode())
    read = "from fastfact.experiment import config, report; from pathlib import Path; a, b, c = map(Path, {!r})\n"
    read += "print(ascii((config.read_file(a), report.read_layers(b), report.read_metrics(c))))"
    paths = [str(tmp_path / name) for name in ("x.toml", "rows.json", report.METRICS)]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", read.format(paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **ascii_only})
    assert done.returncode == 0, done.stderr
    expected = {"clients": 3, "data_dir": "μ"}, [{"op": "forward", "shape": "μ"}], [{"left_out": "μ"}]
    assert done.stdout.strip() == ascii(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ruonds = 3", "unknown key ruonds"),
        ("rounds = ", "Invalid value"),
        ('rounds = "3"', "rounds='3', must be an integer"),
        ("lr = true", "lr=True, must be a number"),
        ("clients = 2.5", "clients=2.5, must be an integer"),
        ("[settings]\nfedavg = 3", "settings.fedavg=3, must be a table"),
        ('methods = ["fedavg"]', "unknown key methods"),
    ],
)
def test_bad_files_name_the_key(tmp_path, text, message):
    check_refused("run", tmp_path, text, message)


def check_refused(command, tmp_path, text, message):
    """A command refuses a file of this text in one line, and has made nothing."""
    (tmp_path / "x.toml").write_text(text)
    code, _, err = call(command, "--config", tmp_path / "x.toml", "--out", tmp_path / "new")
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_permuted_labels_keep_classifier_and_norm_with_the_client():
    kept = {"share_classifier": False, "share_norm": False, "share_norm_statistics": False}
    for method in ("fedavg", "factorized-fl-beta", "factorized-fedavg"):
        settings = build.strategy(Config(method=method, scenario="permuted-iid")).settings()
        assert {name: settings[name] for name in kept} == kept
    assert build.strategy(Config(method="fedavg", scenario="iid")).share_classifier
    asked = Config(method="fedavg", scenario="permuted-iid", settings={"fedavg": {"share_norm": True}})
    assert build.strategy(asked).share_norm and "fedavg.share_norm" in build.sharing_note(asked)
    assert build.sharing_note(Config(scenario="iid")) is None


def test_the_simulation_has_no_permuted_labels_in_any_scenario():
    simulated = Config(dataset="simulation", scenario="permuted-iid", method="fedavg", model="mlp1", clients=2)
    assert build.strategy(simulated).share_classifier and build.sharing_note(simulated) is None
    assert report.facts(asdict(simulated)) == ["simulation", "2 clients"]


@pytest.mark.parametrize(("warmup", "noted"), [(2, False), (3, True)])
def test_a_warmup_that_no_round_comes_after_is_noted(tmp_path, no_pictures, warmup, noted):
    """After the last of two rounds μ is pruned still."""
    options = ["--warmup", warmup, "--target-density", "0.1", "--out", tmp_path / "a"]
    code, out, err = call("run", *SMALL, *options)
    assert code == 0 and ("warmup=3: μ stays dense, as there are 2 rounds" in out) == noted, err
    assert (report.read_cell(tmp_path / "a").result["summary"]["density"] > 0.5) == noted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("methods = 5", "methods=5, must be names"),
        ('methods = [["fedavg"]]', "methods=[['fedavg']], must be names"),
        ("[methods]\nfedavg = 1", "methods={'fedavg': 1}, must be names"),
        ('methods = ""', "methods='', must be one or more names"),
        ('methods = "fedavg"\nseeds = "3"', "seeds='3', must be an integer"),
        ('methods = "fedavg"\nseeds = 2.0', "seeds=2.0, must be an integer"),
        ('methods = "fedavg"\nseeds = true', "seeds=True, must be an integer"),
        ('methods = "fedavg"\nstore = "st"', "store='st' is for fastfact run"),
        ('methods = "fedavg"\nstore-values = "exact"', "store_values='exact' is for fastfact run"),
        ('methods = "fedavg"\nmemory_limit = 1', "memory_limit=1 is for fastfact run"),
        ('methods = "fedavg"\nmethod = "fedavg"', "method='fedavg' is for fastfact run"),
        ('methods = "fedavg"\nbatch-size = 16\nbatch_size = 32', "batch_size stands there twice"),
    ],
)
def test_bad_files_of_a_comparison_name_the_key(tmp_path, text, message):
    check_refused("compare", tmp_path, text, message)


def test_all_methods_and_settings_of_each(tmp_path):
    """In a file as on the command line, `all` is every method, which a setting without one is for."""
    from fastfact.methods import names

    (tmp_path / "x.toml").write_text('methods = "all"\nseeds = 2\n[settings.fedprox]\nprox = 0.1')
    config, methods, seeds = cli._merge_compared({"config": tmp_path / "x.toml", "set": ["l1=0.5"], "methods": None})
    assert list(methods) == names() and seeds == 2
    assert config.settings["fedprox"] == {"prox": 0.1, "l1": 0.5} and set(config.settings) == set(methods)


def test_a_setting_of_a_method_that_is_not_trained_is_an_error_unless_a_file_has_it(tmp_path):
    code, _, err = call("run", *SMALL, "--method", "fedavg", "--set", "fedprox.prox=1", "--out", tmp_path / "new")
    assert code == 2 and "--set 'fedprox.prox=1': fedprox is not trained here" in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()
    (tmp_path / "x.toml").write_text("[settings.fedprox]\nprox = 1")
    assert cli._merge({"config": tmp_path / "x.toml", "set": None, "method": "fedavg"}).method == "fedavg"


def test_compare_leaves_merged_metrics_and_a_table(comparison):
    directory, _, out = comparison
    rows = report.read_metrics(directory / "c" / report.METRICS)
    seen = [(row["method"], row["seed"]) for row in rows]
    assert len(rows) == 2 * 2 * 2 * 3 and len(set(seen)) == 4
    table = json.loads((directory / "c.json").read_text())["table"]
    assert [row["method"] for row in table] == ["factorized-fl-beta", "fedavg"]
    assert all(row["seeds"] == [0, 1] for row in table)
    for line in table:
        of = [row for row in rows if row["method"] == line["method"]]
        means = [sum(r["accuracy"] for r in of if r["seed"] == s and r["round"] == 2) / 3 for s in (0, 1)]
        assert line["accuracy"]["mean"] == pytest.approx(sum(means) / 2)
        for name in ("accuracy", "accuracy_before"):
            assert f"{100 * line[name]['mean']:.1f} ± {100 * line[name]['std']:.1f}" in out
    assert list((directory / "c" / "cells").glob("*/checkpoints/*.safetensors"))


def test_numbers_do_not_depend_on_jobs(comparison, tmp_path, no_pictures):
    directory, arguments, _ = comparison
    assert call(*arguments[:-1], "1", "--out", tmp_path / "c")[0] == 0
    assert rows_without_time(tmp_path / "c") == rows_without_time(directory / "c")


def test_compare_again_runs_only_what_is_missing(comparison, no_pictures):
    directory, arguments, _ = comparison
    cells = directory / "c" / "cells"
    lost = cells / "fedavg-seed1"
    expected = rows_without_time(lost)
    times = {path.name: (path / report.RESULT).stat().st_mtime_ns for path in cells.iterdir()}
    for path in sorted(lost.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    lost.rmdir()
    code, out, _ = call(*arguments, "--out", directory / "c")
    assert code == 0 and out.count("finished earlier") == 3
    assert rows_without_time(lost) == expected
    assert all((cells / name / report.RESULT).stat().st_mtime_ns == t for name, t in times.items() if name != lost.name)


def test_compare_refuses_another_configuration_and_foreign_directories(comparison, tmp_path):
    directory, arguments, _ = comparison
    before = content(directory / "c")
    code, _, err = call(*arguments, "--epochs", "2", "--out", directory / "c")
    assert code == 2 and "epochs is 1 there, 2 now" in err
    assert content(directory / "c") == before
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = call(*arguments, "--out", tmp_path)
    assert code == 2 and "holds no comparison" in err and content(tmp_path) == {"notes.txt": b"mine"}


def test_compare_adds_methods_and_seeds_and_takes_none_away(comparison, tmp_path, no_pictures):
    directory, _, _ = comparison
    shutil.copytree(directory / "c", tmp_path / "c")
    before = content(tmp_path / "c")
    base = ["compare", *SMALL, "--jobs", "2", "--out", tmp_path / "c"]
    both, more = ["--methods", "factorized-fl-beta,fedavg", "--seeds", "2"], "fedavg,factorized-fl-beta,stand-alone"
    for change, message in (
        (["--methods", "fedprox", "--seeds", "2"], "factorized-fl-beta-seed0, factorized-fl-beta-seed1, fedavg-seed0"),
        (["--methods", "factorized-fl-beta,fedavg", "--seeds", "1"], "with factorized-fl-beta-seed1, fedavg-seed1 too"),
        ([*both, "--seed", "7"], "methods and seeds can be added, not taken away"),
        (["--methods", more, "--seeds", "2", "--lr", "0.5"], "lr is 0.01 there, 0.5 now"),
        ([*both, "--rounds", "3"], "rounds=3: "),
        ([*both, "--rounds", "1"], "holds a comparison over 2 rounds, which cannot be changed"),
        ([*both, "--set", "fedavg.l1=0.1"], "settings is {} there"),
    ):
        code, _, err = call(*base, *change)
        assert code == 2 and message in err and err.count("\n") == 1
        assert content(tmp_path / "c") == before
    code, out, err = call(*base, "--methods", more, "--seeds", "2")
    assert code == 0 and out.count("finished earlier") == 4, err
    code, out, err = call("resume", tmp_path / "c")
    assert code == 0 and out.count("finished earlier") == 6, err
    cells = [f"cells/{cell}/{report.METRICS}" for cell in ("fedavg-seed0", "factorized-fl-beta-seed1")]
    assert all((tmp_path / "c" / name).read_bytes() == before[name] for name in cells)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--methods", "fedavg,fedavg"], "each once"),
        (["--methods", "fedavg,fedsgd"], "method='fedsgd'"),
        (["--seeds", "0"], "seeds=0"),
        (["--jobs", "0"], "jobs='0'"),
        (["--jobs", "²"], "jobs='²', must be auto or a number"),
        (["--clients", "1000"], "clients=1000"),
    ],
)
def test_compare_checks_before_it_writes(tmp_path, change, message):
    arguments = ["compare", *SMALL, "--methods", "fedavg", "--out", tmp_path / "new"]
    code, _, err = call(*arguments, *change)
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_a_failing_cell_does_not_stop_the_others(tmp_path):
    comparison = Comparison(Config(clients=2, rounds=1, epochs=1, model="mlp", width=0.1), ("fedavg", "stand-alone"), 1)
    blocked = tmp_path / report.CELLS / "stand-alone-seed0"
    events = []

    def on_event(name, *event):
        if not blocked.exists():
            blocked.mkdir(parents=True)
            (blocked / "notes.txt").write_text("mine")
        events.append((name, event[0]))

    with forked.workers():
        failed = comparison.run(tmp_path, 1, on_event)
    assert list(failed) == ["stand-alone-seed0"] and "config.json is missing" in failed["stand-alone-seed0"]
    assert ("fedavg-seed0", "done") in events and ("stand-alone-seed0", "failed") in events


def test_a_killed_process_fails_its_cell_alone(tmp_path):
    small = Config(clients=2, rounds=6, epochs=1, model="mlp", width=0.1)
    killed, events = [], []

    def on_event(name, *event):
        events.append((name, event[0]))
        if name == "fedavg-seed0" and event[0] == "round" and not killed:
            killed.extend(multiprocessing.active_children())
            killed[0].kill()

    with forked.workers():
        failed = Comparison(small, ("fedavg", "stand-alone"), 1).run(tmp_path, 1, on_event)
    assert failed == {"fedavg-seed0": "its process ended with exit code -9"}
    assert events[-1] == ("stand-alone-seed0", "done") and events.count(("stand-alone-seed0", "round")) == 6
    assert not multiprocessing.active_children()
    assert Comparison(small, ("fedavg", "stand-alone"), 1).run(tmp_path, 1, on_event) == {}


def test_help_and_version_need_no_pytorch():
    code = "import sys, runpy; sys.argv = ['fastfact', *{!r}]\n"
    code += "try: runpy.run_module('fastfact', run_name='__main__')\n"
    code += "except SystemExit as stop: sys.exit(stop.code or 'torch' in sys.modules)"
    for arguments in (["--help"], ["run", "--help"], ["bench", "layers", "--help"], ["--version"]):
        done = subprocess.run([sys.executable, "-c", code.format(arguments)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"fastfact {fastfact.__version__}\n"


def test_every_option_has_a_group_and_every_command_an_example():
    for command in ("run", "compare"):
        code, out, _ = call(command, "--help")
        assert code == 0 and "Example: fastfact" in out
        assert all(group in out for group in ("Method and training", "Data and clients", "Network", "Machine"))
    assert all(command.epilog for command in cli.app.registered_commands + cli.bench.registered_commands)


def test_ctrl_c_leaves_a_directory_that_goes_on(tmp_path, no_pictures):
    arguments = ["compare", *SMALL, "--rounds", "20", "--methods", "fedavg", "--seeds", "1", "--jobs", "1"]
    process = start(*arguments, "--out", tmp_path / "c")
    metrics = tmp_path / "c" / report.CELLS / "fedavg-seed0" / report.METRICS
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "stopped" in err and "Traceback" not in err
    assert not (tmp_path / "c" / report.METRICS).exists()
    code, _, err = call(*arguments, "--out", tmp_path / "c")
    assert code == 0, err
    code, _, err = call(*arguments, "--out", tmp_path / "straight")
    assert code == 0, err
    cells = [tmp_path / name / report.CELLS / "fedavg-seed0" for name in ("c", "straight")]
    assert rows_without_time(cells[0]) == rows_without_time(cells[1])


def test_a_stopped_run_keeps_its_rounds_and_goes_on_without_options(tmp_path, no_pictures):
    """Ten checkpoints on the way would be one each six rounds; the rows of what is kept are not written again."""
    process = forked.Forked(
        "-m", "fastfact", "run", *SMALL, "--rounds", "60", "--set", "tau=0.5", "--out", tmp_path / "a"
    )
    metrics = tmp_path / "a" / report.METRICS
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count("\n") > 6):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 143 and "Traceback" not in err
    told = re.search(r"(\d+) of 60 rounds are kept, fastfact run --resume (\S+) goes on", err)
    assert told and told[2] == str(tmp_path / "a"), err
    rounds = int(told[1])
    # The rows of a round that was stopped as it ended may be there.
    assert report.read_metrics(metrics)[-1]["round"] in (rounds, rounds + 1)
    kept = [row for row in report.read_metrics(metrics) if row["round"] <= rounds]
    assert (tmp_path / "a" / "checkpoints" / f"round-{rounds:06d}.safetensors").is_file()
    code, _, err = call("run", "--resume", tmp_path / "a", "--rounds", rounds + 2)
    assert code == 0, err
    rows = report.read_metrics(metrics)
    assert rows[: len(kept)] == kept and [row["round"] for row in rows[len(kept) :: 3]] == [rounds + 1, rounds + 2]
    code, _, err = call("run", "--resume", tmp_path / "a", "--rounds", rounds + 2, "--set", "tau=0.4")
    assert code == 2 and "settings is" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "out: name the directory"),
        (["a"], "a: a new run is put into --out DIR"),
        (["--resume", "a", "--out", "b"], "--resume a names another directory"),
        (["--resume", "nowhere"], "nowhere: nothing to resume, there is no such directory"),
    ],
)
def test_which_run_to_resume(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("run", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_store_that_is_not_found_is_no_new_run(tmp_path, monkeypatch, no_pictures):
    """It is looked for where it was, in whatever directory one resumes; what there is of the run stays."""
    run, first, second = (tmp_path / name for name in ("run", "first", "second"))
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    assert call("run", *SMALL, "--cohort", "1", "--store", "st", "--out", run)[0] == 0
    monkeypatch.chdir(second)
    code, _, err = call("resume", run, "--rounds", "3")
    assert code == 0, err
    assert len(report.read_metrics(run / report.METRICS)) == 9 and not list(second.iterdir())
    (first / "st").rename(tmp_path / "moved")
    before = content(run)
    options = ["run", *SMALL, "--cohort", "1", "--resume", "--rounds", "4", "--out", run]
    for command in (["resume", run, "--rounds", "4"], ["run", "--resume", run, "--rounds", "4"], options):
        code, _, err = call(*command)
        assert code == 2 and "has saved rounds, but there are none in" in err and err.count("\n") == 1
        assert str(first / "st") in err and content(run) == before
    assert call("resume", run)[0] == 0
    assert content(run) == before, "a finished run is left as it is"
    (run / report.RESULT).unlink()
    code, _, err = call("resume", run)
    assert code == 2 and "has saved rounds" in err
    code, _, err = call("run", "--resume", run, "--rounds", "4", "--store", tmp_path / "moved")
    assert code == 0, err
    assert [row["round"] for row in report.read_metrics(run / report.METRICS)[::3]] == [1, 2, 3, 4]


@pytest.mark.parametrize("store", ["a", "a/clients", "."])
def test_a_store_stands_beside_the_run(tmp_path, store):
    code, _, err = call("run", *SMALL, "--store", tmp_path / store, "--out", tmp_path / "a")
    assert code == 2 and "must stand beside --out" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_store_of_another_run_is_named_before_anything_is_written(tmp_path, no_pictures):
    for name in ("a", "b"):
        options = ["--cohort", "1", "--store", tmp_path / f"{name}-clients", "--out", tmp_path / name]
        assert call("run", *SMALL, *options)[0] == 0
    before = content(tmp_path)
    assert [name for name in before if "-clients/" in name] == [f"{name}-clients/clients.sqlite" for name in "ab"]
    code, _, err = call("run", *SMALL, "--store", tmp_path / "a-clients", "--out", tmp_path / "c")
    assert code == 2 and "holds the clients of a run, which goes on by run --resume" in err and err.count("\n") == 1
    code, _, err = call("run", "--resume", tmp_path / "a", "--store", tmp_path / "b-clients", "--rounds", "3")
    assert code == 2 and "holds the clients of another run" in err and err.count("\n") == 1
    assert content(tmp_path) == before and not (tmp_path / "c").exists()


def test_a_finished_run_without_checkpoints_is_not_trained_again(one_run, tmp_path, no_pictures):
    directory, _ = one_run
    shutil.copytree(directory / "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    before = content(tmp_path / "a")
    for command in (["resume", tmp_path / "a"], ["run", "--resume", tmp_path / "a", "--store", tmp_path / "new"]):
        code, _, err = call(*command, "--rounds", "3")
        assert code == 2 and "has saved rounds, but there are none in" in err and err.count("\n") == 1
        assert content(tmp_path / "a") == before
    assert call("resume", tmp_path / "a")[0] == 0
    assert content(tmp_path / "a") == before


def test_a_run_that_was_begun_with_relative_paths_goes_on(tmp_path, monkeypatch, no_pictures):
    """Earlier versions wrote them down as they were typed."""
    monkeypatch.chdir(tmp_path)
    assert call("run", *SMALL, "--cohort", "1", "--store", "st", "--out", "run")[0] == 0
    for name in ("run.json", "config.json"):
        path = tmp_path / "run" / name
        written = files.read_sealed(path)
        written["config" if name == "run.json" else "settings"]["store"] = "st"
        files.write_json(path, written, sealed=True)
    code, _, err = call("resume", "run", "--rounds", "3")
    assert code == 0, err
    assert files.read_sealed(tmp_path / "run" / "run.json")["config"]["store"] == str(tmp_path / "st")
    assert len(report.read_metrics(tmp_path / "run" / report.METRICS)) == 9


def test_a_data_folder_that_moved_is_said_anew(tmp_path, no_pictures):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    code, _, err = call("run", *SMALL, "--data-dir", tmp_path / "old", "--out", tmp_path / "a")
    assert code == 0, err
    (tmp_path / "old").rmdir()
    code, _, err = call("run", "--resume", tmp_path / "a")
    assert code == 2 and "old', must be a folder" in err
    code, _, err = call("run", "--resume", tmp_path / "a", "--data-dir", tmp_path / "new", "--rounds", "3")
    assert code == 0, err


def test_a_run_with_more_rounds_than_its_result_is_reported_as_it_was_finished(one_run, tmp_path, no_pictures):
    directory, _ = one_run
    shutil.copytree(directory / "a", tmp_path / "a")
    rows = report.read_metrics(tmp_path / "a" / report.METRICS)
    later = [row | {"round": 3, "accuracy": 0.0} for row in rows[-3:]]
    with (tmp_path / "a" / report.METRICS).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in later)
    assert report.read_cell(tmp_path / "a").rows == rows
    assert report.table(report.read(tmp_path / "a")) == report.table(report.read(directory / "a"))


@pytest.mark.parametrize("command", [["run", "--resume"], ["resume"]])
def test_a_run_that_saved_no_round_begins_again(one_run, tmp_path, command):
    directory, _ = one_run
    shutil.copytree(directory / "a", tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    (tmp_path / "a" / "result.json").unlink()
    code, _, err = call(*command, tmp_path / "a")
    assert code == 0, err
    rows, others = (report.read_metrics(top / "a" / "metrics.jsonl") for top in (tmp_path, directory))
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in others]


def test_a_run_that_was_stopped_before_it_wrote_anything_begins_with_its_options(tmp_path):
    (tmp_path / "a").mkdir()
    code, _, err = call("run", "--resume", tmp_path / "a")
    assert code == 2 and "nothing to resume, there is no run in it" in err and err.count("\n") == 1
    code, _, err = call("run", *SMALL, "--resume", "--out", tmp_path / "a")
    assert code == 0, err


@pytest.mark.parametrize(("lr", "rounds"), [("1e30", "1"), ("1e30", "20"), ("1e6", "3")])
def test_training_that_diverges_is_an_error_that_names_clients(tmp_path, no_pictures, lr, rounds):
    options = ["--clients", "2", "--samples", "20", "--epochs", "1", "--model", "mlp1", "--width", "0.1"]
    code, _, err = call("run", *options, "--lr", lr, "--rounds", rounds, "--out", tmp_path / "a")
    assert code == 2 and "Traceback" not in err
    assert "no client could report when it last took part (client 0 in " in err and "; client 1 in " in err
    assert f"lr={float(lr):g} may be too high" in err


def test_a_client_that_was_left_out_is_named_with_the_results(tmp_path, no_pictures, monkeypatch):
    from fastfact.federation import local

    plain = local.diverged
    monkeypatch.setattr(local, "diverged", lambda clients, *rest: plain(clients, *rest) | {1: "of its own accord"})
    code, out, err = call("run", *SMALL, "--out", tmp_path / "a")
    assert code == 0, err
    assert "left out: client 1 in 2 of 2 rounds: of its own accord" in " ".join(out.split())
    assert report.read_cell(tmp_path / "a").result["summary"]["left_out"] == {"1": [2, 2, "of its own accord"]}


def test_report_prints_the_table_again(comparison, tmp_path):
    directory, _, _ = comparison
    (directory / "c" / "density.png").unlink()
    code, out, _ = call("report", directory / "c", "--json", tmp_path / "r.json")
    assert code == 0 and "fedavg" in out and (directory / "c" / "density.png").is_file()
    assert json.loads((tmp_path / "r.json").read_text())["table"] == report.table(report.read(directory / "c"))
    written = [tmp_path / "new" / name for name in ("p.html", "t.csv", "t.tex")]
    options = [part for pair in zip(("--html", "--csv", "--latex"), written, strict=True) for part in pair]
    code, out, err = call("report", directory / "c", *options)
    assert code == 0, err
    page, csv, latex = (path.read_text() for path in written)
    assert "fedavg" in page and csv.count("\n") == 3 and latex.startswith("\\begin{tabular}")
    assert written[0].stat().st_mode & 0o777 == 0o644 and f"page: {written[0]}" in out
    code, _, err = call("report", ROOT / "bench" / "results" / "layers.json", "--html", tmp_path / "x.html")
    assert code == 2 and "is a file of a benchmark" in err and not (tmp_path / "x.html").exists()
    shutil.copy(ROOT / "bench" / "results" / "layers.json", tmp_path)
    assert call("report", tmp_path / "layers.json", "--json", tmp_path / "rows.json")[0] == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == report.read_layers(tmp_path / "layers.json")
    code, _, err = call("report", tmp_path / "nothing")
    assert code == 2 and "holds no finished run" in err


def test_where_nobody_may_draw_all_else_is_written(comparison, tmp_path, monkeypatch):
    directory, _, _ = comparison

    def refused(cells, folder):
        raise PermissionError(13, "Permission denied", str(folder / "density.png"))

    monkeypatch.setattr(plots, "pictures", refused)
    written = {f"--{end}": tmp_path / f"p.{end}" for end in ("html", "csv", "latex", "json")}
    code, out, err = call("report", directory / "c", *(part for pair in written.items() for part in pair))
    assert code == 0 and "fedavg" in out and all(path.is_file() for path in written.values())
    assert "the pictures are left out" in err and "density.png" in err and err.count("\n") == 1


def test_the_table_counts_the_clients_that_were_trained(tmp_path, no_pictures):
    code, out, err = call("run", *SMALL, "--only", "1,3", "--out", tmp_path / "a")
    assert code == 0 and "permuted-non-iid, 2 clients, 2 rounds" in out, err
    cells = report.read(tmp_path / "a")
    assert "permuted-non-iid · 2 clients · 2 rounds" in page.render(cells)
    assert plots._label(cells) == "digits, permuted-non-iid, 2 clients, 1 seed"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_path_that_is_no_text(one_run, tmp_path):
    """In a process of its own whose output must be text."""
    directory, _ = one_run
    odd = tmp_path / os.fsdecode(b"z\xe9")
    shutil.copytree(directory / "a", odd)
    files = {f"--{end}": tmp_path / f"p.{end}" for end in ("html", "csv", "json")}
    options = [os.fsencode(part) for pair in files.items() for part in pair]
    command = [sys.executable, "-m", "fastfact", "report", os.fsencode(odd), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    )
    assert done.returncode == 0 and b"z\xe9/density.png" in done.stdout, done.stderr
    assert os.fspath(odd) in json.loads(files["--json"].read_text())["command"]
    assert r"z\udce9" in files["--html"].read_text() and files["--csv"].is_file()


def test_info_of_a_comparison(comparison):
    directory, _, _ = comparison
    code, out, err = call("info", directory / "c")
    assert code == 0 and "factorized-fl-beta, fedavg" in out and "4 of 4 runs" in out, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3"], "batch=3: is for --plan"),
        (["--density", ".1"], "density=0.1: is for --plan"),
        (["--input", "1x8x8"], "input='1x8x8': is for --plan"),
        (["a", "--plan", "mlp"], "plan='mlp': not beside a"),
    ],
)
def test_info_refuses_what_it_would_ignore(arguments, message):
    code, _, err = call("info", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("model", ["lstm", "lstm-words", "transformer"])
def test_the_plan_of_a_network_that_reads_tokens(model, tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "BUDGET", 0.0)
    options = ["--input", "4", "--batch", "2", "--json", tmp_path / "plan.json"]
    code, _, err = call("info", "--plan", model, *options)
    assert code == 0, err
    rows = json.loads((tmp_path / "plan.json").read_text())["layers"]
    assert rows[-1]["layer"] == "fc" and rows[0]["input"].startswith("2×")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "²"], "rounds='²', must be numbers"),
        (["--shape", "1,8,²"], "shape='1,8,²', must be numbers"),
        (["--shape", "1,8,8", "--classes", "0"], "classes=0, must be at least 1"),
    ],
)
def test_methods_names_a_bad_option(arguments, message):
    code, _, err = call("methods", "--model", "mlp", *arguments)
    assert code == 2 and message in err and err.count("\n") == 1


def test_info_names_everything(tmp_path):
    code, out, _ = call("info", "--json", tmp_path / "i.json")
    about = json.loads((tmp_path / "i.json").read_text())
    assert code == 0 and set(about["backends"]) == {"reference", "cpu", "cuda", "triton"}
    for part in ("versions", "hardware", "data sets", "scenarios", "models", "methods"):
        assert about[part] and all(name in out for name in about[part])


def test_clients_in_a_directory(tmp_path, no_pictures):
    """--store keeps them there, --resume goes on from it, info tells what it holds."""
    options = [*SMALL, "--method", "factorized-fl-beta", "--cohort", "1", "--store-values", "bfloat16"]
    options += ["--store", tmp_path / "clients", "--memory-limit", "64", "--out", tmp_path / "run"]
    assert call("run", *options, "--rounds", "1")[0] == 0
    assert call("run", *options, "--resume")[0] == 0
    code, out, _ = call("info", tmp_path / "run", "--json", tmp_path / "info.json")
    assert code == 0 and "bytes a client" in out
    about = json.loads((tmp_path / "info.json").read_text())[str(tmp_path / "run")]
    assert about["rounds"] == 2 and 0 < about["density of μ"] <= 1
    code, _, err = call("info", tmp_path / "nothing")
    assert code == 2 and "no such run directory" in err
