"""`rlsys bench`: what it runs, and what it reports."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from launch.tools import synthetic
from launch.tools.bench.command import planned_bytes, shared_folder
from launch.tools.bench.figures import (
    BenchMachine,
    BenchReport,
    RankMemory,
    WorkDone,
    all_samples_train,
    require_whole_updates,
)
from launch.tools.bench.options import BenchOptions, make_setup
from launch.tools.bench.peak_flops import gpu_peak
from launch.tools.bench.report import print_report
from launch.tools.cli import commands
from launch.tools.estimates.devices import peak_flops
from launch.tools.estimates.memory import SequenceLengths
from launch.tools.estimates.processes import memory_by_role
from rlsys.checks import load_checked
from rlsys.config.schema import Config, PipelineConfig
from rlsys.errors import ConfigError
from rlsys.models.lookup import known_model_shape
from rlsys.types import Request, Sample

OPTIONS = BenchOptions(3, 1, None, None, None, False, None, None)


def make_config(folder, *overrides: str) -> Config:
    file = folder / "small.yaml"
    file.write_text("trainer: {prompts_per_step: 4, samples_per_prompt: 4}\npolicy: {tokens_per_pack: 40}\n")
    return load_checked(file, ["rollout.max_new_tokens=16", *overrides])


def make_sample(uid: str, index: int) -> Sample:
    return Sample(uid, index, "", np.ones(4, np.int32), np.zeros(4, np.float32), "length", 0)


class Engines:
    """Remembers its requests."""

    def generate(self, requests):
        self.requests = requests
        return iter([])


# --- what is run -----------------------------------------------------------------------------------------------------------


def test_ragged_lengths_have_the_mean_that_was_asked_for_and_a_long_tail():
    lengths = synthetic.CompletionLengths(60, 128)
    drawn = np.array([lengths.length_for(f"p{i}", k) for i in range(500) for k in range(8)])
    assert drawn.mean() == pytest.approx(60, rel=0.03)
    assert drawn.min() >= 1
    assert drawn.max() == 128
    assert np.median(drawn) < 60
    assert (drawn == 128).mean() > 0.05


@pytest.mark.parametrize(("mean", "longest"), [(1, 1), (1, 50), (50, 50), (49.5, 50), (3, 4000)])
def test_every_possible_mean_is_met(mean, longest):
    lengths = synthetic.CompletionLengths(mean, longest)
    drawn = [lengths.length_for(f"p{i}", 0) for i in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.1)
    assert 1 <= min(drawn) <= max(drawn) <= longest


@pytest.mark.parametrize(("placement", "gpus"), [("separate", 4 + 4 + 2 + 1), ("colocated", 4)])
def test_a_gpu_that_several_share_counts_once_in_the_peak(tmp_path, placement, gpus):
    shared = ["cluster.device=gpu", f"cluster.placement={placement}", "rollout.engines=2", "rollout.tensor_parallel=2"]
    shared += [
        "policy.ranks=4",
        "algorithm.advantage=gae",
        "critic.ranks=2",
        "reference.kl_coef=0.1",
    ]
    config = make_config(tmp_path, *shared)
    assert gpu_peak(config, "H100") == gpus * peak_flops("H100", "bfloat16")
    assert gpu_peak(config, "Some Card") is None


def test_a_sample_always_has_the_same_length():
    samples = [("a", 0), ("a", 1), ("b", 0)]
    first, again = (([synthetic.CompletionLengths(60, 128, seed=1).length_for(*s) for s in samples]) for _ in range(2))
    assert first == again
    assert first != [synthetic.CompletionLengths(60, 128, seed=2).length_for(*s) for s in samples]


def test_a_mean_above_the_maximum_is_refused():
    with pytest.raises(ConfigError, match="must be between 1 and the maximum"):
        synthetic.CompletionLengths(200, 128)


def test_engines_get_the_lengths_and_ignore_the_end():
    engines = Engines()
    lengths = synthetic.CompletionLengths(20, 64)
    request = Request("p", 2, [1, 2, 3], seed=1, temperature=1.0, max_new_tokens=64)
    list(synthetic.FixedLengthRollout(engines, lengths).generate([request]))
    [sent] = engines.requests
    assert sent == replace(request, max_new_tokens=lengths.length_for("p", 2), ignore_end=True)


def test_prompts_have_the_given_length_and_begin_differently():
    made = synthetic.random_prompts(200, 16, 64, seed=0)
    assert {len(p.tokens) for p in made} == {16}
    assert len({tuple(p.tokens[:4]) for p in made}) > 190
    assert len({p.uid for p in made}) == 200
    assert max(max(p.tokens) for p in made) == 63


def test_rewards_are_random_but_always_the_same():
    texts = [f"completion {i}" for i in range(1000)]
    rewards = [*map(synthetic.random_reward, texts)]
    assert np.mean(rewards) == pytest.approx(0.5, abs=0.05)
    assert len(set(rewards)) == 1000
    assert rewards == [*map(synthetic.random_reward, texts)]


def test_samples_whose_tokens_have_no_text_get_different_rewards_even_in_a_group_of_two():
    engines = Engines()
    engines.generate = lambda requests: iter([[make_sample(r.uid, r.index) for r in requests]])
    requests = [Request(f"p{i}", k, [1], seed=1, temperature=1.0, max_new_tokens=4) for i in range(50) for k in (0, 1)]
    [samples] = synthetic.NamedSamples(engines, synthetic.CompletionLengths(4, 4)).generate(requests)
    assert len({synthetic.random_reward(s.text) for s in samples}) == 100
    assert [s.text for s in samples[:2]] == ["p0/0 ", "p0/1 "]


def test_a_bench_keeps_the_method_and_neither_evaluates_nor_saves(tmp_path):
    config = make_config(tmp_path, "algorithm.advantage=rloo", "overlong.mask=true")
    setup = make_setup(config, OPTIONS, "elsewhere", window=32)
    changed = setup.config
    assert (setup.prompt_tokens, setup.lengths.longest) == (16, 16)
    assert (changed.eval.datasets, changed.eval.every, changed.checkpoint.every) == ({}, 0, 0)
    assert changed.run.dir == "elsewhere"
    assert not changed.overlong.mask, "every completion is cut"
    assert changed.algorithm == config.algorithm
    assert changed.policy == config.policy
    assert list(changed.reward.functions) == ["random"]
    setup = make_setup(config, replace(OPTIONS, rewards=True), "elsewhere", window=32)
    assert setup.config.reward.functions == config.reward.functions


def test_the_last_steps_of_a_run_generate_nothing_and_are_not_measured(tmp_path):
    config = make_config(tmp_path)
    assert make_setup(config, OPTIONS, "x", 32).config.trainer.steps == 1 + 3 + 1
    ahead = replace(config, pipeline=PipelineConfig(max_lag=1))
    assert make_setup(ahead, OPTIONS, "x", 32).config.trainer.steps == 1 + 3 + 2


def test_the_policy_learns_in_every_measured_step(tmp_path):
    config = make_config(tmp_path, "algorithm.advantage=gae", "critic.alone_steps=4", "trainer.steps=9")
    assert make_setup(config, OPTIONS, "x", 32).config.critic.alone_steps == 0


def test_on_a_cluster_the_run_lies_beside_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = make_config(tmp_path, f"run.dir={tmp_path}/shared/run")
    assert shared_folder(config) is None
    monkeypatch.setenv("RAY_ADDRESS", "HEAD:6379")
    assert shared_folder(config) == tmp_path / "shared"
    assert (tmp_path / "shared").is_dir()


def test_lengths_that_do_not_fit_are_refused_with_a_way_out(tmp_path):
    config = make_config(tmp_path)
    with pytest.raises(ConfigError, match="do not fit into the model's window of 64"):
        make_setup(config, replace(OPTIONS, prompt_tokens=40, completion_tokens=40), "x", 64)
    with pytest.raises(ConfigError, match="give one of them"):
        make_setup(config, replace(OPTIONS, ragged=(4.0, 8), completion_tokens=8), "x", 64)
    with pytest.raises(ConfigError, match=r"policy\.tokens_per_pack"):  # which is 40
        make_setup(config, replace(OPTIONS, prompt_tokens=30, completion_tokens=30), "x", 64)


def test_ragged_takes_a_mean_and_a_maximum(tmp_path):
    make_config(tmp_path)
    result = CliRunner().invoke(commands, ["bench", str(tmp_path / "small.yaml"), "--ragged", "60"])
    assert result.exit_code == 2
    assert "--ragged 60,128" in result.output


# --- the report ------------------------------------------------------------------------------------------------------------

REPORT = BenchReport(
    steps=2,
    step_seconds=[1.0, 3.0],
    phases={"rollout": 1.0, "reward": 0.1, "score": 0.2, "update": 0.4, "sync": 0.2},
    busy_seconds={"rollout": 1.6, "score": 0.4, "update": 0.8},  # sampled one batch ahead: the driver waited for less
    sync_seconds=[0.4],  # every second step
    machine=BenchMachine(None, weight_bytes=400_000_000, peak_flops=1e11),
    work=WorkDone(32, 640, 1920, {"rollout": 8e9, "score": 8e9, "update": 24e9}, trained_samples=31),
    idle_shares={"policy-0": 0.5, "rollout-0": 0.25},
    span_shares={"policy-0": {"score": 0.1, "update": 0.4}, "rollout-0": {"generate": 0.75}},
)


def test_the_figures_of_a_report_equal_those_computed_by_hand():
    figures = REPORT.as_dict()
    assert figures["phases_s"]["other"] == pytest.approx(0.1)
    assert figures["overhead_share"] == pytest.approx((2.0 - 1.0 - 0.2 - 0.4 - 0.2) / 2.0)
    assert (figures["samples_per_s"], figures["generated_tokens_per_s"], figures["trained_tokens_per_s"]) == (
        8,
        160,
        480,
    )
    assert figures["flop_use"]["step"] == pytest.approx(40e9 / 4 / 1e11)
    assert figures["flop_use"]["update"] == pytest.approx(24e9 / 0.8 / 1e11)
    assert figures["flop_use"]["rollout"] == pytest.approx(8e9 / 1.6 / 1e11)
    assert figures["sync"]["gb_per_s"] == pytest.approx(1.0)
    assert figures["at_work_s"]["rollout"] == 1.6
    json.dumps(figures)


def test_the_tables_name_unknown_figures(tmp_path):
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    config = make_config(tmp_path)
    print_report(REPORT, config, console)
    text = console.export_text()
    assert "not in rollout, score, update or sync: 10.0% of a step" in text
    assert "400.0 MB in 0.400 s, 1.00 GB/s" in text
    assert "generate 75.0%" in text
    assert "31 of 32 samples trained" in text
    assert "Nothing was recorded" not in text
    print_report(replace(REPORT, unrecorded_workers=["rollout-0", "rollout-1"]), config, console)
    assert "Nothing was recorded of rollout-0, rollout-1: their hosts do not see" in console.export_text()
    machine = replace(REPORT.machine, memory=RankMemory(5 << 29, 3 * 2**30))
    assert "rank's GPU" not in console.export_text(clear=False)
    print_report(replace(REPORT, machine=machine), config, console)
    assert "a rank's GPU: 2.50 GiB of tensors at most; plan: 3.00" in console.export_text()
    assert replace(REPORT, machine=machine).as_dict()["rank_memory"] == {"allocated": 5 << 29, "planned": 3 * 2**30}
    print_report(replace(REPORT, work=replace(REPORT.work, flops={})), config, console)
    assert "FLOP use is not known: this architecture" in console.export_text()


def test_the_memory_that_plan_counts_for_a_rank_is_that_of_its_tensors(tmp_path):
    """A CUDA context is none of them."""
    name = "model.path=Qwen/Qwen2.5-0.5B"
    setup = make_setup(
        make_config(tmp_path, "cluster.device=gpu", "cluster.placement=colocated", name), OPTIONS, "x", 32
    )
    shape = known_model_shape("Qwen/Qwen2.5-0.5B")
    _, parts = memory_by_role(setup.config, shape, SequenceLengths(16, 16))["policy-0"].peak(on_device=True)
    assert parts["fixed"] > 0
    assert planned_bytes(setup) == pytest.approx(sum(parts.values()) - parts["fixed"])
    assert planned_bytes(replace(setup, config=make_config(tmp_path, "model.path=nobody/knows"))) is None


@pytest.mark.parametrize(("trained", "overrides"), [(0, ()), (57, ()), (7, ("algorithm.advantage=grpo_passk",))])
def test_figures_of_a_part_of_an_update_are_refused_with_a_way_out(tmp_path, trained, overrides):
    work = WorkDone(64, 640, 1920, {}, trained)
    with pytest.raises(
        ConfigError, match=rf"^{trained} of 64 samples were trained .*Without --rewards .*reference\.kl_coef > 0"
    ):
        require_whole_updates(work, make_config(tmp_path, *overrides))


@pytest.mark.parametrize(("trained", "overrides"), [(58, ()), (64, ()), (16, ("algorithm.advantage=grpo_passk",))])
def test_figures_of_whole_updates_are_not_refused(tmp_path, trained, overrides):
    require_whole_updates(WorkDone(64, 640, 1920, {}, trained), make_config(tmp_path, *overrides))


def test_groups_of_equal_rewards_need_no_update_without_other_losses(tmp_path):
    assert not all_samples_train(make_config(tmp_path))
    assert all_samples_train(make_config(tmp_path, "reference.kl_coef=0.1"))
    assert not all_samples_train(make_config(tmp_path, "reference.kl_coef=0.1", "reference.kl_in=reward"))
    assert all_samples_train(make_config(tmp_path, "entropy.coef=0.1"))
