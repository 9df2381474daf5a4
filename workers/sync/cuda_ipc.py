"""Weights within a GPU that a policy rank and an engine share: the engine opens the policy's memory and copies from it.

    every rank:  {"gpu": uuid, "names", "dtypes", "shapes", "handles": [CUDA IPC handle per tensor]}
    engine:      picks the handle of its own GPU for each tensor, through vLLM's `ipc` backend
    every rank:  lets go of the memory once all engines have answered

One part holds all. Nothing is packed: weights that lie on the GPU whole, in the engines' dtype, are read where they are.

Written from vLLM's sources; see tests/gpu for what has been run.
"""

from collections.abc import AsyncIterator
from typing import Any

from workers.sync.arrivals import PartRefs, wait_for_part
from workers.sync.host_memory import ManifestEntry, Message
from workers.sync.outgoing import OutgoingWeights


class CudaIpcSender:
    needs_concurrent_receive = False
    replayable = False
    sends_shards = False

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.held: list[Any] = []

    def connection_info(self, manifest: list[ManifestEntry]) -> Message:
        return {"parts": 1}

    def connect(self, invitation: Message) -> None:
        pass

    def send(self, outgoing: OutgoingWeights, part: int) -> Message:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        names, dtypes, shapes, handles = [], [], [], []
        for name, tensor in outgoing.cast_tensors():
            whole = tensor.cuda().contiguous()
            self.held.append(whole)
            names.append(name)
            dtypes.append(str(whole.dtype).removeprefix("torch."))
            shapes.append(list(whole.shape))
            handles.append(reduce_tensor(whole)[1])
        torch.cuda.synchronize()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return {"gpu": gpu, "names": names, "dtypes": dtypes, "shapes": shapes, "handles": handles}

    def finish_send(self) -> None:
        import torch

        self.held.clear()
        torch.cuda.ipc_collect()


class CudaIpcReceiver:
    backend = "ipc"

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        messages = await wait_for_part(parts[0])
        first = messages[0]
        handles = [{m["gpu"]: m["handles"][i] for m in messages} for i in range(len(first["names"]))]
        yield {
            "names": first["names"],
            "dtype_names": first["dtypes"],
            "shapes": first["shapes"],
            "ipc_handles": handles,
        }
