"""The step of a cohort: what is frozen and the same goes in once, and a recorded step does what the step does."""

import pytest
import torch

import fastfact as ff
from fastfact.federation.client import step, train
from fastfact.federation.client.phase import Phase


def recorder(seen):
    """Stands in for CUDA graphs: nothing runs when a step is recorded; a replay runs it on the recorded batch."""

    def record(step, device):
        losses = torch.full((3,), torch.nan, dtype=torch.float64)
        seen.append("recorded")

        def replay():
            seen.append("replayed")
            losses.copy_(step())

        return replay, losses

    return record


@pytest.mark.parametrize("sizes", [(16, 16, 16), (16, 13, 16)])
def test_recorded_steps_train_as_the_steps_do(make, same, monkeypatch, sizes):
    def run(graphs=True):
        how = {"method": "factorized-fl-beta", "cohort": 3, "epochs": 3, "graphs": graphs}
        fed = make(make.cnn, shape=(1, 6, 6), sizes=sizes, **how)
        fed.fit(rounds=2)
        return fed

    plain, seen = run(), []
    monkeypatch.setattr(step.Steps, "_has_cuda_graphs", True)
    monkeypatch.setattr(step, "cuda_graph", recorder(seen))
    recorded = run()
    assert same(plain, recorded)
    assert seen.count("replayed") > seen.count("recorded") >= 1
    seen.clear()
    assert same(plain, run(graphs=False)) and not seen


def test_a_recorded_step_serves_later_phases_rounds_and_cohorts(make, same, monkeypatch):
    """Wherever their state lies: it trains at addresses that stay."""
    seen, rounds = [], []

    def run(graphs=True):
        # two cohorts, and a phase for the classifier before one for the rest
        how = {"method": "fedrep", "cohort": 3, "epochs": 4, "graphs": graphs}
        fed = make(make.cnn, shape=(1, 6, 6), sizes=(8,) * 6, **how)
        for _ in range(3):
            fed.fit(rounds=1)
            rounds.append(seen.count("recorded"))
        return fed

    plain = run(graphs=False)
    monkeypatch.setattr(step.Steps, "_has_cuda_graphs", True)
    monkeypatch.setattr(step, "cuda_graph", recorder(seen))
    assert same(plain, run())
    first, *later = rounds[3:]
    assert 0 < first <= 4 and later == [first, first]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_recorded_step_reads_its_learning_rate_and_what_the_optimizer_keeps(make, same, monkeypatch, optimizer):
    options = {"optimizer": optimizer, "optimizer_states": "kept", "schedule": "cosine", "schedule_rounds": 3}
    options |= {"lr_warmup": 0.2, "max_grad_norm": 0.5, "accumulate": 2, "lr": 0.02, "cohort": 3, "epochs": 4}

    def run(graphs):
        fed = make(make.cnn, shape=(1, 6, 6), sizes=(16, 16, 16), graphs=graphs, **options)
        fed.fit(rounds=3)
        return fed

    monkeypatch.setattr(step.Steps, "_has_cuda_graphs", True)
    plain, seen = run(False), []
    monkeypatch.setattr(step, "cuda_graph", recorder(seen))
    assert same(plain, run(True))
    # One for a batch that is added up, and one for a batch with which the step is due.
    assert seen.count("recorded") == 2 and seen.count("replayed") > 30


class FewSteps(ff.Strategy):
    """One step of each epoch, then an epoch."""

    name = "few-steps"

    def phases(self, epochs):
        return [Phase(epochs, steps=1), Phase(1)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_means_over_the_samples_that_were_seen(make, accumulate):
    rows = []
    for cohort in (1, 3):
        fed = make(method=FewSteps(), cohort=cohort, sizes=(17, 3, 12), accumulate=accumulate)
        rows.append([row["loss"] for row in fed.fit(1)])
    assert rows[0] == pytest.approx(rows[1], rel=1e-9)


def test_a_phase_with_a_loss_of_its_own_is_not_recorded(make, monkeypatch):
    monkeypatch.setattr(step.Steps, "_has_cuda_graphs", True)
    monkeypatch.setattr(step, "cuda_graph", lambda run: pytest.fail("recorded"))
    fed = make(make.cnn, shape=(1, 6, 6), sizes=(16, 16, 16), method="fedprox", cohort=3, epochs=4)
    fed.fit(rounds=1)


def test_what_is_frozen_and_shared_goes_in_once(make, monkeypatch):
    steps = []
    kept = step.Step.__init__

    def watch(self, *args):
        kept(self, *args)
        steps.append((self.phase, self.common, self.names))

    fed = make(make.cnn, shape=(1, 6, 6), sizes=(8, 8, 8), method="feddecomp", cohort=3, epochs=2)
    monkeypatch.setattr(step.Step, "__init__", watch)
    fed.fit(rounds=2)
    sigmas = {name for name in fed.infos if fed.infos[name].role == "sigma"}
    low_rank = {name for name in fed.infos if fed.infos[name].role in ("A", "B")}
    personal, full, *again = steps
    assert sigmas <= personal[1] and set(personal[2]) == low_rank
    assert not full[1] & (sigmas | low_rank), "A and B differ between the clients by then"
    assert sigmas <= again[0][1]
    alone = make(make.cnn, shape=(1, 6, 6), sizes=(8, 8, 8), method="feddecomp", cohort=1, epochs=2)
    alone.fit(rounds=2)
    for name, tensor in alone.states.state.items():
        torch.testing.assert_close(fed.states.state[name], tensor, msg=name)
    assert isinstance(fed, ff.Federation)


def test_the_cohort_that_fits_into_memory(make):
    model = make.cnn()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    sample = torch.zeros(1, 6, 6, dtype=torch.float64)
    state = sum(8 * t.numel() for t in model.state_dict().values())
    fits = [train.memory_cohort(model, sample, batch, 10**7) for batch in (1, 4, 16)]
    assert 256 >= fits[0] > fits[1] > fits[2] > 1
    # each convolution keeps at least its input: 36 and 4 · 36 numbers an image
    assert fits[2] <= 10**7 // (6 * state + 2 * 8 * 16 * 5 * 36)
    assert train.memory_cohort(model, sample, 16, 1) == 1 and train.memory_cohort(model, sample, 1, 10**12) == 256
    assert model.training and all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
