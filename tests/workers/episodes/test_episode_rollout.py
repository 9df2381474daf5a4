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
from simulated_episodes import quiet_watchdog

from rlsys.config.schema import Config
from rlsys.types import Episode, Prompt, Request, Sample
from workers.episodes.episode_rollout import EpisodeRollout, OpenEpisode
from workers.episodes.messages import Asked, Ended, Lost
from workers.episodes.pool import EpisodePool
from workers.episodes.worker import RAY_OPTIONS, EpisodeWorker
from workers.fleet.process_registry import read_process_info
from workers.fleet.watchdog import Watchdog
from workers.start.worker_forkserver import MODELS, fork_command

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
    """Stands for the engines, and for a `Generation` of theirs: each turn takes up to 40 ms."""

    waiting_count = 0

    def pending_samples(self) -> set[tuple[str, int]]:
        return {(request.uid, request.index) for _, _, request in self.running}

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
                finished.append(Sample(request.uid, request.index, "", tokens, logprobs, "stop", 0))
            yield finished

    def add(self, request: Request) -> None:
        due = time.monotonic() + self.rng.uniform(0, 0.04)
        heapq.heappush(self.running, (due, id(request), request))

    def wake(self) -> None:
        pass


@pytest.fixture
def pool(
    ray: Any, session: Any, tiny: Callable[..., Config], tmp_path: Path, tiny_model: str
) -> Iterator[tuple[EpisodePool, list[str]]]:
    """Two workers, and the names of those that are replaced."""
    game = tmp_path / "game.py"
    game.write_text(GAME)
    config = tiny(f"episode={{play: '{game}:play', workers: 2, window: 64}}", "reward.functions={}")
    replaced: list[str] = []

    def note(kind: str, **facts: Any) -> None:
        replaced.extend([facts["worker"]] if kind == "replaced" else [])

    def spawn(name: str) -> Any:
        environment = {"py_executable": fork_command(session.forkserver_dir, MODELS)}
        kind = ray.remote(num_cpus=0, runtime_env=environment, **RAY_OPTIONS)(EpisodeWorker)
        return kind.remote(config, int(name.split("-")[1]), str(tmp_path))

    started = EpisodePool(config, spawn, Watchdog(tmp_path, event=note))
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


@pytest.mark.parametrize("rolls", [False, True], ids=["fixed", "random"])
def test_every_killed_worker_and_process_is_replaced_and_every_episode_is_whole(
    pool: tuple[EpisodePool, list[str]], tmp_path: Path, rolls: bool
) -> None:
    """A random game asks for something else when it is played again, or ends elsewhere."""
    episodes, replaced = pool
    rollout = EpisodeRollout(PlainEngines(), episodes)  # type: ignore[arg-type]
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
    for victim in [process] if worker else process.children():
        victim.kill()


# --- what crosses on the way between driver and worker ---------------------------------------------------------------


def open_rollout() -> tuple[EpisodeRollout, OpenEpisode, list[Request]]:
    """An episode that engines sample the first turn of."""
    rollout = EpisodeRollout(None, None)  # type: ignore[arg-type]
    prompt = Prompt("p0", "s", "", [], {}, play="f")
    episode = OpenEpisode(Request("p0", 0, [], 5, 1.0, 8, prompt=prompt), number=1)
    rollout.by_number[1] = rollout.by_key["p0", 0] = episode
    rollout.last_number = 1
    requests: list[Request] = []
    rollout.on_event(Asked(1, 0, [7], 8), SimpleNamespace(add=requests.append))  # type: ignore[arg-type]
    return rollout, episode, requests


def test_a_new_worker_that_asks_for_what_engines_sample_gets_it() -> None:
    rollout, episode, requests = open_rollout()
    answers: list[Any] = []
    starts: list[Any] = []
    rollout.pool = SimpleNamespace(answer=answers.append, begin=starts.append)  # type: ignore[assignment]
    rollout.on_event(Lost(1), None)  # type: ignore[arg-type]
    assert [start.number for start in starts] == [2]
    rollout.on_event(Asked(2, 0, [7], 8), None)  # type: ignore[arg-type]
    turn = Sample("p0", 0, "", np.array([4], dtype=np.int32), np.zeros(1, dtype=np.float32), "stop", 0)
    rollout.accept([turn], None)  # type: ignore[arg-type]
    assert len(requests) == 1
    assert [(a.number, a.index, a.turn.tokens) for a in answers] == [(2, 0, [4])]
    assert episode.sample("stop").sequence.tolist() == [7, 4]


def test_a_half_written_turn_is_no_beginning_of_an_earlier_one() -> None:
    """It was the third turn, and the episode asks for the same in place of its second."""
    rollout, episode = EpisodeRollout(None, None), OpenEpisode(Request("p0", 0, [], 5, 1.0, 8), number=1)  # type: ignore[arg-type]
    rollout.by_number[1] = episode
    turn = Sample("p0", 0, "", np.array([4], dtype=np.int32), np.zeros(1, dtype=np.float32), "stop", 0)
    episode.turns, episode.tokens, episode.begun = [([7], turn), ([8], turn)], [7, 4, 8, 4], ([9], turn)
    requests: list[Request] = []
    rollout.on_event(Asked(1, 1, [9], 8), SimpleNamespace(add=requests.append))  # type: ignore[arg-type]
    assert [(request.tokens, request.partial) for request in requests] == [([7, 4, 9], None)]


def test_an_error_is_not_hidden_by_episodes_that_have_ended_meanwhile() -> None:
    class Pool(EpisodePool):
        def __init__(self) -> None:
            config: Any = SimpleNamespace(episode=SimpleNamespace(workers=1))
            super().__init__(config, lambda name: name, quiet_watchdog())

        def poll(self) -> list[Any]:
            ends = [Ended(number, "stop", Episode(None, [], []), 0) for number in (1, 2)]
            return [event for event in ends if self.note_event("episode-0", event)]

        def flush(self) -> None:
            pass

    class Broken(EpisodeRollout):
        def on_event(self, event: Any, generation: Any) -> None:
            raise ValueError("the first error")

    requests = [Request("p0", i, [], i, 1.0, 8, prompt=Prompt("p0", "x", "", [], {}, play="f")) for i in range(2)]
    with pytest.raises(ValueError, match="the first error"):
        list(Broken(PlainEngines(), Pool()).generate(requests))  # type: ignore[arg-type]
