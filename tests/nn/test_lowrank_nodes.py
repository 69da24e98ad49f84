"""Low-rank layers whose σ is trained: one node of the graph, as layers of u, v and μ are, on every path."""

import copy

import pytest
import torch
from drawing import drawn

import fastfact as ff
from fastfact.ops import conv, lowrank

LAYERS = {
    "linear": (ff.nn.FactorizedLinear, (40, 24), {}, (5, 40)),
    "sequences": (ff.nn.FactorizedLinear, (33, 70), {"bias": False}, (2, 30, 33)),
    "1×1": (ff.nn.FactorizedConv2d, (20, 32), {"kernel_size": 1}, (2, 20, 6, 5)),
    "1×1, stride": (ff.nn.FactorizedConv2d, (20, 32), {"kernel_size": 1, "stride": 2}, (2, 20, 6, 5)),
    "3×3": (ff.nn.FactorizedConv2d, (6, 8), {"kernel_size": (3, 2), "padding": 1}, (2, 6, 7, 5)),
    "groups": (ff.nn.FactorizedConv2d, (8, 12), {"kernel_size": 1, "groups": 2, "bias": False}, (3, 8, 6, 9)),
    "depthwise": (ff.nn.FactorizedConv2d, (9, 9), {"kernel_size": 5, "padding": 2, "groups": 9}, (2, 9, 7, 8)),
}
SPECS = {
    "few ranks": ff.LowRank(rank=3, scaling=1.7),
    "many ranks": ff.LowRank(rank=21, scaling=0.4),
    "view": ff.LowRank(ratio=0.4, layout="view", scaling=1.3),
    "separable": ff.LowRank(ratio=0.4),
}
CASES = [(of, spec) for of in LAYERS for spec in SPECS]


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(lowrank, "_HERE", None)  # no kernel of its own serves adapters of few numbers


def case(of, spec, last=False):
    """(A layer, an input.)"""
    kind, sizes, how, shape = LAYERS[of]
    layer, x = drawn(kind(*sizes, **how, spec=SPECS[spec]), None), torch.randn(shape)
    if last and x.dim() == 4:
        return layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return layer, x


def paths(layer):
    """Those that the layer has."""
    return [path for path in ("reconstruct", "factored") if path == "reconstruct" or layer.can_factor]


def wanted(layer, x, grad=None):
    """(y, the gradients of x and the parameters), by the formula in float64; grad: of y, drawn if not given."""
    exact, x = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    factors = exact.factors()
    spec, size = layer.spec, exact.size
    (o, i), taps = size[:2], (*size, 1, 1)[2:4]
    product = factors["B"] @ factors["A"]
    if spec.layout_of(size) == "view":
        product = product.reshape(size)
    elif len(size) == 2:
        product = product.T
    else:
        product = product.view(i, taps[0], o, taps[1]).permute(2, 0, 1, 3)
    weight = factors["sigma"] + spec.scaling * product
    dense = copy.deepcopy(layer).to_dense().double()
    own = {} if layer.bias is None else {"bias": exact.bias}
    y = torch.func.functional_call(dense, {"weight": weight, **own}, (x,))
    grad = torch.randn_like(y) if grad is None else grad.double()
    inputs = [x, *exact.parameters()]
    return y, grad, torch.autograd.grad(y, inputs, grad)


def check(layer, x, dtype=None):
    """y, which is held against the formula as its gradients are; dtype: of autocast."""
    expected, grad, gradients = wanted(layer, x)
    tolerance = 2e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    given = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = layer(given)
    assert y.dtype == (dtype or torch.float32)
    assert (y.double() - expected).norm() <= tolerance * expected.norm()
    inputs = [given, *layer.parameters()]
    for t, found, want in zip(inputs, torch.autograd.grad(y, inputs, grad.to(y.dtype)), gradients, strict=True):
        assert found.dtype == t.dtype
        assert found.shape == t.shape
        assert (found.double() - want).norm() <= tolerance * want.norm()
    return y


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("of", "spec"), CASES)
def test_a_layer_is_one_node(of, spec, last):
    layer, x = case(of, spec, last)
    for path in paths(layer):
        layer.path = path
        for _ in range(2):  # the second is served by the node of the first
            y = check(layer, x)
        tiles = conv.multiplies_tiles(torch.float32) and of not in ("3×3", "groups", "depthwise")
        in_two_parts = path == "factored" and not tiles
        assert (y.grad_fn.name() == "DirectBackward") != in_two_parts
        assert bool(layer._nodes) != in_two_parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("of", "spec"), CASES)
def test_under_autocast(of, spec, dtype):
    layer, x = case(of, spec)
    layer.path = "reconstruct"
    for given in (x, x.to(dtype).float()):
        assert check(layer, given, dtype).grad_fn.name() == "DirectBackward"


@pytest.mark.parametrize(("of", "spec"), CASES)
def test_without_the_library_it_is_the_same(of, spec):
    layer, x = case(of, spec)
    for path in paths(layer):
        layer.path = path
        with ff.use_backend("reference"):
            check(layer, x)


@pytest.mark.parametrize("of", ["linear", "1×1", "3×3", "depthwise"])
def test_the_gradient_has_a_gradient(of):
    layer, x = case(of, "few ranks")
    for path in paths(layer):
        layer.path = path
        found = []
        for kind in (torch.float32, torch.float64):
            one, given = copy.deepcopy(layer).to(kind), x.to(kind).requires_grad_()
            inputs = [given, *one.parameters()]
            first = torch.autograd.grad(one(given).square().sum(), inputs, create_graph=True)
            total = sum((n + 1) * g.square().sum() for n, g in enumerate(first))
            found.append(torch.autograd.grad(total, inputs, allow_unused=True))
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.double() - other).norm() <= 2e-5 * other.norm()


@pytest.mark.parametrize("frozen", ["sigma", "A", "B", "bias"])
@pytest.mark.parametrize(("of", "spec"), [(of, spec) for of in ("linear", "1×1", "3×3") for spec in SPECS])
def test_what_is_frozen_gets_no_gradient(of, spec, frozen):
    layer, x = case(of, spec)
    layer.get_parameter(frozen).requires_grad_(False)
    for path in paths(layer):
        layer.path = path
        for given in (x, x.requires_grad_()):
            layer.zero_grad()
            y = layer(given)
            grad = torch.randn_like(y)
            y.backward(grad)
            names = ["x", *(name for name, _ in layer.named_parameters())]
            for name, want in zip(names, wanted(layer.requires_grad_(), x, grad)[2], strict=True):
                if name in ("x", frozen):
                    continue
                assert (layer.get_parameter(name).grad.double() - want).norm() <= 2e-6 * want.norm(), name
            assert layer.get_parameter(frozen).grad is None
            layer.get_parameter(frozen).requires_grad_(False)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("of", "spec"), [(of, spec) for of in ("linear", "sequences") for spec in SPECS])
def test_an_adapter_is_one_node(of, spec, dtype):
    layer, x = case(of, spec)
    layer.sigma.requires_grad_(False)
    layer.path = "factored"
    for _ in range(2):
        _, grad, gradients = wanted(copy.deepcopy(layer).requires_grad_(), x)
        given = x.detach().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = layer(given)
        assert y.grad_fn.name() == "DirectBackward"
        names = ["x", *(name for name, _ in layer.named_parameters())]
        y.backward(grad.to(y.dtype))
        tolerance = 2e-6 if dtype is None else 2 * torch.finfo(dtype).eps
        for name, want in zip(names, gradients, strict=True):
            found = given.grad if name == "x" else layer.get_parameter(name).grad
            assert (found is None) == (name == "sigma")
            assert found is None or (found.double() - want).norm() <= tolerance * want.norm(), name
        layer.zero_grad()


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [{"rank": 3}, {"ratio": 0.3}], ids=str)
@pytest.mark.parametrize("shape", [(5, 20), (2, 3, 20), (20,)])
def test_an_adapter_with_dropout_is_one_node_behind_it(shape, layout, dtype, create_graph):
    layer = drawn(ff.nn.FactorizedLinear(20, 12, spec=ff.LowRank(**layout, scaling=0.7, dropout=0.5)), None)
    layer.sigma.requires_grad_(False)
    exact, x = copy.deepcopy(layer).double(), torch.randn(shape, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = layer(x)
    assert y.grad_fn.name() == "DirectBackward" or x.dim() == 1
    torch.manual_seed(3)
    seen = wide * (torch.nn.functional.dropout(torch.ones(shape), 0.5)).double()
    a, b = (exact.A, exact.B) if "rank" in layout else (exact.B.T, exact.A.T)
    wanted = wide @ exact.sigma.T + 0.7 * (seen @ a.T @ b.T) + exact.bias
    grad = torch.randn_like(wanted)
    tolerance = 2e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    inputs = [t for t in (x, *layer.parameters()) if t.requires_grad]
    of_exact = [t for t in (wide, *exact.parameters()) if t.requires_grad]
    found = torch.autograd.grad(y, inputs, grad.to(y.dtype), create_graph=create_graph)
    assert (y.double() - wanted).norm() <= tolerance * wanted.norm()
    for one, other in zip(found, torch.autograd.grad(wanted, of_exact, grad), strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("spec", [ff.Rank1(rank=2), SPECS["few ranks"], SPECS["separable"]], ids=str)
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_in_batches(spec, frozen, path):
    """Of sequences, whose rows a node takes apart."""
    layer = drawn(ff.nn.FactorizedLinear(10, 7, spec=spec), 0.6)
    layer.path = path
    layer.get_parameter("mu" if isinstance(spec, ff.Rank1) else "sigma").requires_grad_(not frozen)
    x = torch.randn(4, 5, 10, requires_grad=True)
    inputs, y = [x, *(p for p in layer.parameters() if p.requires_grad)], layer(x)
    gradients = torch.randn(3, *y.shape)
    found = torch.autograd.grad(y, inputs, gradients, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in gradients]
    for all_, ones in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(all_, torch.stack(ones))


@pytest.mark.parametrize("spec", SPECS)
def test_the_gradient_of_an_adapter_has_a_gradient(spec):
    found, (layer, x) = [], case("sequences", spec)
    layer.sigma.requires_grad_(False)
    for kind, path in ((torch.float32, "factored"), (torch.float64, "reconstruct")):
        one, given = copy.deepcopy(layer).to(kind), x.to(kind).requires_grad_()
        one.path = path
        inputs = [given, *(p for p in one.parameters() if p.requires_grad)]
        first = torch.autograd.grad(one(given).square().sum(), inputs, create_graph=True)
        found.append(torch.autograd.grad(sum((n + 1) * g.square().sum() for n, g in enumerate(first)), inputs))
    for one, other in zip(*found, strict=True):
        assert (one.double() - other).norm() <= 2e-5 * other.norm()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), ((7, 4), 2)])
def test_depthwise_gradients_by_own_kernels(kernel, stride, dtype, last):
    """Where W is made."""
    layer = ff.nn.FactorizedConv2d(16, 16, kernel, stride=stride, padding=1, groups=16, spec=SPECS["few ranks"])
    layer, x = drawn(layer, None).to(dtype), torch.randn(2, 16, 9, 11, dtype=dtype)
    if last:
        layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    layer.path = "reconstruct"
    _, grad, gradients = wanted(layer, x)
    x.requires_grad_()
    y = layer(x)
    inputs = [x, *layer.parameters()]
    tolerance = 2e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for found, want in zip(torch.autograd.grad(y, inputs, grad.to(dtype)), gradients, strict=True):
        assert (found.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_recorded_takes_other_numbers_of_rows(frozen):
    layer = drawn(ff.nn.FactorizedLinear(64, 48, spec=SPECS["few ranks"]), None)
    layer.sigma.requires_grad_(not frozen)
    layer.path = "factored"
    x, other = torch.randn(4, 5, 64), torch.randn(7, 3, 64)
    expected = layer(other)
    sizes = ({0: torch.export.Dim("images"), 1: torch.export.Dim("tokens")},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    compiled(x)
    for recorded in (torch.jit.trace(layer, x, check_trace=False), exported, compiled):
        torch.testing.assert_close(recorded(other), expected)


@pytest.mark.parametrize("rank", [16, 17])
def test_scaling_times_a_factor_may_be_out_of_range(rank):
    """Of float16, where W is not."""
    layer = ff.nn.FactorizedLinear(64, 64, bias=False, spec=ff.LowRank(rank=rank, scaling=1000.0)).half()
    with torch.no_grad():
        layer.sigma.zero_()
        layer.B.normal_(std=80.0)
        layer.A.normal_(std=1e-3)
        product = 1000 * (layer.B.double() @ layer.A.double())
        assert (layer.weight - product).norm() < 2e-3 * product.norm()


@pytest.mark.parametrize("spec", [SPECS["few ranks"], ff.Rank1()], ids=str)
def test_a_bias_with_gaps(spec):
    layer = drawn(ff.nn.FactorizedLinear(20, 65, spec=spec), None).bfloat16()
    layer.bias = torch.nn.Parameter(torch.randn(65, 2).bfloat16()[:, 0])
    dense, x = copy.deepcopy(layer).to_dense().double(), torch.randn(40, 20).bfloat16()
    for training in (True, False):
        for path in paths(layer) if isinstance(spec, ff.LowRank) else ["reconstruct"]:
            layer.train(training).path = path
            with torch.set_grad_enabled(training):
                y = layer(x)
            wanted = dense(x.double())
            assert (y.double() - wanted).norm() < 1e-2 * wanted.norm()


def test_under_autocast_what_an_adapter_sees_behind_dropout_is_kept_once_in_its_type():
    layer = drawn(ff.nn.FactorizedLinear(64, 48, spec=ff.LowRank(rank=4, dropout=0.5)), None)
    layer.sigma.requires_grad_(False)
    kept = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.data_ptr(): t}) or t, lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(16, 64, requires_grad=True))
    of_rows = [t.dtype for t in kept.values() if t.shape == (16, 64)]  # with what dropout multiplies by
    assert set(of_rows) == {torch.bfloat16} and len(of_rows) == 2


def test_an_image_of_one_channel_that_has_gaps():
    layer = ff.nn.FactorizedConv2d(1, 3, (3, 1)).to(memory_format=torch.channels_last)
    x = torch.randn(1, 1, 1, 9).transpose(2, 3)
    torch.testing.assert_close(layer(x), torch.nn.functional.conv2d(x, layer.weight, layer.bias))
