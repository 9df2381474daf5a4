"""The critic on real DeepSpeed: it learns the returns, does not depend on the number of ranks, and resumes exactly."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from ragged_updates import ragged_batch, weigh

from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.types import Columns, Floats
from workers.learner.critic import CriticGroup


@pytest.fixture
def configured(tiny: Callable[..., Config]) -> Callable[..., Config]:
    return lambda *overrides: tiny("algorithm.advantage=gae", "critic.clip=10", *overrides)


def values(group: CriticGroup, tokens_per_pack: int = 4096) -> Floats:
    batch = ragged_batch()
    packs = pack(batch, range(16), ranks=group.ranks, tokens_per_pack=tokens_per_pack)
    return unpack(packs, group.score(packs), 16)


def learn(
    group: CriticGroup, updates: int, tokens_per_pack: int = 4096, spoiled: int | None = None
) -> list[dict[str, float]]:
    """Makes updates toward a different return for each sample. The return of sample `spoiled` is not a number."""
    batch, results = ragged_batch(), []
    by_sample = np.linspace(-1, 1, 16, dtype=np.float32)
    if spoiled is not None:
        by_sample[spoiled] = np.nan
    returns = np.repeat(by_sample, batch.lengths)
    for _ in range(updates):
        columns = Columns(values=values(group), returns=returns)
        weights = weigh(batch, list(range(16)))
        budget = {"ranks": group.ranks, "tokens_per_pack": tokens_per_pack}
        packs = pack(batch, range(16), columns=columns, weights=weights, **budget)
        results.append(group.update(packs, 1e-3))
    return results


def test_the_critic_starts_at_zero_and_learns_the_returns(
    critic: Callable[[Config], CriticGroup], configured: Callable[..., Config]
) -> None:
    group = critic(configured())
    assert not values(group).any()
    results = learn(group, 30)
    expected = np.repeat(np.linspace(-1, 1, 16), ragged_batch().lengths)
    assert results[0]["loss"] == pytest.approx(float((expected**2).mean() / 2), rel=1e-5)
    assert results[-1]["loss"] < 0.2 * results[0]["loss"]
    assert np.corrcoef(values(group), expected)[0, 1] > 0.8


def test_updates_do_not_depend_on_stage_ranks_and_budget(
    critic: Callable[[Config], CriticGroup], configured: Callable[..., Config]
) -> None:
    reference = critic(configured("policy.zero_stage=1"))
    expected, expected_values = learn(reference, 3), values(reference)
    for stage, ranks, tokens_per_pack in ((2, 2, 40), (3, 2, 4096), (0, 1, 64)):
        other = critic(configured(f"policy.zero_stage={stage}", f"critic.ranks={ranks}"))
        for result, wanted in zip(learn(other, 3, tokens_per_pack), expected, strict=True):
            assert result == pytest.approx(wanted, rel=1e-4)
        np.testing.assert_allclose(values(other), expected_values, atol=1e-4)


def test_a_loaded_critic_continues_as_if_never_stopped(
    critic: Callable[[Config], CriticGroup], configured: Callable[..., Config], tmp_path: Path
) -> None:
    config = configured("critic.ranks=2")
    group = critic(config)
    learn(group, 2)
    group.save(str(tmp_path / "checkpoint"))
    expected = learn(group, 2), values(group).tolist()
    assert group.saved_files(wait=True).keys() == {f"critic/part-0000{i}-of-00002.safetensors" for i in (0, 1)}
    other = critic(config)
    other.load(str(tmp_path / "checkpoint"))
    assert torch.from_numpy(values(other)).any()
    before = values(other)
    spoiled = learn(other, 1, spoiled=5)[0]
    assert (spoiled["skipped"], spoiled["first_bad_sample"]) == (1.0, 5)
    assert np.array_equal(values(other), before)
    results = learn(other, 2)
    assert (results, values(other).tolist()) == expected
    assert {result["skipped"] for result in results} == {0.0}
