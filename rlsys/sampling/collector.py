"""From prompts to a judged batch. A sample goes to the reward pool the moment it is seen."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from rlsys.config.schema import RewardConfig
from rlsys.interfaces import Rewards, Rollout
from rlsys.runs.errors import TooManyRewardFailures
from rlsys.sampling.length_forecast import LengthForecast
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt, Request, Sample, Verdict

OnSamples = Callable[[list[Prompt], list[Sample]], None]
JudgedSample = tuple[Sample, Future[list[Verdict]], int]  # a sample, and which verdict of which answer is its own


class Collector:
    """Samples prompts, has the samples judged, and puts the batch together."""

    def __init__(self, rollout: Rollout, rewards: Rewards, *, seed: int, reward: RewardConfig):
        self.rollout, self.rewards, self.seed = rollout, rewards, seed
        self.abort, self.max_failure_share = reward.on_failure == "abort", reward.max_failure_share
        self.failure_score = reward.failure_score
        self.length_forecast = LengthForecast()

    def raise_if_too_many_failures(self, step: int | str, batch: Batch) -> Batch:
        """The batch, unless too many of its verdicts failed."""
        failed = sum(batch.failures.values())
        limit = 0 if self.abort else self.max_failure_share * batch.requested
        if failed > limit or not batch.samples:
            rule = "on_failure is abort" if self.abort else f"max_failure_share is {self.max_failure_share:g}"
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(batch.failures.items()))
            raise TooManyRewardFailures(
                f"step {step}: {failed} of {batch.requested} reward verdicts failed ({reasons}); reward.{rule}. The first: {batch.first_failure}"
            )
        return batch

    def collect(
        self, step: int | str, prompts: list[Prompt], draw: SamplingPlan, seen: OnSamples | None = None
    ) -> Batch:
        """The judged completions of these prompts.

        A batch whose verdicts failed is a batch too, down to one without samples: see `checked`.
        """
        requests = draw.requests(self.seed, step, prompts)
        score = self.failure_score
        return self.generate_and_judge(
            step, prompts, requests, baseline=draw.greedy_index, failure_score=score, seen=seen
        )

    def generate_and_judge(
        self,
        step: int | str,
        prompts: list[Prompt],
        requests: list[Request],
        *,
        baseline: int | None = None,
        failure_score: float | None = None,
        seen: OnSamples | None = None,
    ) -> Batch:
        """The judged completions of any requests of these prompts; of those with index `baseline` the reward alone is kept.

        A failed verdict has the score `failure_score`, or none. `seen` is told of samples as they come.
        """
        by_uid = {p.uid: p for p in prompts}
        place = {p.uid: i for i, p in enumerate(self.length_forecast.longest_first(prompts))}
        judged: list[JudgedSample] = []
        for finished in self.rollout.generate(sorted(requests, key=lambda r: place[r.uid])):
            verdicts = self.rewards.judge(finished, by_uid)
            judged += [(s, verdicts, i) for i, s in enumerate(finished)]
            if seen:
                seen(prompts, finished)
        if len(judged) != len(requests):
            raise RuntimeError(f"step {step}: {len(requests)} samples were asked for, {len(judged)} came back")
        return self.build_batch(prompts, judged, baseline=baseline, failure_score=failure_score)

    def build_batch(
        self,
        prompts: list[Prompt],
        judged: list[JudgedSample],
        *,
        since: float = 0.0,
        baseline: int | None = None,
        failure_score: float | None = None,
    ) -> Batch:
        """The batch of these prompts, when all verdicts are there; `judged` are all their samples, in any order.

        `since` is when the last sample was there, if it is not now.
        """
        since = since or time.perf_counter()
        pairs = [(s, verdicts.result()[i]) for s, verdicts, i in judged]
        reward_s = time.perf_counter() - since
        self.length_forecast.observe(prompts, [s for s, _ in pairs])
        group = {p.uid: g for g, p in enumerate(prompts)}
        pairs.sort(key=lambda pair: (group[pair[0].uid], pair[0].index))
        failed = [(s, v) for s, v in pairs if v.score is None]
        if failure_score is not None:
            pairs = [(s, replace(v, score=failure_score) if v.score is None else v) for s, v in pairs]
        good = [(s, v) for s, v in pairs if v.score is not None and s.index != baseline]
        greedy = np.full(len(prompts), np.nan, dtype=np.float32)
        for s, v in pairs:
            if s.index == baseline and v.score is not None:
                greedy[group[s.uid]] = v.score
        return Batch(
            prompts=prompts,
            samples=[s for s, _ in good],
            groups=np.array([group[s.uid] for s, _ in good], dtype=np.int64),
            rewards=np.array([v.score for _, v in good], dtype=np.float32),
            components=[v.components for _, v in good],
            answers=[v.answer for _, v in good],
            failed=[(s, v) for s, v in failed if s.index != baseline],
            requested=len(pairs),
            failures=dict(Counter(v.failure for _, v in failed)),
            first_failure=f"{failed[0][1].failure}: {failed[0][1].detail}" if failed else "",
            reward_s=reward_s,
            greedy=None if baseline is None else greedy,
        )
