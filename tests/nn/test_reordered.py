"""Convolutions in evaluation with W kept in oneDNN's own form."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastfact.nn import layers
from fastfact.nn.layers import FactorizedConv2d

pytestmark = pytest.mark.skipif(layers._onednn() is None, reason="PyTorch without oneDNN")

CASES = {
    "3×3": ((6, 20, 3), {"padding": 1}),
    "depthwise, strided": ((24, 24, 5), {"padding": 2, "stride": 2, "groups": 24}),
    "groups, dilated": ((16, 8, 3), {"groups": 4, "dilation": (2, 1)}),
    "1×1": ((32, 48, 1), {"bias": False}),
    "3×5, same": ((6, 20, (3, 5)), {"padding": "same", "dilation": (2, 1)}),
    "1×7, padded on one side": ((3, 9, (1, 7)), {"padding": (0, 3)}),
}


@pytest.fixture(autouse=True)
def taken(prefer, monkeypatch):
    """The inputs for which W is kept so."""
    prefer("reconstruct")
    monkeypatch.setattr(layers, "_orders", lambda *layer: {})
    inputs, kept_call = [], FactorizedConv2d._kept_call

    def noting(self, path, x, *args):
        call = kept_call(self, path, x, *args)
        inputs.extend(x for weight in call.args[2:3] if weight.is_mkldnn)
        return call

    monkeypatch.setattr(FactorizedConv2d, "_kept_call", noting)
    return inputs


def layer_of(case="3×3", density=0.3, **settings):
    torch.manual_seed(0)
    shape, own = CASES[case]
    layer = FactorizedConv2d(*shape, **own | settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return (layer if density is None else layer.compact(density)).eval()


def images(n, channels, *side):
    return torch.randn(n, channels, *(side or (9, 8))).to(memory_format=torch.channels_last)


def dense(layer, x):
    return layer._conv_forward(x, layer._weight(True), layer.bias)


@pytest.mark.parametrize("density", [0.3, None], ids=["compact", "dense"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_is_the_dense_layer_for_every_size(taken, case, density):
    layer = layer_of(case, density)
    sizes = [(2, 9, 8), (2, 9, 8), (1, 12, 7), (16, 9, 8), (2, 9, 8)]
    for n, *side in sizes:
        x = images(n, layer.in_channels, *side)
        y, expected = layer(x), dense(layer, x)
        assert y.stride() == expected.stride()
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    assert len(taken) == len({size for size in sizes})
    (kept,) = [value for value in layer._cache._kept.values.values() if isinstance(value, torch.Tensor)]
    assert kept.is_mkldnn


@torch.no_grad()
def test_every_write_is_seen(taken):
    layer = layer_of()
    x = images(2, 6)
    changes = [
        lambda: layer.mu.data.mul_(2),
        lambda: layer.v[0, 1, 2].add_(1),
        lambda: layer.u.detach().numpy().fill(0.5),
        lambda: layer.bias.data.add_(1),
        lambda: setattr(layer, "bias", nn.Parameter(layer.bias + 1)),
        lambda: setattr(layer, "bias", None),
        lambda: setattr(layer, "v", nn.Parameter(layer.v * 2)),
        lambda: layer.set_support(layer.mu.flip(0), layer.mu_index),
        lambda: layer.load_state_dict(
            {name: 1.5 * t if t.is_floating_point() else t for name, t in layer.state_dict().items()}
        ),
        lambda: layer.compact(0.1),
        lambda: setattr(layer, "padding", (0, 2)),
    ]
    for change in changes:
        before = layer(x)
        change()
        after = layer(x)
        assert after.shape != before.shape or not torch.equal(after, before)
        torch.testing.assert_close(after, dense(layer, x), rtol=1e-4, atol=1e-4)
    assert len(taken) >= len(changes)


@torch.no_grad()
def test_what_is_no_such_input_is_computed_as_before(taken):
    layer, x = layer_of(), images(2, 6)
    layer(x)
    assert len(taken) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    halves = [one for one in taken if one.dtype == torch.bfloat16]
    # For the twin of that type, and for what serves in its place.
    assert len(halves) == 2 * layers._onednn_computes(torch.bfloat16)
    with torch.enable_grad():
        assert layer(x).requires_grad
    layer(x.contiguous()), layer(x[0]), layer(x[:0])
    others = {name: 2 * t for name, t in layer.named_parameters()}
    torch.func.functional_call(layer, others, (x,))
    torch.vmap(lambda one: torch.func.functional_call(layer, others, (one,)))(x[:, None])
    layer.train()(x)
    layer_of().double()(x.double())
    assert [one.dtype for one in taken if one.dtype != torch.bfloat16] == [torch.float32] * 2
    assert len(taken) == 2 + len(halves)
    for wrong in (x[:, :5].contiguous(memory_format=torch.channels_last), x[:, :, :, :0], x.double()):
        with pytest.raises(RuntimeError):
            layer.eval()(wrong)
        assert len(taken) == 2 + len(halves)


@torch.no_grad()
def test_copies_and_other_processes_make_their_own(taken):
    layer, x = layer_of(), images(2, 6)
    expected = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.share_memory()):
        assert len(twin._cache) == 0
        assert torch.equal(twin(x), expected)
    twin = copy.deepcopy(layer)
    twin.v.mul_(2)
    torch.testing.assert_close(twin(x), dense(twin, x), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer(x), expected)


@torch.no_grad()
def test_a_compiled_layer_takes_it_and_an_exported_one_has_none(taken):
    layer, x = layer_of(), images(2, 6)
    expected = layer(x)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
    assert len(taken) == 2
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), expected)
    torch.testing.assert_close(torch.jit.trace(layer, (x,))(x), expected)
    assert len(taken) == 2


def test_where_pytorch_has_no_onednn_there_is_no_such_path(taken, monkeypatch):
    monkeypatch.setattr(layers, "_onednn", lambda: None)
    layer, x = layer_of(), images(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(layer, x))
    assert not taken


def test_it_is_what_the_choice_measures_in_evaluation(taken):
    layer, x = layer_of(), images(2, 6)
    seconds, _ = layer.times(x, training=False)
    assert set(seconds) == {"dense", "reconstruct", "factored"} and len(taken) == 1
    layer.times(x, training=True)
    assert len(taken) == 1 and len(layer._cache) == 0
