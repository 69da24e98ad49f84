"""What people do to a layer of PyTorch, done to a factorized one: it works, or says at once that it cannot."""

import contextlib
import copy
import itertools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fastfact as ff

SPECS = [ff.Rank1(), ff.Rank1("kernel", 2), ff.Rank1(sparse=False), ff.LowRank(0.5), ff.Hadamard()]


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


def conv(spec=None, density=None, path="auto", **settings):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedConv2d(4, 6, 3, padding=1, spec=spec or ff.Rank1(), dtype=torch.float64, **settings)
    if "mu" in layer.factors():
        nn.init.normal_(layer.mu)
        if density is not None:
            layer.compact(density)
    if "B" in layer.factors():
        nn.init.normal_(layer.B)
    layer.path = path
    return layer


def linear(spec=None, density=None, path="auto"):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(4, 6, spec=spec or ff.Rank1(), dtype=torch.float64)
    if "mu" in layer.factors():
        nn.init.normal_(layer.mu)
        if density is not None:
            layer.compact(density)
    if "B" in layer.factors():
        nn.init.normal_(layer.B)
    layer.path = path
    return layer


def sample(layer, n=3):
    shape = (n, 4, 5, 5) if isinstance(layer, ff.nn.FactorizedConv2d) else (n, 4)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


FORMS = {
    "dense": lambda make: make(),
    "compact": lambda make: make(density=0.4),
    "compact, factored": lambda make: make(density=0.4, path="factored"),
    "no μ, factored": lambda make: make(ff.Rank1(sparse=False), path="factored"),
    "kernel layout": lambda make: make(ff.Rank1("kernel", 2), density=0.4, path="factored"),
    "LowRank": lambda make: make(ff.LowRank(0.5)),
    "Hadamard": lambda make: make(ff.Hadamard()),
}
MAKES = {"conv": conv, "linear": linear}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("train", [True, False])
def test_a_parametrized_factor_is_honoured(make, form, train):
    plain = form(make).train(train)
    x = sample(plain)
    for name in plain.factors():
        layer, twice = copy.deepcopy(plain), copy.deepcopy(plain)
        parametrize.register_parametrization(layer, name, Twice())
        with torch.no_grad():
            getattr(twice, name).mul_(2)
        torch.testing.assert_close(layer(x), twice(x))
        with torch.no_grad():
            torch.testing.assert_close(layer(x), twice(x))
        torch.testing.assert_close(layer.weight, twice.weight)
        torch.testing.assert_close(layer.to_dense()(x), twice(x))
        assert layer.density == twice.density
        layer(x).sum().backward()
        assert layer.parametrizations[name].original.grad.abs().sum() > 0
        parametrize.remove_parametrizations(layer, name)
        torch.testing.assert_close(layer(x), twice(x))


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_pruned_factor_is_honoured(make, form):
    plain = form(make)
    x = sample(plain)
    for name, factor in plain.factors().items():
        layer, zeroed = copy.deepcopy(plain), copy.deepcopy(plain)
        prune.identity(layer, name)
        torch.testing.assert_close(layer(x), plain(x))
        mask = torch.arange(factor.numel()).reshape(factor.shape) % 2
        prune.custom_from_mask(layer, name, mask)
        with torch.no_grad():
            getattr(zeroed, name).mul_(mask)
        for mode in (layer.train, layer.eval):
            mode()
            torch.testing.assert_close(layer(x), zeroed(x))
            torch.testing.assert_close(layer.weight, zeroed.weight)
        assert layer.density == zeroed.density
        layer(x).square().sum().backward()
        gradient = getattr(layer, f"{name}_orig").grad
        assert torch.equal(gradient * (1 - mask), torch.zeros_like(gradient))
        prune.remove(layer, name)
        torch.testing.assert_close(layer(x), zeroed(x))


@pytest.mark.parametrize("change", [lambda layer: layer.compact(0.1), lambda layer: layer.prune_(0.1)])
def test_a_pruned_mu_changes_its_form_only_when_it_is_a_parameter_again(change):
    layer = conv()
    prune.identity(layer, "mu")
    with pytest.raises(ValueError, match="mu is no parameter of the layer"):
        change(layer)
    with pytest.raises(ValueError, match="mu is no parameter of the layer"):
        ff.Schedule(warmup=0, target_density=0.1).step(layer, 1)
    prune.remove(layer, "mu")
    assert change(layer).density == 22 / 216


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("form", ["dense", "compact, factored", "LowRank"])
def test_weight_norm_of_a_factor_works_and_of_the_weight_is_refused(make, form):
    layer = FORMS[form](make)
    x = sample(layer)
    expected = layer(x)
    name = "A" if form == "LowRank" else "v"
    nn.utils.weight_norm(layer, name)
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert getattr(layer, f"{name}_g").grad is not None
    nn.utils.remove_weight_norm(layer, name)
    torch.testing.assert_close(layer(x), expected)
    for refused in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal):
        with pytest.raises((ValueError, KeyError), match="weight"):
            refused(layer)
    torch.testing.assert_close(layer(x), expected)


WRITES = {
    "zeros_": lambda layer: nn.init.zeros_(layer.weight),
    "normal_": lambda layer: nn.init.normal_(layer.weight),
    "kaiming_uniform_": lambda layer: nn.init.kaiming_uniform_(layer.weight, a=5**0.5),
    "data": lambda layer: layer.weight.data.zero_(),
    "data, part": lambda layer: layer.weight.data[0].mul_(2),
    "element": lambda layer: layer.weight.__setitem__(0, 1.0),
    "row": lambda layer: layer.weight[0].fill_(1.0),
    "view": lambda layer: layer.weight.view(-1).copy_(torch.zeros(1)),
    "replaced data": lambda layer: setattr(layer.weight, "data", torch.zeros(1)),
    "out": lambda layer: torch.mul(layer.weight.data, 2, out=layer.weight.data),
    "foreach": lambda layer: torch._foreach_zero_([layer.weight.data]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_the_weight_is_an_error(write):
    with torch.no_grad(), pytest.raises(RuntimeError, match="made from its factors"):
        write(conv())


@pytest.mark.parametrize("value", [torch.zeros(6, 4, 3, 3), nn.Parameter(torch.zeros(6, 4, 3, 3)), None])
def test_an_assignment_to_the_weight_is_an_error_that_says_what_to_do(value):
    layer = conv()
    for assign in (lambda: setattr(layer, "weight", value), lambda: layer.register_parameter("weight", value)):
        with pytest.raises(AttributeError, match=r"made from the factors.*reset_parameters\('svd', dense=W\)"):
            assign()


def test_the_weight_is_a_tensor_like_others():
    layer = conv()
    weight = layer.weight
    assert isinstance(weight, torch.Tensor) and weight.requires_grad and weight.shape == (6, 4, 3, 3)
    weight.square().sum().backward()
    assert layer.u.grad is not None
    own = weight.detach()
    own.mul_(2)
    for result in (weight + 1, weight.clone(), weight.sum(), own, nn.Parameter(weight.detach()).data):
        assert type(result) is torch.Tensor
    layer.reset_parameters("svd", dense=torch.ones_like(own))
    torch.testing.assert_close(layer.weight, torch.ones_like(own))
    assert torch.equal(copy.deepcopy(layer.weight.data), layer.weight)


EMA = {
    "multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "one": {"avg_fn": lambda a, b, n: 0.9 * a + 0.1 * b},
    "mean": {},
}


@pytest.mark.parametrize("how", EMA.values(), ids=EMA)
@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_an_average_of_parameters_works_and_one_of_positions_is_refused(how, path):
    layer = conv(density=0.4, path=path)
    x = sample(layer)
    good, bad = AveragedModel(layer, **how), AveragedModel(layer, use_buffers=True, **how)
    for _ in range(3):
        with torch.no_grad():
            layer.mu.add_(0.1)
        good.update_parameters(layer)
        bad.update_parameters(layer)
    assert torch.equal(good.module.mu_index, layer.mu_index)
    assert torch.isfinite(good(x)).all() and not torch.equal(good(x), layer(x))
    if torch.equal(bad.module.mu_index, layer.mu_index):  # exact by luck
        torch.testing.assert_close(bad(x), good(x))
        return
    for use in (lambda: bad(x), bad.state_dict, lambda: bad.module.weight, lambda: bad.module.expand()):
        with pytest.raises(RuntimeError, match="positions are others now"):
            use()


def test_an_average_over_values_of_the_state_is_refused_when_positions_change():
    """As timm's ModelEmaV2 averages."""
    layer = conv(density=0.4)
    ema = copy.deepcopy(layer)
    other = conv(density=0.4)
    other.set_support(other.mu.detach(), torch.arange(len(other.mu), dtype=torch.int32))
    for mine, theirs in zip(ema.state_dict().values(), other.state_dict().values(), strict=True):
        mine.copy_(0.9 * mine + 0.1 * theirs)
    with pytest.raises(RuntimeError, match="positions are others now"):
        ema.state_dict()
    ema.load_state_dict(other.state_dict())
    torch.testing.assert_close(ema(sample(layer)), other(sample(layer)))


def test_buffers_may_be_written_with_what_they_hold():
    """As DistributedDataParallel does before each forward."""
    layer = conv(density=0.4)
    expected = layer(sample(layer))
    for _ in range(2):
        layer.mu_index.copy_(layer.mu_index.clone())
        assert torch.equal(layer(sample(layer)), expected)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spec", [*SPECS, "adapter"], ids=str)
def test_in_place_operations_after_a_linear_layer(spec, bias, shape, train):
    how = {"freeze": True} if spec == "adapter" else {}
    layer = ff.factorize(nn.Linear(6, 5, bias=bias), ff.LowRank(rank=2) if how else spec, **how).train(train)
    x = torch.randn(shape, requires_grad=True)
    wanted = torch.autograd.grad((F.linear(x, layer.weight.detach(), layer.bias) / 2).relu().sum(), x)
    for _ in range(3):
        found = torch.autograd.grad(F.relu_(layer(x).div_(2)).sum(), x)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("density", [None, 0.4, 1.0])
@pytest.mark.parametrize("train", [True, False])
def test_a_layer_that_has_run_is_copied_with_its_parametrizations(density, train):
    layer = ff.nn.FactorizedLinear(64, 64)
    if density:
        layer.compact(density)
    x = torch.ones(2, 64)
    layer.train(train)(x)
    nn.utils.parametrize.register_parametrization(layer, "v", nn.Identity())
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("density", [0.3, None])
@pytest.mark.parametrize("path", ["auto", "reconstruct", "factored", "fused"])
def test_in_place_activations_after_a_convolution(path, density, channels_last):
    spec = ff.Rank1() if density else ff.Rank1(sparse=False)
    layer = conv(spec, density, path).float()
    x = torch.randn(2, 4, 6, 6)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    gradients = []
    for inplace in (True, False):
        layer.zero_grad()
        y = nn.functional.relu(layer(x), inplace=inplace)
        y = nn.functional.relu(layer(x[0]), inplace=inplace).sum() + y.square().sum()
        y.backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["alexnet", "vgg11", "squeezenet1_1"])
def test_networks_with_activations_in_place_train_a_step(name, sparse, channels_last):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=4)
    if name != "squeezenet1_1":  # the classifiers are most of the time, and no part of the question
        model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(1), nn.LazyLinear(4)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 64, 64))
        model.train()
    ff.factorize(model, ff.Rank1(sparse=sparse))
    for layer in ff.factorized_layers(model).values():
        layer.path = "factored" if isinstance(layer, ff.nn.FactorizedConv2d) else "auto"
        if sparse:
            nn.init.normal_(layer.mu, std=0.01)
            layer.compact(0.02)
    x = torch.randn(2, 3, 64, 64)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1]))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("density", [0.4, None])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_gradients_of_gradients(make, density, path):
    layer = make(ff.Rank1() if density else ff.Rank1(sparse=False), density, path)
    x = sample(layer, 2).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(function, (x, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("path", ["auto", "factored"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("bias", [True, False])
def test_autocast_gives_bfloat16_as_dense_layers_do(make, spec, path, bias):
    layer = make(spec, 0.3 if spec.sparse_factor and getattr(spec, "sparse", False) else None).float()
    if not bias:
        layer.bias = None
    if path == "factored" and not layer.can_factor:
        path = "reconstruct"
    layer.path = path
    x = sample(layer).float()
    for mode in (layer.train, layer.eval):
        mode()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            assert y.dtype == layer.to_dense()(x).dtype == torch.bfloat16
            y.float().sum().backward()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("image", [(6, 5), (6, 1), (1, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("density", [None, 0.3])
@pytest.mark.parametrize("stride", [1, 2])
def test_images_of_one_channel_give_channels_last_as_a_dense_layer_does(image, density, stride):
    dense = nn.Conv2d(1, 8, 3, stride, padding=1).to(memory_format=torch.channels_last)
    ours = ff.nn.FactorizedConv2d.from_dense(dense, ff.Rank1(rank=9), init="svd")
    if density:
        ours.prune_(density)
        dense = ours.to_dense()
    ours.compact()
    contiguous = torch.randn(3, 1, *image)
    last = contiguous.to(memory_format=torch.channels_last)
    assert image == (1, 1) or last.stride() != contiguous.stride()
    for x, training in itertools.product((contiguous, last), (True, False)):
        ours.train(training)
        with torch.set_grad_enabled(training):
            for path in ("auto", "reconstruct", "factored"):
                ours.path = path
                y, expected = ours(x), dense(x)
                assert y.is_contiguous(memory_format=torch.channels_last) and y.stride(1) == expected.stride(1)
                torch.testing.assert_close(y, expected)
                if training:
                    grads = [
                        torch.autograd.grad(one.square().sum(), layer.bias)
                        for one, layer in ((y, ours), (expected, dense))
                    ]
                    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("shape", [(1, 3, 3), (8, 1, 1), (4, 3, 3)], ids=str)
@pytest.mark.parametrize("convert", ["before", "after", "compact"])
def test_a_layer_in_channels_last_gives_that_format_whatever_it_gets(convert, shape):
    inputs, *kernel = shape
    dense = nn.Conv2d(8, 8, kernel, padding=kernel[0] // 2, groups=8 // inputs)
    if convert == "before":
        dense.to(memory_format=torch.channels_last)
    ours = ff.nn.FactorizedConv2d.from_dense(dense, ff.Rank1(), init="svd")
    if convert == "compact":
        ours.compact(1.0)
    if convert != "before":
        ours.to(memory_format=torch.channels_last), dense.to(memory_format=torch.channels_last)
    ours = copy.deepcopy(ours)
    x = torch.randn(2, 8, 6, 5)
    inputs = [x, x.contiguous(memory_format=torch.channels_last), torch.randn(2, 16, 6, 5)[:, 8:], x[:, :, ::2]]
    for x, training in itertools.product(inputs, (True, False)):
        ours.train(training)
        with torch.set_grad_enabled(training):
            expected = dense(x)
            for path in ("auto", "reconstruct", *(["factored"] if ours.is_compact else [])):
                ours.path = path
                y = ours(x)
                assert y.stride() == expected.stride()
                torch.testing.assert_close(y, expected)
    ours.path = "auto"
    assert ours.weight.stride() == ours.to_dense().weight.stride() == dense.weight.stride()
    if ours.is_compact:
        assert ours.expand().mu.stride() == dense.weight.stride()
    ours.to(memory_format=torch.contiguous_format), dense.to(memory_format=torch.contiguous_format)
    assert ours(inputs[0]).stride() == dense(inputs[0]).stride()


def _attention(density=0.3):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    module = torchvision.models.swin_transformer.ShiftedWindowAttention(12, [3, 3], [1, 1], 3)
    ff.factorize(module, ff.Rank1(rank=2), init="svd")
    for layer in (module.qkv, module.proj):
        layer.compact(density)
    return module


@pytest.mark.parametrize("training", [True, False])
def test_a_module_that_multiplies_by_a_weight_has_the_layer_do_it(training, monkeypatch):
    module, x = _attention().train(training), torch.randn(2, 6, 6, 12)
    dense, called = ff.densify(copy.deepcopy(module)), []
    forward = ff.nn.FactorizedLinear.forward
    monkeypatch.setattr(ff.nn.FactorizedLinear, "forward", lambda own, x: called.append(own) or forward(own, x))
    with torch.set_grad_enabled(training):
        y, expected = module(x), dense(x)
    assert called == [module.qkv, module.proj]
    torch.testing.assert_close(y, expected)
    if training:
        y.square().sum().backward()
        expected.square().sum().backward()
        for layer, other in ((module.qkv, dense.qkv), (module.proj, dense.proj)):
            wanted = other.weight.grad.flatten()[layer.mu_index.long()]
            torch.testing.assert_close(layer.mu.grad, wanted, rtol=1e-3, atol=1e-4)


def test_a_weight_that_is_multiplied_is_what_it_was_made_of():
    layer, x = _attention().qkv, torch.randn(5, 12)
    weight = layer.weight
    expected = F.linear(x, weight.clone(), layer.bias)
    torch.testing.assert_close(F.linear(x, weight, layer.bias), expected)
    with torch.no_grad():
        layer.v.mul_(2)
    torch.testing.assert_close(F.linear(x, weight, layer.bias), expected)
    other = torch.randn(36)
    torch.testing.assert_close(F.linear(x, layer.weight, other), layer(x) - layer.bias + other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(F.linear(x, layer.weight), layer(x) - layer.bias, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        frozen = layer.weight
    assert not F.linear(x, frozen, layer.bias.detach()).requires_grad
    (F.linear(x, frozen, layer.bias).sum()).backward()
    assert layer.mu.grad is None and layer.bias.grad is not None


def fresh(make):
    torch.manual_seed(0)
    if make == "linear":
        return ff.nn.FactorizedLinear.from_dense(nn.Linear(32, 16), ff.Rank1(rank=2), init="svd"), torch.randn(24, 32)
    conv = nn.Conv2d(8, 16, 3, padding=1)
    return ff.nn.FactorizedConv2d.from_dense(conv, ff.Rank1(rank=2), init="svd"), torch.randn(2, 8, 6, 6)


class Logged(torch.Tensor):
    called: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.called.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("make", ["linear", "conv"])
@pytest.mark.parametrize("train", [True, False])
def test_a_subclass_of_tensors_stays_one_and_sees_the_call(make, train):
    layer, x = fresh(make)
    layer.train(train)
    with torch.set_grad_enabled(train):
        plain = layer(x)
        Logged.called.clear()
        y = layer(x.as_subclass(Logged))
    assert type(y) is Logged
    assert Logged.called[-1] == {"linear": "linear", "conv": "conv2d"}[make]
    torch.testing.assert_close(y.as_subclass(torch.Tensor), plain)


@pytest.mark.parametrize("make", ["linear", "conv"])
def test_tangents_of_forward_mode_are_not_lost(make):
    layer, x = fresh(make)
    layer.eval()
    ad = torch.autograd.forward_ad
    with torch.no_grad():
        layer(x), layer(x)
        with ad.dual_level():
            dual = ad.make_dual(x, torch.ones_like(x))
            expected = ad.unpack_dual(layer.to_dense()(dual)).tangent
            torch.testing.assert_close(ad.unpack_dual(layer(dual)).tangent, expected)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_derivatives(make, form, train, grad):
    """By x and by the factors; once W is kept and served, too."""
    layer = form(make).train(train)
    x = sample(layer)
    tangents = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    numbers = {name: p.detach() for name, p in layer.named_parameters()}
    dx = torch.randn_like(x)

    def reference(x, numbers):
        fixed = {name: t for name, t in layer._tensors().items() if name not in numbers}
        w = layer.spec.weight({**fixed, **numbers}, layer.size, None)
        if layer.size[2:]:
            return F.conv2d(x, w, numbers["bias"], padding=1)
        return F.linear(x, w, numbers["bias"])

    def ours(x, numbers):
        return torch.func.functional_call(layer, numbers, (x,))

    with ff.use_backend("reference"):
        wanted = torch.func.jvp(reference, (x, numbers), (dx, tangents))
    with torch.set_grad_enabled(grad):
        layer(x), layer(x)
        for found in (
            torch.func.jvp(ours, (x, numbers), (dx, tangents)),
            linearized(ours, (x, numbers), (dx, tangents)),
        ):
            for got, expected in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
        jacobian = torch.func.jacfwd(layer)(x)
        torch.testing.assert_close(jacobian, torch.func.jacrev(layer)(x), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(layer(x), wanted[0])


def linearized(function, primals, tangents):
    out, of = torch.func.linearize(function, *primals)
    return out, of(*tangents)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 1, 3, 4), (4,)], ids=str)
def test_an_activation_checkpoint_of_the_first_step(form, shape):
    """The call is done again in the backward pass, and has to save tensors of the same shapes."""
    layer = form(linear).float()
    x = torch.randn(shape, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("network", ["resnet18", "vit_b_16", "conv1d"])
@pytest.mark.parametrize("train", [True, False])
def test_graphs_of_torch_fx_have_the_layers_as_they_are(network, train):
    if network == "resnet18":
        model, x = torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 40, 40)
    elif network == "conv1d":
        model, x = (
            nn.Sequential(nn.Conv1d(3, 4, 3, padding=1, padding_mode="circular"), nn.ReLU()),
            torch.randn(2, 3, 7),
        )
    else:
        model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=5)
        x = torch.randn(2, 3, 16, 16)
    model = ff.factorize(model, ff.Rank1(rank=2), init="svd").train(train)
    for layer in ff.factorized_layers(model).values():
        layer.compact(0.2)
    if network == "vit_b_16":
        from torchvision.models.feature_extraction import create_feature_extractor

        last = "encoder.layers.encoder_layer_1"
        traced = create_feature_extractor(model, [last]).train(train)
        seen = []
        model.get_submodule(last).register_forward_hook(lambda module, x, y: seen.append(y))
        model(x)
        torch.testing.assert_close(traced(x)[last], seen[0])
        return
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    called = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    assert called >= set(ff.factorized_layers(model))
    torch.testing.assert_close(traced(x), model(x))


def test_models_of_an_ensemble_by_vmap():
    """A 1×1 convolution of pixels, as `torch.func.stack_module_state` and `vmap` compute it."""
    x = torch.randn(3, 2, 4, 5, 5)
    for spec, density in ((ff.Rank1("kernel", 2, sparse=False), None), (ff.Rank1("kernel", 2), 0.3)):
        layers = [ff.nn.FactorizedConv2d(4, 6, 1, spec=spec).eval() for _ in range(3)]
        for layer in layers:
            if density:
                nn.init.normal_(layer.mu)
                layer.compact(density)
            layer.path = "factored"
        params, buffers = torch.func.stack_module_state(layers)

        def of(params, buffers, x, layer=layers[0]):
            return torch.func.functional_call(layer, (params, buffers), (x,))

        for dims, given in ((0, x), (None, x[0])):
            found = torch.vmap(of, in_dims=(0, 0, dims))(params, buffers, given)
            wanted = torch.stack([layer(x[k] if dims == 0 else x[0]) for k, layer in enumerate(layers)])
            torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.vmap(layers[0])(x), torch.stack([layers[0](one) for one in x]))


@pytest.mark.parametrize("train", [True, False])
def test_a_layer_knows_many_kinds_of_input(train):
    """Sequences of a hundred lengths in turn: each is served as it was the first time."""
    layer = linear(density=0.4).float().train(train)
    with torch.set_grad_enabled(train):
        for turn in range(2):
            for length in range(1, 101):
                layer(torch.randn(2, length, 4))
            if turn == 0:
                before, layer._forward = dict(layer._nodes), None
        assert len(before) == 100


def test_hooks_of_every_kind_go_along_and_their_handles_remove_them():
    net, called = nn.Sequential(nn.Linear(32, 16), nn.MultiheadAttention(16, 2)), []

    def note(name):
        return lambda *_, **__: called.append(name)

    linear = net[0]
    handles = [
        linear.register_forward_hook(note("forward")),
        linear.register_forward_hook(note("always"), always_call=True),
        linear.register_forward_hook(note("with keywords"), with_kwargs=True),
        linear.register_forward_pre_hook(note("before")),
        linear.register_full_backward_pre_hook(note("before backward")),
        linear.register_full_backward_hook(note("backward")),
        linear.register_state_dict_post_hook(note("state")),
        linear.register_load_state_dict_post_hook(note("loaded")),
        net[1].register_forward_hook(note("attention")),
    ]

    def seen():
        called.clear()
        y = net[0](torch.randn(2, 32).requires_grad_())
        net[1](y, y, y)[0].sum().backward()
        net.load_state_dict(net.state_dict())
        return sorted(called)

    before = seen()
    assert len(set(before)) == 9
    ff.factorize(net, ff.Rank1(rank=2))
    assert len(ff.factorized_layers(net)) > 1 and seen() == before
    copied = net[0].to_dense()
    copied.register_forward_hook(note("of the copy"))
    assert seen() == before
    ff.densify(net)
    assert seen() == before
    ff.factorize(net, ff.Rank1(rank=2))
    for handle in handles:
        handle.remove()
    assert seen() == []


@pytest.mark.parametrize("make", ["linear", "conv"])
def test_a_factor_that_was_written_to_before_its_backward_is_named(make):
    layer, x = fresh(make)
    y = layer(x)
    with torch.no_grad():
        layer.u.mul_(2)
    with contextlib.suppress(TypeError):  # it is no Function of Python
        # What Python remembers of the class, as in a process that has had no backward.
        type(y.grad_fn).unused = None
        del type(y.grad_fn).unused
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_layer_that_is_brought_to_channels_last_gives_it_to_inputs_it_has_seen():
    layer, x = fresh("conv")
    layer(x), layer(x)
    layer.to(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", ["linear", "conv"])
def test_batches_of_gradients_say_nothing(make, capfd):
    layer, x = fresh(make)
    y = layer(x)
    gradients = torch.randn(3, *y.shape)
    batched = torch.autograd.grad(y, layer.mu, gradients, is_grads_batched=True, retain_graph=True)[0]
    for one, gradient in zip(batched, gradients, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(y, layer.mu, gradient, retain_graph=True)[0])
    assert capfd.readouterr().err == ""
