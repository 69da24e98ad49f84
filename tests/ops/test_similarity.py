"""The server's step, `ops.similarity_mix`, against the matrix it never makes, and the sketches it may work on."""

import math

import forked
import pytest
import torch

import fastfact as ff
from fastfact import ops
from fastfact.federation.server.mixing import cosine, mix, softmax_matrix

F32, F64 = torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["dispatched", "reference"], autouse=True)
def backend(request):
    if request.param == "dispatched":
        yield
    else:
        with ff.use_backend("reference"):
            yield


def keys(m, d=12, dtype=F64, groups=4):
    """Clients in groups whose keys are alike."""
    return (torch.randn(groups, d)[torch.arange(m) % groups] + 0.6 * torch.randn(m, d)).to(dtype)


def stacked(m, dtype=F64):
    return {
        "u": torch.randn(m, 3, 3).to(dtype),
        "mu": torch.randn(m, 40, 30).to(dtype),
        "bias": torch.randn(m).to(dtype),
        "last": torch.randn(m, 5, 4, 3).to(dtype).permute(0, 3, 1, 2),
    }


SETTINGS = [(1.0, 0.0, 1), (20.0, -1.0, 1), (5.0, 0.6, 9), (3.0, 1.0, 4), (0.0, 0.3, 1000), (1e6, -1.0, 1)]


@pytest.mark.parametrize(("epsilon", "tau", "min_matches"), SETTINGS)
@pytest.mark.parametrize("m", [1, 2, 31, 700])
def test_is_the_softmax_matrix_applied(m, epsilon, tau, min_matches):
    v, state = keys(m), stacked(m) | {"count": torch.arange(m) * 1000}
    expected = mix(softmax_matrix(cosine(v), epsilon, tau, min_matches), state)
    mixed = ops.similarity_mix(v, list(state.values()), epsilon, tau, min_matches)
    for (name, want), got in zip(expected.items(), mixed, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("epsilon", "tau", "min_matches"), SETTINGS[:3])
def test_in_float32(epsilon, tau, min_matches):
    """Weights are good to ε times the rounding of a cosine."""
    v, state = keys(700, 2000, F32), stacked(700, F32)
    expected = mix(softmax_matrix(cosine(v), epsilon, tau, min_matches), {n: x.double() for n, x in state.items()})
    mixed = ops.similarity_mix(v, list(state.values()), epsilon, tau, min_matches)
    for want, got in zip(expected.values(), mixed, strict=True):
        assert got.dtype == F32
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6 * (1 + epsilon))


def test_half_precision_uploads_and_keys():
    v, x = keys(50), torch.randn(50, 7)
    for dtype in (torch.bfloat16, torch.float16):
        mixed = ops.similarity_mix(v.to(dtype), x.to(dtype), 2.0, 0.3)
        exact = mix(softmax_matrix(cosine(v.to(dtype)), 2.0, 0.3), {"x": x.to(dtype).double()})["x"]
        assert mixed.dtype == dtype
        torch.testing.assert_close(mixed.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("m, d", [(40, 9), (600, 1500)])
def test_integer_keys_are_exact(m, d):
    v, x = torch.randint(-127, 128, (m, d), dtype=torch.int8), torch.randn(m, 5)
    exact = mix(softmax_matrix(cosine(v), 4.0, 0.01, 3), {"x": x.double()})["x"]
    torch.testing.assert_close(ops.similarity_mix(v, x, 4.0, 0.01, 3).double(), exact, rtol=0, atol=5e-6)
    exact = mix(softmax_matrix(cosine(v), 4.0, 0.01, 3), {"x": x.double()})["x"]
    torch.testing.assert_close(ops.similarity_mix(v, x.double(), 4.0, 0.01, 3), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("min_matches", [1, 5, 100])
def test_clients_that_are_not_valid(min_matches):
    """They are matched by nobody, whatever they hold, and mix with the others themselves."""
    m = 60
    v, x, valid = keys(m), torch.randn(m, 4, dtype=F64), torch.rand(m) < 0.5
    expected = torch.empty_like(x)
    for k in range(m):
        # k first, as the matrix wants it.
        seen = torch.tensor([k, *(i for i in range(m) if valid[i] and i != k)])
        row = softmax_matrix(cosine(v[k : k + 1], v[seen]), 3.0, 0.5, min_matches)
        expected[k] = mix(row, {"x": x[seen]})["x"][0]
    torch.testing.assert_close(ops.similarity_mix(v, x, 3.0, 0.5, min_matches, valid), expected, rtol=0, atol=1e-10)
    lost = (~valid).nonzero().flatten()[0]
    x[lost] = float("nan")
    v[lost] = float("inf")
    mixed = ops.similarity_mix(v, x, 3.0, 0.5, min_matches, valid)
    others = torch.arange(m) != lost
    torch.testing.assert_close(mixed[others], expected[others], rtol=0, atol=1e-10)
    assert mixed[lost].isnan().all()


def test_some_rows():
    v, x = keys(90), torch.randn(90, 3, dtype=F64)
    for least in (1, 40):
        whole = ops.similarity_mix(v, x, 3.0, 0.5, least)
        for rows in (range(0, 90), range(0, 7), range(30, 71), range(80, 90), range(5, 5)):
            some = ops.similarity_mix(v, x, 3.0, 0.5, least, rows=rows)
            torch.testing.assert_close(some, whole[rows.start : rows.stop], rtol=0, atol=1e-10)


def test_min_matches_takes_the_lower_index_of_equals():
    v = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [0.6, 0.8], [0.0, 1.0]], dtype=F64)
    mixed = ops.similarity_mix(v, torch.eye(5, dtype=F64), 1.0, 0.9, 3)
    assert (mixed[0] > 0).tolist() == [True, True, True, False, False]
    # Those that have enough are not filled up.
    assert (mixed[1] > 0).tolist() == [False, True, True, True, False]


def pairs(d, dtype):
    """100 keys and their opposites."""
    v = torch.randn(100, d)
    if dtype == torch.int8:
        v = (40 * v).round().clamp(-127, 127)
        v[v == 0] = 1
    v = v.to(dtype)
    return torch.stack([v, -v], 1).flatten(0, 1)


@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("d", [1, 3, 37, 2000])
def test_the_ends_of_the_interval_hold_exactly(dtype, d):
    """τ = −1 matches every pair, τ = 1 every pair of equal keys, whatever the rounding of the cosines."""
    opposite = pairs(d, dtype)
    everybody = ops.similarity_mix(opposite, torch.eye(len(opposite)), 1.0, -1.0)
    assert (everybody > 0).all()
    for sketched in (False, True) if d == 2000 and dtype != torch.int8 else (False,):
        equal = opposite[::2].repeat_interleave(2, 0)
        equal = ops.srht(equal, 64)[0] if sketched else equal
        matched = ops.similarity_mix(equal, torch.eye(len(equal)), 1.0, 1.0) > 0
        twins = torch.eye(len(equal) // 2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1)
        assert matched[twins].all()
        # Of one number all keys have the same direction or the opposite one, and 37 int8 may repeat; else only twins.
        if d > 37:
            assert torch.equal(matched, twins)
    matrix = softmax_matrix(cosine(opposite), 1.0, -1.0)
    assert (matrix > 0).all() and (softmax_matrix(cosine(equal), 1.0, 1.0)[twins] > 0).all()


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("d", [50, 100_000])
def test_the_ends_hold_for_keys_of_equal_numbers(dtype, d):
    """Where the rounding errors of a sum do not cancel."""
    for number in (0.1, 3.7, -7e-3):
        key = torch.full((3, d), number, dtype=dtype)
        both = torch.cat([key, -key])
        assert (ops.similarity_mix(key, torch.eye(3), 1.0, 1.0) > 0).all()
        assert (ops.similarity_mix(both, torch.eye(6), 1.0, -1.0) > 0).all()
        assert (softmax_matrix(cosine(key), 1.0, 1.0) > 0).all()


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_keys_whose_products_float32_cannot_hold(scale):
    v, x = keys(40, dtype=F32), torch.eye(40)
    scaled = v.clone()
    scaled[::3] *= scale
    kept = scaled.clone()
    torch.testing.assert_close(
        ops.similarity_mix(scaled, x, 3.0, 0.5, 2), ops.similarity_mix(v, x, 3.0, 0.5, 2), rtol=1e-4, atol=1e-6
    )
    assert torch.equal(scaled, kept)


def test_keys_without_a_direction():
    """A key of zeros has cosine 0 with all others, one that is not finite matches only itself."""
    v = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]], dtype=F64)
    mixed = ops.similarity_mix(v, torch.eye(5, dtype=F64), 2.0, 0.0, 1)
    zero, full = math.exp(-2.0), 1.0
    expected = torch.tensor([[full, zero, full], [zero, full, zero], [full, zero, full]], dtype=F64)
    torch.testing.assert_close(mixed[:3, :3], expected / expected.sum(1, keepdim=True))
    assert torch.equal(mixed[3:], torch.eye(5, dtype=F64)[3:]) and (mixed[:3, 3:] == 0).all()


def test_the_inputs_stay_as_they_were():
    v, state = keys(30, dtype=F32), stacked(30, F32)
    before = [t.clone() for t in (v, *state.values())]
    ops.similarity_mix(v, list(state.values()), 3.0, 0.5, 3, torch.rand(30) < 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, (v, *state.values()), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uploads": torch.zeros(3, 2)}, r"uploads\[0\] has shape \[3, 2\], v has 4 clients"),
        (
            {"v": torch.zeros(4, 2, dtype=torch.int64)},
            "v is torch.int64, must be torch.float32, torch.float64, torch.float16, torch.bfloat16 or torch.int8",
        ),
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"epsilon": math.inf}, "epsilon=inf"),
        ({"tau": 1.5}, "tau=1.5, must be a finite number, -1 to 1"),
        ({"min_matches": 0}, "min_matches=0, must be an integer from 1 to 2147483647"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, r"valid has shape \[3\], must be \[4\]"),
        ({"valid": torch.ones(4)}, "valid is torch.float32, must be torch.bool"),
        ({"rows": range(2, 5)}, r"rows=range\(2, 5\)"),
        ({"rows": range(0, 4, 2)}, r"rows=range\(0, 4, 2\), must be a range with step 1 within 4 clients"),
    ],
)
def test_errors_name_the_argument(change, message):
    arguments = {"v": torch.zeros(4, 2), "uploads": torch.zeros(4, 2), "epsilon": 1.0} | change
    with pytest.raises(ValueError, match=f"similarity_mix: {message}"):
        ops.similarity_mix(**arguments)


def test_mix_refuses_a_matrix_of_another_size():
    with pytest.raises(ValueError, match=r"mix: x has shape \[3, 2\], matrix \[4, 4\]"):
        ops.mix(torch.eye(4), torch.zeros(3, 2))


def test_srht_keeps_cosines():
    """rms error (1 − cos²) / √m: .031 at m = 1024 of keys that have nothing in common, int8 adds nothing to it."""
    shared = torch.randn(1, 9000)
    x = torch.randn(120, 9000) + 0.8 * shared
    exact, off = cosine(x), ~torch.eye(120, dtype=torch.bool)
    predicted = ((1 - exact[off] ** 2) / 1024**0.5).square().mean().sqrt()
    errors = {}
    for dtype in (F32, torch.int8):
        sketch, scale = ops.srht(x, 1024, dtype=dtype)
        assert sketch.shape == (120, 1024) and sketch.dtype == dtype
        errors[dtype] = (cosine(sketch) - exact)[off].square().mean().sqrt()
        if dtype == torch.int8:
            assert sketch.abs().max() == 127
            restored = sketch * scale[:, None]
    assert 0.85 * predicted < errors[F32] < 1.1 * predicted
    assert abs(errors[torch.int8] / errors[F32] - 1) < 0.02
    torch.testing.assert_close(restored, ops.srht(x, 1024, dtype=F32)[0], rtol=0, atol=float(scale.max()) / 2 + 1e-6)


def test_srht_keeps_cosines_of_vectors_with_few_entries():
    """What a plain selection of coordinates would lose."""
    x = torch.zeros(2, 4096)
    x[0, :3], x[1, 1:4] = 1.0, 1.0
    assert abs(cosine(ops.srht(x, 1024)[0])[0, 1] - 2 / 3) < 4 * (1 - 4 / 9) / 1024**0.5


def test_srht_is_the_same_for_everybody():
    x = torch.randn(3, 100)
    whole, alone = ops.srht(x, 16, seed=5), ops.srht(x[1], 16, seed=5)
    assert torch.equal(whole[0][1], alone[0]) and torch.equal(whole[1][1], alone[1])
    assert not torch.equal(whole[0], ops.srht(x, 16, seed=6)[0])
    assert ops.srht(x.double(), 128, dtype=F64)[0].shape == (3, 128)
    # All points: an orthogonal transform.
    torch.testing.assert_close(ops.srht(x, 128, dtype=F32)[0].norm(dim=1), x.norm(dim=1))


@pytest.mark.parametrize(
    ("x", "m", "dtype", "message"),
    [
        (torch.zeros(2, 5), 9, torch.int8, "m=9, must be an integer from 1 to 8"),
        (torch.zeros(2, 5), 0, torch.int8, "m=0"),
        (torch.zeros(2, 5), 2, F64, "dtype=torch.float64, must be torch.int8 or torch.float32"),
        (torch.zeros(2, 5, 1), 2, torch.int8, r"x is torch.float32 \[2, 5, 1\]"),
        (torch.zeros(2, 5, dtype=torch.int8), 2, torch.int8, "x is torch.int8"),
    ],
)
def test_srht_errors_name_the_argument(x, m, dtype, message):
    with pytest.raises(ValueError, match=f"srht: {message}"):
        ops.srht(x, m, dtype=dtype)


def test_threads_do_not_change_a_bit_of_the_sums(backend):
    v, x = torch.randint(-127, 128, (900, 64), dtype=torch.int8), torch.randn(900, 20)
    threads, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            outs.append(ops.similarity_mix(v, x, 4.0, 0.1, 5))
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)
    assert torch.equal(outs[1], outs[2])


def test_memory_grows_with_the_clients_not_with_their_pairs(backend):
    """6,000 clients: a matrix of all pairs would take 144 MB in float32."""
    code = (
        "import torch\n"
        "from fastfact import ops\n"
        "from fastfact.bench.server import _peak\n"
        "torch.set_num_threads(1)\n"
        "v, x = torch.randint(-127, 128, (6000, 64), dtype=torch.int8), torch.randn(6000, 16)\n"
        "ops.similarity_mix(v[:600], x[:600], 4.0, 0.1, 3)\n"
        "before = _peak()\n"
        "ops.similarity_mix(v, x, 4.0, 0.9, 3)\n"
        "print((_peak() - before) // 1024)\n"
    )
    done = forked.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100, "MiB"


def test_a_mix_of_tensors_without_numbers_has_its_shapes():
    v, *uploads = (torch.empty(5, *size, device="meta") for size in ((4,), (2,), (3, 2)))
    mixed = ops.similarity_mix(v, uploads, 1.0, 0.5, min_matches=3, rows=range(1, 4))
    assert [tuple(out.shape) for out in mixed] == [(3, 2), (3, 3, 2)] and all(out.is_meta for out in mixed)
