"""Compact μ: the same function and gradients as the dense form, on either path, and what happens to its support."""

import copy

import pytest
import torch
import torch.nn.functional as F

import fastfact as ff

CONVS = {
    "plain": dict(kernel_size=3),
    "stride": dict(kernel_size=5, stride=2, padding=2),
    "dilated": dict(kernel_size=3, dilation=2, padding=1, bias=False),
    "grouped": dict(kernel_size=3, groups=2, padding=1),
    "rectangular": dict(kernel_size=(1, 3), stride=(2, 1), padding=(0, 1)),
}


def conv(density=0.25, **settings):
    torch.manual_seed(0)
    spec = ff.Rank1(settings.pop("layout", "spatial"), settings.pop("rank", 1))
    layer = ff.nn.FactorizedConv2d(4, 6, dtype=torch.float64, spec=spec, **{"kernel_size": 3, **settings})
    torch.nn.init.normal_(layer.mu)
    return layer.prune_(density)


def linear(density=0.25):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(8, 6, dtype=torch.float64)
    torch.nn.init.normal_(layer.mu)
    return layer.prune_(density)


CASES = {name: (lambda s=s: conv(**s), (2, 4, 9, 8)) for name, s in CONVS.items()} | {
    "rank 2": (lambda: conv(rank=2), (2, 4, 6, 6)),
    "one image": (conv, (4, 6, 6)),
    "empty support": (lambda: conv(density=0), (2, 4, 6, 6)),
    "kernel layout": (lambda: conv(layout="kernel", rank=2, padding=1, stride=2), (2, 4, 7, 6)),
    "linear": (linear, (3, 5, 8)),
    "linear, one sample": (linear, (8,)),
}


@pytest.mark.parametrize("path", ["reconstruct", "factored", "auto"])
@pytest.mark.parametrize("make, shape", CASES.values(), ids=CASES)
def test_compact_is_the_same_function(make, shape, path):
    dense = make()
    layer = copy.deepcopy(dense).compact()
    assert layer.is_compact
    layer.path = path
    assert layer.mu.shape == layer.mu_index.shape == (dense.mu.count_nonzero(),)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y, wanted = layer(x), dense(x2)
    torch.testing.assert_close(y, wanted)
    cotangent = torch.randn_like(y)
    (y * cotangent).sum().backward()
    (wanted * cotangent).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad)
    for name, factor in layer.named_parameters():
        grad = dense.get_parameter(name).grad
        torch.testing.assert_close(factor.grad, grad.flatten()[layer.mu_index.long()] if name == "mu" else grad)
    torch.testing.assert_close(layer.weight, dense.weight)
    assert layer.density == dense.density


@pytest.mark.parametrize("frozen", ["", "u", "v", "mu"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_of_few_rows(dtype, compact, frozen):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(72, 50, spec=ff.Rank1(rank=5, sparse=True)).to(dtype)
    torch.nn.init.normal_(layer.mu)
    layer.prune_(0.4).path = "reconstruct"
    if compact:
        layer.compact()
    if frozen:
        layer.get_parameter(frozen).requires_grad_(False)
    x, cotangent = (torch.randn(2, 3, n).to(dtype) for n in (72, 50))
    (layer(x.requires_grad_()) * cotangent).sum().backward()
    u, v, x2, g = (t.detach().double().flatten(0, -2) for t in (layer.u, layer.v, x, cotangent))
    wanted = {"u": (g @ v.T).T @ x2, "v": (x2 @ u.T).T @ g, "mu": g.T @ x2, "bias": g.sum(0)}
    if compact:
        wanted["mu"] = wanted["mu"].flatten()[layer.mu_index.long()]
    near = {torch.float64: 1e-12, torch.bfloat16: 2**-7}[dtype]
    for name, parameter in layer.named_parameters():
        if name == frozen:
            assert parameter.grad is None
            continue
        off = (parameter.grad.double().flatten() - wanted[name].flatten()).abs().max()
        assert off <= near * wanted[name].abs().max(), name
    dx = g @ layer.weight.detach().double()
    assert (x.grad.double().flatten(0, -2) - dx).abs().max() <= near * dx.abs().max()


def test_expand_is_the_inverse_and_mu_stays_the_same_parameter():
    layer = conv()
    before, parameter = layer.mu.detach().clone(), layer.mu
    assert layer.compact().expand() is layer
    assert layer.mu is parameter
    assert torch.equal(layer.mu, before)
    assert "mu_index" not in layer.state_dict()
    assert ff.sparsity.penalized(layer.compact().mu)


def test_state_dict_moves_between_the_forms():
    dense, compact = conv(), conv().compact()
    assert list(compact.state_dict()) == ["u", "v", "mu", "bias", "mu_index"]
    for layer in (conv(density=1), conv(density=0.5).compact()):
        layer.load_state_dict(compact.state_dict())
        assert layer.is_compact
        assert torch.equal(layer.weight, dense.weight)
        layer.load_state_dict(dense.state_dict())
        assert not layer.is_compact
        assert torch.equal(layer.weight, dense.weight)


def test_densify_and_copies_of_a_compact_layer():
    layer = conv().compact()
    x = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    torch.testing.assert_close(ff.densify(torch.nn.Sequential(layer))(x), layer(x))


def test_compact_prunes_and_drops_zeros():
    layer = conv(density=1).compact(density=0.1)
    assert layer.density == 22 / 216
    with torch.no_grad():
        layer.mu[3] = 0
    gone = layer.mu_index[3].item()
    layer.compact()
    assert len(layer.mu) == 21
    assert gone not in layer.mu_index.tolist()
    assert layer.prune_(0.05).density == 11 / 216
    assert len(layer.compact().mu) == 11


def test_regrow_adds_what_violates_the_kkt_condition():
    layer = conv().compact()
    kept, values = layer.mu_index.tolist(), layer.mu.detach().clone()
    gradient = torch.zeros(layer.size, dtype=torch.float64)
    off = [n for n in range(216) if n not in kept]
    gradient.view(-1)[off[:3]] = torch.tensor([0.5, -0.5, 0.3], dtype=torch.float64)
    gradient.view(-1)[kept[0]] = 9
    assert layer.regrow(gradient, l1=0.3) == 2
    assert layer.mu_index.tolist() == sorted(kept + off[:2])
    where = [layer.mu_index.tolist().index(n) for n in kept]
    assert torch.equal(layer.mu.detach()[where], values)
    assert layer.mu.count_nonzero() == len(kept)


def test_active_set_training_reaches_the_lasso():
    """Alternating training on the support and regrowing ends where dense proximal training ends (a convex problem)."""
    torch.manual_seed(0)
    x = torch.randn(60, 20).double()
    y = x[:, :4] @ torch.tensor([[2.0], [-1.5], [1.0], [0.6]], dtype=torch.float64) + 0.1 * torch.randn(60, 1)
    l1 = 8.0

    def objective(layer):
        return 0.5 * (layer(x) - y).square().sum()

    def train(layer, steps):
        optimizer = ff.optim.ProxSGD([layer.mu], lr=2e-3, momentum=0.5, l1=l1)
        for _ in range(steps):
            optimizer.zero_grad()
            objective(layer).backward()
            optimizer.step()
        return layer

    def fresh():
        layer = ff.nn.FactorizedLinear(20, 1, bias=False, dtype=torch.float64)
        for factor in (layer.u, layer.v):
            torch.nn.init.zeros_(factor).requires_grad_(False)
        return layer

    dense = train(fresh(), 2000)
    active = fresh().compact()
    for _ in range(6):
        gradient = copy.deepcopy(active).expand()
        objective(gradient).backward()
        active.regrow(gradient.mu.grad, l1)
        train(active, 600).compact()
    total = [objective(layer).item() + l1 * layer.mu.abs().sum().item() for layer in (dense, active)]
    assert total[1] == pytest.approx(total[0], rel=1e-9)
    assert set(active.mu_index.tolist()) == set(dense.mu.flatten().nonzero().flatten().tolist())
    assert 4 <= len(active.mu) < 20


def test_momentum_starts_anew_when_the_support_changes():
    layer = conv().compact()
    optimizer = ff.optim.ProxSGD(layer.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)

    def step():
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        return optimizer.state[layer.mu]["momentum_buffer"]

    step()
    assert not torch.equal(step(), layer.mu.grad), "momentum goes on while the support stays"
    off = next(n for n in range(216) if n not in layer.mu_index.tolist())
    gradient = torch.zeros(216)
    gradient[off] = 1
    with torch.no_grad():
        layer.mu[0] = 0
    layer.compact().regrow(gradient.reshape(layer.size), l1=0.5)
    assert torch.equal(step(), layer.mu.grad), "as many positions, but others"
    assert not torch.equal(optimizer.state[layer.u]["momentum_buffer"], layer.u.grad)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: setattr(conv(), "path", "dense"), "path='dense'"),
        (lambda: ff.nn.FactorizedConv2d(3, 4, 3, spec=ff.LowRank()).compact(), "no sparse factor"),
        (lambda: conv().regrow(torch.zeros(6, 4, 3, 3), 0.1), "call compact"),
        (lambda: conv().compact().regrow(torch.zeros(6, 4, 9), 0.1), r"gradient has shape \[6, 4, 9\]"),
        (lambda: conv().compact().regrow(torch.zeros(6, 4, 3, 3), -1), "l1=-1"),
        (lambda: conv().compact(density=2), "density=2"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(spec=ff.Rank1()), "call compact"),
        (dict(spec=ff.Rank1(layout="view", sparse=False)), "view"),
        (dict(spec=ff.LowRank(layout="view")), "view"),
        (dict(spec=ff.Hadamard()), "Hadamard"),
    ],
)
def test_the_factored_path_says_why_it_cannot_be_taken(settings, message):
    layer = ff.nn.FactorizedConv2d(**dict(in_channels=3, out_channels=4, kernel_size=3) | settings)
    layer.path = "factored"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize("padding, numbers", [("same", (2, 1)), ("valid", (0, 0))])
@pytest.mark.parametrize("axes", [1, 2])
def test_padding_by_name_is_that_by_numbers(axes, padding, numbers):
    """Where both sides of an axis get the same."""
    kind = ff.nn.FactorizedConv1d if axes == 1 else ff.nn.FactorizedConv2d
    settings = dict(kernel_size=(3, 3)[:axes], dilation=(2, 1)[:axes], groups=2, dtype=torch.float64)
    layer = kind(4, 6, padding=padding, **settings).compact(0.4)
    plain = kind(4, 6, padding=numbers[:axes], **settings).compact(0.4)
    plain.load_state_dict(layer.state_dict())
    layer.path = plain.path = "factored"
    x = torch.randn(2, 4, *(7, 8)[:axes], dtype=torch.float64, requires_grad=True)
    found, wanted = layer(x), plain(x)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(found, layer.to_dense()(x))
    for one in (layer, plain):
        one(x).sin().sum().backward()
    for a, b in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for one in (layer, plain):
        one.path = "auto"
        torch.testing.assert_close(one.eval()(x), wanted)


@pytest.mark.parametrize("layout", ["spatial", "kernel"])
def test_rank1_without_mu_on_the_factored_path(layout):
    spec = ff.Rank1(layout, sparse=False, rank=2)
    layer = ff.nn.FactorizedConv2d(3, 4, 3, padding=1, spec=spec, dtype=torch.float64)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    wanted = layer(x)
    layer.path = "factored"
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("layout", ["spatial", "kernel", "view", "linear"])
def test_the_weight_from_the_values_on_the_support(layout):
    """As a GPU makes it: without a dense μ."""
    if layout == "linear":
        layer = ff.nn.FactorizedLinear(9, 7, spec=ff.Rank1(rank=2))
    else:
        layer = ff.nn.FactorizedConv2d(3, 5, 3, spec=ff.Rank1(layout=layout))
    torch.nn.init.normal_(layer.mu)
    layer.compact(0.3)
    factors = {**layer.factors(), "mu_index": layer.mu_index}
    weights = layer.weight, layer.spec.weight(factors, layer.size)
    torch.testing.assert_close(*weights)
    leaves = list(layer.factors().values())
    grads = (torch.autograd.grad(weight.sin().sum(), leaves) for weight in weights)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "conv, settings, shape",
    [
        ("2d", dict(kernel_size=3, padding=1, padding_mode="reflect"), (3, 4, 9, 8)),
        ("2d", dict(kernel_size=5, padding=2, padding_mode="circular", stride=2, groups=2), (2, 4, 9, 8)),
        ("2d", dict(kernel_size=3, padding=(2, 1), padding_mode="replicate", dilation=2), (4, 9, 8)),
        ("2d", dict(kernel_size=4, padding="same"), (2, 4, 9, 8)),
        ("2d", dict(kernel_size=1, padding=1, padding_mode="reflect"), (2, 4, 9, 8)),
        ("1d", dict(kernel_size=3, padding=1, padding_mode="circular"), (2, 4, 9)),
        ("1d", dict(kernel_size=4, padding="same"), (4, 9)),
    ],
    ids=str,
)
def test_every_padding_has_the_factored_path(conv, settings, shape, training, form):
    """Whatever the format of the layer, and that of the image, which the padding may change."""
    of = {"1d": ff.nn.FactorizedConv1d, "2d": ff.nn.FactorizedConv2d}[conv]
    layer = of(4, 6, **settings, spec=ff.Rank1(), dtype=torch.float64)
    torch.nn.init.normal_(layer.mu)
    layer.compact(0.3).train(training).to(memory_format=form)
    dense, x = layer.to_dense(), torch.randn(shape, dtype=torch.float64, requires_grad=training)
    wider = torch.randn(*shape[:-1], 2 * shape[-1], dtype=torch.float64)
    with torch.set_grad_enabled(training):
        for path in ("factored", "reconstruct", "auto"):
            layer.path = path
            last = (x.to(memory_format=torch.channels_last),) if len(shape) == 4 else ()
            for image in (x, x, wider, *last, x):
                y, truth = layer(image), dense(image)
                torch.testing.assert_close(y, truth, rtol=0, atol=1e-12)
            if training:
                g = torch.randn_like(y)
                (ours,), (theirs,) = (torch.autograd.grad(out, x, g) for out in (y, truth))
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@torch.no_grad()
def test_padding_that_is_set_later_is_taken():
    layer = ff.nn.FactorizedConv2d(3, 4, 3, padding=1).eval()
    x = torch.randn(2, 3, 6, 6)
    layer(x)
    layer.padding_mode = "reflect"
    padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
    for _ in range(2):
        torch.testing.assert_close(layer(x), F.conv2d(padded, layer.weight, layer.bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).shape == (2, 4, 6, 6)


def load_another_form(layer):
    other = copy.deepcopy(layer)
    layer.load_state_dict((other.expand() if layer.is_compact else other.compact(0.2)).state_dict())


@pytest.mark.parametrize("make", [conv, linear])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.expand().compact(0.1),
        lambda layer: layer.expand(),
        lambda layer: layer.regrow(torch.ones(layer.size), 0.5),
        load_another_form,
    ],
    ids=["compact", "expand", "regrow", "load"],
)
def test_a_loss_that_is_kept_does_not_hold_the_old_form(make, change):
    """As in a loop that writes `loss = …`, whose graph lives until the next step has another."""
    layer, seen = make().compact(), []
    layer.mu.register_hook(lambda gradient: seen.append(gradient.shape))
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64) if make is conv else torch.randn(3, 8, dtype=torch.float64)
    for step in range(3):
        loss = layer(x).square().sum()
        loss.backward()
        assert layer.mu.grad.shape == layer.mu.shape == seen[-1]
        if step == 1:
            change(layer)
            assert layer.mu.grad is None
    assert len(seen) == 3


def test_what_says_nothing_of_a_layer_leaves_its_form():
    layer = linear().compact()
    net, before = torch.nn.Sequential(layer, torch.nn.Linear(6, 2)), layer.mu.detach().clone()
    net.load_state_dict({"1.bias": torch.ones(2)}, strict=False)
    net.load_state_dict({"0.u": torch.ones_like(layer.u)}, strict=False)
    assert layer.is_compact and torch.equal(layer.mu, before)
    net.load_state_dict({"0.mu": torch.ones(layer.size)}, strict=False)
    assert not layer.is_compact


@pytest.mark.parametrize("optimizer", [ff.optim.ProxSGD, ff.optim.ProxAdamW])
def test_what_an_optimizer_keeps_is_not_for_positions_that_were_loaded(optimizer):
    layer, other = linear().compact(), linear()
    other.mu.data = other.mu.flip(0)
    other.compact()
    assert len(layer.mu) == len(other.mu) and not torch.equal(layer.mu_index, other.mu_index)
    how = {"momentum": 0.9} if optimizer is ff.optim.ProxSGD else {"weight_decay": 0.0}
    own, x = optimizer(layer.parameters(), lr=0.1, **how), torch.randn(4, 8, dtype=torch.float64)

    def step(scale):
        own.zero_grad()
        (scale * layer(x)).square().sum().backward()
        own.step()

    step(1)
    layer.load_state_dict(layer.state_dict())
    before = layer.mu.detach().clone()
    step(0)
    assert not torch.equal(layer.mu, before)
    layer.load_state_dict(other.state_dict())
    before = layer.mu.detach().clone()
    step(0)
    assert torch.equal(layer.mu, before)
