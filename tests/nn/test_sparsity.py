"""Pruning, thresholding and the bitmap form."""

import pytest
import torch

import fastfact as ff
from fastfact.nn import sparsity


def sparse(*shape, density=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < density)


@pytest.mark.parametrize("density, kept", [(0, 0), (0.1, 2), (0.5, 12), (1, 24)])
def test_prune_keeps_exactly_that_many_even_among_ties(density, kept):
    x = torch.ones(2, 3, 4)
    assert sparsity.prune_(x, density).count_nonzero() == kept


def test_prune_of_stacked_clients_is_per_client():
    x = torch.randn(5, 4, 6)
    x[0] *= 100
    single = torch.stack([sparsity.prune_(row.clone(), 0.25) for row in x])
    assert torch.equal(sparsity.prune_(x, 0.25, clients=True), single)
    assert x.count_nonzero(dim=(1, 2)).tolist() == [6] * 5


def test_threshold():
    x = torch.tensor([0.5, -0.5, 0.1, -0.1, 0.0])
    assert sparsity.threshold_(x, 0.2).tolist() == [0.5, -0.5, 0, 0, 0]
    with pytest.raises(ValueError, match="value=-1"):
        sparsity.threshold_(x, -1)


@pytest.mark.parametrize("shape", [(7, 5, 3, 3), (4, 8), (1, 1), (3, 0), (65, 3, 5, 5)])
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_bitmap_is_exact_in_float32(shape, density):
    x = sparse(*shape, density=density)
    packed = sparsity.to_bitmap(x)
    assert packed["values"].numel() == x.count_nonzero()
    assert packed["bits"].numel() == shape[0] * -(-(x.numel() // shape[0]) // 8)
    assert torch.equal(sparsity.from_bitmap(packed, x.shape), x)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2**-8), (torch.int8, 0.5 / 127)])
def test_bitmap_in_few_bits_is_close(dtype, bound):
    x = sparse(6, 40)
    back = sparsity.from_bitmap(sparsity.to_bitmap(x, dtype), x.shape)
    scale = x.abs() if dtype == torch.bfloat16 else x.abs().amax(1, keepdim=True)
    assert ((back - x).abs() <= bound * scale * (1 + 1e-5)).all()


def test_channels_last_mu_packs_in_logical_order():
    x = sparse(5, 4, 3, 3)
    again = sparsity.to_bitmap(x.to(memory_format=torch.channels_last))
    for name, part in sparsity.to_bitmap(x).items():
        assert torch.equal(part, again[name])


def test_damaged_bitmaps_are_errors():
    packed = sparsity.to_bitmap(sparse(6, 40))
    with pytest.raises((ValueError, RuntimeError), match="unpack_bitmap"):
        sparsity.from_bitmap({**packed, "values": packed["values"][1:]}, (6, 40))
    with pytest.raises(ValueError, match="6 rows, must be 5"):
        sparsity.from_bitmap(packed, (5, 40))
    with pytest.raises(ValueError, match="n=48"):
        sparsity.from_bitmap(packed, (6, 48))
    with pytest.raises(ValueError, match=r"dtype=torch\.float16"):
        sparsity.to_bitmap(sparse(2, 2), torch.float16)


def test_layer_mu_round_trips():
    layer = ff.nn.FactorizedConv2d(4, 6, 3)
    torch.nn.init.normal_(layer.mu)
    layer.prune_(0.2)
    assert torch.equal(sparsity.from_bitmap(sparsity.to_bitmap(layer.mu), layer.mu.shape), layer.mu)
