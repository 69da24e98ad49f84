"""`fastfact bench adapters` beside PEFT, on small networks: the sides agree, and the rows say what the goals ask."""

import pytest

from fastfact.bench import adapters

pytestmark = pytest.mark.slow


def test_rows_of_small_works(monkeypatch):
    monkeypatch.setattr(adapters, "LAYERS", {"32→48": (32, 48)})
    monkeypatch.setattr(adapters, "WORKS", {"4 clients": adapters.Work(4, 32, 2, 2, 2, 3, 2, 1.0)})
    rows = [row for _, some in adapters.run(rounds=2) for row in some]
    step, evaluation, together, at_work, resident = rows
    assert step["ratio"] > 0 and evaluation["ratio"] > 0 and step["goal"] == 1.1
    assert step["ours_kept"] <= step["peft_kept"]
    assert together["clients"] == 4 and together["cohort"] == 2 and together["ratio"] > 0
    assert at_work["share"] > 0 and 0 < resident["share"] < 1
    factors = 2 * 2 * ((32 + 96) + (32 + 32) + 2 * (32 + 128))
    assert resident["ours"] == 4 * factors
