"""A SuperLink and SuperNodes as processes, with TLS and node keys: slow, a process starts for each message."""

import pytest

pytestmark = pytest.mark.slow


def test_a_deployment_does_what_the_loop_does(tmp_path):
    from bench import flower_equal
    from bench.flower_deployment import deployed

    with deployed(tmp_path / "flower", flower_equal.NODES) as here:
        for method in ("factorized-fl-alpha", "fedfac-dynamic"):
            fed, out = flower_equal.loop(method, 2), tmp_path / method
            run = here.run(flower_equal.ROOT / "examples" / "flower", method=method, rounds=2, out=str(out))
            assert here.wait(run, 900) == "finished:completed", here.server_log(run)
            found = flower_equal.compare(fed, method, out, here.folder / "state")
            assert found["largest_difference"] < 1e-5 and found["accuracies_equal"]
            assert (found["ledger_up"], found["ledger_down"]) == (fed.ledger.up, fed.ledger.down)
            # Messages of a few hundred bytes go with as many of Flower's own.
            assert here.counter.up > fed.ledger.up and here.counter.down > fed.ledger.down
