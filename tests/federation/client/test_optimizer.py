"""How clients step: against PyTorch's own optimizers in a loop over one client after another, in float64."""

import copy
import math

import pytest
import torch
from small import cnn, make_clients, mlp
from torch.nn import functional as F

import fastfact as ff
from fastfact.federation.client.data import batches
from fastfact.federation.client.optimizer import KEPT, rate
from fastfact.federation.client.step import Settings
from fastfact.federation.state import generator_for

SIZES = (10, 7, 12)


class Loop:
    """Stand-Alone as anybody would write it: a module and an optimizer of PyTorch for each client."""

    def __init__(self, fed: ff.Federation, clients, make, kept: bool, accumulate=1, norm=None, schedule=None):
        self.fed, self.clients, self.make, self.kept = fed, clients, make, kept
        self.accumulate, self.norm, self.schedule = accumulate, norm, schedule
        self.models = [copy.deepcopy(fed.template).train() for _ in clients]
        self.optimizers = [make(model.parameters()) for model in self.models]

    def round(self, round: int) -> None:
        s = self.fed.settings
        for k, (model, client) in enumerate(zip(self.models, self.clients, strict=True)):
            if not self.kept:
                self.optimizers[k] = self.make(model.parameters())
            optimizer, (x, y) = self.optimizers[k], client.train
            order = generator_for(s["seed"], round, k, "order")
            steps = batches(len(y), s["batch_size"])
            groups = [steps[i : i + self.accumulate] for i in range(0, len(steps), self.accumulate)]
            for epoch in range(s["epochs"]):
                permutation = torch.randperm(len(y), generator=order)
                for index, group in enumerate(groups):
                    optimizer.zero_grad()
                    samples = group[-1][1] - group[0][0]
                    for begin, end in group:
                        some = permutation[begin:end]
                        (F.cross_entropy(model(x[some]), y[some]) * ((end - begin) / samples)).backward()
                    if self.norm is not None:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), self.norm)
                    if self.schedule is not None:
                        done = epoch * len(groups) + index
                        for part in optimizer.param_groups:
                            part["lr"] = s["lr"] * self.schedule(round, done, s["epochs"] * len(groups))
                    optimizer.step()

    def error(self) -> float:
        """The largest difference of a parameter to that of the federation."""
        pairs = zip(self.models, self.fed.models, strict=True)
        each = (
            (p - q).detach().abs().max() for a, b in pairs for p, q in zip(a.parameters(), b.parameters(), strict=True)
        )
        return float(max(each))


def of_torch(name: str, lr: float, weight_decay: float):
    if name == "sgd":
        return lambda params: torch.optim.SGD(params, lr, momentum=0.8, weight_decay=weight_decay)
    cls = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    return lambda params: cls(params, lr, betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay)


def compared(make, name, cohort, kept, model=mlp, shape=(6,), rounds=3, participation=1.0, loop=None, **options):
    clients = make_clients(shape, SIZES)
    options = {"lr": 0.02, "momentum": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.03} | options
    states = "kept" if kept else "dropped"
    fed = make(
        model, method="stand-alone", clients=clients, cohort=cohort, optimizer=name, optimizer_states=states, **options
    )
    expected = Loop(fed, clients, of_torch(name, 0.02, 0.03), kept, **loop or {})
    fed.fit(rounds)
    for round in range(1, rounds + 1):
        expected.round(round)
    return expected.error()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("cohort", [1, 3, "threads"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_clients_step_as_with_the_optimizers_of_pytorch(make, name, cohort, kept):
    assert compared(make, name, cohort, kept) < 1e-13


@pytest.mark.parametrize("cohort", [1, 3])
def test_convolutions_and_norms_too(make, cohort):
    # Rounding of 10⁻¹⁶ in a gradient near zero moves a step by lr / ε times that, 2·10⁻¹².
    assert compared(make, "adamw", cohort, True, model=cnn, shape=(1, 5, 5), rounds=2) < 1e-10


def half_cosine(round, step, steps, rounds=3, warmup=0.4):
    """As the schedulers of language models count: `total` steps in all, of which the first `rise` rise."""
    total, at = rounds * steps, (round - 1) * steps + step
    rise = warmup * total
    return min(1.0, (at + 1) / rise) if at < rise else (1 + math.cos(math.pi * (at - rise) / (total - rise))) / 2


@pytest.mark.parametrize("cohort", [1, 3])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_schedule_clipping_and_accumulation(make, name, cohort):
    options = {"schedule": "cosine", "schedule_rounds": 3, "lr_warmup": 0.4, "max_grad_norm": 0.3, "accumulate": 2}
    loop = {"accumulate": 2, "norm": 0.3, "schedule": half_cosine}
    assert compared(make, name, cohort, True, loop=loop, **options) < 1e-13
    assert compared(make, name, cohort, True, loop=loop | {"norm": 0.2}, **options) > 1e-4
    assert compared(make, name, cohort, True, loop=loop | {"schedule": None}, **options) > 1e-4
    assert compared(make, name, cohort, True, loop=loop | {"accumulate": 1}, **options) > 1e-4


def test_batches_that_accumulate_are_one_batch(make):
    one = make(batch_size=6)
    two = make(batch_size=2, accumulate=3)
    one.fit(2), two.fit(2)
    for name, tensor in one.states.state.items():
        torch.testing.assert_close(two.states.state[name], tensor, rtol=0, atol=1e-14)


@pytest.mark.parametrize("cohort", [1, 2])
def test_a_killed_run_goes_on_with_the_same_bits(make, same, tmp_path, cohort):
    options = {"optimizer": "adamw", "optimizer_states": "kept", "schedule": "linear", "schedule_rounds": 4}
    options |= {"cohort": cohort, "participation": 0.7}
    whole = make(**options)
    whole.fit(4)
    make(**options).fit(2, out=tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", mlp, make_clients(sizes=SIZES))
    assert again.settings["optimizer"] == "adamw"
    again.fit(2)
    assert same(whole, again)
    counts = whole.states.state[f"{KEPT}count/0.weight"]
    taken = [sum(row["client"] == k for row in whole.history) for k in range(3)]
    # ⌈n / 4⌉ steps in each of two epochs.
    assert counts.tolist() == [times * 2 * steps for times, steps in zip(taken, (3, 2, 3), strict=True)]


def test_a_store_has_what_the_optimizer_keeps(make, same, tmp_path):
    options = {"optimizer": "adam", "optimizer_states": "kept", "participation": 0.7}
    here = make(**options)
    there = make(store=tmp_path / "store", **options)
    here.fit(3), there.fit(3)
    state = there.states.load(range(3))
    assert all(torch.equal(tensor, state[name]) for name, tensor in here.states.state.items())
    assert any(name.startswith(KEPT) and state[name].any() for name in state)


@pytest.mark.parametrize("cohort", [1, 3])
def test_moments_of_a_sparse_mu_follow_its_support(make, cohort):
    sparsity = ff.Schedule(warmup=1, target_density=0.3, regrow_every=1)
    options = {"optimizer": "adamw", "optimizer_states": "kept", "method": "factorized-fl-alpha"}
    fed = make(sparsity=sparsity, cohort=cohort, lr=0.01, **options)
    fed.fit(3)
    state = fed.states.state
    for name in fed.sparse:
        off = state[name] == 0
        assert (state[f"{KEPT}exp_avg/{name}"][off] == 0).all()
        assert (state[f"{KEPT}exp_avg_sq/{name}"][~off] > 0).float().mean() > 0.5


def test_bfloat16_changes_numbers_but_little(make):
    clients = [ff.Client(train=tuple(c.train), test=tuple(c.test)) for c in make_clients(sizes=SIZES)]
    build = lambda: mlp().float()  # noqa: E731
    found = {}
    for cohort in (1, 3):
        for precision in ("full", "bfloat16"):
            fed = make(build, clients=clients, cohort=cohort, precision=precision)
            fed.fit(2)
            found[cohort, precision] = fed.states.state["0.weight"]
            assert fed.states.state["0.weight"].dtype == torch.float32
    for cohort in (1, 3):
        error = (found[cohort, "bfloat16"] - found[cohort, "full"]).abs().max()
        # 2⁻⁸ of each product; the weights moved by some tenths.
        assert 1e-6 < error < 0.02
    torch.testing.assert_close(found[1, "bfloat16"], found[3, "bfloat16"], rtol=0, atol=0.02)


def test_adaptation_before_an_evaluation_takes_a_step_of_sgd(make):
    options = {"method": "per-fedavg", "settings": {"alpha": 0.5}, "epochs": 1, "lr": 1e-12, "weight_decay": 0.0}
    plain, adam = make(**options), make(**options, optimizer="adam")
    plain.fit(1), adam.fit(1)
    assert [row["accuracy"] for row in plain.history] == [row["accuracy"] for row in adam.history]


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("optimizer", "lion", "one of sgd, adam, adamw"),
        ("beta2", 1.0, "at least 0 and below 1"),
        ("optimizer_states", "yes", "one of dropped, kept"),
        ("schedule", "steps", "one of constant, linear, cosine"),
        ("lr_warmup", 1.0, "at least 0 and below 1"),
        ("max_grad_norm", 0.0, "above 0"),
        ("accumulate", 0, "at least 1"),
        ("precision", "float16", "one of full, bfloat16"),
    ],
)
def test_settings_out_of_range_are_refused(make, setting, value, rule):
    with pytest.raises(ValueError, match=rf"Federation\({setting}={value!r}\): must be {rule}"):
        make(**{setting: value})


def test_the_learning_rate_of_each_step():
    settings = Settings(1, 1.0, 0.0, 0.0, schedule="linear", lr_warmup=0.5)
    assert [rate(settings, 7, step, 4) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]
    settings = Settings(1, 1.0, 0.0, 0.0, schedule="cosine", schedule_rounds=2)
    assert [round(rate(settings, r, s, 2), 3) for r in (1, 2, 3) for s in (0, 1)] == [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    settings = Settings(1, 1.0, 0.0, 0.0, schedule_rounds=4, lr_warmup=0.5)
    assert [rate(settings, r, 0, 1) for r in (1, 2, 3, 9)] == [0.5, 1.0, 1.0, 1.0]
