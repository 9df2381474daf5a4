"""Evaluates a run's weights on its held-out sets, on schedule."""

from collections.abc import Sequence

from rlsys.batching.packing import PackBatch
from rlsys.config.schema import Config
from rlsys.evaluation.held_out import HeldOutSet, evaluate
from rlsys.evaluation.held_out_loss import held_out_losses
from rlsys.interfaces import Scorer
from rlsys.runs.run_log import RunLog
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling.collector import Collector
from rlsys.types import Metrics


class Evaluator:
    """Samples completions and has them judged. In supervised training also, or only, the policy computes the loss."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[HeldOutSet],
        collector: Collector,
        log: RunLog,
        policy: Scorer,
        pack: PackBatch,
    ):
        self.config, self.sets, self.collector, self.log = config, sets, collector, log
        self.sampled = [held_out for held_out in sets if held_out.samples]
        self.shown = [held_out for held_out in sets if not held_out.samples]
        self.policy, self.pack = policy, pack

    def is_due(self, step: int) -> bool:
        every = self.config.eval.every
        return step in (0, self.config.trainer.steps) or bool(every and step % every == 0)

    def needs_engines(self, step: int) -> bool:
        """True if the engines must have the weights of this step."""
        return bool(self.sampled) and self.is_due(step)

    def evaluate_if_due(self, step: int) -> Metrics:
        return self.evaluate(step) if self.sets and self.is_due(step) else {}

    @recorded(step_facts, name="evaluation")
    def evaluate(self, step: int) -> Metrics:
        self.log.show_phase(f"step {step}: evaluation")
        losses = self.evaluate_losses(step) if self.shown else {}
        return losses | (self.evaluate_samples(step) if self.sampled else {})

    def evaluate_losses(self, step: int) -> Metrics:
        self.collector.rollout.sleep()
        return held_out_losses(self.policy, self.pack, self.shown, step)

    def evaluate_samples(self, step: int) -> Metrics:
        self.collector.rollout.wake()
        evaluation = evaluate(
            self.collector,
            self.sampled,
            step=step,
            pass_score=self.config.eval.pass_score,
            seed=self.config.run.seed,
        )
        self.log.samples(f"eval-{step:06d}", evaluation.batch)
        self.log.reward_failures(step, evaluation.batch)
        return evaluation.metrics()
