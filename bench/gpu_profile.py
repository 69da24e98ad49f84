"""Where the time of a training step of many clients goes on a GPU, by kernel.

    python -m bench.gpu_profile [--clients 100] [--dtype bfloat16] [--dry-run]

--dry-run takes a tiny network and any device, to see that every line runs.
"""

import argparse
from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from bench import gpu
from fastfact.federation.state import stack
from fastfact.federation.tensors import tensors_of

KERNELS = 45
"""At most so many lines, the longest first."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(arguments)
    bench, dtype = gpu.Bench(args.dry_run), getattr(torch, args.dtype)
    clients, batch = bench.pick((args.clients, 32), (2, 2))
    steps, data = gpu.images_of_clients(bench, dtype, clients, batch)
    trainer = gpu.trainer(bench, "fused", dtype, graphs=False)
    state = stack(tensors_of(trainer.model), clients)
    gpu.run_together(trainer, state, data, 1)
    where = ProfilerActivity.CUDA if bench.cuda else ProfilerActivity.CPU
    with profile(activities=[where]) as found:
        gpu.run_together(trainer, state, data, 1)
        bench.synchronize()
    took = {row: row.self_device_time_total if bench.cuda else row.self_cpu_time_total for row in found.key_averages()}
    print(f"{sum(took.values()) / 1e3 / steps:.2f} ms a step, {clients} clients of {batch} images, {args.dtype}")
    for row in sorted(took, key=took.__getitem__, reverse=True)[:KERNELS]:
        print(f"{took[row] / 1e3 / steps:8.3f} ms {row.count / steps:6.1f} × {row.key[:150]}")


if __name__ == "__main__":
    main()
