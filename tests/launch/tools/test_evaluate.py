"""`rlsys eval`: its options, and what it prints."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from launch.tools.evaluate import EvalOptions, find_target_model, load_settings, print_evaluation, to_json
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.evaluation.held_out import Evaluation, MeanWithInterval, SourceScore
from rlsys.types import Batch

GREEDY = SourceScore(1319, 1319, 0, 212.4, 0.0125, {"accuracy": MeanWithInterval(0.614, 0.588, 0.64, 1319)})
SAMPLED = SourceScore(
    30,
    480,
    3,
    7.0,
    0.0,
    {"accuracy": MeanWithInterval(0.25, 0.1, 0.4, 29), "avg@16": MeanWithInterval(0.25, 0.1, 0.4, 29)}
    | {f"pass@{k}": MeanWithInterval(min(1, 0.25 * k), 0.1, 1, 29) for k in (1, 2, 4, 8, 16)}
    | {"pass@16": MeanWithInterval(1, 0.1, 1, 27)}
    | {f"maj@{k}": MeanWithInterval(0.3, 0.1, 0.5, 29) for k in (1, 2, 4, 8)},
)


def evaluation(failures: dict[str, int] | None = None, **scores: SourceScore) -> Evaluation:
    first = "timeout: no verdict after 10 s" if failures else ""
    empty = np.array([], dtype=np.int64), np.array([], dtype=np.float32)
    return Evaluation(Batch([], [], *empty, [], failures=failures or {}, first_failure=first), scores)


def print_lines(result: Evaluation, width: int = 80) -> list[str]:
    text = io.StringIO()
    print_evaluation(result, Console(file=text, width=width))
    return text.getvalue().splitlines()


@pytest.fixture
def config(tmp_path) -> str:
    (tmp_path / "small.yaml").write_text(
        "eval: {datasets: {builtin:zigzag_heldout: {samples: 4, temperature: 0.5}, builtin:zigzag: }}\n"
    )
    return str(tmp_path / "small.yaml")


# --- what is printed -------------------------------------------------------------------------------------------------------


def test_scores_above_one_are_not_percentages():
    rich = SourceScore(
        8,
        32,
        0,
        7.0,
        0.0,
        {
            "accuracy": MeanWithInterval(1.25, 0.9, 1.5, 8),
            "pass@1": MeanWithInterval(0.5, 0.1, 0.9, 8),
            "maj@1": MeanWithInterval(1.3, 1.0, 1.6, 8),
        },
    )
    lines = [re.sub(" +", " ", line).strip() for line in print_lines(evaluation(tools=rich))]
    assert "tools: accuracy 1.250 of 8 prompts, 95 % interval 0.900 to 1.500" in lines
    assert "tools pass@k 50.0%" in lines
    assert "maj@k 1.300" in lines


def test_each_source_has_its_accuracy_in_a_sentence_and_its_counts_in_a_line():
    lines = [re.sub(" +", " ", line).strip() for line in print_lines(evaluation(gsm8k=GREEDY, aime=SAMPLED))]
    assert "gsm8k: accuracy 61.4% of 1319 prompts, 95 % interval 58.8% to 64.0%" in lines
    assert "aime: accuracy 25.0% of 29 prompts, 95 % interval 10.0% to 40.0%" in lines
    assert "gsm8k 1,319 1,319 212.4 1.2% 0" in lines
    assert "aime 30 480 7.0 0.0% 3" in lines
    assert "aime pass@k 25.0% 50.0% 100.0% 100.0% 100.0%" in lines
    assert "maj@k 30.0% 30.0% 30.0% 30.0%" in lines
    assert (
        "aime: @1 of 29, @2 of 29, @4 of 29, @8 of 29, @16 of 27 prompts; the others have fewer samples left" in lines
    )


def test_greedy_figures_have_no_k():
    assert not any("@" in line for line in print_lines(evaluation(gsm8k=GREEDY)))


def test_the_tables_fit_eighty_columns():
    wide = SourceScore(
        30,
        1920,
        0,
        7.0,
        0.0,
        {f"{kind}@{1 << i}": MeanWithInterval(1, 1, 1, 30) for kind in ("pass", "maj") for i in range(7)},
    )
    assert max(map(len, print_lines(evaluation(livecodebench=wide)))) <= 80


def test_failures_are_counted_and_the_first_is_shown():
    lines = print_lines(evaluation({"timeout": 3}, aime=SAMPLED))
    assert lines[-2:] == ["3 verdicts failed (timeout) and are left out", "The first: timeout: no verdict after 10 s"]


def test_episodes_have_their_turns_and_how_they_ended():
    ends = {"episode/finish/stop": 0.25, "episode/finish/turns": 0.75, "episode/finish/length": 0.0}
    score = replace(GREEDY, episodes={"episode/turns": 3.25} | ends)
    lines = print_lines(evaluation(guess=score, gsm8k=GREEDY))
    assert "guess: 3.2 turns per episode; ended by stop 25.0%, turns 75.0%" in lines
    assert not any("gsm8k" in line and "turns" in line for line in lines)
    assert to_json(EvalOptions("m"), evaluation(guess=score))["scores"]["guess"]["episode/turns"] == 3.25


def test_a_source_without_a_verdict_says_so():
    assert "a: no verdict on any of 2 prompts" in print_lines(evaluation(a=SourceScore(2, 2, 2, 7.0, 0.0)))


def test_the_figures_are_json_for_other_tools():
    figures = to_json(EvalOptions("runs/a"), evaluation({"timeout": 3}, aime=SAMPLED))
    assert figures["target"] == "runs/a"
    assert figures["failures"] == {"timeout": 3}
    assert figures["scores"]["aime"]["pass@2"] == 0.5
    assert figures["scores"]["aime"]["accuracy/low"] == 0.1
    assert figures["scores"]["aime"]["accuracy/prompts"] == 29


# --- options ---------------------------------------------------------------------------------------------------------------


def set_settings(config: Config) -> dict[str, tuple]:
    """Each set's own samples and temperature, and what holds where it has none."""
    sets = {name: (s.samples, s.temperature) for name, s in config.eval.datasets.items()}
    return sets | {"": (config.eval.samples, config.eval.temperature)}


def test_without_options_the_configuration_decides_how_to_sample(config):
    assert set_settings(load_settings(EvalOptions("m", config))) == {
        "builtin:zigzag_heldout": (4, 0.5),
        "builtin:zigzag": (None, None),
        "": (1, 0.0),
    }


def test_samples_and_temperature_of_the_command_line_hold_for_every_set(config):
    settings = set_settings(load_settings(EvalOptions("m", config, samples=8, temperature=1.0)))
    assert settings == {"builtin:zigzag_heldout": (None, None), "builtin:zigzag": (None, None), "": (8, 1.0)}


def test_a_set_of_the_configuration_keeps_its_settings_when_it_is_named(config):
    settings = set_settings(load_settings(EvalOptions("m", config, data=("builtin:zigzag_heldout",))))
    assert settings == {"builtin:zigzag_heldout": (4, 0.5), "": (1, 0.0)}


def test_a_set_that_is_named_twice_is_evaluated_once(config):
    settings = set_settings(load_settings(EvalOptions("m", config, data=("builtin:zigzag", "builtin:zigzag"))))
    assert settings == {"builtin:zigzag": (None, None), "": (1, 0.0)}


def test_training_data_and_other_held_out_sets_need_not_exist(tmp_path):
    (tmp_path / "c.yaml").write_text("data: {train: gone.jsonl}\neval: {datasets: gone_too.jsonl}\n")
    config = load_settings(EvalOptions("m", str(tmp_path / "c.yaml"), data=("builtin:zigzag",)))
    assert list(config.eval.datasets) == ["builtin:zigzag"]
    with pytest.raises(ConfigError) as error:
        load_settings(EvalOptions("m", str(tmp_path / "c.yaml")))
    assert [p.partition(" (")[0] for p in error.value.problems] == ["eval.datasets: gone_too.jsonl does not exist"]


def test_several_greedy_samples_are_refused(config):
    with pytest.raises(ConfigError, match=r"eval.samples is 8, and temperature 0 gives the same completion"):
        load_settings(EvalOptions("m", config, samples=8, temperature=0.0))


def test_a_temperature_that_vllm_would_raise_is_refused(config):
    with pytest.raises(ConfigError, match=r"eval.temperature is 0.005; vLLM would take 0.01"):
        load_settings(EvalOptions("m", config, temperature=0.005))
    assert load_settings(EvalOptions("m", config, samples=8, temperature=0.01)).eval.temperature == 0.01


def test_a_target_in_a_run_is_judged_as_the_run_is(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002" / "model").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    (run / "config.yaml").write_text(loading.to_yaml(Config()) + "")
    config = load_settings(
        EvalOptions(str(run / "checkpoints" / "step-000002"), data=("builtin:zigzag",), overrides=("run.seed=7",))
    )
    assert config.run.seed == 7
    assert list(config.eval.datasets) == ["builtin:zigzag"]
    with pytest.raises(ConfigError, match="--data FILE"):
        load_settings(EvalOptions(str(run)))


def test_hub_names_are_models_where_a_configuration_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_target_model(EvalOptions("Qwen/Qwen2.5-0.5B", "some.yaml")) == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ConfigError, match=r"is not a directory.*owner/name, needs --config"):
        find_target_model(EvalOptions("Qwen/Qwen2.5-0.5B"))


@pytest.mark.parametrize("target", ["runs/dmeo", "./model", "/no/such/model", "a/b/c"])
def test_a_misspelt_directory_is_not_taken_for_a_hub_name(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=f"{target[2:]} is not a directory"):
        find_target_model(EvalOptions(target, "some.yaml"))


def test_the_built_in_model_has_no_directory_yet():
    assert find_target_model(EvalOptions("builtin:tiny", "some.yaml")) == ""


def test_the_built_in_model_is_evaluated_whatever_the_configuration_trains(tmp_path):
    (tmp_path / "other.yaml").write_text("model: {path: owner/other}\neval: {datasets: builtin:zigzag}\n")
    assert load_settings(EvalOptions("builtin:tiny", str(tmp_path / "other.yaml"))).model.path == "builtin:tiny"


def test_an_unknown_built_in_model_is_refused():
    with pytest.raises(
        ConfigError,
        match="builtin:tinny is no model; the built-in ones are builtin:tiny, builtin:untrained, builtin:two_modes, builtin:guess, builtin:calculator",
    ):
        find_target_model(EvalOptions("builtin:tinny", "some.yaml"))
