"""An environment of another package in a real episode process."""

from pathlib import Path

import pytest
from test_runner import play, runner, settings

from rlsys.config.schema import ConfigError
from workers.episodes.messages import Start

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


def test_an_environment_that_is_not_there_ends_the_start(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, plays=("gymnasium:Absent-v0",))
    with pytest.raises(ConfigError, match="gymnasium:Absent-v0: Environment `Absent` doesn't exist"), runner(s):
        pass
