"""Follows a run by its files, and passes it on to one tracker. Nothing waits for it, and nothing is lost by failures.

    metrics.jsonl ──complete line────────▶ follower ──step──▶ tracker ──▶ tracking.json: its last step
    samples/eval-000010.parquet ──────────▶          ──samples──▶
    events.jsonl ──those since it began───▶          ──event──▶

A tracker that raises an error is made again later, and continues where it was: the files have what it missed.
"""

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlsys.config.secrets import redact
from rlsys.errors import ConfigError
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo, Tracker

POLL_S = 0.5  # between two reads of the files
RETRY_S = (30.0, 600.0)  # first and longest pause before a failed tracker is tried again
SAMPLES_S = 30.0  # how long after its line the samples of an evaluation are waited for


class Follower(threading.Thread):
    def __init__(
        self,
        name: str,
        make: Callable[[RunInfo], Tracker],
        run_info: RunInfo,
        kept_step: int,
        samples: int,
        sent_steps: SentSteps,
        note: Callable[[str], None],
        record_event: Callable[..., None],
    ):
        """`kept_step` is the last step whose line stays: later steps are repeated."""
        super().__init__(name=f"tracking {name}", daemon=True)
        self.tracker_name, self.make, self.run_info, self.samples = name, make, run_info, samples
        self.sent_steps, self.note, self.record_event = sent_steps, note, record_event
        self.kept_step = kept_step
        self.run_ended = threading.Event()
        self.outcome = ""  # done, stopped or failed
        self.busy_since: float | None = None  # when the current call to the tracker began
        self.failures = 0
        self.events = LineReader(run_info.path / "events.jsonl", from_end=True)

    @property
    def last_step(self) -> int:
        """The last step that the tracker has; -1 for none."""
        last = self.sent_steps.last_step(self.tracker_name)
        return -1 if last is None else last

    def run(self) -> None:
        while True:
            ending = self.run_ended.is_set()
            wait = min(RETRY_S[0] * 2 ** min(self.failures, 10), RETRY_S[1])  # no float holds 2**1024
            try:
                return self.follow_run()
            except ConfigError as error:
                return self.report_failure(error, "This time it is left out.")
            except Exception as error:
                self.report_failure(error, f"It is tried again in {wait:.0f} s, and gets what it misses then.")
            if ending:
                command = f"`rlsys track {self.run_info.path}`"
                return self.note(f"{self.tracker_name} has steps up to {self.last_step}; {command} sends the rest")
            self.failures += 1
            self.run_ended.wait(wait)  # when the run ends, it is tried once more at once

    def follow_run(self) -> None:
        """Sends everything from the tracker's last step to the end of the run."""
        tracker = self.start_tracker()
        lines = LineReader(self.run_info.path / "metrics.jsonl")
        while True:
            ending = self.run_ended.is_set()  # asked before the files are read for the last time
            for event in self.events.read_new():
                with self.busy():
                    tracker.event(event)
            for line in lines.read_new():
                if line["step"] > self.last_step:
                    self.send_step(tracker, line)
            with self.busy():
                if ending:
                    return tracker.end(self.outcome)
                tracker.poll()
            self.run_ended.wait(POLL_S)

    def start_tracker(self) -> Tracker:
        """Makes the tracker, and settles what happens to steps that it has and that are repeated."""
        last_sent = self.sent_steps.last_step(self.tracker_name)
        first = min(self.last_step, self.kept_step) + 1
        with self.busy():
            tracker = self.make(replace(self.run_info, first_step=first, resumed=last_sent is not None))
        if last_sent is not None and last_sent > self.kept_step:
            if tracker.overwrites:
                self.sent_steps.record(self.tracker_name, self.kept_step)
            else:
                steps = f"steps {self.kept_step + 1} to {last_sent}"
                self.note(f"{self.tracker_name} keeps what it has of {steps}, which are done again")
        self.kept_step = sys.maxsize  # from here on no step is repeated
        if last_sent is None:
            self.sent_steps.record(self.tracker_name, -1)
        return tracker

    def send_step(self, tracker: Tracker, line: dict[str, Any]) -> None:
        step = line["step"]
        metrics = {name: value for name, value in line.items() if name != "step"}
        evaluated = any(name.startswith("eval/") for name in metrics)
        rows = self.eval_samples(step) if self.samples and evaluated else []
        with self.busy():
            if rows:
                tracker.samples(step, rows)
            tracker.step(step, metrics)
        self.sent_steps.record(self.tracker_name, step)
        if self.failures:
            self.note(f"{self.tracker_name} goes on, with step {step}")
            self.failures = 0

    def eval_samples(self, step: int) -> list[dict[str, Any]]:
        """Returns the first completions of an evaluation's first prompts. Its file comes a little after its line."""
        file, deadline = self.run_info.path / "samples" / f"eval-{step:06d}.parquet", time.monotonic() + SAMPLES_S
        while True:
            last_try = self.run_ended.is_set() or time.monotonic() > deadline
            if file.is_file():
                return read_first_samples(file, self.samples)
            if last_try:
                return []
            self.run_ended.wait(POLL_S)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.busy_since = time.monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def report_failure(self, error: Exception, next_step: str) -> None:
        """Notes the first failure in a line on the screen, and records each one in events.jsonl."""
        moment = f"after step {self.last_step}" if self.last_step >= 0 else "at its start"
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        problem = " ".join(redact(text).split())[:300].rstrip(": ")
        with contextlib.suppress(OSError):  # the run itself reports a full disk
            self.record_event(
                "tracker failed",
                tracker=self.tracker_name,
                step=self.last_step,
                error=problem,
                trace=traceback.format_exc(),
            )
        if not self.failures:
            self.note(f"{self.tracker_name} failed {moment}: {problem}. The run goes on. {next_step}")


class LineReader:
    """A .jsonl file that grows."""

    def __init__(self, file: Path, *, from_end: bool = False):
        self.file = file
        self.position = file.stat().st_size if from_end and file.is_file() else 0

    def read_new(self) -> list[dict[str, Any]]:
        """Returns the complete lines that were added since the last call."""
        if not self.file.is_file() or self.file.stat().st_size <= self.position:
            return []
        with self.file.open("rb") as file:
            file.seek(self.position)
            whole = file.read().rpartition(b"\n")[0]
        self.position += len(whole) + bool(whole)
        lines = []
        for text in whole.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a line that a crash cut off
                lines.append(json.loads(text))
        return lines


def read_first_samples(file: Path, prompts: int) -> list[dict[str, Any]]:
    """Returns the first sample of each of the first prompts in a file of samples."""
    import pyarrow.parquet

    by_uid: dict[str, dict[str, Any]] = {}
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(64, columns=["uid", "prompt", "completion", "reward"]):
        for row in batch.to_pylist():
            if row["uid"] not in by_uid and len(by_uid) == prompts:
                return list(by_uid.values())
            by_uid.setdefault(row["uid"], row)
    return list(by_uid.values())
