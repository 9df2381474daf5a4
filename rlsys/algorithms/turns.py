"""Credit for turns: each turn gets the reward that came after it, and is compared with the same turn of other episodes.

    scores of the turns 0.5 0 1, reward 2.5 in all    returns 2.5 2 2

The estimator gets turns in place of samples. Its groups are the turns with the same number in a group of episodes, as
in Zeng et al. 2025, arXiv 2505.11821.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rlsys.types import Sample


class TurnRows(NamedTuple):
    """One row for each turn of the samples, in order."""

    returns: Tensor  # [R] the reward without what earlier turns have scored
    groups: Tensor  # [R] one id for the turns with the same number in a group
    lengths: Tensor  # [R] own tokens


def turn_rows(rewards: Tensor, groups: Tensor, samples: Sequence[Sample], use_scores: bool = True) -> TurnRows:
    """Makes a row of each turn. `rewards` [N] are those of whole episodes. Without `use_scores` every turn has its episode's whole reward."""
    returns, numbers, lengths = [], [], []
    most = max((len(s.observations) for s in samples), default=0) + 1
    for reward, group, sample in zip(rewards.tolist(), groups.tolist(), samples, strict=True):
        sizes, scores = turn_lengths(sample), sample.episode.turn_scores if sample.episode and use_scores else []
        earlier = [0.0, *accumulate(scores)] if scores else [0.0] * len(sizes)
        returns += [reward - scored for scored in earlier[: len(sizes)]]
        numbers += [group * most + turn for turn in range(len(sizes))]
        lengths += sizes
    return TurnRows(
        torch.tensor(returns, dtype=torch.float64), torch.tensor(numbers, dtype=torch.int64), torch.tensor(lengths)
    )


def turn_lengths(sample: Sample) -> list[int]:
    """Returns the model's tokens in each turn. A single answer is one turn."""
    return [len(own) for _, own in sample.turns]
