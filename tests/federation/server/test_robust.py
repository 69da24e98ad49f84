"""Robust rules against their definitions in float64, and federations with hostile clients."""

import itertools

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.federation import local
from fastfact.federation.server import mixing, robust

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def uploads(m):
    return {"w": torch.randn(m, 3, 2, dtype=F64), "b": torch.randn(m, 5, dtype=F64), "n": torch.arange(m) * 10}


def even(m, rows=3):
    return torch.full((1, m), 1 / m, dtype=F64).expand(rows, m)


@pytest.mark.parametrize("m", [1, 2, 5, 8])
def test_the_median_of_even_weights_is_that_of_each_coordinate(m):
    x = uploads(m)
    mixed = robust.mix(even(m), x, "median")
    for name in ("w", "b"):
        torch.testing.assert_close(mixed[name], x[name].quantile(0.5, dim=0).expand_as(mixed[name]))
    assert mixed["n"].dtype == torch.int64


@pytest.mark.parametrize(("m", "hostile"), [(5, 0.2), (10, 0.3), (4, 0.0), (3, 1 / 3)])
def test_the_trimmed_mean_leaves_out_the_ends_of_each_coordinate(m, hostile):
    x = uploads(m)
    mixed = robust.mix(even(m), x, "trimmed-mean", hostile)
    cut = round(hostile * m)
    expected = x["w"].sort(dim=0).values[cut : m - cut].mean(0)
    torch.testing.assert_close(mixed["w"], expected.expand_as(mixed["w"]))


@pytest.mark.parametrize(("m", "hostile"), [(9, 0.3), (7, 0.2), (5, 0.2)])
def test_multi_krum_takes_the_clients_whose_neighbours_are_near(m, hostile):
    x = uploads(m)
    f = int(hostile * m)
    flat = torch.cat([x["w"].flatten(1), x["b"]], 1)
    scores = []
    for i in range(m):
        others = sorted(float((flat[i] - flat[j]).square().sum()) for j in range(m) if j != i)
        scores.append(sum(others[: m - f - 2]))
    chosen = sorted(range(m), key=scores.__getitem__)[: m - f]
    mixed = robust.mix(even(m), x, "multi-krum", hostile)
    torch.testing.assert_close(mixed["b"], x["b"][chosen].mean(0).expand_as(mixed["b"]))


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "multi-krum"])
def test_weights_are_those_of_a_sample(rule):
    """A weight of 2/7 counts as two clients of 1/7, one of 0 as none; rows do not know of each other."""
    x = uploads(6)
    counts = torch.tensor([[2, 1, 0, 1, 1, 2], [0, 0, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1]])
    mixed = robust.mix(counts / counts.sum(1, keepdim=True).double(), x, rule, 0.2)
    for row, of in enumerate(counts):
        some = {name: t.repeat_interleave(of, 0) for name, t in x.items()}
        if rule == "multi-krum" and (of > 1).any():
            continue
        alone = robust.mix(even(int(of.sum()), 1), some, rule, 0.2)
        for name in x:
            torch.testing.assert_close(mixed[name][row], alone[name][0])


@pytest.mark.parametrize("rule", ["mean", "median", "trimmed-mean", "multi-krum"])
def test_nothing_happens_where_all_agree(rule):
    x = {"w": torch.randn(1, 4, dtype=F64).repeat(7, 1)}
    torch.testing.assert_close(robust.mix(even(7, 7), x, rule, 0.2), x)


def test_clipping_scales_what_changed():
    start, moved = {"w": torch.randn(4, 3, dtype=F64)}, torch.randn(4, 3, dtype=F64)
    norms = robust.norms({"w": start["w"] + moved}, start)
    torch.testing.assert_close(norms, moved.norm(dim=1))
    bound = float(norms.sort().values[1])
    clipped = robust.clipped({"w": start["w"] + moved, "key": moved}, start, norms, bound)
    expected = start["w"] + moved / torch.clamp(norms / bound, min=1)[:, None]
    torch.testing.assert_close(clipped["w"], expected)
    assert clipped["key"] is moved


def linear():
    return nn.Linear(4, 2).double()


def clients(hostile=0, scale=1e30, n=10):
    g = torch.Generator().manual_seed(1)
    made = []
    for k in range(n):
        x = torch.randn(30, 4, generator=g, dtype=F64)
        y = (x[:, 0] + 0.1 * x[:, 1] > 0).long()
        if k < hostile:
            x, y = x * scale, 1 - y
        made.append(ff.Client(train=(x[:20], y[:20]), test=(x[20:], y[20:])))
    return made


def honest(fed, hostile=1):
    rows = fed.history.of(fed.round)[hostile:]
    return sum(row["accuracy_before"] for row in rows) / len(rows), [row["left_out"] for row in rows]


def fit(hostile, scale=1e30, method="fedavg", **options):
    fed = ff.Federation(linear, clients(hostile, scale), method, epochs=2, batch_size=10, lr=0.1, cohort=1, **options)
    fed.fit(4)
    return fed


def test_one_client_with_1e30_does_not_stop_the_others(monkeypatch):
    # Its loss is its own word.
    monkeypatch.setattr(local, "diverged", lambda *_: {})
    good, _ = honest(fit(0), 0)
    accuracy, left_out = honest(fit(1))
    assert accuracy > good - 0.05 and left_out == [None] * 9
    # What the bound is for.
    accuracy, _ = honest(fit(1, max_norm=None))
    assert accuracy < good - 0.2


@pytest.mark.parametrize(
    "options",
    [{"clip": "1x"}, {"clip": 0.5}, {"rule": "median"}, {"rule": "trimmed-mean"}, {"rule": "multi-krum"}],
    ids=str,
)
def test_hostile_clients_below_the_bound_do_not_decide(options):
    good, _ = honest(fit(0), 0)
    assert honest(fit(2, 100.0), 2)[0] < good - 0.2
    assert honest(fit(2, 100.0, **options), 2)[0] > good - 0.1


def test_a_clipped_federation_resumes(tmp_path):
    def make():
        return ff.Federation(linear, clients(2, 100.0), epochs=1, lr=0.1, cohort=1, clip="1x", participation=0.5)

    whole, first = make(), make()
    whole.fit(4)
    first.fit(2, out=tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", model=linear, clients=clients(2, 100.0))
    again.fit(2, out=tmp_path / "run")
    assert all(torch.equal(t, again.states.state[n]) for n, t in whole.states.state.items())


def test_a_bound_on_the_weight_of_any_one_client():
    method = ff.methods.make("factorized-fl-alpha", max_weight=0.1, tau=-1.0)
    sigma = mixing.cosine(torch.randn(6, 3, dtype=F64))
    weights = method.matrix(sigma, list(range(6)), [1] * 6, None)
    free = ff.methods.make("factorized-fl-alpha", tau=-1.0).matrix(sigma, list(range(6)), [1] * 6, None)
    for i, j in itertools.permutations(range(6), 2):
        assert weights[i, j] == min(0.1, free[i, j])
    torch.testing.assert_close(weights.sum(1), torch.ones(6, dtype=F64))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("stand-alone", {"rule": "median"}, "rule='median'.*shares nothing"),
        ("fedfomo", {"rule": "median"}, "rule='median'.*mixes at its clients"),
        ("fedfomo", {"clip": "1x"}, "clip='1x'.*mixes at its clients"),
        ("fedavg", {"rule": "multi-krum", "hostile": 0.4}, "10 clients a round, must be at least 11"),
        ("fedavg", {"rule": "best"}, "rule='best'"),
        ("fedavg", {"hostile": 0.5}, "hostile=0.5"),
        ("fedavg", {"clip": "x"}, "clip='x'"),
        ("fedavg", {"clip": -1}, "clip=-1"),
        ("fedavg", {"max_norm": "0x"}, "max_norm='0x'"),
    ],
)
def test_what_makes_no_sense_is_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        ff.Federation(linear, clients(), method, cohort=1, **options)
