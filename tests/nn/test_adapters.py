"""Low-rank adapters of frozen networks: the layers against the plain formula, and what of a model trains."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastfact as ff

SPEC = ff.LowRank(rank=2, scaling=1.5)


def adapter(layer, x_shape, spec=SPEC):
    """A frozen float64 layer with an adapter that is not at its start, and an input."""
    torch.manual_seed(0)
    layer = ff.factorize(layer.double(), spec, freeze=True)
    nn.init.normal_(layer.B)
    return layer, torch.randn(*x_shape, dtype=torch.float64, requires_grad=True)


def gradients(layer, x, function=None):
    torch.manual_seed(1)
    y = (layer if function is None else function)(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype))
    found = {"y": y.detach(), "x": x.grad, "A": layer.A.grad, "B": layer.B.grad}
    x.grad = layer.A.grad = layer.B.grad = None
    return found


def check(found, wanted):
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-11, msg=name)


class Sizes(TorchDispatchMode):
    """The shapes of all tensors that are made, views of others apart."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, found = ([t for t in tree_leaves(some) if isinstance(t, torch.Tensor)] for some in ((args, kwargs), out))
        memory = {t.untyped_storage().data_ptr() for t in given}
        self.made |= {tuple(t.shape) for t in found if t.untyped_storage().data_ptr() not in memory}
        return out


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_the_formula_of_lora(bias):
    layer, x = adapter(nn.Linear(40, 30, bias=bias), (3, 5, 40))
    assert layer.A.shape == (2, 40) and layer.B.shape == (30, 2) and layer.path_for(x) == "factored"

    def formula(x):
        return F.linear(x, layer.sigma, layer.bias) + 1.5 * (x @ layer.A.T) @ layer.B.T

    with Sizes() as sizes:
        found = gradients(layer, x)
    assert sizes.made.isdisjoint({(30, 40), (40, 30)})
    assert layer.sigma.grad is None
    check(found, gradients(layer, x, formula))
    torch.testing.assert_close(layer.weight.detach(), layer.sigma + 1.5 * layer.B @ layer.A)


def test_what_is_kept_for_the_backward_pass_is_the_input_and_at_most_one_thin_product():
    layer, x = adapter(nn.Linear(40, 30), (16, 40))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = {p.data_ptr() for p in layer.parameters()}
    assert sorted(t.numel() for t in kept if t.data_ptr() not in own) in ([16 * 40], [16 * 2, 16 * 40])


CONVOLUTIONS = {
    "plain": (nn.Conv2d(12, 10, 3, padding=1), (2, 12, 7, 6)),
    "stride, dilation": (nn.Conv2d(12, 10, (3, 2), stride=(2, 1), padding=(0, 2), dilation=2), (2, 12, 9, 8)),
    "groups": (nn.Conv2d(24, 20, 3, groups=2), (2, 24, 6, 6)),
    "reflected": (nn.Conv2d(12, 10, 3, padding=1, padding_mode="reflect"), (2, 12, 6, 6)),
    "same": (nn.Conv2d(12, 10, (4, 3), padding="same"), (2, 12, 6, 6)),
    "no batch": (nn.Conv2d(12, 10, 3, bias=False), (12, 7, 7)),
    "1d": (nn.Conv1d(12, 10, 3, padding=1), (2, 12, 9)),
    "1d circular": (nn.Conv1d(12, 10, 3, padding=2, padding_mode="circular"), (2, 12, 9)),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_takes_the_separable_form(kind):
    conv, shape = CONVOLUTIONS[kind]
    layer, x = adapter(copy.deepcopy(conv), shape)
    assert layer.path_for(x) == "factored"
    with Sizes() as sizes:
        found = gradients(layer, x)
    assert layer.size not in sizes.made
    layer.path = "reconstruct"
    check(found, gradients(layer, x))


def test_dropout_is_that_of_the_adapters_input_alone():
    layer, x = adapter(nn.Linear(12, 10), (6, 12), ff.LowRank(rank=3, scaling=0.5, dropout=0.4))

    def formula(x):
        return F.linear(x, layer.sigma, layer.bias) + 0.5 * (F.dropout(x, 0.4) @ layer.A.T) @ layer.B.T

    found = gradients(layer, x)
    check(found, gradients(layer, x, formula))
    layer.eval()
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    layer.train().path = "reconstruct"
    with pytest.raises(ValueError, match=r"path='reconstruct': in training .* has dropout"):
        layer(x)


def test_dropout_of_a_convolution():
    spec = ff.LowRank(rank=3, dropout=0.4)
    layer, x = adapter(nn.Conv2d(4, 5, 3, padding=1), (2, 4, 6, 6), spec)

    def formula(x):
        weight = layer.weight - layer.sigma
        seen = F.dropout(x, 0.4)
        return F.conv2d(x, layer.sigma, layer.bias, padding=1) + F.conv2d(seen, weight, padding=1)

    check(gradients(layer, x), gradients(layer, x, formula))


def test_a_convolution_is_exported_for_any_number_of_images():
    layer, x = adapter(nn.Conv2d(4, 5, 3, padding=1), (2, 4, 6, 6), ff.LowRank(rank=1))
    program = torch.export.export(layer.eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = torch.cat([x, x, x[:1]]).detach()
    torch.testing.assert_close(program.module()(x), layer(x).detach())


@pytest.mark.parametrize("spec", [SPEC, ff.LowRank(ratio=0.1), ff.LowRank(ratio=0.1, layout="view")], ids=str)
def test_layers_by_ratio_take_it_too_where_sigma_is_frozen(spec):
    layer, x = adapter(nn.Linear(40, 30), (50, 40), spec)
    nn.init.normal_(layer.A)
    found = gradients(layer, x)
    assert layer.path_for(x) == "factored"
    layer.path = "reconstruct"
    check(found, gradients(layer, x))
    layer.path = "auto"
    layer.sigma.requires_grad_(True)
    assert layer.path_for(x) == "reconstruct"


def test_few_rows_or_a_large_rank_decide():
    layer, x = adapter(nn.Linear(40, 30), (50, 40), ff.LowRank(rank=20))
    assert layer.path_for(x) == "reconstruct" and layer.path_for(x[:2]) == "factored"


def test_gradients_of_second_order_autocast_compile_and_export():
    layer, x = adapter(nn.Linear(40, 30), (5, 40))
    a, b = layer.A.detach().clone().requires_grad_(), layer.B.detach().clone().requires_grad_()

    def function(x, a, b):
        return torch.func.functional_call(layer, {"A": a, "B": b}, (x,))

    assert torch.autograd.gradgradcheck(function, (x, a, b), fast_mode=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    check(gradients(layer, x, compiled), gradients(layer, x))
    program = torch.export.export(layer, (x.detach(),))
    torch.testing.assert_close(program.module()(x.detach()), layer(x).detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.float()(x.float()).dtype == torch.bfloat16


# attention


def attentions(embed=16, heads=4, **settings):
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(embed, heads, **settings).double()
    new = ff.factorize(copy.deepcopy(dense), SPEC, freeze=True)
    for layer in ff.factorized_layers(new).values():
        nn.init.normal_(layer.B, std=0.3)
        layer.path = "factored"
    return ff.densify(copy.deepcopy(new)).train(), new.train()


OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 12, "vdim": 20},
    "bias of keys": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_attention_without_a_weight_is_that_with_it(options, need_weights, batched, gradients):
    settings = OPTIONS[options]
    dense, new = attentions(**settings)
    assert type(dense) is nn.MultiheadAttention
    n, long, short = 3, 6, 5
    widths = (16, settings.get("kdim", 16), settings.get("vdim", 16))
    inputs = []
    for length, width in zip((short, long, long), widths, strict=True):
        shape = (n, length, width) if settings.get("batch_first") else (length, n, width)
        shape = shape if batched else (length, width)
        inputs.append(torch.randn(shape, dtype=torch.float64))
    same = inputs[1] if widths[1] == widths[2] == 16 else None
    cases = [tuple(inputs)] + ([(inputs[0], same, same), (same, same, same)] if same is not None else [])
    padding = torch.zeros((n, long) if batched else (long,), dtype=torch.bool)
    padding[..., -2:] = True
    for query, key, value in cases:
        rows = long if query is key else short
        causal = torch.triu(torch.ones(rows, long, dtype=torch.bool), 1)
        each = torch.randn((n if batched else 1) * 4, rows, long, dtype=torch.float64)
        for masks in (
            {},
            {"key_padding_mask": padding},
            {"attn_mask": causal},
            {"attn_mask": each},
            {"attn_mask": causal, "key_padding_mask": padding, "average_attn_weights": False},
            {"attn_mask": causal, "is_causal": True} if options in ("plain", "batch first") and rows == long else {},
        ):
            with torch.set_grad_enabled(gradients), Sizes() as sizes:
                y, weights = new(query, key, value, need_weights=need_weights, **masks)
            assert (48, 16) not in sizes.made
            wanted, wanted_weights = dense(query, key, value, need_weights=need_weights, **masks)
            torch.testing.assert_close(y, wanted)
            assert (weights is None) == (wanted_weights is None) == (not need_weights)
            if need_weights:
                torch.testing.assert_close(weights, wanted_weights)


@pytest.mark.parametrize("training", [True, False])
def test_attention_takes_the_paths_of_its_layers(training):
    """Compact layers too: their weight is made only where queries and keys are different tensors."""
    torch.manual_seed(0)
    new = ff.factorize(nn.MultiheadAttention(16, 4, batch_first=True).double(), ff.Rank1(rank=2), init="svd")
    layers = ff.factorized_layers(new).values()
    for layer in layers:
        layer.prune_(0.2)
    dense = ff.densify(copy.deepcopy(new)).train(training)
    for layer in layers:
        layer.compact()
        layer.path = "factored"
    new.train(training)
    x, other = torch.randn(2, 3, 5, 16, dtype=torch.float64)
    with Sizes() as sizes:
        y = new(x, x, x, need_weights=False)[0]
        y.sum().backward()
    assert not {(48, 16), (16, 16)} & set(sizes.made)
    torch.testing.assert_close(y, dense(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(new(x, other, other), dense(x, other, other))
    assert all(factor.grad is not None for layer in layers for factor in layer.factors().values())


def test_attention_trains_with_dropout_on_its_adapters():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    new = ff.factorize(copy.deepcopy(attention), ff.LowRank(rank=2, dropout=0.5), freeze=True)
    for layer in ff.factorized_layers(new).values():
        nn.init.normal_(layer.B)
    x = torch.randn(2, 5, 16)
    one, other = new(x, x, x)[0], new(x, x, x)[0]
    assert (one - other).abs().max() > 1e-3
    one.sum().backward()
    assert all(layer.A.grad is not None for layer in ff.factorized_layers(new).values())
    only = ff.factorize(copy.deepcopy(attention), ff.LowRank(rank=2, dropout=0.5), only="out_proj", freeze=True)
    nn.init.normal_(only.out_proj.B)
    assert (only(x, x, x)[0] - only(x, x, x)[0]).abs().max() > 1e-3
    assert type(ff.densify(only)) is nn.MultiheadAttention


# models


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 16), nn.LayerNorm(16)
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 3)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        return self.head((x + self.second(F.relu(self.first(x)))).mean(1))


TOKENS = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return Net()


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_freeze_leaves_adapters_and_what_train_names():
    model = net()
    wanted = model(TOKENS)
    ff.factorize(model, SPEC, freeze=True, train=("head", "*norm*", "first.bias"))
    adapters = {f"{layer}.{name}" for layer in ("first", "second") for name in ("A", "B")}
    assert trained(model) == adapters | {"head.weight", "head.bias", "norm.weight", "norm.bias", "first.bias"}
    assert type(model.head) is nn.Linear
    torch.testing.assert_close(model(TOKENS), wanted, rtol=0, atol=1e-6)


def test_what_is_frozen_stays_and_has_no_state_in_the_optimizer():
    model = ff.factorize(net(), SPEC, freeze=True, train="head")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(TOKENS), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained(model)
    assert len(optimizer.state) == len(moved)


@pytest.mark.parametrize("spec", [ff.Rank1(), ff.Hadamard()])
def test_of_other_specs_the_dense_factor_is_frozen(spec):
    model = ff.factorize(net(), spec, only="first", init="random", freeze=True)
    names = {f"first.{name}" for name in spec.shapes((24, 16)) if name != "mu"}
    assert trained(model) == names


def test_summary_and_densify():
    model = ff.factorize(net(), SPEC, freeze=True, train="head")
    nn.init.normal_(model.first.B)
    summary = ff.summary(model)
    rows = {row.path: row for row in summary.rows}
    assert rows["first"].trained == 2 * (16 + 24) and rows["first"].parameters == 16 * 24 + 24 + 2 * (16 + 24)
    assert rows["embed"].trained == 0 and rows["head"].trained == 3 * 17
    assert summary.trained == 2 * 2 * (16 + 24) + 3 * 17
    assert "trained" in str(summary).splitlines()[0] and f"{summary.trained:,}" in str(summary).splitlines()[-1]
    wanted = model(TOKENS)
    ff.densify(model)
    assert type(model.first) is nn.Linear
    torch.testing.assert_close(model(TOKENS), wanted, atol=1e-6, rtol=1e-5)


def test_saved_with_its_spec_and_read_again(tmp_path):
    spec = ff.LowRank(rank=3, scaling=2.0, dropout=0.1)
    model = ff.factorize(net(), spec, freeze=True, train="head")
    nn.init.normal_(model.first.B)
    ff.save(model, tmp_path / "model.safetensors")
    new = ff.load_into(net(), tmp_path / "model.safetensors")
    assert new.first.spec == spec
    with torch.no_grad():
        assert torch.equal(new.eval()(TOKENS), model.eval()(TOKENS))


def test_settings_of_before_are_read():
    told = {"spec": "LowRank", "ratio": 0.5, "layout": "separable", "linear_ratio": None, "scaling": 1.0}
    assert ff.Spec.from_dict(told) == ff.LowRank(0.5)
    assert ff.LowRank(0.5).shapes((30, 40)) == {"sigma": (30, 40), "A": (15, 30), "B": (40, 15)}


@pytest.mark.parametrize("name", ["vit_b_16", "swin_t"])
def test_networks_of_torchvision(name):
    torch.manual_seed(0)
    if name == "vit_b_16":
        model = torchvision.models.VisionTransformer(
            image_size=8, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3
        )
        nn.init.normal_(model.heads.head.weight)
    else:
        model = torchvision.models.SwinTransformer(
            [2, 2], 16, [1, 1], [2, 2], [2, 2], stochastic_depth_prob=0.0, num_classes=3
        )
    x = torch.randn(2, 3, 8, 8)
    wanted = model(x)
    ff.factorize(model, ff.LowRank(rank=2, dropout=0.1), freeze=True, train="*head", skip=(), unsupported="skip")
    for layer in ff.factorized_layers(model).values():
        assert layer.sigma.requires_grad is False
    torch.testing.assert_close(model.eval()(x), wanted, rtol=1e-4, atol=1e-5)
    model.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model(x)
    dense = ff.densify(copy.deepcopy(model)).eval()
    assert not ff.factorized_layers(dense)
    torch.testing.assert_close(dense(x), wanted, rtol=1e-4, atol=1e-5)


def test_the_start_is_the_same_for_the_same_generator():
    one, other = (ff.factorize(net(), SPEC, freeze=True, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    vector = parameters_to_vector(p for p in one.parameters() if p.requires_grad)
    assert torch.equal(vector, parameters_to_vector(p for p in other.parameters() if p.requires_grad))
    assert all(not layer.B.any() for layer in ff.factorized_layers(one).values())


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ff.LowRank(rank=0), r"LowRank\(rank=0\): must be an integer of at least 1"),
        (lambda: ff.LowRank(rank=1.5), r"rank=1\.5"),
        (lambda: ff.LowRank(dropout=1.0), r"LowRank\(dropout=1\.0\): must be at least 0 and below 1"),
        (lambda: ff.factorize(net(), SPEC, train="head"), r"train='head'\): .* needs freeze=True"),
        (lambda: ff.factorize(net(), SPEC, freeze=True, train="tail"), r"train='tail'\): no parameter"),
        (
            lambda: ff.factorize(nn.Conv2d(3, 4, 3), ff.LowRank(rank=2, layout="view", dropout=0.1)),
            'must have the layout "separable"',
        ),
    ],
)
def test_bad_input(call, error):
    with pytest.raises(ValueError, match=error):
        call()
    with pytest.raises(TypeError, match="freeze=1"):
        ff.factorize(net(), SPEC, freeze=1)
