"""What each worker did in the last steps: a row of boxes, or several for things that go on at the same time."""

from pathlib import Path
from typing import Any

from launch.tools.analysis.trace import Span, assign_lanes, busy_seconds, fits_inside, read_spans
from rlsys.runs.directory import read_lines

SHOWN_STEPS = 6
MAX_BOXES = 6000  # with more, fewer steps are shown
TAIL_BYTES = 1 << 20  # of the driver's file, in which the last steps are searched


def worker_lanes(run: Path) -> dict[str, Any] | None:
    """Returns the lanes of the last steps, or None if no timeline is recorded.

    A box is [name, start and length in ms, depth, facts]. A step is [number, start and length in ms, start since 1970];
    one that was repeated after a restart may appear twice. `busy` is the share of the steps' time in which a worker was
    busy.
    """
    steps = last_steps(run)
    if not steps:
        return None
    begin, end = steps[0].start, steps[-1].end
    spans = [s for s in read_spans(run, since=begin) if s.end > begin and s.start < end]
    while len(spans) > MAX_BOXES and len(steps) > 1:
        steps = steps[1:]
        begin = steps[0].start
        spans = [s for s in spans if s.end > begin]
    workers: dict[str, list[Span]] = {}
    for s in spans:
        workers.setdefault(s.worker, []).append(s)
    names = sorted({s.name for s in spans})
    number = {name: i for i, name in enumerate(names)}
    step_seconds = sum(s.seconds for s in steps)
    return {
        "at": begin,
        "steps": [[s.facts["step"], *_times(s, begin), s.start] for s in steps],
        "names": names,
        "workers": [
            {
                "name": worker,
                "busy": round(sum(busy_seconds(of_worker, s.start, s.end) for s in steps) / step_seconds, 4),
                "rows": [_boxes(row, begin, number) for row in assign_lanes(of_worker, fits_inside)],
            }
            for worker, of_worker in sorted(workers.items(), key=lambda w: (w[0] != "driver", w[0]))
        ],
    }


def last_steps(run: Path) -> list[Span]:
    """Returns the last steps since a pause, which is a gap longer than any step after it, as after a stop."""
    driver = [Span.from_line("driver", line) for line in read_lines(run / "logs" / "driver.spans", TAIL_BYTES)]
    steps: list[Span] = []
    for s in reversed([s for s in driver if s.name == "step" and "step" in s.facts][-SHOWN_STEPS:]):
        if steps and steps[0].start - s.end > max(later.seconds for later in steps):
            break
        steps.insert(0, s)
    return steps


def _boxes(row: list[Span], zero: float, number: dict[str, int]) -> list[list[Any]]:
    boxes, open_ends = [], list[float]()
    for s in row:
        while open_ends and open_ends[-1] <= s.start:
            open_ends.pop()
        boxes.append([number[s.name], *_times(s, zero), len(open_ends), _facts_text(s)])
        open_ends.append(s.end)
    return boxes


def _times(s: Span, zero: float) -> tuple[float, float]:
    return round((s.start - zero) * 1e3, 2), round(s.seconds * 1e3, 2)


def _facts_text(s: Span) -> str:
    """ "packs 3, tokens 4096" """
    facts = {k: f"{len(v)}" if isinstance(v, list) else f"{v}" for k, v in s.facts.items()}
    return ", ".join(f"{k} {v}" for k, v in facts.items())[:120]
