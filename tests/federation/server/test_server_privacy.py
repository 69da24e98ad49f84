"""Differential privacy of what clients download: noise and clipping by hand, ε against the accountant's own definition,
and what is refused; and which methods a server could serve that sees nothing but a sum."""

import json
import math

import pytest
import torch
from small import cnn, make_clients, mlp
from torch import nn

import fastfact as ff
from fastfact.federation.server import privacy
from fastfact.federation.server.exchange import START

F64 = torch.float64


def linear() -> nn.Module:
    return nn.Linear(4, 3).double()


def clients(n=6):
    g = torch.Generator().manual_seed(1)
    made = []
    for k in range(n):
        x = torch.randn(12 + k, 4, generator=g, dtype=F64)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
        made.append(ff.Client(train=(x[:8], y[:8]), test=(x[8:], y[8:])))
    return made


def federation(n=6, **options):
    options = {"epochs": 1, "batch_size": 4, "lr": 0.5, "cohort": 1, "clip": 0.1, "noise": 1.5} | options
    return ff.Federation(linear, clients(n), **options)


def test_the_download_is_the_mean_of_clipped_updates_and_noise():
    fed = federation()
    fed.fit(2)
    held = fed.states.state
    moved = {name: held[name] - held[START + name] for name in ("weight", "bias")}
    norm = torch.sqrt(sum(m.flatten(1).square().sum(1) for m in moved.values()))
    assert (norm > 0.1).all()
    mixed = fed.mixed()[0].state_dict()
    for name, m in moved.items():
        clipped = m * (0.1 / norm).view(-1, *[1] * (m.dim() - 1))
        noise = mixed[name] - held[START + name][0] - clipped.sum(0) / 6
        draw = torch.Generator().manual_seed(ff.federation.state.seed_for(0, 2, -1, f"privacy/{name}"))
        torch.testing.assert_close(noise, 1.5 * 0.1 / 6 * torch.randn(1, *noise.shape, generator=draw, dtype=F64)[0])
    assert all(torch.equal(fed.mixed()[k].state_dict()["weight"], mixed["weight"]) for k in range(6))


def test_noise_is_of_the_size_it_says_and_new_each_round():
    x, start = {"w": torch.zeros(4, 20_000, dtype=F64)}, {"w": torch.zeros(1, 20_000, dtype=F64)}
    first, again, later = (privacy.Noise(0.3, 4, start, 0, r).released(x)["w"] for r in (1, 1, 2))
    assert first.std().item() == pytest.approx(0.3, rel=0.02) and torch.equal(first, again)
    assert abs((first * later).mean()) < 0.3**2 * 4 / math.sqrt(20_000)


def test_a_client_that_is_left_out_does_not_change_the_denominator():
    """Or else what it sent, NaN, would be told by everybody's download."""
    start = {"w": torch.ones(1, 3, dtype=F64)}
    released = privacy.Noise(0.0, 4, start, 0, 1).released({"w": torch.tensor([[3.0, 1, 1], [1, 5, 1]], dtype=F64)})
    assert released["w"].tolist() == [[1.5, 2.0, 1.0]]


def test_one_client_moves_the_sum_by_at_most_twice_the_clip():
    def mixed(data):
        fed = ff.Federation(linear, data, epochs=1, batch_size=4, lr=50.0, cohort=1, clip=0.1, noise=1e-12)
        fed.fit(1)
        return torch.cat([tensor.flatten() for tensor in fed.mixed()[0].state_dict().values()])

    data, others = clients(), clients()
    x, y = others[2].train
    others[2] = ff.Client(train=(-100 * x, y), test=others[2].test)
    nothing = list(others)
    nothing[2] = ff.Client(train=(x * 1e300, y), test=others[2].test)
    assert 0.1 / 6 < torch.dist(mixed(data), mixed(others)) < 2 * 0.1 / 6 + 1e-9
    assert torch.dist(mixed(data), mixed(nothing)) == pytest.approx(0.1 / 6, abs=1e-9)


def test_epsilon_of_the_gaussian_mechanism():
    """One release to all: its exact δ(ε) (Balle and Wang, ICML 2018, Theorem 8) is no larger than asked, nearly it."""
    from scipy.stats import norm

    z, delta = 3.0, 1e-3
    epsilon, mu = privacy.epsilon(z, delta, 1, 50, 50), 2 / z
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert delta / 10 < exact <= delta


def test_epsilon_grows_with_rounds_and_shrinks_with_noise_and_fewer_clients():
    of = privacy.epsilon
    assert of(2.0, 1e-3, 0, 50, 50) == 0 < of(2.0, 1e-3, 1, 50, 50) < of(2.0, 1e-3, 10, 50, 50)
    assert of(4.0, 1e-3, 10, 50, 50) < of(2.0, 1e-3, 10, 50, 50)
    assert of(2.0, 1e-3, 10, 50, 5) < of(2.0, 1e-3, 10, 50, 50)


def test_rows_say_what_was_spent_and_a_run_goes_on(tmp_path):
    options = {"participation": 0.5, "delta": 1e-2}
    whole, first = federation(**options), federation(**options)
    whole.fit(4)
    first.fit(2, out=tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", model=linear, clients=clients())
    again.fit(2, out=tmp_path / "run")
    spent = [row["epsilon"] for row in again.history]
    assert spent == [row["epsilon"] for row in whole.history]
    assert spent[::3] == [privacy.epsilon(1.5, 1e-2, r, 6, 3) for r in (1, 2, 3, 4)] and again.epsilon() == spent[-1]
    assert all(torch.equal(t, again.states.state[n]) for n, t in whole.states.state.items())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == spent
    assert "epsilon" not in ff.Federation(linear, clients(), epochs=1, cohort=1).fit(1)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": None}, "needs clip"),
        ({"clip": "2x"}, "clip='2x' depends on all"),
        ({"rule": "median"}, "rule='median'"),
        ({"max_norm": "50x"}, "max_norm='50x'"),
        ({"method": "stand-alone"}, "shares nothing"),
        ({"noise": -1.0}, "noise=-1.0"),
        ({"delta": 1.0}, "delta=1.0"),
    ],
    ids=str,
)
def test_what_would_protect_nobody_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        federation(**options)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("factorized-fl-alpha", r"what the others uploaded, and by keys \(2.v\)"),
        ("simfed", r"by keys \(encoding\)"),
        ("fedfac-dynamic", "what the others uploaded: noise"),
        ("fedamp", "what the others uploaded"),
        ("agnostic-fl", r"by keys \(loss\)"),
        ("fedsplit", "keeps parts of shared tensors personal"),
    ],
)
def test_methods_that_mix_by_what_is_uploaded_are_refused(method, message):
    with pytest.raises(ValueError, match=message):
        ff.Federation(mlp, make_clients((6,), (8, 8, 8)), method, cohort=1, clip=1.0, noise=1.0)


def test_running_statistics_are_refused():
    batchnorm = ff.methods.FedAvg(share_norm_statistics=True)
    with pytest.raises(ValueError, match="share_norm_statistics must be False"):
        ff.Federation(cnn, make_clients((1, 6, 6), (8, 8, 8)), batchnorm, cohort=1, clip=1.0, noise=1.0)


def test_alpha_that_matches_all_alike_uploads_u_alone():
    method = ff.methods.FactorizedFLAlpha(tau=-1.0, epsilon=0.0)
    fed = ff.Federation(mlp, make_clients((6,), (8, 9, 8)), method, epochs=1, cohort=1, clip=1.0, noise=1.0)
    fed.fit(2)
    assert fed.uploaded == fed.shared and all(fed.infos[name].role == "u" for name in fed.shared)
    assert torch.equal(fed.mixing_matrix(), torch.full((3, 3), 1 / 3, dtype=F64))
