"""Finds the sample that ends engines, among those that were lost with it.

A sample that was in two lost engines is a suspect. Idle engines sample suspects before all others, in parts that have an
engine for themselves. A lost part is split, at last into single samples. One that was alone in `MAX_ATTEMPTS` lost engines
ends the run; in more, if engines die by themselves: one more for each sample that came although it had been alone in two.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rlsys.types import Request
from workers.fleet.replaceable_workers import MAX_ATTEMPTS

Key = tuple[str, int, int]  # of a request, and of its sample
PARTS = 8  # that a lost part is split into


@dataclass(frozen=True)
class Part:
    requests: list[Request]
    lost_by: str  # the engine. Another one gets the part, because the engine itself may be the cause


class Suspects:
    """`add` the pending requests of a lost engine, and `take` a part for an idle one."""

    def __init__(self) -> None:
        self.losses: Counter[Key] = Counter()
        self.alone: dict[Key, list[str]] = {}  # the lost engines that had no other sample
        self.arrived = self.innocent = 0  # samples; of them, those that had been alone in two lost engines
        self.arrived_before: dict[Key, int] = {}  # its first loss
        self.parts: list[Part] = []  # the last comes first, so that single samples are found soon

    def __len__(self) -> int:
        return sum(len(part.requests) for part in self.parts)

    def add(self, engine: str, pending: dict[Key, Request]) -> list[Request]:
        """Counts a loss against the pending samples. Returns the requests that are no suspects."""
        self.losses.update(pending.keys())
        for key in pending:
            self.arrived_before.setdefault(key, self.arrived)
            if len(pending) == 1:
                self.alone.setdefault(key, []).append(engine)
        suspects = [request for key, request in pending.items() if self.losses[key] > 1]
        size = max(1, -(-len(suspects) // PARTS))
        self.parts += [Part(suspects[i : i + size], engine) for i in range(0, len(suspects), size)]
        return [request for key, request in pending.items() if self.losses[key] == 1]

    def take(self, engine: str, is_only: bool) -> list[Request]:
        """Returns the next part for an idle engine, if there is any."""
        for i in reversed(range(len(self.parts))):
            if is_only or self.parts[i].lost_by != engine:
                return self.parts.pop(i).requests
        return []

    def takers(self, engines: Iterable[str], is_only: bool) -> list[str]:
        """Returns the engines that may take a part that waits."""
        return [name for name in engines if any(is_only or part.lost_by != name for part in self.parts)]

    def clear(self) -> None:
        self.parts.clear()

    def acquit(self, keys: list[Key]) -> None:
        """Forgets the losses of samples that have arrived."""
        self.arrived += len(keys)
        for key in keys if self.losses else ():
            del self.losses[key]
            self.innocent += len(self.alone.pop(key, ())) > 1
            self.arrived_before.pop(key, None)

    def describe_cause(self) -> str:
        """Returns a sentence about a sample that was alone in too many lost engines; empty if none was."""
        for key, engines in self.alone.items():
            if len(engines) >= MAX_ATTEMPTS + self.innocent:
                others = self.arrived - self.arrived_before[key]
                cause = (
                    f"{others} others came since it was lost first, so it is probably the cause"
                    if others
                    else "No other came since it was lost first, so the engines may be the cause as well"
                )
                return (
                    f"{', '.join(engines)} were lost one after the other, while each had no sample but {key[1]} of "
                    f"prompt {key[0]}. {cause}. The same command tries again from the last checkpoint"
                )
        return ""
