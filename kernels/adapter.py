"""A frozen linear layer with low-rank factors: the product with σ is the library's, what the factors add is made here.

Two kernels, with the clients in the grid. `adapter_kernel` takes rows to their few numbers and from there on to what is
added, so that forward or for the gradient of the input the rows are read once; `factor_kernel` sums over rows for the
gradients of the factors. As `torch.bmm` these are seven calls of products whose narrow side is no multiple of 8.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfact.kernels.geometry import Factor, Slices, accumulator, slices
from fastfact.kernels.launch import Tile, first_that_fits
from fastfact.kernels.weights import TL_DTYPES, _gather, _precision

MAX_RANK = 128
"""Up to this rank the few numbers of a tile of rows stay in registers; wider factors are left to the library."""
PROGRAMS = 264
"""Enough to fill a large GPU."""
OWN = 1 << 4


@triton.jit(do_not_specialize=["rows", "row_blocks", "splits"])
def adapter_kernel(
    out,
    hidden,
    x,
    down,
    up,
    bias,
    scaling: tl.float64,
    rows,
    row_blocks,
    splits,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    STEPS: tl.constexpr,
    KEEP: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """hidden[client, row, r] = scaling · Σ_i x[row, i] down[i, r], and for a split of the columns (STEPS tiles or none)
    out[client, row, o] = Σ_r hidden[row, r] up[r, o], added to what is there if asked for, with the bias.
    """
    pid = tl.program_id(0)
    block = pid % row_blocks
    split = pid // row_blocks % splits
    client = (pid // row_blocks // splits).to(tl.int64)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    row = row.to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    narrow = r < RANK
    x_at = x.data + client * x.client + (row * IN)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], ACC)
    for start in range(0, IN, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        left = tl.load(x_at + i[None, :], mask=inside[:, None] & (i < IN)[None, :], other=0.0)
        right = tl.load(
            down.data + client * down.client + ((i.to(tl.int64) * down.row)[:, None] + (r * down.rank)[None, :]),
            mask=(i < IN)[:, None] & narrow[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
    few = (acc * tl.full([1, 1], scaling, ACC)).to(x.data.dtype.element_ty)
    if KEEP:
        kept = hidden + client * rows * RANK + ((row * RANK)[:, None] + r[None, :])
        tl.store(kept, few, mask=inside[:, None] & narrow[None, :] & (split == 0))
    if STEPS > 0:
        for step in range(STEPS):
            o = (step * splits + split) * BLOCK_O + tl.arange(0, BLOCK_O)
            wide = o < OUT
            factor = tl.load(
                up.data + client * up.client + ((r * up.rank)[:, None] + (o.to(tl.int64) * up.row)[None, :]),
                mask=narrow[:, None] & wide[None, :],
                other=0.0,
            )
            part = tl.dot(few, factor, input_precision=PRECISION, out_dtype=ACC)
            at = out + client * rows * OUT + ((row * OUT)[:, None] + o[None, :])
            mask = inside[:, None] & wide[None, :]
            if ADD:
                part += tl.load(at, mask=mask, other=0.0).to(ACC)
            if HAS_BIAS:
                part += tl.load(bias.data + client * bias.client + o, mask=wide, other=0.0).to(ACC)[None, :]
            tl.store(at, part.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "steps", "splits"])
def factor_kernel(
    out,
    thin,
    wide,
    rows,
    steps,
    splits,
    column_blocks,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[client, split, r, c] = Σ thin[row, r] wide[row, c] over a split of the rows, `steps` tiles of them."""
    pid = tl.program_id(0)
    c = pid % column_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    split = pid // column_blocks % splits
    client = (pid // column_blocks // splits).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    narrow, inside = r < RANK, c < WIDTH
    acc = tl.zeros([BLOCK_R, BLOCK_C], ACC)
    for step in range(steps):
        row = (step * splits + split) * BLOCK_N + tl.arange(0, BLOCK_N)
        there = row < rows
        row = row.to(tl.int64)
        left = tl.load(
            thin.data + client * thin.client + ((row * RANK)[None, :] + r[:, None]),
            mask=there[None, :] & narrow[:, None],
            other=0.0,
        )
        right = tl.load(
            wide.data + client * wide.client + ((row * WIDTH)[:, None] + c[None, :]),
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
    part = out.data + (client * splits + split) * out.client
    tl.store(
        part + ((r * out.rank)[:, None] + (c.to(tl.int64) * out.row)[None, :]),
        acc.to(out.data.dtype.element_ty),
        mask=narrow[:, None] & inside[None, :],
    )


def _tiles(rows: int, width: int, depth: int, rank: int, dtype: torch.dtype) -> list[Tile]:
    """Tiles of rows × `width` columns, `depth` numbers at a time, the largest first."""
    half, block_r = dtype.itemsize == 2, max(16, triton.next_power_of_2(rank))
    tall = (64 if half else 32) if dtype != torch.float64 else 16
    long = 64 if half and block_r < 128 else 32 if dtype != torch.float64 else 16
    rows, width, depth = (
        max(16, min(triton.next_power_of_2(n), most)) for n, most in ((rows, tall), (width, long), (depth, long))
    )
    tile = Tile(rows, width, depth, 8 if block_r > 64 else 4)
    return [tile, *(tile._replace(stages=stages) for stages in (2, 1)), Tile(16, 16, 16, 4, 1)]


def _constants(dtype: torch.dtype, rank: int) -> dict:
    block_r = max(16, triton.next_power_of_2(rank))
    return {"RANK": rank, "ACC": TL_DTYPES[accumulator(dtype)], "PRECISION": _precision(dtype), "BLOCK_R": block_r}


def _as_laid(factor: Tensor) -> Factor:
    """A factor [k, width, r] of any strides."""
    client, row, rank = factor.stride()
    return Factor(factor, client, tl.constexpr(row), tl.constexpr(rank))


def _through(out, x: Tensor, down: Tensor, up: Tensor, bias, scaling: float, keep: bool, add: bool) -> Tensor | None:
    """Launch `adapter_kernel`: hidden [k, rows, r] if it is to be kept, and out [k, rows, o], if given, written or
    added to. down [k, i, r] and up [k, r, o] may be transposed."""
    (k, rows, width), rank = x.shape, down.shape[2]
    hidden = x.new_empty(k, rows, rank) if keep else None
    outputs = 0 if out is None else out.shape[2]
    constants = _constants(x.dtype, rank) | {"IN": width, "OUT": outputs, "KEEP": keep, "ADD": add}
    constants["HAS_BIAS"] = bias is not None
    factors = _as_laid(down), _as_laid(up.mT)
    each = Slices(bias, 0 if bias is None or bias.dim() == 1 else bias.stride(0))

    def run(tile: Tile) -> None:
        row_blocks, columns = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
        # each split makes the few numbers of its rows anew
        splits = max(1, min(PROGRAMS // max(1, k * row_blocks), outputs // 256))
        adapter_kernel[(k * row_blocks * splits,)](
            out,
            hidden,
            slices(x),
            *factors,
            each,
            scaling,
            rows,
            row_blocks,
            splits,
            STEPS=triton.cdiv(columns, splits),
            BLOCK_M=tile.rows,
            BLOCK_I=tile.depth,
            BLOCK_O=tile.columns,
            **constants,
            **tile.settings,
        )

    _launch("adapter", _tiles(rows, max(outputs, 16), width, rank, x.dtype), x, constants, run)
    return hidden


def _factor_gradient(thin: Tensor, wide: Tensor, transposed: bool) -> Tensor:
    """Σ_rows thin[row, r] wide[row, c] of each client: [k, r, c], or [k, c, r]."""
    (k, rows, rank), width = thin.shape, wide.shape[2]
    if not (thin.numel() and width):
        return thin.new_zeros(k, *((width, rank) if transposed else (rank, width)))
    strides = (rank, 1) if transposed else (1, width)
    constants = _constants(thin.dtype, rank) | {"WIDTH": width}
    found: list[Tensor] = []

    def run(tile: Tile) -> None:
        columns = triton.cdiv(width, tile.columns)
        splits = max(1, min(triton.cdiv(PROGRAMS, k * columns), rows // 256))
        dtype = thin.dtype if splits == 1 else accumulator(thin.dtype)
        parts = thin.new_empty(k, splits, *((width, rank) if transposed else (rank, width)), dtype=dtype)
        factor_kernel[(k * columns * splits,)](
            Factor(parts, rank * width, *map(tl.constexpr, strides)),
            slices(thin),
            slices(wide),
            rows,
            triton.cdiv(triton.cdiv(rows, tile.rows), splits),
            splits,
            columns,
            BLOCK_N=tile.rows,
            BLOCK_C=tile.columns,
            **constants,
            **tile.settings,
        )
        found.append(parts)

    _launch("factor", _tiles(rows, width, 16, rank, thin.dtype), thin, constants, run)
    return _gather(found[0], thin)


def _launch(kernel: str, tiles: list[Tile], x: Tensor, constants: dict, run) -> None:
    with torch.cuda.device_of(x):
        if not first_that_fits(tiles, x.device, (kernel, x.dtype, *constants.values()), run):
            raise RuntimeError(f"lowrank_linear: no tile of {kernel}_kernel fits {x.device}")


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """x [k, n, i] times weight [i, o], of all rows in one product, or [k, i, o]."""
    if weight.dim() == 3:
        return x @ weight
    return torch.mm(x.flatten(0, 1), weight).unflatten(0, x.shape[:2])


def lowrank_linear(
    x: Tensor, seen: Tensor | None, sigma: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    y, seen = _times(x, sigma.mT), x if seen is None else seen
    if a.shape[1] > MAX_RANK or not y.numel() or not a.numel():
        hidden = (seen @ a.mT).mul_(scaling)
        y.baddbmm_(hidden, b.mT)
        return (y if bias is None else y.add_(bias.unsqueeze(-2))), hidden
    bias = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
    return y, _through(y, seen, a.mT, b.mT, bias, float(scaling), True, True)


def lowrank_linear_backward(
    grad: Tensor, seen: Tensor, sigma: Tensor, a: Tensor, b: Tensor, hidden: Tensor, scaling: float, needs: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dx, dseen, da, db = (grad.new_empty(0) for _ in range(4))
    if needs & 1:
        dx = _times(grad, sigma)
    adds = bool(needs & 1) and not needs & OWN
    if needs & 2:
        dseen = grad.new_empty(seen.shape)
    if a.shape[1] > MAX_RANK or not grad.numel() or not a.numel():
        dhidden = (grad @ b).mul_(scaling)
        dx = dx.baddbmm_(dhidden, a) if adds else dx
        dseen = torch.bmm(dhidden, a, out=dseen) if needs & 2 else dseen
    elif adds or needs & 6:
        targets = [(dx, True)] * adds + [(dseen, False)] * bool(needs & 2)
        for target, add in targets or [(None, False)]:
            dhidden = _through(target, grad, b, a, None, float(scaling), bool(needs & 4), add)
    if needs & 4:
        da = _factor_gradient(dhidden, seen, False)
    if needs & 8:
        db = _factor_gradient(hidden, grad, True)
    return dx, dseen, da, db
