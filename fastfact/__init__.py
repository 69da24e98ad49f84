"""fastfact: fast factorized neural-network weights, and the personalized federated learning built on them."""

from fastfact import data, methods, models, nn, ops, optim, sparsity
from fastfact.backends import backends, use_backend
from fastfact.convert import densify, factorize, factorized_layers
from fastfact.federation import Client, Federation, History, Phase, Strategy
from fastfact.specs import Hadamard, LowRank, Rank1, Spec

__version__ = "0.1.0"

__all__ = [
    "Client",
    "Federation",
    "Hadamard",
    "History",
    "LowRank",
    "Phase",
    "Rank1",
    "Spec",
    "Strategy",
    "backends",
    "data",
    "densify",
    "factorize",
    "factorized_layers",
    "methods",
    "models",
    "nn",
    "ops",
    "optim",
    "sparsity",
    "use_backend",
]
