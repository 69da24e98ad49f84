"""factorize and densify on whole models."""

import copy

import pytest
import torch
from torch import nn

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
        nn.Conv1d(3, 4, 3),
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
    with pytest.raises(ValueError, match=r"head\.weight is tied to embedding\.weight, head\.weight"):
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
    assert set(ff.factorized_layers(layer)) == {"self_attn.out_proj", "linear1", "linear2"}
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
    small, large = (ff.Hadamard(tensor=True, ratio=ratio).rank(size) for ratio in (0.0, 1.0))
    assert (small - 1) ** 2 < min(size[:2]) <= small**2

    def numbers(r):
        return 2 * r * (size[0] + size[1]) + 2 * r * r * size[2] * size[3]

    whole = torch.Size(size).numel()
    assert large == small or numbers(large) <= whole
    assert numbers(large + 1) > whole
    shapes = ff.Hadamard(tensor=True).shapes(size)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == numbers(ff.Hadamard(tensor=True).rank(size))
