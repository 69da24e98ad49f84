"""The source distribution and the wheel hold everything, the wheel works away from the checkout, and a plain
`pip install` ends with kernels wherever there is a compiler."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(*args, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FASTFACT_BUILD", "CXX")} | environment
    done = subprocess.run(list(map(str, args)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def python(*args, cwd, **environment):
    return run(sys.executable, *args, cwd=cwd, **environment).stdout


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


@pytest.fixture(scope="module")
def installed(sources, tmp_path_factory):
    """A folder into which pip has installed a wheel of the sources, without libraries; and a process away from the
    checkout that has used it."""
    top = tmp_path_factory.mktemp("installed")
    options = ("-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--target", top / "site")
    python("-m", "pip", "install", *options, ".", cwd=sources, FASTFACT_BUILD="skip")
    code = (
        "import fastfact as ff, fastfact.kernels, torch\n"
        "print(ff.__file__, fastfact.kernels.__file__)\n"
        "layer = ff.nn.FactorizedConv2d(3, 4, 3)\n"
        "layer(torch.randn(1, 3, 8, 8)).sum().backward()\n"
        "print(ff.backends()['cpu'])\n"
    )
    return top / "site", run(sys.executable, "-c", code, cwd=top, PYTHONPATH=str(top / "site"))


def test_wheel_works_elsewhere(installed):
    site, used = installed
    names = {file.relative_to(site).as_posix() for file in site.rglob("*")}
    for package in ("fastfact", "kernels"):
        for file in (ROOT / package).rglob("*.py"):
            place = Path("fastfact" if package == "kernels" else "") / file.relative_to(ROOT)
            assert place.as_posix() in names
    assert not any(name.endswith((".so", ".cpp", ".h")) for name in names)
    assert used.stdout.count(str(site)) >= 2
    assert "_cpu" in used.stdout


@pytest.mark.kernels
def test_wheel_for_another_processor(sources, tmp_path):
    """By a cross-compiler, without optimization, against empty libraries in PyTorch's place, which are for this one."""
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("aarch64-linux-gnu-g++ is not installed")
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        'for flag; do shift; case $flag in -O3) set -- "$@" -O0 -DFF_CONV_TYPE=float;; *) set -- "$@" "$flag";; esac;'
        ' done\nexec aarch64-linux-gnu-g++ "$@"\n'
    )
    compiler.chmod(0o755)
    for name in ("torch", "torch_cpu", "torch_python", "c10"):
        run(compiler, "-shared", "-x", "c++", os.devnull, "-o", f"lib{name}.so", cwd=tmp_path)
    copy = shutil.copytree(sources, tmp_path / "sources", ignore=shutil.ignore_patterns("build"))
    tools = dict.fromkeys(("CXX", "CC"), str(compiler)) | dict.fromkeys(
        ("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared"
    )
    tools |= {"LDFLAGS": f"-L{tmp_path}", "CUDA_HOME": "/nonexistent", "MAX_JOBS": "2"}
    python("setup.py", "-q", "bdist_wheel", "--plat-name", "linux_aarch64", "-d", tmp_path, cwd=copy, **tools)
    (wheel,) = tmp_path.glob("fastfact-*-cp311-abi3-linux_aarch64.whl")
    with zipfile.ZipFile(wheel) as archive:
        (library,) = (name for name in archive.namelist() if name.endswith("_cpu.abi3.so"))
        header = archive.read(library)[:20]
    assert header[:4] == b"\x7fELF" and header[18:20] == b"\xb7\x00", header  # AArch64


@pytest.fixture
def isolated(tmp_path):
    """The environment variables that hide all installed packages but setuptools, as pip does for a build."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    for name in ("setuptools", "_distutils_hack", "wheel"):
        (overlay / name).symlink_to(Path(importlib.util.find_spec(name).origin).parent)
    (overlay / "sitecustomize.py").write_text(
        "import sys, sysconfig\n"
        "hidden = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}\n"
        "sys.path[:] = [path for path in sys.path if path not in hidden]\n"
    )
    return {"PYTHONPATH": str(overlay), "PYTHONNOUSERSITE": "1", "CUDA_HOME": "/nonexistent"}


BUILD = (
    "import importlib.util, sys\n"
    "out = sys.argv[1]  # the backend takes the others' place\n"
    "sys.path.insert(0, '.')\n"
    "assert importlib.util.find_spec('torch') is None, 'not isolated'\n"
    "import build_backend\n"
    "print('requires', build_backend.get_requires_for_build_wheel())\n"
    "build_backend.build_wheel(out)\n"
)


def required(done):
    """What the build asked for."""
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("requires "))
    return line.removeprefix("requires ")


def built(wheels):
    (wheel,) = wheels.glob("fastfact-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture
def fresh(sources, tmp_path):
    """The source distribution without what other builds left in it."""
    return shutil.copytree(sources, tmp_path / "fresh", ignore=shutil.ignore_patterns("build", "*.egg-info"))


def test_an_isolated_build_finds_pytorch_and_ends_with_the_library(fresh, isolated, tmp_path):
    """With a compiler that writes empty files: the library itself is built by `make`, and in `-m slow`."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"#!{sys.executable} -S\n"
        "import sys\n"
        "if '-dumpfullversion' in sys.argv: print('12.2.0')\n"
        "elif '-o' in sys.argv: open(sys.argv[sys.argv.index('-o') + 1], 'w').close()\n"
    )
    compiler.chmod(0o755)
    done = run(sys.executable, "-c", BUILD, tmp_path, cwd=fresh, CXX=str(compiler), FASTFACT_BUILD="must", **isolated)
    assert "torch" not in required(done)
    own = f"fastfact/_torch-{torch.__version__}-{sysconfig.get_config_var('SOABI')}.so"
    assert sorted(built(tmp_path)) == ["fastfact/_cpu.abi3.so", own]


def test_without_a_compiler_the_build_says_so(fresh, isolated, tmp_path):
    done = run(sys.executable, "-c", BUILD, tmp_path, cwd=fresh, PATH="", **isolated)
    assert required(done) == "[]"
    assert "fastfact._cpu is NOT BUILT: there is no C++ compiler" in done.stderr
    assert built(tmp_path) == []


def test_pytorch_is_a_requirement_of_the_build_only_where_it_is_needed(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.delenv("FASTFACT_BUILD", raising=False)
    monkeypatch.setattr(backend, "compiler", lambda: "/usr/bin/c++")
    assert not [name for name in backend.get_requires_for_build_wheel() if name.startswith("torch")]
    monkeypatch.setattr(backend, "_serves", lambda path: False)
    assert "torch>=2.11" in backend.get_requires_for_build_wheel()
    assert "torch>=2.11" in backend.get_requires_for_build_editable()
    monkeypatch.setattr(backend, "compiler", lambda: None)
    assert backend.get_requires_for_build_wheel() == []
    monkeypatch.setattr(backend, "compiler", lambda: "/usr/bin/c++")
    monkeypatch.setenv("FASTFACT_BUILD", "skip")
    assert backend.get_requires_for_build_wheel() == []


@pytest.mark.parametrize("version, serves", [("2.10.1", False), ("2.11.0+cpu", True), ("3.0a1", True)])
def test_a_pytorch_serves_the_build_by_its_version(monkeypatch, tmp_path, version, serves):
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    (tmp_path / f"torch-{version}.dist-info").mkdir()
    (tmp_path / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    assert backend._serves([str(tmp_path)]) is serves


def test_the_import_says_once_what_builds_the_kernels(sources, installed):
    """From a checkout without libraries, and from an installed wheel."""
    done = run(sys.executable, "-c", "import fastfact; import fastfact.ops", cwd=sources)
    assert done.stderr.count("without its compiled kernels") == 1
    assert f"cd {sources} && FASTFACT_BUILD=must {sys.executable} setup.py build_ext --inplace" in done.stderr
    _, used = installed
    assert used.stderr.count("without its compiled kernels") == 1
    assert f"FASTFACT_BUILD=must {sys.executable} -m pip install --force-reinstall --no-deps" in used.stderr
    assert f"file://{sources}" in used.stderr


# Each installs into an environment made for it, which sees this one's packages, and builds the real library.
INSTALL = ("-m", "pip", "install", "-q", "--no-deps")
INSTALLS = {
    "isolated": [(*INSTALL, "{sources}")],
    "not isolated": [(*INSTALL, "--no-build-isolation", "{sources}")],
    "wheel": [
        ("-m", "pip", "wheel", "-q", "--no-deps", "-w", "{top}/dist", "{sources}"),
        (*INSTALL, "--no-index", "--find-links", "{top}/dist", "fastfact"),
    ],
    "editable": [(*INSTALL, "-e", "{sources}")],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", INSTALLS)
def test_an_install_ends_with_kernels(fresh, tmp_path, how):
    python("-m", "venv", "env", cwd=tmp_path)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(str(Path(pytest.__file__).parents[1]))
    own = tmp_path / "env" / "bin" / "python"
    for command in INSTALLS[how]:
        words = [word.format(sources=fresh, top=tmp_path) for word in command]
        run(own, *words, cwd=tmp_path, CUDA_HOME="/nonexistent")
    code = "import fastfact as ff; print(ff.__file__, ff.backends()['cpu'])"
    told = run(own, "-c", code, cwd=tmp_path).stdout
    assert str(tmp_path) in told and "available=True, detail='_cpu.abi3.so'" in told
