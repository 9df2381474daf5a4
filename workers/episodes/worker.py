"""An episode worker: the actor around a runner."""

import pickle
from collections.abc import Iterator
from typing import Any

from rlsys.config.schema import Config
from rlsys.episodes.settings import EpisodeSettings
from rlsys.runs.timeline import recorded
from workers.episodes.runner import EpisodeRunner
from workers.fleet.ray_cluster import concurrency_group
from workers.start.worker_setup import setup_worker_process


def ray_options(config: Config) -> dict[str, Any]:
    """Gives commands a thread: Ray promises the order of calls to a single thread only, and a `Drop` must not overtake its
    `Start`. And one for the events of each engine, and for that of a lost one, until it has ended."""
    return {"concurrency_groups": {"commands": 1, "events": 2 * config.rollout.engines}}


class EpisodeWorker:
    def __init__(self, config: Config, index: int, logs: str):
        setup_worker_process(f"episode-{index}", logs)
        self.settings = EpisodeSettings.from_config(config)
        self.runner: EpisodeRunner | None = None

    @recorded()
    def start(self, model: str, window: int) -> list[str]:
        """Waits until the functions are imported; raises what is wrong with them. Returns remarks."""
        self.runner = EpisodeRunner(self.settings.for_model(model, window))
        return list(self.runner.ready.result()["notes"])

    # Lists of messages travel pickled: Ray would look at each message by itself.

    @concurrency_group("commands")
    def send(self, commands: bytes) -> None:
        """Takes a pickled list of `Command`."""
        assert self.runner is not None
        self.runner.send(pickle.loads(commands))

    @concurrency_group("commands")
    def begin_line(self, engine: str, line: int) -> None:
        """From now on this process of the engine sends commands, and reads `events`. None of an earlier one does."""
        assert self.runner is not None
        self.runner.begin_line(engine, line)

    @concurrency_group("events")
    def events(self, line: int) -> Iterator[bytes]:
        """Yields pickled lists of `Event`: what episodes ask for, and how they end, as long as the line lasts."""
        assert self.runner is not None
        for events in self.runner.events(line):
            yield pickle.dumps(events)
