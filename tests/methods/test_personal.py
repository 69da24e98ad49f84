"""FedAMP, FedFOMO, FedCAC, FedRoD, FedEM and pFedGate against plain loops written from the papers' algorithms."""

import math

import pytest
import torch
from baseline_loop import (
    DATA,
    ROUNDS,
    SEED,
    K,
    average,
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
from torch import nn
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.server.strategy import Uploads
from fastfact.federation.state import generator_for
from fastfact.methods.fedcac import pack_bits, unpack_bits
from fastfact.methods.pfedgate import Gated


def vector(state, names):
    return torch.cat([state[name].flatten() for name in names])


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 1.0, "sigma": 4.0, "lam": 3.0},
        {"alpha": 50.0, "sigma": 4.0, "lam": 3.0},
        {"heuristic": True, "sigma": 6.0, "self_weight": 0.3, "alpha": 2.0},
    ],
)
def test_fedamp(settings, cohort):
    model = normed()
    fed = federation(ff.methods.FedAMP(**settings), normed, cohort=cohort)
    shared = [name for name, _ in model.named_parameters()]
    alpha, sigma, lam = settings["alpha"], settings["sigma"], settings.get("lam", 1.0)
    states = [{n: s[n] for n in fed.infos} for s in rows_of(fed)]
    clouds = [{n: s[n] for n in shared} for s in states]
    capped = []
    for r in range(1, ROUNDS + 1):
        if r > 1:
            w = [vector(s, shared) for s in states]
            clouds = []
            for i in range(K):
                if settings.get("heuristic"):
                    scores = {
                        j: math.exp(sigma * float(w[i] @ w[j] / (w[i].norm() * w[j].norm())))
                        for j in range(K)
                        if j != i
                    }
                    xi = {j: (1 - settings["self_weight"]) * s / sum(scores.values()) for j, s in scores.items()}
                else:
                    xi = {
                        j: alpha / sigma * math.exp(-float(((w[i] - w[j]) ** 2).sum()) / sigma)
                        for j in range(K)
                        if j != i
                    }
                    total = sum(xi.values())
                    capped.append(total > 1)
                    xi = {j: x / max(total, 1) for j, x in xi.items()}
                xi[i] = 1 - sum(xi.values())
                clouds.append({n: sum(x * states[j][n] for j, x in xi.items()) for n in shared})
        for k, state in enumerate(states):

            def loss(state, x, y, cloud=clouds[k]):
                distance = sum(((state[n] - cloud[n]) ** 2).sum() for n in shared)
                return F.cross_entropy(forward(model, state, x), y) + lam / (2 * alpha) * distance

            train(model, state, DATA[k], r, k, loss=loss)
    fed.fit(ROUNDS)
    check(fed, states, list(fed.infos))
    assert sent(fed, "up") == sent(fed, "down") == set(shared)
    assert not capped or all(capped) == (alpha == 50)


def held_out(k):
    x, y = DATA[k]
    order = torch.randperm(len(y), generator=generator_for(SEED, 0, k, "validation"))
    count = max(1, math.floor(0.3 * len(y) + 0.5))
    out, kept = sorted(order[:count].tolist()), sorted(order[count:].tolist())
    return (x[kept], y[kept]), (x[out], y[out])


@pytest.mark.parametrize("share_norm", [True, False])
def test_fedfomo(share_norm):
    """With everybody's model downloaded, chance has no part."""
    model = normed()
    policy = {"share_norm": share_norm, "share_norm_statistics": share_norm}
    fed = federation(ff.methods.FedFOMO(models=9, epsilon=0.0, validation=0.3, **policy), normed)
    shared = [n for n in fed.infos if share_norm or not n.startswith("2.")]
    params = [n for n, _ in model.named_parameters() if n in shared]
    states, affinity, gains = rows_of(fed), torch.zeros(K, K, dtype=torch.float64), 0

    def validation_loss(state, k):
        x, y = held_out(k)[1]
        return float(F.cross_entropy(forward(model, state, x, train=False), y))

    for r in range(1, ROUNDS + 1):
        if r > 1:
            old = [dict(state) for state in states]
            for i in range(K):
                w = {}
                for j in range(K):
                    if j != i:
                        gain = validation_loss(old[i], i) - validation_loss(
                            {**old[i], **{n: old[j][n] for n in shared}}, i
                        )
                        w[j] = max(0.0, gain / float((vector(old[j], params) - vector(old[i], params)).norm()))
                total = sum(w.values())
                w = {j: x / total for j, x in w.items() if total > 0}
                gains += len(w)
                for j, x in w.items():
                    affinity[i, j] += x
                for n in shared:
                    if old[i][n].is_floating_point():
                        states[i][n] = old[i][n] + sum(x * (old[j][n] - old[i][n]) for j, x in w.items())
        for k, state in enumerate(states):
            train(model, state, held_out(k)[0], r, k)
    fed.fit(ROUNDS)
    check(fed, states)
    torch.testing.assert_close(fed.server_state["affinity"], affinity)
    assert gains
    # A message up per client and round, and three weights; down the initial model, then three of others' per round.
    up, message = fed.ledger.bytes("up"), fed.ledger.bytes("up", round=1, client=0)
    assert up == K * ROUNDS * message + (ROUNDS - 1) * K * (3 * 4 + 8)
    assert fed.ledger.bytes("down") == (K + (ROUNDS - 1) * K * 3) * message
    assert fed.ledger.by_name("up")["(reply)"] == (ROUNDS - 1) * K * 3 * 4


def test_fedfomo_candidates():
    last = Uploads(3, [1, 4, 6, 7, 9], [1] * 5, [0.0] * 5)
    affinity = torch.zeros(10, dtype=torch.float64)
    affinity[[9, 4, 6]] = torch.tensor([0.2, 1.5, 0.9], dtype=torch.float64)
    greedy = ff.methods.FedFOMO(models=3, epsilon=0.0)
    assert greedy._candidates(affinity, 1, last) == [1, 2, 4]
    assert greedy._candidates(affinity, 4, last)[:2] == [2, 4]
    assert sorted(ff.methods.FedFOMO(models=9)._candidates(affinity, 0, last)) == [0, 1, 2, 3, 4]
    random = ff.methods.FedFOMO(models=1, epsilon=1.0)
    picks = set()
    for round in range(60):
        last.round = round
        picks.add(random._candidates(affinity, 1, last)[0])
    assert picks == {1, 2, 3, 4}


def test_fedfomo_by_hand():
    """Clients 5 and 3 reported with w = (0, 0) and (3, 4), 5 apart; only 5 gains, at 0.2 for each unit of length."""
    method = ff.methods.FedFOMO(models=2)
    method._measured = ["w"]
    held = {5: torch.tensor([[0.0, 0.0]]), 3: torch.tensor([[3.0, 4.0]])}
    losses = {5: torch.tensor([2.0, 1.0]).double(), 3: torch.tensor([0.5, 0.6]).double()}
    uploads = Uploads(2, [5, 3], [1, 1], [0.0, 0.0], {"w": torch.cat([held[5], held[3]])})
    uploads.server_state = before = method.server_state({"w": torch.zeros(6, 2)})
    empty, answers = before["affinity"].clone(), {}
    for client, other in ((5, 3), (3, 5)):
        offer = method.offer(uploads, client, ["w"])
        assert offer.sources == [other] and offer.tensors["w"].tolist() == held[other].tolist()
        merged, weights = method.merge({"w": held[client]}, offer.tensors, losses[client])
        assert merged["w"].tolist() == [[3, 4]]
        answers[client] = offer.sources, weights
    state = dict(before)
    method.answered(answers, state)
    assert state["affinity"].nonzero().tolist() == [[5, 3]]
    assert torch.equal(before["affinity"], empty), "a round that is thrown away has told the server nothing"
    weights = method._weights(torch.tensor([2.0, 1.0, 3.0, 0.5]), torch.tensor([4.0, 1.0, 2.0]))
    torch.testing.assert_close(weights, torch.tensor([0.25, 0.0, 0.75]))


def test_fedfomo_newcomers_choose_too():
    fed = federation(ff.methods.FedFOMO(models=1), participation=0.5)
    fed.fit(4)
    message = fed.ledger.bytes("up", round=1) // 2
    assert [fed.ledger.bytes("down", round=r) for r in (2, 3, 4)] == [2 * message] * 3
    with pytest.raises(ValueError, match=r"client 1 has a single training sample, the method holds out one"):
        federation("fedfomo", data=clients(sizes=(4, 1)))


def test_fedfomo_asks_for_the_samples(tmp_path):
    fed = federation("fedfomo")
    fed.fit(1, out=tmp_path)
    assert len(fed.mixed()) == K
    with pytest.raises(ValueError, match=r"fedfomo mixes by samples, pass Federation.load"):
        ff.Federation.load(tmp_path, model=mlp).mixed()


def test_bits():
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert pack_bits(mask).tolist() == [0b10001101, 0b10]
    assert unpack_bits(pack_bits(mask)[None], 10).tolist() == [mask.tolist()]


@pytest.mark.parametrize(("tau", "beta"), [(0.5, 4), (0.3, 100), (0.0, 1)])
def test_fedcac(tau, beta):
    model = normed()
    fed = federation(ff.methods.FedCAC(tau=tau, beta=beta), normed)
    params = [name for name, _ in model.named_parameters()]
    states, partners = [{n: s[n] for n in fed.infos} for s in rows_of(fed)], []
    starts = [dict(s) for s in states]
    for r in range(1, ROUNDS + 2):
        if r > 1:
            masks = []
            for state, start in zip(states, starts, strict=True):
                mask = {}
                for n in params:
                    omega = ((state[n] - start[n]) * state[n]).abs().flatten().tolist()
                    top = sorted(range(len(omega)), key=lambda p: -omega[p])[: int(tau * len(omega))]
                    flat = torch.zeros(len(omega), dtype=torch.bool)
                    flat[top] = True
                    mask[n] = flat.view(state[n].shape)
                masks.append(mask)
            flat = [vector(mask, params).double() for mask in masks]
            n = float(flat[0].sum())
            overlap = [[1 - float((a - b).abs().sum()) / (2 * n) if n else 1.0 for b in flat] for a in flat]
            pairs = [overlap[i][j] for i in range(K) for j in range(K) if i != j]
            mean = sum(pairs) / len(pairs)
            threshold = mean + (r - 1) / beta * (max(pairs) - mean)
            everybody = {name: average(states, name) for name in states[0]}
            made = []
            for i in range(K):
                group = [j for j in range(K) if j == i or (n and overlap[i][j] >= threshold)]
                partners.append(len(group))
                new = dict(everybody)
                for name in params:
                    own = sum(states[j][name] for j in group) / len(group)
                    new[name] = torch.where(masks[i][name], own, everybody[name])
                made.append(new)
            for state, new in zip(states, made, strict=True):
                state.update({name: tensor.clone() for name, tensor in new.items()})
            starts = [dict(s) for s in states]
        for k, state in enumerate(states):
            train(model, state, DATA[k], r, k)
    fed.fit(ROUNDS + 1)
    check(fed, states, list(fed.infos))
    assert tau == 0 or (1 in partners and max(partners) > 1) or beta == 100
    numbers = sum(fed.infos[n].numel for n in params)
    marks = sum(size for name, size in fed.ledger.by_name("up").items() if name.startswith("critical/"))
    assert marks == K * (ROUNDS + 1) * sum(7 + -(-fed.infos[n].numel // 8) for n in params) and numbers > 0


def test_fedcac_ends_after_beta():
    """Of two clients the largest overlap is the mean one, and so it is where all are the same."""
    masks = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]], dtype=torch.bool)
    for some in (masks, masks[:1].expand(3, -1)):
        method, alone = ff.methods.FedCAC(beta=2), torch.eye(len(some), dtype=torch.bool)
        assert method._partners(some, 2).all()
        assert torch.equal(method._partners(some, 3), alone)


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("share_classifier", [True, False])
def test_fedrod(cohort, share_classifier):
    features = nn.Sequential(*list(normed())[:-1])
    fed = federation(ff.methods.FedRoD(share_classifier=share_classifier), normed, cohort=cohort)
    personal = {"7.personal_weight", "7.personal_bias"}
    shared = [n for n in fed.infos if n not in personal and (share_classifier or not n.startswith("7."))]
    states = [{n: s[n] for n in fed.infos} for s in rows_of(fed)]
    assert all(not states[0][n].any() for n in personal)
    counts = [[int((y == c).sum()) for c in range(3)] for _, y in DATA]
    for r in range(1, ROUNDS + 1):
        if r > 1:
            give(states, {n: average(states, n) for n in shared})
        for k, state in enumerate(states):

            def loss(state, x, y, n=counts[k]):
                z = forward(features, state, x)
                generic = z @ state["7.weight"].T + state["7.bias"]
                balanced = 0
                for logits, label in zip(generic, y, strict=True):
                    scores = [n[c] * logits[c].exp() for c in range(3)]
                    balanced = balanced - (scores[label] / sum(scores)).log() / len(y)
                head = z.detach() @ state["7.personal_weight"].T + state["7.personal_bias"]
                return balanced + F.cross_entropy(generic.detach() + head, y)

            train(fed.template, state, DATA[k], r, k, loss=loss)
    history = fed.fit(ROUNDS)
    check(fed, states, list(fed.infos))
    assert sent(fed, "up") == sent(fed, "down") == set(shared)
    for row, state, client in zip(history[-K:], states, clients(), strict=True):
        x, y = client.test
        z = forward(features, state, x, train=False)
        both = z @ (state["7.weight"] + state["7.personal_weight"]).T + state["7.bias"] + state["7.personal_bias"]
        assert row["accuracy"] == pytest.approx(float((both.argmax(1) == y).double().mean()))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        return self.head(x @ self.embedding.weight)


def test_fedrod_unties_the_classifier():
    fed = federation("fedrod", Tied)
    fed.fit(1)
    assert {"embedding.weight", "head.weight", "head.personal_weight"} <= set(fed.infos)
    assert not torch.equal(fed.models[0].embedding.weight, fed.models[0].head.weight)


def test_fedrod_needs_a_linear_classifier():
    def pixelwise():
        return nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 3, 1), nn.Flatten()).double()

    with pytest.raises(ValueError, match=r"fedrod: the classifier \(1\) is Conv2d, must be an nn.Linear"):
        federation("fedrod", pixelwise)


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("share_classifier", [True, False])
def test_fedem(cohort, share_classifier):
    model, m = normed(), 2
    fed = federation(ff.methods.FedEM(components=m, share_classifier=share_classifier), normed, cohort=cohort)
    classifiers = {f"components.{c}.7.{role}" for c in range(m) for role in ("weight", "bias")}
    shared = [n for n in fed.infos if n != "pi" and (share_classifier or n not in classifiers)]
    states = rows_of(fed)
    assert not torch.equal(states[0]["components.0.7.weight"], states[0]["components.1.7.weight"])

    def component(state, c):
        prefix = f"components.{c}."
        return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}

    def losses(state, x, y, train):
        return [F.cross_entropy(forward(model, component(state, c), x, train), y, reduction="none") for c in range(m)]

    def posterior(state, x, y):
        """q [m, n] as plain fractions."""
        with torch.no_grad():
            joint = [p * (-loss).exp() for p, loss in zip(state["pi"], losses(state, x, y, False), strict=True)]
            return [part / sum(joint) for part in joint]

    for r in range(1, ROUNDS + 1):
        if r > 1:
            give(states, {n: average(states, n) for n in shared})
        for k, state in enumerate(states):
            start = {n: t.clone() for n, t in state.items()}
            state["pi"] = torch.stack([q.mean() for q in posterior(start, *DATA[k])])

            def loss(state, x, y, start=start):
                q = posterior(start, x, y)
                return sum((w * each).mean() for w, each in zip(q, losses(state, x, y, True), strict=True))

            train(fed.template, state, DATA[k], r, k, loss=loss)
    history = fed.fit(ROUNDS)
    check(fed, states)
    assert sent(fed, "up") == sent(fed, "down") == set(shared)
    assert (fed.states.state["pi"] - 1 / m).abs().max() > 0.01
    for row, state, client in zip(history[-K:], states, clients(), strict=True):
        x, y = client.test
        p = sum(w * forward(model, component(state, c), x, False).softmax(1) for c, w in enumerate(state["pi"]))
        assert row["accuracy"] == pytest.approx(float((p.argmax(1) == y).double().mean()))


@pytest.mark.parametrize("cohort", [1, 4])
def test_fedem_draws_anew_what_trains(cohort):
    """What is frozen, and the norms, which suit it, stay those of the given network."""

    def model():
        net = normed()
        net[2].running_mean += 2.0
        return ff.factorize(net, ff.LowRank(rank=2), freeze=True, skip=["7"], train=["2", "7"])

    fed = federation(ff.methods.FedEM(components=3), model, cohort=cohort)
    first, *others = fed.template.components
    drawn = {"1.A", "5.A", "7.weight", "7.bias"}
    for other in others:
        for (name, tensor), same in zip(first.named_parameters(), other.parameters(), strict=True):
            assert tensor is same if not tensor.requires_grad else torch.equal(tensor, same) == (name not in drawn), (
                name
            )
        assert torch.equal(first[2].running_mean, other[2].running_mean)
    frozen = {name: tensor.clone() for name, tensor in fed.template.named_parameters() if not tensor.requires_grad}
    given = federation("fedavg", model).template.state_dict()
    assert all(torch.equal(tensor, given[name.split(".", 2)[2]]) for name, tensor in frozen.items())
    fed.fit(2)
    assert all(row["left_out"] is None for row in fed.history)
    assert all(torch.equal(tensor, fed.template.get_parameter(name)) for name, tensor in frozen.items())


def choose(importance, sizes, groups, budget):
    """The best block of every layer, then the others, by importance for each number, while the budget lasts."""
    worth = [i / s for i, s in zip(importance.tolist(), sizes, strict=True)]
    best = [max(group, key=lambda b: worth[b]) for group in groups]
    order = sorted(best, key=lambda b: -worth[b]) + sorted(set(range(len(sizes))) - set(best), key=lambda b: -worth[b])
    used, mask = 0, [0.0] * len(sizes)
    for block in order:
        used += sizes[block]
        mask[block] = float(used <= budget or block in best)
    return torch.tensor(mask, dtype=torch.float64)


@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("density", [0.4, 0.75, 1.0])
def test_pfedgate(density, cohort):
    model, features = normed(), 6
    fed = federation(ff.methods.PFedGate(density=density, blocks=2, features=features), normed, cohort=cohort)
    # Rows of convolution (3 × 4, bias), linear layer (4 × 6, bias) and classifier (3 × 4, bias) in two blocks each.
    rows = {"1": [0, 0, 1], "5": [2, 2, 3, 3], "7": [4, 4, 5]}
    sizes, groups = [10, 5, 14, 14, 10, 5], [(0, 1), (2, 3), (4, 5)]
    names = [n for n, _ in fed.template.named_parameters()]
    masks = set()

    def maps(state, x):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        return [
            (x @ state[f"gate.{part}.weight"].T + state[f"gate.{part}.bias"]).sigmoid().mean(0)
            for part in ("weight", "importance")
        ]

    def apply(state, gates, x, train):
        inner = {n.removeprefix("model."): t for n, t in state.items() if n.startswith("model.")}
        for layer, blocks in rows.items():
            for role in ("weight", "bias"):
                tensor = inner[f"{layer}.{role}"]
                inner[f"{layer}.{role}"] = tensor * gates[blocks].view(-1, *[1] * (tensor.dim() - 1))
        return forward(model, inner, x, train)

    def gradient(state, x, y):
        """dL/dgate goes to G times the mask, and to the importance times G."""
        g, p = maps(state, x)
        mask = choose(p, sizes, groups, int(density * sum(sizes)))
        masks.add(tuple(mask.tolist()))
        gates = (g * mask).detach().requires_grad_()
        inner = [n for n in names if n.startswith("model.")]
        loss = F.cross_entropy(apply(state, gates, x, True), y)
        found = dict(
            zip([*inner, "gates"], torch.autograd.grad(loss, [*(state[n] for n in inner), gates]), strict=True)
        )
        for part, tensor, other in (("weight", g, mask), ("importance", p, g.detach())):
            leaves = [f"gate.{part}.weight", f"gate.{part}.bias"]
            grads = torch.autograd.grad(tensor, [state[n] for n in leaves], found["gates"] * other)
            found |= dict(zip(leaves, grads, strict=True))
        return [found[n] for n in names]

    states = rows_of(fed)
    shared = [n for n in fed.infos if n.startswith("model.")]
    for r in range(1, ROUNDS + 1):
        if r > 1:
            give(states, {n: average(states, n) for n in shared})
        for k, state in enumerate(states):
            train(fed.template, state, DATA[k], r, k, gradient=gradient)
    history = fed.fit(ROUNDS)
    check(fed, states)
    assert sent(fed, "up") == sent(fed, "down") == set(shared)
    assert len(masks) > 1 if density < 1 else masks == {(1.0,) * 6}
    for row, state, client in zip(history[-K:], states, clients(), strict=True):
        x, y = client.test
        g, p = maps(state, x)
        logits = apply(state, g * choose(p, sizes, groups, int(density * sum(sizes))), x, False)
        assert row["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))


class Conv1D(nn.Module):
    """As that of transformers."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(4, 6, 2, groups=g) for g in (1, 2)] + [Conv1D(6, 3)])
def test_pfedgate_gates_output_channels_where_the_inputs_come_first(layer):
    x = torch.randn(2, 4, 3, 3) if hasattr(layer, "groups") else torch.randn(2, 3)
    gated = Gated(nn.Sequential(layer), density=0.7, blocks=3, features=2, classifier=None)
    assert gated.sizes.tolist() == [sum(p.numel() for p in layer.parameters()) // 3] * 3
    weight, importance = gated.gate(x)
    gates = (weight * gated.select(importance)).repeat_interleave(2)
    torch.testing.assert_close(gated(x), layer(x) * gates.view(1, 6, *[1] * (x.dim() - 2)), rtol=1e-5, atol=1e-6)


def test_pfedgate_takes_weights_that_are_parameters():
    """A weight that is divided by its norm is not finite where its block is left out."""
    norm = nn.utils.parametrizations.weight_norm
    with pytest.raises(ValueError, match=r"pfedgate: 4 has a weight that is made of others"):
        federation("pfedgate", lambda: nn.Sequential(*mlp()[:4], norm(mlp()[4])))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("agnostic-fl", {"mixture_lr": -1.0}, r"agnostic-fl\(mixture_lr=-1.0\)"),
        ("clustered-fl", {"eps2": -1.0}, r"eps2=-1.0"),
        ("per-fedavg", {"alpha": 0.0}, r"alpha=0.0"),
        ("pfedsd", {"temperature": 0.0}, r"temperature=0.0"),
        ("fedamp", {"sigma": 0.0}, r"sigma=0.0"),
        ("fedamp", {"self_weight": 1.5}, r"self_weight=1.5"),
        ("fedfomo", {"models": 0}, r"models=0"),
        ("fedfomo", {"validation": 1.0}, r"validation=1.0"),
        ("fedcac", {"tau": 1.5}, r"tau=1.5"),
        ("fedcac", {"beta": 0}, r"beta=0"),
        ("fedem", {"components": 0}, r"components=0"),
        ("pfedgate", {"density": 0.0}, r"density=0.0"),
        ("pfedgate", {"blocks": 0}, r"blocks=0"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make(name, **settings)


def test_a_classifier_can_be_named_in_a_wrapped_model():
    fed = federation(ff.methods.FedEM(classifier="2", share_classifier=False), mlp)
    kept = {name.split(".", 2)[2] for name in set(fed.infos) - set(fed.shared) - {"pi"}}
    assert kept == {"2.weight", "2.bias"} and len(fed.shared) == 3 * 4
