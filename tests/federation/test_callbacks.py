"""What callbacks are told, and what TensorBoard's and those of the examples make of it."""

import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import fastfact as ff

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tracking"


class Notes(ff.Callback):
    def __init__(self):
        self.seen = []

    def on_client(self, fed, row):
        self.seen.append(("client", fed.round, row["round"], row["client"]))

    def on_round(self, fed, rows):
        self.seen.append(("round", fed.round, len(rows)))

    def on_end(self, fed):
        self.seen.append(("end", fed.round))


def test_callbacks_are_told_of_clients_rounds_and_the_end(make):
    notes = Notes()
    make().fit(2, callbacks=[notes])
    one = lambda r: [*(("client", r, r, k) for k in range(3)), ("round", r, 3)]  # noqa: E731
    assert notes.seen == [*one(1), *one(2), ("end", 2)]


def test_the_end_is_told_of_a_run_that_fails_and_changes_nothing(make, same):
    notes, fed, straight = Notes(), make(), make()
    straight.fit(2)

    def stop(round, client, *_):
        if (round, client) == (2, 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fed.fit(2, on_client=stop, callbacks=[notes])
    assert notes.seen[-1] == ("end", 1)
    fed.fit(1)
    assert same(fed, straight)


def test_means():
    row = {"loss": 1.0, "accuracy": 0.5, "accuracy_before": None, "bytes_up": 3, "seconds": 2.0, "left_out": None}
    found = ff.Callback.means([row, {**row, "loss": None, "accuracy": 1.0, "left_out": "diverged"}])
    assert found == {"loss": 1.0, "accuracy": 0.75, "bytes_up": 6, "seconds": 4.0, "clients": 2, "left_out": 1}


def test_tensorboard(make, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fed = make(method="factorized-fl-alpha")
    fed.fit(2, callbacks=[ff.TensorBoard(tmp_path)])
    fed.fit(1, callbacks=[ff.TensorBoard(tmp_path)])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = events.Scalars("round/accuracy")
    assert [event.step for event in found] == [1, 2, 3]
    assert [event.value for event in found] == pytest.approx([mean for _, mean, _ in fed.history.curve()])
    sent = [event.value for event in events.Scalars("round/bytes_up")]
    assert sum(sent) == fed.ledger.up
    assert events.Histograms("clients/accuracy")[0].histogram_value.num == 3
    image = events.Images("clients/similarity")[-1]
    assert (image.width, image.height, image.step) == (3, 3, 3)


def test_what_tensorboard_cannot_have_is_left_out(make, tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("no folder")
    fed = make()
    fed.fit(2, callbacks=[ff.TensorBoard(tmp_path)])
    assert fed.round == 2 and caplog.text.count("is not written for TensorBoard") == 2


class Scale(nn.Module):
    """No layer with a weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.scale * x[:, :3]


def test_tensorboard_of_a_model_with_nothing_to_compare(make, tmp_path):
    fed = make(Scale)
    fed.fit(2, callbacks=[ff.TensorBoard(tmp_path)])
    assert fed.round == 2


class Tool(types.ModuleType):
    """A stand-in for W&B, MLflow or Trackio that notes what it is called with."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        for call in ("init", "start_run", "log", "log_metrics", "finish", "end_run"):
            setattr(self, call, lambda *a, call=call, **k: self.calls.append((call, a, k)) or self)


@pytest.mark.parametrize(
    ("tool", "begins", "logs", "ends"),
    [
        ("wandb", "init", "log", "finish"),
        ("mlflow", "start_run", "log_metrics", "end_run"),
        ("trackio", "init", "log", "finish"),
    ],
)
def test_the_examples(make, monkeypatch, tool, begins, logs, ends):
    fake = Tool(tool)
    monkeypatch.setitem(sys.modules, tool, fake)
    monkeypatch.setattr(ff.Callback, "BY_NAME", dict(ff.Callback.BY_NAME))
    runpy.run_path(str(EXAMPLES / f"{tool}_callback.py"))
    fed = make()
    fed.fit(2, callbacks=[ff.Callback.BY_NAME[tool]("runs/a")])
    assert [call for call, *_ in fake.calls] == [begins, logs, logs, ends]
    _, (told,), how = fake.calls[2]
    assert how["step"] == 2 and told == ff.Callback.means(fed.history.of(2))
