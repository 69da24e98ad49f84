"""Methods and callbacks of one's own, by an entry point and by --use."""

import json
import os
import sys

import pytest
from calls import SMALL, call

import fastfact as ff
from fastfact.base import plugins
from fastfact.experiment import report
from fastfact.federation.server import strategy

OWN = '''
from dataclasses import dataclass
import fastfact as ff

@ff.register
@dataclass
class Half(ff.methods.FedAvg):
    """FedAvg of which half is taken."""
    name = "half"
    share: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ValueError(f"half(share={self.share}): must be above 0 and at most 1")

    def weights(self, uploads, guests=None):
        import torch
        matrix = super().weights(uploads, guests)
        return self.share * matrix + (1 - self.share) * torch.eye(*matrix.shape, dtype=matrix.dtype)

class Told(ff.Callback, name="told"):
    def on_round(self, fed, rows):
        with open(self.directory / "told.txt", "a") as file:
            file.write(f"{rows[0]['round']}\\n")
'''


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing loaded yet, and nothing left behind."""
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setattr(ff.Callback, "BY_NAME", dict(ff.Callback.BY_NAME))
    monkeypatch.setenv(plugins.VARIABLE, "")
    before = dict(strategy.STRATEGIES)
    yield tmp_path
    strategy.STRATEGIES.clear()
    strategy.STRATEGIES.update(before)


def test_a_package_that_is_installed_brings_its_method(fresh, monkeypatch):
    (fresh / "my_methods.py").write_text(OWN)
    about = fresh / "my_methods-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_methods\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fastfact.methods]\nhalf = my_methods:Half\nlost = my_methods_lost\n")
    monkeypatch.syspath_prepend(fresh)
    assert ff.methods.make("half", share=0.25).share == 0.25
    assert "half" in ff.methods.names()


def test_a_package_that_cannot_be_imported_is_a_warning(fresh, monkeypatch, caplog):
    about = fresh / "lost-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lost\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fastfact.methods]\nlost = no_such_module_of_mine\n")
    monkeypatch.syspath_prepend(fresh)
    assert "fedavg" in ff.methods.names()
    assert "lost = no_such_module_of_mine cannot be loaded: ModuleNotFoundError" in caplog.text


def test_a_method_and_a_callback_from_a_file(fresh):
    """In a comparison too, whose cells are run by other processes."""
    (fresh / "own.py").write_text(OWN)
    use = ["--use", fresh / "own.py"]
    run = ["--method", "half", "--set", "share=0.25", "--track", "told", "--out", fresh / "a"]
    code, _, err = call(*use, "run", *SMALL, *run)
    assert code == 0, err
    config = json.loads((fresh / "a" / "config.json").read_text())
    assert config["method"]["name"] == "half" and config["method"]["settings"]["share"] == 0.25
    assert (fresh / "a" / "told.txt").read_text() == "1\n2\n"
    code, _, err = call(*use, "run", *SMALL, "--method", "half", "--set", "share=2", "--out", fresh / "b")
    assert code == 2 and "share=2" in err and err.count("\n") == 1
    both = ["--methods", "half,fedavg", "--seeds", "1", "--jobs", "1", "--track", "none", "--out", fresh / "c"]
    code, _, err = call(*use, "compare", *SMALL, *both)
    assert code == 0, err
    assert [cell.method for cell in report.read(fresh / "c")] == ["half", "fedavg"]


def test_files_of_one_name_are_modules_of_their_own(fresh):
    """Pickles, and dataclasses, find a class by the name of its module."""
    paths = [fresh / folder / "own.py" for folder in ("one", "other")]
    for path in paths:
        path.parent.mkdir()
        path.touch()
        plugins.use(str(path))
    names = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    for path in paths:
        del sys.modules[names[str(path)]]


def test_a_file_below_a_folder_with_the_separator_of_paths(fresh):
    """What one process has imported, those that it starts import too."""
    paths = [fresh / f"a{os.pathsep}{os.pathsep}b" / "first.py", fresh / "second.py"]
    paths[0].parent.mkdir()
    for path in paths:
        path.touch()
        plugins.use(str(path))
    plugins.use("json")
    plugins._loaded.clear()
    plugins.load()
    assert {*map(str, paths), "json"} <= plugins._loaded


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such file"), ("import no_such_module_of_mine", "No module named"), ("1 +", "SyntaxError")],
)
def test_a_file_that_cannot_be_imported_is_one_line(fresh, content, message):
    if content is not None:
        (fresh / "own.py").write_text(content)
    code, _, err = call("--use", fresh / "own.py", "methods")
    assert code == 2 and message in err and err.count("\n") == 1 and "own.py" in err
    assert not os.environ[plugins.VARIABLE]


def test_a_name_that_is_taken_is_an_error(fresh):
    with pytest.raises(ValueError, match=r"method='fedavg': is the name of fastfact\.methods\.fedavg\.FedAvg already"):

        @ff.register
        class Mine(ff.methods.FedAvg):
            name = "fedavg"
