"""What the model is asked: what goes in, what is lost by what comes out, and how well that is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fastfact.data.samples import Entries
from fastfact.federation.state import State

Function = Callable[[Tensor, Tensor], Tensor]
"""(output [n, …], target [n, …]) → a number, of a batch of n samples."""

IGNORED = -100
"""The class that counts nowhere, where targets have several each."""


def _of_classes(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over all targets but `IGNORED`, 0 if there are none; output [n, classes, …], target [n, …]."""
    lost = F.cross_entropy(output, target, reduction="sum", ignore_index=IGNORED)
    return lost / (target != IGNORED).sum().clamp(min=1)


def _next_token(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of the outputs [n, t, vocabulary] at all places but the last, and the tokens [n, t] that
    follow them; those that are `IGNORED` do not count."""
    return _of_classes(output[:, :-1].transpose(1, 2), target[:, 1:])


def _alike(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Output and target in one shape and dtype: numbers [n] may come as [n, 1]."""
    if output.shape[-1:] == (1,) and output.dim() == target.dim() + 1:
        output = output.squeeze(-1)
    if output.shape != target.shape:
        raise ValueError(
            f"outputs are {list(output.shape[1:])} each, targets {list(target.shape[1:])}: must be the same"
        )
    return output, target.to(output.dtype)


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(*_alike(output, target))


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(*_alike(output, target))


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits and targets in 0 … 1, as of several labels a sample."""
    return F.binary_cross_entropy_with_logits(*_alike(output, target))


def top5(output: Tensor, target: Tensor) -> Tensor:
    """The fraction of targets [n] among the five largest of the logits [n, classes]."""
    best = output.topk(min(5, output.shape[1]), dim=1).indices
    return (best == target[:, None]).any(1).double().mean()


LOSSES: Mapping[str, Function] = {"cross_entropy": _of_classes, "mse": mse, "bce": bce, "next_token": _next_token}
ENTROPIES = ("cross_entropy", "bce", "next_token")
LARGEST_LOSS = 1e6
"""Of a cross-entropy: guessing among a million classes costs 14."""
TEST_LOSS = "test_loss"
METRICS: Mapping[str, Function | None] = {TEST_LOSS: None, "mse": mse, "mae": mae, "top5": top5}
"""By name; None: the loss itself."""


def _hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the targets [n, …] are the largest output [n, classes, …], and of how many."""
    counts = target != IGNORED
    return ((output.argmax(1) == target) & counts).sum(), counts.sum()


def _next_hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return _hits(output[:, :-1].transpose(1, 2), target[:, 1:])


def _sides(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """How many logits are on the side of 0 that their targets are of ½."""
    output, target = _alike(output, target)
    return ((output > 0) == (target > 0.5)).sum(), torch.tensor(target.numel(), device=target.device)


@dataclass(frozen=True)
class Task:
    """What a federation asks of its model. As it stands: logits [n, classes] for labels [n], cross-entropy, accuracy.

    loss: the mean over a batch. name: of a loss that has one. plain: as it stands. hits: (how many, of how many)
    targets are met, for the accuracy; None where there is none. metrics: what else is measured, by name. entries: what
    the model takes by name, where a sample is of several (see `fastfact.data.Client`). copies: whether the model writes
    to its input, so that it is given a copy. replaces: the buffers in whose place its forward puts other tensors
    (`self.mean = …`): what comes is written to those that were there, which are a client's.
    """

    loss: Function = F.cross_entropy
    name: str | None = "cross_entropy"
    plain: bool = True
    hits: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = _hits
    entries: Entries | None = None
    metrics: Mapping[str, Function] = field(default_factory=dict)
    copies: bool = False
    replaces: tuple[str, ...] = ()

    def output(
        self, model: nn.Module, x: Any, tensors: State | None = None, options: Mapping[str, Any] | None = None
    ) -> Tensor:
        """What the model makes of a batch, with `tensors` in place of its own of those names. Of what has `logits`, as
        the models of transformers give, these."""
        x = x.clone() if self.copies else x
        inputs, options = (x,), dict(options or {})
        if self.entries is not None:
            inputs, options = (), {**self.entries.unpacked(x), **options}
        if self.replaces:
            out = self._replacing(model, inputs, tensors or {}, options)
        else:
            out = model(*inputs, **options) if tensors is None else functional_call(model, tensors, inputs, options)
        return out if isinstance(out, Tensor) else getattr(out, "logits", out)

    def _replacing(self, model: nn.Module, inputs: tuple, tensors: State, options: dict[str, Any]) -> Any:
        held = {name: tensors[name] if name in tensors else model.get_buffer(name) for name in self.replaces}
        # Copies, which autograd may keep: a buffer that is written to could not be kept.
        given = {**tensors, **{name: buffer.clone() for name, buffer in held.items()}}
        # What the forward puts in the place of a tensor is in `given` afterwards.
        out = functional_call(model, given, inputs, options)
        with torch.no_grad():
            for name, buffer in held.items():
                buffer.copy_(given[name].detach())
        return out

    @property
    def largest_loss(self) -> float:
        """The mean loss of a round above which a client's training has diverged. Of a loss that is no cross-entropy
        there is none: it has the unit of its targets."""
        return LARGEST_LOSS if self.name in ENTROPIES else math.inf

    def labels(self, target: Tensor) -> Tensor:
        """Those of the targets that must be classes of the model, where they are classes."""
        if self.plain:
            return target
        target = target[:, 1:] if self.name == "next_token" else target
        return target[target != IGNORED]

    def total(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a batch, counted once for each sample."""
        if self.plain:
            return F.cross_entropy(output, target, reduction="sum")
        return self.loss(output, target) * len(target)

    def measured(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The metrics of a batch."""
        return {name: torch.as_tensor(metric(output, target)) for name, metric in self.metrics.items()}


CLASSES = Task()


def metrics_of(metrics: Sequence[str] | Mapping[str, Function]) -> dict[str, Function | None]:
    """The functions of metrics that are given by name, or as functions by names of their own."""
    return dict(metrics) if isinstance(metrics, Mapping) else {name: METRICS[name] for name in metrics}


def task_of(
    loss: str | Function,
    metrics: Mapping[str, Function | None],
    output: Tensor,
    target: Tensor,
    entries: Entries | None = None,
) -> Task:
    """The task of a loss and metrics, for a model that gives `output` for samples of `target`.

    Raises ValueError where they do not go together.
    """
    function = LOSSES[loss] if isinstance(loss, str) else loss
    name = loss if isinstance(loss, str) else getattr(loss, "__qualname__", type(loss).__name__)
    integers = not (target.is_floating_point() or target.dtype == torch.bool)
    classes = integers and output.dim() == target.dim() + 1
    classes = classes and (len(output), *output.shape[2:]) == target.shape
    if loss == "cross_entropy" and not classes:
        raise ValueError(
            f"Federation(loss='cross_entropy'): the model gives {list(output.shape)} for targets y {target.dtype}"
            f" {list(target.shape)}, must give logits [n, classes, …] for integer labels [n, …]; other losses are"
            f" {', '.join(LOSSES)}, or a function (output, target) → number"
        )
    plain = loss == "cross_entropy" and target.dim() == 1
    hits = {"bce": _sides, "next_token": _next_hits, "mse": None}.get(str(loss), _hits if classes else None)
    found = {key: function if metric is None else metric for key, metric in metrics.items()}
    task = Task(
        loss=F.cross_entropy if plain else function,
        name=loss if isinstance(loss, str) else None,
        plain=plain,
        hits=hits,
        entries=entries,
        metrics=found,
    )
    for key, what in {f"loss={name!r}": task.loss, **{f"metrics={key!r}": f for key, f in found.items()}}.items():
        try:
            value = torch.as_tensor(what(output, target))
        except Exception as error:
            raise ValueError(
                f"Federation({key}): the model gives {list(output.shape)} for targets y {target.dtype}"
                f" {list(target.shape)}: {error}"
            ) from error
        if value.dim():
            raise ValueError(f"Federation({key}): gives {list(value.shape)} for a batch, must give a number, its mean")
    return task
