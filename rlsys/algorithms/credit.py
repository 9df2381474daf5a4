"""Credit assignment: from the verdicts on a batch to an advantage for each of its tokens.

rewards ─▶ (shuffle) ─▶ overlong penalty ─▶ KL in the reward ─▶ estimator by group, or GAE ─▶ entropy control ─▶ columns [T]
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsys.algorithms import advantages, entropy_control, kl, length_penalty
from rlsys.algorithms.gae import gae, whiten
from rlsys.config.options import reject_unused_options, select_options
from rlsys.config.plugins import load_function, short_name
from rlsys.config.schema import ADVANTAGES, Config, ConfigError
from rlsys.seeds import derive_seed
from rlsys.types import Batch, Columns, Floats


@dataclass(frozen=True)
class Credit:
    columns: Columns  # with advantages, and what else the update needs
    advantages: Floats  # [N] of each sample; where its tokens differ, their mean
    kl: float | None  # mean per token, where KL is in the reward
    length_penalty: float  # mean that completions lost for their length


class CreditAssignment:
    def __init__(self, config: Config):
        self.config = config
        self.with_critic = config.algorithm.advantage == "gae"
        if not self.with_critic:
            self.estimator = load_function(config.algorithm.advantage, advantages.ESTIMATORS, "algorithm.advantage")
            reject_unused_options(self.estimator, config.algorithm, "advantage", ADVANTAGES)
        self.kl = kl.ESTIMATORS[config.algorithm.kl]

    def __call__(self, step: int, batch: Batch, columns: Columns, kl_coef: float) -> Credit:
        """`columns` has what was scored: `old`, `ref` and `values`, as far as this configuration needs them."""
        c = self.config
        lengths = torch.from_numpy(batch.lengths)
        rewards = self.shuffle_rewards(
            step, self.component_rewards(batch) if c.algorithm.advantage == "gdpo" else batch.rewards
        )
        late, divergence = self.length_penalties(lengths), self.reward_kl(columns)
        cost = torch.zeros(()) if divergence is None else kl_coef * divergence  # [T], or nothing
        if self.with_critic:
            columns = self.token_advantages(rewards + late, cost, lengths, sample_of_token(batch), columns)
        else:
            taken_off = late
            if divergence is not None:
                taken_off = late - torch.zeros(len(late)).index_add(0, sample_of_token(batch), cost)
            found = self.sample_advantages(batch, rewards, taken_off, lengths)
            columns = replace(columns, advantages=np.repeat(found.numpy(), batch.lengths))
        if divergence is not None:
            columns = replace(columns, ref=None)  # it has no place in the loss any more
        return Credit(
            self.control_entropy(step, columns),
            sample_means(columns.advantages, batch.lengths),
            kl=None if divergence is None else float(divergence.mean()),
            length_penalty=float(late.mean()),
        )

    def reward_kl(self, columns: Columns) -> Tensor | None:
        """[T] The KL estimate of each token, where it goes into the reward."""
        if columns.ref is None or self.config.reference.kl_in == "loss":
            return None
        assert columns.old is not None
        return self.kl(torch.from_numpy(columns.old), torch.from_numpy(columns.ref))

    def component_rewards(self, batch: Batch) -> Floats:
        """[N, K] The parts each sample's reward is the weighted sum of."""
        names = sorted(batch.components[0])
        if odd := [i for i, found in enumerate(batch.components) if sorted(found) != names]:
            raise ConfigError(
                f"algorithm.advantage gdpo needs the same reward components for every sample; one has "
                f"{', '.join(names)}, another {', '.join(batch.components[odd[0]])}."
            )
        return np.array([[found[name] for name in names] for found in batch.components], dtype=np.float32)

    def component_weights(self, batch: Batch) -> list[float]:
        """[K] A function's named parts share its weight in `reward.functions`."""
        weights = {short_name(name): f.weight for name, f in self.config.reward.functions.items()}
        return [weights[name.partition("/")[0]] for name in sorted(batch.components[0])]

    def shuffle_rewards(self, step: int, rewards: Floats) -> Tensor:
        if not self.config.reward.shuffle:
            return torch.from_numpy(rewards)
        rng = np.random.default_rng(derive_seed(self.config.run.seed, step, "shuffle"))
        return torch.from_numpy(rewards[rng.permutation(len(rewards))])

    def length_penalties(self, lengths: Tensor) -> Tensor:
        """[N] What completions lose for coming near the length where they are cut."""
        o = self.config.overlong
        if not o.buffer:
            return torch.zeros(len(lengths))
        return length_penalty.overlong_penalty(
            lengths, longest=self.config.rollout.max_new_tokens, buffer=o.buffer, factor=o.penalty
        )

    def sample_advantages(self, batch: Batch, rewards: Tensor, taken_off: Tensor, lengths: Tensor) -> Tensor:
        """[N] One number per sample, from rewards and groups."""
        weights, penalty = None, self.config.overlong.penalty
        if rewards.dim() == 2:
            weights = self.component_weights(batch)
            if taken_off.any():  # the length penalty is a component more
                rewards, weights = torch.cat([rewards, taken_off[:, None] / penalty], 1), [*weights, penalty]
        else:
            rewards = rewards + taken_off
        if self.config.algorithm.advantage == "max_rl" and (rewards < 0).any():
            raise ConfigError(
                f"algorithm.advantage max_rl is for rewards of 0 or more; one is {float(rewards.min()):g}."
            )
        greedy = None if batch.greedy is None else torch.from_numpy(batch.greedy[batch.groups])
        given = select_options(self.estimator, self.config.algorithm, lengths=lengths, greedy=greedy, weights=weights)
        found: Tensor = self.estimator(rewards, torch.from_numpy(batch.groups), **given)
        return found.float()

    def token_advantages(
        self, rewards: Tensor, cost: Tensor, lengths: Tensor, sequences: Tensor, columns: Columns
    ) -> Columns:
        """GAE: the reward comes with a completion's last token, the cost of KL with each."""
        assert columns.values is not None
        c, ends = self.config.critic, lengths.cumsum(0) - 1
        amounts = (-cost.expand(len(sequences))).index_add(0, ends[lengths > 0], rewards[lengths > 0])
        found, returns = gae(amounts, torch.from_numpy(columns.values), sequences, gamma=c.gamma, lam=c.lam)
        return replace(columns, advantages=(whiten(found) if c.whiten else found).numpy(), returns=returns.numpy())

    def control_entropy(self, step: int, columns: Columns) -> Columns:
        """Takes the tokens that cost most entropy out of the policy's loss, or holds them."""
        e = self.config.entropy
        if e.control == "none":
            return columns
        assert columns.old is not None
        assert columns.advantages is not None
        if e.control == "kl_cov":
            held = entropy_control.kl_cov(columns.old, columns.advantages, share=e.share)
            return replace(columns, anchor=(e.kl_coef * held).astype(np.float32))
        rng = np.random.default_rng(derive_seed(self.config.run.seed, step, "clip_cov"))
        out = entropy_control.clip_cov(columns.old, columns.advantages, share=e.share, low=e.low, high=e.high, rng=rng)
        return replace(columns, advantages=np.where(out, np.float32(0), columns.advantages))


def sample_of_token(batch: Batch) -> Tensor:
    """Which sample each token is of.  [T]"""
    return torch.from_numpy(np.repeat(np.arange(len(batch.samples)), batch.lengths))


def sample_means(advantages: Floats | None, lengths: NDArray[np.int64]) -> Floats:
    """The mean over each sample's tokens, exact where they are all alike.  [T] -> [N]"""
    assert advantages is not None
    some = lengths > 0
    found = np.zeros(len(lengths), dtype=np.float32)
    found[some] = np.add.reduceat(advantages, (lengths.cumsum() - lengths)[some], dtype=np.float64) / lengths[some]
    return found
