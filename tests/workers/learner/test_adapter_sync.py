"""Real ranks send A and B to a real engine: it samples as after a full sync, and wrong merges are found before any sample."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ragged_updates import train
from test_lora import PeftPolicy
from transformers import AutoTokenizer
from zigzag_requests import generate, make_batch, make_requests, same_bits

from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from workers.learner.policy import PolicyGroup
from workers.rollout.rollout_group import RolloutGroup

LORA = ("policy.lora={rank: 4, alpha: 8}", "rollout.engines=1")
ADAPTER = (*LORA, "sync.what=adapter")
IN_FLIGHT = ("pipeline.max_lag=1", "pipeline.in_flight=true")
BFLOAT16 = ("policy.dtype=bfloat16", "rollout.dtype=bfloat16")
FAULTS: dict[str, Callable[..., Any]] = {
    "left out": lambda w, a, b, scale, format: w,
    "scaled by alpha alone": lambda w, a, b, scale, format: w + scale * len(a) * (b @ a),
    "transposed": lambda w, a, b, scale, format: w + scale * ((b @ a).t() if len(w) == w.shape[1] else b @ a),
    "rounded elsewhere": lambda w, a, b, scale, format: w + (scale * b).bfloat16().float() @ a,
}


def prepare(group: RolloutGroup, fault: Any = None) -> None:
    """The engine is as at its start, or merges with a fault."""

    def plant(worker: Any) -> None:
        from rlsys.forward import lora

        worker.right_merge = getattr(worker, "right_merge", lora.merge)
        lora.merge, worker.weights_error = fault or worker.right_merge, ""
        runner = worker.engine.engine.model_executor.driver_worker.worker.model_runner
        vars(runner.get_model()).pop("load_weights", None)

    [engine] = group.workers.actors.values()
    ray.get(engine.__ray_call__.remote(plant))


@pytest.fixture
def tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("shared_memory", ("policy.zero_stage=2",)),
        ("object_store", ("policy.zero_stage=3", *IN_FLIGHT)),
        ("shared_memory", ("policy.zero_stage=3", *BFLOAT16)),
        ("object_store", ("policy.zero_stage=1", "rollout.exact=true")),
        ("shared_memory", ("policy.zero_stage=2", "sync.verify=false")),
    ],
)
def test_engines_sample_as_after_a_full_sync(
    engines: Callable[..., RolloutGroup],
    policy: Callable[..., PolicyGroup],
    tokenizer: Any,
    model: str,
    tmp_path: Path,
    transport: str,
    options: tuple[str, ...],
) -> None:
    samples = []
    for settings in (LORA, ADAPTER):
        group = engines(*settings, *options, transport=transport)
        prepare(group)
        learner = policy(group.config, group, transport)
        learner.sync(0)
        first = generate(group, make_requests(tokenizer))
        for version in (1, 2):
            for _ in range(3):
                train(learner, 4096, version)
            learner.sync(version)
        samples.append(generate(group, make_requests(tokenizer)))
        assert {sample.version for sample in samples[-1]} == {2}
        assert [s.text for s in first] != [s.text for s in samples[-1]]
    assert same_bits(*samples)
    learner.save(str(tmp_path))
    learner.saved_files(wait=True)
    if "policy.dtype=bfloat16" not in options:
        by_peft = PeftPolicy(model, str(tmp_path / "model")).score(make_batch(tokenizer, samples[-1]))
        for sample, logprobs in zip(samples[-1], by_peft, strict=True):
            assert np.abs(sample.logprobs - logprobs.numpy()).max() < 1e-4


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_merges_wrongly_is_found_before_the_first_sync(
    engines: Callable[..., RolloutGroup], policy: Callable[..., PolicyGroup], fault: str
) -> None:
    group = engines(*ADAPTER)
    prepare(group, FAULTS[fault])
    problem = r"rollout-0 does not merge adapters as the policy does: \d+ of 26 tensors differ: .*q_proj"
    with pytest.raises(ConfigError, match=problem):
        policy(group.config, group)


def test_an_engine_that_keeps_old_adapters_is_found_at_the_sync(
    engines: Callable[..., RolloutGroup], policy: Callable[..., PolicyGroup]
) -> None:
    def drop_what_arrives(worker: Any) -> None:
        merger = worker.engine.engine.model_executor.driver_worker.worker.rlsys_adapters
        old = {name: matrix.clone() for name, matrix in merger.base.items() if name in merger.layers}
        merger.weight = old.__getitem__

    group = engines(*ADAPTER)
    prepare(group)
    learner = policy(group.config, group)
    learner.sync(0)
    assert group.compare_weights() == {"rollout-0": ""}
    [engine] = group.workers.actors.values()
    ray.get(engine.__ray_call__.remote(drop_what_arrives))
    train(learner, 4096, 0)
    learner.sync(1)
    assert group.compare_weights()["rollout-0"].startswith("14 of 26 tensors differ")


def test_the_random_adapters_of_the_proof_are_gone_afterwards(
    engines: Callable[..., RolloutGroup], policy: Callable[..., PolicyGroup], tiny: Callable[..., Config]
) -> None:
    group = engines(*ADAPTER)
    prepare(group)
    before = policy(tiny(*LORA)).call_all("digest")
    assert policy(group.config, group).call_all("digest") == before
    assert group.weight_update is None
