"""The weight a layer keeps in evaluation: made once, never stale."""

import copy
import ctypes
import io
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn import choice, layers, weight_cache
from fastfact.nn import layer as layer_module
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.weight_cache import MOVES, WeightCache, hold, settle
from fastfact.ops import common


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(6, 8, 3, padding=1, dtype=torch.float64)
    nn.init.normal_(layer.mu)
    return layer.eval()


@pytest.fixture
def made(monkeypatch):
    """A list that grows with each weight made."""
    calls, weight = [], ff.Rank1.weight

    def counting(self, *args):
        calls.append(self)
        return weight(self, *args)

    monkeypatch.setattr(ff.Rank1, "weight", counting)
    return calls


@pytest.fixture
def x():
    return torch.randn(2, 6, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected(layer, x):
    return nn.functional.conv2d(x, layer._weight(None).detach(), layer.bias.detach(), 1, 1)


@torch.no_grad()
def test_the_weight_is_made_once_in_evaluation(layer, x, made):
    first = layer(x)
    assert torch.equal(layer(x), first) and torch.equal(layer(x[:1]), first[:1]) and len(made) == 1
    torch.testing.assert_close(first, expected(layer, x))
    layer.eval()
    layer(x)
    assert len(made) == 2
    layer.train()
    layer(x), layer(x)
    assert len(made) == 4
    layer.eval()
    layer(x), layer(x)
    assert len(made) == 5


@torch.no_grad()
def test_what_was_written_through_an_old_pointer_is_read_at_eval(large):
    layer, x = copy.deepcopy(large), torch.randn(1, SIZE, 3, 3)
    layer.path = "reconstruct"
    pointer, size = layer.mu.data_ptr(), layer.mu.nbytes
    first = layer(x)
    assert torch.equal(layer(x), first)
    ctypes.memset(pointer, 0, size)
    layer.eval()
    assert not torch.equal(layer(x), first)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))


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
    layer.set_support(layer.mu.detach(), layer.mu_index + torch.tensor([1], dtype=torch.int32))
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
@pytest.mark.parametrize("density", [None, 0.3])
def test_under_autocast_a_layer_of_that_dtype_is_kept(layer, x, made, density):
    layer, x = layer.float().eval(), x.float()
    if density is not None:
        layer.compact(density)
    model = nn.Sequential(layer, nn.Flatten(), ff.nn.FactorizedLinear(200, 3).eval())
    with torch.autocast("cpu", torch.bfloat16):
        first, once = model(x), len(made)
        assert torch.equal(model(x), first) and len(made) == once
        for change in (lambda: None, lambda: layer.u.data.mul_(-2), lambda: layer.bias.numpy().fill(3)):
            change()
            plain = copy.deepcopy(model).bfloat16()
            y, path = model(x), layer.path_for(x)
            with torch.autocast("cpu", enabled=False):
                assert y.dtype == torch.bfloat16 and torch.equal(y, plain(x.bfloat16()))
                assert path == plain[0].path_for(x.bfloat16())
        assert torch.is_autocast_enabled("cpu")
    torch.testing.assert_close(layer(x), expected(layer, x))


@torch.no_grad()
def test_under_autocast_positions_that_were_written_to_are_refused(layer, x):
    layer.float().compact(0.3)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x.float())
        layer.mu_index.add_(1)
        with pytest.raises(RuntimeError, match="mu_index"):
            layer(x.float())
        assert torch.is_autocast_enabled("cpu")


@torch.no_grad()
def test_a_compact_layer_chooses_its_path_for_each_shape(layer, x, monkeypatch, made):
    layer.compact(0.1)
    monkeypatch.setattr(FactorizedLayer, "_choose", lambda self, x, *_: "factored" if len(x) > 1 else "reconstruct")
    for _ in range(2):
        for one in (x[:1], x):
            torch.testing.assert_close(layer(one), expected(layer, one))
    assert len(made) == 5  # four times by what is expected


@torch.no_grad()
def test_copies_keep_none(layer, x):
    layer(x)
    twin = copy.deepcopy(layer)
    assert not twin._cache and layer._cache
    write(twin)
    torch.testing.assert_close(twin(x), expected(twin, x))
    torch.testing.assert_close(layer(x), expected(layer, x))


SUPPORTS = {
    "other positions": lambda layer: layer.set_support(
        layer.mu, (layer.mu_index + 1).clamp(max=431).unique()[: len(layer.mu)]
    ),
    "fewer": lambda layer: layer.compact(0.1),
    "another index": lambda layer: setattr(layer, "mu_index", torch.arange(len(layer.mu), dtype=torch.int32)),
    "data": lambda layer: setattr(layer.mu_index, "data", torch.arange(len(layer.mu), dtype=torch.int32)),
    "numpy": lambda layer: layer.mu_index.data.numpy().__setitem__(slice(None), range(len(layer.mu))),
    "one position": lambda layer: layer.mu_index.data.numpy().__setitem__(-1, 431),
}


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("change", SUPPORTS.values(), ids=SUPPORTS)
@torch.no_grad()
def test_another_support_is_seen(layer, x, change, path):
    layer.compact(0.2).path = path
    layer.mu_index[-1] = 430
    layer._note_positions()
    before = layer(x)
    assert torch.equal(layer(x), before)
    change(layer)
    after = layer(x)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, expected(layer, x))


@torch.no_grad()
def test_each_shape_of_input_has_an_order_of_its_own(layer, x):
    layer.compact(0.2).path = "factored"
    inputs = [x, x[:1], x[0], x[:, :, :3], x.contiguous(memory_format=torch.channels_last), x.float().double()]
    for _ in range(3):
        for one in inputs:
            batch = one if one.dim() == 4 else one[None]
            torch.testing.assert_close(layer(one).reshape(-1), expected(layer, batch).reshape(-1))


@torch.no_grad()
def test_the_linear_layer_too(made):
    layer = ff.nn.FactorizedLinear(6, 4).eval()
    nn.init.normal_(layer.mu)
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


SIZE = 128
"""Channels in and out: large enough that a few numbers of a factor do not stand for the others."""


@pytest.fixture(scope="module")
def large():
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(SIZE, SIZE, 3, padding=1)
    nn.init.normal_(layer.mu, std=0.1)
    return layer.eval()


def address(tensor):
    """Its numbers as a ctypes array: writes through it are seen by nobody."""
    return (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())


def through_ctypes(layer):
    view = address(layer.mu)
    for at in range(1, 60):
        view[at * 2401 + 1] += 1


def out_of_an_operation(layer):
    torch.mul(layer.mu.detach(), 2, out=layer.mu.detach())


def out_of_data(layer):
    torch.add(layer.mu.data, 1, out=layer.mu.data)


def by_an_optimizer(optimizer, **settings):
    def change(layer):
        layer.mu.grad = torch.zeros_like(layer.mu).index_fill_(1, torch.tensor([5]), 1.0)
        optimizer([layer.mu], lr=0.1, **settings).step()
        layer.mu.grad = None

    return change


def assigned(layer):
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["mu"][:, 7] *= 2
    layer.load_state_dict(state, assign=True)


def loaded(layer):
    layer.load_state_dict({name: 1.5 * tensor for name, tensor in layer.state_dict().items()})


def swapped(layer):
    torch.utils.swap_tensors(layer.mu, nn.Parameter(layer.mu.detach() * 1.5))


def from_a_vector(layer):
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(1.5 * vector, layer.parameters())


def set_(layer):
    layer.mu.detach().set_(layer.mu.detach().clone())  # of the detached tensor only: W stays
    layer.mu.data = layer.mu.data.clone().index_fill_(0, torch.tensor([9]), 0.5)


def set_storage(layer):
    other = layer.mu.detach().clone().index_fill_(0, torch.tensor([9]), 0.5)
    layer.mu.set_(other)


def through_storage(layer):
    layer.mu.untyped_storage()[4 * 1003 + 2] = 42


def storage_copied(layer):
    layer.mu.untyped_storage().copy_(layer.mu.detach().flip(0).contiguous().untyped_storage())


def through_dlpack(layer):
    torch.from_dlpack(layer.mu.detach())[3, 5] += 1


def through_memoryview(layer):
    memoryview(layer.mu.detach().numpy().reshape(-1)).cast("B")[4 * 5003 + 3] ^= 0x40


def through_an_alias(layer):
    alias = layer.mu.data.view(-1)
    layer(torch.ones(1, SIZE, 4, 4))
    alias[1234] = 3.0


def put(layer):
    layer.mu.data.put_(torch.tensor([77, 1003]), torch.tensor([2.0, 3.0]))


def by_lerp(layer):
    torch._foreach_lerp_([p.data for p in layer.parameters()], [torch.ones_like(p) for p in layer.parameters()], 0.01)


def by_copies(layer):
    for parameter in layer.parameters():
        parameter.detach().copy_(parameter.detach().flip(0) * 1.01)


WRITES = {
    "data, columns but the first": lambda layer: layer.mu.data[:, 1:].zero_(),
    "data, one element": lambda layer: layer.mu.data.__setitem__((3, 5, 1, 1), 2.0),
    "data, last element": lambda layer: layer.mu.data.view(-1).__setitem__(-1, 2.0),
    "data, second element": lambda layer: layer.mu.data.view(-1).__setitem__(1, 2.0),
    "data, every second row": lambda layer: layer.mu.data[1::2].normal_(),
    "data, every third element": lambda layer: layer.mu.data.view(-1)[1::3].mul_(2),
    "data, channel mask": lambda layer: layer.mu.data.mul_((torch.arange(SIZE) % 32 == 0).view(-1, 1, 1, 1)),
    "data, input mask": lambda layer: layer.mu.data.mul_((torch.arange(SIZE) % 2 == 0).view(1, -1, 1, 1)),
    "data, centre tap": lambda layer: layer.mu.data[:, :, 1, 1].zero_(),
    "data, all but the first tap": lambda layer: layer.mu.data.flatten(2)[:, :, 1:].zero_(),
    "data, boolean mask": lambda layer: layer.mu.data.__setitem__(layer.mu.data.abs() < 0.05, 0.0),
    "data, masked_fill_": lambda layer: layer.mu.data.masked_fill_(layer.mu.data < -0.2, 0),
    "data, index_add_": lambda layer: layer.mu.data.index_add_(1, torch.tensor([9]), torch.ones(SIZE, 1, 3, 3)),
    "data, scatter_": lambda layer: layer.mu.data.view(-1).scatter_(0, torch.tensor([1003]), 1.0),
    "data, put_": put,
    "data, narrow": lambda layer: layer.mu.data.narrow(1, 5, 1).add_(1),
    "data, transposed": lambda layer: layer.mu.data.transpose(0, 1)[5].add_(1),
    "data, swapped rows": lambda layer: layer.mu.data.copy_(layer.mu.data.roll(1, 1)),
    "data, sign": lambda layer: layer.mu.data.neg_(),
    "data, as_strided": lambda layer: layer.mu.data.as_strided((10,), (1153,), 7).add_(1),
    "data of u": lambda layer: layer.u.data[0, 0, 1].add_(1),
    "data of v": lambda layer: layer.v.data[0, 3, 7].add_(1),
    "data replaced": lambda layer: setattr(layer.mu, "data", layer.mu.data.flip(0)),
    "data, other memory format": lambda layer: setattr(
        layer.mu, "data", layer.mu.data.flip(1).contiguous(memory_format=torch.channels_last)
    ),
    "detach": lambda layer: layer.mu.detach()[:, 1:].zero_(),
    "numpy": lambda layer: layer.mu.detach().numpy().__setitem__((slice(None), 1), 0.5),
    "numpy, flat": lambda layer: layer.mu.detach().numpy().reshape(-1).__setitem__(1003, 0.5),
    "numpy of data": lambda layer: layer.mu.data.numpy().sort(axis=1),
    "memoryview": through_memoryview,
    "dlpack": through_dlpack,
    "ctypes": through_ctypes,
    "memset": lambda layer: ctypes.memset(layer.mu.data_ptr() + 4 * 1003, 0, 40),
    "storage": through_storage,
    "storage copied": storage_copied,
    "out=": out_of_an_operation,
    "out= of data": out_of_data,
    "alias": through_an_alias,
    "no_grad": lambda layer: layer.mu[3, 5].add_(1),
    "copy_": lambda layer: layer.mu.copy_(layer.mu.flip(0)),
    "init": lambda layer: nn.init.normal_(layer.mu),
    "foreach": lambda layer: torch._foreach_mul_([layer.mu.data, layer.u.data], 1.1),
    "foreach lerp": by_lerp,
    "copies": by_copies,
    "SGD": by_an_optimizer(torch.optim.SGD),
    "Adam, foreach": by_an_optimizer(torch.optim.Adam, foreach=True),
    "AdamW, fused": by_an_optimizer(torch.optim.AdamW, fused=True),
    "ProxSGD": by_an_optimizer(ff.optim.ProxSGD),
    "load_state_dict": loaded,
    "load_state_dict(assign=True)": assigned,
    "set_": set_storage,
    "data after set_": set_,
    "swap_tensors": swapped,
    "vector_to_parameters": from_a_vector,
    "deleted and set": lambda layer: setattr(layer, "mu", nn.Parameter(layer.mu.detach() * 1.5)),
    "of the parameters": lambda layer: layer._parameters.__setitem__("mu", nn.Parameter(layer.mu.detach() * 1.5)),
    "prune_": lambda layer: layer.prune_(0.5),
    "inference mode": lambda layer: torch.inference_mode()(lambda: layer.mu.data[:, 3].add_(1))(),
    "bias": lambda layer: layer.bias.data[5].add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_no_way_to_write_goes_unseen(large, write):
    layer = copy.deepcopy(large)
    x = torch.randn(1, SIZE, 4, 4, generator=torch.Generator().manual_seed(1))
    before = layer(x)
    assert torch.equal(layer(x), before) and layer._cache
    write(layer)
    after = layer(x)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, nn.functional.conv2d(x, layer._weight(None), layer.bias, padding=1))


def other_strides(layer):
    layer.v.data = layer.v.data.mT


def other_type(layer):
    layer.mu = nn.Parameter(layer.mu.detach())
    bits = nn.Parameter(layer.mu.data.view(torch.int32), requires_grad=False)
    torch.utils.swap_tensors(layer.mu, bits)


def with_gaps(layer):
    layer.v.data = torch.stack([layer.v.data, layer.v.data], -1)[..., 0]


@torch.no_grad()
def test_the_same_memory_read_in_another_way_is_a_change(large):
    layer, x = copy.deepcopy(large), torch.randn(1, SIZE, 4, 4)
    before = layer(x), layer(x)
    other_strides(layer)
    after = layer(x)
    assert torch.equal(*before) and not torch.equal(after, before[0])
    torch.testing.assert_close(after, nn.functional.conv2d(x, layer._weight(None), layer.bias, padding=1))
    other_type(layer)
    with pytest.raises(ValueError, match="mu must have the type"):
        layer(x)


@torch.no_grad()
def test_what_is_unchanged_serves_without_a_look_at_the_layer(large, monkeypatch):
    layer, x = copy.deepcopy(large), torch.randn(1, SIZE, 4, 4)
    expected = layer(x)
    monkeypatch.setattr(FactorizedLayer, "_tensors", lambda self: pytest.fail("the layer was looked at"))
    assert torch.equal(layer(x), expected)
    monkeypatch.undo()
    with_gaps(layer)
    for _ in range(3):
        torch.testing.assert_close(layer(x), expected)
    layer.v.data[0, 5, 5] += 1
    assert not torch.allclose(layer(x), expected)


@torch.no_grad()
def test_a_run_made_from_numbers_that_are_others_now_does_not_serve(layer, x):
    layer(x)
    kept = layer._cache._kept
    assert layer._cache.watch(kept) is layer._cache.watch(kept) is not None
    write(layer)
    assert layer._cache.watch(kept) is None


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def forms(layer):
    """Those, other than PyTorch's, in which W is kept."""
    return {key[0] for key in layer._cache._kept.values if isinstance(key[0], (tuple, str))}


def expected_and_allowed(function, x, weight, bias):
    """What function(x, weight, bias) is in float64, and how far from it a result may be: twice as far as in its own
    dtype, and as sums in another order are, which differ by roundings of their terms; float64 itself rounds, too."""
    exact = function(x.double(), weight.double(), bias if bias is None else bias.double())
    terms = function(x.double().abs(), weight.double().abs(), None)
    error = (function(x, weight, bias).double() - exact).abs()
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps + torch.finfo(torch.float64).eps
    return exact, (2 * error.max() + eps * terms.max()).item() if x.numel() else 0


@pytest.fixture
def asked(monkeypatch):
    """What was asked about a product with a kept weight, and the orders there were, the last of which is taken."""
    found, choose = [], choice.choose

    def answer(work, sides):
        if work.step != "kept":
            return choose(work, sides)
        names = list(choice.times(sides()))
        found.append((work, names))
        assert names[0] == "reconstruct"
        return names[-1]

    monkeypatch.setattr(choice, "choose", answer)
    return found


def orders(dtype, inputs):
    """The orders there are for a linear layer's weight of this dtype."""
    onednn = dtype in (torch.bfloat16, torch.float16) and layers._onednn_computes(dtype)
    own = dtype == torch.float32 or layers._has_panels(dtype, inputs % 2 == 0)
    return ["product"] * onednn + ["panels"] * own


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(300, 230), (301, 220)], ids=str)
@torch.no_grad()
def test_a_linear_layer_keeps_its_weight_in_another_order(asked, sizes, dtype, bias):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(*sizes, bias=bias, dtype=dtype).eval()
    nn.init.normal_(layer.mu, std=0.1)
    layer.path, inputs = "reconstruct", sizes[0]
    found = []
    for shape in ((40, inputs), (3, inputs), (41, inputs), (2, 20, inputs), (0, inputs), (inputs,), (20, 1, inputs)):
        x = torch.randn(*shape[:-1], 2 * inputs, dtype=dtype)[..., ::2]
        expected, allowed = expected_and_allowed(nn.functional.linear, x, layer._weight(None), layer.bias)
        for given in (x, x.contiguous()):
            torch.testing.assert_close(layer(given).double(), expected, rtol=0, atol=allowed)
        found.append(forms(layer))
    there = orders(dtype, inputs)
    assert found == [found[0]] * len(found) and len(found[0]) == bool(there)
    assert [names for _, names in asked] == [["reconstruct", *there]] * len(asked) and bool(asked) == bool(there)
    layer.v.data += 1
    assert (layer(x).double() - expected).abs().max() > 0.1


@pytest.mark.parametrize("side", [1, 3])
@torch.no_grad()
def test_a_convolution_of_few_pixels_keeps_its_weight_in_the_order_of_a_product(asked, side):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(300, 230, 1).eval()
    nn.init.normal_(layer.mu, std=0.1)
    layer.to(memory_format=torch.channels_last).path = "reconstruct"
    for n in (5, 33):
        x = torch.randn(n, 300, side, side).contiguous(memory_format=torch.channels_last)
        expected, allowed = expected_and_allowed(nn.functional.conv2d, x, layer._weight(True), layer.bias)
        for _ in range(2):
            y = layer(x)
            torch.testing.assert_close(y.double(), expected, rtol=0, atol=allowed)
            assert y.is_contiguous(memory_format=torch.channels_last)
    assert forms(layer) == {"panels"} and len(asked) == 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_convolution_in_channels_last_keeps_its_weight_in_the_form_of_onednn(dtype, bias):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(20, 12, 3, stride=2, padding=1, groups=2, bias=bias, dtype=dtype).eval()
    nn.init.normal_(layer.mu, std=0.1)
    layer.to(memory_format=torch.channels_last).path = "reconstruct"

    def convolution(x, weight, bias):
        return nn.functional.conv2d(x, weight, bias, 2, 1, 1, 2)

    for shape in ((4, 20, 9, 9), (1, 20, 6, 11)):
        x = torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        expected, allowed = expected_and_allowed(convolution, x, layer._weight(True), layer.bias)
        for _ in range(2):
            y = layer(x)
            torch.testing.assert_close(y.double(), expected, rtol=0, atol=allowed)
            assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
    assert len(forms(layer)) == layers._onednn_computes(dtype)


@torch.no_grad()
def test_a_weight_is_packed_only_where_that_is_faster(monkeypatch):
    layer = ff.nn.FactorizedLinear(300, 70).eval()
    layer.path = "reconstruct"
    monkeypatch.setattr(choice, "choose", lambda work, sides: "reconstruct")
    layer(torch.randn(40, 300))
    assert len(layer._cache) == 1 and not forms(layer)


@torch.no_grad()
def test_a_weight_is_not_packed_where_pytorch_may_round(asked, monkeypatch):
    layer = ff.nn.FactorizedLinear(300, 70).eval()
    layer.path = "reconstruct"
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    layer(torch.randn(40, 300))
    assert len(layer._cache) == 1 and not forms(layer) and not asked


CONVERSIONS = {
    "to": lambda layer: layer.double(),
    "compact": lambda layer: layer.compact(0.3),
    "spec": lambda layer: setattr(layer, "spec", ff.Rank1("view")),
    "padding": lambda layer: setattr(layer, "padding", (2, 2)),
    "stride": lambda layer: setattr(layer, "stride", (2, 2)),
    "dilation": lambda layer: setattr(layer, "dilation", (2, 1)),
}


@pytest.mark.parametrize("path", ["reconstruct", "factored", "auto"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("change", CONVERSIONS.values(), ids=CONVERSIONS)
@torch.no_grad()
def test_a_change_of_the_layer_is_seen(layer, x, change, compact, path):
    if compact:
        layer.compact(0.2)
    if change is CONVERSIONS["spec"] or (path == "factored" and not compact):
        path = "reconstruct"
    layer.path = path
    layer(x), layer(x)
    change(layer)
    how = layer.stride, layer.padding, layer.dilation, layer.groups
    for _ in range(2):
        torch.testing.assert_close(layer(x), nn.functional.conv2d(x, layer._weight(None), layer.bias, *how))


def in_threads(*bodies, seconds=60):
    errors = []

    def run(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    for error in errors:
        raise error


@pytest.mark.parametrize("path", ["reconstruct", "factored", "auto"])
def test_threads_share_a_model_for_inputs_of_two_shapes(path):
    torch.manual_seed(0)
    model = nn.Sequential(*(ff.nn.FactorizedConv2d(8, 8, 3, padding=1) for _ in range(4))).eval()
    for layer in model:
        nn.init.normal_(layer.mu, std=0.2)
        layer.compact(0.3).path = path
    inputs = [torch.randn(2, 8, side, side) for side in (12, 8, 5)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    assert all(torch.isfinite(y).all() for y in expected)

    @torch.no_grad()
    def evaluate(start):
        for turn in range(400):
            which = (start + turn) % len(inputs)
            torch.testing.assert_close(model(inputs[which]), expected[which])

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(*(lambda start=start: evaluate(start) for start in range(6)))
    finally:
        sys.setswitchinterval(switching)


@pytest.mark.parametrize("back", [False, True])
@torch.no_grad()
def test_a_weight_whose_factors_change_while_it_is_made_is_not_kept(back):
    cache, factor = WeightCache(), torch.zeros(4)

    def make():  # while another thread puts other numbers in, and perhaps the first ones back
        factor.add_(1)
        weight = factor.clone()
        if back:
            factor.sub_(1)
        return weight

    cache.of([factor]).value("key", make)
    factor.zero_()
    assert cache.of([factor]).value("key", factor.clone).tolist() == [0.0] * 4


def test_a_digest_tells_apart():
    digest = torch.ops.fastfact.digest
    x = torch.arange(300_000.0)
    seen = {digest([x])}
    for at in (0, 1, 2, 16, 17, 16_383, 16_384, 131_072, 299_998, 299_999):
        y = x.clone()
        y[at] = -1.0
        seen.add(digest([y]))
    y = x.clone()
    y[[5, 6]] = x[[6, 5]]
    others = [
        [y],
        [x.reshape(300, 1000)],
        [x.reshape(1000, 300)],
        [x.reshape(300, 1000).T],
        [x.double()],
        [x, x],
        [],
        [x[1:]],
    ]
    others += [[torch.empty(0)], [torch.zeros(1)], [torch.zeros(2)], [torch.zeros(1, 1)], [torch.zeros(2)[::2]]]
    others += [[x[:5], x[5:]], [x[5:], x[:5]], [x[:4], x[4:]]]
    for tensors in others:
        found = digest(tensors)
        assert found not in seen and found == digest(tensors), [t.shape for t in tensors]
        seen.add(found)
    assert digest([x[None]]) != digest([x]) and digest([x.clone()]) == digest([x])
    gaps = torch.zeros(6, 8)[:, ::2].copy_(x[:24].reshape(6, 4))
    gaps_before = digest([gaps])
    gaps[5, 3] += 1
    assert digest([gaps]) != gaps_before


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_linear_layer_of_several_rows_sees_every_write(bias):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(6, 4, bias=bias).eval()
    nn.init.normal_(layer.mu)
    for change in ("nothing", "u", "mu", "bias"):
        if change != "nothing" and getattr(layer, change) is not None:
            getattr(layer, change).data.mul_(2)
        for shape in ((3, 6), (1, 6), (6,), (2, 3, 6), (0, 6)):
            x = torch.randn(shape)
            expected = nn.functional.linear(x, layer._weight(None), layer.bias)
            for _ in range(2):
                y = layer(x)
                torch.testing.assert_close(y, expected)
                assert y.stride() == expected.stride()
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 5))


@torch.no_grad()
def test_a_factored_layer_is_one_call_that_sees_every_change(layer, x):
    layer.compact(0.2).path = "factored"
    changes = [
        lambda: layer.mu.data.mul_(2),
        lambda: setattr(layer, "u", nn.Parameter(2 * layer.u)),
        lambda: setattr(layer, "bias", None),
        lambda: layer.set_support(layer.mu.flip(0)[:9], layer.mu_index[:9].clone()),
        lambda: setattr(layer, "path", "reconstruct"),
        lambda: nn.utils.parametrize.register_parametrization(layer, "v", Twice()),
    ]
    for change in changes:
        before = layer(x)
        assert torch.equal(layer(x), before)
        assert len(layer._nodes) == 1
        change()
        after = layer(x)
        assert not torch.equal(after, before)
        bias = None if layer.bias is None else layer.bias
        torch.testing.assert_close(after, nn.functional.conv2d(x, layer._weight(None), bias, 1, 1))
        layer.path = "factored"


@pytest.mark.parametrize("base", ["zeros", "ones", "normal"])
def test_a_digest_sees_changes_that_could_cancel(base):
    digest = torch.ops.fastfact.digest
    torch.manual_seed(0)
    x = {"zeros": torch.zeros, "ones": torch.ones, "normal": torch.randn}[base](2048)
    bits = x.view(torch.int32)
    seen = {digest([x])}
    for distance in (1, 2, 8, 16, 32, 63, 64, 65, 128, 192, 640, 1024):
        for bit in (0, 1, 15, 16, 22, 23, 30, 31):
            for first in (0, 5, 511, 1000):
                changed = bits.clone()
                changed[[first, first + distance]] ^= 1 << bit if bit < 31 else -(1 << 31)
                seen.add(digest([changed.view(torch.float32)]))
    whole = [-x - 0.0, 2 * x, x.roll(1), x.roll(64), x.flip(0), x.view(32, 64).flip(0).flatten()]
    whole = [one for one in whole if not torch.equal(one.view(torch.int32), bits)]
    # Two numbers that change places are the same pair of changes where they differ in that bit alone.
    assert len({digest([one]) for one in whole} | seen) >= 12 * 8 * 4 + 1 + len({tuple(one.tolist()) for one in whole})


@torch.no_grad()
def test_what_copies_the_attributes_of_a_layer_leaves_what_serves_as_it_is(layer, x):
    for change in (lambda: setattr(layer, "u", nn.Parameter(2 * layer.u)), lambda: layer.v.data.mul_(2)):
        expected = layer(x)
        torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), expected)
        assert torch.equal(layer(x), expected) and layer._nodes
        change()
        after = layer(x)
        assert not torch.equal(after, expected)
        torch.testing.assert_close(after, nn.functional.conv2d(x, layer._weight(None), layer.bias, 1, 1))


def digest(tensor):
    return torch.ops.fastfact.digest([tensor])


def test_numbers_that_are_held_are_not_read_again():
    tensor = torch.zeros(2048)
    at = address(tensor)
    before, held = digest(tensor), hold(tensor)
    at[1000] = 1
    assert held is not None and digest(tensor) == before
    del held
    assert digest(tensor) != before


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.data.add_(1),
        lambda t: t.view(2, -1)[1].zero_(),
        lambda t: t.numpy().fill(3),
        lambda t: address(t).__setitem__(7, 5),
        lambda t: torch.from_dlpack(t).add_(1),
    ],
)
def test_a_write_moves_what_is_held(write):
    tensor = torch.ones(2048)
    held, copy_of, before = hold(tensor), tensor.clone(), digest(tensor)
    write(tensor)
    assert held is not None and not torch.equal(tensor, copy_of) and digest(tensor) != before


def test_what_others_may_write_to_is_not_held():
    tensor = torch.ones(2048)
    array = tensor.numpy()
    assert hold(tensor) is None
    del array
    assert hold(torch.ones(16)) is None
    assert hold(torch.ones(4096)[:2048]) is None
    assert hold(torch.ones(2048).share_memory_()) is None
    file = io.BytesIO()
    torch.save(torch.ones(2048), file)
    file.seek(0)
    loaded = torch.load(file)  # which has no allocator to move it
    at = loaded.data_ptr()
    assert hold(loaded) is None
    settle(loaded)
    assert loaded.data_ptr() != at and loaded.eq(1).all() and hold(loaded) is not None


def test_what_others_see_stays_where_it_is():
    array = np.ones(2048, dtype=np.float32)
    for tensor in (torch.from_numpy(array), torch.ones(2048).share_memory_(), torch.ones(2048)):
        at = tensor.data_ptr()
        settle(tensor)
        assert tensor.data_ptr() == at


def test_a_layer_from_a_file_goes_on_as_any_other(large):
    layer, x = large, torch.randn(2, SIZE, 6, 6)
    file = io.BytesIO()
    torch.save(layer.compact(0.5), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(loaded(x), layer.eval()(x))
    assert all(hold(tensor) for tensor in (loaded.mu, loaded.mu_index))
    for parameter in loaded.parameters():
        parameter.data.add_(1)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), nn.functional.conv2d(x, loaded.weight, loaded.bias, padding=1))
    loaded.train()(x).sum().backward()
    torch.save(loaded.state_dict(), io.BytesIO())


@torch.no_grad()
def test_an_array_of_before_writes_to_factors_that_are_watched(large):
    layer, x = copy.deepcopy(large), torch.randn(1, SIZE, 3, 3)
    array = layer.mu.numpy()
    for _ in range(3):
        torch.testing.assert_close(layer(x), expected(layer, x))
        array[5] += 1


@torch.no_grad()
def test_factors_that_are_moved_in_each_call_are_held_no_more(large):
    layer, x = copy.deepcopy(large), torch.randn(1, SIZE, 3, 3)
    layer.path = "reconstruct"

    def holds():
        layer(x)
        watch = layer._cache._watch
        return not any(
            one is layer.mu and isinstance(held, torch.Tensor)
            for one, held in zip(watch.tensors, watch.held, strict=True)
        )

    found = []
    for _ in range(2 * MOVES):
        found.append(holds())
        layer.mu.data_ptr()
    assert found[0] and not found[-1]
    layer.eval()
    assert holds()


@torch.no_grad()
@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_positions_are_held_and_a_write_to_them_is_seen(large, path):
    layer, x = copy.deepcopy(large).compact(0.2), torch.randn(1, SIZE, 3, 3)
    layer.path = path
    for at in (5, 2000, -1):
        layer(x)
        assert layer._held[1] is not None
        taken = set(layer.mu_index.tolist())
        layer.mu_index.data.numpy()[at] = layer.mu_index[at] + next(
            k for k in (1, -1) if int(layer.mu_index[at]) + k not in taken
        )
        torch.testing.assert_close(layer(x), expected(layer, x))


@torch.no_grad()
def test_positions_that_were_moved_are_held_again(large):
    layer = copy.deepcopy(large).compact(0.2)
    first = layer._held
    torch.save(layer.state_dict(), io.BytesIO())
    layer.train()
    assert layer._held[0] != first[0] and layer._held[1] is not None
    again = layer._held
    layer.eval()
    assert layer._held is again
    assert copy.deepcopy(layer)._held[0] != again[0]


@torch.no_grad()
def test_a_weight_that_is_read_again_is_kept_and_nobody_writes_to_it(made):
    layer = ff.nn.FactorizedLinear(40, 30, spec=ff.Rank1()).eval()
    nn.init.normal_(layer.mu)
    layer.compact(0.5)
    truth = layer.to_dense().weight
    layer.train().eval()
    made.clear()
    assert torch.equal(layer.weight, truth) and not len(layer._cache), "what is looked at once takes no memory"
    assert all(torch.equal(layer.weight, truth) for _ in range(3)) and len(made) == 2
    layer.weight.detach().mul_(2)
    layer.weight.numpy()[:] = 0
    assert torch.equal(layer.weight, truth) and len(made) == 2
    with pytest.raises(RuntimeError, match="no effect"):
        layer.weight.zero_()
    layer.mu.data.numpy()[:] = 0
    low_rank = torch.einsum("ri,ro->oi", layer.u, layer.v)
    for _ in range(3):
        torch.testing.assert_close(torch.Tensor(layer.weight), low_rank)
    layer.train()
    assert not len(layer._cache)
    with torch.enable_grad():
        assert layer.weight.requires_grad


def as_on_a_gpu(monkeypatch):
    """Numbers are not read: what is kept serves while the factors are held."""
    monkeypatch.setattr(weight_cache, "_on_cpu", lambda tensors: False)
    monkeypatch.setattr(weight_cache, "_on_gpu", lambda tensors: True)
    monkeypatch.setattr(weight_cache, "LEAST", 1)
    monkeypatch.setattr(weight_cache.direct, "hold", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))


@torch.no_grad()
def test_a_weight_that_is_read_on_a_gpu_is_kept_until_eval(monkeypatch, made):
    as_on_a_gpu(monkeypatch)
    layer = ff.nn.FactorizedLinear(64, 48).eval()
    for turn in range(3):
        for kept in (False, True, True):
            layer.weight  # noqa: B018
            assert bool(len(layer._cache)) == kept, turn
        layer.eval()
    assert len(made) == 6


@torch.no_grad()
def test_what_a_cuda_graph_reads_stays_where_it_is(monkeypatch):
    """Once a layer was recorded, a checkpoint of the same positions is loaded into the memory of before."""
    as_on_a_gpu(monkeypatch)
    layer = ff.nn.FactorizedLinear(64, 48)
    nn.init.normal_(layer.mu)
    layer.compact(0.1).eval()
    saved = copy.deepcopy(layer.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(layer_module, "capturing", lambda x: True)
        layer(torch.randn(3, 64))
    before = [common.address(t) for t in layer.state_dict().values()]
    layer(torch.randn(3, 64))
    layer.load_state_dict(saved)
    assert [common.address(t) for t in layer.state_dict().values()] == before


def test_an_operation_that_was_under_way_is_seen_once_it_ends():
    """One of another thread: it had asked for the memory before that was held, and counts as a write when it ends."""
    for layer, x in (
        (ff.nn.FactorizedConv2d(SIZE, SIZE, 3, padding=1), torch.randn(1, SIZE, 5, 5)),
        (ff.nn.FactorizedLinear(SIZE, SIZE), torch.randn(3, SIZE)),
    ):
        layer.eval()
        last = layer.mu.data_ptr() + 4 * (layer.mu.numel() - 1)
        with torch.no_grad():
            layer(x), layer(x)
            ctypes.c_float.from_address(last).value = 9.0
            torch.autograd.graph.increment_version(layer.mu)
            torch.testing.assert_close(layer(x), layer.to_dense()(x))
