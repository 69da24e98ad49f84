"""The floors of the package: every import goes to a lower floor, and inside a folder there is no circle.

An import counts wherever it stands: under TYPE_CHECKING, inside a function, or by name through importlib.
"""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = [
    {"base", "models", "data"},
    {"kernels"},
    {"ops"},
    {"nn"},
    {"federation"},
    {"methods"},
    {"public", "experiment"},
    {"__init__", "papers", "bench"},
    {"cli", "flower"},
    {"__main__"},
]
"""The rooms: folders, and the modules beside them. `__init__`, filled by `public`, is what users import."""


def modules() -> dict[str, Path]:
    """Dotted name below `fastfact` → file; a folder is the name of its `__init__`."""
    found = {}
    for folder, package in ((ROOT / "fastfact", ()), (ROOT / "kernels", ("kernels",))):
        for path in sorted(folder.rglob("*.py")):
            found[".".join([*package, *path.relative_to(folder).with_suffix("").parts])] = path
    return found


MODULES = modules()


def module_of(name: str) -> str | None:
    """The module that an imported name (fastfact.ops.conv, or fastfact.ops.conv.fused_conv2d) is or stands in."""
    parts = name.split(".")
    if parts[0] != "fastfact":
        return None
    for end in range(len(parts), 0, -1):
        for candidate in (".".join(parts[1:end]), ".".join([*parts[1:end], "__init__"])):
            if candidate in MODULES:
                return candidate
    return None


def imported(path: Path):
    """The modules of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):
            constants = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            names = [
                value for value in constants if isinstance(value, str) and re.fullmatch(r"fastfact(\.\w+)+", value)
            ]
        yield from filter(None, map(module_of, names))


@functools.cache
def arrows_of_modules() -> dict[str, set[str]]:
    return {module: set(imported(path)) - {module} for module, path in MODULES.items()}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """One circle of a graph; empty if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node not in done:
            for other in sorted(arrows.get(node, ())):
                if found := walk(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(arrows) if (found := walk(node, []))), [])


def inside(folder: str) -> dict[str, set[str]]:
    """The arrows between what lies in a folder ("" for the package): modules, and folders as one each."""
    prefix = f"{folder}." if folder else ""
    within = defaultdict(set)
    for module, targets in arrows_of_modules().items():
        if module.startswith(prefix):
            start = module.removeprefix(prefix).partition(".")[0]
            ends = {target.removeprefix(prefix).partition(".")[0] for target in targets if target.startswith(prefix)}
            within[start] |= ends - {start}
    return within


def test_every_import_goes_down():
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    arrows = inside("")
    assert set(arrows) == set(floor)
    up = [f"{a} → {b}" for a, ends in arrows.items() for b in sorted(ends) if floor[b] >= floor[a]]
    assert not up, ", ".join(up)


def test_no_folder_has_a_circle():
    folders = {module.rpartition(".")[0] for module in MODULES}
    circles = {folder: circle(inside(folder)) for folder in sorted(folders) if circle(inside(folder))}
    assert not circles, circles


def test_every_folder_says_what_lives_there():
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module != "__init__":
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert "Read `" in text, f"{path}: which file to read first?"


def test_the_tests_mirror_the_package():
    folders = {module.rpartition(".")[0] for module in MODULES} - {"", "kernels"}
    missing = [name for name in sorted(folders) if not any((ROOT / "tests" / name.replace(".", "/")).glob("test_*.py"))]
    assert not missing, f"no tests for {', '.join(missing)}"
