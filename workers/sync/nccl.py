"""Weights between GPUs by NCCL broadcast: policy rank 0 is rank 0 of a group that holds every engine worker.

    rank 0:  {"address", "port", "world", "names", "dtypes", "shapes"}  ──▶ engines join the group (rank 1 + worker)
    rank 0:  one broadcast per buffer of packed tensors            ──▶ vLLM's `nccl` backend unpacks and loads

Written from vLLM's sources; see tests/gpu for what has been run.
"""

from collections.abc import AsyncIterator
from typing import Any

import ray

from workers.supervision.worker_setup import free_port
from workers.sync.arrivals import PartRefs
from workers.sync.host_memory import ManifestEntry, Message
from workers.sync.outgoing import OutgoingWeights


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

    def connect(self, invitation: Message) -> None:
        if self.rank:
            return
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        meeting = StatelessProcessGroup.create(host=self.address, port=self.port, rank=0, world_size=self.world)
        self.group = PyNcclCommunicator(meeting, device=torch.cuda.current_device())

    def send(self, outgoing: OutgoingWeights, part: int) -> None:
        if self.rank:
            for _ in outgoing:  # takes part in gathering ZeRO-3 partitions
                pass
            return
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=outgoing.cast_tensors(), group=self.group, src=0, post_iter_func=lambda item: item[1]
        )
        torch.cuda.synchronize()

    def finish_send(self) -> None:
        pass


class NcclReceiver:
    backend = "nccl"

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        self.invitation = invitation
        info = {
            "master_address": invitation["address"],
            "master_port": invitation["port"],
            "world_size": invitation["world"],
        }
        return info | {"rank_offset": 1 + engine * tensor_parallel} | self._packed("init")

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        yield {
            "names": self.invitation["names"],
            "dtype_names": self.invitation["dtypes"],
            "shapes": self.invitation["shapes"],
        } | self._packed("update")

    def _packed(self, call: str) -> dict[str, bool]:
        """Whether `packed` goes with this call: vLLM 0.28 moved it from the update to the handshake."""
        import dataclasses

        from vllm.distributed.weight_transfer import nccl_engine

        kind = nccl_engine.NCCLWeightTransferInitInfo if call == "init" else nccl_engine.NCCLWeightTransferUpdateInfo
        return {"packed": True} if "packed" in {f.name for f in dataclasses.fields(kind)} else {}
