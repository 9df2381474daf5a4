"""Weights on their way out of the policy: cast, looked at, fingerprinted and copied in one go.

Memory is what a sync waits for. So each tensor is read once, in blocks that stay in the cache of a core for all that is done
with them, and parts of tensors are copied side by side.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from rlsys import fingerprint
from workers.proof import tensor_print
from workers.side_by_side import side_by_side
from workers.sync.host_memory import Place, Tensors, views

BLOCK = 1 << 18  # elements: a megabyte in float32


class Outgoing:
    """Buckets of whole tensors, as the policy has them. `Outgoing([[("model.norm.weight", tensor [896])]], torch.bfloat16)`

    A transport goes through it once; so do the ranks that send nothing, because ZeRO 3 gathers each bucket from all of them.
    `prints` will hold a fingerprint, in `dtype`, of every tensor that was copied or cast, unless `verify` is off.
    """

    def __init__(self, buckets: Iterable[Tensors], dtype: Any, verify: bool = True, by_place: bool = False):
        self.buckets, self.dtype, self.verify, self.by_place = buckets, dtype, verify, by_place
        self.prints: dict[str, int] = {}

    def __iter__(self) -> Iterator[Tensors]:
        return iter(self.buckets)

    def copy(self, bucket: Tensors, layout: list[Place], memory: Any) -> None:
        """Into memory of this host, whose layout may be of more tensors than these."""
        places = dict(views(memory, layout))
        if self.by_place or any(tensor.device.type != "cpu" for _, tensor in bucket):  # see `Chart.answer`
            for name, tensor in bucket:
                places[name].copy_(self.checked(name, tensor))
            return
        parts = [
            (name, part, place)
            for name, tensor in bucket
            for part, place in zip(fingerprint.parts(tensor), fingerprint.parts(places[name]), strict=True)
        ]
        found = side_by_side(lambda part: (part[0], self.copy_part(*part)), parts)
        if self.verify:
            self.prints |= fingerprint.of_tensors(found)

    def copy_part(self, name: str, part: Any, place: Any) -> int:
        running, total = fingerprint.Running(), 0.0
        for block, target in zip(part.split(BLOCK), place.split(BLOCK), strict=True):
            block = block.to(self.dtype)
            # First: it reads and writes memory at the same time, and the rest finds the block in the cache.
            target.copy_(block)
            total += block.sum().item()
            if self.verify:
                running.add(block)
        if not math.isfinite(total):  # the cheapest look; a sum of finite numbers may be infinite too
            refuse_unless_finite(name, part.to(self.dtype))
        return running.number()

    def cast(self) -> Iterator[tuple[str, Any]]:
        """Tensor by tensor, for transports that take them from the GPU."""
        for bucket in self:
            for name, tensor in bucket:
                yield name, self.checked(name, tensor)

    def checked(self, name: str, tensor: Any) -> Any:
        whole = tensor.detach().to(self.dtype)
        refuse_unless_finite(name, whole)
        if self.verify:
            self.prints[name] = tensor_print(whole, self.by_place)
        return whole


def refuse_unless_finite(name: str, tensor: Any) -> None:
    if not all(extreme.isfinite() for extreme in tensor.aminmax()):  # reads memory ten times as fast as isfinite
        raise FloatingPointError(f"{name} is not finite after the last update; the engines keep their weights.")
