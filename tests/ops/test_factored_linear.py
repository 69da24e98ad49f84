"""The factored linear layer against float64 PyTorch on the dense weight, forward and backward, on every backend."""

import pytest
import torch
import torch.nn.functional as F

from fastfact import backends, ops, use_backend

ATOL = {torch.float64: 1e-12, torch.float32: 4e-7, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = ("x", "u", "v", "values", "bias")


def draw(rows, size, rank, density, dtype, clients=(), seed=0):
    g = torch.Generator().manual_seed(seed)
    o, i = size
    randn = lambda *shape: torch.randn(*clients, *shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    count = round(density * o * i)
    index = [torch.randperm(o * i, generator=g)[:count].sort().values for _ in range(max(1, sum(clients)))]
    return {
        "x": randn(*rows, i),
        "u": randn(rank, i) if rank else None,
        "v": randn(rank, o) if rank else None,
        "values": randn(count),
        "index": torch.stack(index).reshape(*clients, count).int(),
        "bias": randn(o),
    }


def dense(t, size, dtype):
    leaves = {name: t[name].detach().to(dtype).requires_grad_() for name in NAMES if t[name] is not None}
    weight = torch.zeros(size, dtype=dtype).flatten().index_put((t["index"].long(),), leaves["values"]).reshape(size)
    if t["u"] is not None:
        weight = weight + leaves["v"].mT @ leaves["u"]
    return F.linear(leaves["x"], weight, leaves["bias"]), leaves


def ours(t, size):
    leaves = {name: t[name].detach().requires_grad_() for name in NAMES if t[name] is not None}
    return ops.factored_linear(**{**t, **leaves}, size=size), leaves


def close(got, truth, plain, dtype):
    assert got.shape == truth.shape and got.dtype == dtype and not torch.isnan(got).any()
    if got.numel():
        allowed = 2 * (plain.double() - truth).abs().max() + ATOL[dtype] * max(truth.abs().max(), 1e-30)
        assert (got.double() - truth).abs().max() <= allowed


def compare(t, size, mu=None):
    """mu: dense, in place of the values of t with their positions."""
    dtype = t["x"].dtype
    given = t if mu is None else {**t, "values": mu, "index": None}
    results = ours(given, size), dense(t, size, torch.float64), dense(t, size, dtype)
    close(*(y for y, _ in results), dtype)
    grad = torch.randn(results[0][0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    for y, _ in results:
        y.backward(grad.to(y.dtype))
    for name, leaf in results[0][1].items():
        close(*(leaves[name].grad.view(leaf.shape) for _, leaves in results), dtype)


# Few rows and many, sizes that no register divides, more inputs or outputs than a block has, several units of rows.
CASES = [
    ((1,), (7, 5), 1, 0.4),
    ((3,), (33, 100), 2, 0.1),
    ((16,), (65, 300), 0, 0.05),
    ((2, 50), (40, 33), 7, 0.2),
    ((37,), (130, 1100), 3, 0.02),
    ((300,), (50, 70), 17, 0.1),
    ((1100,), (24, 31), 1, 0.3),
    ((140,), (2100, 9), 1, 0.1),
    ((131,), (60, 1100), 0, 0.3),
    ((6,), (5, 4), 2, 1.0),
    ((6,), (5, 4), 2, 0.0),
    ((130,), (1, 1), 0, 1.0),
    # Dense enough for tiles of W: some rows empty, several slices of the depth, blocks of dW, parts and passes of rows.
    ((16,), (33, 17), 1, 0.6),
    ((3,), (300, 300), 4, 0.6),
    ((37,), (300, 600), 2, 0.4),
    ((70,), (35, 65), 128, 0.25),
    ((100,), (33, 17), 0, 1.0),
    ((600,), (140, 300), 5, 0.7),
    ((2100,), (20, 36), 1, 0.9),
    ((40,), (1, 9), 0, 1.0),
    ((5,), (9, 2500), 2, 0.5),
    ((1,), (70, 200), 7, 0.4),
    # Every number of rows that registers hold at once, pieces of long rows of W, and its last rows.
    ((1,), (3, 20), 0, 1.0),
    ((2,), (6, 47), 1, 0.9),
    ((4,), (66, 513), 1, 0.1),
    ((6,), (131, 70), 3, 0.3),
    ((7,), (13, 2100), 1, 0.5),
    ((11,), (5, 129), 2, 0.8),
    ((13,), (70, 1061), 1, 0.3),
    ((14,), (5, 3000), 1, 0.15),
    # bfloat16 in pairs: panels and tiles that end within a register, several slices, a μ shorter than a register.
    ((65,), (66, 130), 7, 0.5),
    ((20,), (18, 34), 3, 1.0),
    ((33,), (50, 900), 9, 0.3),
    ((50,), (900, 50), 0, 0.3),
    ((17,), (2, 6), 5, 0.6),
    ((4,), (70, 900), 2, 0.4),
    ((13,), (130, 66), 20, 0.5),
    # Factors as terms of the product, of more ranks than a panel has, and gradients of theirs from blocks of dW.
    ((70,), (300, 500), 9, 0.6),
    ((90,), (400, 700), 37, 0.5),
    ((300,), (50, 70), 17, 0.6),
    # Few rows whose inputs and outputs are shared out, backward.
    ((45,), (300, 1100), 6, 0.5),
    # Nonzeros whose units are shared out by outputs and inputs, or turned and summed in shared steps.
    ((119,), (258, 410), 3, 0.1),
    ((613,), (180, 50), 1, 0.2),
    ((60,), (190, 700), 5, 0.08),
    # Last panels of half a width, each way.
    ((70,), (40, 300), 2, 0.6),
    ((70,), (300, 80), 0, 0.7),
    # Floats in pieces: several slices, passes and chunks of rows, that end within a block, a tile or a panel.
    ((250,), (100, 2100), 3, 0.6),
    ((225,), (2090, 97), 20, 0.7),
    ((529,), (65, 95), 1, 0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_dense_layer(case, dtype):
    rows, size, rank, density = case
    compare(draw(rows, size, rank, density, dtype), size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_dense_mu_needs_no_positions(backend, dtype):
    sizes = [
        ((1,), (70, 200), 7),
        ((5,), (9, 2500), 2),
        ((20,), (18, 34), 0),
        ((600,), (140, 300), 5),
        ((0,), (7, 5), 1),
    ]
    with use_backend(backend):
        for rows, size, rank in sizes:
            t = draw(rows, size, rank, 1.0, dtype)
            compare(t, size, t["values"].view(size))
            gaps = torch.stack([t["values"].view(size)] * 2, -1)[..., 0]
            compare(t, size, gaps)


@pytest.mark.parametrize("rank, density", [(0, 0.1), (1, 0.01), (8, 0.05), (8, 0.6)])
@pytest.mark.parametrize("size", [(90, 5000), (12000, 90)], ids=str)
@pytest.mark.parametrize("rows", [8, 40, 200, 1500])
def test_deep_layers_are_as_accurate_as_products_of_matrices(rows, size, rank, density):
    """Rounding grows with the number of terms that are added one after the other: at most some hundreds are."""
    compare(draw((rows,), size, rank, density, torch.float32), size)


@pytest.mark.parametrize("density", [0.1, 0.6])
@pytest.mark.parametrize("rows", [3, 30, 150])
def test_positions_are_read_in_each_call(rows, density):
    """What is kept of positions is of their numbers, not of where they lie."""
    size = (40, 50)
    t = draw((rows,), size, 1, density, torch.float32)
    compare(t, size)
    t["index"].data.copy_(draw((1,), size, 1, density, torch.float32, seed=1)["index"])
    compare(t, size)


def test_one_row_without_a_batch_axis_and_no_rows():
    t = draw((), (7, 5), 2, 0.3, torch.float64)
    assert torch.allclose(ours(t, (7, 5))[0], dense(t, (7, 5), torch.float64)[0])
    t["x"] = torch.zeros(0, 5, dtype=torch.float64)
    y, leaves = ours(t, (7, 5))
    y.sum().backward()
    assert y.shape == (0, 7) and all(not leaf.grad.any() for leaf in leaves.values())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_clients_and_vmap(backend):
    if not backends()[backend].available:
        pytest.skip(backends()[backend].detail)
    size, clients = (12, 9), 3
    t = draw((4, 2), size, 2, 0.2, torch.float64, (clients,))
    one = [{name: tensor[k] for name, tensor in t.items()} for k in range(clients)]
    expected = torch.stack([dense(each, size, torch.float64)[0] for each in one])
    with use_backend(backend):
        assert torch.allclose(ops.factored_linear(**t, size=size), expected)
        mapped = torch.vmap(lambda *tensors: ops.factored_linear(*tensors, size=size))
        assert torch.allclose(mapped(*t.values()), expected)
        shared = {**t, "index": t["index"][0], "u": t["u"][0]}
        got = ops.factored_linear(**shared, size=size)
        for k in range(clients):
            each = {**one[k], "index": t["index"][0], "u": t["u"][0]}
            assert torch.allclose(got[k], dense(each, size, torch.float64)[0])


def test_gradients_of_parts_only():
    """What is not asked for is not computed, and the rest is the same."""
    size = (20, 30)
    t = draw((9,), size, 3, 0.2, torch.float64)
    whole = ours(t, size)
    whole[0].sum().backward()
    for name in NAMES:
        leaf = t[name].clone().requires_grad_()
        ops.factored_linear(**{**t, name: leaf}, size=size).sum().backward()
        assert torch.allclose(leaf.grad, whole[1][name].grad), name


# Rows of one unit and of several, few outputs, last panels of half a width: what threads share out differently.
@pytest.mark.parametrize(
    ("rows", "size"),
    [
        *(
            (2100, (70, 90)),
            (45, (300, 1100)),
            (100, (300, 500)),
            (119, (258, 410)),
            (300, (40, 333)),
            (613, (180, 50)),
        ),
        (210, (130, 2100)),
    ],
)
@pytest.mark.parametrize("density", [0.1, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_repeat(rows, size, density, dtype):
    t = draw((rows,), size, 3, density, dtype)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            y, leaves = ours(t, size)
            y.float().sin().sum().backward()
            results.append((y.detach(), *(leaf.grad for leaf in leaves.values())))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("rows", [8, 100, 250])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(rows, number):
    size = (70, 96)
    t = draw((rows,), size, 2, 0.6, torch.float32)
    t["x"][5, 7] = number
    y, leaves = ours(t, size)
    y[5].sum().backward()
    of_column = t["index"].long() % size[1] == 7
    assert not y[5].isfinite().any() and y[:5].isfinite().all() and y[6:].isfinite().all()
    assert not leaves["values"].grad[of_column].isfinite().any()
    assert leaves["values"].grad[~of_column].isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
@pytest.mark.parametrize("rows", [8, 100, 250])
def test_numbers_of_any_size(rows, scale):
    t = draw((rows,), (70, 96), 0, 0.6, torch.float32)
    t["x"] *= scale
    t["bias"] *= scale
    compare(t, (70, 96))


# More rows than are summed at once, of few blocks of dW, so that their parts are added; fewer, taken at once.
@pytest.mark.parametrize("rows", [200, 300, 392, 500, 800])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_values_alone(rows, rank, dtype):
    size, threads = (90, 150), torch.get_num_threads()
    t = draw((rows,), size, rank, 0.6, dtype)
    grad = torch.randn(rows, size[0], generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    exact = (grad.double().T @ t["x"].double()).flatten()[t["index"].long()]
    plain = (grad.T @ t["x"]).flatten()[t["index"].long()]
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            values = t["values"].detach().requires_grad_()
            y = ops.factored_linear(**{**t, "values": values}, size=size)
            close(*torch.autograd.grad(y, values, grad), exact, plain, dtype)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (6, 5, 1)}, "size"),
        ({"size": (6, 4)}, "x has shape"),
        ({"v": None}, "u and v go together"),
        ({"index": None}, "values and index"),
        ({"u": torch.zeros(1, 3)}, "u has shape"),
        ({"values": torch.zeros(3)}, "values has shape"),
        ({"values": torch.zeros(5, 6), "index": None}, "values has shape"),
        ({"values": None}, "values is None"),
        ({"bias": torch.zeros(6, dtype=torch.float64)}, "bias is torch.float64"),
    ],
)
def test_bad_input(change, message):
    t = draw((2,), (6, 5), 1, 0.2, torch.float32)
    with pytest.raises(ValueError, match=message):
        ops.factored_linear(**{**t, "size": (6, 5), **change})


@pytest.mark.parametrize("index", [[3, 3], [5, 2], [0, 30], [-1, 4]])
def test_positions_must_ascend_within_the_weight(index):
    t = draw((2,), (6, 5), 1, 0.2, torch.float32)
    t |= {"index": torch.tensor(index), "values": torch.ones(2)}
    with pytest.raises((ValueError, RuntimeError), match="index"):
        ops.factored_linear(**t, size=(6, 5))


@pytest.mark.parametrize(("at", "position"), [(0, -1), (29, 30), (11, 4), (12, 11), (20, 21), (0, 29)])
def test_many_positions_must_ascend_within_the_weight(at, position):
    t = draw((50,), (6, 5), 1, 1.0, torch.float32)
    t["index"][at] = position
    with pytest.raises((ValueError, RuntimeError), match="index"):
        ops.factored_linear(**t, size=(6, 5))
