"""What k samples of a prompt would be worth, from the n that there are: exact expectations over all subsets of k.

A prompt with 2 of 4 samples solved, answers 7 7 8 9, the 7s right:
pass@2 = 5/6 (one pair of six has no 7)      maj@3 = 2/3 (7 wins two triples of four and shares the others with 8 and 9)
avg@k is the mean score, whatever k is.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

MAX_EXACT_ADDITIONS = (
    10**7
)  # additions that the exact maj@k of one prompt may take; up to 200 samples always do with fewer
DRAWS = 10_000  # subsets drawn in its place: a standard error of 0.005 at most for scores from 0 to 1


def pass_at_k(samples: ArrayLike, solved: ArrayLike, k: int) -> Array:
    """Chance that at least one of k samples of a prompt is solved.  [P], [P] -> [P]

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
    found: Array = -np.expm1(missed)
    return found


def maj_at_k(answers: Sequence[Hashable], scores: ArrayLike, k: int, *, seed: int = 0) -> float:
    """Expected score of the answer that most of k samples of a prompt give; equally frequent ones share evenly.  [n], [n] -> 1

    The vote of Wang et al. 2022, arXiv 2203.11171. An answer's score is the mean over the samples that give it. Exact, unless
    that would take more than `EXACT` additions: then `DRAWS` subsets are drawn.
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
    """Additions that `shared_vote` takes, nearly."""
    return int(np.minimum(counts, k // 2).sum()) * (k + 1) ** 2


def majority_part(counts: NDArray[np.int64], values: Array, k: int) -> float:
    """The part of the expectation in which one answer has more than half of the k votes.  [A], [A] -> 1"""
    n, total = int(counts.sum()), 0.0
    for m, value in zip(counts.tolist(), values.tolist(), strict=True):
        ways = sum(math.comb(m, j) * math.comb(n - m, k - j) for j in range(k // 2 + 1, min(m, k) + 1))
        total += value * (ways / math.comb(n, k))
    return total


def tied_part(counts: NDArray[np.int64], values: Array, k: int) -> float:
    """The part in which the most frequent answers have j votes each, j at most half of k.  [A], [A] -> 1

    For each j, answer by answer: after some of them, P[t, r] is the chance that r votes are cast, none of them has more than j
    and t have j; S[t, r] is the same with the sum of those t scores. Votes are independent here, each cast with probability
    k / n, which makes every number a chance; that k are cast in all is divided out at the end.
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
    """Binomial chances of 0, 1, … `most` votes of m."""
    found = np.zeros(most + 1)
    for i in range(min(m, most) + 1):
        log = math.lgamma(m + 1) - math.lgamma(i + 1) - math.lgamma(m - i + 1)
        found[i] = math.exp(log + i * math.log(p) + (m - i) * math.log1p(-p))
    return found


def sampled_vote(counts: NDArray[np.int64], values: Array, k: int, seed: int) -> float:
    """The expectation from drawn subsets.  [A], [A] -> 1"""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(10):
        votes = rng.multivariate_hypergeometric(counts, k, size=DRAWS // 10, method="marginals")  # [draws, A]
        winners = votes == votes.max(axis=1, keepdims=True)
        parts.append(((winners @ values) / winners.sum(axis=1)).mean())
    return float(np.mean(parts))
