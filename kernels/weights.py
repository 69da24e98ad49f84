"""The weight ops: one elementwise kernel and its reduction for rank 1, three matrix kernels for the products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.base.formats import KERNEL, LINEAR, SPATIAL, VIEW, empty_weight, to_format
from fastfact.kernels.geometry import (
    INT32_LIMIT,
    Factor,
    Side,
    Slices,
    accumulator,
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
    support,
    u,
    v,
    n,
    blocks,
    DIGITS: tl.constexpr,
    IN_U: tl.constexpr,
    IN_V: tl.constexpr,
    IN_W: tl.constexpr,
    RANK: tl.constexpr,
    MU: tl.constexpr,
    ACC: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[client, p] = μ[client, p] + Σ_r u · v, p running over W in memory order, in four digits (`rank1_digits`).

    MU: 0 none, 1 dense, 2 on a support.
    """
    pid = tl.program_id(0)
    client = (pid // blocks).to(tl.int64)
    p = (pid % blocks).to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    inside = p < n
    d3 = p % DIGITS[3]
    rest = p // DIGITS[3]
    d2 = rest % DIGITS[2]
    rest = rest // DIGITS[2]
    d1 = rest % DIGITS[1]
    d0 = rest // DIGITS[1]
    u_at = u.data + client * u.client + (d0 * IN_U[0] + d1 * IN_U[1] + d2 * IN_U[2] + d3 * IN_U[3])
    v_at = v.data + client * v.client + (d0 * IN_V[0] + d1 * IN_V[1] + d2 * IN_V[2] + d3 * IN_V[3])
    acc = tl.zeros([BLOCK], ACC)
    for r in range(RANK):
        left = tl.load(u_at + r * u.rank, mask=inside, other=0.0)
        right = tl.load(v_at + r * v.rank, mask=inside, other=0.0)
        acc += left.to(ACC) * right.to(ACC)
    if MU == 1:
        acc += tl.load(mu.data + client * mu.client + p, mask=inside, other=0.0).to(ACC)
    if MU == 2:
        flat = d0 * IN_W[0] + d1 * IN_W[1] + d2 * IN_W[2] + d3 * IN_W[3]
        on_support, place = support_tile(support, client, flat, inside)
        acc += tl.load(mu.data + client * mu.client + place, mask=on_support, other=0.0).to(ACC)
    tl.store(out + client * n + p, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def index_of(e, DIGITS: tl.constexpr):
    """The row of a factor that belongs to position e of a `Side`."""
    return e // DIGITS[0] * DIGITS[1] + e % DIGITS[0] * DIGITS[2]


@triton.jit
def offset_of(e, strides, DIGITS: tl.constexpr):
    """Where that row (or column) begins in W."""
    return (e // DIGITS[0]).to(tl.int64) * strides[0] + (e % DIGITS[0]).to(tl.int64) * strides[1]


@triton.jit
def rank1_backward_kernel(
    grad,
    u,
    v,
    du,
    dv,
    dmu,
    support,
    u_blocks,
    v_blocks,
    u_size,
    v_size,
    u_strides,
    v_strides,
    U_DIGITS: tl.constexpr,
    V_DIGITS: tl.constexpr,
    FLAT: tl.constexpr,
    RANK: tl.constexpr,
    NEED_U: tl.constexpr,
    NEED_V: tl.constexpr,
    NEED_MU: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile of dW, read once: its part of du [client, v block, r, u] and of dv [client, u block, r, v], and its
    elements on the support of μ. FLAT: as `flat_weights` gives them.
    """
    pid = tl.program_id(0)
    u_block = pid % u_blocks
    v_block = pid // u_blocks % v_blocks
    client = (pid // u_blocks // v_blocks).to(tl.int64)
    eu = u_block * BLOCK_U + tl.arange(0, BLOCK_U)
    ev = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    u_inside = eu < u_size
    v_inside = ev < v_size
    offset = offset_of(ev, v_strides, V_DIGITS)[:, None] + offset_of(eu, u_strides, U_DIGITS)[None, :]
    inside = v_inside[:, None] & u_inside[None, :]
    tile = tl.load(grad.data + client * grad.client + offset, mask=inside, other=0.0).to(ACC)
    u_index = index_of(eu, U_DIGITS)
    v_index = index_of(ev, V_DIGITS)
    if NEED_MU:
        flat = (v_index // FLAT[0] * FLAT[2] + v_index % FLAT[0] * FLAT[3])[:, None] + (u_index * FLAT[1])[None, :]
        on_support, place = support_tile(support, client, flat, inside)
        tl.store(dmu.data + client * dmu.client + place, tile.to(dmu.data.dtype.element_ty), mask=on_support)
    for r in range(RANK):
        if NEED_U:
            right = tl.load(v.data + client * v.client + r * v.rank + v_index, mask=v_inside, other=0.0).to(ACC)
            part = du + ((client * v_blocks + v_block) * RANK + r) * u_size
            tl.store(part + u_index, tl.sum(tile * right[:, None], 0).to(du.dtype.element_ty), mask=u_inside)
        if NEED_V:
            left = tl.load(u.data + client * u.client + r * u.rank + u_index, mask=u_inside, other=0.0).to(ACC)
            part = dv + ((client * u_blocks + u_block) * RANK + r) * v_size
            tl.store(part + v_index, tl.sum(tile * left[None, :], 1).to(dv.dtype.element_ty), mask=v_inside)


@triton.jit
def product_tile(
    x,
    y,
    client,
    m,
    n,
    m_inside,
    n_inside,
    RANK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Σ_r x[m, r] y[n, r] as a tile [BLOCK_M, BLOCK_N]."""
    x_at = x.data + client * x.client + (m * x.row)[:, None]
    y_at = y.data + client * y.client + (n * y.row)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for start in range(0, RANK, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        left = tl.load(
            x_at + (r.to(tl.int64) * x.rank)[None, :], mask=m_inside[:, None] & (r < RANK)[None, :], other=0.0
        )
        right = tl.load(
            y_at + (r.to(tl.int64) * y.rank)[:, None], mask=n_inside[None, :] & (r < RANK)[:, None], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
    return acc


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
    rows,
    columns,
    m_strides,
    n_strides,
    M_DIGITS: tl.constexpr,
    N_DIGITS: tl.constexpr,
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
    m = index_of(em, M_DIGITS).to(tl.int64)
    n = index_of(en, N_DIGITS).to(tl.int64)
    weight = product_tile(x1, y1, client, m, n, m_inside, n_inside, RANK1, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)
    offset = offset_of(em, m_strides, M_DIGITS)[:, None] + offset_of(en, n_strides, N_DIGITS)[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    if HAS_SECOND:
        second = product_tile(
            x2, y2, client, m, n, m_inside, n_inside, RANK2, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R
        )
        weight = weight * (second + plus)
    else:
        weight = weight * tl.full([1, 1], scaling, ACC)
    if HAS_DENSE:
        weight += tl.load(dense.data + client * dense.client + offset, mask=inside, other=0.0).to(ACC)
    tl.store(out.data + client * out.client + offset, weight.to(out.data.dtype.element_ty), mask=inside)


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
    m_blocks,
    c_blocks,
    splits,
    rows,
    columns,
    m_strides,
    n_strides,
    M_DIGITS: tl.constexpr,
    N_DIGITS: tl.constexpr,
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
    m = index_of(em, M_DIGITS).to(tl.int64)
    m_offset = offset_of(em, m_strides, M_DIGITS)
    acc = tl.zeros([BLOCK_M, BLOCK_C], ACC)
    for step in range(STEPS):
        en = (step * splits + split) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_inside = en < columns
        n = index_of(en, N_DIGITS).to(tl.int64)
        tile = tl.load(
            grad.data + client * grad.client + (m_offset[:, None] + offset_of(en, n_strides, N_DIGITS)[None, :]),
            mask=m_inside[:, None] & n_inside[None, :],
            other=0.0,
        )
        if HAS_OTHER:
            other = product_tile(
                x, y, client, m, n, m_inside, n_inside, RANK, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R
            )
            tile = (tile.to(ACC) * (other + plus)).to(grad.data.dtype.element_ty)
        at = (n * factor.row)[:, None] + (c.to(tl.int64) * factor.rank)[None, :]
        right = tl.load(
            factor.data + client * factor.client + at, mask=n_inside[:, None] & c_inside[None, :], other=0.0
        )
        acc = tl.dot(tile, right, acc, input_precision=PRECISION, out_dtype=ACC)
    part = out.data + (client * splits + split) * out.client
    tl.store(
        part + ((m * out.row)[:, None] + (c.to(tl.int64) * out.rank)[None, :]),
        (acc * tl.full([1, 1], scaling, ACC)).to(out.data.dtype.element_ty),
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
    rows,
    columns,
    m_strides,
    n_strides,
    M_DIGITS: tl.constexpr,
    N_DIGITS: tl.constexpr,
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
    m = index_of(em, M_DIGITS).to(tl.int64)
    m_offset = offset_of(em, m_strides, M_DIGITS)
    r = tl.arange(0, WIDTH).to(tl.int64)
    x1_at = (m * x1.row)[:, None] + (r * x1.rank)[None, :]
    x1_inside = m_inside[:, None] & (r < RANK1)[None, :]
    left1 = tl.load(x1.data + client * x1.client + x1_at, mask=x1_inside, other=0.0)
    acc1 = tl.zeros([BLOCK_M, WIDTH], ACC)
    if TWO:
        x2_at = (m * x2.row)[:, None] + (r * x2.rank)[None, :]
        x2_inside = m_inside[:, None] & (r < RANK2)[None, :]
        left2 = tl.load(x2.data + client * x2.client + x2_at, mask=x2_inside, other=0.0)
        acc2 = tl.zeros([BLOCK_M, WIDTH], ACC)
    scale = tl.full([1, 1], scaling, ACC)
    for step in range(STEPS):
        en = (step * splits + split) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_inside = en < columns
        n = index_of(en, N_DIGITS).to(tl.int64)
        offset = m_offset[:, None] + offset_of(en, n_strides, N_DIGITS)[None, :]
        inside = m_inside[:, None] & n_inside[None, :]
        tile = tl.load(grad.data + client * grad.client + offset, mask=inside, other=0.0)
        y1_at = (n * y1.row)[:, None] + (r * y1.rank)[None, :]
        y1_inside = n_inside[:, None] & (r < RANK1)[None, :]
        right1 = tl.load(y1.data + client * y1.client + y1_at, mask=y1_inside, other=0.0)
        if TWO:
            y2_at = (n * y2.row)[:, None] + (r * y2.rank)[None, :]
            y2_inside = n_inside[:, None] & (r < RANK2)[None, :]
            right2 = tl.load(y2.data + client * y2.client + y2_at, mask=y2_inside, other=0.0)
            zero = tl.zeros([BLOCK_M, BLOCK_N], ACC)
            first = tl.dot(left1, tl.trans(right1), zero, input_precision=PRECISION, out_dtype=ACC)
            second = tl.dot(left2, tl.trans(right2), zero, input_precision=PRECISION, out_dtype=ACC)
            whole = tile.to(ACC)
            # zero times a product that overflowed is not zero
            tile2 = tl.where(inside, whole * first, 0.0).to(grad.data.dtype.element_ty)
            tile = tl.where(inside, whole * (second + plus), 0.0).to(grad.data.dtype.element_ty)
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


def rank1_digits(layout: int, size, channels_last: bool) -> dict[str, tuple[int, int, int, int]]:
    """DIGITS: the sizes of the digits of a position in W in memory order, that of the first is not needed. IN_U, IN_V,
    IN_W: the weight of each digit in the position in u, in v and in flat W."""
    o, i, kh, kw = (*size, 1, 1)[:4]
    taps = kh * kw
    if layout == LINEAR:
        found = (1, 1, 1, i), (0, 0, 0, 1), (1, 0, 0, 0), (i, 0, 0, 1)
    elif layout == VIEW:
        found = (1, 1, 1, o * i), (1, 0, 0, 0), (0, 0, 0, 1), (o * i, 0, 0, 1)
    elif layout == SPATIAL and channels_last:
        found = (1, 1, taps, i), (0, 0, 1, 0), (i, 0, 0, 1), (i * taps, 0, 1, taps)
    elif layout == SPATIAL:
        found = (1, 1, 1, taps), (0, 0, 0, 1), (1, 0, 0, 0), (taps, 0, 0, 1)
    elif channels_last:
        found = (1, kh, kw, i), (0, 1, 0, kh), (kw, 0, 1, 0), (i * taps, kw, 1, taps)
    else:
        found = (1, 1, i * kh, kw), (0, 0, 1, 0), (kw, 0, 0, 1), (i * taps, 0, kw, 1)
    return dict(zip(("DIGITS", "IN_U", "IN_V", "IN_W"), found, strict=True))


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


def _sides(m: Side, n: Side) -> dict[str, int | tuple[int, ...]]:
    """The two sides of W as the matrix kernels take them."""
    sizes = {"rows": m.size, "columns": n.size, "m_strides": m.strides, "n_strides": n.strides}
    return sizes | {"M_DIGITS": m.digits, "N_DIGITS": n.digits}


def _acc(dtype: torch.dtype):
    return TL_DTYPES[accumulator(dtype)]


def flat_weights(layout: int, size) -> tuple[int, int, int, int]:
    """(the size of the second digit of a position in v, then what the position in u and the two digits of that in v
    weigh in the flat position in W)."""
    o, i, kh, kw = (*size, 1, 1)[:4]
    return {
        LINEAR: (1, 1, i, 0),
        SPATIAL: (1, 1, kh * kw, 0),
        KERNEL: (kw, kw, i * kh * kw, 1),
        VIEW: (1, o * i, 1, 0),
    }[layout]


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
        block = 1024 if u.element_size() < 4 else 512
        blocks = triton.cdiv(n, block)
        with torch.cuda.device_of(u):
            rank1_kernel[(blocks * out.shape[0],)](
                out,
                in_format(mu, out) if index is None else slices(mu),
                None if index is None else support_bits(index, size),
                Factor.of(u, 1, tl.constexpr(u[0, 0].numel())),
                Factor.of(v, 1, tl.constexpr(v[0, 0].numel())),
                n,
                blocks,
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
    grad = gradient(grad, layout == VIEW)
    size = _weight_size(layout, u, v)
    u_side, v_side = rank1_sides(layout, size, grad.data.stride()[1:])
    if not (grad.data.numel() and needs):
        shapes = u.shape if need_u else 0, v.shape if need_v else 0, index.shape if need_mu else 0
        return tuple(u.new_zeros(shape) for shape in shapes)
    dmu = u.new_empty(index.shape if need_mu else 0)
    block_u = min(triton.next_power_of_2(u_side.size), 64)
    block_v = min(triton.next_power_of_2(v_side.size), 4096 // block_u, 256)
    u_blocks, v_blocks = triton.cdiv(u_side.size, block_u), triton.cdiv(v_side.size, block_v)
    acc = accumulator(u.dtype)
    du = u.new_empty(k, v_blocks, *u.shape[1:], dtype=u.dtype if v_blocks == 1 else acc) if need_u else None
    dv = v.new_empty(k, u_blocks, *v.shape[1:], dtype=v.dtype if u_blocks == 1 else acc) if need_v else None
    with torch.cuda.device_of(u):
        rank1_backward_kernel[(k * u_blocks * v_blocks,)](
            grad,
            Factor.of(u, 1, u_side.size),
            Factor.of(v, 1, v_side.size),
            du,
            dv,
            slices(dmu) if need_mu else None,
            support_bits(index, size) if need_mu else None,
            u_blocks,
            v_blocks,
            u_side.size,
            v_side.size,
            u_side.strides,
            v_side.strides,
            U_DIGITS=u_side.digits,
            V_DIGITS=v_side.digits,
            FLAT=flat_weights(layout, size),
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


def _product(out, dense, x1: Factor, y1: Factor, x2, y2, m: Side, n: Side, scaling, plus, ranks) -> None:
    """Launch `product_kernel`; x2 and y2 may be None. ranks: that of (x1, y1), that of (x2, y2) if they are there."""
    if not out.numel():
        return
    tiles = _tiles(out.dtype, max(ranks))
    m_blocks, n_blocks = triton.cdiv(m.size, tiles["BLOCK_M"]), triton.cdiv(n.size, tiles["BLOCK_N"])
    with torch.cuda.device_of(out):
        product_kernel[(out.shape[0] * m_blocks * n_blocks,)](
            Slices(out, out.stride(0)),
            in_format(dense, out),
            x1,
            y1,
            x2,
            y2,
            scaling,
            plus,
            m_blocks,
            n_blocks,
            **_sides(m, n),
            RANK1=ranks[0],
            RANK2=ranks[-1],
            HAS_DENSE=dense is not None,
            HAS_SECOND=x2 is not None,
            ACC=_acc(out.dtype),
            PRECISION=_precision(out.dtype),
            **tiles,
            num_warps=4,
        )


def _contract(like: Factor, grad: Slices, x, y, factor: Factor, m: Side, n: Side, scaling, plus, rank=1) -> Tensor:
    """Launch `contract_kernel` for the gradient of `like`; x and y are the other product, of `rank`, or None."""
    out = like.data.new_empty(like.data.shape)
    k = out.shape[0]
    width = factor.data.numel() // max(factor.data.shape[0] * n.size, 1)
    if not (out.numel() and grad.data.numel()):
        return torch.zeros_like(out)
    tiles = _tiles(out.dtype, rank)
    block_c = min(max(triton.next_power_of_2(width), 16), tiles["BLOCK_N"])
    m_blocks, c_blocks = triton.cdiv(m.size, tiles["BLOCK_M"]), triton.cdiv(width, block_c)
    # enough programs to fill a large GPU even for one model, without going below 256 columns each
    splits = max(1, min(triton.cdiv(264, k * m_blocks * c_blocks), n.size // 256))
    dtype = out.dtype if splits == 1 else accumulator(out.dtype)
    parts = out.new_empty(k, splits, *out.shape[1:], dtype=dtype)
    with torch.cuda.device_of(out):
        contract_kernel[(k * m_blocks * c_blocks * splits,)](
            Factor(parts, m.size * width, like.row, like.rank),
            grad,
            x,
            y,
            factor,
            scaling,
            plus,
            width,
            m_blocks,
            c_blocks,
            splits,
            **_sides(m, n),
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


def _thin(grad: Slices, factors: list[Factor], ranks, m: Side, n: Side, scaling, plus) -> list[Tensor]:
    """Launch `thin_kernel`; the gradients of factors (x1, y1), or of (x1, y1, x2, y2), ranks as for `_product`."""
    dtype = grad.data.dtype
    width = max(triton.next_power_of_2(max(ranks)), 16)
    block_m, block_n = (64, 32) if dtype.itemsize == 4 else (128, 64)
    k, stripes = grad.data.shape[0], triton.cdiv(m.size, block_m)
    splits = max(1, min(triton.cdiv(264, k * stripes), n.size // 256))
    acc = accumulator(dtype)
    parts = []
    for position, (factor, *_) in enumerate(factors):
        count = stripes if position % 2 else splits
        parts.append(factor.new_empty(k, count, *factor.shape[1:], dtype=dtype if count == 1 else acc))
    absent = [None] * (4 - len(factors))
    with torch.cuda.device_of(grad.data):
        thin_kernel[(k * stripes * splits,)](
            *parts,
            *absent,
            grad,
            *factors,
            *absent,
            scaling,
            plus,
            stripes,
            splits,
            **_sides(m, n),
            RANK1=ranks[0],
            RANK2=ranks[-1],
            TWO=len(factors) == 4,
            STEPS=triton.cdiv(n.size, block_n * splits),
            ACC=_acc(dtype),
            PRECISION=_precision(dtype),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            WIDTH=width,
            num_warps=8,
        )
    return [_gather(part, factor.data) for part, factor in zip(parts, factors, strict=True)]


def _thin_pays(grad: Tensor, *ranks: int) -> bool:
    return grad.numel() > 0 and grad.dtype != torch.float64 and min(ranks) > 0 and max(ranks) <= THIN_RANK


def lowrank_weight(
    sigma: Tensor | None, a: Tensor, b: Tensor, layout: int, size: list[int], scaling: float, channels_last: bool
) -> Tensor:
    last = channels_last and len(size) == 4
    out = empty_weight(a, size, last and layout != VIEW)
    m, n = lowrank_sides(layout, size, out.stride()[1:])
    left, right = _lowrank_factors(a, b)
    _product(out, sigma, left, right, None, None, m, n, float(scaling), 0, a.shape[1:2])
    return to_format(out, channels_last) if last and layout == VIEW else out


def _lowrank_factors(a: Tensor, b: Tensor) -> tuple[Factor, Factor]:
    """B [k, rows, rank] and A [k, rank, columns], whose transpose has the rows of the other side."""
    rank, columns = a.shape[1:]
    return Factor.of(b, tl.constexpr(rank), 1), Factor.of(a, 1, columns)


def lowrank_weight_backward(
    grad: Tensor, a: Tensor, b: Tensor, layout: int, size: list[int], scaling: float, needs: int
) -> tuple[Tensor, Tensor]:
    held = gradient(grad, layout == VIEW)
    m, n = lowrank_sides(layout, size, held.data.stride()[1:])
    left, right = _lowrank_factors(a, b)
    scale, rank = float(scaling), a.shape[1]
    if needs & 3 == 3 and _thin_pays(grad, rank):
        db, da = _thin(held, [left, right], (rank,), m, n, scale, 0)
        return da, db
    da = _contract(right, held, None, None, left, n, m, scale, 0) if needs & 1 else a.new_empty(0)
    db = _contract(left, held, None, None, right, m, n, scale, 0) if needs & 2 else b.new_empty(0)
    return da, db


def hadamard_weight(
    x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor, size: list[int], personalized: bool, channels_last: bool
) -> Tensor:
    out = empty_weight(x1, size, channels_last)
    m, n = hadamard_sides(size, out.stride()[1:])
    factors = [Factor.of(factor, tl.constexpr(factor.shape[2]), 1) for factor in (x1, y1, x2, y2)]
    _product(out, None, *factors, m, n, 1.0, int(personalized), (x1.shape[2], x2.shape[2]))
    return out


def hadamard_weight_backward(
    grad: Tensor, x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor, size: list[int], personalized: bool, needs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held = gradient(grad, False)
    m, n = hadamard_sides(size, held.data.stride()[1:])
    ranks, plus = (x1.shape[2], x2.shape[2]), int(personalized)
    factors = [Factor.of(factor, tl.constexpr(factor.shape[2]), 1) for factor in (x1, y1, x2, y2)]
    if needs & 15 == 15 and _thin_pays(grad, *ranks):
        return tuple(_thin(held, factors, ranks, m, n, 1.0, plus))
    grads = []
    for bit, like in enumerate(factors):
        if not needs >> bit & 1:
            grads.append(like.data.new_empty(0))
            continue
        # each factor of one pair against dW times the product of the other pair
        other, second = factors[bit ^ 1], bit >= 2
        x, y = factors[bit ^ 2], factors[bit ^ 3]
        sides = (n, m) if bit % 2 else (m, n)
        grads.append(_contract(like, held, x, y, other, *sides, 1.0, 0 if second else plus, ranks[not second]))
    return tuple(grads)
