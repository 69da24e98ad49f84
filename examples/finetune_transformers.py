"""Fine-tune one frozen model of transformers for many clients: each has low-rank adapters of its own, trained together.

    pip install "fastfact[surroundings]"
    python examples/finetune_transformers.py --clients 16 --rounds 6

The model is made from a configuration, nothing is downloaded; a few steps on everybody's language stand for its
pretraining. The samples are dicts of lists of different lengths, as a tokenizer makes them: of tokens that count and
noise, where the label is which kind there are more of. Which of two labels a kind has differs between two groups of
clients, which no single model can follow: FedSA-LoRA shares A, and leaves B and the classifier to each client.
"""

import argparse
import copy

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import fastfact as ff
from fastfact import data

LENGTH, NOISE = 16, 30
KINDS = range(1, 6), range(6, 11)


def text(draw: torch.Generator, swapped: bool) -> dict:
    """A sample as a tokenizer makes it."""
    label = int(torch.randint(2, (), generator=draw))
    length = int(torch.randint(8, LENGTH + 1, (), generator=draw))
    tokens = torch.randint(11, 11 + NOISE, (length,), generator=draw)
    counts = torch.randperm(length, generator=draw)[:5]
    kinds = [label, label, label, label, 1 - label]
    for place, kind in zip(counts.tolist(), kinds, strict=True):
        tokens[place] = KINDS[kind][int(torch.randint(5, (), generator=draw))]
    return {"input_ids": tokens.tolist(), "attention_mask": [1] * length, "labels": label ^ swapped}


def together(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Samples of one length. A mask of four axes, which broadcast over heads and queries, is taken as it is; of one
    with two, models of transformers ask whether it is all ones, which clients that train together cannot answer as one.
    """
    batch = data.pad(LENGTH)(rows)
    return batch | {"attention_mask": batch["attention_mask"].bool()[:, None, None]}


def client(number: int, samples: int) -> ff.Client:
    draw = torch.Generator().manual_seed(number)
    rows = [text(draw, swapped=number % 2 == 1) for _ in range(samples + 20)]
    return ff.Client(train=rows[:samples], test=rows[samples:], collate=together)


def pretrained(width: int, layers: int, steps: int) -> nn.Module:
    """BERT from a configuration, after some steps on samples of nobody in particular."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=11 + NOISE,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    optimizer, draw = torch.optim.AdamW(model.parameters(), 2e-3), torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(**together([text(draw, swapped=False) for _ in range(32)])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """The same model, frozen, with adapters of rank 4 in its attention; the classifier trains whole."""
    return ff.factorize(
        model,
        {"*.query": ff.LowRank(rank=4, scaling=2.0), "*.value": ff.LowRank(rank=4, scaling=2.0)},
        freeze=True,
        train=["classifier"],
    )


def run(clients: int, rounds: int, width: int, layers: int, pretrain: int, samples: int, cohort) -> ff.Federation:
    model = pretrained(width, layers, pretrain)
    fed = ff.Federation(
        lambda: with_adapters(copy.deepcopy(model)),
        [client(number, samples) for number in range(clients)],
        "fedsa-lora",
        settings={"share_classifier": False},
        optimizer="adamw",
        optimizer_states="kept",
        lr=5e-3,
        weight_decay=0.01,
        schedule="cosine",
        schedule_rounds=rounds,
        lr_warmup=0.1,
        max_grad_norm=1.0,
        metrics=["test_loss"],
        epochs=2,
        batch_size=8,
        cohort=cohort,
        seed=0,
    )
    fed.fit(rounds, on_round=lambda number, rows: print(f"round {number}: {_line(rows)}"))
    print(ff.summary(fed.models[0]))
    print(
        f"a client is {fed.states.bytes() / len(fed):,.0f} bytes, with what Adam keeps; the model {4 * _size(model):,}"
    )
    return fed


def _line(rows: list[dict]) -> str:
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("accuracy", "test_loss")}
    return f"accuracy {mean['accuracy']:.3f}, loss on test samples {mean['test_loss']:.3f}"


def _size(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"clients": 16, "rounds": 6, "width": 64, "layers": 2, "pretrain": 150, "samples": 80}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cohort", default="auto", type=lambda text: int(text) if text.isdigit() else text)
    run(**vars(parser.parse_args()))
