"""The updates of a step: for each mini-batch of whole groups, one optimizer update of policy and critic."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from rlsys.algorithms.credit import Credit
from rlsys.algorithms.schedule import learning_rate
from rlsys.batching.minibatches import (
    MiniBatch,
    draw_by_tokens,
    drop_zero_advantage,
    left_out,
    split_into_mini_batches,
    weigh_other_terms,
)
from rlsys.batching.packing import PackBatch, unpack
from rlsys.config.derived import last_schedule_step
from rlsys.config.schema import Config
from rlsys.interfaces import Critic, Policy
from rlsys.runs.run_log import RunLog
from rlsys.runs.skipped_updates import SkippedInARow, SkippedUpdates
from rlsys.runs.state import RunState
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats, Metrics, Pack, split_column

# The share of the samples that an update leaves out which is scored, to estimate their mismatch. It can stop the run, so a
# single odd sample must not stand for all.
SCORED_SHARE, LEAST_SCORED = 1 / 16, 4


@dataclass(frozen=True)
class StepUpdates:
    """What the updates of a step report; skipped ones are left out and counted."""

    policy: list[Metrics]
    critic: list[Metrics]
    policy_skips: SkippedInARow
    critic_skips: SkippedInARow
    counts: Metrics


class Updates:
    def __init__(
        self,
        config: Config,
        policy: Policy,
        critic: Critic | None,
        pack: PackBatch,
        log: RunLog,
        control_tokens: Collection[int] = (),
    ):
        self.control_tokens = control_tokens
        self.config, self.policy, self.critic, self.pack, self.log = config, policy, critic, pack, log
        self.critic_only_steps = config.critic.alone_steps if critic else 0
        self.started_step = 0  # the last one whose weights may have changed

    def __call__(self, step: int, batch: Batch, credit: Credit, state: RunState) -> StepUpdates:
        """Trains on every mini-batch, and writes the step's samples meanwhile."""
        self.started_step = step
        policy: list[Metrics] = []
        critic: list[Metrics] = []
        for i, mini in enumerate(split_into_mini_batches(self.config, step, batch, self.control_tokens)):
            columns = weigh_other_terms(self.config, batch, mini.members, policy_columns(credit))
            active = drop_zero_advantage(self.config, batch, mini, columns)
            trains_policy = step > self.critic_only_steps
            policy_packs = self.packs(batch, active, columns, self.policy) if trains_policy else []
            critic_packs = self.packs(batch, mini, critic_columns(credit), self.critic) if self.critic else []
            if i == 0:
                # Written while the first update runs. Begun earlier, the writing thread would hold up the packing.
                self.log.samples(f"step-{step:06d}", batch, credit.advantages, credit.columns)
            if self.critic:
                critic.append(self.update_critic(self.critic, critic_packs, mini))
            if trains_policy:
                mismatch = self.mismatch_left_out(batch, active, columns.old)
                update = self.update_policy(policy_packs, active, state.kl_coef)
                policy.append(add_mismatch(update, mismatch) | {"tokens": float(batch.lengths[mini.members].sum())})
        return self.drop_skipped(step, batch, policy, critic, state)

    def packs(self, batch: Batch, mini: MiniBatch, columns: Columns, learner: Policy | Critic) -> list[list[Pack]]:
        return self.pack(batch, mini.members, ranks=learner.ranks, columns=columns, weights=mini.weights)

    def update_policy(self, packs: list[list[Pack]], mini: MiniBatch, kl_coef: float) -> Metrics:
        p = self.config.policy
        lr = self.learning_rate(mini.update, p.lr, p.warmup_updates, first_step=self.critic_only_steps)
        zero_advantage = {"zero_advantage_samples": float(mini.zero_advantage_samples)}
        return self.policy.update(packs, lr, kl_coef) | {"lr": lr} | zero_advantage

    def mismatch_left_out(self, batch: Batch, mini: MiniBatch, old: Floats | None) -> tuple[float, float]:
        """The sum of |old − rollout| over the tokens that the update does not compute, and the largest that is known.

        Without old log-probs, a few of these samples are scored, and the sum is an estimate.
        """
        members = left_out(batch, mini)
        if not members:
            return 0.0, 0.0
        rollout = [s.logprobs for s in batch.samples]
        if old is not None:
            known = batch.split(old)
            gaps = np.concatenate([np.abs(known[m] - rollout[m]) for m in members])
            return float(gaps.sum()), float(gaps.max())
        lengths, few = batch.lengths[members], len(members) <= LEAST_SCORED
        rng = np.random.default_rng(derive_seed(self.config.run.seed, mini.update, "mismatch"))
        drawn = members if few else [members[i] for i in draw_by_tokens(lengths, SCORED_SHARE, rng, LEAST_SCORED)]
        scored = sorted(set(drawn))
        packs = self.pack(batch, scored, ranks=self.policy.ranks)
        column = unpack(packs, self.policy.score(packs), len(batch.samples))
        scores = zip(scored, split_column(column, batch.lengths[scored].tolist()), strict=True)
        gaps_of = {m: np.abs(logprobs - rollout[m]) for m, logprobs in scores}
        largest = max(float(gaps.max()) for gaps in gaps_of.values())
        if few:
            return float(sum(gaps.sum() for gaps in gaps_of.values())), largest
        return float(np.mean([gaps_of[m].mean() for m in drawn])) * int(lengths.sum()), largest

    def update_critic(self, critic: Critic, packs: list[list[Pack]], mini: MiniBatch) -> Metrics:
        c = self.config.critic
        lr = self.learning_rate(mini.update, c.lr, c.warmup_updates)
        return critic.update(packs, lr) | {"lr": lr}

    def learning_rate(self, update: int, peak: float, warmup: int, first_step: int = 0) -> float:
        """The rate of an update, for a model that starts to learn after `first_step`."""
        t, schedule = self.config.trainer, self.config.policy.lr_schedule
        per_step = t.updates_per_step * t.epochs_per_step
        update, total = update - first_step * per_step, (last_schedule_step(self.config) - first_step) * per_step
        return learning_rate(update, peak=peak, schedule=schedule, warmup=warmup, total=total)

    def drop_skipped(
        self, step: int, batch: Batch, policy: list[Metrics], critic: list[Metrics], state: RunState
    ) -> StepUpdates:
        skipped = SkippedUpdates(self.log.event)
        good_policy, policy_skips = skipped.drop(step, batch, policy, "policy.lr", state.policy_skips)
        good_critic, critic_skips = skipped.drop(step, batch, critic, "critic.lr", state.critic_skips)
        counts = {
            "update/skipped": sum(u["skipped"] for u in [*policy, *critic]),
            "update/zero_advantage_samples": sum(u["zero_advantage_samples"] for u in policy),
        }
        return StepUpdates(good_policy, good_critic, policy_skips, critic_skips, counts)


def add_mismatch(update: Metrics, others: tuple[float, float]) -> Metrics:
    total, largest = update["mismatch"] + others[0], max(update["mismatch_max"], others[1])
    return update | {"mismatch": total, "mismatch_max": largest}


def policy_columns(credit: Credit) -> Columns:
    return replace(credit.columns, values=None, returns=None)


def critic_columns(credit: Credit) -> Columns:
    return replace(credit.columns, advantages=None, old=None, ref=None, old_kl_coef=None)
