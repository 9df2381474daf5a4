"""Compares old and new rewards of the same samples: what changed, and what that would mean for training."""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlsys.runs.samples import SavedSample
from rlsys.types import Verdict

MAX_SHOWN = 5  # of the disagreements
REWARD_TOLERANCE = 1e-6  # rewards are stored in single precision


@dataclass
class RewardComparison:
    """What changed among some samples. Sums and changes count the samples that both rewards judged."""

    samples: int = 0
    judged: int = 0  # by both
    changed: int = 0
    old_sum: float = 0.0
    new_sum: float = 0.0
    old_square_sum: float = 0.0
    new_square_sum: float = 0.0
    product_sum: float = 0.0  # of old × new
    flipped: int = 0  # samples whose reward has moved to the other side of its group's mean
    groups: int = 0  # with at least two samples that both judged
    taught_before: int = 0  # groups whose old rewards differ
    teach_now: int = 0  # groups whose new rewards differ
    start_teaching: int = 0  # groups where only the new ones differ
    stop_teaching: int = 0  # groups where only the old ones differ
    failures: Counter[str] = field(default_factory=Counter)
    recovered: int = 0  # samples that had no score, and now have one

    def __add__(self, other: "RewardComparison") -> "RewardComparison":
        return RewardComparison(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation; None where one of the two rewards is constant."""
        if self.judged < 2:
            return None
        n = self.judged
        old_variance = self.old_square_sum / n - (self.old_sum / n) ** 2
        new_variance = self.new_square_sum / n - (self.new_sum / n) ** 2
        if min(old_variance, new_variance) <= REWARD_TOLERANCE**2:
            return None
        covariance = self.product_sum / n - self.old_sum * self.new_sum / n**2
        return covariance / math.sqrt(old_variance * new_variance)


def compare_rewards(saved: list[SavedSample], verdicts: list[Verdict]) -> RewardComparison:
    """Compares the samples of one file. Samples of an evaluation have no advantages, and count as teaching nothing."""
    training = any(s.advantage is not None for s in saved)
    pairs = [(s.sample.uid, s.verdict.score, v.score) for s, v in zip(saved, verdicts, strict=True)]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for uid, before, after in pairs:
        if before is not None and after is not None:
            groups[uid].append((before, after))
    result = RewardComparison(samples=len(pairs), failures=Counter(v.failure for v in verdicts if v.failure))
    result.recovered = sum(before is None and after is not None for _, before, after in pairs)
    for members in groups.values():
        old, new = np.array(members, dtype=np.float64).T
        result.judged += len(old)
        result.changed += int((np.abs(new - old) > REWARD_TOLERANCE).sum())
        result.old_sum += float(old.sum())
        result.new_sum += float(new.sum())
        result.old_square_sum += float(old @ old)
        result.new_square_sum += float(new @ new)
        result.product_sum += float(old @ new)
        if training and len(old) > 1:
            count_teaching(result, old, new)
    return result


def count_teaching(result: RewardComparison, old: NDArray[np.float64], new: NDArray[np.float64]) -> None:
    """Counts whether one group teaches: whether its rewards differ.  [G], [G]"""
    taught_before, teaches_now = np.ptp(old) > REWARD_TOLERANCE, np.ptp(new) > REWARD_TOLERANCE
    result.groups += 1
    result.taught_before += int(taught_before)
    result.teach_now += int(teaches_now)
    result.start_teaching += int(teaches_now and not taught_before)
    result.stop_teaching += int(taught_before and not teaches_now)
    result.flipped += int((side_of_mean(old) * side_of_mean(new) < 0).sum())


def side_of_mean(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """The side of their mean on which rewards lie: -1, 0 or 1.  [G] -> [G]"""
    gap = rewards - rewards.mean()
    return np.where(np.abs(gap) > REWARD_TOLERANCE, np.sign(gap), 0)


class Disagreements:
    """Keeps the samples on which old and new reward differ most, one per text."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Path, SavedSample, Verdict]] = []
        self.seen_texts: set[tuple[str, str]] = set()
        self.count = 0  # of samples that were put on the heap; ties go to the earlier one

    def add(self, file: Path, saved: SavedSample, verdict: Verdict) -> None:
        if saved.verdict.score is None or verdict.score is None:
            return
        gap, texts = abs(verdict.score - saved.verdict.score), (saved.prompt.text, saved.sample.text)
        too_small = gap <= REWARD_TOLERANCE or (len(self.heap) == MAX_SHOWN and gap <= self.heap[0][0])
        if too_small or texts in self.seen_texts:
            return
        self.count += 1
        self.seen_texts.add(texts)
        heapq.heappush(self.heap, (gap, -self.count, file, saved, verdict))
        if len(self.heap) > MAX_SHOWN:
            heapq.heappop(self.heap)

    def largest_first(self) -> Iterator[tuple[Path, SavedSample, Verdict]]:
        for _, _, file, saved, verdict in sorted(self.heap, key=lambda entry: entry[:2], reverse=True):
            yield file, saved, verdict
