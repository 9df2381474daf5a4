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
from rlsys.config.schema import Config
from rlsys.config.secrets import redact_nested, resolve_env
from rlsys.errors import ConfigError, StepAbandoned, WorkerLost
from rlsys.tracking.builtin import TRACKERS
from rlsys.tracking.follower import Follower, LineReader
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo, Tracker

HANGS_S = 120.0  # a longer call to a tracker is reported
END_S = 20.0  # how long the end of a run waits for trackers
MakeTracker = Callable[[RunInfo], Tracker]


class Tracking:
    """`with Tracking(config, run.path, note, event) as t: …; t.start(0); …`. At the end, trackers get what is left."""

    def __init__(
        self,
        config: Config,
        run: Path,
        note: Callable[[str], None],
        record_event: Callable[..., None],
    ):
        """Raises `ConfigError` if a user's own tracker cannot be loaded."""
        self.config, self.run, self.note, self.record_event = config, run, note, record_event
        self.makers: dict[str, MakeTracker] = {
            name: functools.partial(make_tracker, name, load_function(t.tracker, TRACKERS, "tracking.to"), t.options)
            for name, t in config.tracking.to.items()
        }
        self.followers: list[Follower] = []
        self.ended = threading.Event()

    def add_tracker(self, name: str, make: MakeTracker) -> None:
        """Adds a tracker that the configuration does not name."""
        self.makers[name] = make

    def start(self, kept_step: int) -> None:
        """Starts the trackers as the run begins or continues. Lines up to `kept_step` stay; later ones are repeated."""
        if not self.makers:
            return
        sent_steps = SentSteps(self.run)
        options: dict[str, Any] = redact_nested(flatten(self.config))
        run_info = RunInfo(sent_steps.run_id, self.run.name, self.run, options, first_step=0, resumed=False)
        for name, make in self.makers.items():
            samples = self.config.tracking.samples
            follower = Follower(
                name, make, run_info, kept_step, samples, sent_steps, self.note_tracking, self.record_event
            )
            self.followers.append(follower)
            follower.start()
        threading.Thread(target=self.report_hanging, name="tracking", daemon=True).start()

    def note_tracking(self, text: str) -> None:
        self.note(f"tracking: {text}")

    def report_hanging(self) -> None:
        """Reports each tracker that hangs, once."""
        reported: set[str] = set()
        while not self.ended.wait(min(5.0, HANGS_S / 4)):
            for f in self.followers:
                since = f.busy_since
                if since and time.monotonic() - since > HANGS_S and f.tracker_name not in reported:
                    reported.add(f.tracker_name)
                    self.record_event(
                        "tracker hangs", tracker=f.tracker_name, step=f.last_step, seconds=round(HANGS_S, 1)
                    )
                    self.note_tracking(
                        f"{f.tracker_name} has not answered for {HANGS_S:.0f} s. The run goes on; "
                        "what it misses it gets when it answers, or when the run is started again."
                    )

    def end(self, how: str, wait_s: float) -> None:
        """Gives trackers what is left, and up to `wait_s` seconds to send it."""
        self.ended.set()
        for f in self.followers:
            f.outcome = how
            f.run_ended.set()
        deadline = time.monotonic() + wait_s
        for f in self.followers:
            f.join(max(0.0, deadline - time.monotonic()))
            if f.is_alive():
                self.record_event("tracker is late", tracker=f.tracker_name, step=f.last_step)
                self.note_tracking(
                    f"{f.tracker_name} has steps up to {f.last_step}, and was not done within {wait_s:.0f} s. "
                    f"`rlsys track {self.run}` sends the rest"
                )

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends tracking. A run that was stopped, or lost a worker, is continued later: it waits only briefly."""
        continues = isinstance(error, StepAbandoned | WorkerLost | KeyboardInterrupt)
        lines = LineReader(self.run / "metrics.jsonl").read_new()
        done = bool(lines) and lines[-1]["step"] >= self.config.trainer.steps
        how = "failed" if error and not continues else "done" if done else "stopped"
        self.end(how, 3.0 if continues else END_S)


def make_tracker(name: str, function: Callable[..., Tracker], options: dict[str, Any], run_info: RunInfo) -> Tracker:
    """Makes a tracker. Raises `ConfigError` if a user's function returns something else."""
    tracker = function(run_info, **resolve_env(options))
    if not isinstance(tracker, Tracker):
        kind = type(tracker).__name__
        raise ConfigError(
            f"tracking.to.{name} gave a {kind}; it must give a Tracker (from rlsys.tracking import Tracker)"
        )
    return tracker
