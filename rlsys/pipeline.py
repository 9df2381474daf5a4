"""From prompts to judged batches, at most `max_lag` of them ahead of training.

    next() starts every batch that may be started, then waits for the oldest:

        max_lag 0     start k ─ wait k ─ train k ─ sync ─ start k+1 …
        max_lag 1     start k+1 ─ wait k ─ train k (k+1 is being generated) ─ drain ─ sync ─ start k+2 …

A batch is sampled from one version of the weights: engines take new ones only when they are idle (`drain`). A sample goes
to the reward pool the moment it is seen; nothing waits for the slowest prompt but the batch itself.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import takewhile

import numpy as np

from rlsys.config import Reward
from rlsys.dynamic_sampling import NothingToLearn
from rlsys.interfaces import Rewards, Rollout
from rlsys.seeds import seed_of
from rlsys.types import Batch, Prompt, Request, Sample, Verdict


class RewardFailure(RuntimeError):
    """Too many verdicts of a step were failures."""


class Collector:
    """Samples prompts, has the samples judged, and puts the batch together."""

    def __init__(self, rollout: Rollout, rewards: Rewards, *, seed: int, reward: Reward):
        self.rollout, self.rewards, self.seed = rollout, rewards, seed
        self.abort, self.max_failure_share = reward.on_failure == "abort", reward.max_failure_share
        self.failure_score = reward.failure_score

    def checked(self, step: int | str, batch: Batch) -> Batch:
        """The batch, unless too many of its verdicts failed."""
        failed = sum(batch.failures.values())
        limit = 0 if self.abort else self.max_failure_share * batch.asked
        if failed > limit or not batch.samples:
            rule = "on_failure is abort" if self.abort else f"max_failure_share is {self.max_failure_share:g}"
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(batch.failures.items()))
            raise RewardFailure(
                f"step {step}: {failed} of {batch.asked} reward verdicts failed ({reasons}); reward.{rule}. The first: {batch.first_failure}"
            )
        return batch

    def collect(
        self,
        step: int | str,
        prompts: list[Prompt],
        *,
        samples: int,
        temperature: float,
        max_new_tokens: int,
        greedy: bool = False,
    ) -> Batch:
        """`samples` completions per prompt; with `greedy` one more at temperature 0, whose reward alone is kept.

        A batch whose verdicts failed is a batch too, down to one without samples: see `checked`.
        """
        temperatures = [temperature] * samples + [0.0] * greedy
        requests = [
            Request(p.uid, i, p.tokens, seed_of(self.seed, step, p.uid, i), t, max_new_tokens)
            for p in prompts
            for i, t in enumerate(temperatures)
        ]
        baseline = samples if greedy else None
        return self.answered(step, prompts, requests, baseline=baseline, failure_score=self.failure_score)

    def answered(
        self,
        step: int | str,
        prompts: list[Prompt],
        requests: list[Request],
        *,
        baseline: int | None = None,
        failure_score: float | None = None,
    ) -> Batch:
        """The judged completions of any requests of these prompts; of those with index `baseline` the reward alone is kept.

        A failed verdict has the score `failure_score`, or none.
        """
        by_uid = {p.uid: p for p in prompts}
        judged: list[tuple[list[Sample], Future[list[Verdict]]]] = []
        for finished in self.rollout.generate(requests):
            judged.append((finished, self.rewards.judge(finished, by_uid)))
        sampled = time.perf_counter()
        pairs = [pair for finished, verdicts in judged for pair in zip(finished, verdicts.result(), strict=True)]
        done = time.perf_counter()
        if len(pairs) != len(requests):
            raise RuntimeError(f"step {step}: {len(requests)} samples were asked for, {len(pairs)} came back")
        return self._assemble(prompts, pairs, done - sampled, baseline, failure_score)

    def _assemble(
        self,
        prompts: list[Prompt],
        pairs: list[tuple[Sample, Verdict]],
        reward_s: float,
        baseline: int | None,
        failure_score: float | None,
    ) -> Batch:
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
            asked=len(pairs),
            failures=dict(Counter(v.failure for _, v in failed)),
            first_failure=f"{failed[0][1].failure}: {failed[0][1].detail}" if failed else "",
            reward_s=reward_s,
            greedy=None if baseline is None else greedy,
        )


class Pipeline:
    """Batches in order, `start(step)` samples and judges one. `ready` are those from step `first` on that are there already."""

    def __init__(
        self, start: Callable[[int], Batch], *, first: int, last: int, max_lag: int, ready: Sequence[Batch] = ()
    ):
        self.start, self.last, self.max_lag = start, last, max_lag
        self.upcoming = first + len(ready)
        self.ahead: deque[Future[Batch]] = deque(done(batch) for batch in ready)
        self.before: list[Future[Batch]] = []
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="collect")  # one: batches are generated in order

    def next(self) -> Batch:
        self.before = list(self.ahead)
        while len(self.ahead) <= self.max_lag and self.upcoming <= self.last:
            self.ahead.append(self.thread.submit(self.start, self.upcoming))
            self.upcoming += 1
        return self.ahead.popleft().result()

    def drain(self) -> None:
        """Waits until the engines are idle. That nothing can be learned from a batch is for `next` to say.

        A batch that was lost could not be made again once the engines have new weights: so the present step must not count.
        """
        wait(self.ahead)
        for future in self.ahead:
            if (error := future.exception()) and not isinstance(error, RewardFailure | NothingToLearn):
                raise error

    def pending(self, *, undo: bool = False) -> list[Batch]:
        """What the engines have sampled ahead of the last step; with `undo`, ahead of the step before it.

        With `undo`, batches that are still being made are left out: they can be made again, from the same weights.
        """
        whole = takewhile(lambda f: f.done() and not f.exception(), self.before if undo else list(self.ahead))
        return [future.result() for future in whole]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def done(batch: Batch) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future
