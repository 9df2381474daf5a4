"""All trackers of a run."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rlsys.config.loading import flatten
from rlsys.config.plugins import find
from rlsys.config.schema import Config, ConfigError
from rlsys.config.secrets import cleared, given
from rlsys.runs.errors import Abandoned, WorkerLost
from rlsys.tracking.follower import Follower, Lines
from rlsys.tracking.known import TRACKERS
from rlsys.tracking.memory import Memory
from rlsys.tracking.tracker import Told, Tracker

HANGS_S = 120.0  # a call to a tracker that takes longer is told of
END_S = 20.0  # what the end of a run waits for trackers
Make = Callable[[Told], Tracker]


class Tracking:
    """`with Tracking(config, run.path, note, event) as t: …; t.begin(0); …` and at its end trackers get what is left."""

    def __init__(
        self,
        config: Config,
        run: Path,
        note: Callable[[str], None],
        event: Callable[..., None],
    ):
        """Raises `ConfigError` where a user's own tracker cannot be had."""
        self.config, self.run, self.note, self.event = config, run, note, event
        self.makes: dict[str, Make] = {
            name: functools.partial(made, name, find(t.tracker, TRACKERS, "tracking.to"), t.options)
            for name, t in config.tracking.to.items()
        }
        self.followers: list[Follower] = []
        self.over = threading.Event()

    def add(self, name: str, make: Make) -> None:
        """One that is there without being asked for."""
        self.makes[name] = make

    def begin(self, kept: int) -> None:
        """The run begins, or goes on: lines up to step `kept` stay as they are, others are still to come."""
        if not self.makes:
            return
        memory = Memory(self.run)
        facts: dict[str, Any] = cleared(flatten(self.config))
        told = Told(memory.id, self.run.name, self.run, facts, first=0, started=False)
        for name, make in self.makes.items():
            samples = self.config.tracking.samples
            follower = Follower(name, make, told, kept, samples, memory, self.say, self.event)
            self.followers.append(follower)
            follower.start()
        threading.Thread(target=self.watch, name="tracking", daemon=True).start()

    def say(self, text: str) -> None:
        self.note(f"tracking: {text}")

    def watch(self) -> None:
        """Tells once of a tracker that hangs."""
        told: set[str] = set()
        while not self.over.wait(min(5.0, HANGS_S / 4)):
            for f in self.followers:
                since = f.busy_since
                if since and time.monotonic() - since > HANGS_S and f.tracker_name not in told:
                    told.add(f.tracker_name)
                    self.event("tracker hangs", tracker=f.tracker_name, step=f.last, seconds=round(HANGS_S, 1))
                    self.say(
                        f"{f.tracker_name} has not answered for {HANGS_S:.0f} s. The run goes on; what it misses it gets when it answers, "
                        "or when the run is started again."
                    )

    def end(self, how: str, wait_s: float) -> None:
        """Gives trackers what is left, and some time to send it."""
        self.over.set()
        for f in self.followers:
            f.how = how
            f.over.set()
        until = time.monotonic() + wait_s
        for f in self.followers:
            f.join(max(0.0, until - time.monotonic()))
            if f.is_alive():
                self.event("tracker is late", tracker=f.tracker_name, step=f.last)
                self.say(
                    f"{f.tracker_name} has steps up to {f.last}, and was not done within {wait_s:.0f} s. "
                    f"`rlsys track {self.run}` sends the rest"
                )

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that was stopped, or has lost a worker, goes on later: no time is lost then."""
        goes_on = isinstance(error, Abandoned | WorkerLost | KeyboardInterrupt)
        lines = Lines(self.run / "metrics.jsonl").new()
        done = bool(lines) and lines[-1]["step"] >= self.config.trainer.steps
        how = "failed" if error and not goes_on else "done" if done else "stopped"
        self.end(how, 3.0 if goes_on else END_S)


def made(name: str, function: Callable[..., Tracker], options: dict[str, Any], told: Told) -> Tracker:
    tracker = function(told, **given(options))
    if not isinstance(tracker, Tracker):
        kind = type(tracker).__name__
        raise ConfigError(
            f"tracking.to.{name} gave a {kind}; it must give a Tracker (from rlsys.tracking import Tracker)"
        )
    return tracker
