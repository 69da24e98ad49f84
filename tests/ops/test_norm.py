"""Batch norm of clients against PyTorch's own; the Triton kernels behind it are tested in test_kernels_triton.py."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from fastfact.ops.norm import batch_norm


def plain(x, running_mean, running_var, weight=None, bias=None):
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, 0.1, 1e-5)


def gradients(function, x, target, affine):
    """The gradients of each client, and the running statistics afterwards."""
    k, c = x.shape[0], x.shape[2]
    g = torch.Generator().manual_seed(1)
    factors = [torch.randn(k, c, generator=g, dtype=torch.float64) for _ in range(2 * affine)]
    running = [torch.zeros(k, c, dtype=torch.float64), torch.ones(k, c, dtype=torch.float64)]

    def loss(x, factors, running, target):
        return (function(x, *running, *factors).sin() * target).sum()

    dx, factors = vmap(grad(loss, (0, 1)))(x, factors, running, target)
    return [dx, *factors, *running]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 5, 6, 7), (2, 8, 5), (3, 4, 3, 9), (2, 3, 4, 2, 3, 2)], ids=str)
def test_under_vmap_it_is_batch_norm(shape, last, affine):
    torch.manual_seed(0)
    x, target = 2 * torch.randn(shape, dtype=torch.float64) + 5, torch.randn(shape, dtype=torch.float64)
    x = x.movedim(2, -1).contiguous().movedim(-1, 2) if last else x
    found, expected = (gradients(function, x, target, affine) for function in (batch_norm, plain))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert found[0].stride() == x.stride()


def test_gradients_of_gradients_and_of_vmap():
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3, 2, 2), (3,), (3,))]
    assert torch.autograd.gradgradcheck(lambda x, *factors: batch_norm(x, None, None, *factors), leaves)
    assert torch.autograd.gradgradcheck(lambda x: batch_norm(x, None, None), leaves[:1])
    x = torch.randn(3, *leaves[0].shape, dtype=torch.float64)
    inside = vmap(grad(lambda x: batch_norm(x, None, None).sin().sum()))(x)
    outside = grad(lambda x: vmap(lambda x: batch_norm(x, None, None))(x).sin().sum())(x)
    torch.testing.assert_close(inside, outside)


def test_numbers_far_from_zero_keep_their_variance():
    x = torch.randn(2, 64, 8, dtype=torch.float64) + 1000
    _, _, var = torch.ops.fastfact.batch_norm(x.float(), None, None, 1e-5)
    torch.testing.assert_close(var.double(), x.float().double().var(1, correction=0), rtol=1e-4, atol=0)
