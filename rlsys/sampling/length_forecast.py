"""How long the completions of a prompt may become, from those there were: the longest are begun first.

What is expected decides when a sample is begun and never what it is, so none of this is in a checkpoint.
"""

from collections.abc import Sequence

from rlsys.types import Prompt, Sample

LATEST = 0.1  # what a new completion counts in the mean of its source


class LengthForecast:
    """`seen` completions, then `longest_first` for the prompts that are to be sampled next."""

    def __init__(self) -> None:
        self.of_row: dict[str, float] = {}  # the mean of a row's latest completions
        self.of_source: dict[str, float] = {}

    def observe(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
        lengths: dict[str, list[int]] = {}
        for s in samples:
            lengths.setdefault(s.uid, []).append(len(s.tokens))
        for p in prompts:
            if own := lengths.get(p.uid):
                mean = sum(own) / len(own)
                self.of_row[row(p.uid)] = mean
                before = self.of_source.get(p.source, mean)
                self.of_source[p.source] = before + LATEST * (mean - before)

    def expected(self, prompt: Prompt) -> float:
        """In tokens; 0 where neither the row nor its source is known."""
        return self.of_row.get(row(prompt.uid), self.of_source.get(prompt.source, 0.0))

    def longest_first(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those of which the same is expected stay in their order."""
        return sorted(prompts, key=self.expected, reverse=True)


def row(uid: str) -> str:
    """The row that a prompt is a use of.  "zigzag:17#2" -> "zigzag:17" """
    return uid.rpartition("#")[0] or uid
