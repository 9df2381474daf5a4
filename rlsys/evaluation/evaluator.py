"""Evaluates a run's weights on its held-out sets, on schedule."""

from collections.abc import Sequence

from rlsys.config.schema import Config
from rlsys.evaluation.held_out import HeldOutSet, evaluate
from rlsys.runs.run_log import RunLog
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling.collector import Collector
from rlsys.types import Metrics


class Evaluator:
    def __init__(self, config: Config, sets: Sequence[HeldOutSet], collector: Collector, log: RunLog):
        self.config, self.sets, self.collector, self.log = config, sets, collector, log

    def is_due(self, step: int) -> bool:
        every = self.config.eval.every
        return step in (0, self.config.trainer.steps) or bool(every and step % every == 0)

    def needs_engines(self, step: int) -> bool:
        """True if the engines must have the weights of this step."""
        return bool(self.sets) and self.is_due(step)

    def evaluate_if_due(self, step: int) -> Metrics:
        return self.evaluate(step) if self.needs_engines(step) else {}

    @recorded(step_facts, name="evaluation")
    def evaluate(self, step: int) -> Metrics:
        self.log.show_phase(f"step {step}: evaluation")
        self.collector.rollout.wake()
        evaluation = evaluate(
            self.collector,
            self.sets,
            step=step,
            pass_score=self.config.eval.pass_score,
            seed=self.config.run.seed,
        )
        self.log.samples(f"eval-{step:06d}", evaluation.batch)
        self.log.reward_failures(step, evaluation.batch)
        return evaluation.metrics()
