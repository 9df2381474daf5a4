"""Batches of supervised training: what rows show takes the place of samples, and engines, if any, only evaluate."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from rlsys.config.schema import Config
from rlsys.runs.state import RunState
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling.collector import TakePrompts
from rlsys.types import Batch, Prompt, Request, Sample, Verdict


class DemonstrationSource:
    """`collect(step)` is the batch of a step: the next rows of the training data."""

    by_component = False

    def __init__(self, config: Config, take: TakePrompts):
        self.take, self.rows_per_step = take, config.trainer.prompts_per_step
        self.next_position = 0  # in the training data

    def restore(self, state: RunState, pending: Sequence[Batch]) -> None:
        self.next_position = pending[-1].position if pending else state.position

    @recorded(step_facts, name="collect")
    def collect(self, step: int) -> Batch:
        rows = self.take(self.next_position, self.rows_per_step)
        self.next_position += self.rows_per_step
        return replace(demonstration_batch(rows, step - 1), position=self.next_position)


def demonstration_batch(prompts: list[Prompt], version: int) -> Batch:
    """Returns the demonstrations of these rows as samples, each a group of its own."""
    samples = [demonstrated_sample(prompt, version) for prompt in prompts]
    return Batch(
        prompts,
        samples,
        groups=np.arange(len(samples)),
        rewards=np.zeros(len(samples), dtype=np.float32),
        components=[{} for _ in samples],
        is_shown=True,
    )


def demonstrated_sample(prompt: Prompt, version: int) -> Sample:
    shown = prompt.demonstration
    assert shown is not None
    no_logprobs = np.zeros(len(shown.tokens), dtype=np.float32)  # nobody sampled them
    return Sample(
        prompt.uid, 0, shown.text, shown.tokens, no_logprobs, "stop", version, observations=shown.observations
    )


class NoEngines:
    """In place of engines and rewards, where a supervised run evaluates nothing but losses."""

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        raise AssertionError("this run has no engines")

    def judge(self, samples: list[Sample], prompts: dict[str, Prompt]) -> Future[list[Verdict]]:
        raise AssertionError("this run has no rewards")

    def stop_early(self) -> None: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...
