"""The policy on real DeepSpeed: an update is the same for any ZeRO stage, number of ranks and pack budget."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.config.schema import Config
from rlsys.packs.packing import pack, token_weights, unpack
from rlsys.runs.errors import WorkerFailed
from rlsys.types import Batch, Columns, Floats, Prompt, Sample
from workers.learner.policy import PolicyGroup
from workers.sync.host_memory import map_file
from workers.sync.layout import tensor_view

STEPS = 5
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


def token_mean(batch: Batch, members: list[int]) -> Floats:
    return token_weights(torch.from_numpy(batch.lengths[members]), "token_mean").numpy()


def train(
    group: PolicyGroup, tokens_per_pack: int, steps: int = STEPS, first: int = 0, updates: int = 1000
) -> list[dict[str, float]]:
    """Makes updates on random batches, two mini-batches each. Old and reference log-probs are scored before."""
    results = []
    for step in range(first, first + steps):
        batch = ragged_batch(step)
        scored = pack(batch, range(16), ranks=group.ranks, tokens_per_pack=tokens_per_pack)
        old = unpack(scored, group.score(scored), 16)
        advantages = np.repeat(batch.rewards - batch.rewards.mean(), batch.lengths)
        columns = Columns(advantages=advantages, old=old, ref=old)
        for members in (range(8), range(8, 16)):
            packs = pack(
                batch,
                list(members),
                ranks=group.ranks,
                tokens_per_pack=tokens_per_pack,
                columns=columns,
                weights=token_mean(batch, list(members)),
            )
            results.append(group.update(packs, LR, KL_COEF))
            if len(results) == updates:
                return results
    return results


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


REFERENCE: dict[str, Any] = {}  # the results of the first case


@pytest.mark.parametrize(
    ("stage", "ranks", "tokens_per_pack", "settings"),
    [
        (0, 1, 4096, {}),
        (0, 2, 64, {}),
        (1, 2, 40, {}),
        (2, 1, 64, {"compile": True}),
        (2, 2, 4096, {}),
        (3, 2, 64, {}),
        (3, 2, 4096, {"gradient_checkpointing": True, "offload_optimizer": True, "logprob_chunk": 5}),
    ],
    ids=lambda value: str(value),
)
def test_an_update_does_not_depend_on_stage_ranks_and_budget(
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    changed: Callable[..., Config],
    stage: int,
    ranks: int,
    tokens_per_pack: int,
    settings: dict[str, Any],
) -> None:
    group = policy(changed(tiny(), "policy", zero_stage=stage, ranks=ranks, **settings))
    before = weights(group)
    results = train(group, tokens_per_pack, updates=1)
    after_one = weights(group)
    results += train(group, tokens_per_pack, first=1)
    after = weights(group)
    REFERENCE.setdefault("results", results)
    REFERENCE.setdefault("after_one", after_one)
    REFERENCE.setdefault("after", after)
    for result, reference in zip(results, REFERENCE["results"], strict=True):
        assert result == pytest.approx(reference, abs=1e-4, rel=1e-4)
    assert results[0] == pytest.approx(REFERENCE["results"][0], abs=1e-5, rel=1e-5)
    assert (after_one - REFERENCE["after_one"]).abs().max() < 1e-5
    assert (after - REFERENCE["after"]).abs().max() < 1e-4  # AdamW enlarges the rounding errors of tiny gradients
    assert (after - before).abs().max() > 5e-4, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_holds_a_model_that_transformers_reads(
    policy: Callable[..., PolicyGroup],
    tiny: Callable[..., Config],
    changed: Callable[..., Config],
    tmp_path: Path,
    stage: int,
) -> None:
    group = policy(changed(tiny(), "policy", zero_stage=stage))
    train(group, 4096, steps=1)
    saved = weights(group)
    group.save(str(tmp_path / "checkpoint"))
    group.saved_files(wait=True)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint" / "model")
    assert torch.equal(torch.cat([p.detach().flatten() for p in exported.parameters()]), saved)
    assert AutoTokenizer.from_pretrained(tmp_path / "checkpoint" / "model").decode([3, 4])


def test_weights_that_are_not_finite_never_leave_the_policy(
    policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], changed: Callable[..., Config]
) -> None:
    group = policy(changed(tiny(), "policy", ranks=1, clip_grad=0.0))
    batch = ragged_batch()
    columns = Columns(advantages=np.ones(batch.lengths.sum(), dtype=np.float32))
    weights = token_mean(batch, list(range(16)))
    group.update(pack(batch, range(16), ranks=1, tokens_per_pack=4096, columns=columns, weights=weights), math.inf, 0.0)
    with pytest.raises(WorkerFailed, match="not finite"):
        group.sync(1)
