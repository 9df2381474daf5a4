"""Messages reach an episode worker in the order in which the engine sent them, and one about no episode changes nothing."""

import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated_episodes import World

from launch.cluster import Actors
from rlsys.config.schema import Config
from rlsys.types import NO_TOKENS
from workers.episodes.worker import EpisodeWorker, ray_options
from workers.fleet.watchdog import Watchdog
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.messages import Answer, Command, Drop, Start
from workers.turns.open_episode import NO_LOGPROBS
from workers.turns.pool import EpisodePool

GAME = """
async def play(row, ask):
    await ask("1>")
    return 1.0
"""


@pytest.fixture
def pool(session: Any, tiny: Callable[..., Config], tmp_path: Path, tiny_model: str) -> Iterator[EpisodePool]:
    """A pool of one worker, started as a run starts it."""
    game = tmp_path / "game.py"
    game.write_text(GAME)
    config = tiny(f"episode={{play: '{game}:play', workers: 1, window: 64}}", "reward.functions={}")
    actors = Actors(session, config, Watchdog(tmp_path))
    spawn = actors.make_spawner(EpisodeWorker, lambda name: ray_options(config), {})
    workers = EpisodeWorkers(config, spawn, Watchdog(tmp_path))
    workers.start(tiny_model, 64)
    yield EpisodePool("rollout-0", 0, workers.lives, Watchdog(tmp_path))
    actors.kill_all()


def run_in_worker(ray: Any, pool: EpisodePool, function: Callable[[Any], Any]) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    return ray.get(pool.lives.actors["episode-0"].__ray_call__.remote(function), timeout=120)


def record_commands(worker: Any) -> None:
    """Has the runner note the numbers of the commands that reach it, instead of playing."""
    worker.runner.numbers = []
    worker.runner.send = lambda commands: worker.runner.numbers.extend(command.number for command in commands)


def test_commands_arrive_in_the_order_in_which_they_were_sent(ray: Any, pool: EpisodePool) -> None:
    """While events stream, with lists large enough for the object store between small ones, and other calls between them."""
    run_in_worker(ray, pool, record_commands)
    row = {"text": "x" * 200_000}
    for number in range(6000):
        start: Command = Start(number, "play", row if number % 100 == 50 else {}, 8)
        pool.outbox["episode-0"] = [start if number % 2 else Drop(number)]
        pool.flush()
        if number % 1000 == 0:
            run_in_worker(ray, pool, lambda worker: None)
    deadline = time.monotonic() + 60
    while len(numbers := run_in_worker(ray, pool, lambda worker: worker.runner.numbers)) < 6000:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert numbers == list(range(6000))


def test_an_episode_that_is_dropped_at_once_leaves_nothing_in_its_worker(
    ray: Any, pool: EpisodePool, tmp_path: Path
) -> None:
    """A drop that overtook its start would leave an episode that waits for ever, and holds a place of `episode.concurrency`."""
    play = f"{tmp_path}/game.py:play"
    for number in range(1500):
        pool.begin(Start(number, play, {}, 8))
        pool.flush()
        pool.drop(number)
        pool.flush()
    pool.begin(Start(1500, play, {}, 8))
    pool.flush()
    deadline, events = time.monotonic() + 120, []
    while not events:
        events = [event for event in pool.poll() if event.number == 1500]
        assert time.monotonic() < deadline
        time.sleep(0.05)

    def left(worker: Any) -> list[int]:
        runner = worker.runner
        return sorted({*runner.playing, *(played.start.number for played in runner.waiting)})

    assert run_in_worker(ray, pool, left) == [1500]


def test_what_comes_about_an_episode_that_has_ended_changes_nothing() -> None:
    """Its end crosses the engine's last messages about it on the way."""
    world = World(0)
    worker = next(iter(world.workers.values()))
    worker.runner.send([Start(1, "same", {"play": "same", "seed": 1}, 8)])
    before = pickle.dumps([sorted(worker.runner.playing), len(worker.runner.waiting), worker.runner.outgoing])
    worker.runner.send([Drop(7), Answer(7, 0, NO_TOKENS, NO_LOGPROBS, "stop"), Drop(7)])
    assert pickle.dumps([sorted(worker.runner.playing), len(worker.runner.waiting), worker.runner.outgoing]) == before
    assert 7 not in worker.runner.process.rows
