"""The floors of the package: what stands lower knows nothing of what stands higher."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "fastfact"
FLOORS = [
    {"reference", "kinds"},
    {"kernels", "backends"},
    {"ops"},
    {"specs", "sparsity", "optim", "cost", "kept"},
    {"nn"},
    {"convert"},
    {"models", "data", "report"},
    {"federation"},
    {"methods"},
    {"privacy", "record", "measures", "pictures", "experiment", "plan", "recipes", "reproduce", "traffic"},
    {"bench", "terminal"},
    {"cli_papers"},
    {"cli"},
    {"__main__"},
]


def imported(tree: ast.AST):
    """The parts of the package a module imports, without those that only type checkers import."""
    hints = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    hints = {id(inner) for node in hints for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in hints and node.module:
            top, *rest = node.module.split(".")
            if top == "fastfact":
                yield from rest[:1] or (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fastfact."))


def test_no_module_imports_from_a_floor_above():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    parts = {path.stem: [path] if path.is_file() else sorted(path.rglob("*.py")) for path in PACKAGE.iterdir()}
    parts["kernels"] = sorted((PACKAGE.parent / "kernels").glob("*.py"))
    parts = {
        part: files for part, files in parts.items() if part != "__init__" and files[:1] and files[0].suffix == ".py"
    }
    assert set(parts) == set(floor)
    for part, files in parts.items():
        for path in files:
            above = [name for name in imported(ast.parse(path.read_text())) if floor.get(name, 0) > floor[part]]
            assert not above, f"{path} imports {above}"
