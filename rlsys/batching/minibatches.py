"""Splits a batch into mini-batches of whole prompt groups, and weighs their tokens."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rlsys.batching.packing import token_weights
from rlsys.config.derived import token_weighting
from rlsys.config.methods import LOSSES
from rlsys.config.schema import Config
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats, split_column


@dataclass(frozen=True)
class MiniBatch:
    update: int  # the optimizer update, counted from the start of the run
    members: list[int]  # samples of the batch
    weights: Floats  # of the members' tokens, end to end
    zero_advantage_samples: int = 0  # members whose weights were set to 0 because nothing in them moves the policy


def split_into_mini_batches(
    config: Config, step: int, batch: Batch, control_tokens: Collection[int] = ()
) -> Iterator[MiniBatch]:
    """Yields `updates_per_step` mini-batches of whole groups for each of `epochs_per_step` passes over the batch."""
    t = config.trainer
    update = (step - 1) * t.updates_per_step * t.epochs_per_step
    for epoch in range(t.epochs_per_step):
        rng = np.random.default_rng(derive_seed(config.run.seed, step, epoch, "mini-batches"))
        for groups in np.split(rng.permutation(len(batch.prompts)), t.updates_per_step):
            members = np.flatnonzero(np.isin(batch.groups, groups)).tolist()
            yield MiniBatch(update, members, loss_weights(config, batch, members, control_tokens))
            update += 1


def loss_weights(config: Config, batch: Batch, members: list[int], control_tokens: Collection[int] = ()) -> Floats:
    """The weight of each token of a mini-batch in its loss. With `overlong.mask`, truncated completions weigh 0.

    `control_tokens` are the ids of algorithm.control_tokens. Without any, every first token is one.
    """
    a = config.algorithm
    lengths = batch.lengths[members]
    masked = [config.overlong.mask and batch.samples[m].truncated for m in members]
    kept = ~np.array(masked, dtype=bool)
    first_tokens = batch.first_tokens
    starts = [not control_tokens or first_tokens[m] in control_tokens for m in members]
    kept_weights = token_weights(
        torch.from_numpy(lengths * kept),
        token_weighting(config),
        torch.tensor(starts, dtype=torch.bool),
        constant=a.constant or config.rollout.max_new_tokens,
        control_weight=a.control_weight,
    )
    if kept.all():
        return kept_weights.numpy()
    weights = np.zeros(lengths.sum(), dtype=np.float32)
    weights[np.repeat(kept, lengths)] = kept_weights.numpy()
    return weights


def weigh_other_terms(config: Config, batch: Batch, members: list[int], columns: Columns) -> Columns:
    """Adds the weights of a mini-batch's KL and entropy terms to the columns, where the policy loss has others.

    `decoupled` weighs the policy loss alone (arXiv 2505.13379): the other terms are means over sequences. In the authors'
    code (VainF/Thinkless) too α is for the policy loss alone, and KL and entropy are means over all tokens.
    """
    has_terms = columns.ref is not None or columns.old_kl_coef is not None or config.entropy.coef
    if token_weighting(config) != "decoupled" or not has_terms:
        return columns
    weights = np.zeros(batch.lengths.sum(), dtype=np.float32)
    own = np.repeat(np.isin(np.arange(len(batch.samples)), members), batch.lengths)
    weights[own] = token_weights(torch.from_numpy(batch.lengths[sorted(members)]), "sequence_mean").numpy()
    return replace(columns, term_weights=weights)


def drop_zero_advantage(config: Config, batch: Batch, mini: MiniBatch, columns: Columns) -> MiniBatch:
    """Sets the weights of samples that cannot move the policy to 0, so that they are not computed.

    A sample without an advantage has no loss and no gradient, unless a KL, entropy or the user's own loss
    gives it one. The weights of the other samples stay as they are, and so does the update.
    """
    if config.entropy.coef or columns.ref is not None or config.algorithm.loss not in LOSSES:
        return mini
    assert columns.advantages is not None
    moving = columns.advantages != 0  # [T]
    if columns.old_kl_coef is not None:
        moving |= columns.old_kl_coef != 0
    active = np.array([tokens.any() for tokens in batch.split(moving)])[mini.members]
    weights = np.where(np.repeat(active, batch.lengths[mini.members]), mini.weights, np.float32(0))
    return replace(mini, weights=weights, zero_advantage_samples=int((~active).sum()))


def left_out(batch: Batch, mini: MiniBatch) -> list[int]:
    """The members with tokens that the update does not compute, because all of them weigh 0."""
    computed = [part.any() for part in split_column(mini.weights, batch.lengths[mini.members].tolist())]
    return [m for m, done in zip(mini.members, computed, strict=True) if not done and batch.lengths[m]]


def draw_by_tokens(lengths: NDArray[np.int64], share: float, rng: np.random.Generator, least: int = 1) -> list[int]:
    """Draws about `share` of the samples, `least` at least, each as often on average as it has tokens.  [N] -> [n]

    So the mean over the draws of a mean over a sample's tokens has the mean over all tokens as its expectation.
    """
    count = max(math.ceil(share * len(lengths)), least)
    tokens = (rng.random() + np.arange(count)) / count * lengths.sum()
    return np.searchsorted(lengths.cumsum(), tokens, side="right").tolist()
