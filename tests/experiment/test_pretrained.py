"""Pretrained weights: from a file into a model, and into what a method makes of it."""

import pytest
import torch
from safetensors.torch import save_file

import fastfact as ff
from fastfact import models
from fastfact.experiment import build
from fastfact.experiment.config import Config


@pytest.fixture
def file(tmp_path):
    """A small ResNet-9 for digits, its tensors in a file, and the tensors."""
    torch.manual_seed(7)
    model = models.build("resnet9", (1, 8, 8), 10, 0.125)
    tensors = model.state_dict()
    save_file(tensors, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors", tensors


def config(file, method, **options):
    return Config(method=method, clients=2, samples=10, width=0.125, init_from=str(file), scenario="iid", **options)


def test_every_tensor_arrives(file):
    path, tensors = file
    model = models.build("resnet9", (1, 8, 8), 10, 0.125, weights=str(path))
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())


def test_a_classifier_of_other_classes_is_left_alone(file):
    path, tensors = file
    model = models.build("resnet9", (1, 8, 8), 3, 0.125, weights=str(path))
    assert torch.equal(model.conv5.weight, tensors["conv5.weight"]) and model.fc.weight.shape == (3, 32)


def test_what_does_not_fit(file, tmp_path):
    path, tensors = file
    with pytest.raises(ValueError, match=r"weights=.*conv1\.weight is \[8, 1, 3, 3\], must be \[16, 1, 3, 3\] \(and"):
        models.build("resnet9", (1, 8, 8), 10, 0.25, weights=str(path))
    with pytest.raises(ValueError, match=r"conv1\.bias is missing"):
        models.build("cnn2", (1, 8, 8), 10, 0.125, weights=str(path))
    save_file(tensors | {"more": torch.zeros(1)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"more is not in the model$"):
        models.build("resnet9", (1, 8, 8), 10, 0.125, weights=str(tmp_path / "more.safetensors"))
    for name, content in (("absent", None), ("broken", b"no tensors")):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"weights='.*{name}'"):
            models.build("resnet9", (1, 8, 8), 10, 0.125, weights=str(tmp_path / name))


@pytest.mark.parametrize("method", ["feddecomp", "factorized-fl-alpha", "simfed", "fedavg"])
def test_a_method_starts_as_the_pretrained_model(file, method):
    path, tensors = file
    fed = build.federation(config(path, method))
    start = ff.densify(fed.models[1])
    for name, tensor in start.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-4, atol=1e-6)
    if method == "feddecomp":
        assert torch.equal(fed.states.state["conv3.sigma"][0], tensors["conv3.weight"])


def test_random_factors_can_be_asked_for_and_products_of_factors_cannot_start_so(file):
    path, _ = file
    fed = build.federation(config(path, "simfed", settings={"simfed": {"init": "random"}}))
    assert not fed.states.state["conv3.mu"].any()
    with pytest.raises(ValueError, match="factors of pfedpara cannot start as given weights"):
        build.federation(config(path, "pfedpara"))
