"""Turn the layers of a model into factorized ones, and back."""

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from fastfact.base.formats import FLOATING
from fastfact.nn.attention import PROJECTIONS, FactorizedMultiheadAttention
from fastfact.nn.layer import FactorizedLayer, hooked
from fastfact.nn.layers import FactorizedConv1d, FactorizedConv2d, FactorizedLinear
from fastfact.nn.operators import Operated
from fastfact.nn.specs import INITS, LowRank, Spec
from fastfact.nn.transformer import FUSED
from fastfact.ops.common import address

log = logging.getLogger("fastfact")

_FACTORIZED = {nn.Conv1d: FactorizedConv1d, nn.Conv2d: FactorizedConv2d, nn.Linear: FactorizedLinear}
_CONVOLUTIONS = nn.modules.conv._ConvNd
_WEIGHTED = (_CONVOLUTIONS, nn.Linear, nn.Bilinear)
_CONV1D = "transformers.pytorch_utils.Conv1D"
"""A linear layer whose weight is [in, out]."""
_FORWARD = ("forward", "_conv_forward", "__call__", "__getattr__")
_NOT_FUSED = {new: plain for plain, new in FUSED.items()}
UNSUPPORTED = ("error", "skip")
when_factorized: list[Callable[[nn.Module], None]] = []
"""Called with every model that was factorized, by whatever has to know of it."""

Specs = Spec | Mapping[str, Spec | None] | Callable[[str, nn.Module], Spec | None]
Patterns = str | Iterable[str]


class Target(NamedTuple):
    """A weight that a factorized layer can stand for: parameter `name` of `module`; `path` is the layer's to be."""

    path: str
    module: nn.Module
    name: str = "weight"

    @property
    def parameter(self) -> str:
        """The name of the weight in the model."""
        owner = self.path if self.name == "weight" else self.path.rpartition(".")[0]
        return f"{owner}.{self.name}" if owner else self.name


def factorize(
    model: nn.Module,
    spec: Specs,
    skip: Patterns = (),
    init: str = "random",
    generator: torch.Generator | None = None,
    *,
    only: Patterns | None = None,
    unsupported: str = "error",
    freeze: bool = False,
    train: Patterns = (),
) -> nn.Module:
    """Replace the convolutions and linear layers of `model` by their factorized forms, in place, and return `model`.

    Converted are `nn.Conv2d`, `nn.Conv1d`, `nn.Linear`, their subclasses without a forward of their own, the input
    projections of `nn.MultiheadAttention` (as submodule `in_proj`), `Conv1D` of transformers, and `Linear` and, where
    it pads as `nn.Conv2d` can, `Conv2dSame` of timm. What is neither (norms, embeddings, recurrent layers) and layers
    already factorized stay as they are. Encoders of `nn.TransformerEncoder` around them have PyTorch's fused evaluation
    in a form that takes factorized layers (`fastfact.nn.transformer`).

    spec: `ff.Rank1`, `ff.LowRank` or `ff.Hadamard` for all; or {pattern: spec}, of which the first that fits a path
    holds; or (path, module) → spec. Where no pattern fits or the spec is None, the layer stays dense. skip: paths to
    leave alone; only: paths to convert and no others. Each with all that is below it; shell wildcards are allowed
    ("head", "blocks.*.attn"). init: "random" (the papers') or "svd" (the same function as the dense layer); see the
    spec. generator: for the random draws. unsupported: what to do about a layer that cannot be converted (transposed
    and 3-d convolutions, lazy layers, subclasses with a forward of their own, a weight that is tied to another
    parameter or is no parameter): "error", or "skip" it.
    freeze: train adapters alone: no parameter requires a gradient but the factors of factorized layers, of which σ of
    `ff.LowRank` and μ of `ff.Rank1` (`Spec.dense`) stay frozen, too. train: what trains as well, patterns of modules or
    of parameters ("head", "*.norm*", "*.bias"); layers whose weight they name stay dense.

    What was converted, what was left out and why, and the numbers and bytes before and after are logged at level INFO;
    `ff.summary(model)` tells the same of any model. A warning names the layers whose factors, μ aside, hold as many
    numbers as the dense weight: 1×1 convolutions by `Rank1(layout="spatial")`, which "auto" gives the layout "kernel".

    If `model` itself is such a layer, the new layer is returned and `model` left as it was.

    Raises ValueError, naming the module's path, for a layer that cannot be converted, a spec that does not fit, or a
    pattern that fits no module. Nothing is converted then.
    """
    if init not in INITS:
        raise ValueError(f"factorize(init={init!r}): must be one of {', '.join(map(repr, INITS))}")
    if unsupported not in UNSUPPORTED:
        raise ValueError(f"factorize(unsupported={unsupported!r}): must be one of {', '.join(map(repr, UNSUPPORTED))}")
    if not isinstance(freeze, bool):
        raise TypeError(f"factorize(freeze={freeze!r}): must be True or False")
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    places = list(targets(model, duplicates=True))
    paths += [target.path for target in places]
    skipped, chosen = _patterns("skip", skip, paths), None if only is None else _patterns("only", only, paths)
    whole = _trained(train, model, freeze)
    spec_of = _spec_of(spec, paths)
    before, tied, left = counted(model), tied_parameters(model), {}
    layers: dict[Target, FactorizedLayer] = {}
    same: dict[tuple[int, str], list[Target]] = {}
    for target in places:
        same.setdefault((id(target.module), target.name), []).append(target)
    for target, *others in same.values():
        path, module = target.path, target.module
        names = [path, *(other.path for other in others)]
        of_weight = [*names, target.parameter, *(other.parameter for other in others)]
        why = None
        if pattern := _fitting(skipped, names):
            why = f"skip={pattern!r}"
        elif pattern := _fitting(whole, of_weight):
            why = f"train={pattern!r}"
        elif chosen is not None and not _fitting(chosen, names):
            why = "not in only="
        elif (own := spec_of(names, module)) is None:
            why = "no spec"
        elif (why := why_not(target, tied)) and unsupported == "error":
            raise ValueError(f"factorize: {path or '(the model itself)'} {why}; see skip= and unsupported=")
        if why:
            left[path] = why
            continue
        try:
            layers[target] = _factorized(target, own, init, generator)
        except ValueError as error:
            if unsupported == "error":
                raise ValueError(f"factorize: {path or '(the model itself)'}: {error}") from error
            left[path] = str(error)
    model = put_in(model, layers)
    if freeze:
        freeze_(model, whole)
    _report(before, counted(model), layers, left)
    return model


def freeze_(model: nn.Module, train: Iterable[str] = ()) -> None:
    """Let only the factors of factorized layers ask for a gradient, but for dense ones, and what `train` names."""
    adapters = {
        id(parameter)
        for layer in factorized_layers(model).values()
        for name, parameter in layer._parameters.items()
        if name in layer._names and name != layer.spec.dense
    }
    patterns, named = tuple(train), model.named_parameters(remove_duplicate=False)
    adapters |= {id(parameter) for name, parameter in named if _fitting(patterns, [name])}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in adapters)


def densify(model: nn.Module) -> nn.Module:
    """Replace every factorized layer of `model` by the dense layer of the same function, in place: the class it was
    made from, or `nn.Conv2d`, `nn.Conv1d`, `nn.Linear`.

    Returns `model` (or the new layer, if `model` itself is a factorized layer).
    """
    new: dict[int, nn.Module] = {}
    inside = set()
    for module in model.modules():
        if isinstance(module, FactorizedMultiheadAttention):
            new[id(module)] = module.to_dense()
            inside |= {id(module._modules.get(name)) for name in PROJECTIONS.values()}
    for module in model.modules():
        if isinstance(module, FactorizedLayer) and id(module) not in inside:
            new[id(module)] = _back(module)
    model = _replace(model, new)
    for module in model.modules():
        if type(module) in _NOT_FUSED:
            if isinstance(module, Operated):
                module._forget()
            module.__class__ = _NOT_FUSED[type(module)]
    return model


def factorized_layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    """The factorized layers of `model` by path, in the order of `named_modules`."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FactorizedLayer)}


def targets(model: nn.Module, duplicates: bool = False) -> Iterable[Target]:
    """The weights of `model` that belong to convolutions, linear layers and attention, convertible or not; with
    `duplicates` those of a module that stands in several places once for each."""
    for path, module in model.named_modules(remove_duplicate=not duplicates):
        if isinstance(module, _WEIGHTED) or _kind(module) == _CONV1D:
            yield Target(path, module)
        elif isinstance(module, nn.MultiheadAttention):
            for name, projection in PROJECTIONS.items():
                if module._parameters.get(name) is not None:
                    yield Target(f"{path}.{projection}" if path else projection, module, name)


def why_not(target: Target, tied: Mapping[int, str]) -> str | None:
    """Why a target cannot be converted; None if it can. tied: what `tied_parameters` says of the model."""
    module, weight = target.module, target.module._parameters.get(target.name)
    kind = type(module).__name__
    if isinstance(module, LazyModuleMixin) or isinstance(weight, nn.UninitializedParameter):
        return f"is a {kind}, which has no shape yet"
    if weight is None:
        return f"is a {kind} whose {target.name} is no parameter (parametrized, pruned or normed)"
    if id(weight) in tied:
        return f"holds a weight tied to others: {tied[id(weight)]}"
    if "forward" in module.__dict__:
        return f"is a {kind} whose forward was replaced"
    if weight.dtype not in FLOATING:
        return f"has a weight of {weight.dtype}, must be {', '.join(map(str, FLOATING))}"
    if target.name != "weight":
        known = (nn.MultiheadAttention.forward, FactorizedMultiheadAttention.forward)
        own = type(module).forward not in known
        return f"belongs to a {kind}, which has a forward of its own" if own else None
    if module.bias is not None and "bias" not in module._parameters:
        return f"is a {kind} whose bias is no parameter (parametrized or pruned)"
    try:
        _plain(module)
    except ValueError as error:
        return f"is a {kind}, which {error}"
    if own := sorted({*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}):
        return f"is a {kind} that has {', '.join(own)} besides, which would be lost"
    return None


def size_of(target: Target) -> tuple[int, ...]:
    """The size that the weight of a factorized layer in place of a target has."""
    shape = tuple(getattr(target.module, target.name).shape)
    if len(shape) == 2:
        return shape[::-1] if _kind(target.module) == _CONV1D else shape
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape


def shell_of(target: Target, spec: Spec) -> FactorizedLayer:
    """The factorized form of a target with factors that hold no values yet."""
    return _factorized(target, spec, None, None)


def _factorized(target: Target, spec: Spec, init: str | None, generator) -> FactorizedLayer:
    module = target.module
    if target.name != "weight":
        weight = module._parameters[target.name]
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        plain.weight = weight
        return FactorizedLinear.from_dense(plain.train(module.training), spec, init, generator)
    plain = _plain(module)
    base = next(base for base in _FACTORIZED if isinstance(plain, base))
    new = _FACTORIZED[base].from_dense(plain, spec, init, generator)
    if type(module) is not base:
        new.origin = (_bare(module),)
    return new


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _plain(module: nn.Module) -> nn.Module:
    """The `nn.Conv2d`, `nn.Conv1d` or `nn.Linear` that computes what `module` does, with its parameters.

    Raises ValueError, with the reason, where there is none.
    """
    kind = type(module)
    base = next((base for base in _FACTORIZED if issubclass(kind, base)), None)
    if base is not None and all(getattr(kind, name, None) is getattr(base, name, None) for name in _FORWARD):
        return module
    name = _kind(module)
    if name == "timm.layers.linear.Linear":
        return module
    if name == "timm.layers.conv2d_same.Conv2dSame":
        return _same_padding(module)
    if name == _CONV1D:
        return _with_weight(module, nn.Linear(module.nx, module.nf, device="meta"), module.weight.T)
    raise ValueError("is not supported" if base is None else "has a forward of its own")


def _same_padding(module: nn.Conv2d) -> nn.Conv2d:
    """The convolution of a `Conv2dSame`, which pads an image so that its side is divided by the stride, rounded up."""
    if set(module.stride) != {1}:
        raise ValueError("pads by the size of its input")
    reach = [gap * (k - 1) for gap, k in zip(module.dilation, module.kernel_size, strict=True)]
    padding = "same" if any(r % 2 for r in reach) else tuple(r // 2 for r in reach)
    shape = (module.in_channels, module.out_channels, module.kernel_size, 1, padding, module.dilation, module.groups)
    plain = nn.Conv2d(*shape, module.bias is not None, device="meta")
    return _with_weight(module, plain, module.weight)


def _with_weight(module: nn.Module, plain: nn.Module, weight: torch.Tensor) -> nn.Module:
    """`plain` with `weight`, and the bias and mode of `module`."""
    plain.weight = nn.Parameter(weight.detach(), requires_grad=module.weight.requires_grad)
    plain.bias = module.bias
    return plain.train(module.training)


def _bare(module: nn.Module) -> nn.Module:
    """`module` without its parameters and hooks."""
    bare = type(module).__new__(type(module))
    bare.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()}
    bare._parameters = dict.fromkeys(module._parameters)
    return hooked(bare, nn.Module())


def _back(layer: FactorizedLayer) -> nn.Module:
    """The dense layer of the same function, of the class that `layer` was made from."""
    dense = layer.to_dense()
    if not layer.origin:
        return dense
    back = _bare(layer.origin[0])
    weight = dense.weight
    if _kind(back) == _CONV1D:
        weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=weight.requires_grad)
    back.weight, back.bias = weight, dense.bias
    return back


_MULTIPLIED = {
    f"torchvision.models.swin_transformer.ShiftedWindowAttention{version}": ("qkv", "proj") for version in ("", "V2")
}
"""Modules that take the weights of these layers for `F.linear` alone, and do not call the layers."""


def put_in(model: nn.Module, layers: Mapping[Target, FactorizedLayer]) -> nn.Module:
    """`model` with every target's layer in its place."""
    new: dict[int, nn.Module] = {}
    attention: dict[int, tuple[nn.MultiheadAttention, dict[str, FactorizedLinear]]] = {}
    for target, layer in layers.items():
        if target.name == "weight":
            new[id(target.module)] = layer
        else:
            attention.setdefault(id(target.module), (target.module, {}))[1][target.name] = layer
    for module in model.modules():
        # PyTorch's attention takes the weight of its output projection, and does not call it.
        layer = new.get(id(getattr(module, "out_proj", None)))
        if type(module) is nn.MultiheadAttention and isinstance(getattr(layer, "spec", None), LowRank):
            attention.setdefault(id(module), (module, {}))
    for key, (module, own) in attention.items():
        new[key] = FactorizedMultiheadAttention.from_dense(module, own)
    model = _replace(model, new)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder | nn.TransformerEncoderLayer) and factorized_layers(module):
            for part in module.modules():
                if type(part) in FUSED:
                    part.__class__ = FUSED[type(part)]
            if isinstance(module, nn.TransformerEncoder) and type(module) not in _NOT_FUSED:
                # It asks its first layer whether all take nested tensors.
                module.use_nested_tensor = False
        for name in _MULTIPLIED.get(_kind(module), ()):
            if isinstance(layer := module._modules.get(name), FactorizedLinear):
                layer.is_only_multiplied = True
    for tell in when_factorized:
        tell(model)
    return model


def _replace(model: nn.Module, new: Mapping[int, nn.Module]) -> nn.Module:
    """`model` with the modules of these ids replaced, everywhere, by ones that take over their hooks."""

    def in_place_of(module: nn.Module) -> nn.Module:
        return hooked(new[id(module)], module, shared=True)

    root = in_place_of(model) if id(model) in new else model
    todo, seen = [root], set()
    while todo:
        parent = todo.pop()
        if id(parent) in seen:
            continue
        seen.add(id(parent))
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, in_place_of(child))
            if child is not None:
                todo.append(parent._modules[name])
    return root


def _trained(train: Patterns, model: nn.Module, freeze: bool) -> tuple[str, ...]:
    """The patterns of `train`, each of which names a parameter."""
    patterns = (train,) if isinstance(train, str) else tuple(train)
    if patterns and not freeze:
        raise ValueError(f"factorize(train={train!r}): says what trains besides adapters, it needs freeze=True")
    for pattern in patterns:
        if not any(_below(name, pattern) for name, _ in model.named_parameters(remove_duplicate=False)):
            raise ValueError(f"factorize(train={pattern!r}): no parameter of the model has that name, nor a module")
    return patterns


def _patterns(argument: str, patterns: Patterns, paths: list[str]) -> tuple[str, ...]:
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths if path):
            raise ValueError(f"factorize({argument}={pattern!r}): no module of the model has that path")
    return patterns


def _spec_of(spec: Specs, paths: list[str]) -> Callable[[list[str], nn.Module], Spec | None]:
    """(all paths of a module, the module) → the spec, checked."""
    allowed = "must be ff.Rank1, ff.LowRank or ff.Hadamard"
    if isinstance(spec, Mapping):
        _patterns("spec", spec, paths)
        for pattern, own in spec.items():
            if own is not None and not isinstance(own, Spec):
                raise TypeError(f"factorize(spec={{{pattern!r}: {own!r}}}): {allowed}, or None")
    elif not isinstance(spec, Spec) and not callable(spec):
        raise TypeError(f"factorize(spec={spec!r}): {allowed}, {{pattern: spec}} or a function")

    def choose(names: list[str], module: nn.Module) -> Spec | None:
        if isinstance(spec, Spec):
            return spec
        if isinstance(spec, Mapping):
            return next((own for pattern, own in spec.items() if _fitting([pattern], names)), None)
        own = spec(names[0], module)
        if own is not None and not isinstance(own, Spec):
            raise TypeError(f"factorize: spec({names[0]!r}, …) gave {own!r}, {allowed}, or None")
        return own

    return choose


def _report(before, after, layers: Mapping[Target, FactorizedLayer], left: Mapping[str, str]) -> None:
    """Log what was done, and warn of layers that grew by more than a dense factor."""
    swollen = {}
    for target, layer in layers.items():
        whole = torch.Size(layer.size).numel()
        if layer.spec.sparse_factor in layer._names:
            others = sum(p.numel() for name, p in layer.factors().items() if name != layer.spec.sparse_factor)
            if others >= whole:
                swollen[target.path] = f"{whole:,} → {others + layer.mu.numel():,}"
    if swollen:
        shown = ", ".join(f"{path or 'the model itself'} ({numbers})" for path, numbers in list(swollen.items())[:3])
        warnings.warn(
            f"factorize: in {len(swollen)} of {len(layers)} layers u and v alone hold as many numbers as the dense "
            f"weight: {shown}{', …' if len(swollen) > 3 else ''}. The model has {before[0]:,} → "
            f'{after[0]:,} parameters. Leave them out by skip=, or give them Rank1(layout="kernel")',
            stacklevel=3,
        )
    if log.isEnabledFor(logging.INFO):
        lines = [f"factorize: {len(layers)} layers converted, {len(left)} left out"]
        lines += [f"  left out: {path or '(the model itself)'}: {why}" for path, why in left.items()]
        for what, old, new in zip(("parameters", "bytes"), before, after, strict=True):
            lines.append(f"  {what}: {old:,} → {new:,}")
        log.info("\n".join(lines))


def counted(model: nn.Module) -> tuple[int, int]:
    """Numbers in the parameters of `model`, and their bytes with those of the positions of compact μ."""
    stored = {id(p): p for p in model.parameters() if not isinstance(p, nn.UninitializedParameter)}
    numbers = sum(parameter.numel() for parameter in stored.values())
    for layer in factorized_layers(model).values():
        if layer.is_compact:
            stored[id(layer.mu_index)] = layer.mu_index
    return numbers, sum(tensor.numel() * tensor.element_size() for tensor in stored.values())


def _below(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _fitting(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """The first pattern that fits one of the names of a thing."""
    return next((pattern for pattern in patterns if any(_below(name, pattern) for name in names)), None)


def tied_parameters(model: nn.Module) -> dict[int, str]:
    """id → the paths of parameters that more than one module holds, or whose memory others have, too."""
    paths: dict[int, set[str]] = {}
    seen: dict[int, set[int]] = {}
    parts: set[tuple[str, int, int, int]] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if _fills_memory(parameter):
                begin = address(parameter)
                parts.add((str(parameter.device), begin, begin + parameter.nbytes, id(parameter)))
            paths.setdefault(id(parameter), set()).add(f"{path}.{name}" if path else name)
            seen.setdefault(id(parameter), set()).add(id(module))
    tied = {key: ", ".join(sorted(paths[key])) for key, modules in seen.items() if len(modules) > 1}
    farthest = ("", 0, 0, 0)
    for part in sorted(parts):
        if part[0] == farthest[0] and part[1] < farthest[2]:
            both = (farthest[3], part[3])
            tied |= dict.fromkeys(both, ", ".join(sorted(set().union(*(paths[key] for key in both)))))
        farthest = max(farthest, part, key=lambda one: (one[0], one[2]))
    return tied


def _fills_memory(parameter: nn.Parameter) -> bool:
    """Whether the numbers of a parameter fill one stretch of memory, in whatever order."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.numel():
        return False
    last = sum((n - 1) * step for n, step in zip(parameter.shape, parameter.stride(), strict=True))
    return last + 1 == parameter.numel()
