import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.federation.state import stack
from fastfact.federation.tensors import describe, tensors_of
from fastfact.federation.wire.format import ENTRY, HEADER, Wire
from fastfact.federation.wire.ledger import FRAME, Entry, Ledger, Sizes


def model(dtype=torch.float32) -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 5))
    return ff.factorize(net, ff.Rank1()).to(dtype)


def wire(values, dtype=torch.float32):
    infos = describe(model(dtype))
    return Wire(infos, values, [name for name in infos if name.endswith("mu")])


def client_states(dtype=torch.float32, k=4):
    """μ with 0, 10, 50 and 100 % nonzeros, negative zeros among them, and other numbers of every size."""
    torch.manual_seed(0)
    state = stack(tensors_of(model(dtype)), k)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            tensor.copy_(
                torch.randn(tensor.shape)
                * 10
                ** torch.randint(-3, 3, tensor.shape[:2]).double().view(*tensor.shape[:2], *[1] * (tensor.dim() - 2))
            )
        if name.endswith("mu"):
            keep = torch.rand(tensor.shape) < torch.tensor([0.0, 0.1, 0.5, 2.0]).view(k, *[1] * (tensor.dim() - 1))
            tensor.mul_(keep)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", ["exact", "bfloat16", "int8"])
def test_sizes_and_numbers_are_those_of_the_real_message(values, dtype):
    """What `send` says arrives, and how long the message is, against encoding and decoding every message."""
    states, line = client_states(dtype), wire(values, dtype)
    received, sizes = line.roundtrip(states, list(states))
    for row in range(4):
        message = line.encode({name: tensor[row] for name, tensor in states.items()})
        assert len(message) == sizes.total(row)
        decoded = line.decode(message)
        assert set(decoded) == set(states)
        for name, tensor in decoded.items():
            assert tensor.dtype == states[name].dtype
            assert torch.equal(tensor, received[name][row]), name
            if values == "exact":
                assert torch.equal(tensor, states[name][row])
    lossy = any(not torch.equal(received[name], states[name]) for name in states)
    assert lossy == (values == "int8" or (values == "bfloat16" and dtype != torch.bfloat16))


@pytest.mark.parametrize("values", ["exact", "bfloat16", "int8"])
def test_some_rows_of_a_tensor(values):
    """A message with a part of the channels: its length, what arrives, and what stays as it was."""
    states, line = client_states(), wire(values)
    mask = torch.tensor([True, False, False, True, True, False, True, False])
    rows = {"0.mu": mask, "0.bias": mask, "1.weight": torch.zeros(8, dtype=torch.bool)}
    names = ["0.u", "0.mu", "0.bias", "1.weight"]
    received, sizes = line.roundtrip(states, names, rows)
    whole, _ = line.roundtrip(states, names)
    for row in range(4):
        own = {name: states[name][row] for name in names}
        message = line.encode(own, rows)
        assert len(message) == sizes.total(row)
        decoded = line.decode(message, onto=own)
        assert all(torch.equal(decoded[name], received[name][row]) for name in names)
        assert torch.equal(decoded["0.mu"][mask], whole["0.mu"][row][mask])
        assert torch.equal(decoded["0.mu"][~mask], own["0.mu"][~mask])
        assert torch.equal(decoded["1.weight"], own["1.weight"])
        assert (line.decode(message)["0.mu"][~mask] == 0).all()
    if values == "exact":
        assert sizes.bytes["0.bias"] == [7 + 1 + 4 * 4] * 4 and sizes.numbers["0.bias"] == [4] * 4
        assert sizes.bytes["1.weight"] == [7 + 1] * 4 and sizes.numbers["1.weight"] == [0] * 4


def test_sizes_by_hand():
    states, line = client_states(), wire("exact")
    _, sizes = line.roundtrip(states, ["0.u", "0.mu", "1.num_batches_tracked"])
    assert sizes.bytes[FRAME] == [8] * 4 and HEADER.size == 8 and ENTRY.size == 7
    assert sizes.bytes["0.u"] == [7 + 9 * 4] * 4
    assert sizes.bytes["1.num_batches_tracked"] == [7 + 8] * 4
    # 8 rows of 27 positions: 4 bytes of bitmap each, then the nonzeros; dense where that is shorter.
    nonzeros = [int((mu != 0).sum()) for mu in states["0.mu"]]
    assert sizes.bytes["0.mu"] == [7 + min(8 * 4 + 4 * n, 8 * 27 * 4) for n in nonzeros]
    assert sizes.numbers["0.mu"] == nonzeros and nonzeros[0] == 0 and nonzeros[3] == 216
    assert sizes.numbers["0.u"] == [9] * 4
    assert set(sizes.numbers) == {"0.u", "0.mu", "1.num_batches_tracked"}


@pytest.mark.parametrize(("values", "bound"), [("bfloat16", 2**-8), ("int8", 0.5 / 127)])
def test_lossy_numbers_are_near(values, bound):
    states, line = client_states(), wire(values)
    received, _ = line.roundtrip(states, list(states))
    for name in ("0.v", "3.v", "0.mu"):
        rows = states[name].flatten(2) if states[name].dim() > 2 else states[name].unsqueeze(1)
        got = received[name].reshape(rows.shape)
        top = rows.abs().amax(-1, keepdim=True) if values == "int8" else rows.abs()
        assert ((got - rows).abs() <= bound * top * 1.001).all()
        assert (got[rows == 0] == 0).all()


def test_a_damaged_message_is_an_error():
    states, line = client_states(), wire("exact")
    message = line.encode({name: tensor[1] for name, tensor in states.items()})
    for damaged in (b"", message[:5], message[:-1], message[: len(message) // 2], b"XX" + message[2:]):
        with pytest.raises(ValueError, match="message"):
            line.decode(damaged)
    with pytest.raises(ValueError, match=r"0.u has shape \[2, 3\]"):
        line.encode({"0.u": torch.zeros(2, 3)})


def test_ledger_sums_and_rows():
    ledger = Ledger()
    ledger.add(1, "up", [0, 2], Sizes({"a": [10, 20], FRAME: [8, 8]}, {"a": [2, 5]}))
    ledger.add(1, "down", [0, 2], Sizes({"a": [7, 7], FRAME: [8, 8]}, {"a": [1, 1]}))
    ledger.add(2, "up", [1], Sizes({"a": [10], "b": [3], FRAME: [8]}, {"a": [2], "b": [1]}))
    ledger.add(2, "down", [], Sizes())
    assert (ledger.up, ledger.down, ledger.bytes()) == (10 + 20 + 16 + 21, 30, 97)
    assert ledger.bytes("up", round=1, client=2, name="a") == 20
    assert ledger.by_name() == {"a": 54, FRAME: 40, "b": 3}
    assert ledger.by_client("up") == {0: 18, 2: 28, 1: 21}
    assert Ledger([Entry(1, "up", [3], Sizes())]).by_client() == {3: 0}
    assert ledger.numbers("up") == 10 and ledger.formula() == 4 * 12
    again = Ledger.from_rows(ledger.rows())
    assert again.rows() == ledger.rows() and again.bytes() == 97 and len(again.entries) == 3
    with pytest.raises(ValueError, match="2 sizes for 1 clients"):
        Ledger.from_rows([{"round": 1, "direction": "up", "clients": [0], "bytes": {"a": [1, 2]}, "numbers": {}}])


@pytest.mark.parametrize("method", ff.methods.names())
def test_a_federations_ledger_is_the_length_of_its_messages(make, method):
    """Round 2 of each method, the uploads encoded for real, and FedFOMO's two weights with their header."""
    fed = make(make.cnn, (1, 6, 6), method=method, wire="bfloat16")
    fed.fit(2)
    state = fed.states.state
    for k in range(3):
        sent = {name: fed.exchange.keyed(state)[name][k] for name in fed.uploaded}
        length = len(fed.wire.encode(sent, fed.method.channel_masks("up", fed.server_state))) if fed.uploaded else 0
        length += 2 * 4 + 8 if method == "fedfomo" else 0
        assert fed.ledger.bytes("up", round=2, client=k) == length == fed.history.of(2)[k]["bytes_up"]
        assert (fed.ledger.bytes("down", round=2, client=k) > 0) == bool(fed.shared)


def test_the_papers_formula(make):
    """{(P_S2C + P_C2S) × 4} × K × R with α's u up and down and v of layer L − 1 up."""
    fed = make(method="factorized-fl-alpha")
    fed.fit(4)
    u, v = 6 + 8, 5
    assert fed.ledger.formula() == ((u + (u + v)) * 4) * 3 * 4
    dense = make(method="fedavg")
    dense.fit(2)
    parameters = 6 * 8 + 8 + 8 * 5 + 5 + 5 * 3 + 3
    assert dense.ledger.formula() == 2 * parameters * 4 * 3 * 2


def test_the_server_computes_with_what_arrives(make):
    exact, lossy = make(), make(wire="int8")
    exact.fit(1)
    lossy.fit(1)
    for name, tensor in exact.states.state.items():
        assert torch.equal(tensor, lossy.states.state[name])
    name = "0.weight"
    sent = lossy.wire.roundtrip(lossy.states.state, [name])[0][name]
    n = torch.tensor([10, 7, 12], dtype=torch.float64)
    average = (sent * n[:, None, None]).sum(0, keepdim=True) / n.sum()
    expected = lossy.wire.roundtrip({name: average}, [name])[0][name][0]
    got = tensors_of(lossy.mixed()[0])[name].detach()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(got, tensors_of(exact.mixed()[0])[name].detach(), rtol=1e-6, atol=1e-9)
