"""The loop. Synchronous and one-step-ahead training are this same code, with `pipeline.max_lag` 0 and 1.

prompts ─▶ rollout ─▶ reward ─▶ advantage by uid ─▶ pack ─▶ score ─▶ update ─▶ sync ─▶ (evaluate, save)
              ▲                                                                 │
              └──────────────────── weights, versioned and verified ────────────┘
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from rlsys import advantages, checkpoint, metrics
from rlsys.config import Config
from rlsys.data import Dataset
from rlsys.evaluation import Evaluation, evaluate
from rlsys.interfaces import Policy, Rewards, Rollout, Scorer
from rlsys.metrics import Clock, Metrics
from rlsys.packing import pack, unpack
from rlsys.pipeline import Collector, Pipeline
from rlsys.plugins import find
from rlsys.run_directory import RunDirectory
from rlsys.schedule import learning_rate
from rlsys.seeds import seed_of
from rlsys.types import Batch, Floats


class Progress(Protocol):
    def step(self, step: int, found: Metrics) -> None: ...
    def note(self, text: str) -> None: ...


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        train: Dataset,
        evals: list[Dataset],
        rollout: Rollout,
        rewards: Rewards,
        policy: Policy,
        reference: Scorer | None,
        run: RunDirectory,
        progress: Progress,
    ):
        self.config, self.run_directory, self.progress = config, run, progress
        self.train_data, self.evals = train, evals
        self.rollout, self.policy, self.reference = rollout, policy, reference
        self.collector = Collector(
            rollout, rewards, seed=config.run.seed, max_failure_share=config.reward.max_failure_share
        )
        self.advantage = find(config.algorithm.advantage, advantages.ESTIMATORS, "algorithm.advantage")

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
                found = self.step(step, pipeline)
                if step == c.trainer.steps or (c.eval.every and step % c.eval.every == 0):
                    found |= self.evaluation(step)
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
        batch_advantages = self.advantages(step, batch)

        self.rollout.resting()
        with clock("score"):
            old = self.old_logprobs(batch)
            ref = self.reference_logprobs(batch)
        with clock("update"):
            updates = list(self.updates(step, batch, batch_advantages, old, ref))
        require_finite(step, updates)

        pipeline.drain()
        with clock("sync"):
            self.sync(step)
        self.run_directory.samples(f"step-{step:06d}", batch, batch_advantages.numpy())
        asked = self.config.trainer.prompts_per_step * self.config.trainer.samples_per_prompt
        times = clock.metrics()
        found = metrics.of_batch(batch, batch_advantages.numpy(), asked) | metrics.of_updates(updates) | times
        return found | {
            "tokens_per_second": found["tokens"] / times["time/step"],
            "lag": step - 1 - min(s.version for s in batch.samples),
            "sync/version": step,
        }

    def sample(self, step: int) -> Batch:
        """The judged samples of a step. Which prompts those are depends on nothing but the step."""
        t, r = self.config.trainer, self.config.rollout
        prompts = self.train_data.take((step - 1) * t.prompts_per_step, t.prompts_per_step)
        self.rollout.generating()
        return self.collector.collect(
            step, prompts, samples=t.samples_per_prompt, temperature=r.temperature, max_new_tokens=r.max_new_tokens
        )

    def advantages(self, step: int, batch: Batch) -> torch.Tensor:
        """[N] One number per sample, from rewards and groups alone."""
        a, rewards = self.config.algorithm, torch.from_numpy(batch.rewards)
        if self.config.reward.shuffle:
            order = np.random.default_rng(seed_of(self.config.run.seed, step, "shuffle")).permutation(len(rewards))
            rewards = rewards[torch.from_numpy(order)]
        options = {"std": a.std, "eps": a.epsilon} if a.advantage == "grpo" else {}
        return self.advantage(
            rewards, torch.from_numpy(batch.groups), lengths=torch.from_numpy(batch.lengths), **options
        ).float()

    def old_logprobs(self, batch: Batch) -> list[Floats] | None:
        """The policy's log-probs before this step's first update, or None where the update's own forward pass has them."""
        if self.config.trainer.updates_per_step * self.config.trainer.epochs_per_step == 1:
            return None
        return self.score(self.policy, batch)

    def reference_logprobs(self, batch: Batch) -> list[Floats] | None:
        return self.score(self.reference, batch) if self.reference else None

    def score(self, scorer: Scorer, batch: Batch) -> list[Floats]:
        packs = pack(
            batch, range(len(batch.samples)), ranks=scorer.ranks, tokens_per_pack=self.config.policy.tokens_per_pack
        )
        return unpack(packs, scorer.score(packs), len(batch.samples))

    def updates(
        self,
        step: int,
        batch: Batch,
        batch_advantages: torch.Tensor,
        old: list[Floats] | None,
        ref: list[Floats] | None,
    ) -> Iterator[Metrics]:
        """One optimizer update per mini-batch of whole groups, `updates_per_step` of them in each of `epochs_per_step` passes."""
        c, t = self.config, self.config.trainer
        per_step = t.updates_per_step * t.epochs_per_step
        number = (step - 1) * per_step
        for epoch in range(t.epochs_per_step):
            order = np.random.default_rng(seed_of(c.run.seed, step, epoch, "mini-batches")).permutation(
                len(batch.prompts)
            )
            for groups in np.split(order, t.updates_per_step):
                members = np.flatnonzero(np.isin(batch.groups, groups)).tolist()
                packs = pack(
                    batch,
                    members,
                    ranks=self.policy.ranks,
                    tokens_per_pack=c.policy.tokens_per_pack,
                    advantages=batch_advantages,
                    normalize=c.algorithm.normalize,
                    constant=c.algorithm.constant or c.rollout.max_new_tokens,
                    old=old,
                    ref=ref,
                )
                lr = learning_rate(
                    number,
                    peak=c.policy.lr,
                    schedule=c.policy.lr_schedule,
                    warmup=c.policy.warmup_updates,
                    total=t.steps * per_step,
                )
                yield self.policy.update(packs, lr) | {"lr": lr}
                number += 1

    def evaluation(self, step: int) -> Metrics:
        if not self.evals:
            return {}
        self.rollout.generating()
        result: Evaluation = evaluate(
            self.collector, self.evals, step=step, max_new_tokens=self.config.rollout.max_new_tokens
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
        path = checkpoint.save(folder, step, {"step": step}, self.policy.save, self.config.checkpoint.keep_last)
        self.run_directory.event("checkpoint", step=step, path=str(path.relative_to(self.run_directory.path)))

    def resume(self) -> int:
        """Loads the newest checkpoint, if there is one, and returns its step."""
        there = checkpoint.found(self.run_directory.path / "checkpoints")
        done = there[-1][0] if there else 0
        if there:
            self.policy.load(str(there[-1][1]))
            self.progress.note(f"resumed from {there[-1][1]}")
        self.run_directory.rewind(done if done else -1)
        self.run_directory.event("resume" if done else "begin", step=done)
        return done


def require_finite(step: int, updates: list[Metrics]) -> None:
    """Stops before weights that mean nothing reach the engines."""
    for number, update in enumerate(updates, 1):
        if not (math.isfinite(update["loss"]) and math.isfinite(update["grad_norm"])):
            raise FloatingPointError(
                f"step {step}, update {number}: loss {update['loss']}, gradient norm {update['grad_norm']}. The engines keep "
                "their weights and the last checkpoint is good. A lower policy.lr or policy.dtype=float32 may help."
            )
