import json
import logging
import math
import sys
import threading
from pathlib import Path

import forked
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastfact as ff
from fastfact.federation import local
from fastfact.federation.client import executor
from fastfact.federation.client.executor import BATCHED, ONE, THREADS, ExecutionPlan

# test_memory_stays_under_the_limit starts this file as a program.


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(executor, "cores", lambda: 2)


def dropout_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Dropout2d(0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(4 * 36, 3),
    ).double()


def jitter(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-alpha", "fedrep"])
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (10, 7, 12, 5)])
def test_every_plan_computes_the_same(make, method, sizes):
    """Dropout, batch-norm statistics, augmentation, batches of 4, 2, 3 and a merged one of 5."""
    runs = {}
    for cohort in (1, THREADS, 2, len(sizes)):
        fed = runs[cohort] = make(
            dropout_net, (1, 6, 6), method=method, sizes=sizes, cohort=cohort, augment=jitter, momentum=0.5
        )
        fed.fit(2)
    for cohort in (THREADS, 2, len(sizes)):
        for name, tensor in runs[1].states.state.items():
            torch.testing.assert_close(runs[cohort].states.state[name], tensor, rtol=1e-10, atol=1e-10)
        for row, other in zip(runs[1].history, runs[cohort].history, strict=True):
            assert math.isclose(row["loss"], other["loss"], rel_tol=1e-9)
            assert row["accuracy"] == other["accuracy"]


def test_clients_of_a_cohort_have_their_own_masks(make):
    x, y = torch.ones(4, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    fed = make(dropout_net, method="stand-alone", clients=[ff.Client((x, y), (x, y))] * 2, cohort=2, epochs=1)
    fed.fit(1)
    first, second = fed.states.state["6.weight"]
    assert not torch.equal(first, second)


class Locked(nn.Module):
    """Dropout of what no client has for itself."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.ones(6), requires_grad=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        kept = F.dropout(torch.ones(6, dtype=x.dtype), 0.5, self.training)
        return self.out(x * kept + F.dropout(self.place, 0.5, self.training))


class Ensemble(nn.Module):
    """Heads over the client's own `vmap`."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        scales = torch.arange(1.0, 4.0, dtype=x.dtype)
        of = torch.func.vmap(
            lambda scale: F.dropout(x.clone(), 0.5, self.training, True) * scale, randomness="different"
        )
        return self.out(of(scales).mean(0))


@pytest.mark.parametrize("net", [Locked, Ensemble])
def test_so_they_have_of_what_they_share(make, net):
    runs = [make(lambda: net().double(), method="stand-alone", cohort=cohort) for cohort in (1, 3)]
    for fed in runs:
        fed.fit(1)
    one, together = (fed.states.state["out.weight"] for fed in runs)
    torch.testing.assert_close(together, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("have, clients, wanted", [(2, 1, [2]), (2, 5, [1, 1, 1, 1, 2]), (8, 3, [2, 2, 2]), (2, 0, [])])
def test_clients_left_over_share_the_cores(monkeypatch, have, clients, wanted):
    class Worker:
        def copy(self):
            return Worker()

    monkeypatch.setattr(executor, "cores", lambda: have)
    plan, used, before = executor.Executor(Worker(), ExecutionPlan(THREADS)), {}, torch.get_num_threads()
    for _ in range(2):
        plan._spread(lambda worker, row: torch.get_num_threads(), clients, used.__setitem__)
        assert list(used.items()) == list(enumerate(wanted)) and torch.get_num_threads() == before


def test_threads_leave_the_global_state_alone(make):
    fed = make(dropout_net, (1, 6, 6), cohort=THREADS)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fed.fit(1)
    assert torch.equal(torch.rand(3), expected) and torch.get_num_threads() == threads
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [threads]


def test_threads_are_repeatable_and_have_single_threaded_kernels(make, same):
    inside = set()

    def watch(x, generator):
        inside.add((torch.get_num_threads(), threading.get_ident()))
        return x

    first, second = (make(make.cnn, (1, 6, 6), cohort=THREADS, augment=watch, sizes=(8,) * 6) for _ in range(2))
    first.fit(2)
    second.fit(2)
    assert same(first, second)
    assert {n for n, _ in inside} == {1} and threading.get_ident() not in {ident for _, ident in inside}


def test_threads_need_a_model_that_draws_nowhere_else(make):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3).double()

        def forward(self, x):
            return self.layer(x + torch.randn_like(x))

    with pytest.raises(ValueError, match=r'cohort="threads".*draw from no generator'):
        make(Noisy, cohort=THREADS)
    make(Noisy, cohort=1).fit(1)


@pytest.mark.parametrize("cohort", [1, THREADS, 2])
def test_an_interrupted_round_with_every_plan(make, same, cohort):
    fed, straight = make(cohort=cohort), make(cohort=cohort)
    straight.fit(2)
    fed.fit(1)

    def stop(round, client, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fed.fit(1, on_client=stop)
    fed.fit(1)
    assert same(fed, straight)


def test_auto_takes_the_fastest_but_near_a_tie_what_the_rule_says(make, monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    times = {}
    monkeypatch.setattr(executor, "_measure", lambda trainers, data, plan, clients: times[plan.how])
    for one, threads, batched, expected in [
        (1e-3, 9e-4, 8e-4, BATCHED),
        (1e-3, 6e-4, 1e-3, THREADS),
        (3e-4, 6e-4, 1e-3, ONE),
        (1e-3, 6e-4, 7e-4, BATCHED),
    ]:
        times |= {ONE: one, THREADS: threads, BATCHED: batched}
        monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / f"{one}-{threads}-{batched}"))
        fed = make(cohort="auto")
        assert fed.plan.how == expected and (fed.cohort > 1) == (expected == BATCHED)
    assert "cohort=auto: " in caplog.text and "batched 0.7 ms" in caplog.text
    # Nothing to measure: a single client, and a model too slow for a cohort to help.
    assert make(sizes=(8,), cohort="auto").plan == ExecutionPlan(ONE)
    times |= {ONE: 1.0, THREADS: 0.5, BATCHED: 1e-9}
    assert make(lambda: wide(6).double(), cohort="auto").plan.how == THREADS


def test_auto_measures_once_on_a_machine(make, monkeypatch, tmp_path):
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path))
    monkeypatch.setattr(executor, "_measure", lambda trainers, data, plan, *_: {ONE: 1e-3}.get(plan.how, 1.0))
    assert make(cohort="auto").plan == ExecutionPlan(ONE)
    monkeypatch.setattr(executor, "_measure", lambda trainers, data, plan, *_: {THREADS: 1e-3}.get(plan.how, 1.0))
    assert make(cohort="auto").plan == ExecutionPlan(ONE)
    (file,) = tmp_path.glob("*.json")
    file.write_text("{")
    assert make(cohort="auto").plan == ExecutionPlan(THREADS)
    monkeypatch.setenv("FASTFACT_CHOICE", "fixed")
    monkeypatch.setattr(executor, "_measure", lambda *_: pytest.fail("measured"))
    assert make(cohort="auto").plan.how == BATCHED


def test_auto_measures_and_a_resumed_run_does_not(make, same, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / "cost"))
    fed = make(cohort="auto")
    fed.fit(2, tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["executor"]
    assert recorded == {"how": fed.plan.how, "cohort": fed.cohort}
    monkeypatch.setattr(local, "choose", lambda *_: pytest.fail("measured again"))
    resumed = ff.Federation.load(tmp_path / "run", clients=make.clients())
    assert resumed.plan == fed.plan
    fed.fit(1), resumed.fit(1)
    assert same(fed, resumed)


def test_auto_measures_with_a_schedule_too(make, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path))
    make(cohort="auto", schedule="cosine", schedule_rounds=3)
    assert len(list(tmp_path.glob("*.json"))) == 1


def wide(inputs: int = 64) -> nn.Module:
    """1.1 MB of parameters."""
    return nn.Sequential(nn.Linear(inputs, 4096), nn.ReLU(), nn.Linear(4096, 3))


def many(n: int) -> list[ff.Client]:
    y = torch.arange(8) % 3
    return [ff.Client((torch.randn(8, 64), y), (torch.randn(2, 64), y[:2])) for _ in range(n)]


def test_auto_unmeasured_takes_no_cohort_of_a_model_that_has_none(make, monkeypatch):
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)).double()

    monkeypatch.setenv("FASTFACT_CHOICE", "fixed")
    assert make(lambda: nn.Linear(6, 3).double(), cohort="auto").plan.how == BATCHED
    fed = make(net, cohort="auto")
    fed.fit(1)
    assert fed.plan == ExecutionPlan(ONE)


def test_a_limit_that_is_too_small_is_refused_before_any_work(tmp_path):
    fed = ff.Federation(wide, many(3), cohort=1, memory_limit=0.01)
    with pytest.raises(ValueError, match=r"memory_limit=0.01\): 1 client at work need about \d"):
        fed.fit(1, tmp_path / "run")
    assert fed.round == 0 and not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="memory_limit=0"):
        ff.Federation(wide, many(3), memory_limit=0)


def test_memory_stays_under_the_limit(tmp_path):
    """150 clients of 1.1 MB in 100 MiB: all at once would take 165 MB, and more at work."""
    done = forked.run(__file__, tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["blocks"] > 1
    assert result["peak"] < result["limit"]
    # It does not grow from round to round.
    assert result["last"] < result["first"] + 24


def work(directory):
    from fastfact.federation.client.memory import keep_freed, resident

    # As `fastfact run` does: what is not given back must not add up.
    keep_freed()
    torch.set_num_threads(1)
    clients, loads, resident_mib = many(150), [], []
    limit = resident() / (1 << 30) + 0.1
    # The peak is counted from here on; importing PyTorch took more.
    Path("/proc/self/clear_refs").write_text("5")
    fed = ff.Federation(
        wide, clients, "stand-alone", cohort=1, epochs=1, batch_size=4, store=f"{directory}/s", memory_limit=limit
    )
    original = fed.states.load
    fed.states.load = lambda *a, **k: loads.append(0) or original(*a, **k)
    for _ in range(4):
        fed.fit(1)
        resident_mib.append(resident() / (1 << 20))
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    result = {"peak": peak, "limit": 1024 * limit, "blocks": len(loads) / 4}
    print(json.dumps(result | {"first": resident_mib[1], "last": resident_mib[-1]}))


if __name__ == "__main__":
    work(sys.argv[1])


def test_a_model_that_does_not_train_together_is_said_at_once(make):
    def counts():
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)).double()

    with pytest.raises(ValueError, match=r"Federation\(cohort=2\): must be 1, .* does not train together: vmap"):
        make(counts, cohort=2)
    make(counts, cohort=1).fit(1)
