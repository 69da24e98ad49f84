"""Factorized layers for tests, with numbers in all of their factors."""

import torch


def drawn(layer, density):
    """The layer with its factors drawn. density: of a compact μ; None or 1 for one that stays as it is."""
    with torch.no_grad():
        for factor in layer.factors().values():
            factor.normal_(std=0.5)
    if density is not None and density < 1 and "mu" in layer.factors():
        layer.prune_(density)
        layer.compact()
    return layer
