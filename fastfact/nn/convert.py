"""Turn the layers of a model into factorized ones, and back."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastfact.nn.layers import FactorizedConv2d, FactorizedLayer, FactorizedLinear
from fastfact.nn.specs import INITS, Spec

_SUPPORTED = {
    nn.Conv2d: FactorizedConv2d,
    nn.Linear: FactorizedLinear,
    NonDynamicallyQuantizableLinear: FactorizedLinear,
}
_WEIGHTED = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear)


def factorize(
    model: nn.Module,
    spec: Spec,
    skip: Iterable[str] = (),
    init: str = "random",
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Replace every `nn.Conv2d` and `nn.Linear` of `model` by its factorized form, in place, and return `model`.

    spec: `ff.Rank1`, `ff.LowRank` or `ff.Hadamard`. skip: paths to leave alone, with all that is below them; shell
    wildcards are allowed ("head", "blocks.*.attn"). init: "random" (the papers') or "svd" (the same function as the
    dense layer); see the spec. generator: for the random draws. Layers already factorized stay as they are, as do
    modules that are neither convolution nor linear (norms, embeddings, recurrent layers).

    If `model` itself is such a layer, the new layer is returned and `model` left as it was.

    Raises ValueError, naming the module's path, for a layer that cannot be converted (transposed, 1-d or 3-d
    convolutions, lazy layers, subclasses with a forward of their own, a weight tied to another parameter, a spec that
    does not fit). Nothing is converted then.
    """
    if not isinstance(spec, Spec):
        raise TypeError(f"factorize(spec={spec!r}): must be ff.Rank1, ff.LowRank or ff.Hadamard")
    if init not in INITS:
        raise ValueError(f"factorize(init={init!r}): must be one of {', '.join(map(repr, INITS))}")
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules if path):
            raise ValueError(f"factorize(skip={pattern!r}): no module of the model has that path")
    tied = _tied_parameters(model)

    def replacement(path: str, module: nn.Module) -> nn.Module | None:
        if any(_below(path, pattern) for pattern in patterns) or not isinstance(module, _WEIGHTED):
            return None
        name = path or "(the model itself)"
        layer = _SUPPORTED.get(type(module))
        if layer is None:
            raise ValueError(f"factorize: {name} is a {type(module).__name__}, which is not supported; see skip=")
        if id(module.weight) in tied:
            raise ValueError(f"factorize: {name}.weight is tied to {tied[id(module.weight)]}; see skip=")
        try:
            return layer.from_dense(module, spec, init, generator)
        except ValueError as error:
            raise ValueError(f"factorize: {name}: {error}") from error

    return _replace(model, replacement)


def densify(model: nn.Module) -> nn.Module:
    """Replace every factorized layer of `model` by the `nn.Conv2d` or `nn.Linear` of the same function, in place.

    Returns `model` (or the new layer, if `model` itself is a factorized layer).
    """
    return _replace(model, lambda path, module: module.to_dense() if isinstance(module, FactorizedLayer) else None)


def factorized_layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    """The factorized layers of `model` by path, in the order of `named_modules`."""
    return {path: module for path, module in model.named_modules() if isinstance(module, FactorizedLayer)}


def _replace(model: nn.Module, replacement: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """Make every replacement first, then put them in: an error on the way leaves the model untouched."""
    new = {}
    for path, module in model.named_modules():
        made = replacement(path, module)
        if made is not None:
            new[id(module)] = made
    if id(model) in new:
        return new[id(model)]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return model


def _below(path: str, pattern: str) -> bool:
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _tied_parameters(model: nn.Module) -> dict[int, str]:
    """id → the paths of parameters that more than one module holds."""
    paths: dict[int, set[str]] = {}
    seen: dict[int, set[int]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            paths.setdefault(id(parameter), set()).add(f"{path}.{name}" if path else name)
            seen.setdefault(id(parameter), set()).add(id(module))
    return {key: ", ".join(sorted(paths[key])) for key, modules in seen.items() if len(modules) > 1}
