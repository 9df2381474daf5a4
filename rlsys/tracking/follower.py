"""Follows a run by its files, and tells one tracker. Nothing waits for it, and nothing is lost while it cannot tell.

    metrics.jsonl ──a line that is whole──▶ follower ──step──▶ tracker ──▶ tracking.json: how far it is
    samples/eval-000010.parquet ──────────▶          ──samples──▶
    events.jsonl ──those since it began───▶          ──event──▶

A tracker that raises is made anew later, and goes on where it was: the files have what it missed.
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

from rlsys.config.schema import ConfigError
from rlsys.config.secrets import redact
from rlsys.tracking.sent_steps import SentSteps
from rlsys.tracking.tracker import RunInfo, Tracker

POLL_S = 0.5  # between two looks at the files
RETRY_S = (30.0, 600.0)  # before a tracker that failed is tried again: at first, and at most
SAMPLES_S = 30.0  # in which the samples of an evaluation are expected after its line


class Follower(threading.Thread):
    def __init__(
        self,
        name: str,
        make: Callable[[RunInfo], Tracker],
        told: RunInfo,
        kept: int,
        samples: int,
        memory: SentSteps,
        say: Callable[[str], None],
        event: Callable[..., None],
    ):
        """`kept` is the last step whose line stays: what comes after it is done again."""
        super().__init__(name=f"tracking {name}", daemon=True)
        self.tracker_name, self.make, self.run_info, self.samples = name, make, told, samples
        self.memory, self.note, self.record_event = memory, say, event
        self.kept_step = kept
        self.run_ended = threading.Event()
        self.outcome = ""
        self.busy_since: float | None = None  # when the call began that it is in
        self.failures = 0
        self.events = LineReader(told.path / "events.jsonl", from_end=True)

    @property
    def last_step(self) -> int:
        """The last step that the tracker has."""
        last = self.memory.last_step(self.tracker_name)
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
                return self.note(
                    f"{self.tracker_name} has steps up to {self.last_step}; `rlsys track {self.run_info.path}` sends the rest"
                )
            self.failures += 1
            self.run_ended.wait(wait)  # at the end it is tried once more, at once

    def follow_run(self) -> None:
        """From where the tracker is to the end of the run."""
        had = self.memory.last_step(self.tracker_name)
        tracker = self.start_tracker(had)
        lines = LineReader(self.run_info.path / "metrics.jsonl")
        while True:
            ending = self.run_ended.is_set()  # before the last look
            for event in self.events.read_new():
                with self.busy():
                    tracker.event(event)
            for line in lines.read_new():
                if line["step"] > self.last_step:
                    self.send_step(tracker, line)
            with self.busy():
                if ending:
                    return tracker.end(self.outcome)
                tracker.look()
            self.run_ended.wait(POLL_S)

    def start_tracker(self, had: int | None) -> Tracker:
        first = min(self.last_step, self.kept_step) + 1
        with self.busy():
            tracker = self.make(replace(self.run_info, first_step=first, resumed=had is not None))
        if had is not None and had > self.kept_step:
            if tracker.overwrites:
                self.memory.record(self.tracker_name, self.kept_step)
            else:
                self.note(
                    f"{self.tracker_name} keeps what it has of steps {self.kept_step + 1} to {had}, which are done again"
                )
        self.kept_step = sys.maxsize  # from here on nothing is done again
        if had is None:
            self.memory.record(self.tracker_name, -1)
        return tracker

    def send_step(self, tracker: Tracker, line: dict[str, Any]) -> None:
        step = line["step"]
        figures = {name: value for name, value in line.items() if name != "step"}
        evaluated = any(name.startswith("eval/") for name in figures)
        rows = self.eval_samples(step) if self.samples and evaluated else []
        with self.busy():
            if rows:
                tracker.samples(step, rows)
            tracker.step(step, figures)
        self.memory.record(self.tracker_name, step)
        if self.failures:
            self.note(f"{self.tracker_name} goes on, with step {step}")
            self.failures = 0

    def eval_samples(self, step: int) -> list[dict[str, Any]]:
        """The first completions of an evaluation's first prompts; its file comes a little later than its line."""
        file, until = self.run_info.path / "samples" / f"eval-{step:06d}.parquet", time.monotonic() + SAMPLES_S
        while True:
            last_look = self.run_ended.is_set() or time.monotonic() > until
            if file.is_file():
                return read_first_samples(file, self.samples)
            if last_look:
                return []
            self.run_ended.wait(POLL_S)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.busy_since = time.monotonic()
        try:
            yield
        finally:
            self.busy_since = None

    def report_failure(self, error: Exception, then: str) -> None:
        """A line on the screen, the first time; all of it in events.jsonl."""
        where = f"after step {self.last_step}" if self.last_step >= 0 else "at its start"
        said = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        first = " ".join(redact(said).split())[:300].rstrip(": ")
        with contextlib.suppress(OSError):  # a full disk is the run's trouble, and it says so
            self.record_event(
                "tracker failed",
                tracker=self.tracker_name,
                step=self.last_step,
                error=first,
                trace=traceback.format_exc(),
            )
        if not self.failures:
            self.note(f"{self.tracker_name} failed {where}: {first}. The run goes on. {then}")


class LineReader:
    """A .jsonl file that grows."""

    def __init__(self, file: Path, *, from_end: bool = False):
        self.file = file
        self.position = file.stat().st_size if from_end and file.is_file() else 0

    def read_new(self) -> list[dict[str, Any]]:
        """The lines that have come, as far as they are whole."""
        if not self.file.is_file() or self.file.stat().st_size <= self.position:
            return []
        with self.file.open("rb") as file:
            file.seek(self.position)
            whole = file.read().rpartition(b"\n")[0]
        self.position += len(whole) + bool(whole)
        found = []
        for text in whole.splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # cut off by a crash, and ended by who came after
                found.append(json.loads(text))
        return found


def read_first_samples(file: Path, prompts: int) -> list[dict[str, Any]]:
    """The first sample of each of the first prompts in a file of samples."""
    import pyarrow.parquet

    found: dict[str, dict[str, Any]] = {}
    for batch in pyarrow.parquet.ParquetFile(file).iter_batches(64, columns=["uid", "prompt", "completion", "reward"]):
        for row in batch.to_pylist():
            if row["uid"] not in found and len(found) == prompts:
                return list(found.values())
            found.setdefault(row["uid"], row)
    return list(found.values())
