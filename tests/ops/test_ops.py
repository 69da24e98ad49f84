"""The ops as every backend must serve them: shapes, errors, transforms, and what PyTorch asks of a custom op."""

import importlib

import pytest
import torch

import fastfact as ff
from fastfact import ops
from fastfact.ops.registry import with_kernels

K, R, OUT, IN, H, W = 3, 2, 5, 4, 3, 2
D = torch.float64
INDEX = torch.arange(1, OUT * IN * H * W, 7, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def factors(op, clients=True):
    """One set of float64 arguments per weight op: (function of the tensors, the tensors)."""
    lead = (K,) if clients else ()

    def draw(*shape):
        return torch.randn(*lead, *shape, dtype=D)

    size = (OUT, IN, H, W)
    return {
        "spatial": (lambda u, v, mu: ops.rank1_weight(u, v, mu), (draw(R, H, W), draw(R, OUT, IN), draw(*size))),
        "kernel": (
            lambda u, v, mu: ops.rank1_weight(u, v, mu, layout="kernel"),
            (draw(R, IN, H), draw(R, OUT, W), draw(*size)),
        ),
        "view": (
            lambda u, v, mu: ops.rank1_weight(u, v, mu, layout="view"),
            (draw(R, H, W), draw(R, OUT, IN), draw(*size)),
        ),
        "compact": (
            lambda u, v, mu: ops.rank1_weight(u, v, mu, INDEX, layout="kernel", channels_last=True),
            (draw(R, IN, H), draw(R, OUT, W), draw(len(INDEX))),
        ),
        "linear": (
            lambda u, v, mu: ops.rank1_weight(u, v, mu, layout="linear"),
            (draw(R, IN), draw(R, OUT), draw(OUT, IN)),
        ),
        "separable": (
            lambda s, a, b: ops.lowrank_weight(s, a, b, size, scaling=0.5),
            (draw(*size), draw(R, OUT * W), draw(IN * H, R)),
        ),
        "lowrank-view": (
            lambda s, a, b: ops.lowrank_weight(s, a, b, size, layout="view"),
            (draw(*size), draw(R, IN * W), draw(OUT * H, R)),
        ),
        "hadamard": (
            lambda *t: ops.hadamard_weight(*t, size, personalized=True),
            (draw(OUT, R), draw(IN * H * W, R), draw(OUT, R), draw(IN * H * W, R)),
        ),
    }[op]


OPS = ("spatial", "kernel", "view", "compact", "linear", "separable", "lowrank-view", "hadamard")


@pytest.mark.parametrize("op", OPS)
def test_client_axis_is_one_client_at_a_time(op):
    function, tensors = factors(op)
    stacked = function(*tensors)
    for k in range(K):
        torch.testing.assert_close(stacked[k], function(*(t[k] for t in tensors)))


@pytest.mark.parametrize("op", OPS)
def test_a_tensor_without_the_client_axis_is_shared(op):
    function, tensors = factors(op)
    for shared in range(len(tensors)):
        mixed = [t[0].clone().requires_grad_() if j == shared else t for j, t in enumerate(tensors)]
        out = function(*mixed)
        singles = [[m if j == shared else m[k] for j, m in enumerate(mixed)] for k in range(K)]
        torch.testing.assert_close(out, torch.stack([function(*single) for single in singles]))
        cotangent = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, mixed[shared], cotangent)
        wanted = 0
        for k, single in enumerate(singles):
            wanted = wanted + torch.autograd.grad(function(*single), mixed[shared], cotangent[k])[0]
        torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, clients):
    function, tensors = factors(op, clients)
    assert torch.autograd.gradcheck(function, tuple(t.requires_grad_() for t in tensors))


@pytest.mark.parametrize("op", OPS)
def test_gradcheck_of_each_tensor_alone(op):
    function, tensors = factors(op, clients=False)
    for needed in range(len(tensors)):
        inputs = tuple(t.detach().requires_grad_(j == needed) for j, t in enumerate(tensors))
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("op", OPS)
def test_vmap_of_grad_with_any_axis_mapped(op):
    function, tensors = factors(op)

    def loss(*t):
        return function(*t).square().sum()

    argnums = tuple(range(len(tensors)))
    wanted = [torch.func.grad(loss, argnums)(*(t[k] for t in tensors)) for k in range(K)]
    for dim in (0, 1, -1):
        moved = [t.movedim(0, dim) for t in tensors]
        got = torch.func.vmap(torch.func.grad(loss, argnums), in_dims=dim)(*moved)
        for j in argnums:
            torch.testing.assert_close(got[j], torch.stack([w[j] for w in wanted]))


@pytest.mark.parametrize("op", OPS)
def test_nested_vmap_over_clients(op):
    function, tensors = factors(op)
    doubled = [torch.stack([t, 2 * t]) for t in tensors]
    wanted = torch.stack([function(*tensors), function(*(2 * t for t in tensors))])
    torch.testing.assert_close(torch.func.vmap(function)(*doubled), wanted)
    torch.testing.assert_close(torch.func.vmap(torch.func.vmap(function))(*doubled), wanted)
    shared_first = [doubled[0][:, 0], *doubled[1:]]
    nested = torch.func.vmap(torch.func.vmap(function, in_dims=(None,) + (0,) * (len(tensors) - 1)))(*shared_first)
    torch.testing.assert_close(nested[0, 0], wanted[0, 0])


@pytest.mark.parametrize("op", OPS)
def test_compile_of_loss_and_of_vmap_of_grad(op):
    torch._dynamo.reset()
    function, tensors = factors(op)

    def loss(*t):
        return function(*t).square().sum()

    inputs = [t.clone().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), wanted)
    mapped = torch.compile(torch.func.vmap(torch.func.grad(loss)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(mapped(*tensors), wanted[0])


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives(op):
    function, tensors = factors(op)
    inputs = [t.detach().clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradgradcheck(lambda *t: function(*t).sin(), inputs, fast_mode=True)
    inputs[0].requires_grad_(False)
    assert torch.autograd.gradgradcheck(lambda *t: function(*t).sin(), inputs, fast_mode=True)


@pytest.mark.parametrize("op", OPS)
def test_second_derivatives_of_many(op):
    function, tensors = factors(op)

    def length(*t):
        grads = torch.func.grad(lambda *t: function(*t).sin().sum(), argnums=(0, 1))(*t)
        return sum(g.square().sum() for g in grads)

    many = torch.func.vmap(torch.func.grad(length))(*tensors)
    each = [torch.func.grad(length)(*(t[k] for t in tensors)) for k in range(len(tensors[0]))]
    torch.testing.assert_close(many, torch.stack(each))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, channels_last):
    _, tensors = factors(op)
    size = [OUT, IN, H, W]
    raw = torch.ops.fastfact
    grad = torch.randn(K, *size, dtype=D)
    if op == "hadamard":
        torch.library.opcheck(raw.hadamard_weight.default, (*tensors, size, True, channels_last))
        torch.library.opcheck(raw.hadamard_weight_backward.default, (grad, *tensors, size, True, 0b1011))
    elif op in ("separable", "lowrank-view"):
        layout = 4 if op == "separable" else 3
        torch.library.opcheck(raw.lowrank_weight.default, (*tensors, layout, size, 0.5, channels_last))
        torch.library.opcheck(raw.lowrank_weight_backward.default, (grad, *tensors[1:], layout, size, 0.5, 0b10))
    elif op == "compact":
        u, v, values = tensors
        tensors = (u, v, values, INDEX.expand(K, -1), 2)
        torch.library.opcheck(raw.compact_weight.default, (*tensors, channels_last))
        torch.library.opcheck(raw.compact_weight_backward.default, (grad, *tensors, 0b101))
    else:
        layout = {"linear": 0, "spatial": 1, "kernel": 2, "view": 3}[op]
        u, v, mu = tensors
        grad = torch.randn_like(mu)
        torch.library.opcheck(raw.rank1_weight.default, (mu, u, v, layout, channels_last))
        torch.library.opcheck(raw.rank1_weight_backward.default, (grad, u, v, layout, 0b01))


def test_a_weight_with_a_support_is_that_of_the_dense_mu():
    for layout, u, v in (("spatial", (R, H, W), (R, OUT, IN)), ("kernel", (R, IN, H), (R, OUT, W))):
        u, v, values = (torch.randn(K, *shape, dtype=D) for shape in (u, v, (9,)))
        index = torch.stack([torch.randperm(OUT * IN * H * W)[:9].sort().values for _ in range(K)])
        mu = torch.zeros(K, OUT * IN * H * W, dtype=D).scatter(1, index, values).view(K, OUT, IN, H, W)
        out = ops.rank1_weight(u, v, values, index, layout=layout)
        torch.testing.assert_close(out, ops.rank1_weight(u, v, mu, layout=layout))


def test_opcheck_of_the_step_and_the_bitmap():
    raw = torch.ops.fastfact
    tensors = [[torch.randn(4, 3), torch.randn(7)] for _ in range(3)]
    torch.library.opcheck(raw.prox_sgd_step.default, (*tensors, [0.0, 0.1], 0.1, 0.9, 0.0, True))
    x = torch.randn(2, 3, 11) * (torch.rand(2, 3, 11) < 0.4)
    for code in (0, 1, 2):
        torch.library.opcheck(raw.pack_bitmap.default, (x, code))
        bits, values, scale = raw.pack_bitmap(x, code)
        torch.library.opcheck(raw.unpack_bitmap.default, (bits, values, scale, 11))


def test_opcheck_of_rows_and_the_loss():
    raw = torch.ops.fastfact
    samples, index = [torch.randn(5, 2, 3), torch.randn(4, 2, 3)], torch.tensor([[0, 4, 2], [0, 3, 1]])
    torch.library.opcheck(raw.gather_rows.default, (samples, index))
    torch.library.opcheck(raw.rows_linear.default, (samples, index, torch.randn(2, 4, 6)))
    torch.library.opcheck(raw.rows_linear_backward.default, (samples, index, torch.randn(2, 3, 4)))
    torch.library.opcheck(raw.softmax_loss.default, (torch.randn(2, 3, 5), index))
    weight, bias = torch.randn(2, 5, 6), torch.randn(2, 5)
    torch.library.opcheck(raw.rows_softmax_loss.default, (samples, index, weight, bias, index))


def test_a_batch_that_the_model_writes_to_is_no_longer_rows_of_the_samples():
    samples, index = [torch.randn(9, 6) for _ in range(3)], torch.randint(9, (3, 4))
    weight = torch.randn(3, 5, 6)

    def loss(w, x):
        return torch.nn.functional.linear(x.mul_(2), w).square().sum()

    with ops.GatheredBatch(samples, index) as batch:
        found = torch.func.vmap(torch.func.grad_and_value(loss))(weight, batch.x)
    batches = torch.stack([some[rows] for some, rows in zip(samples, index, strict=True)])
    torch.testing.assert_close(found, torch.func.vmap(torch.func.grad_and_value(loss))(weight, batches))


def test_cross_entropy_is_twice_differentiable():
    x, w, labels = torch.randn(3, 4).double(), torch.randn(5, 4).double(), torch.tensor([0, 3, 2])
    entropies = ops.cross_entropy, torch.nn.functional.cross_entropy

    def penalty(entropy, w, x=x):
        (of_x,) = torch.autograd.grad(entropy(x @ w.T, labels), x, create_graph=True)
        return of_x.square().sum() + entropy(x @ w.T, labels)

    x.requires_grad_()
    w.requires_grad_()
    found, wanted = (torch.autograd.grad(penalty(entropy, w), w)[0] for entropy in entropies)
    torch.testing.assert_close(found, wanted)
    plain = x.detach()
    found, wanted = (
        torch.func.grad(lambda x, e=entropy: torch.func.grad(lambda x: e(x, labels) ** 2)(x).pow(2).sum())(plain)
        for entropy in entropies
    )
    torch.testing.assert_close(found, wanted)
    many = torch.randn(6, 3, 4).double()
    hessians = [torch.func.vmap(torch.func.hessian(lambda x, e=entropy: e(x, labels)))(many) for entropy in entropies]
    torch.testing.assert_close(*hessians)


def test_cross_entropy_of_many():
    logits, labels = torch.randn(3, 6, 5, dtype=D), torch.randint(5, (3, 6))
    cross_entropy = torch.nn.functional.cross_entropy
    wanted = [torch.func.grad_and_value(cross_entropy)(*one) for one in zip(logits, labels, strict=True)]
    grads, losses = torch.func.vmap(torch.func.grad_and_value(ops.cross_entropy))(logits, labels)
    torch.testing.assert_close(grads, torch.stack([grad for grad, _ in wanted]))
    torch.testing.assert_close(losses, torch.stack([loss for _, loss in wanted]))
    (shared,) = torch.func.vmap(lambda y: (ops.cross_entropy(logits[0], y),))(labels)
    torch.testing.assert_close(shared, torch.stack([cross_entropy(logits[0], y) for y in labels]))
    x = logits[0].requires_grad_()
    (grad,) = torch.autograd.grad(2 * ops.cross_entropy(x, labels[0]), x)
    torch.testing.assert_close(grad, 2 * wanted[0][0])


def test_bitmap_of_stacked_clients():
    x = torch.randn(2, 3, 11) * (torch.rand(2, 3, 11) < 0.4)
    bits, values, scale = ops.pack_bitmap(x, torch.int8)
    assert (bits.shape, scale.shape) == ((2, 3, 2), (2, 3))
    whole = ops.unpack_bitmap(bits, values, scale, 11)
    parts = [ops.unpack_bitmap(*ops.pack_bitmap(row, torch.int8), 11) for row in x]
    assert torch.equal(whole, torch.stack(parts))


def test_the_weight_follows_the_memory_format_of_the_dense_factor():
    function, (u, v, mu) = factors("spatial", clients=False)
    assert function(u, v, mu).is_contiguous()
    assert function(u, v, mu.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
    last = ops.rank1_weight(u, v, channels_last=True)
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, ops.rank1_weight(u, v))


def z(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def conv(op=ops.factored_conv2d, **settings):
    return op(z(1, 2, 4, 4), z(1, 3, 3), z(1, 4, 2), size=(4, 2, 3, 3), **settings)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), layout="spacial"), "layout='spacial'"),
        (lambda: ops.rank1_weight(z(3, 3), z(1, 4, 2)), r"u has shape \[3, 3\], must have 3 dimensions"),
        (lambda: ops.rank1_weight(z(2, 3, 3), z(1, 4, 2)), r"v has shape \[1, 4, 2\], must be \[2, 4, 2\]"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), z(4, 2, 3, 5)), r"mu has shape \[4, 2, 3, 5\]"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), index=INDEX), "index goes together with the values of mu"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), z(3), INDEX), r"mu has shape \[3\], must be \[17\]"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), z(17), INDEX.double()), r"index is torch\.float64 on cpu"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2, dtype=D)), r"v is torch\.float64 on cpu"),
        (lambda: ops.rank1_weight(z(5, 1, 3, 3), z(6, 1, 4, 2)), "client axes differ: u has 5, v has 6"),
        (lambda: ops.lowrank_weight(None, z(2, 8), z(6, 2), (4, 2, 3)), r"size=\(4, 2, 3\)"),
        (lambda: ops.lowrank_weight(None, z(2, 8), z(6, 2), (4, 2, 3, 3)), r"a has shape \[2, 8\], must be \[2, 12\]"),
        (lambda: ops.lowrank_weight(None, z(2, 12), z(6, 3), (4, 2, 3, 3)), r"b has shape \[6, 3\], must be \[6, 2\]"),
        (
            lambda: ops.lowrank_weight(z(4, 2, 3, 2), z(2, 12), z(6, 2), (4, 2, 3, 3)),
            r"sigma has shape \[4, 2, 3, 2\]",
        ),
        (lambda: ops.hadamard_weight(z(4, 2), z(6, 2), z(4, 2), z(5, 2), (4, 6)), r"y2 has shape \[5, 2\]"),
        (lambda: ops.hadamard_weight(z(4, 2), z(6, 2), z(4, 2), z(6, 2), (4,)), r"size=\(4,\)"),
        (lambda: ops.prox_sgd_step([z(2)], [], [], [0.0], lr=0.1), "1 params, 0 grads"),
        (lambda: ops.prox_sgd_step([z(2)], [z(2)], [], [0.0], lr=0.1, momentum=0.9), "0 momenta"),
        (lambda: ops.prox_sgd_step([z(2)], [z(3)], [], [0.0], lr=0.1), r"grads\[0\] is torch\.float32 \[3\]"),
        (lambda: ops.prox_sgd_step([z(2)], [z(2)], [], [-1.0], lr=0.1), r"l1\[0\]=-1.0"),
        (lambda: ops.pack_bitmap(z(2, 3), torch.float16), r"dtype=torch\.float16"),
        (lambda: ops.pack_bitmap(z(3)), r"x has shape \[3\]"),
        (lambda: ops.rank1_weight(z(1, 3, 3), z(1, 4, 2), z(17), INDEX.long() + 2**32), "index must be ascending"),
        (lambda: ops.rank1_weight(z(1, 3, 3).long(), z(1, 4, 2).long()), r"u is torch\.int64, must be torch\.float32"),
        (lambda: conv(padding=2**63 - 1), "padding=9223372036854775807, must be one or two integers, each from 0"),
        (lambda: conv(padding=2**31 - 1), r"padding=\(2147483647, 2147483647\) makes x, 4×4, larger than"),
        (lambda: conv(stride=2**31), "stride=2147483648, must be one or two integers, each from 1 to 2147483647"),
        (lambda: conv(groups=3), "groups=3: o must be a multiple of groups"),
        (lambda: conv(ops.fused_conv2d, mu=z(17), index=INDEX.flip(0)), "fused_conv2d: index must be ascending"),
        (lambda: conv(ops.fused_conv2d, mu=z(17), index=INDEX + 100), "fused_conv2d: index must be ascending"),
        (lambda: conv(ops.separable_conv2d), r"separable_conv2d: u has shape \[1, 3, 3\], must be \[1, 2, 3\]"),
        (
            lambda: ops.factored_linear(z(3, 5), z(1, 5), z(1, 6), size=(6, 4)),
            r"x has shape \[3, 5\], must be",
        ),
        (
            lambda: ops.factored_linear(z(3, 4), z(1, 5), z(1, 6), size=(6, 4)),
            r"u has shape \[1, 5\], must be",
        ),
        (lambda: ops.prox_sgd_step([z(2)], [z(2).to("meta")], [], [0.0], lr=0.1), r"grads\[0\] is .* on meta"),
        (
            lambda: ops.prox_sgd_step([z(1).expand(2)], [z(2)], [], [0.0], lr=0.1),
            r"params\[0\] has elements",
        ),
        (lambda: ops.similarity_mix(torch.zeros(()), z(2), 1.0), r"v has shape \[\]"),
        (lambda: ops.srht(z(2, 4), 9), "m=9, must be an integer from 1 to 4"),
        (lambda: ops.gather_rows([z(3)], torch.tensor([[3]])), "index has 3 for client 0"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: ops.rank1_weight(None, z(1, 4, 2)), "u is NoneType, must be a tensor"),
        (lambda: ops.rank1_weight(z(1, 3, 3).to_sparse(), z(1, 4, 2)), r"u is torch\.sparse_coo, must be dense"),
        (lambda: conv(stride=1.5), "stride=1.5, must be one or two integers"),
        (lambda: ops.factored_conv2d(z(1, 2, 4, 4), size=3), r"size=3, must be \(o, i, kh, kw\)"),
        (lambda: ops.prox_sgd_step(5, [], [], [], lr=0.1), "params is int, must be a list of tensors"),
        (lambda: ops.prox_sgd_step(["x"], [z(2)], [], [0.0], lr=0.1), r"params\[0\] is str, must be a tensor"),
        (lambda: ops.pack_bitmap(z(2, 3).to_sparse(), torch.int8), r"x is torch\.sparse_coo, must be dense"),
        (lambda: ops.similarity_mix(z(2, 3), z(2), "a"), "epsilon='a', must be a number"),
        (lambda: ops.srht(z(2, 4), 2, seed=[1]), r"seed=\[1\], must be an integer"),
    ],
)
def test_another_kind_of_argument_is_a_type_error(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_shapes_on_the_meta_device():
    x, u, v = (t.to("meta") for t in (z(1, 2, 4, 4), z(1, 3, 3), z(1, 4, 2)))
    for op in (ops.factored_conv2d, ops.fused_conv2d):
        assert op(x, u, v, size=(4, 2, 3, 3)).shape == (1, 4, 2, 2)
    assert ops.rank1_weight(u, v).shape == (4, 2, 3, 3)


@pytest.mark.parametrize("op", [ops.rank1_weight, ops.fused_conv2d])
def test_an_index_is_looked_at_again_after_a_write(op):
    """Where no compiled kernel looks while it reads."""
    index = INDEX.clone()[:8]
    how = {} if op is ops.rank1_weight else {"x": z(1, 2, 4, 4), "size": (4, 2, 3, 3)}
    with ff.use_backend("reference"):
        for _ in range(2):
            op(u=z(1, 3, 3), v=z(1, 4, 2), mu=z(8), index=index, **how)
        index[3] = 99
        with pytest.raises(ValueError, match="index must be ascending positions in the weight, 0 to 71"):
            op(u=z(1, 3, 3), v=z(1, 4, 2), mu=z(8), index=index, **how)


def test_use_backend():
    assert set(ff.backends()) == {"reference", "cpu", "cuda", "triton"}
    with pytest.raises(ValueError, match="name='cudda'"), ff.use_backend("cudda"):
        pass
    function, tensors = factors("spatial")
    with ff.use_backend("reference"):
        wanted = function(*tensors)
    torch.testing.assert_close(function(*tensors), wanted)
    for name, state in ff.backends().items():
        if not state.available:
            assert state.detail
            with pytest.raises(RuntimeError, match=name), ff.use_backend(name):
                pass


def test_the_compiled_library_serves_here():
    assert ff.backends()["cpu"].available, ff.backends()["cpu"].detail


def test_a_library_that_lacks_kernels_is_told(monkeypatch):
    """The reference serves what an old build has not, correctly and slowly: nobody would notice."""
    module = importlib.import_module("fastfact.ops.backends")
    before, name = module._load_library("cpu"), module.library_file("cpu").name
    assert before.detail == name
    monkeypatch.setattr(module, "with_kernels", lambda name: [*with_kernels(name), "fused_conv2d"])
    state = module._load_library("cpu")
    assert (
        state.available and state.detail == f"{name} is older than this package and has no fused_conv2d: build it again"
    )
