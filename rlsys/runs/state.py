"""The progress of a run, which a checkpoint keeps besides weights, optimizer and batches."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from rlsys.runs.best_step import BestStep
from rlsys.runs.skipped_updates import SkippedInARow
from rlsys.types import Batch, Metrics


@dataclass(frozen=True)
class RunState:
    """The run after its last finished step. `RunState(step=40, position=640, kl_coef=0.01)`"""

    step: int = 0  # the last one whose update is done; also the version of the weights
    position: int = 0  # in the training data, behind the batch of `step`
    deferred: tuple[int, ...] = ()  # positions before it whose prompts come in a later batch
    kl_coef: float = 0.0
    pending_metrics: Metrics = field(default_factory=dict)  # of `step`, whose evaluation is still to run
    best: BestStep = field(default_factory=BestStep)
    policy_skips: SkippedInARow = field(default_factory=SkippedInARow)
    critic_skips: SkippedInARow = field(default_factory=SkippedInARow)

    def after(self, step: int, batch: Batch, **changes: Any) -> "RunState":
        """Returns the state once `step` has been trained on `batch`."""
        return dataclasses.replace(self, step=step, position=batch.position, deferred=batch.deferred, **changes)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        """Raises TypeError or KeyError for what `to_json` did not write."""
        return cls(
            **values
            | {
                "deferred": tuple(values["deferred"]),
                "best": BestStep(**values["best"]),
                "policy_skips": SkippedInARow(**values["policy_skips"]),
                "critic_skips": SkippedInARow(**values["critic_skips"]),
            }
        )
