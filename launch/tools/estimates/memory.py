"""The vocabulary of memory estimates: bytes by part of a process and by moment of a step.

A moment is what all processes do at one time. Where engines and ranks share a GPU, their needs at the same moment add
up. The estimates count what the code of `workers/` and DeepSpeed 0.19 allocates, and how long they keep it.
GPU figures are arithmetic, compared with torch's count. On CPU, allocator and imports matter too; their constants are
measured, see `tests/bench/memory.py`, which compares the estimates with real processes.
"""

from dataclasses import dataclass, field

from launch.tools.estimates.devices import GIB
from rlsys.config.schema import Config

MIB = 1 << 20
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per number
PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "KV cache", "buckets", "fixed")
MOMENTS = ("load", "generate", "score", "update", "reduce", "step", "sync", "save")

# MiB of a process before it has a model: Python and its imports. Measured with the tiny model; another kernel may map
# more pages of the libraries, and on a CPU with AMX ranks took 64 MiB more.
IMPORT_MIB = {"policy": 450, "critic": 480, "reference": 430, "rollout": 600, "reward": 141, "driver": 450}
COMPILER_MIB = 85  # more where layers are compiled
# Assumed, not measured: a process's CUDA context with the libraries' own buffers, and NCCL's.
CUDA_CONTEXT, NCCL_BUFFERS = 0.7 * GIB, 0.5 * GIB

Parts = dict[str, float]
Moments = dict[str, Parts]


@dataclass(frozen=True)
class SequenceLengths:
    """Tokens of the longest prompt and the longest completion. `SequenceLengths(prompt=256, completion=1024)`"""

    prompt: int
    completion: int  # in training
    evaluated: int = 0  # in an evaluation
    mean_prompt: int = 0  # 0: all are as long as the longest

    @property
    def typical_prompt(self) -> int:
        return self.mean_prompt or self.prompt

    @property
    def longest(self) -> int:
        """The longest sequence of an engine."""
        return self.prompt + max(self.completion, self.evaluated)


@dataclass
class ProcessMemory:
    """What each process of a role needs, in bytes by moment and part. A missing moment needs what "generate" needs."""

    role: str
    count: int
    host: Moments = field(default_factory=dict)
    device: Moments = field(default_factory=dict)  # of one GPU; empty without
    gpus: int = 0

    def peak(self, on_device: bool = False) -> tuple[str, Parts]:
        """Returns the moment with the largest need, and its parts."""
        moments = self.device if on_device else self.host
        return max(moments.items(), key=lambda m: sum(m[1].values()), default=("", {}))


def total_bytes(parts: Parts) -> float:
    return sum(parts.values())


def add_parts(*summands: Parts) -> Parts:
    """Adds needs part by part, and drops parts of size 0."""
    sums: Parts = {}
    for parts in summands:
        for name, size in parts.items():
            sums[name] = sums.get(name, 0.0) + size
    return {name: sums[name] for name in PARTS if sums.get(name)}


def import_mib(c: Config, role: str) -> float:
    """Returns how many MiB a process takes that will hold a model of ours, before it has one."""
    return float(IMPORT_MIB[role] + COMPILER_MIB * c.policy.compile)
