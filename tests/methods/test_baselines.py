"""SCAFFOLD, FedAdam, pFedMe, Ditto, APFL, MOON, FedBABU and FedALA against plain loops from the papers' algorithms."""

import itertools
import math
import statistics

import pytest
import torch
from baseline_loop import (
    BATCH,
    DATA,
    DECAY,
    EPOCHS,
    LR,
    MOMENTUM,
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
from fastfact.nn.schedule import Schedule

TESTS = [client.test for client in clients()]
MODEL = normed()
PARAMS = [name for name, _ in MODEL.named_parameters()]
BUFFERS = [name for name, _ in MODEL.named_buffers()]

ways = pytest.mark.parametrize(("cohort", "participation"), [(1, 1.0), (4, 0.5)])
ways_and_heads = pytest.mark.parametrize(
    ("cohort", "participation", "share_classifier"), [(1, 0.5, True), (4, 1.0, True), (4, 0.5, False)]
)


def part(state, prefix=""):
    """What stands in `state` under a prefix, as tensors of the model."""
    return {name: state[prefix + name] for name in [*PARAMS, *BUFFERS]}


def kept(name, share_classifier):
    return not share_classifier and name.startswith("7.")


def rounds_of(fed, count=ROUNDS):
    """(round, the clients of it, those of the round before)"""
    last = None
    for r in range(1, count + 1):
        yield r, fed.select(r), last
        last = fed.select(r)


def mean_of(states, last, name, even=False):
    return average([states[k] for k in last], name, [1 if even else SIZES[k] for k in last])


def evaluated(fed, accuracies):
    assert [row["accuracy"] for row in fed.history] == pytest.approx(accuracies)


@ways_and_heads
@pytest.mark.parametrize(("server_lr", "option"), [(1.0, "II"), (0.6, "II"), (1.0, "I")])
def test_scaffold(server_lr, option, share_classifier, participation, cohort):
    method = ff.methods.Scaffold(server_lr=server_lr, option=option, share_classifier=share_classifier)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    states = [part(row, "model.") for row in rows_of(fed)]
    controlled = [name for name in PARAMS if not kept(name, share_classifier)]
    zero = {name: torch.zeros_like(states[0][name]) for name in controlled}
    x, c, own = {name: states[0][name] for name in controlled}, dict(zero), [dict(zero) for _ in states]
    change = {}
    for r, there, last in rounds_of(fed):
        if last:
            # Δx and Δc of the last round.
            x = {n: x[n] + server_lr * sum(states[k][n] - x[n] for k in last) / len(last) for n in controlled}
            c = {n: c[n] + sum(change[k][n] for k in last) / K for n in controlled}
            give([states[k] for k in there], {n: mean_of(states, last, n, even=True) for n in BUFFERS} | x)
        change = {}
        for k in there:
            steps = EPOCHS * len(batches(SIZES[k], torch.Generator()))

            def gradient(state, xb, yb, k=k, c=c):
                loss = F.cross_entropy(forward(MODEL, state, xb), yb)
                grads = torch.autograd.grad(loss, [state[n] for n in PARAMS])
                return [g - own[k][n] + c[n] if n in c else g for n, g in zip(PARAMS, grads, strict=True)]

            at = {n: t.clone().requires_grad_(n in PARAMS) for n, t in states[k].items()}
            loss = F.cross_entropy(forward(MODEL, at, DATA[k][0], train=False), DATA[k][1])
            first = dict(zip(PARAMS, torch.autograd.grad(loss, [at[n] for n in PARAMS]), strict=True))
            train(MODEL, states[k], DATA[k], r, k, gradient=gradient)
            # A constant gradient of 1, K steps of momentum.
            moved, velocity = 0.0, 0.0
            for _ in range(steps):
                velocity = MOMENTUM * velocity + 1
                moved += LR * velocity
            new = {
                n: first[n] if option == "I" else own[k][n] - c[n] + (x[n] - states[k][n]) / moved for n in controlled
            }
            change[k] = {n: new[n] - own[k][n] for n in controlled}
            own[k] = new
    fed.fit(ROUNDS)
    for name in [*PARAMS, *BUFFERS]:
        for k, state in enumerate(states):
            torch.testing.assert_close(fed.states.state["model." + name][k], state[name], rtol=1e-8, atol=1e-10)
    for name in controlled:
        for k in range(K):
            torch.testing.assert_close(fed.states.state[f"own/model.{name}"][k], own[k][name], rtol=1e-8, atol=1e-10)
    # Nothing of the algorithm is free: the variates travel both ways.
    variates = {"control." + f"model.{name}".replace(".", "/") for name in controlled}
    models = {f"model.{name}" for name in [*PARAMS, *BUFFERS] if not kept(name, share_classifier)}
    assert sent(fed, "up") == sent(fed, "down") == variates | models
    assert any(tensor.abs().max() > 1e-3 for tensor in c.values())


@pytest.mark.parametrize(
    "training",
    [{"optimizer": "adam"}, {"schedule": "cosine"}, {"max_grad_norm": 0.1}, {"optimizer_states": "kept"}],
)
def test_scaffold_takes_a_gradient_where_the_distance_says_none(training):
    feds = [federation(ff.methods.Scaffold(option=option), normed, **training) for option in ("I", "II")]
    for fed in feds:
        fed.fit(2)
    for name, tensor in feds[0].states.state.items():
        assert torch.equal(tensor, feds[1].states.state[name])


@pytest.mark.parametrize("states", ["dropped", "kept"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_variate_of_a_constant_gradient(states, momentum):
    data = [ff.Client(train=(torch.ones(4, 1), torch.ones(4)), test=(torch.ones(4, 1), torch.ones(4)))] * 2
    how = {"weight_decay": 0.0, "momentum": momentum, "optimizer_states": states, "loss": lambda out, y: 2 * out.mean()}
    fed = federation("scaffold", lambda: torch.nn.Linear(1, 1, bias=False), data, **how)
    fed.fit(4)
    own = fed.states.state["own/model.weight"]
    torch.testing.assert_close(own, torch.full_like(own, 2), rtol=1e-5, atol=0)


def test_scaffold_corrects_all_steps_of_what_it_controls():
    with pytest.raises(ValueError, match=r"scaffold\(head_first=1\): must be 0 where the classifier is shared"):
        federation(ff.methods.Scaffold(head_first=1), normed)
    fed = federation(ff.methods.Scaffold(head_first=1, share_classifier=False), normed, momentum=0.0)
    fed.fit(1)
    for k, n in enumerate(SIZES):
        length = LR * (EPOCHS - 1) * len(batches(n, torch.Generator()))
        for name in [name for name in PARAMS if not name.startswith("7.")]:
            mean = (fed.initial[f"model.{name}"][0] - fed.states.state[f"model.{name}"][k]) / length
            torch.testing.assert_close(fed.states.state[f"own/model.{name}"][k], mean)


def test_scaffold_without_a_step_keeps_its_variates():
    fed = federation(ff.methods.Scaffold(head_first=EPOCHS, share_classifier=False), normed)
    fed.fit(2)
    assert all(row["left_out"] is None for row in fed.history)
    for name, tensor in fed.states.state.items():
        moved = tensor != fed.initial[name] if name in fed.initial else tensor != 0
        assert moved.any() == (name.startswith("model.7.") or fed.infos[name.removeprefix("own/")].statistic), name


def test_scaffold_counts_the_steps_of_accumulated_batches():
    """Without momentum c_i⁺ is the mean of the corrected steps' gradients: what a step of all batches at once takes."""
    feds = [federation("scaffold", epochs=1, momentum=0.0, **how) for how in ({"accumulate": 9}, {"batch_size": 12})]
    for fed in feds:
        fed.fit(2)
    for name, tensor in feds[0].states.state.items():
        torch.testing.assert_close(tensor, feds[1].states.state[name], rtol=1e-9, atol=1e-12)


def test_scaffolds_c_is_the_mean_of_the_clients():
    """What line 17 keeps, whoever takes part; without momentum a client's is the mean of the gradients it took."""
    fed = federation("scaffold", normed, participation=0.5, momentum=0.0)
    fed.fit(5)
    fed.method.mix(uploads := fed.uploads(), fed.shared)
    for name in PARAMS:
        c = uploads.server_state["global/control." + f"model.{name}".replace(".", "/")][0]
        torch.testing.assert_close(c, fed.states.state[f"own/model.{name}"].mean(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("participation", "share_classifier"), [(1.0, True), (0.5, False)])
@pytest.mark.parametrize("server_optimizer", ["adam", "yogi", "adagrad"])
def test_fedadam(server_optimizer, share_classifier, participation):
    settings = {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.02}
    method = ff.methods.FedAdam(server_optimizer=server_optimizer, share_classifier=share_classifier, **settings)
    fed = federation(method, normed, participation=participation)
    states = rows_of(fed)
    moved = [name for name in PARAMS if not kept(name, share_classifier)]
    x = {n: states[0][n] for n in moved}
    m, v = ({n: torch.full_like(x[n], start) for n in moved} for start in (0.0, settings["tau"] ** 2))
    for r, there, last in rounds_of(fed):
        if last:
            for n in moved:
                delta = mean_of(states, last, n) - x[n]
                m[n] = 0.8 * m[n] + (1 - 0.8) * delta
                if server_optimizer == "adam":
                    v[n] = 0.9 * v[n] + (1 - 0.9) * delta**2
                elif server_optimizer == "yogi":
                    v[n] = v[n] - (1 - 0.9) * delta**2 * torch.sign(v[n] - delta**2)
                else:
                    v[n] = v[n] + delta**2
                x[n] = x[n] + 0.05 * m[n] / (v[n] ** 0.5 + 0.02)
            give([states[k] for k in there], {n: mean_of(states, last, n) for n in BUFFERS} | x)
        for k in there:
            train(MODEL, states[k], DATA[k], r, k)
    fed.fit(ROUNDS)
    check(fed, states)
    assert sent(fed, "up") == sent(fed, "down") == {n for n in fed.infos if not kept(n, share_classifier)}


@pytest.mark.parametrize("options", [{"wire": "bfloat16"}, {"wire": "int8"}, {"after_mix": "threshold"}])
def test_what_rounds_a_download_moves_nothing(options):
    """Clients that change nothing leave x where it is, whatever the wire and `after_mix` make of it."""
    method = ff.methods.FedAdam(after_mix=options.get("after_mix", "none"), l1=0.05)

    def model():
        return ff.factorize(mlp(), ff.Rank1(), init="svd")

    fed = federation(method, model, lr=1e-12, wire=options.get("wire", "exact"), participation=0.5)
    fed.fit(4)
    for name in fed.infos:
        moved = fed.server_state[f"global/{name}"] - fed.initial[name]
        assert moved.abs().max() < 1e-6, name


@pytest.mark.parametrize("name", ["fedadam", "fedbuff", "pfedme", "scaffold"])
def test_an_update_is_of_what_the_client_had_downloaded(name):
    """Two clients that changed nothing report to a server that has moved on meanwhile."""
    fed = federation(name)
    state = {n: fed.initial[n].repeat(2, *[1] * (fed.initial[n].dim() - 1)) for n in fed.shared}
    start, known = {n: tensor.clone() for n, tensor in state.items()}, dict(fed.server_state)
    moved = {n: tensor + 1 for n, tensor in known.items() if n.startswith("global/")}
    lists = {"clients": [0, 1], "samples": [9, 6], "losses": [1.0, 1.0], "started": [2, 4]}
    uploads = Uploads(6, **lists, state=state, server_state=known | moved, start=start, here=range(2))
    fed.method.mix(uploads, fed.shared)
    for n, tensor in moved.items():
        torch.testing.assert_close(uploads.server_state[n], tensor)


@pytest.mark.parametrize(("server_optimizer", "beta1"), [("adam", 0.9), ("yogi", 0.9), ("adagrad", 0.0)])
def test_fedadagrad_has_no_momentum(server_optimizer, beta1):
    feds = [federation(ff.methods.FedAdam(server_optimizer=server_optimizer, beta1=b)) for b in (None, beta1)]
    for fed in feds:
        fed.fit(3)
    for name, tensor in feds[0].server_state.items():
        assert torch.equal(tensor, feds[1].server_state[name]), name


@ways
@pytest.mark.parametrize("server_lr", [1.0, 1.7])
def test_pfedme(server_lr, participation, cohort):
    prox, inner_lr, steps = 0.8, 0.07, 3
    method = ff.methods.PFedMe(prox=prox, inner_lr=inner_lr, inner_steps=steps, server_lr=server_lr)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    states, accuracies = rows_of(fed), []
    x = {n: states[0][n] for n in PARAMS}

    def personal(state, xb, yb):
        theta = {n: state[n].detach() for n in PARAMS}
        for _ in range(steps):
            leaves = {n: t.clone().requires_grad_() for n, t in theta.items()}
            loss = F.cross_entropy(forward(MODEL, {**state, **leaves}, xb), yb)
            loss = loss + prox / 2 * sum(((leaves[n] - state[n].detach()) ** 2).sum() for n in PARAMS)
            grads = torch.autograd.grad(loss, leaves.values())
            theta = {n: theta[n] - inner_lr * g for n, g in zip(PARAMS, grads, strict=True)}
        return theta

    for r, there, last in rounds_of(fed):
        if last:
            x = {n: (1 - server_lr) * x[n] + server_lr * mean_of(states, last, n, even=True) for n in PARAMS}
            give([states[k] for k in there], {n: mean_of(states, last, n, even=True) for n in BUFFERS} | x)
        for k in there:

            def gradient(state, xb, yb):
                theta = personal(state, xb, yb)
                return [prox * (state[n] - theta[n]) for n in PARAMS]

            train(MODEL, states[k], DATA[k], r, k, gradient=gradient)
            batch = torch.randperm(SIZES[k], generator=generator_for(SEED, r, k, "adapt"))[:BATCH]
            copy = {n: t.clone() for n, t in states[k].items()}
            theta = personal(copy, *(part[batch] for part in DATA[k]))
            accuracies.append(accuracy(MODEL, {**copy, **theta}, TESTS[k]))
    fed.fit(ROUNDS)
    check(fed, states)
    evaluated(fed, accuracies)


def two(fed):
    """The shared and the personal model of each client."""
    rows = rows_of(fed)
    return [part(row, "shared.") for row in rows], [part(row, "personal.") for row in rows]


def check_two(fed, shared, personal):
    for prefix, states in (("shared.", shared), ("personal.", personal)):
        for k, state in enumerate(states):
            for name, tensor in state.items():
                got = fed.states.state[prefix + name][k]
                torch.testing.assert_close(got, tensor, rtol=1e-8, atol=1e-10, msg=f"{prefix}{name} of {k}")


@ways_and_heads
@pytest.mark.parametrize("personal_epochs", [None, 1])
def test_ditto(personal_epochs, share_classifier, participation, cohort):
    prox = 0.7
    method = ff.methods.Ditto(prox=prox, personal_epochs=personal_epochs, share_classifier=share_classifier)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    (shared, personal), accuracies = two(fed), []
    for r, there, last in rounds_of(fed):
        if last:
            names = [n for n in shared[0] if not kept(n, share_classifier)]
            give([shared[k] for k in there], {n: mean_of(shared, last, n) for n in names})
        for k in there:
            both = {f"shared.{n}": t for n, t in shared[k].items()}
            both |= {f"personal.{n}": t for n, t in personal[k].items()}
            start = dict(both)

            def loss(state, x, y, start=start):
                # Who trains is who needs a gradient.
                if state["shared.1.weight"].requires_grad:
                    return F.cross_entropy(forward(MODEL, part(state, "shared."), x), y)
                pulled = [n for n in PARAMS if not kept(n, share_classifier)]
                distance = sum(((state[f"personal.{n}"] - start[f"shared.{n}"]) ** 2).sum() for n in pulled)
                return F.cross_entropy(forward(MODEL, part(state, "personal."), x), y) + prox / 2 * distance

            phases = [
                (EPOCHS, lambda n: n.startswith("shared.")),
                (personal_epochs or EPOCHS, lambda n: n.startswith("personal.")),
            ]
            run(fed, both, r, k, phases, loss, shared, personal)
            accuracies.append(accuracy(MODEL, personal[k], TESTS[k]))
    fed.fit(ROUNDS)
    check_two(fed, shared, personal)
    evaluated(fed, accuracies)
    names = {f"shared.{n}" for n in shared[0] if not kept(n, share_classifier)}
    assert sent(fed, "up") == sent(fed, "down") == names


def run(fed, both, r, k, phases, loss, shared, personal):
    """Train the two models of client k and put them back. The buffers move in place in `part`."""
    train(fed.template, both, DATA[k], r, k, phases, loss)
    shared[k], personal[k] = part(both, "shared."), part(both, "personal.")


@ways_and_heads
@pytest.mark.parametrize(("adaptive", "alpha"), [(True, 0.3), (True, 0.999), (False, 0.3)])
def test_apfl(adaptive, alpha, share_classifier, participation, cohort):
    method = ff.methods.APFL(alpha=alpha, adaptive=adaptive, share_classifier=share_classifier)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    (shared, personal), alphas, accuracies = two(fed), [alpha] * K, []

    def mixed(w, v, alpha):
        return {n: alpha * v[n] + (1 - alpha) * w[n] for n in PARAMS} | {n: v[n] for n in BUFFERS}

    for r, there, last in rounds_of(fed):
        if last:
            names = [n for n in shared[0] if not kept(n, share_classifier)]
            give([shared[k] for k in there], {n: mean_of(shared, last, n) for n in names})
        for k in there:
            order = generator_for(SEED, r, k, "order")
            if adaptive:
                batch = torch.randperm(SIZES[k], generator=order)[:BATCH]
                xb, yb = (t[batch] for t in DATA[k])
                at = {n: t.clone() for n, t in mixed(shared[k], personal[k], alphas[k]).items()}
                leaves = {n: at[n].requires_grad_() for n in PARAMS}
                loss = F.cross_entropy(forward(MODEL, at, xb, train=False), yb)
                grads = torch.autograd.grad(loss, leaves.values())
                pairs = zip(PARAMS, grads, strict=True)
                slope = sum(float(((personal[k][n] - shared[k][n]) * g).sum()) for n, g in pairs)
                alphas[k] = min(1.0, max(0.0, alphas[k] - LR * slope))
            velocities = [{n: torch.zeros_like(shared[k][n]) for n in PARAMS} for _ in range(2)]
            for _ in range(EPOCHS):
                for batch in batches(SIZES[k], order):
                    xb, yb = (t[batch] for t in DATA[k])
                    w = {n: shared[k][n].clone().requires_grad_() for n in PARAMS}
                    v = {n: personal[k][n].clone().requires_grad_() for n in PARAMS}
                    first = F.cross_entropy(forward(MODEL, {**shared[k], **w}, xb), yb)
                    at = mixed({n: t.detach() for n, t in w.items()}, {**personal[k], **v}, alphas[k])
                    second = F.cross_entropy(forward(MODEL, at, xb), yb)
                    for state, loss, leaves, velocity in zip(
                        (shared[k], personal[k]), (first, second), (w, v), velocities, strict=True
                    ):
                        grads = torch.autograd.grad(loss, leaves.values())
                        for n, g in zip(PARAMS, grads, strict=True):
                            velocity[n] = MOMENTUM * velocity[n] + g + DECAY * state[n]
                            state[n] = state[n] - LR * velocity[n]
            accuracies.append(accuracy(MODEL, mixed(shared[k], personal[k], alphas[k]), TESTS[k]))
    fed.fit(ROUNDS)
    check_two(fed, shared, personal)
    assert fed.states.state["alpha"].flatten().tolist() == pytest.approx(alphas)
    assert (len(set(alphas)) > 1) == adaptive
    evaluated(fed, accuracies)
    names = {f"shared.{n}" for n in shared[0] if not kept(n, share_classifier)}
    assert sent(fed, "up") == sent(fed, "down") == names


@pytest.mark.parametrize("cohort", [1, 4])
def test_apfls_alpha_follows_the_schedule(cohort):
    fed = federation("apfl", cohort=cohort, schedule="linear", schedule_rounds=2)
    alphas = []
    for _ in range(3):
        fed.fit(1)
        alphas.append(fed.states.state["alpha"].clone())
    assert not torch.equal(alphas[1], alphas[0])
    # The rate has fallen to 0.
    assert torch.equal(alphas[2], alphas[1])


@ways_and_heads
def test_moon(share_classifier, participation, cohort):
    mu, tau = 2.0, 0.4
    method = ff.methods.MOON(contrast=mu, temperature=tau, share_classifier=share_classifier)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    names = list(fed.infos)
    states = [{n: s[n] for n in names} for s in rows_of(fed)]
    features, previous, moved = MODEL[:-1], [{n: t.clone() for n, t in state.items()} for state in states], 0.0

    def represent(state, x, train):
        return forward(features, state, x, train)

    for r, there, last in rounds_of(fed):
        if last:
            shared = {n: mean_of(states, last, n) for n in names if not kept(n, share_classifier)}
            for k in there:
                previous[k] = dict(states[k])
            give([states[k] for k in there], shared)
        for k in there:
            downloaded = {n: t.clone() for n, t in states[k].items()}

            def loss(state, x, y, k=k, downloaded=downloaded):
                z = represent(state, x, True)
                near = F.cosine_similarity(z, represent(downloaded, x, False)) / tau
                far = F.cosine_similarity(z, represent(previous[k], x, False)) / tau
                contrast = -(near.exp() / (near.exp() + far.exp())).log().mean()
                return F.cross_entropy(z @ state["7.weight"].T + state["7.bias"], y) + mu * contrast

            train(MODEL, states[k], DATA[k], r, k, loss=loss)
            moved += sum(float((downloaded[n] - previous[k][n]).abs().sum()) for n in PARAMS)
    fed.fit(ROUNDS)
    check(fed, states, names)
    assert moved > 0
    assert sent(fed, "up") == sent(fed, "down") == {n for n in names if not kept(n, share_classifier)}


def test_moon_needs_a_classifier():
    with pytest.raises(ValueError, match="moon: the model has no layer with a weight"):
        ff.methods.make("moon").prepare(torch.nn.BatchNorm1d(3))


@ways
@pytest.mark.parametrize(("finetune", "epochs"), [("all", 2), ("head", 1), ("body", 1), ("all", 0)])
def test_fedbabu(finetune, epochs, participation, cohort):
    method = ff.methods.FedBABU(finetune=finetune, finetune_epochs=epochs)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    states, accuracies = rows_of(fed), []
    head = {n: t for n, t in states[0].items() if n.startswith("7.")}
    trains = {"all": lambda n: True, "head": lambda n: n in head, "body": lambda n: n not in head}
    for r, there, last in rounds_of(fed):
        if last:
            give([states[k] for k in there], {n: mean_of(states, last, n) for n in states[0] if n not in head})
        for k in there:
            train(MODEL, states[k], DATA[k], r, k, [(EPOCHS, trains["body"])])
            tuned = {n: t.clone() for n, t in states[k].items()}
            if epochs:
                tune(tuned, k, r, epochs, trains[finetune])
            accuracies.append(accuracy(MODEL, tuned, TESTS[k]))
    fed.fit(ROUNDS)
    check(fed, states)
    assert all(torch.equal(fed.states.state[n][k], head[n]) for n in head for k in range(K))
    evaluated(fed, accuracies)
    assert sent(fed, "up") == sent(fed, "down") == set(fed.infos) - set(head)


def tune(state, k, r, epochs, trains):
    order, names = generator_for(SEED, r, k, "adapt"), [n for n in PARAMS if trains(n)]
    velocity = {n: torch.zeros_like(state[n]) for n in names}
    for _ in range(epochs):
        for batch in batches(SIZES[k], order):
            leaves = {n: state[n].clone().requires_grad_() for n in names}
            xb, yb = (t[batch] for t in DATA[k])
            loss = F.cross_entropy(forward(MODEL, {**state, **leaves}, xb), yb)
            for n, g in zip(names, torch.autograd.grad(loss, leaves.values()), strict=True):
                velocity[n] = MOMENTUM * velocity[n] + g + DECAY * state[n]
                state[n] = state[n] - LR * velocity[n]


@ways
@pytest.mark.parametrize(
    ("layers", "share_classifier", "sample", "threshold"),
    [(1, True, 0.8, 0.1), (2, True, 0.5, 1e-3), (3, False, 1.0, 5e-3)],
)
def test_fedala(layers, share_classifier, sample, threshold, participation, cohort):
    rate = 1.5
    settings = {"layers": layers, "sample": sample, "ala_lr": rate, "threshold": threshold}
    method = ff.methods.FedALA(share_classifier=share_classifier, **settings)
    fed = federation(method, normed, cohort=cohort, participation=participation)
    names = list(fed.infos)
    states = [{n: s[n] for n in names} for s in rows_of(fed)]
    top = [n for n in PARAMS if n[0] in ("7", "57", "1257")[layers - 1] and not kept(n, share_classifier)]
    weights = [{n: torch.ones_like(states[0][n]) for n in top} for _ in states]
    learned, seen, changed = [False] * K, 0, False

    def aggregate(k, own, state, order, weights, first):
        """Start from `own` moved towards the download in `state`."""
        some = torch.randperm(SIZES[k], generator=order)[: math.ceil(sample * SIZES[k])]
        x, y = (t[some] for t in DATA[k])
        weights, losses = dict(weights), []
        while True:
            total = 0.0
            for begin, end in spans(len(y)):
                at = {n: own[n] + (state[n] - own[n]) * weights[n] for n in top}
                leaves = {n: t.clone().requires_grad_() for n, t in at.items()}
                loss = F.cross_entropy(forward(MODEL, {**state, **leaves}, x[begin:end], False), y[begin:end])
                for n, g in zip(top, torch.autograd.grad(loss, leaves.values()), strict=True):
                    weights[n] = (weights[n] - rate * g * (state[n] - own[n])).clamp(0, 1)
                total += loss.item() * (end - begin) / len(y)
            losses.append(total)
            spread = statistics.stdev(losses[-10:]) if len(losses) > 10 else math.inf
            if not first or spread < threshold or len(losses) == 100:
                break
        return {n: own[n] + (state[n] - own[n]) * weights[n] for n in top}, weights, len(losses)

    before = {}
    for r, there, last in rounds_of(fed):
        shared = {n: mean_of(states, last, n) for n in names if not kept(n, share_classifier)} if last else {}
        for k in there:
            order, own = generator_for(SEED, r, k, "order"), dict(states[k])
            give([states[k]], shared)
            if last:
                adapted = aggregate(k, own, states[k], generator_for(SEED, r, k, "adapt"), weights[k], not learned[k])
                before[r, k] = accuracy(MODEL, {**states[k], **adapted[0]}, TESTS[k])
                merged, weights[k], epochs = aggregate(k, own, states[k], order, weights[k], not learned[k])
                states[k].update(merged)
                assert learned[k] == (epochs == 1)
                learned[k], seen = True, seen + 1
                changed |= any((w != 1).any() and (w > 0).any() for w in weights[k].values())
            for batch, velocity in epochs_of(k, order):
                leaves = {n: states[k][n].clone().requires_grad_() for n in PARAMS}
                xb, yb = (t[batch] for t in DATA[k])
                loss = F.cross_entropy(forward(MODEL, {**states[k], **leaves}, xb), yb)
                for n, g in zip(PARAMS, torch.autograd.grad(loss, leaves.values()), strict=True):
                    velocity[n] = MOMENTUM * velocity.get(n, 0) + g + DECAY * states[k][n]
                    states[k][n] = states[k][n] - LR * velocity[n]
    fed.fit(ROUNDS)
    assert seen and changed
    check(fed, states, names)
    for name in top:
        for k in range(K):
            torch.testing.assert_close(fed.states.state[f"ala/{name}"][k], weights[k][name], rtol=1e-7, atol=1e-9)
    found = {(row["round"], row["client"]): row["accuracy_before"] for row in fed.history if row["round"] > 1}
    assert found == pytest.approx(before)
    assert sent(fed, "up") == sent(fed, "down") == {n for n in names if not kept(n, share_classifier)}


def spans(n):
    """Batches in order; a last one of a single sample joins the one before it."""
    edges = [*range(0, n, BATCH), n]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        del edges[-2]
    return list(itertools.pairwise(edges))


def epochs_of(k, order):
    velocity = {}
    for _ in range(EPOCHS):
        for batch in batches(SIZES[k], order):
            yield batch, velocity


NAMES = ["scaffold", "fedadam", "pfedme", "ditto", "apfl", "moon", "fedbabu", "fedala"]


@pytest.mark.parametrize("name", NAMES)
def test_factorized_models_train(name):
    """A method that leaves the model as it is takes one that is factorized: alone and together, with L1 on μ."""

    def model():
        return ff.factorize(normed(), ff.Rank1())

    feds = [federation(ff.methods.make(name, l1=0.02), model, cohort=n, participation=0.5, epochs=1) for n in (1, 2)]
    for fed in feds:
        fed.fit(2)
        assert all(row["left_out"] is None for row in fed.history)
        assert all(math.isfinite(row["loss"]) for row in fed.history)
    for tensor_name, tensor in feds[0].states.state.items():
        torch.testing.assert_close(tensor, feds[1].states.state[tensor_name], rtol=1e-7, atol=1e-9, msg=tensor_name)


@pytest.mark.parametrize("name", ["apfl", "ditto"])
def test_two_models_do_not_train_on_different_supports(name):
    with pytest.raises(ValueError, match=rf"sparsity=\): {name} mixes tensors of one client"):
        federation(name, lambda: ff.factorize(mlp(), ff.Rank1()), sparsity=Schedule(warmup=1, target_density=0.5))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("scaffold", {"server_lr": 0.0}, r"scaffold\(server_lr=0.0\): must be above 0"),
        ("fedadam", {"beta1": 1.0}, r"fedadam\(beta1=1.0\): must be at least 0 and below 1"),
        ("fedadam", {"server_optimizer": "sgd"}, r"must be one of adam, yogi, adagrad"),
        ("fedadam", {"tau": 0.0}, r"tau=0.0"),
        ("pfedme", {"inner_steps": 0}, r"inner_steps=0"),
        ("ditto", {"prox": -0.1}, r"prox=-0.1"),
        ("ditto", {"personal_epochs": 1.5}, r"personal_epochs=1.5"),
        ("apfl", {"alpha": 1.5}, r"alpha=1.5"),
        ("moon", {"temperature": 0.0}, r"temperature=0.0"),
        ("fedbabu", {"finetune": "tail"}, r"must be one of all, body, head"),
        ("fedala", {"sample": 0.0}, r"sample=0.0"),
        ("fedala", {"layers": 0}, r"layers=0"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make(name, **settings)
