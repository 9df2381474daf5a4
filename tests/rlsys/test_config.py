import ast
import dataclasses
import inspect
import json

import pytest

from rlsys import advantages, config, config_load, kl, losses, packing
from rlsys.config import Config, ConfigError
from rlsys.config_load import load
from rlsys.rewards import REWARDS


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
    ],
)
def test_a_wrong_type_is_refused_in_words(refused, text, sentence):
    [found] = refused(text)
    assert found.startswith(sentence)


def test_a_wrong_weight_on_the_command_line_is_refused(refused):
    assert refused("", "reward.functions.exact=much") == [
        "`reward.functions.exact` must be a number; 'much' is a text."
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
        ("trainer.samples_per_prompt=1", ["samples_per_prompt is 1", "at least 2"]),
        ("policy.tokens_per_pack=1000 rollout.max_prompt_tokens=512", ["(1000)", "(512)", "= 1024", "at least 1024"]),
        ("rollout.top_p=0.9", ["top_p=0.9", "incomparable", "Use top_p 1"]),
        ("rollout.top_k=50", ["top_k=50", "top_k -1"]),
        ("policy.zero_stage=4", ["zero_stage is 4", "0, 1, 2 and 3"]),
        ("policy.zero_stage=0 policy.offload_optimizer=true", ["offload_optimizer", "it is 0"]),
        ("policy.offload_params=true", ["offload_params needs policy.zero_stage 3; it is 2"]),
        ("pipeline.max_lag=2", ["max_lag is 2", "on-policy"]),
        ("reward.functions={}", ["reward.functions is empty"]),
        ("reward.functions=exakt", ["`exakt`", "exact, contains, math, zigzag", "Did you mean `exact`?"]),
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
        ("algorithm.advantage=gpro", ["`gpro`", "known: grpo", "module:function", "Did you mean `grpo`?"]),
        ("algorithm.loss=ppo", ["`ppo`", "ppo_clip"]),
        ("algorithm.kl=k4", ["`k4`", "k1, k2, k3"]),
        ("algorithm.normalize=mean", ["`mean`", "token_mean, sequence_mean, constant"]),
        ("algorithm.std=biased", ["`biased`", "sample, population, none"]),
        ("sync.transport=nccl", ["nccl needs GPUs", "auto"]),
        ("sync.transport=carrier_pigeon", ["`carrier_pigeon`", "shared_memory"]),
        ("cluster.device=tpu rollout.block_size=32", ["cluster.device is `tpu`"]),
        ("cluster.placement=colocated", ["colocated shares GPUs"]),
        ("cluster.device=gpu cluster.placement=colocated rollout.engines=4 policy.ranks=2", ["(4)", "(2)"]),
        ("cluster.device=gpu cluster.placement=colocated pipeline.max_lag=1", ["max_lag 1"]),
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
    described = {
        f"{node.name.lower()}.{f.target.id}": lines[f.end_lineno - 1].partition("  # ")[2]
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

    assert set(config.ADVANTAGES) == set(advantages.ESTIMATORS)
    assert set(config.LOSSES) == set(losses.LOSSES)
    assert set(config.KL_ESTIMATORS) == set(kl.ESTIMATORS)
    assert set(config.REWARDS) == set(REWARDS)
    assert set(config.TRANSPORTS) == {"auto", *SENDERS} == {"auto", *RECEIVERS}


def test_the_normalizers_listed_are_those_the_packing_knows():
    import torch

    for name in config.NORMALIZERS:
        assert packing.token_weights(torch.tensor([2]), name, constant=2).tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=", ".join(config.NORMALIZERS)):
        packing.token_weights(torch.tensor([2]), "")
