import math

import pytest
import torch

from fastfact.federation.server.mixing import cosine, fedavg_matrix, groups, identity, mix, proximity, softmax_matrix


def keys(k=7, d=5, seed=0):
    return torch.randn(k, d, generator=torch.Generator().manual_seed(seed))


def by_the_formula(x, epsilon, tau, min_matches):
    """Eq. 4 and 5 with plain floats."""
    rows = [[float(value) for value in row] for row in x.double()]

    def cos(a, b):
        return sum(p * q for p, q in zip(a, b, strict=True)) / math.sqrt(sum(p * p for p in a) * sum(q * q for q in b))

    weights = []
    for k, own in enumerate(rows):
        sigma = [1.0 if i == k else cos(own, other) for i, other in enumerate(rows)]
        matched = {i for i, s in enumerate(sigma) if s >= tau or i == k}
        for i in sorted(range(len(rows)), key=lambda i: (i != k, -sigma[i])):
            if len(matched) < min_matches:
                matched.add(i)
        e = [math.exp(epsilon * s) if i in matched else 0.0 for i, s in enumerate(sigma)]
        weights.append([value / sum(e) for value in e])
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("min_matches", [1, 3, 50])
@pytest.mark.parametrize("tau", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 20.0])
def test_softmax_matrix(epsilon, tau, min_matches):
    matrix = softmax_matrix(cosine(keys()), epsilon, tau, min_matches)
    torch.testing.assert_close(matrix, by_the_formula(keys(), epsilon, tau, min_matches), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(matrix.sum(1), torch.ones(7, dtype=torch.float64))
    assert (matrix.diagonal() > 0).all()
    if min_matches > 1:
        assert ((matrix > 0).sum(1) >= min(min_matches, 7)).all()


def test_softmax_matrix_does_not_overflow_and_takes_itself_as_one():
    assert softmax_matrix(cosine(keys()), 1e6, -1.0).isfinite().all()
    weird = torch.full((2, 2), 0.5)
    expected = torch.tensor([[1.0, math.exp(-1.0)], [math.exp(-1.0), 1.0]], dtype=torch.float64) / (1 + math.exp(-1.0))
    torch.testing.assert_close(softmax_matrix(weird, 2.0), expected)


def test_softmax_matrix_of_a_guest():
    """k = 1 row, m = 3 columns, the first its own."""
    matrix = softmax_matrix(torch.tensor([[0.3, 0.9, 0.1]]), 2.0, 0.5)
    expected = torch.tensor([[1.0, math.exp(-0.2), 0.0]], dtype=torch.float64)
    torch.testing.assert_close(matrix, expected / expected.sum(), rtol=1e-6, atol=0)


def test_cosine():
    x = keys()
    expected = torch.nn.functional.cosine_similarity(x[:, None].double(), x[None].double(), dim=2)
    torch.testing.assert_close(cosine(x), expected)
    assert cosine(1e30 * x).isfinite().all() and cosine(x).max() <= 1
    x[2] = 0
    assert (cosine(x)[2] == 0).all()
    torch.testing.assert_close(cosine(x[:1], x[3:]), cosine(x)[:1, 3:])


def test_fedavg_matrix_and_identity():
    matrix = fedavg_matrix([1, 2, 5])
    assert matrix.tolist() == [[1 / 8, 2 / 8, 5 / 8]] * 3
    assert fedavg_matrix([1, 1], rows=5).shape == (5, 2)
    assert torch.equal(identity(3), torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mix(dtype):
    g = torch.Generator().manual_seed(1)
    state = {
        "w": torch.randn(4, 3, 2, generator=g, dtype=torch.float64).to(dtype),
        "last": torch.randn(4, 2, 5, 3, generator=g, dtype=torch.float64).to(dtype).permute(0, 3, 1, 2),
        "scalar": torch.randn(4, generator=g, dtype=torch.float64).to(dtype),
        "count": torch.tensor([1, 2, 3, 7]),
    }
    matrix = torch.rand(4, 4, generator=g, dtype=torch.float64)
    matrix /= matrix.sum(1, keepdim=True)
    mixed = mix(matrix, state)
    for name in ("w", "last", "scalar"):
        exact = torch.einsum("ki,i...->k...", matrix, state[name].double())
        assert mixed[name].dtype == dtype and mixed[name].shape == state[name].shape
        torch.testing.assert_close(mixed[name].double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert mixed["count"].tolist() == (matrix @ state["count"].double()).round().long().tolist()
    once = mix(fedavg_matrix([1, 2, 3, 2]), state)
    assert once["w"].stride(0) == 0
    torch.testing.assert_close(once["w"], mix(fedavg_matrix([1, 2, 3, 2]).contiguous(), state)["w"])
    assert torch.equal(mix(identity(4), state)["w"], state["w"])


def clouds(sizes, apart, dim=16, seed=0):
    """Points in clouds of unit width, of these sizes, their centres `apart` from each other; which is whose."""
    torch.manual_seed(seed)
    centres = apart * torch.eye(len(sizes), dim, dtype=torch.float64) / 2**0.5
    own = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return centres[own] + torch.randn(len(own), dim, dtype=torch.float64), own


def test_proximity_by_its_formula():
    x = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    scale = [3.0, 2.0, 3.0, 6.0]  # to the second nearest
    expected = [
        [-((a - b) ** 2) / (scale[i] * scale[j]) for j, b in enumerate([0, 1, 3, 7])]
        for i, a in enumerate([0, 1, 3, 7])
    ]
    torch.testing.assert_close(proximity(x), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(proximity(1e3 * x + 5), proximity(x))


def test_proximity_of_equal_and_of_few_points():
    assert proximity(torch.zeros(1, 3)).tolist() == [[0]]
    assert proximity(torch.zeros(4, 3)).tolist() == [[0] * 4] * 4
    two = proximity(torch.tensor([[0.0], [2.0]]))
    assert two.tolist() == [[0, -1], [-1, 0]]
    twins = proximity(torch.tensor([[0.0], [0.0], [0.0], [5.0]]))
    assert twins.isfinite().all() and twins[0, 1] == 0 and twins[0, 3] == -1e6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [[4] * 5, [3, 9, 20], [10, 3]])
def test_groups_that_lie_apart_are_found_and_one_cloud_is_one_group(sizes, seed):
    """Also where one is ten times as far from the others as these from each other."""
    points, own = clouds(sizes, apart=30, seed=seed)
    points[own == 0] += 300
    found = groups(proximity(points))
    same = own[:, None] == own
    assert torch.equal(found[:, None] == found, same)
    cloud, _ = clouds([sum(sizes)], apart=0, seed=seed)
    assert groups(proximity(cloud)).unique().numel() == 1


def test_groups_of_few():
    assert groups(proximity(torch.zeros(0, 3))).tolist() == []
    assert groups(proximity(torch.zeros(1, 3))).tolist() == [0]
    assert groups(proximity(torch.tensor([[0.0], [9.0]]))).unique().numel() == 1
