"""From a batch to mini-batches: which groups learn together, and what each of their tokens weighs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlsys.config.schema import LOSSES, Config
from rlsys.packs.packing import token_weights
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats


@dataclass(frozen=True)
class MiniBatch:
    update: int  # of the optimizer update, from the start of the run
    members: list[int]  # samples of the batch
    weights: Floats  # of the members' tokens, end to end
    zero_advantage_samples: int = 0  # members that were given no weight because nothing in them moves the policy


def split_into_mini_batches(config: Config, step: int, batch: Batch) -> Iterator[MiniBatch]:
    """`updates_per_step` mini-batches of whole groups, in each of `epochs_per_step` passes over the batch."""
    t = config.trainer
    number = (step - 1) * t.updates_per_step * t.epochs_per_step
    for epoch in range(t.epochs_per_step):
        rng = np.random.default_rng(derive_seed(config.run.seed, step, epoch, "mini-batches"))
        for groups in np.split(rng.permutation(len(batch.prompts)), t.updates_per_step):
            members = np.flatnonzero(np.isin(batch.groups, groups)).tolist()
            yield MiniBatch(number, members, loss_weights(config, batch, members))
            number += 1


def loss_weights(config: Config, batch: Batch, members: list[int]) -> Floats:
    """What each token of a mini-batch weighs in its loss; nothing, in a completion that was cut, with `overlong.mask`."""
    a = config.algorithm
    lengths = batch.lengths[members]
    masked = [config.overlong.mask and batch.samples[m].finish == "length" for m in members]
    kept = ~np.array(masked, dtype=bool)
    counted = token_weights(
        torch.from_numpy(lengths * kept),
        a.normalize,
        constant=a.constant or config.rollout.max_new_tokens,
        control_weight=a.control_weight,
    )
    if kept.all():
        return counted.numpy()
    found = np.zeros(lengths.sum(), dtype=np.float32)
    found[np.repeat(kept, lengths)] = counted.numpy()
    return found


def drop_zero_advantage(config: Config, batch: Batch, mini: MiniBatch, columns: Columns) -> MiniBatch:
    """A mini-batch in which samples that cannot move the policy weigh nothing, so that they are not computed.

    Without an advantage, a sample has no loss and no gradient, unless KL, entropy, an anchor or a loss of the user's own gives it
    one. What the others weigh stays as it is, and with it the update.
    """
    if config.entropy.coef or columns.ref is not None or config.algorithm.loss not in LOSSES:
        return mini
    assert columns.advantages is not None
    moving = columns.advantages != 0
    if columns.anchor is not None:
        moving |= columns.anchor != 0
    of_sample = np.array([own.any() for own in batch.split(moving)])[mini.members]
    weighed = np.where(np.repeat(of_sample, batch.lengths[mini.members]), mini.weights, np.float32(0))
    return replace(mini, weights=weighed, zero_advantage_samples=int((~of_sample).sum()))
