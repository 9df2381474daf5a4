"""Decides which engine gets which request. Pending requests wait in the driver until an engine has room.

An engine gets the sequences that it decodes at the same time and a small reserve, so that it never waits for the
driver. Near the end it gets no reserve: a request that waits in one engine could run in another. The samples of a group
go to one engine, which computes their prompt once. When no whole group is left, engines with room take requests from
groups that other engines have started.
"""

from collections import deque
from collections.abc import Mapping

from rlsys.types import Request

RESERVE_DIVISOR = 4  # an engine's reserve is its `max_running` divided by this


class RequestScheduler:
    """`RequestScheduler(requests, max_running=256)`, then `assign({"rollout-0": 300})` when samples are finished."""

    def __init__(self, requests: list[Request], max_running: int):
        self.max_running, self.reserve = max_running, max(1, max_running // RESERVE_DIVISOR)
        self.engine_count = self.waiting_count = 0
        self.waiting_groups: deque[deque[Request]] = deque()  # no engine has started these
        self.started_groups: dict[str, deque[Request]] = {}  # by engine: what is left of its current group
        self.requeue(requests)

    def requeue(self, requests: list[Request]) -> None:
        """Puts requests at the front of the queue, because those of a lost engine have waited before."""
        groups: dict[str, deque[Request]] = {}
        for r in requests:
            groups.setdefault(r.uid, deque()).append(r)
        self.waiting_groups.extendleft(reversed(groups.values()))
        self.waiting_count += len(requests)

    def clear(self) -> None:
        """Drops all requests that no engine has."""
        self.waiting_groups.clear()
        self.started_groups.clear()
        self.waiting_count = 0

    def assign(self, running: Mapping[str, int]) -> dict[str, list[Request]]:
        """Returns the requests each engine gets now. The next group goes to the engine with the fewest running samples.

        `running` holds the number of samples in each engine. The first call names all engines, later calls those that
        finished some.
        """
        self.engine_count = max(self.engine_count, len(running))
        running, assigned = dict(running), dict[str, list[Request]]()
        limit = self.max_running + self.reserve * (self.waiting_count > self.reserve * self.engine_count)
        # An engine with less than half of the reserve free gets nothing yet: a message for each sample costs too much.
        done: set[str] = set()  # engines for which no request is left
        while with_room := [n for n in running if (limit - running[n]) * 2 >= self.reserve and n not in done]:
            name = min(with_room, key=lambda n: running[n])
            requests = self.next_requests(name, limit - running[name])
            if not requests:
                done.add(name)
                continue
            assigned.setdefault(name, []).extend(requests)
            running[name] += len(requests)
            self.waiting_count -= len(requests)
        return assigned

    def next_requests(self, name: str, room: int) -> list[Request]:
        """Takes up to `room` requests of one group for this engine."""
        if not self.started_groups.get(name):
            if self.waiting_groups:
                self.started_groups[name] = self.waiting_groups.popleft()
            elif largest := max(self.started_groups.values(), key=len, default=None):
                self.started_groups[name] = split_half(largest)
        group = self.started_groups.get(name, deque())
        return [group.popleft() for _ in range(min(room, len(group)))]


def split_half(group: deque[Request]) -> deque[Request]:
    """Removes the second half of a group, the larger one, and returns it."""
    requests = list(group)
    middle = len(requests) // 2
    group.clear()
    group.extend(requests[:middle])
    return deque(requests[middle:])
