"""Updates that were skipped because a loss or a gradient was not finite: told, counted, and after too many in a row the end."""

from dataclasses import dataclass
from typing import Any, Protocol

from rlsys.types import Batch, Metrics


class RecordEvent(Protocol):
    def __call__(self, kind: str, **facts: Any) -> None: ...


@dataclass
class SkippedUpdates:
    """Of one model. Weights stay as they were before such an update; its samples are in the step's file in samples/."""

    max_in_a_row: int  # in a row
    lr: str  # the option to lower
    event: RecordEvent
    in_a_row: int = 0
    first: str = ""  # where the row began

    def drop_skipped(self, step: int, batch: Batch, updates: list[Metrics]) -> list[Metrics]:
        """The updates that were made. Raises `FloatingPointError` when too many in a row were not."""
        for number, update in enumerate(updates, 1):
            if not update["skipped"]:
                self.in_a_row, self.first = 0, ""
                continue
            sample = describe_sample(batch, update["first_bad_sample"])
            where = f"step {step}, update {number}: {sample}"
            facts = {
                "step": step,
                "update": number,
                "loss": repr(update["loss"]),
                "grad_norm": repr(update["grad_norm"]),
            }
            self.event("skipped update", lr=self.lr, sample=sample, **facts)
            self.in_a_row, self.first = self.in_a_row + 1, self.first or where
            if self.in_a_row > self.max_in_a_row:
                raise FloatingPointError(
                    f"{self.in_a_row} updates in a row had a loss or gradient that is not finite, and were skipped; "
                    f"trainer.max_skipped is {self.max_in_a_row}. It began at {self.first}; the step's samples are in "
                    f"samples/step-{step:06d}.parquet. The last checkpoint is good. A lower {self.lr} or policy.dtype=float32 may help."
                )
        return [update for update in updates if not update["skipped"]]


def describe_sample(batch: Batch, index: float) -> str:
    """The first sample whose loss is not finite, as samples/ calls it."""
    if index >= len(batch.samples):
        return "no single sample (each loss is finite, their gradient is not)"
    sample = batch.samples[int(index)]
    return f"sample {sample.index} of prompt {sample.uid}"
