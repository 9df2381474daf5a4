"""How the driver waits for workers: it reports stalled workers, and of several errors it raises the root cause.

outcomes(calls, doing)   each worker's answer or error, as they come: for workers that are replaced one by one
gather(calls, doing)     all answers, or one exception: for workers that only work together
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import ConfigError, NodeLost, WorkerFailed, WorkerLost, WrongWeights, describe_disk_error
from rlsys.runs.stopping import StopSignal
from rlsys.threads import REAL, Threads
from workers.fleet.cluster import Call, CallFailed, Cluster
from workers.fleet.ray_cluster import RayCluster
from workers.fleet.stacks import collect_stacks, innermost_calls

POLL_S = 0.5  # between two checks for stalled workers
LOG_TAIL_BYTES = 16_384
RELATED_FAILURES_S = 3.0  # after a failure, others of the same cause arrive within this time


def ignore_event(kind: str, **facts: Any) -> None:
    pass


@dataclass
class Watchdog:
    """Guards every wait of the driver."""

    logs: Path
    stall_s: float = 1800.0
    stop: StopSignal = field(default_factory=StopSignal)
    note: Callable[[str], None] = print  # shows a sentence on the screen
    event: Callable[..., None] = ignore_event  # writes a line of events.jsonl
    cluster: Cluster = field(default_factory=RayCluster)
    threads: Threads = REAL

    @classmethod
    def from_config(
        cls, config: Config, logs: Path, stop: StopSignal, note: Callable[[str], None], event: Callable[..., None]
    ) -> "Watchdog":
        return cls(logs, config.watchdog.stall_s, stop, note, event)

    def outcomes(self, calls: Mapping[str, Call], doing: str, limit_s: float = 0) -> Iterator[tuple[str, Any]]:
        """`{worker name: call}` → `(name, answer)`, or `(name, WorkerFailed | ConfigError)`, as they come.

        `limit_s` is the deadline for all of them together. Without it, workers stall when none has answered for
        `stall_s`.
        """
        names = {call: name for name, call in calls.items()}
        timer = self.start_timer(limit_s)
        while names:
            ready = self.cluster.wait(list(names), 1, POLL_S)
            for call in ready:
                name = names.pop(call)
                yield name, self.answer_or_error(call, name, doing)
                if not limit_s:
                    timer.reset()
            if not ready and (waited := timer.expired()):
                error = self.report_stall(list(names.values()), doing, waited)
                yield from ((name, error) for name in names.values())
                return

    def gather(self, calls: Mapping[str, Call], doing: str, limit_s: float = 0) -> dict[str, Any]:
        """Returns all answers by name. Of several failures, raises the one that explains the others."""
        answers: dict[str, Any] = {}
        for name, answer in self.outcomes(calls, doing, limit_s):
            if isinstance(answer, Exception):
                others = {n: call for n, call in calls.items() if n not in answers}
                raise max([answer, *self.collect_related_failures(others, doing)], key=failure_severity)
            answers[name] = answer
        return {name: answers[name] for name in calls}

    def collect_related_failures(self, calls: dict[str, Call], doing: str) -> list[Exception]:
        """Returns the failures that arrive within `RELATED_FAILURES_S`."""
        names = {call: name for name, call in calls.items()}
        ready = self.cluster.wait(list(names), len(names), RELATED_FAILURES_S)
        answers = [self.answer_or_error(call, names[call], doing) for call in ready]
        return [a for a in answers if isinstance(a, Exception)]

    def answer_or_error(self, call: Call, name: str, doing: str) -> Any:
        try:
            return self.cluster.answer(call)
        except CallFailed as error:
            return explain_failure(error, name, doing, self.logs)

    def start_timer(self, limit_s: float = 0) -> "StallTimer":
        return StallTimer(limit_s or self.stall_s, self.stop, self.threads)

    def report_stall(self, names: list[str], doing: str, waited_s: float, uids: list[str] | None = None) -> WorkerLost:
        """Reports stalled workers with their stacks, on screen and in events.jsonl. The caller raises the exception."""
        stacks = collect_stacks(names, self.logs)
        sentence = f"{doing}: {', '.join(names)} stalled: no answer for {waited_s:.0f} s"
        if uids:
            first = ", ".join(uids[:3]) + (", …" if len(uids) > 3 else "")
            sentence += f", pending samples of {len(uids)} prompts ({first})"
        self.event("stall", doing=doing, waiting_for=names, seconds=round(waited_s, 1), uids=uids or [], stacks=stacks)
        self.note("\n".join([sentence, *(f"  {name}: {innermost_calls(text)}" for name, text in stacks.items())]))
        sentence += " (watchdog.stall_s; cluster.start_timeout_s while they come up). "
        sentence += f"Their stacks are in events.jsonl, their logs in {self.logs}"
        return WorkerLost(sentence)


class StallTimer:
    """Measures how long a worker has not answered."""

    def __init__(self, limit_s: float, stop: StopSignal, threads: Threads = REAL):
        self.limit_s, self.stop, self.threads = limit_s, stop, threads
        self.reset()

    def reset(self, grace_s: float = 0) -> None:
        """Starts again. `grace_s` is a longer limit for the first answer of a worker that was just started."""
        self.since = self.threads.now() + max(0.0, grace_s - self.limit_s)

    def expired(self) -> float:
        """Seconds without an answer if they are too many, else 0. Raises `StepAbandoned` if the run is ending."""
        self.stop.raise_if_stopped()
        waited = self.threads.now() - self.since
        return waited if waited > self.limit_s else 0.0


def failure_severity(error: Exception) -> int:
    """Ranks failures of one moment.

    A dead worker is the root cause of what its peers raise: their collectives fail with it.
    """
    return 2 if isinstance(error, ConfigError) else int(isinstance(error, WorkerLost))


def explain_failure(error: CallFailed, name: str, doing: str, logs: Path) -> Exception:
    """Returns the root cause of a failed call: the worker's own exception, or the last lines of its log."""
    if (raised := error.raised) is not None:
        if isinstance(raised, ConfigError) or (isinstance(raised, Exception) and describe_disk_error(raised)):
            return raised
        if isinstance(raised, WrongWeights):
            return WrongWeights(f"{doing}: {name} {raised}")
        return WorkerFailed(
            f"{doing}: {name} raised {type(raised).__name__}: {raised}\n{error}\nIts log: {logs / name}.log"
        )
    verb = "died" if error.died else "was lost"
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if "creation task" in first:  # its constructor raised
        return WorkerFailed(f"{doing}: {name} did not come up: {more[-1] if more else first}\n{error}")
    kind = NodeLost if error.node_died else WorkerLost
    return kind(f"{doing}: {name} {verb} ({first})\n{log_tail(logs / f'{name}.log')}")


def log_tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"(no log at {log})"
    with log.open("rb") as file:  # of which a user's function may have printed gigabytes
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        last = file.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()[-lines:]
    return f"Last lines of {log}:\n" + "\n".join("  " + line for line in last)
