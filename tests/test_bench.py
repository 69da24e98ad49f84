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
