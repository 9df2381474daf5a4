"""The policy on real DeepSpeed: updates are the papers' for any ZeRO stage, ranks, pack budget and normalization."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_policy import CONSTANT, PlainPolicy, PlainSample
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.batching.minibatches import weigh_other_terms
from rlsys.batching.packing import pack, token_weights, unpack
from rlsys.config.methods import NORMALIZERS
from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed
from rlsys.models.weight_files import weight_file_problems
from rlsys.types import Batch, Columns, Floats, Prompt, Sample
from workers.learner.policy import PolicyGroup
from workers.sync.host_memory import map_file
from workers.sync.layout import tensor_view

sys.path.insert(0, str(Path(__file__).parents[2] / "rlsys" / "forward"))
from families import build_family

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


@pytest.fixture(scope="module")
def plain(model: str) -> list[tuple[list[dict[str, float]], torch.Tensor]]:
    """The sums of each step's updates, and the weights after it."""
    policy = PlainPolicy(model)
    return [(train_plainly(policy, step), policy.weights()) for step in range(len(NORMALIZERS))]


@pytest.mark.parametrize(
    ("stage", "ranks", "tokens_per_pack", "settings"),
    [
        (0, 1, 4096, {}),
        (0, 2, 64, {}),
        (1, 2, 40, {}),
        (1, 3, 40, {}),
        (2, 1, 64, {"compile": True}),
        (2, 2, 4096, {}),
        (2, 3, 4096, {}),
        (3, 2, 64, {}),
        (3, 2, 4096, {"gradient_checkpointing": True, "offload_optimizer": True, "logprob_chunk": 5}),
    ],
    ids=lambda value: str(value),
)
def test_updates_are_those_of_a_plain_loop_for_any_stage_ranks_budget_and_normalization(
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    changed: Callable[..., Config],
    plain: list[tuple[list[dict[str, float]], torch.Tensor]],
    stage: int,
    ranks: int,
    tokens_per_pack: int,
    settings: dict[str, Any],
) -> None:
    group = policy(changed(tiny(), "policy", zero_stage=stage, ranks=ranks, **settings))
    before = weights(group)
    for step, (expected, expected_weights) in enumerate(plain):
        for actual, wanted in zip(train(group, tokens_per_pack, step), expected, strict=True):
            compared = {name: actual[name] for name in wanted}
            assert compared == pytest.approx(wanted, rel=1e-4, abs=1e-5), NORMALIZERS[step]
        # AdamW enlarges the rounding errors of tiny gradients.
        assert (weights(group) - expected_weights).abs().max() < 2e-5, NORMALIZERS[step]
    assert (weights(group) - before).abs().max() > 5e-4, "nothing was learned, so nothing was compared"


def test_a_policy_names_the_modules_for_which_samples_cannot_share_a_prompt(
    policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], changed: Callable[..., Config], tmp_path: Path
) -> None:
    group = policy(changed(tiny(), "policy", ranks=1, zero_stage=0))
    assert group.mixers == []
    build_family("qwen3_5_text").save_pretrained(tmp_path / "model")
    group.start(str(tmp_path / "model"), "shared_memory")
    assert group.mixers == ["Qwen3_5GatedDeltaNet"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_a_model_that_transformers_reads(
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    changed: Callable[..., Config],
    tmp_path: Path,
    stage: int,
) -> None:
    group = policy(changed(tiny(), "policy", zero_stage=stage))
    train(group, 4096, step=0)
    saved = weights(group)
    group.save(str(tmp_path / "checkpoint"))
    group.saved_files(wait=True)
    model = tmp_path / "checkpoint" / "model"
    exported = AutoModelForCausalLM.from_pretrained(model)
    assert torch.equal(torch.cat([p.detach().flatten() for p in exported.parameters()]), saved)
    assert AutoTokenizer.from_pretrained(model).decode([3, 4])
    sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
    assert (len(sizes) > 1) == (stage == 3), "with ZeRO 3, each rank writes a part of the model"
    assert max(sizes) < (1.1 if stage == 2 else 0.7) * 4 * len(saved)
    assert list(weight_file_problems(model)) == [], "the index names the file of each tensor"


def test_weights_that_are_not_finite_never_leave_the_policy(
    policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], changed: Callable[..., Config]
) -> None:
    group = policy(changed(tiny(), "policy", ranks=1, clip_grad=0.0))
    batch = ragged_batch()
    columns = Columns(advantages=np.ones(batch.lengths.sum(), dtype=np.float32))
    weights = weigh(batch, list(range(16)))
    group.update(pack(batch, range(16), ranks=1, tokens_per_pack=4096, columns=columns, weights=weights), math.inf, 0.0)
    with pytest.raises(WorkerFailed, match="not finite"):
        group.sync(1)
