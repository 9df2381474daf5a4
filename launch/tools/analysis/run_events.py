"""The events of a run in words, each with the step during which it came."""

from dataclasses import dataclass
from typing import Any

TONES = ("problem", "warning", "note", "quiet")  # quiet: comes in every run
KINDS = {
    "start": ("quiet", "started"),
    "begin": ("quiet", "began to train"),
    "agreement": ("quiet", "engines and policy were compared"),
    "sync": ("quiet", "engines took new weights"),
    "checkpoint": ("quiet", "checkpoint"),
    "done": ("quiet", "done"),
    "resume": ("note", "resumed from a checkpoint"),
    "stop": ("warning", "stopped"),
    "restart": ("warning", "the run restarted itself"),
    "replaced": ("warning", "a worker was replaced"),
    "reward failure": ("warning", "a reward verdict failed"),
    "wrong weights": ("warning", "an engine had other weights than the policy"),
    "skipped update": ("problem", "an update was skipped"),
    "stall": ("problem", "a worker stalled"),
}
REQUESTED_STOP = "stop requested"  # the cause of a stop that somebody requested


@dataclass(frozen=True)
class RunEvent:
    """RunEvent(17, 1732222222.1, "replaced", "warning", "a worker was replaced", facts={"worker": "rollout-0"})"""

    step: int  # during which it came; 0: before the first
    time: float  # seconds since 1970
    kind: str
    tone: str
    title: str
    facts: dict[str, Any]


def parse_events(lines: list[dict[str, Any]]) -> list[RunEvent]:
    """Parses lines of `events.jsonl`. An event without a step came during the step after the newest weights."""
    events, newest_version = [], -1
    for line in lines:
        facts = {k: v for k, v in line.items() if k not in ("event", "time", "step")}
        kind, time = str(line.get("event", "")), float(line.get("time", 0.0))
        tone, title = KINDS.get(kind, ("note", kind or "an event without a name"))
        if kind in ("begin", "resume"):
            newest_version = int(line.get("step", 0))
        elif kind == "sync":
            newest_version = int(line.get("version", newest_version))
        if kind == "stop" and facts.get("cause") != REQUESTED_STOP:
            tone, title = "problem", "ended with an error"
        step = line.get("step", newest_version if kind == "sync" else newest_version + 1)
        events.append(RunEvent(int(step), time, kind, tone, title, facts))
    return events


def last_ending(events: list[RunEvent]) -> RunEvent | None:
    """Returns the event that ended the run, or None if its last start has not ended."""
    for event in reversed(events):
        if event.kind in ("done", "stop"):
            return event
        if event.kind in ("start", "begin", "resume", "restart"):
            return None
    return None
