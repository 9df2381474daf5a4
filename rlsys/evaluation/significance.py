"""How sure a figure of an evaluation is, and whether two evaluations of the same prompts differ.

Prompts are the unit throughout, never samples: samples of one prompt resemble each other, and an interval that took each of
them for a witness of its own would be too narrow.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

RESAMPLES = 10_000
MAX_EXACT_DIFFERENCES = 20  # differing prompts up to which all ways to flip signs are gone through
CHUNK = 1 << 22  # numbers held at one time


def bootstrap_interval(values: ArrayLike, *, seed: int, level: float = 0.95, resamples: int = RESAMPLES) -> Array:
    """Percentile bootstrap interval of the mean over prompts, for one figure or several.  [P] -> [2], [P, F] -> [F, 2]

    Efron 1979, doi 10.1214/aos/1176344552. NaN: the prompt does not have this figure. It says what other prompts of the same
    kind would have given, as far as these show it: where all are alike its width is 0, however few they are.
    """
    columns = np.asarray(values, dtype=np.float64)
    if not len(columns):
        raise ValueError("an interval needs at least one prompt.")
    table = columns.reshape(len(columns), -1)  # [P, F]
    there = ~np.isnan(table)
    sums = np.concatenate([np.where(there, table, 0.0), there], axis=1)  # [P, 2F]
    rng, prompts = np.random.default_rng(seed), len(table)
    means = []
    for first in range(0, resamples, size := max(1, CHUNK // prompts)):
        rows = min(size, resamples - first)
        drawn = rng.integers(prompts, size=(rows, prompts)) + prompts * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * prompts).reshape(rows, prompts)
        total, count = np.split(times @ sums, 2, axis=1)
        means.append(np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0))
    tail = 100 * (1 - level) / 2
    found = np.full((table.shape[1], 2), np.nan)
    some = there.any(axis=0)
    found[some] = np.nanpercentile(np.concatenate(means)[:, some], [tail, 100 - tail], axis=0).T
    return found.reshape(*columns.shape[1:], 2)


def sign_flip_test(differences: ArrayLike, *, seed: int, draws: int = 100_000) -> float:
    """Two-sided p-value that paired differences have mean 0: each could as well have had the other sign.  [P] -> 1

    Fisher's randomisation test. All sign patterns where at most `EXACT` differences are not 0, else `draws` of them (with
    the one observed, so that it is never 0: Phipson and Smyth 2010, arXiv 1603.05766).
    """
    found = np.asarray(differences, dtype=np.float64)
    sizes = np.abs(found[found != 0])
    if not len(sizes):
        return 1.0
    bound = abs(found.sum()) - 1e-9 * sizes.sum()  # equal sums added up in another order
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
    """Two-sided exact p-value for answers that are right or wrong: prompts that changed are as likely won as lost.

    McNemar 1947, doi 10.1007/BF02295996, by the binomial distribution.
    """
    n = won + lost
    tail = sum(math.comb(n, i) for i in range(min(won, lost) + 1))
    return min(1.0, 2 * tail / 2**n)
