"""Metrics of a step on real ranks: of all tokens of the batch, whether a KL term makes the update compute them or not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlsys.algorithms.credit import CreditAssignment
from rlsys.batching.packing import pack, unpack
from rlsys.config.schema import Config
from rlsys.metrics import step_metrics
from rlsys.runs.state import RunState
from rlsys.types import Batch, Columns, Metrics, Prompt, Sample
from rlsys.updates import Updates
from workers.learner.policy import PolicyGroup

GAP = 0.01  # between the log-probs of engine and policy, at every token of a sample
METHODS = (["trainer.updates_per_step=5", "trainer.epochs_per_step=2"], ["trainer.updates_per_step=1"])


class Log:
    def samples(self, *arguments: Any) -> None: ...

    def event(self, *arguments: Any, **facts: Any) -> None: ...


def one_group_of_ten_teaches(group: PolicyGroup) -> Batch:
    """Ten groups of 4 answers of 1 to 8 tokens; each sample's engine is off by the same gap, half of them upwards."""
    rng = np.random.default_rng(3)
    prompts = [Prompt(f"p{g}", "made", "", rng.integers(2, 13, 7).tolist(), {}) for g in range(10)]
    rewards = np.float32([*[1.0] * 36, 1, 0, 0, 1])
    tokens = [rng.integers(1, 13, int(rng.integers(1, 9))).astype(np.int32) for _ in rewards]
    samples = [
        Sample(f"p{i // 4}", i % 4, "", t, np.zeros(len(t), np.float32), "stop", 0) for i, t in enumerate(tokens)
    ]
    batch = Batch(prompts, samples, np.repeat(np.arange(10), 4), rewards, [{}] * 40)
    scored = pack(batch, range(40), ranks=group.ranks, tokens_per_pack=4096)
    old = batch.split(unpack(scored, group.score(scored), 40))
    signs = [GAP if i % 2 else -GAP for i in range(40)]
    samples = [replace(s, logprobs=p + np.float32(sign)) for s, p, sign in zip(samples, old, signs, strict=True)]
    return replace(batch, samples=samples)


def metrics_of_a_step(group: PolicyGroup, config: Config, batch: Batch) -> Metrics:
    packing = partial(pack, tokens_per_pack=64)
    columns = Columns()
    if config.trainer.updates_per_step > 1 or config.reference.kl_coef:
        packs = packing(batch, range(40), ranks=group.ranks)
        scores = unpack(packs, group.score(packs), 40)
        columns = Columns(
            old=scores if config.trainer.updates_per_step > 1 else None,
            ref=scores if config.reference.kl_coef else None,
        )
    credit = CreditAssignment(config)(1, batch, columns, config.reference.kl_coef)
    updates = Updates(config, group, None, packing, Log())  # type: ignore[arg-type]
    state = RunState(kl_coef=config.reference.kl_coef)
    return step_metrics(1, batch, credit, updates(1, batch, credit, state), by_component=False)


@pytest.mark.parametrize("options", METHODS, ids=str)
def test_metrics_are_of_all_tokens_with_a_kl_term_and_without(
    policy: Callable[..., PolicyGroup], tiny: Callable[..., Config], options: list[str]
) -> None:
    common = [*options, "trainer.prompts_per_step=10", "trainer.samples_per_prompt=4", "policy.lr=0.003"]
    common += ["policy.ranks=2", "algorithm.clip_low=0.01", "algorithm.clip_high=0.01", "policy.warmup_updates=0"]
    results = []
    for kl_coef in ("1e-9", "0"):  # the same gradient, but for rounding
        config = tiny(*common, f"reference.kl_coef={kl_coef}")
        group = policy(config)
        batch = one_group_of_ten_teaches(group)
        results.append(metrics_of_a_step(group, config, batch))
    with_kl, without = results
    assert with_kl["update/zero_advantage_samples"] == 0
    assert without["update/zero_advantage_samples"] == 36 * config.trainer.epochs_per_step
    for metrics in results:
        assert metrics["mismatch/mean_abs"] == pytest.approx(GAP, rel=1e-3)
        logprobs = np.concatenate([s.logprobs for s in batch.samples])
        assert metrics["entropy"] == pytest.approx(-logprobs.mean(), rel=1e-5)
    assert without["clip_fraction"] == pytest.approx(with_kl["clip_fraction"], abs=1e-6)
    if config.trainer.updates_per_step > 1:
        teaching = batch.lengths[36:].sum() / batch.lengths.sum()
        assert 0 < with_kl["clip_fraction"] < teaching, "only tokens that teach can be clipped"
