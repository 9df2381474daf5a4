from dataclasses import replace

import numpy as np
import pytest
from fakes import make_batch, make_config
from hypothesis import given
from hypothesis import strategies as st

from launch.tools.estimates.batch_math import batch_rows, dataset_rows, method_rows, process_rows
from rlsys.batching.packing import pack
from rlsys.checks import load_checked
from rlsys.config.schema import Config, PolicyConfig, RolloutConfig, TrainerConfig


def numbers(config: Config) -> dict[str, int]:
    return {quantity: number for quantity, _, number in batch_rows(config)}


def test_the_arithmetic_of_a_small_run_by_hand(tmp_path):
    config = make_config(tmp_path, "trainer.epochs_per_step=3")
    assert numbers(config) == {
        "prompts per step": 4,
        "samples per step": 16,  # x 4
        "samples per engine": 8,  # 2 engines
        "samples per update": 8,  # 2 updates per pass
        "updates per step": 6,  # x 3 passes
        "updates in all": 18,  # x 3 steps
        "new tokens per step, at most": 112,  # 16 x 7
        "packs per rank and update, at most": 2,  # 3 sequences of 13 inputs in 40 tokens: 8 need 3 packs, on 2 ranks
    }


def test_the_table_shows_how_numbers_are_computed(tmp_path):
    rows = {quantity: how for quantity, how, _ in batch_rows(make_config(tmp_path))}
    assert rows["samples per step"] == "4 prompts x 4 samples_per_prompt"


def test_remax_requests_one_completion_more_per_prompt(tmp_path):
    overrides = ["algorithm.advantage=remax", "rollout.engines=3"]
    rows = numbers(make_config(tmp_path, *overrides))
    assert rows["samples per step"] == 16, "that are trained on"
    assert rows["samples per engine"] == 10, "two of four whole groups, of 4 + 1"
    assert rows["new tokens per step, at most"] == 140, "4 x 5 x 7"
    rows = {quantity: how for quantity, how, _ in batch_rows(make_config(tmp_path, *overrides))}
    assert rows["new tokens per step, at most"] == "4 prompts x (4 + 1 greedy) x 7"


def test_dynamic_sampling_requests_at_most_a_batch_in_each_round(tmp_path):
    rows = numbers(make_config(tmp_path, "dynamic_sampling.enabled=true"))
    assert rows["new tokens per round, at most"] == 112
    assert rows["samples per engine and round"] == 8
    assert "new tokens per step, at most" not in rows


def test_a_sequence_beyond_the_budget_is_a_pack_alone(tmp_path):
    config = make_config(tmp_path)
    config = replace(config, policy=replace(config.policy, tokens_per_pack=12))  # a full sequence has 7 + 7 - 1 inputs
    assert numbers(config)["packs per rank and update, at most"] == 4, "8 samples on 2 ranks"
    how = {quantity: how for quantity, how, _ in batch_rows(config)}["packs per rank and update, at most"]
    assert how == ("12 tokens_per_pack, 2 ranks; a sequence longer than that is a pack alone, of 13 tokens at most")
    batch = make_batch([0.0] * 8, [0] * 8, [7] * 8, [7])
    assert [len(packs) for packs in pack(batch, range(8), ranks=2, tokens_per_pack=12)] == [4, 4]


@given(samples=st.integers(1, 20), ranks=st.integers(1, 3), new=st.integers(1, 9), budget=st.integers(20, 80))
def test_the_table_never_underestimates_the_number_of_packs(samples, ranks, new, budget):
    config = Config(
        trainer=TrainerConfig(prompts_per_step=1, samples_per_prompt=samples),
        rollout=RolloutConfig(max_prompt_tokens=11, max_new_tokens=new),
        policy=PolicyConfig(ranks=ranks, tokens_per_pack=budget),
    )
    batch = make_batch([0.0] * samples, [0] * samples, [new] * samples, [11])
    members, planned = np.arange(samples).tolist(), numbers(config)["packs per rank and update, at most"]
    assert len(pack(batch, members, ranks=ranks, tokens_per_pack=budget)[0]) <= planned
    assert len(pack(batch, members, ranks=ranks, tokens_per_pack=budget, share_prompts=False)[0]) == planned


@pytest.mark.parametrize(
    ("kl_coef", "roles"), [(0.0, ["rollout", "reward", "policy"]), (0.1, ["rollout", "reward", "policy", "reference"])]
)
def test_the_reference_exists_only_with_a_kl_coefficient(tmp_path, kl_coef, roles):
    rows = process_rows(make_config(tmp_path, f"reference.kl_coef={kl_coef}"))
    assert [role for role, _, _ in rows] == roles
    assert [count for _, count, _ in rows][:3] == [2, 2, 2]


def test_the_critic_exists_only_with_gae(tmp_path):
    rows = process_rows(make_config(tmp_path, "algorithm.advantage=gae", "critic.ranks=3"))
    assert rows[-1][:2] == ("critic", 3)
    assert "critic" not in [role for role, _, _ in process_rows(make_config(tmp_path))]


def test_threads_are_named_where_there_are_several(tmp_path):
    words = {role: what for role, _, what in process_rows(make_config(tmp_path, "rollout.threads=3"))}
    assert words["rollout"].endswith(", 3 threads")
    assert "thread" not in words["policy"]


def test_the_method_in_a_few_words(tmp_path):
    assert dict(method_rows(make_config(tmp_path))) == {
        "advantage": "grpo",
        "loss": "ppo_clip",
        "token weights": "token_mean",
    }
    overrides = ["algorithm.std=none", "algorithm.eps=0.5", "algorithm.clip_high=0.28", "algorithm.normalize=constant"]
    overrides += ["reference.kl_coef=0.01", "reference.kl_target=0.1", "correction.method=tis", "entropy.coef=0.001"]
    overrides += ["overlong.buffer=3", "overlong.mask=true", "dynamic_sampling.enabled=true"]
    assert dict(method_rows(make_config(tmp_path, *overrides))) == {
        "advantage": "grpo, deviation none (eps 0.5)",
        "loss": "ppo_clip (clip_high 0.28)",
        "token weights": "constant, 7 tokens",
        "KL": "k3 in the loss, coefficient 0.01, adapted to 0.1 per token",
        "correction": "tis",
        "entropy": "bonus 0.001, control none",
        "overlong": "penalty over the last 3 tokens, mask",
        "dynamic sampling": "at most 20 rounds",
    }


@pytest.mark.parametrize(
    ("overrides", "part", "text"),
    [
        ("algorithm.advantage=gdpo algorithm.whiten=true", "advantage", "gdpo, whitened"),
        ("algorithm.advantage=gdpo algorithm.whiten=false", "advantage", "gdpo"),
        ("algorithm.normalize=constant algorithm.constant=5", "token weights", "constant, 5 tokens"),
        ("algorithm.normalize=decoupled", "token weights", "decoupled (control_weight 0.001)"),
        ("algorithm.loss=gspo", "token weights", "sequence_mean"),
        (
            'algorithm.control_tokens={"<a>":1,"<b>":0.5}',
            "right answers",
            "1 after <a>, 0.5 after <b>; wrong ones -1",
        ),
        ("reward.per_token=true", "reward", "divided by the completion's tokens"),
        (
            "algorithm.loss=sapo algorithm.normalize=token_mean",
            "token weights",
            "token_mean (sapo was published with sequence_mean)",
        ),
        ("reference.kl_coef=1 reference.kl_in=reward", "KL", "k1 in the reward, coefficient 1"),
        (
            "reference.kl_coef=1 reference.kl_in=reward algorithm.kl=k3",
            "KL",
            "k3 in the reward (a biased gradient; that of k1 is exact), coefficient 1",
        ),
        ("algorithm.loss=reinforce trainer.updates_per_step=1", "loss", "reinforce"),
        ("algorithm.anchor=rollout", "ratio", "to the engines' log-probs"),
        ("pipeline.max_lag=1", "correction", "tis"),
        ("pipeline.max_lag=1 correction.high=3", "correction", "tis (high 3)"),
        ("rollout.dtype=bfloat16", "correction", "tis"),
        ("policy.dtype=bfloat16", "correction", "tis"),
        (
            "pipeline.max_lag=1 correction.method=none",
            "correction",
            "none: samples of other weights or rounding count as the policy's own",
        ),
        ("correction.method=icepop", "correction", "icepop"),
        ("correction.method=icepop correction.low=0.25 correction.high=4", "correction", "icepop (low 0.25, high 4)"),
        ("algorithm.advantage=gae", "critic", "gamma 1, lam 1, clip 0.2, whitened"),
        (
            "algorithm.advantage=gae critic.lam=0.95 critic.clip=0 algorithm.whiten=false critic.alone_steps=2",
            "critic",
            "gamma 1, lam 0.95, no clip, alone for 2 steps",
        ),
    ],
)
def test_the_method_shows_the_options_that_are_set(tmp_path, overrides, part, text):
    assert dict(method_rows(make_config(tmp_path, *overrides.split())))[part] == text


def test_samples_of_the_policy_itself_and_ratios_to_the_engine_are_not_corrected(tmp_path):
    for overrides in ([], ["pipeline.max_lag=1", "algorithm.anchor=rollout"]):
        assert "correction" not in dict(method_rows(make_config(tmp_path, *overrides)))


def test_data_sets_are_listed_with_share_and_reward(tmp_path):
    file = tmp_path / "sets.yaml"
    file.write_text(
        "reward: {functions: {exact: 1, length: {weight: 0.1, at_most: 5}}}\n"
        "data: {train: {builtin:zigzag: 3, held: {path: builtin:zigzag_heldout, weight: 1, reward: zigzag}}}\n"
        "eval: {samples: 4, temperature: 0.5, datasets: {builtin:zigzag_heldout: {samples: 1, temperature: 0}}}\n"
    )
    rows = dataset_rows(load_checked(str(file), []))
    assert rows == [
        ("train", "builtin:zigzag", "75.0% of the prompts", "exact + 0.1 length"),
        ("train", "held", "25.0% of the prompts", "zigzag"),
        ("evaluate", "builtin:zigzag_heldout", "1 per prompt, greedy", "exact + 0.1 length"),
    ]
    file.write_text("")
    assert dataset_rows(load_checked(str(file), []))[0][2] == "every row once an epoch"
