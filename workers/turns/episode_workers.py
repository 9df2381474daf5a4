"""The driver's handle to the episode workers: it starts them, and replaces those that engines find lost."""

from collections.abc import Callable, Iterable
from typing import Any

from rlsys.config.schema import Config
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog
from workers.turns.pool import Life, LostLife


class EpisodeWorkers:
    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        names = [f"episode-{i}" for i in range(config.episode.workers)]
        self.workers = ReplaceableWorkers(names, spawn, watchdog)
        self.replaced = dict.fromkeys(names, 0)  # how many times

    def start(self, model: str, window: int) -> None:
        limit = self.config.cluster.start_timeout_s
        doing = "starting the episode workers"
        notes = self.workers.call("start", model, window, doing=doing, limit_s=limit, replay=True)
        for note in dict.fromkeys(note for of_worker in notes.values() for note in of_worker):
            self.watchdog.note(note)

    @property
    def lives(self) -> dict[str, Life]:
        return {name: Life(self.replaced[name], actor) for name, actor in self.workers.actors.items()}

    def replace(self, lost: Iterable[LostLife]) -> None:
        """Replaces lost workers, unless it has been done: each engine tells of a loss."""
        for life in lost:
            if life.number == self.replaced[life.worker]:
                self.workers.replace({life.worker: life.error}, self.workers.actors.copy())
                self.replaced[life.worker] += 1
