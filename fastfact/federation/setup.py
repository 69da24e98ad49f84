"""What a federation checks before its first round: that the model, the method and the clients' data fit together."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastfact.federation.client.compact import mu_layers
from fastfact.federation.client.dropout import Streams
from fastfact.federation.client.placement import Placement, channels_last
from fastfact.federation.client.task import CLASSES, Task, metrics_of, task_of
from fastfact.federation.server import privacy
from fastfact.federation.server.exchange import Exchange, is_relative
from fastfact.federation.server.strategy import Strategy
from fastfact.federation.state import State, seed_for, seeded
from fastfact.federation.tensors import TensorInfo, copy_of, tensors_of
from fastfact.nn.schedule import Schedule

log = logging.getLogger("fastfact")


def template_of(factory: Callable[[], nn.Module], method: Strategy, seed: int, device) -> nn.Module:
    """The model every client starts from, as the method wants it. Raises ValueError for a factory that makes none."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ValueError(
            f"Federation(model={type(factory).__name__}): must be a function () → nn.Module"
            + (", for example lambda: copy.deepcopy(model)" if isinstance(factory, nn.Module) else "")
        )
    with seeded(seed, 0, 0, "model"):
        torch.manual_seed(seed_for(seed, 0, 0, "model"))
        template = factory()
        if not isinstance(template, nn.Module):
            raise ValueError(f"Federation(model=): returned {type(template).__name__}, must return an nn.Module")
        if isinstance(template, torch.jit.ScriptModule):
            raise ValueError("Federation(model=): returned a scripted model, must return what was scripted")
        try:
            copy_of(template)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                "Federation(model=): the model cannot be copied; what torch.nn.utils.prune or the older weight_norm"
                f" made must be removed first: {error}"
            ) from error
        template = method.prepare(template)
    if device is not None:
        template = template.to(_device_of(device))
    if not any(p.requires_grad for p in template.parameters()):
        raise ValueError("Federation(model=): the model has no parameter that can train")
    if names := [name for name, param in template.named_parameters() if param.is_complex()]:
        raise ValueError(f"Federation(model=): {names[0]} is complex, parameters must be real numbers")
    return template


def _device_of(device: str | torch.device) -> torch.device:
    """Raises ValueError for a device that does not exist, or not here."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: must be cpu, cuda or cuda:1 ({error})") from error
    if found.type == "meta":
        raise ValueError(f"device={str(device)!r}: holds no numbers, must be cpu, cuda or cuda:1")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return found


def channels_last_of(template: nn.Module, data: Placement) -> nn.Module | None:
    """The model in channels_last, if it has images on the CPU to convolve and runs that way (one that flattens with
    `view` does not): one client at a time, convolutions are faster in it."""
    x = data[data.first].train[0][:2]
    if x.device.type != "cpu" or x.dim() != 4 or not any(p.dim() == 4 for p in template.parameters()):
        return None
    model = copy.deepcopy(template).to(memory_format=torch.channels_last)
    try:
        output_of(CLASSES, model, channels_last(x.clone()))
    except RuntimeError:
        log.info("the model does not run in channels_last")
        return None
    return model


def task_for(template: nn.Module, data: Placement, settings: Mapping[str, Any]) -> tuple[Task, int | None]:
    """Run the model on a sample: it must take the clients' x and give what the loss wants for their y. Returns the task
    of a federation of these settings, and the number of classes, None where y are no classes."""
    (x, y), batch_size = (part[:2] for part in data[data.first].train), settings["batch_size"]
    plain, given = Task(entries=data.entries), x.clone()
    unwritten = given._version
    try:
        output = output_of(plain, template, given)
    except Exception as error:
        samples = f"{x.dtype} {list(x.shape[1:])}" if data.entries is None else f"of {data.entries}"
        raise ValueError(f"Federation(model=): does not take samples {samples}: {error}") from error
    if not isinstance(output, Tensor) or not output.dim() or len(output) != len(x):
        got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"Federation(model=): gives {got} for {len(x)} samples, must give outputs [n, …]")
    task = task_of(settings["loss"], metrics_of(settings["metrics"]), output, y, data.entries)
    task = replace(task, copies=given._version > unwritten)
    alone = [k for k, client in data.placed.items() if batch_size == 1 or len(client.train[1]) == 1]
    if alone:
        try:
            output_of(plain, template, data[alone[0]].train[0][:1].clone(), train=True)
        except ValueError as error:
            one = f"batch_size={batch_size}" if batch_size == 1 else f"client {alone[0]} has a single training sample"
            raise ValueError(f"Federation: {one}, and the model cannot train on one sample: {error}") from error
    elif data.lazy:
        try:
            output_of(plain, template, x[:1].clone(), train=True)
        except ValueError as error:
            data.alone = error
    classes = {"cross_entropy": 1, "next_token": -1}.get(str(task.name))
    return task, None if classes is None else output.shape[classes]


def check_task(task: Task, method: Strategy) -> None:
    """Raise ValueError for a method whose own loss is one of class labels, where there are none."""
    if method.classifies and not task.plain:
        raise ValueError(
            f"Federation(method={method.name!r}): its loss is a cross-entropy of one label a sample and takes no other;"
            " loss must be cross_entropy, and y integer labels [n]"
        )


def output_of(task: Task, model: nn.Module, x: Tensor, train: bool = False) -> Tensor:
    """What a copy of `model` makes of x, which it may write to; neither the model nor the global generator notices."""
    with torch.no_grad(), seeded(0, 0, 0, "probe", x.device):
        return task.output(copy.deepcopy(model).train(train), x)


def tried(template: nn.Module, data: Placement, task: Task) -> tuple[str, Task]:
    """What a training forward does besides: where it draws random numbers from, see `step.Settings.draws`, and the task
    with the buffers that it replaces.

    Raises ValueError for a buffer that another shape or dtype takes the place of, and for outputs that the loss cannot
    take.
    """
    x, model = data[data.first].train[0][:2].clone(), copy.deepcopy(template).train()
    if len(x) < 2:
        x = x.repeat_interleave(2, 0)
    before = dict(model.named_buffers())
    with torch.no_grad(), seeded(0, 0, 0, "probe", x.device), Streams([torch.Generator()]) as streams:
        drawn = torch.get_rng_state()
        output = Task(entries=data.entries).output(model, x)
        globally = not torch.equal(drawn, torch.get_rng_state())
    if task.name is not None and not isinstance(output, Tensor):
        raise ValueError(
            f"Federation(model=): gives {type(output).__name__} in training, must give outputs [n, …], or loss be a"
            " function that takes that"
        )
    replaced, own = set(), tensors_of(model)
    for name, new in model.named_buffers():
        old = before.get(name)
        if new is old or name not in own:
            continue
        if old is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            there = "which is None before" if old is None else f"which is {old.dtype} {list(old.shape)}"
            raise ValueError(
                f"Federation(model=): its forward puts {new.dtype} {list(new.shape)} in the place of buffer {name},"
                f" {there}: must be of one shape and dtype from the start, or registered with persistent=False"
            )
        replaced.add(_kind(model, name))
    # Of modules that this forward has not run, too: a method may have several models in one.
    replaces = tuple(name for name in before if name in own and _kind(model, name) in replaced)
    draws = "globally" if x.device.type != "cpu" or globally else "own" if streams.used else "no"
    return draws, replace(task, replaces=replaces)


def _kind(model: nn.Module, name: str) -> tuple[type, str]:
    """What the forward of its module does with a buffer: the same for all modules of a type."""
    path, _, role = name.rpartition(".")
    return type(model.get_submodule(path)), role


def check_phases(method: Strategy, infos: Mapping[str, TensorInfo], epochs: int) -> None:
    """Raise ValueError for a phase with epochs in which nothing of the model would train."""
    params = [info for info in infos.values() if not info.buffer]
    for adapts, what in ((False, "local training"), (True, "adapting before an evaluation")):
        phases = method.active_phases(epochs, adapts)
        for number, phase in enumerate(phases, 1):
            if not phase.epochs or phase.steps == 0 or any(map(phase.trains, params)):
                continue
            head = " (head_first)" if method.head_first and number == 1 and not adapts else ""
            names = [info.name for info in params[:3]] + ["…"] * (len(params) > 3)
            raise ValueError(
                f"Federation(method={method.name!r}): nothing trains in phase {number} of {len(phases)}{head} of its"
                f" {what}; what can train of this model, frozen parameters left out, is {', '.join(names)}"
            )


def check_sparsity(schedule: Schedule, method: Strategy, model: nn.Module, initial: State) -> None:
    """Raise ValueError for a schedule that this model or method cannot follow."""
    layers = mu_layers(model)
    if schedule.warmup < 1:
        raise ValueError("Federation(sparsity=): needs a warmup of at least 1, μ starts at zero")
    if not layers:
        raise ValueError(
            f"Federation(sparsity=): no layer of the model has a μ that trains; {method.name} does not make any"
        )
    if any(layer.is_compact for layer in layers.values()):
        raise ValueError("Federation(sparsity=): the model is compact already, must start with a dense μ")
    if not method.trains_compact:
        raise ValueError(f"Federation(sparsity=): {method.name} mixes tensors of one client, which need the same μ")
    if extra := sorted(method.extra(initial)):
        raise ValueError(
            f"Federation(sparsity=): {method.name} keeps tensors of its own ({extra[0]}), which may follow a dense μ"
        )


def check_noise(exchange: Exchange, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where noise on the mean of the updates would not make private what clients download."""
    method = exchange.method

    def require(holds: bool, why: str) -> None:
        if not holds:
            raise ValueError(f"Federation(noise={exchange.noise:g}): {why}")

    clip = exchange.clip
    require(clip is not None, "needs clip, a number: the noise is in units of it")
    fixed = not (isinstance(clip, str) and clip.endswith("x"))
    require(fixed, f"clip={clip!r} depends on all updates of the round, must be a number")
    rule = f"rule={exchange.rule!r} takes no mean, how far one client can move it is not bounded; must be mean"
    require(exchange.rule == "mean", rule)
    limit = settings["max_norm"]
    require(limit is None or not is_relative(limit), f"max_norm={limit!r} depends on all updates, must be a number")
    require(bool(exchange.shared), f"{method.name} shares nothing")
    keys = f", and by keys ({', '.join(exchange.keys)})" if exchange.keys else ""
    how = f"{method.name} mixes each client's download by what the others uploaded{keys}: noise on it hides neither"
    require(method.constant_mixing, how)
    whole = type(method).channel_masks is Strategy.channel_masks and type(method).receive is Strategy.receive
    require(whole, f"{method.name} keeps parts of shared tensors personal, which are not clipped")
    for name in exchange.shared:
        info = exchange.infos[name]
        statistic = "share_norm_statistics must be False: noise would make variances negative, and counts are exact"
        require(not info.statistic, f"{name} is a running statistic; {statistic}")
        require(info.dtype.is_floating_point, f"{name} is {info.dtype}, must be of a floating-point type")
    mu = [name for name in exchange.sparse if name in exchange.shared]
    require(not (mu and settings["sparsity"]), f"{', '.join(mu[:1])} is pruned by each client, must not be shared")
    privacy.accountant()


def check_buffer(exchange: Exchange, settings: Mapping[str, Any], clients: int, at_work: int) -> None:
    """Raise ValueError for asynchronous rounds that cannot be."""
    method, buffer = exchange.method, settings["buffer"]
    if not buffer:
        return

    def require(holds: bool, why: str) -> None:
        if not holds:
            raise ValueError(f"Federation(buffer={buffer}): {why}")

    require(bool(exchange.shared), f"{method.name} shares nothing that could arrive")
    require(not method.clients_mix, f"{method.name} mixes at its clients, which may be at work")
    require(not exchange.stacks, f"{method.name} sends what each round adds, which clients at work would miss")
    require(not exchange.noise, "who reports when tells of the clients' speeds, noise must be 0")
    most = clients + 1 - buffer
    require(
        1 <= at_work <= most,
        f"participation={settings['participation']:g} has {at_work} of {clients} clients at work, and {buffer - 1} more"
        f" begin before a round ends; at most {max(most, 0)} may be at work",
    )


def check_rule(exchange: Exchange, clients: int) -> None:
    """Raise ValueError for a robust rule or a clipping that makes no sense for the method or so few clients."""
    method, rule, hostile = exchange.method, exchange.rule, exchange.hostile
    for name, value, plain in (("rule", rule, "mean"), ("clip", exchange.clip, None)):
        if value != plain and not exchange.shared:
            raise ValueError(f"Federation({name}={value!r}): {method.name} shares nothing that could be mixed")
        if value != plain and method.clients_mix:
            raise ValueError(
                f"Federation({name}={value!r}): {method.name} mixes at its clients, which download others' models as"
                " they are"
            )
    if rule != "mean" and exchange.stacks:
        raise ValueError(f"Federation(rule={rule!r}): {method.name} stacks what its clients upload, and takes no mean")
    least = 2 * int(hostile * clients) + 3
    if rule == "multi-krum" and clients < least:
        raise ValueError(
            f"Federation(rule='multi-krum', hostile={hostile:g}): {clients} clients a round, must be at least {least}"
        )
