"""Real engines and a real policy agree up to rounding, and the diagnosis finds each cause of a disagreement."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from launch.tools.diagnosis.explain import diagnose
from rlsys.agreement import Agreement, measure_agreement
from rlsys.batching.packing import pack
from rlsys.config.schema import Config
from rlsys.interfaces import STEP_0, Sampling, WhatIf
from rlsys.tasks import zigzag as tiny_task
from rlsys.types import Columns, Prompt
from workers.learner.policy import PolicyGroup
from workers.rollout.rollout_group import RolloutGroup

pytestmark = pytest.mark.long

MakeConfig = Callable[..., Config]


def test_each_cause_is_found_on_real_engines(
    ray: Any,
    engines: Callable[..., RolloutGroup],
    policy: Callable[..., PolicyGroup],
    tiny: MakeConfig,
    changed: MakeConfig,
    model: str,
) -> None:
    config = tiny("rollout.engines=1", "policy.zero_stage=3")
    half = changed(config, "rollout", dtype="bfloat16")
    rollout = engines("rollout.engines=1", transport="object_store")
    coarse = engines("rollout.engines=1", "rollout.dtype=bfloat16")
    policy(half, coarse).sync(0)
    policy = policy(config, rollout, "object_store")
    policy.sync(0)

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["prompt"] for row in tiny_task.rows("zigzag")[:12]]
    prompts = [Prompt(f"p{i}", "zigzag", t, tokenizer.encode(t), {}) for i, t in enumerate(texts)]

    def measured(config: Config = config, rollout: RolloutGroup = rollout) -> Agreement:
        return measure_agreement(rollout, policy, prompts, config)

    def cause(agreement: Agreement, config: Config = config) -> str:
        assert agreement.mean > 1e-3
        return str(diagnose(agreement, {}, policy=policy, config=config))

    # Nothing is wrong.
    first = measured()
    assert first.within_limit
    assert first.mean <= 1e-6
    assert first.largest <= 1e-4
    assert first.tokens > 60
    assert diagnose(first, {}, policy=policy, config=config).explanation is None
    again = measured()
    assert np.array_equal(again.policy, first.policy), "the diagnosis leaves the policy as it was"
    assert [s.tokens.tolist() for s in again.batch.samples] == [s.tokens.tolist() for s in first.batch.samples]

    # The engine samples at another temperature than the policy divides by.
    warm = measured(changed(config, "rollout", temperature=0.7))
    assert cause(warm).startswith("temperature: the engine seems to sample at 0.7, the trainer divides by 1 (gap ")

    # The engine computes in bfloat16.
    rounded = measured(half, coarse)
    assert rounded.within_limit, "bfloat16 has a wider limit"
    assert "it may be rounding" in cause(rounded, half), (
        "an engine rounds in another order: bfloat16 does not remove the gap"
    )

    # The policy is updated, and the engines keep the old weights.
    batch = again.batch
    tokens = int(batch.lengths.sum())
    columns = Columns(advantages=-np.ones(tokens, dtype=np.float32))
    weights = np.full(tokens, 1 / tokens, dtype=np.float32)
    packs = pack(batch, range(12), ranks=2, tokens_per_pack=256, columns=columns, weights=weights)
    policy.update(packs, 1e-2, 0.0)
    stale = measured()
    assert not stale.within_limit
    assert cause(stale).startswith("stale weights: the engine seems to have the weights of step 0 (gap ")
    policy.rescore(packs, WhatIf((Sampling(1.0),), weights=STEP_0))
    assert np.array_equal(measured().policy, stale.policy), "the diagnosis restores the updated weights, bit for bit"
    policy.sync(1)
    assert measured().within_limit

    # The engine samples with top-p.
    def set_top_p(worker: Any, top_p: float) -> None:
        from workers.rollout import in_process_engine
        from workers.rollout.vllm_requests import sampling_params

        def with_top_p(*arguments: Any) -> Any:
            params = sampling_params(*arguments)
            params.top_p = top_p
            return params

        in_process_engine.sampling_params = with_top_p

    [engine] = rollout.workers.actors.values()
    ray.get(engine.__ray_call__.remote(set_top_p, 0.9))
    assert cause(measured()).startswith("top-p: the engine seems to sample with top_p 0.9, the trainer takes")
    ray.get(engine.__ray_call__.remote(set_top_p, 1.0))
    assert measured().within_limit
