"""The loop. Synchronous and one-step-ahead training are this same code, with `pipeline.max_lag` 0 and 1.

prompts ─▶ rollout ─▶ reward ─▶ score ─▶ credit by uid ─▶ pack ─▶ update ─▶ sync ─▶ (evaluate, save)
              ▲                                                              │
              └──────────────────── weights, versioned and verified ─────────┘
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rlsys import checkpoint, dynamic_sampling, kl, metrics
from rlsys.config import Config
from rlsys.credit import CreditAssignment
from rlsys.data import Dataset
from rlsys.dynamic_sampling import NothingToLearn
from rlsys.evaluation import HeldOut, evaluate
from rlsys.interfaces import Critic, Policy, Rewards, Rollout, Scorer
from rlsys.metrics import Clock, Metrics
from rlsys.minibatches import MiniBatch, mini_batches
from rlsys.packing import pack, unpack
from rlsys.pipeline import Collector, Pipeline, RewardFailure
from rlsys.run_directory import RunDirectory
from rlsys.schedule import learning_rate
from rlsys.types import Batch, Columns, Floats, Pack


class Progress(Protocol):
    def step(self, step: int, found: Metrics) -> None: ...
    def note(self, text: str) -> None: ...


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        train: Dataset,
        evals: list[HeldOut],
        rollout: Rollout,
        rewards: Rewards,
        policy: Policy,
        reference: Scorer | None,
        critic: Critic | None,
        run: RunDirectory,
        progress: Progress,
    ):
        self.config, self.run_directory, self.progress = config, run, progress
        self.train_data, self.evals = train, evals
        self.rollout, self.policy, self.reference, self.critic = rollout, policy, reference, critic
        self.collector = Collector(rollout, rewards, seed=config.run.seed, reward=config.reward)
        self.credit = CreditAssignment(config)
        self.position = self.asked = 0  # in the training data: what was trained on, and what was asked for
        self.kl_coef = config.reference.kl_coef
        self.failures_told: set[str] = set()

    def run(self) -> None:
        """Trains from the newest checkpoint, or from the start, to `trainer.steps`."""
        c = self.config
        done = self.resume()
        self.sync(done)
        if done == 0:
            self.record(0, self.evaluation(0))
        pipeline = Pipeline(self.sample, first=done + 1, last=c.trainer.steps, max_lag=c.pipeline.max_lag)
        try:
            for step in range(done + 1, c.trainer.steps + 1):
                try:
                    found = self.step(step, pipeline)
                except (NothingToLearn, RewardFailure):
                    self.save_missed(step - 1)  # what was learned so far is good
                    raise
                if step == c.trainer.steps or (c.eval.every and step % c.eval.every == 0):
                    try:
                        found |= self.evaluation(step)
                    except RewardFailure:
                        self.record(step, found)
                        self.save_missed(step)
                        raise
                # First the line, then the checkpoint: killed in between, the step is done again and its line replaced.
                self.record(step, found)
                if step == c.trainer.steps or (c.checkpoint.every and step % c.checkpoint.every == 0):
                    self.save(step)
        finally:
            pipeline.close()

    def step(self, step: int, pipeline: Pipeline) -> Metrics:
        clock = Clock()
        with clock("rollout"):
            batch = pipeline.next()  # at most `max_lag` updates old
        clock.split("rollout", "reward", batch.reward_s)
        self.tell_failures(step, batch)

        self.rollout.resting()
        with clock("score"):
            scored = self.scored(batch)
        credit = self.credit(step, batch, scored, self.kl_coef)
        with clock("update"):
            updates = list(self.updates(step, batch, credit.columns))
        learned, of_critic = [u for u, _ in updates if u], [u for _, u in updates if u]
        require_finite(step, learned, "policy.lr")
        require_finite(step, of_critic, "critic.lr")

        pipeline.drain()
        with clock("sync"):
            self.sync(step)
        self.position = batch.position
        self.run_directory.samples(f"step-{step:06d}", batch, credit.advantages)
        found = metrics.of_batch(batch) | metrics.of_updates(learned) | metrics.of_credit(credit)
        found |= metrics.of_critic(of_critic) | ({"kl_coef": self.kl_coef} if self.reference else {})
        self.adapt(found)
        found |= clock.metrics()
        found["tokens_per_second"] = found["tokens"] / found["time/step"]
        return found | {"lag": step - 1 - min(s.version for s in batch.samples), "sync/version": step}

    def tell_failures(self, step: int, batch: Batch) -> None:
        """The first failed verdict of each reason, once in a run: a line on the screen, all of it in events.jsonl."""
        for _, verdict in batch.failed:
            if verdict.failure not in self.failures_told:
                self.failures_told.add(verdict.failure)
                first_line = verdict.detail.strip().partition("\n")[0]
                self.progress.note(f"step {step}: a reward verdict failed ({verdict.failure}): {first_line}")
                self.run_directory.event("reward failure", step=step, reason=verdict.failure, detail=verdict.detail)

    def sample(self, step: int) -> Batch:
        """The judged samples of a step. Which prompts those are follows from the seed and from what came before."""
        t, r, d = self.config.trainer, self.config.rollout, self.config.dynamic_sampling

        def ask(count: int) -> Batch:
            prompts = self.train_data.take(self.asked, count)
            self.asked += count
            batch = self.collector.collect(
                step,
                prompts,
                samples=t.samples_per_prompt,
                temperature=r.temperature,
                max_new_tokens=r.max_new_tokens,
                greedy=self.config.algorithm.advantage == "remax",
            )
            return replace(batch, position=self.asked)

        self.rollout.generating()
        if d.enabled:
            parts = self.config.algorithm.advantage == "gdpo"
            batch = dynamic_sampling.fill(ask, t.prompts_per_step, max_rounds=d.max_rounds, step=step, parts=parts)
            self.asked = batch.position
        else:
            batch = ask(t.prompts_per_step)
        return self.collector.checked(step, batch)

    def scored(self, batch: Batch) -> Columns:
        """What the present weights say of the batch, as far as this configuration needs it."""
        c, t = self.config, self.config.trainer
        in_reward = self.reference is not None and c.reference.kl_in == "reward"
        # With one update and nothing else that asks, the update's own forward pass has the old log-probs.
        old = t.updates_per_step * t.epochs_per_step > 1 or in_reward or c.entropy.control != "none"
        return Columns(
            old=self.score(self.policy, batch) if old else None,
            ref=self.score(self.reference, batch) if self.reference else None,
            values=self.score(self.critic, batch) if self.critic else None,
        )

    def score(self, scorer: Scorer, batch: Batch) -> Floats:
        packs = pack(
            batch, range(len(batch.samples)), ranks=scorer.ranks, tokens_per_pack=self.config.policy.tokens_per_pack
        )
        return unpack(packs, scorer.score(packs), len(batch.samples))

    def updates(self, step: int, batch: Batch, columns: Columns) -> Iterator[tuple[Metrics, Metrics]]:
        """One optimizer update per mini-batch. Yields the policy's figures and the critic's, empty for one that does not learn."""
        p, c = self.config.policy, self.config.critic
        alone = c.alone_steps if self.critic else 0
        for mini in mini_batches(self.config, step, batch):
            of_policy, of_critic = {}, {}
            if self.critic:
                lr = self.learning_rate(mini.number, c.lr, c.warmup_updates)
                own = replace(columns, advantages=None, old=None, ref=None, anchor=None)
                of_critic = self.critic.update(self.packs(batch, mini, own, self.critic.ranks), lr) | {"lr": lr}
            if step > alone:
                lr = self.learning_rate(mini.number, p.lr, p.warmup_updates, first_step=alone)
                packs = self.packs(batch, mini, replace(columns, values=None, returns=None), self.policy.ranks)
                of_policy = self.policy.update(packs, lr, self.kl_coef) | {"lr": lr}
            yield of_policy, of_critic

    def packs(self, batch: Batch, mini: MiniBatch, columns: Columns, ranks: int) -> list[list[Pack]]:
        budget = self.config.policy.tokens_per_pack
        return pack(batch, mini.members, ranks=ranks, tokens_per_pack=budget, columns=columns, weights=mini.weights)

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
            self.kl_coef = kl.adapted(self.kl_coef, found["kl"], r.kl_target, horizon=r.kl_horizon)

    def evaluation(self, step: int) -> Metrics:
        if not self.evals:
            return {}
        self.rollout.generating()
        result = evaluate(
            self.collector,
            self.evals,
            step=step,
            max_new_tokens=self.config.rollout.max_new_tokens,
            pass_score=self.config.eval.pass_score,
            seed=self.config.run.seed,
        )
        self.run_directory.samples(f"eval-{step:06d}", result.batch)
        return result.metrics()

    def sync(self, step: int) -> None:
        """The engines take the weights; their version is the step that made them."""
        self.policy.sync(step)
        self.run_directory.event("sync", version=step)

    def record(self, step: int, found: Metrics) -> None:
        self.run_directory.metrics({"step": step} | found)
        self.progress.step(step, found)

    def save(self, step: int) -> None:
        folder = Path(self.run_directory.path) / "checkpoints"
        state = {"step": step, "position": self.position, "kl_coef": self.kl_coef}
        path = checkpoint.save(folder, step, state, self.fill, self.config.checkpoint.keep_last)
        self.run_directory.event("checkpoint", step=step, path=str(path.relative_to(self.run_directory.path)))

    def save_missed(self, step: int) -> None:
        """A checkpoint of a step that was done and not saved."""
        there = checkpoint.found(self.run_directory.path / "checkpoints")
        if step > (there[-1][0] if there else 0):
            self.save(step)

    def fill(self, folder: str) -> None:
        self.policy.save(folder)
        if self.critic:
            self.critic.save(folder)

    def resume(self) -> int:
        """Loads the newest checkpoint, if there is one, and returns its step."""
        there = checkpoint.found(self.run_directory.path / "checkpoints")
        done = there[-1][0] if there else 0
        if there:
            self.policy.load(str(there[-1][1]))
            if self.critic:
                self.critic.load(str(there[-1][1]))
            state = checkpoint.state(there[-1][1])
            self.position, self.kl_coef = state["position"], state["kl_coef"]
            self.progress.note(f"resumed from {there[-1][1]}")
        self.asked = self.position
        self.run_directory.rewind(done if done else -1)
        self.run_directory.event("resume" if done else "begin", step=done)
        return done


def require_finite(step: int, updates: list[Metrics], lr: str) -> None:
    """Stops before weights that mean nothing reach the engines or a checkpoint."""
    for number, update in enumerate(updates, 1):
        if not (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])):
            raise FloatingPointError(
                f"step {step}, update {number}: loss {update['loss']}, gradient norm {update['grad_norm']}. The engines keep "
                f"their weights and the last checkpoint is good. A lower {lr} or policy.dtype=float32 may help."
            )
