"""How many engines a request may lose, with `Generation` on engines that die at once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayActorError

from rlsys.runs.errors import WorkerLost
from rlsys.types import Request, Sample
from workers.rollout import engine_streams
from workers.rollout.generation import Generation
from workers.supervision.watchdog import Watchdog


class Engine:
    """Answers its first request, unless it dies of it."""

    def __init__(self, dies: bool):
        self.generate = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.stream))
        self.dies = dies

    def stream(self, requests: bytes) -> Iterator[bytes]:
        for request in engine_streams.pickle.loads(requests):
            if self.dies:
                raise RayActorError(error_msg="the engine died")
            tokens, logprobs = np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32)
            sample = Sample(request.uid, request.index, "", tokens, logprobs, "stop", 0)
            yield engine_streams.pickle.dumps([sample])


def generate_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deaths: list[int]) -> int:
    """One episode: `deaths` engines die of each of its turns. Returns the number of turns that were sampled."""
    monkeypatch.setattr(engine_streams.ray, "get", lambda ref: ref)
    left = [dies for count in deaths for dies in [True] * count + [False]]
    engines: Any = SimpleNamespace(lock=threading.RLock(), actors={"rollout-0": Engine(left[0])})

    def replace(lost: Any, actors: Any) -> None:
        left.pop(0)
        engines.actors["rollout-0"] = Engine(left[0])

    engines.replace = replace
    turns = 0
    generation = Generation([], engines, Watchdog(tmp_path), 8, lambda: float(turns < len(deaths)))
    generation.add(Request("p", 0, [1], 0, 1.0, 8))
    for samples in generation.run():
        for _ in samples:
            turns += 1
            left.pop(0)
            if turns < len(deaths):
                engines.actors["rollout-0"].dies = left[0]
                generation.add(Request("p", 0, [1] * (turns + 1), 0, 1.0, 8))
    return turns


def test_each_turn_of_an_episode_may_lose_two_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert generate_turns(monkeypatch, tmp_path, [2, 2, 0, 1]) == 4


def test_a_turn_that_loses_three_engines_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(WorkerLost):
        generate_turns(monkeypatch, tmp_path, [1, 3])
