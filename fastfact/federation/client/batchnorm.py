"""What the normalisation layers of a model as it stands get to see."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fastfact.federation.client.data import batches
from fastfact.federation.tensors import NORMS

BATCH = 1024


@contextlib.contextmanager
def _seen_by(model: nn.Module, kinds: type | tuple[type, ...], see: Callable) -> Iterator[None]:
    """Call see(path, module, inputs) before each module of these kinds."""
    modules = [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]
    handles = [module.register_forward_pre_hook(functools.partial(see, path)) for path, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def recalibrate(net: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance of what each batch-norm layer gets to see of x [n, …] in training: a `Phase.update`.

    In batches of 1,024 samples; a batch is normalised by itself. Where a layer gets to see several, of samples or of
    the calls of one forward, they are averaged by their rows: more than the samples where time steps are among them.
    Why: running statistics are an average over the last 1 / momentum steps. A client that downloads other weights and
    trains them for 10 steps at momentum 0.1 still has .9¹⁰ = 35 % of the statistics of the weights it had before.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, int] = {}

    def see(path: str, module: nn.Module, inputs: tuple[Tensor]) -> None:
        if not module.track_running_stats:
            return
        (seen,) = inputs
        axes = [axis for axis in range(seen.dim()) if axis != 1]
        several = seen.numel() > seen.shape[1]
        variance, mean = torch.var_mean(seen, axes, correction=int(several))
        for name, value in (("running_mean", mean), ("running_var", variance)):
            key = f"{path}.{name}" if path else name
            sums[key] = sums.get(key, 0) + value * len(seen)
            rows[key] = rows.get(key, 0) + len(seen)

    with _seen_by(net.model, nn.modules.batchnorm._BatchNorm, see):
        for begin, end in batches(len(x), BATCH):
            net(x[begin:end])
    return {name: total / rows[name] for name, total in sums.items()}


def moments(net: Any, x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel that the normalisation layers get to see of x [n, …], over samples
    and places, layer after layer: float32 [2, channels of all of them], none for a model without such a layer.

    Of the layers of torch.nn: those that are written by hand need not have channels. Batch- and instance-norm normalise
    by what they see, as in training, in batches of 1,024 samples; all else is in eval mode. Channels are the axis after
    the samples, of layer- and RMS-norm the first that they normalise.
    """
    found: dict[str, tuple[int, Tensor]] = {}

    def see(path: str, module: nn.Module, inputs: tuple[Tensor]) -> None:
        seen, shape = inputs[0], getattr(module, "normalized_shape", None)
        channels = 1 if shape is None else seen.dim() - len(shape)
        axes = [axis for axis in range(seen.dim()) if axis != channels]
        variance, mean = torch.var_mean(seen.float(), axes, correction=0)
        mean, n = mean.double(), seen.numel() // seen.shape[channels]
        # Those of several batches add up.
        sums = torch.stack([mean, variance + mean.square()]) * n
        number, total = found.get(path, (0, torch.zeros_like(sums)))
        found[path] = number + n, total + sums

    for module in net.model.modules():
        module.training = isinstance(module, nn.modules.batchnorm._NormBase)
    try:
        with _seen_by(net.model, NORMS, see):
            for begin, end in batches(len(x), BATCH):
                net(x[begin:end])
    finally:
        net.model.eval()
    if not found:
        return torch.zeros(2, 0, device=x.device)
    mean, square = torch.cat([total / number for number, total in found.values()], dim=1)
    return torch.stack([mean, (square - mean.square()).clamp(min=0).sqrt()]).float()
