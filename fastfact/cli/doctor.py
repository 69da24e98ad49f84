"""What `fastfact doctor` finds: what is there, what is missing, what that costs, and the line that mends it."""

import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastfact.base import machine
from fastfact.ops.backends import Backend, backends, mend, module_file

RIGHT, ABSENT, WRONG = "right", "absent", "WRONG"
OLDEST_GPU = 8, 0
"""The compute capability from which on the kernels have code."""


@dataclass(frozen=True)
class Finding:
    """state: right; absent, for what may be missing; WRONG, for what is not as it should be. cost and mend are empty
    where it is right, mend also where nothing can be done."""

    part: str
    state: str
    detail: str
    cost: str = ""
    mend: str = ""


EXTRAS = {
    "data": ("torchvision", "CIFAR, SVHN and Tiny-ImageNet are not read"),
    "flower": ("flwr", "fastfact.flower, methods on machines of their own, is not there"),
    "privacy": ("dp_accounting", "--noise is refused: ε cannot be counted"),
    "track": ("tensorboard", "runs leave no event files"),
}
"""Extra of the package → the module that tells of it, and what is not there without it."""


def examine() -> list[Finding]:
    """Everything, in the order it is shown."""
    serving = backends()
    return [
        _pytorch(),
        _processor(),
        _kernels(serving["cpu"]),
        *_calls(serving["cpu"]),
        _compiler(),
        *_gpu(serving),
        _memory_of_choices(),
        *(_extra(name, *what) for name, what in EXTRAS.items()),
    ]


def _pytorch() -> Finding:
    oldest, version = (2, 11), tuple(int(part) for part in torch.__version__.split(".")[:2])
    python = f"Python {sys.version.split()[0]}"
    if version < oldest:
        return Finding(
            "PyTorch",
            WRONG,
            f"{torch.__version__}, {python}",
            "the compiled kernels need 2.11",
            f"{sys.executable} -m pip install --upgrade torch",
        )
    return Finding("PyTorch", RIGHT, f"{torch.__version__}, {python}, {torch.get_num_threads()} threads")


def _processor() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"{machine.processor()}, {machine.cores()} cores, {capability}"
    if capability.startswith("AVX512") or not capability.startswith(("AVX", "DEFAULT")):
        return Finding("processor", RIGHT, detail)
    held = [name for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA") if name in os.environ]
    cost = "vectors are shorter than those of AVX-512, kernels slower"
    return Finding("AVX-512", ABSENT, detail, cost, f"unset {' '.join(held)}" if held else "")


def _kernels(backend: Backend) -> Finding:
    cost = "factorized layers are as slow as dense ones, not 2 to 6 times as fast; plain PyTorch serves"
    if not backend.available:
        return Finding("CPU kernels", WRONG, backend.detail.partition(";")[0], cost, mend())
    if "older" in backend.detail:
        return Finding("CPU kernels", WRONG, backend.detail, "what is lacking runs by plain PyTorch", mend())
    return Finding("CPU kernels", RIGHT, backend.detail)


def _calls(backend: Backend) -> list[Finding]:
    if not backend.available:
        return []
    if file := module_file():
        return [Finding("calls of layers", RIGHT, file.name)]
    detail = f"not built for PyTorch {torch.__version__} and Python {sys.version.split()[0]}"
    cost = "by what any PyTorch has: a layer takes up to 0.1 ms longer in a step, on which small networks depend"
    return [Finding("calls of layers", ABSENT, detail, cost, mend())]


def _compiler() -> Finding:
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if found is None:
        cost = "kernels cannot be built here, nor can torch.compile"
        return Finding("C++ compiler", ABSENT, "neither g++ nor clang++", cost, _system("g++"))
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        cost = "kernels build one file after another"
        return Finding("C++ compiler", ABSENT, f"{found}, no ninja", cost, f"{sys.executable} -m pip install ninja")
    return Finding("C++ compiler", RIGHT, found)


def _system(package: str) -> str:
    """The line that installs a package of the system, by the package manager that is there."""
    names = {"apt-get": package, "dnf": "gcc-c++" if package == "g++" else package, "apk": package, "brew": "llvm"}
    manager = next((name for name in names if shutil.which(name)), None)
    return f"{manager} install {names[manager]}".replace("apk install", "apk add") if manager else ""


def _gpu(serving: Mapping[str, Backend]) -> list[Finding]:
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            why = f"PyTorch {torch.__version__} is built without CUDA"
            how = f"{sys.executable} -m pip install --force-reinstall torch, from PyTorch's index for CUDA"
            how = how if shutil.which("nvidia-smi") else ""
        else:
            why = f"PyTorch has CUDA {torch.version.cuda} and sees no device"
            how = "nvidia-smi says whether the driver sees one" if shutil.which("nvidia-smi") else ""
        return [Finding("GPU", ABSENT, why, "everything runs on the CPU", how)]
    found = [_device(number) for number in range(torch.cuda.device_count())]
    cuda, triton = serving["cuda"], serving["triton"]
    if cuda.available:
        found.append(Finding("CUDA kernels", RIGHT, cuda.detail))
    else:
        nvcc = shutil.which("nvcc") or os.environ.get("CUDA_HOME")
        how = mend() if nvcc else f"{_system('nvidia-cuda-toolkit')}, then {mend()}".removeprefix(", then ")
        found.append(Finding("CUDA kernels", WRONG, cuda.detail, "Triton serves, or plain PyTorch", how))
    if triton.available:
        found.append(Finding("Triton kernels", RIGHT, triton.detail))
    else:
        cost = "what only Triton has runs by plain PyTorch"
        found.append(Finding("Triton kernels", ABSENT, triton.detail, cost, f"{sys.executable} -m pip install triton"))
    return found


def _device(number: int) -> Finding:
    name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
    if capability >= OLDEST_GPU:
        return Finding("GPU", RIGHT, name)
    found, needed = (".".join(map(str, pair)) for pair in (capability, OLDEST_GPU))
    cost = f"the kernels need {needed}: layers fail on it"
    return Finding("GPU", WRONG, f"{name} has compute capability {found}", cost, "take another, or device='cpu'")


def _memory_of_choices() -> Finding:
    part = "measured choices"
    anew = "each process measures anew, or takes the built-in choice"
    mended = f"export {machine.VARIABLE}=DIR, one that can be written"
    try:
        folder = machine.directory()
    except FileNotFoundError as error:
        return Finding(part, WRONG, str(error), anew, mended)
    if folder is None:
        cost = "paths of layers are not measured here, another may be faster"
        return Finding(part, ABSENT, f"{machine.VARIABLE}={machine.setting()}", cost, f"unset {machine.VARIABLE}")
    there = next(path for path in (folder, *folder.parents) if path.exists())
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=there):
        return Finding(part, RIGHT, f"{len(list(folder.glob('*.json'))) if folder.is_dir() else 0} in {folder}")
    return Finding(part, WRONG, f"{folder} cannot be written", anew, mended)


def _extra(extra: str, module: str, cost: str) -> Finding:
    name = module.replace("_", "-")
    if importlib.util.find_spec(module) is None:
        mended = f"{sys.executable} -m pip install {_here(extra)}"
        return Finding(name, ABSENT, "not installed", cost, mended)
    try:
        return Finding(name, RIGHT, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, RIGHT, "installed")


def _here(extra: str) -> str:
    """What pip is told to install for an extra: the checkout this runs from, or the package."""
    root = Path(__file__).resolve().parents[2]
    return f"-e '{root}[{extra}]'" if (root / "pyproject.toml").is_file() else f"'fastfact[{extra}]'"


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """For --json."""
    return [asdict(finding) for finding in findings]
