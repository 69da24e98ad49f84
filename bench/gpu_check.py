"""Everything that needs a GPU, in the order of its worth, for a machine that is there for half an hour.

    python -m bench.gpu_check [STEP ...] [--out DIR] [--minutes M] [--dry-run | --rehearse]

Uses the Python it is called with and installs nothing. part1, part2 and part3 end within ten minutes each, by the
limits of their steps; each gives figures of its own, even if another never ran. "networks" stands in no part: whole
networks beside dense ones, into DIR/gpu-networks.json. The libraries are those that lie in fastfact/ (`make gpu-bundle`
makes a folder with all that is needed); the step "build" builds them there.
Each step is a process with a time limit; a benchmark's rows and the tests have processes and limits of their own
(`gpu_rows`, `gpu_tests`). Leaves DIR/gpu-STEP….jsonl, a line for each row, each test that does not pass and each step,
written when it ends, and DIR/gpu-STEP….log, what the steps printed, a long one without its middle. Exits 1 if a step
failed.
--dry-run runs every step with tiny shapes and without a GPU, the build and the compiled tests left out.
--rehearse runs the order in its limits with fakes for what needs a device, of which one dies, one hangs and one loses
its device in each step.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu_rows import LEAST, append

ROOT = Path(__file__).resolve().parent.parent
TESTS = [f"tests/ops/{name}.py" for name in ("test_cuda_gpu", "test_kernels_triton", "test_kernels_conv")]
TESTS += ["tests/nn/test_gpu.py", "tests/methods/test_every_method.py"]
# a sample of every kernel: under the sanitizer a test takes a hundred times as long
SANITIZED = (
    "(test_weight and plain) or (test_compact_weight and 16) or (test_thin_factors and plain) or (test_thin_pairs and"
    " plain) or (test_bitmap and 2051) or test_prox_sgd_step or (test_similarity_sums and 131) or (test_srht and 5000)"
)
SANITIZERS = {
    "memcheck": ("memcheck", "fastfact_cuda", TESTS[0], SANITIZED),
    "racecheck": ("racecheck", "fastfact_cuda", TESTS[0], SANITIZED),
    "memcheck-triton": ("memcheck", "conv_", TESTS[2], "(test_conv2d and 2-2-5-7) or (test_without_mu and 1-3-3-18)"),
    "memcheck-adapters": ("memcheck", "_kernel", TESTS[1], "test_lowrank_linear and (70 or 520)"),
}
"""step → (tool, part of the names of the kernels watched, test file, tests)."""
BENCHMARKS = ("clients", "layers", "weights", "rank1", "separable", "mix", "resident", "adapters", "tune")
PARTS: dict[str, dict[str, float]] = {
    "part1": {"environment": 25, "tests": 240, "clients": 220, "resident": 40},
    "part2": {"environment": 25, "layers": 270, "weights": 150, "rank1": 80},
    "part3": {"environment": 25, "adapters": 110, "mix": 50, "separable": 70, "memcheck": 60, "memcheck-triton": 50}
    | {"memcheck-adapters": 40, "racecheck": 50, "tune": 110},
}
"""Seconds of each step, by part: in all less than `PART_SECONDS`."""
PART_SECONDS = 570.0
SECONDS = {"build": 400.0, "networks": 120.0} | {step: limit for part in PARTS.values() for step, limit in part.items()}
NETWORKS = ("--device", "cuda", "--dtype", "bfloat16", "--batch", "64", "--side", "224", "--rounds", "9")
NETWORKS += ("--only", "resnet50,resnet18,mobilenet_v3_small,vit_b_16", "--density", "0.1")
LOG_BYTES = 8 << 20
"""Of a log at most, so that both of its ends come back from a machine that returns files of limited size."""
TEST_SECONDS = 40.0
TAIL = 3000

ENVIRONMENT = """
import importlib.util, platform, sys
needed = ("torch", "numpy", "safetensors", "pytest", "triton")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("missing: " + ", ".join(missing))
import torch, triton
print("Python", platform.python_version(), "PyTorch", torch.__version__, "triton", triton.__version__)
for j in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(j))
import fastfact
for name, state in fastfact.backends().items():
    print(name, state.available, state.detail)
"""


def architecture() -> dict[str, str]:
    """The build for the GPU that is here alone, which takes half the time; empty where nvidia-smi names none."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return {}
    found = sorted({line + "a" * (line == "9.0") for line in lines if re.fullmatch(r"\d+\.\d", line)})
    return {"TORCH_CUDA_ARCH_LIST": ";".join(found)} if found else {}


def sanitizer_command(step: str) -> list[str] | None:
    """None where compute-sanitizer is not installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return None
    tool, kernels, file, chosen = SANITIZERS[step]
    command = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-name", f"kns={kernels}"]
    return [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, file]


def command_of(step: str, lines: Path, limit: float, how: str, scale: float = 1.0) -> list[str] | None:
    """how: "", "dry" or "rehearse". Steps that have limits inside end a little before their own."""
    inside = ["--jsonl", str(lines), "--seconds", f"{max(limit - 5, limit / 2):.1f}"]
    if step in BENCHMARKS:
        flags = {"": [], "dry": ["--dry-run"], "rehearse": ["--fake"]}[how]
        flags += ["--row-seconds", str(20 * scale)] if how == "rehearse" else []
        return [sys.executable, "-m", "bench.gpu", step, *inside, *flags]
    if step == "environment":
        return [sys.executable, "-c", ENVIRONMENT]
    if step == "tests":
        each = TEST_SECONDS * (scale if how == "rehearse" else 1)
        chosen = [
            "-m",
            "gpu",
            "-k",
            "not interpreter and not ahead_of_time and not fits_every and not variants and not registers",
            *TESTS,
        ]
        if how == "rehearse":
            chosen = ["bench/rehearsal.py"]
        return [sys.executable, "-m", "bench.gpu_tests", *inside, "--each", str(each), "--", *chosen]
    if how == "rehearse":
        return [sys.executable, "-c", "print('rehearsed')"]
    if step == "networks":
        file = str(lines.parent / "gpu-networks.json")
        measured = ["--quick"] if how else [*NETWORKS, "--no-rivals", "--sections", "step,evaluation"]
        return [sys.executable, "-m", "fastfact", "bench", "networks", *measured, "--json", file]
    if step == "build":
        return [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return sanitizer_command(step)


def run(command: list[str], limit: float, env: dict[str, str], log: Path) -> tuple[int, str]:
    """(exit status, the end of the output, all of which is added to `log` as it comes); 124 where the limit ended it,
    with all that it had started."""
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
        # what it has left behind too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL))
        tail = file.read().decode(errors="replace")
    shorten(log)
    return status, tail


def shorten(log: Path) -> None:
    """Cut the middle out of a log of more than LOG_BYTES."""
    size, half = log.stat().st_size, LOG_BYTES // 2
    if size > LOG_BYTES:
        with log.open("rb") as file:
            start = file.read(half)
            file.seek(size - half)
            log.write_bytes(start + f"\n[{size - LOG_BYTES} bytes left out]\n".encode() + file.read())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help=f"{', '.join([*PARTS, *SECONDS])} (default: all parts)"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("--minutes", type=float, help="cut short what does not fit into this time (9.5 for each part)")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="of the limits inside a rehearsal's steps")
    args = parser.parse_args()
    asked = args.steps or list(PARTS)
    if unknown := [name for name in asked if name not in SECONDS and name not in PARTS]:
        parser.error(f"unknown step {', '.join(unknown)}: must be among {', '.join([*PARTS, *SECONDS])}")
    steps = [step for name in asked for step in PARTS.get(name, [name])]
    how = "dry" if args.dry_run else "rehearse" if args.rehearse else ""
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "-".join(["gpu", *asked] if args.steps else ["gpu-check"])
    lines, log = file.with_suffix(".jsonl"), file.with_suffix(".log")
    for old in (lines, log):
        old.unlink(missing_ok=True)
    env = architecture() | os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "FASTFACT_BUILD": "must"}
    if (cache := ROOT / "triton-cache").is_dir():
        env["TRITON_CACHE_DIR"] = str(cache)
    if how:
        env |= {"FASTFACT_BUILD": "skip"} | ({"TRITON_INTERPRET": "1"} if how == "dry" else {})
    whole = PART_SECONDS * sum(name in PARTS for name in asked) + sum(SECONDS.get(name, 0) for name in asked)
    ends = time.monotonic() + (60 * args.minutes if args.minutes is not None else whole)
    failed = 0
    for step in steps:
        began = time.monotonic()
        limit = min(SECONDS[step], ends - began)
        command = command_of(step, lines, limit, how, args.scale) if limit >= LEAST else None
        if command is None:
            state, tail = "left out: no time" if limit < LEAST else "left out: compute-sanitizer is not installed", ""
        else:
            # without it, the sanitizer sees one large block of PyTorch's instead of each tensor
            extra = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if step in SANITIZERS else {}
            status, tail = run(command, limit, env | extra, log)
            state = "ok" if status == 0 else f"failed: {'time limit' if status == 124 else f'exit status {status}'}"
        failed += state.startswith("failed")
        seconds = round(time.monotonic() - began, 1)
        append(lines, {"step": step, "state": state, "seconds": seconds, "limit": limit, "tail": tail})
        print(f"===== {step}: {state}, {seconds} s\n{tail}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
