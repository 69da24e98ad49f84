"""μ on a support: one bit for each element of W, and the number of values before every 32."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Support(NamedTuple):
    """(bits, starts) int32 [k, ceil(numel / 32)] and their client stride, 0 where the clients share one row: bit j of
    word w is set where 32 w + j is on the support, starts[w] is the number of positions before 32 w. nnz: values of a
    client."""

    bits: Tensor
    starts: Tensor
    client: int
    nnz: int


@triton.jit
def support_tile(support, client, flat, inside):
    """(whether the elements at `flat` are on the support, where their values lie: below nnz, whatever the bits)."""
    of_client = client * support.client
    word = tl.load(support.bits + of_client + flat // 32, mask=inside, other=0).to(tl.uint32, bitcast=True)
    bit = (flat % 32).to(tl.uint32)
    before = word & ((tl.full(bit.shape, 1, tl.uint32) << bit) - 1)
    # the number of bits set
    before = before - ((before >> 1) & 0x55555555)
    before = (before & 0x33333333) + ((before >> 2) & 0x33333333)
    before = (((before + (before >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    at = tl.load(support.starts + of_client + flat // 32, mask=inside, other=0) + before.to(tl.int32)
    # Positions that are not ascending make bits that are not theirs: no value lies behind the last.
    return inside & (((word >> bit) & 1) != 0) & (at < support.nnz), at


def support_bits(index: Tensor, size) -> Support:
    """The support of ascending flat positions `index` [k, nnz] in a weight of `size`."""
    shared = index.stride(0) == 0
    index = index[:1] if shared else index
    k, numel = index.shape[0], torch.Size(size).numel()
    words = triton.cdiv(numel, 32)
    # What is out of range is checked where it can be read (`ops.common.check_index`), and must do no harm elsewhere.
    index = index.clamp(0, max(numel - 1, 0))
    first = torch.arange(0, 32 * words, 32, dtype=index.dtype, device=index.device)
    starts = torch.searchsorted(index.contiguous(), first.expand(k, -1).contiguous(), out_int32=True)
    # each bit is added once, so that the sum is their union
    bits = torch.zeros(k, words, dtype=torch.int64, device=index.device)
    bits.scatter_add_(1, index.long() >> 5, torch.ones_like(index, dtype=torch.int64) << (index & 31))
    return Support(bits.to(torch.int32), starts, 0 if shared else words, index.shape[1])
