"""Where a step's batch comes from: the next prompts of the training data, sampled and judged."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from rlsys.config.schema import Config
from rlsys.runs.state import RunState
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling import dynamic_sampling
from rlsys.sampling.collector import Collector, OnSamples, TakePrompts
from rlsys.sampling.early_scoring import EarlyScoring
from rlsys.sampling.oversampling import Oversampling
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.types import Batch


class BatchSource:
    """`collect(step)` is the judged batch of a step. Runs on the sampling thread, which owns `next_position`."""

    def __init__(self, config: Config, take: TakePrompts, collector: Collector, scoring: EarlyScoring):
        self.take, self.collector, self.scoring = take, collector, scoring
        self.dynamic, self.prompts_per_step = config.dynamic_sampling, config.trainer.prompts_per_step
        self.by_component = config.algorithm.advantage == "gdpo"
        self.plan = SamplingPlan.from_config(config)
        self.oversampling = Oversampling(config, collector, take) if config.rollout.oversample else None
        self.next_position = 0  # in the training data

    def restore(self, state: RunState, pending: Sequence[Batch]) -> None:
        """Continues behind the batches that were sampled ahead of a checkpoint."""
        self.next_position = pending[-1].position if pending else state.position
        if self.oversampling:
            self.oversampling.restore(self.next_position, pending[-1].deferred if pending else state.deferred)

    @recorded(step_facts, name="collect")
    def collect(self, step: int) -> Batch:
        """Draws prompts that follow from the seed and from the batches before: the same run asks for the same ones."""
        self.collector.rollout.wake()
        on_samples = self.scoring.start_batch(step)
        if self.dynamic.enabled:
            batch = self.collect_informative(step, on_samples)
        elif self.oversampling:
            batch = self.oversampling.collect(step)
        else:
            batch = self.collect_prompts(step, self.prompts_per_step, on_samples)
        self.collector.raise_if_too_many_failures(step, batch)
        return batch

    def collect_prompts(self, step: int, count: int, on_samples: OnSamples) -> Batch:
        prompts = self.take(self.next_position, count)
        self.next_position += count
        batch = self.collector.collect(step, prompts, self.plan, on_samples)
        return replace(batch, position=self.next_position)

    def collect_informative(self, step: int, on_samples: OnSamples) -> Batch:
        """Samples more prompts until enough groups have rewards that differ.

        Prompts behind the last one needed are sampled again later.
        """
        batch = dynamic_sampling.fill_batch(
            lambda count: self.collect_prompts(step, count, on_samples),
            self.prompts_per_step,
            max_rounds=self.dynamic.max_rounds,
            step=step,
            by_component=self.by_component,
            check=partial(self.collector.raise_if_too_many_failures, step),
        )
        self.next_position = batch.position
        return batch
