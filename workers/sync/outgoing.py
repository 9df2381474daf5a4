"""Weights on their way out of the policy: cast, looked at, fingerprinted and copied in one go.

Memory is what a sync waits for. So each tensor is read once, in blocks that stay in the cache of a core for all that is done
with them, and several tensors are copied side by side.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from rlsys import fingerprint
from workers.proof import tensor_print
from workers.side_by_side import side_by_side
from workers.sync.host_memory import Place, Tensors, views

BLOCK = 1 << 17  # elements: half a megabyte in float32


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

        def one(named: tuple[str, Any]) -> None:
            name, tensor = named
            if tensor.device.type == "cpu" and not self.by_place:
                self.copy_in_blocks(name, tensor, places[name])
            else:
                places[name].copy_(self.checked(name, tensor))

        if self.by_place:  # see `Chart.answer`
            for named in bucket:
                one(named)
        else:
            side_by_side(one, bucket)

    def copy_in_blocks(self, name: str, tensor: Any, place: Any) -> None:
        running = fingerprint.Running()
        for part, target in zip(tensor.detach().reshape(-1).split(BLOCK), place.view(-1).split(BLOCK), strict=True):
            part = part.to(self.dtype)
            if not part.sum().isfinite():  # the cheapest look; a sum of finite numbers may be infinite too
                refuse_unless_finite(name, part)
            if self.verify:
                running.add(part)
            target.copy_(part)
        if self.verify:
            self.prints[name] = running.number()

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
