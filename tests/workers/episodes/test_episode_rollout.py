"""Episodes in real workers and processes, with a plain function in the place of the engines. Workers are killed."""

import heapq
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from loop_rollout import LoopRollout
from simulated_episodes import quiet_watchdog

from rlsys.config.schema import Config
from rlsys.errors import WorkerFailed
from rlsys.types import Episode, Prompt, Request, Sample
from workers.episodes.worker import EpisodeWorker, ray_options
from workers.fleet.process_registry import read_process_info
from workers.fleet.watchdog import Watchdog
from workers.start.worker_forkserver import MODELS, fork_command
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.messages import Answer, Asked, Drop, Ended, Event, Lost, Start
from workers.turns.pool import EpisodePool, Life
from workers.turns.turn_loop import TurnLoop

GAME = """
import asyncio, random

async def play(row, ask):
    luck = random.SystemRandom() if row["rolls"] else random.Random(row["seed"])
    for turn in range(luck.randint(1, 8)):
        await ask(f"{luck.randrange(100)}>" if turn else "1>")
        await asyncio.sleep(0.02)
    return 1.0
"""
EPISODES = 60
FIRST, LAST = 2, 11  # tokens of the tiny model that are digits


def write_turn(sequence: Sequence[int]) -> list[int]:
    """What the engine writes behind a sequence: two digits that depend on every token, and on their order."""
    value = sum(token * (place + 1) for place, token in enumerate(sequence))
    return [FIRST + value % 10, FIRST + value // 10 % 10]


class PlainEngines:
    """Each turn takes up to 40 ms."""

    def begin(self, requests: list[Request], more: Callable[[], bool]) -> "PlainEngines":
        assert not requests
        self.more, self.rng = more, random.Random(0)
        self.running: list[tuple[float, int, Request]] = []
        return self

    def run(self) -> Iterator[list[Sample]]:
        while self.running or self.more():
            time.sleep(0.005)
            finished = []
            while self.running and self.running[0][0] <= time.monotonic():
                request = heapq.heappop(self.running)[2]
                tokens = np.array(write_turn(request.tokens), dtype=np.int32)
                logprobs = np.zeros(2, dtype=np.float32)
                finished.append(Sample(request.uid, request.index, "", tokens, logprobs, "stop", 0, turn=request.turn))
            yield finished

    def add(self, request: Request) -> None:
        due = time.monotonic() + self.rng.uniform(0, 0.04)
        heapq.heappush(self.running, (due, id(request), request))

    def stop_early(self) -> None: ...


@pytest.fixture
def workers(
    ray: Any, session: Any, tiny: Callable[..., Config], tmp_path: Path, tiny_model: str
) -> Iterator[tuple[EpisodeWorkers, list[str]]]:
    """Two workers, and the names of those that are replaced."""
    game = tmp_path / "game.py"
    game.write_text(GAME)
    config = tiny(f"episode={{play: '{game}:play', workers: 2, window: 64}}", "reward.functions={}")
    replaced: list[str] = []

    def note(kind: str, **facts: Any) -> None:
        replaced.extend([facts["worker"]] if kind == "replaced" else [])

    def spawn(name: str) -> Any:
        environment = {"py_executable": fork_command(session.forkserver_dir, MODELS)}
        kind = ray.remote(num_cpus=0, runtime_env=environment, **ray_options(config))(EpisodeWorker)
        return kind.remote(config, int(name.split("-")[1]), str(tmp_path))

    started = EpisodeWorkers(config, spawn, Watchdog(tmp_path, event=note))
    started.start(tiny_model, 64)
    yield started, replaced
    for actor in started.workers.actors.values():
        ray.kill(actor)


def require_whole(sample: Sample) -> None:
    """Each turn continues all that is before it, and the transcript has what the environment said and was told."""
    assert sample.episode
    assert sample.episode.verdict
    assert sample.episode.verdict.score == 1.0, sample.episode.verdict
    assert len(sample.turns) == len(sample.episode.turn_scores)
    sequence: list[int] = []
    for observation, own in sample.turns:
        sequence += observation.tolist()
        assert own.tolist() == write_turn(sequence)
        sequence += own.tolist()
    written = "".join(message["content"] for message in sample.episode.messages)
    assert [FIRST + int(digit) for digit in written.replace(">", "")] == [t for t in sequence if FIRST <= t <= LAST]


@pytest.mark.long
@pytest.mark.parametrize("rolls", [False, True], ids=["fixed", "random"])
def test_every_killed_worker_and_process_is_replaced_and_every_episode_is_whole(
    workers: tuple[EpisodeWorkers, list[str]], tmp_path: Path, rolls: bool
) -> None:
    """A random game asks for something else when it is played again, or ends elsewhere."""
    episodes, replaced = workers
    pool = EpisodePool("rollout-0", 1, episodes.lives, Watchdog(tmp_path))
    rollout = LoopRollout(PlainEngines(), pool, pool.first_number, episodes)
    play = f"{tmp_path}/game.py:play"
    prompts = [Prompt(f"p{i}", "zigzag", "", [], {"rolls": rolls, "seed": i}, play=play) for i in range(EPISODES)]
    requests = [Request(p.uid, 0, [], i, 1.0, 8, prompt=p) for i, p in enumerate(prompts)]
    rng, killed = random.Random(1), []
    for round_number in range(4):
        victim, at = f"episode-{rng.randrange(2)}", rng.randrange(EPISODES)
        samples: list[Sample] = []
        for some in rollout.generate(requests):
            samples += some
            if len(samples) >= at and len(killed) == round_number:
                killed.append(victim)
                kill(victim, tmp_path, worker=round_number % 2 == 0)
        assert sorted(s.uid for s in samples) == sorted(r.uid for r in requests)
        for sample in samples:
            require_whole(sample)
    assert replaced == killed[::2]


def kill(name: str, logs: Path, worker: bool) -> None:
    info = read_process_info(name, logs)
    assert info
    process = psutil.Process(info.pid)
    for victim in [process] if worker else process.children(recursive=True):
        victim.kill()


# --- what crosses on the way between engine and worker ---------------------------------------------------------------


class Pool(EpisodePool):
    """Notes what is sent."""

    def __init__(self) -> None:
        super().__init__("rollout-0", 0, {"episode-0": Life(0, SimpleNamespace(inbox=[]))}, quiet_watchdog())
        self.news: list[Event] = []

    def poll(self) -> list[Event]:
        news, self.news = self.news, []
        return [event for event in news if self.note_event("episode-0", event)]

    def flush(self) -> None: ...

    def take(self, kind: type) -> list[Any]:
        return [command for command in self.outbox["episode-0"] if isinstance(command, kind)]


def open_loop(*events: Event) -> tuple[TurnLoop, Pool]:
    """An episode whose play has told of these events."""
    loop = TurnLoop(pool := Pool())
    loop.begin([Request("p0", 0, [], 5, 1.0, 8, prompt=Prompt("p0", "s", "", [], {}, play="f"))])
    exchange(loop, *events)
    return loop, pool


def exchange(loop: TurnLoop, *events: Event) -> None:
    loop.pool.news.extend(events)  # type: ignore[attr-defined]
    loop.exchange()


def wrote(turn: int = 0, finish: str = "stop") -> Sample:
    return Sample("p0", 0, "", np.array([4], dtype=np.int32), np.zeros(1, dtype=np.float32), finish, 0, turn=turn)


def test_a_new_worker_that_asks_for_what_engines_sample_gets_it() -> None:
    loop, pool = open_loop(Asked(1, 0, [7], -1, 8))
    assert len(loop.take_turns()) == 1
    exchange(loop, Lost(1))
    assert [start.number for start in pool.take(Start)] == [1, 2]
    exchange(loop, Asked(2, 0, [7], -1, 8))
    assert not loop.take_turns(), "it is being sampled"
    loop.accept([wrote()])
    assert [(a.number, a.asked, a.tokens.tolist()) for a in pool.take(Answer)] == [(2, 0, [4])]
    exchange(loop, Ended(2, "stop", Episode(None, [], []), (0,)))
    assert [sample.sequence.tolist() for sample in loop.take_finished()] == [[7, 4]]


@pytest.mark.parametrize("wanted", [False, True])
def test_log_probs_go_to_the_play_that_asks_for_them(wanted: bool) -> None:
    """Also to one that is played in place of another, which did not ask for them."""
    loop, pool = open_loop(Asked(1, 0, [7], -1, 8))
    loop.take_turns()
    loop.accept([wrote()])
    exchange(loop, Lost(1))
    exchange(loop, Asked(2, 0, [7], -1, 8, logprobs=wanted))
    first, second = pool.take(Answer)
    assert (first.logprobs, second.logprobs is not None) == (None, wanted)


def test_a_half_written_turn_is_no_beginning_of_an_earlier_one() -> None:
    """It was the third turn, and the episode asks for the same in place of its second when it goes on."""
    loop, _ = open_loop()
    for turn, finish in enumerate(("stop", "stop", "cut")):
        exchange(loop, Asked(1, turn, [7 + turn], turn - 1, 8))
        assert len(loop.take_turns()) == 1
        loop.accept([wrote(turn, finish)])
    loop.exchange()
    [begun] = loop.take_finished()
    assert begun.finish == "cut"
    loop.begin([Request("p0", 0, [], 5, 1.0, 8, prompt=Prompt("p0", "s", "", [], {}, play="f"), partial=begun)])
    for turn, observation in enumerate(([7], [9])):
        exchange(loop, Asked(2, turn, observation, turn - 1, 8))
    assert [(request.tokens.tolist(), request.partial) for request in loop.take_turns()] == [([7, 4, 9], None)]


def test_a_turn_of_an_episode_that_nobody_waits_for_is_no_turn_of_its_successor() -> None:
    """A caller goes away while a turn is sampled, and another one asks for the same episode."""
    loop, pool = open_loop(Asked(1, 0, [7], -1, 8))
    [first] = loop.take_turns()
    loop.begin([Request("p0", 0, [], 5, 1.0, 8, prompt=Prompt("p0", "s", "", [], {}, play="f"))])
    assert [command.number for command in pool.take(Drop)] == [1]
    exchange(loop, Asked(2, 0, [8], -1, 8))
    assert not loop.take_turns(), "the engine knows its turns by the same name"
    loop.accept([wrote()])
    assert not pool.take(Answer)
    [second] = loop.take_turns()
    assert (first.key, first.tokens.tolist(), second.tokens.tolist()) == (second.key, [7], [8])
    loop.accept([wrote()])
    assert [answer.number for answer in pool.take(Answer)] == [2]


def test_a_loss_that_is_noticed_after_the_episode_was_dropped_changes_nothing() -> None:
    loop, pool = open_loop(Asked(1, 0, [7], -1, 8))
    pool.use({"episode-0": Life(1, SimpleNamespace(inbox=[]))})  # another engine has noticed that the worker is lost
    loop.drop([("p0", 0)])
    pool.news, poll = [], EpisodePool.poll
    pool.poll = lambda: poll(pool)  # type: ignore[method-assign]
    loop.exchange()
    assert not loop.by_number


def test_turns_that_nobody_samples_end_the_run_with_a_sentence() -> None:
    """A defect that leaves an episode without anybody who owes it something must not become an endless wait."""
    loop, _ = open_loop(Asked(1, 0, [7], -1, 8))
    loop.to_sample.clear()
    with pytest.raises(WorkerFailed, match=r"1 episodes \(p0, …\) wait for turns that the engine does not sample"):
        loop.exchange()
