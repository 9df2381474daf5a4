"""What befell a run: its events in words, each at the step during which it came."""

from dataclasses import dataclass
from typing import Any

TONES = ("problem", "warning", "note", "quiet")  # quiet: what happens in every run
KINDS = {
    "start": ("quiet", "started"),
    "begin": ("quiet", "began to train"),
    "agreement": ("quiet", "engines and policy were compared"),
    "sync": ("quiet", "engines took new weights"),
    "checkpoint": ("quiet", "checkpoint"),
    "done": ("quiet", "done"),
    "resume": ("note", "went on from a checkpoint"),
    "stop": ("warning", "stopped"),
    "restart": ("warning", "the run started itself again"),
    "replaced": ("warning", "a worker was replaced"),
    "reward failure": ("warning", "a reward verdict failed"),
    "weights did not arrive": ("warning", "an engine had other weights than the policy"),
    "skipped update": ("problem", "an update was skipped"),
    "stall": ("problem", "a worker stalled"),
}
REQUESTED_STOP = "asked to stop"  # the cause of a stop that is nobody's fault


@dataclass(frozen=True)
class RunEvent:
    """Happening(step=17, time=1732222222.1, kind="replaced", tone="warning", title="a worker was replaced", facts={"worker": …})"""

    step: int  # during which it came; 0: before the first
    time: float  # seconds since 1970
    kind: str
    tone: str
    title: str
    facts: dict[str, Any]


def parse_events(events: list[dict[str, Any]]) -> list[RunEvent]:
    """Events of `events.jsonl`, in their order. One without a step of its own came during the step after the newest weights."""
    found, done = [], -1
    for event in events:
        facts = {k: v for k, v in event.items() if k not in ("event", "time", "step")}
        kind, at = str(event.get("event", "")), float(event.get("time", 0.0))
        tone, title = KINDS.get(kind, ("note", kind or "something without a name"))
        if kind in ("begin", "resume"):
            done = int(event.get("step", 0))
        elif kind == "sync":
            done = int(event.get("version", done))
        if kind == "stop" and facts.get("cause") != REQUESTED_STOP:
            tone, title = "problem", "ended with an error"
        own = event.get("step", done if kind == "sync" else done + 1)
        found.append(RunEvent(int(own), at, kind, tone, title, facts))
    return found


def last_ending(found: list[RunEvent]) -> RunEvent | None:
    """What ended the run, if its last start has ended."""
    for h in reversed(found):
        if h.kind in ("done", "stop"):
            return h
        if h.kind in ("start", "begin", "resume", "restart"):
            return None
    return None
