"""The module built for this PyTorch: layers in training are nodes of its own graph, and calls of layers are served
without what Python does around a forward, but where that would do something."""

import contextlib
import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn.modules import module
from torch.overrides import TorchFunctionMode

import fastfact as ff
from fastfact.ops import direct, weights

# One that is there, and is not found or does not load, fails them.
BUILT = list(Path(ff.__file__).parent.glob(f"_torch-{torch.__version__}-*.so"))
pytestmark = pytest.mark.skipif(not BUILT, reason="the module was built for another PyTorch")

KINDS = {
    "linear": (lambda: ff.nn.FactorizedLinear(13, 9), (5, 13)),
    "conv": (lambda: ff.nn.FactorizedConv2d(4, 6, 3, padding=1), (2, 4, 7, 5)),
    "sequences": (lambda: ff.nn.FactorizedConv1d(4, 6, 3), (2, 4, 11)),
}


def served(kind, path="reconstruct", training=True):
    """A layer whose calls are served, and an input."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    layer, x = make(), torch.randn(shape)
    nn.init.normal_(layer.mu)
    if path == "factored":
        layer.compact(0.5)
    layer.path = path
    layer.train(training)
    with contextlib.nullcontext() if training else torch.no_grad():
        layer(x), layer(x)
    return layer, x


@pytest.fixture
def asked(monkeypatch):
    """How often a forward in Python asked for a node."""
    seen, serve = [], direct.serve
    monkeypatch.setattr(direct, "serve", lambda *args: seen.append(1) or serve(*args))
    return seen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_are_served_without_python(kind, path, training, asked):
    layer, x = served(kind, path, training)
    wanted = layer.forward(x)
    asked.clear()
    with contextlib.nullcontext() if training else torch.no_grad():
        y = layer(x)
    assert not asked
    torch.testing.assert_close(y, wanted)
    assert layer(x=x) is not None and asked  # as nn.Module takes it


HOOKS = {
    "before": lambda layer, note: layer.register_forward_pre_hook(note),
    "after": lambda layer, note: layer.register_forward_hook(note),
    "before the backward": lambda layer, note: layer.register_full_backward_pre_hook(note),
    "after the backward": lambda layer, note: layer.register_full_backward_hook(note),
    "before any": lambda _, note: module.register_module_forward_pre_hook(note),
    "after any": lambda _, note: module.register_module_forward_hook(note),
    "before any backward": lambda _, note: module.register_module_full_backward_pre_hook(note),
    "after any backward": lambda _, note: module.register_module_full_backward_hook(note),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_run(kind, hook, asked):
    layer, x = served(kind)
    seen = []
    handle = HOOKS[hook](layer, lambda *_: seen.append(1) and None)
    layer(x.clone().requires_grad_()).sum().backward()
    handle.remove()
    assert seen
    asked.clear()
    layer(x)
    assert not asked


REPLACED = {
    "forward": lambda patch, layer, other: patch.setattr(layer, "forward", other, raising=False),
    "forward of all": lambda patch, layer, other: patch.setattr(type(layer), "forward", lambda _, x: other(x)),
    "_call_impl": lambda patch, layer, other: patch.setattr(layer, "_call_impl", other, raising=False),
    "_call_impl of all": lambda patch, _, other: patch.setattr(nn.Module, "_call_impl", lambda _, x: other(x)),
    "what is compiled": lambda patch, layer, other: patch.setattr(layer, "_compiled_call_impl", other),
    "__call__ of all": lambda patch, _, other: patch.setattr(nn.Module, "__call__", lambda _, x: other(x)),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_place_of_a_method_is_called(kind, what, monkeypatch, asked):
    layer, x = served(kind)
    with monkeypatch.context() as patch:
        REPLACED[what](patch, layer, lambda given: "other" if given is x else None)
        assert layer(x) == "other"
    layer.__dict__.pop("_compiled_call_impl", None)
    assert layer(x).shape == layer.forward(x).shape
    layer(x[:1]), layer(x[:1])  # a new node
    asked.clear()
    layer(x)
    assert not asked


def test_classes_derived_from_a_layer_have_their_own_forward():
    class Doubled(ff.nn.FactorizedLinear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain, x = served("linear")
    layer = Doubled(13, 9)
    layer.load_state_dict(plain.state_dict())
    layer.path = "reconstruct"
    for _ in range(3):
        torch.testing.assert_close(layer(x), 2 * plain(x))


def test_who_watches_python_sees_the_forward():
    layer, x = served("linear")
    seen = []
    sys.setprofile(lambda frame, *_: seen.append(frame.f_code.co_name))
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert "forward" in seen


def test_modes_of_functions_see_what_a_layer_calls():
    class Noted(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    (layer, x), seen = served("linear"), []
    with Noted():
        layer(x)
    assert seen


def test_images_are_no_sequences():
    layer, x = served("sequences")
    layer.path = "auto"
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            layer(x.unsqueeze(-2))


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_may_be_recorded_as_a_graph(kind, path):
    """Compiled autograd: of layers in it, and of one graph with other numbers."""
    layer, x = served(kind, path)
    for scale in (1, 2):
        given = (scale * x).requires_grad_()
        wanted = torch.autograd.grad(layer(given).square().sum(), [given, *layer.parameters()])
        layer.zero_grad()
        loss = layer(given).square().sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        torch.testing.assert_close([given.grad, *(p.grad for p in layer.parameters())], list(wanted))


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind, path):
    layer, x = served(kind, path)
    layer.double()
    x = x.double().requires_grad_()
    layer(x)
    first = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]
    found = torch.autograd.grad(first.square().sum(), [x, *layer.parameters()], allow_unused=True)
    with ff.use_backend("reference"):
        first = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]
        wanted = torch.autograd.grad(first.square().sum(), [x, *layer.parameters()], allow_unused=True)
    torch.testing.assert_close(found, wanted)


def test_a_backend_asked_for_serves_the_backward(monkeypatch):
    layer, x = served("linear")
    seen, backward = [], weights._Made.backward
    monkeypatch.setattr(weights._Made, "backward", lambda *args: seen.append(1) or backward(*args))
    loss = layer(x).sum()
    with ff.use_backend("reference"):
        loss.backward(retain_graph=True)
    assert len(seen) == 1
    loss.backward()
    assert len(seen) == 1


class Nothing(torch.autograd.Function):
    """Whose gradient is none."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_gives_none(kind):
    layer, x = served(kind)
    x.requires_grad_()
    layer(x)
    (Nothing.apply(layer(x)).sum() + x.sum()).backward()
    assert all(p.grad is None for p in layer.parameters()) and (x.grad == 1).all()
    x.grad = None
    loss = Nothing.apply(layer(x)).sum() + x.sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in layer.parameters()) and (x.grad == 1).all()


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("kind", KINDS)
def test_tangents_of_a_gradient(kind, path):
    """A backward is linear in what it is given."""
    layer, x = served(kind, path)
    given = [x.requires_grad_(), *layer.parameters()]
    layer(x)
    y = layer(x)
    assert y.grad_fn.name() == "DirectBackward"
    first, second = torch.randn_like(y), torch.randn_like(y)
    with forward_ad.dual_level():
        found = torch.autograd.grad(y, given, forward_ad.make_dual(first, second), retain_graph=True)
        found = [forward_ad.unpack_dual(one) for one in found]
    torch.testing.assert_close([one.primal for one in found], list(torch.autograd.grad(y, given, first, True)))
    torch.testing.assert_close([one.tangent for one in found], list(torch.autograd.grad(y, given, second)))


def test_a_factor_set_to_a_negative_view_is_read_as_its_numbers():
    layer, x = served("linear")
    layer.v.data = torch._neg_view(torch.randn_like(layer.v))
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_the_node_is_one_of_pytorch():
    layer, x = served("linear")
    node, seen = layer(x).grad_fn, []
    assert isinstance(node, torch.autograd.graph.Node) and type(node).__name__ == node.name() == "DirectBackward"
    assert {after.name().rpartition("::")[2] for after, _ in node.next_functions if after} == {"AccumulateGrad"}
    y = layer(x)
    y.grad_fn.register_hook(lambda given, taken: seen.append((len(given), len(taken))))
    y.grad_fn.register_prehook(lambda taken: seen.append(len(taken)))
    y.sum().backward()
    assert seen == [1, (6, 1)] and y.grad_fn.metadata == {}


def test_a_second_backward_is_refused_as_by_pytorch():
    layer, x = served("linear")
    loss = layer(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_an_error_in_a_backward_is_that_of_python(monkeypatch):
    def fails(ctx, grad, saved):
        raise KeyError("no backward")

    layer, x = served("linear")
    monkeypatch.setattr(weights._Made, "backward", staticmethod(fails))
    loss = layer(x).sum()
    with pytest.raises(KeyError, match="no backward"), ff.use_backend("reference"):
        loss.backward()


def test_batches_of_gradients():
    layer, x = served("linear")
    y = layer(x.requires_grad_())
    grads = torch.randn(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in grads]))


def test_nothing_is_kept_of_a_graph():
    layer, x = served("linear")
    x.requires_grad_()
    layer(x)
    plan = next(iter(layer._nodes.values())).args[0]
    before = sys.getrefcount(plan), sys.getrefcount(layer.u), sys.getrefcount(x)
    for _ in range(5):
        y = layer(x)
        y.sum().backward()
        layer(x)  # whose graph nobody goes through
    died = weakref.ref(y)
    del y
    layer.zero_grad(), setattr(x, "grad", None)
    gc.collect()
    assert died() is None
    assert (sys.getrefcount(plan), sys.getrefcount(layer.u), sys.getrefcount(x)) == before


def test_threads():
    """Each with a graph of its own, on layers that they share."""
    layer, x = served("linear")
    wanted, found = torch.autograd.grad(layer(x).square().sum(), layer.v)[0], [None] * 4

    def work(n):
        for _ in range(50):
            found[n] = torch.autograd.grad(layer(x).square().sum(), layer.v)[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        torch.testing.assert_close(one, wanted)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="PyTorch has none")
def test_nodes_are_announced():
    (layer, x), seen = served("linear"), []
    with torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name())):
        layer(x)
    assert seen[-1] == "DirectBackward"
