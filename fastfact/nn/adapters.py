"""Adapters in the files of PEFT (`adapter_config.json`, `adapter_model.safetensors`), written and read without it."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastfact import files
from fastfact.nn.convert import factorize, factorized_layers, freeze_, targets
from fastfact.nn.layers import FactorizedLinear
from fastfact.nn.specs import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?:(?P<path>.+)\.)?lora_(?P<factor>[AB])\.weight")
_WRAPPER = re.compile(r"(?<![^.])(base_layer|modules_to_save)\.")
"""What PEFT puts between a module and its parameters."""
_OTHER_FUNCTIONS = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "trainable_token_indices"),
    *("alora_invocation_tokens", "target_parameters", "arrow_config", "kasa_config", "monteclora_config"),
    *("velora_config", "megatron_config"),
)
"""Settings of PEFT's LoraConfig that make something else of the factors than σ + scaling · B A."""
_INITS_OF_SIGMA = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to start, of PEFT, that change the weight besides the factors."""


def save(model: nn.Module, directory: str | os.PathLike) -> None:
    """Write the adapters of `model` as PEFT does: `PeftModel.from_pretrained(base, directory)` has the same function.

    model: linear layers with `ff.LowRank` whose σ takes no gradient, as `ff.factorize(…, freeze=True)` makes them. What
    else trains goes along: whole modules as `modules_to_save`, biases as `bias`. σ is not written.

    Raises ValueError, naming it, for what PEFT's format has no place for: convolutions, the packed projection of
    `nn.MultiheadAttention`, another spec, a σ that trains, modules or biases that train in part. Nothing is written
    then.
    """
    layers, adapted = factorized_layers(model), {}
    if not layers:
        raise ValueError("adapters.save: the model has no factorized layer")
    dense = {target.path for target in targets(model)}
    for path, layer in layers.items():
        name = path or "(the model itself)"
        if not isinstance(layer, FactorizedLinear) or not isinstance(layer.spec, LowRank):
            raise ValueError(f"adapters.save: {name} is {type(layer).__name__}({layer.spec}), must be linear, LowRank")
        if isinstance(model.get_submodule(path.rpartition(".")[0]), nn.MultiheadAttention):
            raise ValueError(
                f"adapters.save: {name} belongs to nn.MultiheadAttention, which PEFT's files have otherwise"
            )
        if layer.sigma.requires_grad:
            raise ValueError(f"adapters.save: σ of {name} trains and is in no adapter; see factorize(freeze=True)")
        adapted[path] = layer.spec.parts(layer.factors(), layer.size)
    whole, bias, others = _besides(model, layers)
    for other, _ in model.named_modules():
        if ending := next((path for path in whole if other.endswith(path) and other not in whole), None):
            raise ValueError(f"adapters.save: {ending} trains, which PEFT would take for {other} too: it compares ends")
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in others.items()}
    for path, (a, b) in adapted.items():
        start = f"{_PREFIX}{path}." if path else _PREFIX
        tensors |= {f"{start}lora_A.weight": a, f"{start}lora_B.weight": b}
    dropouts = {layer.spec.dropout for layer in layers.values()}
    if len(dropouts) > 1:
        raise ValueError(f"adapters.save: the layers have dropout {', '.join(map(str, sorted(dropouts)))}, must be one")
    ranks = {path: len(a) for path, (a, _) in adapted.items()}
    alphas = {path: layers[path].spec.scaling * rank for path, rank in ranks.items()}
    r, rank_pattern = _most(ranks)
    alpha, alpha_pattern = _most(alphas)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": dropouts.pop(),
        "target_modules": _named(adapted, [*layers, *dense]),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "modules_to_save": sorted(whole) or None,
        "bias": bias,
        "fan_in_fan_out": all(layer.origin and _is_transposed(layer.origin[0]) for layer in layers.values()),
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }
    directory = Path(directory)
    files.make_folder(directory)
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with files.replacing(directory / WEIGHTS) as temporary:
        save_file(tensors, temporary, {"format": "pt"})
    files.write_json(directory / CONFIG, config)


def load(model: nn.Module, directory: str | os.PathLike) -> nn.Module:
    """Put the adapters of a folder of PEFT (or of `save`) on `model`, in place, and return `model`.

    model: the dense model they were trained on, or one that has such adapters, whose values are replaced. All but
    adapters, and what the files hold besides, is frozen, as by `ff.factorize(…, freeze=True)`. If `model` itself is the
    layer, the new layer is returned.

    Raises FileNotFoundError where the files are not there, ValueError for other kinds of adapters, layers that are not
    there or are not linear, and tensors of other shapes. Nothing is changed then.
    """
    directory = Path(directory)
    config, tensors = _read(directory)
    where = f"adapters.load({str(directory)!r})"
    specs, factors, others = _parsed(config, tensors, where)
    layers, found = factorized_layers(model), {target.path: target for target in targets(model)}
    for path, spec in specs.items():
        name, (a, b) = path or "(the model itself)", factors[path]
        if path in layers:
            own = layers[path]
            size = own.size
            if not isinstance(own, FactorizedLinear) or not _same(own.spec, spec, size):
                raise ValueError(f"{where}: {name} is {own.spec} in the model, {spec} in the files")
        elif path not in found:
            raise ValueError(f"{where}: the model has no layer {name}")
        else:
            weight = getattr(found[path].module, found[path].name)
            if weight.dim() != 2:
                raise ValueError(f"{where}: {name} is a {type(found[path].module).__name__}, must be linear")
            size = tuple(weight.shape[::-1] if _is_transposed(found[path].module) else weight.shape)
        if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != size or a.shape[0] != b.shape[1]:
            shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
            raise ValueError(f"{where}: {name} has the weight {list(size)}, {shapes} do not fit")
    if extra := sorted(layers.keys() - specs.keys()):
        raise ValueError(f"{where}: {extra[0]} is factorized in the model, and has no adapter in the files")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in others.items():
        if name not in parameters:
            raise ValueError(f"{where}: the model has no parameter {name}")
        if parameters[name].shape != tensor.shape:
            have = list(parameters[name].shape)
            raise ValueError(f"{where}: {name} has shape {list(tensor.shape)}, must be {have} in the model")
    if specs.keys() - layers.keys():
        # The values are those of the files: nothing is drawn from the generator of the process.
        generator = torch.Generator().manual_seed(0)
        model = factorize(model, lambda path, module: specs.get(path), generator=generator)
    freeze_(model, others)
    with torch.no_grad():
        for path, layer in factorized_layers(model).items():
            layer.A.copy_(factors[path][0])
            layer.B.copy_(factors[path][1])
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in others.items():
            parameters[name].copy_(tensor)
    return model


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"adapters.load({str(directory)!r}): {name} is not there")
    try:
        config = json.loads((directory / CONFIG).read_text())
        with safe_open(directory / WEIGHTS, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"adapters.load({str(directory)!r}): damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"adapters.load({str(directory)!r}): {CONFIG} holds no table")
    return config, tensors


def _parsed(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str):
    """(path → spec, path → (a, b), parameter → tensor) of what PEFT's files hold."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type is {config.get('peft_type')!r}, must be LORA")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INITS_OF_SIGMA):
        raise ValueError(f"{where}: init_lora_weights={init!r} changes the weights of the model besides its adapters")
    for name in _OTHER_FUNCTIONS:
        if config.get(name):
            raise ValueError(f"{where}: {name}={config[name]!r} is not supported, must be unset")
    halves: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        if match := _FACTOR.fullmatch(name):
            halves.setdefault(match["path"] or "", {})[match["factor"]] = tensor
        elif "lora_" in name:
            raise ValueError(f"{where}: {key} is no factor of a linear layer")
        elif ".original_module." not in f".{name}":  # what a module that trains as a whole was before
            others[_WRAPPER.sub("", name)] = tensor
    if not halves:
        raise ValueError(f"{where}: {WEIGHTS} has no lora_A and lora_B")
    specs, factors = {}, {}
    for path, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise ValueError(f"{where}: {path} has lora_{''.join(half)} alone, must have lora_A and lora_B")
        for factor, tensor in half.items():
            if tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.numel():
                shape = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(f"{where}: lora_{factor} of {path} is {shape}, must be floating-point numbers [m, n]")
        rank = half["A"].shape[0]
        alpha = _matching(_alphas(config, where), path, config.get("lora_alpha", 8))
        alpha, dropout = _number(where, "lora_alpha", alpha), _number(where, "lora_dropout", config.get("lora_dropout"))
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        try:
            specs[path] = LowRank(rank=rank, scaling=scaling, dropout=dropout)
        except ValueError as error:
            raise ValueError(f"{where}: {path}: {error}") from error
        factors[path] = half["A"], half["B"]
    return specs, factors, others


def _number(where: str, name: str, value: Any) -> float:
    """A number of a configuration; none is 0."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30):
        raise ValueError(f"{where}: {name}={value!r}, must be a finite number")
    return float(value or 0)


def _alphas(config: Mapping[str, Any], where: str) -> Mapping[str, float]:
    """`alpha_pattern`, whose keys are regular expressions."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{where}: alpha_pattern={patterns!r}, must be a table")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where}: alpha_pattern has {pattern!r}, no regular expression: {error}") from error
        # Anybody's file: repeats of repeats take exponential time to match.
        plain = re.sub(r"\\.|\[\^?\]?[^]]*\]", "x", pattern, flags=re.DOTALL)
        if re.search(r"\)[*+?{]", plain) or len(re.findall(r"[*+{]", plain)) > 3:
            raise ValueError(
                f"{where}: alpha_pattern has {pattern!r}, must repeat no group, and at most three characters or classes"
            )
    return patterns


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out]: `Conv1D` of transformers."""
    return type(module).__name__ == "Conv1D"


def _same(own: Any, spec: LowRank, size: tuple[int, ...]) -> bool:
    """Whether factors of two specs mean the same."""
    if not isinstance(own, LowRank) or own.rank_of(size) != spec.rank or own.layout_of(size) != "view":
        return False
    return math.isclose(own.scaling, spec.scaling)


def _matching(patterns: Mapping[str, float], path: str, default: float) -> float:
    """The value of the first pattern that a path, or its end, fits, as PEFT looks them up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def _most(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """The most frequent value, and the others by pattern."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {f"^{re.escape(path)}": value for path, value in values.items() if value != usual}


def _named(paths: Iterable[str], known: Iterable[str]) -> list[str] | str:
    """What tells these modules from the others: their paths, which PEFT compares with ends of paths, or a pattern."""
    paths = sorted(paths)
    if any(other.endswith(f".{path}") and other not in paths for path in paths for other in known):
        return "|".join(map(re.escape, paths))
    return paths


def _besides(model: nn.Module, layers: Mapping[str, Any]) -> tuple[set[str], str, dict[str, Tensor]]:
    """(modules that train as a whole, "none", "lora_only" or "all" biases, what of them is written by name)."""
    whole, biases, some = set(), {}, {}
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if path not in layers or name == "bias"}
        moving = {name for name, p in own.items() if p.requires_grad}
        start = f"{path}." if path else ""
        if moving and moving == own.keys() and path and path not in layers:
            whole.add(path)
            some |= {start + name: p for name, p in own.items()}
            continue
        if moving - {"bias"}:
            raise ValueError(
                f"adapters.save: of {path or 'the model itself'} {', '.join(sorted(moving))} train, all must"
            )
        if "bias" in own:
            biases[path] = own["bias"]
    training = {path for path, bias in biases.items() if bias.requires_grad}
    # Where two of them are the same, the last holds.
    kinds = {frozenset(biases): "all", frozenset(biases.keys() & layers.keys()): "lora_only", frozenset(): "none"}
    if frozenset(training) not in kinds:
        raise ValueError(
            f"adapters.save: the biases of {', '.join(sorted(training))} train, must be all of the model, all of the"
            " layers with adapters, or none"
        )
    for path in training:
        middle = "base_layer." if path in layers else ""
        some[f"{path}.{middle}bias".removeprefix(".")] = biases[path]
    return whole, kinds[frozenset(training)], some
