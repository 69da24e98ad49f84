"""Convolutions whose weight is made, in channels_last, against float64: by oneDNN, or by AMX where the CPU has it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastfact as ff
from fastfact.ops import direct
from fastfact.ops.common import has_amx

# n, i, o, (h, w), kernel, padding, dilation, stride: channels and planes that fill no tile, several bands, stretches
# and sets of images, panels that are shared out, W of more terms than are summed at once, kernels that are no square.
CASES = [
    (4, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), 1),
    (3, 48, 47, (11, 9), (3, 3), (1, 1), (1, 1), 1),
    (2, 57, 70, (10, 13), (3, 5), (1, 2), (1, 1), 1),
    (9, 64, 130, (4, 5), (3, 3), (1, 1), (1, 1), 1),
    (1, 96, 100, (40, 23), (3, 3), (1, 1), (1, 1), 1),
    (2, 32, 32, (60, 61), (5, 5), (2, 2), (1, 1), 1),
    (7, 300, 290, (5, 6), (3, 3), (1, 1), (1, 1), 1),
    (2, 64, 64, (16, 16), (3, 3), (2, 2), (2, 2), 1),
    (2, 64, 31, (16, 12), (3, 3), (0, 0), (1, 1), 1),
    (2, 64, 48, (16, 12), (2, 3), (1, 1), (1, 1), 1),
    (5, 30, 64, (1, 70), (1, 9), (0, 4), (1, 1), 1),
    (5, 64, 64, (70, 2), (9, 1), (4, 0), (1, 1), 1),
    (3, 64, 64, (14, 14), (3, 3), (3, 3), (1, 1), 1),
    (3, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), 2),
    (200, 64, 64, (4, 4), (3, 3), (1, 1), (1, 1), 1),
    (1, 64, 64, (40, 40), (3, 3), (8, 8), (8, 8), 1),
    (1, 128, 64, (64, 9), (3, 1), (16, 0), (16, 1), 1),
]
SETTINGS = "n, i, o, side, kernel, padding, dilation, stride"


def layers(i, o, kernel, padding, dilation, stride, density=0.6, bias=True):
    torch.manual_seed(0)
    conv = nn.Conv2d(i, o, kernel, stride, padding, dilation, bias=bias)
    ours = ff.factorize(nn.Sequential(conv), ff.Rank1(), init="svd")
    ours[0].prune_(density)
    dense = ff.densify(copy.deepcopy(ours))
    ours[0].compact()
    ours[0].path = "reconstruct"
    return ours.to(memory_format=torch.channels_last), dense.to(memory_format=torch.channels_last)


def gradients(model, x, grad):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(grad)
    layer = model[0]
    found = {"y": y.detach(), "x": x.grad, "bias": layer.bias.grad}
    if isinstance(layer, nn.Conv2d):
        return found | {"w": layer.weight.grad.flatten()}
    return found | {"w": layer.mu.grad.flatten()}


def images(n, channels, side):
    return torch.randn(n, channels, *side).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(SETTINGS, CASES, ids=str)
def test_matches_the_dense_layer(n, i, o, side, kernel, padding, dilation, stride):
    ours, dense = layers(i, o, kernel, padding, dilation, stride)
    x = images(n, i, side)
    grad = torch.randn_like(dense(x))
    index = dict(ours[0].named_buffers())["mu_index"].flatten().long()
    got, plain = gradients(ours, x, grad), gradients(dense, x, grad)
    truth = gradients(dense.double(), x.double(), grad.double())
    for name, value in got.items():
        exact, other = truth[name], plain[name]
        if name == "w":
            exact, other = exact[index], other[index]
        allowed = 2 * (other.double() - exact).abs().max() + 4e-7 * exact.abs().max()
        assert value.shape == exact.shape and (value.double() - exact).abs().max() <= allowed, name
    assert got["y"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(SETTINGS, [CASES[1], CASES[3], CASES[4], CASES[6]], ids=str)
def test_results_do_not_depend_on_threads(n, i, o, side, kernel, padding, dilation, stride):
    ours, dense = layers(i, o, kernel, padding, dilation, stride)
    x = images(n, i, side)
    grad = torch.randn_like(dense(x))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(gradients(ours, x, grad))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in ("y", "w", "x"))


@pytest.mark.parametrize(("dilation", "taken"), [(1, True), (2, True), (16, False)])
def test_taps_that_are_far_apart_are_left_to_pytorch(dilation, taken):
    """Each band of outputs would split most of the image anew."""
    layer = layers(64, 64, 3, dilation, dilation, 1)[0][0]
    settings = direct.settings(direct.CONVOLUTION, 0, True, layer.size, layer._convolution())
    assert direct.convolves(settings, images(1, 64, (64, 64))) == (taken and has_amx())
    assert not direct.convolves(settings, torch.randn(1, 64, 64, 64))
    assert not direct.convolves(settings, images(1, 64, (64, 64)).double())


@pytest.mark.parametrize("setting", [{"stride": 0}, {"padding": -1}, {"dilation": 0}], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_settings_that_pytorch_refuses(setting, training):
    ours, _ = layers(64, 48, 3, 1, 1, 1)
    for name, value in setting.items():
        setattr(ours[0], name, (value, value))
    with torch.set_grad_enabled(training), pytest.raises((RuntimeError, ValueError)):
        ours.train(training)(images(3, 64, (12, 12)))


def test_only_what_is_asked_for():
    ours, dense = layers(64, 48, 3, 1, 1, 1)
    x = images(3, 64, (12, 12))
    grad = torch.randn_like(dense(x))
    whole = gradients(ours, x, grad)
    ours.zero_grad()
    ours(x).backward(grad)
    assert torch.equal(ours[0].mu.grad.flatten(), whole["w"]) and torch.equal(ours[0].bias.grad, whole["bias"])
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    x.requires_grad_()
    ours(x).backward(grad)
    assert torch.equal(x.grad, whole["x"])


@pytest.mark.parametrize(SETTINGS, CASES, ids=str)
def test_a_kept_weight_in_each_of_its_forms(n, i, o, side, kernel, padding, dilation, stride):
    ours, dense = layers(i, o, kernel, padding, dilation, stride)
    layer, x = ours.eval()[0], images(n, i, side)
    with torch.no_grad():
        tensors, plain, truth = layer._tensors(), dense(x), dense.double()(x.double())
        forms = layer._forms("reconstruct", x, tensors, layer.bias)
        settings = direct.settings(direct.CONVOLUTION, 0, True, layer.size, layer._convolution())
        assert ("panels" in forms) == direct.convolves(settings, x)
        for form in forms.values():
            y = form.call(form.of(layer._made(tensors, True)))(x)
            allowed = 2 * (plain - truth).abs().max() + 4e-7 * truth.abs().max()
            assert (y - truth).abs().max() <= allowed


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(number):
    ours, _ = layers(64, 48, 3, 1, 1, 1)
    x = images(3, 64, (12, 12))
    x[1, 5, 4, 6] = number
    wrong = ~ours(x).detach().isfinite().all(1)
    expected = torch.zeros_like(wrong)
    expected[1, 3:6, 5:8] = True
    assert torch.equal(wrong, expected)


@pytest.mark.parametrize("step", ["evaluation", "training"])
def test_gradients_that_lie_otherwise_and_a_bias_with_gaps(step):
    ours, dense = layers(64, 48, 3, 1, 1, 1)
    with torch.no_grad():
        ours[0].bias = nn.Parameter(torch.stack([ours[0].bias] * 2, 1)[:, 0])
    x = images(3, 64, (12, 12)).requires_grad_(step == "training")
    with torch.set_grad_enabled(step == "training"):
        y = ours.train(step == "training")(x)
    assert torch.allclose(y, dense(x), atol=1e-5)
    if step == "training":
        grad = torch.randn(y.shape)
        expected = F.conv_transpose2d(grad, dense[0].weight, padding=1)
        assert torch.allclose(torch.autograd.grad(y, x, grad)[0], expected, atol=1e-5)
