"""From a dense network to a small factorized one."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn import compress as module

pytestmark = pytest.mark.filterwarnings("ignore:factorize:UserWarning")
SPEC = importlib.util.spec_from_file_location("example", Path(__file__).parents[2] / "examples" / "compress.py")
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)


@pytest.fixture(scope="module")
def digits():
    return example.digits()


@pytest.fixture(scope="module")
def dense(digits):
    return example.trained(digits[0], epochs=5)


def numbers(model):
    return sum(p.numel() for p in model.parameters())


def test_a_tenth_of_mu_keeps_the_accuracy(digits, dense):
    train, test = digits
    model = copy.deepcopy(dense)
    done = ff.compress(model, train, target_density=0.1, epochs=4, evaluate=test)
    assert done.accuracy_dense > 0.97 and done.accuracy > 0.97
    layers = ff.factorized_layers(model)
    kept = sum(len(layer.mu) for layer in layers.values())
    assert kept == round(0.1 * sum(torch.Size(layer.size).numel() for layer in layers.values()))
    assert done.parameters == numbers(model) and done.dense == numbers(dense) and not model.training
    assert set(done.specs) == set(layers) and "accuracy: dense 9" in str(done)


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_number_of_parameters_is_kept_to(digits, dense, share):
    model = copy.deepcopy(dense)
    target = round(share * numbers(dense))
    done = ff.compress(model, digits[0], target_params=target, epochs=0)
    assert numbers(model) == done.parameters <= target
    assert done.parameters >= 0.98 * target
    assert done.accuracy is None and all(layer.is_compact for layer in ff.factorized_layers(model).values())


def test_rank_goes_where_it_is_worth_most():
    """A weight of rank 4 and one that is sparse: the first gets the rank, the second its numbers."""
    torch.manual_seed(0)
    low, sparse = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        low.weight.copy_(torch.randn(64, 4) @ torch.randn(4, 64) / 16)
        sparse.weight.copy_((torch.rand(64, 64) < 0.1) * torch.randn(64, 64))
    x = torch.randn(256, 64)
    model = nn.Sequential(low, sparse)
    wanted = model(x)
    data = [(x, wanted + torch.randn_like(wanted))]
    done = ff.compress(model, data, target_params=1400, epochs=0, loss=nn.functional.mse_loss)
    assert done.specs["0"].rank == 4 and done.specs["1"].rank == 1
    assert done.densities["1"] > 0.05 > done.densities["0"]
    assert (model(x) - wanted).norm() < 0.1 * wanted.norm()


def test_a_generous_target_changes_nothing(digits, dense):
    model = copy.deepcopy(dense)
    ff.compress(model, digits[0][:2], target_params=2 * numbers(dense), epochs=0)
    x = digits[1][0][0]
    torch.testing.assert_close(model(x), dense(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options, match",
    [
        ({}, "either target_density or target_params"),
        ({"target_density": 0.1, "target_params": 5}, "either"),
        ({"target_density": 1.5}, "target_density=1.5"),
        ({"target_density": 0.1, "epochs": -1}, "epochs=-1"),
        ({"target_density": 0.1, "lr": 0.0}, "lr=0.0"),
        ({"target_params": 100}, "numbers more"),
        ({"target_density": 0.1, "data": []}, "has no batches"),
    ],
)
def test_bad_arguments_leave_the_model_as_it_was(digits, dense, options, match):
    model = copy.deepcopy(dense)
    data = options.pop("data", digits[0][:1])
    with pytest.raises(ValueError, match=match):
        ff.compress(model, data, **options)
    assert not ff.factorized_layers(model)
    assert all(map(torch.equal, model.state_dict().values(), dense.state_dict().values()))


def test_models_that_are_compressed_already_are_refused(digits, dense):
    model = ff.factorize(copy.deepcopy(dense), ff.Rank1())
    with pytest.raises(ValueError, match="0 is factorized already"):
        ff.compress(model, digits[0], target_density=0.1)
    with pytest.raises(ValueError, match="itself a layer"):
        ff.compress(nn.Linear(2, 2), digits[0], target_density=0.1)


def test_candidates_cost_at_most_half_the_weight():
    for size in ((64, 32, 3, 3), (8, 3, 5, 5), (10, 4), (1, 1)):
        for spec in module._candidates(size)[1:]:
            assert 2 * module._cost(spec, size) <= torch.Size(size).numel()


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(256, 10))


def test_frozen_layers_and_modes_stay(digits):
    model = small()
    model[0].weight.requires_grad_(False)
    model.train()
    model[1].eval()
    ff.compress(model, digits[0][:2], target_density=0.3, epochs=1)
    assert model.training and not model[1].training and model[1].num_batches_tracked == 0
    assert not model[0].mu.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 1.5}, "epochs=1.5"),
        ({"data": "iterator"}, "ends after one pass"),
        ({"skip": "*"}, "no layer that can be factorized"),
    ],
)
def test_what_cannot_be_compressed_is_said_before_anything_is_done(digits, change, message):
    model, options = small(), {"target_density": 0.3, "epochs": 1} | change
    data = digits[0][:2]
    options.pop("data", None)
    with pytest.raises(ValueError, match=message):
        ff.compress(model, iter(data) if "data" in change else data, **options)
    assert not ff.factorized_layers(model)
