"""Secrets: given by the environment, kept as references, refused as literals, hidden in what is said."""

import pickle

import pytest

from rlsys.checks import load_checked
from rlsys.config import loading
from rlsys.config.schema import RewardFunction
from rlsys.config.secrets import EnvReference, find_secrets, redact, referenced_variables, resolve_env
from rlsys.errors import ConfigError
from rlsys.rewards import Judge
from rlsys.runs.directory import RunDirectory

VALUE = "Zq9-correct-horse-battery-7"
OWN = f"""
def good(completion, api_key, header): return float(api_key == {VALUE!r} and header == "Bearer " + {VALUE!r})
def bad(completion, api_key): raise ValueError("the service said: " + api_key + " is no key")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A configuration whose function gets a secret from JUDGE_ACCESS, in a directory where the function is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_ACCESS", VALUE)
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / "some.yaml"
    options = "{api_key: '${oc.env:JUDGE_ACCESS}', header: 'Bearer ${oc.env:JUDGE_ACCESS}'}"
    file.write_text(f"reward:\n  functions:\n    own.py:good: {options}\n")
    return file


def problems_of(*sources):
    with pytest.raises(ConfigError) as error:
        load_checked(*sources)
    return error.value.problems


def test_the_configuration_keeps_the_reference_a_function_gets_the_value(file):
    config = load_checked(file)
    assert VALUE not in repr(config) + loading.to_yaml(config)
    assert VALUE.encode() not in pickle.dumps(config), "what Ray carries to the workers"
    assert "Bearer ${oc.env:JUDGE_ACCESS}" in loading.to_yaml(config)
    assert Judge(config.reward.functions)({"completion": "x"}).score == 1


def test_what_is_written_with_a_run_reads_the_same_and_knows_no_value(file, tmp_path):
    config = load_checked(file, [f"run.dir={tmp_path}/run"])
    RunDirectory(config).close()
    saved = tmp_path / "run" / "config.yaml"
    assert VALUE not in saved.read_text()
    assert load_checked(saved) == config
    assert Judge(load_checked(saved).reward.functions)({"completion": "x"}).score == 1


def test_options_of_an_episode_keep_references_too(file, tmp_path):
    (tmp_path / "own.py").write_text(OWN + "async def play(row, ask, api_key, level=1): ...\n")
    file.write_text("episode: {play: 'own.py:play', options: {api_key: '${oc.env:JUDGE_ACCESS}'}}\n")
    config = load_checked(file, [f"run.dir={tmp_path}/run", "episode.options.level=3"])
    assert config.episode.options == {"api_key": "${oc.env:JUDGE_ACCESS}", "level": 3}
    assert resolve_env(config.episode.options) == {"api_key": VALUE, "level": 3}
    RunDirectory(config).close()
    saved = tmp_path / "run" / "config.yaml"
    assert VALUE not in saved.read_text()
    assert load_checked(saved) == config
    assert "must be a mapping" in problems_of(file, ["episode.options=3"])[0]


def test_a_reference_on_the_command_line_stays_one_too(file):
    config = load_checked(file, ["reward.functions={own.py:bad: {api_key: '${oc.env:JUDGE_ACCESS}'}}"])
    assert config.reward.functions["own.py:bad"].options == {"api_key": "${oc.env:JUDGE_ACCESS}"}
    config = load_checked(file, ["reward.functions.own.py:good.header=Bearer ${oc.env:JUDGE_ACCESS}"])
    assert VALUE not in loading.to_yaml(config)
    assert Judge(config.reward.functions)({"completion": "x"}).score == 1


def test_a_value_that_another_refers_to_does_not_escape_by_it(file):
    text = "reward: {functions: {own.py:bad: {api_key: '${oc.env:JUDGE_ACCESS}', more: {deep: '${..api_key}'}}}}\n"
    file.write_text(text)
    config = loading.load_config(file)
    assert config.reward.functions["own.py:bad"].options["more"] == {"deep": "${oc.env:JUDGE_ACCESS}"}
    assert VALUE not in loading.to_yaml(config)


def test_elsewhere_the_value_is_taken_at_once(file, monkeypatch):
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("SETS", "builtin:zigzag")
    file.write_text(
        "trainer: {steps: '${oc.env:STEPS}'}\ndata: {train: ['${oc.env:SETS}'], system: 'at ${oc.env:STEPS}'}\n"
        "checkpoint: {every: '${oc.decode:${oc.env:STEPS}}', keep_last: '${oc.env:NOT_THERE,3}'}\n"
        "eval: {datasets: {few: {path: '${oc.env:SETS}'}}}"
    )
    config = load_checked(file, ["policy.lr=${oc.env:STEPS}"])
    assert (config.trainer.steps, config.checkpoint.every, config.checkpoint.keep_last, config.policy.lr) == (
        7,
        7,
        3,
        7,
    )
    assert (config.data.system, list(config.data.train)) == ("at 7", ["builtin:zigzag"])
    assert config.eval.datasets["few"].path == "builtin:zigzag"


def test_a_variable_that_is_not_set_is_told_at_once(file, monkeypatch):
    monkeypatch.delenv("JUDGE_ACCESS")
    assert any("the environment variable JUDGE_ACCESS is not set" in problem for problem in problems_of(file))
    [problem] = problems_of(file, ["reward.functions=zigzag", "trainer.steps=${oc.env:NOT_THERE}"])
    assert problem == (
        "command line: `trainer.steps`: the environment variable NOT_THERE is not set; the configuration says ${oc.env:NOT_THERE}."
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("api_key", "abc"),
        ("password", "hunter2"),
        ("client_secret", "x y"),
        ("headers", {"Authorization": "Basic dXNlcg=="}),
        ("headers", {"X-API-Key": "1"}),
        ("access_token", "0123456789abcdef0"),
        ("anything", "sk-" + "proj-0123456789abcdef"),
        ("anything", ["hf_" + "ABCDEFGHIJKLMNOPQRSTUV"]),
        ("anything", "AKIA" + "IOSFODNN7EXAMPLE"),
        ("anything", "ghp_" + "0123456789abcdef0123"),
        ("url", "https://someone:pass@host/v1"),
        ("url", "https://host/v1?api_key=0123456"),
        ("url", "https://hooks.slack.com/services/T0/B0/abc"),
        ("anything", "Authorization: Bearer abcdefghijkl"),
    ],
)
def test_a_literal_that_looks_like_a_secret_is_refused_without_being_shown(option, value, file):
    [problem] = find_secrets("reward.functions", {"own.py:f": {option: value}})
    assert problem.startswith(f"reward.functions.own.py:f.{option}")
    assert "${oc.env:ITS_NAME}" in problem
    for secret in [value] if isinstance(value, str) else value.values() if isinstance(value, dict) else value:
        assert secret not in problem
    text = loading.OmegaConf.to_yaml({"reward": {"functions": {"own.py:good": {option: value}}}})
    file.write_text(text)
    assert any("A secret does not belong" in found for found in problems_of(file))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("token_env", "JUDGE_TOKEN"),
        ("stop_token", "<|endoftext|>"),
        ("end_token", "</answer>"),
        ("prompt_key", "question"),
        ("key", "question"),
        ("tokens", 5),
        ("max_tokens", 1024),
        ("password_length", 8),
        ("url", "http://localhost:8000/v1"),
        ("url", "http://host/v1?model=judge"),
        ("pattern", r"Score:\**\s*(-?\d+(?:\.\d+)?)"),
        ("words", ["risk-averse", "task-specific-instructions"]),
    ],
)
def test_what_only_sounds_like_one_is_not(option, value):
    assert find_secrets("reward.functions", {"own.py:f": {option: value}}) == []


def test_a_secret_on_the_command_line_or_in_a_path_is_refused_too(file):
    [problem] = problems_of(file, ["model.path=https://me:" + "pw1234@host/model"])
    assert problem.startswith("model.path holds a password in an address.")
    assert "pw1234" not in problem
    [problem] = problems_of(file, ["data.train=https://me:" + "pw1234@host/data.jsonl"])
    assert "pw1234" not in problem


def test_a_value_of_the_wrong_type_is_not_shown_if_it_is_secret(file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "not-for-eyes")
    [problem] = problems_of(file, ["trainer.steps=${oc.env:HF_TOKEN}"])
    assert "'***'" in problem
    assert "not-for-eyes" not in problem


def test_what_a_function_raises_is_hidden_in_its_verdict(file):
    reference = EnvReference("${oc.env:JUDGE_ACCESS}")
    verdict = Judge({"bad": RewardFunction(function="own.py:bad", options={"api_key": reference})})({"completion": "x"})
    assert verdict.failure == "exception"
    assert "the service said: *** is no key" in verdict.detail
    assert VALUE not in verdict.detail


def test_what_stops_a_run_is_hidden_in_its_events(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", VALUE)
    run = RunDirectory(loading.build_config(loading.OmegaConf.create(), [f"run.dir={tmp_path}/run"], ""))
    run.record_event("stop", cause=f"HTTP 401 for {VALUE}")
    run.record_event("stall", stacks={"reward-0": f"judge(key={VALUE!r})"}, waiting_for=[VALUE])
    run.close()
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "HTTP 401 for ***" in said
    assert VALUE not in said


def test_a_hidden_text_stays_a_text(monkeypatch):
    monkeypatch.setenv("JUDGE", VALUE)
    monkeypatch.setenv("SHORT_TOKEN", "the")
    assert redact(f"{VALUE}, then", ["JUDGE"]) == "***, then"
    assert redact("the end") == "the end", "too short to be told from other words"
    assert redact('{"url": "http://a/?token=0123456789", "b": 1}') == '{"url": "http://a/?***", "b": 1}'
    assert redact("at http://127.0.0.1:8265/x@y") == "at http://127.0.0.1:8265/x@y"


def test_variables_named_like_secrets_are_redacted_and_pwd_is_not(monkeypatch):
    for name in ("OPENAI_KEY", "DB_PWD", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
        assert redact("it is hunter2") == "it is ***", name
        monkeypatch.delenv(name)
    monkeypatch.setenv("PWD", "/home/me")
    assert redact("in /home/me") == "in /home/me"


def test_references_know_their_variables(monkeypatch):
    monkeypatch.setenv("A", "a")
    monkeypatch.setenv("B", "b")
    options = {"x": [EnvReference("${oc.env:A}/${oc.env:B} \\${c}")], "token_env": "T", "y": 1}
    assert referenced_variables(options) == ["T", "A", "B"]
    assert resolve_env(options) == {"x": ["a/b ${c}"], "token_env": "T", "y": 1}


# --- what a configuration cannot do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [
        "!!python/object/apply:os.system ['touch {mark}']",
        "!!python/object/new:os.system ['touch {mark}']",
        "!!python/object/apply:subprocess.check_output [['touch', '{mark}']]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/apply:builtins.eval [\"open('{mark}', 'w')\"]",
    ],
)
@pytest.mark.parametrize("way", ["file", "command line"])
def test_yaml_executes_no_code(attack, way, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    monkeypatch.chdir(tmp_path)
    text = attack.replace("{mark}", str(mark))
    file = tmp_path / "some.yaml"
    file.write_text(f"data:\n  system: {text}\n" if way == "file" else "{}")
    try:
        found = load_checked(file, [f"data.system={text}"] if way == "command line" else [])
        assert isinstance(found.data.system, str), "a text is all it can be"
    except ConfigError:
        pass
    assert not mark.exists()


@pytest.mark.parametrize("resolver", ["python", "eval", "oc.create.__globals__", "hydra:runtime.cwd"])
def test_no_resolver_runs_code(resolver, tmp_path):
    file = tmp_path / "some.yaml"
    file.write_text(f'data:\n  system: \'${{{resolver}:__import__("os").system("touch {tmp_path}/mark")}}\'\n')
    problems_of(file)
    assert not (tmp_path / "mark").exists()
