"""Models with factorized layers in files, and read back by code that knows the dense model only."""

import copy
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fastfact as ff


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1))
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, classes)
        self.again = nn.Linear(6, classes, bias=False)
        self.again.weight = self.head.weight

    def forward(self, x):
        x = self.body(x).flatten(2).mT
        return self.head(self.attention(x, x, x)[0].mean(1)) + self.again(x.mean(1))


X = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
SPECS = [
    ff.Rank1(rank=2),
    ff.Rank1(layout="kernel", sparse=False),
    ff.LowRank(layout="view", scaling=0.5),
    ff.Hadamard(tensor=True),
]


def made(spec, density=None, **options):
    torch.manual_seed(0)
    net = ff.factorize(Net(), spec, skip=("head", "again"), **options)
    net(X)
    for layer in ff.factorized_layers(net).values() if density is not None else ():
        nn.init.normal_(layer.mu)
        layer.compact(density)
    return net.eval()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_model_comes_back_into_the_dense_one(spec, tmp_path):
    net, file = made(spec), tmp_path / "net.safetensors"
    ff.save(net, file)
    new = Net().to(memory_format=torch.channels_last).eval()
    assert ff.load_into(new, file) is new
    for path, layer in ff.factorized_layers(net).items():
        assert ff.factorized_layers(new)[path].spec == layer.spec
    torch.testing.assert_close(new(X), net(X))
    assert new.again.weight is new.head.weight and "again.weight" not in load_file(file)
    assert ff.load_into(new, file) is new, "and into one that is factorized already"


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_compact_layers_come_back_compact(density, tmp_path):
    net, file = made(ff.Rank1(), density), tmp_path / "net.safetensors"
    ff.save(net, file)
    for new in (Net(), made(ff.Rank1()), made(ff.Rank1(), 0.7)):
        ff.load_into(new.eval(), file)
        assert all(layer.is_compact for layer in ff.factorized_layers(new).values())
        assert torch.equal(new(X), net(X))
        new.train()(X).sum().backward()
    ff.save(made(ff.Rank1()), file)
    ff.load_into(net, file)
    assert not any(layer.is_compact for layer in ff.factorized_layers(net).values())


def test_a_layer_by_itself(tmp_path):
    layer = ff.nn.FactorizedLinear(4, 3)
    ff.save(layer, tmp_path / "layer")
    new = ff.load_into(nn.Linear(4, 3), tmp_path / "layer")
    assert torch.equal(new.weight, layer.weight)


def test_the_type_and_device_of_the_model_stay(tmp_path):
    ff.save(made(ff.Rank1()), tmp_path / "net")
    new = ff.load_into(Net().double(), tmp_path / "net")
    assert new.head.weight.dtype == new.body[0].u.dtype == torch.float64


@pytest.mark.parametrize(
    "model, match",
    [
        (lambda: Net(classes=5), r"head\.weight has shape \[4, 6\], must be \[5, 6\] in the model"),
        (lambda: made(ff.LowRank()), r"body\.0 has LowRank.* in the model, Rank1.* in the file"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "the model has no layer body"),
    ],
)
def test_another_model_is_refused_and_left_as_it_was(model, match, tmp_path):
    ff.save(made(ff.Rank1()), tmp_path / "net")
    model = model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        ff.load_into(model, tmp_path / "net")
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_with_other_names_or_more_factorized_layers_is_refused(tmp_path):
    ff.save(made(ff.Rank1()), tmp_path / "net")
    more = Net()
    more.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"the file has no extra\.bias, extra\.weight"):
        ff.load_into(more, tmp_path / "net")
    ff.factorize(more, ff.Rank1(), only="extra")
    with pytest.raises(ValueError, match="extra is factorized in the model, and dense in the file"):
        ff.load_into(more, tmp_path / "net")
    less = Net()
    less.body[1] = nn.Identity()
    with pytest.raises(ValueError, match=r"the model has no body\.1\.bias, body\.1\.num_batches_tracked"):
        ff.load_into(less, tmp_path / "net")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="no safetensors file"):
        ff.load_into(Net(), tmp_path / "text")
    save_file({"a": X}, tmp_path / "plain")
    with pytest.raises(ValueError, match=r"not written by ff\.save"):
        ff.load_into(Net(), tmp_path / "plain")
    with pytest.raises(FileNotFoundError):
        ff.load_into(Net(), tmp_path / "none")
    about = {"version": 1, "layers": {"head": {"spec": "Rank7"}}, "aliases": {}}
    setting = {"layers": {"head": {"spec": "Rank1", "x": 1}}}
    for change, match in (({}, "spec='Rank7'"), ({"version": 2}, "newer"), (setting, "Rank1 has no setting x")):
        save_file({"a": X}, tmp_path / "bad", {"fastfact": json.dumps(about | change)})
        with pytest.raises(ValueError, match=match):
            ff.load_into(Net(), tmp_path / "bad")


@pytest.mark.parametrize("positions", [[0, 216], [5, 5], [7, 3], [-1, 3]])
def test_positions_outside_the_weight_are_refused(positions, tmp_path):
    """The kernels write where they say."""
    net = made(ff.Rank1(), 0.3)
    layer = net.body[0]
    layer.set_support(torch.ones(2), torch.tensor(positions, dtype=torch.int32))
    ff.save(net, tmp_path / "net")
    with pytest.raises(ValueError, match=r"body\.0\.mu_index must be ascending int32 positions, from 0 to 215"):
        ff.load_into(Net(), tmp_path / "net")


def test_state_that_is_no_tensor_is_refused(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(ValueError, match="_extra_state of the model's state is a dict"):
        ff.save(Odd(2, 2), tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_every_spec_is_described_by_plain_values():
    for spec in (*SPECS, ff.Rank1(layout="view"), ff.Hadamard(personalized=True)):
        assert ff.Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("density", [None, 0.3])
def test_a_module_in_several_places(tmp_path, density):
    model = nn.ModuleList([nn.Linear(8, 8)] * 3)
    ff.factorize(model, ff.Rank1())
    if density:
        model[0].compact(density)
    ff.save(model, tmp_path / "model.safetensors")
    for other in (nn.ModuleList([nn.Linear(8, 8)] * 3), ff.factorize(nn.ModuleList([nn.Linear(8, 8)] * 3), ff.Rank1())):
        ff.load_into(other, tmp_path / "model.safetensors")
        assert other[0] is other[2] and torch.equal(other[1].mu, model[0].mu)


def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path):
    model, file = ff.factorize(nn.Sequential(nn.Linear(8, 4)), ff.Rank1()), tmp_path / "model.safetensors"
    before = os.umask(0o022)
    try:
        ff.save(model, file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o644
    file.chmod(0o640)
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    ff.save(model, link)
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.safetensors", "model.safetensors"]


def test_files_of_other_factors_are_refused_before_any_is_made(tmp_path):
    model = ff.factorize(nn.Sequential(nn.Linear(8, 4)), ff.Rank1(sparse=False))
    ff.save(model, tmp_path / "good")
    with safe_open(tmp_path / "good", framework="pt") as file:
        about = json.loads(file.metadata()["fastfact"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    large = copy.deepcopy(about)
    large["layers"]["0"]["rank"] = 2**40
    nonzeros = copy.deepcopy(about)
    nonzeros["layers"]["0"]["nnz"] = 3
    for change, tensors, text in (
        (large, state, "u has shape"),
        (nonzeros, state, "nonzeros"),
        (about, state | {"0.u": state["0.u"].to(torch.complex64)}, "floating point"),
    ):
        save_file(tensors, tmp_path / "bad", {"format": "pt", "fastfact": json.dumps(change)})
        dense = nn.Sequential(nn.Linear(8, 4))
        with pytest.raises(ValueError, match=text):
            ff.load_into(dense, tmp_path / "bad")
        assert type(dense[0]) is nn.Linear
    with pytest.raises(FileNotFoundError, match="is no file"):
        ff.load_into(nn.Sequential(nn.Linear(8, 4)), tmp_path)


class Conv1D(nn.Module):
    """That of transformers, by whose name it is known: the weight is [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


Conv1D.__module__ = "transformers.pytorch_utils"


@pytest.mark.parametrize("spec", [ff.Rank1(), ff.LowRank(rank=2)])
def test_a_turned_weight_comes_back(tmp_path, spec):
    model, x = nn.Sequential(Conv1D(6, 4)), torch.randn(2, 4)
    ff.save(ff.factorize(model, spec), tmp_path / "model.safetensors")
    other = ff.load_into(nn.Sequential(Conv1D(6, 4)), tmp_path / "model.safetensors")
    torch.testing.assert_close(other(x), model(x))


def test_parts_of_one_memory_are_written_each(tmp_path):
    model, whole = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(32)
    model[0].weight.data, model[1].weight.data = whole[:16].view(4, 4), whole[16:].view(4, 4)
    ff.save(model, tmp_path / "model.safetensors")
    other = copy.deepcopy(model).requires_grad_(False)
    other[0].weight.zero_(), other[1].weight.zero_()
    ff.load_into(other, tmp_path / "model.safetensors")
    assert torch.equal(other[0].weight, model[0].weight) and torch.equal(other[1].weight, model[1].weight)
