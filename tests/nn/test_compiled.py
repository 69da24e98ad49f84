"""Layers under torch.compile. In evaluation: one op each, which is the layer as it is without a graph."""

import copy
import gc

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import fastfact as ff
from fastfact.nn import compiled
from fastfact.ops import backends

SPECS = {
    "sparse": ff.Rank1(),
    "without μ": ff.Rank1(sparse=False),
    "low rank": ff.LowRank(rank=2),
    "Hadamard": ff.Hadamard(),
}


def network(spec=None, last=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3, 2, 1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 1, bias=False),
        torch.nn.Conv2d(16, 16, 3, groups=16, padding=2, dilation=2),
        torch.nn.Flatten(2),
        torch.nn.Linear(49, 10),
    )
    ff.factorize(model, spec or ff.Rank1())
    for layer in ff.factorized_layers(model).values():
        if "mu" in layer.factors():
            layer.compact(0.2)
    return model.to(memory_format=torch.channels_last if last else torch.contiguous_format).eval()


@pytest.fixture
def calls(monkeypatch):
    """The layers that the op took, in turn."""
    seen = []
    layer_of = compiled._layer
    monkeypatch.setattr(compiled, "_layers", {})  # the compiled module has the other, and asks here
    monkeypatch.setattr(compiled, "_layer", lambda *a: (seen.append(layer_of(*a)), seen[-1])[1])
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


@torch.no_grad()
def test_parameters_may_be_swapped_after_it():
    model = network()
    state, x = copy.deepcopy(model.state_dict()), torch.randn(2, 8, 14, 14)
    y = torch.compile(model, backend="eager")(x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
        torch.testing.assert_close(model.double()(x.double()).float(), y, rtol=1e-4, atol=1e-4)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@torch.no_grad()
def test_a_compiled_network_computes_what_it_does_without(calls, spec, last):
    model = network(spec, last)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    exact = ff.densify(copy.deepcopy(model)).double()
    for images in (4, 4, 3):
        x = torch.randn(images, 8, 14, 14)
        y = graph(x)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(y.double(), exact(x.double()), rtol=1e-4, atol=1e-5)
    assert len(calls) == 12 and len(set(calls)) == 4
    assert {type(layer) for layer in calls} == {type(layer) for layer in ff.factorized_layers(model).values()}


@torch.no_grad()
def test_a_write_to_a_factor_is_seen_however_it_is_written_to(calls):
    model, x = network(), torch.randn(2, 8, 14, 14)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = graph(x)
    for change in (
        lambda: model[0].u.mul_(2),
        lambda: model[2].mu.data.zero_(),
        lambda: setattr(model[2].v, "data", torch.randn_like(model[2].v)),
        lambda: model[5].bias.add_(1),
        lambda: model[0].compact(0.1),
        lambda: setattr(model[0], "path", "reconstruct"),
    ):
        change()
        torch.testing.assert_close(graph(x), model(x))
    assert calls and not torch.allclose(graph(x), before)


@pytest.mark.skipif(backends.module_file() is None, reason="the module was built for another PyTorch")
@pytest.mark.parametrize("last", [False, True])
@torch.no_grad()
def test_graphs_are_served_without_python(last, monkeypatch):
    torch._dynamo.reset()
    model, x = network(last=last), torch.randn(2, 8, 14, 14)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    graph(x), graph(x)
    asked, layer_of = [], compiled._layer
    monkeypatch.setattr(compiled, "_layer", lambda *args: asked.append(1) or layer_of(*args))
    for change in (
        lambda: None,
        lambda: model[0].u.mul_(2),
        lambda: model[2].mu.data.zero_(),
        lambda: setattr(model[2].v, "data", torch.randn_like(model[2].v)),
        lambda: model[5].bias.add_(1),
        lambda: setattr(model[0], "path", "reconstruct"),
    ):
        change()
        for _ in range(2):
            torch.testing.assert_close(graph(x), model(x))
        asked.clear()
        graph(x)
        assert not asked
    wrong = torch.randn(2, 7, 14, 14)
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.fastfact_nn.layer(model[0]._how, wrong, list(model[0]._tensors().values()), model[0].bias)
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
def test_graphs_compute_contiguous_images_channels_last(calls, monkeypatch, training):
    """As inductor has dense convolutions; what the layer gives is contiguous, as it is without a graph."""
    seen = []

    class Viewed(torch.nn.Sequential):
        def forward(self, x):
            return super().forward(x).view(len(x), -1)

    def noted(graph, inputs):
        seen.extend(
            node.meta["example_value"].stride()
            for node in graph.graph.nodes
            if node.op == "call_method" and node.target == "contiguous" and node.meta["example_value"].dim() == 4
        )
        return graph

    model, x = Viewed(*network(last=False)[:4]).train(training), torch.randn(2, 8, 14, 14)
    with torch.set_grad_enabled(training):
        found = torch.compile(model, fullgraph=True, backend=noted)(x)
        torch.testing.assert_close(found, model(x))
    assert seen[0] == (8 * 14 * 14, 1, 14 * 8, 8) and sum(step == 1 for _, step, *_ in seen) == 3 and len(seen) == 6
    torch._dynamo.reset()
    seen.clear()
    last = network(last=False)[:1].train(training)
    torch.compile(last, fullgraph=True, backend=noted)(x.to(memory_format=torch.channels_last))
    assert not seen


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_a_layer_that_is_channels_last_gives_such_images_in_a_graph(training, mode):
    torch._dynamo.reset()
    layer = ff.nn.FactorizedConv2d(8, 6, 3, padding=1, padding_mode=mode).to(memory_format=torch.channels_last)
    layer.train(training)

    def rows(x):
        return layer(x).permute(0, 2, 3, 1).view(-1, 6)

    x = torch.randn(2, 8, 6, 6)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(torch.compile(rows, backend="aot_eager")(x), rows(x))


def test_with_gradients_and_in_training_the_graph_is_plain(calls):
    model, x = network(), torch.randn(2, 8, 14, 14)
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    graph(x).square().sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    model.train()
    with torch.no_grad():
        graph(x)
    assert not calls


@torch.no_grad()
def test_layers_that_are_alike_share_a_graph_and_leave_with_their_model(calls):
    gc.collect()
    before, x = len(compiled._layers), torch.randn(3, 5, 16)
    blocks = torch.nn.ModuleList(ff.nn.FactorizedLinear(16, 16).compact(0.2) for _ in range(12)).eval()
    counter = CompileCounterWithBackend("aot_eager")
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
        torch.testing.assert_close(block(x), torch.nn.functional.linear(x, block._weight(None), block.bias))
    assert counter.frame_count == 1 and len(set(calls)) == 12
    torch._dynamo.reset()
    calls.clear()
    del blocks, block
    gc.collect()
    assert len(compiled._layers) == before


@torch.no_grad()
def test_the_op_says_what_it_gives():
    for model, x in ((network(), torch.randn(2, 8, 14, 14)), (network(last=False), torch.randn(8, 14, 14))):
        args = model[0]._how, x, list(model[0]._tensors().values()), model[0].bias
        torch.library.opcheck(torch.ops.fastfact_nn.layer, args, test_utils=("test_schema", "test_faketensor"))
    linear = model[5]
    args = linear._how, torch.randn(7, 49), list(linear._tensors().values()), linear.bias
    torch.library.opcheck(torch.ops.fastfact_nn.layer, args, test_utils=("test_schema", "test_faketensor"))


def test_a_step_keeps_what_its_convolutions_see_and_no_views_of_it():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(layer for _ in range(3) for layer in (torch.nn.Conv2d(16, 16, 3, 1, 1), torch.nn.ReLU()))
    )
    ff.factorize(model, ff.Rank1())
    for layer in ff.factorized_layers(model).values():
        layer.compact(0.1).path = "factored"
    kept = []

    def note(graph, _):
        (given,) = graph.graph.find_nodes(op="output")
        kept.extend(node.meta["val"] for node in given.args[0] if isinstance(node, torch.fx.Node))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    x = torch.randn(4, 16, 8, 8).to(memory_format=torch.channels_last)
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    images = [t for t in kept if t.dim() > 3]
    assert len(images) >= 3 and all(t.dim() == 4 for t in images)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
