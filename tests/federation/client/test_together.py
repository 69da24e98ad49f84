"""Attention of a cohort on the CPU: the clients in one call, and the numbers that `vmap` gives without."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fastfact.federation.client.together import Together

K, N, HEADS, LENGTH, KEYS, DEPTH = 4, 3, 2, 5, 7, 8
MASKS = {
    "none": (None, None),
    "bool": (torch.rand(1, 1, LENGTH, KEYS, generator=torch.Generator().manual_seed(0)) > 0.4, None),
    "two axes": (torch.randn(LENGTH, KEYS), None),
    "shared": (torch.randn(1, 1, LENGTH, KEYS), None),
    "of samples": (torch.randn(K, N, 1, LENGTH, KEYS), 0),
    "one of each client": (torch.randn(K, 1, 1, LENGTH, KEYS), 0),
    "of heads": (torch.randn(K, N, HEADS, LENGTH, KEYS), 0),
}


def inputs(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    sizes = (LENGTH, KEYS, KEYS)
    return [torch.randn(K, N, HEADS, size, DEPTH, generator=g, dtype=dtype) for size in sizes]


def loss(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask).square().sum()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)])
def test_the_same_gradients_in_one_call(kind, shared):
    mask, axis = MASKS[kind]
    mask = mask.double() if mask is not None and mask.dtype != torch.bool else mask
    tensors = [t[0] if place in shared else t for place, t in enumerate(inputs())]
    axes = (*(None if place in shared else 0 for place in range(3)), axis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = vmap(grad(loss, (0, 1, 2)), axes)(*tensors, mask)
    with Together(), warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where it goes client by client
        found = vmap(grad(loss, (0, 1, 2)), axes)(*tensors, mask)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_causal_and_scaled():
    q, k, _ = inputs()
    q = k.flip(-1)

    def function(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.3).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = vmap(grad(function))(q, k)
    with Together():
        torch.testing.assert_close(vmap(grad(function))(q, k), wanted)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_the_kernel_does_not_serve_is_as_without():
    q, k, v = inputs()
    with Together():
        torch.testing.assert_close(
            vmap(F.scaled_dot_product_attention)(q, k, v[..., :3]), F.scaled_dot_product_attention(q, k, v[..., :3])
        )
        alone = F.scaled_dot_product_attention(q[0], k[0], v[0])
        torch.testing.assert_close(vmap(F.scaled_dot_product_attention)(q, k, v)[0], alone)
        dropped = vmap(lambda q: F.scaled_dot_product_attention(q, q, q, None, 0.5), randomness="different")(q)
    assert not torch.equal(dropped, F.scaled_dot_product_attention(q, q, q))


def test_the_gradient_of_a_packed_projection_is_recorded_as_one():
    """No axis is exchanged, stacked or copied between the projection and the kernel."""

    def of_one(w, x):
        q, k, v = (x @ w).unflatten(-1, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    w, x = torch.randn(K, 6, 3 * HEADS * DEPTH), torch.randn(K, N, LENGTH, 6)
    with Together():
        graph = make_fx(vmap(grad(of_one)))(w, x)
        wanted = vmap(grad(of_one))(w, x)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert called.count("fastfact.attention.default") == called.count("fastfact.attention_backward.default") == 1
    begin = called.index("fastfact.attention_backward.default")
    assert not {"aten.stack.default", "aten.cat.default", "aten.clone.default"} & set(called[begin:])
    torch.testing.assert_close(graph(w, x), wanted)
