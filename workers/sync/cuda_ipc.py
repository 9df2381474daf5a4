"""Weights within a GPU that a policy rank and an engine share: the engine opens the rank's memory and copies from it.

connection info:  {"parts": 1}
every rank:       answers {"gpu": uuid, "names", "dtypes", "shapes", "handles": [CUDA IPC handle per tensor]}
every engine:     picks the handles of its own GPU, through vLLM's `ipc` backend
every rank:       releases the memory once all engines have loaded

Nothing is packed: weights that lie on the GPU whole and in the engines' dtype are read where they are.

Written from vLLM's sources. tests/gpu/results shows what has been run.
"""

from collections.abc import AsyncIterator
from typing import Any

from workers.sync.layout import ManifestEntry
from workers.sync.outgoing import OutgoingWeights
from workers.sync.transport import Message, PartRefs, wait_for_part


class CudaIpcSender:
    needs_concurrent_receive = False
    replayable = False
    sends_shards = False

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.exports = Exports()
        self.shared: list[Any] = []  # keeps the tensors alive while engines copy from them

    def connection_info(self, manifest: list[ManifestEntry]) -> Message:
        return {"parts": 1}

    def connect(self, info: Message) -> None:
        pass

    def send(self, outgoing: OutgoingWeights, part: int) -> Message:
        import torch

        names, dtypes, shapes, handles = [], [], [], []
        for name, tensor in outgoing.cast_tensors():
            whole = tensor.cuda().contiguous()
            self.shared.append(whole)
            names.append(name)
            dtypes.append(str(whole.dtype).removeprefix("torch."))
            shapes.append(list(whole.shape))
            handles.append(self.exports.export(whole))
        torch.cuda.synchronize()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return {"gpu": gpu, "names": names, "dtypes": dtypes, "shapes": shapes, "handles": handles}

    def finish_send(self) -> None:
        import torch

        self.shared.clear()
        self.exports.forget_freed()
        torch.cuda.ipc_collect()


class Exports:
    """What opens a tensor in another process, the arguments of torch's `rebuild_cuda_tensor`.

    torch keeps what belongs to an export until the tensor's storage is freed, which with ZeRO 0 to 2 is never. So these
    tensors are exported at the first sync only. Tensors that are freed after a sync, such as casts, are exported each time.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[Any, Any]] = {}  # storage and arguments, by place and shape

    def export(self, tensor: Any) -> Any:
        from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in self.known or self.known[place][0].expired():
            self.known[place] = StorageWeakRef(tensor.untyped_storage()), reduce_tensor(tensor)[1]
        return self.known[place][1]

    def forget_freed(self) -> None:
        self.known = {place: kept for place, kept in self.known.items() if not kept[0].expired()}


class CudaIpcReceiver:
    backend = "ipc"

    def init_info(self, info: Message, engine: int, tensor_parallel: int, in_process: bool) -> dict[str, Any]:
        return {}

    async def update_infos(self, parts: list[PartRefs]) -> AsyncIterator[dict[str, Any]]:
        messages = await wait_for_part(parts[0])
        first = messages[0]
        yield {
            "names": first["names"],
            "dtype_names": first["dtypes"],
            "shapes": first["shapes"],
            "ipc_handles": [{m["gpu"]: m["handles"][i] for m in messages} for i in range(len(first["names"]))],
        }
