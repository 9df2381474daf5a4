"""From prompts to judged batches, at most `max_lag` updates ahead of training.

    next() starts every batch that may be started, then waits for the oldest:

        max_lag 0     start k ─ wait k ─ train k ─ sync ─ start k+1 …
        max_lag 1     start k+1 ─ wait k ─ train k (k+1 is being generated) ─ drain ─ sync ─ start k+2 …
        max_lag 2     start k+1, k+2 ─ train k ─ train k+1 ─ drain ─ sync ─ start k+3, k+4 ─ train k+2 …
        in flight     start k+1 ─ wait k ─ train k (k+1 is being generated) ─ sync (and goes on) ─ start k+2 …

Engines take new weights only when they are idle (`drain`), so a batch is of one version, which follows from the numbers of the
steps alone (`Timetable`). In flight they take them while they sample. A sample goes to the reward pool the moment it is seen;
nothing waits for the slowest prompt but the batch itself.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np

from rlsys.config import Config, Reward
from rlsys.draw import Draw
from rlsys.dynamic_sampling import NothingToLearn
from rlsys.interfaces import Rewards, Rollout
from rlsys.lengths import Lengths
from rlsys.types import Batch, Prompt, Request, Sample, Verdict

Seen = Callable[[list[Prompt], list[Sample]], None]
Judged = tuple[Sample, Future[list[Verdict]], int]  # a sample, and which verdict of which answer is its own


class RewardFailure(RuntimeError):
    """Too many verdicts of a step were failures."""


class Collector:
    """Samples prompts, has the samples judged, and puts the batch together."""

    def __init__(self, rollout: Rollout, rewards: Rewards, *, seed: int, reward: Reward):
        self.rollout, self.rewards, self.seed = rollout, rewards, seed
        self.abort, self.max_failure_share = reward.on_failure == "abort", reward.max_failure_share
        self.failure_score = reward.failure_score
        self.lengths = Lengths()

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

    def collect(self, step: int | str, prompts: list[Prompt], draw: Draw, seen: Seen | None = None) -> Batch:
        """The judged completions of these prompts.

        A batch whose verdicts failed is a batch too, down to one without samples: see `checked`.
        """
        requests = draw.requests(self.seed, step, prompts)
        score = self.failure_score
        return self.answered(step, prompts, requests, baseline=draw.baseline, failure_score=score, seen=seen)

    def answered(
        self,
        step: int | str,
        prompts: list[Prompt],
        requests: list[Request],
        *,
        baseline: int | None = None,
        failure_score: float | None = None,
        seen: Seen | None = None,
    ) -> Batch:
        """The judged completions of any requests of these prompts; of those with index `baseline` the reward alone is kept.

        A failed verdict has the score `failure_score`, or none. `seen` is told of samples as they come.
        """
        by_uid = {p.uid: p for p in prompts}
        place = {p.uid: i for i, p in enumerate(self.lengths.longest_first(prompts))}
        judged: list[Judged] = []
        for finished in self.rollout.generate(sorted(requests, key=lambda r: place[r.uid])):
            verdicts = self.rewards.judge(finished, by_uid)
            judged += [(s, verdicts, i) for i, s in enumerate(finished)]
            if seen:
                seen(prompts, finished)
        if len(judged) != len(requests):
            raise RuntimeError(f"step {step}: {len(requests)} samples were asked for, {len(judged)} came back")
        return self.assembled(prompts, judged, baseline=baseline, failure_score=failure_score)

    def assembled(
        self,
        prompts: list[Prompt],
        judged: list[Judged],
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
        self.lengths.seen(prompts, [s for s, _ in pairs])
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


@dataclass(frozen=True)
class Timetable:
    """Which batches may be begun when, and after which steps engines take weights: what bounds the lag.

    Between two syncs as many batches are begun as steps are trained. `Timetable(ahead=2, every=2)`: after the sync of step 4
    batches 6 and 7 are begun, from weights 4; batch 7 is trained two updates later.
    """

    ahead: int  # updates that may pass between the weights a batch is begun with and its training
    every: int  # steps between syncs

    @classmethod
    def of(cls, config: Config) -> "Timetable":
        """With over-sampling one update less: a half-written sample is trained a step later than the others."""
        ahead = config.pipeline.max_lag - bool(config.rollout.oversample)
        return cls(ahead, every=1 if config.pipeline.in_flight else max(1, ahead))

    def syncs(self, step: int) -> bool:
        """Whether engines take the weights of this step."""
        return self.newest(step) == step

    def newest(self, step: int) -> int:
        """The version that batches are sampled from after this step."""
        return step // self.every * self.every

    def reach(self, step: int) -> int:
        """The last batch that may be begun before `step` is trained."""
        return self.newest(step - 1) + 1 + self.ahead

    def whole(self, steps: int) -> int:
        """As many or a few more: a step behind a sync waits for less than one before it, so a mean is of all between two syncs."""
        return -(-steps // self.every) * self.every


class Pipeline:
    """Batches in order, `start(step)` samples and judges one. `ready` are those from step `first` on that are there already."""

    def __init__(
        self,
        start: Callable[[int], Batch],
        *,
        first: int,
        last: int,
        timetable: Timetable,
        ready: Sequence[Batch] = (),
        thread: Executor | None = None,
    ):
        self.start, self.last, self.timetable = start, last, timetable
        self.step = first  # whose batch is the next to be handed out
        self.upcoming = first + len(ready)
        self.ahead: deque[Future[Batch]] = deque(done(batch) for batch in ready)
        self.before: list[Future[Batch]] = []
        # One: batches are generated in order.
        self.thread = thread or ThreadPoolExecutor(1, thread_name_prefix="collect")

    def next(self) -> Batch:
        self.before = list(self.ahead)
        while self.upcoming <= min(self.timetable.reach(self.step), self.last):
            self.ahead.append(self.thread.submit(self.start, self.upcoming))
            self.upcoming += 1
        self.step += 1
        return self.ahead.popleft().result()

    def drain(self, *, undo: bool = False) -> None:
        """Waits until the engines are idle. That nothing can be learned from a batch is for `next` to say.

        A batch that was lost could not be made again once the engines have new weights: so the present step must not count.
        """
        futures = self.before if undo else list(self.ahead)
        for error in [future.exception() for future in futures]:  # all of them are waited for
            if error and not isinstance(error, RewardFailure | NothingToLearn):
                raise error

    def pending(self, *, undo: bool = False) -> list[Batch]:
        """What the engines have sampled ahead of the last step; with `undo`, ahead of the step before it.

        Batches that are still being made are left out, and those behind one that failed.
        """
        whole = takewhile(lambda f: f.done() and not f.exception(), self.before if undo else list(self.ahead))
        return [future.result() for future in whole]

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def done(batch: Batch) -> Future[Batch]:
    future: Future[Batch] = Future()
    future.set_result(batch)
    return future
