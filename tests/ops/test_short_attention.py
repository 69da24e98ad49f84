"""Attention by the kernel, the reference and PyTorch's own; where the gradient of a packed projection is written."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

import fastfact as ff
from fastfact import use_backend
from fastfact.ops import attention as module
from fastfact.ops import reference
from fastfact.ops.attention import attention, serves

F32, F64 = torch.float32, torch.float64
# samples, heads, queries, keys, depth: one of each; keys that leave one or two beside registers; more than a block
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 17, 17, 16),
    (1, 2, 5, 9, 7),
    (3, 1, 50, 66, 8),
    (1, 2, 100, 3, 24),
    (2, 2, 8, 40, 33),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    # Fresh tensors hold NaN, as far as the allocator hands the same memory out again.
    for elements in (16, 256, 4096):
        [torch.full((elements,), float("nan")) for _ in range(4)]


def inputs(n, h, queries, keys, d, dtype=F64):
    return [torch.randn(n, h, size, d, dtype=dtype, requires_grad=True) for size in (queries, keys, keys)]


def strided(tensors):
    """The same numbers in other memory: rows before heads, parts of something wider, rows that are not dense."""
    q, k, v = (t.detach() for t in tensors)
    wide = torch.randn(*k.shape[:3], 2 * k.shape[3], dtype=k.dtype)
    wide[..., : k.shape[3]] = k
    return [
        q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(),
        wide[..., : k.shape[3]].requires_grad_(),
        v.mT.contiguous().mT.requires_grad_(),
    ]


def masks(n, h, queries, keys):
    added = torch.randn(queries, keys, dtype=F64)
    seen = torch.rand(n, 1, queries, keys) > 0.4
    seen[:, :, -1] = False
    return {
        "none": None,
        "added": added,
        "bool": seen,
        "of keys": added[:1].expand(n, h, 1, keys),
        "of rows": added.mT.mT,
    }


@pytest.mark.parametrize("layout", [list, strided])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_pytorch(shape, layout):
    for (name, mask), causal, dtype in itertools.product(masks(*shape[:4]).items(), (False, True), (F64, F32)):
        if mask is not None and causal:
            continue
        ours = layout(inputs(*shape, dtype))
        theirs = [t.detach().double().requires_grad_() for t in ours]
        given = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            wanted = F.scaled_dot_product_attention(*theirs, mask, 0.0, causal, scale=0.3)
        found = attention(*ours, given, causal, 0.3)
        g = torch.randn_like(wanted)
        close = {"rtol": 1e-11, "atol": 1e-12} if dtype == F64 else {"rtol": 1e-4, "atol": 2e-5}
        found_grads = torch.autograd.grad(found, ours, g.to(dtype))
        for one, other in zip((found, *found_grads), (wanted, *torch.autograd.grad(wanted, theirs, g)), strict=True):
            torch.testing.assert_close(one.double(), other, **close, msg=f"{name}, {causal}, {dtype}")
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("which", [*"qkvg", "all"])
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("depth", [8, 24, 4])
def test_rows_that_are_one_row_of_memory(which, dtype, depth):
    """As the gradient of a sum over the queries is."""
    sizes = {"q": 6, "k": 40, "v": 40, "g": 6}
    q, k, v, g = (
        torch.randn(2, 3, 1 if which in (name, "all") else size, depth, dtype=dtype).expand(2, 3, size, depth)
        for name, size in sizes.items()
    )
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    theirs = [t.detach().double().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(*theirs)
    found = attention(q, k, v)
    close = {F64: 1e-11, F32: 1e-4, torch.bfloat16: 0.1}[dtype]
    of = torch.autograd.grad(found, (q, k, v), g), torch.autograd.grad(wanted, theirs, g.double())
    for one, other in zip((found, *of[0]), (wanted, *of[1]), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=close, atol=close)


def test_rows_that_overlap():
    numbers = torch.randn(1, 1, 14, dtype=F64, requires_grad=True)
    windows = numbers.unfold(2, 8, 1)
    found = attention(windows, windows, windows)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = F.scaled_dot_product_attention(windows, windows, windows)
    torch.testing.assert_close(found, wanted)
    of = [torch.autograd.grad(y.square().sum(), numbers)[0] for y in (found, wanted)]
    torch.testing.assert_close(*of)


@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_and_reference(shape, dtype):
    """The registered ops, with clients, half precision and masks of any strides."""
    n, h, queries, keys, d = shape
    q, k, v = (torch.randn(2, n, h, size, d).to(dtype) for size in (queries, keys, keys))
    for mask, causal in ((None, False), (torch.randn(1, n, 1, keys, queries).mT.to(dtype), True)):
        g = torch.randn(2, n, queries, h, d).to(dtype).transpose(2, 3)
        out, sums = torch.ops.fastfact.attention(q, k, v, mask, causal, 0.5)
        found = [torch.full_like(t, torch.nan) for t in (q, k, v)]
        torch.ops.fastfact.attention_backward(g, q, k, v, mask, out, sums, *found, causal, 0.5)
        q64, k64, v64, g64, mask64 = (t if t is None else t.double() for t in (q, k, v, g, mask))
        true = reference.attention(q64, k64, v64, mask64, causal, 0.5)
        wanted = [torch.empty_like(t) for t in (q64, k64, v64)]
        reference.attention_backward(g64, q64, k64, v64, mask64, *true, *wanted, causal, 0.5)
        close = {F64: 1e-11, F32: 2e-5, torch.bfloat16: 0.2, torch.float16: 2e-2}[dtype]
        again, weights = torch.ops.fastfact.attention_weights(q, k, v, mask, causal, 0.5)
        assert torch.equal(again, out) and again.stride() == out.stride()
        found.append(weights)
        wanted.append(reference.attention_weights(q64, k64, v64, mask64, causal, 0.5)[1])
        for one, other in zip((out, sums, *found), (*true, *wanted), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=close, atol=close)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_derivatives(backend):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    with use_backend(backend):
        for given in (None, mask, torch.randn(2, 1, 2, 3, dtype=F64)):
            call = lambda q, k, v, given=given: attention(q, k, v, given, scale=0.7)  # noqa: E731
            torch.autograd.gradcheck(call, inputs(2, 1, 2, 3, 2))
            torch.autograd.gradgradcheck(call, inputs(2, 1, 2, 3, 2))


ORDERS = {
    "rows, parts, heads": ((2, 3, 3, 2, 4), (2, 0, 3, 1, 4)),
    "rows, heads, parts": ((2, 3, 2, 3, 4), (3, 0, 2, 1, 4)),
    "parts first": ((3, 2, 2, 3, 4), (0, 1, 2, 3, 4)),
    "rows before samples": ((3, 2, 3, 2, 4), (2, 1, 3, 0, 4)),
    "one sample and head": ((1, 3, 3, 1, 4), (2, 0, 3, 1, 4)),
}


def nodes(tensor):
    """The names of what autograd goes through, from a tensor to the leaves."""
    found, left = [], [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.append(node.name())
            left += [next_node for next_node, _ in node.next_functions]
    return found


@pytest.mark.parametrize("which", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_one_tensor_have_its_gradient_at_once(order, which):
    sizes, places = ORDERS[order]
    leaf = torch.randn(1, *sizes, dtype=F64).flatten(1).requires_grad_()

    def attend(base, function):
        parts = base.view(sizes).permute(places).unbind(0)
        return function(*(parts[place] for place in which))

    found, wanted = (attend(leaf * 2, f) for f in (attention, F.scaled_dot_product_attention))
    assert not {"UnbindBackward0", "PermuteBackward0"} & set(nodes(found))
    g = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, leaf, g), torch.autograd.grad(wanted, leaf, g))
    if which == (0, 1, 2):
        torch.autograd.gradgradcheck(lambda base: attend(base * 2, attention), leaf)
    # the leaf itself
    torch.testing.assert_close(
        torch.autograd.grad(attend(leaf, attention), leaf, g),
        torch.autograd.grad(attend(leaf, F.scaled_dot_product_attention), leaf, g),
    )


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


def _hooked(q, k, v):
    k.register_hook(lambda g: 2 * g)
    return q, k, v


BETWEEN = {
    "detached": lambda q, k, v: (q, k.detach(), v),
    "a function of its own": lambda q, k, v: (Reversed.apply(q), k, v),
    "a hook": _hooked,
    "one part twice": lambda q, k, v: (q, k, k),
    "scaled": lambda q, k, v: (0.5 * q, k, v),
    "some queries": lambda q, k, v: (q[:, :, :3], k, v),
    "some rows": lambda q, k, v: (q[:, :, :3], k[:, :, :3], v[:, :, :3]),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_is_more_than_a_view_is_kept(between):
    leaf = torch.randn(2, 5, 3, 4, 8, dtype=F64, requires_grad=True)
    found, wanted = (
        torch.autograd.grad(f(*BETWEEN[between](*(leaf * 2).permute(2, 0, 3, 1, 4).unbind(0))).square().sum(), leaf)
        for f in (attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(found, wanted)


def test_parts_seen_without_gradient():
    leaf = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    with torch.no_grad():
        q, k, v = leaf.permute(2, 0, 3, 1, 4).unbind(0)
        assert not attention(q, k, v).requires_grad
    # PyTorch says of them that they take a gradient, but not where from.
    found = attention(q, k, v)
    assert found.requires_grad == F.scaled_dot_product_attention(q, k, v).requires_grad
    assert torch.autograd.grad(found.sum(), leaf, allow_unused=True) == (None,)


@pytest.mark.parametrize("short", [module.SHORT, 0])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("in_mask", [None, 0, "all"])
def test_clients_of_clients(monkeypatch, packed, in_mask, short):
    monkeypatch.setattr(module, "SHORT", short)
    x, mask = torch.randn(2, 3, 2, 5, 3, 2, 4, dtype=F64), torch.randn(2, 1, 5, 5, dtype=F64)
    if in_mask == "all":
        mask = torch.randn(2, 3, 1, 1, 5, 5, dtype=F64)
    of_mask = (0, 0) if in_mask == "all" else (in_mask, None)

    def loss(x, mask, f):
        parts = (x * 2 if packed else torch.sin(x)).permute(2, 0, 3, 1, 4).unbind(0)
        return f(*(parts if packed else (p + 0 for p in parts)), mask).square().sum()

    def gradients(f):
        inner = vmap(grad(lambda x, mask: loss(x, mask, f)), (1 - 1, of_mask[1]))
        return vmap(inner, (0, of_mask[0]))(x, mask)

    torch.testing.assert_close(gradients(attention), gradients(lambda q, k, v, m: reference_of(q, k, v, m)))


def reference_of(q, k, v, mask):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask, -1) @ v


def test_no_bit_depends_on_threads():
    base = torch.randn(7, 33, 3, 5, 24)

    def run():
        x = base.clone().requires_grad_()
        y = attention(*x.permute(2, 0, 3, 1, 4).unbind(0))
        return y, *torch.autograd.grad(y.square().sum(), x)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run()
        torch.set_num_threads(3)
        assert all(map(torch.equal, one, run()))
    finally:
        torch.set_num_threads(before)


def test_numbers_that_are_none():
    q, k, v = (t.detach().float() for t in inputs(1, 2, 9, 17, 8))
    k[0, 0, 3, 2] = torch.nan
    v[0, 1, 3, 2] = torch.inf
    found, wanted = (f(q, k, v) for f in (attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    q[0, 0, 1] = torch.nan
    k[0, 0, 3, 2] = 0
    everything = torch.full((9, 17), -torch.inf)
    found, wanted = (f(q, k, v, everything) for f in (attention, F.scaled_dot_product_attention))
    assert not found[0, 0, 2:].any()
    torch.testing.assert_close(found[0, 0, 1].isnan(), wanted[0, 0, 1].isnan())


def test_large_scores():
    """Scores of some ten thousands, which float32 has to a few thousandths."""
    q, k, v = (t.detach().float() * 100 for t in inputs(2, 2, 17, 17, 16))
    wanted = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(attention(q, k, v).double(), wanted, rtol=1e-2, atol=1)


def test_what_is_served():
    q, k, v = inputs(2, 2, 5, 5, 4)
    assert serves(q, k, v, None)
    assert serves(q, k, v, torch.ones(5, 5, dtype=torch.bool))
    assert not serves(q, k, v[..., :3], None)
    assert not serves(q[0], k[0], v[0], None)
    assert not serves(q, k[:, :1], v[:, :1], None)
    assert not serves(q.half(), k.half(), v.half(), None)
    assert not serves(q[:0], k[:0], v[:0], None)
    assert not serves(q, k, v, torch.ones(5, 5, dtype=F64, requires_grad=True))
    assert not serves(q, k, v, torch.ones(5, 5))


def test_compiled_and_traced():
    q, k, v = (t.detach() for t in inputs(2, 2, 5, 5, 4))
    torch.testing.assert_close(
        torch.jit.trace(lambda q: attention(q, k, v), q, check_trace=False)(q), attention(q, k, v)
    )
    exported = torch.export.export(Attends(), (q, k, v))
    assert "fastfact" not in exported.graph_module.code


class Attends(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v)


@torch.no_grad()
@pytest.mark.parametrize("shape, keys", [((2, 3, 7, 8), 7), ((1, 2, 20, 5), 33), ((3, 1, 1, 16), 4)], ids=str)
def test_bfloat16_by_products(monkeypatch, shape, keys):
    monkeypatch.setattr(module, "has_amx", lambda: False)
    generator = torch.Generator().manual_seed(0)
    n, h, l, d = shape  # noqa: E741
    query = torch.randn(n, l, h, d, generator=generator).bfloat16().transpose(1, 2)
    key, value = (torch.randn(n, h, keys, d, generator=generator).bfloat16() for _ in range(2))
    assert module.by_products(query, key) and not module.by_products(query.float(), key.float())
    truth = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    layer = ff.factorize(torch.nn.Sequential(torch.nn.MultiheadAttention(h * d, h)), ff.Rank1()).eval()[0]
    found, weights = layer._attended(query, key, value, None, causal=False, need_weights=False)
    assert weights is None
    error = (found.double() - truth).abs().max()
    # Scores (up to 5 here) and weights are rounded, as in PyTorch's own product: 2⁻⁹ of each.
    assert error <= (5 + 2) * 2**-9 * value.abs().max()
    with torch.enable_grad():
        assert not module.by_products(query, key)
    monkeypatch.setattr(module, "has_amx", lambda: True)
    assert not module.by_products(query, key)


@pytest.mark.parametrize("length, own", [(4, False), (181, False), (182, True)])
def test_a_step_of_few_tokens_is_pytorchs(length, own):
    """Of so few that the function around the kernel takes longer than PyTorch's own."""
    layer = ff.factorize(torch.nn.Sequential(torch.nn.MultiheadAttention(64, 4, batch_first=True)), ff.Rank1())[0]
    q, k, v = inputs(1, 4, length, length, 16, F32)
    assert (q.numel() * length >= module.LEAST) == own
    out, _ = layer._attended(q, k, v, None, causal=False, need_weights=False)
    assert ("_EagerAttention" in out.grad_fn.name()) == own
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    with torch.no_grad():
        assert module.pays(q, k) and module.pays_in_a_step(q.detach(), k)
