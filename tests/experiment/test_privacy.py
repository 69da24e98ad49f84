"""Gradient inversion: what a gradient says for certain, what is held back, and the measure."""

import math

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.experiment import privacy


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Flatten(), nn.Linear(6 * 16, 3)
    ).double()


def images(clients=2) -> list[ff.Client]:
    g = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.rand(n, 1, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)

    return [ff.Client(train=draw(8), test=draw(4)) for _ in range(clients)]


def federation(method, **options) -> ff.Federation:
    fed = ff.Federation(conv_net, images(), method, epochs=1, batch_size=4, lr=0.05, **options)
    fed.fit(1)
    return fed


def test_psnr_is_the_papers_formula():
    x = torch.zeros(2, 3, 2, 5)
    y = x.clone()
    y[0, 0, 0, 0], y[1] = 0.5, 0.1
    # ‖x − x*‖² is 0.25 and 30 · 0.01, m · n is 10.
    wanted = [-10 * math.log10(0.25 / 10), -10 * math.log10(0.3 / 10)]
    torch.testing.assert_close(privacy.psnr(x, y), torch.tensor(wanted, dtype=torch.float64))
    with pytest.raises(ValueError, match="stacks of images"):
        privacy.psnr(x, y[:1])


def test_a_linear_layer_gives_its_input_away():
    """dW = (p − y) xᵀ and db = p − y: x is any row of dW divided by its entry of db."""
    torch.manual_seed(0)
    model = nn.Linear(7, 4).double()
    x, y = torch.randn(1, 7, dtype=torch.float64), torch.tensor([2])
    seen = privacy.gradients(model, x, y)
    torch.testing.assert_close(seen["weight"][2] / seen["bias"][2], x[0])
    draw = torch.Generator().manual_seed(1)
    found, odds, distance = privacy.invert(model, seen, (1, 7), 4, generator=draw, tries=5)
    torch.testing.assert_close(found, x, atol=1e-2, rtol=0)
    assert odds.argmax() == 2 and distance < 1e-6


def test_only_the_rows_that_travel_are_followed():
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    x, y = torch.randn(1, 5, dtype=torch.float64), torch.tensor([0])
    seen = privacy.gradients(model, x, y)
    mask = torch.tensor([True, False, False])
    wrong = {"weight": seen["weight"].clone()}
    wrong["weight"][1:] = 1e3
    found = privacy.invert(
        model, wrong, (1, 5), 3, masks={"weight": mask}, generator=torch.Generator().manual_seed(1), steps=200
    )
    assert found[2] < 1e-6
    again = privacy.gradients(model, found[0], found[1])["weight"]
    torch.testing.assert_close(again[0], seen["weight"][0], atol=1e-3, rtol=1e-3)


def best(rows) -> float:
    return max(row["psnr"] for row in rows)


def test_what_stays_with_the_client_protects_it():
    """With all gradients the images come back; with those of u and one v, 15 numbers of 1,000, they do not."""
    known = privacy.leakage(federation("fedavg"), images=2, steps=150)
    assert [row["client"] for row in known] == [0, 0, 1, 1]
    assert best(known) > 30 and all(row["label"] for row in known)
    assert best(privacy.leakage(federation("factorized-fl-alpha"), images=2, steps=150)) < 20
    assert known == privacy.leakage(federation("fedavg"), images=2, steps=150)


def test_what_the_attacker_knows_of_the_personal_part():
    """The gradient of σ is that of W: FedDecomp protects as far as A and B are unknown."""
    fed = federation("feddecomp")
    draw = torch.Generator().manual_seed(0)
    state = fed.states.state
    for name in fed.infos:
        if name.endswith("B"):
            state[name].normal_(generator=draw)
    fed.states.store([0, 1], state)
    fed.states.commit()
    assert best(privacy.leakage(fed, images=2, steps=150, knows="all")) > 30
    assert best(privacy.leakage(fed, images=2, steps=150)) < 30
    everything = ff.methods.make("feddecomp", shared="both")
    assert best(privacy.leakage(federation(everything), images=2, steps=150)) > 30


@pytest.mark.parametrize("method", ["feddecomp", "pfedpara", "fedfac-static"])
def test_every_kind_of_upload_can_be_attacked(method):
    (row,) = privacy.leakage(federation(method), images=1, clients=[1], steps=5)
    assert row["client"] == 1 and math.isfinite(row["psnr"]) and math.isfinite(row["distance"])


def test_bad_input():
    with pytest.raises(ValueError, match="stand-alone uploads nothing"):
        privacy.leakage(federation("stand-alone"))
    fed = federation("fedavg")
    with pytest.raises(ValueError, match="images=0"):
        privacy.leakage(fed, images=0)
    with pytest.raises(ValueError, match="knows='x'"):
        privacy.leakage(fed, knows="x")
    with pytest.raises(ValueError, match="tries=0"):
        privacy.leakage(fed, tries=0)
    with pytest.raises(ValueError, match=r"clients=\[2\]"):
        privacy.leakage(fed, clients=[2])
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="no such parameter"):
        privacy.invert(model, {"other": torch.ones(2)}, (1, 2), 2)
    with pytest.raises(ValueError, match="every gradient is zero"):
        privacy.invert(model, {"bias": torch.zeros(2)}, (1, 2), 2)
