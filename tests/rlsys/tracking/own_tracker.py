"""Trackers as a user writes them: well, and badly. Each keeps what it was told in a file."""

import json
import os
import threading
import time
from pathlib import Path

from rlsys.tracking import RunInfo, Tracker

FREE = threading.Event()  # what a tracker that hangs waits for


class Kept(Tracker):
    """A line for each call, in `file`."""

    def __init__(self, told: RunInfo, *, file: str, overwrites: bool = False):
        self.file, self.overwrites = Path(file), overwrites
        self.write(begin=told.id, name=told.name, first=told.first_step, started=told.resumed, config=dict(told.config))

    def write(self, **facts):
        with self.file.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def step(self, step, figures):
        self.write(step=step, figures=figures)

    def samples(self, step, rows):
        self.write(samples=step, rows=rows)

    def event(self, event):
        self.write(event=event["event"])

    def end(self, how):
        self.write(end=how)


class Raising(Kept):
    """Takes step 1 only at the second attempt."""

    attempts = 0

    def step(self, step, figures):
        Raising.attempts += step == 1
        if step == 1 and Raising.attempts == 1:
            raise ConnectionError(f"no route to {os.environ['SERVICE']}")
        super().step(step, figures)


class Broken(Kept):
    """Never takes anything."""

    def step(self, step, figures):
        raise ConnectionError("no route")


class Hanging(Kept):
    """Takes step 1 only when it is let."""

    def step(self, step, figures):
        if step == 1:
            FREE.wait()
        super().step(step, figures)


class Slow(Kept):
    def step(self, step, figures):
        time.sleep(1)
        super().step(step, figures)


def not_there(told: RunInfo, *, file: str) -> Tracker:
    raise OSError("no such service")


def no_tracker(told: RunInfo, *, file: str) -> str:
    return file
