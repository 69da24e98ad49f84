"""A model with factorized layers in a file, and back without the code that factorized it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastfact.base import files
from fastfact.nn.convert import Target, factorized_layers, put_in, shell_of, size_of, targets, tied_parameters, why_not
from fastfact.nn.factors import INDEX
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.specs import Spec
from fastfact.ops.common import address

_KEY, _VERSION = "fastfact", 1


def specs_of(model: nn.Module) -> dict[str, dict]:
    """Path → spec (`Spec.to_dict`) of every factorized layer, with the number of nonzeros `nnz` of compact μ."""
    return {
        path: layer.spec.to_dict() | ({"nnz": len(layer.mu)} if layer.is_compact else {})
        for path, layer in factorized_layers(model).items()
    }


def save(model: nn.Module, file: str | os.PathLike) -> None:
    """Write the state of `model` to a safetensors file, with the spec of each factorized layer by path.

    A tensor that stands under several names is written once. The file is complete or not there. Raises ValueError for
    state that is no tensor.
    """
    state = model.state_dict()
    tensors, aliases, first = {}, {}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"save: {name} of the model's state is a {type(value).__name__}, must be a tensor")
        key = (address(value), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensors[name] = value.detach().cpu().contiguous().clone()
    about = {"version": _VERSION, "layers": specs_of(model), "aliases": aliases}
    with files.replacing(Path(file)) as temporary:
        save_file(tensors, temporary, {"format": "pt", _KEY: json.dumps(about)})


def load_into(model: nn.Module, file: str | os.PathLike) -> nn.Module:
    """Read a file of `save` into `model`, in place, and return `model`: its layers become factorized as the file says.

    model: the dense model, as its constructor makes it, or with layers factorized as in the file; its dtypes, devices
    and memory formats stay. If `model` itself is the layer, the new layer is returned.

    Raises ValueError, naming the path, for a file that `save` did not write, layers that are not there or cannot be
    converted, another spec, and tensors of other names or shapes. Nothing is changed then.
    """
    state, layers = _read(Path(file))
    where = f"load_into({str(file)!r})"
    model = _shaped(model, layers, where, state)
    model.load_state_dict(state)
    return model


def shape_as(model: nn.Module, layers: Mapping[str, Mapping]) -> nn.Module:
    """Factorize `model` as `specs_of` said of another, with factors that hold no values yet."""
    return _shaped(model, layers, "shape_as", None)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, dict]]:
    where = f"load_into({str(file)!r})"
    if not file.is_file():
        raise FileNotFoundError(f"{where}: is not there" if not file.exists() else f"{where}: is no file")
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get(_KEY, "null"))
            state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{where}: no safetensors file: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: damaged: {error}") from error
    if about is None:
        raise ValueError(f"{where}: not written by ff.save; it does not say how layers are factorized")
    version = about.get("version") if isinstance(about, dict) else None
    if type(version) is not int or version > _VERSION:
        raise ValueError(f"{where}: written by a newer fastfact (format {version!r})")
    layers, aliases = about.get("layers"), about.get("aliases")
    for name, told in (("layers", layers), ("aliases", aliases)):
        if not isinstance(told, dict):
            raise ValueError(f"{where}: {name} is {told!r}, must be a table")
    for path, told in layers.items():
        nonzeros = told.get("nnz") if isinstance(told, dict) else told
        if not isinstance(told, dict) or not (nonzeros is None or (type(nonzeros) is int and nonzeros >= 0)):
            raise ValueError(f"{where}: of layer {path} it says {told!r}, must be a spec and a number of nonzeros")
    for name, kept in aliases.items():
        if not isinstance(kept, str) or kept not in state:
            raise ValueError(f"{where}: {name} is said to be {kept!r}, which is not there")
    return state | {name: state[kept] for name, kept in aliases.items()}, layers


def _shaped(model: nn.Module, layers: Mapping[str, Mapping], where: str, state: Mapping[str, Tensor] | None):
    """`model` factorized as `layers` says; checked before anything is changed, against `state` too if it is given."""
    own, tied = factorized_layers(model), tied_parameters(model)
    convertible = {target.path: target for target in targets(model)}
    new: dict[Target, FactorizedLayer] = {}
    compact: dict[FactorizedLayer, int | None] = {}
    for path in own:
        if path not in layers:
            raise ValueError(f"{where}: {path} is factorized in the model, and dense in the file; see ff.densify")
    for path, told in layers.items():
        told = dict(told)
        nonzeros, name = told.pop("nnz", None), path or "the model itself"
        try:
            spec = Spec.from_dict(told)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {name}: {error}") from error
        if path in own:
            layer = own[path]
            if layer.spec != spec:
                raise ValueError(f"{where}: {name} has {layer.spec} in the model, {spec} in the file")
        elif path not in convertible:
            raise ValueError(f"{where}: the model has no layer {name} to be factorized")
        elif why := why_not(convertible[path], tied):
            raise ValueError(f"{where}: {name} {why}")
        else:
            try:
                if state is not None:
                    _check_factors(convertible[path], spec, state)
                layer = new[convertible[path]] = shell_of(convertible[path], spec)
            except ValueError as error:
                raise ValueError(f"{where}: {name}: {error}") from error
        if nonzeros is not None and layer.spec.sparse_factor not in layer._names:
            raise ValueError(f"{where}: {name} is said to have {nonzeros} nonzeros, and {spec} has no μ")
        compact[layer] = nonzeros
    if state is not None:
        _check_state(model, new, compact, state, where)
    for layer, nonzeros in compact.items():
        if nonzeros is None:
            if layer.is_compact:
                layer.expand()
        elif not layer.is_compact or len(layer.mu) != nonzeros:
            index = torch.arange(nonzeros, dtype=torch.int32, device=layer.mu.device)
            layer.set_support(layer.mu.new_zeros(nonzeros), index)
    return put_in(model, new)


def _check_factors(target: Target, spec: Spec, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError where `state` has other factors of a layer than the spec says, before any is made."""
    size = size_of(target)
    spec.check(size)
    for factor, shape in spec.for_size(size).shapes(size).items():
        found = state.get(f"{target.path}.{factor}".removeprefix("."))
        if factor != spec.sparse_factor and found is not None and tuple(found.shape) != tuple(shape):
            raise ValueError(f"{factor} has shape {list(found.shape)}, must be {list(shape)} for {spec}")


def _check_state(model, new, compact, state, where: str) -> None:
    """Raise ValueError where the names or shapes of `state` are not those of the model as it will be."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    places: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(path)
    of_same = {(id(target.module), target.name): layer for target, layer in new.items()}
    for target in targets(model, duplicates=True):
        if (layer := of_same.get((id(target.module), target.name))) is None:
            continue
        places.setdefault(id(layer), []).append(target.path)
        expected.pop(target.parameter, None)
        start = target.path + "." if target.path else ""
        expected |= {start + name: tuple(p.shape) for name, p in layer.factors().items()}
    starts = {layer: [path + "." if path else "" for path in places[id(layer)]] for layer in compact}
    for layer, nonzeros in compact.items():
        for start in starts[layer]:
            expected.pop(start + INDEX, None)
            if layer.spec.sparse_factor in layer._names:
                expected[start + "mu"] = layer.size if nonzeros is None else (nonzeros,)
            if nonzeros is not None:
                expected[start + INDEX] = (nonzeros,)
    lacking, more = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if lacking:
        raise ValueError(f"{where}: the file has no {_some(lacking)}")
    if more:
        raise ValueError(f"{where}: the model has no {_some(more)}")
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(f"{where}: {name} has shape {list(state[name].shape)}, must be {list(shape)} in the model")
    for layer in compact:
        for start in starts[layer]:
            for factor in layer.factors():
                if not state[start + factor].is_floating_point():
                    raise ValueError(
                        f"{where}: {start}{factor} is {state[start + factor].dtype}, must be floating point"
                    )
            if (index := state.get(start + INDEX)) is None or not index.numel():
                continue
            last = torch.Size(layer.size).numel() - 1
            if index.dtype != torch.int32 or index[0] < 0 or index[-1] > last or (index.diff() <= 0).any():
                raise ValueError(f"{where}: {start}{INDEX} must be ascending int32 positions, from 0 to {last}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
