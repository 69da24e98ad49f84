"""What `fastfact.bench.clients` measures: the work, and a side that does it in a process of its own.

    python -m fastfact.bench.sides SIDE WORK THREADS

A side is a function (work, gate): it sets up, then does one round of federated averaging over all clients each time
`gate()` gives True, and returns the state dict of its global model when that gives False. Every client starts a round
from the global model and with zero momentum. Requests are lines on stdin, answers lines of JSON on stdout.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fastfact import models
from fastfact import public as ff
from fastfact.federation.client.memory import keep_freed

LR, MOMENTUM = 0.01, 0.9


class Absent(Exception):
    """A side that cannot run here, with the reason."""


@dataclass(frozen=True)
class Workload:
    """`clients` clients of `samples` samples of `shape`, 10 classes; `model` makes the dense network."""

    name: str
    model: Callable[[], nn.Module]
    clients: int
    samples: int
    shape: tuple[int, ...]
    batch: int
    density: float | None = None

    share: float = 1.0
    """The fraction of the clients that takes part in a round."""

    def data(self, client: int) -> tuple[Tensor, Tensor]:
        """Images of a class scatter about one of ten patterns, the same for all clients."""
        patterns = torch.randn(10, *self.shape, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1 + client)
        y = torch.randint(10, (self.samples,), generator=generator)
        return patterns[y] + 2 * torch.randn(self.samples, *self.shape, generator=generator), y

    def initial(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    @torch.no_grad()
    def loss(self, state: dict[str, Tensor]) -> float:
        """The mean cross-entropy of the global model on samples of nobody."""
        model = self.initial()
        model.load_state_dict(state)
        x, y = self.data(-1)
        return F.cross_entropy(model.eval()(x), y).item()


IMAGE = (3, 32, 32)
WORKS = {
    work.name: work
    for work in (
        Workload("resnet9", functools.partial(models.resnet9, 3, 10), 20, 100, IMAGE, 50),
        Workload("resnet9, 10 % of μ", functools.partial(models.resnet9, 3, 10), 20, 100, IMAGE, 50, density=0.1),
        Workload("cnn2", functools.partial(models.cnn2, IMAGE, 10, padding=0), 20, 100, IMAGE, 50),
        Workload("linear", functools.partial(nn.Linear, 3072, 10), 400, 100, (3072,), 50),
    )
}


def find(name: str) -> Workload:
    """The work of a name in `WORKS`, NAME/CLIENTS with that many clients, NAME/quick, or growth/CLIENTS/SHARE."""
    name, _, rest = name.partition("/")
    if name == "growth":
        clients, share = rest.split("/")
        return Workload("growth", functools.partial(nn.Linear, 64, 10), int(clients), 10, (64,), 10, share=float(share))
    work = WORKS[name]
    if rest == "quick":
        return replace(work, name=f"{name}/quick", clients=max(2, work.clients // 10), samples=8, batch=4)
    return replace(work, name=f"{name}/{rest}", clients=int(rest)) if rest else work


def usage() -> tuple[float | None, float]:
    """(peak memory in MiB, seconds of processor time) of this process and its children, the memory of which is as it
    is now, shared pages divided; memory is None where there is no /proc.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None, time.process_time()
    peak, seconds = int(status.split("VmHWM:")[1].split()[0]), time.process_time()
    parents, stats = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            stats[path.parent] = fields
            parents.setdefault(fields[1], []).append(path.parent)
    waiting = list(parents.get(str(os.getpid()), ()))
    while waiting:
        process = waiting.pop()
        waiting += parents.get(process.name, ())
        with contextlib.suppress(OSError, IndexError):
            rollup = (process / "smaps_rollup").read_text()
            peak += int(rollup.split("Pss:")[1].split()[0])
            seconds += sum(map(int, stats[process][11:13])) / os.sysconf("SC_CLK_TCK")
    return peak / 1024, seconds


class Turnstile:
    """Between two rounds of a side: says how long the last one took and waits until the next one is asked for."""

    def __init__(self):
        # What libraries print goes to stderr.
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self.began: tuple[float, float] | None = None

    def say(self, **answer) -> None:
        self.out.write(json.dumps(answer) + "\n")

    def __call__(self) -> bool:
        now = time.perf_counter()
        memory, cpu = usage()
        if self.began is None:
            self.say(ready=True)
        else:
            self.say(seconds=now - self.began[0], cpu=cpu - self.began[1], memory=memory)
        asked = sys.stdin.readline().strip() == "round"
        self.began = time.perf_counter(), cpu
        return asked


class Average:
    """The mean of the state dicts of clients that all have as many samples."""

    def __init__(self, state: dict[str, Tensor]):
        self.sum = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in state.items()}
        self.count = 0

    def add(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self.sum[name] += tensor
        self.count += 1

    def result(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (self.sum[name] / self.count).to(tensor.dtype) for name, tensor in state.items()}


def ours(work: Workload, gate: Turnstile) -> dict[str, Tensor]:
    """`Federation.fit`, whole rounds, with the memory kept as `fastfact run` keeps it; each client has one test sample,
    on which it is evaluated twice a round.
    """
    keep_freed()

    def model() -> nn.Module:
        made = work.initial()
        if work.density is None:
            return made
        made = ff.factorize(made, ff.Rank1())
        for layer in made.modules():
            if isinstance(layer, ff.nn.FactorizedLayer):
                layer.compact(work.density)
        return made

    clients = [ff.Client((x, y), (x[:1], y[:1])) for x, y in map(work.data, range(work.clients))]
    method = "fedavg" if work.density is None else "factorized-fl-alpha"
    fed = ff.Federation(
        model,
        clients,
        method,
        epochs=1,
        batch_size=work.batch,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=0.0,
        participation=work.share,
    )
    while gate():
        fed.fit(1)
    return {} if work.share < 1 or work.density is not None else fed.mixed()[0].state_dict()


def loop(
    work: Workload, gate: Turnstile, memory_format: torch.memory_format = torch.contiguous_format
) -> dict[str, Tensor]:
    """A plain PyTorch loop: one model and optimizer for all clients, batches sliced from a shuffled tensor."""
    model = work.initial().to(memory_format=memory_format)
    clients = [work.data(k) for k in range(work.clients)]
    if len(work.shape) == 3:
        clients = [(x.to(memory_format=memory_format), y) for x, y in clients]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    while gate():
        average = Average(state)
        for x, y in clients:
            model.load_state_dict(state)
            optimizer.state.clear()
            _epoch(work, model, optimizer, x, y)
            average.add(model.state_dict())
        state = average.result(state)
    return state


def _epoch(work: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    model.train()
    for batch in torch.randperm(len(y)).split(work.batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return loss.item()


def loop_channels_last(work: Workload, gate: Turnstile) -> dict[str, Tensor]:
    """The same loop with model and images in channels_last."""
    if len(work.shape) != 3:
        raise Absent("the model has no convolution")
    return loop(work, gate, torch.channels_last)


def vmapped(work: Workload, gate: Turnstile) -> dict[str, Tensor]:
    """All clients at once by torch.func: vmap of the gradient over stacked parameters and batch-norm statistics."""
    model = work.initial().train()
    xs, ys = map(torch.stack, zip(*map(work.data, range(work.clients)), strict=True))

    def objective(params, buffers, x, y):
        return F.cross_entropy(functional_call(model, (params, buffers), (x,)), y)

    gradient = vmap(grad(objective))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    each = torch.arange(work.clients)[:, None]
    while gate():
        stacked = {name: tensor.expand(work.clients, *tensor.shape).clone() for name, tensor in state.items()}
        params = {name: stacked.pop(name) for name in names}
        momenta = [torch.zeros_like(param) for param in params.values()]
        order = torch.stack([torch.randperm(work.samples) for _ in range(work.clients)])
        for batch in order.split(work.batch, dim=1):
            grads = gradient(params, stacked, xs[each, batch], ys[each, batch])
            torch._foreach_mul_(momenta, MOMENTUM)
            torch._foreach_add_(momenta, [grads[name] for name in names])
            torch._foreach_add_(list(params.values()), momenta, alpha=-LR)
        state = {name: tensor.float().mean(0).to(state[name].dtype) for name, tensor in {**params, **stacked}.items()}
    return state


def pfl(work: Workload, gate: Turnstile) -> dict[str, Tensor]:
    """pfl's simulation backend and federated averaging. It averages parameters only: buffers stay the last client's."""
    _installed("pfl")
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    module = work.initial()
    module.loss = lambda x, y: F.cross_entropy(module.train()(x), y)
    module.metrics = lambda x, y: {"samples": Weighted(len(x), len(x))}
    model = PyTorchModel(
        module,
        functools.partial(torch.optim.SGD, momentum=MOMENTUM),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    users = {k: Dataset(work.data(k), user_id=str(k)) for k in range(work.clients)}
    data = FederatedDataset(users.__getitem__, MinimizeReuseUserSampler(list(users)))

    class Stop(TrainingProcessCallback):
        def after_central_iteration(self, metrics, model, central_iteration):
            return not gate(), Metrics()

    if gate():
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=1 << 30,
                evaluation_frequency=1 << 30,
                train_cohort_size=work.clients,
                val_cohort_size=0,
            ),
            SimulatedBackend(data, data),
            model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch),
            NNEvalHyperParams(local_batch_size=None),
            [Stop()],
        )
    return module.state_dict()


@functools.cache
def _flower_client(name: str, threads: int) -> tuple:
    """The model and the data already seen, in a worker process of Flower."""
    torch.set_num_threads(threads)
    work = find(name)
    model = work.initial()
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), functools.cache(work.data)


def flower_fit(name: str, threads: int, state: dict[str, Tensor], client: int) -> tuple[dict[str, Tensor], float]:
    """What a client does with a message: (its model, its last loss)."""
    work, (model, optimizer, data) = find(name), _flower_client(name, threads)
    model.load_state_dict(state)
    optimizer.state.clear()
    return model.state_dict(), _epoch(work, model, optimizer, *data(client))


def flower(work: Workload, gate: Turnstile) -> dict[str, Tensor]:
    """Flower's simulation engine: one worker process with one thread for each of the threads the others have."""
    _installed("flwr", "ray")
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    name, samples, cores = work.name, work.samples, torch.get_num_threads()
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message, context):
        # Imported here: this function is pickled by value, the module's caches live in the worker process.
        from fastfact.bench import sides

        state = message.content["arrays"].to_torch_state_dict()
        state, loss = sides.flower_fit(name, 1, state, int(context.node_config["partition-id"]))
        content = {
            "arrays": ArrayRecord(state),
            "metrics": MetricRecord({"loss": loss, "num-examples": samples}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    class Stop(Exception):
        pass

    class Waiting(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            final.update(arrays.to_torch_state_dict())
            if not gate():
                raise Stop
            return super().configure_train(server_round, arrays, config, grid)

    final: dict[str, Tensor] = {}

    @server_app.main()
    def main(grid, context):
        strategy = Waiting(fraction_evaluate=0.0, min_available_nodes=work.clients, min_train_nodes=work.clients)
        with contextlib.suppress(Stop):
            strategy.start(grid, ArrayRecord(work.initial().state_dict()), num_rounds=1 << 30)

    config = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server_app, client_app, work.clients, backend_config=config)
    return final


def _installed(*packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise Absent(f"{error}; pip install 'fastfact[bench]'") from None


SIDES = {
    "ours": ours,
    "loop": loop,
    "loop, channels_last": loop_channels_last,
    "vmap": vmapped,
    "pfl": pfl,
    "flower": flower,
}
PACKAGES = {"pfl": "pfl", "flower": "flwr"}


def version(side: str) -> str | None:
    """The version of the package a side is measured with, where that is not PyTorch."""
    with contextlib.suppress(KeyError, metadata.PackageNotFoundError):
        return metadata.version(PACKAGES[side])
    return None


def main() -> None:
    side, name, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    work, gate = find(name), Turnstile()
    try:
        state = SIDES[side](work, gate)
        gate.say(loss=work.loss(state) if state else None)
    except Absent as reason:
        gate.say(reason=str(reason))
    except Exception as error:
        gate.say(reason=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main()
