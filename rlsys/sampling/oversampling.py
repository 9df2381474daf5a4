"""Over-sampling: more prompts are asked for than a step needs, and the step goes on when it has enough of them.

    step 7    asked   a b c d e f     4 are needed: b d e f are finished first and become the batch, a and c are cut off
    step 8    asked   a c g h i j     a and c go on with the tokens they have, in front of the others

What is left keeps its place: each prompt is trained on once. A group comes with a step at the latest when its oldest token would be
older than `max_lag` in the next one; that step waits for it. Which groups are finished first is a matter of time, so two runs
differ, and what is half-written in a checkpoint's moment is sampled anew when the run goes on.

Kimi k1.5 (arXiv 2501.12599) resumes partial rollouts in this way; APRIL (arXiv 2509.18521) asks for more at once.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rlsys.config.schema import Config
from rlsys.sampling.collector import Collector, JudgedSample
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch, Prompt, Request, Sample


@dataclass(eq=False)
class PromptGroup:
    """A prompt whose samples are being made."""

    position: int  # in the training data
    prompt: Prompt
    wanted: int  # samples
    finished: list[JudgedSample] = field(default_factory=list)
    partial: dict[int, Sample] = field(default_factory=dict)  # half-written, by index

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.wanted

    @property
    def all_samples(self) -> list[Sample]:
        return [s for s, _, _ in self.finished] + list(self.partial.values())

    def lag(self, step: int) -> int:
        """Of its oldest token, if it is trained in this step."""
        return step - 1 - min((s.version for s in self.all_samples), default=step - 1)

    def requests(self, asked: Sequence[Request]) -> list[Request]:
        """Those of its requests that are still to be answered, from where they are."""
        finished = {s.index for s, _, _ in self.finished}
        return [replace(r, partial=self.partial.get(r.index)) for r in asked if r.index not in finished]


class Oversampling:
    """`collect(step)` is the batch of a step. `left` are the positions before `asked` that are still to come in one."""

    def __init__(self, config: Config, collector: Collector, take: Callable[[int, int], list[Prompt]]):
        t = config.trainer
        self.collector, self.take, self.max_lag = collector, take, config.pipeline.max_lag
        self.needed = t.prompts_per_step
        self.at_once = self.needed + math.ceil(self.needed * config.rollout.oversample)
        self.draw = SamplingPlan.from_config(config)
        self.next_position, self.groups = 0, list[PromptGroup]()

    def restore(self, asked: int, left: Sequence[int]) -> None:
        """From where a run was: what it had left is asked for again."""
        self.next_position = asked
        self.groups = [group for position in left for group in self.start_groups(position, 1)]

    def start_groups(self, position: int, count: int) -> list[PromptGroup]:
        return [
            PromptGroup(position + i, prompt, self.draw.completions_per_prompt)
            for i, prompt in enumerate(self.take(position, count))
        ]

    def collect(self, step: int) -> Batch:
        new = self.start_groups(self.next_position, self.at_once - len(self.groups))
        self.groups, self.next_position = self.groups + new, self.next_position + len(new)
        due = [g for g in self.groups if g.lag(step + 1) > self.max_lag]
        sampled = self.sample(step, due)
        chosen = sorted(self.ready_groups(due), key=lambda g: g.position)
        taken = set(chosen)
        self.groups = [g for g in self.groups if g not in taken]
        batch = self.collector.build_batch(
            [g.prompt for g in chosen],
            [judged for g in chosen for judged in g.finished],
            since=sampled,
            baseline=self.draw.greedy_index,
            failure_score=self.collector.failure_score,
        )
        return replace(batch, position=self.next_position, deferred=tuple(g.position for g in self.groups))

    def sample(self, step: int, due: list[PromptGroup]) -> float:
        """Has engines sample until there is enough for this step, and all that is due. Returns when that was."""
        of = {g.prompt.uid: g for g in self.groups}
        prompts = [g.prompt for g in self.groups]
        by_uid = {p.uid: p for p in prompts}
        enough, complete = 0.0, sum(g.complete for g in self.groups)
        for samples in self.collector.rollout.generate(self.requests(step, prompts, of)):
            whole = [s for s in samples if s.finish != "cut"]
            verdicts = self.collector.rewards.judge(whole, by_uid)
            for i, s in enumerate(whole):
                of[s.uid].partial.pop(s.index, None)
                of[s.uid].finished.append((s, verdicts, i))
            for s in samples:
                if s.finish == "cut" and len(s.tokens):
                    of[s.uid].partial[s.index] = s
            complete += sum(of[uid].complete for uid in {s.uid for s in whole})
            if not enough and complete >= self.needed and self.ready_groups(due):
                enough = time.perf_counter()
                self.collector.rollout.stop_early()
        return enough

    def requests(self, step: int, prompts: list[Prompt], of: dict[str, PromptGroup]) -> list[Request]:
        """What is left from before goes in front."""
        order = sorted(self.collector.length_forecast.longest_first(prompts), key=lambda p: not of[p.uid].partial)
        asked = self.draw.requests(self.collector.seed, step, order)
        size = self.draw.completions_per_prompt
        return [r for i, p in enumerate(order) for r in of[p.uid].requests(asked[i * size : (i + 1) * size])]

    def ready_groups(self, due: list[PromptGroup]) -> list[PromptGroup]:
        """The groups that make the batch; none as long as there are too few, or one lacks that cannot wait."""
        if not all(g.complete for g in due):
            return []
        first = set(due)
        found = [*due, *(g for g in self.groups if g.complete and g not in first)]
        return found[: self.needed] if len(found) >= self.needed else []
