"""The weight a layer keeps in evaluation: made once, never stale."""

import copy

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn.layers import FactorizedLayer


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(6, 8, 3, padding=1, dtype=torch.float64)
    nn.init.normal_(layer.mu)
    return layer.eval()


@pytest.fixture
def made(monkeypatch):
    """A list that grows with each weight made."""
    calls, weight = [], FactorizedLayer._weight

    def counting(self, *args):
        calls.append(self)
        return weight(self, *args)

    monkeypatch.setattr(FactorizedLayer, "_weight", counting)
    return calls


@pytest.fixture
def x():
    return torch.randn(2, 6, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected(layer, x):
    return nn.functional.conv2d(x, layer.weight.detach(), layer.bias.detach(), 1, 1)


@torch.no_grad()
def test_the_weight_is_made_once_in_evaluation(layer, x, made):
    first = layer(x)
    assert torch.equal(layer(x), first) and torch.equal(layer(x[:1]), first[:1]) and len(made) == 1
    torch.testing.assert_close(first, expected(layer, x))
    layer.eval()
    layer(x)
    assert len(made) == 3
    layer.train()
    layer(x), layer(x)
    assert len(made) == 5


def test_no_kept_weight_serves_where_gradients_are_asked_for(layer, x):
    with torch.no_grad():
        layer(x)
    layer(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@torch.no_grad()
def replace_parameter(layer):
    layer.u = nn.Parameter(2 * layer.u)


@torch.no_grad()
def write(layer):
    layer.v[0, 1, 2] += 1


def step(layer):
    optimizer = ff.optim.ProxSGD(layer.parameters(), lr=0.1, l1=0.01)
    with torch.enable_grad():
        layer(torch.ones(1, 6, 4, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()


def swap_data_twice(layer):
    for factor in (3, 5):
        layer.mu.data = layer.mu.data * factor


CHANGES = {
    "write": write,
    "step of ProxSGD": step,
    "load_state_dict": lambda layer: layer.load_state_dict({k: 2 * v for k, v in layer.state_dict().items()}),
    "parameter": replace_parameter,
    "swap of .data": swap_data_twice,
    "uncounted write": lambda layer: layer.v.data.mul_(2),
    "uncounted pruning": lambda layer: layer.mu.data.masked_fill_(layer.mu.data.abs() < 0.1, 0),
    "numpy": lambda layer: layer.mu.detach().numpy().fill(0.5),
    "prune_": lambda layer: layer.prune_(0.2),
    "compact": lambda layer: layer.compact(0.2),
    "support": lambda layer: layer.compact(0.2).set_support(layer.mu * 2, layer.mu_index),
    "state of another layer, compact": lambda layer: layer.load_state_dict(
        ff.nn.FactorizedConv2d(6, 8, 3, padding=1, dtype=torch.float64).compact(0.1).state_dict()
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("path", ["reconstruct", "auto"])
@torch.no_grad()
def test_a_change_of_a_factor_makes_it_anew(layer, x, change, path):
    layer.path = path
    before = layer(x)
    change(layer)
    after = layer(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, expected(layer, x))


@torch.no_grad()
def test_the_support_alone_may_change(layer, x):
    layer.path = "reconstruct"
    layer.compact(0.2)
    layer(x)
    layer.mu_index.copy_((layer.mu_index + 1) % layer.weight.numel()).copy_(layer.mu_index.sort().values)
    torch.testing.assert_close(layer(x), expected(layer, x))


@torch.no_grad()
def test_other_parameters_for_one_call(layer, x):
    layer(x)
    others = {name: 2 * parameter for name, parameter in layer.named_parameters()}
    got = torch.func.functional_call(layer, others, (x,))
    layer.load_state_dict(others)
    torch.testing.assert_close(got, expected(layer, x))
    torch.testing.assert_close(layer(x), expected(layer, x))


@torch.no_grad()
def test_each_dtype_and_autocast_have_their_own(layer, x):
    layer(x)
    layer.float()
    assert layer(x.float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float()).dtype == torch.bfloat16
    assert layer(x.float()).dtype == torch.float32


@torch.no_grad()
def test_a_compact_layer_chooses_its_path_for_each_shape(layer, x, monkeypatch):
    layer.compact(0.1)
    asked = []
    monkeypatch.setattr(FactorizedLayer, "_faster_factored", lambda self, x: asked.append(x.shape) or len(x) > 1)
    assert torch.equal(layer(x[:1]), layer(x[:1])) and len(asked) == 1
    torch.testing.assert_close(layer(x), expected(layer, x))
    assert len(asked) == 2


@torch.no_grad()
def test_copies_keep_none(layer, x):
    layer(x)
    twin = copy.deepcopy(layer)
    assert twin._kept is None and layer._kept is not None
    write(twin)
    torch.testing.assert_close(twin(x), expected(twin, x))
    torch.testing.assert_close(layer(x), expected(layer, x))


@pytest.fixture
def found(layer, monkeypatch):
    """A list that grows with each order of nonzeros found; the layer is compact, on the factored path."""
    layer.compact(0.2).path = "factored"
    calls, order = [], ff.ops.factored_conv2d_order

    def counting(*args, **how):
        calls.append(args)
        return order(*args, **how)

    monkeypatch.setattr(ff.ops, "factored_conv2d_order", counting)
    return calls


@torch.no_grad()
def test_the_order_of_nonzeros_is_found_once_for_each_shape(layer, x, found):
    first = layer(x)
    layer.mu.mul_(1)
    assert torch.equal(layer(x), first) and len(found) == 1
    torch.testing.assert_close(first, expected(layer, x))
    torch.testing.assert_close(layer(x[0]), expected(layer, x[:1])[0])
    assert len(found) == 2
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(last), expected(layer, x))
    assert len(found) == 3
    layer.eval()
    layer(last)
    assert len(found) == 4 and copy.deepcopy(layer)._kept_order is None
    layer.train()
    layer(x)
    assert len(found) == 4


SUPPORTS = {
    "other positions": lambda layer: layer.set_support(
        layer.mu, (layer.mu_index + 1).clamp(max=431).unique()[: len(layer.mu)]
    ),
    "fewer": lambda layer: layer.compact(0.1),
    "in place": lambda layer: layer.mu_index.copy_(torch.arange(len(layer.mu))),
    "uncounted": lambda layer: layer.mu_index.data.numpy().__setitem__(slice(None), range(len(layer.mu))),
}


@pytest.mark.parametrize("change", SUPPORTS.values(), ids=SUPPORTS)
@torch.no_grad()
def test_another_support_makes_the_order_anew(layer, x, found, change):
    layer(x)
    change(layer)
    torch.testing.assert_close(layer(x), expected(layer, x))
    assert len(found) == 2


def test_no_order_is_kept_where_gradients_are_asked_for(layer, x, found):
    layer(x).sum().backward()
    assert not found and all(parameter.grad is not None for parameter in layer.parameters())


@torch.no_grad()
def test_an_order_of_one_backend_is_not_given_to_another(layer, x, found):
    with ff.use_backend("reference"):
        first = layer(x)
    torch.testing.assert_close(layer(x), first)


@torch.no_grad()
def test_the_linear_layer_too(made):
    layer = ff.nn.FactorizedLinear(6, 4).eval()
    x = torch.randn(3, 6)
    first = layer(x)
    assert torch.equal(layer(x), first) and len(made) == 1
    layer.u.mul_(2)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_step_is_a_write_autograd_sees(layer, x):
    loss = (layer.u * layer.u).sum()
    layer(x).sum().backward()
    ff.optim.ProxSGD([layer.u], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
