"""Adapters in the files of PEFT: one written by hand as PEFT writes it, and what `save` writes. With PEFT itself:
tests/surroundings/test_peft.py."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import fastfact as ff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.body = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False)})
        self.conv, self.head = nn.Conv1d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        x = x + self.body["down"](F.relu(self.body["up"](x)))
        return self.head(self.conv(x.mT).mean(2))


START = "base_model.model."
TOKENS = torch.randint(9, (4, 6), generator=torch.Generator().manual_seed(0))
CONFIG = {
    "peft_type": "LORA",
    "task_type": "SEQ_CLS",
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "rank_pattern": {"down": 2},
    "alpha_pattern": {"body.down": 8},
    "target_modules": ["up", "down"],
    "modules_to_save": ["head"],
    "bias": "lora_only",
    "fan_in_fan_out": False,
    "use_dora": False,
    "use_rslora": False,
    "init_lora_weights": True,
    "a_setting_of_a_later_version": None,
}


def net():
    torch.manual_seed(0)
    return Net().double()


def tensors():
    g = torch.Generator().manual_seed(1)
    shapes = {
        "body.up.lora_A.weight": (4, 8),
        "body.up.lora_B.weight": (12, 4),
        "body.up.base_layer.bias": (12,),
        "body.down.lora_A.weight": (2, 12),
        "body.down.lora_B.weight": (8, 2),
        "head.weight": (3, 8),
        "head.bias": (3,),
    }
    return {f"{START}{name}": torch.randn(shape, generator=g) for name, shape in shapes.items()}


def write(folder, config=CONFIG, some=None):
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if some is None else some, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def merged(scalings=(6 / 4, 8 / 2)):
    """The dense model that the files mean, by the formula."""
    model, t = net(), {name.removeprefix(START): v.double() for name, v in tensors().items()}
    with torch.no_grad():
        for name, scaling in zip(("up", "down"), scalings, strict=True):
            weight = model.body[name].weight
            weight += scaling * t[f"body.{name}.lora_B.weight"] @ t[f"body.{name}.lora_A.weight"]
        model.body["up"].bias.copy_(t["body.up.base_layer.bias"])
        model.head.weight.copy_(t["head.weight"])
        model.head.bias.copy_(t["head.bias"])
    return model


def test_a_file_written_as_peft_writes_it(tmp_path):
    dense, state = net().eval(), torch.get_rng_state()
    model = ff.adapters.load(dense, write(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model(TOKENS), merged()(TOKENS))
    assert model.body["up"].spec == ff.LowRank(rank=4, scaling=1.5, dropout=0.1)
    assert model.body["down"].spec == ff.LowRank(rank=2, scaling=4.0, dropout=0.1)
    training = {name for name, p in model.named_parameters() if p.requires_grad}
    factors = {f"body.{layer}.{factor}" for layer in ("up", "down") for factor in ("A", "B")}
    assert training == factors | {"body.up.bias", "head.weight", "head.bias"}


def test_stabilized_scaling(tmp_path):
    model = ff.adapters.load(net().eval(), write(tmp_path, CONFIG | {"use_rslora": True}))
    torch.testing.assert_close(model(TOKENS), merged((6 / 2, 8 / 2**0.5))(TOKENS))


def test_written_and_read_again(tmp_path):
    model = ff.adapters.load(net().eval(), write(tmp_path))
    (tmp_path / "new").mkdir()
    ff.adapters.save(model, tmp_path / "new")
    assert load_file(tmp_path / "new" / "adapter_model.safetensors").keys() == tensors().keys()
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    assert config["bias"] == "lora_only" and config["modules_to_save"] == ["head"] and config["lora_dropout"] == 0.1
    again = ff.adapters.load(net().eval(), tmp_path / "new")
    assert torch.equal(again(TOKENS), model(TOKENS))
    # Into a model that has such adapters.
    with torch.no_grad():
        for p in again.parameters():
            if p.requires_grad:
                p.zero_()
    ff.adapters.load(again, tmp_path / "new")
    assert torch.equal(again(TOKENS), model(TOKENS))


def test_no_more_than_the_adapters_is_written(tmp_path):
    model = ff.factorize(net(), ff.LowRank(rank=2, scaling=0.3), only="body", freeze=True)
    ff.adapters.save(model, tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(t.numel() for t in written.values()) == 2 * 2 * (8 + 12)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == pytest.approx(0.6) and config["bias"] == "none"
    assert config["target_modules"] == ["body.down", "body.up"] and config["modules_to_save"] is None


def test_layers_by_ratio_are_written_in_the_order_of_peft(tmp_path):
    model = ff.factorize(net(), ff.LowRank(ratio=0.3), only="body", freeze=True)
    nn.init.normal_(model.body["up"].B)
    ff.adapters.save(model, tmp_path)
    torch.testing.assert_close(ff.adapters.load(net(), tmp_path)(TOKENS), model(TOKENS))


def test_paths_that_end_alike_are_told_apart(tmp_path):
    model = nn.ModuleDict({"up": nn.Linear(4, 4), "side": nn.ModuleDict({"up": nn.Linear(4, 4)})})
    ff.factorize(model, ff.LowRank(rank=1), skip="side", freeze=True)
    ff.adapters.save(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == "up"


SPEC = ff.LowRank(rank=2)


def made(spec=SPEC, change=None, **options):
    model = ff.factorize(net(), spec, **{"only": "body", "freeze": True} | options)
    if change:
        change(model)
    return model


def convolution(layout="separable", rank=2, kind=nn.Conv2d, kernel=(3, 2), **options):
    """A network of one convolution with an adapter."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(4, 6, kernel, **options).double())
    return ff.factorize(model, ff.LowRank(rank=rank, scaling=1.5, layout=layout), freeze=True)


@pytest.mark.parametrize(
    ("layout", "kernel", "rank"), [("separable", (3, 2), 2), ("separable", (3, 1), 2), ("view", (2, 3), 2)]
)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_convolutions_have_the_same_weight_and_rank_again(kind, layout, kernel, rank, tmp_path):
    kernel = kernel if kind is nn.Conv2d else kernel[1]
    model = convolution(layout, rank, kind, kernel)
    dense = nn.Sequential(kind(4, 6, kernel).double())
    nn.init.normal_(model[0].B)
    dense[0].load_state_dict({"weight": model[0].sigma.view(dense[0].weight.shape), "bias": model[0].bias})
    ff.adapters.save(model, tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    a, b = (written[f"{START}0.lora_{factor}.weight"] for factor in "AB")
    alpha = json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"]
    delta = alpha / len(a) * torch.einsum("or,r...->o...", b.flatten(1), a)
    sigma = dense[0].weight.detach()
    torch.testing.assert_close(sigma + delta, model[0].weight.detach().as_subclass(torch.Tensor), rtol=1e-12, atol=0)
    again = ff.adapters.load(dense, tmp_path)
    torch.testing.assert_close(again[0].weight, model[0].weight)
    if layout == "separable":
        assert again[0].spec.rank == rank
        assert torch.equal(again[0].A, model[0].A) and torch.equal(again[0].B, model[0].B)
        ff.adapters.load(model, tmp_path)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (net, "no factorized layer"),
        (lambda: made(ff.Rank1()), r"FactorizedLinear\(Rank1"),
        (lambda: made(freeze=False), r"σ of body\.up trains"),
        (lambda: made(train="norm.weight"), "of norm weight train, all must"),
        (lambda: made(train="norm.bias"), "the biases of norm train"),
        (
            lambda: made({"body.up": SPEC, "body.down": ff.LowRank(rank=2, dropout=0.1)}),
            r"dropout 0\.0, 0\.1, must be one",
        ),
        (
            lambda: ff.factorize(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}), SPEC, only="*in_proj", freeze=True),
            r"of a, nn\.MultiheadAttention, in_proj is factorized, must be in_proj and out_proj",
        ),
        (
            lambda: ff.factorize(
                nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}),
                {"a.in_proj": SPEC, "a.out_proj": ff.LowRank(rank=3)},
                freeze=True,
            ),
            "a is an nn.MultiheadAttention with adapters of rank 2 and 3",
        ),
        (lambda: convolution(groups=2), r"0 is a convolution in 2 groups"),
        (lambda: convolution(dilation=2), r"0 is a convolution of dilation \(2, 2\)"),
        (lambda: convolution(padding_mode="circular"), r"0 is a convolution with padding_mode='circular'"),
    ],
)
def test_what_the_files_have_no_place_for(make, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        ff.adapters.save(make(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def without(*names):
    return {name: t for name, t in tensors().items() if not name.endswith(names)}


@pytest.mark.parametrize(
    ("change", "some", "error"),
    [
        ({"peft_type": "IA3"}, None, "peft_type is 'IA3', must be LORA"),
        ({"use_dora": True}, None, "use_dora=True is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, None, "pissa_niter_4"),
        ({"alpha_pattern": {"(a+)+b": 1}}, None, "must repeat no group"),
        ({"alpha_pattern": {"a*a*a*a*b": 1}}, None, "at most three"),
        ({}, without("down.lora_B.weight"), r"body\.down has lora_A alone"),
        ({}, {}, "has no lora_A and lora_B"),
        ({}, tensors() | {START + "body.up.lora_A.weight": torch.zeros(4, 9)}, r"lora_A \[4, 9\] .* do not fit"),
        ({}, tensors() | {START + "head.bias": torch.zeros(4)}, r"head\.bias has shape \[4\], must be \[3\]"),
        ({}, tensors() | {START + "tail.weight": torch.zeros(4)}, r"no parameter or buffer tail\.weight"),
        ({}, tensors() | {START + "embed.lora_embedding_A": torch.zeros(4)}, "no factor of a linear layer"),
        (
            {},
            tensors() | {START + f"tail.lora_{n}.weight": torch.zeros(2, 2) for n in "AB"},
            "the model has no layer tail",
        ),
        (
            {},
            tensors() | {START + f"conv.lora_{n}.weight": torch.zeros(8, 8) for n in "AB"},
            r"conv has the weight \[8, 8, 1, 1\], .* do not fit",
        ),
        (
            {},
            tensors() | {START + f"conv.lora_{n}.weight": torch.zeros(8, 8, 3) for n in "AB"},
            r"lora_B of conv is torch.float32 \[8, 8, 3\], must be",
        ),
    ],
)
def test_files_that_do_not_fit(change, some, error, tmp_path):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=error):
        ff.adapters.load(model, write(tmp_path, CONFIG | change, some))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_other_adapters_in_the_model(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match=r"LowRank.*rank=2.* in the model, LowRank.* in the files"):
        ff.adapters.load(made(), tmp_path)
    with pytest.raises(ValueError, match="conv is factorized in the model, and has no adapter"):
        ff.adapters.load(made(only="conv"), tmp_path)


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is not there"):
        ff.adapters.load(net(), tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        ff.adapters.load(net(), tmp_path)


def normed():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5))


def test_statistics_of_what_trains_as_a_whole_go_along(tmp_path):
    model = ff.factorize(normed(), ff.LowRank(rank=2), freeze=True, train="1")
    model(torch.randn(16, 3, 4, 4) * 3 + 1)
    ff.adapters.save(model, tmp_path)
    other = ff.adapters.load(normed(), tmp_path)
    assert torch.equal(model[1].running_mean, other[1].running_mean) and other[1].num_batches_tracked == 1
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(other.eval()(x), model.eval()(x))


def named(name):
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(4, 4), "other": nn.Linear(4, 4), "body": nn.Linear(4, 4)})


def test_names_with_wildcards_and_new_lines(tmp_path):
    model = ff.factorize(named("h[1]"), ff.LowRank(rank=2), only="body", freeze=True)
    model["h[1]"].requires_grad_(True)
    ff.adapters.save(model, tmp_path / "a")
    other = ff.adapters.load(named("h[1]"), tmp_path / "a")
    assert other["h[1]"].weight.requires_grad and not other["other"].weight.requires_grad
    model = ff.factorize(named("a\nb"), ff.LowRank(rank=2), freeze=True)
    ff.adapters.save(model, tmp_path / "b")
    assert len(ff.factorized_layers(ff.adapters.load(named("a\nb"), tmp_path / "b"))) == 3
    model = ff.factorize(named("original_module"), ff.LowRank(rank=2), only="body", freeze=True)
    model["original_module"].requires_grad_(True)
    with pytest.raises(ValueError, match="original_module"):
        ff.adapters.save(model, tmp_path / "c")
    assert not (tmp_path / "c").exists()
