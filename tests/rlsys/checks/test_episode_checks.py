"""What `validate` says of the `episode` section."""

import pytest

GAME = "async def play(row, ask):\n    await ask('Hello')\n    return 1.0\n"


@pytest.fixture(autouse=True)
def game(tmp_path):
    (tmp_path / "game.py").write_text(GAME)


GOOD = "data: {train: builtin:zigzag}\nmodel: {path: builtin:tiny}\n"


def test_a_function_and_an_environment_are_fine(read):
    pytest.importorskip("gymnasium")
    assert read(f"{GOOD}episode: {{play: game.py:play}}").episode.play == "game.py:play"
    config = read(f"{GOOD}episode: {{play: 'gymnasium:FrozenLake-v1', options: {{is_slippery: false}}}}")
    assert config.episode.options == {"is_slippery": False}
    assert read(f"{GOOD}episode: 'gymnasium:FrozenLake-v1'").episode.play == "gymnasium:FrozenLake-v1"


def test_a_command_is_short_for_what_plays_it(read):
    config = read(f"{GOOD}episode: {{command: 'python agent.py {{prompt}}', grade: game.py:play}}")
    assert config.episode.play == "command"
    assert config.episode.options == {"command": "python agent.py {prompt}", "grade": "game.py:play"}
    assert config.reward.functions == {}
    assert read(f"{GOOD}episode: {{play: game.py:play}}", "episode.command=ls").episode.play == "command"


@pytest.mark.parametrize(
    ("yaml", "parts"),
    [
        ("episode: {play: absent.py:play}", ["episode.play: the file absent.py", "does not exist"]),
        ("episode: {play: game.py:start}", ["episode.play: game.py has no function `start`", "play"]),
        ("episode: {command: ls, grade: game.py:grade}", ["episode.grade: game.py has no function `grade`", "play"]),
        ("episode: {play: command}", ["episode.command is missing", "python agent.py {task}"]),
        ("episode: {comand: ls}", ["unknown option `episode.comand`", "Did you mean `episode.command`?"]),
        ("episode: {play: game}", ["episode.play: `game` is not known", "textarena:NAME"]),
        ("episode: reasoning_gym:chain_sum", ["`reasoning_gym:chain_sum` is a data set", "Name it in data.train"]),
        ("episode: {play: 'gymnasium:Absent-v1'}", ["episode.play: gymnasium:Absent-v1", "doesn't exist"]),
        ("episode: {play: 'gymnasium:FrozenLake-v1', options: {size: 3}}", ["episode.play: gymnasium", "size"]),
        ("episode: {play: 'openenv:host'}", ["episode.play: openenv:host is not the address"]),
        ("episode: {options: {a: 1}}", ["episode.options is set, and nothing plays an episode"]),
        (
            "episode: {play: game.py:play, step_timeout_s: 60, timeout_s: 30}",
            ["episode.step_timeout_s (60)", "episode.timeout_s (30)"],
        ),
        (
            "episode: {play: game.py:play, step_timeout_s: 90, timeout_s: 99}\nwatchdog: {stall_s: 90}",
            ["watchdog.stall_s (90) is not more than what a step of an episode (episode.step_timeout_s) may", "(90 s)"],
        ),
        (
            "episode: {tools: [python], options: {timeout_s: 31}}",
            ["episode.options.timeout_s (31), for calls of tools", "episode.step_timeout_s (30)"],
        ),
        ("episode: {play: game.py:play, max_tokens: 512, window: 512}", ["episode.max_tokens (512)", "window (512)"]),
    ],
)
def test_each_problem_is_one_sentence_with_a_way_out(refused, yaml, parts):
    if "gymnasium" in yaml:
        pytest.importorskip("gymnasium")
    if "openenv" in yaml:
        pytest.importorskip("openenv")
    [problem] = refused(GOOD + yaml)
    assert all(part in problem for part in parts), problem


def test_the_episode_of_a_data_set_is_checked_too(refused):
    [problem] = refused("model: {path: builtin:tiny}\ndata: {train: {builtin:zigzag: {episode: game.py:start}}}")
    assert problem.startswith("data.train.builtin:zigzag.episode: game.py has no function `start`")


def test_a_secret_in_the_options_is_in_no_message(refused, monkeypatch):
    """The package's own message has all options in it."""
    pytest.importorskip("gymnasium")
    monkeypatch.setenv("LAKE_PASS", "a-secret-of-the-lake")
    [problem] = refused(
        f"{GOOD}episode: {{play: 'gymnasium:FrozenLake-v1', options: {{word: '${{oc.env:LAKE_PASS}}'}}}}"
    )
    assert "a-secret-of-the-lake" not in problem
    assert "'word': '***'" in problem


def test_a_server_need_not_run_to_validate(read):
    pytest.importorskip("openenv")
    assert read(f"{GOOD}episode: 'openenv:http://127.0.0.1:9'").episode.play == "openenv:http://127.0.0.1:9"
