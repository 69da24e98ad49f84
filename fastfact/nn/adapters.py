"""Adapters in the files of PEFT (`adapter_config.json`, `adapter_model.safetensors`), written and read without it."""

import glob
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fastfact.base import files
from fastfact.nn.attention import FactorizedMultiheadAttention
from fastfact.nn.convert import factorize, factorized_layers, freeze_, size_of, targets
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.layers import FactorizedConv1d, FactorizedLinear
from fastfact.nn.specs import LowRank, Spec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?:(?P<path>.+)\.)?lora_(?P<factor>[AB])\.weight", re.DOTALL)
_OUTPUT = ".base_layer.out_proj"
"""Ends the path of the adapter of the output of an `nn.MultiheadAttention`, whose own is that of the input."""
_OUTPUT_COUNTS = 2
"""PEFT adds the adapter of that output twice, in a forward pass too (0.21, `lora.MultiheadAttention.merge`)."""
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

    model: layers with `ff.LowRank` whose σ takes no gradient, as `ff.factorize(…, freeze=True)` makes them. What else
    trains goes along: whole modules as `modules_to_save`, biases as `bias`. σ is not written.

    Convolutions: PEFT's have the whole kernel in A [r, i, kh, kw] and B [o, r, 1, 1]. The function is the same with
    r · kw channels for layout "separable", r · kh for "view": the same numbers and zeros, from which `load` makes
    "separable" of rank r again. `nn.MultiheadAttention`: with both `in_proj` and `out_proj` factorized, in one rank.
    PEFT counts the adapter of `out_proj` twice (seen in 0.21), so half of its B is written; it has no dropout there.

    Raises ValueError, naming it, for what PEFT's format has no place for: another spec, convolutions in groups, dilated
    or with a padding that is not of zeros, attention of which not both are factorized, a σ that trains, modules or
    biases that train in part. Nothing is written then.
    """
    layers = factorized_layers(model)
    if not layers:
        raise ValueError("adapters.save: the model has no factorized layer")
    adapted = _theirs(model, layers)
    dense = {_module_of(model, target.path) for target in targets(model)}
    whole, bias, others = _besides(model, layers)
    for other, _ in model.named_modules():
        if ending := next((path for path in whole if other.endswith(path) and other not in whole), None):
            raise ValueError(f"adapters.save: {ending} trains, which PEFT would take for {other} too: it compares ends")
    tensors = {f"{_PREFIX}{name}": tensor for name, tensor in others.items()}
    for path, (a, b, _) in adapted.items():
        start = f"{_PREFIX}{path}." if path else _PREFIX
        tensors |= {f"{start}lora_A.weight": a, f"{start}lora_B.weight": b}
    dropouts = {layer.spec.dropout for layer in layers.values()}
    if len(dropouts) > 1:
        raise ValueError(f"adapters.save: the layers have dropout {', '.join(map(str, sorted(dropouts)))}, must be one")
    named = {path: adapter for path, adapter in adapted.items() if not path.endswith(_OUTPUT)}
    ranks = {path: len(a) for path, (a, _, _) in named.items()}
    alphas = {path: scaling * len(a) for path, (a, _, scaling) in named.items()}
    r, rank_pattern = _most(ranks)
    alpha, alpha_pattern = _most(alphas)
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": dropouts.pop(),
        "target_modules": _named(named, [*named, *dense]),
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
    layer, the new layer is returned. Convolutions get layout "separable" in rank r · kw, or r where `save` wrote them;
    `nn.MultiheadAttention` gets `in_proj` and `out_proj`, the B of the latter doubled as PEFT counts it.

    Raises FileNotFoundError where the files are not there, ValueError for other kinds of adapters, layers that are not
    there or cannot have them, and tensors of other shapes. Nothing is changed then.
    """
    directory = Path(directory)
    config, tensors = _read(directory)
    where = f"adapters.load({str(directory)!r})"
    adapters, others = _parsed(config, tensors, where)
    layers, found = factorized_layers(model), {target.path: target for target in targets(model)}
    specs, factors = {}, {}
    for path, adapter in adapters.items():
        name = path or "(the model itself)"
        own, module = layers.get(path), found[path].module if path in found else None
        if own is not None:
            size = own.size
        elif module is None:
            raise ValueError(f"{where}: the model has no layer {name}")
        else:
            size = size_of(found[path])
        if len(size) not in (2, 4) or (len(size) == 4 and (why_not := _no_place(own if own is not None else module))):
            kind = type(own if own is not None else module).__name__
            raise ValueError(f"{where}: {name} is a {kind}, {why_not if len(size) == 4 else 'must have 1 or 2 axes'}")
        factors[path] = adapter.factors(name, size, own.spec if own is not None else None, where)
        try:
            specs[path] = LowRank(rank=len(factors[path][0]), scaling=adapter.scaling, dropout=adapter.dropout)
        except ValueError as error:
            raise ValueError(f"{where}: {path}: {error}") from error
        if own is not None and not _same(own.spec, specs[path], size):
            raise ValueError(f"{where}: {name} is {own.spec} in the model, {specs[path]} in the files")
    if extra := sorted(layers.keys() - specs.keys()):
        raise ValueError(f"{where}: {extra[0]} is factorized in the model, and has no adapter in the files")
    there = _state_of(model)
    for name, tensor in others.items():
        if name not in there:
            raise ValueError(f"{where}: the model has no parameter or buffer {name}")
        if there[name].shape != tensor.shape:
            have = list(there[name].shape)
            raise ValueError(f"{where}: {name} has shape {list(tensor.shape)}, must be {have} in the model")
    if specs.keys() - layers.keys():
        # The values are those of the files: nothing is drawn from the generator of the process.
        generator = torch.Generator().manual_seed(0)
        model = factorize(model, lambda path, module: specs.get(path), generator=generator)
    freeze_(model, map(glob.escape, others))
    with torch.no_grad():
        for path, layer in factorized_layers(model).items():
            layer.A.copy_(factors[path][0])
            layer.B.copy_(factors[path][1])
        there = _state_of(model)
        for name, tensor in others.items():
            there[name].copy_(tensor)
    return model


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


class _Adapter(NamedTuple):
    """An adapter as PEFT has it: W = σ + scaling · b a, a [r, i, …kernel], b [o, r, …ones]."""

    a: Tensor
    b: Tensor
    scaling: float
    dropout: float

    def factors(self, name: str, size: tuple[int, ...], own: Spec | None, where: str) -> tuple[Tensor, Tensor]:
        """(A, B) of a layer here, for a weight of `size`; own: the spec that it has.

        Raises ValueError for factors of another shape."""
        a, b = (t.unsqueeze(2) if t.dim() == 3 else t for t in (self.a, self.b))
        if tuple(a.shape[1:]) != size[1:] or b.shape[0] != size[0] or b.shape[1] != a.shape[0]:
            shapes = f"lora_A {list(self.a.shape)} and lora_B {list(self.b.shape)}"
            raise ValueError(f"{where}: {name} has the weight {list(size)}, {shapes} do not fit")
        if len(size) == 2:
            return a, b
        if isinstance(own, LowRank) and own.layout == "view" and size[2:] == (1, 1):
            return a.flatten(1), b.flatten(1)
        return _separable(a, b.flatten(1))


def _separable(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(A [R, o·kw], B [i·kh, R]) of layout "separable" with B A = b a, from a [r, i, kh, kw] and b [o, r].

    W[o, i, ky, kx] = Σ_r b[o, r] a[r, i, ky, kx] is a sum over r and columns of the kernel of products of (i, ky) with
    (o, kx), so R = r · kw; where a is what `_whole` makes, R = r / kw, as it was."""
    r, o, kw = len(a), len(b), a.shape[3]
    if kw > 1 and r % kw == 0:
        columns = a.unflatten(0, (-1, kw))
        down = columns[:, 0, :, :, 0]
        if torch.equal(columns, _on_diagonal(down, kw)):
            return b.unflatten(1, (-1, kw)).movedim(1, 0).flatten(1), down.permute(1, 2, 0).flatten(0, 1)
    down = a.permute(1, 2, 0, 3).flatten(2).flatten(0, 1)
    across = b.mT[:, None, :, None] * torch.eye(kw, dtype=b.dtype)[:, None]
    return across.reshape(r * kw, o * kw), down


def _on_diagonal(down: Tensor, kw: int) -> Tensor:
    """[r, kw, i, kh, kw]: down [r, i, kh] where both columns of the kernel are the same one, else zero."""
    return down[:, None, :, :, None] * torch.eye(kw, dtype=down.dtype, device=down.device)[:, None, None]


def _whole(layer: FactorizedLayer) -> tuple[Tensor, Tensor]:
    """(a [R, i, …kernel], b [o, R, …ones]) as PEFT has them, with b a = the layer's B A, of a convolution."""
    (o, i, kh, kw), factors = layer.size, layer.factors()
    a, b = factors["A"].detach(), factors["B"].detach()
    if layer.spec.layout == "separable":
        whole = _on_diagonal(b.unflatten(0, (i, kh)).movedim(2, 0), kw).flatten(0, 1)
        thin = a.unflatten(1, (o, kw)).movedim(1, 0).flatten(1)
    else:
        # Row (o, y) of B A is the y-th of kh pieces of the flat W[o].
        whole = (torch.eye(kh, dtype=a.dtype, device=a.device)[:, None, :, None] * a[:, None]).flatten(0, 1)
        whole, thin = whole.reshape(-1, i, kh, kw), b.unflatten(0, (o, kh)).flatten(1)
    thin = thin[:, :, None, None]
    return (whole.squeeze(2), thin.squeeze(2)) if isinstance(layer, FactorizedConv1d) else (whole, thin)


def _no_place(layer: nn.Module) -> str | None:
    """Why the adapter of a convolution, ours or dense, is none of PEFT's."""
    if layer.groups > 1:
        return f"in {layer.groups} groups, of which PEFT's adapter takes the input of all"
    if any(gap > 1 for gap in layer.dilation):
        return f"of dilation {layer.dilation}, which PEFT's adapter has not"
    if layer.padding_mode != "zeros":
        return f"with padding_mode={layer.padding_mode!r}, in whose place PEFT's adapter has zeros"
    return None


def _theirs(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Path of PEFT's → (lora_A, lora_B, scaling) of the adapters of `model`. Raises ValueError as `save` does."""
    adapted: dict[str, tuple[Tensor, Tensor, float]] = {}
    attention: dict[str, dict[str, FactorizedLayer]] = {}
    for path, layer in layers.items():
        name = path or "(the model itself)"
        if not isinstance(layer.spec, LowRank):
            raise ValueError(f"adapters.save: {name} is {type(layer).__name__}({layer.spec}), must be LowRank")
        if layer.sigma.requires_grad:
            raise ValueError(f"adapters.save: σ of {name} trains and is in no adapter; see factorize(freeze=True)")
        owner, _, last = path.rpartition(".")
        if isinstance(model.get_submodule(owner), nn.MultiheadAttention):
            attention.setdefault(owner, {})[last] = layer
        elif isinstance(layer, FactorizedLinear):
            adapted[path] = *layer.spec.parts(layer.factors(), layer.size), layer.spec.scaling
        elif why_not := _no_place(layer):
            raise ValueError(f"adapters.save: {name} is a convolution {why_not}")
        else:
            adapted[path] = *_whole(layer), layer.spec.scaling
    for owner, parts in attention.items():
        if parts.keys() != {"in_proj", "out_proj"}:
            raise ValueError(
                f"adapters.save: of {owner or '(the model itself)'}, nn.MultiheadAttention, {', '.join(sorted(parts))}"
                " is factorized, must be in_proj and out_proj: PEFT has them together, and no others"
            )
        first, last = parts["in_proj"], parts["out_proj"]
        (a, b), (a_out, b_out) = (layer.spec.parts(layer.factors(), layer.size) for layer in (first, last))
        if not owner or len(a) != len(a_out):
            raise ValueError(
                f"adapters.save: {owner or '(the model itself)'} is an nn.MultiheadAttention with adapters of rank"
                f" {len(a)} and {len(a_out)}, must be of one rank, and within a model"
            )
        scaling = first.spec.scaling or last.spec.scaling
        share = last.spec.scaling / scaling if scaling else 1.0
        adapted[owner] = a, b if first.spec.scaling else torch.zeros_like(b), scaling
        adapted[owner + _OUTPUT] = a_out, b_out * (share / _OUTPUT_COUNTS), scaling
    return adapted


def _module_of(model: nn.Module, path: str) -> str:
    """The module to which PEFT gives the adapter of a layer: attention gets those of its projections."""
    owner = path.rpartition(".")[0]
    return owner if isinstance(model.get_submodule(owner), nn.MultiheadAttention) else path


def _read(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"adapters.load({str(directory)!r}): {name} is not there")
    try:
        config = json.loads((directory / CONFIG).read_text())
        with safe_open(directory / WEIGHTS, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
    except (ValueError, RecursionError, SafetensorError) as error:
        raise ValueError(f"adapters.load({str(directory)!r}): damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"adapters.load({str(directory)!r}): {CONFIG} holds no table")
    return config, tensors


def _parsed(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str):
    """(path of a layer here → adapter, parameter → tensor) of what PEFT's files hold."""
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
            raise ValueError(f"{where}: {key} is no factor of a linear layer or convolution")
        elif ".original_module." not in f".{name}":  # what a module that trains as a whole was before
            others[_WRAPPER.sub("", name)] = tensor
    if not halves:
        raise ValueError(f"{where}: {WEIGHTS} has no lora_A and lora_B")
    attention = {path.removesuffix(_OUTPUT) for path in halves if path.endswith(_OUTPUT)}
    adapters = {}
    for path, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise ValueError(f"{where}: {path} has lora_{''.join(half)} alone, must have lora_A and lora_B")
        dims = half["A"].dim()
        for factor, tensor in half.items():
            plain = tensor.is_floating_point() and tensor.numel() and 2 <= tensor.dim() <= 4
            if not plain or tensor.dim() != dims or (factor == "B" and tensor[0, 0].numel() > 1):
                shape = f"{tensor.dtype} {list(tensor.shape)}"
                raise ValueError(
                    f"{where}: lora_{factor} of {path} is {shape}, must be floating-point numbers, A [r, i] and"
                    " B [o, r], of a convolution with its kernel behind A and ones behind B"
                )
        named, rank = path.removesuffix(_OUTPUT), half["A"].shape[0]
        alpha = _matching(_alphas(config, where), named, config.get("lora_alpha", 8))
        alpha, dropout = _number(where, "lora_alpha", alpha), _number(where, "lora_dropout", config.get("lora_dropout"))
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        own, b = path, half["B"]
        if named != path:
            own, b = f"{named}.out_proj", _OUTPUT_COUNTS * b
        elif path in attention:
            own = f"{path}.in_proj"
        adapters[own] = _Adapter(half["A"], b, scaling, dropout)
    return adapters, others


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
            re.compile(_ending(pattern))
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
    if not isinstance(own, LowRank) or own.rank_of(size) != spec.rank:
        return False
    # Of a 1×1 kernel both layouts have been read as they are.
    if own.layout_of(size) != spec.layout_of(size) and size[2:] != (1, 1):
        return False
    return math.isclose(own.scaling, spec.scaling)


def _matching(patterns: Mapping[str, float], path: str, default: float) -> float:
    """The value of the first pattern that a path, or its end, fits, as PEFT looks them up."""
    return next((value for key, value in patterns.items() if re.match(_ending(key), path)), default)


def _ending(pattern: str) -> str:
    """The pattern of paths whose end fits one."""
    return rf"(.*\.)?({pattern})$"


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
        adapted = path in layers or isinstance(module, FactorizedMultiheadAttention)
        if moving and moving == own.keys() and path and not adapted:
            if "original_module" in path.split("."):
                raise ValueError(f"adapters.save: {path} trains, and PEFT takes that name for what a module was before")
            whole.add(path)
            some |= {start + name: p for name, p in own.items()}
            kept = {name: b for name, b in module._buffers.items() if name not in module._non_persistent_buffers_set}
            some |= {start + name: b for name, b in kept.items() if b is not None}
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
        middle, owner = "base_layer." if path in layers else "", path.rpartition(".")[0]
        theirs = owner + _OUTPUT if f"{owner}.in_proj" in layers and path == f"{owner}.out_proj" else path
        some[f"{theirs}.{middle}bias".removeprefix(".")] = biases[path]
    return whole, kinds[frozenset(training)], some
