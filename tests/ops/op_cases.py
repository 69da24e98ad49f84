"""Cases for every implementation of the ops with the reference's signatures: awkward shapes, strides, dtypes.

`impl` is anything whose attributes are the ops (`fastfact.kernels`, `torch.ops.fastfact`, …).
Truth is the reference in float64; a case passes with at most twice the error of the reference in the case's own dtype.
"""

import contextlib
import itertools

import pytest
import torch

from fastfact import ops, use_backend
from fastfact.base import formats
from fastfact.base.formats import KERNEL, LINEAR, SEPARABLE, SPATIAL, VALUE_TYPES, VIEW
from fastfact.ops import reference

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
ATOL = {F64: 1e-12, F32: 1e-6, F16: 1e-3, BF16: 8e-3}

# (k, o, i, kh, kw)
CONVS = [(2, 5, 3, 3, 3), (1, 9, 8, 3, 3), (3, 4, 2, 1, 1), (2, 3, 4, 5, 2)]
BIG_CONVS = [(2, 65, 3, 3, 3), (3, 70, 40, 3, 3), (1, 33, 130, 1, 1), (2, 24, 16, 5, 5)]


@contextlib.contextmanager
def without_tf32():
    """Convolutions in float32 as such: cuDNN rounds to TF32 for some shapes and not for others."""
    settings = torch.backends.cudnn.conv
    before, settings.fp32_precision = settings.fp32_precision, "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def draw(*shape, dtype, device):
    return torch.randn(*shape, dtype=F64, device=device).to(dtype)


def as_float64(args):
    return [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]


def check(impl, op, args, inputs_dtype, others=()):
    """One call against the reference; returns the outputs. others: the places of those in the accumulator's dtype."""
    outs = getattr(impl, op)(*args)
    # The ops are sums of products: on absolute values they bound what rounding can do.
    magnitudes = [a.abs() if torch.is_tensor(a) else a for a in as_float64(args)]
    truths, plains, bounds = (getattr(reference, op)(*a) for a in (as_float64(args), args, magnitudes))
    results = zip(*(x if isinstance(x, tuple) else (x,) for x in (outs, truths, plains, bounds)), strict=True)
    wider = torch.promote_types(inputs_dtype, F32)
    for place, (out, truth, plain, bound) in enumerate(results):
        dtype = wider if place in others else inputs_dtype
        assert out.shape == truth.shape and out.dtype == dtype and out.device == plain.device
        assert not torch.isnan(out).any()
        if not out.numel():
            continue
        allowed = 2 * (plain.double() - truth).abs().max().item() + ATOL[inputs_dtype] * bound.max().item()
        assert (out.double() - truth).abs().max().item() <= allowed
    return outs


def check_format(weight, size, channels_last):
    """Each client's slice lies in the memory format asked for."""
    if len(size) == 4 and channels_last:
        weight = weight.permute(0, 1, 3, 4, 2)
    assert weight.is_contiguous()


def variants(tensor, how):
    """The same values laid out differently: as they are, channels_last, shared by the clients, with gaps."""
    if tensor is None or how == "plain":
        return tensor
    if how == "channels_last":
        return formats.to_format(tensor, True)
    if how == "shared":
        return tensor[:1].expand_as(tensor)
    return torch.stack([tensor, tensor], -1)[..., 0]


def rank1_factors(layout, size, k, rank, dtype, device):
    return tuple(draw(k, rank, *shape, dtype=dtype, device=device) for shape in formats.rank1_shapes(layout, size))


def rank1(impl, shape, layout, dtype, device, rank, channels_last, how):
    k, *size = shape[:3] if layout == LINEAR else shape
    mu = None if how == "none" else variants(draw(k, *size, dtype=dtype, device=device), how)
    u, v = rank1_factors(layout, size, k, rank, dtype, device)
    if how in ("shared", "gaps"):
        u, v = variants(u, how), variants(v, "gaps")
    weight = check(impl, "rank1_weight", (mu, u, v, layout, channels_last), dtype)
    check_format(weight, size, channels_last)
    grad = draw(k, *size, dtype=dtype, device=device)
    grad = grad[:, :1].expand_as(grad) if how == "shared" else variants(grad, "plain" if how == "none" else how)
    for needs in (3, 1, 2):
        du, dv = check(impl, "rank1_weight_backward", (grad, u, v, layout, needs), dtype)
        assert (du.numel() > 0, dv.numel() > 0) == (bool(needs & 1), bool(needs & 2))


# (shape, layout, rank, channels_last, density, whether the clients share the index and u) of `compact`
COMPACT = [
    ((2, 5, 3, 3, 3), SPATIAL, 1, False, 0.3, False),
    ((3, 16, 8, 3, 3), SPATIAL, 2, True, 0.1, True),
    ((2, 9, 8, 3, 2), KERNEL, 3, True, 0.5, False),
    ((2, 9, 8, 3, 2), KERNEL, 1, False, 0.2, False),
    ((2, 24, 16, 5, 5), SPATIAL, 1, False, 0.15, False),
    ((1, 4, 6, 3, 3), VIEW, 1, True, 0.4, False),
    # fewer columns than a tile has, in one stretch of memory
    ((2, 70, 40), LINEAR, 1, False, 0.1, False),
    # whole registers of halves and columns behind them, rows and ranks that do not come in fours or pairs
    ((2, 45, 150), LINEAR, 7, False, 0.3, False),
    ((1, 300, 100), LINEAR, 4, False, 0.9, False),
    # a tile of wide rows, and rows that are longer than a segment
    ((1, 13, 2100), LINEAR, 3, False, 0.3, False),
    ((1, 3, 8230), LINEAR, 2, False, 0.2, False),
    # one input, whose channels_last is no other order
    ((2, 40, 1, 7, 5), KERNEL, 2, True, 0.4, False),
    # many taps and few inputs: registers of taps and taps behind them, inputs parted into columns or one by one
    ((2, 6, 3, 7, 7), SPATIAL, 2, True, 0.6, False),
    ((1, 5, 4, 6, 9), SPATIAL, 1, True, 0.1, False),
    ((2, 3, 7, 24, 24), SPATIAL, 1, True, 0.4, True),
    ((2, 4, 4, 3, 3), SPATIAL, 1, False, 0.0, False),
    ((2, 4, 4, 3, 3), SPATIAL, 1, True, 1.0, False),
]


def compact(impl, case, dtype, device):
    shape, layout, rank, channels_last, density, shared = case
    k, *size = shape
    u, v = rank1_factors(layout, size, k, rank, dtype, device)
    n = torch.Size(size).numel()
    index = torch.stack([torch.randperm(n, device=device)[: round(density * n)].sort().values for _ in range(k)])
    index = index.to(torch.int32)
    if shared:
        index, u = variants(index, "shared"), variants(u, "shared")
    values = draw(*index.shape, dtype=dtype, device=device)
    weight = check(impl, "compact_weight", (u, v, values, index, layout, channels_last), dtype)
    check_format(weight, size, channels_last)
    grad = formats.to_format(draw(k, *size, dtype=dtype, device=device), channels_last)
    for needs in (7, 4, 3, 6):
        grads = check(impl, "compact_weight_backward", (grad, u, v, values, index, layout, needs), dtype)
        assert [g.numel() > 0 for g in grads] == [
            bool(needs >> j & 1) and (j < 2 or index.shape[1] > 0) for j in range(3)
        ]
        if needs & 4:
            assert torch.equal(grads[2], grad.flatten(1).gather(1, index.long()))


def lowrank(impl, shape, layout, dtype, device, rank, channels_last, how):
    k, *size = shape
    rows, columns = formats.lowrank_shape(layout, size)
    sigma = None if how == "none" else variants(draw(k, *size, dtype=dtype, device=device), how)
    a = draw(k, rank, columns, dtype=dtype, device=device)
    b = draw(k, rows, rank, dtype=dtype, device=device)
    if how in ("shared", "gaps"):
        a, b = variants(a, how), variants(b, "gaps")
    weight = check(impl, "lowrank_weight", (sigma, a, b, layout, size, 0.7, channels_last), dtype)
    check_format(weight, size, channels_last)
    grad = variants(draw(k, *size, dtype=dtype, device=device), "plain" if how == "none" else how)
    for needs in (1, 2, 3):
        check(impl, "lowrank_weight_backward", (grad, a, b, layout, size, 0.7, needs), dtype)


# Thin factors: several stripes of rows, several of columns, tiles that kernels of three columns do not fill; one wider.
# (shape, layout, rank, channels_last, how) of `lowrank`
THIN = [
    ((2, 24, 100, 3, 3), SEPARABLE, 16, True, "plain"),
    ((1, 180, 12, 3, 3), SEPARABLE, 31, False, "channels_last"),
    ((1, 300, 300), SEPARABLE, 9, False, "shared"),
    ((1, 150, 40, 2, 3), VIEW, 5, False, "gaps"),
    ((2, 40, 40, 3, 3), SEPARABLE, 33, True, "channels_last"),
]


def thin(impl, case, dtype, device):
    shape, layout, *rest = case
    lowrank(impl, shape, layout, dtype, device, *rest)


# (shape, rank, channels_last, how, personalized) of `hadamard`, whose second product has a rank larger by one
THIN_PAIRS = [
    ((1, 20, 64, 3, 3), 15, True, "channels_last", True),
    ((2, 260, 8, 2, 2), 16, False, "plain", False),
    ((1, 260, 70), 31, False, "shared", False),
    ((2, 70, 3, 3, 3), 4, True, "gaps", True),
    ((1, 40, 24, 3, 3), 32, True, "none", False),
]


def thin_pair(impl, case, dtype, device):
    shape, *rest = case
    hadamard(impl, shape, dtype, device, *rest)


# (clients, rows, i, o, rank, how) of `adapter`: ranks and rows that fill no tile, many tiles, splits of columns or of
# rows, a rank beyond the kernels', nothing at all.
ADAPTERS = [
    (3, 5, 7, 4, 1, "plain"),
    (2, 34, 24, 40, 3, "shared"),
    (3, 17, 70, 33, 11, "gaps"),
    (1, 20, 20, 520, 4, "none"),
    (2, 21, 36, 20, 100, "own sigma"),
    (1, 520, 18, 10, 8, "plain"),
    (2, 5, 20, 30, 130, "plain"),
    (2, 6, 8, 5, 128, "shared"),
    (2, 0, 8, 5, 4, "plain"),
    (0, 5, 8, 5, 4, "plain"),
    (2, 3, 0, 5, 4, "own sigma"),
    (2, 3, 5, 0, 4, "shared"),
]

# Several blocks of rows, clients that are cut, parts of several blocks, tiles of several clients, sums in parts.
LARGE_ADAPTERS = [
    (1, 35000, 3, 4, 2, "plain"),
    (2, 600, 20, 10, 5, "gaps"),
    (5, 40, 192, 300, 8, "gaps"),
    (1, 700, 300, 90, 17, "own sigma"),
    (40, 3, 30, 20, 3, "shared"),
    (2, 64, 33, 600, 64, "none"),
]


def adapter(impl, case, dtype, device):
    k, n, i, o, rank, how = case
    x, seen = draw(k, n, i, dtype=dtype, device=device), draw(k, n, i, dtype=dtype, device=device)
    sigma = draw(*(k,) * (how == "own sigma"), o, i, dtype=dtype, device=device)
    a, b = draw(k, rank, i, dtype=dtype, device=device), draw(k, o, rank, dtype=dtype, device=device)
    bias = None if how == "none" else draw(*(k,) * (how == "gaps"), o, dtype=dtype, device=device)
    grad = draw(k, n, o, dtype=dtype, device=device)
    if how in ("shared", "gaps"):
        x, a, b = variants(x, how), variants(a, how), variants(b, "gaps")
        grad, bias = variants(grad, how), variants(bias, "gaps")
    for other in (None, seen):
        _, hidden = check(impl, "lowrank_linear", (x, other, sigma, a, b, bias, 0.7), dtype)
    for needs in (15, 3, 3 | reference.OWN, 4, 9 | reference.OWN):
        check(impl, "lowrank_linear_backward", (grad, seen, sigma, a, b, hidden, 0.7, needs), dtype)


def hadamard(impl, shape, dtype, device, rank, channels_last, how, personalized):
    k, *size = shape
    n = size[1:].copy()
    columns = n[0] * (n[1] * n[2] if len(n) == 3 else 1)
    ranks = (rank, rank, rank + 1, rank + 1)
    rows = (size[0], columns) * 2
    factors = [draw(k, m, r, dtype=dtype, device=device) for m, r in zip(rows, ranks, strict=True)]
    if how in ("shared", "gaps"):
        factors = [variants(f, how if j == 0 else "gaps") for j, f in enumerate(factors)]
    weight = check(impl, "hadamard_weight", (*factors, size, personalized, channels_last), dtype)
    check_format(weight, size, channels_last)
    grad = variants(draw(k, *size, dtype=dtype, device=device), "plain" if how == "none" else how)
    for needs in (15, 2, 4):
        check(impl, "hadamard_weight_backward", (grad, *factors, size, personalized, needs), dtype)


def weight_cases(convs):
    """(id, function of (impl, dtype, device)) of every weight op in every layout, memory format and stride."""
    hows = ("plain", "channels_last", "shared", "gaps", "none")
    cases = []
    for number, (how, channels_last) in enumerate(itertools.product(hows, (False, True))):
        shape = convs[number % len(convs)]
        rank = (1, 3, 1, 17)[number % 4]
        name = f"{how}-{'last' if channels_last else 'first'}"
        for layout in (SPATIAL, KERNEL, VIEW):
            cases.append((f"rank1-{layout}-{name}", rank1, (shape, layout), (rank, channels_last, how)))
        for layout in (SEPARABLE, VIEW):
            cases.append((f"lowrank-{layout}-{name}", lowrank, (shape, layout), (rank, channels_last, how)))
        cases.append((f"hadamard-{name}", hadamard, (shape,), (rank, channels_last, how, number % 3 == 0)))
        if how != "channels_last" and not channels_last:
            matrix = shape[:3]
            cases.append((f"rank1-linear-{how}", rank1, (matrix, LINEAR), (rank, False, how)))
            cases.append((f"lowrank-linear-{how}", lowrank, (matrix, SEPARABLE), (rank, False, how)))
            cases.append((f"lowrank-linear-view-{how}", lowrank, (matrix, VIEW), (rank, False, how)))
            cases.append((f"hadamard-linear-{how}", hadamard, (matrix,), (rank, False, how, False)))

    def bind(function, first, last):
        return lambda impl, dtype, device: function(impl, *first, dtype, device, *last)

    return [pytest.param(bind(function, first, last), id=name) for name, function, first, last in cases]


def prox(impl, dtype, device, momentum, proximal, numel=1000):
    """Every tensor of a group of awkward ones, with sentinels around those that are views."""
    base = torch.full((numel + 7,), 7.0, dtype=dtype, device=device)
    base[3 : 3 + numel] = draw(numel, dtype=dtype, device=device)
    rows = draw(4, 6, dtype=dtype, device=device)
    params = [
        base[3 : 3 + numel],
        formats.to_format(draw(2, 3, 4, 5, 6, dtype=dtype, device=device), True),
        rows[:, 1:4],
        draw(0, 3, dtype=dtype, device=device),
        draw(8, 8, dtype=dtype, device=device).t(),
    ]
    outside = rows[:, 4:].clone()
    grads = [draw(*p.shape, dtype=dtype, device=device) for p in params]
    grads[0][5] = float("nan")
    momenta = [draw(*p.shape, dtype=dtype, device=device) for p in params] if momentum else []
    momenta = [
        m.as_strided(p.shape, p.stride()) if m.numel() == 64 else m for p, m in zip(params, momenta, strict=False)
    ]
    l1 = [0.5, 0.0, 1.0, 1.0, 2.0]
    settings = (l1, 0.1, momentum, 0.01, proximal)
    truth = [[t.to(F64, copy=True) for t in group] for group in (params, grads, momenta)]
    plain = [[t.clone() for t in group] for group in (params, grads, momenta)]
    reference.prox_sgd_step(*truth, *settings)
    reference.prox_sgd_step(*plain, *settings)
    impl.prox_sgd_step(params, grads, momenta, *settings)
    for out, true, same in zip(params + momenta, truth[0] + truth[2], plain[0] + plain[2], strict=True):
        if not out.numel():
            continue
        assert torch.equal(out.isnan(), true.isnan())
        out, true, same = (t.double().nan_to_num(0) for t in (out, true, same))
        assert (out - true).abs().max() <= 2 * (same - true).abs().max() + ATOL[dtype]
        if proximal and dtype in (F32, F64):
            assert torch.equal(out == 0, same == 0)
    assert (base[:3] == 7).all() and (base[3 + numel :] == 7).all() and torch.equal(rows[:, 4:], outside)


def bitmap(impl, dtype, device, value_type, n, density):
    x = draw(2, 3, n, dtype=dtype, device=device)
    x = x * (torch.rand(x.shape, device=device) < density)
    if n > 2 and value_type != torch.int8:
        x[0, 1, 2] = float("nan")
    code = VALUE_TYPES[value_type]
    bits, values, scale = impl.pack_bitmap(x, code)
    expected = reference.pack_bitmap(x, code)
    assert torch.equal(bits, expected[0])
    assert values.dtype == value_type and values.shape == expected[1].shape
    torch.testing.assert_close(scale, expected[2], rtol=1e-6, atol=0)
    if value_type == torch.int8:
        # a product rounded once instead of twice may fall on the other side of a tie
        assert (values.int() - expected[1].int()).abs().max().item() <= 1 if values.numel() else True
    else:
        assert torch.equal(values.nan_to_num(3), expected[1].nan_to_num(3))
    back = impl.unpack_bitmap(bits, values, scale, n)
    torch.testing.assert_close(back, reference.unpack_bitmap(bits, values, scale, n), equal_nan=True)
    if value_type == torch.float32 and dtype == F32:
        assert torch.equal(back.nan_to_num(3), x.nan_to_num(3))


def bitmap_of_many_rows(impl, device):
    """More chunks than a segment of a running sum has, rows that begin within words."""
    x = torch.randn(2, 1300, 9, device=device) * (torch.rand(2, 1300, 9, device=device) < 0.4)
    packed = impl.pack_bitmap(x, VALUE_TYPES[F32])
    for one, expected in zip(packed, reference.pack_bitmap(x, VALUE_TYPES[F32]), strict=True):
        assert torch.equal(one, expected)
    assert torch.equal(impl.unpack_bitmap(*packed, 9), x)
    assert torch.equal(impl.unpack_bitmap(*packed, 9, False), x)


def damaged_bitmap(impl, device, may_skip=True):
    """may_skip: whether `impl` leaves the check out where it is asked to."""
    x = torch.ones(1, 2, 12, device=device)
    bits, values, scale = impl.pack_bitmap(x, VALUE_TYPES[torch.float32])
    with pytest.raises((ValueError, RuntimeError), match="23"):
        impl.unpack_bitmap(bits, values[:-1], scale, 12)
    if may_skip:
        back = impl.unpack_bitmap(bits, values[:-1], scale, 12, False)
        assert torch.equal(back.flatten()[:-1], x.flatten()[:-1]) and back.flatten()[-1].isnan()
    bits[..., 1] |= 0xF0
    assert torch.equal(impl.unpack_bitmap(bits, values, scale, 12), x)


def similarity(impl, dtype, device, m, d, widths, epsilon, tau, first, rows, masked, integers=False):
    """similarity_sums against the reference; its counts exactly."""
    keys = draw(m, d, dtype=dtype, device=device) + 0.5
    if integers:
        keys = (40 * keys).round().clamp(-127, 127).to(torch.int8)
    if m > 3:
        keys[3] = 0
    uploads = [draw(m, n, dtype=dtype, device=device) for n in widths]
    valid = torch.rand(m, device=device) < 0.7 if masked else None
    # In the middle of the widest gap: a cosine that falls on the other side of τ by rounding would say nothing.
    unit = torch.nn.functional.normalize(keys.double())
    near = torch.cat([(unit @ unit.T).flatten(), keys.new_tensor([tau - 0.02, tau + 0.02], dtype=F64)]).sort().values
    near = near[(near - tau).abs() < 0.021]
    gap = near.diff().argmax()
    tau = max(-1.0, (near[gap : gap + 2].sum() / 2).item())
    settings = (valid, first, rows, epsilon, tau, True)
    truths, counts = reference.similarity_sums(
        keys if integers else keys.double(), [x.double() for x in uploads], *settings
    )
    plains, _ = reference.similarity_sums(keys, uploads, *settings)
    bounds, _ = reference.similarity_sums(
        keys if integers else keys.double(), [x.double().abs() for x in uploads], *settings
    )
    outs, counted = impl.similarity_sums(keys, uploads, *settings)
    assert torch.equal(counted, counts)
    for out, truth, plain, bound in zip(outs, truths, plains, bounds, strict=True):
        assert out.shape == truth.shape and out.dtype == dtype and not out.isnan().any()
        if out.numel():
            # ε (σ − 1) carries the rounding of σ, which the plain cosine of few numbers may happen not to have.
            allowed = 2 * (plain.double() - truth).abs().max() + (1 + epsilon) * ATOL[dtype] * bound.max()
            assert (out.double() - truth).abs().max() <= allowed
    assert impl.similarity_sums(keys, uploads, valid, first, rows, epsilon, tau, False)[1].numel() == 0


# (m, d, widths, epsilon, tau, first, rows, masked)
SIMILARITIES = [
    (1, 4, (3,), 1.0, 0.0, 0, 1, False),
    (37, 5, (1, 33), 1.0, -1.0, 0, 37, False),
    (70, 19, (16,), 20.0, 0.31, 0, 70, True),
    (131, 40, (7, 130), 5.0, 0.2, 30, 71, True),
    (90, 64, (20,), 3.0, 0.2, 0, 17, False),
    (66, 33, (), 3.0, 0.2, 50, 16, False),
    (20, 300, (40,), 3.0, 0.2, 4, 0, False),
]
BIG_SIMILARITIES = [
    (1500, 96, (90, 1100), 4.0, 0.15, 0, 1500, True),
    (2300, 30, (17,), 1.0, -1.0, 600, 1200, False),
]


# shape [k, n, c, …]
NORMS = [(3, 4, 5, 6, 7), (2, 8, 5), (3, 4, 3, 9), (1, 40, 130, 3, 3), (2, 9, 4, 2, 3, 2)]


def norm(impl, dtype, device, shape):
    """Batch norm of each client and its gradients, far from zero, of images in both formats."""
    for last in (False, True) if len(shape) == 5 else (False,):
        x = formats.to_format((draw(*shape, dtype=F64, device=device) * 2 + 5).to(dtype), last)
        grad = draw(*shape, dtype=dtype, device=device)
        given = [draw(shape[0], shape[2], dtype=dtype, device=device) for _ in range(2)]
        for weight, bias in (given, (None, None)):
            y, mean, var = check(impl, "batch_norm", (x, weight, bias, 1e-5), dtype, others=(1, 2))
            found = check(impl, "batch_norm_backward", (grad, x, weight, mean, var, 1e-5), dtype, others=(1, 2))
            assert y.stride() == found[0].stride() == torch.empty_like(x).stride()


def mixing(device, m, widths, epsilon, min_matches, masked, dtype=F32, bits=0):
    """similarity_mix as `device` serves it against the reference in float64; `bits`: by int8 sketches so long."""
    g = torch.Generator().manual_seed(m)
    # groups of clients far from τ = .5 on both sides: cosines .9 and 0
    v = torch.randn(4, 64, generator=g)[torch.arange(m) % 4] + 0.3 * torch.randn(m, 64, generator=g)
    v = ops.srht(v.to(device), bits)[0].cpu() if bits else v.to(dtype)
    uploads = [torch.randn(m, *shape, generator=g).to(dtype) for shape in widths]
    valid = torch.rand(m, generator=g) < 0.7 if masked else None
    settings = (epsilon, 0.5, min_matches)
    with use_backend("reference"):
        truths = ops.similarity_mix(v if bits else v.double(), [x.double() for x in uploads], *settings, valid)
    there = None if valid is None else valid.to(device)
    mixed = ops.similarity_mix(v.to(device), [x.to(device) for x in uploads], *settings, there)
    for out, truth in zip(mixed, truths, strict=True):
        assert out.dtype == dtype and out.shape == truth.shape and out.device.type == device
        # a mean of numbers near 1; the weights are good to ε times the rounding of a cosine
        allowed = 1e-10 if dtype == F64 else 2e-6 * (1 + epsilon) + torch.finfo(dtype).eps * 8
        torch.testing.assert_close(out.cpu().double(), truth, rtol=0, atol=allowed)


# (m, shapes of the uploads, epsilon, min_matches, masked)
MIXINGS = [(1, ((3,),), 1.0, 1, False), (70, ((3, 3), (), (40, 30)), 5.0, 25, True), (90, ((20,),), 20.0, 1, False)]


def sketch(impl, dtype, device, k, d, m):
    """srht against the reference; integers up to a tie that a sum in another order decides differently."""
    x = draw(k, d, dtype=dtype, device=device)
    if k > 1:
        x[1] = 0
    points = 1 << (d - 1).bit_length()
    signs = (2 * torch.randint(2, (d,), device=device) - 1).to(torch.int8)
    rows = torch.randperm(points, device=device)[:m]
    out, scale = impl.srht(x, signs, rows, False)
    truth, _ = reference.srht(x.double(), signs, rows, False)
    plain, _ = reference.srht(x, signs, rows, False)
    assert out.shape == (k, m) and out.dtype == plain.dtype and scale.numel() == 0
    # Each output sums d numbers: rounding is bounded by their magnitudes.
    bound = torch.finfo(plain.dtype).eps * x.double().abs().sum(1).max() / m**0.5
    assert (out.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max() + 4 * bound
    out, scale = impl.srht(x, signs, rows, True)
    expected, right = reference.srht(x, signs, rows, True)
    assert out.dtype == torch.int8 and scale.dtype == torch.float32
    torch.testing.assert_close(scale, right, rtol=1e-5, atol=0)
    different = (out.int() - expected.int()).abs()
    assert different.max() <= 1 and different.float().mean() < 0.01


# (k, d, m)
SKETCHES = [(2, 1, 1), (3, 2, 2), (2, 5, 3), (3, 20, 32), (2, 100, 64), (2, 5000, 128), (1, 9000, 1000)]


# (clients, batch, outputs, row shape): tiles of rows, outputs and columns that are full, short, several; nothing.
ROWS = [
    (1, 1, 1, (1,)),
    (3, 7, 4, (5, 7)),
    (2, 50, 10, (3, 32, 32)),
    (5, 3, 13, (520,)),
    (2, 9, 21, (1, 28, 28)),
    (2, 6, 3, (1100,)),
    (2, 0, 3, (4,)),
    (2, 4, 3, (0,)),
]


def rows(impl, dtype, device, k, batch, outputs, shape):
    """The rows of clients with different numbers of samples, gathered and multiplied; one has samples with gaps."""
    samples = [draw(batch + 3 + j, *shape, dtype=dtype, device=device) for j in range(k)]
    samples[-1] = variants(samples[-1], "gaps")
    index = torch.stack([torch.randperm(batch + 3)[:batch] for _ in samples]).to(device)
    assert torch.equal(impl.gather_rows(samples, index), reference.gather_rows(samples, index))
    whole = torch.cat([index, index], 1)[:, :batch]
    weight = draw(k, outputs, torch.Size(shape).numel(), dtype=dtype, device=device)
    grad = draw(k, batch, outputs, dtype=dtype, device=device)
    for op, factor in (("rows_linear", weight), ("rows_linear_backward", grad)):
        for some in (factor, variants(factor, "gaps"), variants(factor, "shared")):
            out = getattr(impl, op)(samples, whole, some)
            doubles = [x.double() for x in samples]
            truth, plain = (
                getattr(reference, op)(*a) for a in ((doubles, index, some.double()), (samples, index, some))
            )
            bound = getattr(reference, op)([x.abs() for x in doubles], index, some.double().abs())
            assert out.shape == truth.shape and out.dtype == dtype
            if out.numel():
                allowed = 2 * (plain.double() - truth).abs().max().item() + ATOL[dtype] * bound.max().item()
                assert (out.double() - truth).abs().max().item() <= allowed


def rows_softmax_loss(impl, dtype, k, batch, classes, shape):
    """The operations it joins, one after another, bit for bit."""
    samples = [draw(batch + 3 + j, *shape, dtype=dtype, device=torch.device("cpu")) for j in range(k)]
    samples[-1] = variants(samples[-1], "gaps")
    index = torch.stack([torch.randperm(batch + 3)[:batch] for _ in samples])
    labels = torch.randint(classes, (k, 2 * batch))[:, ::2]
    weight = draw(k, classes, torch.Size(shape).numel(), dtype=dtype, device=torch.device("cpu"))
    gaps = draw(k, classes + 1, dtype=dtype, device=torch.device("cpu"))[:, 1:]
    for some, bias in itertools.product([weight, *(variants(weight, how) for how in ("gaps", "shared"))], [None, gaps]):
        logits = impl.rows_linear(samples, index, some)
        losses, grad = impl.softmax_loss(logits if bias is None else logits + bias[:, None], labels)
        wanted = losses, grad, impl.rows_linear_backward(samples, index, grad)
        found = impl.rows_softmax_loss(samples, index, some, bias, labels)
        plain = reference.rows_softmax_loss(samples, index, some, bias, labels)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, wanted, strict=True))
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in plain]


def softmax_loss(impl, dtype, device, k, batch, classes):
    logits = 3 * draw(k, batch, classes, dtype=dtype, device=device)
    check(impl, "softmax_loss", (logits, torch.randint(classes, (k, batch), device=device)), dtype)
