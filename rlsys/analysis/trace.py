"""What `timeline` has recorded of a run, read back: how busy each process was, and a trace that a browser shows.

`write_trace` makes the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each worker and one for the
syncs of weights, a lane for what goes on at the same time, and below each engine a lane for each sample in flight.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlsys.config.schema import ConfigError
from rlsys.runs.directory import read_lines, write_user_file

SYNC = ("sync", "send", "take")  # what the driver, the ranks and the engines do while weights travel
BLOCK = 1 << 20  # bytes of a file that are read at first, where not all of it is needed
JITTER_S = 50e-6  # by which a span may seem to outlast the one it is part of


@dataclass(frozen=True)
class Span:
    """Span("policy-0", "update", at=1732222222.125, seconds=0.5, facts={"packs": 3, "tokens": 4096})"""

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
    """All that is recorded of a run, in the order in which it began; or, read from the end of each file, all that ended after `since`."""
    logs = run / "logs"
    found = []
    for worker in {file.name.partition(".spans")[0] for file in [*logs.glob("*.spans"), *logs.glob("*.spans.before")]}:
        for name in (f"{worker}.spans", f"{worker}.spans.before"):
            own = _newest(logs / name, worker, since)
            found += own
            if _reaches(own, since):
                break
    return sorted(found, key=lambda s: (s.start, -s.seconds))


def _newest(file: Path, worker: str, since: float | None) -> list[Span]:
    """From a file's end, as far back as needed. Spans stand in the order in which they ended."""
    size = file.stat().st_size if file.is_file() else 0
    part = BLOCK if since is not None else size
    while True:
        lines = read_lines(file, part)
        own = [Span.from_line(worker, line) for line in lines]
        if part >= size or _reaches(own, since):
            return own
        part *= 2


def _reaches(own: list[Span], since: float | None) -> bool:
    return since is not None and any(s.end <= since for s in own)


def busy_seconds(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which at least one of the spans went on."""
    total, until = 0.0, begin
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, min(s.end, end) - max(s.start, until))
        until = max(until, min(s.end, end))
    return total


def write_trace(run: Path, target: Path) -> int:
    """Returns how many spans and samples there are."""
    found = read_spans(run)
    if not found:
        raise ConfigError(
            f"{run} has no timeline: nothing is recorded in {run / 'logs'}/*.spans. "
            "Runs of earlier versions have none; a run begins one with its first worker."
        )
    drawn = trace_events(found)
    write_user_file(target, json.dumps({"traceEvents": drawn, "displayTimeUnit": "ms"}, separators=(",", ":")))
    return sum(e["ph"] == "X" for e in drawn)


def trace_events(found: list[Span]) -> list[dict[str, Any]]:
    """Chrome's trace events: complete ones ("X") in microseconds since the first span, and the names of processes and lanes."""
    zero = min(s.start for s in found)
    drawn: list[dict[str, Any]] = []
    workers = sorted({s.worker for s in found}, key=lambda name: (name != "driver", name))
    for process, name in enumerate([*workers, "syncs"]):
        syncs = name == "syncs"
        own = [s for s in found if (s.name in SYNC if syncs else s.worker == name)]
        drawn.append(name_event("process_name", name, process, 0))
        lane = 0
        for worker in workers:
            row = [s for s in own if s.worker == worker]
            for lanes, title in (
                (assign_lanes(row, fits_inside), worker),
                (assign_lanes(sample_spans(row), lane_is_free), "sample"),
            ):
                if title == "sample" and syncs:
                    continue
                for number, members in enumerate(lanes):
                    drawn.append(
                        name_event("thread_name", f"{title} {number}" if len(lanes) > 1 else title, process, lane)
                    )
                    drawn += [complete_event(s, zero, process, lane) for s in members]
                    lane += 1
    return drawn


def sample_spans(row: list[Span]) -> list[Span]:
    """Every sample as a span of its own."""
    return [
        Span(s.worker, f"{uid}/{index}", s.start, end, {"tokens": tokens})
        for s in row
        for uid, index, end, tokens in s.facts.get("samples", ())
    ]


def assign_lanes(row: list[Span], fits: Callable[[list[Span], Span], bool]) -> list[list[Span]]:
    """As few lanes as hold the spans: each goes into the first where it fits."""
    lanes: list[list[Span]] = []
    open_in: list[list[Span]] = []  # by lane: what has not ended yet, the innermost last
    for s in sorted(row, key=lambda s: (s.start, -s.seconds)):
        for lane, still in zip(lanes, open_in, strict=True):
            while still and still[-1].end <= s.start:
                still.pop()
            if fits(still, s):
                lane.append(s)
                still.append(s)
                break
        else:
            lanes.append([s])
            open_in.append([s])
    return lanes


def fits_inside(still: list[Span], s: Span) -> bool:
    """Part of what goes on, or alone."""
    return not still or s.end <= still[-1].end + JITTER_S


def lane_is_free(still: list[Span], s: Span) -> bool:
    return not still


def name_event(kind: str, name: str, process: int, lane: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def complete_event(s: Span, zero: float, process: int, lane: int) -> dict[str, Any]:
    facts = {k: len(v) if k in ("asked", "samples") else v for k, v in s.facts.items()}
    times = {"ts": round((s.start - zero) * 1e6, 1), "dur": round(s.seconds * 1e6, 1)}
    return {"ph": "X", "name": s.name, "pid": process, "tid": lane, **times, "args": facts}
