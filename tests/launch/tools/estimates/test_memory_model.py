"""Estimated memory of processes, compared with values by hand."""

from dataclasses import replace

import pytest
import torch
from small_models import build_model

from launch.tools.estimates import activations
from launch.tools.estimates.activations import LayerActivations, worst_case_pack
from launch.tools.estimates.adapters import trained_parameters
from launch.tools.estimates.devices import GIB
from launch.tools.estimates.disk import disk_space
from launch.tools.estimates.engine import kv_cache_tokens
from launch.tools.estimates.learner import learner_memory
from launch.tools.estimates.memory import ProcessMemory, SequenceLengths, total_bytes
from launch.tools.estimates.processes import memory_by_role
from rlsys.config.methods import CriticConfig, ReferenceConfig
from rlsys.config.schema import (
    ClusterConfig,
    Config,
    LoraConfig,
    PolicyConfig,
    RewardConfig,
    RewardFunction,
    RolloutConfig,
    SyncConfig,
    TrainerConfig,
)
from rlsys.forward.lora import add_adapters
from rlsys.models.known_shapes import look_up_shape

SEVEN = look_up_shape("Qwen2.5-7B")
GPUS = Config(
    cluster=ClusterConfig(device="gpu"),
    rollout=RolloutConfig(dtype="bfloat16"),
    policy=PolicyConfig(ranks=8, dtype="bfloat16", tokens_per_pack=8192),
)
LENGTHS = SequenceLengths(512, 1536)


def learner_rank(config: Config, role: str = "policy", first: bool = False) -> ProcessMemory:
    return learner_memory(config, SEVEN, role, config.policy.ranks, LENGTHS, first=first, has_logits=role == "policy")


def checkpointed(**more) -> tuple[dict, dict]:
    """What a rank holds for one sequence of 2,048 tokens: on its GPU in an update, and in main memory."""
    policy = replace(GPUS.policy, tokens_per_pack=2048, gradient_checkpointing=True, **more)
    rank = learner_rank(replace(GPUS, policy=policy))
    return rank.device["update"], rank.host["step"]


def test_ranks_that_share_a_pack_hold_their_part_of_its_activations():
    (alone, _), (sharing, _) = checkpointed(), checkpointed(sequence_parallel=4)
    assert sharing["activations"] == pytest.approx(alone["activations"] / 4, rel=0.01), (
        "but all of its tokens may be scored"
    )
    assert sharing["weights"] == alone["weights"]
    more = LayerActivations(SEVEN, 2, 1.0, sharing=28).mean - LayerActivations(SEVEN, 2, 1.0).mean
    assert more == pytest.approx(2 * 2 * 128 * (28 - 4)), "each of 28 ranks has a head of keys and one of values"


def test_offloaded_inputs_of_layers_are_in_main_memory_by_hand():
    (kept, host), (offloaded, more) = checkpointed(), checkpointed(offload=["activations"])
    one = 2048 * 2 * 3584  # bytes of a layer's input; pinned memory is rounded up to 16 MiB
    assert kept["activations"] - offloaded["activations"] == pytest.approx((28 - 2) * one)
    assert more["activations"] - host.get("activations", 0) == 28 * 2**24
    on_cpu = replace(GPUS, cluster=ClusterConfig(device="cpu"))
    policy = replace(GPUS.policy, gradient_checkpointing=True)
    hosts = [replace(on_cpu, policy=replace(policy, offload=o)) for o in ([], ["activations"])]
    assert learner_rank(hosts[0]).host == learner_rank(hosts[1]).host


def test_weights_gradients_and_adam_by_hand():
    p = SEVEN.parameters
    device = learner_rank(GPUS).device
    assert device["generate"]["weights"] == 2 * p
    assert device["generate"]["optimizer"] == 12 * p / 8, "fp32 weights and two moments, an eighth of each"
    assert device["update"]["gradients"] == 4 * p / 8, "added up in float32"

    first_stage = learner_rank(replace(GPUS, policy=replace(GPUS.policy, zero_stage=1))).device
    assert first_stage["update"]["gradients"] == 2 * p, "whole, until the last pack"
    assert first_stage["step"]["gradients"] == 2 * p / 8


def test_gradients_are_reduced_through_copies_of_the_bucket():
    def buckets(**more: object) -> float:
        return learner_rank(replace(GPUS, policy=replace(GPUS.policy, **more))).device["reduce"]["buckets"]

    size, head = SEVEN.parameters // 16, 152_064 * 3_584  # a larger matrix is reduced by itself
    assert buckets() == 2 * size + (2 + 4) * head
    assert buckets(zero_stage=1) == (2 + 2 + 4) * size
    assert buckets(zero_stage=3) == 4 * size + 4 * head
    assert buckets(zero_stage=3, grad_dtype="bfloat16") == 2 * size, "it is neither copied nor converted"
    assert buckets(grad_dtype="bfloat16") == 2 * size + 2 * head
    assert buckets(dtype="float32") == 4 * size + 4 * head


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_zero_stage_holds_less_than_the_one_before(stage):
    def held(s: int) -> float:
        settings = replace(GPUS, policy=replace(GPUS.policy, zero_stage=s))
        return total_bytes(learner_rank(settings).device["generate"]) - learner_rank(settings).device["generate"].get(
            "buckets", 0
        )

    if stage:
        assert held(stage) <= held(stage - 1)


def test_offloading_moves_bytes_to_main_memory():
    kept_there = learner_rank(GPUS)
    moved = learner_rank(replace(GPUS, policy=replace(GPUS.policy, offload=["optimizer"])))
    moved_bytes = kept_there.device["generate"]["optimizer"] - moved.device["generate"].get("optimizer", 0)
    assert moved_bytes == 12 * SEVEN.parameters / 8
    assert moved.host["step"]["optimizer"] >= moved_bytes


def test_offloading_changes_nothing_on_cpu():
    host = replace(GPUS, cluster=ClusterConfig(device="cpu"))
    off = replace(host, policy=replace(host.policy, offload=["optimizer"]))
    assert learner_rank(off).host == learner_rank(host).host


def test_zero_3_ranks_load_their_part_of_the_model_and_never_all_of_it():
    def load(stage: int, device: str = "gpu", **policy: object) -> tuple[float, float]:
        config = replace(
            GPUS, cluster=ClusterConfig(device=device), policy=replace(GPUS.policy, zero_stage=stage, **policy)
        )
        rank = learner_rank(config)
        return rank.host["load"]["weights"], rank.device["load"]["weights"] if rank.device else 0.0

    whole, largest = 2 * SEVEN.parameters, 2 * SEVEN.largest_tensor
    assert load(2) == (whole, whole)
    assert load(3) == (largest, whole / 8 + largest)
    assert load(3, offload=["params"]) == (whole / 8 + largest, largest)
    assert load(3, device="cpu") == (whole / 8 + largest, 0.0)


def test_zero_3_ranks_send_their_shards_or_gather_for_the_engine_on_their_gpu():
    host = replace(GPUS, cluster=ClusterConfig(device="cpu"), policy=replace(GPUS.policy, zero_stage=3))
    parallel = replace(host, rollout=replace(host.rollout, tensor_parallel=2))
    through_main_memory = replace(host, cluster=ClusterConfig(device="gpu"), sync=SyncConfig(transport="shared_memory"))
    everything, bucket = 2 * SEVEN.parameters, 2 * SEVEN.largest_tensor  # the embedding alone

    def sent(c: Config, first: bool) -> float:
        held = learner_rank(c, first=first).host["step"].get("buckets", 0)
        return held - learner_rank(c, "critic", first).host["step"].get("buckets", 0)

    def gathered(c: Config) -> float:
        moments = learner_rank(c).device or learner_rank(c).host
        return moments["sync"]["weights"] - moments["generate"]["weights"]

    for shards in (host, parallel, through_main_memory):
        assert [sent(shards, first) for first in (True, False)] == [everything / 8, everything / 8]
        assert gathered(shards) == 0
    assert sent(replace(parallel, sync=SyncConfig(transport="object_store")), True) == bucket / 8
    colocated = replace(host, cluster=ClusterConfig(device="gpu", placement="colocated"))
    assert [sent(colocated, first) for first in (True, False)] == [0, 0]
    assert gathered(colocated) == bucket
    assert sent(replace(through_main_memory, sync=SyncConfig(transport="nccl")), True) == 0
    assert gathered(GPUS) == 0, "ranks with ZeRO 2 have all weights"


def test_shorter_packs_and_checkpointing_lower_the_update():
    def update(**more: object) -> float:
        return total_bytes(learner_rank(replace(GPUS, policy=replace(GPUS.policy, **more))).device["update"])

    assert update(gradient_checkpointing=True) < update()
    assert update(tokens_per_pack=2048) < update()


def test_an_engine_takes_its_share_and_the_rest_is_cache():
    parts = memory_by_role(GPUS, SEVEN, LENGTHS, 80 * GIB)["rollout"].device["generate"]
    assert total_bytes(parts) == pytest.approx(0.85 * 80 * GIB)
    assert parts["weights"] == 2 * SEVEN.parameters
    halves = replace(GPUS, rollout=replace(GPUS.rollout, tensor_parallel=2))
    assert memory_by_role(halves, SEVEN, LENGTHS, 80 * GIB)["rollout"].device["generate"]["weights"] == SEVEN.parameters


def test_an_engine_splits_long_prompts_on_gpus_but_not_on_cpu():
    def work(c: Config, lengths: SequenceLengths) -> float:
        engine = memory_by_role(c, SEVEN, lengths, 80 * GIB)["rollout"]
        return (engine.device or engine.host)["generate"]["activations"]

    many = replace(GPUS, rollout=replace(GPUS.rollout, max_sequences=16384))
    assert work(many, LENGTHS) == 2 * work(GPUS, LENGTHS), "16384 and 8192"
    assert work(GPUS, SequenceLengths(4096, 4096)) == work(GPUS, LENGTHS), "the prompt is split"
    host = replace(GPUS, cluster=ClusterConfig(device="cpu"))
    assert work(host, SequenceLengths(4096, 4096)) == 4 * work(host, LENGTHS), "8192 and 2048"


def test_a_colocated_engine_sleeps_while_the_policy_learns():
    config = replace(
        GPUS, cluster=ClusterConfig(device="gpu", placement="colocated"), rollout=replace(GPUS.rollout, engines=8)
    )
    engine = memory_by_role(config, SEVEN, LENGTHS, 80 * GIB)["rollout"].device
    assert total_bytes(engine["update"]) < 2 * GIB < total_bytes(engine["sync"]) < total_bytes(engine["generate"])


def test_the_cache_holds_keys_and_values():
    assert SEVEN.kv_bytes_per_token(2) == 2 * 28 * 4 * 128 * 2
    config = Config(rollout=RolloutConfig(kv_cache_mb=64))
    assert kv_cache_tokens(config, look_up_shape("builtin:tiny"), 0, 20) == 64 * 2**20 / (2 * 2 * 128 * 4)
    halves = Config(rollout=RolloutConfig(kv_cache_mb=64, tensor_parallel=2))
    assert kv_cache_tokens(halves, look_up_shape("builtin:tiny"), 0, 20) == 2 * 64 * 2**20 / (2 * 2 * 128 * 4)


def test_a_pack_has_a_prompt_for_each_completion_of_a_model_with_mixers():
    _, hybrid = build_model("lfm2", torch.float32)
    config = Config(trainer=TrainerConfig(4, 4, 4), policy=PolicyConfig(ranks=1, tokens_per_pack=4096))
    shared, repeated = (worst_case_pack(config, m, SequenceLengths(100, 20), 8, 1) for m in (SEVEN, hybrid))
    assert shared == pytest.approx((2 * 100 + 8 * 20, 8 * 20))
    assert repeated == pytest.approx((8 * (100 + 20), 8 * 20))
    cells = [activations.attention_cells(config, m, SequenceLengths(100, 20)) for m in (SEVEN, hybrid)]
    assert cells == pytest.approx([1.1 * (100 + 4 * 120) / 180, 1.1]), "keys of the prompt are there anyway"


def test_roles_follow_the_configuration():
    assert set(memory_by_role(GPUS, SEVEN, LENGTHS, 80 * GIB)) == {"rollout", "policy-0", "policy", "reward", "driver"}
    more = replace(GPUS, reference=ReferenceConfig(kl_coef=0.1), algorithm=replace(GPUS.algorithm, advantage="gae"))
    more = replace(more, critic=CriticConfig(ranks=2))
    assert {"reference", "critic"} <= set(memory_by_role(more, SEVEN, LENGTHS, 80 * GIB))


def test_a_head_in_float32_has_a_copy_of_its_weight():
    low = Config(policy=PolicyConfig(dtype="bfloat16"))
    high = replace(low, policy=replace(low.policy, head_dtype="float32"))
    scoring, training = (
        [activations.logit_bytes(config, SEVEN, 512, training) for config in (low, high)] for training in (False, True)
    )
    weight = SEVEN.vocabulary * SEVEN.hidden
    assert scoring[1] - scoring[0] == 4 * weight
    wider = 2 * 512 * (SEVEN.vocabulary + SEVEN.hidden)  # gradients of logits and of hidden states
    assert training[1] - training[0] == (4 + 2 - 4) * weight + wider, "its gradient is added without a float32 copy"


def test_a_reference_of_its_own_counts_with_its_own_weights():
    small = look_up_shape("Qwen/Qwen2.5-0.5B")
    config = Config(reference=ReferenceConfig(kl_coef=0.1, path="big"))
    own = memory_by_role(config, small, LENGTHS)["reference"].host["score"]
    other = memory_by_role(config, small, LENGTHS, other_models={"big": SEVEN})["reference"].host["score"]
    assert (own["weights"], other["weights"]) == (4 * small.parameters, 4 * SEVEN.parameters)


def test_a_reward_model_counts_on_its_device():
    def scoring(**options: object) -> ProcessMemory:
        functions = {
            "zigzag": RewardFunction(),
            "rm": RewardFunction(function="model", options={"path": "judge", **options}),
        }
        config = replace(GPUS, reward=RewardConfig(functions=functions))
        return memory_by_role(config, SEVEN, LENGTHS, 80 * GIB, {"judge": SEVEN})["reward-1-0"]

    body = SEVEN.parameters - SEVEN.embedding_parameters  # without the output layer
    assert scoring().host["generate"]["weights"] == 4 * body
    assert scoring().device == {}
    on_gpu = scoring(gpus=1, dtype="float16")
    assert on_gpu.device["generate"]["weights"] == on_gpu.host["load"]["weights"] == 2 * body
    assert "weights" not in on_gpu.host["always"]
    few = scoring(gpus=1, batch=4).device["generate"]["activations"]
    assert scoring(gpus=1).device["generate"]["activations"] == 4 * few
    assert scoring(gpus=1, batch=4, max_tokens=256).device["generate"]["activations"] < few


def test_a_checkpoint_holds_weights_adam_and_for_bfloat16_fp32_weights():
    config = replace(GPUS, trainer=TrainerConfig(steps=100), checkpoint=replace(GPUS.checkpoint, every=10, keep_last=2))
    space = disk_space(config, SEVEN)
    assert space.checkpoint == 14 * SEVEN.parameters
    assert space.checkpoints == 3, "an old one is removed after the new one is written"
    fp32 = replace(config, policy=replace(config.policy, dtype="float32"))
    assert disk_space(fp32, SEVEN).checkpoint == 12 * SEVEN.parameters
    refreshed = replace(fp32, reference=ReferenceConfig(kl_coef=0.1, refresh_every=9))
    assert disk_space(refreshed, SEVEN).checkpoint == (12 + 4) * SEVEN.parameters
    assert disk_space(replace(config, checkpoint=replace(config.checkpoint, keep_last=0)), SEVEN).checkpoints == 10
    assert disk_space(replace(config, checkpoint=replace(config.checkpoint, every=0)), SEVEN).checkpoints == 1


# --- LoRA -------------------------------------------------------------------------------------------------------------


def with_lora(rank: int, targets: list[str] | None = None, **options: object) -> Config:
    lora = LoraConfig(rank, 2.0 * rank, targets or ["all-linear"])
    return replace(GPUS, policy=replace(GPUS.policy, lora=lora, **options))


@pytest.mark.parametrize(
    ("targets", "count"), [(["all-linear"], 80_740_352), (["self_attn.q_proj", "v_proj"], 10_092_544)]
)
def test_the_parameters_of_adapters_are_those_that_peft_counts(targets, count):
    """Qwen2.5-7B with rank 32, as print_trainable_parameters says."""
    assert trained_parameters(with_lora(32, targets), SEVEN) == count


@pytest.mark.parametrize("family", ["qwen3", "phi3", "qwen3_5_text", "falcon_h1", "lfm2"])
def test_the_model_of_a_family_has_as_many_adapter_parameters(family):
    lm, model = build_model(family, torch.float32)
    config = with_lora(3)
    add_adapters(lm, rank=3, alpha=6, targets=["all-linear"], format=torch.float32, seed=0)
    assert trained_parameters(config, model) == sum(p.numel() for p in lm.parameters() if p.requires_grad)


def test_gradients_and_optimizer_of_a_rank_are_those_of_adapters_alone():
    adapters, ranks = 80_740_352, 8
    config = with_lora(32, zero_stage=2)
    full, lora = (learner_rank(c).device for c in (replace(GPUS, policy=replace(GPUS.policy, zero_stage=2)), config))
    assert lora["generate"]["optimizer"] == 12 * adapters / ranks
    assert full["generate"]["optimizer"] == 12 * SEVEN.parameters / ranks
    assert lora["generate"]["weights"] == 2 * SEVEN.parameters
    assert lora["generate"]["adapters"] == 2 * adapters
    assert lora["update"]["gradients"] == 4 * adapters / ranks
    assert lora["reduce"]["buckets"] == (2 + 2 + 4) * adapters < full["reduce"]["buckets"]
    shard = learner_rank(with_lora(32, zero_stage=3)).device["generate"]
    assert shard["weights"] + shard["adapters"] == 2 * (SEVEN.parameters + adapters) / ranks


def test_the_policy_is_its_own_reference_and_a_checkpoint_holds_adapters():
    lora = replace(with_lora(32), reference=ReferenceConfig(kl_coef=0.1))
    full = replace(GPUS, reference=ReferenceConfig(kl_coef=0.1))
    assert "reference" in memory_by_role(full, SEVEN, LENGTHS, 80 * GIB)
    assert "reference" not in memory_by_role(lora, SEVEN, LENGTHS, 80 * GIB)
    refreshed = replace(lora, reference=ReferenceConfig(kl_coef=0.1, refresh_every=5))
    assert "reference" in memory_by_role(refreshed, SEVEN, LENGTHS, 80 * GIB)
    assert disk_space(lora, SEVEN).checkpoint == (2 + 12) * 80_740_352


def test_a_critic_beside_adapters_trains_all_its_weights():
    config = with_lora(32, zero_stage=2)
    full = replace(GPUS, policy=replace(GPUS.policy, zero_stage=2))
    assert learner_rank(config, "critic").device == learner_rank(full, "critic").device
