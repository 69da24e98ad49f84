"""1×1 convolutions as one product of all pixels: the path "product"."""

import copy

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn.layers import FactorizedConv2d, FactorizedLinear

SHAPES = [(3, 6, 5, 4), (2, 6, 1, 1), (1, 6, 3, 1), (2, 1, 3, 3)]


@pytest.fixture
def product(prefer):
    return prefer("product")


def layer_of(channels, bias=True, dtype=torch.float64, spec=None):
    torch.manual_seed(0)
    layer = FactorizedConv2d(channels, 7, 1, bias=bias, dtype=dtype, spec=spec)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def image(shape, channels_last, dtype=torch.float64):
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x.to(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["dense", "compact", "none", "low rank"])
def test_it_is_the_dense_layer(product, shape, bias, channels_last, form):
    spec = {"none": ff.Rank1(sparse=False), "low rank": ff.LowRank(0.5)}.get(form)
    layer = layer_of(shape[1], bias, spec=spec)
    if form == "compact":
        layer.compact(0.5)
    dense, x = layer.to_dense(), image(shape, channels_last).requires_grad_()
    y, expected = layer(x), dense(x)
    assert bool(product) == ((channels_last and shape[1] > 1) or shape[2:] == (1, 1))
    assert y._base is None and y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)
    for gradient in (torch.randn_like(expected), torch.randn_like(expected).contiguous()):
        found = torch.autograd.grad(y, [x, *layer.parameters()], gradient, retain_graph=True)
        by_dense = torch.autograd.grad(expected, [x, *dense.parameters()], gradient, retain_graph=True)
        torch.testing.assert_close(found[0], by_dense[0])
        reached = torch.autograd.grad(layer.weight, [*layer.factors().values()], by_dense[1])
        by_name = dict(zip([name for name, _ in layer.named_parameters()], found[1:], strict=True))
        for name, expected_gradient in zip(layer.factors(), reached, strict=True):
            torch.testing.assert_close(by_name[name], expected_gradient)
        if bias:
            torch.testing.assert_close(by_name["bias"], by_dense[2])


def test_gradients_of_first_and_second_order(product):
    layer, x = layer_of(3).compact(0.5), image((2, 3, 2, 3), True).requires_grad_()
    parameters = tuple(layer.parameters())

    def forward(x, *_):
        return layer(x)

    assert torch.autograd.gradcheck(forward, (x, *parameters))
    assert torch.autograd.gradgradcheck(forward, (x, *parameters))
    assert product


@torch.no_grad()
def test_evaluation_keeps_the_weight_and_sees_every_write(product):
    layer, x = layer_of(6).compact(0.5).eval(), image((3, 6, 5, 4), True)
    for _ in range(3):
        torch.testing.assert_close(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias))
    assert layer._nodes and len(product) == 1
    layer.mu.data[3] += 1
    layer.bias.data[1] += 1
    torch.testing.assert_close(layer(x), nn.functional.conv2d(x, layer.weight, layer.bias))


@pytest.mark.parametrize("kind", ["linear", "pixels", "one pixel each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows, i, o", [(1, 7, 3), (1, 64, 300), (2, 30, 17), (3, 5, 64), (15, 12, 33), (17, 40, 20)])
@torch.no_grad()
def test_products_of_few_rows_in_evaluation(prefer, kind, rows, i, o, dtype):
    prefer("reconstruct")
    torch.manual_seed(rows)
    if kind == "linear":
        layer, x = FactorizedLinear(i, o), torch.randn(rows, 1, i)
    else:
        layer = FactorizedConv2d(i, o, 1)
        x = image((1, i, 1, rows) if kind == "pixels" else (rows, i, 1, 1), True)
    nn.init.normal_(layer.mu)
    layer, x = layer.compact(0.5).to(dtype).eval(), x.to(dtype)
    for _ in range(2):
        y, wanted = layer(x), layer.to_dense()(x)
        exact = copy.deepcopy(layer.to_dense()).double()(x.double())
        allowed = 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (y - exact).abs().max() <= 2 * (wanted - exact).abs().max() + allowed
        assert y.stride() == wanted.stride()
        layer.mu.data[0] += 1


def test_what_it_gives_may_be_written_to(product):
    layer, x = layer_of(6), image((3, 6, 5, 4), True)
    expected = nn.functional.conv2d(x, layer.weight, layer.bias).relu()
    torch.testing.assert_close(layer(x).relu_(), expected)
    with torch.no_grad():
        y = layer.eval()(x)
    y.mul_(layer.bias.sum())
    assert len(product) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_a_product(product, dtype):
    layer, x = layer_of(6, dtype=dtype), image((3, 6, 5, 4), True, dtype)
    exact = nn.functional.conv2d(x.double(), layer.weight.double(), layer.bias.double())
    error = (nn.functional.conv2d(x, layer.weight, layer.bias) - exact).abs().max()
    assert (layer(x) - exact).abs().max() <= 2 * error + torch.finfo(dtype).eps and product


@pytest.mark.parametrize(
    "settings",
    [
        {"stride": 2},
        {"padding": 1},
        {"groups": 2},
        {"padding": "same", "kernel_size": 3},
        {"kernel_size": 3},
    ],
    ids=str,
)
def test_other_convolutions_have_no_such_path(product, settings):
    layer = FactorizedConv2d(**{"in_channels": 4, "out_channels": 6, "kernel_size": 1} | settings)
    layer(image((2, 4, 5, 5), True, torch.float32))
    assert not product
