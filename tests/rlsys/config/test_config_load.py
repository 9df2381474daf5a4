"""Reading a configuration: values, bases, unknown options and wrong types."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rlsys.checks import load_checked
from rlsys.config import loading, schema, suggest
from rlsys.config.schema import Config, RewardFunction
from rlsys.errors import ConfigError

ROOT = Path(__file__).parents[3]


# --- reading ---------------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_defaults_in_a_directory_of_its_name(read):
    assert read("") == dataclasses.replace(Config(), run=schema.RunConfig(dir="runs/some"))


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
        ("eval.datasets=builtin:zigzag", "eval.datasets", {"builtin:zigzag": None}),
        (
            "eval.datasets=[builtin:zigzag, builtin:zigzag_heldout]",
            "eval.datasets",
            {"builtin:zigzag": None, "builtin:zigzag_heldout": None},
        ),
        ("eval.datasets=[]", "eval.datasets", {}),
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
    found = loading.flatten(read("", override))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", ["exact", "[exact]", "{exact: 1}"])
def test_reward_functions_in_a_file_may_be_a_name_a_list_or_a_mapping(read, value):
    assert read(f"reward: {{functions: {value}}}").reward.functions == {"exact": RewardFunction(1.0, "exact")}


def test_an_empty_directory_means_the_name_of_the_file(read):
    assert read("run: {dir: elsewhere}").run.dir == "elsewhere"
    assert read("run: {dir: elsewhere}", "run.dir=").run.dir == "runs/some"


def test_values_may_refer_to_each_other(read):
    assert read("trainer: {steps: 8}\ncheckpoint:\n  every: ${trainer.steps}").checkpoint.every == 8


def test_values_within_named_entries_may_refer_to_the_file_too(read):
    text = "trainer: {steps: 8}\nreward:\n  functions: {exact: {weight: '${trainer.steps}'}}"
    assert read(text).reward.functions["exact"].weight == 8


@pytest.mark.parametrize(
    "text", ["${x}", "\\${x}", "\\\\${x}", "$\\{(.*)}", "${", "a\\b \\d ${oc.env:HOME}", "ü ${run.seed}"]
)
def test_a_text_may_hold_what_looks_like_a_reference(read, text, tmp_path):
    (tmp_path / "a.py").write_text("def f(completion, option): return 0")
    tree = loading.escape_references({"data": {"system": text}, "reward": {"functions": {"a.py:f": {"option": text}}}})
    before = read(json.dumps(tree))
    assert (before.data.system, before.reward.functions["a.py:f"].options) == (text, {"option": text})
    assert read(loading.to_yaml(before)) == before


def test_a_dangling_reference_is_refused_with_the_way_to_write_a_text(refused):
    [problem] = refused("data: {system: '${nowhere}'}")
    assert problem.endswith("A text that has ${ in it is written with \\${.")


def test_what_is_written_reads_the_same(read):
    before = read("reward: {functions: {exact: 0.5}}", "eval.datasets=builtin:zigzag", "policy.lr=3e-5")
    assert read(loading.to_yaml(before)) == before


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
        load_checked(path, overrides)
    return error.value.problems


def test_a_file_wins_over_its_base_and_the_command_line_over_both(files):
    files(
        {
            "a.yaml": "trainer: {steps: 1, prompts_per_step: 2, samples_per_prompt: 3}",
            "b.yaml": "base: a.yaml\ntrainer: {steps: 4, prompts_per_step: 5}",
            "c.yaml": "base: b.yaml\ntrainer: {steps: 7}",
        }
    )
    found = load_checked("c.yaml").trainer
    assert (found.steps, found.prompts_per_step, found.samples_per_prompt) == (7, 5, 3)
    assert load_checked("c.yaml", ["trainer.steps=9"]).trainer.steps == 9
    assert load_checked("c.yaml").run.dir == "runs/c"


def test_a_base_is_found_from_the_folder_of_the_file_that_names_it(files, tmp_path):
    files({"x/a.yaml": "trainer: {steps: 3}", "y/b.yaml": "base: ../x/a.yaml", "c.yaml": "base: y/b.yaml"})
    assert load_checked("c.yaml").trainer.steps == 3
    files({"d.yaml": f"base: {tmp_path}/y/b.yaml"})
    assert load_checked("d.yaml").trainer.steps == 3


def test_lists_reward_functions_and_nulls_replace_those_of_the_base(files):
    files(
        {
            "a.yaml": "reward: {functions: {exact: 1.0, contains: 1.0}}\nalgorithm: {eps: 0.5}\n"
            "eval: {datasets: [builtin:zigzag, builtin:zigzag_heldout]}",
            "b.yaml": "base: a.yaml\nreward: {functions: zigzag}\nalgorithm: {eps: null}\neval: {datasets: builtin:zigzag}",
        }
    )
    found = load_checked("b.yaml")
    assert found.reward.functions == {"zigzag": RewardFunction(1.0, "zigzag")}
    assert list(found.eval.datasets) == ["builtin:zigzag"]
    assert found.algorithm.eps is None


def test_the_last_value_wins_for_reward_functions_too(files):
    files({"a.yaml": "reward: {functions: [exact]}", "b.yaml": "base: a.yaml\nreward.functions.contains: 2"})

    def weights(*overrides: str) -> dict[str, float]:
        return {name: f.weight for name, f in load_checked("b.yaml", overrides).reward.functions.items()}

    assert weights() == {"exact": 1.0, "contains": 2.0}
    assert weights("reward.functions=zigzag") == {"zigzag": 1.0}
    assert weights("reward.functions.exact=0") == {"exact": 0.0, "contains": 2.0}


def test_values_refer_to_values_of_the_same_file(files):
    files(
        {
            "a.yaml": "trainer: {steps: 8}\ncheckpoint:\n  every: ${trainer.steps}",
            "b.yaml": "base: a.yaml\ntrainer: {steps: 6}\neval:\n  every: ${trainer.steps}",
            "c.yaml": "base: a.yaml\neval:\n  every: ${trainer.steps}",
        }
    )
    found = load_checked("b.yaml")
    assert (found.checkpoint.every, found.eval.every) == (8, 6)
    [problem] = problems_of("c.yaml")
    assert problem.startswith("c.yaml: Interpolation key 'trainer.steps' not found")


def test_the_resolved_configuration_needs_no_base(files, tmp_path):
    files({"a.yaml": "trainer: {steps: 3}", "b.yaml": "base: a.yaml\npolicy: {lr: 0.5}"})
    before = load_checked("b.yaml")
    files({"elsewhere/b.yaml": loading.to_yaml(before)})
    assert "base" not in loading.to_yaml(before)
    assert load_checked("elsewhere/b.yaml") == before


def test_a_problem_names_the_file_it_comes_from(files):
    files(
        {
            "x/a.yaml": "trainer: {stepz: 3, prompts_per_step: many}",
            "b.yaml": "base: x/a.yaml\npolicy: {lr: fast}\nnope: 1",
        }
    )
    assert [problem.partition(" ")[0] for problem in problems_of("b.yaml", "policy.weight_decay=x")] == [
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
    assert "base" not in loading.flatten(Config())
    files({"c.yaml": "bse: a.yaml"})
    assert problems_of("c.yaml") == ["c.yaml: unknown option `bse`. Did you mean `base`?"]


# --- what cannot be read ---------------------------------------------------------------------------------------------------


def test_an_unknown_option_is_refused_with_a_suggestion(refused):
    [file] = refused("trainer: {stepz: 3}")
    assert file == "some.yaml: unknown option `trainer.stepz`. Did you mean `trainer.steps`?"
    [line] = refused("", "policy.learning=3")
    assert line.startswith("command line: unknown option `policy.learning`.")
    [section] = refused("", "max_prompt_tokens=3")
    assert "Did you mean `rollout.max_prompt_tokens`?" in section
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
        ("reward_model.overlong_buffer.len", "overlong.buffer"),
        ("reward_model.path", "reward.functions"),
        ("reward.custom_reward_function.path", "reward.functions"),
        ("remote_rm_url", "reward.functions"),
        ("data.train_files", "data.train"),
        ("input_key", "data.prompt_key"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("trainer.test_freq", "eval.every"),
        ("eval.steps", "eval.every"),
        ("train.batch_size", "trainer.updates_per_step"),
        ("algo.kl.use_loss", "reference.kl_in"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "policy.warmup_updates"),
        ("lr_scheduler_type", "policy.lr_schedule"),
        ("trainer.nnodes", "policy.ranks"),
        ("actor.num_nodes", "policy.ranks"),
        ("critic.num_nodes", "critic.ranks"),
        ("actor_rollout_ref.actor.loss_scale_factor", "algorithm.constant"),
        ("algorithm.rollout_correction.rollout_rs", "correction.method"),
        ("algorithm.gdpo_reward_keys", "reward.functions"),
        ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio", "entropy.share"),
        ("adam_beta2", "policy.betas"),
    ],
)
def test_a_name_of_another_library_leads_to_ours(refused, key, ours):
    [found] = refused("", f"{key}=1")
    assert found.endswith(f"Did you mean `{ours}`?")


@pytest.mark.parametrize("key", ["lora.r", "use_peft", "ds.lora.alpha"])
def test_who_asks_for_lora_in_another_way_learns_ours(refused, key):
    [found] = refused("", f"{key}=1")
    assert found.endswith("LoRA is policy.lora here, such as `policy.lora: {rank: 32, alpha: 64}`.")


def test_a_name_without_its_section_leads_to_all_that_have_it(refused):
    [found] = refused("", "temperature=1")
    assert found.endswith("Did you mean one of `rollout.temperature`, `eval.temperature`?")


def test_foreign_names_lead_to_known_options_and_are_none_themselves():
    ours = {*loading.flatten(Config())}
    assert {*suggest.OPTION_BY_FOREIGN_NAME.values()} <= ours
    assert not {*suggest.OPTION_BY_FOREIGN_NAME} & {part for key in ours for part in key.split(".")}


def test_the_migration_table_has_every_foreign_name_and_only_known_options():
    text = (ROOT / "configs" / "MIGRATING.md").read_text()
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in text.splitlines()
        if "`" in row and row.startswith("|")
    ]
    named = {
        (".".join(name.split(".")[-parts:]), *re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", ours)[:1])
        for *elsewhere, ours, _ in rows
        for name in re.findall(r"`([^`]+)`", "".join(elsewhere))
        for parts in (1, 2)
    }
    assert {*suggest.OPTION_BY_FOREIGN_NAME.items()} <= named
    assert {ours for _, ours in named} <= {*loading.flatten(Config())}


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
        ("eval: {datasets: 3}", "`eval.datasets` must be a path, a list of paths, or a mapping"),
        ("eval: {datasets: [[a]]}", "`eval.datasets` must be a path, a list of paths, or a mapping"),
        ("eval: {datasets: [null]}", "`eval.datasets` must be a path, a list of paths, or a mapping"),
        ("trainer: 3", "`trainer` must be a section with options steps, prompts_per_step"),
        ("trainer:", "`trainer` must be a section with options steps, prompts_per_step"),
        ("reward: {functions: [exact: 1]}", "`reward.functions` must be a mapping of names to weights"),
        ("reward: {functions: [3]}", "`reward.functions` must be a mapping of names to weights"),
        ("reward: {functions: 3}", "`reward.functions` must be a mapping of names to weights"),
        (
            "reward: {functions: {exact: much}}",
            "`reward.functions.exact` must be a number, its weight, or a mapping of settings",
        ),
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
        "command line: `reward.functions.exact` must be a number, its weight, or a mapping of settings; it is 'much'."
    ]


def test_all_unknown_options_and_wrong_types_are_reported_at_once(refused):
    found = refused("trainer: {stepz: 3, prompts_per_step: many}\nnope: 1", "policy.lr=fast", "steps")
    assert len(found) == 5
    for part in ("trainer.stepz", "`trainer.prompts_per_step`", "`nope`", "`policy.lr`", "`steps` is not key=value"):
        assert sum(part in sentence for sentence in found) == 1, part


def test_a_missing_file_is_refused_with_one_of_nearly_that_name(tmp_path):
    (tmp_path / "tiny_cpu.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"tiny_cpu\.yml: no such file\. Did you mean .*/tiny_cpu\.yaml\?"):
        load_checked(tmp_path / "tiny_cpu.yml")
    with pytest.raises(ConfigError, match="no such file"):
        load_checked(tmp_path / "nowhere" / "a.yaml")


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
