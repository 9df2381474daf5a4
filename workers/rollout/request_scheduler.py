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

    def __init__(self, requests: list[Request], max_running: int):
        self.max_running, self.reserve = max_running, max(1, max_running // RESERVE)
        self.engines = self.waiting_count = 0  # left: requests that wait
        self.waiting_groups: deque[deque[Request]] = deque()  # groups that no engine has begun
        self.started_groups: dict[str, deque[Request]] = {}  # the rest of the group that each engine is at
        self.requeue(requests)

    def requeue(self, requests: list[Request]) -> None:
        """In front: they have waited before."""
        groups: dict[str, deque[Request]] = {}
        for r in requests:
            groups.setdefault(r.uid, deque()).append(r)
        self.waiting_groups.extendleft(reversed(groups.values()))
        self.waiting_count += len(requests)

    def clear(self) -> None:
        self.waiting_groups.clear()
        self.started_groups.clear()
        self.waiting_count = 0

    def assign(self, holding: Mapping[str, int]) -> dict[str, list[Request]]:
        """What each engine is given now, group by group to the one that holds least; `holding` has how many each one holds.

        All engines are named at first; later those that hold less than before are enough.
        """
        self.engines = max(self.engines, len(holding))
        holding, dealt = dict(holding), dict[str, list[Request]]()
        most = self.max_running + self.reserve * (
            self.waiting_count > self.reserve * self.engines
        )  # that an engine holds
        while open_to := [n for n in holding if (most - holding[n]) * 2 >= self.reserve]:
            name = min(open_to, key=lambda n: holding[n])
            share = self.next_requests(name, most - holding[name])
            if not share:
                break
            dealt.setdefault(name, []).extend(share)
            holding[name] += len(share)
            self.waiting_count -= len(share)
        return dealt

    def next_requests(self, name: str, room: int) -> list[Request]:
        """Of one group."""
        if not self.started_groups.get(name):
            if self.waiting_groups:
                self.started_groups[name] = self.waiting_groups.popleft()
            elif rest := max(self.started_groups.values(), key=len, default=None):
                self.started_groups[name], kept = split_half(rest)
                rest.clear()
                rest.extend(kept)
        group = self.started_groups.get(name, deque())
        return [group.popleft() for _ in range(min(room, len(group)))]


def split_half(rest: deque[Request]) -> tuple[deque[Request], list[Request]]:
    """Who steals takes the larger half, from behind."""
    requests = list(rest)
    middle = len(requests) // 2
    return deque(requests[middle:]), requests[:middle]
