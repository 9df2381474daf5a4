"""Environments written with verifiers, played by the real package. Its data: `tests/rlsys/tasks/test_taskset.py`."""

import sys

import pytest
from scripted import Scripted, play

from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.environments import load_environment
from rlsys.errors import ConfigError
from rlsys.tasks import taskset

pytest.importorskip("verifiers.v1")

SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply.strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace):
        return float(len(trace.last_reply) < 4)

class Config(vf.TasksetConfig):
    top: int = 3

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.top):
            yield Sum(Data(prompt=f"{i}+{i}=?", system_prompt="Only the sum.", answer=2 * i), self.config.task)

__all__ = ["Sums"]
"""

GUESSING = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    secret: int

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.stop
    async def four_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def turns_left(self, trace):
        return float(4 - trace.num_turns)

class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for secret in range(10):
            yield Task(Data(prompt="Guess.", secret=secret), self.config.task)

class Config(vf.EnvConfig):
    guesser: vf.AgentConfig = vf.AgentConfig()

class Guessing(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.guesser.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and int(segment.last_reply) != task.data.secret:
                hint = "higher" if int(segment.last_reply) < task.data.secret else "lower"
                segment = await talk.turn(hint)
        talk.trace.record_reward("solved", float(not segment.terminated), 1.0)

__all__ = ["Tasks", "Guessing"]
"""

RUN = GUESSING[GUESSING.index("        async with") : GUESSING.index("\n__all__")]
TWO_TALKS = GUESSING.replace(RUN, "        await agents.guesser.run(task)\n        await agents.guesser.run(task)\n")

TWO_AGENTS = GUESSING.replace(
    "class Guessing", "class Other(Config):\n    judge: vf.AgentConfig = vf.AgentConfig()\n\nclass Guessing"
)
TWO_AGENTS = TWO_AGENTS.replace("vf.Env[Config]", "vf.Env[Other]")

WITH_TOOLS = SUMS.replace(
    "class Config(",
    """class Tools(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        "Adds."
        return a + b

class Config(""",
).replace(
    "    def load",
    "    @classmethod\n    def toolsets(cls, config):\n        return [Tools(vf.ToolsetConfig())]\n\n    def load",
)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module, and returns its tasks as rows."""
    monkeypatch.syspath_prepend(tmp_path)
    number = 0

    def write(source: str, **options) -> tuple[str, list[dict]]:
        nonlocal number
        number += 1
        name = f"{tmp_path.name.rstrip('0123456789')}_{number}".lower()
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name, taskset.rows(name, options)

    return write


def test_a_task_of_one_turn_is_scored_by_its_rewards(write):
    name, rows = write(SUMS, top=5)
    ask = Scripted(["6"])
    assert play(f"verifiers:{name}", rows[3], ask) == {"right": 1.0, "short": 0.5}
    [asked] = ask.asked
    assert asked == [{"role": "system", "content": "Only the sum."}, {"role": "user", "content": "3+3=?"}]
    assert play(f"verifiers:{name}", rows[3], Scripted(["seven"])) == {"right": 0.0, "short": 0.0}


def test_an_environment_of_many_turns_plays_the_user(write):
    name, rows = write(GUESSING)
    ask = Scripted(["5", "8", "7"])
    assert play(f"verifiers:{name}", rows[7], ask) == {"solved": 1.0, "turns_left": 1.0}
    assert [asked[-1]["content"] for asked in ask.asked] == ["Guess.", "higher", "lower"]
    assert [len(asked) for asked in ask.asked] == [1, 1, 1], "only what is new"


def test_its_own_stops_end_the_episode(write):
    name, rows = write(GUESSING)
    ask = Scripted(["1"] * 9)
    assert play(f"verifiers:{name}", rows[7], ask) == {"solved": 0.0, "turns_left": 0.0}
    assert len(ask.replies) == 4


def test_an_episode_that_our_limits_end_is_scored_as_it_is(write):
    name, rows = write(GUESSING)
    assert play(f"verifiers:{name}", rows[7], Scripted(["1", "2"])) == {"solved": 0.0, "turns_left": 2.0}


def test_what_an_environment_raises_is_a_failure_and_not_a_score(write):
    name, rows = write(GUESSING)
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        play(f"verifiers:{name}", rows[7], Scripted(["five"]))


def test_an_environment_that_talks_twice_is_a_failure(write):
    """The second conversation does not begin with the first, so its reward would be missing."""
    name, rows = write(TWO_TALKS)
    with pytest.raises(RuntimeError, match="changed earlier messages; an episode is one conversation"):
        play(f"verifiers:{name}", rows[7], Scripted(["7", "7"]))


def test_a_picture_in_a_prompt_is_not_left_out_unseen(write):
    parts = """[{"role": "user", "content": [{"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]"""
    name, rows = write(SUMS.replace('f"{i}+{i}=?", system_prompt="Only the sum."', parts))
    with pytest.raises(RuntimeError, match="a part of a message is a text, not dict"):
        play(f"verifiers:{name}", rows[0], Scripted(["A cat."]))


def test_rows_of_another_set_are_a_failure_with_a_way_out(write):
    name, _ = write(SUMS)
    with pytest.raises(ValueError, match=f"it plays the rows of `data.train: verifiers:{name}`"):
        play(f"verifiers:{name}", {"prompt": "2+2=?"}, Scripted(["4"]))


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (TWO_AGENTS, r"has 2 agents \(guesser, judge\)"),
        (WITH_TOOLS, "has tools; rlsys plays environments of one agent"),
    ],
)
def test_what_rlsys_does_not_play_is_refused_at_the_start(write, source, sentence):
    name, _ = write(source)
    with pytest.raises(ConfigError, match=sentence):
        load_environment(f"verifiers:{name}", {})


def test_options_without_a_default_may_come_with_the_data(write):
    name, rows = write(SUMS.replace("top: int = 3", "top: int"), top=2)
    assert play(f"verifiers:{name}", rows[1], Scripted(["2"])) == {"right": 1.0, "short": 0.5}


def test_a_name_or_options_that_do_not_fit_are_refused_at_the_start(write):
    name, _ = write(SUMS)
    with pytest.raises(ConfigError, match=r"verifiers:absent_one: .*not found"):
        load_environment("verifiers:absent_one", {})
    with pytest.raises(ConfigError, match=rf"data.train: {{verifiers:{name}: "):
        load_environment(f"verifiers:{name}", {"top": 2})


def test_turns_that_never_come_raise_what_ended_the_episode(write):
    """The first turn has no room: nothing was played, and the package has nothing to score."""
    name, rows = write(SUMS.replace("len(trace.last_reply) < 4", "1 / 0"))
    with pytest.raises(EpisodeOver):
        play(f"verifiers:{name}", rows[0], Scripted([]))
