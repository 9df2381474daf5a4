"""What an engine tells the driver of its episodes, and how much it sends to whom. Episode workers are objects of the test."""

import itertools
import pickle
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.tools.estimates.virtual_time import VirtualTime
from rlsys.types import Episode, Prompt, Request, Sample, Verdict
from workers.fleet.cluster import CallFailed, Receive
from workers.fleet.watchdog import Watchdog
from workers.turns.engine_episodes import EngineEpisodes, Progress
from workers.turns.messages import Answer, Asked, Ended, Event, Start
from workers.turns.pool import Life

STALL_S = 100.0


class Worker:
    """Its plays have as many turns as their rows say, and tell `observation` tokens before each."""

    def __init__(self) -> None:
        self.turns: dict[int, int] = {}  # left, by play
        self.observation = 1
        self.patience_s = 0.0  # of each play, before each ask and its end
        self.lines: list[int] = []

    def handle(self, command: Any) -> list[Event]:
        if isinstance(command, Start):
            self.turns[command.number] = command.row["turns"]
        elif not isinstance(command, Answer):
            return []
        number, left = command.number, self.turns[command.number]
        self.turns[number] -= 1
        if not left:
            return [Ended(number, "stop", Episode(Verdict(1.0), [], []), None)]
        turn = command.asked + 1 if isinstance(command, Answer) else 0
        return [Asked(number, turn, [7] * self.observation, turn - 1, 8)]


class Cluster:
    """Messages to and from workers take no time, and their bytes are counted."""

    def __init__(self, time: VirtualTime):
        self.time, self.receive = time, dict[Worker, Receive]()
        self.messages, self.bytes = Counter[str](), Counter[str]()

    def stream(self, actor: Worker, method: str, line: int, receive: Receive) -> None:
        self.receive[actor] = receive

    def tell(self, actor: Worker, method: str, *arguments: Any) -> None:
        if method == "begin_line":
            return actor.lines.append(arguments[1])
        self.count("to workers", arguments[0])
        events = [event for command in pickle.loads(arguments[0]) for event in actor.handle(command)]
        if events:
            self.time.after(actor.patience_s, lambda: self.report(actor, events))

    def report(self, actor: Worker, events: list[Event]) -> None:
        self.count("to engine", sent := pickle.dumps(events))
        self.receive[actor](sent)

    def count(self, way: str, sent: bytes) -> None:
        self.messages[way] += 1
        self.bytes[way] += len(sent)


class Engine:
    """Writes turns of `length` tokens, `turn_s` after it is asked."""

    def __init__(self, length: int = 3, turn_s: float = 0.05):
        self.length, self.turn_s, self.time, self.worker = length, turn_s, VirtualTime(), Worker()
        self.cluster = Cluster(self.time)
        watchdog = Watchdog(Path("/nonexistent"), STALL_S, cluster=self.cluster, threads=self.time)  # type: ignore[arg-type]
        self.episodes = EngineEpisodes("rollout-0", 1, watchdog, lambda: None)
        self.episodes.use({"episode-0": Life(0, self.worker)})
        self.reports: deque[tuple[float, Progress]] = deque()

    def play(self, episodes: int, turns: int) -> list[tuple[float, Progress]]:
        prompt = Prompt("p", "s", "", [], {"turns": turns}, play="f")
        requests = [Request("p", i, [3] * 5, i, 1.0, 8, prompt=prompt) for i in range(episodes)]
        self.time.run(lambda: self.play_until_done(requests))
        return list(self.reports)

    def play_until_done(self, requests: list[Request]) -> None:
        self.episodes.begin(requests, lambda progress: self.reports.append((self.time.now(), progress)))
        while self.episodes.is_open:
            for turn in self.episodes.exchange():
                self.time.after(self.turn_s, lambda turn=turn: self.episodes.accept([self.write(turn)]))
            self.time.sleep(max(self.episodes.batching_s, 0.01))

    def write(self, turn: Request) -> Sample:
        tokens, logprobs = np.full(self.length, 5, np.int32), np.zeros(self.length, np.float32)
        return Sample(turn.uid, turn.index, "", tokens, logprobs, "stop", 0, turn=turn.turn)


def gaps(reports: list[tuple[float, Progress]], end: float) -> Iterator[float]:
    times = [0.0, *(at for at, _ in reports), end]
    return (after - before for before, after in itertools.pairwise(times))


def test_the_driver_hears_of_an_engine_whose_episodes_all_wait_for_their_environment() -> None:
    """It would take it for stalled."""
    engine = Engine()
    engine.worker.patience_s = 10 * STALL_S
    engine.episodes.loop.pool.watchdog.stall_s = 1e9
    for timer in engine.episodes.loop.pool.pool.timers.values():
        timer.limit_s = 1e9
    reports = engine.play(episodes=3, turns=2)
    assert max(gaps(reports, engine.time.now())) < STALL_S / 2
    assert len(reports) > 100


def test_it_hears_nothing_of_an_engine_that_owes_a_turn_and_writes_none() -> None:
    engine = Engine(turn_s=3 * STALL_S)
    reports = engine.play(episodes=3, turns=1)
    assert max(gaps(reports, engine.time.now())) > 2 * STALL_S


def test_it_hears_how_many_others_may_begin_meanwhile() -> None:
    engine = Engine()
    engine.worker.patience_s = 1.0
    between = [progress.between_turns for _, progress in engine.play(episodes=8, turns=2)]
    assert {0, 8} <= set(between)
    assert all(0 <= count <= 8 for count in between)


def test_a_worker_that_says_nothing_is_to_be_replaced_and_another_plays_its_episodes() -> None:
    engine = Engine()
    silent, other, lost = engine.worker, Worker(), []
    silent.patience_s = 1e9

    def replace() -> None:
        lost.extend(life for _, progress in engine.reports for life in progress.lost)
        if lost:
            engine.episodes.use({"episode-0": Life(1, other)})
        else:
            engine.time.after(1.0, replace)

    engine.time.after(0.0, replace)
    reports = engine.play(episodes=4, turns=3)
    [life] = lost
    assert (life.worker, life.number) == ("episode-0", 0)
    assert "episode-0 stalled" in str(life.error)
    assert [kind for _, progress in reports for kind, _ in progress.events] == ["stall"]
    finished = [sample for _, progress in reports for sample in progress.finished]
    assert sorted(sample.index for sample in finished) == list(range(4))
    assert all(sample.turn_count == 3 for sample in finished)
    assert other.lines == [1]


def test_a_worker_whose_process_dies_is_told_of_at_once() -> None:
    engine = Engine()
    engine.worker.patience_s = 1e9
    engine.time.after(5.0, lambda: engine.cluster.receive[engine.worker](CallFailed("the actor died")))
    engine.time.after(8.0, lambda: engine.episodes.use({"episode-0": Life(1, Worker())}))
    reports = engine.play(episodes=2, turns=1)
    [(at, life)] = [(at, life) for at, progress in reports for life in progress.lost]
    assert 5.0 <= at < 6.0
    assert "died" in str(life.error)
    assert sum(len(progress.finished) for _, progress in reports) == 2


@pytest.mark.parametrize("length", [4, 64, 256])
def test_a_turn_sends_only_what_is_new_and_the_driver_gets_whole_episodes(length: int) -> None:
    """256 episodes of 8 turns: for the driver no more messages and bytes than single answers as long."""
    engine = Engine(length)
    engine.worker.observation = 3
    reports = engine.play(episodes=256, turns=8)
    finished = [sample for _, progress in reports for sample in progress.finished]
    assert [sample.turn_count for sample in finished] == [8] * 256
    turns = 256 * 8
    assert engine.cluster.bytes["to workers"] < turns * (4 * length + 120)
    assert engine.cluster.bytes["to engine"] < turns * 80
    assert sum(engine.cluster.messages.values()) < 30
    answers = [
        Sample("p", i, "", np.zeros(8 * length, np.int32), np.zeros(8 * length, np.float32), "stop", 0)
        for i in range(256)
    ]
    assert len(reports) < 20
    to_driver = sum(len(pickle.dumps(progress)) for _, progress in reports)
    assert to_driver < 1.1 * len(pickle.dumps(answers)) + 256 * 600
