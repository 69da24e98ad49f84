"""The CUDA library on a real GPU, against the reference in float64 and against the Triton kernels."""

import functools

import op_cases
import pytest
import torch

import fastfact as ff
from fastfact.base.formats import KERNEL, SEPARABLE, SPATIAL, VALUE_TYPES

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


@pytest.mark.parametrize("case", [*op_cases.COMPACT, ((8, 256, 128, 3, 3), SPATIAL, 1, True, 0.1, False)], ids=str)
def test_compact_weight(cuda, case):
    for dtype in DTYPES:
        op_cases.compact(cuda, case, dtype, "cuda")


BIG_THIN = [((8, 256, 256, 3, 3), SEPARABLE, rank, True, "channels_last") for rank in (1, 16, 32, 64)]


@pytest.mark.parametrize("case", op_cases.THIN + BIG_THIN, ids=str)
def test_thin_factors(cuda, case):
    for dtype in DTYPES:
        op_cases.thin(cuda, case, dtype, "cuda")


BIG_THIN_PAIRS = [((8, 256, 256, 3, 3), rank, True, "channels_last", False) for rank in (8, 16, 31, 64)]


@pytest.mark.parametrize("case", op_cases.THIN_PAIRS + BIG_THIN_PAIRS, ids=str)
def test_thin_pairs(cuda, case):
    for dtype in DTYPES:
        op_cases.thin_pair(cuda, case, dtype, "cuda")


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


@pytest.mark.parametrize("case", op_cases.SIMILARITIES + op_cases.BIG_SIMILARITIES, ids=str)
def test_similarity_sums(cuda, case):
    for dtype in (torch.float64, torch.float32):
        op_cases.similarity(cuda, dtype, "cuda", *case)
    op_cases.similarity(cuda, torch.float32, "cuda", *case, integers=True)


@pytest.mark.parametrize("case", [*op_cases.MIXINGS, (1300, ((9,), (1200,)), 4.0, 400, True)], ids=str)
def test_similarity_mix(case):
    for dtype in DTYPES:
        op_cases.mixing("cuda", *case, dtype=dtype)
    op_cases.mixing("cuda", *case, bits=32)


@pytest.mark.parametrize("case", [*op_cases.SKETCHES, (3, 70_000, 1024)], ids=str)
def test_srht(cuda, case):
    for dtype in DTYPES:
        op_cases.sketch(cuda, dtype, "cuda", *case)


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


def backward_calls(cuda):
    """Backward ops of eight clients, each in its one-pass form and otherwise: (op, arguments)."""

    def draw(*shape):
        return torch.randn(8, *shape, device="cuda")

    size = [256, 256, 3, 3]
    grad = draw(*size)
    u, v = op_cases.rank1_factors(SPATIAL, size, 8, 2, torch.float32, "cuda")
    index = torch.arange(0, grad[0].numel(), 9, dtype=torch.int32, device="cuda").expand(8, -1)
    calls = [
        (cuda.rank1_weight_backward, (grad, u, v, SPATIAL, 3)),
        (cuda.compact_weight_backward, (grad, u, v, draw(index.shape[1]), index, SPATIAL, 7)),
    ]
    for rank in (16, 40):
        a, b = draw(rank, 768), draw(768, rank)
        calls.append((cuda.lowrank_weight_backward, (grad, a, b, SEPARABLE, size, 1.0, 3)))
        factors = (draw(256, rank), draw(2304, rank), draw(256, rank), draw(2304, rank))
        calls.append((cuda.hadamard_weight_backward, (grad, *factors, size, True, 15)))
    return calls


def test_repeats_bit_for_bit(cuda):
    for op, args in backward_calls(cuda):
        first = op(*args)
        for _ in range(5):
            assert all(torch.equal(x, y) for x, y in zip(first, op(*args), strict=True)), op


def test_backward_in_a_graph(cuda):
    for op, args in backward_calls(cuda):
        expected = op(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = op(*args)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), op


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
    torch.testing.assert_close(weight, ff.ops.reference.rank1_weight(None, u, v, SPATIAL, False))
    expected = ff.ops.reference.rank1_weight_backward(weight, u, v, SPATIAL, 3)
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
        one = ff.ops.reference.rank1_weight(None, u[client : client + 1], v[client : client + 1], SPATIAL, True)
        torch.testing.assert_close(weight[client : client + 1], one)
        expected, _ = ff.ops.reference.rank1_weight_backward(
            one.double(), u[client : client + 1].double(), v[client : client + 1].double(), SPATIAL, 1
        )
        torch.testing.assert_close(
            du[client : client + 1].double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()
        )


@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("layout", ["spatial", "kernel", "linear"])
def test_a_compact_layer_is_the_expanded_one(layout, clients):
    """W from the values on the support, without a dense μ, for one model and under vmap."""
    if layout == "linear":
        layer, x = ff.nn.FactorizedLinear(40, 70), torch.randn(4, 6, 40)
    else:
        layer = ff.nn.FactorizedConv2d(24, 40, 3, padding=1, spec=ff.Rank1(layout=layout))
        x = torch.randn(4, 6, 24, 9, 9)
    layer, x = layer.double().cuda(), x.double().cuda()
    layer.path = "reconstruct"
    torch.nn.init.normal_(layer.mu)
    layer.compact(0.2)

    def loss(state, x):
        return torch.func.functional_call(layer, state, (x,)).sin().sum()

    def run():
        state = {name: p.detach() for name, p in layer.named_parameters()}
        gradient = torch.func.grad(loss)
        if clients:
            state = {name: torch.stack([t, 2 * t, -t, t]) for name, t in state.items()}
            return torch.func.vmap(gradient)(state, x)
        return gradient(state, x[0])

    ours, index = run(), layer.mu_index.long()
    layer.expand()
    plain = run()
    plain["mu"] = plain["mu"].flatten(int(clients))[..., index]
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)


def clients_of(layer, k, x_shape, dtype):
    state = {name: torch.randn(k, *p.shape, device="cuda", dtype=dtype) * 0.3 for name, p in layer.named_parameters()}
    return state, torch.randn(k, *x_shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        ff.Rank1(),
        ff.Rank1(layout="kernel", rank=2),
        ff.Rank1(sparse=False),
        ff.Rank1(layout="kernel", sparse=False),
        ff.LowRank(0.05),
        ff.LowRank(0.6),
        ff.Hadamard(),
    ],
    ids=str,
)
def test_layers_of_many_clients(spec, dtype):
    """vmap(grad) over layers takes the fused path by itself, and agrees with one client after the other."""
    layer = ff.nn.FactorizedConv2d(24, 40, 3, stride=2, padding=1, spec=spec, device="cuda", dtype=dtype)
    state, x = clients_of(layer, 5, (8, 24, 15, 16), dtype)
    shared = {"sigma": None} if isinstance(spec, ff.LowRank) else {}

    def loss(state, x):
        return torch.func.functional_call(layer, state, (x,)).float().square().mean()

    def run(path, dtype):
        layer.path = path
        inputs = {name: (t[0] if name in shared else t).to(dtype) for name, t in state.items()}
        axes = ({name: shared.get(name, 0) for name in state}, 0)
        if path == "auto":
            return torch.func.vmap(torch.func.grad(loss, (0, 1)), axes)(inputs, x.to(dtype))
        alone = [
            torch.func.grad(loss, (0, 1))({n: t if n in shared else t[k] for n, t in inputs.items()}, one)
            for k, one in enumerate(x.to(dtype))
        ]
        return {n: torch.stack([g[n] for g, _ in alone]) for n in state}, torch.stack([dx for _, dx in alone])

    with op_cases.without_tf32():
        (ours, dx), (plain, plain_dx) = run("auto", dtype), run("reconstruct", dtype)
    truth, true_dx = run("reconstruct", torch.float64)
    for name, one in {**ours, "x": dx}.items():
        same, true = {**plain, "x": plain_dx}[name], {**truth, "x": true_dx}[name]
        allowed = 2 * (same.double() - true).abs().max() + op_cases.ATOL[dtype] * true.abs().max()
        assert (one.double() - true).abs().max() <= allowed, name


@pytest.mark.parametrize("rank", [1, 16, 100])
def test_separable_convolutions_with_factors_that_do_not_train(rank):
    """Forward and data gradient of many clients, in one kernel below rank 65, against those of factors that train."""
    size, how = (96, 128, 3, 3), {"stride": 2, "padding": 1}
    x = torch.randn(5, 8, 128, 15, 16, device="cuda", requires_grad=True)
    u, v = (torch.randn(5, rank, channels, 3, device="cuda") * 0.05 for channels in (128, 96))

    def run(u, v, dtype):
        y = ff.ops.separable_conv2d(x.to(dtype), u.to(dtype), v.to(dtype), size=size, **how)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    with op_cases.without_tf32():
        truth = run(u.clone().requires_grad_(), v, torch.float64)
        for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            for one, true in zip(run(u, v, dtype), truth, strict=True):
                assert (one.double() - true).norm() <= allowed * true.norm()


def test_the_convolution_repeats_bit_for_bit():
    torch.manual_seed(0)
    x, grad = (torch.randn(1, 32, 64, 16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    u, v = op_cases.rank1_factors(SPATIAL, (64, 64, 3, 3), 1, 1, torch.bfloat16, "cuda")
    settings = (SPATIAL, (64, 64, 3, 3), False, (1, 1), (1, 1), (1, 1), 1)
    for needs in (3, 7):
        first = torch.ops.fastfact.fused_conv2d_dw(grad, x, u, v, None, *settings, needs)
        for _ in range(5):
            again = torch.ops.fastfact.fused_conv2d_dw(grad, x, u, v, None, *settings, needs)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("method", ["factorized-fl-beta", "feddecomp", "fedavg"])
def test_a_federation_trains_the_same_with_and_without_graphs(method, monkeypatch):
    from torch import nn

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def model():
        layers = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)]
        return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)).cuda()

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(20, 1, 8, 8, generator=g), torch.randint(3, (20,), generator=g)) for _ in range(4)]
    clients = [ff.Client(train=(x[:16], y[:16]), test=(x[16:], y[16:])) for x, y in data]

    def run(cohort, graphs):
        how = {"epochs": 5, "batch_size": 4, "lr": 0.05, "seed": 3, "device": "cuda"}
        fed = ff.Federation(model=model, clients=clients, method=method, cohort=cohort, graphs=graphs, **how)
        fed.fit(2)
        return [fed.models[k].state_dict() for k in range(4)]

    plain, recorded, alone = run(4, False), run("auto", True), run(1, False)
    for one, two, three in zip(plain, recorded, alone, strict=True):
        for name, tensor in one.items():
            told = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(two[name], tensor, msg=told)
            torch.testing.assert_close(three[name], tensor, rtol=1e-2, atol=1e-2, msg=told)
