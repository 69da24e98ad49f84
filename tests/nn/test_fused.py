"""The fused convolution through its public function and the layers: every layout against the weight made and convolved.

The Triton kernels behind it are tested in test_kernels_conv.py.
"""

import pytest
import torch
import torch.nn.functional as F

import fastfact as ff
from fastfact import ops
from fastfact.base import formats

LAYOUTS = ["spatial", "kernel", "view"]
SIZE, HOW = (6, 3, 3, 2), {"stride": (2, 1), "padding": (1, 0), "groups": 2}


def draw(layout, clients=(), rank=2, dtype=torch.float64):
    torch.manual_seed(0)
    o, i, kh, kw = SIZE
    sides = ((rank, i, kh), (rank, o, kw)) if layout == "kernel" else ((rank, kh, kw), (rank, o, i))
    shapes = ((4, 2 * i, 7, 6), *sides, SIZE, (o,))
    return [torch.randn(*clients, *shape, dtype=dtype) for shape in shapes]


def made(x, u, v, mu, bias, layout):
    return F.conv2d(x, ops.rank1_weight(u, v, mu, layout=layout), bias, **HOW)


def grads(function, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_the_convolution_with_the_weight(layout):
    tensors = draw(layout)
    ours = grads(
        lambda x, u, v, mu, b: ops.fused_conv2d(x, u, v, mu, None, b, layout=layout, size=SIZE, **HOW), tensors
    )
    for one, other in zip(ours, grads(lambda *t: made(*t, layout), tensors), strict=True):
        torch.testing.assert_close(one, other)


def test_on_a_support_and_without_factors():
    x, u, v, mu, bias = draw("kernel")
    index = torch.tensor([0, 7, 30, 31, 32, 95], dtype=torch.int32)
    values = mu.flatten()[index.long()]
    mu = torch.zeros_like(mu).flatten().index_put((index.long(),), values).reshape(SIZE)
    for factors in ((u, v), (None, None)):
        weight = mu if factors[0] is None else ops.rank1_weight(u, v, mu, layout="kernel")
        y = ops.fused_conv2d(x, *factors, values, index, bias, layout="kernel", size=SIZE, **HOW)
        torch.testing.assert_close(y, F.conv2d(x, weight, bias, **HOW))
    with pytest.raises(ValueError, match="must be given"):
        ops.fused_conv2d(x, size=SIZE, **HOW)
    with pytest.raises(ValueError, match="mu has shape"):
        ops.fused_conv2d(x, mu=mu[:, :2], size=SIZE, **HOW)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vmap_of_grad(layout):
    clients = draw(layout, (3,))

    def loss(x, u, v, mu, bias):
        return ops.fused_conv2d(x, u, v, mu, None, bias, layout=layout, size=SIZE, **HOW).square().sum()

    every = tuple(range(5))
    mapped = torch.func.vmap(torch.func.grad(loss, every))(*clients)
    together = torch.func.grad(loss, every)(*clients)
    for k in range(3):
        alone = torch.func.grad(loss, every)(*(t[k] for t in clients))
        for one, some, other in zip(mapped, together, alone, strict=True):
            torch.testing.assert_close(one[k], other)
            torch.testing.assert_close(some[k], other)


def test_compile_and_opcheck():
    x, u, v, mu, bias = draw("spatial", dtype=torch.float32)

    def function(x, u, v, mu, bias):
        return ops.fused_conv2d(x, u, v, mu, None, bias, size=SIZE, **HOW).relu()

    ours = grads(torch.compile(function, fullgraph=True, backend="aot_eager"), (x, u, v, mu, bias))
    for one, other in zip(ours, grads(function, (x, u, v, mu, bias)), strict=True):
        torch.testing.assert_close(one, other)
    index = torch.arange(0, 108, 5, dtype=torch.int32).unsqueeze(0)
    for last, at in ((False, None), (True, None), (False, index)):
        images = formats.to_format(x.unsqueeze(0), last)
        factors = (u.unsqueeze(0), v.unsqueeze(0), mu.unsqueeze(0) if at is None else mu.flatten()[at.long()], at)
        settings = (formats.SPATIAL, SIZE, last, (2, 1), (1, 0), (1, 1), 2)
        op = torch.ops.fastfact
        y = op.fused_conv2d(images, *factors, None, *settings)
        torch.library.opcheck(op.fused_conv2d.default, (images, *factors, bias.unsqueeze(0), *settings))
        torch.library.opcheck(op.fused_conv2d_dx.default, (y, *factors, images.shape[1:], last, *settings))
        torch.library.opcheck(op.fused_conv2d_dw.default, (y, images, *factors[:2], at, *settings, 7))


@pytest.mark.parametrize(
    "spec",
    [
        ff.Rank1(),
        ff.Rank1(layout="kernel", rank=2),
        ff.Rank1(sparse=False),
        ff.LowRank(0.5, scaling=0.5),
        ff.Hadamard(),
    ],
)
def test_the_layers_fused_path(spec):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(4, 6, 3, stride=2, padding=1, spec=spec).double()
    for factor in layer.factors().values():
        torch.nn.init.normal_(factor)
    x = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    layer.path = "reconstruct"
    expected = layer(x)
    layer.path = "fused"
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[0]), expected[0])
    if spec.sparse_factor:
        layer.path = "auto"
        if "mu" in layer.factors():
            layer.compact(0.3)
        expected = layer(x)
        layer.path = "fused"
        torch.testing.assert_close(layer(x), expected)


def test_where_there_is_no_fused_path():
    layer = ff.nn.FactorizedLinear(4, 6)
    with pytest.raises(ValueError, match="must be one of 'auto', 'reconstruct', 'factored'"):
        layer.path = "fused"


@pytest.mark.parametrize("settings", [{"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}], ids=str)
def test_padding_of_any_kind_is_added_before(settings):
    layer, x = ff.nn.FactorizedConv2d(4, 6, 2, **settings, dtype=torch.float64), torch.randn(1, 4, 5, 5).double()
    expected = layer(x)
    layer.path = "fused"
    torch.testing.assert_close(layer(x), expected)


def test_without_mu_the_fused_path_is_automatic_only_where_it_makes_no_weight():
    """What costs as much as W is left to the dense layer of a GPU, but for clients."""

    def in_two(spec, groups=1, kernel=3):
        return ff.nn.FactorizedConv2d(8, 8, kernel, groups=groups, spec=spec)._in_two_parts()

    assert in_two(ff.Rank1(rank=8, sparse=False)) and not in_two(ff.Rank1(rank=9, sparse=False))
    assert in_two(ff.Rank1("kernel", 11, False)) and not in_two(ff.Rank1("kernel", 12, False))
    assert not in_two(ff.Rank1("kernel", 1, False), groups=2) and not in_two(ff.Rank1("view", 1, False))
    assert not in_two(ff.Rank1()) and not in_two(ff.LowRank())
    assert not in_two(ff.Rank1("kernel", 1, False), kernel=1)


@pytest.mark.parametrize(("ratio", "once"), [(0.1, True), (0.9, False)])
def test_low_rank_layers_that_share_sigma_run_it_once(ratio, once):
    """Under vmap with σ not mapped, σ meets all clients in one ungrouped convolution, unless B A costs more than W."""
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(8, 10, 3, padding=1, spec=ff.LowRank(ratio)).double()
    layer.path = "fused"
    factors = {name: p.detach() for name, p in layer.named_parameters()}
    personal = {name: torch.randn(3, *factors[name].shape, dtype=torch.float64) for name in ("A", "B")}
    x = torch.randn(3, 2, 8, 5, 5, dtype=torch.float64)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.convolution.default:
                seen.append((tuple(args[0].shape), args[-1]))
            return function(*args, **(kwargs or {}))

    def run(personal, x):
        return torch.func.functional_call(layer, {**factors, **personal}, (x,))

    with Watch():
        y = torch.func.vmap(run)(personal, x)
    assert (((6, 8, 5, 5), 1) in seen) == once
    for k in range(3):
        weight = ops.lowrank_weight(factors["sigma"], personal["A"][k], personal["B"][k], layer.size)
        torch.testing.assert_close(y[k], F.conv2d(x[k], weight, layer.bias, padding=1))


@pytest.mark.parametrize("spec", [ff.Rank1(), ff.Rank1(sparse=False), ff.LowRank(), ff.Hadamard()])
@pytest.mark.parametrize("path", ["reconstruct", "fused"])
def test_channels_last_layers_under_vmap(spec, path):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(4, 6, 3, spec=spec).double().to(memory_format=torch.channels_last)
    layer.path = path
    state = {n: torch.stack([p.detach(), 2 * p.detach()]) for n, p in layer.named_parameters()}
    x = torch.randn(2, 3, 5, 5, 4, dtype=torch.float64).movedim(-1, 2)
    y = torch.func.vmap(lambda state, x: torch.func.functional_call(layer, state, (x,)))(state, x)
    for k in range(2):
        alone = torch.func.functional_call(layer, {n: t[k] for n, t in state.items()}, (x[k],))
        torch.testing.assert_close(y[k], alone)


@pytest.mark.parametrize("path", ["fused", "factored"])
def test_autocast(path):
    """The paths without the weight compute in the dtype in which the convolution with it would."""
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(4, 6, 3, spec=ff.Rank1(sparse=False))
    x = torch.randn(2, 4, 7, 7)
    outs = {}
    for layer.path in ("reconstruct", path):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs[layer.path] = layer(layer(x)[:, :4])
        outs[layer.path].sum().backward()
    assert outs[path].dtype == outs["reconstruct"].dtype == torch.bfloat16 and layer.u.grad.dtype == torch.float32
    torch.testing.assert_close(outs[path], outs["reconstruct"], rtol=0.05, atol=0.02)
