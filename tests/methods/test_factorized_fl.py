"""The methods against a plain float64 loop written from the paper's equations and algorithms.

The loop keeps one dict of tensors per client and shares no code with the package but the batches' order.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.state import generator_for

SIZES = (9, 6, 12, 7)
LR, MOMENTUM, DECAY, EPOCHS, BATCH, SEED = 0.1, 0.9, 1e-3, 2, 3, 5
LAYERS = (0, 2, 4)  # Linear 6 → 8 → 5 → 3, the last is the classifier


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def clients() -> list[ff.Client]:
    g = torch.Generator().manual_seed(1)
    made = []
    for n in SIZES:
        x, y = torch.randn(n + 4, 6, generator=g, dtype=torch.float64), torch.randint(3, (n + 4,), generator=g)
        made.append(ff.Client(train=(x[:n], y[:n]), test=(x[n:], y[n:])))
    return made


def federation(method, **options) -> ff.Federation:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return ff.Federation(mlp, clients(), method, **settings, seed=SEED, **options)


def forward(state, x):
    """W = Σ_r u_r v_rᵀ + μ (eq. 2), y = x W + bias."""
    for layer in LAYERS:
        if f"{layer}.u" in state:
            weight = sum(torch.outer(u, v) for u, v in zip(state[f"{layer}.u"], state[f"{layer}.v"], strict=True))
            if f"{layer}.mu" in state:
                weight = weight + state[f"{layer}.mu"].T
        else:
            weight = state[f"{layer}.weight"].T
        x = x @ weight + state[f"{layer}.bias"]
        x = F.relu(x) if layer != LAYERS[-1] else x
    return x


def train(state, data, round, k, l1):
    """Local training: heavy-ball SGD; μ takes the proximal step of λ at the step length 1 / (1 − momentum) · lr."""
    x, y = data
    order = generator_for(SEED, round, k, "order")
    velocity = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for _ in range(EPOCHS):
        permutation = torch.randperm(len(y), generator=order).tolist()
        batches = [permutation[i : i + BATCH] for i in range(0, len(y), BATCH)]
        if len(batches[-1]) == 1:
            batches[-2:] = [batches[-2] + batches[-1]]
        for batch in batches:
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
            loss = F.cross_entropy(forward(leaves, x[batch]), y[batch])
            for (name, tensor), grad in zip(state.items(), torch.autograd.grad(loss, leaves.values()), strict=True):
                velocity[name] = MOMENTUM * velocity[name] + grad + DECAY * tensor
                state[name] = tensor - LR * velocity[name]
                if name.endswith("mu"):
                    threshold = LR * l1 / (1 - MOMENTUM)
                    state[name] = state[name].sign() * (state[name].abs() - threshold).clamp(min=0)


def matching_weights(states, tau, epsilon, min_matches):
    """Eq. 4 and 5 on v of layer L − 1."""
    v = [state["2.v"].flatten() for state in states]
    weights = []
    for k in range(len(v)):
        cos = [float(v[k] @ other) / math.sqrt(float(v[k] @ v[k]) * float(other @ other)) for other in v]
        cos[k] = 1.0
        closest = sorted(range(len(v)), key=lambda i: (i != k, -cos[i]))[:min_matches]
        e = [math.exp(epsilon * c) if c >= tau or i in closest else 0.0 for i, c in enumerate(cos)]
        weights.append([value / sum(e) for value in e])
    return weights


def run(start, rounds, weights, shared, l1, after=lambda mixed, own, name: mixed):
    states = [{name: tensor[k].clone() for name, tensor in start.items()} for k in range(len(SIZES))]
    data = [client.train for client in clients()]
    for r in range(1, rounds + 1):
        if r > 1:
            w = weights(states)
            downloads = [
                {
                    n: after(sum(w[k][i] * states[i][n] for i in range(len(states))), states[k][n], n)
                    for n in start
                    if shared(n)
                }
                for k in range(len(states))
            ]
            for state, download in zip(states, downloads, strict=True):
                state.update(download)
        for k, state in enumerate(states):
            train(state, data[k], r, k, l1)
    return states


def check(fed, expected):
    for name, tensor in fed.states.state.items():
        for k, state in enumerate(expected):
            torch.testing.assert_close(tensor[k], state[name], rtol=1e-9, atol=1e-11, msg=f"{name} of client {k}")


def sample_weights(states):
    return [[n / sum(SIZES) for n in SIZES]] * len(SIZES)


CASES = {
    "factorized-fl-alpha": lambda name: name in ("0.u", "2.u"),
    "factorized-fl-beta": lambda name: not name.startswith("4."),
    "factorized-fedavg": lambda name: not name.startswith("4."),
    "fedavg": lambda name: True,
    "stand-alone": lambda name: False,
}


def matching_settings(name, **settings):
    """τ in the middle of the cosines after one round, whatever the initialisation: it decides in the first mix."""
    fed = federation(ff.methods.make(name, **settings))
    fed.fit(1)
    cosines = fed.similarity()[*torch.triu_indices(len(SIZES), len(SIZES), 1)]
    return {"tau": cosines.sort().values[1:3].mean().item(), "epsilon": 20.0, "min_matches": 2}


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_against_the_papers_loop(name, rank):
    settings, l1 = {}, 0.0
    if name.startswith("factorized"):
        settings, l1 = {"rank": rank, "l1": 2e-3}, 2e-3
    matched = name in ("factorized-fl-alpha", "factorized-fl-beta")
    own = matching_settings(name, **settings) if matched else {}
    fed = federation(ff.methods.make(name, **settings, **own))
    start = {n: t.clone() for n, t in fed.states.state.items()}
    assert all((t == t[:1]).all() for t in start.values())
    fed.fit(3)
    zeros = []

    def matching(states):
        weights = matching_weights(states, **own)
        zeros.append(sum(w == 0 for row in weights for w in row))
        return weights

    check(fed, run(start, 3, matching if matched else sample_weights, CASES[name], l1))
    assert not matched or 0 < zeros[0] < 8


@pytest.mark.parametrize("after_mix", ["none", "support", "threshold"])
def test_mu_after_a_mix(after_mix):
    l1 = 4e-3
    rules = {
        "none": lambda mixed, own, name: mixed,
        "support": lambda mixed, own, name: mixed * (own != 0) if name.endswith("mu") else mixed,
        "threshold": lambda mixed, own, name: (
            torch.where(mixed.abs() < l1, 0.0, mixed) if name.endswith("mu") else mixed
        ),
    }
    fed = federation(ff.methods.FactorizedFedAvg(l1=l1, after_mix=after_mix))
    start = {n: t.clone() for n, t in fed.states.state.items()}
    fed.fit(3)
    check(fed, run(start, 3, sample_weights, CASES["factorized-fedavg"], l1, rules[after_mix]))
    own = (fed.states.state["0.mu"] != 0).sum()
    mixed = sum((model[0].mu != 0).sum() for model in fed.mixed())
    assert mixed > own if after_mix == "none" else mixed <= own if after_mix == "support" else mixed > 0


def test_alpha_moves_u_and_one_v_only():
    """Up: u of l ≤ L − 1 and v of L − 1; down: u; the classifier and v stay (eq. 5)."""
    fed = federation("factorized-fl-alpha")
    fed.fit(2)
    sent = {direction: set(fed.ledger.by_name(direction)) - {"(frame)"} for direction in ("up", "down")}
    assert sent == {"up": {"0.u", "2.u", "2.v"}, "down": {"0.u", "2.u"}}
    mixed = fed.mixed()
    for k, (one, other) in enumerate(zip(fed.models, mixed, strict=True)):
        changed = {n for (n, a), b in zip(one.named_parameters(), other.parameters(), strict=True) if not a.equal(b)}
        assert changed == {"0.u", "2.u"}, k


def test_how_factorized_models_start():
    """At random as the papers, μ zero; by default as the model itself."""
    dense = federation("fedavg").models[0]
    for key, tensor in ff.densify(federation("factorized-fl-alpha").models[0]).state_dict().items():
        torch.testing.assert_close(tensor, dense.state_dict()[key], rtol=1e-10, atol=1e-12)
    fed = federation(ff.methods.FactorizedFLAlpha(init="random"))
    assert {name.rpartition(".")[2] for name in fed.states.state} == {"u", "v", "mu", "bias"}
    assert all(t.abs().sum() == 0 for n, t in fed.states.state.items() if n.endswith("mu"))
    without = federation(ff.methods.FactorizedFLBeta(sparse=False))
    assert {name.rpartition(".")[2] for name in without.states.state} == {"u", "v", "bias"}
    assert without.fit(1)[0]["density"] is None


def test_a_client_that_missed_a_round_is_matched_by_the_v_it_has():
    own = matching_settings("factorized-fl-beta")
    fed = federation(ff.methods.FactorizedFLBeta(**own), participation=0.5)
    fed.fit(4)
    last = fed.reported.clients
    missed = next(k for k in range(4) if k not in last)
    group = [missed, *last]
    states = [{n: t[k] for n, t in fed.states.state.items()} for k in group]
    weights = matching_weights(states, **own)[0]
    mixed = dict(fed.mixed()[missed].named_parameters())
    for name in fed.states.state:
        expected = sum(w * s[name] for w, s in zip(weights, states, strict=True))
        expected = states[0][name] if name.startswith("4.") else expected
        torch.testing.assert_close(mixed[name].detach(), expected, rtol=1e-10, atol=1e-12)


class WithNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.body(x))))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("classifier", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_what_is_shared_is_said_for_classifier_norm_and_statistics(name, classifier, norm, statistics):
    policy = {"share_classifier": classifier, "share_norm": norm, "share_norm_statistics": statistics}
    fed = ff.Federation(lambda: WithNorm().double(), clients(), ff.methods.make(name, **policy))
    factors = {"u", "v", "mu", "bias"}
    weights = {
        "fedavg": {"weight", "bias"},
        "stand-alone": set(),
        "factorized-fl-alpha": {"u"},
        "factorized-fl-beta": factors,
        "factorized-fedavg": factors,
    }[name]
    expected = {f"body.{role}" for role in weights}
    if name != "stand-alone":
        expected |= {f"head.{role}" for role in weights} if classifier else set()
        expected |= {"norm.weight", "norm.bias"} if norm else set()
        expected |= (
            {f"norm.{s}" for s in ("running_mean", "running_var", "num_batches_tracked")} if statistics else set()
        )
    assert set(fed.shared) == expected
    defaults = ff.methods.make(name)
    on = name in ("fedavg", "stand-alone")
    assert (defaults.share_classifier, defaults.share_norm, defaults.share_norm_statistics) == (on, on, on)


@pytest.mark.parametrize("cohort", [1, 4])
def test_l1_at_evaluation_only(cohort):
    """What the official code does: training knows nothing of λ, accuracy and density leave out |μ| < λ."""
    fed = federation(ff.methods.FactorizedFLBeta(l1=0.05, l1_method="evaluation"), cohort=cohort)
    plain = federation(ff.methods.FactorizedFLBeta(l1=0.0), cohort=cohort)
    for one in (fed, plain):
        one.fit(2)
    assert all(torch.equal(tensor, plain.states.state[name]) for name, tensor in fed.states.state.items())
    numbers = {f"{layer}.mu": n for layer, n in zip(LAYERS, (48, 40, 15), strict=True)}
    rows, density = [row for row in fed.history if row["round"] == 2], fed.density()
    for k, (client, row) in enumerate(zip(clients(), rows, strict=True)):
        state = {name: tensor[k].clone() for name, tensor in fed.states.state.items()}
        left = {}
        for name, n in numbers.items():
            state[name][state[name].abs() < 0.05] = 0
            left[name] = state[name].count_nonzero().item()
            assert density[name.removesuffix(".mu")][k] == pytest.approx(left[name] / n)
        x, y = client.test
        assert row["accuracy"] == pytest.approx((forward(state, x).argmax(1) == y).double().mean().item())
        assert 0 < row["density"] < 0.95 and row["density"] == pytest.approx(sum(left.values()) / 103)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("factorized-fl-alpha", {"tau": 1.1}, r"factorized-fl-alpha\(tau=1.1\): must be between -1 and 1"),
        ("factorized-fl-beta", {"tau": -2}, r"tau=-2"),
        ("factorized-fl-beta", {"tau": math.nan}, r"tau=nan"),
        ("factorized-fl-alpha", {"epsilon": -1.0}, r"epsilon=-1.0"),
        ("factorized-fl-alpha", {"epsilon": math.inf}, r"epsilon=inf"),
        ("factorized-fl-alpha", {"min_matches": 0}, r"min_matches=0"),
        ("factorized-fl-alpha", {"l1": -1e-3}, r"l1=-0.001"),
        ("factorized-fl-alpha", {"l1_method": "x"}, r"l1_method='x'"),
        ("factorized-fl-alpha", {"layout": "diagonal"}, r"layout='diagonal'"),
        ("factorized-fl-alpha", {"rank": 0}, r"rank=0"),
        ("factorized-fl-alpha", {"init": "ones"}, r"init='ones'"),
        ("factorized-fl-beta", {"after_mix": "magic"}, r"after_mix='magic'.*none, support, threshold"),
        ("fedavg", {"tau": 0.5}, r"fedavg\(tau=0.5\): unknown setting, must be one of share_classifier"),
        ("fedmagic", {}, r"method='fedmagic': unknown, must be one of .*factorized-fedavg, factorized-fl-alpha"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make(name, **settings)


def test_a_model_without_v_before_the_classifier_is_an_error():
    with pytest.raises(
        ValueError, match=r"factorized-fl-alpha: the layer before the classifier \(layer 0 of 1\) has no v"
    ):
        ff.Federation(lambda: nn.Linear(6, 3).double(), clients(), "factorized-fl-alpha")


@pytest.mark.parametrize("name", ff.methods.names())
def test_settings_survive_json(name):
    import json

    method = ff.methods.make(name, l1=0.25)
    assert ff.methods.make(name, **json.loads(json.dumps(method.settings()))) == method
    assert type(method).__doc__ and method.paper
