"""The factored convolution against float64 PyTorch on the dense weight, forward and backward, on every backend."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastfact as ff
from fastfact import ops
from fastfact.base import formats
from fastfact.ops import reference
from fastfact.ops.backends import loaded

ATOL = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = ("x", "u", "v", "values", "bias")
ORDER = ("x", "u", "v", "values", "index", "bias")


def draw(n, size, h, w, rank, density, dtype, groups=1, clients=(), seed=0):
    g = torch.Generator().manual_seed(seed)
    o, i, kh, kw = size
    randn = lambda *shape: torch.randn(*clients, *shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    nnz = round(density * o * i * kh * kw)
    rows = [torch.randperm(o * i * kh * kw, generator=g)[:nnz].sort().values for _ in range(max(1, sum(clients)))]
    index = torch.stack(rows).reshape(*clients, nnz).int()
    return {
        "x": randn(n, groups * i, h, w),
        "u": randn(rank, kh, kw) if rank else None,
        "v": randn(rank, o, i) if rank else None,
        "values": randn(nnz),
        "index": index,
        "bias": randn(o),
    }


def dense(t, size, dtype, how):
    """Plain PyTorch in `dtype`: output, and gradients of everything but the index."""
    leaves = {name: t[name].detach().to(dtype).requires_grad_() for name in NAMES if t[name] is not None}
    mu = torch.zeros(size, dtype=dtype).flatten().index_put((t["index"].long(),), leaves["values"]).reshape(size)
    weight = mu if t["u"] is None else mu + torch.einsum("rhw,roi->oihw", leaves["u"], leaves["v"])
    return F.conv2d(leaves["x"], weight, leaves["bias"], **how), leaves


def run(t, size, how):
    leaves = {name: t[name].detach().requires_grad_() for name in NAMES if t[name] is not None}
    return ops.factored_conv2d(**{**t, **leaves}, size=size, **how), leaves


def close(got, truth, plain, dtype, scale=0.0):
    assert got.shape == truth.shape and got.dtype == dtype and not torch.isnan(got).any()
    if got.numel():
        allowed = 2 * (plain.double() - truth).abs().max() + ATOL[dtype] * max(truth.abs().max(), scale, 1e-30)
        assert (got.double() - truth).abs().max() <= allowed


def compare(t, size, how, mu=None):
    """mu: dense, in place of the values of t with their positions."""
    dtype = t["x"].dtype
    (y, leaves), (truth, exact), (plain, rough) = (
        run(t if mu is None else {**t, "values": mu, "index": None}, size, how),
        dense(t, size, torch.float64, how),
        dense(t, size, dtype, how),
    )
    close(y, truth, plain, dtype)
    grad = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=truth.dtype).to(dtype)
    if t["x"].is_contiguous(memory_format=torch.channels_last) and not t["x"].is_contiguous():
        assert y.is_contiguous(memory_format=torch.channels_last)
        grad = grad.contiguous(memory_format=torch.channels_last)
    y.backward(grad)
    truth.backward(grad.double())
    plain.backward(grad)
    # The terms of du may cancel, so what is small is judged by the largest gradient.
    scale = max(leaf.grad.abs().max() for leaf in exact.values() if leaf.numel())
    for name, leaf in leaves.items():
        close(leaf.grad, *(grads[name].grad.view(leaf.shape) for grads in (exact, rough)), dtype, scale)
        assert leaf.grad.stride() == leaf.stride() or min(leaf.shape) < 2 or mu is None


CASES = [
    # n, size, h, w, rank, density, how
    (64, (24, 16, 3, 3), 8, 8, 1, 0.1, {"padding": 1}),
    (16, (65, 3, 3, 3), 16, 16, 1, 0.3, {"padding": 1}),
    (8, (20, 17, 5, 5), 11, 9, 2, 0.1, {"padding": 2, "stride": 2}),
    (1, (8, 8, 3, 3), 16, 16, 1, 0.2, {"padding": 1}),
    (1, (3, 5, 3, 3), 7, 5, 0, 0.5, {}),
    (3, (12, 4, 3, 3), 10, 10, 1, 0.2, {"padding": 2, "dilation": 2, "groups": 3}),
    (17, (6, 5, 1, 1), 6, 6, 1, 0.4, {}),
    (5, (6, 5, 2, 3), 9, 12, 1, 0.4, {"padding": (1, 3), "stride": (3, 2), "dilation": (1, 2)}),
    (2, (7, 6, 1, 1), 9, 9, 1, 0.4, {"stride": 2}),
    (20, (9, 40, 3, 3), 4, 4, 1, 0.0, {"padding": 1}),
    (4, (5, 4, 3, 3), 6, 6, 3, 1.0, {"padding": 4}),
    (2, (4, 4, 3, 3), 20, 40, 1, 0.3, {"padding": 1}),
    # Segments whose neighbours are in other units or not there, a kernel that leaves out rows between its padding.
    (9, (20, 24, 3, 3), 14, 14, 1, 0.1, {"padding": 1}),
    (17, (13, 27, 1, 7), 6, 27, 1, 0.3, {"padding": (4, 3), "dilation": (2, 3)}),
    # Blocks of input channels of which some rows have nothing; neither factors nor nonzeros.
    (2, (10, 42, 3, 3), 16, 16, 1, 0.01, {"padding": 1}),
    (1, (9, 70, 3, 3), 64, 32, 0, 0.02, {"padding": 1}),
    (3, (20, 17, 5, 5), 32, 32, 1, 0.0, {"padding": 2, "stride": 2}),
    (2, (8, 5, 3, 3), 16, 16, 0, 0.0, {"padding": 1}),
    # One tap: μ alone is a linear layer, planes that no register divides; with factors W is made.
    (3, (24, 40, 1, 1), 7, 5, 0, 0.2, {}),
    (70, (9, 12, 1, 1), 2, 1, 0, 0.3, {}),
    (3, (24, 20, 1, 1), 7, 5, 2, 0.2, {"stride": 2, "groups": 3, "padding": 1}),
    # Few pixels and dense μ: rows of what the outputs read, more taps than a register has lanes, no factors.
    (1, (40, 35, 3, 3), 4, 5, 1, 0.6, {"padding": 1}),
    (2, (70, 33, 5, 5), 6, 7, 2, 0.9, {"padding": (2, 0), "stride": 2}),
    (1, (48, 64, 2, 4), 7, 7, 0, 0.7, {"padding": 3, "stride": (2, 3), "dilation": (2, 1)}),
    # Patches of few channels: what a stride leaves over and leaves out, no factors, one pixel, several ranks.
    (4, (12, 3, 4, 4), 16, 17, 1, 0.6, {"stride": 4}),
    (2, (5, 3, 2, 3), 18, 17, 2, 0.1, {"stride": (3, 4)}),
    (3, (6, 2, 3, 3), 9, 10, 0, 0.5, {"stride": 3}),
    (5, (33, 4, 16, 16), 16, 16, 1, 0.9, {"stride": 16}),
    (1, (70, 1, 8, 1), 24, 6, 3, 0.3, {"stride": (8, 1)}),
    # Depthwise: registers of channels and a rest, zeros on all sides, more than a kernel reaches, a row left over.
    (3, (17, 1, 3, 3), 7, 6, 1, 0.3, {"groups": 17, "padding": 1}),
    (18, (40, 1, 5, 5), 9, 4, 2, 0.1, {"groups": 40, "padding": 2, "stride": 2}),
    (2, (8, 1, 7, 7), 4, 21, 1, 0.3, {"groups": 8, "padding": 3}),
    (1, (33, 1, 3, 2), 12, 9, 0, 0.5, {"groups": 33, "padding": (0, 1), "stride": (1, 3), "dilation": (2, 1)}),
    (2, (5, 1, 3, 3), 5, 5, 1, 0.2, {"groups": 5, "padding": 4}),
    (1, (9, 1, 2, 2), 4, 5, 1, 0.5, {"groups": 9, "stride": 3}),
    (2, (4, 1, 1, 1), 3, 3, 1, 1.0, {"groups": 4}),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES, ids=[f"{c[1]}-{i}" for i, c in enumerate(CASES)])
def test_matches_the_dense_convolution(case, channels_last):
    n, size, h, w, rank, density, how = case
    t = draw(n, size, h, w, rank, density, torch.float32, how.get("groups", 1))
    if channels_last:
        t["x"] = t["x"].contiguous(memory_format=torch.channels_last)
    compare(t, size, how)


# Few pixels, as rows of what outputs read, in both orders of μ; what takes positions all the same: many pixels, groups;
# depthwise; one tap.
DENSE = [
    (1, (40, 35, 3, 3), 4, 5, 1, {"padding": 1}),
    (2, (70, 33, 5, 5), 6, 7, 2, {"padding": (2, 0), "stride": 2}),
    (1, (48, 64, 2, 4), 7, 7, 0, {"padding": 3, "stride": (2, 3), "dilation": (2, 1)}),
    (16, (9, 8, 3, 3), 16, 16, 1, {"padding": 1}),
    (3, (20, 3, 4, 4), 18, 17, 2, {"stride": 4}),
    (3, (12, 4, 3, 3), 10, 10, 1, {"padding": 2, "dilation": 2, "groups": 3}),
    (3, (17, 1, 3, 3), 7, 6, 1, {"groups": 17, "padding": 1}),
    (2, (7, 6, 1, 1), 9, 9, 1, {"stride": 2}),
    (0, (7, 6, 3, 3), 9, 9, 1, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("case", DENSE, ids=str)
def test_a_dense_mu_needs_no_positions(case, backend, dtype):
    n, size, h, w, rank, how = case
    t = draw(n, size, h, w, rank, 1.0, dtype, how.get("groups", 1))
    with ff.use_backend(backend):
        for last in (False, True):
            form = torch.channels_last if last else torch.contiguous_format
            compare({**t, "x": t["x"].to(memory_format=form)}, size, how, t["values"].view(size))
            compare({**t, "x": t["x"].to(memory_format=form)}, size, how, t["values"].view(size).to(memory_format=form))


@pytest.mark.parametrize("pixels", [5, 40])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_gradient_of_a_dense_mu_lies_as_it_does(backend, pixels):
    size, how = (24, 20, 3, 3), {"padding": 1}
    t = draw(1, size, pixels, pixels, 1, 1.0, torch.float32)
    for form in (torch.contiguous_format, torch.channels_last):
        mu = t["values"].view(size).to(memory_format=form).requires_grad_()
        with ff.use_backend(backend):
            y = ops.factored_conv2d(**{**t, "values": mu, "index": None}, size=size, **how)
            (gradient,) = torch.autograd.grad(y.sum(), mu)
        assert gradient.stride() == mu.stride()


def test_a_dense_mu_of_clients():
    size, how = (40, 35, 3, 3), {"padding": 1}
    t = draw(1, size, 4, 5, 1, 1.0, torch.float32, clients=(3,))
    expected = ops.factored_conv2d(**t, size=size, **how)
    for last in (False, True):
        mu = formats.to_format(t["values"].view(3, *size), last).requires_grad_()
        y = ops.factored_conv2d(**{**t, "values": mu, "index": None}, size=size, **how)
        assert torch.allclose(y, expected, atol=1e-4)
        (gradient,) = torch.autograd.grad(y.square().sum(), mu)
        for k in range(3):
            one = mu[k].detach().requires_grad_()
            of_one = {name: None if x is None else x[k] for name, x in {**t, "values": mu, "index": None}.items()}
            z = ops.factored_conv2d(**{**of_one, "values": one}, size=size, **how)
            assert torch.equal(torch.autograd.grad(z.square().sum(), one)[0], gradient[k])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.1, 0.6])
@pytest.mark.parametrize("size", [(15, 24, 1, 1), (15, 24, 3, 3)])
def test_the_gradient_may_come_in_another_format_than_the_images(size, density, dtype):
    how = {"padding": size[2] // 2}
    t = draw(3, size, 5, 8, 0, density, dtype)
    for x_last in (False, True):
        given = {**t, "x": t["x"].to(memory_format=torch.channels_last if x_last else torch.contiguous_format)}
        (y, leaves), (truth, exact), (plain, rough) = (
            run(given, size, how),
            dense(given, size, torch.float64, how),
            dense(given, size, dtype, how),
        )
        form = torch.contiguous_format if x_last else torch.channels_last
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(memory_format=form)
        for out in (y, truth, plain):
            out.backward(grad.to(out.dtype))
        for name, leaf in leaves.items():
            close(leaf.grad, exact[name].grad, rough[name].grad, dtype)


# bfloat16 takes nonzeros and rows of the images in pairs where the machine can and a channel has twenty nonzeros: tiles
# of one row and of odd ones, odd numbers of nonzeros, a stride.
PAIRS = [
    (3, (40, 48, 3, 3), 7, 5, 1, 0.07, {"padding": 1}),
    (17, (9, 5, 3, 2), 7, 7, 0, 0.9, {"padding": 1}),
    (16, (40, 64, 3, 3), 5, 9, 2, 0.06, {"padding": 1}),
    (2, (10, 6, 5, 3), 9, 14, 0, 0.6, {"stride": 2, "padding": 2}),
    (1, (16, 14, 1, 3), 1, 40, 1, 0.95, {"padding": (0, 1), "groups": 2}),
    (2, (12, 20, 3, 3), 28, 13, 1, 0.3, {"padding": 1, "dilation": (1, 2), "stride": (3, 1)}),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_bfloat16_in_pairs(case, last):
    n, size, h, w, rank, density, how = case
    t = draw(n, size, h, w, rank, density, torch.bfloat16, how.get("groups", 1))
    t["x"] = t["x"].to(memory_format=torch.channels_last if last else torch.contiguous_format)
    compare(t, size, how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nonzeros", [21, 22, 23])
def test_infinities_stay_where_nonzeros_take_them(nonzeros, dtype):
    size, how = (6, 6, 3, 3), {"padding": 1}
    # Even outputs read the first three channels, odd ones the others.
    rows = [torch.arange(nonzeros) + o * 54 + o % 2 * 27 for o in range(6)]
    t = draw(3, size, 7, 5, 0, 0.0, dtype) | {"index": torch.cat(rows).int()}
    t["values"], t["bias"] = torch.ones(6 * nonzeros, dtype=dtype), None
    other = {**t, "x": t["x"].clone()}
    other["x"][:, :3] = float("inf")
    finite, infinite = (run(one, size, how)[0] for one in (t, other))
    assert torch.equal(finite[:, 1::2], infinite[:, 1::2])
    assert torch.isinf(infinite[:, ::2]).all()


# Without μ channels_last images have kernels of their own: few channels, more than a panel of v, bands of an image.
IN_LANES = [
    (3, (48, 3, 3, 3), 21, 10, 1, 0.0, {"padding": 1}),
    (2, (70, 33, 3, 3), 9, 9, 2, 0.0, {"padding": 1}),
    (3, (130, 64, 5, 5), 12, 11, 1, 0.0, {"padding": 2, "stride": 2}),
    (1, (16, 130, 3, 3), 40, 41, 1, 0.0, {"padding": 1}),
    (2, (32, 8, 3, 3), 48, 70, 2, 0.0, {"padding": (5, 0), "stride": (2, 1), "groups": 2}),
]


@pytest.mark.parametrize("case", [(*c[:4], max(c[4], 1), 0.0, c[6]) for c in CASES] + IN_LANES, ids=str)
def test_channels_last_without_mu(case):
    n, size, h, w, rank, density, how = case
    t = draw(n, size, h, w, rank, density, torch.float32, how.get("groups", 1))
    t["x"] = t["x"].contiguous(memory_format=torch.channels_last)
    compare(t, size, how)


# And so have contiguous ones that keep their size: rows of one and two registers, two and four rows to a register,
# bands of an image, several images at once in the backward pass, kernels of other sizes, groups and ranks.
PLANES = [
    (2, (13, 7, 3, 3), 16, 16, 1, 0.0, {"padding": 1}),
    (5, (8, 9, 3, 3), 8, 8, 2, 0.0, {"padding": 1, "groups": 2}),
    (1, (5, 70, 3, 3), 96, 64, 1, 0.0, {"padding": 1}),
    (3, (6, 5, 5, 3), 16, 32, 1, 0.0, {"padding": (4, 1), "dilation": (2, 1)}),
    (9, (70, 4, 5, 5), 16, 4, 2, 0.0, {"padding": 2}),
    (2, (8, 3, 1, 1), 4, 16, 1, 0.0, {}),
]


@pytest.mark.parametrize("case", PLANES, ids=str)
def test_planes_without_mu(case):
    n, size, h, w, rank, density, how = case
    compare(draw(n, size, h, w, rank, density, torch.float32, how.get("groups", 1)), size, how)


# Channels shared out, bands of rows, and more channels of x than are packed at once: of images in channels_last where
# the second cache does not have what a tile reads of them.
THREADS = [
    (3, (70, 100, 3, 3), 7, 9, {"padding": 1}),
    (1, (40, 24, 3, 3), 28, 28, {"padding": 1}),
    (8, (40, 130, 3, 3), 13, 13, {"padding": 1}),
    (9, (24, 100, 3, 3), 15, 15, {"padding": 1, "stride": 2}),
    (2, (36, 37, 5, 5), 14, 14, {"padding": 2}),
    (6, (150, 41, 3, 3), 9, 9, {"padding": 1}),
    (17, (20, 64, 3, 3), 25, 23, {"padding": 1}),
    (5, (21, 40, 5, 5), 35, 90, {"padding": (2, 0), "stride": (2, 3)}),
    (16, (20, 200, 3, 3), 14, 14, {"padding": 1, "stride": 2}),
]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", THREADS, ids=str)
def test_few_images_on_more_threads(case, channels_last):
    """Where there are fewer units than threads outputs are shared out, and no bit depends on it."""
    n, size, h, w, how = case
    t = draw(n, size, h, w, 1, 0.1, torch.float32)
    if channels_last:
        t["x"] = t["x"].contiguous(memory_format=torch.channels_last)
    compare(t, size, how)
    results = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3, 5):
            torch.set_num_threads(number)
            y, leaves = run(t, size, how)
            y.sin().sum().backward()
            results.append([y.detach(), *(leaf.grad for leaf in leaves.values())])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_planes_in_other_dtypes(dtype):
    for n, size, h, w, rank, density, how in PLANES:
        compare(draw(n, size, h, w, rank, density, dtype, how.get("groups", 1)), size, how)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_other_dtypes(dtype, backend):
    with ff.use_backend(backend):
        few_pixels = [case for case in CASES if case[0] <= 2 and case[5] >= 0.6]
        for n, size, h, w, rank, density, how in (CASES[0], CASES[5], CASES[7], *IN_LANES[:3], *few_pixels):
            t = draw(n, size, h, w, rank, density, dtype, how.get("groups", 1))
            if density == 0 or density >= 0.6:
                t["x"] = t["x"].contiguous(memory_format=torch.channels_last)
            compare(t, size, how)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape(data):
    integer = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    groups, kh, kw = integer(1, 2), integer(1, 4), integer(1, 4)
    size = (groups * integer(1, 9), integer(1, 9), kh, kw)
    how = {
        "stride": (integer(1, 3), integer(1, 3)),
        "padding": (integer(0, 3), integer(0, 3)),
        "dilation": (integer(1, 2), integer(1, 2)),
        "groups": groups,
    }
    h, w = integer(2 * kh, 2 * kh + 9), integer(2 * kw, 2 * kw + 20)
    density = data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    t = draw(integer(1, 20), size, h, w, integer(0, 2), density, torch.float64, groups, seed=integer(0, 99))
    if data.draw(st.booleans()):
        t["x"] = t["x"].contiguous(memory_format=torch.channels_last)
    compare(t, size, how)


def test_one_part_only():
    t = draw(4, (6, 5, 3, 3), 8, 8, 1, 0.2, torch.float64)
    y, leaves = run(t | {"values": None, "index": None, "bias": None}, (6, 5, 3, 3), {})
    weight = torch.einsum("rhw,roi->oihw", t["u"], t["v"])
    assert torch.allclose(y, F.conv2d(t["x"], weight))
    y.sum().backward()
    assert set(leaves) == {"x", "u", "v"} and all(leaf.grad is not None for leaf in leaves.values())


@pytest.mark.parametrize("needed", [("x",), ("u",), ("v",), ("values",), ("u", "values", "bias")])
def test_partial_gradients(needed):
    size, how = (6, 5, 3, 3), {"padding": 1}
    t = draw(4, size, 8, 8, 1, 0.2, torch.float64)
    _, exact = dense(t, size, torch.float64, how)
    leaves = {name: t[name].clone().requires_grad_(name in needed) for name in NAMES}
    grads = torch.autograd.grad(
        ops.factored_conv2d(**{**t, **leaves}, size=size, **how).sum(), [leaves[n] for n in needed]
    )
    exact_y, exact = dense(t, size, torch.float64, how)
    expected = torch.autograd.grad(exact_y.sum(), [exact[n] for n in needed])
    assert all(torch.allclose(a, b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("density", [0.3, None])
@pytest.mark.parametrize("stride", [1, (2, 1)])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=["nchw", "channels_last"])
def test_a_1x1_convolution_that_is_traced_or_mapped(density, stride, form, monkeypatch):
    torch.manual_seed(0)
    spec = ff.Rank1(rank=2, layout="kernel", sparse=density is not None)
    layer = ff.nn.FactorizedConv2d(6, 9, 1, stride=stride, spec=spec, dtype=torch.float64)
    torch.nn.init.normal_(layer.bias)
    if density:
        torch.nn.init.normal_(layer.mu)
        layer.compact(density)
    layer.path = "factored"
    x, dense = torch.randn(3, 2, 6, 5, 4, dtype=torch.float64), layer.to_dense()
    torch._dynamo.reset()
    graph = torch.compile(layer, backend="aot_eager", fullgraph=True)
    names = [name for name, _ in layer.named_parameters()]
    for one in x:
        mine, its = (one.clone().contiguous(memory_format=form).requires_grad_() for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(ops.conv, "factored_linear", None)
            y, expected = graph(mine), dense(its)
        torch.testing.assert_close(y, expected)
        assert y.is_contiguous(memory_format=form)
        found = torch.autograd.grad(y.square().sum(), [mine, *map(layer.get_parameter, names)])
        wanted = torch.autograd.grad(layer(its).square().sum(), [its, *map(layer.get_parameter, names)])
        torch.testing.assert_close(found, wanted)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    parameters = dict(layer.named_parameters())
    mapped = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for at, one in enumerate(x):
        wanted = torch.autograd.grad(layer(one).square().sum(), list(parameters.values()))
        torch.testing.assert_close([mapped[name][at] for name in parameters], list(wanted))


def test_clients_vmap_and_func_grad():
    size, how = (6, 5, 3, 3), {"padding": 1, "stride": 2}
    t = draw(4, size, 9, 9, 1, 0.2, torch.float64, clients=(3,))

    def loss(x, u, v, values, index, bias):
        return ops.factored_conv2d(x, u, v, values, index, bias, size=size, **how).square().sum()

    args = [t[n] for n in ORDER]
    looped = [torch.func.grad(loss, (0, 1, 2, 3, 5))(*(a[k] for a in args)) for k in range(3)]
    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3, 5)))(*args)
    batched = torch.func.grad(loss, (0, 1, 2, 3, 5))(*args)
    for j in range(5):
        expected = torch.stack([one[j] for one in looped])
        assert torch.allclose(mapped[j], expected) and torch.allclose(batched[j], expected)
    with ff.use_backend("reference"):
        assert torch.allclose(loss(*args), torch.stack([loss(*(a[k] for a in args)) for k in range(3)]).sum())


def test_shared_over_clients_and_views():
    size = (6, 5, 3, 3)
    t = draw(4, size, 8, 8, 1, 0.2, torch.float64)
    x = torch.randn(3, 4, 8, 8, 10, dtype=torch.float64)[..., ::2].movedim(-1, 2)
    y = ops.factored_conv2d(**{**t, "x": x}, size=size)
    expected = [dense({**t, "x": x[k]}, size, torch.float64, {})[0] for k in range(3)]
    assert torch.allclose(y, torch.stack(expected))


def test_compile_fullgraph():
    size = (6, 5, 3, 3)
    t = draw(4, size, 8, 8, 1, 0.2, torch.float32)
    compiled = torch.compile(
        lambda *a: ops.factored_conv2d(*a, size=size, padding=1).relu(), fullgraph=True, backend="aot_eager"
    )
    args = [t[n] for n in ORDER]
    leaves = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    y = compiled(*leaves)
    y.sum().backward()
    expected = [a.clone().requires_grad_() if a.is_floating_point() else a for a in args]
    z = ops.factored_conv2d(*expected, size=size, padding=1).relu()
    z.sum().backward()
    assert torch.allclose(y, z, atol=1e-6)
    assert all(
        torch.allclose(a.grad, b.grad, atol=1e-5)
        for a, b in zip(leaves, expected, strict=True)
        if a.is_floating_point()
    )


@pytest.mark.parametrize("clients", [(2,), ()], ids=["clients", "one"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_opcheck(channels_last, clients):
    if not clients and not loaded("cpu"):
        pytest.skip("tensors without a client axis are for the CPU library")
    size = (6, 5, 3, 3)
    t = draw(4, size, 8, 8, 1, 0.2, torch.float32, clients=clients)
    if channels_last:
        t["x"] = formats.to_format(t["x"], True) if clients else t["x"].to(memory_format=torch.channels_last)
    settings = (size, (2, 2), (1, 1), (1, 1), 1)
    factors = (t["u"], t["v"], t["values"], t["index"])
    y = torch.ops.fastfact.factored_conv2d(t["x"], *factors, t["bias"], *settings)
    for repeated in (False, True):
        arguments = t["x"], *factors, t["bias"], *settings, repeated
        torch.library.opcheck(torch.ops.fastfact.factored_conv2d.default, arguments)
    mu = draw(4, size, 8, 8, 1, 1.0, torch.float32, clients=clients)["values"].view(*clients, *size)
    if channels_last:
        mu = formats.to_format(mu, True) if clients else mu.to(memory_format=torch.channels_last)
    for of_mu in ((t["values"], t["index"]), (mu, None)):
        for needs in (15, 1, 8):
            torch.library.opcheck(
                torch.ops.fastfact.factored_conv2d_backward.default,
                (y, t["x"], t["u"], t["v"], *of_mu, *settings, needs),
            )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", [c for c in CASES if c[5]], ids=str)
@torch.no_grad()
def test_repeated_calls_are_the_same(case, channels_last):
    n, size, h, w, rank, density, how = case
    t = draw(n, size, h, w, rank, density, torch.float32, how.get("groups", 1), clients=(2,))
    if channels_last:
        t["x"] = formats.to_format(t["x"], True)
    for _ in range(2):
        t |= {"x": 2 * t["x"], "values": t["values"] + 1}
        expected = ops.factored_conv2d(**t, size=size, **how)
        assert torch.equal(ops.factored_conv2d(**t, size=size, repeated=True, **how), expected)
        one = {name: None if tensor is None else tensor[0] for name, tensor in t.items()}
        assert torch.equal(ops.factored_conv2d(**one, size=size, repeated=True, **how), expected[0])
        few = t | {"x": t["x"][:, :1].clone()}
        assert torch.equal(
            ops.factored_conv2d(**few, size=size, repeated=True, **how), ops.factored_conv2d(**few, size=size, **how)
        )
        at = t["index"].clone()
        at[1, -1] += 1 if at[1, -1] < torch.Size(size).numel() - 1 else 0
        other = t | {"index": at}
        assert torch.equal(
            ops.factored_conv2d(**other, size=size, repeated=True, **how),
            ops.factored_conv2d(**other, size=size, **how),
        )


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "size, how",
    [((24, 40, 3, 3), {"padding": 1}), ((9, 18, 5, 3), {"stride": 2}), ((12, 4, 3, 3), {"padding": 1, "groups": 3})],
)
def test_steps_see_where_the_nonzeros_are(size, how, channels_last):
    """Kernels keep the order of the nonzeros from step to step: for these positions, not for their number or memory."""
    t = draw(3, size, 9, 8, 1, 0.2, torch.float64, how.get("groups", 1))
    if channels_last:
        t["x"] = formats.to_format(t["x"], True)
    for seed in range(4):
        compare(t, size, how)
        t |= {"x": 2 * t["x"], "values": t["values"] + 1}
        compare(t, size, how)
        free = (t["index"].diff() > 1).nonzero().flatten()
        t["index"][free[torch.randint(len(free), (), generator=torch.Generator().manual_seed(seed))]] += 1


def test_repeated_calls_leave_gradients_alone():
    t = draw(2, (6, 5, 3, 3), 8, 8, 1, 0.2, torch.float32)
    t["values"].requires_grad_()
    assert ops.factored_conv2d(**t, size=(6, 5, 3, 3), padding=1, repeated=True).requires_grad


@pytest.mark.parametrize("change", [lambda index: index - 1, lambda index: index.flip(0), lambda index: index + 10**6])
@torch.no_grad()
def test_repeated_calls_look_at_the_index_each_time(change):
    t = draw(2, (6, 5, 3, 3), 8, 8, 1, 1.0, torch.float32)
    for _ in range(2):
        ops.factored_conv2d(**t, size=(6, 5, 3, 3), repeated=True)
        with pytest.raises(ValueError, match="ascending"):
            ops.factored_conv2d(**t | {"index": change(t["index"])}, size=(6, 5, 3, 3), repeated=True)


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 33), (33,), (64, 33)])
@pytest.mark.parametrize("rank", [0, 2])
def test_linear(shape, rank):
    o, i = 12, 33
    t = draw(1, (o, i, 1, 1), 1, 1, rank, 0.2, torch.float64)
    u, v = (torch.randn(rank, n, dtype=torch.float64) if rank else None for n in (i, o))
    weight = torch.zeros(o * i, dtype=torch.float64)
    weight[t["index"].long()] = t["values"]
    weight = weight.reshape(o, i) + (0 if u is None else torch.einsum("ri,ro->oi", u, v))
    x = torch.randn(shape, dtype=torch.float64)
    y = ops.factored_linear(x, u, v, t["values"], t["index"], t["bias"], size=(o, i))
    assert torch.allclose(y, F.linear(x, weight, t["bias"]))


def nonzeros_of(o, i, density):
    drawn = torch.rand(o * i, generator=torch.Generator().manual_seed(o)) < density
    return drawn.nonzero().flatten().int()


# Where the machine multiplies pairs, bfloat16 takes the nonzeros of an output, or of an input, by two: odd numbers of
# them, of inputs, of registers of rows.
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("rank", [0, 3, 8])
@pytest.mark.parametrize("rows, i, o", [(17, 33, 12), (75, 40, 65), (129, 100, 31), (300, 7, 90), (1000, 64, 48)])
def test_linear_of_bfloat16(rows, i, o, rank, planes):
    generator = torch.Generator().manual_seed(rows)
    index = nonzeros_of(o, i, 0.15)
    shapes = {"x": (rows, i), "u": (rank, i), "v": (rank, o), "values": (len(index),), "bias": (o,)}
    t = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    if not rank:
        del t["u"], t["v"]

    def weight(t, sizes):
        sparse = sizes(t["values"]).new_zeros(o * i).index_put((index.long(),), sizes(t["values"]))
        return sparse.view(o, i) + (sizes(t["v"]).mT @ sizes(t["u"]) if rank else 0)

    def layer(t):
        if not planes:
            return ops.factored_linear(**t, index=index, size=(o, i))
        convolution = ops.separable_conv2d if rank else ops.factored_conv2d
        factors = {name: t[name][..., None] for name in ("u", "v") if rank}
        images = {"x": t["x"].mT.reshape(1, i, rows, 1), "values": t["values"], "bias": t["bias"]}
        return convolution(**images, **factors, index=index, size=(o, i, 1, 1)).view(o, rows).mT

    grad = torch.randn(rows, o, generator=generator).bfloat16()
    t = {name: one.requires_grad_() for name, one in t.items()}
    wide = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    y, expected = layer(t), F.linear(wide["x"], weight(wide, lambda one: one), wide["bias"])
    found = [y, *torch.autograd.grad(y, [*t.values()], grad)]
    wanted = [expected, *torch.autograd.grad(expected, [*wide.values()], grad.double())]
    # The sum of all magnitudes: a sum in float is off by less than 2⁻¹⁴ of it, and is then rounded.
    sizes = {name: one.detach().abs().requires_grad_() for name, one in wide.items()}
    most = F.linear(sizes["x"], weight(sizes, lambda one: one), sizes["bias"])
    magnitudes = [most, *torch.autograd.grad(most, [*sizes.values()], grad.double().abs())]
    for name, one, other, size in zip(["y", *t], found, wanted, magnitudes, strict=True):
        off = (one.double() - other).abs() - other.abs() / 256 - size / 2**14
        assert off.max() <= 0, name


def test_infinities_stay_in_the_rows_and_channels_that_have_them():
    rows, o, i = 200, 33, 41
    index = nonzeros_of(o, i, 0.2)
    reached = torch.zeros(o, i, dtype=torch.bool).view(-1).index_fill(0, index.long(), True).view(o, i)
    x, dy = torch.ones(rows, i).bfloat16(), torch.ones(rows, o).bfloat16()
    x[:, 5], dy[:, 7] = math.inf, math.inf
    t = [x.requires_grad_(), torch.ones(len(index)).bfloat16().requires_grad_()]
    y = ops.factored_linear(t[0], None, None, t[1], index, size=(o, i))
    dx, _ = torch.autograd.grad(y, t, dy)
    assert torch.equal(y.isfinite(), ~reached[:, 5].expand(rows, o))
    assert torch.equal(dx.isfinite(), ~reached[7].expand(rows, i))


@pytest.mark.parametrize("density", [0.0, 0.3])
@pytest.mark.parametrize("clients", [(), (3,)])
@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        ((3, 4), {}),
        ((3, 4), {"groups": 2, "stride": (2, 3), "padding": (1, 2), "dilation": (2, 1)}),
        ((1, 1), {}),
        ((1, 1), {"stride": (2, 3), "padding": (1, 2)}),
        ((1, 1), {"groups": 2, "stride": (1, 2)}),
        ((3, 1), {"stride": (1, 2), "padding": (0, 1)}),
    ],
)
def test_separable(kernel, how, clients, density):
    size, rank, (kh, kw) = (8, 5, *kernel), 2, kernel
    t = draw(4, size, 9, 10, 0, density, torch.float64, how.get("groups", 1), clients)
    t |= {"u": torch.randn(*clients, rank, 5, kh).double(), "v": torch.randn(*clients, rank, 8, kw).double()}
    if not density:
        t |= {"values": None, "index": None}
    trained = [n for n in ("x", "u", "v", "values", "bias") if t[n] is not None]
    for name in trained:
        t[name].requires_grad_()
    settings = [size, *(how.get(n, d) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)))]
    settings[1:4] = [n if isinstance(n, tuple) else (n, n) for n in settings[1:4]]
    expected = ops.common.call(reference.separable_conv2d, bool(clients), [t[n] for n in ORDER], *settings)
    got = ops.separable_conv2d(**t, size=size, **how)
    assert torch.allclose(got, expected)
    grad = torch.randn_like(got)
    found, wanted = (torch.autograd.grad(y, [t[n] for n in trained], grad) for y in (got, expected))
    for name, one, other in zip(trained, found, wanted, strict=True):
        assert torch.allclose(one, other), name
    lowrank = {"B": t["u"].flatten(-2).mT, "A": t["v"].flatten(-2)}
    if not clients and not density:
        weight = ops.lowrank_weight(None, lowrank["A"], lowrank["B"], layout="separable", size=size)
        assert torch.allclose(got, F.conv2d(t["x"], weight, t["bias"], **how))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
def test_convolutions_of_one_tap_in_the_kernel_layout(stride, last):
    """What the op takes besides the spatial layout: u [r, i, 1] and v [r, o, 1]."""
    size, rank = (8, 5, 1, 1), 2
    t = draw(4, size, 9, 10, 0, 0.3, torch.float64)
    t |= {"u": torch.randn(rank, 5, 1).double(), "v": torch.randn(rank, 8, 1).double()}
    t["x"] = t["x"].contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    weight = torch.zeros(40, dtype=torch.float64)
    weight[t["index"].long()] = t["values"]
    weight = (weight.view(8, 5) + torch.einsum("ri,ro->oi", t["u"][..., 0], t["v"][..., 0])).view(size).requires_grad_()
    x = t["x"].clone().requires_grad_()
    expected = F.conv2d(x, weight, t["bias"], stride)
    grad = torch.randn_like(expected)
    dx, dw = torch.autograd.grad(expected, (x, weight), grad)
    dw = dw[..., 0, 0]
    wanted = dx, torch.einsum("oi,ro->ri", dw, t["v"][..., 0]), torch.einsum("oi,ri->ro", dw, t["u"][..., 0])
    wanted = *wanted, dw.flatten()[t["index"].long()]
    parts, how = [t[n] for n in ("u", "v", "values", "index")], (size, stride, (0, 0), (1, 1), 1)
    forward, backward = ((t["x"], *parts, t["bias"]), how), ((grad, t["x"], *parts), (*how, 15))
    kernels = torch.ops.fastfact
    for y in (
        kernels.factored_conv2d(*forward[0], *how),
        ops.common.call(reference.factored_conv2d, False, forward[0], *how),
    ):
        assert torch.allclose(y, expected)
    for found in (
        kernels.factored_conv2d_backward(*backward[0], *backward[1]),
        ops.common.call(reference.factored_conv2d_backward, False, backward[0], *backward[1]),
    ):
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one.flatten(), other.flatten())


@pytest.mark.parametrize("kernel", [(1, 1), (3, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_separable_steps_over_the_width_where_pytorch_is_safe(kernel, last):
    """The gradient of a 1×1 convolution of a few channels that steps over the width corrupts memory in PyTorch 2.14."""
    x = torch.randn(2, 6, 8, 8).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    u, v, called = torch.randn(1, 6, kernel[0]), torch.randn(1, 4, kernel[1]), []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.convolution.default:
                called.append((tuple(args[1].shape[2:]), tuple(args[3])))
            return function(*args, **(kwargs or {}))

    with Calls():
        y = ops.separable_conv2d(x, u, v, size=(4, 6, *kernel), stride=2)
    assert not any(shape == (1, 1) and stride[1] > 1 for shape, stride in called)
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("autocast", [False, True])
def test_separable_has_the_range_of_float32_between_its_two_convolutions(autocast):
    dtype = torch.float32 if autocast else torch.float16
    x, u, v = torch.full((2, 3, 6, 6), 200.0), torch.full((4, 3, 3), 50.0), torch.full((4, 8, 3), 1e-3)
    x, u, v = (t.to(dtype).requires_grad_() for t in (x, u, v))
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        y = ff.ops.separable_conv2d(x, u, v, size=(8, 3, 3, 3))
    weight = torch.einsum("rih,row->oihw", u.double(), v.double())
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), F.conv2d(x.double(), weight), rtol=2e-3, atol=0)
    for gradient, expected in zip(
        torch.autograd.grad(y.sum() / 64, (x, u, v)),
        torch.autograd.grad(F.conv2d(x.double(), weight).sum() / 64, (x, u, v)),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected, rtol=4e-3, atol=0)


def test_separable_checks_its_factors():
    t = draw(2, (6, 5, 3, 3), 8, 8, 0, 0.2, torch.float32)
    with pytest.raises(ValueError, match="u and v must be given"):
        ops.separable_conv2d(**t, size=(6, 5, 3, 3))
    with pytest.raises(ValueError, match="v has shape"):
        ops.separable_conv2d(**t | {"u": torch.zeros(2, 5, 3), "v": torch.zeros(2, 3, 6)}, size=(6, 5, 3, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (6, 5, 3)}, "size"),
        ({"size": (6, 4, 3, 3)}, "x has 5 channels"),
        ({"v": None}, "u and v go together"),
        ({"index": None}, "values and index"),
        ({"u": torch.zeros(1, 3, 2)}, "u has shape"),
        ({"values": torch.zeros(3)}, "values has shape"),
        ({"bias": torch.zeros(6, dtype=torch.float64)}, "bias is torch.float64"),
        ({"stride": 0}, "stride=0"),
        ({"dilation": 9}, "too small"),
    ],
)
def test_bad_input(change, message):
    t = draw(2, (6, 5, 3, 3), 8, 8, 1, 0.2, torch.float32)
    with pytest.raises(ValueError, match=message):
        ops.factored_conv2d(**{**t, "size": (6, 5, 3, 3), **change})


@pytest.mark.parametrize("index", [[3, 3], [5, 2], [0, 270], [-1, 4]])
def test_positions_must_ascend_within_the_weight(index):
    t = draw(2, (6, 5, 3, 3), 8, 8, 1, 0.2, torch.float32)
    t |= {"index": torch.tensor(index), "values": torch.ones(2)}
    with pytest.raises((ValueError, RuntimeError), match="index"):
        ops.factored_conv2d(**t, size=(6, 5, 3, 3))


@pytest.mark.parametrize("change", [lambda index: index.flip(0), lambda index: index + 270, lambda index: index - 270])
def test_positions_of_a_dense_mu_must_ascend_within_the_weight(change):
    t = draw(1, (6, 5, 3, 3), 4, 4, 1, 0.9, torch.float32)
    t["index"] = change(t["index"])
    with pytest.raises((ValueError, RuntimeError), match="index"):
        ops.factored_conv2d(**t, size=(6, 5, 3, 3), padding=1)
    grad = torch.ones(1, 6, 4, 4)
    tensors = [t[name] for name in ("x", "u", "v", "values", "index")]
    with pytest.raises((ValueError, RuntimeError), match="index"):
        torch.ops.fastfact.factored_conv2d_backward(grad, *tensors, [6, 5, 3, 3], [1, 1], [1, 1], [1, 1], 1, 15)
