"""Control of entropy by the few tokens that destroy it: those whose log-prob and advantage are large together.

Cui et al. 2025, arXiv 2505.22617: the change of entropy follows the covariance of log-prob and advantage, and a fraction of a
percent of the tokens carries most of it. Both controls choose tokens of the whole batch before its first update, so that the
choice does not depend on packing; the paper chooses again in each mini-batch.
"""

import numpy as np
from numpy.typing import NDArray

from rlsys.types import Floats

TokenMask = NDArray[np.bool_]


def token_covariance(logprobs: Floats, advantages: Floats) -> Floats:
    """Each token's share in the covariance over all tokens.  [T], [T] -> [T]"""
    if logprobs.shape != advantages.shape or logprobs.ndim != 1:
        raise ValueError(
            f"covariance: logprobs {list(logprobs.shape)} and advantages {list(advantages.shape)} must be [T]."
        )
    centred: Floats = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    return centred


def clip_cov(
    logprobs: Floats, advantages: Floats, *, share: float, low: float, high: float, rng: np.random.Generator
) -> TokenMask:
    """`share` of all tokens, drawn among those with covariance in [low, high]: the policy loss leaves them out.  [T] -> [T] bool"""
    count = _count("clip_cov", share, len(logprobs))
    cov = token_covariance(logprobs, advantages)
    candidates = np.flatnonzero((cov >= low) & (cov <= high))
    chosen = np.zeros(len(cov), dtype=bool)
    chosen[rng.permutation(candidates)[:count]] = True
    return chosen


def kl_cov(logprobs: Floats, advantages: Floats, *, share: float) -> TokenMask:
    """`share` of all tokens, those of largest covariance: a KL term holds them near where they were.  [T] -> [T] bool"""
    count = _count("kl_cov", share, len(logprobs))
    cov = token_covariance(logprobs, advantages)
    chosen = np.zeros(len(cov), dtype=bool)
    chosen[np.argsort(-cov, kind="stable")[:count]] = True
    return chosen


def _count(name: str, share: float, tokens: int) -> int:
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: share is {share}; it must be between 0 and 1.")
    return round(share * tokens)
