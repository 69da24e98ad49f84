"""Recipes: that each resolves and says what the paper says, and that the command runs, stops and goes on."""

import json
import tomllib
from dataclasses import asdict, replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_cli import call

from fastfact.cli import papers
from fastfact.experiment import build, probes, report
from fastfact.experiment.config import Config
from fastfact.experiment.run import run
from fastfact.federation import Federation
from fastfact.federation.server.strategy import STRATEGIES
from fastfact.federation.wire.ledger import Ledger
from fastfact.papers import figures, measures, recipes, reproduce

ALL = [(paper, name) for paper, found in recipes.papers().items() for name in found]


@pytest.mark.parametrize(("paper", "name"), ALL)
def test_a_recipe_resolves_on_the_papers_data_and_on_the_stand_in(paper, name):
    recipe = recipes.find(paper, name)
    for plan in (recipe.resolve(), recipe.resolve(available=lambda dataset: dataset != "imagenet-400")):
        assert plan.cells() and set(plan.grid) == {(row, column) for row in recipe.rows for column in recipe.columns}
        for config in plan.cells().values():
            build.strategy(config)
    assert recipe.says or recipe.numbers
    # A setting nobody knows would be silently nobody's.
    for row in recipe.rows:
        for column in recipe.columns:
            wanted = recipe.settings(row, column, standin=True)
            assert wanted["method"] in STRATEGIES
    asked = {key.rpartition(".")[2] for patch in _patches(recipe) for key in patch.get("set", {})}
    assert asked <= {key for cls in STRATEGIES.values() for key in cls.__dataclass_fields__}


def _patches(recipe):
    for patch in [*recipe.common, *recipe.columns.values(), *recipe.rows.values()]:
        yield patch
        yield patch.get("standin", {})


def test_every_paper_has_its_results():
    found = {paper: len(content) for paper, content in recipes.papers().items()}
    assert set(found) == {"factorized-fl", "factorized-fl-arxiv", "simfed", "fedfac", "feddecomp"}
    assert min(found.values()) >= 9
    numbers = recipes.find("factorized-fl", "table-1-labels").numbers
    assert numbers["Factorized-FL β", "CIFAR-10, IID"] == (76.26, 1.05)
    assert numbers["FedFOMO", "SVHN, permuted non-IID, cost"] == (122.33, None)
    assert ("Stand-Alone", "CIFAR-10, IID, cost") not in numbers


def test_settings_come_in_layers():
    recipe = recipes.find("factorized-fl", "table-1-domains")
    here, there = recipe.resolve(), recipe.resolve(available=lambda name: True)
    alpha, paper = (plan.grid["Factorized-FL α", "average"][0] for plan in (here, there))
    assert (paper.dataset, paper.rounds, paper.batch_size, paper.lr, paper.width) == ("cifar100", 100, 256, 1e-3, 1.0)
    own = {"l1": 5e-4, "init": "random", "tau": 0.95, "epsilon": 20.0, "min_matches": 4}
    assert paper.settings == {"factorized-fl-alpha": own}
    assert (alpha.dataset, alpha.rounds, alpha.width) == ("digits", 20, 0.25)
    assert alpha.settings == {"factorized-fl-alpha": own | {"init": "svd"}}
    assert there.changes == () and "dataset digits for cifar100" in here.changes
    assert "factorized-*.init svd for random" in here.changes
    assert there.grid["FedAvg", "average"][0].settings == {}
    assert [config.seed for config in there.grid["FedAvg", "average"]] == [0, 1, 2]
    given = recipe.resolve({"rounds": 3, "seeds": 1}).grid["FedAvg", "cost"]
    assert len(given) == 1 and given[0].rounds == 3


def test_the_simulated_clients_of_fedfac_share_their_classifier():
    """§3.2: layers that are not split are shared, and Λ is within 1 … L − 1."""
    for name in ("figure-6", "figure-7"):
        for config in recipes.find("fedfac", name).resolve().cells().values():
            assert config.settings[config.method]["share_classifier"] and build.strategy(config).share_classifier


def test_columns_of_the_same_runs_share_them():
    recipe = recipes.find("factorized-fl", "table-1-domains")
    assert len(recipe.resolve({"seeds": 1}).cells()) == len(recipe.rows)
    names = {recipes.name_of(config) for config in recipe.resolve().cells().values()}
    assert len(names) == 3 * len(recipe.rows)
    other = recipes.find("factorized-fl", "figure-6-domains").resolve()
    assert set(other.cells()) == set(recipe.resolve().cells())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown colour"),
        ({"paper": "A  1  2"}, "row A has 2 numbers for 1 columns"),
        ({"paper": "B  1", "rows": {"A": {}}}, "row B is none of the rows"),
        ({"paper": "B  1", "rows": None}, "no method is called B"),
        ({"measure": "beauty"}, "unknown measure beauty"),
        ({"pictures": ["portrait"]}, "unknown picture portrait"),
        ({"says": ""}, "neither numbers"),
    ],
)
def test_a_file_that_contradicts_itself(change, message):
    content = {"title": "T", "says": "S", "columns": {"c": {}}, "rows": {"A": {"method": "fedavg"}}} | change
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        recipes._recipe("p", "n", content, {"methods": {"A": {"method": "fedavg"}}, "results": {}})


def test_the_papers_say_where_nothing_is_printed():
    for path in recipes.FOLDER.glob("*.toml"):
        content = tomllib.loads(path.read_text())
        assert content["title"] and content["results"]


SMALL = ["--quick", "--clients", "5", "--rounds", "2", "--epochs", "1", "--jobs", "1"]


def test_the_command_shows_both_numbers_and_goes_on(tmp_path):
    arguments = ["reproduce", "factorized-fl", "figure-7-similarity", *SMALL, "--out", tmp_path]
    code, out, err = call(*arguments, "--json", tmp_path / "x.json")
    assert code == 0, err
    assert "dataset digits for cifar100" in out and "The paper says: u is similar" in out
    assert "Measured (u-others, v-within, v-between): at the end of the run" in out
    assert (tmp_path / "factorized-fl" / "figure-7-similarity-similarity.png").stat().st_size > 1000
    written = json.loads((tmp_path / "x.json").read_text())
    (row,) = [row for row in written["rows"] if row["column"] == "u, all others"]
    (cell,) = [path for path in (tmp_path / report.CELLS).iterdir()]
    kept = probes.read(cell)
    matrix = kept["similarity/u"][2]
    assert sorted(kept["similarity/u"]) == [1, 2] and matrix.shape == (5, 5)
    assert row["ours"]["mean"] == pytest.approx(matrix[~np.eye(5, dtype=bool)].mean(), abs=1e-6)
    assert {"hardware", "versions", "commit", "command"} <= set(written)
    # A run that was stopped: the second round, and what it recorded, is made again and is the same.
    (cell / report.RESULT).unlink()
    (cell / probes.FOLDER / "round-000002.safetensors").unlink()
    code, out, err = call(*arguments)
    assert code == 0, err
    assert np.array_equal(probes.read(cell)["similarity/u"][2], matrix)
    code, out, _ = call(*arguments)
    assert code == 0 and "finished earlier" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["feddecop"], "paper='feddecop', must be one of"),
        (["fedfac"], "result: name one of figure-1"),
        (["fedfac", "table-99"], "fedfac has no 'table-99'; there are figure-1"),
        (["fedfac", "table-2", "--dataset", "mnits"], "dataset='mnits'"),
        (["fedfac", "table-2", "--dataset", "cifar10", "--data-dir", "/nowhere"], "is missing"),
        (["fedfac", "table-2", "--seeds", "0"], "seeds=0"),
        (["fedfac", "table-2", "--jobs", "0"], "jobs='0'"),
    ],
)
def test_bad_input_is_one_line_before_any_file(tmp_path, arguments, message):
    code, _, err = call("reproduce", *arguments, "--out", tmp_path / "new")
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "new").exists()


def test_small_costs_keep_their_digits():
    """On the stand-in a run sends kilobytes, where the paper has gigabytes."""
    shown = [papers._shown(value) for value in (None, (122.33, 0), (0.0, 0), (0.64, 0), (8.64e-6, 0), (0.7, 0.01))]
    assert shown == ["–", "122.3", "0.00", "0.6400", "0.00000864", "0.7000 ± 0.0100"]


def test_without_arguments_it_lists_every_result():
    code, out, _ = call("reproduce")
    assert code == 0 and all(name in out for _, name in ALL)


def write_run(directory, config, clients=5):
    """A finished run with everything recorded, without training."""
    rng = np.random.default_rng(1)
    rows = [
        {
            "round": r,
            "client": k,
            "loss": 1 / r,
            "accuracy": 0.5 + 0.1 * r + 0.01 * k,
            "accuracy_before": 0.4 + 0.01 * k,
            "bytes_up": 100,
            "bytes_down": 50,
            "seconds": 1.0,
        }
        for r in range(1, config.rounds + 1)
        for k in range(clients)
    ]
    directory.mkdir(parents=True)
    summary = {"accuracy": 0.7, "formula": 4e9, "parameters": 2e6, "seconds": 6.0}
    downloaded = [0.3 + 0.02 * k for k in range(clients)]
    result = {"config": asdict(config), "summary": summary, "newcomers": {"ensemble": 0.25}, "downloaded": downloaded}
    (directory / report.RESULT).write_text(json.dumps(result))
    (directory / report.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "config.json").write_text(json.dumps({"format": 1, "samples": [[3, 1]] * clients}))
    (directory / probes.FOLDER).mkdir()
    weights = np.full((clients, clients), 0.25)
    for number in range(1, config.rounds + 1):
        made = {
            "similarity/u": np.ones((clients, clients)),
            "similarity/v": np.full((clients, clients), 0.1 * number),
            "similarity/key": np.eye(clients),
            "matching/weights": weights,
            "drift/distance": np.array(2.0 * number),
            "updates/weight": np.arange(clients, dtype=float),
            "updates/u": np.arange(clients, dtype=float),
            "updates/v": np.arange(clients, dtype=float),
            "split/shared": np.arange(8) < 4 + number,
            "server/seconds": np.array(0.5),
            "movement/shared": np.array(3.0),
            "movement/personal": np.array(4.0),
            "masked/shared": np.array(0.2),
            "masked/personal": np.array(0.1),
            "embeddings/encoding": rng.standard_normal((clients, 100, 4)),
            "neurons/output": rng.random((clients, 6)),
            "features/map": rng.random((10, 4, 4)),
            "features/shared": np.arange(10) < 5,
            "features/image": rng.random((1, 8, 8)),
            "leaks/psnr": np.array([10.0, 14.0]),
            "labels/count": rng.integers(0, 9, (clients, 3)),
        }
        path = directory / probes.FOLDER / f"round-{number:06d}.safetensors"
        save_file({name: np.array(array, order="C") for name, array in made.items()}, path)


VALUES = {
    "accuracy": 0.82,
    "best": 0.82,
    "best-of-ten": 0.72,
    "loss": 1 / 3,
    "cost": 4.0,
    "parameters": 2.0,
    "seconds": 6.0,
    "seconds-in-all": 7.5,
    "u-others": 1.0,
    "v-between": 0.3,
    "key-others": 0.0,
    "matched-within": 0.0,
    "drift": 6.0,
    "moved-shared": 3.0,
    "moved-personal": 4.0,
    "masked-shared": 0.2,
    "masked-personal": 0.1,
    "stable": 0.875,
    "distance": 2.0,
    "distance-u": 2.0,
    "distance-v": 2.0,
    "psnr": 12.0,
    "psnr-most": 14.0,
    "new-ensemble": 0.25,
    "new-download": None,
    "v-within": None,
}


def test_measures_by_hand(tmp_path):
    """Five clients with accuracies .5 + .1 r + .01 k over three rounds, and what `write_run` records."""
    write_run(tmp_path / "a", Config(clients=5, rounds=3))
    cell = report.read_cell(tmp_path / "a")
    for name, value in VALUES.items():
        shown = measures.MEASURES[name].of(cell, None, "trained")
        assert shown == (value if value is None else pytest.approx(value)), name
    assert measures.MEASURES["accuracy"].of(cell, (1, 2), "trained") == pytest.approx(0.815)
    # Rounds 1 and 2 as downloaded in rounds 2 and 3 are .42, the last aggregation is .3 + .02 k.
    for name, value in (("accuracy", 0.34), ("best", 0.42), ("best-of-ten", (0.42 + 0.42 + 0.34) / 3)):
        assert measures.MEASURES[name].of(cell, None, "downloaded") == pytest.approx(value), name
    assert measures.curve(cell, "downloaded") == pytest.approx([0.42, 0.42, 0.34])
    assert set(measures.MEASURES) == {*VALUES, "client-std", "entropy", "new-fine-tune", "new-local-train"}


def cell_of(accuracy, before, downloaded, samples, tmp_path):
    """A run whose rows are [rounds][clients] of accuracies, None where a client took no part."""
    rows = [
        {"round": r, "client": k, "accuracy": value, "accuracy_before": before[r - 1][k]}
        for r, values in enumerate(accuracy, 1)
        for k, value in enumerate(values)
        if value is not None
    ]
    (tmp_path / "config.json").write_text(json.dumps({"format": 1, "samples": [[n, 0] for n in samples]}))
    return report.Cell(tmp_path, rows, {"config": {"rounds": len(accuracy)}, "downloaded": downloaded})


def test_absent_clients_are_not_measured_by_what_they_had(tmp_path):
    """Three clients, two a round; client 2 has twice the samples of the others."""
    accuracy = [[0.9, 0.8, None], [None, 0.6, 0.5], [0.7, None, 0.4]]
    before = [[None, None, None], [None, 0.3, 0.2], [0.1, None, 0.6]]
    cell = cell_of(accuracy, before, [0.5, 0.3, 0.1], [10, 10, 20], tmp_path)
    of = {name: measure.of for name, measure in measures.MEASURES.items()}
    assert of["best"](cell, None, "trained") == pytest.approx(0.85)
    assert of["best"](cell, None, "downloaded") == pytest.approx(0.35)
    # By samples: (.3 · 10 + .2 · 20) / 30, (.1 · 10 + .6 · 20) / 30, (.5 · 10 + .3 · 10 + .1 · 20) / 40.
    assert of["best-of-ten"](cell, None, "downloaded") == pytest.approx((7 / 30 + 13 / 30 + 10 / 40) / 3)
    assert of["accuracy"](cell, None, "downloaded") == pytest.approx(0.3)
    assert of["accuracy"](cell, None, "trained") == pytest.approx((0.7 + 0.6 + 0.4) / 3)
    assert of["client-std"](cell, None, "downloaded") == pytest.approx(np.std([0.5, 0.3, 0.1]))
    assert of["best"](cell, (1,), "downloaded") == pytest.approx(0.3)


def test_a_method_without_a_download_is_measured_after_training(tmp_path):
    nothing = [[None, None]] * 2
    cell = cell_of([[0.4, 0.6], [0.8, 0.6]], nothing, None, [1, 1], tmp_path)
    for moment in measures.MOMENTS:
        assert measures.MEASURES["best"].of(cell, None, moment) == pytest.approx(0.7)
    # A run from before the last aggregation was measured has no number for it.
    old = cell_of([[0.4, 0.6], [0.8, 0.6]], [[None, None], [0.1, 0.3]], None, [1, 1], tmp_path)
    assert measures.curve(old, "downloaded") == pytest.approx([0.2])
    assert measures.MEASURES["accuracy"].of(old, None, "downloaded") == pytest.approx(0.2)


def test_recipes_measure_when_their_papers_do():
    assert recipes.find("feddecomp", "table-1").taken() == {
        "the best round, after aggregation, as downloaded, before local training": ["best"]
    }
    assert recipes.find("fedfac", "table-2").moment == "downloaded"
    assert recipes.find("factorized-fl", "table-1-labels").moment == "trained"
    for paper in ("factorized-fl", "factorized-fl-arxiv", "simfed"):
        for recipe in recipes.papers()[paper].values():
            for place in recipe.places:
                assert recipe.settings(*place, standin=True)["test_set"] == "global"


def test_entropy_of_known_densities():
    """A uniform density of width w has ln w, a normal one ½ ln(2πe σ²)."""
    rng = np.random.default_rng(0)
    outputs = np.stack([rng.random(2000), 3 * rng.random(2000), 0.5 * rng.standard_normal(2000)], axis=1)
    expected = [0, np.log(3), 0.5 * np.log(2 * np.pi * np.e * 0.25)]
    np.testing.assert_allclose(measures.entropy(outputs), expected, atol=0.08)
    assert np.isnan(measures.entropy(np.zeros((10, 1)))).all()


@pytest.mark.parametrize("name", figures.PICTURES)
def test_every_picture_is_drawn(name, tmp_path, monkeypatch):
    recipe = recipes.find("feddecomp", "table-3")
    plan = recipe.resolve({"seeds": 1, "clients": 5, "rounds": 3})
    for directory, config in plan.cells().items():
        write_run(tmp_path / report.CELLS / directory, config)
    grid = reproduce.grid(plan, tmp_path)
    assert grid.ours["Alternatingly", "Tiny"] == (pytest.approx(42), 0.0)
    assert grid.theirs["Alternatingly", "Tiny"] == (44.22, 0.55)
    path = figures.PICTURES[name].draw(grid, tmp_path / "x.png")
    assert path.stat().st_size > 3000


def test_relative_to_a_row(tmp_path):
    recipe = recipes.find("fedfac", "table-7")
    plan = recipe.resolve({"clients": 5, "rounds": 2})
    for directory, config in plan.cells().items():
        write_run(tmp_path / report.CELLS / directory, config)
    assert reproduce.grid(plan, tmp_path).ours["FedEM", "CIFAR10, π = 0.1"] == (pytest.approx(1.0), 0.0)


RECORDED = {
    "factorized-fl-alpha": {"similarity/u", "similarity/v", "similarity/key", "matching/weights", "updates/v"},
    "fedfac-dynamic": {
        "server/seconds",
        "split/shared",
        "masked/shared",
        "masked/personal",
        "features/map",
        "neurons/output",
    },
    "feddecomp": {"drift/distance", "movement/shared", "movement/personal", "embeddings/encoding", "labels/count"},
}


@pytest.mark.parametrize("method", RECORDED)
def test_recorders_on_a_run(method, tmp_path):
    names = ",".join(sorted({name.split("/")[0] for name in RECORDED[method]}))
    config = Config(
        method=method, clients=4, rounds=2, epochs=1, model="cnn2", width=0.1, samples=20, record=names, scenario="iid"
    )
    run(config, tmp_path / "run")
    kept = probes.read(tmp_path / "run")
    assert RECORDED[method] <= set(kept)
    fed = Federation.load(tmp_path / "run")
    if method == "factorized-fl-alpha":
        np.testing.assert_allclose(kept["similarity/v"][2], fed.similarity("v").numpy(), atol=1e-6)
        matrix = kept["matching/weights"][2]
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(matrix, fed.mixing_matrix().numpy(), atol=1e-6)
    elif method == "feddecomp":
        sigma = {n: t.flatten(1).double() for n, t in fed.states.state.items() if n in fed.shared and "num" not in n}
        sigma = {n: t for n, t in sigma.items() if not fed.infos[n].buffer}
        mean = np.mean([sum((t[k] - t.mean(0)).square().sum() for t in sigma.values()) ** 0.5 for k in range(4)])
        assert float(kept["drift/distance"][2]) == pytest.approx(float(mean), rel=1e-5)
        assert kept["labels/count"][2].sum(1).tolist() == [train for train, _ in fed.config()["samples"]]
        assert 1 not in kept["movement/shared"]
    else:
        assert kept["split/shared"][2].dtype == bool and 1 not in kept["split/shared"]
        # Before the second round there is a factor analysis, before the first nothing to mix.
        assert kept["server/seconds"][2] > kept["server/seconds"][1] >= 0
    assert isinstance(fed.ledger, Ledger)


def test_attacks_are_recorded_five_times_and_not_where_nothing_is_sent(tmp_path, monkeypatch):
    attack = probes.privacy.leakage
    monkeypatch.setattr(probes.privacy, "leakage", lambda fed, images, steps: attack(fed, images=1, steps=2))
    small = {"clients": 2, "epochs": 1, "model": "cnn2", "width": 0.1, "samples": 20, "scenario": "iid"}
    for method in ("fedavg", "stand-alone"):
        config = Config(method=method, rounds=10, record="leaks", **small)
        run(config, tmp_path / method)
    kept = probes.read(tmp_path / "fedavg")["leaks/psnr"]
    assert sorted(kept) == [2, 4, 6, 8, 10] and all(values.shape == (2,) for values in kept.values())
    assert probes.read(tmp_path / "stand-alone") == {}


def test_newcomers_and_some_clients_only(tmp_path):
    config = Config(
        method="fedavg",
        clients=5,
        rounds=1,
        epochs=1,
        model="mlp1",
        width=0.1,
        newcomers=0.25,
        only="1,2,4,5",
        scenario="iid",
    )
    result = run(config, tmp_path / "run")
    assert len(build.federation(config)) == 3
    assert set(result["newcomers"]) == {"fine-tune", "download", "ensemble"}
    whole = build.parts(Config(clients=5, scenario="iid")).clients
    kept = build.parts(Config(clients=5, scenario="iid", only="2,5")).clients
    assert [client.train[0].equal(whole[k].train[0]) for client, k in zip(kept, (1, 4), strict=True)] == [True, True]
    for bad, message in (("6", "only='6'"), ("a", "only='a'")):
        with pytest.raises(ValueError, match=message):
            Config(clients=5, only=bad)
    with pytest.raises(ValueError, match="record='everything'"):
        Config(record="everything")


def test_a_pretrained_start_and_the_true_split_of_a_simulation():
    config = Config(clients=3, model="mlp1", width=0.2, scenario="iid", method="feddecomp", pretrain=6, lr=0.1)
    first = build.federation(config)
    model, client = first.models[0], first.clients[0]
    assert (model(client.test[0]).argmax(1) == client.test[1]).double().mean() > 0.8
    simulated = Config(
        dataset="simulation",
        clients=12,
        width=1.0,
        model="mlp1",
        method="fedsplit",
        scenario="iid",
        simulation={"shared_units": 0.3, "samples": 4},
        settings={"fedsplit": {"shared_channels": "oracle"}},
    )
    fed = build.federation(simulated)
    (mask,) = {tuple(mask.tolist()) for mask in fed.method.channel_masks("up", {}).values()}
    assert sum(mask) == 60 and sum(mask[140:]) >= 57
    with pytest.raises(ValueError, match="simulation="):
        build.federation(replace(simulated, simulation={"colour": 1}))
