"""SimFed, and the random and worst matching of SimFed and Factorized-FL."""

import math

import pytest
import torch
from paper_loop import EPOCHS, LR, MOMENTUM, SIZES, check, clients, features, federation, net, rows_of, train
from torch import nn

import fastfact as ff
from fastfact.federation.analysis import separation
from fastfact.federation.client.phase import Phase
from fastfact.federation.state import generator_for
from fastfact.methods.matching import MOMENTS


def factorized(state, layer):
    """eq. 5, transposed to [out, in]."""
    product = sum(torch.outer(v, u) for u, v in zip(state[f"{layer}.u"], state[f"{layer}.v"], strict=True))
    return product + state[f"{layer}.mu"] if f"{layer}.mu" in state else product


def dense(state, layer):
    return state[f"{layer}.weight"]


def cosines(vectors):
    """σ by its definition, in plain floats."""
    rows = [[float(x) for x in v] for v in vectors]
    norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
    dot = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in rows] for a in rows]
    return [[dot[i][j] / (norms[i] * norms[j]) for j in range(len(rows))] for i in range(len(rows))]


def encodings(states, weight, inputs=1):
    """z_k = E_k(x_N), eq. 2."""
    x = torch.randn(inputs, 6, generator=generator_for(0, 0, -1, "criteria"), dtype=torch.float64)
    return [features(state, x, weight, training=False).flatten() for state in states]


def reflect(states, names, sigma, tau, alpha):
    """Eq. 8 as the algorithm has it, term by term, over the set of eq. 3 (which has k itself in it)."""
    new = []
    for k, own in enumerate(states):
        matched = [j for j in range(len(states)) if j == k or sigma[k][j] >= tau]
        e = {j: math.exp(alpha * (1.0 if j == k else sigma[k][j])) for j in matched}
        total = sum(e.values())
        new.append({n: own[n] + sum(e[j] / total * (states[j][n] - own[n]) for j in matched) for n in names})
    for own, mixed in zip(states, new, strict=True):
        own.update(mixed)


def algorithm_1(states, data, rounds, weight, names, tau, alpha, l1, inputs=1):
    threshold = LR * l1 / (1 - MOMENTUM)
    for r in range(1, rounds + 1):
        if r > 1:
            reflect(states, names, cosines(encodings(states, weight, inputs)), tau, alpha)
        for k, state in enumerate(states):
            train(state, data[k].train, r, k, weight, [(EPOCHS, lambda n: True)], threshold)
    return states


TAU = 0.5
CASES = {
    "factorized": ({}, factorized),
    "rank 2": ({"rank": 2}, factorized),
    "no factorization": ({"factorized": False}, dense),
    "no masks": ({"sparse": False, "init": "random"}, factorized),
    "three inputs": ({"inputs": 3}, factorized),
}


@pytest.mark.parametrize("case", CASES)
def test_simfed_against_algorithm_1(case):
    settings, weight = CASES[case]
    fed = federation(ff.methods.SimFed(tau=TAU, alpha=5.0, l1=2e-3, **settings))
    states = rows_of(fed)
    fed.fit(3)
    names = [n for n in fed.infos if n.startswith(("first", "second"))]
    assert fed.shared == names
    inputs = settings.get("inputs", 1)
    expected = algorithm_1(states, fed.clients, 3, weight, names, TAU, 5.0, 2e-3, inputs)
    check(fed, expected)
    sigma = cosines(encodings(expected, weight, inputs))
    # τ decides something here: some are matched and some are not.
    matched = sum(sigma[i][j] >= TAU for i in range(4) for j in range(4) if i != j)
    assert 0 < matched < 12, sigma


def test_defaults_are_the_paper_s():
    method = ff.methods.SimFed()
    assert (method.tau, method.alpha, method.l1, method.layout, method.rank) == (0.9, 30, 1e-4, "kernel", 1)
    assert (method.share_classifier, method.share_norm, method.share_norm_statistics) == (False, False, False)


def test_the_key_is_sent_up_only():
    """z has as many numbers as the classifier has inputs; two criteria inputs make twice as many."""
    for inputs in (1, 2):
        fed = federation(ff.methods.SimFed(inputs=inputs))
        fed.fit(2)
        assert fed.ledger.by_name("up")["encoding"] == 4 * 2 * (7 + 8 * 5 * inputs)
        assert "encoding" not in fed.ledger.by_name("down")
        assert "encoding" not in fed.states.state


def test_simfed_on_images_shares_by_kernel_factors():
    """u [r, i, kh], v [r, o, kw] (eq. 6); the classifier's input is taken behind the pooling."""

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        ).double()

    fed = federation("simfed", model, clients((1, 6, 6)))
    shapes = {n: i.shape for n, i in fed.infos.items()}
    assert (shapes["0.u"], shapes["0.v"], shapes["0.mu"]) == ((1, 1, 3), (1, 4, 3), (4, 1, 3, 3))
    assert set(fed.shared) == {"0.u", "0.v", "0.mu", "0.bias"}
    fed.fit(2)
    assert fed.wire.infos["encoding"].shape == (4,)
    x = torch.randn(1, 1, 6, 6, generator=generator_for(0, 0, -1, "criteria"), dtype=torch.float64)
    for k, model in enumerate(fed.models):
        with torch.no_grad():
            torch.testing.assert_close(fed.exchange.keyed(fed.states.state)["encoding"][k], model[:5](x)[0])


def test_a_client_that_missed_a_round_is_matched_by_its_own_encoding():
    fed = federation(ff.methods.SimFed(tau=-1.0, alpha=2.0), participation=0.5)
    fed.fit(4)
    last = fed.reported.clients
    missed = next(k for k in range(4) if k not in last)
    states = [rows_of(fed)[k] for k in (missed, *last)]
    reflect(states, fed.shared, cosines(encodings(states, factorized)), -1.0, 2.0)
    mixed = dict(fed.mixed()[missed].named_parameters())
    for name in fed.shared:
        torch.testing.assert_close(mixed[name].detach(), states[0][name], rtol=1e-9, atol=1e-12)


def test_saved_and_loaded_without_the_clients(tmp_path):
    fed = federation("simfed")
    fed.fit(2, tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", model=net)
    for a, b in zip(fed.mixed(), again.mixed(), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_an_encoding_that_is_not_finite_leaves_the_client_out():
    class Broken(ff.methods.SimFed):
        def key(self, state, encoder):
            keys = super().key(state, encoder)
            if len(keys["encoding"]) > 1:
                keys["encoding"][2] = torch.inf
            return keys

    fed = federation(Broken())
    fed.fit(1)
    assert [row["left_out"] for row in fed.history] == [None, None, "encoding has NaN or inf", None]
    assert fed.reported.clients == [0, 1, 3]


@pytest.mark.parametrize("name", ["simfed", "factorized-fl-alpha", "factorized-fl-beta"])
@pytest.mark.parametrize("matching", ["random", "worst"])
@pytest.mark.parametrize("matches", [2, 5])
def test_random_and_worst_matching(name, matching, matches):
    """A plain mean of the client and the `matches` drawn or least similar others."""
    fed = federation(ff.methods.make(name, matching=matching, matches=matches))
    fed.fit(2)
    states = rows_of(fed)
    keys = encodings(states, factorized) if name == "simfed" else [s["second.v"].flatten() for s in states]
    sigma = cosines(keys)
    mixed = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in fed.mixed()]
    for k in range(4):
        others = [j for j in range(4) if j != k]
        if matching == "worst":
            chosen = sorted(others, key=lambda j: sigma[k][j])[:matches]
        else:
            draw = torch.rand(4, generator=generator_for(5, 2, k, "matching"), dtype=torch.float64)
            chosen = sorted(others, key=lambda j: -float(draw[j]))[:matches]
        for n in fed.infos:
            want = states[k][n]
            if n in fed.shared:
                want = (want + sum(states[j][n] for j in chosen)) / (1 + len(chosen))
            torch.testing.assert_close(mixed[k][n].detach(), want, rtol=1e-10, atol=1e-12)


def test_random_matching_draws_anew_each_round():
    fed = federation(ff.methods.FactorizedFLBeta(matching="random", matches=1))
    chosen = []
    for _ in range(6):
        fed.fit(1)
        uploads = fed.uploads()
        chosen.append(tuple((fed.method.weights(uploads) > 0).flatten().tolist()))
    assert len(set(chosen)) > 2
    assert all(sum(row) == 8 for row in chosen)


GROUPS = [0, 1, 0, 1, 0, 1, 0, 1, 1, 0]
"""Which half of ten clients sees the samples as they are, and which their negatives, brighter."""


def domains(first=0, count=10):
    g, made = torch.Generator().manual_seed(3), []
    for group in GROUPS[first : first + count]:
        x = torch.randn(30, 6, generator=g, dtype=torch.float64)
        y = torch.randint(3, (30,), generator=g)
        x = x if group == 0 else 6 - 2 * x
        made.append(ff.Client(train=(x[:24], y[:24]), test=(x[24:], y[24:])))
    return made


@pytest.mark.parametrize(
    "method",
    [
        ff.methods.FactorizedFLAlpha(match_on="inputs"),
        ff.methods.FactorizedFLBeta(match_on="inputs", init="svd"),
        ff.methods.SimFed(match_on="inputs", factorized=False),
    ],
    ids=lambda method: method.name,
)
def test_by_their_inputs_a_group_downloads_its_fedavg(method):
    fed = federation(method, data=domains(), participation=0.8)
    assert fed.key_names == ["norm.running_mean", "norm.running_var"]
    for _ in range(2):
        fed.fit(1)
        uploads = fed.uploads()
        own = torch.tensor([GROUPS[k] for k in uploads.clients])
        samples = torch.tensor(uploads.samples, dtype=torch.float64)
        expected = (own[:, None] == own) * samples
        expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(fed.method.weights(uploads).double(), expected)
        mixed = fed.method.mix(uploads, fed.shared)
        for name in fed.shared:
            each = uploads.state[name].double()
            want = torch.einsum("ki,i...->k...", expected, each)
            torch.testing.assert_close(mixed[name].double(), want, rtol=1e-6, atol=1e-8)


def test_by_their_inputs_a_guest_joins_its_group():
    fed = federation(ff.methods.FactorizedFLBeta(match_on="inputs"), data=domains(0, 8))
    fed.fit(2)
    states = fed.states.load(range(8))
    guests = fed.exchange.sent({name: tensor[:2] for name, tensor in states.items()})[0]
    uploads = fed.uploads()
    visit = type(uploads)(2, [8, 9], [24, 24], [0.0, 0.0], state=guests, keys=fed.key_names, seed=0)
    weights = fed.method.weights(uploads, visit)
    assert weights.shape == (2, 9)
    for row, guest in zip(weights, (0, 1), strict=True):
        assert [bool(w > 0) for w in row[1:]] == [GROUPS[k] == GROUPS[guest] for k in range(8)]


def test_matching_on_inputs_needs_running_statistics_and_no_sketch():
    plain = lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()  # noqa: E731
    with pytest.raises(ValueError, match=r"match_on='inputs'\): the model has no normalisation layer with running"):
        federation(ff.methods.SimFed(match_on="inputs"), model=plain)
    with pytest.raises(ValueError, match=r"sketch=8\): must be 0 with match_on='inputs'"):
        ff.methods.FactorizedFLBeta(match_on="inputs", sketch=8)
    with pytest.raises(ValueError, match=r"match_on='x'\): must be one of v, encoding, inputs, initial-statistics"):
        ff.methods.FactorizedFLBeta(match_on="x")


def by_moments(name="factorized-fl-beta", data=None, **options):
    options = {"cohort": 1, "epochs": 1} | options
    return federation(ff.methods.make(name, match_on=MOMENTS), data=domains() if data is None else data, **options)


def moments_by_hand(fed, client):
    """What the norm of `Net` gets to see at the initial model: means, then deviations, in plain floats."""
    start = {name: tensor[0] for name, tensor in fed.initial.items()}
    weight = factorized(start, "first") if "first.u" in start else start["first.weight"]
    rows = (client.train[0] @ weight.T + start["first.bias"]).T.tolist()
    means = [sum(row) / len(row) for row in rows]
    return [
        means,
        [math.sqrt(sum((x - m) ** 2 for x in row) / len(row)) for row, m in zip(rows, means, strict=True)],
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("factorized-fl-alpha", {}),
        ("factorized-fl-beta", {"wire": "int8"}),
        ("factorized-fl-beta", {"store_values": "bfloat16", "cohort": 4}),
        ("simfed", {"cohort": "threads"}),
    ],
)
def test_statistics_of_the_initial_network_tell_groups_apart(name, options):
    """Hand-made groups are found, with half of the clients in a round, of all clients that have been there; each
    measures once, in its first round, and the key is what a loop gives."""
    fed = by_moments(name, participation=0.5, **options)
    assert fed.key_names == [MOMENTS] and MOMENTS not in fed.uploaded
    message = len(fed.wire.encode({MOMENTS: torch.zeros(2, 8)}))
    there: set[int] = set()
    for r in range(1, 5):
        new = set(fed.select(r)) - there
        there |= new
        fed.fit(1)
        first = [entry for entry in fed.ledger.entries if entry.round == r and MOMENTS in entry.sizes.bytes]
        sizes = [sum(size[row] for size in entry.sizes.bytes.values()) for entry in first for row in range(len(new))]
        assert [entry.clients for entry in first] == ([sorted(new)] if new else [])
        assert sizes == [message] * len(new) and all(entry.direction == "up" for entry in first)
        uploads = fed.uploads()
        own = torch.tensor([GROUPS[k] for k in uploads.clients])
        expected = (own[:, None] == own) * torch.tensor(uploads.samples, dtype=torch.float64)
        torch.testing.assert_close(fed.method.weights(uploads), expected / expected.sum(1, keepdim=True))
    assert len(there) > 6
    keys = fed.states.load(sorted(there))[MOMENTS]
    wanted = torch.tensor([moments_by_hand(fed, fed.clients[k]) for k in sorted(there)])
    torch.testing.assert_close(keys, wanted, rtol=1e-5, atol=1e-6)
    similarity = fed.method.similarity(keys.flatten(1))
    assert separation(similarity, [GROUPS[k] for k in sorted(there)]) == {"auc": 1.0, "nearest": 1.0}
    absent = sorted(set(range(10)) - there)
    assert fed.states.load(absent)[MOMENTS].isnan().all() if absent else True


def test_the_server_knows_clients_apart_by_those_that_it_has_seen_before():
    """Of two clients alone nobody could say whether they are near each other; so two of different groups are not mixed
    once others of both have come."""
    fed, apart = by_moments(participation=0.2), 0
    for _ in range(9):
        fed.fit(1)
        one, other = fed.reported.clients
        seen = {k for r in range(1, fed.round + 1) for k in fed.select(r)}
        if GROUPS[one] != GROUPS[other] and all([GROUPS[k] for k in seen].count(g) > 2 for g in (0, 1)):
            apart += 1
            torch.testing.assert_close(fed.method.weights(fed.uploads()), torch.eye(2, dtype=torch.float64))
    assert apart


def test_a_client_that_comes_late_downloads_the_fedavg_of_its_group():
    fed = by_moments(participation=0.5)
    fed.fit(1)
    r = next(r for r in range(2, 9) if set(fed.select(r)) - set(fed.select(1)))
    assert r == 2
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    late = [k for k in fed.select(2) if k not in fed.select(1)]
    reported = fed.reported.clients
    mixed = fed.mixed()
    for k in late:
        near = [i for i in reported if GROUPS[i] == GROUPS[k]]
        model = dict(mixed[k].named_parameters())
        for name in fed.shared:
            want = before[name][near].mean(0) if near else before[name][k]
            torch.testing.assert_close(model[name].detach(), want, rtol=1e-9, atol=1e-12)
    # Looking does not count as having come.
    assert fed.states.load(late)[MOMENTS].isnan().all()


def test_newcomers_get_the_neighbours_of_their_group():
    fed = by_moments(data=domains(0, 8))
    fed.fit(2)
    new = domains()[8:]
    found = fed.join(new, "download")
    states = fed.states.state
    for model, group in zip(found.models, GROUPS[8:], strict=True):
        near = [k for k in range(8) if GROUPS[k] == group]
        for name in fed.shared:
            torch.testing.assert_close(
                dict(model.named_parameters())[name].detach(), states[name][near].mean(0), rtol=1e-9, atol=1e-12
            )
    assert found.bytes_up == [len(fed.wire.encode({MOMENTS: torch.zeros(2, 8)}))] * 2


@pytest.mark.parametrize("options", [{}, {"store": "clients"}], ids=["memory", "store"])
def test_a_resumed_run_matches_as_one_that_was_not_interrupted(tmp_path, options):
    if "store" in options:
        options = {"store": str(tmp_path / "clients")}
    whole = by_moments(participation=0.5)
    whole.fit(4)
    fed = by_moments(participation=0.5, **options)
    fed.fit(2, out=tmp_path / "run")
    if options:
        fed.states.close()
    again = ff.Federation.load(tmp_path / "run", net, domains())
    again.fit(2)
    for name, tensor in whole.states.load(range(10)).items():
        assert torch.equal(tensor.nan_to_num(-7), again.states.load(range(10))[name].nan_to_num(-7)), name
    assert again.ledger.rows() == whole.ledger.rows()
    if options:
        again.states.close()


def test_cohorts_measure_what_a_loop_measures():
    one, many = by_moments(participation=0.5), by_moments(participation=0.5, cohort=3)
    for fed in (one, many):
        fed.fit(3)
    assert torch.equal(*(fed.states.load([*one.select(1)])[MOMENTS] for fed in (one, many)))
    assert one.ledger.rows() == many.ledger.rows()
    for name, tensor in one.states.state.items():
        torch.testing.assert_close(many.states.state[name], tensor, rtol=1e-7, atol=1e-9, equal_nan=True)


def test_a_client_that_is_left_out_has_measured():
    data = domains()

    class Breaks(ff.methods.FactorizedFLBeta):
        def phases(self, epochs):
            def loss(net, x, y):
                value = net.loss(x, y)
                return value + value * torch.where((x == broken).all(), torch.nan, 0.0)

            return [Phase(epochs, loss=loss)]

    broken = data[3].train[0][:1]
    fed = federation(Breaks(match_on=MOMENTS), data=[*data[:3], repeated(data[3]), *data[4:]], cohort=1)
    fed.fit(2)
    assert [row["client"] for row in fed.history if row["left_out"]] == [3, 3]
    assert [entry.clients for entry in fed.ledger.entries if MOMENTS in entry.sizes.bytes] == [list(range(10))]
    for name, tensor in fed.states.load([3]).items():
        assert torch.equal(tensor, fed.initial[name]) == (name != MOMENTS)


def repeated(client):
    """A client of its first sample alone, many times."""
    x, y = client.train
    return ff.Client(train=(x[:1].expand_as(x).clone(), y), test=client.test)


def test_groups_keep_to_max_weight_and_unknown_clients_to_themselves():
    fed = federation(ff.methods.FactorizedFLBeta(match_on=MOMENTS, max_weight=0.1), data=domains(), cohort=1)
    fed.fit(1)
    weights = fed.method.weights(fed.uploads())
    for k, row in enumerate(weights):
        others = [i for i in range(10) if GROUPS[i] == GROUPS[k] and i != k]
        assert row[others].tolist() == pytest.approx([0.1] * len(others))
        assert float(row[k]) == pytest.approx(1 - 0.1 * len(others))
    uploads = fed.uploads()
    unknown = {name: tensor[:1].clone() for name, tensor in uploads.state.items()}
    unknown[MOMENTS][:] = torch.nan
    visit = type(uploads)(2, [99], [24], [0.0], state=unknown, keys=fed.key_names, seed=0)
    assert fed.method.weights(uploads, visit).tolist() == [[1.0] + [0.0] * 10]


def test_matching_on_statistics_needs_a_normalisation_layer_and_no_sketch():
    plain = lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()  # noqa: E731
    message = r"match_on='initial-statistics'\): must be v or encoding for a model without a normalisation layer"
    with pytest.raises(ValueError, match=message):
        federation(ff.methods.SimFed(match_on=MOMENTS), model=plain)
    with pytest.raises(ValueError, match=r"sketch=8\): must be 0 with match_on='initial-statistics'"):
        ff.methods.FactorizedFLBeta(match_on=MOMENTS, sketch=8)


def test_statistics_of_a_model_whose_normalisation_is_frozen():
    """Under adapters the normalisation layers are no part of a client's state."""

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3)).double()

    fed = federation(ff.methods.MatchedLoRA(match_on=MOMENTS, rank=2), model=model, data=domains(), cohort=1)
    fed.fit(1)
    own = torch.tensor(GROUPS)
    assert torch.equal(fed.mixing_matrix() > 0, own[:, None] == own)


@pytest.mark.parametrize(("method", "key"), [("FactorizedFLBeta", "encoding"), ("SimFed", "v")])
def test_either_family_can_match_on_the_key_of_the_other(method, key):
    fed = federation(getattr(ff.methods, method)(match_on=key))
    fed.fit(1)
    assert fed.key_names == ["encoding" if key == "encoding" else "second.v"]
    torch.testing.assert_close(fed.method.weights(fed.uploads()).sum(1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("simfed", {"tau": 2.0}, r"simfed\(tau=2.0\): must be between -1 and 1"),
        ("simfed", {"alpha": -1.0}, r"alpha=-1.0"),
        ("simfed", {"inputs": 0}, r"inputs=0"),
        ("simfed", {"matching": "good"}, r"matching='good'.*best, random, worst"),
        ("factorized-fl-alpha", {"matches": 0}, r"matches=0"),
        ("simfed", {"layout": "x"}, r"layout='x'"),
        ("simfed", {"init": "zero"}, r"init='zero'"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make(name, **settings)


def test_the_criteria_of_tokens_are_drawn_from_the_vocabulary():
    tokens = torch.arange(12).view(6, 2) % 5
    data = [ff.Client(train=(tokens, torch.arange(6) % 3), test=(tokens, torch.arange(6) % 3)) for _ in range(2)]

    def model():
        return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3)).double()

    fed = federation(ff.methods.SimFed(inputs=3), model, data)
    fed.fit(1)
    x = torch.randint(5, (3, 2), generator=generator_for(0, 0, -1, "criteria"))
    wanted = torch.stack([table[x].flatten() for table in fed.states.state["0.weight"]])
    key = fed.method.key(fed.states.state, fed.exchange.encoder)["encoding"]
    torch.testing.assert_close(key, wanted)
    with pytest.raises(ValueError, match=r"simfed: x is torch\.int64 and the model has no embedding"):
        federation("simfed", lambda: Counts().double(), data)


class Counts(nn.Module):
    """A model of tokens without an embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize(
    "options", [{"layout": "kernel"}, {"rank": 3}, {"sparse": False}, {"rank": 2, "layout": "view"}]
)
@pytest.mark.parametrize("name", ["factorized-fl-alpha", "factorized-fl-beta", "factorized-fedavg"])
def test_factorized_fl_s_ablations_on_convolutions(name, options):
    """Eq. 5 on u (and v, μ) of each layout and rank, with v of layer L − 1 as the key."""

    def model():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        ).double()

    matching = {} if name == "factorized-fedavg" else {"tau": 0.2, "epsilon": 3.0}
    fed = federation(ff.methods.make(name, **matching, **options), model, clients((1, 6, 6)))
    fed.fit(2)
    states = rows_of(fed)
    assert ("2.mu" in states[0]) == options.get("sparse", True)
    rank = options.get("rank", 1)
    kernel = options.get("layout") == "kernel"
    assert states[0]["2.u"].shape == ((rank, 4, 3) if kernel else (rank, 3, 3))
    assert states[0]["2.v"].shape == ((rank, 3, 3) if kernel else (rank, 3, 4))
    sigma = cosines([state["2.v"].flatten() for state in states])
    mixed = [dict(model.named_parameters()) for model in fed.mixed()]
    for k, own in enumerate(states):
        e = [math.exp(3 * (1.0 if i == k else s)) if i == k or s >= 0.2 else 0.0 for i, s in enumerate(sigma[k])]
        weights = [n / sum(SIZES) for n in SIZES] if not matching else [value / sum(e) for value in e]
        for n in own:
            shared = n in ("0.u", "2.u") if name == "factorized-fl-alpha" else not n.startswith("5.")
            want = sum(w * state[n] for w, state in zip(weights, states, strict=True)) if shared else own[n]
            torch.testing.assert_close(mixed[k][n].detach(), want, rtol=1e-10, atol=1e-12, msg=n)
