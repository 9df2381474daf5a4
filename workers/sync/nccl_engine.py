"""The engine worker's half of `nccl.py`. vLLM imports this file, in the process of its worker."""

import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from workers.sync.layout import ManifestEntry, Slot, plan_packet, tensor_views


@dataclass(kw_only=True)
class InitInfo(NCCLWeightTransferInitInfo):
    senders: int
    buckets: list[list[ManifestEntry]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    pass


class ShardedNcclEngine(NCCLWeightTransferEngine):
    """vLLM's own engine, but with several senders."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        super().init_transfer_engine(init_info)
        self.senders, self.buckets, self.receiving = init_info.senders, init_info.buckets, torch.cuda.Stream()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self.load_buckets()
        except Exception:
            if self.parallel_config.world_size == 1:
                raise
            # vLLM would wait for the engine's other workers, which wait for this one in a broadcast without end.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def load_buckets(self) -> None:
        """Loads a bucket, on this thread's stream, while the next one arrives on another.

        vLLM may keep tensors until those of later buckets complete their layer, so all loading is on one stream.
        """
        loading = torch.cuda.current_stream()
        loaded: list[torch.cuda.Event] = []
        for bucket in self.buckets:
            if len(loaded) == 2:
                loaded.pop(0).synchronize()  # no third bucket in memory
            with torch.cuda.stream(self.receiving):
                packets = [self.receive_packet(bucket, sender) for sender in range(self.senders)]
            loading.wait_stream(self.receiving)
            shards = []
            for packet, layout in packets:
                packet.record_stream(loading)  # its memory is not used again before that
                shards.append([shard for _, shard in tensor_views(packet, layout)])
            self.model.load_weights(join_shards(bucket, shards))
            loaded.append(loading.record_event())

    def receive_packet(self, bucket: list[ManifestEntry], sender: int) -> tuple[Any, list[Slot]]:
        """Returns a sender's shard of each tensor of a bucket, and where they lie."""
        layout, size = plan_packet(bucket, sender, self.senders)
        packet = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            self.model_update_group.broadcast(packet, src=sender)
        return packet, layout


def join_shards(bucket: list[ManifestEntry], packets: list[list[Any]]) -> Iterator[tuple[str, Any]]:
    """Yields whole tensors, one at a time. Those of a single sender lie where they arrived."""
    for (name, _, shape), shards in zip(bucket, zip(*packets, strict=True), strict=True):
        whole = shards[0] if len(shards) == 1 else torch.cat(shards)
        yield name, whole.view(shape)
