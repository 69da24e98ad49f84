"""The page of a run or comparison: what it says, and what a browser shows of it."""

import functools
import html.parser
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from fastfact.experiment import page, probes, report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


def write_cell(directory, method, seed, shift, rounds=6, clients=20):
    draw = np.random.default_rng([seed, len(method)])
    own = draw.normal(0, 0.03, clients)
    rows = [
        {
            "round": r,
            "client": k,
            "loss": 1 / r,
            "accuracy": float(np.clip(0.6 + shift + 0.02 * r + own[k], 0, 1)),
            "accuracy_before": None if r == 1 or method == "stand-alone" else 0.5,
            "density": None if method == "stand-alone" else 1 / r,
            "bytes_up": 0 if method == "stand-alone" else 1000,
            "bytes_down": 0 if method == "stand-alone" else 500,
            "seconds": 0.1,
            "left_out": None,
        }
        for r in range(1, rounds + 1)
        for k in range(clients)
    ]
    last = [row["accuracy"] for row in rows[-clients:]]
    config = {
        "method": method,
        "seed": seed,
        "dataset": "digits",
        "scenario": "iid",
        "clients": clients,
        "rounds": rounds,
    }
    summary = {"accuracy": float(np.mean(last)), "accuracy_before": None, "client_std": float(np.std(last))}
    summary |= {
        "uplink": sum(r["bytes_up"] for r in rows),
        "downlink": sum(r["bytes_down"] for r in rows),
        "formula": 8.0,
    }
    summary |= {"density": rows[-1]["density"], "seconds": 2.5, "memory": 1 << 30}
    layers = {} if method == "stand-alone" else {"fc1": 0.5, "fc2": 0.25}
    directory.mkdir(parents=True)
    (directory / report.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / report.RESULT).write_text(json.dumps({"config": config, "summary": summary, "layers": layers}))
    if method != "stand-alone":
        matrix = np.eye(clients, dtype=np.float32)
        save_file({"u": matrix, "v": matrix}, directory / report.SIMILARITY)
        for r in (1, 6):
            path = directory / probes.FOLDER / f"round-{r:06d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({"similarity/key": matrix, "matching/weights": matrix / r}, path)


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Three methods on four seeds: the first better by .1 than the second, the third as good but for noise."""
    folder = tmp_path_factory.mktemp("page")
    found = []
    for method, shift in (("factorized-fl-alpha", 0.1), ("<b>fedavg", 0.0), ("stand-alone", 0.101)):
        for seed in range(4):
            write_cell(folder / f"{len(found)}", method, seed, shift)
            found.append(report.read_cell(folder / f"{len(found)}"))
    return found


class Structure(html.parser.HTMLParser):
    """Which elements are open, and every address a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.headings = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def test_the_page_is_whole_and_fetches_nothing(cells):
    text = page.render(cells)
    seen = Structure()
    seen.feed(text)
    assert not seen.open
    assert seen.fetched and all(address.startswith("data:image/png;base64,") for address in seen.fetched)
    assert not re.search(r"https?:|@import|url\(", text) and "default-src 'none'" in text
    assert seen.headings == [
        "Results",
        "Training",
        "Clients",
        "Who is like whom",
        "Sparsity",
        "Time and memory",
        "Settings",
    ]
    assert "<b>fedavg" not in text and "&lt;b&gt;fedavg" in text
    assert "nan" not in re.findall(r'(?:cx|cy|x|y|d|width)="([^"]*)"', text)


def test_the_page_of_one_run(cells):
    text = page.render(cells[-1:])
    assert "differ" not in text and "sends nothing" not in text and "<h2>Sparsity" not in text


def test_comparisons_are_paired_by_seed(cells):
    from scipy import stats

    first, second = report.compare_methods(cells)
    assert first["method"] == second["method"] and first["seeds"] == 4
    by = {row["other"]: row for row in (first, second)}
    accuracy = {m: [c.result["summary"]["accuracy"] for c in runs] for m, runs in report.by_method(cells).items()}
    for other, row in by.items():
        expected = stats.ttest_rel(accuracy[row["method"]], accuracy[other])
        assert row["p"] == pytest.approx(expected.pvalue, rel=1e-6)
        interval = expected.confidence_interval(0.95)
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high), rel=1e-6)
    assert by["<b>fedavg"]["adjusted"] == pytest.approx(2 * by["<b>fedavg"]["p"]) and by["<b>fedavg"]["p"] < 0.01
    assert by["<b>fedavg"]["difference"] > 0.08
    assert report.compare_methods(cells[:1]) == report.compare_methods([cells[0], cells[5]]) == []


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 9, 30])
def test_student_t(degrees):
    from scipy import stats

    for t in (0.0, 0.1, 1.0, 2.5, 12.0):
        assert report.t_probability(t, degrees) == pytest.approx(2 * stats.t.sf(t, degrees), abs=1e-12)


def test_tenths_and_fairness():
    values = [*range(1, 21)]
    assert report.worst_tenth(values) == 1.5 and report.best_tenth(values) == 19.5
    assert report.worst_tenth([3.0, 1.0]) == 1.0
    assert report.fairness([2, 2, 2]) == 1 and report.fairness([1, 0, 0, 0]) == 0.25
    assert report.fairness([1, 3]) == pytest.approx(16 / 20)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.13, 0.47, [0.2, 0.3, 0.4]), (1, 1, [1]), (-3, 3, [-3, -2, -1, 0, 1, 2, 3])],
)
def test_ticks(low, high, expected):
    assert page.ticks(low, high) == pytest.approx(expected)


def test_csv_and_latex(cells, tmp_path):
    rows = report.table(cells)
    report.write_csv(rows, tmp_path / "new" / "t.csv")
    lines = (tmp_path / "new" / "t.csv").read_text().splitlines()
    assert lines[0].split(",") == list(report.FLAT) and len(lines) == 4
    first = dict(zip(report.FLAT, lines[1].split(","), strict=True))
    assert float(first["accuracy"]) == rows[0]["accuracy"]["mean"] and first["accuracy_before"] == ""
    text = report.latex(rows)
    assert text.startswith("\\begin{tabular}") and text.count(r" \\") == 4 and text.count("\\textbf") == 1
    assert all(line.count("&") == 6 for line in text.splitlines() if line.endswith(r"\\"))


@functools.cache
def shown(path, width, scheme, folder):
    """What Chromium says on its console, and a picture of the page."""
    picture = folder / f"{width}-{scheme}.png"
    # preferredColorScheme: 0 is dark.
    flags = [*FLAGS, f"--user-data-dir={folder / f'profile-{width}-{scheme}'}", f"--window-size={width},4000"]
    flags += [f"--blink-settings=preferredColorScheme={int(scheme != 'dark')}", "--enable-logging=stderr"]
    command = [CHROMIUM, *flags, f"--screenshot={picture}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert picture.is_file(), done.stderr
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], np.asarray(
        Image.open(picture).convert("L")
    )


@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (500, "dark")])
def test_a_browser_shows_it(cells, tmp_path, width, scheme):
    path = page.write(cells, tmp_path / "report.html")
    said, picture = shown(path, width, scheme, tmp_path)
    assert said == []
    assert picture.shape[1] == width
    back = np.median(picture)
    assert back < 60 if scheme == "dark" else back > 220
    told = abs(picture.astype(int) - back) > 60
    assert told.mean() > 0.01, "nothing but background"
    # Each fifth of the page that is there has something in it.
    height = np.flatnonzero(told.any(1))[-1]
    assert height > 1500 and all(part.any() for part in np.array_split(told[:height], 5))


@needs_chromium
def test_an_error_on_a_page_is_seen(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<!DOCTYPE html><title>x</title><script>nothing.there()</script>")
    said, _ = shown(path, 500, "light", tmp_path)
    assert len(said) == 1 and "nothing is not defined" in said[0]


def test_curves_stand_within_their_axes(cells):
    text = page.render(cells)
    for path in re.findall(r'<path class="(?:line|band)" d="M([^"Z]*)', text):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)(?=L|$)", path):
            assert -1 <= float(x) <= page.WIDTH and float(y) >= -1 and math.isfinite(float(y))
