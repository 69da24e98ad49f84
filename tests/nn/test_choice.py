"""The choice of a path: by a measurement on the tensors at hand that disturbs nothing, remembered, or by a rule."""

import copy
import json
import math
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastfact as ff
import fastfact.models
from fastfact.base import machine
from fastfact.nn import choice


@pytest.fixture
def remembering(tmp_path, monkeypatch):
    """Answers are remembered in a fresh directory, which is returned."""
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / "answers"))
    choice.forget()
    yield tmp_path / "answers"
    choice.forget()


@pytest.fixture
def measured(remembering, monkeypatch):
    """A list that grows with the paths of each measurement, in which the last path wins."""
    asked = []

    def times(sides):
        asked.append(list(sides))
        return {path: 1.0 / (1 + at) for at, path in enumerate(sides)}

    monkeypatch.setattr(choice, "times", times)
    return asked


def layer(density=0.1, i=64, o=64, kernel=3, **settings):
    torch.manual_seed(0)
    conv = ff.nn.FactorizedConv2d(i, o, kernel, padding=kernel // 2, **settings)
    torch.nn.init.normal_(conv.mu)
    return conv.compact(density)


def takes(conv, *shape, training=False, **settings):
    x = torch.empty(*shape, **settings)
    with torch.set_grad_enabled(training):
        return conv._choose(x, conv._tensors(), None)


def work(**changes):
    with torch.no_grad():
        conv, x = layer(), torch.empty(64, 64, 16, 16)
        return conv.work(x, conv._tensors(), False)._replace(**changes)


@pytest.mark.parametrize(
    "expected, density, kernel, groups, images",
    [
        ("factored", 0.05, 3, 1, 64),
        ("factored", 0.0, 3, 1, 64),
        ("reconstruct", 0.9, 3, 1, 64),
        ("factored", 0.3, 1, 1, 64),
        ("reconstruct", 0.3, 3, 64, 8),
        ("reconstruct", 0.3, 3, 1, 1),
    ],
)
def test_the_rule_follows_density_kernel_groups_and_batch(expected, density, kernel, groups, images):
    assert takes(layer(density, kernel=kernel, groups=groups), images, 64, 16, 16) == expected


def test_the_rule_knows_depthwise_and_1x1_convolutions():
    depthwise = ff.nn.FactorizedConv2d(64, 64, 5, padding=2, groups=64).compact(0.6)
    assert takes(depthwise, 2, 64, 14, 14, training=True) == "factored"
    assert takes(depthwise.eval(), 2, 64, 14, 14) == "reconstruct"
    pixels = layer(0.1, kernel=1).eval()
    assert takes(pixels, 2, 64, 14, 14, memory_format=torch.channels_last) == "factored"
    assert (
        takes(pixels, 2, 64, 14, 14) == takes(pixels.bfloat16(), 2, 64, 14, 14, dtype=torch.bfloat16) == "reconstruct"
    )
    assert takes(pixels.double().train(), 2, 64, 14, 14, training=True, dtype=torch.float64) == "reconstruct"


def test_by_the_rule_a_layer_without_mu_may_be_factored_and_of_a_dense_mu_a_linear_layer():
    free = ff.nn.FactorizedConv2d(64, 64, 3, padding=1, spec=ff.Rank1(sparse=False))
    assert takes(free, 64, 64, 16, 16) == "factored"
    assert takes(ff.nn.FactorizedConv2d(64, 64, 3, padding=1), 64, 64, 16, 16) == "reconstruct"
    assert takes(ff.nn.FactorizedConv2d(64, 64, 3, padding=1), 1, 64, 9, 9) == "reconstruct"
    assert takes(ff.nn.FactorizedLinear(512, 512, spec=ff.Rank1(sparse=False)), 64, 512) == "factored"
    assert takes(ff.nn.FactorizedLinear(512, 512), 64, 512, training=True) == "factored"
    assert takes(ff.nn.FactorizedLinear(512, 512).eval(), 64, 512) == "reconstruct"
    double = ff.nn.FactorizedLinear(512, 512, dtype=torch.float64)
    assert takes(double, 64, 512, training=True, dtype=torch.float64) == "reconstruct"
    kernel = ff.nn.FactorizedConv2d(64, 64, 3, padding=1, spec=ff.Rank1("kernel", sparse=False))
    assert takes(kernel, 64, 64, 16, 16) == "factored"
    view = ff.nn.FactorizedConv2d(64, 64, 3, spec=ff.Rank1("view", sparse=False))
    assert takes(view, 64, 64, 16, 16) == "reconstruct"


def test_without_the_library_or_on_another_device_nothing_is_factored(monkeypatch):
    conv = layer()
    assert takes(conv, 64, 64, 16, 16, device="meta") == "reconstruct"
    monkeypatch.setattr(choice, "loaded", lambda name: False)
    assert takes(conv, 64, 64, 16, 16) == "reconstruct"


def test_measured_once_remembered_and_read_again(measured, remembering):
    conv = layer(0.9)
    assert takes(conv, 64, 64, 16, 16) == "factored" == takes(copy.deepcopy(conv), 64, 64, 16, 16)
    assert measured == [["reconstruct", "factored"]]
    (file,) = remembering.iterdir()
    written = json.loads(file.read_text())
    assert written["answer"]["path"] == "factored" and set(written["answer"]["seconds"]) == {"reconstruct", "factored"}
    assert written["machine"]["threads"] == torch.get_num_threads() and written["question"] in choice.choices()
    choice.forget()
    assert takes(conv, 64, 64, 16, 16) == "factored" and len(measured) == 1


def test_the_same_kind_of_work_is_asked_once(measured):
    same = [work(rows=63), work(rows=65), work(nonzeros=work().nonzeros - 40), work(image=(17, 16))]
    other = [work(rows=32), work(step="training"), work(dtype=torch.float64), work(channels_last=True), work(rank=2)]
    other += [work(nonzeros=0), work(nonzeros=2 * work().nonzeros), work(padding=(0, 0)), work(stride=(2, 2))]
    other += [work(groups=2), work(kind="kernel"), work(device="cuda"), work(image=(8, 16)), work(size=(64, 64, 5, 5))]
    assert {one.question() for one in same} == {work().question()}
    assert len({one.question() for one in other} | {work().question()}) == len(other) + 1


def test_another_number_of_threads_is_measured_anew(measured):
    threads, conv = torch.get_num_threads(), layer()
    takes(conv, 64, 64, 16, 16)
    try:
        torch.set_num_threads(threads + 1)
        takes(conv, 64, 64, 16, 16)
    finally:
        torch.set_num_threads(threads)
    assert len(measured) == 2


@pytest.mark.parametrize("damage", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]"])
def test_a_damaged_file_is_measured_again_and_replaced(measured, remembering, damage, caplog):
    takes(layer(), 64, 64, 16, 16)
    (file,) = remembering.iterdir()
    file.write_text(damage(file.read_text()))
    choice.forget()
    assert takes(layer(), 64, 64, 16, 16) == "factored"
    assert len(measured) == 2 and "damaged" in caplog.text
    assert json.loads(file.read_text())["answer"]["path"] == "factored" and list(remembering.iterdir()) == [file]


def test_a_process_measures_for_a_few_seconds_on_a_gpu(remembering, monkeypatch):
    """Kernels are compiled there first. What there was no time for is asked again in the next process."""
    monkeypatch.setattr(choice, "_measured_elsewhere", 0.0)

    def times(sides):
        time.sleep(0.01)
        return {"reconstruct": 2.0, "fused": 1.0}

    monkeypatch.setattr(choice, "times", times)
    here, there = work(device="cpu"), [work(device="cuda", rows=rows) for rows in (1, 8, 64)]
    choice.choose(here, dict)
    assert choice._measured_elsewhere == 0
    assert choice.choose(there[0], dict) == "fused" and 0.01 <= choice._measured_elsewhere < 1
    choice._measured_elsewhere = choice.COMPILING + 1
    assert choice.choose(there[1], dict) == choice.rule(there[1]) == "reconstruct"
    choice.forget()  # the next process
    choice._measured_elsewhere = 0.0
    assert [choice.choose(one, dict) for one in there] == ["fused"] * 3


def test_what_cannot_be_remembered_is_not_measured(measured, remembering, caplog):
    remembering.write_text("a file where the directory should be")
    assert takes(layer(0.9), 64, 64, 16, 16) == "reconstruct"
    assert not measured and "cannot keep" in caplog.text


def test_the_first_process_to_finish_decides(remembering):
    def slow():
        (remembering / _name({"q": 1})).write_text(json.dumps({"answer": {"path": "theirs"}}))
        return {"path": "ours"}

    assert machine.remembered({"q": 1}, slow) == {"path": "theirs"}


def _name(question):
    return f"{machine._digest(machine.facts())}-{machine._digest(question)}.json"


def test_a_processor_of_the_same_name_with_other_instructions_is_asked_anew(monkeypatch):
    monkeypatch.setattr(machine, "_lasting", machine._lasting.__wrapped__)
    told = {"model name": "A Processor", "flags": "avx2 amx_tile"}
    monkeypatch.setattr(machine, "_told_of_processor", told.get)
    assert machine.processor() == "A Processor"
    before = _name("a question")
    assert _name("a question") == before
    told["flags"] = "avx2"
    assert _name("a question") != before


def test_where_it_is_remembered(monkeypatch, tmp_path):
    monkeypatch.delenv("FASTFACT_CHOICE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.directory() == tmp_path / "fastfact"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert machine.directory() == tmp_path / "home" / ".cache" / "fastfact"
    for variable, value in (("FASTFACT_CHOICE", "fixed"), ("FASTFACT_CHOICE", "x.json"), ("FASTFACT_COST", "builtin")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert machine.directory() is None
    monkeypatch.setenv("FASTFACT_COST", str(tmp_path / "old"))
    assert machine.directory() == tmp_path / "old"


CASES = {
    "conv": (lambda: layer(0.1, 8, 8), (2, 8, 6, 6)),
    "without μ": (lambda: ff.nn.FactorizedConv2d(8, 8, 3, spec=ff.Rank1(sparse=False)), (2, 8, 6, 6)),
    "linear": (lambda: ff.nn.FactorizedLinear(16, 8).compact(0.2), (4, 16)),
}


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("make, shape", CASES.values(), ids=CASES)
def test_a_measurement_leaves_gradients_and_random_numbers_alone(remembering, make, shape, wants):
    conv = make()
    x = torch.randn(shape)
    twin, y = copy.deepcopy(conv), x.clone().requires_grad_(wants)
    x.requires_grad_(wants)
    fired, before = [], torch.get_rng_state()
    for parameter in conv.parameters():
        parameter.register_hook(lambda grad: fired.append(grad))
    out = conv(x)
    assert len(list(remembering.iterdir())) == 1
    assert not fired and all(parameter.grad is None for parameter in (*conv.parameters(), x))
    assert torch.equal(before, torch.get_rng_state()) and torch.is_grad_enabled()
    (twin.path,) = choice.choices().values()
    assert torch.equal(out, twin(y))
    out.square().sum().backward()
    twin(y).square().sum().backward()
    for mine, theirs in zip((*conv.parameters(), x), (*twin.parameters(), y), strict=True):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad, theirs.grad)
    with torch.no_grad():
        conv(x)
    assert len(choice.choices()) == 2


def test_checkpointed_layers_are_measured_aside(remembering):
    model = torch.nn.Sequential(layer(0.1, 8, 8), torch.nn.ReLU(), layer(0.1, 8, 8))
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    assert choice.choices()
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in model.parameters()])


@torch.no_grad()
def test_a_question_about_a_kept_weight_does_not_wait_for_the_one_that_leads_to_it(remembering):
    """The first is answered before the other is timed, in a thread of its own."""
    layer = ff.nn.FactorizedLinear(300, 70).eval()
    layer.prune_(density=0.6)
    layer.compact()

    def evaluate():
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            layer(torch.randn(40, 300))

    thread = threading.Thread(target=evaluate, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [question.split()[1] for question in choice.choices()] == ["kept", "evaluation"]


def test_a_mode_a_transform_and_a_tracer_see_no_measurement(measured):
    from torch.utils.flop_counter import FlopCounterMode

    linear = ff.nn.FactorizedLinear(16, 16, spec=ff.Rank1(sparse=False))
    x = torch.randn(3, 4, 16)
    with torch.no_grad():
        got = torch.vmap(linear)(x)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, linear._weight(None), linear.bias))
    with FlopCounterMode(display=False):
        linear(x)
    assert not measured
    linear(x)
    assert measured


@pytest.mark.parametrize("density", [0.05, 0.9])
def test_compile_and_export_keep_one_graph(measured, density):
    conv = layer(density, 16, 16)
    x = torch.randn(4, 16, 12, 12)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")(x)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = [
        torch.export.export(conv, (x,), dynamic_shapes=({0: batch},), strict=strict).module()
        for strict in (False, True)
    ]
    assert not measured
    expected = conv(x)
    torch.testing.assert_close(compiled, expected)
    for one in exported:
        torch.testing.assert_close(one(x), expected)
        assert one(x[:3]).shape == (3, 16, 12, 12)


def test_threads_that_ask_at_the_same_time_measure_once(measured):
    conv, found = layer(), []
    threads = [threading.Thread(target=lambda: found.append(takes(conv, 64, 64, 16, 16))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1 and found == ["factored"] * 4


def test_choices_are_taken_again(measured, tmp_path, monkeypatch):
    conv = layer(0.05)
    takes(conv, 64, 64, 16, 16)
    table = json.loads(json.dumps(choice.choices()))
    assert list(table.values()) == ["factored"]
    choice.set_choices(dict.fromkeys(table, "reconstruct"))
    assert takes(conv, 64, 64, 16, 16) == "reconstruct" and len(measured) == 1
    choice.forget()
    (tmp_path / "table.json").write_text(json.dumps(dict.fromkeys(table, "reconstruct")))
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / "table.json"))
    assert takes(conv, 64, 64, 16, 16) == "reconstruct" and takes(conv, 64, 64, 32, 32) == "factored"
    assert len(measured) == 1
    with pytest.raises(ValueError, match="must be one of reconstruct, factored, fused, product"):
        choice.set_choices({"question": "other"})


def test_tables_with_a_path_that_has_another_name_now_are_taken(measured, tmp_path, monkeypatch):
    conv = layer(0.05)
    assert takes(conv, 64, 64, 16, 16) == "factored"
    former = dict.fromkeys(choice.choices(), "reordered")
    choice.set_choices(former)
    assert takes(conv, 64, 64, 16, 16) == "reconstruct" and set(choice.choices().values()) == {"reconstruct"}
    choice.forget()
    (tmp_path / "table.json").write_text(json.dumps(former))
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path / "table.json"))
    assert takes(conv, 64, 64, 16, 16) == "reconstruct" and len(measured) == 1


def timed(run):
    """A path of one part."""

    def side(timer):
        with timer(torch.zeros(1)):
            run()

    return side


def work_for(seconds):
    """Have the processor for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_what_a_part_is_timed_after_and_what_counts(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    timer = choice.Timed()

    def side(timed):
        for _ in range(2):
            with timed(torch.zeros(1), choice.FAR):
                work_for(0.002)
            work_for(0.01)

    before = timer._others.clone()
    for _ in range(2):
        assert 0.004 <= timer.of(side) < 0.012
    assert (timer._others == before + 4).all()


def test_other_operators_come_before_what_is_no_part_of_a_step(monkeypatch):
    timer, times = choice.Timed(), []
    monkeypatch.setattr(choice.Timed, "_operate", lambda self: times.append(self.clock()))
    before = timer._others.clone()
    with timer(torch.zeros(1), choice.FAR):
        assert not times
    with timer(torch.zeros(1)):
        assert len(times) == 1
    assert (timer._others[: choice.NEAR] == before[: choice.NEAR] + 2).all()
    assert (timer._others[choice.NEAR :] == before[choice.NEAR :] + 1).all()


@pytest.mark.parametrize(
    "step, reconstruct, factored, path",
    [
        ("evaluation", 50, 53, "factored"),
        ("evaluation", 50, 55, "reconstruct"),
        ("evaluation", 1000, 1005, "reconstruct"),
        ("training", 1000, 990, "reconstruct"),
        ("training", 1000, 960, "factored"),
        ("forward", 1000, 990, "reconstruct"),
    ],
)
def test_what_microseconds_count(remembering, monkeypatch, step, reconstruct, factored, path):
    monkeypatch.setattr(choice, "times", lambda _: {"reconstruct": 1e-6 * reconstruct, "factored": 1e-6 * factored})
    assert choice.choose(work(step=step, size=(64, 64, 3, 3)), dict) == path


@pytest.mark.parametrize(
    "kind, step, path",
    [
        ("linear", "evaluation", "reconstruct"),
        ("spatial", "evaluation", "factored"),
        ("linear", "training", "factored"),
    ],
)
def test_a_linear_layer_in_evaluation_is_not_slower_in_a_row_either(remembering, monkeypatch, kind, step, path):
    sides = dict.fromkeys(("reconstruct", "factored"))
    monkeypatch.setattr(choice, "times", lambda _: {"reconstruct": 3e-4, "factored": 2e-4})
    monkeypatch.setattr(choice, "repeated", lambda _, others: {"reconstruct": 1e-4, "factored": 2e-4})
    assert choice.choose(work(kind=kind, step=step), lambda: sides) == path
    monkeypatch.setattr(choice, "repeated", lambda _, others: {"reconstruct": 2e-4, "factored": 1e-4})
    choice.forget()
    assert choice.choose(work(kind=kind, step=step, rows=5), lambda: sides) == "factored"


@pytest.mark.parametrize(
    "side, density, warm, cold, path, asked",
    [
        (256, 0.6, 0.9, 0.95, "reconstruct", [choice.CACHES]),
        (256, 0.3, 0.9, 0.95, "factored", [choice.CACHES]),
        (256, 0.3, 0.9, 1.05, "reconstruct", [choice.CACHES]),
        (256, 0.6, 0.9, 0.89, "factored", [choice.CACHES]),
        (64, 0.6, 0.9, 1.0, "factored", []),
        (256, 0.6, 0.7, 1.0, "factored", []),
    ],
)
def test_a_large_convolution_in_evaluation_keeps_its_weight_unless_a_path_is_faster_without_weights_in_the_caches(
    remembering, monkeypatch, side, density, warm, cold, path, asked
):
    seen = []

    def repeated(sides, others):
        seen.append(others)
        return {"reconstruct": 1e-3, "factored": 1e-3 * cold}

    sides = dict.fromkeys(("reconstruct", "factored"))
    monkeypatch.setattr(choice, "times", lambda _: {"reconstruct": 1e-3, "factored": 1e-3 * warm})
    monkeypatch.setattr(choice, "repeated", repeated)
    size = (side, side, 3, 3)
    one = work(step="evaluation", size=size, nonzeros=int(density * math.prod(size)))
    assert choice.choose(one, lambda: sides) == path
    assert seen == asked


@pytest.mark.parametrize("cold, in_a_row", [(0.99, 0.5), (0.5, 0.99), (1.2, 0.5)])
def test_a_linear_layer_in_evaluation_keeps_its_weight_unless_another_path_is_clearly_faster(
    remembering, monkeypatch, cold, in_a_row
):
    sides = dict.fromkeys(("reconstruct", "factored"))
    monkeypatch.setattr(choice, "times", lambda _: {"reconstruct": 1e-4, "factored": 1e-4 * cold})
    monkeypatch.setattr(choice, "repeated", lambda _, others: {"reconstruct": 1e-4, "factored": 1e-4 * in_a_row})
    assert choice.choose(work(kind="linear", step="evaluation"), lambda: sides) == "reconstruct"


def test_runs_in_a_row_have_nothing_between_them(monkeypatch):
    monkeypatch.setattr(choice.Timed, "_operate", lambda self: pytest.fail("something between"))
    x = torch.ones(3)

    def side(seconds):
        def run(timed):
            with timed(x):
                work_for(seconds)

        return run

    seconds = choice.repeated({"first": side(0.001), "second": side(0.003)}, 0)
    assert 0.001 <= seconds["first"] < 0.002 < seconds["second"] < 0.006


def test_more_lies_between_the_parts_of_a_step_of_large_images():
    small, middle, large = (choice.between(torch.empty(4, 16, side, side)) for side in (1, 56, 512))
    assert small == choice.NEAR < middle == 4 * 4 * 4 * 16 * 56**2 < large == choice.FAR


def test_the_budget_holds_and_a_path_far_behind_or_impossible_is_left_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    runs = {"slow": 0, "quick": 0, "slower": 0}

    def side(name, seconds):
        def run():
            runs[name] += 1
            work_for(seconds)

        return timed(run)

    @timed
    def fails():
        raise RuntimeError("not implemented for 'Half'")

    began = time.perf_counter()
    seconds = choice.times({"slow": side("slow", 0.06), "quick": side("quick", 0.005), "fails": fails})
    assert time.perf_counter() - began < 1.5
    assert min(seconds, key=seconds.get) == "quick" and set(seconds) == {"slow", "quick"} and runs["slow"] == 2
    choice.times({"slower": side("slower", 0.06), "slow": side("slow", 0.06)})
    assert runs["slower"] == 2
    choice.times({"slower": side("slower", 0.035), "slow": side("slow", 0.035)})
    assert runs["slower"] == 2 + 3
    assert choice.times({"fails": fails}) == {}


def test_a_path_leaves_once_it_is_too_far_behind_for_the_number_of_runs(monkeypatch):
    now, runs = [0.0], []

    def side(name, seconds):
        def run():
            runs.append(name)
            now[0] += seconds

        return timed(run)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    for behind, expected in ((1.6, 1 + 2), (1.25, 1 + 3), (1.0, 1 + choice.ENOUGH)):
        runs.clear()
        choice.times({"quick": side("quick", 0.002), "behind": side("behind", 0.002 * behind)})
        assert runs.count("behind") == expected, behind


@pytest.mark.parametrize("prepared", [False, True])
def test_long_work_far_behind_is_run_once(monkeypatch, prepared):
    now, runs = [0.0], []

    def side(name, *seconds):
        def run():
            now[0] += seconds[min(runs.count(name), len(seconds) - 1)]
            runs.append(name)

        return timed(run)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    monkeypatch.setattr(choice, "_prepared", prepared)
    choice.times({"behind": side("behind", 0.05), "quick": side("quick", 0.02)})
    assert runs.count("behind") == 1 + (not prepared)
    runs.clear()
    choice.times({"near": side("near", 0.03), "quick": side("quick", 0.02)})
    assert runs.count("near") == 1 + 2
    runs.clear()
    monkeypatch.setattr(choice, "_prepared", False)
    seconds = choice.times({"prepares": side("prepares", 0.08, 0.015), "quick": side("quick", 0.02)})
    assert min(seconds, key=seconds.get) == "prepares"


def test_one_fast_run_makes_no_path_the_fastest(monkeypatch):
    """The machine is twice as fast for one run, and slower by half in a third of the turns."""
    now, runs = [0.0], []

    def side(name, seconds):
        def run():
            turn = runs.count(name)
            runs.append(name)
            now[0] += seconds * (0.5 if (name, turn) == ("lucky", 9) else 1.5 if turn % 3 == 0 else 1)

        return timed(run)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    seconds = choice.times({"lucky": side("lucky", 0.0021), "quick": side("quick", 0.002)})
    assert seconds["quick"] < seconds["lucky"]
    assert seconds["lucky"] / seconds["quick"] == pytest.approx(1.05)


@pytest.mark.parametrize("threads, step, expected", [(2, "training", "reconstruct"), (1, "training", "factored")])
def test_convolutions_that_are_hardly_faster_are_not_taken_on_several_threads(threads, step, expected, monkeypatch):
    """In networks what other layers wrote is in another core's caches."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for share, path in ((0.95, expected), (0.9, "factored")):
        counted = {
            one: choice._counted(work(step=step), one, s) for one, s in (("reconstruct", 1), ("factored", share))
        }
        assert min(counted, key=counted.get) == path


@pytest.mark.parametrize("held_up", [0, 1])
def test_short_work_that_was_held_up_is_timed_again(held_up, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    runs = {"first": 0, "second": 0}

    def side(name, held_up):
        def run():
            runs[name] += 1
            work_for(0.015 if runs[name] - 1 == held_up else 1e-4)

        return timed(run)

    seconds = choice.times({"first": side("first", held_up), "second": side("second", -1)})
    assert seconds["first"] < 0.005 and seconds["second"] < 0.005


def test_what_a_process_prepares_once_is_no_time_of_a_path():
    prepared = []

    def side(seconds):
        def run():
            work_for(seconds if prepared else 0.2)
            prepared.append(True)

        return timed(run)

    seconds = choice.times({"first": side(0.001), "second": side(0.003)})
    assert seconds["first"] < seconds["second"]


def test_a_thread_that_waits_for_the_processor_is_not_slow(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    seconds = choice.times({"waits": timed(lambda: time.sleep(0.03)), "works": timed(lambda: work_for(0.005))})
    assert seconds["waits"] < seconds["works"]


def test_a_kind_of_work_no_path_can_do_is_for_the_rule(remembering):
    def sides():
        return {path: timed(lambda: (_ for _ in ()).throw(RuntimeError("no"))) for path in ("reconstruct", "factored")}

    assert choice.choose(work(), sides) == choice.rule(work())


def test_too_small_an_image_is_pytorchs_error_or_the_ops():
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"too small|Kernel size can't be greater"):
        layer(0.05)(torch.randn(64, 64, 0, 0))


def test_a_layer_asks_again_only_when_the_question_changes(monkeypatch):
    asked = []
    monkeypatch.setattr(choice, "choose", lambda work, sides: asked.append(work) or "reconstruct")
    conv = layer(0.5, 8, 8)
    x = torch.randn(2, 8, 6, 6)
    for _ in range(3):
        conv(x)
    assert len(asked) == 1
    for change in (
        lambda: conv(x[:1]),
        lambda: conv(x[:1].to(memory_format=torch.channels_last)[:, :, :5]),
        lambda: torch.no_grad()(conv)(x),
        lambda: conv.compact(0.2)(x),
        lambda: (choice.forget(), conv(x)),
        lambda: (setattr(conv, "padding", (2, 2)), conv(x)),
    ):
        before = len(asked)
        change()
        assert len(asked) == before + 1
    assert "_answers" not in conv.__getstate__()


def test_the_step_is_that_of_the_tensors(monkeypatch):
    asked = []
    monkeypatch.setattr(choice, "choose", lambda work, sides: asked.append((work.step, work.dtype)) or "reconstruct")
    conv, x = layer(), torch.randn(2, 64, 6, 6)
    conv(x)
    conv(x.requires_grad_())
    torch.no_grad()(conv)(x)
    conv.eval()(x)
    torch.no_grad()(conv)(x)
    conv.requires_grad_(False)(x.detach())
    assert [step for step, _ in asked] == ["weights", "training", "forward", "training", "evaluation", "forward"]
    with torch.autocast("cpu", torch.bfloat16):
        conv.train()(x)
    assert asked[-1][1] == torch.bfloat16


@torch.no_grad()
def test_a_dense_mu_that_is_mostly_zeros_is_factored_in_evaluation(monkeypatch):
    conv, x = layer(1.0, 8, 8).expand().eval(), torch.randn(16, 8, 6, 6)
    steps = []
    factored = ff.ops.direct.factored
    monkeypatch.setattr(ff.ops.direct, "factored", lambda *a: steps.append(len(a[5])) or factored(*a))
    torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(x, conv._weight(None), conv.bias, padding=1))
    assert not steps
    conv.prune_(0.05)
    state, nonzeros = conv.state_dict(), int(conv.mu.count_nonzero())
    for _ in range(2):
        torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(x, conv._weight(None), conv.bias, padding=1))
    assert steps == [nonzeros] * 2 and not conv.is_compact
    assert list(state) == list(conv.state_dict()) and conv.state_dict()["mu"].shape == conv.size
    conv.mu.data.view(-1)[conv.mu.view(-1).nonzero()[0]] = 0
    torch.testing.assert_close(conv(x), torch.nn.functional.conv2d(x, conv._weight(None), conv.bias, padding=1))
    assert steps[-1] == nonzeros - 1
    conv.train()(x)
    assert len(steps) == 3


def test_the_plan_of_a_network_shows_the_path_of_each_layer(tmp_path):
    from calls import call

    file = tmp_path / "plan.json"
    code, out, error = call("info", "--plan", "resnet9", "--density", "0.3", "--batch", "8", "--json", file)
    assert code == 0, error
    rows = json.loads(file.read_text())["layers"]
    assert len(rows) == 2 * 9 and {row["step"] for row in rows} == {"forward", "training"}
    for row in rows:
        assert row["density"] == pytest.approx(0.3, abs=0.01) and row["input"].startswith("8×")
        assert row["path"] in ("factored", "reconstruct") and row["factored"] > 0 and row["reconstruct"] > 0
        assert row["dense"] > 0 and row["product"] is None
    assert rows[0]["layer"] in out and "all layers" in out
    assert "fused" not in out and "product" not in out and out.count("*") == 2 * 9 + 1


def test_the_plan_shows_every_path_that_a_layer_has(tmp_path, monkeypatch):
    from calls import call

    pytest.importorskip("torchvision")
    monkeypatch.setattr(choice, "BUDGET", 0.0)
    file = tmp_path / "plan.json"
    code, out, error = call("info", "--plan", "squeezenet1_1", "--input", "3x40x40", "--batch", "2", "--json", file)
    assert code == 0, error
    rows = json.loads(file.read_text())["layers"]
    has = {(row["layer"], row["step"]): [path for path in choice.PATHS if row[path] is not None] for row in rows}
    assert len(rows) == 2 * 26 and rows[0]["weight"] == "64×3×3×3" and rows[0]["input"] == "2×3×40×40"
    assert has["features.3.squeeze", "forward"] == ["reconstruct", "factored"]
    assert has["features.3.squeeze", "training"] == ["reconstruct", "factored", "product"]
    assert has["features.3.expand3x3", "forward"] == ["reconstruct", "factored"]
    assert all(row["dense"] > 0 and row["path"] in has[row["layer"], row["step"]] for row in rows)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("training", [False, True])
def test_the_times_of_a_layer_of_sequences_and_of_one_that_brings_its_input_into_a_format(training):
    sequences = ff.nn.FactorizedConv1d(8, 16, 3, padding=1).compact(0.2)
    seconds, path = sequences.times(torch.randn(2, 8, 10), training)
    assert path in seconds and {"dense", "reconstruct", "factored"} == seconds.keys()
    pixels = layer(0.2, 8, 16, 1).to(memory_format=torch.channels_last)
    seconds, path = pixels.times(torch.randn(2, 8, 5, 5), training)
    assert path in seconds and ("product" in seconds) == training


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
        (("no-such-model",), "must be a run directory, a network of torchvision or one of"),
        (("resnet9", "--density", "2"), "density=2.0"),
        (("resnet9", "--input", "3x32x"), "input='3x32x'"),
        (("squeezenet1_1", "--input", "1x32x32"), "must be the shape of a square image"),
    ],
)
def test_a_plan_of_nothing_there_is(arguments, message):
    from calls import call

    code, _, error = call("info", "--plan", *arguments)
    assert code == 2 and message in error


def test_a_path_that_prepares_in_its_second_run_is_not_taken_for_slow():
    """Medians of two ratios would be those of the second run."""
    taken = choice._typical({"reconstruct": [0.2, 0.21], "panels": [6.0, 0.1]})
    assert taken["panels"] == 0.1 and taken["reconstruct"] == 0.2
    steady = choice._typical({"reconstruct": [2.0, 2.0, 2.0, 2.0, 3.0], "panels": [1.0, 1.0, 1.0, 1.0, 0.5]})
    assert steady == {"panels": 0.5, "reconstruct": 1.0}
