"""How long the completions of a prompt will be, judged by earlier ones: the longest are started first.

A forecast decides when a sample starts and never what it is, so no checkpoint holds it.
"""

from collections.abc import Sequence

from rlsys.types import Prompt, Sample

NEW_WEIGHT = 0.1  # of a new completion in the running mean of its source


class LengthForecast:
    """`observe` finished completions, then `longest_first` for the prompts to sample next."""

    def __init__(self) -> None:
        self.mean_by_row: dict[str, float] = {}  # of the row's latest completions
        self.mean_by_source: dict[str, float] = {}

    def observe(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
        lengths: dict[str, list[int]] = {}
        for s in samples:
            lengths.setdefault(s.uid, []).append(len(s.tokens))
        for p in prompts:
            if counts := lengths.get(p.uid):
                mean = sum(counts) / len(counts)
                self.mean_by_row[row_of(p.uid)] = mean
                before = self.mean_by_source.get(p.source, mean)
                self.mean_by_source[p.source] = before + NEW_WEIGHT * (mean - before)

    def expected(self, prompt: Prompt) -> float:
        """Returns how many tokens are expected; 0 if neither the row nor its source is known."""
        return self.mean_by_row.get(row_of(prompt.uid), self.mean_by_source.get(prompt.source, 0.0))

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Sorts by expected length. Equal ones keep their order."""
        return sorted(prompts, key=self.expected, reverse=True)


def row_of(uid: str) -> str:
    """Returns the row that a prompt is a use of.  "zigzag:17#2" -> "zigzag:17" """
    return uid.rpartition("#")[0] or uid
