"""Weights between GPUs by NCCL broadcast, in a group of the policy ranks that send and of all engine workers.

connection info:  {"address", "port", "world", "senders", "buckets": [[(name, dtype, shape), …], …]}
senders:          ranks 0, 1, … of the group. With ZeRO 3 all ranks send, otherwise rank 0
every engine:     its workers join the group, after the senders
every sender:     for each bucket, broadcasts a packet with its shards of the bucket's tensors, in turn
every engine:     puts the tensors of a bucket together and loads them (`nccl_engine.py`)

A broadcast reaches the whole group, so senders receive each other's packets too, and drop them. While one bucket is on
its way, the next is packed.

NCCL reads its settings from the environment, and both sides must have the same. The engines compare theirs with rank 0's,
as the other ranks have done.

Written from vLLM's sources. tests/gpu/results shows what has been run.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from workers.fleet.ray_cluster import node_address
from workers.start.nccl_settings import NcclSettings, nccl_settings, require_same_settings
from workers.start.network import choose_interface, print_network
from workers.start.ports import free_port
from workers.sync.layout import ManifestEntry, plan_packet, tensor_views
from workers.sync.outgoing import OutgoingBucket
from workers.sync.transport import Message, PartRefs

BACKEND = "rlsys_nccl"


class NcclSender:
    needs_concurrent_receive = True
    reuses_memory = False
    replayable = False
    sends_shards = True
    reads_in_place = False

    def __init__(self, rank: int, senders: int, receivers: int):
        self.rank, self.senders, self.world = rank, senders, senders + receivers

    def connection_info(self, buckets: list[list[ManifestEntry]], in_place: bool) -> Message:
        if self.rank:
            return {}
        return {
            "address": node_address(),
            "port": free_port(),
            "world": self.world,
            "senders": self.senders,
            "buckets": buckets,
            "settings": asdict(nccl_settings(node_address())),
        }

    def connect(self, info: Message) -> None:
        if self.rank >= self.senders:
            return
        import torch

        cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # vLLM would replace this thread's stream by a new one, unless it sees that one has been chosen.
        torch.cuda.set_stream(torch.cuda.current_stream())
        self.streams = Streams()
        group = StatelessProcessGroup.create(info["address"], info["port"], self.rank, self.world)
        self.communicator = PyNcclCommunicator(group, device=torch.cuda.current_device())
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)  # vLLM's import turns it off, on this rank alone

    def send(self, bucket: OutgoingBucket) -> None:
        if self.rank >= self.senders:
            return
        import torch

        with self.streams.next():
            layout, size = plan_packet(bucket.entries, self.rank, self.senders)
            own = torch.empty(size, dtype=torch.uint8, device=self.communicator.device)
            bucket.copy_to([copy for _, copy in tensor_views(own, layout) if len(copy)])
            for sender in range(self.senders):
                _, size = plan_packet(bucket.entries, sender, self.senders)
                packet = own if sender == self.rank else own.new_empty(size)
                if size:
                    self.communicator.broadcast(packet, src=sender)

    def finish_send(self) -> None:
        if self.rank < self.senders:
            import torch

            torch.cuda.synchronize()


class Streams:
    """Two streams that take turns: one bucket is packed while the other one is sent.

    Each sender keeps its two: memory that was allocated on a stream is used again on that stream only.
    """

    def __init__(self) -> None:
        import torch

        self.streams, self.used = [torch.cuda.Stream(), torch.cuda.Stream()], 0

    @contextlib.contextmanager
    def next(self) -> Iterator[None]:
        """The stream that is used from here on. Its last bucket has been sent."""
        import torch

        stream = self.streams[self.used % 2]
        self.used += 1
        stream.synchronize()
        stream.wait_stream(torch.cuda.current_stream())  # which has computed or gathered the weights
        with torch.cuda.stream(stream):
            yield


class NcclReceiver:
    backend = BACKEND

    def __init__(self) -> None:
        """Runs before vLLM's processes start, which inherit this environment."""
        address = node_address()
        choose_interface(address, "NCCL_SOCKET_IFNAME")
        print_network(address)
        self.settings = nccl_settings(address)

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        require_same_settings(NcclSettings(**info["settings"]), self.settings, ("policy-0", f"rollout-{engine}"))
        return {
            "master_address": info["address"],
            "master_port": info["port"],
            "world_size": info["world"],
            "rank_offset": info["senders"] + engine * tensor_parallel,
            "senders": info["senders"],
            "buckets": info["buckets"],
        }

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        yield {}
