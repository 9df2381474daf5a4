"""All trackers of a run."""

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rlsys.config.loading import flatten
from rlsys.config.plugins import load_function
from rlsys.config.schema import Config, ConfigError
from rlsys.config.secrets import redact_nested, resolve_env
from rlsys.runs.errors import StepAbandoned, WorkerLost
from rlsys.tracking.builtin import TRACKERS
from rlsys.tracking.follower import Follower, LineReader
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo, Tracker

HANGS_S = 120.0  # a call to a tracker that takes longer is told of
END_S = 20.0  # what the end of a run waits for trackers
MakeTracker = Callable[[RunInfo], Tracker]


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
        self.makes: dict[str, MakeTracker] = {
            name: functools.partial(make_tracker, name, load_function(t.tracker, TRACKERS, "tracking.to"), t.options)
            for name, t in config.tracking.to.items()
        }
        self.followers: list[Follower] = []
        self.ended = threading.Event()

    def add_tracker(self, name: str, make: MakeTracker) -> None:
        """One that is there without being asked for."""
        self.makes[name] = make

    def start(self, kept: int) -> None:
        """The run begins, or goes on: lines up to step `kept` stay as they are, others are still to come."""
        if not self.makes:
            return
        memory = SentSteps(self.run)
        facts: dict[str, Any] = redact_nested(flatten(self.config))
        told = RunInfo(memory.run_id, self.run.name, self.run, facts, first_step=0, resumed=False)
        for name, make in self.makes.items():
            samples = self.config.tracking.samples
            follower = Follower(name, make, told, kept, samples, memory, self.note_tracking, self.event)
            self.followers.append(follower)
            follower.start()
        threading.Thread(target=self.report_hanging, name="tracking", daemon=True).start()

    def note_tracking(self, text: str) -> None:
        self.note(f"tracking: {text}")

    def report_hanging(self) -> None:
        """Tells once of a tracker that hangs."""
        told: set[str] = set()
        while not self.ended.wait(min(5.0, HANGS_S / 4)):
            for f in self.followers:
                since = f.busy_since
                if since and time.monotonic() - since > HANGS_S and f.tracker_name not in told:
                    told.add(f.tracker_name)
                    self.event("tracker hangs", tracker=f.tracker_name, step=f.last_step, seconds=round(HANGS_S, 1))
                    self.note_tracking(
                        f"{f.tracker_name} has not answered for {HANGS_S:.0f} s. The run goes on; what it misses it gets when it answers, "
                        "or when the run is started again."
                    )

    def end(self, how: str, wait_s: float) -> None:
        """Gives trackers what is left, and some time to send it."""
        self.ended.set()
        for f in self.followers:
            f.outcome = how
            f.run_ended.set()
        until = time.monotonic() + wait_s
        for f in self.followers:
            f.join(max(0.0, until - time.monotonic()))
            if f.is_alive():
                self.event("tracker is late", tracker=f.tracker_name, step=f.last_step)
                self.note_tracking(
                    f"{f.tracker_name} has steps up to {f.last_step}, and was not done within {wait_s:.0f} s. "
                    f"`rlsys track {self.run}` sends the rest"
                )

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run that was stopped, or has lost a worker, goes on later: no time is lost then."""
        goes_on = isinstance(error, StepAbandoned | WorkerLost | KeyboardInterrupt)
        lines = LineReader(self.run / "metrics.jsonl").read_new()
        done = bool(lines) and lines[-1]["step"] >= self.config.trainer.steps
        how = "failed" if error and not goes_on else "done" if done else "stopped"
        self.end(how, 3.0 if goes_on else END_S)


def make_tracker(name: str, function: Callable[..., Tracker], options: dict[str, Any], told: RunInfo) -> Tracker:
    tracker = function(told, **resolve_env(options))
    if not isinstance(tracker, Tracker):
        kind = type(tracker).__name__
        raise ConfigError(
            f"tracking.to.{name} gave a {kind}; it must give a Tracker (from rlsys.tracking import Tracker)"
        )
    return tracker
