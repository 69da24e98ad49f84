"""Modules whose layers PyTorch's operators take together, with kept weights."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import fastfact as ff
from fastfact.nn import FactorizedLinear, choice

SPECS = {
    "compact": ff.Rank1(rank=2),
    "rank one": ff.Rank1(sparse=False),
    "low rank": ff.LowRank(rank=2),
    "hadamard": ff.Hadamard(ratio=0.2),
}


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, **{"batch_first": True, **options})

    def forward(self, x):
        return self.inner(x, x, x)


class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(16, 2, 24, **{"batch_first": True, **options})

    def forward(self, x):
        return self.inner(x)


OPERATORS = {Attention: "_native_multi_head_attention", Encoder: "_transformer_encoder_layer_fwd"}


@pytest.fixture(params=OPERATORS, ids=["attention", "encoder"])
def kind(request):
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """How often operators were called, and layers."""
    counted = {"operator": 0, "layer": 0}

    def count(name, what, function):
        def called(*args, **kwargs):
            counted[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(*what, called)

    for name in OPERATORS.values():
        count("operator", (torch, name), getattr(torch, name))
    count("layer", (FactorizedLinear, "forward"), FactorizedLinear.forward)
    return counted


@pytest.fixture
def chosen(monkeypatch):
    """The answer for modules from now on."""
    answer, choose = ["reconstruct"], choice.choose
    monkeypatch.setattr(
        choice, "choose", lambda work, sides: answer[0] if work.step == "module" else choose(work, sides)
    )
    return answer


def made(kind, spec=SPECS["compact"], **options):
    torch.manual_seed(0)
    model = kind(**options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ff.factorize(model, spec, init="svd" if isinstance(spec, ff.Rank1) else "random")
    for layer in ff.factorized_layers(model).values():
        for factor in layer.factors().values():
            nn.init.normal_(factor, std=0.3)
        if layer.spec.sparse_factor in layer.factors():
            layer.prune_(0.6)
            layer.compact()
    return model


def both(model, x):
    """What it and the dense model of the same function compute, as lists of tensors."""
    dense = ff.densify(copy.deepcopy(model))
    with torch.no_grad():
        found, wanted = ([t for t in (y if isinstance(y, tuple) else (y,))] for y in (model(x), dense(x)))
    return found, wanted


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"activation": nn.GELU()}], ids=str
)
def test_what_operators_compute(kind, spec, options, calls, chosen):
    model, x = made(kind, SPECS[spec], **(options if kind is Encoder else {})), torch.randn(3, 5, 16)
    for _ in range(3):
        found, wanted = both(model, x)
        torch.testing.assert_close(found, wanted)
        found, wanted = both(model, x + 1)
        torch.testing.assert_close(found, wanted)
    calls.update(operator=0, layer=0)
    with torch.no_grad():
        model(x)
    assert calls == {"operator": 1, "layer": 0}
    with torch.inference_mode():
        model(x)
    assert calls == {"operator": 2, "layer": 0}


def test_layers_compute_where_they_are_faster(kind, calls, chosen):
    chosen[0] = "factored"
    model, x = made(kind), torch.randn(3, 5, 16)
    for _ in range(2):
        torch.testing.assert_close(*both(model, x))
    calls.update(operator=0, layer=0)
    with torch.no_grad():
        model(x)
    assert not calls["operator"] and calls["layer"]
    assert not model.inner._of_process().cache


def test_the_faster_one_is_measured(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTFACT_CHOICE", str(tmp_path))
    choice.forget()
    model, x = made(kind), torch.randn(3, 5, 16)
    torch.testing.assert_close(*both(model, x))
    asked = [one for one in choice.choices() if one.startswith("attention" if kind is Attention else "encoder")]
    assert len(asked) == 1
    # Nothing is measured: layer after layer, as each is chosen.
    monkeypatch.setenv("FASTFACT_CHOICE", "fixed")
    choice.forget()
    torch.testing.assert_close(*both(made(kind), x))
    assert choice.choices()[asked[0]] == "factored"


CHANGES = {
    "a factor": lambda inner: inner.get_submodule("out_proj").u.mul_(2),
    "a factor through .data": lambda inner: inner.get_submodule("out_proj").u.data.mul_(2),
    "values": lambda inner: inner.get_submodule("in_proj").mu[:1].fill_(3),
    "another factor": lambda inner: setattr(inner.in_proj, "v", nn.Parameter(torch.randn_like(inner.in_proj.v))),
    "a bias": lambda inner: inner.in_proj_bias.add_(1),
    "another bias": lambda inner: setattr(inner, "in_proj_bias", nn.Parameter(torch.randn(48))),
    "a state": lambda inner: inner.load_state_dict(
        {name: t if name.endswith("index") else t * 2 for name, t in inner.state_dict().items()}
    ),
    "pruned further": lambda inner: inner.in_proj.compact(0.3),
    "biases of keys and values": lambda inner: (
        setattr(inner, "bias_k", nn.Parameter(torch.randn(1, 1, 16))),
        setattr(inner, "bias_v", nn.Parameter(torch.randn(1, 1, 16))),
    ),
    "a path": lambda inner: setattr(inner.in_proj, "path", "factored"),
    "a new layer": lambda inner: setattr(inner, "out_proj", made(Attention, SPECS["rank one"]).inner.out_proj),
    "a dense layer": lambda inner: setattr(inner, "out_proj", nn.Linear(16, 16)),
    "heads": lambda inner: (setattr(inner, "num_heads", 4), setattr(inner, "head_dim", 4)),
    "the mode": lambda inner: inner.train().eval(),
    "the type": lambda inner: inner.double(),
    "the type of a layer": lambda inner: inner.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(kind, change, chosen):
    model, x = made(kind), torch.randn(3, 5, 16)
    for _ in range(2):
        both(model, x)
    with torch.no_grad():
        before = model(x)
        attention = model.inner if kind is Attention else model.inner.self_attn
        CHANGES[change](attention)
        if change == "the type":
            model.double()
    found, wanted = both(model, x.to(next(model.parameters()).dtype))
    if change == "biases of keys and values":  # which PyTorch's operator for encoders forgets
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            _, wanted = both(model, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(found, wanted)
    same = "the mode", "a path", "the type", "the type of a layer"
    before = before if isinstance(before, tuple) else (before,)
    assert change in same or not torch.allclose(found[0], before[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "activation", torch.tanh),
        lambda layer: setattr(layer, "norm_first", True),
        lambda layer: setattr(layer.self_attn, "add_zero_attn", True),
        lambda layer: setattr(layer.norm1, "eps", 1.0),
        lambda layer: (setattr(layer.norm1, "eps", 1.0), setattr(layer.norm2, "eps", 1.0)),
        lambda layer: layer.norm2.weight.mul_(3),
        lambda layer: setattr(layer.norm2, "bias", None),
        lambda layer: setattr(layer, "norm1", nn.Identity().eval()),
        lambda layer: layer.linear1.v.neg_(),
        lambda layer: layer.linear2.bias[:3].add_(1),
        lambda layer: setattr(layer.linear1, "forward", lambda x: x.new_ones(*x.shape[:-1], 24)),
    ],
)
def test_changes_of_encoders_are_seen(change, chosen):
    model, x = made(Encoder), torch.randn(3, 5, 16)
    for _ in range(2):
        both(model, x)
    with torch.no_grad():
        before = model(x)
        change(model.inner)
    layer = model.inner
    replaced = "forward" in layer.linear1.__dict__
    before_attention, after_attention = (layer.norm1, nn.Identity())[:: 1 if layer.norm_first else -1]
    before_last, after_last = (layer.norm2, nn.Identity())[:: 1 if layer.norm_first else -1]
    with torch.no_grad():
        found = model(x)
        y = before_attention(x)
        y = after_attention(layer.self_attn(y, y, y)[0] + x)
        wanted = after_last(layer.linear2(layer.activation(layer.linear1(before_last(y)))) + y)
    torch.testing.assert_close(found, wanted)
    assert replaced or not torch.allclose(found, before)


def test_hooks_of_layers_are_called(kind, chosen):
    model, x, seen = made(kind), torch.randn(3, 5, 16), []
    for _ in range(2):
        both(model, x)
    handle = model.inner.get_submodule("out_proj" if kind is Attention else "linear1").register_forward_hook(
        lambda *args: seen.append(args)
    )
    with torch.no_grad():
        model(x)
        handle.remove()
        model(x)
    assert len(seen) == 1


def test_what_they_do_not_serve(kind, calls, chosen):
    model, x = made(kind), torch.randn(3, 5, 16)
    for _ in range(2):
        both(model, x)
    calls.update(operator=0)
    model(x)  # gradients are asked for
    model.train()
    with torch.no_grad():
        model(x)
        model.eval()
        model(x[0])
        model(x[:0])
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        mask = torch.zeros(5, 5, dtype=torch.bool)
        if kind is Attention:
            model.inner(x, x, x, attn_mask=mask)
            model.inner(x, x.clone(), x)
            with pytest.raises(RuntimeError, match="is_causal needs attn_mask"):
                model.inner(x, x, x, is_causal=True)
        else:
            model.inner(x, mask)
            model.inner(x, src_key_padding_mask=mask[:3])
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            model(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert not calls["operator"]


@pytest.mark.parametrize("options", [{"batch_first": False}, {"bias": False}])
def test_modules_without_an_operator(kind, options, calls, chosen):
    model, x = made(kind, **options), torch.randn(3, 5, 16)
    with torch.no_grad():
        for _ in range(2):
            model(x)
    assert not calls["operator"]
    torch.testing.assert_close(*both(model, x))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_weights_of_their_own(kind, again, chosen):
    model, x = made(kind), torch.randn(3, 5, 16)
    for _ in range(2):
        both(model, x)
    other = again(model)
    assert not other.inner._of_process().served and model.inner._of_process().served
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(*both(other, x))
    torch.testing.assert_close(*both(model, x))
    plain = ff.densify(model)
    assert not any(key.startswith("_of_operator") for module in plain.modules() for key in module.__dict__)


def test_copies_of_parametrized_modules(chosen):
    """PyTorch copies these by their `__dict__`."""
    model, x = made(Attention), torch.randn(3, 5, 16)
    for _ in range(2):
        both(model, x)
    nn.utils.parametrize.register_parametrization(model.inner, "in_proj_bias", nn.Identity())
    other = copy.deepcopy(model)
    assert not other.inner._of_process().served
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x))


def test_modules_die_with_their_last_name(kind, chosen):
    model, x = made(kind), torch.randn(3, 5, 16)
    with torch.no_grad():
        for _ in range(3):
            model(x)
    assert model.inner._of_process().served
    gone = weakref.ref(model.inner), weakref.ref(ff.factorized_layers(model)[next(iter(ff.factorized_layers(model)))])
    gc.disable()
    try:
        del model
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_training_lets_go_of_the_weights(kind, chosen):
    model, x = made(kind), torch.randn(3, 5, 16)
    with torch.no_grad():
        model(x)
    own = model.inner._of_process()
    assert len(own.cache) and own.served
    model.eval()
    assert len(own.cache) and not own.served
    model.train()
    assert not len(own.cache)
