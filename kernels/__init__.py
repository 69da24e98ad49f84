"""The ops in Triton, each with the signature of its reference in `fastfact.ops.reference`.

Importing this package without triton raises ImportError. With `TRITON_INTERPRET=1` in the environment the kernels
run on the CPU in Triton's interpreter, slowly (float64, float32 and float16; its bfloat16 arithmetic is wrong).

Imports `formats` alone. Read `weights.py` first.
"""

try:
    import triton
except ImportError as error:
    raise ImportError(f"the Triton kernels need the package triton: {error}", name="triton") from error

from fastfact.kernels.adapter import lowrank_linear, lowrank_linear_backward
from fastfact.kernels.bitmap import pack_bitmap, unpack_bitmap
from fastfact.kernels.conv import (
    factored_conv2d,
    factored_conv2d_backward,
    fused_conv2d,
    fused_conv2d_dw,
    fused_conv2d_dx,
)
from fastfact.kernels.norm import batch_norm, batch_norm_backward
from fastfact.kernels.sgd import prox_sgd_step
from fastfact.kernels.similarity import similarity_sums, srht
from fastfact.kernels.weights import (
    compact_weight,
    compact_weight_backward,
    hadamard_weight,
    hadamard_weight_backward,
    lowrank_weight,
    lowrank_weight_backward,
    rank1_weight,
    rank1_weight_backward,
)

INTERPRETED: bool = triton.knobs.runtime.interpret
VERSION: str = triton.__version__

if INTERPRETED and VERSION.startswith("3.6."):
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope):
        """With numpy ≥ 2.4 this triton's interpreter cannot take the bound of a loop from an argument."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_with_index

__all__ = [
    "INTERPRETED",
    "VERSION",
    "batch_norm",
    "batch_norm_backward",
    "compact_weight",
    "compact_weight_backward",
    "factored_conv2d",
    "factored_conv2d_backward",
    "fused_conv2d",
    "fused_conv2d_dw",
    "fused_conv2d_dx",
    "hadamard_weight",
    "hadamard_weight_backward",
    "lowrank_linear",
    "lowrank_linear_backward",
    "lowrank_weight",
    "lowrank_weight_backward",
    "pack_bitmap",
    "prox_sgd_step",
    "rank1_weight",
    "rank1_weight_backward",
    "similarity_sums",
    "srht",
    "unpack_bitmap",
]
