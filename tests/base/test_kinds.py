from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import fastfact as ff
from fastfact.base.kinds import check_kinds, type_error
from fastfact.methods import FactorizedFLAlpha, FedDecomp, FedPer, FedRep


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        (int, [0, -3], [True, 1.0, "1", None], "an integer"),
        (float, [0.5, 2], [False, "x", None], "a number"),
        (bool, [True], [1, 0.0, "no"], "True or False"),
        (int | None, [None, 4], [True, 4.0], "an integer or None"),
        (Sequence[str], [3, None, "x"], [], None),
        ("int", [3, "x"], [], None),
    ],
    ids=str,
)
def test_kinds(kind, good, bad, words):
    assert all(type_error(value, kind) is None for value in good)
    assert all(type_error(value, kind) == words for value in bad)


def test_a_field_of_another_type_is_named():
    @dataclass
    class Settings:
        rate: float = 1
        steps: int | None = None

    check_kinds(Settings(), "Settings")
    with pytest.raises(ValueError, match=r"Settings\(steps='3'\): must be an integer or None"):
        check_kinds(Settings(steps="3"), "Settings")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ff.Rank1(rank=True), r"Rank1\(rank=True\): must be an integer"),
        (lambda: ff.Rank1(sparse="no"), r"Rank1\(sparse='no'\): must be True or False"),
        (lambda: ff.LowRank(ratio="a"), r"LowRank\(ratio='a'\): must be a number"),
        (lambda: ff.LowRank(scaling=None), r"LowRank\(scaling=None\): must be a number"),
        (lambda: ff.Hadamard(ratio="a"), r"Hadamard\(ratio='a'\): must be a number"),
        (
            lambda: ff.Schedule(1, target_density="a"),
            r"Schedule\(target_density='a'\): must be a number or None",
        ),
        (lambda: FactorizedFLAlpha(tau="high"), r"factorized-fl-alpha\(tau='high'\): must be a number"),
        (lambda: FactorizedFLAlpha(matches=2.5), r"factorized-fl-alpha\(matches=2.5\): must be an integer"),
        (lambda: FedDecomp(lora_epochs="2"), r"feddecomp\(lora_epochs='2'\): must be an integer or None"),
        (lambda: FedPer(personal_layers=True), r"fedper\(personal_layers=True\): must be an integer"),
        (lambda: FedRep(body_epochs=None), r"fedrep\(body_epochs=None\): must be an integer"),
    ],
)
def test_specs_schedules_and_methods(make, message):
    with pytest.raises(ValueError, match=message):
        make()
