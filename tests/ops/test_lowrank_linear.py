"""The low-rank linear layer from its parts against the plain formula, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastfact import ops, use_backend
from fastfact.ops import backends, lowrank

K, N, IN, OUT, R, SCALE = 3, 5, 7, 4, 2, 1.5
NAMES = ("x", "sigma", "a", "b", "bias")


def tensors(clients=(), seed=0, dtype=torch.float64):
    """x, σ, a, b, bias; those named in `clients` with a client axis."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"x": (N, IN), "sigma": (OUT, IN), "a": (R, IN), "b": (OUT, R), "bias": (OUT,)}
    return {
        name: torch.randn((K,) * (name in clients) + shape, generator=g, dtype=dtype) for name, shape in shapes.items()
    }


def formula(x, sigma, a, b, bias, seen=None):
    weight = SCALE * (b @ a)
    if seen is None:
        return F.linear(x, sigma + weight, bias)
    return F.linear(x, sigma, bias) + F.linear(seen, weight)


def of_clients(parts, seen=None):
    """The formula, client by client."""
    each = []
    for j in range(K):
        own = {n: t[j] if t.dim() > (1 if n == "bias" else 2) else t for n, t in parts.items()}
        each.append(formula(**own, seen=None if seen is None else seen[j]))
    return torch.stack(each)


def leaves(parts, frozen=("sigma",)):
    return {name: t.clone().requires_grad_(name not in frozen) for name, t in parts.items()}


def check_gradients(found, wanted, parts, others):
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(9), dtype=wanted.dtype)
    names = [name for name, t in parts.items() if t.requires_grad]
    ours = torch.autograd.grad(found, [parts[n] for n in names], g)
    theirs = torch.autograd.grad(wanted, [others[n] for n in names], g)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for name, one, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("frozen", [("sigma",), ("sigma", "bias"), (), ("sigma", "a"), ("sigma", "x"), ("sigma", "b")])
def test_one_client(frozen):
    parts, others = leaves(tensors(), frozen), leaves(tensors(), frozen)
    check_gradients(ops.lowrank_linear(**parts, scaling=SCALE), formula(**others), parts, others)


@pytest.mark.parametrize("own", [("x", "a", "b"), ("x", "a", "b", "bias"), NAMES, ("x", "b"), ("x",)])
@pytest.mark.parametrize("frozen", [("sigma",), ("sigma", "bias"), ()])
def test_clients_share_what_has_no_client_axis(own, frozen):
    if own == ("x",):
        own = ("x", "a")
    parts, others = leaves(tensors(own), frozen), leaves(tensors(own), frozen)
    check_gradients(ops.lowrank_linear(**parts, scaling=SCALE), of_clients(others), parts, others)


@pytest.mark.parametrize("clients", [(), ("x", "a", "b")])
def test_the_adapter_may_see_another_input(clients):
    parts, others = leaves(tensors(clients)), leaves(tensors(clients))
    parts["seen"], others["seen"] = (tensors(clients, seed=1)["x"].requires_grad_() for _ in range(2))
    found = ops.lowrank_linear(**parts, scaling=SCALE)
    seen = others.pop("seen")
    wanted = of_clients(others, seen) if clients else formula(**others, seen=seen)
    check_gradients(found, wanted, parts, {**others, "seen": seen})


def test_a_trained_sigma_is_the_dense_part_of_one_kernel(monkeypatch):
    """In float32, with the gradients of the formula, also twice."""
    taken = []
    kernel = lowrank.conv.factored_linear
    monkeypatch.setattr(lowrank.conv, "factored_linear", lambda *a, **how: taken.append(1) or kernel(*a, **how))
    parts, others = (
        leaves({n: t.to(dtype) for n, t in tensors().items()}, ()) for dtype in (torch.float32, torch.float64)
    )
    y, wanted = ops.lowrank_linear(**parts, scaling=SCALE), formula(**others)
    assert taken or not backends.loaded("cpu") or not lowrank.conv.multiplies_tiles(torch.float32)
    found = torch.autograd.grad(y.sin().sum(), [*parts.values()], create_graph=True)
    true = torch.autograd.grad(wanted.sin().sum(), [*others.values()], create_graph=True)
    again = torch.autograd.grad(sum(t.square().sum() for t in found), [*parts.values()])
    truth = torch.autograd.grad(sum(t.square().sum() for t in true), [*others.values()])
    for one, other in zip((y, *found, *again), (wanted, *true, *truth), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows, inputs, outputs, rank", [(300, 5000, 90, 4), (300, 5000, 90, 20), (2000, 90, 5000, 16)])
def test_deep_layers_are_as_accurate_as_products_of_matrices(rows, inputs, outputs, rank):
    """Rounding grows with the number of terms that are added one after the other: at most some hundreds are."""
    g = torch.Generator().manual_seed(0)
    shapes = ((rows, inputs), (outputs, inputs), (rank, inputs), (outputs, rank), (outputs,))
    numbers = [torch.randn(shape, generator=g) for shape in shapes]
    grad = torch.randn(rows, outputs, generator=g)

    def results(layer, dtype):
        parts = leaves(dict(zip(NAMES, (t.to(dtype) for t in numbers), strict=True)))
        y = layer(parts)
        return y.detach(), *torch.autograd.grad(y, [parts[n] for n in NAMES if n != "sigma"], grad.to(dtype))

    found = results(lambda parts: ops.lowrank_linear(**parts, scaling=SCALE), torch.float32)
    plain, truth = (results(lambda parts: formula(**parts), dtype) for dtype in (torch.float32, torch.float64))
    for ours, theirs, true in zip(found, plain, truth, strict=True):
        allowed = 2 * (theirs.double() - true).abs().max() + 4e-7 * true.abs().max()
        assert (ours.double() - true).abs().max() <= allowed


def test_more_axes_no_rows_and_no_bias():
    parts = tensors()
    x = torch.randn(2, 3, IN, dtype=torch.float64)
    found = ops.lowrank_linear(x, parts["sigma"], parts["a"], parts["b"])
    torch.testing.assert_close(found, F.linear(x, parts["sigma"] + parts["b"] @ parts["a"]))
    assert ops.lowrank_linear(x[0, 0], parts["sigma"], parts["a"], parts["b"]).shape == (OUT,)
    assert ops.lowrank_linear(x[:0], parts["sigma"], parts["a"], parts["b"]).shape == (0, 3, OUT)


@pytest.mark.parametrize("size", [(3, 4, 0), (3, 0, 2), (0, 4, 2)], ids=str)
def test_sizes_of_nothing_with_a_trained_sigma(size):
    outputs, inputs, rank = size
    x, b = torch.randn(2, inputs), torch.randn(outputs, rank)
    sigma, a = torch.randn(outputs, inputs, requires_grad=True), torch.randn(rank, inputs)
    y = ops.lowrank_linear(x, sigma, a, b)
    torch.testing.assert_close(y, x @ (sigma + b @ a).T)
    assert torch.autograd.grad(y.sum(), sigma)[0].shape == sigma.shape


def test_twice_differentiable():
    parts = leaves(tensors(), ("sigma",))
    names = [name for name in parts if name != "sigma"]

    def layer(*moving):
        return ops.lowrank_linear(sigma=parts["sigma"], **dict(zip(names, moving, strict=True)), scaling=SCALE)

    moving = tuple(parts[name] for name in names)
    assert torch.autograd.gradcheck(layer, moving)
    assert torch.autograd.gradgradcheck(layer, moving)
    seen = tensors(seed=1)["x"].requires_grad_()
    assert torch.autograd.gradgradcheck(
        lambda x, seen, a, b: ops.lowrank_linear(x, parts["sigma"], a, b, seen=seen),
        (parts["x"], seen, parts["a"], parts["b"]),
    )


@pytest.mark.parametrize(
    "mapped", [("x", "a", "b"), ("x", "a", "b", "bias"), NAMES, ("x",), ("a", "b"), ("x", "sigma")]
)
def test_under_vmap_of_grad(mapped):
    parts = tensors(mapped)

    def loss(function):
        def value(trained, rest):
            return function(**trained, **rest).square().sum()

        return value

    trained = {name: parts[name] for name in ("x", "a", "b", "bias")}
    rest = {"sigma": parts["sigma"]}
    dims = tuple({name: 0 if name in mapped else None for name in some} for some in (trained, rest))
    ours = vmap(grad(loss(lambda **p: ops.lowrank_linear(**p, scaling=SCALE))), in_dims=dims)(trained, rest)
    theirs = vmap(grad(loss(formula)), in_dims=dims)(trained, rest)
    for name in trained:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-11, atol=1e-11, msg=name)


def test_vmap_over_clients_of_clients():
    parts = tensors(("x", "a", "b"))
    stacked = {name: torch.stack([t, t + 1]) for name, t in parts.items() if name != "sigma"}

    def loss(trained):
        return ops.lowrank_linear(**trained, sigma=parts["sigma"], scaling=SCALE).square().sum()

    found = vmap(grad(loss))(stacked)
    for j in range(2):
        own = {name: t[j].clone().requires_grad_() for name, t in stacked.items()}
        wanted = torch.autograd.grad(of_clients({**own, "sigma": parts["sigma"]}).square().sum(), own.values())
        for name, one in zip(own, wanted, strict=True):
            torch.testing.assert_close(found[name][j], one, rtol=1e-11, atol=1e-11, msg=name)


def test_sigma_shared_by_clients_is_one_product():
    """No tensor of σ's size a client is made: that is what the layer is for."""
    parts, made = leaves(tensors(("x", "a", "b"))), []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append((func, max((t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), default=0)))
            return out

    with Sizes():
        ops.lowrank_linear(**parts, scaling=SCALE).sum().backward()
    assert max(size for _, size in made) <= K * N * max(IN, OUT)
    products = [func for func, _ in made].count(torch.ops.aten.mm.default)
    assert products == (torch.ops.fastfact.lowrank_linear_backward.default not in {func for func, _ in made})
    assert parts["sigma"].grad is None


def test_the_compiled_kernel_is_taken_where_it_was_measured_to_be_faster(monkeypatch):
    def serves(k, n, i, o, dtype=torch.float32, own=()):
        calls = []
        kernel = torch.ops.fastfact.lowrank_linear.default
        with monkeypatch.context() as patch:
            patch.setattr(lowrank, "implementation", lambda op: lambda *args: calls.append(op) or kernel(*args))
            shapes = (k, n, i), (*own, o, i), (k, 2, i), (k, o, 2)
            ops.lowrank_linear(*(torch.zeros(s, dtype=dtype) for s in shapes))
        return bool(calls)

    monkeypatch.setattr(lowrank, "_HERE", lowrank._OF_AVX2)
    assert serves(2, 3, 512, 512) and serves(2, 3, 64, 8, torch.float64)
    assert not serves(2, 3, 513, 512) and serves(2, 3, 513, 512, torch.bfloat16) and serves(2, 64, 513, 512)
    assert not serves(2, 3, 8, 8, own=(2,))
    with monkeypatch.context() as patch:
        patch.setattr(lowrank, "WIDE", 1 << 18)
        assert not serves(2, 64, 513, 512)
    with use_backend("reference"):
        assert not serves(2, 3, 8, 8)
    monkeypatch.setattr(lowrank, "_HERE", lowrank._OF_SLOW_PRODUCTS)
    assert serves(2, 8, 513, 512) and not serves(2, 7, 8, 8) and not serves(2, 64, 8, 8, torch.bfloat16)
    monkeypatch.setattr(lowrank, "_HERE", None)
    assert not serves(2, 64, 8, 8)


def test_products_are_slow_where_mkl_has_no_avx512():
    assert backends.has_slow_products("AVX512", "AMD EPYC 9575F")
    assert not backends.has_slow_products("AVX512", "Intel(R) Xeon(R)") and not backends.has_slow_products(
        "AVX2", "AMD"
    )


def test_opcheck():
    x, _, a, b, _ = tensors(("x", "a", "b")).values()
    sigma, bias = torch.randn(OUT, IN, dtype=x.dtype), torch.randn(OUT, dtype=x.dtype)
    raw = torch.ops.fastfact
    torch.library.opcheck(raw.lowrank_linear.default, (x, None, sigma, a, b, bias, SCALE))
    y, hidden = raw.lowrank_linear(x, x + 1, sigma, a, b, bias, SCALE)
    for needs in (0b1111, 0b1001, 0b10011):
        torch.library.opcheck(raw.lowrank_linear_backward.default, (y, x, sigma, a, b, hidden, SCALE, needs))


def test_compiled_and_exported():
    parts = leaves(tensors(), ("sigma",))

    def layer(x, sigma, a, b, bias):
        return ops.lowrank_linear(x, sigma, a, b, bias, scaling=SCALE)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    others = leaves(tensors(), ("sigma",))
    check_gradients(compiled(**parts), formula(**others), parts, others)

    class Layer(torch.nn.Module):
        def forward(self, x, sigma, a, b, bias):
            return layer(x, sigma, a, b, bias)

    plain = tuple(tensors().values())
    program = torch.export.export(Layer(), plain)
    torch.testing.assert_close(program.module()(*plain), formula(*plain))
    assert not any("fastfact" in str(node.target) for node in program.graph.nodes)


def test_autocast_is_that_of_a_linear_layer():
    parts = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.lowrank_linear(**parts, scaling=SCALE)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), formula(**parts), rtol=3e-2, atol=6e-2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"a": torch.zeros(R, IN + 1)}, r"a has shape \[2, 8\], must be \[2, 7\]"),
        ({"b": torch.zeros(OUT, R + 1)}, r"b has shape \[4, 3\], must be \[4, 2\]"),
        ({"x": torch.zeros(N, IN + 1)}, r"x has shape \[5, 8\], must be \[…, 7\]"),
        ({"a": torch.zeros(K, R, IN)}, r"must be \[3, …, 7\]"),
        ({"seen": torch.zeros(N + 1, IN)}, r"seen has shape \[6, 7\]"),
        ({"scaling": float("inf")}, "scaling=inf"),
        ({"x": torch.zeros(N, IN, dtype=torch.int64)}, r"x is torch\.int64"),
    ],
)
def test_what_does_not_fit(change, error):
    with pytest.raises(ValueError, match=error):
        ops.lowrank_linear(**tensors(dtype=torch.float32) | change)
