"""What `rlsys bench` trains on in place of data: prompts of random tokens, completions as long as is wished, rewards by chance."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from rlsys.config.schema import ConfigError
from rlsys.interfaces import Rollout
from rlsys.seeds import derive_seed
from rlsys.types import Prompt, Request, Sample

SPREAD = 1.0  # deviation of the logarithm of ragged lengths: the longest tenth has more than 3.6 times the median


def coin(completion: str) -> float:
    """0 or 1, as good as by chance, and the same for the same text."""
    return float(zlib.crc32(completion.encode(errors="replace")) & 1)


def random_prompts(count: int, length: int, symbols: int, seed: int) -> list[Prompt]:
    """Random tokens: no two prompts begin alike, so nothing is shared between groups."""
    rng = np.random.default_rng(derive_seed(seed, "bench"))
    tokens = rng.integers(0, symbols, (count, length)).tolist()
    return [Prompt(f"bench:{i + 1}", "bench", "", own, {}) for i, own in enumerate(tokens)]


class CompletionLengths:
    """How many tokens each completion has: `mean`, or around it with a long tail up to `longest`; always the same for a sample."""

    def __init__(self, mean: float, longest: int, seed: int = 0):
        if not 1 <= mean <= longest:
            raise ConfigError(
                f"--ragged: the mean ({mean:g}) must be between 1 and the maximum ({longest}), as in --ragged 60,128."
            )
        self.mean, self.longest, self.seed = mean, longest, seed
        self.log_median = self.find_log_median()

    def find_log_median(self) -> float:
        """With which lengths, cut at both ends, have the mean."""
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
        drawn = math.exp(self.log_median + SPREAD * NormalDist().inv_cdf(min(max(share, 1e-12), 1 - 1e-12)))
        return round(min(max(drawn, 1.0), float(self.longest)))


class FixedLengthRollout:
    """Engines whose completions are as long as they are told. Implements `rlsys.interfaces.Rollout`."""

    def __init__(self, rollout: Rollout, lengths: CompletionLengths):
        self.rollout, self.lengths = rollout, lengths

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        return self.rollout.generate(
            [replace(r, max_new_tokens=self.lengths.length_for(r.uid, r.index), ignore_end=True) for r in requests]
        )

    def stop_early(self) -> None:
        self.rollout.stop_early()

    def wake(self) -> None:
        self.rollout.wake()

    def sleep(self) -> None:
        self.rollout.sleep()
