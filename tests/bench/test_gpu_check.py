"""`make gpu-check` without a GPU: every benchmark runs in tiny shapes, the order fits its limits, and what fails, dies,
hangs or loses its device ends alone and is told."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import forked
import pytest
import torch

from bench import gpu, gpu_bundle, gpu_check, gpu_profile, gpu_rows, gpu_tests


@pytest.mark.parametrize("section", list(gpu.SECTIONS))
def test_every_benchmark_runs(section):
    bench = gpu.Bench(dry=True)
    bench.ceilings = {"copy_gb_s": 10.0, "tera_flops bfloat16": 1.0, "tera_flops float32": 1.0}
    for row in gpu.SECTIONS[section](bench):
        found = row.common | row.measure()
        assert "op" in found and gpu.show(found) and json.dumps(found)
        if section not in ("resident", "weights"):
            assert found["tera_flops"]
        if section not in ("resident",) and found.get("dtype") != "float16":
            assert all(math.isfinite(share) and share > 0 for share in found["roofline"].values()) and found["roofline"]


def test_the_profile_runs(capsys):
    gpu_profile.main(["--dry-run", "--dtype", "float32"])
    first, *kernels = capsys.readouterr().out.splitlines()
    assert first.endswith("2 clients of 2 images, float32") and len(kernels) == gpu_profile.KERNELS


def test_the_rows_of_the_weights_are_the_ops():
    assert set(gpu.weight_ops(gpu.Bench(dry=True), torch.float32, 2)) == set(gpu.WEIGHT_OPS)


def test_a_wrong_kernel_is_not_timed():
    truth = torch.randn(100, dtype=torch.float64)
    gpu.check("right", [truth.float()], [truth], [truth.float()])
    with pytest.raises(AssertionError, match="wrong: result 0 is off"):
        gpu.check("wrong", [truth.float() * 1.001], [truth], [truth.float()])


def test_the_mean_over_the_layers_counts_each_layer():
    bench = gpu.Bench(dry=False)
    common = [row.common for row in gpu.layers(bench)]
    rows = [one | {"dense/ours": 2.0 if one["layers"] == [6, 7, 8] else 1.0} for one in common if one["batch"] == 32]
    (mean,) = gpu.layers_summary(rows)
    assert mean["dense/ours"] == pytest.approx(2 ** (3 / 8))
    assert not list(gpu.layers_summary(rows[1:])) and not list(
        gpu.layers_summary([*rows[1:], common[0] | {"error": ""}])
    )


def row(measure):
    return gpu_rows.Row({"op": "one"}, measure)


def test_a_row_ends_alone_however_it_ends():
    found = gpu_rows.in_a_process(row(lambda: {"ours": 1.5}), 20)
    assert found["ours"] == 1.5 and found["op"] == "one" and "error" not in found
    found = gpu_rows.in_a_process(row(lambda: 1 / 0), 20)
    assert found["error"].startswith("ZeroDivisionError") and "lambda" in found["traceback"]
    assert gpu_rows.in_a_process(row(lambda: os.kill(os.getpid(), signal.SIGKILL)), 20)["error"] == "died by SIGKILL"
    began = time.monotonic()
    found = gpu_rows.in_a_process(row(lambda: time.sleep(60)), 0.5)
    assert found["error"].startswith("time limit") and time.monotonic() - began < 10
    # more than a pipe holds
    assert len(gpu_rows.in_a_process(row(lambda: {"text": "x" * 200_000}), 20)["text"]) == 200_000


def test_rows_are_lines_as_they_end_and_one_that_fails_stops_no_other(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "ceilings_row", lambda bench: {"copy_gb_s": 10.0})
    monkeypatch.setitem(gpu.SECTIONS, "mix", lambda bench: map(row, (lambda: 1 / 0, lambda: {"rate": 2.0})))
    lines = tmp_path / "lines.jsonl"
    monkeypatch.setattr("sys.argv", ["gpu", "mix", "--dry-run", "--jsonl", str(lines)])
    assert gpu.main() == 1
    started, ceilings, failed, passed = gpu_rows.read_lines(lines)
    assert "command" in started and ceilings["copy_gb_s"] == 10 and passed["rate"] == 2 and "error" in failed
    assert {line["section"] for line in (started, ceilings, failed, passed)} == {"mix"}
    monkeypatch.setattr("sys.argv", ["gpu", "mix", "--dry-run", "--seconds", "0", "--jsonl", str(lines)])
    assert gpu.main() == 1
    assert [line["error"] for line in gpu_rows.read_lines(lines)[5:]] == ["left out: no time"] * 3


def test_a_test_ends_alone_however_it_ends(tmp_path, monkeypatch, capsys):
    lines = tmp_path / "lines.jsonl"
    arguments = ["gpu_tests", "--jsonl", str(lines), "--each", "6", "--workers", "2", "--", "bench/rehearsal.py"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.chdir(gpu_check.ROOT)
    assert gpu_tests.main() == 1
    *failed, total = gpu_rows.read_lines(lines)
    assert total == {"section": "tests", "collected": 11, "passed": 8, "failed": 3}
    ends = {line["test"].rpartition("::")[2]: line["text"] for line in failed}
    assert ends["test_dies"] == "died by SIGSEGV" and ends["test_hangs"] == "time limit of 6 s"
    assert "illegal memory access" in ends["test_loses_its_device"]


def test_steps_are_reported_and_one_that_fails_stops_no_other(tmp_path, monkeypatch, capfd):
    commands = {"environment": ["sh", "-c", "echo fine"], "tests": ["sh", "-c", "echo broken; exit 3"], "clients": None}
    commands["resident"] = ["sh", "-c", "echo begun; sleep 60 & sleep 60"]
    monkeypatch.setattr(gpu_check, "command_of", lambda step, *_: commands[step])
    monkeypatch.setitem(gpu_check.SECONDS, "resident", 6)
    monkeypatch.setattr("sys.argv", ["gpu_check", "part1", "--out", str(tmp_path)])
    began = time.monotonic()
    assert gpu_check.main() == 1 and time.monotonic() - began < 30
    rows = {line["step"]: line for line in gpu_rows.read_lines(tmp_path / "gpu-part1.jsonl")}
    assert rows["environment"]["state"] == "ok" and rows["environment"]["tail"] == "fine\n"
    assert rows["tests"]["state"] == "failed: exit status 3" and rows["clients"]["state"].startswith("left out")
    assert rows["resident"]["state"] == "failed: time limit" and rows["resident"]["tail"] == "begun\n"
    assert (tmp_path / "gpu-part1.log").read_text() == "fine\nbroken\nbegun\n"
    monkeypatch.setattr("sys.argv", ["gpu_check", "environment", "--out", str(tmp_path), "--minutes", "0"])
    assert gpu_check.main() == 0 and "left out: no time" in capfd.readouterr().out


def test_a_part_ends_within_ten_minutes_and_brings_few_files():
    for part in gpu_check.PARTS.values():
        assert sum(part.values()) < gpu_check.PART_SECONDS < 600
    assert {step for part in gpu_check.PARTS.values() for step in part} >= set(gpu.SECTIONS) | set(gpu_check.SANITIZERS)
    assert set(gpu_check.BENCHMARKS) == set(gpu.SECTIONS) == set(gpu.ROW_SECONDS)
    for part in gpu_check.PARTS.values():
        for step in set(part) & set(gpu.SECTIONS):
            assert gpu.ROW_SECONDS[step] < part[step]


def test_networks_are_a_step(tmp_path):
    command = gpu_check.command_of("networks", tmp_path / "lines", 100, "dry")
    assert command[1:] == [
        "-m",
        "fastfact",
        "bench",
        "networks",
        "--quick",
        "--json",
        str(tmp_path / "gpu-networks.json"),
    ]
    asked = gpu_check.command_of("networks", tmp_path / "lines", 100, "")[1:]
    done = subprocess.run(
        [sys.executable, *asked[:-2]], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode and "device='cuda': PyTorch sees no CUDA device here" in done.stderr.replace("\n", " ")


def test_limits_inside_a_step_are_below_its_own(tmp_path):
    for part in gpu_check.PARTS.values():
        for step, limit in part.items():
            command = gpu_check.command_of(step, tmp_path / "lines", limit, "")
            if command and "--seconds" in command:
                assert float(command[command.index("--seconds") + 1]) < limit


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
    for step, limit in gpu_check.SECONDS.items():
        for how in ("", "dry", "rehearse"):
            command = gpu_check.command_of(step, gpu_check.ROOT, limit, how)
            assert command is None or all((gpu_check.ROOT / part).exists() for part in command if part.endswith(".py"))


def test_the_sanitizers_choose_tests_that_are_there():
    sources = {file: (gpu_check.ROOT / file).read_text() for file in gpu_check.TESTS}
    for file, cases in ((gpu_check.TESTS[1], "triton_cases.py"), (gpu_check.TESTS[2], "triton_conv_cases.py")):
        sources[file] += (gpu_check.ROOT / "tests" / "ops" / cases).read_text()
    for _, _, file, chosen in gpu_check.SANITIZERS.values():
        names = re.findall(r"test_\w+", chosen)
        assert names and all(f"def {name}" in sources[file] for name in names)


def test_a_long_log_keeps_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LOG_BYTES", 1000)
    code = "print('first'); print('x' * 5000); print('last')"
    status, tail = gpu_check.run([sys.executable, "-c", code], 60, dict(os.environ), tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert status == 0 and tail.endswith("last\n") and len(text) < 1100
    assert text.startswith("first") and "bytes left out" in text and text.endswith("last\n")


FILL = """
import os, sys
from unittest import mock
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from bench import gpu_resources
driver.set_active(gpu_resources.Device(90))
patches = [*gpu_resources.stood_in([], {}, measure=False)]
if sys.argv[1] == "again":
    patches.append(mock.patch.object(CUDABackend, "make_cubin", side_effect=AssertionError("compiled again")))
for patch in patches:
    patch.start()
x, grad, u, v, mu, settings = gpu_resources.layer(2, 4, (16, 16, 1, 1, 4))
gpu_resources.kernels.fused_conv2d(x, None, None, mu, None, None, *settings)
"""


def test_what_was_compiled_beforehand_is_not_compiled_again(tmp_path):
    env = os.environ | {"PYTHONPATH": str(gpu_check.ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    forked.run("-c", FILL, "first", env=env).check_returncode()
    assert len(list(tmp_path.rglob("*.cubin"))) == 1
    gpu_bundle.trim(tmp_path)
    forked.run("-c", FILL, "again", env=env).check_returncode()
    other = forked.run("-c", FILL, "again", env=env | {"TRITON_CACHE_DIR": str(tmp_path / "empty")})
    assert "compiled again" in other.stderr


def test_the_bundle_holds_what_a_check_runs(tmp_path):
    gpu_bundle.copy(tmp_path)
    assert (tmp_path / "fastfact" / "kernels").is_symlink() and list((tmp_path / "fastfact").glob("_cpu*.so"))
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file() and not file.is_symlink())
    assert size < gpu_bundle.MOST
    code = "import fastfact, bench.gpu, bench.gpu_check; print(fastfact.__file__)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == str(tmp_path / "fastfact" / "__init__.py")
