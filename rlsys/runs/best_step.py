"""The best step so far, by a metric of metrics.jsonl."""

import difflib
import math
from dataclasses import dataclass, replace

from rlsys.types import Metrics


@dataclass(frozen=True)
class BestStep:
    """`BestStep("eval/all/accuracy")`; `BestStep("-kl")` if less is better; `BestStep("")` if no best step is kept."""

    metric: str = ""
    step: int = -1
    value: float = -math.inf  # the larger, the better

    def after(self, step: int, metrics: Metrics) -> "BestStep":
        """Returns this step if it is better than all before, else `self`. Steps without the metric do not count."""
        if (name := self.find_metric(metrics)) is None:
            return self
        value = -metrics[name] if self.metric.startswith("-") else metrics[name]
        return replace(self, step=step, value=value) if value > self.value else self

    def find_metric(self, metrics: Metrics) -> str | None:
        """Returns the metric's name in this step, or None. With one source, eval/all/accuracy means that source's."""
        name = self.metric.removeprefix("-")
        if name in metrics:
            return name
        _, over_all, rest = name.partition("eval/all/")
        sources = [n for n in metrics if n.startswith("eval/") and n.partition("/")[2].partition("/")[2] == rest]
        return sources[0] if over_all and len(sources) == 1 else None

    def explain_missing(self, metrics: Metrics) -> str:
        """Explains why an evaluated step lacks the metric; empty if it has it."""
        name = self.metric.removeprefix("-")
        if not name.startswith("eval/") or self.find_metric(metrics):
            return ""
        known = sorted(n for n in metrics if n.startswith("eval/"))
        close = difflib.get_close_matches(name, known, 3, 0.0)
        instead = f"it has {', '.join(close)}" if known else "eval.datasets is empty"
        return f"checkpoint.keep_best: no evaluation has a metric {name}; {instead}."
