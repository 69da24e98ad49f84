"""The cost model: which path a layer takes, where the measurement is kept, and what happens when it cannot be."""

import json
import threading

import pytest
import torch

import fastfact as ff
import fastfact.models
from fastfact.cli.paths import plan
from fastfact.nn import choice as cost

TABLE = "conv-forward-contiguous-float32"


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The model kept in a fresh directory, every measurement counted and made up: `tables` are those measured."""
    tables = []

    def measure(table):
        tables.append(table)
        return {path: [len(tables) * x for x in numbers] for path, numbers in cost._builtin(table).items()}

    monkeypatch.setenv("FASTFACT_COST", str(tmp_path / "cost"))
    monkeypatch.setattr(cost, "measure", measure)
    cost.forget()
    yield tmp_path / "cost", tables
    cost.forget()


def layer(density=0.1, i=64, o=64, kernel=3, **settings):
    torch.manual_seed(0)
    conv = ff.nn.FactorizedConv2d(i, o, kernel, padding=kernel // 2, **settings)
    torch.nn.init.normal_(conv.mu)
    return conv.compact(density)


def takes(conv, *shape, **settings):
    with torch.no_grad():
        return conv._factored(torch.empty(*shape, **settings))


@pytest.mark.parametrize(
    "factored, density, kernel, groups, images",
    [
        (True, 0.05, 3, 1, 64),
        (True, 0.0, 3, 1, 64),
        (False, 0.9, 3, 1, 64),
        (False, 0.3, 1, 1, 64),
        (False, 0.3, 3, 64, 8),
        (False, 0.3, 3, 1, 1),
    ],
)
def test_the_choice_follows_density_kernel_groups_and_batch(factored, density, kernel, groups, images):
    assert takes(layer(density, kernel=kernel, groups=groups), images, 64, 16, 16) == factored


def test_a_rank_one_layer_without_mu_is_factored_and_a_dense_mu_never():
    free = ff.nn.FactorizedConv2d(64, 64, 3, padding=1, spec=ff.Rank1(sparse=False))
    assert takes(free, 64, 64, 16, 16)
    assert not takes(ff.nn.FactorizedConv2d(64, 64, 3, padding=1), 64, 64, 16, 16)
    assert takes(ff.nn.FactorizedLinear(512, 512, spec=ff.Rank1(sparse=False)), 64, 512)
    assert takes(ff.nn.FactorizedConv2d(64, 64, 3, padding=1, spec=ff.Rank1("kernel", sparse=False)), 64, 64, 16, 16)
    assert not takes(ff.nn.FactorizedConv2d(64, 64, 3, spec=ff.Rank1("view", sparse=False)), 64, 64, 16, 16)


def test_without_the_library_or_on_another_device_nothing_is_factored(monkeypatch):
    conv = layer()
    assert not takes(conv, 64, 64, 16, 16, device="meta")
    monkeypatch.setattr(cost, "loaded", lambda name: False)
    assert not takes(conv, 64, 64, 16, 16)


def test_measured_once_kept_and_read_again(kept):
    folder, tables = kept
    first = cost.coefficients(TABLE)
    assert cost.coefficients(TABLE) is first
    cost.forget()
    assert cost.coefficients(TABLE) == first
    assert tables == [TABLE]
    (file,) = folder.iterdir()
    written = json.loads(file.read_text())
    assert written["coefficients"] == first
    assert written["machine"]["threads"] == torch.get_num_threads()
    cost.coefficients(TABLE.replace("forward", "training"))
    assert len(tables) == len(list(folder.iterdir())) == 2


def test_another_number_of_threads_is_measured_anew(kept):
    threads = torch.get_num_threads()
    cost.coefficients(TABLE)
    try:
        torch.set_num_threads(threads + 1)
        cost.coefficients(TABLE)
    finally:
        torch.set_num_threads(threads)
    assert len(kept[1]) == len(list(kept[0].iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"factored"', '"other"'),
        lambda text: json.dumps({"coefficients": {path: [1.0] for path in cost.PATHS}}),
        lambda text: json.dumps({"coefficients": {path: [float("nan")] * 10 for path in cost.PATHS}}),
        lambda text: "[]",
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(kept, damage, caplog):
    folder, tables = kept
    cost.coefficients(TABLE)
    (file,) = folder.iterdir()
    file.write_text(damage(file.read_text()))
    cost.forget()
    again = cost.coefficients(TABLE)
    assert len(tables) == 2 and "damaged" in caplog.text
    assert json.loads(file.read_text())["coefficients"] == again
    assert list(folder.iterdir()) == [file]


def test_what_cannot_be_kept_is_not_used(kept, caplog):
    folder, tables = kept
    folder.write_text("a file where the directory should be")
    assert cost.coefficients(TABLE) == cost._builtin(TABLE)
    assert not tables and "cannot keep" in caplog.text


def test_what_cannot_be_measured_is_built_in(kept, monkeypatch, caplog):
    def fails(table):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(cost, "measure", fails)
    assert cost.coefficients(TABLE) == cost._builtin(TABLE)
    assert "not implemented" in caplog.text and not list(kept[0].iterdir())


def test_the_first_process_to_finish_decides(kept, monkeypatch):
    folder, _ = kept
    other = {path: [7 * x for x in numbers] for path, numbers in cost._builtin(TABLE).items()}

    def slow(table):
        # Meanwhile another process finishes.
        (path,) = [cost._path(folder, table)]
        cost._write(path, {"coefficients": other}, replace=False)
        return cost._builtin(table)

    monkeypatch.setattr(cost, "measure", slow)
    assert cost.coefficients(TABLE) == other


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTFACT_COST")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost.directory() == tmp_path / "fastfact" / "cost"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cost.directory() == tmp_path / "home" / ".cache" / "fastfact" / "cost"
    monkeypatch.setenv("FASTFACT_COST", "builtin")
    assert cost.directory() is None


def test_a_real_measurement_touches_neither_the_generator_nor_a_transform(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTFACT_COST", str(tmp_path))
    cost.forget()
    try:
        linear = ff.nn.FactorizedLinear(16, 16, spec=ff.Rank1(sparse=False))
        x, before = torch.randn(3, 4, 16), torch.get_rng_state()
        with torch.no_grad():
            got = torch.vmap(linear)(x)
        assert len(list(tmp_path.iterdir())) == 1
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(got, torch.nn.functional.linear(x, linear.weight, linear.bias))
    finally:
        cost.forget()


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_compile_and_export_keep_one_graph(kept, density):
    conv = layer(density, 16, 16)
    x = torch.randn(4, 16, 12, 12)
    expected = conv(x)
    torch.testing.assert_close(torch.compile(conv, fullgraph=True, backend="aot_eager")(x), expected)
    batch = torch.export.Dim("batch", min=1, max=64)
    for strict in (False, True):
        cost.forget()
        exported = torch.export.export(conv, (x,), dynamic_shapes=({0: batch},), strict=strict).module()
        torch.testing.assert_close(exported(x), expected)
        assert exported(x[:3]).shape == (3, 16, 12, 12)


def test_threads_ask_at_the_same_time(kept):
    found = []
    threads = [threading.Thread(target=lambda: found.append(cost.coefficients(TABLE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept[1]) == 1 and len(found) == 4


def test_too_small_an_image_is_pytorchs_error_or_the_ops():
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"too small|Kernel size can't be greater"):
        layer(0.05)(torch.randn(64, 64, 0, 0))


def test_the_plan_of_a_network_shows_the_path_of_each_layer(tmp_path):
    from calls import call

    file = tmp_path / "plan.json"
    code, out, error = call("info", "--plan", "resnet9", "--density", "0.3", "--batch", "8", "--json", file)
    assert code == 0, error
    rows = json.loads(file.read_text())["layers"]
    assert len(rows) == 2 * 9 and {row["step"] for row in rows} == {"forward", "training"}
    assert {row["path"] for row in rows} == {"factored", "reconstruct"}
    for row in rows:
        assert row["density"] == pytest.approx(0.3, abs=0.01) and row["input"].startswith("8×")
        faster = row["factored"] < cost.MARGIN * row["reconstruct"]
        assert row["path"] == ("factored" if faster else "reconstruct")
    assert rows[0]["layer"] in out and "all layers" in out


def test_the_plan_of_a_run(tmp_path):
    from functools import partial

    from calls import call

    samples = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])
    model = partial(ff.models.build, "resnet9", (1, 8, 8), 2, 0.1)
    ff.Federation(model, [ff.Client(samples, samples)], "factorized-fl-alpha").save(tmp_path / "run")
    code, out, error = call("info", "--plan", tmp_path / "run", "--batch", "16")
    assert code == 0 and "16×1×8×8" in out, error
    ff.Federation(model, [ff.Client(samples, samples)], "fedavg").save(tmp_path / "dense")
    code, _, error = call("info", "--plan", tmp_path / "dense")
    assert code == 2 and "has no factorized layer" in error


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("no-such-model",), "must be a run directory or one of"),
        (("resnet9", "--density", "2"), "density=2.0"),
        (("resnet9", "--input", "3x32x"), "input='3x32x'"),
    ],
)
def test_a_plan_of_nothing_there_is(arguments, message):
    from calls import call

    code, _, error = call("info", "--plan", *arguments)
    assert code == 2 and message in error


def test_measuring_draws_nothing_from_the_caller():
    before = torch.get_rng_state()
    with torch.no_grad():
        cost._aside(lambda: cost.measure("linear-training-contiguous-float32", budget=0.0))
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_under_a_mode_it_is_measured_aside():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Refuse():
        assert cost._aside(lambda: (torch.ones(2) + 1).tolist()) == [2, 2]


def test_a_layer_asks_again_only_when_the_question_changes(monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "factored", lambda work: asked.append(work) or False)
    layer = ff.nn.FactorizedConv2d(8, 8, 3, padding=1).compact(0.5)
    x = torch.randn(2, 8, 6, 6)
    for _ in range(3):
        layer(x)
    assert len(asked) == 1
    for change in (
        lambda: layer(x[:1]),
        lambda: layer(x[:1].double().float().to(memory_format=torch.channels_last)),
        lambda: torch.no_grad()(layer)(x),
        lambda: layer.compact(0.2)(x),
        lambda: (cost.forget(), layer(x)),
    ):
        before = len(asked)
        change()
        assert len(asked) == before + 1
    assert "_answer" not in layer.__getstate__()


def test_the_first_layer_of_a_network_pays_no_gradient_of_its_input(monkeypatch):
    asked = []
    monkeypatch.setattr(cost, "factored", lambda work: asked.append(work.step) or False)
    conv, x = layer(), torch.randn(2, 64, 6, 6)
    conv(x)
    conv(x.requires_grad_())
    torch.no_grad()(conv)(x)
    conv.requires_grad_(False)(x.detach())
    assert asked == ["weights", "training", "forward", "forward"]
    three = [cost.seconds(conv._work((16, 64, 16, 16), False, step, x.dtype)) for step in asked[:3]]
    assert all(three[2][path] < three[0][path] < three[1][path] for path in cost.PATHS)


def test_a_plan_tells_the_first_layer_from_the_others():
    model = torch.nn.Sequential(layer(), layer())
    rows = [row for row in plan(model, torch.zeros(1, 64, 16, 16), 16) if row["step"] == "training"]
    assert rows[0]["reconstruct"] < 0.9 * rows[1]["reconstruct"]
