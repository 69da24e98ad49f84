"""Matching by sketches: what travels, what is compared, and what a setting may be."""

import pytest
import torch
from paper_loop import check, federation, net, rows_of

import fastfact as ff
from fastfact import ops
from fastfact.federation.server import mixing
from fastfact.federation.wire.format import ENTRY, HEADER
from fastfact.models import resnet9

METHODS = {
    "factorized-fl-alpha": {"tau": 0.2, "epsilon": 3.0, "min_matches": 2},
    "factorized-fl-beta": {"tau": 0.2, "epsilon": 3.0, "min_matches": 2},
    "simfed": {"tau": 0.2, "alpha": 3.0},
}


def make(name, sketch, **settings):
    return ff.methods.make(name, sketch=sketch, **METHODS[name] | settings)


@pytest.mark.parametrize("name", METHODS)
def test_the_download_is_mixed_by_the_cosines_of_the_sketches(name):
    plain, fed = federation(make(name, 0)), federation(make(name, 4))
    for one in (plain, fed):
        one.fit(1)
    # The first round matches nobody.
    check(fed, rows_of(plain))
    names = plain.shared
    state = plain.states.state
    key = torch.cat([plain.exchange.keyed(state)[n].flatten(1) for n in plain.exchange.keys], 1)
    least = 1 if name == "simfed" else 2
    sigma = mixing.cosine(ops.srht(key, 4)[0])
    expected = mixing.mix(mixing.softmax_matrix(sigma, 3.0, 0.2, least), {n: state[n] for n in names})
    exact = mixing.mix(mixing.softmax_matrix(mixing.cosine(key), 3.0, 0.2, least), {n: state[n] for n in names})
    mixed = fed.mixed()
    for k, model in enumerate(mixed):
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for n in names:
            torch.testing.assert_close(tensors[n].detach(), expected[n][k], rtol=0, atol=1e-10)
    assert any(not torch.allclose(expected[n], exact[n]) for n in names)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_bytes_of_alpha(participation):
    fed = federation(make("factorized-fl-alpha", 4), participation=participation)
    fed.fit(3)
    up = fed.ledger.by_name("up")
    messages = sum(len(entry.clients) for entry in fed.ledger.entries if entry.direction == "up")
    assert up["sketch"] == messages * (ENTRY.size + 4)
    assert not any(name.endswith(".v") for name in up)
    assert "sketch" not in fed.ledger.by_name("down")
    # The message as it would be sent.
    state = fed.exchange.keyed(fed.states.state)
    sent = {n: state[n][0] for n in fed.exchange.uploaded}
    message = fed.wire.encode(sent)
    assert len(message) * messages == fed.ledger.up
    assert torch.equal(fed.wire.decode(message)["sketch"], sent["sketch"])


@pytest.mark.parametrize("name", METHODS)
def test_only_alpha_and_simfed_send_another_key(name):
    """β sends v in any case, of which the server makes its sketch; for the others the sketch is what travels."""
    plain, fed = federation(make(name, 0)), federation(make(name, 4))
    for one in (plain, fed):
        one.fit(2)
    saved = plain.ledger.up - fed.ledger.up
    assert (saved > 0) == (name != "factorized-fl-beta") and saved >= 0
    assert plain.ledger.down == fed.ledger.down


def test_the_uplink_of_resnet9():
    """u of eight convolutions and a sketch: at most 1.7 KB a client and round, u and v of layer L − 1 take 262 KB."""
    sizes = {}
    for sketch in (0, 1024):
        method = ff.methods.FactorizedFLAlpha(sketch=sketch)
        x, y = torch.zeros(2, 3, 32, 32), torch.tensor([0, 1])
        fed = ff.Federation(lambda: resnet9(3, 10), [ff.Client((x, y), (x, y))], method)
        state = fed.exchange.keyed(fed.states.state)
        sizes[sketch] = len(fed.wire.encode({n: state[n][0] for n in fed.exchange.uploaded}))
    assert sizes[1024] <= 1700 < 262_000 <= sizes[0]
    assert HEADER.size + 1024 < sizes[1024]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sketch", [-1, 1.5, True, 10**6])
def test_a_sketch_out_of_range(name, sketch):
    with pytest.raises(ValueError, match=f"{name}\\(sketch={sketch}\\)"):
        federation(make(name, sketch))


def test_a_run_with_sketches_repeats_and_resumes(tmp_path):
    whole, halves = federation(make("factorized-fl-alpha", 4)), federation(make("factorized-fl-alpha", 4))
    whole.fit(4)
    halves.fit(2, tmp_path / "run")
    again = ff.Federation.load(tmp_path / "run", clients=whole.clients, model=net)
    again.fit(2)
    for name, tensor in whole.states.state.items():
        assert torch.equal(tensor, again.states.state[name])
