"""From a batch to mini-batches: which groups learn together, and what each of their tokens weighs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlsys.config import Config
from rlsys.packing import token_weights
from rlsys.seeds import seed_of
from rlsys.types import Batch, Floats


@dataclass(frozen=True)
class MiniBatch:
    number: int  # of the optimizer update, from the start of the run
    members: list[int]  # samples of the batch
    weights: Floats  # of the members' tokens, end to end


def mini_batches(config: Config, step: int, batch: Batch) -> Iterator[MiniBatch]:
    """`updates_per_step` mini-batches of whole groups, in each of `epochs_per_step` passes over the batch."""
    t = config.trainer
    number = (step - 1) * t.updates_per_step * t.epochs_per_step
    for epoch in range(t.epochs_per_step):
        rng = np.random.default_rng(seed_of(config.run.seed, step, epoch, "mini-batches"))
        for groups in np.split(rng.permutation(len(batch.prompts)), t.updates_per_step):
            members = np.flatnonzero(np.isin(batch.groups, groups)).tolist()
            yield MiniBatch(number, members, weights(config, batch, members))
            number += 1


def weights(config: Config, batch: Batch, members: list[int]) -> Floats:
    """What each token of a mini-batch weighs in its loss; nothing, in a completion that was cut, with `overlong.mask`."""
    a = config.algorithm
    lengths = torch.from_numpy(batch.lengths[members])
    masked = [config.overlong.mask and batch.samples[m].finish == "length" for m in members]
    cut = torch.tensor(masked, dtype=torch.bool)
    counted = token_weights(
        torch.where(cut, 0, lengths),
        a.normalize,
        constant=a.constant or config.rollout.max_new_tokens,
        control_weight=a.control_weight,
    )
    found = torch.zeros(int(lengths.sum()))
    found[(~cut).repeat_interleave(lengths)] = counted
    return found.numpy()
