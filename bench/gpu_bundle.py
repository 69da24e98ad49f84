"""A folder that `gpu_check` runs from on a machine where nothing is built or installed.

    python -m bench.gpu_bundle FOLDER [--python PYTHON] [--arch 90]

Holds the sources, the tests, the compiled libraries (built for PyTorch's stable ABI: one file serves every Python from
3.11 and PyTorch from 2.11) and, with --python, a cache of the Triton kernels that the benchmarks use first. PYTHON must
have that machine's wheel of triton, so its version of Python up to the second number: Triton finds what it has compiled
by its own files (libtriton.so among them), the kernel's source and the GPU's architecture, whatever PyTorch's version
and the path are, and compiles anew what it does not find. Raises SystemExit where a library is missing or all is more
than 60 MiB.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("fastfact", "kernels", "tests", "bench", "csrc", "setup.py", "pyproject.toml", "Makefile", "README.md")
MOST = 60 << 20


def copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "results", ".*")
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, folder / name)


def trim(cache: Path) -> None:
    """Leave what the GPU runs, and what Triton needs to find it."""
    for file in cache.rglob("*"):
        if file.suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
            file.write_bytes(b"")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", help="compiles the Triton kernels beforehand")
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    for name in ("_cpu", "_cuda"):
        if not list((ROOT / "fastfact").glob(f"{name}*.so")):
            sys.exit(f"gpu-bundle: fastfact/{name}*.so is not built (FASTFACT_BUILD=must python setup.py build_ext -i)")
    folder = args.folder.resolve()
    if folder.exists():
        sys.exit(f"gpu-bundle: {folder} exists")
    copy(folder)
    if args.python:
        env = os.environ | {"PYTHONPATH": str(folder), "TRITON_CACHE_DIR": str(folder / "triton-cache")}
        command = [args.python, "-m", "bench.gpu_resources", "--arch", str(args.arch), "--fill-cache"]
        subprocess.run(command, cwd=folder, env=env, check=True)
        trim(folder / "triton-cache")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"{folder}: {size / (1 << 20):.1f} MiB")
    if size > MOST:
        sys.exit(f"gpu-bundle: more than {MOST >> 20} MiB")


if __name__ == "__main__":
    main()
