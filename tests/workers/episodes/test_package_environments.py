"""An environment of another package in a real episode process."""

from pathlib import Path

import pytest
from test_runner import play, runner, settings

from rlsys.errors import ConfigError
from workers.turns.messages import Start

pytest.importorskip("gymnasium")

DIGITS = """
import gymnasium

class Digits(gymnasium.Env):
    "Says a number, and pays the length of a reply, twice."
    observation_space = gymnasium.spaces.Text(4, charset="0123456789>")
    action_space = gymnasium.spaces.Text(8, charset="0123456789")

    def reset(self, seed=None, options=None):
        self.number, self.turns = seed, 0
        return f"{self.number}>", {}

    def step(self, action):
        self.turns += 1
        return f"{self.number + self.turns}>", len(action), self.turns == 2, False, {}

gymnasium.register("Digits-v0", Digits)
"""


def test_an_environment_is_played_in_an_episode_process(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digit_envs.py").write_text(DIGITS)
    monkeypatch.syspath_prepend(tmp_path)
    s = settings(tmp_path, tiny_model, plays=("gymnasium:digit_envs:Digits-v0",))
    with runner(s) as episodes:
        ended, asked = play(episodes, [Start(i, s.plays[0], {"seed": i, "prompt": "0"}, 8) for i in range(3)])
    for number, end in ended.items():
        assert end.episode.verdict
        assert end.episode.verdict.score == 4.0, end.episode.verdict
        assert end.episode.turn_scores == [2.0, 2.0], "a reply is two digits and the end"
        assert len([a for a in asked if a.number == number]) == 2


TOGETHER = """
import threading
import gymnasium

meet = threading.Barrier(40, timeout=20)

class Together(gymnasium.Env):
    "A step ends when 40 have begun."
    observation_space = gymnasium.spaces.Text(4, charset="0123456789>")
    action_space = gymnasium.spaces.Text(8, charset="0123456789")

    def reset(self, seed=None, options=None):
        return "1>", {}

    def step(self, action):
        meet.wait()
        return "2>", 1.0, True, False, {}

gymnasium.register("Together-v0", Together)
"""


def test_environments_that_wait_do_not_wait_for_each_other(
    tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meeting_envs.py").write_text(TOGETHER)
    monkeypatch.syspath_prepend(tmp_path)
    spec = "gymnasium:meeting_envs:Together-v0"
    s = settings(tmp_path, tiny_model, plays=(spec,), concurrency=50, step_timeout_s=60.0, timeout_s=60.0)
    with runner(s) as episodes:
        ended, _ = play(episodes, [Start(i, spec, {"prompt": "0"}, 8) for i in range(40)])
    assert [end.episode.verdict.score for end in ended.values() if end.episode.verdict] == [1.0] * 40


def test_an_environment_that_is_not_there_ends_the_start(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, plays=("gymnasium:Absent-v0",))
    with pytest.raises(ConfigError, match="gymnasium:Absent-v0: Environment `Absent` doesn't exist"), runner(s):
        pass
