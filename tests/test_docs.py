"""The code of README.md and docs/ runs as it stands, and the page of docs/methods.md does what it says."""

import re
from pathlib import Path

import pytest
import torch

import fastfact as ff
from fastfact.federation.server.strategy import STRATEGIES, Strategy
from fastfact.federation.storage import checkpoint

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "methods.md"


def code_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def page():
    """The names the page's code leaves behind."""
    code = code_of(PAGE)
    assert len(code) == 4
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
    assert listed == public - {"check", "settings", "prepare", "bind", "allowed", "active_phases"}


def test_a_million_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = DOCS / "many_clients.md"
    names = {}
    exec(compile(code_of(page)[0], str(page), "exec"), names)
    fed = names["fed"]
    assert len(fed) == 1_000_000 and len(fed.states.touched()) == 20
    about = checkpoint.about(tmp_path / "runs" / "many" / "run")
    assert about["clients that have trained"] == 20 and about["bytes a client"] == fed.states.bytes() / 20


def test_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 12, 1, 8, 8, generator=draw), torch.randint(10, (4, 12), generator=draw)
    names = {
        "my_data": [(x[k, :8], y[k, :8], x[k, 8:], y[k, 8:]) for k in range(4)],
        "make_model": lambda: ff.models.build("mlp", (1, 8, 8), 10, width=0.1),
    }
    layers, adapters, federation = code_of(DOCS.parent / "README.md")
    exec(layers, names)
    assert not ff.factorized_layers(names["model"]) and "layer4.1.conv2" in capsys.readouterr().out
    exec(adapters, names)
    assert names["vit"].heads.head.weight.requires_grad and "LowRank" in capsys.readouterr().out
    exec(federation.replace("rounds=50", "rounds=2"), names)
    assert len(names["history"]) == 8 and (tmp_path / "runs" / "mine" / "metrics.jsonl").is_file()
