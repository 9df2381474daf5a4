"""How certain a metric of an evaluation is, and whether two evaluations of the same prompts differ.

The unit is always the prompt, never the sample. Samples of one prompt resemble each other, so an interval that treated
them as independent would be too narrow.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

RESAMPLES = 10_000
MAX_EXACT_DIFFERENCES = 20  # up to this many, all patterns of signs are enumerated
CHUNK = 1 << 22  # numbers held at one time


def bootstrap_interval(values: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = RESAMPLES) -> Array:
    """Returns the percentile bootstrap interval of the mean over prompts, of one metric or several.

    [P] -> [2], [P, F] -> [F, 2]

    Efron 1979, doi 10.1214/aos/1176344552. NaN: the prompt does not have this metric. The interval estimates what
    other prompts of the same kind would give. If all prompts have the same value, its width is 0, however few they are.
    """
    columns = np.asarray(values, dtype=np.float64)
    if not len(columns):
        raise ValueError("an interval needs at least one prompt.")
    table = columns.reshape(len(columns), -1)  # [P, F]
    known = ~np.isnan(table)
    sums = np.concatenate([np.where(known, table, 0.0), known], axis=1)  # [P, 2F]
    rng, prompts = np.random.default_rng(seed), len(table)
    means = []
    for first in range(0, resamples, size := max(1, CHUNK // prompts)):
        rows = min(size, resamples - first)
        drawn = rng.integers(prompts, size=(rows, prompts)) + prompts * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * prompts).reshape(rows, prompts)
        total, count = np.split(times @ sums, 2, axis=1)
        means.append(np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))
    tail = 100 * (1 - level) / 2
    bounds = np.full((table.shape[1], 2), np.nan)
    nonempty = known.any(axis=0)
    bounds[nonempty] = np.nanpercentile(np.concatenate(means)[:, nonempty], [tail, 100 - tail], axis=0).T
    return bounds.reshape(*columns.shape[1:], 2)


def sign_flip_test(differences: ArrayLike, *, seed: int, draws: int = 100_000) -> float:
    """Returns the two-sided p-value of paired differences under the hypothesis that their signs are random.  [P] -> 1

    Fisher's randomization test: over all patterns of signs if at most `MAX_EXACT_DIFFERENCES` differences are not 0,
    else over `draws` patterns and the observed one, so that p is never 0 (Phipson and Smyth 2010, arXiv 1603.05766).
    """
    signed = np.asarray(differences, dtype=np.float64)
    sizes = np.abs(signed[signed != 0])
    if not len(sizes):
        return 1.0
    bound = abs(signed.sum()) - 1e-9 * sizes.sum()  # equal sums may be added up in another order
    if len(sizes) <= MAX_EXACT_DIFFERENCES:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float((np.abs(sums) >= bound).mean())
    rng, hits = np.random.default_rng(seed), 0
    for first in range(0, draws, rows := max(1, CHUNK // len(sizes))):
        flips = rng.integers(2, size=(min(rows, draws - first), len(sizes)), dtype=np.int8)
        hits += int((np.abs(2 * (flips @ sizes) - sizes.sum()) >= bound).sum())
    return (1 + hits) / (1 + draws)


def mcnemar_test(won: int, lost: int) -> float:
    """Returns the two-sided exact p-value for right or wrong answers: changed prompts are as likely won as lost.

    McNemar 1947, doi 10.1007/BF02295996, by the binomial distribution.
    """
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**n)
