"""pass@k and maj@k of a prompt from its n samples: exact expectations over all subsets of k samples.

A prompt with 2 of 4 samples solved, answers 7 7 8 9, the 7s right:
pass@2 = 5/6 (one pair of six has no 7)      maj@3 = 2/3 (7 wins two triples of four and shares the others with 8 and 9)
avg@k is the mean score for every k.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

MAX_EXACT_ADDITIONS = 10**7  # for the exact maj@k of one prompt; 200 samples never need more
DRAWS = 10_000  # subsets drawn otherwise: a standard error of at most 0.005 for scores from 0 to 1


def pass_at_k(samples: ArrayLike, solved: ArrayLike, k: int) -> Array:
    """Returns the chance that at least one of k samples of a prompt is solved.  [P], [P] -> [P]

    Chen et al. 2021, arXiv 2107.03374, eq. 1: 1 - C(n - c, k) / C(n, k), as a product that no n overflows.
    """
    n, c = np.asarray(samples, dtype=np.float64), np.asarray(solved, dtype=np.float64)
    if k < 1 or np.any(n < k):
        raise ValueError(f"pass@{k} needs k of at least 1 and k samples of every prompt; one has {n.min(initial=k):g}.")
    if np.any((c < 0) | (c > n)):
        raise ValueError("pass@k: a prompt has fewer samples than solved ones, or fewer than none.")
    missed = np.zeros(np.broadcast(n, c).shape)  # log of the chance that none of i samples is solved
    with np.errstate(divide="ignore"):  # log 0: more drawn than are unsolved
        for i in range(k):
            missed += np.log1p(-np.minimum(c / (n - i), 1.0))
    solved_chance: Array = -np.expm1(missed)
    return solved_chance


def maj_at_k(answers: Sequence[Hashable], scores: ArrayLike, k: int, *, seed: int = 0) -> float:
    """Returns the expected score of the most frequent answer among k samples. Ties share evenly.  [n], [n] -> 1

    The vote of Wang et al. 2022, arXiv 2203.11171. An answer's score is the mean over the samples that give it. The
    result is exact unless that takes more than `MAX_EXACT_ADDITIONS`; then `DRAWS` subsets are drawn.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} needs k of at least 1 and k samples; there are {len(answers)}.")
    number = {answer: i for i, answer in enumerate(dict.fromkeys(answers))}
    ids = np.array([number[answer] for answer in answers])
    counts = np.bincount(ids)  # [A]
    values = np.bincount(ids, weights=np.asarray(scores, dtype=np.float64)) / counts  # [A]
    if k <= 2:  # one vote, or two that are equal or share
        return float(values @ counts / len(answers))
    if k == len(answers):
        return float(values[counts == counts.max()].mean())
    if count_additions(counts, k) > MAX_EXACT_ADDITIONS:
        return sampled_vote(counts, values, k, seed)
    return majority_part(counts, values, k) + tied_part(counts, values, k)


def count_additions(counts: NDArray[np.int64], k: int) -> int:
    """Returns roughly how many additions `tied_part` takes."""
    return int(np.minimum(counts, k // 2).sum()) * (k + 1) ** 2


def majority_part(counts: NDArray[np.int64], values: Array, k: int) -> float:
    """Returns the part of the expectation in which one answer has more than half of the k votes.  [A], [A] -> 1"""
    n, total = int(counts.sum()), 0.0
    for m, value in zip(counts.tolist(), values.tolist(), strict=True):
        ways = sum(math.comb(m, j) * math.comb(n - m, k - j) for j in range(k // 2 + 1, min(m, k) + 1))
        total += value * (ways / math.comb(n, k))
    return total


def tied_part(counts: NDArray[np.int64], values: Array, k: int) -> float:
    """Returns the part in which the most frequent answers have j votes each, j at most half of k.  [A], [A] -> 1

    For each j, the answers are added one by one. P[t, r] is the chance that those added so far have r votes, none has
    more than j votes, and t of them have j. S[t, r] is that chance times the expected sum of those t scores. Votes are
    cast independently here, each with probability k / n. The chance that k are cast in all is divided out at the end.
    """
    n, total = int(counts.sum()), 0.0
    cast = {m: binomial_chances(m, k / n, k) for m in {*counts.tolist(), n}}
    for j in range(1, min(k // 2, int(counts.max())) + 1):
        if np.minimum(counts, j).sum() < k:  # j votes each are not enough
            continue
        leading = counts >= j
        table = np.zeros((2, min(k // j, int(leading.sum())) + 1, k + 1))  # P, S
        table[0, 0] = binomial_chances(int(counts[~leading].sum()), k / n, k)
        for m, value in zip(counts[leading].tolist(), values[leading].tolist(), strict=True):
            before, table = table, np.zeros_like(table)
            for votes in range(j):
                table[:, :, votes:] += cast[m][votes] * before[:, :, : k + 1 - votes]
            tied = cast[m][j] * before[:, :-1, : k + 1 - j]
            table[:, 1:, j:] += tied
            table[1, 1:, j:] += value * tied[0]
        total += float((table[1, 1:, k] / np.arange(1, table.shape[1])).sum())
    return total / float(cast[n][k])


def binomial_chances(m: int, p: float, most: int) -> Array:
    """Returns the binomial chances of 0, 1, … `most` votes of m."""
    chances = np.zeros(most + 1)
    for i in range(min(m, most) + 1):
        log = math.lgamma(m + 1) - math.lgamma(i + 1) - math.lgamma(m - i + 1)
        chances[i] = math.exp(log + i * math.log(p) + (m - i) * math.log1p(-p))
    return chances


def sampled_vote(counts: NDArray[np.int64], values: Array, k: int, seed: int) -> float:
    """Returns the expectation estimated from drawn subsets.  [A], [A] -> 1"""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(10):
        votes = rng.multivariate_hypergeometric(counts, k, size=DRAWS // 10, method="marginals")  # [draws, A]
        winners = votes == votes.max(axis=1, keepdims=True)
        parts.append(((winners @ values) / winners.sum(axis=1)).mean())
    return float(np.mean(parts))
