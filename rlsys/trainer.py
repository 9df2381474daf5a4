"""The loop. Synchronous training, some steps ahead and in flight are this same code, with another `pipeline.max_lag` and `in_flight`.

prompts ─▶ rollout ─▶ reward ─▶ score ─▶ credit by uid ─▶ pack ─▶ update ─▶ sync ─▶ (evaluate, save)
              ▲                                                              │
              └──────────────────── weights, versioned and verified ─────────┘
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Protocol

from rlsys import metrics
from rlsys.algorithms import kl
from rlsys.algorithms.credit import Credit, CreditAssignment
from rlsys.algorithms.schedule import learning_rate
from rlsys.config.schema import Config, ConfigError
from rlsys.data import Dataset
from rlsys.evaluation.held_out import HeldOutSet, evaluate
from rlsys.interfaces import Critic, Policy, Rewards, Rollout, Scorer
from rlsys.metrics import PhaseTimer
from rlsys.models.lookup import pairs_per_token
from rlsys.numerics import agreement
from rlsys.numerics.diagnosis import explain_disagreement
from rlsys.packs.minibatches import MiniBatch, drop_zero_advantage, split_into_mini_batches
from rlsys.packs.packing import pack, unpack
from rlsys.pipeline import Pipeline, SyncSchedule
from rlsys.runs.best_step import BestStep
from rlsys.runs.checkpoint import Checkpoints
from rlsys.runs.directory import RunDirectory
from rlsys.runs.errors import NothingToLearn, StepAbandoned, TooManyRewardFailures
from rlsys.runs.skipped_updates import SkippedUpdates
from rlsys.runs.stopping import StopSignal
from rlsys.runs.timeline import recorded, step_facts
from rlsys.sampling import dynamic_sampling
from rlsys.sampling.collector import Collector
from rlsys.sampling.early_scoring import EarlyScoring
from rlsys.sampling.oversampling import Oversampling
from rlsys.sampling.sampling_plan import SamplingPlan
from rlsys.tracking.tracking import Tracking
from rlsys.types import Batch, Columns, Floats, Metrics, Pack


class Progress(Protocol):
    def step(self, step: int, found: Metrics) -> None: ...
    def note(self, text: str) -> None: ...
    def show_phase(self, doing: str) -> None: ...


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
        reference: Scorer | None,
        critic: Critic | None,
        run: RunDirectory,
        progress: Progress,
        stop: StopSignal | None = None,
        tracking: Tracking | None = None,
    ):
        self.config, self.run_directory, self.progress, self.stop = config, run, progress, stop or StopSignal()
        self.tracking = tracking
        self.train_data, self.evals = train, evals
        self.rollout, self.policy, self.reference, self.critic = rollout, policy, reference, critic
        self.collector = Collector(rollout, rewards, seed=config.run.seed, reward=config.reward)
        self.draw = SamplingPlan.from_config(config)
        self.scoring = EarlyScoring(config, policy, reference)
        budget, cost = config.policy.tokens_per_pack, pairs_per_token(config.model.path)
        self.pack = partial(pack, tokens_per_pack=budget, pairs_per_token=cost)
        self.credit = CreditAssignment(config)
        self.timetable = SyncSchedule.from_config(config)
        self.oversampling = Oversampling(config, self.collector, train.take) if config.rollout.oversample else None
        self.position = self.asked = 0  # in the training data: what was trained on, and what was asked for
        self.left: tuple[int, ...] = ()  # before `position`, and still to be trained on
        self.kl_coef = config.reference.kl_coef
        self.parts = config.algorithm.advantage == "gdpo"  # whether a group teaches where parts of its rewards differ
        self.failures_told: set[str] = set()
        self.checkpoints = Checkpoints(run.path / "checkpoints", config.checkpoint.keep_last)
        self.best = BestStep(config.checkpoint.keep_best)
        self.skips, self.critic_skips = (
            SkippedUpdates(config.trainer.max_skipped, lr, run.record_event) for lr in ("policy.lr", "critic.lr")
        )
        self.done = self.saved = 0  # the last step whose weights there are, and the last in a checkpoint
        self.owed: Metrics = {}  # figures of the last step, where its evaluation is still to be made
        self.changing = False  # whether the weights are between two steps
        self.ahead = False  # whether the batch of the step after `done` has been taken

    def run(self) -> int:
        """Trains from the newest checkpoint, or from the start, to `trainer.steps`, or till it is told to stop.

        Returns the last step that is done; what is done is saved.
        """
        pending = self.resume()
        self.sync(self.done)
        self.compare()
        if self.owed or self.done == 0:
            self.settle_debts()
            if problem := self.best.explain_missing(self.line):
                raise ConfigError(problem)
            self.best.update(self.done, self.line)
            self.saved = 0  # it still owes what is paid now
        last = self.config.trainer.steps
        self.pipeline = Pipeline(self.sample, first=self.done + 1, last=last, timetable=self.timetable, ready=pending)
        with closing(self.pipeline), closing(self.scoring):
            return self.trained(last)

    def trained(self, last: int) -> int:
        """Step by step up to the last one. Returns as `run` does."""
        self.stop.step_running = True  # from here on there is something to finish
        try:
            while self.done < last and not self.stop.requested:
                self.train(self.done + 1)
        except StepAbandoned:
            if self.changing:  # half of an update is worth nothing
                return self.checkpoints.last_step
            self.scoring.close(wait=True)
        except (NothingToLearn, TooManyRewardFailures):
            self.scoring.close(wait=True)
            if self.owed:
                self.record(self.done, self.owed)
            self.save_missed()  # what was learned so far is good
            self.finish_saving(wait=True)
            raise
        try:
            self.stop.saving = True
            self.save_missed()
            self.finish_saving(wait=True)
        except StepAbandoned:
            return self.checkpoints.last_step
        return self.done

    @recorded(step_facts, name="step")
    def train(self, step: int) -> None:
        """One step and what belongs to it. First its line, then its checkpoint: killed in between, it is done again."""
        c = self.config
        found = self.step(step)
        if self.evaluates(step):
            self.owed = found
            self.settle_debts()
        else:
            self.record(step, found)
        better = self.best.update(step, self.line)
        if better or step == c.trainer.steps or (c.checkpoint.every and step % c.checkpoint.every == 0):
            self.save()
        self.finish_saving(wait=False)

    def evaluates(self, step: int) -> bool:
        every = self.config.eval.every
        return step == self.config.trainer.steps or bool(every and step % every == 0)

    def step(self, step: int) -> Metrics:
        clock = PhaseTimer(lambda phase: self.progress.show_phase(f"step {step}: {phase}"))
        self.ahead = True
        with clock("rollout"):
            batch = self.pipeline.next()  # at most `max_lag` updates old
        self.finish_saving(wait=False)
        clock.move_seconds("rollout", "reward", batch.reward_s)
        self.tell_failures(step, batch)

        self.rollout.sleep()
        with clock("score"):
            scored = self.scored(step, batch)
        credit = self.credit(step, batch, scored, self.kl_coef)
        self.changing = True
        with clock("update"):
            updates = list(self.updates(step, batch, credit))
        learned = self.skips.drop_skipped(step, batch, [u for u, _ in updates if u])
        of_critic = self.critic_skips.drop_skipped(step, batch, [u for _, u in updates if u])
        found = (
            metrics.batch_metrics(batch, self.parts) | metrics.update_metrics(learned) | metrics.credit_metrics(credit)
        )
        require_agreement(self.config, step, found)

        self.renew(step, clock)
        self.done, self.position, self.left = step, batch.position, batch.deferred
        self.changing = self.ahead = False
        found |= metrics.critic_metrics(of_critic) | ({"kl_coef": self.kl_coef} if self.reference else {})
        if learned:
            self.adapt(found)
        found |= clock.metrics()
        found["tokens_per_second"] = found["tokens"] / found["time/step"]
        found["update/skipped"] = sum(u["skipped"] for both in updates for u in both if u)
        found["update/silent_samples"] = sum(u["silent"] for u, _ in updates if u)
        return found | metrics.lag_metrics(step, batch) | {"sync/version": self.timetable.version_after(step)}

    def renew(self, step: int, clock: PhaseTimer) -> None:
        """The engines take the weights of this step, if it is their turn: idle, or in flight unless they are to be evaluated."""
        evaluates = bool(self.evals) and self.evaluates(step)
        if not evaluates and not self.timetable.syncs_after(step):
            return
        if evaluates or not self.config.pipeline.in_flight:
            with clock("rollout"):
                self.pipeline.wait_until_idle()
        with clock("sync"):
            self.sync(step)

    def tell_failures(self, step: int, batch: Batch) -> None:
        """The first failed verdict of each reason, once in a run: a line on the screen, all of it in events.jsonl."""
        for _, verdict in batch.failed:
            if verdict.failure not in self.failures_told:
                self.failures_told.add(verdict.failure)
                first_line = verdict.detail.strip().partition("\n")[0]
                self.progress.note(f"step {step}: a reward verdict failed ({verdict.failure}): {first_line}")
                self.run_directory.record_event(
                    "reward failure", step=step, reason=verdict.failure, detail=verdict.detail
                )

    @recorded(step_facts, name="collect")
    def sample(self, step: int) -> Batch:
        """The judged samples of a step. Which prompts those are follows from the seed and from what came before."""
        t, d = self.config.trainer, self.config.dynamic_sampling

        def ask(count: int) -> Batch:
            prompts = self.train_data.take(self.asked, count)
            self.asked += count
            batch = self.collector.collect(step, prompts, self.draw, seen)
            return replace(batch, position=self.asked)

        self.rollout.wake()
        seen = self.scoring.start_batch(step)
        if d.enabled:
            check = partial(self.collector.raise_if_too_many_failures, step)
            batch = dynamic_sampling.fill_batch(
                ask, t.prompts_per_step, max_rounds=d.max_rounds, step=step, parts=self.parts, check=check
            )
            self.asked = batch.position
        elif self.oversampling:
            batch = self.oversampling.collect(step)
        else:
            batch = ask(t.prompts_per_step)
        return self.collector.raise_if_too_many_failures(step, batch)

    def scored(self, step: int, batch: Batch) -> Columns:
        """What the present weights say of the batch, as far as this configuration needs it."""
        return Columns(**self.scoring.columns(step, batch), values=self.values(batch) if self.critic else None)

    def values(self, batch: Batch) -> Floats:
        assert self.critic is not None
        packs = self.pack(batch, range(len(batch.samples)), ranks=self.critic.ranks)
        return unpack(packs, self.critic.score(packs), len(batch.samples))

    def updates(self, step: int, batch: Batch, credit: Credit) -> Iterator[tuple[Metrics, Metrics]]:
        """One optimizer update per mini-batch. Yields the policy's figures and the critic's, empty for one that does not learn.

        The samples are written while the first is made. Begun earlier, the thread that writes would hold up what lays it out.
        """
        p, c = self.config.policy, self.config.critic
        alone = c.alone_steps if self.critic else 0
        to_policy = replace(credit.columns, values=None, returns=None)
        to_critic = replace(credit.columns, advantages=None, old=None, ref=None, anchor=None)
        for i, mini in enumerate(split_into_mini_batches(self.config, step, batch)):
            loud = drop_zero_advantage(self.config, batch, mini, to_policy)
            for_policy = self.packs(batch, loud, to_policy, self.policy.ranks) if step > alone else None
            for_critic = self.packs(batch, mini, to_critic, self.critic.ranks) if self.critic else None
            if not i:
                self.run_directory.save_samples(f"step-{step:06d}", batch, credit.advantages, credit.columns)
            of_policy, of_critic = {}, {}
            if self.critic and for_critic:
                lr = self.learning_rate(mini.update, c.lr, c.warmup_updates)
                of_critic = self.critic.update(for_critic, lr) | {"lr": lr}
            if for_policy:
                lr = self.learning_rate(mini.update, p.lr, p.warmup_updates, first_step=alone)
                of_policy = self.policy.update(for_policy, lr, self.kl_coef) | {
                    "lr": lr,
                    "silent": float(loud.zero_advantage_samples),
                }
            yield of_policy, of_critic

    def packs(self, batch: Batch, mini: MiniBatch, columns: Columns, ranks: int) -> list[list[Pack]]:
        return self.pack(batch, mini.members, ranks=ranks, columns=columns, weights=mini.weights)

    def learning_rate(self, number: int, peak: float, warmup: int, first_step: int = 0) -> float:
        """Of an update, for who learns from the step after `first_step` on."""
        t = self.config.trainer
        per_step = t.updates_per_step * t.epochs_per_step
        number, total = number - first_step * per_step, (t.steps - first_step) * per_step
        return learning_rate(number, peak=peak, schedule=self.config.policy.lr_schedule, warmup=warmup, total=total)

    def adapt(self, found: Metrics) -> None:
        """Moves the KL coefficient towards what keeps KL at its target."""
        r = self.config.reference
        if r.kl_target and "kl" in found:
            self.kl_coef = kl.adapt_coef(self.kl_coef, found["kl"], r.kl_target, horizon=r.kl_horizon)

    @recorded(step_facts)
    def evaluation(self, step: int) -> Metrics:
        if not self.evals:
            return {}
        self.progress.show_phase(f"step {step}: evaluation")
        self.rollout.wake()
        result = evaluate(
            self.collector,
            self.evals,
            step=step,
            max_new_tokens=self.config.rollout.max_new_tokens,
            pass_score=self.config.eval.pass_score,
            seed=self.config.run.seed,
        )
        self.run_directory.save_samples(f"eval-{step:06d}", result.batch)
        self.tell_failures(step, result.batch)
        return result.metrics()

    def compare(self) -> None:
        """Whether engines and policy say the same of a few samples, before anything is learned from any."""
        prompts = self.train_data.take(self.position, agreement.PROMPT_COUNT)
        found = agreement.measure_agreement(self.rollout, self.policy, prompts, self.config)
        self.progress.note(str(found))
        self.run_directory.record_event("agreement", **found.event_fields())
        if not found.within_limit:
            older = {
                f"the checkpoint of step {step}": str(path / "model") for step, path in self.checkpoints.list_all()[-1:]
            }
            raise explain_disagreement(found, self.policy, self.config, older)

    def sync(self, step: int) -> None:
        """The engines take the weights; their version is the step that made them."""
        self.policy.sync(step)
        self.run_directory.record_event("sync", version=step)

    def record(self, step: int, found: Metrics) -> None:
        self.line = found
        self.run_directory.record_metrics({"step": step} | found)
        self.progress.step(step, found)

    def settle_debts(self) -> None:
        """The evaluation that is due, and the line that waits for it."""
        self.record(self.done, self.owed | self.evaluation(self.done))
        self.owed = {}

    # --- checkpoints ----------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Begins a checkpoint of the last step that is done."""
        self.progress.show_phase(f"step {self.done}: checkpoint")
        if self.checkpoints.step != self.saved:  # it was cut off before every learner had begun: it is begun anew
            self.checkpoints.step = None
        self.finish_saving(wait=True)  # one at a time
        if not self.config.pipeline.in_flight:  # what is being sampled could not be sampled again from newer weights
            self.pipeline.wait_until_idle(undo=self.ahead)
        state = {
            "step": self.done,
            "position": self.position,
            "left": self.left,
            "kl_coef": self.kl_coef,
            "owed": self.owed,
            "best": vars(self.best),
            "skips": [[s.in_a_row, s.first] for s in (self.skips, self.critic_skips)],
        }
        folder = self.checkpoints.begin(self.done, state, self.pipeline.finished_ahead(undo=self.ahead))
        for learner in self.learners:
            learner.save(folder)
        self.run_directory.wait_for_samples()  # what the checkpoint stands for is on disk before it is
        self.saved = self.done

    def save_missed(self) -> None:
        """A checkpoint of a step that was done and not saved."""
        if self.done > self.saved:
            self.save()

    def finish_saving(self, wait: bool) -> None:
        """Puts the checkpoint that was begun in place, as soon as all of it is on disk."""
        if self.checkpoints.step is None:
            return
        written = [learner.saved(wait) for learner in self.learners]
        if None not in written:
            step = self.checkpoints.step
            path = self.checkpoints.complete({name: sum for found in written if found for name, sum in found.items()})
            self.run_directory.record_event(
                "checkpoint", step=step, path=str(path.relative_to(self.run_directory.path))
            )

    @property
    def learners(self) -> list[Policy | Critic]:
        return [self.policy, self.critic] if self.critic else [self.policy]

    def resume(self) -> list[Batch]:
        """Goes back to the newest checkpoint that is whole, if there is one. Returns what was sampled ahead of it."""
        there = self.checkpoints.load_newest(self.progress.note)
        if there:
            for learner in self.learners:
                learner.load(str(there.path))
            state = there.state
            self.done, self.position, self.kl_coef = there.step, state["position"], state["kl_coef"]
            self.left, self.owed = tuple(state.get("left", ())), state["owed"]
            if state["best"]["figure"] == self.best.figure:
                self.best = BestStep(**state["best"])
            for skips, known in zip((self.skips, self.critic_skips), state["skips"], strict=True):
                skips.in_a_row, skips.first = known
            self.progress.note(f"resumed from {there.path}")
        pending = there.pending if there else []
        self.saved, self.asked = self.done, pending[-1].position if pending else self.position
        if self.oversampling:
            self.oversampling.restore(self.asked, pending[-1].deferred if pending else self.left)
        kept = self.done - bool(self.owed) if self.done else -1
        self.run_directory.rewind_metrics(kept)
        self.run_directory.record_event("resume" if there else "begin", step=self.done)
        if self.tracking:
            self.tracking.start(kept)
        return pending


def require_agreement(config: Config, step: int, found: Metrics) -> None:
    """Stops a run whose samples are no longer the policy's own."""
    gap, limit = found.get("mismatch/mean_abs", 0.0), agreement.step_mismatch_limit(config)
    if not gap <= limit:  # and nan is not
        raise agreement.Disagreement(
            f"step {step}: rollout and old log-probs differ by {gap:.2g} on average, more than trainer.max_mismatch ({limit:g}). "
            "The last checkpoint is from before. `rlsys doctor CONFIG` finds out why; a larger trainer.max_mismatch goes on all the same."
        )
