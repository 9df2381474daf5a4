"""Verdicts of episodes: what the function that played one returned, together with the reward functions."""

from concurrent.futures import Future

from rlsys.interfaces import Rewards
from rlsys.rewards.judge import combine_verdicts
from rlsys.rewards.weighted_reward import invalid_verdict
from rlsys.types import Prompt, Sample, Verdict

OVER = ("turns", "tokens", "window")  # limits; an episode that ends at one needs no score of its own


class EpisodeRewards:
    """Implements `rlsys.interfaces.Rewards` around the reward pool."""

    def __init__(self, rewards: Rewards):
        self.rewards = rewards

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        return EpisodeVerdicts(samples, self.rewards.judge(samples, prompts))


class EpisodeVerdicts(Future[list[Verdict]]):
    """Combines both verdicts of each sample when those of the reward functions have arrived."""

    def __init__(self, samples: list[Sample], judged: "Future[list[Verdict]]"):
        super().__init__()
        self.samples, self.judged = samples, judged
        self.combined: list[Verdict] | None = None  # `result` is called once per sample

    def result(self, timeout: float | None = None) -> list[Verdict]:
        if self.combined is None:
            pairs = zip(self.samples, self.judged.result(timeout), strict=True)
            self.combined = [combine(sample, verdict) for sample, verdict in pairs]
        return self.combined


def combine(sample: Sample, judged: Verdict) -> Verdict:
    """Combines the episode's own verdict with that of the reward functions. A failure of the episode comes first."""
    if sample.episode is None:
        return judged
    own = sample.episode.verdict
    if own is None and sample.finish in OVER and not judged.components and not judged.failure:
        return Verdict(0.0)
    if own is None and not judged.components and not judged.failure:
        return invalid_verdict("the episode's function returned nothing, and there are no reward functions.")
    return combine_verdicts([v for v in (own, judged) if v is not None])
