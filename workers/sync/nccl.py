"""Weights between GPUs by NCCL broadcast. Policy rank 0 is rank 0 of a group that holds every engine worker.

connection info:  {"parts": 1, "address", "port", "world", "names", "dtypes", "shapes"}
every engine:     its workers join the group, from rank 1 on
rank 0:           broadcasts buffers of packed tensors
every engine:     vLLM's `nccl` backend unpacks and loads them

Written from vLLM's sources. tests/gpu says what has been run.
"""

from collections.abc import AsyncIterator
from typing import Any

import ray

from workers.supervision.ports import free_port
from workers.sync.layout import ManifestEntry
from workers.sync.outgoing import OutgoingWeights
from workers.sync.transport import Message, PartRefs


class NcclSender:
    needs_concurrent_receive = True
    replayable = False
    sends_shards = False

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.rank, self.world = rank, receivers + 1

    def connection_info(self, manifest: list[ManifestEntry]) -> Message:
        if self.rank:
            return {}
        self.address, self.port = ray.util.get_node_ip_address(), free_port()
        names, dtypes, shapes = zip(*manifest, strict=True)
        return {
            "parts": 1,
            "address": self.address,
            "port": self.port,
            "world": self.world,
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": list(shapes),
        }

    def connect(self, info: Message) -> None:
        if self.rank:
            return
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(host=self.address, port=self.port, rank=0, world_size=self.world)
        self.communicator = PyNcclCommunicator(group, device=torch.cuda.current_device())

    def send(self, outgoing: OutgoingWeights, part: int) -> None:
        if self.rank:
            for _ in outgoing:  # takes part in gathering ZeRO-3 partitions
                pass
            return
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=outgoing.cast_tensors(), group=self.communicator, src=0, post_iter_func=lambda item: item[1]
        )
        torch.cuda.synchronize()

    def finish_send(self) -> None:
        pass


class NcclReceiver:
    backend = "nccl"

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        self.tensors = {"names": info["names"], "dtype_names": info["dtypes"], "shapes": info["shapes"]}
        return {
            "master_address": info["address"],
            "master_port": info["port"],
            "world_size": info["world"],
            "rank_offset": 1 + engine * tensor_parallel,
            "packed": True,
        }

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        yield self.tensors
