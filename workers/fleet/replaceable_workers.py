"""A pool of independent workers. A lost worker is replaced, and the replacement replays its setup calls.

call("start", model, …, replay=True)   every worker answers; a worker lost meanwhile is replaced and asked again
replace({"rollout-1": error}, …)       a new process takes the name, and every call made with `replay` is repeated on it
"""

from collections.abc import Callable, Mapping
from typing import Any

from rlsys.errors import WorkerLost
from workers.fleet.process_registry import kill_actors
from workers.fleet.watchdog import Watchdog

MAX_ATTEMPTS = 3  # a call, or a replacement, that loses this many workers in a row fails


class ReplaceableWorkers:
    """`ReplaceableWorkers(["rollout-0", "rollout-1"], spawn, watchdog)`; `spawn(name)` starts the actor of that name.

    `before_replace(lost)` may raise to refuse a replacement. `after_replace(names)` runs once the replayed calls have
    succeeded.
    """

    def __init__(
        self,
        names: list[str],
        spawn: Callable[[str], Any],
        watchdog: Watchdog,
        before_replace: Callable[[dict[str, WorkerLost]], None] | None = None,
        after_replace: Callable[[list[str]], None] | None = None,
    ):
        self.spawn, self.watchdog = spawn, watchdog
        self.before_replace, self.after_replace = before_replace, after_replace
        self.lock = watchdog.threads.lock()  # held while workers are replaced: two threads may call them at once
        self.actors = {name: spawn(name) for name in names}
        self.replayed_calls: dict[str, tuple[tuple[Any, ...], str, float]] = {}  # method → arguments, doing, limit_s
        self.under_way: list[str] = []  # what is called, on any thread

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
        each: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Calls a method of every worker, and returns the answers by name.

        doing             What the call is for, as errors and events name it: "starting the engines".
        limit_s           Deadline for all answers together. 0: a worker stalls after `watchdog.stall_s`.
        replay            Repeats the call on every later replacement, before any other call.
        only              Calls these workers and no others.
        max_attempts      How many times the call is tried when workers are lost. 1: the first loss ends it.
        each              An argument for each worker by name, before the arguments for all.
        concurrent_calls  Started calls of other workers that end only together with this one. Their answers are
                          returned too; the loss of such a worker ends the call.
        """
        answers: dict[str, Any] = {}
        names, others = only or list(self.actors), dict(concurrent_calls or {})
        self.under_way.append(doing)
        try:
            for attempt in range(1, max_attempts + 1):
                with self.lock:
                    actors = {n: self.actors[n] for n in names if n not in answers}
                    calls = {
                        n: self.watchdog.cluster.call(actor, method, *([each[n]] if each else []), *arguments)
                        for n, actor in actors.items()
                    }
                lost: dict[str, WorkerLost] = {}
                calls |= {n: ref for n, ref in others.items() if n not in answers}
                for name, answer in self.watchdog.outcomes(calls, doing, limit_s):
                    if isinstance(answer, WorkerLost) and name not in others and max_attempts > 1:
                        lost[name] = answer
                    elif isinstance(answer, Exception):
                        self.watchdog.stop.raise_if_stopped()  # a stop leaves a replacement half set up, and that one fails
                        raise answer
                    else:
                        answers[name] = answer
                if not lost:
                    break
                if attempt == max_attempts:
                    raise next(iter(lost.values()))
                self.replace(lost, actors)
        finally:
            self.under_way.remove(doing)
        if replay:
            self.replayed_calls[method] = arguments, doing, limit_s
        return {name: answers[name] for name in [*names, *others]}

    def replace(self, lost: dict[str, WorkerLost], actors: dict[str, Any]) -> None:
        """Replaces workers and brings the replacements to the state of the others. `actors` are the lost ones.

        Raises instead if the run is ending, or if Ray is lost: that is what ended the workers.
        """
        with self.lock:
            # Another thread may have replaced a worker already.
            if lost := {name: error for name, error in lost.items() if self.actors[name] is actors[name]}:
                self._replace(lost)

    def _replace(self, lost: dict[str, WorkerLost]) -> None:
        if self.before_replace:
            self.before_replace(lost)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self.watchdog.stop.raise_if_stopped()
            self._report(lost)
            kill_actors(self.watchdog.cluster, {name: self.actors[name] for name in lost}, self.watchdog.logs)
            for name in lost:
                self.actors[name] = self.spawn(name)
            try:
                self._replay(list(lost))
                break
            except WorkerLost as error:
                if attempt == MAX_ATTEMPTS:
                    raise
                lost = dict.fromkeys(lost, error)
        if self.after_replace:
            self.after_replace(list(lost))

    def _replay(self, names: list[str]) -> None:
        for method, (arguments, doing, limit_s) in list(self.replayed_calls.items()):
            self.call(method, *arguments, doing=f"{doing} again", limit_s=limit_s, only=names, max_attempts=1)

    def _report(self, lost: dict[str, WorkerLost]) -> None:
        for name, error in lost.items():
            sentence, _, log = str(error).partition("\n")
            self.watchdog.note(f"{sentence}; it is replaced")
            self.watchdog.event("replaced", worker=name, cause=sentence, log=log)
