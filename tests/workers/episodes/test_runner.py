"""Episodes in a real process, without engines: the test answers each ask itself."""

import itertools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import psutil
import pytest
from command_lines import command_of

from rlsys.episodes.settings import EpisodeSettings
from rlsys.errors import ConfigError
from rlsys.types import Request
from workers.episodes.runner import EpisodeRunner
from workers.turns.messages import LINE_BITS, Answer, Asked, Command, Ended, Event, Lost, Start
from workers.turns.open_episode import OpenEpisode, crashed

GAMES = """
import asyncio, os, random, re, time
waited = []

async def play(row, ask):
    text = "1>"
    for _ in range(row.get("turns", 2)):
        reply = await ask(text)
        text = reply.text + ">"
    return float(len(text))

async def raises(row, ask):
    await ask("1>")
    raise ValueError(row["absent"])

async def hangs(row, ask):
    await ask("1>")
    await asyncio.sleep(1000)

async def blocks(row, ask):
    await ask("1>")
    re.match("(a+)+$", "a" * 40 + "b")

async def never_asks(row, ask):
    return 1.0

async def asks_for_ever(row, ask):
    while True:
        await ask("1>")

async def takes_what_it_has(row, ask):
    try:
        await asks_for_ever(row, ask)
    except Exception as over:
        return {"turns": 0.5, "reason": float(over.reason == "turns")}

async def wants_logprobs(row, ask):
    first = await ask("1>")
    second = await ask("1>", logprobs=True)
    return {"without": float(first.logprobs is None), "with": sum(second.logprobs)}

async def returns_nonsense(row, ask):
    await ask("1>")
    return "good"

async def returns_nan(row, ask):
    await ask("1>")
    return float("nan")

async def ends_its_process(row, ask):
    await ask("1>")
    os._exit(3)

async def forks(row, ask):
    await ask("1>")
    if not os.fork():
        return 5.0  # the child comes back as the parent does
    await ask("2>")
    return 2.0

async def asks_later(row, ask):
    await ask("1>")
    asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(late(ask)))
    return 1.0

async def late(ask):
    try:
        await ask("2>")
    except RuntimeError as error:
        waited.append(str(error))

async def tells_what_waited(row, ask):
    await ask("1>")
    await asyncio.sleep(0.3)
    raise ValueError(waited)

async def asks_twice_at_once(row, ask):
    await asyncio.gather(ask("1>"), ask("2>"))

async def cancels_an_ask(row, ask):
    try:
        await asyncio.wait_for(ask("1>"), 0.001)
    except TimeoutError:
        await ask("2>")

async def asks_a_number(row, ask):
    await ask(7)

async def asks_a_long_one(row, ask):
    await ask("1>")
    await ask("2" * 500)

async def begins_with_a_long_one(row, ask):
    await ask("2" * 500)

async def begins_with_a_long_one_and_goes_on(row, ask):
    try:
        await ask("2" * 500)
    except Exception:
        return 1.0

async def fills_memory(row, ask):
    await ask("1>")
    bytearray(1 << 33)

async def is_cancelled(row, ask):
    await ask("1>")
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

async def scores_turns(row, ask):
    for i in range(3):
        (await ask("1>")).score(i)

async def rolls(row, ask):
    reply = await ask("1>")
    reply = await ask(f"{random.SystemRandom().randrange(10**6)}>")
    if not os.path.exists(row["mark"]):
        open(row["mark"], "w").close()
        os._exit(1)
    return 1.0

async def asks_for_a_set(row, ask):
    for _ in range(4):
        await ask("".join(sorted({str(n) for n in range(10)}, key=hash)) + ">")
    return 1.0

async def asks_after_a_stranger(row, ask):
    reply = await ask("1>")
    await ask("2>", after=type(reply)("a reply of my own", "stop"))

async def forgets(row, ask):
    first = await ask("1" * 20 + ">")
    await ask("2" * 20 + ">")
    await ask("3" * 20 + ">", after=first)  # three of these in one sequence would be too long
    await ask("4>", after=None)
    return 1.0

def plain(row, ask):
    return 1.0
"""


def settings(folder: Path, model: str, *names: str, **changes: Any) -> EpisodeSettings:
    (folder / "games.py").write_text(GAMES)
    values: dict[str, Any] = {
        "plays": tuple(f"{folder}/games.py:{name}" for name in names),
        "options": {},
        "tools": [],
        "tool_parser": "",
        "reasoning_parser": "",
        "on_bad_call": "observe",
        "max_turns": 4,
        "max_tokens": 0,
        "window": 64,
        "step_timeout_s": 2.0,
        "timeout_s": 20.0,
        "concurrency": 16,
        "memory_mb": 3000,
        "start_timeout_s": 120.0,
        "template": "",
        "model": model,
        "keep_spare": False,
    }
    return EpisodeSettings(**values | changes)


@contextmanager
def runner(s: EpisodeSettings) -> Iterator[EpisodeRunner]:
    with closing(EpisodeRunner(s)) as started:
        started.ready.result()
        started.begin_line("rollout-0", 0)
        yield started
    assert not [p for p in psutil.Process().children(recursive=True) if "workers.episodes.process" in command_of(p)]


def episode_process() -> psutil.Process:
    [process] = [p for p in psutil.Process().children(recursive=True) if "workers.episodes.process" in command_of(p)]
    return process


class Driver:
    """Does what an engine does, on a thread: answers each ask with `3 4 end`, and begins lost plays again.

    `events` has the ends, and what was asked for that was not known from a play before.
    """

    def __init__(self, episodes: EpisodeRunner):
        self.episodes = episodes
        self.start_of: dict[int, Start] = {}  # by the number of a play, also of one that begins again
        self.episode_of: dict[int, OpenEpisode] = {}
        self.known: defaultdict[int, list[list[int]]] = defaultdict(list)  # observations
        self.numbers = itertools.count(1_000_000)
        self.events: queue.SimpleQueue[Asked | Ended | Exception] = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def begin(self, starts: list[Start]) -> None:
        for start in starts:
            self.start_of[start.number] = start
            self.episode_of[start.number] = OpenEpisode(Request("p", start.number, [], 0, 1.0, 8))
        self.episodes.send(list(starts))

    def run(self) -> None:
        try:
            for events in self.episodes.events(0):
                news = [event for event in events if event.number in self.start_of]
                self.episodes.send([command for event in news for command in self.react(event)])
        except Exception as error:
            self.events.put(error)

    def next(self) -> Asked | Ended:
        event = self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def react(self, event: Event) -> list[Command]:
        start = self.start_of[event.number]
        if isinstance(event, Asked):
            turns = self.known[start.number]
            if turns[event.turn : event.turn + 1] != [event.observation]:
                turns[event.turn :] = [event.observation]
                self.events.put(replace(event, number=start.number))
            return [answer(event)]
        if isinstance(event, Ended):
            self.events.put(replace(event, number=start.number))
        elif self.episode_of[start.number].is_cause(event):
            self.events.put(replace(crashed(event), number=start.number))
        else:
            again = replace(start, number=next(self.numbers))
            self.start_of[again.number] = start
            return [again]
        return []


DRIVERS: WeakKeyDictionary[EpisodeRunner, Driver] = WeakKeyDictionary()


def driver_of(episodes: EpisodeRunner) -> Driver:
    if episodes not in DRIVERS:
        DRIVERS[episodes] = Driver(episodes)
    return DRIVERS[episodes]


def play(episodes: EpisodeRunner, starts: list[Start]) -> tuple[dict[int, Ended], list[Asked]]:
    """Plays until all have ended. Returns the ends, and what was asked for."""
    driver, ended, asked = driver_of(episodes), dict[int, Ended](), list[Asked]()
    driver.begin(starts)
    while len(ended) < len(starts):
        event = driver.next()
        if isinstance(event, Ended):
            ended[event.number] = event
        else:
            asked.append(event)
    return ended, asked


def answer(asked: Event) -> Answer:
    assert isinstance(asked, Asked)
    return make_answer(asked.number, asked.turn, [5, 6, 1], [-1.0, -2.0, -0.5] if asked.logprobs else None)


def make_answer(number: int, ask: int, tokens: list[int], logprobs: list[float] | None = None) -> Answer:
    values = None if logprobs is None else np.array(logprobs, np.float32)
    return Answer(number, ask, np.array(tokens, np.int32), values, "stop")


OUTCOMES = {  # function: failure or score, and what its detail says or why it ended
    "play": (3.0, "stop"),
    "raises": ("exception", "raises, after turn 1: KeyError: 'absent'"),
    "hangs": ("timeout", "hangs, after turn 1 took more than 2 s (episode.step_timeout_s)"),
    "never_asks": ("invalid", "never_asks returned without a reply of the model."),
    "begins_with_a_long_one": ("exception", "tokens and leaves no room for a reply: episode.window is 64"),
    "begins_with_a_long_one_and_goes_on": ("invalid", "returned without a reply of the model."),
    "asks_for_ever": (None, "turns"),
    "takes_what_it_has": (1.5, "turns"),
    "wants_logprobs": (-2.5, "stop"),
    "returns_nonsense": ("invalid", "returns_nonsense returned 'good'; a reward is a number."),
    "returns_nan": ("invalid", "a reward must be a finite number"),
    "forks": (2.0, "stop"),
    "asks_twice_at_once": ("exception", "await each ask before the next"),
    "cancels_an_ask": ("exception", "ask was called after the episode had ended, or after an ask had been cancelled"),
    "asks_a_number": ("exception", "asks_a_number, before its first turn: TypeError: ask takes a text"),
    "asks_a_long_one": (None, "window"),
    "is_cancelled": ("exception", "it cancelled its own task"),
    "scores_turns": (3.0, "stop"),
    "fills_memory": ("memory", "after turn 1"),
    "asks_after_a_stranger": ("exception", "ValueError: `after` must be a reply of this episode, or None."),
    "forgets": (1.0, "stop"),
}


def test_what_a_function_does_wrong_is_its_own_failure_and_harms_no_other(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, *OUTCOMES)
    with runner(s) as episodes:
        ended, _ = play(episodes, [Start(i, play, {}, 8) for i, play in enumerate(s.plays)])
    for i, (name, (outcome, says)) in enumerate(OUTCOMES.items()):
        verdict = ended[i].episode.verdict
        assert outcome == (verdict and (verdict.failure or verdict.score)), (name, verdict)
        if isinstance(outcome, str):
            assert verdict
            assert says in verdict.detail, name
        else:
            assert ended[i].finish == says, name
    assert ended[list(OUTCOMES).index("scores_turns")].episode.turn_scores == [0.0, 1.0, 2.0]


def test_an_ask_goes_on_after_any_reply_as_if_what_came_later_had_not_been(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "forgets", window=60)
    with runner(s) as episodes:
        ended, asked = play(episodes, [Start(1, s.plays[0], {}, 8)])
    assert [ask.after for ask in asked] == [-1, 0, 0, -1]
    first, second, third, new = (ask.observation for ask in asked)
    assert (len(first), len(second), len(third), len(new)) == (21, 21, 21, 2)
    assert [ask.max_tokens for ask in asked] == [8, 8, 8, 8]
    messages = ended[1].episode.messages
    assert [(m["role"], m.get("after")) for m in messages] == [
        *[("user", None), ("assistant", None)] * 2,
        *[("user", 0), ("assistant", None), ("user", -1), ("assistant", None)],
    ]


def test_an_episode_that_ends_or_blocks_its_process_fails_and_the_others_are_played_again(
    tmp_path: Path, tiny_model: str
) -> None:
    s = settings(tmp_path, tiny_model, "play", "ends_its_process", "blocks")
    good, deadly, blocking = s.plays
    with runner(s) as episodes:
        starts = [Start(i, deadly if i == 3 else blocking if i == 5 else good, {"turns": 4}, 8) for i in range(8)]
        ended, asked = play(episodes, starts)
    failures = {
        i: e.episode.verdict.failure for i, e in ended.items() if e.episode.verdict and e.episode.verdict.failure
    }
    assert failures == {3: "crash", 5: "timeout"}
    assert {e.episode.verdict.score for i, e in ended.items() if i not in failures and e.episode.verdict} == {3.0}
    # What engines have sampled is not sampled again.
    assert len({(a.number, a.turn) for a in asked}) == len(asked)


def test_after_a_crash_only_turns_behind_another_observation_are_sampled_again(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "rolls")
    with runner(s) as episodes:
        ended, asked = play(episodes, [Start(1, s.plays[0], {"mark": str(tmp_path / "mark")}, 8)])
    assert ended[1].episode.verdict
    assert ended[1].episode.verdict.score == 1.0
    assert [a.turn for a in asked] == [0, 1, 1]
    assert asked[1].observation != asked[2].observation


def test_an_episode_that_is_played_again_goes_through_a_set_in_the_same_order(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "asks_for_a_set", window=200)
    observations = set()
    with runner(s) as episodes:
        episodes.send([Start(1, s.plays[0], {}, 8)])
        turn, plays = -1, 1
        for events in episodes.events(0):
            for event in events:
                if isinstance(event, Lost):
                    plays += 1
                    episodes.send([Start(plays, s.plays[0], {}, 8)])
                    continue
                assert isinstance(event, Asked)
                turn = event.turn
                observations.add(tuple(event.observation))
                if turn == 1 and plays == 1:
                    episode_process().kill()
                episodes.send([make_answer(event.number, turn, [5, 1], [-1.0, -1.0])])
            if turn == 3:
                break
    assert plays == 2
    assert len(observations) == 1


@pytest.mark.parametrize(("first", "is_told"), [("asks_for_ever", True), ("hangs", False)], ids=["waits", "works"])
def test_an_engine_whose_episodes_wait_for_those_of_another_is_told_that_nothing_is_wrong(
    tmp_path: Path, tiny_model: str, first: str, is_told: bool
) -> None:
    """One plays at a time: it waits for a turn of its engine, which takes long, or it works, and nobody knows how long."""
    s = settings(tmp_path, tiny_model, first, "play", concurrency=1, step_timeout_s=20.0)
    with runner(s) as episodes:
        episodes.begin_line("rollout-1", 1)
        told: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        threading.Thread(target=lambda: [told.put(events) for events in episodes.events(1)], daemon=True).start()
        episodes.send([Start(1, s.plays[0], {}, 8), Start((1 << LINE_BITS) + 1, s.plays[1], {}, 8)])
        assert [event.number for event in next(episodes.events(0))] == [1]
        if not is_told:
            episodes.send([make_answer(1, 0, [5, 1], [-1.0, -1.0])])
            time.sleep(1.5)  # what it says of the moment before
        while not told.empty():
            told.get()
        time.sleep(2.5)
        assert (told.qsize() >= 2) == is_told
        assert all(not told.get() for _ in range(told.qsize()))
        episodes.begin_line("rollout-0", 2)  # the first engine was lost, and with it its episode
        event = next(event for events in iter(told.get, None) for event in events)
        assert event.number == (1 << LINE_BITS) + 1
        episodes.send([Start(2, s.plays[1], {}, 8)])
        assert not list(episodes.events(0)), "the lost engine, whose word came late, hears that its line has ended"
        assert not episodes.commands, "and its play, which nobody would answer, keeps no other from beginning"
        episodes.begin_line("rollout-1", 3)


def test_answers_that_nothing_asks_for_any_more_are_left_out(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "asks_for_ever", max_turns=2)
    [play] = s.plays
    with runner(s) as episodes:
        episodes.send([Start(1, play, {}, 8)])
        events = episodes.events(0)
        [first] = next(events)
        assert isinstance(first, Asked)
        other = [7, 1], [-1.0, -1.0]
        episodes.send([make_answer(1, 1, *other), make_answer(2, 0, *other), answer(first), answer(first)])
        [second] = next(events)
        assert isinstance(second, Asked)
        assert (second.turn, second.observation) == (1, first.observation)
        episodes.send([answer(second)])
        [ended] = next(events)
    assert isinstance(ended, Ended)
    texts = [message["content"] for message in ended.episode.messages if message["role"] == "assistant"]
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_an_ask_after_the_end_is_refused(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "asks_later", "tells_what_waited")
    with runner(s) as episodes:
        ended, _ = play(episodes, [Start(i, name, {}, 8) for i, name in enumerate(s.plays)])
    verdict = ended[1].episode.verdict
    assert verdict
    assert "ask was called after the episode had ended" in verdict.detail


def test_limits_of_turns_and_tokens_are_those_of_the_request_and_the_settings(tmp_path: Path, tiny_model: str) -> None:
    s = settings(tmp_path, tiny_model, "asks_for_ever", max_turns=99, max_tokens=7, window=64)
    with runner(s) as episodes:
        ended, asked = play(episodes, [Start(1, s.plays[0], {}, 5)])
        assert [a.max_tokens for a in asked] == [5, 4, 1]  # three tokens are written in each turn
        assert ended[1].finish == "tokens"


def test_many_episodes_wait_at_once_and_no_more_than_allowed_are_played(tmp_path: Path, tiny_model: str) -> None:
    (tmp_path / "sleepy.py").write_text(
        "import asyncio\nnow = most = 0\nasync def play(row, ask):\n    global now, most\n    now += 1\n"
        "    most = max(most, now)\n    await ask('1>')\n    await asyncio.sleep(0.2)\n    now -= 1\n    return most\n"
    )
    s = settings(tmp_path, tiny_model, concurrency=50)
    s = EpisodeSettings(**{**vars(s), "plays": (f"{tmp_path}/sleepy.py:play",)})
    with runner(s) as episodes:
        began = time.monotonic()
        ended, _ = play(episodes, [Start(i, s.plays[0], {}, 8) for i in range(200)])
        assert time.monotonic() - began < 0.25 * 200 * 0.2
    scores = [e.episode.verdict.score for e in ended.values() if e.episode.verdict]
    assert max(s for s in scores if s is not None) == 50


@pytest.mark.parametrize(
    ("names", "options", "sentence"),
    [
        (["plain"], {}, "must be written `async def plain(row, ask)`"),
        (["absent"], {}, "has no function `absent`"),
        (["play"], {"level": 3}, "unexpected keyword argument 'level'"),
    ],
)
def test_a_function_that_cannot_play_is_refused_at_the_start(
    tmp_path: Path, tiny_model: str, names: list[str], options: dict[str, Any], sentence: str
) -> None:
    with closing(EpisodeRunner(settings(tmp_path, tiny_model, *names, options=options))) as episodes:
        with pytest.raises(ConfigError, match=r"episode\.play") as error:
            episodes.ready.result()
        assert sentence in str(error.value)
