"""The tables and figures of the papers as data: one file a paper, read here and resolved to runs.

A paper's file says what its experiments have in common (`settings`, the names of `Config` and, in `set`, the method's),
what its methods are called (`methods`), what is smaller on the stand-in (`standin`), and has a table for each result:

    title, where     what it shows; the section or appendix
    columns          label → settings, with `measure` (see `measures.MEASURES`), and `of` = [first, last], the
                     clients the number is of, from 1
    moment           when accuracies are taken (see `measures.MOMENTS`); by default the paper's, "trained" without one
    rows             label → settings; without it the labels of the paper's numbers, looked up in `methods`
    paper            the paper's numbers, a line a row: label, then a number a column, two blanks or more between them;
                     "64.31±1.08" has a spread, "-" is no number
    says             what the paper says where it prints no numbers
    pictures         names of `figures.PICTURES`
    settings, standin, measure, relative_to, like, note

A key in `set` is for every method that knows it, "factorized-*.epsilon" for those of that name only. Settings are
applied in the order paper, result, column, row; then, on the stand-in, `standin` of each in that order.
`like` takes over columns, rows, numbers and settings of another result, for figures of a table's runs.
`relative_to` divides by the row of that label. `note` says what differs from the paper on every data set.
"""

import functools
import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from fastfact import data
from fastfact.experiment import build
from fastfact.experiment.config import SIMULATION, Config
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.papers.figures import PICTURES
from fastfact.papers.measures import MEASURES, MOMENTS

FOLDER = Path(__file__).parent
STANDIN = "digits"
_OWN = ("measure", "moment", "of", "standin")
_RESULT = (
    *("title", "where", "columns", "rows", "paper", "says", "pictures", "settings", "standin", "measure"),
    *("moment", "relative_to", "like", "note", "percent"),
)


@dataclass(frozen=True)
class Place:
    """What stands in one place of a table: a measure, of which clients (from 0; None for all), and of which moment."""

    measure: str
    clients: tuple[int, ...] | None
    moment: str


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe resolved: (row, column) → the runs behind it, one a seed; `changes` is what is not as in the paper."""

    recipe: "Recipe"
    grid: dict[tuple[str, str], tuple[Config, ...]]
    changes: tuple[str, ...]

    def cells(self) -> dict[str, Config]:
        """Directory name → run; equal runs are one."""
        return {name_of(config): config for runs in self.grid.values() for config in runs}


@dataclass(frozen=True)
class Recipe:
    """One table or figure. `numbers`: (row, column) → (the paper's number, its spread or None)."""

    paper: str
    name: str
    title: str
    where: str
    rows: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Mapping[str, Any]]
    places: Mapping[tuple[str, str], Place]
    numbers: Mapping[tuple[str, str], tuple[float, float | None]]
    says: str
    pictures: tuple[str, ...]
    relative_to: str | None
    percent: bool
    note: str
    moment: str
    common: tuple[Mapping[str, Any], ...]

    def records(self) -> str:
        """What its runs have to keep."""
        wanted = [MEASURES[place.measure].record for place in self.places.values()]
        wanted += [PICTURES[name].record for name in self.pictures]
        return ",".join(sorted({name for text in wanted for name in text.split(",") if name}))

    def taken(self) -> dict[str, list[str]]:
        """When the numbers are taken → the measures taken then."""
        moments: dict[str, list[str]] = {}
        for place in self.places.values():
            names = moments.setdefault(MEASURES[place.measure].taken(place.moment), [])
            if place.measure not in names:
                names.append(place.measure)
        return moments

    def settings(self, row: str, column: str, standin: bool) -> dict[str, Any]:
        """What the paper asks for in one place of the grid, and with `standin` what the stand-in changes."""
        layers = [*self.common, self.columns[column], self.rows[row]]
        merged: dict[str, Any] = {}
        for patch in layers:
            _merge(merged, patch)
        for patch in layers if standin else ():
            _merge(merged, patch.get("standin", {}))
        return merged

    def resolve(
        self,
        overrides: Mapping[str, Any] | None = None,
        dataset: str | None = None,
        available: Callable[[str], bool] = lambda name: name == STANDIN,
    ) -> ResolvedRecipe:
        """The runs, on `dataset` if given, else on the paper's where `available`, on the stand-in otherwise.

        overrides: values of `Config`, and `seeds`, that come last.
        """
        overrides, grid, replaced = dict(overrides or {}), {}, set()
        for row in self.rows:
            for column in self.columns:
                wanted = self.settings(row, column, standin=False)
                own = wanted["dataset"]
                simulated = own == SIMULATION
                there = simulated or (available(own) if dataset is None else own == dataset)
                made = self.settings(row, column, standin=not there)
                if not there:
                    made["dataset"] = dataset or STANDIN
                made |= overrides
                for key in (made.keys() | wanted.keys()) - {"set", "method"}:
                    if made.get(key) != wanted.get(key):
                        replaced.add(f"{key} {made.get(key)} for {wanted.get(key, _default(key))}")
                for key, value in made.get("set", {}).items():
                    if value != (asked := wanted.get("set", {}).get(key)):
                        replaced.add(f"{key} {value} for {asked}")
                grid[row, column] = _runs(made, self.records())
        return ResolvedRecipe(self, grid, tuple(sorted(replaced)))


@functools.cache
def _default(key: str) -> Any:
    return getattr(Config(), key, None)


def _merge(into: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if key == "set":
            into["set"] = into.get("set", {}) | value
        elif key not in _OWN:
            into[key] = value


def _runs(made: dict[str, Any], recorders: str) -> tuple[Config, ...]:
    made = dict(made)
    seeds, own = made.pop("seeds", 1), made.pop("set", {})
    if seeds < 1:
        raise ValueError(f"seeds={seeds}, must be at least 1")
    known = {f.name for f in fields(STRATEGIES[made["method"]])}
    mine = {}
    for name, value in own.items():
        pattern, _, key = name.rpartition(".")
        if key in known and fnmatch(made["method"], pattern or "*"):
            mine[key] = value
    config = Config(**made, record=recorders, settings={made["method"]: mine} if mine else {})
    build.strategy(config)
    return tuple(replace(config, seed=config.seed + n) for n in range(seeds))


def name_of(config: Config) -> str:
    """A directory name no other run has."""
    content = asdict(config)
    del content["data_dir"]
    code = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
    return f"{config.method}-{code}-seed{config.seed}"


def _number(text: str) -> tuple[float, float | None] | None:
    if text == "-":
        return None
    value, _, spread = text.partition("±")
    return float(value), float(spread) if spread else None


def _block(text: str) -> dict[str, list[tuple[float, float | None] | None]]:
    rows = {}
    for line in text.strip().splitlines():
        label, *values = [part.strip() for part in line.strip().split("  ") if part.strip()]
        rows[label] = [_number(value) for value in values]
    return rows


def _recipe(paper: str, name: str, content: Mapping[str, Any], file: Mapping[str, Any]) -> Recipe:
    def wrong(why: str) -> ValueError:
        return ValueError(f"{paper} {name}: {why}")

    if unknown := set(content) - set(_RESULT):
        raise wrong(f"unknown {', '.join(sorted(unknown))}")
    if "like" in content:
        content = {**_results(content["like"], file), **content}
    printed = _block(content.get("paper", ""))
    columns = content["columns"]
    rows = content.get("rows")
    if rows is None:
        if missing := [label for label in printed if label not in file["methods"]]:
            raise wrong(f"no method is called {', '.join(missing)}")
        rows = {label: file["methods"][label] for label in printed}
    measure = content.get("measure", file.get("measure", "accuracy"))
    moment = content.get("moment", file.get("moment", "trained"))
    if moment not in MOMENTS:
        raise wrong(f"unknown moment {moment}")
    places = {}
    for label, column in columns.items():
        first, last = column.get("of", (None, None))
        clients = None if first is None else tuple(range(first - 1, last))
        for row, patch in rows.items():
            place = Place(patch.get("measure", column.get("measure", measure)), clients, moment)
            if place.measure not in MEASURES:
                raise wrong(f"unknown measure {place.measure}")
            places[row, label] = place
    numbers: dict[tuple[str, str], tuple[float, float | None]] = {}
    for label, values in printed.items():
        if label not in rows:
            raise wrong(f"the paper's row {label} is none of the rows")
        if len(values) != len(columns):
            raise wrong(f"row {label} has {len(values)} numbers for {len(columns)} columns")
        numbers |= {(label, c): v for c, v in zip(columns, values, strict=True) if v is not None}
    if missing := [p for p in content.get("pictures", ()) if p not in PICTURES]:
        raise wrong(f"unknown picture {', '.join(missing)}")
    if not numbers and not content.get("says"):
        raise wrong("neither numbers of the paper nor what it says")
    general = dict(file.get("settings", {})) | {"standin": file.get("standin", {})}
    own = dict(content.get("settings", {})) | {"standin": content.get("standin", {})}
    return Recipe(
        paper=paper,
        name=name,
        title=content["title"],
        where=content.get("where", ""),
        rows=rows,
        columns=columns,
        places=places,
        numbers=numbers,
        says=content.get("says", ""),
        pictures=tuple(content.get("pictures", ())),
        relative_to=content.get("relative_to"),
        percent=content.get("percent", file.get("percent", True)),
        note=" ".join(part for part in (file.get("note", ""), content.get("note", "")) if part),
        common=(general, own),
        moment=moment,
    )


def _results(like: str, file: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result of the same file, or "paper/result" of another, and what that one is like."""
    other, slash, name = like.rpartition("/")
    file = _read(FOLDER / f"{other}.toml") if slash else file
    content = file["results"][name]
    return {**_results(content["like"], file), **content} if "like" in content else content


def _read(path: Path) -> dict[str, Any]:
    """A file, on top of the one of its `base`, whose results it does not have."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    base = _read(path.with_stem(content["base"])) if "base" in content else {}
    return base | content


@cache
def papers() -> dict[str, dict[str, Recipe]]:
    """Paper → name of the table or figure → recipe. Raises ValueError for a file that contradicts itself."""
    made = {}
    for path in sorted(FOLDER.glob("*.toml")):
        content = _read(path)
        made[path.stem] = {
            name: _recipe(path.stem, name, result, content) for name, result in content["results"].items()
        }
    return made


@cache
def titles() -> dict[str, str]:
    """Paper → its title."""
    return {path.stem: tomllib.loads(path.read_text(encoding="utf-8"))["title"] for path in FOLDER.glob("*.toml")}


def find(paper: str, name: str) -> Recipe:
    """One recipe. Raises ValueError for a paper or result there is none of."""
    known = papers()
    if paper not in known:
        raise ValueError(f"paper={paper!r}, must be one of {', '.join(known)}")
    if name not in known[paper]:
        raise ValueError(f"{paper} has no {name!r}; there are {', '.join(known[paper])}")
    return known[paper][name]


def available(name: str, data_dir: str | None) -> bool:
    """Whether a data set can be read here."""
    if name not in data.DATASETS:
        return False
    try:
        data.load(name, data_dir)
    except FileNotFoundError:
        return False
    return True
