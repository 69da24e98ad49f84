import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastfact.experiment import plots, report

METHODS = {"factorized-fl-alpha": (0.9, 1_000), "factorized-fl-beta": (0.8, 60_000), "stand-alone": (0.7, 0)}
LAYERS = [f"conv{i}" for i in range(1, 9)] + ["fc"]


def write_cell(directory, method, seed, rounds=12, clients=20):
    rng = np.random.default_rng(seed)
    best, sent = METHODS[method]
    rows = [
        {
            "round": r,
            "client": k,
            "loss": 1 / r,
            "accuracy": best * (1 - np.exp(-r / 4)) + 0.02 * rng.standard_normal(),
            "density": None if method == "stand-alone" else 0.5,
            "bytes_up": sent,
            "bytes_down": sent // 2,
            "seconds": 0.01,
        }
        for r in range(1, rounds + 1)
        for k in range(clients)
    ]
    v = 0.3 * rng.standard_normal((clients, clients)) * 0.1
    similar = {"u": np.clip(0.9 + v, -1, 1), "v": v + np.kron(np.eye(5), np.ones((4, 4)))[:clients, :clients] * 0.4}
    for matrix in similar.values():
        np.fill_diagonal(matrix, 1)
    last = [row["accuracy"] for row in rows if row["round"] == rounds]
    result = {
        "config": {"method": method, "seed": seed, "dataset": "digits", "scenario": "iid", "clients": clients},
        "summary": {
            "accuracy": float(np.mean(last)),
            "accuracy_before": None if method == "stand-alone" else 0.5 * float(np.mean(last)),
            "client_std": float(np.std(last)),
            "uplink": sent * clients * rounds,
            "downlink": sent // 2 * clients * rounds,
            "formula": 8 * sent,
            "density": rows[0]["density"],
            "seconds": 2.5,
        },
        "layers": {} if method == "stand-alone" else {name: 0.9 - 0.08 * i for i, name in enumerate(LAYERS)},
    }
    directory.mkdir(parents=True)
    if method != "stand-alone":
        save_file({name: matrix.astype(np.float32) for name, matrix in similar.items()}, directory / report.SIMILARITY)
    (directory / report.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / report.RESULT).write_text(json.dumps(result))


@pytest.fixture
def comparison(tmp_path):
    names = [f"{method}-seed{seed}" for method in METHODS for seed in range(3)]
    for name in names:
        method, seed = name.rsplit("-seed", 1)
        write_cell(tmp_path / report.CELLS / name, method, int(seed))
    (tmp_path / report.COMPARISON).write_text(json.dumps({"cells": names}))
    return tmp_path


def is_picture(path):
    from matplotlib import image

    pixels = image.imread(path)
    return pixels.ndim == 3 and pixels[..., :3].std() > 0.02


def test_pictures_of_a_comparison(comparison):
    drawn = plots.pictures(report.read(comparison), comparison)
    names = ["accuracy_over_rounds.png", "accuracy_over_bytes.png", "similarity.png", "density.png"]
    assert [path.name for path in drawn] == names
    assert all(is_picture(path) for path in drawn)


def test_a_single_run_and_one_without_factors(comparison):
    cells = report.read(comparison / report.CELLS / "stand-alone-seed1")
    assert [cell.seed for cell in cells] == [1]
    names = [path.name for path in plots.pictures(cells, comparison)]
    assert names == ["accuracy_over_rounds.png", "accuracy_over_bytes.png"]


def test_table_against_numbers_worked_out_by_hand(comparison):
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        path = comparison / report.CELLS / f"factorized-fl-beta-seed{seed}" / report.RESULT
        result = json.loads(path.read_text())
        result["summary"] |= {"accuracy": accuracy, "accuracy_before": accuracy - 0.2}
        result["summary"] |= {"client_std": 0.1 * seed, "density": 0.2 + 0.1 * seed}
        path.write_text(json.dumps(result))
    row = next(row for row in report.table(report.read(comparison)) if row["method"] == "factorized-fl-beta")
    assert row["accuracy"] == pytest.approx({"mean": 0.6, "std": 0.1})
    assert row["accuracy_before"] == pytest.approx({"mean": 0.4, "std": 0.1})
    assert row["client_std"] == pytest.approx(0.1) and row["density"] == pytest.approx(0.3)
    assert (row["uplink"], row["downlink"], row["seeds"]) == (60_000 * 240, 30_000 * 240, [0, 1, 2])
    alone = next(row for row in report.table(report.read(comparison)) if row["method"] == "stand-alone")
    assert alone["density"] is None and alone["accuracy_before"] is None


def test_unfinished_cells_are_left_out(comparison):
    (comparison / report.CELLS / "stand-alone-seed2" / report.RESULT).unlink()
    assert [row["seeds"] for row in report.table(report.read(comparison))] == [[0, 1, 2], [0, 1, 2], [0, 1]]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999 B"), (1_700, "1.70 kB"), (262_000, "262 kB"), (20.39e9, "20.39 GB"), (365e6, "365 MB")],
)
def test_size(count, text):
    assert report.size(count) == text


def test_damaged_files_are_named(comparison, tmp_path):
    cell = comparison / report.CELLS / "stand-alone-seed0"
    (cell / report.METRICS).write_text('{"round": 1}\n{"rou')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: damaged"):
        report.read_cell(cell)
    (cell / report.RESULT).write_text("{")
    with pytest.raises(ValueError, match=r"result.json: damaged"):
        report.read_cell(cell)
    with pytest.raises(ValueError, match=r"holds no finished run: no metrics.jsonl and no result.json"):
        report.read(tmp_path / "nothing")
