"""Pruning, and the compact form."""

import pytest
import torch

import fastfact as ff
from fastfact.nn import sparsity


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


@pytest.mark.parametrize("size", [(7, 5, 3, 3), (4, 8), (1, 1), (3, 0)])
def test_scatter_is_the_inverse_of_gather(size):
    mu = torch.randn(size) * (torch.rand(size) < 0.3)
    values, index = sparsity.gather(mu)
    assert values.all() and index.dtype == torch.int32 and (index.diff() > 0).all()
    assert torch.equal(sparsity.scatter(values, index, size), mu)
    last = sparsity.gather(mu.to(memory_format=torch.channels_last) if mu.dim() == 4 else mu)
    assert torch.equal(last[0], values) and torch.equal(last[1], index)


def test_the_old_name_of_the_schedule_says_the_new_one():
    with pytest.raises(AttributeError, match=r"is ff\.Schedule"):
        _ = ff.sparsity.Schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_are_those_a_stable_sort_puts_first(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 40).to(dtype)
    x[0, ::3] = 0.5
    x[1, 5:30] = 0
    x[2, [3, 7]], x[2, 9], x[2, 10] = torch.nan, torch.inf, -torch.inf
    for keep in (0, 1, 2, 3, 7, 20, 39, 40):
        order = x.abs().argsort(dim=1, descending=True, stable=True)[:, :keep].sort(dim=1).values
        values, index = sparsity.largest(x, keep)
        assert torch.equal(index.long(), order)
        torch.testing.assert_close(values, x.gather(1, order), rtol=0, atol=0, equal_nan=True)
        pruned = sparsity.prune_(x[:2].clone(), keep / 40, clients=True)
        assert torch.equal(pruned, x[:2] * torch.zeros(2, 40, dtype=dtype).scatter(1, order[:2], 1))


@pytest.mark.parametrize("numel, nonzeros", [(1, 1), (31, 5), (32, 32), (33, 0), (1000, 123), (4096, 4096)])
def test_words_say_where_a_compact_mu_is(numel, nonzeros):
    """The bits of 32 positions, and above them how many lie before."""
    index = torch.randperm(numel)[:nonzeros].sort().values.to(torch.int32)
    there = torch.zeros(numel, dtype=torch.bool)
    there[index.long()] = True
    found = [(word & 0xFFFFFFFF, word >> 32) for word in sparsity.words(index, numel).tolist()]
    parts = [there[at : at + 32] for at in range(0, numel, 32)]
    bits = [sum(1 << at for at, bit in enumerate(part.tolist()) if bit) for part in parts]
    before = [int(there[: 32 * at].sum()) for at in range(len(parts))]
    assert found == list(zip(bits, before, strict=True))
