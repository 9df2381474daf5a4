"""The loop, synchronous and asynchronous alike: `pipeline.max_lag` and `pipeline.in_flight` decide which.

prompts ─▶ rollout ─▶ reward ─▶ score ─▶ credit by uid ─▶ pack ─▶ update ─▶ sync ─▶ (evaluate, save)
              ▲                                                              │
              └──────────────────── weights, versioned and verified ─────────┘
"""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from rlsys import agreement
from rlsys.algorithms import kl
from rlsys.algorithms.credit import CreditAssignment
from rlsys.batching.packing import pack
from rlsys.config.derived import has_engines, is_supervised
from rlsys.config.schema import Config
from rlsys.data import Dataset
from rlsys.errors import ConfigError, Disagreement, NothingToLearn, StepAbandoned, TooManyRewardFailures
from rlsys.evaluation.evaluator import Evaluator
from rlsys.evaluation.held_out import HeldOutSet
from rlsys.interfaces import Critic, Learner, Policy, Reference, Rewards, Rollout
from rlsys.metrics import PhaseTimer, step_metrics
from rlsys.models.lookup import pairs_per_token
from rlsys.pipeline import Pipeline, SyncSchedule
from rlsys.runs.best_step import BestStep
from rlsys.runs.checkpoint import SavedCheckpoint
from rlsys.runs.checkpointing import Checkpointing
from rlsys.runs.run_log import RunLog
from rlsys.runs.state import RunState
from rlsys.runs.stopping import StopSignal
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling.collector import Collector
from rlsys.sampling.demonstrations import DemonstrationSource
from rlsys.sampling.early_scoring import EarlyScoring
from rlsys.sampling.source import BatchSource
from rlsys.types import Batch, Metrics
from rlsys.updates import Updates

Explain = Callable[
    [agreement.Agreement, dict[str, str]], Exception
]  # the second argument: directories of older weights, by description


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        train: Dataset,
        evals: list[HeldOutSet],
        rollout: Rollout,
        rewards: Rewards,
        policy: Policy,
        reference: Reference | None,
        critic: Critic | None,
        log: RunLog,
        explain: Explain,
        stop: StopSignal | None = None,
        control_tokens: Mapping[int, float] | None = None,
        share_prompts: bool = True,
        newest: SavedCheckpoint | None = None,
    ):
        """`control_tokens`: algorithm.control_tokens, by their ids. `share_prompts` within a pack.

        `newest`: the checkpoint to go on from, if it was read already.
        """
        self.config, self.log, self.stop = config, log, stop or StopSignal()
        for note in log.run.check_rows(config, train, {held_out.name: held_out.prompts for held_out in evals}):
            log.note(note)
        self.rollout, self.policy, self.reference, self.explain = rollout, policy, reference, explain
        budget, cost = config.policy.tokens_per_pack, pairs_per_token(config.model.path)
        pack_batch = partial(pack, tokens_per_pack=budget, pairs_per_token=cost, share_prompts=share_prompts)
        collector = Collector(rollout, rewards, seed=config.run.seed, reward=config.reward)
        self.scoring = EarlyScoring(config, policy, reference, critic, pack_batch, self.stop.threads)
        self.batches = (
            DemonstrationSource(config, train.take)
            if is_supervised(config)
            else BatchSource(config, train.take, collector, self.scoring)
        )
        self.credit = CreditAssignment(config, control_tokens)
        self.updates = Updates(config, policy, critic, pack_batch, log, control_tokens or ())
        self.evaluator = Evaluator(config, evals, collector, log, policy, pack_batch)
        learners: list[Learner] = [policy, critic] if critic else [policy]
        if reference and config.reference.refresh_every:
            learners.append(reference)
        self.checkpointing = Checkpointing(log, learners, keep_last=config.checkpoint.keep_last, newest=newest)
        self.schedule = SyncSchedule.from_config(config)
        self.state = RunState(kl_coef=config.reference.kl_coef, best=BestStep(config.checkpoint.keep_best))

    def run(self) -> int:
        """Trains from the newest checkpoint, or from the start, to `trainer.steps` or until a stop is requested.

        Returns the last finished step; it is saved.
        """
        pending = self.restore()
        if has_engines(self.config):
            self.sync(self.state.step)
            self.check_agreement()
        if self.state.pending_metrics or self.state.step == 0:
            metrics = self.run_pending_evaluation()
            if self.evaluator.is_due(self.state.step) and (problem := self.state.best.explain_missing(metrics)):
                raise ConfigError(problem)
            self.checkpointing.saved_step = 0  # the checkpoint still has the evaluation as pending
        last = self.config.trainer.steps
        self.pipeline = Pipeline(
            self.batches.collect,
            first=self.state.step + 1,
            last=last,
            schedule=self.schedule,
            ready=pending,
            thread=self.stop.threads.executor("collect"),
        )
        with closing(self.pipeline), closing(self.scoring):
            return self.run_until(last)

    def run_until(self, last: int) -> int:
        self.stop.step_running = True  # from now on a stop waits for the step
        try:
            while self.state.step < last and not self.stop.requested:
                self.run_step(self.state.step + 1)
        except StepAbandoned:
            if self.updates.started_step > self.state.step:  # weights in the middle of an update cannot be saved
                return self.checkpointing.committed_step
            self.scoring.close(wait=True)
        except (NothingToLearn, TooManyRewardFailures):
            self.scoring.close(wait=True)
            if self.state.pending_metrics:
                self.log.metrics(self.state.step, self.state.pending_metrics)
            self.save()  # the weights are good
            self.checkpointing.commit(wait=True)
            raise
        return self.save_last()

    def save_last(self) -> int:
        """Saves the last finished step of a run that ends here. Returns the step that is saved."""
        step = self.state.step
        try:
            self.wait_for_batches_ahead()
            given_up = self.pipeline.given_up(after=step)
            self.stop.saving = True
            self.save()
            self.checkpointing.commit(wait=True)
        except StepAbandoned:
            return self.checkpointing.committed_step
        if given_up and not self.config.pipeline.in_flight:
            self.log.event("batches given up", step=step, batches=given_up)
            self.log.note(
                f"batches {given_up} were not sampled in time. They will be sampled from the weights of step {step}, which "
                "are newer than theirs were: the resumed run is not the same, number for number, as one that never stopped"
            )
        return step

    @recorded(step_facts, name="step")
    def run_step(self, step: int) -> None:
        """Trains a step, writes its metrics, then saves. A step that is killed in between runs again."""
        best = self.state.best
        self.train_step(step)
        self.run_pending_evaluation()
        every = self.config.checkpoint.every
        if self.state.best != best or step == self.config.trainer.steps or (every and step % every == 0):
            self.save()
        self.checkpointing.commit(wait=False)

    def train_step(self, step: int) -> None:
        timer = PhaseTimer(lambda phase: self.log.show_phase(f"step {step}: {phase}"))
        with timer("rollout"):
            batch = self.pipeline.next()  # at most `max_lag` updates old
        self.checkpointing.commit(wait=False)
        timer.move_seconds("rollout", "reward", batch.reward_s)
        self.log.reward_failures(step, batch)

        self.rollout.sleep()
        with timer("score"):
            columns = self.scoring.columns(step, batch)  # old and reference log-probs, the critic's values
        credit = self.credit(step, batch, columns, self.state.kl_coef)
        with timer("update"):
            updates = self.updates(step, batch, credit, self.state)
        metrics = step_metrics(step, batch, credit, updates, by_component=self.batches.by_component)
        require_agreement(self.config, step, metrics)

        self.refresh_reference_if_due(step)
        if self.scoring.has_reference:
            metrics["kl_coef"] = self.state.kl_coef
        kl_coef = self.adapt_kl_coef(metrics) if updates.policy else self.state.kl_coef
        # From here on the step is finished: a stop saves it, and a resumed run syncs and evaluates its weights.
        self.state = self.state.after(
            step, batch, kl_coef=kl_coef, policy_skips=updates.policy_skips, critic_skips=updates.critic_skips
        )
        self.state = replace(self.state, pending_metrics=self.timed(step, metrics, timer))
        self.sync_weights_if_due(step, timer)
        self.state = replace(self.state, pending_metrics=self.timed(step, metrics, timer))

    def timed(self, step: int, metrics: Metrics, timer: PhaseTimer) -> Metrics:
        metrics = metrics | timer.metrics() | {"sync/version": self.schedule.version_after(step)}
        return metrics | {"tokens_per_second": metrics["tokens"] / metrics["time/step"]}

    def sync_weights_if_due(self, step: int, timer: PhaseTimer) -> None:
        """Engines take the weights when they are idle, or in flight unless an evaluation needs them."""
        evaluates = self.evaluator.needs_engines(step)
        if not evaluates and not self.schedule.syncs_after(step):
            return
        if evaluates or not self.config.pipeline.in_flight:
            with timer("rollout"):
                self.pipeline.wait_until_idle(after=step)
        with timer("sync"):
            self.sync(step)

    def refresh_reference_if_due(self, step: int) -> None:
        """The reference takes the policy's weights, before any later batch is scored."""
        every = self.config.reference.refresh_every
        if self.reference and every and step % every == 0:
            self.reference.refresh()
            self.log.event("reference refreshed", step=step)

    def sync(self, step: int) -> None:
        """Brings the policy's weights to the engines and verifies them. Their version is the step that made them."""
        self.policy.sync(step)
        self.log.event("sync", version=step)

    def adapt_kl_coef(self, metrics: Metrics) -> float:
        """The next KL coefficient: up while KL is above `reference.kl_target`, down while it is below."""
        r = self.config.reference
        if not r.kl_target or "kl" not in metrics:
            return self.state.kl_coef
        return kl.adapt_coef(self.state.kl_coef, metrics["kl"], r.kl_target)

    def record(self, metrics: Metrics) -> None:
        """Writes the metrics of the last finished step, which then is complete."""
        self.log.metrics(self.state.step, metrics)
        best = self.state.best.after(self.state.step, metrics)
        self.state = replace(self.state, pending_metrics={}, best=best)

    def run_pending_evaluation(self) -> Metrics:
        """Completes the last finished step: evaluates it if that is due, and writes its metrics."""
        metrics = self.state.pending_metrics | self.evaluator.evaluate_if_due(self.state.step)
        self.record(metrics)
        return metrics

    def check_agreement(self) -> None:
        """Compares the log-probs of engines and policy on a few samples, before anything is learned from any."""
        prompts = self.batches.take(self.state.position, agreement.PROMPT_COUNT)
        result = agreement.measure_agreement(self.rollout, self.policy, prompts, self.config)
        self.log.note(str(result))
        if result.remark:
            self.log.note(result.remark)
        self.log.event("agreement", **result.event_fields())
        if not result.within_limit:
            raise self.explain(result, self.checkpointing.older_weights())

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begins a checkpoint of the last finished step, unless it has one."""
        step = self.state.step
        if step <= self.checkpointing.saved_step:
            return
        self.log.show_phase(f"step {step}: checkpoint")
        self.wait_for_batches_ahead()
        self.checkpointing.finish_previous()
        self.checkpointing.begin(self.state, self.pipeline.finished_ahead(after=step))

    def wait_for_batches_ahead(self) -> None:
        """Waits for batches that a resumed run would sample from newer weights, at most until a stop's grace is over."""
        if not self.config.pipeline.in_flight:
            with suppress(StepAbandoned):
                self.pipeline.wait_until_idle(after=self.state.step)

    def restore(self) -> list[Batch]:
        """Goes back to the newest undamaged checkpoint, if there is one. Returns the batches sampled ahead of it."""
        fresh, checkpoint = self.state, self.checkpointing.restore()
        pending: list[Batch] = []
        if checkpoint:
            self.state, pending = checkpoint
            if self.state.best.metric != fresh.best.metric:  # another checkpoint.keep_best
                self.state = replace(self.state, best=fresh.best)
        self.batches.restore(self.state, pending)
        step = self.state.step
        kept_step = step - bool(self.state.pending_metrics) if step else -1
        self.log.begin(step, kept_step=kept_step, resumed=checkpoint is not None)
        return pending


def require_agreement(config: Config, step: int, metrics: Metrics) -> None:
    """Stops a run whose samples are no longer the policy's own."""
    gap, limit = metrics.get("mismatch/mean_abs", 0.0), agreement.step_mismatch_limit(config)
    if not gap <= limit:  # also where gap is NaN
        raise Disagreement(
            f"step {step}: rollout and old log-probs differ by {gap:.2g} on average, more than trainer.max_mismatch ({limit:g}). "
            "The last checkpoint is from before. `rlsys doctor CONFIG` finds out why; a larger trainer.max_mismatch goes on all the same."
        )
