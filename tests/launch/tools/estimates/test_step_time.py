from dataclasses import replace

import pytest

from launch.tools.estimates.adapters import sync_tensors
from launch.tools.estimates.devices import GPUS
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.step_time import (
    BANDWIDTH_SHARE,
    HOST_STEP_S,
    HOST_TOKEN_S,
    SCORING_SHARE,
    SYNC_S,
    SYNC_TENSOR_S,
    TRAINING_SHARE,
    estimate_step,
)
from rlsys.config.methods import EntropyConfig, ReferenceConfig
from rlsys.config.schema import (
    ClusterConfig,
    Config,
    PipelineConfig,
    PolicyConfig,
    RolloutConfig,
    SyncConfig,
    TrainerConfig,
)
from rlsys.models.config_json import parse_config
from rlsys.models.known_shapes import look_up_shape

MODEL, LENGTHS, H100 = look_up_shape("Qwen2.5-7B"), SequenceLengths(512, 1024), GPUS["H100"]
CONFIG = Config(
    cluster=ClusterConfig(device="gpu"),
    sync=SyncConfig(transport="nccl"),
    trainer=TrainerConfig(prompts_per_step=64, samples_per_prompt=8, updates_per_step=2),
    rollout=RolloutConfig(engines=4, dtype="bfloat16", enforce_eager=False),
    policy=PolicyConfig(ranks=4, dtype="bfloat16", tokens_per_pack=8192),
)


def phases(config: Config = CONFIG, new: float = 512) -> dict[str, float]:
    return estimate_step(config, MODEL, LENGTHS, H100, new).phases


def test_scoring_time_is_work_over_speed():
    work = 64 * MODEL.flop_counter.group_flops(512, [512] * 8)
    assert phases()["score"] == pytest.approx(work / (4 * 989e12 * SCORING_SHARE))


HYBRID = {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "vocab_size": 248320}
HYBRID |= {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}


def test_a_prompt_is_scored_for_each_completion_of_a_model_with_mixers():
    model = parse_config("hybrid", HYBRID)
    work = 64 * 8 * model.flop_counter.forward_flops(0, 1023, 512)
    seconds = estimate_step(CONFIG, model, LENGTHS, H100, 512).phases["score"]
    assert seconds == pytest.approx(work / (4 * 989e12 * SCORING_SHARE), rel=1e-3)


def test_an_engine_reads_the_experts_that_some_of_its_sequences_choose():
    model = look_up_shape("Qwen/Qwen3-30B-A3B")
    assert model.parameters_read(1) == pytest.approx(model.active_parameters)
    assert model.parameters_read(512) == pytest.approx(model.parameters)
    half = model.parameters_read(11) - model.parameters_read(0)  # (120 / 128)^11 is 0.49
    assert half == pytest.approx(0.51 * 48 * 128 * 3 * 2048 * 768, rel=0.01)


def test_old_log_probs_take_a_pass_if_they_are_needed():
    once = replace(CONFIG, trainer=replace(CONFIG.trainer, updates_per_step=1))
    assert phases(once)["score"] == 0
    in_reward = replace(once, reference=ReferenceConfig(kl_coef=0.01, kl_in="reward"))
    controlled = replace(once, entropy=EntropyConfig(control="clip_cov"))
    assert phases(in_reward)["score"] == phases(controlled)["score"] == phases()["score"] > 0
    assert phases(replace(once, reference=ReferenceConfig(kl_coef=0.01)))["score"] == 0


def test_a_reference_of_its_own_takes_the_time_of_its_own_work():
    config, small = replace(CONFIG, reference=ReferenceConfig(kl_coef=0.1)), look_up_shape("Qwen2.5-0.5B")
    seconds = estimate_step(config, MODEL, LENGTHS, H100, 512, small).phases["reference"]
    work = 64 * small.flop_counter.group_flops(512, [512] * 8)
    assert seconds == pytest.approx(work / (989e12 * SCORING_SHARE))
    assert phases(config)["reference"] > 5 * seconds


def test_an_update_costs_three_passes_and_four_with_checkpointing():
    checkpointing = replace(CONFIG, policy=replace(CONFIG.policy, gradient_checkpointing=True))
    work = 64 * MODEL.flop_counter.group_flops(512, [512] * 8) / (4 * 989e12 * TRAINING_SHARE)
    assert phases(checkpointing)["update"] - phases()["update"] == pytest.approx(work)
    assert phases()["update"] > 3 * work


def test_decoding_takes_at_least_the_time_to_read_the_weights():
    least = 512 * 2 * MODEL.parameters / (3350e9 * BANDWIDTH_SHARE)
    assert phases()["rollout"] > least


def test_launching_kernels_one_by_one_costs_time():
    eager = replace(CONFIG, rollout=replace(CONFIG.rollout, enforce_eager=True))
    assert phases(eager)["rollout"] >= phases()["rollout"]


def test_longer_completions_and_fewer_engines_take_longer():
    assert phases(new=1024)["rollout"] > phases(new=256)["rollout"]
    fewer = replace(CONFIG, rollout=replace(CONFIG.rollout, engines=2))
    assert phases(fewer)["rollout"] > phases()["rollout"]


def test_with_a_lag_the_shorter_part_is_hidden():
    times = estimate_step(CONFIG, MODEL, LENGTHS, H100, 512)
    ahead = estimate_step(replace(CONFIG, pipeline=PipelineConfig(max_lag=1)), MODEL, LENGTHS, H100, 512)
    rest = sum(times.phases.values()) - times.phases["rollout"]
    assert times.step == pytest.approx(times.phases["rollout"] + rest)
    assert ahead.step == pytest.approx(max(times.phases["rollout"], rest))


def test_a_sync_takes_calls_a_time_for_each_tensor_and_the_weights_over_the_speed_of_the_transport():
    slower = replace(CONFIG, sync=SyncConfig(transport="object_store"))
    latency = SYNC_S + SYNC_TENSOR_S * (28 * 12 + 3)
    assert phases()["sync"] == pytest.approx(latency + 2 * MODEL.parameters / 20e9)
    assert phases(slower)["sync"] == pytest.approx(latency + 2 * MODEL.parameters / 0.5e9)
    cpu = replace(CONFIG, cluster=ClusterConfig(device="cpu"), sync=SyncConfig(transport="shared_memory"))
    assert estimate_step(cpu, MODEL, LENGTHS, None, 512).phases["sync"] == pytest.approx(2 * MODEL.parameters / 2e9)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"]
)
def test_a_sync_sends_as_many_tensors_as_a_models_files_have(name):
    """Counted by hand: of a layer, and the others."""
    layer, others, layers = {
        "Qwen/Qwen2.5-0.5B": (12, 2, 24),
        "Qwen/Qwen3-4B": (11, 2, 36),
        "Qwen/Qwen3-30B-A3B": (4 + 4 + 1 + 3 * 128, 3, 48),
        "meta-llama/Llama-3.1-8B": (9, 3, 32),
    }[name]
    assert sync_tensors(look_up_shape(name)) == layers * layer + others


def test_a_small_model_on_a_fast_gpu_waits_for_its_host():
    small, single = look_up_shape("Qwen/Qwen2.5-0.5B"), replace(CONFIG, rollout=replace(CONFIG.rollout, engines=8))
    steps = estimate_step(single, small, SequenceLengths(512, 512), H100, 512).phases["rollout"]
    assert steps == pytest.approx(512 * (HOST_STEP_S + 64 * HOST_TOKEN_S), rel=0.01)
    decode = phases()["rollout"]  # 7B with 128 sequences, of a GPU: weights and cache take longer than the host
    assert decode > 1.5 * 512 * (HOST_STEP_S + 128 * HOST_TOKEN_S)


def test_a_single_update_on_policy_needs_no_old_log_probs():
    once = replace(CONFIG, trainer=replace(CONFIG.trainer, updates_per_step=1))
    assert phases(once)["score"] == 0
