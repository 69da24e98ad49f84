"""The source distribution and the wheel hold everything, and the wheel works away from the checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(*args, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The source distribution, made of the tracked files and unpacked."""
    top = tmp_path_factory.mktemp("packaging")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        source = ROOT / name
        if source.exists():
            (top / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, top / "checkout" / name, follow_symlinks=False)
    python("setup.py", "-q", "sdist", "-d", top, cwd=top / "checkout", FASTFACT_BUILD="skip")
    (archive,) = top.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        # Python 3.11.4 brought the filter.
        tar.extractall(top, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return top / archive.name.removesuffix(".tar.gz")


def test_source_distribution_is_complete(sources):
    for folder in ("csrc", "kernels", "fastfact"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".cpp", ".cu", ".h", ".cuh"):
                assert (sources / file.relative_to(ROOT)).is_file() or file.parts[-2] == "kernels", file


def test_wheel_works_elsewhere(sources, tmp_path):
    pip = ("-m", "pip", "--disable-pip-version-check")
    options = ("-q", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    python(*pip, "wheel", *options, ".", cwd=sources, FASTFACT_BUILD="skip")
    (wheel,) = tmp_path.glob("fastfact-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package in ("fastfact", "kernels"):
        for file in (ROOT / package).rglob("*.py"):
            place = Path("fastfact" if package == "kernels" else "") / file.relative_to(ROOT)
            assert place.as_posix() in names
    assert not any(name.endswith((".so", ".cpp", ".h")) for name in names)
    python(*pip, "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel, cwd=tmp_path)
    code = (
        "import fastfact as ff, fastfact.kernels, torch\n"
        "print(ff.__file__, fastfact.kernels.__file__)\n"
        "layer = ff.nn.FactorizedConv2d(3, 4, 3)\n"
        "layer(torch.randn(1, 3, 8, 8)).sum().backward()\n"
        "print(ff.backends()['cpu'])\n"
    )
    out = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert out.count(str(tmp_path / "site")) >= 2
    assert "_cpu" in out
