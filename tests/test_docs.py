"""The code of README.md and docs/ runs as it stands, and the page of docs/methods.md does what it says."""

import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import FunctionType

import pytest
import torch
import typer

import fastfact as ff
from fastfact.base import plugins
from fastfact.cli import main
from fastfact.experiment.config import parse_setting
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


@pytest.mark.parametrize("name", ["layers.md", "federation.md", "how_it_works.md"])
def test_the_code_of_a_guide(name, tmp_path, monkeypatch):
    """Block after block, as a reader would type it."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in code_of(DOCS / name):
        exec(compile(block, name, "exec"), names)


def test_several_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    client = ff.Client(train=(torch.randn(8, 32), torch.arange(8)), test=(torch.randn(8, 32), torch.arange(8)))
    names = {"ff": ff, "setting": {"model": lambda: torch.nn.Linear(32, 10), "clients": [client] * 2, "cohort": 1}}
    (block,) = (block for block in code_of(DOCS / "many_clients.md") if "of_torchrun" in block)
    exec(compile(block.replace("factorized-fl-alpha", "fedavg"), "many_clients.md", "exec"), names)
    assert (tmp_path / "runs" / "several" / "metrics.jsonl").is_file()


def test_every_block_is_run():
    """Here, or where tests/ names the page."""
    others = "".join(path.read_text() for path in DOCS.parent.glob("tests/**/*.py"))
    with_code = [page.name for page in DOCS.rglob("*.md") if code_of(page)]
    assert [name for name in with_code if f'"{name}"' not in others] == []
    assert len(code_of(DOCS / "many_clients.md")) == 4


def commands():
    """Every command line of fastfact in the pages, as (page, words)."""
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for block in re.findall(r"```(?:bash|)\n(.*?)```", page.read_text(), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.strip(), comments=True) if line.strip().startswith("fastfact ") else []
                if words and "…" not in line and "DIR" not in words:
                    yield page.name, words[1:]
    for command in main.app.registered_commands + main.bench.registered_commands:
        yield "help", shlex.split(command.epilog.removeprefix("Example: "))[1:]


@pytest.mark.parametrize(("page", "words"), [pytest.param(*found, id=" ".join(found[1])[:60]) for found in commands()])
def test_commands_in_the_pages_have_such_options(page, words):
    command = typer.main.get_command(main.app)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "use", lambda text: None)
        context = command.make_context("fastfact", list(words), resilient_parsing="completion" in words[0])
    while rest := [*getattr(context, "_protected_args", ()), *context.args]:
        command = command.commands[rest[0]]
        context = command.make_context(rest[0], rest[1:])
    given = context.params
    for text in given.get("set") or ():
        method, key, value = parse_setting(text)
        for name in [method] if method else (given.get("methods") or given["method"]).split(","):
            assert name not in STRATEGIES or ff.methods.make(name, **{key: value})


PUBLIC = ("public", "data", "federation", "flower", "methods", "models", "nn", "nn.adapters", "nn.optim", "nn.sparsity")
PUBLIC += ("ops", "base.plugins")


def members(module):
    """The public functions and classes of a module, by name."""
    names = getattr(module, "__all__", None) or [n for n, v in vars(module).items() if getattr(v, "__doc__", None)]
    for name in names:
        value = getattr(module, name)
        own = (getattr(value, "__module__", None) or "").startswith("fastfact")
        if own and (inspect.isclass(value) or inspect.isfunction(value)) and not name.startswith("_"):
            yield name, value


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    module = importlib.import_module(f"fastfact.{name}")
    missing = [] if module.__doc__ else [name]
    for member, value in members(module):
        # A dataclass without one gets its signature.
        if not value.__doc__ or value.__doc__.startswith(f"{value.__name__}("):
            missing.append(member)
        fields = getattr(value, "__dataclass_fields__", ())
        for key, part in vars(value).items() if inspect.isclass(value) else ():
            kind = property | staticmethod | classmethod | FunctionType
            if not key.startswith("_") and key not in fields and isinstance(part, kind):
                inherited = any(getattr(vars(base).get(key), "__doc__", None) for base in value.__mro__)
                missing += [] if inherited else [f"{member}.{key}"]
    assert not missing


def test_every_public_module_has_its_page():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    assert set(re.findall(r"^::: fastfact\.(\S+)$", text, flags=re.MULTILINE)) == set(PUBLIC)


def test_the_table_of_choices_is_that_of_the_measurements():
    spec = importlib.util.spec_from_file_location("pictures", DOCS.parent / "bench" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    assert pictures.table() in (DOCS / "choose.md").read_text()


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
