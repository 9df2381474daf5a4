"""Dynamic sampling: groups whose rewards are all equal are replaced by other prompts, until the batch is full.

Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.2. The share of informative groups so far decides how many prompts a
round samples: as many as are likely to be enough, and at most a batch. Prompts behind the last one needed go back into
the stream and are sampled again in the next step, from newer weights. So every batch has one version, and no informative
group is lost.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlsys.errors import NothingToLearn
from rlsys.types import Batch

OVERASK = 1.25  # times the expected number of prompts: another round would cost more


def fill_batch(
    collect: Callable[[int], Batch],
    needed: int,
    *,
    max_rounds: int,
    step: int,
    by_component: bool = False,
    check: Callable[[Batch], object] = lambda batch: None,
) -> Batch:
    """Returns `needed` groups whose rewards differ. `collect(count)` samples and judges that many new prompts.

    With `by_component` it is enough that one component of the reward differs. Before each further round `check` sees
    everything collected so far, and raises if failed verdicts are the cause and not the prompts.
    """
    rounds: list[Batch] = []
    missing, count = needed, needed
    for _ in range(max_rounds):
        batch = collect(count)
        informative = np.flatnonzero(informative_groups(batch, by_component))
        if len(informative) >= missing:
            rounds.append(first_groups(batch, int(informative[missing - 1]) + 1))
            return concat_batches([select_groups(b, informative_groups(b, by_component)) for b in rounds])
        rounds.append(batch)
        check(concat_batches(rounds))
        missing -= len(informative)
        share = (needed - missing) / sum(len(b.prompts) for b in rounds)
        count = min(needed, math.ceil(OVERASK * missing / share)) if share else needed
    raise NothingToLearn(explain_too_few(rounds, step, needed - missing, needed, by_component))


def explain_too_few(rounds: list[Batch], step: int, informative: int, needed: int, by_component: bool) -> str:
    batch = concat_batches(rounds)
    prompts, failed = len(batch.prompts), sum(batch.failures.values())
    verdicts = f"{failed} of {batch.requested} verdicts failed, the first: {batch.first_failure}. " if failed else ""
    means = [
        mean
        for b in rounds
        for mean, differs in zip(group_means(b), informative_groups(b, by_component), strict=True)
        if not differs
    ]
    return (
        f"step {step}: {informative} of {needed} groups have rewards that differ, after {len(rounds)} rounds and {prompts} "
        f"prompts (dynamic_sampling.max_rounds). The groups of equal rewards have rewards from {min(means):g} to {max(means):g}. "
        f"{verdicts}This run can go on with a larger dynamic_sampling.max_rounds, or with dynamic_sampling.enabled=false; a new one "
        "may take easier or harder prompts, or more trainer.samples_per_prompt."
    )


def first_groups(batch: Batch, count: int) -> Batch:
    """Returns the batch with its first `count` groups only, as if no more prompts had been requested."""
    keep = np.arange(len(batch.prompts)) < count
    left = len(batch.prompts) - count
    return replace(select_groups(batch, keep), dropped_groups=batch.dropped_groups, position=batch.position - left)


def informative_groups(batch: Batch, by_component: bool = False) -> NDArray[np.bool_]:
    """Returns True for groups with two different rewards, or with `by_component` two different components.  [groups] bool"""
    names = sorted({name for c in batch.components for name in c}) if by_component else []
    columns = [[c.get(name, 0.0) for name in names] for c in batch.components] if names else batch.rewards[:, None]
    values = np.asarray(columns, dtype=np.float32)  # [N, K]
    shape = (len(batch.prompts), values.shape[1])
    high, low = np.full(shape, -np.inf), np.full(shape, np.inf)
    np.maximum.at(high, batch.groups, values)
    np.minimum.at(low, batch.groups, values)
    differs: NDArray[np.bool_] = np.any(high > low, axis=1)
    return differs


def group_means(batch: Batch) -> list[float]:
    """Returns the mean reward of each group; 0 for a group without samples."""
    count = np.bincount(batch.groups, minlength=len(batch.prompts))
    total = np.bincount(batch.groups, weights=batch.rewards, minlength=len(batch.prompts))
    return list(total / np.maximum(count, 1))


def select_groups(batch: Batch, keep: NDArray[np.bool_]) -> Batch:
    """Returns the batch with some of its groups, and all failed samples.  keep [groups] bool"""
    samples = np.flatnonzero(keep[batch.groups])
    number = np.cumsum(keep) - 1  # of each group that stays
    return replace(
        batch,
        prompts=[p for p, good in zip(batch.prompts, keep, strict=True) if good],
        samples=[batch.samples[i] for i in samples],
        groups=number[batch.groups[samples]],
        rewards=batch.rewards[samples],
        components=[batch.components[i] for i in samples],
        answers=[batch.answers[i] for i in samples if batch.answers],
        greedy=None if batch.greedy is None else batch.greedy[keep],
        dropped_groups=batch.dropped_groups + int((~keep).sum()),
    )


def concat_batches(batches: list[Batch]) -> Batch:
    """Joins batches, in order."""
    first = np.cumsum([0, *(len(b.prompts) for b in batches)])
    reasons = sorted({reason for b in batches for reason in b.failures})
    return Batch(
        prompts=[p for b in batches for p in b.prompts],
        samples=[s for b in batches for s in b.samples],
        groups=np.concatenate([b.groups + n for b, n in zip(batches, first, strict=False)]),
        rewards=np.concatenate([b.rewards for b in batches]),
        components=[c for b in batches for c in b.components],
        answers=[a for b in batches for a in b.answers],
        failed=[pair for b in batches for pair in b.failed],
        requested=sum(b.requested for b in batches),
        first_failure=next((b.first_failure for b in batches if b.first_failure), ""),
        failures={reason: sum(b.failures.get(reason, 0) for b in batches) for reason in reasons},
        reward_s=sum(b.reward_s for b in batches),
        greedy=None
        if batches[0].greedy is None
        else np.concatenate([b.greedy for b in batches if b.greedy is not None]),
        dropped_groups=sum(b.dropped_groups for b in batches),
        position=batches[-1].position,
    )
