"""The optimizer step with its soft threshold, and the bitmap form of μ. Not differentiable."""

import torch
from torch import Tensor

from fastfact.formats import VALUE_TYPES
from fastfact.ops.backends import implementation
from fastfact.ops.common import with_clients


@torch.no_grad()
def prox_sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    l1: list[float],
    *,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: bool = True,
) -> None:
    """One step of SGD with momentum on every tensor of `params`, in place, then the soft threshold lr · l1[j] on those
    with l1[j] > 0 (the proximal operator of λ‖μ‖₁, Factorized-FL eq. 6); with `proximal=False` the subgradient.

    params, grads, momenta: lists of tensors of equal shapes and dtypes (`momenta` empty when momentum is 0); l1: one
    float each. A parameter and its momentum may be non-contiguous but must share their strides.
    Raises ValueError where the lists do not match or l1 is negative.
    """
    op = "prox_sgd_step"
    if len(grads) != len(params) or len(l1) != len(params) or len(momenta) != (len(params) if momentum else 0):
        raise ValueError(
            f"{op}: {len(params)} params, {len(grads)} grads, {len(l1)} l1, {len(momenta)} momenta:"
            " must be as many of each (no momenta when momentum is 0)"
        )
    for j, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if param.shape != grad.shape or param.dtype != grad.dtype:
            raise ValueError(
                f"{op}: grads[{j}] is {grad.dtype} {list(grad.shape)}, must be {param.dtype} {list(param.shape)}"
            )
    if any(penalty < 0 for penalty in l1):
        raise ValueError(f"{op}: l1={min(l1)}, must not be negative")
    implementation(op)(params, grads, momenta, l1, lr, momentum, weight_decay, proximal)
    torch.autograd.graph.increment_version([*params, *momenta])


@torch.no_grad()
def pack_bitmap(x: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The nonzeros of `x` [(k,) rows, n], any floating dtype, as (bits, values, scale); exact for float32 values.

    bits uint8 [(k,) rows, ceil(n / 8)], bit j % 8 of byte j // 8 set where x[…, j] ≠ 0; values [nnz] in row-major order
    in `dtype` (float32, bfloat16 or int8); scale float32 [(k,) rows] = max|row| / 127 for int8, empty otherwise.
    """
    op = "pack_bitmap"
    if dtype not in VALUE_TYPES:
        raise ValueError(f"{op}: dtype={dtype}, must be one of {', '.join(map(str, VALUE_TYPES))}")
    clients, (x,) = with_clients(op, {"x": (x, 2)})
    bits, values, scale = implementation(op)(x if clients else x.unsqueeze(0), VALUE_TYPES[dtype])
    if not clients:
        bits, scale = bits.squeeze(0), scale.squeeze(0) if scale.dim() > 1 else scale
    return bits, values, scale


@torch.no_grad()
def unpack_bitmap(bits: Tensor, values: Tensor, scale: Tensor, n: int) -> Tensor:
    """x float32 [(k,) rows, n] from the (bits, values, scale) of `pack_bitmap`.

    Raises ValueError where `n` does not fit bits, or the bits set are not as many as the values (a damaged file).
    """
    op = "unpack_bitmap"
    clients, (bits,) = with_clients(op, {"bits": (bits, 2)})
    if bits.shape[-1] != (n + 7) // 8:
        raise ValueError(f"{op}: n={n} with {bits.shape[-1]} bytes a row, must be {(n + 7) // 8} bytes")
    out = implementation(op)(
        bits if clients else bits.unsqueeze(0), values, scale if clients or not scale.numel() else scale.unsqueeze(0), n
    )
    return out if clients else out.squeeze(0)
