"""Trackers as a user writes them: well, and badly. Each keeps what it was run_info in a file."""

import json
import os
import threading
import time
from pathlib import Path

from rlsys.tracking import RunInfo, Tracker

FREE = threading.Event()  # which a hanging tracker waits for


class LoggingTracker(Tracker):
    """A line for each call, in `file`."""

    def __init__(self, run_info: RunInfo, *, file: str, overwrites: bool = False):
        self.file, self.overwrites = Path(file), overwrites
        self.write(
            begin=run_info.id,
            name=run_info.name,
            first=run_info.first_step,
            started=run_info.resumed,
            config=dict(run_info.config),
        )

    def write(self, **facts):
        with self.file.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def step(self, step, metrics):
        self.write(step=step, metrics=metrics)

    def samples(self, step, rows):
        self.write(samples=step, rows=rows)

    def event(self, event):
        self.write(event=event["event"])

    def end(self, how):
        self.write(end=how)


class RaisingTracker(LoggingTracker):
    """Takes step 1 only at the second attempt."""

    attempts = 0

    def step(self, step, metrics):
        RaisingTracker.attempts += step == 1
        if step == 1 and RaisingTracker.attempts == 1:
            raise ConnectionError(f"no route to {os.environ['SERVICE']}")
        super().step(step, metrics)


class BrokenTracker(LoggingTracker):
    """Never takes anything."""

    def step(self, step, metrics):
        raise ConnectionError("no route")


class HangingTracker(LoggingTracker):
    """Takes step 1 only when it is let."""

    def step(self, step, metrics):
        if step == 1:
            FREE.wait()
        super().step(step, metrics)


class SlowTracker(LoggingTracker):
    def step(self, step, metrics):
        time.sleep(1)
        super().step(step, metrics)


def not_there(run_info: RunInfo, *, file: str) -> Tracker:
    raise OSError("no such service")


def no_tracker(run_info: RunInfo, *, file: str) -> str:
    return file
