"""Builds the compiled libraries fastfact/_cpu*.so and fastfact/_cuda*.so, which serve any PyTorch and Python, and
fastfact/_torch*.so, the part of the first that is faster where it knows both; everything else is in pyproject.toml.

FASTFACT_BUILD=must fails where a library does not build (the CUDA one only where nvcc is), FASTFACT_BUILD=skip builds
none. By default a library that does not build is left out, with the reason, and plain PyTorch serves in its place.
FASTFACT_SANITIZE=address builds the CPU one with that sanitizer of the compiler, for tests.
build_backend.py says where PyTorch's headers come from in an isolated build.
"""

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

from build_backend import OLDEST, compiler, show_pytorch

show_pytorch()
try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension
except ImportError as error:
    from setuptools.command.build_ext import build_ext as BuildExtension

    no_torch = f"PyTorch cannot be imported ({error})"
else:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    no_torch = None if version >= OLDEST else f"PyTorch {torch.__version__} is older than {'.'.join(map(str, OLDEST))}"

MODE = os.environ.get("FASTFACT_BUILD", "")
if MODE not in ("", "must", "skip"):
    sys.exit(f"FASTFACT_BUILD={MODE!r}: must be 'must', 'skip' or unset")

MACROS = [("TORCH_TARGET_VERSION", "0x020b000000000000"), ("TORCH_STABLE_ONLY", None)]
WARNINGS = ["-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"]  # about vectors that are inlined away
SANITIZE = os.environ.get("FASTFACT_SANITIZE", "")
SANITIZED = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
CXX = ["-O1", "-g1", "-DFF_EXACT_SCRATCH", *SANITIZED] if SANITIZE else ["-O3", "-g0"]
# Calls in the place of inlined checks: a quarter of the time to compile.
CXX += ["--param", "asan-instrumentation-with-call-threshold=0"] if SANITIZE == "address" else []
CXX += ["-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", *WARNINGS]


KERNELS = "it is slower by far, plain PyTorch serves in place of these kernels"


class NotBuilt(Exception):
    pass


def tell(message):
    """Say it on stderr and, since pip keeps that to itself unless -v is given, on the terminal."""
    print(message, file=sys.stderr)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print("\n" + message, file=terminal)


class Build(BuildExtension):
    """Completes the extensions with torch's paths, which the sdist is made without, and builds them one by one."""

    def build_extensions(self):
        built = []
        for extension in self.extensions:
            self.extensions = [extension]
            try:
                getattr(self, "prepare" + extension.name.removeprefix("fastfact."))(extension)
                super().build_extensions()
                built.append(extension)
            except NotBuilt as reason:
                print(f"fastfact: {extension.name} is not built: {reason}", file=sys.stderr)
            except Exception as error:
                if MODE == "must":
                    raise
                loss = "calls of small layers take longer" if extension.name.endswith("_torch") else KERNELS
                tell(
                    f"fastfact: WARNING: {extension.name} is NOT BUILT: {error}\n"
                    f"fastfact: it is installed without it: {loss}. Once that is mended, install it again; "
                    "FASTFACT_BUILD=must makes this an error."
                )
        self.extensions = built

    def prepare_cpu(self, extension):
        if MODE == "skip":
            raise NotBuilt("FASTFACT_BUILD=skip")
        if not compiler():
            raise RuntimeError("there is no C++ compiler (install g++ or clang++, or name one in CXX)")
        if no_torch:
            raise RuntimeError(no_torch)
        extension.include_dirs += cpp_extension.include_paths()
        extension.library_dirs += cpp_extension.library_paths()
        extension.libraries += ["torch_cpu", "c10"]
        extension.extra_compile_args = {"cxx": CXX}
        extension.extra_link_args += SANITIZED

    def prepare_torch(self, extension):
        self.prepare_cpu(extension)
        extension.libraries += ["torch", "torch_python"]

    def get_ext_filename(self, name):
        # As fastfact/ops/backends.py looks for it.
        if name.endswith("_torch"):
            name, known = name.replace(".", os.sep), torch.__version__ if not no_torch else ""
            return f"{name}-{known}-{sysconfig.get_config_var('SOABI')}.so"
        return super().get_ext_filename(name)

    def prepare_cuda(self, extension):
        if MODE == "skip":
            raise NotBuilt("FASTFACT_BUILD=skip")
        if no_torch:
            raise NotBuilt(no_torch)
        if torch.version.cuda is None:
            raise NotBuilt(f"PyTorch {torch.__version__} has no CUDA")
        cpp_extension.CUDA_HOME = cuda_home()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0+PTX;9.0a")
        extension.include_dirs += cpp_extension.include_paths(device_type="cuda")
        extension.library_dirs += cpp_extension.library_paths(device_type="cuda")
        # linked statically, as nvcc does: the library must not need the toolkit's libcudart at run time
        extension.libraries += ["torch_cpu", "c10", "cudart_static", "rt", "dl", "pthread"]
        extension.define_macros += [("USE_CUDA", None)]
        extension.extra_link_args += ["-Wl,--no-as-needed", "-ltorch_cuda"]
        strict = ["-Werror", "all-warnings"] if MODE == "must" else []
        extension.extra_compile_args = {"cxx": CXX, "nvcc": ["-O3", *strict]}


def cuda_home():
    """Where the CUDA toolkit is: torch's guess or, where nvcc on PATH is only a wrapper, nvcc's own answer."""
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home or "", "bin", "nvcc")
    if not home or not nvcc.exists():
        raise NotBuilt("nvcc is not found (set CUDA_HOME)")
    if not Path(home, "include", "cuda_runtime.h").exists():
        steps = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        if top := re.search(r"^#\$ TOP=(.+)$", steps, re.MULTILINE):
            return str(Path(top[1].strip()).resolve())
    return home


def library(name, kernels, any_pytorch=True):
    binding = f"csrc/bind_{name}.cpp"
    if not Path(binding).exists():
        return []
    return [
        Extension(
            f"fastfact._{name}",
            sorted(glob(f"csrc/bind_{name}*.cpp") + glob(f"csrc/{name}/*.{kernels}")),
            depends=[
                "build_backend.py",
                *sorted(glob("csrc/*.h") + glob(f"csrc/{name}/*.h") + glob(f"csrc/{name}/*.cuh")),
            ],
            define_macros=list(MACROS) if any_pytorch else [],
            language="c++",
            py_limited_api=any_pytorch,
            optional=MODE != "must",
        )
    ]


setup(
    ext_modules=library("cpu", "cpp") + library("torch", "cpp", any_pytorch=False) + library("cuda", "cu"),
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
