"""A short run of the targets that are no ops; `python -m tests.fuzz TARGET --minutes N` runs them for long."""

import pytest

from tests.fuzz import config, files
from tests.fuzz._common import repeated


@pytest.mark.parametrize("name", files.CASES)
def test_files_of_others(name):
    assert repeated({name: files.CASES[name]}, 0.01, 1, batch=25) == 25


@pytest.mark.parametrize("name", config.CASES)
def test_command_lines_and_toml(name, monkeypatch):
    monkeypatch.setattr(config.cli, "_train", lambda *_: None)
    monkeypatch.setattr(config.cli, "_compare", lambda *_: None)
    assert repeated({name: config.CASES[name]}, 0.01, 1, batch=25) == 25
