"""The example that fine-tunes a model of transformers for many clients, at a tiny size. `make test-all` runs this."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fastfact.federation.client.optimizer import KEPT

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_transformers.py"
TINY = {"clients": 4, "rounds": 3, "width": 32, "layers": 1, "pretrain": 60, "samples": 24}


def test_the_example_of_adapters_for_many_clients():
    spec = importlib.util.spec_from_file_location("finetune_transformers", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    together, alone = (example.run(**TINY, cohort=cohort) for cohort in (4, 1))
    own = {name for name in together.states.state if not name.startswith(KEPT)}
    assert {name.rpartition(".")[2] for name in own} == {"A", "B", "weight", "bias"}
    assert {name for name in own if name[-1] not in "AB"} == {"classifier.weight", "classifier.bias"}
    assert {name.rpartition(".")[2] for name in together.shared} == {"A"}
    # Adam divides by what is near zero at the start, so that roundings of float32 grow over its steps.
    for name in own:
        torch.testing.assert_close(together.states.state[name], alone.states.state[name], rtol=0.02, atol=2e-3)
    first, last = (sum(row["test_loss"] for row in together.history.of(round)) for round in (1, TINY["rounds"]))
    assert last < first
    assert together.models[0](**together.clients[0].entries.unpacked(together.clients[0].test[0])).logits.shape == (
        20,
        2,
    )
