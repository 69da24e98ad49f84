"""Everything that needs a GPU, in order: the build, the tests, compute-sanitizer, the benchmarks.

    python -m bench.gpu_check [STEP ...] [--out DIR] [--minutes M] [--dry-run]

Uses the Python it is called with and installs nothing. Each step is a process of its own with a time limit; one that
fails does not stop the next ones. Leaves DIR/gpu-check.json (what each step said; gpu-check-part1.json of part1) and a
gpu-*.json for each benchmark, each written as its step ends, a benchmark's after each row. Exits 1 if a step failed.
STEPs can be given a few at a time where the machine is lent for minutes: part1 … part5 end within ten minutes each.
What does not fit into --minutes any more is cut short or left out, and the report says so.
--dry-run runs every step with tiny shapes and without a GPU, the build and the compiled tests left out.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [f"tests/ops/{name}.py" for name in ("test_cuda_gpu", "test_kernels_triton", "test_kernels_conv")]
# a sample of every kernel: under the sanitizer a test takes a hundred times as long
SANITIZED = (
    "(test_weight and plain) or (test_compact_weight and 16) or (test_thin_factors and plain) or (test_thin_pairs and"
    " plain) or (test_bitmap and 2051) or test_prox_sgd_step or (test_similarity_sums and 131) or (test_srht and 5000)"
)
SANITIZERS = {
    "memcheck": ("memcheck", "fastfact_cuda", TESTS[0], SANITIZED),
    "racecheck": ("racecheck", "fastfact_cuda", TESTS[0], SANITIZED),
    "memcheck-triton": ("memcheck", "conv_", TESTS[2], "(test_conv2d and 2-2-5-7) or (test_without_mu and 1-3-3-18)"),
}
"""step → (tool, part of the names of the kernels watched, test file, tests)."""
BENCHMARKS = {
    "weights": 240,
    "layers": 560,
    "rank1": 120,
    "separable": 150,
    "clients": 400,
    "resident": 120,
    "mix": 120,
    "tune": 560,
}
LIMITS = {"environment": 60, "build": 400, "tests": 500, **dict.fromkeys(SANITIZERS, 160), **BENCHMARKS}
PARTS = {
    "part1": ["environment", "build", "tests"],
    "part2": ["build", "weights", "rank1", "resident", "mix", "memcheck", "racecheck"],
    "part3": ["build", "clients", "separable", "memcheck-triton"],
    "part4": ["build", "layers"],
    "part5": ["build", "tune"],
}
PART_MINUTES = 9.5
TAIL = 6000

ENVIRONMENT = """
import importlib.util, platform, sys
needed = ("torch", "numpy", "scipy", "safetensors", "setuptools", "pytest", "triton")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit("missing: " + ", ".join(missing))
import torch, triton
print("Python", platform.python_version(), "PyTorch", torch.__version__, "triton", triton.__version__)
for j in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(j))
"""


def save(path: Path, content) -> None:
    """As JSON, whole or not at all: what a run that is ended leaves can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def architecture() -> dict[str, str]:
    """The build for the GPU that is here alone, which takes half the time; empty where nvidia-smi names none."""
    try:
        command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return {}
    found = sorted({line + "a" * (line == "9.0") for line in lines if re.fullmatch(r"\d+\.\d", line)})
    return {"TORCH_CUDA_ARCH_LIST": ";".join(found)} if found else {}


def minutes_of(chosen: list[str]) -> float:
    """How long a run may take by default: ten minutes for each part, where all that is asked for are parts."""
    return PART_MINUTES * len(chosen) if chosen and all(step in PARTS for step in chosen) else 120


def test_command(dry: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=30", "--tb=short"]
    command += ["-m", "gpu", "-k", "not interpreter and not ahead_of_time"]
    if importlib.util.find_spec("xdist") and not dry:
        # compiling the Triton kernels takes most of the time
        command += ["-n", str(min(12, os.cpu_count() or 1))]
    return [*command, *TESTS]


def sanitizer_command(step: str) -> list[str] | None:
    """None where compute-sanitizer is not installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return None
    tool, kernels, file, chosen = SANITIZERS[step]
    command = [program, "--tool", tool, "--error-exitcode", "9", "--kernel-name", f"kns={kernels}"]
    return [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, file]


def command_of(step: str, out: Path, dry: bool) -> list[str] | None:
    if step in BENCHMARKS:
        flags = ["--dry-run"] if dry else []
        return [sys.executable, "-m", "bench.gpu", step, "--json", str(out / f"gpu-{step}.json"), *flags]
    if step in SANITIZERS:
        return sanitizer_command(step)
    if step == "build":
        return [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return [sys.executable, "-c", ENVIRONMENT] if step == "environment" else test_command(dry)


def run(command: list[str], limit: float, env: dict[str, str]) -> tuple[int, str]:
    """(exit status, output); 124 where the limit ended it, with all that it had started."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return 124, process.communicate()[0]
        return process.returncode, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"{', '.join([*PARTS, *LIMITS])} (default: all)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "bench" / "results"))
    parser.add_argument("--minutes", type=float, help="cut short what does not fit into this time (9.5 for each part)")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    steps = list(dict.fromkeys(name for step in args.steps for name in PARTS.get(step, [step]))) or list(LIMITS)
    if unknown := [name for name in steps if name not in LIMITS]:
        parser.error(f"unknown step {', '.join(unknown)}: must be among {', '.join([*PARTS, *LIMITS])}")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    file = out / "-".join(["gpu-check", *args.steps])
    env = architecture() | os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "FASTFACT_BUILD": "must"}
    if args.dry_run:
        env |= {"FASTFACT_BUILD": "skip", "TRITON_INTERPRET": "1"}
    ends = time.monotonic() + 60 * (minutes_of(args.steps) if args.minutes is None else args.minutes)
    report = {}
    for step in steps:
        began = time.monotonic()
        command = command_of(step, out, args.dry_run)
        if command is None:
            report[step] = {"state": "left out: compute-sanitizer is not installed"}
        elif ends - began < 10:
            report[step] = {"state": "left out: no time"}
        else:
            # without it, the sanitizer sees one large block of PyTorch's instead of each tensor
            extra = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if step in SANITIZERS else {}
            status, output = run(command, min(LIMITS[step], ends - began), env | extra)
            state = "ok" if status == 0 else f"failed: {'time limit' if status == 124 else f'exit status {status}'}"
            report[step] = {"state": state, "seconds": round(time.monotonic() - began, 1), "tail": output[-TAIL:]}
            print(f"===== {step}: {state}\n{output[-TAIL if status == 0 else -3 * TAIL :]}", flush=True)
        save(file.with_suffix(".json"), report)
    print("\n".join(f"{step:15} {row['state']}  {row.get('seconds', '')}" for step, row in report.items()))
    return int(any(row["state"].startswith("failed") for row in report.values()))


if __name__ == "__main__":
    sys.exit(main())
