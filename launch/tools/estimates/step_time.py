"""Estimates the seconds of a step's phases: work over what devices compute, bytes over what memory transfers.

Estimates, not measurements. This file states which shares of a device's peak and which speeds of links are assumed.
"""

from dataclasses import dataclass

from launch.tools.estimates.activations import offloads_activations
from launch.tools.estimates.adapters import sync_bytes, sync_tensors, trained_parameters
from launch.tools.estimates.cache import sequence_bytes
from launch.tools.estimates.devices import GIB, Gpu
from launch.tools.estimates.engine import kv_cache_bytes, most_sequences
from launch.tools.estimates.memory import WIDTH, SequenceLengths
from rlsys.config.derived import is_supervised, policy_is_reference, runs_eagerly, scores_old
from rlsys.config.schema import Config
from rlsys.config.transports import TRANSPORTS
from rlsys.models.cache_blocks import cache_parts
from rlsys.models.shapes import ModelShape

# Shares of the peak FLOP/s and of the bandwidth that a GPU's maker states.
TRAINING_SHARE, SCORING_SHARE, PREFILL_SHARE = 0.35, 0.4, 0.5
BANDWIDTH_SHARE = 0.7  # while tokens are drawn
LAUNCH_S = 3e-4  # a layer's kernels, launched one by one; almost nothing with CUDA graphs
# Of a usual host with a GPU. The device computes at the same time: whichever takes longer counts.
HOST_STEP_S = 2.5e-3  # an engine's step: vLLM prepares the batch
HOST_TOKEN_S = 9e-6  # and for each of its sequences: the scheduler plans a token and reads it
SYNC_S, SYNC_TENSOR_S = 0.15, 2e-4  # calls between driver, ranks and engines; finding, opening and copying a tensor
CORE_FLOPS, CORE_BANDWIDTH = 40e9, 6e9  # per CPU core
CORE_STEP_S = 3e-4  # an engine's overhead per layer and token on CPU
RANK_LINKS = {"gpu": 100e9, "cpu": 2e9}  # bytes/s between ranks
HOST_LINK = 10e9  # bytes/s between a GPU and main memory
OFFLOAD = 5e9  # bytes/s of an optimizer that steps in main memory
MAX_OVER_MEAN_LENGTH = 3.0  # longest completion of a step over the mean, unless it is truncated earlier
MEAN_OVER_MAX_LENGTH = 0.5  # mean completion over the maximum, if nothing is known of lengths


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, by phase; with pipeline.max_lag, `rollout` overlaps the others."""

    phases: dict[str, float]
    overlapped: bool

    @property
    def step(self) -> float:
        rollout = self.phases["rollout"]
        others = sum(seconds for name, seconds in self.phases.items() if name != "rollout")
        return max(rollout, others) if self.overlapped else rollout + others


@dataclass(frozen=True)
class DeviceSpeed:
    """The speed of what one engine GPU or one rank computes on."""

    flops: float
    bandwidth: float


def estimate_step(
    c: Config,
    model: ModelShape,
    lengths: SequenceLengths,
    gpu: Gpu | None,
    mean_completion: float,
    reference_model: ModelShape | None = None,
) -> StepTimes:
    """Takes the transport from `c`: what `auto` stands for depends on the cluster."""
    t, ranks, completions = c.trainer, c.policy.ranks, [max(round(mean_completion), 1)] * c.trainer.samples_per_prompt
    work = scored_flops(c, model, lengths, completions)
    lora = c.policy.lora.rank > 0  # frozen weights have no gradients
    recomputes = bool(c.policy.gradient_checkpointing)
    update_work = work * t.epochs_per_step * (3 - lora + recomputes)
    rank = _speed(gpu, c.policy.dtype, c.policy.threads)
    scoring, training = (SCORING_SHARE, TRAINING_SHARE) if gpu else (1.0, 1.0)
    samples = not is_supervised(c)
    phases = {"rollout": _rollout_seconds(c, model, lengths, gpu, mean_completion) if samples else 0.0}
    phases["score"] = work / (ranks * rank.flops * scoring) if scores_old(c) else 0.0
    if policy_is_reference(c):
        phases["reference"] = work / (ranks * rank.flops * scoring)
    elif c.reference.kl_coef > 0:
        reference_gpu = None if c.reference.place == "cpu" else gpu
        reference = _speed(reference_gpu, c.policy.dtype, c.policy.threads)
        scored = scored_flops(c, reference_model or model, lengths, completions)
        phases["reference"] = scored / (c.reference.ranks * reference.flops * (SCORING_SHARE if reference_gpu else 1.0))
    phases["update"] = update_work / (ranks * rank.flops * training) + _optimizer_seconds(c, model, rank)
    prompts = len(completions) if model.mixer else 1  # of a group, in packs
    tokens = (prompts * lengths.typical_prompt + sum(completions)) * t.prompts_per_step / ranks
    phases["update"] += tokens * t.epochs_per_step * _activation_seconds_per_token(c, model)
    if c.algorithm.advantage == "gae":
        critic_work = work * t.epochs_per_step * (3 + recomputes)
        phases["critic"] = (work + critic_work) / (c.critic.ranks * rank.flops * training)
    phases["sync"] = sync_bytes(c, model) / TRANSPORTS[c.sync.transport].bytes_per_s if samples else 0.0
    if gpu and samples:
        phases["sync"] += SYNC_S + SYNC_TENSOR_S * sync_tensors(model)
    return StepTimes(phases, c.pipeline.max_lag > 0)


def scored_flops(c: Config, model: ModelShape, lengths: SequenceLengths, completions: list[int]) -> float:
    """Returns the work of a forward pass over a step's samples. Mixers compute a prompt for each of its completions."""
    groups = [[completion] for completion in completions] if model.mixer else [completions]
    work = sum(model.flop_counter.group_flops(lengths.typical_prompt, group) for group in groups)
    return work * c.trainer.prompts_per_step


def _speed(gpu: Gpu | None, dtype: str, threads: int) -> DeviceSpeed:
    if gpu is None:
        return DeviceSpeed(CORE_FLOPS * threads, CORE_BANDWIDTH * threads)
    return DeviceSpeed(gpu.peak_flops(dtype), gpu.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE)


def _optimizer_seconds(c: Config, model: ModelShape, rank: DeviceSpeed) -> float:
    """Counts that Adam reads and writes its state, and that ranks exchange gradients and weights."""
    p, updates = c.policy, c.trainer.updates_per_step * c.trainer.epochs_per_step
    trained = trained_parameters(c, model)
    shard = trained / (p.ranks if p.zero_stage else 1)
    adam = 28 * shard / (OFFLOAD if "optimizer" in p.offload else rank.bandwidth)
    exchanged = WIDTH[p.dtype] * (2 * trained + model.parameters * (p.zero_stage == 3)) * (p.ranks > 1)
    offloaded = 2 * WIDTH[p.dtype] * model.parameters * ("params" in p.offload)
    return updates * (adam + exchanged / RANK_LINKS[c.cluster.device] + offloaded / HOST_LINK)


def _activation_seconds_per_token(c: Config, model: ModelShape) -> float:
    """Counts for an update that ranks that share a pack exchange heads, and that inputs of layers go to host memory and back."""
    p, width, passes = c.policy, WIDTH[c.policy.dtype], 2 + bool(c.policy.gradient_checkpointing)
    heads = 2 * (model.query_width + max(model.kv_heads, p.sequence_parallel) * model.head_dim)
    exchanged = passes * width * heads * (1 - 1 / p.sequence_parallel)
    offloaded = 2 * width * model.hidden * offloads_activations(c)
    return model.layers * (exchanged / RANK_LINKS[c.cluster.device] + offloaded / HOST_LINK)


def _rollout_seconds(
    c: Config, model: ModelShape, lengths: SequenceLengths, gpu: Gpu | None, mean_completion: float
) -> float:
    """Counts prefill, then decode: each engine step reads the weights and all keys and values for one token per sequence."""
    r, t, width, parts = c.rollout, c.trainer, WIDTH[c.rollout.dtype], c.rollout.tensor_parallel
    speed = _speed(gpu, r.dtype, r.threads)
    flops = speed.flops * (PREFILL_SHARE if gpu else 1.0)
    prompts = -(-t.prompts_per_step // r.engines)
    samples = prompts * t.samples_per_prompt
    cache = kv_cache_bytes(c, model, gpu.memory_gib * GIB if gpu else 0.0)
    length = max(lengths.typical_prompt + mean_completion / 2, 1)
    most = most_sequences(c, model, gpu.memory_gib * GIB if gpu else 0.0)
    sequences = max(1.0, min(most, samples, cache / sequence_bytes(c, model, length)))
    longest = min(lengths.completion, MAX_OVER_MEAN_LENGTH * mean_completion)
    steps = max(longest, samples * mean_completion / sequences)
    read = width * model.parameters_read(sequences) / parts
    read += sequences * model.cached_bytes(length, width) / cache_parts(model, parts)
    computed = sequences * 2.0 * model.active_parameters / parts
    overhead = CORE_STEP_S * model.layers
    if gpu:
        overhead = HOST_STEP_S + HOST_TOKEN_S * sequences + LAUNCH_S * runs_eagerly(c) * model.layers
    step = max(read / speed.bandwidth, computed / flops, overhead)
    prefill = prompts * model.flop_counter.forward_flops(0, lengths.typical_prompt, 1) / parts
    return steps * step + prefill / flops
