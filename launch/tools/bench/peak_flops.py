"""What the machine could do at most, against which a bench's floating-point work is held."""

import os
import time

from launch.bundles import critic_ranks, reference_gpus
from rlsys.config.schema import Config
from rlsys.estimates.devices import peak_flops


def measure_cpu_peak(config: Config) -> float:
    """FLOP/s of a large matrix product, on as many threads as engines and ranks have together, at most the machine's cores.

    The workers are gone by now: it has the machine to itself, as far as the loop had it.
    """
    import torch

    rollout, policy = config.rollout, config.policy
    threads = min(rollout.engines * rollout.threads + policy.ranks * policy.threads, len(os.sched_getaffinity(0)))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.randn(2048, 2048, dtype=getattr(torch, config.policy.dtype))
        found = []
        for _ in range(6):
            began = time.perf_counter()
            a @ a
            found.append(2 * 2048**3 / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(before)
    return max(found)


def gpu_name() -> str:
    """What Ray calls the cluster's GPUs, such as H100; empty if it does not know, or they are of several kinds."""
    import ray

    kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
    return kinds[0] if len(kinds) == 1 else ""


def gpu_peak(config: Config, name: str) -> float | None:
    r, p = config.rollout, config.policy
    one = peak_flops(name, p.dtype)
    found = float(r.engines * r.tensor_parallel)
    if config.cluster.placement == "separate":  # else the others share the engines' GPUs
        found += p.ranks + critic_ranks(config) + reference_gpus(config)
    return one and one * found
