"""Buffers that a forward replaces, as `self.mean = …`: each client has its own, however clients train."""

import math

import pytest
import torch
from small import Scale, make_clients, mlp
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import fastfact as ff


class Centred(nn.Module):
    """Takes off a running mean, which autograd keeps: it is also a factor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((6,), 0.5))

    def forward(self, x):
        y = (x - self.mean) * self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return y


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Centred(), nn.Linear(6, 3)).double()


def by_hand(client: ff.Client, start: dict) -> dict:
    """Two steps of plain PyTorch on all samples of a client."""
    state = {name: tensor.clone() for name, tensor in start.items()}
    x, y = client.train
    params = [name for name in state if name != "1.mean"]
    for _ in range(2):
        state |= {name: state[name].detach().requires_grad_() for name in params}
        F.cross_entropy(functional_call(centred(), state, (x,)), y).backward()
        state = {n: t.detach() - 0.1 * t.grad if n in params else t.detach() for n, t in state.items()}
    return state


@pytest.mark.parametrize("cohort", [1, 2, 3, "threads"])
def test_each_client_has_what_plain_pytorch_gives(make, cohort):
    options = {"epochs": 2, "batch_size": 12, "momentum": 0.0, "weight_decay": 0.0, "cohort": cohort}
    fed = make(centred, method="stand-alone", **options)
    start = {name: tensor[0].clone() for name, tensor in fed.initial.items()}
    fed.fit(1)
    for k, client in enumerate(fed.clients):
        for name, expected in by_hand(client, start).items():
            torch.testing.assert_close(fed.states.state[name][k], expected, rtol=1e-9, atol=1e-12)
        x, y = client.test
        model = fed.models[k].eval()
        assert (model(x).argmax(1) == y).double().mean() == fed.history[k]["accuracy"]


@pytest.mark.parametrize("cohort", [1, 3])
def test_memory_of_parameters_with_gaps_or_overlaps_is_each_clients_own(make, cohort):
    def sliced(cut: bool) -> nn.Module:
        net = centred()
        if cut:
            wide = torch.zeros(6, 9, dtype=torch.float64)
            wide[:, :6] = net[0].weight.detach()
            net[0].weight = nn.Parameter(wide[:, :6])
        net.register_buffer("scale", torch.ones(1).expand(3) if cut else torch.ones(3))
        return net

    plain, gaps = (make(lambda cut=cut: sliced(cut), cohort=cohort) for cut in (False, True))
    for fed in (plain, gaps):
        fed.fit(2)
    for name, tensor in plain.states.state.items():
        assert torch.equal(gaps.states.state[name], tensor)


@pytest.mark.parametrize(
    "numbers",
    [
        torch.triu(torch.full((3, 3), -math.inf), 1),
        torch.full((3,), torch.finfo(torch.float64).min, dtype=torch.float64),
        torch.polar(torch.ones(3), torch.arange(3.0)),
        torch.tensor([2**60 + 1]),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["infinite", "as good as infinite", "complex", "large integers", "of 8 bits"],
)
@pytest.mark.parametrize("method", ["fedavg", "moon"])
def test_one_that_has_no_mean_stays_as_it_is(make, method, numbers):
    def net() -> nn.Module:
        net = centred()
        net[2].register_buffer("mask", numbers.clone())
        return net

    fed = make(net, method=method)
    fed.fit(2)
    assert not any(row["left_out"] for row in fed.history)
    assert fed.exchange.shared == ["0.weight", "0.bias", "2.weight", "2.bias", "1.mean"]
    assert all(torch.equal(fed.models[k][2].mask.view(torch.uint8), numbers.view(torch.uint8)) for k in range(3))


def test_samples_are_numbers_as_the_first_floating_parameter_is(make):
    class Coded(nn.Module):
        """A weight of 8 bits and its scale."""

        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.ones(4, 6, dtype=torch.int8), requires_grad=False)
            self.scale = nn.Parameter(torch.ones(1))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(x @ (self.codes * self.scale).T)

    assert make(Coded, method="fedem").initial["pi"].dtype == torch.float32
    assert make(Coded, method="apfl").initial["alpha"].dtype == torch.float32
    fed = make(Coded)
    assert fed._data[0].train[0].dtype == torch.float32
    torch.testing.assert_close(fed._data[0].train[0], fed.clients[0].train[0].float())


def test_they_are_mixed_kept_and_gone_on_with(make, same, tmp_path):
    straight, saved = make(centred), make(centred)
    straight.fit(3)
    saved.fit(2, out=tmp_path)
    assert "1.mean" in saved.shared and (saved.states.state["1.mean"] != 0.5).all()
    resumed = ff.Federation.load(tmp_path, model=centred, clients=make_clients())
    resumed.fit(1)
    assert same(straight, resumed)


@pytest.mark.parametrize(
    ("there", "put", "said"),
    [
        (
            torch.zeros(()),
            lambda x: x.mean(0),
            r"float32 \[6\] in the place of buffer seen, which is torch.float32 \[\]",
        ),
        (
            torch.zeros(6).long(),
            lambda x: x.mean(0),
            r"in the place of buffer seen, which is torch.int64 \[6\]: must be",
        ),
        (None, lambda x: x.mean(0), "in the place of buffer seen, which is None before: must be"),
    ],
)
def test_one_that_takes_another_form_is_refused(make, there, put, said):
    class Seen(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("seen", there)

        def forward(self, x):
            self.seen = put(x)
            return super().forward(x)

    data = [ff.Client(*((x.float(), y) for x, y in (one.train, one.test))) for one in make_clients()]
    with pytest.raises(ValueError, match=said):
        make(Seen, clients=data)


def test_a_cache_that_is_no_part_of_the_state_may_be_replaced(make):
    class Cached(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("cache", None, persistent=False)

        def forward(self, x):
            self.cache = x.detach()
            return super().forward(x)

    make(lambda: Cached().double()).fit(1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.1, "optimizer": "adam", "optimizer_states": "kept"},
        {"clip": "1x", "wire": "bfloat16"},
        {"rule": "multi-krum", "hostile": 0.0},
        {"method": "clustered-fl", "settings": {"eps1": 9.0, "eps2": 0.0}},
        {"method": "fedfomo", "settings": {"models": 2, "validation": 0.3}},
    ],
    ids=lambda options: next(iter(options.values())),
)
def test_scalars_of_a_model_are_tensors_as_others(make, options):
    fed = make(lambda: mlp().append(Scale()).double(), **options)
    fed.fit(2)
    assert (fed.states.state["5.scale"] != 1).all() and all(row["left_out"] is None for row in fed.history)


class Shifted(nn.Module):
    """Writes to its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.linear(x.sub_(5.0))


@pytest.mark.parametrize("cohort", [1, 3, "threads"])
def test_a_model_that_writes_to_its_input_leaves_the_data_alone(make, same, cohort):
    class Apart(Shifted):
        def forward(self, x):
            return self.linear(x.sub(5.0))

    fed, wanted = (make(model, cohort=cohort) for model in (Shifted, Apart))
    before = [[part.clone() for part in (*client.train, *client.test)] for client in fed.clients]
    for one in (fed, wanted):
        one.fit(2)
    assert same(fed, wanted)
    assert [row["accuracy"] for row in fed.history] == [row["accuracy"] for row in wanted.history]
    for client, parts in zip(fed.clients, before, strict=True):
        assert all(map(torch.equal, (*client.train, *client.test), parts))
