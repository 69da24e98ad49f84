"""How the clients of a cohort take a training step together, batched over the client axis.

`Step` runs as it stands. On a GPU `ReplayedStep` has it as a CUDA graph. On the CPU `GatheredStep` reads the samples
where they are, and `capture` replays the operations of the gradient. `Steps` chooses; all give the same numbers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from fastfact import ops
from fastfact.data.client import Samples
from fastfact.federation.client.capture import PATIENCE, Captured
from fastfact.federation.client.optimizer import OPTIMIZERS, Optimizer, clipped, rate
from fastfact.federation.client.phase import Net, Phase, usual
from fastfact.federation.client.task import CLASSES, Task
from fastfact.federation.client.together import Together
from fastfact.federation.state import State
from fastfact.federation.tensors import TensorInfo, tensors_of


@dataclass(frozen=True)
class Settings:
    """How every client trains. `l1` is λ of the strategy; `penalized` names the tensors it is for (μ)."""

    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    l1: float = 0.0
    proximal: bool = True
    penalized: frozenset[str] = frozenset()
    augment: Callable | None = None
    seed: int = 0
    draws: str = "globally"
    """Where a training forward of the model draws random numbers from: nowhere ("no"), the client's own stream ("own",
    see `dropout.Streams`), or PyTorch's generator of the process ("globally")."""
    graphs: bool = True
    """Whether a cohort's step is captured and replayed in phases without a loss of their own: on a GPU as a CUDA graph,
    on the CPU the operations of its gradient (see `capture`)."""
    optimizer: str = "sgd"
    beta2: float = 0.999
    eps: float = 1e-8
    optimizer_states: str = "dropped"
    schedule: str = "constant"
    schedule_rounds: int = 0
    lr_warmup: float = 0.0
    max_grad_norm: float | None = None
    accumulate: int = 1
    precision: str = "full"
    task: Task = CLASSES

    @functools.cached_property
    def adapting(self) -> "Settings":
        """How clients adapt the copies that are evaluated: at a constant learning rate."""
        return dataclasses.replace(self, schedule="constant", lr_warmup=0.0)

    @functools.cached_property
    def descending(self) -> "Settings":
        """How they do where a method sets that rate, which is one of plain steps."""
        return dataclasses.replace(self.adapting, optimizer="sgd", max_grad_norm=None, accumulate=1)

    def of(self, phases: Sequence[Phase]) -> "Settings":
        """Those of some phases, which all adapt or all train."""
        if not any(phase.adapts for phase in phases):
            return self
        return self.adapting if all(phase.lr is None for phase in phases) else self.descending

    @functools.cached_property
    def update(self) -> Optimizer:
        """The optimizer."""
        return OPTIMIZERS[self.optimizer](self)

    @property
    def scheduled(self) -> bool:
        """Whether the learning rate changes from step to step."""
        return self.schedule != "constant" or self.lr_warmup > 0

    def lr_at(self, phase: Phase, round: int, step: int, steps: int) -> float:
        """The learning rate of a client's step, from 0, of so many in a round. That of a phase with one of its own is
        constant."""
        if phase.lr is not None:
            return phase.lr
        return self.lr * rate(self, round, step, max(steps, 1)) if self.scheduled else self.lr

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager:
        """What a forward pass of training runs in."""
        if self.precision == "full":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def move_(self, params: State, grads: Sequence[Tensor], kept: State, lr: float | Tensor, part: "Part") -> None:
        """Step `params` [k, …] by their gradients, or add these to what is accumulated, in place."""
        if part.share != 1:
            sums = [kept[f"{SUM}/{name}"] for name in params]
            torch._foreach_add_(sums, grads, alpha=part.share)
            if not part.due:
                return
            grads = [grad.clone() for grad in sums]
            torch._foreach_zero_(sums)
        if self.max_grad_norm is not None:
            grads = clipped(grads, self.max_grad_norm)
        self.update.step_(params, grads, kept, lr)


SUM = "sum"
"""The slot of gradients that are accumulated."""


class Part(NamedTuple):
    """What a batch is of a local step: the share of its samples, and whether the step is due with it."""

    share: float = 1.0
    due: bool = True


class Buffers:
    """Tensors that are kept from batch to batch and from cohort to cohort."""

    def __init__(self):
        self.kept: dict[str, Tensor] = {}

    def copies(self, key: str, state: State) -> tuple[State, bool]:
        """(tensors like those of `state` [k, …] that stay at their addresses, whether they are new ones)."""
        copies, new = {}, False
        for name, tensor in state.items():
            kept, like = self.kept.get(f"{key} {name}"), torch.empty_like(tensor, device="meta")
            same = kept is not None and (kept.dtype, kept.shape[1:]) == (like.dtype, like.shape[1:])
            if not same or kept.stride() != like.stride() or len(kept) < len(like):
                kept, new = torch.empty_like(tensor), True
                self.kept[f"{key} {name}"] = kept
            copies[name] = kept[: len(tensor)]
        return copies, new

    def of(self, key: str, like: Tensor, n: int) -> Tensor:
        """A buffer [n or more, …] in the dtype and memory format of `like` [any number, …]."""
        last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
        kind, buffer = torch.channels_last if last else torch.contiguous_format, self.kept.get(key)
        fits = buffer is not None and len(buffer) >= n and buffer.shape[1:] == like.shape[1:]
        if not fits or buffer.dtype != like.dtype or not buffer.is_contiguous(memory_format=kind):
            shape = (n, *like.shape[1:])
            buffer = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=kind)
            self.kept[key] = buffer
        return buffer


class Steps:
    """Makes the steps of a model's phases. What is captured serves all cohorts, and all rounds."""

    def __init__(self, model: nn.Module, infos: dict[str, TensorInfo], settings: Settings):
        self.model, self.infos, self.settings = model, infos, settings
        self.tensors = tensors_of(model)
        self.params = {name: param for name, param in model.named_parameters() if name in self.tensors}
        self.device = next(iter(self.tensors.values())).device
        self.buffers = Buffers()
        self.patience: float = PATIENCE
        """How soon something is captured, see `Captured`."""
        self._captured: dict[tuple, Captured] = {}
        self._replayed: dict[tuple, ReplayedStep] = {}

    @property
    def _has_cuda_graphs(self) -> bool:
        # Dropout that draws from each client's own stream draws on the CPU, which a replay would not do again.
        return self.device.type == "cuda" and self.settings.draws != "own"

    def rates(self, rates: Sequence[float]) -> float | Tensor:
        """Learning rates of clients as `Optimizer.step_` takes them: a number where it is one and no graph would keep
        it."""
        if not self.settings.scheduled or (len(set(rates)) == 1 and not self._has_cuda_graphs):
            return rates[0]
        pinned = self.device.type == "cuda"
        return torch.tensor(rates, dtype=torch.float64, pin_memory=pinned).to(self.device, non_blocking=True)

    def places(self, state: State, kept: State) -> tuple[State, State]:
        """Where `state` and what the optimizer has `kept` of it [k, …] train: copies at addresses that stay from cohort
        to cohort and from round to round, as CUDA graphs need them; the tensors themselves where there are none."""
        if not (self._has_cuda_graphs and self.settings.graphs):
            return state, kept
        places, moved = zip(self.buffers.copies("state", state), self.buffers.copies("kept", kept), strict=True)
        if any(moved):
            self._replayed.clear()
        for place, tensors in zip(places, (state, kept), strict=True):
            for name, tensor in place.items():
                tensor.copy_(tensors[name])
        return places

    def of(self, phase: Phase, names: Sequence[str], state: State, kept: State, start: State) -> "Step":
        """The step of a phase that trains the tensors `names` of `state` [k, …]; it moves `state` and `kept`, what the
        optimizer keeps of all, in place. start: what `Net.start` is, [k, …]."""
        settings, kind = self.settings, Step
        task, usual = settings.task, phase.loss is None and settings.task.name is not None
        plain = usual and settings.draws == "no"
        gathers = plain and task.plain and settings.augment is None and settings.precision == "full"
        if self.device.type == "cpu" and gathers:
            kind = GatheredStep
        step = kind(self, phase, names, state, kept, start if phase.loss is not None else {})
        if settings.graphs and usual:
            if self._has_cuda_graphs:
                key = tuple(step.names), frozenset(step.common), phase.lr, phase.adapts, step.k
                return self._replayed.setdefault(key, ReplayedStep(step))
            if plain:
                key = tuple(step.names), frozenset(step.common)
                if key not in self._captured:
                    self._captured[key] = Captured(step.gradients, self.model, self.patience, step.counted)
                step.gradients = self._captured[key]
        return step


def _batched_cross_entropy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """`phase.usual` for labels that are all classes, in few operations under `vmap`."""
    return ops.cross_entropy(net(x), y)


class Step:
    """A training step of a phase: on an epoch that `shuffle` sets out, some rows of the state take a batch.

    What does not train in the phase and is the same in all rows goes in once, without the client axis, so that layers
    can serve all clients with it in one call (σ of FedDecomp while A and B train). What the model has frozen is no part
    of the state and goes in so by itself.
    """

    counted: int | None = None
    """Of how many tensors of `gradients`, the last ones, the shapes are those of a capture; None: of all."""

    def __init__(self, steps: Steps, phase: Phase, names: Sequence[str], state: State, kept: State, start: State):
        self.phase, self.names, self.state, self.start = phase, names, state, start
        self.kept = {key: tensor for key, tensor in kept.items() if key.partition("/")[2] in set(names)}
        self.settings, self.infos = steps.settings.of([phase]), steps.infos
        self.device, self.buffers = steps.device, steps.buffers
        self._index: tuple[list[int], Tensor] | None = None
        self.k = len(next(iter(state.values())))
        frozen = [name for name in steps.params if name not in names]
        self.common = {name for name in frozen if torch.equal(state[name], state[name][:1].expand_as(state[name]))}
        self.rest = [name for name in steps.tensors if name not in names]
        task = self.settings.task
        model, objective = steps.model, phase.loss or (_batched_cross_entropy if task.plain else usual)

        settings, device = self.settings, self.device

        def loss(params, rest, start, x, y):
            with settings.autocast(device):
                return objective(Net(model, params, start, rest, task), x, y)

        rest = {name: None if name in self.common else 0 for name in self.rest}
        batched = vmap(grad_and_value(loss), in_dims=(0, rest, 0, 0, 0), randomness="different")
        self.groups = groups = [list(self.names), list(self.rest), list(start)]

        def gradients(x: Tensor, y: Tensor, *tensors: Tensor) -> list[Tensor]:
            each = iter(tensors)
            params, rest, start = ({name: next(each) for name in names} for names in groups)
            with Together():
                grads, losses = batched(params, rest, start, x, y)
            return [losses, *(grads[name] for name in params)]

        self.gradients: Callable[..., Sequence[Tensor]] = gradients
        """(batch, the tensors of `groups`) → the losses [k] and the gradients of what trains."""

    def index(self, rows: list[int]) -> Tensor:
        """The rows on the device, mostly those of the step before: a GPU waits for what comes from here."""
        if self._index is None or self._index[0] != rows:
            self._index = list(rows), torch.tensor(rows, device=self.device)
        return self._index[1]

    def rows_of(self, tensor: Tensor, rows: list[int]) -> Tensor:
        """The tensor itself if all rows are asked for (to be stepped in place), else a copy of some."""
        return tensor if len(rows) == len(tensor) else tensor[self.index(rows)]

    def shuffle(self, data: Sequence[Samples], order: Tensor) -> None:
        """Set out one epoch: the samples of every client in its `order`, int64 [k, longest]; the tail of shorter ones
        is unused."""
        order = order.to(self.device)
        k, longest = order.shape
        x, y = data[0]
        # Kept: new memory costs more than the samples that are copied into it.
        self.xs = self.buffers.of("epoch x", x, k * longest)[: k * longest].unflatten(0, (k, longest))
        self.ys = self.buffers.of("epoch y", y, k * longest)[: k * longest].unflatten(0, (k, longest))
        for row, (x, y) in enumerate(data):
            torch.index_select(x, 0, order[row, : len(y)], out=self.xs[row, : len(y)])
            torch.index_select(y, 0, order[row, : len(y)], out=self.ys[row, : len(y)])

    def batch(self, rows: list[int], begin: int, end: int, augmentations: Sequence[torch.Generator | None]) -> list:
        """The batch [begin, end) of the epoch of some rows, as `gradients` takes it."""
        x, y = self.rows_of(self.xs, rows)[:, begin:end], self.rows_of(self.ys, rows)[:, begin:end]
        if self.settings.augment is not None:
            x = torch.stack([self.settings.augment(b, augmentations[row]) for b, row in zip(x, rows, strict=True)])
        return [x, y]

    def __call__(self, rows: list[int], batch: Sequence[Tensor], lr: float | Tensor, part: Part) -> Tensor:
        """The losses of the rows; they, and what the optimizer keeps of them, move. lr: see `Optimizer.step_`."""
        state = self.state
        params = {name: self.rows_of(state[name], rows) for name in self.names}
        rest = {name: state[name][0] if name in self.common else self.rows_of(state[name], rows) for name in self.rest}
        kept = {key: self.rows_of(tensor, rows) for key, tensor in self.kept.items()}
        start = {name: self.rows_of(tensor, rows) for name, tensor in self.start.items()}
        losses, *grads = self.gradients(*batch, *params.values(), *rest.values(), *start.values())
        self.settings.move_(params, grads, kept, lr, part)
        # Rows that were copied out go back: parameters, what is kept, and the buffers the forward moved.
        if len(rows) < self.k:
            for name, tensor in {**params, **rest}.items():
                if name in params or self.infos[name].buffer:
                    state[name][self.index(rows)] = tensor
            for key, tensor in kept.items():
                self.kept[key][self.index(rows)] = tensor
        return losses


class GatheredStep(Step):
    """A step whose first products read the samples where they are: a batch is x of each client, y of each client and
    the rows of them [k, b] (see `ops.GatheredBatch`)."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        gradients, others = self.gradients, sum(map(len, self.groups))
        self.counted = 1 + others

        def gradients_of_rows(*tensors: Tensor) -> Sequence[Tensor]:
            k = (len(tensors) - others) // 2
            xs, ys, (index, *rest) = tensors[:k], tensors[k : 2 * k], tensors[2 * k :]
            with ops.GatheredBatch(xs, index) as batch:
                return gradients(batch.x, ops.gather_rows(ys, index), *rest)

        self.gradients = gradients_of_rows

    def shuffle(self, data: Sequence[Samples], order: Tensor) -> None:
        self.data, self.order = data, order

    def batch(self, rows: list[int], begin: int, end: int, augmentations: Sequence[torch.Generator | None]) -> list:
        batch = [self.data[row][part] for part in (0, 1) for row in rows]
        return [*batch, self.rows_of(self.order, rows)[:, begin:end]]


class ReplayedStep:
    """A `Step` whose calls with all rows are captured as a CUDA graph, one for each shape of batch and part of a local
    step, and replayed for as long as its state is where it was (see `Steps.places`).

    The first calls run as they are: what they initialise must not be initialised in a capture.
    """

    warm_up = 2

    def __init__(self, step: Step):
        self.step = step
        self.shuffle, self.batch = step.shuffle, step.batch
        self.calls: dict[tuple, int] = {}
        self.captured: dict[tuple, tuple] = {}

    def __call__(self, rows: list[int], batch: Sequence[Tensor], lr: float | Tensor, part: Part) -> Tensor:
        shape = *(tuple(tensor.shape) for tensor in batch), part
        self.calls[shape] = self.calls.get(shape, 0) + 1
        if len(rows) < self.step.k or self.calls[shape] <= self.warm_up:
            return self.step(rows, batch, lr, part)
        # A learning rate that changes is read from a tensor.
        read = [*batch, lr] if isinstance(lr, Tensor) else [*batch]
        if shape not in self.captured:
            places = [tensor.clone() for tensor in read]
            rates = places[-1] if isinstance(lr, Tensor) else lr
            step = functools.partial(self.step, rows, places[: len(batch)], rates, part)
            self.captured[shape] = places, *cuda_graph(step, self.step.device)
        places, replay, losses = self.captured[shape]
        for place, tensor in zip(places, read, strict=True):
            place.copy_(tensor)
        replay()
        return losses


def cuda_graph(step: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """(replay, losses): `step` as a CUDA graph, which leaves its result in `losses` each time; nothing runs yet."""
    with torch.cuda.device(device):
        graph, (pool, stream) = torch.cuda.CUDAGraph(), _capture_on(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            losses = step()
    return graph.replay, losses


@functools.cache
def _capture_on(device: int) -> tuple[tuple[int, int], torch.cuda.Stream]:
    """(pool, stream) of the graphs on a device. They work in the same memory: they run one after the other, and nothing
    is read of one but its losses."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
