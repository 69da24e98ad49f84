"""Low-rank adapters of frozen networks: a layer, and a step of many clients, ours beside PEFT (a loop over its models).

Sides run in turn in one process, on the same numbers, and their losses are compared first. Of each row: the median time
of ours in ms, ratio = the median over the turns of theirs / ours, the goal. Memory is counted, not measured.

The rival of many clients is a loop over models of PEFT that share the frozen network in memory, with SGD for the
adapters; the memory row counts what it is without that, a network each.
"""

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfact import public as ff
from fastfact.bench.common import interleaved
from fastfact.federation import Federation
from fastfact.federation.client.executor import evenly
from fastfact.federation.federation import Client
from fastfact.federation.state import take

LR, SCALING = 0.05, 2.0
LAYERS = {"768→768": (768, 768), "768→3072": (768, 3072), "3072→768": (3072, 768)}
ROWS, RANK = 512, 8


class Block(nn.Module):
    """A block of a transformer encoder, its norms first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens [n, 16, 48], a class token, blocks, a classifier: a vision transformer after its patches are cut."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.embed, self.token = nn.Linear(48, width), nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


TARGETS = ["qkv", "proj", "fc1", "fc2"]


@dataclass(frozen=True)
class Work:
    """Clients that fine-tune one network."""

    clients: int
    width: int
    depth: int
    heads: int
    rank: int
    batch: int
    cohort: int
    goal: float

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return Transformer(self.width, self.depth, self.heads)

    def ours(self) -> nn.Module:
        return ff.factorize(self.network(), self.spec(), only=[f"*.{name}" for name in TARGETS], freeze=True)

    def spec(self) -> ff.LowRank:
        return ff.LowRank(rank=self.rank, scaling=SCALING)


WORKS = {
    "32 clients, ViT-tiny": Work(32, 192, 12, 3, 8, 8, 32, 2.5),
    "256 clients, 4 × 768": Work(256, 768, 4, 12, 4, 2, 64, 4.0),
}


def _peft():
    """PEFT, with which all is compared. Raises ValueError, with what to do, where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("bench adapters compares with PEFT: pip install 'fastfact[surroundings]'") from error
    return peft


def _in_peft(model: nn.Module, rank: int, targets: list[str]) -> nn.Module:
    config = _peft().LoraConfig(r=rank, lora_alpha=SCALING * rank, target_modules=targets)
    return _peft().get_peft_model(model, config)


def _give(layer: nn.Module, other: Any) -> None:
    """The factors of our layer to one of PEFT."""
    with torch.no_grad():
        for name in ("A", "B"):
            getattr(other, f"lora_{name}")["default"].weight.copy_(getattr(layer, name))


def _kept(call: Callable[[], Tensor], but: set[int]) -> int:
    """Bytes that autograd keeps of a forward pass, parameters apart, each memory counted once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in but:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = call()
    del out
    return sum(kept.values())


def _row(work: str, times: dict[str, list[float]], goal: float | None, **more) -> dict[str, Any]:
    ratio = statistics.median(a / b for a, b in zip(times["peft"], times["ours"], strict=True))
    return {
        "work": work,
        "ours_ms": statistics.median(times["ours"]),
        "peft_ms": statistics.median(times["peft"]),
        "ratio": ratio,
        "goal": goal,
        **more,
    }


def layer(name: str, rounds: int, clock: str) -> list[dict[str, Any]]:
    """A step of one layer (forward and backward), and its evaluation."""
    i, o = LAYERS[name]
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(i, o))
    theirs = _in_peft(copy.deepcopy(dense), RANK, ["0"])
    ours = ff.factorize(dense, ff.LowRank(rank=RANK, scaling=SCALING), freeze=True)
    nn.init.normal_(ours[0].B, std=0.01)
    _give(ours[0], theirs.base_model.model[0])
    x, grad = torch.randn(ROWS, i, requires_grad=True), torch.randn(ROWS, o)

    def step(model: nn.Module) -> Callable[[], None]:
        parameters = [x, *(p for p in model.parameters() if p.requires_grad)]

        def run() -> None:
            for p in parameters:
                p.grad = None
            model(x).backward(grad)

        return run

    def evaluate(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    sides = {"ours": ours, "peft": theirs}
    kept = {
        side: _kept(lambda model=model: model(x), {p.untyped_storage().data_ptr() for p in model.parameters()})
        for side, model in sides.items()
    }
    memory = {f"{side}_kept": size for side, size in kept.items()}
    times = interleaved({side: step(model) for side, model in sides.items()}, rounds, 3, clock)
    rows = [_row(f"layer {name}, rank {RANK}, {ROWS} rows, step", times, 1.1, **memory)]
    for model in sides.values():
        model.eval()
    times = interleaved({side: evaluate(model) for side, model in sides.items()}, rounds, 3, clock)
    return [*rows, _row(f"layer {name}, rank {RANK}, {ROWS} rows, evaluation", times, None)]


def clients_of(work: Work) -> list[Client]:
    """Random tokens, a batch a client."""
    g = torch.Generator().manual_seed(1)
    clients = []
    for _ in range(work.clients):
        x, y = torch.randn(work.batch, 16, 48, generator=g), torch.randint(10, (work.batch,), generator=g)
        clients.append(Client((x, y), (x[:1], y[:1])))
    return clients


def many(name: str, rounds: int, clock: str, clients: int | None = None) -> list[dict[str, Any]]:
    """A step of SGD of all clients, and what they take at work and at rest."""
    work = WORKS[name]
    if clients is not None:
        work = Work(clients, *list(vars(work).values())[1:])
        name = f"{name} ({clients})"
    data = clients_of(work)
    fed = Federation(
        work.ours,
        data,
        "stand-alone",
        epochs=1,
        batch_size=work.batch,
        lr=LR,
        momentum=0.0,
        weight_decay=0.0,
        cohort=min(work.cohort, work.clients),
    )
    size = evenly(work.clients, fed.cohort)
    everybody = list(range(work.clients))
    start = {n: t.expand(work.clients, *t.shape[1:]).contiguous() for n, t in fed.initial.items()}
    state, phases = take(start, everybody), fed.method.active_phases(1, adapts=False)
    found = {"ours": [], "peft": []}

    def ours() -> None:
        losses = []
        for begin in range(0, work.clients, size):
            some = everybody[begin : begin + size]
            rows = {n: t[begin : begin + size] for n, t in state.items()}
            losses += fed.trainer.train(rows, [data[k].train for k in some], 1, some, phases)[0]
        found["ours"].append(losses)

    first = _in_peft(work.network(), work.rank, TARGETS)
    others = {path: module for path, module in first.base_model.model.named_modules() if hasattr(module, "lora_A")}
    for path, own in ff.factorized_layers(fed.models[0]).items():
        _give(own, others[path])
    frozen = {id(p): p for p in first.parameters() if not p.requires_grad}
    models = [copy.deepcopy(first, dict(frozen)) for _ in everybody]
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LR) for m in models]

    def loop() -> None:
        losses = []
        for model, optimizer, client in zip(models, optimizers, data, strict=True):
            x, y = client.train
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found["peft"].append(losses)

    # What is recorded, is recorded in the first steps; every side takes as many.
    fed.trainer.steps.patience = 0
    for _ in range(2):
        ours()
        loop()
    for turn, (one, other) in enumerate(zip(found["ours"], found["peft"], strict=True)):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-3, atol=2e-3, msg=f"step {turn}")
    times = interleaved({"ours": ours, "peft": loop}, rounds, 0, clock)
    about = {"clients": work.clients, "cohort": size, "rank": work.rank, "batch": work.batch}
    rows = [_row(f"{name}, step", times, work.goal, **about)]
    trained = sum(t[0].nbytes for t in fed.initial.values())
    shared = sum(p.nbytes for p in frozen.values())
    x, y = data[0].train
    kept = _kept(lambda: F.cross_entropy(models[0](x), y), {p.untyped_storage().data_ptr() for p in first.parameters()})
    # Ours: the network once; adapters of all; of those that train together gradients and what is kept.
    ours_at_work = shared + work.clients * trained + size * (trained + kept)
    theirs_at_work = work.clients * (shared + 2 * trained) + kept
    dense = sum(p.nbytes for p in work.network().parameters())
    for what, own, rival, goal in (
        ("bytes at work, counted", ours_at_work, theirs_at_work, 0.05),
        ("bytes of a resident client / of its dense model", trained, dense, 0.01),
    ):
        rows.append({"work": f"{name}, {what}", "ours": own, "rival": rival, "share": own / rival, "goal": goal})
    return rows


def run(
    quick: bool = False,
    only: str | None = None,
    rounds: int | None = None,
    clock: str = "wall",
    clients: int | None = None,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each part and its rows. quick: two clients, few rounds. only: the part whose name begins so. clients: in place of
    each work's own, where the machine is small.

    Raises ValueError for an `only` that is none or without PEFT, AssertionError where the sides differ.
    """
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {}
    turns, clients = rounds or (2 if quick else 15), 2 if quick else clients
    for name in LAYERS:
        parts[f"layer {name}"] = lambda name=name: layer(name, turns if quick else 3 * turns, clock)
    for name in WORKS:
        parts[name] = lambda name=name: many(name, 1 if quick else max(2, turns // 5), clock, clients)
    chosen = [name for name in parts if only is None or name.startswith(only)]
    if not chosen:
        raise ValueError(f"only={only!r}, must begin one of {', '.join(parts)}")
    _peft()
    for name in chosen:
        yield name, parts[name]()
