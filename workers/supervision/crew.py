"""Workers that do not need each other: one that is lost is replaced, and brought to where it was.

call("start", …, keep=True)   every worker answers; who is lost over it is replaced and asked again
replace("rollout-1", why)     another process takes its place, and is told again all that was to be kept
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlsys.runs.errors import WorkerLost
from workers.supervision.places import end
from workers.supervision.waiting import Watch

TRIES = 3  # workers that may be lost one after the other in the same place


class Crew:
    """`Crew(["rollout-0", "rollout-1"], spawn, watch)`; `spawn(name)` starts the actor of that name.

    `before(lost)` is called before others take their places, and raises if that would be in vain; `then(names)` when they have come
    to where the others are, as far as what was kept goes.
    """

    def __init__(
        self,
        names: list[str],
        spawn: Callable[[str], Any],
        watch: Watch,
        before: Callable[[dict[str, WorkerLost]], None] | None = None,
        then: Callable[[list[str]], None] | None = None,
    ):
        self.spawn, self.watch, self.before, self.then = spawn, watch, before, then
        self.lock = threading.RLock()  # held while places change hands: engines may be asked by two threads at once
        self.actors = {name: spawn(name) for name in names}
        self.kept: dict[str, tuple[tuple[Any, ...], str, float]] = {}  # what a new worker is told, in this order

    def call(
        self,
        method: str,
        *arguments: Any,
        doing: str,
        limit_s: float = 0,
        keep: bool = False,
        only: list[str] | None = None,
        tries: int = TRIES,
        beside: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answers of every worker, or of some, by name. `beside` are calls of others without which these do not end, nor do
        they without these: with one try the first worker that is lost ends all of it."""
        found: dict[str, Any] = {}
        names, others = only or list(self.actors), dict(beside or {})
        for attempt in range(1, tries + 1):
            with self.lock:
                asked = {n: self.actors[n] for n in names if n not in found}
                calls = {n: getattr(actor, method).remote(*arguments) for n, actor in asked.items()}
            lost: dict[str, WorkerLost] = {}
            waiting = {n: ref for n, ref in others.items() if n not in found}
            for name, answer in self.watch.outcomes(calls | waiting, doing, limit_s):
                if isinstance(answer, WorkerLost) and name not in others and tries > 1:
                    lost[name] = answer
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    found[name] = answer
            if not lost:
                break
            if attempt == tries:
                raise next(iter(lost.values()))
            self.replace(lost, asked)
        if keep:
            self.kept[method] = arguments, doing, limit_s
        return {name: found[name] for name in [*names, *others]}

    def replace(self, lost: dict[str, WorkerLost], asked: dict[str, Any]) -> None:
        """Other processes take the places of these, and come to where they were. `asked` are the actors that were lost.

        Unless the run is over, or Ray is lost, which is what ended them.
        """
        with self.lock:
            if lost := {n: why for n, why in lost.items() if self.actors[n] is asked[n]}:  # who is still in its place
                self._replace(lost)

    def _replace(self, lost: dict[str, WorkerLost]) -> None:
        if self.before:
            self.before(lost)
        for attempt in range(1, TRIES + 1):
            self.watch.stop.raise_if_stopped()
            for name, why in lost.items():
                first, _, more = str(why).partition("\n")
                self.watch.note(f"{first}; another one takes its place")
                self.watch.event("replaced", worker=name, cause=first, log=more)
            end({name: self.actors[name] for name in lost}, self.watch.logs)
            for name in lost:
                self.actors[name] = self.spawn(name)
            try:
                for method, (arguments, doing, limit_s) in list(self.kept.items()):
                    self.call(method, *arguments, doing=f"{doing} again", limit_s=limit_s, only=list(lost), tries=1)
                break
            except WorkerLost as why:
                if attempt == TRIES:
                    raise
                lost = dict.fromkeys(lost, why)
        if self.then:
            self.then(list(lost))
