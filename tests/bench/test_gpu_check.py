"""`make gpu-check` without a GPU: every benchmark runs in tiny shapes, and the runner reports what its steps said."""

import json
import re

import pytest
import torch

from bench import gpu, gpu_check


@pytest.mark.parametrize("section", list(gpu.SECTIONS))
def test_every_benchmark_runs(section):
    rows = list(gpu.SECTIONS[section](gpu.Bench(dry=True)))
    assert rows and all("op" in row and "error" not in row and gpu.show(row) for row in rows)


def test_a_row_that_fails_stops_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "check_weight_op", lambda name, *args: 1 / ("hadamard" not in name))
    monkeypatch.setattr("sys.argv", ["gpu", "weights", "--dry-run", "--json", str(tmp_path / "rows.json")])
    assert gpu.main() == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    failed = [row["op"] for row in rows if "error" in row]
    assert len(rows) > len(failed) == 4 and all("hadamard" in op for op in failed)


def test_a_wrong_kernel_is_not_timed():
    truth = torch.randn(100, dtype=torch.float64)
    gpu.check("right", [truth.float()], [truth], [truth.float()])
    with pytest.raises(AssertionError, match="wrong: result 0 is off"):
        gpu.check("wrong", [truth.float() * 1.001], [truth], [truth.float()])


def test_steps_are_reported_and_one_that_fails_stops_no_other(tmp_path, monkeypatch, capsys):
    commands = {"environment": ["sh", "-c", "echo fine"], "build": ["sh", "-c", "echo broken; exit 3"], "tests": None}
    commands["rank1"] = ["sh", "-c", "echo begun; sleep 60 & sleep 60"]
    monkeypatch.setattr(gpu_check, "command_of", lambda step, out, dry: commands[step])
    monkeypatch.setitem(gpu_check.LIMITS, "rank1", 1)
    monkeypatch.setattr("sys.argv", ["gpu_check", "part1", "rank1", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    report = json.loads((tmp_path / "gpu-check-part1-rank1.json").read_text())
    assert report["environment"]["state"] == "ok" and report["environment"]["tail"] == "fine\n"
    assert report["build"]["state"] == "failed: exit status 3"
    assert report["tests"]["state"].startswith("left out")
    assert report["rank1"]["state"] == "failed: time limit" and report["rank1"]["tail"] == "begun\n"
    monkeypatch.setattr("sys.argv", ["gpu_check", "environment", "--out", str(tmp_path), "--minutes", "0"])
    assert gpu_check.main() == 0 and "left out: no time" in capsys.readouterr().out


def test_a_part_ends_within_ten_minutes(monkeypatch):
    assert gpu_check.minutes_of(["part1"]) < 10 and gpu_check.minutes_of(["part2", "part4"]) < 20
    assert gpu_check.minutes_of([]) == gpu_check.minutes_of(["part1", "tests"]) == 120


def test_the_build_is_for_the_gpu_that_is_here(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check.architecture() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 8.6\necho 9.0\n")
    program.chmod(0o755)
    assert gpu_check.architecture() == {"TORCH_CUDA_ARCH_LIST": "8.6;9.0a"}
    program.write_text("#!/bin/sh\necho broken >&2; exit 9\n")
    assert gpu_check.architecture() == {}


def test_the_commands():
    """All that the steps name is there."""
    for step in gpu_check.LIMITS:
        command = gpu_check.command_of(step, gpu_check.ROOT, False)
        assert command is None or all((gpu_check.ROOT / part).exists() for part in command if part.endswith(".py"))
    assert {step for part in gpu_check.PARTS.values() for step in part} == set(gpu_check.LIMITS)
    assert set(gpu_check.BENCHMARKS) == set(gpu.SECTIONS)


def test_the_sanitizers_choose_tests_that_are_there():
    sources = {file: (gpu_check.ROOT / file).read_text() for file in gpu_check.TESTS}
    sources[gpu_check.TESTS[2]] += (gpu_check.ROOT / "tests" / "triton_conv_cases.py").read_text()
    for _, _, file, chosen in gpu_check.SANITIZERS.values():
        names = re.findall(r"test_\w+", chosen)
        assert names and all(f"def {name}" in sources[file] for name in names)
