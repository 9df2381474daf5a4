"""What a run reports while it goes on: on the screen, in metrics.jsonl, events.jsonl and samples/, to trackers."""

from collections.abc import Callable
from typing import Any, Protocol

from rlsys.runs.directory import RunDirectory
from rlsys.types import Batch, Columns, Floats, Metrics


class ProgressDisplay(Protocol):
    """What a person sees."""

    def step(self, step: int, metrics: Metrics) -> None: ...
    def note(self, text: str) -> None: ...
    def show_phase(self, phase: str) -> None: ...


class RunLog:
    def __init__(
        self, run: RunDirectory, progress: ProgressDisplay, start_trackers: Callable[[int], None] = lambda step: None
    ):
        """`start_trackers(step)` is called once, with the last step whose metrics are kept."""
        self.run, self.progress, self.start_trackers = run, progress, start_trackers
        self.note, self.show_phase = progress.note, progress.show_phase
        self.reported_failures: set[str] = set()

    def event(self, kind: str, **fields: Any) -> None:
        self.run.record_event(kind, **fields)

    def begin(self, step: int, *, kept_step: int, resumed: bool) -> None:
        """Removes the metrics of steps after `kept_step`, which will run again."""
        self.run.rewind_metrics(kept_step)
        self.event("resume" if resumed else "begin", step=step)
        self.start_trackers(kept_step)

    def metrics(self, step: int, metrics: Metrics) -> None:
        self.run.record_metrics({"step": step} | metrics)
        self.progress.step(step, metrics)

    def samples(
        self, name: str, batch: Batch, advantages: Floats | None = None, columns: Columns | None = None
    ) -> None:
        """Saves every sample of a step or an evaluation, in the background."""
        self.run.save_samples(name, batch, advantages, columns)

    def reward_failures(self, step: int, batch: Batch) -> None:
        """Reports the first failed verdict of each reason: one line on the screen, all of it in events.jsonl."""
        for _, verdict in batch.failed:
            if verdict.failure not in self.reported_failures:
                self.reported_failures.add(verdict.failure)
                first_line = verdict.detail.strip().partition("\n")[0]
                self.note(f"step {step}: a reward verdict failed ({verdict.failure}): {first_line}")
                self.event("reward failure", step=step, reason=verdict.failure, detail=verdict.detail)
