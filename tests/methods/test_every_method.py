"""What holds for every registered method: it trains, saves, loads and goes on bit for bit, alone or in a cohort."""

import functools

import baseline_loop
import pytest
import torch
from baseline_loop import normed
from small import Scale
from torch import nn

import fastfact as ff

CAPTURED = ("factorized-fl-alpha", "fedavg", "fedfac-dynamic", "fedprox", "feddecomp", "matched-lora", "moon", "simfed")
"""Plain and with a loss of their own: their cohorts run by steps that are captured as soon as they come again."""
clients = functools.partial(baseline_loop.clients, (6, 3, 6, 4))
"""A cohort's batches have three sizes: of three clients, of two and of one, which is the larger."""


def model() -> nn.Module:
    return normed().append(Scale()).double()


def federation(method, **options):
    return baseline_loop.federation(method, model, clients(), epochs=1, **options)


@pytest.mark.parametrize("name", ff.methods.names())
def test_two_rounds_a_checkpoint_and_one_more(name, tmp_path):
    # Half of the clients take part: those that missed a round are served too.
    straight = federation(name, participation=0.5)
    straight.fit(3)
    saved = federation(name, participation=0.5)
    saved.save(tmp_path)
    saved.fit(2, out=tmp_path, checkpoint_every=1)
    resumed = ff.Federation.load(tmp_path, model=model, clients=clients())
    resumed.fit(1)
    for tensor_name, tensor in straight.states.state.items():
        assert torch.equal(tensor, resumed.states.state[tensor_name]), tensor_name
    assert straight.server_state.keys() == resumed.server_state.keys()
    assert all(torch.equal(tensor.cpu(), resumed.server_state[n].cpu()) for n, tensor in straight.server_state.items())
    assert straight.ledger.rows() == resumed.ledger.rows()
    assert [row["accuracy"] for row in straight.history] == [row["accuracy"] for row in resumed.history]
    assert all(row["left_out"] is None for row in straight.history)
    assert any((tensor != tensor[:1]).any() for tensor in straight.states.state.values())
    # The models at hand are whole: they take samples and give logits.
    x = clients()[0].test[0]
    assert all(one(x).shape == (4, 3) and one(x).isfinite().all() for one in straight.models)


@pytest.mark.parametrize("name", ff.methods.names())
def test_a_cohort_computes_what_each_client_alone_does(name):
    alone, together = (federation(name, cohort=cohort) for cohort in (1, 4))
    if name in CAPTURED:
        together.trainer.steps.patience = 0
    alone.fit(3)
    together.fit(3)
    for tensor_name, tensor in alone.states.state.items():
        torch.testing.assert_close(
            tensor, together.states.state[tensor_name], rtol=1e-7, atol=1e-9, msg=f"{tensor_name} of {name}"
        )


@pytest.mark.parametrize("name", ff.methods.names())
def test_with_permuted_labels_classifier_and_norm_stay(name):
    """Every method takes the policy of label-heterogeneous scenarios; then nothing of either is on the wire."""
    policy = {"share_classifier": False, "share_norm": False, "share_norm_statistics": False}
    fed = federation(ff.methods.make(name, **policy))
    fed.fit(2)
    travelled = set(fed.ledger.by_name("down")) - {"(frame)"}
    assert travelled == set(fed.shared if name != "stand-alone" else ())
    wrapped = [n.removeprefix("control.").replace("/", ".") for n in travelled]
    wrapped = [n.removeprefix("model.").removeprefix("shared.") for n in wrapped]
    wrapped = [n.split(".", 2)[2] if n.startswith("components.") else n for n in wrapped]
    assert not any(n.startswith(("7.", "2.")) for n in wrapped)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("cohort", [1, 4])
@pytest.mark.parametrize("name", ff.methods.names())
def test_on_a_gpu_as_on_the_cpu(name, cohort, tmp_path):
    """Also saved there and gone on with on the CPU."""
    here, there = federation(name), federation(name, device="cuda", cohort=cohort)
    here.fit(3)
    there.fit(2, out=tmp_path)
    moved = ff.Federation.load(tmp_path, model=model, clients=clients(), device="cpu")
    for fed in (there, moved):
        fed.fit(1)
        for tensor_name, tensor in here.states.state.items():
            found = fed.states.state[tensor_name].cpu()
            torch.testing.assert_close(found, tensor, rtol=1e-6, atol=1e-8, msg=f"{tensor_name} of {name}")
    assert there.ledger.rows() == here.ledger.rows()
