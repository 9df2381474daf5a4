"""The driver's handle to all frozen engines: it starts them, and replaces those that are lost. No question passes here."""

from collections.abc import Callable
from typing import Any

from rlsys.config.schema import Config
from rlsys.errors import StepAbandoned, WorkerLost
from rlsys.rewards.asking import engine_name
from workers.fleet.replaceable_workers import ReplaceableWorkers
from workers.fleet.watchdog import Watchdog


class FrozenEngines:
    """Consumes heartbeats; a lost engine is replaced by a thread, and reward functions ask the replacement again."""

    def __init__(self, config: Config, spawn: Callable[[str], Any], watchdog: Watchdog):
        self.config, self.watchdog = config, watchdog
        names = [engine_name(model, i) for model, m in config.models.items() for i in range(m.engines)]
        for file in watchdog.logs.glob("model-*.address"):  # of a driver that was killed
            file.unlink()
        self.workers = ReplaceableWorkers(names, spawn, watchdog)

    def start(self, paths: dict[str, str]) -> None:
        limit = self.config.cluster.start_timeout_s
        self.workers.call("start", paths, doing="starting the frozen engines", limit_s=limit, replay=True)
        self.watchdog.threads.start(self.replace_lost, "replace frozen engines")

    def replace_lost(self) -> None:
        """Ends with the run. If an engine cannot be replaced, all waits of the run end with the reason."""
        try:
            while True:
                self.watchdog.stop.raise_if_stopped()
                actors = dict(self.workers.actors)
                calls = {name: self.watchdog.cluster.call(actor, "heartbeat") for name, actor in actors.items()}
                for name, answer in self.watchdog.outcomes(calls, "answering reward functions"):
                    if isinstance(answer, WorkerLost):
                        self.workers.replace({name: answer}, actors)
                    elif isinstance(answer, Exception):
                        raise answer
        except StepAbandoned:
            return
        except Exception as error:
            self.watchdog.stop.mark_lost(str(error))
