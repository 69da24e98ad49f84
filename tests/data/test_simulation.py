"""FedFac's simulation."""

import numpy as np
import pytest
import torch

from fastfact import data


def test_weights_and_features_are_as_the_paper_has_them():
    made = data.fedfac_simulation(
        40, seed=1, features=50, hidden=60, shared_units=0.25, shared_features=0.4, samples=300
    )
    assert made.weight.shape == (40, 60, 50) and made.shared.sum() == 15 and not made.shared[:45].any()
    personal, shared = made.weight[:, :45], made.weight[:, 45:]
    assert torch.equal(shared, shared[:1].expand_as(shared)) and not torch.allclose(personal[0], personal[1], atol=0.5)
    assert 0.09 < shared[:, :, :30].abs().max() <= 0.1 and 0.97 < shared[:, :, 30:].abs().max() <= 1
    assert 0.09 < personal[:, :, 30:].abs().max() <= 0.1
    x = torch.stack([torch.cat([c.train[0], c.test[0]]) for c in made.clients]).double()
    # The personal weights and features of a client have the same mean μ_c; weights vary by 1 around it.
    mean = x[:, :, :30].mean(1)
    assert (personal[:, :, :30].mean(1) - mean).abs().mean() < 0.2
    assert float((personal[:, :, :30] - mean[:, None]).std()) == pytest.approx(1, abs=0.02)
    assert float(mean.std()) == pytest.approx(1, abs=0.1)
    centred = x[:, :, :30] - mean[:, None]
    covariance = torch.einsum("cni,cnj->ij", centred, centred) / (40 * 299)
    i = torch.arange(30)
    assert (covariance - 0.5 ** (i[:, None] - i).abs()).abs().max() < 0.06
    assert (x[:, :, 30:].flatten(0, 1).T.cov() - torch.eye(20)).abs().max() < 0.06


def test_labels_come_from_the_network():
    made = data.fedfac_simulation(5, seed=2, samples=400, noise=0.0)
    for client, weight in zip(made.clients, made.weight, strict=True):
        x, y = (torch.cat([client.train[i], client.test[i]]) for i in (0, 1))
        score = (x.double() @ weight.double().T).relu() @ made.output.double()
        clear = score.abs() > 1e-2
        assert torch.equal((score > 0)[clear], (y == 1)[clear])
    noisy = data.fedfac_simulation(5, seed=2, samples=400, noise=50.0)
    assert any(not torch.equal(a.train[1], b.train[1]) for a, b in zip(made.clients, noisy.clients, strict=True))


def test_balanced_labels_are_half_and_half():
    for client in data.fedfac_simulation(6, samples=200, balanced=True).clients:
        assert int(client.train[1].sum() + client.test[1].sum()) == 100
        assert len(client.test[1]) == 40 and client.num_classes == 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_everything_shared_or_personal(share):
    made = data.fedfac_simulation(3, samples=10, shared_units=share, shared_features=share)
    assert made.shared.float().mean() == share and made.clients[0].train[0].shape == (8, 100)


def test_it_repeats_and_checks():
    a, b = data.fedfac_simulation(3, seed=5, samples=20), data.fedfac_simulation(4, seed=5, samples=20)
    assert all(torch.equal(p.train[0], q.train[0]) for p, q in zip(a.clients, b.clients, strict=False))
    for bad in (
        {"clients": 0},
        {"samples": 1},
        {"noise": -1.0},
        {"noise": np.nan},
        {"shared_units": 1.5},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            data.fedfac_simulation(**bad)
