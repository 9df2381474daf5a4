"""What an engine does with its episodes, without its event loop: a turn loop, and what writes the turns."""

from collections.abc import Callable, Iterator
from typing import Protocol

from rlsys.types import Request, Sample
from workers.turns.episode_workers import EpisodeWorkers
from workers.turns.pool import EpisodePool
from workers.turns.turn_loop import TurnLoop


class Writer(Protocol):
    """Writes turns, and single answers."""

    def begin(self, requests: list[Request], more: Callable[[], bool]) -> object:
        """Takes the single answers. While `more()`, turns may be added."""
        ...

    def add(self, request: Request) -> None: ...

    def run(self) -> Iterator[list[Sample]]: ...

    def stop_early(self) -> None: ...


class LoopRollout:
    """`Rollout` of one engine, and of the driver, which replaces lost workers."""

    def __init__(self, writer: Writer, pool: EpisodePool, first_number: int = 0, workers: EpisodeWorkers | None = None):
        self.writer, self.loop, self.workers = writer, TurnLoop(pool, first_number), workers

    def generate(self, requests: list[Request]) -> Iterator[list[Sample]]:
        loop, writer = self.loop, self.writer
        writer.begin([r for r in requests if r.prompt is None], lambda: bool(loop.by_key))
        episodes = [r for r in requests if r.prompt is not None]
        try:
            loop.begin(episodes)
            for samples in writer.run():
                answers = [s for s in samples if s.key not in loop.sampled]
                loop.accept([s for s in samples if s.key in loop.sampled])
                loop.exchange()
                if self.workers and (lost := loop.pool.take_lost()):
                    self.workers.replace(lost)
                    loop.pool.use(self.workers.lives)
                for turn in loop.take_turns():
                    writer.add(turn)
                if finished := answers + loop.take_finished():
                    yield finished
            if finished := loop.take_finished():
                yield finished
        finally:
            loop.drop([(r.uid, r.index) for r in episodes])

    def stop_early(self) -> None:
        self.loop.stop_early()
        self.writer.stop_early()
