"""Credit assignment: from the rewards of a batch to an advantage for each token.

rewards ─▶ (shuffle) ─▶ (mode reward) ─▶ overlong penalty ─▶ KL in the reward ─▶ (per token) ─▶ estimator by group, or GAE ─▶ entropy control ─▶ columns
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms import advantages, entropy_control, kl, length_penalty, modes
from rlsys.algorithms.entropy_control import TokenMask
from rlsys.algorithms.gae import gae, whiten
from rlsys.algorithms.turns import turn_rows
from rlsys.config.derived import controlled_share, is_supervised, kl_estimator
from rlsys.config.methods import ADVANTAGES
from rlsys.config.options import reject_unused_options, require_shape, select_options
from rlsys.config.plugins import load_function, short_name
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats


@dataclass(frozen=True)
class Credit:
    """Advantages, and what the metrics report about them."""

    columns: Columns  # with advantages, and with whatever else the update needs
    advantages: Floats  # [N] of each sample; the mean over its tokens where they differ
    kl: float | None  # mean per token, if KL is in the reward
    length_penalty: float  # mean over samples, 0 or less
    controlled: float | None = None  # share of tokens that entropy.control took, if it is on


class CreditAssignment:
    """Turns the rewards of a batch into advantages, with the configured method."""

    def __init__(self, config: Config, control_tokens: Mapping[int, float] | None = None):
        """Takes `control_tokens`: the ids of algorithm.control_tokens, with the reward of a right answer after each."""
        self.config, self.control_tokens = config, control_tokens
        self.with_critic, self.supervised = config.algorithm.advantage == "gae", is_supervised(config)
        if not self.with_critic:
            self.estimator = load_function(config.algorithm.advantage, advantages.ESTIMATORS, "algorithm.advantage")
            reject_unused_options(self.estimator, config.algorithm, "advantage", ADVANTAGES)
        self.kl = kl.ESTIMATORS[kl_estimator(config)]

    def __call__(self, step: int, batch: Batch, columns: Columns, kl_coef: float) -> Credit:
        """Assigns advantages. `columns` holds the scores this configuration needs: `old`, `ref`, `values`."""
        if self.supervised:
            return supervised_credit(batch, columns)
        lengths, by_component = torch.from_numpy(batch.lengths), self.config.algorithm.advantage == "gdpo"
        rewards = self.shuffle_rewards(step, self.component_rewards(batch) if by_component else batch.rewards)
        if self.control_tokens:
            rewards = self.mode_rewards(batch, rewards, self.control_tokens)
        penalties, token_kl = self.length_penalties(lengths + self.unused_limits(batch)), self.reward_kl(columns)
        kl_cost = torch.zeros(()) if token_kl is None else kl_coef * token_kl  # [T], or a single 0
        if self.with_critic:
            columns = self.token_advantages(batch, rewards + penalties, kl_cost, columns)
        else:
            adjustment = penalties
            if token_kl is not None:
                adjustment = penalties - torch.zeros(len(penalties)).index_add(0, sample_of_token(batch), kl_cost)
            if self.config.algorithm.credit == "turn":
                per_token = self.turn_advantages(batch, rewards + adjustment)
            else:
                per_sample = self.sample_advantages(batch, rewards, adjustment, lengths)
                per_token = np.repeat(per_sample.numpy(), batch.lengths)
            columns = replace(columns, advantages=per_token)
        if token_kl is not None:
            columns = replace(columns, ref=None)  # the loss has no KL term then
        controlled, chosen = self.control_entropy(step, columns)
        return Credit(
            controlled,
            sample_means(columns.advantages, batch.lengths),
            kl=None if token_kl is None else float(token_kl.mean()),
            length_penalty=float(penalties.mean()),
            controlled=None if chosen is None else chosen.sum() / max(len(chosen), 1),
        )

    def reward_kl(self, columns: Columns) -> Tensor | None:
        """Returns the KL estimate of each token if KL is in the reward, else None.  [T]"""
        if columns.ref is None or self.config.reference.kl_in == "loss":
            return None
        assert columns.old is not None
        return self.kl(torch.from_numpy(columns.old), torch.from_numpy(columns.ref))

    def component_rewards(self, batch: Batch) -> Floats:
        """Returns the components whose weighted sum is each sample's reward, in alphabetical order.  [N, K]

        What an episode has not scored counts 0, as in its reward: it ended at a limit, or no turn had a score.
        """
        names, first = component_names(batch), sorted(batch.components[0])
        different = [components for components in batch.components if sorted(components) != first]
        if different and not any(sample.episode for sample in batch.samples):
            raise ConfigError(
                f"algorithm.advantage gdpo needs the same reward components for every sample; one has "
                f"{', '.join(first)}, another {', '.join(different[0])}."
            )
        return np.array([[c.get(name, 0.0) for name in names] for c in batch.components], dtype=np.float32)

    def component_weights(self, batch: Batch) -> list[float]:
        """Returns the weight of each component: the named components of a function all have the function's weight.  [K]

        What an episode's own function returns, and the scores of turns, have the weight 1.
        """
        weights = {short_name(name): f.weight for name, f in self.config.reward.functions.items()}
        return [weights.get(name.partition("/")[0], 1.0) for name in component_names(batch)]

    def shuffle_rewards(self, step: int, rewards: Floats) -> Tensor:
        """Gives samples each other's rewards, if `reward.shuffle` asks for it."""
        if not self.config.reward.shuffle:
            return torch.from_numpy(rewards)
        rng = np.random.default_rng(derive_seed(self.config.run.seed, step, "shuffle"))
        return torch.from_numpy(rewards[rng.permutation(len(rewards))])

    def mode_rewards(self, batch: Batch, scores: Tensor, control_tokens: Mapping[int, float]) -> Tensor:
        """Rewards right answers by the control token that comes first.  [N] -> [N]"""
        outside = scores[(scores < 0) | (scores > 1 + 1e-6)]  # weights such as 0.7 and 0.3 are rounded
        if len(outside):
            raise ConfigError(
                f"algorithm.control_tokens takes scores from 0 (wrong) to 1 (right); one is {float(outside[0]):g}. "
                "Change the scores or weights of reward.functions."
            )
        right = [control_tokens.get(token, -1.0) for token in batch.first_tokens]
        return modes.mode_rewards(scores, torch.tensor(right))

    def unused_limits(self, batch: Batch) -> Tensor:
        """Returns how far the limit of each completion lies below rollout.max_new_tokens: 0, unless its data set sets one.  [N]"""
        longest = self.config.rollout.max_new_tokens
        below = [longest - (p.max_new_tokens or longest) for p in batch.prompts]
        return torch.tensor(below)[torch.from_numpy(batch.groups)]

    def length_penalties(self, lengths: Tensor) -> Tensor:
        """Returns what each completion loses for coming near the maximum length, 0 or less.  [N] -> [N]"""
        o = self.config.overlong
        if not o.buffer:
            return torch.zeros(len(lengths))
        longest = self.config.rollout.max_new_tokens
        return length_penalty.overlong_penalty(lengths, longest=longest, buffer=o.buffer, factor=o.penalty)

    def sample_advantages(self, batch: Batch, rewards: Tensor, adjustment: Tensor, lengths: Tensor) -> Tensor:
        """Returns one advantage per sample, from rewards and groups; `adjustment` [N] is added to the rewards.  [N]"""
        weights, penalty = None, self.config.overlong.penalty
        if rewards.dim() == 2:
            weights = self.component_weights(batch)
            if adjustment.any():  # the length penalty is one more component
                rewards, weights = torch.cat([rewards, adjustment[:, None] / penalty], 1), [*weights, penalty]
        else:
            rewards = rewards + adjustment
        if self.config.algorithm.advantage == "max_rl" and (rewards < 0).any():
            raise ConfigError(
                f"algorithm.advantage max_rl is for rewards of 0 or more; one is {float(rewards.min()):g}."
            )
        if self.config.reward.per_token:
            rewards = length_penalty.reward_per_token(rewards, lengths)
        greedy = None if batch.greedy is None else torch.from_numpy(batch.greedy[batch.groups])
        options = select_options(self.estimator, self.config.algorithm, lengths=lengths, greedy=greedy, weights=weights)
        estimates: Tensor = self.estimator(rewards, torch.from_numpy(batch.groups), **options)
        require_shape("algorithm.advantage", estimates, len(batch.samples), "sample")
        return estimates.float()

    def turn_advantages(self, batch: Batch, rewards: Tensor) -> Floats:
        """Returns one advantage per turn, for each of its tokens.  [N] -> [T]"""
        use_scores = not self.config.reward.shuffle
        rows = turn_rows(rewards, torch.from_numpy(batch.groups), batch.samples, use_scores)
        options = select_options(self.estimator, self.config.algorithm, lengths=rows.lengths)
        estimates: Tensor = self.estimator(rows.returns, rows.groups, **options)
        require_shape("algorithm.advantage", estimates, len(rows.returns), "turn")
        return np.repeat(estimates.float().numpy(), rows.lengths.numpy())

    def token_advantages(self, batch: Batch, rewards: Tensor, kl_cost: Tensor, columns: Columns) -> Columns:
        """Returns advantages and returns by GAE. A completion's last token gets its reward; each token pays its KL."""
        assert columns.values is not None
        c, sequences, lengths = self.config.critic, sample_of_token(batch), torch.from_numpy(batch.lengths)
        ends, filled = lengths.cumsum(0) - 1, lengths > 0
        token_rewards = (-kl_cost.expand(len(sequences))).index_add(0, ends[filled], rewards[filled])
        values = torch.from_numpy(columns.values)
        estimates, returns = gae(token_rewards, values, sequences, gamma=c.gamma, lam=c.lam)
        estimates = estimates if self.config.algorithm.whiten is False else whiten(estimates)
        return replace(columns, advantages=estimates.numpy(), returns=returns.numpy())

    def control_entropy(self, step: int, columns: Columns) -> tuple[Columns, TokenMask | None]:
        """Restrains the tokens that reduce entropy most: drops them from the policy loss, or holds them by KL.

        Returns these tokens too, or None if the control is off.
        """
        control, share = self.config.entropy.control, controlled_share(self.config)
        if control == "none":
            return columns, None
        assert columns.old is not None
        assert columns.advantages is not None
        if control == "kl_cov":
            held = entropy_control.kl_cov(columns.old, columns.advantages, share=share)
            return replace(columns, old_kl_coef=held.astype(np.float32)), held
        rng = np.random.default_rng(derive_seed(self.config.run.seed, step, "clip_cov"))
        dropped = entropy_control.clip_cov(columns.old, columns.advantages, share=share, rng=rng)
        return replace(columns, advantages=np.where(dropped, np.float32(0), columns.advantages)), dropped


def supervised_credit(batch: Batch, columns: Columns) -> Credit:
    """Returns the advantage 1 for each token: the loss is then minus its log-prob."""
    ones = np.ones(int(batch.lengths.sum()), dtype=np.float32)
    return Credit(
        replace(columns, advantages=ones), np.ones(len(batch.samples), np.float32), kl=None, length_penalty=0.0
    )


def component_names(batch: Batch) -> list[str]:
    """Returns the names of all components. `turns` if there are none: all episodes have ended at a limit."""
    return sorted({name for components in batch.components for name in components}) or ["turns"]


def sample_of_token(batch: Batch) -> Tensor:
    """Returns the index of the sample that each token belongs to.  [T]"""
    return torch.from_numpy(np.repeat(np.arange(len(batch.samples)), batch.lengths))


def sample_means(column: Floats | None, lengths: NDArray[np.int64]) -> Floats:
    """Averages over each sample's tokens; exact where they are all equal. Without tokens, 0.  [T] -> [N]"""
    assert column is not None
    filled = lengths > 0
    means = np.zeros(len(lengths), dtype=np.float32)
    sums = np.add.reduceat(column, (lengths.cumsum() - lengths)[filled], dtype=np.float64)
    means[filled] = sums / lengths[filled]
    return means
