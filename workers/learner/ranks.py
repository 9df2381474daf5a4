"""Several actors that act as one: the same call on all of them at the same time."""

import threading
from collections.abc import Callable
from typing import Any

from rlsys.config.schema import Config
from rlsys.types import Pack
from workers.supervision.watchdog import Watchdog


class LearnerGroup:
    """The ranks of the policy, or of the critic. `Ranks("policy", ...).all("save", folder)`

    They hold collectives and parts of one state: where one is lost, all are. That is for the whole run to mend.
    """

    def __init__(self, role: str, count: int, config: Config, spawn: Callable[[str], Any], watch: Watchdog):
        self.role, self.config, self.watch = role, config, watch
        self.actors = [spawn(f"{role}-{i}") for i in range(count)]
        self.lock = threading.RLock()  # calls reach all ranks in one order, whichever threads make them

    def start_calls(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The same call, with the same arguments, not waited for."""
        with self.lock:
            return {f"{self.role}-{i}": getattr(a, method).remote(*arguments) for i, a in enumerate(self.actors)}

    def call_all(self, method: str, *arguments: Any, doing: str = "", timeout_s: float = 0) -> list[Any]:
        """The same, and the answers by rank."""
        return self._answers(self.start_calls(method, *arguments), doing or f"{self.role} {method}", timeout_s)

    def scatter(self, method: str, packs: list[list[Pack]], *arguments: Any) -> list[Any]:
        """The same call, each rank with its own packs."""
        with self.lock:
            calls = {
                f"{self.role}-{i}": getattr(a, method).remote(own, *arguments)
                for i, (a, own) in enumerate(zip(self.actors, packs, strict=True))
            }
        return self._answers(calls, f"{self.role} {method}", 0)

    def start(self, *arguments: Any) -> None:
        """Rank 0 names a meeting point, then all meet there."""
        limit, doing = self.config.cluster.start_timeout_s, f"starting the {self.role}"
        first = {f"{self.role}-0": self.actors[0].where.remote()}
        [where] = self.watch.gather(first, doing, limit).values()
        self.call_all("start", *where, *arguments, doing=doing, timeout_s=limit)

    def _answers(self, calls: dict[str, Any], doing: str, timeout_s: float) -> list[Any]:
        return list(self.watch.gather(calls, doing, timeout_s).values())
