"""Batch-norm statistics of a model as it stands."""

from typing import Any

import torch
from torch import Tensor, nn

BATCH = 1024


def recalibrate(net: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Mean and unbiased variance of what each batch-norm layer gets to see of x [n, …] in training: a `Phase.update`.

    In batches of at most 1,024 samples, averaged by their sizes; a batch is normalised by itself.
    Why: running statistics are an average over the last 1 / momentum steps. A client that downloads other weights and
    trains them for 10 steps at momentum 0.1 still has .9¹⁰ = 35 % of the statistics of the weights it had before.
    """
    sums: dict[str, Tensor] = {}
    handles = []
    for path, module in net.model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:

            def see(module, inputs, path=path):
                (seen,) = inputs
                axes = [axis for axis in range(seen.dim()) if axis != 1]
                several = seen.numel() > seen.shape[1]
                variance, mean = torch.var_mean(seen, axes, correction=int(several))
                for name, value in (("running_mean", mean), ("running_var", variance)):
                    key = f"{path}.{name}" if path else name
                    sums[key] = sums.get(key, 0) + value * len(seen)

            handles.append(module.register_forward_pre_hook(see))
    try:
        for some in x.split(BATCH):
            net(some)
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / len(x) for name, total in sums.items()}
