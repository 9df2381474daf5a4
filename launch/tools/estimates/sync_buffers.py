"""The buffers of a weight sync, at both ends."""

from launch.tools.estimates.adapters import sync_bytes
from launch.tools.estimates.memory import MIB, WIDTH, Parts
from rlsys.config.derived import sends_shards, syncs_within_gpus
from rlsys.config.schema import Config
from rlsys.models.shapes import ModelShape

SYNC_BUCKET = 512 * MIB  # of workers/sync


def sync_parts(c: Config, model: ModelShape) -> Parts:
    """Returns what a sender holds on its device: tensors that ZeRO 3 gathers or adapters merge at a time, and buffers on a GPU."""
    gathers = (c.policy.zero_stage == 3 and not sends_shards(c)) + (c.policy.lora.rank > 0)
    buffers = device_sync_bytes(c, model) if c.cluster.device == "gpu" else 0
    return {"weights": WIDTH[c.policy.dtype] * sync_bucket_elements(c, model) * gathers, "buckets": buffers}


def sync_bucket_elements(c: Config, model: ModelShape) -> float:
    """Returns how many elements are sent at a time."""
    return min(max(SYNC_BUCKET / WIDTH[c.rollout.dtype], model.largest_tensor), model.parameters)


def device_sync_bytes(c: Config, model: ModelShape) -> float:
    """Counts copies on a GPU, in addition to the weights, at both ends: one bucket within a GPU, unless the engine reads the policy's
    weights in place, and two buckets between GPUs."""
    in_place = c.policy.dtype == c.rollout.dtype and c.policy.zero_stage != 3 and not c.policy.lora.rank
    buckets = (0 if in_place else 1) if syncs_within_gpus(c) else 2
    return min(buckets * WIDTH[c.rollout.dtype] * sync_bucket_elements(c, model), sync_bytes(c, model))


def host_send_parts(c: Config, model: ModelShape, ranks: int, first: bool) -> Parts:
    """Returns what a policy rank keeps in main memory to send weights. Rank 0, the `first`, sends alone, or all send shards."""
    on_host = c.cluster.device == "cpu" or c.sync.transport in ("shared_memory", "object_store")
    senders = ranks if sends_shards(c) else int(first)  # 0 if this rank sends nothing
    if not (on_host and senders):
        return {}
    sent = sync_bytes(c, model)
    if c.sync.transport == "object_store":
        sent = min(sent, WIDTH[c.rollout.dtype] * sync_bucket_elements(c, model))
    return {"buckets": sent / senders}
