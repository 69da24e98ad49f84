"""The CPU library against the reference in float64: every op, dtype, layout, rank, memory format and awkward shape."""

import itertools
import subprocess
import sys
from pathlib import Path

import op_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfact import ops
from fastfact.base.formats import KERNEL, LINEAR, SEPARABLE, SPATIAL, VALUE_TYPES, VIEW, to_format
from fastfact.ops import direct, reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=["f64", "f32", "bf16", "f16"])

# (k, o, i, kh, kw): three input channels, an odd number of outputs, 5×5, 1×1, 1×3, 3×1, 2×2, 7×7.
SHAPES = [
    (2, 65, 3, 3, 3),
    (1, 33, 40, 5, 5),
    (3, 40, 130, 1, 1),
    (2, 7, 19, 1, 3),
    (1, 9, 70, 3, 1),
    (2, 5, 6, 2, 2),
    (1, 3, 17, 7, 7),
]


class Compiled:
    """The ops as the CPU library serves them."""

    def __getattr__(self, name):
        return getattr(torch.ops.fastfact, name).default


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    assert "fastfact::rank1_weight" in torch._C._dispatch_get_registrations_for_dispatch_key("CPU")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fresh tensors hold NaN, as far as the allocator hands the same memory out again: what is not written shows."""
    for elements in (16, 64, 256, 1024, 4096, 16384):
        [torch.full((elements,), float("nan")) for _ in range(8)]


@DTYPES
@pytest.mark.parametrize("case", op_cases.weight_cases(SHAPES))
def test_weights(case, dtype):
    case(Compiled(), dtype, CPU)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", op_cases.weight_cases(op_cases.BIG_CONVS))
def test_weights_over_several_threads_and_blocks(case, dtype):
    case(Compiled(), dtype, CPU)


# Several tiles and threads; one output larger than a tile; depthwise; rows of the view layout that tiles cut.
COMPACT = [
    *op_cases.COMPACT,
    ((2, 70, 40, 3, 3), SPATIAL, 1, True, 0.3, False),
    ((1, 64, 48, 5, 5), SPATIAL, 2, False, 0.1, False),
    ((2, 3, 2000, 3, 3), KERNEL, 1, True, 0.2, True),
    ((1, 96, 1, 3, 3), SPATIAL, 1, True, 0.3, False),
    ((1, 70, 40, 3, 3), VIEW, 2, True, 0.2, False),
    ((2, 90, 100, 1, 3), VIEW, 1, False, 0.2, False),
    ((1, 300, 200, 1, 1), SPATIAL, 1, True, 0.3, False),
    ((2, 30, 3, 5, 5), KERNEL, 1, True, 0.3, False),
    ((1, 150, 300), LINEAR, 2, False, 0.3, False),
    # dense enough to be spread by registers; of odd sizes; as many taps as lanes and more
    ((2, 70, 41, 3, 3), SPATIAL, 1, True, 0.6, False),
    ((3, 37, 21, 3, 3), KERNEL, 2, False, 0.7, True),
    ((1, 50, 37, 5, 5), SPATIAL, 1, True, 0.9, False),
    ((2, 19, 33, 4, 4), KERNEL, 1, True, 0.5, True),
    ((2, 61, 33, 1, 3), VIEW, 1, False, 0.8, False),
    ((3, 75, 101), LINEAR, 1, False, 1.0, False),
]


@DTYPES
@pytest.mark.parametrize("case", COMPACT, ids=str)
def test_compact_weight(case, dtype):
    op_cases.compact(Compiled(), case, dtype, CPU)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layout", [LINEAR, SPATIAL, KERNEL, VIEW])
def test_one_client_without_its_axis(layout, channels_last):
    grad, u, v = rank1_layer(layout, channels_last)
    index = torch.arange(0, grad.numel(), 3, dtype=torch.int32)
    values, mu = torch.randn(len(index)), torch.randn_like(grad)
    f = torch.ops.fastfact
    for name, tensors in (("rank1_weight", (mu, u, v)), ("compact_weight", (u, v, values[None], index[None]))):
        weight = getattr(f, name)(*tensors, layout, channels_last)
        one = getattr(f, name)(*(t[0] for t in tensors), layout, channels_last)
        assert torch.equal(one, weight[0])
        assert one.stride() == weight[0].stride()
        tensors = (grad, *(tensors[1:] if name == "rank1_weight" else tensors))
        wanted = getattr(f, name + "_backward")(*tensors, layout, 7)
        found = getattr(f, name + "_backward")(*(t[0] for t in tensors), layout, 7)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b[0])
    strided = torch.randn(*u.shape[1:], 2)[..., 0]
    assert torch.equal(
        f.rank1_weight(None, strided, v[0], layout, False), f.rank1_weight(None, strided[None], v, layout, False)[0]
    )
    with pytest.raises((RuntimeError, ValueError), match="v has shape"):
        f.rank1_weight(None, u[0], v, layout, channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("k, o, i", [(0, 4, 3), (2, 4, 0), (2, 0, 5)])
def test_nothing_to_do(k, o, i, channels_last):
    """No clients, no inputs, no outputs: empty weights, and gradients that are sums of nothing."""
    compiled, size = Compiled(), [o, i, 3, 3]
    grad = torch.randn(k, *size)
    for layout in (SPATIAL, KERNEL, VIEW):
        u, v = op_cases.rank1_factors(layout, size, k, 2, F32, CPU)
        assert compiled.rank1_weight(grad, u, v, layout, channels_last).shape == grad.shape
        for out, factor in zip(compiled.rank1_weight_backward(grad, u, v, layout, 3), (u, v), strict=True):
            assert torch.equal(out, torch.zeros_like(factor))
    a, b = torch.randn(k, 2, o * 3), torch.randn(k, i * 3, 2)
    assert compiled.lowrank_weight(grad, a, b, SEPARABLE, size, 1.0, channels_last).shape == grad.shape
    for out, factor in zip(compiled.lowrank_weight_backward(grad, a, b, SEPARABLE, size, 1.0, 3), (a, b), strict=True):
        assert torch.equal(out, torch.zeros_like(factor))
    factors = [torch.randn(k, n, 2) for n in (o, i * 9, o, i * 9)]
    assert compiled.hadamard_weight(*factors, size, True, channels_last).shape == grad.shape
    for out, factor in zip(compiled.hadamard_weight_backward(grad, *factors, size, True, 15), factors, strict=True):
        assert torch.equal(out, torch.zeros_like(factor))


@DTYPES
@pytest.mark.parametrize("proximal", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_prox_sgd_step(momentum, proximal, dtype):
    op_cases.prox(Compiled(), dtype, CPU, momentum, proximal)


def test_prox_sgd_step_of_many_small_tensors_over_threads():
    params = [torch.randn(n, 7) for n in range(400)]
    grads = [torch.randn_like(p) for p in params]
    momenta = [torch.randn_like(p) for p in params]
    wanted = [[t.double() for t in group] for group in (params, grads, momenta)]
    penalties = [0.1 * (n % 3) for n in range(400)]
    torch.ops.fastfact.prox_sgd_step(params, grads, momenta, penalties, 0.1, 0.9, 1e-3, True)
    reference.prox_sgd_step(*wanted, penalties, 0.1, 0.9, 1e-3, True)
    for out, true in zip(params + momenta, wanted[0] + wanted[2], strict=True):
        torch.testing.assert_close(out.double(), true, rtol=1e-6, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("value_type", list(VALUE_TYPES), ids=str)
@pytest.mark.parametrize(("n", "density"), [(0, 0.5), (1, 1.0), (7, 0.0), (64, 0.3), (65, 1.0), (20_001, 0.4)])
def test_bitmap(value_type, n, density, dtype):
    op_cases.bitmap(Compiled(), dtype, CPU, value_type, n, density)


@pytest.mark.parametrize("impl", [Compiled(), reference], ids=["cpu", "reference"])
def test_damaged_bitmap(impl):
    op_cases.damaged_bitmap(impl, CPU, may_skip=False)
    bits, values, scale = impl.pack_bitmap(torch.ones(1, 2, 12), 0)
    with pytest.raises(ValueError, match=r"^unpack_bitmap: 24 bits are set but there are 25 values"):
        impl.unpack_bitmap(bits, torch.cat([values, values[:1]]), scale, 12)


def test_other_value_types_are_unpacked_as_float32():
    x = torch.randn(2, 3, 50) * (torch.rand(2, 3, 50) < 0.5)
    bits, values, scale = torch.ops.fastfact.pack_bitmap(x, 0)
    assert torch.equal(torch.ops.fastfact.unpack_bitmap(bits, values.double(), scale, 50), x)


sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 2, 3, 5]), st.sampled_from([1, 3, 4])
)


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from([LINEAR, SPATIAL, KERNEL, VIEW]), st.integers(1, 4), st.booleans(), st.integers(0, 9))
def test_any_rank1_weight(shape, layout, rank, channels_last, seed):
    torch.manual_seed(seed)
    how = ("plain", "channels_last", "shared", "gaps", "none")[seed % 5]
    shape = shape[:3] if layout == LINEAR else shape
    dtype = (F32, F64, BF16)[seed % 3]
    op_cases.rank1(Compiled(), shape, layout, dtype, CPU, rank, channels_last, "plain" if len(shape) == 3 else how)


@settings(max_examples=60, deadline=None)
@given(
    sizes,
    st.sampled_from([LINEAR, SPATIAL, KERNEL, VIEW]),
    st.integers(1, 3),
    st.booleans(),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_any_compact_weight(shape, layout, rank, channels_last, density, seed):
    torch.manual_seed(seed)
    shape = shape[:3] if layout == LINEAR else shape
    case = (shape, layout, rank, channels_last, density, bool(seed % 2))
    op_cases.compact(Compiled(), case, (F32, F64, BF16)[seed % 3], CPU)


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from([SEPARABLE, VIEW]), st.integers(1, 50), st.booleans(), st.integers(0, 9))
def test_any_product(shape, layout, rank, channels_last, seed):
    torch.manual_seed(seed)
    how = ("plain", "channels_last", "shared", "gaps", "none")[seed % 5]
    op_cases.lowrank(Compiled(), shape, layout, F32, CPU, rank, channels_last, how)
    op_cases.hadamard(Compiled(), shape, F32, CPU, rank, channels_last, how, bool(seed % 2))


@pytest.mark.parametrize("case", op_cases.ADAPTERS + op_cases.LARGE_ADAPTERS, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
def test_lowrank_linear(case, dtype):
    torch.manual_seed(0)
    op_cases.adapter(Compiled(), case, dtype, CPU)


@settings(max_examples=40, deadline=None)
@given(
    *[st.integers(0, 4)], *[st.integers(0, 60)] * 4, st.sampled_from(["plain", "shared", "gaps", "none", "own sigma"])
)
def test_any_lowrank_linear(k, n, i, o, rank, how):
    torch.manual_seed(n)
    op_cases.adapter(Compiled(), (k, n, i, o, rank, how), (F32, F64, BF16)[rank % 3], CPU)


@pytest.mark.parametrize("sizes", [(2, 700, 40, 90), (1, 20, 600, 700), (1, 300, 300, 90), (70, 9, 40, 90)], ids=str)
def test_the_threads_change_no_number_of_an_adapter(sizes):
    k, n, i, o = sizes
    x, sigma, a, b = (torch.randn(s) for s in ((k, n, i), (o, i), (k, 5, i), (k, o, 5)))
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            y, hidden = torch.ops.fastfact.lowrank_linear(x, None, sigma, a, b, None, 0.7)
            found.append((y, *torch.ops.fastfact.lowrank_linear_backward(y, x, sigma, a, b, hidden, 0.7, 15)))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("sizes", [(200, 70, 49), (400, 96, 160), (130, 90, 600), (1500, 64, 300)], ids=str)
def test_the_threads_change_no_number_of_a_linear_layer_with_a_dense_mu(sizes, dtype):
    """However its products are cut: a narrow W, panels left over or not full, many rows."""
    n, i, o = sizes
    torch.manual_seed(n)
    index = torch.randperm(i * o)[: i * o * 6 // 10].sort().values.int()
    parts = [torch.randn(s).to(dtype) for s in ((n, i), (8, i), (8, o), index.shape, (o,))]
    grad = torch.randn(n, o).to(dtype)

    def run(dtype):
        x, u, v, values, bias = leaves = [part.to(dtype).requires_grad_() for part in parts]
        y = ops.factored_linear(x, u, v, values, index, bias, size=(o, i))
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(run(dtype))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    for one, exact in zip(found[0], run(torch.float64), strict=True):
        assert (one.double() - exact).norm() < (1e-6 if dtype == F32 else 6e-3) * exact.norm()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(0, 700), st.integers(1, 1700), st.integers(0, 150)),
    *(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9)),
)
def test_rows_are_multiplied_with_a_weight_in_panels(dtype, n, i, o, images, gaps, has_bias, seed):
    """For any sizes, rows and pixels, the same bits on any number of threads."""
    torch.manual_seed(seed)
    weight = (torch.randn(o, i) / i**0.5).to(dtype)
    panels = direct.panels(weight)
    if panels is None:
        assert dtype == BF16  # of which this machine multiplies no pairs, or of an odd number
        return
    bias = torch.randn(o, 2).to(dtype)[:, 0] if has_bias else None
    x = torch.randn(n, 1, 2, i + 3 * gaps)[..., :i].movedim(3, 1) if images else torch.randn(n, i + 3 * gaps)[:, :i]
    x = x.to(dtype)
    of = direct.settings(direct.PANELS, 0, images, (o, i, 1, 1) if images else (o, i))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(direct.dense(of, x, panels, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)
    exact = torch.nn.functional.linear(
        x.movedim(1, -1).double(), weight.double(), bias if bias is None else bias.double()
    )
    assert found[0].dtype == dtype and found[0].movedim(1, -1).is_contiguous()
    assert (found[0].movedim(1, -1) - exact).norm() <= (1e-6 if dtype == F32 else 6e-3) * exact.norm()


def test_what_does_not_fit_a_weight_in_panels_is_refused():
    weight, x = torch.randn(40, 30), torch.randn(5, 30)
    panels, of = direct.panels(weight), direct.settings(direct.PANELS, 0, False, (40, 30))
    assert direct.dense(of, x, panels, None) is not None
    for other, by, bias in (
        (torch.randn(5, 29), panels, None),
        (x.double(), panels, None),
        (x, panels.double(), None),
        (x, panels[:1], None),
        (x, weight, None),
        (x, panels, torch.randn(39)),
        (x, panels, torch.randn(40).double()),
        (torch.tensor(1.0), panels, None),
    ):
        assert direct.dense(of, other, by, bias) is None
    for refused in (
        *(weight.double(), weight.half(), weight.int(), weight.t(), weight[0], torch.randn(40, 0), weight[:, :20]),
    ):
        assert direct.panels(refused) is None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9000), st.floats(0, 1), st.integers(0, 9))
def test_any_bitmap_comes_back(k, rows, n, density, seed):
    torch.manual_seed(seed)
    x = torch.randn(k, rows, n) * (torch.rand(k, rows, n) < density)
    packed = torch.ops.fastfact.pack_bitmap(x, 0)
    assert torch.equal(torch.ops.fastfact.unpack_bitmap(*packed, n), x)


def rank1_layer(layout, channels_last, clients=1):
    size = (96, 100) if layout == LINEAR else (64, 40, 3, 3)
    u, v = op_cases.rank1_factors(layout, size, clients, 2, F32, CPU)
    return to_format(torch.randn(clients, *size), channels_last), u, v


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layout", [LINEAR, SPATIAL, KERNEL, VIEW])
def test_threads_and_clients_do_not_change_a_bit(layout, channels_last):
    grad, u, v = rank1_layer(layout, channels_last, clients=3)
    threads = torch.get_num_threads()
    outs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs.append(torch.ops.fastfact.rank1_weight_backward(grad, u, v, layout, 3))
    finally:
        torch.set_num_threads(threads)
    clients = zip(grad.split(1), u.split(1), v.split(1), strict=True)
    alone = [torch.ops.fastfact.rank1_weight_backward(*client, layout, 3) for client in clients]
    outs.append(tuple(torch.cat(parts) for parts in zip(*alone, strict=True)))
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.parametrize("layout", [SPATIAL, KERNEL])
def test_not_a_number_stays_where_it_is(layout):
    mu, u, v = rank1_layer(layout, False)
    mu[0, 5, 7, 1, 1] = float("nan")
    weight = torch.ops.fastfact.rank1_weight(mu, u, v, layout, False)
    assert torch.equal(weight.isnan(), mu.isnan())
    grad = torch.zeros_like(mu)
    grad[0, 5, 7, 1, 1] = float("inf")
    dv = torch.ops.fastfact.rank1_weight_backward(grad, u, v, layout, 2)[1]
    expected = reference.rank1_weight_backward(grad.double(), u.double(), v.double(), layout, 2)[1]
    assert dv.isfinite().sum() >= expected.isfinite().sum() > 0


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("side", [10, 12, 16])
@pytest.mark.parametrize("stride", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_no_tap_reads_is_in_no_gradient(channels_last, side, stride, dtype):
    """Lanes of a register without an output of their own would read on, and multiply it by 0."""
    g = torch.Generator().manual_seed(0)
    u, v = (torch.randn(*size, generator=g, dtype=dtype).requires_grad_() for size in ((1, 3, 3), (1, 12, 8)))
    index = torch.arange(0, 12 * 8 * 9, 5, dtype=torch.int32)
    values = torch.randn(len(index), generator=g, dtype=dtype).requires_grad_()
    x = torch.full((5, 8, side, side), torch.inf, dtype=dtype)
    read = (side - 3) // stride * stride + 3
    x[:, :, :read, :read] = torch.randn(5, 8, read, read, generator=g).to(dtype)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    y = ops.factored_conv2d(x, u, v, values, index, size=(12, 8, 3, 3), stride=stride)
    y.sum().backward()
    for tensor in (x, u, v, values):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("layout", ["linear", "spatial", "kernel", "view"])
def test_gradcheck_rank1(layout):
    shapes = {"linear": ((2, 5), (2, 4), (4, 5))}.get(layout, ((2, 3, 2), (2, 4, 5), (4, 5, 3, 2)))
    if layout == "kernel":
        shapes = ((2, 5, 3), (2, 4, 2), (4, 5, 3, 2))
    tensors = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda u, v, mu: ops.rank1_weight(u, v, mu, layout=layout), tensors)


@pytest.mark.parametrize("case", op_cases.SIMILARITIES + op_cases.BIG_SIMILARITIES, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32], ids=["f64", "f32"])
def test_similarity_sums(dtype, case):
    op_cases.similarity(Compiled(), dtype, CPU, *case)
    if dtype == F32:
        op_cases.similarity(Compiled(), dtype, CPU, *case, integers=True)


@DTYPES
@pytest.mark.parametrize("case", op_cases.SKETCHES, ids=str)
def test_srht(case, dtype):
    op_cases.sketch(Compiled(), dtype, CPU, *case)


@DTYPES
@pytest.mark.parametrize("case", op_cases.ROWS, ids=str)
def test_products_with_rows(case, dtype):
    op_cases.rows(Compiled(), dtype, CPU, *case)


def test_rows_of_any_dtype():
    samples, index = [torch.arange(5), torch.arange(9)], torch.tensor([[3, 0, 3], [8, 1, 2]])
    assert torch.equal(torch.ops.fastfact.gather_rows(samples, index), index)


@DTYPES
@pytest.mark.parametrize("case", [(1, 1, 1), (3, 7, 10), (2, 50, 100)], ids=str)
def test_softmax_loss(case, dtype):
    op_cases.softmax_loss(Compiled(), dtype, CPU, *case)


@DTYPES
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("case", op_cases.ROWS, ids=str)
def test_rows_softmax_loss(case, threads, dtype):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        op_cases.rows_softmax_loss(Compiled(), dtype, *case)
    finally:
        torch.set_num_threads(before)


def error(op, *args):
    with pytest.raises((ValueError, RuntimeError), match=op) as caught:
        getattr(torch.ops.fastfact, op)(*args)
    return str(caught.value)


def test_the_raw_ops_refuse_what_does_not_fit():
    u, v, mu = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 4, 5), torch.zeros(1, 4, 5, 3, 3)
    assert "u has shape [3]" in error("rank1_weight", mu, u[0, 0, 0], v, SPATIAL, False)
    assert "v has shape [2, 1, 4, 5], must be [1," in error("rank1_weight", mu, u, v.expand(2, 1, 4, 5), SPATIAL, False)
    assert "mu has shape" in error("rank1_weight", mu[:, 1:], u, v, SPATIAL, False)
    assert "mu must have the type" in error("rank1_weight", mu.double(), u, v, SPATIAL, False)
    assert "layout=4" in error("rank1_weight", mu, u, v, SEPARABLE, False)
    assert "float32, float64" in error("rank1_weight", None, u.int(), v.int(), SPATIAL, False)
    assert "grad has shape" in error("rank1_weight_backward", mu[..., 1:], u, v, SPATIAL, 3)
    index = torch.zeros(1, 2, dtype=torch.int32)
    assert "values has shape [1, 3], must be [1, 2]" in error(
        "compact_weight", u, v, mu.new_zeros(1, 3), index, 1, False
    )
    assert "index has shape [2], must have 2 dimensions" in error("compact_weight", u, v, u[0], index[0], 1, False)
    assert "must be int32 [1, nnz]" in error("compact_weight_backward", mu, u, v, v, index.long(), 1, 7)
    a, b = torch.zeros(1, 2, 12), torch.zeros(1, 15, 2)
    assert "a has shape" in error("lowrank_weight", None, a[..., 1:], b, SEPARABLE, [4, 5, 3, 3], 1.0, False)
    assert "b has shape" in error("lowrank_weight", None, a, b[:, 1:], SEPARABLE, [4, 5, 3, 3], 1.0, False)
    assert "size=[4, 5, 3]" in error("lowrank_weight", None, a, b, SEPARABLE, [4, 5, 3], 1.0, False)
    assert "size=[4, -5]" in error("lowrank_weight", None, a, b, SEPARABLE, [4, -5], 1.0, False)
    assert "sigma" in error("lowrank_weight", mu[:, 1:], a, b, SEPARABLE, [4, 5, 3, 3], 1.0, False)
    assert "grad" in error("lowrank_weight_backward", mu[:, 1:], a, b, SEPARABLE, [4, 5, 3, 3], 1.0, 3)
    x, a, b, sigma = (torch.zeros(s) for s in ((2, 3, 5), (2, 2, 5), (2, 4, 2), (4, 5)))
    assert "x has shape" in error("lowrank_linear", x[..., 1:], None, sigma, a, b, None, 1.0)
    assert "seen has shape" in error("lowrank_linear", x, x[:, 1:], sigma, a, b, None, 1.0)
    assert "sigma has shape" in error("lowrank_linear", x, None, sigma.expand(3, 4, 5), a, b, None, 1.0)
    assert "b has shape" in error("lowrank_linear", x, None, sigma, a, b[:, 1:], None, 1.0)
    assert "bias has shape" in error("lowrank_linear", x, None, sigma, a, b, torch.zeros(5), 1.0)
    assert "hidden has shape" in error("lowrank_linear_backward", x[..., 1:], x, sigma, a, b, x, 1.0, 15)
    x, y = torch.zeros(1, 4, 2), torch.zeros(1, 45, 2)
    assert "y2" in error("hadamard_weight", x, y, x, y[..., 1:], [4, 5, 3, 3], False, False)
    assert "x2" in error("hadamard_weight_backward", mu, x, y, x[0], y, [4, 5, 3, 3], False, 15)
    assert "2 grads" in error("prox_sgd_step", [u], [u, u], [], [0.0], 0.1, 0.0, 0.0, True)
    assert "a grad has shape" in error("prox_sgd_step", [u], [v], [], [0.0], 0.1, 0.0, 0.0, True)
    assert "a momentum has shape" in error("prox_sgd_step", [u], [u], [v], [0.0], 0.1, 0.9, 0.0, True)
    assert "must have 3 dimensions" in error("pack_bitmap", u, 0)
    assert "value_type=3" in error("pack_bitmap", mu[0, 0], 3)
    x, index = [torch.zeros(5, 3), torch.zeros(4, 3)], torch.tensor([[0, 4], [0, 3]])
    assert "index has 4 for client 1, must be 0 to 3" in error("gather_rows", x, index.flip(0))
    assert "index has -1 for client 0" in error("gather_rows", x, index - 1)
    assert "index must be int64" in error("gather_rows", x, index.int())
    assert "1 samples, index has 2 clients" in error("gather_rows", x[:1], index)
    assert "samples 1 have shape [4, 2], must have rows of shape [3]" in error(
        "gather_rows", [x[0], x[1][:, 1:]], index
    )
    assert "weight has shape [2, 7, 2], must be [2, 7, 3]" in error("rows_linear", x, index, torch.zeros(2, 7, 2))
    assert "grad has shape [2, 3, 7], must be [2, 2," in error("rows_linear_backward", x, index, torch.zeros(2, 3, 7))
    assert "labels has shape [2, 2]" in error("softmax_loss", torch.zeros(2, 3, 4), index)
    assert "labels has 4, must be 0 to 3" in error("softmax_loss", torch.zeros(2, 2, 4), index)
    weight, bias = torch.zeros(2, 4, 3), torch.zeros(2, 3)
    assert "weight has shape [4, 3]" in error("rows_softmax_loss", x, index, weight[0], None, index)
    assert "bias has shape [2, 3], must be [2, 4]" in error("rows_softmax_loss", x, index, weight, bias, index)
    assert "labels has 4, must be 0 to 3" in error("rows_softmax_loss", x, index, weight, None, index)
    keys, valid = torch.zeros(4, 3), torch.ones(4, dtype=torch.bool)
    assert "2 dimensions" in error("similarity_sums", keys[0], [], None, 0, 1, 1.0, 0.0, False)
    assert "keys must be float32" in error("similarity_sums", keys.long(), [], None, 0, 4, 1.0, 0.0, False)
    assert "uploads must be [4, n]" in error("similarity_sums", keys, [keys[1:]], None, 0, 4, 1.0, 0.0, False)
    assert "uploads must be [4, n]" in error("similarity_sums", keys, [keys.double()], None, 0, 4, 1.0, 0.0, False)
    assert "valid must be bool [4]" in error("similarity_sums", keys, [], valid[1:], 0, 4, 1.0, 0.0, False)
    assert "first=2, rows=3 of 4" in error("similarity_sums", keys, [], None, 2, 3, 1.0, 0.0, False)
    signs = torch.ones(3, dtype=torch.int8)
    assert "signs must be int8 [3]" in error("srht", keys, signs[1:], torch.tensor([0]), True)
    assert "rows has 4, must be 0 to 3" in error("srht", keys, signs, torch.tensor([0, 4]), True)
    assert "tensors must be float32" in error("srht", keys.int(), signs, torch.tensor([0]), True)
    rows, index = torch.zeros(1, 2, 3), torch.tensor([[5, 1]], dtype=torch.int32)
    linear = ("factored_linear", rows, None, None, torch.zeros(1, 2))
    assert "index must be ascending positions" in error(*linear, index, None, [2, 3])
    assert "size=[2, 4], must be [o, 3]" in error(*linear, index, None, [2, 4])
    assert "index must be int32" in error(*linear, index.long(), None, [2, 3])
    assert "grad has shape" in error("factored_linear_backward", rows, rows, *[None] * 4, [2, 3], 1)
    bits = torch.zeros(1, 2, 2, dtype=torch.uint8)
    assert "n=17" in error("unpack_bitmap", bits, torch.zeros(0), torch.zeros(0), 17)
    assert "scale has shape [3]" in error("unpack_bitmap", bits, torch.zeros(0), torch.zeros(3), 16)


@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_on_lesser_processors(capability, tmp_path):
    """The same checks with the kernels for AVX2 and for any x86-64."""
    code = (
        "import op_cases, torch\n"
        "from test_ops_cpu import Compiled, CPU, SHAPES\n"
        "torch.manual_seed(0)\n"
        "torch.set_num_threads(1)\n"
        f"assert torch.backends.cpu.get_cpu_capability() == {capability.upper()!r}\n"
        "for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):\n"
        "    for case in op_cases.weight_cases(SHAPES)[:: 1 if dtype == torch.float32 else 3]:\n"
        "        case.values[0](Compiled(), dtype, CPU)\n"
        "    op_cases.prox(Compiled(), dtype, CPU, 0.9, True)\n"
        "    op_cases.bitmap(Compiled(), dtype, CPU, torch.int8, 9001, 0.4)\n"
        "    op_cases.sketch(Compiled(), dtype, CPU, *op_cases.SKETCHES[-1])\n"
        "    if dtype.itemsize > 2:\n"
        "        op_cases.similarity(Compiled(), dtype, CPU, *op_cases.SIMILARITIES[3])\n"
        "op_cases.similarity(Compiled(), torch.float32, CPU, *op_cases.SIMILARITIES[3], integers=True)\n"
    )
    root = Path(__file__).parents[2]
    environment = {
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONPATH": f"{root}:{root / 'tests' / 'ops'}",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layout", [SPATIAL, KERNEL, VIEW])
def test_a_support_that_is_not_ascending_positions_is_refused(layout, channels_last):
    """Wherever it is wrong: within a tile or a chunk, between two, below 0 and beyond the end."""
    grad, u, v = rank1_layer(layout, channels_last, clients=2)
    n = grad[0].numel()
    good = torch.arange(0, n, 3, dtype=torch.int32).repeat(2, 1)
    values = torch.zeros(good.shape)
    Compiled().compact_weight(u, v, values, good, layout, channels_last)
    for at, wrong in ((0, -1), (4, 9), (5, 12), (3000, 0), (3000, n + 5), (good.shape[1] - 1, n), (10, 2**31 - 1)):
        index = good.clone()
        index[1, at] = wrong
        for op, args in (("compact_weight", (channels_last,)), ("compact_weight_backward", (4,))):
            of = (u, v, values, index, layout, *args)
            message = error(op, *(of if op == "compact_weight" else (grad, *of)))
            assert "index must be ascending positions in the weight" in message, (at, wrong)


def test_factors_of_a_separable_convolution_may_lie_in_any_order():
    """PyTorch's own gradient of small convolutions fails for some orders of the weight's axes."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 3, 3, generator=g).requires_grad_()
    u, v = torch.randn(2, 2, 3, generator=g), torch.randn(2, 1, 3, generator=g)
    expected = None
    for orders in itertools.product(itertools.permutations(range(3)), repeat=2):
        factors = [
            t.permute(order).contiguous().permute(*map(order.index, range(3))).requires_grad_()
            for t, order in zip((u, v), orders, strict=True)
        ]
        y = ops.separable_conv2d(x, *factors, size=(1, 2, 3, 3))
        found = torch.autograd.grad(y.square().sum(), (x, *factors))
        expected = found if expected is None else expected
        torch.testing.assert_close(found, expected)
