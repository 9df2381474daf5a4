"""The best step so far, by a figure of metrics.jsonl."""

import difflib
import math
from dataclasses import dataclass

from rlsys.types import Metrics


@dataclass
class BestStep:
    """`Best("eval/all/accuracy")`, or `Best("-kl")` where less is better, or `Best("")` where nobody asks."""

    figure: str
    step: int = -1
    value: float = -math.inf  # of what is to be large

    def update(self, step: int, found: Metrics) -> bool:
        """Whether this step is better than all before it; it is the best then. Steps without the figure do not count."""
        if (name := self.find_metric(found)) is None:
            return False
        value = -found[name] if self.figure.startswith("-") else found[name]
        if not value > self.value:
            return False
        self.step, self.value = step, value
        return True

    def find_metric(self, found: Metrics) -> str | None:
        """Of the figure in this step, if it has it. Where there is one source, eval/all/accuracy is its own."""
        name = self.figure.removeprefix("-")
        if name in found:
            return name
        _, all_of_them, rest = name.partition("eval/all/")
        sources = [n for n in found if n.startswith("eval/") and n.partition("/")[2].partition("/")[2] == rest]
        return sources[0] if all_of_them and len(sources) == 1 else None

    def explain_missing(self, found: Metrics) -> str:
        """What is wrong where this step, an evaluated one, should have the figure and does not."""
        name = self.figure.removeprefix("-")
        if not name.startswith("eval/") or self.find_metric(found):
            return ""
        there = sorted(n for n in found if n.startswith("eval/"))
        close = difflib.get_close_matches(name, there, 3, 0.0)
        instead = f"it has {', '.join(close)}" if there else "eval.datasets is empty"
        return f"checkpoint.keep_best: no evaluation has a figure {name}; {instead}."
