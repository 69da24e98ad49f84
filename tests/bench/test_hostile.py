"""A sample of `bench/hostile.py`: what is refused changes nothing for the honest."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from fastfact.federation.wire.format import Wire

FOLDER = Path(__file__).resolve().parents[2] / "bench"
spec = importlib.util.spec_from_file_location("hostile", FOLDER / "hostile.py")
hostile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hostile)
HONEST = [k for k in range(hostile.CLIENTS) if k not in hostile.HOSTILE]


def trained(method, attack, rule="default", rounds=2):
    fed = hostile.federation(method, rule, attack, samples=50)
    fed.fit(rounds)
    return fed


@pytest.mark.parametrize("method", ["fedavg", "factorized-fl-beta"])
def test_what_is_refused_was_never_there(method):
    without = trained(method, hostile.absent).states.load(HONEST)
    for attack in (hostile.huge, hostile.lies):
        fed = trained(method, attack)
        assert all(bool(row["left_out"]) == (row["client"] in hostile.HOSTILE) for row in fed.history)
        assert all(torch.equal(tensor, without[name]) for name, tensor in fed.states.load(HONEST).items())


def test_each_lie_is_found():
    fed = hostile.federation("factorized-fl-beta", "default", hostile.nothing)
    state = {name: tensor[0] for name, tensor in fed.initial.items() if name in fed.uploaded}
    for name in set(fed.sparse) & set(state):
        state[name] = state[name] * (torch.rand(state[name].shape) < 0.2)
    message = fed.wire.encode(state)
    lies = (hostile.wrong_count, hostile.wrong_name, hostile.wrong_shape, hostile.wrong_bitmap)
    for lie in lies:
        with pytest.raises(ValueError, match=r"message|unpack_bitmap"):
            fed.wire.decode(bytes(lie(bytearray(message))))
    assert isinstance(fed.wire, Wire) and fed.wire.decode(message)


def test_the_table_has_every_cell():
    cells = {cell[:3] for cell in hostile.cells()}
    rows = json.loads(hostile.RESULT.read_text())["rows"]
    assert {(row["method"], row["rule"], row["attack"]) for row in rows} == cells
    assert hostile.tables(rows) in hostile.PAGE.read_text()
