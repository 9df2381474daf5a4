"""The best step so far, by a figure of metrics.jsonl."""

import math
from dataclasses import dataclass

from rlsys.types import Metrics


@dataclass
class Best:
    """`Best("eval/all/accuracy")`, or `Best("-kl")` where less is better, or `Best("")` where nobody asks."""

    figure: str
    step: int = -1
    value: float = -math.inf  # of what is to be large

    def beaten(self, step: int, found: Metrics) -> bool:
        """Whether this step is better than all before it; it is the best then. Steps without the figure do not count."""
        name = self.figure.removeprefix("-")
        if not name or name not in found:
            return False
        value = -found[name] if self.figure.startswith("-") else found[name]
        if not value > self.value:
            return False
        self.step, self.value = step, value
        return True
