"""Local training and evaluation on stacked states: one template model, no copy of it, nothing rebuilt per client.

One client at a time, the template's tensors are pointed at its row of the stacked state and stepped there. Many at a
time, the same step runs batched over the client axis. Both take the same batches in the same order.
"""

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap

from fastfact import ops
from fastfact.data.client import Samples
from fastfact.federation.client.capture import Captured
from fastfact.federation.client.data import batches
from fastfact.federation.client.dropout import Streams
from fastfact.federation.client.optimizer import KEPT
from fastfact.federation.client.phase import EVALUATION_BATCH, Net, Phase, usual
from fastfact.federation.client.step import SUM, Part, Settings, Steps
from fastfact.federation.client.task import CLASSES, Task
from fastfact.federation.client.together import Together
from fastfact.federation.state import State, evenly, generator_for, seed_for, seeded
from fastfact.federation.tensors import TensorInfo, copy_of, tensors_of
from fastfact.nn.convert import factorized_layers

log = logging.getLogger("fastfact")


class Trainer:
    """Trains and evaluates rows of a stacked state with one template model."""

    def __init__(self, model: nn.Module, infos: dict[str, TensorInfo], settings: Settings):
        self.model, self.infos, self.settings = model, infos, settings
        self.tensors = tensors_of(model)
        self.params = {name: param for name, param in model.named_parameters() if name in self.tensors}
        self.trainable = {name for name, param in self.params.items() if param.requires_grad}
        self.device = next(iter(self.tensors.values())).device
        self.shared_generator = True
        """Whether PyTorch's generator of the process may be set: not while other threads train."""
        self._orders: list[torch.Generator] = []
        self._counts_together = True
        self.compact = [layer for layer in factorized_layers(model).values() if layer.is_compact]
        self.steps = Steps(model, infos, settings)

    def copy(self) -> "Trainer":
        """A trainer of the same kind with a model of its own, for another thread."""
        return Trainer(copy_of(self.model), self.infos, self.settings)

    def bind(self, state: State, row: int) -> None:
        """Point the template at one row: its tensors alias the state from here on."""
        for name, tensor in self.tensors.items():
            tensor.data = state[name][row]
        for layer in self.compact:
            layer.forget_words()

    def trained(self, phase: Phase) -> list[str]:
        """The names of the tensors that train in a phase."""
        return [name for name in self.params if name in self.trainable and phase.trains(self.infos[name])]

    def _split(self, state: State, phases: Sequence[Phase]) -> tuple[State, State]:
        """The clients' own tensors of `state` [k, …], and what the optimizer has of them: what is kept there from round
        to round, or else a start."""
        own = {name: tensor for name, tensor in state.items() if not name.startswith(KEPT)}
        kept = {name.removeprefix(KEPT): state[name] for name in state if name not in own}
        params = {name: state[name] for name in self.params if name in self.trainable}
        settings = self.settings.of(phases)
        if not kept or settings is not self.settings:
            kept = settings.update.start(params)
        if settings.accumulate > 1:
            kept |= {f"{SUM}/{name}": torch.zeros_like(param) for name, param in params.items()}
        return own, kept

    def train(
        self,
        state: State,
        data: Sequence[Samples],
        round: int,
        clients: Sequence[int],
        phases: Sequence[Phase],
        purpose: str = "order",
    ) -> tuple[list[float], list[float]]:
        """Train rows 0 … of `state` in place, each on its own data. Returns the mean loss and the seconds of each.

        purpose: of the random stream that orders the samples.
        """
        self.model.train()
        began = time.perf_counter()
        own = [phase.loss is not None or phase.update is not None for phase in phases]
        with contextlib.ExitStack() as stack:
            if self.shared_generator and (self.settings.draws == "globally" or any(own)):
                stack.enter_context(seeded(self.settings.seed, round, clients[0], "model", self.device))
            masks = None
            if self.settings.draws == "own":
                masks = Streams([generator_for(self.settings.seed, round, client, "model") for client in clients])
                stack.enter_context(masks)
            if len(clients) == 1:
                # Of a phase that is interrupted too, the template is left as it was.
                stack.callback(self._ask_for, self.trainable)
                losses = [self._train_one(state, data[0], round, clients[0], phases, purpose)]
            else:
                losses = self._train_batched(state, data, round, clients, phases, purpose, masks)
        seconds = (time.perf_counter() - began) / len(clients)
        return losses, [seconds] * len(clients)

    def _streams(self, round: int, clients: Sequence[int], purpose: str) -> list[torch.Generator]:
        """The generators of the clients' order of samples."""
        self._orders += [torch.Generator() for _ in range(len(clients) - len(self._orders))]
        seed = self.settings.seed
        return [
            order.manual_seed(seed_for(seed, round, client, purpose))
            for order, client in zip(self._orders, clients, strict=False)
        ]

    def _augmentation(self, round: int, client: int, purpose: str) -> torch.Generator | None:
        if self.settings.augment is None:
            return None
        return generator_for(self.settings.seed, round, client, purpose.replace("order", "augment"), self.device)

    def _update(
        self, phase: Phase, state: State, row: int, start: State, data: Samples, order: torch.Generator, lr: float
    ) -> None:
        """The closed-form part of a phase, on one row of `state`; `start` and `lr` are that row's."""
        tensors = {name: state[name][row] for name in self.tensors}
        with torch.no_grad():
            settings, params = self.settings, {n: tensors.pop(n) for n in self.params}
            net = Net(self.model, params, start, tensors, settings.task, settings, order, lr)
            for name, tensor in phase.update(net, *data).items():
                state[name][row] = tensor
                if name not in self.tensors:
                    start[name].copy_(state[name][row])

    def _train_one(
        self, state: State, data: Samples, round: int, client: int, phases: Sequence[Phase], purpose: str
    ) -> float:
        settings, model, (x, y) = self.settings.of(phases), self.model, data
        state, kept = self._split(state, phases)
        self.bind(state, 0)
        (order,) = self._streams(round, [client], purpose)
        augmentation = self._augmentation(round, client, purpose)
        steps = parts(batches(len(y), settings.batch_size), settings.accumulate)
        taken, all_of_them = 0, steps_of(phases, steps)
        total, seen = torch.zeros((), dtype=torch.float64, device=self.device), 0
        longest = max(end - begin for begin, end, _ in steps)
        xs, ys = (self.steps.buffers.of(f"batch {n}", part, longest) for n, part in enumerate(data))
        start: State = {}
        if any(phase.loss is not None or phase.update is not None for phase in phases):
            start = {name: tensor[0].clone() for name, tensor in state.items()}
        for phase in phases:
            if phase.update is not None:
                lr = settings.lr_at(phase, round, taken, all_of_them)
                self._update(phase, state, 0, start, data, order, lr)
            names = self.trained(phase)
            self._ask_for(names)
            params = {name: self.params[name] for name in names}
            # With a client axis, as the optimizer takes them.
            moved = {name: param.detach()[None] for name, param in params.items()}
            net = Net(model, params, start, None, settings.task)
            for _ in range(phase.epochs):
                permutation = torch.randperm(len(y), generator=order).to(self.device)
                for begin, end, part in first_steps(steps, phase.steps):
                    # A buffer of one batch stays in cache, an epoch's copy of the samples does not.
                    some, xb, yb = permutation[begin:end], xs[: end - begin], ys[: end - begin]
                    torch.index_select(x, 0, some, out=xb)
                    torch.index_select(y, 0, some, out=yb)
                    if settings.augment is not None:
                        xb = settings.augment(xb, augmentation)
                    with settings.autocast(self.device):
                        loss = (phase.loss or usual)(net, xb, yb)
                    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
                    with torch.no_grad():
                        lr = settings.lr_at(phase, round, taken, all_of_them)
                        settings.move_(moved, [grad[None] for grad in grads], kept, lr, part)
                    taken += part.due and phase.lr is None
                    total.add_(loss.detach(), alpha=end - begin)
                    seen += end - begin
        return total.item() / max(seen, 1)

    def _ask_for(self, names: Collection[str]) -> None:
        """Of what trains at all, let these of the template's parameters ask for a gradient."""
        for name in self.trainable:
            self.params[name].requires_grad_(name in names)

    def _train_batched(
        self,
        state: State,
        data: Sequence[Samples],
        round: int,
        clients: Sequence[int],
        phases: Sequence[Phase],
        purpose: str,
        masks: Streams | None,
    ) -> list[float]:
        settings, k = self.settings.of(phases), len(clients)
        generators = None if masks is None else masks.generators
        orders = self._streams(round, clients, purpose)
        augmentations = [self._augmentation(round, client, purpose) for client in clients]
        sizes = [len(y) for _, y in data]
        steps = [parts(batches(n, settings.batch_size), settings.accumulate) for n in sizes]
        taken, all_of_them = [0] * k, [steps_of(phases, some) for some in steps]
        own, began = self._split(state, phases)
        state, kept = self.steps.places(own, began)
        total, seen = torch.zeros(k, dtype=torch.float64, device=self.device), [0] * k
        start = {}
        if any(phase.loss is not None or phase.update is not None for phase in phases):
            start = {name: tensor.clone() for name, tensor in state.items()}
        for phase in phases:
            for row in range(k if phase.update is not None else 0):
                first = {name: tensor[row] for name, tensor in start.items()}
                lr = settings.lr_at(phase, round, taken[row], all_of_them[row])
                self._update(phase, state, row, first, data[row], orders[row], lr)
            step = self.steps.of(phase, self.trained(phase), state, kept, start)
            for row, some in enumerate(steps):
                seen[row] += phase.epochs * sum(end - begin for begin, end, _ in first_steps(some, phase.steps))
            for _ in range(phase.epochs):
                step.shuffle(data, self._order(sizes, orders))
                for index in range(len(first_steps(max(steps, key=len), phase.steps))):
                    for (begin, end, part), rows in _same_batch(steps, index).items():
                        batch = step.batch(rows, begin, end, augmentations)
                        if masks is not None:
                            masks.generators = [generators[row] for row in rows]
                        lr = [settings.lr_at(phase, round, taken[row], all_of_them[row]) for row in rows]
                        losses = step(rows, batch, self.steps.rates(lr), part)
                        for row in rows if part.due and phase.lr is None else ():
                            taken[row] += 1
                        if len(rows) < k:
                            total[rows] += losses.to(total) * (end - begin)
                        else:
                            total.add_(losses, alpha=end - begin)
        for before, after in ((own, state), (began, kept)):
            for name, tensor in before.items() if before is not after else ():
                tensor.copy_(after[name])
        return [loss / max(n, 1) for loss, n in zip(total.tolist(), seen, strict=True)]

    def _order(self, sizes: Sequence[int], orders: Sequence[torch.Generator]) -> Tensor:
        """One epoch's order of every client's samples, int64 [k, longest]; the tail of shorter ones is unused."""
        order = torch.zeros(len(sizes), max(sizes), dtype=torch.long)
        for row, n, generator in zip(order.unbind(), sizes, orders, strict=True):
            torch.randperm(n, generator=generator, out=row if n == len(row) else row[:n])
        return order

    @torch.no_grad()
    def found(self, state: State, x: Tensor, of: Callable[[Net, Tensor], State]) -> State:
        """What `Strategy.measure` finds out about the samples x [n, …] with the model of the first row of `state`, of
        which it gets a copy, in eval mode."""
        tensors = {name: state[name][0].clone() for name in self.tensors}
        params = {name: tensors.pop(name) for name in self.params}
        self.model.eval()
        with seeded(self.settings.seed, 0, 0, "measure", self.device):
            return of(Net(self.model, params, {}, tensors, self.settings.task), x)

    @torch.no_grad()
    def loss(self, state: State, data: Samples) -> Tensor:
        """The mean loss of each row of `state` on the same samples, in eval mode: float64 on the CPU."""
        self.model.eval()
        task = self.settings.task
        (x, y), losses = data, []
        for row in range(len(next(iter(state.values())))):
            self.bind(state, row)
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for some, labels in zip(x.split(EVALUATION_BATCH), y.split(EVALUATION_BATCH), strict=True):
                total += task.total(task.output(self.model, some), labels)
            losses.append(total / len(y))
        return torch.stack(losses).cpu()

    def measure(self, state: State, data: Sequence[Samples], together: int = 1) -> list[dict[str, float | None]]:
        """ "accuracy" and the task's metrics of each row of `state` on its own data, see `evaluate`; None for a number
        that is not finite. Of more than `EVALUATION_BATCH` samples, the mean of a metric over batches of them."""
        task, rows = self.settings.task, []
        for row, accuracy in enumerate(self.evaluate(state, data, together)):
            sums = dict.fromkeys(task.metrics, 0.0)
            for output, y in self._outputs(state, row, data[row]) if sums else ():
                for name, value in task.measured(output, y).items():
                    sums[name] += float(value) * len(y)
            means = {name: total / len(data[row][1]) for name, total in sums.items()}
            rows.append(
                {"accuracy": accuracy} | {n: mean if math.isfinite(mean) else None for n, mean in means.items()}
            )
        return rows

    @torch.no_grad()
    def _outputs(self, state: State, row: int, data: Samples) -> Iterator[tuple[Tensor, Tensor]]:
        """What the model of a row gives for its samples, and their targets, batch by batch."""
        self.model.eval()
        self.bind(state, row)
        for x, y in zip(*(part.split(EVALUATION_BATCH) for part in data), strict=True):
            yield self.settings.task.output(self.model, x), y

    @torch.no_grad()
    def evaluate(self, state: State, data: Sequence[Samples], together: int = 1) -> list[float | None]:
        """The accuracy of each row of `state` on its own data; None where the task has none. together: how many rows
        may be evaluated over the client axis where their test sets are small and alike."""
        if not self.settings.task.plain:
            return [self._accuracy(state, row, samples) for row, samples in enumerate(data)]
        self.model.eval()
        k = len(data)
        correct = torch.zeros(k, dtype=torch.long, device=self.device)
        sizes = [y.shape[0] for _, y in data]
        if together > 1:
            # They take no gradients, momenta or activations that are kept.
            most = max(together, min(4 * together, EVALUATION_BATCH // max(sizes, default=1)))
            together = evenly(k, most)
        for begin in range(0, k, together):
            rows = range(begin, min(begin + together, k))
            n = sizes[begin]
            if len(rows) > 1 and n * len(rows) <= EVALUATION_BATCH and sizes[begin : rows.stop].count(n) == len(rows):
                every = torch.arange(n, device=self.device).repeat(len(rows), 1)
                batch = [*(data[row][0] for row in rows), torch.stack([data[row][1] for row in rows]), every]
                right = self._count_together(*batch, *(state[name][begin : rows.stop] for name in self.tensors))
                if right is not None:
                    correct[begin : rows.stop] = right
                    continue
            for row in rows:
                for output, y in self._outputs(state, row, data[row]):
                    correct[row] += (output.argmax(1) == y).sum()
        return [right / n for right, n in zip(correct.tolist(), sizes, strict=True)]

    def _accuracy(self, state: State, row: int, data: Samples) -> float | None:
        hits, met, number = self.settings.task.hits, 0, 0
        for output, y in self._outputs(state, row, data) if hits else ():
            some, of = hits(output, y)
            met, number = met + int(some), number + int(of)
        return met / number if number else None

    def _count_together(self, *tensors: Tensor) -> Tensor | None:
        """`_count`; None from the first time on that the model's forward has an operation without a rule for `vmap`."""
        if not self._counts_together:
            return None
        try:
            return self._count(*tensors)[0]
        except RuntimeError as error:
            log.info("clients are evaluated one by one: %s", str(error).splitlines()[0])
            self._counts_together = False
            return None

    @functools.cached_property
    def _count(self) -> Callable[..., Sequence[Tensor]]:
        """(x [n, …] of each of k clients, y [k, n], the rows of x [k, n], the model's tensors [k, …]) → how many of
        their own n samples the clients get right."""
        batched = vmap(lambda tensors, x: self.settings.task.output(self.model, x, tensors))
        last = 2 + len(self.tensors)

        def count(*tensors: Tensor) -> list[Tensor]:
            y, index, *state = tensors[-last:]
            with ops.GatheredBatch(tensors[:-last], index) as batch, Together():
                logits = batched(dict(zip(self.tensors, state, strict=True)), batch.x)
            return [(logits.argmax(2) == y).sum(1)]

        captures = self.settings.graphs and self.device.type == "cpu"
        return Captured(count, self.model, self.steps.patience, last) if captures else count


class Encoder:
    """encoder(state, x) → what each client's classifier gets to see of x.

    path: of the classifier in the model, None where there is none. shape, dtype, device: of a sample as the model takes
    it. vocabulary: how many tokens the model knows (the rows of its first embedding), None for a model without
    embeddings.
    """

    def __init__(self, trainer: Trainer, path: str | None, shape: Sequence[int], dtype: torch.dtype):
        self.trainer, self.path, self.shape, self.dtype = trainer, path, tuple(shape), dtype
        self.device = trainer.device
        tables = (m.num_embeddings for m in trainer.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        self.vocabulary = next(tables, None)

    @torch.no_grad()
    def __call__(self, state: State, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """The input of the classifier of each row of `state` [k, …] for x [n, …], in eval mode: [k, n, d]. Of a
        classifier that a forward calls several times, the inputs stand beside each other along d.

        Raises ValueError for a model without a classifier (a layer with a weight) or whose forward does not call it, or
        calls it with numbers of rows that differ, and for a made-up x where the model takes several entries by name.
        """
        task = self.trainer.settings.task
        if isinstance(x, Mapping) and task.entries is not None:
            x = task.entries.packed(x, next(iter(self.trainer.params.values())).dtype).to(self.device)
        elif task.entries is not None:
            raise ValueError(f"clients cannot be compared by one x that is drawn: samples are of {task.entries}")
        if self.path is None:
            raise ValueError("the model has no layer with a weight, so no classifier whose input could be taken")
        seen, encodings = list[Tensor](), list[Tensor]()
        classifier = self.trainer.model.get_submodule(self.path)
        handle = classifier.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(1)))
        self.trainer.model.eval()
        try:
            for row in range(len(next(iter(state.values())))):
                self.trainer.bind(state, row)
                seen.clear()
                task.output(self.trainer.model, x)
                if len(rows := {len(part) for part in seen}) != 1:
                    calls = f"with {', '.join(map(str, sorted(rows)))} rows in one forward" if rows else "by no forward"
                    raise ValueError(f"the classifier {self.path} is called {calls}, so it has no encoding of a sample")
                encodings.append(torch.cat(seen, dim=1))
        finally:
            handle.remove()
        return torch.stack(encodings)


Batch = tuple[int, int, Part]
"""(start, stop) of a batch, and what it is of a local step."""


def parts(steps: Sequence[tuple[int, int]], accumulate: int) -> list[Batch]:
    """The batches of an epoch, of which so many make a local step; the last one may have fewer."""
    made = []
    for begin in range(0, len(steps), accumulate):
        some = steps[begin : begin + accumulate]
        samples = some[-1][1] - some[0][0]
        made += [(a, b, Part((b - a) / samples, (a, b) == some[-1])) for a, b in some]
    return made


def first_steps(batches: Sequence[Batch], most: int | None) -> Sequence[Batch]:
    """The batches of the first local steps of an epoch, of all if None."""
    due = [index + 1 for index, (*_, part) in enumerate(batches) if part.due]
    return batches if most is None or most >= len(due) else batches[: due[most - 1]] if most else []


def steps_of(phases: Sequence[Phase], batches: Sequence[Batch]) -> int:
    """How many local steps a client takes in a round by the federation's learning rate."""
    some = [phase for phase in phases if phase.lr is None]
    return sum(phase.epochs * sum(p.due for *_, p in first_steps(batches, phase.steps)) for phase in some)


def _same_batch(steps: Sequence[Sequence[Batch]], index: int) -> dict[Batch, list[int]]:
    """Batch `index` → the clients whose batch it is; those without one appear nowhere."""
    groups: dict[Batch, list[int]] = {}
    for row, client_steps in enumerate(steps):
        if index < len(client_steps):
            groups.setdefault(client_steps[index], []).append(row)
    return groups


def memory_cohort(
    model: nn.Module, sample: Tensor, batch_size: int, memory: int, slots: int = 1, task: Task = CLASSES
) -> int:
    """How many clients, 1 to 256, fit into `memory` bytes in a training step.

    A client takes its state, the download it started from, what the optimizer keeps (`slots` times as much), gradient,
    and as much again for the weights made from factors, and twice what autograd keeps of a forward pass: the tensors
    and their gradients.
    """
    kept, state = kept_by_a_step(model, sample, batch_size, task), sum(t.nbytes for t in tensors_of(model).values())
    return max(1, min(256, memory // ((5 + slots) * state + 2 * kept)))


def kept_by_a_step(model: nn.Module, sample: Tensor, batch_size: int, task: Task = CLASSES) -> int:
    """Bytes autograd keeps of a forward pass of a batch; `sample` is one x without the batch axis."""
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    training = model.training
    model.eval()
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            task.output(model, sample.to(next(model.parameters()).device).expand(batch_size, *sample.shape))
    finally:
        model.train(training)
    return kept
