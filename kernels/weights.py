"""The weight ops: one elementwise kernel and its reduction for rank 1, three matrix kernels for the products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.formats import KERNEL, LINEAR, SPATIAL, VIEW, to_format
from fastfact.kernels.geometry import (
    INT32_LIMIT,
    Side,
    accumulator,
    empty_weight,
    gradient,
    hadamard_sides,
    in_format,
    lowrank_sides,
    rank1_sides,
    slices,
)
from fastfact.kernels.support import support_bits, support_tile

TL_DTYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit
def rank1_kernel(
    out,
    mu,
    bits,
    starts,
    u,
    v,
    n,
    blocks,
    mu_client,
    bits_client,
    nnz,
    u_client,
    v_client,
    u_size: tl.constexpr,
    v_size: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    D3: tl.constexpr,
    U0: tl.constexpr,
    U1: tl.constexpr,
    U2: tl.constexpr,
    U3: tl.constexpr,
    V0: tl.constexpr,
    V2: tl.constexpr,
    V3: tl.constexpr,
    F0: tl.constexpr,
    F1: tl.constexpr,
    F2: tl.constexpr,
    F3: tl.constexpr,
    RANK: tl.constexpr,
    MU: tl.constexpr,
    ACC: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[client, p] = μ[client, p] + Σ_r u · v, p running over W in memory order with digits (d0, d1, d2, d3).

    MU: 0 none, 1 dense, 2 on a support.
    """
    pid = tl.program_id(0)
    client = (pid // blocks).to(tl.int64)
    p = (pid % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = p < n
    d3 = p % D3
    rest = p // D3
    d2 = rest % D2
    rest = rest // D2
    d1 = rest % D1
    d0 = rest // D1
    u_at = u + client * u_client + (d0 * U0 + d1 * U1 + d2 * U2 + d3 * U3)
    v_at = v + client * v_client + (d0 * V0 + d2 * V2 + d3 * V3)
    acc = tl.zeros([BLOCK], ACC)
    for r in range(RANK):
        left = tl.load(u_at + r * u_size, mask=inside, other=0.0)
        right = tl.load(v_at + r * v_size, mask=inside, other=0.0)
        acc += left.to(ACC) * right.to(ACC)
    if MU == 1:
        acc += tl.load(mu + client * mu_client + p, mask=inside, other=0.0).to(ACC)
    if MU == 2:
        of_client = client * bits_client
        flat = d0 * F0 + d1 * F1 + d2 * F2 + d3 * F3
        on_support, place = support_tile(bits + of_client, starts + of_client, flat, inside, nnz)
        acc += tl.load(mu + client * mu_client + place, mask=on_support, other=0.0).to(ACC)
    tl.store(out + client * n + p, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rank1_backward_kernel(
    grad,
    u,
    v,
    du,
    dv,
    dmu,
    bits,
    starts,
    u_blocks,
    v_blocks,
    grad_client,
    u_client,
    v_client,
    dmu_client,
    bits_client,
    nnz,
    u_size,
    v_size,
    u_stride1,
    u_stride0,
    v_stride1,
    v_stride0,
    U_RADIX: tl.constexpr,
    V_RADIX: tl.constexpr,
    U_FACTOR1: tl.constexpr,
    U_FACTOR0: tl.constexpr,
    V_FACTOR1: tl.constexpr,
    V_FACTOR0: tl.constexpr,
    F_RADIX: tl.constexpr,
    FU: tl.constexpr,
    FV1: tl.constexpr,
    FV0: tl.constexpr,
    RANK: tl.constexpr,
    NEED_U: tl.constexpr,
    NEED_V: tl.constexpr,
    NEED_MU: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile of dW, read once: its part of du [client, v block, r, u] and of dv [client, u block, r, v], and its
    elements on the support of μ.
    """
    pid = tl.program_id(0)
    u_block = pid % u_blocks
    v_block = pid // u_blocks % v_blocks
    client = (pid // u_blocks // v_blocks).to(tl.int64)
    eu = u_block * BLOCK_U + tl.arange(0, BLOCK_U)
    ev = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    u_inside = eu < u_size
    v_inside = ev < v_size
    u_offset = (eu // U_RADIX).to(tl.int64) * u_stride1 + (eu % U_RADIX).to(tl.int64) * u_stride0
    v_offset = (ev // V_RADIX).to(tl.int64) * v_stride1 + (ev % V_RADIX).to(tl.int64) * v_stride0
    inside = v_inside[:, None] & u_inside[None, :]
    tile = tl.load(grad + client * grad_client + (v_offset[:, None] + u_offset[None, :]), mask=inside, other=0.0).to(
        ACC
    )
    u_index = eu // U_RADIX * U_FACTOR1 + eu % U_RADIX * U_FACTOR0
    v_index = ev // V_RADIX * V_FACTOR1 + ev % V_RADIX * V_FACTOR0
    if NEED_MU:
        of_client = client * bits_client
        flat = (v_index // F_RADIX * FV1 + v_index % F_RADIX * FV0)[:, None] + (u_index * FU)[None, :]
        on_support, place = support_tile(bits + of_client, starts + of_client, flat, inside, nnz)
        tl.store(dmu + client * dmu_client + place, tile.to(dmu.dtype.element_ty), mask=on_support)
    for r in range(RANK):
        if NEED_U:
            right = tl.load(v + client * v_client + r * v_size + v_index, mask=v_inside, other=0.0).to(ACC)
            part = du + ((client * v_blocks + v_block) * RANK + r) * u_size
            tl.store(part + u_index, tl.sum(tile * right[:, None], 0).to(du.dtype.element_ty), mask=u_inside)
        if NEED_V:
            left = tl.load(u + client * u_client + r * u_size + u_index, mask=u_inside, other=0.0).to(ACC)
            part = dv + ((client * u_blocks + u_block) * RANK + r) * v_size
            tl.store(part + v_index, tl.sum(tile * left[None, :], 1).to(dv.dtype.element_ty), mask=v_inside)


@triton.jit
def product_tile(
    x,
    y,
    x_row,
    x_rank,
    y_column,
    y_rank,
    row_inside,
    column_inside,
    RANK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Σ_r x[row, r] y[column, r] as a tile [BLOCK_M, BLOCK_N]; `x_row`, `y_column` are offsets."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, RANK, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        left = tl.load(
            x + (x_row[:, None] + (r.to(tl.int64) * x_rank)[None, :]),
            mask=row_inside[:, None] & (r < RANK)[None, :],
            other=0.0,
        )
        right = tl.load(
            y + (y_column[None, :] + (r.to(tl.int64) * y_rank)[:, None]),
            mask=column_inside[None, :] & (r < RANK)[:, None],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
    return acc


@triton.jit
def index_of(e, RADIX: tl.constexpr, FACTOR1: tl.constexpr, FACTOR0: tl.constexpr):
    """The row of a factor that belongs to row (or column) e of the matrix that W is read as in its own order."""
    return (e // RADIX * FACTOR1 + e % RADIX * FACTOR0).to(tl.int64)


@triton.jit
def offset_of(e, RADIX: tl.constexpr, stride1, stride0):
    """Where that row (or column) begins in W."""
    return (e // RADIX).to(tl.int64) * stride1 + (e % RADIX).to(tl.int64) * stride0


@triton.jit
def product_kernel(
    out,
    dense,
    x1,
    y1,
    x2,
    y2,
    scaling: tl.float64,
    plus,
    m_blocks,
    n_blocks,
    out_client,
    dense_client,
    x1_client,
    y1_client,
    x2_client,
    y2_client,
    x_row,
    x_rank,
    y_column,
    y_rank,
    x2_row,
    y2_column,
    rows,
    columns,
    m_stride1,
    m_stride0,
    n_stride1,
    n_stride0,
    M_RADIX: tl.constexpr,
    N_RADIX: tl.constexpr,
    M_FACTOR1: tl.constexpr,
    M_FACTOR0: tl.constexpr,
    N_FACTOR1: tl.constexpr,
    N_FACTOR0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    HAS_DENSE: tl.constexpr,
    HAS_SECOND: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """W[m, n] = dense + scaling · Σ_r x1 y1, or (Σ_r x1 y1) (Σ_r x2 y2 + plus), written in W's own order."""
    pid = tl.program_id(0)
    em = pid % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    en = pid // m_blocks % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    client = (pid // m_blocks // n_blocks).to(tl.int64)
    m_inside = em < rows
    n_inside = en < columns
    m = index_of(em, M_RADIX, M_FACTOR1, M_FACTOR0)
    n = index_of(en, N_RADIX, N_FACTOR1, N_FACTOR0)
    weight = product_tile(
        x1 + client * x1_client,
        y1 + client * y1_client,
        m * x_row,
        x_rank,
        n * y_column,
        y_rank,
        m_inside,
        n_inside,
        RANK1,
        ACC,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
    )
    m_offset = offset_of(em, M_RADIX, m_stride1, m_stride0)
    n_offset = offset_of(en, N_RADIX, n_stride1, n_stride0)
    offset = m_offset[:, None] + n_offset[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    if HAS_SECOND:
        second = product_tile(
            x2 + client * x2_client,
            y2 + client * y2_client,
            m * x2_row,
            1,
            n * y2_column,
            1,
            m_inside,
            n_inside,
            RANK2,
            ACC,
            PRECISION,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
        )
        weight = weight * (second + plus)
    else:
        weight = weight * tl.full([1, 1], scaling, ACC)
    if HAS_DENSE:
        weight += tl.load(dense + client * dense_client + offset, mask=inside, other=0.0).to(ACC)
    tl.store(out + client * out_client + offset, weight.to(out.dtype.element_ty), mask=inside)


@triton.jit
def contract_kernel(
    out,
    grad,
    x,
    y,
    factor,
    scaling: tl.float64,
    plus,
    width,
    part_size,
    m_blocks,
    c_blocks,
    splits,
    grad_client,
    x_client,
    y_client,
    factor_client,
    factor_n,
    factor_c,
    out_m,
    out_c,
    rows,
    columns,
    m_stride1,
    m_stride0,
    n_stride1,
    n_stride0,
    M_RADIX: tl.constexpr,
    N_RADIX: tl.constexpr,
    M_FACTOR1: tl.constexpr,
    M_FACTOR0: tl.constexpr,
    N_FACTOR1: tl.constexpr,
    N_FACTOR0: tl.constexpr,
    RANK: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[client, split, m, c] = scaling · Σ_n dW[m, n] Q[m, n] factor[n, c], Q = Σ_r x[m, r] y[n, r] + plus, or 1."""
    pid = tl.program_id(0)
    em = pid % m_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    c = pid // m_blocks % c_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    split = pid // m_blocks // c_blocks % splits
    client = (pid // m_blocks // c_blocks // splits).to(tl.int64)
    m_inside = em < rows
    c_inside = c < width
    m = index_of(em, M_RADIX, M_FACTOR1, M_FACTOR0)
    m_offset = offset_of(em, M_RADIX, m_stride1, m_stride0)
    acc = tl.zeros([BLOCK_M, BLOCK_C], ACC)
    for step in range(STEPS):
        en = (step * splits + split) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_inside = en < columns
        n = index_of(en, N_RADIX, N_FACTOR1, N_FACTOR0)
        n_offset = offset_of(en, N_RADIX, n_stride1, n_stride0)
        tile = tl.load(
            grad + client * grad_client + (m_offset[:, None] + n_offset[None, :]),
            mask=m_inside[:, None] & n_inside[None, :],
            other=0.0,
        )
        if HAS_OTHER:
            other = product_tile(
                x + client * x_client,
                y + client * y_client,
                m * RANK,
                1,
                n * RANK,
                1,
                m_inside,
                n_inside,
                RANK,
                ACC,
                PRECISION,
                BLOCK_M,
                BLOCK_N,
                BLOCK_R,
            )
            tile = (tile.to(ACC) * (other + plus)).to(grad.dtype.element_ty)
        right = tl.load(
            factor + client * factor_client + ((n * factor_n)[:, None] + (c.to(tl.int64) * factor_c)[None, :]),
            mask=n_inside[:, None] & c_inside[None, :],
            other=0.0,
        )
        acc = tl.dot(tile, right, acc, input_precision=PRECISION, out_dtype=ACC)
    part = out + (client * splits + split) * part_size
    tl.store(
        part + ((m * out_m)[:, None] + (c.to(tl.int64) * out_c)[None, :]),
        (acc * tl.full([1, 1], scaling, ACC)).to(out.dtype.element_ty),
        mask=m_inside[:, None] & c_inside[None, :],
    )


@triton.jit
def thin_kernel(
    dx1,
    dy1,
    dx2,
    dy2,
    grad,
    x1,
    y1,
    x2,
    y2,
    scaling: tl.float64,
    plus,
    stripes,
    splits,
    grad_client,
    x1_client,
    y1_client,
    x2_client,
    y2_client,
    x_row,
    x_rank,
    y_column,
    y_rank,
    rows,
    columns,
    m_stride1,
    m_stride0,
    n_stride1,
    n_stride0,
    M_RADIX: tl.constexpr,
    N_RADIX: tl.constexpr,
    M_FACTOR1: tl.constexpr,
    M_FACTOR0: tl.constexpr,
    N_FACTOR1: tl.constexpr,
    N_FACTOR0: tl.constexpr,
    RANK1: tl.constexpr,
    RANK2: tl.constexpr,
    TWO: tl.constexpr,
    STEPS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """dW, read once, of W = scaling · x1 y1ᵀ, or (x1 y1ᵀ) (x2 y2ᵀ + plus): for a stripe of rows and a split of columns
    the parts of dx [client, split, m, r] and of dy [client, stripe, n, r].
    """
    pid = tl.program_id(0)
    stripe = pid % stripes
    split = pid // stripes % splits
    client = (pid // stripes // splits).to(tl.int64)
    em = stripe * BLOCK_M + tl.arange(0, BLOCK_M)
    m_inside = em < rows
    m = index_of(em, M_RADIX, M_FACTOR1, M_FACTOR0)
    m_offset = offset_of(em, M_RADIX, m_stride1, m_stride0)
    r = tl.arange(0, WIDTH).to(tl.int64)
    x1_at = (m * x_row)[:, None] + (r * x_rank)[None, :]
    x1_inside = m_inside[:, None] & (r < RANK1)[None, :]
    left1 = tl.load(x1 + client * x1_client + x1_at, mask=x1_inside, other=0.0)
    acc1 = tl.zeros([BLOCK_M, WIDTH], ACC)
    if TWO:
        x2_at = (m * RANK2)[:, None] + r[None, :]
        x2_inside = m_inside[:, None] & (r < RANK2)[None, :]
        left2 = tl.load(x2 + client * x2_client + x2_at, mask=x2_inside, other=0.0)
        acc2 = tl.zeros([BLOCK_M, WIDTH], ACC)
    scale = tl.full([1, 1], scaling, ACC)
    for step in range(STEPS):
        en = (step * splits + split) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_inside = en < columns
        n = index_of(en, N_RADIX, N_FACTOR1, N_FACTOR0)
        n_offset = offset_of(en, N_RADIX, n_stride1, n_stride0)
        inside = m_inside[:, None] & n_inside[None, :]
        tile = tl.load(grad + client * grad_client + (m_offset[:, None] + n_offset[None, :]), mask=inside, other=0.0)
        y1_at = (n * y_column)[:, None] + (r * y_rank)[None, :]
        y1_inside = n_inside[:, None] & (r < RANK1)[None, :]
        right1 = tl.load(y1 + client * y1_client + y1_at, mask=y1_inside, other=0.0)
        if TWO:
            y2_at = (n * RANK2)[:, None] + r[None, :]
            y2_inside = n_inside[:, None] & (r < RANK2)[None, :]
            right2 = tl.load(y2 + client * y2_client + y2_at, mask=y2_inside, other=0.0)
            zero = tl.zeros([BLOCK_M, BLOCK_N], ACC)
            first = tl.dot(left1, tl.trans(right1), zero, input_precision=PRECISION, out_dtype=ACC)
            second = tl.dot(left2, tl.trans(right2), zero, input_precision=PRECISION, out_dtype=ACC)
            whole = tile.to(ACC)
            # zero times a product that overflowed is not zero
            tile2 = tl.where(inside, whole * first, 0.0).to(grad.dtype.element_ty)
            tile = tl.where(inside, whole * (second + plus), 0.0).to(grad.dtype.element_ty)
            acc2 = tl.dot(tile2, right2, acc2, input_precision=PRECISION, out_dtype=ACC)
            part = tl.dot(tl.trans(tile2), left2, input_precision=PRECISION, out_dtype=ACC) * scale
            dy2_at = dy2 + (client * stripes + stripe) * (columns * RANK2) + y2_at
            tl.store(dy2_at, part.to(dy2.dtype.element_ty), mask=y2_inside)
        acc1 = tl.dot(tile, right1, acc1, input_precision=PRECISION, out_dtype=ACC)
        part = tl.dot(tl.trans(tile), left1, input_precision=PRECISION, out_dtype=ACC) * scale
        dy1_at = dy1 + (client * stripes + stripe) * (columns * RANK1) + y1_at
        tl.store(dy1_at, part.to(dy1.dtype.element_ty), mask=y1_inside)
    dx1_at = dx1 + (client * splits + split) * (rows * RANK1) + x1_at
    tl.store(dx1_at, (acc1 * scale).to(dx1.dtype.element_ty), mask=x1_inside)
    if TWO:
        dx2_at = dx2 + (client * splits + split) * (rows * RANK2) + x2_at
        tl.store(dx2_at, (acc2 * scale).to(dx2.dtype.element_ty), mask=x2_inside)


def rank1_digits(layout: int, size, channels_last: bool) -> dict[str, int]:
    """Digits of a position in W (in memory order), and their weights in the positions in u, in v and in flat W."""
    o, i, kh, kw = (*size, 1, 1)[:4]
    taps = kh * kw
    if layout == LINEAR:
        digits = {"D3": i, "U3": 1, "V0": 1, "F0": i, "F3": 1}
    elif layout == VIEW:
        digits = {"D3": o * i, "U0": 1, "V3": 1, "F0": o * i, "F3": 1}
    elif layout == SPATIAL and channels_last:
        digits = {"D2": taps, "D3": i, "U2": 1, "V0": i, "V3": 1, "F0": i * taps, "F2": 1, "F3": taps}
    elif layout == SPATIAL:
        digits = {"D3": taps, "U3": 1, "V0": 1, "F0": taps, "F3": 1}
    elif channels_last:
        digits = {"D1": kh, "D2": kw, "D3": i, "U1": 1, "U3": kh, "V0": kw, "V2": 1}
        digits |= {"F0": i * taps, "F1": kw, "F2": 1, "F3": taps}
    else:
        digits = {"D2": i * kh, "D3": kw, "U2": 1, "V0": kw, "V3": 1, "F0": i * taps, "F2": kw, "F3": 1}
    names = ("D1", "D2", "D3", "U0", "U1", "U2", "U3", "V0", "V2", "V3", "F0", "F1", "F2", "F3")
    return {name: digits.get(name, int(name[0] == "D")) for name in names}


def _weight_size(layout: int, u: Tensor, v: Tensor) -> tuple[int, ...]:
    if layout == LINEAR:
        return v.shape[2], u.shape[2]
    if layout == KERNEL:
        return v.shape[2], u.shape[2], u.shape[3], v.shape[3]
    return *v.shape[2:], *u.shape[2:]


def _precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless the user allows TF32 for PyTorch's own."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def _side_settings(m: Side, n: Side) -> dict[str, int]:
    return {
        "M_RADIX": m.radix,
        "N_RADIX": n.radix,
        "M_FACTOR1": m.factor1,
        "M_FACTOR0": m.factor0,
        "N_FACTOR1": n.factor1,
        "N_FACTOR0": n.factor0,
    }


def _acc(dtype: torch.dtype):
    return TL_DTYPES[accumulator(dtype)]


def flat_weights(layout: int, size) -> dict[str, int]:
    """Weights of the positions in u and v (that of v in two digits) in the flat position in W."""
    o, i, kh, kw = (*size, 1, 1)[:4]
    radix, u, v1, v0 = {
        LINEAR: (1, 1, i, 0),
        SPATIAL: (1, 1, kh * kw, 0),
        KERNEL: (kw, kw, i * kh * kw, 1),
        VIEW: (1, o * i, 1, 0),
    }[layout]
    return {"F_RADIX": radix, "FU": u, "FV1": v1, "FV0": v0}


def rank1_weight(mu: Tensor | None, u: Tensor, v: Tensor, layout: int, channels_last: bool) -> Tensor:
    return _rank1_weight(mu, None, u, v, layout, channels_last)


def compact_weight(u: Tensor, v: Tensor, values: Tensor, index: Tensor, layout: int, channels_last: bool) -> Tensor:
    return _rank1_weight(values, index, u, v, layout, channels_last)


def _rank1_weight(mu, index, u: Tensor, v: Tensor, layout: int, channels_last: bool) -> Tensor:
    """μ dense, or values on the support `index`."""
    size = _weight_size(layout, u, v)
    last = channels_last and len(size) == 4
    out = empty_weight(u, size, last and layout != VIEW)
    n = out[:1].numel()
    if out.numel():
        bits = starts = None
        bits_client = 0
        if index is None:
            mu, mu_client = in_format(mu, out)
        else:
            mu, mu_client = slices(mu)
            bits, starts, bits_client = support_bits(index, size)
        (u, u_client), (v, v_client) = slices(u), slices(v)
        block = 1024 if u.element_size() < 4 else 512
        blocks = triton.cdiv(n, block)
        with torch.cuda.device_of(u):
            rank1_kernel[(blocks * out.shape[0],)](
                out,
                mu,
                bits,
                starts,
                u,
                v,
                n,
                blocks,
                mu_client,
                bits_client,
                0 if index is None else index.shape[1],
                u_client,
                v_client,
                u_size=u[0, 0].numel(),
                v_size=v[0, 0].numel(),
                **rank1_digits(layout, size, last),
                RANK=u.shape[1],
                MU=0 if mu is None else 1 if index is None else 2,
                ACC=_acc(u.dtype),
                INDEX=tl.int32 if n < INT32_LIMIT else tl.int64,
                BLOCK=block,
                num_warps=4,
            )
    return to_format(out, channels_last) if last and layout == VIEW else out


def rank1_weight_backward(grad: Tensor, u: Tensor, v: Tensor, layout: int, needs: int) -> tuple[Tensor, Tensor]:
    return _rank1_weight_backward(grad, None, u, v, layout, needs & 3)[:2]


def compact_weight_backward(
    grad: Tensor, u: Tensor, v: Tensor, values: Tensor, index: Tensor, layout: int, needs: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _rank1_weight_backward(grad, index, u, v, layout, needs)


def _rank1_weight_backward(grad, index, u: Tensor, v: Tensor, layout: int, needs: int):
    """(du, dv, dW on the support `index`)."""
    need_u, need_v, need_mu = (bool(needs >> bit & 1) for bit in range(3))
    k, rank = u.shape[:2]
    grad, grad_client = gradient(grad, layout == VIEW)
    size = _weight_size(layout, u, v)
    u_side, v_side = rank1_sides(layout, size, grad.stride()[1:])
    if not (grad.numel() and needs):
        shapes = u.shape if need_u else 0, v.shape if need_v else 0, index.shape if need_mu else 0
        return tuple(u.new_zeros(shape) for shape in shapes)
    dmu, bits, starts, bits_client = u.new_empty(index.shape if need_mu else 0), None, None, 0
    if need_mu:
        bits, starts, bits_client = support_bits(index, size)
    (u, u_client), (v, v_client) = slices(u), slices(v)
    block_u = min(triton.next_power_of_2(u_side.size), 64)
    block_v = min(triton.next_power_of_2(v_side.size), 4096 // block_u, 256)
    u_blocks, v_blocks = triton.cdiv(u_side.size, block_u), triton.cdiv(v_side.size, block_v)
    acc = accumulator(u.dtype)
    du = u.new_empty(k, v_blocks, *u.shape[1:], dtype=u.dtype if v_blocks == 1 else acc) if need_u else None
    dv = v.new_empty(k, u_blocks, *v.shape[1:], dtype=v.dtype if u_blocks == 1 else acc) if need_v else None
    with torch.cuda.device_of(u):
        rank1_backward_kernel[(k * u_blocks * v_blocks,)](
            grad,
            u,
            v,
            du,
            dv,
            dmu if need_mu else None,
            bits,
            starts,
            u_blocks,
            v_blocks,
            grad_client,
            u_client,
            v_client,
            dmu.stride(0),
            bits_client,
            dmu.shape[1] if need_mu else 0,
            u_side.size,
            v_side.size,
            u_side.stride1,
            u_side.stride0,
            v_side.stride1,
            v_side.stride0,
            U_RADIX=u_side.radix,
            V_RADIX=v_side.radix,
            U_FACTOR1=u_side.factor1,
            U_FACTOR0=u_side.factor0,
            V_FACTOR1=v_side.factor1,
            V_FACTOR0=v_side.factor0,
            **flat_weights(layout, size),
            RANK=rank,
            NEED_U=need_u,
            NEED_V=need_v,
            NEED_MU=need_mu,
            ACC=_acc(u.dtype),
            BLOCK_U=block_u,
            BLOCK_V=block_v,
            num_warps=4,
        )
    return _gather(du, u), _gather(dv, v), dmu


def _gather(parts: Tensor | None, like: Tensor) -> Tensor:
    """The sum over the blocks of `parts` [k, blocks, …] in a fixed order, in `like`'s dtype; empty for None."""
    if parts is None:
        return like.new_empty(0)
    return parts.squeeze(1) if parts.shape[1] == 1 else parts.sum(1).to(like.dtype)


def _tiles(dtype: torch.dtype, rank: int) -> dict[str, int]:
    block_r = 16 if rank <= 16 or dtype == torch.float64 else 32
    tile = 32 if dtype == torch.float64 else 64
    return {"BLOCK_M": tile, "BLOCK_N": tile, "BLOCK_R": block_r}


def _product(out, dense, x1, y1, x2, y2, strides, second_strides, m: Side, n: Side, scaling, plus) -> None:
    """Launch `product_kernel`.

    `strides` = (x row, x rank, y column, y rank), `second_strides` = (x2 row, y2 column).
    """
    if not out.numel():
        return
    dense, dense_client = in_format(dense, out)
    x1, x1_client = slices(x1)
    y1, y1_client = slices(y1)
    x2, x2_client = slices(x2) if x2 is not None else (None, 0)
    y2, y2_client = slices(y2) if y2 is not None else (None, 0)
    rank1 = x1.shape[-1]
    rank2 = x2.shape[-1] if x2 is not None else 1
    tiles = _tiles(out.dtype, max(rank1, rank2))
    m_blocks, n_blocks = triton.cdiv(m.size, tiles["BLOCK_M"]), triton.cdiv(n.size, tiles["BLOCK_N"])
    with torch.cuda.device_of(out):
        product_kernel[(out.shape[0] * m_blocks * n_blocks,)](
            out,
            dense,
            x1,
            y1,
            x2,
            y2,
            scaling,
            plus,
            m_blocks,
            n_blocks,
            out.stride(0),
            dense_client,
            x1_client,
            y1_client,
            x2_client,
            y2_client,
            *strides,
            *second_strides,
            m.size,
            n.size,
            m.stride1,
            m.stride0,
            n.stride1,
            n.stride0,
            **_side_settings(m, n),
            RANK1=rank1,
            RANK2=rank2,
            HAS_DENSE=dense is not None,
            HAS_SECOND=x2 is not None,
            ACC=_acc(out.dtype),
            PRECISION=_precision(out.dtype),
            **tiles,
            num_warps=4,
        )


def _contract(out, grad, x, y, factor, factor_strides, out_strides, m: Side, n: Side, scaling, plus) -> Tensor:
    """Launch `contract_kernel` for one gradient shaped as `out`; `x`, `y` are the other product, or None."""
    k = out.shape[0]
    width = factor.numel() // max(factor.shape[0] * n.size, 1)
    if not (out.numel() and grad.numel()):
        return torch.zeros_like(out)
    factor, factor_client = slices(factor)
    x, x_client = slices(x) if x is not None else (None, 0)
    y, y_client = slices(y) if y is not None else (None, 0)
    rank = x.shape[-1] if x is not None else 1
    tiles = _tiles(out.dtype, rank)
    block_c = min(max(triton.next_power_of_2(width), 16), tiles["BLOCK_N"])
    m_blocks, c_blocks = triton.cdiv(m.size, tiles["BLOCK_M"]), triton.cdiv(width, block_c)
    # enough programs to fill a large GPU even for one model, without going below 256 columns each
    splits = max(1, min(triton.cdiv(264, k * m_blocks * c_blocks), n.size // 256))
    dtype = out.dtype if splits == 1 else accumulator(out.dtype)
    parts = out.new_empty(k, splits, *out.shape[1:], dtype=dtype)
    with torch.cuda.device_of(out):
        contract_kernel[(k * m_blocks * c_blocks * splits,)](
            parts,
            grad,
            x,
            y,
            factor,
            scaling,
            plus,
            width,
            m.size * width,
            m_blocks,
            c_blocks,
            splits,
            grad.stride(0),
            x_client,
            y_client,
            factor_client,
            *factor_strides,
            *out_strides,
            m.size,
            n.size,
            m.stride1,
            m.stride0,
            n.stride1,
            n.stride0,
            **_side_settings(m, n),
            RANK=rank,
            STEPS=triton.cdiv(n.size, tiles["BLOCK_N"] * splits),
            HAS_OTHER=x is not None,
            ACC=_acc(out.dtype),
            PRECISION=_precision(out.dtype),
            **tiles,
            BLOCK_C=block_c,
            # by 4 warps float32, in registers, spills
            num_warps=8 if out.dtype == torch.float32 else 4,
        )
    return _gather(parts, out)


THIN_RANK = 32
"""Up to this rank one reading of dW costs less than one for each factor (bench/NOTES.md)."""


def _thin(grad, x1, y1, x2, y2, strides, m: Side, n: Side, scaling, plus) -> list[Tensor]:
    """Launch `thin_kernel`; the gradients of (x1, y1), or of (x1, y1, x2, y2).

    `strides` = (x1 row, x1 rank, y1 column, y1 rank).
    """
    factors = [x1, y1] if x2 is None else [x1, y1, x2, y2]
    two = x2 is not None
    rank1, rank2 = x1.numel() // max(x1.shape[0] * m.size, 1), x2.shape[-1] if two else 1
    width = max(triton.next_power_of_2(max(rank1, rank2)), 16)
    block_m, block_n = (64, 32) if x1.element_size() == 4 else (128, 64)
    k, stripes = grad.shape[0], triton.cdiv(m.size, block_m)
    splits = max(1, min(triton.cdiv(264, k * stripes), n.size // 256))
    acc = accumulator(x1.dtype)
    parts = []
    for position, factor in enumerate(factors):
        count = stripes if position % 2 else splits
        parts.append(factor.new_empty(k, count, *factor.shape[1:], dtype=factor.dtype if count == 1 else acc))
    held = [slices(factor) for factor in factors] + [(None, 0)] * (4 - len(factors))
    with torch.cuda.device_of(grad):
        thin_kernel[(k * stripes * splits,)](
            *parts,
            *[None] * (4 - len(parts)),
            grad,
            *[factor for factor, _ in held],
            scaling,
            plus,
            stripes,
            splits,
            grad.stride(0),
            *[client for _, client in held],
            *strides,
            m.size,
            n.size,
            m.stride1,
            m.stride0,
            n.stride1,
            n.stride0,
            **_side_settings(m, n),
            RANK1=rank1,
            RANK2=rank2,
            TWO=two,
            STEPS=triton.cdiv(n.size, block_n * splits),
            ACC=_acc(x1.dtype),
            PRECISION=_precision(x1.dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            WIDTH=width,
            num_warps=8,
        )
    return [_gather(part, factor) for part, factor in zip(parts, factors, strict=True)]


def _thin_pays(grad: Tensor, *ranks: int) -> bool:
    return grad.numel() > 0 and grad.dtype != torch.float64 and min(ranks) > 0 and max(ranks) <= THIN_RANK


def lowrank_weight(
    sigma: Tensor | None, a: Tensor, b: Tensor, layout: int, size: list[int], scaling: float, channels_last: bool
) -> Tensor:
    last = channels_last and len(size) == 4
    out = empty_weight(a, size, last and layout != VIEW)
    rank, columns = a.shape[1:]
    m, n = lowrank_sides(layout, size, out.stride()[1:])
    _product(out, sigma, b, a, None, None, (rank, 1, 1, columns), (0, 0), m, n, float(scaling), 0)
    return to_format(out, channels_last) if last and layout == VIEW else out


def lowrank_weight_backward(
    grad: Tensor, a: Tensor, b: Tensor, layout: int, size: list[int], scaling: float, needs: int
) -> tuple[Tensor, Tensor]:
    grad, _ = gradient(grad, layout == VIEW)
    m, n = lowrank_sides(layout, size, grad.stride()[1:])
    rank, columns = a.shape[1:]
    if needs & 3 == 3 and _thin_pays(grad, rank):
        db, da = _thin(grad, b, a, None, None, (rank, 1, 1, columns), m, n, float(scaling), 0)
        return da, db
    da, db = a.new_empty(0), b.new_empty(0)
    if needs & 1:
        like = a.new_empty(a.shape)
        da = _contract(like, grad, None, None, b, (rank, 1), (1, columns), n, m, float(scaling), 0)
    if needs & 2:
        like = b.new_empty(b.shape)
        db = _contract(like, grad, None, None, a, (1, columns), (rank, 1), m, n, float(scaling), 0)
    return da, db


def hadamard_weight(
    x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor, size: list[int], personalized: bool, channels_last: bool
) -> Tensor:
    out = empty_weight(x1, size, channels_last)
    m, n = hadamard_sides(size, out.stride()[1:])
    r1, r2 = x1.shape[2], x2.shape[2]
    _product(out, None, x1, y1, x2, y2, (r1, 1, r1, 1), (r2, r2), m, n, 1.0, int(personalized))
    return out


def hadamard_weight_backward(
    grad: Tensor, x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor, size: list[int], personalized: bool, needs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad, _ = gradient(grad, False)
    m, n = hadamard_sides(size, grad.stride()[1:])
    rank = x1.shape[2]
    if needs & 15 == 15 and _thin_pays(grad, rank, x2.shape[2]):
        return tuple(_thin(grad, x1, y1, x2, y2, (rank, 1, rank, 1), m, n, 1.0, int(personalized)))
    grads = []
    # each factor of one pair against dW times the product of the other pair
    for bit, (like, factor, x, y, plus) in enumerate(
        ((x1, y1, x2, y2, personalized), (y1, x1, y2, x2, personalized), (x2, y2, x1, y1, 0), (y2, x2, y1, x1, 0))
    ):
        if not needs >> bit & 1:
            grads.append(like.new_empty(0))
            continue
        rank = like.shape[2]
        sides = (m, n) if bit % 2 == 0 else (n, m)
        out = like.new_empty(like.shape)
        grads.append(_contract(out, grad, x, y, factor, (rank, 1), (rank, 1), *sides, 1.0, int(plus)))
    return tuple(grads)
