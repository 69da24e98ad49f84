"""The runs behind the conflicting domains of docs/claims.md resolve; true groups train each by itself."""

from pathlib import Path

import pytest

from bench import conflicting
from fastfact.experiment import build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["demo.toml", "conflicting.toml"])
def test_every_row_resolves_and_has_its_own_place(name):
    base, seeds = conflicting.read(EXAMPLES / name)
    places = {}
    for row in conflicting.ROWS:
        for seed in range(seeds):
            cells = conflicting.cells(base, row, seed)
            assert not cells.keys() & places.keys()
            places |= cells
            if conflicting.ROWS[row][2] == "groups":
                members = [k for config in cells.values() for k in config.client_subset()]
                assert members == list(range(base.clients)) and len(cells) == conflicting.GROUPS
    for config in places.values():
        if config.seed == 0 and not config.only:
            build.strategy(config)
