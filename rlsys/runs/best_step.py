"""The best step so far, by a metric of metrics.jsonl."""

import difflib
import math
from dataclasses import dataclass, replace

from rlsys.types import Metrics


@dataclass(frozen=True)
class BestStep:
    """`BestStep("eval/all/accuracy")`; `BestStep("-kl")` where less is better; `BestStep("")` where no step is kept as the best."""

    metric: str = ""
    step: int = -1
    value: float = -math.inf  # the larger, the better

    def after(self, step: int, metrics: Metrics) -> "BestStep":
        """This step if it is better than all before, else the best one before it. Steps without the metric do not count."""
        if (name := self.find_metric(metrics)) is None:
            return self
        value = -metrics[name] if self.metric.startswith("-") else metrics[name]
        return replace(self, step=step, value=value) if value > self.value else self

    def find_metric(self, metrics: Metrics) -> str | None:
        """The metric's name in this step. Where there is one source, its own accuracy stands for eval/all/accuracy."""
        name = self.metric.removeprefix("-")
        if name in metrics:
            return name
        _, over_all, rest = name.partition("eval/all/")
        sources = [n for n in metrics if n.startswith("eval/") and n.partition("/")[2].partition("/")[2] == rest]
        return sources[0] if over_all and len(sources) == 1 else None

    def explain_missing(self, metrics: Metrics) -> str:
        """What is wrong if an evaluated step lacks the metric; empty if nothing is."""
        name = self.metric.removeprefix("-")
        if not name.startswith("eval/") or self.find_metric(metrics):
            return ""
        known = sorted(n for n in metrics if n.startswith("eval/"))
        close = difflib.get_close_matches(name, known, 3, 0.0)
        instead = f"it has {', '.join(close)}" if known else "eval.datasets is empty"
        return f"checkpoint.keep_best: no evaluation has a metric {name}; {instead}."
