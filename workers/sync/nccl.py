"""Weights between GPUs by NCCL broadcast. Policy rank 0 is rank 0 of a group that holds every engine worker.

connection info:  {"parts": 1, "address", "port", "world", "names", "dtypes", "shapes"}
every engine:     its workers join the group, from rank 1 on
rank 0:           broadcasts buffers of packed tensors
every engine:     vLLM's `nccl` backend unpacks and loads them

NCCL reads its settings from the environment, and both sides must have the same. The engines compare theirs with rank 0's.

Written from vLLM's sources. tests/gpu/results shows what has been run.
"""

import os
from collections.abc import AsyncIterator
from typing import Any

import ray

from rlsys.config.schema import ConfigError
from workers.supervision.network import choose_interface, print_network
from workers.supervision.ports import free_port
from workers.sync.layout import ManifestEntry
from workers.sync.outgoing import OutgoingWeights
from workers.sync.transport import Message, PartRefs

# Variables that name parts of a node, print, or are set by vLLM in its own processes.
MAY_DIFFER = (
    *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_CONF_FILE"),
    *("NCCL_TOPO", "NCCL_GRAPH", "NCCL_NO_CACHE"),
)


def nccl_settings() -> dict[str, str]:
    """Returns the variables of NCCL that both sides of a group must have in common."""
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("NCCL_") and not k.startswith(MAY_DIFFER)}


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
            "settings": nccl_settings(),
        }

    def connect(self, info: Message) -> None:
        if self.rank:
            return
        import torch

        cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        # vLLM would replace this thread's stream by a new one, unless it sees that one has been chosen.
        torch.cuda.set_stream(torch.cuda.current_stream())
        group = StatelessProcessGroup.create(host=self.address, port=self.port, rank=0, world_size=self.world)
        self.communicator = PyNcclCommunicator(group, device=torch.cuda.current_device())
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)  # vLLM's import turns it off, on this rank alone

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

    def __init__(self) -> None:
        """Runs before vLLM's processes start, which inherit this environment."""
        address = ray.util.get_node_ip_address()
        choose_interface(address, "NCCL_SOCKET_IFNAME")
        print_network(address)
        self.settings = nccl_settings()

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        require_same_settings(info["settings"], self.settings)
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


def require_same_settings(policy: dict[str, str], engine: dict[str, str]) -> None:
    """Raises `ConfigError` if NCCL is set differently on the two sides: their group would fail, or wait for ever."""
    names = [name for name in sorted(policy | engine) if policy.get(name) != engine.get(name)]
    if names:
        differences = "; ".join(f"{n} {policy.get(n, 'not set')} and {engine.get(n, 'not set')}" for n in names)
        raise ConfigError(
            f"NCCL has other settings in policy-0 than in an engine: {differences}. Set them alike in the environment "
            "of `ray start` on all nodes, or in cluster.env."
        )
