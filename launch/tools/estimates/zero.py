"""What DeepSpeed holds on a rank: its shards of weights and state, gradients, and its buffers."""

from dataclasses import dataclass, replace

from launch.tools.estimates.adapters import adapter_parameters, largest_trained, trained_parameters
from launch.tools.estimates.memory import WIDTH
from rlsys.config.derived import adds_packs_in_float32, reduce_bucket
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape

REDUCE_BUCKET = 500_000_000  # elements of DeepSpeed's buffer for gradients that are being reduced, by default
MAX_GATHERED = 1_000_000_000  # parameters that ZeRO 3 keeps gathered
SUB_GROUP = 1_000_000_000  # parameters that ZeRO 3 steps at a time


@dataclass(frozen=True)
class ZeroMemory:
    """What a rank holds under DeepSpeed, in bytes: some of it always, some at times."""

    weights: float
    adapters: float
    gradients: float  # during an update
    own_gradients: float  # of these, what is left for Adam
    gradient_copies: float  # more of them after the last pack
    state: float  # Adam's moments, and fp32 weights in addition to those that compute
    step: float  # temporaries while Adam steps, or while the norm is computed before
    gathered: float  # during a forward or backward pass
    bucket: float  # gradients being reduced: with ZeRO 1 and 2 during an update, with ZeRO 3 always


def zero_memory(c: Config, model: ModelShape, ranks: int) -> ZeroMemory:
    p, width, everything = c.policy, WIDTH[c.policy.dtype], float(model.parameters)
    trained = trained_parameters(c, model)
    on_cpu, adapters = c.cluster.device == "cpu", adapter_parameters(c, model)
    holders = ranks if p.zero_stage == 3 else 1
    shard = trained if p.zero_stage == 0 else trained / ranks
    fp32_copies = width == 2 or p.zero_stage in (1, 2)
    bucket = min(trained, REDUCE_BUCKET)
    sums_in_float32 = width == 2 and p.grad_dtype == "float32"
    largest = largest_trained(c, model) if p.zero_stage == 0 else shard
    gradients = shard * (2 * width if p.zero_stage == 1 else 4 if adds_packs_in_float32(p) else width)
    zero = ZeroMemory(
        weights=width * everything / holders,
        adapters=width * adapters / holders,
        gradients=gradients,
        own_gradients=gradients,
        # ZeRO 2 converts the last pack's gradients to float32, and adds them up in one more tensor.
        gradient_copies=8 * shard * (sums_in_float32 and p.zero_stage == 2),
        state=shard * (8 + 4 * fp32_copies),
        # Adam steps one tensor at a time, with two temporaries of its size.
        step=8 * largest + (4 * shard if fp32_copies else 0),
        gathered=gathered_bytes(c, model),
        bucket=width * bucket * (p.zero_stage > 0),  # only the pages that were filled take memory
    )
    return zero if on_cpu else replace(zero, **sizes_on_gpu(c, model, ranks))


def gathered_bytes(c: Config, model: ModelShape) -> float:
    """Doubles on CPU, as was measured (tests/bench/memory.py); the reason is not known."""
    if c.policy.zero_stage < 3:
        return 0.0
    return WIDTH[c.policy.dtype] * min(float(model.parameters), MAX_GATHERED) * (1 + (c.cluster.device == "cpu"))


def sizes_on_gpu(c: Config, model: ModelShape, ranks: int) -> dict[str, float]:
    """Returns what differs from CPU, or is known better: tests/launch/tools/estimates/test_device_memory.py counts it."""
    p, width = c.policy, WIDTH[c.policy.dtype]
    trained, largest = trained_parameters(c, model), largest_trained(c, model)
    shard, reduced = trained / ranks, min(trained, bucket_elements(c, trained))
    gradients = own = gradient_bytes(c, trained, shard, largest)
    copies = 0.0
    if p.zero_stage == 1:  # until the last pack, whole gradients stay where they are; then they move into the bucket
        gradients, copies = width * trained, own - width * reduced
    elif p.zero_stage == 2 and not adds_up_shards(c):
        copies = own
    return {
        "gradients": gradients,
        "own_gradients": own,
        "gradient_copies": copies,
        "step": step_bytes(c, trained, shard, largest),
        "bucket": bucket_bytes(c, trained),
    }


def adds_up_shards(c: Config) -> bool:
    """Returns True if a rank with ZeRO 2 adds packs up in one float32 tensor, which is as large as its shard."""
    return c.policy.zero_stage == 2 and c.policy.dtype != "float32" and adds_packs_in_float32(c.policy)


def gradient_bytes(c: Config, trained: float, shard: float, largest: float) -> float:
    """Returns the gradients of which a rank makes its step: ZeRO 1 and 2 keep whole tensors of all that the shard touches."""
    width = WIDTH[c.policy.dtype]
    if c.policy.zero_stage == 0:
        return width * trained
    if c.policy.zero_stage < 3 and "optimizer" in c.policy.offload:  # float32, in main memory
        return 4 * shard
    if c.policy.zero_stage == 3 or adds_up_shards(c):
        return shard * (4 if adds_packs_in_float32(c.policy) else width)
    return width * max(shard, largest)


def step_bytes(c: Config, trained: float, shard: float, largest: float) -> float:
    """Returns the gradients as float32 for Adam, or before that a tensor as float64, of which DeepSpeed takes the norm."""
    stage, width = c.policy.zero_stage, WIDTH[c.policy.dtype]
    if stage == 0:
        return 4 * trained * (width == 2)
    if "optimizer" in c.policy.offload:
        return 4 * shard
    flat = 4 if adds_packs_in_float32(c.policy) else width + 4
    if stage == 3:
        return max(flat * min(shard, SUB_GROUP), 8 * largest * shard / trained)
    return max(flat * shard * (not adds_up_shards(c)), 8 * min(shard, largest))


def bucket_elements(c: Config, trained: float) -> float:
    if c.policy.lora.rank:
        return trained
    return reduce_bucket(int(trained)) if c.policy.zero_stage else REDUCE_BUCKET


def bucket_bytes(c: Config, trained: float) -> float:
    """Counts the whole bucket on a GPU. That of ZeRO 3 has the type that is sent."""
    p, width = c.policy, WIDTH[c.policy.dtype]
    sent = 4 if p.grad_dtype == "float32" else width
    return bucket_elements(c, trained) * (sent if p.zero_stage == 3 else width) * (p.zero_stage > 0)
