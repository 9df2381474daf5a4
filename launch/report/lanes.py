"""What each worker did in the last steps, as lanes: one row of boxes, or several where it did things at the same time."""

from pathlib import Path
from typing import Any

from rlsys.analysis.trace import Span, assign_lanes, busy_seconds, fits_inside, read_spans
from rlsys.runs.directory import read_lines

SHOWN_STEPS = 6  # the last ones
MAX_BOXES = 6000  # boxes; more are too many to look at
TAIL_BYTES = 1 << 20  # bytes of the driver's file in which they are looked for


def worker_lanes(run: Path) -> dict[str, Any] | None:
    """Boxes are [name, begin and length in ms, depth, facts]; steps [number, begin and length in ms, begin since 1970]: one that
    was done again after a restart may be there twice. `busy` is the share of the steps' own time. None where nothing is recorded.
    """
    steps = last_steps(run)
    if not steps:
        return None
    begin, end = steps[0].start, steps[-1].end
    inside = [s for s in read_spans(run, since=begin) if s.end > begin and s.start < end]
    while len(inside) > MAX_BOXES and len(steps) > 1:
        steps = steps[1:]
        begin = steps[0].start
        inside = [s for s in inside if s.end > begin]
    workers: dict[str, list[Span]] = {}
    for s in inside:
        workers.setdefault(s.worker, []).append(s)
    names = sorted({s.name for s in inside})
    number = {name: i for i, name in enumerate(names)}
    return {
        "at": begin,
        "steps": [[s.facts["step"], *_times(s, begin), s.start] for s in steps],
        "names": names,
        "workers": [
            {
                "name": worker,
                "busy": round(sum(busy_seconds(own, s.start, s.end) for s in steps) / sum(s.seconds for s in steps), 4),
                "rows": [_boxes(row, begin, number) for row in assign_lanes(own, fits_inside)],
            }
            for worker, own in sorted(workers.items(), key=lambda w: (w[0] != "driver", w[0]))
        ],
    }


def last_steps(run: Path) -> list[Span]:
    """Those before a pause are not among them: a pause is longer than any step after it, as between a stop and the next start."""
    driver = [Span.from_line("driver", line) for line in read_lines(run / "logs" / "driver.spans", TAIL_BYTES)]
    found: list[Span] = []
    for s in reversed([s for s in driver if s.name == "step" and "step" in s.facts][-SHOWN_STEPS:]):
        if found and found[0].start - s.end > max(after.seconds for after in found):
            break
        found.insert(0, s)
    return found


def _boxes(row: list[Span], zero: float, number: dict[str, int]) -> list[list[Any]]:
    boxes, open_ends = [], list[float]()
    for s in row:
        while open_ends and open_ends[-1] <= s.start:
            open_ends.pop()
        boxes.append([number[s.name], *_times(s, zero), len(open_ends), _facts(s)])
        open_ends.append(s.end)
    return boxes


def _times(s: Span, zero: float) -> tuple[float, float]:
    return round((s.start - zero) * 1e3, 2), round(s.seconds * 1e3, 2)


def _facts(s: Span) -> str:
    """ "packs 3, tokens 4096" """
    told = {k: f"{len(v)}" if isinstance(v, list) else f"{v}" for k, v in s.facts.items()}
    return ", ".join(f"{k} {v}" for k, v in told.items())[:120]
