import copy
import pickle

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn import FactorizedLinear
from fastfact.nn.transformer import FactorizedTransformerEncoder, FactorizedTransformerEncoderLayer

pytestmark = pytest.mark.filterwarnings("ignore:.*nested")
OPTIONS = [
    {},
    {"norm_first": True},
    {"activation": "gelu"},
    {"activation": torch.tanh},
    {"batch_first": False},
    {"bias": False},
    {"nhead": 1},
]
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()


def both(compact=False, layers=2, **options):
    """(the dense encoder, the factorized one of the same function), in evaluation."""
    torch.manual_seed(0)
    shape = {"nhead": 2, "dim_feedforward": 24, "batch_first": True, **options}
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, **shape), layers, norm=nn.LayerNorm(16)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = ff.factorize(copy.deepcopy(model), ff.Rank1(rank=2), init="svd")
    for layer in ff.factorized_layers(found).values() if compact else ():
        layer.prune_(0.9)
        layer.compact()
    return (ff.densify(copy.deepcopy(found)) if compact else model), found


def seen_rows(monkeypatch):
    """How many rows each factorized linear layer is given from now on."""
    rows, forward = [], FactorizedLinear.forward

    def counted(self, x):
        rows.append(x.numel() // x.shape[-1])
        return forward(self, x)

    monkeypatch.setattr(FactorizedLinear, "forward", counted)
    return rows


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: next(iter(one), "none"))
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["none", "mask", "causal", "padding", "padding on the left", "both"])
def test_encoders_compute_what_dense_ones_do(options, compact, kind):
    dense, model = both(compact, **options)
    x = torch.randn(3, 5, 16)
    x = x if options.get("batch_first", True) else x.transpose(0, 1).contiguous()
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    given = {
        "none": {},
        "mask": {"mask": torch.eye(5).bool()},
        "causal": {"mask": mask, "is_causal": True},
        "padding": {"src_key_padding_mask": PADDING},
        "padding on the left": {"src_key_padding_mask": PADDING.flip(1)},
        "both": {"mask": torch.zeros(5, 5).bool(), "src_key_padding_mask": PADDING},
    }[kind]
    before = x.clone()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x, **given), dense(x, **given), atol=1e-4, rtol=1e-4)
    assert torch.equal(x, before)


def test_padding_is_not_computed(monkeypatch):
    dense, model = both()
    x, rows = torch.randn(3, 5, 16), seen_rows(monkeypatch)
    with torch.no_grad():
        found = model(x, src_key_padding_mask=PADDING)
    assert set(rows) == {int((~PADDING).sum())}
    assert not found[PADDING].sub(model.norm.bias).any()
    model.enable_nested_tensor = model.use_nested_tensor = False
    dense.use_nested_tensor = False
    rows.clear()
    with torch.no_grad():
        found, expected = model(x, src_key_padding_mask=PADDING), dense(x, src_key_padding_mask=PADDING)
    assert set(rows) == {PADDING.numel()}
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_of_nested_tensors():
    dense, model = both()
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with torch.no_grad():
        found, expected = model.layers[0](x), dense.layers[0](x)
    assert found.is_nested
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_encoders(training):
    dense, model = (m.train(training) for m in both(dropout=0.0))
    x = torch.randn(3, 5, 16)
    grads = []
    for m in (dense, model):
        y = m(given := x.clone().requires_grad_(), src_key_padding_mask=PADDING)
        y[~PADDING].square().sum().backward()
        grads.append((given.grad, m.layers[0].norm1.weight.grad, m.layers[0].self_attn.in_proj_bias.grad))
    for found, expected in zip(*grads[::-1], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["linear1", "linear2", "self_attn", "self_attn.out_proj", "self_attn.in_proj"])
def test_hooks_see_what_is_computed(name):
    model = both()[1]
    seen, x = [], torch.randn(3, 5, 16)
    with torch.no_grad():
        expected = model(x)
        layer = model.layers[0].get_submodule(name)
        layer.register_forward_hook(lambda _, given, y: seen.append((y, copy.deepcopy(y))))
        torch.testing.assert_close(model(x), expected)
        model(x, src_key_padding_mask=PADDING)
    assert len(seen) == 2
    for y, then in seen:
        torch.testing.assert_close(y, then, atol=0, rtol=0)


@pytest.mark.parametrize("how", ["full_backward_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_backward_hooks_of_projections(name, how):
    model = both()[1].train()
    seen, x = [], torch.randn(3, 5, 16)
    layer = model.layers[0].self_attn.get_submodule(name)
    getattr(layer, f"register_{how}")(lambda _, *grads: seen.append(grads))
    model(x).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("skip", ["*out_proj", "*in_proj", "*self_attn*", "*linear*", "layers.0*", "layers.1*"])
@pytest.mark.parametrize("again", [False, True])
def test_padding_is_left_out_whatever_is_dense(skip, again):
    dense = both()[0]
    model, x = ff.factorize(copy.deepcopy(dense), ff.Rank1(rank=2), init="svd", skip=skip), torch.randn(3, 5, 16)
    if again:
        ff.factorize(model, ff.Rank1(rank=2), init="svd")
    with torch.no_grad():
        found, expected = (m(x, src_key_padding_mask=PADDING) for m in (model, dense))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    ff.densify(model)
    assert model.use_nested_tensor and type(model.layers[0]) is type(model.layers[1]) is nn.TransformerEncoderLayer


@pytest.mark.parametrize("mask_check", [True, False])
def test_padding_masks_of_other_shapes_are_refused(mask_check):
    model, x = both()[1], torch.randn(3, 5, 16)
    model.mask_check = mask_check
    for padding in (PADDING.T, PADDING[:2], PADDING[:, :4], PADDING[0]):
        with torch.no_grad(), pytest.raises((RuntimeError, AssertionError, IndexError, ValueError)):
            model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        assert model(x[:0], src_key_padding_mask=PADDING[:0]).shape == (0, 5, 16)
        assert model(x[:, :0], src_key_padding_mask=PADDING[:, :0]).shape == (3, 0, 16)


def test_dense_layers_of_an_encoder_take_the_fused_operator(monkeypatch):
    model = ff.factorize(both()[0], ff.Rank1(rank=2), init="svd", skip="layers.0*")
    calls, fused = [], torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *given: calls.append(1) or fused(*given))
    with torch.no_grad():
        model(torch.randn(3, 5, 16))
    assert len(calls) == 1


def test_another_activation_than_at_first():
    dense, model = both()
    x = torch.randn(3, 5, 16)
    for layer in model.layers:
        layer.activation = torch.tanh
        layer.register_module("none", None)
    with torch.no_grad():
        found = model(x)
    torch.testing.assert_close(found, model(x).detach(), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, dense(x), atol=1e-2)


class Frozen(nn.Module):
    def __setattr__(self, name, value):
        raise RuntimeError("frozen")


def test_densify_writes_to_no_other_module():
    frozen = Frozen.__new__(Frozen)
    frozen.__dict__.update(nn.Module().__dict__)
    model = ff.factorize(nn.Sequential(frozen, nn.Linear(8, 8)), ff.Rank1(), skip="0*")
    assert type(ff.densify(model)[1]) is nn.Linear


class Averages(nn.Module):
    batch_first, in_proj_bias = True, None

    def forward(self, query, key, value, **how):
        return value.mean(1, keepdim=True).expand_as(query), None


def test_layers_with_an_attention_of_their_own():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True).eval()
    layer.self_attn = Averages()
    found, x = ff.factorize(copy.deepcopy(layer), ff.Rank1(), init="svd"), torch.randn(3, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(found(x), layer(x), atol=1e-5, rtol=1e-5)


def test_dropout_that_stays_on():
    model = both()[1]
    model.layers[0].dropout.train()
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))


def test_encoders_are_changed_in_place_and_come_back():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2)
    assert ff.factorize(model, ff.Rank1()) is model
    assert type(model) is FactorizedTransformerEncoder and not model.use_nested_tensor
    assert {type(layer) for layer in model.layers} == {FactorizedTransformerEncoderLayer}
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert ff.densify(again) is again and type(again) is nn.TransformerEncoder and again.use_nested_tensor
    assert {type(layer) for layer in again.layers} == {nn.TransformerEncoderLayer}
    of_norm = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
    ff.factorize(of_norm, ff.Rank1(), skip="*")
    assert type(of_norm) is nn.TransformerEncoder


class Own(nn.TransformerEncoderLayer):
    def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
        return 2 * super().forward(src, src_mask, src_key_padding_mask, is_causal)


def test_subclasses_keep_their_forward():
    torch.manual_seed(0)
    dense = nn.TransformerEncoder(Own(16, 2, 24, batch_first=True), 2).eval()
    model, x = ff.factorize(copy.deepcopy(dense), ff.Rank1(), init="svd"), torch.randn(3, 5, 16)
    with torch.no_grad():
        found, expected = model(x, src_key_padding_mask=PADDING), dense(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(found[~PADDING], expected[~PADDING], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_other_types(dtype, autocast):
    dense, model = both()
    x = torch.randn(3, 5, 16)
    if not autocast:
        dense, model, x = dense.to(dtype), model.to(dtype), x.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # PyTorch's encoder fails of padding under autocast.
        for given in ({}, {} if autocast else {"src_key_padding_mask": PADDING}):
            found, expected = model(x, **given), dense(x, **given)
            assert found.dtype == (torch.float32 if autocast else dtype)
            near = 0.1 if autocast or dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(found, expected.to(found.dtype), atol=near, rtol=near)


def test_encoders_in_graphs():
    dense, model = both()
    x = torch.randn(3, 5, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), dense(x), atol=1e-4, rtol=1e-4)
    traced = torch.fx.symbolic_trace(nn.Sequential(model))
    with torch.no_grad():
        torch.testing.assert_close(traced(x), dense(x), atol=1e-4, rtol=1e-4)
