import os
import signal
import sys

import forked
import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact import models
from fastfact.federation import LazyClients, RunDirectoryError
from fastfact.federation import federation as loop
from fastfact.federation.server.exchange import not_finite
from fastfact.federation.state import evenly, stack
from fastfact.federation.storage import checkpoint
from fastfact.federation.storage.states import Codec, Database, PackedStates, Stacked
from fastfact.federation.tensors import describe, tensors_of

# test_a_killed_run_goes_on starts this file as a program.
ROUNDS, DIES_IN = 3, 2


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def clients_of(n: int = 6) -> list[ff.Client]:
    return [client(k) for k in range(n)]


def client(k: int) -> ff.Client:
    g = torch.Generator().manual_seed(k)
    x, y = torch.randn(9 + k % 3, 1, 6, 6, generator=g), torch.randint(3, (9 + k % 3,), generator=g)
    return ff.Client(train=(x[:6], y[:6]), test=(x[6:], y[6:]))


def federation(clients=None, method="factorized-fl-alpha", **options) -> ff.Federation:
    given = {"epochs": 1, "batch_size": 3, "lr": 0.05, "l1": 0.02, "seed": 3, "cohort": 1} | options
    return ff.Federation(small, clients or clients_of(), method, **given)


def same_but_for_blocks(a, b) -> bool:
    """As `same`, where rounds in blocks leave a row in the ledger for each."""
    states = all(torch.equal(tensor, b.states.state[name]) for name, tensor in a.states.state.items())
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in fed.history] for fed in (a, b)]
    return states and rows[0] == rows[1] and (a.ledger.up, a.ledger.down) == (b.ledger.up, b.ledger.down)


def test_clients_work_in_the_rows_they_get():
    states = Stacked({"w": torch.zeros(1, 4)}, 5)
    for turn in range(3):
        work = states.work(range(5))
        assert torch.equal(work["w"], torch.full((5, 4), float(turn)))
        work["w"] += 1
        states.store(range(5), work)
        assert work["w"].data_ptr() in (states.stack["w"][0].data_ptr(), states.stack["w"][5:].data_ptr())
        assert states.load([2])["w"].eq(turn).all(), "not before the commit"
        states.commit()
    assert len(states.stack["w"]) == 10
    for _ in range(3):
        states.work([1, 3])["w"].fill_(9)
        states.rollback()
        states.work([0, 4])["w"].fill_(9)
    states.rollback()
    assert states.state["w"].eq(3).all() and states.free.tolist() == sorted(set(states.free.tolist()))
    states.store([1, 3], {"w": torch.full((2, 4), 7.0)})
    states.commit()
    # Free rows that do not follow each other: a buffer, copied when it is stored.
    work = states.work([0, 1, 2, 3, 4])
    work["w"] += 1
    states.store(range(5), work)
    states.commit()
    assert states.state["w"][:, 0].tolist() == [4, 8, 4, 8, 4] and len(states.stack["w"]) == 10


def test_what_is_read_stays_until_the_commit():
    initial = {"w": torch.zeros(1, 4), "b": torch.zeros(1, 2)}
    states = Stacked(initial, 6)
    for turn in range(3):
        states.reserve(6)
        place = states.stack["w"].data_ptr()
        before = states.read(range(6)), states.read([1, 4], ["w"])
        for block in ([0, 1], [2, 3], [4, 5]):
            work = states.work(block, but=["b"])
            assert work["w"].eq(turn).all()
            work["w"] += 1
            work["b"].fill_(turn + 1)
            states.store(block, work)
        assert states.stack["w"].data_ptr() == place, "blocks that fit what was reserved move nobody"
        assert len(states.stack["w"]) == 12, "two rounds have room from the first on"
        assert before[0]["w"].eq(turn).all() and before[0]["b"].eq(turn).all() and before[1]["w"].eq(turn).all()
        assert list(before[1]) == ["w"]
        states.commit()
    assert states.read(range(6))["w"].data_ptr() in (place, place + 6 * 16), "rows that follow each other are no copy"


@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_what_a_download_replaces_is_not_loaded(monkeypatch, participation):
    loaded, load = [], Stacked.load

    def noted(self, clients, out=None, names=None):
        # What has never been written must not matter either.
        for tensor in (out or {}).values():
            tensor.fill_(7)
        loaded.append((list(clients), list(self.initial if names is None else names)))
        return load(self, clients, out, names)

    runs = []
    for patched in (False, True):
        fed = ff.Federation(
            small, clients_of(), "fedper", epochs=1, batch_size=3, cohort=2, participation=participation
        )
        if patched:
            monkeypatch.setattr(Stacked, "load", noted)
        for round in (1, 2, 3):
            loaded.clear()
            fed.fit(1)
            if patched and round > 1:
                clients, everything = fed.select(round), list(fed.states.initial)
                absent = set(clients) - set(fed.select(round - 1))
                assert bool(absent) == (participation < 1)
                personal = [name for name in everything if name not in fed.shared]
                assert (clients, everything if absent else personal) in loaded
        monkeypatch.undo()
        runs.append(fed)
    assert same_but_for_blocks(*runs)


def test_groups_of_one_size():
    assert [evenly(n, 16) for n in (400, 16, 17, 48, 3, 1, 0, 27)] == [16, 16, 16, 16, 16, 16, 16, 9]
    assert evenly(400, 17) == 16 and evenly(5, 1) == 1


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_every_way_to_keep_states_gives_the_same_bits(same, tmp_path, monkeypatch, participation):
    runs = {"database": federation(store=tmp_path / "states", participation=participation)}
    runs["records"] = federation(participation=participation)
    monkeypatch.setattr(Codec, "packs", lambda self: False)
    runs["stacked"] = federation(participation=participation)
    kinds = [type(fed.states) for fed in runs.values()]
    assert kinds == [Database, PackedStates, Stacked]
    for fed in runs.values():
        fed.fit(4)
    assert all(same(runs["stacked"], fed) for fed in runs.values())
    touched = {row["client"] for row in runs["stacked"].history}
    assert all(fed.states.touched() == sorted(touched) for fed in runs.values())
    density = runs["stacked"].density()
    assert all(fed.density() == density for fed in runs.values()) and 0 < density["0"][0] < 0.9
    assert runs["records"].states.bytes() == runs["database"].states.bytes() < runs["stacked"].states.bytes()


def test_a_round_in_blocks_has_the_same_bits(tmp_path, monkeypatch):
    whole = federation(participation=0.7)
    monkeypatch.setattr(loop, "BLOCK_BYTES", 1)
    seen = []
    runs = [federation(participation=0.7), federation(participation=0.7, store=tmp_path / "states")]
    for fed in (whole, *runs):
        fed.fit(3, on_client=lambda *a: seen.append(a[2:]))
    assert seen == 9 * [(done, 4) for done in (1, 2, 3, 4)]
    assert all(same_but_for_blocks(fed, whole) for fed in runs)


def test_an_interrupted_round_of_many_blocks_has_not_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "BLOCK_BYTES", 1)
    for place in ("memory", tmp_path / "states"):
        fed, straight = federation(store=place), federation()
        straight.fit(2)
        fed.fit(1)

        def stop(round, client, done, total):
            if done == 4:
                raise KeyboardInterrupt

        before = fed.states.state
        with pytest.raises(KeyboardInterrupt):
            fed.fit(1, on_client=stop)
        assert all(torch.equal(tensor, before[name]) for name, tensor in fed.states.state.items())
        fed.fit(1)
        assert same_but_for_blocks(fed, straight)


def test_bfloat16_rounds_what_trains_and_nothing_else():
    fed = federation(store_values="bfloat16")
    state = {name: torch.cat([tensor + 0.123456] * 2) for name, tensor in fed.states.initial.items()}
    state["0.mu"] *= torch.rand(state["0.mu"].shape) < 0.3
    state["1.num_batches_tracked"] = torch.tensor([3, 70000])
    fed.states.store([1, 4], state)
    assert torch.equal(fed.states.load([4])["0.u"], fed.states.initial["0.u"])
    fed.states.commit()
    loaded = fed.states.load([4, 1, 0])
    for name, tensor in state.items():
        expected = tensor if "running" in name or "num" in name else tensor.bfloat16().to(tensor.dtype)
        assert torch.equal(loaded[name][:2], expected.flip(0)), name
        assert torch.equal(loaded[name][2:], fed.states.initial[name])
    assert fed.states.touched() == [1, 4]


def test_a_resident_resnet9_with_a_tenth_of_mu():
    """Dense float32 is 10.3 MB. Bitmap 0.32, values of 2 bytes 0.51, u and v of 2 bytes 0.54."""
    template = ff.factorize(models.build("resnet9", (3, 32, 32), 10), ff.Rank1())
    initial = stack(tensors_of(template), 1)
    infos = describe(template)
    sparse = [name for name in infos if name.endswith("mu")]
    for name in sparse:
        ff.sparsity.prune_(initial[name].normal_(), 0.1)
    sizes = {}
    for values in ("exact", "bfloat16"):
        record, nonzeros = Codec(initial, infos, sparse, values).encode(initial, 0)
        sizes[values] = len(record)
    assert 255_000 < nonzeros < 258_000
    assert sizes["bfloat16"] <= 1.4e6 and sizes["exact"] <= 2.5e6


def test_a_million_clients_cost_nothing_until_they_take_part():
    made = set()

    def make(k):
        made.add(k)
        return client(k)

    fed = federation(LazyClients(make, 1_000_000), participation=5e-6, method="factorized-fl-alpha")
    fed.fit(2)
    drawn = {row["client"] for row in fed.history}
    assert len(fed) == 1_000_000 and 5 < len(drawn) <= 10
    assert made == drawn | {0}
    assert fed.states.touched() == sorted(drawn)
    assert len(fed.models) == 1_000_000 and torch.equal(fed.models[7][0].u, fed.models[8][0].u)
    # Only the round at work is kept.
    assert set(fed._data.placed) <= set(fed.reported.clients)


def test_clients_made_when_asked_for_train_like_a_list(same):
    listed, lazy = federation(), federation(LazyClients(client, 6))
    for fed in (listed, lazy):
        fed.fit(2)
    assert same(listed, lazy)
    bad = LazyClients(
        lambda k: ff.Client(train=(torch.randn(4, 1, 6, 6), torch.tensor([0, 1, k, 1])), test=client(k).test), 5
    )
    with pytest.raises(ValueError, match="client 3 has label 3, the model has 3 outputs"):
        federation(bad).fit(1)
    for k, make in ((0, client), (5, None)):
        with pytest.raises(ValueError, match="LazyClients"):
            LazyClients(make, k)


def test_states_in_a_directory_go_on(same, tmp_path):
    straight = federation(participation=0.5)
    straight.fit(4)
    fed = federation(participation=0.5, store=tmp_path / "states")
    fed.fit(2, tmp_path / "run")
    fed.states.close()
    resumed = ff.Federation.load(tmp_path / "run", clients=clients_of())
    resumed.fit(2, tmp_path / "run")
    assert same(resumed, straight)
    assert not (tmp_path / "run" / "checkpoints").exists()
    resumed.states.close()
    (tmp_path / "states").rename(tmp_path / "moved")
    with pytest.raises(RunDirectoryError, match=r"states, they are not; pass store="):
        ff.Federation.load(tmp_path / "run")
    assert ff.Federation.load(tmp_path / "run", store=tmp_path / "moved").round == 4
    with pytest.raises(RunDirectoryError, match="holds the clients of a run"):
        federation(participation=0.5, store=tmp_path / "moved")
    with pytest.raises(RunDirectoryError, match="holds other clients, or those of another model"):
        federation(clients_of(5), store=tmp_path / "moved")
    with pytest.raises(RunDirectoryError, match="is not empty and no store of clients"):
        federation(store=tmp_path / "run")
    (tmp_path / "moved" / "clients.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(RunDirectoryError, match=r"clients.sqlite: damaged: file is not a database"):
        ff.Federation.load(tmp_path / "run", store=tmp_path / "moved")


def test_checkpoints_hold_records(same, tmp_path):
    fed = federation(participation=0.5)
    fed.fit(2, tmp_path / "run")
    loaded = ff.Federation.load(tmp_path / "run", clients=clients_of())
    assert same(fed, loaded) and loaded.states.touched() == fed.states.touched() != list(range(6))
    fed.fit(1), loaded.fit(1)
    assert same(fed, loaded)


@pytest.mark.parametrize("store", ["memory", "directory"])
def test_about_a_directory(tmp_path, store):
    place = "memory" if store == "memory" else tmp_path / "states"
    fed = federation(participation=0.5, store=place)
    fed.fit(2, tmp_path / "run")
    touched = fed.states.touched()
    found = checkpoint.about(tmp_path / "run")
    assert (found["clients"], found["clients that have trained"], found["rounds"]) == (6, len(touched), 2)
    assert found["bytes"] == fed.states.bytes() and found["bytes a client"] == round(found["bytes"] / len(touched))
    mu = fed.states.load(touched, names=["0.mu", "4.mu"])
    expected = sum(int(t.count_nonzero()) for t in mu.values()) / sum(t.numel() for t in mu.values())
    assert found["density of μ"] == pytest.approx(expected, abs=1e-4)
    if store == "directory":
        assert checkpoint.about(place)["bytes"] == found["bytes"]
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        checkpoint.about(tmp_path / "nowhere")


def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL in round 2, after the first clients' states of that round were written."""
    done = forked.run(__file__, tmp_path, torch.get_num_threads())
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "states" / "clients.sqlite-wal").stat().st_size > 0
    fed = ff.Federation.load(tmp_path / "run", model=small, clients=clients_of())
    assert fed.round == 1
    straight = federation()
    straight.fit(1)
    assert same_but_for_blocks(fed, straight)
    fed.fit(2, tmp_path / "run")
    straight.fit(2)
    assert same_but_for_blocks(fed, straight)


def test_not_finite_names_the_tensor_and_passes_over_empty_ones():
    state = {"mu": torch.zeros(3, 0), "w": torch.ones(3, 2, 2), "b": torch.zeros(3, 1)}
    assert not_finite([4, 5, 6], state) == {}
    state["w"][1, 0, 1], state["b"][2, 0] = torch.nan, -torch.inf
    assert not_finite([4, 5, 6], state) == {5: "w has NaN or inf", 6: "b has NaN or inf"}


def test_numbers_whose_squares_overflow_are_none_to_go_on_with():
    state = {"w": torch.full((3, 2), 1e19), "h": torch.full((3, 2), 6e4, dtype=torch.float16)}
    assert not_finite([4, 5, 6], state) == {}
    state["w"][1, 0] = -1e30
    assert not_finite([4, 5, 6], state) == {5: "w has 1e+30, above 1.84e+19, whose square overflows"}


def die(directory, threads):
    loop.BLOCK_BYTES = 1
    torch.set_num_threads(threads)
    fed = federation(store=f"{directory}/states")
    # The log of the transaction reaches the file while the round goes on, as in a round larger than memory.
    fed.states.connection.execute("PRAGMA cache_size = 1")

    def on_client(round, client, done, total):
        if round == DIES_IN and done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    fed.fit(ROUNDS, f"{directory}/run", on_client=on_client)


if __name__ == "__main__":
    die(sys.argv[1], int(sys.argv[2]))
