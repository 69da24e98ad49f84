import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fastfact as ff
from fastfact.federation.tensors import tensors_of
from fastfact.nn import choice

# One for each kind of round; tests/methods has what holds for every method.
METHODS = ["clustered-fl", "factorized-fl-alpha", "factorized-fl-beta", "fedamp", "fedavg", "fedfac-dynamic", "simfed"]


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_give_the_same_bits(make, same, method):
    first, second = (make(make.cnn, (1, 6, 6), method=method) for _ in range(2))
    first.fit(3)
    torch.rand(7)  # The global generator plays no part.
    second.fit(3)
    assert same(first, second)
    other = make(make.cnn, (1, 6, 6), method=method, seed=4)
    other.fit(3)
    assert not same(first, other)


@pytest.mark.parametrize("method", METHODS)
def test_the_order_in_which_clients_run_does_not_matter(make, same, method, monkeypatch):
    plain = make(method=method)
    plain.fit(3)
    turned = make(method=method, cohort=1)
    original = ff.Federation._train

    def backwards(self, round, clients, work, on_client):
        flipped = {name: tensor.flip(0) for name, tensor in work.items()}
        losses, seconds = original(self, round, clients[::-1], flipped, on_client)
        for name, tensor in flipped.items():
            work[name].copy_(tensor.flip(0))
        return losses[::-1], seconds[::-1]

    monkeypatch.setattr(ff.Federation, "_train", backwards)
    turned.fit(3)
    assert same(plain, turned)


def test_global_generator_is_left_alone(make):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make().fit(1)
    assert torch.equal(torch.rand(3), expected)


def test_stand_alone_is_plain_sgd_on_each_client(make):
    """Against torch.optim.SGD and autograd on models of their own, on the same batches."""
    fed = make(make.cnn, (1, 6, 6), method="stand-alone", sizes=(10, 9, 4))
    start = [copy.deepcopy(model) for model in fed.models]
    fed.fit(2)
    for k, model in enumerate(start):
        model.train()
        x, y = fed.clients[k].train
        for round in (1, 2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            order = ff.federation.state.generator_for(3, round, k, "order")
            losses = []
            for _ in range(2):
                permutation = torch.randperm(len(y), generator=order)
                # A last batch of one joins the one before it: 9 samples in batches of 4 are 4 and 5.
                for batch in permutation.split(4) if len(y) % 4 != 1 else permutation.split([4, 5]):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item() * len(batch))
            row = next(row for row in fed.history if (row["round"], row["client"]) == (round, k))
            assert math.isclose(row["loss"], sum(losses) / (2 * len(y)), rel_tol=1e-9)
        for name, tensor in tensors_of(model).items():
            torch.testing.assert_close(fed.states.state[name][k], tensor.detach(), rtol=1e-10, atol=1e-12)
        model.eval()
        accuracy = (model(fed.clients[k].test[0]).argmax(1) == fed.clients[k].test[1]).double().mean().item()
        assert row["accuracy"] == pytest.approx(accuracy)
    assert fed.ledger.up == fed.ledger.down == 0
    assert {row["accuracy_before"] for row in fed.history} == {None}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (10, 7, 12, 1), (5, 9, 6)])
def test_a_cohort_computes_what_one_client_at_a_time_does(make, method, sizes):
    """Different numbers of samples: batches of 4, of 2, of 3, a merged one of 5, clients that finish early."""
    runs = {}
    for cohort in (1, 2, len(sizes)):
        fed = runs[cohort] = make(make.mlp, method=method, sizes=sizes, cohort=cohort, augment=jitter)
        fed.fit(2)
    for cohort in (2, len(sizes)):
        for name, tensor in runs[1].states.state.items():
            torch.testing.assert_close(runs[cohort].states.state[name], tensor, rtol=1e-10, atol=1e-10)
        for row, other in zip(runs[1].history, runs[cohort].history, strict=True):
            assert math.isclose(row["loss"], other["loss"], rel_tol=1e-9)


def jitter(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def test_a_cohort_keeps_batch_norm_statistics_apart(make):
    runs = [make(make.cnn, (1, 6, 6), sizes=(10, 7, 5), method="factorized-fl-alpha", cohort=n) for n in (1, 3)]
    for fed in runs:
        fed.fit(2)
    one, three = (fed.states.state for fed in runs)
    assert not torch.equal(one["1.running_mean"][0], one["1.running_mean"][1])
    # Two rounds of two epochs of 10, 7 and 5 samples in batches of 4; 5 = 4 + 1 is one merged batch.
    assert one["1.num_batches_tracked"].tolist() == [12, 8, 4]
    for name, tensor in one.items():
        torch.testing.assert_close(three[name], tensor, rtol=1e-10, atol=1e-10)


def test_participation(make):
    fed = make(sizes=(6,) * 10, participation=0.3)
    fed.fit(8)
    drawn = [sorted(row["client"] for row in fed.history.of(r)) for r in fed.history.rounds()]
    assert all(len(clients) == 3 for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 1
    assert [make(sizes=(6,) * 10, participation=0.3).select(r) for r in range(1, 9)] == drawn
    assert len(make(sizes=(6,) * 10, participation=0.01).select(1)) == 1


def test_a_client_that_does_not_take_part_does_not_change(make):
    fed = make(sizes=(6,) * 6, participation=0.5)
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    fed.fit(1)
    took_part = {row["client"] for row in fed.history}
    for k in range(6):
        same = all(torch.equal(tensor[k], fed.states.state[name][k]) for name, tensor in before.items())
        assert same == (k not in took_part)


def test_who_missed_the_last_round_starts_from_its_average(make):
    """FedAvg with partial participation: everybody of a round starts it from one and the same model."""
    fed = make(sizes=(4, 5, 6, 7, 8), participation=0.4)
    fed.fit(2)
    last, n = fed.reported.clients, torch.tensor([4.0, 5, 6, 7, 8], dtype=torch.float64)
    missed = next(k for k in range(5) if k not in last)
    mixed = fed.mixed()
    for name, tensor in fed.states.state.items():
        average = sum(n[k] * tensor[k] for k in last) / n[last].sum()
        for k in (missed, last[0]):
            torch.testing.assert_close(tensors_of(mixed[k])[name].detach(), average, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("after_mix", ["threshold", "support"])
def test_who_missed_the_last_round_has_mu_after_the_mix_too(make, after_mix):
    method = ff.methods.FactorizedFedAvg(after_mix=after_mix, l1=0.02)
    fed = make(sizes=(4, 5, 6, 7), participation=0.5, method=method)
    fed.fit(3)
    last, n = fed.reported.clients, torch.tensor([4.0, 5, 6, 7], dtype=torch.float64)
    assert len(last) == 2
    state, draw = fed.states.state, torch.Generator().manual_seed(0)
    for name in ("0.mu", "2.mu"):
        state[name] *= torch.rand(state[name].shape, generator=draw) < 0.6
    fed.states.store(range(4), state)
    fed.states.commit()
    mixed = fed.mixed()
    for name in ("0.mu", "2.mu"):
        average = sum(n[k] * state[name][k] for k in last) / n[last].sum()
        for k in range(4):
            kept = state[name][k] != 0 if after_mix == "support" else average.abs() > 0.02
            found = tensors_of(mixed[k])[name].detach()
            torch.testing.assert_close(found, average * kept, rtol=1e-12, atol=1e-12)
        assert ((average != 0) & (average.abs() <= 0.02)).any()
    # What is counted is what was downloaded: zeros of μ cost a bit.
    models = {name: torch.stack([tensors_of(model)[name].detach() for model in mixed]) for name in fed.shared}
    sizes = fed.wire.roundtrip(models, fed.shared)[1]
    fed.fit(1)
    down = {row["client"]: row["bytes_down"] for row in fed.history.of(4)}
    assert set(down) - set(last) and down == {k: sizes.total(k) for k in down}


class Poison:
    """An augmentation that puts NaN into the batches of the client whose first number it knows."""

    def __init__(self, mark):
        self.mark, self.on = mark, True

    def __call__(self, x, generator):
        return torch.where(torch.tensor(self.on) & (x == self.mark).any(), torch.nan, x)


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_client_with_nan_is_left_out_of_the_round(make, caplog, cohort):
    clients = make.clients(sizes=(4, 4, 4))
    poison = Poison(clients[1].train[0][0, 0])
    poison.on = False
    fed = make(clients=clients, augment=poison, cohort=cohort)
    fed.fit(1)
    poison.on = True
    before = {name: tensor[1].clone() for name, tensor in fed.states.state.items()}
    fed.fit(1)
    bad = fed.history.of(2)[1]
    assert "NaN" in bad["left_out"] and bad["loss"] is None and bad["bytes_up"] > 0
    assert [row["left_out"] for row in fed.history.of(2)][::2] == [None, None]
    assert "client 1 is left out" in caplog.text
    for name, tensor in fed.states.state.items():
        assert torch.equal(tensor[1], before[name]), name
        assert tensor.isfinite().all()
    # The next download is the average of the two others, for all three.
    poison.on = False
    mixed = fed.mixed()
    for name, tensor in fed.states.state.items():
        for k in range(3):
            torch.testing.assert_close(tensors_of(mixed[k])[name].detach(), (tensor[0] + tensor[2]) / 2)
    fed.fit(1)
    assert [row["left_out"] for row in fed.history.of(3)] == [None] * 3


def test_a_client_with_a_huge_upload_is_left_out(make):
    plain = make()
    plain.fit(1)
    moved = {name: tensor - plain.initial[name] for name, tensor in plain.states.state.items()}
    norms = [sum(t[k].square().sum() for t in moved.values()).sqrt().item() for k in range(3)]
    worst = max(range(3), key=norms.__getitem__)
    fed = make(max_norm=sorted(norms)[1] + 1e-9)
    fed.fit(1)
    assert ["upload" in (row["left_out"] or "") for row in fed.history] == [k == worst for k in range(3)]


def test_a_round_without_any_good_client_changes_nothing(make):
    fed = make(max_norm=1e-9)
    before = {name: tensor.clone() for name, tensor in fed.states.state.items()}
    fed.fit(2)
    assert all(row["left_out"] for row in fed.history)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fed.states.state.items())


def test_an_interrupted_round_has_not_happened(make, same):
    fed, straight = make(), make()
    straight.fit(2)
    fed.fit(1)

    def stop(round, client, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fed.fit(1, on_client=stop)
    fed.fit(1)
    assert same(fed, straight)


def test_callbacks_see_every_client_row_and_round(make):
    seen = []
    fed = make()
    fed.fit(
        2,
        on_client=lambda *a: seen.append(("client", *a)),
        on_row=lambda row: seen.append(("row", row["round"], row["client"])),
        on_round=lambda round, rows: seen.append(("round", round, len(rows))),
    )
    one = lambda r: [("client", r, k, k + 1, 3) for k in range(3)] + [("row", r, k) for k in range(3)]  # noqa: E731
    assert seen == [*one(1), ("round", 1, 3), *one(2), ("round", 2, 3)]


def test_history_as_a_data_frame(make):
    history = make(method="factorized-fl-beta").fit(2)
    frame = history.to_pandas()
    assert list(frame.columns) == list(history[0]) and len(frame) == 6
    means = frame.groupby("round")["accuracy"].mean()
    assert means.tolist() == pytest.approx([mean for _, mean, _ in history.curve()])


def test_history_rows_and_helpers(make):
    fed = make(method="factorized-fl-beta", l1=0.005)
    history = fed.fit(2)
    keys = {"round", "client", "loss", "accuracy", "density", "bytes_up", "bytes_down", "seconds"}
    assert all(keys <= set(row) for row in history)
    assert history.rounds() == [1, 2] and [row["client"] for row in history.last()] == [0, 1, 2]
    (_, mean, std), (_, last, _) = history.curve()
    first = [row["accuracy"] for row in history.of(1)]
    assert mean == pytest.approx(sum(first) / 3)
    assert std == pytest.approx(torch.tensor(first, dtype=torch.float64).std(correction=0).item())
    assert last == pytest.approx(sum(row["accuracy"] for row in history.last()) / 3)
    assert history.total("bytes_up") == fed.ledger.up and history.total("bytes_down") == fed.ledger.down
    mu = [name for name in fed.states.state if name.endswith("mu")]
    nonzeros = sum((fed.states.state[name][2] != 0).sum().item() for name in mu)
    assert history[-1]["density"] == pytest.approx(nonzeros / (6 * 8 + 8 * 5 + 5 * 3))
    assert 0 < history[-1]["density"] < 1
    assert set(fed.density()) == {"0", "2", "4"}
    assert fed.density()["2"][2] == pytest.approx((fed.states.state["2.mu"][2] != 0).double().mean().item())
    assert {row["density"] for row in make().fit(1)} == {None}


def test_models_are_copies(make):
    fed = make(make.cnn, (1, 6, 6))
    fed.fit(1)
    assert len(fed.models) == 3 and len(fed.models[:2]) == 2
    model = fed.models[-1]
    assert not model.training
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, fed.states.state[name][2])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert fed.states.state["0.weight"].abs().sum() > 0 and fed.models[2][0].weight.abs().sum() > 0
    with pytest.raises(IndexError):
        fed.models[3]


def test_models_after_an_interrupt_in_the_middle_of_a_phase(make):
    calls = []

    def stop(x, generator):
        calls.append(x)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return x

    fed = make(method="fedrep", augment=stop)
    with pytest.raises(KeyboardInterrupt):
        fed.fit(9)
    assert fed.round > 0 and all(parameter.requires_grad for parameter in fed.template.parameters())
    # While a client trains they are asked for, too.
    fed.template[0].weight.requires_grad_(False)
    for k, model in enumerate(fed.models):
        assert all(torch.equal(tensor, fed.states.state[name][k]) for name, tensor in model.state_dict().items())


def test_similarity(make):
    fed = make(method="factorized-fl-alpha")
    fed.fit(1)
    v = fed.states.state["2.v"].flatten(1)
    expected = [[torch.nn.functional.cosine_similarity(a, b, dim=0).item() for b in v] for a in v]
    torch.testing.assert_close(fed.similarity(), torch.tensor(expected, dtype=torch.float64))
    u = fed.states.state["0.u"].flatten(1)
    expected = torch.nn.functional.cosine_similarity(u[0], u[1], dim=0)
    torch.testing.assert_close(fed.similarity("u", layer=1)[0, 1], expected)
    with pytest.raises(ValueError, match="name='w', layer=2"):
        fed.similarity("w")
    dense = make()
    assert torch.allclose(dense.similarity(), torch.ones(3, 3, dtype=torch.float64))


def test_similarity_where_the_layer_before_the_classifier_is_frozen(make):
    for layers, name in (((2,), "0.weight"), ((0, 2), "4.weight")):
        fed = make(lambda layers=layers: frozen(make, *layers))
        fed.fit(1)
        a, b = fed.states.state[name][:2].flatten(1)
        torch.testing.assert_close(fed.similarity()[0, 1], torch.nn.functional.cosine_similarity(a, b, dim=0))
    with pytest.raises(ValueError, match=r"layer=2.*must be one of none in that layer"):
        fed.similarity(layer=2)


def test_a_map_style_dataset_is_the_same_as_its_tensors(make, same):
    class Pairs:
        def __init__(self, x, y):
            self.x, self.y = x.numpy(), y

        def __len__(self):
            return len(self.y)

        def __getitem__(self, i):
            return self.x[i], int(self.y[i])

    tensors = make.clients()
    datasets = [ff.Client(train=Pairs(*c.train), test=Pairs(*c.test)) for c in tensors]
    first, second = make(clients=tensors), make(clients=datasets)
    first.fit(1)
    second.fit(1)
    assert same(first, second)


def test_federations_on_two_threads_repeat_their_numbers(make):
    """A process has one generator for modules' initialisation, and for what draws from it in a forward pass."""

    class Draws(nn.Module):
        def forward(self, x):
            for _ in range(3 * self.training):
                time.sleep(0.002)
                x = x + torch.rand(())
            return x

    def model():
        layers = []
        for _ in range(3):
            time.sleep(0.01)
            layers.append(nn.Linear(6, 6))
        return nn.Sequential(*layers, Draws(), nn.Linear(6, 3)).double()

    def train(seed: int) -> list[torch.Tensor]:
        fed = make(model, (6,), sizes=(8, 8), seed=seed, cohort=1)
        fed.fit(1)
        return [tensor.clone() for tensor in fed.states.state.values()]

    alone = [train(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(train, (1, 2)))
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


def test_dropout_draws_from_the_clients_own_stream(make, same):
    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()

    first, second = (make(model, method="stand-alone") for _ in range(2))
    first.fit(1)
    torch.manual_seed(99)
    second.fit(1)
    assert same(first, second)


@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-beta", "fedfac-dynamic"])
def test_accuracies_as_downloaded_are_those_of_the_next_round(make, method):
    fed = make(make.cnn, (1, 6, 6), method=method)
    fed.fit(2)
    before = fed.accuracies_as_downloaded()
    bytes_before, states = fed.ledger.up + fed.ledger.down, fed.states.load(range(len(fed)))
    assert fed.accuracies_as_downloaded() == before and fed.ledger.up + fed.ledger.down == bytes_before
    assert all(torch.equal(tensor, states[name]) for name, tensor in fed.states.load(range(len(fed))).items())
    fed.fit(1)
    assert [row["accuracy_before"] for row in fed.history.of(3)] == before
    assert make(method="stand-alone").accuracies_as_downloaded() is None


class WithAuxiliary(nn.Module):
    """Two outputs in training."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3).double()

    def forward(self, x):
        return (self.head(x), self.head(x)) if self.training else self.head(x)


BAD = [
    ({"epochs": 0}, r"epochs=0.*at least 1"),
    ({"epochs": 1.5}, r"epochs=1.5"),
    ({"batch_size": 0}, r"batch_size=0"),
    ({"batch_size": -3}, r"batch_size=-3"),
    ({"lr": 0.0}, r"lr=0.0.*above 0"),
    ({"lr": math.nan}, r"lr=nan"),
    ({"momentum": 1.0}, r"momentum=1.0"),
    ({"weight_decay": -1.0}, r"weight_decay=-1.0"),
    ({"participation": 0.0}, r"participation=0.0.*at most 1"),
    ({"participation": 1.5}, r"participation=1.5"),
    ({"lr": True}, r"lr=True"),
    ({"seed": "x"}, r"seed='x'"),
    ({"seed": True}, r"seed=True"),
    ({"cohort": True}, r"cohort=True"),
    ({"max_norm": "much"}, r"max_norm='much'"),
    ({"store": 3}, r"store=3.*a directory"),
    ({"device": "gpu"}, r"device='gpu': must be cpu, cuda"),
    ({"device": "meta"}, r"device='meta': holds no numbers"),
    ({"device": "cuda:99"}, r"device='cuda:99': PyTorch sees \d+ CUDA devices"),
    ({"cohort": 0}, r"cohort=0"),
    ({"cohort": "some"}, r"cohort='some'"),
    ({"wire": "int4"}, r"wire='int4'.*exact, bfloat16, int8"),
    ({"max_norm": 0}, r"max_norm=0"),
    ({"augment": 3}, r"augment=3"),
    ({"method": "fedsomething"}, r"method='fedsomething': unknown.*factorized-fl-alpha.*stand-alone"),
    ({"method": 7}, r"method=7"),
    ({"l1": -0.1}, r"l1=-0.1"),
    ({"model": nn.Linear(6, 3)}, r"model=Linear.*function"),
    ({"model": lambda: 3}, r"returned int"),
    ({"model": lambda: nn.Flatten()}, r"no parameter"),
    ({"model": lambda: nn.Linear(9, 3).double()}, r"does not take samples torch.float64 \[6\]"),
    ({"model": lambda: nn.Sequential(nn.Linear(6, 3), nn.Unflatten(1, (3, 1))).double()}, r"gives \[2, 3, 1\]"),
    ({"model": lambda: torch.jit.script(nn.Linear(6, 3))}, r"returned a scripted model"),
    ({"model": lambda: prune.identity(nn.Linear(6, 3), "weight")}, r"cannot be copied; what torch.nn.utils.prune"),
    ({"model": lambda: nn.Linear(6, 3).to(torch.complex64)}, r"weight is complex, parameters must be real"),
    ({"model": lambda: WithAuxiliary()}, r"gives tuple in training, must give outputs \[n, …\]"),
    ({"clients": []}, r"at least one client"),
    ({"clients": [3]}, r"client 0 is int"),
    ({"clients": iter([3])}, r"clients=list_iterator\): must be a sequence"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_settings_name_the_argument_and_the_value(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_clients():
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 1])
    good = (x, y)
    for train, message in [
        ((x[:0], y[:0]), "train has no samples"),
        (([]), "train has no samples"),
        ((x, y[:3]), "4 samples x but 3 labels"),
        ((torch.where(x == x[2, 3], torch.nan, x), y), "sample 2 of x has NaN"),
        (3, "train is int"),
    ]:
        with pytest.raises(ValueError, match=message):
            ff.Client(train=train, test=good)
    with pytest.raises(ValueError, match="test has no samples"):
        ff.Client(train=good, test=(x[:0], y[:0]))
    with pytest.raises(ValueError, match=r"train samples have shape \[6\], test samples \[5\]"):
        ff.Client(train=good, test=(x[:, :5], y))


def test_clients_that_do_not_fit_together(make):
    clients = make.clients()
    x, y = clients[1].train
    for labels, message in [
        (y + 1, "client 1 has label 3, the model has 3 outputs"),
        (y - 1, "client 1 has label -1, .* labels must be 0 … 2"),
        (y.double(), "targets y of client 1 are floating numbers .* each, of client 0 integers"),
        (torch.stack([y, y], 1), r"targets y of client 1 are integers \[2\] each, of client 0 integers \[\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(clients=[clients[0], ff.Client(train=(x, labels), test=clients[1].test)])
    with pytest.raises(ValueError, match=r"samples of client 2 have shape \[4\], of client 0 \[6\]"):
        make(clients=[*clients[:2], *make.clients(shape=(4,), sizes=(5,))])


def flat_cnn():
    return nn.Sequential(nn.Conv2d(1, 4, 6), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).double()


def test_batches_of_one_and_batch_norm(make):
    """1×1 feature maps: batch-norm needs two samples. 9 samples in batches of 4 train; a single sample cannot."""
    make(flat_cnn, (1, 6, 6), sizes=(9, 5)).fit(1)
    with pytest.raises(ValueError, match="client 1 has a single training sample"):
        make(flat_cnn, (1, 6, 6), sizes=(9, 1))
    with pytest.raises(ValueError, match="batch_size=1"):
        make(flat_cnn, (1, 6, 6), sizes=(9, 5), batch_size=1)
    make(sizes=(9, 1), batch_size=1).fit(1)


def test_fit_arguments(make):
    with pytest.raises(ValueError, match="rounds=-1"):
        make().fit(-1)
    with pytest.raises(ValueError, match="checkpoint_every=0"):
        make().fit(1, checkpoint_every=0)
    assert make().fit(0) == []


def test_phases_losses_extra_tensors_and_own_downloads(make):
    """The hooks the five methods leave at their defaults, in one method of a few lines.

    The body trains first, the head after it; the loss pulls towards the start of the round (FedProx); the download does
    not overwrite the model but is kept beside it (FedAMP), and the next round starts from half of it.
    """
    seen = []

    class Odd(ff.Strategy):
        name = "odd"

        def phases(self, epochs):
            def proximal(net, x, y):
                seen.append(set(net.params))
                pull = sum((p - net.start[n]).square().sum() for n, p in net.params.items())
                return nn.functional.cross_entropy(net(x), y) + 5.0 * pull

            return [
                ff.Phase(epochs, lambda info: not info.classifier, proximal),
                ff.Phase(1, lambda info: info.classifier, proximal),
            ]

        def extra(self, state):
            return {"cloud/0.weight": torch.zeros_like(state["0.weight"])}

        def receive(self, state, mixed):
            return {"cloud/0.weight": mixed["0.weight"], "0.weight": (state["0.weight"] + mixed["0.weight"]) / 2}

    runs = []
    for cohort in (1, 3):
        fed = make(method=Odd(), cohort=cohort, momentum=0.0, weight_decay=0.0)
        fed.fit(1)
        assert fed.states.state["cloud/0.weight"].abs().sum() == 0
        first = {name: tensor.clone() for name, tensor in fed.states.state.items()}
        n = torch.tensor([10, 7, 12], dtype=torch.float64)
        average = (first["0.weight"] * n[:, None, None]).sum(0) / n.sum()
        mixed = fed.mixed()[1]
        torch.testing.assert_close(mixed[0].weight.detach(), (first["0.weight"][1] + average) / 2)
        torch.testing.assert_close(mixed[2].weight.detach(), first["2.weight"][1])
        fed.fit(1)
        torch.testing.assert_close(fed.states.state["cloud/0.weight"][2], average)
        runs.append(fed.states.state)
    head = {"4.weight", "4.bias"}
    assert {frozenset(s) for s in seen} == {frozenset(head), frozenset(set(runs[0]) - head - {"cloud/0.weight"})}
    for name, tensor in runs[0].items():
        torch.testing.assert_close(runs[1][name], tensor, rtol=1e-10, atol=1e-10)


def test_layers_and_roles():
    model = ff.factorize(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)), ff.Rank1()
    )
    model.add_module("scale", nn.LayerNorm(3))
    infos = ff.federation.tensors.describe(model)
    assert {n: (i.role, i.layer, i.classifier, i.norm, i.statistic) for n, i in infos.items()} == {
        "0.u": ("u", 1, False, False, False),
        "0.v": ("v", 1, False, False, False),
        "0.mu": ("mu", 1, False, False, False),
        "0.bias": ("bias", 1, False, False, False),
        "1.weight": ("weight", 1, False, True, False),
        "1.bias": ("bias", 1, False, True, False),
        "1.running_mean": ("running_mean", 1, False, True, True),
        "1.running_var": ("running_var", 1, False, True, True),
        "1.num_batches_tracked": ("num_batches_tracked", 1, False, True, True),
        "3.u": ("u", 2, True, False, False),
        "3.v": ("v", 2, True, False, False),
        "3.mu": ("mu", 2, True, False, False),
        "3.bias": ("bias", 2, True, False, False),
        "scale.weight": ("weight", 2, False, True, False),
        "scale.bias": ("bias", 2, False, True, False),
    }
    turned = ff.federation.tensors.describe(model, classifier="0")
    assert turned["0.u"].classifier and turned["0.u"].layer == 2 and turned["3.u"].layer == 1
    with pytest.raises(ValueError, match="classifier='1'"):
        ff.federation.tensors.describe(model, classifier="1")


class Tied(nn.Module):
    """A language model whose classifier has the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mid, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, x):
        return self.head(self.mid(self.embedding(x)).relu())


def test_an_embedding_that_is_tied_to_the_classifier_is_the_classifiers(make):
    infos = ff.federation.tensors.describe(Tied())
    assert {name: (info.layer, info.classifier) for name, info in infos.items()} == {
        "embedding.weight": (3, True),
        "mid.weight": (2, False),
        "mid.bias": (2, False),
        "head.bias": (3, True),
    }
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(11, (9, 5), generator=draw) for _ in range(2)]
    clients = [ff.Client(train=(x[:6], x[:6]), test=(x[6:], x[6:])) for x in tokens]
    for method in (ff.methods.FedAvg(share_classifier=False), "fedper", "fedrep", "fedbabu", "moon"):
        fed = make(Tied, clients=clients, method=method, loss="next_token")
        fed.fit(1)
        assert fed.shared == ["mid.weight", "mid.bias"] or fed.method.name == "moon"
        moved = not torch.equal(fed.models[0].head.weight, fed.initial["embedding.weight"][0])
        assert moved == (fed.method.name != "fedbabu")
        # What the classifier gets to see, not the embedding.
        assert fed.encode(tokens[0]).shape == (2, 9, 5 * 6)


def test_the_bias_of_a_parametrized_classifier_is_part_of_it(make):
    def model():
        net = make.mlp()
        net[2], net[4] = (nn.utils.parametrizations.weight_norm(net[n]) for n in (2, 4))
        return net

    infos = ff.federation.tensors.describe(model())
    assert {info.layers for info in infos.values()} == {3}
    assert [name for name, info in infos.items() if info.classifier] == [
        "4.bias",
        "4.parametrizations.weight.original0",
        "4.parametrizations.weight.original1",
    ]
    assert infos["2.bias"].layer == infos["2.parametrizations.weight.original1"].layer == 2
    fed = make(model, method=ff.methods.MOON(share_classifier=False))
    fed.fit(1)
    assert not any(name.startswith("4.") for name in fed.shared) and fed.encode(fed.clients[0].test[0]).shape[2] == 5


class HandWrittenNorm(nn.Module):
    """Of one weight of this shape."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return x * self.weight


def test_a_normalisation_that_is_written_by_hand_is_one():
    block = type("NormBlock", (nn.Sequential,), {})(nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.Sequential(HandWrittenNorm(4), HandWrittenNorm(1, 4, 1, 1), HandWrittenNorm(1, 4), block)
    infos = ff.federation.tensors.describe(model)
    assert {name: (info.layer, info.norm) for name, info in infos.items()} == {
        "0.weight": (0, True),
        "1.weight": (0, True),
        "2.weight": (1, False),
        "3.0.weight": (2, False),
        "3.0.bias": (2, False),
        "3.1.weight": (2, True),
        "3.1.bias": (2, True),
    }
    assert not ff.methods.FedBN().shares(infos["0.weight"]) and ff.methods.FedBN().shares(infos["2.weight"])
    named = [
        type(name, (HandWrittenNorm,), {})(4) for name in ("RMSNormalization", "Normalise", "LogNormal", "NormalHead")
    ]
    assert [ff.federation.tensors.is_norm(module) for module in named] == [True, True, False, False]


def frozen(make, *layers):
    model = make.mlp()
    for layer in layers:
        model[layer].requires_grad_(False)
    return model


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_phase_in_which_nothing_trains_is_refused(make, cohort):
    cases = {
        "phase 1 of 2 of its local training; .* is 0.weight, 0.bias, 2.weight, …": ("fedrep", (4,)),
        r"phase 1 of 2 \(head_first\) of its local": (ff.methods.FedAvg(head_first=1), (4,)),
        "phase 1 of 1 of its local training; .* is 4.weight, 4.bias$": ("fedbabu", (0, 2)),
        "phase 1 of 1 of its adapting before": (ff.methods.FedBABU(finetune="head"), (4,)),
    }
    for message, (method, layers) in cases.items():
        with pytest.raises(ValueError, match=f"nothing trains in {message}"):
            make(lambda layers=layers: frozen(make, *layers), method=method, cohort=cohort)
    make(lambda: frozen(make, 4), method=ff.methods.FedRep(head_epochs=0), cohort=cohort).fit(1)


@pytest.mark.parametrize("method", ["moon", ff.methods.SimFed(factorized=False), "simfed"])
def test_what_a_frozen_classifier_gets_to_see(make, method):
    fed = make(lambda: frozen(make, 4), method=method)
    fed.fit(2)
    x, model = fed.clients[0].test[0], fed.models[1]
    torch.testing.assert_close(fed.encode(x)[1], model[:4](x).detach())


class Calls(nn.Module):
    """Calls its classifier with x and −x, or with the x of all samples and of one."""

    def __init__(self, alike=True):
        super().__init__()
        self.body, self.head, self.alike = nn.Linear(6, 5), nn.Linear(5, 3), alike
        self.double()

    def forward(self, x):
        return self.head(self.body(x).relu()) + self.head(self.body(-x if self.alike else x[:1]).relu())


def test_a_classifier_that_is_called_twice_has_both_inputs_side_by_side(make):
    fed = make(Calls, method=ff.methods.SimFed(factorized=False))
    fed.fit(2)
    x, body = fed.clients[0].test[0], fed.models[1].body
    wanted = torch.cat([body(x).relu(), body(-x).relu()], 1).detach()
    torch.testing.assert_close(fed.encode(x)[1], wanted)
    assert fed.key_vectors().shape == (3, 10)
    with pytest.raises(ValueError, match="classifier head is called with 1, 4 rows in one forward"):
        make(lambda: Calls(alike=False)).encode(x[:4])
    with pytest.raises(ValueError, match="classifier 1 is called by no forward"):
        make(lambda: Unused(make.mlp(), nn.Linear(6, 3).double())).encode(x)


class Unused(nn.Sequential):
    def forward(self, x):
        return self[0](x)


@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-beta"])
def test_channels_last_where_the_model_runs_that_way(make, method):
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(64, 3)

        def forward(self, x):
            return self.head(self.flatten(torch.relu(self.conv(x))))

        def flatten(self, x):
            return x.view(len(x), -1)

    class Reshape(View):
        def flatten(self, x):
            return x.reshape(len(x), -1)

    runs = {}
    for model in (View, Reshape):
        fed = runs[model] = make(lambda model=model: model().double(), (2, 6, 6), method=method, cohort=1)
        fed.fit(2)
    name = "conv.weight" if method == "fedavg" else "conv.mu"
    view, reshape = (fed.states.state[name][0] for fed in runs.values())
    assert view.is_contiguous() and not reshape.is_contiguous()
    assert reshape.is_contiguous(memory_format=torch.channels_last)
    for name, tensor in runs[View].states.state.items():
        torch.testing.assert_close(runs[Reshape].states.state[name], tensor, rtol=1e-9, atol=1e-11)


def test_what_is_loaded_takes_the_paths_that_were_chosen(make, tmp_path):
    choice.forget()
    choice.set_choices({"a kind of work": "factored"})
    try:
        make().fit(rounds=1, out=tmp_path / "run")
        choice.forget()
        ff.Federation.load(tmp_path / "run", model=make.mlp)
        assert choice.choices()["a kind of work"] == "factored"
    finally:
        choice.forget()
