"""The functional ops, differentiable, each with an optional leading client axis.

Imports the Triton kernels and what stands below them. Read `reference.py` first.
"""

from fastfact.ops import backends, direct, reference  # noqa: F401  the reference declares the ops
from fastfact.ops.conv import factored_conv2d, factored_linear, fused_conv2d, separable_conv2d
from fastfact.ops.lowrank import lowrank_linear
from fastfact.ops.mixing import mix, similarity_mix, srht
from fastfact.ops.rows import GatheredBatch, cross_entropy, gather_rows
from fastfact.ops.sparse import pack_bitmap, prox_sgd_step, unpack_bitmap
from fastfact.ops.weights import hadamard_weight, lowrank_weight, rank1_weight

backends.load()
direct.load()

__all__ = [
    "GatheredBatch",
    "cross_entropy",
    "factored_conv2d",
    "factored_linear",
    "fused_conv2d",
    "gather_rows",
    "hadamard_weight",
    "lowrank_linear",
    "lowrank_weight",
    "mix",
    "pack_bitmap",
    "prox_sgd_step",
    "rank1_weight",
    "separable_conv2d",
    "similarity_mix",
    "srht",
    "unpack_bitmap",
]
