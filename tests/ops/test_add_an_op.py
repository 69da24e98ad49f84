"""The five steps of CONTRIBUTING.md, "Add an op", taken on a copy of the package with an op that subtracts means."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]

REFERENCE = '''

@op(lambda x: torch.empty_like(x), kernels=("cpu",))
def centered(x: Tensor) -> Tensor:
    """x [k, n] minus the mean of each row."""
    return x - x.mean(1, keepdim=True)
'''
DECLARATION = "\nnamespace fastfact { void centered(const double* x, int64_t rows, int64_t n, double* out); }\n"
KERNEL = """
#include "kernels.h"
namespace fastfact {
void centered(const double* x, int64_t rows, int64_t n, double* out) {
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += x[r * n + j];
    for (int64_t j = 0; j < n; ++j) out[r * n + j] = x[r * n + j] - sum / n;
  }
}
}  // namespace fastfact
"""
BINDING = """
#include "bind.h"
#include "cpu/kernels.h"
using namespace fastfact::bind;
namespace {
Tensor centered(Tensor x) {
  expect_dim("centered", "x", x, 2);
  expect("centered", "x", x, shape_of(x), x);
  x = torch::stable::contiguous(x);
  Tensor out = empty(x, shape_of(x));
  fastfact::centered(static_cast<double*>(x.data_ptr()), x.size(0), x.size(1), static_cast<double*>(out.data_ptr()));
  return out;
}
}  // namespace
STABLE_TORCH_LIBRARY_IMPL(fastfact, CPU, m) { m.impl("centered", TORCH_BOX(&centered)); }
"""
PUBLIC = '''

def centered(x: Tensor) -> Tensor:
    """x [n] or [k, n] minus the mean of each client's numbers."""
    clients, (x,) = with_clients("centered", {"x": (x, 1)})
    return implementation("centered")(x if clients else x[None]).reshape(x.shape)
'''
CASE = """
import sys
import torch
torch.ops.load_library(sys.argv[1])
import fastfact as ff
assert ff.__file__.startswith(sys.argv[2]), ff.__file__
from fastfact.ops.sparse import centered
x = torch.randn(5, 7, dtype=torch.float64)
for case in (x, x[0], x[:, ::2]):
    with ff.use_backend("reference"):
        expected = centered(case)
    torch.testing.assert_close(centered(case), expected)
assert torch._C._dispatch_has_kernel_for_dispatch_key("fastfact::centered", "CPU")
torch.library.opcheck(torch.ops.fastfact.centered.default, (x,), test_utils=("test_schema", "test_faketensor"))
try:
    centered(x[None])
except ValueError as error:
    assert "centered: x has shape" in str(error)
"""


def test_an_op_by_the_five_steps(tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "kernels", "_cuda*.so")
    shutil.copytree(ROOT / "fastfact", tmp_path / "fastfact", ignore=ignored)
    (tmp_path / "csrc" / "cpu").mkdir(parents=True)
    for folder in ("csrc", "csrc/cpu"):
        for header in (ROOT / folder).glob("*.h"):
            shutil.copy(header, tmp_path / folder)

    def add(file, text):
        with open(tmp_path / file, "a") as end:
            end.write(text)

    add("fastfact/ops/reference.py", REFERENCE)
    add("csrc/cpu/kernels.h", DECLARATION)
    add("csrc/cpu/centered.cpp", KERNEL)
    add("csrc/bind_cpu_centered.cpp", BINDING)
    add("fastfact/ops/sparse.py", PUBLIC)
    add("case.py", CASE)

    library = tmp_path / "centered.so"
    flags = [
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-shared",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-DTORCH_STABLE_ONLY",
    ]
    include = [f"-I{tmp_path / 'csrc'}", *(f"-I{path}" for path in cpp_extension.include_paths())]
    sources = [tmp_path / "csrc" / "cpu" / "centered.cpp", tmp_path / "csrc" / "bind_cpu_centered.cpp"]
    link = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10", "-o", library]
    compiled = subprocess.run(
        [os.environ.get("CXX", "c++"), *flags, *include, *map(str, sources), *map(str, link)],
        capture_output=True,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    program = [sys.executable, "-W", "error::UserWarning", "case.py", str(library), str(tmp_path)]
    done = subprocess.run(program, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
