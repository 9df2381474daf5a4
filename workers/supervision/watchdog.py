"""How the driver waits for workers: each wait has a name, a worker that says nothing is found, and the root cause comes first.

outcomes(calls, doing)   each worker's answer, or what became of it, as they come: for workers that are replaced one by one
gather(calls, doing)     all answers, or one exception for all: for workers that only work together
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from rlsys.config.schema import Config, ConfigError
from rlsys.runs.errors import WorkerFailed, WorkerLost, WrongWeights, describe_disk_error
from rlsys.runs.stopping import StopSignal
from workers.supervision.stacks import collect_stacks, innermost_calls

POLL_S = 0.5  # between two looks at who is late
RELATED_FAILURES_S = 3.0  # in which more workers fail of the same cause: the one that died explains those that raised


def ignore_event(kind: str, **facts: Any) -> None:
    pass


@dataclass
class Watchdog:
    """Over every wait of the driver."""

    logs: Path
    stall_s: float = 1800.0
    abort: bool = False  # whether a stalled worker ends the run instead of being replaced
    stop: StopSignal = field(default_factory=StopSignal)
    note: Callable[[str], None] = print
    event: Callable[..., None] = ignore_event

    @classmethod
    def from_config(
        cls, config: Config, logs: Path, stop: StopSignal, note: Callable[[str], None], event: Callable[..., None]
    ) -> "Watchdog":
        return cls(logs, config.watchdog.stall_s, config.watchdog.action == "abort", stop, note, event)

    def outcomes(self, calls: Mapping[str, Any], doing: str, limit_s: float = 0) -> Iterator[tuple[str, Any]]:
        """`{worker name: object ref}` → `(name, answer)`, or `(name, WorkerFailed | ConfigError)`, as they come.

        `limit_s` is for all of them together; without it a worker has stalled when none has answered for `stall_s`.
        """
        names = {ref: name for name, ref in calls.items()}
        pending, patience = list(names), self.start_timer(limit_s)
        while pending:
            ready, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
            for ref in ready:
                yield names[ref], self.result_or_error(ref, names[ref], doing)
                if not limit_s:
                    patience.reset()
            if not ready and (waited := patience.expired()):
                late = [names[ref] for ref in pending]
                lost = self.report_stall(late, doing, waited)
                yield from ((name, lost) for name in late)
                return

    def gather(self, calls: Mapping[str, Any], doing: str, limit_s: float = 0) -> dict[str, Any]:
        """All answers by name. Of several failures the one that explains the others is raised."""
        found: dict[str, Any] = {}
        failed: list[Exception] = []
        for name, answer in self.outcomes(calls, doing, limit_s):
            if isinstance(answer, Exception):
                failed.append(answer)
                break
            found[name] = answer
        if failed:
            rest = {name: ref for name, ref in calls.items() if name not in found}
            failed += self.collect_related_failures(rest, doing)
            raise max(failed, key=failure_severity)
        return {name: found[name] for name in calls}

    def collect_related_failures(self, calls: dict[str, Any], doing: str) -> list[Exception]:
        """What else fails within a moment."""
        names = {ref: name for name, ref in calls.items()}
        ready, _ = ray.wait(list(names), num_returns=len(names), timeout=RELATED_FAILURES_S)
        answers = [self.result_or_error(ref, names[ref], doing) for ref in ready]
        return [a for a in answers if isinstance(a, Exception)]

    def result_or_error(self, ref: Any, name: str, doing: str) -> Any:
        try:
            return ray.get(ref)
        except RayError as error:
            return explain_failure(error, name, doing, self.logs)

    def start_timer(self, limit_s: float = 0) -> "StallTimer":
        return StallTimer(limit_s or self.stall_s, self.stop)

    def report_stall(
        self, names: list[str], doing: str, waited_s: float, uids: list[str] | None = None
    ) -> WorkerFailed:
        """Tells who is late and what they are at, on the screen and in events.jsonl; the exception is for the caller."""
        found = collect_stacks(names, self.logs)
        sentence = f"{doing}: nothing heard from {', '.join(names)} for {waited_s:.0f} s"
        if uids:
            first = ", ".join(uids[:3]) + (", …" if len(uids) > 3 else "")
            sentence += f", awaiting samples of {len(uids)} prompts ({first})"
        self.event("stall", doing=doing, waiting_for=names, seconds=round(waited_s, 1), uids=uids or [], stacks=found)
        self.note("\n".join([sentence, *(f"  {name} is at  {innermost_calls(text)}" for name, text in found.items())]))
        what = f"{sentence} (watchdog.stall_s; cluster.start_timeout_s while they come up). Their stacks are in events.jsonl, their logs in {self.logs}"
        return WorkerFailed(what) if self.abort else WorkerLost(what)


class StallTimer:
    """How long nothing has been heard."""

    def __init__(self, limit_s: float, stop: StopSignal):
        self.limit_s, self.stop = limit_s, stop
        self.reset()

    def reset(self, first_s: float = 0) -> None:
        """Anew; `first_s` is how long the next word may take where a worker has only just been started."""
        self.since = time.monotonic() + max(0.0, first_s - self.limit_s)

    def expired(self) -> float:
        """Seconds since the last word if they are too many, else 0. Raises `Abandoned` if the run is to end."""
        self.stop.raise_if_stopped()
        waited = time.monotonic() - self.since
        return waited if waited > self.limit_s else 0.0


def failure_severity(error: Exception) -> int:
    """Who died explains who raised, because its peers' collectives fail too."""
    return 2 if isinstance(error, ConfigError) else int(isinstance(error, WorkerLost))


def explain_failure(error: RayError, name: str, doing: str, logs: Path) -> Exception:
    """The root cause of a failed call: the worker's own exception, or what its log says last."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, ConfigError) or describe_disk_error(error.cause):
            return error.cause
        if isinstance(error.cause, WrongWeights):
            return WrongWeights(f"{doing}: {name} {error.cause}")
        return WorkerFailed(
            f"{doing}: {name} raised {type(error.cause).__name__}: {error.cause}\n{error}\nIts log: {logs / name}.log"
        )
    what = "died" if isinstance(error, RayActorError) else "was lost"
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if "creation task" in first:  # it raised before it could be asked anything
        return WorkerFailed(f"{doing}: {name} did not come up: {more[-1] if more else first}\n{error}")
    return WorkerLost(f"{doing}: {name} {what} ({first})\n{log_tail(logs / f'{name}.log')}")


def log_tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"(no log at {log})"
    return f"Last lines of {log}:\n" + "\n".join(
        "  " + line for line in log.read_text(errors="replace").splitlines()[-lines:]
    )
