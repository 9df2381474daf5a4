"""Old and new rewards of the same samples: what changed, and what it would have meant for training."""

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

MAX_SHOWN = 5  # disagreements
REWARD_TOLERANCE = 1e-6  # rewards are stored in single precision


@dataclass
class RewardComparison:
    """What changed among some samples. Means and changes are of those that both rewards judged."""

    samples: int = 0
    judged: int = 0  # by both
    changed: int = 0
    old_sum: float = 0.0  # sum
    new_sum: float = 0.0
    old_square_sum: float = 0.0
    new_square_sum: float = 0.0
    product_sum: float = 0.0
    flipped: int = 0  # samples whose reward lay on one side of its group's mean, and now lies on the other
    groups: int = 0  # of at least two samples that both judged
    taught_before: int = 0  # of them: old rewards differ
    teach_now: int = 0  # new rewards differ
    start_teaching: int = 0  # the new ones only
    stop_teaching: int = 0  # the old ones only
    failures: Counter[str] = field(default_factory=Counter)
    recovered: int = 0  # had no score, and have one

    def __add__(self, other: "RewardComparison") -> "RewardComparison":
        return RewardComparison(**{name: getattr(self, name) + getattr(other, name) for name in vars(self)})

    @property
    def correlation(self) -> float | None:
        """Pearson's; None where one of both rewards is always the same."""
        if self.judged < 2:
            return None
        n = self.judged
        spread_old = self.old_square_sum / n - (self.old_sum / n) ** 2
        spread_new = self.new_square_sum / n - (self.new_sum / n) ** 2
        if min(spread_old, spread_new) <= REWARD_TOLERANCE**2:
            return None
        return (self.product_sum / n - self.old_sum * self.new_sum / n**2) / math.sqrt(spread_old * spread_new)


def compare_rewards(saved: list[SavedSample], verdicts: list[Verdict]) -> RewardComparison:
    """Of the samples of one file. Those of an evaluation, which have no advantages, taught nothing and would not."""
    training = any(s.advantage is not None for s in saved)
    pairs = [(s.sample.uid, s.verdict.score, v.score) for s, v in zip(saved, verdicts, strict=True)]
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for uid, before, after in pairs:
        if before is not None and after is not None:
            groups[uid].append((before, after))
    found = RewardComparison(samples=len(pairs), failures=Counter(v.failure for v in verdicts if v.failure))
    found.recovered = sum(before is None and after is not None for _, before, after in pairs)
    for members in groups.values():
        old, new = np.array(members, dtype=np.float64).T
        found.judged += len(old)
        found.changed += int((np.abs(new - old) > REWARD_TOLERANCE).sum())
        found.old_sum += float(old.sum())
        found.new_sum += float(new.sum())
        found.old_square_sum += float(old @ old)
        found.new_square_sum += float(new @ new)
        found.product_sum += float(old @ new)
        if training and len(old) > 1:
            taught, teach = np.ptp(old) > REWARD_TOLERANCE, np.ptp(new) > REWARD_TOLERANCE
            found.groups += 1
            found.taught_before += int(taught)
            found.teach_now += int(teach)
            found.start_teaching += int(teach and not taught)
            found.stop_teaching += int(taught and not teach)
            found.flipped += int((side_of_mean(old) * side_of_mean(new) < 0).sum())
    return found


def side_of_mean(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """On which side of their mean rewards lie: -1, 0 or 1.  [G] -> [G]"""
    gap = rewards - rewards.mean()
    return np.where(np.abs(gap) > REWARD_TOLERANCE, np.sign(gap), 0)


class Disagreements:
    """The samples that both rewards see most differently; of equal texts one."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Path, SavedSample, Verdict]] = []
        self.seen: set[tuple[str, str]] = set()
        self.number = 0

    def add(self, file: Path, saved: SavedSample, verdict: Verdict) -> None:
        if saved.verdict.score is None or verdict.score is None:
            return
        gap, texts = abs(verdict.score - saved.verdict.score), (saved.prompt.text, saved.sample.text)
        if gap <= REWARD_TOLERANCE or texts in self.seen or (len(self.heap) == MAX_SHOWN and gap <= self.heap[0][0]):
            return
        self.number += 1
        self.seen.add(texts)
        heapq.heappush(self.heap, (gap, -self.number, file, saved, verdict))
        if len(self.heap) > MAX_SHOWN:
            heapq.heappop(self.heap)

    def largest_first(self) -> Iterator[tuple[Path, SavedSample, Verdict]]:
        for _, _, file, saved, verdict in sorted(self.heap, key=lambda entry: entry[:2], reverse=True):
            yield file, saved, verdict
