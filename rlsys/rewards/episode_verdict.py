"""Verdicts of episodes: what the function that played one returned, together with the reward functions."""

from rlsys.rewards.judge import combine_verdicts
from rlsys.rewards.weighted_reward import invalid_verdict
from rlsys.types import Sample, Verdict

OVER = ("turns", "tokens", "window")  # limits; an episode that ends at one needs no score of its own


def add_own_verdict(sample: Sample, judged: Verdict) -> Verdict:
    """Combines an episode's own verdict with that of the reward functions. A failure of the episode comes first."""
    if sample.episode is None:
        return judged
    own = sample.episode.verdict
    if own is None and sample.finish in OVER and not judged.components and not judged.failure:
        return Verdict(0.0)
    if own is None and not judged.components and not judged.failure:
        return invalid_verdict("the episode's function returned nothing, and there are no reward functions.")
    return combine_verdicts([v for v in (own, judged) if v is not None])
