"""Which files are sent with a job, which are not, and what is refused before anything is sent."""

import json
from pathlib import Path

import pytest

from launch.tools.jobs import job_package
from launch.tools.jobs.job_package import build_package
from rlsys.errors import ConfigError

DIRECTORY = "run.dir=/shared/runs/one"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


FUNCTION = "def f(completion): return 1.0\n"


def write(path: str, text: str = "") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def refused(*overrides: str, path: str = "one.yaml") -> str:
    with pytest.raises(ConfigError) as caught:
        build_package(path, overrides)
    return str(caught.value)


def test_the_configuration_is_sent_with_its_bases_and_files(folder: Path) -> None:
    write("configs/base.yaml", "data: {template: chat.jinja}")
    write("configs/one.yaml", "base: base.yaml\nreward: {functions: {my/own.py:f: 1.0, mine.rewards:g: 1.0}}")
    write("chat.jinja", "{{ messages[0].content }}")
    write("my/own.py", FUNCTION)
    for file in ("my/other.py", "mine/__init__.py", "mine/rewards.py", "mine/__pycache__/x.pyc"):
        write(file)
    write("sums/train/a.jsonl", json.dumps({"prompt": "1+1="}))
    write("sums/.git/config")
    package = build_package("configs/one.yaml", (DIRECTORY, "data.train=sums"))
    assert list(package.files) == [
        "chat.jinja",
        "configs/base.yaml",
        "configs/one.yaml",
        "mine/__init__.py",
        "mine/rewards.py",
        "my/own.py",
        "sums/train/a.jsonl",
    ]
    assert package.config_path == "configs/one.yaml"
    assert package.not_sent == []


def test_files_keep_their_relative_paths_in_the_job(folder: Path, tmp_path: Path) -> None:
    write("configs/one.yaml", "data: {train: data/a.jsonl}")
    write("data/a.jsonl", "what is in it")
    build_package(str(folder / "configs" / "one.yaml"), (DIRECTORY,)).copy_to(tmp_path / "there")
    copied = sorted(str(p.relative_to(tmp_path / "there")) for p in (tmp_path / "there").rglob("*") if p.is_file())
    assert copied == ["configs/one.yaml", "data/a.jsonl"]
    assert (tmp_path / "there" / "data" / "a.jsonl").read_text() == "what is in it"


def test_runs_and_hidden_files_of_a_folder_are_not_sent(folder: Path) -> None:
    write("one.yaml")
    for file in (
        "code/a.py",
        "code/runs/big.bin",
        "code/.venv/x",
        "code/.env",
        "code/deep/.git/HEAD",
        "code/deep/b.py",
    ):
        write(file)
    assert list(build_package("one.yaml", (DIRECTORY,), ("code",)).files) == ["code/a.py", "code/deep/b.py", "one.yaml"]


def test_absolute_paths_are_expected_on_the_cluster(folder: Path) -> None:
    write("one.yaml", "model: {path: /shared/models/qwen}\nreward: {functions: {/shared/own.py:f: 1.0}}")
    package = build_package("one.yaml", (DIRECTORY, "data.train=/shared/train.jsonl", "data.template=~/chat.jinja"))
    assert list(package.files) == ["one.yaml"]
    assert [str(n) for n in package.not_sent] == [
        "model.path /shared/models/qwen",
        "data.template ~/chat.jinja",
        "data.train /shared/train.jsonl",
        "reward.functions /shared/own.py",
    ]


def test_what_plays_episodes_is_sent_or_expected_on_the_cluster(folder: Path) -> None:
    write(
        "one.yaml", "episode: {play: game.py:play, tools: [python, tools.py:add], options: {key: '${oc.env:GAME_KEY}'}}"
    )
    write("game.py", "async def play(row, ask): ...\n")
    write("tools.py", "def add(a: int) -> int: ...\n")
    package = build_package("one.yaml", (DIRECTORY,))
    assert list(package.files) == ["game.py", "one.yaml", "tools.py"]
    assert package.variables == ["GAME_KEY"]
    write("two.yaml", "episode: /shared/game.py:play")
    package = build_package("two.yaml", (DIRECTORY,))
    assert (list(package.files), [str(n) for n in package.not_sent]) == (["two.yaml"], ["episode.play /shared/game.py"])


def test_a_user_tracker_is_sent_or_expected_on_the_cluster(folder: Path) -> None:
    write("one.yaml")
    write("board.py", "def to_text(told): ...\n")
    assert list(build_package("one.yaml", (DIRECTORY, "tracking.to=board.py:to_text")).files) == [
        "board.py",
        "one.yaml",
    ]
    [missing] = build_package("one.yaml", (DIRECTORY, "tracking.to=/shared/board.py:to_text")).not_sent
    assert str(missing) == "tracking.to /shared/board.py"
    assert "board.py has no function `to_txt`" in refused(DIRECTORY, "tracking.to=board.py:to_txt")
    with_key = "tracking.to={board.py:to_text: {key: '${oc.env:ONLY_THERE}'}}"
    assert build_package("one.yaml", (DIRECTORY, with_key)).variables == ["ONLY_THERE"]


def test_the_directory_of_a_reward_model_is_sent(folder: Path) -> None:
    write("one.yaml", "reward: {functions: {model: {path: judge}}}")
    write("judge/config.json")
    assert list(build_package("one.yaml", (DIRECTORY,)).files) == ["judge/config.json", "one.yaml"]


def test_an_adapter_is_sent_or_expected_on_the_cluster(folder: Path) -> None:
    write("one.yaml", "policy: {lora: {rank: 8, alpha: 16}}")
    write("mine/adapter_config.json", json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    sent = build_package("one.yaml", (DIRECTORY, "model.adapter=mine"))
    assert list(sent.files) == ["mine/adapter_config.json", "one.yaml"]
    [there] = build_package("one.yaml", (DIRECTORY, "model.adapter=/shared/adapter")).not_sent
    assert str(there) == "model.adapter /shared/adapter"


def test_a_variable_that_only_the_cluster_has_is_named(folder: Path) -> None:
    write("one.yaml", "reward: {functions: {own.py:f: {api_key: '${oc.env:ONLY_THERE}'}}}")
    write("own.py", FUNCTION)
    assert build_package("one.yaml", (DIRECTORY,)).variables == ["ONLY_THERE"]
    judge = "reward.functions={http: {url: 'http://judge/score', token_env: JUDGE_TOKEN}}"
    assert build_package("one.yaml", (DIRECTORY, judge)).variables == ["JUDGE_TOKEN"]


def test_a_module_may_be_one_that_only_the_cluster_has(folder: Path) -> None:
    write("one.yaml", "reward: {functions: {only_there.rewards:f: 1.0}}\nalgorithm: {advantage: 'only_there:g'}")
    write("own.py", FUNCTION)
    assert list(build_package("one.yaml", (DIRECTORY,)).files) == ["one.yaml"]
    assert "own.py has no function `g`. Functions there: f." in refused(DIRECTORY, "reward.functions=own.py:g")


def test_a_run_directory_inside_the_job_is_refused(folder: Path) -> None:
    write("one.yaml")
    assert refused().startswith("run.dir is runs/one, which on a cluster lies in the job's working directory")
    assert refused().endswith("run.dir=/shared/runs/one")


def test_what_validate_refuses_is_refused(folder: Path) -> None:
    write("one.yaml", "trainer: {stesp: 3}")
    assert "Did you mean `trainer.steps`?" in refused(DIRECTORY)
    assert "not_there.jsonl does not exist" in refused(
        DIRECTORY, "data.train=not_there.jsonl", path=str(write("two.yaml"))
    )


def test_files_outside_the_folder_are_refused(folder: Path) -> None:
    write("../elsewhere.py", FUNCTION)
    write("one.yaml", "reward: {functions: {../elsewhere.py:f: 1.0}}")
    assert refused(DIRECTORY).startswith(
        f"reward.functions ../elsewhere.py is outside of {folder}, and files keep their place"
    )
    assert refused(DIRECTORY, path="../none.yaml") == "../none.yaml: no such file."
    write("../other.yaml")
    assert "the configuration ../other.yaml is outside of" in refused(DIRECTORY, path="../other.yaml")


def test_files_that_are_too_large_are_named_with_both_sizes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_package, "MAX_BYTES", 1 << 20)
    write("one.yaml", "data: {train: large.jsonl}")
    write("large.jsonl", "0" * (3 << 19))
    assert refused(DIRECTORY) == (
        "1.5 MiB would be sent with the job, most of it data.train large.jsonl (1.5 MiB); at most 1.0 MiB may. Put it "
        "on storage "
        "that all nodes see, and give its absolute path."
    )
