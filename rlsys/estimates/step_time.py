"""Estimated seconds of a step's phases: work over what devices do of it, bytes over how fast memory is. Estimates, not measurements.

The shares of a device's peak that are put to use, and the speeds of links, are stated here and assumed everywhere.
"""

from dataclasses import dataclass

from rlsys.config.derived import scores_old
from rlsys.config.schema import Config
from rlsys.estimates.devices import Gpu
from rlsys.estimates.memory import WIDTH, SequenceLengths, kv_cache_tokens
from rlsys.models.shapes import ModelShape

# Shares of the peak that a device's makers name.
TRAINING_SHARE, SCORING_SHARE, PREFILL_SHARE = 0.35, 0.4, 0.5  # READING: prompts
BANDWIDTH_SHARE = 0.7  # of its memory, while tokens are drawn
LAUNCHES_S = 3e-4  # a layer's kernels, started one by one; with CUDA graphs next to nothing
# A core of a CPU, and what a process on it reads of memory.
CORE_FLOPS, CORE_BANDWIDTH = 40e9, 6e9
CORE_STEP_S = 3e-4  # what an engine does beside the model's work, per layer and token
LINKS = {
    "cuda_ipc": 500e9,
    "nccl": 20e9,
    "shared_memory": 2e9,
    "object_store": 0.5e9,
}  # bytes/s of a sync
OFFLOAD = 5e9  # bytes/s of an optimizer that steps in main memory
MAX_OVER_MEAN_LENGTH = 3.0  # the longest completion of a step, over the mean, unless it is cut before
MEAN_OVER_MAX_LENGTH = 0.5  # of the longest completion, where nothing is said of lengths


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, by phase; `rollout` overlaps the others with pipeline.max_lag."""

    phases: dict[str, float]
    overlapped: bool

    @property
    def step(self) -> float:
        alone = sum(s for name, s in self.phases.items() if name != "rollout")
        rollout = self.phases["rollout"]
        return max(rollout, alone) if self.overlapped else rollout + alone


@dataclass(frozen=True)
class DeviceSpeed:
    """Of what one engine, or one rank, computes on."""

    flops: float
    bandwidth: float


def estimate_step(
    c: Config, model: ModelShape, lengths: SequenceLengths, gpu: Gpu | None, mean_completion: float
) -> StepTimes:
    """`new`: tokens of a completion on average."""
    t, work = c.trainer, model.flop_counter
    each = (
        work.group_flops(lengths.prompt, [max(round(mean_completion), 1)] * t.samples_per_prompt) * t.prompts_per_step
    )
    updated = each * t.epochs_per_step * (4 if c.policy.gradient_checkpointing else 3)
    ranks = c.policy.ranks
    rank = _speed(gpu, c.policy.dtype, c.policy.threads)
    share = (SCORING_SHARE, TRAINING_SHARE) if gpu else (1.0, 1.0)
    phases = {"rollout": _rollout(c, model, lengths, gpu, mean_completion)}
    phases["score"] = each / (ranks * rank.flops * share[0]) if scores_old(c) else 0.0
    if c.reference.kl_coef > 0:
        on_gpu = gpu if c.reference.gpus else None
        one = _speed(on_gpu, c.policy.dtype, c.policy.threads)
        phases["reference"] = each / (one.flops * (SCORING_SHARE if on_gpu else 1.0))
    phases["update"] = updated / (ranks * rank.flops * share[1]) + _stepping(c, model, rank)
    if c.algorithm.advantage == "gae":
        phases["critic"] = (each + updated) / (c.critic.ranks * rank.flops * share[1])
    phases["sync"] = WIDTH[c.rollout.dtype] * model.parameters / LINKS[resolve_transport(c)]
    return StepTimes(phases, c.pipeline.max_lag > 0)


def resolve_transport(c: Config) -> str:
    """That `auto` stands for, on one host where it is CPUs."""
    if c.sync.transport != "auto":
        return c.sync.transport
    if c.cluster.device == "cpu":
        return "shared_memory"
    return "cuda_ipc" if c.cluster.placement == "colocated" else "nccl"


def _speed(gpu: Gpu | None, dtype: str, threads: int) -> DeviceSpeed:
    if gpu is None:
        return DeviceSpeed(CORE_FLOPS * threads, CORE_BANDWIDTH * threads)
    return DeviceSpeed(gpu.peak_flops(dtype), gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE)


def _stepping(c: Config, model: ModelShape, rank: DeviceSpeed) -> float:
    """Adam reads and writes its state; gradients and weights go around between ranks."""
    p, updates = c.policy, c.trainer.updates_per_step * c.trainer.epochs_per_step
    own = model.parameters / (p.ranks if p.zero_stage else 1)
    adam = 28 * own / (OFFLOAD if p.offload_optimizer else rank.bandwidth)
    around = 2 * WIDTH[p.dtype] * model.parameters * (p.ranks > 1) * (1.5 if p.zero_stage == 3 else 1)
    speed = 100e9 if c.cluster.device == "gpu" else 2e9
    shifted = 2 * WIDTH[p.dtype] * model.parameters * p.offload_params
    return updates * (adam + around / speed + shifted / 10e9)


def _rollout(c: Config, model: ModelShape, lengths: SequenceLengths, gpu: Gpu | None, new: float) -> float:
    """Prompts are read; then each of an engine's steps reads its weights and all keys and values, and computes a token of each."""
    r, t = c.rollout, c.trainer
    wide = r.tensor_parallel
    speed = _speed(gpu, r.dtype, r.threads)
    width = WIDTH[r.dtype]
    samples = -(-t.prompts_per_step // r.engines) * t.samples_per_prompt
    room = kv_cache_tokens(c, model, gpu.memory_gib * (1 << 30) if gpu else 0.0)
    length = lengths.prompt + new / 2
    at_once = max(1.0, min(r.max_sequences, samples, room / max(length, 1)))
    steps = max(min(lengths.completion, MAX_OVER_MEAN_LENGTH * new), samples * new / at_once)
    bytes_read = (width * model.active_parameters + at_once * length * model.kv_bytes_per_token(width)) / wide
    computed = at_once * 2.0 * model.active_parameters / wide
    launches = (LAUNCHES_S * r.enforce_eager if gpu else CORE_STEP_S) * model.layers
    step = max(bytes_read / speed.bandwidth, computed / (speed.flops * (PREFILL_SHARE if gpu else 1.0)), launches)
    prompts = -(-t.prompts_per_step // r.engines) * model.flop_counter.forward_flops(0, lengths.prompt, 1) / wide
    return steps * step + prompts / (speed.flops * (PREFILL_SHARE if gpu else 1.0))
