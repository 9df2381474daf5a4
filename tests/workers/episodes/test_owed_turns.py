"""Turns whose engine is lost, with EpisodeRollout and Generation on an engine that dies when the test says so."""

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_cluster import PlainCluster

from rlsys.errors import WorkerFailed
from rlsys.types import Prompt, Request, Sample
from workers.episodes.episode_rollout import EpisodeRollout
from workers.episodes.messages import Asked
from workers.fleet.cluster import CallFailed
from workers.fleet.watchdog import Watchdog
from workers.rollout.generation import Generation

PATIENCE_S = 20


class Engine:
    """Answers requests without an episode at once. It dies of the others: when it is told to stop early, or before."""

    def __init__(self, told_to_stop: threading.Event):
        self.told_to_stop = told_to_stop
        self.stop_early = told_to_stop.set

    def generate(self, requests: bytes) -> Iterator[bytes]:
        for request in pickle.loads(requests):
            if request.uid == "played":
                self.told_to_stop.wait(PATIENCE_S)
                raise CallFailed("the engine died")
            tokens, logprobs = np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32)
            yield pickle.dumps([Sample(request.uid, request.index, "", tokens, logprobs, "stop", 0)])


class Pool:
    """Each episode asks for its first turn as soon as it begins."""

    def __init__(self) -> None:
        self.asks: list[Asked] = []

    def begin(self, start: Any) -> None:
        self.asks.append(Asked(start.number, 0, [7], 4))

    def poll(self) -> list[Asked]:
        asks, self.asks = self.asks, []
        return asks

    def flush(self) -> None: ...
    def on_arrival(self, wake: Any) -> None: ...
    def drop(self, number: int) -> None: ...


@pytest.fixture
def rollout(tmp_path: Path) -> EpisodeRollout:
    told_to_stop = threading.Event()
    engines: Any = SimpleNamespace(lock=threading.RLock(), actors={"rollout-0": Engine(told_to_stop)})
    engines.replace = lambda lost, actors: engines.actors.update({"rollout-0": Engine(told_to_stop)})

    class Group:
        def begin(self, requests: list[Request], more: Any) -> Generation:
            self.generation = Generation(requests, engines, Watchdog(tmp_path, cluster=PlainCluster()), 8, more)
            return self.generation

        def stop_early(self) -> None:
            self.generation.stop_early()

    group: Any = Group()
    pool: Any = Pool()
    return EpisodeRollout(group, pool)


def requests(episodes: int) -> list[Request]:
    prompt = Prompt("played", "s", "", [1], {}, play="f")
    played = [Request("played", i, [1], i, 1.0, 4, prompt=prompt) for i in range(episodes)]
    return [Request("plain", 0, [1], 0, 1.0, 4), *played]


def generate_until_stopped(rollout: EpisodeRollout, episodes: int) -> list[Sample]:
    """Stops early as soon as an engine has the turns of all episodes. Fails if that takes for ever."""
    samples: list[Sample] = []
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            for more in rollout.generate(requests(episodes)):
                samples.extend(more)
                rollout.stop_early()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), f"it waits for {[e.key for e in rollout.by_number.values()]}"
    for error in errors:
        raise error
    return samples


@pytest.mark.parametrize("episodes", [1, 3])
def test_an_engine_that_is_lost_after_a_stop_holds_up_no_episode(rollout: EpisodeRollout, episodes: int) -> None:
    assert [(s.uid, s.finish) for s in generate_until_stopped(rollout, episodes)] == [("plain", "stop")]
    assert not rollout.by_number


def test_turns_that_nobody_samples_end_the_run_with_a_sentence(
    rollout: EpisodeRollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect that leaves an episode without anybody who owes it something must not become an endless wait."""
    monkeypatch.setattr(rollout, "stop_idle", lambda generation: None)
    with pytest.raises(WorkerFailed, match=r"2 episodes \(played, …\) wait for turns that no engine samples"):
        generate_until_stopped(rollout, 2)
