"""The policy on real DeepSpeed: updates are the papers' for any ZeRO stage, ranks, pack budget and normalization."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import build_family
from plain_policy import PlainPolicy
from ragged_updates import (
    ragged_batch,
    train,
    train_plainly,
    weigh,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlsys.batching.packing import pack
from rlsys.config.methods import NORMALIZERS
from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed
from rlsys.models.weight_files import weight_file_problems
from rlsys.types import Columns
from workers.learner.policy import PolicyGroup


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
        pytest.param(2, 1, 64, {"compile": True}, marks=pytest.mark.long),
        (2, 2, 4096, {}),
        (2, 3, 4096, {}),
        (3, 2, 64, {}),
        (3, 2, 4096, {"gradient_checkpointing": True, "offload": ["optimizer"]}),
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
