"""Factorized layers: their parameterizations, conversion of a model, sparse μ, the choice of the path, the optimizer.

Imports `ops` and what stands below it. Read `specs.py` first, then `factors.py`, `layer.py` and `layers.py`.
"""

from fastfact.nn.attention import FactorizedMultiheadAttention
from fastfact.nn.factors import Factors
from fastfact.nn.layer import FactorizedLayer
from fastfact.nn.layers import FactorizedConv1d, FactorizedConv2d, FactorizedLinear

__all__ = [
    "FactorizedConv1d",
    "FactorizedConv2d",
    "FactorizedLayer",
    "FactorizedLinear",
    "FactorizedMultiheadAttention",
    "Factors",
]
