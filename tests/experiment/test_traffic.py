import pytest

from fastfact import methods
from fastfact.experiment import traffic
from fastfact.federation.server.strategy import make

NETWORK = traffic.Network("cnn2", 0.1, (1, 8, 8), 3)


@pytest.mark.parametrize("name", methods.names())
def test_a_federation_that_trains_sends_as_much(name):
    """But for μ, whose zeros training decides: every round of a real run has the numbers that `measure` says; of
    adapters of unequal ranks at most those, as the row of B of a unit that was never active is still zero."""
    if name.startswith(("factorized-", "simfed")):
        method = make(name, sparse=False, l1=0.0)
    else:
        method = traffic.strategy(name, permuted=False)
    measured = traffic.measure(NETWORK, method, clients=4)
    fed = traffic.federation(NETWORK, method, 4, 1.0, trains=True)
    fed.fit(5)
    for round, part in enumerate(("first", "second", "later", "later", "later"), 1):
        for direction in ("up", "down"):
            sent, told = fed.ledger.numbers(direction, round), measured[f"{part}_{direction}"]
            if any(map(method.pads, fed.infos.values())):
                assert 0.5 * told < sent <= told, (round, direction)
            else:
                assert sent == told, (round, direction)
    if not any(map(method.pads, fed.infos.values())):
        assert traffic.total(measured, 5) == fed.ledger.formula()


def test_the_papers_own_numbers():
    """Factorized-FL, C.2: FedAvg sends the model each way; β all but the classifier's; α u, and v of layer L − 1."""
    network = traffic.Network("mlp", 0.04, (1, 2, 5), 3)  # 10 → 8 → 8 → 3
    dense = (10 * 8 + 8) + (8 * 8 + 8) + (8 * 3 + 3)
    fedavg = traffic.measure(network, traffic.strategy("fedavg", False), clients=3)
    assert fedavg["numbers_up"] == fedavg["numbers_down"] == dense
    assert traffic.total(fedavg, 7) == 4 * (2 * dense) * 3 * 7
    alpha = traffic.measure(network, traffic.strategy("factorized-fl-alpha", False), clients=3)
    assert (alpha["numbers_up"], alpha["numbers_down"]) == (10 + 8 + 8, 10 + 8)
    beta = traffic.measure(network, traffic.strategy("factorized-fl-beta", False), clients=3, density=1.0)
    assert beta["numbers_up"] == (10 + 8 + 80 + 8) + (8 + 8 + 64 + 8)
    half = traffic.measure(network, traffic.strategy("factorized-fl-beta", False), clients=3, density=0.5)
    assert 34 < half["numbers_up"] - 34 - 16 < 34 + 80 + 64 - 60


def test_bad_input_names_the_argument():
    for text, message in (("3,x", "shape='3,x'"), ("0", "shape='0'")):
        with pytest.raises(ValueError, match=message):
            traffic.shape_of("resnet9", text)
    with pytest.raises(ValueError, match="model='resnet7'"):
        traffic.shape_of("resnet7", None)
    for options, message in (({"density": 2}, "density=2"), ({"clients": 0}, "clients=0")):
        with pytest.raises(ValueError, match=message):
            traffic.federation(NETWORK, traffic.strategy("fedavg", False), **{"clients": 2, "density": 1.0} | options)
