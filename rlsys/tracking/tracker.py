"""The interface of a tracker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsys.types import Metrics


@dataclass(frozen=True)
class RunInfo:
    """What a tracker knows about the run.

    `RunInfo("demo-3f9a01c2", "demo", Path("runs/demo"), {"policy.lr": 1e-6, …}, first_step=31, resumed=True)`
    """

    id: str  # the same when the run is continued
    name: str  # of its directory
    path: Path  # the run directory
    config: Mapping[str, Any]  # every option by its dotted name; secrets are redacted
    first_step: int  # that the tracker will get
    resumed: bool  # whether this tracker was started in this run before


class Tracker:
    """Sends metrics somewhere. It has a thread of its own, so it may be slow, and it may raise errors.

    A user's own tracker is a function that gets the `RunInfo`, and its options by name, and returns a `Tracker`.
    """

    overwrites = False  # whether a repeated step replaces the earlier one; if not, it is not sent again

    def step(self, step: int, metrics: Metrics) -> None:
        """Takes a line of metrics.jsonl. Steps come in order, each once."""
        raise NotImplementedError(f"{type(self).__name__} must have a method `step(step, metrics)`.")

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Takes the first completions of an evaluation's first prompts, before its metrics.

        Each row has `uid`, `prompt`, `completion` and `reward`.
        """

    def event(self, event: dict[str, Any]) -> None:
        """Takes a line of events.jsonl that was written after the tracker was started."""

    def poll(self) -> None:
        """Is called about twice a second, for what changes between two steps."""

    def end(self, how: str) -> None:
        """Sends what is left, as the run ends. `how` is `done`, `stopped` (it may be continued) or `failed`."""
