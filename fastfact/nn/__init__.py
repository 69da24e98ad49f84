"""Factorized layers: their parameterizations, conversion of a model, sparse μ, the choice of the path, the optimizer.

Imports `ops` and what stands below it. Read `specs.py` first, then `layers.py`.
"""

from fastfact.nn.layers import FactorizedConv2d, FactorizedLayer, FactorizedLinear

__all__ = ["FactorizedConv2d", "FactorizedLayer", "FactorizedLinear"]
