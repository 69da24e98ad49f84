"""FedProx, the methods that share a fixed part of the model, and FedPara against plain loops."""

import pytest
from baseline_loop import EPOCHS, average, check, clients, federation, forward, give, mlp, normed, rows_of, sent, train
from torch.nn import functional as F

import fastfact as ff

ROUNDS = 3


def run(fed, model, shared, phases=None, loss=None):
    """FedAvg of the tensors named `shared`, everything else personal. loss(downloads, state, x, y) if given."""
    states, data = rows_of(fed), [client.train for client in clients()]
    for r in range(1, ROUNDS + 1):
        if r > 1:
            give(states, {name: average(states, name) for name in states[0] if shared(name)})
        for k, state in enumerate(states):
            start = dict(state)
            objective = None if loss is None else lambda s, x, y, start=start: loss(start, s, x, y)
            train(model, state, data[k], r, k, phases, objective)
    return states


def body(name):
    return not name.startswith("7.")


CASES = {
    "fedper": ({}, body, None),
    "fedper-2": ({"personal_layers": 2}, lambda n: n[0] in "12", None),
    "lg-fedavg": ({}, lambda n: n[0] in "57", None),
    "lg-fedavg-1": ({"global_layers": 1}, lambda n: n[0] == "7", None),
    "lg-fedavg-p": ({"share_classifier": False}, lambda n: n[0] == "5", None),
    "fedrep": ({}, body, [(EPOCHS, lambda n: not body(n)), (1, body)]),
    "fedrep-3": ({"head_epochs": 3, "body_epochs": 2}, body, [(3, lambda n: not body(n)), (2, body)]),
    "fedper-first": ({"head_first": 1}, body, [(1, lambda n: not body(n)), (EPOCHS - 1, lambda n: True)]),
    "fedbn": ({}, lambda n: n[0] != "2", None),
    "fedbn-p": ({"share_norm": True, "share_norm_statistics": True}, lambda n: n[0] != "2", None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fixed_part_is_shared(case):
    settings, shared, phases = CASES[case]
    name = case if case in ff.methods.names() else case.rpartition("-")[0]
    fed = federation(ff.methods.make(name, **settings), normed)
    expected = run(fed, normed(), shared, phases)
    fed.fit(ROUNDS)
    check(fed, expected)
    names = {name for name in fed.infos if shared(name)}
    assert sent(fed, "up") == sent(fed, "down") == names


def test_no_more_epochs_for_the_classifier_than_there_are():
    for method in (ff.methods.FedAvg(head_first=EPOCHS + 1), ff.methods.FedDecomp(head_first=EPOCHS + 1)):
        with pytest.raises(ValueError, match=rf"head_first={EPOCHS + 1}\): must be at most the {EPOCHS} local epochs"):
            federation(method, normed)


OWN_TRAINING = [
    *("agnostic-fl", "apfl", "ditto", "fedala", "fedbabu", "fedem", "fedrod", "flora", "per-fedavg", "pfedme")
]


@pytest.mark.parametrize("name", ff.methods.names())
def test_methods_whose_classifier_cannot_train_first(name):
    if name in OWN_TRAINING:
        with pytest.raises(ValueError, match=rf"{name}\(head_first=1\): must be 0, nothing can train before"):
            ff.methods.make(name, head_first=1)
    else:
        assert ff.methods.make(name, head_first=1).head_first == 1


def test_fedprox_takes_the_letter_of_its_paper():
    assert ff.methods.make("fedprox", mu=0.7) == ff.methods.FedProx(prox=0.7)


@pytest.mark.parametrize("prox", [0.0, 0.7])
@pytest.mark.parametrize("share_classifier", [True, False])
def test_fedprox(prox, share_classifier):
    model = normed()

    def shared(name):
        return share_classifier or body(name)

    def loss(start, state, x, y):
        params = [name for name, _ in model.named_parameters() if shared(name)]
        distance = sum(((state[name] - start[name]) ** 2).sum() for name in params)
        return F.cross_entropy(forward(model, state, x), y) + prox / 2 * distance

    fed = federation(ff.methods.FedProx(prox=prox, share_classifier=share_classifier), normed)
    expected = run(fed, model, shared, loss=loss)
    fed.fit(ROUNDS)
    check(fed, expected)


@pytest.mark.parametrize("personalized", [False, True])
def test_fedpara(personalized):
    """W = (x1 y1ᵀ) ⊙ (x2 y2ᵀ [+ 1]) written out; all four factors are averaged, or x1 and y1 only."""
    fed = federation(ff.methods.make("pfedpara" if personalized else "fedpara"))

    def loss(start, state, x, y):
        for layer in (0, 2, 4):
            x1, y1, x2, y2 = (state[f"{layer}.{role}"] for role in ("x1", "y1", "x2", "y2"))
            weight = (x1 @ y1.T) * (x2 @ y2.T + int(personalized))
            x = x @ weight.T + state[f"{layer}.bias"]
            x = F.relu(x) if layer < 4 else x
        return F.cross_entropy(x, y)

    expected = run(fed, fed.template, lambda n: not personalized or n[2:] not in ("x2", "y2"), loss=loss)
    fed.fit(ROUNDS)
    check(fed, expected)
    personal = {f"{layer}.{role}" for layer in (0, 2, 4) for role in ("x2", "y2")} if personalized else set()
    assert sent(fed, "up") == sent(fed, "down") == set(fed.infos) - personal


@pytest.mark.parametrize("personalized", [False, True])
def test_fedpara_with_tensors(personalized):
    """Proposition 3: the second factors stay, their core too; linear layers are as without."""
    fed = federation(ff.methods.make("pfedpara" if personalized else "fedpara", tensor=True), normed)
    of_second = {n for n in fed.infos if n.rpartition(".")[2] in ("t2", "x2", "y2")}
    assert any(n.endswith("t2") for n in of_second) == any(len(i.shape) == 4 for i in fed.infos.values())
    assert set(fed.shared) == set(fed.infos) - (of_second if personalized else set())
    fed.fit(2)
    assert all(row["left_out"] is None for row in fed.history)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("fedpara", ff.Rank1()),
        ("pfedpara", ff.LowRank(rank=2)),
        ("fedpara", ff.Hadamard(personalized=True)),
        ("pfedpara", ff.Hadamard()),
    ],
)
def test_fedpara_needs_its_own_layers(name, spec):
    needed = rf"{name}: .*it needs ff\.Hadamard\(personalized={name == 'pfedpara'}\) layers"
    with pytest.raises(ValueError, match=needed):
        federation(name, lambda: ff.factorize(mlp(), spec))
    federation(name, lambda: ff.factorize(mlp(), ff.Hadamard(personalized=name == "pfedpara"), skip=["4"])).fit(1)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedprox", {"prox": -1.0}, r"fedprox\(prox=-1.0\)"),
        ("fedper", {"personal_layers": 0}, r"personal_layers=0"),
        ("fedper", {"personal_layers": 1.5}, r"personal_layers=1.5"),
        ("lg-fedavg", {"global_layers": True}, r"global_layers=True"),
        ("fedrep", {"head_epochs": -1}, r"head_epochs=-1"),
        ("fedavg", {"head_first": -1}, r"head_first=-1"),
        ("fedrep", {"body_epochs": None}, r"body_epochs=None"),
        ("fedpara", {"ratio": 1.5}, r"ratio=1.5"),
    ],
)
def test_bad_settings(name, settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make(name, **settings)


def test_more_layers_than_there_are():
    for name, setting in (("fedper", "personal_layers"), ("lg-fedavg", "global_layers")):
        with pytest.raises(ValueError, match=rf"{setting}=3\): must be below the model's 3 layers"):
            federation(ff.methods.make(name, **{setting: 3}))
