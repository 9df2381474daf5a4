"""An episode worker: the actor around a runner."""

import pickle
from collections.abc import Iterator

from rlsys.config.schema import Config
from rlsys.episodes.settings import EpisodeSettings
from rlsys.runs.timeline import recorded
from workers.episodes.runner import EpisodeRunner
from workers.fleet.ray_cluster import concurrency_group
from workers.start.worker_setup import setup_worker_process

# One thread each. Ray promises the order of calls to a single thread only: a `Drop` must not overtake its `Start`.
RAY_OPTIONS = {"concurrency_groups": {"commands": 1, "events": 1}}


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

    @concurrency_group("events")
    def events(self) -> Iterator[bytes]:
        """Yields pickled lists of `Event`: what episodes ask for, and how they end, as long as the worker lives."""
        assert self.runner is not None
        for events in self.runner.events():
            yield pickle.dumps(events)
