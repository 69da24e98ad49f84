"""Adapters from PEFT and for PEFT: the same logits both ways, for networks made from a configuration."""

import json

import pytest
import torch
from torch import nn

import fastfact as ff

pytestmark = pytest.mark.slow
IDS = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def network(kind):
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=20, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config).eval()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=50)).eval()
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, vocab_size=50, num_labels=3)
    ).eval()


TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"], "bert": ["query", "dense"]}


def stir(model):
    """Numbers in all that trains, as training would leave them."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g), alpha=0.1)


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
@pytest.mark.parametrize("kind", TARGETS)
def test_what_peft_wrote_has_the_same_logits_here(kind, bias, tmp_path):
    import peft

    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=TARGETS[kind],
        rank_pattern={TARGETS[kind][-1]: 2},
        alpha_pattern={TARGETS[kind][0]: 3},
        bias=bias,
        use_rslora=kind == "llama",
        modules_to_save=["classifier"] if kind == "bert" else None,
        fan_in_fan_out=kind == "gpt2",
    )
    theirs = peft.get_peft_model(network(kind), config).eval()
    stir(theirs)
    theirs.save_pretrained(tmp_path)
    ours = ff.adapters.load(network(kind), tmp_path)
    wanted = theirs(IDS).logits
    torch.testing.assert_close(ours(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - network(kind)(IDS).logits).abs().max() > 0.01
    trained = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (ours, theirs)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("spec", [ff.Rank1(rank=2), ff.LowRank(rank=2)])
def test_adapters_of_peft_on_factorized_layers(spec, dora, tmp_path):
    import peft

    def factorized():
        model = ff.factorize(network("llama"), spec, init="svd")
        if isinstance(spec, ff.Rank1):
            for layer in ff.factorized_layers(model).values():
                layer.compact(0.3)
        return model.eval()

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora)
    config._register_custom_module({ff.nn.FactorizedLinear: peft.tuners.lora.Linear})
    model = factorized()
    before = model(IDS).logits
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(IDS).logits, before, rtol=1e-4, atol=1e-5)
    adapted.train()(IDS).logits.square().mean().backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in adapted.named_parameters())
    stir(adapted.eval())
    wanted = adapted(IDS).logits
    assert (wanted - before).abs().max() > 0.001
    with pytest.raises(RuntimeError, match="a write to it has no effect on the layer"):
        adapted.merge_adapter()
    config.inference_mode = True
    again = peft.get_peft_model(factorized(), config)
    peft.set_peft_model_state_dict(again, peft.get_peft_model_state_dict(adapted))
    torch.testing.assert_close(again(IDS).logits, wanted, rtol=1e-4, atol=1e-5)


# Llama has no bias.
@pytest.mark.parametrize(
    ("kind", "bias"), [("gpt2", ()), ("gpt2", "*.bias"), ("llama", ()), ("bert", ()), ("bert", "*.bias")]
)
def test_what_is_written_here_has_the_same_logits_in_peft(kind, bias, tmp_path):
    import peft

    specs = {f"*{TARGETS[kind][0]}": ff.LowRank(rank=3, scaling=0.7), f"*{TARGETS[kind][1]}": ff.LowRank(rank=2)}
    train = [*(["classifier"] if kind == "bert" else []), *([bias] if bias else [])]
    model = network(kind)
    ff.factorize(model, specs, freeze=True, train=train)
    stir(model)
    wanted = model(IDS).logits
    ff.adapters.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(network(kind), tmp_path).eval()
    torch.testing.assert_close(theirs(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] == (kind == "gpt2")
    torch.testing.assert_close(theirs.merge_and_unload()(IDS).logits, wanted, rtol=1e-4, atol=1e-5)


class Seeing(nn.Module):
    """Convolutions and packed attention: a small vision transformer with a head on sequences."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, (4, 3), stride=(4, 3))
        self.mixing, self.point = nn.Conv1d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 1)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(12, 3, batch_first=True) for _ in range(2))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.mixing(torch.relu(self.point(self.patches(x))).flatten(2)).mT
        for block in self.blocks:
            x = x + block(x, x, x)[0]
        return self.head(x.mean(1))


def seeing():
    torch.manual_seed(0)
    return Seeing().eval()


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
def test_convolutions_and_attention_from_peft(bias, tmp_path):
    import peft

    targets = ["patches", "mixing", "point", "blocks.0", "blocks.1", "head"]
    config = peft.LoraConfig(
        r=3,
        lora_alpha=2,
        target_modules=targets,
        rank_pattern={"blocks.1": 2},
        alpha_pattern={"blocks.0": 5},
        bias=bias,
    )
    theirs = peft.get_peft_model(seeing(), config).eval()
    stir(theirs)
    theirs.save_pretrained(tmp_path)
    wanted = theirs(IMAGES)
    ours = ff.adapters.load(seeing(), tmp_path)
    torch.testing.assert_close(ours(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - seeing()(IMAGES)).abs().max() > 0.01
    ff.adapters.save(ours, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(seeing(), tmp_path / "again").eval()
    torch.testing.assert_close(again(IMAGES), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [(), "*.bias"])
@pytest.mark.parametrize("layout", ["separable", "view"])
def test_convolutions_and_attention_for_peft(layout, bias, tmp_path):
    import peft

    specs = {
        "blocks.0.*": ff.LowRank(rank=2, scaling=0.7),
        "blocks.1.in_proj": ff.LowRank(rank=3, scaling=2.0),
        "blocks.1.out_proj": ff.LowRank(rank=3, scaling=0.5),
        "*": ff.LowRank(rank=2, scaling=1.5, layout=layout),
    }
    model = ff.factorize(seeing(), specs, freeze=True, train=bias)
    stir(model)
    wanted = model(IMAGES)
    ff.adapters.save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(seeing(), tmp_path).eval()
    torch.testing.assert_close(theirs(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs.merge_and_unload()(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - seeing()(IMAGES)).abs().max() > 0.01


def test_an_adapter_trains_as_that_of_peft_does():
    """One step of SGD on the same numbers: the same factors."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS["llama"])
    theirs = peft.get_peft_model(network("llama"), config)
    ours = ff.factorize(
        network("llama"), {f"*{name}": ff.LowRank(rank=4, scaling=2.0) for name in TARGETS["llama"]}, freeze=True
    )
    layers = {path: module for path, module in theirs.base_model.model.named_modules() if hasattr(module, "lora_A")}
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for path, layer in ff.factorized_layers(ours).items():
            for name in ("A", "B"):
                values = torch.randn(getattr(layer, name).shape, generator=g)
                getattr(layer, name).copy_(values)
                getattr(layers[path], f"lora_{name}")["default"].weight.copy_(values)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    for path, layer in ff.factorized_layers(ours).items():
        for name in ("A", "B"):
            other = getattr(layers[path], f"lora_{name}")["default"].weight
            torch.testing.assert_close(getattr(layer, name), other, rtol=1e-3, atol=1e-5, msg=f"{path}.{name}")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_networks_of_timm(name):
    import timm

    torch.manual_seed(0)
    small = {"img_size": 32, "num_classes": 3}
    small |= (
        {"depth": 2} if name.startswith("vit") else {"patch_size": 4} if name.startswith("swin") else {"num_blocks": 2}
    )
    if name.startswith("swin"):
        small |= {"depths": (1, 1), "num_heads": (2, 2), "embed_dim": 16, "window_size": 4}
    model = timm.create_model(name, **small).eval()
    x = torch.randn(2, 3, 32, 32)
    wanted = model(x)
    ff.factorize(model, ff.LowRank(rank=2, dropout=0.1), freeze=True, train="head", unsupported="skip")
    torch.testing.assert_close(model(x), wanted, rtol=1e-3, atol=1e-4)
    model.train()(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for layer in ff.factorized_layers(model).values():
        nn.init.normal_(layer.B, std=0.1)
    wanted = model.eval()(x)
    torch.testing.assert_close(ff.densify(model)(x), wanted, rtol=1e-3, atol=1e-3)
