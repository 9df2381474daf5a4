"""Weights within a GPU that a policy rank and an engine share: the engine opens the policy's memory and copies from it.

    every rank:  {"gpu": uuid, "names", "dtypes", "shapes", "handles": [CUDA IPC handle per tensor]}
    engine:      picks the handle of its own GPU for each tensor, through vLLM's `ipc` backend
    every rank:  lets go of the memory once all engines have answered

One part holds all. Nothing is packed: weights that lie on the GPU whole, in the engines' dtype, are read where they are.

Written from vLLM's sources; see tests/gpu for what has been run.
"""

from collections.abc import AsyncIterator
from typing import Any

from workers.sync.arrivals import Refs, arrived
from workers.sync.host_memory import Entry, Message
from workers.sync.outgoing import Outgoing


class Sender:
    concurrent = False
    lasting = False
    by_shares = False

    def __init__(self, rank: int, ranks: int, receivers: int):
        self.held: list[Any] = []

    def invite(self, manifest: list[Entry]) -> Message:
        return {"parts": 1}

    def connect(self, invitation: Message) -> None:
        pass

    def send(self, outgoing: Outgoing, part: int) -> Message:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        names, dtypes, shapes, handles = [], [], [], []
        for name, tensor in outgoing.cast():
            whole = tensor.cuda().contiguous()
            self.held.append(whole)
            names.append(name)
            dtypes.append(str(whole.dtype).removeprefix("torch."))
            shapes.append(list(whole.shape))
            handles.append(reduce_tensor(whole)[1])
        torch.cuda.synchronize()
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return {"gpu": gpu, "names": names, "dtypes": dtypes, "shapes": shapes, "handles": handles}

    def sent(self) -> None:
        import torch

        self.held.clear()
        torch.cuda.ipc_collect()


class Receiver:
    backend = "ipc"

    def init_info(self, invitation: Message, engine: int, tensor_parallel: int, inside: bool) -> dict[str, Any]:
        return {}

    async def updates(self, parts: list[Refs]) -> AsyncIterator[dict[str, Any]]:
        messages = await arrived(parts[0])
        first = messages[0]
        handles = [{m["gpu"]: m["handles"][i] for m in messages} for i in range(len(first["names"]))]
        yield {
            "names": first["names"],
            "dtype_names": first["dtypes"],
            "shapes": first["shapes"],
            "ipc_handles": handles,
        }
