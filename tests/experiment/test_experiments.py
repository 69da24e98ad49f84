"""Data sets and models by name through the command line's configuration."""

import csv
import json
from dataclasses import replace

import pytest
import torch

from fastfact.experiment import build, plots, probes, report
from fastfact.experiment.config import Config
from fastfact.experiment.run import differences, run
from fastfact.federation import Federation

SMALL = {"rounds": 1, "epochs": 1, "width": 0.1, "method": "fedavg", "batch_size": 16}


def config(**change):
    return Config(**{**SMALL, **change})


def write_news(root):
    for part, n in (("train", 40), ("test", 10)):
        path = root / "ag_news" / f"{part}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows((1 + i % 4, f"topic{i % 4} today", "the same text") for i in range(n))


@pytest.mark.parametrize("model", ["transformer", "lstm-words"])
def test_words_from_a_folder_to_results_and_back(tmp_path, model):
    write_news(tmp_path / "here")
    news = {"dataset": "ag-news", "scenario": "client-dirichlet", "clients": 3, "samples": 12, "model": model}
    first = config(**news, data_dir=str(tmp_path / "here"))
    run(first, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["model"]["kwargs"]["vocabulary"] == 10 and "data_dir" not in written["source"]
    # The data may move: the run goes on.
    (tmp_path / "here").rename(tmp_path / "there")
    longer = config(**{**news, "rounds": 2}, data_dir=str(tmp_path / "there"))
    assert run(longer, tmp_path / "run", resume=True)["summary"]["accuracy"] >= 0


def test_a_scenario_with_groups_records_every_round_what_keys_tell_of_them(tmp_path):
    grouped = config(
        scenario="conflicting", clients=10, samples=20, rounds=2, model="cnn2", method="factorized-fl-beta"
    )
    result = run(grouped, tmp_path / "grouped")
    measures = {f"{what}/{measure}" for what in ("u", "v", "key") for measure in ("auc", "nearest")}
    assert set(result["signal"]) == measures and all(0 <= value <= 1 for value in result["signal"].values())
    for name, each in probes.read(tmp_path / "grouped").items():
        assert name.startswith("signal/") and sorted(each) == [1, 2]
    cell = report.read_cell(tmp_path / "grouped")
    assert (tmp_path / "signal.png") in plots.pictures([cell], tmp_path)
    assert run(config(scenario="iid", clients=3, model="cnn2"), tmp_path / "plain")["signal"] == {}


def test_options_of_the_partition_arrive():
    fed = build.federation(config(scenario="pathological", classes_per_client=3, clients=10, model="mlp"))
    assert all(len(torch.cat([c.train[1], c.test[1]]).unique()) == 3 for c in fed.clients)
    fed = build.federation(config(scenario="iid", clients=4, samples=100, test_fraction=0.5, model="mlp"))
    assert all(len(c.train[1]) + len(c.test[1]) == 100 and 45 <= len(c.test[1]) <= 55 for c in fed.clients)
    fed = build.federation(config(scenario="domains", clients=10, model="mlp"))
    assert fed.classes == 2 and not any(info.classifier for name, info in fed.infos.items() if name in fed.shared)


def test_augmentation_by_name():
    x, generator = torch.rand(30, 1, 8, 8), torch.Generator().manual_seed(0)
    assert build.federation(config(model="mlp")).augment is None
    flip = build.federation(config(model="mlp", augment="flip")).augment(x, generator)
    assert all(torch.equal(a, b) or torch.equal(a, b.flip(2)) for a, b in zip(flip, x, strict=True))


def stop_after_one(number, accuracy):
    if number == 1:
        raise KeyboardInterrupt


PLAIN = {"scenario": "iid", "clients": 2, "samples": 30, "model": "mlp", "cohort": "1", "track": "none", "lr": 0.05}


@pytest.mark.parametrize("change", [{"shift": 1}, {"schedule": "linear"}])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, change):
    options = config(**PLAIN, **change, rounds=3)
    straight = run(options, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(options, tmp_path / "run", stop_after_one)
    assert run(options, tmp_path / "run", resume=True)["summary"]["accuracy"] == straight["summary"]["accuracy"]
    losses = [[row["loss"] for row in Federation.load(tmp_path / name).history] for name in ("straight", "run")]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_more_rounds_than_the_learning_rate_was_to_fall_over(tmp_path):
    """There it is 0. Where it is constant, or its rounds were given, a run may have more."""
    scheduled = config(**PLAIN, schedule="cosine", rounds=2)
    run(scheduled, tmp_path / "run")
    with pytest.raises(ValueError, match=r"rounds=3: .*falls to 0 over its 2 rounds .*schedule_rounds=3 in another"):
        run(replace(scheduled, rounds=3), tmp_path / "run", resume=True)
    assert Federation.load(tmp_path / "run").round == 2
    for name, change in (("given", {"schedule": "cosine", "schedule_rounds": 3}), ("warm", {"lr_warmup": 0.5})):
        run(config(**PLAIN, **change, rounds=1), tmp_path / name)
        run(config(**PLAIN, **change, rounds=2), tmp_path / name, resume=True)
        assert Federation.load(tmp_path / name).round == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": "blur"}, "augment='blur', must be one of none, flip, full"),
        ({"augment": "full"}, "augment='full': changes colours, digits has none"),
        ({"samples": -1}, "samples=-1, must be at least 0"),
        ({"samples": 1}, "samples=1, must be at least 2"),
        ({"test_fraction": 0.0}, "test_fraction=0.0"),
        ({"scenario": "pathological", "classes_per_client": 0}, "classes_per_client=0"),
        ({"model": "lstm"}, "model='lstm' takes tokens, the samples are numbers"),
        ({"data_dir": 3}, "data_dir=3, must be a string"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        build.federation(config(**{"model": "mlp", **change}))


def test_bounds_may_be_numbers():
    fed = build.federation(config(model="mlp", clip=2.5, max_norm=100, cohort=1))
    assert (fed.settings["clip"], fed.settings["max_norm"]) == ("2.5", "100")
    with pytest.raises(ValueError, match=r"clip='-1.0', must be above 0"):
        config(clip=-1.0)


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.safetensors").touch()
    made = config(store="st", data_dir=".", init_from="w.safetensors")
    assert made.store == str(tmp_path / "st") and made.data_dir == str(tmp_path)
    assert (
        made.init_from == str(tmp_path / "w.safetensors") and config().store == "memory" and config().data_dir is None
    )


def test_the_file_a_run_starts_from_may_be_moved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.safetensors").touch()
    there, moved = (config(init_from=f"{name}/w.safetensors") for name in ("old", "new"))
    written = there.identity()
    assert not differences(written | {"init_from": "old/w.safetensors"}, there)
    assert "init_from is" in differences(written, moved)[0] and differences(written, config())
    (tmp_path / "old" / "w.safetensors").unlink()
    assert not differences(written, moved)


def test_images_of_words_are_refused(tmp_path):
    write_news(tmp_path)
    words = {"dataset": "ag-news", "scenario": "iid", "clients": 2, "data_dir": str(tmp_path), "model": "transformer"}
    with pytest.raises(ValueError, match="shift=1: the samples of ag-news are no images"):
        build.federation(config(**words, shift=1))
    with pytest.raises(
        ValueError, match="model='resnet9' takes image, the samples are tokens; for those there are lstm"
    ):
        build.federation(config(**{**words, "model": "resnet9"}))


def test_missing_data_are_an_error_before_work(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"torchvision\.datasets\.MNIST"):
        run(config(dataset="mnist", data_dir=str(tmp_path)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
