"""A short run of the fuzz test of the public ops; `python -m tests.fuzz ops --minutes N` runs it for long."""

import os

import pytest

from fastfact import ops
from tests.fuzz import ops as target

EXAMPLES = int(os.environ.get("FASTFACT_FUZZ_EXAMPLES", "25"))


def test_every_public_op_has_a_case():
    helpers = {"GatheredBatch"}
    assert set(target.CASES) >= set(ops.__all__) - helpers


@pytest.mark.parametrize("name", target.CASES)
def test_any_arguments(name):
    target.fuzz(name, EXAMPLES)
