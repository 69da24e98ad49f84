"""Layers, networks and optimizers on a GPU, as their users meet them, against the same on the CPU.

The kernels behind them are tested in tests/ops, federations in tests/methods.
"""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from drawing import drawn
from torch import nn

import fastfact as ff
from fastfact import models
from fastfact.nn import choice
from fastfact.ops import weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = "cuda"
SPECS = [
    ff.Rank1(),
    ff.Rank1(rank=2, sparse=False),
    ff.Rank1("kernel", 3),
    ff.Rank1("kernel", 2, False),
    ff.Rank1("view"),
    ff.LowRank(0.3),
    ff.Hadamard(),
]
FORMATS = [torch.contiguous_format, torch.channels_last]
CONVOLUTIONS = [
    (5, 7, 3, {"padding": 1}),
    (12, 18, 3, {"stride": (2, 1), "padding": (1, 0), "groups": 3}),
    (16, 16, 5, {"padding": 2, "groups": 16}),
    (9, 10, 1, {"bias": False}),
    (4, 6, (1, 7), {"padding": "same"}),
    (6, 4, 3, {"padding": 2, "padding_mode": "circular", "dilation": 2}),
]


@pytest.fixture(autouse=True)
def exact():
    """float32 as it is, and the same numbers in each test."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Choices are measured, and remembered in a folder of the test's own."""
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path))
    choice.forget()
    yield
    choice.forget()


def packed(model, density=None):
    for layer in ff.factorized_layers(model).values():
        if "mu" in layer.factors():
            layer.compact(density)
    return model


def passed(layer, x):
    """(name → what a forward and backward pass gives), on the CPU."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y.device, y.dtype).reshape(y.shape)
    (y * weights).sum().backward()
    found = {"y": y, "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return {name: t.detach().cpu() for name, t in found.items() if t is not None}


def same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, **tolerance, msg=lambda said, name=name: f"{name}: {said}")


def forced(layer, x):
    """The layer on each path that there is for x."""
    for path in layer.paths:
        one = copy.deepcopy(layer)
        one.path = path
        try:
            one(x)
        except ValueError:
            continue
        yield path, one


@pytest.mark.parametrize("how", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_convolutions(spec, how):
    i, o, kernel, settings = how
    for form in FORMATS:
        for density in (None, 0.2):
            layer = drawn(ff.nn.FactorizedConv2d(i, o, kernel, **settings, spec=spec, dtype=torch.float64), density)
            layer.to(memory_format=form)
            x = torch.randn(3, i, 11, 8, dtype=torch.float64).to(memory_format=form)
            expected, there = passed(copy.deepcopy(layer), x), copy.deepcopy(layer).to(DEVICE)
            for _, one in forced(there, x.to(DEVICE)):
                same(passed(one, x.to(DEVICE)), expected, rtol=1e-8, atol=1e-10)
                with torch.no_grad():
                    torch.testing.assert_close(one.eval()(x.to(DEVICE)).cpu(), expected["y"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.__class__ is not ff.Rank1 or s.layout == "spatial"], ids=str)
@pytest.mark.parametrize("shape", [(33, 20), (3, 2, 33, 7)], ids=str)
def test_linear_layers(spec, shape):
    i, o = shape[-2] if len(shape) == 2 else 7, 20
    for density in (None, 0.2):
        layer = drawn(ff.nn.FactorizedLinear(i, o, spec=spec, dtype=torch.float64), density)
        x = torch.randn(*(shape if len(shape) > 2 else (5, i)), dtype=torch.float64)
        expected, there = passed(copy.deepcopy(layer), x), copy.deepcopy(layer).to(DEVICE)
        for _, one in forced(there, x.to(DEVICE)):
            same(passed(one, x.to(DEVICE)), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("density", [None, 0.1])
def test_layers_in_lower_precision_are_as_good_as_the_dense_layer(dtype, density):
    for spec in (ff.Rank1(), ff.Rank1(sparse=False), ff.Rank1("kernel"), ff.LowRank(0.2)):
        layer = drawn(ff.nn.FactorizedConv2d(32, 48, 3, padding=1, spec=spec, dtype=torch.float64), density)
        x = torch.randn(4, 32, 14, 14, dtype=torch.float64).to(memory_format=torch.channels_last)
        expected = passed(copy.deepcopy(layer), x)
        rounded = copy.deepcopy(layer).to(DEVICE, dtype, memory_format=torch.channels_last)
        y = passed(rounded.to_dense(), x.to(DEVICE, dtype))
        for path, one in forced(rounded, x.to(DEVICE, dtype)):
            found = passed(one, x.to(DEVICE, dtype))
            for name in ("y", "x"):
                error, bound = ((t[name].double() - expected[name]).norm() for t in (found, y))
                assert error <= 2 * bound + 2 ** -(9 if dtype.itemsize == 2 else 20) * expected[name].norm(), (
                    path,
                    name,
                )


NETWORKS = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "convnext_tiny", "vit_b_32", "swin_t"]


def network(name):
    torchvision = pytest.importorskip("torchvision.models")
    sized = {"image_size": 64} if name.startswith("vit") else {}
    return torchvision.get_model(name, weights=None, num_classes=10, **sized)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_as_the_dense_ones_do(name, form, measured):
    """The first step has the loss of the dense network, and pruned, packed and evaluated it gives what that gives."""
    ours = ff.factorize(network(name), ff.Rank1(), init="svd").to(DEVICE, memory_format=form)
    for module in ours.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randn(4, 3, 64, 64).to(DEVICE, memory_format=form)
    y = torch.randint(10, (4,), device=DEVICE)
    for layer in ff.factorized_layers(ours).values():
        layer.prune_(0.1)
    dense = ff.densify(copy.deepcopy(ours)).to(memory_format=form)
    packed(ours)
    for model in (ours, dense):
        for module in model.modules():
            if type(module).__name__ == "StochasticDepth":
                module.p = 0.0
    losses = {}
    for side, model in (("ours", ours), ("dense", dense)):
        optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
        losses[side] = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses[side].append(loss.item())
    assert losses["ours"][0] == pytest.approx(losses["dense"][0], rel=1e-3)
    assert torch.tensor(losses["ours"]).isfinite().all()
    again = ff.densify(copy.deepcopy(ours)).to(memory_format=form).eval()
    with torch.no_grad():
        found, expected = ours.eval()(x), again(x)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
        torch.testing.assert_close(ours(x), found, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert {path for question, path in choice.choices().items() if "cuda" in question} <= set(choice.PATHS)


def test_a_choice_is_measured_there(measured):
    layer = drawn(ff.nn.FactorizedConv2d(16, 16, 3, padding=1, spec=ff.Rank1(sparse=False)), None).to(DEVICE)
    x = torch.randn(2, 16, 8, 8, device=DEVICE, requires_grad=True)
    layer(x).sum().backward()
    assert not choice.choices()
    layer.eval()
    with torch.no_grad():
        layer(x)
    asked = [question for question in choice.choices() if "cuda" in question]
    assert len(asked) == 1, choice.choices()
    seconds, chosen = layer.times(x, False)
    assert {"dense", "reconstruct", "fused"} <= seconds.keys() and chosen in seconds


def test_a_state_goes_to_the_gpu_and_back():
    layer = nn.Sequential(drawn(ff.nn.FactorizedConv2d(6, 8, 3), 0.3), nn.Flatten(), ff.nn.FactorizedLinear(288, 5))
    x = torch.randn(2, 6, 8, 8)
    expected = layer(x)
    there = copy.deepcopy(layer).to(DEVICE)
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    back = nn.Sequential(ff.nn.FactorizedConv2d(6, 8, 3), nn.Flatten(), ff.nn.FactorizedLinear(288, 5))
    back.load_state_dict(torch.load(file, map_location="cpu"))
    torch.testing.assert_close(back(x), expected)
    torch.testing.assert_close(there.cpu()(x), expected)


@pytest.mark.parametrize("kind", ["ProxSGD", "ProxAdamW"])
def test_optimizers_step_as_on_the_cpu(kind):
    def steps(device):
        torch.manual_seed(3)
        model = ff.factorize(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).double(), ff.Rank1()
        )
        model = model.to(device)
        packed(model, 0.5)
        optimizer = getattr(ff.optim, kind)(model.parameters(), lr=0.01, l1=0.01, weight_decay=0.02)
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    same(steps(DEVICE), steps("cpu"), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_a_scaler(dtype):
    model = ff.factorize(models.build("resnet9", (3, 32, 32), 10), ff.Rank1()).to(
        DEVICE, memory_format=torch.channels_last
    )
    packed(model, 0.3)
    optimizer, scaler = ff.optim.ProxSGD(model.parameters(), lr=0.01, momentum=0.9, l1=1e-5), torch.amp.GradScaler()
    x, y = torch.randn(16, 3, 32, 32, device=DEVICE), torch.randint(10, (16,), device=DEVICE)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("training", [True, False])
def test_compiled(training):
    model = ff.factorize(models.build("resnet8", (3, 32, 32), 10), ff.Rank1()).to(DEVICE)
    packed(model, 0.3)
    model.train(training)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    plain, compiled = copy.deepcopy(model), torch.compile(model)
    if training:
        same(
            passed(compiled, x),
            {f"_orig_mod.{n}" if n not in "xy" else n: t for n, t in passed(plain, x).items()},
            rtol=1e-3,
            atol=1e-3,
        )
    else:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spec", [ff.Rank1(), ff.Rank1(sparse=False), ff.LowRank(0.2)], ids=str)
def test_captured_in_a_graph(spec, training):
    """Replayed on other images, with other factors."""
    model = nn.Sequential(ff.nn.FactorizedConv2d(8, 16, 3, spec=spec), nn.ReLU(), nn.Flatten(),
                          ff.nn.FactorizedLinear(576, 5, spec=spec)).to(DEVICE)  # fmt: skip
    packed(model, 0.3)
    model.train(training)
    x = torch.randn(4, 8, 8, 8, device=DEVICE)

    def run():
        with torch.set_grad_enabled(training):
            y = model(x)
        return [y, *(torch.autograd.grad(y.square().sum(), list(model.parameters())) if training else ())]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    with torch.no_grad():
        x.normal_()
        for p in model.parameters():
            p.mul_(1.1)
    graph.replay()
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def write_in_place(p):
    p.add_(0.25)


def write_by_data(p):
    p.data.mul_(0.5)


def write_by_foreach(p):
    torch._foreach_add_([p], 0.25)


def write_by_pointer(p):
    """As a kernel does that is given the address."""
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(p.detach())).sub_(0.25)


def write_a_view(p):
    p.view(-1)[:1] += 1


def give_other_memory(p):
    p.data = torch.randn_like(p)


WRITES = [write_in_place, write_by_data, write_by_foreach, write_by_pointer, write_a_view, give_other_memory]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("density", [0.2, None], ids=["compact", "dense"])
def test_evaluation_keeps_the_weight_and_sees_every_write(write, density):
    conv = drawn(ff.nn.FactorizedConv2d(8, 16, 3, padding=1), density)
    linear = drawn(ff.nn.FactorizedLinear(16, 12, spec=ff.Rank1(rank=3)), density)
    model = nn.Sequential(conv, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear).to(DEVICE).eval()
    x = torch.randn(4, 8, 9, 9, device=DEVICE)

    def expected():
        # nothing that asks for memory to write to
        with ff.use_backend("reference"):
            maps = F.conv2d(x, conv._weight(None), conv.bias, padding=1)
            return F.linear(maps.mean((2, 3)), linear._weight(None), linear.bias)

    with torch.no_grad():
        for name in ("u", "v", "mu"):
            for _ in range(3):
                torch.testing.assert_close(model(x), expected())
            assert len(conv._cache) == len(linear._cache) == 1, name
            for layer in (conv, linear):
                write(getattr(layer, name))
            torch.testing.assert_close(model(x), expected())
        conv.bias.add_(1)
        torch.testing.assert_close(model(x), expected())
        model.load_state_dict({name: tensor * 1.5 if tensor.is_floating_point() else tensor
                               for name, tensor in model.state_dict().items()})  # fmt: skip
        torch.testing.assert_close(model(x), expected())
    optimizer = ff.optim.ProxSGD(model.parameters(), lr=0.1, l1=0.01)
    model(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_evaluation_under_autocast(dtype):
    layer = drawn(ff.nn.FactorizedConv2d(8, 16, 3, padding=1), 0.2).to(DEVICE).eval()
    x = torch.randn(4, 8, 9, 9, device=DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, dtype):
        for _ in range(3):
            for _ in range(3):
                y, expected = layer(x), F.conv2d(x, layer._weight(None), layer.bias, padding=1)
                assert y.dtype == expected.dtype == dtype
                torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
            layer.u.mul_(1.5)
            layer.mu.data.mul_(1.5)


def test_a_kept_weight_serves_without_being_made(monkeypatch):
    layer = drawn(ff.nn.FactorizedConv2d(8, 16, 3, padding=1), 0.2).to(DEVICE).eval()
    x = torch.randn(4, 8, 9, 9, device=DEVICE)
    with torch.no_grad():
        expected = layer(x)
        monkeypatch.setattr(type(layer.spec), "weight", None)
        monkeypatch.setattr(layer, "_forward", None)
        for _ in range(3):
            torch.testing.assert_close(layer(x), expected)


def test_training_is_one_call(monkeypatch):
    """Neither forward nor backward goes through the ops."""
    model = nn.Sequential(
        ff.nn.FactorizedConv2d(8, 16, 3, spec=ff.Rank1()), nn.Flatten(), ff.nn.FactorizedLinear(576, 5)
    )
    packed(model.to(DEVICE), 0.3)
    x = torch.randn(4, 8, 8, 8, device=DEVICE, requires_grad=True)
    expected = passed(copy.deepcopy(model), x)
    for name in ("forward", "backward"):
        monkeypatch.setattr(weights._Made, name, None)
    same(passed(model, x), expected)


def test_a_recorded_layer_reads_its_factors_where_they_lie():
    """Evaluated before and after it is recorded: its graph sees what is written to the factors afterwards."""
    layer = drawn(ff.nn.FactorizedConv2d(8, 16, 3, padding=1), 0.2).to(DEVICE).eval()
    x = torch.randn(4, 8, 9, 9, device=DEVICE)
    with torch.no_grad():
        layer(x), layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        layer(x), layer(x)
        for p in layer.parameters():
            p.mul_(1.5)
        expected = layer(x).clone()
        graph.replay()
        torch.testing.assert_close(y, expected)


def test_adapters_of_a_frozen_network():
    def steps(device):
        torch.manual_seed(4)
        plain = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).double()
        model = ff.factorize(plain, ff.LowRank(rank=4, scaling=2.0), freeze=True).to(device)
        x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: p.detach().cpu() for name, p in model.named_parameters()} | {"y": model(x).detach().cpu()}

    same(steps(DEVICE), steps("cpu"), rtol=1e-6, atol=1e-8)


def test_threads_and_streams_of_ones_own():
    """Layers work on the stream that is current."""
    layer = drawn(ff.nn.FactorizedConv2d(32, 32, 3, padding=1), 0.1).to(DEVICE)
    x = torch.randn(8, 32, 32, 32, device=DEVICE)
    expected = layer(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = torch.randn(64, 1 << 20, device=DEVICE).sort().values.sum() * 0 + x
        found = layer(other)
    stream.synchronize()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_cohort_with_batch_norm(form, dtype):
    """Images in both formats: what each client computes alone, where that is to be had to the last digits."""

    def model():
        layers = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8, 3)).to(dtype=dtype, memory_format=form)

    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(12, 3, 8, 8, generator=g), torch.randint(3, (12,), generator=g)) for _ in range(4)]
    clients = [ff.Client(train=part, test=part) for part in data]

    def run(cohort, graphs):
        how = {"epochs": 4, "batch_size": 4, "lr": 0.05, "seed": 3, "device": DEVICE}
        fed = ff.Federation(model, clients, "factorized-fl-beta", cohort=cohort, graphs=graphs, **how)
        fed.fit(2)
        return fed.states.state

    alone, together, replayed = run(1, False), run(4, False), run(4, True)
    for name, tensor in together.items():
        torch.testing.assert_close(replayed[name], tensor, msg=lambda said, name=name: f"{name}: {said}")
        if dtype == torch.float64:
            assert (tensor - alone[name]).abs().max() <= 1e-9 * (1 + tensor.abs().max()), name
        assert tensor.isfinite().all()
