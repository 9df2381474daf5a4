"""The figures of episodes, against ones that were counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from rlsys.episodes.figures import episode_figures
from rlsys.types import Episode, Observation, Sample


def call(name: str, error: str = "") -> dict:
    entry = {"id": "c", "type": "function", "function": {"name": name, "arguments": {}}}
    return entry | ({"error": error} if error else {})


def answer(*calls: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def play(finish: str, turns: list[int], observed: list[int], messages=(), last_word: int = 0) -> Sample:
    """An episode with so many own tokens in each turn, and so many of the environment before each."""
    starts = np.cumsum([0, *turns])
    observations = [Observation(int(at), np.ones(n, np.int32)) for at, n in zip(starts, observed, strict=False)]
    observations += [Observation(int(starts[-1]), np.ones(last_word, np.int32))] if last_word else []
    tokens = np.ones(sum(turns), np.int32)
    episode = Episode(None, list(messages), [0.0] * len(turns))
    return Sample("p", 0, "", tokens, -tokens.astype(np.float32), finish, 1, (), tuple(observations), episode)


def single(finish: str = "length") -> Sample:
    return Sample("p", 1, "", np.ones(3, np.int32), np.zeros(3, np.float32), finish, 1)


def test_single_answers_have_no_figures_of_episodes():
    assert episode_figures([single(), single("stop")]) == {}
    assert episode_figures([]) == {}


def test_turns_ends_and_observed_tokens_are_means_over_the_episodes_alone():
    episodes = [
        play("stop", [2, 3], [4, 1]),
        play("turns", [1, 1, 1], [2, 2, 2], last_word=5),  # what was said last had no turn
        play("turns", [6], [1]),
        play("window", [1, 1], [3, 0]),
    ]
    assert episode_figures([*episodes, single()]) == {
        "episode/turns": 2.0,  # 2 + 3 + 1 + 2
        "episode/observed_tokens": 5.0,  # 5 + 11 + 1 + 3
        "episode/finish/stop": 0.25,
        "episode/finish/length": 0.0,
        "episode/finish/turns": 0.5,
        "episode/finish/tokens": 0.0,
        "episode/finish/window": 0.25,
        "episode/finish/time": 0.0,
    }


def test_an_episode_whose_time_was_over_has_a_share_once_with_or_without_a_score():
    late = replace(play("time", [1], [1]), uid="late")
    for figures in (
        episode_figures([play("stop", [1], [1])], [late, replace(play("stop", [1], [1]), uid="broken")]),
        episode_figures([play("stop", [1], [1]), late], [late]),  # reward.on_failure has given it a score
    ):
        assert (figures["episode/finish/stop"], figures["episode/finish/time"]) == (0.5, 0.5)


def test_calls_are_counted_by_tool_and_those_that_cannot_be_read_by_themselves():
    first = [
        {"role": "user", "content": "1 + 2?"},
        answer(call("add"), call("add"), call("", error="no JSON")),
        {"role": "tool", "content": "3"},
        answer(call("search")),
    ]
    second = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
    figures = episode_figures([play("stop", [1, 1], [1, 1], first), play("stop", [1], [1], second)])
    assert figures["episode/tool_calls"] == 2.0
    assert figures["episode/tool_calls/add"] == 1.0
    assert figures["episode/tool_calls/search"] == 0.5
    assert figures["episode/unreadable_calls"] == pytest.approx(0.25)


def test_without_any_call_there_are_no_figures_of_calls():
    figures = episode_figures([play("stop", [1], [1], [{"role": "user", "content": "a"}, answer()])])
    assert not [name for name in figures if "call" in name]


def test_examples_that_the_environment_gives_are_no_calls_of_the_model():
    shown = [{"role": "user", "content": "a"}, answer(call("add")), {"role": "tool", "content": "3"}]
    figures = episode_figures([play("stop", [1], [1], [*shown, answer(call("search"))])])
    assert {name: value for name, value in figures.items() if "call" in name} == {
        "episode/tool_calls": 1.0,
        "episode/unreadable_calls": 0.0,
        "episode/tool_calls/search": 1.0,
    }


def test_turns_that_were_cut_are_a_share_of_those_after_which_the_episode_went_on():
    whole, cut = ({"role": "assistant", "content": ""} | more for more in ({}, {"finish": "length"}))
    asked, shown = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "finish": "length"}
    first = play("length", [1, 1, 1], [1, 1, 1], [asked, shown, asked, cut, asked, whole, asked, cut])
    second = play("turns", [1, 1, 1], [1, 1, 1], [asked, cut, asked, cut, asked, whole])
    assert episode_figures([first, second, play("length", [1], [1], [asked, cut])])["episode/turns_cut"] == 0.75
    assert episode_figures([play("stop", [1, 1], [1, 1], [asked, whole, asked, whole])])["episode/turns_cut"] == 0
    assert "episode/turns_cut" not in episode_figures([play("length", [1], [1], [asked, cut])]), (
        "there is no other turn"
    )
