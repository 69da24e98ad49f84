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
