"""Synthetic data for `rlsys bench`: prompts of random tokens, completions of given lengths, and random rewards."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from rlsys.errors import ConfigError
from rlsys.interfaces import Rollout
from rlsys.seeds import derive_seed
from rlsys.types import Prompt, Request, Sample

SPREAD = 1.0  # standard deviation of the logarithm of lengths: a tenth is longer than 3.6 times the median


def random_reward(completion: str) -> float:
    """A reward between 0 and 1: as good as random, always the same for the same text, and different for different texts."""
    return zlib.crc32(completion.encode(errors="replace")) / 2**32


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[Prompt]:
    """Prompts of random tokens. No two begin alike, so engines can share no prefix between groups."""
    rng = np.random.default_rng(derive_seed(seed, "bench"))
    tokens = rng.integers(0, vocabulary, (count, length)).tolist()
    return [Prompt(f"bench:{i + 1}", "bench", "", row, {}) for i, row in enumerate(tokens)]


class CompletionLengths:
    """Draws the length of each completion, in tokens. A sample always has the same length.

    With `mean` = `longest` all have that length. Otherwise lengths are log-normal around the mean, with a long tail
    that is cut at `longest`.
    """

    def __init__(self, mean: float, longest: int, seed: int = 0):
        if not 1 <= mean <= longest:
            raise ConfigError(
                f"--ragged: the mean ({mean:g}) must be between 1 and the maximum ({longest}), as in --ragged 60,128."
            )
        self.mean, self.longest, self.seed = mean, longest, seed
        self.log_median = self.find_log_median()

    def find_log_median(self) -> float:
        """Finds the median with which lengths, cut to 1 … `longest`, have the mean."""
        normal = NormalDist()
        grid = np.array([normal.inv_cdf((i + 0.5) / 2000) for i in range(2000)])
        low, high = -5.0, math.log(self.longest) + 5.0
        for _ in range(60):
            middle = (low + high) / 2
            mean = np.clip(np.exp(middle + SPREAD * grid), 1, self.longest).mean()
            low, high = (middle, high) if mean < self.mean else (low, middle)
        return low

    def length_for(self, uid: str, index: int) -> int:
        if self.mean == self.longest:
            return self.longest
        share = (derive_seed(self.seed, "length", uid, index) + 0.5) / 2**63
        length = math.exp(self.log_median + SPREAD * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))
        return round(min(max(length, 1.0), float(self.longest)))


class FixedLengthRollout:
    """Engines whose completions have given lengths. Implements `rlsys.interfaces.Rollout`."""

    def __init__(self, rollout: Rollout, lengths: CompletionLengths):
        self.rollout, self.lengths = rollout, lengths

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        lengths = [self.lengths.length_for(r.uid, r.index) for r in requests]
        return self.rollout.generate(
            [replace(r, max_new_tokens=n, ignore_end=True) for r, n in zip(requests, lengths, strict=True)]
        )

    def stop_early(self) -> None:
        self.rollout.stop_early()

    def wake(self) -> None:
        self.rollout.wake()

    def sleep(self) -> None:
        self.rollout.sleep()


class NamedSamples(FixedLengthRollout):
    """The text of each sample begins with its name, so no two have the same reward: random tokens may have no text at all."""

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        batches = super().generate(requests)  # engines begin now, not when the first batch is asked for
        return ([replace(s, text=f"{s.uid}/{s.index} {s.text}") for s in samples] for samples in batches)
