"""The fused convolution against PyTorch's, on a GPU or in Triton's interpreter; collected by test_kernels_conv.py."""

import functools
import os

import pytest
import torch
import triton
import triton.language as tl
from op_cases import ATOL, rank1_factors, variants, without_tf32

import fastfact as ff
from fastfact import kernels
from fastfact.base import formats
from fastfact.base.formats import KERNEL, SPATIAL, VIEW
from fastfact.kernels import conv, separable_conv, weights
from fastfact.kernels.support import support_bits, support_tile
from fastfact.ops import reference

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.float64, torch.bfloat16] * GPU

# (k, n, i a group, o, h, w), (kh, kw), rank, stride, padding, dilation, groups
CASES = [
    ((2, 2, 5, 7, 6, 5), (3, 3), 1, (1, 1), (1, 1), (1, 1), 1),
    ((1, 3, 3, 18, 5, 6), (3, 3), 1, (2, 2), (1, 1), (1, 1), 2),
    ((2, 1, 4, 3, 7, 8), (2, 3), 2, (2, 1), (0, 2), (1, 2), 1),
    ((3, 1, 9, 4, 3, 2), (1, 1), 3, (1, 1), (0, 0), (1, 1), 2),
    # enough pixels that the weight gradient is split over them
    ((1, 2, 2, 3, 15, 16), (2, 1), 1, (1, 1), (0, 0), (1, 1), 1),
]
BIG_CASES = [
    ((3, 8, 64, 65, 16, 15), (3, 3), 1, (1, 1), (1, 1), (1, 1), 1),
    ((2, 32, 32, 128, 32, 32), (5, 5), 1, (1, 1), (2, 2), (1, 1), 1),
    ((1, 32, 128, 256, 16, 16), (3, 3), 1, (1, 1), (1, 1), (1, 1), 1),
    ((2, 32, 8, 128, 16, 16), (3, 3), 1, (1, 1), (1, 1), (1, 1), 8),
]


@pytest.fixture(autouse=True)
def exact():
    with without_tf32():
        yield


def draw(case, layout, how, dtype):
    """x, u, v, μ, index, bias, dy and the settings of the op. `how`: the layout of the tensors, or "support"."""
    (k, n, i, o, h, w), (kh, kw), rank, *geometry, groups = case
    size = (o, i, kh, kw)
    x = torch.randn(k, n, groups * i, h, w, device=DEVICE).to(dtype)
    u, v = rank1_factors(layout, size, k, rank, dtype, DEVICE)
    index = None
    if how == "support":
        count = torch.Size(size).numel()
        index = torch.stack([torch.randperm(count)[: count // 3].sort().values for _ in range(k)]).int().to(DEVICE)
        mu = torch.randn(index.shape, device=DEVICE).to(dtype)
    else:
        mu = variants(torch.randn(k, *size, device=DEVICE).to(dtype), how)
    if how == "channels_last":
        x = formats.to_format(x, True)
    if how == "shared":
        u, v = variants(u, "shared"), variants(v, "gaps")
    bias = torch.randn(k, o, device=DEVICE).to(dtype)
    settings = (layout, size, how == "channels_last", *geometry, groups)
    grad = torch.randn(reference.fused_conv2d(x, u, v, mu, index, bias, *settings).shape, device=DEVICE).to(dtype)
    return (x, u, v, mu, index, bias, grad), settings


def every(impl, tensors, settings, needs=7):
    """y, dx, du, dv, dμ."""
    x, u, v, mu, index, bias, grad = tensors
    image = (tuple(x.shape[1:]), formats.is_channels_last(x))
    return (
        impl.fused_conv2d(x, u, v, mu, index, bias, *settings),
        impl.fused_conv2d_dx(grad, u, v, mu, index, *image, *settings),
        *impl.fused_conv2d_dw(grad, x, u, v, index, *settings, needs),
    )


def compare(tensors, settings, needs=7):
    outs = every(kernels, tensors, settings, needs)
    doubled = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    expected, plain = every(reference, doubled, settings, needs), every(reference, tensors, settings, needs)
    # The ops are sums of products: on absolute values they bound what rounding can do, in whatever order they add.
    magnitudes = [t.abs() if t is not None and t.is_floating_point() else t for t in doubled]
    bounds = every(reference, magnitudes, settings, needs)
    names = ("y", "dx", "du", "dv", "dmu")
    for name, out, true, same, bound in zip(names, outs, expected, plain, bounds, strict=True):
        dtype = tensors[0].dtype
        assert out.shape == true.shape and out.dtype == dtype
        assert all(n == 1 or a == b for n, a, b in zip(out.shape, out.stride(), same.stride(), strict=True))
        if not out.numel():
            continue
        (error, others), scale = ((t.double() - true).abs().max().item() for t in (out, same)), bound.max().item()
        assert error <= 2 * others + ATOL[dtype] * scale, (name, dtype, error, others, true.abs().max().item(), scale)


HOWS = ["plain", "channels_last", "shared", "support"]
# every other combination: each pair of (case, layout), (case, how) and (layout, how) is among them
COMBINATIONS = [
    pytest.param(case, layout, how, id=f"{'-'.join(map(str, case[0]))}-{layout}-{how}")
    for number, case in enumerate(CASES + BIG_CASES * GPU)
    for layout in (SPATIAL, KERNEL, VIEW)
    for place, how in enumerate(HOWS)
    if (number + layout + place) % 2 == 0
]


@pytest.mark.parametrize(("case", "layout", "how"), COMBINATIONS)
def test_conv2d(case, layout, how):
    torch.manual_seed(0)
    dtypes = DTYPES if how == "plain" and case in CASES[::2] else DTYPES[:1]
    if GPU:
        # compiling takes longest: two types each
        dtypes = DTYPES[HOWS.index(how) % 2 :: 2]
    for dtype in dtypes:
        compare(*draw(case, layout, how, dtype))


@pytest.mark.parametrize("case", CASES[:2] + BIG_CASES * GPU, ids=lambda case: "-".join(map(str, case[0])))
def test_weights_of_each_client_alone(case):
    """No u and v: μ is the weight."""
    torch.manual_seed(0)
    for how in ("plain", "support"):
        for dtype in DTYPES if GPU else DTYPES[:1]:
            (x, _, _, *rest), settings = draw(case, SPATIAL, how, dtype)
            compare((x, None, None, *rest), settings)


@pytest.mark.parametrize("case", CASES[:3] + CASES[4:] + BIG_CASES * GPU, ids=lambda case: "-".join(map(str, case[0])))
def test_without_mu(case):
    """Spatial factors alone: depthwise and 1×1, no weight."""
    torch.manual_seed(0)
    for how in ("channels_last", "shared"):
        for dtype in DTYPES if GPU else DTYPES[case == CASES[0] :][:1]:
            (x, u, v, _, _, bias, grad), settings = draw(case, SPATIAL, how, dtype)
            compare((x, u, v, None, None, bias, grad), settings, needs=3)


SEPARABLE_CASES = [
    CASES[0],
    CASES[2],
    CASES[4],
    # several tiles of lines, more channels than a block has, a rank that is no power of two
    ((2, 2, 19, 66, 9, 11), (3, 3), 17, (2, 2), (1, 1), (1, 1), 1),
]
BIG_SEPARABLE_CASES = [
    ((3, 8, 64, 65, 16, 15), (3, 3), 20, (1, 1), (1, 1), (1, 1), 1),
    ((2, 32, 64, 128, 32, 32), (5, 5), 16, (2, 2), (2, 2), (1, 1), 1),
    ((1, 4, 128, 256, 100, 120), (3, 3), 64, (1, 1), (1, 1), (1, 1), 1),
    ((4, 8, 128, 128, 16, 16), (3, 3), 100, (1, 1), (1, 1), (1, 1), 1),
]


@pytest.mark.parametrize("ranks", [64, 0], ids=["one kernel", "two kernels"])
@pytest.mark.parametrize(
    "case", SEPARABLE_CASES + BIG_SEPARABLE_CASES * GPU, ids=lambda case: "-".join(map(str, case[0]))
)
def test_separable_without_mu(case, ranks, monkeypatch):
    """Kernel factors alone: kh×1 and 1×kw, no weight."""
    torch.manual_seed(0)
    launched = []
    launch = separable_conv.launch

    def watched(*args):
        fits = launch(*args)
        launched.extend([args[-1]] * fits)
        return fits

    monkeypatch.setattr(separable_conv, "launch", watched)
    monkeypatch.setattr(separable_conv, "MAX_RANK", ranks)
    for number, how in enumerate(("channels_last", "shared") if ranks else ("channels_last",)):
        dtypes = DTYPES[case == CASES[0] :][:1]
        if GPU:
            # compiling takes longest
            dtypes = DTYPES[number::2] if ranks else DTYPES[3:]
        for dtype in dtypes:
            (x, u, v, _, _, bias, grad), settings = draw(case, KERNEL, how, dtype)
            compare((x, u, v, None, None, bias, grad), settings, needs=3)
            if case in SEPARABLE_CASES:
                assert set(launched) == ({False, True} if ranks else set())


def test_only_what_is_needed():
    torch.manual_seed(0)
    case = ((1, 1, 3, 2, 2, 2), (1, 2), 1, (1, 1), (0, 0), (1, 1), 1)
    for layout, rank, how in ((SPATIAL, 1, "plain"), (SPATIAL, 2, "support"), (KERNEL, 2, "plain")):
        (x, u, v, _, index, _, grad), settings = draw((*case[:2], rank, *case[3:]), layout, how, torch.float32)
        weight_gradient = functools.partial(kernels.fused_conv2d_dw, grad, x, u, v, index, *settings)
        full = weight_gradient(7)
        for needs in range(7):
            some = weight_gradient(needs)
            for bit, (one, whole) in enumerate(zip(some, full, strict=True)):
                # without dμ, du and dv may come by another way
                assert torch.allclose(one, whole, atol=1e-5) if needs >> bit & 1 else one.numel() == 0


def test_empty_support_and_full_words():
    """No position at all; and every position of a weight whose bits fill whole words."""
    torch.manual_seed(0)
    size, settings = (8, 4, 1, 1), ((1, 1), (0, 0), (1, 1), 1)
    x, grad = torch.randn(2, 1, 4, 3, 3, device=DEVICE), torch.randn(2, 1, 8, 3, 3, device=DEVICE)
    for count in (0, 32):
        index = torch.arange(count, dtype=torch.int32, device=DEVICE).expand(2, -1)
        compare(
            (x, None, None, torch.randn(2, count, device=DEVICE), index, None, grad), (SPATIAL, size, False, *settings)
        )
    bits, starts, *_ = conv.support_bits(torch.tensor([[0, 31, 32, 63, 64]], dtype=torch.int32), (70, 1, 1, 1))
    assert bits.tolist() == [[1 - 2**31, 1 - 2**31, 1]] and starts.tolist() == [[0, 2, 4]]


def test_positions_that_nobody_checked_stay_within_the_values():
    """Under `vmap`, `torch.compile` and capture an index cannot be read: one that is not ascending gives wrong numbers,
    but none from beyond the values, and none is written there."""
    torch.manual_seed(0)
    size = (16, 4, 1, 1)
    u, v = torch.randn(1, 1, 1, 1, device=DEVICE), torch.randn(1, 1, 16, 4, device=DEVICE)
    for wrong in ([40, 41, 0, 1, 2, 3], [63] * 6, [63, 62, 31, 30, 1, 0], [-7, 0, 1, 2, 90, 2**31 - 1]):
        index = torch.tensor([wrong], dtype=torch.int32, device=DEVICE)
        n = index.shape[1]
        # The values lie in front of others, as they do in a stack of clients: those must not be seen.
        held = torch.cat([torch.zeros(n), torch.full((40,), torch.nan)]).to(DEVICE)
        made = weights.compact_weight(u, v, held[None, :n], index, SPATIAL, False)
        assert made.isfinite().all(), wrong
        grad = torch.randn(1, *size, device=DEVICE)
        dmu = weights.compact_weight_backward(grad, u, v, held[None, :n], index, SPATIAL, 4)[2]
        assert dmu.shape == (1, n)
        farthest = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        reach[(1,)](farthest, support_bits(index, size), BLOCK=64)
        assert 0 <= farthest.item() < n


@triton.jit
def reach(out, support, BLOCK: tl.constexpr):
    """The farthest value that any of the first BLOCK elements would touch."""
    flat = tl.arange(0, BLOCK)
    on_support, place = support_tile(support, 0, flat, flat < BLOCK)
    tl.store(out, tl.max(tl.where(on_support, place, 0), 0))


def test_through_autograd():
    """The public functions, forward and backward, against the reference behind the same functions."""
    torch.manual_seed(0)

    def leaf(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=DEVICE, requires_grad=True)

    index = torch.tensor([1, 5, 6, 15], dtype=torch.int32, device=DEVICE)
    leaves = (leaf(2, 2, 2, 3, 3), leaf(1, 2, 2), leaf(2, 1, 4, 1), leaf(2, 4), leaf(2, 4))

    def run(function):
        x, u, v, mu, bias = leaves
        y = function(x, u, v, mu, index, bias, size=(4, 1, 2, 2), stride=2, padding=1, groups=2)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    expected = run(ff.ops.fused_conv2d)
    with ff.use_backend("triton"):
        for function in (ff.ops.fused_conv2d, ff.ops.factored_conv2d):
            for one, other in zip(run(function), expected, strict=True):
                torch.testing.assert_close(one, other)


def test_shapes_that_do_not_fit():
    u, v = rank1_factors(SPATIAL, (5, 3, 3, 3), 2, 1, torch.float32, DEVICE)
    rest = (None, None, None, SPATIAL, (5, 3, 3, 3), False, (1, 1), (0, 0), (1, 1), 1)
    with pytest.raises(ValueError, match="x has 4 channels"):
        kernels.fused_conv2d(torch.zeros(2, 1, 4, 8, 8, device=DEVICE), u, v, *rest)
    with pytest.raises(ValueError, match="does not fit into x of 2 × 8"):
        kernels.fused_conv2d(torch.zeros(2, 1, 3, 2, 8, device=DEVICE), u, v, *rest)
