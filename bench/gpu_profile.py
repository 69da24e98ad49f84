"""Where the time of a training step of many clients goes on a GPU, by kernel.

python -m bench.gpu_profile [--clients 100] [--dtype bfloat16]
"""

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from bench import gpu
from fastfact.federation.state import stack
from fastfact.federation.tensors import tensors_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    bench, dtype = gpu.Bench(dry=False), getattr(torch, args.dtype)
    steps, data = gpu.images_of_clients(bench, dtype, args.clients, 32)
    one = gpu.trainer(bench, "fused", dtype, graphs=False)
    state = stack(tensors_of(one.model), args.clients)
    gpu.run_together(one, state, data, 1)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        gpu.run_together(one, state, data, 1)
        torch.cuda.synchronize()
    rows = [row for row in found.key_averages() if row.device_type.name == "CUDA"]
    rows.sort(key=lambda row: -row.self_device_time_total)
    whole = sum(row.self_device_time_total for row in rows)
    print(f"{whole / 1e3 / steps:.2f} ms a step")
    for row in rows[:45]:
        print(f"{row.self_device_time_total / 1e3 / steps:8.3f} ms {row.count / steps:6.1f} × {row.key[:150]}")


if __name__ == "__main__":
    main()
