"""Which methods a server can serve that sees only the sum of the uploads (`Strategy.constant_mixing`): secure
aggregation (Bonawitz et al., CCS 2017; SecAgg+, Bell et al., CCS 2020) gives it that sum and hides each of its terms.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from small import make_clients, mlp

import fastfact as ff

F64 = torch.float64
SUMS = {
    "apfl",
    "ditto",
    "factorized-fedavg",
    "fedadam",
    "fedala",
    "fedavg",
    "fedbabu",
    "fedbuff",
    "fedbn",
    "feddecomp",
    "ffa-lora",
    "fedem",
    "fedpara",
    "fedper",
    "fedprox",
    "fedrep",
    "fedit",
    "fedrod",
    "fedsa-lora",
    "fedsplit",
    "fedsplit-random",
    "lg-fedavg",
    "moon",
    "per-fedavg",
    "pfedgate",
    "pfedme",
    "pfedpara",
    "pfedsd",
    "scaffold",
    "stand-alone",
    "stand-alone-lora",
}
ALIKE = {
    "factorized-fl-alpha": {"tau": -1.0, "epsilon": 0.0},
    "factorized-fl-beta": {"tau": -1.0, "epsilon": 0.0},
    "matched-lora": {"tau": -1.0, "epsilon": 0.0},
    "simfed": {"tau": -1.0, "alpha": 0.0},
    "fedfac-static": {"random": True},
}
"""Settings with which other methods weigh their clients without looking at them."""


def trained(method: str, settings=None) -> ff.Federation:
    """After its first round, whose uploads no server has seen yet."""
    clients = make_clients((6,), (10, 7, 12, 9))
    fed = ff.Federation(mlp, clients, method, settings=settings, epochs=2, batch_size=5, lr=0.1, cohort=1)
    fed.fit(1)
    return fed


def server_step(fed: ff.Federation, state) -> dict:
    """What the server sends down of the uploads `state`, and what it remembers of them."""
    uploads = fed.uploads()
    uploads = dataclasses.replace(uploads, state=uploads.state | state, server_state=dict(fed.server_state))
    mixed = fed.method.mix(uploads, fed.shared)
    return mixed | {f"server/{name}": tensor.double() for name, tensor in uploads.server_state.items()}


def of_no_sum(state, weights):
    """Other uploads with the same weighted sum."""
    draw = torch.Generator().manual_seed(3)
    masks = {name: torch.randn(tensor.shape, generator=draw, dtype=F64) for name, tensor in state.items()}
    at = {name: weights.view(-1, *[1] * (tensor.dim() - 1)) for name, tensor in state.items()}
    return {name: x + masks[name] - (at[name] * masks[name]).sum(0) for name, x in state.items()}


def depends_only_on_the_sum(fed: ff.Federation) -> bool:
    state = {name: fed.uploads().state[name] for name in fed.uploaded}
    weights = fed.method.weights(fed.uploads())[0] if fed.shared else torch.full((4,), 0.25, dtype=F64)
    plain, masked = server_step(fed, state), server_step(fed, of_no_sum(state, weights))
    return all(torch.allclose(plain[name], masked[name], rtol=0, atol=1e-9) for name in plain)


@pytest.mark.parametrize("name", ff.methods.names())
def test_a_method_says_whether_it_needs_the_sum_only(name):
    method = ff.methods.make(name)
    assert method.constant_mixing == (name in SUMS)
    if method.clients_mix:
        return
    assert depends_only_on_the_sum(trained(name)) == (name in SUMS)


@pytest.mark.parametrize("name", ALIKE)
def test_settings_that_weigh_all_alike(name):
    assert ff.methods.make(name, **ALIKE[name]).constant_mixing
    assert depends_only_on_the_sum(trained(name, ALIKE[name]))


def test_a_mask_of_the_own_support_needs_the_upload():
    assert not ff.methods.make("factorized-fedavg", after_mix="support").constant_mixing


BITS, FRACTION = 32, 20


def in_ring(tensor: torch.Tensor, weight: float) -> np.ndarray:
    """round(weight · x · 2^FRACTION) modulo 2^BITS."""
    return (tensor.double() * weight * 2**FRACTION).round().long().numpy().astype(np.uint64) % 2**BITS


def from_ring(total: np.ndarray) -> torch.Tensor:
    signed = total.astype(np.int64)
    return torch.from_numpy(np.where(signed >= 2 ** (BITS - 1), signed - 2**BITS, signed)).double() / 2**FRACTION


@pytest.mark.parametrize(("name", "settings"), [(name, {}) for name in sorted(SUMS)] + list(ALIKE.items()))
def test_pairwise_masks_leave_the_sum(name, settings):
    """Every pair of clients agrees on a mask that one adds and the other takes off: what the server gets of a client is
    evenly spread over the ring, what it gets of all is the sum of their numbers, rounded to 2^-FRACTION."""
    fed = trained(name, settings)
    uploads = fed.uploads()
    m, weights = len(uploads.clients), [1.0] * 4 if not fed.shared else fed.method.weights(uploads)[0].tolist()
    # What a server makes of the mean, it makes of nothing else (`depends_only_on_the_sum`).
    mean = uploads.mix(fed.method.weights(uploads), fed.shared)
    for index, tensor in enumerate(fed.shared):
        sent = [in_ring(uploads.state[tensor][k], m * weights[k]) for k in range(m)]
        plain = sum(sent) % 2**BITS
        for i, j in itertools.combinations(range(m), 2):
            mask = np.random.default_rng([i, j, index]).integers(2**BITS, size=sent[i].shape, dtype=np.uint64)
            sent[i], sent[j] = (sent[i] + mask) % 2**BITS, (sent[j] + 2**BITS - mask) % 2**BITS
        total = sum(sent) % 2**BITS
        assert (total == plain).all()
        # Half a step of each client, and the mean of m.
        expected = mean[tensor][0].double()
        torch.testing.assert_close(from_ring(total) / m, expected, rtol=0, atol=0.5 / 2**FRACTION + 1e-12)
