"""Environment variables that Ray sets for ranks and engines on GPUs before their processes start.

An engine opens the memory of the rank on its GPU by CUDA IPC. Memory in torch's expandable segments cannot be
opened that way, and sleeping engines cannot use them either. Ranks with GPUs of their own use them, because packs
differ in size.
"""

from rlsys.checks.machines import ALLOCATOR_VARIABLES
from rlsys.config.schema import Config


def rank_environment(c: Config) -> dict[str, str]:
    """Returns environment variables of the ranks of policy, critic and reference."""
    if c.cluster.device == "cpu":
        return {"OMP_NUM_THREADS": str(c.policy.threads)} | c.cluster.env
    return {"DS_ACCELERATOR": "cuda"} | allocator(c.cluster.placement == "separate") | c.cluster.env


def shared_gpu_environment(c: Config) -> dict[str, str]:
    """Returns environment variables of an engine, besides what vLLM needs."""
    colocated = c.cluster.device == "gpu" and c.cluster.placement == "colocated"
    return (allocator(expandable=False) if colocated else {}) | c.cluster.env


def allocator(expandable: bool) -> dict[str, str]:
    return dict.fromkeys(ALLOCATOR_VARIABLES, f"expandable_segments:{expandable}")
