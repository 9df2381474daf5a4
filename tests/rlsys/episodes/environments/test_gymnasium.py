"""Gymnasium's environments in text, against the real package."""

import asyncio
import re
import time

import pytest
from scripted import Scripted, play

from rlsys.episodes.ask import EpisodeOver
from rlsys.episodes.environments import load_environment
from rlsys.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces

NAMES = ["left", "down", "right", "up"]


class Echo(gymnasium.Env):
    """Observations and actions are texts. Ends with the word `stop`, and pays the length of each text."""

    observation_space = spaces.Text(100, charset="abcdefghijklmnopqrstuvwxyz ")
    action_space = spaces.Text(20, charset="abcdefghijklmnopqrstuvwxyz ")

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return "say something", {}

    def step(self, action):
        return f"you said {action}", len(action), action == "stop", False, {}


class Slow(Echo):
    def step(self, action):
        time.sleep(0.5)
        return super().step(action)


class Spaces(gymnasium.Env):
    """Any spaces; the observation is a sample, and an action ends the episode."""

    def __init__(self, observation, action):
        self.observation_space, self.action_space, self.taken = observation, action, None

    def reset(self, seed=None, options=None):
        self.observation_space.seed(7)
        return self.observation_space.sample(), {}

    def step(self, action):
        Spaces.taken = action
        return self.observation_space.sample(), 2.5, False, True, {}


for name, kind in (("Echo-v0", Echo), ("Slow-v0", Slow), ("Spaces-v0", Spaces)):
    gymnasium.register(name, kind)


def test_the_way_across_the_lake_is_paid_at_its_end():
    #   SFFF   down, down, right, right, down, right: the holes are at (1, 1), (1, 3), (2, 3) and (3, 0)
    #   FHFH
    #   FFFH
    #   HFFG
    ask = Scripted(["down", "go DOWN", "left? no, right", "right", "down", "right"])
    assert play("gymnasium:FrozenLake-v1", {"seed": 0}, ask, is_slippery=False, actions=NAMES) == 0.0
    assert ask.scores == [0, 0, 0, 0, 0, 1]
    assert [re.search(r"observation: (\d+)", text)[1] for text in ask.asked] == ["0", "4", "8", "9", "10", "14"]
    assert "(red S)FFF\nFHFH\nFFFH\nHFFG" in ask.asked[0], "the field one stands on is red in a terminal"
    assert "Reply with one of: left, down, right, up." in ask.asked[0]


def test_a_hole_ends_the_episode_without_reward():
    ask = Scripted(["2", "1", "never asked"])
    assert play("gymnasium:FrozenLake-v1", {"seed": 0}, ask, is_slippery=False) == 0.0
    assert ask.scores == [0, 0]


def test_the_seed_of_the_row_decides_and_equal_rows_play_equally():
    """A slippery lake: the states are those of the package, stepped by hand."""

    def states(row):
        ask = Scripted(["1", "2"] * 4)
        with pytest.raises(EpisodeOver):
            play("gymnasium:Taxi-v4", row, ask)
        return [int(re.search(r"observation: (\d+)", text)[1]) for text in ask.asked]

    env = gymnasium.make("Taxi-v4")
    expected = [env.reset(seed=11)[0]] + [env.step(a)[0] for a in [1, 2] * 4]
    assert states({"seed": 11}) == expected
    assert states({"other": "row"}) == states({"other": "row"}), "without a seed, it follows from the row"
    assert len({tuple(states({"other": i})) for i in range(5)}) > 1


def test_a_reply_without_a_valid_action_costs_a_turn_and_no_step():
    ask = Scripted(["hit me", "7", "0.5", "1 or rather 0"])
    play("gymnasium:Blackjack-v1", {"seed": 3}, ask)
    assert ask.asked[1:] == ["Your reply has no valid action. Reply with a whole number from 0 to 1."] * 3
    assert len(ask.replies) == 4


def test_a_number_that_its_type_does_not_hold_is_no_action():
    for space, reply in [
        (spaces.Discrete(3), "9" * 30),
        (spaces.MultiDiscrete([3, 3]), f"1 {'9' * 30}"),
        (spaces.MultiBinary(2), "0 257"),  # 1 in eight bits
        (spaces.Box(0, 255, (1,), "uint8"), "256"),
        (spaces.Box(-float("inf"), float("inf"), (1,)), "9" * 400),  # more than a float holds
    ]:
        ask = Scripted([reply, "1 1"])
        play("gymnasium:Spaces-v0", {}, ask, observation=spaces.Discrete(2), action=space)
        assert ask.scores == [0, 2.5], space


def test_observations_of_several_numbers_are_written_in_a_row():
    env = gymnasium.make("Blackjack-v1")
    (own, dealer, ace), _ = env.reset(seed=5)
    ask = Scripted(["0"])
    play("gymnasium:Blackjack-v1", {"seed": 5}, ask, prompt="Your sum, the dealer's card, a usable ace:")
    assert ask.asked[0].startswith(f"Your sum, the dealer's card, a usable ace:\n{own}, {dealer}, {ace}\n")


def test_texts_go_both_ways_as_they_are():
    ask = Scripted(["hello", "Not Allowed!", "stop"])
    assert play("gymnasium:Echo-v0", {"prompt": "A game."}, ask) == 0.0
    assert ask.asked == ["A game.\nsay something", "you said hello", "Your reply has no valid action. "]
    assert ask.scores == [5, 0, 4]


@pytest.mark.parametrize(
    ("action", "reply", "taken"),
    [
        (spaces.Discrete(3, start=5), "5 or 7", 7),
        (spaces.MultiDiscrete([3, 4]), "2, 3, then 1, 0", [1, 0]),
        (spaces.Box(-1, 1, (2,)), "x=-0.5, y=0.25", [-0.5, 0.25]),
        (spaces.MultiBinary(3), "1 0 1", [1, 0, 1]),
    ],
)
def test_actions_are_the_last_numbers_of_a_reply(action, reply, taken):
    ask = Scripted(["9", "nothing", reply])
    play("gymnasium:Spaces-v0", {}, ask, observation=spaces.Discrete(2), action=action)
    assert Spaces.taken == taken if isinstance(taken, int) else Spaces.taken.tolist() == taken
    assert ask.scores == [0, 0, 2.5], "the others were no actions"


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (spaces.Dict({"door": spaces.Discrete(1), "at": spaces.MultiDiscrete([1, 1])}), "at: [0, 0], door: 0"),
        (spaces.MultiBinary((1, 2)), None),
    ],
)
def test_structured_observations_are_named(observation, text):
    ask = Scripted(["0"])
    play("gymnasium:Spaces-v0", {}, ask, observation=observation, action=spaces.Discrete(1))
    shown = ask.asked[0].splitlines()[1]
    assert shown in (["[[0, 0]]", "[[0, 1]]", "[[1, 0]]", "[[1, 1]]"] if text is None else [text])


def test_slow_steps_run_side_by_side():
    async def all_of_them():
        playing = load_environment("gymnasium:Slow-v0", {})
        await asyncio.gather(*(playing({"seed": i}, Scripted(["stop"])) for i in range(5)))

    started = time.monotonic()
    asyncio.run(all_of_them())
    assert time.monotonic() - started < 5 * 0.5


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("Nope-v1", {}, ["gymnasium:Nope-v1", "doesn't exist"]),
        ("Taxi-v3", {}, ["Taxi-v4"]),
        ("FrozenLake-v1", {"size": 9}, ["gymnasium:FrozenLake-v1", "size"]),
        ("FrozenLake-v1", {"actions": ["left", "right"]}, ["has 2 names", "Discrete(4)"]),
        ("FrozenLake-v1", {"actions": "left"}, ["a list of different words; it is 'left'"]),
        ("FrozenLake-v1", {"actions": ["a", "A", "b", "c"]}, ["a list of different words"]),
        ("FrozenLake-v1", {"actions": [1, 2, 3, 4]}, ["a list of different words"]),
        ("no_such_module:Game-v0", {}, ["No module named 'no_such_module'"]),
        ("Spaces-v0", {"observation": spaces.Box(0, 255, (96, 96, 3)), "action": spaces.Discrete(2)}, ["as text"]),
        ("Spaces-v0", {"observation": spaces.Discrete(2), "action": spaces.Dict(a=spaces.Discrete(2))}, ["a reply"]),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(name, options, parts):
    with pytest.raises(ConfigError) as error:
        load_environment(f"gymnasium:{name}", options)
    [problem] = error.value.problems
    assert all(part in problem for part in parts), problem


def test_a_module_may_register_the_environment(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_envs.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Lake-v0', 'gymnasium.envs.toy_text:FrozenLakeEnv', kwargs={'is_slippery': False})\n"
    )
    ask = Scripted(["2", "1"])
    play("gymnasium:my_envs:Lake-v0", {}, ask)
    assert "SFFF" not in ask.asked[0]
    assert "(red S)FFF" in ask.asked[0]
