"""What each worker did in the last steps, as lanes: one row of boxes, or several where it did things at the same time."""

from pathlib import Path
from typing import Any

from rlsys.trace import Span, busy, lanes_of, spans, within

STEPS = 6  # the last ones
MOST = 6000  # boxes; more are too many to look at
NEWEST = 1 << 20  # bytes of each worker's file that are read


def lanes(run: Path) -> dict[str, Any] | None:
    """Boxes are [name, begin and length in ms, depth, facts]; steps [number, begin and length in ms, begin since 1970]: one that
    was done again after a restart is there twice. None where nothing is recorded.
    """
    found = spans(run, NEWEST)
    steps = [s for s in found if s.worker == "driver" and s.name == "step" and "step" in s.facts][-STEPS:]
    if not steps:
        return None
    begin, end = steps[0].at, max(s.end for s in steps)
    inside = [s for s in found if s.end > begin and s.at < end]
    while len(inside) > MOST and len(steps) > 1:
        steps = steps[1:]
        begin = steps[0].at
        inside = [s for s in inside if s.end > begin]
    workers = sorted({s.worker for s in inside}, key=lambda name: (name != "driver", name))
    names = sorted({s.name for s in inside})
    number = {name: i for i, name in enumerate(names)}
    return {
        "at": begin,
        "steps": [[s.facts["step"], *_times(s, begin), s.at] for s in steps],
        "names": names,
        "workers": [
            {
                "name": worker,
                "busy": round(busy([s for s in inside if s.worker == worker], begin, end) / (end - begin), 4),
                "rows": [
                    _boxes(row, begin, number) for row in lanes_of([s for s in inside if s.worker == worker], within)
                ],
            }
            for worker in workers
        ],
    }


def _boxes(row: list[Span], zero: float, number: dict[str, int]) -> list[list[Any]]:
    boxes, open_ends = [], list[float]()
    for s in row:
        while open_ends and open_ends[-1] <= s.at:
            open_ends.pop()
        boxes.append([number[s.name], *_times(s, zero), len(open_ends), _facts(s)])
        open_ends.append(s.end)
    return boxes


def _times(s: Span, zero: float) -> tuple[float, float]:
    return round((s.at - zero) * 1e3, 2), round(s.seconds * 1e3, 2)


def _facts(s: Span) -> str:
    """ "packs 3, tokens 4096" """
    told = {k: f"{len(v)}" if isinstance(v, list) else f"{v}" for k, v in s.facts.items()}
    return ", ".join(f"{k} {v}" for k, v in told.items())[:120]
