"""factorize and densify on whole models."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fastfact as ff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
EXACT = [
    ff.Rank1(),
    ff.Rank1(rank=2),
    ff.Rank1(rank=50),
    ff.Rank1(layout="kernel"),
    ff.Rank1(layout="view"),
    ff.LowRank(),
    ff.LowRank(layout="view"),
]


@pytest.mark.parametrize("spec", EXACT, ids=str)
def test_svd_keeps_the_function(net, spec):
    net.eval()
    wanted = net(X)
    out = ff.factorize(net, spec, init="svd")
    assert out is net
    assert set(ff.factorized_layers(net)) == {"body.0", "body.3", "head"}
    torch.testing.assert_close(net(X), wanted)
    ff.densify(net)
    assert not ff.factorized_layers(net)
    assert type(net.body[0]) is nn.Conv2d
    assert type(net.head) is nn.Linear
    torch.testing.assert_close(net(X), wanted)


@pytest.mark.parametrize("layout", ["spatial", "kernel", "view"])
def test_svd_factors_are_the_best_of_their_rank(layout):
    torch.manual_seed(0)
    dense = nn.Conv2d(5, 4, 3, dtype=torch.float64)
    layer = ff.nn.FactorizedConv2d.from_dense(dense, ff.Rank1(layout=layout, rank=2), init="svd")
    w = dense.weight.detach()
    matrix = {
        "spatial": w.permute(2, 3, 0, 1).reshape(9, 20),
        "kernel": w.permute(1, 2, 0, 3).reshape(15, 12),
        "view": w.reshape(9, 20),
    }[layout]
    values = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(layer.mu.detach().norm(), values[2:].norm())
    torch.testing.assert_close(layer.u.detach().flatten(1).norm(dim=1), values[:2].sqrt())
    torch.testing.assert_close(layer.v.detach().flatten(1).norm(dim=1), values[:2].sqrt())


def test_svd_without_mu_is_the_best_approximation():
    torch.manual_seed(0)
    dense = nn.Linear(6, 5, bias=False, dtype=torch.float64)
    layer = ff.nn.FactorizedLinear.from_dense(dense, ff.Rank1(rank=2, sparse=False), init="svd")
    values = torch.linalg.svdvals(dense.weight.detach())
    torch.testing.assert_close((layer.weight - dense.weight).detach().norm(), values[2:].norm())


@pytest.mark.parametrize(
    "spec",
    [
        ff.Rank1(),
        ff.Rank1(rank=4),
        ff.Rank1(layout="kernel"),
        ff.Rank1(sparse=False),
        ff.Hadamard(),
        ff.LowRank(),
        ff.Hadamard(personalized=True),
        ff.Hadamard(tensor=True, ratio=1.0),
    ],
    ids=str,
)
def test_random_init_has_the_default_variance(spec):
    torch.manual_seed(0)
    for layer, fan_in in ((ff.nn.FactorizedConv2d(32, 64, 3, spec=spec), 288), (ff.nn.FactorizedLinear(256, 99), 256)):
        ratio = layer.weight.detach().square().mean().item() * 3 * fan_in
        # r² sums of products of normals: the spread of the mean square over ≥ 18,432 weights made of ≥ 192 numbers
        assert 0.75 < ratio < 1.3, ratio
        assert layer.bias.abs().max().item() <= fan_in**-0.5


def test_random_init_starts_mu_and_b_at_zero_and_sigma_at_the_weight(net):
    weight = net.head.weight.detach().clone()
    assert ff.factorize(copy.deepcopy(net), ff.Rank1()).head.mu.count_nonzero() == 0
    lowrank = ff.factorize(net, ff.LowRank()).head
    assert lowrank.B.count_nonzero() == 0
    assert torch.equal(lowrank.sigma, weight)


def test_random_init_from_a_generator_is_repeatable(net):
    draws = [
        ff.factorize(copy.deepcopy(net), ff.Rank1(), generator=torch.Generator().manual_seed(s)).head.u
        for s in (3, 3, 4)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_skip(net):
    ff.factorize(net, ff.Rank1(), skip=("head", "body.0"))
    assert list(ff.factorized_layers(net)) == ["body.3"]
    ff.factorize(net, ff.LowRank())
    assert isinstance(net.body[3].spec, ff.Rank1), "a factorized layer stays as it is"
    other = ff.factorize(Net(), ff.Rank1(), skip="bo*")
    assert list(ff.factorized_layers(other)) == ["head"]


def test_skip_that_matches_nothing_is_an_error(net):
    with pytest.raises(ValueError, match="skip='haed'"):
        ff.factorize(net, ff.Rank1(), skip=("haed",))
    assert not ff.factorized_layers(net)


def test_what_the_layer_had_is_kept(net):
    calls = []
    net.head.register_forward_hook(lambda *_: calls.append(1))
    bias = net.head.bias
    net.body[3].weight.requires_grad_(False)
    net.double().eval().to(memory_format=torch.channels_last)
    ff.factorize(net, ff.Rank1())
    assert net.head.bias is bias
    assert not net.head.training
    assert net.body[0].u.dtype == torch.float64
    assert net.body[0].mu.is_contiguous(memory_format=torch.channels_last)
    assert not any(factor.requires_grad for factor in net.body[3].factors().values())
    net(X.double())
    ff.densify(net)(X.double())
    assert calls == [1, 1]
    assert not net.body[3].weight.requires_grad


def test_a_module_used_twice_stays_shared():
    layer = nn.Linear(4, 4)
    model = ff.factorize(nn.Sequential(layer, nn.ReLU(), layer), ff.Rank1())
    assert model[0] is model[2]
    assert isinstance(model[0], ff.nn.FactorizedLinear)


def test_a_single_layer_is_returned():
    assert isinstance(ff.factorize(nn.Linear(3, 2), ff.Rank1()), ff.nn.FactorizedLinear)
    assert type(ff.densify(ff.nn.FactorizedLinear(3, 2))) is nn.Linear


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    "bad",
    [
        nn.ConvTranspose2d(3, 4, 3),
        nn.Conv3d(3, 4, 3),
        MyLinear(3, 4),
        nn.LazyLinear(3),
        nn.Bilinear(2, 3, 4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_unsupported_modules_are_named_and_nothing_is_converted(bad):
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), bad))
    with pytest.raises(ValueError, match=rf"1\.1 is a {type(bad).__name__}"):
        ff.factorize(model, ff.Rank1())
    assert type(model[0]) is nn.Linear
    ff.factorize(model, ff.Rank1(), skip=("1.1",))
    assert isinstance(model[0], ff.nn.FactorizedLinear)


def test_tied_weights_are_an_error(net):
    net.embedding = nn.Embedding(4, 6)
    net.head.weight = net.embedding.weight
    with pytest.raises(ValueError, match=r"head holds a weight tied to others: embedding\.weight, head\.weight"):
        ff.factorize(net, ff.Rank1())
    assert not ff.factorized_layers(net)


def test_a_spec_that_does_not_fit_names_the_module(net):
    with pytest.raises(ValueError, match=r"body\.0: Hadamard.*svd"):
        ff.factorize(net, ff.Hadamard(), init="svd")
    assert not ff.factorized_layers(net)


@pytest.mark.parametrize("arguments, error", [(("rank1",), TypeError), ((ff.Rank1(), (), "svdd"), ValueError)])
def test_bad_arguments(net, arguments, error):
    with pytest.raises(error, match="factorize"):
        ff.factorize(net, *arguments)


def test_a_transformer_layer_converts_and_trains():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0)
    x = torch.randn(2, 5, 16)
    wanted = layer(x)
    ff.factorize(layer, ff.Rank1(), init="svd")
    assert set(ff.factorized_layers(layer)) == {"self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2"}
    torch.testing.assert_close(layer(x), wanted)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize(
    "spec", [ff.Rank1(), ff.Rank1(rank=3), ff.Rank1(layout="kernel"), ff.Rank1(layout="view")], ids=str
)
def test_random_init_balances_u_and_v(spec):
    for layer in (ff.nn.FactorizedConv2d(32, 64, 3, spec=spec), ff.nn.FactorizedLinear(256, 99, spec=spec)):
        assert layer.u.norm().item() == pytest.approx(layer.v.norm().item(), rel=1e-5)


@pytest.mark.parametrize("size", [(32, 16, 3, 3), (6, 4, 1, 3), (64, 64, 5, 5), (3, 3, 1, 1)])
def test_the_ranks_of_hadamard_tensors(size):
    """The least with r² ≥ min(o, i), the greatest with no more numbers than W."""
    small, large = (ff.Hadamard(tensor=True, ratio=ratio).rank_of(size) for ratio in (0.0, 1.0))
    assert (small - 1) ** 2 < min(size[:2]) <= small**2

    def numbers(r):
        return 2 * r * (size[0] + size[1]) + 2 * r * r * size[2] * size[3]

    whole = torch.Size(size).numel()
    assert large == small or numbers(large) <= whole
    assert numbers(large + 1) > whole
    shapes = ff.Hadamard(tensor=True).shapes(size)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == numbers(
        ff.Hadamard(tensor=True).rank_of(size)
    )


class Sequence(nn.Module):
    """Convolutions in one dimension, attention, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 8, 5, stride=2, padding=2, dilation=2)
        self.same = nn.Conv1d(8, 8, 4, padding="same", groups=2)
        self.ring = nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular", bias=False)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.ring(self.same(self.first(x)).relu())
        return self.head(self.attention(x.transpose(-1, -2)).mean(-2))


SERIES = torch.randn(2, 3, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def sequence():
    torch.manual_seed(0)
    return Sequence()


@pytest.mark.parametrize("spec", EXACT, ids=str)
def test_sequences_convert_and_come_back(sequence, spec):
    wanted, names = sequence(SERIES), set(sequence.state_dict())
    ff.factorize(sequence, spec, init="svd")
    assert len(ff.factorized_layers(sequence)) == 8
    torch.testing.assert_close(sequence(SERIES), wanted)
    torch.testing.assert_close(sequence.first(SERIES[0]), sequence.first(SERIES)[0])
    sequence(SERIES).square().sum().backward()
    assert all(p.grad is not None for p in sequence.parameters())
    ff.densify(sequence)
    assert type(sequence.first) is nn.Conv1d and type(sequence.attention.self_attn) is nn.MultiheadAttention
    assert set(sequence.state_dict()) == names
    torch.testing.assert_close(sequence(SERIES), wanted)


@pytest.mark.parametrize("layout", ["spatial", "kernel"])
def test_compact_sequences_have_the_function_of_the_dense_ones(sequence, layout):
    ff.factorize(sequence, ff.Rank1(layout=layout), init="svd")
    for layer in ff.factorized_layers(sequence).values():
        layer.compact(0.3)
    dense = ff.densify(copy.deepcopy(sequence))
    for path in ("reconstruct", "factored"):
        for name in ("first", "head"):
            getattr(sequence, name).path = path
        torch.testing.assert_close(sequence(SERIES), dense(SERIES), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(sequence.eval()(SERIES), dense.eval()(SERIES), atol=1e-5, rtol=1e-4)


def test_attention_with_keys_of_another_width():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True)
    inputs = torch.randn(2, 3, 8), torch.randn(2, 4, 6), torch.randn(2, 4, 5)
    wanted = attention(*inputs)[0]
    new = ff.factorize(attention, ff.Rank1(), skip="v_proj", init="svd")
    assert set(ff.factorized_layers(new)) == {"q_proj", "k_proj", "out_proj"}
    torch.testing.assert_close(new(*inputs)[0], wanted)
    back = ff.densify(new)
    assert set(back.state_dict()) == set(attention.state_dict())
    torch.testing.assert_close(back(*inputs)[0], wanted)


class Conv1D(nn.Module):
    """As that of transformers, which GPT-2 is made of: a linear layer whose weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


def _same(base, module, forward):
    made = type(base.__name__ if module.endswith("linear") else "Conv2dSame", (base,), {"forward": forward})
    made.__module__ = module
    return made


TimmLinear = _same(nn.Linear, "timm.layers.linear", lambda self, x: nn.functional.linear(x, self.weight, self.bias))
Conv2dSame = _same(
    nn.Conv2d,
    "timm.layers.conv2d_same",
    lambda self, x: nn.functional.conv2d(x, self.weight, self.bias, 1, "same", self.dilation, self.groups),
)


class Named(nn.Linear):
    """A subclass without a forward of its own."""


@pytest.mark.parametrize(
    "layer, shape",
    [
        (lambda: Conv1D(5, 4), (2, 3, 4)),
        (lambda: TimmLinear(4, 5), (2, 4)),
        (lambda: Conv2dSame(3, 5, 3, dilation=2), (2, 3, 7, 7)),
        (lambda: Conv2dSame(3, 5, (4, 3), bias=False), (2, 3, 7, 7)),
        (lambda: Named(4, 5, bias=False), (2, 4)),
    ],
)
def test_layers_of_other_libraries_convert_and_come_back_as_they_were(layer, shape):
    torch.manual_seed(0)
    dense, x, calls = layer(), torch.randn(shape), []
    dense.register_forward_hook(lambda *_: calls.append(1))
    wanted = dense(x)
    model = ff.factorize(nn.Sequential(dense), ff.Rank1(), init="svd")
    assert list(ff.factorized_layers(model)) == ["0"]
    torch.testing.assert_close(model(x), wanted)
    back = ff.densify(copy.deepcopy(model))
    assert type(back[0]) is type(dense) and set(back.state_dict()) == {f"0.{name}" for name in dense.state_dict()}
    assert {name: p.shape for name, p in back[0].named_parameters()} == {
        n: p.shape for n, p in dense.named_parameters()
    }
    torch.testing.assert_close(back(x), wanted)
    assert len(calls) == 3


def test_padding_that_depends_on_the_image_is_refused():
    with pytest.raises(ValueError, match=r"0 is a Conv2dSame, which pads by the size of its input"):
        ff.factorize(nn.Sequential(Conv2dSame(3, 5, 3, stride=2)), ff.Rank1())


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "parametrizations.weight_norm", "prune"])
def test_a_weight_that_is_made_by_something_else_is_refused(net, norm):
    if norm == "prune":
        prune.identity(net.head, "weight")
    elif norm.startswith("parametrizations"):
        nn.utils.parametrizations.weight_norm(net.head)
    else:
        getattr(nn.utils, norm)(net.head)
    with pytest.raises(ValueError, match=r"head is a .*Linear whose weight is no parameter"):
        ff.factorize(net, ff.Rank1())
    ff.factorize(net, ff.Rank1(), unsupported="skip")
    assert set(ff.factorized_layers(net)) == {"body.0", "body.3"}
    net(X)


def test_what_cannot_be_converted_can_be_left_out(net, caplog):
    net.more = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Embedding(4, 6))
    net.head.weight = net.more[1].weight
    with caplog.at_level(logging.INFO, "fastfact"):
        ff.factorize(net, ff.Rank1(), skip="body.0", unsupported="skip")
    assert list(ff.factorized_layers(net)) == ["body.3"]
    assert "1 layers converted, 3 left out" in caplog.text
    for line in (
        "body.0: skip='body.0'",
        "more.0: is a ConvTranspose2d, which is not supported",
        "head: holds a weight tied to others: head.weight, more.1.weight",
    ):
        assert f"left out: {line}" in caplog.text


def test_only_and_specs_by_path(net):
    ff.factorize(net, {"body.0": ff.LowRank(), "head": None, "*": ff.Rank1()}, only=("body", "head"))
    specs = {path: type(layer.spec) for path, layer in ff.factorized_layers(net).items()}
    assert specs == {"body.0": ff.LowRank, "body.3": ff.Rank1}
    other = ff.factorize(Net(), ff.Rank1(), only="head")
    assert list(ff.factorized_layers(other)) == ["head"]
    chosen = ff.factorize(Net(), lambda path, module: ff.Rank1() if isinstance(module, nn.Linear) else None)
    assert list(ff.factorized_layers(chosen)) == ["head"]


@pytest.mark.parametrize(
    "spec, options, error, match",
    [
        ({"haed": ff.Rank1()}, {}, ValueError, "spec='haed'"),
        ({"head": "rank1"}, {}, TypeError, "'head': 'rank1'"),
        (lambda path, module: "rank1", {}, TypeError, r"spec\('body.0', …\) gave 'rank1'"),
        (ff.Rank1(), {"only": "haed"}, ValueError, "only='haed'"),
        (ff.Rank1(), {"unsupported": "ignore"}, ValueError, "unsupported='ignore'"),
    ],
)
def test_bad_choices_are_named_and_nothing_is_converted(net, spec, options, error, match):
    with pytest.raises(error, match=match):
        ff.factorize(net, spec, **options)
    assert not ff.factorized_layers(net)


def test_layers_that_grow_are_told(recwarn):
    with pytest.warns(UserWarning, match=r"in 1 of 2 layers .* 0 \(32,768 → 65,537\).*34,049 → 66,955 parameters"):
        ff.factorize(nn.Sequential(nn.Conv2d(256, 128, 1), nn.Conv2d(128, 1, 3)), ff.Rank1(layout="spatial"))
    assert not recwarn.list
    ff.factorize(nn.Sequential(nn.Conv2d(256, 128, 1), nn.Linear(40, 40)), ff.Rank1())
    assert not recwarn.list


def test_layouts_by_the_size_of_the_weight(tmp_path):
    """1×1 convolutions are linear layers of pixels, unless their factors hold fewer numbers in the spatial layout."""

    def model():
        return nn.Sequential(
            nn.Conv2d(6, 8, 1),
            nn.Conv2d(8, 8, 1, groups=8),
            nn.Conv2d(8, 4, (1, 3)),
            nn.Conv1d(3, 5, 1),
            nn.Linear(4, 4),
        )

    made, dense = ff.factorize(model(), ff.Rank1(rank=2)), model()
    assert [layer.spec.layout for layer in made] == ["kernel", "spatial", "spatial", "kernel", "spatial"]
    assert made[0].u.shape == (2, 6, 1) and made[0].v.shape == (2, 8, 1)
    x, before = torch.randn(2, 6, 5, 5), dense[0].eval()
    alike = ff.factorize(nn.Sequential(copy.deepcopy(before)), ff.Rank1(), init="svd")
    assert torch.allclose(alike(x), before(x), atol=1e-6)
    ff.save(made, tmp_path / "a.safetensors")
    again = ff.load_into(model(), tmp_path / "a.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(made.state_dict().values(), again.state_dict().values(), strict=True))


@pytest.mark.parametrize("shape, rank", [((200, 300), 1), ((300, 200), 3), ((80, 400), 30), ((70, 70), 1)])
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_truncated_vectors_approximate_as_the_full_decomposition_does(shape, rank, decay, dtype):
    from fastfact.nn.specs import leading_vectors

    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    matrix = left * (values * torch.arange(1, len(values) + 1) ** -decay) @ right
    state = torch.random.get_rng_state()
    matrix = matrix.to(dtype)
    left, values, right = leading_vectors(matrix, rank)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(map(torch.equal, leading_vectors(matrix, rank), (left, values, right)))
    matrix = matrix.double()
    best = torch.linalg.svdvals(matrix)[rank:].norm()
    # Growth ends where a block gains less than 1e-7 of the squared error; 1e-5 allows two hundred such blocks.
    assert (matrix - left * values @ right).norm() <= best * (1 + 1e-5)
    limits = {} if dtype == torch.float64 else {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(left.T @ left, torch.eye(rank, dtype=torch.float64), **limits)


def test_a_large_layer_starts_from_few_vectors(monkeypatch):
    """A full decomposition of a layer of AlexNet takes minutes."""
    monkeypatch.setattr(torch.linalg, "svd", _refuse_large(torch.linalg.svd))
    layer = nn.Linear(500, 700)
    factorized = ff.nn.FactorizedLinear.from_dense(layer, ff.Rank1(rank=2), init="svd")
    torch.testing.assert_close(factorized.weight.detach(), layer.weight.detach())


def _refuse_large(svd):
    def checked(matrix, **options):
        assert min(matrix.shape) <= 400, f"a full decomposition of {tuple(matrix.shape)}"
        return svd(matrix, **options)

    return checked


class Twice(nn.Module):
    """A module that stands in two places."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


def test_every_name_of_a_module_counts():
    assert not ff.factorized_layers(ff.factorize(Twice(), ff.Rank1(), skip="b"))
    for how in ({"spec": ff.Rank1(), "only": "b"}, {"spec": {"b": ff.Rank1()}}):
        model = ff.factorize(Twice(), **how)
        assert list(ff.factorized_layers(model)) == ["a"] and model.a is model.b
    tied = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    tied["head"].weight = tied["embedding"].weight
    ff.factorize(tied, ff.LowRank(rank=2), unsupported="skip", freeze=True, train="head")
    assert tied["embedding"].weight.requires_grad and not tied["body"].sigma.requires_grad


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.scale = nn.Parameter(torch.ones(3))


def counting():
    layer = nn.Linear(4, 3)
    layer.register_buffer("count", torch.zeros(1))
    return layer


def holding():
    layer = nn.Linear(4, 3)
    layer.inner = nn.LayerNorm(3)
    return layer


def pruned_bias():
    layer = nn.Linear(4, 3)
    return torch.nn.utils.prune.l1_unstructured(layer, "bias", 0.5)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Scaled, "has scale besides"),
        (counting, "has count besides"),
        (holding, "has inner besides"),
        (pruned_bias, "whose bias is no parameter"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "complex64"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(make, why):
    model = nn.Sequential(make(), nn.Linear(3, 2))
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=rf"factorize: 0 .*{why}"):
        ff.factorize(model, ff.Rank1())
    assert set(model.state_dict()) == before
    ff.factorize(model, ff.Rank1(), unsupported="skip")
    assert list(ff.factorized_layers(model)) == ["1"]


def test_a_weight_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="factorize: 1: "):
        ff.factorize(model, ff.Rank1(), init="svd")


@pytest.mark.parametrize("make", [torch.nn.utils.prune.l1_unstructured, torch.nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_with_a_factor_that_is_made_becomes_a_dense_one_that_works(make):
    model, x = ff.factorize(nn.Sequential(nn.Linear(8, 4)), ff.Rank1()), torch.randn(2, 8)
    make(model[0], "u", *([0.5] if make is torch.nn.utils.prune.l1_unstructured else []))
    expected = model(x)
    torch.testing.assert_close(model[0].to_dense()(x), expected)
    ff.densify(model)
    torch.testing.assert_close(model(x), expected)


def test_layers_of_zeros_train_without_mu():
    model = nn.Sequential(nn.Linear(6, 5))
    nn.init.zeros_(model[0].weight)
    ff.factorize(model, ff.Rank1(rank=3, sparse=False), init="svd")
    assert not model[0].weight.any()
    model(torch.randn(4, 6)).square().sum().backward()
    assert model[0].v.grad.any(1).all()


def test_large_layers_on_the_device_meta_convert():
    model = nn.Sequential(nn.Linear(200, 300, device="meta"))
    ff.factorize(model, ff.Rank1(rank=2), init="svd")
    assert model[0].u.is_meta and "–" in str(ff.summary(model))


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2).eval()


@pytest.mark.parametrize("skip", ["layers.0", "layers.1", "*.self_attn.in_proj", "*.self_attn.out_proj", "*.linear1"])
def test_encoders_with_a_padding_mask_whatever_is_left_dense(skip):
    model, x = encoder(), torch.randn(2, 4, 8)
    padding = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        ff.factorize(model, ff.Rank1(), init="svd", skip=skip)
        found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], atol=1e-5, rtol=1e-4)


def test_attention_of_nested_tensors():
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model = ff.factorize(nn.Sequential(copy.deepcopy(dense)), ff.Rank1(), init="svd")[0]
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with torch.no_grad():
        found, expected = (m(x, x, x, need_weights=False)[0] for m in (model, dense))
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_weights_of_attention_are_no_place_to_write_to(training):
    model = ff.factorize(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)), ff.Rank1(), init="svd")[0]
    model.train(training)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        for _ in range(3):
            before = model(x, x[:, :2], x[:, :2])[0]
        with pytest.raises(RuntimeError):
            model.in_proj_weight.zero_()
        with pytest.raises(RuntimeError):
            nn.init.xavier_uniform_(model.in_proj_weight)
        torch.testing.assert_close(model(x, x[:, :2], x[:, :2])[0], before)


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 3, 3)])
def test_masks_of_other_shapes_are_refused(shape):
    model = ff.factorize(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)), ff.Rank1(), init="svd")[0]
    x = torch.randn(2, 3, 8)
    with pytest.raises(RuntimeError, match="attn_mask has shape"):
        model(x, x, x, attn_mask=torch.zeros(shape))


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}])
def test_attention_comes_back_with_its_parameters_in_order(options):
    dense = nn.Sequential(nn.MultiheadAttention(8, 2, **options))
    before = [(name, p.shape) for name, p in dense.named_parameters()]
    ff.densify(ff.factorize(dense, ff.Rank1()))
    assert [(name, p.shape) for name, p in dense.named_parameters()] == before


def test_weights_that_are_tied_by_their_memory_are_refused():
    """As in an autoencoder whose decoder has the encoder's weight turned."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 8))
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(ValueError, match=r"tied to others: 0\.weight, 1\.weight"):
        ff.factorize(model, ff.Rank1())
    ff.factorize(model, ff.Rank1(), unsupported="skip")
    assert list(ff.factorized_layers(model)) == ["2"]
    # A third part that lies in the first, and columns of one memory, which lie between each other.
    whole = torch.randn(100)
    model = nn.Sequential(*(nn.Linear(2, n, bias=False) for n in (50, 3, 4)))
    for layer, begin in zip(model, (0, 10, 40), strict=True):
        layer.weight.data = whole[begin : begin + layer.weight.numel()].view_as(layer.weight)
    assert not ff.factorized_layers(ff.factorize(model, ff.Rank1(), unsupported="skip"))
    columns = torch.randn(8, 8)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False))
    model[0].weight, model[1].weight = (nn.Parameter(columns[:, k : k + 4]) for k in (0, 4))
    assert len(ff.factorized_layers(ff.factorize(model, ff.Rank1()))) == 2
    # Parts of one memory are no ties.
    whole = torch.randn(64)
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    model[0].weight.data, model[1].weight.data = whole[:32].view(4, 8), whole[32:].view(8, 4)
    assert len(ff.factorized_layers(ff.factorize(model, ff.Rank1()))) == 2
