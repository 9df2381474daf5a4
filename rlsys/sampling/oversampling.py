"""Over-sampling: more prompts are sampled than a step needs, and the step goes on as soon as it has enough.

    step 7    started   a b c d e f     4 are needed: b d e f finish first and are the batch, a and c are stopped early
    step 8    started   a c g h i j     a and c continue with the tokens they have, ahead of the others

A deferred prompt keeps its place: each prompt is trained on once. A group joins a step at the latest when its oldest
token would be older than `max_lag` in the next one; that step waits for it. Which groups finish first depends on time,
so two runs differ.
Half-written samples are discarded at a checkpoint and resampled on resume.

Kimi k1.5 (arXiv 2501.12599) resumes partial rollouts in this way; APRIL (arXiv 2509.18521) over-samples prompts.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlsys.config.schema import Config
from rlsys.sampling.collector import Collector, JudgedSample, TakePrompts
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt, Request, Sample


@dataclass(eq=False)
class PromptGroup:
    """A prompt whose samples are being written."""

    position: int  # in the training data
    prompt: Prompt
    size: int  # samples
    finished: list[JudgedSample] = field(default_factory=list)
    partial: dict[int, Sample] = field(default_factory=dict)  # half-written, by index

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.size

    @property
    def all_samples(self) -> list[Sample]:
        return [s for s, _, _ in self.finished] + list(self.partial.values())

    def lag(self, step: int) -> int:
        """Returns the lag of its oldest token, if it is trained in this step."""
        return step - 1 - min((s.version for s in self.all_samples if len(s.tokens)), default=step - 1)

    def unfinished_requests(self, requests: Sequence[Request]) -> list[Request]:
        """Returns its requests that are not answered yet, each with the tokens it has."""
        finished = {s.index for s, _, _ in self.finished}
        return [replace(r, partial=self.partial.get(r.index)) for r in requests if r.index not in finished]


class Oversampling:
    """`collect(step)` is the batch of a step."""

    def __init__(self, config: Config, collector: Collector, take: TakePrompts):
        t = config.trainer
        self.collector, self.take, self.max_lag = collector, take, config.pipeline.max_lag
        self.needed = t.prompts_per_step
        self.in_progress = self.needed + math.ceil(self.needed * config.rollout.oversample)
        self.plan = SamplingPlan.from_config(config)
        self.next_position, self.groups = 0, list[PromptGroup]()

    def restore(self, next_position: int, deferred: Sequence[int]) -> None:
        """Continues where a run was: deferred prompts are sampled again."""
        self.next_position = next_position
        self.groups = [group for position in deferred for group in self.start_groups(position, 1)]

    def start_groups(self, position: int, count: int) -> list[PromptGroup]:
        prompts = self.take(position, count)
        return [PromptGroup(position + i, p, self.plan.completions_per_prompt) for i, p in enumerate(prompts)]

    def collect(self, step: int) -> Batch:
        new = self.start_groups(self.next_position, self.in_progress - len(self.groups))
        self.groups, self.next_position = self.groups + new, self.next_position + len(new)
        due = [g for g in self.groups if g.lag(step + 1) > self.max_lag]
        sampled_at = self.sample(step, due)
        chosen = sorted(self.ready_groups(due), key=lambda g: g.position)
        taken = set(chosen)
        self.groups = [g for g in self.groups if g not in taken]
        batch = self.collector.build_batch(
            [g.prompt for g in chosen],
            [judged for g in chosen for judged in g.finished],
            sampled_at=sampled_at,
            greedy_index=self.plan.greedy_index,
            failure_score=self.collector.failure_score,
        )
        return replace(batch, position=self.next_position, deferred=tuple(g.position for g in self.groups))

    def sample(self, step: int, due: list[PromptGroup]) -> float:
        """Samples until there is enough for this step, with everything that is due. Returns when that was."""
        by_uid = {g.prompt.uid: g for g in self.groups}
        prompts = [g.prompt for g in self.groups]
        prompt_by_uid = {p.uid: p for p in prompts}
        enough_at, complete = 0.0, sum(g.complete for g in self.groups)
        for samples in self.collector.rollout.generate(self.requests(step, prompts, by_uid)):
            finished = [s for s in samples if s.finish != "cut"]
            verdicts = self.collector.rewards.judge(finished, prompt_by_uid)
            for i, s in enumerate(finished):
                by_uid[s.uid].partial.pop(s.index, None)
                by_uid[s.uid].finished.append((s, verdicts, i))
            for s in samples:
                if s.finish == "cut" and len(s.tokens):
                    by_uid[s.uid].partial[s.index] = s
            complete += sum(by_uid[uid].complete for uid in {s.uid for s in finished})
            if not enough_at and complete >= self.needed and self.ready_groups(due):
                enough_at = time.perf_counter()
                self.collector.rollout.stop_early()
        return enough_at

    def requests(self, step: int, prompts: list[Prompt], by_uid: dict[str, PromptGroup]) -> list[Request]:
        """Returns prompts deferred from earlier steps first."""
        order = sorted(self.collector.length_forecast.longest_first(prompts), key=lambda p: not by_uid[p.uid].partial)
        requests = self.plan.requests(self.collector.seed, step, order)
        size = self.plan.completions_per_prompt
        return [
            r
            for i, p in enumerate(order)
            for r in by_uid[p.uid].unfinished_requests(requests[i * size : (i + 1) * size])
        ]

    def ready_groups(self, due: list[PromptGroup]) -> list[PromptGroup]:
        """Returns the groups that make the batch; none while there are too few, or while one that is due is missing."""
        if not all(g.complete for g in due):
            return []
        is_due = set(due)
        ready = [*due, *(g for g in self.groups if g.complete and g not in is_due)]
        return ready[: self.needed] if len(ready) >= self.needed else []
