"""The server's step: similarities, mixing weights and weighted sums in one kernel, and the transform of sketches."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.base import formats
from fastfact.kernels.geometry import INT32_LIMIT, accumulator
from fastfact.kernels.weights import TL_DTYPES

# Uploads of more numbers are multiplied by the weights of a panel of rows, which go to memory.
_FUSED = 128
_PANEL = 1 << 26


@triton.jit
def similarity_kernel(
    keys,
    inverse,
    x,
    valid,
    out,
    counts,
    first,
    rows,
    m,
    d,
    n,
    chunk,
    epsilon: tl.float64,
    tau: tl.float64,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    COUNT: tl.constexpr,
    PANEL: tl.constexpr,
    PRODUCT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of rows against `chunk` columns: their weights go into `out` [rows, m] (PANEL), or, against all, times x
    into [rows, n]. `counts` begins as zeros.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    own = first + row
    depth = tl.arange(0, BLOCK_D)
    width = tl.arange(0, BLOCK_N)
    inside = row < rows
    key = keys + own.to(tl.int64)[:, None] * d
    low, scale = tl.full([1, 1], tau, ACC), tl.full([1, 1], epsilon, ACC)
    sums = tl.zeros([BLOCK_R, BLOCK_N], ACC)
    count = tl.zeros([BLOCK_R], tl.int64)
    if SCALED:
        own_inverse = tl.load(inverse + own, mask=inside, other=0.0)
    begin = tl.program_id(1) * chunk
    for start in range(begin, tl.minimum(begin + chunk, m), BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        other = keys + column.to(tl.int64)[None, :] * d
        product = tl.zeros([BLOCK_R, BLOCK_C], PRODUCT)
        for at in range(0, d, BLOCK_D):
            a = tl.load(key + (at + depth)[None, :], mask=inside[:, None] & (at + depth < d)[None, :], other=0)
            b = tl.load(other + (at + depth)[:, None], mask=(column < m)[None, :] & (at + depth < d)[:, None], other=0)
            product = tl.dot(a, b, product, input_precision="ieee", out_dtype=PRODUCT)
        sigma = product.to(ACC)
        if SCALED:
            sigma *= own_inverse[:, None] * tl.load(inverse + column, mask=column < m, other=0.0)[None, :]
        matched = (sigma >= low) & (inside[:, None] & (column < m)[None, :] & (own[:, None] != column[None, :]))
        sigma = tl.where(sigma > 1.0, 1.0, sigma)
        weight = tl.where(matched, tl.exp(scale * (sigma - 1.0)), 0.0).to(ACC)
        if PANEL:
            tl.store(
                out + row.to(tl.int64)[:, None] * m + column[None, :],
                weight,
                mask=inside[:, None] & (column < m)[None, :],
            )
        else:
            upload = tl.load(
                x + column.to(tl.int64)[:, None] * n + width[None, :],
                mask=(column < m)[:, None] & (width < n)[None, :],
                other=0.0,
            )
            sums = tl.dot(weight, upload, sums, input_precision="ieee", out_dtype=ACC)
        if COUNT:
            if MASKED:
                usable = tl.load(valid + column, mask=column < m, other=0) != 0
                matched = matched & usable[None, :]
            count += tl.sum(matched.to(tl.int64), 1)
    if not PANEL:
        tl.store(
            out + row.to(tl.int64)[:, None] * n + width[None, :], sums, mask=inside[:, None] & (width < n)[None, :]
        )
    if COUNT:
        # of whole numbers: any order gives the same
        tl.atomic_add(counts + row, count, mask=inside)


def similarity_sums(
    keys: Tensor,
    uploads: list[Tensor],
    valid: Tensor | None,
    first: int,
    rows: int,
    epsilon: float,
    tau: float,
    count: bool,
) -> tuple[list[Tensor], Tensor]:
    m, d = keys.shape
    if max(m, d) > INT32_LIMIT:
        raise ValueError(f"similarity_sums: {m} keys of {d} numbers, must be at most {INT32_LIMIT} of each")
    uploads = [x.contiguous() for x in uploads]
    sums = [x.new_zeros(rows, x.shape[1]) for x in uploads]
    counts = keys.new_zeros(rows if count else 0, dtype=torch.int64)
    if rows == 0 or not (uploads or count):
        return sums, counts
    integers = keys.dtype == torch.int8
    inverse = _inverse_norms(keys) if integers else None
    keys = keys.contiguous() if integers else formats.unit(keys)
    compute = torch.float32 if integers else keys.dtype
    size = 32 if compute == torch.float64 else 64
    settings = {
        "SCALED": integers,
        "MASKED": valid is not None,
        "COUNT": count,
        "PRODUCT": tl.int32 if integers else TL_DTYPES[compute],
        "ACC": TL_DTYPES[compute],
        "BLOCK_R": size,
        "BLOCK_C": size,
        "BLOCK_D": 64 if integers else 32,
        "num_warps": 8,
        "num_stages": 2,
    }
    mask = None if valid is None else valid.view(torch.uint8)
    # a program takes all columns where it sums the uploads: with few rows there would be too few of them
    fused = len(uploads) == 1 and uploads[0].shape[1] <= _FUSED and (m <= 256 or rows >= 264 * size)
    height = rows if fused else max(1, min(rows, _PANEL // m))
    for begin in range(0, rows, height):
        some = min(height, rows - begin)
        target = sums[0] if fused else keys.new_empty(some, m, dtype=compute)
        n = uploads[0].shape[1] if fused else 0
        blocks, tiles = triton.cdiv(some, size), triton.cdiv(m, size)
        chunk = size * (tiles if fused else triton.cdiv(tiles, min(tiles, triton.cdiv(528, blocks))))
        with torch.cuda.device(keys.device if keys.is_cuda else -1):
            similarity_kernel[(blocks, triton.cdiv(m, chunk))](
                keys,
                inverse,
                uploads[0] if fused else None,
                mask,
                target,
                counts[begin:] if count else None,
                first + begin,
                some,
                m,
                d,
                n,
                chunk,
                float(epsilon),
                float(tau),
                PANEL=not fused,
                BLOCK_N=max(16, triton.next_power_of_2(n)),
                **settings,
            )
        for total, x in zip(sums, () if fused else uploads, strict=False):
            torch.matmul(target, x, out=total[begin : begin + some])
    return sums, counts


def _inverse_norms(keys: Tensor) -> Tensor:
    """float32 [m] of int8 keys; 0 of a key of zeros."""
    norms = torch.cat([torch.linalg.vector_norm(some.double(), dim=1) for some in keys.split(4096)])
    return torch.where(norms > 0, 1 / norms, 0).float()


@triton.jit
def hadamard_signs(i, j, TYPE: tl.constexpr):
    """(−1)^popcount(i & j): the Walsh–Hadamard matrix in natural order."""
    bits = i & j
    bits ^= bits >> 16
    bits ^= bits >> 8
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    return (1 - 2 * (bits & 1)).to(TYPE)


@triton.jit
def srht_chunk_kernel(x, signs, work, n, chunks, ACC: tl.constexpr, SIDE: tl.constexpr):
    """The transform of a chunk of SIDE · SIDE points of one row of x: H X H of it as a matrix X."""
    pid = tl.program_id(0)
    row = (pid // chunks).to(tl.int64)
    i = tl.arange(0, SIDE)
    at = (pid % chunks) * (SIDE * SIDE) + i[:, None] * SIDE + i[None, :]
    point = tl.load(x + row * n + at, mask=at < n, other=0.0).to(ACC)
    point *= tl.load(signs + at, mask=at < n, other=0.0)
    h = hadamard_signs(i[:, None], i[None, :], ACC)
    point = tl.dot(h, point, input_precision="ieee", out_dtype=ACC)
    point = tl.dot(point, h, input_precision="ieee", out_dtype=ACC)
    tl.store(work + row * chunks * (SIDE * SIDE) + at, point)


@triton.jit
def srht_keep_kernel(
    work, kept, out, m, chunks, factor: tl.float64, ACC: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The rows kept of the transform across the chunks."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(kept + j, mask=j < m, other=0)
    across, within = (index // CHUNK).to(tl.int32), index % CHUNK
    total = tl.zeros([BLOCK], ACC)
    for chunk in range(0, chunks):
        value = tl.load(work + (row * chunks + chunk) * CHUNK + within, mask=j < m, other=0.0)
        total += hadamard_signs(across, chunk, ACC) * value
    tl.store(out + row * m + j, total * tl.full([1], factor, ACC), mask=j < m)


def srht(x: Tensor, signs: Tensor, rows: Tensor, quantize: bool) -> tuple[Tensor, Tensor]:
    (k, n), m = x.shape, len(rows)
    compute = accumulator(x.dtype)
    side = 16 if n <= 256 else 32 if n <= 1024 else 64
    # Chunks past the last number are zero, and so is what they add.
    chunks = triton.cdiv(n, side * side)
    out = x.new_empty(k, m, dtype=compute)
    if k and m:
        # Triton cannot lower a float64 product of what is read as int8
        x, signs, rows = x.contiguous(), signs.to(compute), rows.contiguous()
        work = x.new_empty(k, chunks, side * side, dtype=compute)
        with torch.cuda.device(x.device if x.is_cuda else -1):
            # by 4 warps a side of 64 spills
            warps = 8 if side == 64 else 4
            settings = {"ACC": TL_DTYPES[compute], "SIDE": side, "num_warps": warps}
            srht_chunk_kernel[(k * chunks,)](x, signs, work, n, chunks, **settings)
            srht_keep_kernel[(k, triton.cdiv(m, 256))](
                work, rows, out, m, chunks, m**-0.5, ACC=TL_DTYPES[compute], CHUNK=side * side, BLOCK=256, num_warps=4
            )
    return formats.quantized(out) if quantize else (out, x.new_empty(0, dtype=torch.float32))
