"""The CUDA library without a GPU: its kernels run on the CPU, nvcc compiles them, and the library loads."""

import copy
import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest
import torch
import triton
from drawing import drawn
from torch import nn
from torch.utils import cpp_extension

import fastfact as ff
from fastfact import ops
from fastfact.base.formats import SEPARABLE, VALUE_TYPES
from fastfact.federation.client.step import Settings
from fastfact.federation.client.train import Trainer
from fastfact.federation.tensors import describe
from fastfact.nn import layers, sparsity
from fastfact.ops import backends, direct, weights
from fastfact.ops.common import address

pytestmark = pytest.mark.kernels
ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
MACROS = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"]
NVCC = shutil.which("nvcc")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def run(*command, **settings):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def compile_all(commands):
    """Run the compilers side by side."""
    running = [subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0, error[-8000:]
    return errors


@pytest.fixture(scope="module")
def emulated_library(tmp_path_factory):
    """The whole CUDA library, binding and kernels, built for the CPU (see cuda_emulation.h)."""
    folder = tmp_path_factory.mktemp("emulated")
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-O1", "-c"]
    emulation = ["-include", ROOT / "tests" / "ops" / "cuda_emulation.h", "-x", "c++"]
    torch_headers = [part for path in cpp_extension.include_paths() for part in ("-isystem", path)]
    names = ["-DFASTFACT_EMULATED", "-DFASTFACT_NAMESPACE=fastfact_emulated", "-DFASTFACT_DEVICE=CPU"]
    commands = [[*compiler, *emulation, s, "-o", folder / f"{s.stem}.o"] for s in SOURCES]
    for binding in sorted((ROOT / "csrc").glob("bind_cuda*.cpp")):
        commands.append([*compiler, *MACROS, *names, *torch_headers, binding, "-o", folder / f"{binding.stem}.o"])
    compile_all(commands)
    library = folder / "library.so"
    paths = [f"-L{path}" for path in cpp_extension.library_paths()]
    run(compiler[0], "-shared", "-o", library, *folder.glob("*.o"), *paths, "-ltorch_cpu", "-lc10")
    return library


@pytest.fixture(scope="module")
def emulated(emulated_library):
    """It as ops of its own."""
    emulated.definitions = torch.library.Library("fastfact_emulated", "DEF")
    for name, op in ops.registry.OPS.items():
        emulated.definitions.define(name + op.schema)
    torch.ops.load_library(str(emulated_library))
    return torch.ops.fastfact_emulated


@pytest.fixture(scope="module")
def banks(emulated_library):
    """What the emulation tells of the banks of shared memory."""
    functions = ctypes.CDLL(emulated_library)
    functions.emulation_worst_banks.restype = ctypes.c_char_p
    functions.emulation_conflicts.restype = ctypes.c_double
    return functions


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.CONVS))
def test_weight_emulated(emulated, case):
    for dtype in DTYPES:
        case(emulated, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.BIG_CONVS)[::3])
def test_larger_weight_emulated(emulated, case):
    for dtype in (torch.float32, torch.bfloat16):
        case(emulated, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.COMPACT, ids=str)
def test_compact_weight_emulated(emulated, case):
    for dtype in DTYPES:
        op_cases.compact(emulated, case, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.THIN, ids=str)
def test_thin_factors_emulated(emulated, case):
    for dtype in DTYPES[1:]:
        op_cases.thin(emulated, case, dtype, "cpu")


@pytest.mark.parametrize("case", op_cases.THIN_PAIRS, ids=str)
def test_thin_pairs_emulated(emulated, case):
    for dtype in DTYPES[1:]:
        op_cases.thin_pair(emulated, case, dtype, "cpu")


@pytest.fixture
def on_emulated(emulated_library, monkeypatch):
    """Layers on the CPU are computed by the emulated library, as those on a GPU are by the real one."""
    module = direct.serve.__self__
    module.take_library(direct._given_out(emulated_library))
    monkeypatch.setattr(direct, "OTHER", "cpu")

    def refused(*args):
        raise AssertionError("the library refused")

    monkeypatch.setattr(weights._Made, "forward", refused)
    monkeypatch.setattr(weights._Made, "backward", refused)
    # Forms of W that a GPU has none of, and that would be taken where they were measured to be faster.
    monkeypatch.setattr(layers, "_orders", lambda *layer: {})
    monkeypatch.setattr(layers, "_onednn", lambda: None)
    yield
    module.take_library(0)
    if file := backends.library_file("cuda"):
        module.take_library(direct._given_out(file))


LAYERS = [
    (ff.nn.FactorizedConv2d, (6, 8, 3), {"padding": 1}, (2, 6, 7, 5)),
    (ff.nn.FactorizedConv2d, (8, 12, (1, 3)), {"stride": 2, "groups": 2, "bias": False}, (3, 8, 6, 9)),
    (ff.nn.FactorizedConv2d, (16, 10, 1), {}, (2, 16, 4, 4)),
    (ff.nn.FactorizedConv2d, (9, 9, 5), {"padding": 4, "dilation": 2, "groups": 9}, (2, 9, 8, 8)),
    (ff.nn.FactorizedLinear, (40, 24), {}, (5, 40)),
    (ff.nn.FactorizedLinear, (33, 7), {"bias": False}, (2, 3, 33)),
]


def making(layer, density):
    """The layer, which makes W, `drawn`."""
    layer.path = "reconstruct"
    return drawn(layer, density)


SPECIFIED = [(of, ("spatial", 1)) for of in LAYERS]
SPECIFIED += [(of, spec) for of in LAYERS if len(of[-1]) == 4 for spec in (("kernel", 2), ("view", 1))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("density", [0.3, 1.0, None], ids=["compact", "dense", "none"])
@pytest.mark.parametrize(("of", "spec"), SPECIFIED, ids=lambda one: f"{one[1] if len(one) > 2 else one}")
def test_a_layer_as_one_call_emulated(on_emulated, of, spec, density, dtype):
    """Training of layers on a GPU: the weight, the layer and all gradients in one call each, without the ops."""
    kind, sizes, how, shape = of
    # "view" has no kernel that writes channels_last
    for form in (torch.contiguous_format, torch.channels_last)[: 1 if len(shape) < 4 or spec[0] == "view" else 2]:
        layer = making(kind(*sizes, **how, spec=ff.Rank1(*spec, sparse=density is not None), dtype=dtype), density)
        if len(shape) == 4:
            layer.to(memory_format=form)
        x = torch.randn(shape, dtype=dtype)
        x = (x.to(memory_format=form) if len(shape) == 4 else x).requires_grad_()
        exact, dense = copy.deepcopy(layer).double(), layer.to_dense()
        wide = x.detach().double().requires_grad_()
        with torch.no_grad():
            weight = dense.weight.double()
        for turn in range(2):  # the second is served by the node of the first
            y = layer(x)
            grad = torch.randn_like(y)
            found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
            w = reference_weight(exact, weight)
            expected_y = torch.func.functional_call(copy.deepcopy(dense).double(), {"weight": w}, (wide,))
            expected = torch.autograd.grad(expected_y, [wide, *exact.factors().values()], grad.double())
            tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
            for got, wanted in zip([y, *found], [expected_y, *expected], strict=False):
                assert (got.double() - wanted).norm() <= tolerance * wanted.norm(), turn
            if layer.bias is not None:
                wanted = grad.double().sum((0, 2, 3) if len(shape) == 4 else tuple(range(len(shape) - 1)))
                assert (found[-1].double() - wanted).norm() <= tolerance * wanted.norm()
        assert len(layer._nodes) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [0.3, 1.0, None], ids=["compact", "dense", "none"])
@pytest.mark.parametrize("of", LAYERS, ids=lambda of: f"{of[1]}")
def test_a_layer_under_autocast_as_one_call_emulated(on_emulated, of, density, dtype):
    """In autocast's type, as the dense layer is, with gradients in the types of the tensors; backward in autocast and
    after it."""
    kind, sizes, how, shape = of
    layer = making(kind(*sizes, **how, spec=ff.Rank1(sparse=density is not None)), density)
    dense = layer.to_dense()
    for wide in (True, False):
        x = torch.randn(shape, dtype=torch.float32 if wide else dtype).requires_grad_()
        with torch.autocast("cpu", dtype):
            y, expected = layer(x), dense(x)
            grad = torch.randn_like(y)
            if wide:
                found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
        if not wide:
            found = torch.autograd.grad(y, [x, *layer.parameters()], grad)
        w = layer.spec.weight(layer._tensors(), layer.size, False)
        same = torch.func.functional_call(dense, {"weight": w}, (x.float(),))
        exact = torch.autograd.grad(
            same, [x, *layer.parameters()][: len(found) - (layer.bias is not None)], grad.float()
        )
        assert y.dtype == expected.dtype == dtype
        assert (y - expected).norm() <= 2e-2 * expected.norm()
        for got, wanted, to in zip(found, exact, [x, *layer.parameters()], strict=False):
            assert got.dtype == to.dtype and (got - wanted).norm() <= 2e-2 * wanted.norm()
    assert len(layer._nodes) == 2


@pytest.mark.parametrize("of", LAYERS, ids=lambda of: f"{of[1]}")
def test_evaluation_under_autocast_as_one_call_emulated(on_emulated, monkeypatch, of):
    """A kept W serves for inputs of both types, until somebody writes to a factor."""
    kind, sizes, how, shape = of
    layer = kind(*sizes, **how).eval()
    layer.path = "reconstruct"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape).to(dtype)
            expected = layer(x)
            with monkeypatch.context() as patch:
                patch.setattr(kind, "_forward", None)
                torch.testing.assert_close(layer(x), expected)
            layer.v.data.mul_(2)
            found, dense = layer(x), layer.to_dense()(x)
            assert found.dtype == torch.bfloat16 and not torch.equal(found, expected)
            torch.testing.assert_close(found, dense, rtol=2e-2, atol=2e-2 * dense.abs().max().item())


@pytest.mark.parametrize("counts", [(115, 115), (115, 28)], ids=["as many", "fewer"])
def test_a_layer_of_many_clients_emulated(on_emulated, counts):
    """Clients of a federation that train one after another: the tensors of one model are pointed at each one's state,
    whose positions of μ are others."""
    layer = making(ff.nn.FactorizedConv2d(8, 8, 3, padding=1), 0.2)
    trainer, x = Trainer(layer, describe(layer, None), Settings(4, 0.1, 0.0, 0.0)), torch.randn(2, 8, 6, 6)

    def check():
        y = layer(x)
        with ff.use_backend("reference"):
            w = layer.spec.weight(layer._tensors(), layer.size, False)
        expected = torch.nn.functional.conv2d(x, w, layer.bias, padding=1)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        (found,) = torch.autograd.grad(y.square().sum(), [layer.mu])
        (wanted,) = torch.autograd.grad(expected.square().sum(), [layer.mu])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)

    for count in counts:
        state = {name: torch.randn(1, *tensor.shape) for name, tensor in trainer.tensors.items()}
        state["mu"] = torch.randn(1, count)
        state["mu_index"] = torch.randperm(8 * 8 * 9)[None, :count].sort().values.to(torch.int32)
        trainer.bind(state, 0)
        check()
        check()


def test_no_more_values_are_read_or_written_than_there_are_emulated(on_emulated):
    """Whatever the positions are, which nobody looks at on a GPU."""
    layer = making(ff.nn.FactorizedConv2d(8, 8, 3, padding=1), 0.2)
    layer._support(layer._tensors())
    words = layer._words[2]
    values = torch.full((len(layer.mu),), torch.nan)
    layer.set_support(values[:5].zero_(), layer.mu_index[:5].clone())
    layer._words = layer.mu_index, (layer.mu_index._version, address(layer.mu_index), 5), words
    layer.mu.data = values[:5]
    y = layer(torch.randn(2, 8, 6, 6))
    assert y.isfinite().all()
    assert torch.autograd.grad(y.sum(), [layer.mu])[0].shape == (5,)


def reference_weight(layer, rounded):
    """W of the factors in plain PyTorch, with the value that it has in lower precision."""
    with ff.use_backend("reference"):
        tensors = layer._tensors()
        w = layer.spec.weight(tensors, layer.size, False)
    return w + (rounded - w).detach()


@pytest.mark.parametrize(("momentum", "method"), [(0.0, "proximal"), (0.9, "proximal"), (0.9, "subgradient")])
def test_prox_sgd_as_one_call_emulated(on_emulated, monkeypatch, momentum, method):
    """A step of parameters of several types on a GPU is one call, without the op."""

    def stepped(params):
        params = [nn.Parameter(p.clone(memory_format=torch.preserve_format)) for p in params]
        sparsity.mark_penalized(params[0])
        optimizer = ff.optim.ProxSGD(params, lr=0.1, momentum=momentum, weight_decay=0.01, l1=0.3, method=method)
        for turn in range(2):
            for position, p in enumerate(params):
                p.grad = torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape) * (turn + position)
                p.grad = torch.empty_like(p).copy_(p.grad)
            optimizer.step()
        return params

    params = [torch.randn(700), torch.randn(3, 4, 5, 2).to(memory_format=torch.channels_last), torch.randn(0)]
    params += [torch.randn(33, dtype=torch.float64), torch.randn(9, dtype=torch.bfloat16)]
    with monkeypatch.context() as patch:
        patch.setattr(ff.ops, "prox_sgd_step", None)
        found = stepped(params)
    with ff.use_backend("reference"):
        for got, wanted in zip(found, stepped(params), strict=True):
            torch.testing.assert_close(got, wanted)


def test_conflicts_in_the_banks_are_counted(banks):
    def of(addresses, size):
        return banks.emulation_conflicts((ctypes.c_int64 * 32)(*addresses), size)

    lanes = range(32)
    assert of([4 * lane for lane in lanes], 4) == of([16 * lane for lane in lanes], 16) == of([0] * 32, 4) == 1
    assert of([128 * lane for lane in lanes], 4) == 32 and of([32 * lane for lane in lanes], 16) == 2
    # half precision through a tile of 72 elements a row: 8 rows a pack, one element of each
    assert of([2 * (8 * (lane % 8) * 72 + lane // 8) for lane in lanes], 2) == 8


@pytest.mark.parametrize("rank", [16, 32, 40])
@pytest.mark.parametrize(("shape", "how"), [((1, 64, 64, 3, 3), "channels_last"), ((1, 128, 192), "plain")])
def test_warps_meet_in_no_bank_of_shared_memory(emulated, banks, shape, how, rank):
    """Tiles of W and their products go through shared memory without conflicts in half precision, whichever side of W
    is contiguous: thin factors (ranks up to 32) and others, one product and two. Factors are a small part."""
    banks.emulation_count_banks()
    channels_last = how == "channels_last"
    op_cases.lowrank(emulated, shape, SEPARABLE, torch.bfloat16, "cpu", rank, channels_last, how)
    op_cases.hadamard(emulated, shape, torch.bfloat16, "cpu", rank, channels_last, how, False)
    lines = [line.rsplit(" ", 2) for line in banks.emulation_worst_banks().decode().splitlines()]
    tiles = [float(ways) for _, size, ways in lines if size == "16"]
    assert len(tiles) >= 3 and max(tiles) == 1, lines
    assert max(float(ways) for *_, ways in lines) <= 2, lines


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prox_sgd_step_emulated(emulated, momentum, proximal, dtype):
    for numel in (1001, 1008):
        op_cases.prox(emulated, dtype, "cpu", momentum, proximal, numel)


def test_prox_sgd_step_of_many_tensors_emulated(emulated):
    params = [torch.ones(3 + j % 5) for j in range(100)]
    grads = [torch.full_like(p, j) for j, p in enumerate(params)]
    emulated.prox_sgd_step(params, grads, [], [0.0] * 100, 0.5, 0.0, 0.0, True)
    assert all((p == 1 - j / 2).all() for j, p in enumerate(params))


@pytest.mark.parametrize("value_type", list(VALUE_TYPES), ids=str)
@pytest.mark.parametrize(("n", "density"), [(1, 0.5), (9, 0.3), (1024, 0.0), (2051, 0.4), (40, 1.0)])
def test_bitmap_emulated(emulated, n, density, value_type):
    for dtype in DTYPES:
        op_cases.bitmap(emulated, dtype, "cpu", value_type, n, density)


def test_bitmap_of_many_rows_emulated(emulated):
    op_cases.bitmap_of_many_rows(emulated, "cpu")


def test_a_damaged_bitmap_is_an_error_emulated(emulated):
    op_cases.damaged_bitmap(emulated, "cpu")


def test_bitmap_without_elements_emulated(emulated):
    bits, values, scale = emulated.pack_bitmap(torch.zeros(2, 0, 5), 2)
    assert bits.shape == (2, 0, 1) and values.numel() == 0 and scale.shape == (2, 0)
    assert emulated.unpack_bitmap(bits, values, scale, 5).shape == (2, 0, 5)


@pytest.mark.parametrize("case", op_cases.SIMILARITIES, ids=str)
def test_similarity_sums_emulated(emulated, case):
    for dtype in (torch.float64, torch.float32):
        op_cases.similarity(emulated, dtype, "cpu", *case)
    op_cases.similarity(emulated, torch.float32, "cpu", *case, integers=True)


@pytest.mark.parametrize("case", op_cases.SKETCHES, ids=str)
def test_srht_emulated(emulated, case):
    for dtype in DTYPES:
        op_cases.sketch(emulated, dtype, "cpu", *case)


@pytest.fixture(scope="module")
def library():
    """The CUDA library that set-up builds wherever nvcc is."""
    if NVCC is None or torch.version.cuda is None:
        pytest.skip("needs nvcc and a CUDA build of PyTorch")
    return ROOT / "fastfact" / "_cuda.abi3.so"


def test_the_library_holds_every_kernel_for_both_architectures(library):
    report = run(TOOLS / "cuobjdump", "--dump-resource-usage", library)
    kernels = {"sm_80": set(), "sm_90a": set()}
    for part in re.split(r"Fatbin elf code:", report)[1:]:
        kernels[re.search(r"arch = (\w+)", part)[1]].update(re.findall(r"Function (\w+):", part))
    assert kernels["sm_80"] == kernels["sm_90a"]
    for source in SOURCES:
        for kernel in re.findall(
            r"__global__[^(]*?(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)", "", source.read_text())
        ):
            assert any(kernel in name for name in kernels["sm_80"]), (source.name, kernel)
    # What registers do not hold goes to the stack: at most 16 bytes of it, besides 8 of the frame. Two thin products
    # are held to 128 registers, for two blocks on a multiprocessor; without that bound it would be one.
    for name, stack in re.findall(r"Function (\w+):\s+REG:\d+ STACK:(\d+)", report):
        assert int(stack) <= (48 if "thin_kernel" in name else 24), (name, stack)


def instructions(file):
    """Names of the kernels of sm_90a in a file → how many instructions each has, loops counted once."""
    # it looks for nvdisasm
    text = run(TOOLS / "cuobjdump", "-sass", file, env=os.environ | {"PATH": f"{os.environ['PATH']}:{TOOLS}"})
    found = {}
    for function in text.split("Function : ")[1:]:
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +([^;]*);", function)
        found[function.split()[0]] = sum("NOP" not in line for line in lines)
    return found


def test_instructions_an_element(library, tmp_path):
    """Half precision leaves about 30 instructions an element before they take longer than memory (bench/NOTES.md). All
    that a kernel has, on any path, is counted; at rank 1 loops are run once."""
    run(TOOLS / "cuobjdump", "--extract-elf", "sm_90a", library, cwd=tmp_path)
    (cubin,) = [file for file in tmp_path.iterdir() if b"rank1_weight_kernel" in file.read_bytes()]
    counts = instructions(cubin)
    # what packs have in common: kPackU, kPackV, kStrideU, kTwoRuns; μ: kDense, kSupport, kScattered
    limits = {
        (1, 0): 18,
        (2, 0): 18,
        (3, 0): 21,
        (4, 0): 27,
        (1, 1): 32,
        (2, 1): 32,
        (4, 1): 40,
        (2, 2): 40,
        (3, 2): 46,
    }
    for (kind, sparse), most in limits.items():
        kernel = rf"rank1_weight_kernelI13__nv_bfloat16Li8ELi{kind}ELi{sparse}E"
        (count,) = [n for name, n in counts.items() if re.search(kernel, name)]
        assert count / (8 * (1 if sparse else 2)) <= most, kernel


def test_the_library_loads_without_a_gpu(library):
    load = """
import sys, torch
import fastfact.ops
from fastfact.ops.registry import with_kernels
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert all(has(f"fastfact::{op}", "CUDA") for op in with_kernels("cuda"))
"""
    run(sys.executable, "-W", "error", "-c", load)
    if readelf := shutil.which("readelf"):
        assert "[libtorch_cuda.so]" in run(readelf, "-d", library)
