"""Workers that do not need each other: one that is lost is replaced, and brought to where it was.

call("start", …, keep=True)   every worker answers; who is lost over it is replaced and asked again
replace("rollout-1", why)     another process takes its place, and is told again all that was to be kept
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.runs.errors import WorkerLost
from workers.supervision.process_registry import kill_actors
from workers.supervision.watchdog import Watchdog

MAX_ATTEMPTS = 3  # workers that may be lost one after the other in the same place


class ReplaceableWorkers:
    """`Crew(["rollout-0", "rollout-1"], spawn, watch)`; `spawn(name)` starts the actor of that name.

    `before(lost)` is called before others take their places, and raises if that would be in vain; `then(names)` when they have come
    to where the others are, as far as what was kept goes.
    """

    def __init__(
        self,
        names: list[str],
        spawn: Callable[[str], Any],
        watchdog: Watchdog,
        before_replace: Callable[[dict[str, WorkerLost]], None] | None = None,
        after_replace: Callable[[list[str]], None] | None = None,
    ):
        self.spawn, self.watchdog, self.before_replace, self.after_replace = (
            spawn,
            watchdog,
            before_replace,
            after_replace,
        )
        self.lock = threading.RLock()  # held while places change hands: engines may be asked by two threads at once
        self.actors = {name: spawn(name) for name in names}
        self.replayed_calls: dict[
            str, tuple[tuple[Any, ...], str, float]
        ] = {}  # what a new worker is told, in this order

    def call(
        self,
        method: str,
        *arguments: Any,
        doing: str,
        limit_s: float = 0,
        replay: bool = False,
        only: list[str] | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        concurrent_calls: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answers of every worker, or of some, by name. `beside` are calls of others without which these do not end, nor do
        they without these: with one try the first worker that is lost ends all of it."""
        found: dict[str, Any] = {}
        names, others = only or list(self.actors), dict(concurrent_calls or {})
        for attempt in range(1, max_attempts + 1):
            with self.lock:
                asked = {n: self.actors[n] for n in names if n not in found}
                calls = {n: getattr(actor, method).remote(*arguments) for n, actor in asked.items()}
            lost: dict[str, WorkerLost] = {}
            waiting = {n: ref for n, ref in others.items() if n not in found}
            for name, answer in self.watchdog.outcomes(calls | waiting, doing, limit_s):
                if isinstance(answer, WorkerLost) and name not in others and max_attempts > 1:
                    lost[name] = answer
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    found[name] = answer
            if not lost:
                break
            if attempt == max_attempts:
                raise next(iter(lost.values()))
            self.replace(lost, asked)
        if replay:
            self.replayed_calls[method] = arguments, doing, limit_s
        return {name: found[name] for name in [*names, *others]}

    def replace(self, lost: dict[str, WorkerLost], asked: dict[str, Any]) -> None:
        """Other processes take the places of these, and come to where they were. `asked` are the actors that were lost.

        Unless the run is over, or Ray is lost, which is what ended them.
        """
        with self.lock:
            if lost := {n: why for n, why in lost.items() if self.actors[n] is asked[n]}:  # who is still in its place
                self._replace(lost)

    def _replace(self, lost: dict[str, WorkerLost]) -> None:
        if self.before_replace:
            self.before_replace(lost)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self.watchdog.stop.raise_if_stopped()
            for name, why in lost.items():
                first, _, more = str(why).partition("\n")
                self.watchdog.note(f"{first}; another one takes its place")
                self.watchdog.event("replaced", worker=name, cause=first, log=more)
            kill_actors({name: self.actors[name] for name in lost}, self.watchdog.logs)
            for name in lost:
                self.actors[name] = self.spawn(name)
            try:
                for method, (arguments, doing, limit_s) in list(self.replayed_calls.items()):
                    self.call(
                        method, *arguments, doing=f"{doing} again", limit_s=limit_s, only=list(lost), max_attempts=1
                    )
                break
            except WorkerLost as why:
                if attempt == MAX_ATTEMPTS:
                    raise
                lost = dict.fromkeys(lost, why)
        if self.after_replace:
            self.after_replace(list(lost))
