"""Episodes in `Generation`: which engine plays them, how many at a time, and what engines tell besides."""

import pickle
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plain_cluster import PlainCluster

from rlsys.errors import ConfigError, WorkerLost
from rlsys.types import Prompt, Request, Sample
from workers.fleet.cluster import CallFailed
from workers.fleet.watchdog import Watchdog
from workers.rollout.generation import Generation
from workers.turns.engine_episodes import Progress
from workers.turns.pool import LostLife


def requests(episodes: int, answers: int = 0) -> list[Request]:
    prompt = Prompt("played", "s", "", [1], {}, play="f")
    played = [Request("played", i, [1], i, 1.0, 4, prompt=prompt) for i in range(episodes)]
    return [*(Request("plain", i, [1], 0, 1.0, 4) for i in range(answers)), *played]


def sample(request: Request) -> Sample:
    return Sample(request.uid, request.index, "", np.array([5], np.int32), np.zeros(1, np.float32), "stop", 0)


class Engine:
    """Answers at once, and tells of the episodes that it is given what the test tells it to."""

    def __init__(self) -> None:
        self.given: queue.SimpleQueue[tuple[list[Request], queue.SimpleQueue[Any]]] = queue.SimpleQueue()

    def generate(self, pickled: bytes) -> Iterator[bytes]:
        for request in pickle.loads(pickled):
            assert request.prompt is None
            yield pickle.dumps([sample(request)])

    def play(self, pickled: bytes) -> Iterator[bytes]:
        line: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = pickle.loads(pickled)
        assert all(request.prompt for request in asked)
        self.given.put((asked, line))
        left = len(asked)
        while left:
            progress = line.get(timeout=20)
            if isinstance(progress, Exception):
                raise progress
            left -= len(progress.finished)
            yield pickle.dumps(progress)

    def stop_early(self) -> None: ...


class Run:
    """A generation on a thread. `engines` are by number."""

    def __init__(self, wanted: list[Request], folder: Path, engines: int = 1, max_running: int = 4):
        self.notes: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lost: list[LostLife] = []
        self.engines = [Engine() for _ in range(engines)]
        self.samples: list[Sample] = []
        self.error: BaseException | None = None
        workers: Any = SimpleNamespace(
            lock=threading.RLock(),
            actors={f"rollout-{i}": engine for i, engine in enumerate(self.engines)},
            under_way=[],
        )

        def replace(lost: Any, actors: Any) -> None:
            for name in lost:
                self.engines.append(Engine())
                workers.actors[name] = self.engines[-1]

        workers.replace = replace
        watchdog = Watchdog(folder, cluster=PlainCluster(), note=self.notes.append, event=self.note_event)  # type: ignore[arg-type]
        self.generation = Generation(wanted, workers, watchdog, max_running, self.lost.extend)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def note_event(self, kind: str, **facts: Any) -> None:
        self.events.append((kind, facts))

    def run(self) -> None:
        try:
            for samples in self.generation.run():
                self.samples += samples
        except BaseException as error:
            self.error = error

    def given(self, engine: int = 0) -> tuple[list[Request], "queue.SimpleQueue[Any]"]:
        return self.engines[engine].given.get(timeout=20)

    def end(self) -> list[tuple[str, int]]:
        self.thread.join(20)
        assert not self.thread.is_alive()
        if self.error:
            raise self.error
        return sorted((s.uid, s.index) for s in self.samples)


def test_others_begin_while_episodes_wait_for_their_environment_and_not_while_they_are_sampled(tmp_path: Path) -> None:
    run = Run(requests(episodes=13), tmp_path, max_running=4)
    first, line = run.given()
    assert len(first) == 5, "four, and a reserve of one"
    line.put(Progress(between_turns=3))
    second, second_line = run.given()
    assert len(second) == 3
    line.put(Progress(between_turns=8))
    third, third_line = run.given()
    assert len(third) == 5
    for asked, line_of_asked in ((first, line), (second, second_line), (third, third_line)):
        line_of_asked.put(Progress([sample(r) for r in asked]))
    assert run.end() == [("played", i) for i in range(13)]


def test_episodes_and_answers_of_one_list_reach_the_engine_as_what_they_are(tmp_path: Path) -> None:
    run = Run(requests(episodes=2, answers=3), tmp_path, max_running=16)
    asked, line = run.given()
    line.put(Progress([sample(r) for r in asked]))
    assert run.end() == [("plain", 0), ("plain", 1), ("plain", 2), ("played", 0), ("played", 1)]


def test_what_an_engine_tells_of_episode_workers_reaches_the_screen_the_events_and_who_replaces_them(
    tmp_path: Path,
) -> None:
    run = Run(requests(episodes=1), tmp_path)
    asked, line = run.given()
    life = LostLife("episode-1", 2, WorkerLost("it died"))
    line.put(Progress(lost=[life], events=[("stall", {"waiting_for": ["episode-1"]})], notes=["it stalled"]))
    line.put(Progress([sample(asked[0])]))
    run.end()
    assert [(lost.worker, lost.number, str(lost.error)) for lost in run.lost] == [("episode-1", 2, "it died")]
    assert run.notes == ["it stalled"]
    assert run.events == [("stall", {"waiting_for": ["episode-1"]})]


@pytest.mark.parametrize("error", [ConfigError("no such game"), WorkerLost("lost ten times")])
def test_what_ends_episodes_for_good_ends_the_run_as_it_is(tmp_path: Path, error: Exception) -> None:
    run = Run(requests(episodes=2), tmp_path)
    run.given()[1].put(Progress(error=error))
    with pytest.raises(type(error), match=str(error)):
        run.end()


def test_the_episodes_of_a_lost_engine_are_played_by_another(tmp_path: Path) -> None:
    run = Run(requests(episodes=5), tmp_path)
    asked, line = run.given()
    line.put(Progress([sample(asked[0])], between_turns=4))
    line.put(CallFailed("the engine died"))
    while len(run.engines) < 2:
        assert run.thread.is_alive()
    again, line = run.given(1)
    assert [r.key for r in again] == [r.key for r in asked[1:]]
    line.put(Progress([sample(r) for r in again]))
    assert run.end() == [("played", i) for i in range(5)]
