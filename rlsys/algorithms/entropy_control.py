"""Entropy control: limits the few tokens that reduce entropy most, those of both high log-prob and high advantage.

Cui et al. 2025, arXiv 2505.22617: the change of entropy follows the covariance of log-prob and advantage, and less than
a percent of the tokens contributes most of it. Both methods choose tokens from the whole batch before its first update,
so that the choice does not depend on packing. The paper chooses again in each mini-batch.

The paper holds the tokens of `kl_cov` by KL(old ‖ π). Its code uses |log(π/old)|, whose gradient jumps between ±1 at
π = old: rounding would decide its sign in the first update. Here it is ½ log²(π/old), the KL to second order. In the
paper no ratio is clipped; here the term is added to `algorithm.loss`, with its clip.
"""

import numpy as np
from numpy.typing import NDArray

from rlsys.types import Floats

TokenMask = NDArray[np.bool_]


def token_covariance(logprobs: Floats, advantages: Floats) -> Floats:
    """Returns each token's term of the covariance over all tokens.  [T], [T] -> [T]"""
    if logprobs.shape != advantages.shape or logprobs.ndim != 1:
        raise ValueError(
            f"token_covariance: logprobs {list(logprobs.shape)} and advantages {list(advantages.shape)} must be [T]."
        )
    terms: Floats = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    return terms


def clip_cov(
    logprobs: Floats, advantages: Floats, *, share: float, rng: np.random.Generator, low: float = 1.0, high: float = 5.0
) -> TokenMask:
    """Draws tokens with covariance in [low, high]: `share` of all tokens, but at least one.  [T], [T] -> [T] bool

    The policy loss leaves them out.
    """
    count = _token_count("clip_cov", share, len(logprobs))
    covariance = token_covariance(logprobs, advantages)
    candidates = np.flatnonzero((covariance >= low) & (covariance <= high))
    chosen = np.zeros(len(covariance), dtype=bool)
    chosen[rng.permutation(candidates)[:count]] = True
    return chosen


def kl_cov(logprobs: Floats, advantages: Floats, *, share: float) -> TokenMask:
    """Selects the `share` of all tokens, but at least one, with the largest covariance.  [T], [T] -> [T] bool

    A KL term keeps them near their old log-probs.
    """
    count = _token_count("kl_cov", share, len(logprobs))
    covariance = token_covariance(logprobs, advantages)
    chosen = np.zeros(len(covariance), dtype=bool)
    chosen[np.argsort(-covariance, kind="stable")[:count]] = True
    return chosen


def _token_count(name: str, share: float, tokens: int) -> int:
    if not 0 < share <= 1:
        raise ValueError(f"{name}: share is {share}; it must be greater than 0, and at most 1.")
    return max(1, round(share * tokens))
