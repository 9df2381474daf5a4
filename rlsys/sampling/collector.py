"""From prompts to a judged batch. A sample goes to the reward pool the moment it finishes."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from rlsys.config.schema import RewardConfig
from rlsys.errors import TooManyRewardFailures
from rlsys.interfaces import Rewards, Rollout
from rlsys.sampling.length_forecast import LengthForecast
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt, Request, Sample, Verdict

OnSamples = Callable[[list[Prompt], list[Sample]], None]  # called with a batch's prompts and some finished samples
TakePrompts = Callable[[int, int], list[Prompt]]  # the prompts at positions of the training data: first, count
JudgedSample = tuple[Sample, Future[list[Verdict]], int]  # a sample, and the place of its verdict in an answer


class Collector:
    """Has prompts sampled and the samples judged, and builds the batch."""

    def __init__(self, rollout: Rollout, rewards: Rewards, *, seed: int, reward: RewardConfig):
        self.rollout, self.rewards, self.seed = rollout, rewards, seed
        self.abort, self.max_failure_share = reward.on_failure == "abort", reward.max_failure_share
        self.failure_score = reward.failure_score
        self.length_forecast = LengthForecast()

    def raise_if_too_many_failures(self, step: int | str, batch: Batch) -> None:
        failed = sum(batch.failures.values())
        limit = 0 if self.abort else self.max_failure_share * batch.requested
        if failed > limit or not batch.samples:
            rule = "on_failure is abort" if self.abort else f"max_failure_share is {self.max_failure_share:g}"
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(batch.failures.items()))
            raise TooManyRewardFailures(
                f"step {step}: {failed} of {batch.requested} reward verdicts failed ({reasons}); reward.{rule}. "
                f"The first: {batch.first_failure}"
            )

    def collect(
        self, step: int | str, prompts: list[Prompt], plan: SamplingPlan, on_samples: OnSamples | None = None
    ) -> Batch:
        """Returns the judged completions of these prompts. Failed verdicts make a batch smaller, down to no samples at all."""
        return self.generate_and_judge(
            step,
            prompts,
            plan.requests(self.seed, step, prompts),
            greedy_index=plan.greedy_index,
            failure_score=self.failure_score,
            on_samples=on_samples,
        )

    def generate_and_judge(
        self,
        step: int | str,
        prompts: list[Prompt],
        requests: list[Request],
        *,
        greedy_index: int | None = None,
        failure_score: float | None = None,
        on_samples: OnSamples | None = None,
    ) -> Batch:
        """Returns the judged completions of any requests for these prompts.

        Of samples with index `greedy_index` only the reward is kept. A failed verdict gets `failure_score`, or none.
        """
        by_uid = {p.uid: p for p in prompts}
        place = {p.uid: i for i, p in enumerate(self.length_forecast.longest_first(prompts))}
        judged: list[JudgedSample] = []
        for samples in self.rollout.generate(sorted(requests, key=lambda r: place[r.uid])):
            verdicts = self.rewards.judge(samples, by_uid)
            judged += [(s, verdicts, i) for i, s in enumerate(samples)]
            if on_samples:
                on_samples(prompts, samples)
        if len(judged) != len(requests):
            raise RuntimeError(f"step {step}: {len(requests)} samples were requested, {len(judged)} came back")
        return self.build_batch(prompts, judged, greedy_index=greedy_index, failure_score=failure_score)

    def build_batch(
        self,
        prompts: list[Prompt],
        judged: list[JudgedSample],
        *,
        sampled_at: float = 0.0,
        greedy_index: int | None = None,
        failure_score: float | None = None,
    ) -> Batch:
        """Waits for the verdicts and builds the batch. `judged` are all samples of these prompts, in any order.

        `sampled_at` is when the last sample was finished, if not now.
        """
        sampled_at = sampled_at or time.perf_counter()
        pairs = [(s, verdicts.result()[i]) for s, verdicts, i in judged]
        reward_s = time.perf_counter() - sampled_at
        self.length_forecast.observe(prompts, [s for s, _ in pairs])
        group = {p.uid: g for g, p in enumerate(prompts)}
        pairs.sort(key=lambda pair: (group[pair[0].uid], pair[0].index))
        failed = [(s, v) for s, v in pairs if v.score is None]
        if failure_score is not None:
            pairs = [
                (without_turn_scores(s), replace(v, score=failure_score)) if v.score is None else (s, v)
                for s, v in pairs
            ]
        good = [(s, v) for s, v in pairs if v.score is not None and s.index != greedy_index]
        greedy = np.full(len(prompts), np.nan, dtype=np.float32)
        for s, v in pairs:
            if s.index == greedy_index and v.score is not None:
                greedy[group[s.uid]] = v.score
        return Batch(
            prompts=prompts,
            samples=[s for s, _ in good],
            groups=np.array([group[s.uid] for s, _ in good], dtype=np.int64),
            rewards=np.array([v.score for _, v in good], dtype=np.float32),
            components=[v.components for _, v in good],
            answers=[v.answer for _, v in good],
            failed=[(s, v) for s, v in failed if s.index != greedy_index],
            requested=len(pairs),
            failures=dict(Counter(v.failure for _, v in failed)),
            first_failure=f"{failed[0][1].failure}: {failed[0][1].detail}" if failed else "",
            reward_s=reward_s,
            greedy=None if greedy_index is None else greedy,
        )


def without_turn_scores(sample: Sample) -> Sample:
    """Leaves out the scores of turns of a failed sample, whose score is `reward.on_failure`'s."""
    if sample.episode is None:
        return sample
    return replace(sample, episode=replace(sample.episode, turn_scores=[0.0] * len(sample.episode.turn_scores)))
