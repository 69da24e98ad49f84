"""AFL, Clustered-FL, Per-FedAvg and pFedSD against plain loops written from the papers' algorithms."""

import itertools
import math

import pytest
import torch
from baseline_loop import (
    BATCH,
    DATA,
    DECAY,
    ROUNDS,
    SEED,
    SIZES,
    K,
    accuracy,
    average,
    batches,
    check,
    clients,
    federation,
    forward,
    give,
    mlp,
    normed,
    rows_of,
    sent,
    train,
)
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.server.strategy import Uploads
from fastfact.federation.state import generator_for
from fastfact.methods.agnostic_fl import project_to_simplex
from fastfact.methods.clustered_fl import bipartition


def nearest_on_the_simplex(point):
    """Bisection for the shift t in Σ max(x − t, 0) = 1."""
    low, high = min(point) - 1, max(point)
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if sum(max(x - t, 0) for x in point) > 1 else (low, t)
    return [max(x - low, 0) for x in point]


@pytest.mark.parametrize("point", [[0.2, 0.3, 0.5], [1.5, 0.9, -2.0, 1.4], [3.0, 0.0], [0.0, 0.0, 0.0], [0.4] * 5])
def test_projection_to_the_simplex(point):
    projected = project_to_simplex(torch.tensor(point, dtype=torch.float64))
    torch.testing.assert_close(projected, torch.tensor(nearest_on_the_simplex(point), dtype=torch.float64))


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("share_classifier", [True, False])
def test_agnostic_fl(cohort, share_classifier):
    model = normed()
    rate = 0.8
    fed = federation(ff.methods.AgnosticFL(mixture_lr=rate, share_classifier=share_classifier), normed, cohort=cohort)
    states, mixture, losses = rows_of(fed), [1 / K] * K, None
    for r in range(1, ROUNDS + 1):
        if r > 1:
            names = [n for n in fed.infos if share_classifier or not n.startswith("7.")]
            give(states, {n: average(states, n, mixture) for n in names})
            mixture = nearest_on_the_simplex([m + rate * loss for m, loss in zip(mixture, losses, strict=True)])
        losses = [
            float(F.cross_entropy(forward(model, s, x, False), y)) for s, (x, y) in zip(states, DATA, strict=True)
        ]
        for k, state in enumerate(states):
            state["loss"] = torch.tensor([losses[k]], dtype=torch.float64)
            train(model, state, DATA[k], r, k)
    fed.fit(ROUNDS)
    check(fed, states)
    assert fed.server_state["mixture"].tolist() == pytest.approx(mixture, rel=1e-8)
    assert max(mixture) - min(mixture) > 0.05
    assert sent(fed, "up") - sent(fed, "down") == {"loss"}


def test_a_client_that_missed_a_round_gets_the_same_global_model():
    fed = federation(ff.methods.AgnosticFL(mixture_lr=0.5), participation=0.5)
    fed.fit(3)
    models = [dict(model.named_parameters()) for model in fed.mixed()]
    last = fed.reported.clients
    some = fed.server_state["mixture"][last]
    for name in fed.infos:
        mean = sum(w * fed.states.state[name][k] for w, k in zip(some / some.sum(), last, strict=True))
        for model in models:
            torch.testing.assert_close(model[name].detach(), mean, rtol=1e-10, atol=1e-12)


def best_partition(similarity):
    m = len(similarity)
    parts = [
        [i for i in range(m) if i == 0 or (bits >> (i - 1)) & 1]
        for bits in range(2 ** (m - 1))
        if bits < 2 ** (m - 1) - 1
    ]

    def across(part):
        return max(float(similarity[i][j]) for i in part for j in range(m) if j not in part)

    return min(parts, key=across), min(map(across, parts))


@pytest.mark.parametrize("m", [2, 3, 5, 7])
def test_bipartition_is_the_best_of_all(m):
    for seed in range(5):
        x = torch.randn(m, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        similarity = x @ x.T
        near, far, across = bipartition(similarity)
        part, least = best_partition(similarity)
        assert across == pytest.approx(least) and near == part
        assert sorted(near + far) == list(range(m))


@pytest.mark.parametrize(
    ("eps1", "eps2", "gamma_max", "clusters"), [(9.0, 0.0, 0.0, 4), (0.0, 0.0, 0.0, 1), (9.0, 99.0, 0.0, 1)]
)
def test_clustered_fl(eps1, eps2, gamma_max, clusters):
    model = normed()
    fed = federation(ff.methods.ClusteredFL(eps1=eps1, eps2=eps2, gamma_max=gamma_max), normed)
    states, groups = rows_of(fed), [list(range(K))]
    starts = [dict(state) for state in states]
    params = [name for name, _ in model.named_parameters()]
    seen = []
    for r in range(1, 5):
        if r > 1:
            change = [torch.cat([(s[n] - t[n]).flatten() for n in params]) for s, t in zip(states, starts, strict=True)]
            after = []
            for group in groups:
                total = sum(SIZES[i] for i in group)
                mean = sum(SIZES[i] / total * change[i] for i in group)
                if len(group) > 1 and mean.norm() < eps1 and max(change[i].norm() for i in group) > eps2:
                    cos = [[float(F.cosine_similarity(change[i], change[j], dim=0)) for j in group] for i in group]
                    part, across = best_partition(cos)
                    if math.sqrt((1 - across) / 2) > gamma_max:
                        after += [[group[i] for i in part], [i for p, i in enumerate(group) if p not in part]]
                        continue
                after.append(group)
            groups = after
            seen.append(len(groups))
            for group in groups:
                some = [states[i] for i in group]
                give(some, {n: average(some, n, [SIZES[i] for i in group]) for n in some[0]})
            starts = [dict(state) for state in states]
        for k, state in enumerate(states):
            train(model, state, DATA[k], r, k)
    fed.fit(4)
    check(fed, states)
    assert len(groups) == clusters and (clusters == 1 or seen[0] == 2)
    cluster = fed.server_state["cluster"].tolist()
    for group in groups:
        assert len({cluster[i] for i in group}) == 1
    assert len(set(cluster)) == clusters


def test_a_cluster_is_at_rest_by_the_mean_weighted_with_samples():
    updates = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [-1.0, 0.1]], dtype=torch.float64)
    split = ff.methods.ClusteredFL(eps1=0.1, eps2=2.9)._split
    assert split(updates, [2, 3, 3]) == [0]
    assert split(updates, [1, 1, 1]) == [] and split(updates[:1], [1]) == []
    assert ff.methods.ClusteredFL(eps1=0.1, eps2=3.1)._split(updates, [2, 3, 3]) == []


def test_a_stale_update_is_of_what_was_downloaded():
    """Two clients that changed nothing, of models that their cluster has left: nobody disagrees with anybody."""
    fed = federation(ff.methods.ClusteredFL(eps1=1e3, eps2=0.1))
    away = torch.tensor([1.0, -1.0], dtype=torch.float64)
    state = {n: fed.initial[n] + away.view(-1, *[1] * (fed.initial[n].dim() - 1)) for n in fed.shared}
    lists = {"clients": [0, 1], "samples": [9, 6], "losses": [1.0, 1.0], "started": [2, 4]}
    uploads = Uploads(6, **lists, state=state, server_state=dict(fed.server_state), start=dict(state), here=range(2))
    fed.method.mix(uploads, fed.shared)
    assert uploads.server_state["cluster"].tolist() == [0] * K


def test_gamma_max_holds_a_split_back():
    """√((1 − α) / 2) is at most 1."""
    fed = federation(ff.methods.ClusteredFL(eps1=9.0, eps2=0.0, gamma_max=1.0))
    fed.fit(3)
    assert fed.server_state["cluster"].tolist() == [0] * K


def test_a_client_that_missed_rounds_gets_its_clusters_model():
    fed = federation(ff.methods.ClusteredFL(eps1=9.0, eps2=0.0), participation=0.5)
    fed.fit(6)
    cluster = fed.server_state["cluster"]
    assert len(cluster.unique()) > 1
    last = fed.reported.clients
    # A further split can only concern members of one cluster that were there together.
    assert len({int(cluster[k]) for k in last}) == len(last)
    for k, model in enumerate(fed.mixed()):
        for name, param in model.named_parameters():
            expected = fed.states.state[name][k] if k in last else fed.server_state[f"model/{name}"][cluster[k]]
            of_another = next((i for i in last if cluster[i] == cluster[k]), None)
            expected = expected if of_another is None else fed.states.state[name][of_another]
            torch.testing.assert_close(param.detach(), expected)


def test_a_newcomer_chooses_among_the_clusters_models():
    fed = federation(ff.methods.ClusteredFL(eps1=9.0, eps2=0.0))
    fed.fit(2)
    joined = fed.join(clients(sizes=(6,)), how="download")
    got = joined.models[0].state_dict()
    uploads = fed.uploads()
    fed.method.mix(uploads, fed.shared)
    count = len(uploads.server_state["cluster"].unique())
    assert count > 1
    models = [{n: uploads.server_state[f"model/{n}"][c] for n in got} for c in range(count)]
    x, y = clients(sizes=(6,))[0].train
    losses = [float(F.cross_entropy(torch.func.functional_call(mlp(), model, (x,)), y)) for model in models]
    best = models[losses.index(min(losses))]
    assert all(torch.equal(got[n], best[n]) for n in got)
    assert joined.bytes_down == [count * fed.ledger.bytes("up", round=1, client=0)], "each is a message"


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize("make", [mlp, normed])
def test_per_fedavg(first_order, make, cohort):
    model, alpha = make(), 0.3
    names = [name for name, _ in model.named_parameters()]

    def gradient(state, x, y):
        """g = ∇f(w̃; D′), less α ∇²f(w; D) g."""
        half = len(y) // 2 if len(y) >= 4 else 0
        d = slice(None) if half == 0 else slice(half)
        at = [state[name] for name in names]
        first = torch.autograd.grad(F.cross_entropy(forward(model, state, x[d]), y[d]), at, create_graph=True)
        moved = {n: (w - alpha * g).detach().requires_grad_() for n, w, g in zip(names, at, first, strict=True)}
        value = F.cross_entropy(forward(model, {**state, **moved}, x[half:]), y[half:])
        second = torch.autograd.grad(value, moved.values())
        if first_order:
            return second
        product = torch.autograd.grad(first, at, grad_outputs=second)
        return [g - alpha * h for g, h in zip(second, product, strict=True)]

    fed = federation(ff.methods.PerFedAvg(alpha=alpha, first_order=first_order), make, cohort=cohort)
    states, accuracies = rows_of(fed), []
    tests = [client.test for client in clients()]
    for r in range(1, ROUNDS + 1):
        if r > 1:
            give(states, {n: average(states, n) for n in states[0]})
        for k, state in enumerate(states):
            train(model, state, DATA[k], r, k, gradient=gradient)
            x, y = DATA[k]
            batch = batches(len(y), generator_for(SEED, r, k, "adapt"))[0]
            adapted = {n: t.clone() for n, t in state.items()}
            leaves = {n: adapted[n].clone().requires_grad_() for n in names}
            grads = torch.autograd.grad(
                F.cross_entropy(forward(model, {**adapted, **leaves}, x[batch]), y[batch]), leaves.values()
            )
            for name, grad in zip(names, grads, strict=True):
                adapted[name] = adapted[name] - alpha * (grad + DECAY * adapted[name])
            accuracies.append(accuracy(model, adapted, tests[k]))
    history = fed.fit(ROUNDS)
    check(fed, states)
    assert [row["accuracy"] for row in history] == pytest.approx(accuracies)
    assert len(batches(SIZES[0], torch.Generator())[0]) == BATCH


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_pfedsd(cohort, participation):
    model, weight, t = normed(), 0.7, 2.5
    method = ff.methods.PFedSD(distillation=weight, temperature=t)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    names = list(fed.infos)
    states = [{n: s[n] for n in names} for s in rows_of(fed)]
    teachers, last = [None] * K, None
    for r in range(1, 5):
        there = fed.select(r)
        if last:
            some = [states[k] for k in last]
            mean = {n: average(some, n, [SIZES[k] for k in last]) for n in names}
            give([states[k] for k in there], mean)
        for k in there:

            def loss(state, x, y, teacher=teachers[k]):
                logits = forward(model, state, x)
                value = F.cross_entropy(logits, y)
                if teacher is not None:
                    q = (forward(model, teacher, x, train=False) / t).softmax(1)
                    value = value + weight * t**2 * (q * (q.log() - (logits / t).log_softmax(1))).sum() / len(y)
                return value

            train(model, states[k], DATA[k], r, k, loss=loss)
            teachers[k] = {n: tensor.clone() for n, tensor in states[k].items()}
        last = there
    fed.fit(4)
    check(fed, states, names)
    for k, name in itertools.product(range(K), names):
        if teachers[k] is not None:
            torch.testing.assert_close(fed.states.state[f"teacher/{name}"][k], teachers[k][name])
    assert fed.states.state["taught"].flatten().tolist() == [float(t is not None) for t in teachers]
    assert not any(name.startswith("teacher") for name in fed.ledger.by_name())
