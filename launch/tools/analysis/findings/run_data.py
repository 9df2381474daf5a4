"""What the checks of findings read of a run, and what a finding says."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from launch.tools.analysis.run_events import RunEvent, parse_events
from rlsys.config.schema import Config

MIN_STEPS = 8  # before the start and the end of a run are compared
RECENT_STEPS = 10  # that "recent" means
MIN_RISE = 0.05  # of the mean reward or of an accuracy, to count as one

SampleFilter = dict[str, Any]  # of the report's sample browser: {"failure": "timeout"}


@dataclass(frozen=True)
class Finding:
    """Finding("warning", "Completions are cut more often", "…", figures=("length/truncated",), steps=(61, 80))"""

    tone: str  # problem | warning | note
    title: str
    text: str  # what was observed, why it matters, what may help
    figures: tuple[str, ...] = ()  # names in metrics.jsonl that show it
    steps: tuple[int, int] | None = None  # where to look
    samples: SampleFilter | None = None  # which samples show it
    check: str = ""  # the check in CHECKS that reports it


Findings = Iterator[Finding]


@dataclass(frozen=True)
class RunData:
    """A run's metrics, events and configuration. `busy_share` is each worker's share of busy time in the last steps."""

    metrics: list[dict[str, float]]  # lines of metrics.jsonl
    events: list[RunEvent] = field(default_factory=list)
    config: Config | None = None  # None: it cannot be read
    busy_share: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_events(
        cls, metrics: list[dict[str, float]], events: list[dict[str, Any]], config: Config | None
    ) -> "RunData":
        return cls(metrics, parse_events(events), config)

    @property
    def has_episodes(self) -> bool:
        return bool(self.series("episode/turns"))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) for each line with a finite value of the metric."""
        return [(int(line["step"]), v) for line in self.metrics if (v := finite_value(line, name)) is not None]

    def trend(self, name: str) -> "Trend | None":
        """Returns the start and the end of a metric, if there are enough steps to compare them."""
        series = self.series(name)
        if len(series) < MIN_STEPS:
            return None
        size = max(len(series) // 4, 2)
        return Trend(series[:size], series[-size:])

    def recent_mean(self, name: str) -> float | None:
        values = [v for _, v in self.series(name)[-RECENT_STEPS:]]
        return sum(values) / len(values) if values else None

    def held_out_names(self, metric: str) -> list[str]:
        """Returns the names of a held-out metric for each data set: ["eval/easy/accuracy", "eval/hard/accuracy"]"""
        names = sorted({n for line in self.metrics for n in line if n.startswith("eval/") and n.endswith(f"/{metric}")})
        return [n for n in names if n != f"eval/all/{metric}"] if len(names) > 1 else names

    def held_out_accuracies(self) -> dict[str, list[dict[str, float]]]:
        """Returns, by the name of each held-out accuracy, the lines that have it."""
        names = self.held_out_names("accuracy")
        return {n: [line for line in self.metrics if finite_value(line, n) is not None] for n in names}


@dataclass(frozen=True)
class Trend:
    """The first and the last quarter of a series."""

    first: list[tuple[int, float]]
    last: list[tuple[int, float]]

    @property
    def before(self) -> float:
        return sum(v for _, v in self.first) / len(self.first)

    @property
    def after(self) -> float:
        return sum(v for _, v in self.last) / len(self.last)

    @property
    def steps(self) -> tuple[int, int]:
        """The steps of the last quarter."""
        return self.last[0][0], self.last[-1][0]

    @property
    def noise(self) -> float:
        """The standard error of after − before."""
        quarters = ((self.first, self.before), (self.last, self.after))
        return math.sqrt(sum(sum((v - m) ** 2 for _, v in q) / (len(q) - 1) / len(q) for q, m in quarters))

    @property
    def rises(self) -> bool:
        """True if the rise exceeds the noise and `MIN_RISE`."""
        return self.after - self.before > max(MIN_RISE, 2 * self.noise)


def finite_value(line: dict[str, Any], name: str) -> float | None:
    """Returns a finite number, or None for anything else: a line written by another tool may hold anything."""
    value = line.get(name)
    is_finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_finite else None


def as_percent(share: float) -> str:
    """0.1234 -> "12.3 %" """
    return f"{float(f'{100 * share:.3g}'):g} %"


def describe_steps(numbers: Any) -> str:
    """Returns "step 3" or "steps 3, 4, 9, 12 and 17 more"."""
    steps = sorted(set(numbers))
    shown = [str(s) for s in steps[:4]]
    if len(steps) == 1:
        return f"step {shown[0]}"
    if len(steps) > 4:
        return f"steps {', '.join(shown)} and {len(steps) - 4} more"
    return f"steps {', '.join(shown[:-1])} and {shown[-1]}"
