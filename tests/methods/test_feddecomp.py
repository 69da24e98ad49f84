from dataclasses import replace

import pytest
import torch
from paper_loop import EPOCHS, SIZES, check, federation, is_statistic, rows_of, train
from torch import nn

import fastfact as ff


def weight(state, layer):
    """eq. 2 and 3: σ + B A, stored [in, out] in the paper."""
    return state[f"{layer}.sigma"] + (state[f"{layer}.B"] @ state[f"{layer}.A"]).T


def low(name):
    return name.endswith((".A", ".B"))


def full(name):
    return not low(name)


def algorithm_1(states, data, rounds, phases, shared):
    """Algorithm 1, its step order as printed: initialise with σ̄, train, average."""
    for r in range(1, rounds + 1):
        for k, state in enumerate(states):
            train(state, data[k].train, r, k, weight, phases)
        average = {}
        for name in filter(shared, states[0]):
            mean = sum(state[name].double() for state in states) / len(states)
            average[name] = mean.round().long() if name.endswith("tracked") else mean
        if r < rounds:
            for state in states:
                state.update({name: tensor.clone() for name, tensor in average.items()})
    return states


CASES = {
    "alternating": ({"lora_epochs": 2}, [(2, low), (EPOCHS - 2, full)], full),
    "two fifths of the epochs": ({}, [(1, low), (EPOCHS - 1, full)], full),
    "simultaneous": ({"training": "simultaneous"}, [(EPOCHS, lambda n: True)], full),
    "reverse": ({"shared": "low-rank"}, [(1, low), (EPOCHS - 1, full)], low),
    "both": ({"shared": "both", "training": "simultaneous"}, [(EPOCHS, lambda n: True)], lambda n: True),
    "none": ({"shared": "none"}, [(1, low), (EPOCHS - 1, full)], lambda n: False),
    "no low-rank phase": ({"lora_epochs": 0}, [(EPOCHS, full)], full),
    "only the low-rank phase": ({"lora_epochs": EPOCHS}, [(EPOCHS, low)], full),
    "no norm, no classifier": (
        {"share_classifier": False, "share_norm": False, "share_norm_statistics": False},
        [(1, low), (EPOCHS - 1, full)],
        lambda n: full(n) and not n.startswith(("norm", "head")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_against_algorithm_1(case):
    settings, phases, shared = CASES[case]
    fed = federation(ff.methods.FedDecomp(ratio=0.5, linear_ratio=0.4, **settings))
    expected = rows_of(fed)
    fed.fit(3)
    check(fed, algorithm_1(expected, fed.clients, 3, phases, shared))
    assert {n for n in fed.infos if n in fed.shared} == set(filter(shared, fed.infos))


@pytest.mark.parametrize("layout", ["separable", "view"])
def test_factors_scaled_as_lora_code_does(layout, tmp_path):
    def network():
        return nn.Sequential(nn.Conv2d(1, 6, (2, 3), padding=1), nn.Flatten(), nn.Linear(6 * 3 * 3, 3)).double()

    g = torch.Generator().manual_seed(0)
    clients = [
        ff.Client(*[(torch.randn(n, 1, 2, 3, generator=g, dtype=torch.float64), torch.arange(n) % 3) for n in (6, 3)])
        for _ in range(2)
    ]
    method = ff.methods.FedDecomp(ratio=0.8, linear_ratio=0.7, layout=layout, lora_alpha=3.0)
    fed = ff.Federation(network, clients, method, epochs=2, batch_size=3, lr=0.1, seed=0)
    fed.fit(2, tmp_path)
    # R = max(1, round(.8 · min(6, 1))) of the convolution, round(.7 · min(3, 54)) of the linear layer.
    for layer, rank in zip(ff.factorized_layers(fed.models[0]).values(), (1, 2), strict=True):
        scaled = layer.weight - layer.sigma
        layer.spec = replace(layer.spec, scaling=1.0)
        once = layer.weight - layer.sigma
        assert once.abs().max() > 1e-4
        torch.testing.assert_close(scaled, 3.0 / rank * once)
    loaded = ff.Federation.load(tmp_path, network, clients)
    assert [layer.spec.scaling for layer in ff.factorized_layers(loaded.models[0]).values()] == [3.0, 1.5]
    assert "lora_alpha" in loaded.method.settings()


def test_the_mean_is_plain_and_over_those_that_reported():
    """Sizes differ, so a mean weighted by samples would be another one (eq. 7); two of four clients a round."""
    fed = federation("feddecomp", participation=0.5)
    fed.fit(3)
    last = fed.reported.clients
    assert len(last) == 2 and len({SIZES[k] for k in last}) == 2
    expected = fed.states.state["first.sigma"][last].mean(0)
    for model in fed.mixed():
        torch.testing.assert_close(model.first.sigma.detach(), expected, rtol=1e-12, atol=1e-14)
    kept = fed.states.state["first.A"]
    assert all(torch.equal(model.first.A, kept[k]) for k, model in enumerate(fed.mixed()))


def test_it_starts_as_the_dense_model_and_without_low_rank_phase_is_fedavg():
    """§3.4: E_lora = 0 degenerates to FedAvg; with equal n_k the plain mean is FedAvg's."""
    from paper_loop import clients

    data = [ff.Client(train=(c.train[0][:6], c.train[1][:6]), test=c.test) for c in clients()]
    decomposed = federation(ff.methods.FedDecomp(lora_epochs=0), data=data)
    plain = federation("fedavg", data=data)
    for k, model in enumerate(decomposed.models):
        assert torch.equal(ff.densify(model).first.weight, plain.models[k].first.weight)
    decomposed.fit(3)
    plain.fit(3)
    for ours, theirs in zip(decomposed.models, plain.models, strict=True):
        for (name, a), b in zip(ff.densify(ours).state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=name)


def test_ranks_and_what_travels():
    """R_c for convolutions, R_l for linear layers; up and down go σ and what is not decomposed, as many as FedAvg's."""

    def model():
        return nn.Sequential(nn.Conv2d(4, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)).double()

    g = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, 4, 4, generator=g, dtype=torch.float64)
    data = [ff.Client(train=(x, torch.arange(8) % 3), test=(x, torch.arange(8) % 3)) for _ in range(2)]
    fed = federation(ff.methods.FedDecomp(ratio=0.75, linear_ratio=0.4), model, data)
    shapes = {name: info.shape for name, info in fed.infos.items()}
    # eq. 4: r = .75 · min(4, 10) · 3 = 9; eq. 3: round(.4 · 3) = 1.
    assert shapes["0.B"] == (4 * 3, 9) and shapes["0.A"] == (9, 10 * 3)
    assert shapes["3.B"] == (40, 1) and shapes["3.A"] == (1, 3)
    fed.fit(2)
    plain = federation("fedavg", model, data)
    plain.fit(2)
    assert set(fed.ledger.by_name("up")) - {"(frame)"} == {"0.sigma", "0.bias", "3.sigma", "3.bias"}
    assert fed.ledger.numbers("up") == plain.ledger.numbers("up") == fed.ledger.numbers("down")


def test_two_of_five_epochs_train_the_low_rank_part():
    epochs = {e: [phase.epochs for phase in ff.methods.FedDecomp().phases(e)] for e in (1, 2, 3, 5, 10)}
    assert epochs == {1: [0, 1], 2: [1, 1], 3: [1, 2], 5: [2, 3], 10: [4, 6]}


def test_a_frozen_part_does_not_move():
    for lora_epochs, part in ((EPOCHS, full), (0, low)):
        fed = federation(ff.methods.FedDecomp(lora_epochs=lora_epochs))
        before = {n: t.clone() for n, t in fed.states.state.items()}
        fed.fit(1)
        for name in fed.infos:
            moved = not torch.equal(before[name], fed.states.state[name])
            assert moved == (is_statistic(name) or not part(name)), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_epochs": -1}, r"feddecomp\(lora_epochs=-1\): must be an integer of at least 0"),
        ({"lora_epochs": 1.5}, r"lora_epochs=1.5"),
        ({"lora_alpha": 0.0}, r"lora_alpha=0.0\): must be a number above 0, or None"),
        ({"training": "both"}, r"training='both'"),
        ({"shared": "sigma"}, r"shared='sigma'.*full-rank, low-rank, both, none"),
        ({"ratio": 0.0}, r"ratio=0.0"),
        ({"linear_ratio": 1.2}, r"linear_ratio=1.2"),
        ({"layout": "kernel"}, r"layout='kernel'"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ff.methods.make("feddecomp", **settings)


def test_more_low_rank_epochs_than_epochs_is_an_error_before_any_work():
    with pytest.raises(ValueError, match=r"feddecomp\(lora_epochs=4\): must be at most the 3 local epochs"):
        federation(ff.methods.FedDecomp(lora_epochs=4))
    with pytest.raises(ValueError, match="has no factors A and B"):
        federation("feddecomp", lambda: ff.factorize(nn.Linear(6, 3).double(), ff.Rank1()))


def test_layers_that_are_left_whole():
    fed = federation(ff.methods.FedDecomp(skip=("sec*",)))
    assert "second.weight" in fed.infos and "second.sigma" not in fed.infos and "first.sigma" in fed.infos
    assert "second.weight" in fed.shared
    with pytest.raises(ValueError, match=r"feddecomp\(skip=\['third'\]\): third is the path of no module"):
        federation(ff.methods.FedDecomp(skip=["third"]))
    with pytest.raises(ValueError, match=r"skip='first'.*list of paths"):
        ff.methods.FedDecomp(skip="first")
