import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlsys import advantages, config, config_check, config_load, corrections, data, kl, losses, packing
from rlsys.config import Config, ConfigError
from rlsys.config_load import load
from rlsys.rewards import REWARDS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(yaml, *overrides)` from a file `tmp_path/some.yaml`, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def read(text: str = "", *overrides: str) -> Config:
        (tmp_path / "some.yaml").write_text(text)
        return load("some.yaml", overrides)

    return read


@pytest.fixture
def refused(read):
    """`refused(yaml, *overrides)` is the list of problems."""

    def refused(text: str = "", *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            read(text, *overrides)
        return error.value.problems

    return refused


def leaves() -> list[tuple[str, object]]:
    defaults = Config()
    return [
        (f"{section.name}.{f.name}", getattr(getattr(defaults, section.name), f.name))
        for section in dataclasses.fields(Config)
        for f in dataclasses.fields(getattr(defaults, section.name))
    ]


# --- reading ---------------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults_in_a_directory_of_its_name(read):
    assert read("") == dataclasses.replace(Config(), run=config.Run(dir="runs/some"))


def test_the_file_wins_over_defaults_and_the_command_line_over_the_file(read):
    found = read("trainer: {steps: 7, prompts_per_step: 8}", "trainer.steps=9")
    assert (found.trainer.steps, found.trainer.prompts_per_step, found.trainer.samples_per_prompt) == (9, 8, 16)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.steps=3", "trainer.steps", 3),
        ("trainer={steps: 3}", "trainer.steps", 3),
        ("policy.lr=1e-4", "policy.lr", 1e-4),
        ("policy.lr=1", "policy.lr", 1.0),
        ("sync.verify=false", "sync.verify", False),
        ("run.dir=a/b c", "run.dir", "a/b c"),
        ("run.dir=a: b", "run.dir", "a: b"),
        ("run.dir=x=y", "run.dir", "x=y"),
        ("eval.datasets=builtin:zigzag", "eval.datasets", ["builtin:zigzag"]),
        (
            "eval.datasets=[builtin:zigzag, builtin:zigzag_heldout]",
            "eval.datasets",
            ["builtin:zigzag", "builtin:zigzag_heldout"],
        ),
        ("eval.datasets=[]", "eval.datasets", []),
        ("reward.functions=exact", "reward.functions", {"exact": 1.0}),
        ("reward.functions=[exact, contains]", "reward.functions", {"exact": 1.0, "contains": 1.0}),
        ("reward.functions={exact: 0.5}", "reward.functions", {"exact": 0.5}),
        ("reward.functions.exact=2", "reward.functions", {"zigzag": 1.0, "exact": 2.0}),
        ("algorithm.eps=null", "algorithm.eps", None),
        ("algorithm.eps=1", "algorithm.eps", 1.0),
        ("reward.functions=json:loads", "reward.functions", {"json:loads": 1.0}),
    ],
)
def test_values_on_the_command_line_are_yaml(read, override, key, value):
    found = config_load.flatten(read("", override))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["exact", "[exact]", "{exact: 1}"])
def test_reward_functions_in_a_file_may_be_a_name_a_list_or_a_mapping(read, value):
    assert read(f"reward: {{functions: {value}}}").reward.functions == {"exact": 1.0}


def test_an_empty_directory_means_the_name_of_the_file(read):
    assert read("run: {dir: elsewhere}").run.dir == "elsewhere"
    assert read("run: {dir: elsewhere}", "run.dir=").run.dir == "runs/some"


def test_values_may_refer_to_each_other(read):
    assert read("trainer: {steps: 8}\ncheckpoint:\n  every: ${trainer.steps}").checkpoint.every == 8


def test_what_is_written_reads_the_same(read):
    before = read("reward: {functions: {exact: 0.5}}", "eval.datasets=builtin:zigzag", "policy.lr=3e-5")
    assert read(config_load.to_yaml(before)) == before


def test_flatten_names_every_option_once():
    assert config_load.flatten(Config()) == dict(leaves())


# --- a base ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path, monkeypatch):
    """`files({"a.yaml": text, …})` writes them below `tmp_path`, where the test then runs."""
    monkeypatch.chdir(tmp_path)

    def files(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return files


def problems_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(path, overrides)
    return error.value.problems


def test_a_file_wins_over_its_base_and_the_command_line_over_both(files):
    files(
        {
            "a.yaml": "trainer: {steps: 1, prompts_per_step: 2, samples_per_prompt: 3}",
            "b.yaml": "base: a.yaml\ntrainer: {steps: 4, prompts_per_step: 5}",
            "c.yaml": "base: b.yaml\ntrainer: {steps: 7}",
        }
    )
    found = load("c.yaml").trainer
    assert (found.steps, found.prompts_per_step, found.samples_per_prompt) == (7, 5, 3)
    assert load("c.yaml", ["trainer.steps=9"]).trainer.steps == 9
    assert load("c.yaml").run.dir == "runs/c"


def test_a_base_is_found_from_the_folder_of_the_file_that_says_it(files, tmp_path):
    files({"x/a.yaml": "trainer: {steps: 3}", "y/b.yaml": "base: ../x/a.yaml", "c.yaml": "base: y/b.yaml"})
    assert load("c.yaml").trainer.steps == 3
    files({"d.yaml": f"base: {tmp_path}/y/b.yaml"})
    assert load("d.yaml").trainer.steps == 3


def test_lists_reward_functions_and_nulls_replace_those_of_the_base(files):
    files(
        {
            "a.yaml": "reward: {functions: {exact: 1.0, contains: 1.0}}\nalgorithm: {eps: 0.5}\n"
            "eval: {datasets: [builtin:zigzag, builtin:zigzag_heldout]}",
            "b.yaml": "base: a.yaml\nreward: {functions: zigzag}\nalgorithm: {eps: null}\neval: {datasets: builtin:zigzag}",
        }
    )
    found = load("b.yaml")
    assert found.reward.functions == {"zigzag": 1.0}
    assert found.eval.datasets == ["builtin:zigzag"]
    assert found.algorithm.eps is None


def test_what_is_said_last_holds_for_reward_functions_too(files):
    files({"a.yaml": "reward: {functions: [exact]}", "b.yaml": "base: a.yaml\nreward.functions.contains: 2"})
    assert load("b.yaml").reward.functions == {"exact": 1.0, "contains": 2.0}
    assert load("b.yaml", ["reward.functions=zigzag"]).reward.functions == {"zigzag": 1.0}
    assert load("b.yaml", ["reward.functions.exact=0"]).reward.functions == {"exact": 0.0, "contains": 2.0}


def test_values_refer_to_values_of_the_same_file(files):
    files(
        {
            "a.yaml": "trainer: {steps: 8}\ncheckpoint:\n  every: ${trainer.steps}",
            "b.yaml": "base: a.yaml\ntrainer: {steps: 6}\neval:\n  every: ${trainer.steps}",
            "c.yaml": "base: a.yaml\neval:\n  every: ${trainer.steps}",
        }
    )
    found = load("b.yaml")
    assert (found.checkpoint.every, found.eval.every) == (8, 6)
    [problem] = problems_of("c.yaml")
    assert problem.startswith("c.yaml: Interpolation key 'trainer.steps' not found")


def test_the_resolved_configuration_needs_no_base(files, tmp_path):
    files({"a.yaml": "trainer: {steps: 3}", "b.yaml": "base: a.yaml\npolicy: {lr: 0.5}"})
    before = load("b.yaml")
    files({"elsewhere/b.yaml": config_load.to_yaml(before)})
    assert "base" not in config_load.to_yaml(before)
    assert load("elsewhere/b.yaml") == before


def test_a_problem_names_the_file_it_comes_from(files):
    files(
        {
            "x/a.yaml": "trainer: {stepz: 3, prompts_per_step: many}",
            "b.yaml": "base: x/a.yaml\npolicy: {lr: fast}\nnope: 1",
        }
    )
    assert [problem.partition(" ")[0] for problem in problems_of("b.yaml", "policy.beta1=x")] == [
        "x/a.yaml:",
        "b.yaml:",
        "x/a.yaml:",
        "b.yaml:",
        "command",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: [", "x/a.yaml is not valid YAML: "),
        ("- trainer", "x/a.yaml must hold a mapping"),
        ("trainer:\n  steps: ???", "x/a.yaml: Missing mandatory value: trainer.steps"),
    ],
)
def test_a_broken_base_is_refused_with_its_name(files, text, sentence):
    files({"x/a.yaml": text, "b.yaml": "base: x/a.yaml"})
    [problem] = problems_of("b.yaml")
    assert problem.startswith(sentence)


def test_a_missing_base_names_both_files_and_one_of_nearly_that_name(files):
    files({"x/tiny_cpu.yaml": "", "x/b.yaml": "base: tiny_cpu.yml", "c.yaml": "base: x/b.yaml"})
    expected = [
        "x/b.yaml: its base `tiny_cpu.yml` is missing; there is no file x/tiny_cpu.yml. Did you mean x/tiny_cpu.yaml?"
    ]
    assert problems_of("x/b.yaml") == problems_of("c.yaml") == expected


def test_a_file_copied_elsewhere_without_its_base_says_what_to_do(files):
    files({"mine/b.yaml": "base: tiny_cpu.yaml"})
    assert problems_of("mine/b.yaml") == [
        "mine/b.yaml: its base `tiny_cpu.yaml` is missing; there is no file mine/tiny_cpu.yaml. The path is taken from the "
        "folder of b.yaml; copy the base along, or correct it."
    ]


def test_bases_in_a_circle_are_refused_with_the_whole_chain(files):
    files(
        {
            "a.yaml": "base: x/b.yaml",
            "x/b.yaml": "base: ../c.yaml",
            "c.yaml": "base: x/b.yaml",
            "d.yaml": "base: d.yaml",
        }
    )
    [problem] = problems_of("a.yaml")
    assert problem.startswith("a.yaml → x/b.yaml → x/../c.yaml → x/../x/b.yaml: ")
    assert "in a circle" in problem
    [itself] = problems_of("d.yaml")
    assert itself.startswith("d.yaml → d.yaml: ")


@pytest.mark.parametrize("value", ["3", "null", "''", "[a.yaml]", "{a: 1}", "true"])
def test_a_base_that_is_no_text_is_refused(files, value):
    files({"b.yaml": f"base: {value}"})
    [problem] = problems_of("b.yaml")
    assert problem.startswith("b.yaml: `base` must be the path of a YAML file, such as tiny_cpu.yaml; it is ")


def test_a_base_is_no_option(files):
    files({"a.yaml": "", "b.yaml": "base: a.yaml"})
    assert problems_of("b.yaml", "base=a.yaml") == [
        "command line: unknown option `base`. It belongs in a YAML file, on a line such as `base: tiny_cpu.yaml`."
    ]
    assert "base" not in config_load.flatten(Config())
    files({"c.yaml": "bse: a.yaml"})
    assert problems_of("c.yaml") == ["c.yaml: unknown option `bse`. Did you mean `base`?"]


# --- what cannot be read ---------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_a_suggestion(refused):
    [file] = refused("trainer: {stepz: 3}")
    assert file == "some.yaml: unknown option `trainer.stepz`. Did you mean `trainer.steps`?"
    [line] = refused("", "policy.learning=3")
    assert line.startswith("command line: unknown option `policy.learning`.")
    [section] = refused("", "max_new_tokens=3")
    assert "Did you mean `rollout.max_new_tokens`?" in section
    [strange] = refused("xyzzy: 3")
    assert "rlsys validate --options" in strange


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("algorithm.lam", "critic.lam"),
        ("algorithm.gamma", "critic.gamma"),
        ("algorithm.kl_coef", "reference.kl_coef"),
        ("algorithm.kl_in", "reference.kl_in"),
        ("optimizer.lr", "policy.lr"),
        ("critc.lr", "critic.lr"),
    ],
)
def test_an_option_in_the_wrong_section_is_found_in_the_right_one(refused, key, ours):
    [found] = refused("", f"{key}=1")
    assert found.endswith(f"Did you mean `{ours}`?")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("beta", "reference.kl_coef"),
        ("actor.kl_loss_coef", "reference.kl_coef"),
        ("actor.entropy_coeff", "entropy.coef"),
        ("algorithm.epsilon", "algorithm.clip_low"),
        ("rollout.n", "trainer.samples_per_prompt"),
        ("policy.learning_rate", "policy.lr"),
        ("algorithm.filter_groups", "dynamic_sampling.enabled"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(refused, key, ours):
    [found] = refused("", f"{key}=1")
    assert found.endswith(f"Did you mean `{ours}`?")


def test_names_of_other_libraries_lead_to_options_there_are_and_are_no_name_of_ours():
    ours = {key for key, _ in leaves()}
    assert {*config_load.ELSEWHERE.values()} <= ours
    assert not {*config_load.ELSEWHERE} & {key.rpartition(".")[2] for key in ours}


def test_the_table_for_those_who_come_from_elsewhere_has_every_such_name_and_only_options_there_are():
    text = (ROOT / "configs" / "README.md").read_text().partition("## Coming from verl or TRL")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in text.splitlines()
        if "`" in row and row.startswith("| ")
    ]
    named = {
        (name.rpartition(".")[2], *re.findall(r"`([a-z_]+\.[a-z_0-9]+)", ours)[:1])
        for verl, trl, ours, _ in rows
        for name in re.findall(r"`([^`]+)`", verl + trl)
    }
    assert {*config_load.ELSEWHERE.items()} <= named
    assert {ours for _, ours in named} <= {key for key, _ in leaves()}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: {steps: ten}", "`trainer.steps` must be a whole number; 'ten' is a text."),
        ("trainer: {steps: 1.5}", "`trainer.steps` must be a whole number; 1.5 is a number."),
        ("trainer: {steps: true}", "`trainer.steps` must be a whole number; True is a truth value."),
        ("trainer: {steps: }", "`trainer.steps` must be a whole number; None is nothing."),
        ("trainer: {steps: [1]}", "`trainer.steps` must be a whole number; [1] is a list."),
        ("policy: {lr: fast}", "`policy.lr` must be a number; 'fast' is a text."),
        ("sync: {verify: perhaps}", "`sync.verify` must be a truth value; 'perhaps' is a text."),
        ("run: {dir: [a]}", "`run.dir` must be a text; ['a'] is a list."),
        ("eval: {datasets: 3}", "`eval.datasets` must be a list of texts; 3 is a whole number."),
        ("eval: {datasets: [[a]]}", "`eval.datasets` must be a list of texts; [['a']] is a list."),
        ("eval: {datasets: [null]}", "`eval.datasets` must be a list of texts; [None] is a list."),
        ("trainer: 3", "`trainer` must be a section with options steps, prompts_per_step"),
        ("trainer:", "`trainer` must be a section with options steps, prompts_per_step"),
        ("reward: {functions: [exact: 1]}", "`reward.functions` must be a mapping of names to weights"),
        ("reward: {functions: [3]}", "`reward.functions` must be a mapping of names to weights"),
        ("reward: {functions: 3}", "`reward.functions` must be a mapping of names to weights"),
        ("reward: {functions: {exact: much}}", "`reward.functions` must be a mapping of names to weights"),
        ("algorithm: {eps: little}", "`algorithm.eps` must be a number, or null; 'little' is a text."),
        ("algorithm: {std: [none]}", "`algorithm.std` must be a text, or null; ['none'] is a list."),
        ("algorithm: {whiten: perhaps}", "`algorithm.whiten` must be a truth value, or null; 'perhaps' is a text."),
    ],
)
def test_a_wrong_type_is_refused_in_words(refused, text, sentence):
    [found] = refused(text)
    assert found.startswith(f"some.yaml: {sentence}")


def test_a_wrong_weight_on_the_command_line_is_refused(refused):
    assert refused("", "reward.functions.exact=much") == [
        "command line: `reward.functions.exact` must be a number; 'much' is a text."
    ]


def test_all_unknown_options_and_wrong_types_are_told_at_once(refused):
    found = refused("trainer: {stepz: 3, prompts_per_step: many}\nnope: 1", "policy.lr=fast", "steps")
    assert len(found) == 5
    for part in ("trainer.stepz", "`trainer.prompts_per_step`", "`nope`", "`policy.lr`", "`steps` is not key=value"):
        assert sum(part in sentence for sentence in found) == 1, part


def test_a_missing_file_is_refused_with_one_of_nearly_that_name(tmp_path):
    (tmp_path / "tiny_cpu.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"tiny_cpu\.yml: no such file\. Did you mean .*/tiny_cpu\.yaml\?"):
        load(tmp_path / "tiny_cpu.yml")
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nowhere" / "a.yaml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trainer: [", "some.yaml is not valid YAML: .*line 2, column 1"),
        ("trainer: {steps: 1}\ntrainer: {steps: 2}", "not valid YAML: .*duplicate key trainer"),
        ("- trainer", "must hold a mapping"),
        ("trainer:\n  steps: ${nowhere}", "some.yaml: Interpolation key 'nowhere' not found"),
        ("trainer:\n  steps: ???", r"some.yaml: Missing mandatory value: trainer\.steps"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(read, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(text)


# --- what does not fit together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            "trainer.prompts_per_step=10 trainer.updates_per_step=4",
            ["(10)", "(4)", "updates_per_step 5", "prompts_per_step 12"],
        ),
        (
            "trainer.samples_per_prompt=1",
            ["samples_per_prompt is 1", "grpo", "at least 2", "reinforce_pp, remax, raw or gae"],
        ),
        ("trainer.samples_per_prompt=1 algorithm.advantage=rloo", ["samples_per_prompt is 1", "rloo compares"]),
        ("policy.tokens_per_pack=1000 rollout.max_prompt_tokens=512", ["(1000)", "(512)", "= 1024", "at least 1024"]),
        ("rollout.top_p=0.9", ["top_p=0.9", "incomparable", "Use top_p 1"]),
        ("rollout.top_k=50", ["top_k=50", "top_k -1"]),
        ("policy.zero_stage=4", ["zero_stage is 4", "0, 1, 2 and 3"]),
        ("policy.zero_stage=0 policy.offload_optimizer=true", ["offload_optimizer", "it is 0"]),
        ("policy.offload_params=true", ["offload_params needs policy.zero_stage 3; it is 2"]),
        ("pipeline.max_lag=2", ["max_lag is 2", "on-policy"]),
        ("reward.functions={}", ["reward.functions is empty"]),
        ("reward.functions=exakt", ["`exakt`", "exact, contains, math, zigzag, countdown", "Did you mean `exact`?"]),
        ("reward.functions={exact: .inf}", ["weight of exact is inf"]),
        ("reward.max_failure_share=1.5", ["max_failure_share is 1.5"]),
        ("rollout.gpu_memory=90", ["gpu_memory is 90", "between 0 and 1"]),
        ("rollout.block_size=16", ["block_size is 16", "multiples of 32"]),
        ("rollout.block_size=0", ["block_size is 0", "greater than 0"]),
        ("rollout.tensor_parallel=2", ["tensor_parallel is 2", "more engines"]),
        ("rollout.temperature=0", ["temperature is 0", "greater than 0"]),
        ("rollout.temperature=.inf", ["temperature is inf"]),
        ("rollout.temperature=.nan", ["temperature is nan"]),
        ("trainer.steps=0", ["trainer.steps is 0", "greater than 0"]),
        ("trainer.updates_per_step=0", ["trainer.updates_per_step is 0"]),
        ("policy.clip_grad=-1", ["policy.clip_grad is -1", "0 or more"]),
        ("run.seed=-1", ["run.seed is -1"]),
        ("algorithm.advantage=gpro", ["`gpro`", "known: grpo", "gae, or module:function", "Did you mean `grpo`?"]),
        ("algorithm.advantage=gea", ["`gea`", "Did you mean `gae`?"]),
        ("algorithm.loss=ppo", ["`ppo`", "known: ppo_clip", "reinforce, or module:function", "PPO's loss is ppo_clip"]),
        ("algorithm.advantage=GRPO", ["`GRPO`", "Did you mean `grpo`?"]),
        ("algorithm.advantage=Gea", ["`Gea`", "Did you mean `gae`?"]),
        ("algorithm.advantage=PPO", ["`PPO`", "PPO is algorithm.advantage gae"]),
        ("algorithm.advantage=dapo", ["dapo is a recipe of several options: configs/dapo.yaml."]),
        ("algorithm.advantage=gspo", ["gspo is a recipe of several options: configs/gspo.yaml."]),
        ("algorithm.advantage=Dr.GRPO", ["Dr.GRPO is a recipe of several options: configs/dr_grpo.yaml."]),
        ("algorithm.advantage=reinforce++", ["configs/reinforce_pp.yaml."]),
        ("algorithm.loss=DeGRPO", ["configs/degrpo.yaml."]),
        ("algorithm.loss=grpo", ["configs/grpo.yaml."]),
        ("algorithm.normalize=seq-mean-token-mean", ["Here that is sequence_mean."]),
        ("algorithm.normalize=token-mean", ["Did you mean `token_mean`?"]),
        ("algorithm.kl=k4", ["`k4`", "k1, k2, k3"]),
        ("algorithm.normalize=mean", ["`mean`", ", ".join(config.NORMALIZERS)]),
        ("correction.method=tiss", ["`tiss`", "known: none, tis", "Did you mean `tis`?"]),
        ("entropy.control=clip", ["`clip`", "none, clip_cov, kl_cov"]),
        ("reference.kl_in=advantage reference.kl_coef=0.1", ["`advantage`", "loss, reward"]),
        ("algorithm.std=biased", ["`biased`", "sample, population, none"]),
        ("algorithm.std=", ["algorithm.std is ``", "sample, population, none"]),
        ("algorithm.eps=-1", ["algorithm.eps is -1", "0 or more"]),
        ("algorithm.clip_low=.nan", ["algorithm.clip_low is nan", "0 or more"]),
        ("algorithm.loss=sapo algorithm.tau_neg=0", ["tau_neg is 0", "greater than 0"]),
        ("algorithm.dual_clip=1", ["dual_clip is 1", "greater than 1, or null"]),
        ("algorithm.normalize=decoupled algorithm.control_weight=-1", ["control_weight is -1", "0 or more"]),
        (
            "algorithm.advantage=rloo algorithm.eps=1e-4",
            ["algorithm.eps is 0.0001", "algorithm.advantage rloo does not use it", "no options"],
        ),
        (
            "algorithm.advantage=max_rl algorithm.std=none",
            ["algorithm.std is none", "max_rl does not use it", "it has algorithm.eps."],
        ),
        (
            "algorithm.loss=gspo algorithm.dual_clip=3",
            ["dual_clip is 3", "gspo does not use it", "algorithm.clip_low, algorithm.clip_high."],
        ),
        ("algorithm.tau_pos=1", ["tau_pos is 1", "ppo_clip does not use it"]),
        ("algorithm.whiten=true", ["algorithm.whiten is True", "grpo does not use it"]),
        ("correction.high=2", ["correction.high is 2", "correction.method none does not use it", "no options"]),
        (
            "correction.method=tis correction.low=0.5",
            ["correction.low is 0.5", "tis does not use it", "correction.high."],
        ),
        ("correction.method=icepop correction.low=2 correction.high=1", ["correction.low (2)", "correction.high (1)"]),
        ("correction.method=icepop correction.low=6", ["correction.low (6)", "correction.high (5)", "0.5 and 5"]),
        ("correction.method=icepop correction.high=0.4", ["correction.low (0.5)", "correction.high (0.4)"]),
        (
            "algorithm.advantage=gae trainer.steps=5 critic.alone_steps=5",
            ["critic.alone_steps (5)", "trainer.steps (5)", "never learn"],
        ),
        (
            "algorithm.advantage=gae critic.port=4000 policy.port=4000",
            ["critic.port and policy.port are both 4000", "0 for any"],
        ),
        ("entropy.control=kl_cov", ["kl_cov", "no gradient", "Use 2 updates, or clip_cov"]),
        (
            "algorithm.advantage=gdpo reference.kl_in=reward reference.kl_coef=0.1",
            ["gdpo", "kl_coef (0.1)", "kl_in loss"],
        ),
        ("reward.functions={exact: 1, 'json:exact': 1}", ["2 functions called exact", "different names"]),
        ("algorithm.constant=5", ["algorithm.constant is 5", "normalize token_mean does not use it", "=0."]),
        ("algorithm.control_weight=1", ["control_weight is 1", "normalize=decoupled", "=0.001."]),
        ("reference.kl_target=0.1", ["kl_target is 0.1", "kl_coef is 0"]),
        ("reference.kl_horizon=0", ["kl_horizon is 0", "greater than 0"]),
        (
            "dynamic_sampling.enabled=true trainer.samples_per_prompt=1 algorithm.advantage=raw",
            ["dynamic_sampling", "samples_per_prompt 1", "every group"],
        ),
        ("dynamic_sampling.max_rounds=0", ["max_rounds is 0", "greater than 0"]),
        ("overlong.buffer=513", ["overlong.buffer (513)", "rollout.max_new_tokens (512)"]),
        ("overlong.buffer=9 overlong.penalty=-1", ["overlong.penalty is -1", "0 or more"]),
        ("algorithm.advantage=max_rl overlong.buffer=9", ["max_rl", "0 or more", "overlong.buffer 0"]),
        (
            "algorithm.advantage=max_rl reference.kl_in=reward reference.kl_coef=0.1",
            ["max_rl", "0 or more", "reference.kl_in loss"],
        ),
        ("entropy.share=1.5", ["entropy.share is 1.5", "at most 1"]),
        ("entropy.control=clip_cov entropy.low=6", ["entropy.low (6)", "entropy.high (5)"]),
        ("algorithm.advantage=gae critic.gamma=1.01", ["critic.gamma is 1.01", "between 0 and 1"]),
        ("algorithm.advantage=gae critic.lam=1.01", ["critic.lam is 1.01", "between 0 and 1"]),
        ("algorithm.advantage=gae critic.clip=-1", ["critic.clip is -1", "0 or more"]),
        ("algorithm.advantage=gae critic.lr=0", ["critic.lr is 0", "greater than 0"]),
        ("sync.transport=nccl", ["nccl needs GPUs", "auto"]),
        ("sync.transport=carrier_pigeon", ["`carrier_pigeon`", "shared_memory"]),
        ("cluster.device=tpu rollout.block_size=32", ["cluster.device is `tpu`"]),
        ("cluster.placement=colocated", ["colocated shares GPUs"]),
        ("cluster.device=gpu cluster.placement=colocated rollout.engines=4 policy.ranks=2", ["(4)", "(2)"]),
        ("cluster.device=gpu cluster.placement=colocated pipeline.max_lag=1", ["max_lag 1"]),
        (
            "cluster.device=gpu cluster.placement=colocated algorithm.advantage=gae critic.ranks=3",
            ["critic.ranks (3)", "policy.ranks (2)"],
        ),
        ("cluster.device=gpu sync.transport=cuda_ipc", ["cuda_ipc", "colocated"]),
        ("cluster.device=gpu sync.transport=nccl cluster.placement=colocated", ["nccl", "use cuda_ipc"]),
        ("model.path=builtin:huge", ["builtin:huge", "builtin:tiny"]),
        ("model.path=./no_model", ["no_model/config.json does not exist"]),
        ("data.train=gone.jsonl", ["data.train: gone.jsonl does not exist", "from /"]),
        ("data.train=builtin:zagzig", ["data.train is `builtin:zagzig`", "builtin:zigzag"]),
        ("data.train=some.yaml", ["some.yaml must end in .jsonl or .parquet"]),
        ("eval.datasets=gone.parquet", ["eval.datasets: gone.parquet does not exist"]),
        ("reward.functions=gone.py:f", ["the file gone.py (of `gone.py:f`) does not exist"]),
        ("reward.functions='os:'", ["names no function", "os:my_function"]),
        ("reward.functions=[os:]", ["names no function"]),
        ("algorithm.advantage=gone.py:f", ["algorithm.advantage: the file gone.py"]),
        ("algorithm.loss=gone.py:f", ["algorithm.loss: the file gone.py"]),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_numbers(refused, overrides, parts):
    found = refused("", *overrides.split(" ") if "{" not in overrides else [overrides])
    hits = [sentence for sentence in found if all(part in sentence for part in parts)]
    assert len(hits) == 1, found
    assert len(found) == 1, found
    assert hits[0].endswith((".", "?", ")."))


def test_all_that_does_not_fit_is_told_at_once(refused):
    found = refused("", "rollout.top_p=0.9", "algorithm.kl=k4", "data.train=gone.jsonl", "trainer.samples_per_prompt=1")
    assert len(found) == 4


def test_a_user_function_may_take_the_place_of_a_built_in_one(read):
    assert (
        read("", "algorithm.advantage=my.module:f", "trainer.samples_per_prompt=1").algorithm.advantage == "my.module:f"
    )


@pytest.mark.parametrize("advantage", ["reinforce_pp", "remax", "raw", "gae"])
def test_one_sample_per_prompt_is_enough_for_those_who_do_not_compare(read, advantage):
    assert read("", f"algorithm.advantage={advantage}", "trainer.samples_per_prompt=1").trainer.samples_per_prompt == 1


def test_a_value_clip_of_zero_is_none(read):
    assert read("", "algorithm.advantage=gae", "critic.clip=0").critic.clip == 0


def test_kl_cov_takes_a_second_update_or_a_second_pass(read):
    for more in ("trainer.updates_per_step=2", "trainer.epochs_per_step=2"):
        assert read("", "entropy.control=kl_cov", more).entropy.control == "kl_cov"


def test_a_user_function_may_ask_for_what_weighs_tokens_elsewhere(read):
    found = read("", "algorithm.loss=my.module:f", "algorithm.constant=5", "algorithm.control_weight=1").algorithm
    assert (found.constant, found.control_weight) == (5, 1)


def test_a_user_function_may_have_any_option_there_is(read):
    assert (
        read("", "algorithm.advantage=my.module:f", "algorithm.eps=0.5", "algorithm.whiten=true").algorithm.eps == 0.5
    )


def test_a_colocated_gpu_run_is_accepted(read):
    overrides = ["cluster.device=gpu", "cluster.placement=colocated", "rollout.engines=4", "policy.ranks=4"]
    assert read("", *overrides, "sync.transport=cuda_ipc").cluster.placement == "colocated"


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()

    def write(text: str) -> str:
        (folder / "config.json").write_text(text)
        return f"model.path={folder}"

    return write


def test_a_model_whose_window_is_too_small_is_refused_with_the_difference(refused, read, model):
    prompts = "rollout.max_prompt_tokens=512"
    [found] = refused("", model(json.dumps({"max_position_embeddings": 1000})), prompts)
    assert "= 1024" in found
    assert "window is 1000 tokens" in found
    assert "by 24" in found
    assert read("", model(json.dumps({"max_position_embeddings": 1024})), prompts).model.path
    assert read("", model(json.dumps({"max_position_embeddings": 1000}))).model.path
    assert read("", model("{}")).model.path


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_model_directory_is_refused(refused, model, text):
    [found] = refused("", model(text))
    assert "config.json is not a JSON object" in found


# --- the tree --------------------------------------------------------------------------------------------------------------


def test_every_option_says_what_it_is():
    lines = inspect.getsource(config).splitlines()
    sections = {f.type.__name__: f.name for f in dataclasses.fields(Config)}
    described = {
        f"{sections.get(node.name)}.{f.target.id}": lines[f.end_lineno - 1].partition("  # ")[2]
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.ClassDef)
        for f in node.body
        if isinstance(f, ast.AnnAssign)
    }
    for key, _ in leaves():
        assert described[key].strip(), f"{key} has no comment"


def test_the_defaults_fit_together(read):
    assert read("").algorithm.advantage == "grpo"


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().trainer.steps = 3


def test_the_names_listed_are_the_names_there_are():
    from workers.sync import RECEIVERS, SENDERS

    assert set(config.ADVANTAGES) == {"gae", *advantages.ESTIMATORS}, "gae has a critic and a file of its own"
    assert set(config.LOSSES) == set(losses.LOSSES)
    assert set(config.CORRECTIONS) == set(corrections.CORRECTIONS)
    assert set(config.KL_ESTIMATORS) == set(kl.ESTIMATORS)
    assert set(config.REWARDS) == set(REWARDS)
    assert set(config.TRANSPORTS) == {"auto", *SENDERS} == {"auto", *RECEIVERS}


METHODS = [
    *((config.ADVANTAGES, name, f) for name, f in advantages.ESTIMATORS.items()),
    *((config.LOSSES, name, f) for name, f in losses.LOSSES.items()),
    *((config.CORRECTIONS, name, f) for name, f in corrections.CORRECTIONS.items()),
]


@pytest.mark.parametrize(("listed", "name", "function"), METHODS, ids=[name for _, name, _ in METHODS])
def test_the_options_listed_of_a_method_are_those_its_function_has(listed, name, function):
    keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    from_the_loop = {"lengths", "greedy", "weights"}
    assert set(listed[name]) == {*keywords} - from_the_loop


def test_every_option_of_a_method_is_a_field_that_may_be_null():
    defaults = Config()
    for section, table in (
        (defaults.algorithm, config.ADVANTAGES | config.LOSSES),
        (defaults.correction, config.CORRECTIONS),
    ):
        for option in {option for options in table.values() for option in options}:
            assert getattr(section, option) is None, option


def test_those_who_compare_within_a_group_are_advantages_there_are():
    assert {*config.ADVANTAGES} - {*config_check.COMPARE_WITHIN_A_GROUP} == {"reinforce_pp", "remax", "raw", "gae"}


def test_the_bounds_known_of_corrections_are_those_of_their_functions():
    both = {}
    for name, function in corrections.CORRECTIONS.items():
        defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
        if {"low", "high"} <= {*defaults}:
            both[name] = (defaults["low"], defaults["high"])
    assert both == config_check.BOUNDS


def test_the_recipes_named_in_hints_are_the_files_for_methods_on_the_tiny_model():
    files = {path.stem for path in CONFIGS if not path.stem.endswith("_gpu")}
    assert {*config_check.RECIPES} == files - {"tiny_cpu"}


def test_the_normalizers_listed_are_those_the_packing_knows():
    import torch

    for name in config.NORMALIZERS:
        assert len(packing.token_weights(torch.tensor([2]), name, constant=2)) == 2
    with pytest.raises(ValueError, match=", ".join(config.NORMALIZERS)):
        packing.token_weights(torch.tensor([2]), "")


# --- the files of configs/ -------------------------------------------------------------------------------------------------


def load_with_data(path: Path, folder: Path) -> Config:
    """Loads a file in `folder`, once the data it asks for is there. That it is not there may be the only problem."""
    try:
        return load(path)
    except ConfigError as error:
        for problem in error.problems:
            missing = re.fullmatch(r"(?:data\.train|eval\.datasets): (data/\S+) does not exist \(from .*\)\.", problem)
            assert missing, problem
            (folder / missing[1]).parent.mkdir(exist_ok=True)
            (folder / missing[1]).touch()
    return load(path)


def test_there_are_files_to_check():
    assert {"tiny_cpu", "grpo", "ppo", "dapo_32b_gpu"} <= {path.stem for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_is_valid_once_its_data_is_there(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_with_data(path, tmp_path)
    assert found.run.dir == f"runs/{path.stem}"
    assert found.cluster.device == ("gpu" if path.stem.endswith("_gpu") else "cpu")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_file_says_what_is_known_of_it(path):
    header = path.read_text().partition("\n\n")[0]
    for line in ("# Goal      ", "# Hardware  ", "# Time      ", "# Result    "):
        assert header.count(line) == 1, line
    if path.stem.endswith("_gpu"):
        assert "NOT RUN BY US" in header
    assert f"`{path.name}`" in (ROOT / "configs" / "README.md").read_text()


@pytest.mark.parametrize("path", [p for p in CONFIGS if not p.stem.endswith("_gpu")], ids=lambda path: path.stem)
def test_the_tiny_recipes_train_on_as_many_samples(path):
    found = load(path)
    assert found.trainer.prompts_per_step * found.trainer.samples_per_prompt == 512
    assert found.model.path == "builtin:tiny"


def test_the_script_in_the_countdown_recipe_writes_prompts_that_can_be_solved(tmp_path):
    header = (ROOT / "configs" / "grpo_countdown_3b_gpu.yaml").read_text()
    lines = header.partition("<<'END'\n")[2].partition("#   END\n")[0].splitlines()
    (tmp_path / "data").mkdir()
    subprocess.run([sys.executable, "-c", "\n".join(line[4:] for line in lines)], cwd=tmp_path, check=True)
    files = {name: list(data.rows(f"{tmp_path}/data/countdown_{name}.jsonl", "prompt")) for name in ("train", "test")}
    assert {name: len(rows) for name, rows in files.items()} == {"train": 20000, "test": 512}
    for _, row in files["test"] + files["train"][:500]:
        assert len(row["numbers"]) in (3, 4)
        assert all(str(number) in row["prompt"] for number in [*row["numbers"], row["target"]])
        assert REWARDS["countdown"](row["solution"], row["numbers"], row["target"]) == 1.0
    seen = {(*sorted(row["numbers"]), row["target"]) for _, row in files["train"]}
    assert not seen & {(*sorted(row["numbers"]), row["target"]) for _, row in files["test"]}
