"""Who samples what: requests wait in the driver, and go to engines as these have room.

An engine holds what it decodes at once and a little more, so that it never waits for the driver; towards the end it holds no more
than that, because what waits in one engine could be decoded by another. A group stays together, because its prompt is then computed
once; only when no whole group is left do engines with room take from what others have begun.
"""

from collections import deque
from collections.abc import Mapping

from rlsys.types import Request

RESERVE = 4  # an engine's reserve is this part of what it decodes at once


class Dispatch:
    """`Dispatch(requests, at_once=256)`, then `deal({"rollout-0": 0, "rollout-1": 300})` whenever engines hold less than before."""

    def __init__(self, requests: list[Request], at_once: int):
        self.at_once, self.reserve = at_once, max(1, at_once // RESERVE)
        self.engines = self.left = 0  # left: requests that wait
        self.waiting: deque[deque[Request]] = deque()  # groups that no engine has begun
        self.begun: dict[str, deque[Request]] = {}  # the rest of the group that each engine is at
        self.put_back(requests)

    def put_back(self, requests: list[Request]) -> None:
        """In front: they have waited before."""
        groups: dict[str, deque[Request]] = {}
        for r in requests:
            groups.setdefault(r.uid, deque()).append(r)
        self.waiting.extendleft(reversed(groups.values()))
        self.left += len(requests)

    def clear(self) -> None:
        self.waiting.clear()
        self.begun.clear()
        self.left = 0

    def deal(self, holding: Mapping[str, int]) -> dict[str, list[Request]]:
        """What each engine is given now, group by group to the one that holds least; `holding` has how many each one holds.

        All engines are named at first; later those that hold less than before are enough.
        """
        self.engines = max(self.engines, len(holding))
        holding, dealt = dict(holding), dict[str, list[Request]]()
        most = self.at_once + self.reserve * (self.left > self.reserve * self.engines)  # that an engine holds
        while open_to := [n for n in holding if (most - holding[n]) * 2 >= self.reserve]:
            name = min(open_to, key=lambda n: holding[n])
            share = self.take(name, most - holding[name])
            if not share:
                break
            dealt.setdefault(name, []).extend(share)
            holding[name] += len(share)
            self.left -= len(share)
        return dealt

    def take(self, name: str, room: int) -> list[Request]:
        """Of one group."""
        if not self.begun.get(name):
            if self.waiting:
                self.begun[name] = self.waiting.popleft()
            elif rest := max(self.begun.values(), key=len, default=None):
                self.begun[name], kept = halved(rest)
                rest.clear()
                rest.extend(kept)
        group = self.begun.get(name, deque())
        return [group.popleft() for _ in range(min(room, len(group)))]


def halved(rest: deque[Request]) -> tuple[deque[Request], list[Request]]:
    """Who steals takes the larger half, from behind."""
    requests = list(rest)
    middle = len(requests) // 2
    return deque(requests[middle:]), requests[:middle]
