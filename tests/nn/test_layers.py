"""The factorized layers against nn.Conv2d and nn.Linear fed with the same weight, and what a drop-in layer must do."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fastfact as ff

SPECS = {
    "spatial": ff.Rank1(),
    "spatial-3": ff.Rank1(rank=3),
    "spatial-no-mu": ff.Rank1(sparse=False),
    "kernel": ff.Rank1(layout="kernel", rank=2),
    "view": ff.Rank1(layout="view"),
    "separable": ff.LowRank(),
    "lowrank-view": ff.LowRank(ratio=0.4, layout="view", scaling=0.5),
    "fedpara": ff.Hadamard(),
    "pfedpara": ff.Hadamard(ratio=0.3, personalized=True),
    "fedpara-tensor": ff.Hadamard(tensor=True),
    "pfedpara-tensor": ff.Hadamard(personalized=True, tensor=True),
}
CONVS = {
    "plain": dict(kernel_size=3),
    "same": dict(kernel_size=3, padding="same"),
    "stride": dict(kernel_size=5, stride=2, padding=2),
    "dilated": dict(kernel_size=3, dilation=2, padding=1, bias=False),
    "grouped": dict(kernel_size=3, groups=2, padding=1),
    "rectangular": dict(kernel_size=(1, 3), stride=(2, 1), padding=(0, 1)),
    "pointwise": dict(kernel_size=1),
    "reflect": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "circular": dict(kernel_size=3, padding="same", padding_mode="circular"),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomized(layer):
    """The layer with every factor nonzero (B and μ start at zero)."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return layer


def conv(spec, dtype=torch.float64, **settings):
    return randomized(ff.nn.FactorizedConv2d(4, 6, **{"kernel_size": 3, **settings}, dtype=dtype, spec=spec))


def expected_weight(layer):
    """W from the equations, index by index."""
    f = {name: factor.detach() for name, factor in layer.factors().items()}
    spec, size = layer.spec, layer.size
    w = torch.zeros(size, dtype=next(iter(f.values())).dtype)
    linear = len(size) == 2
    for index in torch.cartesian_prod(*(torch.arange(n) for n in size)).tolist():
        o, i, ky, kx = (*index, 0, 0)[:4]
        if isinstance(spec, ff.Rank1):
            flat = ((o * size[1] + i) * (1 if linear else size[2]) + ky) * (1 if linear else size[3]) + kx
            for r in range(spec.rank):
                u, v = f["u"][r], f["v"][r]
                if linear:
                    w[o, i] += u[i] * v[o]
                elif spec.layout == "kernel":
                    w[o, i, ky, kx] += u[i, ky] * v[o, kx]
                elif spec.layout == "spatial":
                    w[o, i, ky, kx] += u[ky, kx] * v[o, i]
                else:
                    w[o, i, ky, kx] += u.flatten()[flat // v.numel()] * v.flatten()[flat % v.numel()]
            if spec.sparse:
                w[tuple(index)] += f["mu"][tuple(index)]
        elif isinstance(spec, ff.LowRank):
            ba = f["B"] @ f["A"]
            kh, kw = (1, 1) if linear else size[2:]
            product = ba[i * kh + ky, o * kw + kx] if spec.layout == "separable" else ba.reshape(size)[tuple(index)]
            w[tuple(index)] = f["sigma"][tuple(index)] + spec.scaling * product
        else:
            n = i if linear else (i * size[2] + ky) * size[3] + kx
            first, second = (
                f["x" + j][o] @ (f["t" + j][:, :, ky, kx] @ f["y" + j][i] if "t" + j in f else f["y" + j][n])
                for j in "12"
            )
            w[tuple(index)] = first * (second + 1 if spec.personalized else second)
    return w


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("settings", [dict(kernel_size=3), dict(kernel_size=(1, 3)), dict(kernel_size=2, groups=2)])
def test_conv_weight_is_the_equation(spec, settings):
    layer = conv(spec, **settings)
    torch.testing.assert_close(layer.weight, expected_weight(layer), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_linear_is_the_equation(spec):
    layer = randomized(ff.nn.FactorizedLinear(5, 3, dtype=torch.float64, spec=spec))
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.linear(x, expected_weight(layer), layer.bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_linear_in_evaluation_takes_rows_that_lie_as_images_in_channels_last(spec):
    layer = randomized(ff.nn.FactorizedLinear(5, 3, dtype=torch.float64, spec=spec)).eval()
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, expected_weight(layer), layer.bias), rtol=1e-12, atol=1e-12)


ROWS = {
    "turned, of one image": lambda x: x(1, 5, 4).transpose(1, 2),
    "turned": lambda x: x(3, 5, 4).transpose(1, 2),
    "a chunk": lambda x: x(3, 4, 15).chunk(3, -1)[1],
    "every third number": lambda x: x(3, 4, 15)[..., ::3],
    "every second row": lambda x: x(6, 4, 5)[::2, ::2],
    "axes swapped": lambda x: x(4, 3, 5).transpose(0, 1),
    "one image, repeated": lambda x: x(1, 4, 5).expand(3, 4, 5),
    "one row each, repeated": lambda x: x(3, 1, 5).expand(3, 4, 5),
    "one number each, repeated": lambda x: x(3, 4, 1).expand(3, 4, 5),
    "columns of all images": lambda x: x(5, 3, 4).permute(1, 2, 0),
    "columns, images within": lambda x: x(5, 3, 4).permute(2, 1, 0),
    "one row": lambda x: x(1, 1, 10)[..., ::2],
    "none": lambda x: x(3, 0, 5),
}
"""Inputs [..., 5] of a linear layer that lie otherwise than rows one after the other."""


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
@pytest.mark.parametrize("case", ROWS)
def test_linear_takes_rows_however_they_lie(case, path):
    layer = randomized(ff.nn.FactorizedLinear(5, 3, dtype=torch.float64, spec=ff.Rank1(rank=2))).compact(0.5)
    layer.path = path
    x = ROWS[case](lambda *size: torch.randn(*size, dtype=torch.float64))
    dense = layer.to_dense()
    ours, truth = x.detach().requires_grad_(), x.detach().requires_grad_()
    y, expected = layer(ours), dense(truth)
    grad = torch.randn_like(expected.transpose(0, 1)).transpose(0, 1)
    y.backward(grad), expected.backward(grad)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, truth.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", CONVS.values(), ids=CONVS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_conv_forward_and_gradients(spec, settings):
    layer = conv(spec, **settings)
    dense = torch.nn.Conv2d(4, 6, dtype=torch.float64, **settings)
    with torch.no_grad():
        dense.weight.copy_(layer.weight)
        if dense.bias is not None:
            dense.bias.copy_(layer.bias)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    out, wanted = layer(x), dense(x)
    torch.testing.assert_close(out, wanted)
    cotangent = torch.randn_like(out)
    (wanted * cotangent).sum().backward()
    (out * cotangent).sum().backward()
    if dense.bias is not None:
        torch.testing.assert_close(layer.bias.grad, dense.bias.grad)
    with ff.use_backend("reference"):
        grads = torch.autograd.grad(layer.weight, list(layer.factors().values()), dense.weight.grad)
    for (name, factor), grad in zip(layer.factors().items(), grads, strict=True):
        torch.testing.assert_close(factor.grad, grad, msg=name)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradcheck(spec):
    layer = conv(spec, groups=2)
    names = list(layer.factors())

    def weight(*tensors):
        return torch.func.functional_call(layer, dict(zip(names, tensors, strict=True)), x)

    x = torch.randn(1, 4, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(weight, tuple(f.detach().requires_grad_() for f in layer.factors().values()))


@pytest.mark.parametrize("name", ["u", "v", "mu"])
def test_only_the_factor_that_trains_gets_a_gradient(name):
    layer = conv(ff.Rank1())
    for other, factor in layer.factors().items():
        factor.requires_grad_(other == name)
    layer(torch.randn(1, 4, 5, 5, dtype=torch.float64)).sum().backward()
    assert [other for other, factor in layer.factors().items() if factor.grad is not None] == [name]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(spec, dtype):
    layer = conv(spec, dtype=torch.float32, padding=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.3)
    half = copy.deepcopy(layer).to(dtype)
    x = torch.randn(2, 4, 6, 6)
    assert half(x.to(dtype)).dtype == dtype
    wanted = expected_weight(copy.deepcopy(half).double())
    error = (half.weight.double() - wanted).abs().max().item()
    assert error <= 2 * torch.finfo(dtype).eps * max(1, wanted.abs().max().item())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_autocast(spec):
    layer = conv(spec, dtype=torch.float32, padding=1)
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    wanted = layer(x)
    assert (out.float() - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_under_autocast_the_weight_is_written_in_its_dtype(spec, monkeypatch):
    """Once, in the type that the convolution takes; `weight` itself stays in that of the parameters."""
    taken = []
    convolve = torch.nn.functional.conv2d
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda x, w, *a: taken.append(w.dtype) or convolve(x, w, *a))
    multiply = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, *a: taken.append(w.dtype) or multiply(x, w, *a))
    layer, x = conv(spec, dtype=torch.float32, padding=1), torch.randn(2, 4, 6, 6)
    linear = ff.nn.FactorizedLinear(6, 5, spec=spec)
    layer.path = linear.path = "reconstruct"
    for one, given in ((layer, x), (linear, x)):
        kept = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t)
        with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
            one(given)
        if isinstance(spec, ff.Rank1 | ff.LowRank):  # one node, which saves W last
            taken.append(kept[-1].dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.weight.dtype == torch.float32
    assert taken == [torch.bfloat16] * 2
    assert layer.double()(x.double()).dtype == torch.float64
    taken.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        layer(x.double())
    assert taken == [torch.float64]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_channels_last_model_needs_no_permutation(spec):
    model = torch.nn.Sequential(conv(spec, dtype=torch.float32, padding=1))
    x = torch.randn(2, 4, 6, 6)
    wanted = model(x)
    model.to(memory_format=torch.channels_last)
    y = model(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, wanted)
    if spec.dense and spec.dense in model[0].factors():
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        y.sum().backward()
        dense_factor = model[0].factors()[spec.dense]
        assert dense_factor.grad.stride() == dense_factor.stride()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_image_in_channels_last_has_the_strides_of_a_dense_layer(spec, training):
    """Those of axes of one element too: PyTorch's batch-norm takes its gradient by them."""
    layer = conv(spec, dtype=torch.float32, padding=1).train(training)
    x = torch.randn(1, 4, 6, 6).to(memory_format=torch.channels_last)
    wanted = F.conv2d(x, layer.weight, layer.bias, padding=1).stride()
    for path in layer.paths:
        if path == "factored" and not layer.can_factor:
            continue
        layer.path = path
        for grad in (True, False):
            for _ in range(2):
                with torch.set_grad_enabled(grad):
                    assert layer(x).stride() == wanted, path


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_compile_fullgraph(spec):
    torch._dynamo.reset()
    layer = conv(spec, dtype=torch.float32)
    x = torch.randn(2, 4, 6, 6)
    wanted = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_per_sample_gradients_by_vmap_of_grad(spec):
    layer = conv(spec)
    params = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)

    def loss(params, x):
        return torch.func.functional_call(layer, params, (x[None],)).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    for n in range(3):
        for name, grad in torch.func.grad(loss)(params, x[n]).items():
            torch.testing.assert_close(got[name][n], grad)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_many_clients_by_vmap(spec):
    layers = [conv(spec) for _ in range(3)]
    params, _ = torch.func.stack_module_state(layers)
    x = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64)

    def loss(params, x):
        return torch.func.functional_call(layers[0], params, (x,)).square().sum()

    got = torch.func.vmap(torch.func.grad(loss))(params, x)
    for k, layer in enumerate(layers):
        wanted = torch.autograd.grad(layer(x[k]).square().sum(), list(layer.parameters()))
        for (name, _), grad in zip(layer.named_parameters(), wanted, strict=True):
            torch.testing.assert_close(got[name][k], grad)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_keep_values_and_the_mark_of_mu(spec):
    layer = conv(spec, dtype=torch.float32)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    assigned = ff.nn.FactorizedConv2d(4, 6, 3, spec=spec)
    assigned.load_state_dict(torch.load(buffer, weights_only=True), assign=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), assigned):
        assert torch.equal(other.weight, layer.weight)
        assert {n for n, p in other.named_parameters() if ff.sparsity.penalized(p)} == (
            {"mu"} if "mu" in layer.factors() else set()
        )


def test_state_dict_is_factors_and_bias():
    assert list(conv(ff.Rank1()).state_dict()) == ["u", "v", "mu", "bias"]
    assert list(conv(ff.LowRank(), bias=False).state_dict()) == ["sigma", "A", "B"]
    assert list(conv(ff.Hadamard(), bias=False).factors()) == ["x1", "y1", "x2", "y2"]
    assert list(conv(ff.Hadamard(tensor=True), bias=False).factors()) == ["t1", "t2", "x1", "y1", "x2", "y2"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_export(spec):
    layer = conv(spec, dtype=torch.float32)
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_unbatched_input_and_repr():
    layer = conv(ff.Rank1())
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer(x[None])[0])
    assert "Rank1(layout='spatial'" in repr(layer)


def test_density_and_prune():
    layer = conv(ff.Rank1())
    largest = layer.mu.detach().abs().flatten().topk(22).indices.sort().values
    assert layer.density == 1.0
    assert layer.prune_(density=0.1) is layer
    assert torch.equal(layer.mu.detach().flatten().nonzero().flatten(), largest)
    assert layer.density == 22 / 216
    assert conv(ff.Rank1(sparse=False)).density == 0.0
    assert conv(ff.LowRank()).density == 1.0


@pytest.mark.parametrize("density", [-0.1, 1.5, float("nan")])
def test_prune_rejects_a_density_outside_0_1(density):
    layer = conv(ff.Rank1())
    before = layer.mu.detach().clone()
    with pytest.raises(ValueError, match=r"density=.*between 0 and 1"):
        layer.prune_(density)
    assert torch.equal(layer.mu, before)


def test_prune_without_mu_is_an_error():
    with pytest.raises(ValueError, match="no sparse factor"):
        conv(ff.LowRank()).prune_(0.5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ff.Rank1(layout="spatail"), "layout='spatail'.*'spatial', 'kernel', 'view'"),
        (lambda: ff.Rank1(rank=0), "rank=0"),
        (lambda: ff.LowRank(ratio=0), "ratio=0"),
        (lambda: ff.LowRank(linear_ratio=1.5), "linear_ratio=1.5"),
        (lambda: ff.LowRank(layout="spatial"), "layout='spatial'"),
        (lambda: ff.Hadamard(ratio=-1), "ratio=-1"),
        (lambda: ff.nn.FactorizedConv2d(3, 4, 3, groups=2), "divisible by groups"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def layers_and_inputs():
    conv, linear = ff.nn.FactorizedConv2d(6, 4, 3), ff.nn.FactorizedLinear(6, 4)
    return (conv, torch.ones(2, 6, 5, 5)), (linear, torch.ones(3, 6))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_an_input_of_another_dtype_is_told_as_one(training, dtype):
    for layer, x in (
        (ff.nn.FactorizedConv2d(6, 4, 3), torch.ones(2, 6, 5, 5)),
        (ff.nn.FactorizedLinear(6, 4), torch.ones(3, 6)),
    ):
        layer.compact()
        layer.train(training)(x)
        with pytest.raises((RuntimeError, ValueError), match=f"x is {dtype}, must be torch.float32"):
            layer(x.to(dtype))


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_images_without_pixels_are_refused_on_every_path(path):
    layer = ff.nn.FactorizedConv2d(4, 4, 3, padding=2)
    layer.compact()
    layer.path = path
    with pytest.raises((RuntimeError, ValueError), match=r"zero channel|small|no pixels"):
        layer(torch.ones(2, 4, 9, 0))


@pytest.mark.parametrize("compact", [False, True])
def test_fake_inputs_of_a_real_layer(compact):
    for layer, x in (
        (ff.nn.FactorizedConv2d(6, 4, 3), torch.ones(2, 6, 5, 5)),
        (ff.nn.FactorizedLinear(6, 4), torch.ones(3, 6)),
    ):
        if compact:
            layer.compact()
        wanted = layer(x).shape
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x)).shape == wanted
            with torch.no_grad():
                assert layer.eval()(mode.from_tensor(x)).shape == wanted


def test_spec_of_the_wrong_type():
    with pytest.raises(TypeError, match="spec='rank1'"):
        ff.nn.FactorizedLinear(3, 4, spec="rank1")


def test_the_weight_and_the_layer_are_one_node():
    for layer, x in ((conv(ff.Rank1()), torch.randn(2, 4, 6, 6)), (ff.nn.FactorizedLinear(4, 3), torch.randn(5, 4))):
        layer.to(torch.float32).path = "reconstruct"
        y = layer(x)
        assert {type(after).__name__ for after, _ in y.grad_fn.next_functions if after} == {"AccumulateGrad"}


@pytest.mark.parametrize("path", ["reconstruct", "factored"])
def test_what_evaluation_keeps_follows_the_settings(path, monkeypatch):
    monkeypatch.setattr(ff.nn.choice, "choose", lambda work, sides: path)
    layer, x = conv(ff.Rank1(), torch.float32, padding=1).compact(0.3).eval(), torch.randn(2, 4, 9, 9)
    with torch.no_grad():
        for change in (
            lambda: setattr(layer, "stride", (2, 2)),
            lambda: setattr(layer, "padding", (2, 0)),
            lambda: layer.mu.data.mul_(2),
            layer.expand,
            lambda: layer.u.data.add_(1),
        ):
            assert layer(x).shape == layer(x).shape
            change()
            dense = layer.to_dense().eval()
            assert torch.allclose(layer(x), dense(x), atol=1e-5)


LAST = torch.channels_last
OF_DENSE_MU = {
    "depthwise": (lambda: ff.nn.FactorizedConv2d(6, 6, 3, padding=1, groups=6, dtype=torch.float64), (3, 6, 7, 5)),
    "few pixels": (lambda: ff.nn.FactorizedConv2d(20, 24, 3, padding=1), (2, 20, 7, 5)),
    "channels_last": (lambda: ff.nn.FactorizedConv2d(20, 24, 3, stride=2).to(memory_format=LAST), (2, 20, 7, 5)),
    "1×1": (lambda: ff.nn.FactorizedConv2d(20, 24, 1).to(memory_format=LAST), (2, 20, 7, 5)),
    "rows": (lambda: ff.nn.FactorizedLinear(20, 24, spec=ff.Rank1(rank=3)), (30, 20)),
    "tokens": (lambda: ff.nn.FactorizedLinear(20, 24), (2, 9, 20)),
}


@pytest.mark.parametrize("case", OF_DENSE_MU)
def test_a_dense_mu_is_taken_as_it_is_without_a_weight(case, monkeypatch):
    def choose(work, sides):
        # Where W may be kept it is made to be measured.
        return "factored" if work.step == "evaluation" or "factored" in sides() else "none"

    monkeypatch.setattr(ff.nn.choice, "choose", choose)
    make, shape = OF_DENSE_MU[case]
    layer = randomized(make())
    x = torch.randn(shape, dtype=layer.mu.dtype, requires_grad=True)
    assert layer.path_for(x) == "factored"
    dense, weights = layer.to_dense(), []
    monkeypatch.setattr(type(layer.spec), "weight", lambda *_: weights.append(1))
    close = {"rtol": 1e-4, "atol": 1e-4} if x.dtype == torch.float32 else {}
    for _ in range(2):
        y, truth = layer(x), dense(x)
        torch.testing.assert_close(y, truth, **close)
        g = torch.randn_like(truth)
        found = torch.autograd.grad(y, (x, layer.bias, layer.mu), g)
        for one, other in zip(found, torch.autograd.grad(truth, (x, dense.bias, dense.weight), g), strict=True):
            torch.testing.assert_close(one, other, **close)
        assert found[-1].stride() == layer.mu.stride() or min(layer.size) == 1 or case == "1×1"
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(layer.eval()(x), dense(x), **close)
    assert not weights and len(layer._nodes) == 2
    assert not layer.is_compact and layer.state_dict()["mu"].shape == layer.size


@pytest.mark.parametrize("frozen", ["", "sigma", "A"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_low_rank_is_taken_apart_in_training_where_that_was_faster(kind, frozen, monkeypatch):
    asked = []
    monkeypatch.setattr(ff.nn.choice, "choose", lambda work, sides: asked.append((work, [*sides()])) or "factored")
    monkeypatch.setattr(ff.LowRank, "is_thin", lambda *_: False)
    spec = ff.LowRank(rank=2, scaling=1.5)
    layer, x = {
        "linear": (ff.nn.FactorizedLinear(20, 24, spec=spec), torch.randn(3, 5, 20)),
        "convolution": (ff.nn.FactorizedConv2d(6, 8, 3, stride=2, spec=spec), torch.randn(2, 6, 9, 9)),
    }[kind]
    randomized(layer)
    if frozen:
        getattr(layer, frozen).requires_grad_(False)
    weights = []
    weight = ff.LowRank.weight
    dense = layer.to_dense()
    monkeypatch.setattr(ff.LowRank, "weight", lambda *a: weights.append(1) or weight(*a))
    y = layer(x)
    torch.testing.assert_close(y, dense(x), rtol=1e-4, atol=1e-4)
    ((work, paths),) = asked
    assert not weights and paths == ["reconstruct", "factored"] and work.rank == len(layer.A) and work.nonzeros == 0
    assert work.kind.startswith("LowRank") and work.kind.endswith("σ alone") == (frozen == "A")
    assert ff.nn.choice.rule(work) == "reconstruct"
    with torch.no_grad():
        assert layer.eval().path_for(x) == "reconstruct" and len(asked) == 1


@torch.no_grad()
def test_a_dense_mu_that_loses_its_numbers_in_evaluation_is_noticed(monkeypatch):
    monkeypatch.setattr(ff.nn.choice, "choose", lambda work, sides: "factored")
    layer, x, taken = randomized(ff.nn.FactorizedLinear(40, 30)).eval(), torch.randn(20, 40), []
    factored = ff.ops.direct.factored
    monkeypatch.setattr(ff.ops.direct, "factored", lambda *a: taken.append(a[6] is None) or factored(*a))
    layer(x)
    layer.prune_(0.1)
    torch.testing.assert_close(layer(x), layer.to_dense()(x))
    assert taken[0] and not taken[-1]


@pytest.mark.parametrize("path", ["factored", "reconstruct"])
def test_rows_that_no_matrix_has_are_copied_once_in_training(path):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear.from_dense(torch.nn.Linear(12, 7), ff.Rank1(rank=2), init="svd").compact(0.6)
    layer.path = path
    twin = layer.to_dense()
    image = torch.randn(5, 12, 30)
    for _ in range(3):  # a node serves from the second on
        mine, its = (image.clone().requires_grad_() for _ in range(2))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layer(mine.transpose(1, 2)).square().sum().backward()
        twin(its.transpose(1, 2)).square().sum().backward()
        torch.testing.assert_close(mine.grad, its.grad)
    copies = {event.key: event.count for event in profile.key_averages()}
    assert copies["aten::contiguous"] == 1


@pytest.mark.parametrize("path", ["factored", "reconstruct"])
@pytest.mark.parametrize("turned", [False, True])
def test_second_derivatives_on_sequences(path, turned):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear.from_dense(torch.nn.Linear(12, 7), ff.Rank1(rank=2), init="svd").compact(0.6)
    layer.double().path = path
    x = torch.randn(2, 12, 3, dtype=torch.float64)
    x = (x if turned else x.transpose(1, 2).contiguous()).requires_grad_()

    def forward(x):
        return layer(x.transpose(1, 2) if turned else x)

    assert torch.autograd.gradgradcheck(forward, x)


@pytest.mark.parametrize(("rows", "i", "o"), [(20_001, 4, 4), (3_000, 49, 49), (4_100, 3, 17), (70_000, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_of_many_rows(rows, i, o, dtype):
    torch.manual_seed(0)
    layer = ff.nn.FactorizedLinear.from_dense(torch.nn.Linear(i, o), ff.Rank1(), init="svd").to(dtype)
    layer.path = "reconstruct"
    x = torch.randn(rows, i, dtype=dtype)
    for _ in range(2):
        y = layer(x)
    expected = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    rounding = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(y.double(), expected, rtol=rounding, atol=rounding)
