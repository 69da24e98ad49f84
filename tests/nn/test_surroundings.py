"""What people do with a model, with factorized layers in it: what docs/surroundings.md says of PyTorch alone."""

import copy
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import fastfact as ff

ROOT = Path(__file__).parents[2]
SPECS = {
    "dense mu": ff.Rank1(),
    "compact": ff.Rank1(),
    "compact, kernel": ff.Rank1(layout="kernel"),
    "no mu": ff.Rank1(sparse=False),
    "low rank": ff.LowRank(),
    "hadamard": ff.Hadamard(),
}
X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def network(form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    ff.factorize(model, SPECS[form], init="random" if form == "hadamard" else "svd")
    if form.startswith("compact"):
        for layer in ff.factorized_layers(model).values():
            layer.compact(0.3)
    return model


@pytest.fixture(params=SPECS)
def model(request):
    return network(request.param)


def through_file(scripted):
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


def test_a_trace_holds_plain_operations(model):
    made = through_file(torch.jit.trace(model.eval(), X))
    kinds = {node.kind() for node in made.inlined_graph.nodes()}
    assert not [kind for kind in kinds if "fastfact" in kind or "PythonOp" in kind]
    for x in (X, torch.randn(3, 3, 6, 6)):
        torch.testing.assert_close(made(x), model(x), atol=1e-5, rtol=1e-4)


def test_scripting_takes_the_dense_form(model):
    model.eval()
    with pytest.raises(TypeError, match=r"script ff\.densify\(copy\.deepcopy\(model\)\)"):
        torch.jit.script(model)
    assert len(ff.factorized_layers(model)) == 2
    made = through_file(torch.jit.script(ff.densify(copy.deepcopy(model))))
    torch.testing.assert_close(made(X), model(X), atol=1e-5, rtol=1e-4)


def test_export_holds_plain_operations(model):
    program = torch.export.export(model.eval(), (X,))
    assert not [node for node in program.graph.nodes if "fastfact" in str(node.target)]
    torch.testing.assert_close(program.module()(X), model(X), atol=1e-5, rtol=1e-4)


def test_averaged_model(model):
    averaged = AveragedModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    assert averaged(X).isfinite().all()


def test_activation_checkpointing(model):
    model(X).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    checkpoint(model, X, use_reentrant=False).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


SHARDED = """
import copy, sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_surroundings import SPECS, X, network
from torch.distributed.fsdp import fully_shard
import fastfact as ff
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for form in SPECS:
    model = network(form)
    plain = copy.deepcopy(model)
    fully_shard(model)
    options = dict(lr=0.1, momentum=0.9, weight_decay=0.01, l1=0.05)
    for one in (model, plain):
        optimizer = ff.optim.ProxSGD(one.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            one(X).square().mean().backward()
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach(), msg=lambda text: f"{{form}} {{name}}: {{text}}")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(X), plain.eval()(X))
        plain[0].path = plain[3].path = "reconstruct"
        fully_shard(plain[3])
        fully_shard(plain)(X)
    assert len(plain[0]._cache) and not len(plain[3]._cache), "only where the factors are whole is W kept"
dist.destroy_process_group()
"""


def test_proxsgd_under_fsdp2_steps_as_without():
    """One process: each number is stepped by itself, so that how they are shared out changes nothing."""
    code = SHARDED.format(tests=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


REPLICATED = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, {tests!r})
from test_surroundings import SPECS, network
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import fastfact as ff
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{store}", rank=rank, world_size=2)
images = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
for form in SPECS:
    model, plain = network(form), network(form)
    replica = DistributedDataParallel(model)
    for one, x in ((replica, images[2 * rank : 2 * rank + 2]), (plain, images)):
        optimizer = ff.optim.ProxSGD(one.parameters(), lr=0.1, momentum=0.9, l1=0.01)
        for step in range(4):
            if step == 2 and form == "dense mu":
                # What it sends has the shapes that it saw when it was made.
                (model if one is replica else plain)[0].compact(0.3)
                one = DistributedDataParallel(model) if one is replica else one
            optimizer.zero_grad()
            one(x).square().mean().backward()
            optimizer.step()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda text: f"{{form}} {{name}}: {{text}}")
    densities = [layer.density for layer in ff.factorized_layers(model).values()]
    fully_shard(model)
    assert [layer.density for layer in ff.factorized_layers(model).values()] == densities
dist.destroy_process_group()
"""


def test_replicas_of_distributed_data_parallel_step_as_one_on_all_images(tmp_path):
    code = REPLICATED.format(tests=str(Path(__file__).parent), store=tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, rank], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    ends = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends[0][-3000:] + ends[1][-3000:]


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return ff.factorize(layer, ff.Rank1(), init="svd").eval(), torch.randn(3, 5, 16)


@pytest.mark.parametrize("strict", [True, False])
def test_a_transformer_is_exported_for_any_number_of_sequences(strict):
    layer, x = encoder()
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict)
    torch.testing.assert_close(program.module()(x[:2]), layer(x[:2]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("graph", [True, False])
def test_a_transformer_in_evaluation_is_one_graph(graph):
    torch._dynamo.reset()
    layer, x = encoder()
    with torch.set_grad_enabled(graph):
        found = torch.compile(layer, fullgraph=True, backend="eager")(x)
        torch.testing.assert_close(found, layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["compact", "compact, kernel"])
def test_compile_of_compact_layers_in_training_and_evaluation(form):
    torch._dynamo.reset()
    model = network(form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for training in (True, False, True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(X), model(X), atol=1e-5, rtol=1e-4)


def test_deepcopy_and_pickle(model):
    for new in (copy.deepcopy(model), torch.load(_pickled(model), weights_only=False)):
        torch.testing.assert_close(new(X), model(X))


def _pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_every_row_of_the_page_names_a_test():
    page = (ROOT / "docs" / "surroundings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`tests/" in line]
    assert len(rows) > 20
    for row in rows:
        for file, name in re.findall(r"`(tests/\S+\.py)::(\w+)`", row):
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"
