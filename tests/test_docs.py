"""The code of docs/methods.md runs as it stands, and its page does what it says."""

import re
from pathlib import Path

import pytest
import torch

from fastfact.federation.strategy import STRATEGIES, Strategy

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods.md"


@pytest.fixture(scope="module")
def page():
    """The names the page's code leaves behind."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(code) == 3
    names = {}
    try:
        for block in code:
            exec(compile(block, str(PAGE), "exec"), names)
        yield names
    finally:
        STRATEGIES.pop("nearest", None)


def test_the_method_of_the_page_mixes_with_the_nearest(page):
    fed = page["fed"]
    key = fed.states.load(range(10))["fc2.weight"].flatten(1).double()
    unit = key / key.norm(dim=1, keepdim=True)
    matrix = fed.mixing_matrix()
    for k in range(10):
        nearest = max((i for i in range(10) if i != k), key=lambda i, k=k: float(unit[k] @ unit[i]))
        expected = torch.zeros(10, dtype=torch.float64)
        expected[[k, nearest]] = 0.5
        assert torch.equal(matrix[k], expected)
    assert not any(name.startswith("fc.") for name in fed.shared) and len(fed.shared) == 4
    assert [number for number, *_ in fed.history.curve()] == [1, 2, 3]


def test_the_page_says_which_settings_are_wrong(page):
    with pytest.raises(ValueError, match=r"nearest\(neighbours=0\)"):
        page["Nearest"](neighbours=0)


def test_the_table_lists_what_a_strategy_answers():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    public = {name for name, value in vars(Strategy).items() if callable(value) and not name.startswith("_")}
    assert listed == public - {"check", "settings", "prepare", "bind", "allowed", "schedule"}
