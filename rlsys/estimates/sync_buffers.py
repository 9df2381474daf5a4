"""The buffers of a weight sync, at both ends."""

from rlsys.config.derived import sends_shards
from rlsys.config.schema import Config
from rlsys.estimates.adapters import sync_bytes
from rlsys.estimates.devices import GIB
from rlsys.estimates.memory import MIB, WIDTH, Parts
from rlsys.models.shapes import ModelShape

SYNC_BUCKET = 512 * MIB  # of workers/sync
NCCL_BUCKET = GIB  # of vLLM's transport by NCCL


def sync_parts(c: Config, model: ModelShape) -> Parts:
    """What a sender holds on its device: tensors that ZeRO 3 gathers or adapters merge at a time, and buffers on a GPU."""
    gathers = (c.policy.zero_stage == 3 and not sends_shards(c)) + (c.policy.lora.rank > 0)
    buffers = device_sync_bytes(c, model) if c.cluster.device == "gpu" else 0
    return {"weights": WIDTH[c.policy.dtype] * sync_bucket_elements(c, model) * gathers, "buckets": buffers}


def sync_bucket_elements(c: Config, model: ModelShape) -> float:
    """Elements that are sent at a time."""
    return min(max(SYNC_BUCKET / WIDTH[c.rollout.dtype], model.largest_tensor), model.parameters)


def device_sync_bytes(c: Config, model: ModelShape) -> float:
    """A sender's copies on its GPU beside the weights: all of them if the engine reads them in place after a cast."""
    in_place = c.policy.dtype == c.rollout.dtype and c.policy.zero_stage != 3 and not c.policy.lora.rank
    if c.cluster.placement == "colocated" and c.sync.transport in ("auto", "cuda_ipc"):
        return 0 if in_place else sync_bytes(c, model)
    return nccl_buffer_bytes(c, model)


def nccl_buffer_bytes(c: Config, model: ModelShape) -> float:
    """Between GPUs, weights travel through two buffers of vLLM's, at both ends."""
    largest = WIDTH[c.rollout.dtype] * model.largest_tensor
    return min(2 * max(NCCL_BUCKET, largest), sync_bytes(c, model))


def host_send_parts(c: Config, model: ModelShape, ranks: int, first: bool) -> Parts:
    """What a policy rank keeps in main memory to send weights. Rank 0, the `first`, sends alone, or all send shards."""
    on_host = c.cluster.device == "cpu" or c.sync.transport in ("shared_memory", "object_store")
    senders = ranks if sends_shards(c) else int(first)  # 0 if this rank sends nothing
    if not (on_host and senders):
        return {}
    sent = sync_bytes(c, model)
    if c.sync.transport == "object_store":
        sent = min(sent, WIDTH[c.rollout.dtype] * sync_bucket_elements(c, model))
    return {"buckets": sent / senders}
