"""A worker that answers, raises, dies or hangs when it is asked to, and a watchdog that keeps what it reports."""

import os
import time
from pathlib import Path
from typing import Any

from rlsys.config.schema import Config
from workers.fleet.watchdog import Watchdog
from workers.start.worker_setup import setup_worker_process


class PlainWorker:
    def __init__(self, name: str, logs: str):
        setup_worker_process(name, logs)
        self.values: list[str] = []
        print(f"{name} says hello", flush=True)

    def echo(self, value: Any) -> Any:
        return value

    def remember(self, value: str) -> str:
        self.values.append(value)
        return value

    def remembered(self) -> list[str]:
        return self.values

    def fail(self, error: Exception) -> None:
        raise error

    def die(self) -> None:
        os._exit(3)

    def die_once(self, flag: str) -> int:
        if not os.path.exists(flag):
            open(flag, "w").close()
            os._exit(3)
        return os.getpid()

    def hang_forever(self) -> None:
        time.sleep(1000)


class ConfiguredWorker(PlainWorker):
    """Takes the arguments that a run gives to its workers."""

    def __init__(self, config: Config, index: int, logs: str):
        super().__init__(f"a-{index}", logs)


class FailsInConstructor(PlainWorker):
    def __init__(self, name: str, logs: str):
        raise ValueError("no such weights")


class RecordingWatchdog(Watchdog):
    def __init__(self, logs: Path, **settings: Any):
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []
        super().__init__(
            logs, note=self.notes.append, event=lambda kind, **facts: self.events.append(facts), **settings
        )
