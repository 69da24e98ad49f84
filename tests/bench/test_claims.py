"""The runs behind docs/claims.md: that each resolves, and that the table says of how many seeds a figure is."""

import importlib.util
from collections import Counter
from pathlib import Path

from fastfact.experiment import build

PATH = Path(__file__).resolve().parents[2] / "bench" / "claims.py"
spec = importlib.util.spec_from_file_location("claims", PATH)
claims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(claims)


def test_every_cell_resolves_and_has_its_own_place():
    places = set()
    for name, scenario, seed in claims.cells():
        config, place = claims.cell(name, scenario, seed)
        build.strategy(config)
        assert config.seed == seed and set(config.settings) <= {config.method}
        places.add(place)
    assert len(places) == len(claims.cells())


def test_every_row_of_the_table_has_three_seeds():
    seeds = Counter((name, scenario) for name, scenario, _ in claims.cells() if scenario in claims.SCENARIOS)
    names = claims.CORE | claims.START | claims.ABLATIONS | claims.OTHERS | claims.OWN
    assert seeds == dict.fromkeys(((name, scenario) for name in names for scenario in claims.SCENARIOS), 3)


def test_a_figure_of_fewer_seeds_says_so():
    three = {key: claims.summary([0.5, 0.6, 0.7]) for key in ("accuracy", "recalibrated")}
    text = claims.markdown({"a": {"domains": three, "permuted-iid": {"accuracy": claims.summary([0.25])}}, "b": {}})
    assert text.splitlines()[2:] == ["| a | 25.0 (1) | – | 60.0 ± 10.0 / 60.0 ± 10.0 |"]
