"""A run or comparison as one HTML page: no network, light and dark, for a phone and a desk.

Charts are SVG whose colours the style sheet sets; what a point is shows on hovering, and clicking a method in the
legend hides it. Everything is read from the directories, see `report`.
"""

import base64
import html
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fastfact.base import VERSION, files
from fastfact.experiment import probes, report
from fastfact.experiment.config import Config
from fastfact.experiment.report import Cell, by_method, size

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 40
LOOKS = 8
"""Colours of the style sheet; more methods are told apart by dashes."""
PICTURES = 4
"""At most so many rounds of a matrix are shown."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A method's curve: xs, its mean, and the deviation over seeds, None for one seed."""

    label: str
    xs: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None


def write(cells: Sequence[Cell], path: Path) -> Path:
    """Write the page of these runs to `path`, the folders above it included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A path may have bytes that are no text.
    files.write(path, render(cells).encode(errors="backslashreplace"))
    return path


def render(cells: Sequence[Cell]) -> str:
    """The page of these runs, a whole HTML document."""
    methods = list(by_method(cells))
    config = cells[0].result["config"]
    seeds = len({cell.seed for cell in cells})
    title = f"{', '.join(methods[:3])}{f' and {len(methods) - 3} more' if len(methods) > 3 else ''}"
    facts = report.facts(config)
    facts += [f"{config['rounds']} rounds"] if "rounds" in config else []
    facts += [config["model"]] if "model" in config else []
    facts += [f"{seeds} seed{'s' * (seeds > 1)}"]
    sections = [
        ("Results", _results(cells)),
        ("Training", _charts(cells, methods)),
        ("Clients", _clients(cells, methods)),
        ("Who is like whom", _matrices(cells)),
        ("Sparsity", _density(cells, methods)),
        ("Time and memory", _time(cells, methods)),
        ("Settings", _settings(cells)),
    ]
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections if content)
    legend = "".join(
        f'<button type="button" class="m{i}" aria-pressed="true" data-m="{i}">{_swatch()}{_text(name)}</button>'
        for i, name in enumerate(methods)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        " script-src 'unsafe-inline'; img-src data:\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_text(title)}</title><style>{_style(len(methods))}</style></head><body>"
        f"<header><h1>{_text(title)}</h1><p>{_text(' · '.join(facts))}</p></header>"
        f'<nav class="legend" aria-label="Methods">{legend}</nav><main>{body}</main>'
        f"<footer>fastfact {VERSION}, from {_text(cells[0].directory)}"
        f"{f' and {len(cells) - 1} more' if len(cells) > 1 else ''}</footer><script>{_SCRIPT}</script></body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _swatch() -> str:
    return '<svg class="swatch" viewBox="0 0 24 8"><path class="line" d="M1 4H23"/></svg>'


def _results(cells: Sequence[Cell]) -> str:
    rows = report.table(cells)
    columns: list[tuple[str, str, Callable[[dict], str], Callable[[dict], float] | None]] = [
        ("Accuracy [%]", "of each client's own model on its own test samples", _spread("accuracy"), _mean("accuracy")),
        ("As downloaded", "before local training", _spread("accuracy_before"), _mean("accuracy_before")),
        ("Worst tenth", "mean accuracy of the tenth of the clients that has least", _percent("worst_tenth"), None),
        ("Uplink", "bytes of all clients and rounds", lambda row: size(row["uplink"]), None),
        ("Downlink", "", lambda row: size(row["downlink"]), None),
        ("Density of μ", "share of nonzero numbers", lambda row: _number(row["density"], ".2f"), None),
        ("Training", "seconds of local training, all clients and rounds", lambda row: f"{row['seconds']:.1f} s", None),
    ]
    if any(row["epsilon"] is not None for row in rows):
        columns.append(("ε", "differential privacy, all rounds", lambda row: _number(row["epsilon"], ".3g"), None))
    head = "".join(f'<th title="{_text(about)}">{_text(name)}</th>' for name, about, *_ in columns)
    best = {name: max(map(of, rows)) for name, _, _, of in columns if of and len(rows) > 1}
    lines = []
    for row in rows:
        line = f'<th scope="row">{_text(row["method"])}</th>'
        for name, _, show, of in columns:
            mark = ' class="best"' if of and name in best and of(row) == best[name] > -math.inf else ""
            line += f"<td{mark}>{_text(show(row))}</td>"
        lines.append(f"<tr>{line}</tr>")
    table = f"<table><thead><tr><th>Method</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="wide">{table}</div>{_significance(cells)}'


def _spread(name: str) -> Callable[[dict], str]:
    def show(row: dict) -> str:
        value = row[name]
        if value is None:
            return "–"
        return f"{100 * value['mean']:.1f}" + (f" ± {100 * value['std']:.1f}" if len(row["seeds"]) > 1 else "")

    return show


def _mean(name: str) -> Callable[[dict], float]:
    return lambda row: -math.inf if row[name] is None else row[name]["mean"]


def _percent(name: str) -> Callable[[dict], str]:
    return lambda row: f"{100 * row[name]:.1f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _significance(cells: Sequence[Cell]) -> str:
    pairs = report.compare_methods(cells)
    if not pairs:
        several = len(by_method(cells)) > 1
        return "<p>One seed: whether methods differ cannot be told (compare --seeds 3 or more).</p>" if several else ""
    best, n = pairs[0]["method"], pairs[0]["seeds"]
    rows = "".join(
        f'<tr><th scope="row">{_text(pair["other"])}</th><td>{100 * pair["difference"]:+.1f}</td>'
        f"<td>{100 * pair['low']:+.1f} … {100 * pair['high']:+.1f}</td><td>{_p(pair['p'])}</td>"
        f"<td>{_p(pair['adjusted'])}</td><td>{_verdict(pair)}</td></tr>"
        for pair in pairs
    )
    return (
        f"<h3>{_text(best)} against the others</h3>"
        f"<p>Difference of accuracy in points, paired by seed ({n} seeds; same clients and data in each pair): its 95 %"
        " interval and p-value by the t distribution, and p corrected for the number of comparisons (Holm). Few seeds"
        " show only large differences.</p>"
        '<div class="wide"><table><thead><tr><th>Than</th><th>Points</th><th>95 % interval</th><th>p</th>'
        f"<th>p, corrected</th><th></th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _verdict(pair: Mapping[str, Any]) -> str:
    return "differs" if pair["adjusted"] < 0.05 else "not told apart"


def _curves(cells: Sequence[Cell], key: str, reduce: Callable = np.mean, scale: float = 1.0) -> list[Line]:
    """`key` of each round for each method: reduced over clients, mean and deviation over seeds."""
    lines = []
    for method, runs in by_method(cells).items():
        found = [scale * np.array(list(_rounds(cell, key, reduce).values())) for cell in runs]
        rounds = [np.array(list(_rounds(cell, key, reduce))) for cell in runs]
        count = min(map(len, found))
        if count:
            values = np.stack([each[:count] for each in found])
            std = values.std(0, ddof=1) if len(values) > 1 else None
            lines.append(Line(method, rounds[0][:count], values.mean(0), std))
    return lines


def _rounds(cell: Cell, key: str, reduce: Callable) -> dict[int, float]:
    values: dict[int, list[float]] = {}
    for row in cell.rows:
        if row.get(key) is not None:
            values.setdefault(row["round"], []).append(row[key])
    return {number: float(reduce(values[number])) for number in sorted(values)}


def _charts(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    accuracy = _curves(cells, "accuracy", scale=100)
    charts = [_lines("Accuracy over rounds", accuracy, methods, "Round", "%", whole=True)]
    sent = {}
    for up, down in zip(_curves(cells, "bytes_up", np.sum), _curves(cells, "bytes_down", np.sum), strict=True):
        sent[up.label] = (up.mean + down.mean).cumsum()
    over = [Line(line.label, sent[line.label][: len(line.xs)], line.mean, None) for line in accuracy]
    if any(line.xs[-1] > 0 for line in over):
        charts.append(_lines("Accuracy over bytes, both ways", over, methods, "", "%", x_text=size, log=True))
    if before := _curves(cells, "accuracy_before", scale=100):
        charts.append(_lines("Accuracy as downloaded", before, methods, "Round", "%", whole=True))
    if loss := _curves(cells, "loss"):
        charts.append(_lines("Loss while training", loss, methods, "Round", "", whole=True))
    return _grid(charts)


def _clients(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    worst = _curves(cells, "accuracy", report.worst_tenth, scale=100)
    charts = [
        _strips("Each client at the end", cells, methods),
        _lines("Mean of the worst tenth of the clients", worst, methods, "Round", "%", whole=True),
    ]
    rows = "".join(
        f'<tr><th scope="row">{_text(row["method"])}</th><td>{100 * row["worst_tenth"]:.1f}</td>'
        f"<td>{100 * row['best_tenth']:.1f}</td><td>{100 * row['client_std']:.1f}</td>"
        f"<td>{row['fairness']:.3f}</td></tr>"
        for row in report.table(cells)
    )
    table = (
        '<div class="wide"><table><thead><tr><th>Method</th><th>Worst tenth [%]</th><th>Best tenth [%]</th>'
        f'<th>Deviation</th><th title="(Σa)² / K Σa², 1 where all have the same">Jain\'s index</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    return _grid(charts) + table


def _density(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    lines = _curves(cells, "density", scale=100)
    if not lines:
        return ""
    layers: dict[str, dict[str, float]] = {}
    for method, runs in by_method(cells).items():
        for name in runs[0].result.get("layers", {}):
            of = [100 * run.result["layers"][name] for run in runs if name in run.result["layers"]]
            layers.setdefault(name, {})[method] = float(np.mean(of))
    charts = [_lines("Nonzero μ over rounds", lines, methods, "Round", "%", whole=True)]
    if layers:
        charts.append(_bars("Nonzero μ of each layer at the end", layers, methods, "%"))
    return _grid(charts)


def _time(cells: Sequence[Cell], methods: Sequence[str]) -> str:
    seconds = _curves(cells, "seconds", np.sum)
    charts = [_lines("Local training of a round, all clients", seconds, methods, "Round", "s", whole=True)]
    memory = {
        method: {method: float(np.mean(held)) / 2**30}
        for method, runs in by_method(cells).items()
        if (held := [run.result["summary"]["memory"] for run in runs if run.result["summary"].get("memory")])
    }
    if memory:
        charts.append(_bars("Most memory of the process", memory, methods, "GiB"))
    return _grid(charts)


def _matrices(cells: Sequence[Cell]) -> str:
    """Similarity at the end, and what was recorded of rounds, of the first run that has them."""
    found, signal = list[str](), list[Line]()
    cell = next((c for c in cells if (c.directory / report.SIMILARITY).is_file()), None)
    if cell is not None:
        for name, matrix in load_file(cell.directory / report.SIMILARITY).items():
            found.append(_heat(f"Cosine of {name} at the end", matrix, cell))
    for name, title in (("similarity/key", "Similarity"), ("matching/weights", "Mixing weights")):
        for each in cells:
            if recorded := probes.read(each.directory).get(name):
                rounds = sorted(recorded)
                places = np.linspace(0, len(rounds) - 1, min(PICTURES, len(rounds))).round().astype(int)
                found += [
                    _heat(f"{title}, round {rounds[i]}", recorded[rounds[i]], each) for i in dict.fromkeys(places)
                ]
                break
    for method, runs in by_method(cells).items():
        of = [probes.read(run.directory).get("signal/key/nearest", {}) for run in runs]
        if rounds := sorted(set.intersection(*map(set, of))):
            values = 100 * np.array([[float(nearest[r]) for r in rounds] for nearest in of])
            signal.append(Line(method, np.array(rounds), values.mean(0), None))
    title, note = "Clients whose nearest one is of their own group", ""
    charts = [_lines(title, signal, list(by_method(cells)), "Round", "%", whole=True)] if signal else []
    if found and not any("round" in one for one in found):
        note = "<p>Rounds are shown of runs with --record similarity,matching.</p>"
    return (_grid(found, "grid small") if found else "") + (_grid(charts) if charts else "") + note


def _settings(cells: Sequence[Cell]) -> str:
    config = cells[0].result["config"]
    default = {item.name: getattr(Config(), item.name) for item in fields(Config)}
    different = {name for cell in cells for name, value in cell.result["config"].items() if value != config.get(name)}
    rows = {True: "", False: ""}
    for name, value in config.items():
        if name in different:
            every = dict.fromkeys(json.dumps(cell.result["config"].get(name)) for cell in cells)
            shown = ", ".join(json.loads(text) if text.startswith('"') else text for text in every)
        else:
            shown = value if isinstance(value, str) else json.dumps(value)
        changed = name in different or value != default.get(name)
        rows[changed] += f'<tr><th scope="row">{_text(name)}</th><td>{_text(shown)}</td></tr>'
    table = '<table class="settings"><tbody>{}</tbody></table>'
    return (
        f'<div class="wide">{table.format(rows[True])}</div>'
        f"<details><summary>All that is as by default</summary>"
        f'<div class="wide">{table.format(rows[False])}</div></details>'
    )


def _grid(charts: Iterable[str], kind: str = "grid") -> str:
    return f'<div class="{kind}">{"".join(charts)}</div>'


def _figure(title: str, content: str, label: str = "") -> str:
    unit = f" <span>[{label}]</span>" if label else ""
    return f"<figure><figcaption>{_text(title)}{unit}</figcaption>{content}</figure>"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` + 1 round numbers from `low` to `high`, and both ends within a step of them."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _lines(
    title: str,
    lines: Sequence[Line],
    methods: Sequence[str],
    x_label: str,
    unit: str,
    *,
    whole: bool = False,
    log: bool = False,
    x_text: Callable[[float], str] = lambda value: f"{value:g}",
) -> str:
    """whole: x counts rounds. log: x is logarithmic; a line whose x is 0 throughout is level."""
    xs = np.concatenate([line.xs[line.xs > 0] if log else line.xs for line in lines]).astype(float)
    values = np.concatenate([line.mean for line in lines])
    spread = [line.mean + sign * line.std for line in lines if line.std is not None for sign in (-1, 1)]
    values = np.concatenate([values, *spread])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    gap = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    nonnegative = all((line.mean >= 0).all() for line in lines)
    low, high = max(0.0, low - gap) if nonnegative else low - gap, high + gap
    high = min(high, 100.0) if unit == "%" else high
    left, right = float(xs.min()), float(xs.max())
    if log:
        left, right = math.log10(left), math.log10(right)
    if right == left:
        left, right = left - 0.5, right + 0.5

    def at_x(value: float) -> float:
        value = math.log10(value) if log else value
        return LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(low, high, at_y)]
    if log:
        marks = [10.0**power for power in range(math.ceil(left), math.floor(right) + 1)]
        if len(marks) < 2:
            marks = [10**left, 10**right]
        marks = marks[:: -(-len(marks) // 6)]
    else:
        marks = [mark for mark in ticks(left, right) if not whole or mark == int(mark)] or [left]
    for mark in marks:
        anchor = "end" if at_x(mark) > WIDTH - RIGHT - 25 else "middle"
        text = x_text(mark).replace(".00", "")
        parts.append(
            f'<text x="{at_x(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">{_text(text)}</text>'
        )
    if x_label:
        parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle">{_text(x_label)}</text>')
    for line in lines:
        index = methods.index(line.label)
        inside = np.isfinite(line.mean) & ((line.xs > 0) if log else True)
        if log and not inside.any():
            y, name = at_y(float(line.mean[-1])), f"{line.label}: sends nothing, {line.mean[-1]:.3g} {unit}"
            path = f'<path class="line" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"><title>{_text(name)}</title></path>'
            parts.append(f'<g class="m{index}">{path}</g>')
            continue
        points = [(at_x(float(x)), at_y(float(y))) for x, y in zip(line.xs[inside], line.mean[inside], strict=True)]
        group = ""
        if line.std is not None:
            up = [
                (x, at_y(min(high, float(v)))) for (x, _), v in zip(points, (line.mean + line.std)[inside], strict=True)
            ]
            down = [
                (x, at_y(max(low, float(v)))) for (x, _), v in zip(points, (line.mean - line.std)[inside], strict=True)
            ]
            group += f'<path class="band" d="{_path([*up, *down[::-1]])}Z"/>'
        group += f'<path class="line" d="{_path(points)}"/>'
        # Of a long run a point in each hundredth: the page stays small, and hovering still tells the numbers.
        every = -(-len(points) // 100)
        told = zip(points, line.xs[inside], line.mean[inside], strict=True)
        for number, ((x, y), at, value) in enumerate(told):
            if number % every == 0 or number == len(points) - 1:
                where = f"{x_label.lower()} {x_text(float(at))}" if x_label else x_text(float(at))
                name = _text(f"{line.label}, {where}: {value:.3g} {unit}".strip())
                last = ' class="last"' if number == len(points) - 1 else ""
                group += (
                    f'<circle{last} cx="{x:.1f}" cy="{y:.1f}" r="{3 if last else 5}"><title>{name}</title></circle>'
                )
        parts.append(f'<g class="m{index}">{group}</g>')
    return _figure(title, _svg(title, parts), unit)


def _svg(title: str, parts: Iterable[str], height: float = HEIGHT) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{_text(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _y_axis(low: float, high: float, at: Callable[[float], float]) -> str:
    return "".join(
        f'<path class="rule" d="M{LEFT} {at(mark):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{at(mark) + 4:.1f}" text-anchor="end">{mark:g}</text>'
        for mark in ticks(low, high)
    )


def _strips(title: str, cells: Sequence[Cell], methods: Sequence[str]) -> str:
    """A row for each method: a dot a client and seed, a bar at the mean, an open ring at the worst tenth's."""
    step = 40
    height = TOP + step * len(methods) + BOTTOM - 12
    finals = {
        method: [100 * np.array(report.final_accuracies(run)) for run in runs]
        for method, runs in by_method(cells).items()
    }
    values = np.concatenate([each for runs in finals.values() for each in runs])
    low, high = float(values.min()), float(values.max())
    gap = (high - low) * 0.03 or 1.0
    low, high = max(0.0, low - gap), min(100.0, high + gap)

    def at(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    marks = ticks(low, high)
    parts = []
    for mark in marks:
        parts.append(f'<path class="rule" d="M{at(mark):.1f} {TOP}V{height - 26}"/>')
        parts.append(f'<text x="{at(mark):.1f}" y="{height - 10}" text-anchor="middle">{mark:g}</text>')
    for index, (method, runs) in enumerate(finals.items()):
        y = TOP + step * (index + 0.66)
        name = _text(method)
        dots = "".join(
            f'<circle class="dot" cx="{at(float(value)):.1f}" cy="{y + 7 * math.sin(7.0 * k):.1f}" r="2.6">'
            f"<title>{name}, client {k}: {value:.1f} %</title></circle>"
            for values in runs
            for k, value in enumerate(values[:400])
        )
        mean = float(np.mean([values.mean() for values in runs]))
        worst = float(np.mean([report.worst_tenth(values.tolist()) for values in runs]))
        dots += (
            f'<path class="line" d="M{at(mean):.1f} {y - 10}V{y + 10}"><title>{name}: mean {mean:.1f} %</title></path>'
        )
        dots += (
            f'<circle class="ring" cx="{at(worst):.1f}" cy="{y:.1f}" r="6">'
            f"<title>{name}: worst tenth {worst:.1f} %</title></circle>"
            f'<text x="{LEFT}" y="{y - 14:.1f}">{name}</text>'
        )
        parts.append(f'<g class="m{methods.index(method)}">{dots}</g>')
    return _figure(f"{title}; bar: mean, ring: worst tenth", _svg(title, parts, height), "%")


def _bars(title: str, groups: Mapping[str, Mapping[str, float]], methods: Sequence[str], unit: str) -> str:
    """Horizontal bars, a group a name, a bar a method."""
    thick = 9 if any(len(of) > 1 for of in groups.values()) else 12
    high = max((value for of in groups.values() for value in of.values()), default=1.0) or 1.0
    parts, y = [], 4.0
    for name, of in groups.items():
        parts.append(f'<text x="0" y="{y + 11:.1f}">{_text(name)}</text>')
        y += 16
        for method, value in of.items():
            width = max(1.0, value / high * (WIDTH - 60))
            parts.append(
                f'<g class="m{methods.index(method)}"><rect class="bar" x="0" y="{y:.1f}" width="{width:.1f}"'
                f' height="{thick}" rx="2"><title>{_text(method)}: {value:.3g} {unit}</title></rect>'
                f'<text class="small" x="{width + 5:.1f}" y="{y + thick - 1:.1f}">{value:.3g}</text></g>'
            )
            y += thick + 2
        y += 5
    return _figure(title, _svg(title, parts, y), unit)


def _heat(title: str, matrix: np.ndarray, cell: Cell) -> str:
    """A matrix [K, K] as a picture of K × K pixels; the diagonal does not count for the range of its colours."""
    matrix = np.asarray(matrix, dtype=float)
    others = matrix[~np.eye(len(matrix), dtype=bool)] if len(matrix) > 1 else matrix.ravel()
    others = others[np.isfinite(others)]
    high = float(others.max()) if len(others) else 1.0
    # Rounding must not look like structure.
    low = min(float(others.min()), high - 0.05 * abs(high) - 1e-9) if len(others) else 0.0
    picture = _png(np.nan_to_num((matrix - low) / (high - low)).clip(0, 1))
    scale = _png(np.linspace(0, 1, 64)[None])
    about = _text(f"{title}, {cell.method}, seed {cell.seed}")
    return _figure(
        title,
        f'<img class="heat" src="{picture}" alt="{about}" title="{about}">'
        f'<div class="scale"><span>{low:.2g}</span><img src="{scale}" alt="colours"><span>{high:.2g}</span></div>',
        f"{_text(cell.method)}, seed {cell.seed}",
    )


def _png(values: np.ndarray) -> str:
    """values in 0 … 1 [h, w] as a data: address."""
    from matplotlib import colormaps
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, colormaps["cividis"](values), format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _style(methods: int) -> str:
    dashes = ("", "7 4", "2 3", "9 3 2 3", "12 3")
    looks = "".join(
        f".m{i}{{--m:var(--c{i % LOOKS})}}"
        + (f".m{i} .line{{stroke-dasharray:{dashes[i // LOOKS % len(dashes)]}}}" if i // LOOKS % len(dashes) else "")
        + f"body.no{i} main .m{i}{{display:none}}body.no{i} nav .m{i}{{opacity:.4}}"
        for i in range(methods)
    )
    return _STYLE + looks


_STYLE = """
:root{--back:#fff;--card:#f7f7f8;--text:#1b1b1f;--soft:#5c5c66;--rule:#dcdce2;--best:#e5f1e8;
--c0:#0072b2;--c1:#d55e00;--c2:#00855f;--c3:#b8528b;--c4:#a36a00;--c5:#2b8fc7;--c6:#3d3d3d;--c7:#757500}
@media(prefers-color-scheme:dark){:root{--back:#151518;--card:#1e1e22;--text:#ececf0;--soft:#a3a3ae;--rule:#36363d;
--best:#1d3a28;--c0:#4ba9e8;--c1:#f28a3c;--c2:#2fc49a;--c3:#e58cc0;--c4:#eab53e;--c5:#8fd3ff;--c6:#d8d8d8;--c7:#c9c94f}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif}
header,main,footer{max-width:1160px;margin:0 auto;padding:0 16px}
header{padding-top:24px}h1{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
header p,footer{color:var(--soft)}header p{margin:4px 0 12px}
footer{padding:24px 16px;font-size:.85rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:32px 0 10px}h3{font-size:1rem;margin:20px 0 4px}
p{margin:8px 0;max-width:75ch}
.legend{position:sticky;top:0;z-index:1;background:var(--back);border-bottom:1px solid var(--rule);padding:8px
max(16px,calc((100vw - 1128px)/2));display:flex;gap:6px;overflow-x:auto}
.legend button{flex:none;display:flex;align-items:center;gap:6px;font:inherit;font-size:.85rem;color:inherit;
background:var(--card);border:1px solid var(--rule);border-radius:99px;padding:4px 12px;cursor:pointer}
.legend button:focus-visible{outline:2px solid var(--c0)}
.swatch{width:24px;height:8px}
.grid{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));margin-bottom:16px}
.grid.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,170px),1fr));gap:12px}
.small figure{padding:8px}.small figcaption{font-size:.85rem}.small figcaption span{display:block}
@media(min-width:700px){.grid.small{grid-template-columns:repeat(auto-fill,minmax(230px,1fr))}}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px;min-width:0}
figcaption{font-weight:600;font-size:.92rem;margin-bottom:6px}figcaption span{color:var(--soft);font-weight:400}
.chart{display:block;width:100%;height:auto}
.chart text{font-size:12.5px;fill:var(--soft);font-variant-numeric:tabular-nums}
.chart text.small{font-size:11px}
.rule{stroke:var(--rule);fill:none;vector-effect:non-scaling-stroke}
.line{stroke:var(--m);stroke-width:2.2;fill:none;stroke-linejoin:round}
.band{fill:var(--m);opacity:.16}.bar{fill:var(--m)}
circle{fill:var(--m);opacity:0}circle:hover{opacity:1}.last,.ring{opacity:1}.dot{opacity:.45}
.ring{fill:none;stroke:var(--m);stroke-width:2}
.heat{display:block;width:100%;aspect-ratio:1;image-rendering:pixelated;border-radius:4px}
.scale{display:flex;gap:8px;align-items:center;font-size:.8rem;color:var(--soft);margin-top:8px}
.scale img{flex:1;height:8px;min-width:0;border-radius:2px}
.wide{overflow-x:auto;margin:10px 0}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;min-width:min(100%,560px)}
th,td{padding:6px 12px 6px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{font-weight:600}thead th{color:var(--soft);font-weight:500}
th:first-child{text-align:left;position:sticky;left:0;background:var(--back)}
td.best{background:var(--best);font-weight:600}
.settings td{text-align:left;white-space:normal;overflow-wrap:anywhere;width:100%}.settings{min-width:0}
summary{cursor:pointer;color:var(--soft)}
@media print{.legend{position:static}figure{break-inside:avoid}}
"""

_SCRIPT = """
for (const button of document.querySelectorAll("nav button")) button.addEventListener("click", () => {
  const hidden = document.body.classList.toggle("no" + button.dataset.m);
  button.setAttribute("aria-pressed", String(!hidden));
});
"""
