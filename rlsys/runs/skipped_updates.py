"""Updates skipped for a loss or gradient that is not finite: recorded, counted, and fatal after too many in a row."""

from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.types import Batch, Metrics

MAX_IN_A_ROW = 3


class RecordEvent(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class SkippedInARow:
    """How many updates were skipped since the last good one, and the first of them.

    SkippedInARow(2, "step 7, update 1: sample 3 of prompt zigzag:17#0")
    """

    count: int = 0
    first: str = ""


@dataclass(frozen=True)
class SkippedUpdates:
    """Handles skipped updates. Such an update left the weights as they were; its samples are in samples/."""

    record_event: RecordEvent

    def drop(
        self, step: int, batch: Batch, updates: list[Metrics], lr: str, before: SkippedInARow
    ) -> tuple[list[Metrics], SkippedInARow]:
        """Returns one model's good updates, and how many were skipped behind them. `lr` is the option to lower.

        Raises `FloatingPointError` after too many skipped in a row.
        """
        skipped = before
        for number, update in enumerate(updates, 1):
            if not update["skipped"]:
                skipped = SkippedInARow()
                continue
            sample = describe_sample(batch, update["first_bad_sample"])
            loss, norm = repr(update["loss"]), repr(update["grad_norm"])
            self.record_event(
                "skipped update", lr=lr, sample=sample, step=step, update=number, loss=loss, grad_norm=norm
            )
            skipped = SkippedInARow(skipped.count + 1, skipped.first or f"step {step}, update {number}: {sample}")
            if skipped.count > MAX_IN_A_ROW:
                raise FloatingPointError(self.explain(skipped, step, lr))
        return [update for update in updates if not update["skipped"]], skipped

    def explain(self, skipped: SkippedInARow, step: int, lr: str) -> str:
        return (
            f"{skipped.count} updates in a row had a loss or gradient that is not finite, and were skipped; "
            f"{MAX_IN_A_ROW} may be. It began at {skipped.first}; the step's samples are in "
            f"samples/step-{step:06d}.parquet. The last checkpoint is good. "
            f"A lower {lr} or policy.dtype=float32 may help."
        )


def describe_sample(batch: Batch, index: float) -> str:
    """Names the first sample whose loss is not finite, as samples/ does."""
    if index >= len(batch.samples):
        return "no single sample (each loss is finite, their gradient is not)"
    sample = batch.samples[int(index)]
    return f"sample {sample.index} of prompt {sample.uid}"
