"""`prox_sgd_step` over all tensors of a group in one launch, through a table of their addresses on the device."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.geometry import accumulator
from fastfact.kernels.weights import TL_DTYPES

_ELEMENTS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_COLUMNS = 5
_BLOCK = 1024
_ROWS = 32
"""Rows of a table that are written by one launch, whose arguments they are."""
_LARGE = 1 << 40


@triton.jit
def table_kernel(table, codes, LARGE: tl.constexpr, COUNT: tl.constexpr):
    for j in tl.static_range(COUNT):
        tl.store(table + j, (codes[j] >> 1).to(tl.int64) - LARGE)


@triton.jit
def prox_sgd_kernel(
    table,
    lr: tl.float64,
    momentum: tl.float64,
    weight_decay: tl.float64,
    ELEMENT: tl.constexpr,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
    PROXIMAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row j of `table`: addresses of parameter, gradient and momentum, elements, and the bits of l1 as float64."""
    row = table + tl.program_id(1) * COLUMNS
    n = tl.load(row + 3)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < n:
        params = tl.load(row).to(tl.pointer_type(ELEMENT))
        grads = tl.load(row + 1).to(tl.pointer_type(ELEMENT))
        momenta = tl.load(row + 2).to(tl.pointer_type(ELEMENT))
        if ALIGNED:
            params = tl.multiple_of(params, 16)
            grads = tl.multiple_of(grads, 16)
            momenta = tl.multiple_of(momenta, 16)
            n = tl.multiple_of(n, 8)
        penalty = tl.load(row + 4).to(tl.float64, bitcast=True).to(ACC)
        step = tl.full([1], lr, ACC)
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        p = tl.load(params + at, mask=inside, other=0.0).to(ACC)
        g = tl.load(grads + at, mask=inside, other=0.0).to(ACC)
        sign = tl.where(p > 0, 1.0, tl.where(p < 0, -1.0, 0.0)).to(ACC)
        g += tl.full([1], weight_decay, ACC) * p
        if not PROXIMAL:
            g += penalty * sign
        if HAS_MOMENTUM:
            g += tl.full([1], momentum, ACC) * tl.load(momenta + at, mask=inside, other=0.0).to(ACC)
            tl.store(momenta + at, g.to(ELEMENT), mask=inside)
        p -= step * g
        if PROXIMAL:
            size = tl.abs(p) - step * penalty
            # not tl.maximum, which would turn NaN into 0
            size = tl.where(size < 0, 0.0, size)
            p = tl.where(p < 0, -size, size)
        tl.store(params + at, p.to(ELEMENT), mask=inside)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _table(rows: list[tuple], device: torch.device) -> Tensor:
    """`rows` on the device, written by kernels whose arguments they are: a CUDA graph that captures the step writes and
    reads a table of its own, and nothing is copied from the host."""
    launches = triton.cdiv(len(rows), _ROWS)
    table = torch.empty(launches * _ROWS, _COLUMNS, dtype=torch.int64, device=device)
    bits = [n for row in rows for n in (*row[:4], struct.unpack("q", struct.pack("d", row[4]))[0])]
    # odd numbers beyond 32 bits: Triton, which compiles for small numbers and for even ones anew, sees one kind
    codes = [2 * (_LARGE + n) + 1 for n in bits + [0] * (table.numel() - len(bits))]
    for launch, part in enumerate(table.view(launches, -1)):
        some = tuple(codes[launch * part.numel() : (launch + 1) * part.numel()])
        table_kernel[(1,)](part, some, LARGE=_LARGE, COUNT=len(some), num_warps=1)
    return table


def prox_sgd_step(
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    l1: list[float],
    lr: float,
    momentum: float,
    weight_decay: float,
    proximal: bool,
) -> None:
    groups: dict[tuple, list[tuple]] = {}
    written_back = []
    alive = []
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if not param.numel():
            continue
        state = momenta[index] if momentum else None
        step = param
        if not is_dense(param):
            step = param.contiguous()
            written_back.append((param, step))
        grad = _laid_out_as(grad, step)
        if state is not None and state.stride() != step.stride():
            laid = _laid_out_as(state, step)
            written_back.append((state, laid))
            state = laid
        alive.append((grad, state))
        row = (step.data_ptr(), grad.data_ptr(), state.data_ptr() if momentum else 0, step.numel(), float(l1[index]))
        groups.setdefault((step.device, step.dtype), []).append(row)
    for (device, dtype), rows in groups.items():
        aligned = all(row[0] % 16 == row[1] % 16 == row[2] % 16 == row[3] % 8 == 0 for row in rows)
        blocks = triton.cdiv(max(row[3] for row in rows), _BLOCK)
        with torch.cuda.device(device if device.type == "cuda" else -1):
            # the grid's second axis is limited to 65,535
            for first in range(0, len(rows), 65535):
                some = rows[first : first + 65535]
                prox_sgd_kernel[(blocks, len(some))](
                    _table(some, device),
                    float(lr),
                    float(momentum),
                    float(weight_decay),
                    ELEMENT=_ELEMENTS[dtype],
                    ACC=TL_DTYPES[accumulator(dtype)],
                    COLUMNS=_COLUMNS,
                    HAS_MOMENTUM=bool(momentum),
                    PROXIMAL=bool(proximal),
                    ALIGNED=aligned,
                    BLOCK=_BLOCK,
                    num_warps=4,
                )
    for target, source in written_back:
        target.copy_(source)


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)
