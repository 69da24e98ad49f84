"""Convolutions of sequences: one call for [n, c, l], as for images."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastfact as ff
from fastfact.nn import FactorizedConv1d
from fastfact.ops import direct

SPECS = {
    "compact": ff.Rank1(),
    "dense": ff.Rank1(),
    "no μ": ff.Rank1(sparse=False),
    "kernel": ff.Rank1(layout="kernel"),
    "low rank": ff.LowRank(rank=2),
    "hadamard": ff.Hadamard(ratio=0.3),
}
SHAPES = {
    "three taps": {"kernel_size": 3, "padding": 1},
    "one tap": {"kernel_size": 1},
    "stride": {"kernel_size": 4, "stride": 2, "dilation": 2},
    "groups": {"kernel_size": 3, "groups": 2, "bias": False},
    "depthwise": {"kernel_size": 3, "groups": 4},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "same": {"kernel_size": 2, "padding": "same"},
}


def made(name, path="auto", dtype=torch.float64, **shape):
    torch.manual_seed(0)
    layer = FactorizedConv1d(4, 4, **shape, spec=SPECS[name], dtype=dtype)
    for factor in layer.factors().values():
        nn.init.normal_(factor)
    if name in ("compact", "kernel"):
        layer.prune_(0.5)
        layer.compact()
    if layer._why_not(path, layer._tensors()) is None:
        layer.path = path
    return layer


def inputs(dtype=torch.float64, length=9):
    """The same numbers in several memory layouts."""
    x = torch.randn(3, 4, length, dtype=dtype)
    wide = torch.randn(3, 4, 2 * length, dtype=dtype)
    wide[..., ::2] = x
    return {"contiguous": x, "channels last": x.transpose(1, 2).contiguous().transpose(1, 2), "gaps": wide[..., ::2]}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_as_the_dense_layer(name, shape, path):
    layer = made(name, path, **SHAPES[shape])
    dense = layer.to_dense()
    for training in (True, False):
        layer.train(training)
        for layout, x in inputs().items():
            for _ in range(3):
                ours, theirs = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
                y, wanted = layer(ours), dense(theirs)
                torch.testing.assert_close(y, wanted, msg=layout)
                g = torch.randn_like(wanted)
                torch.testing.assert_close(
                    *(torch.autograd.grad(out, of, g)[0] for out, of in ((y, ours), (wanted, theirs)))
                )
                with torch.no_grad():
                    torch.testing.assert_close(layer(x), dense(x), msg=layout)


@pytest.mark.parametrize("name", SPECS)
def test_derivatives(name):
    layer = made(name, kernel_size=3, padding=1, stride=2)
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    factors = list(layer.factors().values())
    layer(x)  # from now on by one call
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *factors, layer.bias))
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *factors, layer.bias))
    ones = torch.eye(24, dtype=x.dtype).view(24, 2, 4, 3)
    batched = torch.autograd.grad(layer(x), (x, *factors), ones, is_grads_batched=True)
    each = [torch.autograd.grad(layer(x), (x, *factors), one) for one in ones]
    torch.testing.assert_close(batched, tuple(map(torch.stack, zip(*each, strict=True))))


@pytest.mark.parametrize("name", ["compact", "no μ", "low rank"])
@pytest.mark.parametrize("shape", ["three taps", "one tap"])
def test_one_call_and_no_views(name, shape):
    layer, x = made(name, **SHAPES[shape]), inputs()["contiguous"]
    layer(x)
    assert direct.serve(layer._nodes, x, True, layer._noted) is not None
    y = layer(x)
    assert "Direct" in y.grad_fn.name() and y._base is None
    layer.eval()
    with torch.no_grad():
        layer(x)
        assert direct.serve(layer._nodes, x, False, layer._noted) is not None


@pytest.mark.parametrize("name", ["compact", "no μ", "low rank"])
def test_what_the_library_refuses_is_computed_by_ops(name):
    """A plan's own functions, of sequences."""
    layer, x = made(name, kernel_size=3), inputs()["contiguous"].requires_grad_()
    wanted = layer(x)
    grads = torch.autograd.grad(wanted.square().sum(), (x, *layer.factors().values()))
    (node,) = layer._nodes.values()
    args = list(node.args)
    assert any(isinstance(one, direct.Plan) for one in args)
    args[node.at] = x
    y = direct.ByOps.apply(*args)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (x, *layer.factors().values())), grads)
    factor = next(iter(layer.factors().values()))
    twice = []
    for y in (direct.ByOps.apply(*args), layer(x)):
        (once,) = torch.autograd.grad(y.square().sum(), factor, create_graph=True)
        twice.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*twice)


@pytest.mark.parametrize("name", ["compact", "no μ", "low rank"])
def test_checkpoints_and_autocast(name):
    model = nn.Sequential(
        made(name, dtype=torch.float32, kernel_size=3), nn.ReLU(), made(name, dtype=torch.float32, kernel_size=1)
    )
    x = inputs(torch.float32)["contiguous"].requires_grad_()
    for autocast in (False, True):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                wanted = torch.autograd.grad(model(x).float().square().sum(), x)
                found = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).float().square().sum(), x)
            torch.testing.assert_close(found, wanted)
    fresh = copy.deepcopy(model)
    found = torch.autograd.grad(checkpoint(fresh, x, use_reentrant=False).square().sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).square().sum(), x))


def test_other_inputs():
    layer, x = made("compact", kernel_size=3), inputs()["contiguous"]
    dense = layer.to_dense()
    for training in (True, False):
        layer.train(training)
        layer(x)
        torch.testing.assert_close(layer(x[0]), dense(x[0]))
        torch.testing.assert_close(layer(x[:0]), dense(x[:0]))
        torch.testing.assert_close(layer(x[..., :3]), dense(x[..., :3]))
        for wrong in (x[:, :3], x[..., :2], x.float()):
            with pytest.raises((RuntimeError, ValueError)):
                layer(wrong)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("first", ["one", "batch"])
def test_sequences_of_one_channel_without_a_batch(training, first):
    torch.manual_seed(0)
    layer = FactorizedConv1d(1, 12, 3, dtype=torch.float64).train(training)
    dense, x = layer.to_dense(), torch.randn(1, 11, dtype=torch.float64)
    with torch.set_grad_enabled(training):
        for given in (x, x[None])[:: 1 if first == "one" else -1]:
            for _ in range(3):
                torch.testing.assert_close(layer(given), dense(given))
    with pytest.raises((RuntimeError, ValueError)):
        layer(x[0])
    with pytest.raises((RuntimeError, ValueError)):
        layer(x[None, :, None])
