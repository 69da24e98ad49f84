import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import fastfact as ff
from fastfact import models
from fastfact.nn.convert import factorized_layers


def count(module, *types):
    return sum(p.numel() for m in module.modules() if isinstance(m, types) for p in m.parameters(recurse=False))


def test_resnet9_has_the_parameters_of_table_3():
    model = models.resnet9(3, 10)
    convolutions, fc = count(model, nn.Conv2d), model.fc.weight.numel()
    assert (convolutions, fc, convolutions + fc) == (2_565_824, 2_560, 2_568_384)
    assert count(model, nn.BatchNorm2d) == 2 * (64 + 2 * 128 + 128 + 4 * 256)
    assert sum(p.numel() for p in model.parameters()) == 2_568_384 + 2_944 + 10


def test_resnet9_layers_are_those_of_table_3_in_order():
    layers = [(n, m) for n, m in models.resnet9(3, 7).named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert [name for name, _ in layers] == [f"conv{i}" for i in range(1, 9)] + ["fc"]
    table = [(64, 3, 3, 3), (128, 64, 5, 5), (128, 128, 3, 3), (128, 128, 3, 3), (256, 128, 3, 3)]
    table += [(256, 256, 3, 3)] * 3 + [(7, 256)]
    assert [tuple(m.weight.shape) for _, m in layers] == table
    assert [m.stride[0] for _, m in layers[:8]] == [1, 2, 1, 1, 1, 1, 1, 1]


def test_resnet9_sizes_inside():
    model, sizes = models.resnet9(1, 10, width=0.25), {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, i, o, name=name: sizes.__setitem__(name, tuple(o.shape[1:])))
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    expected = [(16, 8, 8), (32, 4, 4), (32, 4, 4), (32, 4, 4), (64, 4, 4), (64, 2, 2), (64, 2, 2), (64, 2, 2)]
    assert [sizes[f"conv{i}"] for i in range(1, 9)] == expected


def test_resnet9_skips_are_identities():
    model = models.resnet9(1, 3, width=0.125).eval()
    x = torch.randn(2, 1, 8, 8)
    inputs = {}
    for name in ("conv3", "conv5", "conv6", "conv8"):
        module = getattr(model, name)
        module.register_forward_hook(lambda m, i, o, name=name: inputs.__setitem__(name, i[0]))
    for silent in (model.norm4, model.norm7):
        nn.init.zeros_(silent.weight)
    model(x)
    assert torch.equal(inputs["conv3"], inputs["conv5"])
    assert torch.equal(inputs["conv6"], inputs["conv8"])


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 9, 8), (3, 32, 32), (1, 28, 28)])
def test_resnet9_takes_small_and_odd_images(shape):
    assert models.build("resnet9", shape, 4, width=0.125).eval()(torch.randn(1, *shape)).shape == (1, 4)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_counts_known_from_the_literature():
    assert parameters(models.build("cnn2", (1, 28, 28), 10)) == 1_663_370
    assert parameters(models.cnn2((3, 32, 32), 10, padding=0)) == 878_538
    assert parameters(models.build("mlp", (1, 28, 28), 10)) == 199_210
    assert parameters(models.build("resnet18", (3, 32, 32), 10)) == 11_173_962
    # σ of FedDecomp: 1.24 M for ResNet-8.
    assert parameters(models.build("resnet8", (3, 32, 32), 10)) == 1_235_274


def test_stem_of_resnet8_fits_the_images():
    wide, narrow = (models.build("resnet8", (1, n, n), 10, width=0.125) for n in (32, 28))
    assert (wide.conv.kernel_size, wide.conv.stride) == ((7, 7), (2, 2))
    assert (narrow.conv.kernel_size, narrow.conv.stride) == ((3, 3), (1, 1))


def test_numbers_in_the_names_count_the_layers_in_line():
    for name, number in (("resnet8", 8), ("resnet10", 10), ("resnet18", 18), ("resnet9", 9), ("vgg16", 16)):
        layers = [n for n, m in models.build(name, (3, 32, 32), 10, width=0.125).named_modules() if has_weight(m)]
        assert sum("shortcut" not in n for n in layers) == number
        assert layers[-1] == "fc"


def has_weight(module):
    return isinstance(module, nn.Conv2d | nn.Linear)


def test_residual_blocks_add_what_they_skip():
    model = models.build("resnet18", (3, 8, 8), 10, width=0.125).eval()
    for block in model.blocks:
        nn.init.zeros_(block.norm2.weight)
    inputs = []
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: inputs.append((m, i[0], o)))
    model(torch.randn(2, 3, 8, 8))
    for block, x, y in inputs:
        skip = x if block.shortcut is None else block.norm(block.shortcut(x)).relu()
        assert torch.equal(y, skip)
    assert [block.shortcut is not None for block in model.blocks] == [False, False, True, False] + [True, False] * 2
    assert inputs[-1][2].shape[2:] == (1, 1)


VOCABULARY = 17


def sample(name, n=3):
    """A model by name, small, and a batch for it."""
    torch.manual_seed(0)
    if models.MODELS[name].input == "tokens":
        return models.build(name, (7,), 5, 0.25, VOCABULARY), torch.randint(1, VOCABULARY, (n, 7))
    return models.build(name, (1, 8, 8), 5, width=0.25), torch.randn(n, 1, 8, 8)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_learns_the_shape_it_was_built_for(name):
    model, x = sample(name)
    logits = model(x)
    assert logits.shape == (3, 5)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("spec", [ff.Rank1(), ff.Rank1(layout="kernel"), ff.LowRank(), ff.Hadamard()], ids=repr)
def test_every_model_can_be_factorized_and_made_dense_again(name, spec):
    model, x = sample(name)
    layers = [path for path, module in model.named_modules() if has_weight(module)]
    ff.factorize(model, spec)
    assert list(factorized_layers(model)) == layers
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        expected = model.eval()(x)
        torch.testing.assert_close(ff.densify(model)(x), expected)


@pytest.mark.parametrize("name", models.MODELS)
def test_factors_by_svd_keep_the_function(name):
    model, x = sample(name)
    with torch.no_grad():
        expected = model.double().eval()(x if x.dtype == torch.int64 else x.double())
        ff.factorize(model, ff.Rank1(), init="svd")
        torch.testing.assert_close(model(x if x.dtype == torch.int64 else x.double()), expected)


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_works_over_the_client_axis(name):
    model, x = sample(name, n=6)
    model = ff.factorize(model, ff.Rank1()).eval()
    tensors = {n: torch.stack([t, t * 1.5]) for n, t in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad():
        together = vmap(lambda t, x: functional_call(model, t, (x,)))(tensors, x.unflatten(0, (2, 3)))
        alone = [functional_call(model, {n: t[k] for n, t in tensors.items()}, (x[3 * k : 3 * k + 3],)) for k in (0, 1)]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "patch", "tokens"), [((1, 8, 8), 2, 16), ((1, 28, 28), 4, 49), ((3, 32, 32), 4, 64), ((2, 29, 17), 3, 60)]
)
def test_patches_of_a_vision_transformer(shape, patch, tokens):
    model = models.VisionTransformer(shape, 7, features=24, depth=1)
    assert model.patches.kernel_size == model.patches.stride == (patch, patch)
    assert model.position.weight.shape == (1 + tokens, 24)
    assert model(torch.randn(2, *shape)).shape == (2, 7)
    # Every pixel counts.
    x = torch.randn(1, *shape, requires_grad=True)
    model(x)[0, 0].backward()
    assert (x.grad != 0).all()


def test_a_vision_transformer_has_the_blocks_of_pytorch():
    """192 wide, 12 deep, three heads: against PyTorch's encoder, with the same weights."""
    torch.manual_seed(0)
    model = models.build("vit-tiny", (1, 28, 28), 10)
    assert sum(p.numel() for p in model.parameters()) == 5_353_546 and len(model.blocks) == 12
    block = model.blocks[0]
    theirs = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
    attention = block.attention
    with torch.no_grad():
        for part in ("weight", "bias"):
            packed = [getattr(layer, part) for layer in (attention.query, attention.key, attention.value)]
            getattr(theirs.self_attn, f"in_proj_{part}").copy_(torch.cat(packed))
            for mine, its in (
                (attention.out, theirs.self_attn.out_proj),
                (block.expand, theirs.linear1),
                (block.contract, theirs.linear2),
            ):
                getattr(its, part).copy_(getattr(mine, part))
        x = torch.randn(2, 5, 192)
        torch.testing.assert_close(block(x), theirs.train()(x), rtol=1e-4, atol=1e-5)


def test_lstm_is_that_of_pytorch():
    model = models.LSTM2(VOCABULARY, 5, width=1 / 32).double()
    theirs = nn.LSTM(8, 8, num_layers=2, batch_first=True).double()
    with torch.no_grad():
        for layer in (1, 2):
            getattr(theirs, f"weight_ih_l{layer - 1}").copy_(getattr(model, f"input{layer}").weight)
            getattr(theirs, f"weight_hh_l{layer - 1}").copy_(getattr(model, f"recur{layer}").weight)
            getattr(theirs, f"bias_ih_l{layer - 1}").copy_(getattr(model, f"input{layer}").bias)
            getattr(theirs, f"bias_hh_l{layer - 1}").zero_()
        tokens = torch.randint(VOCABULARY, (4, 9))
        output = theirs(model.embedding(tokens))[0][:, -1]
        torch.testing.assert_close(model(tokens), model.fc(model.fc1(output).relu()), rtol=1e-12, atol=1e-12)


def test_attention_is_that_of_pytorch():
    model = models.Attention(16, 4).double()
    x, hidden = torch.randn(3, 6, 16).double(), torch.arange(6) >= torch.tensor([[6], [4], [1]])
    q, k, v = (p(x).unflatten(2, (4, 4)).transpose(1, 2) for p in (model.query, model.key, model.value))
    attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None, None])
    expected = model.out(attended.transpose(1, 2).flatten(2))
    torch.testing.assert_close(model(x, hidden), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["lstm-words", "transformer"])
def test_padding_changes_nothing(name):
    model = models.build(name, (12,), 5, 0.25, VOCABULARY).eval()
    tokens = torch.randint(1, VOCABULARY, (2, 12))
    tokens[:, 5:] = 0
    other = tokens.clone()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens[:, :5]))
        other[:, 0] = tokens[:, 0] % (VOCABULARY - 1) + 1
        assert not torch.allclose(model(other), model(tokens))
        assert model(torch.zeros(1, 12, dtype=torch.int32)).isfinite().all()


def test_tokens_may_be_bytes():
    model = models.build("lstm", (7,), 5, 0.1, 256)
    tokens = torch.randint(256, (3, 7))
    assert torch.equal(model(tokens.to(torch.uint8)), model(tokens))


def test_feddecomp_leaves_the_perceptrons_of_the_transformer_whole():
    model = models.build("transformer", (7,), 4, 0.25, VOCABULARY)
    ff.factorize(model, ff.LowRank(), skip=models.MODELS["transformer"].whole)
    projections = [f"blocks.{b}.attention.{p}" for b in (0, 1) for p in ("query", "key", "value", "out")]
    assert list(factorized_layers(model)) == [*projections, "fc"]


@pytest.mark.parametrize(("width", "channels"), [(1.0, 64), (0.5, 32), (0.3, 16), (0.01, 8)])
def test_width_rounds_to_multiples_of_eight(width, channels):
    assert models.resnet9(1, 2, width).conv1.out_channels == channels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet99", (1, 8, 8), 10), r"model='resnet99', must be one of resnet9, cnn2, mlp"),
        (("resnet9", (8, 8), 10), r"shape=\(8, 8\)"),
        (("resnet9", (1, 2, 8), 10), r"at least 3 pixels"),
        (("cnn2", (1, 3, 3), 10), r"at least 4 pixels"),
        (("mlp", (1, 8, 8), 0), r"num_classes=0"),
        (("resnet9", (1, 8, 8), 10, 0.0), r"width=0.0"),
        (("cnn2", (1, 8, 8), 10, float("nan")), r"width=nan"),
        (("vgg16", (8, 8), 10), r"vgg16: shape=\(8, 8\)"),
        (("resnet8", (1, 2, 8), 10), r"resnet8: .*at least 3 pixels"),
        (("lstm", (80,), 80), r"model='lstm' takes tokens, the samples are numbers; for those there are resnet9"),
        (("cnn2", (80,), 80, 1.0, 80), r"model='cnn2' takes image, the samples are tokens; for those there are lstm"),
        (("lstm", (8, 8), 80, 1.0, 80), r"lstm: shape=\(8, 8\), must be \(tokens,\)"),
        (("transformer", (8,), 4, 1.0, 0), r"vocabulary=0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.build(*arguments)
