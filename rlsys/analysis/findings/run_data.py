"""What a run has left behind, as checks look at it, and what a check says."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlsys.analysis.run_events import RunEvent, parse_events
from rlsys.config.schema import Config

MIN_STEPS = 8  # steps, before begin and end are compared
RECENT_STEPS = 10  # steps that "of late" means
MIN_RISE = 0.05  # of the mean reward, or of an accuracy: what counts as one

SampleFilter = dict[str, Any]  # of the report's samples: {"failure": "timeout"}


@dataclass(frozen=True)
class Finding:
    """Finding("warning", "Completions are cut more often", "…", figures=("length/truncated",), steps=(61, 80))"""

    tone: str  # problem | warning | note
    title: str
    text: str  # what was seen, why it matters, what may help
    figures: tuple[str, ...] = ()  # names in metrics.jsonl that show it
    steps: tuple[int, int] | None = None  # where to look
    samples: SampleFilter | None = None  # which samples show it
    check: str = ""  # which of CHECKS found it


@dataclass(frozen=True)
class RunData:
    """What a run has left behind. `busy` is the share of the last steps in which a worker was at work."""

    metrics: list[dict[str, float]]  # metrics.jsonl
    events: list[RunEvent] = field(default_factory=list)
    config: Config | None = None  # None: of a version that this one cannot read
    busy_share: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_events(
        cls, lines: list[dict[str, float]], events: list[dict[str, Any]], config: Config | None
    ) -> "RunData":
        return cls(lines, parse_events(events), config)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever a line has a finite one."""
        return [(int(x["step"]), v) for x in self.metrics if (v := finite_value(x, name)) is not None]

    def trend(self, name: str) -> "Trend | None":
        """Its begin and its end, where there are enough steps to tell them apart."""
        found = self.series(name)
        if len(found) < MIN_STEPS:
            return None
        size = max(len(found) // 4, 2)
        return Trend(found[:size], found[-size:])

    def recent_mean(self, name: str) -> float | None:
        values = [v for _, v in self.series(name)[-RECENT_STEPS:]]
        return sum(values) / len(values) if values else None

    def held_out_names(self, figure: str) -> list[str]:
        """Its name for each source: ["eval/easy/accuracy", "eval/hard/accuracy"]"""
        names = sorted({n for line in self.metrics for n in line if n.startswith("eval/") and n.endswith(f"/{figure}")})
        return [n for n in names if n != f"eval/all/{figure}"] if len(names) > 1 else names

    def held_out_accuracies(self) -> dict[str, list[dict[str, float]]]:
        """By source, the lines in which it was evaluated."""
        return {
            n: [line for line in self.metrics if finite_value(line, n) is not None]
            for n in self.held_out_names("accuracy")
        }


@dataclass(frozen=True)
class Trend:
    """The first and the last quarter of a series."""

    begin: list[tuple[int, float]]
    end: list[tuple[int, float]]

    @property
    def before(self) -> float:
        return sum(v for _, v in self.begin) / len(self.begin)

    @property
    def after(self) -> float:
        return sum(v for _, v in self.end) / len(self.end)

    @property
    def steps(self) -> tuple[int, int]:
        return self.end[0][0], self.end[-1][0]

    @property
    def noise(self) -> float:
        """Standard error of after − before."""
        parts = ((self.begin, self.before), (self.end, self.after))
        return math.sqrt(sum(sum((v - m) ** 2 for _, v in s) / (len(s) - 1) / len(s) for s, m in parts))

    @property
    def rises(self) -> bool:
        """By more than noise, and by enough to speak of."""
        return self.after - self.before > max(MIN_RISE, 2 * self.noise)


Findings = Iterator[Finding]


def finite_value(line: dict[str, Any], name: str) -> float | None:
    """What a line says, where that is a finite number: a line that somebody else has written may have anything."""
    value = line.get(name)
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def as_percent(part: float) -> str:
    """0.1234 -> "12.3 %" """
    return f"{float(f'{100 * part:.3g}'):g} %"


def describe_steps(numbers: Any) -> str:
    """ "step 3" or "steps 3, 4, 9 and 17 more" """
    steps = sorted(set(numbers))
    shown = [str(s) for s in steps[:4]]
    if len(steps) == 1:
        return f"step {shown[0]}"
    if len(steps) > 4:
        return f"steps {', '.join(shown)} and {len(steps) - 4} more"
    return f"steps {', '.join(shown[:-1])} and {shown[-1]}"
