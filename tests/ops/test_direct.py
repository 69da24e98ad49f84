"""Layers computed without the dispatcher give what the ops give, and refuse what these refuse."""

import copy
import resource
import threading
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastfact as ff
from fastfact import ops
from fastfact.ops import conv as factored
from fastfact.ops import direct, reference, weights

LAST = torch.channels_last
OF_PIXELS = ff.Rank1(layout="kernel", rank=2)


def linear(rank=2, bias=True, dtype=torch.float64, **how):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(13, 9, bias=bias, dtype=dtype, spec=ff.Rank1(rank=rank, **how))
    if "mu" in layer.factors():
        torch.nn.init.normal_(layer.mu)
    return layer


def conv(kernel=3, bias=True, dtype=torch.float64, spec=None, outputs=8, **how):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(6, outputs, kernel, bias=bias, dtype=dtype, spec=spec, **how)
    torch.nn.init.normal_(layer.mu)
    return layer


def rows(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def images(h=7, w=5, dtype=torch.float64):
    return rows(2, 6, h, w, dtype=dtype)


CASES = {
    "linear": (linear, "factored", rows(5, 13)),
    "linear, three axes": (linear, "factored", rows(2, 3, 13)),
    "linear, four axes as channels_last": (linear, "factored", rows(2, 3, 13, 4).movedim(1, -1).movedim(1, -1)),
    "linear, W": (linear, "reconstruct", rows(5, 13)),
    "linear, W, three axes": (linear, "reconstruct", rows(2, 3, 13)),
    "linear, W, rows with gaps": (linear, "reconstruct", rows(5, 26)[:, ::2]),
    "linear, W, part of a tensor": (linear, "reconstruct", rows(9, 13)[4:]),
    "linear, W, no rows": (linear, "reconstruct", rows(0, 13)),
    "linear, no bias": (lambda: linear(bias=False), "factored", rows(5, 13)),
    "linear, no μ": (lambda: linear(sparse=False), "factored", rows(5, 13)),
    "linear, no μ, W": (lambda: linear(sparse=False), "reconstruct", rows(5, 13)),
    "convolution": (lambda: conv(padding=1), "factored", images()),
    "convolution, channels_last": (lambda: conv(padding=1), "factored", images().to(memory_format=LAST)),
    "convolution, W": (lambda: conv(stride=2, padding=(1, 0), dilation=(1, 2)), "reconstruct", images()),
    "convolution, W, channels_last": (lambda: conv(groups=2), "reconstruct", images().to(memory_format=LAST)),
    "depthwise": (lambda: conv(outputs=6, groups=6), "factored", images()),
    "kernel layout, W": (lambda: conv(spec=ff.Rank1(layout="kernel", rank=2)), "reconstruct", images()),
    "1×1, factored": (lambda: conv(1, spec=OF_PIXELS), "factored", images()),
    "1×1, factored, channels_last": (lambda: conv(1, spec=OF_PIXELS), "factored", images().to(memory_format=LAST)),
    "1×1, factored, stride": (lambda: conv(1, spec=OF_PIXELS, stride=(2, 3), bias=False), "factored", images()),
    "1×1, factored, stride, channels_last": (
        lambda: conv(1, spec=OF_PIXELS, stride=(3, 1)),
        "factored",
        images().to(memory_format=LAST),
    ),
    "1×1, factored, one pixel": (lambda: conv(1, spec=OF_PIXELS), "factored", images(1, 1).to(memory_format=LAST)),
    "1×1, pixels": (lambda: conv(1), "product", images().to(memory_format=LAST)),
    "1×1, one pixel": (lambda: conv(1), "product", images(1, 1).to(memory_format=LAST)),
    "1×1, bfloat16": (
        lambda: conv(1, dtype=torch.bfloat16),
        "product",
        images(dtype=torch.bfloat16).to(memory_format=LAST),
    ),
}


def step(layer, path, x, grad):
    """(y, gradients of x and of the parameters) of the layer on `path`, its second call."""
    x = x.detach().requires_grad_()
    layer._forget()
    layer._choose = lambda *_: path
    for _ in range(2):
        y = layer(x)
    given = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2)) if grad is None else grad(y)
    return y, torch.autograd.grad(y, [x, *layer.parameters()], given)


@pytest.fixture
def by_ops(monkeypatch):
    """What the ops computed, and the library did not."""
    seen = []

    def note(name, function):
        def noting(*args):
            seen.append(name)
            return function(*args)

        return staticmethod(noting)

    for kind in (weights._Made, factored._Apart):
        for name in ("forward", "backward"):
            monkeypatch.setattr(kind, name, note(name, getattr(kind, name)))
    return seen


def without_library(monkeypatch):
    monkeypatch.setattr(direct, "serves", lambda *tensors: False)
    monkeypatch.setattr(ff.nn.FactorizedLayer, "_let_serve", lambda *args: False)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_what_the_ops_make_it(case, compact, by_ops, monkeypatch):
    make, path, x = CASES[case]
    layer = make()
    if "mu" in layer.factors() and (compact or path == "factored"):
        layer.compact(0.3)
    expanded = None if compact else lambda y: torch.ones((), dtype=y.dtype).expand_as(y)
    y, gradients = step(layer, path, x, expanded)
    assert not by_ops and len(layer._nodes) == 1
    without_library(monkeypatch)
    expected, of_ops = step(layer, path, x, expanded)
    assert by_ops == ["forward", "forward", "backward"]
    close = {"rtol": 0, "atol": 1e-12} if x.dtype == torch.float64 else {}
    torch.testing.assert_close(y, expected, **close)
    assert y.stride() == expected.stride()
    for found, gradient in zip(gradients, of_ops, strict=True):
        torch.testing.assert_close(found, gradient, **close)
        assert found.stride() == gradient.stride() or found.numel() <= 1


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_evaluation_is_the_dense_layer(case, monkeypatch):
    make, path, x = CASES[case]
    layer = make().eval()
    if "mu" in layer.factors():
        layer.compact(0.3)
    layer._choose = lambda *_: path
    layer(x)
    y = layer(x)
    assert len(layer._nodes) == 1
    monkeypatch.setattr(layer, "_forward", lambda x: pytest.fail("no node served"))
    assert torch.equal(layer(x), y)
    expected = layer._dense_forward(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, expected, **({"rtol": 0, "atol": 1e-12} if x.dtype == torch.float64 else {}))
    assert y.is_contiguous() or y.stride() == expected.stride()


def test_only_what_is_asked_for_has_a_gradient():
    layer = linear().compact(0.5)
    layer.u.requires_grad_(False)
    layer.bias.requires_grad_(False)
    for path in ("factored", "reconstruct"):
        layer.path = path
        layer.zero_grad()
        layer(rows(4, 13)).sum().backward()
        assert layer.u.grad is None and layer.bias.grad is None
        assert layer.v.grad is not None and layer.mu.grad is not None


def test_what_does_not_fit_is_told_by_the_ops():
    for path in ("factored", "reconstruct"):
        layer = linear().compact(0.5)
        layer.path = path
        layer(rows(4, 13))
        with pytest.raises((ValueError, RuntimeError), match=r"12|13"):
            layer(rows(4, 12))
        with pytest.raises((ValueError, RuntimeError)):
            layer(rows(4, 13).float())


def test_positions_that_do_not_ascend_are_refused():
    layer = linear().compact(0.5)
    index = layer.mu_index.flip(0)
    of = direct.settings(direct.LINEAR, 0, False, (9, 13))
    args = rows(4, 13), layer.u, layer.v, layer.mu, index, layer.bias
    assert direct.factored(of, False, *args) is None
    assert direct.layer(of, args[0], layer.bias, layer.mu, index, layer.u, layer.v) is None


def test_a_dispatch_mode_sees_the_ops(by_ops):
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.add(func.name().split("::")[1])
            return func(*args, **(kwargs or {}))

    layer, x = linear().compact(0.3), rows(4, 13)
    layer.path = "factored"
    layer(x)
    assert not by_ops
    with Seen() as seen:
        layer(x).sum().backward()
    assert by_ops == ["forward", "backward"] and {"factored_linear", "factored_linear_backward"} <= seen.ops


def test_a_negative_view_is_read_as_its_numbers():
    x = torch.complex(rows(4, 13), rows(4, 13)).conj().imag
    assert x.is_neg()
    for path in ("factored", "reconstruct"):
        layer = linear().compact(0.3)
        layer.path = path
        for _ in range(2):
            torch.testing.assert_close(layer(x), layer(x.resolve_neg()))
        y = layer(x.resolve_neg())
        (found,) = torch.autograd.grad(y, layer.u, x[:, :9], retain_graph=True)
        torch.testing.assert_close(found, torch.autograd.grad(y, layer.u, x[:, :9].resolve_neg())[0])


def test_saved_tensors_go_through_hooks():
    layer, seen = linear().compact(0.3), []
    layer.path, x = "reconstruct", rows(4, 13).requires_grad_()
    layer(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t.clone(), lambda t: t):
        y = layer(x)
    y.sum().backward()
    assert x.shape in seen and (9, 13) in seen
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(4, -1))


def test_what_is_given_out_is_freed():
    layer = ff.nn.FactorizedLinear(512, 512, spec=ff.Rank1(rank=1)).compact(0.1)
    layer.path, x = "reconstruct", torch.randn(512, 512, requires_grad=True)

    def steps(n):
        for _ in range(n):
            layer(x).sum().backward()
            x.grad = None

    steps(5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(60)
    # One tensor kept in each step would be 60 MiB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30 << 10


CHANGES = {
    "another parameter": lambda layer: setattr(layer, "u", torch.nn.Parameter(2 * layer.u.detach())),
    "written to": lambda layer: layer.mu.data.mul_(2),
    "frozen": lambda layer: layer.v.requires_grad_(False),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "another support": lambda layer: layer.set_support(layer.mu.detach()[:9] + 1, layer.mu_index[:9].clone()),
    "a dense μ": lambda layer: layer.expand(),
    "swapped": lambda layer: torch.utils.swap_tensors(layer.mu, torch.nn.Parameter(layer.mu.detach() + 1)),
    "evaluation, set by hand": lambda layer: setattr(layer, "training", False),
    "another type": lambda layer: layer.float().double(),
    "made from others": lambda layer: torch.nn.utils.parametrizations.weight_norm(layer, "v"),
}


@pytest.mark.parametrize("path", ["factored", "reconstruct"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_layer_is_seen(change, path, monkeypatch):
    layer, x = linear().compact(0.5), rows(4, 13).requires_grad_()
    monkeypatch.setattr(layer, "_choose", lambda *_: path if layer.can_factor else "reconstruct")
    for _ in range(2):
        layer(x)
    assert len(layer._nodes) == 1
    CHANGES[change](layer)
    for _ in range(2):
        y = layer(x)
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(y, expected)
        leaves = [x, *(parameter for parameter in layer.parameters() if parameter.requires_grad)]
        grad = rows(4, 9) + 1
        found, of_dense = (torch.autograd.grad(out, leaves, grad) for out in (y, expected))
        for one, other in zip(found, of_dense, strict=True):
            torch.testing.assert_close(one, other)


def test_positions_written_to_in_place_are_refused():
    layer, x = linear().compact(0.5), rows(4, 13)
    layer.path = "factored"
    layer(x)
    layer.mu_index[-1] += 1
    with pytest.raises(RuntimeError, match="in place"):
        layer(x)


def test_another_backend_serves_where_it_is_asked_for(by_ops):
    layer, x = linear().compact(0.5), rows(4, 13)
    layer.path = "reconstruct"
    layer(x)
    y = layer(x)
    with ff.use_backend("reference"):
        y.sum().backward()
        assert by_ops == ["backward"]
        layer(x).sum().backward()
    assert by_ops == ["backward", "forward", "backward"]


def test_what_was_saved_is_asked_for_once():
    from torch.utils.checkpoint import checkpoint

    layer, x = linear().compact(0.5), rows(4, 13).requires_grad_()
    layer.path = "reconstruct"
    layer(x)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    for graph in (False, True):
        y = checkpoint(layer, x, use_reentrant=False).square().sum()
        torch.testing.assert_close(torch.autograd.grad(y, x, create_graph=graph)[0], expected)


def test_layers_in_threads_do_not_meet():
    from concurrent.futures import ThreadPoolExecutor

    layers = [linear().compact(0.5) for _ in range(4)]
    x = rows(4, 13)

    def steps(layer):
        for _ in range(40):
            layer.zero_grad()
            layer(x).square().sum().backward()
        return [parameter.grad for parameter in layer.parameters()]

    expected = steps(layers[0])
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(steps, layers):
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_is_that_of_the_op(momentum, dtype, monkeypatch):
    seen, step = [], direct.prox_sgd_step

    def note(*args):
        seen.append(step(*args))
        return seen[-1]

    monkeypatch.setattr(direct, "prox_sgd_step", note)
    last = torch.channels_last
    alike = [[rows(7), rows(3, 5), rows(1)[0], rows(2, 3, 4, 5).to(memory_format=last)] for _ in range(3)]
    # One that has gaps, and gradients that lie otherwise than their parameters.
    others = [[rows(4, 6)[:, ::2], rows(3, 4)], [rows(4, 3), rows(4, 3).t()], [rows(4, 3), rows(3, 4)]]
    for tensors in (alike, others):
        tensors = [[t.to(dtype) for t in group] for group in tensors]
        tensors = tensors if momentum else [*tensors[:2], []]
        params, grads, momenta = copy.deepcopy(tensors)
        penalties, versions = [0.1 * n for n in range(len(params))], [t._version for t in params]
        how = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01}
        ops.prox_sgd_step(params, grads, momenta, penalties, **how)
        assert all(t._version > version for t, version in zip(params, versions, strict=True))
        reference.prox_sgd_step(*tensors, penalties, *how.values(), True)
        for one, other in zip([*params, *momenta], [*tensors[0], *tensors[2]], strict=True):
            torch.testing.assert_close(one, other)
    assert seen == [True, False]


@pytest.mark.parametrize("rows, outputs", [(1100, 300), (513, 257), (3, 600)])
def test_gradient_of_a_bias_of_many_rows_and_outputs(rows, outputs):
    layer = ff.nn.FactorizedLinear(3, outputs)
    y = layer(torch.randn(rows, 3))
    grad = torch.randn_like(y)
    y.backward(grad)
    torch.testing.assert_close(layer.bias.grad, grad.double().sum(0).float(), atol=1e-4, rtol=0)


def test_memory_kept_by_a_thread_ends_with_it():
    layer = ff.nn.FactorizedConv2d(64, 64, 3, padding=1)
    layer.prune_(0.1)
    layer.compact()
    factors, done = (layer.u, layer.v, layer.mu, layer.mu_index), []
    x = torch.randn(16, 64, 14, 14)

    def forward():
        with torch.no_grad():
            done.append(ops.factored_conv2d(x, *factors, size=(64, 64, 3, 3), padding=1).shape)

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    def in_threads(count):
        for _ in range(count):
            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()

    in_threads(5)
    before = resident()
    in_threads(40)
    assert len(done) == 45
    assert resident() - before < 20  # MiB; a thread has some 2
