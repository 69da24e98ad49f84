"""The CUDA library on a real GPU, against the reference in float64 and against the Triton kernels."""

import op_cases
import pytest
import torch

import fastfact as ff
from fastfact.reference import KERNEL, SPATIAL, VALUE_TYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def cuda():
    """The registered ops, which the CUDA library serves."""
    torch.manual_seed(0)
    state = ff.backends()["cuda"]
    assert state.available, f"build the CUDA library first: {state.detail}"
    return torch.ops.fastfact


@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.CONVS + op_cases.BIG_CONVS))
def test_weight(cuda, case):
    for dtype in DTYPES:
        case(cuda, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prox_sgd_step(cuda, momentum, proximal, dtype):
    for numel in (1001, 1008, 1 << 20):
        op_cases.prox(cuda, dtype, "cuda", momentum, proximal, numel)


@pytest.mark.parametrize("value_type", list(VALUE_TYPES), ids=str)
@pytest.mark.parametrize(("n", "density"), [(1, 0.5), (9, 0.3), (1024, 0.0), (2051, 0.4), (300_001, 0.1)])
def test_bitmap(cuda, n, density, value_type):
    for dtype in DTYPES:
        op_cases.bitmap(cuda, dtype, "cuda", value_type, n, density)


def test_bitmap_of_many_rows(cuda):
    op_cases.bitmap_of_many_rows(cuda, "cuda")


def test_a_damaged_bitmap_is_an_error(cuda):
    op_cases.damaged_bitmap(cuda, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [SPATIAL, KERNEL])
def test_the_layers_of_resnet9_for_many_clients(cuda, layout, dtype):
    for o, i in ((64, 3), (128, 64), (256, 256), (256, 512)):
        for last in (False, True):
            op_cases.rank1(cuda, (4, o, i, 3, 3), layout, dtype, "cuda", 1, last, "channels_last" if last else "plain")


def test_repeats_bit_for_bit(cuda):
    u, v = op_cases.rank1_factors(SPATIAL, (256, 256, 3, 3), 8, 2, torch.float32, "cuda")
    grad = torch.randn(8, 256, 256, 3, 3, device="cuda")
    first = cuda.rank1_weight_backward(grad, u, v, SPATIAL, 3)
    for _ in range(5):
        again = cuda.rank1_weight_backward(grad, u, v, SPATIAL, 3)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_agrees_with_triton(cuda):
    kernels = pytest.importorskip("fastfact.kernels")
    u, v = op_cases.rank1_factors(KERNEL, (65, 33, 3, 3), 5, 3, torch.float32, "cuda")
    mu = torch.randn(5, 65, 33, 3, 3, device="cuda")
    for last in (False, True):
        ours, theirs = (impl.rank1_weight(mu, u, v, KERNEL, last) for impl in (cuda, kernels))
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs)


def test_another_stream_and_a_graph(cuda):
    u, v = op_cases.rank1_factors(SPATIAL, (64, 32, 3, 3), 4, 1, torch.float32, "cuda")
    cuda.rank1_weight(None, u, v, SPATIAL, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight = cuda.rank1_weight(None, u, v, SPATIAL, False)
        grads = cuda.rank1_weight_backward(weight, u, v, SPATIAL, 3)
    u.mul_(2)
    graph.replay()
    torch.testing.assert_close(weight, ff.reference.rank1_weight(None, u, v, SPATIAL, False))
    expected = ff.reference.rank1_weight_backward(weight, u, v, SPATIAL, 3)
    for ours, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_offsets_past_two_to_the_31(cuda):
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs an NVIDIA GPU with 30 GB of free memory")
    k, o, i = 1000, 512, 512
    u, v = op_cases.rank1_factors(SPATIAL, (o, i, 3, 3), k, 1, torch.bfloat16, "cuda")
    weight = cuda.rank1_weight(None, u, v, SPATIAL, True)
    du, _ = cuda.rank1_weight_backward(weight, u, v, SPATIAL, 3)
    for client in (0, k - 1):
        one = ff.reference.rank1_weight(None, u[client : client + 1], v[client : client + 1], SPATIAL, True)
        torch.testing.assert_close(weight[client : client + 1], one)
        expected, _ = ff.reference.rank1_weight_backward(
            one.double(), u[client : client + 1].double(), v[client : client + 1].double(), SPATIAL, 1
        )
        torch.testing.assert_close(
            du[client : client + 1].double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()
        )
