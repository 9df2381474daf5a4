"""`rlsys rescore`: saved samples judged by another reward."""

import io
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console
from saved import save

from launch.tools.rescore.command import rescore
from launch.tools.rescore.inputs import parse_rewards, parse_steps
from rlsys.config import loading
from rlsys.config.schema import Config
from rlsys.errors import ConfigError
from rlsys.runs.samples import write_samples
from rlsys.types import Batch, Episode, Observation, Prompt, Sample

REWARDS = """
import os, time

def last(completion, answer):
    return {"score": float(completion.endswith(answer)), "answer": completion[-1]}

def one(completion):
    return 1.0

def bad(completion):
    if "hang" in completion:
        time.sleep(60)
    if "die" in completion:
        os._exit(3)
    if "raise" in completion:
        raise ValueError("no verdict on this one")
    return 1.0
"""


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own.py").write_text(REWARDS)
    return str(tmp_path / "own.py")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of two steps and two evaluations. Answers are the uids' last digits."""
    folder = tmp_path / "run"
    for step in (1, 2):
        scores = {"s:1#0": [0.5, 0.0], "s:2#0": [0.0, None]}
        texts = {"s:1#0": [f"it is {step}", "it is 0"], "s:2#0": ["it is 0", "0"]}
        save(folder / "samples" / f"step-{step:06d}.parquet", scores, texts, version=step - 1, training=True)
    for step in (0, 2):
        save(folder / "samples" / f"eval-{step:06d}.parquet", {"h:7": [1.0]}, {"h:7": ["7"]}, version=step)
    (folder / "config.yaml").write_text(loading.to_yaml(Config()))
    (folder / "metrics.jsonl").write_text("")
    return folder


def rescored(target, *rewards: str, steps=None, out=None, overrides=("reward.workers=1",), width=200) -> str:
    """What is printed, with single blanks."""
    text = io.StringIO()
    rescore(str(target), rewards, steps, out and str(out), tuple(overrides), Console(file=text, width=width))
    return re.sub(" +", " ", text.getvalue())


def test_every_step_and_evaluation_of_a_run_is_rescored(run, own, tmp_path):
    text = rescored(run, f"{own}:last", out=tmp_path / "new.parquet")
    rows = [line.strip() for line in text.splitlines()[1:5]]
    assert rows == [
        "step 1 4 0.167 0.333 33.3% 0 1 > 1 of 1 0.0%",
        "step 2 4 0.167 0.000 33.3% 0 1 > 0 of 1 0.0%",
        "evaluation 0 1 1.000 1.000 0.0% 0",
        "evaluation 2 1 1.000 1.000 0.0% 0",
    ]
    assert "8 of 10 samples have both rewards." in text
    assert "rewards: 25.0% changed, correlation 0." in text
    assert "of 2, 0 would begin to teach and 1 would cease to." in text
    assert "2 samples that had no score have one now." in text
    assert re.search(r"step-000001 s:1#0/0: 0.5 > 1, answer 1\n what is s:1#0\?\n it is 1\n", text)
    kept = pyarrow.parquet.read_table(tmp_path / "new.parquet").to_pylist()
    assert len(kept) == 10
    assert [(k["file"], k["uid"], k["index"], k["reward"], k["rescored"], k["answer"]) for k in kept[:4]] == [
        ("step-000001", "s:1#0", 0, 0.5, 1.0, "1"),
        ("step-000001", "s:1#0", 1, 0.0, 0.0, "0"),
        ("step-000001", "s:2#0", 0, 0.0, 0.0, "0"),
        ("step-000001", "s:2#0", 1, None, 0.0, "0"),
    ]


def test_functions_read_the_transcripts_of_episodes(tmp_path):
    (tmp_path / "turns.py").write_text(
        "def last(messages, finish, tokens):\n"
        "    results = [m['content'] for m in messages if m['role'] == 'tool']\n"
        "    return {'results': len(results), 'cut': 10.0 * (finish == 'turns'), 'own': 100.0 * tokens}\n"
    )
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "?"}]
    results = [{"role": "tool", "name": "add", "content": "3"}] * 2
    ones = np.ones(4, np.int32)
    samples = [
        Sample(
            "a:1#0",
            n,
            "?",
            ones,
            ones.astype(np.float32),
            finish,
            0,
            (),
            (Observation(0, ones),),
            Episode(None, own, [0.0]),
        )
        for n, (finish, own) in enumerate([("stop", [*messages, *results]), ("turns", messages)])
    ]
    file = tmp_path / "episodes.parquet"
    prompt = Prompt("a:1#0", "a", "1 + 2?", [], {}, messages=messages[:1])
    write_samples(file, Batch([prompt], samples, np.array([0, 0]), np.zeros(2, np.float32), [{}, {}]))
    text = rescored(file, f"{tmp_path / 'turns.py'}:last", out=tmp_path / "new.parquet")
    assert "2 of 2 samples have both rewards." in text
    kept = pyarrow.parquet.read_table(tmp_path / "new.parquet").to_pylist()
    assert [k["rescored"] for k in kept] == [2 + 400, 10 + 400]


def test_rewards_are_weighted_and_added_as_in_training(run, own):
    text = rescored(run, f"{own}:last=2", f"{own}:one=0.25", steps="0")
    assert "evaluation 0 1 1.000 2.250 100.0% 0" in text


def test_failing_functions_have_their_reasons_and_others_are_judged(own, tmp_path):
    texts = ["fine", "hang", "die", "raise", "fine too"]
    file = save(tmp_path / "some.parquet", {"s:1": [0.0] * 5}, {"s:1": texts})
    text = rescored(file, f"{own}:bad", overrides=["reward.workers=1", "reward.timeout_s=0.5"])
    assert "some.parquet 5 0.000 1.000 100.0% 3" in text
    for reason in (
        "(timeout), the first: no verdict after 0.5 s",
        "(crash), the first: the reward process ended",
        "(exception), the first: bad: ValueError: no verdict on this one",
    ):
        assert f"1 new verdicts failed {reason}" in text


def test_the_run_sets_the_options_and_its_data_need_not_exist(run, own):
    config = (run / "config.yaml").read_text().replace("timeout_s: 10.0", "timeout_s: 0.5")
    (run / "config.yaml").write_text(config.replace("builtin:zigzag", "gone.jsonl"))
    save(run / "samples" / "step-000003.parquet", {"s:1#0": [0.0]}, {"s:1#0": ["hang"]})
    text = rescored(run / "samples" / "step-000003.parquet", f"{own}:bad", overrides=[])
    assert "no verdict after 0.5 s" in text


@pytest.mark.parametrize("wrong", ["reward.workers=0", "reward.timeout_s=-1"])
def test_settings_that_no_reward_process_could_have_are_refused(run, own, wrong):
    option, _, value = wrong.partition("=")
    with pytest.raises(ConfigError, match=rf"^{option} is {value}(\.0)?; it must be a number greater than 0\.$"):
        rescored(run, f"{own}:bad", overrides=[wrong])


def test_many_steps_take_few_lines(own, tmp_path):
    for step in range(1, 46):
        save(tmp_path / "run" / "samples" / f"step-{step:06d}.parquet", {"s:1#0": [0.0, 1.0]})
    rows = [line for line in rescored(tmp_path / "run", f"{own}:one").splitlines() if line.startswith("step ")]
    assert len(rows) == 15
    assert rows[0].startswith("step 1 to 3 6 0.500 1.000 50.0%")
    assert rows[-1].startswith("step 43 to 45 6")


@pytest.mark.parametrize(
    ("steps", "parsed"),
    [(None, (0, float("inf"))), ("10-20", (10, 20)), ("10", (10, 10)), ("10-", (10, float("inf"))), ("-20", (0, 20))],
)
def test_steps_are_one_or_from_to(steps, parsed):
    assert parse_steps(steps) == parsed


def test_only_the_steps_asked_for_are_judged(run, own):
    text = rescored(run, f"{own}:one", steps="2-")
    assert [line.split(" 4 ")[0] for line in text.splitlines() if line.startswith("step ")] == ["step 2"]
    assert "evaluation 0" not in text


@pytest.mark.parametrize(
    ("target", "steps", "message"),
    [
        ("gone", None, "gone does not exist. Give a run"),
        (".", None, "holds no samples"),
        ("run", "7-9", "no samples of these steps; its last step is 2"),
        ("run", "two", "it must be a step such as 40"),
        ("run/config.yaml", None, "not a readable parquet file"),
    ],
)
def test_a_target_without_samples_is_refused(run, own, monkeypatch, target, steps, message):
    monkeypatch.chdir(run.parent)
    with pytest.raises(ConfigError, match=message):
        rescored(target, f"{own}:one", steps=steps)


def test_control_characters_are_escaped(own, tmp_path):
    file = save(tmp_path / "evil.parquet", {"s:1": [0.25]}, {"s:1": ["it is\x1b[2J 1"]})
    text = rescored(file, f"{own}:one")
    assert "\x1b" not in text
    assert "it is\\x1b[2J 1" in text


def test_rewards_that_do_not_exist_are_refused_before_anything_starts(run, own):
    with pytest.raises(ConfigError, match="Did you mean `exact`"):
        rescored(run, "exakt")
    with pytest.raises(ConfigError, match=r"gone.py .* does not exist"):
        rescored(run, "gone.py:f")
    with pytest.raises(ConfigError, match="neither a weight nor a mapping"):
        rescored(run, "exact={weight: [")
    with pytest.raises(ConfigError, match="has no function `three`"):
        rescored(run, f"{own}:three")


def test_options_of_a_function_are_given_as_in_yaml():
    assert parse_rewards(("exact", "math:f=0.5", "math:g={weight: 2, at_most: 3}"))["math:g"].options == {"at_most": 3}
    functions = parse_rewards(("exact", "math:f=0.5", "math:g={weight: 2, at_most: 3}"))
    assert [f.weight for f in functions.values()] == [1.0, 0.5, 2.0]


def test_a_secret_comes_from_the_environment_and_is_refused_otherwise(run, tmp_path, monkeypatch):
    own = tmp_path / "keyed.py"
    own.write_text("def keyed(completion, api_key):\n    return float(len(api_key))\n")
    monkeypatch.setenv("MY_KEY", "0123456")
    reward = f"{own}:keyed={{api_key: '${{oc.env:MY_KEY}}'}}"
    text = rescored(run, reward, steps="1")
    assert "0.167 7.000" in text  # old and new mean
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigError, match="MY_KEY is not set"):
        rescored(run, reward)
    with pytest.raises(ConfigError, match="holds what its name calls a secret") as refused:
        rescored(run, f"{own}:keyed={{api_key: abc12345}}")
    assert "abc12345" not in str(refused.value)
