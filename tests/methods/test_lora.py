"""The methods of low-rank fine-tuning against float64 loops written from the papers' pseudo-code."""

import math

import pytest
import torch
import torch.nn.functional as F
from baseline_loop import EPOCHS, SEED, SIZES, TOTAL, average, check, clients, federation, give, mlp, rows_of, train
from torch import nn

import fastfact as ff
from fastfact.federation.server.strategy import Uploads
from fastfact.federation.state import generator_for

LAYERS, SCALING = ("0.", "2.", "4."), 1.5


def adapted(rank=2, **options):
    return ff.factorize(mlp(), ff.LowRank(rank=rank, scaling=SCALING), freeze=True, **options)


def shifted(rank=2, **options):
    """With a B that is not zero, so that A has a gradient from the start."""
    model, g = adapted(rank, **options), torch.Generator().manual_seed(7)
    for layer in ff.factorized_layers(model).values():
        with torch.no_grad():
            layer.B.copy_(0.3 * torch.randn(layer.B.shape, generator=g))
    return model


def frozen_of(fed):
    return {name: p.detach().clone() for name, p in fed.template.named_parameters()}


def loss_of(fed, frozen=None):
    """Cross-entropy of the network of `mlp`, written out: W = σ + s · B A in each layer."""
    frozen = frozen_of(fed) if frozen is None else frozen

    def loss(state, x, y):
        every = {**frozen, **state}
        for layer in LAYERS:
            weight = every[f"{layer}sigma"] + SCALING * every[f"{layer}B"] @ every[f"{layer}A"]
            x = x @ weight.T + every[f"{layer}bias"]
            x = F.relu(x) if layer != LAYERS[-1] else x
        return F.cross_entropy(x, y)

    return loss


def local(fed, states, round, loss=None, trains=lambda name: name[2:] in ("A", "B")):
    for k, (state, client) in enumerate(zip(states, clients(), strict=True)):
        model = nn.ParameterDict({name.replace(".", "/"): tensor for name, tensor in state.items()})
        own = {name.replace(".", "/"): tensor for name, tensor in state.items()}
        written = loss[k] if isinstance(loss, list) else loss or loss_of(fed)

        def value(some, x, y, written=written):
            return written({name.replace("/", "."): tensor for name, tensor in some.items()}, x, y)

        phases = [(EPOCHS, lambda name: trains(name.replace("/", ".")))]
        train(model, own, client.train, round, k, phases, value)
        state.update({name.replace("/", "."): tensor for name, tensor in own.items()})


def run(fed, mix, rounds=3):
    """The loop: in each round but the first the uploads of the last are mixed, then everybody trains."""
    states = rows_of(fed)
    # Before the first round nobody has a state of its own.
    states = [{name: tensor[0].clone() for name, tensor in fed.initial.items()} for _ in states]
    for round in range(1, rounds + 1):
        if round > 1:
            mix(states, round)
        local(fed, states, round)
    fed.fit(rounds)
    check(fed, states)


def names(state, role):
    return [name for name in state if name.endswith(role)]


def test_fedit_averages_a_and_b():
    fed = federation("fedit", shifted)

    def mix(states, round):
        give(states, {name: average(states, name) for name in states[0]})

    run(fed, mix)
    assert set(fed.shared) == {f"{layer}{factor}" for layer in LAYERS for factor in "AB"}


def test_ffa_lora_freezes_a():
    fed = federation("ffa-lora", shifted)
    assert set(fed.initial) == {f"{layer}B" for layer in LAYERS}
    a = {name: p.clone() for name, p in fed.template.named_parameters() if name.endswith("A")}

    def mix(states, round):
        give(states, {name: average(states, name) for name in states[0]})

    run(fed, mix)
    assert all(torch.equal(p, dict(fed.template.named_parameters())[name]) for name, p in a.items())


def test_fedsa_lora_shares_a_and_keeps_b():
    fed = federation("fedsa-lora", shifted)

    def mix(states, round):
        give(states, {name: average(states, name) for name in names(states[0], "A")})

    run(fed, mix)
    assert set(fed.ledger.by_name("up")) - {"(frame)"} == set(names(fed.initial, "A"))


def test_stand_alone_shares_nothing():
    fed = federation("stand-alone-lora", shifted)
    run(fed, lambda states, round: None)
    assert fed.ledger.up == fed.ledger.down == 0


def test_matched_lora_mixes_a_by_the_similarity_of_a():
    epsilon, tau = 3.0, 0.2
    fed = federation(ff.methods.make("matched-lora", epsilon=epsilon, tau=tau, share_classifier=True), shifted)

    def mix(states, round):
        keys = torch.stack([state["2.A"].flatten() for state in states])
        keys = keys / keys.norm(dim=1, keepdim=True)
        sigma = (keys @ keys.T).fill_diagonal_(1)
        weights = torch.where(sigma >= tau, torch.exp(epsilon * sigma), 0.0)
        weights = weights / weights.sum(1, keepdim=True)
        for name in names(states[0], "A"):
            mixed = torch.einsum("ki,i...->k...", weights, torch.stack([state[name] for state in states]))
            for state, tensor in zip(states, mixed, strict=True):
                state[name] = tensor

    run(fed, mix)


@pytest.mark.parametrize("mixed", ["A", "both"])
def test_matched_lora_shares_what_it_says(mixed):
    fed = federation(ff.methods.make("matched-lora", mixed=mixed), shifted)
    assert set(fed.shared) == {
        f"{layer}{factor}" for layer in LAYERS[:2] for factor in ("AB" if mixed == "both" else "A")
    }
    assert fed.key_names == ["2.A"]


RANKS = [1, 3]


def cut(state, rank):
    """The first `rank` of each layer stay, the rest are zeros."""
    for layer in LAYERS:
        a, b = state[f"{layer}A"], state[f"{layer}B"]
        state[f"{layer}A"] = torch.cat([a[:rank], torch.zeros_like(a[rank:])])
        state[f"{layer}B"] = torch.cat([b[:, :rank], torch.zeros_like(b[:, rank:])], 1)


def average_by_norm(states):
    """Everybody gets the mean, each weighed by ‖B A‖ over all of its layers."""
    norms = [
        math.sqrt(sum(float((s[f"{layer}B"] @ s[f"{layer}A"]).square().sum()) for layer in LAYERS)) for s in states
    ]
    give(states, {name: average(states, name, norms) for name in states[0]})


def test_hetlora_truncates_and_weighs_by_the_norm_of_the_product():
    fed = federation(ff.methods.make("hetlora", ranks=RANKS, scaling=SCALING), lambda: shifted(3))

    states = [{name: tensor[0].clone() for name, tensor in fed.initial.items()} for _ in SIZES]
    for round in range(1, 4):
        if round > 1:
            average_by_norm(states)
        for k, state in enumerate(states):
            cut(state, RANKS[k % len(RANKS)])
        local(fed, states, round)
    fed.fit(3)
    check(fed, states)
    for name in names(fed.initial, "A"):
        assert not fed.states.state[name][0, 1:].any() and fed.states.state[name][1].all()


@pytest.mark.parametrize("cohort", [1, 2])
def test_hetlora_prunes_ranks_that_training_made_smaller(cohort):
    λ, γ, given = 0.7, 0.6, [1, 5]
    made = ff.methods.make("hetlora", ranks=given, scaling=SCALING, pruning=λ, decay=γ)
    fed = federation(made, lambda: shifted(5), cohort=cohort)
    ranks, history = [given[k % 2] for k in range(len(SIZES))], []

    def tail(state, rank):
        kept = max(1, math.floor(γ * rank))
        pairs = [(state[f"{layer}B"][:, kept:rank], state[f"{layer}A"][kept:rank]) for layer in LAYERS]
        return sum(b.norm() * a.norm() for b, a in pairs)

    plain = loss_of(fed)
    states = [{name: tensor[0].clone() for name, tensor in fed.initial.items()} for _ in SIZES]
    for round in range(1, 5):
        if round > 1:
            average_by_norm(states)
        for state, rank in zip(states, ranks, strict=True):
            cut(state, rank)
        before = [tail(state, rank) for state, rank in zip(states, ranks, strict=True)]
        local(fed, states, round, [lambda s, x, y, r=rank: plain(s, x, y) + λ * tail(s, r) for rank in ranks])
        for k, state in enumerate(states):
            if tail(state, ranks[k]) < before[k]:
                ranks[k] = max(1, math.floor(γ * ranks[k]))
                cut(state, ranks[k])
        history.append(list(ranks))
    fed.fit(4)
    check(fed, states)
    # Some of rank 5 go to 3, 1 and stay there; those of rank 1 have nothing to drop.
    assert min(history[-1][1::2]) < 5 and set(history[-1][0::2]) == {1}
    assert len(fed.join(clients(), how="fine-tune", epochs=1).accuracy) == len(SIZES)


def test_a_client_that_missed_rounds_keeps_the_rank_it_pruned_to():
    made = ff.methods.make("hetlora", ranks=[4], pruning=5.0, decay=0.5)
    fed = federation(made, lambda: shifted(4), participation=0.5)
    fed.fit(8)
    uploads = fed.uploads()
    fed.method.mix(uploads, fed.shared)
    ranks = uploads.server_state["ranks"].tolist()
    assert ranks == [int((row != 0).any(1).sum()) for row in fed.states.state["2.A"]] and max(ranks) < 4


def test_hetlora_keeps_the_ranks_that_no_reporter_has():
    fed = federation(ff.methods.make("hetlora", ranks=RANKS, scaling=SCALING), lambda: shifted(3), participation=0.5)
    known = {name: tensor[0].clone() for name, tensor in fed.initial.items()}
    states, last, most = [dict(known) for _ in SIZES], [], []
    for round in range(1, 9):
        if last:
            mixed = [dict(states[k]) for k in last]
            average_by_norm(mixed)
            most.append(rank := max(RANKS[k % 2] for k in last))
            for name, tensor in mixed[0].items():
                axis = 0 if name.endswith("A") else 1
                ends = tensor.narrow(axis, 0, rank), known[name].narrow(axis, rank, 3 - rank)
                known[name] = torch.cat(ends, axis)
        last, work = fed.select(round), [dict(known) for _ in SIZES]
        for k, state in enumerate(work):
            cut(state, RANKS[k % 2])
        local(fed, work, round)
        for k in last:
            states[k] = work[k]
    fed.fit(8)
    check(fed, states)
    assert 1 in most and 3 in most[most.index(1) :]


def test_hetlora_takes_no_rank_from_those_that_did_not_prune():
    """One client a round, all for the first time: B is zero in ranks that nobody has trained, none is dropped."""
    fed = federation(ff.methods.make("hetlora", ranks=RANKS, pruning=0.1), lambda: adapted(3), participation=0.25)
    seen = []
    while len(seen) < len(SIZES):
        fed.fit(1)
        (k,) = fed.reported.clients
        if k not in seen and (RANKS[k % 2] == 1 or 3 not in [RANKS[j % 2] for j in seen]):
            assert (fed.states.state["2.A"][k] != 0).any(1).sum() == RANKS[k % 2]
        seen += [k] if k not in seen else []


def test_robust_rules_give_each_rank_by_those_who_have_it():
    """As the mean of factors padded with zeros where nothing is trimmed."""

    def mixed(**how):
        made = ff.methods.make("hetlora", ranks=[1, 1, 1, 1, 3])
        fed = federation(made, lambda: shifted(3), clients((9, 6, 12, 7, 8)), **how)
        fed.fit(2)
        return [fed.mixed()[k].state_dict() for k in (0, 4)]

    for state, other in zip(mixed(rule="trimmed-mean", hostile=0.0), mixed(), strict=True):
        for name in names(state, "A") + names(state, "B"):
            torch.testing.assert_close(state[name], other[name], rtol=1e-8, atol=1e-10)
    for rule in ("median", "trimmed-mean", "multi-krum"):
        _, state = mixed(rule=rule)
        assert all((state[name] != 0).any(1).all() for name in names(state, "A")), rule


@pytest.mark.parametrize("pruning", [0.0, 0.7])
def test_hetlora_has_ranks_of_what_travels(pruning):
    """A classifier that stays with the client has the largest rank, whenever the client came first."""
    made = ff.methods.make("hetlora", ranks=[1, 3], pruning=pruning, decay=0.5, share_classifier=False)
    fed = federation(made, lambda: shifted(3), participation=0.5)
    fed.fit(5)
    assert {row["client"] for row in fed.history} == set(range(len(SIZES)))
    for k, (a, own) in enumerate(zip(fed.states.state["2.A"], fed.states.state["4.A"], strict=True)):
        assert (a != 0).any(1).sum() <= [1, 3][k % 2] and (own != 0).any(1).all()


def test_hetlora_prunes_adapters_that_are_shared():
    made = ff.methods.make("hetlora", pruning=0.1, share_classifier=False, skip=["0", "2"], train=["0"])
    with pytest.raises(ValueError, match=r"pruning=0\.1\): must be 0 where no adapter is shared"):
        federation(made)


def test_hetlora_sends_no_zeros():
    fed = federation(ff.methods.make("hetlora", ranks=[2, 8]), lambda: shifted(8).float())
    fed.fit(2)
    for direction in ("up", "down"):
        sent = fed.ledger.by_client(direction)
        assert sent[0] < 0.5 * sent[1]


def test_flora_stacks_and_loses_nothing():
    fed = federation("flora", shifted)
    sizes = {layer: fed.initial[f"{layer}sigma"][0].shape for layer in LAYERS}

    def mix(states, round):
        deltas = {
            layer: sum(n / TOTAL * s[f"{layer}B"] @ s[f"{layer}A"] for n, s in zip(SIZES, states, strict=True))
            for layer in LAYERS
        }
        for layer, size in sizes.items():
            columns = size[1]
            generator = generator_for(SEED, round - 1, -1, f"flora/{layer}")
            new = torch.randn(2, columns, generator=generator, dtype=torch.float64) / math.sqrt(3 * columns)
            for state in states:
                state[f"{layer}sigma"] = state[f"{layer}sigma"] + SCALING * deltas[layer]
                state[f"{layer}A"], state[f"{layer}B"] = new.clone(), torch.zeros_like(state[f"{layer}B"])

    run(fed, mix)
    # Everybody is sent what everybody uploaded, and a new A.
    numbers = {
        name: sum(e.sizes.numbers[name][0] for e in fed.ledger.entries if e.direction == "down") for name in fed.shared
    }
    assert numbers["0.A"] == (1 + 2 * (len(SIZES) + 1)) * 2 * 6


@pytest.mark.parametrize("options", [{"participation": 0.5}, {"max_norm": "1.1x"}])
def test_clients_of_flora_that_missed_rounds_catch_up(options):
    """At every moment σ of a client that has just downloaded is the initial one and the sum of all stacks: of one that
    was absent, and of one that trained and was not mixed."""
    fed = federation(ff.methods.make("flora", rank=2), **options)
    initial = {name: tensor[0].clone() for name, tensor in fed.initial.items()}
    for _ in range(6):
        fed.fit(1)
        state, total = fed.states.load(range(len(fed))), fed.server_state
        here = {name: tensor.clone() for name, tensor in state.items()}
        fed._deliver_next(here)
        uploads = fed.uploads()
        fed.method.mix(uploads, fed.shared)
        for layer in LAYERS:
            wanted = initial[f"{layer}sigma"] + uploads.server_state[f"total/{layer}"]
            torch.testing.assert_close(here[f"{layer}sigma"], wanted.expand_as(here[f"{layer}sigma"]))
        assert total == fed.server_state
    assert len({name.split("/")[1] for name in fed.server_state if name.startswith("stack/")}) <= 6
    assert any(row["left_out"] for row in fed.history) == ("max_norm" in options)
    last = {row["client"] for row in fed.history.last() if row["left_out"]}
    assert set(Uploads(**fed.reported.report()).left_out) == last


def test_stacks_take_no_mean_and_miss_nobody():
    with pytest.raises(ValueError, match=r"rule='median'\): flora stacks what its clients upload"):
        federation("flora", shifted, rule="median")
    with pytest.raises(ValueError, match=r"buffer=2\): flora sends what each round adds"):
        federation("flora", shifted, participation=0.5, buffer=2, speed=1.0)


@pytest.mark.parametrize("name", ["fedit", "ffa-lora", "fedsa-lora", "flora", "hetlora", "matched-lora"])
def test_pages_put_adapters_where_there_are_none(name):
    settings = {"dropout": 0.2, "train": ["4"], "skip": ["0"]} | ({} if name == "hetlora" else {"rank": 3})
    fed = federation(ff.methods.make(name, **settings))
    layer = fed.template[2]
    assert layer.spec.dropout == 0.2 and layer.spec.rank == (8 if name == "hetlora" else 3)
    assert type(fed.template[0]) is nn.Linear and not fed.template[0].weight.requires_grad
    assert fed.template[4].weight.requires_grad and ("4.weight" in fed.shared) == (name != "matched-lora")
    fed.fit(2)


def test_convolutions_have_adapters_too():
    def cnn():
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)]
        return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), *layers).double()

    for name in ("flora", "hetlora", "fedit"):
        one, other = (federation(name, cnn, participation=0.5, cohort=cohort) for cohort in (1, 2))
        one.fit(4)
        other.fit(4)
        check(one, rows_of(other))
        assert len(one.join(clients(), how="fine-tune", epochs=1).accuracy) == len(SIZES)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"method": "fedit", "rank": 0}, "rank=0"),
        ({"method": "fedit", "dropout": 1.0}, r"dropout=1\.0"),
        ({"method": "fedit", "train": "head"}, "train='head'.*list of patterns"),
        ({"method": "hetlora", "ranks": []}, r"ranks=\[\]"),
        ({"method": "hetlora", "pruning": -1.0}, r"pruning=-1\.0"),
        ({"method": "hetlora", "decay": 1.0}, r"decay=1\.0"),
        ({"method": "hetlora", "ranks": [0, 2]}, r"ranks=\[0, 2\]"),
        ({"method": "matched-lora", "mixed": "B"}, "mixed='B'"),
        ({"method": "matched-lora", "epsilon": -1.0}, r"epsilon=-1\.0"),
    ],
)
def test_settings_out_of_range(settings, error):
    with pytest.raises(ValueError, match=error):
        ff.methods.make(settings.pop("method"), **settings)


def test_a_model_without_adapters_is_refused():
    with pytest.raises(ValueError, match="the model has no adapters"):
        federation("fedit", lambda: ff.factorize(mlp(), ff.Rank1(), init="svd"))
    with pytest.raises(ValueError, match="no parameter of the model has that name"):
        federation(ff.methods.make("fedit", train=["nowhere"]))
