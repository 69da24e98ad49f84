"""Factorized layers: their parameterizations, conversion of a model, sparse μ, the choice of the path, the optimizer.

Imports `ops` and what stands below it. Read `specs.py` first, then `layers.py`.
"""

from fastfact.nn.attention import FactorizedMultiheadAttention
from fastfact.nn.layers import FactorizedConv1d, FactorizedConv2d, FactorizedLayer, FactorizedLinear

__all__ = [
    "FactorizedConv1d",
    "FactorizedConv2d",
    "FactorizedLayer",
    "FactorizedLinear",
    "FactorizedMultiheadAttention",
]
