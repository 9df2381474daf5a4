"""Reads the timeline of a run: how busy each process was, and a trace that a browser shows.

`write_trace` writes the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open. It has a process per worker and
one for the weight syncs, a lane for each thing that goes on at the same time, and below each engine a lane for each
sample in flight.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.errors import ConfigError
from rlsys.runs.directory import read_lines, write_user_file

SYNC = ("sync", "send", "take")  # what the driver, the ranks and the engines do while weights travel
BLOCK = 1 << 20  # bytes of a file that are read first, where only its end is needed
JITTER_S = 50e-6  # by which a span may seem to outlast the one that contains it


@dataclass(frozen=True)
class Span:
    """Span("policy-0", "update", start=1732222222.125, seconds=0.5, facts={"packs": 3, "tokens": 4096})"""

    worker: str
    name: str
    start: float  # seconds since 1970
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_line(cls, worker: str, line: dict[str, Any]) -> "Span":
        return cls(worker, line.pop("span"), line.pop("at"), line.pop("s"), line)

    @property
    def end(self) -> float:
        return self.start + self.seconds


def read_spans(run: Path, since: float | None = None) -> list[Span]:
    """Returns all spans of a run by their start.

    With `since`, reads each file only from its end: all spans that ended later, and perhaps some more.
    """
    logs = run / "logs"
    spans = []
    for worker in {file.name.partition(".spans")[0] for file in [*logs.glob("*.spans"), *logs.glob("*.spans.before")]}:
        for name in (f"{worker}.spans", f"{worker}.spans.before"):
            of_file = _read_from_end(logs / name, worker, since)
            spans += of_file
            if _reaches_back(of_file, since):
                break
    return sorted(spans, key=lambda s: (s.start, -s.seconds))


def _read_from_end(file: Path, worker: str, since: float | None) -> list[Span]:
    """Reads a file from its end, as far back as needed. Spans stand in the order in which they ended."""
    size = file.stat().st_size if file.is_file() else 0
    length = BLOCK if since is not None else size
    while True:
        spans = [Span.from_line(worker, line) for line in read_lines(file, length)]
        if length >= size or _reaches_back(spans, since):
            return spans
        length *= 2


def _reaches_back(spans: list[Span], since: float | None) -> bool:
    return since is not None and any(s.end <= since for s in spans)


def busy_seconds(spans: Iterable[Span], begin: float, end: float) -> float:
    """The seconds between `begin` and `end` that at least one of the spans covers."""
    total, covered_until = 0.0, begin
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, min(s.end, end) - max(s.start, covered_until))
        covered_until = max(covered_until, min(s.end, end))
    return total


def write_trace(run: Path, target: Path) -> int:
    """Writes the trace of a run. Returns the number of spans and samples in it."""
    spans = read_spans(run)
    if not spans:
        raise ConfigError(
            f"{run} has no timeline: nothing is recorded in {run / 'logs'}/*.spans. A run begins one with its first "
            "worker."
        )
    events = trace_events(spans)
    write_user_file(target, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return sum(e["ph"] == "X" for e in events)


def trace_events(spans: list[Span]) -> list[dict[str, Any]]:
    """Returns Chrome's trace events: spans ("X") in microseconds since the first, and names of processes and lanes."""
    zero = min(s.start for s in spans)
    events: list[dict[str, Any]] = []
    workers = sorted({s.worker for s in spans}, key=lambda name: (name != "driver", name))
    for process, name in enumerate([*workers, "syncs"]):
        syncs = name == "syncs"
        events.append(name_event("process_name", name, process, 0))
        titled_lanes: list[tuple[str, list[list[Span]]]] = []
        for worker in workers:
            row = [s for s in spans if s.worker == worker and (s.name in SYNC if syncs else worker == name)]
            titled_lanes.append((worker, assign_lanes(row, fits_inside)))
            if not syncs:
                titled_lanes.append(("sample", assign_lanes(sample_spans(row), lane_is_free)))
        lane = 0
        for title, lanes in titled_lanes:
            for number, members in enumerate(lanes):
                lane_name = f"{title} {number}" if len(lanes) > 1 else title
                events.append(name_event("thread_name", lane_name, process, lane))
                events += [complete_event(s, zero, process, lane) for s in members]
                lane += 1
    return events


def sample_spans(row: list[Span]) -> list[Span]:
    """Returns a span for every sample that the spans of engines list."""
    return [
        Span(s.worker, f"{uid}/{index}", s.start, seconds, {"tokens": tokens})
        for s in row
        for uid, index, seconds, tokens in s.facts.get("samples", ())
    ]


def assign_lanes(row: list[Span], fits: Callable[[list[Span], Span], bool]) -> list[list[Span]]:
    """Puts each span into the first lane where it fits. `fits` gets the lane's unfinished spans, and the new one."""
    lanes: list[list[Span]] = []
    unfinished: list[list[Span]] = []  # by lane, the innermost last
    for s in sorted(row, key=lambda s: (s.start, -s.seconds)):
        for lane, open_spans in zip(lanes, unfinished, strict=True):
            while open_spans and open_spans[-1].end <= s.start:
                open_spans.pop()
            if fits(open_spans, s):
                lane.append(s)
                open_spans.append(s)
                break
        else:
            lanes.append([s])
            unfinished.append([s])
    return lanes


def fits_inside(open_spans: list[Span], s: Span) -> bool:
    """True if the span is part of the innermost unfinished one, or if there is none."""
    return not open_spans or s.end <= open_spans[-1].end + JITTER_S


def lane_is_free(open_spans: list[Span], s: Span) -> bool:
    return not open_spans


def name_event(kind: str, name: str, process: int, lane: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def complete_event(s: Span, zero: float, process: int, lane: int) -> dict[str, Any]:
    facts = {k: len(v) if k in ("requests", "samples") else v for k, v in s.facts.items()}
    times = {"ts": round((s.start - zero) * 1e6, 1), "dur": round(s.seconds * 1e6, 1)}
    return {"ph": "X", "name": s.name, "pid": process, "tid": lane, **times, "args": facts}
