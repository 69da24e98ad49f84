"""The optimizer step with its soft threshold, and the bitmap form of μ. Not differentiable."""

import math
from typing import NoReturn

import torch
from torch import Tensor

from fastfact.base.formats import FLOATING, VALUE_TYPES
from fastfact.ops import direct
from fastfact.ops.backends import implementation
from fastfact.ops.common import check_floating, check_size, check_tensor, flag, number, sequence, whole, with_clients


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
    float32, float64, float16 and bfloat16; all on one device. Raises ValueError where the lists do not match, a number
    is not finite or l1 is negative.
    """
    op = "prox_sgd_step"
    params, grads = sequence(op, "params", params, "tensors"), sequence(op, "grads", grads, "tensors")
    momenta, l1 = sequence(op, "momenta", momenta, "tensors"), sequence(op, "l1", l1, "numbers")
    lr, momentum = number(op, "lr", lr), number(op, "momentum", momentum)
    weight_decay = number(op, "weight_decay", weight_decay)
    if len(grads) != len(params) or len(l1) != len(params) or len(momenta) != (len(params) if momentum else 0):
        raise ValueError(
            f"{op}: {len(params)} params, {len(grads)} grads, {len(l1)} l1, {len(momenta)} momenta:"
            " must be as many of each (no momenta when momentum is 0)"
        )
    proximal = flag(op, "proximal", proximal)
    settings = lr, momentum, weight_decay, proximal
    if not torch.compiler.is_compiling() and direct.prox_sgd_step(params, grads, momenta, l1, *settings):
        torch.autograd.graph.increment_version([*params, *momenta])
        return
    for j, param in enumerate(params):
        if not isinstance(param, Tensor) or param.dtype not in FLOATING or param.device != params[0].device:
            check_tensor(op, f"params[{j}]", param)
            check_tensor(op, f"params[{j}]", param, FLOATING, params[0].device)
        _check_written(op, "params", j, param)
        if not _is_like(grads[j], param):
            _refuse(op, "grads", j, grads[j], param)
        if momenta:
            if not _is_like(momenta[j], param):
                _refuse(op, "momenta", j, momenta[j], param)
            _check_written(op, "momenta", j, momenta[j])
    for j, penalty in enumerate(l1):
        if not isinstance(penalty, int | float) or not 0 <= penalty < math.inf:
            l1[j] = number(op, f"l1[{j}]", penalty, 0)
    implementation(op)(params, grads, momenta, l1, lr, momentum, weight_decay, proximal)
    torch.autograd.graph.increment_version([*params, *momenta])


def _is_like(tensor, param: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.shape == param.shape
        and tensor.dtype == param.dtype
        and tensor.device == param.device
        and tensor.layout is torch.strided
    )


def _refuse(op: str, name: str, j: int, tensor, param: Tensor) -> NoReturn:
    check_tensor(op, f"{name}[{j}]", tensor)
    raise ValueError(
        f"{op}: {name}[{j}] is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, must be {param.dtype}"
        f" {list(param.shape)} on {param.device} as its parameter"
    )


def _check_written(op: str, name: str, j: int, tensor: Tensor) -> None:
    """Raise TypeError for what is not dense, ValueError for a tensor that was expanded, to be written to."""
    if tensor.layout is not torch.strided:
        check_tensor(op, f"{name}[{j}]", tensor)
    if not tensor.is_contiguous() and any(
        extent > 1 and step == 0 for extent, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(f"{op}: {name}[{j}] has elements that share their memory (expand), each must have its own")


@torch.no_grad()
def pack_bitmap(x: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The nonzeros of `x` [(k,) rows, n], any floating dtype, as (bits, values, scale); exact for float32 values.

    bits uint8 [(k,) rows, ceil(n / 8)], bit j % 8 of byte j // 8 set where x[…, j] ≠ 0; values [nnz] in row-major order
    in `dtype` (float32, bfloat16 or int8); scale float32 [(k,) rows] = max|row| / 127 for int8, empty otherwise.
    """
    op = "pack_bitmap"
    if dtype not in tuple(VALUE_TYPES):
        raise ValueError(f"{op}: dtype={dtype}, must be one of {', '.join(map(str, VALUE_TYPES))}")
    clients, (x,) = with_clients(op, {"x": (x, 2)})
    check_floating(op, "x", x)
    if x.is_meta:
        raise NotImplementedError(f"{op}: x is a meta tensor, which has no numbers to count")
    bits, values, scale = implementation(op)(x if clients else x.unsqueeze(0), VALUE_TYPES[dtype])
    if not clients:
        bits, scale = bits.squeeze(0), scale.squeeze(0) if scale.dim() > 1 else scale
    return bits, values, scale


@torch.no_grad()
def unpack_bitmap(bits: Tensor, values: Tensor, scale: Tensor, n: int, *, check: bool = True) -> Tensor:
    """x float32 [(k,) rows, n] from the (bits, values, scale) of `pack_bitmap`.

    Raises ValueError where `n` does not fit bits, or the bits set are not as many as the values (a damaged file). To
    count the bits set the host waits for a GPU: check=False leaves that out for what is known to fit (and can be
    recorded in a CUDA graph); values that are missing after all are then NaN.
    """
    op = "unpack_bitmap"
    n = whole(op, "n", n, 0)
    clients, (bits,) = with_clients(op, {"bits": (bits, 2)})
    check_tensor(op, "bits", bits, (torch.uint8,))
    check_tensor(op, "values", values, (*VALUE_TYPES, torch.float64, torch.float16), bits.device)
    check_tensor(op, "scale", scale, (torch.float32,), bits.device)
    if values.dim() != 1:
        raise ValueError(f"{op}: values has shape {list(values.shape)}, must have 1 dimension")
    if scale.numel() and scale.shape != bits.shape[:-1]:
        raise ValueError(f"{op}: scale has shape {list(scale.shape)}, must be {list(bits.shape[:-1])} or empty")
    check_size(op, (*bits.shape[:-1], n))
    if bits.shape[-1] != (n + 7) // 8:
        raise ValueError(f"{op}: n={n} with {bits.shape[-1]} bytes a row, must be {(n + 7) // 8} bytes")
    out = implementation(op)(
        bits if clients else bits.unsqueeze(0),
        values,
        scale if clients or not scale.numel() else scale.unsqueeze(0),
        n,
        flag(op, "check", check),
    )
    return out if clients else out.squeeze(0)
