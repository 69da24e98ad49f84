"""What `import fastfact` gives its users."""

from fastfact import data, methods, models, nn, ops
from fastfact.federation import Callback, Client, Federation, History, Phase, Strategy, TensorBoard, register
from fastfact.nn import adapters, optim, sparsity
from fastfact.nn.compress import compress
from fastfact.nn.convert import densify, factorize, factorized_layers
from fastfact.nn.files import load_into, save
from fastfact.nn.pretrained import register_transformers
from fastfact.nn.schedule import Schedule
from fastfact.nn.specs import Hadamard, LowRank, Rank1, Spec
from fastfact.nn.summary import summary
from fastfact.ops.backends import backends, use_backend

__all__ = [
    "Callback",
    "Client",
    "Federation",
    "Hadamard",
    "History",
    "LowRank",
    "Phase",
    "Rank1",
    "Schedule",
    "Spec",
    "Strategy",
    "TensorBoard",
    "adapters",
    "backends",
    "compress",
    "data",
    "densify",
    "factorize",
    "factorized_layers",
    "load_into",
    "methods",
    "models",
    "nn",
    "ops",
    "optim",
    "register",
    "register_transformers",
    "save",
    "sparsity",
    "summary",
    "use_backend",
]
