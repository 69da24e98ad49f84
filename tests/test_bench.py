"""`fastfact bench` in its quick form: the rows and the file it writes."""

import json

import torch
from test_cli import call


def test_layers_quick(tmp_path):
    threads = torch.get_num_threads()
    try:
        code, out, err = call("bench", "layers", "--quick", "--threads", "1", "--json", tmp_path / "layers.json")
    finally:
        torch.set_num_threads(threads)
    assert code == 0, err
    written = json.loads((tmp_path / "layers.json").read_text())
    assert {"command", "hardware", "versions", "commit"} <= set(written)
    for row in written["rows"]:
        assert row["ratio"] > 0
        if row["shape"] != "all":
            assert abs(row["ratio"] - row["dense"] / row["ours"]) < 1e-6
    assert "ratio" in out


def test_clients_quick(tmp_path):
    """Every rival has a row: its ratio, or why it did not run."""
    file = tmp_path / "clients.json"
    code, out, err = call("bench", "clients", "--quick", "--threads", "1", "--only", "linear", "--json", file)
    assert code == 0, err
    rows = {row["side"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"ours", "loop", "vmap", "pfl", "flower"}
    for side, row in rows.items():
        if side in ("pfl", "flower") and "reason" in row:
            assert "pip install" in row["reason"]
            continue
        # The round that is not timed and one that is, from the same initial model: as good as each other, and learnt.
        assert row["loss"] < 0.5
        assert row["client_rounds_per_second"] == row["clients"] / row["seconds"]
        if side != "ours":
            assert abs(row["ratio"] - row["seconds"] / rows["ours"]["seconds"]) < 1e-9
    assert "ratio" in out


def test_growth_quick(tmp_path):
    file = tmp_path / "growth.json"
    code, _, err = call("bench", "clients", "--quick", "--threads", "1", "--only", "growth", "--json", file)
    assert code == 0, err
    rows = json.loads(file.read_text())["rows"]
    assert [(row["clients"], row["taking_part"]) for row in rows] == [(10, 10), (10, 1)]
    assert (tmp_path / "growth.png").stat().st_size > 0
