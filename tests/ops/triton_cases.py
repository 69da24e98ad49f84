"""The Triton kernels against the reference: on a GPU, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

Collected through tests/test_kernels_triton.py, which sees to one of the two.
"""

import os

import op_cases
import pytest
import torch

import fastfact as ff
from fastfact import kernels
from fastfact.base.formats import VALUE_TYPES

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.float64, torch.bfloat16] * GPU
CONVS = op_cases.CONVS + op_cases.BIG_CONVS * GPU


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("case", op_cases.weight_cases(CONVS))
def test_weight(case):
    for dtype in DTYPES:
        case(kernels, dtype, DEVICE)


@pytest.mark.parametrize("case", op_cases.COMPACT, ids=str)
def test_compact_weight(case):
    for dtype in DTYPES:
        op_cases.compact(kernels, case, dtype, DEVICE)


@pytest.mark.parametrize("case", op_cases.THIN, ids=str)
def test_thin_factors(case):
    for dtype in DTYPES:
        op_cases.thin(kernels, case, dtype, DEVICE)


@pytest.mark.parametrize("case", op_cases.THIN_PAIRS, ids=str)
def test_thin_pairs(case):
    for dtype in DTYPES:
        op_cases.thin_pair(kernels, case, dtype, DEVICE)


@pytest.mark.parametrize("case", op_cases.ADAPTERS, ids=str)
def test_lowrank_linear(case):
    for dtype in DTYPES:
        op_cases.adapter(kernels, case, dtype, DEVICE)


@pytest.mark.parametrize("clients", [False, True])
def test_adapters_train_by_the_kernels(clients):
    """The layer with its gradients, alone and under `vmap` with σ shared, is what the reference makes of it."""
    k = (3,) * clients
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (*k, 10, 6), "a": (*k, 2, 6), "b": (*k, 7, 2), "bias": (7,)}
    trained = {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}
    trained = {name: t.to(DEVICE) for name, t in trained.items()}
    sigma = torch.randn(7, 6, generator=g, dtype=torch.float64).to(DEVICE)

    def loss(trained):
        return ff.ops.lowrank_linear(sigma=sigma, **trained, scaling=0.5).square().sum()

    function = torch.func.grad(loss)
    if clients:
        function = torch.func.vmap(function, in_dims=({name: 0 if name != "bias" else None for name in trained},))
    calls = []
    served = kernels.lowrank_linear
    for backend in ("triton", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "lowrank_linear", lambda *args: calls.append(args[0].shape) or served(*args))
            with ff.use_backend(backend):
                grads = function(trained)
        if backend == "triton":
            assert calls == [(3 if clients else 1, 10, 6)]
            found = grads
    assert len(calls) == 1
    for name, one in found.items():
        torch.testing.assert_close(one, grads[name], rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prox_sgd_step(momentum, proximal, dtype):
    op_cases.prox(kernels, dtype, DEVICE, momentum, proximal)


@pytest.mark.parametrize("value_type", list(VALUE_TYPES), ids=str)
@pytest.mark.parametrize(("n", "density"), [(1, 0.5), (9, 0.3), (1024, 0.0), (2051, 0.4), (40, 1.0)])
def test_bitmap(n, density, value_type):
    for dtype in DTYPES:
        op_cases.bitmap(kernels, dtype, DEVICE, value_type, n, density)


def test_a_damaged_bitmap_is_an_error():
    op_cases.damaged_bitmap(kernels, DEVICE)


def test_bitmap_without_elements():
    bits, values, scale = kernels.pack_bitmap(torch.zeros(2, 0, 5, device=DEVICE), 2)
    assert bits.shape == (2, 0, 1) and values.numel() == 0 and scale.shape == (2, 0)
    assert kernels.unpack_bitmap(bits, values, scale, 5).shape == (2, 0, 5)


@pytest.mark.parametrize("case", op_cases.SIMILARITIES + op_cases.BIG_SIMILARITIES * GPU, ids=str)
def test_similarity_sums(case):
    for dtype in [torch.float32] + [torch.float64] * GPU:
        op_cases.similarity(kernels, dtype, DEVICE, *case)
    op_cases.similarity(kernels, torch.float32, DEVICE, *case, integers=True)


@pytest.mark.parametrize("case", op_cases.MIXINGS, ids=str)
def test_similarity_mix(case):
    with ff.use_backend("triton"):
        op_cases.mixing(DEVICE, *case)
        op_cases.mixing(DEVICE, *case, bits=32)


@pytest.mark.parametrize("shape", op_cases.NORMS + [(5, 64, 96, 16, 16)] * GPU, ids=str)
def test_batch_norm(shape):
    for dtype in DTYPES:
        op_cases.norm(kernels, dtype, DEVICE, shape)


@pytest.mark.parametrize("case", op_cases.SKETCHES, ids=str)
def test_srht(case):
    for dtype in DTYPES:
        op_cases.sketch(kernels, dtype, DEVICE, *case)


@pytest.mark.parametrize("layout", ["spatial", "kernel", "separable", "hadamard", "linear", "adapter"])
def test_gradcheck(layout):
    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, requires_grad=True)

    k, o, i, h, w, r = 2, 3, 2, 3, 2, 2
    function, tensors = {
        "spatial": (ff.ops.rank1_weight, (leaf(r, h, w), leaf(k, r, o, i), leaf(k, o, i, h, w))),
        "kernel": (
            lambda u, v: ff.ops.rank1_weight(u, v, layout="kernel", channels_last=True),
            (leaf(k, r, i, h), leaf(k, r, o, w)),
        ),
        "linear": (lambda u, v: ff.ops.rank1_weight(u, v, layout="linear"), (leaf(r, i), leaf(r, o))),
        "separable": (
            lambda s, a, b: ff.ops.lowrank_weight(s, a, b, (o, i, h, w), scaling=0.5),
            (leaf(o, i, h, w), leaf(k, r, o * w), leaf(k, i * h, r)),
        ),
        "hadamard": (
            lambda *t: ff.ops.hadamard_weight(*t, (o, i, h, w), personalized=True),
            (leaf(o, r), leaf(i * h * w, r), leaf(k, o, r), leaf(k, i * h * w, r)),
        ),
        "adapter": (
            lambda x, *t: ff.ops.lowrank_linear(x, torch.ones(o, i, dtype=x.dtype, device=x.device), *t, scaling=0.5),
            (leaf(k, 5, i), leaf(k, r, i), leaf(k, o, r), leaf(k, o)),
        ),
    }[layout]
    with ff.use_backend("triton"):
        assert torch.autograd.gradcheck(function, tensors, fast_mode=True)
