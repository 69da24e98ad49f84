"""Models of transformers with factorized layers: saved, loaded, trained by its Trainer. `make test-all` runs these."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import fastfact as ff

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def transformers():
    import transformers

    return transformers


def gpt2(transformers):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=20, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


IDS = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(0))


def compacted(model):
    ff.factorize(model, ff.Rank1(), init="svd", unsupported="skip")
    for layer in ff.factorized_layers(model).values():
        layer.compact(0.3)
    return model


def test_gpt2_converts_but_for_its_tied_head(transformers):
    model = gpt2(transformers)
    wanted = model(IDS).logits
    with pytest.raises(ValueError, match=r"lm_head holds a weight tied to others: lm_head\.weight, transformer\.wte"):
        ff.factorize(model, ff.Rank1())
    ff.factorize(model, ff.Rank1(), init="svd", unsupported="skip")
    assert len(ff.factorized_layers(model)) == 8
    torch.testing.assert_close(model(IDS).logits, wanted)
    ff.densify(model)
    assert type(model.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    torch.testing.assert_close(model(IDS).logits, wanted)


def test_from_pretrained_brings_factorized_layers_back(transformers, tmp_path):
    model = compacted(gpt2(transformers))
    model.save_pretrained(tmp_path / "a")
    new = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert all(layer.is_compact for layer in ff.factorized_layers(new).values())
    torch.testing.assert_close(new(IDS).logits, model(IDS).logits)
    assert new.lm_head.weight is new.transformer.wte.weight
    new.to(torch.bfloat16).float().save_pretrained(tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.bfloat16)
    assert len(ff.factorized_layers(again)) == 8 and again.transformer.h[0].mlp.c_fc.u.dtype == torch.bfloat16


def test_a_densified_model_is_saved_as_any_other(transformers, tmp_path):
    model = ff.densify(compacted(gpt2(transformers)))
    model.save_pretrained(tmp_path)
    new = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not ff.factorized_layers(new) and torch.equal(new(IDS).logits, model(IDS).logits)
    assert not hasattr(new.config, "quantization_config")


def test_without_fastfact_loading_raises(transformers, tmp_path):
    compacted(gpt2(transformers)).save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and "ignore_mismatched_sizes" in done.stderr
    code = code.replace("import transformers;", "import transformers, fastfact; fastfact.register_transformers();")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ff.__path__[0] + "/..")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["bert", "llama", "vit"])
def test_other_architectures_keep_their_function(transformers, kind, tmp_path):
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "vit":
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4))
        batch = {"pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        make = {"bert": "BertForSequenceClassification", "llama": "LlamaForCausalLM"}[kind]
        config = {"bert": "BertConfig", "llama": "LlamaConfig"}[kind]
        model = getattr(transformers, make)(getattr(transformers, config)(**small, vocab_size=50, num_labels=2))
        batch = {"input_ids": IDS}
    model.eval()
    wanted = model(**batch).logits
    ff.factorize(model, ff.Rank1(layout="kernel"), init="svd", unsupported="skip")
    torch.testing.assert_close(model(**batch).logits, wanted, atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path)
    new = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(new(**batch).logits, model(**batch).logits)


def test_the_trainer_trains_saves_and_goes_on(transformers, tmp_path):
    model = compacted(gpt2(transformers)).train()
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    options = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, logging_steps=1
    )
    trainer = transformers.Trainer(model, options, train_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    torch.testing.assert_close(saved(IDS).logits, model.eval()(IDS).logits)
    read = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert not compacted(gpt2(transformers)).load_state_dict(read, strict=False).unexpected_keys
    resumed = transformers.Trainer(compacted(gpt2(transformers)).train(), options, train_dataset=rows)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed.model.eval()(IDS).logits, model(IDS).logits)
