"""Tools beside PyTorch, with factorized layers: the rows of docs/surroundings.md that need them. `make test-all`."""

import importlib

import pytest
import torch
from torch import nn

import fastfact as ff

pytestmark = pytest.mark.slow
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
SPECS = {"dense mu": ff.Rank1(), "compact": ff.Rank1(), "low rank": ff.LowRank(), "hadamard": ff.Hadamard()}


@pytest.fixture(params=SPECS)
def model(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    ff.factorize(model, SPECS[request.param], init="random" if request.param == "hadamard" else "svd")
    if request.param == "compact":
        for layer in ff.factorized_layers(model).values():
            layer.compact(0.3)
    return model


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("freeze", [True, False])
def test_onnx_of_adapters(tmp_path, freeze, dynamo):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 5))
    ff.factorize(model, ff.LowRank(rank=2), freeze=freeze)
    test_onnx(model, tmp_path, dynamo)


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx(model, tmp_path, dynamo):
    import onnxruntime

    file = str(tmp_path / "model.onnx")
    torch.onnx.export(model.eval(), (X,), file, dynamo=dynamo)
    session = onnxruntime.InferenceSession(file)
    (out,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(X).detach(), atol=1e-5, rtol=1e-4)


def test_aot_inductor(model, tmp_path):
    with torch.no_grad():
        program = torch.export.export(model.eval(), (X,), dynamic_shapes=({0: torch.export.Dim("images", min=2)},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for x in (X, torch.cat([X, X])):
            torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)


def test_torchao_after_densify(model):
    quantization = importlib.import_module("torchao.quantization")
    ff.densify(model.eval())
    wanted = model(X)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert "AffineQuantized" in type(model[3].weight).__name__ or "Int8" in type(model[3].weight).__name__
    assert (model(X) - wanted).norm() < 0.02 * wanted.norm()


def test_accelerate(model):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, ff.optim.ProxSGD(model.parameters(), lr=0.1, l1=0.01))
    before = model[3].bias.detach().clone()
    accelerator.backward(prepared(X).square().mean())
    optimizer.step()
    assert not torch.equal(accelerator.unwrap_model(prepared)[3].bias, before)


def test_accelerate_leaves_nothing_of_what_it_offloads(model, tmp_path):
    from accelerate import disk_offload

    wanted = model.eval()(X).detach()
    offloaded = disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(offloaded(X), wanted)
    assert all(len(layer._cache) == len(layer._nodes) == 0 for layer in ff.factorized_layers(model).values())


def test_lightning_with_swa(model, tmp_path):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return ff.optim.ProxSGD(self.parameters(), lr=0.01, l1=0.01)

    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 3, 6, 6), batch_size=2))
    assert model(X).isfinite().all()
