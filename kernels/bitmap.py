"""`pack_bitmap` and `unpack_bitmap` in two passes: bits and counts of each chunk, then the values at their offsets."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.base.formats import VALUE_TYPES
from fastfact.kernels.geometry import INT32_LIMIT

_CHUNK = 1024
_DTYPES = {code: dtype for dtype, code in VALUE_TYPES.items()}


@triton.jit
def count_kernel(x, bits, counts, maxima, n, row_bytes, chunks, WITH_MAXIMA: tl.constexpr, CHUNK: tl.constexpr):
    """The bits, the nonzeros and the largest magnitude (NaN if any is) of one chunk of a row."""
    pid = tl.program_id(0)
    row = (pid // chunks).to(tl.int64)
    byte = pid % chunks * (CHUNK // 8) + tl.arange(0, CHUNK // 8)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    values = tl.load(x + row * n + at, mask=at < n, other=0.0)
    nonzero = (values != 0).to(tl.int32)
    tl.store(bits + row * row_bytes + byte, tl.sum(nonzero << bit[None, :], 1).to(tl.uint8), mask=byte < row_bytes)
    tl.store(counts + pid, tl.sum(tl.sum(nonzero, 1), 0))
    if WITH_MAXIMA:
        largest = tl.max(tl.max(tl.where(values == values, tl.abs(values), 0.0), 1), 0).to(tl.float32)
        broken = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
        tl.store(maxima + pid, tl.where(broken > 0, float("nan"), largest))


@triton.jit
def write_kernel(x, ends, counts, inverse, values, n, chunks, QUANTIZED: tl.constexpr, CHUNK: tl.constexpr):
    """The nonzeros of one chunk at their place in `values`; `ends` is the running sum of `counts`."""
    pid = tl.program_id(0)
    row = (pid // chunks).to(tl.int64)
    at = pid % chunks * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + row * n + at, mask=at < n, other=0.0)
    nonzero = value != 0
    one = nonzero.to(tl.int32)
    place = tl.load(ends + pid) - tl.load(counts + pid) + (tl.cumsum(one, 0) - one)
    if QUANTIZED:
        scaled = value.to(tl.float32) * tl.load(inverse + row)
        # adding and taking away 1.5 · 2²³ rounds to the nearest integer, ties to even
        rounded = (scaled + 12582912.0) - 12582912.0
        rounded = tl.where(rounded > 127.0, 127.0, tl.where(rounded < -127.0, -127.0, rounded))
        tl.store(values + place, rounded.to(tl.int8), mask=nonzero)
    else:
        tl.store(values + place, value.to(values.dtype.element_ty), mask=nonzero)


@triton.jit
def popcount_kernel(bits, counts, n, row_bytes, chunks, CHUNK: tl.constexpr):
    pid = tl.program_id(0)
    row = (pid // chunks).to(tl.int64)
    at = pid % chunks * CHUNK + tl.arange(0, CHUNK)
    byte = tl.load(bits + row * row_bytes + at // 8, mask=at < n, other=0).to(tl.int32)
    tl.store(counts + pid, tl.sum(byte >> (at % 8) & 1, 0))


@triton.jit
def read_kernel(
    bits,
    ends,
    counts,
    values,
    value_count,
    scale,
    x,
    n,
    row_bytes,
    chunks,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of x from its bits and its stretch of `values`; NaN for values that are missing."""
    pid = tl.program_id(0)
    row = (pid // chunks).to(tl.int64)
    at = pid % chunks * CHUNK + tl.arange(0, CHUNK)
    byte = tl.load(bits + row * row_bytes + at // 8, mask=at < n, other=0).to(tl.int32)
    one = byte >> (at % 8) & 1
    place = tl.load(ends + pid) - tl.load(counts + pid) + (tl.cumsum(one, 0) - one)
    value = tl.load(values + place, mask=(one != 0) & (place < value_count), other=0).to(tl.float32)
    value = tl.where((one != 0) & (place >= value_count), float("nan"), value)
    if SCALED:
        value *= tl.load(scale + row)
    tl.store(x + row * n + at, value, mask=at < n)


def _grid(op: str, rows: int, n: int) -> tuple[int, int]:
    if n > INT32_LIMIT:
        raise ValueError(f"{op}: rows of {n} elements, must be at most {INT32_LIMIT}")
    chunks = triton.cdiv(n, _CHUNK)
    return rows * chunks, chunks


def pack_bitmap(x: Tensor, value_type: int) -> tuple[Tensor, Tensor, Tensor]:
    k, rows, n = x.shape
    x = x.contiguous()
    quantized = value_type == VALUE_TYPES[torch.int8]
    programs, chunks = _grid("pack_bitmap", k * rows, n)
    row_bytes = (n + 7) // 8
    bits = x.new_empty(k, rows, row_bytes, dtype=torch.uint8)
    scale = x.new_zeros((k, rows) if quantized else 0, dtype=torch.float32)
    if not programs:
        return bits, x.new_empty(0, dtype=_DTYPES[value_type]), scale
    counts = x.new_empty(programs, dtype=torch.int32)
    maxima = x.new_empty(programs if quantized else 0, dtype=torch.float32)
    with torch.cuda.device_of(x):
        count_kernel[(programs,)](
            x, bits, counts, maxima, n, row_bytes, chunks, WITH_MAXIMA=quantized, CHUNK=_CHUNK, num_warps=4
        )
        ends = counts.cumsum(0)
        inverse = scale
        if quantized:
            scale = maxima.view(k, rows, chunks).amax(-1) / 127
            inverse = torch.where(scale > 0, 1 / scale, 0.0)
        # the interpreter, which runs on CPU tensors, cuts to bfloat16 instead of rounding
        dtype = _DTYPES[value_type] if x.is_cuda or quantized else torch.float32
        values = x.new_empty(int(ends[-1]), dtype=dtype)
        write_kernel[(programs,)](
            x, ends, counts, inverse, values, n, chunks, QUANTIZED=quantized, CHUNK=_CHUNK, num_warps=4
        )
    return bits, values.to(_DTYPES[value_type]), scale


def unpack_bitmap(bits: Tensor, values: Tensor, scale: Tensor, n: int, check: bool = True) -> Tensor:
    """Raises ValueError where the bits set are not as many as the values, with `check`, for which the host waits."""
    k, rows, row_bytes = bits.shape
    bits, values, scale = bits.contiguous(), values.contiguous(), scale.contiguous()
    programs, chunks = _grid("unpack_bitmap", k * rows, n)
    x = bits.new_empty(k, rows, n, dtype=torch.float32)
    counts = bits.new_empty(programs, dtype=torch.int32)
    with torch.cuda.device_of(bits):
        if programs:
            popcount_kernel[(programs,)](bits, counts, n, row_bytes, chunks, CHUNK=_CHUNK, num_warps=4)
        ends = counts.cumsum(0)
        if check and (total := int(ends[-1]) if programs else 0) != values.numel():
            raise ValueError(f"unpack_bitmap: values has {values.numel()} elements, must have {total}, the bits set")
        if programs:
            read_kernel[(programs,)](
                bits,
                ends,
                counts,
                values,
                values.numel(),
                scale,
                x,
                n,
                row_bytes,
                chunks,
                SCALED=scale.numel() > 0,
                CHUNK=_CHUNK,
                num_warps=4,
            )
    return x
