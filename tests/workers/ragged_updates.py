"""Updates on a random batch of ragged samples: by the policy's ranks, and sample by sample."""

from dataclasses import replace

import numpy as np
import torch
from plain_policy import CONSTANT, PlainPolicy, PlainSample

from rlsys.batching.minibatches import weigh_other_terms
from rlsys.batching.packing import pack, token_weights, unpack
from rlsys.config.methods import NORMALIZERS
from rlsys.types import Batch, Columns, Floats, Prompt, Sample
from workers.learner.policy import PolicyGroup
from workers.sync.host_memory import map_file
from workers.sync.layout import tensor_view

MINIBATCHES = (list(range(8)), list(range(8, 16)))
LR = 2e-4
KL_COEF = 0.1


def ragged_batch(seed: int = 0) -> Batch:
    """Returns four random prompts with four random samples each, of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    prompts = [Prompt(f"p{g}", "made", "", rng.integers(2, 13, 7).tolist(), {}) for g in range(4)]
    samples = [
        Sample(f"p{g}", i, "", rng.integers(1, 13, n).astype(np.int32), -rng.random(n).astype(np.float32), "stop", 1)
        for g in range(4)
        for i in range(4)
        for n in [int(rng.integers(1, 9))]
    ]
    rewards = rng.random(16).astype(np.float32)
    return Batch(prompts, samples, np.repeat(np.arange(4), 4), rewards, [{}] * 16)


def weigh(batch: Batch, members: list[int], normalize: str = "token_mean") -> Floats:
    options = {"constant": CONSTANT} if normalize == "constant" else {}
    return token_weights(torch.from_numpy(batch.lengths[members]), normalize, **options).numpy()


def advantages_of(batch: Batch) -> Floats:
    """Per token, the reward minus the batch's mean.  [T]"""
    return np.repeat(batch.rewards - batch.rewards.mean(), batch.lengths)


def moved(old: Floats, step: int) -> Floats:
    """Log-probs of a reference that is not the policy.  [T]"""
    return old - 0.5 * np.random.default_rng(step).random(len(old)).astype(np.float32)


def train(group: PolicyGroup, tokens_per_pack: int, step: int) -> list[dict[str, float]]:
    """Makes two updates on a random batch. Old log-probs are scored before. Each step has another normalization."""
    batch = ragged_batch(step)
    scored = pack(batch, range(16), ranks=group.ranks, tokens_per_pack=tokens_per_pack)
    old = unpack(scored, group.score(scored), 16)
    columns = Columns(advantages=advantages_of(batch), old=old, ref=moved(old, step))
    algorithm = replace(group.config.algorithm, normalize=NORMALIZERS[step])
    results = []
    for members in MINIBATCHES:
        by_token = weigh(batch, members, NORMALIZERS[step])
        weighed = weigh_other_terms(replace(group.config, algorithm=algorithm), batch, members, columns)
        options = {"tokens_per_pack": tokens_per_pack, "columns": weighed, "weights": by_token}
        results.append(group.update(pack(batch, members, ranks=group.ranks, **options), LR, KL_COEF))
    return results


def train_plainly(plain: PlainPolicy, step: int) -> list[dict[str, float]]:
    """The same updates, sample by sample."""
    batch = ragged_batch(step)
    old = plain.score(batch)
    ref = batch.split(moved(torch.cat(old).numpy(), step))
    advantages = batch.split(advantages_of(batch))
    samples = [
        PlainSample(batch.prompts[group].tokens, sample.tokens.tolist(), sample.logprobs.tolist(), *columns)
        for group, sample, *columns in zip(batch.groups, batch.samples, old, ref, advantages, strict=True)
    ]
    return [plain.update([samples[m] for m in members], NORMALIZERS[step], LR, KL_COEF) for members in MINIBATCHES]


def weights(group: PolicyGroup) -> torch.Tensor:
    """Returns all parameters as the engines would get them, end to end."""
    info = group.call_all("connection_info")[0]
    group.call_all("connect", info)
    for part in range(info["parts"]):
        group.call_all("send", part)
    group.call_all("fingerprints")
    memory = map_file(info["path"])
    return torch.cat(
        [tensor_view(memory, d, s, o).flatten().clone() for bucket in info["buckets"] for _, d, s, o in bucket]
    )
