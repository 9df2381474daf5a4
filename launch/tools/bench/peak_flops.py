"""The peak FLOP/s of the machine. A bench compares its own floating-point work with it."""

import os
import time

from launch.roles import ROLES, count_gpus
from launch.tools.estimates.devices import peak_flops
from rlsys.config.schema import Config


def measure_cpu_peak(config: Config) -> float:
    """FLOP/s of a large matrix product, on the threads of all engines and ranks, at most the machine's cores.

    It runs after the workers have ended, so it has the machine to itself.
    """
    import torch

    rollout, policy = config.rollout, config.policy
    threads = min(rollout.engines * rollout.threads + policy.ranks * policy.threads, len(os.sched_getaffinity(0)))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.randn(2048, 2048, dtype=getattr(torch, config.policy.dtype))
        rates = []
        for _ in range(6):
            began = time.perf_counter()
            a @ a
            rates.append(2 * 2048**3 / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(threads_before)
    return max(rates)


def gpu_name() -> str:
    """Ray's name of the cluster's GPUs, such as H100; empty if it has none, or if there are several kinds."""
    import ray

    kinds = [name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")]
    return kinds[0] if len(kinds) == 1 else ""


def gpu_peak(config: Config, name: str) -> float | None:
    """FLOP/s of all GPUs of the run together; None for an unknown kind."""
    one_gpu, gpus = peak_flops(name, config.policy.dtype), count_gpus("rollout", config)
    if config.cluster.placement == "separate":  # colocated learners share the engines' GPUs
        gpus += sum(count_gpus(role, config) for role in ROLES if ROLES[role].learner)
    return one_gpu and one_gpu * gpus
