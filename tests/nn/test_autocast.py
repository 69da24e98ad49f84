"""Layers of float32 trained under autocast: computed in its type, as a dense layer is, as one node of the graph."""

import copy

import pytest
import torch
from drawing import drawn

import fastfact as ff
from fastfact.nn.layer import FactorizedLayer
from fastfact.ops import direct

LAYERS = {
    "linear": (ff.nn.FactorizedLinear, (40, 24), {}, (5, 40)),
    "sequences": (ff.nn.FactorizedLinear, (33, 7), {"bias": False}, (2, 3, 33)),
    "3×3": (ff.nn.FactorizedConv2d, (6, 8, 3), {"padding": 1}, (2, 6, 7, 5)),
    "groups": (ff.nn.FactorizedConv2d, (8, 12, (1, 3)), {"stride": 2, "groups": 2, "bias": False}, (3, 8, 6, 9)),
    "1×1": (ff.nn.FactorizedConv2d, (16, 10, 1), {}, (2, 16, 4, 4)),
}
CASES = [(of, path, density) for of in LAYERS for path in ("reconstruct", "factored") for density in (0.3, 1.0, None)]
CASES = [(of, path, density) for of, path, density in CASES if path == "reconstruct" or density != 1.0]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def case(of, path, density):
    """(A layer, `drawn`; an input.)"""
    kind, sizes, how, shape = LAYERS[of]
    layer = drawn(kind(*sizes, **how, spec=ff.Rank1(rank=2, sparse=density is not None)), density)
    layer.path = path
    return layer, torch.randn(shape)


def run(layer, x, grad, dtype=None):
    """(y, the gradients of x and the parameters, by their names), under autocast to `dtype`."""
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = layer(x)
    inputs = {"x": x, **dict(layer.named_parameters())}
    return y, dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), grad), strict=True))


def check(layer, x, dtype):
    """Against float64. Each of x, the parts of W and W is off by half of eps at most, as are y and the gradients."""
    exact, eps = copy.deepcopy(layer).double(), torch.finfo(dtype).eps
    exact.path = "reconstruct"
    with torch.no_grad():
        grad = torch.randn_like(exact(x.double()))
    y, found = run(layer, x, grad.to(dtype), dtype)
    expected, wanted = run(exact, x.double(), grad.to(dtype).double())
    assert y.dtype == dtype
    assert (y.double() - expected).norm() <= 2 * eps * expected.norm()
    for name, want in wanted.items():
        given = x if name == "x" else layer.get_parameter(name)
        assert found[name].dtype == given.dtype
        assert (found[name].double() - want).norm() <= 2 * eps * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("of", "path", "density"), CASES)
def test_a_layer_is_one_node(of, path, density, dtype):
    layer, x = case(of, path, density)
    for given in (x, x.to(dtype)):
        for _ in range(2):  # the second is served by the node of the first
            check(layer, given, dtype)
    assert len(layer._nodes) == 2


@pytest.mark.parametrize(("of", "path", "density"), CASES)
def test_without_the_library_it_is_the_same(of, path, density):
    layer, x = case(of, path, density)
    with ff.use_backend("reference"):
        check(layer, x, torch.bfloat16)


def test_pixels_are_rows_of_one_product(prefer):
    layer, x = case("1×1", "auto", 0.3)
    taken = prefer("product")
    for _ in range(2):
        check(layer, x.to(memory_format=torch.channels_last), torch.bfloat16)
    assert len(taken) == 1  # a node serves from the second on


@pytest.mark.parametrize(("of", "path", "density"), CASES)
def test_what_is_saved_is_in_its_type(of, path, density):
    """But for the parameters, which are there anyhow: as much as a dense layer keeps."""
    layer, x = case(of, path, density)
    grad, kept = torch.ones(layer(x).shape).bfloat16(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(layer, x, grad, torch.bfloat16)
    assert any(t.shape == x.shape and t.dtype == torch.bfloat16 for t in kept)
    own = {one.data_ptr() for one in layer.parameters()}
    assert all(t.dtype != torch.float32 or t.data_ptr() in own for t in kept)


@pytest.mark.parametrize(("of", "path", "density"), CASES)
def test_second_derivatives(of, path, density):
    layer, x = case(of, path, density)

    def second(layer, x, dtype):
        x = x.detach().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = layer(x)
        inputs = [x, *layer.parameters()]
        first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), inputs)

    exact = copy.deepcopy(layer).double()
    exact.path = "reconstruct"
    for got, want in zip(second(layer, x, torch.bfloat16), second(exact, x.double(), None), strict=True):
        assert (got.double() - want).norm() <= 8 * torch.finfo(torch.bfloat16).eps * want.norm()


def test_float64_stays():
    layer, x = case("linear", "auto", 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.double()(x.double()).dtype == torch.float64


def test_a_node_serves_for_one_state_of_autocast():
    layer, x = case("linear", "factored", 0.3)
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            assert layer(x).dtype == (dtype or torch.float32)
    assert len(layer._nodes) == 3


@torch.no_grad()
@pytest.mark.parametrize("of", LAYERS)
def test_evaluation_is_one_call(of, monkeypatch):
    layer, x = case(of, "auto", 0.3)
    layer.eval()
    with torch.autocast("cpu", torch.bfloat16):
        for given in (x, x.bfloat16()):
            expected = layer(given)
            with monkeypatch.context() as patch:
                patch.setattr(type(layer), "_forward", None)
                assert torch.equal(layer(given), expected)
        layer.v.data.mul_(2)
        dense = layer.to_dense()(x)
        torch.testing.assert_close(layer(x), dense, rtol=2e-2, atol=2e-2 * dense.abs().max().item())


@torch.no_grad()
@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_evaluation_of_a_dense_mu_that_is_mostly_zeros_is_one_call(path, monkeypatch):
    layer, x = case("linear", "auto", 1.0)
    layer.prune_(0.1)
    layer.eval()
    monkeypatch.setattr(FactorizedLayer, "_choose", lambda self, *_: path)
    with torch.autocast("cpu", torch.bfloat16):
        for change in (lambda: None, lambda: layer.mu.data.mul_(-2), lambda: layer.mu.data.fill_(0.1)):
            change()
            expected = layer.to_dense()(x)
            for _ in range(2):
                found = layer(x)
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
            assert len(layer._nodes) == 1


def test_rows_that_lie_apart_are_copied_once():
    layer, x = case("sequences", "factored", 0.3)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(2):
        check(layer, turned, torch.bfloat16)
    assert direct.with_input(direct.Call(print, (None,), 0), turned, torch.bfloat16, True).args[3]
