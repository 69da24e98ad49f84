"""ProxSGD and ProxAdamW against PyTorch's optimizers and against the soft threshold written out."""

import copy

import pytest
import torch

import fastfact as ff
from fastfact.ops import direct


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        ff.nn.FactorizedLinear(6, 5, spec=ff.Rank1()), torch.nn.ReLU(), torch.nn.Linear(5, 3)
    ).double()


def train(net, optimizer, steps=4):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    for _ in range(steps):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_without_l1_it_is_sgd(momentum, weight_decay):
    ours, theirs = model(), model()
    train(ours, ff.optim.ProxSGD(ours.parameters(), lr=0.01, momentum=momentum, weight_decay=weight_decay))
    train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=momentum, weight_decay=weight_decay))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["proximal", "subgradient"])
def test_l1_is_for_mu_only(method):
    ours, theirs = model(), model()
    with torch.no_grad():
        for net in (ours, theirs):
            net[0].mu.copy_(torch.randn(net[0].mu.shape, generator=torch.Generator().manual_seed(2)) * 0.01)
    lr, l1, momentum = 0.05, 0.1, 0.9
    train(ours, ff.optim.ProxSGD(ours.parameters(), lr=lr, momentum=momentum, l1=l1, method=method), 3)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
    momenta = {p: torch.zeros_like(p) for p in theirs.parameters()}
    for _ in range(3):
        theirs.zero_grad()
        theirs(x).square().sum().backward()
        with torch.no_grad():
            for p in theirs.parameters():
                is_mu = p is theirs[0].mu
                g = p.grad + (l1 * p.sign() if is_mu and method == "subgradient" else 0)
                momenta[p].mul_(momentum).add_(g)
                p.sub_(lr * momenta[p])
                if is_mu and method == "proximal":
                    threshold = lr * l1 / (1 - momentum)
                    p.copy_(torch.where(p.abs() <= threshold, 0.0, p - p.sign() * threshold))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14, msg=name)
    zeros = (ours[0].mu == 0).sum().item()
    assert (zeros > 0) == (method == "proximal"), "only the proximal step makes exact zeros"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fixed_point_is_the_lasso(momentum):
    """With u = 0 the layer is linear in μ; at the minimum of ½‖xμᵀ − y‖² + λ‖μ‖₁ the KKT conditions hold."""
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(layer.u).requires_grad_(False)
    layer.v.requires_grad_(False)
    x = torch.randn(40, 10).double()
    y = x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    l1 = 5.0
    optimizer = ff.optim.ProxSGD([layer.mu], lr=2e-3, momentum=momentum, l1=l1)
    for _ in range(3000):
        optimizer.zero_grad()
        (0.5 * (layer(x) - y).square().sum()).backward()
        optimizer.step()
    gradient, mu = layer.mu.grad[0], layer.mu.detach()[0]
    support = mu != 0
    assert 3 <= support.sum() < 10
    torch.testing.assert_close(gradient[support], -l1 * mu[support].sign(), rtol=1e-6, atol=1e-6)
    assert (gradient[~support].abs() <= l1 * (1 + 1e-6)).all()


def test_large_l1_empties_mu():
    net = model()
    train(net, ff.optim.ProxSGD(net.parameters(), lr=0.01, l1=1e6))
    assert net[0].density == 0.0
    assert net[0].u.abs().min() > 0


def test_frozen_parameters_and_mixed_dtypes_in_one_group():
    net = torch.nn.Sequential(ff.nn.FactorizedLinear(6, 5, dtype=torch.float32), ff.nn.FactorizedLinear(5, 4))
    net[1].double()
    net[0].u.requires_grad_(False)
    before = copy.deepcopy(net)
    optimizer = ff.optim.ProxSGD(net.parameters(), lr=0.1, momentum=0.9, l1=1e-3)
    net[1](net[0](torch.randn(3, 6)).double()).square().sum().backward()
    optimizer.step()
    changed = {
        n for (n, a), b in zip(net.named_parameters(), before.parameters(), strict=True) if not torch.equal(a, b)
    }
    assert changed == {n for n, _ in net.named_parameters()} - {"0.u"}


def test_state_dict_round_trip_and_groups():
    def optimizer(net):
        groups = [{"params": net[0].parameters(), "lr": 0.02, "l1": 0.05}, {"params": net[2].parameters()}]
        return ff.optim.ProxSGD(groups, lr=0.01, momentum=0.9)

    straight = model()
    train(straight, optimizer(straight), 4)
    resumed = model()
    first = optimizer(resumed)
    train(resumed, first, 2)
    second = optimizer(resumed)
    second.load_state_dict(first.state_dict())
    train(resumed, second, 2)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("dense", "ours"), [("SGD", "ProxSGD"), ("AdamW", "ProxAdamW")])
def test_the_state_of_the_dense_optimizer_leaves_l1_as_it_is(dense, ours):
    net = model()
    before = getattr(torch.optim, dense)(net.parameters(), lr=0.02)
    train(net, before, 1)
    after = getattr(ff.optim, ours)(net.parameters(), lr=0.01, l1=50.0)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["l1"] == 50 and after.param_groups[0]["lr"] == 0.02
    train(net, after, 2)
    assert not net[0].mu.count_nonzero()


def test_a_group_that_is_added_is_checked():
    for optimizer in (ff.optim.ProxSGD(model()[0].parameters()), ff.optim.ProxAdamW(model()[0].parameters())):
        with pytest.raises(ValueError, match=r"\(l1=-1"):
            optimizer.add_param_group({"params": model()[2].parameters(), "l1": -1})
        assert len(optimizer.param_groups) == 1


def test_closure_and_channels_last():
    torch.manual_seed(0)
    net = ff.nn.FactorizedConv2d(3, 4, 3).to(memory_format=torch.channels_last)
    same = copy.deepcopy(net).to(memory_format=torch.contiguous_format)
    x = torch.randn(2, 3, 6, 6)
    for n in (net, same):
        optimizer = ff.optim.ProxSGD(n.parameters(), lr=0.01, momentum=0.9, l1=0.01)

        def closure(n=n, optimizer=optimizer):
            optimizer.zero_grad()
            loss = n(x).square().sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        assert losses[2] < losses[0]
    torch.testing.assert_close(net.mu, same.mu)
    assert net.mu.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "setting",
    [
        dict(lr=0),
        dict(lr=-1),
        dict(momentum=-0.1),
        dict(momentum=1.0),
        dict(weight_decay=-1),
        dict(l1=-1),
        dict(method="ista"),
    ],
)
def test_bad_settings(setting):
    name = next(iter(setting))
    with pytest.raises(ValueError, match=rf"ProxSGD\({name}="):
        ff.optim.ProxSGD(model().parameters(), **setting)


def adamw_loop(mu, gradients, lrs, l1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, amsgrad=False):
    """ProxAdamW on one tensor, in float64 numpy-like steps."""
    mu, m, v, most = mu.double(), 0.0, 0.0, torch.zeros_like(mu, dtype=torch.float64)
    for t, (gradient, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        gradient = gradient.double()
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        most = torch.maximum(most, v)
        metric = ((most if amsgrad else v) / (1 - betas[1] ** t)).sqrt() + eps
        mu = mu * (1 - lr * weight_decay) - lr * m / (1 - betas[0] ** t) / metric
        mu = mu.sign() * (mu.abs() - lr * l1 / metric).clamp(min=0)
    return mu


SCHEDULES = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.05, total_steps=12, cycle_momentum=False
    ),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.3),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "how", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}, {"weight_decay": 0.3}], ids=str
)
def test_prox_adamw_is_the_loop_and_plain_adamw_elsewhere(how, dtype, schedule):
    torch.manual_seed(0)
    net = ff.nn.FactorizedLinear(7, 5, dtype=dtype)
    torch.nn.init.normal_(net.mu)
    start, plain = net.mu.detach().clone(), copy.deepcopy(net)
    ours, theirs = (
        ff.optim.ProxAdamW(net.parameters(), lr=0.02, l1=2.0, **how),
        torch.optim.AdamW(plain.parameters(), lr=0.02, **how),
    )
    schedules = schedule(ours), schedule(theirs)
    gradients, lrs = [], []
    for _ in range(10):
        for mine, its in zip(net.parameters(), plain.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            its.grad = mine.grad.clone()
        gradients.append(net.mu.grad)
        lrs.append(ours.param_groups[0]["lr"])
        ours.step(), theirs.step()
        if schedules[0]:
            schedules[0].step(), schedules[1].step()
    settings = {name: how[name] for name in ("amsgrad", "weight_decay") if name in how}
    expected = adamw_loop(start, gradients, lrs, 2.0, **settings)
    rounding = 1e-4 if dtype == torch.float32 else 1e-10
    torch.testing.assert_close(net.mu.double(), expected, rtol=rounding, atol=rounding / 10)
    assert 0 < (net.mu == 0).sum() < net.mu.numel()
    # PyTorch's own step has the same bits; the one pass rounds as often, in another order, in each of ten steps.
    by_pytorch = how.keys() & {"amsgrad", "foreach"}
    last_bits = 0.0 if by_pytorch else 16 * torch.finfo(dtype).eps
    for name in ("u", "v", "bias"):
        mine, its = getattr(net, name), getattr(plain, name)
        torch.testing.assert_close(mine, its, rtol=last_bits, atol=last_bits)
        for kept in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[mine][kept], theirs.state[its][kept], rtol=last_bits, atol=last_bits)


def test_prox_adamw_reaches_the_lasso():
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(layer.u).requires_grad_(False)
    layer.v.requires_grad_(False)
    x = torch.randn(40, 10).double()
    y = x[:, :3].sum(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    l1 = 5.0
    optimizer = ff.optim.ProxAdamW([layer.mu], lr=0.05, l1=l1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995)
    for _ in range(2000):
        optimizer.zero_grad()
        (0.5 * (layer(x) - y).square().sum()).backward()
        optimizer.step()
        schedule.step()
    gradient, mu = layer.mu.grad[0], layer.mu.detach()[0]
    support = mu != 0
    assert 3 <= support.sum() < 10
    torch.testing.assert_close(gradient[support], -l1 * mu[support].sign(), rtol=1e-3, atol=1e-3)
    assert (gradient[~support].abs() <= l1 * (1 + 1e-3)).all()


def test_prox_adamw_starts_anew_where_the_support_changes_and_resumes():
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear(8, 6)
    torch.nn.init.normal_(layer.mu)
    optimizer = ff.optim.ProxAdamW(layer.parameters(), lr=0.01, l1=0.01)
    x = torch.randn(4, 8)

    def step(layer, optimizer):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()

    step(layer, optimizer)
    layer.compact(0.5)
    step(layer, optimizer)
    assert optimizer.state[layer.mu]["exp_avg"].shape == layer.mu.shape
    assert optimizer.state[layer.mu]["step"] == 1 and optimizer.state[layer.v]["step"] == 2
    twin = copy.deepcopy(layer)
    again = ff.optim.ProxAdamW(twin.parameters(), lr=0.5)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(layer, optimizer), step(twin, again)
    assert torch.equal(layer.mu, twin.mu) and again.param_groups[0]["l1"] == 0.01


@pytest.mark.parametrize("setting", [dict(l1=-1.0), dict(lr=-1.0), dict(differentiable=True)])
def test_bad_settings_of_prox_adamw(setting):
    with pytest.raises(ValueError):
        ff.optim.ProxAdamW(model().parameters(), **setting)
    with pytest.raises(ValueError, match="ProxAdamW"):
        ff.optim.ProxAdamW([{"params": model().parameters(), "l1": -2.0}])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_in_one_call_is_that_of_pytorch(dtype, monkeypatch):
    torch.manual_seed(0)
    layers = [ff.nn.FactorizedLinear(i, o, dtype=dtype) for i, o in ((300, 200), (3, 2), (1, 1), (40, 60))]
    torch.nn.init.normal_(layers[3].mu)
    # That of zeros has no numbers then.
    layers[2].compact(), layers[3].compact(0.3)
    layers[0].mu.data[5, 7] = torch.nan
    net, seen, apply = torch.nn.ModuleList(layers), [], direct.adamw_step
    monkeypatch.setattr(direct, "adamw_step", lambda *args: seen.append(apply(*args)) or seen[-1])
    other = copy.deepcopy(net)
    for one in (net, other):
        optimizer = ff.optim.ProxAdamW(one.parameters(), lr=0.01, l1=1.0)
        for turn in range(2):
            for n, parameter in enumerate(one.parameters()):
                generator = torch.Generator().manual_seed(10 * turn + n)
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            version = layers[0].mu._version
            optimizer.step()
        if one is net:
            assert layers[0].mu._version > version
            monkeypatch.setattr(direct, "adamw_step", lambda *args: False)
    assert seen == [True, True]
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        # In bfloat16 PyTorch rounds what the threshold takes to 0 or nearly before it does, up to 1/16 here.
        rounding = dict(rtol=2.0**-6, atol=2.0**-4 * 2.0**-8) if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(mine, its, equal_nan=True, **rounding)
    assert net[0].mu.isnan().sum() == 1 and (net[0].mu == 0).any()


def sparse_layer():
    torch.manual_seed(0)
    return ff.nn.FactorizedLinear.from_dense(torch.nn.Linear(32, 16), ff.Rank1(rank=2), init="svd").compact(0.3)


def one_step(layer, optimizer):
    optimizer.zero_grad()
    layer(torch.arange(128.0).reshape(4, 32) / 128).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [lambda p: ff.optim.ProxSGD(p, lr=0.1, momentum=0.9), ff.optim.ProxAdamW])
def test_copies_of_a_model_and_its_optimizer_go_on_alike(make):
    layer = sparse_layer()
    optimizer = make(layer.parameters())
    one_step(layer, optimizer)
    one_step(layer, optimizer)
    other, its_own = copy.deepcopy((layer, optimizer))
    one_step(layer, optimizer)
    one_step(other, its_own)
    assert torch.equal(layer.mu, other.mu) and torch.equal(layer.u, other.u)
    # What was kept of other positions goes along neither with a copy nor with a state.
    layer.compact(0.1)
    other, its_own = copy.deepcopy((layer, optimizer))
    again = copy.deepcopy(layer)
    loaded = make(again.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((layer, optimizer), (other, its_own), (again, loaded)):
        one_step(*pair)
    assert torch.equal(layer.mu, other.mu) and torch.equal(layer.mu, again.mu) and torch.equal(layer.u, again.u)


def test_hooks_of_prox_adamw_are_called_once():
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    layer, called = sparse_layer(), []
    optimizer = ff.optim.ProxAdamW(layer.parameters(), l1=1e-3)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    one_step(layer, optimizer)
    assert called == ["before", "after"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_a_scaler_leaves_out_shrinks_nothing(fused):
    layer = sparse_layer()
    optimizer = ff.optim.ProxAdamW(layer.parameters(), lr=1e-2, l1=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for too_large in (True, False, True):
        before, scale = layer.mu.detach().clone(), 1e30 if too_large else 1e-30
        optimizer.zero_grad()
        scaler.scale(scale * layer(torch.ones(2, 32)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.mu, before) == too_large and layer.mu.isfinite().all()
    alike = sparse_layer()
    plain = ff.optim.ProxAdamW(alike.parameters(), lr=1e-2, l1=1e-2)
    (1e-30 * alike(torch.ones(2, 32)).sum()).backward()
    plain.step()
    torch.testing.assert_close(layer.mu, alike.mu)
