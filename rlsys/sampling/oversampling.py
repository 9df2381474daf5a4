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
from rlsys.sampling.collector import Collector, Judged
from rlsys.sampling.sampling_plan import Draw
from rlsys.types import Batch, Prompt, Request, Sample


@dataclass(eq=False)
class Group:
    """A prompt whose samples are being made."""

    position: int  # in the training data
    prompt: Prompt
    wanted: int  # samples
    finished: list[Judged] = field(default_factory=list)
    begun: dict[int, Sample] = field(default_factory=dict)  # half-written, by index

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.wanted

    @property
    def there(self) -> list[Sample]:
        return [s for s, _, _ in self.finished] + list(self.begun.values())

    def lag(self, step: int) -> int:
        """Of its oldest token, if it is trained in this step."""
        return step - 1 - min((s.version for s in self.there), default=step - 1)

    def requests(self, asked: Sequence[Request]) -> list[Request]:
        """Those of its requests that are still to be answered, from where they are."""
        finished = {s.index for s, _, _ in self.finished}
        return [replace(r, begun=self.begun.get(r.index)) for r in asked if r.index not in finished]


class Oversampling:
    """`collect(step)` is the batch of a step. `left` are the positions before `asked` that are still to come in one."""

    def __init__(self, config: Config, collector: Collector, take: Callable[[int, int], list[Prompt]]):
        t = config.trainer
        self.collector, self.take, self.max_lag = collector, take, config.pipeline.max_lag
        self.needed = t.prompts_per_step
        self.at_once = self.needed + math.ceil(self.needed * config.rollout.oversample)
        self.draw = Draw.of(config)
        self.asked, self.groups = 0, list[Group]()

    def begin(self, asked: int, left: Sequence[int]) -> None:
        """From where a run was: what it had left is asked for again."""
        self.asked = asked
        self.groups = [group for position in left for group in self.next(position, 1)]

    def next(self, position: int, count: int) -> list[Group]:
        return [Group(position + i, prompt, self.draw.size) for i, prompt in enumerate(self.take(position, count))]

    def collect(self, step: int) -> Batch:
        new = self.next(self.asked, self.at_once - len(self.groups))
        self.groups, self.asked = self.groups + new, self.asked + len(new)
        due = [g for g in self.groups if g.lag(step + 1) > self.max_lag]
        sampled = self.sample(step, due)
        chosen = sorted(self.chosen(due), key=lambda g: g.position)
        taken = set(chosen)
        self.groups = [g for g in self.groups if g not in taken]
        batch = self.collector.assembled(
            [g.prompt for g in chosen],
            [judged for g in chosen for judged in g.finished],
            since=sampled,
            baseline=self.draw.baseline,
            failure_score=self.collector.failure_score,
        )
        return replace(batch, position=self.asked, left=tuple(g.position for g in self.groups))

    def sample(self, step: int, due: list[Group]) -> float:
        """Has engines sample until there is enough for this step, and all that is due. Returns when that was."""
        of = {g.prompt.uid: g for g in self.groups}
        prompts = [g.prompt for g in self.groups]
        by_uid = {p.uid: p for p in prompts}
        enough, complete = 0.0, sum(g.complete for g in self.groups)
        for samples in self.collector.rollout.generate(self.requests(step, prompts, of)):
            whole = [s for s in samples if s.finish != "cut"]
            verdicts = self.collector.rewards.judge(whole, by_uid)
            for i, s in enumerate(whole):
                of[s.uid].begun.pop(s.index, None)
                of[s.uid].finished.append((s, verdicts, i))
            for s in samples:
                if s.finish == "cut" and len(s.tokens):
                    of[s.uid].begun[s.index] = s
            complete += sum(of[uid].complete for uid in {s.uid for s in whole})
            if not enough and complete >= self.needed and self.chosen(due):
                enough = time.perf_counter()
                self.collector.rollout.cut()
        return enough

    def requests(self, step: int, prompts: list[Prompt], of: dict[str, Group]) -> list[Request]:
        """What is left from before goes in front."""
        order = sorted(self.collector.lengths.longest_first(prompts), key=lambda p: not of[p.uid].begun)
        asked = self.draw.requests(self.collector.seed, step, order)
        size = self.draw.size
        return [r for i, p in enumerate(order) for r in of[p.uid].requests(asked[i * size : (i + 1) * size])]

    def chosen(self, due: list[Group]) -> list[Group]:
        """The groups that make the batch; none as long as there are too few, or one lacks that cannot wait."""
        if not all(g.complete for g in due):
            return []
        first = set(due)
        found = [*due, *(g for g in self.groups if g.complete and g not in first)]
        return found[: self.needed] if len(found) >= self.needed else []
