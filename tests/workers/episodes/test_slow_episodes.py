"""Many episodes of one process, in a real one: slow ones, ones that do not end, and kills that are nobody's fault."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from test_runner import answer, driver_of, episode_process, play, runner, settings

import workers.episodes.runner
from rlsys.episodes.settings import EpisodeSettings
from workers.episodes.runner import EpisodeRunner
from workers.turns.messages import Asked, Drop, Ended, Event, Start

GAMES = """
import asyncio, os, time
now = most = stubborn = 0

class Counted:
    def __enter__(self):
        global now, most
        now += 1
        most = max(most, now)
    def __exit__(self, *_):
        global now
        now -= 1

async def waits(row, ask):
    with Counted():
        await asyncio.sleep(row["seconds"])
    await ask("1>")
    return most

async def waits_in_a_thread(row, ask):
    with Counted():
        await asyncio.to_thread(time.sleep, row["seconds"])
    await ask("1>")
    return most

async def computes(row, ask):
    with Counted():
        for _ in range(10):
            end = time.monotonic() + 0.001
            while time.monotonic() < end:
                pass
            await asyncio.sleep(0)
    await ask("1>")
    return most

async def asks_from_a_thread(row, ask):
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(ask("1>"), loop).result())
    return 1.0

async def is_fast(row, ask):
    await ask("1>")
    return 1.0

async def is_stubborn(row, ask):
    global stubborn
    await ask("1>")
    stubborn += 1
    while True:
        try:
            await asyncio.sleep(0.1)
        except BaseException:
            pass

async def cleans_up(row, ask):
    try:
        await ask("1>")
        await asyncio.sleep(row["seconds"])
    finally:
        await asyncio.sleep(0.3)
    return 1.0

async def tells_who_is_stubborn(row, ask):
    await ask("1>")
    return stubborn

async def takes_its_time(row, ask):
    for turn in range(row["turns"]):
        await ask("1>")
        with open(row["mark"] + "_", "w") as file:
            print(os.getpid(), turn, file=file)
        os.replace(row["mark"] + "_", row["mark"])
        await asyncio.sleep(row["seconds"])
    return 1.0

async def kills_itself(row, ask):
    await ask("1>")
    await ask("1>")
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def games(tmp_path: Path, tiny_model: str) -> EpisodeSettings:
    (tmp_path / "slow.py").write_text(GAMES)
    plays = tuple(f"{tmp_path}/slow.py:{name}" for name in re.findall(r"async def (\w+)\(row", GAMES))
    values = vars(settings(tmp_path, tiny_model, step_timeout_s=20.0, concurrency=256))
    return EpisodeSettings(**values | {"plays": plays})


def named(s: EpisodeSettings, name: str) -> str:
    [found] = [play for play in s.plays if play.endswith(f":{name}")]
    return found


def scores(ended: dict[int, Ended]) -> dict[int, float | None]:
    return {number: e.episode.verdict and e.episode.verdict.score for number, e in ended.items()}


def answered(episodes: EpisodeRunner) -> Iterator[Event]:
    """Answers each ask, and goes on while there are events."""
    for events in episodes.events(0):
        episodes.send([answer(event) for event in events if isinstance(event, Asked)])
        yield from events
    raise AssertionError


@pytest.mark.parametrize("slow", ["waits", "waits_in_a_thread"])
def test_slow_episodes_keep_fast_ones_from_nothing(games: EpisodeSettings, slow: str) -> None:
    starts = [Start(i, named(games, slow), {"seconds": 2.0}, 8) for i in range(128)]
    starts += [Start(1000 + i, named(games, "is_fast"), {}, 8) for i in range(10)]
    with runner(games) as episodes:
        ended, asked = play(episodes, starts)
    assert {a.number for a in asked[:10]} == {1000 + i for i in range(10)}
    if slow == "waits":
        assert max(score or 0 for score in scores(ended).values()) == 128, "all of them at once"


def test_not_more_compute_at_once_than_the_loop_bears(games: EpisodeSettings) -> None:
    with runner(games) as episodes:
        ended, _ = play(episodes, [Start(i, named(games, "computes"), {}, 8) for i in range(200)])
    assert max(score or 0 for score in scores(ended).values()) <= 64
    assert len(ended) == 200


@pytest.mark.long
def test_a_dropped_episode_that_does_not_end_is_ended_and_others_are_played_again(
    games: EpisodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers.episodes.runner, "DROP_S", 1.0)
    with runner(games) as episodes:
        driver, process = driver_of(episodes), episode_process()
        driver.begin([Start(i, named(games, "is_stubborn"), {}, 8) for i in range(20)])
        row = {"turns": 1, "seconds": 4.0, "mark": f"{tmp_path}/mark"}
        driver.begin([Start(100, named(games, "takes_its_time"), row, 8)])
        numbers = [driver.next().number for _ in range(21)]
        assert len(set(numbers)) == 21
        time.sleep(0.5)
        episodes.send([Drop(i) for i in range(20)])
        event = driver.next()
        assert isinstance(event, Ended)
        assert scores({event.number: event}) == {100: 1.0}
        assert not process.is_running()
        ended, _ = play(episodes, [Start(200, named(games, "tells_who_is_stubborn"), {}, 8)])
        assert scores(ended) == {200: 0.0}


def test_episodes_may_clean_up_when_they_are_dropped_at_any_moment(games: EpisodeSettings) -> None:
    """Some end just when they are dropped: their messages cross."""
    with runner(games) as episodes:
        events = answered(episodes)
        process = episode_process()
        starts = [Start(i, named(games, "cleans_up"), {"seconds": i / 100}, 8) for i in range(100)]
        episodes.send([*starts, Start(100, named(games, "waits"), {"seconds": 3.0}, 8)])
        while not isinstance(next(events), Ended):
            pass
        for i in range(100):
            episodes.send([Drop(i)])
            time.sleep(0.005)
        while not isinstance(event := next(events), Ended) or event.number != 100:
            pass
        assert not episodes.dropped
        assert process.is_running(), "none was taken for one that does not end"


@pytest.mark.parametrize(("turns", "kills_of_each"), [(4, 1), (1, 4), pytest.param(3, 2, marks=pytest.mark.long)])
def test_kills_from_outside_are_not_the_fault_of_an_episode(
    games: EpisodeSettings, tmp_path: Path, turns: int, kills_of_each: int
) -> None:
    mark = tmp_path / "mark"
    row = {"turns": turns, "seconds": 1.0, "mark": str(mark)}
    with runner(games) as episodes:
        driver = driver_of(episodes)
        driver.begin([Start(1, named(games, "takes_its_time"), row, 8)])
        asked, killed = [], ""
        while isinstance(event := driver.next(), Asked):
            asked.append(event.turn)
            for _ in range(kills_of_each):
                while mark.exists() and mark.read_text() == killed:
                    time.sleep(0.01)
                while not mark.exists() or not mark.read_text().endswith(f" {event.turn}\n"):
                    time.sleep(0.01)
                killed = mark.read_text()
                os.kill(int(killed.split()[0]), signal.SIGKILL)
    assert scores({1: event}) == {1: 1.0}, event.episode.verdict
    assert asked == [*range(turns)], "no turn was sampled again"


def test_an_episode_that_kills_its_process_fails_in_the_end(games: EpisodeSettings) -> None:
    with runner(games) as episodes:
        starts = [Start(1, named(games, "kills_itself"), {}, 8), Start(2, named(games, "is_fast"), {}, 8)]
        ended, asked = play(episodes, starts)
    assert scores(ended)[2] == 1.0
    verdict = ended[1].episode.verdict
    assert verdict
    assert (verdict.failure, verdict.detail) == ("crash", "the episode process ended: killed by SIGKILL, after turn 2")
    assert len(asked) == 3


def test_a_process_that_begins_nothing_is_replaced(games: EpisodeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.episodes.runner, "SILENCE_LIMIT_S", 2.0)
    with runner(games) as episodes:
        process = episode_process()
        process.send_signal(signal.SIGSTOP)
        ended, _ = play(episodes, [Start(1, named(games, "is_fast"), {}, 8)])
        assert scores(ended) == {1: 1.0}
        assert not psutil.pid_exists(process.pid)


def test_steps_of_dropped_episodes_keep_no_other_from_beginning(games: EpisodeSettings) -> None:
    few = EpisodeSettings(**vars(games) | {"concurrency": 8})
    with runner(few) as episodes:
        process = episode_process()
        episodes.send([Start(i, named(few, "waits_in_a_thread"), {"seconds": 5.0}, 8) for i in range(3)])
        wait_until(lambda: len(episodes.working) == 3)
        time.sleep(0.2)
        episodes.send([Drop(i) for i in range(3)])
        began = time.monotonic()
        ended, _ = play(episodes, [Start(10 + i, named(few, "is_fast"), {}, 8) for i in range(6)])
        assert time.monotonic() - began < 4
        assert len(ended) == 6
        assert process.is_running()


def test_a_process_whose_episodes_all_wait_for_a_turn_is_not_replaced(
    games: EpisodeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps a thread, so that the last one cannot begin."""
    monkeypatch.setattr(workers.episodes.runner, "SILENCE_LIMIT_S", 1.0)
    few = EpisodeSettings(**vars(games) | {"concurrency": 3})
    with runner(few) as episodes:
        process, events = episode_process(), episodes.events(0)
        episodes.send([Start(i, named(few, "asks_from_a_thread"), {}, 8) for i in range(3)])
        asked: list[Event] = []
        while len(asked) < 3:
            asked += next(events)
        time.sleep(3)
        assert process.is_running()
        episodes.send([answer(event) for event in asked])
        ended: list[Event] = []
        while len(ended) < 3:
            ended += next(events)
    assert scores({e.number: e for e in ended if isinstance(e, Ended)}) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_an_episode_that_cannot_begin_fails_alone(games: EpisodeSettings, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from rlsys.episodes.asking import EpisodeAsk\n"
        "begin, count = EpisodeAsk.__init__, 0\n"
        "def once(self, *given, **named):\n    global count\n    count += 1\n    if count == 2: raise ValueError('no room')\n    begin(self, *given, **named)\n"
        "EpisodeAsk.__init__ = once\nasync def play(row, ask):\n    await ask('1>')\n    return 1.0\n"
    )
    broken = EpisodeSettings(**vars(games) | {"plays": (f"{tmp_path}/broken.py:play",)})
    with runner(broken) as episodes:
        ended, _ = play(episodes, [Start(i, broken.plays[0], {}, 8) for i in range(4)])
    assert scores(ended) == {0: 1.0, 1: None, 2: 1.0, 3: 1.0}
    verdict = ended[1].episode.verdict
    assert verdict
    assert "the episode cannot begin: ValueError: no room" in verdict.detail


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
