"""Files that others made: data sets in the idx format, adapters of PEFT, models of `ff.save`.

Whatever is in them, they are read, or a ValueError of one line names the file; nothing of the model has changed then.
"""

import copy
import gzip
import json
import math
import struct
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn

import fastfact as ff
from fastfact import data as datasets
from fastfact.nn import adapters
from tests.fuzz._common import JSON, mutations, repeated

FOLDER = tempfile.TemporaryDirectory()
ROOT = Path(FOLDER.name)


def one_line(error: Exception) -> None:
    assert str(error) and "\n" not in str(error), repr(error)


def idx(shape, content: bytes) -> bytes:
    return bytes((0, 0, 8, len(shape))) + struct.pack(f">{len(shape)}I", *shape) + content


IDX = {
    f"{part}-{kind}": idx(shape, bytes(range(10)) * (math.prod(shape) // 10))
    for part, n in (("train", 20), ("t10k", 10))
    for kind, shape in (("images-idx3-ubyte", (n, 5, 4)), ("labels-idx1-ubyte", (n,)))
}


def images(data) -> None:
    folder = ROOT / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    changed = data.draw(st.sampled_from(sorted(IDX)))
    for name, content in IDX.items():
        content = data.draw(mutations(content)) if name == changed else content
        if data.draw(st.booleans()):
            name, content = f"{name}.gz", gzip.compress(content, 1)
            if data.draw(st.integers(0, 3)) == 0:
                content = data.draw(mutations(content))
        (folder / name).write_bytes(content)
    try:
        dataset = datasets.datasets._mnist(ROOT)
    except ValueError as error:
        one_line(error)
        assert "mnist" in str(error)
    else:
        assert len(dataset.x) == len(dataset.y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def whole() -> nn.Module:
    """A module of each kind that PEFT's files have adapters for."""
    torch.manual_seed(0)
    others = {"conv": nn.Conv2d(3, 4, (3, 2)), "line": nn.Conv1d(3, 4, 2), "attention": nn.MultiheadAttention(4, 2)}
    return nn.ModuleDict({**dict(network().named_children()), **others})


def adapted() -> nn.Module:
    return ff.factorize(whole(), ff.LowRank(rank=2, scaling=0.5), freeze=True)


def unchanged(read, model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [type(module) for module in model.modules()]
    try:
        read(model)
    except (ValueError, FileNotFoundError) as error:
        one_line(error)
        after = model.state_dict()
        assert after.keys() == before.keys() and [type(module) for module in model.modules()] == names
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def _adapters() -> tuple[dict, dict]:
    adapters.save(adapted(), ROOT / "adapters")
    config = json.loads((ROOT / "adapters" / adapters.CONFIG).read_text())
    # Copies: what is loaded lies in the file, which is written again.
    return config, {name: tensor.clone() for name, tensor in load_file(ROOT / "adapters" / adapters.WEIGHTS).items()}


CONFIG, TENSORS = _adapters()
SHAPES = [(), (0,), (1,), (2, 6), (5, 2), (2, 5), (4, 2), (0, 6), (5, 0), (6, 2), (2, 3, 2), (4, 2, 1), (4, 3, 3, 2)]
SHAPES += [(4, 4, 1, 1), (4, 0, 1, 1), (2, 3, 3, 0), (1, 3, 3, 2), (4, 3, 3, 2, 1), (4, 3, 1, 2)]


def peft(data) -> None:
    config, tensors = copy.deepcopy(CONFIG), dict(TENSORS)
    for _ in range(data.draw(st.integers(0, 2))):
        key = data.draw(st.sampled_from([*sorted(config), "alpha_pattern", "rank_pattern", "use_dora"]))
        config[key] = data.draw(JSON | st.sampled_from(["LORA", 0, -1, {"0": 3}, {"(": 1}, {"0": "x"}, [1], 1e400]))
    for _ in range(data.draw(st.integers(0, 2))):
        name = data.draw(st.sampled_from(sorted(tensors) or [""]))
        how = data.draw(st.sampled_from(["shape", "rename", "remove", "dtype"]))
        if how == "shape":
            tensors[name] = torch.ones(data.draw(st.sampled_from(SHAPES)))
        elif how == "dtype" and name in tensors:
            tensors[name] = tensors[name].to(data.draw(st.sampled_from([torch.int64, torch.bool, torch.float16])))
        elif name in tensors:
            tensor = tensors.pop(name)
            if how == "rename":
                names = ["lora_A.weight", "0.weight", "x", f"{name}.", "2.lora_B.weight"]
                names += [f"attention.base_layer.out_proj.lora_{factor}.weight" for factor in "AB"]
                tensors[data.draw(st.sampled_from(names))] = tensor
    text, held = json.dumps(config).encode(), to_bytes(tensors)
    which = data.draw(st.sampled_from(["none", "none", "config", "weights"]))
    folder = ROOT / "adapters"
    (folder / adapters.CONFIG).write_bytes(data.draw(mutations(text)) if which == "config" else text)
    (folder / adapters.WEIGHTS).write_bytes(data.draw(mutations(held)) if which == "weights" else held)
    unchanged(lambda model: adapters.load(model, folder), whole() if data.draw(st.booleans()) else adapted())


def _model() -> bytes:
    ff.save(compact(), ROOT / "model.safetensors")
    return (ROOT / "model.safetensors").read_bytes()


def compact() -> nn.Module:
    model = ff.factorize(network(), ff.Rank1(), init="svd")
    for layer in ff.factorized_layers(model).values():
        layer.mu.data.mul_(layer.mu.abs() > layer.mu.abs().median())
        layer.compact()
    return model


MODEL = _model()


def model(data) -> None:
    content = MODEL
    if data.draw(st.booleans()):
        content = data.draw(mutations(content))
    else:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        (key,) = [key for key in header["__metadata__"] if key != "format"]
        about = json.loads(header["__metadata__"][key])
        part = data.draw(st.sampled_from([about, about["layers"], *about["layers"].values()]))
        part[data.draw(st.sampled_from([*sorted(part), "nnz", "9", ""]))] = data.draw(JSON | st.integers(-1, 40))
        header["__metadata__"][key] = json.dumps(about)
        head = json.dumps(header).encode()
        content = struct.pack("<Q", len(head)) + head + content[8 + length :]
    (ROOT / "model.safetensors").write_bytes(content)
    start = network() if data.draw(st.booleans()) else compact()
    unchanged(lambda model: ff.load_into(model, ROOT / "model.safetensors"), start)


CASES = {"idx": images, "peft": peft, "model": model}


def run(seconds: float, number: int) -> int:
    """See `_common.repeated`."""
    return repeated(CASES, seconds, number)
